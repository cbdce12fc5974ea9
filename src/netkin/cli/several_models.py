"""Commands about several models: `netkin recommend`, which suits some data; `netkin tasks`, each on its own data.

`netkin atoms` compares networks by their filter atoms, without data.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.compare import kind_of_file, open_statistics, require_no_result, warn_of_missing_parts
from netkin.cli.options import (
    COUNT,
    DEVICE,
    EXAMPLES,
    KNOWN,
    NAMES,
    PLAN,
    TRANSFORM,
    command,
    declared,
    is_typed,
    result_options,
    task_options,
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
from netkin.errors import NameClash

if TYPE_CHECKING:
    from torch import nn


BLOCKS = "measures layers pairs shape memory seeds independent_buckets"  # options of `netkin tasks` without --score
TASK2VEC = "samples independent"


@command("recommend one=netkin:digits@runs/digits/step_1.pt two=netkin:digits@runs/digits/step_2.pt --data digits:test")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--data", required=True, metavar="DATA", help="Your labelled examples; see `netkin list data`.")
@click.option(
    "--score",
    "scores",
    multiple=True,
    metavar="NAME",
    help="Transferability score; can be repeated. The first decides the rank; by default h_score_regularised, with "
    f"linear_probe beside it. Scores: {', '.join(KNOWN['transfer scores'])}.",
)
@EXAMPLES
@declared("errors", of="recommend")
@declared("chunks", of="recommend", type=click.IntRange(min=2), metavar="K")
@click.option("--layer", metavar="NAME", help="Layer whose outputs are the features; by default the last but one.")
@DEVICE
@declared("seed", of="recommend", type=int, metavar="N")
@NAMES
@TRANSFORM
@PLAN
@result_options("which", "the ranking", "the scores")
def recommend(models: tuple[str, ...], names: tuple[str, ...], data: str, plan: bool, **options: Any) -> None:
    """Rank pretrained models by how well they are expected to transfer to your data, without training.

    Every model runs once over the examples; for a Hugging Face model they are preprocessed as its folder specifies. A
    model that cannot run on them is listed last, with the reason.
    """
    named = named_models(models, names)
    outputs = OutputFiles.of(options)
    ranking = _rank(named, data, plan, **options)
    if plan:
        outputs.show_plan(ranking)
    outputs.deliver(ranking, ranking.save)


def _rank(models: dict[str, str], data: str, plan: bool, **options: Any) -> Any:
    """Call the library."""
    from netkin.applications.transfer import explain_recommend, recommend

    require_device(options["device"])
    first, *others = options["scores"] or (None,)  # beside scores that are named no others are shown
    return (explain_recommend if plan else recommend)(
        models,
        data,
        score=first,
        scores=others if first else None,
        examples=options["examples"],
        errors=options["errors"],
        chunks=options["chunks"],
        layers=options["layer"],
        device=options["device"],
        seed=options["seed"],
        transforms=functions_of(options["transforms"], 1),
    )


@command(
    "tasks seen=netkin:digits@digits.pt,digits:train fresh=netkin:digits@digits.pt,digits:test --examples 300 "
    '--layers "relu*" --report tasks.html',
    heading="Sketches",
)
@click.argument("tasks", nargs=-1, required=True, metavar="NAME=MODEL,DATA|NAME=STATISTICS...")
@click.option(
    "--score",
    type=click.Choice(KNOWN["task scores"]),
    help="Compare tasks by one number for each pair, not block by block; see `netkin list scores`.",
)
@declared("samples", "With --score task2vec.", of="task2vec", type=COUNT, metavar="N")
@declared("independent", of="task_similarity")
@task_options
@PLAN
@result_options("tasks", "the comparisons", "the blocks of all pairs")
def tasks(tasks: tuple[str, ...], plan: bool, **options: Any) -> None:
    """Compare tasks, block by block: models of any architecture, each with its own data of any size.

    Each model runs once over its data, forward and backward. Features and gradients are summed into random buckets
    (sketches), from which all pairs of tasks are compared; values are means over --seeds. STATISTICS is a file of
    sketches that `netkin collect` wrote for one model. With --score, such as task2vec, each pair of tasks gets one
    number; with task2vec, tasks that name the same model have the same weights, also if these are random.
    """
    _require_used_options(options["score"] or "")
    given = dict(map(_parse_task, tasks))
    if len(given) < len(tasks):
        names = [_parse_task(one)[0] for one in tasks]
        raise NameClash(f"two tasks are named {max(names, key=names.count)!r}; give each its own name.")
    outputs = OutputFiles.of(options)
    found: Any = (_score_tasks if options["score"] else _compare_tasks)(given, plan, **options)
    if plan:
        outputs.show_plan(found, bool(found.refused))
    outputs.deliver(found, found.save)


def _require_used_options(score: str) -> None:
    """Refuse options that do nothing with this score, or without one."""
    context = click.get_current_context()
    unused = {"--score": BLOCKS * bool(score), "--score task2vec": TASK2VEC * (not score.startswith("task2vec"))}
    for parameter in context.command.params:
        if is_typed(context, str(parameter.name)):
            for what, names in unused.items():
                if parameter.name in names.split():
                    verb = "does not go with" if names == BLOCKS else "needs"
                    raise click.UsageError(f"{parameter.opts[0]} {verb} {what}.")


def _parse_task(task: str) -> tuple[str, list[str]]:
    """Return the name of a task and its model and data, or the file of its sketches.

    Example:
        >>> _parse_task("t=netkin:tiny10,width=4@w.pt,images,size=64:DIR")
        ('t', ['netkin:tiny10,width=4@w.pt', 'images,size=64:DIR'])
    """
    name, equals, rest = task.partition("=")
    # an option such as width=4 belongs to what precedes it
    found = [name, *re.split(r",(?!\w+=)", rest, maxsplit=1)]
    if equals and name and rest and len(found) == 2 and kind_of_file(rest) == "statistics":
        return name, [rest]
    if equals and name and len(found) == 2:
        require_no_result(rest)
    if not (equals and len(found) == 3 and all(found)):
        raise click.BadParameter(
            f"a task is written NAME=MODEL,DATA, as in seen=netkin:digits,digits:train, or NAME=STATISTICS, a file of "
            f"sketches; got {task!r}.",
            param_hint="TASKS",
        )
    return name, found[1:]


def _load_tasks(
    given: dict[str, list[str]], device: str | None, examples: int | None, batch_size: int, seed: int, balanced: bool,
    same_weights: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return each task as a model with its data, or as the statistics in its file."""
    require_device(device)
    specs = {name: parts[0] for name, parts in given.items() if len(parts) == 2}
    models = dict(zip(specs, load_models(list(specs.values()), same_weights=same_weights), strict=True))
    tasks: dict[str, Any] = {}
    for name, parts in given.items():
        if name in models:
            tasks[name] = (models[name], load_batches(parts[1], batch_size, examples, seed, balanced, [parts[0]]))
        else:
            tasks[name] = open_statistics(Path(parts[0]))
            warn_of_missing_parts(tasks[name])
    return tasks


