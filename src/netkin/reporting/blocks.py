"""The contract of a page: its blocks, and the JSON document that says them.

A result makes a `Page`; templates give HTML of it, and `figures` drawings. `docs/page.md` describes the JSON. Each
array stands in it once, among its `numbers`: blocks and the documents of the results say which.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from netkin.reporting.charts import Axis, Chart
from netkin.reporting.grids import Grid
from netkin.reporting.words import shortened
from netkin.results import Values
from netkin.results.caveats import Caveat
from netkin.results.labels import NOT_ASKED
from netkin.results.packing import document
from netkin.results.records import plain
from netkin.results.values import student_quantile

FORMAT = 1
PACKED = 8  # numbers of a list that are not packed

Pool = dict[tuple[tuple[int, ...], bytes], int]  # arrays, by shape and bytes, with their places


@dataclass(frozen=True)
class Name:
    """A name in a table or a list, with its whole form where it is shortened, and what stands before it."""

    text: str
    whole: str = ""
    before: str = ""


@dataclass(frozen=True)
class PageBlock:
    """A part of a page; its template is `templates/KIND.html` of its package.

    Its fields stand in the document, but for those that are left out of its `repr`.
    """

    kind: ClassVar[str]
    package: ClassVar[str] = "netkin.reporting"


@dataclass(frozen=True)
class Text(PageBlock):
    """A paragraph or a list; with a title and `folded` it opens at its title."""

    kind: ClassVar[str] = "text"
    text: str = ""
    lead: str = ""  # words before it, in bold
    title: str = ""
    items: Sequence[Text | str] = ()
    style: str = ""  # note, errors, bias, reasons, or controls, which stand where a script runs
    folded: bool = False


@dataclass(frozen=True)
class Table(PageBlock):
    """Rows of cells, the first of which names the row; with a `label` the keyboard reaches it, to scroll."""

    kind: ClassVar[str] = "table"
    head: Sequence[str | Name]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    label: str = ""
    style: str = ""  # numbers, facts, measures, matches
    folded: bool = False
    open: bool = False


@dataclass(frozen=True)
class Heatmap(PageBlock):
    """A heatmap with its meaning and notes; with `frames` the steps of a run, shown one after the other."""

    kind: ClassVar[str] = "heatmap"
    grid: Grid
    key: str
    caption: str = ""  # read aloud before the table
    title: str | Name = ""
    line: str = ""  # below the title
    axes: Sequence[str | Name] = ()
    sides: Sequence[str] = ("", "")  # what rows and columns belong to
    means: Sequence[str] = ()  # what the measure means, and what it cannot see
    notes: Iterable[PageBlock | None] = ()
    table: Values | None = None
    frames: Sequence[Grid] = ()
    step: str = ""  # the step that is shown first
    about: Sequence[Mapping[str, str]] = ({}, {})  # what is said of rows and of columns
    opens: Sequence[Sequence[int | None]] | None = None
    level: str = "layers"  # or models, whose cells open a choice
    columns: Sequence[Values] = ()  # of a list, the table of each column
    order: Sequence[int] = ()  # places of its tables in the result
    pairs: Sequence[Sequence[str]] = ()  # of a list, the layers of each row
    numbered: bool = False
    fitted_with: str = ""  # pictures of one such name share their colours

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", _those_given(self.notes))


@dataclass(frozen=True)
class Lines(PageBlock):
    """A line chart; with `key_title` it stands in a card of its own, with the names of the lines at their ends."""

    kind: ClassVar[str] = "lines"
    chart: Chart
    key: str
    title: str = ""
    note: str = ""
    caption: str = ""
    upwards: str = ""
    heading: bool = False  # whether the title is a heading
    key_title: str = ""  # words above the key of lines that are named at their ends
    tabled: str = ""  # the title of the same as a table


@dataclass(frozen=True)
class Bars(PageBlock):
    """A histogram."""

    kind: ClassVar[str] = "bars"
    title: str
    chart: Chart
    shares: Sequence[float]
    caption: str
    upwards: str
    colour: int


@dataclass(frozen=True)
class Ranked:
    """A model's place in a ranking by a score, with its interval."""

    name: str
    value: float
    low: float
    high: float
    text: str
    close: bool


