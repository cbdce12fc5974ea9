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
import torch

import netkin
import netkin as nk
from netkin import files, jobs, progress
from netkin.errors import FileError, InvalidValue
from netkin.jobs import Cancelled, Job

SOURCE = str(Path(netkin.__file__).parent.parent)
IDENTITY = {"data digest": "5c1e", "weights": {"a": "11", "b": "22"}}


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


def rewritten(folder, **changes):
    """Change the state of a job as another process would, or damage it."""
    path = folder / "job.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def sleeper(tmp_path):
    process = started(tmp_path / "job", "time.sleep(600)")
    yield process
    process.kill()
    process.wait()


# --- parts ------------------------------------------------------------------------------------------------------------


def test_parts_are_kept_at_once_and_computed_once(tmp_path):
    with pytest.raises(InvalidValue):
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

    for _ in range(2):
        with Job(tmp_path / "job", "count", {}) as job:
            assert job.part("slow", slow).seconds >= 0.02


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


def test_a_damaged_part_is_refused_with_the_file_to_delete(tmp_path):
    squares(tmp_path / "job", count=1)
    (part,) = (tmp_path / "job" / "parts").iterdir()
    for size in (3, 200):
        part.write_bytes(part.read_bytes()[:-size])
        with pytest.raises(
            FileError, match="0.netkin.*; delete this file and repeat the call, which computes the part"
        ):
            squares(tmp_path / "job", count=1)
    part.unlink()
    assert squares(tmp_path / "job", count=1)[1] == [0]


def test_a_part_that_can_not_be_unpacked_is_refused_but_not_where_memory_is_short(tmp_path):
    squares(tmp_path / "job")

    def short(part):
        raise MemoryError

    with Job(tmp_path / "job", "count", IDENTITY) as job:
        with pytest.raises(FileError, match="is damaged: KeyError: 'cube'; delete this file"):
            job.recall("0", lambda part: part.values["cube"])
        with pytest.raises(MemoryError):
            job.recall("0", short)


# --- identity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "identity, words",
    [
        (
            IDENTITY | {"data digest": "77ab"},
            r"data \('5c1e', not '77ab'\); a loader that shuffles or draws at random gives other data each "
            "time; ask for the same again, give another path or delete it",
        ),
        (IDENTITY | {"weights": {"a": "11", "b": "33"}}, r"weights of 'b' \('22', not '33'\)"),
        (IDENTITY | {"weights": {"a": "0a" * 12, "b": "22"}}, r"weights of 'a'; ask"),
        (IDENTITY | {"seed": 0}, r"seed \(None, not 0\)"),
        ({"weights": {"a": "11", "b": "22"}}, r"data \('5c1e', not None\); ask for"),
        (IDENTITY | {"test data": "9 examples"}, r"test data \(None, not '9 examples'\); ask for"),
    ],
)
def test_a_job_of_another_identity_is_refused_and_stays_as_it_was(tmp_path, identity, words):
    squares(tmp_path / "job")
    before = (tmp_path / "job" / "job.json").read_text()
    with pytest.raises(FileError, match=f"^'[^']*job' holds a count that differs in {words}"):
        squares(tmp_path / "job", identity=identity)
    assert (tmp_path / "job" / "job.json").read_text() == before


@pytest.mark.parametrize(
    "before, now, shown",
    [
        (f"50 examples, mark {'77ab' * 4}", f"9 examples, mark {'5c1e' * 4}", r" \('50 examples', not '9 examples'\);"),
        (f"cka; digest {'ab' * 12}", f"cka; digest {'cd' * 12}", ";"),
        ("0.1234567890123456", "0.6543210987654321", r" \('0.1234567890123456', not '0.6543210987654321'\);"),
        (1234567890123456, 6543210987654321, r" \(1234567890123456, not 6543210987654321\);"),
    ],
)
def test_a_refusal_shows_values_without_digests(tmp_path, before, now, shown):
    squares(tmp_path / "job", identity={"field": before})
    with pytest.raises(FileError, match=f"differs in field{shown}"):
        squares(tmp_path / "job", identity={"field": now})


def test_a_mapping_in_the_identity_may_gain_entries_and_remembers_them(tmp_path):
    squares(tmp_path / "job")
    squares(tmp_path / "job", identity={"data digest": "5c1e", "weights": {"b": "22", "c": "33"}})
    assert jobs.read(tmp_path / "job").identity["weights"] == {"a": "11", "b": "22", "c": "33"}
    with pytest.raises(FileError, match="differs in weights of 'c' "):
        squares(tmp_path / "job", identity={"data digest": "5c1e", "weights": {"c": "34"}})


def test_a_field_is_compared_by_a_function_without_the_attributes_that_are_state(tmp_path):
    def difference(before, now):
        before, now = before["model"], now["model"]
        state = before.get("state", ())
        return ", ".join(name for name in now if name not in state and before[name] != now[name])

    def opened(**attributes):
        identity = {"form": {"model": attributes}}
        return Job(tmp_path / "job", "count", identity, compare={"form": difference})

    with opened(calls=0, act="tanh") as job:
        job.part("0", lambda: {"square": 0})
        job.note_state("form", "model", ["calls"])
    for _ in range(2):  # what was noted is kept when the job continues
        with opened(calls=7, act="tanh") as job:
            assert job.find("0") is not None
    with pytest.raises(FileError, match=r"differs in form \(act\);"):
        opened(calls=7, act="relu").__enter__()


