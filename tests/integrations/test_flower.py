"""Flower: the client app and the strategy give the simulator's weights, and name clients that fail."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import netkin as nk
from federated_worlds import network
from netkin.errors import InvalidValue, MissingExtra
from netkin.integrations.flower import client_app, federation_strategy

HOW = {"lr": 0.1, "batch": 4}


def clients(count=3, size=10):
    generator = torch.Generator().manual_seed(5)
    return {
        f"c{k}": (torch.randn(size + k, 1, 4, 4, generator=generator).double(), (torch.arange(size + k) + k) % 3)
        for k in range(count)
    }


@pytest.mark.parametrize("make", [lambda: client_app(network(), clients), lambda: federation_strategy(network())])
def test_without_flower_the_extra_is_named(make, monkeypatch):
    for name in ("flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"pip install 'netkin\[flower\]'"):
        make()


@pytest.fixture
def flower(monkeypatch):
    """Flower's packages; they pin others, so that an environment of their own has them."""
    found = pytest.importorskip("flwr.app", reason="Flower is not installed: `pip install 'netkin[flower]'`")
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity  # set by Flower's runtimes
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(identity, name, 1)
    return found


@pytest.mark.parametrize(
    ("algorithm", "source", "fault"),
    [
        ("local", None, "with 'local' nothing travels"),
        ("pretrain", "evolving", "train the network on public data first"),
        ("fedavg", "pretrained", "train the network on public data first"),
    ],
)
def test_what_is_no_federation_of_real_clients_is_refused(flower, algorithm, source, fault):
    with pytest.raises(InvalidValue, match=fault):
        federation_strategy(network(), algorithm, coefficients=source)
    with pytest.raises(InvalidValue, match=fault):
        client_app(network(), lambda context: ("a", clients()["c0"]), algorithm, coefficients=source)


class Grid:
    """A grid that asks client apps at once in this process, each node with a context of its own."""

    def __init__(self, flower, app, count, spoil=None):
        self.flower, self.app, self.spoil, self.count = flower, app, spoil, count
        self.contexts = {
            node: flower.Context(
                run_id=1, node_id=node, node_config={"partition-id": node}, state=flower.RecordDict(), run_config={}
            )
            for node in range(count)
        }

    def get_node_ids(self):
        return list(range(self.count))

    def send_and_receive(self, messages, *, timeout=None):
        found = [self._answer(one) for one in messages]
        return [one for one in found if one is not None]

    def _answer(self, message):
        node = message.metadata.dst_node_id
        answer = self.app(message, self.contexts[node])
        return answer if self.spoil is None else self.spoil(node, message, answer)


CASES = [("fedavg", None), ("fedavg", "fixed"), ("fedprox", "evolving"), ("fedper", "fixed"), ("fedrep", "evolving"),
         ("ditto", "evolving"), ("local", "evolving")]  # fmt: skip


def data_of(context):
    name = f"c{context.node_config['partition-id']}"
    return name, clients()[name]


def app_and_strategy(algorithm, source, **options):
    strategy = federation_strategy(network(), algorithm, coefficients=source, evaluates=True)
    return client_app(network(), data_of, algorithm, test=data_of, coefficients=source, **HOW, **options), strategy


@pytest.mark.parametrize(("algorithm", "source"), CASES)
def test_apps_in_one_process_give_the_simulators_weights(flower, algorithm, source):
    app, strategy = app_and_strategy(algorithm, source, head_epochs=2)
    result = strategy.start(Grid(flower, app, 3), strategy.initial_arrays, num_rounds=2)
    found = nk.federate(
        network(), clients(), algorithm, coefficients=source, rounds=2, head_epochs=2, test=clients(), **HOW
    )
    assert sorted(result.arrays) == sorted(found.travels)
    common = {name: result.arrays[name].numpy() for name in found.travels if name in found.shared}
    assert all(np.allclose(own, found.shared[name], rtol=0, atol=1e-12) for name, own in common.items())
    assert [one.counted for one in strategy.records] == [one.counted for one in found.rounds]
    whole = sum(len(labels) * found.accuracy[name] for name, (_, labels) in clients().items()) / 33
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(whole)


