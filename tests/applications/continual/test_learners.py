import pytest
import torch
from torch import nn

from continual_worlds import RECIPE, small_net
from netkin.applications.continual import learn_tasks
from netkin.applications.continual.learners import (
    LEARNERS,
    ElasticLearner,
    TaskHeads,
    elastic_penalty,
    expected_fisher,
    mixed_loss,
    require_options,
    with_heads,
)
from netkin.errors import InvalidValue, UnknownName
from netkin.sources.architectures import seeded
from netkin.training import Recipe
from quickly import slow_after
from refusals import refusals, refused


def weights(learner, task):
    return {name: one.clone() for name, one in learner.network(task).state_dict().items()}


def test_a_first_task_predicts_bit_for_bit_the_same_after_later_tasks(tasks, learnt, images):
    alone = learn_tasks(small_net, tasks[:1], "atoms", **RECIPE)
    before, after = (one.network(tasks[0].name)(images) for one in (alone, learnt))
    assert torch.equal(before, after)


def test_after_the_first_task_only_atoms_heads_and_buffers_differ(tasks, learnt):
    first, later = (learnt.network(task.name).state_dict() for task in tasks[:2])
    parameters = dict(learnt.network(tasks[0].name).named_parameters())
    differ = {name for name in parameters if not torch.equal(first[name], later[name])}
    assert differ == {"0.atoms", "3.atoms"}  # a network holds the heads of all tasks
    coefficients = learnt.learner().shared["0.coefficients"]
    fresh = LEARNERS["atoms"](seeded(small_net, 0), None, tasks, 0).shared["0.coefficients"]
    assert not torch.equal(coefficients, fresh)


def test_what_a_task_stores_is_its_atoms_its_head_and_its_buffers(learnt):
    atoms = min(6, 9) * 9 + 9 * 9  # 6 filters of one channel have 6 atoms
    buffers, head = (6 + 6 + 1) + (8 + 8 + 1), 32 * 2 + 2
    assert learnt.record.storage["each task"] == atoms + buffers + head
    coefficients = 6 * 1 * 6 + 9 * 6 * 8
    others = 6 + 8 + 2 * 6 + 2 * 8  # biases and norms
    assert learnt.record.storage["shared"] == coefficients + others
    assert learnt.record.storage["in all"] == coefficients + others + 3 * (atoms + buffers + head)


@pytest.mark.parametrize("method", slow_after(1, ["finetune", "ewc", "replay"]))
def test_other_ways_change_the_network_of_the_first_task(method, tasks, images):
    alone, whole = (learn_tasks(small_net, some, method, **RECIPE) for some in (tasks[:1], tasks))
    assert torch.equal(alone.learner().own[0]["9.0.weight"], alone.network(tasks[0].name)[9][0].weight)
    assert not torch.equal(alone.network(tasks[0].name)(images), whole.network(tasks[0].name)(images))


def test_decay_leaves_heads_of_other_tasks_alone(tasks):
    learner = LEARNERS["finetune"](small_net(), None, tasks, 0)
    before = [one.clone() for one in learner.heads[2].parameters()]
    learner.learn(0, Recipe(epochs=1, weight_decay=0.1, optimizer="adamw", lr=0.01))
    assert all(map(torch.equal, before, learner.heads[2].parameters()))
    assert not torch.equal(
        learner.own[0]["9.0.weight"], LEARNERS["finetune"](small_net(), None, tasks, 0).own[0]["9.0.weight"]
    )


def test_the_fisher_information_is_that_of_a_loop_over_examples_classes_and_weights(tasks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)).double()
    model[1].running_mean += 0.3
    inputs = tasks[0].train[0][:20].double()  # more than a chunk
    found = expected_fisher(model, inputs, ["0.weight", "1.bias"])
    model.eval()
    for name in ("0.weight", "1.bias"):
        weight, total = dict(model.named_parameters())[name], 0.0
        for x in inputs:
            shares = model(x[None]).softmax(-1)[0].tolist()
            for label, share in enumerate(shares):
                model.zero_grad()
                (-nn.functional.nll_loss(model(x[None]).log_softmax(-1), torch.tensor([label]))).backward()
                total = total + share * weight.grad**2
        torch.testing.assert_close(found[name], total / 20, rtol=1e-9, atol=1e-12)


def test_the_fisher_information_leaves_the_network_in_training_mode_and_without_gradients(tasks):
    model = small_net()
    buffers = [one.clone() for one in model.buffers()]
    expected_fisher(model, tasks[0].train[0][:4], ["0.weight"])
    assert model.training
    assert all(one.grad is None for one in model.parameters())
    assert all(map(torch.equal, buffers, model.buffers()))


