"""The compressed layers against slow NumPy transcriptions and worlds whose answers are known."""

import os
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.compression import most_that_saves, parameters
from quickly import slow_but

CONVOLUTIONS = [
    {},
    {"padding": 1},
    {"padding": 1, "stride": 2},
    {"padding": 2, "dilation": 2},
    {"padding": (0, 1), "kernel_size": (1, 3)},
    {"padding": "same", "kernel_size": 5},
    {"padding": "valid", "stride": (1, 2)},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "replicate", "bias": False},
    {"padding": 1, "bias": False},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 1, "padding": 1},
]


def fed(model, layer, data):
    """Return what a layer is fed."""
    kept = []
    hook = model.get_submodule(layer).register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    with torch.no_grad():
        model(data)
    hook.remove()
    return kept[0]


# --- slow transcriptions ----------------------------------------------------------------------------------------------


def principal(X, share=0.99):
    """Step 1 of SVCCA: the left singular vectors that hold 99% of the variance."""
    U, S, _ = np.linalg.svd(X - X.mean(0), full_matrices=False)
    return U[:, : int(np.searchsorted(np.cumsum(S**2) / np.sum(S**2), share)) + 1]


def directions(X, Y, k):
    """The first k directions of X over the examples: step 2 of SVCCA, then the principal ones of what is left."""
    U, V = principal(X), principal(Y)
    turn, _, _ = np.linalg.svd(U.T @ V)
    Z = U @ turn[:, : min(k, V.shape[1], U.shape[1])]
    left = (X - X.mean(0)) - Z @ (Z.T @ (X - X.mean(0)))
    return np.hstack([Z, np.linalg.svd(left)[0][:, : k - Z.shape[1]]])


def restricted(X, Y, k, projection):
    """X with every row restricted to the first k directions, about the mean."""
    Z, centred = directions(X, Y, k), X - X.mean(0)
    if projection == "least_squares":  # section 2.1: each neuron projected on the span of the directions
        return X.mean(0) + Z @ (Z.T @ centred)
    P = np.linalg.qr(np.linalg.pinv(centred, rcond=1e-10) @ Z)[
        0
    ].T  # orthonormal rows that span the directions' weights
    return X.mean(0) + centred @ P.T @ P


@pytest.mark.parametrize("projection", ["least_squares", "orthogonal"])
@pytest.mark.parametrize("k", [1, 3, 5, 9, 15, 20])
def test_a_linear_layer_equals_the_slow_one(draw, k, projection):
    torch.manual_seed(0)
    # one more layer between: else the logits would be a linear map of the input, and all correlations alike
    after = nn.Sequential(nn.ReLU(), nn.Linear(16, 5))
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 16), after).double()
    data = draw(200, 12)
    small = nk.compress(model, "2", k=k, data=data, projection=projection)
    X, Y = fed(model, "2", data).numpy(), model(data).detach().numpy()
    slow = torch.from_numpy(restricted(X, Y, k, projection))
    torch.testing.assert_close(small(data), model[2:](slow), rtol=0, atol=1e-9)
    assert small.compression["2"].kept == k


