"""Guests: running a model and leaving it, its random states and its settings as they were."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from netkin.arrays import exact_products
from netkin.representations.layers import refuse_lazy

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
def guest(*models: nn.Module) -> Iterator[None]:
    """Inside the `with`, the models are in evaluation mode and build no graph; afterwards all is as it was.

    That is each module's own training flag, and the random states of torch (on the CPU and on the models' CUDA
    devices), of `random` and of NumPy; also after an exception or Ctrl-C. Grad flags and buffers are never touched.
    Other threads that want to run a model through netkin wait until the `with` is left.
    On a GPU float32 is not rounded to TF32 inside, so that a model gives the numbers it gives on the CPU.
    """
    refuse_lazy(*models)
    with model_lock(), evaluating(*models), random_states_kept(*models), torch.no_grad(), exact_products():
        yield


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Inside the `with`, the models are in evaluation mode; afterwards each module has its own training flag again."""
    with model_lock():
        modules = [module for model in models for module in model.modules()]
        flags = [module.training for module in modules]
        try:
            # set one by one: `eval()` may be overridden to do more (adapters merge their weights there)
            _set_training(modules, [False] * len(modules))
            yield
        finally:
            _set_training(modules, flags)


@contextmanager
def frozen(*models: nn.Module) -> Iterator[None]:
    """Inside the `with`, no weight of the models asks for a gradient; afterwards each has its own flag again."""
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
def random_states_kept(*models: nn.Module) -> Iterator[None]:
    """After the `with`, torch, `random` and NumPy draw as if nothing had been drawn inside it."""
    put_back = random_states(*models)
    try:
        yield
    finally:
        put_back()


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
