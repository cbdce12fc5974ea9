"""`netkin jobs` lists, watches and cancels."""

import json
import sys
import threading

import pytest

from netkin.jobs import Cancelled, Job


@pytest.fixture
def done(tmp_path):
    with Job.beside(tmp_path / "ab.netkin", "sweep", {"seed": 0}, call="stitch_all()") as job:
        job.expect(["x"])
        job.keep("x", {})
    return tmp_path


def test_jobs_are_listed_with_their_progress(netkin, done):
    found = netkin(f"jobs {done}")
    assert found.output == f"{done / 'ab.netkin.job'}: sweep, done, 1 of 1 parts\n"


def test_json_has_all_of_the_state(netkin, done):
    (state,) = json.loads(netkin(f"jobs {done} --json").output)
    assert (state["condition"], state["done"], state["call"]) == ("done", 1, "stitch_all()")
    assert state["identity"] == {"seed": 0}


def test_a_folder_without_jobs_says_so(netkin, tmp_path):
    found = netkin(f"jobs {tmp_path}")
    assert (found.exit_code, found.stdout, found.stderr) == (0, "no jobs here\n", "")


def test_a_folder_that_is_not_there_is_refused(netkin):
    found = netkin("jobs gone")
    assert (found.exit_code, found.stdout) == (1, "")
    assert "there is no folder 'gone' to look for jobs in." in found.stderr


def test_a_job_that_is_over_is_shown_and_can_not_be_cancelled(netkin, done):
    assert netkin(f"jobs watch {done / 'ab.netkin'}").stdout.endswith("sweep, done, 1 of 1 parts\n")
    refused = netkin(f"jobs cancel {done / 'ab.netkin'}")
    assert refused.exit_code == 1
    assert "is done, with 1 of 1 parts done; only a running job can be cancelled." in refused.stderr
    assert netkin(f"jobs watch {done / 'cd.netkin'}").exit_code == 1
    assert netkin("jobs watch").exit_code == netkin("jobs a b").exit_code == 2


def test_a_running_job_is_watched_until_it_is_cancelled(netkin, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["netkin.cli.jobs"], "PAUSE", 0.01)
    ready, ended = threading.Event(), []

    def work():
        try:
            with Job(tmp_path / "job", "count", {}) as job:
                number = 0
                while True:
                    job.part(str(number), dict)
                    number += 1
                    ready.set()
        except Cancelled as fault:
            ended.append(fault)

    worker = threading.Thread(target=work)
    worker.start()
    assert ready.wait(30)
    assert netkin(f"jobs cancel {tmp_path / 'job'}").exit_code == 0
    found = netkin(f"jobs watch {tmp_path / 'job'}")
    worker.join(30)
    assert ended
    assert ": count, cancelled, " in found.stdout
