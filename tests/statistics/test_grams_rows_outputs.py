"""Mini-batch Gram matrices, sampled rows and counted outputs: their own habits and refusals."""

import numpy as np
import pytest
import torch

from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName
from netkin.measures import measures
from netkin.statistics import Grams, LayerGrams, LayerRows, Outputs, Rows
from netkin.statistics.linear_algebra import median, rbf_kernel
from refusals import refusals, refused
from transcriptions import TRANSCRIPTIONS, centred

pytestmark = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")  # few examples will do here

minibatch = measures()["cka_minibatch"].function
rbf = measures()["cka_rbf"].function


def grams(**options):
    return LayerGrams(**{"pair_blocks": [(["a"], ["b"])], "batch": 8} | options)


# --- mini-batch Gram matrices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pair_blocks", [[(["a", "b"], ["c"])], [(["a", "b", "c"], ["a", "b", "c"])], [(["c"], ["a"]), (["b"], ["c"])]]
)
def test_every_pair_of_layers_is_right_from_both_sides(worlds, pair_blocks):
    rows = {"a": worlds.normal(40, 3), "b": worlds.normal(40, 5) + 1000, "c": worlds.normal(40, 50)}
    rows["c"][:, :3] += rows["a"] * 2
    collector = LayerGrams(pair_blocks, batch=8)
    collector.update(rows)
    for left, right in pair_blocks:
        for a in left:
            for b in right:
                expected = TRANSCRIPTIONS["cka_minibatch"](centred(rows[a]), centred(rows[b]), batch=8)
                assert float(minibatch(collector[a, b])) == pytest.approx(expected, abs=1e-9)
                assert float(minibatch(collector[b, a])) == pytest.approx(expected, abs=1e-9)


def test_reading_grams_does_not_end_the_stream(worlds):
    X, Y = worlds.related(45, 3, 4)
    collector = grams()
    for start in range(0, 45, 5):
        collector.update({"a": X[start : start + 5], "b": Y[start : start + 5]})
        seen = TRANSCRIPTIONS["cka_minibatch"](X[: start + 5], Y[: start + 5], batch=8)
        assert float(minibatch(collector["a", "b"])) == pytest.approx(seen, abs=1e-10)
    assert collector["a", "b"].left_out == 0


@pytest.mark.parametrize("offset", [0, 10, 100, 1e4])
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_offsets_cost_little_in_float32(worlds, offset, kernel):
    X, Y = ((Z + offset).astype(np.float32) for Z in worlds.related(64, 20, 30))
    collector = grams(batch=16, kernel=kernel)
    collector.update({"a": X, "b": Y})
    # the same offset for all rows of a batch falls out of HSIC₁, and would drown the transcription in rounding
    x, y = (centred(Z.astype(np.float64)) for Z in (X, Y))
    exact = TRANSCRIPTIONS["cka_minibatch"](x, y, batch=16, kernel=kernel)
    assert float(minibatch(collector["a", "b"])) == pytest.approx(exact, abs=5e-6)


def test_an_offset_that_comes_late_costs_little(worlds):
    X, Y = (Z.astype(np.float32) for Z in worlds.related(64, 20, 30))
    X[32:] += 1e4
    collector = grams(batch=16)
    collector.update({"a": X, "b": Y})
    x = X.astype(np.float64)
    x[32:] -= 1e4
    exact = TRANSCRIPTIONS["cka_minibatch"](x, Y.astype(np.float64), batch=16)
    assert float(minibatch(collector["a", "b"])) == pytest.approx(exact, abs=5e-6)


@pytest.mark.parametrize("first, later", [(0.0, 1e-25), (0.0, 1.0), (1e-20, 1.0), (1.0, 1e-20), (1.0, 1e18)])
def test_mini_batches_of_unlike_scale_keep_their_weights(worlds, first, later):
    X, Y = worlds.related(32, 4, 3)
    X[:16] *= first
    X[16:] *= later
    X, Y = X.astype(np.float32), Y.astype(np.float32)
    collector = grams(batch=16)
    collector.update({"a": X, "b": Y})
    exact = TRANSCRIPTIONS["cka_minibatch"](X.astype(np.float64), Y.astype(np.float64), batch=16)
    assert float(minibatch(collector["a", "b"])) == pytest.approx(exact, abs=1e-5)


def test_too_few_examples_for_one_mini_batch_are_no_value(worlds):
    collector = grams()
    collector.update({"a": worlds.normal(3, 4), "b": worlds.normal(3, 3)})
    with pytest.raises(NoValue, match="HSIC₁ needs at least 4 examples in a mini-batch; 3 were seen"):
        collector["a", "b"]


def test_a_layer_constant_within_each_mini_batch_has_no_value(worlds):
    steps = np.repeat(np.arange(4.0), 8)[:, None]
    with pytest.raises(NoValue, match="constant within each of the 4 mini-batches"):
        minibatch(steps, worlds.normal(32, 3), batch=8)


def test_grams_refuse_what_they_cannot_use(worlds):
    refusals(
        (lambda: grams(kernel="cubic"), UnknownName, "kernel"),
        (lambda: grams(batch=2), InvalidValue, "batch"),
        (lambda: Grams.of(worlds.normal(8, 2), worlds.normal(8, 2), batch=0), InvalidValue, "batch"),
    )


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_cap_keeps_a_fair_sample_that_the_seed_decides(worlds):
    X = np.arange(2000.0)[:, None]
    kept = []
    for seed in range(3):
        collector = LayerRows(["a"], cap=200, seed=seed)
        for start in range(0, 2000, 90):
            collector.update({"a": X[start : start + 90]})
        kept.append(collector["a", "a"].x.X[:, 0].numpy())
        assert collector.n == len(kept[-1]) == 200
        assert collector.seen == 2000
        assert 850 < kept[-1].mean() < 1150
        assert len(set(np.diff(kept[-1]))) > 10
    assert not np.array_equal(kept[0], kept[1])
    assert len(set(kept[0]) & set(kept[1])) < 60


