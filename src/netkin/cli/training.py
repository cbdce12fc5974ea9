"""Commands that train: `netkin learn-tasks`, one task after another, and `netkin federate`, clients together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.options import COUNT, DEVICE, FILE, JSON, KNOWN, RECIPE, example, picture_options, recipe_settings
from netkin.cli.outputs import FORCE, OutputFiles, as_json
from netkin.cli.running import refuse_absent_device, with_refusals, with_resume_hint
from netkin.errors import FileFault

if TYPE_CHECKING:
    from netkin.results import Federation, TaskAccuracies


OPTIONS = KNOWN["options of learners"]


@click.command(
    "learn-tasks",
    epilog=example(
        "learn-tasks netkin:digits --data digits:train --test digits:test --recipe epochs=1 --report tasks.html"
    ),
)
@click.argument("model")
@click.option("--data", required=True, metavar="DATA", help="Labelled training examples; see `netkin data`.")
@click.option("--test", required=True, metavar="DATA", help="Labelled test examples of the same classes.")
@click.option(
    "--tasks",
    type=COUNT,
    default=5,
    show_default=True,
    metavar="N",
    help="Number of tasks, each with the same number of classes.",
)
@click.option(
    "--order", type=click.IntRange(min=0), metavar="SEED", help="Shuffle the order of the classes with this seed."
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    type=click.Choice(KNOWN["learners"]),
    default=["atoms"],
    show_default=True,
    help="Learning method; can be repeated.",
)
@click.option(
    "--atoms",
    type=COUNT,
    metavar="M",
    help="For atoms: number of atoms per layer; by default enough for exact filters.",
)
@click.option("--strength", type=float, metavar="X", help="For ewc: factor of the penalty.")
@click.option("--examples", type=COUNT, metavar="N", help="For ewc and replay: number of examples kept from each task.")
@RECIPE
@click.option("--head", metavar="LAYER", help="Layer that is replaced by the heads; by default the last linear layer.")
@click.option(
    "--seeds",
    type=COUNT,
    default=1,
    show_default=True,
    metavar="N",
    help="Run with seeds 0 to N - 1; with 2 or more, standard errors are shown.",
)
@DEVICE
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Write DIR/METHOD.netkin and the finished tasks; run the same command again to resume.")  # fmt: skip
@picture_options("tasks", "the accuracy matrices")
@FORCE
@JSON
@with_refusals
def learn_tasks(
    model: str, methods: tuple[str, ...], save: Path | None, report: Path | None, figure: Path | None, force: bool,
    json: bool, **options: Any,
) -> None:  # fmt: skip
    """Train MODEL on tasks one after another (continual learning), and test all tasks after each.

    Each task is a group of the classes of --data, with its own head. ACC is the mean accuracy over all tasks at the
    end, BWT the mean change on earlier tasks since they were learnt (negative: forgetting), FWT the mean accuracy gain
    on tasks before they are learnt.
    """
    outputs = OutputFiles(force, model, options["data"], options["test"])
    places = {} if save is None else {method: save / f"{method}.netkin" for method in methods}
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    with _folder(save):
        for method, place in places.items():
            outputs.check(f"--save, for {method},", place, "task accuracies")
        records = _learn(model, tuple(dict.fromkeys(methods)), places, overwrite=force, **options)
    if save is not None:
        click.echo(f"saved to {save}", err=True)
    outputs.draw(records if len(records) > 1 else records[0], report, figure)
    click.echo(_documents(records) if json else "\n\n".join(map(str, records)))
    outputs.finish()


def _documents(records: list[TaskAccuracies]) -> str:
    """Return the record as JSON, or a list of several."""
    from netkin.results import document

    return as_json(records[0] if len(records) == 1 else list(map(document, records)))


@contextmanager
def _folder(folder: Path | None) -> Iterator[None]:
    """Make a folder to write into; if nothing is written it is gone again."""
    if folder is None or folder.is_dir():
        yield
        return
    try:
        folder.mkdir()
    except OSError as fault:
        raise FileFault(f"cannot make the folder {str(folder)!r}: {fault.strerror or fault}.") from fault
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def _learn(
    spec: str, methods: tuple[str, ...], places: dict[str, Path], data: str, test: str, tasks: int, order: int | None,
    recipe: tuple[str, ...], seeds: int, **options: Any,
) -> list[TaskAccuracies]:  # fmt: skip
    """Split the data into tasks and call the library for each method."""
    from netkin.applications.continual import learn_tasks as learn
    from netkin.applications.continual import split_tasks
    from netkin.training.recipe import recipe_of

    refuse_absent_device(options["device"])
    how, own = recipe_of(None, recipe_settings(recipe)), _options(methods, options)
    split, records = split_tasks(data, test, tasks, seed=order), []
    for method in methods:
        with with_resume_hint(places.get(method)):
            learnt = learn(spec, split, method, how, seeds=range(seeds), options=own[method], save=places.get(method),
                           **options)  # fmt: skip
        records.append(learnt.record)
    return records


def _options(methods: tuple[str, ...], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of each method, taken out of all; one that no method has is refused."""
    given = {name: options.pop(name) for name in ("atoms", "strength", "examples")}
    given = {name: value for name, value in given.items() if value is not None}
    found = {method: {name: given[name] for name in OPTIONS.get(method, ()) if name in given} for method in methods}
    for name in given:
        if not any(name in own for own in found.values()):
            takers = " or ".join(method for method, own in OPTIONS.items() if name in own)
            raise click.UsageError(f"--{name} needs --method {takers}.")
    return found


