"""The parts of a network that drops tokens: CKA of tokens, odds, decisions and masked attention."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import netkin as nk
from netkin.applications.sparsity.token_encoder import (
    TokenPredictor,
    masked_attention,
    mean_token_cka,
    straight_through,
    token_cka,
)
from token_worlds import pictures, small_vit


def listing_cka(X, Y):
    """The paper's listing in NumPy: CKA of two matrices, rows by columns."""

    def centering(K):
        H = np.eye(len(K)) - np.ones((len(K), len(K))) / len(K)
        return H @ K @ H

    def hsic(A, B):
        return np.sum(centering(A @ A.T) * centering(B @ B.T))

    return hsic(X, Y) / (np.sqrt(hsic(X, X)) * np.sqrt(hsic(Y, Y)))


def test_the_cka_of_tokens_is_that_of_the_papers_listing_with_features_as_rows():
    tokens = torch.randn(2, 5, 7, dtype=torch.float64) + 3
    found = token_cka(tokens)
    for image in range(2):
        for i in range(5):
            for j in range(5):
                X, Y = (tokens[image, one].numpy()[:, None] for one in (i, j))
                assert found[image, i, j] == pytest.approx(listing_cka(X, Y), abs=1e-12)
    wide = torch.randn(1, 2, 500, dtype=torch.float64)
    assert token_cka(wide)[0, 0, 1] == pytest.approx(nk.cka(wide[0, 0][:, None], wide[0, 1][:, None]).item(), abs=1e-12)


def test_the_mean_cka_is_over_the_other_tokens_that_are_kept():
    tokens, kept = torch.randn(2, 6, 5, dtype=torch.float64), torch.tensor([[1.0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0]])
    found = mean_token_cka(tokens, kept.double())
    for image in range(2):
        for i in range(6):
            others = [j for j in range(6) if j != i and kept[image, j]]
            pairs = [listing_cka(*(tokens[image, one].numpy()[:, None] for one in (i, j))) for j in others]
            assert found[image, i] == pytest.approx(np.mean(pairs) if pairs else 0.0, abs=1e-12)


