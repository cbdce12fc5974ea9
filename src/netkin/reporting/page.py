"""The report: one HTML page that holds everything it needs and asks nothing of anybody."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from netkin import files
from netkin.errors import ValueFault
from netkin.reporting.embedding import embedded
from netkin.reporting.grids import Grid, grid_of, summary_grids
from netkin.reporting.heatmaps import bar_rule, figure_of, shade_rules
from netkin.reporting.markup import Markup, data_script, joined, name, tag
from netkin.reporting.meanings import meaning_of
from netkin.reporting.origins import origins
from netkin.reporting.profiles import profile
from netkin.reporting.wording import direction, headline, range_of, reasons
from netkin.results import Comparison, Comparisons, Values

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
CHOOSABLE = 4  # with more measures than these the page offers a choice among them
FEW = 12  # columns, up to which the cells show their values at first
MEANS = "Each cell is the mean over layers of the same name or, where none is shared, over each layer's best match."

Results = Comparison | Comparisons | Iterable[Comparison]


def report(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write one comparison or several as a single HTML page to `path`, and return the path.

    The page opens in any browser without a network; it is there whole or not at all.
    """
    files.write_text(path, page(results))
    return Path(path)


def page(results: Results) -> str:
    """Return the HTML page of one comparison or several."""
    comparisons = listed(results)
    summaries = summary_grids(comparisons)
    title = _title(comparisons)
    shown = joined(
        _header(title, comparisons), _toolbar(comparisons), _main(comparisons, summaries), _footer(comparisons)
    )
    script = tag("script", Markup(_asset("page.js")))
    body = tag("body", shown, data_script(embedded(comparisons, summaries)), script, class_=_values(comparisons))
    return f"<!DOCTYPE html>\n{tag('html', _head(title), body, lang='en')}\n"


def _values(comparisons: Sequence[Comparison]) -> str:
    """Say whether values stand in the cells before any script runs: where they are few enough to be read."""
    return "values-shown" if max(len(c.layers_b) for c in comparisons) <= FEW else "values-hidden"


def listed(results: Any) -> list[Comparison]:
    """Return what is to be shown as a list of comparisons, or refuse what is none."""
    if isinstance(results, Comparison):
        return [results]
    found = list(results.values()) if isinstance(results, Comparisons) else results
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    strange = next((one for one in found if not isinstance(one, Comparison)), None)
    if strange is not None:
        raise ValueFault(
            f"a report shows comparisons; got {type(strange).__name__}. `nk.load(path)` opens a saved one."
        )
    if not found:
        raise ValueFault("a report needs at least one comparison; got none.")
    return found


def _head(title: str) -> Markup:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(_asset("page.css") + shade_rules() + bar_rule())),
        tag(
            "noscript",
            tag("style", Markup(".controls{display:none!important}article[hidden]{display:block!important}")),
        ),
    )


def _title(comparisons: Sequence[Comparison]) -> str:
    if len(comparisons) == 1:
        return f"{comparisons[0].a} and {comparisons[0].b}, layer by layer"
    models = dict.fromkeys(model for c in comparisons for model in (c.a, c.b))
    return f"{len(models)} models in {len(comparisons)} comparisons"


def _header(title: str, comparisons: Sequence[Comparison]) -> Markup:
    button = tag("button", "Dark or light", type="button", id="theme", class_="controls")
    top = tag("div", tag("span", "netkin report", class_="brand"), button, class_="top")
    several = len(comparisons) > 1
    sentence = f"{'; '.join(_listing(comparisons))}." if several else headline(comparisons[0])
    return tag("header", top, tag("h1", title), tag("p", sentence, class_="headline"))


def _listing(comparisons: Sequence[Comparison], most: int = 4) -> list[str]:
    words = [f"{c.a} and {c.b}" for c in comparisons[:most]]
    return words + ([f"and {len(comparisons) - most} more"] if len(comparisons) > most else [])


def _toolbar(comparisons: Sequence[Comparison]) -> Markup:
    zoom = tag("input", type="range", id="zoom", min="0.5", max="4", step="0.1", value="1")
    parts = [
        _chooser(comparisons) if len(comparisons) > 1 else None,
        tag("label", "Size of the cells", zoom),
        _check("values", "Values in the cells", False),
        _check("path", "Best matches", True),
        tag("span", "Save the numbers as ", *_saves(), class_="saving"),
    ]
    return tag("div", *parts, class_="toolbar controls", role="group", aria_label="How the page is shown")


def _saves() -> list[Markup]:
    return [tag("button", kind.upper(), type="button", data_save=kind) for kind in ("csv", "json")]


def _check(key: str, label: str, on: bool) -> Markup:
    return tag("label", tag("input", type="checkbox", id=key, checked=on), label)


