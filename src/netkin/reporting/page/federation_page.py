"""The page of a federation: accuracy by round, similar clients, and failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from netkin.reporting.blocks import Heatmap, Name, Page, PageBlock, Section, Table, Text
from netkin.reporting.grids import Grid, grid_of
from netkin.reporting.parts import curve, maps_of, measured, missing_values, origins, table_of
from netkin.reporting.words import number
from netkin.results import Comparison, Federation, Values
from netkin.results.caveats import Caveat
from netkin.results.labels import plural

FEW = 7  # clients that have a line each; of more, the mean, the lowest and the highest are drawn
LISTED = 24  # clients up to which their table is open
HEADS = {"asked": "updates asked for", "counted": "updates that counted"}
MOST = 3  # faults of clients that are listed above the numbers
HONEST = "Nothing here is anonymous: without secure aggregation or added noise, what travels can give examples away."
ALIKE = "Clients with similar atoms may have similar data, or only as many steps from the same start."
CLUSTERS = (
    "Clients of one cluster stand together, with lines between clusters. Average linkage finds these, as many as have "
    "the largest mean silhouette: at least two, also where there are no groups."
)
UNTESTED = "Clients were not tested between rounds; `test_every=1` does so after every round."


def federation_page(federation: Federation) -> Page:
    """Return the page of a federation."""
    source = f"{federation.coefficients} coefficients" if federation.coefficients else "no personal atoms"
    size = plural(sum(federation.examples.values()), "example")
    counts = [plural(len(federation.clients), "client"), plural(len(federation.rounds), "round")]
    return Page(
        title=federation.title,
        sentence=_sentence(federation),
        facts=[federation.algorithm, source, *counts, size, federation.created[:10]],
        caveats=_caveats(federation),
        blocks=[_by_round(federation), _clients(federation), _similarity(federation), _faults(federation)],
        origins=_origins(federation),
        style="federation",
        versions=[federation.version],
        note=f"{HONEST} {ALIKE}" if federation.coefficients else HONEST,
        name=[f"{federation.algorithm} federation"],
        csv=table_of(federation),
        results=[federation],
    )


def _sentence(federation: Federation) -> str:
    """Return the one sentence that says what became of the clients."""
    said = "No client was tested"
    losses = [one.loss for one in federation.rounds if one.loss is not None]
    if federation.accuracy:
        ranked = sorted(federation.accuracy, key=lambda client: federation.accuracy[client])
        low, high = (f"{federation.accuracy[client]:.4f} (client {client})" for client in (ranked[0], ranked[-1]))
        mean = f"{federation.mean_accuracy:.4f}"
        said = f"The mean accuracy of {plural(len(ranked), 'client')} is {mean}, from {low} to {high}"
    elif losses:
        said += f"; their mean training loss went from {losses[0]:.4f} to {losses[-1]:.4f}"
    asked = sum(len(one.asked) for one in federation.rounds)
    lost = sum(len({*one.asked} - {*one.counted}) for one in federation.rounds)
    return f"{said}. {lost} of {plural(asked, 'update')} did not count." if lost else f"{said}."


def _caveats(federation: Federation) -> list[Caveat]:
    """Return what to know before the numbers are read: what went wrong with clients, and with their similarity."""
    told = [
        Caveat("fault", f"Round {one.round}, client {client}: {one.fault_text(client)}.")
        for one in federation.rounds
        for client in one.faults
    ]
    more = f"{plural(len(told) - MOST, 'more fault')} of clients; all are listed below."
    told[MOST:] = [Caveat("more-faults", more)] if len(told) > MOST else []
    for client, why in federation.untuned.items():
        told.append(Caveat("not-tuned", f"Client {client} could not be fine-tuned: {why}."))
    for client, why in federation.unjudged.items():
        told.append(Caveat("not-tested", f"Client {client} was not tested: {why}."))
    return [*federation.caveats, *told, *(federation.similarity.caveats if federation.similarity is not None else ())]


def _by_round(federation: Federation) -> Section:
    """Return the mean accuracy by round with that of each client, or of many the ends; and the training loss."""
    rounds = federation.accuracies
    accuracy: dict[str, list[Any]] = {"round": list(rounds)}
    accuracy["mean"] = [float(np.mean(list(tested.values()))) for tested in rounds.values()]
    if len(federation.clients) <= FEW:
        accuracy |= {client: [tested.get(client) for tested in rounds.values()] for client in federation.clients}
    else:
        ends = {"highest": max, "lowest": min}
        accuracy |= {word: [choose(tested.values()) for tested in rounds.values()] for word, choose in ends.items()}
    numbers, losses = ([getattr(one, key) for one in federation.rounds] for key in ("round", "loss"))
    note = "of the round's clients, before averaging"
    charts = [
        curve("Accuracy", accuracy, "accuracy"),
        curve("Training loss", {"round": numbers, "mean": losses}, "loss", note),
    ]
    card = Section("", [Section("", charts, "curves")], "card")
    return Section("By round", [None if rounds else Text(UNTESTED), card], quiet=True)


# --- clients ----------------------------------------------------------------------------------------------------------


def _clients(federation: Federation) -> Section:
    """Return the accuracy of each client by round, beside the table of the clients."""
    columns, rows = table_of(federation)
    cells = [
        [Name(client), *("–" if cell is None else number(cell) if isinstance(cell, float) else f"{cell:,}"
                         for cell in rest)]
        for client, *rest in rows
    ]  # fmt: skip
    many = len(rows) > LISTED
    head = [HEADS.get(column, column) for column in columns]
    table = Table(head, cells, "Each of them" if many else "", "The clients", "numbers", folded=many)
    by_round, heatmap = federation.accuracy_table(), None
    if by_round is not None:
        grid = grid_of(by_round)
        heatmap = Heatmap(
            grid, "accuracy of clients", "accuracy: clients in rows, rounds in columns",
            title=Name("Accuracy of each client"), axes=("↓ clients  → rounds",), sides=("clients", "rounds"),
            notes=[missing_values(grid)], table=by_round,
        )  # fmt: skip
    return Section("The clients", [Section("", [heatmap, table], "cards")])


def _faults(federation: Federation) -> Section | None:
    if not federation.faults:
        return None
    rows = [[one.round, Name(client), one.fault_text(client)] for one in federation.rounds for client in one.faults]
    return Section(
        "Faults of clients", [Table(["round", "client", "what went wrong"], rows, label="Faults of clients")]
    )


# --- similarity -------------------------------------------------------------------------------------------------------


def _similarity(federation: Federation) -> Section | None:
    if federation.similarity is None or federation.clusters is None:
        return None
    table, grid = by_clusters(federation.similarity, federation.clusters)
    named = [f"cluster {k}: {', '.join(own)}" for k, own in enumerate(federation.groups(), start=1)]
    caption = f"{grid.id}: clients in rows and in columns"
    heatmap = measured(
        table, grid, "similarity of clients", caption, axes=("↓ clients  → clients",), sides=("clients", "clients")
    )
    maps = maps_of(table)
    cards = Section("", [heatmap, *maps], "cards", "mapped" if maps else "")
    return Section("Which clients are alike", [Text(CLUSTERS, items=named), cards])


def by_clusters(similarity: Comparison, clusters: Sequence[int]) -> tuple[Values, Grid]:
    """Return the similarity with the clients of each cluster beside each other, and its heatmap."""
    table, order = next(iter(similarity.tables.values())), np.argsort(clusters, kind="stable").tolist()
    names, groups = (tuple(own[k] for k in order) for own in (table.layers_a, [f"cluster {k + 1}" for k in clusters]))
    moved = replace(table, layers_a=names, layers_b=names, values=table.values[np.ix_(order, order)])
    return moved, replace(grid_of(moved), models=groups)


# --- origins ----------------------------------------------------------------------------------------------------------


def _origins(federation: Federation) -> list[PageBlock | None]:
    told: dict[str, Any] = {
        "algorithm": federation.algorithm, "coefficients": federation.coefficients or "trained as all other weights",
        "what travels": federation.travels_in_words, "what that leaks": federation.leaks, "seed": federation.seed,
        "made": federation.created, "netkin": federation.version,
    }  # fmt: skip
    way = {True: "travels", False: "stays"}
    rows = [[Name(weight), part, way[weight in federation.travels]] for weight, part in federation.parts.items()]
    weights = Table(["weight", "part", "in each round"], rows, "The weights", "The weights", folded=True)
    return origins(told, federation.provenance, weights)
