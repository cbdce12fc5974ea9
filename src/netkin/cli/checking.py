"""Checks: `netkin doctor`, the numbers of the measures on this machine, and `netkin reproduce`, the claims of papers.

The self-test of the first runs every measure on a stored pair of small layers, against answers that netkin did not
compute: `answers.json` was made by `tests/make_answers.py` from slow NumPy transcriptions of the papers.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin import __version__
from netkin.cli.options import DEVICE, JSON, OVERWRITE, command
from netkin.cli.outputs import PAGES, REFUSED, OutputFiles, align_columns, as_json
from netkin.cli.running import devices, require_device
from netkin.errors import InflatedWarning, NetkinError, PackageWarning, SourceError

if TYPE_CHECKING:
    from netkin.measures import Measure


PACKAGES = ("torch", "numpy", "scipy", "safetensors", "click")
EXTRAS = {
    "figures": "matplotlib", "flower": "flwr", "hf": "transformers", "images": "PIL", "lightning": "lightning",
    "mlflow": "mlflow", "pandas": "pandas", "ray": "ray", "tensorboard": "tensorboard", "xarray": "xarray",
}  # fmt: skip
FOLDER = click.Path(file_okay=False, path_type=Path)
DATA = click.Path(exists=True, file_okay=False, path_type=Path)
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


@command("reproduce --list")
@click.argument("names", nargs=-1, metavar="PAPER[/CLAIM]...")
@click.option(
    "--scale",
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="cpu: small networks and few images, takes minutes. gpu: larger networks and all images, with "
    "fewer epochs, rounds and repetitions than in the papers; docs/reproducing.md compares them.",
)
@click.option("--data", type=DATA, metavar="DIR", help="Folder of the data sets; by default the variable NETKIN_DATA.")
@click.option(
    "--checkpoints",
    type=DATA,
    metavar="DIR",
    help="Folder of networks published by the authors; by default the variable NETKIN_CHECKPOINTS.",
)
@click.option(
    "-o", "--out", type=FOLDER, metavar="DIR", help="Folder for the records; by default reproductions/results."
)
@click.option(
    "--cache", type=FOLDER, metavar="DIR", help="Folder for trained networks; by default reproductions/.cache."
)
@DEVICE
@click.option("--again", is_flag=True, help="Measure recorded claims again.")
@click.option(
    "--list", "listing", is_flag=True, help="Show the table of claims with their numbers and verdicts; measure nothing."
)
@click.option(
    "--page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write an HTML page of all recorded claims to this file.",
)
@OVERWRITE
@JSON
def reproduce(
    names: tuple[str, ...], listing: bool, page: Path | None, overwrite: bool, json: bool, **options: Any
) -> None:
    """Reproduce claims of papers, each with a control in which it should fail, and record the results.

    Without a name, show the table of recorded claims. Each claim and each trained network is saved as soon as it is
    finished, so an interrupted run resumes where it stopped; recorded claims are measured again only with --again or if
    their criterion, control, measures or recipes have changed. The claims are in the folder `reproductions` of netkin's
    repository; run this command inside a checkout. The exit code is 1 if a claim could not be measured; a claim that is
    not reproduced is no error.
    """
    listing = listing or not (names or page)
    OutputFiles(overwrite).check("--page", page, PAGES)
    root = checkout(Path.cwd())
    out = options.pop("out") or root / "reproductions" / "results"
    if listing:
        tables = _part(root, "listing")
        make = tables.list_as_document if json else tables.list_as_text
        _print(make(tables.listed(names), out), json)
    failed = _measure(root, names, out, json, **options) if names and not listing else False
    if page:
        _write_page(_part(root, "running").current(out), out, page, overwrite)
    if failed:
        raise click.exceptions.Exit(REFUSED)


def checkout(start: Path) -> Path:
    """Return the checkout of netkin that holds the folder `start`, or refuse if none does."""
    for folder in (start, *start.parents):
        if (folder / "reproductions" / "claims.py").is_file():
            return folder
    raise SourceError(
        "`netkin reproduce` needs the folder 'reproductions' of netkin's repository, and "
        f"{str(start)!r} is not in a checkout of it; clone the repository and run this command inside."
    )


def _measure(
    root: Path,
    names: tuple[str, ...],
    out: Path,
    json: bool,
    scale: str,
    data: Path | None,
    checkpoints: Path | None,
    device: str,
    again: bool,
    cache: Path | None,
) -> bool:
    """Measure the claims, print what became of them, and tell whether one failed."""
    require_device(device)
    running, tables = _part(root, "running"), _part(root, "listing")
    lab = _part(root, "laboratory").Lab(scale, device=device, data=data, checkpoints=checkpoints, cache=cache)
    try:
        outcomes = running.run(names, lab, out, again=again)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("interrupted; run the same command again to resume.") from stop
    _print((tables.outcomes_as_document if json else tables.outcomes_as_text)(outcomes), json)
    return any(outcome.fault for outcome in outcomes)


def _part(root: Path, name: str) -> Any:
    """Return a module of the checkout's `reproductions`."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(f"reproductions.{name}")


def _print(content: Any, json: bool) -> None:
    click.echo(as_json(content) if json else content)


def _write_page(found: Any, out: Path, page: Path, overwrite: bool) -> None:
    from netkin.reporting.page.claims_page import report_claims
    from netkin.results.claim import later_notes

    written = report_claims(found, page, notes=later_notes(out, found), overwrite=overwrite)
    click.echo(f"page: open {written}", err=True)
