import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save, save_file

from netkin import documents, files, jobs
from netkin.errors import FileError
from netkin.results import load

ARRAYS = {"x": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 4)), "whole": np.arange(3)}


def test_what_is_written_is_read(tmp_path):
    files.write(tmp_path / "f", "moments", {"layers": ["α", "β"], "n": np.int64(3)}, ARRAYS)
    header, arrays = files.read(tmp_path / "f", "moments")
    assert header == {"kind": "moments", "format": 2, "layers": ["α", "β"], "n": 3}
    assert arrays.keys() == ARRAYS.keys()
    assert all((arrays[name] == ARRAYS[name]).all() and arrays[name].dtype == ARRAYS[name].dtype for name in ARRAYS)


def test_what_lies_too_deep_is_refused(tmp_path):
    deep = []
    for _ in range(documents.DEEPEST):
        deep = [deep]
    files.write(tmp_path / "deep", "moments", {"deep": deep}, {})
    with pytest.raises(FileError, match="deep' is damaged: .*nested more than 100 levels deep"):
        files.read(tmp_path / "deep")
    files.write(tmp_path / "flat", "moments", {"deep": deep[0][0]}, {})
    assert files.read(tmp_path / "flat")[0]["deep"] == deep[0][0]


def test_transposed_and_sliced_arrays_are_written_as_they_look(tmp_path):
    views = {"turned": ARRAYS["x"].T, "reversed": ARRAYS["x"][::-1, ::2]}
    files.write(tmp_path / "f", "moments", {}, views)
    assert all((files.read(tmp_path / "f")[1][name] == views[name]).all() for name in views)


def test_any_safetensors_reader_can_open_it(tmp_path):
    files.write(tmp_path / "f", "moments", {}, ARRAYS)
    with safe_open(tmp_path / "f", framework="np") as file:
        assert json.loads(file.metadata()["netkin"])["kind"] == "moments"


def test_a_newer_format_is_refused(tmp_path):
    save_file(ARRAYS, tmp_path / "f", {"netkin": json.dumps({"kind": "moments", "format": 3})})
    with pytest.raises(
        FileError, match="f' has format 3 and this netkin reads up to format 2; update with `pip install -U"
    ):
        files.read(tmp_path / "f")


def test_a_safetensors_file_of_others_is_refused(tmp_path):
    for metadata in (None, {"format": "pt"}):
        save_file(ARRAYS, tmp_path / "f", metadata)
        with pytest.raises(FileError, match="f' is a safetensors file, but not one that netkin wrote"):
            files.read(tmp_path / "f")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "new"}', '{"format": null}'])
def test_an_unreadable_header_is_refused(tmp_path, text):
    save_file(ARRAYS, tmp_path / "f", {"netkin": text})
    with pytest.raises(FileError, match="f' is damaged: "):
        files.read(tmp_path / "f")


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_a_cut_off_file_is_refused(tmp_path, kept):
    files.write(tmp_path / "f", "moments", {}, ARRAYS)
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:kept])
    with pytest.raises(FileError, match="f' is no netkin file, or only a part of one"):
        files.read(tmp_path / "f")


def test_a_file_of_any_other_sort_is_refused(tmp_path):
    (tmp_path / "f").write_text("Dear diary,\n" * 100)
    with pytest.raises(FileError, match="f' is no netkin file"):
        files.read(tmp_path / "f")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(FileError, match=r"cannot read '.*gone': No such file"):
        files.read(tmp_path / "gone")
    with pytest.raises(FileError, match=r"cannot read '"):
        files.read(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"cannot write '.*gone.f': No such file or directory"):
        files.write(tmp_path / "gone" / "f", "moments", {}, ARRAYS)


