"""The registry: a measure is a pure function of one statistic, with facts that are declared once.

Written as ``"svcca(variance=0.95)"`` a measure and its parameters mean the same in Python and on the command line;
that string, without parameters that have their default value, is the measure's id.

The statistic is the class that annotates the function's first argument: a `netkin.statistics.Pair`.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import entry_points
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, get_type_hints, overload

import torch
from torch import Tensor

from netkin.errors import InflatedWarning, InvalidValue, NameClash, NoValue, PackageWarning, UnknownName, did_you_mean
from netkin.results.caveats import Caveat
from netkin.results.labels import parse_id
from netkin.results.quantity import Quantity
from netkin.settings import exact_matrix_products
from netkin.statistics import Pair

INVARIANCES = ("rotation", "scaling", "translation", "invertible")
RIGID = frozenset({"rotation", "scaling", "translation"})
AFFINE = frozenset(INVARIANCES)
RANK = (  # of `PairSide.kept`, on which all whitening depends
    "rank: eigenvalues above max(n, p)·eps·λmax, eps of the products, "
    "and above ε²/3·(1 + √(p/n))²·max Σx², ε of the data"
)
BEYOND = 1e-3  # by how much rounding may carry a value beyond its bounds
# what several measures cannot see
FEW_EXAMPLES = "With fewer examples than features the values are high, whatever the layers hold."
LEADING = "A few directions of large variance decide the value; directions of small variance hardly count."
Parameters = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The declared properties of a measure; tests check each of them. What they mean is told at `measure`."""

    reads: type[Pair]
    higher_is_closer: bool
    bounds: tuple[float, float]
    unchanged_by: Any  # names, or a function of the settings that returns them
    reference: str
    convention: str = ""
    symmetric: bool = True
    is_metric: bool = False
    whitens: bool | Callable[[Parameters], bool] = False
    precise: bool = False
    debiases: bool = False
    needs: str | Callable[[Any, Parameters], Any] = ""
    shows: tuple[str, ...] = ()
    smooth: bool | str | Callable[[Parameters], bool | str] = True
    debiased_as: str = ""
    unit: str = ""
    means: str = ""
    cannot_see: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.needs, str) and self.needs not in ("", *self.reads.decompositions):
            raise InvalidValue(
                f"`needs` names no decomposition of {self.reads.__name__}.", argument="needs", value=self.needs
            )
        if not callable(self.unchanged_by):
            unknown = set(self.unchanged_by) - set(INVARIANCES)  # which have no test
            if unknown:
                raise InvalidValue(f"`unchanged_by` takes {', '.join(INVARIANCES)}; got {', '.join(sorted(unknown))}.")
            object.__setattr__(self, "unchanged_by", frozenset(self.unchanged_by))

    def at(self, settings: Parameters) -> Facts:
        """Return the facts with these settings, of which those that may be functions are."""
        rules = {fact: getattr(self, fact) for fact in ("whitens", "smooth", "unchanged_by")}
        return replace(self, **{fact: rule(settings) for fact, rule in rules.items() if callable(rule)})


