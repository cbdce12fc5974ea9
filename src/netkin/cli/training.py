"""Commands about training: `netkin dynamics`, how layers of a run converge, `netkin continual` and `netkin federate`.

The last two train: on one task after another, and on clients that learn a network together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from netkin.cli.options import (
    COUNT,
    DEVICE,
    KNOWN,
    PLAN,
    RECIPE,
    RESUMED,
    command,
    declared,
    engine_options,
    following_options,
    is_typed,
    recipe_settings,
    result_options,
)
from netkin.cli.outputs import OutputFiles, as_json
from netkin.cli.running import (
    Result,
    functions_of,
    prepare,
    read_from_weights,
    remember,
    require_device,
    require_known_names,
    runs_elsewhere,
    with_resume_hint,
)
from netkin.errors import FileError, NetkinError

if TYPE_CHECKING:
    from netkin.results import Federation, TaskAccuracies
    from netkin.training.work_plan import WorkPlan


OPTIONS = KNOWN["options of learners"]


@command(
    'dynamics runs/digits --model netkin:digits --data digits:test --layers "relu*" --report digits.html', heading="Run"
)
@click.argument("run", metavar="RUN_DIR")
@click.option(
    "--model", metavar="BUILDER", help="Network for checkpoints that hold only weights, such as netkin:resnet20."
)
@click.option("--steps", type=click.IntRange(min=2), metavar="N", help="Use at most N checkpoints, evenly spaced.")
@following_options
@partial(engine_options, but="distributed")
@PLAN
@result_options(
    "run",
    "the series",
    "the layers' lines",
    f", after each step; {RESUMED}",
)
def dynamics(run: str, plan: bool, **options: Any) -> None:
    """Compare every checkpoint of a run with the final one, layer by layer.

    RUN_DIR is a folder of checkpoints with steps in their names: step_100.pt, epoch-3.safetensors, checkpoint-500/ of
    the Hugging Face Trainer, epoch=3-step=500.ckpt of Lightning, or exported programs (.pt2). The checkpoint with the
    highest step is the final one.
    """
    from netkin.applications.dynamics import dynamics as follow

    outputs = OutputFiles.of(options, is_job=True)
    if not is_typed(click.get_current_context(), "pairs"):
        options["pairs"] = None  # all, or of weights alone those that correspond
    if options["data"] is None and not read_from_weights(options["measures"]):
        raise click.UsageError("--data is missing; only measures of weights, such as atom_cosine, work without it.")
    if plan:
        _print_plan(run, outputs, **options)
    try:
        series = _call_library(follow, run, save=outputs.save, overwrite=outputs.overwrite, **options)
    except KeyboardInterrupt:
        _say_how_to_resume(outputs.save)
        raise
    outputs.deliver(series)


def _print_plan(run: str, outputs: OutputFiles, **options: Any) -> NoReturn:
    from netkin.applications.dynamics import explain_dynamics

    plan = _call_library(explain_dynamics, run, **options)
    facts = asdict(plan)
    facts["each"].pop("kinds")
    outputs.show_plan(plan, bool(plan.refused), facts)


def _call_library(
    function: Callable[..., Result], run: str, model: str | None, steps: int | None, **options: Any
) -> Result:
    """Open the run and call the library."""
    from netkin.sources.runs import open_run

    require_known_names(options, [])
    checkpoints = open_run(run, model).only(steps)
    options["transform"] = functions_of(options.pop("transforms"), 1)
    options["layers"] = list(options["layers"]) or None
    data = prepare(options, checkpoints.whole)
    if runs_elsewhere(options):
        return function(checkpoints, data, **options)
    remember(checkpoints.final)
    return function(checkpoints, data, **options)


def _say_how_to_resume(save: Path | None) -> None:
    """Say what an interrupted command leaves behind."""
    from netkin import files
    from netkin.results import Series

    if save is None or not files.is_filled(save):
        return

    try:
        series = Series.load(save)
    except NetkinError:  # another result's file, which was not written to
        return
    total = len(series.steps) + len(series.missing)
    click.echo(f"\n{len(series.steps)} of {total} steps are in {save}; run the same command again to resume.", err=True)


@command(
    "continual netkin:digits --data digits:train --test digits:test --recipe epochs=5,batch=16,lr=0.02",
    heading="Tasks",
)
@click.argument("model")
@click.option("--data", required=True, metavar="DATA", help="Labelled training examples; see `netkin list data`.")
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
@click.option("--strength", type=float, metavar="X", help="For ewc: factor of the penalty; by default 1.")
@click.option(
    "--examples",
    type=COUNT,
    metavar="N",
    help="For ewc and replay: number of examples of each task to use or keep; by default 200 for ewc, 50 for replay.",
)
@RECIPE
@declared("head", of="learn_tasks", metavar="LAYER")
@click.option(
    "--seeds",
    type=COUNT,
    default=1,
    show_default=True,
    metavar="N",
    help="Run with seeds 0 to N - 1; with 2 or more, standard errors are shown.",
)
@DEVICE
@click.option("-o", "--out", "save", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help=f"Write DIR/METHOD.netkin and the finished tasks; {RESUMED}.")  # fmt: skip
@PLAN
@result_options("tasks", None, "the accuracy matrices")
def continual(model: str, methods: tuple[str, ...], save: Path | None, plan: bool, **options: Any) -> None:
    """Train MODEL on tasks one after another (continual learning), and test all tasks after each.

    Each task is a group of the classes of --data, with its own head. ACC is the mean accuracy over all tasks at the
    end, BWT the mean change on earlier tasks since they were learnt (negative: forgetting), FWT the mean accuracy gain
    on tasks before they are learnt.
    """
    outputs = OutputFiles.of(options, is_job=True)
    places = {} if save is None else {method: save / f"{method}.netkin" for method in methods}
    with _folder(save):
        for method, place in places.items():
            outputs.check(f"--out, for {method},", place)
        records = _learn(model, tuple(dict.fromkeys(methods)), places, plan, overwrite=outputs.overwrite, **options)
    if plan:
        outputs.show_plan("\n\n".join(f"{method}:\n{one}" for method, one in records.items()), facts=records)
    learnt = list(records.values())
    outputs.tell_saved(save)
    shown = partial(_documents, learnt) if outputs.json else lambda: "\n\n".join(map(str, learnt))
    outputs.deliver(learnt if len(learnt) > 1 else learnt[0], text=shown)


def _documents(records: list[TaskAccuracies]) -> str:
    """Return the record as JSON, or a list of several."""
    from netkin.results import document

    return as_json(records[0] if len(records) == 1 else list(map(document, records)))


@contextmanager
def _folder(folder: Path | None) -> Iterator[None]:
    """Make a folder to write into, and remove it again if nothing was written."""
    if folder is None or folder.is_dir():
        yield
        return
    try:
        folder.mkdir()
    except OSError as fault:
        raise FileError(f"cannot make the folder {str(folder)!r}: {fault.strerror or fault}.") from fault
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def _learn(
    spec: str, methods: tuple[str, ...], places: dict[str, Path], plan: bool, data: str, test: str, tasks: int,
    order: int | None, recipe: tuple[str, ...], seeds: int, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Split the data into tasks and call the library for each method; return what came of it, or the plan."""
    from netkin.applications.continual import learn_tasks, split_tasks
    from netkin.training.recipe import recipe_of

    require_device(options["device"])
    how, own = recipe_of(None, recipe_settings(recipe)), _options(methods, options)
    split, records = split_tasks(data, test, tasks, seed=order), dict[str, Any]()
    for method in methods:
        call: dict[str, Any] = {"seeds": range(seeds), "options": own[method], "save": places.get(method), **options}
        with with_resume_hint(places.get(method)):
            if plan:
                records[method] = learn_tasks.explain(spec, split, method, how, **call)
            else:
                records[method] = learn_tasks(spec, split, method, how, **call).record
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