def test_a_header_of_strange_things_is_refused(tmp_path):
    with pytest.raises(TypeError, match="a header holds text, numbers, lists and mappings; got object"):
        files.write(tmp_path / "f", "moments", {"thing": object()}, ARRAYS)


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, fault):
    def failing(*_):
        raise fault

    files.write(tmp_path / "f", "moments", {"n": 1}, ARRAYS)
    monkeypatch.setattr(os, step, failing)
    with pytest.raises((FileError, KeyboardInterrupt)):
        files.write(tmp_path / "f", "moments", {"n": 2}, ARRAYS)
    assert files.read(tmp_path / "f")[0]["n"] == 1
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.skipif(not files.LOCKS, reason="needs file locks")
def test_ctrl_c_as_soon_as_a_file_is_there_leaves_none(tmp_path, monkeypatch):
    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.fcntl, "flock", pressed)
    for work in (lambda: files.write_text(tmp_path / "a", "new"), lambda: files.refuse_output(tmp_path / "a", "page")):
        with pytest.raises(KeyboardInterrupt):
            work()
        assert not list(tmp_path.iterdir())


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    files.write(tmp_path / "link", "moments", {}, ARRAYS)
    assert (tmp_path / "link").is_symlink()
    assert files.read(tmp_path / "target", "moments")


def test_the_usual_permissions_apply(tmp_path):
    files.write(tmp_path / "f", "moments", {}, ARRAYS)
    (tmp_path / "plain").touch()
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_header_of_a_json_document_is_all_of_it_and_the_state_of_a_job_is_no_result(tmp_path):
    (tmp_path / "claim.json").write_text('{"kind": "claim", "format": 2, "verdict": "holds"}')
    assert files.read_header(tmp_path / "claim.json", "claim")["verdict"] == "holds"
    with pytest.raises(FileError, match="holds 'claim', not 'moments'"):
        files.read_header(tmp_path / "claim.json", "moments")
    (tmp_path / "job.json").write_text('{"kind": "sweep", "format": 1, "heartbeat": "2026-11-18T02:11:22+00:00"}')
    for read in (files.read_header, load):
        with pytest.raises(FileError, match="job.json' is the state of a job, not a result; `netkin jobs .*` shows it"):
            read(tmp_path / "job.json")


def test_a_name_with_a_null_character_is_refused(tmp_path):
    with pytest.raises(FileError, match="cannot write '.*a.x00b': embedded null"):
        files.write(f"{tmp_path}/a\0b", "moments", {}, {})


def test_a_refusal_of_a_file_is_no_damage(tmp_path):
    with pytest.raises(FileError, match="^not this one$"), files.damage_reported(tmp_path / "f"):
        raise FileError("not this one")
    with pytest.raises(FileError, match="f' is damaged: KeyError: 'step'"), files.damage_reported(tmp_path / "f"):
        raise KeyError("step")


def test_a_header_is_read_without_its_arrays(tmp_path):
    files.write(tmp_path / "f", "moments", {"n": 1}, ARRAYS)
    assert files.read_header(tmp_path / "f") == files.read(tmp_path / "f")[0]
    with pytest.raises(FileError, match="holds 'moments', not 'statistics'"):
        files.read_header(tmp_path / "f", "statistics")
    with pytest.raises(FileError, match="cannot read '.*g': No such file"):
        files.read_header(tmp_path / "g")
    whole = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(whole[:20])
    with pytest.raises(FileError, match="is no netkin file, or only a part of one"):
        files.read_header(tmp_path / "f")


@pytest.mark.parametrize(
    "text",
    ['{"kind": [], "format": 1}', '{"kind": "x", "format": 1e999}', '{"kind": "x", "format": NaN}', '{"format": 1}',
     "[" * 100_000, '{"kind": "x", "format": 1, "a": "\\ud800"}', '{"kind": "x", "format": 1, "a": Infinity}'],
)  # fmt: skip
def test_a_header_of_strange_values_is_refused(tmp_path, text):
    save_file(ARRAYS, tmp_path / "f", {"netkin": text})
    for read in (files.read, files.read_header):
        with pytest.raises(FileError, match="f' is damaged: "):
            read(tmp_path / "f")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (files.read, files.read_header, files.read_json):
        with pytest.raises(FileError, match="cannot read '.*pipe': it is no ordinary file"):
            read(tmp_path / "pipe")
    assert files.kind_of(tmp_path / "pipe") is None
    with pytest.raises(FileError, match="cannot write '.*pipe': it is no ordinary file"):
        files.write(tmp_path / "pipe", "moments", {}, ARRAYS, overwrite=True)


