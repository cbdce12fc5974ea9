"""`netkin train`: train a model by a recipe, and write its weights, which other commands read as MODEL@FILE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.options import (
    COUNT,
    DEVICE,
    FILE,
    JSON,
    KNOWN,
    OVERWRITE,
    PLAN,
    RESUMED,
    Command,
    command,
    declared,
    with_options,
)
from netkin.cli.outputs import OutputFiles, align_columns, as_json
from netkin.cli.running import remember, require_device, with_resume_hint

if TYPE_CHECKING:
    from torch import Tensor, nn

    from netkin.training import Recipe, Record

EPOCHS = 10  # without --epochs and --steps
SHOWN = 12  # epochs in the table
CHOICES = {"optimizer": "optimizers", "schedule": "schedules", "precision": "precisions", "order": "orders"}
RECIPE = KNOWN["options"]["Recipe"]


def recipe_options(command: Command) -> Command:
    """Give a command an option for each setting of a recipe."""
    made = []
    for name, (default, _) in RECIPE.items():
        settings: dict[str, Any] = {}
        if name in CHOICES:
            settings = {"type": click.Choice(KNOWN[CHOICES[name]])}
        elif not isinstance(default, bool):
            whole = isinstance(default, int) or name in ("epochs", "steps")
            settings = {"type": int if whole else float, "metavar": "N" if whole else "X"}
        made.append(declared(name, f"By default {EPOCHS}." if name == "epochs" else "", of="Recipe", **settings))
    return with_options(command, *made)


@command(
    "train netkin:digits --data digits:train --test digits:test --optimizer adam --lr 0.003 --out digits.pt",
    heading="Training",
)
@click.argument("model")
@click.option("--data", required=True, metavar="DATA", help="Labelled training examples; see `netkin list data`.")
@click.option("--test", metavar="DATA", help="Labelled test examples, for loss and accuracy after each epoch.")
@recipe_options
@click.option("--freeze", metavar="SCHEDULE", help="Freeze layers from the bottom up: linear, similarity, or "
              "LAYER=FRACTION,... for the fraction of all steps after which each is frozen.")  # fmt: skip
@click.option("--cka-sr", type=float, metavar="BETA", help="Add BETA times the CKA between layers to the loss.")
@click.option("--sparsity", type=float, metavar="SHARE", help="Mask this share of the weights before training.")
@click.option("--method", type=click.Choice(KNOWN["sparsity methods"]), default="erk", show_default=True,
              help="Needs --sparsity: which weights are masked.")  # fmt: skip
@click.option("--checkpoints", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Write the weights after each epoch to this folder, which `netkin dynamics` reads.")  # fmt: skip
@click.option("--every", type=COUNT, metavar="N", help="Needs --checkpoints: write after every N steps instead.")
@DEVICE
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Seed of initial weights, order of the examples, augmentation, dropout and masks.")  # fmt: skip
@click.option("-o", "--out", "save", type=FILE, metavar="FILE",
              help=f"Write the weights to this file, such as digits.pt or digits.safetensors; {RESUMED}.")  # fmt: skip
@PLAN
@OVERWRITE
@JSON
def train(model: str, plan: bool, **options: Any) -> None:
    """Train MODEL on labelled examples, and write its weights; other commands read them as MODEL@FILE.

    The same command gives the same weights, bit for bit on a CPU.
    """
    outputs = OutputFiles.of(options, is_job=True)
    with with_resume_hint(outputs.save):
        lines, facts = _train(model, outputs, plan, **options)
    outputs.tell_saved(outputs.save)
    outputs.show(lambda: as_json(facts) if outputs.json else "\n".join(lines))


def _train(
    spec: str, outputs: OutputFiles, plan: bool, data: str, test: str | None, freeze: str | None,
    cka_sr: float | None, sparsity: float | None, method: str, checkpoints: Path | None, every: int | None,
    device: str | None, seed: int, **settings: Any,
) -> tuple[list[str], dict[str, Any]]:  # fmt: skip
    """Load what was named, train, and return what is printed, as lines and for JSON."""
    from netkin.applications.sparsity import sparsify
    from netkin.sources import load_data, load_model
    from netkin.training import Checkpoints, Recipe
    from netkin.training import train as fit
    from netkin.training.chance import chance_caveat
    from netkin.training.example_order import labelled_arrays

    require_device(device)
    if every is not None and checkpoints is None:
        raise click.UsageError("--every needs --checkpoints.")
    if settings["epochs"] is None and settings["steps"] is None:
        settings["epochs"] = EPOCHS
    recipe = Recipe(**settings)
    _require_own_folder(checkpoints, outputs)
    network = remember(load_model(spec, seed=seed)).to(device or "cpu")
    arrays = labelled_arrays(load_data(data, 10_000, models=[spec]), "`data`")
    tested = None if test is None else labelled_arrays(load_data(test, 10_000, models=[spec]), "`test`")
    lines = [f"{spec} on {data}, {len(arrays[1]):,} examples: {recipe.words}"]
    facts: dict[str, Any] = {"model": spec, "data": data, "recipe": recipe.words, "seed": seed}
    if plan:
        outputs.show_plan(fit.explain(network, arrays, recipe, test=tested, seed=seed))
    if sparsity is not None:
        masks = sparsify(network, sparsity, method=method, data=arrays, seed=seed)
        lines.append(f"sparsity {masks.sparsity:.4g} by {method}: {masks.left:,} of {masks.weights:,} weights are left")
        facts["sparsity"] = masks.sparsity
    with _hooks(network, recipe, (arrays, tested or arrays), freeze, cka_sr, seed) as hooks:
        kept = [Checkpoints(checkpoints, every)] if checkpoints else []
        how: dict[str, Any] = {"save": outputs.save, "overwrite": outputs.overwrite}
        history = fit(network, arrays, recipe, test=tested, seed=seed, hooks=[*hooks.values(), *kept], **how)
        if "freeze" in hooks:
            facts["frozen"] = hooks["freeze"].frozen
            lines.append(f"frozen at the end: {', '.join(facts['frozen']) or 'none'}")
        if "cka_sr" in hooks and hooks["cka_sr"].value is not None:
            facts["cka"] = float(hooks["cka_sr"].value)
            lines.append(f"sum of the CKA between layers, at the last step that counted: {facts['cka']:.4g}")
    lines += ["", *_table(history)]
    facts |= {"history": history, "caveats": []}
    if test is not None and tested is not None:
        caveat = chance_caveat({test: history[-1]["accuracy"]}, {test: tested[1]}, units="data sets", method=spec)
        facts["caveats"] = [str(caveat)] if caveat else []
        lines += [f"caveat: {sentence}" for sentence in facts["caveats"]]
    return lines, facts


@contextmanager
def _hooks(
    network: nn.Module, recipe: Recipe, data: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], freeze: str | None,
    cka_sr: float | None, seed: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Give the hooks of the training, and take them off the network afterwards."""
    from netkin.applications.freezing import FreezeTraining
    from netkin.applications.sparsity import CKASparsityLoss
    from netkin.training.example_order import batch_order

    arrays, (probe, _) = data
    with ExitStack() as stack:
        hooks: dict[str, Any] = {}
        if freeze is not None:
            steps = recipe.steps or (recipe.epochs or 0) * (batch_order(arrays, recipe, seed).per_epoch or 0)
            hooks["freeze"] = stack.enter_context(
                FreezeTraining(network, _schedule(freeze), steps=steps, probe=probe if freeze == "similarity" else None)
            )
        if cka_sr is not None:
            hooks["cka_sr"] = stack.enter_context(CKASparsityLoss(network, beta=cka_sr))
        yield hooks


