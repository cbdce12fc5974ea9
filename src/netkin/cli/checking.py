"""`netkin doctor`: what is installed, and the numbers of the measures on this machine.

The self-test runs every measure on a stored pair of small layers, against answers that netkin did not
compute: `answers.json` was made by `tests/make_answers.py` from slow NumPy transcriptions of the papers.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from netkin import __version__
from netkin.cli.options import DEVICE, JSON, command
from netkin.cli.outputs import REFUSED, align_columns, as_json
from netkin.cli.running import devices, require_device
from netkin.errors import InflatedWarning, NetkinError, PackageWarning

if TYPE_CHECKING:
    from netkin.measures import Measure


PACKAGES = ("torch", "numpy", "scipy", "safetensors", "click")
EXTRAS = {
    "arrow": "pyarrow", "figures": "matplotlib", "flower": "flwr", "hf": "transformers", "images": "PIL",
    "lightning": "lightning", "mlflow": "mlflow", "pandas": "pandas", "peft": "peft", "ray": "ray",
    "tensorboard": "tensorboard", "xarray": "xarray",
}  # fmt: skip
TOLERANCE = 1e-9
COARSE = 1e-4  # for devices without float64


@command("doctor")
@DEVICE
@JSON
def doctor(device: str | None, json: bool) -> None:
    """Show what is installed, and test every measure against stored reference values.

    The exit code is 1 if a measure differs, or if no temporary file can be written.
    """
    require_device(device)
    here = {**machine(), "broken_packages": _broken_packages()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackageWarning)  # shown in a line of its own
        warnings.simplefilter("ignore", InflatedWarning)  # the layers of the test are small
        answers = self_test(device)
    click.echo(as_json(_document(here, answers)) if json else f"{_describe(here)}\n\n{_verdict(answers)}")
    if not _is_healthy(here, answers):
        raise click.exceptions.Exit(REFUSED)


def _broken_packages() -> dict[str, str]:
    from netkin.measures import broken_packages

    return broken_packages()


def _document(here: dict[str, Any], answers: list[Answer]) -> dict[str, Any]:
    rows = [{**vars(answer), "right": answer.right} for answer in answers]
    return {**here, "measures": rows, "healthy": _is_healthy(here, answers)}


def _is_healthy(here: dict[str, Any], answers: list[Answer]) -> bool:
    return bool(here["temporary_folder"]) and all(answer.right for answer in answers)


def _describe(here: dict[str, Any]) -> str:
    extras = [f"{name} {'yes' if found else 'no'}" for name, found in here["extras"].items()]
    facts = {
        "netkin": here["netkin"],
        "python": f"{here['python']}, {here['system']}",
        **here["packages"],
        "extras": ", ".join(extras),
        "devices": ", ".join(here["devices"]),
        "threads": f"{here['threads']} of {here['cores']} cores",
        "free memory": f"{here['free_memory'] / 1e9:.1f} GB",
        "temporary files": here["temporary_folder"] or "cannot be written; set TMPDIR to a folder that can",
        **{f"package {package}": why for package, why in here["broken_packages"].items()},
    }
    return align_columns(list(facts.items()))


def _verdict(answers: list[Answer]) -> str:
    wrong = [answer for answer in answers if not answer.right]
    if not wrong:
        return f"all {len(answers)} reference values of the measures are reproduced."
    gave = (
        f"  {a.measure} gives {a.fault if a.value is None else repr(a.value)} instead of {a.expected!r}" for a in wrong
    )
    return "\n".join([f"{len(wrong)} of {len(answers)} reference values of the measures are not reproduced:", *gave])


def machine() -> dict[str, Any]:
    """Return all that a report of a fault should say about the machine, as plain values."""
    import torch

    from netkin.memory import free_memory

    return {
        "netkin": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {package: installed_version(package) for package in PACKAGES},
        "extras": {extra: find_spec(module) is not None for extra, module in EXTRAS.items()},
        "devices": devices(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "free_memory": free_memory(),
        "temporary_folder": temporary_folder(),
    }


def installed_version(package: str) -> str:
    """Return the version of an installed package, or "missing"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def temporary_folder() -> str | None:
    """Return the folder for temporary files, None if nothing can be written there."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"netkin")
        return tempfile.gettempdir()
    except OSError:
        return None


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


def stored_answers() -> dict[str, Any]:
    """Return the stored layers `X` and `Y`, and the `answers` by measure."""
    return json.loads(files("netkin.cli").joinpath("answers.json").read_text(encoding="utf-8"))


def self_test(device: str | None = None) -> list[Answer]:
    """Return the answer of every measure, with its default parameters and a few others."""
    import torch

    from netkin.measures import find

    world = stored_answers()
    double = torch.device(device or "cpu").type != "mps"
    X, Y = (torch.tensor(world[name], dtype=torch.float64 if double else torch.float32).to(device) for name in "XY")
    tolerance = TOLERANCE if double else COARSE
    return [_answer(find(spec), X, Y, expected, tolerance) for spec, expected in world["answers"].items()]


def _answer(measure: Measure, X: Any, Y: Any, expected: float, tolerance: float) -> Answer:
    try:
        return Answer(measure.id, float(measure.function(X, Y, **measure.parameters)), expected, tolerance)
    except (NetkinError, RuntimeError) as fault:
        return Answer(measure.id, None, expected, tolerance, str(fault).partition("\n")[0])
