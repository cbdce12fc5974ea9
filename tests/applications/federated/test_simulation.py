"""The simulation: clients at once and one by one, jobs, and what is refused."""

import copy
import os
import pickle
import signal
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from federated_worlds import OPTIONS, clients, network, same
from netkin.applications.federated import ALGORITHMS, federate, local_training
from netkin.applications.federated.algorithms import sampled
from netkin.errors import FileError, ForwardError, InvalidValue, NetkinError, ShapeError, UnknownName
from processes import ended, started
from quickly import slow_after, slow_but
from refusals import refusals, refused


@pytest.mark.parametrize("algorithm", slow_after(4, ALGORITHMS))
def test_clients_at_once_end_as_one_by_one(algorithm):
    options = OPTIONS | {"public": clients()["c0"], "head_epochs": 2, "finetune": 1}
    found = [
        federate(network(), clients(), algorithm, method=method, **options) for method in ("stacked", "one by one")
    ]
    assert same(*found, within=1e-8)
    assert all(one.counted == tuple(clients()) for one in found[0].rounds)


def test_clients_with_different_numbers_of_examples_are_stacked_too():
    data = {**clients(2), "small": clients(1, size=7)["c0"], "large": clients(1, size=13)["c0"]}
    for options in (OPTIONS, OPTIONS | {"drop_last": True}):
        found = [federate(network(), data, method=method, **options) for method in ("stacked", "one by one")]
        assert same(*found, within=1e-8)
        assert not found[0].faults


@pytest.mark.parametrize("algorithm", slow_after(4, ALGORITHMS))
@pytest.mark.parametrize("share", slow_but([1.0, 0.4], 1.0))
def test_networks_that_are_stacked_again_end_as_those_that_are_stacked_anew(algorithm, share, monkeypatch):
    made = []
    count = local_training.Trainings.__init__
    monkeypatch.setattr(local_training.Trainings, "__init__", lambda *given: (made.append(1), count(*given))[1])
    data = {**clients(4), **{f"longer{k}": clients(1, size=13 + k)["c0"] for k in range(3)}}
    options = OPTIONS | {
        "rounds": 4,
        "client_fraction": share,
        "drop_last": True,
        "method": "stacked",
        "public": clients()["c0"],
    }
    found = [federate(network(), data, algorithm, **options)]
    few = len(made)
    monkeypatch.setattr(local_training, "HELD", 0)
    found.append(federate(network(), data, algorithm, **options))
    assert same(*found)
    assert found[0].rounds == found[1].rounds
    assert len(made) - few > few  # without, each round makes its own


