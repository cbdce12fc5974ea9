"""`netkin merge`: the statistics of parts of the data, added up to those of all of them."""

from __future__ import annotations

from pathlib import Path

import click

from netkin.cli.documents import as_json
from netkin.cli.options import FILE, JSON, QUIET
from netkin.cli.outputs import FORCE, Outputs
from netkin.cli.refusals import refusing
from netkin.cli.statistics import described, opened, statistics_document, warn_of_missing
from netkin.errors import NetkinError

EXAMPLE = """\b
Example:
  netkin merge 1.stats 2.stats 3.stats --out all.stats
"""


@click.command(epilog=EXAMPLE)
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option("--out", type=FILE, required=True, help="Write the statistics of all parts to this file, as all.stats.")
@FORCE
@QUIET
@JSON
@refusing
def merge(files: tuple[Path, ...], out: Path, force: bool, json: bool) -> None:
    """Add up the statistics in each FILE, which `netkin collect` wrote for parts of the same data.

    Parts of other weights, layers, settings or data are refused, and so are parts that overlap. Where parts are
    missing, a warning says which examples they hold.
    """
    from netkin.progress import reported

    outputs = Outputs(force, *files)
    outputs.check("--out", out, "statistics")
    statistics = opened(files[0])
    for file in reported(files[1:], "merging", "files"):  # one at a time, as each may be large
        part = opened(file)
        try:
            statistics = statistics.merge(part)
        except NetkinError as fault:
            raise type(fault)(f"{str(file)!r} does not fit the parts before it: {fault}") from fault
    outputs.write(out, statistics.save)
    warn_of_missing(statistics)
    click.echo(as_json(statistics_document(statistics, out)) if json else described(statistics, out))
    outputs.finish()
