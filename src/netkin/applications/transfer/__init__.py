"""Transfer: which pretrained model to start from for some data, and how alike tasks are."""

from netkin.applications.transfer.scores import SCORES, transfer_scores
from netkin.applications.transfer.tasks import compare_tasks, seed_values

__all__ = ["SCORES", "compare_tasks", "seed_values", "transfer_scores"]
