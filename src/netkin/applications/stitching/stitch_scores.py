"""Scores of stitches of many pairs of layers, as tables in the same form as those of similarities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from netkin.applications.stitching.ends import Pair
from netkin.applications.stitching.evaluating import Evaluation
from netkin.comparing.tabulating import INTERRUPTED
from netkin.errors import UnknownName, ValueFault, did_you_mean
from netkin.measures.registry import LEADING
from netkin.results import Comparison, Values
from netkin.results.labels import NOT_ASKED

HIGH, LOW = 0.8, 0.5  # similarities
GOOD, USELESS = 0.9, 0.5  # relative accuracies, or agreements
MOST = 6  # pairs named in a warning
FLATTERED = (
    "the stitches are evaluated on the data on which they were fitted, which flatters them; give other data as `test`."
)
UNFINISHED = "interrupted: some stitches were not reached, and have no value."
USUAL = ("relative_accuracy", "agreement", "cross_entropy")
_NO_LABELS = "the test data have no labels"
_NONE_RIGHT = "the second model gives no right answer on the test data"
_TOO_FAR = "the stitched network's answers lie too far from the second model's for a finite cross-entropy"
_CONSTANT = "the second model's activations do not vary over the test data"
_CONSTANT_MAPPED = "the mapped activations do not vary over the test data"
_INFINITE = "it is no finite number on the test data"


def _unlabelled(evaluation: Evaluation) -> str:
    return _NO_LABELS if evaluation.accuracy is None else _NONE_RIGHT


def _unvarying(evaluation: Evaluation) -> str:
    return _CONSTANT if evaluation.r2 is None else _CONSTANT_MAPPED


@dataclass(frozen=True)
class Score:
    """One number of an evaluation: how it is read, which way it runs, between which ends, and why it may be missing."""

    read: Callable[[Evaluation], float | None]
    bounds: tuple[float, float]
    convention: str
    why_not: Callable[[Evaluation], str] = lambda e: _INFINITE
    higher_is_closer: bool = True
    unit: str = ""
    means: str = ""  # what a value means, in plain words
    cannot_see: str = ""


SCORES: Mapping[str, Score] = {
    "relative_accuracy": Score(
        lambda e: e.relative_accuracy,
        (0, math.inf),
        "accuracy of the stitched network over that of the second model, on the test data",
        _unlabelled,
        means="What a stitched network can do: the first model up to its layer, a map, and the second model after "
        "its own. 1 means that it gets as many right as the second model itself.",
        cannot_see="How the layers look: activations that are very different, or very alike, may carry the same "
        "answers or not. A poor value may also mean that the method found a poor map.",
    ),
    "accuracy": Score(
        lambda e: e.accuracy,
        (0, 1),
        "share of the test data that the stitched network gets right",
        _unlabelled,
        means="The share of right answers of a stitched network: the first model up to its layer, a map, and the "
        "second model after its own.",
        cannot_see="How good the second model is by itself; relative_accuracy takes that into account.",
    ),
    "agreement": Score(
        lambda e: e.agreement,
        (0, 1),
        "share of the test data on which the stitched network answers as the second does",
        means="How often a stitched network gives the answer of the second model itself, right or wrong. 1 means "
        "always.",
        cannot_see="How sure the answers are, and whether they are right; a poor map may be the method's fault.",
    ),
    "cross_entropy": Score(
        lambda e: e.cross_entropy,
        (0, math.inf),
        "mean cross-entropy, in nats, of the stitched network to the second model's soft answers",
        lambda e: _TOO_FAR,
        higher_is_closer=False,
        unit="nats",
        means="How far the answers of a stitched network are from the second model's own, in nats; the lowest "
        "value possible is the entropy of those answers, which is above 0 where the second model is unsure.",
        cannot_see="Whether the answers are right. One example answered wrongly with certainty can outweigh many "
        "good ones.",
    ),
    "r2": Score(
        lambda e: e.r2,
        (-math.inf, 1),
        "1 - ‖AM + b - B‖²/‖B - mean‖² of the map as it stands, not refitted",
        lambda e: _CONSTANT if e.r2 is None else _INFINITE,
        means="How much of the second model's activations the mapped ones explain as they stand: 1 is all, 0 no "
        "more than their mean, and below 0 they are farther away than that.",
        cannot_see="Whether what is explained matters to the answers: directions count by their variance alone.",
    ),
    "stitched_cka": Score(
        lambda e: e.cka,
        (0, 1),
        "cka of the mapped activations and the second model's own",
        _unvarying,
        means="How similarly the mapped activations and the second model's own arrange the examples, place by place.",
        cannot_see=f"{LEADING} A stitch that works may score low, and one that does not may score high.",
    ),
    "stitched_cca": Score(
        lambda e: e.cca,
        (0, 1),
        "cca_mean of the mapped activations and the second model's own",
        _unvarying,
        means="The mean canonical correlation of the mapped activations and the second model's own, place by place.",
        cannot_see="An invertible map does not change it, so it tells little of the map that was found.",
    ),
    "stitched_svcca": Score(
        lambda e: e.svcca,
        (0, 1),
        "svcca of the mapped activations and the second model's own",
        _unvarying,
        means="The mean canonical correlation of the leading directions of the mapped activations and of the "
        "second model's own, place by place.",
        cannot_see="Directions below the cut are ignored, and above it all count equally.",
    ),
}


def known_scores(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of scores, each once; one that does not exist is refused."""
    asked = [names] if isinstance(names, str) else list(names)
    if not asked:
        raise ValueFault("`scores` is empty; name at least one, e.g. 'relative_accuracy'.")
    for name in asked:
        if name not in SCORES:
            raise UnknownName(
                f"no score named {name!r}{did_you_mean(str(name), SCORES) or ';'} there are {', '.join(SCORES)}."
            )
    return tuple(dict.fromkeys(asked))


