"""`netkin collect` and `netkin merge`: the statistics of a pass over the data, or over a part, kept in a file.

Measures are read from them later. Here also: what such a file holds, as text and in JSON.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.options import FILE, JSON, collecting_options, engine_options, example
from netkin.cli.outputs import FORCE, OutputFiles, as_json
from netkin.cli.running import Destination, call_library, with_refusals
from netkin.errors import FileFault, InflatedWarning, NetkinError, ValueFault

if TYPE_CHECKING:
    from netkin.comparing import Statistics


FINISHED = ("comparison", "comparisons", "ranking", "series")


def kind_of_file(path: str | Path) -> str:
    """Return what kind of result the file at `path` holds; empty if it is none of netkin's files, or no file."""
    from netkin import files

    if not Path(path).is_file():
        return ""
    try:
        return str(files.read_header(path).get("kind"))
    except FileFault:
        return ""


def refuse_result(path: str | Path) -> None:
    """Refuse a file that holds a finished result where a model or statistics are expected."""
    if kind_of_file(path) in FINISHED:
        raise FileFault(f"{str(path)!r} holds a finished result and no statistics; `netkin report {path}` shows it.")


def open_statistics(path: Path) -> Statistics:
    """Return the statistics in a file; any other file is refused."""
    from netkin.comparing.study import load_statistics

    refuse_result(path)
    return load_statistics(path)


def default_measures(statistics: Statistics) -> list[str]:
    """Return what is read where no measure is named: cka if it was collected for, else all that was."""
    collected = [name for need in statistics.needs for name in need.measures]
    return ["cka"] if "cka" in collected else collected


def warn_of_missing_parts(statistics: Statistics) -> None:
    """Say on stderr that parts are missing, as when one job of many has failed."""
    if statistics.gaps:
        click.echo(
            f"warning: {statistics.examples:,} of {statistics.expected:,} examples are present; missing: "
            f"{_ranges_as_text(statistics.gaps)}",
            err=True,
        )


def statistics_line(statistics: Statistics, path: Path) -> str:
    """Return one line that says what a file holds."""
    chunks = f" in {statistics.study.chunks} chunks" if statistics.study.chunks else ""
    models = " and ".join(dict.fromkeys(statistics.names.get(name, name) for name in statistics.models))
    numbers = f" ({_ranges_as_text(statistics.ranges)})" if statistics.ranges else ""
    return f"{path}: {models} on {statistics.data}, {statistics.examples:,} examples{numbers}{chunks}"


def statistics_document(statistics: Statistics, path: Path) -> dict[str, Any]:
    """Return what a file of statistics holds, for other programs."""
    from netkin.identity import settings_digest

    return {
        "file": str(path),
        "models": [statistics.names.get(name, name) for name in statistics.models],
        "layers": {model: [layer.name for layer in layers] for model, layers in statistics.layers.items()},
        "data": statistics.data,
        "examples": statistics.examples,
        "ranges": statistics.ranges,
        "expected": statistics.expected,
        "missing": statistics.gaps,
        "chunks": statistics.study.chunks,
        "seed": statistics.study.seed,
        "measures": [name for need in statistics.needs for name in need.measures],
        "weights": {model: origin.get("weights") for model, origin in statistics.origins.items()},
        "data_digest": statistics.digest.hex,
        "settings": statistics.settings,
        "settings_digest": settings_digest(statistics.settings),
        "plan": statistics.plan,
    }


def _ranges_as_text(ranges: list[tuple[int, int]]) -> str:
    """Return ranges of the numbers of examples, which begin at 0."""
    return ", ".join(f"{start:,} to {stop - 1:,}" if stop - start > 1 else f"{start:,}" for start, stop in ranges)


def _part(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    from netkin.comparing.feed import parse_part

    try:
        return parse_part(text)
    except ValueFault as fault:
        raise click.BadParameter(str(fault)) from fault


@click.command(epilog=example('collect netkin:digits --data digits:test --layers "relu*" --part 1/3 --out 1.stats'))
@click.argument("a")
@click.argument("b", required=False)
@collecting_options
@engine_options
@click.option("--part", callback=_part, metavar="I/N", help="Use part I of N of the examples, such as 3/16.")
@click.option(
    "--start",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Index of the first example, if --data contains only one part.",
)
@click.option("--out", type=FILE, required=True, help="Write the statistics to this file, such as 3.stats.")
@FORCE
@JSON
@with_refusals
def collect(
    a: str, b: str | None, data: str, batch_size: int, out: Path, force: bool, json: bool, **options: Any
) -> None:
    """Run the models over the data, or over one part of it, and save the statistics.

    `netkin merge` joins parts, which may be collected in any order and on different machines. `netkin compare` reads
    measures from such a file without the models and the data.
    """
    from netkin.comparing.compare import collect as collect_from

    outputs = OutputFiles(force, a, b, data, engine=options["engine"])
    outputs.check("--out", out, "statistics")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)
        statistics = call_library(collect_from, a, b, data, batch_size, options, Destination(out, force))
    outputs.write(out, statistics.save)
    outputs.show(lambda: as_json(statistics_document(statistics, out)) if json else statistics_line(statistics, out))
    outputs.finish()


@click.command(epilog=example("merge 1.stats 2.stats 3.stats --out all.stats"))
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option("--out", type=FILE, required=True, help="Write the merged statistics to this file, such as all.stats.")
@FORCE
@JSON
@with_refusals
def merge(files: tuple[Path, ...], out: Path, force: bool, json: bool) -> None:
    """Merge the statistics of parts of the same data, written by `netkin collect`.

    Parts with other weights, layers, settings or data are refused, and so are parts that overlap. A warning names the
    examples of missing parts.
    """
    from netkin.progress import reported

    outputs = OutputFiles(force, *files)
    outputs.check("--out", out, "statistics")
    statistics = open_statistics(files[0])
    for file in reported(files[1:], "merging", "files"):  # one at a time, as each may be large
        part = open_statistics(file)
        try:
            statistics = statistics.merge(part)
        except NetkinError as fault:
            raise type(fault)(f"{str(file)!r} does not fit the previous parts: {fault}") from fault
    outputs.write(out, statistics.save)
    warn_of_missing_parts(statistics)
    click.echo(as_json(statistics_document(statistics, out)) if json else statistics_line(statistics, out))
    outputs.finish()