def _compare_tasks(given: dict[str, list[str]], plan: bool, independent_buckets: bool, **options: Any) -> Any:
    """Load what was named and call the library."""
    from netkin.applications.transfer import compare_tasks, explain_compare_tasks

    sampling = {name: options.pop(name) for name in ("batch_size", "seed", "balanced")}
    tasks = _load_tasks(given, options["device"], options["examples"], **sampling)
    options |= {name: list(options[name]) or None for name in ("measures", "layers")}
    options["transforms"] = functions_of(options["transforms"], 1)
    options = {name: value for name, value in options.items() if name not in ("score", *TASK2VEC.split())}
    return (explain_compare_tasks if plan else compare_tasks)(tasks, **options, share_buckets=not independent_buckets)


def _score_tasks(
    given: dict[str, list[str]], plan: bool, score: str, batch_size: int, seed: int, balanced: bool,
    samples: int | None, independent: bool, transforms: tuple[str, ...], **options: Any,
) -> Any:  # fmt: skip
    """Load what was named and call the library."""
    from netkin.applications.transfer import explain_task_similarity, task_similarity

    how = {name: options[name] for name in ("device", "examples", "exact_model")}
    of_one_network = score.startswith("task2vec") and not independent
    tasks = _load_tasks(given, how["device"], how["examples"], batch_size, seed, balanced, of_one_network)
    if score.startswith("task2vec"):
        how |= {"samples": samples, "seed": seed}
    compare = explain_task_similarity if plan else task_similarity
    return compare(tasks, score, independent=independent, transform=functions_of(transforms, 1), **how)


