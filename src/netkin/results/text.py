"""Results as plain text, in tables that fit a terminal.

Layers whose names do not fit get numbers, so that a shortened name is never taken for another.
"""

from __future__ import annotations

import math
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from netkin.errors import NoValue
from netkin.results.labels import (
    HOLE,
    NOT_ASKED,
    brief,
    buckets_note,
    column_label,
    direction,
    error_lines,
    has_classes,
    has_errors,
    has_networks,
    is_of_tasks,
    listed_pairs,
    listing,
    models_in_words,
    pair_label,
    plural,
    range_in_words,
    reasons,
    short_names,
    tables_by_name,
)

if TYPE_CHECKING:
    from netkin.results.comparison import Comparison
    from netkin.results.comparisons import Comparisons
    from netkin.results.series import Series
    from netkin.results.values import Match, Values

NAMED = 5  # best matches that are listed one by one
LEGEND = (
    "τ: 1 if layers settle from the bottom up, -1 if from the top down; p: p-value against random order alone; "
    "networks that learn nothing may give a small one too, so compare with a control"
)
CELL = 8  # characters that a step takes at most, as a column
NO_DATA = "from the weights alone: no data were run"


def comparison_as_text(comparison: Comparison) -> str:
    """Return all tables of a comparison under a heading with the models and the data."""
    width = terminal_width()
    parts = ["\n".join(_heading(comparison, width)), *_tables(comparison, width)]
    parts += [wrapped(f"warning: {caveat}", width) for caveat in comparison.caveats]
    return "\n\n".join(parts)


def _tables(comparison: Comparison, width: int) -> Iterator[str]:
    """Yield a matrix for each measure or, where each layer meets one other at most, a list for all of one name."""
    tables, pairs = list(comparison.tables.values()), listing(comparison)
    for some in tables_by_name(tables).values() if pairs else [[table] for table in tables]:
        yield _list_as_text(some, pairs, width) if pairs else _matrix_as_text(some[0], width)


def values_as_text(table: Values) -> str:
    """Return one measure's table under a line that describes its numbers."""
    width, pairs = terminal_width(), listed_pairs([table])
    return _list_as_text([table], pairs, width) if pairs else _matrix_as_text(table, width)


def _matrix_as_text(table: Values, width: int) -> str:
    lines = [wrapped(_about(table), width), *_numbers(table, width)]
    below = [*reasons(table.missing), *error_lines([table]), match_note(table)]
    return "\n".join([*lines, *(wrapped(line, width) for line in below if line)])


def _numbers(table: Values, width: int) -> list[str]:
    """Return the matrix with its standard errors: in its cells, else below as a matrix where that fits."""
    plain, sides = cells(table.values), (table.layers_a, table.layers_b)
    if not has_errors(table):
        return grid(*sides, plain, width)
    both, spread = with_errors(table.values, table.to_errors()), error_cells(table.to_errors())
    if fits_width(*sides, both, width):
        return grid(*sides, both, width)
    below = ["standard errors", *grid(*sides, spread, width)] if fits_width(*sides, spread, width) else []
    return [*grid(*sides, plain, width), *below]


def _list_as_text(tables: Sequence[Values], pairs: Sequence[tuple[int, int]], width: int) -> str:
    """Return tables of one name side by side, a row for each pair of layers."""
    missing = {(f"{a} {b}", why): why for t in tables for (a, b), why in t.missing.items() if why != NOT_ASKED}
    lines = [wrapped(_about(table), width) for table in tables]
    lines += grid(*list_cells(tables, pairs), width)
    return "\n".join([*lines, *(wrapped(line, width) for line in [*reasons(missing), *error_lines(tables)])])


def list_cells(
    tables: Sequence[Values], pairs: Sequence[tuple[int, int]]
) -> tuple[list[str], list[str], list[list[str]]]:
    """Return the names of the rows, which are pairs of layers, and of the columns, which are tables; and the cells."""
    rows, columns = zip(*pairs, strict=True)
    labels = [pair_label(tables, tables[0].layers_a[i], tables[0].layers_b[j]) for i, j in pairs]
    values, errors = (
        np.array([array[rows, columns] for array in arrays]).T
        for arrays in ([table.values for table in tables], [table.to_errors() for table in tables])
    )
    return labels, list(map(column_label, tables)), with_errors(values, errors)