@click.command(
    epilog=example(
        "federate netkin:digits --data digits:train --test digits:test --classes 2 --rounds 3 --report users.html"
    )
)
@click.argument("model")
@click.option(
    "--data", required=True, metavar="DATA", help="Labelled examples, divided among the clients; see `netkin data`."
)
@click.option("--test", metavar="DATA", help="Test examples; each client is tested on its own classes.")
@click.option("--clients", type=COUNT, default=10, show_default=True, metavar="N", help="Number of clients.")
@click.option("--classes", type=COUNT, required=True, metavar="N", help="Number of classes per client.")
@click.option("--deal", type=click.Choice(KNOWN["deals"]), default="random", show_default=True,
              help="Draw classes for each client, or split classes into groups that clients share.")  # fmt: skip
@click.option("--equal", is_flag=True, help="Give all clients the same number of examples; the rest is unused.")
@click.option("--algorithm", type=click.Choice(KNOWN["algorithms"]), default="fedavg", show_default=True,
              help="Federated algorithm.")  # fmt: skip
@click.option("--atoms", type=COUNT, metavar="M", help="Decompose convolutions first, into M atoms per layer.")
@click.option(
    "--coefficients",
    type=click.Choice(KNOWN["coefficients"]),
    help="Train personal atoms; where the shared coefficients come from.",
)
@click.option("--rounds", type=COUNT, default=10, show_default=True, metavar="N", help="Number of rounds.")
@click.option(
    "--share",
    type=float,
    default=1.0,
    show_default=True,
    metavar="SHARE",
    help="Share of the clients that take part in each round.",
)
@RECIPE
@click.option("--head", metavar="LAYER", help="Layer that is the head; by default the last linear layer.")
@click.option("--pull", type=float, default=0.1, show_default=True, metavar="X",
              help="For fedprox and ditto: factor of ½ ‖w − w received‖² in the loss.")  # fmt: skip
@click.option(
    "--head-epochs", type=COUNT, metavar="N", help="For fedrep: epochs for the personal weights in each round."
)
@click.option("--public", metavar="DATA", help="Public examples for pretraining.")
@click.option(
    "--pretrain-epochs",
    type=COUNT,
    default=10,
    show_default=True,
    metavar="N",
    help="Epochs of pretraining on --public.",
)
@click.option("--finetune", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Epochs of local fine-tuning for each client at the end.")  # fmt: skip
@click.option("--test-every", type=click.IntRange(min=0), default=1, show_default=True, metavar="N",
              help="With --test: test all clients every N rounds; 0 to test only at the end.")  # fmt: skip
@DEVICE
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Random seed for weights, division of data, choice of clients and order of examples.")  # fmt: skip
@click.option(
    "--save",
    type=FILE,
    help="Write the result to this file, and finished rounds beside it; run the same command again to resume.",
)
@picture_options("users", "accuracies and similarity")
@FORCE
@JSON
@with_refusals
def federate(
    model: str, save: Path | None, report: Path | None, figure: Path | None, force: bool, json: bool, **options: Any
) -> None:
    """Simulate federated learning of MODEL, with clients that have examples of different classes.

    With --coefficients each client has its own filter atoms, from which the similarity of clients is computed; --atoms
    first decomposes the convolutions into atoms. A saved federation can be resumed with more --rounds.
    """
    outputs = OutputFiles(force, model, options["data"], options["test"], options["public"])
    outputs.check("--save", save, "federation")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    with with_resume_hint(save):
        found = _federate(model, save=save, overwrite=force, **options)
    if save:
        click.echo(f"saved to {save}", err=True)
    outputs.draw(found, report, figure)
    click.echo(as_json(found) if json else str(found))
    outputs.finish()


def _federate(
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