def test_the_cka_of_tokens_is_finite_for_constant_huge_and_half_precise_ones():
    tokens = torch.randn(1, 4, 64)
    tokens[0, 1] = 0.1
    assert (token_cka(tokens)[0, 1] == 0).all()
    expected = token_cka(tokens[:, [0, 2, 3]])
    torch.testing.assert_close(token_cka(1e30 * tokens[:, [0, 2, 3]]), expected)
    torch.testing.assert_close(token_cka(1e-30 * tokens[:, [0, 2, 3]]), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(token_cka(tokens[:, [0, 2, 3]]), expected)
        means = mean_token_cka(tokens[:, [0, 2, 3]], torch.ones(1, 3))
    torch.testing.assert_close(means, (expected.sum(2) - 1) / 2)
    halves = token_cka(tokens.half())
    assert halves.dtype == torch.float32
    torch.testing.assert_close(halves[:, [0, 2, 3]][:, :, [0, 2, 3]], expected, atol=1e-2, rtol=0)


def test_the_log_odds_are_those_of_the_predictor_less_four_times_the_centred_mean_cka():
    sparse = nk.sparsify_tokens(small_vit(torch.float64), keep=0.5, at=1, similarity=1.5)
    patches, kept = torch.randn(2, 16, 32, dtype=torch.float64), torch.ones(2, 16, dtype=torch.float64)
    kept[1, 3:9] = 0
    scores = sparse.encoder.predictors["1"](patches, kept).detach().numpy()
    found = sparse.encoder.log_odds(1, patches, kept).detach().numpy()
    for image in range(2):
        others = [j for j in range(16) if kept[image, j]]
        X = patches[image].numpy()
        shared = [np.mean([np.corrcoef(X[i], X[j])[0, 1] ** 2 for j in others if j != i]) for i in range(16)]
        level = np.mean([shared[j] for j in others])
        expected = scores[image, :, 1] - scores[image, :, 0] - 4 * 1.5 * (np.array(shared) - level)
        np.testing.assert_allclose(found[image], expected, atol=1e-10)


def test_at_one_half_the_probability_falls_by_the_cka_as_in_eq_13():
    step = 1e-6  # of CKA
    assert torch.sigmoid(torch.tensor(-4.0 * step, dtype=torch.float64)) == pytest.approx(0.5 - step, abs=1e-12)
    sparse = nk.sparsify_tokens(small_vit(torch.float64), keep=0.5, at=1)
    for weight in sparse.encoder.predictors.parameters():
        weight.data.zero_()
    patches = torch.randn(1, 16, 32, dtype=torch.float64)
    odds = sparse.encoder.log_odds(1, patches, torch.ones(1, 16, dtype=torch.float64))
    shared = mean_token_cka(patches, torch.ones(1, 16))
    expected = 0.5 - (shared - shared.mean())
    torch.testing.assert_close(odds.sigmoid(), expected, atol=2e-3, rtol=0)
    assert (odds.argsort() == expected.argsort()).all()


def test_eq_13_as_printed_is_the_probability_less_the_sum_of_all_cka():
    sparse = nk.sparsify_tokens(small_vit(torch.float64), keep=0.5, at=1, similarity="printed")
    patches, kept = torch.randn(2, 16, 32, dtype=torch.float64), torch.ones(2, 16, dtype=torch.float64)
    kept[1, 3:9] = 0
    scores = sparse.encoder.predictors["1"](patches, kept).detach().numpy()
    found = sparse.encoder.printed_probability(1, patches, kept).detach().numpy()
    for image in range(2):
        X, others = patches[image].numpy(), [j for j in range(16) if kept[image, j]]
        for i in range(16):
            shared = sum(np.corrcoef(X[i], X[j])[0, 1] ** 2 for j in others if j != i)
            probability = 1 / (1 + np.exp(scores[image, i, 0] - scores[image, i, 1]))
            np.testing.assert_allclose(found[image, i], probability - shared, atol=1e-10)


def test_as_printed_the_best_tokens_stay_in_use_and_those_below_zero_are_dropped_in_training():
    sparse = nk.sparsify_tokens(small_vit(torch.float64), keep=0.5, at=1, similarity="printed")
    images, seen = pictures(dtype=torch.float64), []
    sparse.encoder.predictors["1"].register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    [chosen] = sparse.eval().kept(images)
    value = sparse.encoder.printed_probability(1, seen[0], torch.ones(seen[0].shape[:2], dtype=torch.float64))
    assert torch.equal(chosen, value.argsort(dim=1, descending=True)[:, :8].sort(dim=1).values)
    sparse.train()(images)
    assert sparse.last_pass().decisions[0][value < 0].max() == 0
    assert "similarity=printed" in repr(sparse)


def test_a_mean_of_patches_is_that_of_the_predictor_by_hand():
    torch.manual_seed(0)
    predictor, tokens = TokenPredictor(8, 0.5).double(), torch.randn(1, 3, 8, dtype=torch.float64)
    found = predictor(tokens, torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64))
    features = predictor.features(tokens)
    common = (features[:, 0, 4:] + features[:, 2, 4:]) / 2
    for token in range(3):
        expected = predictor.scores(torch.cat([features[:, token, :4], common], dim=1))
        torch.testing.assert_close(found[:, token], expected)


@pytest.mark.parametrize(
    ("keep", "patches", "counts"),
    [(0.7, 196, [137, 96, 67]), (0.9, 196, [176, 158, 142]), (0.7, 100, [70, 49, 34]), (0.001, 64, [1, 1, 1])],
)
def test_a_stage_keeps_a_share_of_what_the_one_before_kept(keep, patches, counts):
    sparse = nk.sparsify_tokens(small_vit(), keep=keep, at=(1, 2, 3))
    assert sparse.encoder.counts(patches) == counts


