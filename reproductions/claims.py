"""Claims as code: what a paper says, a control in which it should fail, when we call it reproduced, and a measurement.

A module of `reproductions/<paper>/` holds functions like this one; they are found by themselves.

    @claim(
        "svcca/few-directions",
        figure="Fig. 2a",
        sentence="a short quotation",
        expected={"accuracy kept by 25 of 512 directions": "nearly all"},
        control="as many principal directions",
        criterion="holds if ...",
        measures=["svcca"],
    )
    def few_directions(lab: Lab) -> Finding:
        ...
        kept, control = Measured.over(kept_by_seed), Measured.over(control_by_seed)
        name = "accuracy kept by 25 of 512 directions"
        gain = Measured.over(differences_by_seed)
        return Finding(verdict(all_of(kept.above(0.95), gain.above(0))), {name: kept}, {name: control})
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from netkin.errors import InvalidValue, NameClash, SourceError, UnknownName, did_you_mean
from reproductions.record import (
    EMPIRICAL,
    FAILS,
    HOLDS,
    IN_PART,
    KINDS,
    SCALES,
    UNDECIDED,
    VERDICTS,
    Curve,
    Decision,
    Measured,
    checked_id,
    figure_order,
    require_known,
)

if TYPE_CHECKING:
    from reproductions.laboratory import Lab

__all__ = [
    "Finding", "Measured", "Statement", "all_of", "chosen", "claim", "claims", "gains", "line", "named", "papers",
    "verdict",
]  # fmt: skip


class Verdict(str):
    """A verdict, and the parts of the criterion from which it follows, in their order: True, False or None.

    Example:
        >>> found = Verdict("holds in part", (True, False))
        >>> found, found.parts
        ('holds in part', (True, False))
    """

    parts: tuple[Decision, ...]

    def __new__(cls, words: str, parts: Sequence[Decision] = ()) -> Verdict:
        require_known("verdict", words, VERDICTS)
        made = super().__new__(cls, words)
        made.parts = tuple(parts)
        return made


@dataclass(frozen=True)
class Joined:
    """The decision on several conditions together, which knows each of them."""

    decision: Decision
    conditions: tuple[Decision, ...]

    def __bool__(self) -> bool:
        return bool(self.decision)


def decisions(parts: Sequence[Any]) -> tuple[Decision, ...]:
    """Return decisions as plain values: True, False or None.

    Example:
        >>> decisions([True, None, 0])
        (True, None, False)
    """
    plain = (part.decision if isinstance(part, Joined) else part for part in parts)
    return tuple(None if part is None else bool(part) for part in plain)


@dataclass(frozen=True)
class Finding:
    """What a claim's function found; the verdict follows from the numbers by the stated criterion.

    `controls` holds what the same code measured in the control, by the names of `measured`.
    """

    verdict: str
    measured: Mapping[str, Measured]
    controls: Mapping[str, Measured] = field(default_factory=dict)
    note: str = ""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        require_known("verdict", self.verdict, VERDICTS)


Function = TypeVar("Function", bound=Callable[[Any], Finding])


@dataclass(frozen=True)
class Statement:
    """A claim before it is measured: what the paper says, the control, and when we call it reproduced."""

    id: str
    figure: str
    sentence: str
    expected: Mapping[str, Any]
    control: str
    criterion: str
    measures: tuple[str, ...]
    kind: str
    scales: tuple[str, ...]
    papers_training: str
    training: Callable[[str, str], str] | None
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
    control: str = "",
    measures: Sequence[str] = (),
    kind: str = EMPIRICAL,
    scales: Sequence[str] = SCALES,
    papers_training: str = "",
    training: Callable[[str, str], str] | None = None,
) -> Callable[[Function], Function]:
    """Return a decorator that files a function as the claim `id`; the function itself stays as it is.

    Args:
        id: Paper and name, as ``svcca/few-directions``.
        figure: Where the paper says it.
        sentence: What it says, quoted.
        expected: The paper's values by the names that ours have; the leading one first.
        criterion: When we call it reproduced, fixed before the first measurement.
        control: A case, measured beside the claim by the same code, in which it should fail; an identity has none.
        measures: The ids of the measures it takes.
        kind: "empirical", or "identity" for what is algebra and stays out of the tally.
        scales: At which scales it can be measured.
        papers_training: How long the paper trains, if it says so.
        training: A function that returns how long we train at a scale, of the scale and the lengths of the networks of
            the laboratory that the claim uses; these lengths alone if not given.
    """
    strange = next((scale for scale in scales if scale not in SCALES), None)
    if strange is not None or not scales:
        raise InvalidValue(f"the scales of {id!r} are one or both of {', '.join(SCALES)}; got {list(scales)}.")
    if kind not in KINDS or bool(control) != (kind == EMPIRICAL):
        raise InvalidValue(
            f"the claim {id!r} is empirical and names a control in which it should fail, or an identity without one; "
            f"got kind {kind!r} and control {control!r}."
        )

    def filed(function: Function) -> Function:
        facts = figure, sentence, dict(expected), control, criterion, tuple(measures), kind, tuple(scales)
        _file(Statement(checked_id(id), *facts, papers_training, training, function))
        return function

    return filed


def all_of(*conditions: Any) -> Any:
    """Return a `Joined` decision: False if one is false, else None if one is undecided, else True.

    Example:
        >>> [all_of(*some).decision for some in ((True, None), (None, False), (True, True))]
        [None, False, True]
    """
    known = decisions(conditions)
    return Joined(False if False in known else None if None in known else True, known)


def verdict(*parts: Any) -> Verdict:
    """Return what follows from the parts of a claim, each of which could have failed by itself.

    It holds if all parts do, in part if some do and some do not, and not at all if some do not and none does; it is
    undecided if none fails and some part is undecided. A criterion of one part that joins several conditions has these
    for its parts.

    Example:
        >>> verdict(True, True), verdict(True, None), verdict(True, False), verdict(None, False)
        ('holds', 'undecided', 'holds in part', 'does not hold')
    """
    if not parts:
        raise InvalidValue("a verdict follows from at least one condition; got none.")
    known = decisions(parts)
    words = HOLDS if None not in known else UNDECIDED
    if False in known:
        words = IN_PART if True in known else FAILS
    return Verdict(words, parts[0].conditions if len(parts) == 1 and isinstance(parts[0], Joined) else known)


def gains(ours: Iterable[float], control: Iterable[float]) -> Measured:
    """Return by how much runs are above their controls, run by run.

    Example:
        >>> print(gains([0.9, 0.8], [0.5, 0.6]))
        0.30 ± 0.10 (n = 2)
    """
    return Measured.over(one - other for one, other in zip(ours, control, strict=True))


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
        raise UnknownName(f"no claim {name!r}{hint} `python -m reproductions {paper} --list` lists all.")
    return [found[name]] if own else list(found.values())


def chosen(name: str, scale: str) -> list[Statement]:
    """Return the claims that `name` means at `scale`; of a paper those that have it, of a claim's own name that one."""
    found = named(name)
    fitting = [statement for statement in found if scale in statement.scales]
    if "/" in name and not fitting:
        raise InvalidValue(f"the claim {name!r} is measured at the scale {found[0].scales[0]!r} only; got {scale!r}.")
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
