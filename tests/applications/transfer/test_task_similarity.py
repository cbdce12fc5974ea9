"""Tasks compared by one number for each pair: Task2Vec and Fisher–Rao norms."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.applications.transfer.task_similarity import SCORES
from netkin.errors import ForwardError, InvalidValue, UnknownName
from refusals import refused


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def inputs(n, seed=0):
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tasks():
    return {"small": (net(0), inputs(20)), "large": (net(0), inputs(50, 1)), "other": (net(1), inputs(20))}


def test_each_pair_has_the_number_of_its_two_tasks(tasks):
    of_one = {name: task for name, task in tasks.items() if name != "other"}
    vectors = {name: nk.task2vec(*task) for name, task in tasks.items()}
    norms = {name: nk.fisher_rao_norm(*task) for name, task in tasks.items()}
    distances, cosines = nk.task_similarity(of_one), nk.task_similarity(of_one, "task2vec_cosine")
    assert distances["small", "large"] == nk.task2vec_distance(vectors["small"], vectors["large"])
    assert cosines["large", "small"] == nk.task2vec_cosine(vectors["small"], vectors["large"])
    found = nk.task_similarity(tasks, "fisher_rao")
    assert found["small", "other"] == nk.fisher_rao_distance(norms["small"], norms["other"])
    assert np.allclose(np.diag(found.to_numpy()), 0)
    assert np.array_equal(found.to_numpy(), found.to_numpy().T)


def test_networks_with_other_weights_are_compared_on_request(tasks):
    with refused(InvalidValue, "independent"):
        nk.task_similarity(tasks)
    found = nk.task_similarity(tasks, independent=True)
    a, b = (nk.task2vec(*tasks[name]) for name in ("small", "other"))
    assert found["small", "other"] == nk.task2vec_distance(a, b, independent=True)


def test_random_models_of_one_name_have_the_same_weights_for_task2vec_alone():
    named = {part: ("netkin:digits", f"digits:{part}") for part in ("test", "train")}
    model, options = nk.load_model("netkin:digits", seed=0), {"examples": 30, "samples": 1}
    loaded = {part: (model, f"digits:{part}") for part in named}
    assert (
        nk.task_similarity(named, **options)["test", "train"] == nk.task_similarity(loaded, **options)["test", "train"]
    )
    for more in ({"score": "fisher_rao", "examples": 30}, {"independent": True, **options}):
        digests = [
            text for key, text in nk.task_similarity(named, **more).provenance.items() if key.startswith("weights")
        ]
        assert len({*digests}) == 2


def test_the_result_says_what_it_is_and_is_saved(tasks, tmp_path):
    found = nk.task_similarity(tasks, "fisher_rao", examples=15)
    found.save(tmp_path / "t.netkin")
    assert nk.load(tmp_path / "t.netkin") == found
    assert found.examples == 45
    assert found.provenance["data of large"].startswith("Tensor, 15 examples; digest ")
    assert found.provenance["data of small"] == found.provenance["data of other"]
    assert found.provenance["weights of small"] == found.provenance["weights of large"]
    assert "fisher_rao: distance (lower is closer), from 0" in str(found)
    drawn = nk.task_similarity(tasks, independent=True, samples=2)
    assert (found.table().exactness, drawn.table().exactness) == ("exact", "estimated from 2 draws of y")
    for score in SCORES.values():
        assert score.quantity.means
        assert score.quantity.cannot_see


def test_models_random_states_and_loaders_are_left_as_they_were():
    model, generator = net(0).train(), torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(inputs(20)), batch_size=5, shuffle=True, generator=generator)
    before = torch.get_rng_state(), generator.get_state()
    nk.task_similarity({"a": (model, loader), "b": (model, inputs(9))}, samples=2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], generator.get_state())
    assert model.training


@pytest.mark.parametrize(
    ("tasks", "score", "error", "argument"),
    [
        ({"a": (net(0), inputs(5))}, "task2vec", InvalidValue, "tasks"),
        ([(net(0), inputs(5))], "task2vec", InvalidValue, "tasks"),
        ({"a": (net(0), inputs(5)), "b": (net(0), inputs(5))}, "task3vec", UnknownName, "score"),
        ({"a": (net(0), inputs(5)), "b": (net(0), torch.ones(3, 5))}, "task2vec", ForwardError, ""),
        ({"a": (net(0), inputs(5)), "b": net(0)}, "task2vec", InvalidValue, ""),
    ],
)
def test_what_can_not_be_compared_is_refused(tasks, score, error, argument):
    with refused(error, argument):
        nk.task_similarity(tasks, score)
