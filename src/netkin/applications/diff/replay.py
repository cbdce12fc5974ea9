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

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.diff.adapting import is_floating
from netkin.applications.diff.call_arguments import CallInputs, Keeper, Told, differing, other_forms
from netkin.applications.diff.floor import (
    ABOVE,
    DtypeOf,
    InsteadOfFloat32,
    cast_tensors,
    coarser,
    floating_parameters,
    rounding_of,
)
from netkin.applications.diff.routing import Choice, Choices, agreement, is_alike, rerouted, score_limits
from netkin.representations.hooks import KeyPath, leaves, uncompiled
from netkin.representations.inputs import FLOATING, attention_mask, device_of, length_if_known
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

    @classmethod
    def of(cls, batch: Any) -> Examples:
        """Return those of a batch, whose mask says which tokens count."""
        mask = attention_mask(batch)
        valid = None if mask is None or np.ndim(mask) != 2 else torch.as_tensor(mask).bool().cpu()
        return cls(length_if_known(batch) or 1, valid)

    def squares(self, tensor: Tensor) -> Tensor:
        """Return the sums of squares, examples × positions, without the positions that don't count."""
        sums = self._rows(tensor).square().sum(-1, dtype=torch.float64).cpu()
        return sums.where(self.valid, 0.0) if self.valid is not None and sums.shape == self.valid.shape else sums

    def without(self, tokens: Tensor | None) -> Examples:
        """Return the examples without some tokens, flat."""
        if tokens is None or len(tokens) % self.count:
            return self
        others = ~tokens.view(self.count, -1)
        return (
            self
            if self.valid is not None and self.valid.shape != others.shape
            else Examples(self.count, others if self.valid is None else self.valid & others)
        )

    def within(self, tokens: Tensor) -> bool:
        """Return whether all that counts is among some tokens, examples × positions."""
        return bool(tokens[self.valid].all() if self.valid is not None else tokens.all())

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
    choices: list[Choice] = field(default_factory=list)  # of experts, in modules inside too


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
    calls, counts, keeper = dict[str, TracedCall](), Counter[str](), Keeper()
    opened = list[tuple[str, int]]()  # calls, and how many choices had been made before
    choices = Choices(lambda: opened[-1][0] if opened else "")

    def before(name: str, module: nn.Module, inputs: CallInputs) -> None:
        counts[name] += 1
        key = call_name(name, counts[name])
        calls[key] = TracedCall(inputs.dtypes(), keeper.of(inputs))
        opened.append((key, len(choices.made)))

    def after(name: str, module: nn.Module, output: Any) -> None:
        key, start = opened.pop()
        calls[key].outputs = {path: tensor.detach().to("cpu", copy=True) for path, tensor in outputs_of(output).items()}
        calls[key].choices = choices.made[start:]

    with hooked(model, names, before, after), choices:
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
    whole: Tensor | None = None  # the size in the whole run


