"""What `explain_dynamics` foretells is what `dynamics` does."""

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import MemoryLimit
from run_worlds import WIDTH, Fan, run_of


@pytest.fixture
def rows():
    return torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(1))


def test_the_forward_passes_foretold_are_those_taken(rows):
    models = {step: Fan(seed=step) for step in (0, 10, 20)}
    plan = nk.explain_dynamics(models, rows, "cka")
    before = sum(model.calls for model in models.values())
    nk.dynamics(models, rows, "cka")
    assert plan.passes == sum(model.calls for model in models.values()) - before - 3 * 2 == 3 * 4
    assert plan.steps == (0, 10, 20)
    assert plan.each.pairs == 9
    assert not plan.refused
    assert "run 'run': 3 checkpoints, steps 0 to 20" in str(plan)
    assert "forward passes in all: 12; the final model runs once on each batch" in str(plan)


def test_a_final_model_runs_once_where_maps_are_averaged_down_too():
    maps = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    models = {step: _Small(step) for step in (0, 10, 20)}
    plan = nk.explain_dynamics(models, maps, "cka", shape="positions", resize="average")
    before = sum(model.calls for model in models.values())
    nk.dynamics(models, maps, "cka", shape="positions", resize="average")
    assert plan.passes == sum(model.calls for model in models.values()) - before - 3 * 2 == 3


class _Small(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.calls = torch.nn.Conv2d(3, 4, 3, stride=2), 0

    def forward(self, maps):
        self.calls += 1
        return self.conv(maps)


def test_what_would_be_refused_is_told_in_the_same_words(rows):
    models = {step: Fan(seed=step) for step in (0, 10)}
    plan = nk.explain_dynamics(models, rows, ["cka"], memory=100)
    with pytest.raises(MemoryLimit) as refusal:
        nk.compare(models[0], models[10], rows, ["cka"], memory=100, names=("step 0", "step 10"))
    assert plan.refused == str(refusal.value)
    assert "would be refused" in str(plan)


def test_weights_alone_take_no_passes_and_no_data():
    run = run_of(low=10, middle=20, high=40)
    plan = nk.explain_dynamics(run, measures="weight_cosine", model=Fan, steps=3)
    assert plan.passes == 0
    assert len(plan.steps) == 3
    assert plan.each.pairs == int(
        np.isfinite(nk.dynamics(run, measures="weight_cosine", model=Fan)[50].to_numpy()).sum()
    )
    assert str(plan).endswith("forward passes in all: none")


def test_data_that_do_not_tell_their_number_leave_it_open(rows):
    class Stream:
        def __iter__(self):
            return iter([rows[:200], rows[200:]])

    plan = nk.explain_dynamics({step: Fan(seed=step) for step in (0, 10)}, Stream(), "cka")
    assert plan.passes is None
    assert "forward passes in all: not known before the data are read" in str(plan)
