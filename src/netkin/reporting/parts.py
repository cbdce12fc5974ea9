"""Blocks that several kinds of results share: a measure's heatmap, maps of models, conventions and origins."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from netkin.errors import NoValue
from netkin.reporting.blocks import Heatmap, Lines, Name, PageBlock, Scatter, Section, Table, Text, Tree
from netkin.reporting.charts import Curve, chart_of
from netkin.reporting.grids import Grid
from netkin.reporting.words import direction, grouped_reasons, meaning_of, range_of, shortened
from netkin.results import Comparison, Values
from netkin.results.distances import are_angles, branches_of, clusters_of, distances_of, plane_of, tree_of
from netkin.results.labels import NOT_ASKED, error_summary, has_errors, is_score, plural
from netkin.results.text import NO_DATA

LONG = 140  # letters of a reason that is shown without folding
MOST_NETWORKS = 200  # that a tree can show
TREE = "Average linkage of {what}. Groups that join far left have little in common."
PLANE = "Classical multidimensional scaling of the same distances; it keeps {share:.0%} of their squared spread."
COLOURS = "Colours are groups by average linkage, as many as have the largest mean silhouette."
PLAIN = ("none", "yes", "exact", "not asked for", "0 of ")  # what conventions say where there is nothing to know
USUAL = ("none", "None", "all", "yes", "float32, exact", "cpu")  # values of settings that were left alone
_IDENTITY = re.compile(r"(final )?weights( .+)?|(.+ )?digest|call")
_OF_LAYER = re.compile(r"(.+) ['\"](.+)['\"]")  # a fact about one layer, such as: cut after 'relu1'
_TECHNICAL = re.compile(r"made|netkin|torch|python|plan|products|directions [ab]|asked .+|precision.*|engine.*")


# --- heatmaps and charts ----------------------------------------------------------------------------------------------


def measured(table: Values, grid: Grid, key: str, caption: str, *notes: Text | Table | None, **more: Any) -> Heatmap:
    """Return the heatmap of a measure's table with what the measure means.

    Args:
        table: The measure's table.
        grid: What is shown of it.
        key: By which a script finds the numbers.
        caption: What is read aloud before the table.
        notes: What stands beside the picture.
        more: Other fields of the heatmap.
    """
    line = f"{direction(table)} · {range_of(table)} · {table.exactness}"
    whole = None if grid.listed else table
    return Heatmap(
        grid, key, caption, title=grid.id, line=line, means=meaning_of(table), notes=notes, table=whole, **more
    )


def table_of(result: Any) -> tuple[list[str], list[list[Any]]]:
    """Return the table that `--csv` writes too."""
    columns, rows = result.long_form()
    return list(columns), [list(row) for row in rows]


def curve(title: str, numbers: Curve, key: str, note: str = "", upwards: str = "") -> Lines | None:
    """Return a curve as a chart with its title; None where it holds no value at all."""
    chart = chart_of(title, numbers)
    return None if chart is None else Lines(chart, key, title, note, upwards=upwards)


def missing_values(grid: Grid, said: Collection[str] = ()) -> Text | None:
    """Return why values of a heatmap are missing, but for reasons that are `said` elsewhere."""
    counted = {reason: count for reason, count in grid.reasons().most_common() if reason not in said}
    return reason_list(grouped_reasons(counted), f"No value for {plural(sum(counted.values()), 'pair')}")


def reason_list(reasons: Sequence[str], summary: str, who: str = "") -> Text | None:
    """Return reasons beside a sample of the hatching: a short one as it is, else folded under a summary."""
    if not reasons:
        return None
    if len(reasons) == 1 and len(reasons[0]) <= LONG:
        return Text(f"no value{f' {who}' if who else ''}: {reasons[0]}", style="reasons")
    first = f": {re.split('[;.] ', reasons[0])[0]}" if len(reasons) == 1 else f", for {len(reasons)} reasons"
    return Text(title=f"{summary}{first}", items=reasons, style="reasons", folded=True)


def shared_reasons(grids: Sequence[Grid]) -> tuple[list[str], Text | None]:
    """Return the reasons that several measures share, and the list with each of them once.

    A layer that is constant has no value by any measure; the page says so once.
    """
    each = [grid.reasons() for grid in grids]
    most = {reason: max(counts[reason] for counts in each) for counts in each for reason in counts}
    shared = {reason: count for reason, count in most.items() if sum(reason in counts for counts in each) > 1}
    whole = all(reason in counts for counts in each for reason in shared)
    who = "by every measure" if whole else "by several measures"
    summary = f"No value {who} for {plural(sum(shared.values()), 'pair')}"
    return list(shared), reason_list(grouped_reasons(shared), summary, who)


# --- maps of models ---------------------------------------------------------------------------------------------------


def maps_of(table: Values) -> list[PageBlock]:
    """Return the tree and the plane, or nothing where networks are few or many, or some pair has no value."""
    if not 3 <= len(table.layers_a) <= MOST_NETWORKS or is_score(table):
        return []
    try:
        distances = distances_of(table)
    except NoValue:  # for some pair of networks
        return []
    names, (points, share) = shortened(table.layers_a), plane_of(distances)
    branches, leaves = branches_of(tree_of(distances))
    groups = clusters_of(distances) if len(names) > 3 and distances.any() else (0,) * len(names)
    unit = {"radians": "rad", "": table.quantity.name}.get(table.quantity.unit, table.quantity.unit)
    what = table.quantity.name
    if are_angles(table):
        what, unit = f"angles, arccos of {table.quantity.name}", "rad"
    said = f" {COLOURS}" if len(set(groups)) > 1 else ""
    return [
        Tree(names, branches.tolist(), leaves, groups, unit, TREE.format(what=what) + said),
        Scatter(names, points.tolist(), groups, unit, PLANE.format(share=share)),
    ]


# --- where the numbers come from --------------------------------------------------------------------------------------


def origins(
    facts: Mapping[str, Any], provenance: Mapping[str, Any], *parts: PageBlock | None
) -> list[PageBlock | None]:
    """Return the origins of numbers: facts and provenance, `parts`, and what is seldom read, folded.

    Digests and calls, which identify results, are folded; so are settings at their defaults.
    """
    identity = {
        key: value for key, value in provenance.items() if _IDENTITY.fullmatch(key) or str(value).startswith("digest ")
    }
    told = dict(facts) | {key: value for key, value in provenance.items() if key not in {*facts, *identity}}
    usual = {key: value for key, value in told.items() if is_usual(key, value)}
    digests = fact_table(identity, "Identity: digests of weights, data and settings") if identity else None
    more = fact_table(usual, f"Versions, and {len(usual)} settings at their defaults") if usual else None
    return [fact_table({key: value for key, value in told.items() if key not in usual}), *parts, digests, more]


def fact_table(facts: Mapping[str, Any], title: str = "") -> Table:
    """Return facts as a table, which is folded where it has a title."""
    return Table((), [[key, str(value)] for key, value in facts.items()], title, style="facts", folded=bool(title))


def grouped(facts: Mapping[str, str], layers: Sequence[str]) -> dict[str, str]:
    """Return facts without repetition for several layers.

    Example:
        >>> grouped({"cut after 'in'": "stopped after 'in'", "cut after 'out'": "stopped after 'out'"}, ["in", "out"])
        {'cut after each layer': 'stopped after it'}
    """
    alike: dict[tuple[str, str], list[str]] = {}  # a fact's words and what it says, both without the layer's name
    for fact, said in facts.items():
        match = _OF_LAYER.fullmatch(fact)
        words, layer = (match[1], match[2]) if match and match[2] in layers else (fact, "")
        alike.setdefault((words, said.replace(f"{layer!r}", "it") if layer else said), []).append(layer)
    return dict(_fact_row(words, said, own, layers) for (words, said), own in alike.items())


def _fact_row(words: str, said: str, own: Sequence[str], layers: Sequence[str]) -> tuple[str, str]:
    """Return a fact about several layers: in one row with their names, or without where it is about all of them."""
    if not own[0]:
        return words, said
    if len(own) == 1:
        return f"{words} {own[0]}", said
    whole = set(own) == set(layers)
    return (f"{words} each layer", said) if whole else (f"{words} {len(own)} layers", f"{said}\n{', '.join(own)}")


def is_usual(key: str, value: Any) -> bool:
    """Return whether a fact is a setting at its default, or about the software: said, but folded."""
    return str(value) in USUAL or _TECHNICAL.fullmatch(key) is not None or (key.endswith("seed") and value in (0, "0"))


def common_facts(comparison: Comparison) -> dict[str, Any]:
    """Return the facts of a comparison about its data and provenance."""
    shapes = sorted({*comparison.shapes_a.values(), *comparison.shapes_b.values()})
    data = {
        "data": comparison.data,
        "examples": f"{comparison.examples:,}",
        "what one example is": ", ".join(shapes) or "not said",
    }
    return ({"data": NO_DATA} if comparison.needs_no_data else data) | {
        "seed": comparison.seed,
        "complete": "yes" if comparison.complete else "no, it was interrupted",
        "made": comparison.created,
        "netkin": comparison.version,
    }


def conventions(tables: Iterable[Values], open_: bool, **more: Mapping[str, str]) -> Section:
    """Return a table with a column for each measure; `more` holds other facts by the measures' ids."""
    told = {
        table.id: _conventions(table) | {word.replace("_", " "): own[table.id] for word, own in more.items()}
        for table in tables
    }
    words = next(iter(told.values()), {})
    rows = [[word, *(own[word] for own in told.values())] for word in words]
    usual = [row for row in rows if all(str(cell).startswith(PLAIN) for cell in row[1:])]
    said = Table(["", *told], [row for row in rows if row not in usual], style="measures",
                 label="The measures and their conventions")  # fmt: skip
    rest = Table(["", *told], usual, f"{len(usual)} more, at their defaults", "Conventions at their defaults",
                 "measures", folded=True)  # fmt: skip
    layout = "open" if open_ else "folded"
    return Section("The measures, with every convention", [said, rest if usual else None], layout)


