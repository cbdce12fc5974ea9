"""Masks: exact in number, exactly zero through copies and files, and what they refuse."""

import copy
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from netkin.applications.sparsity.masks import (
    bake_masks,
    baked_state,
    epsilon_sparsity,
    mask_of,
    masked_layers,
    masks_of,
    prunable_layers,
    put_masks,
    save_sparse,
)
from netkin.applications.sparsity.sparsify import layer_counts, sparsify
from netkin.applications.sparsity.sparsity_study import linear_costs
from netkin.errors import EmptyLayerWarning, FileError, InvalidValue, ShapeError, UnknownName
from netkin.representations.layers import choose, layers
from netkin.sources import load_model
from quickly import slow_after
from refusals import refusals, refused
from sparsity_worlds import labelled, net, zeros_hold


@pytest.mark.parametrize("method", slow_after(2, ["uniform", "erk", "magnitude", "snip", "grasp", "synflow"]))
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.98])
def test_sparsity_is_exact_to_one_weight(method, sparsity):
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyLayerWarning)
        table = sparsify(model, sparsity, method=method, data=labelled())
    total = sum(model[k].weight.numel() for k in (0, 4, 7))
    kept = sum(int((model[k].weight != 0).sum()) for k in (0, 4, 7))
    assert total == 594
    assert kept == total - round(sparsity * total) == table.left
    assert table.weights == total
    assert table.sparsity == pytest.approx(1 - kept / total)
    assert [row.left for row in table.layers] == [int((model[k].weight != 0).sum()) for k in (0, 4, 7)]
    assert table.dense_parameters == 8 + 16 + 6 + 3
    assert "33 other parameters (biases, norms" in str(table)


