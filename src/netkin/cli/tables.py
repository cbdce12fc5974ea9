"""Plain tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return `rows` as lines whose columns stand below each other.

    Example:
        >>> print(aligned([["conv1", "Conv2d"], ["fc", "Linear"]]))
        conv1  Conv2d
        fc     Linear
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
