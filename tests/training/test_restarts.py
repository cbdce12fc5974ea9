"""Trainings that stop and go on: bit for bit as if they had not, or refused."""

import json
import os
import random
import shutil
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler

import netkin as nk
from netkin import files, jobs
from netkin.errors import FileError, InvalidValue
from netkin.jobs import Cancelled, Job
from netkin.sources.weights import load_weights
from netkin.training import Hook, Recipe, train
from netkin.training.saving import pack_state, unpack_state
from quickly import slow_after, slow_but
from refusals import refused


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 3)
        )
        model.register_buffer("hidden", torch.zeros(1), persistent=False)
        return model


def labelled(n=40, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 6, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)


class Stop(Exception):
    """What a test ends a training with."""


class Averaging(Hook):
    """Follows the weights at a distance, in a state of its own, and pulls them back a little."""

    def __init__(self):
        self.mean = None

    def begin(self, model, optimizer):
        self.mean = [weight.detach().clone() for weight in model.parameters()]

    def after_step(self, model, step):
        model.hidden += 1
        for mean, weight in zip(self.mean, model.parameters(), strict=True):
            mean.lerp_(weight, 0.2)
            weight.lerp_(mean, 0.1)

    def state_dict(self):
        return {"mean": self.mean, "nothing": None, "inf": float("inf"), ("a", 1): np.arange(2)}

    def load_state_dict(self, state):
        assert state["inf"] == float("inf")
        assert state["a", 1].tolist() == [0, 1]
        self.mean = state["mean"]


def stopping(at):
    def stop(model, step):
        if step == at:
            raise Stop

    stop.settings = "whenever it stops, it is the same hook"
    return stop


RECIPES = {
    "sgd, moved": Recipe(epochs=3, batch=12, shift=1, flip=True, schedule="cosine", warmup=1),
    "adam, drawn": Recipe(steps=11, batch=12, order="drawn", optimizer="adam", lr=0.01, schedule="linear", clip=1.0),
    "adamw, bf16": Recipe(epochs=3, batch=12, optimizer="adamw", lr=0.01, precision="bf16", drop_last=True),
    "adam, fp16": Recipe(epochs=3, batch=12, optimizer="adam", lr=0.01, precision="fp16"),
    "own": Recipe(steps=9, batch=12, optimizer=torch.optim.RMSprop),
}


def everything(model, history):
    own = {name: value.tolist() for name, value in [*model.state_dict().items(), *model.named_buffers()]}
    return own, [{key: value for key, value in record.items() if key != "seconds"} for record in history]


@cache
def uninterrupted(name):
    """Return all that a training comes to that nothing stops."""
    whole = net()
    history = train(whole, labelled(), RECIPES[name], seed=4, hooks=[Averaging()], test=labelled(10, seed=3))
    return everything(whole, history)


@pytest.mark.parametrize("every", slow_but([None, 1, 3], 3))
@pytest.mark.parametrize("name", RECIPES)
def test_a_training_that_stopped_goes_on_as_if_it_had_not(tmp_path, name, every):
    recipe, held_out, expected = RECIPES[name], labelled(10, seed=3), uninterrupted(name)
    for at in (1, 5, 8):  # each time it comes a little further
        hooks = [Averaging(), stopping(at)]
        with pytest.raises(Stop):
            train(net(), labelled(), recipe, seed=4, hooks=hooks, test=held_out, save=tmp_path / "run", every=every)
    torch.manual_seed(99)  # what the process has drawn by then does not matter
    model = net()
    hooks = [Averaging(), stopping(None)]
    history = train(model, labelled(), recipe, seed=4, hooks=hooks, test=held_out, save=tmp_path / "run", every=every)
    assert everything(model, history) == expected
    again = net()  # a training that is done is read
    hooks = [Averaging(), stopping(1)]
    history = train(again, labelled(), recipe, seed=4, hooks=hooks, test=held_out, save=tmp_path / "run", every=every)
    assert everything(again, history) == expected


def test_freezing_and_recording_go_on_with_the_training(tmp_path):
    def trained(model, stop=None, **options):
        recorder = nk.DynamicsRecorder(model, labelled(seed=9)[0], every=4)
        with nk.FreezeTraining(model, "linear", steps=12) as freezing:
            hooks = [freezing, recorder, stopping(stop)]
            history = train(model, labelled(), epochs=3, batch=10, hooks=hooks, **options)
            return everything(model, history), freezing.frozen, recorder.series("cka", pairs="all").to_numpy().tolist()

    expected = trained(net())
    for stop in (5, 9):
        with pytest.raises(Stop):
            trained(net(), stop, save=tmp_path / "run", every=2)
    assert trained(net(), save=tmp_path / "run", every=2) == expected


