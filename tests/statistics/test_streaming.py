"""One pass in batches gives what all rows at once give."""

import numpy as np
import pytest
import torch

from netkin.measures import measures
from netkin.statistics import Grams, LayerGrams, LayerMoments, LayerRows, Moments, Outputs, Rows, layer_moments
from transcriptions import TRANSCRIPTIONS

READERS = {kind: [n for n, found in measures().items() if found.facts.reads is kind] for kind in (Moments, Grams, Rows)}
NORMS = [name for name in READERS[Moments] if not measures()[name].facts.precise]
BATCHES = (1, 7, 128)
COLLECTORS = {
    Moments: lambda **options: LayerMoments([(["a"], ["b"])], debiased=True, **options),
    Grams: lambda **options: LayerGrams([(["a"], ["b"])], **options),
    Rows: lambda **options: LayerRows(["a", "b"], **options),
}


@pytest.fixture(params=[16, 128], ids=["folding often", "folding seldom"])
def fold(request, monkeypatch):
    """Let few or many rows be gathered before a product is taken."""
    monkeypatch.setattr(layer_moments, "FOLD", request.param)


def fed(collector, X, Y, batch, first=0):
    """Return the collector after rows `first` and on, batch by batch."""
    for start in range(0, len(X), batch):
        rows = {"a": X[start : start + batch], "b": Y[start : start + batch]}
        if isinstance(collector, LayerRows):
            collector.update(rows, numbers=range(first + start, first + start + len(rows["a"])))
        else:
            collector.update(rows)
    return collector


def halves(make, X, Y):
    """Return the merged collectors of two parts of unequal size."""
    middle = len(X) // 3
    return fed(make(), X[:middle], Y[:middle], 10).merge(fed(make(), X[middle:], Y[middle:], 50, first=middle))


def world(worlds, dtype=np.float64):
    X, Y = worlds.related(300, 8, 5)
    return X.astype(dtype), Y.astype(dtype)


def check_agreement(name, pair, X, Y, tolerance):
    expected = TRANSCRIPTIONS[name](X.astype(np.float64), Y.astype(np.float64))
    assert float(measures()[name](pair)) == pytest.approx(expected, abs=tolerance, rel=tolerance)


@pytest.mark.parametrize("batch", BATCHES)
def test_moments_of_float64_batches_are_exact_for_every_measure(worlds, fold, batch):
    X, Y = world(worlds)
    pair = fed(COLLECTORS[Moments](), X, Y, batch)["a", "b"]
    for name in READERS[Moments]:
        check_agreement(name, pair, X, Y, 1e-10)


def test_moments_of_merged_halves_are_exact_for_every_measure(worlds, fold):
    X, Y = world(worlds)
    pair = halves(COLLECTORS[Moments], X, Y)["a", "b"]
    for name in READERS[Moments]:
        check_agreement(name, pair, X, Y, 1e-10)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
def test_moments_of_float32_batches_are_right_to_a_millionth(worlds, fold, batch, precision):
    X, Y = world(worlds, np.float32)
    pair = fed(COLLECTORS[Moments](precision=precision), X, Y, batch)["a", "b"]
    # measures that whiten are always given float64 products
    for name in NORMS if precision == torch.float32 else READERS[Moments]:
        check_agreement(name, pair, X, Y, 1e-6)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
def test_moments_of_merged_float32_halves_are_right_to_a_millionth(worlds, fold, precision):
    X, Y = world(worlds, np.float32)
    pair = halves(lambda: COLLECTORS[Moments](precision=precision), X, Y)["a", "b"]
    for name in NORMS if precision == torch.float32 else READERS[Moments]:
        check_agreement(name, pair, X, Y, 1e-6)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("offset, scale", [(1e4, 1.0), (0.0, 1e-20), (0.0, 1e15), (1e-16, 1e-20)])
def test_offsets_and_scales_cost_little(worlds, fold, offset, scale, precision):
    X, Y = world(worlds)
    X, Y = (X * scale + offset).astype(np.float32), (Y * scale + offset).astype(np.float32)
    pair = fed(COLLECTORS[Moments](precision=precision), X, Y, 100)["a", "b"]
    for name in NORMS:
        exact = float(measures()[name](Moments.of(X.astype(np.float64), Y.astype(np.float64))))
        assert float(measures()[name](pair)) == pytest.approx(exact, abs=2e-6 * min(1, scale), rel=2e-6)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
def test_a_drifting_mean_costs_little(worlds, fold, precision):
    X, Y = world(worlds)
    drift = np.linspace(0, 300, len(X))[:, None]
    X, Y = (X + drift).astype(np.float32), (Y - 2 * drift).astype(np.float32)
    pair = fed(COLLECTORS[Moments](precision=precision), X, Y, 50)["a", "b"]
    for name in ("cka", "nbs", "cka_debiased"):
        check_agreement(name, pair, X, Y, 2e-6)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