def test_a_resnet_is_pruned_at_random_to_998_thousandths():
    model = load_model("netkin:resnet20")
    before = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyLayerWarning)
        table = sparsify(model, 0.998)
    counted = [module for module in before.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    total = sum(module.weight.numel() for module in counted)
    assert len(table.layers) == len(counted)
    assert table.left == total - round(0.998 * total)


# --- layer ratios -----------------------------------------------------------------------------------------------------


def slow_erk(shapes, density):
    """ERK as in its authors' code, with a density for each layer: Evci et al. (2020), Section 3 and Appendix."""
    dense = set()
    while True:
        divisor, right, raw = 0.0, 0.0, {}
        for name, shape in shapes.items():
            size = 1
            for one in shape:
                size *= one
            if name in dense:
                right -= size * (1 - density)
            else:
                right += size - (size - size * density)
                raw[name] = sum(shape) / size
                divisor += raw[name] * size
        epsilon = right / divisor
        if max(raw.values()) * epsilon <= 1:
            return {name: 1.0 if name in dense else epsilon * raw[name] for name in shapes}
        dense |= {name for name in raw if raw[name] == max(raw.values())}


@pytest.mark.parametrize("kept", [3, 60, 700, 4000, 12_000])
def test_erk_is_that_of_its_authors_up_to_rounding(kept):
    shapes = {"stem": (16, 3, 3, 3), "conv": (32, 16, 3, 3), "wide": (64, 128), "head": (10, 64)}
    sizes = {"stem": 432, "conv": 4608, "wide": 8192, "head": 640}
    counts = layer_counts(shapes, kept, "erk")
    expected = slow_erk(shapes, kept / sum(sizes.values()))
    assert sum(counts.values()) == kept
    assert all(abs(counts[name] - expected[name] * sizes[name]) < 1 for name in shapes)


def test_erk_and_uniform_where_the_answer_is_known():
    shapes = {"a": (10, 10), "b": (100, 100)}
    assert layer_counts(shapes, 440, "erk") == {"a": 40, "b": 400}  # in proportion to 20 and 200
    assert layer_counts(shapes, 2200, "erk") == {"a": 100, "b": 2100}  # a has no more than 100
    assert layer_counts(shapes, 1010, "uniform") == {"a": 10, "b": 1000}
    assert layer_counts({"a": (3, 1), "b": (3, 1), "c": (3, 1)}, 4, "uniform") == {"a": 2, "b": 1, "c": 1}
    assert layer_counts(shapes, 10_100, "erk") == {"a": 100, "b": 10_000}


def test_random_masks_follow_the_seed_alone():
    first, same, other = net(), net(3), net()
    for model, seed in ((first, 1), (same, 1), (other, 2)):
        sparsify(model, 0.8, seed=seed)
    a, b, c = masks_of(first), masks_of(same), masks_of(other)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


def test_magnitude_keeps_the_largest_over_all_layers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.data = torch.tensor([[1.0, -8.0], [3.0, 4.0]])
    model[1].weight.data = torch.tensor([[0.5, 7.0], [-6.0, 2.0]])
    sparsify(model, 0.5, method="magnitude")
    assert model[0].weight.tolist() == [[0, -8], [0, 4]]
    assert model[1].weight.tolist() == [[0, 7], [-6, 0]]


# --- copies and files -------------------------------------------------------------------------------------------------


def test_masks_travel_with_copies_and_state_dicts():
    model, fresh = net(), net(5)
    sparsify(model, 0.9)
    pairs = zip(masks_of(model).values(), masks_of(copy.deepcopy(model)).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    sparsify(fresh, 0.5)
    fresh.load_state_dict(model.state_dict())
    assert zeros_hold(fresh)
    inputs = labelled()[0]
    assert torch.equal(fresh.eval()(inputs), model.eval()(inputs))


def test_baked_masks_are_plain_zeros_under_the_plain_names():
    model = net()
    names, inputs = list(model.state_dict()), labelled()[0]
    sparsify(model, 0.9)
    outputs = model.eval()(inputs)
    state = baked_state(model)
    assert sorted(state) == sorted(names)
    assert bake_masks(model) is model
    assert list(model.state_dict()) == names
    assert not masked_layers(model)
    assert torch.equal(model(inputs), outputs)
    assert isinstance(model[0].weight, nn.Parameter)
    assert all(torch.equal(state[name], one) for name, one in model.state_dict().items())
    assert type(model[0]) is nn.Conv2d


def test_baking_a_copy_leaves_the_model_whole():
    """Torch deletes `weight` from a class that copies share."""
    model = net()
    sparsify(model, 0.9)
    copied = bake_masks(copy.deepcopy(model))
    assert torch.equal(model[0].weight, copied[0].weight)
    assert zeros_hold(model)
    assert not masked_layers(copied)


@pytest.mark.slow
def test_a_saved_sparse_model_is_small_and_loads_without_netkin(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 10))
    sparsify(model, 0.95)
    save_sparse(model, tmp_path / "sparse.pt")
    torch.save(baked_state(model), tmp_path / "dense.pt")
    assert os.path.getsize(tmp_path / "sparse.pt") < 0.1 * os.path.getsize(tmp_path / "dense.pt")
    torch.save(model(torch.ones(2, 300)), tmp_path / "outputs.pt")
    program = (
        "import sys, torch; from torch import nn;"
        "model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 10));"
        "model.load_state_dict(torch.load(sys.argv[1], weights_only=True));"
        "assert torch.equal(model(torch.ones(2, 300)), torch.load(sys.argv[2]));"
        "assert not any(name.startswith('netkin') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "sparse.pt", tmp_path / "outputs.pt"], check=True)
    assert zeros_hold(model)
    with pytest.raises(FileError, match=r"would write over .*sparse.pt.*overwrite=True"):
        save_sparse(model, tmp_path / "sparse.pt")
    save_sparse(model, tmp_path / "sparse.pt", overwrite=True)


def test_netkin_loads_a_saved_sparse_model(tmp_path):
    model = load_model("netkin:tiny10")
    sparsify(model, 0.9)
    save_sparse(model, tmp_path / "sparse.pt")
    again = load_model(f"netkin:tiny10@{tmp_path / 'sparse.pt'}")
    assert all(torch.equal(baked_state(model)[name], one) for name, one in again.state_dict().items())


def test_layers_of_a_masked_model_have_the_names_of_the_dense_one():
    for make in (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), lambda: load_model("netkin:resnet20"), net):
        dense, sparse = make(), make()
        sparsify(sparse, 0.5)
        assert layers(sparse) == layers(dense)
        assert choose(sparse, "*") == choose(dense, "*")
        assert choose(sparse, "Linear") == choose(dense, "Linear")


def test_a_masked_container_of_layers_is_a_container_still():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            self.end = nn.Linear(3, 2)

        def forward(self, x):
            return self.end(self.body(x))

    dense, sparse = Head(), Head()
    sparsify(sparse, 0.5)
    assert layers(sparse) == layers(dense) == ["body.0", "body.1", "end"]


def test_a_masked_transformer_gives_the_same_by_its_fast_path():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    table = sparsify(model, 0.7)
    assert [row.layer for row in table.layers] == ["self_attn.out_proj", "linear1", "linear2"]
    inputs = torch.randn(3, 5, 16)
    slow = model.train()(inputs)
    with torch.no_grad():
        assert torch.allclose(model.eval()(inputs), slow, atol=1e-6)
    assert torch.allclose(bake_masks(model)(inputs), slow, atol=1e-6)


def test_a_masked_model_moves_to_other_precisions():
    model = net()
    sparsify(model, 0.9)
    masks = masks_of(model)
    for dtype in (torch.float64, torch.bfloat16):
        model.to(dtype)
        assert model[0].weight.dtype == dtype
        assert all(torch.equal(mask, masks[name]) for name, mask in masks_of(model).items())
        assert zeros_hold(model)


# --- pruning further, and refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["magnitude", "snip", "synflow", "uniform"])
def test_a_masked_model_is_pruned_further(method):
    model = net()
    sparsify(model, 0.5, method="uniform")
    before = masks_of(model)
    table = sparsify(model, 0.8, method=method, data=labelled(), seed=9)
    assert table.left == 594 - round(0.8 * 594)
    assert all(not bool((mask & ~before[name]).any()) for name, mask in masks_of(model).items())


def test_less_sparsity_than_there_is_is_refused():
    model = net()
    sparsify(model, 0.9)
    refusals(
        (lambda: sparsify(model, 0.5), InvalidValue, "sparsity"),
        (lambda: sparsify(magnitude_without_head(), 0.9, method="uniform"), InvalidValue, "sparsity"),
    )


def magnitude_without_head():
    model = net()
    masks = {str(k): torch.ones_like(model[k].weight, dtype=torch.bool) for k in (0, 4, 7)}
    masks["7"][:] = False
    put_masks(model, masks)
    return model


def test_emptied_layers_are_named():
    model = net()
    with torch.no_grad():
        model[4].weight.mul_(1e-6)
    with pytest.warns(EmptyLayerWarning, match="no weight is left in 1 of 3 layers: 4;"):
        table = sparsify(model, 0.8, method="magnitude")
    assert table.emptied == ("4",)
    assert "no weight is left in 4" in str(table)


@pytest.mark.parametrize("sparsity", [-0.1, 1, 1.0, 1.5, float("nan"), True, "0.5"])
def test_a_sparsity_outside_its_range_is_refused(sparsity):
    with refused(InvalidValue, "sparsity"):
        sparsify(net(), sparsity)


def test_a_sparsity_that_leaves_nothing_is_told_with_its_digits():
    refusals(
        (lambda: sparsify(net(), 0.99999), InvalidValue, "sparsity"),
        (lambda: sparsify(net(), 0.9999999), InvalidValue, "sparsity"),
    )


def test_numbers_of_numpy_are_numbers():
    assert sparsify(net(), np.float32(0.5)).left == 297
    assert 0 < epsilon_sparsity(net(), np.float32(0.05)) < 1


def test_what_cannot_be_pruned_is_refused_in_a_sentence():
    refusals(
        (lambda: sparsify(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)), 0.5), InvalidValue, ""),
        (lambda: sparsify(net(), 0.5, layers="1"), InvalidValue, ""),
        (lambda: sparsify(nn.Linear(2, 2), 0.99), InvalidValue, "sparsity"),
        (lambda: sparsify(net(), 0.5, method="erkk"), UnknownName, "method"),
        (lambda: sparsify(net(), 0.5, examples=0), InvalidValue, "examples"),
    )


