"""Weights that are computed, by masks, parametrizations and hooks: every reader of weights reads the computed ones."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import netkin as nk
from netkin.errors import InvalidValue
from netkin.representations.layer_weights import copied, own_weights, with_plain_weights
from netkin.sources.architectures import seeded

IMAGES = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 4


def plain_net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4),
    )  # fmt: skip


def of_each_layer(change):
    def of_all(net):
        for place in (0, 2, 6, 8):
            change(net[place])

    return of_all


COMPUTED = {
    "masks": lambda net: nk.sparsify(net, 0.5, method="uniform"),
    "weight_norm": of_each_layer(parametrizations.weight_norm),
    "spectral_norm": of_each_layer(parametrizations.spectral_norm),
    "orthogonal": of_each_layer(parametrizations.orthogonal),
    "masks and spectral_norm": lambda net: (COMPUTED["masks"](net), COMPUTED["spectral_norm"](net)),
    "hook weight_norm": of_each_layer(weight_norm),
    "hook spectral_norm": of_each_layer(spectral_norm),
    "torch's pruning": of_each_layer(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")


def computed(kind, seed=0):
    """Return a network in training mode that has taken a step, and one that is plain and computes the same."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = plain_net().train()
        COMPUTED[kind](net)
        net(IMAGES).square().sum().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += 0.01 * torch.randn(parameter.shape)
    net.eval()(IMAGES)  # hooks of torch set their weights
    twin = seeded(plain_net, 9)
    for place in (0, 2, 6, 8):
        twin[place].weight.data = net[place].weight.detach().clone()
        twin[place].bias.data = net[place].bias.detach().clone()
    torch.testing.assert_close(twin(IMAGES), net(IMAGES), rtol=0, atol=0)
    return net.train(), twin.train()


