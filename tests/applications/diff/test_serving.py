"""Served models against the whole pass: with a cache, padded and packed, through `nk.diff(..., serve=...)`."""

import copy

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue, ShapeError

WIDTH, WORDS, EXAMPLES, LENGTH = 16, 20, 3, 10
approx = pytest.approx


class Attention(nn.Module):
    """Causal attention of one head, with a cache of what came before."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden, mask, cache):
        keys, values = self.k(hidden), self.v(hidden)
        if cache is not None:
            keys, values = (torch.cat(pair, 1) for pair in zip(cache, (keys, values), strict=True))
        scores = self.q(hidden) @ keys.transpose(1, 2) / WIDTH**0.5
        return scores.masked_fill(~mask[:, 0], -torch.inf).softmax(-1) @ values, (keys, values)


class Block(nn.Module):
    """Attention and a linear layer, each beside what it is given."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.linear = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, mask, cache=None):
        attended, cache = self.attention(self.norm(hidden), mask, cache)
        hidden = hidden + attended
        return hidden + self.linear(hidden).relu(), cache


class Decoder(nn.Module):
    """A small language model that takes a cache, a mask of padding, and positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(4 * LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None):
        before = 0 if cache is None else cache[0][0].shape[1]
        rows, columns = input_ids.shape
        place = torch.arange(before, before + columns)
        position_ids = place.expand(rows, -1) if position_ids is None else position_ids
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        mask = self.mask(place, attention_mask, position_ids, before).expand(rows, 1, columns, -1)
        kept = []
        for number, block in enumerate(self.blocks):
            hidden, own = block(hidden, mask, None if cache is None else cache[number])
            kept.append(own)
        return {"logits": self.head(hidden), "cache": kept}

    def mask(self, place, attention_mask, position_ids, before):
        """Return which tokens each one sees: none later, no padding, none of another sequence in its row."""
        sees = torch.arange(before + len(place)) <= place[:, None]
        if attention_mask is not None:
            sees = sees & (attention_mask[:, None, None, :].bool() | torch.eye(len(place), before + len(place)).bool())
        elif not before:
            sequence = (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).cumsum(1)
            sees = sees & (sequence[:, None, :, None] == sequence[:, None, None, :])
        return sees


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Decoder().eval()


@pytest.fixture
def batch():
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (EXAMPLES, LENGTH), generator=drawn)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def diff(a, b, batch, serve, **options):
    return nk.diff(a, b, [batch], serve=serve, progress=False, **options)


def faulty(model, module, forward):
    """Return a copy of a model with ``forward(old, *args)`` in the place of a module's forward."""
    other = copy.deepcopy(model)
    at = other.get_submodule(module)
    old = type(at).forward
    at.forward = lambda *args, **named: forward(lambda *a, **n: old(at, *a, **n), *args, **named)
    return other


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


# --- clean ------------------------------------------------------------------------------------------------------------

SERVES = ["decode", "left", "right", "packed"]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("serve", SERVES)
def test_a_model_that_is_served_well_does_not_differ(model, batch, serve, precision, padded):
    if padded:
        batch["attention_mask"][1, 7:] = 0
    model = model.to(getattr(torch, precision))
    found = diff(model, model, batch, serve)
    assert (found.first, found.arguments) == (None, ())
    assert {one.missing for one in found.modules.values()} == {""}
    assert found.outputs.kl < 1e-3


def test_the_result_says_how_the_model_was_served(model, batch, tmp_path):
    found = diff(model, model, batch, "decode")
    assert "a and b (decoding with its cache) on" in str(found)
    nk.report(found, tmp_path / "ab.html")
    assert "b: decoding with its cache" in (tmp_path / "ab.html").read_text()
    assert diff(model, model, batch, lambda model, inputs: model(inputs["input_ids"])).serve == "by a function"


def test_precisions_may_differ_as_well(model, batch):
    low = copy.deepcopy(model).bfloat16()
    assert diff(model, low, batch, "decode").first is None
    assert diff(low, model, batch, "decode").first is None


