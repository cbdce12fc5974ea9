"""The page and the figure of a federation: accuracy by round, similar clients, and failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from netkin.reporting.grids import Grid, grid_of
from netkin.reporting.page.document import (
    Markup,
    document,
    facts,
    folded,
    joined,
    name,
    origins,
    plain_table,
    tag,
    toolbar,
    warnings,
)
from netkin.reporting.page.heatmap import card, embedded_tables, figure_of, missing_values, values_class
from netkin.reporting.page.svg import figure_of_curve, map_figures
from netkin.reporting.words import number
from netkin.results import Comparison, Federation, Values
from netkin.results.caveats import Caveat
from netkin.results.federation import COLUMNS
from netkin.results.labels import plural
from netkin.results.packing import document as described

FEW = 7  # clients that have a line each; of more, the mean, the lowest and the highest are drawn
LISTED = 24  # clients up to which their table is open
HEADS = {"asked": "updates asked for", "counted": "updates that counted"}
MOST = 3  # faults of clients that are listed above the numbers
HONEST = (
    "Nothing here is anonymous: without secure aggregation or added noise, what travels can give examples away. "
    "Clients with similar atoms may have similar data, or only as many steps from the same start."
)
CLUSTERS = (
    "Clients of one cluster stand together, with lines between clusters. Average linkage finds these, as many as have "
    "the largest mean silhouette: at least two, also where there are no groups."
)

Drawn = tuple[tuple[str, str], Values, Grid]  # what rows and columns are, the table, the heatmap


def federation_page(found: Federation) -> str:
    """Return the HTML page of a federation."""
    drawn = federation_heatmaps(found)
    data = embedded_tables([(*sides, table) for sides, table, _ in drawn])
    data |= {"table": _table(found), "name": f"{found.algorithm} federation"}
    kind = f"federation {values_class([grid for _, _, grid in drawn])}"
    bar = toolbar(best=None, cells=bool(drawn))
    parts, versions = _main(found, drawn), [found.version]
    documents = [described(found)]
    return document(
        found.title, _sentence(found), parts, data, documents, kind=kind, versions=versions, controls=bar, note=HONEST
    )


def _sentence(found: Federation) -> str:
    """Return the one sentence that says what became of the clients."""
    said = "No client was tested"
    losses = [one.loss for one in found.rounds if one.loss is not None]
    if found.accuracy:
        ranked = sorted(found.accuracy, key=lambda client: found.accuracy[client])
        low, high = (f"{found.accuracy[client]:.4f} (client {client})" for client in (ranked[0], ranked[-1]))
        said = (
            f"The mean accuracy of {plural(len(ranked), 'client')} is {found.mean_accuracy:.4f}, from {low} to {high}"
        )
    elif losses:
        said += f"; their mean training loss went from {losses[0]:.4f} to {losses[-1]:.4f}"
    asked = sum(len(one.asked) for one in found.rounds)
    lost = sum(len({*one.asked} - {*one.counted}) for one in found.rounds)
    return f"{said}. {lost} of {plural(asked, 'update')} did not count." if lost else f"{said}."


def _main(found: Federation, drawn: Sequence[Drawn]) -> Iterator[Markup | None]:
    source = f"{found.coefficients} coefficients" if found.coefficients else "no personal atoms"
    size = plural(sum(found.examples.values()), "example")
    yield facts([found.algorithm, source, plural(len(found.clients), "client"), plural(len(found.rounds), "round"),
                 size, found.created[:10]])  # fmt: skip
    yield warnings(_caveats(found))
    yield _by_round(found)
    yield _clients(found, drawn)
    if found.similarity is not None:
        yield _similarity(found.groups(), len(drawn) - 1, drawn[-1])
    yield _faults(found)
    yield _origins(found)


def _caveats(found: Federation) -> list[Caveat]:
    """Return what to know before the numbers are read: what went wrong with clients, and with their similarity."""
    told = [
        Caveat("fault", f"Round {one.round}, client {client}: {one.fault_text(client)}.")
        for one in found.rounds
        for client in one.faults
    ]
    more = f"{plural(len(told) - MOST, 'more fault')} of clients; all are listed below."
    told[MOST:] = [Caveat("more-faults", more)] if len(told) > MOST else []
    for client, why in found.untuned.items():
        told.append(Caveat("not-tuned", f"Client {client} could not be fine-tuned: {why}."))
    for client, why in found.unjudged.items():
        told.append(Caveat("not-tested", f"Client {client} was not tested: {why}."))
    return [*found.caveats, *told, *(found.similarity.caveats if found.similarity is not None else ())]


# --- by round ---------------------------------------------------------------------------------------------------------


def accuracy_curve(found: Federation) -> dict[str, list[Any]]:
    """Return the mean accuracy by round, and that of each client, or of many the lowest and the highest."""
    rounds = found.accuracies
    curve: dict[str, list[Any]] = {"round": list(rounds)}
    curve["mean"] = [float(np.mean(list(own.values()))) for own in rounds.values()]
    if len(found.clients) <= FEW:
        return curve | {client: [own.get(client) for own in rounds.values()] for client in found.clients}
    ends = {"highest": max, "lowest": min}
    return curve | {word: [choose(own.values()) for own in rounds.values()] for word, choose in ends.items()}


def _by_round(found: Federation) -> Markup:
    numbers, losses = ([getattr(one, key) for one in found.rounds] for key in ("round", "loss"))
    charts = [figure_of_curve("Accuracy", accuracy_curve(found))] if found.accuracies else []
    charts.append(
        figure_of_curve("Training loss", {"round": numbers, "mean": losses}, "of the round's clients, before averaging")
    )
    card = tag("div", tag("div", *charts, class_="curves"), class_="card")
    words = (
        "" if found.accuracies else "Clients were not tested between rounds; `test_every=1` does so after every round."
    )
    return tag("section", tag("h2", "By round", class_="quiet"), tag("p", words) if words else None, card)


def _sides(sides: tuple[str, str]) -> Markup:
    return tag("p", f"↓ {sides[0]}  → {sides[1]}", class_="axes")


# --- clients ----------------------------------------------------------------------------------------------------------


def _clients(found: Federation, drawn: Sequence[Drawn]) -> Markup:
    """Return the accuracy of each client by round, beside the table of the clients."""
    head, rows = _table(found)
    told = [[name(client), *("–" if cell is None else number(cell) if isinstance(cell, float) else f"{cell:,}"
                             for cell in rest)] for client, *rest in rows]  # fmt: skip
    table = plain_table(head, told, kind="numbers", label="The clients")
    cards = [tag("div", table, class_="card") if len(rows) <= LISTED else folded("Each of them", table)]
    for place, (sides, own, grid) in enumerate(drawn):
        if own.id == "accuracy":
            heading = joined(tag("h3", "Accuracy of each client"), _sides(sides))
            caption = "accuracy: clients in rows, rounds in columns"
            cards.insert(0, figure_of(grid, caption, f"table {place} 0", missing_values(grid), heading=heading))
    return tag("section", tag("h2", "The clients"), tag("div", *cards, class_="cards"), data_chosen=True)


def _table(found: Federation) -> tuple[list[str], list[list[Any]]]:
    """Return the heads and the rows of the table of clients."""
    rows = found.rows()
    columns = rows[0] if rows else COLUMNS
    return [HEADS.get(column, column) for column in columns], [list(row.values()) for row in rows]


def _faults(found: Federation) -> Markup | None:
    if not found.faults:
        return None
    rows = [[one.round, name(client), one.fault_text(client)] for one in found.rounds for client in one.faults]
    table = plain_table(["round", "client", "what went wrong"], rows, label="Faults of clients")
    return tag("section", tag("h2", "Faults of clients"), tag("div", table, class_="card"))


# --- similarity -------------------------------------------------------------------------------------------------------


def federation_heatmaps(found: Federation) -> list[Drawn]:
    """Return the heatmaps: what their rows and columns are, the table, and the picture."""
    tables = [(("clients", "rounds"), one, grid_of(one)) for one in (found.accuracy_table(),) if one is not None]
    if found.similarity is not None and found.clusters is not None:
        tables.append((("clients", "clients"), *by_clusters(found.similarity, found.clusters)))
    return tables


def by_clusters(similarity: Comparison, clusters: Sequence[int]) -> tuple[Values, Grid]:
    """Return the similarity with the clients of each cluster beside each other, and its heatmap."""
    table, order = next(iter(similarity.tables.values())), np.argsort(clusters, kind="stable").tolist()
    names, groups = (tuple(own[k] for k in order) for own in (table.layers_a, [f"cluster {k + 1}" for k in clusters]))
    moved = replace(table, layers_a=names, layers_b=names, values=table.values[np.ix_(order, order)])
    return moved, replace(grid_of(moved), models=groups)


def _similarity(groups: Sequence[Sequence[str]], place: int, drawn: Drawn) -> Markup:
    sides, table, grid = drawn
    named = [f"cluster {k}: {', '.join(own)}" for k, own in enumerate(groups, start=1)]
    picture = card(table, grid, f"table {place} 0", f"{grid.id}: clients in rows and in columns", axes=_sides(sides))
    maps = map_figures(table)
    parts = [
        tag("p", CLUSTERS),
        tag("ul", *(tag("li", one) for one in named)),
        tag("div", picture, *maps, class_="cards mapped" if maps else "cards"),
    ]
    return tag("section", tag("h2", "Which clients are alike"), *parts, data_chosen=True)


# --- origins ----------------------------------------------------------------------------------------------------------


def _origins(found: Federation) -> Markup:
    told: dict[str, Any] = {
        "algorithm": found.algorithm, "coefficients": found.coefficients or "not apart from the rest",
        "what travels": found.travels_in_words, "what that leaks": found.leaks, "seed": found.seed,
        "made": found.created, "netkin": found.version,
    }  # fmt: skip
    way = {True: "travels", False: "stays"}
    rows = [[name(weight), part, way[weight in found.travels]] for weight, part in found.parts.items()]
    weights = folded("The weights", plain_table(["weight", "part", "in each round"], rows, label="The weights"))
    return origins(told, found.provenance, weights)
