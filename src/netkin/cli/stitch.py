"""`netkin stitch`: layers of one model joined to those of another, and what the joined network can do."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.compare import FILE
from netkin.cli.documents import as_json, comparison_document
from netkin.cli.options import DEVICE, JSON, refuse_absent_device, refuse_missing_folder
from netkin.cli.refusals import refusing
from netkin.cli.running import refuse_crash
from netkin.errors import InflatedWarning, NoValue

if TYPE_CHECKING:
    from netkin.results import Comparison, Comparisons

EXAMPLE = """\b
Example:
  netkin stitch netkin:digits netkin:digits --at relu2 --how least_squares --data digits:train --test digits:test
"""
MOST = 6  # warnings shown
_COUNT = click.IntRange(min=1)


@click.command(epilog=EXAMPLE)
@click.argument("models", nargs=-1, required=True, metavar="A B [C ...]")
@click.option("--all", "whole", is_flag=True, help="Stitch every layer into the one of the same name.")
@click.option("--matrix", is_flag=True, help="With --all: every layer into every layer.")
@click.option("--at", multiple=True, metavar="LAYER", help="The layer of the first model; several may be given.")
@click.option("--into", multiple=True, metavar="LAYER", help="For each --at the layer of the second; the same if left.")
@click.option("--layers", multiple=True, metavar="PATTERN", help="With --all: name, glob or type; see `netkin layers`.")
@click.option("--data", required=True, metavar="DATA", help="The examples the map is found on; see `netkin data`.")
@click.option("--test", metavar="DATA", help="The examples, with labels, it is judged on; --data if not given.")
@click.option(
    "--how",
    "hows",
    multiple=True,
    default=["least_squares"],
    show_default=True,
    metavar="METHOD",
    help="least_squares, procrustes, 'reduced_rank(k=8)', 'task_loss(epochs=3)', ...; several may be given.",
)
@click.option("--measure", "measures", multiple=True, default=["cka"], show_default=True, metavar="NAME",
              help="Similarities to stand beside; see `netkin measures`.")  # fmt: skip
@click.option("--score", "scores", multiple=True, metavar="NAME",
              default=["relative_accuracy", "agreement", "cross_entropy"], show_default=True,
              help="Also accuracy, r2, stitched_cka, stitched_cca, stitched_svcca.")  # fmt: skip
@click.option("--resize", type=click.Choice(["average", "bilinear", "nearest"]), help="How maps get another size.")
@click.option("--examples", type=_COUNT, metavar="N", help="Stop after so many examples of --data.")
@click.option("--batch-size", type=_COUNT, default=128, show_default=True, metavar="N", help="Examples at a time.")
@DEVICE
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="For what is random."
)
@click.option("--save", type=FILE, help="Write the result to this file as it grows; the same command continues it.")
@click.option("--report", type=FILE, help="Write a page for the browser to this file, as ab.html.")
@JSON
@refusing
def stitch(
    models: tuple[str, ...],
    whole: bool,
    matrix: bool,
    at: tuple[str, ...],
    into: tuple[str, ...],
    save: Path | None,
    report: Path | None,
    json: bool,
    **options: Any,
) -> None:
    """Stitch layers of model A into model B: run A up to a layer, map what it gives, and go on with B.

    A value for each layer and method tells what the stitched network can do, beside how similar the layers are. With
    more than two models all ordered pairs are stitched, and the mean and spread over them is shown.
    """
    for option, path in (("--save", save), ("--report", report)):
        refuse_missing_folder(path, option)
    if len(models) < 2:
        raise click.UsageError("two models are needed, and one was given; to stitch a model with itself name it twice.")
    pairs = _pairs(whole, matrix, at, into, options["layers"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)  # the comparison carries these warnings
        found = _stitched(models, pairs, save, **options)
    _show(found, json)
    if save:
        click.echo(f"saved to {save}", err=True)
    if report:
        from netkin.reporting import report as write_report

        click.echo(f"report: open {write_report(found, report)}", err=True)
    if not all(one.complete for one in _each(found)):
        raise KeyboardInterrupt


def _pairs(whole: bool, matrix: bool, at: tuple[str, ...], into: tuple[str, ...], layers: tuple[str, ...]) -> Any:
    """Return which layers are joined, as the library calls it."""
    if whole == bool(at):
        raise click.UsageError("say either --all, or --at LAYER for one.")
    if at and (matrix or layers):
        raise click.UsageError(f"{'--matrix' if matrix else '--layers'} goes with --all.")
    if into and len(into) != len(at):
        raise click.UsageError(f"each --at has one --into, or none has; got {len(at)} and {len(into)}.")
    return list(zip(at, into or at, strict=True)) if at else "all" if matrix else "corresponding"


def _stitched(
    specs: tuple[str, ...], pairs: Any, save: Path | None, data: str, test: str | None, batch_size: int, **options: Any
) -> Comparison | Comparisons:
    """Load what was named and call the library."""
    from netkin.applications.stitching import stitch_all, stitch_many
    from netkin.sources import load_data, load_model

    refuse_absent_device(options["device"])
    names, loaded = _names(specs), [load_model(spec) for spec in specs]
    fitting, judging = (load_data(one, batch_size=batch_size) if one else None for one in (data, test))
    for spec, model in zip(specs, loaded, strict=True):
        refuse_crash(spec, model, fitting)
    several = {name: list(options.pop(name)) for name in ("hows", "measures", "scores", "layers")}
    asked = {**options, **several, "layers": several["layers"] or None, "pairs": pairs, "save": save, "partial": True}
    if len(specs) == 2:
        return stitch_all(loaded[0], loaded[1], fitting, judging, names=(names[0], names[1]), **asked)
    return stitch_many(dict(zip(names, loaded, strict=True)), fitting, judging, **asked)


def _names(specs: Sequence[str]) -> list[str]:
    """Return the models' names: what was typed, numbered where that is the same twice."""
    times = Counter(specs)
    return [f"{spec} ({i})" if times[spec] > 1 else spec for i, spec in enumerate(specs, start=1)]


