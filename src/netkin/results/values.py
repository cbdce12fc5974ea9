"""One measure's table: rows are layers of the first model, columns layers of the second; and its jackknife.

The delete-one-chunk jackknife gives standard errors, bias and intervals from values computed without each chunk in
turn. Chunks need not be equal: these are the delete-m_j formulas of Busing, Meijer and van der Leeden, "Delete-m
jackknife for unequal m", Statistics and Computing 9 (1999). With equal chunks they are those of the delete-a-group
jackknife. In its functions `replicates` has the chunks along its first axis, `value` the shape of the rest, and `sizes`
are the numbers of examples in the chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from netkin.errors import InvalidValue, NoValue, UnknownName, did_you_mean
from netkin.results.quantity import Quantity
from netkin.results.records import FrozenRecord, distinct, freeze, frozen_array, frozen_mapping, optional
from netkin.results.text import values_as_text

Pair = tuple[str, str]  # the names of two layers, or of two models

NEAR = 1e-6  # of a measure's range: a value as near as this to a bound lies at it


@dataclass(frozen=True)
class Difference:
    """How much closer, or better, one value of a table is than another, with the standard error of the difference.

    It is taken chunk by chunk, so that what moves both values alike does not count. `clear` is whether its 95 %
    interval leaves out zero; None where there is no error.
    """

    value: float
    error: float | None = None
    clear: bool | None = None


class Match(tuple[str, float]):
    """A layer's closest layer and the value there, as a pair ``(layer, value)`` with the certainty of the choice.

    `error` is the value's standard error; `second` the second best layer, `margin` how much closer the best one is,
    and `margin_error` the standard error of that difference. `clear` is whether the 95 % interval of the margin
    leaves out zero. Each is None where it is not known.
    """

    layer: str
    value: float
    error: float | None
    second: str | None
    margin: float | None
    margin_error: float | None
    clear: bool | None

    def __new__(
        cls,
        layer: str,
        value: float,
        error: float | None = None,
        second: str | None = None,
        margin: float | None = None,
        margin_error: float | None = None,
        clear: bool | None = None,
    ) -> Match:
        match = super().__new__(cls, (layer, value))
        match.layer, match.value, match.error, match.second = layer, value, error, second
        match.margin, match.margin_error, match.clear = margin, margin_error, clear
        return match

    def __getnewargs__(self) -> tuple[Any, ...]:
        return *self, self.error, self.second, self.margin, self.margin_error, self.clear


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Values(FrozenRecord):
    """The values of one quantity for every pair of layers: what they are, and how they came to be.

    Where there is no value the table has NaN in `values`, and the reason in `missing`. `axes` says what the rows and
    the columns are, such as layers or classes; `statistic` what the values were read from.

    `replicates` (chunks × rows × columns) are the values with one chunk of the data left out in turn, and `chunk_sizes`
    the numbers of examples in the chunks. From them come the standard `errors`, unless those are given. A value without
    an error, though errors were requested, has the reason in `error_reasons`.

    Example:
        >>> table = Values(
        ...     quantity=Quantity(id="cka", bounds=(0, 1)), layers_a=("in", "out"), layers_b=("in", "out"),
        ...     values=[[1.0, 0.4], [0.3, float("nan")]], missing={("out", "out"): "'out' is constant"},
        ... )
        >>> table["in", "out"]
        0.4
        >>> table.best_matches()
        {'in': ('in', 1.0), 'out': ('in', 0.3)}
    """

    quantity: Quantity
    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    values: np.ndarray
    errors: np.ndarray | None = None
    missing: Mapping[Pair, str] = field(default_factory=dict)
    statistic: str = ""
    exactness: str = "exact"
    replicates: np.ndarray | None = None
    chunk_sizes: tuple[int, ...] = ()
    error_reasons: Mapping[Pair, str] = field(default_factory=dict)
    axes: tuple[str, str] = ("layer", "layer")

    def __post_init__(self) -> None:
        super().__post_init__()
        freeze(self, layers_a=distinct(self.layers_a, "rows"), layers_b=distinct(self.layers_b, "columns"))
        self._require_reasons()
        self._complete_errors()

    @property
    def id(self) -> str:
        """The id of the quantity."""
        return self.quantity.id

    @property
    def higher_is_closer(self) -> bool:
        """Whether higher values are closer, or better."""
        return self.quantity.higher_is_closer

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value that the quantity can have."""
        return self.quantity.bounds

    def __getitem__(self, pair: Pair) -> float:
        """Return the value for a layer of the first model and a layer of the second."""
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UnknownName(f"ask for a pair of layers, as in `table['layer1', 'layer2']`; got {pair!r}.")
        value = float(self.values[self._position(pair)])
        if pair in self.missing:
            raise NoValue(f"{self.id} has no value for {pair[0]!r} and {pair[1]!r}: {self.missing[pair]}")
        return value

    def __repr__(self) -> str:
        return f"Values({self.id!r}, {len(self.layers_a)} × {len(self.layers_b)} layers, {len(self.missing)} missing)"

    def __str__(self) -> str:
        return values_as_text(self)

    def best_matches(self) -> dict[str, Match]:
        """Return for every row its closest column and the value there, with how far the second best is behind.

        Of equally close columns the first is named; a row without any value is left out.
        """
        farness = np.where(np.isnan(self.values), np.inf, -self.values if self.higher_is_closer else self.values)
        order, known = farness.argsort(axis=1, kind="stable"), np.isfinite(self.values).sum(axis=1)
        return {
            name: self._match(i, *order[i, : min(known[i], 2)].tolist())
            for i, name in enumerate(self.layers_a)
            if known[i]
        }

    def _match(self, i: int, best: int, second: int | None = None) -> Match:
        value, error = float(self.values[i, best]), None if self.errors is None else float(self.errors[i, best])
        known = None if error is None or math.isnan(error) else error
        if second is None:
            return Match(self.layers_b[best], value, known)
        lead, name = self.difference(i, best, second), self.layers_b[second]
        doubtful = np.isnan(self.to_errors()[i]) & ~self._at_bound()[i]  # the jackknife does not serve these
        if doubtful[best] or doubtful[second]:
            return Match(self.layers_b[best], value, known, name, lead.value)
        return Match(self.layers_b[best], value, known, name, lead.value, lead.error, lead.clear)

    def difference(self, row: int, best: int, other: int) -> Difference:
        """Return how much closer, or better, the value at one column of a row is than that at another."""
        value = abs(float(self.values[row, best] - self.values[row, other]))
        if self.replicates is None or best == other:
            return Difference(value)
        sign = 1 if self.higher_is_closer else -1
        apart = sign * (self.replicates[:, row, best] - self.replicates[:, row, other])
        error = float(jackknife_error(value, apart, self.chunk_sizes))
        if not math.isfinite(error):
            return Difference(value)
        return Difference(value, error, value > student_quantile(len(self.chunk_sizes)) * error)

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of every value's interval by Student's t, clipped to the bounds.

        They are NaN where a value has no standard error, or where the number of chunks is not known. A value that
        rounding has put beyond the bounds lies in its interval all the same.
        """
        if self.errors is None or not self.chunk_sizes:
            return np.full_like(self.values, np.nan), np.full_like(self.values, np.nan)
        low, high = student_interval(self.values, self.errors, len(self.chunk_sizes), level)
        return np.minimum(np.clip(low, *self.bounds), self.values), np.maximum(np.clip(high, *self.bounds), self.values)

    def bias(self) -> np.ndarray:
        """Return by how much the jackknife finds each value too large; NaN where there are no replicates."""
        if self.replicates is None:
            return np.full_like(self.values, np.nan)
        return jackknife_bias(self.values, self.replicates, self.chunk_sizes)

    def biased(self) -> tuple[Pair, ...]:
        """Return the pairs of layers for which the jackknife's bias is larger than the standard error."""
        places = np.argwhere(np.abs(self.bias()) > self.to_errors()).tolist()
        return tuple((self.layers_a[i], self.layers_b[j]) for i, j in places)

    def corresponding(self) -> dict[str, float]:
        """Return the value of every layer with the layer of the same name, where there is one."""
        shared = [name for name in self.layers_a if name in self.layers_b and (name, name) not in self.missing]
        return {name: self[name, name] for name in shared}

    def to_numpy(self) -> np.ndarray:
        """Return the table as a matrix of your own, NaN in its missing."""
        return self.values.copy()

    def to_errors(self) -> np.ndarray:
        """Return the standard errors as a matrix of your own, NaN where there is none."""
        return np.full_like(self.values, np.nan) if self.errors is None else self.errors.copy()

    def to_pandas(self, errors: bool = False) -> Any:
        """Return the table, or its standard errors, as a data frame with the layers' names, NaN in its missing."""
        pandas = optional("pandas")
        rows, columns = pandas.Index(self.layers_a, name="layer_a"), pandas.Index(self.layers_b, name="layer_b")
        return pandas.DataFrame(self.to_errors() if errors else self.to_numpy(), index=rows, columns=columns)

    def to_xarray(self, errors: bool = False) -> Any:
        """Return the table, or its standard errors, as a labelled array whose attributes describe the numbers."""
        xarray, title = optional("xarray"), f"{self.id} standard error" if errors else self.id
        names = {"layer_a": list(self.layers_a), "layer_b": list(self.layers_b)}
        numbers = self.to_errors() if errors else self.to_numpy()
        return xarray.DataArray(numbers, coords=names, dims=list(names), name=title, attrs=self.facts())

    def facts(self) -> dict[str, Any]:
        """Return what the numbers are, as text and numbers for any file's attributes."""
        words = ("id", "name", "kind", "unit", "bounds", "convention")
        known = {word: getattr(self.quantity, word) for word in words}
        flags = {word: int(getattr(self.quantity, word)) for word in ("higher_is_closer", "symmetric")}
        parameters = {f"parameter_{name}": value for name, value in self.quantity.parameters.items()}
        return known | {"statistic": self.statistic, "exactness": self.exactness} | flags | parameters

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says beside the fields: the best matches, and the ends of the 95 % intervals."""
        low, high = self.interval() if self.chunk_sizes else (None, None)
        matches = []
        for row, match in self.best_matches().items():
            facts = {name: value for name, value in vars(match).items() if name != "layer"}
            matches.append({"layer_a": row, "layer_b": match.layer, **facts})
        return {"low": low, "high": high, "best_matches": matches}

    def _position(self, pair: Pair) -> tuple[int, int]:
        row, column = self.axes
        return (
            _place(pair[0], self.layers_a, f"{row} named {pair[0]!r} among the rows", "layers_a"),
            _place(pair[1], self.layers_b, f"{column} named {pair[1]!r} among the columns", "layers_b"),
        )

    def _complete_errors(self) -> None:
        """Check the reasons, and compute the errors where only replicates are given."""
        # a missing value has its own reason
        reasons = {pair: reason for pair, reason in self.error_reasons.items() if pair not in self.missing}
        places = [self._position(pair) for pair in reasons]
        if self.errors is None and self.replicates is not None:
            errors = jackknife_error(self.values, self.replicates, self.chunk_sizes)
            without = self._without_error(self.replicates, errors)
            # a reason that was given is the better one
            reasons = {(self.layers_a[i], self.layers_b[j]): reason for (i, j), reason in without.items()} | reasons
            for i, j in [*without, *places]:
                errors[i, j] = np.nan
            freeze(self, errors=frozen_array(errors))
        freeze(self, error_reasons=frozen_mapping(reasons))

    def _without_error(self, replicates: np.ndarray, errors: np.ndarray) -> dict[tuple[int, int], str]:
        """Return the places that have a value and replicates but can have no error, with the reasons."""
        missing, reasons = np.isnan(replicates).sum(axis=0), {}
        for i, j in np.argwhere(np.isfinite(self.values) & ~np.isfinite(errors)).tolist():
            reasons[i, j] = "the squares that the jackknife adds up are too large for float64"
            if missing[i, j]:
                reasons[i, j] = f"no value with {missing[i, j]} of the {len(replicates)} chunks left out"
        for i, j in np.argwhere(self._at_bound()).tolist():
            bound = min(filter(math.isfinite, self.bounds), key=lambda end: abs(self.values[i, j] - end))
            reasons[i, j] = f"the value lies at the bound {bound:.4g} of the measure"
        return reasons

    def _at_bound(self) -> np.ndarray:
        """Mark the values that lie at a bound of the measure."""
        low, high = self.bounds
        size = high - low if math.isfinite(high - low) else float(np.nanmax(np.abs(self.values), initial=0))
        at_bound = np.zeros(self.values.shape, dtype=bool)
        for end in filter(math.isfinite, self.bounds):
            at_bound |= np.abs(self.values - end) <= NEAR * size
        return at_bound

    def _require_reasons(self) -> None:
        """Refuse a missing value without a reason, and a reason beside a value."""
        explained = np.zeros(self.values.shape, dtype=bool)
        for pair in self.missing:
            explained[self._position(pair)] = True
        wrong = np.argwhere(explained == np.isfinite(self.values)).tolist()
        if wrong:
            i, j = wrong[0]
            raise InvalidValue(
                f"the table of {self.id!r} needs a finite value or a reason, and not both, for every pair; "
                f"{len(wrong)} differ, first {self.layers_a[i]!r} and {self.layers_b[j]!r} with {self.values[i, j]}."
            )


def _place(name: str, layers: tuple[str, ...], what: str, listed: str) -> int:
    if name not in layers:
        raise UnknownName(f"no {what}{did_you_mean(str(name), layers) or '.'} `{listed}` lists all.")
    return layers.index(name)


# --- the jackknife ----------------------------------------------------------------------------------------------------


def jackknife_error(value: Any, replicates: Any, sizes: Sequence[int]) -> np.ndarray:
    """Return the jackknife standard error, NaN where the value or a replicate is missing, Inf or NaN on overflow.

    Example:
        >>> data = np.array([1.0, 2.0, 4.0, 9.0])
        >>> without_one = [np.delete(data, k).mean() for k in range(4)]
        >>> error = jackknife_error(data.mean(), without_one, [1, 1, 1, 1])
        >>> bool(np.isclose(error, data.std(ddof=1) / 2))  # that of a mean
        True
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(_squares(value, replicates, sizes).mean(axis=0))


