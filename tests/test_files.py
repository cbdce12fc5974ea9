import json
import os

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from netkin import files
from netkin.errors import FileFault

ARRAYS = {"x": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 4)), "whole": np.arange(3)}


def test_what_is_written_is_read(tmp_path):
    files.write(tmp_path / "f", "moments", {"layers": ["α", "β"], "n": np.int64(3)}, ARRAYS)
    header, arrays = files.read(tmp_path / "f", "moments")
    assert header == {"kind": "moments", "format": 1, "layers": ["α", "β"], "n": 3}
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


def test_a_newer_format_is_refused(tmp_path):
    save_file(ARRAYS, tmp_path / "f", {"netkin": json.dumps({"kind": "moments", "format": 2})})
    with pytest.raises(
        FileFault, match="f' has format 2 and this netkin reads up to format 1; update with `pip install -U"
    ):
        files.read(tmp_path / "f")


def test_a_safetensors_file_of_others_is_refused(tmp_path):
    for metadata in (None, {"format": "pt"}):
        save_file(ARRAYS, tmp_path / "f", metadata)
        with pytest.raises(FileFault, match="f' is a safetensors file, but not one that netkin wrote"):
            files.read(tmp_path / "f")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "new"}', '{"format": null}'])
def test_an_unreadable_header_is_refused(tmp_path, text):
    save_file(ARRAYS, tmp_path / "f", {"netkin": text})
    with pytest.raises(FileFault, match="f' is damaged: "):
        files.read(tmp_path / "f")


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_a_cut_off_file_is_refused(tmp_path, kept):
    files.write(tmp_path / "f", "moments", {}, ARRAYS)
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:kept])
    with pytest.raises(FileFault, match="f' is no netkin file, or only a part of one"):
        files.read(tmp_path / "f")


def test_a_file_of_any_other_sort_is_refused(tmp_path):
    (tmp_path / "f").write_text("Dear diary,\n" * 100)
    with pytest.raises(FileFault, match="f' is no netkin file"):
        files.read(tmp_path / "f")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(FileFault, match=r"cannot read '.*gone': No such file"):
        files.read(tmp_path / "gone")
    with pytest.raises(FileFault, match=r"cannot read '"):
        files.read(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileFault, match=r"cannot write '.*gone.f': No such file or directory"):
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
    with pytest.raises((FileFault, KeyboardInterrupt)):
        files.write(tmp_path / "f", "moments", {"n": 2}, ARRAYS)
    assert files.read(tmp_path / "f")[0]["n"] == 1
    assert os.listdir(tmp_path) == ["f"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    files.write(tmp_path / "link", "moments", {}, ARRAYS)
    assert (tmp_path / "link").is_symlink()
    assert files.read(tmp_path / "target", "moments")


def test_the_usual_permissions_apply(tmp_path):
    files.write(tmp_path / "f", "moments", {}, ARRAYS)
    (tmp_path / "plain").touch()
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_refusal_of_a_file_is_no_damage(tmp_path):
    with pytest.raises(FileFault, match="^not this one$"), files.damage_reported(tmp_path / "f"):
        raise FileFault("not this one")
    with pytest.raises(FileFault, match="f' is damaged: KeyError: 'step'"), files.damage_reported(tmp_path / "f"):
        raise KeyError("step")


def test_a_header_is_read_without_its_arrays(tmp_path):
    files.write(tmp_path / "f", "moments", {"n": 1}, ARRAYS)
    assert files.read_header(tmp_path / "f") == files.read(tmp_path / "f")[0]
    with pytest.raises(FileFault, match="holds 'moments', not 'statistics'"):
        files.read_header(tmp_path / "f", "statistics")
    with pytest.raises(FileFault, match="cannot read '.*g': No such file"):
        files.read_header(tmp_path / "g")
    whole = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(whole[:20])
    with pytest.raises(FileFault, match="is no netkin file, or only a part of one"):
        files.read_header(tmp_path / "f")
