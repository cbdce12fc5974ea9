"""How far a claim has come, while it is measured."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from netkin import jobs, progress
from netkin.progress import also_calling, showing
from netkin.training import Recipe
from reproductions import laboratory
from reproductions.claims import Finding, Measured
from reproductions.laboratory import Lab, Network
from reproductions.running import measured, working

CONTROL = {"size": Measured(0.25)}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.delenv("NETKIN_DATA", raising=False)
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))  # noqa: E731
    monkeypatch.setitem(laboratory.RECIPES["cpu"], "convnet", Network(build, Recipe(steps=3, batch=8, lr=0.01)))
    return Lab("cpu", cache=tmp_path)


def states_of(lab, made, work, keep=True, tasks=(1, 2, 3)):
    """Measure a claim that does some tasks, and return the job's progress before each of them."""
    seen = lab.cache / "seen"

    def watched(lab, task):
        (state,) = jobs.list_jobs(lab.cache / "jobs")
        with seen.open("a") as file:
            file.write(f"{state.progress}\n")
        return work(lab, task)

    def measure(lab):
        return Finding("holds", {"size": Measured.over(lab.over(watched, tasks, keep))}, CONTROL)

    seen.unlink(missing_ok=True)
    statement = made(measure=measure)
    with working(statement, lab):
        measured(statement, lab)
    return seen.read_text().splitlines()


@pytest.mark.parametrize("keep", [True, False])
def test_the_job_of_a_claim_counts_its_tasks(lab, made, keep):
    found = states_of(lab, made, lambda lab, task: task, keep)
    assert found == ["0 of 3 tasks", "1 of 3 tasks", "2 of 3 tasks"]
    assert states_of(lab, made, lambda lab, task: task, keep) == found  # counted anew for every claim


def test_tasks_that_a_killed_run_had_finished_count_as_done(lab, made, tmp_path):
    killed = tmp_path / "killed"

    def work(lab, task):
        if task == 3 and not killed.exists():
            killed.touch()
            raise KeyboardInterrupt
        return task

    with pytest.raises(KeyboardInterrupt):
        states_of(lab, made, work)
    assert states_of(lab, made, work)[-1:] == ["2 of 3 tasks"]


def test_networks_that_are_trained_count_as_tasks_and_are_named(lab, monkeypatch):
    told = []
    monkeypatch.setattr(progress, "PAUSE", 0)
    with showing(False), also_calling(lambda done, total, what, unit: told.append((what, unit))):
        lab.trained_all([("convnet", 0), ("convnet", 1)])
    assert (lab.done, lab.total) == (2, 2)
    assert ("training (convnet)", "steps") in told
    assert ("train", "tasks") in told
    assert lab.trained_all([("convnet", 0)])  # kept, so that nothing is left to do
    assert (lab.done, lab.total) == (2, 2)


def test_work_of_other_processes_is_counted(tmp_path):
    lab = Lab("gpu", device="cuda", cache=tmp_path)  # nothing is placed there
    lab._workers = ThreadPoolExecutor(2)
    assert lab.over(doubled, [1, 2, 3]) == [2, 4, 6]
    assert (lab.done, lab.total) == (3, 3)


def doubled(lab, task):
    return 2 * task
