"""Transfer: which pretrained model to start from for some data, and what it can do there without training."""

from netkin.applications.transfer.recommend import recommend
from netkin.applications.transfer.ridge import KernelRidge, kernel_ridge
from netkin.applications.transfer.scores import SCORES, transfer_scores

__all__ = ["SCORES", "KernelRidge", "kernel_ridge", "recommend", "transfer_scores"]