def numpy_attention(query, key, value, kept):
    """Softmax of each row over its own token and those that are kept, one by one."""
    out = np.zeros_like(value)
    for n, head, i in np.ndindex(query.shape[:3]):
        allowed = [j for j in range(key.shape[2]) if kept[n, j] or i == j]
        scores = np.array([query[n, head, i] @ key[n, head, j] for j in allowed]) / np.sqrt(query.shape[3])
        weights = np.exp(scores - scores.max())
        out[n, head, i] = weights / weights.sum() @ value[n, head, allowed]
    return out


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_masked_attention_is_attention_among_those_kept(size):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64)
    kept = torch.tensor([[1.0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    key[:, :, 1] *= size  # a dropped token with scores far above all others
    found = masked_attention(kept, query, key, value)
    expected = numpy_attention(query.numpy(), key.numpy(), value.numpy(), kept.numpy())
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    single = masked_attention(kept.float(), query.float(), key.float(), value.float())
    np.testing.assert_allclose(single.numpy(), expected, atol=1e-4 if size > 1 else 1e-5)


def test_the_gradient_is_that_of_the_formula_at_dropped_tokens_too():
    torch.manual_seed(0)
    query, key, value = torch.rand(3, 1, 2, 5, 4, dtype=torch.float64)
    key[:, :, 0] += 1  # a kept token that every other looks at most
    kept = torch.tensor([[1.0, 0, 1, 0, 1]], dtype=torch.float64, requires_grad=True)
    weights = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    (masked_attention(kept, query, key, value) * weights).sum().backward()

    def by_formula(each):
        G = each[:, None, None, :].repeat(1, 1, 5, 1)
        G[..., range(5), range(5)] = 1
        E = (query @ key.mT / 2).exp() * G
        return ((E / E.sum(-1, keepdim=True)) @ value * weights).sum()

    for place in range(5):
        step = 1e-6 * torch.eye(5, dtype=torch.float64)[place : place + 1]
        slope = (by_formula(kept.detach() + step) - by_formula(kept.detach() - step)) / 2e-6
        assert kept.grad[0, place].item() == pytest.approx(slope.item(), abs=1e-8)
        assert kept.grad[0, place].abs() > 1e-3


def test_the_gradient_of_a_dropped_token_that_outscores_all_others_is_bounded():
    torch.manual_seed(0)
    query, key, value = torch.rand(3, 1, 2, 5, 4)
    key[:, :, 1] += 1000
    kept = torch.tensor([[1.0, 0, 1, 0, 1]], requires_grad=True)
    masked_attention(kept, query, key, value).sum().backward()
    assert kept.grad[0, 1].abs() > 1e-3
    assert kept.grad.abs().max() < 2 * 5 * 4  # heads, rows and features, each of values from 0 to 1


def test_attention_has_the_gradients_of_torch_where_all_are_kept():
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    kept = torch.ones(2, 5, dtype=torch.float64)
    ours = torch.autograd.grad(masked_attention(kept, *inputs).square().sum(), inputs)
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(*inputs).square().sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_decisions_are_0_or_1_with_the_probability_of_the_odds():
    torch.manual_seed(0)
    odds = torch.tensor([-3.0, -0.5, 0.0, 1.0, 40.0]).repeat(40_000, 1).requires_grad_()
    found = straight_through(odds)
    assert set(found.unique().tolist()) == {0.0, 1.0}
    expected = torch.tensor([-3.0, -0.5, 0.0, 1.0, 40.0]).sigmoid()
    assert (found.mean(0) - expected).abs().max() < 4 * 0.5 / math.sqrt(40_000)
    found.sum().backward()
    # E[σ'(l + noise)] of logistic noise, by a sum over its quantiles
    quantiles = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    soft = (odds[0].detach().double()[:, None] + (quantiles / (1 - quantiles)).log()).sigmoid()
    torch.testing.assert_close(odds.grad.mean(0).double(), (soft * (1 - soft)).mean(1), atol=5e-3, rtol=0)


def test_decisions_are_those_of_torchs_gumbel_softmax():
    odds = torch.randn(50, 20)
    torch.manual_seed(3)
    scores = torch.stack([torch.zeros_like(odds), odds], dim=0)
    theirs = F.gumbel_softmax(scores, hard=True, dim=0)[1]
    torch.manual_seed(3)
    ours = straight_through(odds)
    assert (ours == theirs.round()).all()
