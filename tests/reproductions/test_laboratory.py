"""The laboratory: data, training and runs that claims share."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from netkin import training
from netkin.errors import SourceError, UnknownName
from netkin.sources.architectures import seeded
from netkin.sources.examples import STATISTICS
from netkin.training import Recipe, loop
from reproductions import laboratory
from reproductions.keeping import keeping_in, noting
from reproductions.laboratory import Lab, Network, _apart, architecture_digest, recipe_words

SMALL = Recipe(epochs=2, batch=64, lr=0.01, weight_decay=5e-4, schedule="steps", drop_last=True, shift=4)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.delenv("NETKIN_DATA", raising=False)
    build = lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * 32 * 32), nn.Linear(3 * 32 * 32, 10))  # noqa: E731
    monkeypatch.setitem(laboratory.RECIPES["cpu"], "convnet", Network(build, SMALL))
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


def test_another_recipe_is_another_run(lab, monkeypatch):
    assert len(lab.trained("convnet", 0).history) == 2
    old = lab.recipe("convnet")
    words = recipe_words("convnet", "cpu")
    monkeypatch.setitem(laboratory.RECIPES["cpu"], "convnet", Network(old.build, SMALL.but(epochs=1)))
    assert len(lab.trained("convnet", 0).history) == 1
    assert recipe_words("convnet", "cpu") != words
    assert recipe_words("gone", "cpu") == ""


def test_a_claim_gets_the_same_start_of_a_network_while_its_recipes_are_noted(lab):
    start = lambda: seeded(lambda: lab.recipe("convnet").build(), 0)[2].weight  # noqa: E731
    bare = start()
    with noting() as notes:
        noted = start()
    assert torch.equal(bare, noted)
    assert notes.recipes == {"convnet": recipe_words("convnet", "cpu")}


@pytest.mark.slow
def test_a_killed_training_goes_on_and_ends_at_the_same_weights(lab, tmp_path, monkeypatch):
    whole = lab.trained("convnet", 0)
    again = Lab("cpu", cache=tmp_path / "elsewhere")
    update = loop.Loop._update

    def killed(self, batch):
        if self.step == again.total_steps("convnet") * 3 // 4:
            raise KeyboardInterrupt
        update(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_update", killed)
        with pytest.raises(KeyboardInterrupt):
            again.trained("convnet", 0)
    resumed = again.trained("convnet", 0)
    assert resumed.checkpoints.keys() == whole.checkpoints.keys()
    for step, state in whole.checkpoints.items():
        for key, value in state.items():
            assert torch.equal(value, resumed.checkpoints[step][key]), (step, key)
    assert [path.suffix for path in (tmp_path / "elsewhere").iterdir()] == [".safetensors"]


def test_an_untrained_network_takes_the_statistics_of_its_data(lab):
    settled = lab.settled(lab.fresh("convnet", 0))
    images = lab.images().train_images[:1024].flatten(1)
    parts = torch.stack([part.mean(0) for part in images.split(256)])
    torch.testing.assert_close(settled[1].running_mean, parts.mean(0), atol=1e-5, rtol=1e-4)
    assert not settled.training


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_an_untrained_network_is_the_same_bit_for_bit_by_other_kernels(lab):
    """Processes that share a GPU look for each other's files by a digest of these weights."""
    means = []
    for fast in (True, False):
        with torch.backends.mkldnn.flags(enabled=fast):
            model = laboratory.seeded(lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)), 0)
            means.append(lab.settled(model)[1].running_mean)
    assert torch.equal(*means)


@pytest.mark.slow
def test_the_same_seed_trains_the_same_network(lab, tmp_path):
    again = Lab("cpu", cache=tmp_path / "elsewhere")
    assert torch.equal(lab.trained("convnet", 1).model[2].weight, again.trained("convnet", 1).model[2].weight)
    assert not torch.equal(lab.trained("convnet", 1).model[2].weight, lab.trained("convnet", 2).model[2].weight)


@pytest.mark.slow
def test_work_over_tasks_comes_back_in_order(lab):
    assert lab.over(lambda _, task: task**2, [3, 1, 2]) == [9, 1, 4]
    assert len(lab.trained_all([("convnet", 0), ("convnet", 1)])) == 2


def test_a_task_draws_the_same_numbers_whatever_was_done_before_and_leaves_chance_alone(lab):
    state = torch.random.get_rng_state()
    first, second = lab.over(drawn, [1, 2])
    assert lab.over(drawn, [2]) == [second]
    assert first != second
    lab.trained("convnet", 0).at(0)
    assert torch.equal(torch.random.get_rng_state(), state)


def drawn(lab, task):
    return torch.rand(()).item()


def test_a_part_is_kept_while_an_earlier_one_is_still_worked_on(tmp_path):
    second_is_kept = threading.Event()

    class Parts:
        def advance(self, *progress):
            pass

        def find(self, name):
            return None

        def keep(self, name, values):
            if name.endswith("2"):
                second_is_kept.set()
            return SimpleNamespace(values=values)

    def work(lab, task):
        assert task == 2 or second_is_kept.wait(20)
        return 10 * task

    lab = Lab("gpu", device="cuda", cache=tmp_path)  # nothing is placed there
    lab._workers = ThreadPoolExecutor(2)
    with keeping_in(Parts()):
        assert lab.over(work, [1, 2, 3], keep=True) == [10, 20, 30]


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


def test_an_architecture_is_known_by_its_layers_and_shapes_and_not_by_its_weights():
    one, same, wider, strided, other = (
        nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(3, 5, 3)),
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2)), nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
    )  # fmt: skip
    assert architecture_digest(one) == architecture_digest(same)
    assert len({architecture_digest(model) for model in (one, wider, strided, other)}) == 4


@pytest.mark.slow
def test_workers_have_a_laboratory_of_their_own_with_the_same_setting(lab, monkeypatch):
    monkeypatch.setattr(laboratory, "TOGETHER", 1)
    found = lab._workers.map(partial(_apart, getattr, lab._setting), ["scale", "cache", "device"])
    assert [result for result, _ in found] == ["cpu", lab.cache, torch.device("cpu")]
    lab._workers.shutdown()


def test_named_sets_have_the_form_of_cifar_images(tmp_path):
    """Twelve black and white images of MNIST, as its files hold them."""
    for part, count in (("train", 12), ("t10k", 6)):
        pixels = np.zeros((count, 28, 28), np.uint8)
        pixels[:, 3, 4] = 255
        labels = np.arange(count, dtype=np.uint8) % 10
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(
            np.array([2051, count, 28, 28], ">i4").tobytes() + pixels.tobytes()
        )
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(
            np.array([2049, count], ">i4").tobytes() + labels.tobytes()
        )
    images = Lab("cpu", cache=tmp_path, data=tmp_path).images_of("mnist")
    assert images.words == "MNIST, 12 training and 6 test images"
    assert images.train_images.shape == (12, 3, 32, 32)
    black, white = (torch.tensor([(value - mean) / std for mean, std in zip(*STATISTICS["cifar10"], strict=True)])
                    for value in (0, 1))  # fmt: skip
    torch.testing.assert_close(images.test_images[5, :, 5, 6], white)
    torch.testing.assert_close(images.test_images[5, :, 0, 0], black)
    assert images.test_labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_set_that_is_not_at_hand_is_refused(lab):
    with pytest.raises(SourceError, match="this claim reads CIFAR-100; pass --data DIR or set NETKIN_DATA"):
        lab.images_of("cifar100")
    with pytest.raises(UnknownName, match="no set 'cifar1000' in the laboratory; did you mean 'cifar100'"):
        lab.images_of("cifar1000")
