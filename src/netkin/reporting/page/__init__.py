"""The report, one HTML page that holds everything it needs and loads nothing from elsewhere, and views in notebooks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from netkin import files
from netkin.errors import InvalidValue
from netkin.reporting.charts import StepAxis, series_chart, spread
from netkin.reporting.grids import Grid, depths, frames, grids_of, ink, palette, summary_grids
from netkin.reporting.html import html_of
from netkin.reporting.page.comparison_page import comparison_page
from netkin.reporting.page.diff_page import diff_page
from netkin.reporting.page.document import Markup, joined, name, plain_table, retitled, tag
from netkin.reporting.page.federation_page import federation_page
from netkin.reporting.page.heatmap import picture
from netkin.reporting.page.series_page import series_page
from netkin.reporting.page.smaller_networks_page import compression_page, sparsity_page
from netkin.reporting.page.svg import drawing, tick_names
from netkin.reporting.page.task_page import TaskRecord, ranking_page, task_page
from netkin.reporting.words import number_with_error, series_headline, shortened
from netkin.results import Comparison, Comparisons, Federation, Ranking, Series, TaskAccuracies, TaskEnsembles
from netkin.results.compression import Compression
from netkin.results.diff import Diff
from netkin.results.labels import error_lines, plural
from netkin.results.text import NO_DATA
from netkin.results.weight_sparsity import SparsityStudy

FEW = 16  # columns, up to which cells show their values
SHOWN = 4  # measures at most
CELLS = 2500  # beyond so many only the first measure is shown
PANES = 5
KEY = "margin-right:12px;display:inline-block"
ROOM = "padding:10px 14px;max-width:760px"
SIDE_BY_SIDE = "display:flex;flex-wrap:wrap;align-items:flex-start;gap:16px;overflow:auto;max-height:640px"
STRIP = "display:flex;flex-wrap:wrap;gap:10px;margin:0 0 12px"
HATCHED = "background:repeating-linear-gradient(45deg,transparent 0 3px,#8889 3px 4.5px)"
FIELD = "position:relative;height:220px;margin:10px 12px 28px 44px"
ENDINGS = (".html", ".htm")

Results = (
    Comparison
    | Comparisons
    | Series
    | Ranking
    | Federation
    | SparsityStudy
    | Compression
    | Diff
    | TaskRecord
    | Iterable[Comparison]
    | Iterable[TaskRecord]
)


def report(
    results: Results, path: str | os.PathLike[str], *, title: str | None = None, overwrite: bool = False
) -> Path:
    """Write a result as a single HTML page to `path`, and return the path.

    It is one comparison or several, a series, a ranking, a federation, a sparsity study, a diff, or one way to learn
    tasks in a row or several.

    The page opens in any browser without a network; it is there whole or not at all. Its name ends in .html or .htm. A
    file that is there is written over only with `overwrite`. `title` heads the page in place of its own.
    """
    if not str(path).lower().endswith(ENDINGS):
        raise InvalidValue(f"a report is a page whose name ends in {' or '.join(ENDINGS)}; got {str(path)!r}.")
    made = page(results) if title is None else retitled(page(results), title)
    files.write_text(path, made, overwrite=overwrite)
    return Path(path)


def page(results: Results) -> str:
    """Return the HTML page of a result, of several comparisons, or of several ways to learn tasks."""
    results = getattr(results, "record", results)  # of tasks with their networks
    if isinstance(results, (list, tuple)) and len(results) == 1:
        results = results[0]
    if isinstance(results, Series):
        return html_of(series_page(results))
    if isinstance(results, Diff):
        return html_of(diff_page(results))
    if isinstance(results, Ranking):
        return ranking_page(results)
    if isinstance(results, SparsityStudy):
        return sparsity_page(results)
    if isinstance(results, Compression):
        return compression_page(results)
    if isinstance(results, Federation):
        return federation_page(results)
    records = task_records(results)
    if records:
        return task_page(records)
    return html_of(comparison_page(listed(results)))


def task_records(results: Any) -> list[TaskRecord]:
    """Return ways to learn tasks, or ensembles of tasks, as a list; none where the results are something else."""
    given: list[Any] = list(results) if isinstance(results, (list, tuple)) else [results]
    found: list[Any] = [getattr(one, "record", one) for one in given]
    return found if all(isinstance(one, (TaskAccuracies, TaskEnsembles)) for one in found) else []


def listed(results: Any) -> list[Comparison]:
    """Return what is to be shown as a list of comparisons, or refuse what is none."""
    if isinstance(results, Comparison):
        return [results]
    found = list(results.values()) if isinstance(results, Comparisons) else results
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    alone = next((type(one).__name__.lower() for one in found if isinstance(one, (Series, Ranking, Federation))), None)
    if len(found) > 1 and alone:
        raise InvalidValue(
            f"a {alone} has a page of its own; got {len(found)} results for one page. Write one for each."
        )
    strange = next((one for one in found if not isinstance(one, Comparison)), None)
    if strange is not None:
        saved = " `nk.load(path)` opens a saved one." if isinstance(strange, (str, os.PathLike)) else ""
        made = " Its `series()` makes one." if hasattr(strange, "series") else ""
        raise InvalidValue(
            "a report shows comparisons, a series, a ranking, a federation, a sparsity study, a compression or tasks "
            "learnt in a row; got "
            f"{type(strange).__name__}.{saved}{made}"
        )
    if not found:
        raise InvalidValue("a report needs at least one comparison; got none.")
    return found


# --- views in notebooks, with inline styles and without scripts -------------------------------------------------------


def notebook_view(results: Comparison | Comparisons | Series | Ranking) -> str:
    """Return the heatmaps of a comparison, or of the summaries of many, a series or a ranking, for a notebook."""
    if isinstance(results, Ranking):
        return ranking_view(results)
    if isinstance(results, Series):
        return series_view(results)
    if isinstance(results, Comparison):
        grids = grids_of(results)
        sides = ("", "") if any(grid.listed for grid in grids) else (" (rows)", " (columns)")
        title = f"{results.a}{sides[0]} and {results.b}{sides[1]}"
        words = f"{title}, {NO_DATA if results.needs_no_data else _on(results)}"
    else:
        grids, words = _summaries(results), f"{plural(len(results.models), 'model')}, {plural(len(results), 'pair')}"
        if any(grid.counts is not None and grid.tails for grid in grids):
            words += "; n is the number of pairs of layers behind a mean"
    shown = _few(grids)
    rest = [f"not shown here: {', '.join(grid.id for grid in grids[len(shown) :])}"] if len(shown) < len(grids) else []
    pictures = tag("div", *map(_small, shown), style=SIDE_BY_SIDE)
    caveats = results.caveats if isinstance(results, Comparison) else ()
    drawn = {id_ for grid in shown for id_ in grid.listed or (grid.id,)}
    tables = [t for t in results.tables.values() if t.id in drawn] if isinstance(results, Comparison) else []
    errors = [f"{table.id}: {line}" for table in tables for line in error_lines([table])]
    notes = [*(f"warning: {caveat}" for caveat in caveats), *errors, *rest]
    return tag("div", tag("p", words), pictures, *(tag("p", tag("small", note)) for note in notes))


def _on(results: Comparison | Ranking) -> str:
    return f"{results.data}, {plural(results.examples, 'example')}"


def ranking_view(ranking: Ranking) -> str:
    """Return a ranking as HTML for a notebook: its summary and its table."""
    rows = [[name(model), *cells] for model, cells in zip(ranking.models, ranking.cells(), strict=True)]
    notes = [*filter(None, [ranking.reliability_in_words]), *ranking.reasons()]
    notes += [*(f"warning: {caveat}" for caveat in ranking.caveats)]
    words = tag("p", f"{_on(ranking)}. {ranking.conclusion}")
    table = plain_table(["model", *ranking.columns()], rows)
    return tag("div", words, table, *(tag("p", tag("small", note)) for note in notes))


def _summaries(results: Comparisons) -> list[Grid]:
    comparisons = list(results.values())
    return (
        summary_grids(comparisons)
        if len(comparisons) > 1
        else [grid for comparison in comparisons for grid in grids_of(comparison)]
    )


def _few(grids: Sequence[Grid]) -> list[Grid]:
    return list(grids[:SHOWN] if sum(grid.values.size for grid in grids[:SHOWN]) <= CELLS else grids[:1])


def _small(grid: Grid) -> Markup:
    """Return one heatmap as a table whose cells carry their own colours."""
    style = "border-collapse:collapse;font-size:11px;width:auto"
    caption = tag("caption", grid.id, style="caption-side:top;text-align:left;font-weight:600;color:inherit")
    across = [
        tag("th", _upright(label), title=full)
        for full, label in zip(grid.columns, shortened(grid.columns), strict=True)
    ]
    return tag("table", caption, tag("tr", tag("th"), *across), *_rows(grid), style=style)


def _rows(grid: Grid) -> list[Markup]:
    texts, shades = _texts(grid), grid.scale.shade_numbers(grid.values)
    return [
        tag(
            "tr",
            tag("th", name(label), title=grid.rows[i], style="text-align:right;padding:0 6px;font-weight:400"),
            *(_cell(grid, i, j, int(shades[i, j]), texts[i][j]) for j in range(len(grid.columns))),
        )
        for i, label in enumerate(shortened(grid.rows))
    ]


def _texts(grid: Grid) -> list[list[Markup]]:
    """Return what the cells show: nothing where they are many, else values with any standard errors below."""
    if len(grid.columns) > FEW:
        return [[joined()] * len(grid.columns)] * len(grid.rows)
    tails = grid.tails or [[""] * len(grid.columns)] * len(grid.rows)
    return [
        [joined(text, tag("br") if tail else None, tag("small", tail) if tail else None)
         for text, tail in zip(*row, strict=True)]
        for row in zip(grid.texts, tails, strict=True)
    ]  # fmt: skip


def _cell(grid: Grid, i: int, j: int, shade: int, text: Markup) -> Markup:
    pair, room = f"{grid.pair(i, j)}: ", "padding:3px 5px;min-width:10px;text-align:center"
    if shade < 0:
        return tag("td", "–", title=f"{pair}no value, {grid.missing[i, j]}", style=f"{room};background:#8884")
    colour = palette()[shade]
    ring = ";outline:2px solid #fff;outline-offset:-3px" if grid.best.get(i) == j else ""
    style = f"{room};background:{colour};color:{ink(colour)}{ring}"
    error = math.nan if grid.errors is None else float(grid.errors[i, j])
    return tag("td", text, title=pair + number_with_error(float(grid.values[i, j]), error), style=style)


def _upright(label: str) -> Markup:
    return tag(
        "span", name(label), style="writing-mode:vertical-rl;transform:rotate(180deg);font-weight:400;max-height:160px"
    )


def series_view(series: Series) -> str:
    """Return a series as HTML for a notebook: its first measure, and the names of the others."""
    if not series.measures:
        return tag("div", tag("p", series_headline(series)))
    measure, *rest = series.measures
    notes = [f"warning: {caveat}" for caveat in series.caveats]
    notes += [f"not shown here: {', '.join(rest)}"] if rest else []
    about = f"{series.run}: {measure} of the layers (rows) with those of the final {series.unit} (columns)"
    shown = [tag("p", series_headline(series)), tag("p", about, style="font-weight:600"), _strip(series, measure)]
    return tag("div", *shown, _lines(series, measure), *(tag("p", tag("small", note)) for note in notes), style=ROOM)


def _strip(series: Series, measure: str) -> Markup:
    grids, side = frames(series, measure), f"width:120px;height:120px;image-rendering:pixelated;display:block;{HATCHED}"
    items = [
        tag("div", picture(grids[k], side), tag("small", f"{series.unit} {series.steps[k]:,}"))
        for k in spread(StepAxis.of(series.steps), PANES)
    ]
    return tag("div", *items, style=STRIP)


def _lines(series: Series, measure: str) -> Markup | None:
    chart = series_chart(series, measure, depths("both"))
    if chart is None:
        return None
    field = tag("div", drawing(chart), *tick_names(chart), style=FIELD)
    short = shortened(series.layers)
    key = [
        tag("span", tag("span", "━ ", style=f"color:{line.colour}"), name(label), style=KEY, title=line.name)
        for line, label in zip(chart.lines, short, strict=True)
    ]
    words = tag("small", f"each layer with its own final state, over the {chart.axis_name}", style="display:block")
    return tag("div", words, field, tag("small", *key))
