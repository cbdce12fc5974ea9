"""What every page shares: HTML that is escaped by construction, the document around it, tables, origins of numbers.

A policy in the document forbids every request: the page loads nothing from elsewhere.
"""

from __future__ import annotations

import gzip
import html
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files as resources
from typing import Any

from netkin.reporting.grids import depths, ink, palette
from netkin.reporting.words import direction, range_of
from netkin.results import Comparison, Values
from netkin.results.caveats import Caveat
from netkin.results.labels import NOT_ASKED, error_summary, has_errors
from netkin.results.text import NO_DATA

SCRIPTS = ("page", "heatmap", "saving", "chart", "controls")  # of pages with heatmaps
CHARTS = ("page", "chart")  # of pages with charts alone
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
# without a script there is nothing to choose with, so that all is shown and drawn
UNSCRIPTED = (
    ".controls{display:none!important}[data-chosen][hidden]{display:block!important}"
    ".cards .card.wide{content-visibility:visible!important}"
)
_EMPTY = frozenset({"meta", "input", "col", "br", "img"})
# as JSON escapes, none of these can end a script or start a tag; U+2028 and U+2029 end a line in older JavaScript
_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
_IDENTITY = re.compile(r"(final )?weights( .+)?|(.+ )?digest|call")
MOST = 3  # caveats of one kind, listed side by side
PLAIN = ("none", "yes", "exact", "not asked for", "0 of ")  # what conventions say where there is nothing to know
USUAL = ("none", "None", "all", "yes", "float32, exact", "cpu")  # values of settings that were left alone
_OF_LAYER = re.compile(r"(.+) ['\"](.+)['\"]")  # a fact about one layer, such as: cut after 'relu1'
_TECHNICAL = re.compile(r"made|netkin|torch|python|plan|products|directions [ab]|asked .+|precision.*|engine.*")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(element: str, /, *children: Any, **attributes: Any) -> Markup:
    """Return an element; ``class_`` stands for ``class`` and ``aria_label`` for ``aria-label``.

    Example:
        >>> tag("p", "2 < 3", tag("br"), class_="note", hidden=True, id=None)
        '<p class="note" hidden>2 &lt; 3<br></p>'
    """
    opening = f"<{element}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    return Markup(opening if element in _EMPTY else f"{opening}{joined(*children)}</{element}>")


def joined(*children: Any) -> Markup:
    """Return pieces one after the other; None is left out, text is escaped."""
    return Markup("".join(escaped(child) for child in children if child is not None))


def escaped(value: Any) -> str:
    """Return `value` as HTML: markup as it is, anything else as text."""
    return str(value) if isinstance(value, Markup) else html.escape(_writable(str(value)))


def name(text: str) -> Markup:
    """Return a name that keeps its direction of writing to itself."""
    return tag("bdi", text)


def data_script(data: Any) -> Markup:
    """Return `data` as a JSON element that a script can read, and from which no text can break out."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(f'<script type="application/json" id="data">{_writable(text).translate(_UNSAFE)}</script>')


def documents_script(documents: Sequence[Any]) -> Markup:
    """Return what the page saves as JSON: the text of each document, compressed, as they may be large."""
    texts = [json.dumps(one, ensure_ascii=False, allow_nan=False, separators=(",", ":")) for one in documents]
    packed = gzip.compress(_writable(json.dumps(texts, ensure_ascii=False)).encode(), mtime=0)
    return tag("script", b64encode(packed).decode(), type="application/gzip", id="documents")


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{html.escape(_writable(str(value)))}"'


def _writable(text: str) -> str:
    # a lone half of a surrogate pair, as in a badly decoded file name, has no UTF-8
    return text.encode("utf-8", "replace").decode("utf-8")


# --- the document -----------------------------------------------------------------------------------------------------


def document(
    title: str,
    sentence: str,
    main: Iterable[Markup | None],
    data: Any,
    documents: Sequence[Any] = (),
    *,
    kind: str,
    versions: Iterable[str],
    whole: str | None = None,
    controls: Markup | None = None,
    note: str = "",
    scripts: Iterable[str] = SCRIPTS,
    rules: str = "",
) -> str:
    """Return a whole page: its header, its parts and its footer, the data as JSON, our styles and our scripts.

    Args:
        title: the title.
        sentence: the main result in one sentence.
        main: the parts of the page.
        data: what scripts read.
        documents: what is saved as JSON, the documents that `nk.load` opens; several where one of them is chosen.
        kind: the class of the body.
        versions: the versions of netkin that made the results.
        whole: the title in full, where it is shortened.
        controls: the toolbar, if there is one.
        note: words for the footer.
        scripts: the names of our scripts.
        rules: styles that were computed for this page.
    """
    program = "".join(_asset(f"old/{script}.js") for script in scripts)
    script = tag("script", Markup(f'"use strict";\n(() => {{\n{program}}})();\n'))
    shown = joined(_header(title, sentence, whole), controls, tag("main", *main), _footer(versions, note))
    saved = documents_script(documents) if documents else None
    body = tag("body", shown, data_script(data), saved, script, class_=kind)
    return f"<!DOCTYPE html>\n{tag('html', _head(title, rules), body, lang='en')}\n"


def _head(title: str, rules: str) -> Markup:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content="netkin"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(_asset("page.css") + rules + shade_rules() + bar_rule())),
        tag("noscript", tag("style", Markup(UNSCRIPTED))),
    )


def shade_rules() -> str:
    """Return the style rules of all shades, with a colour of text that is readable on each."""
    return "".join(f".c{i}{{background:{shade};color:{ink(shade)}}}" for i, shade in enumerate(palette()))


def bar_rule() -> str:
    """Return the style rule of the legend's bar."""
    stops = ",".join(palette()[i] for i in range(0, 256, 15))
    return f".bar{{background:linear-gradient(90deg,{stops})}}"


