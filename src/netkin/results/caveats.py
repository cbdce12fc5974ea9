"""What a reader must know before reading numbers: a code for its kind, a sentence, and for how many values it holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Caveat:
    """One thing to know before reading numbers, such as too few examples for a measure.

    `size` is how far it goes, such as the number of examples that are needed: of caveats of one code that have a size,
    the largest stands for all. Without a size each sentence stands for itself, as one for each model. `counted` says
    what `count` counts where such sentences were joined, such as values.

    Example:
        >>> one, other = (Caveat("few-examples", f"8 examples are few; take {n}.", 2, n) for n in (20, 30))
        >>> [str(caveat) for caveat in grouped([one, other])]
        ['8 examples are few; take 30. This holds for 4 values.']
    """

    code: str
    sentence: str
    count: int = 1
    size: float | None = field(default=None, compare=False)
    counted: str = ""

    def __str__(self) -> str:
        return f"{self.sentence} This holds for {self.count:,} {self.counted}." if self.counted else self.sentence


def grouped(caveats: Iterable[Caveat], counted: str = "values") -> tuple[Caveat, ...]:
    """Return each caveat once, in the order in which their kinds come: of those with a size one for each code."""
    groups: dict[tuple[str, str], list[Caveat]] = {}
    for caveat in caveats:
        groups.setdefault((caveat.code, caveat.sentence if caveat.size is None else ""), []).append(caveat)
    return tuple(_joined(alike, counted) for alike in groups.values())


def _joined(alike: list[Caveat], counted: str) -> Caveat:
    largest, count = max(alike, key=lambda caveat: caveat.size or 0), sum(caveat.count for caveat in alike)
    said = any(caveat.counted or caveat.sentence != largest.sentence for caveat in alike)
    return replace(largest, count=count, counted=counted if said else "")
