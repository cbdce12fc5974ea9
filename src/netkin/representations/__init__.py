"""Representations of models and data as batches of matrices: the layers, their outputs, and what one example is."""

from netkin.representations import shapes
from netkin.representations.activations import activations, gradients
from netkin.representations.cutting import replacing, run_from, run_until
from netkin.representations.hooks import inference_mode_of, recording
from netkin.representations.inputs import batches_of, model_precision
from netkin.representations.layer_recorder import Recorder
from netkin.representations.layers import layers
from netkin.representations.shapes import (
    cls,
    dft,
    flatten,
    last,
    mean,
    pool,
    positions,
    resize_to,
    rows_of,
    shape_for,
    tokens,
)
from netkin.settings import model_lock

__all__ = [
    "Recorder",
    "activations",
    "batches_of",
    "cls",
    "dft",
    "flatten",
    "gradients",
    "inference_mode_of",
    "last",
    "layers",
    "mean",
    "model_lock",
    "model_precision",
    "pool",
    "positions",
    "recording",
    "replacing",
    "resize_to",
    "rows_of",
    "run_from",
    "run_until",
    "shape_for",
    "shapes",
    "tokens",
]