@dataclass(frozen=True)
class Measure:
    """A registered measure with the parameters it is to be called with."""

    function: Callable[..., Any]
    declared: Facts
    parameters: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def facts(self) -> Facts:
        """The declared properties at these settings."""
        return self.declared.at(self.settings)

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def defaults(self) -> dict[str, Any]:
        """Every parameter with its default value."""
        return defaults_of(self.function)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Every parameter with the value it will have."""
        return self.defaults | self.parameters

    @functools.cached_property
    def id(self) -> str:
        """The name with those parameters that differ from their defaults, or are always shown."""
        shows = self.facts.shows
        changed = {key: value for key, value in self.settings.items() if key in shows or self.defaults[key] != value}
        inside = ", ".join(f"{key}={value}" for key, value in sorted(changed.items()))
        return f"{self.name}({inside})" if inside else self.name

    @functools.cached_property
    def quantity(self) -> Quantity:
        """What its values are; tables of results carry it."""
        facts = self.facts
        shared = {fact.name: getattr(facts, fact.name) for fact in fields(Quantity) if hasattr(facts, fact.name)}
        return Quantity(id=self.id, name=self.name, parameters=self.settings, error=self.jackknife_reason, **shared)

    @property
    def takes_matrices(self) -> bool:
        """Whether a matrix of each layer is enough to call it."""
        return self.facts.reads.takes_matrices

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def options(self) -> dict[str, Any]:
        """The options of this measure for the pair type and its collectors."""
        return self.facts.reads.options(self.facts, self.settings)

    @property
    def jackknife_reason(self) -> str:
        """Why leaving out one chunk in turn gives no standard error of this measure; empty if it does."""
        smooth = self.facts.smooth
        if smooth is True:
            return ""
        return f"{smooth or 'it has medians, neighbours or matchings'}, which the jackknife does not serve"

    def pair(self, X: Any, Y: Any) -> Any:
        """Return the pair of two matrices that this measure reads."""
        return self.facts.reads.of(X, Y, **self.options)

    def caveats(self, pair: Any) -> list[Caveat]:
        """Return why the value of `pair` would mislead, if it would."""
        return list(pair.caveats(self.facts, self.settings))

    def __call__(self, statistic: Any) -> Tensor:
        """Return the value for one pair."""
        return self.function(statistic, **self.settings)


P = ParamSpec("P")
S = TypeVar("S")


class MeasureFunction(Protocol[S, P]):
    """A measure as a function of two matrices, or of the pair that it reads."""

    __name__: str

    @overload
    def __call__(self, pair: S, /, *args: P.args, **parameters: P.kwargs) -> Tensor: ...
    @overload
    def __call__(self, X: Tensor, Y: Any, /, *args: P.args, **parameters: P.kwargs) -> Tensor: ...
    @overload
    def __call__(self, X: Any, Y: Tensor, /, *args: P.args, **parameters: P.kwargs) -> Tensor: ...
    @overload
    def __call__(self, X: Any, Y: Any, /, *args: P.args, **parameters: P.kwargs) -> float: ...


_MEASURES: dict[str, Measure] = {}


def measure(**declared: Any) -> Callable[[Callable[Concatenate[S, P], Any]], MeasureFunction[S, P]]:
    """Register a function of one statistic as a measure, callable with two matrices as well.

    Its input is given by the annotation of its first argument, a pair type; its parameters are keyword-only.

    Args:
        higher_is_closer: whether it is a similarity; else it is a distance.
        bounds: the least and the greatest value.
        unchanged_by: changes of either layer that leave the value as it is: rotation, scaling, translation, invertible;
            may be a function of the settings.
        reference: where it comes from.
        convention: what distinguishes the number from others of the same name.
        symmetric: whether the order of the layers does not matter.
        is_metric: whether it is a metric.
        whitens: whether fewer examples than features inflate it; may be a function of the settings.
        precise: whether it needs products in float64, as everything that whitens does.
        debiases: whether it needs the debiasing sums.
        needs: which decomposition of a pair it reads, so that those of many pairs are made together: of `Moments` a
            name in `Moments.decompositions`, or a function of pair and settings that returns a `Decomposition`.
        shows: parameters that are in the id even at their default.
        smooth: whether a jackknife gives its standard error, or a text that says why not; may be a function of the
            settings.
        debiased_as: the name of the same measure without the bias of small samples.
        unit: of its values, such as radians or nats; none for shares and correlations.
        means: what a value means, in plain words, for the page.
        cannot_see: what stays hidden from it.
    """
    if declared.get("whitens"):
        declared["precise"] = True
        declared["convention"] = "; ".join(filter(None, [declared.get("convention"), RANK]))

    def register(function: Callable[Concatenate[S, P], Any]) -> MeasureFunction[S, P]:
        facts = Facts(reads=_pair_type(function), **declared)
        public = _callable_with_matrices(function, facts)
        _add(Measure(public, facts))
        return cast("MeasureFunction[S, P]", public)

    return register


measure.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [parameter for name, parameter in inspect.signature(Facts).parameters.items() if name != "reads"]
)


def _pair_type(function: Callable[..., Any]) -> type[Pair]:
    """Return the class that annotates the first argument."""
    first = next(iter(inspect.signature(function).parameters), "")
    reads = get_type_hints(function).get(first)
    if isinstance(reads, type) and issubclass(reads, Pair):
        return reads
    raise InvalidValue(
        f"annotate the first argument of {function.__name__!r} with the statistic it reads, e.g. `Moments`: a `Pair`."
    )


def measures(*, matrices: bool = False) -> dict[str, Measure]:
    """Return all measures by name: ours, and those that installed packages offer.

    With `matrices`, those alone that a matrix of each layer is enough for.
    """
    for sentence in broken_packages().values():
        _warn_of(sentence)
    return {name: known for name, known in _MEASURES.items() if known.takes_matrices or not matrices}


def find(spec: str | Callable[..., Any] | Measure) -> Measure:
    """Return the measure that a string such as ``"svcca(variance=0.95)"`` or a measure's function names.

    Example:
        >>> find("svcca(variance=0.95)").id, find("svcca(variance=0.99)").id
        ('svcca(variance=0.95)', 'svcca')
    """
    if isinstance(spec, Measure):
        return spec
    known = measures()
    if callable(spec):
        for registered in known.values():
            if registered.function is spec:
                return registered
        name = getattr(spec, "__name__", repr(spec))
        raise UnknownName(
            f"the function {name!r} is no registered measure; decorate it with `@nk.measure(...)`.", argument="measures"
        )
    if not isinstance(spec, str):
        raise UnknownName(f"{spec!r} is no measure; name one as text, e.g. 'cka'.", argument="measures")
    parsed = parse_id(spec)
    if parsed is None:
        raise UnknownName(
            f"{spec!r} is no measure; write a name, or a name with parameters, numbers or words, as in "
            "'svcca(variance=0.95)'.",
            argument="measures",
        )
    name, parameters = parsed
    if name not in known:
        broken = "".join(f" It may be one of a package that failed: {why}" for why in broken_packages().values())
        raise UnknownName(
            f"no measure named {name!r}{did_you_mean(name, known) or ';'} `netkin list measures` lists all.{broken}",
            argument="measures",
        )
    return _with_parameters(known[name], parameters)


def _with_parameters(base: Measure, parameters: dict[str, Any]) -> Measure:
    chosen = typed_parameters(base.name, parameters, base.defaults)
    made = Measure(base.function, base.declared, chosen)
    if chosen and made.takes_matrices and made.function.__module__.startswith("netkin."):  # others may need more rows
        # parameters that the measure itself refuses are refused here, before any data are read
        X = torch.arange(36, dtype=torch.float32, device="cpu").sin().reshape(12, 3)
        with warnings.catch_warnings(), torch.no_grad(), suppress(NoValue):  # which depends on the data
            warnings.simplefilter("ignore")
            made.function(X, X.flip(0).square(), **chosen)
    return made


def typed_parameters(name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are given to `name`, in the types of their defaults; unknown ones are refused."""
    for key in given:
        if key not in known:
            has = f"its parameters are {', '.join(known)}" if known else "it has no parameters"
            raise UnknownName(
                f"{name!r} has no parameter {key!r}{did_you_mean(key, known) or ';'} {has}.", argument=key
            )
    return {key: _typed(key, value, known[key]) for key, value in given.items()}


