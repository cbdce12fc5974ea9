"""Vision transformers that drop tokens: what is dropped, and what it costs."""

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import netkin as nk
from token_worlds import HF, fix, hugging_face, mean_vit, pictures, small_vit

STAGES = [[0, 2, 3, 5, 7, 8, 11, 15], [2, 5, 8, 15]]  # half of 16 patches, then half of those


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


@pytest.mark.slow
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


@pytest.mark.slow
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
