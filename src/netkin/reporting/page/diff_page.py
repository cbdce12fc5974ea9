"""The page of a diff: the verdict, the errors of all modules above the floor, and the modules that matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from netkin.reporting.blocks import Lines, Name, Page, Section, Table, Text
from netkin.reporting.charts import Axis, Chart, Line
from netkin.reporting.parts import origins
from netkin.results.diff import SAME, Diff, ModuleDiff, blocks_among, named, number_cells
from netkin.results.labels import plural

HEAD = ("module", "class", "local error", "floor", "ratio", "end to end", "worst example", "at position")
DESIGNED = ("z among its kind", "weights")
MEANING = (
    "Local: each module of one model was run on the inputs of its counterpart in the other. Floor: what rounding alone "
    "does to its output; a module whose point lies well above has a fault of its own, or other weights. End to end: "
    "outputs in the two whole runs. Points at the lower edge are modules that do not differ at all."
)
PATCHED = (
    "The line shows what is left where the first model's output takes the place of the second's after each block. That "
    "comes from what follows; where the line falls, the difference arises."
)
FROM_STATES = (
    "Between two places at which the second program's states are known, the first model's code was run on the first of "
    "them; shown is how far it comes from the second. The floor is what rounding alone does on the way; a module whose "
    "error lies well above has a fault, or other weights, in it or since the one before."
)
OPEN = 40  # modules up to which the whole table is open


def diff_page(result: Diff) -> Page:
    """Return the page of a diff."""
    chart, patched = diff_chart(result), patched_chart(result)
    curves = None if chart is None else Lines(
        chart, "errors", "Errors of the modules, in the order of their calls",
        MEANING if result.way == "replayed" else FROM_STATES,
        upwards="relative error (logarithmic)", key_title="Errors:", tabled="The same as a table",
    )  # fmt: skip
    left = None if patched is None else Lines(
        patched, "patched", "Where the predictions part", caption=f"{_sentence(result.patched_in_words())} {PATCHED}",
        heading=True, upwards="KL in nats",
    )  # fmt: skip
    is_designed, places = bool(result.by_design), dict(result.ranking)
    head = (*HEAD, *DESIGNED) if is_designed else HEAD

    def row(one: ModuleDiff) -> list[Any]:
        local, floor, ratio, whole = number_cells(one)
        where = ["–" if place is None else f"{place:,}" for place in (one.worst_sequence, one.worst_position)]
        own = [f"{places[one.name]:.1f}" if one.name in places else "–", one.changed or "–"] if is_designed else []
        return [Name(named(one.name)), one.kind, local, floor, ratio, whole, *where, *own]

    top = Table(head, [row(one) for one in result.top()], label="Modules that matter", style="numbers")
    everything = [row(one) for one in result.modules.values()]
    table = Table(head, everything, f"All {plural(len(everything), 'module')}", "All modules", "numbers", folded=True,
                  open=len(everything) <= OPEN)  # fmt: skip
    arguments = Section("Arguments that differ", [Text(items=[str(one) for one in result.arguments])], "card")
    return Page(
        title=result.title,
        sentence=result.sentence,
        facts=_facts(result),
        caveats=result.caveats,
        blocks=[
            curves,
            left,
            Section("The modules that matter", [top, table], "card") if result.modules else None,
            _logprobs(result),
            arguments if result.arguments else None,
            _predictions(result),
            _routing(result),
            _weights(result),
        ],
        origins=origins(_origin_facts(result), result.provenance),
        style="diff",
        versions=[result.version],
        name=["diff", result.a, result.b],
        csv=(head, everything),
        results=[result],
        best=False,
    )


def diff_chart(result: Diff) -> Chart | None:
    """Return local and end-to-end errors above the floor as a chart; None where no module was replayed.

    Those that stand out, or among their kind, are drawn once more.
    """
    judged = [one for one in result.modules.values() if one.floor is not None]
    known = [value or 0.0 for one in judged for value in (one.floor, one.local, one.end_to_end)]
    reach = [value for value in known if value > 0 and math.isfinite(value)]
    if not reach:
        return None
    low = 10.0 ** (math.floor(math.log10(min(reach))) - 1)
    high = 10.0 ** math.ceil(math.log10(max(reach)) + 1e-9)

    def shown(values: Sequence[float | None]) -> list[float | None]:
        return [None if value is None or not math.isfinite(value) else value for value in values]

    lines = [
        Line("floor", shown([one.floor for one in judged]), filled=True),
        Line("end to end", shown([one.end_to_end or None for one in judged])),
        Line("local", shown([one.local for one in judged]), dotted=True),
    ]
    outstanding = set(result.standing_out) | set(result.outlying)
    if outstanding:
        own = [one.local if one.name in outstanding else None for one in judged]
        lines.append(Line("stands out", shown(own), dotted=True))
    blocks = set(blocks_among(one.name for one in judged))
    marked = [place for place, one in enumerate(judged) if one.name in blocks]
    places = [named(one.name) for one in judged]
    return Chart("errors of the modules", "module", places, lines, Axis(low, high, logarithmic=True), marked=marked)


def patched_chart(result: Diff) -> Chart | None:
    """Return the KL that is left after each block as a chart, from that without any, if it was measured."""
    if not result.patched:
        return None
    names, values = [*result.patched], [*result.patched.values()]
    if result.unpatched is not None:
        names, values = ["none", *names], [result.unpatched, *values]
    return Chart("KL that is left", "block", names, [Line("KL", values)], Axis(0.0, 1.05 * max(values) or 1.0))


def _facts(result: Diff) -> Sequence[str]:
    precisions = " and ".join(dict.fromkeys(result.precision))
    served = [f"{result.b}: {result.served}"] if result.serve else []
    counted = [plural(len(result.modules), "module")] if result.modules else []
    return [result.data, plural(result.examples, "example"), *served, *counted, precisions, result.created[:10]]


def _predictions(result: Diff) -> Section | None:
    lines = result.output_lines() if result.logprobs is None else []
    return Section("Predictions", [Text(_sentence(line)) for line in lines], "card") if lines else None


def _sentence(line: str) -> str:
    """Return a line of the terminal, such as "outputs: KL 3, …", as a sentence of its own."""
    said = line.partition(": ")[2]
    return f"{said[:1].upper()}{said[1:]}." if said else ""


def _logprobs(result: Diff) -> Section | None:
    """Return what the log-probabilities say as a table, if an engine reported some."""
    own = result.logprobs
    if own is None:
        return None
    rows = [
        ["mean reported", f"{own.mean_b:.4g}"], ["mean of the model's own", f"{own.mean_a:.4g}"],
        ["mean size of the difference", f"{own.mean_absolute:.3g}"],
        [f"the same by {own.precision} alone", f"{own.mean_rounding:.3g}"],
        ["largest difference, reported minus own", f"{own.worst:+.3g}"],
        ["where", f"position {own.worst_position:,} of sequence {own.worst_sequence:,}, token {own.worst_token}"],
        [f"largest by {own.precision} alone", f"{own.rounding:.3g}"],
        [f"tokens that differ more than {result.threshold:g} × that", f"{own.parted:,} of {own.tokens:,}"],
        ["KL(b ‖ a) per token, at least", f"{own.kl_at_least:.3g}"],
    ]  # fmt: skip
    note = Text(
        "If the tokens were sampled from the second program at temperature 1, the difference of the two means, "
        f"{own.mean_b - own.mean_a:.3g}, estimates the KL itself. Tokens that were not reported are not seen."
    )
    table = Table(["", "in nats"], rows, label="Log-probabilities", style="numbers")
    return Section("Log-probabilities", [table, note], "card")


def _routing(result: Diff) -> Section | None:
    if not result.routing:
        return None
    rows = [[Name(named(name)), f"{one.agreement:.2%}", f"{one.tokens - one.same:,}", f"{one.tokens:,}"]
            for name, one in result.routing.items()]  # fmt: skip
    head = ["router", "same experts", "tokens with others", "of"]
    table = Table(head, rows, label="Routing", style="numbers")
    return Section("Routing", [*(Text(f"{line}.") for line in result.routing_lines()), table], "card")


def _weights(result: Diff) -> Section | None:
    if not result.weights:
        return None
    rows = [[Name(name), one.relation, f"{one.error:.3g}", one.detail] for name, one in result.weights.items()
            if one.relation != "equal"]  # fmt: skip
    table = Table(["tensor", "relation", "difference", ""], rows, f"{plural(len(rows), 'tensor')} not equal",
                  "Weights", "numbers", folded=True)  # fmt: skip
    is_same = all(one.relation in SAME for one in result.weights.values())
    said = _sentence(result.weights_in_words())
    text = f"{said} All hold the same numbers, but for rounding." if is_same else said
    return Section("Weights", [Text(text), table if rows else None], "card")


def _origin_facts(result: Diff) -> dict[str, Any]:
    reference = {"a": result.a, "b": result.b}[result.reference] if result.way == "replayed" else result.b
    if result.serve:
        reference = f"{result.b}, {result.served}"
    return {
        "a": f"{result.a} ({result.precision[0]})", "b": f"{result.b} ({result.precision[1]})",
        "whose inputs were used": reference, "data": result.data, "examples": f"{result.examples:,}",
        "a module stands out above": f"{result.threshold:g} × its floor", "seed": result.seed,
        "made": result.created, "netkin": result.version,
    }  # fmt: skip