def test_the_permissions_of_a_file_stay(tmp_path):
    files.write(tmp_path / "f", "moments", {}, ARRAYS)
    os.chmod(tmp_path / "f", 0o600)
    files.write(tmp_path / "f", "moments", {"n": 2}, ARRAYS)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


KILLED = """
import os, signal, sys
from netkin import documents, files, jobs
os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "die" else (print(flush=True), input())
files.write_bytes(sys.argv[1], b"half")
"""


@pytest.mark.skipif(not files.LOCKS, reason="needs locks")
def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(files.__file__).parents[1])}
    start = [sys.executable, "-c", KILLED, str(tmp_path / "f[1]")]
    died = subprocess.run([*start, "die"], env=environment)
    assert died.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*start, "wait"], env=environment, text=True, **pipes) as live:
        live.stdout.readline()  # it has written its file, which still has its own name
        assert len(os.listdir(tmp_path)) == 1
        (tmp_path / left).touch()
        files.write_bytes(tmp_path / "f[1]", b"whole")
        assert len(os.listdir(tmp_path)) == 2
        assert left not in os.listdir(tmp_path)
        live.communicate("\n")
    assert os.listdir(tmp_path) == ["f[1]"]
    assert (tmp_path / "f[1]").read_bytes() == b"half"


@pytest.fixture
def precious(tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"precious")
    return tmp_path / "weights.pt"


def test_nothing_else_is_written_over(precious, tmp_path):
    with pytest.raises(
        FileError, match=r"this would write over '.*weights.pt', which holds no statistics; choose .* `ov"
    ):
        files.write(precious, "statistics", {}, ARRAYS)
    files.write(tmp_path / "other", "series", {}, ARRAYS)
    with pytest.raises(FileError, match="which holds a series and no comparison; choose another name"):
        files.write(tmp_path / "other", "comparison", {}, ARRAYS)
    files.write(tmp_path / "several", "comparisons", {}, ARRAYS)
    with pytest.raises(FileError, match="which holds a set of comparisons and no comparison; choose another name"):
        files.write(tmp_path / "several", "comparison", {}, ARRAYS)
    with pytest.raises(FileError, match="cannot write '.*': it is a folder"):
        files.write(tmp_path, "comparison", {}, ARRAYS, overwrite=True)
    assert precious.read_bytes() == b"precious"
    files.write(precious, "statistics", {}, ARRAYS, overwrite=True)
    assert files.kind_of(precious) == "statistics"
    (tmp_path / "empty").touch()
    files.write(tmp_path / "empty", "series", {}, ARRAYS)


