"""Transfer: which pretrained model to start from for some data."""

from netkin.applications.transfer.recommend import recommend
from netkin.applications.transfer.scores import SCORES, transfer_scores

__all__ = ["SCORES", "recommend", "transfer_scores"]
