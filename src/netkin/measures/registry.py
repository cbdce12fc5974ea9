"""The registry: a measure is a pure function of one statistic, with facts declared once and read by everybody else.

Written as ``"svcca(variance=0.95)"`` a measure and its parameters mean the same in Python and on the command line;
that string, without parameters that have their default value, is the measure's id.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

import torch
from torch import Tensor

from netkin.arrays import exact_products
from netkin.errors import (
    InflatedWarning,
    NameClash,
    NetkinError,
    NoValue,
    SourceError,
    UnknownName,
    ValueFault,
    did_you_mean,
)
from netkin.statistics import Grams, Moments, Rows

INVARIANCES = ("rotation", "scaling", "translation", "invertible")
RIGID = frozenset({"rotation", "scaling", "translation"})
AFFINE = frozenset(INVARIANCES)
RANK = "rank: eigenvalues above max(n, p)·eps·λmax"  # of `Side.kept`, on which everything that whitens stands


@dataclass(frozen=True)
class Facts:
    """What a measure promises; tests hold it to every one."""

    reads: Any  # the pair type: a class that names its collectors
    higher_is_closer: bool
    bounds: tuple[float, float]
    symmetric: bool
    is_metric: bool
    unchanged_by: frozenset[str]
    whitens: bool  # is inflated by fewer examples than features
    precise: bool  # needs float64 products
    debiases: bool  # needs the debiasing sums
    shows: tuple[str, ...]  # parameters that stand in the id even at their default
    convention: str
    reference: str


@dataclass(frozen=True)
class Measure:
    """A registered measure with the parameters it is to be called with."""

    function: Callable[..., Any]
    facts: Facts
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def defaults(self) -> dict[str, Any]:
        """Every parameter with its default value."""
        return _defaults(self.function)

    @property
    def settings(self) -> dict[str, Any]:
        """Every parameter with the value it will have."""
        return self.defaults | self.parameters

    @property
    def id(self) -> str:
        """The name with those parameters that differ from their defaults, or are always shown."""
        shows = self.facts.shows
        changed = {key: value for key, value in self.settings.items() if key in shows or self.defaults[key] != value}
        inside = ", ".join(f"{key}={value}" for key, value in sorted(changed.items()))
        return f"{self.name}({inside})" if inside else self.name

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    def __call__(self, statistic: Any) -> Tensor:
        """Return the value for one pair."""
        return self.function(statistic, **self.settings)


@functools.cache
def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    signature = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in signature if p.kind is p.KEYWORD_ONLY}


_MEASURES: dict[str, Measure] = {}


def measure(
    *,
    higher_is_closer: bool,
    bounds: tuple[float, float],
    unchanged_by: Iterable[str],
    reference: str,
    convention: str = "",
    symmetric: bool = True,
    is_metric: bool = False,
    whitens: bool = False,
    precise: bool = False,
    debiases: bool = False,
    shows: tuple[str, ...] = (),
) -> Callable[[Callable[..., Tensor]], Callable[..., Any]]:
    """Register a function of one statistic as a measure, callable with two matrices as well.

    What it reads is said by the annotation of its first argument; its parameters are keyword-only.
    """
    unknown = set(unchanged_by) - set(INVARIANCES)
    if unknown:
        raise ValueFault(f"`unchanged_by` knows {', '.join(INVARIANCES)}; got {', '.join(sorted(unknown))}.")

    def register(function: Callable[..., Tensor]) -> Callable[..., Any]:
        reads = next(iter(get_type_hints(function).values()), None)
        if reads not in (Moments, Grams, Rows):
            raise ValueFault(
                f"annotate the first argument of {function.__name__!r} with the statistic it reads, e.g. `Moments`."
            )
        facts = Facts(
            reads, higher_is_closer, bounds, symmetric, is_metric, frozenset(unchanged_by), whitens, precise or whitens,
            debiases, shows, "; ".join(filter(None, [convention, RANK if whitens else ""])), reference,
        )  # fmt: skip
        public = _callable_with_matrices(function, facts)
        _add(Measure(public, facts))
        return public

    return register


def measures() -> dict[str, Measure]:
    """Return all measures by name: ours, and those that installed packages offer."""
    _load_entry_points()
    return dict(_MEASURES)


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
        return _of_function(spec, known)
    if not isinstance(spec, str):
        raise UnknownName(f"{spec!r} is no measure; name one as text, e.g. 'cka'.")
    name, parameters = _parsed(spec)
    if name not in known:
        raise UnknownName(f"no measure named {name!r}{did_you_mean(name, known) or ';'} `netkin measures` lists all.")
    return _with_parameters(known[name], parameters)


def _of_function(function: Callable[..., Any], known: dict[str, Measure]) -> Measure:
    for found in known.values():
        if found.function is function:
            return found
    name = getattr(function, "__name__", repr(function))
    raise UnknownName(f"the function {name!r} is no registered measure; decorate it with `@nk.measure(...)`.")


def _with_parameters(found: Measure, parameters: dict[str, Any]) -> Measure:
    defaults = found.defaults
    for key in parameters:
        if key not in defaults:
            has = f"its parameters are {', '.join(defaults)}" if defaults else "it has no parameters"
            raise UnknownName(f"{found.name!r} has no parameter {key!r}{did_you_mean(key, defaults) or ';'} {has}.")
    typed = {key: _like(defaults[key], key, value) for key, value in parameters.items()}
    return Measure(found.function, found.facts, typed)


def _like(default: Any, key: str, value: Any) -> Any:
    """Return `value` in the type of the parameter's default, so that 1 and 1.0 are one id."""
    if isinstance(default, float) and type(value) is int and abs(value) < 2**1000:
        return float(value)
    if type(value) is not type(default):
        raise ValueFault(
            f"`{key}` must be of type {type(default).__name__}, like its default {default!r}; got {value!r}."
        )
    return value


