import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from netkin import files
from netkin.errors import FileError

ARRAYS = {"x": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 4)), "whole": np.arange(3)}


def test_what_is_written_is_read(tmp_path):
    files.write(tmp_path / "f", "moments", {"layers": ["α", "β"], "n": np.int64(3)}, ARRAYS)
    header, arrays = files.read(tmp_path / "f", "moments")
    assert header == {"kind": "moments", "format": files.FORMAT, "layers": ["α", "β"], "n": 3}
    assert arrays.keys() == ARRAYS.keys()
    assert all((arrays[name] == ARRAYS[name]).all() and arrays[name].dtype == ARRAYS[name].dtype for name in ARRAYS)


def test_transposed_and_sliced_arrays_are_written_as_they_look(tmp_path):
    views = {"turned": ARRAYS["x"].T, "reversed": ARRAYS["x"][::-1, ::2]}
    files.write(tmp_path / "f", "moments", {}, views)
    assert all((files.read(tmp_path / "f")[1][name] == views[name]).all() for name in views)


def test_any_safetensors_reader_can_open_it(tmp_path):
    files.write(tmp_path / "f", "moments", {}, ARRAYS)
    with safe_open(tmp_path / "f", framework="np") as file:
        assert json.loads(file.metadata()["netkin"])["kind"] == "moments"


@pytest.mark.parametrize("version", [1, files.FORMAT - 1, files.FORMAT + 1, "new", None])
def test_another_version_of_the_format_is_refused(tmp_path, version):
    save_file(ARRAYS, tmp_path / "f", {"netkin": json.dumps({"kind": "moments", "format": version})})
    with pytest.raises(
        FileError, match=f"f' has format {version}, and this netkin reads format {files.FORMAT}; make it"
    ):
        files.read(tmp_path / "f")


def test_a_safetensors_file_of_others_is_refused(tmp_path):
    for metadata in (None, {"format": "pt"}):
        save_file(ARRAYS, tmp_path / "f", metadata)
        with pytest.raises(FileError, match="f' is a safetensors file, but not one that netkin wrote"):
            files.read(tmp_path / "f")


@pytest.mark.parametrize("text", ["{", "[]"])
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
        files.write(tmp_path / "f", "moments", {"n": 2}, ARRAYS, overwrite=True)
    assert files.read(tmp_path / "f")[0]["n"] == 1
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.skipif(not files.LOCKS, reason="needs file locks")
def test_ctrl_c_as_soon_as_a_file_is_there_leaves_none(tmp_path, monkeypatch):
    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.fcntl, "flock", pressed)
    for work in (lambda: files.write_text(tmp_path / "a", "new"), lambda: files.require_output(tmp_path / "a")):
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


def test_a_name_with_a_null_character_is_refused(tmp_path):
    with pytest.raises(FileError, match="cannot write '.*a.x00b': .*embedded null"):
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
    ['{"kind": "x", "format": 3}', '{"kind": "x", "format": 1e999}', '{"kind": "x", "format": NaN}', "[" * 100_000,
     '{"kind": "x", "format": 3, "a": "\\ud800"}', '{"kind": "x", "format": 3, "a": Infinity}'],
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
    with pytest.raises(FileError, match="cannot write '.*pipe': it is no ordinary file"):
        files.write(tmp_path / "pipe", "moments", {}, ARRAYS, overwrite=True)


def test_the_permissions_of_a_file_stay(tmp_path):
    files.write(tmp_path / "f", "moments", {}, ARRAYS)
    os.chmod(tmp_path / "f", 0o600)
    files.write(tmp_path / "f", "moments", {"n": 2}, ARRAYS, overwrite=True)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


KILLED = """
import os, signal, sys
from netkin import files
os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "die" else (print(flush=True), input())
files.write_bytes(sys.argv[1], b"half")
"""


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["itself", "symbolic", "hard", "roundabout"])
def test_an_input_is_no_output_by_whatever_name(tmp_path, name):
    files.write(tmp_path / "part", "statistics", {}, ARRAYS)
    (tmp_path / "symbolic").symlink_to("part")
    os.link(tmp_path / "part", tmp_path / "hard")
    names = {"itself": tmp_path / "part", "roundabout": f"{tmp_path}/./../{tmp_path.name}/part"}
    with pytest.raises(FileError, match="--out would write over '.*'; choose another name, or give --overwrite"):
        files.require_output(names.get(name, tmp_path / name), option="--out")
    assert sorted(os.listdir(tmp_path)) == ["hard", "part", "symbolic"]


@pytest.mark.parametrize("write", [files.write_bytes, files.write_text])
def test_nothing_else_is_written_over(tmp_path, write):
    contents = "new" if write is files.write_text else b"new"
    (tmp_path / "there").write_bytes(b"precious")
    with pytest.raises(FileError, match="this would write over '.*'; choose another name, or give `ov") as refusal:
        write(tmp_path / "there", contents)
    assert refusal.value.argument == "overwrite"
    files.require_output(tmp_path / "there", overwrite=True)
    with pytest.raises(FileError, match="cannot write '.*': it is a folder"):
        write(tmp_path, contents, overwrite=True)
    assert (tmp_path / "there").read_bytes() == b"precious"
    write(tmp_path / "there", contents, overwrite=True)
    (tmp_path / "empty").touch()  # which holds nothing
    for name in ("empty", "new"):
        files.require_output(tmp_path / name)
        write(tmp_path / name, contents)
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"new"}


def test_a_place_that_cannot_be_written_is_found_before(tmp_path, monkeypatch):
    for path in (tmp_path / "gone" / "f", tmp_path / ("f" * 300)):
        with pytest.raises(FileError, match="cannot write '"):
            files.require_output(path)

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="cannot write '.*f': No space left on device"):
        files.require_output(tmp_path / "f")
    monkeypatch.undo()
    files.write(tmp_path / "f", "series", {}, ARRAYS)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FileError, match="cannot write '.*f': the file is write-protected"):
        files.require_output(tmp_path / "f", overwrite=True)
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
    files.write_bytes(tmp_path / name, b"twice", overwrite=True)
    assert (tmp_path / name).read_bytes() == b"twice"


def test_a_document_that_is_far_too_large_is_not_parsed(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{")
    os.truncate(path, files.LARGEST + 1)
    with pytest.raises(FileError, match=r"a.json' holds 8,388,609 bytes; JSON is read up to 8,388,608"):
        files.read_json(path)


def test_texts_that_are_no_utf_8_are_refused(tmp_path):
    for write in (
        lambda path: files.write(path, "series", {"name": "\udcff"}, {}),
        lambda path: files.write_text(path, "a \udcff"),
    ):
        with pytest.raises(FileError, match=r"cannot write '.*f': .* can't encode character '.udcff'"):
            write(tmp_path / "f")
    assert not list(tmp_path.iterdir())
