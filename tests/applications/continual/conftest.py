"""Tasks, and what came of learning them, for all tests here."""

import pytest
import torch

from continual_worlds import RECIPE, fewer, small_net
from netkin.applications.continual import learn_tasks, split_tasks


@pytest.fixture(scope="session")
def tasks():
    """Three tasks of two digits each, 48 images of each to train and to test on."""
    return tuple(map(fewer, split_tasks("digits:train", "digits:test")[:3]))


@pytest.fixture(scope="session")
def learnt(tasks):
    """The three tasks learnt by atoms, with two seeds."""
    return learn_tasks(small_net, tasks, "atoms", seeds=(0, 1), **RECIPE)


@pytest.fixture
def images(tasks):
    return torch.cat([task.test[0] for task in tasks])
