"""What commands print: JSON for other programs, without NaN and Infinity, and plain tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def as_json(content: Any) -> str:
    """Return a result, or plain lists and mappings, as JSON text; numbers that are not finite become null."""
    from netkin.results import Comparison, Comparisons, Federation, Ranking, Series, TaskAccuracies, document
    from netkin.results.packing import plain

    results = (Comparison, Comparisons, Federation, Ranking, Series, TaskAccuracies)
    found = document(content) if isinstance(content, results) else plain(content)
    return json.dumps(found, indent=2, ensure_ascii=False)


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
