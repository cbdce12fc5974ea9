"""A job: parts that are kept at once, continued, watched and cancelled; nothing of another job is mixed in."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import netkin
from netkin import files, jobs, progress
from netkin.errors import FileError, InvalidValue
from netkin.jobs import Cancelled, Job

SOURCE = str(Path(netkin.__file__).parent.parent)
IDENTITY = {"data digest": "5c1e", "models": {"a": "11", "b": "22"}}


def squares(folder, count=3, fail_at=None, identity=IDENTITY):
    """Return the squares of numbers, one a part, and which of them were computed now."""
    computed = []

    def square(number):
        if number == fail_at:
            raise InvalidValue(f"{number} is no good.")
        computed.append(number)
        return {"square": number**2}, {"powers": np.arange(number) ** 2}

    with Job(folder, "count", identity) as job:
        job.expect(map(str, range(count)))
        parts = [job.part(str(number), lambda number=number: square(number)) for number in range(count)]
    return parts, computed


def started(folder, program):
    """Return a process that has a job open, once it has said so."""
    text = f"from netkin.jobs import Job\nimport time\nwith Job({str(folder)!r}, 'count', {IDENTITY!r}) as job:\n"
    text += f"    job.keep('0', {{'square': 0}})\n    print('ready', flush=True)\n    {program}\n"
    environment = os.environ | {"PYTHONPATH": SOURCE}
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=environment)
    with process.stdout as told:
        assert told.readline() == "ready\n"
    return process


@pytest.fixture
def sleeper(tmp_path):
    process = started(tmp_path / "job", "time.sleep(600)")
    yield process
    process.kill()
    process.wait()


def test_parts_are_kept_at_once_and_computed_once(tmp_path):
    with pytest.raises(InvalidValue, match="2 is no good"):
        squares(tmp_path / "job", fail_at=2)
    state = jobs.read(tmp_path / "job")
    assert (state.condition, state.done, state.total) == ("failed", 2, 3)
    assert state.error == "InvalidValue: 2 is no good."
    parts, computed = squares(tmp_path / "job")
    assert computed == [2]
    assert [part.values["square"] for part in parts] == [0, 1, 4]
    assert [part.arrays["powers"].tolist() for part in parts] == [[], [0], [0, 1]]
    assert jobs.read(tmp_path / "job").condition == "done"
    assert squares(tmp_path / "job")[1] == []


def test_a_part_remembers_how_long_it_took(tmp_path):
    def slow():
        time.sleep(0.02)
        return {}

    with Job(tmp_path / "job", "count", {}) as job:
        first = job.part("slow", slow)
    with Job(tmp_path / "job", "count", {}) as job:
        again = job.part("slow", slow)
        assert job.seconds == first.seconds
    assert again == first
    assert again.seconds >= 0.02


@pytest.mark.parametrize(
    "identity, words",
    [
        (
            {"data digest": "77ab", "models": {"a": "11", "b": "22"}},
            r"data \('5c1e', not '77ab'\); a loader that shuffles or draws at random gives other data each "
            "time; ask for the same again, give another path or delete it",
        ),
        ({"data digest": "5c1e", "models": {"a": "11", "b": "33"}}, r"the weights of 'b' \('22', not '33'\)"),
        ({"data digest": "5c1e", "models": {"a": "0" * 24, "b": "22"}}, r"the weights of 'a'; ask"),
        ({**IDENTITY, "seed": 0}, r"seed \(None, not 0\)"),
        ({"models": {"a": "11", "b": "22"}}, r"data \('5c1e', not None\); ask for"),
        ({**IDENTITY, "test data": "9 examples"}, r"test data \(None, not '9 examples'\); ask for"),
    ],
)
def test_a_job_of_another_identity_is_refused_and_stays_as_it_was(tmp_path, identity, words):
    squares(tmp_path / "job")
    before = (tmp_path / "job" / "job.json").read_text()
    with pytest.raises(FileError, match=f"^'[^']*job' holds a count that differs in {words}"):
        squares(tmp_path / "job", identity=identity)
    assert (tmp_path / "job" / "job.json").read_text() == before


def test_a_refusal_shows_no_digests_and_says_errors_for_chunks(tmp_path):
    held = {"data": "5c1e" * 4, "settings": {"chunks": "0"}, "measures": "cka", "measures digest": "ab" * 12}
    asked = {"data": "77ab" * 4, "settings": {"chunks": "20"}, "measures": "nbs", "measures digest": "cd" * 12}
    squares(tmp_path / "job", identity=held)
    words = r"differs in data and `errors` \('none', not '20 chunks'\) and measures \('cka', not 'nbs'\); a loader"
    with pytest.raises(FileError, match=words):
        squares(tmp_path / "job", identity=asked)
    with pytest.raises(FileError, match="holds a count that differs in the code of its measures; ask"):
        squares(tmp_path / "job", identity=held | {"measures digest": "cd" * 12})
    asked = {"test data digest": f"50 examples, mark {'77ab' * 4}"}
    squares(tmp_path / "other", identity={"test data digest": f"150 examples, mark {'5c1e' * 4}"})
    with pytest.raises(FileError, match=r"differs in test data \('150 examples', not '50 examples'\); a loader"):
        squares(tmp_path / "other", identity=asked)


@pytest.mark.parametrize(
    "one, other",
    [
        ("0.1234567890123456", "0.6543210987654321"),
        ("1234567890123456", "6543210987654321"),
        ("1.5", "1.52345678901234e-05"),
    ],
)
def test_a_refusal_shows_long_numbers_whole(tmp_path, one, other):
    squares(tmp_path / "job", identity={"rate": one})
    with pytest.raises(FileError, match=rf"differs in rate \('{one}', not '{other}'\)"):
        squares(tmp_path / "job", identity={"rate": other})


def test_a_job_of_another_kind_is_refused(tmp_path):
    squares(tmp_path / "job")
    with pytest.raises(FileError, match="holds a count, not a sweep; give another path or delete it"):
        Job(tmp_path / "job", "sweep", IDENTITY).__enter__()


def test_overwriting_begins_anew(tmp_path):
    result = tmp_path / "ab.netkin"
    with Job.beside(result, "count", {"seed": 0}) as job:
        job.keep("0", {"square": 0})
    result.write_text("old")
    with pytest.raises(FileError, match="or start again with `overwrite=True`"):
        Job.beside(result, "count", {"seed": 1}).__enter__()
    with Job.beside(result, "count", {"seed": 1}, overwrite=True) as job:
        assert job.find("0") is None
    assert not files.is_filled(result)
    assert jobs.read(result).identity == {"seed": 1}


def test_a_job_that_finished_nothing_gives_way_to_another_of_its_kind(tmp_path):
    with pytest.raises(InvalidValue):
        squares(tmp_path / "job", fail_at=0)
    assert squares(tmp_path / "job", identity={"data digest": "77ab"})[1] == [0, 1, 2]
    assert jobs.read(tmp_path / "job").identity == {"data digest": "77ab"}


def test_work_without_parts_tells_how_far_it_is_and_can_be_cancelled(tmp_path):
    with Job(tmp_path / "job", "training", {}) as job:
        job.advance(2_000, None, "steps")
        assert str(jobs.read(tmp_path / "job")).endswith("job: training, running, 2,000 steps")
        job.advance(3_000, 3_000, "steps")
    assert str(jobs.read(tmp_path / "job")).endswith("job: training, done, 3,000 of 3,000 steps")
    with Job(tmp_path / "job", "training", {}) as job:
        jobs.cancel(tmp_path / "job")
        with pytest.raises(Cancelled, match="cancelled: 7 of 9 steps are done"):
            job.advance(7, 9, "steps")
    assert jobs.read(tmp_path / "job").condition == "cancelled"


def test_parts_without_their_state_are_refused(tmp_path):
    squares(tmp_path / "job")
    (tmp_path / "job" / "job.json").unlink()
    with pytest.raises(FileError, match="holds parts of a job without its job.json; delete it, or start again"):
        squares(tmp_path / "job")


def test_an_error_that_can_not_be_encoded_is_told(tmp_path):
    with pytest.raises(ValueError, match="odd"), Job(tmp_path / "job", "count", {}):
        raise ValueError("odd \udcff")
    assert jobs.read(tmp_path / "job").error == "ValueError: odd \udcff"


def test_a_mapping_in_the_identity_may_gain_entries_and_remembers_them(tmp_path):
    squares(tmp_path / "job")
    squares(tmp_path / "job", identity={"data digest": "5c1e", "models": {"b": "22", "c": "33"}})
    assert jobs.read(tmp_path / "job").identity["models"] == {"a": "11", "b": "22", "c": "33"}
    with pytest.raises(FileError, match="differs in the weights of 'c' "):
        squares(tmp_path / "job", identity={"data digest": "5c1e", "models": {"c": "34"}})


def test_a_second_process_is_refused_while_the_first_one_works(tmp_path, sleeper):
    words = rf"is being worked on by another process \({sleeper.pid} on .*, 1 part done\); wait for it, watch it by"
    with pytest.raises(FileError, match=words):
        squares(tmp_path / "job")
    assert jobs.read(tmp_path / "job").pid == sleeper.pid


def test_a_second_job_of_the_same_process_is_refused(tmp_path):
    with Job(tmp_path / "job", "count", {}), pytest.raises(FileError, match="is being worked on"):
        Job(tmp_path / "job", "count", {}).__enter__()
    with Job(tmp_path / "job", "count", {}):
        pass


def test_after_kill_9_the_job_goes_on_and_nothing_hidden_stays(tmp_path, sleeper):
    assert jobs.read(tmp_path / "job").condition == "running"
    sleeper.kill()
    sleeper.wait()
    state = jobs.read(tmp_path / "job")
    assert (state.condition, state.done) == ("killed", 1)
    for left in (".job.json.0123abcd.unfinished", "parts/.0.netkin.0123abcd.unfinished"):
        (tmp_path / "job" / left).write_bytes(b"half")
    parts, computed = squares(tmp_path / "job")
    assert computed == [1, 2]
    assert [part.values["square"] for part in parts] == [0, 1, 4]
    assert not list((tmp_path / "job").rglob(".*"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="without /proc a zombie cannot be told")
def test_a_killed_process_that_its_parent_has_not_collected_is_no_running_job(tmp_path, sleeper):
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now, and stays one
    assert jobs.read(tmp_path / "job").condition == "killed"
    sleeper.wait()


def test_a_path_that_names_no_file_is_refused():
    with pytest.raises(FileError, match="a result is saved in a file; got the path '.', which names none"):
        Job.beside("", "sweep", {})


def test_the_unfinished_writes_of_the_result_are_removed_and_no_others(tmp_path):
    mine, others = (
        tmp_path / ".ab.netkin.0123abcd.unfinished",
        [tmp_path / ".cd.netkin.0123abcd.unfinished", tmp_path / ".ab.netkin"],
    )
    for path in (mine, *others):
        path.write_bytes(b"half")
    with Job.beside(tmp_path / "ab.netkin", "sweep", {}):
        pass
    assert not mine.exists()
    assert all(path.exists() for path in others)
    assert jobs.read(tmp_path / "ab.netkin").folder == str(tmp_path / "ab.netkin.job")


def test_a_result_in_a_folder_that_does_not_exist_is_refused_before_the_work(tmp_path):
    with pytest.raises(FileError, match="cannot write '.*none/ab.netkin': there is no folder '.*none'"):
        Job.beside(tmp_path / "none" / "ab.netkin", "sweep", {}).__enter__()
    assert not list(tmp_path.iterdir())


def test_workers_of_a_killed_process_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "PATIENCE", 30.0)
    forked = "import os\n    if os.fork() == 0:\n        time.sleep(1)\n        os._exit(0)\n    time.sleep(600)"
    process = started(tmp_path / "job", forked)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert squares(tmp_path / "job")[1] == [1, 2]


def test_a_request_to_cancel_ends_the_work_at_the_next_part(tmp_path):
    def asked(number):
        if number == 1:
            assert jobs.cancel(tmp_path / "job").done == 1
        return {"square": number**2}

    def counted():
        with Job(tmp_path / "job", "count", {}) as job:
            job.expect("012")
            for number in range(3):
                job.part(str(number), lambda number=number: asked(number))

    with pytest.raises(Cancelled, match="cancelled: 2 of 3 parts are done"):
        counted()
    state = jobs.read(tmp_path / "job")
    assert (state.condition, state.done, state.total) == ("cancelled", 2, 3)
    with Job(tmp_path / "job", "count", {}) as job:
        job.expect("012")
        assert [job.part(str(number), lambda: {"square": -1}).values["square"] for number in range(3)] == [0, 1, -1]
    with pytest.raises(InvalidValue, match="is done, with 3 of 3 parts done; only a running job"):
        jobs.cancel(tmp_path / "job")


def test_progress_of_what_runs_is_heard_and_written_with_the_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "HEARTBEAT", 0.01)
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    with Job(tmp_path / "job", "count", {}) as job:
        first = job.state.started
        with progress.reporting(8, "comparing", "batches", False) as report:
            report.update(3)
            deadline = time.monotonic() + 30
            while jobs.read(tmp_path / "job").message != "comparing: 3 of 8 batches" and time.monotonic() < deadline:
                time.sleep(0.01)
        state = jobs.read(tmp_path / "job")
    assert state.message == "comparing: 3 of 8 batches"
    assert state.heartbeat > first
    assert str(state) == f"{tmp_path / 'job'}: count, running, 0 parts (comparing: 3 of 8 batches)"
    assert jobs.read(tmp_path / "job").message == ""


def test_ctrl_c_is_an_interruption_and_so_is_work_that_ends_early(tmp_path):
    with pytest.raises(KeyboardInterrupt), Job(tmp_path / "job", "count", {}):
        raise KeyboardInterrupt
    assert jobs.read(tmp_path / "job").condition == "interrupted"
    with Job(tmp_path / "job", "count", {}) as job:
        job.expect(["0", "1"])
        job.keep("0", {})
    assert jobs.read(tmp_path / "job").condition == "interrupted"


def test_without_a_folder_parts_stay_in_memory():
    with Job(None, "count", IDENTITY) as job:
        job.expect(["0"])
        assert job.find("0") is None
        job.part("0", lambda: {"square": 0})
        assert job.part("0", lambda: {"square": 1}).values == {"square": 0}
        assert (job.state.done, job.state.total) == (1, 1)
        job.drop("0")
        assert job.find("0") is None


def test_parts_may_have_any_name(tmp_path):
    names = ["a/b", "A/b", "../../up", "x" * 300, "x" * 301, "", " ", ".hidden", "é → ü", "con\x00trol"]
    with Job(tmp_path / "job", "count", {}) as job:
        for number, name in enumerate(names):
            job.keep(name, {"number": number})
    with Job(tmp_path / "job", "count", {}) as job:
        assert [job.find(name).values["number"] for name in names] == list(range(len(names)))
    assert len({path.name.lower() for path in (tmp_path / "job" / "parts").iterdir()}) == len(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job"]


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("hello")
    with pytest.raises(FileError, match=r"holds 'thesis.txt' and no job; give a new or an empty folder"):
        Job(tmp_path, "count", {}).__enter__()
    with pytest.raises(FileError, match="^cannot write '.*thesis.txt.job': Not a directory"):
        Job(tmp_path / "thesis.txt" / "job", "count", {}).__enter__()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "kind": "count", "done": "x"}'])
def test_a_damaged_state_is_refused(tmp_path, text):
    squares(tmp_path / "job")
    (tmp_path / "job" / "job.json").write_text(text)
    with pytest.raises(FileError, match="job.json' is damaged"):
        squares(tmp_path / "job")


def test_a_state_of_a_newer_netkin_is_refused(tmp_path):
    squares(tmp_path / "job")
    state = json.loads((tmp_path / "job" / "job.json").read_text())
    (tmp_path / "job" / "job.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(FileError, match="was written by a newer netkin; update with"):
        jobs.read(tmp_path / "job")


def test_all_jobs_below_a_folder_are_found_the_newest_first(tmp_path):
    for name in ("one", "deep/two"):
        squares(tmp_path / name)
    assert [Path(state.folder).name for state in jobs.list_jobs(tmp_path)] == ["two", "one"]
    assert jobs.list_jobs(tmp_path / "one" / "parts") == []


def test_a_process_on_another_machine_is_known_by_its_heartbeat(tmp_path):
    squares(tmp_path / "job")
    state = json.loads((tmp_path / "job" / "job.json").read_text())
    for age, condition in ((5, "running"), (600, "killed")):
        beat = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - age))
        changed = {"status": "running", "host": "elsewhere", "pid": 1, "heartbeat": beat}
        (tmp_path / "job" / "job.json").write_text(json.dumps(state | changed))
        assert jobs.read(tmp_path / "job").condition == condition


def test_a_job_is_watched_without_torch(tmp_path):
    squares(tmp_path / "job")
    program = f"import sys, netkin.jobs\nprint(netkin.jobs.read({str(tmp_path / 'job')!r}).done)\n"
    program += "assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
