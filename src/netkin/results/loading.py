"""Any saved result, whatever its kind."""

from __future__ import annotations

import os

from netkin import files
from netkin.errors import FileFault
from netkin.results.comparison import Comparison, unpacked
from netkin.results.comparisons import Comparisons, all_unpacked
from netkin.results.series import Series, series_unpacked

KINDS = {"comparison": unpacked, "comparisons": all_unpacked, "series": series_unpacked}
READERS = {  # of files that take more than their path to read
    "compressed": "nk.load_compressed(path, model)",
    "recording": "DynamicsRecorder.load(path)",
    "stitch": "nk.load_stitch(path, a, b)",
}


def load(path: str | os.PathLike[str]) -> Comparison | Comparisons | Series:
    """Return the result that was saved at `path`."""
    header, arrays = files.read(path)
    kind = header.get("kind")
    if kind not in KINDS:
        raise FileFault(f"{str(path)!r} holds {kind!r}, which is no result; {_instead(kind)}.")
    with files.damage_reported(path):
        result: Comparison | Comparisons | Series = KINDS[kind](header, arrays)  # type: ignore[operator]
        return result


def _instead(kind: object) -> str:
    return f"`{READERS[kind]}` reads it" if kind in READERS else f"those are {', '.join(map(repr, KINDS))}"
