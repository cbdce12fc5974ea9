"""`python -m reproductions`."""

import subprocess
import sys
from pathlib import Path

import pytest

from reproductions.__main__ import main
from reproductions.claims import Finding
from reproductions.record import Claim, Measured

ROOT = Path(__file__).parents[2]


def raising(fault):
    def measure(lab):
        raise fault

    return measure


@pytest.fixture
def command(made, tmp_path, monkeypatch, capsys):
    """Run a command line about three claims in an empty folder; returns its exit code and what it wrote."""
    monkeypatch.chdir(tmp_path)
    made("toys/halving")
    number = {"size": Measured(0.5)}
    made("toys/negative", sentence="sizes grow", scales=("cpu",), measure=lambda lab: Finding(
        "does not hold", number, {"size": Measured(0.9, 0.01, 3)}))  # fmt: skip
    made("toys/crashing", scales=("gpu",), measure=raising(RuntimeError("no images here")))

    def run(line):
        try:
            code = main([*line.split(), "--out", "records"])
        except SystemExit as misuse:
            code = misuse.code
        written = capsys.readouterr()
        return code, written.out, written.err

    return run


def record(name):
    return Claim.load(Path("records/toys") / name)


def test_a_paper_is_measured_recorded_and_told(command):
    code, said, progress = command("toys")
    assert code == 0, progress
    halving, _, _, negative, criterion, measured_on = said.splitlines()
    assert halving.startswith("toys/halving, cpu scale, 0.0 s: holds. The paper says “sizes halve” (Fig. 1); here size")
    assert "does not hold" in negative  # and yet the exit code is 0
    assert criterion.startswith("  Criterion: ")
    assert measured_on.startswith("  Measured on 20")
    assert "[1 of 2] toys/halving: measuring at cpu scale on CPU" in progress
    found = record("halving.cpu.json")
    assert (found.verdict, found.provenance["paper"]) == ("holds", "Toy (2020), Toys.")
    assert "recorded before" in command("toys/halving")[2]
    assert "measuring" in command("toys/halving --again")[2]


@pytest.mark.slow
def test_a_crash_is_named_the_others_go_on_and_the_exit_code_is_1(command):
    code, said, _ = command("toys --scale gpu --device cpu --page page.html")
    assert code == 1
    assert "toys/crashing, failed: RuntimeError: no images here" in said.splitlines()
    assert "toys/halving, gpu scale, 0.0 s: holds." in said
    assert "sizes halve" in Path("page.html").read_text()


def test_the_list_shows_verdicts_and_measures_nothing(command):
    assert "not yet" in command("--list")[1]
    command("toys/negative")
    lines = [" ".join(line.split()) for line in command("toys --list")[1].splitlines()]
    assert lines[0] == "claim figure number the paper ours control scale verdict"
    assert "toys/negative Fig. 1 size 0.5 0.5 0.900 ± 0.010 (n = 3) cpu does not hold" in lines
    assert "toys/halving Fig. 1 size 0.5 gpu not yet" in lines
    assert command("")[1] == command("--list")[1]
    assert not Path("records/toys/halving.cpu.json").exists()


@pytest.mark.parametrize(
    "line, code, words",
    [
        ("toys/halfing", 1, "netkin: no claim 'toys/halfing'; did you mean 'toys/halving'? `python -m reproductions"),
        ("toy", 1, "netkin: no paper 'toy'; did you mean 'toys'? There are toys."),
        ("toys/negative --scale gpu", 1, "is measured at the scale 'cpu' only; got 'gpu'."),
        ("toys --device cuda:99", 1, "netkin: there is no device 'cuda:99' here."),
        ("toys --data gone", 2, "there is no folder 'gone'"),
        ("toys --scale tpu", 2, "argument --scale: invalid choice: 'tpu'"),
        ("--page gone/page.html", 1, "cannot write 'gone/page.html'"),
        ("--page page.html", 1, "netkin: a page of reproductions needs at least one recorded claim; got none."),
    ],
)
def test_what_cannot_be_done_is_one_sentence(command, line, code, words):
    found, said, fault = command(line)
    assert (found, said) == (code, "")
    assert words in fault


def test_a_page_is_written_over_only_where_that_is_asked_for(command):
    command("toys/negative --page page.html")
    assert command("--page page.html")[0] == 1
    assert command("--page page.html --overwrite")[0] == 0


def test_an_interruption_is_told(command, made):
    made("toys/endless", measure=raising(KeyboardInterrupt()))
    code, _, told = command("toys/endless")
    assert code == 130
    assert "netkin: interrupted; run the same command again to resume." in told


@pytest.mark.slow
def test_it_runs_without_the_packages_of_the_command_line():
    program = "import runpy, sys; sys.modules['click'] = sys.modules['matplotlib'] = None; "
    program += "sys.argv[:] = ['reproductions', '--list', 'sparsity']; runpy.run_module('reproductions', run_name="
    program += "'__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sparsity/tokens" in done.stdout