@pytest.mark.parametrize("projection", ["least_squares", "orthogonal"])
def test_against_another_model_equals_the_slow_one(draw, projection):
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)).double() for _ in "ab")
    data = draw(200, 12)
    small = nk.compress(model, "2", k=6, data=data, against=other, projection=projection)
    X, Y = fed(model, "2", data).numpy(), fed(other, "2", data).numpy()
    slow = torch.from_numpy(restricted(X, Y, 6, projection))
    torch.testing.assert_close(small(data), model[2](slow), rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("projection", slow_but(["least_squares", "orthogonal"], "least_squares"))
def test_a_conv_layer_equals_the_slow_one_up_to_its_borders(narrow_conv, draw, options, projection):
    """The input is restricted place by place, about its mean, and the very conv layer is run on it."""
    model, data = narrow_conv(**options), draw(30, 4, 7, 8)
    small = nk.compress(model, "2", k=2, data=data, projection=projection)
    maps = fed(model, "2", data)
    places = maps.movedim(1, -1)
    X = places.reshape(-1, 8).numpy()
    Y = model(data).detach().repeat_interleave(56, 0).numpy()
    slow = torch.from_numpy(restricted(X, Y, 2, projection)).reshape(places.shape).movedim(-1, 1)
    torch.testing.assert_close(small[2](maps), model[2](slow), rtol=0, atol=1e-9)


# --- known worlds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", ["least_squares", "orthogonal"])
def test_a_net_with_four_live_directions_compresses_to_four_and_no_fewer(narrow_net, draw, projection):
    data = draw(100, 10)
    whole = nk.compress(narrow_net, "2", k=4, data=data, projection=projection)
    torch.testing.assert_close(whole(data), narrow_net(data), rtol=0, atol=1e-6)
    fewer = nk.compress(narrow_net, "2", k=3, data=data, projection=projection)
    assert (fewer(data) - narrow_net(data)).abs().max() > 1e-3


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_a_conv_layer_with_three_live_directions_compresses_to_three_and_no_fewer(narrow_conv, draw, options):
    model, data = narrow_conv(**options), draw(40, 4, 6, 6)
    whole = nk.compress(model, "2", k=3, data=data)
    torch.testing.assert_close(whole(data), model(data), rtol=0, atol=1e-6)
    fewer = nk.compress(model, "2", k=2, data=data)
    assert (fewer(data) - model(data)).abs().max() > 1e-3


def test_more_directions_than_vary_are_not_kept(narrow_net, draw):
    small = nk.compress(narrow_net, "2", k=10, data=draw(100, 10))
    assert small.compression["2"].kept == small[2][0].out_features == 4
    assert "only 4 directions of its input vary" in str(small.compression)


def test_variance_one_keeps_every_live_direction(narrow_net, draw):
    narrow_net[2] = nn.Linear(20, 30).double()
    small = nk.compress(narrow_net, "2", variance=1.0, data=draw(100, 10))
    assert small.compression["2"].kept == 4
    assert small.compression["2"].variance == pytest.approx(1)


def test_the_variance_asked_for_is_held_with_no_direction_too_many(draw):
    torch.manual_seed(0)
    layers = [nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 4)]
    model, data = nn.Sequential(*layers).double(), draw(300, 12)
    for projection in ("least_squares", "orthogonal"):
        row = nk.compress(model, "2", variance=0.6, data=data, projection=projection).compression["2"]
        X = fed(model, "2", data).numpy()
        shares = []
        for k in (row.kept, row.kept - 1):
            slow = restricted(X, model(data).detach().numpy(), k, projection)
            shares.append(1 - ((X - slow) ** 2).sum() / ((X - X.mean(0)) ** 2).sum())
        assert shares[0] == pytest.approx(row.variance, abs=1e-9)
        assert shares[0] >= 0.6 > shares[1]


