"""Joints: which pairs of layers of two models can be stitched, and why others can't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from netkin.applications.stitching.ends import End, Meeting
from netkin.applications.stitching.joining import cuts_truly
from netkin.comparing.pairing import Pairs
from netkin.errors import ShapeError, ValueFault
from netkin.representations import guest, recording
from netkin.representations.cutting import known_layer
from netkin.representations.feeding import feed, take
from netkin.representations.layers import choose, spoken

Pair = tuple[str, str]


@dataclass(frozen=True)
class Joints:
    """The pairs of layers that were asked for: those that can be joined, and for the others the reason.

    `kinds` are the kinds of activations that occur, and `cuts` tells for each layer of the second model whether what
    follows it could be cut off.
    """

    layers: tuple[tuple[str, ...], tuple[str, ...]]
    wanted: tuple[Pair, ...]
    refused: Mapping[Pair, str]
    widths: tuple[Mapping[str, int], Mapping[str, int]]
    kinds: frozenset[str]
    cuts: Mapping[str, bool] = field(default_factory=dict)

    @property
    def joinable(self) -> list[Pair]:
        """The pairs that can be joined."""
        return [pair for pair in self.wanted if pair not in self.refused]


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
    chosen = _chosen(a, b, layers, pairs)
    ours, theirs = _ends(a, chosen[0], few, names[0]), _ends(b, chosen[1], few, names[1])
    given = (tuple(ours), tuple(theirs))
    told = names if names[0] != names[1] else ("a", "b")
    wanted = tuple(Pairs([told], pairs).listed(dict(zip(told, given, strict=True)), *told))
    refused = {(x, y): reason for x, y in wanted if (reason := _apart(ours[x], theirs[y], resize))}
    cuts, uncut = _cuts(b, dict.fromkeys(y for x, y in wanted if (x, y) not in refused), few, names[1])
    refused |= {pair: uncut[pair[1]] for pair in wanted if pair[1] in uncut and pair not in refused}
    found = [end for end in (*ours.values(), *theirs.values()) if isinstance(end, End)]
    first, second = ({x: end.width for x, end in ends.items() if isinstance(end, End)} for ends in (ours, theirs))
    return Joints(given, wanted, refused, (first, second), frozenset(end.kind for end in found), cuts)


def _chosen(a: nn.Module, b: nn.Module, layers: Any, pairs: Any) -> tuple[list[str], list[str]]:
    """Return the layers of both models that are looked at: those that listed pairs name, or those asked for."""
    if layers is None and not isinstance(pairs, str):
        listed: list[Pair] = Pairs([], pairs).which
        for model, names in ((a, [x for x, _ in listed]), (b, [y for _, y in listed])):
            for name in names:
                known_layer(model, name)
        return choose(a, [x for x, _ in listed]), choose(b, [y for _, y in listed])
    both = layers if isinstance(layers, Mapping) else {"a": layers, "b": layers}
    strange = next((key for key in both if key not in ("a", "b")), None)
    if strange is not None:
        raise ValueFault(f"`layers` names {strange!r}; the models are 'a' and 'b'.")
    return choose(a, both.get("a")), choose(b, both.get("b"))


def _ends(model: nn.Module, layers: Sequence[str], few: Any, name: str) -> dict[str, End | str]:
    """Return what each layer gives, in the order in which they run; a text where that can't be joined to anything."""
    ends: dict[str, End | str] = {}
    with guest(model), recording(model, layers) as kept:
        feed(model, few)
        for layer, output in kept.items():
            try:
                ends[layer] = End.of(output, f"{spoken(layer)} of {name!r}")
            except ShapeError as reason:
                ends[layer] = str(reason)
    return ends


def _apart(ours: End | str, theirs: End | str, resize: str | None) -> str:
    """Return why two layers can't be joined; empty if they can."""
    for end in (ours, theirs):
        if isinstance(end, str):
            return end
    try:
        Meeting(ours, theirs, resize)  # type: ignore[arg-type]
    except ShapeError as reason:
        return str(reason)
    return ""


def _cuts(b: nn.Module, layers: Mapping[str, None], few: Any, name: str) -> tuple[dict[str, bool], dict[str, str]]:
    """Return for each layer of the second model whether it could be cut there, or else why no stitch may end there."""
    cuts, reasons = {}, {}
    for layer in layers:
        try:
            cuts[layer] = cuts_truly(b, layer, few, name)
        except ValueFault as reason:
            reasons[layer] = str(reason)
    return cuts, reasons
