"""`netkin collect`: what a pass over the data, or over a part of them, leaves; measures are read from it later."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click

from netkin.cli.documents import as_json
from netkin.cli.options import FILE, JSON, collecting_options, engine_options
from netkin.cli.outputs import FORCE, Outputs
from netkin.cli.refusals import refusing
from netkin.cli.running import Worked, called
from netkin.cli.statistics import described, statistics_document
from netkin.errors import InflatedWarning, ValueFault

EXAMPLE = """\b
Example:
  netkin collect netkin:digits --data digits:test --layers "relu*" --part 1/3 --out 1.stats
"""


def _part(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    from netkin.comparing.feed import parsed_part

    try:
        return parsed_part(text)
    except ValueFault as fault:
        raise click.BadParameter(str(fault)) from fault


@click.command(epilog=EXAMPLE)
@click.argument("a")
@click.argument("b", required=False)
@collecting_options
@engine_options
@click.option("--part", callback=_part, metavar="I/N", help="The I-th of N parts of the examples, as 3/16.")
@click.option(
    "--start",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="The number of the first example, where --data gives one part alone.",
)
@click.option("--out", type=FILE, required=True, help="Write the statistics to this file, as 3.stats.")
@FORCE
@JSON
@refusing
def collect(
    a: str, b: str | None, data: str, batch_size: int, out: Path, force: bool, json: bool, **options: Any
) -> None:
    """Run both models over the data, or over one part of them, and keep the statistics in a file.

    `netkin merge` adds up the parts, which may be collected in any order and on any machines, and `netkin compare`
    reads measures from such a file without models and data.
    """
    from netkin.comparing.compare import collect as collect_from

    outputs = Outputs(force, a, b, data, engine=options["engine"])
    outputs.check("--out", out, "statistics")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)
        statistics = called(collect_from, a, b, data, batch_size, options, Worked(out, force))
    outputs.write(out, statistics.save)
    outputs.show(lambda: as_json(statistics_document(statistics, out)) if json else described(statistics, out))
    outputs.finish()
