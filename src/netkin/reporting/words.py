"""Numbers, names and sentences as text for pages, figures and notebooks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from netkin.errors import NoValue
from netkin.results import Comparison, Comparisons, Federation, Match, Ranking, Series, Trend, Values
from netkin.results.compression import Compression
from netkin.results.diff import Diff
from netkin.results.labels import (
    LONGEST,
    NOT_ASKED,
    bare_names,
    brief,
    column_label,
    has_classes,
    has_networks,
    is_of_tasks,
    is_score,
    listing,
    pair_label,
    partners,
    plural,
    short_names,
    worth_of,
)
from netkin.results.text import cut_short
from netkin.results.weight_sparsity import SparsityStudy

SHOWN_NAMES = 12  # of layers that are listed with a reason
_OF_A_LAYER = re.compile(r"(?:layer )?(?P<quote>['\"])(?P<name>.+?)(?P=quote) is ")
CHANCE = 0.05  # an order that chance brings about more often only leans one way


def number(value: float) -> str:
    """Return a number with four decimals, or as a power of ten where that would be too coarse.

    Example:
        >>> number(0.83125), number(1.5e-7), number(-0.0)
        ('0.8313', '1.500e-7', '0.0000')
    """
    if value and not 1e-3 <= abs(value) < 1e5:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{digits}e{int(power):+d}"
    return f"{abs(value) if value == 0 else value:.4f}"


def number_with_error(value: float, error: float) -> str:
    """Return a number with its standard error, as far as there are such.

    Example:
        >>> number_with_error(0.83125, 0.0125), number_with_error(0.5, math.nan), number_with_error(math.nan, math.nan)
        ('0.8313 ± 0.0125', '0.5000', '–')
    """
    if not math.isfinite(value):
        return "–"
    return number(value) if math.isnan(error) else f"{number(value)} ± {number(error)}"


def bound(value: float) -> str:
    """Return the end of a scale in few letters.

    Example:
        >>> bound(1.0), bound(math.pi / 2), bound(math.sqrt(2))
        ('1', 'π/2 ≈ 1.57', '√2 ≈ 1.41')
    """
    known = {math.pi / 2: "π/2", math.sqrt(2): "√2"}
    exact = next((sign for number, sign in known.items() if math.isclose(number, value)), None)
    return f"{exact} ≈ {value:.2f}" if exact else f"{value:.4g}"


def direction(table: Values) -> str:
    """Return as text whether more is closer, or better."""
    if is_score(table):
        return f"{worth_of(table)}: {'higher' if table.higher_is_closer else 'lower'} is better"
    return "similarity: higher is closer" if table.higher_is_closer else "distance: lower is closer"


def meaning_of(table: Values) -> tuple[str, str]:
    """Return a measure's meaning and limits, as declared with the measure; else what follows from its conventions."""
    quantity = table.quantity
    if quantity.means:
        return quantity.means, quantity.cannot_see
    what = "better stitches" if is_score(table) else "closer layers"
    ends = f"{'Higher' if table.higher_is_closer else 'Lower'} values mean {what}."
    says = f"{quantity.convention.rstrip('.')}. {ends}" if quantity.convention else ends
    return (
        says,
        quantity.cannot_see or "There is no more information about this measure here; see its own documentation.",
    )


def range_of(table: Values) -> str:
    """Return the range of the values as text."""
    low, high = table.bounds
    if math.isinf(high):
        return "unbounded" if math.isinf(low) else f"from {bound(low)} up"
    return f"at most {bound(high)}" if math.isinf(low) else f"{bound(low)} to {bound(high)}"


def shortened(names: Sequence[str], limit: int = LONGEST) -> list[str]:
    """Return names of at most `limit` letters, cut in their middle; those that would be equal get their number.

    Example:
        >>> shortened(["conv", "encoder.block.attention.self.query"], limit=12)
        ['conv', 'encode…query']
    """
    cut = [cut_short(name, limit) for name in _candidates(names, limit)]
    times = Counter(cut)
    return [cut_short(f"{i} {name}", limit) if times[name] > 1 else name for i, name in enumerate(cut, start=1)]


