"""netkin measures the similarity of neural networks, and applies it.

Names are imported on first access, so that `import netkin` is quick and needs no torch. `dir(netkin)` lists the names
in common use; the others (statistics, cutting, records) are attributes too. `nk.shapes` defines what an example is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that type checkers see what a measure takes and gives
    from netkin.measures import (  # isort: skip
        angular_cka as angular_cka,
        atom_angular as atom_angular,
        atom_cosine as atom_cosine,
        cca_mean as cca_mean,
        cca_mean_squared as cca_mean_squared,
        cca_rms as cca_rms,
        cka as cka,
        cka_debiased as cka_debiased,
        cka_debiased_by_sequence as cka_debiased_by_sequence,
        cka_minibatch as cka_minibatch,
        cka_rbf as cka_rbf,
        cka_rbf_debiased as cka_rbf_debiased,
        cka_uncentered as cka_uncentered,
        dft_cca as dft_cca,
        eigenspace_overlap as eigenspace_overlap,
        eigenspace_overlap_uncentered as eigenspace_overlap_uncentered,
        gaussian_mutual_information as gaussian_mutual_information,
        grassmann as grassmann,
        gulp as gulp,
        linear_regression_r2 as linear_regression_r2,
        magnitude_difference as magnitude_difference,
        measure as measure,
        nbs as nbs,
        nbs_uncentered as nbs_uncentered,
        procrustes_angular as procrustes_angular,
        procrustes_disparity as procrustes_disparity,
        procrustes_distance as procrustes_distance,
        procrustes_size_and_shape as procrustes_size_and_shape,
        pwcca as pwcca,
        shape_distance as shape_distance,
        svcca as svcca,
        svcca_by_sum as svcca_by_sum,
        svcca_directions as svcca_directions,
        svcca_k as svcca_k,
        weight_cosine as weight_cosine,
    )

__version__ = "0.1.0"

_ROOMS = {
    "netkin.comparing": [
        "Comparer", "ModelInput", "collect", "compare_many", "explain", "merge",
    ],
    "netkin.comparing.compare": ["compare"],
    "netkin.reporting": ["plot", "report"],
    "netkin.measures": [
        "angular_cka", "cca_mean", "cca_mean_squared", "cca_rms", "cka", "cka_debiased",
        "cka_minibatch", "cka_rbf",
        "cka_rbf_debiased", "cka_uncentered", "dft_cca", "eigenspace_overlap", "eigenspace_overlap_uncentered",
        "gaussian_mutual_information", "gulp",
        "linear_regression_r2", "magnitude_difference", "measure", "nbs", "nbs_uncentered",
        "procrustes_angular", "procrustes_disparity", "procrustes_distance", "procrustes_size_and_shape", "pwcca",
        "shape_distance", "svcca", "svcca_by_sum", "svcca_directions", "svcca_k",
    ],
    "netkin.representations": ["activations", "gradients", "layers", "shapes"],
    "netkin.results": ["Comparison", "Comparisons", "Ranking", "Series", "load"],
    "netkin.sources": ["load_data", "load_model", "recorded"],
    "netkin.training": ["Recipe", "train", "train_many"],
    "netkin.applications.interpretation": ["class_sensitivity"],
    "netkin.applications.compression": ["compress"],
    "netkin.applications.diff": ["diff"],
    "netkin.applications.federated": ["federate"],
    "netkin.applications.dynamics": ["DynamicsRecorder", "dynamics"],
    "netkin.applications.freezing": ["FreezeTraining"],
    "netkin.applications.stitching": ["stitch", "stitch_all", "stitch_many"],
    "netkin.applications.subspaces": ["atom_similarity"],
    "netkin.applications.transfer": ["compare_tasks", "recommend"],
    "netkin.errors": ["NetkinError"],
}  # fmt: skip
_UNLISTED = {
    "netkin.representations.filters": ["AtomConv2d", "Decomposed", "decompose", "freeze_except", "recompose"],
    "netkin.representations": [
        "cls", "dft", "flatten", "last", "mean", "pool", "positions", "recording", "replacing", "run_from",
        "run_until", "tokens",
    ],
    "netkin.measures": [
        "atom_angular", "atom_cosine", "cka_debiased_by_sequence", "grassmann", "weight_cosine",
        "kernel_cka", "kernel_cka_uncentered", "kernel_nbs", "sketched_cka", "sketched_cka_by_buckets",
        "sketched_cka_uncentered", "sketched_nbs",
    ],
    "netkin.statistics": [
        "Filters", "Grams", "Kernels", "LayerEmbeddings", "LayerFilters", "LayerGrams", "LayerKernels", "LayerMoments",
        "LayerRows", "LayerSketches", "LayerSpectra", "Moments", "Outputs", "Rows", "Sketch", "Spectra",
        "off_block_share",
    ],
    "netkin.applications.interpretation": [
        "aligned_neurons", "explain_class_sensitivity", "largest_neurons", "project", "random_neurons",
    ],
    "netkin.applications.federated": [
        "ClientSplit", "ClientUpdate", "Ensembles", "Federation", "adjusted_rand", "explain_federate", "plan_for",
        "similar_users_ensemble", "split_by_classes", "user_clusters", "user_similarity",
    ],
    "netkin.applications.compression": ["Compression", "explain_compress", "load_compressed", "save_compressed"],
    "netkin.applications.diff": ["DiffPlan", "explain_diff"],
    "netkin.applications.dynamics": ["RunPlan", "explain_dynamics"],
    "netkin.applications.stitching": [
        "Stitch", "StitchPlan", "TaskLoss", "barrier", "explain_stitch", "interpolate", "load_stitch"
    ],
    "netkin.jobs": ["Job"],
    "netkin.training": ["WorkPlan", "explain_train"],
    "netkin.applications.transfer": [
        "adaptation_score", "explain_compare_tasks", "explain_recommend", "explain_task_similarity",
        "fisher_rao_distance", "fisher_rao_norm", "kernel_ridge", "layer_embeddings",
        "mean_embedding_norm", "seed_values", "task2vec", "task2vec_cosine", "task2vec_distance",
        "task_similarity", "transfer_scores",
    ],
    "netkin.applications.subspaces": [
        "Decorrelation", "NearestNetworks", "Sharing", "nearest_networks", "share_coefficients",
    ],
    "netkin.applications.continual": [
        "LearntTasks", "Task", "TaskAccuracies", "TaskEnsembles", "ensemble_tasks", "explain_learn_tasks",
        "learn_tasks", "split_tasks",
    ],
    "netkin.applications.sparsity": [
        "CKASparsityLoss", "DynamicMasks", "SparseTokens", "TokenCosts", "TokenLosses", "bake_masks",
        "epsilon_sparsity", "explain_sparsity_study", "lottery_tickets", "save_sparse", "sparsify", "sparsify_tokens",
        "sparsity_study", "token_costs",
    ],
    "netkin.comparing": ["explain_many", "model_directions"],
    "netkin.comparing.engines.ray": ["Ray"],
    "netkin.errors": ["EmptyLayerWarning", "InflatedWarning", "NoValue", "PackageWarning", "UnsavedWarning"],
    "netkin.files": ["read_header"],
    "netkin.results": ["Diff", "SparsityStudy", "document"],
}  # fmt: skip
_LISTED = {name: room for room, names in _ROOMS.items() for name in names}
_HOME = _LISTED | {name: room for room, names in _UNLISTED.items() for name in names}

__all__ = ["__version__", *_LISTED]


def __getattr__(name: str) -> Any:
    if f"netkin.{name}" in {*_ROOMS, *_UNLISTED, "netkin.identity"}:
        return import_module(f"netkin.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'netkin' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
