"""Commands about one model: `netkin compress`, smaller layers; `netkin sparsity`, how many weights are zero or small.

`netkin classes` shows how closely each layer of a classifier follows the logit of each class.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from netkin.cli.options import (
    BALANCED,
    DATA,
    DEVICE,
    EXAMPLES,
    LAYERS,
    MEMORY,
    NAMES,
    PLAN,
    SAMPLE_SEED,
    SEED,
    SHAPE,
    TRANSFORM,
    command,
    declared,
    result_options,
)
from netkin.cli.outputs import OutputFiles, as_json
from netkin.cli.running import (
    functions_of,
    load_batches,
    load_models,
    named_models,
    require_device,
    tell_random_weights,
)


class Amount(click.ParamType):
    """A whole number, or a share of the width."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | float:
        """Return the number, whole where it is written so."""
        try:
            return int(value) if str(value).isdecimal() else float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor a share such as 0.35.", param, ctx)


@command(
    "compress netkin:digits@digits.pt --layer fc --layer conv4 --k 0.35 --data digits:train --test digits:test",
    heading="Compression",
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
    "--data",
    required=True,
    metavar="DATA",
    help="Examples from which the directions are computed; see `netkin list data`.",
)
@declared("k", of="compress", type=Amount(), metavar="K")
@declared("variance", of="compress", type=float, metavar="SHARE")
@declared("accuracy_drop", of="compress", type=float, metavar="SHARE")
@declared("test", of="compress", metavar="DATA")
@declared("against", of="compress", metavar="MODEL")
@declared("order", of="compress", type=click.Choice(["at_once", "from_the_top"]))
@declared("cut", of="compress", type=float, metavar="SHARE")
@declared("projection", of="compress", type=click.Choice(["least_squares", "orthogonal"]))
@EXAMPLES
@BALANCED
@SAMPLE_SEED
@TRANSFORM
@PLAN
@result_options("small", "the compressed network", "shares kept and accuracy")
def compress(model: str, plan: bool, **options: Any) -> None:
    """Compress layers of MODEL: keep only the directions of their inputs that matter, and show what that saves.

    Each layer is replaced by two smaller ones. The file written by --out is a model for every command, as in
    netkin:digits@small.netkin.
    """
    from netkin.applications.compression import save_compressed

    ((name, spec),) = named_models([model]).items()
    outputs = OutputFiles.of(options)
    small = _compress(spec, plan, name=name, **options)
    if plan:
        outputs.show_plan(small)
    table: Any = small.compression
    shown = partial(as_json, table) if outputs.json else lambda: str(table)
    outputs.deliver(table, partial(save_compressed, small), shown)


def _compress(model: str, plan: bool, layers: tuple[str, ...], data: str, test: str | None, **options: Any) -> Any:
    """Load what was named and call the library."""
    from netkin.applications.compression import compress, explain_compress
    from netkin.sources import load_data

    against = options.pop("against")
    whole, *others = load_models([model] if against == "logits" else [model, against])
    batches = load_batches(data, 128, options["examples"], options.pop("seed"), options.pop("balanced"), [model])
    small = (explain_compress if plan else compress)(
        whole,
        list(layers),
        data=batches,
        test=load_data(test, models=[model]) if test else None,
        against=others[0] if others else against,
        transform=functions_of(options.pop("transforms"), 1),
        **options,
    )
    tell_random_weights([whole, *others])
    return small