def test_a_layer_that_grows_by_twelve_orders_keeps_its_number(worlds, fold, precision):
    X, Y = world(worlds)
    growth = np.logspace(-6, 6, len(X))[:, None]
    X, Y = (X * growth).astype(np.float32), (Y * growth).astype(np.float32)
    pair = fed(COLLECTORS[Moments](precision=precision), X, Y, 50)["a", "b"]
    for name in ("cka", "nbs"):
        check_agreement(name, pair, X, Y, 2e-6)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
def test_a_layer_constant_at_first_counts_in_full_later(worlds, fold, precision):
    X, Y = world(worlds, np.float32)
    X[:200] = X[0]
    X[200:] *= np.float32(1e-3)
    pair = fed(COLLECTORS[Moments](precision=precision), X, Y, 32)["a", "b"]
    for name in NORMS:
        check_agreement(name, pair, X, Y, 1e-6)


@pytest.mark.parametrize("world_name", ["idle_units", "low_rank", "few_examples"])
@pytest.mark.parametrize("batch", BATCHES)
def test_streams_of_awkward_layers_are_right(worlds, batch, world_name):
    X, Y = worlds.by_name(world_name)
    pair = fed(COLLECTORS[Moments](), X, Y, batch)["a", "b"]
    for name in READERS[Moments]:
        if name != "gaussian_mutual_information" or world_name != "few_examples":
            check_agreement(name, pair, X, Y, 1e-9)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-10), (np.float32, 1e-6)])
def test_mini_batches_are_cut_alike_however_the_rows_arrive(worlds, batch, kernel, dtype, tolerance):
    X, Y = world(worlds, dtype)
    pair = fed(LayerGrams([(["a"], ["b"])], batch=64, kernel=kernel), X, Y, batch)["a", "b"]
    expected = TRANSCRIPTIONS["cka_minibatch"](X.astype(np.float64), Y.astype(np.float64), batch=64, kernel=kernel)
    assert float(measures()["cka_minibatch"](pair)) == pytest.approx(expected, abs=tolerance)
    assert (pair.batch, pair.batches, pair.left_out) == (64, 5, 0)


def test_mini_batches_of_merged_halves(worlds):
    X, Y = world(worlds)
    make = lambda: LayerGrams([(["a"], ["b"])], batch=20)  # noqa: E731
    pair = fed(make(), X[:100], Y[:100], 10).merge(fed(make(), X[100:], Y[100:], 50))["a", "b"]
    assert float(measures()["cka_minibatch"](pair)) == pytest.approx(
        TRANSCRIPTIONS["cka_minibatch"](X, Y, batch=20), abs=1e-10
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-10), (np.float32, 1e-6)])
def test_rows_are_the_rows(worlds, batch, dtype, tolerance):
    X, Y = (Z[:150] for Z in world(worlds, dtype))
    for pair in (fed(LayerRows(["a", "b"]), X, Y, batch)["a", "b"], halves(COLLECTORS[Rows], X, Y)["a", "b"]):
        assert np.array_equal(pair.x.X, X)
        for name in READERS[Rows]:
            check_agreement(name, pair, X, Y, tolerance)


@pytest.mark.parametrize("name", READERS[Moments])
def test_rows_serve_the_linear_measures_too(worlds, name):
    X, Y = worlds.related(60, 5, 4)
    check_agreement(name, fed(LayerRows(["a", "b"]), X, Y, 7)["a", "b"].moments(), X, Y, 1e-9)


@pytest.mark.parametrize("batch", BATCHES)
def test_outputs_count_alike_in_batches(worlds, batch):
    a, b, labels = worlds.normal(300, 4), worlds.normal(300, 4), worlds.rng.integers(0, 4, 300)
    outputs = Outputs(classes=4)
    for start in range(0, 300, batch):
        few = slice(start, start + batch)
        outputs.update(a[few], b[few], labels[few])
    log_a, log_b = (z - np.log(np.exp(z).sum(axis=1, keepdims=True)) for z in (a, b))
    assert outputs.n == 300
    assert outputs.accuracy_a == pytest.approx((a.argmax(1) == labels).mean())
    assert outputs.accuracy_b == pytest.approx((b.argmax(1) == labels).mean())
    assert outputs.agreement == pytest.approx((a.argmax(1) == b.argmax(1)).mean())
    assert outputs.cross_entropy_ab == pytest.approx(-(np.exp(log_b) * log_a).sum(axis=1).mean())