def test_weights_that_are_computed_or_shared_are_refused():
    normed, pruned = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))), nn.Sequential(nn.Linear(4, 4))
    prune.random_unstructured(pruned[0], "weight", 0.5)
    for model in (normed, pruned):
        with pytest.raises(InvalidValue, match="the weight of layer '0' is computed by something else already"):
            sparsify(model, 0.5)
    tied = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    tied[1].weight = tied[0].weight
    with pytest.raises(InvalidValue, match=r"layer '1' is shared as '0.weight' and '1.weight'"):
        sparsify(tied, 0.5)
    assert not masked_layers(tied)


def test_masks_of_other_shapes_or_layers_are_refused():
    with pytest.raises(ShapeError, match=r"shape of its weight, \(3, 6\); got \(6, 3\)"):
        put_masks(net(), {"7": torch.ones(6, 3, dtype=torch.bool)})
    with pytest.raises(InvalidValue, match="layer '1' is a BatchNorm2d; masks go on"):
        put_masks(net(), {"1": torch.ones(8, dtype=torch.bool)})


def test_chosen_layers_alone_are_pruned():
    model = net()
    table = sparsify(model, 0.5, layers="Conv2d")
    assert [row.layer for row in table.layers] == ["0", "4"]
    assert mask_of(model[7]) is None
    assert list(prunable_layers(model)) == ["0", "4", "7"]


def test_one_module_under_two_names_is_masked_once():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert sparsify(model, 0.5).weights == 16
    assert int((shared.weight != 0).sum()) == 8
    assert list(masked_layers(model)) == ["0"]


def test_nothing_is_masked_where_one_layer_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(InvalidValue, match="layer '1'"):
        sparsify(model, 0.5)
    assert not masked_layers(model)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["magnitude", "snip", "grasp", "synflow"])
def test_scores_on_a_gpu_choose_the_weights_of_the_cpu(method):
    here, there = net(0, torch.float64), net(0, torch.float64).cuda()
    for model in (here, there):
        sparsify(model, 0.5, method=method, data=labelled())
    pairs = zip(masks_of(here).values(), masks_of(there).values(), strict=True)
    assert sum(int((a != b.cpu()).sum()) for a, b in pairs) <= 2  # ties at rounding


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sparse_model_is_saved_from_a_gpu_and_its_formats_are_measured(tmp_path):
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)).cuda()
    sparsify(model, 0.9)
    save_sparse(model, tmp_path / "sparse.pt")
    assert all(one.device.type == "cpu" for one in torch.load(tmp_path / "sparse.pt").values())
    costs = linear_costs(model)
    assert [row.format for row in costs] == ["CSR", "2:4"] * 2
    assert all(row.reason or row.error < 1e-2 for row in costs)
    assert any(not row.reason for row in costs if row.format == "CSR")
