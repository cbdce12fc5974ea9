"""Validation of inputs: arrays of NumPy, torch or DLPack become float matrices, labels tensors; others are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netkin.errors import InvalidValue, ShapeError
from netkin.settings import exact_products as exact_products

HALF = (torch.float16, torch.bfloat16)  # precisions
WIDE = (torch.int32, torch.int64, torch.uint32, torch.uint64)  # whole numbers that float32 can't keep apart
WITHOUT_ARITHMETIC = (torch.uint16, torch.uint32, torch.uint64)  # which torch can store, but not compare or sort
WITHOUT_FLOAT64 = ("mps",)  # devices


def as_tensor(array: Any, name: str = "X") -> Tensor:
    """Return `array` as a real floating tensor on its own device; half precision is raised to float32.

    Whole numbers of 32 bits and more become float64, which rounds those above 2⁵³.
    """
    tensor = array if isinstance(array, Tensor) else _imported(array, name)
    if tensor.is_complex():
        raise InvalidValue(
            f"`{name}` holds complex numbers ({_dtype(tensor)}); pass its real and imaginary parts instead.",
            argument=_argument(name),
        )
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(summing_dtype(tensor.device) if tensor.dtype in WIDE else torch.float32)


def as_matrix(array: Any, name: str = "X", *, check: bool = True) -> Tensor:
    """Return `array` as a float matrix with one row per example, free of NaN and Inf unless `check` is off."""
    tensor = as_tensor(array, name)
    if tensor.ndim != 2:
        raise ShapeError(
            f"`{name}` must be a matrix with one row per example; got shape {tuple(tensor.shape)}. "
            f"Choose what an example is first: `flatten({name})`, `pool({name})`, or `positions({name})`.",
            argument=_argument(name),
        )
    if 0 in tensor.shape:
        raise ShapeError(
            f"`{name}` is empty: shape {tuple(tensor.shape)}. Pass at least one example and one feature.",
            argument=_argument(name),
        )
    if check:
        require_finite(tensor, f"`{name}`")
    return tensor


def _argument(name: str) -> str | None:
    """Return the argument of that name; what a layer gave, as "a/conv1", is none."""
    return None if "/" in name else name


def resolution_of(array: Any, matrix: Tensor) -> float:
    """Return the rounding unit of the numbers in `array`; `matrix` is the converted array."""
    name = str(getattr(array, "dtype", "")).rpartition(".")[2]
    halves = {str(dtype).rpartition(".")[2]: dtype for dtype in HALF}
    return torch.finfo(halves.get(name, matrix.dtype)).eps


def as_maps(array: Any, name: str = "X") -> Tensor:
    """Return `array` as float feature maps, examples × channels × space; a matrix is a layer without space."""
    tensor = as_tensor(array, name)
    if tensor.ndim < 2:
        raise ShapeError(
            f"`{name}` must hold maps, n × channels × height × width; got shape {tuple(tensor.shape)}.",
            argument=_argument(name),
        )
    if 0 in tensor.shape:
        raise ShapeError(
            f"`{name}` is empty: shape {tuple(tensor.shape)}. Pass at least one example and one channel.",
            argument=_argument(name),
        )
    return tensor


def paired(X: Any, Y: Any, *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Return `X` and `Y` as float matrices that describe the same examples, row by row; `check` as in `as_matrix`."""
    X, Y = as_matrix(X, "X", check=check), as_matrix(Y, "Y", check=check)
    if len(X) != len(Y):
        raise ShapeError(
            f"`X` and `Y` must describe the same examples; got {len(X)} rows and {len(Y)} rows. "
            "Run both models on the same probe batch."
        )
    return X, to_device(Y, X.device)


