"""A training that was interrupted goes on from its file, with the same bits as one that was not."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from netkin import files, jobs
from netkin.applications.stitching.training import TaskLoss, train_map
from netkin.errors import FileError
from netkin.jobs import Job
from netkin.training.saving import PartSaving
from quickly import slow_but
from task_loss_worlds import joined, perceptron, two_perceptrons

OPTIONS = [
    {},
    {"l1": 1e-3},
    {"rank": 3, "cka_penalty": 0.2, "weight_decay": 1e-3},
    {"batch": 64, "labels": "true"},
    {"memory": 0},
    {"patience": 2, "lr": 0.2},
]


def interrupted_after(monkeypatch, count):
    """Let training be interrupted once it has written so many files."""
    states, write = [], PartSaving.write

    def writing(saving, state, total):
        write(saving, state, total)
        states.append(state)
        if len(states) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(PartSaving, "write", writing)


@pytest.mark.parametrize("options", slow_but(OPTIONS, OPTIONS[0], OPTIONS[-1]), ids=str)
def test_an_interrupted_training_goes_on_bit_for_bit(tmp_path, monkeypatch, options):
    a, b, data = two_perceptrons()
    options = {"lr": 0.01, "epochs": 3, "every": 3} | options
    whole = joined(a, "1", b, "1", data, TaskLoss(**options))
    wanted = train_map(whole, data, TaskLoss(**options))

    settings = TaskLoss(**options, resume=tmp_path / "training.job")
    with monkeypatch.context() as patch:
        interrupted_after(patch, 3)
        network = joined(a, "1", b, "1", data, settings)
        first = network.transformation.matrix.clone()
        with pytest.raises(KeyboardInterrupt):
            train_map(network, data, settings)
        assert torch.equal(network.transformation.matrix, first)
    training = train_map(network, data, settings)
    assert torch.equal(network.transformation.matrix, whole.transformation.matrix)
    assert torch.equal(network.transformation.shift, whole.transformation.shift)
    assert training == wanted


def test_a_finished_training_is_read_back_and_can_be_made_longer(tmp_path):
    a, b, data = two_perceptrons()
    path, longer = tmp_path / "training.job", TaskLoss(epochs=4, lr=0.01)
    for epochs in (2, 2, 4):
        network = joined(a, "1", b, "1", data)
        training = train_map(network, data, TaskLoss(epochs=epochs, lr=0.01, resume=path))
        assert training.steps == 8 * epochs
    whole = joined(a, "1", b, "1", data)
    assert train_map(whole, data, longer) == training
    assert torch.equal(network.transformation.matrix, whole.transformation.matrix)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"batch": 64}, {"memory": 0}], ids=str)
def test_a_training_that_ended_within_an_epoch_can_be_made_longer(tmp_path, options):
    a, b, data = two_perceptrons()
    for steps in (3, 11):  # of 8 in an epoch, or 7
        network = joined(a, "1", b, "1", data)
        train_map(network, data, TaskLoss(steps=steps, lr=1e-4, resume=tmp_path / "training.job", **options))
    whole = joined(a, "1", b, "1", data)
    train_map(whole, data, TaskLoss(steps=11, lr=1e-4, **options))
    assert torch.equal(network.transformation.matrix, whole.transformation.matrix)


def test_a_training_longer_than_asked_for_is_refused(tmp_path):
    a, b, data = two_perceptrons()
    path = tmp_path / "training.job"
    train_map(joined(a, "1", b, "1", data), data, TaskLoss(epochs=2, resume=path))
    with pytest.raises(FileError, match="holds a training of 16 steps, and 8 are asked for; ask for as many or more"):
        train_map(joined(a, "1", b, "1", data), data, TaskLoss(epochs=1, resume=path))


def test_a_file_with_other_options_is_refused(tmp_path):
    a, b, data = two_perceptrons()
    path = tmp_path / "training.job"
    train_map(joined(a, "1", b, "1", data), data, TaskLoss(epochs=1, resume=path))
    fault = r"^'[^']*training.job' holds a training that differs in lr \('0.001', not '0.1'\); ask for the same again"
    with pytest.raises(FileError, match=fault):
        train_map(joined(a, "1", b, "1", data), data, TaskLoss(epochs=1, lr=0.1, resume=path))
    with pytest.raises(FileError, match=r"differs in labels \('soft', not '.*<lambda>'\)"):
        train_map(joined(a, "1", b, "1", data), data, TaskLoss(labels=lambda *_: torch.ones(()), resume=path))


@pytest.fixture
def world():
    a, b, data = two_perceptrons()
    return {"a": a, "b": b, "data": data, "validation": data[:2], "layer": "1"}


def resumed(path, a, b, data, validation, layer):
    settings = TaskLoss(init="identity", epochs=1, resume=path)
    return train_map(joined(a, layer, b, layer, data, settings), data, settings, validation=validation)


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"a": perceptron(5)}, r"weights of the first model; ask for the same"),
        ({"b": perceptron(5)}, r"weights of the second model; ask for the same"),
        ({"layer": "0"}, "layers ..'1' into '1'., not .'0' into '0'..; ask for the same"),
    ],
    ids=str,
)
def test_a_file_of_other_models_or_layers_is_refused_though_the_start_is_the_same(tmp_path, world, change, fault):
    path = tmp_path / "training.job"
    resumed(path, **world)
    with pytest.raises(FileError, match=f"^'[^']*training.job' holds a training that differs in {fault}"):
        resumed(path, **(world | change))


def test_a_file_of_other_data_is_refused_though_the_start_is_the_same(tmp_path, world):
    path, (first, *others) = tmp_path / "training.job", world["data"]
    resumed(path, **world)
    other_inputs, other_labels = (first[0] + 0.1, first[1]), (first[0], first[1].flip(0))
    for batch in (other_inputs, other_labels):
        with pytest.raises(FileError, match="differs in data and order of the examples; a loader"):
            resumed(path, **(world | {"data": [batch, *others]}))
    with pytest.raises(FileError, match=r"validation data \('100 examples', not '50 examples"):
        resumed(path, **(world | {"validation": others[:1]}))
    joint = tuple(torch.cat(parts) for parts in zip(*world["data"][:2], strict=True))
    with pytest.raises(FileError, match=r"batches \('8 an epoch', not '7 an epoch'\)"):
        resumed(path, **(world | {"data": [joint, *world["data"][2:]]}))


@pytest.mark.parametrize("name", ["data", "validation"])
def test_a_file_of_the_same_data_in_another_order_is_refused(tmp_path, world, name):
    path = tmp_path / "training.job"
    resumed(path, **world)
    what = {"data": "order of the examples", "validation": "order of the validation examples"}[name]
    with pytest.raises(FileError, match=f"holds a training that differs in {what}; ask for the same again"):
        resumed(path, **(world | {name: world[name][::-1]}))


def test_a_file_goes_on_with_a_loader_that_shuffles(tmp_path, world):
    pairs = TensorDataset(*(torch.cat(part) for part in zip(*world["data"], strict=True)))
    for seed in range(2):
        loader = DataLoader(pairs, 50, shuffle=True, generator=torch.Generator().manual_seed(seed))
        assert resumed(tmp_path / "training.job", **(world | {"data": loader})).steps == 8


def test_a_damaged_standing_is_refused(tmp_path):
    a, b, data = two_perceptrons()
    path, settings = (
        tmp_path / "training.job" / "parts" / "standing.netkin",
        TaskLoss(epochs=1, resume=tmp_path / "training.job"),
    )
    train_map(joined(a, "1", b, "1", data), data, settings)
    whole = path.read_bytes()
    path.write_bytes(whole[:500])
    with pytest.raises(FileError, match="is no netkin file, or only a part of one"):
        train_map(joined(a, "1", b, "1", data), data, settings)
    path.unlink()
    files.write(path, "part", {"name": "standing", "values": {"step": 3}, "seconds": 0}, {})
    with pytest.raises(FileError, match="is damaged: KeyError"):
        train_map(joined(a, "1", b, "1", data), data, settings)


def test_half_precision_is_kept(tmp_path):
    weight = torch.tensor([1 / 3, 1e30], dtype=torch.bfloat16)
    with Job(tmp_path, "training", {}) as job:
        saving = PartSaving(job, "state")
        saving.write({"weight": weight, "step": 3}, total=8)
        state = saving.read()
    assert state["weight"].dtype == torch.bfloat16
    assert torch.equal(state["weight"], weight)


def test_the_job_of_a_training_tells_its_steps(tmp_path):
    a, b, data = two_perceptrons()
    for patience, rate in ((None, 0.01), (1, 0.2)):
        settings = TaskLoss(epochs=9, patience=patience, lr=rate, resume=tmp_path / f"{rate}.job")
        training = train_map(joined(a, "1", b, "1", data), data, settings)
        assert training.stopped == (training.steps < 72) == (patience is not None)
        state = jobs.read(settings.resume)
        assert (state.condition, state.progress) == ("done", f"{training.steps} of {training.steps} steps")
