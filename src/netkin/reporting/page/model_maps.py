"""Many models on one page: means of every pair, means layer by layer, a tree and places in a plane."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from netkin.errors import NoValue
from netkin.reporting.grids import Grid
from netkin.reporting.page.document import Markup, joined, name, tag, warnings
from netkin.reporting.page.heatmap import figure_of, holes
from netkin.reporting.words import shortened
from netkin.results import Comparison, Spread, Values
from netkin.results.labels import is_worth

MEANS = "Each cell is the mean over layers of the same name or, where none is shared, over each layer's best match."
BLOCKS = (
    "Each cell is a layer of one task with a layer of another. Colours of one picture can't be held against another's."
)
SPREAD = "Mean ± standard deviation over {counted}. Layers that not all models have are left out."
MOST = 200  # networks that a tree can show
ROW, WIDTH, LETTER = 16, 460, 6.6  # pixels
TREE = "Average linkage of angles, arccos of the similarity. Groups that join far left have little in common."
PLANE = "Classical scaling of the same angles; it keeps {share:.0%} of their squared spread."


def summary_section(summaries: Sequence[Grid], note: str) -> Markup | None:
    """Return the heatmaps of models by models, or of the blocks of tasks; None where there are none."""
    if not summaries:
        return None
    blocks = bool(summaries[0].models)
    words = tag("p", f"{BLOCKS if blocks else MEANS} Choose a cell to open its comparison.")
    title = "Tasks by tasks, block by block" if blocks else "Models by models"
    figures = [
        figure_of(grid, f"{grid.id}, {title.lower()}", f"summary {k}", holes(grid), heading=_heading(grid))
        for k, grid in enumerate(summaries)
    ]
    cards = tag("div", *figures, class_="cards")
    return tag("section", tag("h2", title), words, warnings([note] if note else []), cards, class_="summary")


def _heading(grid: Grid) -> Markup:
    return joined(tag("h3", grid.id), tag("p", grid.note, class_="facts-line") if grid.note else None)


def spread_section(comparisons: Sequence[Comparison]) -> Markup | None:
    """Return means and deviations over comparisons with stitches, or None where there are none or one alone."""
    if len(comparisons) < 2 or not any(is_worth(t) for c in comparisons for t in c.tables.values()):
        return None
    try:
        spread = Spread.of(comparisons)
    except NoValue:  # no names of layers in common
        return None
    words = tag("p", SPREAD.format(counted=spread.told_count()))
    tables = _listed(spread) if spread.is_profile else _matrices(spread)
    cards = [tag("div", tag("h3", title), tag("div", table, class_="scroll"), class_="card") for title, table in tables]
    return tag(
        "section",
        tag("h2", "Layer by layer, over all pairs of models"),
        words,
        tag("div", *cards, class_="cards"),
        class_="spread",
    )


def _listed(spread: Spread) -> Iterator[tuple[str, Markup]]:
    """Yield for the similarities and each score a table of layers by methods."""
    for word, side_by_side in spread.blocks().items():
        rows = [(spread.label(i, j), [cells.written(i, j) for cells in side_by_side]) for i, j in spread.pairs]
        yield word, _table("layer", [cells.column for cells in side_by_side], rows)


def _matrices(spread: Spread) -> Iterator[tuple[str, Markup]]:
    """Yield for each measure a table of layers by layers."""
    for id_, cells in spread.tables.items():
        places = range(len(spread.layers_b))
        rows = [(a, [cells.written(i, j) for j in places]) for i, a in enumerate(spread.layers_a)]
        yield id_, _table("from ↓ into →", spread.layers_b, rows)


def _table(corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Markup:
    head = tag("tr", tag("th", corner, scope="col"), *(tag("th", name(column), scope="col") for column in columns))
    body = [tag("tr", tag("th", name(label), scope="row"), *map(_cell, texts)) for label, texts in rows]
    return tag("table", tag("thead", head), tag("tbody", *body), class_="plain numbers")


def _cell(text: str) -> Markup:
    return tag("td", text)


def network_map(comparison: Comparison, what: str = "networks") -> Markup | None:
    """Return a tree and a plane of the networks by the first table, or None where they are few, many or unlike.

    `what` they are called stands in the heading.
    """
    table = next(iter(comparison.tables.values()))
    if not 3 <= len(table.layers_a) <= MOST or not np.isfinite(table.values).all():
        return None
    angles, names = angles_of(table), shortened(table.layers_a)
    places, share = scaled(angles)
    parts = [
        tag("figure", tag("h3", "Which join first"), _tree(angles, names), tag("figcaption", TREE), class_="card"),
        tag("figure", tag("h3", "In a plane"), _plane(places, names), tag("figcaption", PLANE.format(share=share)),
            class_="card"),
    ]  # fmt: skip
    return tag("section", tag("h2", f"A map of the {what}"), tag("div", *parts, class_="cards"), class_="map")


def angles_of(table: Values) -> np.ndarray:
    """Return the angles between networks, symmetric and with zeros on the diagonal."""
    values = np.arccos(np.clip(table.values, -1, 1)) if table.higher_is_closer else table.values
    angles = (values + values.T) / 2
    np.fill_diagonal(angles, 0)
    return angles


def joined_pairs(angles: np.ndarray) -> np.ndarray:
    """Return SciPy's table of which groups join at which mean angle, the nearest first."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    return linkage(squareform(angles, checks=False), method="average")


