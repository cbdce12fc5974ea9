"""Mean embeddings against the kernel matrix of all pairs, written out."""

import numpy as np
import pytest
import torch

from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName
from netkin.statistics import LayerEmbeddings, MeanEmbedding, outer_products
from netkin.statistics.sketches import SketchSettings, places
from refusals import refusals, refused


def drawn(n=60, p=5, seed=0):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(n, p)) + 1, draw.normal(size=(n, p)) + 0.3


def fed(f, g, batches=1, **options):
    made = LayerEmbeddings(["layer"], **options)
    for rows in np.array_split(np.arange(len(f)), batches):
        made.update({"layer": torch.from_numpy(f[rows])}, {"layer": torch.from_numpy(g[rows])})
    return made


def kernel(f, g):
    return np.array([[(a @ b) * (c @ d) for b, d in zip(f, g, strict=True)] for a, c in zip(f, g, strict=True)])


@pytest.mark.parametrize("batches", [1, 7])
def test_norms_are_those_of_the_kernel_of_all_pairs(batches):
    f, g = drawn()
    K, found = kernel(f, g), fed(f, g, batches).embedding("layer")
    assert found.norm == pytest.approx(np.sqrt(K.mean()), rel=1e-12)
    assert found.kernel_norm == pytest.approx(np.linalg.norm(K), rel=1e-12)
    assert found.trace == pytest.approx(np.trace(K), rel=1e-12)
    assert (found.examples, found.exactness) == (60, "exact")


def test_eqs_19_and_48_are_ratios_of_them():
    f, g = drawn()
    K, N, found = kernel(f, g), 60, fed(f, g).embedding("layer")
    mu = np.linalg.norm(sum(np.outer(b, a) for a, b in zip(f, g, strict=True)) / N)
    assert found.by_cka == pytest.approx(mu / (np.linalg.norm(K) / N**2), rel=1e-12)
    assert found.by_nbs == pytest.approx(mu / (np.sqrt(np.trace(K)) / N), rel=1e-12)
    assert found.adaptation_score == pytest.approx(np.log(mu / (np.linalg.norm(K) / N**2)), rel=1e-12)


def test_the_score_grows_with_the_number_of_examples_and_the_norm_does_not():
    f, g = drawn()
    once, twice = (fed(np.tile(f, (k, 1)), np.tile(g, (k, 1))).embedding("layer") for k in (1, 2))
    assert twice.norm == pytest.approx(once.norm, rel=1e-12)
    assert twice.adaptation_score == pytest.approx(once.adaptation_score + np.log(2), rel=1e-12)
    assert twice.by_nbs == pytest.approx(once.by_nbs * np.sqrt(2), rel=1e-12)


@pytest.mark.slow
def test_beyond_the_sample_the_norm_of_the_kernel_is_estimated_without_bias():
    f, g = drawn(40)
    K = kernel(f, g)
    found = [fed(f, g, 3, sample=8, seed=seed).embedding("layer") for seed in range(400)]
    assert found[0].exactness == "exact, but ‖K‖ from pairs of 8 of 40 examples"
    assert all(one.norm == pytest.approx(np.sqrt(K.mean()), rel=1e-12) for one in found)
    squares = np.array([one.kernel_norm**2 for one in found])
    assert squares.std() > 0.1 * squares.mean()
    assert abs(squares.mean() - (K**2).sum()) < 3 * squares.std() / np.sqrt(len(squares))


def test_a_layer_too_wide_for_its_mean_is_read_from_pairs(monkeypatch):
    monkeypatch.setattr(outer_products, "WIDEST", 4)
    f, g = drawn(40)
    K, whole = kernel(f, g), fed(f, g)
    assert whole.embedding("layer").norm == pytest.approx(np.sqrt(K.mean()), rel=1e-12)
    found = [fed(f, g, sample=8, seed=seed).embedding("layer") for seed in range(400)]
    assert found[0].exactness == "exact, but ‖μ‖ and ‖K‖ from pairs of 8 of 40 examples"
    squares = np.array([one.norm**2 for one in found])
    assert abs(squares.mean() - K.mean()) < 3 * squares.std() / np.sqrt(len(squares))
    with pytest.raises(NoValue, match="'layer' is wider than 4, and its mean embedding was not kept"):
        whole.mean("layer")


@pytest.mark.parametrize("widest", [4096, 2])
def test_the_error_is_the_spread_over_draws_of_examples(widest, monkeypatch):
    monkeypatch.setattr(outer_products, "WIDEST", widest)
    f, g = drawn(300)
    found, draw = fed(f, g).embedding("layer"), np.random.default_rng(1)
    norms = []
    for _ in range(1000):
        again = draw.integers(0, 300, 300)
        norms.append(np.linalg.norm(g[again].T @ f[again] / 300))
    assert found.error == pytest.approx(np.std(norms), rel=0.1)


