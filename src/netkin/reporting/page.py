"""The report: one HTML page that holds everything it needs and asks nothing of anybody."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from netkin import files
from netkin.errors import ValueFault
from netkin.reporting.cards import card, holes, reason_list, shared_reasons
from netkin.reporting.documents import document, facts, footer, header, toolbar, warnings
from netkin.reporting.embedding import embedded
from netkin.reporting.grids import Grid, grid_of, summary_grids
from netkin.reporting.heatmaps import figure_of
from netkin.reporting.markup import Markup, joined, name, tag
from netkin.reporting.origins import origins
from netkin.reporting.profiles import profile
from netkin.reporting.series_page import series_page
from netkin.reporting.spreads import spread_section
from netkin.reporting.wording import headline
from netkin.results import Comparison, Comparisons, Series, Values
from netkin.results.text import has_classes

SCRIPTS = ("telling", "heatmaps", "profile", "controls", "theme", "scrolling", "pictures", "saving")
CHOOSABLE = 4  # with more measures than these the page offers a choice among them
FEW = 12  # columns, up to which the cells show their values at first
MEANS = "Each cell is the mean over layers of the same name or, where none is shared, over each layer's best match."

Results = Comparison | Comparisons | Series | Iterable[Comparison]


def report(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write one comparison or several, or a series, as a single HTML page to `path`, and return the path.

    The page opens in any browser without a network; it is there whole or not at all.
    """
    files.write_text(path, page(results))
    return Path(path)


def page(results: Results) -> str:
    """Return the HTML page of one comparison or several, or of a series."""
    if isinstance(results, (list, tuple)) and len(results) == 1:
        results = results[0]
    if isinstance(results, Series):
        return series_page(results)
    comparisons = listed(results)
    summaries = summary_grids(comparisons)
    title, versions = _title(comparisons), [c.version for c in comparisons]
    chooser = _chooser(comparisons) if len(comparisons) > 1 else None
    shown = joined(
        header(title, _sentence(comparisons)), toolbar(chooser), _main(comparisons, summaries), footer(versions)
    )
    data, kind = embedded(comparisons, summaries), _values(comparisons)
    return document(title, shown, data, styles=("page",), scripts=SCRIPTS, kind=kind)


def _values(comparisons: Sequence[Comparison]) -> str:
    """Say whether values stand in the cells before any script runs: where they are few enough to be read."""
    return "values-shown" if max(len(c.layers_b) for c in comparisons) <= FEW else "values-hidden"


def listed(results: Any) -> list[Comparison]:
    """Return what is to be shown as a list of comparisons, or refuse what is none."""
    if isinstance(results, Comparison):
        return [results]
    found = list(results.values()) if isinstance(results, Comparisons) else results
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    if len(found) > 1 and any(isinstance(one, Series) for one in found):
        raise ValueFault(f"a series has a page of its own; got {len(found)} results for one page. Write one for each.")
    strange = next((one for one in found if not isinstance(one, Comparison)), None)
    if strange is not None:
        raise ValueFault(
            f"a report shows comparisons or a series; got {type(strange).__name__}. `nk.load(path)` opens a saved one."
        )
    if not found:
        raise ValueFault("a report needs at least one comparison; got none.")
    return found


def _title(comparisons: Sequence[Comparison]) -> str:
    if len(comparisons) == 1:
        return f"{comparisons[0].a} and {comparisons[0].b}, layer by layer"
    models = dict.fromkeys(model for c in comparisons for model in (c.a, c.b))
    return f"{len(models)} models in {len(comparisons)} comparisons"


def _sentence(comparisons: Sequence[Comparison]) -> str:
    return f"{'; '.join(_listing(comparisons))}." if len(comparisons) > 1 else headline(comparisons[0])


def _listing(comparisons: Sequence[Comparison], most: int = 4) -> list[str]:
    words = [f"{c.a} and {c.b}" for c in comparisons[:most]]
    return words + ([f"and {len(comparisons) - most} more"] if len(comparisons) > most else [])


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
    return tag("main", _summary_section(summaries), spread_section(comparisons), *articles)


def _summary_section(summaries: Sequence[Grid]) -> Markup | None:
    if not summaries:
        return None
    words = tag("p", f"{MEANS} Choose a cell to open its comparison.")
    figures = [
        figure_of(grid, f"{grid.id}, models by models", f"summary {k}", holes(grid), heading=tag("h3", grid.id))
        for k, grid in enumerate(summaries)
    ]
    return tag("section", tag("h2", "Models by models"), words, tag("div", *figures, class_="cards"), class_="summary")


def _article(comparison: Comparison, place: int, several: bool) -> Markup:
    head = [tag("h2", f"{comparison.a} and {comparison.b}"), tag("p", headline(comparison))] if several else []
    shared = shared_reasons([grid_of(table) for table in comparison.tables.values()])
    figures = [_figure(comparison, table, f"{place} {k}", shared) for k, table in enumerate(comparison.tables.values())]
    measures = tag(
        "section",
        tag("h2", f"Every layer with every {'class' if has_classes(comparison) else 'layer'}", class_="quiet"),
        _choice(comparison),
        reason_list(list(shared.values())),
        tag("div", *figures, class_="cards"),
    )
    parts = [*head, _facts(comparison), _warnings(comparison), measures, profile(comparison), origins(comparison)]
    return tag("article", *parts, class_="comparison", hidden=place > 0, data_chosen=True)


def _facts(comparison: Comparison) -> Markup:
    rows, columns = len(comparison.layers_a), len(comparison.layers_b)
    size = f"{rows} layers × {columns} classes" if has_classes(comparison) else f"{rows} × {columns} layers"
    measures = f"{len(comparison.tables)} measure{'s' if len(comparison.tables) != 1 else ''}"
    return facts([comparison.data, f"{comparison.examples:,} examples", size, measures, comparison.created[:10]])


def _warnings(comparison: Comparison) -> Markup | None:
    said = list(comparison.warnings)
    if not comparison.complete and not any("interrupted" in warning for warning in said):
        said.append("This comparison was interrupted: the numbers come from a part of the data or of the pairs.")
    return warnings(said)


def _choice(comparison: Comparison) -> Markup | None:
    if len(comparison.tables) <= CHOOSABLE:
        return None
    boxes = [
        tag("label", tag("input", type="checkbox", value=measure, checked=k < CHOOSABLE), measure)
        for k, measure in enumerate(comparison.tables)
    ]
    return tag("fieldset", tag("legend", "Measures shown"), *boxes, class_="choice controls")


def _figure(comparison: Comparison, table: Values, key: str, said: Collection[str]) -> Markup:
    grid = grid_of(table)
    axes = tag("p", "↓ ", name(comparison.a), "  → ", name(comparison.b), class_="axes")
    sides = (
        "layers in rows, classes" if has_classes(comparison) else f"layers of {comparison.a} in rows, of {comparison.b}"
    )
    caption = f"{table.id}: {sides} in columns"
    return card(table, grid, key, caption, holes(grid, said), axes=axes)