def _typed(key: str, value: Any, default: Any) -> Any:
    """Return `value` in the type of the parameter's default, so that 1 and 1.0 are one id; None says nothing of it."""
    if default is None or type(value) is type(default):
        return value
    if type(default) is float and type(value) is int and abs(value) < 2**1000:
        return float(value)
    raise InvalidValue(
        f"`{key}` must be of type {type(default).__name__}, like its default {default!r}; got {value!r}.", argument=key
    )


@functools.cache
def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword parameters of a function with their default values."""
    return {p.name: p.default for p in _keywords_of(function)}


def _keywords_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the keyword parameters of a function, with their annotations as types."""
    return [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _callable_with_matrices(function: Callable[..., Any], facts: Facts) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(X: Any, Y: Any = None, /, **parameters: Any) -> Any:
        if Y is None and isinstance(X, facts.reads):
            with exact_matrix_products():
                return function(X, **parameters)
        if Y is None:
            raise InvalidValue(
                f"`{function.__name__}` takes two matrices, or one `{facts.reads.__name__}`; got {type(X).__name__}."
            )
        called = Measure(function, facts, parameters)
        with exact_matrix_products():
            pair = called.pair(X, Y)
            caveats = called.caveats(pair)
            if caveats:
                warnings.warn(" ".join(map(str, caveats)), InflatedWarning, stacklevel=2)
            value = function(pair, **parameters)
        number = _number(function.__name__, value, facts.bounds)
        return value if isinstance(X, Tensor) or isinstance(Y, Tensor) else number

    matrices = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in "XY"]
    signature = inspect.Signature([*matrices, *_keywords_of(function)], return_annotation=float | Tensor)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _add(new: Measure) -> None:
    """Register a measure; the same function once more, as when a notebook cell runs again, takes its place."""
    old = _MEASURES.get(new.name, new).function
    if (old.__module__, old.__qualname__) != (new.function.__module__, new.function.__qualname__):
        raise NameClash(
            f"two measures are named {new.name!r}, one in {old.__module__} and one in {new.function.__module__}; "
            "rename one."
        )
    _MEASURES[new.name] = new


@functools.cache
def broken_packages() -> dict[str, str]:
    """Return a sentence for each installed package whose measures could not be loaded, by the package's name."""
    broken: dict[str, str] = {}
    for entry in entry_points(group="netkin.measures"):
        before = dict(_MEASURES)
        try:
            entry.load()
        except Exception as fault:  # of what a package offers, all is taken or nothing
            _MEASURES.clear()
            _MEASURES.update(before)
            package = entry.dist.name if entry.dist else entry.name
            sentence = (
                f"the measures of package {package!r} in {entry.value!r} could not be loaded: {type(fault).__name__}: "
                f"{str(fault).rstrip('.')}; fix or uninstall the package, all other measures work."
            )
            broken[package] = f"{broken[package]} And {sentence}" if package in broken else sentence
    return broken


@functools.cache
def _warn_of(sentence: str) -> None:
    """Warn of a broken package, once."""
    warnings.warn(sentence, PackageWarning, stacklevel=3)


def value_of(measure: Measure, statistic: Any) -> float:
    """Return one value as a float; what is not a finite number within the measure's bounds is refused."""
    return _number(measure.id, measure(statistic), measure.facts.bounds)


def _number(name: str, value: Any, bounds: tuple[float, float]) -> float:
    number = float(value.detach() if isinstance(value, Tensor) else value)
    if not math.isfinite(number):
        raise NoValue(f"{name} is not a finite number for this pair.")
    low, high = bounds
    if not low - BEYOND <= number <= high + BEYOND:
        raise NoValue(
            f"{name} gave {number:.4g} for this pair, and its declared bounds are {low:g} to {high:g}; its formula or "
            "its `bounds` is wrong."
        )
    return number
