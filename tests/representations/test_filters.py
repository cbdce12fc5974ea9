"""Atoms and coefficients: the layer, taking a network apart, and putting it together again."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue, UnknownName
from netkin.representations.filters import filter_matrix, leading_atoms
from refusals import refusals

SHAPES = [  # kernel, stride, padding, dilation, groups, padding mode
    (3, 1, 0, 1, 1, "zeros"),
    (3, 2, (1, 2), 1, 2, "circular"),
    ((3, 5), 1, "same", 1, 2, "zeros"),
    (3, 1, "same", 2, 1, "reflect"),
    (4, 1, "same", 1, 1, "circular"),
    (2, 1, 1, 1, 4, "replicate"),
    ((1, 3), (2, 1), "valid", 1, 1, "zeros"),
]


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2),
                         nn.Conv2d(6, 4, 1), nn.Flatten(), nn.Linear(4 * 12 * 12, 2))  # fmt: skip


def by_hand(layer):
    """Return the filters of a layer by loops, in NumPy."""
    D, alpha = layer.atoms.detach().numpy(), layer.coefficients.detach().numpy()
    W = np.zeros((layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size))
    for o in range(W.shape[0]):
        for i in range(W.shape[1]):
            for a in range(len(D)):
                W[o, i] += alpha[a, i % alpha.shape[1], o % alpha.shape[2]] * D[a]
    return W


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype, within", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_both_forms_are_the_convolution_with_the_same_filters_and_gradients(shape, fused, dtype, within):
    torch.manual_seed(1)
    kernel, stride, padding, dilation, groups, mode = shape
    how = (4, 8, kernel, stride, padding, dilation, groups, True, mode, None, dtype)
    layer, plain = nk.AtomConv2d(*how, atoms=5, fused=fused), nn.Conv2d(*how)
    with torch.no_grad():
        plain.weight.copy_(torch.from_numpy(by_hand(layer)))
        plain.bias.copy_(layer.bias)
    x = torch.randn(3, 4, 9, 11, dtype=dtype, requires_grad=True)
    found, expected = layer(x), plain(x)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=within, rtol=within)
    pull = torch.randn_like(found)
    ours = torch.autograd.grad((found * pull).sum(), [x, layer.atoms, layer.coefficients, layer.bias])
    theirs = torch.autograd.grad((expected * pull).sum(), [x, plain.weight, plain.bias])
    scale = 10 * max(float(one.abs().max()) for one in theirs)
    torch.testing.assert_close(ours[0], theirs[0], atol=within * scale, rtol=within)
    # by the chain rule: dW[o, i] = Σ_a dα[a, i, o] D[a] + α[a, i, o] dD[a]
    atoms = torch.einsum("aio,oihw->ahw", layer.coefficients.detach(), theirs[1])
    alpha = torch.einsum("ahw,oihw->aio", layer.atoms.detach(), theirs[1])
    torch.testing.assert_close(ours[1], atoms, atol=within * scale, rtol=within)
    torch.testing.assert_close(ours[2], alpha, atol=within * scale, rtol=within)
    torch.testing.assert_close(ours[3], theirs[2], atol=within * scale, rtol=within)


@pytest.mark.parametrize("fused", [True, False])
def test_one_image_and_no_images_are_taken_too(fused):
    layer = nk.AtomConv2d(4, 8, 3, atoms=2, fused=fused)
    x = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    assert layer(x[:0]).shape == (0, 8, 4, 4)


def test_a_block_of_coefficients_is_repeated_over_the_channels():
    layer = nk.AtomConv2d(8, 4, 3, atoms=3, block=(4, 2))
    assert layer.coefficients.shape == (3, 4, 2)
    torch.testing.assert_close(layer.weight.detach().double(), torch.from_numpy(by_hand(layer)), atol=1e-6, rtol=1e-6)
    two = copy.deepcopy(layer)
    two.fused = False
    x = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(two(x), layer(x), atol=1e-5, rtol=1e-5)


def test_new_filters_have_the_variance_of_an_ordinary_convolution():
    torch.manual_seed(0)
    fresh = [nk.AtomConv2d(64, 128, 3, atoms=6).weight.detach().var().item() for _ in range(40)]
    assert np.mean(fresh) == pytest.approx(nn.Conv2d(64, 128, 3).weight.detach().var().item(), rel=0.1)


def test_the_printed_layer_says_what_is_special():
    told = repr(nk.AtomConv2d(8, 4, 3, padding="same", atoms=3, bias=False, fused=False, block=(4, 2)))
    assert told == (
        "AtomConv2d(8, 4, kernel_size=(3, 3), atoms=3, padding='same', block=(4, 2), bias=False, fused=False)"
    )


@pytest.mark.parametrize("atoms", [0, -1, 2.0, True])
def test_a_strange_number_of_atoms_is_refused(atoms):
    refusals(
        (lambda: nk.AtomConv2d(3, 8, 3, atoms=atoms), InvalidValue, "atoms"),
        (lambda: nk.decompose(small_net(), atoms=atoms), InvalidValue, "atoms"),
    )


def test_kernels_of_one_number_and_blocks_that_do_not_fit_are_refused():
    with pytest.raises(InvalidValue, match="1 × 1 kernel is a single number.*use `nn.Conv2d`"):
        nk.AtomConv2d(3, 8, 1, atoms=1)
    with pytest.raises(InvalidValue, match=r"block of \(2, 3\) coefficients can't be repeated over 4 × 8 channels"):
        nk.AtomConv2d(4, 8, 3, atoms=1, block=(2, 3))


# --- decompose and recompose ------------------------------------------------------------------------------------------


def test_with_all_atoms_the_network_is_the_same_and_goes_back():
    model = small_net().eval()
    x = torch.randn(2, 3, 16, 16)
    found = nk.decompose(model)
    assert max(found.errors.values()) < 1e-6
    assert list(found.errors) == ["0", "3"]
    assert list(found.left) == ["4"]
    torch.testing.assert_close(found.model(x), model(x), atol=1e-5, rtol=1e-5)
    back = nk.recompose(found.model)
    assert [type(one) for one in back] == [type(one) for one in model]
    torch.testing.assert_close(back(x), model(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(back[3].weight, model[3].weight, atol=1e-6, rtol=1e-6)


SLOW_IMPORTS = """
import sys
import netkin as nk
from torch import nn

