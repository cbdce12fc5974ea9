"""What every page shares: the document around it, its styles and scripts, and a policy by which it loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files as resources
from typing import Any

from netkin.reporting.heatmaps import bar_rule, shade_rules
from netkin.reporting.markup import Markup, data_script, joined, tag

SCRIPTS = ("telling", "heatmaps", "profile", "controls", "theme", "scrolling", "pictures", "saving")  # of heatmaps
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
# without a script there is nothing to choose with, so that all is shown and drawn
UNSCRIPTED = (
    ".controls{display:none!important}[data-chosen][hidden]{display:block!important}"
    ".cards .card.wide{content-visibility:visible!important}"
)


def document(
    title: str,
    shown: Markup,
    data: Any,
    *,
    styles: Iterable[str],
    scripts: Iterable[str],
    kind: str,
    rules: str = "",
) -> str:
    """Return a whole page: what is shown, the data as JSON, and our styles and scripts of those names.

    `kind` is the class of its body, and `rules` are styles that were computed for it.
    """
    program = "".join(_asset(f"{script}.js") for script in scripts)
    script = tag("script", Markup(f'"use strict";\n(() => {{\n{program}}})();\n'))
    body = tag("body", shown, data_script(data), script, class_=kind)
    return f"<!DOCTYPE html>\n{tag('html', _head(title, styles, rules), body, lang='en')}\n"


def _head(title: str, styles: Iterable[str], rules: str) -> Markup:
    sheets = "".join(_asset(f"{style}.css") for style in styles)
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content="netkin"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(sheets + rules + shade_rules() + bar_rule())),
        tag("noscript", tag("style", Markup(UNSCRIPTED))),
    )


def retitled(page: str, title: str) -> str:
    """Return a whole page with another title, in its head and as its first heading."""
    for name in ("title", "h1"):
        start = page.index(f"<{name}")
        end = page.index(f"</{name}>", start) + len(f"</{name}>")
        page = page[:start] + tag(name, title) + page[end:]
    return page


def header(title: str, sentence: str, whole: str | None = None) -> Markup:
    """Return the top of a page: its title (told in full by `whole`), and the one sentence that says what was found."""
    button = tag("button", "Dark or light", type="button", id="theme", class_="controls")
    top = tag("div", tag("span", "netkin report", class_="brand"), button, class_="top")
    return tag("header", top, tag("h1", title, title=whole), tag("p", sentence, class_="headline"))


def toolbar(*parts: Markup | None, best: bool | None = True, cells: bool = True) -> Markup:
    """Return the bar of controls: those of this page first, then those of every page.

    `best` says whether best matches are marked at first; None that there are none. Without `cells` there are none that
    could be made larger.
    """
    zoom = tag("input", type="range", id="zoom", min="0.5", max="4", step="0.1", value="1")
    shared = [
        tag("label", "Size of the cells", zoom, hidden=not cells),
        _check("values", "Values in the cells", False, hidden=not cells),
        _check("path", "Best matches", bool(best), hidden=best is None),
        tag("span", "Save the numbers as ", *_saves(), class_="saving"),
    ]
    return tag("div", *parts, *shared, class_="toolbar controls", role="group", aria_label="How the page is shown")


def facts(texts: Iterable[str]) -> Markup:
    """Return a few facts in a row."""
    return tag("ul", *(tag("li", text) for text in texts), class_="chips")


def warnings(said: Sequence[str]) -> Markup | None:
    """Return what to know before reading the numbers, or None where there is nothing."""
    if not said:
        return None
    title = tag("strong", "Before you read the numbers")
    return tag("div", title, tag("ul", *(tag("li", warning) for warning in said)), class_="warnings", role="note")


def footer(versions: Iterable[str], note: str = "") -> Markup:
    """Return the bottom of a page."""
    words = f"Made by netkin {', '.join(dict.fromkeys(versions))}."
    own = " This page holds all of its data and loads nothing from elsewhere."
    return tag("footer", tag("p", joined(words, own, f" {note}" if note else None)))


def _saves() -> list[Markup]:
    return [tag("button", kind.upper(), type="button", data_save=kind) for kind in ("csv", "json")]


def _check(key: str, label: str, on: bool, hidden: bool = False) -> Markup:
    return tag("label", tag("input", type="checkbox", id=key, checked=on), label, hidden=hidden)


def _asset(filename: str) -> str:
    return resources("netkin.reporting").joinpath("assets", filename).read_text(encoding="utf-8")
