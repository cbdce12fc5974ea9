"""The losses by which a network learns which tokens to drop, and training with them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.sparsity.tokens import distillation_loss, ratio_loss, token_loss
from netkin.errors import InvalidValue, ShapeError
from token_worlds import hugging_face, pictures, small_vit


def examples(n=32):
    draw = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 5, (n,), generator=draw)
    images = torch.randn(n, 3, 16, 16, generator=draw)
    images[:, 0, :4, :4] += labels[:, None, None]  # one patch tells the class
    return images, labels


def test_the_ratio_loss_by_hand():
    first = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]])
    second = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]])
    shares, wanted = np.array([[0.75, 0.25], [0.25, 0.0]]), np.array([[0.7], [0.49]])
    expected = ((shares - wanted) ** 2).mean()
    assert ratio_loss([first, second], 0.7).item() == pytest.approx(expected)


def test_the_distillation_loss_is_the_kl_divergence_from_the_teacher():
    logits, targets = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    q, p = logits.softmax(1).numpy(), targets.softmax(1).numpy()
    assert distillation_loss(logits, targets).item() == pytest.approx((p * np.log(p / q)).sum(1).mean())
    assert distillation_loss(logits, logits + 7).item() == pytest.approx(0, abs=1e-12)


def test_the_token_loss_is_over_kept_tokens_and_has_no_scale():
    torch.manual_seed(0)
    tokens, targets = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    kept = torch.tensor([[1.0, 0, 1], [0, 0, 1]], dtype=torch.float64)

    def unit(row):
        return (row - row.mean()) / np.sqrt(row.var() + 1e-5)

    rows = [(0, 0), (0, 2), (1, 2)]
    squares = [((unit(tokens[at].numpy()) - unit(targets[at].numpy())) ** 2).mean() for at in rows]
    assert token_loss(tokens, targets, kept).item() == pytest.approx(np.mean(squares))
    assert token_loss(tokens, 5 * tokens + 3, kept).item() == pytest.approx(0, abs=1e-8)


def test_the_term_is_the_sum_of_the_parts_times_their_factors():
    sparse, images, teacher = nk.sparsify_tokens(small_vit(), keep=0.5), pictures(), small_vit().train()
    scores = sparse.train()(images)
    losses = nk.TokenLosses(sparse, teacher=teacher, ratio=3.0, distillation=0.25, tokens=2.0)
    parts = losses.parts(images, scores)
    expected = 3 * parts["ratio"] + 0.25 * parts["distillation"] + 2 * parts["tokens"]
    torch.testing.assert_close(losses.term(images, scores), expected)
    assert teacher.training
    assert not any(module._forward_hooks for module in teacher.modules())
    decisions, tokens = sparse.last_pass().decisions, sparse.last_pass().tokens
    assert parts["ratio"] == ratio_loss(decisions, 0.5)
    targets = teacher.eval().blocks(teacher.embed(images))[:, 1:]
    torch.testing.assert_close(parts["tokens"], token_loss(tokens, targets, decisions[-1]))
    torch.testing.assert_close(parts["distillation"], distillation_loss(scores, teacher(images)))
    alone = nk.TokenLosses(sparse, teacher=teacher, tokens=0)
    assert sorted(alone.parts(images, scores)) == ["distillation", "ratio"]
    assert sorted(nk.TokenLosses(sparse).parts(images, scores)) == ["ratio"]


@pytest.mark.parametrize("which", ["classes", "ratio"])
def test_gradients_reach_every_predictor(which):
    sparse, (images, labels) = nk.sparsify_tokens(small_vit(), keep=0.5), examples()
    scores = sparse.train()(images)
    loss = nn.functional.cross_entropy(scores, labels)
    loss = loss if which == "classes" else nk.TokenLosses(sparse).term(images, scores)
    loss.backward()
    for place in sparse.at:
        for name, weight in sparse.encoder.predictors[str(place)].named_parameters():
            assert weight.grad.abs().max() > 0, f"{place}.{name}"


def test_the_loss_of_similar_tokens_trains_no_features():
    sparse = nk.sparsify_tokens(small_vit(), keep=0.5, at=1, similarity=3.0)
    patches = torch.randn(2, 16, 32, requires_grad=True)
    for weight in sparse.encoder.predictors.parameters():
        weight.data.zero_()
    sparse.encoder.log_odds(1, patches, torch.ones(2, 16)).square().sum().backward()
    assert patches.grad.abs().max() == 0


@pytest.mark.slow
def test_training_learns_the_share_and_which_patch_tells_the_class():
    plain, (images, labels) = small_vit(), examples(192)
    settings = {"batch": 32, "optimizer": "adam", "lr": 3e-3, "progress": False}
    nk.train(plain, (images, labels), epochs=6, **settings)
    sparse, shares = nk.sparsify_tokens(plain, keep=0.5, at=(1, 3)), []
    for place in sparse.at:  # it begins by keeping too many
        sparse.encoder.predictors[str(place)].scores[-1].bias.data.copy_(torch.tensor([-1.0, 1.0]))

    def watch(model, step):
        shares.append([kept.mean().item() for kept in model.last_pass().decisions])

    losses = nk.TokenLosses(sparse, teacher=plain, ratio=10.0)
    nk.train(sparse, (images, labels), epochs=16, hooks=[losses, watch], **settings)
    missed = (np.array(shares) - [0.5, 0.25]) ** 2
    assert missed[-8:].mean() < missed[:8].mean() / 10
    kept = sparse.kept(images)[1]
    assert (kept == 0).any(1).float().mean() > 0.6  # chance would keep a patch in one image of four


@pytest.mark.slow
def test_training_goes_on_bit_for_bit_where_it_stopped(tmp_path):
    data, recipe = examples(), {"batch": 8, "lr": 0.01, "progress": False}
    states = []
    for stops in (False, True):
        torch.manual_seed(0)
        sparse = nk.sparsify_tokens(small_vit(), keep=0.5)
        limit = {"at": 6 if stops else None}

        class Interrupting(nk.TokenLosses):
            def after_step(self, model, step, limit=limit):
                if step == limit["at"]:
                    raise KeyboardInterrupt

        where = tmp_path / f"{stops}.netkin"
        options = {"epochs": 3, "save": where, "every": 1, **recipe}
        if stops:
            with pytest.raises(KeyboardInterrupt):
                nk.train(sparse, data, hooks=[Interrupting(sparse, teacher=small_vit())], **options)
            limit["at"] = None
            sparse = nk.sparsify_tokens(small_vit(), keep=0.5)
            sparse.train()(data[0])  # a pass before it leaves nothing that counts
        nk.train(sparse, data, hooks=[Interrupting(sparse, teacher=small_vit())], **options)
        states.append(copy.deepcopy(sparse.state_dict()))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_networks_of_hugging_face_train_with_batches_of_mappings():
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    plain = hugging_face("ViTForImageClassification")
    sparse, (images, labels) = nk.sparsify_tokens(plain, keep=0.7), examples(16)
    batches = [{"pixel_values": images, "labels": labels}]
    before = copy.deepcopy(sparse.state_dict())
    history = nk.train(
        sparse,
        batches,
        epochs=2,
        lr=0.01,
        hooks=[nk.TokenLosses(sparse, teacher=plain)],
        test=batches,
        progress=False,
    )
    assert len(history) == 2
    assert 0 <= history[-1]["accuracy"] <= 1
    changed = {name for name, one in sparse.state_dict().items() if not torch.equal(one, before[name])}
    assert any("predictors" in name for name in changed)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_runs_under_autocast(precision):
    plain = small_vit()
    sparse = nk.sparsify_tokens(plain, keep=0.5)
    settings = {"steps": 4, "batch": 8, "lr": 0.01, "precision": precision, "progress": False}
    history = nk.train(sparse, examples(), hooks=[nk.TokenLosses(sparse, teacher=plain)], **settings)
    assert np.isfinite(history[-1]["loss"])
    assert all(weight.isfinite().all() for weight in sparse.parameters())


def test_losses_without_a_pass_or_of_other_models_are_refused():
    sparse = nk.sparsify_tokens(small_vit())
    with pytest.raises(InvalidValue, match="need a forward pass in training mode first"):
        nk.TokenLosses(sparse).parts(pictures(), torch.zeros(3, 5))
    with pytest.raises(InvalidValue, match="what `nk.sparsify_tokens` returns; got VisionTransformer"):
        nk.TokenLosses(small_vit())
    with pytest.raises(InvalidValue, match="`ratio` is the factor of a loss"):
        nk.TokenLosses(sparse, ratio=-1)
    with pytest.raises(InvalidValue, match="`tokens` is the factor of a loss, a number of 0 or more; got 'mean'"):
        nk.TokenLosses(sparse, tokens="mean")
    with pytest.raises(InvalidValue, match=r"must be a `torch.nn.Module`; got str"):
        nk.TokenLosses(sparse, teacher="vit")


def test_a_teacher_with_other_tokens_is_refused():
    sparse, images = nk.sparsify_tokens(small_vit()), pictures()
    other = small_vit()
    other.blocks[3] = nn.Sequential(other.blocks[3], nn.Linear(32, 16))
    other.norm, other.head = nn.LayerNorm(16), nn.Linear(16, 5)
    scores = sparse.train()(images)
    with pytest.raises(ShapeError, match=r"\(3, 16, 16\) and the network's \(3, 16, 32\); pass `tokens=0`"):
        nk.TokenLosses(sparse, teacher=other).parts(images, scores)
    assert "tokens" not in nk.TokenLosses(sparse, teacher=other, tokens=0).parts(images, scores)


def test_a_teacher_elsewhere_is_refused():
    sparse, images = nk.sparsify_tokens(small_vit()), pictures()
    losses = nk.TokenLosses(sparse, teacher=small_vit())
    losses.teacher.to("meta")
    with pytest.raises(InvalidValue, match="the teacher lies on meta and the network on cpu; put both on one device"):
        losses.parts(images, sparse.train()(images))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_training_runs_on_a_gpu(precision):
    plain = small_vit().cuda()
    sparse = nk.sparsify_tokens(plain, keep=0.5)
    before = copy.deepcopy(sparse.state_dict())
    settings = {"steps": 8, "batch": 8, "lr": 0.01, "precision": precision, "progress": False}
    history = nk.train(sparse, examples(), hooks=[nk.TokenLosses(sparse, teacher=plain)], **settings)
    assert np.isfinite(history[-1]["loss"])
    changed = {name for name, one in sparse.state_dict().items() if not torch.equal(one, before[name])}
    assert sum("predictors" in name for name in changed) > 0
    assert all(weight.isfinite().all() for weight in sparse.parameters())