def _about(table: Values) -> str:
    return f"{table.id}: {direction(table)}, {range_in_words(table)}, {table.exactness}"


def summary_as_text(comparisons: Comparisons) -> str:
    """Return for each measure a table of models by models: the mean over layers at the same relative depth."""
    width, models = terminal_width(), comparisons.models
    means = "means over layers at the same relative depth"
    tasks = all(is_of_tasks(table) for comparison in comparisons.values() for table in comparison.tables.values())
    counted = f"{plural(len(models), 'task' if tasks else 'model')}, {plural(len(comparisons), 'pair')}"
    lines = [wrapped(f"{counted}: {means}", width)]
    with_data = [comparison for comparison in comparisons.values() if comparison.examples]
    origins = {f"on {comparison.data}: {plural(comparison.examples, 'example')}" for comparison in with_data}
    lines += [wrapped(origin, width) for origin in origins if len(origins) == 1]
    for measure in comparisons.measures:
        about = _about(next(comparison[measure] for comparison in comparisons.values() if measure in comparison))
        shown = grid(models, models, _summary_cells(comparisons.summary(measure)), width)
        lines += ["", wrapped(about, width), *shown]
        # what numbers stand for, in the last lines, is said once
        lines += [line for line in _behind_lines(comparisons, measure, width) if line not in shown[-2:]]
    said = [note for note in (buckets_note(list(comparisons.values())), *map(str, comparisons.caveats)) if note]
    notes = [f"warning: {note}" for note in said[:NAMED]]
    notes += [f"{plural(len(said) - NAMED, 'more warning')}: each pair shows its own"] if len(said) > NAMED else []
    notes += [f"left out: {model!r}, as it failed: {why}" for model, why in comparisons.failed.items()]
    return "\n".join([*lines, *(line for note in notes for line in ("", wrapped(note, width)))])


def _behind_lines(comparisons: Comparisons, measure: str, width: int) -> Iterator[str]:
    """Yield over how many pairs of layers the means are, and why some are missing."""
    models, counts = comparisons.models, comparisons.layer_counts(measure)
    numbers = sorted(set(counts[counts > 0].tolist()))
    if len(numbers) == 1:
        yield f"each mean is over {plural(numbers[0], 'pair')} of layers"
    elif numbers:
        yield "the number of pairs of layers behind each mean"
        yield from grid(models, models, [[str(n) if n else HOLE for n in row] for row in counts.tolist()], width)
    compared = {pair for a, b in comparisons for pair in ((a, b), (b, a))}
    missing = comparisons.summaries()[measure].missing
    lines = reasons({pair: why for pair, why in missing.items() if pair in compared})
    yield from (wrapped(line, width) for line in lines)


def _summary_cells(means: np.ndarray) -> list[list[str]]:
    """Return means with two to four decimals, as many as show two digits of what lies off the diagonal."""
    apart = np.abs(means[~np.eye(len(means), dtype=bool)])
    known = apart[np.isfinite(apart) & (apart > 0)]
    if _style(means) != ".2f" or not known.size:
        return cells(means)
    decimals = int(np.clip(1 - np.floor(np.log10(np.median(known))), 2, 4))
    return [[_cell(value, f".{decimals}f") for value in row] for row in means.tolist()]


def series_as_text(series: Series) -> str:
    """Return for each measure the layers by steps, and the step at which each layer reaches 0.9, 0.99 and 0.999."""
    width, final = terminal_width(), series.comparisons[-1]
    steps = f"{len(series)} {series.unit}s, {series.steps[0]} to {series.final_step}"
    parts = [wrapped(f"{series.run}: each layer against its own final state at {steps}", width)]
    data = f"on {final.data}: {final.examples:,} examples, seed {final.seed}"
    parts[0] += "\n" + wrapped(NO_DATA if final.needs_no_data else data, width)
    for measure in series.measures:
        parts.append("\n".join(_layer_lines(series, measure, width)))
        parts.append("\n".join(_arrivals(series, measure, width)))
    parts += [wrapped(f"warning: {caveat}", width) for caveat in series.caveats]
    return "\n\n".join(part for part in parts if part)


