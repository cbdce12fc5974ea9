"""The engine under `torchrun`: each rank reads a contiguous share of the data, and rank 0 joins what they collected.

`Ranks` are the processes of one `torch.distributed` group. Short messages go through the group's store, with a check
for errors while waiting; tensors are sent from rank to rank only when both are known to be ready. So no rank waits for
one that has failed, or whose process has ended. Nothing is pickled.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from netkin.comparing.comparer import Comparer, from_arrays
from netkin.comparing.engines import PassEngine, Result
from netkin.comparing.sides import ModelSide, Side
from netkin.errors import InvalidValue, NetkinError, ShapeError, WorkerError
from netkin.identity import form_of, settings_digest
from netkin.progress import showing
from netkin.representations.layers import require_whole_model
from netkin.results import Comparison
from netkin.results.packing import packed_columns, unpacked_columns
from netkin.statistics.storage import from_plain, to_plain

GRACE = 5.0  # seconds that a rank which has failed waits for the others to read its fault
PAUSES = (0.001, 0.05)  # seconds between two checks of the store, at first and at most
ALIVE = 2.0  # seconds of waiting between two checks that the next rank's process is still there
ALIVE_TAG = 7301  # of the messages that check it, which no rank receives
_calls = itertools.count()  # the same on every rank, as every rank makes the same calls

TensorMessage = tuple[dict[str, Any], dict[str, Tensor]]  # what JSON can hold, and tensors by their names


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
    def prepare(self, sides: Sequence[Side], settings: Mapping[str, str]) -> Iterator[None]:
        models = {side.name: side.model for side in sides if isinstance(side, ModelSide)}
        for name, model in models.items():
            require_whole_model(model, repr(name))
        self.ranks.require_same(settings)
        with ExitStack() as stack:
            for model in models.values():
                if isinstance(model, DistributedDataParallel):
                    stack.enter_context(self._first_buffers(model))
            self._require_same_forms(models)
            yield

    def _require_same_forms(self, models: Mapping[str, nn.Module]) -> None:
        """Refuse models that are not the same on all ranks beside their weights, and name the module or attribute."""
        forms = {name: form_of(model).attributes for name, model in models.items()}
        first, *others = self.ranks.gathered(settings_digest(forms))
        if any(other != first for other in others):  # all of it is large, and sent only then
            self.ranks.require_same(
                {f"{part!r} of {name!r}": form[part] for name, form in forms.items() for part in form}
            )

    @contextmanager
    def _first_buffers(self, model: nn.Module) -> Iterator[None]:
        """Lend a model the buffers of rank 0, as training by `DistributedDataParallel` leaves each rank its own."""
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        _, first = self.ranks.broadcast(lambda: ({}, buffers))
        try:
            _fill(model, first)
            yield
        finally:
            _fill(model, buffers)

    def least(self, number: int) -> int:
        return int(min(self.ranks.gathered(number)))

    def check_others(self) -> None:
        self.ranks.check_others()

    @contextmanager
    def opening(self, comparer: Comparer) -> Iterator[None]:
        sizes = {model: {layer.name: layer.width for layer in layers} for model, layers in comparer.layers.items()}
        kinds = [[collector.kind for collector in collectors] for collectors in comparer.collectors]
        self.ranks.require_same(
            {f"layers of {model!r}": widths for model, widths in sizes.items()} | {"collectors": kinds}
        )
        if self.ranks.is_first:
            yield
            tensors: dict[str, Tensor] = {}
            frames = to_plain([dict(collector.frame()) for collector in comparer.every()], tensors, "frames")
            self.ranks.broadcast(lambda: ({"frames": frames}, tensors))
            return
        header, tensors = self.ranks.broadcast(lambda: ({}, {}))
        for collector, frame in zip(comparer.every(), from_plain(header["frames"], tensors), strict=True):
            collector.take_frame(frame)
        yield

    def join(self, comparer: Comparer, length: int | None) -> Comparer:
        rank = self.ranks.rank
        if length is not None and comparer.examples != length:
            raise InvalidValue(
                f"the data gave rank {rank} {comparer.examples:,} examples and its share is {length:,}; they must "
                "give as many examples as their length says."
            )
        whole = self.ranks.reduced(comparer, _to_message, self._merged)
        whole.note(part="")
        if self.ranks.is_first and whole.examples != whole.expected:
            raise InvalidValue(
                f"all ranks together read {whole.examples:,} examples and the data hold {whole.expected:,}; each must "
                "be read once."
            )
        return whole

    def _merged(self, mine: Comparer, message: TensorMessage) -> Comparer:
        """Return the statistics of this rank and of one that has sent its own, both in the host's memory."""
        theirs = _from_message(*message)
        if mine.study.device is not None:
            on_host = from_arrays(*mine.to_arrays())
            on_host.study, mine = mine.study, on_host
        common = mine.digest.common(theirs.digest)
        if common:
            raise InvalidValue(
                f"two ranks have read the same examples, the first of them number {common[0]:,}; give the samplers of "
                "all ranks the same seed and, by `set_epoch`, the same epoch."
            )
        # which agree, but for what functions hold of each rank's own, as its device
        theirs.note(settings=mine.record.settings)
        try:
            return mine.merge(theirs)
        except ShapeError as fault:
            raise ShapeError(f"the shares of two ranks do not fit: {fault}") from fault

    def once(self, make: Callable[[], Result]) -> Result:
        results: list[Result] = []

        def message() -> TensorMessage:
            results.append(make())
            return _to_message(results[0])

        sent = self.ranks.broadcast(message)
        return results[0] if results else _from_message(*sent)


