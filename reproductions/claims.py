"""Claims as code: what a paper says, when we call it reproduced, and the function that measures it.

A module of `reproductions/<paper>/` holds functions like this one; they are found by themselves.

    @claim(
        "svcca/few-directions",
        figure="Fig. 2a",
        sentence="a short quotation",
        expected={"accuracy kept by 25 of 512 directions": "nearly all"},
        criterion="holds if ...; in part if ...",
    )
    def few_directions(lab: Lab) -> Finding:
        ...
        return Finding(verdict(kept > 0.95, kept > random), {"accuracy kept": Measured.over(kept_by_seed)})
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from netkin.errors import NameClash, SourceError, UnknownName, ValueFault, did_you_mean
from netkin.results.claim import (
    FAILS,
    HOLDS,
    IN_PART,
    SCALES,
    Curve,
    Measured,
    checked_id,
    checked_verdict,
    figure_order,
)

if TYPE_CHECKING:
    from reproductions.laboratory import Lab

__all__ = ["Finding", "Measured", "Statement", "chosen", "claim", "claims", "line", "named", "papers", "verdict"]


@dataclass(frozen=True)
class Finding:
    """What a claim's function found; the verdict follows from the numbers by the stated criterion."""

    verdict: str
    measured: Mapping[str, Measured]
    note: str = ""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        checked_verdict(self.verdict)


Function = TypeVar("Function", bound=Callable[[Any], Finding])


@dataclass(frozen=True)
class Statement:
    """A claim before it is measured: what the paper says and when we call it reproduced."""

    id: str
    figure: str
    sentence: str
    expected: Mapping[str, Any]
    criterion: str
    scales: tuple[str, ...]
    measure: Callable[[Lab], Finding]

    @property
    def paper(self) -> str:
        """The paper's short name, the first part of the id."""
        return self.id.partition("/")[0]


_STATEMENTS: dict[str, Statement] = {}


def claim(
    id: str,
    *,
    figure: str,
    sentence: str,
    expected: Mapping[str, Any],
    criterion: str,
    scales: Sequence[str] = SCALES,
) -> Callable[[Function], Function]:
    """Return a decorator that files a function as the claim `id`; the function itself stays as it is."""
    strange = next((scale for scale in scales if scale not in SCALES), None)
    if strange is not None or not scales:
        raise ValueFault(f"the scales of {id!r} are one or both of {', '.join(SCALES)}; got {list(scales)}.")

    def filed(function: Function) -> Function:
        _file(Statement(checked_id(id), figure, sentence, dict(expected), criterion, tuple(scales), function))
        return function

    return filed


def verdict(*conditions: object) -> str:
    """Return "holds" if all conditions are true, "holds in part" if some are, "does not hold" if none is.

    Example:
        >>> verdict(True, True), verdict(True, False), verdict(False)
        ('holds', 'holds in part', 'does not hold')
    """
    if not conditions:
        raise ValueFault("a verdict follows from at least one condition; got none.")
    return HOLDS if all(conditions) else IN_PART if any(conditions) else FAILS


def line(name: str, points: Iterable[Iterable[float]]) -> dict[str, list[float]]:
    """Return the line `name` of a curve, the means of the values at each point, and its standard errors.

    Example:
        >>> line("loss", [[1, 3], [2]])
        {'loss': [2.0, 2.0], 'loss ±': [1.0, 0.0]}
    """
    found = [Measured.over(values) for values in points]
    return {name: [one.value for one in found], f"{name} ±": [one.error or 0.0 for one in found]}


def papers() -> dict[str, str]:
    """Return the short names of all papers, each with its reference."""
    import reproductions

    found = sorted(one.name for one in pkgutil.iter_modules(reproductions.__path__) if one.ispkg)
    return {name: (import_module(f"reproductions.{name}").__doc__ or name).strip().splitlines()[0] for name in found}


def claims(paper: str) -> list[Statement]:
    """Return all claims of a paper, in the order of its figures."""
    known = papers()
    if paper not in known:
        hint = did_you_mean(paper, known) or "."
        raise UnknownName(f"no paper {paper!r}{hint} There are {', '.join(known)}.")
    folder = import_module(f"reproductions.{paper}")
    for module in pkgutil.iter_modules(folder.__path__):
        _imported(f"reproductions.{paper}.{module.name}")
    found = [statement for statement in _STATEMENTS.values() if statement.paper == paper]
    return sorted(found, key=lambda statement: (figure_order(statement.figure), statement.id))


def named(name: str) -> list[Statement]:
    """Return the claims that `name` means: all of a paper, or the one of that id."""
    paper, _, own = name.partition("/")
    found = {statement.id: statement for statement in claims(paper)}
    if own and name not in found:
        hint = did_you_mean(name, found) or "."
        raise UnknownName(f"no claim {name!r}{hint} `netkin reproduce {paper} --list` lists all.")
    return [found[name]] if own else list(found.values())


def chosen(name: str, scale: str) -> list[Statement]:
    """Return the claims that `name` means at `scale`; of a paper those that have it, of a claim's own name that one."""
    found = named(name)
    fitting = [statement for statement in found if scale in statement.scales]
    if "/" in name and not fitting:
        raise ValueFault(f"the claim {name!r} is measured at the scale {found[0].scales[0]!r} only; got {scale!r}.")
    return fitting


def _file(statement: Statement) -> None:
    """Keep a statement under its id; a second one from another function is refused, the same again is not."""
    old = _STATEMENTS.get(statement.id)
    if old is not None and _home(old) != _home(statement):
        raise NameClash(f"{_home(old)} and {_home(statement)} both claim the id {statement.id!r}; rename one.")
    _STATEMENTS[statement.id] = statement


def _home(statement: Statement) -> str:
    return f"{statement.measure.__module__}.{getattr(statement.measure, '__qualname__', '?')}"


def _imported(module: str) -> None:
    try:
        import_module(module)
    except Exception as fault:
        path = module.replace(".", "/")
        raise SourceError(f"{path}.py could not be imported: {type(fault).__name__}: {fault}") from fault
