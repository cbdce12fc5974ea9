"""What all tests share: seeded worlds, and measures called without the warning about few examples."""

import gc
import os
import re
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

# small matrices gain nothing from threads, and threads that share busy cores wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# torch and netkin are imported by those who use them: the process that hands out tests to others needs neither
os.fsync = lambda file: None  # no test cuts the power; processes that tests start write as netkin does
# the same examples in every run, and none kept on disk
settings.register_profile("netkin", derandomize=True, database=None, deadline=None, max_examples=60)
settings.register_profile("quick", settings.get_profile("netkin"), max_examples=8)
settings.load_profile("netkin")


@pytest.fixture
def worlds():
    """Return a maker of matrices that makes the same ones in every run."""
    from worlds import Worlds

    return Worlds(seed=0)


@pytest.fixture(scope="session")
def value():
    """Return a function that calls a measure by name on two matrices, the warning about few examples aside."""
    from netkin.errors import InflatedWarning
    from netkin.measures import measures

    def call(name, X, Y, **parameters):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InflatedWarning)
            return measures()[name].function(X, Y, **parameters)

    return call


@pytest.fixture
def files_up_to():
    """Return a `with` inside which the system refuses to write files of more bytes, as on a full disk."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def limited(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # Python ignores the signal, and raises OSError
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


CLUSTER, CLUSTER_ENDS = [], ExitStack()


@pytest.fixture
def ray_cluster(running_cluster):
    """Two nodes of Ray, on the loopback address, whose workers find the modules of these tests."""
    return running_cluster()


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory):
    """Return a function that gives the nodes that run; it starts them before the first test with Ray of a row."""

    def give():
        if not CLUSTER:
            CLUSTER.append(_started_cluster(tmp_path_factory.mktemp("nodes")))
            CLUSTER_ENDS.callback(CLUSTER.clear)
        return CLUSTER[0]

    yield give
    CLUSTER_ENDS.close()


def _started_cluster(folder):
    ray = pytest.importorskip("ray", reason="needs the extra netkin[ray]")
    import netkin.errors
    from netkin.comparing.engines.ray import Cluster
    from ray_worlds import Nodes

    patch = CLUSTER_ENDS.enter_context(pytest.MonkeyPatch.context())
    patch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(netkin.errors.__file__).parents[1]), str(Path(__file__).parent)])
    )
    patch.setenv("RAY_worker_niceness", "0")  # else busy processors leave nothing for workers
    nodes = Nodes(folder)
    CLUSTER_ENDS.callback(nodes.cluster.shutdown)
    Cluster(nodes.address)  # to which all calls in this process then connect
    CLUSTER_ENDS.callback(ray.shutdown)
    return nodes


@pytest.fixture(scope="session")
def quick_python():
    """The path of a command like `python` that starts at once, for scripts which start many; see processes.py."""
    from processes import quick_python

    with quick_python() as path:
        yield path


@cache
def _trained(seed, epochs):
    """Return a network, and what was told of its training after each epoch."""
    from netkin.training.loop import trained_digits_net  # which `shared_nets` leaves alone

    told = []
    return trained_digits_net(seed, epochs, lambda *epoch: told.append(epoch)), told


@pytest.fixture(scope="session")
def trained_once():
    """Return `trained_digits_net` that trains each network once for all tests of a process, and hands out copies.

    Training is a function of the seed and the epochs, which tests/training holds it to.
    """

    def copied(seed, epochs=12, progress=None):
        model, told = _trained(seed, epochs)
        for epoch in told if progress else ():
            progress(*epoch)
        return deepcopy(model)

    return copied


@pytest.fixture
def shared_nets(monkeypatch, trained_once):
    """Let netkin hand out copies of networks that are trained once."""
    monkeypatch.setattr("netkin.training.trained_digits_net", trained_once)


PROGRAMS = {"browser", "running_cluster", "quick_python"}  # fixtures that start other programs
# the tests that need a cluster of Ray, by their names
RAY = re.compile(r"/test_(ray|study|cluster_steps)\.py|::test_a_cluster_")
# those that share a cluster, a browser with Matplotlib, or the imports of Lightning and Hugging Face
TOGETHER = {
    "ray": RAY,
    "pages": re.compile(r"^tests/reporting/"),
    "adapters": re.compile(r"^tests/integrations/|/test_(tokens|token_losses|token_refusals|pretrained|fuzzed)\.py"),
}


def pytest_runtest_setup(item):
    """End the cluster before a test without Ray: its processes are never idle. The next with Ray starts another."""
    if not RAY.search(item.nodeid):
        CLUSTER_ENDS.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage while tests are collected, as their growing number would be searched again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_configure(config):
    """Let a process of `pytest -n 2` report of a test that passed its call alone, not its start, setup and teardown."""
    if hasattr(config, "workerinput") and config.option.verbose <= 0 and config.option.durations is None:
        (worker,) = (one for one in config.pluginmanager.get_plugins() if type(one).__name__ == "WorkerInteractor")
        send = worker.sendevent

        def send_what_is_read(name, **message):
            report = message["data"] if name == "testreport" else {"outcome": "", "when": ""}
            if name != "logstart" and (report["outcome"] != "passed" or report["when"] == "call"):
                send(name, **message)

        worker.sendevent = send_what_is_read


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests that start other programs as slow; put those with Ray and files with slow tests first.

    What is long and begun last leaves other processors idle.
    """
    import torch

    # `torch.manual_seed` notes for devices that are not there where it was called, which takes longer than seeding
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():
            devices.manual_seed_all = lambda seed: None
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if PROGRAMS & fixtures:
            item.add_marker(pytest.mark.slow)
        if "running_cluster" in fixtures and not RAY.search(item.nodeid):
            raise pytest.UsageError(f"{item.nodeid} starts Ray; let its name begin with 'test_a_cluster_'.")
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (not RAY.search(item.nodeid), -slow[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let one process of `pytest -n 2 --dist loadfile` have all tests that share what takes long to start."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            own = super()._split_scope(nodeid)
            return next((name for name, tests in TOGETHER.items() if tests.search(nodeid)), own)

    return Scheduling(config, log)


# importing it registers measures, which only the tests of plug-ins want
collect_ignore = ["plugin_world.py"]
