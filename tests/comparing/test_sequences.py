"""`cka_debiased_by_sequence`: the bias is taken off across sequences, as tokens of one sequence are not independent."""

from itertools import permutations

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.comparing import explain
from netkin.errors import InvalidValue, NoValue, ShapeError
from sequence_worlds import models, sequences


def by_quadruples(X, Y):
    """Return the mean over all quadruples of different sequences, one by one."""
    C = [x.T @ y for x, y in zip(X, Y, strict=True)]
    s, t, n = [x.sum(0) for x in X], [y.sum(0) for y in Y], [len(x) for x in X]
    terms = [
        n[f] * n[e] * (C[g] * C[h]).sum() - 2 * n[e] * s[h] @ C[g] @ t[f] + (s[g] @ s[f]) * (t[h] @ t[e])
        for g, h, f, e in permutations(range(len(X)), 4)
    ]
    return np.mean(terms)


def ragged(draw, lengths, width, offset=0.0):
    return [draw.normal(size=(n, width)) + draw.normal(size=width) + offset for n in lengths]


LENGTHS = [(2, 2, 2, 2, 2), (1, 3, 2, 5, 1, 2), (1, 1, 4, 7)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_value_is_that_of_all_quadruples_of_different_sequences(lengths):
    draw = np.random.default_rng(0)
    X, Y = ragged(draw, lengths, 3), ragged(draw, lengths, 2)
    Y = [y + x[:, :2] for x, y in zip(X, Y, strict=True)]
    pairs = nk.statistics.Sequences.of(X, Y).estimates
    wanted = [by_quadruples(A, B) for A, B in ((X, Y), (X, X), (Y, Y))]
    np.testing.assert_allclose([float(value) for value in pairs], wanted, rtol=1e-9)
    if min(wanted[1:]) > 0:
        value = nk.cka_debiased_by_sequence(X, Y)
        assert value == pytest.approx(wanted[0] / np.sqrt(wanted[1] * wanted[2]), rel=1e-9)


def test_sequences_of_one_token_are_independent_examples():
    draw = np.random.default_rng(1)
    X = draw.normal(size=(30, 4))
    Y = X[:, :3] + draw.normal(size=(30, 3))
    value = nk.cka_debiased_by_sequence(list(X[:, None]), list(Y[:, None]))
    assert value == pytest.approx(float(nk.cka_debiased(X, Y)), rel=1e-9)


@pytest.mark.parametrize("lengths", LENGTHS[:2])
def test_shifts_scales_and_rotations_change_nothing(lengths):
    draw = np.random.default_rng(2)
    lengths = lengths * 4
    X, Y = ragged(draw, lengths, 3), ragged(draw, lengths, 3)
    turn = np.linalg.qr(draw.normal(size=(3, 3)))[0]
    before = nk.cka_debiased_by_sequence(X, Y)
    after = nk.cka_debiased_by_sequence([5 * x @ turn + 100 for x in X], [y - 7 for y in Y])
    assert after == pytest.approx(before, rel=1e-8)
    assert nk.cka_debiased_by_sequence(X, [x @ turn for x in X]) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("ragged_lengths", [False, True])
def test_independent_models_lie_around_zero_though_tokens_of_a_sequence_are_alike(ragged_lengths):
    """Each sequence has a topic of its own in either model, and its tokens hardly differ from it."""
    draw, values = np.random.default_rng(3), []
    for _ in range(60):
        lengths = draw.integers(2, 20, 24) if ragged_lengths else [10] * 24
        X, Y = ([draw.normal(size=16) + 0.5 * draw.normal(size=(n, 16)) for n in lengths] for _ in range(2))
        values.append([nk.cka_debiased_by_sequence(X, Y), float(nk.cka_debiased(np.concatenate(X), np.concatenate(Y)))])
    across, token_wise = np.transpose(values)
    error = across.std(ddof=1) / 60**0.5
    assert abs(across.mean()) < 3 * error
    assert token_wise.mean() > 10 * error  # as of few examples: there are 24 topics, and not 240 tokens


@pytest.mark.parametrize("ragged_lengths", [False, True])
def test_a_sample_of_all_tokens_gives_what_lists_of_sequences_give(ragged_lengths):
    nets, data = models(), sequences(ragged=ragged_lengths)
    options = {"layers": "blocks.*", "shape": "tokens", "progress": False}
    found = nk.compare(*nets, data, ["cka", "cka_debiased_by_sequence"], **options)
    lengths = [int(count) for batch in data for count in batch["attention_mask"].sum(1)]
    for x in ("blocks.0", "blocks.2"):
        X, Y = (
            nk.activations(net, layer, data, shape="tokens")[layer].split(lengths)
            for net, layer in zip(nets, (x, "blocks.1"), strict=True)
        )
        by_hand = float(nk.cka_debiased_by_sequence(list(X), list(Y)))
        assert found["cka_debiased_by_sequence"][x, "blocks.1"] == pytest.approx(by_hand, rel=1e-6)
    assert found["cka"].statistic == "Moments"  # which a sample for the other does not touch
    alone = nk.compare(
        nets[0], data=data, measures="cka_debiased_by_sequence", tokens=50, errors=True, chunks=6, **options
    )
    table = alone["cka_debiased_by_sequence"]
    assert table.exactness.startswith("a sample of 50 of")
    np.testing.assert_allclose(np.diag(table.values), 1)
    assert (table.errors[np.isfinite(table.errors)] > 0).all()


def test_parts_are_merged_and_kept_in_files(tmp_path):
    rows = [row for batch in sequences() for row in zip(batch["input_ids"], batch["attention_mask"], strict=True)]

    def collated(rows):
        return dict(zip(["input_ids", "attention_mask"], map(torch.stack, zip(*rows, strict=True)), strict=True))

    loader = torch.utils.data.DataLoader(rows, batch_size=5, collate_fn=collated)
    options = {"layers": "blocks.*", "shape": "tokens", "tokens": 60, "progress": False}
    measure = "cka_debiased_by_sequence"
    whole = nk.compare(*models(), loader, measure, errors=True, chunks=4, **options)
    parts = [nk.collect(*models(), loader, [measure], part=(k, 3), errors=True, chunks=4, **options) for k in (3, 1, 2)]
    nk.merge(parts).save(tmp_path / "parts.stats")
    merged = nk.load(tmp_path / "parts.stats").compute()[measure]
    np.testing.assert_allclose(merged.values, whole[measure].values, rtol=1e-6)
    np.testing.assert_allclose(merged.errors, whole[measure].errors, rtol=1e-4)


def test_layers_without_tokens_and_few_sequences_are_refused():
    X = [np.ones((2, 3)) * k for k in range(3)]
    with pytest.raises(NoValue, match="at least 4"):
        nk.cka_debiased_by_sequence(X, X)
    with pytest.raises(ShapeError, match="same sequences"):
        nk.cka_debiased_by_sequence(X, X[:2])
    with pytest.raises(InvalidValue) as refusal:
        nk.compare(torch.nn.Linear(3, 4), data=torch.randn(9, 3), measures="cka_debiased_by_sequence")
    assert refusal.value.argument == "shape"


def test_the_plan_says_what_is_read():
    plan = explain(*models(), sequences(), "cka_debiased_by_sequence", layers="blocks.*", shape="tokens")
    assert plan.measures["cka_debiased_by_sequence"].startswith("Rows, a sample of at most 4,096 tokens")
