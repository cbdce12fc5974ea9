"""Promises that no room keeps alone; decision 0017 lists all promises, each with the test that keeps it."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import MemoryLimit

ROOT = Path(__file__).parent.parent
DECISION = ROOT / "docs/decisions/0017-the-core-in-half-the-code.md"


class Net(nn.Module):
    """Draws random numbers of all kinds, and changes its inputs in place."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout()
        self.relu, self.last = nn.ReLU(inplace=True), nn.Linear(width, 3)

    def forward(self, inputs):
        torch.rand(1), random.random(), np.random.rand()
        inputs += 1
        return self.last(self.drop(self.relu(self.norm(self.first(inputs)))))


@pytest.fixture
def nets():
    torch.manual_seed(0)
    nets = [Net(width).train() for width in (6, 7, 8)]
    for net in nets:
        net.relu.eval()
        net.last.weight.requires_grad_(False)
        net.first.register_forward_hook(lambda module, inputs, output: None)
    return nets


@pytest.fixture
def inputs():
    return torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


def state(nets, inputs):
    """Return all that a call must not change: of the models, of the data and of chance."""
    modules = [module for net in nets for module in net.modules()]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        [module.training for module in modules],
        [len(getattr(module, name)) for module in modules for name in hooks],
        [parameter.requires_grad for net in nets for parameter in net.parameters()],
        [parameter.grad for net in nets for parameter in net.parameters()],
        [value.tolist() for net in nets for value in net.state_dict().values()],
        inputs.tolist(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    )


LABELS = torch.arange(40) % 3
CALLS = {
    "compare": lambda a, b, c, x: nk.compare(a, b, x, ["cka", "cka_rbf", "cka_minibatch(batch=8)"], errors=True),
    "gradients compared": lambda a, b, c, x: nk.compare(a, b, x, ["kernel_cka", "sketched_cka"]),
    "weights": lambda a, b, c, x: nk.compare(a, b, measures="weight_cosine"),
    "compare_many": lambda a, b, c, x: nk.compare_many([a, b, c], x, layers=["first", "last"]),
    "blocks": lambda a, b, c, x: nk.compare_many([a, b, c], x, layers=["first", "last"], memory=20_000),
    "collect": lambda a, b, c, x: nk.collect(a, b, x, part="1/2"),
    "explain": lambda a, b, c, x: nk.explain(a, b, x),
    "explain_many": lambda a, b, c, x: nk.explain_many([a, b, c], x, progress=False),
    "dynamics": lambda a, b, c, x: nk.dynamics({0: a, 1: a}, x, "cka"),
    "activations": lambda a, b, c, x: nk.activations(a, data=x),
    "gradients": lambda a, b, c, x: nk.gradients(a, data=x),
    "class_sensitivity": lambda a, b, c, x: nk.class_sensitivity(a, data=[(x, LABELS)]),
    "diff": lambda a, b, c, x: nk.diff(a, a, [x], progress=False),
    "stitch": lambda a, b, c, x: nk.stitch(a, "first", b, "first", [(x, LABELS)], "least_squares"),
}


@pytest.mark.parametrize("name", CALLS)
def test_models_data_and_chance_are_as_before(name, nets, inputs):
    before = state(nets, inputs)
    CALLS[name](*nets, inputs)
    assert state(nets, inputs) == before


LIMITS = [2**power for power in range(8, 23)]
WORK = [
    {"measures": ["cka", "svcca"]},
    {"measures": ["cka", "svcca"], "errors": True, "chunks": 4},
    {"measures": ["cka", "cka_rbf", "cka_minibatch(batch=8)"]},
    {"measures": ["kernel_cka", "sketched_cka(buckets=16)"]},
]


def refuses(call, *given, **options):
    try:
        call(*given, progress=False, **options)
    except MemoryLimit:
        return True
    return False


@pytest.mark.parametrize("options", WORK, ids=lambda options: f"{options['measures']}")
@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["an array", "batches"])
def test_what_the_plan_refuses_the_work_refuses_and_nothing_else_does(nets, inputs, options, streamed):
    data = list(inputs.split(16)) if streamed else inputs
    planned = [bool(nk.explain(*nets[:2], data, **options, memory=limit, progress=False).refused) for limit in LIMITS]
    assert planned == [refuses(nk.compare, *nets[:2], data, **options, memory=limit) for limit in LIMITS]
    assert {*planned} == {True, False}  # so that there is something to agree about


@pytest.mark.parametrize("more", [{}, {"errors": True, "chunks": 4}], ids=["values", "errors"])
def test_of_many_models_as_well(nets, inputs, more):
    options = {"layers": ["first", "last"], "measures": ["cka", "nbs"], **more}
    limits = LIMITS[2:12:2]
    planned = [bool(nk.explain_many(nets, inputs, **options, memory=limit, progress=False).refused) for limit in limits]
    assert planned == [refuses(nk.compare_many, nets, inputs, **options, memory=limit) for limit in limits]
    assert {*planned} == {True, False}


def test_every_promise_has_a_test_that_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", DECISION.read_text(encoding="utf-8"))
    assert len(named) > 40
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in {path for path, _ in named}}
    assert [f"{path}::{name}" for path, name in named if f"\ndef {name}(" not in sources[path]] == []