def carried_by_one(value: Any, replicates: Any, sizes: Sequence[int], level: float = 1e-3) -> np.ndarray:
    """Return where one chunk has more of the jackknife's sum of squares than chance gives any of them at `level`.

    Of normal replicates a chunk's share of the sum, times K/(K - 1), has the Beta distribution of ½ and K/2 - 1
    (Cochran's test of an outlying variance, for all K chunks by Bonferroni). Of 20 chunks one may have 58 %.

    Example:
        >>> same = [0.1, -0.1, 0.2, -0.2, 0.1, -0.1, 0.2, -0.2, 0.1]
        >>> [bool(carried_by_one(0.0, [*same, last], [1] * 10)) for last in (-0.2, 5.0)]
        [False, True]
    """
    # SciPy is slow to import, and results without errors need nothing of it
    from scipy.special import betaincinv

    count = len(sizes)
    if count < 3:
        return np.zeros(np.shape(value), dtype=bool)
    most = betaincinv(0.5, count / 2 - 1, 1 - level / count) * (count - 1) / count
    with np.errstate(over="ignore", invalid="ignore"):
        squares = _squares(value, replicates, sizes)
        return np.asarray(squares.max(axis=0) > most * squares.sum(axis=0))


def _squares(value: Any, replicates: Any, sizes: Sequence[int]) -> np.ndarray:
    """Return the squares whose mean over the chunks is the jackknife's variance."""
    value, replicates, shares = _as_arrays(value, replicates, sizes)
    h = 1 / shares  # n / m_j
    pseudo_values = h * value - (h - 1) * replicates
    return (pseudo_values - _corrected(value, replicates, shares)) ** 2 / (h - 1)


