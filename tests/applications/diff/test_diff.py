"""Which module differs, by how much, and against which floor: through `nk.diff`, with slow transcriptions beside it."""

import copy
import math

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import ForwardError, InvalidValue, ShapeError, UnknownName
from netkin.reporting.page.diff_page import diff_chart
from quickly import slow_after

approx = pytest.approx


class Block(nn.Module):
    """A residual block that is told a mask and positions, and works in place."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.1)

    def forward(self, hidden, mask=None, shift=0):
        hidden = hidden if mask is None else hidden * mask[..., None].to(hidden.dtype)
        return hidden + self.drop(self.down(self.act(self.up(self.norm(hidden))))) + shift


class Net(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, width=16, vocabulary=20, shift=0):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.shift = shift

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, attention_mask, shift=self.shift)
        return self.head(hidden)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def batch():
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (6, 9), generator=drawn)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def diff(a, b, batch, **options):
    return nk.diff(a, b, [batch], progress=False, **options)


def changed(net, change):
    """Return a copy of a network after `change`."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        change(other)
    return other


def relative(found, wanted):
    return (torch.linalg.norm(found.double() - wanted.double()) / torch.linalg.norm(wanted.double())).item()


# --- errors and floors ------------------------------------------------------------------------------------------------


def test_equal_models_do_not_differ(net, batch):
    found = diff(net, copy.deepcopy(net), batch)
    assert found.first is None
    assert {one.local for one in found.modules.values()} == {0.0}
    assert set(found.modules) == {name for name, module in net.named_modules() if not isinstance(module, nn.ModuleList)}


def test_the_local_error_is_that_of_one_module_on_the_inputs_of_the_other(net, batch):
    other = changed(net, lambda one: [one.blocks[0].up.weight.mul_(1.5), one.blocks[2].down.bias.add_(0.1)])
    found = diff(net, other, batch)
    hidden = net.embed(batch["input_ids"])
    for place, (mine, theirs) in enumerate(zip(net.blocks, other.blocks, strict=True)):
        assert found[f"blocks.{place}"].local == approx(relative(theirs(hidden), mine(hidden)), rel=1e-5)
        inside = mine.act(mine.up(mine.norm(hidden)))
        assert found[f"blocks.{place}.down"].local == approx(relative(theirs.down(inside), mine.down(inside)), rel=1e-5)
        hidden = mine(hidden)
    whole = relative(other(**batch), net(**batch))
    assert found[""].local == found[""].end_to_end == approx(whole, rel=1e-5)
    assert found["blocks.1"].local == 0.0 < found["blocks.1"].end_to_end


def test_the_floor_is_what_rounding_alone_does(net, batch):
    other = copy.deepcopy(net).bfloat16()
    found = diff(net, other, batch)["blocks.0.up"]
    inputs = net.blocks[0].norm(net.embed(batch["input_ids"]))
    given = net.blocks[0].up(inputs)
    cast = relative(copy.deepcopy(net.blocks[0].up).bfloat16()(inputs.bfloat16()), given)
    above = relative(copy.deepcopy(net.blocks[0].up).double()(inputs.double()), given)
    assert found.floor == approx(math.sqrt(cast**2 + above**2 + (0.2 * 2**-7) ** 2), rel=1e-4)
    assert found.local == approx(cast, rel=1e-4)


def test_at_equal_precision_the_floor_is_not_zero(net, batch):
    floors = [one.floor for one in diff(net, copy.deepcopy(net), batch).modules.values()]
    assert min(floors) > 1e-9


def test_the_more_precise_model_is_the_reference_on_either_side(net, batch):
    other = changed(net, lambda one: one.blocks[1].up.weight.mul_(1.2)).bfloat16()
    one, reverse = diff(net, other, batch), diff(other, net, batch)
    assert (one.reference, reverse.reference) == ("a", "b")
    assert one.first == reverse.first == "blocks.1.up"
    assert {name: module.local for name, module in one.modules.items()} == {
        name: module.local for name, module in reverse.modules.items()
    }


