"""Collectors fed by hand: rows that wait are copied, chunks are left out, and gradients are exact."""

import numpy as np
import pytest
import torch

from netkin.measures import find
from netkin.statistics import (
    Grams,
    LayerGrams,
    LayerMoments,
    LayerRows,
    LayerSketches,
    LayerSpectra,
    LinearRows,
    Moments,
    layer_moments,
)
from netkin.statistics.collector import chunk_of, sum_of_chunks


def test_the_gradients_of_mini_batches_are_those_of_small_steps(worlds):
    def value(X, Y):
        return find("cka_minibatch(batch=8)")(Grams.of(X, Y, batch=8))

    X, Y = (torch.tensor(Z[:11, :3]).requires_grad_() for Z in worlds.related(20, 4, 3))  # and some rows beside
    assert torch.autograd.gradcheck(value, (X, Y))


# --- memory that is used again ----------------------------------------------------------------------------------------

PAIR = [(["x"], ["y"])]
MAKERS = {
    "moments": (lambda: LayerMoments(PAIR), "cka"),
    "moments in chunks": (lambda: LayerMoments(PAIR, chunks=3), "cka"),
    "all rows": (lambda: LinearRows(PAIR), "cka"),
    "rows": (lambda: LayerRows(["x", "y"]), "cka_rbf"),
    "sampled rows": (lambda: LayerRows(["x", "y"], cap=30), "cka_rbf"),
    "grams": (lambda: LayerGrams(PAIR, batch=16), "cka_minibatch(batch=16)"),
    "spectra": (lambda: LayerSpectra(PAIR), "cka"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_rows_that_wait_do_not_change_with_the_callers_memory(monkeypatch, worlds, kind):
    monkeypatch.setattr(layer_moments, "FOLD", 10**9)  # as on a GPU, where many rows wait
    make, measure = MAKERS[kind]
    X, Y = (torch.tensor(Z) for Z in worlds.related(50, 4, 3))
    reused, fresh = make(), make()
    memory = {"x": torch.empty(7, 4, dtype=X.dtype), "y": torch.empty(7, 3, dtype=X.dtype)}
    for start in range(0, 50, 7):
        batch = {"x": X[start : start + 7], "y": Y[start : start + 7]}
        for key, rows in batch.items():
            memory[key][: len(rows)] = rows
        count = len(batch["x"])
        reused.update({key: rows[:count] for key, rows in memory.items()}, np.arange(start, start + count))
        fresh.update({key: rows.clone() for key, rows in batch.items()}, np.arange(start, start + count))
    for rows in memory.values():
        rows.fill_(7)
    assert float(find(measure)(reused["x", "y"])) == float(find(measure)(fresh["x", "y"]))


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_the_sum_without_a_chunk_is_that_of_the_others():
    sums = torch.tensor([[1.0, 2.0], [1e17, 1e17], [3.0, 5.0]], dtype=torch.float64)
    assert sum_of_chunks(sums, 1).tolist() == [4.0, 7.0]
    assert sum_of_chunks(sums[:1], None).tolist() == [1.0, 2.0]
    assert sum_of_chunks(sums[[0, 2]], None).tolist() == [4.0, 7.0]


def test_chunks_are_nearly_even_and_do_not_follow_the_numbers():
    of = chunk_of(np.arange(100_000), 20)
    sizes = np.bincount(of, minlength=20)
    assert ((sizes - 5000) ** 2 / 5000).sum() < 45  # χ² with 19 degrees of freedom: one in a thousand is above 44
    assert abs(np.corrcoef(of[:-1], of[1:])[0, 1]) < 0.01
    for step in (2, 10, 32, 128, 1000):
        sizes = np.bincount(chunk_of(np.arange(0, 20_000 * step, step), 20), minlength=20)
        assert ((sizes - 1000) ** 2 / 1000).sum() < 45, step


@pytest.mark.parametrize("kind", ["moments in chunks", "all rows"])
def test_leaving_out_a_chunk_equals_never_having_seen_it(worlds, kind):
    X, Y = worlds.related(50, 4, 3)
    collector = LayerMoments(PAIR, chunks=3) if kind == "moments in chunks" else LinearRows(PAIR, chunks=3)
    collector.update({"x": X, "y": Y}, np.arange(100, 150))
    of = chunk_of(np.arange(100, 150), 3)
    assert collector.chunk_sizes == tuple(np.bincount(of, minlength=3))
    for chunk in range(3):
        without = find("cka")(collector.pair("x", "y", chunk))
        assert float(without) == pytest.approx(
            float(find("cka")(Moments.of(X[of != chunk], Y[of != chunk]))), abs=1e-12
        )


@pytest.mark.parametrize("buckets", [8, 32])  # fewer than the examples, and more
def test_sketches_of_layers_at_once_have_the_gradients_of_finite_differences(worlds, buckets):
    F, G, other = (torch.tensor(worlds.normal(20, 4)) for _ in range(3))

    def value(features):
        made = LayerSketches.of({"x": (features, G), "y": (other, G[:20])}, buckets=buckets, seed=3)
        return made["x", "y"].alignment("hadamard")

    streamed = LayerSketches(["x", "y"], LayerSketches.of({"x": (F, G)}, buckets=buckets, seed=3).settings)
    for start in (0, 7, 14):
        part = slice(start, start + 7)
        fed = {"activations": {"x": F[part], "y": other[part]}, "gradients": {"x": G[part], "y": G[part]}}
        streamed.update(fed, np.arange(20)[part])
    assert float(value(F)) == pytest.approx(float(streamed["x", "y"].alignment("hadamard")), abs=1e-12)
    leaf = F.clone().requires_grad_()
    (found,) = torch.autograd.grad(value(leaf), leaf)
    for i, j in ((0, 0), (7, 2), (19, 3)):
        step = torch.zeros_like(F)
        step[i, j] = 1e-5
        assert float(found[i, j]) == pytest.approx(float(value(F + step) - value(F - step)) / 2e-5, abs=1e-7)
    assert not LayerSketches.of({"x": (F, G)}, buckets=buckets).layers["x"].parts["features"].requires_grad


def test_a_streamed_sum_keeps_no_graph(worlds):
    X = torch.tensor(worlds.normal(20, 4), requires_grad=True)
    sketches = LayerSketches(["x"], LayerSketches.of({"x": (X, X)}).settings)
    sketches.update({"activations": {"x": X}, "gradients": {"x": X}}, np.arange(20))
    assert not sketches.layers["x"].parts["features"].requires_grad
