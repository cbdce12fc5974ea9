"""`netkin doctor`; and `netkin reproduce` in a made-up checkout with our harness, another paper and laboratory."""

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
from netkin.results import Claim

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


def record(checkout, name):
    return Claim.load(checkout / "reproductions" / "results" / "toys" / name)


def test_a_paper_is_measured_recorded_and_told(netkin, checkout):
    (checkout / "here").mkdir()
    result = netkin("reproduce toys --data here")
    assert result.exit_code == 0, result.stderr
    halving, _, _, negative, criterion, measured_on = result.stdout.splitlines()
    assert halving == (
        "toys/halving, cpu scale, 0.0 s: holds. The paper says “sizes halve” (Fig. 1); here size is 0.500 ± 0.010 "
        "(n = 3), and in the control, copies of copies, 0.900 ± 0.010 (n = 3); so by its criterion the claim holds."
    )
    assert "does not hold" in negative  # and yet the exit code is 0
    assert criterion.startswith("  Criterion: ")
    assert measured_on.startswith("  Measured on 20")
    assert "[1 of 2] toys/halving: measuring at cpu scale on CPU" in result.stderr
    found = record(checkout, "halving.cpu.json")
    assert (found.verdict, found.note, found.provenance["paper"]) == ("holds", "data in here", "Toy (2020), Toys.")
    assert "recorded before" in netkin("reproduce toys/halving").stderr
    assert "measuring" in netkin("reproduce toys/halving --again").stderr


def test_it_works_from_any_folder_of_the_checkout(netkin, checkout, monkeypatch):
    (checkout / "docs" / "deep").mkdir(parents=True)
    monkeypatch.chdir(checkout / "docs" / "deep")
    assert netkin("reproduce toys/halving").exit_code == 0
    assert record(checkout, "halving.cpu.json")
    assert checking.checkout(Path.cwd()) == checkout


def test_a_crash_is_named_the_others_go_on_and_the_exit_code_is_1(netkin, checkout):
    result = netkin("reproduce toys --scale gpu --device cpu --page page.html")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "toys/crashing, failed: RuntimeError: no images here" in lines
    assert any("toys/halving, gpu scale, 0.0 s: holds." in line for line in lines)
    assert "sizes halve" in (checkout / "page.html").read_text()


def test_the_list_shows_verdicts_and_measures_nothing(netkin, checkout):
    assert "not yet" in netkin("reproduce --list").stdout
    netkin("reproduce toys/negative")
    lines = [" ".join(line.split()) for line in netkin("reproduce toys --list").stdout.splitlines()]
    assert lines[0] == "claim figure number the paper ours control scale verdict"
    assert "toys/negative Fig. 1 size 0.5 0.5 0.900 ± 0.010 (n = 3) cpu does not hold" in lines
    assert "toys/halving Fig. 1 size 0.5 gpu not yet" in lines
    assert netkin("reproduce").stdout == netkin("reproduce --list").stdout
    assert not (checkout / "reproductions" / "results" / "toys" / "halving.cpu.json").exists()
    listed = json.loads(netkin("reproduce toys/negative --list --json").stdout)
    assert [(one["id"], one["rows"][0]["verdict"]) for one in listed] == [("toys/negative", "does not hold")]


def test_results_as_json_and_elsewhere(netkin, checkout):
    result = netkin("reproduce toys/halving --json --out elsewhere")
    (found,) = json.loads(result.stdout)
    assert (found["id"], found["verdict"], found["measured"]["size"]["error"]) == ("toys/halving", "holds", 0.01)
    assert (checkout / "elsewhere" / "toys" / "halving.cpu.json").exists()


@pytest.mark.parametrize(
    "line, code, words",
    [
        (
            "reproduce toys/halfing",
            1,
            "netkin: no claim 'toys/halfing'; did you mean 'toys/halving'? `netkin reproduce",
        ),
        ("reproduce toy", 1, "netkin: no paper 'toy'; did you mean 'toys'? There are toys."),
        ("reproduce toys/negative --scale gpu", 1, "is measured at the scale 'cpu' only; got 'gpu'."),
        ("reproduce toys --device cuda:99", 1, "netkin: there is no device 'cuda:99' here; this machine has cpu"),
        ("reproduce toys --data gone", 2, "Directory 'gone' does not exist."),
        ("reproduce toys --scale tpu", 2, "Invalid value for '--scale'"),
        ("reproduce --page gone/page.html", 2, "the folder 'gone' does not exist."),
        ("reproduce --page page.pdf", 2, "a page's name ends in .html or .htm; got 'page.pdf'."),
        (
            "reproduce --page page.html",
            1,
            "netkin: a page of reproductions needs at least one recorded claim; got none.",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence(netkin, checkout, line, code, words):
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr


def test_outside_of_a_checkout_it_says_so_in_one_sentence(netkin):
    result = netkin("reproduce --list")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(
        "netkin: `netkin reproduce` needs the folder 'reproductions' of netkin's repository,"
    )
    assert result.stderr.endswith("clone the repository and run this command inside.\n")