def test_layers_with_several_rows_an_example_pair_among_themselves(worlds):
    collector = LayerRows(["a", "b", "c"])
    collector.update({"a": worlds.normal(10, 2), "b": worlds.normal(40, 2), "c": worlds.normal(40, 2)})
    assert collector["b", "c"].n == 40
    with pytest.raises(NoValue, match="layer 'a' gives 10 rows and layer 'b' 40 for the same examples"):
        collector["a", "b"]
    capped = LayerRows(["a", "b", "c"], cap=5)
    capped.update({"a": worlds.normal(10, 2), "b": worlds.normal(40, 2), "c": worlds.normal(40, 2)})
    assert capped["b", "c"].n == 5
    with pytest.raises(NoValue, match="layer 'a' gives 10 rows and layer 'b' 40 for the same examples"):
        capped["a", "b"]


def test_counting_goes_on_after_the_indices_that_were_given(worlds):
    collector = LayerRows(["a"])
    collector.update({"a": worlds.normal(4, 2)}, numbers=[4, 5, 6, 7])
    collector.update({"a": worlds.normal(4, 2)})
    assert collector.n == 8
    assert collector.merge(LayerRows(["a"])).n == 8


def test_rows_may_be_overwritten_after_the_update(worlds):
    X, Y = (torch.tensor(Z) for Z in worlds.related(20, 3, 2))
    for make in (lambda: LayerRows(["a", "b"]), lambda: grams(batch=32)):
        collector, x = make(), X.clone()
        reader = rbf if isinstance(collector, LayerRows) else minibatch
        collector.update({"a": x, "b": Y})
        x.zero_()
        assert float(reader(collector["a", "b"])) == pytest.approx(float(reader(X, Y)), abs=1e-12)


def test_a_pair_of_rows_shares_its_samples(worlds):
    collector = LayerRows(["a", "b", "c"])
    collector.update({name: worlds.normal(10, 2) for name in "abc"})
    assert isinstance(collector["a", "b"], Rows)
    assert collector["a", "b"].x is collector["a", "c"].x


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_outputs_without_labels_still_agree(worlds):
    outputs = Outputs(classes=2)
    with pytest.raises(NoValue, match="no batch yet"):
        outputs.agreement  # noqa: B018
    outputs.update([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]])
    assert outputs.agreement == 0.5
    assert outputs.joint.tolist() == [[1, 0], [1, 0]]
    for answer in ("accuracy_a", "accuracy_b"):
        with pytest.raises(NoValue, match="no labelled examples were folded in; pass `labels` to `update`"):
            getattr(outputs, answer)


@pytest.mark.parametrize(
    "a, b, labels, kind, argument",
    [
        (np.ones((3, 4)), np.ones((3, 3)), None, ShapeError, "a"),
        (np.ones((3, 3)), np.ones(3), None, ShapeError, "b"),
        (np.ones((3, 3)), np.ones((2, 3)), None, ShapeError, "a"),
        (np.ones((3, 3)), np.ones((3, 3)), [0, 1], ShapeError, "labels"),
        (np.ones((3, 3)), np.full((3, 3), np.nan), None, InvalidValue, ""),
        (np.ones((3, 3)), np.ones((3, 3)), [0, 1, 3], InvalidValue, "labels"),
        (np.ones((3, 3)), np.ones((3, 3)), [0, 1, -1], InvalidValue, "labels"),
        (np.ones((3, 3)), np.ones((3, 3)), [0, 1, -100], InvalidValue, "labels"),
        (np.ones((3, 3)), np.ones((3, 3)), [[0], [1], [2]], ShapeError, "labels"),
        (np.ones((3, 3)), np.ones((3, 3)), [0.5, 1.2, 2.9], ShapeError, "labels"),
    ],
)
def test_outputs_that_do_not_fit_are_refused_and_leave_no_trace(a, b, labels, kind, argument):
    outputs = Outputs(classes=3)
    with refused(kind, argument):
        outputs.update(a, b, labels)
    assert outputs.n == 0
    assert outputs.joint.sum() == 0


def test_a_classifier_has_two_classes_or_more():
    with refused(InvalidValue, "classes"):
        Outputs(classes=1)


def test_an_rbf_kernel_needs_two_examples_and_takes_the_true_median():
    with pytest.raises(NoValue, match="an RBF kernel needs at least two examples; got one"):
        rbf_kernel(torch.ones(1, 1), 0.4)
    for values in ([1.0, 4.0, 9.0], [1.0, 4.0, 9.0, 16.0], [4.0]):
        assert float(median(torch.tensor(values))) == pytest.approx(np.median(np.sqrt(values)) ** 2)


def test_rows_of_one_chunk_have_no_value_without_it():
    rows = LayerRows(["in"], chunks=2)
    rows.update({"in": torch.randn(1, 3)})
    chunk = int(np.argmax(rows.chunk_sizes))
    with pytest.raises(NoValue, match="all rows kept of layer 'in' are of one chunk of the examples"):
        rows.pair("in", "in", chunk)
