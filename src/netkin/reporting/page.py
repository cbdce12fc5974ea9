"""The report: one HTML page that holds everything it needs and loads nothing from elsewhere."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from netkin import files
from netkin.errors import ValueFault
from netkin.reporting.articles import article, holes
from netkin.reporting.documents import SCRIPTS, document, footer, header, retitled, toolbar, warnings
from netkin.reporting.embedding import embedded
from netkin.reporting.federation_page import federation_page
from netkin.reporting.grids import Grid, grids_of, summary_grids
from netkin.reporting.heatmaps import figure_of, values_class
from netkin.reporting.markup import Markup, joined, tag
from netkin.reporting.profiles import spread_section
from netkin.reporting.ranking_page import ranking_page
from netkin.reporting.series_page import series_page
from netkin.reporting.sparsity_page import sparsity_page
from netkin.reporting.task_page import Record, task_page
from netkin.reporting.wording import headline, told_apart
from netkin.results import Comparison, Comparisons, Federation, Ranking, Series, TaskAccuracies, TaskEnsembles
from netkin.results.labels import has_networks, is_of_tasks
from netkin.results.text import buckets_note
from netkin.results.weight_sparsity import SparsityStudy

ENDINGS = (".html", ".htm")
MEANS = "Each cell is the mean over layers of the same name or, where none is shared, over each layer's best match."
BLOCKS = (
    "Each cell is a layer of one task with a layer of another. Colours of one picture can't be held against another's."
)

Results = (
    Comparison
    | Comparisons
    | Series
    | Ranking
    | Federation
    | SparsityStudy
    | Record
    | Iterable[Comparison]
    | Iterable[Record]
)


def report(
    results: Results, path: str | os.PathLike[str], *, title: str | None = None, overwrite: bool = False
) -> Path:
    """Write a result as a single HTML page to `path`, and return the path.

    It is one comparison or several, a series, a ranking, a federation, a sparsity study, or one way to learn tasks in a
    row or several.

    The page opens in any browser without a network; it is there whole or not at all. Its name ends in .html or .htm. A
    file that is no page of netkin's is written over only with `overwrite`. `title` heads the page in place of its own.
    """
    if not str(path).lower().endswith(ENDINGS):
        raise ValueFault(f"a report is a page whose name ends in {' or '.join(ENDINGS)}; got {str(path)!r}.")
    made = page(results) if title is None else retitled(page(results), title)
    files.write_text(path, made, "page", overwrite=overwrite)
    return Path(path)


def page(results: Results) -> str:
    """Return the HTML page of a result, of several comparisons, or of several ways to learn tasks."""
    results = getattr(results, "record", results)  # of tasks with their networks
    if isinstance(results, (list, tuple)) and len(results) == 1:
        results = results[0]
    if isinstance(results, Series):
        return series_page(results)
    if isinstance(results, Ranking):
        return ranking_page(results)
    if isinstance(results, SparsityStudy):
        return sparsity_page(results)
    if isinstance(results, Federation):
        return federation_page(results)
    records = task_records(results)
    if records:
        return task_page(records)
    comparisons = sorted(listed(results), key=lambda one: one.a == one.b)  # a task beside itself is seen last
    summaries = summary_grids(comparisons)
    names = told_apart(model for comparison in comparisons for model in (comparison.a, comparison.b))
    title, versions = _title(comparisons, names), [c.version for c in comparisons]
    grids = [grids_of(comparison) for comparison in comparisons]
    head = header(title, _sentence(comparisons, names), None if len(comparisons) > 1 else _pair(comparisons[0]))
    chooser = _chooser(comparisons, names) if len(comparisons) > 1 else None
    best = True if any(grid.best for own in grids for grid in own) else None
    main = _main(comparisons, names, grids, summaries)
    shown = joined(head, toolbar(chooser, best=best), main, footer(versions))
    blocks = [summary for summary in summaries if summary.models]
    data, kind = (
        embedded(comparisons, grids, summaries, names),
        values_class([g for own in (*grids, blocks) for g in own]),
    )
    return document(title, shown, data, styles=("page",), scripts=SCRIPTS, kind=kind)


def task_records(results: Any) -> list[Record]:
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
        raise ValueFault(f"a {alone} has a page of its own; got {len(found)} results for one page. Write one for each.")
    strange = next((one for one in found if not isinstance(one, Comparison)), None)
    if strange is not None:
        saved = " `nk.load(path)` opens a saved one." if isinstance(strange, (str, os.PathLike)) else ""
        made = " Its `series()` makes one." if hasattr(strange, "series") else ""
        raise ValueFault(
            "a report shows comparisons, a series, a ranking, a federation or tasks learnt in a row; got "
            f"{type(strange).__name__}.{saved}{made}"
        )
    if not found:
        raise ValueFault("a report needs at least one comparison; got none.")
    return found


def _pair(comparison: Comparison, names: Mapping[str, str] | None = None) -> str:
    a, b = ((names or {}).get(model, model) for model in (comparison.a, comparison.b))
    return f"{a} and {b}"


def _title(comparisons: Sequence[Comparison], names: Mapping[str, str]) -> str:
    if len(comparisons) == 1 and has_networks(comparisons[0]):
        return f"{len(comparisons[0].layers_a)} networks, each with every other"
    if len(comparisons) == 1:
        return f"{_pair(comparisons[0], names)}, layer by layer"
    if _of_tasks(comparisons):
        return f"{len(names)} tasks, block by block"
    return f"{len(names)} models in {len(comparisons)} comparisons"


def _of_tasks(comparisons: Sequence[Comparison]) -> bool:
    return all(is_of_tasks(table) for one in comparisons for table in one.tables.values())


def _sentence(comparisons: Sequence[Comparison], names: Mapping[str, str]) -> str:
    several = len(comparisons) > 1
    if several and _of_tasks(comparisons):
        return f"{', '.join(names.values())}: {len(comparisons)} pairs, each task beside itself too."
    return f"{'; '.join(_listing(comparisons, names))}." if several else headline(comparisons[0], names)


def _listing(comparisons: Sequence[Comparison], names: Mapping[str, str], most: int = 4) -> list[str]:
    words = [_pair(comparison, names) for comparison in comparisons[:most]]
    return words + ([f"and {len(comparisons) - most} more"] if len(comparisons) > most else [])


def _chooser(comparisons: Sequence[Comparison], names: Mapping[str, str]) -> Markup:
    plain = [_pair(comparison, names) for comparison in comparisons]
    times = Counter(plain)
    told = [
        f"{k + 1}: {label}, {c.data}" if times[label] > 1 else label
        for k, (label, c) in enumerate(zip(plain, comparisons, strict=True))
    ]
    options = [tag("option", label, value=k) for k, label in enumerate(told)]
    return tag("label", "Comparison", tag("select", *options, id="chooser"))


def _main(
    comparisons: Sequence[Comparison],
    names: Mapping[str, str],
    grids: Sequence[Sequence[Grid]],
    summaries: Sequence[Grid],
) -> Markup:
    articles = [
        article(comparison, own, names, place, len(comparisons) > 1)
        for place, (comparison, own) in enumerate(zip(comparisons, grids, strict=True))
    ]
    return tag("main", _summary_section(summaries, buckets_note(comparisons)), spread_section(comparisons), *articles)


def _summary_section(summaries: Sequence[Grid], note: str) -> Markup | None:
    if not summaries:
        return None
    blocks = bool(summaries[0].models)
    words = tag("p", f"{BLOCKS if blocks else MEANS} Choose a cell to open its comparison.")
    title = "Tasks by tasks, block by block" if blocks else "Models by models"
    figures = [
        figure_of(grid, f"{grid.id}, {title.lower()}", f"summary {k}", holes(grid), heading=_heading(grid))
        for k, grid in enumerate(summaries)
    ]
    cards = tag("div", *figures, class_="cards")
    return tag("section", tag("h2", title), words, warnings([note] if note else []), cards, class_="summary")


def _heading(grid: Grid) -> Markup:
    return joined(tag("h3", grid.id), tag("p", grid.note, class_="facts-line") if grid.note else None)
