"""The page of a compression: what each layer keeps of its input, what that saves, and the remaining accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from netkin.reporting.charts import Chart, chart_of
from netkin.reporting.page.document import (
    SCRIPTS,
    Markup,
    document,
    facts,
    footer,
    header,
    identity,
    is_identity,
    joined,
    name,
    plain_table,
    section,
    tag,
    toolbar,
    warnings,
)
from netkin.reporting.page.heatmap import embedded
from netkin.reporting.page.line_chart import key, line_chart
from netkin.results.compression import Compression
from netkin.results.text import plural

COLUMNS = ("layer", "kind", "width", "parameters", "multiply-adds", "variance held", "accuracy")
MEANING = (
    "Each layer became two: the first maps its input to the directions that are kept, the second does the layer's work "
    "on these. Variance is that of the layer's input over the examples; multiply-adds are those of one example."
)
KEPT = "Shares of the layer as it was. Below 1 the two layers together are smaller than the one that they replace."
RIGHT = "Accuracy with this layer and those before it in the table compressed; the first is the original's."


def compression_page(table: Compression) -> str:
    """Return the HTML page of a compression."""
    title = f"{plural(len(table), 'layer')} compressed"
    bar = toolbar(best=None, cells=False)
    shown = joined(header(title, table.conclusion), bar, tag("main", *_main(table)), footer([table.version]))
    rows = [list(COLUMNS), *([*map(str, row)] for row in _rows(table))]
    data = embedded([], [], [], {}) | {"document": table.to_document(), "table": rows, "name": "compression"}
    return document(title, shown, data, scripts=SCRIPTS, kind="compression")


def compression_charts(table: Compression) -> list[Chart]:
    """Return the shares that layers keep, and the accuracy after each where there are labels."""
    layers = [row.layer for row in table]
    shares: dict[str, list[Any]] = {
        "layer": layers,
        "directions": [row.kept / row.width for row in table],
        "parameters": [row.parameters_after / max(row.parameters_before, 1) for row in table],
        "multiply-adds": [row.multiply_adds_after / max(row.multiply_adds_before, 1) for row in table],
        "variance held": [row.variance for row in table],
    }
    right: dict[str, list[Any]] = {
        "layer": ["as it was", *layers],
        "accuracy": [table.accuracy_before, *(row.accuracy for row in table)],
    }
    found = [chart_of("share kept", shares), chart_of("accuracy", right)]
    return [chart for chart in found if chart is not None]


def _main(table: Compression) -> Iterator[Markup | None]:
    way = f"{table.projection.replace('_', ' ')}, {table.order}"
    told = [table.data, plural(table.examples, "example"), f"against {table.against}", way, table.created[:10]]
    yield facts([text for text in told if text])
    yield warnings(list(table.notes))
    words = {"share kept": KEPT, "accuracy": RIGHT}
    cards = [
        tag("figure", tag("h3", chart.title), key(chart.lines) if len(chart.lines) > 1 else None,
            line_chart(chart), tag("figcaption", words[chart.title]), class_="card")
        for chart in compression_charts(table)
    ]  # fmt: skip
    title = tag("h2", "Layer by layer", class_="quiet")
    yield tag("section", title, tag("div", *cards, class_="cards"), tag("p", MEANING, class_="note"))
    rows = [[name(layer), *(cell.replace(" ", "\u00a0") for cell in rest)] for layer, *rest in _rows(table)]
    shown = tag("div", tag("div", plain_table(list(COLUMNS), rows), class_="scroll"), class_="card")
    yield tag("section", tag("h2", "The table"), shown)
    told_facts = {"compressed against": table.against, "projection": table.projection.replace("_", " ")}
    told_facts |= {"order": table.order, "examples": f"{table.examples:,}", "data": table.data or "not named"}
    told_facts |= {word: text for word, text in table.provenance.items() if not is_identity(word)}
    yield section(told_facts, identity(table.provenance))


def _rows(table: Compression) -> list[list[str]]:
    return [[row.layer, row.kind, *cells] for row, (_, *cells) in zip(table, table.cells(), strict=True)]
