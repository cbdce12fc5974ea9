"""A claim of a paper and its reproduction, as readable JSON with the origin of each number."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from netkin import files
from netkin.errors import FileError, InvalidValue, ShapeError
from netkin.results.records import FrozenRecord, as_record, freeze, now, plain_fields
from netkin.results.values import student_quantile

FORMAT = 3
NOTES = "notes.json"
EMPIRICAL, IDENTITY = KINDS = ("empirical", "identity")  # what could have come out otherwise, and what is algebra
SCALES = ("cpu", "gpu")
HOLDS, IN_PART, UNDECIDED, FAILS = VERDICTS = ("holds", "holds in part", "undecided", "does not hold")
Decision = bool | None  # None: the numbers do not decide
LESS = ", less that of "  # in the name of a difference between a number and a control's
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
ROUNDING = 1e-7  # errors below this one say nothing about the digits to be shown
Curve = Mapping[str, Sequence[Any]]
# numbers that records call by the name of a score alone
IN_WORDS = {
    ("gradients/recommender", "kernel_ridge_hadamard"): "Kendall's τ of kernel ridge with accuracy after fine-tuning"
}


@dataclass(frozen=True)
class Measured:
    """A number with its standard error, how many runs or examples it comes from, and its unit."""

    value: float
    error: float | None = None
    n: int | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        freeze(self, value=_finite("value", self.value), n=None if self.n is None else int(self.n))
        freeze(self, error=None if self.error is None else _finite("error", self.error))
        if self.error is not None and self.error < 0:
            raise InvalidValue(f"a measured error must be zero or more; got {self.error:g}.")

    @classmethod
    def over(cls, values: Iterable[float], unit: str = "") -> Measured:
        """Return the mean of `values`, one from each seed, with its standard error.

        Example:
            >>> print(Measured.over([0.5, 0.7]))
            0.60 ± 0.10 (n = 2)
        """
        numbers = np.array([float(value) for value in values])
        if not len(numbers):
            raise InvalidValue("a mean needs at least one value; got none.")
        error = numbers.std(ddof=1) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
        return cls(float(numbers.mean()), error, len(numbers), unit)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% confidence interval by Student's t with n - 1 degrees of freedom; None for fewer than two values.

        Example:
            >>> low, high = Measured.over([0.5, 0.6, 0.7]).interval
            >>> round(low, 3), round(high, 3)
            (0.352, 0.848)
        """
        if self.error is None or self.n is None or self.n < 2:
            return None
        reach = student_quantile(self.n) * self.error
        return self.value - reach, self.value + reach

    def above(self, mark: float) -> bool | None:
        """Return whether the number is above `mark`; None if the mark lies inside its interval, or it has none."""
        return self._decided(lambda end: end > mark)

    def below(self, mark: float) -> bool | None:
        """Return whether the number is below `mark`; None if the mark lies inside its interval, or it has none."""
        return self._decided(lambda end: end < mark)

    def within(self, low: float, high: float) -> bool | None:
        """Return whether the number lies between two marks; None if one lies inside its interval, or it has none."""
        if self.interval is None:
            return None
        start, end = self.interval
        return True if low <= start and end <= high else False if end < low or start > high else None

    def minus(self, other: Measured) -> Measured:
        """Return the difference to a number from other runs; the smaller of both counts gives the degrees of freedom.

        Of runs that belong together in pairs, take `Measured.over` of their differences, which is sharper.
        """
        counts = [number.n for number in (self, other) if number.n is not None]
        known = self.error is not None and other.error is not None
        error = math.hypot(self.error or 0.0, other.error or 0.0) if known else None
        return Measured(self.value - other.value, error, min(counts, default=None), self.unit)

    def _decided(self, beyond: Callable[[float], bool]) -> bool | None:
        if self.interval is None:
            return None
        ends = {beyond(end) for end in self.interval}
        return ends.pop() if len(ends) == 1 else None

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        is_rounding = self.error is not None and self.error < 1e-12 * abs(self.value)
        error = 0.0 if is_rounding else self.error
        spread = "" if error is None else f" ± {_decimals(error, error)}"
        return f"{_decimals(self.value, error)}{spread}{unit}" + (f" (n = {self.n:,})" if self.n else "")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Claim(FrozenRecord):
    """What a paper states, what was measured, and the verdict: immutable, with its provenance.

    `expected` holds the paper's values in its words, the leading one first, and `measured` ours by name. `control` says
    in which case the claim should fail, and `controls` what the same code measured there, by the same names. An
    `identity` is algebra, which only a fault can break; it has no control. `curves` holds what a picture needs: by
    title, lists of equal length whose first is the x axis. A list called ``name ±`` holds the errors of the line
    ``name``. `call` is the command that measured it, `data` holds the digests of the data that were read, by name,
    `settings` what else it depends on, by name, `measures` the ids of the measures, and `provenance` the commit, the
    versions and the device. A record is never edited: what must be said of it later stands in `later_notes`.
    `parts` says which parts of the criterion hold, in its order: True, False, or None where the numbers do not decide.
    Records before format 3 have none of `parts`, `call` and `data`.
    """

    id: str
    figure: str
    sentence: str
    expected: Mapping[str, Any]
    criterion: str
    measured: Mapping[str, Measured]
    verdict: str
    scale: str
    parts: tuple[Decision, ...] = ()
    kind: str = EMPIRICAL
    control: str = ""
    controls: Mapping[str, Measured] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    note: str = ""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    call: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    measures: tuple[str, ...] = ()
    seconds: float = 0.0
    created: str = field(default_factory=now)
    version: str = ""

    def __post_init__(self) -> None:
        checked_id(self.id)
        require_known("verdict", self.verdict, VERDICTS)
        require_known("scale", self.scale, SCALES)
        require_known("kind of claim", self.kind, KINDS)
        freeze(self, curves={title: _curve(title, curve) for title, curve in self.curves.items()})
        freeze(self, parts=tuple(None if part is None else bool(part) for part in self.parts))
        super().__post_init__()

    @property
    def paper(self) -> str:
        """The paper's short name, the first part of the id."""
        return self.id.partition("/")[0]

    @property
    def name(self) -> str:
        """The claim's own name, the last part of the id."""
        return self.id.partition("/")[2]

    @property
    def headline(self) -> str:
        """The name of the number to show first: the first that the paper has too, else the first of ours."""
        return next((name for name in self.expected if name in self.measured), next(iter(self.measured), ""))

    @property
    def _headline_in_words(self) -> str:
        return IN_WORDS.get((self.id, self.headline), self.headline)

    @property
    def time(self) -> str:
        """How long the measuring took, as text; networks and stitches that other claims had made are not in it."""
        return f"{self.seconds:,.{0 if self.seconds >= 10 else 1}f} s"

    @property
    def row(self) -> dict[str, str]:
        """The claim as a row of a table: one number of the paper's, one of ours, and what the control gave."""
        return {
            "claim": self.id,
            "figure": self.figure,
            "number": self._headline_in_words,
            "the paper": str(self.expected.get(self.headline, "")),
            "ours": str(self.measured.get(self.headline, "")),
            "control": "algebra" if self.kind == IDENTITY else str(self.controls.get(self.headline, "")),
            "scale": self.scale,
            "verdict": self.verdict,
        }

    @property
    def conclusion(self) -> str:
        """One sentence: what was claimed, what was measured, what the control gave, and what follows."""
        ours, control = self.measured.get(self.headline), self.controls.get(self.headline)
        said = f"The paper says “{self.sentence.rstrip('. ')}” ({self.figure})"
        result = f"; here {self._headline_in_words} is {ours}" if ours else ""
        if self.kind == IDENTITY:
            return f"{said}{result}, which is algebra and {'agrees' if self.verdict == HOLDS else 'does not agree'}."
        beside = f", and in the control, {self.control}, {control}" if control else ""
        apart = differences_in_words(self.headline, self.measured)
        return f"{said}{result}{beside}{apart}; so {self._follows(ours, control)}."

    def _follows(self, ours: Measured | None, control: Measured | None) -> str:
        """Return the verdict, which follows from all parts of the criterion, in words.

        Where the headline number of the control is within one standard error of ours, that is said too.
        """
        words = "the runs do not decide the claim" if self.verdict == UNDECIDED else f"the claim {self.verdict}"
        apart = ours and control and ours.minus(control)
        near = apart is not None and apart.error is not None and abs(apart.value) <= apart.error
        reasons = [parts_in_words(self.parts, self.criterion)]
        if near and self.verdict not in (HOLDS, IN_PART):
            reasons.append("the control differs by less than one standard error")
        return ": ".join(filter(None, [f"by its criterion {words}", ", and ".join(filter(None, reasons))]))

    def __str__(self) -> str:
        return f"{self.id}, {self.scale} scale: {self.verdict}. {self.conclusion}"

    def __repr__(self) -> str:
        return f"Claim({self.id!r}, scale={self.scale!r}, verdict={self.verdict!r})"

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the claim below `folder` as ``paper/name.scale.json``, whole or not at all, and return the path.

        A file that is there is written over only with `overwrite`.
        """
        path = record_path(folder, self.id, self.scale)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, self.to_json(), overwrite=overwrite)
        return path

    def to_json(self) -> str:
        """Return the claim as readable JSON: lists of numbers stay on one line."""
        content = plain_fields(self)
        for numbers in ("measured", "controls"):
            content[numbers] = {
                name: {key: value for key, value in asdict(number).items() if value not in (None, "")}
                for name, number in content[numbers].items()
            }
        nature = content.pop("kind")
        return _written({"kind": "claim", "format": FORMAT, "nature": nature, **content}) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Claim:
        """Return the claim that was saved at `path`."""
        with files.damage_reported(path):
            content = files.mapping_of(files.read_json(path))
            kind, version = content.pop("kind", None), content.pop("format", 0)
            if kind != "claim":
                raise FileError(f"{str(path)!r} is a JSON document of kind {kind!r}, and no record of a claim.")
            if version > FORMAT:
                raise FileError(f"{str(path)!r} has format {version}; this netkin reads claims up to format {FORMAT}.")
            content.pop("digest", None)  # of code, in records of before commits were named
            return as_record(cls, {"kind": content.pop("nature", EMPIRICAL), **content})


def recorded(folder: str | os.PathLike[str]) -> list[Claim]:
    """Return all claims saved below `folder`, by paper, then in the order of the paper's figures."""
    claims = [Claim.load(path) for path in sorted(Path(folder).glob("*/*.json"))]
    return sorted(claims, key=lambda claim: (claim.paper, figure_order(claim.figure), claim.id, claim.scale))


