"""`netkin recommend`: which of several pretrained models to start from for some data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.documents import as_json
from netkin.cli.options import DEVICE, FILE, JSON, QUIET, refuse_absent_device
from netkin.cli.outputs import FORCE, Outputs
from netkin.cli.refusals import refusing
from netkin.errors import NameClash

if TYPE_CHECKING:
    from netkin.results import Ranking

# written out, since the library is imported when the command runs
SCORES = (
    "Scores: leep, nce, h_score, h_score_regularised, logme, transrate, gbc, knn, linear_probe, kernel_ridge_features, "
    "kernel_ridge_hadamard, kernel_ridge, mean_embedding_norm, adaptation_score."
)
DEFAULT = "h_score_regularised"
EXAMPLE = """\b
Example:
  netkin recommend one=netkin:digits@runs/digits/step_1.pt two=netkin:digits@runs/digits/step_2.pt --data digits:test
"""


@click.command(epilog=EXAMPLE)
@click.argument("models", nargs=-1, required=True, metavar="[NAME=]MODEL ...")
@click.option("--data", required=True, metavar="DATA", help="Your labelled examples; see `netkin data`.")
@click.option(
    "--score",
    "scores",
    multiple=True,
    metavar="NAME",
    help=f"Several may be given; the first decides the rank, by default {DEFAULT}. {SCORES}",
)
@click.option(
    "--examples",
    type=click.IntRange(min=0),
    default=2_000,
    show_default=True,
    metavar="N",
    help="So many examples, drawn over the whole of --data by --seed; 0 for all.",
)
@click.option("--no-errors", is_flag=True, help="No standard errors, for which each score is computed once per chunk.")
@click.option(
    "--chunks",
    type=click.IntRange(min=2),
    default=20,
    show_default=True,
    metavar="K",
    help="Chunks of examples, left out in turn for standard errors.",
)
@click.option(
    "--layer", metavar="NAME", help="The layer whose outputs are the features; by default the one before last."
)
@DEVICE
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of --examples.")
@click.option("--save", type=FILE, help="Write the ranking to this file, as which.netkin.")
@click.option("--report", type=FILE, help="Write a page for the browser to this file, as which.html.")
@click.option("--figure", type=FILE, help="Draw the scores into this file, as which.png, which.svg or which.pdf.")
@FORCE
@QUIET
@JSON
@refusing
def recommend(
    models: tuple[str, ...],
    data: str,
    save: Path | None,
    report: Path | None,
    figure: Path | None,
    force: bool,
    json: bool,
    **options: Any,
) -> None:
    """Rank pretrained MODELs by how much they promise for your data, without training any of them.

    Every model runs once over the examples, which reach a Hugging Face model as its own folder says. A model that can't
    be run on them is listed last, with the reason. NAME is what the table calls a model, instead of MODEL itself.
    """
    named = _named(models)
    outputs = Outputs(force, *named.values(), data)
    outputs.check("--save", save, "ranking")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    ranking = _ranked(named, data, **options)
    outputs.write(save, ranking.save, f"saved to {save}")
    outputs.draw(ranking, report, figure)
    click.echo(as_json(ranking) if json else str(ranking))
    outputs.finish()


def _named(models: tuple[str, ...]) -> dict[str, str]:
    """Return models by their names; one without NAME= is called what it is.

    Example:
        >>> _named(("small=netkin:tiny10,width=8", "netkin:tiny10,width=16"))
        {'small': 'netkin:tiny10,width=8', 'netkin:tiny10,width=16': 'netkin:tiny10,width=16'}
    """
    named: dict[str, str] = {}
    for one in models:
        found = None if Path(one).exists() else re.fullmatch(r"([^=:@/\\]+)=(.+)", one)
        name, model = found.groups() if found else (one, one)
        if name in named:
            raise NameClash(f"two models are named {name!r}; write NAME=MODEL to give each a name of its own.")
        named[name] = model
    return named


def _ranked(models: dict[str, str], data: str, **options: Any) -> Ranking:
    """Call the library."""
    from netkin.applications.transfer import recommend as rank

    refuse_absent_device(options["device"])
    first, *others = options["scores"] or (None,)
    return rank(
        models,
        data,
        score=first,
        scores=others,
        examples=options["examples"] or None,
        errors=not options["no_errors"],
        chunks=options["chunks"],
        layers=options["layer"],
        device=options["device"],
        seed=options["seed"],
    )
