"""Replay: the modules of one model run on the very inputs with which their counterparts in another were called.

The other model runs first, and its calls are noted: the types of their inputs, what they gave, and what they were told
besides. Then the reference runs, and inside its hooks each counterpart gets copies of the inputs of the module that was
just called. So a fault in one module is seen there alone, and not in all that follow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.diff.adapting import is_floating
from netkin.applications.diff.call_arguments import CallInputs, Keeper, Told, differing, other_forms
from netkin.applications.diff.floor import ABOVE, DtypeOf, cast_tensors, coarser, rounding_of
from netkin.representations.hooks import KeyPath, leaves, uncompiled
from netkin.representations.inputs import FLOATING
from netkin.representations.layers import modules
from netkin.settings import random_states

Outputs = dict[KeyPath, Tensor]
Run = Callable[[], Any]


# --- examples and positions -------------------------------------------------------------------------------------------


@dataclass
class Examples:
    """How many examples a batch has, and which of their positions count."""

    count: int
    valid: Tensor | None = None  # examples × positions

    def squares(self, tensor: Tensor) -> Tensor:
        """Return the sums of squares, examples × positions, without the positions that don't count."""
        sums = self._rows(tensor).square().sum(-1, dtype=torch.float64).cpu()
        return sums.where(self.valid, 0.0) if self.valid is not None and sums.shape == self.valid.shape else sums

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor as examples × positions × the rest; what is not by examples is one example."""
        length = None if self.valid is None else self.valid.shape[1]
        shape = tensor.shape
        if tensor.ndim == 3 and shape[1] == self.count != shape[0]:  # positions come first
            return tensor.transpose(0, 1)
        if tensor.ndim and shape[0] == self.count:
            if tensor.ndim == 4 and shape[2] == length != shape[1]:  # heads of attention come before positions
                return tensor.transpose(1, 2).flatten(2)
            has_positions = tensor.ndim == 3 or (tensor.ndim > 1 and shape[1] == length)
            return tensor.reshape(shape[0], shape[1] if has_positions else 1, -1)
        if length and tensor.ndim and shape[0] == self.count * length:
            return tensor.reshape(self.count, length, -1)
        return tensor.reshape(1, 1, -1)


def difference(first: Tensor, second: Tensor) -> Tensor:
    """Return the difference of two outputs in a wider type; values that are equal, or NaN in both, have none."""
    wide = torch.float32 if max(first.element_size(), second.element_size()) < 4 else torch.float64
    first, second = first.to(wide), second.to(first.device, wide)
    same = (first == second) | (first.isnan() & second.isnan())
    return (second - first).masked_fill(same, 0.0).nan_to_num(math.inf, math.inf, math.inf)


def outputs_of(output: Any) -> Outputs:
    """Return the floating tensors in a module's output."""
    return {path: leaf for path, leaf in leaves(output) if is_floating(leaf) and leaf.numel()}


def paired(first: Outputs, second: Outputs) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of two outputs that belong together; only the first ones where their forms differ."""
    if first.keys() == second.keys():
        return [(first[path], second[path]) for path in first]
    return [(next(iter(first.values())), next(iter(second.values())))] if first and second else []


# --- the run of the other model ---------------------------------------------------------------------------------------


@dataclass
class TracedCall:
    """A call in the whole run of the other model."""

    dtypes: Mapping[KeyPath, torch.dtype]
    told: Told
    outputs: Outputs = field(default_factory=dict)


def call_name(name: str, number: int) -> str:
    """Return the name of a module's call, of which the second and later ones have their number."""
    return name if number == 1 else f"{name}#{number}"