def test_a_state_with_a_part_missing_is_told_to_be_damaged(tmp_path):
    train(net(), labelled(), epochs=1, save=tmp_path / "run")
    (part,) = (tmp_path / "run.job" / "parts").glob("*.netkin")
    header, arrays = files.read(part)
    kind, _ = header.pop("kind"), header.pop("format")
    header["values"]["state"]["mapping"].pop()
    files.write(part, kind, header, arrays, overwrite=True)
    with pytest.raises(FileError, match="is damaged: KeyError"):
        train(net(), labelled(), epochs=1, save=tmp_path / "run")


class Noisy(torch.utils.data.Dataset):
    """Images with noise of all three generators."""

    def __init__(self):
        self.inputs, self.labels = labelled()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, place):
        noise = random.random() + np.random.rand() + torch.rand(())
        return self.inputs[place] + noise, self.labels[place]


def _loader(sampling):
    generator = torch.Generator().manual_seed(3)
    options = {
        "shuffled": {"batch_size": 8, "shuffle": True},
        "by its own generator": {"batch_size": 8, "shuffle": True, "generator": generator},
        "in drawn batches": {"batch_sampler": BatchSampler(RandomSampler(range(40), generator=generator), 8, False)},
    }
    return torch.utils.data.DataLoader(Noisy(), **options[sampling]) if sampling in options else Noisy()


@pytest.mark.parametrize(
    "sampling", slow_after(1, ["shuffled", "by its own generator", "in drawn batches", "by the loop"])
)
def test_a_noisy_loader_goes_on_in_the_middle_of_an_epoch(tmp_path, sampling):
    data = _loader(sampling)
    whole, parted = net(), net()
    expected = everything(whole, train(whole, data, epochs=3, batch=8, seed=1))
    with pytest.raises(Stop):
        train(net(), data, epochs=3, batch=8, seed=1, save=tmp_path / "run", every=2, hooks=[stopping(8)])
    history = train(parted, data, epochs=3, batch=8, seed=1, save=tmp_path / "run", every=2, hooks=[stopping(None)])
    assert everything(parted, history) == expected


class Counting(torch.utils.data.DataLoader):
    """A loader that counts how often it was begun."""

    begun = 0

    def __iter__(self):
        self.begun += 1
        return super().__iter__()


@pytest.mark.parametrize("shared", slow_after(1, [False, True]))
def test_a_test_loader_with_its_own_generator_gives_the_same_saved_or_stopped(tmp_path, shared):
    def trained(at=None, **options):
        draw, model = torch.Generator().manual_seed(3), net()
        pairs = torch.utils.data.TensorDataset(*labelled())
        held_out = Counting(pairs, 16, shuffle=True, drop_last=True, generator=draw)
        data = torch.utils.data.DataLoader(pairs, 10, shuffle=True, generator=draw) if shared else labelled()
        hooks = [stopping(at)]
        return everything(
            model, train(model, data, test=held_out, epochs=3, batch=10, hooks=hooks, **options)
        ), held_out

    expected, loader = trained()
    assert loader.begun == 3
    assert trained(save=tmp_path / "whole")[0] == expected
    for name, at, every in (("within", 7, 1), ("between", 9, None)):
        with pytest.raises(Stop):
            trained(at, save=tmp_path / name, every=every)
        assert trained(save=tmp_path / name, every=every)[0] == expected