def test_a_job_that_finished_nothing_gives_way_to_another_of_its_kind(tmp_path):
    with pytest.raises(InvalidValue):
        squares(tmp_path / "job", fail_at=0)
    assert squares(tmp_path / "job", identity={"data digest": "77ab"})[1] == [0, 1, 2]
    assert jobs.read(tmp_path / "job").identity == {"data digest": "77ab"}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"transforms": torch.Tensor.cos}, "transform of 'a'.* and transform of 'b'"),
        ({"forward": torch.nn.Module.__call__}, "forward of 'a'.* and forward of 'b'"),
        ({"shape": {"0": "flatten"}}, "shape of (0|all)"),
    ],
)
def test_a_job_with_a_setting_and_one_without_it_differ(tmp_path, options, words):
    nets, x = {name: torch.nn.Sequential(torch.nn.Linear(3, 2)) for name in "ab"}, torch.randn(9, 3)
    for first, then in ((options, {}), ({}, options)):
        save = tmp_path / f"{len(first)}.netkin"
        nk.compare_many(nets, x, progress=False, save=save, **first)
        with pytest.raises(FileError, match=f"holds a comparison that differs in {words}"):
            nk.compare_many(nets, x, progress=False, save=save, **then)


def test_a_model_with_a_transform_of_its_own_joins_a_job(tmp_path):
    nets, x = {name: torch.nn.Sequential(torch.nn.Linear(3, 2)) for name in "abc"}, torch.randn(9, 3)
    two = {name: nets[name] for name in "ab"}
    nk.compare_many(two, x, progress=False, save=tmp_path / "many.netkin")
    grown = nk.compare_many(nets, x, transforms={"c": torch.cos}, progress=False, save=tmp_path / "many.netkin")
    alone = nk.compare_many(nets, x, transforms={"c": torch.cos}, progress=False)
    assert all(grown[pair]["cka"].values == alone[pair]["cka"].values for pair in alone)


# --- one process at a time --------------------------------------------------------------------------------------------


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


def test_workers_of_a_killed_process_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "PATIENCE", 30.0)
    forked = "import os\n    if os.fork() == 0:\n        time.sleep(1)\n        os._exit(0)\n    time.sleep(600)"
    process = started(tmp_path / "job", forked)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert squares(tmp_path / "job")[1] == [1, 2]


# --- state ------------------------------------------------------------------------------------------------------------


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


def test_a_request_to_cancel_ends_the_work_at_the_next_part(tmp_path):
    def square(number):
        if number == 1:
            assert jobs.cancel(tmp_path / "job").done == 1
        return {"square": number**2}

    def counted():
        with Job(tmp_path / "job", "count", {}) as job:
            job.expect("012")
            for number in range(3):
                job.part(str(number), lambda number=number: square(number))

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
    with Job(tmp_path / "job", "count", {}):
        first = jobs.read(tmp_path / "job").heartbeat
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


def test_an_error_that_can_not_be_encoded_is_told(tmp_path):
    with pytest.raises(ValueError, match="odd"), Job(tmp_path / "job", "count", {}):
        raise ValueError("odd \udcff")
    assert jobs.read(tmp_path / "job").error == r"ValueError: odd \udcff"


def test_a_process_on_another_machine_is_known_by_its_heartbeat(tmp_path):
    squares(tmp_path / "job")
    for age, condition in ((5, "running"), (600, "killed")):
        beat = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - age))
        rewritten(tmp_path / "job", status="running", host="elsewhere", pid=1, heartbeat=beat)
        assert jobs.read(tmp_path / "job").condition == condition


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"total": "x"}, "is damaged: ValueError"),
        ({"surprise": 1}, "is damaged: TypeError"),
        ({"status": "running", "heartbeat": "2026-11-18T02:11:22"}, "is damaged: TypeError"),
        ({"format": 99}, "has format 99, and this netkin reads format"),
        ({"format": 1}, "has format 1, and this netkin reads format"),
    ],
)
def test_a_state_that_can_not_be_read_is_refused_and_the_other_jobs_are_listed(tmp_path, changes, words):
    squares(tmp_path / "one"), squares(tmp_path / "two")
    rewritten(tmp_path / "two", **changes)
    with pytest.raises(FileError, match=f"job.json' {words}"):
        jobs.read(tmp_path / "two")
    whole, damaged = jobs.list_jobs(tmp_path)
    assert (whole.condition, damaged.condition) == ("done", "damaged")
    (tmp_path / "two" / "job.json").unlink()
    os.mkfifo(tmp_path / "two" / "job.json")
    with pytest.raises(FileError, match="it is no ordinary file"):  # and keeps no reader waiting
        jobs.read(tmp_path / "two")


def test_all_jobs_below_a_folder_are_found_the_newest_first(tmp_path):
    for name in ("one", "deep/two"):
        squares(tmp_path / name)
    assert [Path(state.folder).name for state in jobs.list_jobs(tmp_path)] == ["two", "one"]
    assert jobs.list_jobs(tmp_path / "one" / "parts") == []


@pytest.mark.slow
def test_a_job_is_watched_without_torch(tmp_path):
    squares(tmp_path / "job")
    program = f"import sys, netkin.jobs\nprint(netkin.jobs.read({str(tmp_path / 'job')!r}).done)\n"
    program += "assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


@pytest.mark.parametrize("failing", range(2, 7))
def test_a_state_that_could_not_be_written_once_does_not_end_finished_work_as_failed(tmp_path, monkeypatch, failing):
    writes, write = [], files.write_text

    def sometimes(path, *rest, **options):
        writes.append(path)
        if len(writes) == failing:
            raise FileError(f"cannot write {str(path)!r}: No space left on device.")
        write(path, *rest, **options)

    monkeypatch.setattr(files, "write_text", sometimes)
    with Job(tmp_path / "job", "count", {}) as job:
        for done in range(1, 7):
            job.advance(done, 6, "steps")
    assert len(writes) >= failing
    assert (jobs.read(tmp_path / "job").status, jobs.read(tmp_path / "job").progress) == ("done", "6 of 6 steps")