def _schedule(typed: str) -> str | dict[str, float]:
    """Return the name of a schedule, or the fractions of layers.

    Example:
        >>> _schedule("conv1=0.3,conv2=0.6")
        {'conv1': 0.3, 'conv2': 0.6}
    """
    if "=" not in typed:
        return typed
    pairs = [part.partition("=") for part in typed.split(",")]
    try:
        return {layer.strip(): float(fraction) for layer, _, fraction in pairs}
    except ValueError:
        raise click.BadParameter(
            f"fractions are written as LAYER=FRACTION,..., as conv1=0.3,conv2=0.6; got {typed!r}.",
            param_hint="--freeze",
        ) from None


def _require_own_folder(folder: Path | None, outputs: OutputFiles) -> None:
    """Refuse a folder with the checkpoints of another training."""
    from netkin import jobs

    resumes = outputs.save is not None and jobs.beside(outputs.save).exists()
    if folder is not None and folder.is_dir() and any(folder.iterdir()) and not (outputs.overwrite or resumes):
        raise click.UsageError(
            f"--checkpoints names {folder}, which is not empty; give another folder, or --overwrite to write into it."
        )


def _table(history: Sequence[Record]) -> list[str]:
    """Return the records of some epochs, evenly spread, as the lines of a table."""
    shown = min(SHOWN, len(history))
    places = sorted({round(i * (len(history) - 1) / max(shown - 1, 1)) for i in range(shown)})
    columns = [name for name in ("epoch", "step", "loss", "test_loss", "accuracy") if name in history[0]]
    rows = [[_number(history[place][name]) for name in columns] for place in places]
    return align_columns([[name.replace("_", " ") for name in columns], *rows]).splitlines()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