FOREIGN = {
    "page.html": "<!DOCTYPE html>\n<html><head><title>netkin</title></head><body>netkin</body></html>",
    "quoting.html": '<!DOCTYPE html><html><head></head><pre><meta name="generator" content="netkin"></pre></html>',
    "other.html": '<!DOCTYPE html><html><head><meta name="generator" content="netkinetics"></head></html>',
    "drawing.svg": '<?xml version="1.0"?>\n<svg><title>netkin</title><text>netkin</text></svg>',
    "bare.svg": "<svg><text>netkin</text></svg>",
    "photo.png": "\x89PNG\r\n\x1a\n tEXtComment\0made with netkin",
    "paper.pdf": "%PDF-1.4\n(netkin) Tj\n<< /Creator (pdfTeX) /Title (netkin) /Producer (pdfTeX) >>\nendobj",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_page_or_picture_of_others_that_names_netkin_is_not_ours(tmp_path, name):
    (tmp_path / name).write_bytes(FOREIGN[name].encode("latin-1"))
    kind = "page" if name.endswith("html") else "figure"
    with pytest.raises(FileError, match=f"would write over '.*{name}', which holds no {kind} of netkin's"):
        files.write_text(tmp_path / name, "", kind)
    assert (tmp_path / name).read_bytes() == FOREIGN[name].encode("latin-1")


def test_weights_of_others_that_name_netkin_are_not_ours(tmp_path):
    for maker, kind in (("netkin", "weights"), ("a student of netkin", None)):
        (tmp_path / "weights").write_bytes(save(ARRAYS, {"made by": maker}))
        assert files.kind_of(tmp_path / "weights") == kind


@pytest.mark.parametrize("name", ["itself", "symbolic", "hard", "roundabout"])
def test_an_input_is_no_output_by_whatever_name(tmp_path, name):
    files.write(tmp_path / "part", "statistics", {}, ARRAYS)
    (tmp_path / "symbolic").symlink_to("part")
    os.link(tmp_path / "part", tmp_path / "hard")
    path = {"itself": tmp_path / "part", "roundabout": f"{tmp_path}/./../{tmp_path.name}/part"}.get(
        name, tmp_path / name
    )
    with pytest.raises(FileError, match=r"--out would write over '.*', which is read as '.*part'; .* or give --force"):
        files.refuse_output(path, "statistics", inputs=[tmp_path / "part"], option="--out")
    files.refuse_output(path, "statistics", inputs=[tmp_path / "part"], overwrite=True)
    files.refuse_output(tmp_path / "new", "statistics", inputs=[tmp_path / "part", tmp_path / "gone"])
    assert sorted(os.listdir(tmp_path)) == ["hard", "part", "symbolic"]


def test_a_place_that_cannot_be_written_is_found_before(tmp_path, monkeypatch):
    for path in (tmp_path / "gone" / "f", tmp_path / ("f" * 300)):
        with pytest.raises(FileError, match="cannot write '"):
            files.refuse_output(path, "series")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="cannot write '.*f': No space left on device"):
        files.refuse_output(tmp_path / "f", "series")
    monkeypatch.undo()
    files.write(tmp_path / "f", "series", {}, ARRAYS)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FileError, match="cannot write '.*f': the file is write-protected"):
        files.refuse_output(tmp_path / "f", "series")
    assert os.listdir(tmp_path) == ["f"]


def test_arrays_are_listed_without_being_read(tmp_path):
    files.write(tmp_path / "f", "moments", {}, ARRAYS)
    assert files.array_shapes(tmp_path / "f") == {
        "x": ("F64", (2, 3)),
        "empty": ("F64", (0, 4)),
        "whole": ("I64", (3,)),
    }


def test_contents_and_names_of_any_length_are_written(tmp_path):
    name = "n" * 250
    files.write_bytes(tmp_path / name, b"once")
    files.write_bytes(tmp_path / name, b"twice")
    assert (tmp_path / name).read_bytes() == b"twice"


def test_a_file_that_is_far_too_large_for_a_document_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("{")
    os.truncate(path, documents.LARGEST + 1)  # which takes no room on the disk
    for read in (files.read_json, files.read_list, files.read_header):
        with pytest.raises(FileError, match=r"a.json' holds 1,073,741,825 bytes; documents are read up to"):
            read(path)
    assert files.kind_of(path) is None
    (tmp_path / "job").mkdir()
    path.rename(tmp_path / "job" / "job.json")
    with pytest.raises(FileError, match=r"job.json' holds 1,073,741,825 bytes"):
        jobs.read(tmp_path / "job")


def test_texts_that_are_no_utf_8_are_refused(tmp_path):
    for write in (
        lambda path: files.write(path, "series", {"name": "\udcff"}, {}),
        lambda path: files.write_text(path, "a \udcff"),
    ):
        with pytest.raises(FileError, match=r"cannot write '.*f': '.*udcff.*' in it is not UTF-8; give other names"):
            write(tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_weights_in_a_folder_that_is_read_are_no_output(tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "step_1.safetensors"
    files.write(path, "compressed", {}, ARRAYS)
    files.write(tmp_path / "run" / "study.netkin", "series", {}, ARRAYS)
    with pytest.raises(FileError, match=r"--save would write over .*, which is in the folder '.*run', which is read"):
        files.refuse_output(path, "compressed", inputs=[tmp_path / "run"], option="--save")
    files.refuse_output(path, "compressed", inputs=[tmp_path / "run"], overwrite=True)
    # a result that lies beside the checkpoints is not read with them
    files.refuse_output(tmp_path / "run" / "study.netkin", "series", inputs=[tmp_path / "run"])