def _candidates(names: Sequence[str], limit: int) -> Sequence[str]:
    """Return the names or, where some are too long, without the parts that all share, here and there or at the ends."""
    if all(len(name) <= limit for name in names):
        return names
    short, apart = brief(names), short_names(names, limit)
    return short if max(map(len, short)) <= limit else [apart[name] for name in names]


def grouped_reasons(counted: Mapping[str, int]) -> list[str]:
    """Return why values are missing, each reason with its number of pairs; equal reasons of layers are joined.

    Example:
        >>> grouped_reasons({"layer 'a' is constant (width 8)": 3, "layer 'b' is constant (width 16)": 2})
        ['2 layers: constant (5 pairs): a, b']
    """
    alike: dict[str, list[tuple[str, str, int]]] = {}
    for reason, count in counted.items():
        found = _OF_A_LAYER.match(reason)
        rest = re.sub(r" \(width [\d,]+\)", "", reason[found.end() :]) if found else reason
        alike.setdefault(rest, []).append((found["name"] if found else "", reason, count))
    return [_reason(rest, own) for rest, own in alike.items()]


def _reason(rest: str, own: Sequence[tuple[str, str, int]]) -> str:
    names, count = list(dict.fromkeys(name for name, _, _ in own)), sum(count for *_, count in own)
    pairs = plural(count, "pair")
    if len(own) == 1:
        return f"{own[0][1]} ({pairs})"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{len(names)} layers: {rest.rstrip('.')} ({pairs}): {', '.join(names[:SHOWN_NAMES])}{more}"


def headline(comparison: Comparison, names: Mapping[str, str] | None = None) -> str:
    """Return one sentence with the result of the first measure; `names` are shorter ones of the models."""
    if not comparison.tables:
        return "This comparison holds no measure."
    table = next(iter(comparison.tables.values()))
    if has_networks(comparison):
        return closest_and_farthest(table.id, table.layers_a, table.values, table.higher_is_closer, "networks")
    stitched = [one for one in comparison.tables.values() if is_score(one)]
    if stitched:
        return _best_stitch(comparison, [one for one in stitched if one.quantity.name == stitched[0].quantity.name])
    best = table.best_matches()
    if not best:
        return f"{table.id} has no value for any pair of layers; the reasons stand below."
    if has_classes(comparison):
        return f"By {table.id}, {_closest_class(table)}."
    if len(listing(comparison)) == 1:
        ((row, match),) = best.items()
        return f"By {table.id}, {row} × {match.layer} is at {_value(match)}."
    return f"By {table.id}, {_closest(table, best, 'layers')}; {_agreement(comparison, table, best, names or {})}."