def test_a_function_may_run_the_model_itself(model, batch):
    class Stateful(nn.Module):
        """A decoder that keeps its cache itself, as some engines do."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.kept = inner, None

        def forward(self, input_ids):
            output = self.inner(input_ids, cache=self.kept)
            self.kept = output["cache"] if self.keeps else None
            return output["logits"]

        keeps = False

    def generate(model, inputs):
        model.keeps, model.kept = True, None
        for part in inputs["input_ids"].split([3, 1, 4, 2], 1):
            model(part)
        model.keeps, model.kept = False, None

    served = Stateful(model)
    ids = {"input_ids": batch["input_ids"]}
    found = diff(served, served, ids, generate)
    assert (found.first, found["inner.blocks.1.attention"].missing) == (None, "")
    broken = Stateful(
        faulty(model, "blocks.1.attention", lambda old, x, mask, cache: old(x * (1 + (x.shape[1] == 1)), mask, cache))
    )
    assert diff(served, broken, ids, generate).first == "inner.blocks.1.attention"


# --- faults -----------------------------------------------------------------------------------------------------------


def wrong_slot(old, hidden, mask, cache):
    output, (keys, values) = old(hidden, mask, cache)
    return output, (keys.roll(int(hidden.shape[1] == 1), 1), values)


def larger_steps(old, hidden):
    return old(hidden) * (1 + 0.1 * (hidden.shape[1] == 1))


def windowed(old, hidden, mask, cache):
    return old(hidden, mask if cache is None else mask & (torch.arange(mask.shape[-1]) > mask.shape[-1] - 4), cache)


def from_zero(old, input_ids, attention_mask=None, position_ids=None, cache=None):
    return old(input_ids, attention_mask, torch.arange(input_ids.shape[1]).expand_as(input_ids), cache)


def mask_ignored(old, input_ids, attention_mask=None, position_ids=None, cache=None):
    return old(input_ids, attention_mask * 0 + 1, position_ids, cache)


def packed_as_one(model):
    other = copy.deepcopy(model)
    other.mask = lambda place, *others: (torch.arange(len(place)) <= place[:, None])[None, None]
    return other


FAULTS = [
    ("decode", "", lambda model: faulty(model, "", from_zero), "position_ids"),
    ("decode", "blocks.0.attention", lambda model: faulty(model, "blocks.0.attention", wrong_slot), None),
    ("decode", "blocks.1.attention", lambda model: faulty(model, "blocks.1.attention", windowed), None),
    ("decode", "blocks.1.linear", lambda model: faulty(model, "blocks.1.linear", larger_steps), None),
    ("left", "", lambda model: faulty(model, "", mask_ignored), "mask"),
    ("left", "", lambda model: faulty(model, "", from_zero), "input"),
    ("packed", "", packed_as_one, "mask"),
]  # fmt: skip


@pytest.mark.parametrize("serve, module, planted, argument", FAULTS)
def test_a_fault_of_serving_is_named_where_it_is(model, batch, serve, module, planted, argument):
    found = diff(model, planted(model), batch, serve)
    assert found.first == module
    if argument == "mask":
        assert "see padding or other sequences" in found.arguments[0].how
    if argument == "input":
        assert {one.name: one.module for one in found.arguments}["input"] == "positions"
    if serve == "decode":  # one pass has no steps
        assert diff(model, planted(model), batch, "right").first is None


def test_labels_in_the_data_are_not_served(model, batch):
    assert diff(model, model, batch | {"labels": batch["input_ids"]}, "decode").first is None


def test_the_local_error_is_that_of_the_whole_pass_on_what_was_given_in_steps(model, batch):
    other = faulty(model, "blocks.0.linear", lambda old, x: old(x) + 0.01 * (x.shape[1] == 1))
    found = diff(model, other, batch, "decode", prefill=6)
    served, cache, hidden = [], None, []
    other.blocks[1].register_forward_pre_hook(lambda module, args: hidden.append(args[0].detach()))
    other.blocks[1].register_forward_hook(lambda module, args, output: served.append(output[0].detach()))
    for part in batch["input_ids"].split([6, 1, 1, 1, 1], 1):
        cache = other(part, cache=cache)["cache"]
    causal = torch.ones(1, 1, LENGTH, LENGTH).tril().bool()
    whole, _ = model.blocks[1](torch.cat(hidden, 1), causal)
    # by far smaller than the difference of the whole runs
    assert found["blocks.1"].local == approx(relative(torch.cat(served, 1), whole), abs=1e-8)
    assert found["blocks.1"].local < 1e-5 < found["blocks.1"].end_to_end
    plain, seen = model.blocks[0], []
    plain.linear.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    model(**batch)
    added = torch.zeros(EXAMPLES, LENGTH, WIDTH)
    added[:, 6:] = 0.01
    assert found["blocks.0.linear"].local == approx((added.norm() / plain.linear(seen[0]).norm()).item(), rel=1e-4)


# --- models of transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Mixtral"])
def test_models_of_transformers_are_served(family):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2} | ({"num_local_experts": 4} if family == "Mixtral" else {})
    if family == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = getattr(transformers, f"{family}Config")(vocab_size=40, **sizes)
    model = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()
    ids = torch.randint(0, 40, (3, 12))
    mask = torch.ones_like(ids)
    mask[2, :3] = 0
    for serve in SERVES:
        assert diff(model, model, {"input_ids": ids, "attention_mask": mask}, serve).first is None
    block = "transformer.h.1" if family == "GPT2" else "model.layers.1"
    other = faulty(model, block, lambda old, x, *args, **named: old(x * (1 - 0.01 * (x.shape[1] == 1)), *args, **named))
    assert diff(model, other, {"input_ids": ids}, "decode").first == block


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSALS = [
    (lambda model, batch: diff(model, model, batch, "stream"), InvalidValue, "serve"),
    (lambda model, batch: diff(model, model, batch, "left", prefill=3), InvalidValue, "prefill"),
    (lambda model, batch: diff(model, model, batch, "decode", prefill=LENGTH), InvalidValue, "prefill"),
    (lambda model, batch: diff(model.head, model.head, torch.randn(3, WIDTH), "decode"), ShapeError, "serve"),
    (lambda model, batch: diff(model.tokens, model.tokens, batch["input_ids"], "decode"), InvalidValue, "serve"),
    (lambda model, batch: diff(model.tokens, model.tokens, batch["input_ids"], "left"), InvalidValue, "serve"),
    (lambda model, batch: diff(model, model, batch, lambda m, inputs: m(inputs["input_ids"][:2])), ShapeError, "serve"),
    (lambda model, batch: diff(model, model, batch, lambda m, all: m.tokens(all["input_ids"])), InvalidValue, "serve"),
    (lambda model, batch: diff(model, model, batch, lambda m, given: None), InvalidValue, "serve"),
]  # fmt: skip


@pytest.mark.parametrize("call, fault, argument", REFUSALS)
def test_what_can_not_be_served_is_refused(model, batch, call, fault, argument):
    with pytest.raises(fault) as refusal:
        call(model, batch)
    assert refusal.value.argument == argument
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# --- mixtures of experts ----------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Each token to two of four experts."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        each = torch.einsum("btw,ewv->btev", x, self.experts)
        return x + (each.gather(2, chosen[..., None].expand(*chosen.shape, WIDTH)) * weights[..., None]).sum(2)


class LeastLikely(Mixture):
    """A router that chooses by another rule."""

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        _, chosen = scores.topk(2, largest=False)
        each = torch.einsum("btw,ewv->btev", x, self.experts)
        weights = scores.gather(2, chosen)
        return x + (each.gather(2, chosen[..., None].expand(*chosen.shape, WIDTH)) * weights[..., None]).sum(2)


@pytest.fixture
def mixture():
    """A network of two mixtures, and tokens, some of which two experts suit equally."""
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(), nn.LayerNorm(WIDTH), Mixture()).eval()
    x = torch.randn(8, 40, WIDTH)
    with torch.no_grad():
        best = model[0].router(x)[0, 3].topk(3).indices
        for _ in range(50):  # bring the second and third scores of one token together
            scores = model[0].router(x)[0, 3]
            direction = model[0].router.weight[best[1]] - model[0].router.weight[best[2]]
            x[0, 3] -= (scores[best[1]] - scores[best[2]]) / direction.square().sum() * direction
    return model, x


def test_tokens_that_rounding_routes_otherwise_are_counted_and_no_fault(mixture):
    model, x = mixture
    low = copy.deepcopy(model).bfloat16()
    found = nk.diff(model, low, [x], progress=False)
    with torch.no_grad():
        experts = [one[0].router(x.to(one[0].experts.dtype)).topk(2).indices.sort(-1).values for one in (model, low)]
    same = int((experts[0] == experts[1]).all(-1).sum())
    assert (found.routing["0"].same, found.routing["0"].tokens) == (same, 320)
    assert same < 320
    assert found.first is None
    assert "of 640 choices of experts differ, first in 0." in found.sentence
    nk.document(found)


def test_a_router_that_chooses_by_another_rule_is_a_fault(mixture):
    model, x = mixture
    other = copy.deepcopy(model)
    other[2].__class__ = LeastLikely
    found = nk.diff(model, other, [x], progress=False)
    assert found.first == "2"
    assert found.routing["0"].agreement == 1.0 > found.routing["2"].agreement


def test_an_expert_that_differs_is_a_fault_also_beside_tokens_that_are_routed_otherwise(mixture):
    model, x = mixture
    other = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        other[0].experts[1] *= 1.2
    found = nk.diff(model, other, [x], progress=False)
    assert found.first == "0"


def test_routing_is_on_the_page(mixture, tmp_path):
    model, x = mixture
    found = nk.diff(model, copy.deepcopy(model).bfloat16(), [x], progress=False)
    found.save(tmp_path / "ab.netkin")
    assert nk.load(tmp_path / "ab.netkin") == found
    nk.report(found, tmp_path / "ab.html")
    assert "same experts" in (tmp_path / "ab.html").read_text()
    assert "routing: the same experts in" in str(found)