def _each(found: Comparison | Comparisons) -> list[Comparison]:
    from netkin.results import Comparison

    return [found] if isinstance(found, Comparison) else list(found.values())


def _show(found: Comparison | Comparisons, json: bool) -> None:
    """Print the result: a table of layers by methods, and what to know before it is read."""
    from netkin.results import Comparison
    from netkin.results.text import heading_as_text, terminal_width, wrapped

    if json:
        documents = [comparison_document(one) for one in _each(found)]
        click.echo(as_json(documents[0] if isinstance(found, Comparison) else documents))
        return
    each, width = _each(found), terminal_width()
    click.echo(heading_as_text(each[0]) if len(each) == 1 else f"{len(each)} ordered pairs of models")
    click.echo(_table(each))
    for reason in _missing(each):
        click.echo(wrapped(reason, width))
    told = [f"warning: {one.a} into {one.b}: {warning}" for one in each for warning in one.warnings]
    for sentence in told[:MOST]:
        click.echo("\n" + wrapped(sentence, width))
    if len(told) > MOST:
        click.echo(f"\nand {len(told) - MOST} more warnings, which a report and --json show")


def _table(found: Sequence[Comparison]) -> str:
    from netkin.results import Spread

    try:
        return str(Spread.of(found))
    except NoValue as reason:
        return f"\n{reason}"


def _missing(found: Sequence[Comparison]) -> list[str]:
    """Return why pairs that were asked for have no value, the commonest reason first."""
    from netkin.comparing.tabulating import NOT_ASKED
    from netkin.results.text import reasons

    holes = {
        (f"{one.a} {table.id} {x}", f"{one.b} {y}"): reason
        for one in found
        for table in one.tables.values()
        for (x, y), reason in table.holes.items()
        if reason != NOT_ASKED
    }
    return list(reasons(holes, "value"))
