"""Many models on one page: means of every pair, means layer by layer, a dendrogram and a 2-d embedding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from netkin.errors import NoValue
from netkin.reporting.charts import Axis, tick_text
from netkin.reporting.grids import SAME_MODEL, Grid
from netkin.reporting.page.document import Markup, folded, joined, name, plain_table, tag, warnings
from netkin.reporting.page.heatmap import figure_of, holes
from netkin.reporting.words import shortened
from netkin.results import Comparison, Comparisons, Spread, Values
from netkin.results.comparison import are_angles, branches_of, distances_of, plane_of, tree_of
from netkin.results.labels import is_of_tasks, is_worth

MEANS = "Each cell is the mean over layers of the same name or, where none is shared, over each layer's best match."
BLOCKS = (
    "Each cell is a layer of one task with a layer of another. Colours of one picture can't be compared with another's."
)
SPREAD = "Mean ± standard deviation over {counted}. Layers that not all models have are left out."
MOST = 200  # networks that a tree can show
ROW, WIDTH, LETTER = 16, 340, 8  # pixels; a letter as wide as on a phone
LINES_AWAY = 4  # lines by which the name of a point may be moved
TREE = "Average linkage of {what}. Groups that join far left have little in common."
PLANE = "Classical multidimensional scaling of the same distances; it keeps {share:.0%} of their squared spread."


def summary_section(comparisons: Sequence[Comparison], summaries: Sequence[Grid], note: str) -> Markup | None:
    """Return the heatmaps of models by models with their maps, or of the blocks of tasks; None where there are none.

    The tree and the plane by one measure stand beside its heatmap.
    """
    if not summaries:
        return None
    blocks = bool(summaries[0].models)
    words = tag("p", f"{BLOCKS if blocks else MEANS} Choose a cell to open its comparison.")
    title = "Tasks by tasks, block by block" if blocks else "Models by models"
    figures = [
        figure_of(
            grid, f"{grid.id}, {title.lower()}", f"summary {k}", holes(grid, [SAME_MODEL]), heading=_heading(grid)
        )
        for k, grid in enumerate(summaries)
    ]
    maps = _maps_of(comparisons)
    beside = next(iter(maps.values())) if maps and len(figures) == 1 else []
    cards = tag("div", *figures, *beside, class_="cards mapped" if beside else "cards")
    parts = [tag("h2", title, class_="quiet"), cards, words, warnings([note] if note else [])]
    return tag("section", *parts, None if beside else _mapped(maps), class_="summary")


def _heading(grid: Grid) -> Markup:
    return joined(tag("h3", grid.id, class_="code"), tag("p", grid.note, class_="facts-line") if grid.note else None)


def spread_section(comparisons: Sequence[Comparison]) -> Markup | None:
    """Return means and deviations over comparisons with stitches, or None where there are none or one alone."""
    if len(comparisons) < 2 or not any(is_worth(t) for c in comparisons for t in c.tables.values()):
        return None
    try:
        spread = Spread.of(comparisons)
    except NoValue:  # no names of layers in common
        return None
    words = tag("p", SPREAD.format(counted=spread.count_text()))
    tables = _listed(spread) if spread.is_profile else _matrices(spread)
    cards = [tag("div", tag("h3", title), table, class_="card") for title, table in tables]
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
        yield word, _numbers("layer", [cells.column for cells in side_by_side], rows)


def _matrices(spread: Spread) -> Iterator[tuple[str, Markup]]:
    """Yield for each measure a table of layers by layers."""
    for id_, cells in spread.tables.items():
        places = range(len(spread.layers_b))
        rows = [(a, [cells.written(i, j) for j in places]) for i, a in enumerate(spread.layers_a)]
        yield id_, _numbers("from ↓ into →", spread.layers_b, rows)


def _numbers(corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Markup:
    return plain_table([corner, *map(name, columns)], [[name(label), *texts] for label, texts in rows], kind="numbers")


def _maps_of(comparisons: Sequence[Comparison]) -> dict[str, list[Markup]]:
    """Return the maps of models by measure; none where pairs are missing or occur twice, or tasks are compared."""
    pairs = {(one.a, one.b) for one in comparisons}
    tables = [table for one in comparisons for table in one.tables.values()]
    if len(pairs) < max(len(comparisons), 3) or any(is_of_tasks(table) for table in tables):
        return {}
    found = {id_: map_figures(table) for id_, table in Comparisons(comparisons).summaries().tables.items()}
    return {id_: figures for id_, figures in found.items() if figures}


def _mapped(maps: Mapping[str, Sequence[Markup]]) -> Markup | None:
    """Return the maps of the models with their heading, those after the first folded."""
    if not maps:
        return None
    (first, cards), *rest = ((id_, tag("div", *figures, class_="cards")) for id_, figures in maps.items())
    title = tag("h2", f"A map of the models by {first}")
    return joined(title, cards, *(folded(f"The same by {id_}", own) for id_, own in rest))


def map_figures(table: Values) -> list[Markup]:
    """Return the tree and the plane, or nothing where networks are few or many, or some pair has no value."""
    if not 3 <= len(table.layers_a) <= MOST or is_worth(table):
        return []
    try:
        distances = distances_of(table)
    except NoValue:  # for some pair of networks
        return []
    names, (places, share) = shortened(table.layers_a), plane_of(distances)
    unit = {"radians": "rad", "": table.name}.get(table.unit, table.unit)
    what, unit = (f"angles, arccos of {table.name}", "rad") if are_angles(table) else (table.name, unit)
    parts = {
        "Dendrogram": (_tree(distances, names, unit), TREE.format(what=what)),
        "2-d embedding": (_plane(places, names, unit), PLANE.format(share=share)),
    }
    return [
        tag("figure", tag("h3", title), drawing, tag("figcaption", words), class_="card map")
        for title, (drawing, words) in parts.items()
    ]


def _tree(distances: np.ndarray, names: Sequence[str], unit: str) -> Markup:
    branches, leaves = branches_of(tree_of(distances))
    axis, low = Axis(float(branches[:, :, 0].max()) or 1.0, 0), len(names) * ROW
    lines = [
        tag("polyline", points=" ".join(f"{WIDTH * axis.place(x):.1f},{(y + 0.5) * ROW:.1f}" for x, y in line),
            fill="none", stroke="currentColor")
        for line in branches
    ]  # fmt: skip
    labels = [_word(names[leaf], WIDTH + 6, (k + 0.5) * ROW + 4) for k, leaf in enumerate(leaves)]
    base = tag("line", x1=0, x2=WIDTH, y1=low, y2=low, stroke="currentColor", stroke_opacity=0.4)
    numbers = [
        _word(tick_text(tick), WIDTH * axis.place(tick), low + 14, text_anchor="middle") for tick in axis.ticks()
    ]
    room = max(map(len, names)) * LETTER + 12
    drawn = [*lines, *labels, base, *numbers, _word(unit, WIDTH / 2, low + 30, text_anchor="middle")]
    size = f"-12 0 {WIDTH + 12 + room:.0f} {low + 36}"
    return tag("svg", *drawn, viewBox=size, role="img", aria_label="Tree of the networks")


def _word(text: str, x: float, y: float, **how: Any) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", fill="currentColor", font_size=11, **how)


def _plane(places: np.ndarray, names: Sequence[str], unit: str) -> Markup:
    """Return the picture of points in a plane, whose two axes have one scale, in the unit of the distances."""
    middle, span = (places.max(0) + places.min(0)) / 2, float(np.ptp(places, axis=0).max()) or 1.0
    scale = (WIDTH - 60) / span
    tall = max(float(np.ptp(places[:, 1])) * scale + 60, WIDTH / 3)
    shown = (places - middle) * scale * [1, -1] + [WIDTH / 2, tall / 2]
    half = np.array([WIDTH, tall]) / 2 / scale
    frame = _frame(Axis(*(middle[0] + [-half[0], half[0]])), Axis(*(middle[1] + [half[1], -half[1]])), tall, unit)
    dots = [tag("circle", tag("title", name), cx=f"{x:.1f}", cy=f"{y:.1f}", r=4, fill="currentColor")
            for (x, y), name in zip(shown, names, strict=True)]  # fmt: skip
    few = len(names) <= 4 * math.isqrt(WIDTH)
    aside = label_places([(x, y) for x, y in shown.tolist()], names, LETTER, 14, WIDTH) if few else []
    labels = [
        _word(name, x + 6, y + dy + 4) if dx > 0 else _word(name, x - 6, y + dy + 4, text_anchor="end")
        for (x, y), (dx, dy), name in zip(shown, aside, names, strict=False)
    ]
    ends = [
        (x + dx, x + dx + LETTER * len(name))
        for x, dx, name in zip(shown[:, 0], (d for d, _ in aside), names, strict=False)
    ]
    left, right = max([44, *(4 - low for low, _ in ends)]), max([12, *(high - WIDTH for _, high in ends)])
    leaders = [
        tag("line", x1=f"{x:.1f}", y1=f"{y:.1f}", x2=f"{x + max(dx, -6):.1f}", y2=f"{y + dy:.1f}",
            stroke="currentColor", stroke_opacity=0.4)
        for (x, y), (dx, dy) in zip(shown, aside, strict=False) if dy
    ]  # fmt: skip
    size = f"{-left:.0f} -4 {left + WIDTH + right:.0f} {tall + 40:.0f}"
    return tag("svg", *frame, *leaders, *dots, *labels, viewBox=size, role="img", aria_label="Networks in a plane")


def _frame(across: Axis, down: Axis, tall: float, unit: str) -> list[Markup]:
    """Return the numbered axes of a plane with their lines; both have ticks at one distance."""
    step = float(np.diff(across.ticks()).min())
    if len(_multiples(down, step)) < 2:
        step /= 2
    columns, rows = _multiples(across, step), _multiples(down, step)
    box = tag("rect", x=0, y=0, width=WIDTH, height=f"{tall:.1f}", fill="none", stroke="currentColor",
              stroke_opacity=0.25)  # fmt: skip
    numbers = [_word(tick_text(x), WIDTH * across.place(x), tall + 14, text_anchor="middle") for x in columns]
    numbers += [_word(tick_text(y), -6, tall * down.place(y) + 4, text_anchor="end") for y in rows]
    lines = [(WIDTH * across.place(x), 0.0, WIDTH * across.place(x), tall) for x in columns]
    lines += [(0.0, tall * down.place(y), float(WIDTH), tall * down.place(y)) for y in rows]
    drawn = [
        tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", stroke="currentColor",
            stroke_opacity=0.12)
        for x1, y1, x2, y2 in lines
    ]  # fmt: skip
    return [box, *drawn, *numbers, _word(unit, WIDTH / 2, tall + 30, text_anchor="middle")]


def _multiples(axis: Axis, step: float) -> list[float]:
    low, high = sorted((axis.low, axis.high))
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def label_places(
    points: Sequence[tuple[float, float]], names: Sequence[str], letter: float, line: float, wide: float = math.inf
) -> list[tuple[float, float]]:
    """Return where the name of each point begins, from the point: beside it, or a few lines away where that is free.

    Args:
        points: Their places; y grows downwards.
        names: Their names.
        letter: How wide a letter is, in the units of the points.
        line: How high a line is.
        wide: Where the drawing, which begins at 0, ends; a name that reaches beyond is placed elsewhere if it can be.

    Example:
        >>> label_places([(0, 0), (2, 1), (90, 0)], ["a", "b", "c"], letter=6, line=12)
        [(6, 0), (-12, 0), (6, 0)]
    """
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    found = []
    for (x, y), label in zip(points, names, strict=True):
        width = letter * len(label)
        rows = sorted(range(-LINES_AWAY, LINES_AWAY + 1), key=lambda k: (abs(k), -k))
        offsets = [(dx, k * line) for k in rows for dx in (6, -6 - width)]
        boxes = [(x + dx, y + dy - line / 2, x + dx + width, y + dy + line / 2) for dx, dy in offsets]
        free = [k for k, box in enumerate(boxes) if not any(_meet(box, other) for other in taken)]
        inside = [k for k in free if boxes[k][0] >= 0 and boxes[k][2] <= wide] if wide < math.inf else free
        best = next(iter(inside or free), 0)
        taken.append(boxes[best])
        found.append(offsets[best])
    return found


def _meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
