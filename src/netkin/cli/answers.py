"""The self-test: every measure on a stored pair of small layers, against answers that netkin did not compute.

`answers.json` was made by `tests/make_answers.py` from slow NumPy transcriptions of the papers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from netkin.errors import NetkinError

if TYPE_CHECKING:
    from netkin.measures import Measure

TOLERANCE = 1e-9
COARSE = 1e-4  # for devices without float64


@dataclass(frozen=True)
class Answer:
    """What a measure gave and what it should have given."""

    measure: str
    value: float | None
    expected: float
    tolerance: float
    fault: str = ""

    @property
    def right(self) -> bool:
        return self.value is not None and abs(self.value - self.expected) <= self.tolerance * max(1, abs(self.expected))


def stored() -> dict[str, Any]:
    """Return the stored layers `X` and `Y`, and the `answers` by measure."""
    return json.loads(files("netkin.cli").joinpath("answers.json").read_text(encoding="utf-8"))


def self_test(device: str | None = None) -> list[Answer]:
    """Return the answer of every measure, with its default parameters and a few others."""
    import torch

    from netkin.measures import find

    world = stored()
    double = torch.device(device or "cpu").type != "mps"
    X, Y = (torch.tensor(world[name], dtype=torch.float64 if double else torch.float32).to(device) for name in "XY")
    tolerance = TOLERANCE if double else COARSE
    return [_answer(find(spec), X, Y, expected, tolerance) for spec, expected in world["answers"].items()]


def _answer(measure: Measure, X: Any, Y: Any, expected: float, tolerance: float) -> Answer:
    try:
        return Answer(measure.id, float(measure.function(X, Y, **measure.parameters)), expected, tolerance)
    except (NetkinError, RuntimeError) as fault:
        return Answer(measure.id, None, expected, tolerance, str(fault).partition("\n")[0])
