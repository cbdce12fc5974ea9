"""`netkin atoms`: the similarity of several networks by their filter atoms, without data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.options import FILE, JSON, NAMES, example, picture_options
from netkin.cli.outputs import FORCE, OutputFiles, as_json
from netkin.cli.running import load_models, model_names, tell_random_weights, with_refusals

if TYPE_CHECKING:
    from torch import nn


@click.command(epilog=example("atoms netkin:digits netkin:digits netkin:digits --atoms 6 --report networks.html"))
@click.argument("models", nargs=-1, required=True)
@click.option(
    "--atoms", type=click.IntRange(min=1), metavar="M", help="Fit shared coefficients first, with M atoms per layer."
)
@click.option(
    "--source",
    default="joint",
    show_default=True,
    metavar="MODEL",
    help="With --atoms: model whose coefficients are used, or `joint` for a fit to all.",
)
@click.option(
    "--block",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --atoms: block size, for networks of different widths; see the guide to filter subspaces.",
)
@click.option("--measure", type=click.Choice(["atom_cosine", "atom_angular"]), default="atom_cosine", show_default=True,
              help="Measure between the atoms.")  # fmt: skip
@click.option("--by-layer", is_flag=True, help="Also print a table for each layer.")
@click.option("--top", type=click.IntRange(min=1), metavar="K", help="Print only the K most similar networks for each.")
@click.option("--save", type=FILE, help="Write the comparison to this file, such as nets.netkin.")
@NAMES
@picture_options("nets", "the table")
@FORCE
@JSON
@with_refusals
def atoms(
    models: tuple[str, ...],
    top: int | None,
    save: Path | None,
    report: Path | None,
    figure: Path | None,
    force: bool,
    json: bool,
    **options: Any,
) -> None:
    """Compare networks by their filter atoms, each with every other, from their weights alone.

    Atoms are comparable only between networks that share their coefficients. For networks of plain convolutions,
    --atoms fits shared coefficients first and prints on stderr which share of each filter they explain.
    """
    outputs = OutputFiles(force, *models)
    outputs.check("--save", save, "comparison")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    if top and (save or report or figure):
        raise click.UsageError(
            "--top prints the nearest networks and makes no table to save or draw; leave out one of them."
        )
    if top and top >= len(models):
        raise click.UsageError(f"--top asks for {top} other networks, but there are only {len(models) - 1}.")
    networks = _networks(models, *(options.pop(name) for name in ("names", "atoms", "source", "block")))
    if top:
        _print_nearest(networks, top, json)
        return
    from netkin.applications.subspaces import atom_similarity

    found = atom_similarity(networks, options["measure"], by_layer=options["by_layer"])
    outputs.write(save, found.save, f"saved to {save}")
    outputs.draw(found, report, figure)
    click.echo(as_json(found) if json else str(found))
    outputs.finish()


def _networks(
    specs: Sequence[str], names: Sequence[str], atoms: int | None, source: str, block: int | None
) -> dict[str, nn.Module]:
    """Load the models that were named; with `atoms`, as networks that share their coefficients."""
    from netkin.applications.subspaces import share_coefficients

    if atoms is None and (block or source != "joint"):
        raise click.UsageError("--source and --block need --atoms, the number of atoms per layer.")
    names = model_names(specs, names)
    models = load_models(specs)
    tell_random_weights(models)
    named = dict(zip(names, models, strict=True))
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