def test_outputs_of_few_numbers_raise_no_alarm_by_a_lucky_floor():
    for seed in range(30):
        torch.manual_seed(seed)
        a = nn.Sequential(nn.Linear(32, 1))
        b = changed(
            a, lambda one: setattr(one[0], "forward", lambda x, m=one[0]: x.flip(1) @ m.weight.flip(1).T + m.bias)
        )
        assert nk.diff(a, b, [torch.randn(1, 32)], progress=False).first is None


def test_modules_in_mixed_types_have_a_floor(net, batch):
    class Wide(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.float()).to(x.dtype)

    a, b = copy.deepcopy(net).bfloat16(), copy.deepcopy(net).bfloat16()
    for block in b.blocks:
        block.norm.float()
        block.norm.__class__ = Wide
    for one, other in ((a, b), (net, b), (b, a)):
        found = diff(one, other, batch)
        assert found.first is None
        assert {module.missing for module in found.modules.values()} == {""}
    with torch.no_grad():
        b.blocks[1].down.weight *= 1.5
    assert diff(a, b, batch).first == "blocks.1.down"


def test_code_that_asks_for_float32_has_a_floor():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x).float().softmax(-1) @ x.new_ones(8, 4)

    torch.manual_seed(0)
    a = Scores()
    found = nk.diff(a, copy.deepcopy(a), [torch.randn(5, 8)], progress=False)
    assert found[""].missing == ""
    assert found[""].floor > 1e-9


def test_a_table_that_a_module_makes_at_its_first_call_is_not_left_in_another_type():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.table = nn.Parameter(torch.ones(8)), None

        def forward(self, x):
            if self.table is None:
                self.table = self.weight * torch.arange(8).to(x.dtype)
            return x + self.table

    a = nn.Sequential(Table(), nn.Linear(8, 4))
    found = nk.diff(a, copy.deepcopy(a), [torch.randn(5, 8)], progress=False)
    assert (found.first, a[0].table.dtype) == (None, torch.float32)


def test_arguments_are_said_in_the_order_of_the_models(net, batch):
    other = changed(net, lambda one: setattr(one, "shift", 2))
    (argument,) = diff(net.bfloat16(), other, batch).arguments
    assert argument.how == "0 and 2"


# --- the verdict ------------------------------------------------------------------------------------------------------

FAULTS = {
    "blocks.1.norm": lambda one: setattr(one.blocks[1].norm, "eps", 0.1),
    "blocks.2.up": lambda one: one.blocks[2].up.weight[3].zero_(),
    "blocks.0.act": lambda one: setattr(one.blocks[0], "act", nn.GELU()),
    "embed": lambda one: one.embed.weight[4].mul_(1.001),
    "head": lambda one: one.head.bias.add_(1e-3),
}


@pytest.mark.parametrize("precision", slow_after(10, ["float32", "bfloat16"]))
@pytest.mark.parametrize("module", FAULTS)
def test_a_fault_is_named_where_it_is(net, batch, module, precision):
    other = changed(net, FAULTS[module]).to(getattr(torch, precision))
    found = diff(net, other, batch)
    assert found.first == module or (precision == "bfloat16" and found[module].ratio < 3)


def test_a_fault_in_the_code_of_a_block_is_the_blocks(net, batch):
    other = copy.deepcopy(net)
    other.blocks[1].forward = lambda hidden, mask=None, shift=0: Block.forward(other.blocks[1], hidden) - hidden
    found = diff(net, other, batch)
    assert found.first == "blocks.1"
    assert "blocks.1 (Block) differs by " in found.sentence


def test_a_fault_in_one_example_stands_out_there(net, batch):
    batch["input_ids"][:] = batch["input_ids"] % 19
    batch["input_ids"][4, 6] = 19
    found = diff(net, changed(net, lambda one: one.embed.weight[19].mul_(1.1)), batch)
    assert (found.first, found["embed"].worst_sequence, found["embed"].worst_position) == ("embed", 4, 6)


def test_a_module_is_seen_at_each_of_its_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(-self.act(x))

    class Leaky(Twice):
        def forward(self, x):
            self.act.negative_slope = 0.0
            x = self.act(x)
            self.act.negative_slope = 0.3
            return self.act(-x)

    found = nk.diff(Twice(), Twice(), [torch.randn(5, 3)], progress=False)
    assert list(found.modules) == ["", "act", "act#2"]


