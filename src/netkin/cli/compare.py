"""`netkin compare`: the layers of two models, pair by pair."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.documents import as_json, comparison_document
from netkin.cli.options import JSON, comparing_options, refuse_missing_folder, refuse_other_page
from netkin.cli.refusals import refusing
from netkin.cli.running import called
from netkin.errors import InflatedWarning, MissingExtra

if TYPE_CHECKING:
    from netkin.results import Comparison, Comparisons, Series

EXAMPLE = """\b
Example:
  netkin compare netkin:digits --data digits:test --measure cka --measure nbs --layers "relu*" --report digits.html
"""
FILE = click.Path(dir_okay=False, path_type=Path)
FIGURES = (".png", ".svg", ".pdf")


@click.command(epilog=EXAMPLE)
@click.argument("a")
@click.argument("b", required=False)
@comparing_options
@click.option("--save", type=FILE, help="Write the comparison to this file, as ab.netkin.")
@click.option("--report", type=FILE, help="Write a page for the browser to this file, as ab.html.")
@click.option("--figure", type=FILE, help="Draw the tables into this file, as ab.png, ab.svg or ab.pdf.")
@JSON
@refusing
def compare(
    a: str,
    b: str | None,
    data: str,
    batch_size: int,
    save: Path | None,
    report: Path | None,
    figure: Path | None,
    json: bool,
    **options: Any,
) -> None:
    """Compare every layer of model A with every layer of model B.

    Without B, the layers of A are compared with each other. Both models see the same examples, once; all measures are
    read from that one pass.
    """
    from netkin.comparing.compare import compare as compare_models

    for option, path in (("--save", save), ("--report", report), ("--figure", figure)):
        refuse_missing_folder(path, option)
    refuse_other_page(report, "--report")
    refuse_figure(figure)
    with warnings.catch_warnings():
        # the comparison carries these warnings and its text shows them
        warnings.simplefilter("ignore", InflatedWarning)
        comparison = called(compare_models, a, b, data, batch_size, options)
    if save:
        comparison.save(save)
        click.echo(f"saved to {save}", err=True)
    draw(comparison, report, figure)
    click.echo(as_json(comparison_document(comparison)) if json else str(comparison))


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
