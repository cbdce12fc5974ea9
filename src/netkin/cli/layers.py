"""`netkin layers`: what can be compared in a model."""

from __future__ import annotations

import click

from netkin.cli.documents import aligned, as_json
from netkin.cli.options import JSON
from netkin.cli.refusals import refusing

EXAMPLE = """\b
Example:
  netkin layers netkin:tiny10
"""


@click.command(epilog=EXAMPLE)
@click.argument("model")
@click.option("--all", "every", is_flag=True, help="List every named module, not only the default layers.")
@JSON
@refusing
def layers(model: str, every: bool, json: bool) -> None:
    """List the layers of MODEL that are compared by default, with their types."""
    from netkin.representations.layers import layers as default_layers
    from netkin.representations.layers import modules
    from netkin.sources import load_model

    loaded = load_model(model)
    types = {name: type(module).__name__ for name, module in modules(loaded).items()}
    names = [name for name in types if name] if every else default_layers(loaded)
    rows = [{"name": name, "type": types[name]} for name in names]
    click.echo(as_json(rows) if json else aligned([[row["name"], row["type"]] for row in rows]))
