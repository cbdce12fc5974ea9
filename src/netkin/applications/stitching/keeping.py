"""Keeping: the file in which sweeps grow, and the refusal of one that holds something else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from netkin.applications.stitching.joints import Pair
from netkin.applications.stitching.worth import Ledger
from netkin.errors import FileFault
from netkin.results import Comparison, Comparisons

REDRAWN = "; a loader that draws its examples anew gives other data each time"
INSTEAD = "give another file or delete it."


class Keeping:
    """Sweeps of pairs of models as they grow, and what an earlier call found of them; without a path, in no file.

    The file of `several` pairs holds all of them; otherwise it holds one sweep.
    """

    def __init__(self, path: str | os.PathLike[str] | None, pairs: Sequence[Pair], *, several: bool):
        self.path, self.several = path, several
        self.found: dict[Pair, Comparison] = {}
        if path is not None and Path(path).exists():
            self.found = dict(Comparisons.load(path)) if several else {pairs[0]: Comparison.load(path)}
        for a, b in [pair for pair in self.found if pair not in pairs]:
            raise FileFault(f"{self._name} holds a sweep of {a!r} into {b!r}, which is not asked for; {INSTEAD}")

    def known(self, pair: Pair, question: Mapping[str, str], ledger: Ledger) -> Comparison | None:
        """Return the beginning of the same sweep, if there is one; refused is one that asked something else."""
        found = self.found.get(pair)
        if found is None:
            return None
        if "asked seed" not in found.provenance:
            raise FileFault(f"{self._name} holds a comparison that is no sweep of stitches; {INSTEAD}")
        differs = [key for key, value in question.items() if found.provenance.get(key) != value]
        if differs:
            raise FileFault(f"{self._name} holds a sweep of other {_told(differs)}; {INSTEAD}")
        lost = ledger.lost(found)
        if lost:
            raise FileFault(
                f"{self._name} holds {lost}, which is not asked for and would be lost; ask for it too, or {INSTEAD}"
            )
        return found

    def store(self, pair: Pair, found: Comparison) -> None:
        """Take what is known of a pair of models by now."""
        self.found[pair] = found
        if self.path is not None:
            (Comparisons(self.found) if self.several else found).save(self.path)

    @property
    def _name(self) -> str:
        return repr(os.fspath(self.path or ""))


def _told(differs: Sequence[str]) -> str:
    """Return what differs, in words, the data first."""
    kinds = {"digest": "data", "weights": "models", "asked": "options"}
    kind = next(word for key, word in kinds.items() if any(key in one for one in differs))
    verb = "differs" if len(differs) == 1 else "differ"
    return f"{kind} ({' and '.join(differs)} {verb}{REDRAWN if kind == 'data' else ''})"