def test_workers_that_live_on_between_epochs_are_refused_where_a_training_is_saved(tmp_path):
    loader = torch.utils.data.DataLoader(Noisy(), 8, num_workers=1, persistent_workers=True)
    for data in ({"data": loader}, {"data": labelled(), "test": loader}):
        with pytest.raises(InvalidValue, match="can't have persistent_workers=True.*pass persistent_workers=False, or"):
            train(net(), **data, epochs=1, save=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_examples_in_another_order_or_in_other_batches_are_another_training(tmp_path):
    inputs, labels = labelled()
    batches = [(inputs[start : start + 10], labels[start : start + 10]) for start in range(0, 40, 10)]
    train(net(), batches, epochs=1, save=tmp_path / "list")
    with pytest.raises(FileError, match="list.job' holds a training that differs in data;"):
        train(net(), batches[::-1], epochs=1, save=tmp_path / "list")
    with pytest.raises(FileError, match="data .'40 examples in 4 batches', not '40 examples in 2 batches'"):
        train(
            net(),
            torch.utils.data.DataLoader(list(zip(*labelled(), strict=True)), 20),
            epochs=1,
            save=tmp_path / "list",
        )
    pairs = torch.utils.data.TensorDataset(inputs, labels)
    train(net(), pairs, epochs=1, save=tmp_path / "set")
    with pytest.raises(FileError, match="set.job' holds a training that differs in data;"):
        train(net(), torch.utils.data.Subset(pairs, range(39, -1, -1)), epochs=1, save=tmp_path / "set")


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"lr": 0.1}, "recipe .*lr=0.2.*not .*lr=0.1"),
        ({"seed": 1}, "seed .'0', not '1'.; ask for the same again, .* or start again with `overwrite=True`"),
        ({"model": net(1)}, "model; ask"),
        ({"data": labelled(seed=2)}, "data; a loader"),
        ({"test": labelled(10, seed=5)}, "test data .'none', not '10 examples"),
        ({"loss": lambda outputs, labels: outputs.sum()}, "loss; ask"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "loss"),
        ({"hooks": [Averaging()]}, "hooks .'none', not 'Averaging'"),
    ],
)
def test_another_training_is_refused_and_its_file_left_alone(tmp_path, change, sentence):
    given = {"model": net(), "data": labelled(), "epochs": 1, "lr": 0.2, "save": tmp_path / "run"}
    train(**given)
    places = tmp_path / "run", tmp_path / "run.job" / "job.json"
    before = [place.read_bytes() for place in places]
    with pytest.raises(FileError, match=f"run.job.? holds a training that differs in {sentence}"):
        train(**given | {"model": net()} | change)
    assert [place.read_bytes() for place in places] == before
    train(**given | {"model": net()} | change, overwrite=True)
    assert places[1].read_bytes() != before[1]


def test_settings_that_no_weight_shows_tell_models_and_losses_apart(tmp_path):
    def trained(dropout, smoothing):
        model, loss = net(), nn.CrossEntropyLoss(label_smoothing=smoothing)
        model[3].p = dropout
        return train(model, labelled(), epochs=1, loss=loss, save=tmp_path / "run")

    trained(0.3, 0.1)
    trained(0.3, 0.1)
    with pytest.raises(FileError, match="differs in architecture .'3.p' \\(0.3, not 0.2\\) of 'model'"):
        trained(0.2, 0.1)
    with pytest.raises(FileError, match="differs in loss"):
        trained(0.3, 0.2)


def test_files_that_no_training_wrote_are_refused(tmp_path):
    files.write(tmp_path / "other", "comparison", {}, {})
    with pytest.raises(FileError, match="this would write over '.*other'; choose another name, or give"):
        train(net(), labelled(), epochs=1, save=tmp_path / "other")
    with pytest.raises(FileError, match="cannot write"):
        train(net(), labelled(), epochs=1, save=tmp_path / "no" / "folder")
    with refused(InvalidValue, "every"):
        train(net(), labelled(), epochs=1, save=tmp_path / "run", every=0)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    train(model := net(), labelled(), epochs=1, save=tmp_path / "other", overwrite=True)
    load_weights(again := net(1), tmp_path / "other")
    assert again[5].weight.tolist() == model[5].weight.tolist()
    with Job.beside(tmp_path / "sweep", "sweep", {}) as job:
        job.keep("0", {})
    with pytest.raises(FileError, match="holds a sweep, not a training; give another path"):
        train(net(), labelled(), epochs=1, save=tmp_path / "sweep")


@pytest.mark.parametrize("name", ["trained.pt", "trained.safetensors"])
def test_the_file_holds_the_weights_as_the_model_uses_them(tmp_path, name):
    model = net()
    nk.sparsify(model, 0.5, layers="0")
    nn.utils.parametrizations.weight_norm(model[5])
    train(model, labelled(), epochs=1, save=tmp_path / name)
    load_weights(again := net(1), tmp_path / name)
    inputs = labelled()[0]
    assert torch.equal(again.eval()(inputs), model.eval()(inputs))
    assert (again[0].weight == 0).any()


