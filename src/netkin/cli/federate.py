"""`netkin federate`: clients that train a network together, simulated on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.documents import as_json
from netkin.cli.options import DEVICE, FILE, JSON, QUIET, RECIPE, recipe_settings, refuse_absent_device
from netkin.cli.outputs import FORCE, Outputs
from netkin.cli.refusals import refusing
from netkin.cli.running import telling_how_far

if TYPE_CHECKING:
    from netkin.results import Federation

# written out, since the library is imported when the command runs
ALGORITHMS = ("fedavg", "fedprox", "fedper", "fedrep", "ditto", "local", "pretrain")
SOURCES = ("fixed", "pretrained", "evolving", "federated")
EXAMPLE = """\b
Example:
  netkin federate netkin:digits --data digits:train --test digits:test --classes 2 --rounds 3 --report users.html
"""
_COUNT = click.IntRange(min=1)


@click.command(epilog=EXAMPLE)
@click.argument("model")
@click.option(
    "--data", required=True, metavar="DATA", help="Labelled examples, dealt out to clients; see `netkin data`."
)
@click.option("--test", metavar="DATA", help="Examples to test on, dealt out by the same classes.")
@click.option("--clients", type=_COUNT, default=10, show_default=True, metavar="N", help="How many clients there are.")
@click.option("--classes", type=_COUNT, required=True, metavar="N", help="How many classes each client has.")
@click.option("--deal", type=click.Choice(["random", "groups"]), default="random", show_default=True,
              help="Classes drawn for each client, or cut into groups of which each goes to several.")  # fmt: skip
@click.option("--equal", is_flag=True, help="As many examples for each client; the others are left out.")
@click.option("--algorithm", type=click.Choice(ALGORITHMS), default="fedavg", show_default=True)
@click.option("--atoms", type=_COUNT, metavar="M", help="Take convolutions apart first, into M atoms a layer.")
@click.option("--coefficients", type=click.Choice(SOURCES), help="Personal atoms, and where coefficients come from.")
@click.option("--rounds", type=_COUNT, default=10, show_default=True, metavar="N")
@click.option("--share", type=float, default=1.0, show_default=True, metavar="SHARE", help="Of the clients in a round.")
@RECIPE
@click.option("--head", metavar="LAYER", help="The layer that is the head; by default the last linear one.")
@click.option("--pull", type=float, default=0.1, show_default=True, metavar="X",
              help="Of fedprox and ditto: the factor of ½ ‖w − w received‖² in the loss.")  # fmt: skip
@click.option("--head-epochs", type=_COUNT, metavar="N", help="Of fedrep: epochs for what is personal, in each round.")
@click.option("--public", metavar="DATA", help="Examples that no client owns, for pretraining.")
@click.option("--pretrain-epochs", type=_COUNT, default=10, show_default=True, metavar="N", help="Epochs on --public.")
@click.option("--finetune", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Epochs that each client trains by itself at last.")  # fmt: skip
@click.option("--test-every", type=click.IntRange(min=0), default=1, show_default=True, metavar="N",
              help="With --test: test all clients after every N rounds; 0 for the end alone.")  # fmt: skip
@DEVICE
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Seed of random weights, of dealing, of draws of clients and of their orders.")  # fmt: skip
@click.option(
    "--save", type=FILE, help="Write the result to this file; rounds lie beside it, and the same command continues."
)
@click.option("--report", type=FILE, help="Write a page for the browser to this file, as users.html.")
@click.option("--figure", type=FILE, help="Draw accuracies and similarity into this file, as users.png, .svg or .pdf.")
@FORCE
@QUIET
@JSON
@refusing
def federate(
    model: str, save: Path | None, report: Path | None, figure: Path | None, force: bool, json: bool, **options: Any
) -> None:
    """Let clients train MODEL together, each on examples of its own classes, and show what becomes of them.

    With --coefficients the atoms of each client are its own and those tell which clients are alike; --atoms makes a
    network of atoms of any with convolutions. A federation continues with more --rounds too.
    """
    outputs = Outputs(force, model, options["data"], options["test"], options["public"])
    outputs.check("--save", save, "federation")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    with telling_how_far(save):
        found = _federated(model, save=save, overwrite=force, **options)
    if save:
        click.echo(f"saved to {save}", err=True)
    outputs.draw(found, report, figure)
    click.echo(as_json(found) if json else str(found))
    outputs.finish()


def _federated(
    spec: str,
    data: str,
    test: str | None,
    atoms: int | None,
    device: str | None,
    recipe: tuple[str, ...],
    **options: Any,
) -> Federation:
    """Load what was named, deal the data out, and call the library."""
    from netkin.applications.federated import federate as run
    from netkin.applications.federated import split_by_classes
    from netkin.applications.federated.federate import local_recipe
    from netkin.representations.filters import decompose
    from netkin.sources import load_model

    refuse_absent_device(device)
    how = local_recipe(None, recipe_settings(recipe))
    network = load_model(spec, seed=options["seed"])
    network = network if atoms is None else decompose(network, atoms=atoms).model
    dealing = {name: options.pop(name) for name in ("clients", "classes", "deal", "equal")}
    split = split_by_classes(data, test=test, seed=options["seed"], **dealing)
    every = options.pop("test_every") or None
    every, tests = (every, split.test) if test else (None, None)
    return run(network.to(device), split.train, test=tests, test_every=every, recipe=how, **options)
