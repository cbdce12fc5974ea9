"""Scores of stitches of many pairs of layers, as tables in the same form as those of similarities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from netkin.applications.stitching.ends import Pair
from netkin.applications.stitching.evaluating import SCORES, Evaluation
from netkin.comparing.tabulating import INTERRUPTED
from netkin.results import Comparison, Values
from netkin.results.labels import NOT_ASKED

Outcomes = Mapping[tuple[Pair, str], Evaluation | str]  # by layers and method: the scores, or why there are none
HIGH, LOW = 0.8, 0.5  # similarities
GOOD, USELESS = 0.9, 0.5  # relative accuracies, or agreements
MOST = 6  # pairs named in a warning
FLATTERED = (
    "the stitches are evaluated on the data on which they were fitted, which flatters them; give other data as `test`."
)
UNFINISHED = "interrupted: some stitches were not reached, and have no value."


def score_tables(
    layers: tuple[Sequence[str], Sequence[str]],
    wanted: Iterable[Pair],
    hows: Sequence[str],
    scores: Sequence[str],
    found: Outcomes,
) -> dict[str, Values]:
    """Return a table for each score and method, those of the first score first."""
    examples = max((one.examples for one in found.values() if isinstance(one, Evaluation)), default=0)
    tables = {}
    for name, how in ((name, how) for name in scores for how in hows):
        score, known, missing = SCORES[name], dict[Pair, float](), dict.fromkeys(wanted, INTERRUPTED)
        for pair, one in ((pair, found[pair, how]) for pair in missing if (pair, how) in found):
            value = score.read(one) if isinstance(one, Evaluation) else None
            if value is not None and math.isfinite(value):
                known[pair] = value
            else:
                missing[pair] = score.why_not(one) if isinstance(one, Evaluation) else one
        values, reasons = to_matrix(layers, known, missing)
        tables[table_id(name, how)] = Values(
            id=table_id(name, how),
            name=name,
            parameters={"how": how},
            layers_a=tuple(layers[0]),
            layers_b=tuple(layers[1]),
            values=values,
            holes=reasons,
            higher_is_closer=score.higher_is_closer,
            bounds=score.bounds,
            symmetric=False,
            conventions=f"{score.convention}; stitched by {how}",
            statistic="Moments" if name.startswith("stitched") or name == "r2" else "Outputs",
            exactness=f"on {examples:,} test examples",
            kind="worth",
            unit=score.unit,
            means=score.means,
            cannot_see=score.cannot_see,
        )
    return tables


def lost_score(earlier: Comparison, wanted: Iterable[Pair], tables: Iterable[str]) -> str:
    """Return one of the scores of an earlier sweep that is not among these pairs and tables; empty without any."""
    wanted = set(wanted)
    for name, table in earlier.tables.items():
        for i, j in np.argwhere(np.isfinite(table.values)) if "how" in table.parameters else ():
            pair = table.layers_a[i], table.layers_b[j]
            if name not in tables or pair not in wanted:
                return f"{name} of {pair[0]!r} into {pair[1]!r}"
    return ""


def table_id(score: str, how: str) -> str:
    """Return the id of the table of a score by a method.

    Example:
        >>> table_id("agreement", "reduced_rank(k=8)")
        'agreement(how=reduced_rank(k=8))'
    """
    return f"{score}(how={how})"


def to_matrix(
    layers: tuple[Sequence[str], Sequence[str]], known: Mapping[Pair, float], missing: Mapping[Pair, str]
) -> tuple[np.ndarray, dict[Pair, str]]:
    """Return values as a matrix, and for each that is not there the reason: that of `missing`, or not requested."""
    values = np.full((len(layers[0]), len(layers[1])), np.nan)
    holes = {}
    for i, x in enumerate(layers[0]):
        for j, y in enumerate(layers[1]):
            if (x, y) in known:
                values[i, j] = known[x, y]
            else:
                holes[x, y] = missing.get((x, y), NOT_ASKED)
    return values, holes


def restrict(table: Values, layers: tuple[Sequence[str], Sequence[str]]) -> Values:
    """Return a table of a similarity with the rows and columns of a sweep."""
    pairs = [(x, y) for x in layers[0] for y in layers[1] if x in table.layers_a and y in table.layers_b]
    known = {pair: table[pair] for pair in pairs if pair not in table.holes}
    values, holes = to_matrix(layers, known, table.holes)
    return replace(table, layers_a=tuple(layers[0]), layers_b=tuple(layers[1]), values=values, holes=holes)


def contrasts(similarities: Sequence[Values], stitches: Mapping[str, Values]) -> Iterator[str]:
    """Yield a sentence where layers are similar and their stitch is poor, and one where it is the reverse."""
    # cka, or else the first that ends at 1; without labels, how often predictions agree
    fit = [table for table in similarities if table.higher_is_closer and table.bounds[1] == 1]
    measure = next((table for table in fit if table.name == "cka"), fit[0] if fit else None)
    some = {table.name for table in stitches.values() if np.isfinite(table.values).any()}
    main = next((name for name in ("relative_accuracy", "agreement") if name in some), "")
    judged = [table for table in stitches.values() if table.name == main]
    if measure is None or not judged:
        return
    score = judged[0].name.replace("_", " ")
    apart = list(_pairs_that_pass(measure, judged, HIGH, USELESS, lambda like, worth: like >= HIGH and worth < USELESS))
    alike = list(_pairs_that_pass(measure, judged, LOW, GOOD, lambda like, worth: like < LOW and worth >= GOOD))
    if apart:
        yield (
            f"a high similarity goes with a useless stitch ({measure.id} of {HIGH} or more, {score} below {USELESS}): "
            f"{_list_some(apart)}."
        )
    if alike:
        yield (
            f"a low similarity goes with a good stitch ({measure.id} below {LOW}, {score} of {GOOD} or more): "
            f"{_list_some(alike)}."
        )


def _pairs_that_pass(
    measure: Values, judged: Sequence[Values], similarity: float, value: float, test: Callable[[float, float], bool]
) -> Iterator[str]:
    """Yield the pairs of layers that meet a test, as text; its limits are a similarity and a value of stitches."""
    for i, x in enumerate(measure.layers_a):
        for j, y in enumerate(measure.layers_b):
            like = float(measure.values[i, j])
            found = [(t.parameters["how"], float(t.values[i, j])) for t in judged if test(like, float(t.values[i, j]))]
            if found:
                told = ", ".join(f"{beside(worth, value)} by {how}" for how, worth in found)
                yield f"{x if x == y else f'{x} → {y}'} ({measure.id} {beside(like, similarity)}; {told})"


def beside(value: float, limit: float) -> str:
    """Return a number with two decimals, or as many as show on which side of the limit it lies.

    Example:
        >>> beside(0.123, 0.5), beside(0.4998, 0.5)
        ('0.12', '0.4998')
    """
    rounded = (f"{value:.{digits}f}" for digits in range(2, 17))
    return next((text for text in rounded if (float(text) < limit) == (value < limit)), repr(value))


def _list_some(pairs: Sequence[str]) -> str:
    more = f", and {len(pairs) - MOST:,} more" if len(pairs) > MOST else ""
    return ", ".join(pairs[:MOST]) + more