def test_the_model_and_the_random_state_are_left_alone():
    net = network()
    before, state = {n: w.clone() for n, w in net.state_dict().items()}, torch.get_rng_state()
    federate(net, clients(), **OPTIONS)
    assert all(torch.equal(before[n], w) for n, w in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(w.requires_grad for w in net.parameters())


def test_a_share_of_the_clients_is_drawn_anew_for_each_round():
    found = federate(network(), clients(10), client_fraction=0.3, **OPTIONS)
    drawn = [one.asked for one in found.rounds]
    assert all(len(one) == 3 for one in drawn)
    assert len(set(drawn)) > 1
    assert drawn == [one.asked for one in federate(network(), clients(10), client_fraction=0.3, **OPTIONS).rounds]
    counts = np.zeros(10)
    for number in range(2000):
        counts[[int(name) for name in sampled([str(k) for k in range(10)], 0.3, 0, number)]] += 1
    assert np.all(np.abs(counts / 2000 - 0.3) < 0.06)


def test_bfloat16_networks_can_be_federated_and_saved(tmp_path):
    data = {name: (images.bfloat16(), labels) for name, (images, labels) in clients(3).items()}
    found = federate(network().bfloat16(), data, save=tmp_path / "f.netkin", **OPTIONS)
    again = federate(network().bfloat16(), data, **OPTIONS)
    assert same(found, again)
    assert found.state("c0")["0.atoms"].dtype == np.float32


# --- jobs -------------------------------------------------------------------------------------------------------------


def stopping(monkeypatch, at, stop):
    """Let a federation be stopped when it keeps its round after `at`."""
    keep = nk.Job.keep

    def keep_or_stop(self, name, *given, **options):
        if name == f"round {at + 1}":
            stop()
        return keep(self, name, *given, **options)

    monkeypatch.setattr(nk.Job, "keep", keep_or_stop)


def interrupt():
    raise KeyboardInterrupt


class Talking(nn.Tanh):
    def forward(self, x):
        warnings.warn("a word of its own", stacklevel=1)
        return super().forward(x)


def test_the_warnings_of_a_model_do_not_grow_with_the_rounds():
    counts = []
    for rounds in (3, 8):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("default")
            federate(network(Talking), clients(), **(OPTIONS | {"rounds": rounds, "method": "stacked"}))
        counts.append(sum(str(one.message) == "a word of its own" for one in given))
    assert counts[0] == counts[1] > 0


def test_a_stopped_federation_goes_on_as_if_it_had_not_stopped(tmp_path, monkeypatch):
    options = OPTIONS | {"rounds": 4, "finetune": 1, "algorithm": "ditto", "save": tmp_path / "f.netkin"}
    with monkeypatch.context() as patch:
        stopping(patch, 2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            federate(network(), clients(), **options)
    assert not (tmp_path / "f.netkin").exists()
    found = federate(network(), clients(), **options)
    whole = federate(network(), clients(), **{**options, "save": None})
    assert same(found, whole)
    assert found.rounds == whole.rounds
    assert nk.Job.beside(tmp_path / "f.netkin", "federation", {}).folder.exists()


def federate_until_killed(path):
    stopping(pytest.MonkeyPatch(), 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    federate(network(), clients(120), save=path, **OPTIONS | {"rounds": 4})


@pytest.mark.slow
def test_a_killed_federation_goes_on_as_if_it_had_not_been_killed(tmp_path):
    path = tmp_path / "f.netkin"
    assert ended(started(federate_until_killed, path)) == -signal.SIGKILL
    assert nk.jobs.read(path).condition == "killed"
    assert nk.jobs.read(path).done == 2
    found = federate(network(), clients(120), save=path, **OPTIONS | {"rounds": 4})
    assert same(found, federate(network(), clients(120), **OPTIONS | {"rounds": 4}))


@pytest.mark.parametrize("part", slow_after(1, ["round 3", "clients after round 3", "standing"]))
def test_a_stop_between_two_parts_of_a_round_loses_nothing(tmp_path, monkeypatch, part):
    keep, written = nk.Job.keep, []

    def keep_or_stop(self, name, *given, **options):
        written.append(name)
        if name == part and "round 3" in written:
            raise KeyboardInterrupt
        return keep(self, name, *given, **options)

    whole = OPTIONS | {"rounds": 5, "client_fraction": 0.4}
    options = whole | {"save": tmp_path / "f.netkin"}
    with monkeypatch.context() as patch:
        patch.setattr(nk.Job, "keep", keep_or_stop)
        with pytest.raises(KeyboardInterrupt):
            federate(network(), clients(), **options)
    found = federate(network(), clients(), **options)
    assert same(found, federate(network(), clients(), **whole))
    assert [one.round for one in found.rounds] == [1, 2, 3, 4, 5]
    assert nk.jobs.read(tmp_path / "f.netkin").done == 5


def test_clients_that_do_not_work_in_a_round_are_not_written_again(tmp_path, monkeypatch):
    keep, places = nk.Job.keep, {}

    def noted(self, name, values, arrays=None, **options):
        if name.startswith("clients after"):
            places[name] = [f"c{place}" for place in values["places"]]
        return keep(self, name, values, arrays, **options)

    monkeypatch.setattr(nk.Job, "keep", noted)
    found = federate(network(), clients(), save=tmp_path / "f.netkin", client_fraction=0.4, **OPTIONS)
    assert places == {f"clients after round {one.round}": list(one.asked) for one in found.rounds}


def test_a_full_disk_leaves_a_state_from_which_the_same_call_continues(tmp_path, monkeypatch):
    write = nk.files.write

    def write_or_not(path, kind, header, *given, **options):
        if header.get("name") == "clients after round 2":
            raise FileError("the disk is full")
        return write(path, kind, header, *given, **options)

    options = OPTIONS | {"client_fraction": 0.4, "save": tmp_path / "f.netkin"}
    with monkeypatch.context() as patch:
        patch.setattr("netkin.jobs.files.write", write_or_not)
        with pytest.warns(nk.UnsavedWarning):
            federate(network(), clients(), **options)
    (tmp_path / "f.netkin").unlink()
    found = federate(network(), clients(), **options)
    assert same(found, federate(network(), clients(), client_fraction=0.4, **OPTIONS))


@pytest.mark.parametrize("part", slow_after(1, ["round 2", "clients after round 2", "standing"]))
def test_a_part_that_was_deleted_is_computed_again(tmp_path, part):
    options = OPTIONS | {"client_fraction": 0.4, "save": tmp_path / "f.netkin"}
    whole = federate(network(), clients(), **options)
    (deleted,) = [
        file for file in (tmp_path / "f.netkin.job" / "parts").iterdir() if file.name.partition(".")[0] == part
    ]
    deleted.unlink()
    found = federate(network(), clients(), **options)
    assert same(found, whole)
    assert found.rounds == whole.rounds


def test_more_rounds_go_on_from_those_that_are_done_and_fewer_are_refused(tmp_path):
    path = tmp_path / "f.netkin"
    federate(network(), clients(), save=path, finetune=1, **OPTIONS)
    longer = OPTIONS | {"rounds": 5, "finetune": 1}
    asked = []
    found = federate(
        network(), clients(), save=path, progress=lambda done, _, what: asked.append((what, done)), **longer
    )
    assert same(found, federate(network(), clients(), **longer))
    assert not [done for what, done in asked if what == "federating" and done < 4]
    with refused(FileError, "rounds"):
        federate(network(), clients(), save=path, **OPTIONS)


@pytest.mark.parametrize(
    "change", [{"lr": 0.2}, {"seed": 1}, {"prox": 0.5}, {"coefficients": "fixed"}, {"algorithm": "fedper"}]
)
def test_another_federation_in_its_place_is_refused(tmp_path, change):
    options = {"save": tmp_path / "f.netkin", **OPTIONS, "rounds": 1}
    federate(network(), clients(), **options)
    with pytest.raises(FileError, match="holds a federation that differs in"):
        federate(network(), clients(), **options | change)
    with pytest.raises(FileError, match="differs in set of data"):
        federate(network(), clients(size=9), **options)


def test_a_saved_federation_is_opened_as_it_was(tmp_path):
    found = federate(network(), clients(), test=clients(), save=tmp_path / "f.netkin", **OPTIONS)
    opened = nk.load(tmp_path / "f.netkin")
    assert same(found, opened)
    assert str(opened) == str(found)
    assert opened.rounds == found.rounds
    assert opened == found == pickle.loads(pickle.dumps(found)) == copy.deepcopy(found)
    assert opened != federate(network(), clients(), **OPTIONS)
    with pytest.raises(ValueError, match="read-only"):
        opened.personal["0.atoms"][0] = 0
    (tmp_path / "other.netkin").write_text("mine")
    with pytest.raises(FileError, match="other.netkin"):
        found.save(tmp_path / "other.netkin")


def test_a_clients_network_has_its_weights_and_its_accuracy():
    net, data = network(), clients()
    found = federate(net, data, test=data, **OPTIONS)
    made = found.model("c2", net)
    with torch.no_grad():
        right = (made(data["c2"][0]).argmax(1) == data["c2"][1]).double().mean()
    assert found.accuracy["c2"] == pytest.approx(float(right))
    refusals(
        (lambda: found.model("c9", net), UnknownName, "client"),
        (lambda: found.model("c2", nk.recompose(net)), ShapeError, "like"),
    )


def test_a_client_without_test_examples_is_not_judged_and_named():
    data = clients()
    tests = data | {"c1": (data["c1"][0][:0], data["c1"][1][:0])}
    found = federate(network(), data, test=tests, rounds=1)
    assert found.unjudged == {"c1": "it has no test examples"}
    assert "client c1 has no accuracy: it has no test examples" in str(found)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, options, kind, argument",
    [
        ({}, {}, InvalidValue, "clients"),
        ("digits", {}, InvalidValue, "clients"),
        ({"a": torch.zeros(3)}, {}, InvalidValue, ""),
        (clients() | {"e": (torch.zeros(0, 1, 4, 4), torch.zeros(0).long())}, {},
         InvalidValue, "clients"),
        ({"a": (torch.zeros(3, 1, 4, 4), torch.zeros(3))}, {}, ShapeError, ""),
        ({"a": (torch.zeros(3, 1, 4, 4), torch.zeros(2).long())}, {}, ShapeError, "data"),
        ({"a": (torch.zeros(3, 1, 4, 4), torch.tensor([0, 1, 3]))}, {}, ShapeError, ""),
        ({"a": (torch.zeros(3, 1, 9, 9), torch.tensor([0, 1, 2]))}, {}, ForwardError, ""),
        (clients(), {"test": {"c0": clients()["c0"]}}, UnknownName, "test"),
        (clients(), {"rounds": 0}, InvalidValue, "rounds"),
        (clients(), {"finetune": 1.5}, InvalidValue, "finetune"),
        (clients(), {"client_fraction": 0}, InvalidValue, "client_fraction"),
        (clients(), {"prox": -1}, InvalidValue, "prox"),
        (clients(), {"coefficients": "pretrained"}, InvalidValue, "public"),
        (clients(), {"test_every": 2}, InvalidValue, "test_every"),
        (clients(), {"test_every": 0, "test": clients()}, InvalidValue, "test_every"),
        (clients(), {"method": "sideways"}, UnknownName, "method"),
        (clients(), {"speed": 3}, UnknownName, "recipe"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_a_sentence(data, options, kind, argument):
    with refused(kind, argument):
        federate(network(), data, **options)


def test_a_round_in_which_every_client_fails_says_why():
    data = {name: (images * float("nan"), labels) for name, (images, labels) in clients().items()}
    words = "all 5 clients of the round failed; of client 'c0', its training failed: the mean"
    with pytest.raises(ForwardError, match=words):
        federate(network(), data, **OPTIONS)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_network_with_nested_outputs_is_refused():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, images):
            return torch.nested.nested_tensor(list(self.inner(images)))

    with pytest.raises(ShapeError, match="a federation trains classifiers, which give a matrix of scores"):
        federate(Nested(), clients(2), **OPTIONS)


def test_networks_with_dropout_that_must_be_stacked_are_refused():
    net = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16, 3)).double()
    with pytest.raises(NetkinError, match="can't be trained stacked"):
        federate(net, clients(), method="stacked", rounds=1)
    assert len(federate(net, clients(), method="one by one", rounds=1).rounds) == 1


def test_clients_are_tested_after_every_few_rounds_and_at_the_last():
    options = OPTIONS | {"test": clients(), "rounds": 5}
    found = federate(network(), clients(), "fedper", test_every=2, **options)
    assert list(found.accuracies) == [2, 4, 5]
    assert found.accuracies[5] == found.accuracy
    shorter = federate(network(), clients(), "fedper", **options | {"rounds": 2})
    assert found.accuracies[2] == shorter.accuracy
    assert shorter.accuracies == {}
    assert same(found, federate(network(), clients(), "fedper", **options))


def test_accuracies_of_rounds_are_continued_with_the_same_test_data_alone(tmp_path):
    options = OPTIONS | {"test": clients(), "test_every": 1}
    federate(network(), clients(), save=tmp_path / "f.netkin", **options | {"rounds": 2})
    found = federate(network(), clients(), save=tmp_path / "f.netkin", **options)
    assert found.accuracies == federate(network(), clients(), **options).accuracies
    assert nk.load(tmp_path / "f.netkin").accuracies == found.accuracies
    with pytest.raises(FileError, match="test data"):
        federate(network(), clients(), save=tmp_path / "f.netkin", **options | {"test": clients(size=7), "rounds": 4})
