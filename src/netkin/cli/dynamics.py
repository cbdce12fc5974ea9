"""`netkin dynamics`: how the layers of a training run converge to their final state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.options import FILE, JSON, engine_options, example, following_options, is_typed, picture_options
from netkin.cli.outputs import FORCE, OutputFiles, as_json
from netkin.cli.running import (
    REFUSED,
    Result,
    crash_refusals,
    data_spec,
    functions_of,
    load_batches,
    ray_engine,
    read_from_weights,
    refuse_absent_device,
    with_refusals,
)
from netkin.errors import NetkinError

if TYPE_CHECKING:
    from netkin.results import Series


@click.command(
    epilog=example(
        'dynamics runs/digits --model netkin:digits --data digits:test --layers "relu*" --report digits.html'
    )
)
@click.argument("run", metavar="RUN_DIR")
@click.option(
    "--model", metavar="BUILDER", help="Network for checkpoints that hold only weights, such as netkin:resnet20."
)
@click.option("--steps", type=click.IntRange(min=2), metavar="N", help="Use at most N checkpoints, evenly spaced.")
@following_options
@engine_options
@click.option(
    "--save", type=FILE, help="Write the series to this file after each step; run the same command again to resume."
)
@picture_options("run", "the layers' lines")
@click.option("--explain", "explains", is_flag=True, help="Print what the command would do and cost, and stop.")
@FORCE
@JSON
@with_refusals
def dynamics(
    run: str,
    save: Path | None,
    report: Path | None,
    figure: Path | None,
    explains: bool,
    force: bool,
    json: bool,
    **options: Any,
) -> None:
    """Compare every checkpoint of a run with the final one, layer by layer.

    RUN_DIR is a folder of checkpoints with steps in their names: step_100.pt, epoch-3.safetensors, checkpoint-500/ of
    the Hugging Face Trainer, epoch=3-step=500.ckpt of Lightning, or exported programs (.pt2). The checkpoint with the
    highest step is the final one.
    """
    outputs = OutputFiles(force, run, options["model"], options["data"])
    if not is_typed(click.get_current_context(), "pairs"):
        options["pairs"] = None  # all, or of weights alone those that correspond
    if options["data"] is None and not read_from_weights(options["measures"]):
        raise click.UsageError("--data is missing; only measures of weights, such as atom_cosine, work without it.")
    if explains:
        _explain(run, json, **options)
        return
    outputs.check("--save", save, "series")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    try:
        series = _follow(run, save, overwrite=force, **options)
    except KeyboardInterrupt:
        _say_how_to_resume(save)
        raise
    if save:
        click.echo(f"saved to {save}", err=True)
    outputs.draw(series, report, figure)
    click.echo(as_json(series) if json else str(series))
    outputs.finish()


def _follow(
    run: str, save: Path | None, model: str | None, steps: int | None, data: str | None, batch_size: int, **options: Any
) -> Series:
    """Open the run and call the library; a crash of the final model, which runs first, becomes one sentence."""
    from netkin.applications.dynamics import dynamics as follow

    return _call_library(partial(follow, save=save), run, model, steps, data, batch_size, options)


def _explain(
    run: str, json: bool, model: str | None, steps: int | None, data: str | None, batch_size: int, **options: Any
) -> None:
    from netkin.applications.dynamics import explain_dynamics

    own = {name: value for name, value in options.items() if name not in ("overwrite", "partial", "engine")}
    plan = _call_library(explain_dynamics, run, model, steps, data, batch_size, own)
    facts = asdict(plan)
    facts["each"].pop("kinds")
    click.echo(as_json(facts) if json else str(plan))
    if plan.refused:
        raise click.exceptions.Exit(REFUSED)


def _call_library(
    function: Callable[..., Result],
    run: str,
    model: str | None,
    steps: int | None,
    data: str | None,
    batch_size: int,
    options: dict[str, Any],
) -> Result:
    from netkin.sources.runs import open_run

    checkpoints, balanced = open_run(run, model).only(steps), options.pop("balanced")
    address, gpus = options.pop("address"), options.pop("gpus")
    options["transform"] = functions_of(options.pop("transforms"), 1)
    if options.get("engine") == "ray":
        described = data and data_spec(data, batch_size, options, balanced)
        how = options | {"engine": ray_engine(address, gpus, None), "layers": list(options["layers"]) or None}
        return function(checkpoints, described, list(how.pop("measures")), **how)
    refuse_absent_device(options["device"])
    batches = data and load_batches(data, batch_size, options["examples"], options["seed"], balanced, checkpoints.whole)
    measures, layers = list(options.pop("measures")), list(options.pop("layers")) or None
    with crash_refusals([f"{checkpoints.unit} {checkpoints.steps[-1]} of {run}"], [checkpoints.final]):
        return function(checkpoints, batches, measures, layers=layers, **options)


def _say_how_to_resume(save: Path | None) -> None:
    """Say what an interrupted command leaves behind."""
    if save is None or not save.exists():
        return
    from netkin.results import Series

    try:
        series = Series.load(save)
    except NetkinError:  # another result's file, which was not written to
        return
    total = len(series.steps) + len(series.missing)
    click.echo(f"\n{len(series.steps)} of {total} steps are in {save}; run the same command again to resume.", err=True)