def test_positions_that_are_masked_do_not_count(net, batch):
    batch["attention_mask"][2, 5:] = 0
    other = copy.deepcopy(net)
    wrong = torch.zeros(6, 9, 1)
    wrong[2, 5:] = 100.0
    other.blocks[1].forward = lambda hidden, mask=None, shift=0: Block.forward(other.blocks[1], hidden, mask) + wrong
    assert diff(net, other, batch)["blocks.1"].local == 0.0


# --- arguments and flags ----------------------------------------------------------------------------------------------


def test_arguments_that_differ_are_named_with_where_they_were_computed(net, batch):
    found = diff(net, changed(net, lambda one: setattr(one, "shift", 2)), batch)
    assert [str(one) for one in found.arguments] == [
        "`shift` given to blocks.0 differs (0 and 2); computed in the model itself"
    ]
    assert (found.first, found.arguments[0].calls) == ("", 3)


def test_a_mask_that_one_kernel_is_told_and_the_other_is_not_is_no_fault(net, batch):
    class Causal(nn.Module):
        def __init__(self, tells):
            super().__init__()
            self.inner, self.tells = Attention(), tells

        def forward(self, x):
            return self.inner(x, torch.ones(4, 4).tril().bool() if self.tells else None)

    class Attention(nn.Module):
        def forward(self, x, mask=None):
            return nn.functional.scaled_dot_product_attention(x, x, x, mask, is_causal=mask is None and self.masks)

        masks = True

    one, other, wrong = Causal(True), Causal(False), Causal(False)
    wrong.inner.masks = False
    data = [torch.randn(3, 4, 8)]
    assert nk.diff(one, other, data, progress=False).first is None
    assert nk.diff(other, one, data, progress=False).first is None
    assert nk.diff(one, wrong, data, progress=False).first is not None


def test_a_batch_norm_that_trains_in_one_model_is_named_and_left_as_it_was():
    torch.manual_seed(0)
    a = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    b = copy.deepcopy(a)
    b[1].train()
    before = {name: value.clone() for name, value in b.state_dict().items()}
    found = nk.diff(a, b, [torch.randn(4, 3, 8, 8) + 2], progress=False)
    assert found.first == "1"
    assert str(found.arguments[0]) == "`training` given to 1 differs (False and True)"
    assert b[1].training
    assert all(torch.equal(value, before[name]) for name, value in b.state_dict().items())


def test_models_that_both_train_are_evaluated(net, batch):
    assert diff(net.train(), copy.deepcopy(net), batch).first is None


# --- weights, and models that differ by design ------------------------------------------------------------------------


def quantised(net):
    def round_weights(one):
        for module in one.modules():
            if isinstance(module, nn.Linear):
                scale = module.weight.abs().amax(1, keepdim=True) / 7
                module.weight.copy_((module.weight / scale).round() * scale)

    return changed(net, round_weights)


def test_where_all_differ_by_design_there_is_no_first_but_a_ranking(net, batch):
    found = diff(net, quantised(net), batch)
    assert found.first is None
    assert {"blocks.0.up", "head", "blocks.2", ""} <= found.by_design
    assert max(z for _, z in found.ranking) < 6
    found = diff(net, changed(quantised(net), lambda one: one.blocks[1].up.weight[:8].zero_()), batch)
    assert found.ranking[0][0] == "blocks.1.up"


def test_a_fault_in_the_code_is_found_among_quantised_weights(net, batch):
    other = quantised(net)
    other.blocks[1].forward = lambda hidden, mask=None, shift=0: Block.forward(other.blocks[1], hidden) - hidden
    assert diff(net, other, batch).first == "blocks.1"


def low_rank(net, factors):
    """Return a copy of a network whose blocks learnt by matrices of rank 2; a factor makes one of them larger."""

    def add(one):
        torch.manual_seed(5)
        for place, block in enumerate(one.blocks):
            for name in ("up", "down"):
                weight = getattr(block, name).weight
                learnt = 0.02 * torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])
                weight.add_(factors.get((place, name), 1.0) * learnt)

    return changed(net, add)


