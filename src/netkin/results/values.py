"""One measure's table: rows are layers of the first model, columns layers of the second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from netkin.errors import NoValue, ShapeError, UnknownName, ValueFault, did_you_mean
from netkin.results.extras import optional
from netkin.results.records import distinct, freeze, frozen_array, frozen_mapping, plain_fields, rebuild, same_fields
from netkin.results.text import values_as_text

Parameter = int | float | str


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Values:
    """What one measure says about every pair of layers, and how it came to say so.

    Where the measure has no value the table has a hole: NaN in `values`, and the reason in `holes`.

    Example:
        >>> table = Values(
        ...     id="cka", name="cka", parameters={}, layers_a=("in", "out"), layers_b=("in", "out"),
        ...     values=[[1.0, 0.4], [0.3, float("nan")]], holes={("out", "out"): "'out' is constant"},
        ...     higher_is_closer=True, bounds=(0, 1), symmetric=True, conventions="biased HSIC", statistic="Moments",
        ... )
        >>> table["in", "out"]
        0.4
        >>> table.best_matches()
        {'in': ('in', 1.0), 'out': ('in', 0.3)}
    """

    id: str
    name: str
    parameters: Mapping[str, Parameter]
    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    values: np.ndarray
    errors: np.ndarray | None = None
    holes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    higher_is_closer: bool
    bounds: tuple[float, float]
    symmetric: bool
    conventions: str
    statistic: str
    exactness: str = "exact"

    def __post_init__(self) -> None:
        freeze(self, layers_a=distinct(self.layers_a, "rows"), layers_b=distinct(self.layers_b, "columns"))
        freeze(self, values=self._shaped(self.values, "values"), bounds=(float(self.bounds[0]), float(self.bounds[1])))
        if self.errors is not None:
            freeze(self, errors=self._shaped(self.errors, "standard errors"))
        freeze(self, parameters=frozen_mapping(self.parameters), holes=frozen_mapping(self.holes))
        self._refuse_nan_without_reason()

    def __getitem__(self, pair: tuple[str, str]) -> float:
        """Return the value for a layer of the first model and a layer of the second."""
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UnknownName(f"ask for a pair of layers, as in `table['layer1', 'layer2']`; got {pair!r}.")
        value = float(self.values[self._position(pair)])
        if pair in self.holes:
            raise NoValue(f"{self.id} has no value for {pair[0]!r} and {pair[1]!r}: {self.holes[pair]}")
        return value

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, Values) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (Values, plain_fields(self))

    def __repr__(self) -> str:
        return f"Values({self.id!r}, {len(self.layers_a)} × {len(self.layers_b)} layers, {len(self.holes)} holes)"

    def __str__(self) -> str:
        return values_as_text(self)

    def best_matches(self) -> dict[str, tuple[str, float]]:
        """Return for every row its closest column and the value there.

        Of equally close columns the first is named; a row with nothing but holes is left out.
        """
        farness = np.where(np.isnan(self.values), np.inf, -self.values if self.higher_is_closer else self.values)
        nearest = farness.argmin(axis=1) if self.layers_b else np.zeros(0, dtype=int)
        pairs = zip(range(len(nearest)), nearest.tolist(), strict=True)
        found = [(i, j) for i, j in pairs if np.isfinite(self.values[i, j])]
        return {self.layers_a[i]: (self.layers_b[j], float(self.values[i, j])) for i, j in found}

    def corresponding(self) -> dict[str, float]:
        """Return the value of every layer with the layer of the same name, without holes."""
        shared = [name for name in self.layers_a if name in self.layers_b and (name, name) not in self.holes]
        return {name: self[name, name] for name in shared}

    def to_numpy(self) -> np.ndarray:
        """Return the table as a matrix of your own, NaN in its holes."""
        return self.values.copy()

    def to_pandas(self) -> Any:
        """Return the table as a data frame with the layers' names, NaN in its holes."""
        pandas = optional("pandas")
        rows, columns = pandas.Index(self.layers_a, name="layer_a"), pandas.Index(self.layers_b, name="layer_b")
        return pandas.DataFrame(self.to_numpy(), index=rows, columns=columns)

    def to_xarray(self) -> Any:
        """Return the table as a labelled array whose attributes say what the numbers are, NaN in its holes."""
        xarray = optional("xarray")
        names = {"layer_a": list(self.layers_a), "layer_b": list(self.layers_b)}
        return xarray.DataArray(self.to_numpy(), coords=names, dims=list(names), name=self.id, attrs=self.facts())

    def facts(self) -> dict[str, Any]:
        """Return what the numbers are, in words and numbers fit for any file's attributes."""
        words = ("id", "name", "bounds", "conventions", "statistic", "exactness")
        flags = {"higher_is_closer": int(self.higher_is_closer), "symmetric": int(self.symmetric)}
        return {word: getattr(self, word) for word in words} | flags | self._spelled_out()

    def _spelled_out(self) -> dict[str, Parameter]:
        return {f"parameter_{name}": value for name, value in self.parameters.items()}

    def _position(self, pair: tuple[str, str]) -> tuple[int, int]:
        return _place(pair[0], self.layers_a, "rows", "layers_a"), _place(pair[1], self.layers_b, "columns", "layers_b")

    def _shaped(self, array: Any, what: str) -> np.ndarray:
        table, wanted = frozen_array(array), (len(self.layers_a), len(self.layers_b))
        if table.shape != wanted:
            raise ShapeError(
                f"the {what} of {self.id!r} must have shape {wanted}, layers by layers; got {table.shape}."
            )
        return table

    def _refuse_nan_without_reason(self) -> None:
        """Refuse a missing value without a reason, and a reason beside a value."""
        explained = np.zeros(self.values.shape, dtype=bool)
        for pair in self.holes:
            explained[self._position(pair)] = True
        wrong = np.argwhere(explained == np.isfinite(self.values)).tolist()
        if wrong:
            i, j = wrong[0]
            raise ValueFault(
                f"the table of {self.id!r} needs a finite value or a reason, and not both, for every pair; "
                f"{len(wrong)} differ, first {self.layers_a[i]!r} and {self.layers_b[j]!r} with {self.values[i, j]}."
            )


def _place(name: str, layers: tuple[str, ...], side: str, listed: str) -> int:
    if name not in layers:
        hint = did_you_mean(str(name), layers) or "."
        raise UnknownName(f"no layer named {name!r} among the {side}{hint} `{listed}` lists all.")
    return layers.index(name)
