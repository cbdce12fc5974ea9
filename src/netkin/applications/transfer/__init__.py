"""Transfer: which pretrained model to start from for some data, and what it can do there without training."""

from netkin.applications.transfer.embeddings import adaptation_score, layer_embeddings, mean_embedding_norm
from netkin.applications.transfer.fisher import TaskEmbedding, task2vec, task2vec_distance
from netkin.applications.transfer.fisher_rao import fisher_rao_distance, fisher_rao_norm
from netkin.applications.transfer.ridge import KernelRidge, kernel_ridge, load_kernel_ridge
from netkin.applications.transfer.scores import SCORES, transfer_scores

__all__ = [
    "SCORES",
    "KernelRidge",
    "TaskEmbedding",
    "adaptation_score",
    "fisher_rao_distance",
    "fisher_rao_norm",
    "kernel_ridge",
    "layer_embeddings",
    "load_kernel_ridge",
    "mean_embedding_norm",
    "task2vec",
    "task2vec_distance",
    "transfer_scores",
]