@command(
    "federate netkin:digits --data digits:train --test digits:test --classes 2 --algorithm fedper --recipe batch=8",
    heading="Federation",
)
@click.argument("model")
@click.option(
    "--data",
    required=True,
    metavar="DATA",
    help="Labelled examples, divided among the clients; see `netkin list data`.",
)
@click.option("--test", metavar="DATA", help="Test examples; each client is tested on its own classes.")
@declared("clients", of="split_by_classes", type=COUNT, default=10, show_default=True, metavar="N")
@declared("classes", of="split_by_classes", type=COUNT, required=True, metavar="N")
@declared("partition", of="split_by_classes", type=click.Choice(KNOWN["partitions"]))
@declared("equal", of="split_by_classes")
@click.option("--algorithm", type=click.Choice(KNOWN["algorithms"]), default="fedavg", show_default=True,
              help="Federated algorithm.")  # fmt: skip
@click.option("--atoms", type=COUNT, metavar="M", help="Decompose convolutions first, into M atoms per layer.")
@click.option(
    "--coefficients",
    type=click.Choice(KNOWN["coefficients"]),
    help="Train personal atoms only, with shared coefficients from this source.",
)
@declared("rounds", of="federate", type=COUNT, metavar="N")
@declared("client_fraction", of="federate", type=float, metavar="SHARE")
@RECIPE
@declared("head", of="federate", metavar="LAYER")
@declared("method", of="federate", type=click.Choice(["auto", "stacked", "one by one"]))
@declared("prox", of="federate", type=float, metavar="X")
@declared("head_epochs", of="federate", type=COUNT, metavar="N")
@declared("public", of="federate", metavar="DATA")
@declared("pretrain_epochs", of="federate", type=COUNT, metavar="N")
@declared("finetune", of="federate", type=click.IntRange(min=0), metavar="N")
@declared("test_every", "0 for the last alone.", of="federate", type=click.IntRange(min=0), default=1,
          show_default=True, metavar="N")  # fmt: skip
