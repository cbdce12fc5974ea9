"""`netkin sensitivity`: how closely each layer of a classifier follows the logit of each class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.options import BALANCED, DEVICE, EXAMPLES, FILE, JSON, SHAPE, example, memory_option, picture_options
from netkin.cli.outputs import FORCE, OutputFiles, as_json
from netkin.cli.running import crash_refusals, load_batches, load_models, refuse_absent_device, with_refusals

if TYPE_CHECKING:
    from netkin.results import Comparison


@click.command(epilog=example("sensitivity netkin:digits --data digits:test --class 3 --class 8 --report digits.html"))
@click.argument("model")
@click.option("--data", required=True, metavar="DATA", help="Examples that the model sees; see `netkin data`.")
@click.option(
    "--class",
    "classes",
    multiple=True,
    metavar="CLASS",
    help="Number of an output, or a name given by --names. Can be repeated; by default all classes.",
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
@click.option("--layers", multiple=True, metavar="PATTERN", help="Name, glob or module type; see `netkin layers`.")
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
    """Show in which layers MODEL, a classifier, knows of each class.

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