@dataclass(frozen=True)
class RankingBlock(PageBlock):
    """A dot with its interval for each model, from the first to the last."""

    kind: ClassVar[str] = "ranking"
    title: str
    direction: str  # which values are better
    line: str
    places: Sequence[Ranked]
    axis: Axis | None
    notes: Sequence[str]


@dataclass(frozen=True)
class Tree(PageBlock):
    """Which of several models join at which distance."""

    kind: ClassVar[str] = "tree"
    names: Sequence[str]
    branches: Sequence[Sequence[Sequence[float]]]
    leaves: Sequence[int]
    groups: Sequence[int]
    unit: str
    caption: str
    title: str = "Dendrogram"


@dataclass(frozen=True)
class Scatter(PageBlock):
    """Named points in a plane."""

    kind: ClassVar[str] = "scatter"
    names: Sequence[str]
    points: Sequence[Sequence[float]]
    groups: Sequence[int]
    unit: str
    caption: str
    title: str = "2-d embedding"


@dataclass(frozen=True)
class Pictures(PageBlock):
    """Small heatmaps without names: those of the steps of a run, or of its layers with marks at steps."""

    kind: ClassVar[str] = "pictures"
    grids: Sequence[Grid] = field(repr=False)  # of numbers that stand in a result
    names: Sequence[str]
    of: str  # the heatmap whose steps they show, or what else they are of
    sides: Sequence[str]  # what rows and columns are
    places: Sequence[int] = ()  # of the steps that they open
    notes: Sequence[str] = ()
    marks: Sequence[Sequence[tuple[int, bool]]] = field(default=(), repr=False)  # row and column, and whether dotted


@dataclass(frozen=True)
class Section(PageBlock):
    """Blocks with a title.

    The layout is cards, card, curves, halves, folded or open, which is folded at first or not; or none.
    """

    kind: ClassVar[str] = "section"
    title: str | Name
    blocks: Iterable[PageBlock | None]
    layout: str = ""
    style: str = ""
    quiet: bool = False  # less room above
    choice: Sequence[str] = ()  # measures among which the reader chooses
    shown: int = 0  # how many of these at first
    measure: str = ""  # the section is of one measure among several of a run
    hidden: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", _those_given(self.blocks))


@dataclass(frozen=True)
class Timeline:
    """The steps of a run, through which a page of it goes."""

    unit: str
    steps: Sequence[int]
    places: Sequence[float]
    measures: Sequence[str]


@dataclass(frozen=True)
class Page:
    """All that is shown of a result.

    Args:
        title: The title.
        sentence: The main result in one sentence.
        facts: A few facts.
        caveats: What to know before reading the numbers.
        blocks: The parts.
        origins: Where the numbers come from.
        style: The kind of result.
        versions: Those of netkin that made it.
        whole: The title in full, where it is shortened.
        label: What it is called where it is one of several choices.
        note: Words at the end.
        name: What files that are saved of it are called: what, and of which models.
        choices: Pages of single comparisons, of which the reader chooses one.
        csv: Head and rows of the table that is saved; by default those of the heatmaps.
        timeline: The steps of a run.
        results: What is saved as JSON; a list of several is saved as one.
        best: Whether best matches are marked at first.
    """

    title: str
    sentence: str
    facts: Sequence[str] = ()
    caveats: Sequence[Caveat] = ()
    blocks: Iterable[PageBlock | None] = ()
    origins: Iterable[PageBlock | None] = ()
    style: str = ""
    versions: Sequence[str] = ()
    whole: str = ""
    label: str = ""
    note: str = ""
    name: Sequence[str] = ()
    choices: Sequence[Page] = ()
    csv: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None
    timeline: Timeline | None = None
    results: Sequence[Any] = field(default=(), repr=False)
    best: bool = True

    def __post_init__(self) -> None:
        for name in ("blocks", "origins"):
            object.__setattr__(self, name, _those_given(getattr(self, name)))