def _best_stitch(comparison: Comparison, tables: Sequence[Values]) -> str:
    """Return where the best stitch is by the first score, and what each method reaches on average."""
    choose = max if tables[0].higher_is_closer else min
    found = [(match.value, row, match.layer, table) for table in tables for row, match in table.best_matches().items()]
    if not found:
        return f"{tables[0].quantity.name} has no value for any stitch; the reasons stand below."
    value, row, column, table = choose(found, key=lambda one: one[0])
    where = f"{pair_label([table], row, column)}{f' by {column_label(table)}' if len(tables) > 1 else ''}"
    means = [(column_label(one), float(np.nanmean(one.values))) for one in tables if np.isfinite(one.values).any()]
    told = [f"{how} reaches {mean:.2f}" if len(tables) > 1 else f"it is {mean:.2f}" for how, mean in means]
    if sum(int(np.isfinite(one.values).sum()) for one in tables) == 1:
        return f"By {tables[0].quantity.name}, the stitch at {where} reaches {value:.2f} with {column_label(table)}."
    return f"By {tables[0].quantity.name}, the best stitch is that at {where}, at {value:.2f}; on average {_and(told)}."


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def closest_and_farthest(
    measure: str, names: Sequence[str], values: np.ndarray, higher_is_closer: bool, what: str
) -> str:
    """Return which two of several networks are the closest, and which the farthest apart, of those with a value.

    Args:
        measure: By which they were compared.
        names: The names of the networks.
        values: Networks × networks, symmetric.
        higher_is_closer: The direction of the measure.
        what: What they are called, such as networks.

    Example:
        >>> closest_and_farthest("cka", "abc", np.array([[1, 0.9, 0.5], [0.9, 1, 0.4], [0.5, 0.4, 1]]), True, "models")
        'By cka, the closest models are a × b at 0.90, and the farthest apart b × c at 0.40.'
    """
    pairs = [(i, j) for i, j in combinations(range(len(names)), 2) if math.isfinite(values[i, j])]
    if not pairs:
        return f"{measure} has no value for any pair of {what}; the reasons stand below."
    ordered = sorted(pairs, key=lambda pair: float(values[pair]), reverse=higher_is_closer)
    first, last = (f"{names[i]} × {names[j]} at {values[i, j]:.2f}" for i, j in (ordered[0], ordered[-1]))
    said = f"By {measure}, the closest {what} are {first}"
    return f"{said}, and the farthest apart {last}." if len(ordered) > 1 else f"{said}."


def _closest(table: Values, best: Mapping[str, Match], what: str) -> str:
    choose = max if table.higher_is_closer else min
    row, match = choose(best.items(), key=lambda item: item[1].value)
    return f"the closest pair of {what} is {row} × {match.layer} at {_value(match)}"


def _closest_class(table: Values) -> str:
    """Return the closest layer and class; values of 1 say no more than that the layer determines the logit."""
    end = table.bounds[1] if table.higher_is_closer else table.bounds[0]
    known = np.isfinite(table.values)
    there = known & np.isclose(table.values, end, rtol=0, atol=1e-4)
    left = int((known & ~there).sum())
    aside = f"{plural(int(there.sum()), 'value')} of {end:g}, where the layer determines the logit"
    if not left:
        return f"every layer is at {end:g} with every class, as it determines the logit"
    choose = np.nanargmax if table.higher_is_closer else np.nanargmin
    row, column = np.unravel_index(choose(np.where(there, np.nan, table.values)), table.values.shape)
    said = f"{table.layers_a[row]} × {table.layers_b[column]} at {table.values[row, column]:.2f}"
    return f"the closest pair of layer and class is {said}{f', apart from {aside}' if there.any() else ''}"


def _value(match: Match) -> str:
    return f"{match.value:.2f}" if match.error is None else f"{match.value:.2f} ± {match.error:.1g}"


def _agreement(comparison: Comparison, table: Values, best: Mapping[str, Match], names: Mapping[str, str]) -> str:
    pairs, how = partners(comparison)
    matched = {comparison.layers_a[i]: comparison.layers_b[j] for i, j in pairs}
    met = sum(best[a][0] == b for a, b in matched.items() if a in best)
    known = [table.values[i, j] for i, j in pairs if math.isfinite(table.values[i, j])]
    which = "the layer" if len(known) == 1 else f"the {len(known)} layers"
    mean = f"{'is' if len(known) == 1 else 'are'} at {sum(known) / len(known):.2f} on average" if known else ""
    if known and listing(comparison):  # where nothing else was asked for, nothing is best
        return f"{f'{which} of the {how}' if how else 'the pairs that were compared'} {mean}"
    a, b = (names.get(model, model) for model in (comparison.a, comparison.b))
    find = "finds its" if met == 1 else "find their"
    count = plural(len(comparison.layers_a), "layer")  # those too that correspond to none
    found = f"{met} of {count} of {a} {find} best match in the layer of the {how} of {b}"
    return f"{found}, and {which} of the {how} {mean}" if known else found


