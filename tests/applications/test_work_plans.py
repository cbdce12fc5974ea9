"""What plans say beforehand, held to what the work then does: examples that go through a model, counted as they do."""

import inspect

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue
from netkin.training.class_splits import Task

FEW = 3  # examples of runs that only learn sizes, which plans leave out


class Counted(nn.Module):
    """A network that counts the examples that it and its copies are given, while they are more than few."""

    examples = 0

    def __init__(self, outputs=4):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 8), nn.ReLU())
        self.head = nn.Linear(8, outputs)

    def forward(self, images):
        Counted.examples += len(images) * (len(images) > FEW)
        return self.head(self.body(images))


def data(count, seed=0, classes=4):
    images = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return images, torch.arange(count) % classes


BATCHES, MORE = ([(images[:20], labels[:20]), (images[20:], labels[20:])] for images, labels in (data(36), data(32, 1)))
CLIENTS, TESTS = [data(count, count) for count in (8, 16, 20)], [data(6, 7)] * 3
TASKS = [Task(name, data(20, seed, 2), data(8, seed + 5, 2), 2) for seed, name in enumerate(("one", "two", "three"))]
LEARN = {"epochs": 2, "batch": 5}
ALONE = {"rounds": 3, "method": "one by one", "epochs": 2, "batch": 4}

CALLS = {
    "train": (nk.train, lambda net: (net, data(30)), {"epochs": 3, "batch": 6, "test": MORE}),
    "train by steps": (nk.train, lambda net: (net, data(30)), {"steps": 11, "batch": 10, "test": data(12)}),
    "train whole batches": (nk.train, lambda net: (net, data(30)), {"epochs": 2, "batch": 8, "drop_last": True}),
    "train on batches": (nk.train, lambda net: (net, BATCHES), {"epochs": 2}),
    "recommend": (nk.recommend, lambda net: ({"one": net, "two": Counted()}, BATCHES), {"scores": ["logme"]}),
    "recommend a part": (nk.recommend, lambda net: ({"one": net}, BATCHES), {"examples": 25, "errors": False}),
    "compress": (nk.compress, lambda net: (net, ["body.2", "head"]), {"data": BATCHES, "k": 2, "test": MORE}),
    "compress in turn": (
        nk.compress, lambda net: (net, ["body.2", "head"]), {"data": BATCHES, "k": 2, "order": "from_the_top"}
    ),
    "federate": (nk.federate, lambda net: (net, CLIENTS), {"test": TESTS, "test_every": 2, **ALONE}),
    "federate some": (nk.federate, lambda net: (net, CLIENTS), {"client_fraction": 0.5, "finetune": 2, **ALONE}),
    "fedrep": (nk.federate, lambda net: (net, CLIENTS, "fedrep"), {"head_epochs": 3, **ALONE}),
    "ditto": (nk.federate, lambda net: (net, CLIENTS, "ditto"), {**ALONE}),
    "pretrain": (nk.federate, lambda net: (net, CLIENTS, "pretrain"), {"public": data(12), **ALONE}),
    **{
        f"learn by {method}": (nk.learn_tasks, lambda net, way=method: (net, TASKS, way), {"seeds": (0, 1), **LEARN})
        for method in ("atoms", "finetune", "replay", "joint", "separate")
    },
    "tasks": (nk.compare_tasks, lambda net: ({"one": (net, BATCHES), "two": (Counted(3), MORE)},), {"seeds": 2}),
    "Fisher–Rao": (
        nk.task_similarity, lambda net: ({"one": (net, BATCHES), "two": (Counted(3), MORE)}, "fisher_rao"), {}
    ),
    "classes": (nk.class_sensitivity, lambda net: (net, BATCHES), {"examples": 30}),
    "sparsity": (nk.sparsity_study, lambda net: ({"one": net, "two": Counted()}, BATCHES), {"sparsities": (0.0, 0.5)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_as_many_examples_go_through_the_model_as_the_plan_says(name):
    function, given, options = CALLS[name]
    plan = function.explain(*given(Counted()), **options)
    Counted.examples = 0
    function(*given(Counted()), **options)
    assert plan.examples == Counted.examples > 0


def test_a_plan_counts_the_steps_of_a_training():
    steps = []
    plan = nk.explain_train(Counted(), data(30), epochs=3, batch=7, hooks=[lambda model, step: steps.append(step)])
    assert (plan.steps, steps) == (15, [])
    nk.train(Counted(), data(30), epochs=3, batch=7, hooks=[lambda model, step: steps.append(step)], progress=False)
    assert len(steps) == plan.steps


def test_a_search_takes_no_more_than_the_plan_says():
    options = {"data": BATCHES, "accuracy_drop": 0.1}
    plan = nk.explain_compress(Counted(), ["body.2", "head"], **options)
    Counted.examples = 0
    nk.compress(Counted(), ["body.2", "head"], **options)
    assert 36 < Counted.examples <= plan.examples


def test_a_plan_of_data_of_unknown_length_says_so():
    class Stream:
        def __iter__(self):
            yield from BATCHES

    plan = nk.explain_train(Counted(), Stream(), epochs=2)
    assert (plan.steps, plan.examples) == (None, None)
    assert "an unknown number of steps" in str(plan)


def test_a_plan_refuses_what_the_work_refuses():
    for call in (nk.explain_recommend, nk.recommend):
        with pytest.raises(InvalidValue) as refusal:
            call({"one": Counted()}, BATCHES, chunks=1)
        assert refusal.value.argument == "chunks"
    memory = {"measures": "cca_mean", "memory": 100}
    assert "100 B" in nk.explain_class_sensitivity(Counted(), BATCHES, **memory).refused


def test_a_plan_leaves_models_and_generators_as_they_were():
    net = Counted().train()
    before, state = {name: one.clone() for name, one in net.state_dict().items()}, torch.get_rng_state()
    nk.explain_federate(net, CLIENTS, **ALONE)
    nk.explain_task_similarity({"one": (net, BATCHES), "two": (net, MORE)})
    nk.explain_recommend({"one": net}, BATCHES)
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, before[name]) for name, one in net.state_dict().items())


@pytest.mark.parametrize("name", ["compare_tasks", "compress", "federate", "recommend", "train"])
def test_a_plan_is_asked_for_as_the_work_is(name):
    work, plan = getattr(nk, name), getattr(nk, f"explain_{name}")
    assert list(inspect.signature(plan).parameters.values()) == list(inspect.signature(work).parameters.values())
    assert inspect.signature(plan).return_annotation == "WorkPlan"
    assert "Planning" not in str(inspect.signature(work))
