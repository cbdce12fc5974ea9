"""Pages of networks that were made smaller: a sparsity study with networks side by side, and compressed layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from netkin.reporting.charts import Axis, Chart, axis_up, chart_of
from netkin.reporting.grids import Grid, grids_of
from netkin.reporting.page.document import (
    Markup,
    document,
    facts,
    folded,
    folded_note,
    joined,
    name,
    origins,
    plain_table,
    tag,
    toolbar,
    warnings,
)
from netkin.reporting.page.heatmap import embedded, figure_of, missing_values, values_class
from netkin.reporting.page.svg import SIDE, beside_axes, figure_of_curve, key, line_chart, stretched, tick_names
from netkin.reporting.words import short_names
from netkin.results.caveats import Caveat, grouped
from netkin.results.compression import Compression
from netkin.results.labels import plural
from netkin.results.packing import document as described
from netkin.results.weight_sparsity import SparsityStudy, WeightSparsity

WEIGHTS = (
    "Prunable are the weights of linear and convolutional layers; biases, norms and embeddings are not. ε-sparsity is "
    "the share of weights whose size is below ε. A relative ε is in units of the r.m.s. of each layer's weights that "
    "are left, which rescaling the layer does not change. Of two shares the first is of all prunable weights, and the "
    "second of those left."
)
DISTRIBUTION = "Weights that are left, on one scale; the outermost bars hold all that lie beyond."
SIMILAR = (
    "The debiased CKA of each layer with every other of the same network, on the same examples. What one example is: "
)
PRUNED = "The smallest weights over all layers are taken away, and nothing is trained afterwards."
DENSE = "Convolutions stay dense: PyTorch has no sparse format for them, so masks save room in a file and no time. "
SAVES = (
    "Linear layers can be kept in compressed sparse rows, CSR, and on some GPUs in 2:4 form, with a mask of its own."
)


COLUMNS = ("layer", "kind", "width", "parameters", "multiply-adds", "variance held", "accuracy")
TWO_LAYERS = (
    "Each layer became two: the first maps its input to the directions that are kept, the second does the layer's work "
    "on these. Variance is that of the layer's input over the examples; multiply-adds are those of one example."
)
KEPT = "Shares of the original layer. Below 1 the two layers together are smaller than the one that they replace."
ACCURACY = (
    "Accuracy with this layer and all before it in the table compressed; the first point is the original network."
)


# --- a sparsity study ------------------------------------------------------------------------------------------------


def sparsity_page(study: SparsityStudy) -> str:
    """Return the HTML page of a study."""
    names = short_names(study.names)
    title = " and ".join(names[one] for one in study.names) + ": sparsity and its effects"
    comparisons = list(study.interlayer.values())
    grids = [grids_of(one) for one in comparisons]
    sentence, whole, parts = _sentence(study, names), " and ".join(study.names), _main(study, names, grids)
    bar = toolbar(best=None, cells=bool(comparisons))
    data = embedded(comparisons, grids, [], names)
    data |= {"table": _rows(study), "name": "sparsity"}
    kind = f"sparsity {values_class([grid for own in grids for grid in own])}"
    versions = [study.version]
    return document(
        title, sentence, parts, data, [described(study)], kind=kind, versions=versions, whole=whole, controls=bar
    )


def _sentence(study: SparsityStudy, names: Mapping[str, str]) -> str:
    sentences = []
    for one, table in study.networks.items():
        words = f"{names[one]} keeps {table.left:,} of {table.weights:,} weights (sparsity {table.sparsity:.3g})"
        mean, right = study.mean_similarity(one), study.accuracy(one)
        more = [f"mean debiased CKA of its layers {mean:.2f}"] if mean == mean else []
        more += [f"accuracy {right:.3f}"] if right == right else []
        sentences.append(": ".join(filter(None, [words, ", ".join(more)])))
    return "; ".join(sentences) + "."


def _main(study: SparsityStudy, names: Mapping[str, str], grids: Sequence[Sequence[Grid]]) -> Iterator[Markup | None]:
    yield facts(
        filter(None, [study.data, plural(study.examples, "example") if study.examples else "", study.created[:10]])
    )
    yield warnings(list(_caveats(study, names)))
    yield tag("h2", "Distribution of the weights", class_="quiet")
    yield tag("div", *_histograms(study, names), class_="cards")
    yield tag("p", DISTRIBUTION, class_="note")
    yield tag("h2", "How sparse")
    yield tag("div", _shares(study, names), folded_note("What the rows are", tag("p", WEIGHTS)), class_="card")
    if study.interlayer:
        yield tag("h2", "Similarity of the layers")
        yield tag("p", SIMILAR, study.shapes, ".")
        yield tag("div", *_heatmaps(study, names, grids), class_="cards")
    if study.curve:
        yield tag("h2", "Accuracy after pruning")
        yield tag("p", PRUNED)
        yield tag("div", _curve(study, names), class_="card")
    yield tag("h2", "What pruning saves")
    yield tag("p", DENSE, SAVES)
    yield tag("div", _sizes(study, names), class_="card")
    yield from _costs(study, names)
    yield tag("h2", "Layer by layer")
    for place, (one, table) in enumerate(study.networks.items()):
        yield folded(names[one], _layers(table), place == 0 and len(table.layers) <= 30)
    on = {"data": study.data, "examples": f"{study.examples:,}", "what one example is": study.shapes}
    about = {"networks": ", ".join(study.names)} | (on if study.data else {}) | {"times measured on": study.costs_on}
    told = about | {"made": study.created, "netkin": study.version}
    yield origins({key: value for key, value in told.items() if value}, study.provenance)


def _caveats(study: SparsityStudy, names: Mapping[str, str]) -> Iterator[Caveat]:
    for one, table in study.networks.items():
        if table.emptied:
            sentence = f"{names[one]}: no weight is left in {', '.join(table.emptied)}; its output is constant."
            yield Caveat("emptied-layers", sentence)
    yield from grouped(caveat for one in study.interlayer.values() for caveat in one.caveats)


def _shares(study: SparsityStudy, names: Mapping[str, str]) -> Markup:
    """Return a row for each number and a column for each network."""
    tables = list(study.networks.values())
    rows: list[list[Any]] = [
        ["prunable weights", *(f"{table.weights:,}" for table in tables)],
        ["other parameters, dense", *(f"{table.dense_parameters:,}" for table in tables)],
        ["left, not masked or zero", *(f"{table.left:,}" for table in tables)],
        ["exactly zero", *(f"{table.zeros:,}" for table in tables)],
        ["sparsity", *(f"{table.sparsity:.4f}" for table in tables)],
    ]
    for relative, unit in ((False, ""), (True, " × r.m.s.")):
        values = tables[0].relative if relative else tables[0].epsilons
        both = [[table.shares(relative=relative, of_left=of_left) for of_left in (False, True)] for table in tables]
        rows += [[f"below {epsilon:g}{unit}",
                  *(f"{_percent(of_all[k])} · {_percent(of_left[k])}" for of_all, of_left in both)]
                 for k, epsilon in enumerate(values)]  # fmt: skip
    found = {"debiased CKA of two layers, mean": study.mean_similarity, "accuracy": study.accuracy}
    taken = {words: [value(one) for one in study.names] for words, value in found.items()}
    rows += [[words, *map(_number, values)] for words, values in taken.items() if not all(map(math.isnan, values))]
    return plain_table(["", *(names[one] for one in study.names)], rows, kind="numbers", label="How sparse")


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{share:.2%}"


def _histograms(study: SparsityStudy, names: Mapping[str, str]) -> Iterator[Markup]:
    """Yield the weights of each network as bars, all of one height for the same share of weights."""
    shares = {one: [count / max(sum(counts), 1) for count in counts] for one, counts in study.histograms.items()}
    up = axis_up([0.0, *(max(own) for own in shares.values())])
    for place, (one, own) in enumerate(shares.items()):
        weights, highest = sum(study.histograms[one]), max(own)
        note = tag("figcaption", tag("p", f"{weights:,} weights; the highest bar here: {highest:.1%} of them."))
        drawn = _bars(study.edges, own, up, place, names[one])
        yield tag("figure", tag("h3", name(names[one])), drawn, note, class_="card curve")


def _bars(edges: Sequence[float], shares: Sequence[float], up: Axis, place: int, words: str) -> Markup:
    """Return a histogram beside the axes that a line chart has."""
    chart = Chart(f"weights of {words}", "weight", edges, [], up, Axis(edges[0], edges[-1]))
    lefts, width = [SIDE * left for left in chart.lefts], SIDE / len(shares)
    tops = [SIDE * (1 - up.place(share)) for share in shares]
    path = "".join(f"M{x:.1f} {SIDE}V{top:.1f}h{width * 0.9:.2f}V{SIDE}z" for x, top in zip(lefts, tops, strict=False))
    bars = tag("g", tag("path", d=path, class_="area"), class_=f"k{place % 4}")
    parts = (stretched(chart, [bars]), *tick_names(chart))
    field = tag("div", *parts, class_="field", role="img", aria_label=chart.title)
    return beside_axes(chart, tag("div", field, class_="plot"), "share of the weights")


def _heatmaps(study: SparsityStudy, names: Mapping[str, str], grids: Sequence[Sequence[Grid]]) -> Iterator[Markup]:
    for place, (one, own) in enumerate(zip(study.interlayer, grids, strict=True)):
        mean = study.mean_similarity(one)
        words = f"mean over pairs of different layers: {mean:.4f}" if mean == mean else "it has no value for any pair"
        head = joined(tag("h3", name(names[one])), tag("p", words, class_="facts-line"))
        for k, grid in enumerate(own):
            yield figure_of(
                grid, f"{grid.id} in {names[one]}", f"table {place} {k}", missing_values(grid), heading=head
            )


def _curve(study: SparsityStudy, names: Mapping[str, str]) -> Markup | None:
    curve = {names.get(key, key): list(values) for key, values in study.curve.items()}
    return figure_of_curve("Accuracy without the smallest weights", curve)


def _sizes(study: SparsityStudy, names: Mapping[str, str]) -> Markup:
    rows = [[name(names[one]), f"{dense:,}", f"{packed:,}", f"{packed / dense:.3f}"]
            for one, (dense, packed) in study.sizes.items()]  # fmt: skip
    return plain_table(["", "bytes, dense", "bytes, zeros packed", "share"], rows, kind="numbers", label="In a file")


def _costs(study: SparsityStudy, names: Mapping[str, str]) -> Iterator[Markup]:
    """Yield measured sizes and times of linear layers, or how to measure them."""
    if not study.costs:
        yield tag("p", "Times were not measured here; `netkin sparsity MODEL --costs` does.")
        return
    rows = []
    for one, own in study.costs.items():
        for row in own:
            figures = [row.reason, "", ""] if row.reason else [
                f"{row.bytes / row.dense_bytes:.2f} × of {row.dense_bytes:,} bytes",
                f"{row.seconds / row.dense_seconds:.2f} × of {row.dense_seconds * 1e6:,.0f} µs", f"{row.error:.1e}",
            ]  # fmt: skip
            rows.append([joined(name(names[one]), ", ", name(row.layer)), row.format, f"{row.sparsity:.4f}", *figures])
    head = ["layer", "format", "zeros", "size", "time", "largest difference"]
    words = f"Measured on {study.costs_on}, for batches of 128; times above 1 × are slower than the dense layer."
    yield tag("p", words if rows else "There is no linear layer to measure.")
    yield tag("div", plain_table(head, rows, kind="numbers", label="Sparse formats"), class_="card")


def _layers(table: WeightSparsity) -> Markup:
    head = ["layer", "kind", "shape", "weights", "left", "sparsity", "r.m.s."]
    rows = [[name(row.layer or "(model)"), row.kind, " × ".join(map(str, row.shape)), f"{row.weights:,}",
             f"{row.left:,}", f"{row.sparsity:.4f}", f"{row.rms:.4g}"] for row in table.layers]  # fmt: skip
    return plain_table(head, rows, kind="numbers", label="The layers")


def _rows(study: SparsityStudy) -> list[Any]:
    """Return the head and the rows of the table that the page saves: a row for each layer of each network."""
    columns = ("layer", "kind", "weights", "left", "zeros", "rms")
    rows = [[one, *(getattr(row, key) for key in columns)]
            for one, table in study.networks.items() for row in table.layers]  # fmt: skip
    return [["network", *columns], rows]


# --- compressed layers -----------------------------------------------------------------------------------------------


def compression_page(table: Compression) -> str:
    """Return the HTML page of a compression."""
    share = table.parameters_after / max(table.parameters_before, 1)
    title = f"{table.what} compressed, {share:.0%} of the parameters left"
    bar = toolbar(best=None, cells=False)
    parts, versions = _compression_parts(table), [table.version]
    rows = [list(COLUMNS), *([*map(str, row)] for row in _compression_rows(table))]
    data, said = embedded([], [], [], {}) | {"table": rows, "name": "compression"}, table.conclusion
    return document(title, said, parts, data, [described(table)], kind="compression", versions=versions, controls=bar)


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
        "layer": ["original", *layers],
        "accuracy": [table.accuracy_before, *(row.accuracy for row in table)],
    }
    kept, accuracy = chart_of("share kept", shares), chart_of("accuracy", right)
    if kept is not None:
        kept = replace(kept, up=axis_up([0.0, kept.up.high]))  # shares are seen from 0
    return [chart for chart in (kept, accuracy) if chart is not None]


def _compression_parts(table: Compression) -> Iterator[Markup | None]:
    projection = table.projection.replace("_", " ")
    told = [f"against {table.against}", f"{projection}, {table.order}", table.created[:10]]
    yield facts(filter(None, [table.model, table.data, plural(table.examples, "example"), *told]))
    yield warnings([Caveat("compression", note) for note in table.notes])
    words = {"share kept": KEPT, "accuracy": ACCURACY}
    cards = [
        tag("figure", tag("h3", chart.title), key(chart.lines) if len(chart.lines) > 1 else None,
            line_chart(chart), tag("figcaption", words[chart.title]), class_="card")
        for chart in compression_charts(table)
    ]  # fmt: skip
    title = tag("h2", "Layer by layer", class_="quiet")
    yield tag("section", title, tag("div", *cards, class_="cards"), tag("p", TWO_LAYERS, class_="note"))
    rows = [[name(layer), *(cell.replace(" ", "\u00a0") for cell in rest)] for layer, *rest in _compression_rows(table)]
    shown = plain_table(list(COLUMNS), rows, kind="numbers", label="The layers")
    yield tag("section", tag("h2", "The table"), tag("div", shown, class_="card"))
    settings = {"compressed against": table.against, "projection": projection, "order": table.order}
    examples = {"examples": f"{table.examples:,}", "data": table.data or "not named"}
    yield origins({"model": table.model or "not named"} | settings | examples, table.provenance)


def _compression_rows(table: Compression) -> list[list[str]]:
    return [[row.layer, row.kind, *cells] for row, (_, *cells) in zip(table, table.cells(), strict=True)]