def _those_given(blocks: Iterable[PageBlock | None]) -> tuple[PageBlock, ...]:
    return tuple(block for block in blocks if block is not None)


def blocks_of(part: Page | PageBlock) -> Iterator[PageBlock]:
    """Yield all blocks of a page, those inside sections and choices too, in their order."""
    for inside in ("blocks", "origins", "choices"):
        for block in getattr(part, inside, ()):
            if isinstance(block, PageBlock):
                yield block
            yield from blocks_of(block)


# --- the document -----------------------------------------------------------------------------------------------------


def page_document(page: Page) -> dict[str, Any]:
    """Return a page as mappings, lists, texts and numbers: what `docs/page.md` describes."""
    pool: Pool = {}
    told = _described(page, pool)
    saved = [list(map(document, own)) if isinstance(own, (list, tuple)) else document(own) for own in page.results]
    results = json.dumps([_pooled(own, pool) for own in saved], ensure_ascii=False, separators=(",", ":"))
    # a lone half of a surrogate pair, as in a badly decoded file name, has no UTF-8
    packed = gzip.compress(results.encode("utf-8", "replace"), mtime=0)
    numbers = [{"shape": shape, "float64": base64.b64encode(values).decode()} for shape, values in pool]
    return {"format": FORMAT, **told, "numbers": numbers, "results": base64.b64encode(packed).decode()}


def _described(value: Any, pool: Pool) -> Any:
    if isinstance(value, Caveat):
        return {"code": value.code, "sentence": str(value)}
    if isinstance(value, Heatmap):
        return _heatmap(value, pool)
    if isinstance(value, Chart):
        return _chart(value)
    if is_dataclass(value):
        kind = {"kind": value.kind} if isinstance(value, PageBlock) else {}
        told = {own.name: getattr(value, own.name) for own in fields(value) if own.repr}
        return kind | {name: _described(own, pool) for name, own in told.items() if own not in ("", None, (), [])}
    if isinstance(value, Mapping):
        return {str(key): _described(own, pool) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(own, pool) for own in value]
    return plain(value)


def _pooled(value: Any, pool: Pool) -> Any:
    """Return a document whose long lists of numbers stand in the pool."""
    if isinstance(value, Mapping):
        return {name: _pooled(own, pool) for name, own in value.items()}
    if not isinstance(value, list) or not value:
        return value
    shape: list[int] = []
    first: Any = value
    while isinstance(first, list) and first:
        shape.append(len(first))
        first = first[0]
    flat: list[Any] = value
    for size in shape[1:]:
        if any(not isinstance(row, list) or len(row) != size for row in flat):
            return [_pooled(own, pool) for own in value]
        flat = [own for row in flat for own in row]
    if len(flat) > PACKED and all(own is None or isinstance(own, float) for own in flat):
        return _in_pool(np.array(flat, dtype=float).reshape(shape), pool)
    return [_pooled(own, pool) for own in value]


def _in_pool(values: np.ndarray, pool: Pool) -> dict[str, int]:
    """Return the place of an array among the numbers of the page, where equal arrays have one."""
    alike = np.where(np.isfinite(values), values, np.nan).astype("<f8")
    return {"numbers": pool.setdefault((values.shape, alike.tobytes()), len(pool))}


def _matrix(values: np.ndarray | None, pool: Pool) -> Any:
    return None if values is None else _in_pool(values, pool) if values.size > PACKED else plain(values)