def _fill(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _to_message(result: Comparer | list[Comparison]) -> TensorMessage:
    header, arrays = result.to_arrays() if isinstance(result, Comparer) else packed_columns(result)
    return header, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _from_message(header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return from_arrays(header, arrays) if "collectors" in header else unpacked_columns(header, arrays)


# --- ranks ----------------------------------------------------------------------------------------------------------


class Ranks:
    """This process among those of the group, for one call."""

    def __init__(self) -> None:
        _join_group()
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"netkin/{next(_calls)}", store)
        self._timeout = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._rounds = itertools.count()
        homes = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
        self._device = torch.device("cpu" if "cpu" in homes else next(iter(homes)))
        self._sees_ends = homes.get("cpu") == "gloo" and self.count > 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # --- faults -------------------------------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside the `with`, a fault of this rank is sent to all others, which then raise it too."""
        try:
            yield
        except BaseException as fault:
            with suppress(Exception):  # the store may be gone, and the fault itself matters more
                if not self._store.check(["fault"]):
                    self._store.set("fault", f"rank {self.rank} failed: {_sentence(fault)}")
                self._store.set(f"read/{self.rank}", "")
                self._await([f"read/{rank}" for rank in range(self.count)], GRACE, raises=False)
            raise

    def check_others(self) -> None:
        """Raise the fault of another rank, if there is one."""
        if self._ask_store("check", ["fault"]):
            raise WorkerError(self._ask_store("get", "fault").decode())

    def _ask_store(self, what: str, *arguments: Any) -> Any:
        """Return an answer of the store, which belongs to another process that may have ended."""
        try:
            return getattr(self._store, what)(*arguments)
        except (dist.DistError, RuntimeError) as fault:
            raise WorkerError(
                f"rank {self.rank} has lost the other ranks, as the process that kept them together has ended "
                f"({_first_line(fault)})."
            ) from fault

    def _await(self, keys: Sequence[str], timeout: float | None = None, *, raises: bool = True) -> bool:
        """Return whether all keys are there before the timeout; with `raises` a fault of another rank ends the wait."""
        begin, pause = time.monotonic(), PAUSES[0]
        checked, ended = begin, False
        while not self._ask_store("check", list(keys)):
            if raises and self._ask_store("check", ["fault"]) and not self._ask_store("check", list(keys)):
                self.check_others()
            if ended:  # and what it may have put into the store before is not there
                raise WorkerError(
                    f"rank {self._next} has ended, or left the group, before the end of this call; every rank must "
                    "make the call and finish it."
                )
            if raises and self._sees_ends and time.monotonic() - checked > ALIVE:
                checked, ended = time.monotonic(), self._next_has_ended()
                continue
            if timeout is not None and time.monotonic() - begin > timeout:
                return False
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
        return True

    @property
    def _next(self) -> int:
        return (self.rank + 1) % self.count

    def _next_has_ended(self) -> bool:
        """Return whether the next rank has closed its connection to this one; each rank checks one, and tells all."""
        try:
            dist.isend(torch.zeros(1), self._next, tag=ALIVE_TAG)
        except RuntimeError:  # a message can be begun as long as the connection is there, whether it is received or not
            return True
        return False

    # --- small texts --------------------------------------------------------------------------------------------------

    def gathered(self, fact: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        place = next(self._rounds)
        keys = [f"{place}/{rank}" for rank in range(self.count)]
        self._ask_store("set", keys[self.rank], json.dumps(fact))
        if not self._await(keys, self._timeout if place == 0 else None):  # who is here once comes to the end
            absent = next(rank for rank, key in enumerate(keys) if not self._ask_store("check", [key]))
            raise InvalidValue(
                f"rank {absent} has not come to this call in {self._timeout:.0f} seconds; every rank must make it."
            )
        return [json.loads(self._ask_store("get", key)) for key in keys]

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse, on every rank, facts that are not the same on all of them."""
        first, *others = self.gathered(facts)
        for rank, other in enumerate(others, start=1):
            for name in {**first, **other}:
                mine, theirs = first.get(name, "none"), other.get(name, "none")
                if mine != theirs:
                    raise InvalidValue(
                        f"rank {rank} differs from rank 0 in its {name}: {theirs} and {mine}; call every rank with the "
                        "same arguments."
                    )

    # --- tensors ------------------------------------------------------------------------------------------------------

    def reduced(
        self, mine: Any, to_message: Callable[[Any], TensorMessage], merged: Callable[[Any, TensorMessage], Any]
    ) -> Any:
        """Return on rank 0 what all ranks hold, merged two by two; on others what they held when they sent it."""
        step = 1
        while step < self.count:
            partner = self.rank ^ step
            if self.rank & step:
                message = to_message(mine)
                self._await_taker()
                for tensor in _as_bytes(*message):
                    dist.send(tensor.to(self._device), partner)
                return mine
            if partner < self.count:
                self._take_from(partner)
                mine = merged(mine, self._read(partial(dist.recv, src=partner)))
            step *= 2
        return mine

    # a rank that reads a fault sends no part, unless the other has begun to take it: the first to add decides

    def _take_from(self, sender: int) -> None:
        """Wait until a rank has its part ready, and begin to take it."""
        self._await([f"ready/{sender}"])
        if self._ask_store("add", f"deal/{sender}", 1) > 1:
            self.check_others()
        self._ask_store("set", f"taken/{sender}", "")

    def _await_taker(self) -> None:
        """Say that this rank's part is ready, and wait until another begins to take it."""
        self._ask_store("set", f"ready/{self.rank}", "")
        try:
            self._await([f"taken/{self.rank}"])
        except WorkerError:
            if self._ask_store("add", f"deal/{self.rank}", 1) == 1:
                raise

    def broadcast(self, make: Callable[[], TensorMessage]) -> TensorMessage:
        """Return on every rank what `make` returns on rank 0."""
        key = f"{next(self._rounds)}/ready"
        if not self.is_first:
            self._await([key])
            return self._read(partial(dist.broadcast, src=0))
        header, tensors = make()
        self.check_others()
        self._ask_store("set", key, "")
        for tensor in _as_bytes(header, tensors):
            dist.broadcast(tensor.to(self._device), 0)
        return header, tensors

    def _read(self, fill: Callable[[Tensor], object]) -> TensorMessage:
        """Return a message, of which each tensor is filled in turn."""

        def filled(count: int, dtype: torch.dtype) -> Tensor:
            tensor = torch.empty(count, dtype=dtype, device=self._device)
            fill(tensor)
            return tensor.cpu()

        text = filled(int(filled(1, torch.int64)), torch.uint8)
        header, sizes = json.loads(text.numpy().tobytes())
        tensors = {}
        for name, dtype, shape in sizes:
            empty = torch.empty(shape, dtype=getattr(torch, dtype))
            tensors[name] = filled(empty.nbytes, torch.uint8).view(empty.dtype).view(shape) if empty.nbytes else empty
        return header, tensors


def _as_bytes(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the length of a text, the text and the tensors, as bytes; empty ones travel in the text alone."""
    sizes = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
    text = json.dumps([header, sizes], default=lambda number: number.item()).encode()
    yield torch.tensor([len(text)])
    yield torch.frombuffer(bytearray(text), dtype=torch.uint8)
    yield from (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values() if tensor.nbytes)


def _join_group() -> None:
    """Join the group of the processes that torchrun started, unless the caller has."""
    if dist.is_initialized():
        return
    if not dist.is_torchelastic_launched():
        raise InvalidValue(
            "engine='distributed' needs a group of processes: start it with `torchrun --nproc-per-node N`, or in "
            "Python call `torch.distributed.init_process_group` first.",
            argument="engine",
        )
    dist.init_process_group("gloo")


def _sentence(fault: BaseException) -> str:
    if isinstance(fault, NetkinError):
        return str(fault)
    return (
        "it was interrupted."
        if isinstance(fault, KeyboardInterrupt)
        else f"{type(fault).__name__}: {_first_line(fault)}"
    )


def _first_line(fault: BaseException) -> str:
    return next(iter(str(fault).strip().splitlines()), "without a message")