def depth_rules() -> str:
    """Return the style rules of the layers' colours on light and dark pages, and on paper."""
    light, dark = ("".join(f"--d{i}:{colour};" for i, colour in enumerate(depths(page))) for page in ("light", "dark"))
    system = f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    paper = f"@media print{{:root,:root[data-theme=dark],:root:not([data-theme=light]){{{light}}}}}"
    return f":root{{{light}}}{system}:root[data-theme=dark]{{{dark}}}{paper}"


def retitled(page: str, title: str) -> str:
    """Return a whole page with another title, in its head and as its first heading."""
    for name in ("title", "h1"):
        start = page.index(f"<{name}")
        end = page.index(f"</{name}>", start) + len(f"</{name}>")
        page = page[:start] + tag(name, title) + page[end:]
    return page


def _header(title: str, sentence: str, whole: str | None) -> Markup:
    button = tag("button", "Dark or light", type="button", id="theme", class_="controls")
    top = tag("div", tag("span", "netkin report", class_="brand"), button, class_="top")
    return tag("header", top, tag("h1", title, title=whole), tag("p", sentence, class_="headline"))


def toolbar(*parts: Markup | None, best: bool | None = True, cells: bool = True) -> Markup:
    """Return the bar of controls: those of this page first, then those of every page.

    `best` says whether best matches are marked at first; None that there are none. Without `cells` there are none that
    could be made larger.
    """
    zoom = tag("input", type="range", id="zoom", min="0.5", max="4", step="0.1", value="1")
    unfold = tag("button", "View and save", type="button", id="unfold", aria_expanded="false", aria_controls="view")
    saves = [tag("button", kind.upper(), type="button", data_save=kind) for kind in ("csv", "json")]
    shared = [
        tag("label", "Size of the cells", zoom, hidden=not cells),
        _check("fit", "Fit colours to this page", False, hidden=not cells),
        _check("values", "Values in the cells", False, hidden=not cells),
        _check("path", "Best matches", bool(best), hidden=best is None),
        tag("span", "Save the numbers as ", *saves, class_="saving"),
    ]
    folded = tag("div", *shared, id="view", class_="view")
    words = "How the page is shown"
    return tag("div", *parts, unfold, folded, class_="toolbar controls", role="group", aria_label=words)


def facts(texts: Iterable[str]) -> Markup:
    """Return a few facts in a row."""
    return tag("ul", *(tag("li", text) for text in texts), class_="chips")


def warnings(caveats: Sequence[Caveat]) -> Markup | None:
    """Return the caveats to read before the numbers, or None where there are none."""
    if not caveats:
        return None
    title = tag("summary", f"Before you read the numbers ({len(caveats)})")
    alike: dict[str, list[str]] = {}
    for caveat in caveats:
        alike.setdefault(caveat.code, []).append(str(caveat))
    items = tag("ul", *(item for own in alike.values() for item in _items(own)))
    return tag("details", title, items, class_="warnings", role="note", open=True)


def _items(alike: Sequence[str]) -> list[Markup]:
    """Return items of a list; of many of one kind the first, with the others folded."""
    if len(alike) <= MOST:
        return [tag("li", text) for text in alike]
    rest = tag("ul", *(tag("li", text) for text in alike[1:]))
    return [tag("li", alike[0], folded_note(f"{len(alike) - 1} more like this", rest))]


