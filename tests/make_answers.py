"""Write `src/netkin/cli/answers.json`: two small layers, and what the slow NumPy transcriptions say of them.

Run it with `python tests/make_answers.py` when a measure is added. Nothing of netkin is used here.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from transcriptions import TRANSCRIPTIONS
from worlds import Worlds

# with their defaults some measures say the same of so small a world
VARIANTS = [
    ("cka_minibatch", "batch", 8),
    ("svcca", "variance", 0.9),
    ("svcca_by_sum", "variance", 0.7),
    ("svcca_k", "k", 2),
    ("shape_distance", "alpha", 0.2),
]
FILE = Path(__file__).parents[1] / "src" / "netkin" / "cli" / "answers.json"


def layers():
    """Return two related layers of 32 examples, rounded so that the file is short."""
    return [np.round(Z, 3) for Z in Worlds(seed=7).related(32, 6, 5)]


def answers(X, Y):
    """Return what every transcription says, with the measures' default parameters and with a few others."""
    found = {name: float(function(X, Y)) for name, function in TRANSCRIPTIONS.items()}
    found |= {f"{name}({key}={x})": float(TRANSCRIPTIONS[name](X, Y, **{key: x})) for name, key, x in VARIANTS}
    return dict(sorted(found.items()))


def document(X, Y):
    """Return the text of the file."""
    rows = [f'"{name}": [\n{_lines(Z)}]' for name, Z in (("X", X), ("Y", Y))]
    return "{" + ",\n".join([*rows, f'"answers": {json.dumps(answers(X, Y), indent=1)}']) + "}\n"


def _lines(Z):
    return ",\n".join(json.dumps(row) for row in Z.tolist())


if __name__ == "__main__":
    FILE.write_text(document(*layers()), encoding="utf-8")
