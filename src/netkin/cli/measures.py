"""`netkin measures`: what can be asked of two layers."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.documents import aligned, as_json
from netkin.cli.options import JSON
from netkin.cli.refusals import refusing
from netkin.errors import PackageWarning

if TYPE_CHECKING:
    from netkin.measures import Measure

EXAMPLE = """\b
Example:
  netkin measures procrustes_distance
"""


@click.command(epilog=EXAMPLE)
@click.argument("name", required=False)
@JSON
@refusing
def measures(name: str | None, json: bool) -> None:
    """List all measures, or tell all about the measure NAME."""
    from netkin.measures import broken_packages, find
    from netkin.measures import measures as all_measures

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackageWarning)  # said below, in a line each
        chosen = [find(name)] if name else list(all_measures().values())
    if json:
        click.echo(as_json([_document(measure) for measure in chosen]))
    else:
        click.echo(_described(chosen[0]) if name else _listed(chosen))
    for sentence in broken_packages().values():
        click.echo(f"warning: {sentence}", err=True)


def _listed(chosen: list[Measure]) -> str:
    return aligned([[m.name, _direction(m), _range(m.facts.bounds), m.summary] for m in chosen])


def _described(measure: Measure) -> str:
    document = _document(measure)
    words = {
        key.replace("_", " "): _in_words(value) for key, value in document.items() if key not in ("name", "summary")
    }
    return f"{measure.id}: {inspect.getdoc(measure.function)}\n\n{aligned(list(words.items()))}"


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


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return _range(value)
    if isinstance(value, dict):
        value = [f"{key}={setting}" for key, setting in value.items()]
    return ", ".join(value) or "none" if isinstance(value, list) else value
