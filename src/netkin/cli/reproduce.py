"""`netkin reproduce`: the papers' claims, measured again from the code in the repository."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from netkin.cli.options import DEVICE, JSON, example
from netkin.cli.outputs import FORCE, OutputFiles, as_json
from netkin.cli.running import REFUSED, refuse_absent_device, with_refusals
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
    help="cpu: small, takes minutes. gpu: the paper's setting, as far as the data allow.",
)
@click.option("--data", type=DATA, metavar="DIR", help="Folder of the data sets; by default the variable NETKIN_DATA.")
@click.option(
    "--checkpoints",
    type=DATA,
    metavar="DIR",
    help="Folder of networks published by the authors; by default the variable NETKIN_CHECKPOINTS.",
)
@click.option("--out", type=FOLDER, metavar="DIR", help="Folder for the records; by default reproductions/results.")
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
@FORCE
@JSON
@with_refusals
def reproduce(
    names: tuple[str, ...], listing: bool, page: Path | None, force: bool, json: bool, **options: Any
) -> None:
    """Reproduce claims of papers, each with a control in which it should fail, and record the results.

    Without a name, show the table of recorded claims. Each claim and each trained network is saved as soon as it is
    finished, so an interrupted run resumes where it stopped; recorded claims are measured again only with --again or if
    their code has changed. The claims are in the folder `reproductions` of netkin's repository; run this command inside
    a checkout. The exit code is 1 if a claim could not be measured; a claim that is not reproduced is no error.
    """
    listing = listing or not (names or page)
    OutputFiles(force).check("--page", page, "page")
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
    from netkin.reporting.page.ranking_and_claims_page import report_claims

    click.echo(f"page: open {report_claims(found, page, overwrite=force)}", err=True)
