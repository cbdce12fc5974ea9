"""The spread over several comparisons: means and deviations, layer by layer, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from netkin.errors import NoValue
from netkin.reporting.markup import Markup, name, tag
from netkin.results import Comparison, Spread
from netkin.results.listings import is_worth

MEANS = "Mean ± standard deviation over {counted}. Layers that not all models have are left out."


def spread_section(comparisons: Sequence[Comparison]) -> Markup | None:
    """Return means and deviations over comparisons with stitches, or None where there are none or one alone."""
    if len(comparisons) < 2 or not any(is_worth(t) for c in comparisons for t in c.tables.values()):
        return None
    try:
        spread = Spread.of(comparisons)
    except NoValue:  # no names of layers in common
        return None
    words = tag("p", MEANS.format(counted=spread.told_count()))
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