@command(
    "sparsity netkin:digits@before.pt netkin:digits@after.pt --data digits:test --report sparsity.html",
    heading="Weights",
)
@click.argument("model")
@click.argument("other", required=False)
@click.option("--data", metavar="DATA", help="Labelled examples for accuracy and similarity; see `netkin list data`.")
@click.option(
    "--epsilon",
    "epsilons",
    type=float,
    multiple=True,
    metavar="E",
    help="Count weights with magnitude below E; by default 0.0001, 0.001 and 0.01. Can be repeated.",
)
@click.option(
    "--relative",
    type=float,
    multiple=True,
    metavar="E",
    help="Count weights with magnitude below E times the layer's root mean square; by default 0.01, 0.1 and 0.5. Can "
    "be repeated.",
)
@click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="PATTERN",
    help="Layers to analyse, by name, glob or type; by default all. Can be repeated.",
)
@click.option(
    "--sparsity",
    "sparsities",
    type=float,
    multiple=True,
    metavar="SHARE",
    help="Share of the smallest weights to prune before accuracy is measured; by default 13 shares from 0 to 0.99. Can "
    "be repeated.",
)
@declared("costs", of="sparsity_study")
@SHAPE
@EXAMPLES
@BALANCED
@DEVICE
@SAMPLE_SEED
@NAMES
@PLAN
@result_options("sparsity", "the study", "weights, similarity and accuracy")
def sparsity(model: str, other: str | None, names: tuple[str, ...], plan: bool, **options: Any) -> None:
    """Show the share of weights of MODEL, and of OTHER, that is zero or small, and the effect of pruning.

    With --data (best test data) it also shows the accuracy after pruning and the similarity of layers.
    """
    models = named_models([one for one in (model, other) if one], names)
    outputs = OutputFiles.of(options)
    found = _study(models, plan, **options)
    if plan:
        outputs.show_plan(found)
    outputs.deliver(found, found.save)


def _study(
    named: dict[str, str], plan: bool, data: str | None, seed: int, balanced: bool, device: str | None,
    examples: int | None, **options: Any,
) -> Any:  # fmt: skip
    """Load what was named and call the library."""
    from netkin.applications.sparsity import explain_sparsity_study, sparsity_study

    require_device(device)
    specs = list(named.values())
    models = load_models(specs)
    tell_random_weights(models)
    batches = None if data is None else load_batches(data, 256, examples, seed, balanced, specs)
    lists = ("epsilons", "relative", "sparsities", "layers")
    given = {name: value for name, value in options.items() if name not in lists or value}  # empty ones have defaults
    study = explain_sparsity_study if plan else sparsity_study
    return study(dict(zip(named, models, strict=True)), batches, device=device, **given)


@command(
    "classes netkin:digits@digits.pt --data digits:test --class 3 --class 8 --report digits.html", heading="Classes"
)
@click.argument("model")
@DATA
@click.option(
    "--class",
    "classes",
    multiple=True,
    metavar="CLASS",
    help="Index of an output, or its name. Can be repeated; by default all classes.",
)
@click.option(
    "--names",
    "class_names",
    metavar="NAMES",
    help="Names of all classes in the order of the outputs, as cat,dog,car; by default those of the folders of images.",
)
@click.option(
    "--measure",
    "measures",
    multiple=True,
    default=["cca_mean"],
    show_default=True,
    metavar="NAME",
    help="Measures; see `netkin list measures`. Can be repeated.",
)
@LAYERS
@SHAPE
@EXAMPLES
@BALANCED
@MEMORY
@DEVICE
@SEED
@TRANSFORM
@PLAN
@result_options("classes")
def classes(model: str, plan: bool, **options: Any) -> None:
    """Show how strongly each layer of MODEL, a classifier, represents each class.

    Each layer is compared with the logit of each class. With cca_mean, a value is the largest correlation that any
    weighted sum of the layer's units has with the logit. The layer that gives the logits has no values.
    """
    ((name, spec),) = named_models([model]).items()
    outputs = OutputFiles.of(options)
    found = _class_sensitivity(name, spec, plan, **options)
    if plan:
        outputs.show_plan(found, bool(found.refused))
    outputs.deliver(found, found.save)


def _class_sensitivity(
    name: str,
    model: str,
    plan: bool,
    data: str,
    classes: tuple[str, ...],
    class_names: str | None,
    measures: tuple[str, ...],
    layers: tuple[str, ...],
    balanced: bool,
    transforms: tuple[str, ...],
    **options: Any,
) -> Any:
    """Load what was named and call the library."""
    from netkin.applications.interpretation import class_sensitivity, explain_class_sensitivity
    from netkin.sources.batches import class_names as names_in

    require_device(options["device"])
    models = load_models([model])
    batches = load_batches(data, 128, options["examples"], options["seed"], balanced, [model])
    known = class_names.split(",") if class_names else None
    own = known or names_in(batches)
    wanted = [int(one) if one.isdecimal() and one not in own else one for one in classes] or None
    return (explain_class_sensitivity if plan else class_sensitivity)(
        models[0], batches, wanted, list(measures), names=known, layers=list(layers) or None, name=name,
        transform=functions_of(transforms, 1), **options,
    )  # fmt: skip
