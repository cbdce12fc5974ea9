"""Where a job lies: places that hold something else, results that are made again, and who may read it."""

import os

import pytest

from netkin import jobs
from netkin.errors import FileError
from netkin.jobs import Job


def test_places_that_hold_something_else_are_refused_before_the_work(tmp_path):
    for name in ("job", "lost"):
        with Job(tmp_path / name, "count", {}) as job:
            job.keep("0", {"square": 0})
    (tmp_path / "lost" / "job.json").unlink()
    (tmp_path / "thesis.txt").write_text("hello")
    (tmp_path / "folder.netkin").mkdir()
    refused = [
        (Job(tmp_path / "job", "sweep", {}), "holds a count, not a sweep; give another path or delete it"),
        (Job(tmp_path / "lost", "count", {}), "holds parts of a job without its job.json; delete it, or start"),
        (Job(tmp_path / "thesis.txt" / "job", "count", {}), "^cannot write '.*thesis.txt.job': Not a directory"),
        (Job.beside(tmp_path / "thesis.txt", "count", {}), "this would write over '.*thesis.txt'; choose another name"),
        (Job.beside(tmp_path / "folder.netkin", "count", {}, overwrite=True), "folder.netkin': it is a folder"),
        (Job.beside(tmp_path / "none" / "ab.netkin", "count", {}), "^cannot write '.*ab.netkin': No such file"),
    ]
    before = sorted(tmp_path.rglob("*"))
    for job, words in refused:
        with pytest.raises(FileError, match=words):
            job.__enter__()
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "lock") == [
        p for p in before if p.name != "lock"
    ]
    with pytest.raises(FileError, match="a result is saved in a file; got the path '.', which names none"):
        Job.beside("", "sweep", {})


def test_overwriting_begins_anew_and_the_old_result_stays_until_there_is_another(tmp_path):
    result = tmp_path / "ab.netkin"
    with Job.beside(result, "count", {"seed": 0}) as job:
        job.keep("0", {"square": 0})
    result.write_text("old")
    with pytest.raises(FileError, match="or start again with `overwrite=True`"):
        Job.beside(result, "count", {"seed": 1}).__enter__()
    with Job.beside(result, "count", {"seed": 1}, overwrite=True) as job:
        assert job.find("0") is None
    assert result.read_text() == "old"
    assert jobs.read(result).identity == {"seed": 1}


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


@pytest.mark.parametrize("mode, of_folder", [(0o600, 0o000), (0o640, 0o050)])
def test_a_job_is_no_more_readable_than_its_result(tmp_path, mode, of_folder):
    path, before = tmp_path / "r.netkin", os.umask(0o022)
    try:
        path.touch(mode)
        with Job.beside(path, "sums", {"n": 1}) as job:
            job.part("first", lambda: {"sum": 3})
    finally:
        os.umask(before)
    assert (tmp_path / "r.netkin.job").stat().st_mode & 0o077 == of_folder
