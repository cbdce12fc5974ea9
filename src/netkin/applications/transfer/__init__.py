"""Transfer: which pretrained model to start from, its accuracy without training, and the similarity of tasks."""

from netkin.applications.transfer.evidence import adaptation_score, layer_embeddings, mean_embedding_norm
from netkin.applications.transfer.fisher import (
    TaskEmbedding,
    fisher_rao_distance,
    fisher_rao_norm,
    task2vec,
    task2vec_distance,
)
from netkin.applications.transfer.recommend import recommend
from netkin.applications.transfer.ridge import KernelRidge, kernel_ridge, load_kernel_ridge
from netkin.applications.transfer.scores import SCORES, transfer_scores
from netkin.applications.transfer.tasks import compare_tasks, seed_values

__all__ = [
    "SCORES",
    "KernelRidge",
    "TaskEmbedding",
    "adaptation_score",
    "compare_tasks",
    "fisher_rao_distance",
    "fisher_rao_norm",
    "kernel_ridge",
    "layer_embeddings",
    "load_kernel_ridge",
    "mean_embedding_norm",
    "recommend",
    "seed_values",
    "task2vec",
    "task2vec_distance",
    "transfer_scores",
]
