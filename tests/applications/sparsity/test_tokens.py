"""Vision transformers that drop tokens: what is dropped, what it costs, and what is refused."""

import copy
import io
import math
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import netkin as nk
from netkin.applications.sparsity.token_encoder import (
    TokenPredictor,
    masked_attention,
    mean_token_cka,
    straight_through,
    token_cka,
)
from netkin.errors import ForwardError, ShapeError, UnknownName, ValueFault
from token_worlds import fix, hugging_face, mean_vit, pictures, small_vit

STAGES = [[0, 2, 3, 5, 7, 8, 11, 15], [2, 5, 8, 15]]  # half of 16 patches, then half of those
HF = ["ViTForImageClassification", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"]


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


def removed_by_hand(model, images):
    """Run the plain network's own modules with tokens taken out by index."""
    tokens = model.embed(images)
    for number, block in enumerate(model.blocks):
        if number in (1, 3):
            before = list(range(16)) if number == 1 else STAGES[0]
            left = [before.index(one) + 1 for one in STAGES[0 if number == 1 else 1]]
            tokens = tokens[:, [0, *left]]
        tokens = block(tokens)
    return model.head(model.norm(tokens)[:, 0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_masking_equals_removal_in_our_own_network(dtype, tolerance):
    model, images = small_vit(dtype), pictures(dtype=dtype)
    sparse = nk.sparsify_tokens(model, keep=0.5, at=(1, 3), similarity=False)
    masked = fix(sparse, training=True, stages=STAGES)(images)
    pruned = fix(sparse, training=False, stages=STAGES)(images)
    expected = removed_by_hand(model, images)
    assert (expected - model(images)).abs().max() > 0.01
    torch.testing.assert_close(masked, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(pruned, expected, atol=tolerance, rtol=0)
    assert [stage.tolist() for stage in sparse.kept(images)] == [[stage] * 3 for stage in STAGES]


@pytest.mark.parametrize("name", HF)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_masking_equals_removal_in_networks_of_hugging_face(name, dtype, tolerance):
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    model, images = hugging_face(name, dtype), pictures(dtype=dtype)
    sparse = nk.sparsify_tokens(model, keep=0.5, at=(1, 3), similarity=False)
    masked = fix(sparse, training=True, stages=STAGES)
    for module in sparse.modules():
        module.p = 0.0 if isinstance(module, nn.Dropout) else getattr(module, "p", None)
    masked, pruned = masked(images).logits, fix(sparse, training=False, stages=STAGES)(images).logits
    inner, ahead = model.get_submodule(name.partition("For")[0].lower()), 1 if name.startswith("ViT") else 2
    assert sparse.prefix == ahead
    tokens = inner.embeddings(images)
    for number, layer in enumerate(inner.layers):
        if number in (1, 3):
            before = list(range(16)) if number == 1 else STAGES[0]
            left = [before.index(one) + ahead for one in STAGES[0 if number == 1 else 1]]
            tokens = tokens[:, [*range(ahead), *left]]
        tokens = layer(tokens)
    tokens = inner.layernorm(tokens)
    if name.endswith("WithTeacher"):
        expected = (model.cls_classifier(tokens[:, 0]) + model.distillation_classifier(tokens[:, 1])) / 2
    else:
        expected = model.classifier(tokens[:, 0])
    assert (expected - model(images).logits).abs().max() > 1e-3
    torch.testing.assert_close(masked, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(pruned, expected, atol=tolerance, rtol=0)


def test_a_mean_over_patches_leaves_dropped_ones_out_in_training_and_in_use():
    model, images = mean_vit(torch.float64), pictures(dtype=torch.float64)
    sparse = nk.sparsify_tokens(model, keep=0.5, at=(1, 3), similarity=False)
    assert sparse.prefix == 0
    tokens = model.blocks[0](model.tokens(images))[:, STAGES[0]]
    tokens = model.blocks[2](model.blocks[1](tokens))[:, [STAGES[0].index(one) for one in STAGES[1]]]
    expected = model.head(model.norm(model.blocks[3](tokens)).mean(1))
    for training in (True, False):
        found = fix(sparse, training=training, stages=STAGES)(images)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_a_head_that_reads_the_class_token_and_the_mean_over_patches_trains_as_it_is_used():
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    torch.manual_seed(0)
    model = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**sizes, num_labels=5)).double()
    sparse, images = nk.sparsify_tokens(model, keep=0.5, at=(1, 3), similarity=False), pictures(dtype=torch.float64)
    masked, pruned = (fix(sparse, training=mode, stages=STAGES)(images).logits for mode in (True, False))
    torch.testing.assert_close(masked, pruned, atol=1e-10, rtol=0)
    assert (pruned - model.eval()(images).logits).abs().max() > 1e-3


def test_an_image_is_treated_alike_in_any_company():
    images, sparse = pictures(6), nk.sparsify_tokens(small_vit(), keep=0.6).eval()
    together, kept = sparse(images), sparse.kept(images)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    torch.testing.assert_close(sparse(images[order]), together[order], atol=1e-5, rtol=0)
    for number in range(6):
        alone = images[number : number + 1]
        torch.testing.assert_close(sparse(alone), together[number : number + 1], atol=1e-5, rtol=0)
        assert [stage[0].tolist() for stage in sparse.kept(alone)] == [stage[number].tolist() for stage in kept]
    assert len({tuple(row.tolist()) for row in kept[0]}) > 1  # each image has its own


def test_without_predictor_copies_of_a_token_go_first():
    sparse = nk.sparsify_tokens(small_vit(torch.float64), keep=0.75, at=0, predict=False).eval()
    tokens = torch.randn(2, 17, 32, dtype=torch.float64)
    tokens[:, [3, 6, 9, 12]] = tokens[:, 3:4]  # patches 2, 5, 8 and 11 are one and the same
    places = []
    sparse.encoder.pruned(tokens, places=places)
    assert all(not {2, 5, 8, 11} & set(row) for row in places[0].tolist())
    assert not list(sparse.encoder.predictors.parameters())


def test_random_dropping_keeps_exactly_the_count_and_draws_anew():
    sparse = nk.sparsify_tokens(small_vit(), keep=0.5, at=(1, 2), predict=False, similarity=False)
    sparse.train()(pictures(8))
    first, second = sparse.encoder.last.decisions
    assert (first.sum(1) == 8).all()
    assert (second.sum(1) == 4).all()
    assert (second <= first).all()
    assert len({tuple(row.tolist()) for row in first}) > 1
    assert [stage.shape[1] for stage in sparse.eval().kept(pictures())] == [8, 4]


def test_keeping_all_is_the_plain_model():
    model, images = small_vit(), pictures()
    torch.testing.assert_close(nk.sparsify_tokens(model, keep=1.0).eval()(images), model(images))


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


def by_hand(patches, prefix, width, depth, classes, patch):
    """Multiply-adds of a plain network whose blocks see so many patches each."""
    total = (16 // patch) ** 2 * 3 * patch**2 * width + width * classes
    for count in patches:
        tokens = count + prefix
        total += tokens * 12 * width**2 + 2 * tokens**2 * width
    assert len(patches) == depth
    return total


def predictor_by_hand(patches, width):
    return patches * (width**2 + width * width // 2 + width // 2 * width // 4 + 2 * width // 4)


def test_costs_are_those_counted_by_hand():
    model, image = small_vit(), pictures(1)
    plain = by_hand([16] * 4, 1, 32, 4, 5, 4)
    assert nk.token_costs(model, image) == (sum(one.numel() for one in model.parameters()), plain)
    # before block 1 of 16 patches, before block 3 of the 8 that are left
    own = by_hand([16, 8, 8, 4], 1, 32, 4, 5, 4) + predictor_by_hand(16, 32) + predictor_by_hand(8, 32)
    sparse = nk.sparsify_tokens(model, keep=0.5, at=(1, 3), similarity=False)
    weights = 2 * (2 * 32 + 32 * 32 + 32 + 32 * 16 + 16 + 16 * 8 + 8 + 8 * 2 + 2)
    assert nk.token_costs(sparse, image) == (sum(one.numel() for one in model.parameters()) + weights, own)
    similar = own + 16**2 * 32 + 16**2 + 8**2 * 32 + 8**2  # CKA of all pairs, and its mean
    assert nk.token_costs(nk.sparsify_tokens(model, keep=0.5, at=(1, 3)), image).multiply_adds == similar
    whole = nk.sparsify_tokens(model, keep=1.0, at=(1, 3), similarity=False)
    assert nk.token_costs(whole, image).multiply_adds == plain + 2 * predictor_by_hand(16, 32)
    assert nk.token_costs(whole, pictures(3)) == nk.token_costs(whole, image)


def test_costs_are_half_of_what_torch_counts_of_the_products():
    model, images = small_vit(), pictures(1)
    sparse = nk.sparsify_tokens(model, keep=0.5).eval()
    exact = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.no_grad(), exact, FlopCounterMode(display=False) as counter:
        sparse(images)
    assert nk.token_costs(sparse, images).multiply_adds == counter.get_total_flops() / 2


def test_deit_tiny_has_the_parameters_of_table_1_and_a_share_is_a_stages():
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    sizes = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_labels": 1000}
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
    model = model.to_empty(device="cpu")
    for weight in model.parameters():
        weight.data.normal_(0, 0.02)
    image = torch.zeros(1, 3, 224, 224)
    plain, sparse = (nk.token_costs(one, image) for one in (model, nk.sparsify_tokens(model, 0.7, similarity=False)))
    assert (round(plain.parameters / 1e6, 1), round(sparse.parameters / 1e6, 1)) == (5.7, 5.9)
    assert (round(plain.multiply_adds / 1e9, 2), round(sparse.multiply_adds / 1e9, 2)) == (1.25, 0.8)


@pytest.mark.parametrize("make", [small_vit, mean_vit])
def test_a_network_may_lose_all_its_patches_in_training(make):
    sparse = nk.sparsify_tokens(make(), keep=0.5, at=(1, 3))
    for place in sparse.at:
        sparse.encoder.predictors[str(place)].scores[-1].bias.data.copy_(torch.tensor([1e4, -1e4]))
    scores = sparse.train()(pictures())
    assert sparse.encoder.last.decisions[0].sum() == 0
    losses = nk.TokenLosses(sparse, teacher=make())
    parts = losses.parts(pictures(), scores)
    assert parts["ratio"].item() == pytest.approx((0.5**2 + 0.25**2) / 2)
    assert parts["tokens"] == 0
    (scores.sum() + losses.term(pictures(), scores)).backward()
    assert all(weight.grad.isfinite().all() for weight in sparse.parameters() if weight.grad is not None)
    if sparse.prefix:
        tokens = sparse.model.embed(pictures())
        tokens = sparse.encoder.blocks[0](tokens)[:, :1]
        for number in (1, 2, 3):
            tokens = sparse.encoder.blocks[number](tokens)
        torch.testing.assert_close(scores, sparse.model.head(sparse.model.norm(tokens)[:, 0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_trains_and_prunes(dtype):
    images = pictures(2, dtype)
    sparse = nk.sparsify_tokens(small_vit(dtype), keep=0.5)
    scores = sparse.train()(images)
    losses = nk.TokenLosses(sparse, teacher=small_vit(dtype))
    (scores.sum() + losses.term(images, scores)).backward()
    assert scores.dtype == dtype
    assert set(sparse.encoder.last.decisions[-1].unique().tolist()) <= {0.0, 1.0}
    assert all(weight.grad.isfinite().all() for weight in sparse.parameters())
    assert sparse.eval()(images).isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_autocast_changes_the_scores_by_its_rounding_alone(training):
    sparse = nk.sparsify_tokens(small_vit(), keep=0.5, at=(1, 3), similarity=False)
    fix(sparse, training=training, stages=STAGES)
    with torch.autocast("cpu", torch.bfloat16):
        found = sparse(pictures())
    torch.testing.assert_close(found.float(), sparse(pictures()), atol=0.05, rtol=0.05)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch's compiler hides by itself
def test_the_pass_in_use_compiles_whole_and_training_compiles_in_parts():
    sparse, images = nk.sparsify_tokens(small_vit(), keep=0.5, at=(1, 3)), pictures()
    pruned = torch.compile(sparse.eval(), backend="eager", fullgraph=True)
    torch.testing.assert_close(pruned(images), sparse(images))
    torch._dynamo.reset()
    fix(sparse, training=True, stages=STAGES)
    masked = torch.compile(sparse, backend="eager")
    found = masked(images)
    assert sparse.encoder.last.decisions[0][0].nonzero()[:, 0].tolist() == STAGES[0]
    torch.testing.assert_close(found, sparse(images))
    torch._dynamo.reset()


def test_the_pass_in_use_can_be_exported():
    sparse, images = nk.sparsify_tokens(small_vit(), keep=0.5, at=(1, 3)).eval(), pictures()
    exported = torch.export.export(sparse, (images,)).module()
    torch.testing.assert_close(exported(images.flip(0)), sparse(images.flip(0)))


def test_many_threads_prune_with_one_network():
    sparse, images, found = nk.sparsify_tokens(small_vit(), keep=0.5).eval(), pictures(12).split(3), {}

    def work(number):
        with torch.no_grad():
            found[number] = [sparse(images[number]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for number in range(4):
        expected = sparse(images[number])
        assert all(torch.allclose(one, expected, atol=1e-6) for one in found[number])


def test_the_model_given_stays_as_it_was_and_the_random_state_too():
    model, images = small_vit().train(), pictures()
    weights, before, state = copy.deepcopy(model.state_dict()), model(images), torch.get_rng_state()
    sparse = nk.sparsify_tokens(model, keep=0.5)
    assert torch.equal(torch.get_rng_state(), state)
    assert sparse.training
    sparse.train()(images).sum().backward()
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
    assert torch.equal(model(images), before)
    assert all(one.grad is None for one in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_copies_and_files_work_after_a_training_pass():
    sparse, images = nk.sparsify_tokens(small_vit(), keep=0.5), pictures()
    sparse.train()(images)
    held = io.BytesIO()
    torch.save(sparse, held)
    held.seek(0)
    again = torch.load(held, weights_only=False)
    fresh = nk.sparsify_tokens(small_vit(), keep=0.5, seed=9)
    assert not torch.equal(fresh.eval()(images), sparse.eval()(images))
    fresh.load_state_dict(sparse.state_dict())
    for one in (copy.deepcopy(sparse), again, fresh):
        torch.testing.assert_close(one.eval()(images), sparse.eval()(images))
    twin = copy.deepcopy(sparse).train()
    twin(images)
    assert twin.last_pass() is not sparse.last_pass()
    assert not copy.deepcopy(sparse).encoder.last.decisions


class Tupled(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.attention_block = block

    def forward(self, tokens):
        return self.attention_block(tokens), None


def test_blocks_that_return_tuples_and_lists_that_are_gone_through_work():
    model = small_vit()

    class Looping(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = model.embed, model.norm, model.head
            self.layers = nn.ModuleList([Tupled(block) for block in model.blocks])

        def forward(self, images):
            tokens = self.embed(images)
            for layer in self.layers:
                tokens = layer(tokens)[0]
            return self.head(self.norm(tokens)[:, 0])

    for training in (True, False):
        pair = [nk.sparsify_tokens(one, keep=0.5, at=(1, 3), similarity=False) for one in (Looping(), model)]
        found, expected = (fix(one, training=training, stages=STAGES)(pictures()) for one in pair)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("keep", [0, -0.1, 1.01, float("nan"), True, "half"])
def test_a_share_outside_0_and_1_is_refused(keep):
    with pytest.raises(ValueFault, match="`keep` is the share of tokens that each stage keeps, above 0 and up to 1"):
        nk.sparsify_tokens(small_vit(), keep=keep)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ((1, 4), "names block 4, and the model has the blocks 0 to 3"),
        ((-1,), "names block -1"),
        ((2, 1), r"must rise, each once; got \(2, 1\)"),
        ((), "holds the numbers of blocks"),
        ((1.5,), "holds the numbers of blocks"),
    ],
)
def test_a_stage_that_does_not_exist_is_refused(at, said):
    with pytest.raises(ValueFault, match=said):
        nk.sparsify_tokens(small_vit(), at=at)


@pytest.mark.parametrize(
    "options",
    [{"similarity": -1}, {"similarity": float("nan")}, {"similarity": "yes"}, {"prefix": -1}, {"prefix": 1.5}],
)
def test_other_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueFault, match=f"`{next(iter(options))}` is"):
        nk.sparsify_tokens(small_vit(), **options)


def test_costs_of_no_image_are_refused():
    with pytest.raises(ShapeError, match="costs of one image are counted on one or more; got none"):
        nk.token_costs(small_vit(), torch.zeros(0, 3, 16, 16))


@pytest.mark.parametrize("name", ["resnet20", "char_lstm", "digits"])
def test_models_without_tokens_of_images_are_refused(name):
    with pytest.raises(ValueFault, match="has no tokens of an image to drop"):
        nk.sparsify_tokens(nk.load_model(f"netkin:{name}"))


def test_a_model_that_drops_tokens_already_is_refused():
    with pytest.raises(ValueFault, match="drops tokens already"):
        nk.sparsify_tokens(nk.sparsify_tokens(small_vit()))


def test_two_lists_of_blocks_ask_for_a_name():
    both = nn.Module()
    both.first, both.middle, both.second = small_vit(), nn.ReLU(), small_vit()
    with pytest.raises(ValueFault, match="2 lists of blocks, first.blocks, second.blocks"):
        nk.sparsify_tokens(both)
    with pytest.raises(UnknownName, match="no list of blocks named 'first.block'; did you mean 'first.blocks'"):
        nk.sparsify_tokens(both, blocks="first.block")


class Mixing(nn.Module):
    """A block that mixes neighbouring tokens beside its attention."""

    def __init__(self, block):
        super().__init__()
        self.attention_block = block

    def forward(self, tokens):
        return self.attention_block(tokens) + tokens.roll(1, dims=1)


class Wordy(nn.Module):
    """A block whose attention is a product and a softmax."""

    def __init__(self, width=32):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, tokens):
        return self.attention(tokens, tokens, tokens)[0]


class Causal(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.attention = nn.Linear(width, width)

    def forward(self, tokens):
        parts = [self.attention(tokens)[:, None]] * 3
        return F.scaled_dot_product_attention(*parts, is_causal=True)[:, 0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Mixing, "tokens that stay depend on those that are gone"),
        (lambda block: Wordy(), "does not call torch's `scaled_dot_product_attention`, or hides it"),
        (lambda block: Causal(), "a causal order"),
    ],
)
def test_attention_that_can_not_be_masked_is_refused(make, said):
    model = small_vit()
    model.blocks = nn.Sequential(*(make(block) for block in model.blocks))
    with pytest.raises(ForwardError, match=rf"the attention of block 1 in 'blocks' \(\w+\) can't be masked: .*{said}"):
        nk.sparsify_tokens(model)


def test_an_input_with_a_mask_of_its_own_is_refused():
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    sparse = nk.sparsify_tokens(hugging_face(HF[0]))
    mask = torch.ones(1, 17)
    mask[0, 3] = 0
    with pytest.raises(ForwardError, match="a mask of its own"):
        sparse(pictures(1), attention_mask=mask)


def test_gradient_checkpointing_is_refused_in_training():
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    model = hugging_face(HF[0])
    model.gradient_checkpointing_enable()
    with pytest.raises(ForwardError, match="gradient checkpointing"):
        nk.sparsify_tokens(model).train()(pictures(1))


def test_a_mean_before_the_norm_is_refused_without_class_token():
    model = mean_vit()
    type_ = type(model)

    class Late(type_):
        def forward(self, images):
            return self.head(self.norm(self.blocks(self.tokens(images)).mean(1)))

    model.__class__ = Late
    sparse = nk.sparsify_tokens(model)
    assert sparse.eval()(pictures()).shape == (3, 5)
    with pytest.raises(ForwardError, match="must norm its tokens, then pool them"):
        sparse.train()(pictures())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_keeps_the_tokens_that_a_cpu_keeps():
    sparse, images = nk.sparsify_tokens(small_vit(torch.float64), keep=0.6).eval(), pictures(6, torch.float64)
    scores, kept = sparse(images), sparse.kept(images)
    there = nk.sparsify_tokens(small_vit(torch.float64).cuda(), keep=0.6).eval()
    torch.testing.assert_close(there(images.cuda()).cpu(), scores, atol=1e-10, rtol=0)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(there.kept(images.cuda()), kept, strict=True))
    torch.testing.assert_close(there(images[2:3].cuda()).cpu(), scores[2:3], atol=1e-10, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_masking_equals_removal_on_a_gpu():
    model, images = small_vit(torch.float64).cuda(), pictures(dtype=torch.float64).cuda()
    sparse = nk.sparsify_tokens(model, keep=0.5, at=(1, 3), similarity=False)
    expected = removed_by_hand(model, images)
    for training in (True, False):
        found = fix(sparse, training=training, stages=STAGES)(images)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
