"""The laboratory: data, training and runs that claims share."""

import pytest
import torch
from torch import nn

from netkin.errors import SourceError, UnknownName
from reproductions import laboratory, training
from reproductions.laboratory import Lab, Recipe
from reproductions.training import Images, moved, shuffled


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.delenv("NETKIN_DATA", raising=False)
    build = lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * 32 * 32), nn.Linear(3 * 32 * 32, 10))  # noqa: E731
    monkeypatch.setitem(laboratory.RECIPES["cpu"], "convnet", Recipe(build, epochs=2, batch=64, rate=0.01))
    return Lab("cpu", cache=tmp_path)


def test_without_files_the_lab_works_on_enlarged_digits(lab):
    images = lab.images()
    assert images.train_images.shape[1:] == (3, 32, 32)
    assert "digits" in images.words
    assert torch.equal(images.test_images[:, 0, ::4, ::4], images.test_images[:, 2, 3::4, 3::4])


def test_a_trained_run_learns_and_keeps_its_states(lab):
    run = lab.trained("convnet", 0)
    total = lab.total_steps("convnet")
    assert run.accuracy > 0.7
    assert run.accuracy == lab.accuracy(run.model)
    assert (min(run.checkpoints), max(run.checkpoints)) == (0, total)
    assert torch.equal(run.at(total)[2].weight, run.model[2].weight)
    assert not torch.equal(run.at(0)[2].weight, run.model[2].weight)


def test_a_run_is_trained_once_and_then_read(lab, monkeypatch):
    first = lab.trained("convnet", 3)
    monkeypatch.setattr(training, "train", None)
    second = lab.trained("convnet", 3)
    assert first.history == second.history
    assert all(torch.equal(x, y) for x, y in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_other_settings_are_another_run(lab):
    assert len(lab.trained("convnet", 0).history) == 2
    assert len(lab.trained("convnet", 0, epochs=1).history) == 1


def test_the_same_seed_trains_the_same_network(lab, tmp_path):
    again = Lab("cpu", cache=tmp_path / "elsewhere")
    assert torch.equal(lab.trained("convnet", 1).model[2].weight, again.trained("convnet", 1).model[2].weight)
    assert not torch.equal(lab.trained("convnet", 1).model[2].weight, lab.trained("convnet", 2).model[2].weight)


def test_work_over_tasks_comes_back_in_order(lab):
    assert lab.over(lambda _, task: task**2, [3, 1, 2]) == [9, 1, 4]
    assert len(lab.trained_all([("convnet", 0), ("convnet", 1)])) == 2


@pytest.mark.parametrize(
    "ask, refusal",
    [
        (lambda lab: lab.trained("convet"), "no network 'convet' in the laboratory; did you mean 'convnet'?"),
        (lambda lab: Lab("tpu"), "no scale 'tpu'; there are cpu and gpu."),
    ],
)
def test_strange_names_are_refused(lab, ask, refusal):
    with pytest.raises(UnknownName, match=refusal.replace("?", "[?]")):
        ask(lab)


def test_missing_data_is_said(lab, tmp_path):
    with pytest.raises(SourceError, match="gpu scale needs CIFAR-10; pass --data DIR"):
        Lab("gpu", cache=tmp_path, device="cpu").images()
    with pytest.raises(SourceError, match="reads tiny Shakespeare"):
        lab.text()


def test_a_moved_image_is_a_window_of_its_padded_form():
    padded = torch.arange(2 * 3 * 16 * 16.0).reshape(2, 3, 16, 16)
    cut = moved(padded, torch.tensor([1, 0]), torch.tensor([[0, 8], [3, 5]]))
    assert torch.equal(cut[0], padded[1, :, 0:8, 3:11])
    assert torch.equal(cut[1], padded[0, :, 8:16, 5:13])


def test_moved_images_are_contiguous_on_a_cpu():
    # channels last, a 1 × 1 convolution of few channels with stride 2 writes past its memory (oneDNN, issue 6035)
    padded = torch.arange(2 * 3 * 16 * 16.0).reshape(2, 3, 16, 16)
    cut = moved(padded, torch.tensor([1, 0]), torch.tensor([[0, 8], [3, 5]]))
    assert cut.is_contiguous()


def test_an_epoch_shows_each_image_once():
    labels = torch.arange(10)
    images = Images("ten", tuple("abcdefghij"), torch.ones(10, 3, 8, 8), labels, torch.ones(1, 3, 8, 8), labels[:1])
    seen = torch.cat([batch for _, batch in shuffled(images, 5, torch.Generator().manual_seed(0))])
    assert sorted(seen.tolist()) == list(range(10))


def test_an_unknown_schedule_is_refused(lab):
    with pytest.raises(UnknownName, match="no schedule named 'stpes'; did you mean 'steps'[?] There are steps and con"):
        lab.trained("convnet", 0, schedule="stpes")


@pytest.mark.parametrize("schedule, factors", [("steps", [1, 1, 0.1, 0.01]), ("constant", [1] * 4)])
def test_schedules(schedule, factors):
    assert [training._factor(schedule, 4)(epoch) for epoch in range(4)] == factors
