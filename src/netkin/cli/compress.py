"""`netkin compress`: smaller layers; `netkin sparsity`: how many weights are zero or small, and what pruning does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.options import BALANCED, DEVICE, EXAMPLES, FILE, JSON, QUIET, SHAPE, example
from netkin.cli.outputs import FORCE, Outputs, as_json
from netkin.cli.running import (
    crashes_refused,
    loaded,
    loaded_models,
    refuse_absent_device,
    refuse_crash,
    refusing,
    tell_random_weights,
)

if TYPE_CHECKING:
    from torch import nn

    from netkin.results.weight_sparsity import SparsityStudy


class Amount(click.ParamType):
    """A whole number, or a share of the width."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | float:
        """Return the number, whole where it is written so."""
        try:
            return int(value) if str(value).isdecimal() else float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor a share such as 0.35.", param, ctx)


@click.command(
    epilog=example("compress netkin:digits --layer fc --layer conv4 --k 0.35 --data digits:train --test digits:test")
)
@click.argument("model")
@click.option("--layer", "layers", multiple=True, required=True, metavar="PATTERN", help="Linear or Conv2d; several.")
@click.option("--data", required=True, metavar="DATA", help="The examples the directions come from; see `netkin data`.")
@click.option("--k", type=Amount(), metavar="K", help="Directions kept of each layer's input, or their share, as 0.35.")
@click.option("--variance", type=float, metavar="SHARE", help="Keep the directions that hold this share of variance.")
@click.option("--accuracy-drop", type=float, metavar="SHARE", help="Keep as few as this fall of right answers allows.")
@click.option("--test", metavar="DATA", help="The examples on which right answers are counted; --data if not given.")
@click.option("--against", metavar="MODEL", help="Another model, whose same layers are compared with; else the logits.")
@click.option("--from-the-top", is_flag=True, help="One layer after the other, the last one first.")
@click.option("--orthogonal", is_flag=True, help="Project at right angles instead of by least squares.")
@EXAMPLES
@BALANCED
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of --examples.")
@click.option("--save", type=FILE, help="Write the smaller network to this file, as small.netkin.")
@click.option("--report", type=FILE, help="Write a page for the browser to this file, as small.html.")
@click.option("--figure", type=FILE, help="Draw shares kept and accuracy into this file, as small.png.")
@FORCE
@QUIET
@JSON
@refusing
def compress(
    model: str, save: Path | None, report: Path | None, figure: Path | None, force: bool, json: bool, **options: Any
) -> None:
    """Restrict layers of MODEL to the few directions of their inputs that matter, and show what that saves.

    Each layer becomes two smaller ones. The file that --save writes is a model for every
    command, as in netkin:digits@small.netkin.
    """
    from netkin.applications.compression import save_compressed

    outputs = Outputs(force, model, options["against"], options["data"], options["test"])
    outputs.check("--save", save, "compressed")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    small = _compressed(model, **options)
    table: Any = small.compression
    outputs.write(save, partial(save_compressed, small), f"saved to {save}")
    outputs.draw(table, report, figure)
    click.echo(as_json(table.to_document()) if json else str(table))
    outputs.finish()


def _compressed(
    model: str, layers: tuple[str, ...], data: str, test: str | None, against: str | None, **options: Any
) -> nn.Module:
    """Load what was named and call the library."""
    from netkin.applications.compression import compress as compress_model
    from netkin.sources import load_data

    whole, *others = loaded_models([model, against] if against else [model])
    batches = loaded(data, 128, options["examples"], options.pop("seed"), options.pop("balanced"), [model])
    refuse_crash(model, whole, batches)
    small = compress_model(
        whole,
        list(layers),
        data=batches,
        test=load_data(test, models=[model]) if test else None,
        against=others[0] if others else "logits",
        order="from_the_top" if options.pop("from_the_top") else "at_once",
        projection="orthogonal" if options.pop("orthogonal") else "least_squares",
        **options,
    )
    tell_random_weights([whole, *others])
    return small


@click.command(
    epilog=example("sparsity netkin:digits@before.pt netkin:digits@after.pt --data digits:test --report sparsity.html")
)
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
@click.option("--save", type=FILE, help="Write the study to this file, as sparsity.netkin.")
@click.option("--report", type=FILE, help="Write a page for the browser to this file, as sparsity.html.")
@click.option("--figure", type=FILE, help="Draw weights, similarity and accuracy into this file, as sparsity.png.")
@FORCE
@JSON
@QUIET
@refusing
def sparsity(
    model: str,
    other: str | None,
    save: Path | None,
    report: Path | None,
    figure: Path | None,
    force: bool,
    json: bool,
    **options: Any,
) -> None:
    """Show what share of MODEL's weights is zero or small, beside OTHER's, and what taking the smallest away does.

    With --data, which should be test data, also the accuracy after pruning and the similarity of layers.
    """
    outputs = Outputs(force, model, other, options["data"])
    outputs.check("--save", save, "sparsity")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    found = _studied([model, other] if other else [model], **options)
    outputs.write(save, found.save, f"saved to {save}")
    outputs.draw(found, report, figure)
    click.echo(as_json(found) if json else str(found))
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