@DEVICE
@declared("seed", of="federate", type=click.IntRange(min=0), metavar="N")
@PLAN
@result_options("users", "the result", "accuracies and similarity",
                f", and finished rounds beside it; {RESUMED}")  # fmt: skip
def federate(model: str, plan: bool, **options: Any) -> None:
    """Simulate federated learning of MODEL, with clients that have examples of different classes.

    With --coefficients each client has its own filter atoms, from which the similarity of clients is computed; --atoms
    first decomposes the convolutions into atoms. A saved federation can be resumed with more --rounds.
    """
    outputs = OutputFiles.of(options, is_job=True)
    with with_resume_hint(outputs.save):
        found = _federate(model, plan, save=outputs.save, overwrite=outputs.overwrite, **options)
    if plan:
        outputs.show_plan(found)
    outputs.deliver(found)


def _federate(
    spec: str,
    plan: bool,
    data: str,
    test: str | None,
    atoms: int | None,
    device: str | None,
    recipe: tuple[str, ...],
    **options: Any,
) -> Federation | WorkPlan:
    """Load what was named, divide the data among the clients, and call the library."""
    from netkin.applications.federated import federate as run
    from netkin.applications.federated import split_by_classes
    from netkin.applications.federated.local_training import local_recipe
    from netkin.representations.filters import decompose
    from netkin.sources import load_model

    require_device(device)
    how = local_recipe(None, recipe_settings(recipe))
    network = remember(load_model(spec, seed=options["seed"]))
    network = network if atoms is None else decompose(network, atoms=atoms).model
    dividing = {name: options.pop(name) for name in ("clients", "classes", "partition", "equal")}
    split = split_by_classes(data, test=test, seed=options["seed"], **dividing)
    every = options.pop("test_every") or None
    every, tests = (every, split.test) if test else (None, None)
    call = run.explain if plan else run
    return call(network, split.train, test=tests, test_every=every, recipe=how, device=device, **options)
