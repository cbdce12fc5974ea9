"""How weights of one model follow from those of another: what each change is called, and what nulls are not."""

import copy

import pytest
import torch
from torch import nn

import netkin as nk

NF4 = torch.tensor([-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407,
                    0.5626, 0.723, 1])  # fmt: skip
KINDS = ("float32", "bfloat16", "float16")


def drawn(*shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_grid(weight, bits, group=None):
    """Round to whole steps, as many on both sides of zero, with a scale for each group."""
    rows = weight.reshape(-1, group or weight.shape[1])
    scale = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((rows / scale).round() * scale).reshape(weight.shape)


def with_offset(weight, bits, group):
    """Round to whole steps from the least value of each group."""
    rows = weight.reshape(-1, group)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return (((rows - low) / step).round() * step + low).reshape(weight.shape)


def from_codebook(weight, group):
    rows = weight.reshape(-1, group)
    scale = rows.abs().amax(1, keepdim=True)
    return (NF4[((rows / scale)[..., None] - NF4).abs().argmin(-1)] * scale).reshape(weight.shape)


def as_eight_bit_floats(weight, dtype, scale):
    scale = scale / torch.finfo(dtype).max
    return (weight / scale).to(dtype).float() * scale


def two_in_four(weight):
    groups = weight.reshape(-1, 4)
    kept = groups.abs().argsort(1)[:, 2:]
    return torch.zeros_like(groups).scatter(1, kept, groups.gather(1, kept)).reshape(weight.shape)


def low_rank(rank, size=3e-3):
    return size * drawn(96, rank, seed=1) @ drawn(rank, 128, seed=2)


def relation(first, second):
    """Return what a diff says of a weight in modules that compute nothing with it."""
    a, b = nn.Module(), nn.Module()
    a.weight, b.weight = nn.Parameter(first), nn.Parameter(second)
    a.forward = b.forward = lambda x: x
    return nk.diff(a, b, [torch.ones(2, 2)], progress=False).weights["weight"]


CHANGES = {
    "8 bits for the whole": (lambda w: on_grid(w, 8, w.numel()), "quantised", "8 bits"),
    "8 bits by rows": (lambda w: on_grid(w, 8), "quantised", "8 bits, a scale per row"),
    "8 bits by columns": (lambda w: on_grid(w.T, 8).T, "quantised", "8 bits, a scale per column"),
    "4 bits": (lambda w: on_grid(w, 4, 32), "quantised", "4 bits, in groups of 32"),
    "4 bits from the least": (lambda w: with_offset(w, 4, 32), "quantised", "4 bits, in groups of 32"),
    "3 bits": (lambda w: on_grid(w, 3, 64), "quantised", "3 bits, in groups of 64"),
    "2 bits": (lambda w: on_grid(w, 2), "quantised", "2 bits, a scale per row"),
    "a codebook": (
        lambda w: from_codebook(w, 64), "quantised", "4 bits, a codebook of 16 values, in groups of 64"
    ),
    "8-bit floats": (
        lambda w: as_eight_bit_floats(w, torch.float8_e4m3fn, w.abs().max()), "quantised", "8 bits (float8_e4m3fn)"
    ),
    "8-bit floats by rows": (
        lambda w: as_eight_bit_floats(w, torch.float8_e5m2, w.abs().amax(1, keepdim=True)),
        "quantised",
        "8 bits (float8_e5m2), a scale per row",
    ),
    "scaled": (lambda w: w * 0.5, "scaled", "0.5"),
    "turned round": (lambda w: -w, "scaled", "-1"),
    "pruned": (lambda w: w * (w.abs() > w.abs().quantile(0.25)), "sparse", "25.0% zeros"),
    "two of four pruned": (two_in_four, "sparse", "50.0% zeros, 2:4"),
    "LoRA of rank 1": (lambda w: w + low_rank(1), "low rank", "rank 1"),
    "LoRA of rank 8": (lambda w: w + low_rank(8), "low rank", "rank 8"),
    "LoRA of rank 32": (lambda w: w + low_rank(32), "low rank", "rank 32"),
    "rows in another order": (lambda w: w.flip(0), "permuted", "96 of 96 rows"),
    "two columns exchanged": (lambda w: w[:, [1, 0, *range(2, 128)]], "permuted", "2 of 128 columns"),
    "one row": (lambda w: torch.cat([w[:1] + 1.0, w[1:]]), "low rank", "rank 1"),
    "a random change": (lambda w: w + 1e-3 * drawn(96, 128, seed=3), "changed", ""),
    "a random change beside a LoRA": (lambda w: w + low_rank(2) + 1e-3 * drawn(96, 128, seed=3), "changed", ""),
    "another seed": (lambda w: 0.02 * drawn(96, 128, seed=4), "changed", ""),
    "values near one": (lambda w: 1 + 0.01 * drawn(96, 128, seed=4), "changed", ""),
    "few zeros": (lambda w: w * (torch.arange(128) > 0), "changed", "96 of 12,288 values zeroed"),
    "all zero": (lambda w: 0 * w, "zero", ""),
    "pruned and trained": (
        lambda w: two_in_four(w) * (1 + 0.01 * drawn(96, 128, seed=5)), "changed", "50.0% zeros, 2:4"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_weights_is_called_what_it_is_in_any_type(change, kind):
    changed, wanted, detail = CHANGES[change]
    dtype = getattr(torch, kind)
    weight = (0.02 * drawn(96, 128)).to(dtype)
    found = relation(weight, changed(weight.float()).to(dtype))
    assert found.relation == wanted
    if wanted == "scaled":
        assert float(found.detail) == pytest.approx(float(detail), rel=1e-3)
    else:
        assert found.detail == detail


CASTS = {
    "down": (torch.float32, torch.bfloat16, "float32 to bfloat16"),
    "up": (torch.bfloat16, torch.float32, "bfloat16 to float32"),
    "across": (torch.bfloat16, torch.float16, "bfloat16 to float16"),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_is_no_quantisation(cast):
    before, after, detail = CASTS[cast]
    weight = (0.02 * drawn(96, 128)).to(before)
    found = relation(weight, weight.to(after))
    assert (found.relation, found.detail) == ("cast", detail)


def test_a_checkpoint_that_went_through_another_type_is_cast():
    weight = 0.02 * drawn(96, 128)
    found = relation(weight, weight.bfloat16().float())
    assert (found.relation, found.detail) == ("cast", "through bfloat16")
    found = relation(weight, weight.to(torch.float8_e4m3fn).float())
    assert (found.relation, found.detail) == ("quantised", "8 bits (float8_e4m3fn), no scale")


@pytest.mark.parametrize("rank", [2, 16])
def test_a_lora_that_was_merged_before_rounding_has_its_rank(rank):
    weight = 0.02 * drawn(96, 128)
    found = relation(weight, (weight + low_rank(rank)).bfloat16())
    assert (found.relation, found.detail) == ("low rank", f"rank {rank}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (4, 40), (8, 8), (64,)])
def test_random_changes_of_small_tensors_are_nothing_special(shape, kind):
    for seed in range(3):
        weight = 0.1 * drawn(*shape, seed=seed)
        changed = weight * 1.1 + 0.05 * drawn(*shape, seed=99)
        assert relation(weight.to(getattr(torch, kind)), changed.to(getattr(torch, kind))).relation == "changed"


def block(width=16):
    return nn.ModuleDict({"up": nn.Linear(width, width), "down": nn.Linear(width, width)})


def test_tensors_that_are_renamed_gone_new_transposed_and_tied_are_said_to_be():
    torch.manual_seed(0)
    a, b = nn.Module(), nn.Module()
    a.layers, b.blocks = nn.ModuleList([block()]), nn.ModuleList([block()])
    b.blocks[0].load_state_dict(a.layers[0].state_dict())
    b.blocks[0]["up"].bias = None
    b.blocks[0]["down"].scale = nn.Parameter(torch.ones(3))
    a.embed, a.head, a.fused = nn.Embedding(9, 16), nn.Linear(16, 9, bias=False), nn.Linear(16, 8, bias=False)
    a.head.weight = a.embed.weight
    b.embed, b.head, b.fused = copy.deepcopy(a.embed), nn.Linear(16, 9, bias=False), nn.Module()
    b.head.weight = nn.Parameter(a.embed.weight.detach().clone())
    b.fused.weight = nn.Parameter(a.fused.weight.detach().T.contiguous())
    a.forward = b.forward = lambda x: x
    found = nk.diff(a, b, [torch.ones(2, 2)], match={"layers": "blocks"}, progress=False)
    said = {name: (one.relation, one.detail) for name, one in found.weights.items()}
    assert said == {
        "layers.0.up.weight": ("equal", ""), "layers.0.up.bias": ("gone", ""), "layers.0.down.weight": ("equal", ""),
        "layers.0.down.bias": ("equal", ""), "blocks.0.down.scale": ("new", ""), "embed.weight": ("equal", ""),
        "head.weight": ("equal", "tied to embed.weight in a alone"), "fused.weight": ("transposed", ""),
    }  # fmt: skip
    assert "6 equal" not in found.weights_in_words()
    assert "1 transposed" in found.weights_in_words()


def test_packed_weights_have_their_bits():
    a, b = nn.Module(), nn.Module()
    for name, packed in (("eight", torch.ones(8, 16, dtype=torch.int8)), ("four", torch.ones(8, 8, dtype=torch.uint8))):
        a.register_buffer(name, drawn(8, 16))
        b.register_buffer(name, packed)
    a.forward = b.forward = lambda x: x
    found = nk.diff(a, b, [torch.ones(2, 2)], progress=False).weights
    assert {name: (one.relation, one.detail) for name, one in found.items()} == {
        "eight": ("quantised", "8 bits, kept as int8"),
        "four": ("quantised", "4 bits, kept as uint8"),
    }


@pytest.mark.parametrize("merged", [False, True])
def test_an_adapter_is_a_change_of_low_rank(merged):
    peft = pytest.importorskip("peft", reason="needs the extra netkin[peft]")
    net = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    adapted = peft.get_peft_model(copy.deepcopy(net), peft.LoraConfig(r=3, target_modules=["2"]))
    with torch.no_grad():
        adapted.base_model.model[2].lora_B["default"].weight.copy_(0.1 * drawn(32, 3))
    other = adapted.get_base_model()
    if merged:
        other[2].merge()
    found = nk.diff(net, other.eval(), drawn(9, 32), progress=False)
    relations = {name: (one.relation, one.detail) for name, one in found.weights.items()}
    equal = dict.fromkeys(["0.weight", "0.bias", "2.bias"], ("equal", ""))
    assert relations == equal | {"2.weight": ("low rank", "rank 3")}
    assert not any("no counterpart" in one.sentence for one in found.caveats)
