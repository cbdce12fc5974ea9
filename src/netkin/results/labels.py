"""Labels: parsed ids of measures, short names of models, names of tables and pairs of layers, and notes on tables.

Where each layer is compared with at most one other, a comparison is a list of pairs, and a matrix would be empty.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from netkin.results.comparison import Comparison
    from netkin.results.values import Values


LONGEST = 22  # letters of a name that is not shortened
_FOLDERS = re.compile(r"[^@:\s]*[/\\]")
_TYPED = re.compile(r"(?:(?<=[@:])|^(?=[/\\~.]))[^@:,\s]*[/\\]")  # the folder of a path that names a model or data
_PARTS = re.compile(r"[^\W_]+|[\W_]")
NOT_ASKED = "this pair was not asked for"
HOLE = "–"
Place = tuple[int, int]


def parse_id(identifier: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the parameters that an id spells out, or None where it is no id.

    Example:
        >>> parse_id("svcca(variance=0.95)")
        ('svcca', {'variance': 0.95})
        >>> parse_id("rsa(compare=spearman)")
        ('rsa', {'compare': 'spearman'})
    """
    try:
        tree = ast.parse(identifier.strip(), mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
            parameters = {word.arg or "**": _value(word.value) for word in tree.keywords}
            return (tree.func.id, parameters) if len(parameters) == len(tree.keywords) else None  # none given twice
    except (SyntaxError, ValueError, TypeError):  # Python 3.10 has the second for a null character
        pass
    return None


def fits(identifier: str, table_id: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether the table has the name that `identifier` requests, and the parameters as far as it names them.

    Example:
        >>> fits("svcca", "svcca(variance=0.95)", {"variance": 0.95})
        True
    """
    wanted, held = parse_id(identifier), parse_id(table_id)
    return bool(wanted and held and wanted[0] == held[0] and wanted[1].items() <= dict(parameters).items())


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):  # a method as a parameter: agreement(method=reduced_rank(k=8))
        return ast.unparse(node)
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def brief(names: Sequence[str]) -> list[str]:
    """Return the names with the parts that all of them share as dots, unless that would make two of them alike.

    Example:
        >>> brief(["encoder.layer.0.out.dense", "encoder.layer.0.out.norm", "encoder.layer.1.out.norm"])
        ['…0…dense', '…0…norm', '…1…norm']
    """
    parts = [name.split(".") for name in names]
    shared = set.intersection(*map(set, parts)) if len(names) > 1 else set()
    dotted = (".".join("…" if part in shared else part for part in keys) for keys in parts)
    short = [re.sub(r"\.?…[.…]*", "…", name) for name in dotted]
    return short if len(set(short)) == len(names) and "…" not in short else list(names)


def short_names(names: Iterable[str], limit: int = LONGEST) -> dict[str, str]:
    """Return each name without its folders and without the beginning and the end that all share.

    Names stay as they are if none is longer than `limit`.

    Example:
        >>> short_names(["tiny10@/runs/tiny10_seed0.pt", "tiny10@/runs/tiny10_seed1.pt"])
        {'tiny10@/runs/tiny10_seed0.pt': 'seed0', 'tiny10@/runs/tiny10_seed1.pt': 'seed1'}
    """
    whole = list(dict.fromkeys(names))
    if all(len(name) <= limit for name in whole):
        return dict(zip(whole, whole, strict=True))
    bare = [_FOLDERS.sub("", name) for name in whole]
    distinct = bare if len(set(bare)) == len(whole) and all(bare) else whole
    return dict(zip(whole, _different(distinct) if len(whole) > 1 else distinct, strict=True))


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Return names of models or data without the folders of paths, or all as they are where that makes two alike.

    Example:
        >>> list(bare_names(["resnet18@/home/ann/a.pt", "mine/yours", "images:/home/ann/cats, 300 of 10,000"]).values())
        ['resnet18@a.pt', 'mine/yours', 'images:cats, 300 of 10,000']
    """
    whole = list(dict.fromkeys(names))
    bare = [_TYPED.sub("", name) for name in whole]
    return dict(zip(whole, bare if len(set(bare)) == len(whole) and all(bare) else whole, strict=True))


def _different(names: Sequence[str]) -> list[str]:
    """Return what is left of the names, which are distinct, between the parts that all begin and all end with."""
    parts = [_PARTS.findall(name) for name in names]
    start = _shared(parts)
    end = _shared([words[start:][::-1] for words in parts])
    left = ["".join(words[start : len(words) - end]) for words in parts]
    if all(re.search(r"[^\W\d_]", text) for text in left):
        return left
    while start and parts[0][start - 1] not in "/\\@:":  # a number alone says little: "bert-1" rather than "1"
        start -= 1
    return ["".join(words[start:]) for words in parts]


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """Return how many parts all begin with, where one at least is left to each."""
    most = max(min(len(words) for words in parts) - 1, 0)
    return next((k for k in range(most) if len({words[k] for words in parts}) > 1), most)


def listing(comparison: Comparison) -> list[Place]:
    """Return the pairs of a comparison that is a list; none where a matrix has more to show."""
    return [] if has_classes(comparison) else listed_pairs(list(comparison.tables.values()))


def listed_pairs(tables: Sequence[Values]) -> list[Place]:
    """Return the places of the pairs that were requested, or none where a layer is compared with several."""
    requested = np.zeros(tables[0].values.shape if tables else (0, 0), dtype=bool)
    for table in tables:
        rows, columns = ({name: k for k, name in enumerate(names)} for names in (table.layers_a, table.layers_b))
        left_out = [(rows[a], columns[b]) for (a, b), reason in table.missing.items() if reason == NOT_ASKED]
        of_table = np.ones(table.values.shape, dtype=bool)
        of_table[tuple(np.array(left_out, dtype=int).reshape(-1, 2).T)] = False
        requested |= of_table
    alone = all((requested.sum(axis=axis) <= 1).all() for axis in (0, 1))
    return [(i, j) for i, j in np.argwhere(requested).tolist()] if alone else []


def has_classes(comparison: Comparison) -> bool:
    """Return whether the columns are classes, as of `nk.class_sensitivity`, and so correspond to no layer."""
    return any(table.axes[1] == "class" for table in comparison.tables.values())


def has_networks(comparison: Comparison) -> bool:
    """Return whether rows and columns are whole networks, as of `nk.atom_similarity`, and no layers."""
    return any(table.axes[0] == "network" for table in comparison.tables.values())


def is_score(table: Values) -> bool:
    """Return whether a table holds scores of stitches, and not similarities of layers."""
    return table.quantity.is_score


def models_in_words(comparison: Comparison) -> str:
    """Return which models were compared, or stitched, and which of them is in the rows of a matrix."""
    tables = list(comparison.tables.values())
    rows, columns = ("", "") if listed_pairs(tables) else (" (rows)", " (columns)")
    verb = "stitched into" if any(map(is_score, tables)) else "and"
    return f"{comparison.a}{rows} {verb} {comparison.b}{columns}, layer by layer"


def is_of_tasks(table: Values) -> bool:
    """Return whether a table compares two tasks, each with data of its own."""
    return "shared_examples" in table.quantity.parameters


def is_apart(table: Values) -> bool:
    """Return whether a table compares tasks that do not have the same examples in the same buckets."""
    return is_of_tasks(table) and table.quantity.parameters["shared_examples"] != 1


def pair_label(tables: Iterable[Values], a: str, b: str) -> str:
    """Return the name of a pair of layers: one name where both have the same."""
    return a if a == b else f"{a} {'→' if any(map(is_score, tables)) else '×'} {b}"


def column_label(table: Values) -> str:
    """Return what distinguishes a table from others of its name: how layers were stitched, or the whole id."""
    return str(table.quantity.parameters.get("method", table.id)) if is_score(table) else table.id


def tables_by_name(tables: Iterable[Values]) -> dict[str, list[Values]]:
    """Return the tables that have one name and other parameters together, such as a score by all methods."""
    tables_of: dict[str, list[Values]] = {}
    for table in tables:
        tables_of.setdefault(table.quantity.name, []).append(table)
    return tables_of


def direction(table: Values) -> str:
    """Return the direction of a measure as text."""
    if is_score(table):
        return f"{worth_of(table)} ({'higher' if table.higher_is_closer else 'lower'} is better)"
    return "similarity (higher is closer)" if table.higher_is_closer else "distance (lower is closer)"


def worth_of(table: Values) -> str:
    """Return what a table scores: models for some data, or stitches."""
    return "score of a model" if table.axes[1] == "model" else "score of a stitch"


def range_in_words(table: Values) -> str:
    low, high = (f"{bound:.4g}" for bound in table.bounds)
    unit = f" {table.quantity.unit}" if table.quantity.unit else ""
    if math.isinf(table.bounds[1]):
        return f"unbounded{unit}" if math.isinf(table.bounds[0]) else f"from {low}{unit}"
    return (f"at most {high}" if math.isinf(table.bounds[0]) else f"{low} to {high}") + unit


def buckets_note(comparisons: Sequence[Comparison]) -> str:
    """Return which pairs of tasks can be compared with each other; empty where all can."""
    apart = {(comparison.a, comparison.b): any(map(is_apart, comparison.tables.values())) for comparison in comparisons}
    if not any(apart.values()):
        return ""
    alike = [f"{a} and {b}" for (a, b), other in apart.items() if a != b and not other]
    return (
        "values of pairs with the same examples in the same buckets "
        f"({'; '.join(['each task with itself', *alike])}) can't be compared with those of all other pairs, which lie "
        "lower whatever the networks are: between different data nothing but the spectra of kernels is compared."
    )


def partners(comparison: Comparison) -> tuple[list[tuple[int, int]], str]:
    """Return the pairs of layers that correspond, and in what; none where the columns are classes.

    Of a comparison that is a list of pairs it is these; they may correspond in nothing but having been requested.
    """
    if has_classes(comparison):
        return [], ""
    (matching, sense), listed = corresponding(comparison.layers_a, comparison.layers_b), listing(comparison)
    return (listed, sense if set(listed) <= set(matching) else "") if listed else (matching, sense)


def corresponding(rows: Sequence[str], columns: Sequence[str]) -> tuple[list[tuple[int, int]], str]:
    """Return the pairs of places that correspond, and in what: name, place, or relative depth.

    Example:
        >>> corresponding(["in", "mid", "out"], ["in", "out"])
        ([(0, 0), (2, 1)], 'same name')
        >>> corresponding(["a", "b", "c"], ["x", "y", "z", "u", "v"])
        ([(0, 0), (1, 2), (2, 4)], 'same relative depth')
    """
    places = {name: j for j, name in enumerate(columns)}
    named = [(i, places[name]) for i, name in enumerate(rows) if name in places]
    if named or not (rows and columns):
        return named, "same name"
    if len(rows) == len(columns):
        return [(i, i) for i in range(len(rows))], "same place"
    return [(i, _relative(i, len(rows), len(columns))) for i in range(len(rows))], "same relative depth"


def same_depth(rows: int, columns: int) -> list[Place]:
    """Return the places of the layers of two models at the same relative depth, as many as the shallower model has.

    Layer i of n lies at i / (n - 1), a single one at 0. Each layer of the model with fewer layers is paired with the
    nearest one of the other, the lower of two that are equally near; in either order these are the same pairs.

    Example:
        >>> same_depth(3, 5), same_depth(5, 3), same_depth(2, 2)
        ([(0, 0), (1, 2), (2, 4)], [(0, 0), (2, 1), (4, 2)], [(0, 0), (1, 1)])
    """
    if rows > columns:
        return [(i, j) for j, i in same_depth(columns, rows)]
    return [(i, _relative(i, rows, columns)) for i in range(rows)]


def _relative(place: int, count: int, other: int) -> int:
    """Return which of `other` layers is nearest in relative depth, by whole numbers: the lower of two as near."""
    return -((count - 1 - 2 * place * (other - 1)) // (2 * (count - 1))) if count > 1 else 0


# --- notes on tables --------------------------------------------------------------------------------------------------


def plural(count: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> plural(1, "pair"), plural(2000, "pair"), plural(2, "class"), plural(3, "epoch"), plural(4, "batch")
        ('1 pair', '2,000 pairs', '2 classes', '3 epochs', '4 batches')
    """
    ending = "es" if noun.endswith(("s", "x", "tch")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def reasons(missing: Mapping[tuple[str, str], str], what: str = "pair") -> Iterator[str]:
    """Yield one line for each reason, the commonest first, five at most; `what` are those that are missing."""
    counted = Counter(missing.values()).most_common()
    for reason, count in counted[:5]:
        yield f"{HOLE}  {reason} ({plural(count, what)})"
    if len(counted) > 5:
        yield f"{HOLE}  and {plural(len(counted) - 5, 'other reason')}; `missing` lists all"


def has_errors(table: Values) -> bool:
    """Return whether any value of a table has a standard error."""
    return table.errors is not None and bool(np.isfinite(table.errors).any())


def error_lines(tables: Sequence[Values]) -> Iterator[str]:
    """Yield how large the standard errors of tables are, which values have none and why, and where bias is larger."""
    for table in tables:
        of = f" of {column_label(table)}" if len(tables) > 1 else ""
        if has_errors(table):
            yield f"{'±' if table.quantity.error else 'standard errors'}{of}: {error_summary(table)}"
        for reason, count in Counter(table.error_reasons.values()).most_common(5):
            yield f"no standard error{of}: {reason} ({plural(count, 'pair')})"
        if note := bias_note(table):
            yield f"bias{of}: {note}"


def error_summary(table: Values) -> str:
    """Return the median and the largest standard error of a table that has some, and how they came to be."""
    known = table.to_errors()[np.isfinite(table.to_errors())]
    size = f"{known[0]:.2g}" if known.size == 1 else f"median {np.median(known):.2g}, largest {known.max():.2g}"
    if table.quantity.error:
        return f"{size}, {table.quantity.error}"
    return f"{size}, by the jackknife over {len(table.chunk_sizes)} chunks" if table.chunk_sizes else size


def bias_note(table: Values) -> str:
    """Return where the jackknife finds more bias than error, and which measure is free of it; "" where nowhere."""
    pairs = set(table.biased())
    if not pairs:
        return ""
    places = [(i, j) for i, a in enumerate(table.layers_a) for j, b in enumerate(table.layers_b) if (a, b) in pairs]
    largest = max(abs(table.bias()[place]) for place in places)
    known = int(np.isfinite(table.to_errors()).sum())
    where = f"for {len(pairs):,} of {plural(known, 'pair')}"
    note = f"{where} the jackknife finds a bias larger than the standard error, up to {largest:.2g}"
    debiased = table.quantity.debiased_as
    return f"{note}; {debiased} corrects for it" if debiased else note
