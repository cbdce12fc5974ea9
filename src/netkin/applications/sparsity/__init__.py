"""Sparse networks: a loss that lowers the similarity of layers, and vision transformers that drop tokens."""

from netkin.applications.sparsity.loss import CKASparsityLoss
from netkin.applications.sparsity.tokens import SparseTokens, TokenCosts, TokenLosses, sparsify_tokens, token_costs

__all__ = ["CKASparsityLoss", "SparseTokens", "TokenCosts", "TokenLosses", "sparsify_tokens", "token_costs"]
