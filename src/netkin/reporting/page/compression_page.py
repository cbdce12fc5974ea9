"""The page of a compression: what each layer keeps, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from netkin.reporting.blocks import Lines, Name, Page, Section, Table, Text
from netkin.reporting.charts import axis_up, chart_of
from netkin.reporting.parts import origins, table_of
from netkin.results.caveats import Caveat
from netkin.results.compression import Compression
from netkin.results.labels import plural

COLUMNS = ("layer", "kind", "width", "parameters", "multiply-adds", "variance held", "accuracy")
TWO_LAYERS = (
    "Each layer became two: the first maps its input to the directions that are kept, the second does the layer's work "
    "on these. Variance is that of the layer's input over the examples; multiply-adds are those of one example."
)
KEPT = "Shares of the original layer. Below 1 the two layers together are smaller than the one that they replace."
ACCURACY = (
    "Accuracy with this layer and all before it in the table compressed; the first point is the original network."
)


def compression_page(compression: Compression) -> Page:
    """Return the page of a compression."""
    share = compression.parameters_after / max(compression.parameters_before, 1)
    projection = compression.projection.replace("_", " ")
    told = [f"against {compression.against}", f"{projection}, {compression.order}", compression.created[:10]]
    sources = [compression.model, compression.data, plural(compression.examples, "example")]
    rows = [
        [Name(row.layer), row.kind, *(cell.replace(" ", "\u00a0") for cell in cells)]
        for row, (_, *cells) in zip(compression, compression.cells(), strict=True)
    ]
    cards = Section("", [_kept(compression), _accuracy(compression)], "cards")
    settings = {"compressed against": compression.against, "projection": projection, "order": compression.order}
    examples = {"examples": f"{compression.examples:,}", "data": compression.data or "not named"}
    return Page(
        title=f"{compression.what} compressed, {share:.0%} of the parameters left",
        sentence=compression.conclusion,
        facts=[*filter(None, sources), *told],
        caveats=[Caveat("compression", note) for note in compression.notes],
        blocks=[
            Section("Layer by layer", [cards, Text(TWO_LAYERS, style="note")], quiet=True),
            Section("The table", [Table(COLUMNS, rows, label="The layers", style="numbers")]),
        ],
        origins=origins({"model": compression.model or "not named"} | settings | examples, compression.provenance),
        style="compression",
        versions=[compression.version],
        name=["compression"],
        csv=table_of(compression),
        results=[compression],
    )


def _kept(compression: Compression) -> Lines | None:
    """Return the shares that layers keep."""
    shares: dict[str, list[Any]] = {
        "layer": [row.layer for row in compression],
        "directions": [row.kept / row.width for row in compression],
        "parameters": [row.parameters_after / max(row.parameters_before, 1) for row in compression],
        "multiply-adds": [row.multiply_adds_after / max(row.multiply_adds_before, 1) for row in compression],
        "variance held": [row.variance for row in compression],
    }
    chart = chart_of("share kept", shares)
    if chart is None:
        return None
    from_zero = replace(chart, up=axis_up([0.0, chart.up.high]))
    return Lines(from_zero, "kept", chart.title, caption=KEPT, heading=True)


def _accuracy(compression: Compression) -> Lines | None:
    """Return the accuracy after each layer where there are labels."""
    layers, accuracies = [row.layer for row in compression], [row.accuracy for row in compression]
    places, values = ["original", *layers], [compression.accuracy_before, *accuracies]
    chart = chart_of("accuracy", {"layer": places, "accuracy": values})
    return None if chart is None else Lines(chart, "accuracy", chart.title, caption=ACCURACY, heading=True)
