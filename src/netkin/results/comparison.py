"""The comparison of two models: a table for each measure, with labels and provenance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar, overload

import numpy as np

from netkin.errors import UnknownName, did_you_mean
from netkin.results.caveats import Caveat
from netkin.results.labels import NOT_ASKED, fits
from netkin.results.packing import LongForm, Result
from netkin.results.records import distinct, freeze, now, optional
from netkin.results.text import comparison_as_text
from netkin.results.values import Match, Values

MODELS = ("model_a", "model_b")
NUMBERS = ("measure", "layer_a", "layer_b", "value", "error", "low", "high", "reason")  # columns of the long form


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison(Result):
    """Two models compared, layer by layer: frozen, labelled, and with its provenance.

    `c["cka"]` is a measure's table and `c["cka"]["layer1", "layer2"]` a number in it; with one measure
    `c["layer1", "layer2"]` is that number at once.
    """

    kind: ClassVar[str] = "comparison"

    a: str
    b: str
    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    tables: Mapping[str, Values]
    shapes_a: Mapping[str, str]
    shapes_b: Mapping[str, str]
    widths_a: Mapping[str, int]
    widths_b: Mapping[str, int]
    data: str
    examples: int
    seed: int
    version: str
    created: str = field(default_factory=now)
    caveats: tuple[Caveat, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        freeze(self, layers_a=distinct(self.layers_a, "rows"), layers_b=distinct(self.layers_b, "columns"))

    @property
    def measures(self) -> tuple[str, ...]:
        """The ids of the measures, in the order they were requested."""
        return tuple(self.tables)

    @property
    def needs_no_data(self) -> bool:
        """Whether the numbers come from the weights alone, so that no examples were run."""
        return self.examples == 0

    @overload
    def __getitem__(self, key: str) -> Values: ...

    @overload
    def __getitem__(self, key: tuple[str, str]) -> float: ...

    def __getitem__(self, key: str | tuple[str, str]) -> Values | float:
        """Return a measure's table, or with one measure the value of a pair of layers."""
        return self._named(key) if isinstance(key, str) else self._only()[key]

    def __contains__(self, measure: object) -> bool:
        return isinstance(measure, str) and len(self._matching(measure)) == 1

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __repr__(self) -> str:
        data = "weights alone" if self.needs_no_data else f"{self.examples:,} examples"
        size = f"{len(self.layers_a)} × {len(self.layers_b)} layers, {data}"
        return f"Comparison({self.a!r}, {self.b!r}, measures={list(self.measures)}, {size})"

    def __str__(self) -> str:
        return comparison_as_text(self)

    def table(self, measures: str | None = None) -> Values:
        """Return the table of the measure that is named; with one measure it need not be named."""
        return self._only() if measures is None else self._named(measures)

    def best_matches(self, measures: str | None = None) -> dict[str, Match]:
        """Return for every layer of the first model its closest layer of the second and the value there."""
        return self.table(measures).best_matches()

    def to_numpy(self, measures: str | None = None) -> np.ndarray:
        """Return a measure's matrix; of several, where none is named, measures × rows × columns."""
        if measures is None and len(self.tables) != 1:
            return np.array([table.values for table in self.tables.values()])
        return self.table(measures).to_numpy()

    def to_pandas(self, measures: str | None = None, *, long: bool = False) -> Any:
        """Return a measure's table as a data frame, or one row for each number.

        One row for each number, with its standard error, the ends of its 95 % interval and the reason why it or its
        error is missing, comes back where `long` is requested, and where there are several measures and none is named.
        """
        if long or (measures is None and len(self.tables) != 1):
            return optional("pandas").DataFrame(list(self.numbers(measures)), columns=list(NUMBERS))
        return self.table(measures).to_pandas()

    def to_xarray(self) -> Any:
        """Return a data set with an array for each measure, for its standard errors and replicates, and provenance."""
        arrays = {name: table.to_xarray() for name, table in self.tables.items()}
        sides, parts = ("layer_a", "layer_b"), {len(table.chunk_sizes) for table in self.tables.values()} - {0}
        for name, table in self.tables.items():
            if table.errors is not None:
                arrays[f"{name} standard error"] = (sides, table.errors.copy())
            if table.replicates is not None:
                chunk = "chunk" if len(parts) == 1 else f"chunk of {len(table.replicates)}"
                arrays[f"{name} replicates"] = ((chunk, *sides), table.replicates.copy())
        words = ("a", "b", "data", "examples", "seed", "version", "created")
        facts = dict(self.provenance) | {word: getattr(self, word) for word in words}
        return optional("xarray").Dataset(arrays, attrs=facts)

    def _matching(self, measure: str) -> list[Values]:
        """Return the table with that id, else all tables that match."""
        if measure in self.tables:
            return [self.tables[measure]]
        return [table for table in self.tables.values() if fits(measure, table.id, table.quantity.parameters)]

    def _named(self, measure: str) -> Values:
        tables = self._matching(measure)
        if not tables:
            hint = did_you_mean(measure, self.tables) or "."
            raise UnknownName(f"no measure {measure!r} in this comparison{hint} It holds {self._listed()}.")
        if len(tables) > 1:
            ids = " and ".join(repr(table.id) for table in tables)
            raise UnknownName(f"{measure!r} may mean {ids}; ask for one of them by its whole id.")
        return tables[0]

    def _only(self) -> Values:
        if len(self.tables) != 1:
            first = next(iter(self.tables), "cka")
            raise UnknownName(
                f"this comparison holds {len(self.tables)} measures: {self._listed()}. Name one, as in "
                f"`c[{first!r}]` or `measures={first!r}`."
            )
        return next(iter(self.tables.values()))

    def long_form(self) -> LongForm:
        """Return a row for each number, with the names of the models before `NUMBERS`."""
        return MODELS + NUMBERS, ((self.a, self.b, *row) for row in self.numbers())

    def _listed(self) -> str:
        return ", ".join(self.tables) or "none"

    def numbers(self, measures: str | None = None) -> Iterator[tuple[str, str, str, float, float, float, float, str]]:
        """Yield `NUMBERS` for each value and each hole requested, of the measure that is named or of all.

        The reason is why there is no value or, with a value, why it has no standard error.
        """
        for table in self.tables.values() if measures is None else [self.table(measures)]:
            arrays = (table.values, table.to_errors(), *table.interval())
            for (i, a), (j, b) in product(enumerate(self.layers_a), enumerate(self.layers_b)):
                reason = table.missing.get((a, b), table.error_reasons.get((a, b), ""))
                if reason != NOT_ASKED:
                    value, error, low, high = (float(array[i, j]) for array in arrays)
                    yield table.id, a, b, value, error, low, high, reason
