"""The README's examples run as printed."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from netkin.cli import cli

README = Path(__file__).parents[1] / "README.md"
NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.AdaptiveAvgPool2d(1))
"""


def examples(language):
    text = README.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_readme_has_an_example_of_eight_lines():
    assert len(examples("python")) == 1
    assert len([line for line in examples("python")[0].splitlines() if line.strip()]) <= 8


@pytest.mark.slow
@pytest.mark.usefixtures("shared_nets")
def test_the_example_runs_and_shows_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(examples("python")[0], str(README), "exec"), {"__name__": "__main__"})
    assert "(rows)" in capsys.readouterr().out
    assert Path("ab.html").exists()


@pytest.fixture
def own_things(tmp_path, monkeypatch):
    """What the README takes for granted: a network, two checkpoints of it, and photos of various sizes."""
    images = pytest.importorskip("PIL.Image", reason="needs netkin[images]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mynets", None)  # so that what is imported here is forgotten afterwards
    del sys.modules["mynets"]
    Path("mynets.py").write_text(NET)
    names = {}
    exec(NET, names)
    for name in ("first", "second"):
        torch.save(names["net"]().state_dict(), f"{name}.pt")
    Path("photos").mkdir()
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, size=(70 + number, 90, 3), dtype=np.uint8)
        images.fromarray(pixels).save(f"photos/{number}.jpg")


@pytest.mark.usefixtures("own_things")
def test_own_checkpoints_are_compared_on_own_images_as_the_readme_says():
    lines = [line for line in examples("bash")[0].splitlines() if line.startswith("netkin ")]
    assert [line.split()[1] for line in lines] == ["compare", "compare"]
    assert ["--plan" in line for line in lines] == [True, False]
    for line in lines:
        result = CliRunner().invoke(cli, shlex.split(line)[1:], prog_name="netkin")
        assert result.exit_code == 0, result.stderr
    assert "<html" in Path("ab.html").read_text(encoding="utf-8")