@pytest.fixture
def deep():
    torch.manual_seed(0)
    net = Net().eval()
    net.blocks = nn.ModuleList(Block(16) for _ in range(6)).eval()
    return net


@pytest.mark.parametrize("place, name", [(0, "down"), (3, "up"), (5, "up")])
def test_a_lora_that_is_scaled_is_named_and_none_without(deep, batch, place, name):
    clean, wrong = (diff(deep, low_rank(deep, factors), batch) for factors in ({}, {(place, name): 5.0}))
    assert (clean.first, clean.outlying) == (None, ())
    assert "none of them much more than its kind" in clean.sentence
    assert wrong.outlying[0] == f"blocks.{place}.{name}"
    assert wrong.weights[f"blocks.{place}.{name}.weight"].relation == "low rank"


def test_a_block_whose_training_went_wrong_is_named(deep, batch):
    def trained(one, factors):
        torch.manual_seed(6)
        for name, weight in one.named_parameters():
            weight.add_(factors.get(name.rpartition(".")[0].rpartition(".")[0], 1.0) * 0.01 * torch.randn_like(weight))

    clean = diff(deep, changed(deep, lambda one: trained(one, {})), batch)
    wrong = diff(deep, changed(deep, lambda one: trained(one, {"blocks.2": 8.0})), batch)
    assert clean.outlying == ()
    assert {name[: len("blocks.2")] for name in wrong.outlying} == {"blocks.2"}


def test_what_is_left_is_the_divergence_with_outputs_put_in_by_hand(net, batch):
    other = quantised(net)
    found = diff(net, other, batch)

    def divergence(logits):
        p, q = (values.detach().double().softmax(-1) for values in (net(**batch), logits))
        return (p * (p / q).log()).sum(-1).mean().item()

    hidden = net.embed(batch["input_ids"])
    assert found.unpatched == approx(divergence(other(**batch)), rel=1e-3)
    for place, block in enumerate(net.blocks):
        hidden = rest = block(hidden)
        for later in other.blocks[place + 1 :]:
            rest = later(rest)
        assert found.patched[f"blocks.{place}"] == approx(divergence(other.head(rest)), rel=1e-3)


def test_where_the_divergence_falls_is_said_and_not_where_there_is_none(net, batch):
    found = diff(net, changed(net, lambda one: one.blocks[1].up.weight.mul_(1.5)), batch)
    assert found.unpatched == approx(found.patched["blocks.0"], rel=1e-6)
    assert found.patched["blocks.1"] == approx(0, abs=1e-9)
    assert "is left with a's output after blocks.1, where it falls most" in found.patched_in_words()
    equal = diff(net, copy.deepcopy(net), batch)
    assert (equal.patched, equal.unpatched, equal.patched_in_words()) == ({}, None, "")
    head = diff(net, changed(net, lambda one: one.head.weight.mul_(1.5)), batch)
    assert head.patched_in_words().endswith("no block's output takes a part away")


def test_what_is_left_after_a_block_comes_from_what_follows(net, batch):
    found = diff(net, changed(quantised(net), lambda one: one.head.load_state_dict(net.head.state_dict())), batch)
    assert list(found.patched) == ["blocks.0", "blocks.1", "blocks.2"]
    assert found.outputs.kl > found.patched["blocks.0"] > found.patched["blocks.1"] > 0
    assert found.patched["blocks.2"] == approx(0.0, abs=1e-9)


def test_models_of_other_weights_without_blocks_have_no_first():
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2))
    found = nk.diff(a, b, [torch.randn(9, 6)], progress=False)
    assert (found.first, found.patched) == (None, {})


def test_one_changed_weight_is_a_fault_and_no_design(net, batch):
    found = diff(net, changed(net, lambda one: one.blocks[1].up.weight.mul_(1.1)), batch)
    assert (found.first, found.by_design) == ("blocks.1.up", frozenset())


def test_calls_of_one_module_do_not_make_its_weights_a_design():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(8, 8)

        def forward(self, x):
            state = x
            for _ in range(6):
                state = self.cell(x, state)
            return state

    torch.manual_seed(0)
    a = Recurrent()
    found = nk.diff(
        a, changed(a, lambda one: one.cell.bias_ih.add_(torch.randn(24))), [torch.randn(5, 8)], progress=False
    )
    assert (found.first, found.by_design) == ("cell", frozenset())