made = nk.decompose(nn.Sequential(nn.Conv2d(1, 4, 3))).model
nk.share_coefficients([made, nk.recompose(made)])
nk.CKASparsityLoss, nk.sparsify_tokens
assert not {"torch._dynamo", "sympy"} & set(sys.modules), "torch's compiler was loaded"
"""


@pytest.mark.slow
def test_a_network_is_taken_apart_without_loading_torchs_compiler():
    own = os.environ | {"PYTHONPATH": str(Path(nk.__file__).parents[1])}
    found = subprocess.run([sys.executable, "-c", SLOW_IMPORTS], capture_output=True, text=True, env=own)
    assert found.returncode == 0, found.stderr


def test_the_error_of_fewer_atoms_is_that_of_the_singular_values_left_out():
    model = small_net()
    found = nk.decompose(model, atoms=4)
    for name in ("0", "3"):
        W = model[int(name)].weight.detach().numpy().astype(np.float64)
        S = np.linalg.svd(W.transpose(1, 0, 2, 3).reshape(-1, 9), compute_uv=False)
        assert found.errors[name] == pytest.approx(np.sqrt((S[4:] ** 2).sum() / (S**2).sum()), rel=1e-5)
        made = found.model[int(name)]
        assert np.linalg.norm(W - by_hand(made)) / np.linalg.norm(W) == pytest.approx(found.errors[name], rel=1e-5)
        A = made.coefficients.detach().flatten(1)
        torch.testing.assert_close(A @ A.T, torch.eye(4), atol=1e-6, rtol=0)
    assert "0: 4 atoms of 3 × 3, error 0." in str(found)
    assert "4: left as it is, its kernel of 1 × 1 is a single number" in str(found)


def test_the_signs_do_not_depend_on_the_machine():
    F = torch.randn(20, 9, dtype=torch.float64)
    U, D = leading_atoms(F, 9)
    rows = (U.T @ F) / D.norm(dim=1, keepdim=True)
    assert bool((rows.gather(1, rows.abs().argmax(1, keepdim=True)) > 0).all())
    torch.testing.assert_close(U @ D, F)


def test_layers_of_atoms_keep_their_number_where_none_is_asked_for():
    torch.manual_seed(0)
    model = nn.Sequential(nk.AtomConv2d(3, 8, 3, atoms=4), nn.Conv2d(8, 4, 3))
    found = nk.decompose(model)
    assert [len(layer.atoms) for layer in found.model] == [4, 9]
    assert max(found.errors.values()) < 1e-6
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(found.model(x), model(x))


def test_few_filters_have_no_more_atoms_than_filters():
    found = nk.decompose(nn.Sequential(nn.Conv2d(1, 4, 5)))
    assert found.model[0].atoms.shape == (4, 5, 5)
    assert found.errors["0"] < 1e-6
    assert nk.decompose(nn.Sequential(nn.Conv2d(8, 8, 2)), atoms=9).model[0].atoms.shape == (4, 2, 2)


def test_the_model_given_and_the_random_state_are_left_alone():
    model = small_net().train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = nk.decompose(model, atoms=2)
    nk.recompose(found.model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert isinstance(model[0], nn.Conv2d)
    assert found.model[0].training


def test_a_half_precision_network_is_taken_apart_too():
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).bfloat16()
    found = nk.decompose(model)
    assert found.model[0].atoms.dtype == torch.bfloat16
    assert 0 < found.errors["0"] < 0.01


def test_a_module_under_two_names_stays_one():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    found = nk.decompose(nn.Sequential(conv, nn.ReLU(), conv)).model
    assert found[0] is found[2]
    assert isinstance(found[0], nk.AtomConv2d)


def test_tied_filters_stay_tied():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    model[1].weight = model[0].weight
    found = nk.decompose(model)
    assert found.left == dict.fromkeys(("0", "1"), "its filters belong to another module too")
    assert found.model[0].weight is found.model[1].weight
    assert list(found.errors) == ["2"]


def test_convolutions_that_are_more_than_that_are_left():
    hooked, normed = nn.Conv2d(3, 3, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3))
    hooked.register_forward_hook(lambda *call: None)
    found = nk.decompose(nn.Sequential(nn.Conv2d(3, 3, 3), hooked, normed, nn.ConvTranspose2d(3, 3, 3)))
    assert "hooks of its own (1)" in found.left["1"]
    assert "its weight is computed (WeightNorm)" in found.left["2"]
    assert "ConvTranspose2d" in found.left["3"]


class Doubled(nk.AtomConv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_layers_of_atoms_that_do_more_than_that_are_left_too():
    torch.manual_seed(0)
    model = nn.Sequential(nk.AtomConv2d(3, 4, 3, atoms=2), Doubled(4, 4, 3, atoms=2), nk.AtomConv2d(4, 4, 3, atoms=2))
    model[0].register_forward_hook(lambda layer, inputs, output: -output)
    x, found = torch.randn(2, 3, 9, 9), nk.decompose(model)
    assert list(found.errors) == ["2"]
    assert "hooks of its own" in found.left["0"]
    assert "it is a Doubled" in found.left["1"]
    plain = nk.recompose(model)
    assert type(plain[2]) is nn.Conv2d
    for made in (found.model, plain):
        torch.testing.assert_close(made(x), model(x))


def test_networks_without_filters_are_refused():
    refusals(
        (lambda: nk.decompose(nn.Sequential(nn.Linear(2, 2))), InvalidValue, ""),
        (lambda: nk.decompose(nn.Sequential(nn.Conv2d(3, 8, 1))), InvalidValue, ""),
        (lambda: nk.decompose(nn.Conv2d(3, 8, 3)), InvalidValue, ""),
    )
    broken = nn.Sequential(nn.Conv2d(3, 8, 3))
    broken[0].weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(InvalidValue, match="the filters of layer '0' holds 1 NaN or Inf among 216 values"):
        nk.decompose(broken)


def test_a_layer_of_zeros_has_no_error():
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    nn.init.zeros_(model[0].weight)
    found = nk.decompose(model, atoms=2)
    assert found.errors["0"] == 0
    assert not found.model[0].weight.any()


def test_atoms_alone_are_trained():
    model = nk.decompose(small_net(), atoms=4, train_only=("atoms", "6")).model
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert trained == ["0.atoms", "3.atoms", "6.weight", "6.bias"]
    before = copy.deepcopy(model.state_dict())
    x, y = torch.randn(32, 3, 16, 16), torch.arange(32) % 2
    nk.train(model, (x, y), epochs=2, batch=8, weight_decay=0.1)
    changed = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert changed == set(trained)
    with pytest.raises(UnknownName, match="no part 'atom' to be trained: name 'atoms', or layers of the model"):
        nk.freeze_except(model, "atom")
    with pytest.raises(InvalidValue, match="no atoms to be trained; `nk.decompose` makes some"):
        nk.freeze_except(small_net(), "atoms")


def test_the_matrix_of_filters_has_a_row_for_each_pair_of_channels():
    layer = nn.Conv2d(2, 3, 3)
    F = filter_matrix(layer)
    torch.testing.assert_close(F[1 * 3 + 2], layer.weight[2, 1].detach().double().flatten())


def test_what_was_frozen_stays_frozen_both_ways():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    model[0].weight.requires_grad_(False)
    made = nk.decompose(model).model
    assert [one.requires_grad for one in made[0].parameters()] == [False, False, True]
    assert all(one.requires_grad for one in made[1].parameters())
    back = nk.recompose(nk.freeze_except(made, ()))
    assert not any(one.requires_grad for one in back.parameters())
    assert [one.requires_grad for one in nk.recompose(nk.decompose(model).model).parameters()] == [
        False,
        True,
        True,
        True,
    ]


def test_networks_of_atoms_are_trained_many_at_once_like_one_by_one():
    x, y = torch.randn(24, 3, 8, 8), torch.arange(24) % 2

    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nk.AtomConv2d(3, 4, 3, atoms=3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))

    together, alone = [build(seed) for seed in (0, 1)], [build(seed) for seed in (0, 1)]
    nk.train_many(together, (x, y), epochs=2, batch=8, seeds=[0, 1], progress=False)
    for seed, model in enumerate(alone):
        nk.train(model, (x, y), epochs=2, batch=8, seed=seed, progress=False)
    for one, other in zip(together, alone, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_state_dict_and_a_copy_hold_all(tmp_path):
    layer = nk.AtomConv2d(4, 8, 3, atoms=2, block=(2, 4))
    assert list(layer.state_dict()) == ["atoms", "coefficients", "bias"]
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = nk.AtomConv2d(4, 8, 3, atoms=2, block=(2, 4))
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    x = torch.randn(1, 4, 5, 5)
    torch.testing.assert_close(other(x), layer(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))
