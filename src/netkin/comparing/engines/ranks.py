"""Ranks: the processes of one `torch.distributed` group, the messages between them, and how an error in one ends all.

Short messages go through the group's store, with a check for errors while waiting; tensors are sent from rank to rank
only when both are known to be ready. So no rank waits for one that has failed. Nothing is pickled.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from netkin.errors import NetkinError, ValueFault, WorkerFault

GRACE = 5.0  # seconds that a rank which has failed waits for the others to hear of it
PAUSES = (0.001, 0.05)  # seconds between two looks at the store, at first and at most
_calls = itertools.count()  # the same on every rank, as every rank makes the same calls

Message = tuple[dict[str, Any], dict[str, Tensor]]  # what JSON can hold, and tensors by their names


class Ranks:
    """This process among those of the group, for one call."""

    def __init__(self) -> None:
        _join_group()
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"netkin/{next(_calls)}", store)
        self._patience = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._rounds = itertools.count()
        homes = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
        self._device = torch.device("cpu" if "cpu" in homes else next(iter(homes)))

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
                self._store.set(f"heard/{self.rank}", "")
                self._await([f"heard/{rank}" for rank in range(self.count)], GRACE, heed=False)
            raise

    def attend(self) -> None:
        """Raise the fault of another rank, if there is one."""
        if self._asked("check", ["fault"]):
            raise WorkerFault(self._asked("get", "fault").decode())

    def _asked(self, what: str, *given: Any) -> Any:
        """Return an answer of the store, which another process keeps; that may be gone."""
        try:
            return getattr(self._store, what)(*given)
        except (dist.DistError, RuntimeError) as fault:
            raise WorkerFault(
                f"rank {self.rank} has lost the other ranks, as the process that kept them together has ended "
                f"({_first_line(fault)})."
            ) from fault

    def _await(self, keys: Sequence[str], patience: float | None = None, *, heed: bool = True) -> bool:
        """Wait until all keys are there, or patience ends, and tell whether they are; heed the faults of others."""
        begin, pause = time.monotonic(), PAUSES[0]
        while not self._asked("check", list(keys)):
            if heed and self._asked("check", ["fault"]) and not self._asked("check", list(keys)):
                self.attend()
            if patience is not None and time.monotonic() - begin > patience:
                return False
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
        return True

    # --- small texts --------------------------------------------------------------------------------------------------

    def gathered(self, fact: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        place = next(self._rounds)
        keys = [f"{place}/{rank}" for rank in range(self.count)]
        self._asked("set", keys[self.rank], json.dumps(fact))
        if not self._await(keys, self._patience if place == 0 else None):  # who is here once comes to the end
            absent = next(rank for rank, key in enumerate(keys) if not self._asked("check", [key]))
            raise ValueFault(
                f"rank {absent} has not come to this call in {self._patience:.0f} seconds; every rank must make it."
            )
        return [json.loads(self._asked("get", key)) for key in keys]

    def refuse_unlike(self, facts: Mapping[str, Any]) -> None:
        """Refuse, on every rank, facts that are not the same on all of them."""
        first, *others = self.gathered(facts)
        for rank, other in enumerate(others, start=1):
            for name in {**first, **other}:
                mine, theirs = first.get(name, "none"), other.get(name, "none")
                if mine != theirs:
                    raise ValueFault(
                        f"rank {rank} differs from rank 0 in its {name}: {theirs} and {mine}; call every rank with the "
                        "same arguments."
                    )

    # --- tensors ------------------------------------------------------------------------------------------------------

    def reduced(self, own: Any, to_message: Callable[[Any], Message], merged: Callable[[Any, Message], Any]) -> Any:
        """Return on rank 0 what all ranks hold, merged two by two; on others what they had when they gave it away."""
        step = 1
        while step < self.count:
            partner = self.rank ^ step
            if self.rank & step:
                message = to_message(own)
                self._await_taker()
                for tensor in _as_bytes(*message):
                    dist.send(tensor.to(self._device), partner)
                return own
            if partner < self.count:
                self._take_from(partner)
                own = merged(own, self._read(partial(dist.recv, src=partner)))
            step *= 2
        return own

    # a rank that hears of a fault gives no part away, unless the other has begun to take it: who adds first decides

    def _take_from(self, sender: int) -> None:
        """Wait until a rank has its part ready, and begin to take it."""
        self._await([f"ready/{sender}"])
        if self._asked("add", f"deal/{sender}", 1) > 1:
            self.attend()
        self._asked("set", f"taken/{sender}", "")

    def _await_taker(self) -> None:
        """Say that this rank's part is ready, and wait until another begins to take it."""
        self._asked("set", f"ready/{self.rank}", "")
        try:
            self._await([f"taken/{self.rank}"])
        except WorkerFault:
            if self._asked("add", f"deal/{self.rank}", 1) == 1:
                raise

    def broadcast(self, make: Callable[[], Message]) -> Message:
        """Return on every rank what `make` returns on rank 0."""
        key = f"{next(self._rounds)}/ready"
        if not self.is_first:
            self._await([key])
            return self._read(partial(dist.broadcast, src=0))
        header, tensors = make()
        self.attend()
        self._asked("set", key, "")
        for tensor in _as_bytes(header, tensors):
            dist.broadcast(tensor.to(self._device), 0)
        return header, tensors

    def _read(self, fill: Callable[[Tensor], object]) -> Message:
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
    sizes = [[name, str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in tensors.items()]
    text = json.dumps([header, sizes], default=lambda number: number.item()).encode()
    yield torch.tensor([len(text)])
    yield torch.frombuffer(bytearray(text), dtype=torch.uint8)
    yield from (one.contiguous().reshape(-1).view(torch.uint8) for one in tensors.values() if one.nbytes)


def _join_group() -> None:
    """Join the group of the processes that torchrun started, unless the caller has."""
    if not dist.is_available():
        raise ValueFault("engine='distributed' needs a torch that was built with its distributed package.")
    if dist.is_initialized():
        return
    if not dist.is_torchelastic_launched():
        raise ValueFault(
            "engine='distributed' needs a group of processes: start the script with `torchrun --nproc-per-node N`, or "
            "call `torch.distributed.init_process_group` first."
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
