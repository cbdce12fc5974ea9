"""The commit that measures: records name it, and the cache keeps readings and parts of killed claims by it."""

from __future__ import annotations

import subprocess
from functools import cache
from hashlib import blake2b
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("src", "reproductions", ":(exclude)reproductions/results")  # a record that is written is no change of the code
UNKNOWN = "not known, outside of git"


@cache
def commit(root: Path = ROOT) -> str:
    """Return the commit of a checkout, and which uncommitted changes its code has, as a text for records.

    It is read once by each process, as the code is.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").decode().strip()).resolve() != root.resolve():
            return UNKNOWN  # a copy of the code inside another repository
        head = _git(root, "rev-parse", "--short=12", "HEAD").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    changes = _git(root, "diff", "--no-ext-diff", "HEAD", "--", *CODE)
    for name in _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *CODE).split(b"\0")[:-1]:
        changes += name + (root / name.decode()).read_bytes()
    return f"{head} with uncommitted changes {blake2b(changes, digest_size=4).hexdigest()}" if changes else head


def _git(root: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", root, *words], capture_output=True, check=True).stdout