def _parsed(spec: str) -> tuple[str, dict[str, Any]]:
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError:
        node = ast.Constant(None)
    if isinstance(node, ast.Name):
        return node.id, {}
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and not node.args
        and all(k.arg for k in node.keywords)
    ):
        names = [str(k.arg) for k in node.keywords]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise UnknownName(f"{spec!r} gives the parameter {twice!r} twice.")
        return node.func.id, {str(k.arg): _literal(spec, k.value) for k in node.keywords}
    raise UnknownName(f"{spec!r} is no measure; write a name, or a name with parameters as in 'svcca(variance=0.95)'.")


def _literal(spec: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):  # a bare word is a string: cka_minibatch(kernel=rbf)
        return node.id
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise UnknownName(f"{spec!r}: the value of a parameter must be a number or a word.") from None


def _callable_with_matrices(function: Callable[..., Tensor], facts: Facts) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(X: Any, Y: Any = None, /, **parameters: Any) -> Any:
        if isinstance(X, facts.reads) and Y is None:
            with exact_products():
                return function(X, **parameters)
        if Y is None:
            raise ValueFault(
                f"`{function.__name__}` takes two matrices, or one `{facts.reads.__name__}`; got {type(X).__name__}."
            )
        with exact_products():
            value = function(_taken(facts, X, Y, function, parameters), **parameters)
        number = _finite(function.__name__, value)
        return value if isinstance(X, Tensor) or isinstance(Y, Tensor) else number

    return call


def _taken(facts: Facts, X: Any, Y: Any, function: Callable[..., Tensor], parameters: dict[str, Any]) -> Any:
    """Return the statistic of two matrices that the measure reads."""
    if facts.reads is Moments:
        moments = Moments.of(X, Y, torch.float64 if facts.precise else None)
        if facts.whitens and moments.few_examples:
            warnings.warn(moments.few_examples, InflatedWarning, stacklevel=3)
        return moments
    if facts.reads is Grams:
        return Grams.of(X, Y, **_defaults(function) | parameters)
    return Rows.of(X, Y)


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
def _load_entry_points() -> None:
    for entry in entry_points(group="netkin.measures"):
        _load(entry)


def _load(entry: EntryPoint) -> None:
    """Load what one package offers: all of it, or nothing and a sentence that names the package."""
    before = dict(_MEASURES)
    try:
        entry.load()
    except Exception as fault:
        _MEASURES.clear()
        _MEASURES.update(before)
        if isinstance(fault, NetkinError):
            raise
        package = entry.dist.name if entry.dist else entry.name
        raise SourceError(
            f"the measures of package {package!r} in {entry.value!r} could not be loaded: "
            f"{type(fault).__name__}: {fault}; mend or uninstall the package."
        ) from fault


def value_of(found: Measure, statistic: Any) -> float:
    """Return one value as a float; what is not a finite number is refused."""
    return _finite(found.id, found(statistic))


def _finite(name: str, value: Any) -> float:
    number = float(value.detach() if isinstance(value, Tensor) else value)
    if not math.isfinite(number):
        raise NoValue(f"{name} is not a finite number for this pair.")
    return number
