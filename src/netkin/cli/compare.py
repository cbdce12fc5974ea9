"""`netkin compare`: the layers of two models, pair by pair."""

from __future__ import annotations

import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netkin.cli.documents import as_json, comparison_document
from netkin.cli.options import (
    FILE,
    JSON,
    comparing_options,
    refuse_missing_folder,
    refuse_other_file,
    refuse_other_page,
    typed,
)
from netkin.cli.refusals import refusing
from netkin.cli.running import called
from netkin.cli.statistics import held_by, opened, refuse_result, usual_measures, warn_of_missing
from netkin.errors import InflatedWarning, MissingExtra, ValueFault

if TYPE_CHECKING:
    from netkin.results import Comparison, Comparisons, Series

EXAMPLE = """\b
Example:
  netkin compare netkin:digits --data digits:test --measure cka --measure nbs --layers "relu*" --report digits.html
"""
READING = ("a", "measures", "errors", "save", "report", "figure", "json", "quiet")  # parameters that concern no pass
FIGURES = (".png", ".svg", ".pdf")


@click.command(epilog=EXAMPLE)
@click.argument("a", metavar="A|STATISTICS")
@click.argument("b", required=False)
@partial(comparing_options, needs_data=False)
@click.option("--save", type=FILE, help="Write the comparison to this file, as ab.netkin.")
@click.option("--report", type=FILE, help="Write a page for the browser to this file, as ab.html.")
@click.option("--figure", type=FILE, help="Draw the tables into this file, as ab.png, ab.svg or ab.pdf.")
@JSON
@click.pass_context
@refusing
def compare(
    context: click.Context,
    a: str,
    b: str | None,
    save: Path | None,
    report: Path | None,
    figure: Path | None,
    json: bool,
    **options: Any,
) -> None:
    """Compare every layer of model A with every layer of model B.

    Without B, the layers of A are compared with each other. Both models see the same examples, once; all measures are
    read from that one pass.

    STATISTICS is a file that `netkin collect` or `netkin merge` wrote. Measures are read from it as from a pass, and
    neither models nor data are needed.
    """
    for option, path in (("--save", save), ("--report", report), ("--figure", figure)):
        refuse_missing_folder(path, option)
    refuse_other_file(save, "comparison", "--save")
    refuse_other_page(report, "--report")
    refuse_figure(figure)
    with warnings.catch_warnings():
        # the comparison carries these warnings and its text shows them
        warnings.simplefilter("ignore", InflatedWarning)
        comparison = _read(context, a) if _is_statistics(a, b) else _compared(a, b, options)
    if save:
        comparison.save(save)
        click.echo(f"saved to {save}", err=True)
    draw(comparison, report, figure)
    click.echo(as_json(comparison_document(comparison)) if json else str(comparison))


def _is_statistics(a: str, b: str | None) -> bool:
    """Tell whether the first argument is a file of statistics; beside a second argument it is refused."""
    found = next((one for one in (a, b) if one and held_by(one) == "statistics"), None)
    if found and b:
        raise click.UsageError(
            f"{found!r} is a file of statistics, which holds both models; name it alone. `netkin merge` joins parts."
        )
    return found is not None


def _compared(a: str, b: str | None, options: dict[str, Any]) -> Comparison:
    """Return the comparison of two models, from one pass over the data."""
    from netkin.comparing.compare import compare as compare_models

    if options["data"] is None:
        refuse_result(a)
        raise click.UsageError(
            "--data is missing: models need examples to run on."
            + ("" if ":" in a else f" A file of statistics needs none, but {a!r} is no such file.")
        )
    return called(compare_models, a, b, options.pop("data"), options.pop("batch_size"), options)


def _read(context: click.Context, path: str) -> Comparison:
    """Return the comparison that is read from statistics; what would concern a pass is refused."""
    for parameter in context.command.get_params(context):
        name = str(parameter.name)
        if name not in READING and typed(context, name):
            raise click.UsageError(
                f"{parameter.opts[0]} belongs to the pass over the data, which {path!r} holds already; leave it out, "
                "or collect anew."
            )
    statistics = opened(Path(path))
    if context.params["errors"] and not statistics.study.chunks:
        raise ValueFault(f"{path!r} keeps no chunks of the examples, so nothing has an error; collect with --errors.")
    measures = context.params["measures"] if typed(context, "measures") else usual_measures(statistics)
    warn_of_missing(statistics)
    return cast("Comparison", statistics.compare(list(measures)))


def refuse_figure(figure: Path | None) -> None:
    """Refuse a figure that could not be drawn, before the work."""
    if figure and figure.suffix.lower() not in FIGURES:
        raise click.BadParameter(
            f"a figure's name ends in {', '.join(FIGURES)}; got {figure.name!r}.", param_hint="--figure"
        )
    if figure and find_spec("matplotlib") is None:
        raise MissingExtra("a figure needs the package 'matplotlib'; install it with `pip install 'netkin[figures]'`.")


def draw(result: Comparison | Comparisons | Series, page: Path | None, figure: Path | None) -> None:
    """Write the pictures that were asked for; before the result is printed, whose reader may stop (`| head`)."""
    if page:
        from netkin.reporting import report

        click.echo(f"report: open {report(result, page)}", err=True)
    if figure:
        from netkin.reporting import plot

        plot(result, path=figure)
        click.echo(f"figure in {figure}", err=True)
