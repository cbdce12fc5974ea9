"""Folders to load from: small ones made here, and the real ones where this machine has them."""

import os
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cifar10_directory():
    """The folder that holds the real `cifar-10-batches-bin`."""
    return _found("NETKIN_DATA", "cifar-10-batches-bin/test_batch.bin")


@pytest.fixture(scope="session")
def real_data():
    """A function that gives the folder with the real data, if `file` lies in it."""
    return lambda file: _found("NETKIN_DATA", file)


@pytest.fixture(scope="session")
def checkpoints():
    """The folder that holds the real `tiny10_cifar10_seed*.pt`."""
    return _found("NETKIN_CHECKPOINTS", "tiny10_cifar10_seed0.pt")


def _found(variable, file):
    candidates = (
        [Path(os.environ[variable])] if os.environ.get(variable) else [ROOT / "data", ROOT / "data/checkpoints"]
    )
    for folder in candidates:
        if (folder / file).is_file():
            return folder
    return pytest.skip(f"no {file}: set {variable} to the folder that holds it, or put it into data/ of the repository")


@pytest.fixture
def fake_cifar10(tmp_path):
    """A folder with six test images and two in each of the five training files."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in ["test_batch"] + [f"data_batch_{number}" for number in range(1, 6)]:
        records = generator.integers(0, 256, (6 if name == "test_batch" else 2, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / f"{name}.bin")
    return tmp_path


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """A current directory in which `workshop.write(name, text)` makes modules that are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    return Workshop(tmp_path, monkeypatch)


class Hostile:
    """An object whose unpickling would create a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.fixture
def hostile(tmp_path):
    """An object whose unpickling would create the file `hostile.target`; afterwards it must not be there."""
    one = Hostile(tmp_path / "was here")
    yield one
    assert not one.target.exists()


class Workshop:
    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.monkeypatch = monkeypatch

    def write(self, name, text):
        self.monkeypatch.delitem(__import__("sys").modules, name, raising=False)
        (self.folder / f"{name}.py").write_text(text)
