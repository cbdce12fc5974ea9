"""SNIP, GraSP and SynFlow against slow transcriptions, and where their answers are known."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from netkin.applications.sparsity.masks import masks_of
from netkin.applications.sparsity.sparsify import (
    ROUNDS,
    grasp_scores,
    snip_scores,
    sparsify,
    synflow_scores,
)
from netkin.errors import EmptyLayerWarning, InvalidValue
from netkin.training import accuracy
from refusals import refusals


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(n=12, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (n,), generator=draw)


def forward(weights, inputs):
    """The outputs of `net`, in NumPy: weights and biases in the order of their registration."""
    hidden = np.tanh(inputs @ weights[0].T + weights[1])
    return hidden @ weights[2].T + weights[3]


def slow_loss(weights, inputs, labels, temperature=1.0):
    """The mean cross entropy of `net` in NumPy."""
    logits = forward(weights, inputs) / temperature
    logits = logits - logits.max(1, keepdims=True)
    return -(logits - np.log(np.exp(logits).sum(1, keepdims=True)))[np.arange(len(labels)), labels].mean()


def slow_gradient(weights, inputs, labels, temperature=1.0, step=1e-5):
    """The gradients of both weight matrices by central differences."""
    found = []
    for place in (0, 2):
        own = np.zeros_like(weights[place])
        for spot in np.ndindex(own.shape):
            ends = []
            for sign in (1, -1):
                moved = [one.copy() for one in weights]
                moved[place][spot] += sign * step
                ends.append(slow_loss(moved, inputs, labels, temperature))
            own[spot] = (ends[0] - ends[1]) / (2 * step)
        found.append(own)
    return found


def arrays(model, data):
    return [one.detach().numpy() for one in model.parameters()], *(part.numpy() for part in data)


def test_snip_is_weight_times_gradient_by_differences():
    model, data = net(), batch()
    found = snip_scores(model, ["0", "2"], data)
    weights, inputs, labels = arrays(model, data)
    for name, place, gradient in zip(("0", "2"), (0, 2), slow_gradient(weights, inputs, labels), strict=True):
        np.testing.assert_allclose(found[name].numpy(), np.abs(weights[place] * gradient), rtol=1e-6, atol=1e-10)


def test_snip_is_the_change_of_the_loss_by_one_weight_to_first_order():
    model, data = net(), batch()
    found = snip_scores(model, ["2"], data)["2"]
    with torch.no_grad():
        for spot in [(0, 0), (1, 2), (2, 3)]:
            fading = copy.deepcopy(model)
            before = nn.functional.cross_entropy(fading(data[0]), data[1])
            fading[2].weight[spot] *= 1 - 1e-6
            after = nn.functional.cross_entropy(fading(data[0]), data[1])
            assert abs(float(after - before)) / 1e-6 == pytest.approx(float(found[spot]), rel=1e-3)


def test_grasp_is_weight_times_hessian_times_gradient_by_differences():
    model, data = net(), batch()
    found = grasp_scores(model, ["0", "2"], data)
    weights, inputs, labels = arrays(model, data)
    first = slow_gradient(weights, inputs, labels, 200.0, 1e-4)
    scale = 1e3  # the gradients are small at this temperature
    ends = []
    for sign in (1, -1):  # H g is how the gradient changes along g
        moved = [one.copy() for one in weights]
        moved[0], moved[2] = moved[0] + sign * scale * 1e-2 * first[0], moved[2] + sign * scale * 1e-2 * first[1]
        ends.append(slow_gradient(moved, inputs, labels, 200.0, 1e-4))
    for name, place, k in (("0", 0, 0), ("2", 2, 1)):
        along = (ends[0][k] - ends[1][k]) / (2 * scale * 1e-2)
        expected = weights[place] * along
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


def test_grasp_of_a_square_loss_is_known():
    """With L = ½ Σ (a_i w_i)² the gradient is a² w and H = diag(a²), so that w ⊙ Hg = a⁴ w², over 200⁴."""
    model = nn.Linear(3, 3, bias=False).double()
    model.weight.data = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    inputs = torch.eye(3, dtype=torch.float64)

    found = grasp_scores(model, [""], (inputs, inputs), lambda outputs, labels: (outputs**2).sum() / 2)
    np.testing.assert_allclose(found[""].numpy(), np.diag([1.0, 4.0, 9.0]) / 200.0**4, rtol=1e-12)


def slow_synflow(weights, kept):
    """SynFlow of bias-free linear layers in a row, by products of matrices: Algorithm 1 of its paper."""
    masks = [np.ones_like(one) for one in weights]
    total = sum(one.size for one in weights)
    for done in range(1, ROUNDS + 1):
        live = [np.abs(one) * mask for one, mask in zip(weights, masks, strict=True)]
        scores = []
        for place, own in enumerate(live):
            before = np.ones(weights[0].shape[1])
            for one in live[:place]:
                before = one @ before
            after = np.ones(weights[-1].shape[0])
            for one in live[:place:-1]:
                after = one.T @ after
            scores.append(np.outer(after, before) * own)
        left = kept if done == ROUNDS else max(kept, round(total * (kept / total) ** (done / ROUNDS)))
        limit = np.sort(np.concatenate([one.ravel() for one in scores]))[-left]
        masks = [(one >= limit).astype(float) for one in scores]
    return scores, masks


def test_synflow_is_the_flow_through_products_of_matrices():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.ReLU(),
                          nn.Linear(4, 3, bias=False)).double()  # fmt: skip
    weights = [one.detach().numpy().copy() for one in model.parameters()]
    inputs = torch.randn(2, 6)
    first = slow_synflow(weights, sum(one.size for one in weights))[0]
    found = synflow_scores(model, ["0", "2", "4"], inputs)
    for own, expected in zip(found.values(), first, strict=True):
        np.testing.assert_allclose(own.numpy(), expected, rtol=1e-12)
    sparsify(model, 0.4, method="synflow", data=inputs)  # below, units with one way in and out have equal scores
    masks = slow_synflow(weights, 62 - round(0.4 * 62))[1]
    for own, expected in zip(masks_of(model).values(), masks, strict=True):
        assert np.array_equal(own.numpy(), expected.astype(bool))


def test_synflow_keeps_a_path_where_magnitude_would_empty_a_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3))
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
    with pytest.warns(EmptyLayerWarning, match="layers: 2;"):
        sparsify(copy.deepcopy(model), 0.97, method="magnitude")
    assert not sparsify(model, 0.97, method="synflow", data=torch.ones(1, 30)).emptied


def test_synflow_tells_how_far_it_is():
    seen = []
    model = nn.Linear(6, 5, bias=False)
    sparsify(model, 0.4, method="synflow", data=torch.ones(1, 6), progress=lambda *told: seen.append(told))
    assert seen[-1][:2] == (ROUNDS, ROUNDS)


def test_synflow_conserves_its_flow_from_layer_to_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4, bias=False))
    found = synflow_scores(model, ["0", "2"], torch.ones(1, 6))
    assert found["0"].sum().item() == pytest.approx(found["2"].sum().item())  # Theorem 1 of its paper


@pytest.mark.parametrize("scores", [snip_scores, grasp_scores])
def test_scores_leave_the_model_and_random_states_as_they_were(scores):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(), nn.Flatten(), nn.Linear(12, 2)).eval()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = scores(model, ["0", "4"], (torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0)),
                                       torch.tensor([0, 1, 0, 1, 1, 0])))  # fmt: skip
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.training
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert set(first) == {"0", "4"}


def test_grasp_goes_through_attention():
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(24, 2))
    found = grasp_scores(model, ["2"], (torch.randn(4, 3, 8), torch.tensor([0, 1, 1, 0])))
    assert torch.isfinite(found["2"]).all()
    assert found["2"].any()


def test_a_batch_is_drawn_by_the_seed_and_of_the_size_asked_for():
    inputs = torch.cat([torch.zeros(20, 5), torch.ones(20, 5)]).double()
    labels = torch.arange(40) % 3
    models = [net() for _ in range(3)]
    for model, (seed, examples) in zip(models, [(0, 8), (0, 8), (1, 8)], strict=True):
        sparsify(model, 0.5, method="snip", data=(inputs, labels), seed=seed, examples=examples)
    a, b, _ = (masks_of(model) for model in models)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_scores_without_data_or_labels_are_refused():
    refusals(
        (lambda: sparsify(net(), 0.5, method="snip"), InvalidValue, "data"),
        (lambda: sparsify(net(), 0.5, method="synflow"), InvalidValue, "data"),
        (lambda: sparsify(net(), 0.5, method="grasp", data=batch()[0]), InvalidValue, ""),
        (lambda: sparsify(net(), 0.5, method="snip", data=[]), InvalidValue, "data"),
    )
    with pytest.raises(InvalidValue, match="one array of real numbers"):
        sparsify(
            nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), 0.5, method="synflow", data=torch.ones(2, 3).long()
        )


def test_scores_that_say_nothing_are_refused():
    flat = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3))
    with pytest.raises(InvalidValue, match=r"all 15 scores of 'synflow' are zero.*layer norms"):
        sparsify(flat, 0.5, method="synflow", data=torch.ones(2, 5))
    broken = net()
    broken[0].weight.data[0, 0] = math.nan
    with pytest.raises(InvalidValue, match="of 32 scores of 'snip' are not finite"):
        sparsify(broken, 0.5, method="snip", data=batch())
    with pytest.raises(InvalidValue, match="the loss must be one number"):
        sparsify(net(), 0.5, method="snip", data=batch(), loss=lambda outputs, labels: outputs)


@pytest.mark.parametrize("own", [True, False])
def test_a_loader_that_shuffles_leaves_the_callers_random_state(own):
    generator = torch.Generator().manual_seed(1) if own else None
    pairs = torch.utils.data.TensorDataset(*batch())
    loader = torch.utils.data.DataLoader(pairs, 4, shuffle=True, generator=generator)
    before = [torch.get_rng_state(), *([generator.get_state()] if own else [])]
    sparsify(net(), 0.5, method="snip", data=loader)
    accuracy(net(), loader)
    after = [torch.get_rng_state(), *([generator.get_state()] if own else [])]
    assert all(map(torch.equal, after, before))