class Ledger:
    """The results so far for every requested pair of layers and every method."""

    def __init__(
        self,
        layers: tuple[Sequence[str], Sequence[str]],
        wanted: Iterable[Pair],
        hows: Sequence[str],
        scores: Sequence[str],
    ):
        self.layers, self.wanted, self.hows, self.scores = layers, list(wanted), hows, scores
        self.examples = 0
        self._values: dict[tuple[str, str], dict[Pair, float]] = {(s, h): {} for s in scores for h in hows}
        self._holes: dict[tuple[str, str], dict[Pair, str]] = {(s, h): {} for s in scores for h in hows}

    def note(self, pair: Pair, how: str, evaluation: Evaluation) -> None:
        """Write down what a stitch is worth."""
        self.examples = evaluation.examples
        for name in self.scores:
            value = SCORES[name].read(evaluation)
            if value is None or not math.isfinite(value):
                self._holes[name, how][pair] = SCORES[name].why_not(evaluation)
            else:
                self._values[name, how][pair] = value

    def refuse(self, pair: Pair, how: str, reason: str) -> None:
        """Write down why there is no stitch."""
        for name in self.scores:
            self._holes[name, how][pair] = reason

    def lost(self, earlier: Comparison) -> str:
        """Return one of the numbers that an earlier sweep found and this one does not request; empty without any."""
        wanted, own = set(self.wanted), {table_id(*key) for key in self._values}
        for name, table in earlier.tables.items():
            for i, j in np.argwhere(np.isfinite(table.values)) if "how" in table.parameters else ():
                pair = table.layers_a[i], table.layers_b[j]
                if name not in own or pair not in wanted:
                    return f"{name} of {pair[0]!r} into {pair[1]!r}"
        return ""

    def tables(self) -> dict[str, Values]:
        """Return a table for each score and method, those of the first score first."""
        made = [self._table(name, how) for name in self.scores for how in self.hows]
        return {table.id: table for table in made}

    def _table(self, name: str, how: str) -> Values:
        known, holes = self._values[name, how], self._holes[name, how]
        missing = dict.fromkeys(self.wanted, INTERRUPTED) | holes
        values, reasons = to_matrix(self.layers, known, missing)
        score = SCORES[name]
        return Values(
            id=table_id(name, how),
            name=name,
            parameters={"how": how},
            layers_a=tuple(self.layers[0]),
            layers_b=tuple(self.layers[1]),
            values=values,
            holes=reasons,
            higher_is_closer=score.higher_is_closer,
            bounds=score.bounds,
            symmetric=False,
            conventions=f"{score.convention}; stitched by {how}",
            statistic="Moments" if name.startswith("stitched") or name == "r2" else "Outputs",
            exactness=f"on {self.examples:,} test examples",
            kind="worth",
            unit=score.unit,
            means=score.means,
            cannot_see=score.cannot_see,
        )


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
    measure = _reference(similarities)
    judged = [table for table in stitches.values() if table.name == _main_score(stitches.values())]
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


def _reference(similarities: Sequence[Values]) -> Values | None:
    """Return the similarity that stitches are compared with: cka, or else the first that ends at 1."""
    fit = [table for table in similarities if table.higher_is_closer and table.bounds[1] == 1]
    return next((table for table in fit if table.name == "cka"), fit[0] if fit else None)


def _main_score(stitches: Iterable[Values]) -> str:
    """Return the main score of stitches: without labels, how often predictions agree."""
    some = [table.name for table in stitches if np.isfinite(table.values).any()]
    return next((name for name in ("relative_accuracy", "agreement") if name in some), "")


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


def with_count(said: Sequence[str]) -> list[str]:
    """Return the first of sentences that say the same of several stitches, with their number."""
    return [said[0] + (f" This holds for {len(said):,} stitches." if len(said) > 1 else "")] if said else []


def _list_some(pairs: Sequence[str]) -> str:
    more = f", and {len(pairs) - MOST:,} more" if len(pairs) > MOST else ""
    return ", ".join(pairs[:MOST]) + more
