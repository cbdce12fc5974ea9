"""Any saved result, whatever its kind."""

from __future__ import annotations

import os

from netkin import files
from netkin.errors import FileFault
from netkin.results.comparison import Comparison, unpacked
from netkin.results.comparisons import Comparisons, all_unpacked


def load(path: str | os.PathLike[str]) -> Comparison | Comparisons:
    """Return the result that was saved at `path`."""
    header, arrays = files.read(path)
    kind = header.get("kind")
    if kind not in ("comparison", "comparisons"):
        raise FileFault(f"{str(path)!r} holds {kind!r}, which is no result; those are 'comparison' and 'comparisons'.")
    with files.damage_reported(path):
        return unpacked(header, arrays) if kind == "comparison" else all_unpacked(header, arrays)