@pytest.mark.parametrize("relation, change", [("zero", torch.zeros_like), ("shifted", lambda bias: bias + 1)])
def test_weights_that_are_zeroed_or_shifted_everywhere_are_a_fault(net, batch, relation, change):
    other = changed(net, lambda one: [block.up.bias.copy_(change(block.up.bias)) for block in one.blocks])
    found = diff(net, other, batch)
    assert (found.first, found.weights["blocks.2.up.bias"].relation) == ("blocks.0.up", relation)


# --- numbers that are missing ---


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_module_that_gives_no_numbers_stands_out_on_either_side(net, batch, side, value):
    models = [copy.deepcopy(net), copy.deepcopy(net)]
    with torch.no_grad():
        models[side].blocks[1].up.weight[0, 0] = value
    found = diff(*models, batch)
    assert found.first == "blocks.1.up"
    assert "gives numbers that are not finite" in found.sentence
    assert found.outputs.kl == math.inf
    assert found.outputs.agreement < 1
    assert found.weights["blocks.1.up.weight"].detail == "not finite"


# --- predictions ------------------------------------------------------------------------------------------------------


def test_divergence_and_perplexity_are_those_of_the_logits(net, batch):
    other = changed(net, lambda one: one.head.weight.add_(0.1 * torch.randn(20, 16)))
    labels = torch.randint(0, 20, (6, 9))
    found = diff(net, other, {**batch, "labels": labels}).outputs
    p, q = (model(**batch).detach().double().softmax(-1) for model in (net, other))
    assert found.kl == approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-4)
    assert found.agreement == approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    right = p.gather(-1, labels[..., None]).log().mean()
    assert found.perplexity_a == approx(math.exp(-right), rel=1e-4)


def test_predictions_are_compared_over_all_batches(net, batch):
    found = nk.diff(net, copy.deepcopy(net), [batch] * 3, progress=False)
    assert (found.examples, found.outputs.predictions) == (18, 162)


# --- other names, and refusals ----------------------------------------------------------------------------------------


def renamed(net):
    other = nn.Module()
    other.table, other.layers, other.out = copy.deepcopy((net.embed, net.blocks, net.head))
    other.forward = lambda input_ids, attention_mask=None: other.out(
        other.layers[2](other.layers[1](other.layers[0](other.table(input_ids))))
    )
    return other


def test_renamed_modules_are_matched(net, batch):
    other = renamed(net)
    with torch.no_grad():
        other.layers[1].up.weight *= 1.1
    found = diff(net, other, batch, match={"embed": "table", "blocks.*": "layers.*", "head": "out"})
    assert found.first == "blocks.1.up"
    assert not found.caveats


def test_modules_that_are_fused_in_the_other_are_seen_in_the_one_around_them(net, batch):
    other = copy.deepcopy(net)
    block = other.blocks[1]
    fused = nn.Sequential(block.up, block.act, block.down)
    block.forward = lambda hidden, mask=None, shift=0: hidden + 1.01 * fused(block.norm(hidden))
    block.fused, block.up, block.down = fused, nn.Identity(), nn.Identity()
    found = diff(net, other, batch)
    assert found.first == "blocks.1"
    assert found["blocks.1.up"].missing == "it is not called in the other model"


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        return self.module(**inputs)


@pytest.mark.parametrize("match", [None, {"": "module"}])
def test_a_model_in_a_wrapper_is_found(net, batch, match):
    other = changed(net, FAULTS["blocks.1.norm"])
    assert diff(net, Wrapper(other), batch, match=match).first == "blocks.1.norm"
    if match is None:
        assert diff(Wrapper(net), other, batch).first == "module.blocks.1.norm"


