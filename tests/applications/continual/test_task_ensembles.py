import copy

import numpy as np
import pytest
import torch

import netkin as nk
from continual_worlds import RECIPE, small_net
from netkin.applications.continual import ensemble_tasks, learn_tasks
from netkin.errors import InvalidValue, NoValue, UnknownName
from netkin.training import train
from refusals import refused

HEADS = {"epochs": 2, "batch": 16, "lr": 0.05, "progress": False}


@pytest.fixture(scope="module")
def together(learnt):
    return ensemble_tasks(learnt, 1, candidates="all tasks", **HEADS)


def test_similarities_are_mean_cosines_of_atoms(learnt, together):
    for s, seed in enumerate((0, 1)):
        nets = [learnt.network(task, seed).state_dict() for task in together.tasks]
        for i in range(3):
            for j in {0, 1, 2} - {i}:
                cosines = []
                for layer in ("0.atoms", "3.atoms"):
                    u, v = (nets[t][layer].double().numpy().ravel() for t in (i, j))
                    cosines.append(u @ v / np.sqrt((u @ u) * (v @ v)))
                assert together.similarities[s, i, j] == pytest.approx(np.mean(cosines), abs=1e-6)


def test_the_most_similar_join_and_for_controls_the_least_similar(learnt, together):
    least = ensemble_tasks(learnt, 1, choice="least similar", candidates="all tasks", **HEADS)
    for s, seed in enumerate((0, 1)):
        for t, task in enumerate(together.tasks):
            row = {other: together.similarities[s, t, o] for o, other in enumerate(together.tasks) if o != t}
            assert together.members_of(task, seed) == (max(row, key=row.get),)
            assert least.members_of(task, seed) == (min(row, key=row.get),)


def test_only_earlier_tasks_join_unless_all_are_asked_for(learnt):
    found = ensemble_tasks(learnt, 2, **HEADS)
    assert found.members_of("0-1") == ()
    assert found.members_of("2-3") == ("0-1",)
    assert sorted(found.members_of("4-5")) == ["0-1", "2-3"]
    assert (found.together[:, 0] == found.alone[:, 0]).all()
    assert found.storage == 3 * (32 * 2 + 2)


def test_an_ensemble_is_the_mean_of_probabilities_by_hand(learnt, tasks):
    found = ensemble_tasks(learnt, 1, **HEADS)
    own, other = learnt.network("2-3"), learnt.network("0-1")
    task, head = tasks[1], copy.deepcopy(own[9][1])
    with torch.no_grad():
        features = [other[:9](part[0]) for part in (task.train, task.test)]
    train(head, (features[0], task.train[1]), seed=0, **HEADS)
    answers = (own(task.test[0]).softmax(1) + head(features[1]).softmax(1)).argmax(1)
    assert found.together[0, 1] == pytest.approx(float((answers == task.test[1]).double().mean()))
    assert found.alone[0, 1] == learnt.record.accuracies[0, -1, 1]


def test_measures_of_data_and_distances_choose_too(learnt, images, together):
    by_cka = ensemble_tasks(learnt, 1, similarity="cka", data=images, candidates="all tasks", **HEADS)
    nets = [learnt.network(task) for task in by_cka.tasks]
    pair = nk.compare(nets[0], nets[1], images, ["cka"], layers=["0", "3"], pairs="corresponding", progress=False)
    assert by_cka.similarities[0, 0, 1] == pytest.approx((pair["0", "0"] + pair["3", "3"]) / 2, abs=1e-9)
    angular = ensemble_tasks(learnt, 1, similarity="atom_angular", candidates="all tasks", **HEADS)
    for s, seed in enumerate((0, 1)):
        for t, task in enumerate(angular.tasks):
            nearest = np.nanargmin(angular.similarities[s, t])
            assert angular.members_of(task, seed) == (angular.tasks[nearest],)


def test_a_layer_without_a_value_is_told_with_its_tasks_and_its_reason(learnt, images):
    with pytest.raises(NoValue, match="'cka' has no value for tasks '0-1' and '2-3': .*constant"):
        ensemble_tasks(learnt, 1, similarity="cka", data=images * 0, **HEADS)


def test_random_members_follow_from_the_seed(learnt):
    first, again = (ensemble_tasks(learnt, 1, choice="random", candidates="all tasks", **HEADS) for _ in range(2))
    assert first.members == again.members
    assert all(task not in first.members_of(task) for task in first.tasks)


def test_what_was_learnt_is_left_alone(learnt, images):
    before = [learnt.network(task)(images) for task in learnt.record.tasks]
    ensemble_tasks(learnt, 2, **HEADS)
    assert all(map(torch.equal, before, [learnt.network(task)(images) for task in learnt.record.tasks]))


def test_ensembles_come_back_from_their_file(together, tmp_path):
    together.save(tmp_path / "together.netkin")
    found = nk.load(tmp_path / "together.netkin")
    assert found == together
    assert str(found) == str(together)
    with pytest.raises(ValueError, match="read-only"):
        together.alone[0] = 1


def test_it_is_told_in_a_table(together):
    assert "chosen as most similar by atom_cosine, among all tasks" in str(together)
    assert "with (seed 0)" in str(together)
    assert len(together.to_pandas()) == 6
    assert set(together.metrics()) == {"alone", "together", "further"}
    with refused(UnknownName, "task"):
        together.members_of("x")


@pytest.mark.parametrize(("options", "kind", "argument"), [
    ({"k": 3}, InvalidValue, "k"),
    ({"k": True}, InvalidValue, "k"),
    ({"k": 1, "choice": "best"}, UnknownName, "choice"),
    ({"k": 1, "candidates": "later"}, UnknownName, "candidates"),
    ({"k": 1, "similarity": "cka"}, InvalidValue, "data"),
    ({"k": 1, "similarity": "pwcca"}, InvalidValue, "similarity"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(options, kind, argument, learnt):
    with refused(kind, argument):
        ensemble_tasks(learnt, **HEADS | options)


def test_other_learners_and_single_tasks_make_no_ensembles(tasks):
    with pytest.raises(InvalidValue, match="these were learnt by 'finetune'"):
        ensemble_tasks(learn_tasks(small_net, tasks[:2], "finetune", **RECIPE), 1, **HEADS)
    with pytest.raises(InvalidValue, match="two tasks or more; there is 1"):
        ensemble_tasks(learn_tasks(small_net, tasks[:1], **RECIPE), 1, **HEADS)
