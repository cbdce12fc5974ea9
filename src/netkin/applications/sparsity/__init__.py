"""Sparse networks: a loss that lowers the similarity of layers, masks, tickets, tokens, and what sparsity saves."""

from netkin.applications.sparsity.loss import CKASparsityLoss
from netkin.applications.sparsity.masks import (
    bake_masks,
    epsilon_sparsity,
    masks_of,
    prunable_layers,
    put_masks,
    save_sparse,
)
from netkin.applications.sparsity.sparse_training import DynamicMasks, Ticket, Tickets, lottery_tickets
from netkin.applications.sparsity.sparsify import sparsify
from netkin.applications.sparsity.sparsity_study import explain_sparsity_study, sparsity_study
from netkin.applications.sparsity.tokens import SparseTokens, TokenCosts, TokenLosses, sparsify_tokens, token_costs

__all__ = [
    "CKASparsityLoss",
    "DynamicMasks",
    "SparseTokens",
    "Ticket",
    "Tickets",
    "TokenCosts",
    "TokenLosses",
    "bake_masks",
    "epsilon_sparsity",
    "explain_sparsity_study",
    "lottery_tickets",
    "masks_of",
    "prunable_layers",
    "put_masks",
    "save_sparse",
    "sparsify",
    "sparsify_tokens",
    "sparsity_study",
    "token_costs",
]