def test_a_training_is_a_job_that_is_watched_and_cancelled(tmp_path):
    seen = []

    def look(model, step):
        (part,) = (tmp_path / "run.job" / "parts").glob("*.netkin")
        header, arrays = files.read(part)
        seen.append((jobs.read(tmp_path / "run"), unpack_state(header["values"]["state"], arrays)["step"]))
        if step == 3:
            jobs.cancel(tmp_path / "run")

    given = {"epochs": 3, "batch": 10, "save": tmp_path / "run", "every": 2}
    model, whole = net(), net()
    with pytest.raises(Cancelled, match="cancelled: 4 of 12 steps are done in '.*run.job'"):
        train(model, labelled(), hooks=[look], **given)
    assert [(state.condition, state.progress, kept) for state, kept in seen] == [
        ("running", f"{done} of 12 steps", done) for done in (0, 0, 2, 2)
    ]
    assert seen[0][0].call == f"nk.train(model=Sequential, recipe='epochs=3, batch=10', seed=0, save='{tmp_path}/run')"
    assert str(jobs.read(tmp_path / "run")) == f"{tmp_path}/run.job: training, cancelled, 4 of 12 steps"
    goes_on = train(model := net(), labelled(), hooks=[lambda model, step: None], **given | {"save": tmp_path / "new"})
    assert everything(whole, train(whole, labelled(), epochs=3, batch=10)) == everything(model, goes_on)
    with pytest.raises(Stop):
        train(net(), labelled(), hooks=[stopping(5)], epochs=3, batch=10, save=tmp_path / "failed")
    assert jobs.read(tmp_path / "failed").error == "Stop: "
    assert [(state.kind, state.condition) for state in jobs.list_jobs(tmp_path)] == [
        ("training", condition) for condition in ("failed", "done", "cancelled")
    ]


def test_two_trainings_on_one_file_are_refused(tmp_path):
    given = {"epochs": 2, "batch": 10, "save": tmp_path / "run"}
    said = rf"run.job' is being worked on .*{os.getpid()} on .*, 4 of 8 steps done"

    def again(model, step):
        if step == 5:
            with pytest.raises(FileError, match=said):
                train(net(), labelled(), hooks=[again], **given)

    whole, parted = net(), net()
    expected = everything(whole, train(whole, labelled(), epochs=2, batch=10))
    assert everything(parted, train(parted, labelled(), hooks=[again], **given)) == expected


def test_a_hook_that_does_something_else_under_its_name_is_another(tmp_path):
    def pruning(share):
        def prune(model, step):
            model[5].weight.mul_(share)

        prune.settings = share
        return prune

    class Changed(Hook):
        pass

    train(net(), labelled(), epochs=1, hooks=[pruning(0.5), Changed()], save=tmp_path / "run")
    train(net(), labelled(), epochs=1, hooks=[pruning(0.5), Changed()], save=tmp_path / "run")
    with pytest.raises(FileError, match="differs in hooks; ask"):
        train(net(), labelled(), epochs=1, hooks=[pruning(0.6), Changed()], save=tmp_path / "run")
    Changed.after_step = lambda self, model, step: None
    with pytest.raises(FileError, match="differs in hooks"):
        train(net(), labelled(), epochs=1, hooks=[pruning(0.5), Changed()], save=tmp_path / "run")


def test_a_folder_goes_on_without_its_file_and_a_file_without_its_folder_is_refused(tmp_path):
    given = {"epochs": 3, "batch": 10, "save": tmp_path / "run"}
    train(whole := net(), labelled(), hooks=[stopping(None)], **given)
    (tmp_path / "run").unlink()
    assert train(model := net(), labelled(), hooks=[stopping(1)], **given)[-1]["step"] == 12
    assert model.hidden == whole.hidden
    shutil.rmtree(tmp_path / "run.job")
    with pytest.raises(FileError, match="this would write over"):
        train(net(), labelled(), **given)


def test_a_training_that_is_done_says_so_again(tmp_path):
    for _ in range(2):
        train(net(), labelled(), epochs=2, batch=10, save=tmp_path / "run")
        assert str(jobs.read(tmp_path / "run")).endswith("run.job: training, done, 8 of 8 steps")


def test_every_kind_of_state_comes_back_as_it_was():
    state = {
        "half": torch.tensor([1.5, -2]).bfloat16(), "flag": True, "none": None, 3: (1, [2.5, "x"]), "nan": float("nan"),
        "empty": torch.zeros(0), "scalar": torch.tensor(3), "complex": torch.tensor([True]),
    }  # fmt: skip
    values, arrays = pack_state(state)
    found = unpack_state(json.loads(json.dumps(values)), arrays)
    assert found["half"].dtype == torch.bfloat16
    assert found["half"].tolist() == [1.5, -2]
    assert found[3] == (1, [2.5, "x"])
    assert found["nan"] != found["nan"]
    assert [found[name] for name in ("flag", "none")] == [True, None]
    assert found["empty"].shape == (0,)
    assert found["scalar"].item() == 3
    with pytest.raises(FileError, match="can't hold a set"):
        pack_state({"one": {1, 2}})
