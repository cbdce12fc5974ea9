"""`netkin sparsity`: how sparse networks are, how alike their layers are, and what pruning does and saves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.documents import as_json
from netkin.cli.options import BALANCED, DEVICE, EXAMPLES, FILE, JSON, QUIET, SHAPE, refuse_absent_device
from netkin.cli.outputs import FORCE, Outputs
from netkin.cli.refusals import refusing
from netkin.cli.running import crashes_refused, loaded, loaded_models, tell_random_weights

if TYPE_CHECKING:
    from netkin.results.weight_sparsity import SparsityStudy

EXAMPLE = """\b
Example:
  netkin sparsity netkin:digits@before.pt netkin:digits@after.pt --data digits:test --report sparsity.html
"""


@click.command(epilog=EXAMPLE)
@click.argument("model")
@click.argument("other", required=False)
@click.option("--data", metavar="DATA", help="Labelled examples, for accuracy and similarity; see `netkin data`.")
@click.option("--epsilon", "epsilons", type=float, multiple=True, metavar="E", help="Count weights below E; several.")
@click.option("--relative", type=float, multiple=True, metavar="E", help="The same, times the layer's r.m.s.; several.")
@click.option("--layer", "layers", multiple=True, metavar="PATTERN", help="Whose weights count; by default all.")
@click.option("--costs", is_flag=True, help="Time linear layers in the sparse formats that PyTorch has.")
@SHAPE
@EXAMPLES
@BALANCED
@DEVICE
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of --examples.")
@click.option("--report", type=FILE, help="Write a page for the browser to this file, as sparsity.html.")
@click.option("--figure", type=FILE, help="Draw weights, similarity and accuracy into this file, as sparsity.png.")
@FORCE
@JSON
@QUIET
@refusing
def sparsity(
    model: str, other: str | None, report: Path | None, figure: Path | None, force: bool, json: bool, **options: Any
) -> None:
    """Show what share of MODEL's weights is zero or small, beside OTHER's, and what taking the smallest away does.

    With --data, which should be test data, also the accuracy after pruning and the similarity of layers.
    """
    outputs = Outputs(force, model, other, options["data"])
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    found = _studied([model, other] if other else [model], **options)
    outputs.draw(found, report, figure)
    click.echo(as_json(found.document()) if json else str(found))
    outputs.finish()


def _studied(
    specs: list[str], data: str | None, seed: int, balanced: bool, device: str | None, examples: int | None,
    **options: Any,
) -> SparsityStudy:  # fmt: skip
    """Load what was named and call the library."""
    from netkin.applications.sparsity import sparsity_study

    refuse_absent_device(device)
    models = loaded_models(specs)
    tell_random_weights(models)
    for one in models:
        one.to(device or "cpu")
    names = [f"{spec} ({place})" for place, spec in enumerate(specs, 1)] if len(set(specs)) < len(specs) else specs
    batches = None if data is None else loaded(data, 256, examples, seed, balanced, specs)
    lists = ("epsilons", "relative", "layers")
    given = {name: value for name, value in options.items() if name not in lists or value}  # empty ones have defaults
    with crashes_refused(specs, models):
        return sparsity_study(dict(zip(names, models, strict=True)), batches, **given)
