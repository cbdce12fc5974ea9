"""Each algorithm against a slow transcription: one client after the other, gradients by hand-written formulas."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy

from federated_worlds import network
from netkin.applications.federated import ALGORITHMS, federate, plan_for
from netkin.errors import InvalidValue, UnknownName
from refusals import refusals, refused

RATE, MOMENTUM, EPOCHS, PULL, ROUNDS = 0.2, 0.9, 2, 0.3, 2
ATOMS, ALPHA, BIAS, HEAD = ["0.atoms"], ["0.coefficients"], ["0.bias"], ["3.weight", "3.bias"]
EVERY = ATOMS + ALPHA + BIAS + HEAD


def clients():
    generator = torch.Generator().manual_seed(5)
    sizes = {"a": 6, "b": 4, "c": 9}
    return {
        name: (torch.randn(size, 1, 4, 4, generator=generator).double(), torch.arange(size) % 3)
        for name, size in sizes.items()
    }


def scores(state, images):
    filters = torch.einsum("aio,ahw->oihw", state["0.coefficients"], state["0.atoms"])
    hidden = conv2d(images, filters, state["0.bias"]).tanh().flatten(1)
    return hidden @ state["3.weight"].T + state["3.bias"]


def descended(start, data, names, epochs=EPOCHS, anchor=None):
    """Return weights after steps of gradient descent with momentum on all examples at once."""
    state = {name: one.clone().requires_grad_(name in names) for name, one in start.items()}
    speed = {name: torch.zeros_like(state[name]) for name in names}
    for _ in range(epochs):
        loss = cross_entropy(scores(state, data[0]), data[1])
        if anchor is not None:
            loss = loss + PULL / 2 * sum(((state[n] - anchor[n]) ** 2).sum() for n in names if n in anchor)
        gradients = torch.autograd.grad(loss, [state[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            speed[name] = MOMENTUM * speed[name] + gradient
            state[name] = (state[name].detach() - RATE * speed[name]).requires_grad_()
    return {name: one.detach() for name, one in state.items()}


def transcribed(algorithm, start, data, travelling, personal, trained):
    """Return every client's weights after some rounds, written out as the papers have it."""
    shared, own = dict(start), {name: dict(start) for name in data}
    total = sum(len(labels) for _, labels in data.values())
    for _ in range(ROUNDS):
        sent = {}
        for name, examples in data.items():
            begin = {**own[name], **{n: shared[n] for n in travelling}}
            common = {n: shared[n] for n in travelling}
            if algorithm == "fedprox":
                sent[name] = own[name] = descended(begin, examples, trained, anchor=common)
            elif algorithm == "fedrep":
                half = descended(begin, examples, [n for n in trained if n in personal], epochs=3)
                rest = [n for n in trained if n in travelling]
                sent[name] = own[name] = descended(half, examples, rest)
            elif algorithm == "ditto":
                sent[name] = descended({**start, **common}, examples, trained)
                mine = {**begin, **{n: own[name][n] for n in personal}}
                own[name] = descended(mine, examples, [n for n in trained if n in personal], anchor=common)
            else:
                sent[name] = own[name] = descended(begin, examples, trained)
        for n in travelling:
            shared[n] = sum(len(data[name][1]) / total * sent[name][n] for name in data)
    if algorithm == "ditto":
        return {name: {**start, **shared, **{n: own[name][n] for n in personal}} for name in data}
    return {name: {**own[name], **{n: shared[n] for n in travelling}} for name in data}


BODY = ATOMS + ALPHA + BIAS
CASES = {  # what travels, what is personal, what is trained
    ("fedavg", None): (EVERY, [], EVERY),
    ("fedavg", "fixed"): (BIAS + HEAD, ATOMS, ATOMS + BIAS + HEAD),
    ("fedavg", "evolving"): (ALPHA + BIAS + HEAD, ATOMS, EVERY),
    ("fedprox", None): (EVERY, [], EVERY),
    ("fedprox", "fixed"): (BIAS + HEAD, ATOMS, ATOMS + BIAS + HEAD),
    ("fedprox", "evolving"): (ALPHA + BIAS + HEAD, ATOMS, EVERY),
    ("fedper", None): (BODY, HEAD, EVERY),
    ("fedper", "fixed"): (BIAS, ATOMS + HEAD, ATOMS + BIAS + HEAD),
    ("fedper", "evolving"): (ALPHA + BIAS, ATOMS + HEAD, EVERY),
    ("fedrep", None): (BODY, HEAD, EVERY),
    ("fedrep", "fixed"): (BIAS, ATOMS + HEAD, ATOMS + BIAS + HEAD),
    ("fedrep", "evolving"): (ALPHA + BIAS, ATOMS + HEAD, EVERY),
    ("ditto", None): (EVERY, EVERY, EVERY),
    ("ditto", "fixed"): (ATOMS + BIAS + HEAD, ATOMS + BIAS + HEAD, ATOMS + BIAS + HEAD),
    ("ditto", "evolving"): (EVERY, ATOMS + BIAS + HEAD, EVERY),
    ("local", None): ([], EVERY, EVERY),
    ("local", "fixed"): ([], ATOMS + BIAS + HEAD, ATOMS + BIAS + HEAD),
    ("local", "evolving"): (ALPHA, ATOMS + BIAS + HEAD, EVERY),
}


