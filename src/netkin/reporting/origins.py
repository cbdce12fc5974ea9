"""Where the numbers come from: every field that a comparison carries, as tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from netkin.reporting.markup import Markup, name, tag
from netkin.reporting.wording import direction, range_of
from netkin.results import Comparison, Values
from netkin.results.labels import NOT_ASKED, has_networks, listing
from netkin.results.text import NO_DATA, error_summary, has_errors

_IDENTITY = re.compile(r"(final )?weights( .+)?|(.+ )?digest|call")
_OF_LAYER = re.compile(r"(.+) ['\"](.+)['\"]")  # a fact about one layer, such as: cut after 'relu1'


def origins(comparison: Comparison, names: Mapping[str, str]) -> Markup:
    """Return the section that says how the numbers of a comparison came to be; `names` are shorter ones of models."""
    models = {} if has_networks(comparison) else {"a": comparison.a, "b": comparison.b}
    return section(
        _general(comparison),
        folded("The measures, with every convention", measure_table(comparison.tables.values()), open_=True),
        *(folded(f"The layers of {names[model]}", layer_table(comparison, side)) for side, model in models.items()),
        identity(comparison.provenance),
    )


def identity(provenance: Mapping[str, str]) -> Markup | None:
    """Return digests and calls, which tell results apart and are seldom read, folded; None where there are none."""
    found = {key: value for key, value in provenance.items() if is_identity(key)}
    return folded("Identity: digests of weights, data and settings", _facts(found)) if found else None


def is_identity(key: str) -> bool:
    """Tell whether a word of provenance is about a digest or a call."""
    return _IDENTITY.fullmatch(key) is not None


def section(facts: Mapping[str, Any], *parts: Markup | None) -> Markup:
    """Return the section of origins: general facts first, then what is folded."""
    title = tag("h2", "Where these numbers come from")
    return tag("section", title, tag("div", _facts(facts), class_="card"), *parts, class_="origins")


def _general(comparison: Comparison) -> dict[str, Any]:
    sides = ("first model", "second model") if listing(comparison) else ("rows", "columns")
    facts = {
        sides[0]: f"{comparison.a}, {_counted(comparison.layers_a)}",
        sides[1]: f"{comparison.b}, {_counted(comparison.layers_b)}",
    }
    if has_networks(comparison):
        facts = {"networks": f"{len(comparison.layers_a):,}"}
    facts |= common_facts(comparison)
    provenance = comparison.provenance.items()
    more = {key: value for key, value in provenance if key not in facts and not is_identity(key)}
    return facts | grouped(more, comparison.layers_b)


def _counted(layers: Sequence[str]) -> str:
    return "1 layer" if len(layers) == 1 else f"{len(layers):,} layers"


def grouped(facts: Mapping[str, str], layers: Sequence[str]) -> dict[str, str]:
    """Return facts in which what is said alike of several layers is said once.

    Example:
        >>> grouped({"cut after 'in'": "stopped after 'in'", "cut after 'out'": "stopped after 'out'"}, ["in", "out"])
        {'cut after each layer': 'stopped after it'}
    """
    alike: dict[tuple[str, str], list[str]] = {}  # a fact's words and what it says, both without the layer's name
    for key, said in facts.items():
        found = _OF_LAYER.fullmatch(key)
        words, layer = (found[1], found[2]) if found and found[2] in layers else (key, "")
        alike.setdefault((words, said.replace(f"{layer!r}", "it") if layer else said), []).append(layer)
    return dict(_fact_row(words, said, own, layers) for (words, said), own in alike.items())


def _fact_row(words: str, said: str, own: Sequence[str], layers: Sequence[str]) -> tuple[str, str]:
    """Return a fact about several layers: in one row with their names, or without where it is about all of them."""
    if not own[0]:
        return words, said
    if len(own) == 1:
        return f"{words} {own[0]}", said
    whole = set(own) == set(layers)
    return (f"{words} each layer", said) if whole else (f"{words} {len(own)} layers", f"{said}\n{', '.join(own)}")


def common_facts(comparison: Comparison) -> dict[str, Any]:
    """Return what a comparison says of its data and its making."""
    shapes = sorted({*comparison.shapes_a.values(), *comparison.shapes_b.values()})
    data = {
        "data": comparison.data,
        "examples": f"{comparison.examples:,}",
        "what one example is": ", ".join(shapes) or "not said",
    }
    return ({"data": NO_DATA} if comparison.needs_no_data else data) | {
        "seed": comparison.seed,
        "complete": "yes" if comparison.complete else "no, it was interrupted",
        "made": comparison.created,
        "netkin": comparison.version,
    }


def _facts(facts: Mapping[str, Any]) -> Markup:
    rows = [tag("tr", tag("th", key, scope="row"), tag("td", value)) for key, value in facts.items()]
    return tag("div", tag("table", tag("tbody", *rows), class_="plain facts"), class_="scroll")


def measure_table(tables: Iterable[Values], **more: Mapping[str, str]) -> Markup:
    """Return a table with a column for each measure; `more` holds other facts by the measures' ids."""
    told = {
        table.id: _conventions(table) | {word.replace("_", " "): own[table.id] for word, own in more.items()}
        for table in tables
    }
    words = next(iter(told.values()), {})
    rows = [[word, *(own[word] for own in told.values())] for word in words]
    return plain_table(["", *told], rows, kind="measures", label="The measures and their conventions")


def plain_table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, kind: str = "", label: str = "") -> Markup:
    """Return a table whose first column names its rows; with a `label` the keyboard can reach it, to scroll."""
    top = tag("tr", *(tag("th", word, scope="col") for word in head))
    body = [tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest)) for first, *rest in rows]
    table = tag("table", tag("thead", top), tag("tbody", *body), class_=f"plain {kind}".strip())
    reached = {"tabindex": "0", "role": "region", "aria_label": label} if label else {}
    return tag("div", table, class_="scroll", **reached)


def _conventions(table: Values) -> dict[str, Any]:
    return {
        "measure": table.name,
        "parameters": ", ".join(f"{key} = {value}" for key, value in table.parameters.items()) or "none",
        "conventions": table.conventions or "not said",
        "direction": direction(table),
        "range": range_of(table),
        "unit": table.unit or "none",
        "symmetric": "yes" if table.symmetric else "no: exchanging the models changes the values",
        "statistic": table.statistic,
        "exactness": table.exactness,
        "standard errors": _errors(table),
        "pairs without a value": _missing(table),
    }


def _missing(table: Values) -> str:
    unasked = sum(reason == NOT_ASKED for reason in table.holes.values())
    asked = f"{len(table.holes) - unasked:,} of {table.values.size - unasked:,}"
    return f"{asked}; {unasked:,} more were not asked for" if unasked else asked


def _errors(table: Values) -> str:
    if has_errors(table):
        return error_summary(table)
    return "; ".join(dict.fromkeys(table.error_reasons.values())) or "not asked for"


def layer_table(comparison: Comparison, side: str) -> Markup:
    """Return the layers of side a or b, with what one example is and how wide they are, as far as that is known."""
    told = {"what one example is": f"shapes_{side}", "width": f"widths_{side}"}
    known = {words: getattr(comparison, field) for words, field in told.items() if getattr(comparison, field)}
    layers = getattr(comparison, f"layers_{side}")
    rows = [[name(layer), *(own.get(layer, "–") for own in known.values())] for layer in layers]
    return plain_table(["layer", *known], rows)


def folded(title: str, body: Markup, open_: bool = False) -> Markup:
    """Return what opens at its title."""
    return tag("details", tag("summary", title), body, class_="card", open=open_)
