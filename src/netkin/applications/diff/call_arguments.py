"""Arguments: what modules are told besides what they compute on, such as masks, positions, cos and sin, and flags.

Two models may agree in every module and still differ in what these are given. The first call whose argument differs
tells which module computed it: the one that was at work then.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.diff.adapting import adapted, is_floating
from netkin.representations.hooks import KeyPath, leaves, parts, rebuilt

MASKED = -1e4  # below which a number added to scores of attention masks them
ROUNDED = 16  # units of rounding, by which a number that both models compute may differ
PLAIN = (bool, int, float, str)

Told = dict[KeyPath, Any]


@dataclass
class CallInputs:
    """What a module is called with, each argument by its name."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    names: Sequence[str]  # of the positional arguments

    @classmethod
    def of(cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallInputs:
        """Return the inputs of a call."""
        try:
            known = [
                name
                for name, parameter in inspect.signature(module.forward).parameters.items()
                if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            ]
        except (TypeError, ValueError):  # no signature available
            known = []
        return cls(args, kwargs, [*known[: len(args)], *map(str, range(len(known), len(args)))])

    def by_name(self) -> dict[str, Any]:
        """Return all arguments by their names."""
        return dict(zip(self.names, self.args, strict=True)) | dict(self.kwargs)

    def copied(
        self,
        dtypes: Mapping[KeyPath, torch.dtype] | None = None,
        default: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> CallInputs:
        """Return copies of the arguments, floating tensors in other types if any are given."""
        return self._with(adapted(self.by_name(), dtypes or {}, default, device))

    def taken_by(self, module: nn.Module) -> CallInputs:
        """Return the arguments that a module takes: a port may compute masks and positions itself."""
        try:
            parameters = inspect.signature(module.forward).parameters
        except (TypeError, ValueError):  # no signature available
            return self
        kinds = Counter(parameter.kind for parameter in parameters.values())
        most = kinds[inspect.Parameter.POSITIONAL_ONLY] + kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD]
        count = len(self.args) if kinds[inspect.Parameter.VAR_POSITIONAL] else most
        takes_all = kinds[inspect.Parameter.VAR_KEYWORD] > 0
        kwargs = {name: value for name, value in self.kwargs.items() if takes_all or name in parameters}
        return CallInputs(self.args[:count], kwargs, self.names[:count])

    def told(self, others: Told, device: torch.device | None) -> CallInputs:
        """Return the inputs with some of what another module was told in the places of their own."""
        return self._with(_with_leaves(self.by_name(), adapted(others, {}, None, device)))

    def _with(self, given: Mapping[str, Any]) -> CallInputs:
        return CallInputs([given[name] for name in self.names], {name: given[name] for name in self.kwargs}, self.names)

    def dtypes(self) -> dict[KeyPath, torch.dtype]:
        """Return the types of floating tensors by their places."""
        return {path: leaf.dtype for path, leaf in leaves(self.by_name()) if is_floating(leaf)}

    def beside(self) -> Iterator[tuple[KeyPath, Any]]:
        """Yield what the module is told: tensors and plain values, but for the first floating tensor."""
        is_first = True
        for path, leaf in leaves(self.by_name()):
            if is_first and is_floating(leaf):
                is_first = False
            elif leaf is None or isinstance(leaf, (Tensor, *PLAIN)):
                yield path, leaf


def _with_leaves(structure: Any, changed: Told, path: KeyPath = ()) -> Any:
    if path in changed:
        return changed[path]
    inside = parts(structure)
    if not inside:
        return structure
    return rebuilt(structure, {key: _with_leaves(part, changed, (*path, key)) for key, part in inside.items()})


@dataclass
class Keeper:
    """Keeps what modules are told on the host; a tensor that many are given once."""

    _kept: dict[int, tuple[Tensor, int, Tensor]] = field(default_factory=dict)

    def of(self, inputs: CallInputs) -> Told:
        """Return what a call is told, in copies."""
        return {path: self.copy(leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in inputs.beside()}

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor."""
        # the tensor itself is held too, so that no other gets its identity
        _, version, copy = self._kept.get(id(tensor), (tensor, -1, tensor))
        if version != tensor._version:
            copy = tensor.detach().to("cpu", copy=True)
            self._kept[id(tensor)] = tensor, tensor._version, copy
        return copy


def other_forms(told: Told, others: Told) -> Told:
    """Return those of the others' arguments that are tensors where these are none or of another kind, or the reverse.

    Attention is told what is masked in ways of its own: as a tensor that is added, as one of flags, or not at all
    where the kernel masks by itself.
    """
    return {path: theirs for path, theirs in others.items() if path in told and _form(told[path]) != _form(theirs)}


def _form(value: Any) -> Any:
    return (value.dtype.is_floating_point, tuple(value.shape)) if isinstance(value, Tensor) else value is None


def differing(told: Told, others: Told, drift: float) -> Iterator[tuple[str, str]]:
    """Yield the names of arguments of one form that differ, and how they do, the second model's after the first's.

    Numbers that both models compute may differ by rounding, and by `drift`, the relative difference of all before.
    """
    for path, mine in told.items():
        if path not in others or _form(mine) != _form(others[path]):
            continue
        how = _difference(mine, others[path], drift)
        if how:
            yield ".".join(map(str, path)), how


def _difference(mine: Any, theirs: Any, drift: float) -> str:
    if not isinstance(mine, Tensor):
        return "" if mine == theirs else f"{mine!r} and {theirs!r}"
    mine, theirs = mine.detach().cpu(), theirs.cpu()
    if not mine.is_floating_point():
        apart = mine != theirs
    elif bool((mine <= MASKED).any() or (theirs <= MASKED).any()):
        apart = (mine <= MASKED) != (theirs <= MASKED)
        mine, theirs = (values.where(values > MASKED, float("-inf")) for values in (mine, theirs))
    else:
        wide = mine.double(), theirs.double()
        unit = ROUNDED * max(torch.finfo(values.dtype).eps for values in (mine, theirs))
        size = wide[0].square().mean().sqrt()
        if (wide[1] - wide[0]).square().mean().sqrt() <= max(unit, 3 * drift) * size:
            return ""
        apart = (wide[1] - wide[0]).abs() > max(unit, 3 * drift) * size
    if not apart.any():
        return ""
    place = tuple(apart.nonzero()[0].tolist())
    count = f"{int(apart.sum()):,} of {apart.numel():,} values"
    return f"{count} differ, the first at {place}: {mine[place].item():.6g} and {theirs[place].item():.6g}"
