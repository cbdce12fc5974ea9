"""`netkin explain`: what a comparison would do and cost, before it is begun."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import click

from netkin.cli.documents import as_json
from netkin.cli.options import JSON, comparing_options
from netkin.cli.refusals import REFUSED, refusing
from netkin.cli.running import called, read_from_weights

EXAMPLE = """\b
Example:
  netkin explain netkin:digits --data digits:test --measure cka --measure cka_rbf --layers "relu*"
"""


@click.command(epilog=EXAMPLE)
@click.argument("a")
@click.argument("b", required=False)
@partial(comparing_options, needs_data=False)
@JSON
@refusing
def explain(a: str, b: str | None, data: str | None, batch_size: int, json: bool, **options: Any) -> None:
    """Tell what `netkin compare` would do with the same options: layers, pairs, forward passes, memory.

    Two examples are run through each model (a whole batch where two are refused), to learn its layers; nothing is
    collected. The exit code is 1 if the comparison would be refused.
    """
    from netkin.comparing import explain as explain_models

    if data is None and not read_from_weights(options["measures"]):
        raise click.UsageError("--data is missing: models need examples to run on.")
    plan = called(explain_models, a, b, data, batch_size, options)
    click.echo(as_json({key: value for key, value in asdict(plan).items() if key != "kinds"}) if json else str(plan))
    if plan.refused:
        raise click.exceptions.Exit(REFUSED)