def _chooser(comparisons: Sequence[Comparison]) -> Markup:
    plain = [f"{c.a} and {c.b}" for c in comparisons]
    times = Counter(plain)
    told = [
        f"{k + 1}: {label}, {c.data}" if times[label] > 1 else label
        for k, (label, c) in enumerate(zip(plain, comparisons, strict=True))
    ]
    options = [tag("option", label, value=k) for k, label in enumerate(told)]
    return tag("label", "Comparison", tag("select", *options, id="chooser"))


def _main(comparisons: Sequence[Comparison], summaries: Sequence[Grid]) -> Markup:
    articles = [_article(comparison, k, len(comparisons) > 1) for k, comparison in enumerate(comparisons)]
    return tag("main", _summary_section(summaries), *articles)


def _summary_section(summaries: Sequence[Grid]) -> Markup | None:
    if not summaries:
        return None
    words = tag("p", f"{MEANS} Choose a cell to open its comparison.")
    figures = [
        figure_of(grid, f"{grid.id}, models by models", f"summary {k}", _holes(grid), heading=tag("h3", grid.id))
        for k, grid in enumerate(summaries)
    ]
    return tag("section", tag("h2", "Models by models"), words, tag("div", *figures, class_="cards"), class_="summary")


def _article(comparison: Comparison, place: int, several: bool) -> Markup:
    head = [tag("h2", f"{comparison.a} and {comparison.b}"), tag("p", headline(comparison))] if several else []
    figures = [_figure(comparison, table, f"{place} {k}") for k, table in enumerate(comparison.tables.values())]
    measures = tag(
        "section",
        tag("h2", "Every layer with every layer", class_="quiet"),
        _choice(comparison),
        tag("div", *figures, class_="cards"),
    )
    parts = [*head, _facts(comparison), _warnings(comparison), measures, profile(comparison), origins(comparison)]
    return tag("article", *parts, class_="comparison", hidden=place > 0)


def _facts(comparison: Comparison) -> Markup:
    size = f"{len(comparison.layers_a)} × {len(comparison.layers_b)} layers"
    measures = f"{len(comparison.tables)} measure{'s' if len(comparison.tables) != 1 else ''}"
    facts = [comparison.data, f"{comparison.examples:,} examples", size, measures, comparison.created[:10]]
    return tag("ul", *(tag("li", fact) for fact in facts), class_="chips")


def _warnings(comparison: Comparison) -> Markup | None:
    said = list(comparison.warnings)
    if not comparison.complete and not any("interrupted" in warning for warning in said):
        said.append("This comparison was interrupted: the numbers come from a part of the data or of the pairs.")
    if not said:
        return None
    title = tag("strong", "Before you read the numbers")
    return tag("div", title, tag("ul", *(tag("li", warning) for warning in said)), class_="warnings", role="note")


def _choice(comparison: Comparison) -> Markup | None:
    if len(comparison.tables) <= CHOOSABLE:
        return None
    boxes = [
        tag("label", tag("input", type="checkbox", value=measure, checked=k < CHOOSABLE), measure)
        for k, measure in enumerate(comparison.tables)
    ]
    return tag("fieldset", tag("legend", "Measures shown"), *boxes, class_="choice controls")


def _figure(comparison: Comparison, table: Values, key: str) -> Markup:
    grid, meaning = grid_of(table), meaning_of(table)
    facts = tag("p", f"{direction(table)} · {range_of(table)} · {table.exactness}", class_="facts-line")
    axes = tag("p", "↓ ", name(comparison.a), "  → ", name(comparison.b), class_="axes")
    says = tag("p", meaning.says)
    blind = tag("p", tag("strong", "What it can't see. "), meaning.blind)
    caption = f"{table.id}: layers of {comparison.a} in rows, of {comparison.b} in columns"
    return figure_of(
        grid,
        caption,
        key,
        _holes(grid),
        tag("figcaption", says, blind),
        heading=joined(tag("h3", table.id), facts, axes),
    )


def _holes(grid: Grid) -> Markup | None:
    said = reasons(grid)
    if not said:
        return None
    more = [f"and {len(said) - 5} other reasons; point at a cell to read its own"] if len(said) > 5 else []
    mark = tag("span", class_="hole sample", aria_hidden="true")
    items = [tag("li", mark, f"no value: {reason}") for reason in said[:5]] + [tag("li", text) for text in more]
    return tag("ul", *items, class_="reasons")


def _footer(comparisons: Sequence[Comparison]) -> Markup:
    versions = ", ".join(dict.fromkeys(c.version for c in comparisons))
    return tag(
        "footer",
        tag("p", f"Made by netkin {versions}. This page holds all of its data and loads nothing from elsewhere."),
    )


def _asset(filename: str) -> str:
    return resources("netkin.reporting").joinpath("assets", filename).read_text(encoding="utf-8")
