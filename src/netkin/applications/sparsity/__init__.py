"""Sparse networks: a loss that lowers the similarity of a network's layers."""

from netkin.applications.sparsity.loss import CKASparsityLoss

__all__ = ["CKASparsityLoss"]
