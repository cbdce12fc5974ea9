"""The page of a sparsity study: the weights of networks, the similarity of their layers, and what it saves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from netkin.reporting.blocks import Bars, Heatmap, Name, Page, PageBlock, Section, Table, Text
from netkin.reporting.charts import Axis, Chart, axis_up
from netkin.reporting.grids import grids_of
from netkin.reporting.parts import about, curve, missing_values, origins, table_of
from netkin.reporting.words import short_names
from netkin.results.caveats import Caveat, grouped
from netkin.results.labels import plural
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
UNMEASURED = "Times were not measured here; `netkin sparsity MODEL --costs` does."
FEW = 30  # layers, up to which the first network's table is open

Names = Mapping[str, str]  # of networks, with shorter ones


def sparsity_page(study: SparsityStudy) -> Page:
    """Return the page of a study."""
    names = short_names(study.names)
    on = {"data": study.data, "examples": f"{study.examples:,}", "what one example is": study.shapes}
    told = {"networks": ", ".join(study.names)} | (on if study.data else {}) | {"times measured on": study.costs_on}
    told |= {"made": study.created, "netkin": study.version}
    size = plural(study.examples, "example") if study.examples else ""
    return Page(
        title=" and ".join(names[name] for name in study.names) + ": sparsity and its effects",
        whole=" and ".join(study.names),
        sentence=_sentence(study, names),
        facts=[*filter(None, [study.data, size, study.created[:10]])],
        caveats=list(_caveats(study, names)),
        blocks=_sections(study, names),
        origins=origins({key: value for key, value in told.items() if value}, study.provenance),
        style="sparsity",
        versions=[study.version],
        name=["sparsity"],
        csv=table_of(study),
        results=[study],
    )


def _sentence(study: SparsityStudy, names: Names) -> str:
    sentences = []
    for name, table in study.networks.items():
        words = f"{names[name]} keeps {table.left:,} of {table.weights:,} weights (sparsity {table.sparsity:.3g})"
        mean, accuracy = study.mean_similarity(name), study.accuracy(name)
        more = [f"mean debiased CKA of its layers {mean:.2f}"] if mean == mean else []
        more += [f"accuracy {accuracy:.3f}"] if accuracy == accuracy else []
        sentences.append(": ".join(filter(None, [words, ", ".join(more)])))
    return "; ".join(sentences) + "."


def _caveats(study: SparsityStudy, names: Names) -> Iterator[Caveat]:
    for name, table in study.networks.items():
        if table.emptied:
            sentence = f"{names[name]}: no weight is left in {', '.join(table.emptied)}; its output is constant."
            yield Caveat("emptied-layers", sentence)
    yield from grouped(caveat for one in study.interlayer.values() for caveat in one.caveats)


def _sections(study: SparsityStudy, names: Names) -> Iterator[PageBlock]:
    bars = Section("", _histograms(study, names), "cards")
    yield Section("Distribution of the weights", [bars, Text(DISTRIBUTION, style="note")], quiet=True)
    rows = Text(title="What the rows are", text=WEIGHTS, folded=True)
    yield Section("How sparse", [Section("", [_shares(study, names), rows], "card")])
    if study.interlayer:
        heatmaps = Section("", _heatmaps(study, names), "cards")
        yield Section("Similarity of the layers", [Text(f"{SIMILAR}{study.shapes}."), heatmaps])
    if study.curve:
        accuracies = {names.get(key, key): list(values) for key, values in study.curve.items()}
        lines = curve("Accuracy without the smallest weights", accuracies, "pruned", upwards="accuracy")
        yield Section("Accuracy after pruning", [Text(PRUNED), lines])
    sizes = [[Name(names[name]), f"{dense:,}", f"{packed:,}", f"{packed / dense:.3f}"]
             for name, (dense, packed) in study.sizes.items()]  # fmt: skip
    in_a_file = Table(["", "bytes, dense", "bytes, zeros packed", "share"], sizes, label="In a file", style="numbers")
    yield Section("What pruning saves", [Text(f"{DENSE}{SAVES}"), in_a_file, *_costs(study, names)])
    layers = [_layers(table, names[name], place == 0) for place, (name, table) in enumerate(study.networks.items())]
    yield Section("Layer by layer", layers)


def _shares(study: SparsityStudy, names: Names) -> Table:
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
    measured = {"debiased CKA of two layers, mean": study.mean_similarity, "accuracy": study.accuracy}
    taken = {words: [value(name) for name in study.names] for words, value in measured.items()}
    rows += [[words, *map(_number, values)] for words, values in taken.items() if not all(map(math.isnan, values))]
    return Table(["", *(Name(names[name]) for name in study.names)], rows, label="How sparse", style="numbers")


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{share:.2%}"


def _histograms(study: SparsityStudy, names: Names) -> Iterator[Bars]:
    """Yield the weights of each network as bars, all of one height for the same share of weights."""
    shares = {name: [count / max(sum(counts), 1) for count in counts] for name, counts in study.histograms.items()}
    up, edges = axis_up([0.0, *(max(own) for own in shares.values())]), study.edges
    for place, (name, own) in enumerate(shares.items()):
        chart = Chart(f"weights of {names[name]}", "weight", edges, [], up, Axis(edges[0], edges[-1]))
        weights = sum(study.histograms[name])
        title = f"{names[name]}, sparsity {study.networks[name].sparsity:.3f}"
        caption = f"{weights:,} weights; the highest bar here: {max(own):.1%} of them."
        yield Bars(title, chart, own, caption, "share of the weights", place)


def _heatmaps(study: SparsityStudy, names: Names) -> Iterator[Heatmap]:
    """Yield how alike each network's layers are; that each is its own best match needs no mark."""
    for place, (name, comparison) in enumerate(study.interlayer.items()):
        mean = study.mean_similarity(name)
        words = f"mean over pairs of different layers: {mean:.4f}" if mean == mean else "it has no value for any pair"
        for grid in grids_of(comparison):
            yield Heatmap(
                replace(grid, best={}), f"layers {place} {grid.id}", f"{grid.id} in {names[name]}",
                title=Name(names[name]), line=words, sides=(names[name], names[name]), about=about(comparison),
                notes=[missing_values(grid)], table=comparison.tables[grid.id],
                fitted_with=comparison.tables[grid.id].quantity.name,
            )  # fmt: skip