def test_the_mean_is_that_of_gradients_times_features():
    f, g = drawn()
    wanted = np.mean([np.outer(b, a) for a, b in zip(f, g, strict=True)], 0)
    assert np.allclose(fed(f, g, 4).mean("layer"), wanted, atol=1e-14)


def test_sketched_norms_are_those_of_the_product_of_sketched_kernels():
    f, g = drawn()
    buckets, signs = (one[0] for one in places(SketchSettings(8, seed=3), np.arange(60)))
    S = np.zeros((8, 60))
    S[buckets, np.arange(60)] = signs
    K = (S @ f @ f.T @ S.T) * (S @ g @ g.T @ S.T)
    found = fed(f, g, 5, buckets=8, seed=3).sketched("layer")
    assert found.norm == pytest.approx(np.sqrt(K.sum()) / 60, rel=1e-12)
    assert found.kernel_norm == pytest.approx(np.linalg.norm(K), rel=1e-12)
    assert found.trace == pytest.approx(np.trace(K), rel=1e-12)
    assert found.exactness == "sketched in 8 buckets"


def test_the_sketched_norm_is_too_large_by_what_falls_into_one_bucket():
    f, g = drawn()
    K, M = kernel(f, g), 16
    others = ~np.eye(60, dtype=bool)
    crossed = np.outer((f**2).sum(1), (g**2).sum(1))
    wanted = K.mean() + (crossed + K)[others].sum() / M / 60**2
    squares = np.array([fed(f, g, buckets=M, seed=seed).sketched("layer").norm ** 2 for seed in range(400)])
    spread = squares.std() / np.sqrt(len(squares))
    assert abs(squares.mean() - wanted) < 3 * spread
    assert squares.mean() - K.mean() > 10 * spread


def test_batches_in_any_order_give_the_same():
    f, g = drawn()
    options = {"sample": 10, "buckets": 8}
    whole, backwards = fed(f, g, **options), LayerEmbeddings(["layer"], **options)
    for rows in (np.arange(35, 60), np.arange(35)):
        backwards.update({"layer": torch.from_numpy(f[rows])}, {"layer": torch.from_numpy(g[rows])}, rows)
    for read in ("embedding", "sketched"):
        mine, theirs = (vars(getattr(embeddings, read)("layer")) for embeddings in (backwards, whole))
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name] == (theirs[name] if name == "exactness" else pytest.approx(theirs[name], nan_ok=True))


def test_half_precision_is_summed_in_full():
    f, g = drawn()
    F, G = (torch.from_numpy(one).half() for one in (f, g))
    made = LayerEmbeddings(["layer"])
    made.update({"layer": F}, {"layer": G})
    K = kernel(F.double().numpy(), G.double().numpy())
    assert made.embedding("layer").kernel_norm == pytest.approx(np.linalg.norm(K), rel=1e-6)


def test_tiny_gradients_keep_their_ratios():
    f, g = drawn()
    small, plain = (fed(f, g * scale).embedding("layer") for scale in (1e-30, 1.0))
    assert small.norm == pytest.approx(plain.norm * 1e-30, rel=1e-10)
    assert small.by_nbs == pytest.approx(plain.by_nbs, rel=1e-10)
    assert small.by_cka == pytest.approx(plain.by_cka * 1e30, rel=1e-10)


def test_one_example_has_no_error():
    f, g = drawn(1)
    found = fed(f, g).embedding("layer")
    assert found.norm == pytest.approx(np.linalg.norm(f) * np.linalg.norm(g))
    assert found.kernel_norm == pytest.approx(found.norm**2)
    assert np.isnan(found.error)


def test_what_can_not_be_folded_in_is_told():
    f, g = drawn()
    made = LayerEmbeddings(["layer"])
    refusals(
        (lambda: made.embedding("layer"), NoValue, ""),
        (lambda: made.update({"layer": f}, {"layer": g[:, :4]}), ShapeError, ""),
        (lambda: made.update({"layer": f}, {"layer": g}, np.arange(30)), ShapeError, ""),
    )
    made.update({"layer": f}, {"layer": g})
    with pytest.raises(UnknownName, match="no layer 'layers' in these embeddings; did you mean 'layer'"):
        made.embedding("layers")
    with pytest.raises(NoValue, match="nothing was sketched; pass `buckets=512`"):
        made.sketched("layer")


@pytest.mark.parametrize("options", [{"sample": 1}, {"buckets": -1}])
def test_settings_out_of_range_are_refused(options):
    with refused(InvalidValue, "sample"):
        LayerEmbeddings(["layer"], **options)


def test_zero_gradients_have_no_ratio():
    f, _ = drawn()
    found = fed(f, np.zeros_like(f)).embedding("layer")
    assert found.norm == 0
    for name in ("by_cka", "by_nbs", "adaptation_score"):
        with pytest.raises(NoValue, match="feature or gradient is zero at this layer"):
            getattr(found, name)
    with pytest.raises(NoValue, match="zero"):
        MeanEmbedding(0.0, 1.0, 1.0, 5, 0.0, "exact").adaptation_score  # noqa: B018
