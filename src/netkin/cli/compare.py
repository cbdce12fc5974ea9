"""`netkin compare`: the layers of two models, pair by pair."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click

from netkin.cli.documents import as_json, comparison_document
from netkin.cli.refusals import refusing
from netkin.cli.sizes import memory_option
from netkin.errors import InflatedWarning

EXAMPLE = """\b
Example:
  netkin compare netkin:digits --data digits:test --measure cka --measure "svcca(variance=0.95)" --layers "relu*"
"""


@click.command(epilog=EXAMPLE)
@click.argument("a")
@click.argument("b", required=False)
@click.option("--data", required=True, help="The examples both models see: digits:test, cifar10:DIR, module:function.")
@click.option("--measure", "measures", multiple=True, default=["cka"], show_default=True, help="See `netkin measures`.")
@click.option("--layers", multiple=True, metavar="PATTERN", help="Name, glob or module type; see `netkin layers`.")
@click.option("--pairs", type=click.Choice(["all", "corresponding"]), default="all", show_default=True)
@click.option("--shape", help="What one example is: pool, flatten, positions, mean, tokens, cls, last.")
@click.option("--resize", type=click.Choice(["average"]), help="With --shape positions: average larger maps down.")
@click.option("--examples", type=click.IntRange(min=1), help="Stop after so many examples.")
@click.option("--batch-size", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--memory", callback=memory_option, metavar="SIZE", help="Memory limit, as 500MB or 2GB.")
@click.option("--device", help="Where the models run: cpu, cuda, cuda:1, mps.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the comparison to this file.")
@click.option("--json", "json", is_flag=True, help="Print JSON instead of tables.")
@refusing
def compare(a: str, b: str | None, data: str, batch_size: int, save: Path | None, json: bool, **options: Any) -> None:
    """Compare every layer of model A with every layer of model B.

    Without B, the layers of A are compared with each other. Both models see the same examples, once; all measures are
    read from that one pass.
    """
    from netkin.comparing import compare as compare_models
    from netkin.sources import load_data, load_model

    if save and not save.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(save.parent)!r} to write into.", param_hint="--save")
    models = [load_model(spec) for spec in (a, b) if spec]
    batches = load_data(data, batch_size=batch_size)
    with warnings.catch_warnings():
        # the comparison carries these warnings and its text shows them
        warnings.simplefilter("ignore", InflatedWarning)
        comparison = compare_models(models[0], models[1] if b else None, batches, names=(a, b or a), **_chosen(options))
    if save:
        comparison.save(save)
        click.echo(f"saved to {save}", err=True)
    click.echo(as_json(comparison_document(comparison)) if json else str(comparison))


def _chosen(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with lists as the library wants them: no pattern means the default layers."""
    return options | {"measures": list(options["measures"]), "layers": list(options["layers"]) or None}