class Filling(Grid):
    """A grid whose nodes connect one after the other, one at each look."""

    seen = 0

    def get_node_ids(self):
        self.seen = min(self.seen + 1, self.count)
        return list(range(self.seen))


@pytest.mark.parametrize(("share", "asked"), [(1.0, 3), (0.7, 2)])
def test_nodes_that_connect_late_are_waited_for_and_then_asked(flower, monkeypatch, share, asked):
    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", lambda seconds: None)
    strategy = federation_strategy(network(), client_fraction=share, nodes=3, evaluates=True)
    grid = Filling(flower, client_app(network(), data_of, test=data_of, **HOW), 3)
    strategy.start(grid, strategy.initial_arrays, num_rounds=2)
    assert [len(one.asked) for one in strategy.records] == [asked] * 2
    if share == 1:
        expected = nk.federate(network(), clients(), rounds=2, **HOW)
        assert np.allclose(strategy.shared["3.bias"], expected.shared["3.bias"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"client_fraction": 0}, {"client_fraction": 1.5}, {"nodes": 0}, {"nodes": 2.5}])
def test_shares_and_numbers_of_nodes_that_can_not_be_are_refused(flower, options):
    with pytest.raises(
        InvalidValue, match="`client_fraction` is a share of the clients|`nodes` must be a whole number of 1 or more"
    ):
        federation_strategy(network(), **options)


def test_faulty_clients_are_named_and_the_round_is_that_of_the_others(flower):
    def spoil(node, message, answer):
        number = message.content["config"]["server-round"]
        if node == 1 and number == 1:
            return None
        if node == 1 and number == 2:
            return flower.Message(flower.Error(code=0, reason="out of power"), reply_to=message)
        if node == 2 and number == 1:
            answer.content["arrays"]["3.bias"] = flower.Array(np.full(3, np.nan))
        if node == 2 and number == 2:
            del answer.content["metrics"]
        return answer

    app = client_app(network(), data_of, **HOW)
    strategy = federation_strategy(network())
    result = strategy.start(Grid(flower, app, 3, spoil), strategy.initial_arrays, num_rounds=2)
    alone = nk.federate(network(), {"c0": clients()["c0"]}, rounds=2, **HOW)
    assert all(np.allclose(result.arrays[n].numpy(), alone.shared[n], rtol=0, atol=1e-12) for n in alone.travels)
    first, second = (one.faults for one in strategy.records)
    assert first == {
        "node 1": "dropped out: no update came",
        "c2": "sent 3 values of '3.bias' that are not finite",
    }
    assert second["c2"].startswith("sent an answer that can't be read: KeyError")
    assert [why for name, why in second.items() if name != "c2"] == ["failed: out of power"]


def test_a_client_whose_training_fails_says_why(flower):
    def broken(context):
        name, (images, labels) = data_of(context)
        return name, (images * float("nan") if name == "c1" else images, labels)

    strategy = federation_strategy(network())
    strategy.start(Grid(flower, client_app(network(), broken, **HOW), 3), strategy.initial_arrays, num_rounds=1)
    (record,) = strategy.records
    assert record.counted == ("c0", "c2")
    assert record.faults["c1"].startswith("its training failed: the mean loss")


