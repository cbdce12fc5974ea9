"""`netkin reproduce`: the papers' claims, measured again from the code in the repository."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from netkin.cli.options import DEVICE, JSON, QUIET, example
from netkin.cli.outputs import FORCE, Outputs, as_json
from netkin.cli.running import REFUSED, refuse_absent_device, refusing
from netkin.errors import SourceError

FOLDER = click.Path(file_okay=False, path_type=Path)
DATA = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(epilog=example("reproduce --list"))
@click.argument("names", nargs=-1, metavar="PAPER[/CLAIM]...")
@click.option(
    "--scale",
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="Minutes on a CPU, or the paper's setting as far as the data go.",
)
@click.option("--data", type=DATA, metavar="DIR", help="Folder of the data sets; NETKIN_DATA if not given.")
@click.option(
    "--checkpoints",
    type=DATA,
    metavar="DIR",
    help="Folder of networks that authors published; NETKIN_CHECKPOINTS if not given.",
)
@click.option("--out", type=FOLDER, metavar="DIR", help="Folder for the records; reproductions/results if not given.")
@DEVICE
@click.option("--again", is_flag=True, help="Measure also what is recorded already.")
@click.option(
    "--list", "listing", is_flag=True, help="Show the table of claims, their numbers and verdicts, and measure nothing."
)
@click.option(
    "--page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write all that is recorded as a page for the browser to this file.",
)
@FORCE
@QUIET
@JSON
@refusing
def reproduce(
    names: tuple[str, ...], listing: bool, page: Path | None, force: bool, json: bool, **options: Any
) -> None:
    """Measure what papers claim, beside a control in which it should fail, and record what was found.

    Without a name, show the table of what is recorded. Each claim, and each trained network, is kept as soon as it is
    finished, so that an interrupted run goes on where it was; recorded claims are not measured again unless asked or
    their code has changed. The claims are code in the folder `reproductions` of netkin's repository; run this inside a
    checkout. The exit code is 1 if a claim could not be measured; one that does not hold is a result.
    """
    listing = listing or not (names or page)
    Outputs(force).check("--page", page, "page")
    root = checkout(Path.cwd())
    out = options.pop("out") or root / "reproductions" / "results"
    if listing:
        tables = _part(root, "listing")
        make = tables.list_as_document if json else tables.list_as_text
        _print(make(tables.listed(names), out), json)
    failed = _measure(root, names, out, json, **options) if names and not listing else False
    if page:
        _write_page(_part(root, "running").current(out), page, force)
    if failed:
        raise click.exceptions.Exit(REFUSED)


def checkout(start: Path) -> Path:
    """Return the checkout of netkin that holds the folder `start`, or refuse if none does."""
    for folder in (start, *start.parents):
        if (folder / "reproductions" / "claims.py").is_file():
            return folder
    raise SourceError(
        "`netkin reproduce` runs the folder 'reproductions' of netkin's repository, and no checkout of it holds "
        f"{str(start)!r}; clone the repository and run this inside."
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
) -> bool:
    """Measure the claims, print what became of them, and tell whether one failed."""
    refuse_absent_device(device)
    running, tables = _part(root, "running"), _part(root, "listing")
    lab = _part(root, "laboratory").Lab(scale, device=device, data=data, checkpoints=checkpoints)
    outcomes = running.run(names, lab, out, again=again)
    _print((tables.outcomes_as_document if json else tables.outcomes_as_text)(outcomes), json)
    return any(outcome.fault for outcome in outcomes)


def _part(root: Path, name: str) -> Any:
    """Return a module of the checkout's `reproductions`."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(f"reproductions.{name}")


def _print(content: Any, json: bool) -> None:
    click.echo(as_json(content) if json else content)


def _write_page(found: Any, page: Path, force: bool) -> None:
    from netkin.reporting.page.claims_page import report_claims

    click.echo(f"page: open {report_claims(found, page, overwrite=force)}", err=True)