def scaled(angles: np.ndarray) -> tuple[np.ndarray, float]:
    """Return places in a plane by classical scaling, and the share of the squared spread that they keep."""
    centring = np.eye(len(angles)) - 1 / len(angles)
    values, vectors = np.linalg.eigh(-centring @ angles**2 @ centring / 2)
    leading = np.clip(values[::-1][:2], 0, None)
    total = np.abs(values).sum()
    return vectors[:, ::-1][:, :2] * np.sqrt(leading), float(leading.sum() / total) if total else 1.0


def _tree(angles: np.ndarray, names: Sequence[str]) -> Markup:
    from scipy.cluster.hierarchy import dendrogram

    found = dendrogram(joined_pairs(angles), no_plot=True)
    far = max(max(heights) for heights in found["dcoord"]) or 1.0
    room = max(map(len, names)) * LETTER + 12
    lines = []
    for across, heights in zip(found["icoord"], found["dcoord"], strict=True):
        # SciPy puts leaves at 5, 15, 25, ...
        points = [f"{WIDTH * (1 - h / far):.1f},{a / 10 * ROW:.1f}" for a, h in zip(across, heights, strict=True)]
        lines.append(tag("polyline", points=" ".join(points), fill="none", stroke="currentColor"))
    labels = [
        tag("text", names[leaf], x=WIDTH + 6, y=f"{(k + 0.5) * ROW + 4:.1f}", fill="currentColor", font_size=11)
        for k, leaf in enumerate(found["leaves"])
    ]
    axis = tag("text", f"{far:.2f} rad", x=0, y=len(names) * ROW + 14, fill="currentColor", font_size=11)
    size = f"0 0 {WIDTH + room:.0f} {len(names) * ROW + 20}"
    return tag("svg", *lines, *labels, axis, viewBox=size, role="img", aria_label="Tree of the networks")


def _plane(places: np.ndarray, names: Sequence[str]) -> Markup:
    span = float(np.ptp(places, axis=0).max()) or 1.0
    shown = (places - places.mean(0)) / span * (WIDTH - 60) + WIDTH / 2
    dots = [tag("circle", tag("title", name), cx=f"{x:.1f}", cy=f"{y:.1f}", r=4, fill="currentColor")
            for (x, y), name in zip(shown, names, strict=True)]  # fmt: skip
    few = len(names) <= 4 * math.isqrt(WIDTH)
    labels = [
        tag("text", name, x=f"{x + 6:.1f}", y=f"{y + 4:.1f}", fill="currentColor", font_size=11)
        for (x, y), name in zip(shown, names, strict=True)
        if few
    ]
    size = f"0 0 {WIDTH + max(map(len, names)) * LETTER:.0f} {WIDTH}"
    return tag("svg", *dots, *labels, viewBox=size, role="img", aria_label="Networks in a plane")
