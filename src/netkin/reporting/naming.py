"""What tells long names apart, such as the paths of two checkpoints: what all of them share goes without saying."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

LONGEST = 22
_FOLDERS = re.compile(r"[^@:\s]*[/\\]")
_PARTS = re.compile(r"[^\W_]+|[\W_]")


def told_apart(names: Iterable[str], limit: int = LONGEST) -> dict[str, str]:
    """Return each name without its folders and without the beginning and the end that all share.

    Names stay as they are if none is longer than `limit`.

    Example:
        >>> told_apart(["tiny10@/runs/tiny10_seed0.pt", "tiny10@/runs/tiny10_seed1.pt"])
        {'tiny10@/runs/tiny10_seed0.pt': 'seed0', 'tiny10@/runs/tiny10_seed1.pt': 'seed1'}
    """
    whole = list(dict.fromkeys(names))
    if all(len(name) <= limit for name in whole):
        return dict(zip(whole, whole, strict=True))
    bare = [_FOLDERS.sub("", name) for name in whole]
    distinct = bare if len(set(bare)) == len(whole) and all(bare) else whole
    return dict(zip(whole, _different(distinct) if len(whole) > 1 else distinct, strict=True))


def _different(names: Sequence[str]) -> list[str]:
    """Return what is left of the names, which are distinct, between the parts that all begin and all end with."""
    parts = [_PARTS.findall(name) for name in names]
    start = _shared(parts)
    end = _shared([own[start:][::-1] for own in parts])
    left = ["".join(own[start : len(own) - end]) for own in parts]
    if all(re.search(r"[^\W\d_]", text) for text in left):
        return left
    while start and parts[0][start - 1] not in "/\\@:":  # a number alone says little: "bert-1" rather than "1"
        start -= 1
    return ["".join(own[start:]) for own in parts]


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """Return how many parts all begin with, where one at least is left to each."""
    most = max(min(len(own) for own in parts) - 1, 0)
    return next((k for k in range(most) if len({own[k] for own in parts}) > 1), most)
