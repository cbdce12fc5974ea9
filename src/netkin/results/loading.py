"""Any saved result, whatever its kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from netkin import files
from netkin.errors import FileFault
from netkin.results.comparison import unpacked
from netkin.results.comparisons import all_unpacked
from netkin.results.series import series_unpacked

KINDS: dict[object, Callable[..., Any]] = {
    "comparison": unpacked,
    "comparisons": all_unpacked,
    "series": series_unpacked,
}
READERS = {  # of files that take more than their path to read
    "compressed": "nk.load_compressed(path, model)",
    "recording": "DynamicsRecorder.load(path)",
    "stitch": "nk.load_stitch(path, a, b)",
}


def load(path: str | os.PathLike[str]) -> Any:
    """Return what was saved at `path`: a `Comparison`, `Comparisons`, a `Series`, or statistics to compare from.

    Only statistics need torch, which is imported for them alone.
    """
    kind = files.read_header(path).get("kind")
    if kind == "statistics":
        return import_module("netkin.comparing.study").load_statistics(path)
    header, arrays = files.read(path)
    if kind not in KINDS:
        raise FileFault(f"{str(path)!r} holds {kind!r}, which is no result; {_instead(kind)}.")
    with files.damage_reported(path):
        return KINDS[kind](header, arrays)


def _instead(kind: object) -> str:
    return f"`{READERS[kind]}` reads it" if kind in READERS else f"those are {', '.join(map(repr, KINDS))}"
