"""A training run as a series: the layers of each checkpoint against those of the final one; and its `Trend`.

Bottom-up convergence is a number too, a `Trend`: Kendall's rank correlation of layers' depth and step of convergence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from netkin.errors import InvalidValue, NoValue, UnknownName, require_listed
from netkin.results.caveats import Caveat, grouped
from netkin.results.comparison import NUMBERS, Comparison
from netkin.results.packing import LongForm, Result
from netkin.results.records import optional
from netkin.results.text import series_as_text
from netkin.results.values import Values

THRESHOLDS = (0.9, 0.99, 0.999)  # of a similarity to the final state


@dataclass(frozen=True)
class Trend:
    """Kendall's τ-b between depth and step: 1 if layers settle from the bottom up, -1 if from the top down.

    `error` is its standard error by the jackknife over layers (None below three layers); `p` the probability of a τ at
    least as far from 0 if layers settled in random order, exact also with ties. Of the `layers` counted, `never` did
    not reach the threshold before the last step; all that is known of them is that they are later, so they tie there.
    Besides, `early` layers are at the threshold at the first step; they say nothing about settling and are left out.
    """

    tau: float
    error: float | None
    p: float
    layers: int
    never: int
    early: int = 0

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.2f}"
        never = f", {self.never} of them never before the end" if self.never else ""
        early = f"; {self.early} more there at the first step, left out" if self.early else ""
        return f"τ = {self.tau:.2f}{error}, p = {self.p:.2g} ({self.layers} layers{never}{early})"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Series(Result):
    """The checkpoints of a run against the final one: `series[100]` is the comparison at step 100.

    In each comparison rows are layers of the checkpoint and columns layers of the final one. The final checkpoint is
    the last step, where every layer equals itself. `missing` lists steps that were requested and not reached.
    `between` compares all steps with each other, a table for each measure and layer, where weights alone are read.
    """

    kind: ClassVar[str] = "series"

    run: str
    steps: tuple[int, ...]
    comparisons: tuple[Comparison, ...]
    final_step: int
    unit: str = "step"
    missing: tuple[int, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    between: Comparison | None = None

    @property
    def measures(self) -> tuple[str, ...]:
        """The ids of the measures, in the order they were requested."""
        return self.comparisons[-1].measures

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have a final state to be compared with, the lowest first."""
        final = self.comparisons[-1]
        return tuple(layer for layer in final.layers_a if layer in final.layers_b)

    @property
    def complete(self) -> bool:
        """Whether all steps that were requested are there, from all of the data."""
        return not self.missing and all(comparison.complete for comparison in self.comparisons)

    @property
    def caveats(self) -> tuple[Caveat, ...]:
        """The caveats of all steps, each once, and which steps are missing."""
        said = list(grouped(caveat for comparison in self.comparisons for caveat in comparison.caveats))
        failed = {name[7:]: why for name, why in self.provenance.items() if name.startswith(f"failed {self.unit} ")}
        said += [Caveat("failed", f"{step} has failed and is left out: {why}") for step, why in failed.items()]
        left, total = len(self.missing) - len(failed), len(self.steps) + len(self.missing)
        if left > 0:
            said.append(Caveat("interrupted", f"interrupted: {left} of {total} steps are missing."))
        return tuple(said)

    def __getitem__(self, step: int) -> Comparison:
        if step not in self.steps:
            raise UnknownName(f"no {self.unit} {step!r} in this series; it has {_listed(self.steps)}.")
        return self.comparisons[self.steps.index(step)]

    def __contains__(self, step: object) -> bool:
        return step in self.steps

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        steps = f"{len(self.steps)} {self.unit}s to {self.final_step}"
        return f"Series({self.run!r}, {steps}, measures={list(self.measures)}, {len(self.layers)} layers)"

    def __str__(self) -> str:
        return series_as_text(self)

    def table(self, measures: str | None = None) -> Values:
        """Return the final step's table of the measure that is named, with its labels and facts."""
        return self.comparisons[-1].table(measures)

    def to_numpy(self, measures: str | None = None) -> np.ndarray:
        """Return a measure's values, steps × layers of the checkpoint × layers of the final one, NaN in holes."""
        return np.array([comparison.table(measures).values for comparison in self.comparisons])

    def own(self, measures: str | None = None) -> np.ndarray:
        """Return each layer against its own final state, steps × layers, NaN where the measure has no value."""
        final = self.comparisons[-1]
        rows = [final.layers_a.index(layer) for layer in self.layers]
        columns = [final.layers_b.index(layer) for layer in self.layers]
        return self.to_numpy(measures)[:, rows, columns]

    def between_steps(self, layer: str, measures: str | None = None) -> np.ndarray:
        """Return a layer at every step against itself at every other, steps × steps."""
        name = f"{self.table(measures).id} of {layer}"
        if self.between is None or name not in self.between.tables:
            raise UnknownName(
                f"this series holds no {name!r} of all pairs of {self.unit}s; measures of weights, such as "
                "'atom_cosine', have them, layer by layer."
            )
        return self.between.tables[name].to_numpy()

    def reached(self, threshold: float, measures: str | None = None) -> dict[str, int | None]:
        """Return for each layer the step from which on it stays at `threshold` of its final state, or None.

        A similarity is there at or above the threshold, a distance at or below it, a missing value never. The final
        step does not count: there every layer equals itself.
        """
        there = self._there(threshold, measures)[:-1]
        there = np.logical_and.accumulate(there[::-1])[::-1]
        places = there.argmax(axis=0) if len(there) else np.zeros(len(self.layers), dtype=int)
        return {
            layer: self.steps[place] if there[:, i].any() else None
            for i, (layer, place) in enumerate(zip(self.layers, places.tolist(), strict=True))
        }

    def marks(self, measures: str | None = None) -> tuple[float, ...]:
        """Return 0.9, 0.99 and 0.999 for a similarity that ends at 1; any other measure has no such marks."""
        table = self.table(measures)
        return THRESHOLDS if table.higher_is_closer and math.isclose(table.bounds[1], 1) else ()

    def bottom_up(self, threshold: float, measures: str | None = None, *, layers: Sequence[str] | None = None) -> Trend:
        """Return Kendall's τ-b between the depth of the layers and the step at which they reach `threshold`.

        Depth is the order of the layers, or of those named in `layers`. Those that never reach the threshold tie at the
        final step and are counted in `never`. Those that are there at the first step, before anything could be seen to
        settle, are left out and counted in `early`.
        """
        reached = self.reached(threshold, measures)
        strange = [layer for layer in layers or () if layer not in reached]
        if strange:
            require_listed("layer", strange[0], reached)
        steps = [reached[layer] for layer in layers or self.layers]
        settling = [step for step in steps if step != self.steps[0]]
        late = [self.final_step if step is None else step for step in settling]
        return trend(late, never=settling.count(None), early=len(steps) - len(settling))

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says beside the fields: the layers, the caveats, and when which layer settles."""
        facts = {name: getattr(self, name) for name in ("layers", "caveats", "complete")}
        return facts | {"measures": {measure: self._settling(measure) for measure in self.measures}}

    def _settling(self, measure: str) -> dict[str, Any]:
        trends = dict[str, Any]()
        for mark in self.marks(measure):
            try:
                trends[str(mark)] = self.bottom_up(mark, measure)
            except NoValue as reason:
                trends[str(mark)] = {"tau": None, "reason": str(reason)}
        reached = {str(mark): self.reached(mark, measure) for mark in self.marks(measure)}
        return {"own": self.own(measure), "reached": reached, "bottom_up": trends}

    def to_pandas(self, measures: str | None = None) -> Any:
        """Return `own` as a data frame, steps × layers; of several measures and none named, one row for each number."""
        pandas = optional("pandas")
        if measures is None and len(self.measures) != 1:
            columns, rows = self.long_form()
            return pandas.DataFrame(list(rows), columns=columns)
        steps, layers = pandas.Index(self.steps, name=self.unit), pandas.Index(self.layers, name="layer")
        return pandas.DataFrame(self.own(measures), index=steps, columns=layers)

    def long_form(self) -> LongForm:
        """Return a row for each number at each step; `layer_b` is a layer of the final step."""
        return (self.unit, *NUMBERS), ((step, *row) for step in self.steps for row in self[step].numbers())

    def _there(self, threshold: float, measure: str | None) -> np.ndarray:
        """Return at which steps each layer is as close to its final state as `threshold`."""
        table, values = self.table(measure), self.own(measure)
        low, high = table.bounds
        if not low <= threshold <= high:
            raise InvalidValue(f"{table.id} lies between {low:g} and {high:g}; a threshold of {threshold:g} does not.")
        return values >= threshold if table.higher_is_closer else values <= threshold


def _listed(steps: Sequence[int], most: int = 6) -> str:
    shown = ", ".join(map(str, steps[:most])) or "none"
    return f"{shown}, ... {steps[-1]}" if len(steps) > most else shown


# --- the order in which layers settle ---------------------------------------------------------------------------------


def trend(steps: Sequence[float], never: int = 0, early: int = 0) -> Trend:
    """Return the trend of layers that are done at `steps`, the lowest layer first; `early` ones are not among them.

    Example:
        >>> print(trend([100, 200, 200, 500]))
        τ = 0.91 ± 0.16, p = 0.17 (4 layers)
    """
    if len(set(steps)) < 2:
        layers = f"{len(steps)} {'layer' if len(steps) == 1 else 'layers'}"
        late = never and never == len(steps)
        which = (
            "of which none reaches the threshold before the end"
            if late
            else f"that {'reaches' if len(steps) == 1 else 'reach'} the threshold at the same step"
        )
        left = f"{early} at the threshold at the first step {'is' if early == 1 else 'are'} left out" if early else ""
        fact = f"there is no order among {layers} {which}{f' ({left})' if early else ''}"
        if not steps:
            fact = f"{'the layer' if early == 1 else f'all {early} layers'} reached it by the first step"
        raise NoValue(f"{fact}; choose another threshold, or compare more checkpoints.")
    return Trend(kendall(steps), _jackknife(steps), _p(steps), len(steps), never, early)


def kendall(steps: Sequence[float]) -> float:
    """Return Kendall's τ-b of `steps` against their places, 0 where all are the same.

    Example:
        >>> kendall([1, 2, 3]), kendall([3, 2, 1]), kendall([5, 5, 5])
        (1.0, -1.0, 0.0)
    """
    score, untied, pairs = _score(steps), _untied(steps), len(steps) * (len(steps) - 1) // 2
    if not untied:
        return 0.0
    root = math.isqrt(untied * pairs)
    # a whole root keeps a perfect order at exactly 1
    return score / root if root * root == untied * pairs else float(score / np.sqrt(float(untied * pairs)))


def _score(steps: Sequence[float]) -> int:
    """Return the number of pairs in order less the number of pairs out of order."""
    values = np.asarray(steps)
    return int(np.triu(np.sign(values[None, :] - values[:, None])).sum())


def _untied(steps: Sequence[float]) -> int:
    n, tied = len(steps), sum(count * (count - 1) // 2 for count in Counter(steps).values())
    return n * (n - 1) // 2 - tied


def _jackknife(steps: Sequence[float]) -> float | None:
    """Return the standard error from leaving each layer out in turn; a rest without any order counts as 0."""
    n = len(steps)
    if n < 3:
        return None
    left = np.array([kendall([*steps[:i], *steps[i + 1 :]]) for i in range(n)])
    return float(np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum()))


def _p(steps: Sequence[float]) -> float:
    """Return the share of all orders of `steps` whose score lies as far from 0 as theirs.

    The orders of a multiset by their number of inversions are counted by the Gaussian multinomial coefficient
    Π(1 - qⁱ) / Π Π(1 - qʲ), i up to n and j up to the size of each group of ties (Stanley, Enumerative
    Combinatorics 1, prop. 1.7.1).
    """
    untied, score = _untied(steps), _score(steps)
    counts = np.zeros(untied + 1, dtype=object)
    counts[0] = 1
    for i in range(1, len(steps) + 1):
        counts[i:] = counts[i:] - counts[: max(len(counts) - i, 0)]
    for size in Counter(steps).values():
        for j in range(1, size + 1):
            counts = _divided(counts, j)
    scores = untied - 2 * np.arange(untied + 1)
    return float(counts[np.abs(scores) >= abs(score)].sum() / counts.sum())


def _divided(counts: np.ndarray, j: int) -> np.ndarray:
    """Return the power series `counts` over 1 - qʲ: each term takes up the one `j` places before."""
    padded = np.concatenate([counts, np.zeros(-len(counts) % j, dtype=object)])
    return padded.reshape(-1, j).cumsum(axis=0).ravel()[: len(counts)]
