"""A layer restricted to few directions or neurons."""

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue, ShapeError, UnknownName

LIVE = 3


def linear(weight):
    """Return a linear layer with the given weights and a random bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data = torch.as_tensor(weight, dtype=torch.float32)
    return layer


class Maps(nn.Module):
    """A convolution and a head over all its places."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.fc = nn.Linear(6 * 16, 3)

    def forward(self, images):
        return self.fc(self.conv(images).flatten(1))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def data():
    return torch.randn(300, 5)


@pytest.fixture
def live(worlds):
    """A net whose hidden layer of 12 neurons has exactly `LIVE` live directions."""
    first = linear(worlds.normal(12, LIVE) @ worlds.normal(LIVE, 5))
    return nn.Sequential(first, nn.Identity(), nn.Linear(12, 4))


@pytest.fixture
def rotated(worlds):
    """Two nets whose hidden layers are rotations of each other, and which give the same."""
    first, head = nn.Linear(5, 8), nn.Linear(8, 3)
    turn = torch.tensor(worlds.rotation(8), dtype=torch.float32)
    turned, turned_head = linear(turn @ first.weight.detach()), linear(head.weight.detach() @ turn.mT)
    turned.bias.data, turned_head.bias.data = turn @ first.bias.detach(), head.bias.detach().clone()
    return nn.Sequential(first, head), nn.Sequential(turned, turned_head)


def refused(kind, match, model, layer, directions, k=None):
    """See that a projection is refused before the model runs."""
    with pytest.raises(kind, match=match), nk.project(model, layer, directions, k):
        pass


def output(model, layer, directions, k, data):
    with torch.no_grad(), nk.project(model, layer, directions, k):
        return model(data)


def test_as_many_directions_as_are_live_change_nothing(live, data):
    found = nk.model_directions(live, "1", live, "1", data, variance=1.0)
    assert found.x.kept == LIVE
    torch.testing.assert_close(output(live, "1", found, LIVE, data), live(data).detach(), atol=1e-6, rtol=0)
    fewer = output(live, "1", found, LIVE - 1, data)
    assert float((fewer - live(data).detach()).abs().max()) > 1e-2


def test_new_examples_are_left_alone_too(live, data):
    """Directions found on some examples hold the whole layer if it has no others."""
    found = nk.model_directions(live, "1", live, "1", data, variance=1.0)
    fresh = 10 * torch.randn(50, 5) + 3
    torch.testing.assert_close(output(live, "1", found, None, fresh), live(fresh).detach(), atol=1e-5, rtol=1e-5)


def test_directions_found_with_the_logits_hold_the_logits(data):
    """4 logits of a linear head are 4 directions of the 12-wide layer before it, though it has 5 live ones."""
    model = nn.Sequential(nn.Linear(5, 12), nn.Linear(12, 4))
    found = nk.model_directions(model, "0", data=data, variance=1.0)
    assert (len(found.correlations), found.x.kept) == (4, 5)
    torch.testing.assert_close(output(model, "0", found, 4, data), model(data).detach(), atol=1e-5, rtol=0)
    assert float((output(model, "0", found, 3, data) - model(data).detach()).abs().max()) > 1e-2


def test_rotated_nets_have_the_same_directions_and_lose_the_same(rotated, data):
    a, b = rotated
    torch.testing.assert_close(a(data), b(data), atol=1e-5, rtol=1e-5)
    found = nk.model_directions(a, "0", b, data=data, variance=1.0)
    torch.testing.assert_close(found.correlations, torch.ones(5, dtype=torch.float64), atol=1e-6, rtol=0)
    for k in range(1, 6):
        lost = [output(model, "0", side, k, data) for model, side in ((a, found.x), (b, found.y))]
        torch.testing.assert_close(*lost, atol=1e-4, rtol=1e-4)