def jackknife_bias(value: Any, replicates: Any, sizes: Sequence[int]) -> np.ndarray:
    """Return the jackknife estimate of how much too large the value is, exact where the bias shrinks as 1/n."""
    value, replicates, shares = _as_arrays(value, replicates, sizes)
    return value - _corrected(value, replicates, shares)


def student_interval(value: Any, error: Any, chunks: int, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the interval by Student's t with ``chunks - 1`` degrees of freedom."""
    value, reach = np.asarray(value, dtype=float), student_quantile(chunks, level) * np.asarray(error, dtype=float)
    return value - reach, value + reach


def student_quantile(chunks: int, level: float = 0.95) -> float:
    """Return how many standard errors an interval reaches to each side.

    Example:
        >>> round(student_quantile(20), 3)
        2.093
    """
    # SciPy is slow to import, and results without errors need nothing of it
    from scipy.special import stdtrit

    if not 0 < level < 1:
        raise InvalidValue(
            f"the level of an interval must lie between 0 and 1, as 0.95; got {level}.", argument="level"
        )
    return float(stdtrit(chunks - 1, (1 + level) / 2))


def _corrected(value: np.ndarray, replicates: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the jackknife estimate, from which the bias of order 1/n is gone."""
    return len(replicates) * value - ((1 - shares) * replicates).sum(axis=0)


def _as_arrays(value: Any, replicates: Any, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the value, the replicates, and each chunk's share of the examples, which lies along the first axis."""
    value, replicates = np.asarray(value, dtype=float), np.asarray(replicates, dtype=float)
    counts = np.asarray(sizes, dtype=float)
    return value, replicates, (counts / counts.sum()).reshape(-1, *[1] * value.ndim)
