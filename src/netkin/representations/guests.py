"""Running a model without changing it, its random states or its settings."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from netkin.representations.inputs import device_of, dtype_of
from netkin.representations.layers import refuse_lazy
from netkin.settings import exact_products, tf32_in

_lock = threading.RLock()


@contextmanager
def model_lock() -> Iterator[None]:
    """Inside the `with`, no other thread runs a model through netkin; it waits until this one has left.

    One lock serves all models of the process, since models may share modules: see `docs/decisions/0009`. A thread that
    holds it may take it again.
    """
    with _lock:
        yield


def _renew_lock() -> None:
    # in a process that was forked, the thread that held the lock is gone
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def guest(*models: nn.Module, exact: bool = False) -> Iterator[None]:
    """Inside the `with`, the models are in evaluation mode and build no graph; afterwards all is as it was.

    That is each module's own training flag, and the random states of torch (on the CPU and on the models' CUDA
    devices), of `random` and of NumPy; also after an exception or Ctrl-C. Grad flags and buffers are never touched.
    Other threads that run a model through netkin wait until the `with` is left.
    The models run in the precision that is set around the `with`. With `exact`, float32 on a GPU is not rounded to
    TF32, so that a model gives the numbers it gives on the CPU.
    """
    refuse_lazy(*models)
    precision = exact_products() if exact else nullcontext()
    with model_lock(), evaluating(*models), random_states_kept(*models), torch.no_grad(), precision:
        yield


def model_precision(*models: nn.Module, exact: bool = False) -> str:
    """Return the precision in which the models run now, as text for the provenance of a result.

    Such as ``"float32, exact"``, ``"float32, TF32 in convolutions and recurrent layers"`` or ``"bfloat16"``. `exact` is
    that of `guest`.
    """
    rounded = tf32_in() if not exact and any(device_of(model).type == "cuda" for model in models) else ()
    dtypes = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(map(dtype_of, models)) if dtype is not None]
    lowered = [kind for kind in {device_of(model).type for model in models} if torch.is_autocast_enabled(kind)]
    cast = [f"autocast to {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}" for kind in lowered]
    return ", ".join([" and ".join(precision_in_words(dtype, rounded) for dtype in dtypes) or "no weights", *cast])


def precision_in_words(dtype: str, rounded: Sequence[str]) -> str:
    """Return a precision and where its products are rounded to TF32: in "products", "convolutions", ...

    Example:
        >>> precision_in_words("float32", ("products", "convolutions"))
        'float32, TF32 in products and convolutions'
    """
    if dtype != "float32":
        return dtype
    *most, last = rounded or ("",)
    return f"float32, TF32 in {', '.join(most)}{' and ' * bool(most)}{last}" if last else "float32, exact"


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Inside the `with`, the models are in evaluation mode; afterwards each module has its own training flag again."""
    with model_lock():
        # a frozen ScriptModule has no training mode
        modules = [module for model in models for module in model.modules() if hasattr(module, "training")]
        flags = [module.training for module in modules]
        try:
            # set one by one: `eval()` may be overridden to do more (adapters merge their weights there)
            _set_training(modules, [False] * len(modules))
            yield
        finally:
            _set_training(modules, flags)


@contextmanager
def frozen(*models: nn.Module) -> Iterator[None]:
    """Inside the `with`, no weight of the models requires a gradient; afterwards each has its own flag again."""
    weights = [weight for model in models for weight in model.parameters()]
    flags = [weight.requires_grad for weight in weights]
    try:
        for weight in weights:
            weight.requires_grad_(False)
        yield
    finally:
        for weight, flag in zip(weights, flags, strict=True):
            weight.requires_grad_(flag)


def _set_training(modules: list[nn.Module], flags: list[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag


@contextmanager
def random_states_kept(*models: nn.Module, data: Iterable[Any] = ()) -> Iterator[None]:
    """After the `with`, torch, `random` and NumPy draw as if nothing had been drawn inside it.

    So do the generators of loaders in `data`, so that a training loader may serve.
    """
    put_back = random_states(*models)
    owners = [owner for one in data for owner in (one, getattr(one, "sampler", None))]
    generators = [one for one in (getattr(owner, "generator", None) for owner in owners) if one is not None]
    states = [(generator, generator.get_state()) for generator in generators if isinstance(generator, torch.Generator)]
    try:
        yield
    finally:
        put_back()
        for generator, state in states:
            generator.set_state(state)


def random_states(*models: nn.Module) -> Callable[[], None]:
    """Return a function that makes the generators of torch, `random` and NumPy draw again as from now on."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_devices = {device: torch.cuda.get_rng_state(device) for device in _cuda_devices(models)}

    def put_back() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        for device, state in on_devices.items():
            torch.cuda.set_rng_state(state, device)

    return put_back


def _cuda_devices(models: Iterable[nn.Module]) -> list[int]:
    devices = {tensor.device for model in models for tensor in [*model.parameters(), *model.buffers()]}
    return sorted(device.index for device in devices if device.type == "cuda")
