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
from netkin.results.verdicts import (
    FAILS,
    HOLDS,
    IN_PART,
    UNDECIDED,
    VERDICTS,
    Decision,
    checked_verdict,
    decisions,
    differences_in_words,
    parts_in_words,
    refuse_stranger,
)  # fmt: skip

__all__ = [
    "EMPIRICAL", "FAILS", "HOLDS", "IDENTITY", "IN_PART", "KINDS", "SCALES", "UNDECIDED", "VERDICTS", "Claim", "Curve",
    "Measured", "checked_id", "checked_verdict", "figure_order", "later_notes", "record_path", "recorded",
]  # fmt: skip

FORMAT = 3
NOTES = "notes.json"
EMPIRICAL, IDENTITY = KINDS = ("empirical", "identity")  # what could have come out otherwise, and what is algebra
SCALES = ("cpu", "gpu")
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
        counts = [one.n for one in (self, other) if one.n is not None]
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
        checked_verdict(self.verdict)
        refuse_stranger("scale", self.scale, SCALES)
        refuse_stranger("kind of claim", self.kind, KINDS)
        freeze(self, curves={title: _curve(title, curve) for title, curve in self.curves.items()})
        freeze(self, parts=decisions(self.parts))
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
    def leading(self) -> dict[str, Measured]:
        """The numbers that the paper has under the same name, else the first two."""
        shared = {name: one for name, one in self.measured.items() if name in self.expected}
        return shared or dict(list(self.measured.items())[:2])

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
        found = f"; here {self._headline_in_words} is {ours}" if ours else ""
        if self.kind == IDENTITY:
            return f"{said}{found}, which is algebra and {'agrees' if self.verdict == HOLDS else 'does not agree'}."
        beside = f", and in the control, {self.control}, {control}" if control else ""
        apart = differences_in_words(self.headline, self.measured)
        return f"{said}{found}{beside}{apart}; so {self._follows(ours, control)}."

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
            facts = {name: asdict(one).items() for name, one in content[numbers].items()}
            content[numbers] = {name: {k: v for k, v in own if v not in (None, "")} for name, own in facts.items()}
        nature = content.pop("kind")
        return _written({"kind": "claim", "format": FORMAT, "nature": nature, **content}) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Claim:
        """Return the claim that was saved at `path`."""
        return cls._from_content(path, files.read_json(path))

    @classmethod
    def _from_content(cls, path: str | os.PathLike[str], given: Mapping[str, Any]) -> Claim:
        """Return the claim that the JSON of the file `path` gives."""
        content = _without_format(path, given)
        with files.damage_reported(path):
            numbers: dict[str, Any] = {
                part: {name: as_record(Measured, one) for name, one in content.pop(part, {}).items()}
                for part in ("measured", "controls")
            }
            content.pop("digest", None)  # of code, in records of before commits were named
            return as_record(cls, {"kind": content.pop("nature", EMPIRICAL), **numbers, **content})


def recorded(folder: str | os.PathLike[str]) -> list[Claim]:
    """Return all claims saved below `folder`, by paper, then in the order of the paper's figures."""
    found = [Claim.load(path) for path in sorted(Path(folder).glob("*/*.json"))]
    return sorted(found, key=lambda claim: (claim.paper, figure_order(claim.figure), claim.id, claim.scale))


def later_notes(folder: str | os.PathLike[str], claims: Iterable[Claim]) -> dict[tuple[str, str], list[str]]:
    """Return what was said of records after they were measured, by id and scale, from ``notes.json`` in their folder.

    A note names each of its records by the time of the measurement, so that it ends with the next one.
    """
    path = Path(folder) / NOTES
    if not path.exists():
        return {}
    with files.damage_reported(path):
        listed = [(f"{one['note']} ({one['date']})", one["records"]) for one in files.read_json(path)]
    found = {
        (claim.id, claim.scale): [
            text for text, records in listed if records.get(f"{claim.id}.{claim.scale}") == claim.created
        ]
        for claim in claims
    }
    return {key: texts for key, texts in found.items() if texts}


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


def _finite(what: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise InvalidValue(f"a measured {what} must be a finite number; got {number}.")
    return number


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


def _without_format(path: str | os.PathLike[str], given: Mapping[str, Any]) -> dict[str, Any]:
    with files.damage_reported(path):
        content = {**files.mapping_of(given)}
        kind, version = content.pop("kind", None), content.pop("format", 0)
        if kind != "claim":
            raise FileError(
                f"{str(path)!r} is a JSON document of kind {kind!r}, and of JSON netkin reads only records of claims; "
                "save results with `--out` or `.save`."
            )
        if version > FORMAT:
            raise FileError(f"{str(path)!r} has format {version}; this netkin reads claims up to format {FORMAT}.")
        return content
