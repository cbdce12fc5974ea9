"""What lies at the places of a job: damaged states and parts, pipes, readers, and results that are made again."""

import json
import os

import pytest
import torch

import netkin as nk
from netkin import files, jobs
from netkin.errors import FileError
from netkin.jobs import Job


def begun(folder):
    """Finish a job of one part in a folder."""
    with Job(folder, "count", {}) as job:
        job.part("0", lambda: {"square": 0})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"heartbeat": "2026-11-18T02:11:22"}, "`heartbeat` has no time zone"),
        ({"total": "x"}, "`total` is of type str"),
        ({"pid": 10**20}, "`pid` is the number of no process"),
        ({"message": 3}, "`message` is of type int"),
    ],
)
def test_a_damaged_state_is_refused_and_the_other_jobs_are_listed(tmp_path, changes, words):
    begun(tmp_path / "one"), begun(tmp_path / "two")
    state = json.loads((tmp_path / "two" / "job.json").read_text())
    (tmp_path / "two" / "job.json").write_text(json.dumps(state | changes))
    with pytest.raises(FileError, match=f"job.json' is damaged: .*{words}"):
        jobs.read(tmp_path / "two")
    whole, damaged = jobs.list_jobs(tmp_path)
    assert (whole.condition, damaged.condition) == ("done", "damaged")
    assert words in str(damaged)


def test_a_damaged_part_is_refused(tmp_path):
    begun(tmp_path / "job")
    part = tmp_path / "job" / "parts" / "0.netkin"
    part.write_bytes(part.read_bytes()[:-3])
    advice = "; delete this file and repeat the call, which computes the part again"
    with pytest.raises(FileError, match=f"0.netkin' is no netkin file, or only a part of one.*{advice}"):
        begun(tmp_path / "job")
    part.unlink()
    files.write(part, "part", {"name": "2", "values": {}, "seconds": 0, "created": ""}, {})
    with pytest.raises(FileError, match=f"is damaged: ValueError: it holds the part '2'{advice}"):
        begun(tmp_path / "job")
    part.unlink()
    part.mkdir()
    with pytest.raises(FileError, match="cannot read '.*0.netkin': it is a folder.$"):  # no damage of ours
        begun(tmp_path / "job")
    part.rmdir()
    begun(tmp_path / "job")
    assert part.is_file()


def test_a_part_that_memory_is_too_small_for_is_not_to_be_deleted(tmp_path):
    def too_large(part):
        raise MemoryError("too large")

    begun(tmp_path / "job")
    with Job(tmp_path / "job", "count", {}) as job, pytest.raises(FileError) as refused:
        job.recall("0", too_large)
    assert "too large" in str(refused.value)
    assert "delete" not in str(refused.value)


def test_a_pipe_in_place_of_a_state_keeps_no_reader_waiting(tmp_path):
    begun(tmp_path / "job")
    (tmp_path / "job" / "job.json").unlink()
    os.mkfifo(tmp_path / "job" / "job.json")
    with pytest.raises(FileError, match="it is no ordinary file"):
        jobs.read(tmp_path / "job")


def readers(path):
    """Return the permissions of all but the owner for a file or a folder, and for all in it."""
    return {one.name: one.stat().st_mode & 0o077 for one in (path, *path.rglob("*"))}


@pytest.fixture
def usual_mask():
    """Files that all may read, whatever the user's own mask is."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_mask")
@pytest.mark.parametrize("mode, of_files, of_folders", [(0o600, 0o000, 0o000), (0o640, 0o040, 0o050)])
def test_a_job_is_no_more_readable_than_its_result(tmp_path, mode, of_files, of_folders):
    path = tmp_path / "r.netkin"
    for name in ("first", "second"):  # which finds a result
        with Job.beside(path, "sums", {"n": 1}) as job:
            job.part(name, lambda: {"sum": 3})
        path.touch()
        path.chmod(mode)
    found = readers(tmp_path / "r.netkin.job")
    assert {"r.netkin.job", "parts", "job.json", "first.netkin", "second.netkin"} <= found.keys()
    assert {found[name] for name in ("job.json", "first.netkin", "second.netkin")} == {of_files}
    assert {found[name] for name in ("r.netkin.job", "parts")} == {of_folders}


@pytest.mark.usefixtures("usual_mask")
def test_a_file_elsewhere_to_which_a_link_in_a_job_leads_stays_as_it_is(tmp_path):
    (tmp_path / "elsewhere").touch()
    for _ in range(2):
        with Job.beside(tmp_path / "r.netkin", "sums", {"n": 1}) as job:
            job.part("first", lambda: {"sum": 3})
        (tmp_path / "r.netkin").touch(0o600)
        (tmp_path / "r.netkin.job" / "link").unlink(missing_ok=True)
        (tmp_path / "r.netkin.job" / "link").symlink_to(tmp_path / "elsewhere")
    with Job.beside(tmp_path / "r.netkin", "sums", {"n": 1}):
        assert (tmp_path / "elsewhere").stat().st_mode & 0o077 == 0o044


def test_a_job_beside_no_result_has_the_usual_permissions(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    usual = readers(tmp_path / "plain")
    with Job(tmp_path / "work", "sums", {"n": 1}) as job:
        job.part("first", lambda: {"sum": 3})
    found = readers(tmp_path / "work")
    assert (found["work"], found["parts"]) == (usual["plain"], usual["plain"])
    assert (found["job.json"], found["first.netkin"]) == (usual["file"], usual["file"])


def test_a_result_that_is_made_again_keeps_its_permissions(tmp_path):
    path = tmp_path / "ab.netkin"
    for text in ("first", "second"):
        with Job.beside(path, "sweep", {"text": text}, overwrite=True):
            assert not files.is_filled(path)
            files.write_text(path, text)
        assert path.read_text() == text
        if text == "first":
            path.chmod(0o600)
            (tmp_path / "backup").hardlink_to(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "backup").read_text() == "first"


def test_a_folder_in_place_of_a_result_is_refused_before_the_work(tmp_path):
    (tmp_path / "ab.netkin").mkdir()
    with pytest.raises(FileError, match="ab.netkin': it is no ordinary file"):
        Job.beside(tmp_path / "ab.netkin", "sweep", {}, overwrite=True).__enter__()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"transforms": torch.Tensor.cos}, "transform of a and transform of b;"),
        ({"forward": torch.nn.Module.__call__}, "forward of a and forward of b;"),
        (
            {"shape": {"0": "flatten"}},
            r"shape of (0 \('flatten', not None\) and shape of all|all and shape of 0 \(None, n)",
        ),
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


def test_a_model_whose_name_reads_like_a_setting_joins_a_job(tmp_path):
    with Job(tmp_path / "job", "count", {"models": {"a": "1"}, "architectures": {"a": "x"}}) as job:
        job.part("0", lambda: {})
    joined = {"models": {"a": "1", "best of three": "2"}, "architectures": {"a": "x", "best of three": "x"}}
    with Job(tmp_path / "job", "count", joined) as job:
        assert job.state.identity == joined


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
