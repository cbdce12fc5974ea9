"""Where the numbers come from: every field that a comparison carries, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from netkin.reporting.markup import Markup, name, tag
from netkin.reporting.wording import direction, number, range_of
from netkin.results import Comparison, Values


def origins(comparison: Comparison) -> Markup:
    """Return the section that says how the numbers came to be."""
    return tag(
        "section",
        tag("h2", "Where these numbers come from"),
        tag("div", _facts(_general(comparison)), class_="card"),
        _folded("The measures, with every convention", _measures(comparison.tables.values()), open_=True),
        _folded(
            f"The layers of {comparison.a}", _layers(comparison.layers_a, comparison.shapes_a, comparison.widths_a)
        ),
        _folded(
            f"The layers of {comparison.b}", _layers(comparison.layers_b, comparison.shapes_b, comparison.widths_b)
        ),
        class_="origins",
    )


def _general(comparison: Comparison) -> dict[str, Any]:
    shapes = sorted({*comparison.shapes_a.values(), *comparison.shapes_b.values()})
    facts = {
        "rows": f"{comparison.a}, {len(comparison.layers_a)} layers",
        "columns": f"{comparison.b}, {len(comparison.layers_b)} layers",
        "data": comparison.data,
        "examples": f"{comparison.examples:,}",
        "what one example is": ", ".join(shapes) or "not said",
        "seed": comparison.seed,
        "complete": "yes" if comparison.complete else "no, it was interrupted",
        "made": comparison.created,
        "netkin": comparison.version,
    }
    return facts | {key: value for key, value in comparison.provenance.items() if key not in facts}


def _facts(facts: Mapping[str, Any]) -> Markup:
    rows = [tag("tr", tag("th", key, scope="row"), tag("td", value)) for key, value in facts.items()]
    return tag("div", tag("table", tag("tbody", *rows), class_="plain facts"), class_="scroll")


def _measures(tables: Iterable[Values]) -> Markup:
    """Return a table with a column for each measure."""
    told = {table.id: _conventions(table) for table in tables}
    head = tag("tr", tag("th", "", scope="col"), *(tag("th", measure, scope="col") for measure in told))
    words = next(iter(told.values()), {})
    rows = [tag("tr", tag("th", word, scope="row"), *(tag("td", own[word]) for own in told.values())) for word in words]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="plain measures")
    return tag(
        "div", table, class_="scroll", tabindex="0", role="region", aria_label="The measures and their conventions"
    )


def _conventions(table: Values) -> dict[str, Any]:
    return {
        "measure": table.name,
        "parameters": ", ".join(f"{key} = {value}" for key, value in table.parameters.items()) or "none",
        "conventions": table.conventions or "not said",
        "direction": direction(table),
        "range": range_of(table),
        "symmetric": "yes" if table.symmetric else "no: exchanging the models changes the values",
        "statistic": table.statistic,
        "exactness": table.exactness,
        "standard errors": _errors(table),
        "pairs without a value": f"{len(table.holes):,} of {table.values.size:,}",
    }


def _errors(table: Values) -> str:
    if table.errors is None:
        return "not asked for"
    known = table.errors[table.errors == table.errors]
    return f"up to {number(float(known.max()))}" if known.size else "none could be had"


def _layers(layers: Sequence[str], shapes: Mapping[str, str], widths: Mapping[str, int]) -> Markup:
    head = tag("tr", *(tag("th", word, scope="col") for word in ("layer", "what one example is", "width")))
    rows = [
        tag(
            "tr",
            tag("th", name(layer), scope="row"),
            tag("td", shapes.get(layer, "–")),
            tag("td", widths.get(layer, "–")),
        )
        for layer in layers
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="plain"), class_="scroll")


def _folded(title: str, body: Markup, open_: bool = False) -> Markup:
    return tag("details", tag("summary", title), body, class_="card", open=open_)