def test_against_another_model_the_shared_directions_come_first(draw):
    """Three directions of the input are shared with the other model; the other seventeen are not, and vary more."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Identity(), nn.Linear(20, 6)).double() for _ in "ab")
    turn = torch.linalg.qr(draw(20, 20))[0]
    shared, sizes = draw(4000, 3), torch.tensor([1.0] * 3 + [3.0] * 17)

    class Own(nn.Module):
        def __init__(self, columns):
            super().__init__()
            self.columns = columns

        def forward(self, x):
            return torch.cat([x[:, :3], x[:, self.columns]], 1) * sizes @ turn

    model[0], other[0] = Own(slice(3, 20)), Own(slice(20, 37))
    data = torch.cat([shared, draw(4000, 34)], 1)
    small = nk.compress(model, "1", k=3, data=data, against=other, projection="orthogonal", cut=1.0)
    overlap = small[1][0].weight @ turn[:3].T
    assert torch.linalg.svdvals(overlap).min().item() > 0.99


def test_against_itself_the_directions_are_the_principal_ones(draw):
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 5)).double(), draw(300, 12)
    row = nk.compress(model, "2", k=4, data=data, against=model).compression["2"]
    X = fed(model, "2", data).numpy()
    variances = np.linalg.svd(X - X.mean(0), compute_uv=False) ** 2
    assert row.variance == pytest.approx(variances[:4].sum() / variances.sum())


@pytest.mark.slow
def test_all_directions_leave_a_trained_net_as_it_is(digits_net, digits_data):
    small = nk.compress(digits_net, ["conv2", "conv3", "fc"], k=1.0, data=digits_data[0])
    images = next(iter(digits_data[1]))[0]
    torch.testing.assert_close(small(images), digits_net(images), rtol=1e-4, atol=1e-4)


def test_least_squares_errs_less_than_orthogonal_at_equal_k(digits_net, digits_data):
    train, test = digits_data
    images = next(iter(test))[0]
    errors = []
    for projection in ("least_squares", "orthogonal"):
        small = nk.compress(digits_net, "conv3", k=8, data=train, projection=projection)
        errors.append((small(images) - digits_net(images)).square().mean().item())
    assert errors[0] < errors[1]


# --- tokens, several calls --------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Tokens that vary in three directions where they are valid and wildly where they are padding."""

    def __init__(self, per_token):
        super().__init__()
        self.inner, self.fc, self.per_token = nn.Linear(3, 10), nn.Linear(10, 4), per_token

    def forward(self, inputs, attention_mask):
        wild = torch.sin(torch.arange(10) * 1e3 * inputs.sum(-1, keepdim=True))
        states = torch.where(attention_mask[..., None] == 1, self.inner(inputs), wild)
        logits = self.fc(states)
        return logits if self.per_token else (logits * attention_mask[..., None]).sum(1)


@pytest.mark.parametrize("per_token", [True, False])
def test_padding_does_not_count(draw, per_token):
    torch.manual_seed(0)
    model = Tokens(per_token).double()
    mask = (torch.arange(6) < torch.randint(2, 6, (40, 1))).long()
    data = {"inputs": draw(40, 6, 3), "attention_mask": mask}
    small = nk.compress(model, "fc", k=9, data=data)
    assert small.compression["fc"].kept == 3
    whole, left = model(**data), small(**data)
    valid = mask == 1 if per_token else slice(None)
    torch.testing.assert_close(left[valid], whole[valid], rtol=0, atol=1e-6)


def test_a_layer_that_runs_twice_sees_the_rows_of_both_calls(draw):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.again, self.out = nn.Linear(8, 8), nn.ModuleList(), nn.Linear(8, 3)
            self.again.append(self.fc)

        def forward(self, x):
            return self.out(self.again[0](self.fc(x)))

    torch.manual_seed(0)
    model, data = Twice().double(), draw(60, 8)
    small = nk.compress(model, "fc", k=1.0, data=data)
    torch.testing.assert_close(small(data), model(data), rtol=0, atol=1e-6)
    assert small.fc is small.again[0]
    assert small.compression["fc"].multiply_adds_before == 2 * 64
    assert isinstance(small.fc, nn.Sequential)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_multiply_adds_are_those_of_the_shapes(narrow_conv, draw):
    model, data = narrow_conv(padding=1, stride=2), draw(30, 4, 7, 8)
    small = nk.compress(model, "2", k=2, data=data)
    row, counted = small.compression["2"], []
    for conv in small[2]:
        conv.register_forward_hook(
            lambda module, inputs, output: counted.append(output[0].numel() * module.weight[0].numel())
        )
    small(data)
    assert row.multiply_adds_after == sum(counted) == 56 * 3 * 8 + 4 * 4 * 3 * 9 * 5
    assert row.multiply_adds_before == 4 * 4 * 8 * 9 * 5
    assert row.parameters_before == 8 * 9 * 5 + 5
    assert row.parameters_after == parameters(small[2]) == 3 * 8 + 3 + 3 * 9 * 5 + 5