def _costs(study: SparsityStudy, names: Names) -> list[PageBlock]:
    """Return measured sizes and times of linear layers, or how to measure them."""
    if not study.costs:
        return [Text(UNMEASURED)]
    rows = []
    for name, own in study.costs.items():
        for row in own:
            figures = [row.reason, "", ""] if row.reason else [
                f"{row.bytes / row.dense_bytes:.2f} × {row.dense_bytes:,} bytes",
                f"{row.seconds / row.dense_seconds:.2f} × {row.dense_seconds * 1e6:,.0f} µs", f"{row.error:.1e}",
            ]  # fmt: skip
            rows.append([Name(f"{names[name]}, {row.layer}"), row.format, f"{row.sparsity:.4f}", *figures])
    head = ["layer", "format", "zeros", "size", "time", "largest difference"]
    words = f"Measured on {study.costs_on}, for batches of 128; times above 1 × are slower than the dense layer."
    table = Table(head, rows, label="Sparse formats", style="numbers")
    return [Text(words if rows else "There is no linear layer to measure."), table]


def _layers(table: WeightSparsity, name: str, first: bool) -> Table:
    head = ["layer", "kind", "shape", "weights", "left", "sparsity", "r.m.s."]
    rows = [[Name(row.layer or "(model)"), row.kind, " × ".join(map(str, row.shape)), f"{row.weights:,}",
             f"{row.left:,}", f"{row.sparsity:.4f}", f"{row.rms:.4g}"] for row in table.layers]  # fmt: skip
    is_open = first and len(table.layers) <= FEW
    return Table(head, rows, name, "The layers", "numbers", folded=True, open=is_open)