def figure_caption(results: Any) -> str:
    """Return what a figure shows, on which data, and what its marks mean.

    It is of a comparison, several, a series, a ranking, a federation, ways to learn tasks, a sparsity study, or a
    compression.
    """
    if isinstance(results, Comparison):
        return _comparison_caption(results)
    if isinstance(results, Comparisons):
        first = next(iter(results.values()))
        if any(map(is_of_tasks, first.tables.values())):
            return f"Each layer of {len(results.models)} tasks with every layer of each{_on(first)}. Hatched: no value."
        counts = np.concatenate([results.layer_counts(measure).ravel() for measure in results.measures])
        known = counts[counts > 0]
        least, most = (int(known.min()), int(known.max())) if known.size else (0, 0)
        behind = plural(most, "pair") if least == most else f"{least} to {most} pairs"
        what = (
            f"Means over {behind} of layers at the same relative depth, for every two of {len(results.models)} models"
        )
        return f"{what}{_on(first)}. Hatched: no value."
    if isinstance(results, Series):
        final = results.comparisons[-1]
        lines = f"Below, each with its own final state; the last {results.unit}, drawn faintly, is so by construction."
        what = f"the layers at each {results.unit} (rows) with those at the final one (columns)"
        return f"{results.run}: {', '.join(results.measures)} of {what}{_on(final)}. {lines}"
    if isinstance(results, Ranking):
        return f"Scores of {plural(len(results), 'model')}{_on(results)}; bars are 95 % intervals over examples."
    if isinstance(results, Federation):
        alike = ", and how similar the clients are" if results.similarity is not None else ""
        return f"{results.title}: accuracy of each client by round{alike}."
    if isinstance(results, Diff):
        return (
            f"Errors of the modules of {results.b} on the inputs of {results.a}'s, in the order of calls{_on(results)}."
        )
    if isinstance(results, SparsityStudy):
        return "Weights that are left, debiased CKA between layers, and accuracy after pruning, as far as measured."
    if isinstance(results, Compression):
        on = _on(results) if results.data else ""
        below = (
            " Below, the accuracy as layer after layer is compressed." if results.accuracy_before is not None else ""
        )
        return f"What {plural(len(results), 'compressed layer')} kept of what there was{on}.{below}"
    return "Accuracy on each task (columns) after each task (rows), mean over seeds. Hatched: no value."


def _on(result: Any) -> str:
    if getattr(result, "needs_no_data", False):
        return ""
    return f", on {bare_names([result.data])[result.data]}, {plural(result.examples, 'example')}"


def _comparison_caption(comparison: Comparison) -> str:
    names = short_names([comparison.a, comparison.b])
    a, b = names[comparison.a], names[comparison.b]
    if has_networks(comparison):
        what = f"Each of {len(comparison.layers_a)} networks with every other"
    elif has_classes(comparison):
        what = "Layers (rows) and the logits of classes (columns)"
    elif listing(comparison):
        stitched = any(map(is_score, comparison.tables.values()))
        what = f"Stitches of {a} into {b}, layer by layer" if stitched else f"Layers of {a} and {b}, pair by pair"
    else:
        what = f"Layers of {a} (rows) and of {b} (columns)"
    best = any(table.axes == ("layer", "layer") for table in comparison.tables.values()) and not listing(comparison)
    marks = [" Marked: each row's best match."] if best else []
    reasons = {reason for table in comparison.tables.values() for reason in table.missing.values()}
    marks += [" Hatched: no value."] if reasons - {NOT_ASKED} else []
    return f"{what}{_on(comparison)}.{''.join(marks)}"


# --- the order in which layers settle ---------------------------------------------------------------------------------


def verdict(trend: Trend) -> str:
    """Return the direction of the order as text; more cautious where the p-value is high."""
    if is_unclear(trend):
        return "no clear order"
    way = "bottom-up" if trend.tau > 0 else "top-down"
    return way if trend.p <= CHANCE else f"leaning {way}"


