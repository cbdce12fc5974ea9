"""Merging: any order, any grouping, the same value; what is unlike is refused."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from netkin.errors import NoValue, ShapeError
from netkin.measures import measures
from netkin.statistics import Grams, LayerGrams, LayerMoments, LayerRows, Moments, Rows
from quickly import slow_but
from worlds import Worlds

pytestmark = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")  # few examples will do here

LINEAR = [name for name, found in measures().items() if found.facts.reads is Moments]
SHAPELY = ("cka", "cka_debiased", "cka_uncentered", "nbs", "procrustes_distance", "svcca_k", "gulp")


def moments_of(X, Y, **options):
    collector = LayerMoments([(["a"], ["b"])], debiased=True, **options)
    collector.update({"a": X, "b": Y})
    return collector


def merged(parts, order):
    """Merge `parts` two at a time: each entry of `order` picks, modulo what is left, which two come next."""
    parts = list(parts)
    for pick in order:
        first = parts.pop(pick % len(parts))
        second = parts.pop((pick // 7) % len(parts))
        parts.append(first.merge(second))
    (whole,) = parts
    return whole


orders = st.lists(st.integers(0, 10_000), min_size=5, max_size=5)


def plain_parts(dtype=np.float64):
    worlds = Worlds(1)
    X, Y = worlds.related(300, 6, 5)
    cuts = [0, 1, 8, 80, 200, 230, 300]
    return [(X[a:b].astype(dtype), Y[a:b].astype(dtype)) for a, b in itertools.pairwise(cuts)]


def wild_parts(dtype=np.float64):
    """Return parts that differ in mean and scale; some are constant, one is a single row, one is tiny."""
    parts = plain_parts(dtype)
    changes = [(1.0, 0.0), (1e-3, 100.0), (50.0, -30.0), (0.0, 7.0), (1e-8, 0.0), (0.0, 0.0)]
    wild = [(X * scale + mean, Y / (scale + 0.5) - mean) for (X, Y), (scale, mean) in zip(parts, changes, strict=True)]
    return [(X.astype(dtype), Y.astype(dtype)) for X, Y in wild]


@pytest.mark.parametrize("dtype", slow_but([np.float32, np.float64], np.float32))
@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
@settings(max_examples=min(15, settings.default.max_examples))
@given(order=orders)
def test_moments_merge_in_any_order_to_the_same_values(dtype, precision, order):
    collectors = [moments_of(*part, precision=precision) for part in plain_parts(dtype)]
    one, other = merged(collectors, order)["a", "b"], merged(collectors, [0] * 5)["a", "b"]
    for name in LINEAR:
        assert float(measures()[name](one)) == pytest.approx(float(measures()[name](other)), abs=1e-10, rel=1e-10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(max_examples=min(25, settings.default.max_examples))
@given(order=orders)
def test_parts_of_other_means_and_scales_merge_to_the_same_values(dtype, order):
    parts = wild_parts(dtype)
    collectors = [moments_of(*part) for part in parts]
    whole = Moments.of(*(np.concatenate(side) for side in zip(*parts, strict=True)))
    one = merged(collectors, order)["a", "b"]
    other = merged(collectors, [0] * 5)["a", "b"]
    for name in SHAPELY:
        assert float(measures()[name](one)) == pytest.approx(float(measures()[name](other)), abs=1e-10, rel=1e-10)
        assert float(measures()[name](one)) == pytest.approx(float(measures()[name](whole)), abs=1e-9, rel=1e-9)


@pytest.mark.parametrize("tiny, huge", [(1e-20, 1.0), (1e-20, 1e15), (1.0, 1e25)])
def test_parts_of_unlike_scale_merge_either_way(worlds, tiny, huge):
    X, Y = worlds.related(60, 4, 3)
    X[:30] *= tiny
    X[30:] *= huge
    first, second = moments_of(X[:30], Y[:30]), moments_of(X[30:], Y[30:])
    whole = Moments.of(X, Y)
    for pair in (first.merge(second)["a", "b"], second.merge(first)["a", "b"]):
        for name in ("cka", "cka_debiased", "nbs"):
            assert float(measures()[name](pair)) == pytest.approx(float(measures()[name](whole)), abs=1e-10)


def test_a_layer_constant_in_one_part_or_with_two_constants_merges(worlds):
    X, Y = worlds.related(60, 4, 3)
    X[:30] = 5.0
    X[30:45] = 6.0
    parts = [moments_of(X[a:b], Y[a:b]) for a, b in ((0, 30), (30, 45), (45, 60))]
    whole = float(measures()["cka"](Moments.of(X, Y)))
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]):
        first, second, third = (parts[i] for i in order)
        assert float(measures()["cka"](first.merge(second).merge(third)["a", "b"])) == pytest.approx(whole, abs=1e-12)
        assert float(measures()["cka"](first.merge(second.merge(third))["a", "b"])) == pytest.approx(whole, abs=1e-12)


def test_parts_that_are_all_constant_have_no_value(worlds):
    parts = [moments_of(np.full((10, 2), 5.0), worlds.normal(10, 2)) for _ in range(3)]
    with pytest.raises(NoValue, match="layer 'a' is constant over the 30 examples"):
        measures()["cka"](parts[0].merge(parts[1]).merge(parts[2])["a", "b"])


def test_merging_changes_neither_part_and_both_go_on(worlds):
    X, Y = worlds.related(60, 4, 3)
    first, second = moments_of(X[:20], Y[:20]), moments_of(X[20:40], Y[20:40])
    whole = first.merge(second)
    before = [float(measures()["cka"](part["a", "b"])) for part in (first, second)]
    whole.update({"a": X[40:], "b": Y[40:]})
    assert float(measures()["cka"](whole["a", "b"])) == pytest.approx(measures()["cka"].function(X, Y), abs=1e-12)
    assert [float(measures()["cka"](part["a", "b"])) for part in (first, second)] == before
    assert (first.n, second.n, whole.n) == (20, 20, 60)


def test_an_empty_part_adds_nothing(worlds):
    X, Y = worlds.related(20, 4, 3)
    empty, full = LayerMoments([(["a"], ["b"])], debiased=True), moments_of(X, Y)
    for whole in (empty.merge(full), full.merge(empty), empty.merge(empty).merge(full)):
        assert whole["a", "b"].n == 20
        assert float(measures()["cka"](whole["a", "b"])) == pytest.approx(measures()["cka"].function(X, Y), abs=1e-12)
    grams = LayerGrams([(["a"], ["b"])], batch=4)
    more = LayerGrams([(["a"], ["b"])], batch=4)
    more.update({"a": X, "b": Y})
    assert grams.merge(more)["a", "b"].batches == more.merge(grams)["a", "b"].batches == 5
    rows = LayerRows(["a", "b"])
    rows.update({"a": X, "b": Y})
    assert LayerRows(["a", "b"]).merge(rows).n == rows.merge(LayerRows(["a", "b"])).n == 20


@settings(max_examples=min(25, settings.default.max_examples))
@given(order=orders)
def test_whole_mini_batches_merge_in_any_order_to_the_same_value(order):
    worlds = Worlds(2)
    parts = []
    for count, scale in zip((8, 16, 8, 24, 8, 16), (1, 1e-14, 1e14, 1, 3, 0), strict=True):
        X, Y = worlds.related(count, 4, 3)
        collector = LayerGrams([(["a"], ["b"])], batch=8)
        collector.update({"a": X * scale, "b": Y + 1000})
        parts.append(collector)
    one, other = merged(parts, order)["a", "b"], merged(parts, [0] * 5)["a", "b"]
    assert isinstance(one, Grams)
    assert float(measures()["cka_minibatch"](one)) == pytest.approx(
        float(measures()["cka_minibatch"](other)), abs=1e-10
    )
    assert one.batches == 10


@settings(max_examples=min(25, settings.default.max_examples))
@given(order=orders, cap=st.integers(1, 40))
def test_a_cap_keeps_the_same_rows_whatever_the_order(order, cap):
    X, Y = Worlds(3).related(60, 4, 3)
    parts = []
    for start in range(0, 60, 10):
        collector = LayerRows(["a", "b"], cap=cap, seed=5)
        collector.update({"a": X[start : start + 10], "b": Y[start : start + 10]}, numbers=range(start, start + 10))
        parts.append(collector)
    at_once = LayerRows(["a", "b"], cap=cap, seed=5)
    at_once.update({"a": X, "b": Y})
    one, other = merged(parts, order), at_once
    assert isinstance(one["a", "b"], Rows)
    assert one.n == other.n == cap
    assert one.seen == other.seen == 60
    assert torch.equal(one["a", "b"].x.X, other["a", "b"].x.X)
    assert torch.equal(one["a", "b"].y.X, other["a", "b"].y.X)


def test_rows_without_a_cap_are_the_same_in_whatever_order_they_are_merged(worlds):
    X, Y = worlds.related(60, 4, 3)
    parts = []
    for start in (0, 20, 40):
        collector = LayerRows(["a", "b"])
        collector.update({"a": X[start : start + 20], "b": Y[start : start + 20]}, numbers=range(start, start + 20))
        parts.append(collector)
    forth, back = parts[0].merge(parts[1]).merge(parts[2]), parts[2].merge(parts[1]).merge(parts[0])
    for merged in (forth, back):
        assert np.array_equal(merged["a", "b"].x.X, X)
        assert np.array_equal(merged["a", "b"].y.X, Y)


# --- unlike -----------------------------------------------------------------------------------------------------------


def grams(**options):
    return LayerGrams(**{"pair_blocks": [(["a"], ["b"])], "batch": 8} | options)


@pytest.mark.parametrize(
    "one, other, sentence",
    [
        (LayerMoments([(["a"], ["b"])]), LayerMoments([(["a"], ["c"])]), "their layers differ, .*'b'.*'c'"),
        (
            LayerMoments([(["a"], ["b"])]),
            LayerMoments([(["a"], ["b"])], debiased=True),
            "their debiased differ, False and True",
        ),
        (
            LayerMoments([(["a"], ["b"])], precision=torch.float32),
            LayerMoments([(["a"], ["b"])]),
            "their precision differ, torch.float32 and torch.float64",
        ),
        (LayerMoments([(["a"], ["b"])]), grams(), "a LayerMoments can't be merged with a LayerGrams"),
        (grams(), grams(batch=16), "their batch differ, 8 and 16"),
        (grams(), grams(kernel="rbf"), "their kernel differ, 'linear' and 'rbf'"),
        (grams(kernel="rbf"), grams(kernel="rbf", fraction=0.8), "their fraction differ, 0.4 and 0.8"),
        (grams(), grams(pair_blocks=[(["a"], ["a"])]), "their layers differ"),
        (LayerRows(["a"]), LayerRows(["b"]), "their layers differ, \\['a'\\] and \\['b'\\]"),
        (LayerRows(["a"], cap=5), LayerRows(["a"], cap=6), "their cap differ, 5 and 6"),
        (LayerRows(["a"], seed=1), LayerRows(["a"], seed=2), "their seed differ, 1 and 2"),
    ],
)
def test_unlike_statistics_are_refused(one, other, sentence):
    with pytest.raises(ShapeError, match=sentence):
        one.merge(other)


def test_layers_of_unlike_width_are_refused(worlds):
    first, second = (moments_of(worlds.normal(10, width), worlds.normal(10, 3)) for width in (4, 5))
    with pytest.raises(ShapeError, match="their widths differ, {'a': 4, 'b': 3} and {'a': 5, 'b': 3}"):
        first.merge(second)


def test_rows_and_mini_batches_of_unlike_width_are_refused(worlds):
    for make in (lambda: LayerRows(["a", "b"]), lambda: grams(batch=32)):
        first, second = make(), make()
        first.update({"a": worlds.normal(10, 4), "b": worlds.normal(10, 3)})
        rows = {"a": worlds.normal(10, 5), "b": worlds.normal(10, 3)}
        second.update(rows, range(10, 20)) if isinstance(second, LayerRows) else second.update(rows)
        with pytest.raises(ShapeError, match="'a'"):
            first.merge(second)["a", "b"]


def test_layers_whose_rows_do_not_pair_in_one_part_have_no_value_in_either_order(worlds):
    X, Y, Z = worlds.normal(10, 4), worlds.normal(20, 3), worlds.normal(20, 2)
    rectangle = [(["a", "b", "c"], ["a", "b", "c"])]
    first, second = LayerMoments(rectangle), LayerMoments(rectangle)
    first.update({"a": X, "b": Y[:10], "c": Z[:10]})
    second.update({"a": X, "b": Y, "c": Z})
    for merged in (first.merge(second), second.merge(first)):
        with pytest.raises(NoValue, match="layer 'a' gives 20 rows and layer 'b' 30"):
            merged["a", "b"]
        whole = Moments.of(np.concatenate([Y[:10], Y]), np.concatenate([Z[:10], Z]))
        for name in ("cka", "nbs"):
            value = float(measures()[name](merged["b", "c"]))
            assert value == pytest.approx(float(measures()[name](whole)), abs=1e-12)


def test_merging_parts_of_other_units_changes_neither(worlds):
    X, Y = (Z.astype(np.float32) for Z in worlds.related(32, 4, 3))
    one, other = grams(), grams()
    one.update({"a": X[:16] * np.float32(1e-20), "b": Y[:16]})
    other.update({"a": X[16:], "b": Y[16:]})
    before = [float(part["a", "b"].x) for part in (one, other)]
    one.merge(other)
    assert [float(part["a", "b"].x) for part in (one, other)] == before


def test_a_unit_chosen_in_one_part_outlives_merging_with_an_empty_one(worlds):
    X, Y = (Z.astype(np.float32) for Z in worlds.related(32, 4, 3))
    tiny = grams()
    tiny.update({"a": X[:16] * np.float32(1e-20), "b": Y[:16]})
    merged = grams().merge(tiny)
    merged.update({"a": X[16:] * np.float32(1e-20), "b": Y[16:]})
    expected = measures()["cka_minibatch"].function(X, Y, batch=8)
    assert float(measures()["cka_minibatch"](merged["a", "b"])) == pytest.approx(expected, abs=1e-6)
