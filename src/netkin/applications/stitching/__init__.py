"""Stitching: the first layers of one network joined to the last layers of another, and what that shows about both."""

from netkin.applications.stitching.maps import METHODS, LinearMap, matched
from netkin.applications.stitching.evaluating import Evaluation
from netkin.applications.stitching.network import Stitch, load_stitch
from netkin.applications.stitching.stitch import StitchPlan, explain_stitch, fit_all, stitch, stitch_all, stitch_many
from netkin.applications.stitching.structure import Barrier, barrier, distance, interpolate, rank, sparsity
from netkin.applications.stitching.training import TaskLoss

__all__ = [
    "METHODS",
    "Barrier",
    "Evaluation",
    "LinearMap",
    "Stitch",
    "StitchPlan",
    "TaskLoss",
    "barrier",
    "distance",
    "explain_stitch",
    "fit_all",
    "interpolate",
    "load_stitch",
    "matched",
    "rank",
    "sparsity",
    "stitch",
    "stitch_all",
    "stitch_many",
]