def _footer(versions: Iterable[str], note: str) -> Markup:
    words = f"Made by netkin {', '.join(dict.fromkeys(versions))}."
    own = " This page holds all of its data and loads nothing from elsewhere."
    return tag("footer", tag("p", joined(words, own, f" {note}" if note else None)))


def _check(key: str, label: str, on: bool, hidden: bool = False) -> Markup:
    return tag("label", tag("input", type="checkbox", id=key, checked=on), label, hidden=hidden)


def _asset(filename: str) -> str:
    return resources("netkin.reporting").joinpath("assets", filename).read_text(encoding="utf-8")


# --- where the numbers come from --------------------------------------------------------------------------------------


def origins(facts: Mapping[str, Any], provenance: Mapping[str, Any], *parts: Markup | None) -> Markup:
    """Return the section with the origins of numbers: facts and provenance, `parts`, and what is seldom read, folded.

    Digests and calls, which identify results, are folded; so are settings at their defaults.
    """
    identity = {
        key: value for key, value in provenance.items() if _IDENTITY.fullmatch(key) or str(value).startswith("digest ")
    }
    told = dict(facts) | {key: value for key, value in provenance.items() if key not in {*facts, *identity}}
    usual = {key: value for key, value in told.items() if is_usual(key, value)}
    own = tag("div", _facts({key: value for key, value in told.items() if key not in usual}), class_="card")
    digests = folded("Identity: digests of weights, data and settings", _facts(identity)) if identity else None
    more = folded(f"Versions, and {len(usual)} settings at their defaults", _facts(usual)) if usual else None
    return tag("section", tag("h2", "Where these numbers come from"), own, *parts, digests, more, class_="origins")


def grouped(facts: Mapping[str, str], layers: Sequence[str]) -> dict[str, str]:
    """Return facts without repetition for several layers.

    Example:
        >>> grouped({"cut after 'in'": "stopped after 'in'", "cut after 'out'": "stopped after 'out'"}, ["in", "out"])
        {'cut after each layer': 'stopped after it'}
    """
    alike: dict[tuple[str, str], list[str]] = {}  # a fact's words and what it says, both without the layer's name
    for fact, said in facts.items():
        found = _OF_LAYER.fullmatch(fact)
        words, layer = (found[1], found[2]) if found and found[2] in layers else (fact, "")
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


def is_usual(key: str, value: Any) -> bool:
    """Return whether a fact is a setting at its default, or about the software: said, but folded."""
    return str(value) in USUAL or _TECHNICAL.fullmatch(key) is not None or (key.endswith("seed") and value in (0, "0"))


def common_facts(comparison: Comparison) -> dict[str, Any]:
    """Return the facts of a comparison about its data and provenance."""
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
    usual = [row for row in rows if all(str(cell).startswith(PLAIN) for cell in row[1:])]
    table = plain_table(["", *told], [row for row in rows if row not in usual], kind="measures",
                        label="The measures and their conventions")  # fmt: skip
    rest = plain_table(["", *told], usual, kind="measures", label="Conventions at their defaults")
    return joined(table, folded_note(f"{len(usual)} more, at their defaults", rest) if usual else None)


def folded_note(title: str, body: Markup) -> Markup:
    """Return what opens at its title, inside a card."""
    return tag("details", tag("summary", title), body)


def plain_table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, kind: str = "", label: str = "") -> Markup:
    """Return a table whose first column names its rows; with a `label` the keyboard can reach it, to scroll."""
    top = tag("tr", *(tag("th", word, scope="col") for word in head))
    body = [tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest)) for first, *rest in rows]
    table = tag("table", tag("thead", top), tag("tbody", *body), class_=f"plain {kind}".strip())
    reached = {"tabindex": "0", "role": "region", "aria_label": label} if label else {}
    return tag("div", table, class_="scroll", **reached)


def _conventions(table: Values) -> dict[str, Any]:
    return {
        "measure": table.quantity.name,
        "parameters": ", ".join(f"{key} = {value}" for key, value in table.quantity.parameters.items()) or "none",
        "conventions": table.quantity.convention or "not said",
        "direction": direction(table),
        "range": range_of(table),
        "unit": table.quantity.unit or "none",
        "symmetric": "yes" if table.quantity.symmetric else "no: exchanging the models changes the values",
        "statistic": table.statistic,
        "exactness": table.exactness,
        "standard errors": _errors(table),
        "pairs without a value": _missing(table),
    }


def _missing(table: Values) -> str:
    unasked = sum(reason == NOT_ASKED for reason in table.missing.values())
    asked = f"{len(table.missing) - unasked:,} of {table.values.size - unasked:,}"
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