def later_notes(folder: str | os.PathLike[str], claims: Iterable[Claim]) -> dict[tuple[str, str], list[str]]:
    """Return what was said of records after they were measured, by id and scale, from ``notes.json`` in their folder.

    A note names each of its records by the time of the measurement, so that it ends with the next one.
    """
    path = Path(folder) / NOTES
    if not path.exists():
        return {}
    with files.damage_reported(path):
        notes = [(f"{note['note']} ({note['date']})", note["records"]) for note in files.read_json(path)]
    by_claim: dict[tuple[str, str], list[str]] = {}
    for claim in claims:
        for text, records in notes:
            if records.get(f"{claim.id}.{claim.scale}") == claim.created:
                by_claim.setdefault((claim.id, claim.scale), []).append(text)
    return by_claim


def record_path(folder: str | os.PathLike[str], id: str, scale: str) -> Path:
    """Return where the claim `id` at `scale` is kept below `folder`."""
    return Path(folder) / f"{checked_id(id)}.{scale}.json"


def figure_order(figure: str) -> tuple[bool, list[int], str]:
    """Return a key that sorts the figures of a paper: those of the text first, the appendix after them.

    Example:
        >>> sorted(["App. 2", "Fig. 10", "Fig. 2b", "Fig. 2a", "Fig. App. 1"], key=figure_order)
        ['Fig. 2a', 'Fig. 2b', 'Fig. 10', 'Fig. App. 1', 'App. 2']
    """
    in_text = re.match(r"(Fig|Figure|Table|Sec|Eq)\w*\.? \d", figure) is not None
    return not in_text, [int(digits) for digits in re.findall(r"\d+", figure)[:1]], figure


