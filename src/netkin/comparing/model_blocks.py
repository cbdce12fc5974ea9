"""Blocks of models that run together in a pass: which pairs each block compares, and how many models fit the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from netkin.comparing.alignment import Alignment, Pairs
from netkin.comparing.planning import Plan, make_plan, needs_of
from netkin.measures.registry import Measure
from netkin.results.values import Pair
from netkin.statistics.collector import LayerSize, Study


@dataclass(frozen=True)
class ModelBlock:
    """Models that run together in one pass, and the pairs of them that are compared in it."""

    models: tuple[str, ...]
    pairs: tuple[Pair, ...]


def blocks_of(pairs: Sequence[Pair], size: int) -> list[ModelBlock]:
    """Return blocks of at most `2 * size` models, each pair in exactly one; consecutive blocks share models.

    Example:
        >>> [block.models for block in blocks_of([("a", "b"), ("a", "c"), ("b", "c")], 1)]
        [('a', 'c'), ('a', 'b'), ('b', 'c')]
    """
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    count = -(-len(names) // size)
    if count < 3:
        return [ModelBlock(tuple(names), tuple(pairs))]
    group = {name: place * count // len(names) for place, name in enumerate(names)}
    found: dict[tuple[int, int], list[Pair]] = {}
    for a, b in pairs:
        i, j = sorted((group[a], group[b]))
        # the pairs inside a group go with the pass of this group and the next, so that no pass has two such sets
        home = (i, j) if i != j else (min(i, (i + 1) % count), max(i, (i + 1) % count))
        found.setdefault(home, []).append((a, b))
    ordered = sorted(found, key=lambda place: (place[0], place[1] if place[0] % 2 else -place[1]))
    return [ModelBlock(tuple(name for name in names if group[name] in place), tuple(found[place])) for place in ordered]


def pass_plan(
    layers: Mapping[str, Sequence[LayerSize]], which: Any, study: Study, measures: Sequence[Measure], size: int
) -> Plan:
    """Return the plan of the largest pass of two groups of models; refuse one that does not fit the study's limit.

    Args:
        layers: the layers of each model.
        which: the pairs of layers that are compared, as `pairs` of a comparison.
        study: the examples, the chunks and the limit.
        measures: what is to be read.
        size: how many models a group has.
    """
    heavy = sorted(layers, key=lambda name: -sum(one.width**2 for one in layers[name]))[: 2 * size]
    whole = len(heavy) == len(layers)
    own = heavy if whole else heavy[:size]
    pairs = list(combinations(own, 2)) + ([] if whole else [(a, b) for a in own for b in heavy[size:]])
    names = {name: [one.name for one in layers[name]] for name in heavy}
    rectangles = Pairs(pairs, which).rectangles(names)
    alignment = Alignment([one for name in heavy for one in layers[name]], rectangles)
    study = replace(study, layers=alignment.layers, rectangles=alignment.rectangles)
    return make_plan(needs_of(measures), study)


def largest_fit(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that fits, to an eighth, 0 if none does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    if high > most and fits(most):
        return most
    high = min(high, most)
    while high - low > max(low // 8, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
