"""Probing: the same few examples, run through a model that is being trained, and what is kept of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.dynamics.states import LayerState, bytes_of, state_of
from netkin.errors import ForwardError
from netkin.identity import settings_digest
from netkin.representations import Reader, batches_of, guest
from netkin.representations.guests import random_states_kept
from netkin.representations.inputs import Forward, Transform, device_of, length_if_known, take
from netkin.representations.layers import Spec
from netkin.representations.nesting import mapped
from netkin.representations.shapes import Shape

LOOK = 2  # examples run to learn the layers' widths
SHARDED = ("FullyShardedDataParallel", "FSDPModule")


class Examples:
    """The examples of all probes, read once: `batches`, their `count` and what the data are called.

    A tuple of arrays, or a list of arrays of different shapes as a loader gives it, is one batch. A loader's own
    generator is left in the state it had, so that a training loader may serve.
    """

    def __init__(self, data: Any, examples: int | None = None, batch: int = 512):
        self.name = _name_of(data)
        whole = [data] if _is_one_batch(data) else data
        with guest(), random_states_kept(data=[data]):
            self.batches = [mapped(_copied, one) for one in batches_of(whole, examples, batch)]
        lengths = [length_if_known(one) for one in self.batches]
        self.count: int | None = None if None in lengths else sum(length or 0 for length in lengths)

    @cached_property
    def digest(self) -> str:
        """A checksum by which a resumed recording recognises its examples."""
        return settings_digest(self.batches, strict=False)


class Probe:
    """How a model is probed: its layers, what one example is, and how a batch is given to it."""

    def __init__(
        self,
        model: nn.Module,
        layers: Spec = None,
        shape: Shape | Mapping[str, Shape] = None,
        forward: Forward | None = None,
        transform: Transform | None = None,
    ):
        self.model, self._layers, self._shape = model, layers, shape
        self.settings = {"layers": layers, "shape": shape, "forward": forward, "transform": transform}
        self._forward, self._transform = forward, transform
        self._axes: dict[str, int | None] = {}  # learnt by the first probe, for all that follow
        Reader(model, layers, shape=shape)  # refuses unknown layers and shapes before training begins

    def states(self, examples: Examples) -> dict[str, LayerState]:
        """Return the state of every layer; the model, its buffers and all random states are as before.

        Of one batch only the layer that has just run is held at full size; of several all wait for the last batch.
        """
        whole = len(examples.batches) == 1
        reader: Reader = self._reader(lambda name, rows: state(name, rows) if whole else rows)

        def state(name: str, rows: Tensor) -> LayerState:
            return state_of(rows, reader.shapes[name], reader.resolutions[name])

        kept: dict[str, list[Any]] = {}
        with self._running(reader):
            for batch in examples.batches:
                for name, part in reader(batch).items():
                    kept.setdefault(name, []).append(part)
            self._axes = reader.axes
            if whole:
                return {name: state for name, (state,) in kept.items()}
            return {name: state(name, torch.cat(kept.pop(name))) for name in list(kept)}

    def bytes(self, examples: Examples) -> int:
        """Return the most memory that one probe will take, learnt from a run of two examples."""
        reader = self._reader(lambda name, rows: (len(rows), rows.shape[1], rows.element_size()))
        batch = examples.batches[0]
        seen, count = length_if_known(batch), examples.count
        if seen is None or count is None:
            raise ForwardError("the examples of these batches can't be counted; take one probe to learn its memory.")
        with self._running(reader):
            found = reader(take(batch, LOOK)).values()
        return sum(bytes_of(rows * count // min(seen, LOOK), width, itemsize) for rows, width, itemsize in found)

    def _reader(self, keep: Any) -> Reader:
        return Reader(
            self.model,
            self._layers,
            shape=self._shape,
            forward=self._forward,
            transform=self._transform,
            keep=keep,
            axes=self._axes,
        )

    @contextmanager
    def _running(self, reader: Reader) -> Iterator[None]:
        """Run the model in its own precision, whatever autocast is on around us."""
        refuse_sharded(self.model)
        with ExitStack() as stack:
            stack.enter_context(guest(self.model, exact=True))
            for device in {device_of(self.model).type, "cpu"}:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(reader.open())
            yield


def is_first_process() -> bool:
    """Return whether this process is the one of rank 0, or the only one."""
    return rank() == 0


def rank() -> int:
    """Return the rank of this process among those that train together."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model whose weights lie on several processes: one of them alone can't run it."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if kinds & set(SHARDED):
        raise ForwardError(
            "the model is sharded over several processes (FSDP), and a probe runs in the first one alone; save "
            "checkpoints and use `nk.dynamics`."
        )


def _is_one_batch(data: Any) -> bool:
    """Tell inputs with their labels from a list of batches: arrays of different shapes can't both be inputs."""
    if not isinstance(data, (tuple, list)) or not all(isinstance(part, (Tensor, np.ndarray)) for part in data):
        return False
    return isinstance(data, tuple) or len({tuple(part.shape[1:]) for part in data}) > 1


def _copied(leaf: Any) -> Any:
    # a slice would hold on to all of the data, and a reused buffer would change under us
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _name_of(data: Any) -> str:
    name = getattr(data, "name", None)
    if isinstance(name, str):
        return name
    inner = getattr(data, "dataset", None)
    return type(data if inner is None else inner).__name__
