"""`netkin stitch`: layers of one model joined to those of another, and the accuracy of the joined network."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from netkin.cli.compare import kind_of_file, open_statistics
from netkin.cli.options import (
    BALANCED,
    BATCH_SIZE,
    COUNT,
    DEVICE,
    EXAMPLES,
    FILE,
    KNOWN,
    NAMES,
    PLAN,
    RESUMED,
    command,
    declared,
    result_options,
    shape_option,
)
from netkin.cli.outputs import REFUSED, OutputFiles, as_json
from netkin.cli.running import (
    layers_by_model,
    load_batches,
    load_models,
    named_models,
    require_device,
    resume_hint,
    tell_random_weights,
)
from netkin.errors import InflatedWarning, NoValue

if TYPE_CHECKING:
    from netkin.applications.stitching import Stitch
    from netkin.results import Comparison, Comparisons


MOST = 6  # warnings shown


@command(
    "stitch netkin:digits@before.pt netkin:digits@after.pt --at relu2 --method least_squares --data digits:train "
    "--test digits:test",
    heading="Stitches",
)
@click.argument("models", nargs=-1, required=True, metavar="A B [C]...")
@click.option("--all", "whole", is_flag=True, help="Stitch every layer into the layer of the same name.")
@click.option("--matrix", is_flag=True, help="With --all: every layer into every layer.")
@click.option("--at", multiple=True, metavar="LAYER", help="Layer of the first model; can be repeated.")
@click.option(
    "--into",
    multiple=True,
    metavar="LAYER",
    help="Layer of the second model, for each --at; by default the same name as --at.",
)
@click.option(
    "--layers",
    multiple=True,
    metavar="PATTERN",
    help="With --all: layers by name, glob or type; a:PATTERN for those of the first of two models, b:PATTERN of the "
    "second. Can be repeated; see `netkin list layers`.",
)
@click.option(
    "--data",
    required=True,
    metavar="DATA",
    help="Examples on which the stitch is fitted, see `netkin list data`; or a file of `netkin collect`, from which "
    "direct methods read their maps.",
)
@click.option(
    "--test", metavar="DATA", help="Examples for evaluating the stitch; accuracy needs labels; by default --data."
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=["least_squares"],
    show_default=True,
    metavar="METHOD",
    help=f"Fitting method: {', '.join(KNOWN['stitching methods'])}; parameters as in 'reduced_rank(k=8)' or "
    "'task_loss(epochs=3)'. Can be repeated.",
)
@click.option("--measure", "measures", multiple=True, default=["cka"], show_default=True, metavar="NAME",
              help="Similarity of the layers to show beside the scores; see `netkin list measures`.")  # fmt: skip
@click.option("--score", "scores", multiple=True, metavar="NAME",
              help="Score of the stitch; by default relative_accuracy, agreement and cross_entropy. Scores: "
              f"{', '.join(KNOWN['stitching scores'])}.")  # fmt: skip
@declared("validation", of="stitch_all", metavar="DATA")
@declared("shape", f"One of {', '.join(KNOWN['shapes'])}.", of="stitch_all", multiple=True, callback=shape_option,
          metavar="NAME")  # fmt: skip
@declared("resize", of="stitch_all", type=click.Choice(["average", "bilinear", "nearest"]))
@EXAMPLES
@declared("test_examples", "They are sampled from all of --test.", of="stitch_all", type=COUNT, metavar="N")
@BALANCED
@BATCH_SIZE
@DEVICE
@declared("seed", "Also for the sample of --examples.", of="stitch_all", type=click.IntRange(min=0), metavar="N")
@NAMES
@click.option(
    "--map", "map_file", type=FILE, help="With one --at and one --method: write the stitch to this file, for `nk.load`."
)
@PLAN
@result_options("ab", "the result", more=f", as it grows; {RESUMED}")
def stitch(
    models: tuple[str, ...],
    whole: bool,
    matrix: bool,
    at: tuple[str, ...],
    into: tuple[str, ...],
    names: tuple[str, ...],
    map_file: Path | None,
    plan: bool,
    **options: Any,
) -> None:
    """Stitch layers of model A into model B: run A up to a layer, map its output, and continue with B.

    For each layer and method, the scores of the stitched network are shown beside the similarity of the layers. With
    more than two models all ordered pairs are stitched, and the mean and spread over them are shown.
    """
    named = named_models(models, names)
    outputs = OutputFiles.of(options, is_job=True)
    outputs.check("--map", map_file)
    if len(named) < 2:
        raise click.UsageError(
            "two models are needed, and one was given; to stitch a model with itself, name it twice."
        )
    if map_file and (len(named), len(at), len(options["methods"])) != (2, 1, 1):
        raise click.UsageError("--map writes one stitch: of two models, at one --at, by one --method.")
    made: list[Stitch] = []
    layers = _layers(options.pop("layers"), list(named))
    asked = {"pairs": _pairs(whole, matrix, at, into, layers), "layers": layers}
    if plan:
        _print_plan(named, outputs, **asked, **options)
    asked |= {"save": outputs.save, "overwrite": outputs.overwrite}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)  # the comparison carries these warnings
        found = _stitch(named, each=made.append if map_file else None, **asked, **options)
    if map_file and not made:
        click.echo(f"no map in {map_file}: there is no stitch", err=True)
    for one in made:
        outputs.write(map_file, one.save, f"map in {map_file}")
    outputs.deliver(found, text=lambda: as_json(found) if outputs.json else _as_text(found))
    if not all(one.complete for one in _comparisons(found)):
        raise KeyboardInterrupt(resume_hint(outputs.save))
    if not any(_has_values(one) for one in _comparisons(found)):
        click.echo("no stitch has a value; the reasons stand below the table", err=True)
        raise click.exceptions.Exit(REFUSED)


def _layers(texts: Sequence[str], names: Sequence[str]) -> Any:
    """Return which layers are examined, as the library calls it."""
    layers = layers_by_model(texts, names)
    if isinstance(layers, dict) and len(names) > 2:
        raise click.UsageError(f"layers of one model can be chosen among two models; got {len(names)}.")
    return layers


def _pairs(whole: bool, matrix: bool, at: tuple[str, ...], into: tuple[str, ...], layers: Any) -> Any:
    """Return which layers are joined, as the library calls it."""
    if whole == bool(at):
        raise click.UsageError("give either --all, or --at LAYER.")
    if at and (matrix or layers):
        raise click.UsageError(f"{'--matrix' if matrix else '--layers'} needs --all.")
    if into and len(into) != len(at):
        raise click.UsageError(f"each --at has one --into, or none has; got {len(at)} and {len(into)}.")
    return list(zip(at, into or at, strict=True)) if at else "all" if matrix else "corresponding"


def _print_plan(models: dict[str, str], outputs: OutputFiles, **options: Any) -> NoReturn:
    """Print what would be done, for the first two models, and exit with 1 where no pair can be joined."""
    from netkin.applications.stitching import explain_stitch

    if len(models) > 2:
        raise click.UsageError(f"--plan is for two models; got {len(models)}.")
    names = list(models)
    networks, fitting, judging, asked = _load(list(models.values()), **options)
    plan = explain_stitch(networks[0], networks[1], fitting, judging, names=(names[0], names[1]), **asked)
    facts = asdict(plan) | {"refused": {" into ".join(pair): reason for pair, reason in plan.refused.items()}}
    outputs.show_plan(plan, not plan.joined, facts)


def _stitch(models: dict[str, str], **options: Any) -> Comparison | Comparisons:
    """Load what was named and call the library."""
    from netkin.applications.stitching import stitch_all, stitch_many

    networks, fitting, judging, asked = _load(list(models.values()), **options)
    found: Comparison | Comparisons
    names = list(models)
    if len(names) == 2:
        pair = (names[0], names[1])
        found = stitch_all(networks[0], networks[1], fitting, judging, names=pair, partial=True, **asked)
    else:
        loaded = dict(zip(names, networks, strict=True))
        found = stitch_many(loaded, fitting, judging, partial=True, **asked)
    tell_random_weights(networks)
    return found


def _load(
    specs: list[str], data: str, test: str | None, validation: str | None, batch_size: int, **options: Any
) -> tuple[list[Any], Any, Any, dict[str, Any]]:
    """Return the models, the data to fit and to evaluate on, and the other options as the library calls them."""
    require_device(options["device"])
    if options["test_examples"] and not test:
        raise click.UsageError("--test-examples needs --test; without it, stitches are evaluated on --examples.")
    saved = kind_of_file(data) == "statistics"
    if saved and (len(specs) > 2 or not test or options["examples"]):
        raise click.UsageError(
            f"{data!r} is a file of statistics, which serves two models, needs --test and takes no --examples."
        )
    networks = load_models(specs)
    seed, balanced = options["seed"], options.pop("balanced")
    fitting = None if saved else load_batches(data, batch_size, options["examples"], seed, balanced, specs)
    options |= {"statistics": open_statistics(Path(data))} if saved else {}
    few = options["test_examples"]
    judging: Any = load_batches(test, batch_size, few, seed, balanced and few is not None, specs) if test else None
    if validation:
        options["validation"] = load_batches(validation, batch_size, None, seed, models=specs)
    several = {name: list(options.pop(name)) for name in ("methods", "measures", "scores")}
    return networks, fitting, judging, {**options, **{name: given for name, given in several.items() if given}}


def _has_values(found: Comparison) -> bool:
    """Return whether any stitch has a score."""
    return any(t.values.size > len(t.missing) for t in found.tables.values() if "method" in t.quantity.parameters)


def _comparisons(found: Comparison | Comparisons) -> list[Comparison]:
    from netkin.results import Comparison

    return [found] if isinstance(found, Comparison) else list(found.values())


def _as_text(found: Comparison | Comparisons) -> str:
    """Return the tables, of several pairs of models their means, and what to know before they are read."""
    from netkin.results import Comparison
    from netkin.results.text import terminal_width, wrapped

    if isinstance(found, Comparison):
        return str(found)
    try:
        means = str(found.spread())
    except NoValue as reason:
        means = str(reason)
    width, each = terminal_width(), list(found.values())
    lines = [f"{len(each)} ordered pairs of models", means, *(wrapped(reason, width) for reason in _missing(each))]
    sentences = [f"warning: {pair.a} into {pair.b}: {caveat}" for pair in each for caveat in pair.caveats]
    lines += ["\n" + wrapped(sentence, width) for sentence in sentences[:MOST]]
    if len(sentences) > MOST:
        lines.append(f"\nand {len(sentences) - MOST} more warnings, which a report and --json show")
    return "\n".join(lines)


def _missing(found: Sequence[Comparison]) -> list[str]:
    """Return why pairs that were requested have no value, the commonest reason first."""
    from netkin.results.labels import NOT_ASKED, reasons

    missing = {
        (f"{one.a} {table.id} {x}", f"{one.b} {y}"): reason
        for one in found
        for table in one.tables.values()
        for (x, y), reason in table.missing.items()
        if reason != NOT_ASKED
    }
    return list(reasons(missing, "value"))