def test_a_round_without_any_update_leaves_the_weights(flower):
    strategy = federation_strategy(network())
    app = client_app(network(), data_of, **HOW)
    result = strategy.start(Grid(flower, app, 3, lambda *_: None), strategy.initial_arrays, num_rounds=1)
    assert strategy.records[0].counted == ()
    assert len(result.arrays) == 0
    assert torch.equal(strategy.shared["3.bias"], network()[3].bias)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_flowers_own_simulation_gives_the_simulators_weights(flower):
    pytest.importorskip("ray", reason="Flower's simulation needs ray: `pip install 'netkin[flower]'`")
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    data, found, server = clients(), SimpleNamespace(), ServerApp()

    def own(context):  # a closure, which ray's workers get by value
        name = f"c{context.node_config['partition-id']}"
        return name, data[name]

    strategy = federation_strategy(network(), "ditto", coefficients="evolving", nodes=3, evaluates=True)

    @server.main()
    def main(grid, context):
        found.result = strategy.start(grid, strategy.initial_arrays, num_rounds=2)

    app = client_app(network(), own, "ditto", test=own, coefficients="evolving", **HOW)
    run_simulation(server, app, num_supernodes=3, backend_config={"client_resources": {"num_cpus": 1}})
    expected = nk.federate(network(), data, "ditto", coefficients="evolving", rounds=2, test=data, **HOW)
    assert [one.counted for one in strategy.records] == [("c0", "c1", "c2")] * 2
    arrays = found.result.arrays
    assert np.allclose(arrays["0.coefficients"].numpy(), expected.shared["0.coefficients"], rtol=0, atol=1e-5)
    whole = sum(len(labels) * expected.accuracy[name] for name, (_, labels) in data.items()) / 33
    assert found.result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(whole)


APP = {
    "pyproject.toml": """
[project]
name = "kin"
version = "1.0.0"
description = "two clients"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "netkin"
[tool.flwr.app.components]
serverapp = "kin.server:app"
clientapp = "kin.client:app"
[tool.flwr.app.config]
""",
    "kin/__init__.py": "",
    "kin/client.py": """
from test_flower import HOW, client_app, data_of, network

app = client_app(network(), data_of, "fedrep", coefficients="evolving", **HOW)
""",
    "kin/server.py": """
import os
import numpy as np
from flwr.serverapp import ServerApp
from test_flower import federation_strategy, network

app = ServerApp()

@app.main()
def main(grid, context):
    strategy = federation_strategy(network(), "fedrep", coefficients="evolving")
    result = strategy.start(grid, strategy.initial_arrays, num_rounds=2, timeout=120)
    np.savez("part.npz", **{name: one.numpy() for name, one in result.arrays.items()})
    os.replace("part.npz", os.environ["KIN_RESULT"])
""",
    "home/config.toml": """
[superlink.kin]
address = "127.0.0.1:{port}"
insecure = true
""",
}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def waited_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.5)
    return condition()


def is_open(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_real_federation_of_local_processes_gives_the_simulators_weights(flower, tmp_path):
    folder = Path(sys.executable).parent
    commands = {name: shutil.which(name, path=str(folder)) for name in ("flower-superlink", "flower-supernode", "flwr")}
    if None in commands.values():
        pytest.skip("Flower's commands are not beside this Python")
    port = free_port()
    for name, text in APP.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.replace("{port}", str(port)))
    folders = [*Path(__file__).parents[:2], Path(nk.__file__).parents[1]]  # the tests', what they share, the package's
    result = tmp_path / "result.npz"
    own = {"FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0", "KIN_RESULT": str(result)}
    own |= {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    started = []

    def start(name, *options):
        call = [commands[name], "--insecure", *options]
        log = (tmp_path / f"{len(started)}.log").open("w")
        started.append((subprocess.Popen(call, env=os.environ | own, cwd=tmp_path, stdout=log, stderr=log), log))

    try:
        start("flower-superlink", "--port", str(port))
        assert waited_for(lambda: is_open(port), 60)
        for k in range(2):
            link = ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            start("flower-supernode", *link, "--node-config", f"partition-id={k}")
        run = [commands["flwr"], "run", str(tmp_path), "kin"]
        subprocess.run(run, env=os.environ | own, check=True, capture_output=True, timeout=60)
        assert waited_for(result.exists, 180), (tmp_path / "0.log").read_text()[-2000:]
    finally:
        for process, log in reversed(started):
            process.terminate()
            process.wait(60)
            log.close()
    expected = nk.federate(network(), clients(2), "fedrep", coefficients="evolving", rounds=2, **HOW)
    with np.load(result) as found:
        assert sorted(found.files) == sorted(expected.travels)
        assert all(np.allclose(found[n], expected.shared[n], rtol=0, atol=1e-5) for n in expected.travels)
