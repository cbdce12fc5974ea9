"""Transfer: which pretrained model to start from for some data."""

from netkin.applications.transfer.scores import SCORES, transfer_scores

__all__ = ["SCORES", "transfer_scores"]
