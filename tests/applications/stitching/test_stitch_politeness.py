"""`stitch` is a guest: models, modes and random states stay as they were."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from netkin.applications.stitching import fit_all, stitch
from netkin.representations import positions
from stitching_worlds import built, labelled

IMAGES = (3, 12, 12)


def state(model):
    flags = [
        (module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    return flags, [weight.requires_grad for weight in model.parameters()], copy.deepcopy(model.state_dict())


def net(seed):
    def parts():
        yield from [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(), nn.Conv2d(6, 5, 3)]
        yield from [nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(320, 4)]

    return built(lambda: nn.Sequential(*parts()), seed=seed)


def test_models_and_random_states_stay_as_they_were():
    a, b = net(0).train(), net(1).train()
    b[0].requires_grad_(False)
    data = labelled(net(1), *IMAGES)
    before = state(a), state(b)
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    found = stitch(a, "1", b, "1", data, test=data)
    found.network(data[0][0])
    for (flags, grads, weights), model in zip(before, (a, b), strict=True):
        now = state(model)
        assert (flags, grads) == now[:2]
        assert all(torch.equal(weights[name], tensor) for name, tensor in now[2].items())
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])


def test_the_mode_of_the_models_does_not_matter():
    a, b = net(0), net(1)
    data = labelled(b, *IMAGES)
    quiet = stitch(a, "1", b, "1", data, test=data)
    a.train(), b.train()
    loud = stitch(a, "1", b, "1", data, test=data)
    assert torch.equal(quiet.map.weight, loud.map.weight)
    assert quiet.evaluation == loud.evaluation


def test_steps_in_place_after_a_layer_do_not_reach_the_fit():
    a, b = net(0), net(1)
    data = labelled(b, *IMAGES)
    x = torch.cat([batch[0] for batch in data])
    A, B = a[1](a[0](x)), b[1](b[0](x))
    assert (A < 0).any()
    A, B = (positions(output).detach().numpy() for output in (A, B))
    solved = np.linalg.lstsq(np.column_stack([A, np.ones(len(A))]), B)[0]
    made = fit_all(a, b, [("1", "1"), ("4", "4")], data)
    assert made[("1", "1"), "least_squares"].map.weight.numpy() == pytest.approx(solved[:-1], abs=1e-8)


def test_nothing_is_left_behind_by_a_crash():
    a, b = net(0).train(), net(1).train()
    before = state(a)[0], state(b)[0]
    with pytest.raises(RuntimeError):
        stitch(a, "1", b, "1", [(torch.ones(4, 3, 12, 12), 0), (torch.ones(4, 9, 12, 12), 0)])
    assert (state(a)[0], state(b)[0]) == before
