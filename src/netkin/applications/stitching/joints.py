"""Joints: which pairs of layers of two models can be stitched, and why others can't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from netkin.applications.stitching.ends import End, Meeting, Pair
from netkin.applications.stitching.fitting import ends_of, named, refuse_unsteady
from netkin.applications.stitching.joining import Cutting
from netkin.comparing.alignment import Pairs
from netkin.errors import NetkinError, ShapeError, ValueFault
from netkin.representations import recording
from netkin.representations.cutting import known_layer
from netkin.representations.inputs import feed, take
from netkin.representations.layers import choose


@dataclass(frozen=True)
class Joints:
    """The pairs of layers that were asked for: those that can be joined, and for the others the reason.

    `forms` are the kinds of activations by layer, and `cuts` tells for each layer of the second model whether what
    follows it could be cut off.
    """

    layers: tuple[tuple[str, ...], tuple[str, ...]]
    wanted: tuple[Pair, ...]
    refused: Mapping[Pair, str]
    widths: tuple[Mapping[str, int], Mapping[str, int]]
    forms: Mapping[str, str]
    cuts: Mapping[str, bool] = field(default_factory=dict)
    unequal: bool = False  # whether maps of other sizes are to meet

    @property
    def joinable(self) -> list[Pair]:
        """The pairs that can be joined."""
        return [pair for pair in self.wanted if pair not in self.refused]

    @property
    def shape(self) -> tuple[Any, str | None]:
        """The `shape` and `resize` by which similarities compare the layers: by places, or by means over them.

        Places where all are maps of two or three dimensions, or rows; means where there are tokens, or lines.
        """
        if not {"tokens", "lines"} & {*self.forms.values()}:
            return "positions", "average" if self.unequal else None
        return {layer: over_length for layer, form in self.forms.items() if form == "lines"} or None, None


def joints(
    a: nn.Module,
    b: nn.Module,
    batch: Any,
    layers: Any = None,
    pairs: Any = "corresponding",
    *,
    resize: str | None = None,
    names: tuple[str, str] = ("a", "b"),
) -> Joints:
    """Return which pairs of layers can be joined, tried out on a few examples of a batch."""
    few = take(batch, 4)
    chosen = _chosen(a, b, layers, pairs, names)
    ours = ends_of(a, partial(_outputs, a, chosen[0]), few, names[0])
    theirs = ends_of(b, partial(_outputs, b, chosen[1]), few, names[1])
    given = (tuple(ours), tuple(theirs))
    told = names if names[0] != names[1] else ("a", "b")
    wanted = tuple(Pairs([told], pairs).listed(dict(zip(told, given, strict=True)), *told))
    refused = {(x, y): reason for x, y in wanted if (reason := _apart(ours[x], theirs[y], resize))}
    cuts, uncut = _cuts(b, list(dict.fromkeys(y for x, y in wanted if (x, y) not in refused)), few, names[1])
    refused |= {pair: uncut[pair[1]] for pair in wanted if pair[1] in uncut and pair not in refused}
    forms = {layer: end.form for ends in (ours, theirs) for layer, end in ends.items() if isinstance(end, End)}
    first, second = ({x: end.width for x, end in ends.items() if isinstance(end, End)} for ends in (ours, theirs))
    spaces = [{layer: end.space for layer, end in ends.items() if isinstance(end, End)} for ends in (ours, theirs)]
    unequal = any(spaces[0].get(x) != spaces[1].get(y) for x, y in wanted)
    return Joints(given, wanted, refused, (first, second), forms, cuts, unequal)


def over_length(output: Tensor) -> Tensor:
    """Return the mean over the places of maps of one dimension."""
    return output.mean(2)


def _chosen(a: nn.Module, b: nn.Module, layers: Any, pairs: Any, names: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Return the layers of both models that are looked at: those that listed pairs name, or those asked for."""
    if layers is None and not isinstance(pairs, str):
        listed: list[Pair] = Pairs([], pairs).which
        first, second = [x for x, _ in listed], [y for _, y in listed]
        return _known(a, first, names[0]), _known(b, second, names[1])
    both = layers if isinstance(layers, Mapping) else {"a": layers, "b": layers}
    strange = next((key for key in both if key not in ("a", "b")), None)
    if strange is not None:
        raise ValueFault(f"`layers` names {strange!r}; the models are 'a' and 'b'.")
    with named(a, names[0]):
        ours = choose(a, both.get("a"))
    with named(b, names[1]):
        return ours, choose(b, both.get("b"))


def _known(model: nn.Module, layers: Sequence[str], name: str) -> list[str]:
    """Return single layers of a model by name."""
    with named(model, name):
        for layer in layers:
            known_layer(model, layer)
        return choose(model, layers)


def _outputs(model: nn.Module, layers: Sequence[str], batch: Any) -> dict[str, Tensor]:
    """Return what layers give, every call of them, in the order in which they run."""
    with recording(model, layers) as kept:
        feed(model, batch)
        return dict(kept)


def _apart(ours: End | NetkinError, theirs: End | NetkinError, resize: str | None) -> str:
    """Return why two layers can't be joined; empty if they can."""
    if isinstance(ours, NetkinError) or isinstance(theirs, NetkinError):
        return str(ours if isinstance(ours, NetkinError) else theirs)
    try:
        Meeting(ours, theirs, resize)
    except ShapeError as reason:
        return str(reason)
    return ""


def _cuts(b: nn.Module, layers: Sequence[str], few: Any, name: str) -> tuple[dict[str, bool], dict[str, str]]:
    """Return for each layer of the second model whether it could be cut there, or else why no stitch may end there."""
    cuts, reasons = {}, {}
    try:
        refuse_unsteady(b, few, name)
    except ValueFault as reason:
        return {}, dict.fromkeys(layers, str(reason))
    cutting = Cutting(b, few, name)
    for layer in layers:
        try:
            cuts[layer] = cutting.is_true(layer)
        except ValueFault as reason:
            reasons[layer] = str(reason)
    return cuts, reasons
