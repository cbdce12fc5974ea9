import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from netkin.errors import SourceError
from netkin.sources import load_data, load_model
from netkin.sources.names import content, require_file


@pytest.fixture
def forbidden(monkeypatch):
    """A function that makes a path one that the system does not let us open, also for a superuser."""

    def forbid(path):
        def refuse(self, *_, **__):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

        for name in ("open", "read_bytes"):
            monkeypatch.setattr(Path, name, refuse)
        return path

    return forbid


def test_a_file_that_may_not_be_read_is_refused(tmp_path, forbidden):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(SourceError, match=r"a.txt' cannot be read: permission denied\.$"):
        load_data(f"text:{forbidden(tmp_path / 'a.txt')}")


def test_weights_that_may_not_be_read_are_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    torch.save({}, tmp_path / "net.pt")
    save_file({"a": torch.ones(1)}, tmp_path / "net.safetensors")
    monkeypatch.setattr("netkin.sources.weights.vet_torch_file", refuse)
    monkeypatch.setattr("netkin.sources.weights.safetensors.torch.load_file", refuse)
    for name in ("net.pt", "net.safetensors"):
        with pytest.raises(SourceError, match="cannot be read: permission denied"):
            load_model(f"netkin:digits@{tmp_path / name}")


@pytest.mark.parametrize("spec", ["cifar10:{}", "svhn:{}", "mnist:{}", "images:{}"])
def test_a_folder_that_may_not_be_entered_is_refused(tmp_path, monkeypatch, spec):
    def refuse(self, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    for name in ("is_file", "is_dir"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(SourceError, match="cannot be read: permission denied"):
        load_data(spec.format(tmp_path))
    with pytest.raises(SourceError, match="cannot be read: permission denied"):
        load_model(f"hf:{tmp_path}")


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SourceError, match="found no file '.*loop'|cannot be read"):
        require_file(tmp_path / "loop")


def test_what_is_no_plain_file_is_refused_unopened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="found no file .*pipe"):
        content(tmp_path / "pipe")


@pytest.mark.parametrize("spec", ["npz:{}/a", "text:{}/a", "model netkin:digits@{}/a.pt", "model {}/a.pt2"])
def test_pipes_are_not_opened_by_any_reader(tmp_path, spec):
    for name in ("a", "a.pt", "a.pt2"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(SourceError, match="found no "):
        (load_model if spec.startswith("model ") else load_data)(spec.removeprefix("model ").format(tmp_path))