def require_finite(tensor: Tensor, what: str) -> None:
    """Raise if `tensor` holds NaN or Inf, counting them; `what` names it in the sentence."""
    # one sum is enough to notice: it costs a read of the data, counting costs three
    if not torch.isfinite(tensor.detach().sum()):
        count = int((~torch.isfinite(tensor)).sum())
        if count:
            raise InvalidValue(
                f"{what} holds {count:,} NaN or Inf among {tensor.numel():,} values; "
                "fix the model or leave out the examples that cause them."
            )


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether no number of these is NaN or Inf, as one number, which is not waited for on a GPU.

    It costs a norm of each matrix, whose square overflows beyond 1e19 in float32: False is a doubt, to be looked into.
    """
    detached = [tensor.detach() for tensor in tensors]
    numbers = [tensor for tensor in detached if tensor.ndim == 0]
    numbers += torch._foreach_norm(matrices) if (matrices := [tensor for tensor in detached if tensor.ndim]) else []
    if not numbers:
        return torch.tensor(True)
    together = torch.stack([number.to(numbers[0].device) for number in numbers])
    return torch.isfinite(together).all()  # of each tensor alone it would be four kernels a tensor


def summing_dtype(device: torch.device) -> torch.dtype:
    """Return the precision in which sums are kept: float64 wherever the device has it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, in float32 where it is of float64 and the device has none."""
    return tensor.to(device, summing_dtype(device) if tensor.dtype == torch.float64 else tensor.dtype)


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Return a floating precision, or float32 where it is only half of that."""
    return torch.float32 if dtype in HALF else dtype


def _imported(array: Any, name: str) -> Tensor:
    if isinstance(array, np.ma.MaskedArray):
        require_unmasked(array, name)
    if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    try:
        matrix = plain_array(np.asarray(array))
    except ValueError as fault:
        raise InvalidValue(f"`{name}` can't be read as an array: {fault}.", argument=_argument(name)) from fault
    if matrix.dtype.kind not in "fiubc":
        raise InvalidValue(
            f"`{name}` must hold numbers; got {type(array).__name__} of dtype {matrix.dtype}.", argument=_argument(name)
        )
    if matrix.dtype.kind == "u" and matrix.dtype.itemsize > 1:
        matrix = matrix.astype(np.float64)
    # torch shares memory with the array; a read-only or reversed one must be copied first
    return torch.from_numpy(matrix if matrix.flags.writeable and min(matrix.strides, default=0) >= 0 else matrix.copy())


def plain_array(array: Any) -> Any:
    """Return an array of NumPy in a form that torch takes: this machine's byte order, and float64 for long doubles.

    Anything else is returned as it is.
    """
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def label_tensor(labels: Any, device: torch.device | None = None) -> Tensor:
    """Return labels, numbers in a tensor, an array or a list, as a tensor; texts and other objects are refused.

    Unsigned numbers of 16 bits and more become int64, with which torch can calculate.

    Example:
        >>> label_tensor([3, 1])
        tensor([3, 1])
    """
    try:
        tensor = torch.as_tensor(plain_array(labels), device=device)
    except (TypeError, ValueError, RuntimeError) as fault:
        label = labels
        while isinstance(label, (list, tuple, np.ndarray)) and np.ndim(label) and len(label):
            label = label[0]
        kind = f"texts, such as {str(label)!r}" if isinstance(label, str) else f"objects of type {type(label).__name__}"
        raise InvalidValue(
            f"labels must be numbers; those of a batch are {kind}. Give each class its number, from 0 on."
        ) from fault
    if tensor.dtype not in WITHOUT_ARITHMETIC:
        return tensor
    signed = tensor.to(torch.int64)
    if tensor.dtype == torch.uint64 and bool((signed < 0).any()):
        raise InvalidValue(
            "a label is above 2⁶³ - 1, the largest number of int64. Give each class its number, from 0 on."
        )
    return signed


def require_classes(labels: Tensor, classes: int, where: str = "") -> None:
    """Refuse class numbers that are too large for a model; those below 0 mark what does not count."""
    largest = int(labels.max()) if labels.numel() else -1  # read once, since each read waits for a GPU
    if largest >= classes:
        raise InvalidValue(f"a label{where} is {largest}, and the model has {classes} classes, 0 to {classes - 1}.")


def require_unmasked(array: np.ma.MaskedArray, name: str) -> None:
    """Refuse an array with masked values, whose content is undefined."""
    count = int(np.ma.count_masked(array))
    if count:
        raise InvalidValue(
            f"`{name}` has {count:,} masked values among {array.size:,}; leave out the examples or features that hold "
            f"them, or fill them with `{name}.filled(value)`.",
            argument=name,
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