def is_unclear(trend: Trend) -> bool:
    """Return whether τ is 0 or within its standard error of it, and the p-value is high."""
    return not trend.tau or (trend.p > CHANCE and abs(trend.tau) <= (trend.error or 0))


def tau(trend: Trend) -> str:
    """Return τ with its standard error."""
    return f"{trend.tau:.2f}" + ("" if trend.error is None else f" ± {trend.error:.2f}")


def series_headline(series: Series) -> str:
    """Return one sentence with the result: in which order the layers converge."""
    if not series.layers:
        count = len(series.comparisons[-1].layers_a)
        steps = plural(len(series), series.unit)
        return f"{plural(count, 'layer')} at {steps}, none of which the final checkpoint has under the same name."
    final = f"each with its final state at {series.unit} {series.final_step:,}"
    general = f"{plural(len(series.layers), 'layer')} at {plural(len(series), series.unit)}, {final}"
    for threshold, measure in [(mark, m) for m in series.measures for mark in series.marks(m)]:
        try:
            return f"{general}. {_found(series, series.bottom_up(threshold, measure), threshold, measure)}"
        except NoValue:  # all layers get there together: the next mark may separate them
            continue
    return f"{general}."


def _found(series: Series, trend: Trend, threshold: float, measure: str) -> str:
    # without the p-value, which is against random order: untrained networks have an order of depth too
    first, last = ("lower", "upper") if trend.tau > 0 else ("upper", "lower")
    says = f"{first} layers reach {threshold} before {last} ones"
    if not trend.tau or abs(trend.tau) <= (trend.error or 0):
        says = f"layers reach {threshold} in no clear order of depth"
    late = f", {trend.never} of which get there only at the end" if trend.never else ""
    counted = f"over {plural(trend.layers, 'layer')}{late}{early_in_words(series, trend)}"
    return f"By {measure}, {says}: Kendall's τ between depth and {series.unit} is {tau(trend)} {counted}."


def early_in_words(series: Series, trend: Trend) -> str:
    """Return which layers are left out of a trend, as they are at the threshold at the first step; "" for none."""
    if not trend.early:
        return ""
    says = "that is there at" if trend.early == 1 else "that are there at"
    return f"; {trend.early} {says} the first {series.unit} {'is' if trend.early == 1 else 'are'} left out"


def settling_rule(series: Series, measure: str) -> str:
    """Return what it means that a layer has settled."""
    return (
        f"The first {series.unit} from which on the {measure} of a layer with its own final state stays at the mark or "
        f"above. The last {series.unit} does not count: there every layer equals itself."
    )


def scale_of_tau() -> str:
    """Return what Kendall's τ means."""
    return (
        "Kendall's τ says how far the order of settling follows depth: 1 if every layer settles after all layers below "
        "it, 0 if depth tells nothing, −1 if the top layers come first. After ± stands its standard error, from "
        "leaving out one layer at a time. Layers that are at the mark at the first step say nothing about settling and "
        "are left out. The p-value is against random order alone: networks that learn nothing may have an order of "
        "depth too, so compare with a control, such as the same training on shuffled labels."
    )


def settled_first(series: Series, threshold: float, measure: str) -> str:
    """Count the pairs of layers in which the lower one settles first, a question anyone can check by hand."""
    reached = [step for step in series.reached(threshold, measure).values() if step != series.steps[0]]
    steps = [math.inf if step is None else step for step in reached]
    apart = [(low, high) for low, high in combinations(steps, 2) if low != high]
    first = sum(low < high for low, high in apart)
    pairs = f"{first:,} of the {len(apart):,} pairs of layers that settle at different {series.unit}s"
    return f"In {pairs} the lower one comes first."


def chance_in_words(trend: Trend) -> str:
    """Return the p-value of a trend as a sentence."""
    p = f"is {trend.p:.2g}" if trend.p >= 1e-4 else "is below 0.0001"
    doubt = "" if trend.p <= CHANCE else ", so this may be chance"
    return f"The p-value against layers that settle in random order {p}{doubt}."


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
