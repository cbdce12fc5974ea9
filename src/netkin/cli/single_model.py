"""Commands about one model: `netkin compress`, smaller layers; `netkin sparsity`, how many weights are zero or small.

`netkin sensitivity` shows how closely each layer of a classifier follows the logit of each class.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.options import (
    BALANCED,
    DEVICE,
    EXAMPLES,
    FILE,
    JSON,
    NAMES,
    SHAPE,
    TRANSFORM,
    example,
    memory_option,
    picture_options,
)
from netkin.cli.outputs import FORCE, OutputFiles, as_json
from netkin.cli.running import (
    crash_refusals,
    functions_of,
    load_batches,
    load_models,
    model_names,
    refuse_absent_device,
    refuse_crash,
    tell_random_weights,
    with_refusals,
)

if TYPE_CHECKING:
    from torch import nn

    from netkin.results import Comparison
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
@click.option(
    "--layer",
    "layers",
    multiple=True,
    required=True,
    metavar="PATTERN",
    help="Layers by name, glob or type; a glob selects those that are Linear or Conv2d. Can be repeated.",
)
@click.option(
    "--data", required=True, metavar="DATA", help="Examples from which the directions are computed; see `netkin data`."
)
@click.option(
    "--k",
    type=Amount(),
    metavar="K",
    help="Number of directions to keep for each layer's input, or their share, such as 0.35.",
)
@click.option(
    "--variance", type=float, metavar="SHARE", help="Keep the directions that explain this share of the variance."
)
@click.option(
    "--accuracy-drop",
    type=float,
    metavar="SHARE",
    help="Keep as few directions as possible without losing more accuracy than this.",
)
@click.option("--test", metavar="DATA", help="Labelled examples for the accuracy; by default --data.")
@click.option(
    "--against",
    metavar="MODEL",
    help="Choose directions shared with the same layers of this model; by default with the logits.",
)
@click.option("--from-the-top", is_flag=True, help="Compress layers one after another, from the last to the first.")
@click.option("--orthogonal", is_flag=True, help="Use orthogonal projections instead of least squares.")
@EXAMPLES
@BALANCED
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Random seed for --examples.")
@TRANSFORM
@click.option("--save", type=FILE, help="Write the compressed network to this file, such as small.netkin.")
@picture_options("small", "shares kept and accuracy")
@FORCE
@JSON
@with_refusals
def compress(
    model: str, save: Path | None, report: Path | None, figure: Path | None, force: bool, json: bool, **options: Any
) -> None:
    """Compress layers of MODEL: keep only the directions of their inputs that matter, and show what that saves.

    Each layer is replaced by two smaller ones. The file written by --save is a model for every command, as in
    netkin:digits@small.netkin.
    """
    from netkin.applications.compression import save_compressed

    outputs = OutputFiles(force, model, options["against"], options["data"], options["test"])
    outputs.check("--save", save, "compressed")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    small = _compress(model, **options)
    table: Any = small.compression
    outputs.write(save, partial(save_compressed, small), f"saved to {save}")
    outputs.draw(table, report, figure)
    click.echo(as_json(table.to_document()) if json else str(table))
    outputs.finish()


def _compress(
    model: str, layers: tuple[str, ...], data: str, test: str | None, against: str | None, **options: Any
) -> nn.Module:
    """Load what was named and call the library."""
    from netkin.applications.compression import compress as compress_model
    from netkin.sources import load_data

    whole, *others = load_models([model, against] if against else [model])
    batches = load_batches(data, 128, options["examples"], options.pop("seed"), options.pop("balanced"), [model])
    refuse_crash(model, whole, batches)
    small = compress_model(
        whole,
        list(layers),
        data=batches,
        test=load_data(test, models=[model]) if test else None,
        against=others[0] if others else "logits",
        order="from_the_top" if options.pop("from_the_top") else "at_once",
        projection="orthogonal" if options.pop("orthogonal") else "least_squares",
        transform=functions_of(options.pop("transforms"), 1),
        **options,
    )
    tell_random_weights([whole, *others])
    return small


@click.command(
    epilog=example("sparsity netkin:digits@before.pt netkin:digits@after.pt --data digits:test --report sparsity.html")
)
@click.argument("model")
@click.argument("other", required=False)
@click.option("--data", metavar="DATA", help="Labelled examples for accuracy and similarity; see `netkin data`.")
@click.option(
    "--epsilon",
    "epsilons",
    type=float,
    multiple=True,
    metavar="E",
    help="Count weights with magnitude below E; can be repeated.",
)
@click.option(
    "--relative",
    type=float,
    multiple=True,
    metavar="E",
    help="Count weights with magnitude below E times the layer's root mean square; can be repeated.",
)
@click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="PATTERN",
    help="Layers to analyse, by name, glob or type; by default all. Can be repeated.",
)
@click.option("--costs", is_flag=True, help="Measure the run time of linear layers in PyTorch's sparse formats.")
@SHAPE
@EXAMPLES
@BALANCED
@DEVICE
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Random seed for --examples.")
@NAMES
@click.option("--save", type=FILE, help="Write the study to this file, such as sparsity.netkin.")
@picture_options("sparsity", "weights, similarity and accuracy")
@FORCE
@JSON
@with_refusals
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
    """Show the share of weights of MODEL, and of OTHER, that is zero or small, and the effect of pruning.

    With --data, preferably test data, also the accuracy after pruning and the similarity of layers.
    """
    outputs = OutputFiles(force, model, other, options["data"])
    outputs.check("--save", save, "sparsity")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    found = _study([model, other] if other else [model], **options)
    outputs.write(save, found.save, f"saved to {save}")
    outputs.draw(found, report, figure)
    click.echo(as_json(found) if json else str(found))
    outputs.finish()


def _study(
    specs: list[str], names: tuple[str, ...], data: str | None, seed: int, balanced: bool, device: str | None,
    examples: int | None, **options: Any,
) -> SparsityStudy:  # fmt: skip
    """Load what was named and call the library."""
    from netkin.applications.sparsity import sparsity_study

    refuse_absent_device(device)
    models = load_models(specs)
    tell_random_weights(models)
    for one in models:
        one.to(device or "cpu")
    batches = None if data is None else load_batches(data, 256, examples, seed, balanced, specs)
    lists = ("epsilons", "relative", "layers")
    given = {name: value for name, value in options.items() if name not in lists or value}  # empty ones have defaults
    with crash_refusals(specs, models):
        return sparsity_study(dict(zip(model_names(specs, names), models, strict=True)), batches, **given)


@click.command(epilog=example("sensitivity netkin:digits --data digits:test --class 3 --class 8 --report digits.html"))
@click.argument("model")
@click.option("--data", required=True, metavar="DATA", help="Examples to run the model on; see `netkin data`.")
@click.option(
    "--class",
    "classes",
    multiple=True,
    metavar="CLASS",
    help="Index of an output, or a name given by --names. Can be repeated; by default all classes.",
)
@click.option("--names", metavar="NAMES", help="Names of all classes in the order of the outputs, as cat,dog,car.")
@click.option(
    "--measure",
    "measures",
    multiple=True,
    default=["cca_mean"],
    show_default=True,
    metavar="NAME",
    help="Measures; see `netkin measures`. Can be repeated.",
)
@click.option(
    "--layers",
    multiple=True,
    metavar="PATTERN",
    help="Layers by name, glob or type; can be repeated. See `netkin layers`.",
)
@SHAPE
@EXAMPLES
@BALANCED
@click.option("--memory", callback=memory_option, metavar="SIZE", help="Memory limit, such as 500MB or 2GB.")
@DEVICE
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Random seed for --examples.")
@click.option("--save", type=FILE, help="Write the comparison to this file, such as classes.netkin.")
@picture_options("classes")
@FORCE
@JSON
@with_refusals
def sensitivity(
    model: str, save: Path | None, report: Path | None, figure: Path | None, force: bool, json: bool, **options: Any
) -> None:
    """Show how strongly each layer of MODEL, a classifier, represents each class.

    Each layer is compared with the logit of each class. With cca_mean, a value is the largest correlation that any
    weighted sum of the layer's units has with the logit.
    """
    outputs = OutputFiles(force, model, options["data"])
    outputs.check("--save", save, "comparison")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    found = _sensitivity(model, **options)
    outputs.write(save, found.save, f"saved to {save}")
    outputs.draw(found, report, figure)
    click.echo(as_json(found) if json else str(found))
    outputs.finish()


def _sensitivity(
    model: str,
    data: str,
    classes: tuple[str, ...],
    names: str | None,
    measures: tuple[str, ...],
    layers: tuple[str, ...],
    balanced: bool,
    **options: Any,
) -> Comparison:
    """Load what was named and call the library."""
    from netkin.applications.interpretation import class_sensitivity

    refuse_absent_device(options["device"])
    models = load_models([model])
    batches = load_batches(data, 128, options["examples"], options["seed"], balanced, [model])
    known = names.split(",") if names else None
    wanted = [int(one) if one.isdecimal() and one not in (known or []) else one for one in classes] or None
    with crash_refusals([model], models):
        return class_sensitivity(
            models[0], batches, wanted, list(measures), names=known, layers=list(layers) or None, name=model, **options
        )