def _conventions(table: Values) -> dict[str, Any]:
    return {
        "measure": table.quantity.name,
        "parameters": ", ".join(f"{key} = {value}" for key, value in table.quantity.parameters.items()) or "none",
        "conventions": table.quantity.convention or "not said",
        "direction": direction(table),
        "range": range_of(table),
        "unit": table.quantity.unit or "none",
        "symmetric": "yes" if table.quantity.symmetric else "no: exchanging the models changes the values",
        "statistic": table.statistic,
        "exactness": table.exactness,
        "standard errors": _errors(table),
        "pairs without a value": _missing(table),
    }


def _missing(table: Values) -> str:
    unasked = sum(reason == NOT_ASKED for reason in table.missing.values())
    asked = f"{len(table.missing) - unasked:,} of {table.values.size - unasked:,}"
    return f"{asked}; {unasked:,} more were not asked for" if unasked else asked


def _errors(table: Values) -> str:
    if has_errors(table):
        return error_summary(table)
    return "; ".join(dict.fromkeys(table.error_reasons.values())) or "not asked for"


def layer_table(comparison: Comparison, side: str, title: str) -> Table:
    """Return the layers of side a or b, with what one example is and how wide they are, as far as that is known."""
    told = {"what one example is": f"shapes_{side}", "width": f"widths_{side}"}
    known = {words: getattr(comparison, field) for words, field in told.items() if getattr(comparison, field)}
    layers = getattr(comparison, f"layers_{side}")
    rows = [[Name(layer), *(str(own.get(layer, "–")) for own in known.values())] for layer in layers]
    return Table(["layer", *known], rows, title, folded=True)


def about(comparison: Comparison) -> list[dict[str, str]]:
    """Return for the layers of both sides what one example is and how wide they are, as far as that is known."""
    sides = []
    for side in "ab":
        shapes, widths = getattr(comparison, f"shapes_{side}"), getattr(comparison, f"widths_{side}")
        said = {layer: [shapes[layer]] if layer in shapes else [] for layer in getattr(comparison, f"layers_{side}")}
        for layer, words in said.items():
            words += [f"{widths[layer]} wide"] if layer in widths else []
        sides.append({layer: ", ".join(words) for layer, words in said.items() if words})
    return sides


def counted_reasons(table: Values, most: int) -> list[str]:
    """Return why values have no standard error, the most frequent reasons first."""
    counts = Counter(table.error_reasons.values()).most_common(most)
    return [f"{reason} ({plural(count, 'pair')})" for reason, count in counts]
