"""All pairs of several models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from netkin import files
from netkin.errors import NameClash, UnknownName, did_you_mean
from netkin.results.comparison import Comparison
from netkin.results.packing import all_unpacked, packed_many
from netkin.results.records import freeze, frozen_mapping
from netkin.results.spreads import Spread
from netkin.results.text import plural, summary_as_text
from netkin.results.values import Values

Pair = tuple[str, str]


@dataclass(frozen=True, eq=False, repr=False)
class Comparisons(Mapping[Pair, Comparison]):
    """The comparisons of several models with each other, by the names of the two: ``many["seed0", "seed1"]``."""

    pairs: Mapping[Pair, Comparison]

    def __init__(self, comparisons: Iterable[Comparison] | Mapping[Pair, Comparison]) -> None:
        found = list(comparisons.values() if isinstance(comparisons, Mapping) else comparisons)
        pairs: dict[Pair, Comparison] = {}
        for one in found:
            if pairs.setdefault((one.a, one.b), one) is not one:
                raise NameClash(f"two comparisons of {one.a!r} with {one.b!r}; give the models distinct names.")
        freeze(self, pairs=frozen_mapping(pairs))

    def __getitem__(self, pair: Pair) -> Comparison:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UnknownName(f"ask for a pair of models, as in `many['first', 'second']`; got {pair!r}.")
        if pair not in self.pairs:
            raise UnknownName(f"no comparison of {pair[0]!r} with {pair[1]!r}{self._advice(pair)}")
        return self.pairs[pair]

    def __contains__(self, pair: object) -> bool:
        return pair in self.pairs

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Comparisons, (list(self.pairs.values()),)

    def __repr__(self) -> str:
        return f"Comparisons({plural(len(self.models), 'model')}, {plural(len(self), 'pair')})"

    def __str__(self) -> str:
        return summary_as_text(self)

    # Mapping's own `get` waits for KeyError, which our refusal is not
    def get(self, pair: Pair, default: Any = None) -> Any:
        """Return the comparison of a pair, or `default` where there is none."""
        return self.pairs.get(pair, default)

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models, in the order in which they were given."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name in pair))

    @property
    def measures(self) -> tuple[str, ...]:
        """The ids of the measures, in the order they were asked for."""
        return tuple(dict.fromkeys(name for comparison in self.pairs.values() for name in comparison.measures))

    def summary(self, measure: str | None = None) -> np.ndarray:
        """Return one number for each pair of models, models × models in the order of `models`.

        It is the mean over layers of the same name; for models that share no name, the mean over each row's best match.
        NaN stands where nothing was compared: on the diagonal (unless a model was compared with itself), for a missing
        pair, for a pair with nothing but holes, and for the other direction of a measure that is not symmetric.
        """
        models = {name: place for place, name in enumerate(self.models)}
        means = np.full((len(models), len(models)), np.nan)
        for (a, b), comparison in self.pairs.items():
            i, j, table = models[a], models[b], comparison.table(measure)
            means[i, j] = _mean(table)
            if table.symmetric and (b, a) not in self.pairs:
                means[j, i] = means[i, j]
        return means

    def spread(self) -> Spread:
        """Return the mean and the standard deviation over the pairs of models, layer by layer."""
        return Spread.of(list(self.pairs.values()))

    def plot(
        self,
        measure: str | None = None,
        path: str | os.PathLike[str] | None = None,
        ax: Any = None,
        *,
        overwrite: bool = False,
    ) -> Any:
        """Return the summaries as a matplotlib figure, drawn into `ax` or written to `path` where one is given."""
        return import_module("netkin.reporting").plot(self, measure, path, ax, overwrite=overwrite)

    def _repr_html_(self) -> str:
        """Show the summaries in a notebook."""
        return import_module("netkin.reporting").notebook_view(self)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write all comparisons to one file, whole or not at all; over one of another kind only with `overwrite`."""
        headers, arrays = packed_many(self.pairs.values())
        files.write(path, "comparisons", {"comparisons": headers}, arrays, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Comparisons:
        """Return the comparisons that were saved at `path`."""
        header, arrays = files.read(path, "comparisons")
        with files.damage_reported(path):
            return all_unpacked(header, arrays)

    def _advice(self, pair: Pair) -> str:
        if tuple(reversed(pair)) in self.pairs:
            return f", but one of {pair[1]!r} with {pair[0]!r}; ask for that."
        strange = next((name for name in pair if name not in self.models), "")
        hint = did_you_mean(str(strange), self.models) or "."
        return f"{hint} The models are {', '.join(self.models) or 'none'}."


def _mean(table: Values) -> float:
    """Return the mean over layers of the same name, or over the best matches where no name is shared."""
    if set(table.layers_a).isdisjoint(table.layers_b):
        known = [value for _, value in table.best_matches().values()]
    else:
        known = list(table.corresponding().values())
    return float(np.mean(known)) if known else float("nan")
