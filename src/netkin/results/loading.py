"""Any saved result, whatever its kind."""

from __future__ import annotations

import os

from netkin import files
from netkin.errors import FileFault
from netkin.results.comparison import Comparison
from netkin.results.comparisons import Comparisons


def load(path: str | os.PathLike[str]) -> Comparison | Comparisons:
    """Return the result that was saved at `path`."""
    kind = files.read(path)[0].get("kind")
    if kind == "comparison":
        return Comparison.load(path)
    if kind == "comparisons":
        return Comparisons.load(path)
    raise FileFault(f"{str(path)!r} holds {kind!r}, which is no result; those are 'comparison' and 'comparisons'.")