@contextmanager
def hooked(
    model: nn.Module, names: Sequence[str], before: Callable[..., None], after: Callable[..., None]
) -> Iterator[None]:
    """Inside the `with`, call ``before(name, module, inputs)`` and ``after(name, module, output)`` at each call."""
    known = modules(model)
    first_names = {id(known[name]): name for name in reversed(names)}  # one module may have several names
    with ExitStack() as stack:
        stack.enter_context(uncompiled(model))
        for name in first_names.values():

            def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                before(name, module, CallInputs.of(module, args, kwargs))

            def leave(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                after(name, module, output)

            stack.callback(known[name].register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(known[name].register_forward_hook(leave).remove)
        yield


def traced(model: nn.Module, names: Sequence[str], run: Run) -> dict[str, TracedCall]:
    """Return what each call of the named modules was told and gave, in one run of the model; kept on the host."""
    calls, counts, opened, keeper = dict[str, TracedCall](), Counter[str](), list[TracedCall](), Keeper()

    def before(name: str, module: nn.Module, inputs: CallInputs) -> None:
        counts[name] += 1
        call = calls[call_name(name, counts[name])] = TracedCall(inputs.dtypes(), keeper.of(inputs))
        opened.append(call)

    def after(name: str, module: nn.Module, output: Any) -> None:
        kept = {path: tensor.detach().to("cpu", copy=True) for path, tensor in outputs_of(output).items()}
        opened.pop().outputs = kept

    with hooked(model, names, before, after):
        run()
    return calls


# --- the run of the reference -----------------------------------------------------------------------------------------


@dataclass
class OutputErrors:
    """Of one tensor that a call gives, sums of squares by examples and positions: its size, its errors, its floor."""

    size: Tensor
    local: Tensor
    floor: Tensor
    numbers: int  # of each example, or of the whole where it has none
    end_to_end: Tensor | None = None


@dataclass
class ReplayedCall:
    """A call of the reference with what replaying it showed, or why it could not be replayed."""

    name: str
    caller: str | None
    kind: str
    errors: list[OutputErrors] = field(default_factory=list)
    arguments: list[tuple[str, str]] = field(default_factory=list)  # that differ, and how
    fault: str = ""


class Replay:
    """The run of the reference, with the counterparts of its modules replayed inside.

    Args:
        model: The reference.
        other: The other model.
        names: Those of the reference's modules, with those of their counterparts.
        traces: The calls in the whole run of the other model.
        dtype_of: What tells the type that the other model has for a tensor of the reference.
        examples: What the batch holds.
    """

    def __init__(
        self,
        model: nn.Module,
        other: nn.Module,
        names: Mapping[str, str],
        traces: dict[str, TracedCall],
        dtype_of: DtypeOf,
        examples: Examples,
    ):
        self.model, self.names, self.traces, self.dtype_of, self.examples = model, names, traces, dtype_of, examples
        self.others = {name: modules(other)[theirs] for name, theirs in names.items()}
        self.random_states = lambda: random_states(model, other)
        self.calls: list[ReplayedCall] = []
        self.drift = 0.0  # the largest relative difference of outputs so far, end to end
        self._counts = Counter[str]()
        self._opened: list[tuple[ReplayedCall, CallInputs, Callable[[], None]]] = []
        self._is_replaying = False

    def run(self, run: Run) -> list[ReplayedCall]:
        """Run the reference, and return its calls in their order."""
        with hooked(self.model, list(self.names), self._before, self._after):
            run()
        return self.calls

    def _before(self, name: str, module: nn.Module, inputs: CallInputs) -> None:
        if self._is_replaying:
            return
        self._counts[name] += 1
        caller = self._opened[-1][0].name if self._opened else None
        call = ReplayedCall(call_name(name, self._counts[name]), caller, type(module).__name__)
        self.calls.append(call)
        trace = self._trace_of(name, call)
        if trace is not None:
            call.arguments = list(differing(dict(inputs.beside()), trace.told, self.drift))
        self._opened.append((call, inputs.copied(), self.random_states()))

    def _trace_of(self, name: str, call: ReplayedCall) -> TracedCall | None:
        return self.traces.get(self.names[name] + call.name[len(name) :])

    def _after(self, name: str, module: nn.Module, output: Any) -> None:
        if self._is_replaying:
            return
        call, inputs, random_before = self._opened.pop()
        trace = self._trace_of(name, call)
        if trace is None:
            call.fault = "it is not called in the other model"
            return
        random_after, self._is_replaying = self.random_states(), True
        try:
            self._measure(call, _Replayed(self, name, module, inputs, trace, random_before), outputs_of(output))
        finally:
            self._is_replaying = False
            random_after()
            trace.outputs = {}

    def _measure(self, call: ReplayedCall, replayed: _Replayed, given: Outputs) -> None:
        try:
            pairs = replayed.local(given, call)
        except Exception as fault:  # whatever the other's code raises
            call.fault = f"its counterpart does not take its inputs: {type(fault).__name__}: {_first_line(fault)}"
            return
        apart = next(((mine, theirs) for mine, theirs in pairs if mine.shape != theirs.shape), None)
        if apart:
            call.fault = f"it gives {tuple(apart[0].shape)}, and its counterpart {tuple(apart[1].shape)}"
            return
        try:
            floors = replayed.floors()
        except Exception as fault:
            call.fault = f"it does not run in another precision: {type(fault).__name__}: {_first_line(fault)}"
            return
        ends = [theirs for _, theirs in paired(given, replayed.trace.outputs)]
        for place, (mine, theirs) in enumerate(pairs):
            size = self.examples.squares(difference(torch.zeros_like(mine), mine))
            floor = size * rounding_of(mine.dtype, theirs.dtype) ** 2
            for outputs in floors:
                floor = floor + self.examples.squares(difference(mine, outputs[place]))
            numbers = mine.numel() // max(1, int((size > 0).sum(1).gt(0).sum()))
            errors = OutputErrors(size, self.examples.squares(difference(mine, theirs)), floor, numbers)
            if place < len(ends) and ends[place].shape == mine.shape:
                errors.end_to_end = self.examples.squares(difference(mine, ends[place]))
                self.drift = max(self.drift, relative(errors.end_to_end, size))
            call.errors.append(errors)


@dataclass
class _Replayed:
    """One call, replayed in several ways."""

    replay: Replay
    name: str
    module: nn.Module
    inputs: CallInputs
    trace: TracedCall
    random_before: Callable[[], None]

    def local(self, given: Outputs, call: ReplayedCall) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs beside those of the counterpart on the same inputs.

        Where the two were told things in other forms, such as a mask that is a tensor or none, the counterpart also
        runs by what itself was told; a module is at fault if neither agrees.
        """
        other = self.replay.others[self.name]
        device = next((tensor.device for tensor in other.parameters()), None)
        copied = self.inputs.copied(self.trace.dtypes, self._default, device).taken_by(other)
        forms = other_forms(dict(self.inputs.beside()), self.trace.told)
        if not forms:
            return paired(given, self._run(other, copied))
        own = paired(given, self._run(other, copied.told(forms, device)))
        try:
            again = self.inputs.copied(self.trace.dtypes, self._default, device).taken_by(other)
            same = paired(given, self._run(other, again))
        except Exception:  # it does not take the reference's form
            return own
        squares = self.replay.examples.squares
        errors = [sum(float(squares(difference(*pair)).sum()) for pair in pairs) for pairs in (own, same)]
        if errors[0] > 4 * errors[1]:
            call.arguments += [(".".join(map(str, path)), _in_two_forms(self.inputs, path, forms)) for path in forms]
        return own if errors[0] <= errors[1] else same

    def floors(self) -> list[list[Tensor]]:
        """Return the module's own outputs in the precision of its counterpart, where that differs, and one above."""
        own, lowered = self.inputs.dtypes(), self.trace.dtypes
        dtypes = [tensor.dtype for tensor in self.module.parameters() if tensor.dtype in FLOATING]
        is_cast = any(lowered.get(path, self._default) not in (None, dtype) for path, dtype in own.items())
        runs = []
        if is_cast or any(
            self.replay.dtype_of(tensor) != tensor.dtype
            for tensor in self.module.parameters()
            if tensor.dtype in FLOATING
        ):
            with cast_tensors(self.module, self.replay.dtype_of):
                runs.append(self._run(self.module, self.inputs.copied(lowered, self._default)))
        if own or dtypes:
            above = ABOVE.get(coarser(*own.values(), *dtypes), torch.float64)
            with cast_tensors(self.module, lambda tensor: above):
                runs.append(self._run(self.module, self.inputs.copied({}, above)))
        return [list(outputs.values()) for outputs in runs]

    @property
    def _default(self) -> torch.dtype | None:
        """The type of tensors whose place the other's call does not have."""
        tensors = (tensor for tensor in self.module.parameters() if tensor.dtype in FLOATING)
        return next(iter(self.trace.dtypes.values()), None) or next(map(self.replay.dtype_of, tensors), None)

    def _run(self, module: nn.Module, inputs: CallInputs) -> Outputs:
        self.random_before()
        return outputs_of(module(*inputs.args, **inputs.kwargs))


def relative(error: Tensor, size: Tensor) -> float:
    """Return the relative error of an output from its sums of squares; infinite where only the reference is zero."""
    wrong, whole = float(error.sum()), float(size.sum())
    if math.isinf(wrong):
        return math.inf
    return math.sqrt(wrong / whole) if whole else math.inf if wrong else 0.0


def _in_two_forms(inputs: CallInputs, path: KeyPath, others: Told) -> str:
    mine = dict(inputs.beside())[path]
    return " and ".join(
        f"a tensor of {str(value.dtype).removeprefix('torch.')}, {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else repr(value)
        for value in (mine, others[path])
    )


def _first_line(fault: Exception) -> str:
    return str(fault).strip().partition("\n")[0]
