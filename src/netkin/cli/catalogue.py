"""`netkin list`: measures, kinds of data, scores of models and of stitches, and the layers of a model."""

from __future__ import annotations

import inspect
import math
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.options import JSON, Commands, command, example
from netkin.cli.outputs import align_columns, as_json
from netkin.errors import PackageWarning, UnknownName, did_you_mean

if TYPE_CHECKING:
    from netkin.measures import Measure
    from netkin.results.quantity import Quantity

WORDS = ("name", "what", "where", "example", "options")  # on a kind of data


@click.group("list", cls=Commands, epilog=example("list measures"))
def listing() -> None:
    """List measures, kinds of data, scores, or the layers of a model."""


@command("list measures procrustes_distance", listing)
@click.argument("name", required=False)
@JSON
def measures(name: str | None, json: bool) -> None:
    """List all measures, or describe the measure NAME."""
    from netkin.measures import broken_packages, find
    from netkin.measures import measures as all_measures

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackageWarning)  # said below, in a line each
        chosen = [find(name)] if name else list(all_measures().values())
    if json:
        click.echo(as_json([_document(measure) for measure in chosen]))
    else:
        click.echo(_describe_measure(chosen[0]) if name else _list_measures(chosen))
    for sentence in broken_packages().values():
        click.echo(f"warning: {sentence}", err=True)


def _list_measures(chosen: list[Measure]) -> str:
    return align_columns([[m.name, _direction(m), _range(m.facts.bounds), m.summary] for m in chosen])


def _describe_measure(measure: Measure) -> str:
    document = _document(measure)
    words = {
        key.replace("_", " "): _as_text(value) for key, value in document.items() if key not in ("name", "summary")
    }
    return f"{measure.id}: {inspect.getdoc(measure.function)}\n\n{align_columns(list(words.items()))}"


def _document(measure: Measure) -> dict[str, Any]:
    facts = measure.facts
    return {
        "name": measure.name,
        "summary": measure.summary,
        "direction": _direction(measure),
        "bounds": facts.bounds,
        "symmetric": facts.symmetric,
        "is_metric": facts.is_metric,
        "unchanged_by": sorted(facts.unchanged_by),
        "parameters": measure.settings,
        "reads": facts.reads.__name__,
        "convention": facts.convention,
        "reference": facts.reference,
    }


def _direction(measure: Measure) -> str:
    return "similarity" if measure.facts.higher_is_closer else "distance"


def _range(bounds: tuple[float, float]) -> str:
    return "..".join(_number(bound) for bound in bounds)


def _number(bound: float) -> str:
    return f"{bound:.4g}" if math.isfinite(bound) else f"{bound:.0f}".replace("inf", "∞")


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return _range(value)
    if isinstance(value, dict):
        value = [f"{key}={setting}" for key, setting in value.items()]
    return ", ".join(value) or "none" if isinstance(value, list) else value


@command("list layers netkin:tiny10", listing, heading="Layers")
@click.argument("model")
@click.option("--all", "every", is_flag=True, help="List every module, not only the default layers.")
@JSON
def layers(model: str, every: bool, json: bool) -> None:
    """List the layers of MODEL that are compared by default, with their types."""
    from netkin.representations.layers import layers as default_layers
    from netkin.representations.layers import modules
    from netkin.sources import load_model

    loaded = load_model(model)
    types = {name: type(module).__name__ for name, module in modules(loaded).items()}
    names = [name for name in types if name] if every else default_layers(loaded)
    rows = [{"name": name, "type": types[name]} for name in names]
    click.echo(as_json(rows) if json else align_columns([[row["name"], row["type"]] for row in rows]))


@command("list data", listing)
@JSON
def data(json: bool) -> None:
    """List the kinds of data that --data accepts, and where each is expected."""
    from netkin.sources.datasets import CATALOGUE

    rows = [{word: getattr(source, word) for word in WORDS} for source in CATALOGUE]
    click.echo(as_json(rows) if json else "\n\n".join(map(_describe_source, rows)))


def _describe_source(row: dict[str, str]) -> str:
    details = [row["what"], f"where: {row['where']}", f"example: --data {row['example']}"]
    details += [f"options: {row['options']}"] if row["options"] else []
    return "\n".join([row["name"], *map(_wrap, details)])


def _wrap(text: str) -> str:
    """Return `text` in lines of a hundred characters; commands and names are not broken."""
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


@command("list scores h_score", listing)
@click.argument("name", required=False)
@JSON
def scores(name: str | None, json: bool) -> None:
    """List the scores of `netkin recommend`, `netkin tasks` and `netkin stitch`, or describe the score NAME."""
    known = _quantities()
    if name is not None and name not in known:
        raise UnknownName(f"no score named {name!r}{did_you_mean(name, known) or ';'} `netkin list scores` lists all.")
    rows = [
        {
            "name": quantity.id,
            "command": command,
            "direction": "higher is better" if quantity.higher_is_closer else "lower is better",
            "bounds": quantity.bounds,
            "unit": quantity.unit,
            "convention": quantity.convention,
            "means": quantity.means,
            "cannot_see": quantity.cannot_see,
            "reference": quantity.reference,
        }
        for command, quantity in known.values()
        if name in (None, quantity.id)
    ]
    if json:
        click.echo(as_json(rows))
    elif name:
        facts = [(key.replace("_", " "), _as_text(value)) for key, value in rows[0].items() if value and key != "name"]
        click.echo(f"{name}\n\n{align_columns(facts)}")
    else:
        columns = ("name", "command", "direction", "bounds", "convention")
        click.echo(align_columns([[_as_text(row[column]) for column in columns] for row in rows]))


def _quantities() -> dict[str, tuple[str, Quantity]]:
    """Return each score by its name, with the command that computes it."""
    from netkin.applications.stitching.evaluating import SCORES as STITCHES
    from netkin.applications.transfer import SCORES as MODELS
    from netkin.applications.transfer.task_similarity import SCORES as TASKS

    scores = [("recommend", score.quantity) for score in MODELS.values()]
    scores += [("tasks", score.quantity) for score in TASKS.values()]
    scores += [("stitch", score.quantity) for score in STITCHES.values()]
    return {quantity.id: (command, quantity) for command, quantity in scores}