@pytest.mark.parametrize("algorithm, source", CASES)
def test_an_algorithm_gives_the_weights_of_its_transcription(algorithm, source):
    net, data = network(), clients()
    travelling, personal, trained = CASES[algorithm, source]
    found = federate(
        net, data, algorithm, coefficients=source, rounds=ROUNDS, epochs=EPOCHS, lr=RATE, momentum=MOMENTUM,
        batch=100, prox=PULL, head_epochs=3,
    )  # fmt: skip
    start = {name: one.detach() for name, one in net.named_parameters()}
    expected = transcribed(algorithm, start, data, travelling, personal, trained)
    for client, state in expected.items():
        for name, own in state.items():
            assert np.allclose(found.state(client)[name], own.numpy(), rtol=0, atol=1e-12), (client, name)
    assert sorted(found.travels) == sorted(travelling)
    assert sorted(found.personal) == sorted(personal)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pretraining_gives_all_weights_to_pretrain_and_the_coefficients_to_others(algorithm):
    net, data = network(), clients()
    public = (data["a"][0] * 2, data["a"][1])
    options = {"rounds": 1, "epochs": 1, "lr": RATE, "batch": 100, "public": public, "pretrain_epochs": 2}
    found = federate(net, data, algorithm, coefficients="pretrained", **options)
    start = {name: one.detach() for name, one in net.named_parameters()}
    public_net = descended(start, public, EVERY, epochs=2)
    for client in data:
        assert np.allclose(found.state(client)["0.coefficients"], public_net["0.coefficients"], atol=1e-12)
    if algorithm in ("local", "pretrain"):
        begin = public_net if algorithm == "pretrain" else {**start, **{n: public_net[n] for n in ALPHA}}
        own = descended(begin, data["b"], ATOMS + BIAS + HEAD, epochs=1)
        assert all(np.allclose(found.state("b")[name], own[name], atol=1e-12) for name in EVERY)


def test_fixed_coefficients_are_not_pretrained_either():
    net, data = network(), clients()
    found = federate(net, data, "pretrain", coefficients="fixed", rounds=1, public=data["a"], lr=RATE)
    assert np.array_equal(found.shared["0.coefficients"], net[0].coefficients.detach())
    assert not np.allclose(found.state("a")["0.atoms"], net[0].atoms.detach())


def test_fine_tuning_makes_atoms_and_head_personal_and_leaves_the_rest():
    net, data = network(), clients()
    options = {"coefficients": "federated", "rounds": 1, "epochs": 1, "lr": RATE, "batch": 100}
    before, after = federate(net, data, **options), federate(net, data, **options, finetune=2)
    assert not before.personal
    assert before.similarity is None
    assert sorted(after.personal) == sorted(ATOMS + HEAD)
    begin = {name: torch.tensor(one) for name, one in before.state("c").items()}
    own = descended(begin, data["c"], ATOMS + HEAD, epochs=2)
    assert all(np.allclose(after.state("c")[name], own[name], atol=1e-12) for name in EVERY)


def test_a_weight_without_gradients_is_neither_trained_nor_sent():
    net = network()
    net[0].bias.requires_grad_(False)
    found = federate(net, clients(), rounds=1, lr=RATE)
    assert "0.bias" not in found.travels
    assert np.array_equal(found.shared["0.bias"], net[0].bias)


def test_running_statistics_travel_with_the_body_and_counts_stay():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    plan = plan_for(net, "fedper")
    assert {"1.running_mean", "1.running_var"} < set(plan.travelling)
    assert plan.kept == ("3.weight", "3.bias", "1.num_batches_tracked")
    found = federate(net, clients(), "fedavg", rounds=1, batch=100)
    means = [0.1 * net[0](images).mean((0, 2, 3)) for images, _ in clients().values()]
    expected = sum(len(labels) / 19 * mean for mean, (_, labels) in zip(means, clients().values(), strict=True))
    assert np.allclose(found.shared["1.running_mean"], expected.detach(), atol=1e-12)


def test_what_travels_is_said_with_what_it_leaks():
    net = network()
    assert plan_for(net, "local").leaks.startswith("Nothing travels")
    assert "which classes" in plan_for(net, "fedavg").leaks
    assert "which classes" not in plan_for(net, "fedper").leaks
    ours = plan_for(net, "local", "evolving")
    assert ours.travelling == ("0.coefficients",)
    assert "hands its atoms over once" in ours.leaks


@pytest.mark.parametrize(
    "algorithm, source, kind, argument",
    [
        ("fedavgg", None, UnknownName, "algorithm"),
        ("fedavg", "random", UnknownName, "coefficients"),
        ("local", "federated", InvalidValue, "coefficients"),
    ],
)
def test_unknown_ways_are_refused(algorithm, source, kind, argument):
    with refused(kind, argument):
        plan_for(network(), algorithm, source)


def test_a_network_without_atoms_head_or_gradients_is_refused_where_it_needs_them():
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    assert plan_for(plain, "fedavg").travelling == ("0.weight", "0.bias")
    refusals(
        (lambda: plan_for(plain, "fedper"), InvalidValue, "head"),
        (lambda: plan_for(plain, "fedper", head="fc"), UnknownName, "head"),
        (lambda: plan_for(plain, "fedavg", "fixed"), InvalidValue, "coefficients"),
        (lambda: plan_for(plain.requires_grad_(False), "fedavg"), InvalidValue, ""),
    )
