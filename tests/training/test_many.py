"""Many networks at once, by all ways, against one by one."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.flop_counter import FlopCounterMode

from netkin.errors import ForwardError, InvalidValue, ShapeError, UnknownName
from netkin.representations.filters import AtomConv2d
from netkin.settings import without_vmap_warnings
from netkin.training import Recipe, many, train, train_many
from netkin.training.many import Trainings
from quickly import slow_after
from refusals import refusals


def net(seed, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(5, 3),
        ).to(dtype)  # fmt: skip


def labelled(n=40, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 6, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)


def furthest(models, others):
    pairs = [
        zip(a.state_dict().values(), b.state_dict().values(), strict=True) for a, b in zip(models, others, strict=True)
    ]
    return max((x.double() - y.double()).abs().max().item() for pair in pairs for x, y in pair)


def both(recipe, count=4, dtype=torch.float64, method="stacked", **options):
    """Train networks by some way and one by one, and return both, with their histories."""
    models = [net(seed, dtype) for seed in range(count)]
    plain = copy.deepcopy(models)
    given = {"data": labelled()} | options
    histories = train_many(models, recipe=recipe, method=method, **given)
    return models, plain, histories, train_many(plain, recipe=recipe, method="one by one", **given)


RECIPES = {
    "sgd": Recipe(steps=20, batch=16, lr=0.1, weight_decay=0.01, schedule="cosine", warmup=3),
    "nesterov": Recipe(steps=20, batch=16, lr=0.1, nesterov=True, weight_decay=0.01, order="drawn"),
    "no momentum": Recipe(steps=20, batch=16, lr=0.1, momentum=0.0, clip=0.3),
    "adam": Recipe(epochs=7, batch=16, optimizer="adam", lr=0.01, weight_decay=0.01, schedule="steps"),
    "adamw": Recipe(epochs=7, batch=16, optimizer="adamw", lr=0.01, weight_decay=0.1, schedule="linear"),
    "moved": Recipe(epochs=10, batch=16, lr=0.1, shift=2, flip=True, drop_last=True, smoothing=0.1),
}


@pytest.mark.parametrize("name", slow_after(3, RECIPES))
def test_stacked_networks_are_those_of_one_by_one(name):
    models, plain, histories, expected = both(RECIPES[name])
    assert furthest(models, plain) < 1e-8
    for history, own in zip(histories, expected, strict=True):
        assert [record["step"] for record in history] == [record["step"] for record in own]
        assert [record["loss"] for record in history] == pytest.approx([record["loss"] for record in own], abs=1e-9)


def test_the_first_gradients_of_stacked_networks_are_right_in_float32():
    models, plain, *_ = both(Recipe(steps=1, batch=32, lr=1.0, momentum=0.0), dtype=torch.float32)
    assert furthest(models, plain) < 1e-5


def test_each_network_has_its_own_data_seed_and_number_of_examples():
    recipe = Recipe(epochs=3, batch=8, lr=0.1, drop_last=True, schedule="linear")
    data = [labelled(n, seed=n) for n in (8, 23, 40)]
    models, plain, histories, _ = both(recipe, 3, data=None, data_of_each=data, seeds=[5, 5, 9])
    assert furthest(models, plain) < 1e-8
    assert [len(history) for history in histories] == [3, 3, 3]
    assert [history[-1]["step"] for history in histories] == [3, 6, 15]


def test_ragged_networks_by_steps_and_adam_keep_their_own_count():
    recipe = Recipe(epochs=4, batch=8, optimizer="adam", lr=0.02, order="drawn")
    data = [labelled(n, seed=n) for n in (8, 40, 16)]
    models, plain, *_ = both(recipe, 3, data=None, data_of_each=data)
    assert furthest(models, plain) < 1e-8


def test_tests_are_taken_after_each_epoch():
    recipe, held_out = Recipe(epochs=2, batch=16, lr=0.1), labelled(10, seed=3)
    _, _, histories, expected = both(recipe, test=held_out)
    for history, own in zip(histories, expected, strict=True):
        assert [record["accuracy"] for record in history] == [record["accuracy"] for record in own]
        assert [record["test_loss"] for record in history] == pytest.approx([record["test_loss"] for record in own])
        assert [list(record) for record in history] == [list(record) for record in own]


@pytest.mark.parametrize("method", ["stacked", "one by one"])
def test_networks_are_shown_on_their_way(method):
    recipe, seen = Recipe(epochs=3, batch=16, lr=0.1), {}
    models, data = [net(0), net(1)], labelled()

    def callback(number, model, step):
        seen[number, step] = copy.deepcopy(model)

    train_many(models, data, recipe, method=method, callback=callback, callback_steps={0, 4, 7})
    assert sorted(seen) == [(number, step) for number in (0, 1) for step in (0, 4, 7)]
    for (number, step), found in seen.items():
        expected = net(number)
        if step:
            train(expected, data, recipe.but(epochs=None, steps=step), seed=number)
        assert furthest([found], [expected]) < 1e-8


def test_regression_and_frozen_weights_are_stacked_too():
    inputs = torch.linspace(-1, 1, 32, dtype=torch.float64)[:, None]
    models = [nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double() for _ in range(3)]
    for model in models:
        model[0].bias.requires_grad_(False)
    plain, first = copy.deepcopy(models), models[0][0].bias.clone()
    recipe = Recipe(epochs=5, batch=8, lr=0.1, weight_decay=0.01)
    train_many(models, (inputs, inputs.square()), recipe, loss=mse_loss, method="stacked")
    train_many(plain, (inputs, inputs.square()), recipe, loss=mse_loss, method="one by one")
    assert furthest(models, plain) < 1e-9
    assert torch.equal(models[0][0].bias, first)


def test_networks_are_given_back_as_they_were_found():
    models = [net(seed).eval() for seed in range(2)]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train_many(models, labelled(), epochs=1, method="stacked")
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for model in models for module in model.modules())
    assert all(weight.grad is None and weight.is_leaf for model in models for weight in model.parameters())


def call(models, recipe, data=None, **options):
    given = {"test": None, "loss": None, "hooks": None, "callback": None, "callback_steps": ()} | options
    each = [data or labelled()] * len(models)
    return Trainings(models, each, recipe, seeds=list(range(len(models))), **given)


def states_of(models):
    return [{name: one.detach().clone() for name, one in model.state_dict().items()} for model in models]


def test_stacked_networks_are_trained_again_from_other_weights_on_other_data():
    recipe = Recipe(epochs=2, batch=16, lr=0.1, drop_last=True)
    first, second, last = ([labelled(n, seed=n) for n in sizes] for sizes in ((40, 60), (50, 45), (90, 20)))
    work = Trainings([net(0), net(1)], first, recipe, None, [0, 1])
    assert work.again(states_of([net(2), net(3)]), second, [5, 6]) is None  # nothing was stacked yet
    work.run("stacked")
    plain = [net(2), net(3)]
    states, fine, histories = work.again(states_of(plain), second, [5, 6])
    expected = train_many(plain, data_of_each=second, recipe=recipe, seeds=[5, 6], method="one by one")
    assert fine == [True, True]
    for own, model in zip(states, plain, strict=True):
        assert max(float((own[name] - one).abs().max()) for name, one in model.state_dict().items()) < 1e-8
    for history, own in zip(histories, expected, strict=True):
        assert [one["loss"] for one in history] == pytest.approx([one["loss"] for one in own], abs=1e-8)
    assert work.again(states, last, [0, 1]) is None  # more examples than there is room for


def test_data_that_stacked_networks_share_are_not_written_over():
    data, recipe = labelled(), Recipe(epochs=1, batch=16, lr=0.1)
    before = [one.clone() for one in data]
    work = Trainings([net(0), net(1)], [data, data], recipe, None, [0, 1])
    work.run("stacked")
    assert work.again(states_of([net(0), net(1)]), [labelled(seed=7)] * 2, [0, 1]) is None
    assert work.again(states_of([net(0), net(1)]), [data, data], [0, 1]) is not None
    assert all(torch.equal(one, old) for one, old in zip(data, before, strict=True))


def test_operations_of_filters_made_of_atoms_are_those_of_the_filters():
    images, rest = torch.zeros(4, 3, 6, 6), (3, 5, 3)
    found = [many._try_forward(layer, images)[0] for layer in (AtomConv2d(*rest, atoms=9), nn.Conv2d(*rest))]
    assert found[0] == found[1] == 2 * 4 * 5 * 16 * 27


@pytest.mark.parametrize("name", slow_after(2, RECIPES))
def test_the_steps_that_graphs_record_are_those_of_one_by_one(name):
    """The steps themselves, without a graph around them: those of networks that need not be of one form."""
    models = [net(0), nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()]
    plain, data = copy.deepcopy(models), [labelled(40), labelled(35, seed=2)]
    work = Trainings(models, data, RECIPES[name], labelled(9), [3, 4], None, None, None, frozenset())
    histories = work._at_once("graphs")
    expected = train_many(
        plain, data_of_each=data, recipe=RECIPES[name], seeds=[3, 4], test=labelled(9), method="one by one"
    )
    assert furthest(models, plain) < 1e-8
    for history, own in zip(histories, expected, strict=True):
        assert [record["step"] for record in history] == [record["step"] for record in own]
        assert [record["loss"] for record in history] == pytest.approx([record["loss"] for record in own], abs=1e-9)
        assert [record["accuracy"] for record in history] == [record["accuracy"] for record in own]


class Attentive(nn.Module):
    """A network of weight norm and attention, for which `torch.func.vmap` has no rules; it warns of itself."""

    def __init__(self):
        super().__init__()
        self.embed = nn.utils.parametrizations.weight_norm(nn.Linear(18, 8))
        self.attention, self.fc = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        warnings.warn("a word of its own", stacklevel=2)
        tokens = self.embed(x.reshape(-1, 4, 18))
        return self.fc(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))


def test_stacked_networks_do_not_repeat_torchs_warnings_of_missing_rules():
    models, recipe = [Attentive() for _ in range(3)], Recipe(epochs=2, batch=20, lr=0.1)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        trainings = call(models, recipe)
        trainings.run("stacked")
        assert trainings.again(states_of(models), trainings.arrays, range(3)) is not None
    assert {str(one.message) for one in given} == {"a word of its own"}
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("default")
        with without_vmap_warnings():  # as around a whole federation
            for _ in range(3):
                trainings.again(states_of(models), trainings.arrays, range(3))
    assert [str(one.message) for one in given] == ["a word of its own"]  # and not once a round
    with pytest.warns(UserWarning, match="not yet implemented the batching rule for aten::_weight_norm"):  # elsewhere
        torch.vmap(torch._weight_norm)(torch.ones(2, 3, 3), torch.ones(2, 3, 1))


class Scaled(nn.Module):
    """A network with a number that neither its weights nor its text show."""

    def __init__(self, scale):
        super().__init__()
        self.inner, self.scale = net(0), scale

    def forward(self, images):
        return self.inner(self.scale * images)


def test_small_networks_are_stacked_and_large_ones_are_not():
    recipe = Recipe(epochs=1, batch=8)
    small, large = [net(0), net(1)], [nn.Sequential(nn.Flatten(), nn.Linear(72, 20_000), nn.Linear(20_000, 3))] * 2
    assert call(small, recipe)._best() == ["stacked"]
    assert call(large, recipe)._best() == []
    assert call(small[:1], recipe)._best() == []
    assert call(small, recipe, hooks=lambda number: [])._best() == []
    assert call([net(0), net(0, torch.float32)], recipe)._best() == []
    assert call(small, Recipe(epochs=1, optimizer=torch.optim.SGD))._best() == []
    assert call([Scaled(1.0), Scaled(1.0)], recipe)._best() == ["stacked"]
    assert call([Scaled(1.0), Scaled(2.0)], recipe)._best() == []
    small[0][0].register_forward_hook(lambda *given: None)
    assert call(small, recipe)._best() == []


def test_networks_too_large_to_be_stacked_are_neither_run_nor_compared_to_find_that_out(monkeypatch):
    def costly(*given):
        raise AssertionError("took time for nothing")

    large = [nn.Sequential(nn.Flatten(), nn.Linear(72, 20_000), nn.Linear(20_000, 3)) for _ in range(2)]
    for question in ("_trials", "_unlike"):
        monkeypatch.setattr(Trainings, question, costly)
    assert call(large, Recipe(epochs=1, batch=8))._best() == []
    with pytest.raises(AssertionError, match="for nothing"):
        call([net(0), net(1)], Recipe(epochs=1, batch=8))._best()


def test_operations_are_those_of_torchs_counter():
    work = call([net(0), net(1)], Recipe(epochs=1, batch=16))
    with FlopCounterMode(display=False) as counter:
        net(0)(labelled()[0][:16].double())
    assert work._trials() == [(counter.get_total_flops(), "")]


class Counting(nn.Module):
    """A network that counts its batches in a plain number, which no stack would see."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = net(0), 0

    def forward(self, images):
        self.seen += 1
        return self.inner(images)


