"""The collector of moments: many layers, pair_blocks, rows that do not fit, and refusals that leave no trace."""

import math

import numpy as np
import pytest
import torch

from netkin.errors import InvalidValue, NoValue, ShapeError
from netkin.measures import measures
from netkin.statistics import LayerMoments, Moments
from netkin.statistics.storage import to_plain

pytestmark = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")  # few examples will do here

cka = measures()["cka"].function
SAMPLE = ("cka", "cka_debiased", "cka_uncentered", "pwcca", "linear_regression_r2", "svcca", "gulp", "nbs")


def layers(worlds, n=60, **widths):
    shared = worlds.normal(n, 3)
    return {name: shared @ worlds.normal(3, width) + worlds.normal(n, width) + 1 for name, width in widths.items()}


def fed(pair_blocks, rows, batch=25, **options):
    collector = LayerMoments(pair_blocks, **options)
    count = max(len(matrix) for matrix in rows.values())
    for start in range(0, count, batch):
        collector.update({name: matrix[start : start + batch] for name, matrix in rows.items()})
    return collector


@pytest.mark.parametrize(
    "pair_blocks",
    [
        [(["a", "b"], ["c", "d"])],
        [(["a", "b", "c"], ["a", "b", "c"])],
        [(["a"], ["b", "c"]), (["d"], ["a"])],
        [(["a", "b"], ["b", "c"]), (["c"], ["c"])],
    ],
)
def test_every_pair_of_every_rectangle_is_right_from_both_sides(worlds, pair_blocks):
    rows = layers(worlds, a=4, b=6, c=3, d=5)
    collector = fed(pair_blocks, rows, debiased=True)
    for left, right in pair_blocks:
        for a in left:
            for b in right:
                for one, other in ((a, b), (b, a)):
                    for name in SAMPLE:
                        found = measures()[name]
                        expected = float(found(Moments.of(rows[one], rows[other])))
                        assert float(found(collector[one, other])) == pytest.approx(expected, abs=1e-9), (
                            name,
                            one,
                            other,
                        )


def test_reading_does_not_end_the_stream(worlds):
    rows = layers(worlds, a=4, b=6)
    collector = LayerMoments([(["a"], ["b"])])
    for start in range(0, 60, 20):
        collector.update({name: matrix[start : start + 20] for name, matrix in rows.items()})
        seen = (matrix[: start + 20] for matrix in rows.values())
        assert float(cka(collector["a", "b"])) == pytest.approx(cka(*seen), abs=1e-12)
        assert collector["a", "b"].n == collector.n == collector.rows_of("b") == start + 20


