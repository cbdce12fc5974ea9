"""`netkin data`: which data sets have a name, and where each is looked for."""

from __future__ import annotations

import textwrap

import click

from netkin.cli.documents import as_json
from netkin.cli.options import JSON
from netkin.cli.refusals import refusing

WORDS = ("name", "what", "where", "example", "options")
EXAMPLE = """\b
Example:
  netkin data
"""


@click.command(epilog=EXAMPLE)
@JSON
@refusing
def data(json: bool) -> None:
    """List the data that --data understands, and say where each is looked for."""
    from netkin.sources.datasets import CATALOGUE

    rows = [{word: getattr(source, word) for word in WORDS} for source in CATALOGUE]
    click.echo(as_json(rows) if json else "\n\n".join(map(_described, rows)))


def _described(row: dict[str, str]) -> str:
    details = [row["what"], f"where: {row['where']}", f"example: --data {row['example']}"]
    details += [f"options: {row['options']}"] if row["options"] else []
    return "\n".join([row["name"], *map(_wrapped, details)])


def _wrapped(text: str) -> str:
    """Return `text` in lines of a hundred characters; what people will type is not broken."""
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