def test_the_elastic_penalty_is_a_loop_over_tasks_and_weights(tasks):
    learner = ElasticLearner(small_net(), None, tasks, 0, strength=3.0)
    for task in (0, 1):
        learner.learn(task, Recipe(epochs=1, batch=16))
    moved = {name: one.detach() + 0.1 * torch.randn_like(one) for name, one in learner.model.named_parameters()}
    total = 0.0
    for kept in learner.memory[:2]:
        for name in learner.body():
            fisher, old = kept[f"fisher of {name}"].flatten().tolist(), kept[f"weights of {name}"].flatten().tolist()
            for f, a, w in zip(fisher, old, moved[name].flatten().tolist(), strict=True):
                total += 3.0 / 2 * f * (w - a) ** 2
    assert total > 0
    assert float(elastic_penalty(moved, learner.memory[:2], 3.0)) == pytest.approx(total, rel=1e-5)


def test_a_strong_penalty_holds_the_body_where_it_was(tasks):
    recipe = Recipe(steps=40, batch=16, lr=0.01, momentum=0)
    apart = []
    for strength in (0.0, 100.0):
        learner = ElasticLearner(seeded(small_net, 0), None, tasks, 0, strength=strength)
        for task in (0, 1):
            learner.learn(task, recipe)
        now = {name: one.detach() for name, one in learner.model.named_parameters()}
        kept = learner.memory[0]
        apart.append(float(elastic_penalty(now, [kept], 1.0)))
    assert 0 < apart[1] < apart[0] / 2


def test_a_strength_of_zero_is_fine_tuning(tasks, images):
    elastic = learn_tasks(small_net, tasks, "ewc", options={"strength": 0.0}, **RECIPE)
    plain = learn_tasks(small_net, tasks, "finetune", **RECIPE)
    assert torch.equal(elastic.network("0-1")(images), plain.network("0-1")(images))


def test_the_loss_of_mixed_tasks_is_that_of_each_head_alone():
    outputs, labels = torch.randn(7, 5), torch.tensor([0, 1, 2, 3, 4, 2, 0])
    slow = 0.0
    for row, label in zip(outputs, labels.tolist(), strict=True):
        own = row[:2] if label < 2 else row[2:]
        slow -= own.log_softmax(-1)[label if label < 2 else label - 2].item() / 7
    assert float(mixed_loss(outputs, labels, [2, 3])) == pytest.approx(slow, rel=1e-5)
    whole = torch.nn.functional.cross_entropy(outputs, labels, label_smoothing=0.2)
    assert float(mixed_loss(outputs, labels, [5], 0.2)) == pytest.approx(float(whole), rel=1e-5)


def test_replay_keeps_as_many_examples_of_each_task_as_it_is_told(tasks):
    found = learn_tasks(small_net, tasks, "replay", options={"examples": 7}, **RECIPE).learner()
    assert [len(one["labels"]) for one in found.memory] == [7, 7, 7]
    theirs = {tuple(one.flatten().tolist()) for one in tasks[1].train[0]}
    assert {tuple(one.flatten().tolist()) for one in found.memory[1]["inputs"]} <= theirs


def test_heads_do_not_depend_on_how_many_tasks_follow():
    few, many = (with_heads(small_net(), None, [2] * count, seed=3)[0][9] for count in (2, 5))
    assert isinstance(few, TaskHeads)
    assert torch.equal(few[1].weight, many[1].weight)
    assert not torch.equal(few[0].weight, few[1].weight)


def test_networks_without_a_linear_layer_are_refused(tasks):
    refusals(
        (lambda: learn_tasks(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), tasks, **RECIPE), UnknownName, "head"),
        (lambda: learn_tasks(small_net, tasks, head="fc", **RECIPE), UnknownName, "head"),
    )


def test_networks_without_convolutions_have_no_atoms(tasks):
    with pytest.raises(InvalidValue, match="no convolution whose filters could be made of atoms"):
        learn_tasks(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), tasks, "atoms", **RECIPE)


@pytest.mark.parametrize(("method", "options", "kind", "argument"), [
    ("atom", {}, UnknownName, "method"),
    ("finetune", {"strength": 1}, UnknownName, "strength"),
    ("replay", {"strength": 1}, UnknownName, "strength"),
    ("ewc", {"strength": -1}, InvalidValue, "strength"),
    ("replay", {"examples": 0}, InvalidValue, "examples"),
])  # fmt: skip
def test_ways_and_options_that_there_are_not_are_refused(method, options, kind, argument):
    with refused(kind, argument):
        require_options(method, options)
