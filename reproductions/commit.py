"""The commit that measures: records name it, and the cache keeps readings and parts of killed claims by it."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("src", "reproductions", ":(exclude)reproductions/results")  # a record that is written is no change of the code
UNKNOWN = "not known, outside of git"
CHANGED = " with uncommitted changes"


@cache
def commit(root: Path = ROOT) -> str:
    """Return the commit of a checkout, and whether its code has uncommitted changes, as a text for records.

    It is read once by each process, as the code is.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return UNKNOWN  # a copy of the code inside another repository
        head = _git(root, "rev-parse", "--short=12", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return f"{head}{CHANGED if _git(root, 'status', '--porcelain', '--', *CODE) else ''}"


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], capture_output=True, check=True, text=True).stdout.strip()
