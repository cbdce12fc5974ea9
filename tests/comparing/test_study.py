"""One study on every engine gives equal tables, whatever is killed on the way: a node, or the process itself."""

import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
import study_worlds
from netkin.comparing.engines.ray import Ray
from netkin.errors import InflatedWarning
from processes import ended, run_ranks, started

CALL = ("ray_worlds:first", "ray_worlds:second", "ray_worlds:images")  # two models and data
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the run and its checkpoints, in which calls are made."""
    made = tmp_path_factory.mktemp("study")
    study_worlds.train(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        yield made


def net_at(folder, step):
    """Return the net as it was after a step."""
    model = study_worlds.net()
    model.load_state_dict(torch.load(folder / f"step{step}.pt"))
    return model


@pytest.fixture(scope="module")
def local(folder):
    """The study in one process, of live models."""
    models = {f"step {step}": net_at(folder, step) for step in range(study_worlds.CHECKPOINTS)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)
        return nk.compare_many(models, list(study_worlds.examples().split(20)), progress=False, **study_worlds.ASKED)


def parts():
    return {part: part.stat().st_mtime_ns for part in Path("study.job/parts").glob("*.netkin")}


def wait_for(driver, count):
    """Wait until so many parts are finished."""
    end = time.monotonic() + 240
    while len(parts()) < count:
        if not driver.is_alive() or time.monotonic() > end:
            driver.kill()
            pytest.fail(f"the driver stopped after {len(parts())} parts; what went wrong stands in the output")
        time.sleep(0.02)


@pytest.fixture(scope="module")
def ran(folder, running_cluster):
    """What was there when the driver was killed, when a node was removed, and at the end; and the result."""
    ray_cluster = running_cluster()
    driver = started(study_worlds.drive, folder, ray_cluster.address)
    wait_for(driver, 3)
    assert ended(driver, 0) == -signal.SIGKILL
    killed, removed = parts(), {}

    def remove_a_node(done, total, what):
        if not removed and len(parts()) >= len(killed) + 3:
            ray_cluster.remove()
            removed.update(parts())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)
        try:
            found = study_worlds.study(study_worlds.on_ray(), progress=remove_a_node)
        finally:
            if removed:
                ray_cluster.add()
    return killed, removed, parts(), found


def assert_equal(found, local, within=1e-10):
    assert list(found) == list(local)
    assert len(found) == 780
    for pair, one in local.items():
        for name, table in one.tables.items():
            other = found[pair].tables[name]
            assert (other.layers_a, other.layers_b) == (table.layers_a, table.layers_b)
            np.testing.assert_allclose(other.values, table.values, rtol=0, atol=within)
            np.testing.assert_allclose(other.errors, table.errors, rtol=0, atol=within)


def test_the_study_is_of_all_layers_with_error_bars(local):
    for name in ("svcca", "cka_debiased"):
        table = local["step 0", "step 39"][name]
        assert table.layers_a == table.layers_b == ("0", "1", "2")
        assert np.all(np.diag(table.errors) > 0)


def test_two_ranks_give_the_tables_of_one_process(folder, local):
    run_ranks(study_worlds.share, folder, 2)
    assert_equal(nk.load("distributed.netkin"), local)


def test_a_node_with_a_full_disk_leaves_its_work_to_the_other(folder, ray_cluster):
    names = (f"study_worlds:net@step{step}.pt" for step in (0, 39))
    found = nk.compare(*names, "study_worlds:cached_inputs", engine=Ray(shares=6))
    one = nk.compare(*(net_at(folder, step) for step in (0, 39)), study_worlds.examples())
    np.testing.assert_allclose(found["cka"].values, one["cka"].values, rtol=0, atol=1e-10)
    assert set(Path("disks").read_text().split()) == {"disk1", "disk2"}


def test_two_nodes_of_which_one_is_killed_give_the_tables_of_one_process(ran, local):
    assert_equal(ran[-1], local)


def test_nothing_that_was_finished_is_computed_again(ran):
    killed, removed, end, _ = ran
    assert 0 < len(killed) < len(removed)
    assert {part: removed[part] for part in killed} == killed
    assert all(end.get(part, when) == when for part, when in removed.items())
    assert not any(part.name.startswith("share") for part in end)  # whose tables are there


def test_a_job_deletes_shares_whose_tables_are_there(here):
    call = {"layers": ["conv1", "fc"], "engine": Ray(job=here / "ab.job", shares=3)}
    before = nk.compare(*CALL, **call)
    for _ in range(2):
        parts = sorted(part.name.partition(" of")[0] for part in (here / "ab.job" / "parts").iterdir())
        assert (parts, nk.jobs.read(here / "ab.job").progress) == (["plan", "values"], "1 of 1 part")
        assert nk.compare(*CALL, **call)["cka"] == before["cka"]


def test_a_job_continues_with_what_is_missing(here, dropped):
    call = {"layers": ["conv1", "fc"], "engine": Ray(job=here / "ab.job", shares=3)}
    before = nk.compare(*CALL, **call)
    parts = sorted((here / "ab.job" / "parts").iterdir())
    assert [part.name.partition(" of")[0] for part in parts] == ["plan", "share 1", "share 2", "share 3", "values"]
    written = {part: part.stat().st_mtime_ns for part in parts}
    for part in (parts[2], parts[4]):  # as if the process had been killed before they were finished
        part.unlink()
    assert nk.compare(*CALL, **call)["cka"] == before["cka"]
    assert {part for part in parts if part.stat().st_mtime_ns == written[part]} == {parts[0], parts[1], parts[3]}
    assert nk.jobs.read(here / "ab.job").condition == "done"