def test_layers_with_other_numbers_of_rows_are_holes_and_the_others_right(worlds):
    rows = layers(worlds, n=20, a=4, b=6) | layers(worlds, n=80, c=3, d=5)
    collector = LayerMoments([(["a", "c"], ["b", "d"])])
    for i in range(2):
        collector.update({name: m[: len(m) // 2] if i == 0 else m[len(m) // 2 :] for name, m in rows.items()})
    assert float(cka(collector["a", "b"])) == pytest.approx(cka(rows["a"], rows["b"]), abs=1e-12)
    assert float(cka(collector["c", "d"])) == pytest.approx(cka(rows["c"], rows["d"]), abs=1e-12)
    assert (collector.rows_of("a"), collector.rows_of("d")) == (20, 80)
    with pytest.raises(NoValue, match="layer 'a' gives 20 rows and layer 'd' 80 for the same examples"):
        collector["a", "d"]


def of_batches(worlds, *counts):
    """Return the pair after batches of so many rows of `a` and so many of `b`."""
    collector = LayerMoments([(["a"], ["b"])])
    for a, b in counts:
        collector.update({"a": worlds.normal(a, 2), "b": worlds.normal(b, 2)})
    return collector["a", "b"]


def test_rows_that_do_not_pair_batch_by_batch_are_refused(worlds):
    # 3 + 5 rows here and 5 + 3 there are eight rows each, but not of the same examples
    with pytest.raises((ShapeError, NoValue), match="rows"):
        of_batches(worlds, (3, 5), (5, 3))
    with pytest.raises((ShapeError, NoValue), match="rows"):
        of_batches(worlds, (6, 6), (5, 7), (7, 5))


@pytest.mark.parametrize("batches", [((6, 6), (6, 7)), ((6, 7), (6, 6))])
def test_layers_whose_rows_do_not_pair_in_some_batch_have_no_value_whatever_the_order(worlds, monkeypatch, batches):
    monkeypatch.setattr("netkin.statistics.layer_moments.FOLD", 4)
    with pytest.raises(NoValue, match="layer 'a' gives 12 rows and layer 'b' 13 for the same examples"):
        of_batches(worlds, *batches)


@pytest.mark.parametrize("as_kind", [np.array, torch.tensor])
def test_rows_may_be_overwritten_after_the_update(worlds, as_kind):
    rows = {name: as_kind(matrix) for name, matrix in layers(worlds, a=2, b=3).items()}
    collector, expected = LayerMoments([(["a"], ["b"])]), float(cka(rows["a"], rows["b"]))
    collector.update(rows)
    rows["a"][:] = 0
    assert float(cka(collector["a", "b"])) == pytest.approx(expected, abs=1e-12)


def test_debiased_measures_need_the_debiasing_sums(worlds):
    rows = layers(worlds, a=2, b=3)
    with pytest.raises(
        NoValue, match="layer 'a' was streamed without the debiasing sums; collect with `debiased=True`"
    ):
        measures()["cka_debiased"](fed([(["a"], ["b"])], rows)["a", "b"])


def test_a_constant_layer_names_itself_and_spoils_no_other(worlds):
    rows = layers(worlds, a=2, b=3) | {"dead": np.zeros((60, 4)), "stuck": np.full((60, 4), 0.1, dtype=np.float32)}
    collector = fed([(["a", "dead", "stuck"], ["b"])], rows, debiased=True)
    for name in ("dead", "stuck"):
        for measure in (
            "cka",
            "cka_debiased",
            "nbs",
            "cca_mean",
            "svcca",
            "gulp",
            "linear_regression_r2",
            "shape_distance",
        ):
            with pytest.raises(NoValue, match=f"layer '{name}' is constant over the 60 examples \\(width 4\\)"):
                measures()[measure](collector[name, "b"])
    assert float(cka(collector["a", "b"])) == pytest.approx(cka(rows["a"], rows["b"]), abs=1e-12)


def test_gradients_are_not_kept(worlds):
    rows = {name: torch.tensor(m, requires_grad=True) for name, m in layers(worlds, a=2, b=3).items()}
    collector = LayerMoments([(["a"], ["b"])])
    collector.update(rows)
    assert not cka(collector["a", "b"]).requires_grad


def test_half_precision_rows_are_raised(worlds):
    rows = {name: torch.tensor(m).bfloat16() for name, m in layers(worlds, a=2, b=3).items()}
    collector = LayerMoments([(["a"], ["b"])], precision=torch.float32)
    collector.update(rows)
    assert float(cka(collector["a", "b"])) == pytest.approx(
        float(cka(rows["a"].double(), rows["b"].double())), abs=1e-6
    )


def test_pairs_share_what_a_side_has_computed(worlds):
    collector = fed([(["a"], ["b", "c"])], layers(worlds, a=2, b=3, c=4))
    assert collector["a", "b"].x is collector["a", "c"].x


def test_memory_does_not_grow_with_the_rows(worlds):
    rows, sizes = layers(worlds, a=4, b=6), []
    collector = LayerMoments([(["a"], ["b"])])
    for _ in range(30):
        collector.update(rows)
        to_plain(collector, tensors := {}, "")
        sizes.append(sum(tensor.numel() for tensor in tensors.values()))
    assert len(set(sizes)) == 1


def test_nan_that_no_batch_noticed_is_refused_at_the_reading(worlds, monkeypatch):
    # where looking at every batch would stall the device, sums are looked at instead
    monkeypatch.setattr("netkin.statistics.collector.require_finite", lambda *_: None)
    rows = layers(worlds, a=2, b=3)
    rows["a"][0, 0] = math.nan
    collector = fed([(["a"], ["b"])], rows)
    with pytest.raises(InvalidValue, match="layer 'a' gave NaN or Inf; fix the model or leave out the examples"):
        collector["a", "b"]


def test_a_streamed_side_without_debiasing_sums_says_so(worlds):
    pair = fed([(["a"], ["b"])], layers(worlds, a=2, b=3))["a", "b"]
    with pytest.raises(NoValue, match="layer 'b' was streamed without the debiasing sums; collect with"):
        pair.y.norm_squares  # noqa: B018


def test_a_pair_that_was_read_is_looked_up_anew_after_another_batch():
    draw = torch.Generator().manual_seed(0)
    moments = LayerMoments([(["a"], ["a", "b"])])
    first, second = ({name: torch.randn(9, 2, generator=draw).double() for name in "ab"} for _ in range(2))
    moments.update(first)
    moments.pair("a", "b")
    moments.update(second)
    both = LayerMoments([(["a"], ["a", "b"])])
    both.update({name: torch.cat([first[name], second[name]]) for name in "ab"})
    assert torch.allclose(moments.pair("b", "a").cross, both.pair("b", "a").cross, atol=1e-10)
    moments.update({"a": torch.ones(4, 2).double(), "b": torch.ones(6, 2).double()})
    with pytest.raises(NoValue):
        moments.pair("a", "b")
