"""State that is changed temporarily and restored: torch's settings, models' flags and weights, random generators.

One thread at a time runs a model. Settings of torch may be needed by several threads, which overlap in any order: the
first one that needs a setting changes it, and the earlier value is restored when the last one has finished, so that no
thread runs under a setting that another has already restored.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

EXACT, UNSET = "ieee", "none"
# torch from 2.9 on sets them by name, for all operations and for each
HAS_PRECISIONS = hasattr(torch.backends, "fp32_precision") and hasattr(torch.backends.cudnn, "conv")
VMAP_WARNING = "There is a performance drop because .* implemented the batching rule"


class SharedSetting:
    """A setting with users: `change` changes it and returns the function that puts it back."""

    def __init__(self, change: Callable[[], Callable[[], None]]):
        self._change, self._lock = change, threading.RLock()
        self._users: Counter[int] = Counter()  # by thread
        self._put_back: Callable[[], None] = _nothing

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Keep the setting changed while the `with` lasts."""
        thread = threading.get_ident()
        with self._lock:
            if not self._users:
                self._put_back = self._change()
            self._users[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= Counter([thread])  # drops threads without uses
                if not self._users:
                    put_back, self._put_back = self._put_back, _nothing
                    put_back()

    @property
    def is_used(self) -> bool:
        """Whether the setting is changed now, by any thread."""
        return bool(self._users)

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Exclude other threads during the `with`, and yield whether none uses the setting already."""
        with self._lock:
            yield not self._users.keys() - {threading.get_ident()}


def _nothing() -> None:
    """Restore nothing."""


def exact_products() -> Any:
    """Return a context in which products and convolutions of float32 on a GPU are not rounded to TF32, whatever is set.

    Both ways of setting this are honoured, torch's flags `allow_tf32` and, from 2.9 on, `fp32_precision`, and what was
    set comes back. Threads may use it at the same time.
    """
    return _EXACT_PRODUCTS.changed()


def exact_matrix_products() -> Any:
    """Return a context in which matrix products of float32 on a GPU are exact; it costs nothing where they are already.

    By default torch rounds in convolutions alone.
    """
    products: Any = torch.backends.cuda.matmul
    rounded = products.fp32_precision == "tf32" if HAS_PRECISIONS else products.allow_tf32
    return exact_products() if rounded else nullcontext()


@contextmanager
def rounded_products() -> Iterator[None]:
    """Inside the `with`, products of float32 on a GPU are rounded to TF32, unless another thread needs exact ones."""
    products: Any = torch.backends.cuda.matmul
    name, rounded, exact = ("fp32_precision", "tf32", EXACT) if HAS_PRECISIONS else ("allow_tf32", True, False)
    with _EXACT_PRODUCTS.held() as alone:
        before: Any = exact
        if not _EXACT_PRODUCTS.is_used:
            above: tuple[Any, Any] = (torch.backends.cudnn, torch.backends)
            before = _own_precision(products, *above) if HAS_PRECISIONS else products.allow_tf32
        try:
            if alone:
                setattr(products, name, rounded)
            yield
        finally:
            if alone:
                setattr(products, name, before)


def unfused_attention() -> Any:
    """Return a context in which torch's fused transformer path is off."""
    return _UNFUSED.changed()


def plain_recurrence() -> Any:
    """Return a context in which recurrent layers on a GPU run without cuDNN, and so have gradients in evaluation."""
    return _PLAIN_RECURRENCE.changed()


def tf32_in() -> tuple[str, ...]:
    """Return where TF32 is allowed on a GPU now: "products", "convolutions", "recurrent layers"."""
    if not HAS_PRECISIONS:
        flags = {"products": torch.backends.cuda.matmul, "convolutions": torch.backends.cudnn}
        return tuple(where for where, flag in flags.items() if flag.allow_tf32)  # type: ignore[attr-defined]
    return tuple(where for where, backend in _operations().items() if backend.fp32_precision == "tf32")


def _without_tf32() -> Callable[[], None]:
    return _without_tf32_by_precision() if HAS_PRECISIONS else _without_tf32_by_flags()


def _without_tf32_by_flags() -> Callable[[], None]:
    owners: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [owner.allow_tf32 for owner in owners]
    for owner in owners:
        owner.allow_tf32 = False

    def put_back() -> None:
        for owner, allowed in zip(owners, before, strict=True):
            owner.allow_tf32 = allowed

    return put_back


def _without_tf32_by_precision() -> Callable[[], None]:
    """Turn TF32 off in all of CUDA, in its products, and in those other operations that have a precision of their own.

    Convolutions and recurrent layers without one follow CUDA, and are left alone: they begin in a state that, once they
    are set, no value brings back.
    """
    generic: Any = torch.backends
    everything: Any = torch.backends.cudnn  # its `fp32_precision` is that of all CUDA
    products, *others = _operations().values()
    before = [
        (products, _own_precision(products, everything, generic)),
        (everything, _own_precision(everything, generic)),
    ]
    everything.fp32_precision = EXACT
    before = [(backend, backend.fp32_precision) for backend in others if backend.fp32_precision != EXACT] + before
    for backend, _ in before:
        backend.fp32_precision = EXACT

    def put_back() -> None:
        for backend, precision in before:
            backend.fp32_precision = precision

    return put_back


def _own_precision(backend: Any, *above: Any) -> str:
    """Return the precision set for a backend itself; `fp32_precision` also reads what comes from those above."""
    here = str(backend.fp32_precision)
    if not above or here == UNSET or here != above[0].fp32_precision:
        return here
    before = _own_precision(*above)
    try:
        above[0].fp32_precision = other = EXACT if here != EXACT else "tf32"
        return UNSET if backend.fp32_precision == other else here
    finally:
        above[0].fp32_precision = before


def _operations() -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "products": backends.cuda.matmul,
        "convolutions": backends.cudnn.conv,
        "recurrent layers": backends.cudnn.rnn,
    }


