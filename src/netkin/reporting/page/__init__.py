"""The report, one HTML page that holds everything it needs and loads nothing from elsewhere, and views in notebooks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from netkin import files
from netkin.errors import InvalidValue
from netkin.reporting.blocks import Page
from netkin.reporting.html import html_of, notebook_of
from netkin.reporting.page.comparison_page import comparison_page
from netkin.reporting.page.compression_page import compression_page
from netkin.reporting.page.diff_page import diff_page
from netkin.reporting.page.federation_page import federation_page
from netkin.reporting.page.ranking_page import ranking_page
from netkin.reporting.page.series_page import series_page
from netkin.reporting.page.sparsity_page import sparsity_page
from netkin.reporting.page.task_page import TaskRecord, task_page
from netkin.results import Comparison, Comparisons, Federation, Ranking, Series, TaskAccuracies, TaskEnsembles
from netkin.results.compression import Compression
from netkin.results.diff import Diff
from netkin.results.weight_sparsity import SparsityStudy

ENDINGS = (".html", ".htm")
MAKERS: dict[type, Any] = {
    Series: series_page,
    Ranking: ranking_page,
    Federation: federation_page,
    SparsityStudy: sparsity_page,
    Compression: compression_page,
    Diff: diff_page,
}

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
    made = page_of(results)
    files.write_text(
        path, html_of(made if title is None else replace(made, title=title, whole="")), overwrite=overwrite
    )
    return Path(path)


def page(results: Results) -> str:
    """Return the HTML page of a result, of several comparisons, or of several ways to learn tasks."""
    return html_of(page_of(results))


def notebook_view(results: Results) -> str:
    """Return what a notebook shows of a result."""
    return notebook_of(page_of(results))


def page_of(results: Results) -> Page:
    """Return the page of a result, of several comparisons, or of several ways to learn tasks, as blocks."""
    results = getattr(results, "record", results)  # of tasks with their networks
    if isinstance(results, (list, tuple)) and len(results) == 1:
        results = results[0]
    if type(results) in MAKERS:
        return MAKERS[type(results)](results)
    records = task_records(results)
    return task_page(records) if records else comparison_page(listed(results))


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
