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
OPEN = 40  # modules up to which the whole table is open


def diff_page(result: Diff) -> Page:
    """Return the page of a diff."""
    chart, patched = diff_chart(result), patched_chart(result)
    curves = None if chart is None else Lines(
        chart, "errors", "Errors of the modules, in the order of their calls", MEANING,
        upwards="relative error (logarithmic)", ways="Errors:", tabled="The same as a table",
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
            Section("The modules that matter", [top, table], "card"),
            arguments if result.arguments else None,
            _predictions(result),
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
    return [result.data, plural(result.examples, "example"), plural(len(result.modules), "module"), precisions,
            result.created[:10]]  # fmt: skip


def _predictions(result: Diff) -> Section | None:
    lines = result.output_lines()
    return Section("Predictions", [Text(_sentence(line)) for line in lines], "card") if lines else None


def _sentence(line: str) -> str:
    """Return a line of the terminal, such as "outputs: KL 3, …", as a sentence of its own."""
    said = line.partition(": ")[2]
    return f"{said[:1].upper()}{said[1:]}." if said else ""


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
    reference = {"a": result.a, "b": result.b}[result.reference]
    return {
        "a": f"{result.a} ({result.precision[0]})", "b": f"{result.b} ({result.precision[1]})",
        "whose inputs were used": reference, "data": result.data, "examples": f"{result.examples:,}",
        "a module stands out above": f"{result.threshold:g} × its floor", "seed": result.seed,
        "made": result.created, "netkin": result.version,
    }  # fmt: skip
