"""`netkin doctor`."""

import json
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from make_answers import answers as transcribed
from make_answers import layers as world
from netkin.measures import measures

checking = import_module("netkin.cli.checking")
ROOT = Path(__file__).parents[2]


def test_all_is_well_here(netkin):
    result = netkin("doctor")
    assert result.exit_code == 0, result.stdout
    assert "reference values of the measures are reproduced." in result.stdout
    for word in (
        "netkin",
        "python",
        "torch",
        "numpy",
        "extras",
        "devices",
        "threads",
        "free memory",
        "temporary files",
    ):
        assert word in result.stdout


def test_the_findings_are_there_for_programs_too(netkin):
    found = json.loads(netkin("doctor --json").stdout)
    assert found["healthy"] is True
    assert found["packages"]["torch"].startswith("2.")
    assert found["devices"][0] == "cpu"
    assert {row["measure"].partition("(")[0] for row in found["measures"]} == set(measures(matrices=True))
    assert all(row["right"] for row in found["measures"])


def test_the_stored_answers_are_those_of_the_transcriptions():
    stored = checking.stored_answers()
    X, Y = (np.array(stored[name]) for name in "XY")
    np.testing.assert_array_equal(X, world()[0])
    np.testing.assert_array_equal(Y, world()[1])
    assert stored["answers"] == pytest.approx(transcribed(X, Y), abs=1e-12)


def test_every_measure_has_an_answer():
    assert {name.partition("(")[0] for name in checking.stored_answers()["answers"]} == set(measures(matrices=True))


def test_a_wrong_number_is_named_with_exit_code_1(netkin, monkeypatch):
    stored = checking.stored_answers()
    stored["answers"]["nbs"] += 1e-6
    monkeypatch.setattr(checking, "stored_answers", lambda: stored)
    result = netkin("doctor")
    assert result.exit_code == 1
    assert f"1 of {len(stored['answers'])} reference values of the measures are not reproduced:" in result.stdout
    assert f"instead of {stored['answers']['nbs']!r}" in result.stdout
    assert json.loads(netkin("doctor --json").stdout)["healthy"] is False


def test_a_measure_that_fails_is_named_with_its_fault(netkin, monkeypatch):
    stored = checking.stored_answers()
    monkeypatch.setattr(checking, "stored_answers", lambda: stored | {"Y": stored["Y"][:-1]})
    result = netkin("doctor")
    assert result.exit_code == 1
    assert "cka gives `X` and `Y` must describe the same examples" in result.stdout


def test_nowhere_to_write_is_a_fault(netkin, monkeypatch):
    def refuse():
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checking.tempfile, "TemporaryFile", refuse)
    result = netkin("doctor")
    assert result.exit_code == 1
    assert "cannot be written; set TMPDIR to a folder that can" in result.stdout


def test_the_extras_are_those_of_the_package():
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    offered = set(re.findall(r"^(\w+) = ", section, flags=re.MULTILINE))
    assert set(checking.EXTRAS) == offered - {"test", "dev", "docs"}


def test_a_package_that_is_not_there_is_missing():
    assert checking.installed_version("no-such-package") == "missing"


@pytest.mark.parametrize(
    "line", ["doctor", "compare netkin:digits --data digits:test", "compare --plan netkin:digits --data digits:test"]
)
@pytest.mark.parametrize("device", ["cuda:99", "toaster"])
def test_a_device_that_is_not_here_is_refused_in_one_sentence(netkin, line, device):
    result = netkin(f"{line} --device {device}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"netkin: there is no device '{device}' here; this machine has cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_the_answers_hold_on_a_gpu(netkin):
    assert netkin("doctor --device cuda").exit_code == 0
