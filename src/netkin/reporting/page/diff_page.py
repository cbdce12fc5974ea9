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
FROM_STATES = (
    "Between two places at which the second program's states are known, the first model's code was run on the first of "
    "them; shown is how far it comes from the second. The floor is what rounding alone does on the way; a module whose "
    "error lies well above has a fault, or other weights, in it or since the one before."
)
OPEN = 40  # modules up to which the whole table is open
LEAST = 1e-12  # of errors, which a logarithmic axis shows


def diff_page(result: Diff) -> Page:
    """Return the page of a diff."""
    chart, patched = diff_chart(result), patched_chart(result)
    curves = None if chart is None else Lines(
        chart, "errors", "Errors of the modules, in the order of their calls",
        MEANING if result.way == "replayed" else FROM_STATES,
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
            Section("The modules that matter", [top, table], "card") if result.modules else None,
            _logprobs(result),
            arguments if result.arguments else None,
            _predictions(result),
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
    counted = [plural(len(result.modules), "module")] if result.modules else []
    return [result.data, plural(result.examples, "example"), *counted, precisions, result.created[:10]]


def _predictions(result: Diff) -> Section | None:
    lines = result.output_lines() if result.logprobs is None else []
    return Section("Predictions", [Text(line) for line in lines], "card") if lines else None


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


def _weights(result: Diff) -> Section | None:
    if not result.weights:
        return None
    rows = [[Name(name), one.relation, f"{one.error:.3g}", one.detail] for name, one in result.weights.items()
            if one.relation != "equal"]  # fmt: skip
    table = Table(["tensor", "relation", "difference", ""], rows, f"{plural(len(rows), 'tensor')} that differ",
                  "Weights", "numbers", folded=True)  # fmt: skip
    return Section("Weights", [Text(f"{result.weights_in_words()}."), table if rows else None], "card")


def _origin_facts(result: Diff) -> dict[str, Any]:
    reference = {"a": result.a, "b": result.b}[result.reference] if result.way == "replayed" else result.b
    return {
        "a": f"{result.a} ({result.precision[0]})", "b": f"{result.b} ({result.precision[1]})",
        "whose inputs were used": reference, "data": result.data, "examples": f"{result.examples:,}",
        "a module stands out above": f"{result.threshold:g} × its floor", "seed": result.seed,
        "made": result.created, "netkin": result.version,
    }  # fmt: skip
