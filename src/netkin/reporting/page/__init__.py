"""The report: one HTML page that holds everything it needs and loads nothing from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from netkin import files
from netkin.errors import ValueFault
from netkin.reporting.page.comparison_page import comparison_page
from netkin.reporting.page.compression_page import compression_page
from netkin.reporting.page.document import retitled
from netkin.reporting.page.federation_page import federation_page
from netkin.reporting.page.ranking_page import ranking_page
from netkin.reporting.page.series_page import series_page
from netkin.reporting.page.sparsity_page import sparsity_page
from netkin.reporting.page.task_page import Record, task_page
from netkin.results import Comparison, Comparisons, Federation, Ranking, Series, TaskAccuracies, TaskEnsembles
from netkin.results.compression import Compression
from netkin.results.weight_sparsity import SparsityStudy

ENDINGS = (".html", ".htm")

Results = (
    Comparison
    | Comparisons
    | Series
    | Ranking
    | Federation
    | SparsityStudy
    | Compression
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
    if isinstance(results, Compression):
        return compression_page(results)
    if isinstance(results, Federation):
        return federation_page(results)
    records = task_records(results)
    if records:
        return task_page(records)
    return comparison_page(listed(results))


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
            "a report shows comparisons, a series, a ranking, a federation, a sparsity study, a compression or tasks "
            "learnt in a row; got "
            f"{type(strange).__name__}.{saved}{made}"
        )
    if not found:
        raise ValueFault("a report needs at least one comparison; got none.")
    return found