def test_the_layer_becomes_what_the_formula_says(data, worlds):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
    other = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
    found = nk.model_directions(model, "1", other, data=data)
    X = model(data).detach().double().numpy()
    mean, Z = X.mean(0), found.x.directions(X).numpy()[:, :3]
    expected = mean + Z @ np.linalg.lstsq(Z, X - mean, rcond=None)[0]
    np.testing.assert_allclose(output(model, "1", found, 3, data), expected, atol=1e-6)
    np.testing.assert_allclose(output(model, "1", found.x, 3, data), expected, atol=1e-6)


def test_without_k_all_directions_are_used(data):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
    found = nk.model_directions(model, "1", data=data)
    assert torch.equal(output(model, "1", found, None, data), output(model, "1", found, found.x.kept, data))


# --- what an output may be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["positions", "pool"])
def test_channels_of_a_map_are_projected_at_each_place(shape):
    model, images = Maps(), torch.randn(80, 2, 4, 4)
    found = nk.model_directions(model, "conv", Maps(), data=images, shape=shape, variance=0.8)
    with torch.no_grad():
        maps = model.conv(images).double()
        encode, decode = found.x.projection(2)
        mean = found.x.mean
        expected = torch.stack([mean + (maps[:, :, i, j] - mean) @ encode @ decode for i in range(4) for j in range(4)])
        expected = expected.permute(1, 2, 0).reshape(80, -1).float()
    with nk.project(model, "conv", found, 2), nk.recording(model, "conv") as outputs:
        model(images)
    torch.testing.assert_close(outputs["conv"].detach().flatten(1), expected, atol=1e-5, rtol=1e-5)
    assert outputs["conv"].shape == (80, 6, 4, 4)


def test_a_flattened_map_is_projected_as_a_whole():
    model, images = Maps(), torch.randn(300, 2, 4, 4)
    found = nk.model_directions(model, "conv", data=images, shape="flatten", variance=1.0)
    assert found.x.width == 96
    with nk.project(model, "conv", found, 3):
        few = model(images)
    torch.testing.assert_close(few, model(images), atol=1e-4, rtol=0)  # three logits of a linear head


def test_tokens_are_projected_one_by_one():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    tokens = torch.randn(40, 7, 4)
    found = nk.model_directions(model, "1", data=tokens, shape="tokens")
    each = output(model, "1", found, 2, tokens)
    torch.testing.assert_close(each.flatten(0, 1), output(model, "1", found, 2, tokens.flatten(0, 1)))


