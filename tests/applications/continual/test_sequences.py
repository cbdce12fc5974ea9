import os
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from continual_worlds import RECIPE, small_net
from netkin.applications import continual
from netkin.applications.continual import Task, learn_tasks
from netkin.applications.continual.learners import LEARNERS, ElasticLearner
from netkin.errors import FileError, InvalidValue, UnknownName
from processes import ended, started
from quickly import slow_after, slow_but
from refusals import refusals, refused
from worlds import data_parallel

METHODS = list(LEARNERS)


def stopped_at(test):
    """Return a way to test networks that acts as Ctrl-C does at the given time, before the task is kept."""
    calls, tested = [], continual._tested

    def stopping(learner, learnt):
        calls.append(learnt)
        if len(calls) == test:
            raise KeyboardInterrupt
        return tested(learner, learnt)

    return stopping


def all_weights(found):
    """Return the weights of all tasks' networks of all seeds."""
    nets = [found.network(task, seed) for seed in found.record.seeds for task in found.record.tasks]
    return [one for net in nets for one in net.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_that_stopped_and_goes_on_ends_as_one_that_did_not(method, tasks, tmp_path, monkeypatch):
    whole = learn_tasks(small_net, tasks, method, seeds=(0, 1), **RECIPE)
    path = tmp_path / "run.netkin"
    call = {"seeds": (0, 1), "save": path, **RECIPE}
    for test in (3, 5):
        with monkeypatch.context() as patched:
            patched.setattr(continual, "_tested", stopped_at(test))
            with pytest.raises(KeyboardInterrupt):
                learn_tasks(small_net, tasks, method, **call)
        assert not path.exists()
    learned = []
    learn = LEARNERS[method].learn
    monkeypatch.setattr(LEARNERS[method], "learn", lambda self, *rest: (learned.append(rest[0]), learn(self, *rest)))
    found = learn_tasks(small_net, tasks, method, **call)
    assert learned == ([2] if method == "joint" else [1, 2])  # those of the first seed, and one of the second, are kept
    np.testing.assert_array_equal(found.record.accuracies, whole.record.accuracies)
    assert all(map(torch.equal, all_weights(found), all_weights(whole)))


def learn_until_killed(folder, threads):
    """Learn the tasks of a file, and die at the end of the second."""
    torch.set_num_threads(threads)
    finish = ElasticLearner.finish
    ElasticLearner.finish = lambda self, task: os.kill(os.getpid(), signal.SIGKILL) if task == 1 else finish(self, task)
    tasks = [Task(*one) for one in torch.load(folder / "tasks.pt")]
    learn_tasks(small_net, tasks, "ewc", save=folder / "run.netkin", **RECIPE)


@pytest.mark.slow
def test_a_process_that_was_killed_is_continued_bit_for_bit(tasks, tmp_path):
    whole, path = learn_tasks(small_net, tasks, "ewc", **RECIPE), tmp_path / "run.netkin"
    torch.save([(task.name, task.train, task.test, task.classes) for task in tasks], tmp_path / "tasks.pt")
    assert ended(started(learn_until_killed, tmp_path, torch.get_num_threads())) == -signal.SIGKILL
    found = learn_tasks(small_net, tasks, "ewc", save=path, **RECIPE)
    np.testing.assert_array_equal(found.record.accuracies, whole.record.accuracies)
    assert all(map(torch.equal, all_weights(found), all_weights(whole)))


def test_a_sequence_that_is_done_is_not_learnt_again(tasks, tmp_path, monkeypatch):
    call = {"seeds": (3,), "save": tmp_path / "run.netkin", **RECIPE}
    first = learn_tasks(small_net, tasks, **call)
    monkeypatch.setattr(LEARNERS["atoms"], "learn", None)
    again = learn_tasks(small_net, tasks, **call)
    assert all(map(torch.equal, all_weights(first), all_weights(again)))
    assert nk.load(tmp_path / "run.netkin").accuracies.tolist() == first.record.accuracies.tolist()


@pytest.mark.parametrize(
    "change", slow_after(1, [{"epochs": 1}, {"options": {"atoms": 4}}, {"seeds": (1,)}, {"method": "finetune"}])
)
def test_another_sequence_in_the_same_place_is_refused(change, tasks, tmp_path):
    call = {"save": tmp_path / "run.netkin", **RECIPE}
    learn_tasks(small_net, tasks[:1], **call)
    with pytest.raises(FileError, match="holds a task sequence that differs in"):
        learn_tasks(small_net, tasks[:1], **call | change)
    learn_tasks(small_net, tasks[:1], **call | change, overwrite=True)


def test_other_files_are_not_written_over(tasks, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(FileError, match=r"notes\.txt"):
        learn_tasks(small_net, tasks, save=path, **RECIPE)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_accuracies_are_those_of_the_networks_by_hand(tasks, learnt):
    for s, seed in enumerate((0, 1)):
        for t, task in enumerate(tasks):
            answers = learnt.network(task.name, seed)(task.test[0]).argmax(1)
            right = sum(int(a == b) for a, b in zip(answers, task.test[1], strict=True))
            assert learnt.record.accuracies[s, -1, t] == right / len(answers)


def test_the_start_is_the_untrained_network(tasks):
    net = small_net()
    found = learn_tasks(net, tasks, "finetune", **RECIPE)
    fresh = LEARNERS["finetune"](net, None, tasks, 0)
    by_hand = [
        float((fresh.network(t)(task.test[0]).argmax(1) == task.test[1]).double().mean())
        for t, task in enumerate(tasks)
    ]
    assert found.record.accuracies[0, 0].tolist() == by_hand


def test_the_given_network_and_all_random_states_are_left_alone(tasks):
    net = small_net().train()
    before = [one.clone() for one in net.state_dict().values()]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    learn_tasks(net, tasks[:2], "ewc", **RECIPE)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert all(map(torch.equal, before, net.state_dict().values()))
    assert net.training


def test_seeds_begin_from_other_weights_where_the_network_is_built(learnt):
    assert not torch.equal(learnt.learner(0).shared["0.coefficients"], learnt.learner(1).shared["0.coefficients"])


def test_a_network_by_its_name_is_learnt_too(tasks):
    found = learn_tasks("netkin:digits", tasks[:2], "atoms", options={"atoms": 3}, **RECIPE | {"epochs": 1})
    assert found.network("0-1").conv2.atoms.shape == (3, 3, 3)


@pytest.mark.parametrize("seeds", [(), (0, 0), (-1,), (0.5,), 3, (True,)])
def test_seeds_that_are_none_are_refused(seeds, tasks):
    with refused(InvalidValue, "seeds"):
        learn_tasks(small_net, tasks, seeds=seeds, **RECIPE)


def test_other_things_than_networks_are_refused(tasks):
    with refused(InvalidValue, "model"):
        learn_tasks(3, tasks, **RECIPE)


def test_tasks_and_seeds_that_are_not_there_are_refused(learnt):
    refusals(
        (lambda: learnt.network("0-2"), UnknownName, "task"),
        (lambda: learnt.network("0-1", seed=7), UnknownName, "seed"),
    )


def test_a_loss_that_is_no_number_is_told_and_earlier_tasks_are_kept(tasks, tmp_path):
    path = tmp_path / "run.netkin"
    broken = nk.Task("broken", (tasks[1].train[0] * float("nan"), tasks[1].train[1]), tasks[1].test, 2)
    with pytest.raises(nk.NetkinError, match="mean loss of epoch 1 is nan"):
        learn_tasks(small_net, [tasks[0], broken], save=path, **RECIPE)
    assert not path.exists()
    assert (tmp_path / "run.netkin.job").is_dir()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", slow_but([torch.float64, torch.bfloat16], torch.bfloat16))
def test_networks_of_other_precisions_are_learnt(method, dtype, tasks, tmp_path):
    call = {"save": tmp_path / "run.netkin", **RECIPE | {"epochs": 1}}
    first, again = (learn_tasks(lambda: small_net().to(dtype), tasks[:2], method, **call) for _ in range(2))
    assert next(first.network("0-1").parameters()).dtype == dtype
    assert all(map(torch.equal, all_weights(first), all_weights(again)))


@pytest.mark.parametrize("method", ["finetune", "atoms", "separate"])
def test_a_wrapped_network_is_learnt_as_the_one_inside(method, tasks):
    net = small_net()
    plain, wrapped = (learn_tasks(one, tasks[:2], method, **RECIPE) for one in (net, data_parallel(net)))
    assert all(map(torch.equal, all_weights(plain), all_weights(wrapped)))


@pytest.mark.parametrize("method", slow_after(2, METHODS))
def test_smoothed_labels_reach_every_way(method, tasks):
    sharp, smooth = (learn_tasks(small_net, tasks[:2], method, **RECIPE | {"smoothing": s}) for s in (0.0, 0.3))
    assert not torch.equal(all_weights(sharp)[0], all_weights(smooth)[0])


def test_inputs_that_the_network_cannot_take_are_told_with_the_task(tasks):
    with pytest.raises(nk.NetkinError, match=r"can't be run on inputs of \(1, 8, 8\), float32, of task '0-1'"):
        learn_tasks(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(9, 2)), tasks, **RECIPE)


def test_a_head_that_is_not_last_can_be_named(tasks):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.out, self.unused = nn.Conv2d(1, 3, 3), nn.Linear(108, 10), nn.Linear(2, 2)

        def forward(self, x):
            return self.out(self.body(x).relu().flatten(1))

    assert learn_tasks(Two, tasks[:2], head="out", **RECIPE).network("2-3").out.active == 1