def _unfuse() -> Callable[[], None]:
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(fused)


def _without_cudnn() -> Callable[[], None]:
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    return lambda: setattr(torch.backends.cudnn, "enabled", enabled)


_EXACT_PRODUCTS, _UNFUSED = SharedSetting(_without_tf32), SharedSetting(_unfuse)
_PLAIN_RECURRENCE = SharedSetting(_without_cudnn)


# --- models that run, and random generators ---------------------------------------------------------------------------

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
    try:
        with loaders_kept(*data):
            yield
    finally:
        put_back()


@contextmanager
def loaders_kept(*data: Any) -> Iterator[None]:
    """After the `with`, the generators that loaders were given draw as if nothing had been drawn inside it.

    Those of the process stay alone, which other threads may draw from: they belong to whoever holds the `model_lock`.
    """
    states = [generator_states(loader) for loader in data]
    try:
        yield
    finally:
        for loader, state in zip(data, states, strict=True):
            load_generator_states(loader, state)


def loader_generators(data: Any) -> list[torch.Generator]:
    """Return the generators that a loader was given for its order; empty for one that draws as all others do."""
    samplers = (getattr(data, "sampler", None), getattr(data, "batch_sampler", None))
    owners = (data, *samplers, getattr(samplers[1], "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list(dict.fromkeys(each for each in generators if isinstance(each, torch.Generator)))


def generator_states(data: Any) -> Tensor:
    """Return the states of the generators that a loader was given, one after the other; empty for other data."""
    states = [generator.get_state() for generator in loader_generators(data)]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *states])


def load_generator_states(data: Any, states: Tensor) -> None:
    """Let the generators of a loader go on from where `generator_states` found them."""
    generators = loader_generators(data)
    sizes = [len(generator.get_state()) for generator in generators]
    for generator, state in zip(generators, states.split(sizes), strict=True):
        generator.set_state(state)


def random_states(*models: nn.Module) -> Callable[[], None]:
    """Return a function that makes the generators of torch, `random` and NumPy draw again as from now on."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = {tensor.device for model in models for tensor in [*model.parameters(), *model.buffers()]}
    numbers = sorted(device.index for device in devices if device.type == "cuda")
    on_devices = {device: torch.cuda.get_rng_state(device) for device in numbers}

    def put_back() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        for device, state in on_devices.items():
            torch.cuda.set_rng_state(state, device)

    return put_back


def seed_all(device: torch.device, seed: int, epoch: int) -> None:
    """Let the generators of torch, NumPy and Python, which dropout and loaders draw from, begin an epoch of a seed."""
    mixed = int.from_bytes(blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest(), "little")
    random.seed(mixed)
    np.random.seed(mixed)
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(mixed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of torch, NumPy and Python."""
    of_numpy: Any = np.random.get_state()
    name, keys, *rest = of_numpy
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
    }
    state["torch"] = torch.get_rng_state()
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_random_state(device: torch.device, state: Mapping[str, Any]) -> None:
    """Let the generators go on from where `random_state` found them."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, *rest = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def called_with(model: nn.Module, weights: Mapping[str, Tensor], inputs: Any) -> Any:
    """Return what a model gives with other weights and buffers, by name; its own are in their places afterwards.

    Those that modules share are shared here, too. A module that is registered under two names is given them once:
    `functional_call` by itself would give them twice, and take the first for those of the model when it puts them back.
    """
    known = dict([*model.named_parameters(), *model.named_buffers()])
    replaced = {id(known[name]): tensor for name, tensor in weights.items()}
    places = {
        f"{path}.{name}" if path else name: replaced[id(tensor)]
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if id(tensor) in replaced
    }
    return functional_call(model, places, (inputs,), tie_weights=False)


@contextmanager
def without_vmap_warnings() -> Iterator[None]:
    """Silence torch's warnings that `vmap` runs an operation once for each network, which the user can't change.

    A change of filters lets all other warnings be given again, so that of nested calls only the outermost changes them.
    """
    if any(pattern is not None and pattern.pattern == VMAP_WARNING for _, pattern, *_ in warnings.filters):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", VMAP_WARNING)
        yield
