"""Clients that drop out, come late, send nonsense or break down: they are named, and the others go on."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from federated_worlds import OPTIONS, clients, network, same
from netkin.applications.federated import ClientUpdate, federate
from netkin.applications.federated.algorithms import averaged, received_updates
from netkin.errors import InvalidValue
from refusals import refused


def without(*names):
    return {name: own for name, own in clients().items() if name not in names}


def changed(update, **fields):
    """Return the update that arrives: that of client c1 with other fields, others as they were sent."""
    return [replace(update, **fields) if update.client == "c1" else update]


def with_bias(update, bias):
    return changed(update, weights={**update.weights, "3.bias": bias})


def dropping(update):
    return [] if update.client == "c1" else [update]


def boasting(update):
    return changed(update, examples=0)


def forgetting(update):
    return changed(update, weights={name: one for name, one in update.weights.items() if name != "3.bias"})


FAULTS = {
    "nothing": (dropping, "dropped out: no update came"),
    "NaN": (lambda update: with_bias(update, torch.full((3,), torch.nan).double()), "sent 3 values of '3.bias' that"),
    "another shape": (lambda update: with_bias(update, torch.zeros(4).double()), r"of shape \(4,\), not \(3,\)"),
    "fewer weights": (forgetting, "sent 3 weights, not 4; they differ in '3.bias'"),
    "no examples": (boasting, "claims 0 examples"),
    "many examples": (lambda update: changed(update, examples=10**12), "claims 1,000,000,000,000 examples and has 10"),
    "None": (lambda update: changed(update, weights=None), "sent a NoneType in place of weights"),
    "a list of weights": (lambda update: changed(update, weights=list(update.weights.values())), "sent a list in"),
    "a weight that is None": (lambda update: with_bias(update, None), "sent '3.bias' of shape NoneType"),
    "a list": (lambda update: with_bias(update, [0.0, 0.0, 0.0]), "sent '3.bias' of shape list"),
    "a sparse weight": (lambda update: with_bias(update, torch.ones(3).double().to_sparse()), "'3.bias' as .* sparse"),
    "a meta weight": (lambda update: with_bias(update, torch.ones(3).double().to("meta")), "'3.bias' as .* meta"),
}  # fmt: skip


class Delaying:
    """Lets the updates of a client arrive a round late."""

    def __init__(self):
        self.late = []

    def __call__(self, update):
        if update.client != "c1":
            return [update]
        arriving, self.late = self.late, [update]
        return arriving


@pytest.mark.parametrize("wire, reason", FAULTS.values(), ids=FAULTS)
def test_a_faulty_client_is_named_and_the_round_is_that_of_the_others(wire, reason):
    found, others = federate(network(), clients(), wire=wire, **OPTIONS), federate(network(), without("c1"), **OPTIONS)
    assert [(number, client) for number, client, _ in found.faults] == [(1, "c1"), (2, "c1"), (3, "c1")]
    assert all(re.search(reason, why) for _, _, why in found.faults)
    assert all(np.allclose(found.shared[name], own, atol=1e-14) for name, own in others.shared.items())
    assert re.search(f"round 2, client c1: .*{reason}", str(found))


@pytest.mark.parametrize("value, counts", [(1e200, False), (-1e39, False), (1e30, True)])
def test_a_weight_that_the_networks_precision_can_not_hold_is_refused(value, counts):
    """In float64 such a weight is finite; the mean is cast to float32, where it would be infinite for all clients."""
    data = {name: (inputs.float(), labels) for name, (inputs, labels) in clients().items()}

    def wire(update):
        return with_bias(update, torch.full((3,), value, dtype=torch.float64))

    found = federate(network().float(), data, wire=wire, **OPTIONS | {"rounds": 1})
    assert all(np.isfinite(own).all() for own in found.shared.values())
    reasons = [why for _, _, why in found.faults]
    assert reasons == ([] if counts else ["sent 3 values of '3.bias' that are not finite in float32"])


def test_a_late_update_does_not_count_and_is_named():
    found, others = (
        federate(network(), clients(), wire=Delaying(), **OPTIONS),
        federate(network(), without("c1"), **OPTIONS),
    )
    assert [why for _, _, why in found.faults] == [
        "dropped out: no update came", "came late: an update of round 1 in round 2",
        "came late: an update of round 2 in round 3",
    ]  # fmt: skip
    assert all(np.allclose(found.shared[name], own, atol=1e-14) for name, own in others.shared.items())


def test_a_client_whose_late_or_second_update_is_refused_may_still_count_and_that_is_said():
    early = []

    def late_and_twice(update):
        if update.client == "c1" and update.round == 1:
            early.append(update)
            return []
        return [*early, update] if update.client == "c1" else [update] * (1 + (update.client == "c2"))

    found = federate(network(), clients(), wire=late_and_twice, **OPTIONS | {"rounds": 2})
    assert found.rounds[1].counted == ("c0", "c1", "c2", "c3", "c4")
    text = str(found).replace("\n   ", " ")  # as one line each
    assert "round 1, client c1: dropped out: no update came\n" in text
    assert "client c1: came late: an update of round 1 in round 2 (its update of this round counted)" in text
    assert "client c2: sent more than one update; the first counts (its update of this round counted)" in text


@pytest.mark.parametrize("came", [None, 3, ["update"]])
def test_a_wire_that_returns_other_things_than_updates_is_refused(came):
    with refused(InvalidValue, "wire"):
        federate(network(), clients(), wire=lambda update: came, **OPTIONS)
    one = federate(network(), clients(), wire=lambda update: update, **OPTIONS)
    assert same(one, federate(network(), clients(), **OPTIONS))


def test_a_client_whose_fine_tuning_fails_is_named_and_kept_as_it_was(tmp_path):
    data = clients()
    data["c1"] = (data["c1"][0] * float("nan"), data["c1"][1])
    options = OPTIONS | {"finetune": 1, "save": tmp_path / "f.netkin"}
    found = federate(network(), data, **options)
    assert list(found.untuned) == ["c1"]
    assert "client c1 could not be fine-tuned: its training failed: the mean loss" in str(found)
    assert np.array_equal(found.state("c1")["0.atoms"], network()[0].atoms.detach())
    assert nk.load(tmp_path / "f.netkin") == found
    assert federate(network(), data, **options).untuned == found.untuned


def test_a_client_whose_training_breaks_down_leaves_the_others_alone():
    data = clients()
    data["c1"] = (data["c1"][0] * float("nan"), data["c1"][1])
    data["c3"] = (torch.zeros(10, 2, 4, 4).double(), data["c3"][1])
    data["c4"] = (data["c4"][0] * 1e200, data["c4"][1])
    tests = clients()
    tests["c3"] = data["c3"]
    found = federate(network(nn.ReLU), data, test=tests, **OPTIONS)
    others = federate(network(nn.ReLU), without("c1", "c3", "c4"), **OPTIONS)
    assert {client for _, client, _ in found.faults} == {"c1", "c3", "c4"}
    assert len(found.faults) == 9
    assert all("its training failed" in why for _, _, why in found.faults)
    assert all(np.allclose(found.shared[name], own, atol=1e-14) for name, own in others.shared.items())
    assert list(found.unjudged) == ["c3"]
    assert list(found.accuracy) == ["c0", "c1", "c2", "c4"]
    assert np.array_equal(found.state("c1")["0.atoms"], network()[0].atoms.detach())


def test_what_a_client_sends_twice_or_unasked_counts_once_or_not():
    expected = {"w": torch.zeros(1)}
    updates = [
        ClientUpdate("a", 1, {"w": torch.ones(1)}, 1), ClientUpdate("a", 1, {"w": torch.zeros(1)}, 1),
        ClientUpdate("z", 1, {"w": torch.ones(1)}, 1), ClientUpdate("b", 1, {"w": "ones"}, 1),
    ]  # fmt: skip
    good, faults = received_updates(updates, ["a", "b"], 1, expected)
    assert [one.client for one in good] == ["a"]
    assert float(good[0].weights["w"]) == 1
    assert faults == {
        "a": "sent more than one update; the first counts",
        "z": "was not asked in round 1",
        "b": "sent 'w' of shape str, not (1,)",
    }


def test_a_round_in_which_no_update_arrives_changes_nothing():
    net = network()
    found = federate(net, clients(), wire=lambda update: [], rounds=2)
    assert all(np.array_equal(found.shared[name], own.detach()) for name, own in net.named_parameters())
    assert all(not one.counted and one.loss is None for one in found.rounds)


def test_the_mean_of_half_precision_is_summed_in_double():
    many = [ClientUpdate(str(k), 1, {"w": torch.tensor([1.0, 2.0]).half()}, 1) for k in range(3000)]
    found = averaged(many, {"w": torch.zeros(2).half()})["w"]
    assert found.tolist() == [1, 2]
    assert found.dtype == torch.float16


def test_an_update_of_another_precision_counts_and_leaves_the_precision():
    def rounding(update):
        return [ClientUpdate(update.client, update.round, {n: w.float() for n, w in update.weights.items()}, 10)]

    found = federate(network(), clients(), wire=rounding, **OPTIONS)
    assert {one.dtype for one in found.shared.values()} == {np.dtype("float64")}
    counting = [ClientUpdate("a", 1, {"w": torch.ones(1).long()}, 1)]
    assert received_updates(counting, ["a"], 1, {"w": torch.zeros(1)})[1] == {"a": "sent 'w' as int64"}
