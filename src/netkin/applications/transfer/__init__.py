"""Transfer: which pretrained model to start from for some data."""

from netkin.applications.transfer.embeddings import adaptation_score, layer_embeddings, mean_embedding_norm
from netkin.applications.transfer.fisher import TaskEmbedding, task2vec, task2vec_distance
from netkin.applications.transfer.fisher_rao import fisher_rao_distance, fisher_rao_norm
from netkin.applications.transfer.scores import SCORES, transfer_scores

__all__ = [
    "SCORES",
    "TaskEmbedding",
    "adaptation_score",
    "fisher_rao_distance",
    "fisher_rao_norm",
    "layer_embeddings",
    "mean_embedding_norm",
    "task2vec",
    "task2vec_distance",
    "transfer_scores",
]
