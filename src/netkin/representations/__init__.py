"""Things become batches of matrices: which layers, what they give, and what one example is."""

from netkin.representations.activations import Reader, activations
from netkin.representations.cutting import replacing, run_from, run_until
from netkin.representations.feeding import (
    batch_length,
    batches_of,
    call,
    device_of,
    dtype_of,
    feed,
    inputs_of,
    mask_of,
    prepared,
    take,
)
from netkin.representations.guests import guest
from netkin.representations.layers import choose, layers, modules, unwrapped
from netkin.representations.recording import recording
from netkin.representations.shapes import (
    cls,
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

__all__ = [
    "Reader",
    "activations",
    "batch_length",
    "batches_of",
    "call",
    "choose",
    "cls",
    "device_of",
    "dtype_of",
    "feed",
    "flatten",
    "guest",
    "inputs_of",
    "last",
    "layers",
    "mask_of",
    "mean",
    "modules",
    "pool",
    "positions",
    "prepared",
    "recording",
    "replacing",
    "resize_to",
    "rows_of",
    "run_from",
    "run_until",
    "shape_for",
    "take",
    "tokens",
    "unwrapped",
]
