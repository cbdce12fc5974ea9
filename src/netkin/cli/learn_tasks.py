"""`netkin learn-tasks`: tasks learnt one after another, by one way or by several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.documents import as_json
from netkin.cli.options import DEVICE, FILE, JSON, QUIET, RECIPE, recipe_settings, refuse_absent_device
from netkin.cli.outputs import FORCE, Outputs
from netkin.cli.refusals import refusing
from netkin.cli.running import telling_how_far
from netkin.errors import FileFault

if TYPE_CHECKING:
    from netkin.results import TaskAccuracies

# written out, since the library is imported when the command runs
METHODS = ("atoms", "finetune", "ewc", "replay", "joint", "separate")
OPTIONS = {"atoms": ("atoms",), "ewc": ("strength", "examples"), "replay": ("examples",)}
EXAMPLE = """\b
Example:
  netkin learn-tasks netkin:digits --data digits:train --test digits:test --recipe epochs=1 --report tasks.html
"""
_COUNT = click.IntRange(min=1)


@click.command("learn-tasks", epilog=EXAMPLE)
@click.argument("model")
@click.option("--data", required=True, metavar="DATA", help="Labelled examples to learn from; see `netkin data`.")
@click.option("--test", required=True, metavar="DATA", help="Labelled examples of the same classes to test on.")
@click.option("--tasks", type=_COUNT, default=5, show_default=True, metavar="N", help="Tasks of equally many classes.")
@click.option(
    "--order", type=click.IntRange(min=0), metavar="SEED", help="Draw the order of the classes from this seed."
)
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), default=["atoms"], show_default=True,
              help="Several may be given.")  # fmt: skip
@click.option(
    "--atoms", type=_COUNT, metavar="M", help="Of atoms: how many in a layer; enough for exact filters if left."
)
@click.option("--strength", type=float, metavar="X", help="Of ewc: the factor of its penalty.")
@click.option("--examples", type=_COUNT, metavar="N", help="Of ewc and replay: examples that are kept of each task.")
@RECIPE
@click.option(
    "--head", metavar="LAYER", help="The layer in whose place the heads stand; by default the last linear one."
)
@click.option(
    "--seeds", type=_COUNT, default=1, show_default=True, metavar="N", help="Seeds 0 to N - 1; errors from 2."
)
@DEVICE
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Write DIR/METHOD.netkin; finished tasks lie beside, and the same command continues.")  # fmt: skip
@click.option("--report", type=FILE, help="Write a page for the browser to this file, as tasks.html.")
@click.option("--figure", type=FILE, help="Draw the accuracy matrices into this file, as tasks.png, .svg or .pdf.")
@FORCE
@QUIET
@JSON
@refusing
def learn_tasks(
    model: str, methods: tuple[str, ...], save: Path | None, report: Path | None, figure: Path | None, force: bool,
    json: bool, **options: Any,
) -> None:  # fmt: skip
    """Learn tasks one after another with MODEL, test every task after each, and say what was learnt and forgotten.

    A task is some of the classes of --data, and each has a head of its own. ACC is the mean accuracy over all tasks at
    the end, BWT what was gained on earlier tasks since (below 0: forgotten), FWT what was known of a task before it.
    """
    outputs = Outputs(force, model, options["data"], options["test"])
    places = {} if save is None else {method: save / f"{method}.netkin" for method in methods}
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    with _folder(save):
        for method, place in places.items():
            outputs.check(f"--save, for {method},", place, "task accuracies")
        records = _learnt(model, tuple(dict.fromkeys(methods)), places, overwrite=force, **options)
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


def _learnt(
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
        with telling_how_far(places.get(method)):
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
            raise click.UsageError(f"--{name} goes with --method {takers}.")
    return found
