"""The page of a diff: the verdict, the errors of all modules above the floor, and the modules that matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from netkin.reporting.blocks import Lines, Name, Page, Section, Table, Text
from netkin.reporting.charts import Axis, Chart, Line, chart_of
from netkin.reporting.parts import origins
from netkin.results.diff import Diff, ModuleDiff, named, number_cells
from netkin.results.labels import plural

HEAD = ("module", "class", "local error", "floor", "ratio", "end to end", "worst example", "at position")
MEANING = (
    "Each module of one model was run on the inputs of its counterpart in the other. The floor is what rounding alone "
    "does to its output; a module whose error lies well above has a fault of its own, or other weights."
)
OPEN = 40  # modules up to which the whole table is open
LEAST = 1e-12  # of errors, which a logarithmic axis shows


def diff_page(result: Diff) -> Page:
    """Return the page of a diff."""
    chart, patched = diff_chart(result), patched_chart(result)
    curves = None if chart is None else Lines(
        chart, "errors", "Errors of the modules, in the order of their calls", MEANING,
        upwards="relative error (logarithmic)", ways="Errors:", tabled="The same as a table",
    )  # fmt: skip
    left = None if patched is None else Lines(
        patched, "patched", "What is left of the difference", "The KL of the predictions, where the first model's "
        "output takes the place of the second's after a block.", heading=True, upwards="KL in nats",
    )  # fmt: skip
    top = Table(HEAD, [_row(one) for one in result.top()], label="Modules that matter", style="numbers")
    everything = [_row(one) for one in result.modules.values()]
    table = Table(HEAD, everything, f"All {plural(len(everything), 'module')}", "All modules", "numbers", folded=True,
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
            _routing(result),
            _weights(result),
        ],
        origins=origins(_origin_facts(result), result.provenance),
        style="diff",
        versions=[result.version],
        name=["diff", result.a, result.b],
        csv=(HEAD, everything),
        results=[result],
        best=False,
    )


def diff_chart(result: Diff) -> Chart | None:
    """Return local and end-to-end errors above the floor as a chart; None where no module was replayed."""
    judged = [one for one in result.modules.values() if one.floor is not None]
    values = {
        "floor": [_shown(one.floor) for one in judged],
        "local": [_shown(one.local) for one in judged],
        "end to end": [_shown(one.end_to_end) for one in judged],
    }
    reach = [value for own in values.values() for value in own if value is not None]
    if not reach:
        return None
    ends = 10.0 ** math.floor(math.log10(min(reach))), 10.0 ** math.ceil(math.log10(max(reach)) + 1e-9)
    lines = [Line(name, own, filled=name == "floor") for name, own in values.items()]
    places = [named(one.name) for one in judged]
    return Chart("errors of the modules", "module", places, lines, Axis(*ends, logarithmic=True))


def _shown(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else max(value, LEAST)


def patched_chart(result: Diff) -> Chart | None:
    """Return the KL that is left after each block as a chart, if it was measured."""
    if not result.patched:
        return None
    return chart_of("KL that is left", {"block": [*result.patched], "KL": [*result.patched.values()]})


def _row(one: ModuleDiff) -> list[Any]:
    local, floor, ratio, whole = number_cells(one)
    places = ["–" if place is None else f"{place:,}" for place in (one.worst_sequence, one.worst_position)]
    return [Name(named(one.name)), one.kind, local, floor, ratio, whole, *places]


def _facts(result: Diff) -> Sequence[str]:
    precisions = " and ".join(dict.fromkeys(result.precision))
    served = [f"{result.b}: {result.served}"] if result.serve else []
    return [result.data, plural(result.examples, "example"), *served, plural(len(result.modules), "module"), precisions,
            result.created[:10]]  # fmt: skip


def _predictions(result: Diff) -> Section | None:
    lines = result.output_lines()
    return Section("Predictions", [Text(line) for line in lines], "card") if lines else None


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
    table = Table(["tensor", "relation", "difference", ""], rows, f"{plural(len(rows), 'tensor')} that differ",
                  "Weights", "numbers", folded=True)  # fmt: skip
    return Section("Weights", [Text(f"{result.weights_in_words()}."), table if rows else None], "card")


def _origin_facts(result: Diff) -> dict[str, Any]:
    reference = {"a": result.a, "b": result.b}[result.reference]
    if result.serve:
        reference = f"{result.b}, {result.served}"
    return {
        "a": f"{result.a} ({result.precision[0]})", "b": f"{result.b} ({result.precision[1]})",
        "whose inputs were used": reference, "data": result.data, "examples": f"{result.examples:,}",
        "a module stands out above": f"{result.threshold:g} × its floor", "seed": result.seed,
        "made": result.created, "netkin": result.version,
    }  # fmt: skip