class Alone(nn.Module):
    """A port whose modules are told nothing besides, and make their mask themselves."""

    def __init__(self, net, mask, shift):
        super().__init__()
        self.embed, self.head = copy.deepcopy((net.embed, net.head))
        self.blocks = nn.ModuleList(AloneBlock(block, mask, shift) for block in copy.deepcopy(net.blocks))

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class AloneBlock(nn.Module):
    def __init__(self, block, mask, shift):
        super().__init__()
        for name, module in block.named_children():
            setattr(self, name, module)
        self.mask, self.shift = mask, shift

    def forward(self, hidden):
        hidden = hidden * self.mask[..., None]
        return hidden + self.drop(self.down(self.act(self.up(self.norm(hidden))))) + self.shift


def test_a_port_is_given_the_arguments_that_it_takes(net, batch):
    batch["attention_mask"][2, 5:] = 0
    mask = batch["attention_mask"]
    transform = {"forward": lambda model, given: model(**given) if model is net else model(given["input_ids"])}
    right, wrong = (diff(net, Alone(net, mask, shift), batch, **transform) for shift in (0, 1e-3))
    assert right.first is None
    assert right["blocks.1"].local is not None
    assert wrong.first == "blocks.0"
    assert wrong["blocks.0.down"].ratio < 3


def test_other_widths_are_said_and_compared_where_they_can_be(net, batch):
    found = diff(net, Net(width=24).eval(), batch)
    assert found["embed"].missing == "it gives (6, 9, 16), and its counterpart (6, 9, 24)"
    assert found.weights["embed.weight"].detail == "(20, 16) and (20, 24)"


REFUSALS = [
    (lambda net, batch: diff(net, renamed(net), batch), InvalidValue, "match"),
    (lambda net, batch: diff(net, net, batch, match={"nothing": "embed"}), UnknownName, "match"),
    (lambda net, batch: diff(net, net, batch, match={"blocks.*": "blocks"}), InvalidValue, "match"),
    (lambda net, batch: diff(net, copy.deepcopy(net).train(), batch), InvalidValue, "b"),
    (lambda net, batch: diff(net, Net(vocabulary=30).eval(), batch), ShapeError, "b"),
    (lambda net, batch: diff(net, net, {"input_ids": batch["input_ids"] + 19}), ForwardError, "data"),
]


@pytest.mark.parametrize("call, fault, argument", REFUSALS)
def test_bad_input_is_refused(net, batch, call, fault, argument):
    with pytest.raises(fault) as refusal:
        call(net, batch)
    assert refusal.value.argument == argument
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


# --- the result -------------------------------------------------------------------------------------------------------


def test_a_result_is_saved_shown_and_drawn(net, batch, tmp_path):
    found = diff(net, changed(net, FAULTS["blocks.1.norm"]), batch)
    found.save(tmp_path / "ab.netkin")
    assert nk.load(tmp_path / "ab.netkin") == found
    assert "blocks.1.norm (LayerNorm) differs by" in " ".join(str(found).split())
    assert nk.document(found)["first"] == "blocks.1.norm"
    nk.report(found, tmp_path / "ab.html")
    assert "blocks.1.norm" in (tmp_path / "ab.html").read_text()
    nk.plot(found, path=tmp_path / "ab.png")


def test_the_page_draws_the_floor_as_a_band_and_points_that_stand_out(net, batch):
    found = diff(net, changed(net, FAULTS["blocks.1.norm"]), batch)
    chart = diff_chart(found)
    assert [line.name for line in chart.lines] == ["floor", "end to end", "local", "stands out"]
    assert [chart.names[place] for place in chart.marked] == ["blocks.0", "blocks.1", "blocks.2"]
    outstanding = {name for name, value in zip(chart.names, chart.lines[3].values, strict=True) if value is not None}
    assert outstanding == {name or "the model itself" for name in found.standing_out}
    assert chart.lines[2].values[chart.names.index("embed")] == 0.0
    assert chart.up.place(0.0) == 0.0
    equal = diff_chart(diff(net, copy.deepcopy(net), batch))
    assert [line.name for line in equal.lines] == ["floor", "end to end", "local"]


def test_the_plan_says_what_is_run_and_kept(net, batch):
    plan = nk.explain_diff(net, net, [batch], progress=False)
    assert (plan.modules, plan.unmatched, plan.examples, plan.levels, plan.blocks) == (22, 0, 6, 4, 3)
    assert "14 forward passes" in str(plan)