def _chart(chart: Chart) -> dict[str, Any]:
    lines = [
        {"name": line.name, "aside": round(chart.aside(k), 4), "values": _rounded(line.values)}
        | ({"errors": _rounded(line.errors)} if any(line.errors) else {})
        for k, line in enumerate(chart.lines)
    ]
    x = [round(place, 4) for place in chart.lefts]
    told = {"x": x, "names": chart.names, "up": [chart.up.low, chart.up.high], "across": chart.across, "lines": lines}
    return told | ({"logarithmic": True} if chart.up.logarithmic else {})


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _heatmap(block: Heatmap, pool: Pool) -> dict[str, Any]:
    """Return what a script must know of a heatmap."""
    grid, scale = block.grid, block.grid.scale
    told = {
        "kind": block.kind, "key": block.key, "id": grid.id, "title": _described(block.title, pool), "line": block.line,
        "rows": grid.rows, "columns": grid.columns, "sides": block.sides, "level": block.level,
        "means": block.means, "notes": _described(block.notes, pool), "about": block.about, "opens": block.opens,
        "scale": {"low": scale.low, "high": scale.high, "open_ended": scale.open_ended, "words": scale.words},
        "higher_is_closer": scale.higher_is_closer, "fitted_with": block.fitted_with or block.key,
        "unasked": grid.elsewhere or NOT_ASKED, "ids": grid.listed, "pairs": block.pairs, "order": block.order,
        "counts": None if grid.counts is None else grid.counts.tolist(),
        "labels": shortened(grid.rows) if block.level == "models" else (),
    }  # fmt: skip
    told |= _errors_of(block, [block.table] if block.table else block.columns)
    if block.frames:
        texts = [text for frame in block.frames for line in frame.texts for text in line]
        told["powers"] = any("e" in text for text in texts)  # of ten
        told["frames"] = [_frame(frame, pool) for frame in block.frames]
    else:
        told |= _frame(grid, pool)
    if block.table and block.table.replicates is not None and not block.frames:
        told["margins"] = _margins(block.table)
    empty = (None, "", ())
    return {name: plain(own) for name, own in told.items() if name in ("rows", "columns") or own not in empty}


def _frame(grid: Grid, pool: Pool) -> dict[str, Any]:
    """Return the numbers of a heatmap with its holes by their reasons, and its best matches."""
    missing: dict[str, list[list[int]]] = {}
    for (i, j), reason in grid.missing.items():
        if reason != (grid.elsewhere or NOT_ASKED):  # which is said of hundreds of pairs, and once in the block
            missing.setdefault(reason, []).append([i, j])
    best = [grid.best.get(i) for i in range(len(grid.rows))]
    numbers = {"values": _matrix(grid.values, pool), "errors": _matrix(grid.errors, pool)}
    return numbers | {"missing": missing, "best": best}


def _errors_of(block: Heatmap, tables: Sequence[Values]) -> dict[str, Any]:
    """Return by which quantile intervals are made within which bounds, and why values have no error.

    A reason that holds for all values has no places.
    """
    if not tables:
        return {}
    quantiles = [student_quantile(len(table.chunk_sizes)) if table.chunk_sizes else None for table in tables]
    cells: dict[str, list[list[int]]] = {}
    for column, table in enumerate([] if block.frames else tables):
        pairs = block.pairs or [(a, b) for a in block.grid.rows for b in block.grid.columns]
        for place, (a, b) in enumerate(pairs):
            reason = table.error_reasons.get((a, b)) if table.error_reasons else None
            if reason:
                cell = [place, column] if block.pairs else list(divmod(place, len(block.grid.columns)))
                cells.setdefault(reason, []).append(cell)
    known = int(np.isfinite(block.grid.values).sum())
    without = {reason: None if len(places) == known else places for reason, places in cells.items()}
    return {"quantiles": quantiles, "bounds": plain(tables[0].bounds), "without_error": without}


def _margins(table: Values) -> list[list[Any] | None]:
    """Return for each row the second best column, and how far it is behind with the standard error of that."""
    found = [table.best_matches().get(row) for row in table.layers_a]
    return [[m.second, m.margin, m.margin_error] if m and m.margin_error is not None else None for m in found]
