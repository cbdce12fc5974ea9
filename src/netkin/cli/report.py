"""`netkin report`: the page of saved results, made without running a model or importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from netkin.cli.documents import as_json
from netkin.cli.options import FILE, JSON
from netkin.cli.outputs import FORCE, Outputs
from netkin.cli.refusals import refusing
from netkin.cli.statistics import held_by
from netkin.errors import ValueFault

EXAMPLE = """\b
Example:
  netkin report ab.netkin --out ab.html
"""


@click.command(epilog=EXAMPLE)
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option("--out", type=FILE, help="The page to write; by default the first FILE's name ending in .html.")
@FORCE
@JSON
@refusing
def report(files: tuple[Path, ...], out: Path | None, force: bool, json: bool) -> None:
    """Make one page for the browser of what is saved in each FILE.

    That is comparisons, the series of one run, a ranking, a federation, or several ways to learn tasks in a row. Such a
    file is written by the option --save of `netkin compare`, `stitch`, `dynamics`, `recommend`, `federate` and
    `learn-tasks`, or by `save` in Python.
    """
    from netkin.reporting import report as write_report
    from netkin.results import load

    page = out or files[0].with_suffix(".html")
    Outputs(force, *files).check("--out", page, "page")
    for file in files:
        if held_by(file) == "statistics":
            raise ValueFault(
                f"{str(file)!r} holds statistics, from which values are still to be read; "
                f"`netkin compare {file} --report {page}` does so."
            )
    saved = [load(file) for file in files]
    written = write_report(saved[0] if len(saved) == 1 else _joined(saved), page, overwrite=force)
    click.echo(as_json({"report": str(written)}) if json else str(written))


def _joined(saved: list[Any]) -> list[Any]:
    """Return what several files hold for one page: all about tasks, or comparisons, of which a file may hold many."""
    from netkin.results import Federation, Ranking, Series, TaskAccuracies, TaskEnsembles

    if all(isinstance(result, (TaskAccuracies, TaskEnsembles)) for result in saved):
        return saved
    found: list[Any] = []
    for result in saved:
        if isinstance(result, Federation):
            raise ValueFault(f"a federation ({result.title}) fills a page by itself; give it a command of its own.")
        if isinstance(result, Series):
            raise ValueFault(f"the series of run {result.run!r} fills a page by itself; give it a command of its own.")
        if isinstance(result, Ranking):
            raise ValueFault(f"the ranking for {result.data} fills a page by itself; give it a command of its own.")
        found += result.values() if isinstance(result, Mapping) else [result]
    return found