def test_a_strided_pointwise_layer_looks_only_where_it_must(narrow_conv, draw):
    small = nk.compress(narrow_conv(kernel_size=1, stride=2), "2", k=2, data=draw(30, 4, 6, 6))
    assert small.compression["2"].multiply_adds_after == 9 * (2 * 8 + 2 * 5)
    assert small[2][0].stride == (2, 2)


@pytest.mark.parametrize("width, out", [(16, 16), (64, 10), (7, 30)])
def test_the_most_that_saves_parameters_is_the_most(width, out):
    layer = nn.Linear(width, out)
    most = most_that_saves(layer)
    assert most * (width + out) + out < parameters(layer) <= (most + 1) * (width + out) + out


def test_a_square_layer_saves_only_under_half_its_width(draw):
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16)).double(), draw(100, 6)
    text = str(nk.compress(model, "2", k=8, data=data).compression)
    assert "2: saves no parameters: that takes k of at most 7." in text
    assert "saves no" not in str(nk.compress(model, "2", k=7, data=data).compression)
    kept = nk.compress(model, "2", k=0.35, data=data).compression["2"]
    assert (kept.kept, kept.parameters_after) == (6, 6 * 16 + 6 * 16 + 16)


def test_a_layer_that_cannot_save_is_left_as_it_is(draw):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    small = nk.compress(model, "2", variance=0.99, data=draw(100, 6))
    assert isinstance(small[2], nn.Linear)
    assert small.compression.replaced == ()
    assert "2: left as it is: " in str(small.compression)
    assert "directions hold that variance, which saves no parameters." in str(small.compression)
    narrow = nk.compress(nn.Sequential(nn.Linear(1, 4)).double(), "0", variance=0.9, data=draw(50, 1))
    assert "0: left as it is: 1 direction holds that variance" in str(narrow.compression)


# --- real networks ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    not (os.environ.get("NETKIN_DATA") and os.environ.get("NETKIN_CHECKPOINTS")), reason="needs CIFAR-10 and Tiny-10"
)
def test_tiny10_keeps_its_accuracy_on_ten_directions_of_its_top_and_needs_least_squares_below():
    """Ten directions of 64 in each of the last two layers; in the middle the projections differ clearly."""
    model = nk.load_model(f"netkin:tiny10@{os.environ['NETKIN_CHECKPOINTS']}/tiny10_cifar10_seed0.pt")
    train, test = (
        list(islice(nk.load_data(f"{name}:{os.environ['NETKIN_DATA']}", batch_size=250), 4))
        for name in ("cifar10-train", "cifar10")
    )
    top = nk.compress(model, ["conv8", "fc"], k=10, data=train, test=test, order="from_the_top").compression
    assert abs(top.accuracy_before - top.accuracy_after) < 0.02
    middle = [
        nk.compress(model, "conv5", k=12, data=train, test=test, projection=projection).compression.accuracy_after
        for projection in ("least_squares", "orthogonal")
    ]
    assert middle[0] > middle[1] + 0.02


def test_directions_that_hardly_vary_do_not_overflow_half_precision():
    """In their own units they would: the smallest varies by 1e-6, and 1e6 is no number of float16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).half()
    data = (torch.randn(300, 6) * torch.tensor([1, 1, 1, 1e-6, 1e-5, 1])).half()
    small = nk.compress(model, "0", k=6, data=data)
    torch.testing.assert_close(small(data), model(data), atol=2e-3, rtol=2e-3)


def test_weights_that_serve_another_layer_are_told_of():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).relu())

    table = nk.compress(Tied(), "b", k=2, data=torch.randn(50, 8)).compression
    assert table.parameters_after == table.parameters_before + 2 * 8 * 2
    assert "its weights serve another layer, too" in table["b"].notes[-1]
    assert str(table).startswith("1 layer of Tied compressed against logits")