class Rebinding(Counting):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, images):
        self.mean = 0.9 * self.mean + images.mean()
        return self.inner(images)


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda seed: nn.Sequential(net(seed), nn.Dropout(0.5)), "stacked into one failed.*random"),
        (lambda seed: Counting(), "stacked into one failed.*changes 'seen' of the model, which is no buffer"),
        (lambda seed: Rebinding(), "stacked into one failed.*changes 'mean' of the model"),
    ],
)
def test_networks_that_cannot_be_stacked_are_trained_one_by_one_with_the_reason(make, sentence):
    models, recipe = [make(seed) for seed in range(2)], Recipe(epochs=1, batch=8)
    plain = copy.deepcopy(models)
    with pytest.warns(UserWarning, match=sentence):
        train_many(models, labelled(), recipe, seeds=[1, 2])
    for model, seed in zip(plain, (1, 2), strict=True):
        train(model, labelled(), recipe, seed=seed)
    assert furthest(models, plain) == 0
    with pytest.raises(InvalidValue, match="can't be trained stacked into one"):
        train_many(models, labelled(), recipe, method="stacked")


def test_a_step_that_fails_when_it_is_tried_leaves_the_weights_alone():
    models, calls = [net(0), net(1)], []

    def loss(outputs, labels):
        calls.append(len(labels))
        if len(calls) == 2:
            raise RuntimeError("not twice")
        return outputs.square().mean()

    work = Trainings(
        models, [labelled()] * 2, Recipe(epochs=1, batch=16, lr=0.1), None, [0, 1], loss, None, None, frozenset()
    )
    with pytest.raises(Exception, match="not twice"):
        work._at_once("graphs")
    assert calls == [16, 8]
    assert furthest(models, [net(0), net(1)]) == 0