def test_an_output_in_parts_keeps_its_other_parts():
    model = nn.LSTM(3, 5, batch_first=True)
    text = torch.randn(60, 6, 3)
    wrapped = nn.Sequential(model)
    found = nk.model_directions(wrapped, "0", data=text, shape="tokens")
    with nk.project(wrapped, "0", found, 1):
        states, (hidden, _) = wrapped(text)
    assert torch.linalg.matrix_rank(states.detach().flatten(0, 1) - found.x.mean.float(), atol=1e-4) == 1
    assert torch.equal(hidden, model(text)[1][0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_output_keeps_its_precision(data, dtype):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh()).to(dtype)
    found = nk.model_directions(model, "1", data=data)
    assert output(model, "1", found, 3, data.to(dtype)).dtype == dtype


# --- politeness -------------------------------------------------------------------------------------------------------


def test_the_model_is_itself_again_afterwards(data):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    found, before = nk.model_directions(model, "1", data=data), model(data)
    with pytest.raises(RuntimeError), nk.project(model, "1", found, 2):
        model(torch.ones(1, 999))
    assert torch.equal(model(data), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.training


def test_gradients_pass_through(data):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    with nk.project(model, "1", nk.model_directions(model, "1", data=data), 2):
        model(data).sum().backward()
    assert float(model[0].weight.grad.abs().max()) > 0


# --- neurons ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def layer(data):
    """A net of one layer, its rows and its directions."""
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
    return model, model(data).detach().double().numpy(), nk.model_directions(model, "1", data=data, variance=1.0)


@pytest.mark.parametrize("choose", [nk.random_neurons, nk.largest_neurons])
def test_chosen_units_stay_and_others_rest_at_their_mean(layer, data, choose):
    model, X, found = layer
    neurons = choose(found, 3)
    given = output(model, "1", neurons, None, data).numpy()
    assert len(neurons.chosen) == 3
    for unit in range(8):
        expected = X[:, unit] if unit in neurons.chosen else np.full(len(X), X[:, unit].mean())
        np.testing.assert_allclose(given[:, unit], expected, atol=1e-6)


@pytest.mark.parametrize("choose", [nk.random_neurons, nk.largest_neurons])
def test_other_units_may_be_predicted_from_the_chosen(layer, data, choose):
    model, X, found = layer
    neurons = choose(found, 3, rest="predicted")
    Xc = X - X.mean(0)
    chosen = Xc[:, list(neurons.chosen)]
    expected = X.mean(0) + chosen @ np.linalg.lstsq(chosen, Xc, rcond=None)[0]
    np.testing.assert_allclose(output(model, "1", neurons, None, data), expected, atol=1e-5)


def test_dead_and_doubled_units_can_be_predicted_from(worlds):
    X = worlds.with_idle_units(60, 4)
    found = nk.svcca_directions(X, X)
    neurons = nk.largest_neurons(found, 7, rest="predicted")
    np.testing.assert_allclose(
        (X - X.mean(0)) @ neurons.encode.numpy() @ neurons.decode.numpy(), X - X.mean(0), atol=1e-9
    )


def test_units_of_largest_activation_are_those_of_largest_mean_square(layer):
    _, X, found = layer
    expected = np.argsort(-(X**2).mean(0), kind="stable")[:4]
    assert set(nk.largest_neurons(found, 4).chosen) == set(expected)


def test_units_of_a_wide_layer_are_sized_and_predicted(worlds):
    X = worlds.normal(30, 50) * np.linspace(1, 2, 50) + worlds.normal(50)
    with pytest.warns(nk.InflatedWarning):
        found = nk.svcca_directions(X, X)
    neurons = nk.largest_neurons(found, 5, rest="predicted")
    assert set(neurons.chosen) == set(np.argsort(-(X**2).mean(0))[:5])
    Xc = X - X.mean(0)
    chosen = Xc[:, list(neurons.chosen)]
    expected = chosen @ np.linalg.lstsq(chosen, Xc, rcond=None)[0]
    np.testing.assert_allclose(Xc @ neurons.encode.numpy() @ neurons.decode.numpy(), expected, atol=1e-8)


def test_chance_is_seeded(layer):
    _, _, found = layer
    assert nk.random_neurons(found, 4).chosen == nk.random_neurons(found, 4).chosen
    drawn = {nk.random_neurons(found, 4, generator=torch.Generator().manual_seed(seed)).chosen for seed in range(9)}
    assert len(drawn) > 3
    before = torch.get_rng_state()
    nk.random_neurons(found, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_aligned_units_are_kept_of_the_projected_layer(layer, data):
    model, X, found = layer
    neurons = nk.aligned_neurons(found, k=3, m=4)
    projected = output(model, "1", found, 3, data).double().numpy()
    spread = projected.var(0)
    assert set(neurons.chosen) == set(np.argsort(-spread)[:4])
    given = output(model, "1", neurons, None, data).numpy()
    for unit in range(8):
        expected = projected[:, unit] if unit in neurons.chosen else np.full(len(X), X[:, unit].mean())
        np.testing.assert_allclose(given[:, unit], expected, atol=1e-6)


def test_an_axis_aligned_direction_lies_in_one_unit(worlds):
    """A direction that is a unit needs one unit; one spread over four needs four: what Fig. 2b measures."""
    Q = worlds.orthonormal(100, 2)
    X = np.hstack([Q[:, :1], Q[:, 1:] @ np.ones((1, 4)) / 2])
    alone, spread = (nk.svcca_directions(X, Q[:, [i]], variance=1.0) for i in (0, 1))
    assert nk.aligned_neurons(alone, 1, 1).chosen == (0,)
    assert set(nk.aligned_neurons(spread, 1, 4).chosen) == {1, 2, 3, 4}


def test_all_units_change_nothing(layer, data):
    model, X, found = layer
    for neurons in (
        nk.random_neurons(found, 8),
        nk.largest_neurons(found, 8),
        nk.aligned_neurons(found, found.x.kept, 8),
    ):
        np.testing.assert_allclose(output(model, "1", neurons, None, data), X, atol=1e-5)
    assert repr(nk.random_neurons(found, 3)) == "Neurons(3 of 8)"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("found_on", ["cpu", "cuda"])
def test_the_gpu_gives_the_numbers_of_the_cpu(data, found_on):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    found = nk.model_directions(model.to(found_on), "1", data=data.to(found_on))
    choices = [
        found,
        nk.random_neurons(found, 3, rest="predicted"),
        nk.largest_neurons(found, 3),
        nk.aligned_neurons(found, 2, 4),
    ]
    for kept in choices:
        k = 2 if kept is found else None
        here, there = output(model.cpu(), "1", kept, k, data), output(model.cuda(), "1", kept, k, data.cuda())
        torch.testing.assert_close(there.cpu(), here, atol=1e-5, rtol=1e-5)
    with torch.autocast("cuda", torch.bfloat16):
        assert output(model.cuda(), "1", found, 2, data.cuda()).isfinite().all()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_more_directions_than_the_width_are_refused(layer):
    model, _, found = layer
    refused(
        InvalidValue, "`k` must lie between 1 and 8, the directions kept of 8 features; got 9", model, "1", found, 9
    )


def test_an_unknown_layer_is_refused_with_a_suggestion(layer):
    refused(UnknownName, "no layer named 'con'; did you mean 'conv'", Maps(), "con", layer[2], 2)


def test_another_width_is_refused_when_the_layer_runs(layer, data):
    found = layer[2]
    wide = nn.Sequential(nn.Linear(5, 9))
    with pytest.raises(
        ShapeError, match=r"layer '0' gives an output of shape \(300, 9\), which does not fit the 8 feat"
    ):
        output(wide, "0", found, 2, data)
    with pytest.raises(ShapeError, match=r"layer 'conv' gives an output of shape \(3, 6, 4, 4\)"):
        output(Maps(), "conv", found, 2, torch.randn(3, 2, 4, 4))


def test_k_beside_chosen_units_is_refused(layer):
    model, _, found = layer
    refused(
        InvalidValue,
        "3 neurons are chosen already; leave `k` out, or choose 2 neurons",
        model,
        "1",
        nk.random_neurons(found, 3),
        2,
    )


def test_more_units_than_the_layer_has_are_refused(layer):
    _, _, found = layer
    for choose in (nk.random_neurons, nk.largest_neurons):
        with pytest.raises(InvalidValue, match="`k` must be a whole number from 1 to 8; got 9"):
            choose(found, 9)
        with pytest.raises(InvalidValue, match=r"`k` must be a whole number from 1 to 8; got 2\.5"):
            choose(found, 2.5)
    with pytest.raises(InvalidValue, match="`m` must be a whole number from 1 to 8; got 0"):
        nk.aligned_neurons(found, 2, 0)


def test_another_rest_is_refused(layer):
    with pytest.raises(UnknownName, match="no rest named 'zero'. There are mean, predicted"):
        nk.random_neurons(layer[2], 2, rest="zero")


def test_what_are_no_directions_are_refused(layer):
    refused(InvalidValue, "directions come from `nk.svcca_directions` .*; got Tensor", layer[0], "1", torch.eye(8), 2)