@command("atoms netkin:digits netkin:digits netkin:digits --atoms 6 --report networks.html", heading="Filter atoms")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option(
    "--atoms", type=click.IntRange(min=1), metavar="M", help="Fit shared coefficients first, with M atoms per layer."
)
@declared("source", "Needs --atoms.", of="share_coefficients", metavar="NAME")
@declared("block", "Needs --atoms.", of="share_coefficients", type=COUNT, metavar="N")
@click.option("--measure", type=click.Choice(["atom_cosine", "atom_angular"]), default="atom_cosine", show_default=True,
              help="Measure between the atoms.")  # fmt: skip
@declared("gauge", of="atom_similarity", type=click.Choice(["stored", "orthonormal"]))
@click.option("--by-layer", is_flag=True, help="Also print a table for each layer.")
@click.option("--top", type=click.IntRange(min=1), metavar="K", help="Print only the K most similar networks for each.")
@NAMES
@result_options("nets", drawn="the table")
def atoms(models: tuple[str, ...], names: tuple[str, ...], top: int | None, **options: Any) -> None:
    """Compare networks by their filter atoms, each with every other, from their weights alone.

    Atoms are comparable only between networks that share their coefficients. For networks of plain convolutions,
    --atoms fits shared coefficients first and prints on stderr which share of each filter they explain.
    """
    named = named_models(models, names)
    outputs = OutputFiles.of(options)
    if top and outputs.places:
        raise click.UsageError(
            "--top prints the nearest networks and makes no table to save or draw; leave out one of them."
        )
    if top and top >= len(models):
        raise click.UsageError(f"--top asks for {top} other networks, but there are only {len(models) - 1}.")
    networks = _networks(named, *(options.pop(name) for name in ("atoms", "source", "block")))
    if top:
        _print_nearest(networks, top, outputs.json)
        return
    from netkin.applications.subspaces import atom_similarity

    found = atom_similarity(networks, options["measure"], gauge=options["gauge"], by_layer=options["by_layer"])
    outputs.deliver(found, found.save)


def _networks(specs: dict[str, str], atoms: int | None, source: str, block: int | None) -> dict[str, nn.Module]:
    """Load the models that were named; with `atoms`, as networks that share their coefficients."""
    from netkin.applications.subspaces import share_coefficients

    if atoms is None and (block or source != "joint"):
        raise click.UsageError("--source and --block need --atoms, the number of atoms per layer.")
    models = load_models(list(specs.values()))
    tell_random_weights(models)
    named = dict(zip(specs, models, strict=True))
    if atoms is None:
        return named
    shared = share_coefficients(named, atoms, source=source, block=block)
    click.echo(str(shared), err=True)
    return dict(shared.models)


def _print_nearest(networks: dict[str, nn.Module], top: int, json: bool) -> None:
    from netkin.applications.subspaces import nearest_networks

    found = nearest_networks(networks, top)
    listed = {name: [{"network": other, "atom_cosine": value} for other, value in found[name]] for name in found.names}
    click.echo(as_json(listed) if json else str(found))
