"""The engine under `torchrun`: each rank reads a contiguous share of the data, and rank 0 joins what they collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netkin.comparing.engines.engine import PassEngine, Result
from netkin.comparing.engines.ranks import Message, Ranks
from netkin.comparing.study import Statistics, from_parts
from netkin.comparing.subjects import ModelRunner
from netkin.errors import ShapeError, ValueFault
from netkin.progress import showing
from netkin.results import Comparison
from netkin.results.columns import packed_columns, unpacked_columns
from netkin.statistics.statistic import packed, unpacked

if TYPE_CHECKING:
    from netkin.comparing.request import Request


class Distributed(PassEngine):
    """The processes of a `torch.distributed` group, of which each runs the same call."""

    def __init__(self) -> None:
        self.ranks = Ranks()
        self.part = (self.ranks.rank + 1, self.ranks.count)

    @contextmanager
    def working(self) -> Iterator[None]:
        with self.ranks.together(), ExitStack() as stack:
            if not self.ranks.is_first:
                stack.enter_context(showing(False))
            yield

    @contextmanager
    def prepared(self, request: Request, settings: dict[str, str]) -> Iterator[None]:
        models = {one.name: one.model for one in request.runners if isinstance(one, ModelRunner)}
        for name, model in models.items():
            _refuse_sharded(name, model)
        self.ranks.refuse_unlike(settings)
        request.study = replace(request.study, limit=self.least(request.study.limit))
        with ExitStack() as stack:
            for model in models.values():
                if isinstance(model, DistributedDataParallel):
                    stack.enter_context(self._first_buffers(model))
            yield

    @contextmanager
    def _first_buffers(self, model: nn.Module) -> Iterator[None]:
        """Lend a model the buffers of rank 0, as training by `DistributedDataParallel` leaves each rank its own."""
        own = {name: buffer.clone() for name, buffer in model.named_buffers()}
        _, first = self.ranks.broadcast(lambda: ({}, own))
        try:
            _fill(model, first)
            yield
        finally:
            _fill(model, own)

    def least(self, number: int) -> int:
        return int(min(self.ranks.gathered(number)))

    def attend(self) -> None:
        self.ranks.attend()

    @contextmanager
    def opening(self, statistics: Statistics) -> Iterator[None]:
        sizes = {model: {layer.name: layer.width for layer in layers} for model, layers in statistics.layers.items()}
        kinds = [[type(one).kind for one in own] for own in statistics.collectors]
        self.ranks.refuse_unlike({f"layers of {model!r}": own for model, own in sizes.items()} | {"collectors": kinds})
        if self.ranks.is_first:
            yield
            self.ranks.broadcast(lambda: _packed([one.frame() for one in statistics.every()]))
            return
        header, tensors = self.ranks.broadcast(lambda: ({}, {}))
        for collector, frame in zip(statistics.every(), unpacked(header["frames"], tensors), strict=True):
            collector.given_frame = frame
        yield

    def joined(self, statistics: Statistics, length: int | None) -> Statistics:
        rank = self.ranks.rank
        if length is not None and statistics.examples != length:
            raise ValueFault(
                f"the data gave rank {rank} {statistics.examples:,} examples and its share is {length:,}; they must "
                "hold as many as they say, none dropped."
            )
        whole = self.ranks.reduced(statistics, Statistics.to_parts, self._merged)
        whole.part = ""
        if self.ranks.is_first and whole.examples != whole.expected:
            raise ValueFault(
                f"all ranks together read {whole.examples:,} examples and the data hold {whole.expected:,}; each must "
                "be read once."
            )
        return whole

    def _merged(self, mine: Statistics, message: Message) -> Statistics:
        """Return the statistics of this rank and of one that has sent its own, both in the host's memory."""
        theirs = from_parts(*message)
        header, tensors = mine.to_parts()
        if any(one.device.type != "cpu" for one in tensors.values()):
            moved = from_parts(header, {name: one.cpu() for name, one in tensors.items()})
            moved.study = mine.study
            mine = moved
        common = mine.digest.common(theirs.digest)
        if common:
            raise ValueFault(
                f"two ranks have read the same examples, the first of them number {common[0]:,}; give the samplers of "
                "all ranks the same seed and, by `set_epoch`, the same epoch."
            )
        theirs.settings = mine.settings  # which agree, but for what functions hold of each rank's own, as its device
        try:
            return mine.merge(theirs)
        except ShapeError as fault:
            raise ShapeError(f"the shares of two ranks do not fit: {fault}") from fault

    def shared(self, make: Callable[[], Result]) -> Result:
        made: list[Result] = []

        def message() -> Message:
            made.append(make())
            return _taken_apart(made[0])

        found = self.ranks.broadcast(message)
        return made[0] if made else _put_together(*found)


def _fill(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _packed(frames: list[Any]) -> Message:
    tensors: dict[str, torch.Tensor] = {}
    return {"frames": packed([dict(one) for one in frames], tensors, "frames")}, tensors


def _taken_apart(result: Statistics | list[Comparison]) -> Message:
    if isinstance(result, Statistics):
        return result.to_parts()
    header, arrays = packed_columns(result)
    return header, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _put_together(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    if "comparisons" not in header:
        return from_parts(header, tensors)
    return unpacked_columns(header, {name: one.numpy() for name, one in tensors.items()})


def _refuse_sharded(name: str, model: nn.Module) -> None:
    """Refuse a model of which each rank holds a piece: it runs only if all ranks run it at once, and shares differ."""
    tensors = (type(one).__name__ for one in model.parameters())
    wrappers = (type(one).__name__ for one in model.modules())
    if "DTensor" in tensors or "FullyShardedDataParallel" in wrappers:
        raise ValueFault(
            f"the weights of {name!r} are sharded over the ranks (FSDP), so that every forward needs all ranks at "
            "once, and their shares of the data differ in length; load the full weights on each rank, as "
            "`torch.distributed.checkpoint.state_dict.get_model_state_dict` gives them."
        )
