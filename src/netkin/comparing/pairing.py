"""Pairs: which layers of which models are set beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from netkin.errors import ShapeError, UnknownName, ValueFault, did_you_mean

Rectangle = tuple[list[str], list[str]]


class Pairs:
    """The pairs asked for: `of` the models, and within each pair of models "all", "corresponding" or a list."""

    def __init__(self, of: Sequence[tuple[str, str]], which: Any = "all"):
        self.of = of
        self.which: Any = which if isinstance(which, str) else _listed(which)
        if isinstance(which, str) and which not in ("all", "corresponding"):
            raise UnknownName(f"`pairs` is 'all', 'corresponding' or a list of (layer, layer); got {which!r}.")

    def rectangles(self, layers: Mapping[str, Sequence[str]]) -> list[Rectangle]:
        """Return the pairs as (names, names), each meaning all of the first against all of the second."""
        if self.which == "all":
            return [(_keys(a, layers[a]), _keys(b, layers[b])) for a, b in self.of]
        return [([f"{a}/{x}"], [f"{b}/{y}"]) for a, b in self.of for x, y in self.listed(layers, a, b)]

    def listed(self, layers: Mapping[str, Sequence[str]], a: str, b: str) -> list[tuple[str, str]]:
        """Return the pairs of layers wanted of models `a` and `b`."""
        if self.which == "all":
            return [(x, y) for x in layers[a] for y in layers[b]]
        if self.which == "corresponding":
            return corresponding(layers[a], layers[b])
        for x, y in self.which:
            _refuse_unknown(x, a, layers[a])
            _refuse_unknown(y, b, layers[b])
        return list(self.which)


def corresponding(a: Sequence[str], b: Sequence[str]) -> list[tuple[str, str]]:
    """Return layers of the same name in both; if no name is shared, layers of the same place.

    Example:
        >>> corresponding(["conv1", "fc"], ["conv1", "conv2", "fc"])
        [('conv1', 'conv1'), ('fc', 'fc')]
    """
    shared = [(name, name) for name in a if name in b]
    if shared:
        return shared
    if len(a) != len(b):
        raise ShapeError(
            f"the models share no layer names and have {len(a)} and {len(b)} layers, so none correspond; "
            "pass `pairs=[(layer, layer), ...]`."
        )
    return list(zip(a, b, strict=True))


def _listed(which: Any) -> list[tuple[str, str]]:
    """Return a list of pairs without repetitions."""
    found = list(which) if isinstance(which, Iterable) else [which]
    wrong = [pair for pair in found if not (isinstance(pair, (tuple, list)) and len(pair) == 2)]
    if wrong or not found:
        got = repr(wrong[0]) if wrong else "an empty list"
        raise ValueFault(f"`pairs` must hold (layer, layer), as in [('conv1', 'conv2')]; got {got}.")
    return list(dict.fromkeys((x, y) for x, y in found))


def _keys(model: str, layers: Sequence[str]) -> list[str]:
    return [f"{model}/{layer}" for layer in layers]


def _refuse_unknown(name: str, model: str, layers: Sequence[str]) -> None:
    if name not in layers:
        raise UnknownName(
            f"`pairs` names layer {name!r}, which {model!r} does not give{did_you_mean(name, layers) or '.'}"
        )
