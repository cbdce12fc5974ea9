"""Freeze training of layers whose weights are computed: by masks, parametrizations or hooks; and of other buffers."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from freezing_worlds import same, sgd, weights
from late_packages import lightning as pl
from late_packages import transformers
from netkin.errors import InvalidValue
from netkin.integrations.huggingface import freezing_callback as trainer_callback
from netkin.integrations.lightning import freezing_callback as lightning_callback
from netkin.sources.architectures import seeded
from netkin.training import train_many

INPUTS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(1))
RECIPE = {"steps": 12, "batch": 16, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "progress": False}


def perceptron():
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def of_linear_layers(change):
    def of_all(net):
        for layer in (net[0], net[2], net[4]):
            change(layer)

    return of_all


COMPUTED = {
    "masks": lambda net: nk.sparsify(net, 0.5),
    "weight_norm": of_linear_layers(parametrizations.weight_norm),
    "spectral_norm": of_linear_layers(parametrizations.spectral_norm),
    "orthogonal": of_linear_layers(parametrizations.orthogonal),
    "spectral_norm of masks": lambda net: (nk.sparsify(net, 0.5), parametrizations.spectral_norm(net[0])),
    "hook weight_norm": of_linear_layers(weight_norm),
    "hook spectral_norm": of_linear_layers(spectral_norm),
    "torch's pruning": of_linear_layers(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
}
OLD = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")


def computed(kind, make=perceptron):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make()
        COMPUTED[kind](net)  # spectral norm draws its first vectors
    return net.train()


def moved(before, model):
    """Return the layers that are others than in a state."""
    now = model.state_dict()
    return {name.split(".")[0] for name, tensor in before.items() if not torch.equal(tensor, now[name])}


class AsTrained(nk.training.Hook):
    """What the layers are at a step, and how they differ from that at the end."""

    def __init__(self, step):
        self.step, self.settings = step, step

    def after_step(self, model, step):
        if step == self.step:
            self.state = weights(model)

    def moved(self, model):
        return moved(self.state, model)


@OLD
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_frozen_layer_stands_still_and_the_others_learn(kind):
    net, seen = computed(kind), AsTrained(4)
    with nk.FreezeTraining(net, "linear", steps=12) as freezing:
        assert freezing.groups == ["0", "2", "4"]
        nk.train(net, (INPUTS, LABELS), hooks=[freezing, seen], **RECIPE)
        assert freezing.frozen == ["0", "2"]
    assert seen.moved(net) == {"2", "4"}  # the first is frozen after 4 steps, the second after 8
    assert all(parameter.requires_grad for parameter in net.parameters())


@OLD
@pytest.mark.parametrize("kind", COMPUTED)
def test_what_a_frozen_layer_computes_is_the_same_in_every_forward_pass(kind):
    net = computed(kind)
    with nk.FreezeTraining(net, {"2": 0}, steps=9), nk.recording(net, ["2"]) as outputs:
        found = []
        for _ in range(3):
            net.train()
            net(INPUTS).sum().backward()
            found.append(outputs["2"].clone())
        assert not outputs["2"].requires_grad
    assert all(torch.equal(found[0], later) for later in found[1:])


def test_the_digits_network_at_nine_tenths_sparsity_keeps_its_frozen_weights():
    net, (images, labels) = nk.load_model("netkin:digits"), next(iter(nk.load_data("digits:train", batch_size=256)))
    nk.sparsify(net, 0.9)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items() if name.startswith(("conv1", "conv2"))}
    with nk.FreezeTraining(net, {"conv2": 0}, steps=8) as freezing:
        nk.train(net, (images, labels), steps=8, batch=64, lr=0.1, hooks=[freezing], progress=False)
        assert freezing.frozen == ["conv2"]
    assert all(torch.equal(before[name], net.state_dict()[name]) for name in before)
    assert len(before) == 6  # weights, biases and masks of two layers


@pytest.mark.parametrize("method", ["rigl", "set"])
def test_masks_of_frozen_layers_stay_and_the_others_move(method):
    net, seen = computed("masks"), AsTrained(4)
    moving = nk.DynamicMasks(method, every=2, until=13)
    with nk.FreezeTraining(net, {"0": 4 / 12}, steps=12) as freezing:
        nk.train(net, (INPUTS, LABELS), hooks=[freezing, moving, seen], **RECIPE)
    assert seen.moved(net) == {"2", "4"}
    assert not torch.equal(seen.state["2.parametrizations.weight.0.mask"], net[2].parametrizations.weight[0].mask)


@pytest.mark.parametrize("method", ["rigl", "set"])
def test_masks_stay_when_all_layers_that_have_some_are_frozen(method):
    net, seen = seeded(perceptron, 0), AsTrained(1)
    nk.sparsify(net, 0.5, layers=["0"])
    moving = nk.DynamicMasks(method, every=2, until=13)
    with nk.FreezeTraining(net, {"0": 0}, steps=12) as freezing:
        nk.train(net, (INPUTS, LABELS), hooks=[freezing, moving, seen], **RECIPE)
    assert seen.moved(net) == {"2", "4"}
    assert moving.moved == 0


# --- other buffers ----------------------------------------------------------------------------------------------------


class Follows(nn.Module):
    """Subtracts a running mean of its own, which it moves in any mode."""

    def __init__(self, in_place):
        super().__init__()
        self.linear, self.dropout, self.in_place = nn.Linear(8, 8), nn.Dropout(0.5), in_place
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("unused", None)

    def forward(self, x):
        x = self.linear(x)
        if self.in_place:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.dropout(x - self.mean)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_a_module_moves_by_itself_is_put_back(in_place):
    net = nn.Sequential(seeded(lambda: Follows(in_place), 0), nn.Linear(8, 3))
    start, optimizer = net[0].mean, sgd(net)
    with nk.FreezeTraining(net, {"0": 0.5}, steps=4) as freezing:
        for step in range(4):
            before = net[0].mean.clone()
            net(INPUTS).pow(2).sum().backward()
            optimizer.step()
            freezing.step()
            assert torch.equal(before, net[0].mean) is (step >= 2)
        assert net[0].dropout.training
        net.eval()(INPUTS)
        assert torch.equal(before, net[0].mean)
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            twin(-INPUTS)
            assert torch.equal(before, twin[0].mean)
    net(INPUTS)
    assert not torch.equal(before, net[0].mean)  # given back
    assert (net[0].mean is start) is in_place
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_a_buffer_is_put_back_when_the_forward_pass_crashes():
    net = nn.Sequential(Follows(True), nn.Linear(8, 3))
    net[0].dropout.register_forward_hook(lambda *call: 1 / 0)
    with nk.FreezeTraining(net, {"0": 0}, steps=4), pytest.raises(ZeroDivisionError):
        net(INPUTS)
    assert not net[0].mean.any()


def test_weights_that_are_loaded_into_a_frozen_model_stay():
    net, other = (nn.Sequential(seeded(lambda: Follows(True), seed), nn.Linear(8, 3)) for seed in (0, 1))
    other(INPUTS)
    with nk.FreezeTraining(net, {"0": 0}, steps=4):
        net(INPUTS)
        net.load_state_dict(other.state_dict())
        net(INPUTS)
    assert same(weights(net), weights(other))


@pytest.mark.slow
def test_a_buffer_that_compiled_code_moves_is_put_back():
    net = nn.Sequential(seeded(lambda: Follows(True), 0), nn.Linear(8, 3))
    compiled, optimizer = torch.compile(net, backend="aot_eager"), sgd(net)
    with nk.FreezeTraining(compiled, {"0": 0.5}, steps=4) as freezing:
        for step in range(4):
            before = net[0].mean.clone()
            compiled(INPUTS).pow(2).sum().backward()
            optimizer.step()
            freezing.step()
            assert torch.equal(before, net[0].mean) is (step >= 2)


# --- where weights lie outside the groups -----------------------------------------------------------------------------


class WithPlaces(nn.Module):
    """A parametrized weight of the model itself, which the first group depends on, and one after all groups."""

    def __init__(self):
        super().__init__()
        self.places, self.scale = nn.Parameter(torch.ones(2, 8)), nn.Parameter(torch.ones(3, 3))
        parametrizations.spectral_norm(self, "places")
        parametrizations.spectral_norm(self, "scale")
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))

    def forward(self, x):
        return self.blocks(x + self.places.sum(0)) @ self.scale


def test_what_computes_a_weight_of_the_model_itself_is_frozen_with_what_depends_on_it():
    net = seeded(WithPlaces, 0).train()
    optimizer = sgd(net)
    with nk.FreezeTraining(net, {"blocks.0": 0.5, "blocks.1": 1}, steps=4) as freezing:
        for _ in range(4):
            before = weights(net)
            net(INPUTS).pow(2).mean().backward()
            optimizer.step()
            freezing.step()
        assert freezing.members("blocks.0") == ["parametrizations.places", "blocks.0"]
        changed = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
    assert "parametrizations.scale.original" in changed
    assert not any(name.startswith(("parametrizations.places", "blocks.0")) for name in changed)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripted_layers_are_refused():
    net = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 3))
    with pytest.raises(InvalidValue, match="layer '1' is a ScriptModule"):
        nk.FreezeTraining(net, steps=4)
    with pytest.raises(InvalidValue, match="the model is a ScriptModule"):
        nk.FreezeTraining(torch.jit.script(nn.Linear(8, 8)), steps=4)


# --- in company -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["masks", "weight_norm", "spectral_norm", "hook spectral_norm"])
def test_frozen_layers_stand_still_where_networks_are_trained_at_once(kind):
    nets = [computed(kind) for _ in range(3)]
    held = [nk.FreezeTraining(net, {"2": 0}, steps=9) for net in nets]
    before = [weights(net) for net in nets]
    train_many(nets, (INPUTS, LABELS), seeds=range(3), **RECIPE)
    for net, state, freezing in zip(nets, before, held, strict=True):
        freezing.close()
        assert moved(state, net) == {"4"}


@pytest.mark.parametrize("kind", ["masks", "spectral_norm"])
def test_a_resumed_training_gives_the_weights_of_the_uninterrupted_one(kind, tmp_path):
    def trained(stop_at=None, **options):
        def stop(model, step):
            if step == stop_at:
                raise KeyboardInterrupt

        stop.settings = "the same hook, whenever it stops"
        net = computed(kind)
        with nk.FreezeTraining(net, "linear", steps=12) as freezing:
            nk.train(net, (INPUTS, LABELS), hooks=[freezing, stop], **RECIPE, **options)
        return weights(net)

    expected, saved = trained(), {"save": tmp_path / "run", "every": 1}
    with pytest.raises(KeyboardInterrupt):
        trained(6, **saved)
    assert same(trained(**saved), expected)


@pytest.mark.parametrize("kind", ["masks", "spectral_norm"])
def test_frozen_layers_stand_still_in_lightning(kind, tmp_path):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = computed(kind)

        def training_step(self, batch, number):
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return sgd(self)

    module = Module()
    before = weights(module.net)
    batches = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about loaders and logs that a test does not need
        pl.Trainer(
            max_epochs=2, callbacks=[lightning_callback({"net.2": 0})], accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            default_root_dir=tmp_path,
        ).fit(module, batches)  # fmt: skip
    assert moved(before, module.net) == {"4"}


class WithLoss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs, labels):
        logits = self.net(inputs)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masks", "spectral_norm"])
def test_frozen_layers_stand_still_in_the_trainer(kind, tmp_path):
    model = WithLoss(computed(kind))
    before = weights(model.net)
    examples = [{"inputs": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=16, learning_rate=0.1, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    callbacks = [trainer_callback({"net.2": 0})]
    transformers.Trainer(model=model, args=arguments, train_dataset=examples, callbacks=callbacks).train()
    assert moved(before, model.net) == {"4"}
