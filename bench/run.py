"""Measure everything, each figure in a process of its own, and write `bench/results.json` and `docs/performance.md`.

`make bench` runs all; `make bench ARGS="cca svcca"` measures these again and keeps the other figures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks import TASKS

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results.json"
PEERS = ["torch-cka", "ckatorch", "pytorch-cka", "rsatoolbox"]
GOALS = [
    ("cka_512", "`cka`, 10,000 × 512, against the three products", "≤ 1.15"),
    ("cka_2048", "`cka`, 10,000 × 2,048, against the three products", "≤ 1.15"),
    ("cka_wide", "`cka`, 1,000 × 65,536, against the two Gram products", "≤ 1.3"),
    (
        "minibatch",
        "`cka_minibatch`, `flatten`, 20 × 20 layers of two ResNet-18, against the two forward passes",
        "≤ 1.15",
    ),
    (
        "all_linear",
        "all linear measures at once, `pool`, the same nets, 10,000 images, against the forward passes",
        "≤ 1.35",
    ),
    ("cca", "`cca_mean`, 10,000 × 512, float64, against eigh on the Gram matrices", "≤ 1.0"),
    ("svcca", "`svcca`, 10,000 × 512, float64, against the same", "≤ 1.0"),
]


def main(asked: list[str]) -> None:
    """Measure what is asked for, or everything."""
    figures = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in asked or [*TASKS, *PEERS]:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        figures[name] = measured(name)
    figures["machine"] = machine()
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    (ROOT / "docs" / "performance.md").write_text(page(figures))
    print(page(figures))


def measured(name: str) -> dict[str, Any]:
    """Return one figure, from a fresh process."""
    python, script = (sys.executable, "tasks.py") if name in TASKS else (peer_python(), "peers.py")
    run = subprocess.run([python, str(HERE / script), name], stdout=subprocess.PIPE, text=True, check=True, cwd=HERE)
    return json.loads(run.stdout.splitlines()[-1])


def peer_python() -> str:
    """Return the Python of the peers' environment, which is made at the first call."""
    folder = ROOT / ".bench-venv"
    python, done = folder / "bin" / "python", folder / ".done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*install, "-e", str(ROOT), "matplotlib", *PEERS], check=True)
        done.touch()
    return str(python)


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    return {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "netkin": version("netkin"),
    }


def page(figures: dict[str, Any]) -> str:
    """Return the page that shows the figures."""
    where = figures["machine"]
    head = (
        "# Performance\n\nMade by `make bench`; every figure is a ratio of times taken in turn in one process.\n"
        f"Measured {where['date']} on {where['cores']} cores ({where['processor']}), Python {where['python']}, "
        f"torch {where['torch']}, netkin {where['netkin']}.\n"
    )
    return "\n".join([head, *goals(figures), "", *accuracy(figures), "", *peers(figures), ""])


def goals(figures: dict[str, Any]) -> list[str]:
    rows = [f"| {work} | {figures[name]['ratio']:.2f} | {goal} |" for name, work, goal in GOALS if name in figures]
    return ["| work | ratio | goal |", "|---|---|---|", *rows]


def accuracy(figures: dict[str, Any]) -> list[str]:
    """Return what was measured beside time: errors and memory."""
    lines = ["| beside time | measured | goal |", "|---|---|---|"]
    for name in ("cka_512", "cka_2048", "cka_wide"):
        errors = [f"{figures[name][f'error_at_offset_{offset}']:.0e}" for offset in (0, 10, 1000)]
        lines.append(f"| `{name}`: float32 against float64 at offset 0, 10, 1,000 | {', '.join(errors)} | ≤ 2e-6 |")
    memory = figures["minibatch_memory"]["peak_megabytes"] / figures["forward_memory"]["peak_megabytes"]
    error = figures["minibatch_error"]["error"]
    lines += [
        f"| `cka_minibatch`: against the same estimator in float64 | {error:.0e} | ≤ 1e-5 |",
        f"| `cka_minibatch`: peak memory over that of the forward passes | {memory:.2f} | ≤ 1.2 |",
        f"| `cca_mean` against QR in float64 | {figures['cca']['error']:.0e} | ≤ 1e-8 |",
        f"| `svcca` against SVD and QR in float64 | {figures['svcca']['error']:.0e} | ≤ 1e-8 |",
    ]
    return lines


def peers(figures: dict[str, Any]) -> list[str]:
    """Return the other packages' figures for the same work."""
    lines = ["| package | version | work | ratio |", "|---|---|---|---|"]
    for name in PEERS:
        if name in figures:
            work = "linear CKA, 1,000 × 512" if name == "rsatoolbox" else "whole-model mini-batch CKA, as above"
            lines.append(f"| {name} | {figures[name]['version']} | {work} | {figures[name]['ratio']:.1f} |")
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