def checked_id(id: str) -> str:
    """Return `id` if it is a paper and a name, as in ``svcca/few-directions``; refuse it otherwise."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9-]*", id):
        raise InvalidValue(f"a claim's id is a paper and a name in small letters, as in 'svcca/bottom-up'; got {id!r}.")
    return id


def require_known(what: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that is not one of those known."""
    if value not in known:
        raise InvalidValue(f"a {what} is one of {', '.join(map(repr, known))}; got {value!r}.")


def _finite(what: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise InvalidValue(f"a measured {what} must be a finite number; got {number}.")
    return number


def parts_in_words(parts: Sequence[Decision], criterion: str) -> str:
    """Return which of several parts of a criterion hold and which do not, by their numbers; nothing of fewer than two.

    Example:
        >>> parts_in_words([True, False, True, None], "Four parts. ...")
        'of its four parts 1 and 3 hold, 2 fails and 4 is undecided'
        >>> parts_in_words([True, True], "Holds if a > b, and c > d.")
        'both of its conditions hold'
    """
    if len(parts) < 2:
        return ""
    what = "parts" if " part" in f" {criterion.lower()}".replace("one part:", "") else "conditions"
    count = NUMBERS[len(parts)] if len(parts) < len(NUMBERS) else str(len(parts))
    if all(parts):
        return f"both of its {what} hold" if len(parts) == 2 else f"all {count} of its {what} hold"
    verbs = {True: ("holds", "hold"), False: ("fails", "fail"), None: ("is undecided", "are undecided")}
    groups = {decision: [str(k) for k, part in enumerate(parts, 1) if part is decision] for decision in verbs}
    clauses = [f"{_joined(places)} {verbs[part][len(places) > 1]}" for part, places in groups.items() if places]
    return f"of its {count} {what} {_joined(clauses)}"


def differences_in_words(name: str, measured: Mapping[str, Measured]) -> str:
    """Return by how much a number is above those of its controls, run by run, where that was measured."""
    clauses = []
    for control, number in measured.items():
        if control.startswith(name + LESS):
            ends = number.interval
            interval = f" (95% interval {ends[0]:.2g} to {ends[1]:.2g})" if ends else ""
            clauses.append(f"that of {control.removeprefix(name + LESS)} by {number.value:.2g}{interval}")
    return f"; run by run it exceeds {_joined(clauses)}" if clauses else ""


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _curve(title: str, curve: Curve) -> Curve:
    """Return a curve's lists with plain, short numbers, and None where there is no value."""
    lists = {name: tuple(_point(value) for value in values) for name, values in curve.items()}
    lengths = sorted({len(values) for values in lists.values()})
    if len(lists) < 2 or len(lengths) != 1:
        raise ShapeError(
            f"the curve {title!r} must hold an x axis and at least one line, of one length; got {len(lists)} lists of "
            f"lengths {', '.join(map(str, lengths)) or 'none'}."
        )
    return lists


def _point(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return float(f"{float(value):.6g}") if math.isfinite(float(value)) else None


def _decimals(value: float, error: float | None) -> str:
    """Return a number to two digits of its error; without one, or with one of mere rounding, to four digits."""
    if error and error >= ROUNDING:
        return f"{value:,.{max(1 - math.floor(math.log10(error)), 0)}f}"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


def _written(value: Any, depth: int = 0) -> str:
    """Return JSON with one line for each entry of a mapping; lists and single numbers with their errors take one."""
    if not isinstance(value, Mapping) or not value or (depth > 1 and _flat(value)):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner = "  " * (depth + 1)
    lines = [f"{inner}{json.dumps(str(key), ensure_ascii=False)}: {_written(v, depth + 1)}" for key, v in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + "  " * depth + "}"


def _flat(mapping: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, (Mapping, tuple, list)) for value in mapping.values())
