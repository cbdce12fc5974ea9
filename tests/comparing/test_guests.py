"""Models are left as they were found, whatever happens."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk


@pytest.fixture
def model(maps):
    model = maps().train()
    model.conv2.eval()
    model.fc.weight.requires_grad_(False)
    return model


class Failing(torch.nn.Module):
    """Draws random numbers, and fails in its third batch."""

    def __init__(self, inner, fault):
        super().__init__()
        self.inner, self.fault, self.calls = inner, fault, 0

    def forward(self, images):
        self.calls += 1
        torch.rand(3), random.random(), np.random.rand()
        if self.calls == 3:
            raise self.fault
        return self.inner(images)


def test_a_comparison_leaves_no_trace(state_of, model, images):
    before = state_of(model)
    loader = DataLoader(TensorDataset(images), batch_size=16, shuffle=True)
    nk.compare(model, model, loader, ["cka", "cka_minibatch"], transforms=(None, lambda x: x + torch.rand(1)))
    assert state_of(model) == before


@pytest.mark.parametrize("fault", [RuntimeError("broken"), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
def test_a_crash_leaves_no_trace(state_of, model, images, fault):
    failing = Failing(model, fault)
    before = state_of(failing)
    with pytest.raises(type(fault)):
        nk.compare(failing, model, list(images.split(10)))
    assert state_of(failing) == before


def test_a_crash_in_the_data_leaves_no_trace(state_of, model, images):
    def stream():
        yield images
        raise OSError("the disk is gone")

    before = state_of(model)
    with pytest.raises(OSError, match="the disk is gone"):
        nk.compare(model, data=stream(), partial=True)
    assert state_of(model) == before


def test_a_refusal_leaves_no_trace(state_of, model, images):
    before = state_of(model)
    with pytest.raises(nk.NetkinError):
        nk.compare(model, model, images, layers={"b": "nothing"}, transforms=(None, torch.clone))
    with pytest.raises(nk.NetkinError):
        nk.compare(model, data=images * torch.nan)
    assert state_of(model) == before


def test_dropout_is_off_and_no_graph_is_built(model, images):
    once, again = (nk.compare(model, data=images).to_numpy() for _ in range(2))
    assert np.array_equal(once, again)