def state_of(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def untouched(net, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items()) and net.training


@pytest.mark.parametrize("kind", COMPUTED)
def test_own_weights_are_those_with_which_a_layer_computes(kind):
    net, twin = computed(kind)
    before = state_of(net)
    for place in (0, 2, 6, 8):
        found = own_weights(net[place])
        assert sorted(found) == ["bias", "weight"]
        for name, tensor in found.items():
            assert torch.equal(tensor, getattr(twin[place], name))
    assert untouched(net, before)
    assert own_weights(net) == {}


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_plain_copy_computes_the_same_and_has_plain_names(kind):
    net, twin = computed(kind)
    before = state_of(net)
    made = with_plain_weights(net)
    assert list(made.state_dict()) == list(twin.state_dict())
    assert all(type(layer) is type(other) for layer, other in zip(made, twin, strict=True))
    assert torch.equal(made(IMAGES), twin(IMAGES))
    assert untouched(net, before)
    assert not parametrize.is_parametrized(made[0])
    torch.testing.assert_close(net.eval()(IMAGES), twin(IMAGES), rtol=0, atol=0)  # the model keeps its own


def test_a_model_with_plain_weights_is_itself_its_plain_copy():
    net = seeded(plain_net, 0)
    assert with_plain_weights(net) is net


def test_recurrent_weights_that_are_computed_are_read_too():
    for change in (weight_norm, parametrizations.weight_norm):
        torch.manual_seed(0)
        net = change(nn.LSTM(4, 3), "weight_hh_l0")
        x = torch.randn(5, 2, 4)
        made = with_plain_weights(net)
        assert set(own_weights(net)) == {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"}
        torch.testing.assert_close(made(x)[0], net(x)[0])
        assert "weight_hh_l0" in dict(made.named_parameters())


# --- the readers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COMPUTED)
def test_task2vec_and_the_fisher_rao_norm_are_those_of_the_plain_network(kind):
    net, twin = computed(kind)
    before = state_of(net)
    found, expected = (nk.task2vec(one, IMAGES, progress=False) for one in (net, twin))
    assert found.filters == expected.filters == (("0.weight", 8), ("2.weight", 6), ("6.weight", 5))
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-5)
    assert found.network == expected.network
    norms = [nk.fisher_rao_norm(one, IMAGES, progress=False) for one in (net, twin)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert untouched(net, before)


@pytest.mark.parametrize("kind", COMPUTED)
def test_measures_of_weights_are_those_of_the_plain_networks(kind):
    (net, twin), (other, its_twin) = computed(kind), computed(kind, seed=1)
    before, measures = state_of(net), ["weight_cosine", "grassmann(atoms=2)"]
    found = nk.compare(net, other, measures=measures, progress=False)
    expected = nk.compare(twin, its_twin, measures=measures, progress=False)
    assert found.layers_a == expected.layers_a == ("0", "2", "6", "8")
    np.testing.assert_allclose(found.to_numpy(), expected.to_numpy(), atol=1e-12)
    V, W = twin[2].weight.detach().double().flatten(), its_twin[2].weight.detach().double().flatten()
    assert found["weight_cosine"]["2", "2"] == pytest.approx(float(V @ W / V.norm() / W.norm()), abs=1e-7)
    assert untouched(net, before)


@pytest.mark.parametrize("kind", COMPUTED)
def test_small_weights_are_counted_among_those_that_are_computed(kind):
    net, twin = computed(kind)
    before = state_of(net)
    assert nk.epsilon_sparsity(net, 0.05) == nk.epsilon_sparsity(twin, 0.05) > 0
    assert untouched(net, before)


@pytest.mark.parametrize("kind", COMPUTED)
def test_tasks_are_learnt_with_a_head_in_place_of_a_computed_one(kind):
    net, _ = computed(kind)
    tasks = nk.split_tasks((IMAGES, LABELS), (IMAGES, LABELS), 2)
    found = nk.learn_tasks(net, tasks, "finetune", epochs=1, batch=8, progress=False)
    made = found.network("0-1")
    assert type(made[8]).__name__ == "TaskHeads"
    assert made(IMAGES).shape == (24, 2)


@pytest.mark.parametrize("kind", COMPUTED)
def test_filters_that_are_computed_are_left_with_the_reason(kind):
    net, _ = computed(kind)
    tasks = nk.split_tasks((IMAGES, LABELS), (IMAGES, LABELS), 2)
    with pytest.raises(InvalidValue, match=r"layer '0' is left: its weight is computed \(\w.*make it plain first"):
        nk.learn_tasks(net, tasks, "atoms", epochs=1, progress=False)
    found = nk.decompose(nn.Sequential(nn.Conv2d(1, 1, 3), copied(net)))
    assert list(found.errors) == ["0"]
    assert all("is computed" in found.left[name] for name in ("1.0", "1.2"))


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_state_dict_from_which_a_weight_is_computed_is_refused_and_a_plain_one_is_not(kind):
    net, twin = computed(kind)
    with pytest.raises(InvalidValue, match="'a' holds '0.*', from which '0.weight' is computed.*pass the model"):
        nk.compare(nk.ModelInput(weights=net.state_dict()), twin, measures="weight_cosine")
    plain = nk.ModelInput(weights=with_plain_weights(net).state_dict())
    found = nk.compare(plain, net, measures="weight_cosine")
    assert found["0", "0"] == pytest.approx(1)


# --- layers with several weights --------------------------------------------------------------------------------------


def cosine(*pairs):
    x, y = (torch.cat([one.detach().double().flatten() for one in side]) for side in zip(*pairs, strict=True))
    return float(x @ y / x.norm() / y.norm())


def test_weight_cosine_reads_all_weights_of_recurrent_layers():
    a, b = (seeded(lambda: nn.Sequential(nn.LSTM(4, 3, 2), nn.GRU(4, 3)), seed) for seed in (0, 1))
    names = [f"weight_{part}_l{layer}" for layer in (0, 1) for part in ("ih", "hh")]
    found = nk.compare(a, b, measures="weight_cosine", progress=False)
    assert found.layers_a == ("0", "1")
    assert found["0", "0"] == pytest.approx(cosine(*((getattr(a[0], n), getattr(b[0], n)) for n in names)), abs=1e-7)
    assert (
        "different shapes"
        in nk.compare(a, b, measures="weight_cosine", pairs=[("0", "1")])["weight_cosine"].missing["0", "1"]
    )
    b[0].bias_hh_l0.data += 1
    assert nk.compare(a, b, measures="weight_cosine", progress=False)["0", "0"] == found["0", "0"]


@pytest.mark.parametrize("options", [{}, {"kdim": 3, "vdim": 5}])
def test_weight_cosine_reads_the_projections_of_attention(options):
    a, b = (seeded(lambda: nn.ModuleList([nn.MultiheadAttention(8, 2, **options)]), seed) for seed in (0, 1))
    names = ["in_proj_weight"] if not options else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    found = nk.compare(a, b, measures="weight_cosine", progress=False)
    assert found.layers_a == ("0", "0.out_proj")
    assert found["0", "0"] == pytest.approx(cosine(*((getattr(a[0], n), getattr(b[0], n)) for n in names)), abs=1e-7)
    states = [nk.ModelInput(weights=copy.deepcopy(net.state_dict())) for net in (a, b)]
    assert nk.compare(*states, measures="weight_cosine")["0", "0"] == found["0", "0"]


def test_statistics_of_layers_with_several_weights_are_saved_and_read(tmp_path):
    a, b = (seeded(lambda: nn.Sequential(nn.LSTM(4, 3)), seed) for seed in (0, 1))
    nk.collect(a, b, measures="weight_cosine").save(tmp_path / "ab.stats")
    expected = nk.compare(a, b, measures="weight_cosine")["0", "0"]
    assert nk.load(tmp_path / "ab.stats").compute("weight_cosine")["0", "0"] == expected


def test_a_module_that_only_holds_layers_has_no_weights_of_its_own():
    a, b = (nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)) for _ in range(2))
    found = nk.compare(a, b, measures="weight_cosine", layers=["0", "1"])
    assert "no weights of its own" in found["weight_cosine"].missing["0", "0"]
    assert -1 <= found["1", "1"] <= 1
