"""Running commands as people do."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from netkin.cli import cli

OURS = Path(__file__).parents[2] / "reproductions"
LAB = """
import torch


class Lab:
    def __init__(self, scale, *, device=None, data=None, checkpoints=None, cache=None):
        self.scale, self.device, self.data = scale, torch.device(device or "cpu"), data

    def images(self):
        raise RuntimeError("no images here")

    text = images
"""
CLAIMS = """
from reproductions.claims import Finding, Measured, claim, verdict

facts = {"figure": "Fig. 1", "expected": {"size": 0.5}, "criterion": "holds if the size is below 0.6"}
facts["control"] = "copies of copies"
CONTROL = {"size": Measured(0.9, 0.01, 3)}


@claim("toys/halving", sentence="sizes halve", **facts)
def halving(lab):
    return Finding(verdict(0.5 < 0.6), {"size": Measured(0.5, 0.01, 3)}, CONTROL, f"data in {lab.data}", seeds=(0, 1))


@claim("toys/negative", sentence="sizes grow", scales=("cpu",), **facts)
def negative(lab):
    return Finding(verdict(False), {"size": Measured(0.5)}, CONTROL)


@claim("toys/crashing", sentence="sizes are images", scales=("gpu",), **facts)
def crashing(lab):
    return Finding(verdict(lab.images()), {})
"""


@pytest.fixture
def netkin(tmp_path, monkeypatch):
    """Run a command line in an empty folder; what comes back has `exit_code`, `stdout` and `stderr`."""
    monkeypatch.chdir(tmp_path)
    return lambda line: CliRunner().invoke(cli, shlex.split(line), prog_name="netkin")


@pytest.fixture
def checkout(netkin, tmp_path, monkeypatch):
    """A folder with our harness, one paper and a laboratory with nothing in it; modules as before afterwards."""
    place = tmp_path / "reproductions"
    (place / "toys").mkdir(parents=True)
    for name in ("__init__", "claims", "commit", "image_sets", "keeping", "running", "listing"):
        shutil.copy(OURS / f"{name}.py", place)
    (place / "laboratory.py").write_text(LAB)
    (place / "toys" / "__init__.py").write_text('"""Toy (2020), Toys."""')
    (place / "toys" / "sizes.py").write_text(CLAIMS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "reproductions"}
    for name in kept:
        del sys.modules[name]
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "reproductions"]:
        del sys.modules[name]
    sys.modules.update(kept)
