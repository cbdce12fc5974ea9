"""The training loop against loops written out by hand, and as a guest of its caller."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import LinearLR

import netkin as nk
from netkin.errors import ForwardError, InvalidValue, ShapeError, SourceError, UnknownName
from netkin.training import Hook, Recipe, accuracy, train
from refusals import refusals, refused


def net(seed=0, dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(),
            nn.Linear(4 * 36, 3),
        )  # fmt: skip


def labelled(n=40, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 6, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)


def same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_plain_loop_gives_the_same_weights_bit_for_bit():
    inputs, labels = labelled()
    ours, theirs = net(), net()
    history = train(ours, (inputs, labels), epochs=3, batch=16, lr=0.1, weight_decay=0.01, nesterov=True, seed=5)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    draw, losses = torch.Generator().manual_seed(5), []
    for _ in range(3):
        for rows in torch.randperm(40, generator=draw).split(16):
            loss = cross_entropy(theirs(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert same(ours, theirs)
    assert [record["step"] for record in history] == [3, 6, 9]
    assert history[-1]["loss"] == pytest.approx(np.mean(losses[-3:]), rel=1e-6)


def test_whole_batches_leave_the_rest_for_the_next_shuffle():
    history = train(net(), labelled(), epochs=2, batch=16, drop_last=True)
    assert [record["step"] for record in history] == [2, 4]


def test_drawn_batches_clipped_gradients_and_a_cosine_are_those_of_a_loop_by_hand():
    inputs, labels = labelled()
    ours, theirs = net(), net()
    recipe = Recipe(steps=7, batch=8, optimizer="adam", lr=0.01, schedule="cosine", clip=0.5, order="drawn")
    train(ours, (inputs, labels), recipe, seed=2)
    optimizer = torch.optim.Adam(theirs.parameters(), 0.01)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    draw = torch.Generator().manual_seed(2)
    for _ in range(7):
        rows = torch.randint(40, (8,), generator=draw)
        optimizer.zero_grad()
        cross_entropy(theirs(inputs[rows]), labels[rows]).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        rates.step()
    assert same(ours, theirs)


def test_images_are_moved_by_whole_pixels_into_a_margin_of_zeros():
    images = torch.arange(1.0, 33).reshape(2, 1, 4, 4)
    moves = torch.tensor([[0, 2], [1, 4]])  # down and across; 2 leaves an image where it is
    margin = torch.nn.functional.pad(images, (2,) * 4)
    found = nk.training.moved(margin, torch.tensor([1, 0]), moves, shift=2)
    by_hand = [margin[1, :, 0:4, 1:5], margin[0, :, 2:6, 4:8]]
    assert torch.equal(found, torch.stack(by_hand))


def test_flips_mirror_about_every_other_image_and_follow_the_seed():
    images, seen = torch.arange(3.0).expand(64, 1, 1, 3).contiguous(), []

    class Seeing(nn.Linear):
        def forward(self, inputs):
            seen.append(inputs[:, 0, 0].clone())
            return super().forward(inputs.flatten(1))

    train(Seeing(3, 2), (images, torch.zeros(64, dtype=torch.long)), epochs=1, batch=64, flip=True)
    mirrored = (seen[0][:, 0] == 2).sum().item()
    assert 16 < mirrored < 48
    assert (seen[0][:, 1] == 1).all()


def test_optimizers_and_schedulers_of_torch_come_as_functions():
    inputs, labels = labelled()
    ours, theirs = net(), net()
    linear = partial(LinearLR, start_factor=1, end_factor=0.1, total_iters=2)
    make = partial(torch.optim.RMSprop, lr=0.01)
    train(ours, (inputs, labels), epochs=3, batch=40, order="given", optimizer=make, schedule=linear)
    optimizer = make(theirs.parameters())
    rates = linear(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(theirs(inputs), labels).backward()
        optimizer.step()
        rates.step()
    assert same(ours, theirs)


def test_regression_and_recurrent_networks_train_too():
    inputs = torch.linspace(-1, 1, 64)[:, None]
    history = train(nn.Linear(1, 1), (inputs, 3 * inputs), epochs=99, lr=0.1, loss=mse_loss, test=(inputs, 3 * inputs))
    assert history[-1]["loss"] < 1e-3
    assert "accuracy" not in history[-1]
    assert history[-1]["test_loss"] < 1e-3
    model = nk.load_model("netkin:char_lstm")
    tokens = torch.randint(0, 20, (12, 9), generator=torch.Generator().manual_seed(0))
    data = (tokens[:, :-1], tokens[:, 1:])
    history = train(model, data, steps=3, batch=6, optimizer="adam", lr=1e-3, test=data)
    assert 0 <= history[-1]["accuracy"] <= 1


@pytest.mark.parametrize("form", ["loader", "list", "dataset", "mapping"])
def test_data_come_in_many_forms(form):
    inputs, labels = labelled()
    pairs = torch.utils.data.TensorDataset(inputs, labels)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, pixels):
            return self.inner(pixels)

    ours = Named() if form == "mapping" else net()
    data = {
        "loader": torch.utils.data.DataLoader(pairs, 8),
        "list": list(zip(inputs.split(8), labels.split(8), strict=True)),
        "dataset": pairs,
        "mapping": {"pixels": inputs, "labels": labels},
    }[form]
    order = "given" if form in ("dataset", "mapping") else "shuffled"
    train(ours, data, epochs=2, batch=8, order=order, test=data)
    theirs = net()
    train(theirs, (inputs, labels), epochs=2, batch=8, order="given")
    assert same(ours.inner if form == "mapping" else ours, theirs)


def test_a_shuffled_dataset_comes_in_the_order_of_its_arrays():
    inputs, labels = labelled()
    ours, theirs = net(), net()
    train(ours, torch.utils.data.TensorDataset(inputs, labels), epochs=2, batch=8, seed=3)
    train(theirs, (inputs, labels), epochs=2, batch=8, seed=3)
    assert same(ours, theirs)


def test_a_loader_that_shuffles_follows_the_seed_unless_it_has_a_generator():
    pairs = torch.utils.data.TensorDataset(*labelled())

    def trained(seed, **options):
        model = net()
        train(model, torch.utils.data.DataLoader(pairs, 8, shuffle=True, **options), epochs=1, seed=seed)
        return model

    assert same(trained(0), trained(0))
    assert not same(trained(0), trained(1))
    own = [trained(seed, generator=torch.Generator().manual_seed(3)) for seed in (0, 1)]
    assert same(*own)


def test_the_caller_keeps_modes_and_random_states():
    model = net(dropout=0.5)
    model[3].eval()
    flags = [module.training for module in model.modules()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = (random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    train(model, torch.utils.data.DataLoader(list(zip(*labelled(), strict=True)), 8, shuffle=True), epochs=1)
    assert before == (random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert flags == [module.training for module in model.modules()]


def test_modes_come_back_after_a_crash():
    def crash(model, step):
        raise RuntimeError("no more")

    model = net().eval()
    with pytest.raises(RuntimeError, match="no more"):
        train(model, labelled(), epochs=1, hooks=[crash])
    assert not any(module.training for module in model.modules())


def test_dropout_follows_the_seed_whatever_was_drawn_before():
    found = []
    for seed, drawn in [(0, 1), (0, 7), (1, 1)]:
        torch.manual_seed(drawn)
        model = net(dropout=0.5)
        train(model, labelled(), epochs=1, batch=40, order="given", seed=seed)
        found.append(model)
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


class Masking(Hook):
    """Keeps the first weights at zero, adds a penalty, and counts."""

    def __init__(self):
        self.seen, self.records = [], []

    def loss(self, model, inputs, outputs, step):
        self.seen.append((step, len(inputs), tuple(outputs.shape)))
        return 0.1 * model[5].weight.square().sum()

    def after_backward(self, model, step):
        model[0].weight.grad[0] = 0

    def after_epoch(self, model, record):
        self.records.append(record)


def test_hooks_add_to_the_loss_mask_gradients_and_read_records():
    inputs, labels = labelled()
    hook, ours, theirs = Masking(), net(), net()
    first = ours[0].weight[0].clone()
    history = train(ours, (inputs, labels), epochs=2, batch=20, order="given", hooks=[hook])
    optimizer = torch.optim.SGD(theirs.parameters(), 0.05, momentum=0.9)
    for rows in [slice(0, 20), slice(20, 40)] * 2:
        optimizer.zero_grad()
        loss = cross_entropy(theirs(inputs[rows]), labels[rows]) + 0.1 * theirs[5].weight.square().sum()
        loss.backward()
        theirs[0].weight.grad[0] = 0
        optimizer.step()
    assert same(ours, theirs)
    assert torch.equal(ours[0].weight[0], first)
    assert hook.seen == [(step, 20, (20, 3)) for step in (1, 2, 3, 4)]
    assert hook.records == history


def test_freezing_and_recording_are_hooks_as_they_are():
    model = net()
    recorder = nk.DynamicsRecorder(model, labelled(seed=9)[0])
    with nk.FreezeTraining(model, "linear", steps=6) as freezing:
        train(model, labelled(), epochs=2, batch=16, hooks=[freezing, recorder])
        assert freezing.done == 6
        assert freezing.frozen == freezing.groups[:-1]
    assert recorder.steps == (0, 3, 6)


def test_the_test_is_taken_in_evaluation_mode():
    model, held_out = net(dropout=0.5), labelled(30, seed=4)
    history = train(model, labelled(), epochs=2, batch=16, test=held_out)
    logits = model.eval()(held_out[0])
    right = (logits.argmax(1) == held_out[1]).sum().item() / 30
    assert history[-1]["accuracy"] == right == accuracy(model, held_out)
    assert history[-1]["test_loss"] == pytest.approx(cross_entropy(logits, held_out[1]).item(), rel=1e-6)


def test_label_smoothing_is_torchs():
    inputs, labels = labelled()
    history = train(net(), (inputs, labels), steps=1, batch=40, order="given", smoothing=0.2)
    assert history[0]["loss"] == pytest.approx(cross_entropy(net()(inputs), labels, label_smoothing=0.2).item())


def test_lower_precision_trains_nearly_alike():
    plain, lowered = net(), net()
    train(plain, labelled(), epochs=2, batch=20)
    train(lowered, labelled(), epochs=2, batch=20, precision="bf16")
    assert lowered[0].weight.dtype == torch.float32
    assert not same(plain, lowered)
    assert torch.allclose(plain[5].weight, lowered[5].weight, atol=2e-2)


@pytest.mark.parametrize(
    "settings, fault, argument",
    [
        ({}, InvalidValue, "epochs"),
        ({"epochs": 1, "steps": 1}, InvalidValue, "epochs"),
        ({"epochs": 0}, InvalidValue, "epochs"),
        ({"epochs": 1, "lr": -1}, InvalidValue, "lr"),
        ({"epochs": 1, "clip": 0}, InvalidValue, "clip"),
        ({"epochs": 1, "optimizer": "adm"}, UnknownName, "optimizer"),
        ({"epochs": 1, "schedule": "cosin"}, UnknownName, "schedule"),
        ({"epochs": 1, "precision": "bf32"}, UnknownName, "precision"),
        ({"epochs": 1, "epoch": 2}, UnknownName, "recipe"),
        ({"epochs": 2, "warmup": 2}, InvalidValue, "warmup"),
        ({"epochs": 1, "batch": 64, "drop_last": True}, InvalidValue, "batch"),
        ({"epochs": 1, "smoothing": 0.1, "loss": mse_loss}, InvalidValue, "smoothing"),
        ({"epochs": 1, "hooks": [3]}, InvalidValue, "hooks"),
        ({"epochs": 1, "lr": 1e30, "batch": 8}, ForwardError, ""),
    ],
)
def test_what_cannot_be_trained_is_refused(settings, fault, argument):
    with refused(fault, argument):
        train(net(), labelled(), **settings)


def test_a_recipe_is_a_recipe():
    refusals(
        (lambda: train(net(), labelled(), 10), InvalidValue, "recipe"),
        (lambda: train(net(), labelled(), epochs=1, every=5), InvalidValue, "every"),
    )


def test_the_name_of_a_model_is_no_model():
    with pytest.raises(InvalidValue, match="a model must be a `torch.nn.Module`; got str. `nk.load_model` makes"):
        nk.train("netkin:digits", (torch.ones(4, 1), torch.ones(4, 1)), epochs=1)


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch below 2.8 makes other programs")
def test_the_module_of_an_exported_program_is_refused():
    exported = torch.export.export(net(), (labelled()[0],)).module()
    for call, given in ((nk.train, exported), (nk.train_many, [exported])):
        with pytest.raises(InvalidValue, match="exported program can't be trained.*the model it was made from"):
            call(given, labelled(), epochs=1)


def test_settings_that_batches_overrule_are_named():
    inputs, labels = labelled()
    pairs = torch.utils.data.TensorDataset(inputs, labels)
    loader = torch.utils.data.DataLoader(pairs, 8)
    with pytest.warns(UserWarning, match="`batch=4` and `order='drawn'` are not used: the data come as batches"):
        history = train(net(), loader, epochs=1, batch=4, order="drawn")
    assert history[-1]["step"] == 5
    with pytest.warns(UserWarning, match="^`batch=4` is not used"):
        train(net(), list(loader), epochs=1, batch=4)
    with pytest.warns(UserWarning, match="^`batch=4` is not used") as told:
        nk.train_many([net(0), net(1), net(2)], loader, epochs=1, batch=4)
    assert [one.filename for one in told] == [__file__]  # once, and at the line of the caller
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in (loader, list(loader), pairs, (inputs, labels)):
            train(net(), data, epochs=1, batch=8, order="given")


def test_data_that_cannot_be_trained_on_are_refused():
    inputs, labels = labelled()
    refusals(
        (lambda: train(net(), (inputs, labels[:-1]), epochs=1), ShapeError, "data"),
        (lambda: train(net(), 7, epochs=1), InvalidValue, "data"),
        (lambda: train(net(), "digitz:train", epochs=1), SourceError, ""),
        (lambda: train(net(), iter([(inputs, labels)]), epochs=1), InvalidValue, "data"),
        (lambda: train(net(), [(inputs, labels)], epochs=1, shift=2), InvalidValue, "shift"),
        (lambda: train(net(), (inputs, labels.float()), epochs=1), ShapeError, ""),
        (lambda: train(net(), inputs, epochs=1), InvalidValue, ""),
    )


def test_arrays_of_another_byte_order_train_like_any_others():
    inputs, labels = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3), np.arange(8) % 2
    found = []
    for data in ((inputs, labels), (inputs.astype(">f4"), labels.astype(">i8"))):
        model = nn.Linear(3, 2)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        nk.train(model, data, epochs=2, batch=4)
        found.append(model.weight)
    assert torch.equal(*found)
