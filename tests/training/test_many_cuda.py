"""Many networks at once on a GPU: in CUDA graphs, against one by one."""

import copy

import pytest
import torch
from torch import nn

from netkin.applications.federated import federate
from netkin.settings import exact_products
from netkin.sources.architectures import architecture, seeded
from netkin.training import Recipe, accuracy, train, train_many

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def nets(dtype=torch.float64, count=3):
    return [seeded(architecture("digits"), seed).to("cuda", dtype) for seed in range(count)]


def labelled(n=100, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 8, 8, generator=draw).cuda(), torch.randint(0, 10, (n,), generator=draw).cuda()


def furthest(models, others):
    return max(
        (one.state_dict()[key].double() - other.state_dict()[key].double()).abs().max().item()
        for one, other in zip(models, others, strict=True)
        for key in one.state_dict()
    )


RECIPES = {
    "sgd": Recipe(steps=20, batch=32, lr=0.05, weight_decay=0.01, schedule="cosine", warmup=3, clip=1.0),
    "adam": Recipe(steps=20, batch=32, optimizer="adam", lr=0.01, weight_decay=0.01),
    "adamw, moved": Recipe(epochs=5, batch=32, optimizer="adamw", lr=0.01, shift=1, flip=True, schedule="linear"),
}


@pytest.mark.parametrize("method", ["stacked", "graphs"])
@pytest.mark.parametrize("name", RECIPES)
def test_networks_trained_at_once_are_those_of_one_by_one(name, method):
    models = nets()
    plain = copy.deepcopy(models)
    histories = train_many(models, labelled(), RECIPES[name], method=method)
    expected = train_many(plain, labelled(), RECIPES[name], method="one by one")
    assert furthest(models, plain) < 1e-8
    for history, own in zip(histories, expected, strict=True):
        assert [one["loss"] for one in history] == pytest.approx([one["loss"] for one in own], abs=1e-8)


@pytest.mark.parametrize("method", ["stacked", "graphs"])
def test_the_first_gradients_are_right_in_float32(method):
    models = nets(torch.float32)
    plain = copy.deepcopy(models)
    recipe = Recipe(steps=1, batch=64, lr=1.0, momentum=0.0)
    with exact_products():
        train_many(models, labelled(), recipe, method=method)
        train_many(plain, labelled(), recipe, method="one by one")
    assert furthest(models, plain) < 1e-5


@pytest.mark.parametrize("method", ["stacked", "graphs"])
def test_each_network_has_its_own_data_and_number_of_examples(method):
    models, data = nets(), [labelled(n, seed=n) for n in (32, 70, 100)]
    plain, recipe = copy.deepcopy(models), Recipe(epochs=3, batch=16, lr=0.05, drop_last=True, schedule="linear")
    train_many(models, data_of_each=data, recipe=recipe, seeds=[3, 3, 4], method=method, test=labelled(20, seed=9))
    train_many(plain, data_of_each=data, recipe=recipe, seeds=[3, 3, 4], method="one by one")
    assert furthest(models, plain) < 1e-8


@pytest.mark.parametrize("algorithm", ["local", "fedprox", "fedrep", "ditto"])
@pytest.mark.parametrize("client_fraction", [1.0, 0.5])
def test_a_federation_by_one_recording_is_that_of_one_by_one(algorithm, client_fraction):
    (model,), data = nets(count=1), {str(k): labelled(40 + 5 * k, seed=k) for k in range(4)}
    settings = {
        "rounds": 4,
        "batch": 16,
        "lr": 0.05,
        "drop_last": True,
        "client_fraction": client_fraction,
        "progress": False,
    }
    found = [federate(model, data, algorithm, method=method, **settings) for method in ("stacked", "one by one")]
    states = [(one.state(name), other.state(name)) for one, other in [found] for name in data]
    assert max(abs(own[key] - plain[key]).max() for own, plain in states for key in own) < 1e-8


@pytest.mark.parametrize("method", ["stacked", "graphs"])
def test_bf16_learns_the_digits(method):
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (512,), generator=draw)
    images = torch.eye(10)[labels].reshape(-1, 1, 1, 10).expand(-1, 1, 8, 10)[..., :8].contiguous()
    images[labels >= 8] = labels[labels >= 8].float()[:, None, None, None]
    data, models = (images.cuda(), labels.cuda()), nets(torch.float32)
    train_many(models, data, epochs=6, batch=64, optimizer="adam", lr=3e-3, precision="bf16", method=method)
    assert min(accuracy(model, data) for model in models) > 0.9


class Waiting(nn.Module):
    """A network that asks the host for a number, which no graph can hold."""

    def __init__(self, seed):
        super().__init__()
        self.inner = nets()[seed]

    def forward(self, images):
        return self.inner(images) * (images.sum().item() ** 0)


def test_a_network_that_cannot_be_captured_is_trained_with_the_reason():
    models, recipe = [Waiting(seed) for seed in range(2)], Recipe(epochs=1, batch=32)
    plain = copy.deepcopy(models)
    with pytest.warns(UserWarning, match="training the networks .* failed") as caught:
        train_many(models, labelled(), recipe)
    assert any("as CUDA graphs" in str(one.message) for one in caught)
    torch.rand(3, device="cuda")  # random numbers can still be drawn after the recording that failed
    for seed, model in enumerate(plain):
        train(model, labelled(), recipe, seed=seed)
    assert furthest(models, plain) < 1e-8


def test_a_training_goes_on_from_its_file_on_a_gpu(tmp_path):
    stops = [5]

    def stop(model, step):
        if step in stops:
            raise RuntimeError("stopped")

    whole, parted, recipe = nets()[0], nets()[0], Recipe(epochs=3, batch=32, lr=0.05)
    train(whole, labelled(), recipe)
    with pytest.raises(RuntimeError, match="stopped"):
        train(nets()[0], labelled(), recipe, save=tmp_path / "run", every=2, hooks=[stop])
    stops.clear()
    train(parted, labelled(), recipe, save=tmp_path / "run", every=2, hooks=[stop])
    assert furthest([whole], [parted]) < 1e-8
