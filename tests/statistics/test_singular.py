"""Singular values from products: as exact as those of the matrices, and read from many pairs as from each alone."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import InvalidValue, NoValue
from netkin.measures import find, registry
from netkin.measures.registry import value_of
from netkin.statistics import LayerMoments, Moments, covariances, decompositions, moments
from netkin.statistics.decompositions import left_vectors, singular_values
from netkin.statistics.rows import RowsSide
from refusals import refused

LINEAR = [name for name, one in nk.measures.measures().items() if one.facts.reads is Moments]
PARAMETERS = ["svcca(variance=0.9)", "svcca_k(k=3)", "shape_distance(alpha=0.2)", "gulp(ridge=0.1)"]
WIDTHS = {"a": 6, "b": 6, "c": 9, "d": 6, "e": 9, "f": 4}


def layer(n: int, width: int, decay: float, seed: int, base: np.ndarray) -> np.ndarray:
    draw = np.random.default_rng(seed)
    rows = np.maximum(base @ draw.normal(size=(base.shape[1], width)) + draw.normal(size=(n, width)), 0)
    turn, _ = np.linalg.qr(draw.normal(size=(width, width)))
    return (rows * np.logspace(0, -decay, width)) @ turn


def in_principal_directions(X: np.ndarray, Y: np.ndarray) -> torch.Tensor:
    """Return the cross moment of the centred layers in the principal directions of both, largest first."""
    X, Y = X - X.mean(0), Y - Y.mean(0)
    V, W = (np.linalg.eigh(Z.T @ Z)[1][:, ::-1] for Z in (X, Y))
    return torch.from_numpy(V.T @ (X.T @ Y) @ W).unsqueeze(0)


@pytest.mark.parametrize("decay", [0, 2, 4, 6])
@pytest.mark.parametrize("kind", ["others", "narrower", "itself", "with dead units"])
def test_values_from_products_add_up_as_those_of_the_matrix(decay, kind):
    base = np.random.default_rng(0).normal(size=(400, 40))
    X, Y = (layer(400, 40, decay, seed, base) for seed in (1, 2))
    if kind == "with dead units":
        Y[:, :9] = 0.5
    second = {"itself": X, "narrower": Y[:, :13]}.get(kind, Y)
    matrix = in_principal_directions(X, second)
    (values,) = singular_values([matrix])
    expected = np.linalg.svd(matrix[0].numpy(), compute_uv=False)
    assert values[0].numpy() == pytest.approx(expected, abs=1e-12 * expected.sum())
    assert float(values.sum()) == pytest.approx(expected.sum(), rel=2e-13)


def test_where_a_product_has_lost_the_small_values_the_matrix_is_decomposed():
    base = np.random.default_rng(0).normal(size=(400, 40))
    X = layer(400, 40, 6, 1, base)
    matrix = in_principal_directions(X, X)
    expected = np.linalg.svd(matrix[0].numpy(), compute_uv=False).sum()
    from_product = torch.linalg.eigvalsh(matrix[0] @ matrix[0].T).clamp(min=0).sqrt().sum()
    assert abs(float(from_product) / expected - 1) > 1e-11
    assert float(singular_values([matrix])[0].sum()) == pytest.approx(expected, rel=1e-13)


def test_complex_matrices_of_several_blocks_and_all_zeros_have_their_values():
    draw = np.random.default_rng(3)
    blocks = draw.normal(size=(3, 5, 8)) + 1j * draw.normal(size=(3, 5, 8))
    found = singular_values([torch.from_numpy(blocks), torch.from_numpy(2 * blocks), torch.zeros(3, 5, 8).cdouble()])
    expected = np.linalg.svd(blocks, compute_uv=False)
    for factor, values in zip((1, 2, 0), found, strict=True):
        assert values.numpy() == pytest.approx(factor * expected, rel=1e-12)


@pytest.mark.parametrize("shape", [(7, 7), (5, 9), (9, 5)])
def test_left_vectors_are_those_of_the_svd_up_to_their_signs(shape):
    draw = np.random.default_rng(4)
    matrices = draw.normal(size=(2, *shape))
    matrices[1, :, 1] = matrices[1, :, 0]  # loses a rank where it is tall
    for matrix, (vectors, values) in zip(
        matrices, left_vectors(list(torch.from_numpy(matrices)[:, None])), strict=True
    ):
        U, s, _ = np.linalg.svd(matrix, full_matrices=False)
        assert values[0].numpy() == pytest.approx(s, abs=1e-12)
        real = s > 1e-8
        assert np.abs((vectors[0].numpy() * U).sum(0))[real] == pytest.approx(1, abs=1e-10)


@pytest.fixture
def collector():
    """Return moments of layers of some equal and some other widths; one is constant."""
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(300, 6, generator=draw)
    rows = {}
    for name, width in WIDTHS.items():
        mix = torch.randn(6, width, generator=draw)
        rows[name] = (base @ mix + torch.randn(300, width, generator=draw)).relu() + 0.2
    rows["f"] = torch.ones(300, 4)
    made = LayerMoments([(list(WIDTHS), list(WIDTHS))], debiased=True)
    made.update(rows)
    return made


def read(measures, pair):
    found = []
    for measure in measures:
        try:
            found.append(value_of(measure, pair))
        except NoValue as reason:
            found.append(str(reason))
    return found


@pytest.mark.slow
def test_prepared_pairs_have_the_values_of_pairs_read_alone(collector):
    measures = [find(name) for name in LINEAR + PARAMETERS]
    alone = []
    for a in WIDTHS:
        for b in WIDTHS:
            for measure in measures:
                collector.clear_cache()
                alone += read([measure], collector[a, b])
    collector.clear_cache()
    pairs = [collector[a, b] for a in WIDTHS for b in WIDTHS]
    with torch.no_grad():
        Moments.prepare([(pair, measures) for pair in pairs])
    together = [value for pair in pairs for value in read(measures, pair)]
    assert [one for one in together if isinstance(one, str)] == [one for one in alone if isinstance(one, str)]
    numbers = [one for one in together if not isinstance(one, str)]
    assert len(numbers) > 25 * 20
    expected = [one for one in alone if not isinstance(one, str)]
    # a distance of zero is the root of a rounding, of squares up to 1e4
    assert np.square(numbers) == pytest.approx(np.square(expected), rel=1e-11, abs=1e-11)


def test_what_our_measures_declare_is_all_that_they_decompose(collector, monkeypatch):
    measures = [find(name) for name in LINEAR + PARAMETERS]
    pairs = [collector[a, b] for a in WIDTHS for b in WIDTHS]
    with torch.no_grad():
        Moments.prepare([(pair, measures) for pair in pairs])
    monkeypatch.setattr(moments, "decomposed", lambda *alike: pytest.fail("a matrix was decomposed alone"))
    for pair in pairs:
        read(measures, pair)


@pytest.mark.parametrize("needs", ["", "cross spectrum", lambda pair, settings: pair.decomposition("correlations")])
def test_a_measure_may_declare_what_it_needs_or_not(collector, monkeypatch, needs):
    monkeypatch.setattr(registry, "_MEASURES", {})
    facts = {"higher_is_closer": True, "bounds": (0, 1), "unchanged_by": {"rotation"}, "reference": "none"}

    @registry.measure(**facts, precise=True, needs=needs)
    def mean_correlation(pair: Moments):
        return pair.correlations.mean()

    pair = collector["a", "c"]
    Moments.prepare([(pair, [find("mean_correlation")])])
    assert [*pair.results] == {"": [], "cross spectrum": ["cross spectrum"]}.get(needs, ["correlations"])
    assert mean_correlation(pair) == pytest.approx(float(collector["a", "c"].correlations.mean()), rel=1e-12)
    with refused(InvalidValue, "needs"):
        registry.measure(**facts, needs="an answer")(mean_correlation.__wrapped__)


def test_every_layer_is_decomposed_once_and_layers_of_one_width_together(collector, monkeypatch):
    seen, whole = [], covariances.principal_directions

    def counted(second):
        seen.append(second.shape[0])
        return whole(second)

    monkeypatch.setattr(covariances, "principal_directions", counted)
    pairs = [collector[a, b] for a in WIDTHS for b in WIDTHS]
    measures = [find("svcca"), find("gulp"), find("nbs")]
    with torch.no_grad():
        Moments.prepare([(pair, measures) for pair in pairs])
        for pair in pairs:
            read(measures, pair)
    assert sorted(seen) == [2, 3]  # those of 9 and of 6 units; the constant one has no directions


def moments_of(layers):
    made = LayerMoments([(list(layers), list(layers))], debiased=True)
    made.update(layers)
    return made


@pytest.fixture
def wide_layers():
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(300, 40, generator=draw, dtype=torch.float64)
    mixed = {key: base @ torch.randn(40, 70, generator=draw, dtype=torch.float64) for key in "abcde"}
    return {key: one + torch.randn(300, 70, generator=draw, dtype=torch.float64) for key, one in mixed.items()}


def test_threads_that_share_the_decompositions_leave_the_values_and_their_number_as_they_were(wide_layers, monkeypatch):
    measures, found, started = [find(name) for name in ("pwcca", "nbs", "cca_mean")], {}, []
    whole = decompositions._alone
    monkeypatch.setattr(decompositions, "_alone", lambda: (started.append(torch.get_num_threads()), whole()))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            collector = moments_of(wide_layers)
            pairs = [collector[a, b] for a in "abcde" for b in "abcde"]
            Moments.prepare([(pair, measures) for pair in pairs])
            found[threads] = [read(measures, pair) for pair in pairs]
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(started) >= 2  # in the second reading alone
    assert np.allclose(found[1], found[3], rtol=1e-12, atol=0)
    X, Y = (wide_layers[key].numpy() for key in "ab")
    X, Y = X - X.mean(0), Y - Y.mean(0)
    correlations = np.linalg.svd(np.linalg.qr(X)[0].T @ np.linalg.qr(Y)[0], compute_uv=False)
    assert found[3][1][2] == pytest.approx(correlations.mean(), rel=1e-10)


def test_a_fault_in_a_thread_is_raised_and_threads_are_as_before(wide_layers, monkeypatch):
    def broken(second):
        raise ValueError("broken here")

    monkeypatch.setattr(covariances, "principal_directions", broken)
    collector, before = moments_of(wide_layers), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(ValueError, match="broken here"):
            Moments.prepare([(collector[a, b], [find("cca_mean")]) for a in "abc" for b in "de"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_threads_share_the_layers_that_are_held_as_rows(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    layers = {key: torch.randn(200, 300 if key in "ab" else 150, generator=draw) for key in "abcd"}
    measures, found, started = [find(name) for name in ("svcca_k", "cca_mean", "eigenspace_overlap")], {}, []
    whole = RowsSide.find_directions
    monkeypatch.setattr(RowsSide, "find_directions", lambda some: (started.append(threading.get_ident()), whole(some)))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            sides_of = {key: RowsSide(one, key, torch.float64) for key, one in layers.items()}
            pairs = [Moments(sides_of[a], sides_of[b]) for a in "ac" for b in "bd"]
            started.clear()
            Moments.prepare([(pair, measures) for pair in pairs])
            assert (threading.get_ident() in started) == (threads == 1)
            assert all(side.to_decompose is None for side in sides_of.values())
            found[threads] = [read(measures, pair) for pair in pairs]
    finally:
        torch.set_num_threads(before)
    assert np.allclose(found[1], found[3], rtol=1e-10, atol=0)
    X, Y = (layers[key].double().numpy() - layers[key].double().numpy().mean(0) for key in "cd")
    bases = [np.linalg.svd(one, full_matrices=False)[0] for one in (X, Y)]
    assert found[3][3][2] == pytest.approx(np.square(bases[0].T @ bases[1]).sum() / 150, rel=1e-9)


def test_pairs_of_rows_about_the_origin_are_decomposed_together(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    layers = {key: torch.randn(60, 20, generator=draw, dtype=torch.float64) for key in "abcd"}
    sizes, whole = [], decompositions.decomposed
    monkeypatch.setattr(decompositions, "decomposed", lambda *alike: (sizes.append(len(alike[0])), whole(*alike))[1])
    pairs, measure = [Moments.of(layers[a], layers[b]) for a in "ab" for b in "cd"], find("nbs_uncentered")
    Moments.prepare([(pair, [measure]) for pair in pairs])
    assert sizes == [4]
    X, Y = (layers[key].numpy() for key in "ac")
    wanted = np.linalg.norm(X.T @ Y, "nuc") / np.linalg.norm(X) / np.linalg.norm(Y)
    assert value_of(measure, pairs[0]) == pytest.approx(wanted, rel=1e-12)


def test_small_pairs_are_read_by_one_thread_and_all_are_there_again(wide_layers, monkeypatch):
    collector, before, seen = moments_of(wide_layers), torch.get_num_threads(), []
    measure = find("eigenspace_overlap_uncentered")
    whole = decompositions._decompose_needed
    monkeypatch.setattr(
        decompositions, "_decompose_needed", lambda wanted: (seen.append(torch.get_num_threads()), whole(wanted))
    )
    try:
        torch.set_num_threads(3)
        pairs = [collector[a, b] for a in "abc" for b in "de"]
        with torch.no_grad():
            Moments.prepare([(pair, [measure]) for pair in pairs])
        assert seen == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert all("alignment" in pair.uncentred.__dict__ for pair in pairs)  # threads have taken the products
    X, Y = (np.linalg.qr(wide_layers[key].numpy())[0] for key in "ad")
    assert value_of(measure, pairs[0]) == pytest.approx(np.square(X.T @ Y).sum() / 70, rel=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pairs_of_a_gpu_are_read_on_the_host_with_the_values_of_the_cpu(wide_layers):
    measures = [find(name) for name in LINEAR]
    found = []
    for place in ("cpu", "cuda"):
        collector = LayerMoments([(list("abc"), list("de"))], debiased=True)
        collector.update({key: rows.to(place) for key, rows in wide_layers.items()})
        pairs = [collector[a, b] for a in "abc" for b in "de"]
        with torch.no_grad():
            Moments.prepare([(pair, measures) for pair in pairs])
            found.append([read(measures, pair) for pair in pairs])
        assert {pair.cross.device.type for pair in pairs} == {"cpu"}
        assert collector["a", "d"].cross.device.type == place  # and the collector keeps its own
    assert np.allclose(*found, rtol=1e-9, atol=1e-12)


def test_one_reading_by_a_few_pairs_decomposes_no_layer(collector, monkeypatch):
    monkeypatch.setattr(covariances, "principal_directions", lambda second: pytest.fail("a layer was decomposed"))
    pairs, measure = [collector["a", "b"], collector["c", "d"]], find("nbs")
    Moments.prepare([(pair, [measure]) for pair in pairs])
    for pair in pairs:
        expected = np.linalg.svd(pair.cross[0].numpy(), compute_uv=False).sum() / float(pair.x_norm * pair.y_norm)
        assert value_of(measure, pair) == pytest.approx(expected, rel=1e-12)