@dataclass
class ReplayedCall:
    """A call of the reference with what replaying it showed, or why it could not be replayed."""

    name: str
    caller: str | None
    kind: str
    errors: list[OutputErrors] = field(default_factory=list)
    arguments: list[tuple[str, str]] = field(default_factory=list)  # that differ, and how
    choices: list[Choice] = field(default_factory=list)
    routed: tuple[int, int] | None = None  # tokens with the same experts in both whole runs, of how many
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
        self._choices = Choices(lambda: self._opened[-1][0].name if self._opened else "")
        self._opened: list[tuple[ReplayedCall, CallInputs, Callable[[], None], int]] = []
        self._is_replaying = False

    def run(self, run: Run) -> list[ReplayedCall]:
        """Run the reference, and return its calls in their order."""
        with hooked(self.model, list(self.names), self._before, self._after), self._choices:
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
            call.arguments = self._differing(inputs, trace, call)
        self._opened.append((call, inputs.copied(), self.random_states(), len(self._choices.made)))

    def _differing(self, inputs: CallInputs, trace: Any, call: ReplayedCall) -> list[tuple[str, str]]:
        return list(differing(dict(inputs.beside()), trace.told, self.drift))

    def _replayed(self, *given: Any) -> Replayed:
        return Replayed(self, *given)

    def _trace_of(self, name: str, call: ReplayedCall) -> Any:
        return self.traces.get(self.names[name] + call.name[len(name) :])

    def _after(self, name: str, module: nn.Module, output: Any) -> None:
        if self._is_replaying:
            return
        call, inputs, random_before, start = self._opened.pop()
        call.choices = self._choices.made[start:]
        trace = self._trace_of(name, call)
        if trace is None:
            call.fault = "it is not called in the other model"
        if trace is None or call.fault:
            return
        random_after, self._is_replaying = self.random_states(), True
        try:
            replayed = self._replayed(name, module, inputs, trace, random_before)
            replayed.choices = [call.choices]
            self._measure(call, replayed, outputs_of(output))
        finally:
            self._is_replaying = False
            random_after()
            trace.outputs = {}
            del self._choices.made[start + len(call.choices) :]  # of replays

    def _routed(self, call: ReplayedCall, replayed: Replayed) -> tuple[int, int] | None:
        """Return how many tokens get the same experts in both whole runs, where the call itself chooses them."""
        pairs = zip(call.choices, replayed.chosen(call.choices), strict=False)
        counts = [
            agreement(mine, theirs, self.examples.valid)
            for mine, theirs in pairs
            if mine.call == call.name and is_alike(mine, theirs)
        ]
        return min(counts, default=None)

    def _measure(self, call: ReplayedCall, replayed: Replayed, given: Outputs) -> None:
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
        ends = replayed.ends(given)
        call.routed = self._routed(call, replayed)
        examples = self.examples.without(replayed.rerouted())
        if examples.valid is not None and not examples.valid.any():
            call.fault = "rounding routes tokens of all its examples to other experts"
            return
        for place, (mine, theirs) in enumerate(pairs):
            size = examples.squares(difference(torch.zeros_like(mine), mine))
            floor = size * rounding_of(mine.dtype, theirs.dtype) ** 2
            for outputs in floors:
                floor = floor + examples.squares(difference(mine, outputs[place]))
            numbers = mine.numel() // max(1, int((size > 0).sum(1).gt(0).sum()))
            errors = OutputErrors(size, examples.squares(difference(mine, theirs)), floor, numbers)
            if place < len(ends) and ends[place][0].shape == ends[place][1].shape:
                errors.end_to_end = self.examples.squares(difference(*ends[place]))
                errors.whole = self.examples.squares(difference(torch.zeros_like(mine), ends[place][0]))
                self.drift = max(self.drift, relative(errors.end_to_end, errors.whole))
            call.errors.append(errors)


