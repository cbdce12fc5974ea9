"""The term of the loss that keeps channels apart."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.subspaces import channel_correlation
from netkin.errors import InvalidValue, ShapeError
from refusals import refusals


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(3 * 4 * 4, 2))


def by_hand(maps):
    n, c, h, w = maps.shape
    Z = np.moveaxis(maps.detach().double().numpy(), 1, -1).reshape(n * h * w, c)
    return sum((Z[:, i] @ Z[:, j] / len(Z)) ** 2 for i in range(c) for j in range(c) if i != j)


def test_the_value_is_the_sum_over_pairs_of_channels():
    maps = torch.randn(5, 4, 3, 2, dtype=torch.float64)
    assert float(channel_correlation(maps)) == pytest.approx(by_hand(maps), rel=1e-12)
    assert float(channel_correlation(maps.repeat(3, 1, 1, 1))) == pytest.approx(by_hand(maps), rel=1e-12)
    assert float(channel_correlation(maps[..., 0, 0])) == pytest.approx(by_hand(maps[..., :1, :1]), rel=1e-12)


def test_the_papers_beta_times_the_square_of_the_rows_is_ours():
    maps, beta = torch.randn(6, 3, 4, 4, dtype=torch.float64), 3e-3
    Z = maps.movedim(1, -1).flatten(0, -2)
    gram = Z.T @ Z
    paper = beta * float((gram - gram.diag().diag()).square().sum())
    assert beta * len(Z) ** 2 * float(channel_correlation(maps)) == pytest.approx(paper)


def test_its_gradient_is_that_of_finite_differences():
    maps = torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(channel_correlation, maps)


def test_half_precision_is_raised_and_autocast_does_not_lower_it():
    maps = torch.randn(50, 4, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert float(channel_correlation(maps)) == pytest.approx(by_hand(maps), rel=1e-5)
    assert channel_correlation(maps.bfloat16()).dtype == torch.float32


def test_any_loop_adds_the_term_and_the_model_keeps_no_hooks():
    model, x = small_net(), torch.randn(8, 1, 8, 8)
    with nk.Decorrelation(model, beta=0.5) as apart:
        model(x)
        term = apart.term()
        with torch.no_grad():
            model(x)
        first = model[0](x)
        expected = 0.5 * (by_hand(first) + by_hand(model[2](torch.relu(first))))
    assert term.item() == pytest.approx(expected, rel=1e-5)
    term.backward()
    assert model[0].weight.grad.abs().sum() > 0
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    with pytest.raises(RuntimeError, match="boom"), nk.Decorrelation(model, beta=1.0):
        raise RuntimeError("boom")
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_activations_that_work_in_place_do_not_change_the_term_or_its_gradient(layout):
    x, found = torch.randn(4, 1, 8, 8).to(memory_format=layout), []
    for activation in (nn.ReLU(), nn.ReLU(inplace=True)):
        model = small_net().to(memory_format=layout)
        model[1] = activation
        with nk.Decorrelation(model, beta=1.0) as apart:
            (model(x).sum() + apart.term()).backward()
        found.append(model[0].weight.grad)
    torch.testing.assert_close(*found)


def test_training_with_it_lowers_the_correlation_of_channels():
    x, y = torch.randn(64, 1, 8, 8), torch.arange(64) % 2
    ends = {}
    for beta in (0.0, 20.0):
        model = small_net()
        with nk.Decorrelation(model, beta, layers=["2"]) as apart:
            nk.train(model, (x, y), epochs=8, batch=16, lr=0.02, hooks=[apart], test=(x, y))
        ends[beta] = channel_correlation(model[:3](x)).item()
    assert ends[20.0] < 0.3 * ends[0.0]
    plain, zero = small_net(), small_net()
    nk.train(plain, (x, y), epochs=2, batch=16)
    with nk.Decorrelation(zero, 0.0) as apart:
        nk.train(zero, (x, y), epochs=2, batch=16, hooks=[apart])
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), zero.parameters(), strict=True))


def test_atoms_are_kept_apart_too():
    model = nk.decompose(small_net(), atoms=3).model
    with nk.Decorrelation(model, 1.0) as apart:
        assert apart.names == ["0", "2"]
        model(torch.randn(2, 1, 8, 8))
        apart.term().backward()
    assert model[0].atoms.grad.abs().sum() > 0


def test_a_copy_made_inside_the_with_does_not_disturb_it():
    model = small_net()
    with nk.Decorrelation(model, 1.0) as apart:
        model(torch.randn(2, 1, 8, 8))
        value = apart.term().item()
        other = copy.deepcopy(model)
        assert value > 0
        model(torch.randn(2, 1, 8, 8))
        assert apart.term().item() > 0
    assert isinstance(other[0], nn.Conv2d)


def test_misuse_is_told():
    model = small_net()
    refusals(
        (lambda: nk.Decorrelation(model, -1), InvalidValue, "beta"),
        (lambda: nk.Decorrelation(nn.Linear(2, 2), 1.0), InvalidValue, ""),
        (lambda: nk.Decorrelation(model, 1.0).term(), InvalidValue, ""),
    )
    with nk.Decorrelation(model, 1.0) as apart, pytest.raises(InvalidValue, match="forward pass with gradients"):
        apart.term()
    with pytest.raises(ShapeError, match=r"second axis of a layer's output; got shape \(3,\)"):
        channel_correlation(torch.ones(3))