@pytest.mark.parametrize("method", ["stacked", "one by one"])
def test_networks_come_back_as_far_as_they_were_trained(method):
    def stop(number, model, step):
        raise KeyboardInterrupt

    models, expected = [net(0), net(1)], net(0)
    with pytest.raises(KeyboardInterrupt):
        train_many(models, labelled(), epochs=2, batch=16, method=method, callback=stop, callback_steps=[4])
    train(expected, labelled(), steps=4, batch=16, seed=0)
    assert furthest(models[:1], [expected]) < 1e-8


def test_hooks_are_made_for_each_network():
    seen = []
    hooks = lambda number: [lambda model, step: seen.append((number, step))]  # noqa: E731
    train_many([net(0), net(1)], labelled(), steps=2, hooks=hooks)
    assert seen == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_what_cannot_be_trained_at_once_is_refused():
    models = [net(0), net(1)]
    refusals(
        (lambda: train_many([], labelled(), epochs=1), InvalidValue, "models"),
        (lambda: train_many(models, epochs=1), InvalidValue, "data"),
        (lambda: train_many(models, labelled(), epochs=1, seeds=[1, 2, 3]), ShapeError, "seeds"),
        (lambda: train_many(models, labelled(), epochs=1, seeds=2), InvalidValue, "seeds"),
        (lambda: train_many(models, labelled(), epochs=1, save="many.netkin"), InvalidValue, ""),
        (lambda: train_many([models[0]] * 2, labelled(), epochs=1), InvalidValue, "models"),
        (lambda: train_many(models, labelled(), epochs=1, method="stackd"), UnknownName, "method"),
    )
    with pytest.raises(InvalidValue, match="as CUDA graphs: CUDA graphs need a GPU, and they lie on cpu"):
        train_many(models, labelled(), epochs=1, method="graphs")
    with pytest.raises(InvalidValue, match="stacked into one: they are not of one form"):
        train_many([net(0), net(1, torch.float32)], labelled(), epochs=1, method="stacked")
    with pytest.raises(InvalidValue, match="8 to 40 examples; drop_last=True"):
        train_many(models, data_of_each=[labelled(8), labelled(40)], epochs=1, method="stacked")
    with pytest.raises(InvalidValue, match="their data must be arrays"):
        train_many(models, [labelled()], epochs=1, method="stacked")
    with pytest.raises(ForwardError, match="the mean loss of epoch 1 is nan"):
        train_many(models, labelled(), steps=9, batch=8, lr=1e300, method="stacked")