@dataclass
class Replayed:
    """One call, replayed in several ways."""

    replay: Replay
    name: str
    module: nn.Module
    inputs: CallInputs
    trace: Any
    random_before: Callable[[], None]
    outputs: Outputs = field(default_factory=dict)  # of the module, on the inputs that both are given
    choices: list[Sequence[Choice]] = field(default_factory=list)  # of experts, the module's own first, then in replays
    first_floor: int = 0  # place in these of the first run that tells the floor
    scales: list[float] = field(default_factory=list)  # by which differences of each of those runs count

    def local(self, given: Outputs, call: ReplayedCall) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs beside those of the counterpart on the same inputs.

        Where the two were told things in other forms, such as a mask that is a tensor or none, the counterpart also
        runs by what itself was told; a module is at fault if neither agrees.
        """
        self.outputs = given
        other = self.replay.others[self.name]
        device = None if next(other.parameters(), None) is None else device_of(other)
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

    def chosen(self, like: Sequence[Choice]) -> Sequence[Choice]:
        """Return the choices of experts in the other model's whole run; `like` are those of the reference."""
        return self.trace.choices

    def rerouted(self) -> Tensor | None:
        """Return the tokens that rounding routes to other experts in some replay; of several routers, all examples."""
        own, others, floors = self.choices[0], self.choices[1 : self.first_floor], self.choices[self.first_floor :]
        limits = score_limits(own, floors, self.scales)
        exact = [choices for choices, scale in zip(floors, self.scales, strict=True) if scale == 1]
        tokens = [rerouted(own, choices, limits) for choices in others] + [rerouted(own, choices) for choices in exact]
        found = [one for one in tokens if one is not None]
        if not found or len({len(one) for one in found}) > 1:
            return None
        either, count = torch.stack(found).any(0), self.replay.examples.count
        if len(own) > 1 and len(either) % count == 0:  # later layers mix the tokens of an example
            either = either.view(count, -1).any(1, keepdim=True).expand(count, len(either) // count).flatten()
        return either

    def ends(self, given: Outputs) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs beside those of the counterpart, in the two whole runs."""
        return paired(given, self.trace.outputs)

    def floors(self) -> list[list[Tensor]]:
        """Return the module's own outputs in the precision of its counterpart, where that differs, and one above."""
        own, lowered = self.inputs.dtypes(), self.trace.dtypes
        dtypes = [tensor.dtype for tensor in self.module.parameters() if tensor.dtype in FLOATING]
        is_cast = any(lowered.get(path, self._default) not in (None, dtype) for path, dtype in own.items())
        runs, self.first_floor = [], len(self.choices)
        if is_cast or any(
            self.replay.dtype_of(inner, name) != tensor.dtype
            for inner, name, tensor in floating_parameters(self.module)
        ):
            runs.append(self._lowered(lowered))
            self.scales.append(1.0)
        if own or dtypes:
            runs.append(self._above(coarser(*own.values(), *dtypes)))
        return [list(outputs.values()) for outputs in runs]

    def _lowered(self, dtypes: Mapping[KeyPath, torch.dtype]) -> Outputs:
        """Return the outputs in the types of the counterpart, or all in the coarsest of these if it can't mix them."""
        try:
            with cast_tensors(self.module, self.replay.dtype_of):
                return self._run(self.module, self.inputs.copied(dtypes, self._default))
        except RuntimeError:  # the counterpart has code of its own that casts between them
            tensors = (self.replay.dtype_of(inner, name) for inner, name, _ in floating_parameters(self.module))
            return self._in_one_type(coarser(*dtypes.values(), *tensors))

    def _above(self, own: torch.dtype) -> Outputs:
        """Return the outputs in a wider type; where there is none, as far off as a coarser type lets expect."""
        if own in ABOVE:
            try:
                outputs = self._in_one_type(ABOVE[own])
                self.scales.append(1.0)
                return outputs
            except RuntimeError:  # some kernels have no float64
                if own != torch.float32:
                    raise
        below = torch.bfloat16 if own == torch.float32 else torch.float32
        coarse = self._in_one_type(below)
        scale = torch.finfo(own).eps / torch.finfo(below).eps  # rounding grows with it
        self.scales.append(scale)
        mine = self.outputs
        return {path: mine[path].double() + scale * difference(mine[path], coarse[path]) for path in coarse}

    def _in_one_type(self, dtype: torch.dtype) -> Outputs:
        with cast_tensors(self.module, lambda *_: dtype):
            try:
                return self._run(self.module, self.inputs.copied({}, dtype))
            except RuntimeError:
                if dtype == torch.float32:
                    raise
            with InsteadOfFloat32(dtype):  # which its code asks for somewhere
                return self._run(self.module, self.inputs.copied({}, dtype))

    @property
    def _default(self) -> torch.dtype | None:
        """The type of tensors whose place the other's call does not have."""
        dtypes = (self.replay.dtype_of(inner, name) for inner, name, _ in floating_parameters(self.module))
        return next(iter(self.trace.dtypes.values()), None) or next(dtypes, None)

    def _run(self, module: nn.Module, inputs: CallInputs) -> Outputs:
        self.random_before()
        with attributes_kept(module), Choices() as choices:
            outputs = outputs_of(module(*inputs.args, **inputs.kwargs))
        self.choices.append(choices.made)
        return outputs


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Inside the `with`, a module may set attributes and buffers, such as a table or cache; afterwards all are back."""
    before = [(table, dict(table)) for inner in module.modules() for table in (vars(inner), inner._buffers)]
    try:
        yield
    finally:
        for table, kept in before:
            table.clear()
            table.update(kept)


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
