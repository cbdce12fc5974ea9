"""The contract of a page: its blocks, and the JSON document that says them.

A result makes a `Page`; templates give HTML of it, and `figures` drawings. `docs/page.md` describes the JSON. Numbers
stand in it once: `results` holds the documents of what was saved, and a block points at their tables.
"""

from __future__ import annotations

import base64
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
from netkin.results.records import plain
from netkin.results.values import student_quantile

FORMAT = 1
LEFT_OUT = ("results", "grids", "marks")  # which are packed, and pictures of numbers that stand in a result
PACKED = 8  # numbers of a list, from which it is packed


@dataclass(frozen=True)
class Name:
    """A name in a table or a list, with its whole form where it is shortened, and what stands before it."""

    text: str
    whole: str = ""
    before: str = ""


@dataclass(frozen=True)
class PageBlock:
    """A part of a page; its template is `templates/KIND.html`."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Text(PageBlock):
    """A paragraph or a list; with a title and `folded` it opens at its title."""

    kind: ClassVar[str] = "text"
    text: str = ""
    lead: str = ""  # words before it, in bold
    title: str = ""
    items: Sequence[Text | str] = ()
    style: str = ""  # note, errors, bias, facts-line, reasons
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
    notes: Sequence[Text | Table] = ()
    table: Values | None = None
    source: str = ""  # where the numbers stand in the document; else they stand in the block
    frames: Sequence[Grid] = ()
    sources: Sequence[str] = ()
    step: str = ""  # the step that is shown first
    about: Sequence[Mapping[str, str]] = ({}, {})  # what is said of rows and of columns
    opens: Sequence[Sequence[int | None]] | None = None
    level: str = "layers"  # or models, whose cells open a choice
    columns: Sequence[Values] = ()  # of a list, the table of each column
    order: Sequence[int] = ()  # places of its tables in the result
    pairs: Sequence[Sequence[str]] = ()  # of a list, the layers of each row
    numbered: bool = False
    fitted_with: str = ""  # pictures of one such name share their colours


@dataclass(frozen=True)
class Lines(PageBlock):
    """A line chart; with `ways` it stands in a card of its own, with the names of the lines at their ends."""

    kind: ClassVar[str] = "lines"
    chart: Chart
    key: str
    title: str = ""
    note: str = ""
    caption: str = ""
    upwards: str = ""
    heading: bool = False  # whether the title is a heading
    ways: str = ""  # words above the key of lines that are named at their ends
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
    grids: Sequence[Grid]
    names: Sequence[str]
    of: str  # the heatmap whose steps they show, or what else they are of
    places: Sequence[int] = ()  # of the steps that they open
    notes: Sequence[str] = ()
    marks: Sequence[Sequence[tuple[int, bool]]] = ()  # row and column, and whether dotted


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
        results: What is saved as JSON.
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


def pointer(*parts: object) -> str:
    """Return where something stands in the document, as a JSON pointer.

    Example:
        >>> pointer("results", 0, "tables", "a/b", "values")
        '/results/0/tables/a~1b/values'
    """
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in parts)


def page_document(page: Page) -> dict[str, Any]:
    """Return a page as mappings, lists, texts and numbers: what `docs/page.md` describes."""
    return {"format": FORMAT, **_described(page), "results": [_packed(result) for result in page.results]}


def _described(value: Any) -> Any:
    if isinstance(value, Caveat):
        return {"code": value.code, "sentence": str(value)}
    if isinstance(value, Heatmap):
        return _heatmap(value)
    if isinstance(value, Chart):
        return _chart(value)
    if is_dataclass(value):
        kind = {"kind": value.kind} if isinstance(value, PageBlock) else {}
        told = {own.name: getattr(value, own.name) for own in fields(value) if own.name not in LEFT_OUT}
        return kind | {name: _described(own) for name, own in told.items() if own not in ("", None, (), [])}
    if isinstance(value, Mapping):
        return {str(key): _described(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(own) for own in value]
    return plain(value)


def _packed(value: Any) -> Any:
    """Return a document whose long lists of numbers are packed: eight bytes each, as base64."""
    if isinstance(value, Mapping):
        return {name: _packed(own) for name, own in value.items()}
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
            return [_packed(own) for own in value]
        flat = [own for row in flat for own in row]
    numbers = len(flat) > PACKED and all(own is None or isinstance(own, float) for own in flat)
    return packed_numbers(np.array(flat, dtype=float), shape) if numbers else [_packed(own) for own in value]


def packed_numbers(values: np.ndarray, shape: Sequence[int] | None = None) -> dict[str, Any]:
    """Return an array as a mapping: its shape, and its numbers as base64 of eight bytes each, lowest first."""
    text = base64.b64encode(np.ascontiguousarray(values, dtype="<f8").tobytes()).decode()
    return {"shape": list(values.shape if shape is None else shape), "float64": text}


def _matrix(values: np.ndarray | None) -> Any:
    return None if values is None else packed_numbers(values) if values.size > PACKED else plain(values)


def _chart(chart: Chart) -> dict[str, Any]:
    lines = [
        {"name": line.name, "aside": round(chart.aside(k), 4), "values": _rounded(line.values)}
        | ({"errors": _rounded(line.errors)} if any(line.errors) else {})
        for k, line in enumerate(chart.lines)
    ]
    x = [round(place, 4) for place in chart.lefts]
    return {"x": x, "names": chart.names, "up": [chart.up.low, chart.up.high], "across": chart.across, "lines": lines}


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _heatmap(block: Heatmap) -> dict[str, Any]:
    """Return what a script must know of a heatmap, but for its numbers where these stand in a result."""
    grid, scale = block.grid, block.grid.scale
    told = {
        "kind": block.kind, "key": block.key, "id": grid.id, "title": _described(block.title), "line": block.line,
        "rows": grid.rows, "columns": grid.columns, "sides": block.sides, "level": block.level,
        "means": block.means, "notes": _described(block.notes), "about": block.about, "opens": block.opens,
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
        told["frames"] = [_frame(frame, source) for frame, source in zip(block.frames, block.sources, strict=True)]
    else:
        told |= _frame(grid, block.source)
    if block.table and block.table.replicates is not None:
        told["margins"] = _margins(block.table)
    empty = (None, "", ())
    return {name: plain(own) for name, own in told.items() if name in ("rows", "columns") or own not in empty}


def _frame(grid: Grid, source: str) -> dict[str, Any]:
    """Return the numbers of a heatmap, or where they stand, with its holes by their reasons, and its best matches."""
    missing: dict[str, list[list[int]]] = {}
    for (i, j), reason in grid.missing.items():
        if reason != (grid.elsewhere or NOT_ASKED):  # which is said of hundreds of pairs, and once in the block
            missing.setdefault(reason, []).append([i, j])
    errors = f"{source}/errors" if source and grid.errors is not None else _matrix(grid.errors)
    best = [grid.best.get(i) for i in range(len(grid.rows))]
    values = f"{source}/values" if source else _matrix(grid.values)
    return {"values": values, "errors": errors, "missing": missing, "best": best}


def _errors_of(block: Heatmap, tables: Sequence[Values]) -> dict[str, Any]:
    """Return by which quantile intervals are made within which bounds, and why values have no error.

    A reason that holds for all values has no places.
    """
    if not tables:
        return {}
    quantiles = [student_quantile(len(table.chunk_sizes)) if table.chunk_sizes else None for table in tables]
    cells: dict[str, list[list[int]]] = {}
    for column, table in enumerate(tables):
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
