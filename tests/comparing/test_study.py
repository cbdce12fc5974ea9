"""One study on every engine gives equal tables, whatever is killed on the way: workers, a node, the process itself."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
import study_worlds
from netkin.errors import InflatedWarning

SOURCES, TESTS = str(Path(nk.__file__).parents[1]), str(Path(study_worlds.__file__).parent)
LOOPBACK = "127.0.0.1"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the run, its checkpoints and results."""
    made = tmp_path_factory.mktemp("study")
    study_worlds.train(made)
    return made


def net_at(folder, step):
    """Return the net as it was after a step."""
    model = study_worlds.net()
    model.load_state_dict(torch.load(folder / f"step{step}.pt"))
    return model


@pytest.fixture(scope="module")
def environment():
    found = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER"))}
    path = os.pathsep.join([SOURCES, TESTS])
    return found | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def local(folder):
    """The study in one process, of live models."""
    models = {f"step {step}": net_at(folder, step) for step in range(study_worlds.CHECKPOINTS)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)
        return nk.compare_many(models, list(study_worlds.examples().split(20)), progress=False, **study_worlds.ASKED)


@pytest.fixture(scope="module")
def nodes(environment, folder):
    """Two nodes of Ray on this machine; the first, where work begins, has a full disk."""
    pytest.importorskip("ray", reason="needs the extra netkin[ray]")
    from ray.cluster_utils import Cluster

    disks = {place: folder / f"disk{place}" for place in (1, 2)}
    for disk in disks.values():
        disk.mkdir()
    (disks[1] / "cache").symlink_to("/dev/full")
    how = {"num_cpus": 1, "node_ip_address": LOOPBACK, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
            patch.setenv(name, environment[name])
        cluster = Cluster(initialize_head=True, head_node_args=how | {"env_vars": {"NODE_DISK": str(disks[1])}})
        cluster.add_node(**how, env_vars={"NODE_DISK": str(disks[2])})
        yield cluster
        cluster.shutdown()


def started(environment, *arguments):
    command = [sys.executable, study_worlds.__file__, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def parts_in(folder):
    return {part: part.stat().st_mtime_ns for part in (folder / "study.job" / "parts").glob("*.netkin")}


def wait_for(folder, driver, count):
    """Wait until so many parts are finished."""
    end = time.monotonic() + 240
    while len(parts_in(folder)) < count:
        if driver.poll() is not None or time.monotonic() > end:
            driver.kill()
            pytest.fail(f"the driver stopped after {len(parts_in(folder))} parts: {driver.communicate()[1]}")
        time.sleep(0.02)


@pytest.fixture(scope="module")
def on_full_disk(folder, environment, nodes):
    """The comparison of two checkpoints while both nodes are there."""
    driver = started(environment, "disk", folder, nodes.address)
    _, said = driver.communicate(timeout=240)
    assert driver.returncode == 0, said
    return nk.load(folder / "disk.netkin")


@pytest.fixture(scope="module")
def ran(folder, environment, nodes, on_full_disk):
    """What was there when the driver was killed, when a node was removed, and at the end of the study."""
    address = nodes.address
    driver = started(environment, "ray", folder, address)
    wait_for(folder, driver, 3)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    killed = parts_in(folder)
    driver = started(environment, "ray", folder, address)
    wait_for(folder, driver, len(killed) + 3)
    nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
    removed = parts_in(folder)
    _, said = driver.communicate(timeout=240)
    assert driver.returncode == 0, said
    return killed, removed, parts_in(folder)


def assert_equal(found, local, within=1e-10):
    assert list(found) == list(local)
    assert len(found) == 780
    for pair, one in local.items():
        for name, table in one.tables.items():
            other = found[pair].tables[name]
            np.testing.assert_allclose(other.values, table.values, rtol=0, atol=within)
            np.testing.assert_allclose(other.errors, table.errors, rtol=0, atol=within)


def test_two_ranks_give_the_tables_of_one_process(folder, environment, local):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, study_worlds.__file__, "distributed", str(folder)], env=environment, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_equal(nk.load(folder / "distributed.netkin"), local)


def test_a_node_with_a_full_disk_leaves_its_work_to_the_other(folder, on_full_disk):
    one = nk.compare(*(net_at(folder, step) for step in (0, 39)), study_worlds.examples())
    np.testing.assert_allclose(on_full_disk["cka"].values, one["cka"].values, rtol=0, atol=1e-10)
    assert set((folder / "disks").read_text().split()) == {"disk1", "disk2"}


def test_two_nodes_of_which_one_is_killed_give_the_tables_of_one_process(folder, ran, local):
    assert_equal(nk.load(folder / "ray.netkin"), local)


def test_nothing_that_was_finished_is_computed_again(ran):
    killed, removed, end = ran
    assert 0 < len(killed) < len(removed) < len(end)
    assert {part: end[part] for part in killed} == killed
    assert {part: end[part] for part in removed} == removed