def _layer_lines(series: Series, measure: str, width: int) -> Iterator[str]:
    """Yield the layers by as many steps as fit, evenly chosen, the first and the last among them."""
    margin = max(map(len, series.layers), default=0)
    most = max((width - margin) // (max(len(str(s)) for s in series) + CELL // 2), 2)
    places = sorted(set(np.linspace(0, len(series) - 1, min(len(series), most)).round().astype(int).tolist()))
    some = f", {len(places)} of {len(series)} {series.unit}s shown" if len(places) < len(series) else ""
    yield wrapped(f"{measure}: {direction(series.table(measure))}, layers by {series.unit}s{some}", width)
    yield from grid(series.layers, [str(series.steps[i]) for i in places], cells(series.own(measure)[places].T), width)


def _arrivals(series: Series, measure: str, width: int) -> Iterator[str]:
    """Yield when each layer reaches the thresholds, for a similarity that ends at 1; distances have no common ones."""
    marks = series.marks(measure)
    if not marks:
        return
    reached = [series.reached(threshold, measure) for threshold in marks]
    entries = [[HOLE if steps[layer] is None else str(steps[layer]) for steps in reached] for layer in series.layers]
    yield wrapped(f"the {series.unit} from which on a layer stays at or above a similarity", width)
    yield from grid(series.layers, list(map(str, marks)), entries, width)
    if any(HOLE in row for row in entries):
        yield f"{HOLE}  not before the last {series.unit}"
    trends = _trends(series, marks, measure)
    lines = [f"bottom-up at {', '.join(map(str, those))}: {said}" for said, those in trends.items()]
    yield from (wrapped(line, width) for line in [*lines, *[LEGEND] * any("τ" in line for line in lines)])


def _trends(series: Series, marks: Sequence[float], measure: str) -> dict[str, list[float]]:
    """Return the sentences on the order of layers, with the thresholds for which they hold."""
    thresholds: dict[str, list[float]] = {}
    for threshold in marks:
        try:
            said = str(series.bottom_up(threshold, measure))
        except NoValue as reason:
            said = str(reason)
        thresholds.setdefault(said, []).append(threshold)
    return thresholds


def cells(values: np.ndarray) -> list[list[str]]:
    """Return numbers with two decimals, more where all are small; tiny and huge ones as powers of ten; none is "–".

    Example:
        >>> cells(np.array([[0.123, -0.001], [float("nan"), 12.0]]))
        [['0.12', '0.00'], ['–', '12.00']]
        >>> cells(np.array([[0.0721, 0.07], [0.0812, 0.0004]]))
        [['0.072', '0.070'], ['0.081', '0.000']]
    """
    style = _style(values)
    return [[_cell(value, style) for value in row] for row in values.tolist()]


def with_errors(values: np.ndarray, errors: np.ndarray) -> list[list[str]]:
    """Return numbers with their standard errors, both with as many decimals as the errors need, four at most.

    Example:
        >>> with_errors(np.array([[0.8312, 1.0]]), np.array([[0.0042, float("nan")]]))
        [['0.831 ±0.004', '1.000       ']]
    """
    texts, tails = values_and_errors(values, errors)
    room = max((len(tail) + 1 for row in tails for tail in row if tail), default=0)
    return [
        [f"{text}{f' {tail}' if tail else '':{room}}" for text, tail in zip(*row, strict=True)]
        for row in zip(texts, tails, strict=True)
    ]


def values_and_errors(values: np.ndarray, errors: np.ndarray) -> tuple[list[list[str]], list[list[str]]]:
    """Return numbers with as many decimals as their errors need, and the errors, as ±0.02 or "" where there is none."""
    style = _style(values)
    powers = style == ".1e"
    style = style if powers else max(style, f".{_decimals(errors)}f")  # of two like .2f and .3f the longer
    texts = [[_cell(value, style) for value in row] for row in values.tolist()]
    return texts, [["" if text == HOLE else f"±{text}" for text in row] for row in error_cells(errors, powers)]


def error_cells(errors: np.ndarray, powers: bool = False) -> list[list[str]]:
    """Return standard errors with two to four decimals, those that would be zero, or all, as powers of ten.

    Example:
        >>> error_cells(np.array([[0.0042, 0.02, 1e-9, float("nan")]]))
        [['0.004', '0.020', '1e-09', '–']]
        >>> error_cells(np.array([[0.01, 0.02, 0.0043]]))
        [['0.01', '0.02', '0.004']]
    """
    style = ".1e" if powers or np.nanmax(errors, initial=0) >= 1e5 else f".{_decimals(errors)}f"
    return [
        [_small(error) if error > 0 and not float(f"{error:{style}}") else _cell(error, style) for error in row]
        for row in errors.tolist()
    ]


def _small(error: float) -> str:
    """Return the first digit of an error, as 0.004; of one below 1e-4 as a power of ten."""
    return f"{float(f'{error:.0e}'):g}" if error >= 1e-4 else f"{error:.0e}"


def _decimals(errors: np.ndarray) -> int:
    """Return how many decimals show the first digit of the median error: from two to four."""
    known = errors[np.isfinite(errors) & (errors > 0)]
    return int(np.clip(np.ceil(-np.log10(np.median(known))), 2, 4)) if known.size else 2


def _style(values: np.ndarray) -> str:
    largest = np.nanmax(np.abs(values)) if np.isfinite(values).any() else 0.0
    if largest == 0 or 0.1 <= largest < 1e5:
        return ".2f"
    return f".{1 - math.floor(math.log10(largest))}f" if 1e-3 <= largest < 0.1 else ".1e"


def _heading(comparison: Comparison, width: int) -> Iterator[str]:
    networks = f"{plural(len(comparison.layers_a), 'network')}, each with every other"
    yield wrapped(networks if has_networks(comparison) else models_in_words(comparison), width)
    data = f"on {comparison.data}: {plural(comparison.examples, 'example')}, seed {comparison.seed}"
    yield wrapped(NO_DATA if comparison.needs_no_data else data, width)
    columns = {} if has_classes(comparison) else comparison.shapes_b
    kinds = Counter([*comparison.shapes_a.values(), *columns.values()])
    if kinds:
        counted = ", ".join(f"{kind} ({plural(count, 'layer')})" for kind, count in kinds.most_common())
        yield wrapped(f"what one example is: {next(iter(kinds)) if len(kinds) == 1 else counted}", width)
    if not comparison.complete:
        yield wrapped("interrupted: the numbers come from a part of the data or the pairs", width)


def match_note(table: Values) -> str:
    """Return which best matches are not clearly better than the second best, or that all are; "" where not known."""
    judged = {row: match for row, match in table.best_matches().items() if match.clear is not None}
    unclear = [f"{row} ({margin_text(match)})" for row, match in judged.items() if not match.clear]
    if not unclear:
        clear = "each is clearly better than the second best (95 % interval of the difference)"
        return f"best matches: {clear}" if judged else ""
    listed = ", ".join([*unclear[:NAMED], *([f"and {len(unclear) - NAMED} more"] if len(unclear) > NAMED else [])])
    are = "is" if len(unclear) == 1 else "are"
    return f"best matches: {len(unclear)} of {len(judged)} {are} not clearly better than the second best: {listed}"


def margin_text(match: Match) -> str:
    """Return a best match with its lead over the second best.

    Example:
        >>> from netkin.results import Match
        >>> margin_text(Match("conv1", 0.9, 0.01, "conv2", 0.004, 0.012, False))
        'conv1 over conv2 by 0.004 ±0.012'
    """
    return f"{match.layer} over {match.second} by {number_text(match.margin or 0.0, match.margin_error)}"


def number_text(value: float, error: float | None) -> str:
    """Return a number with its error, if it has one, to two digits of the error."""
    return number_texts([value], [error])[0]


def number_texts(values: Iterable[float], errors: Iterable[float | None]) -> list[str]:
    """Return numbers with their errors as texts, to two digits of the median error.

    Example:
        >>> number_texts([0.91234, 0.5, math.nan], [0.0312, None, None])
        ['0.912 ±0.031', '0.500', '–']
    """
    numbers, spreads = np.array([*values], dtype=float), np.array([*errors], dtype=float)
    known = spreads[np.isfinite(spreads) & (spreads > 0)]
    if not known.size:
        return [row[0] for row in cells(numbers[:, None])]
    places = max(1 - math.floor(math.log10(float(np.median(known)))), 0)
    style = f".{places}f" if places <= 6 else ".2e"
    shown = [HOLE if math.isnan(value) else f"{value:{style}}" for value in numbers.tolist()]
    return [
        f"{text} ±{error:{style}}" if error > 0 else text for text, error in zip(shown, spreads.tolist(), strict=True)
    ]


def _cell(value: float, style: str) -> str:
    text = HOLE if math.isnan(value) else format(value, style)
    return text.removeprefix("-") if text == "-0.00" else text


def grid(rows: Sequence[str], columns: Sequence[str], entries: list[list[str]], width: int) -> list[str]:
    """Return the lines of a table with named rows and columns, none longer than `width`."""
    if not (rows and columns):
        return ["no layers"]
    lines = _block(list(rows), list(columns), entries)
    return lines if len(lines[0]) <= width else list(_numbered(rows, columns, entries, width))


def _numbered(rows: Sequence[str], columns: Sequence[str], entries: list[list[str]], width: int) -> Iterator[str]:
    """Number the layers; where the table is still too wide, leave out the columns in the middle."""
    cell = max(len(str(len(columns))), *(len(entry) for line in entries for entry in line)) + 2
    whole, limit = _listed(brief(rows)), max(width // 3, 12)
    short = whole if max(map(len, whole)) <= limit else _listed(map(short_names(rows).__getitem__, rows))
    labels = [cut_short(label, limit) for label in short]
    lines = _block(labels, list(columns), entries)
    if len(lines[0]) <= width:  # columns keep their names where only those of the rows are too long
        yield from lines
        yield from [] if labels == whole else [wrapped(f"rows: {', '.join(_listed(rows))}", width)]
        return
    count, room = len(columns), max((width - max(map(len, labels))) // cell, 1)
    if room < count and fits_width(labels, [str(place) for place in range(1, count + 1)], entries, width):
        cell, room = 0, count  # each column as wide as its own cells
    last = count if room >= count else max(room - 1, 1) // 2
    first = 0 if room >= count else max(room - 1, 1) - last
    places = [*range(first), *range(count - last, count)]
    numbers = [[str(i + 1) for i in places], *([line[i] for i in places] for line in entries)]
    if room < count:
        for line in numbers:
            line.insert(first, "…")
    yield from _block(labels, numbers[0], numbers[1:], cell)
    yield from [] if labels == whole else [wrapped(f"rows: {', '.join(_listed(rows))}", width)]
    named = "columns: " + ", ".join(f"{i + 1} {columns[i]}" for i in places)
    yield wrapped("columns have the numbers of the rows" if tuple(rows) == tuple(columns) else named, width)
    if room < count:
        shown = f"{len(places)} of {count} columns are shown"
        yield wrapped(f"{shown}; --json, --report or, in Python, `to_pandas()` show all", width)


def _listed(names: Iterable[str]) -> list[str]:
    return [f"{i} {name}" for i, name in enumerate(names, start=1)]


def fits_width(rows: Sequence[str], columns: Sequence[str], entries: list[list[str]], width: int) -> bool:
    return not (rows and columns) or len(_block(list(rows), list(columns), entries)[0]) <= width


def _block(rows: list[str], columns: list[str], entries: list[list[str]], cell: int = 0) -> list[str]:
    return aligned([["", *columns], *([row, *line] for row, line in zip(rows, entries, strict=True))], cell)


def aligned(rows: list[list[str]], least: int = 0) -> list[str]:
    """Return rows of cells as lines of text: the first column begins at the left, all others end at the right.

    Two spaces are between columns, of which each has `least` characters.
    """
    first, *rest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sizes = [max(size + 2, least) for size in rest]
    return [
        (row[0].ljust(first) + "".join(cell.rjust(size) for cell, size in zip(row[1:], sizes, strict=True))).rstrip()
        for row in rows
    ]


def cut_short(label: str, width: int) -> str:
    """Keep the head, with its number, and as much of the tail as fits: the ends of layer names differ most."""
    head = width // 2
    return label if len(label) <= width else f"{label[:head]}…{label[len(label) - (width - head - 1) :]}"


def wrapped(text: str, width: int) -> str:
    """Return a sentence in lines of `width`, all but the first indented."""
    return textwrap.fill(text, width, subsequent_indent="   ", break_on_hyphens=False)


def terminal_width() -> int:
    """Return how many characters fit a line, 40 at least."""
    return max(shutil.get_terminal_size().columns, 40)
