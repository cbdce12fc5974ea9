import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import netkin as package
from netkin.results import Series


@pytest.fixture
def saved(netkin):
    """A comparison saved as `ab.netkin` in the folder at hand."""
    assert netkin('compare netkin:digits --data digits:test --layers "relu*" --save ab.netkin').exit_code == 0


@pytest.mark.usefixtures("saved")
def test_the_page_lies_beside_the_file_unless_said_otherwise(netkin):
    assert netkin("report ab.netkin").stdout == "ab.html\n"
    assert netkin("report ab.netkin --out other.html").stdout == "other.html\n"
    assert json.loads(netkin("report ab.netkin --json").stdout) == {"report": "ab.html"}
    for page in ("ab.html", "other.html"):
        assert "relu4" in Path(page).read_text(encoding="utf-8")


@pytest.mark.usefixtures("saved")
def test_several_files_share_a_page(netkin):
    netkin("compare netkin:digits --data digits:test --layers fc --save c.netkin")
    assert netkin("report ab.netkin c.netkin --out both.html").exit_code == 0
    page = Path("both.html").read_text(encoding="utf-8")
    assert "relu4" in page
    assert "fc" in page


@pytest.mark.usefixtures("saved")
def test_a_page_is_made_without_torch():
    script = "import sys; from netkin.cli import cli; cli(['report', 'ab.netkin'], standalone_mode=False); {}"
    environment = os.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1])}
    command = [sys.executable, "-c", script.format("sys.exit('torch' in sys.modules)")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "ab.html\n"), result.stderr


def saved_series(path, steps=(0, 10)):
    rng = np.random.default_rng(0)
    layers = {"in": rng.normal(size=(40, 3)), "out": rng.normal(size=(40, 2))}
    comparisons = [package.compare(layers, layers) for _ in steps]
    Series(run="run", steps=steps, comparisons=comparisons, final_step=steps[-1]).save(path)


def test_a_saved_series_gets_its_page(netkin):
    saved_series("run.netkin")
    assert netkin("report run.netkin").stdout == "run.html\n"
    assert "2 layers at 2 steps" in Path("run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line, code, words",
    [
        ("report gone.netkin", 1, "cannot read 'gone.netkin'"),
        ("report broken.netkin", 1, "'broken.netkin' is no netkin file"),
        ("report", 2, "Missing argument"),
        ("report broken.netkin --out nowhere/x.html", 2, "there is no folder 'nowhere' to write into."),
    ],
)
def test_what_cannot_be_read_or_written_is_refused(netkin, line, code, words):
    Path("broken.netkin").write_bytes(b"\x09\0\0\0\0\0\0\0{")
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in " ".join(result.stderr.split())


def test_a_comparison_writes_its_page_and_its_figures_at_once(netkin):
    line = 'compare netkin:digits --data digits:test --layers "relu*" --report ab.html --figure ab.png --save ab.netkin'
    result = netkin(line)
    assert result.exit_code == 0
    assert "(rows)" in result.stdout
    assert [name in result.stderr for name in ("ab.html", "ab.png", "ab.netkin")] == [True] * 3
    assert "relu4" in Path("ab.html").read_text(encoding="utf-8")
    assert Path("ab.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_may_be_an_svg(netkin):
    netkin("compare netkin:digits --data digits:test --layers fc --figure ab.svg")
    assert "<svg" in Path("ab.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--report", "--figure"])
def test_a_missing_folder_is_found_before_the_work(netkin, option):
    result = netkin(f"compare netkin:digits --data digits:test {option} nowhere/x.svg")
    assert result.exit_code == 2
    assert "there is no folder 'nowhere' to write into." in " ".join(result.stderr.split())


def test_a_figure_of_an_unknown_kind_is_found_before_the_work(netkin):
    result = netkin("compare netkin:digits --data digits:test --figure ab.docx")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a figure's name ends in .png, .svg, .pdf; got 'ab.docx'." in " ".join(result.stderr.split())


@pytest.mark.parametrize("line", ["compare netkin:digits --data digits:test --report ab.pdf", "report no --out ab.pdf"])
def test_a_page_under_another_name_is_found_before_the_work(netkin, line):
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a page's name ends in .html or .htm; got 'ab.pdf'." in " ".join(result.stderr.split())
    assert not Path("ab.pdf").exists()


def test_a_missing_matplotlib_is_found_before_the_work(netkin, monkeypatch):
    monkeypatch.setattr(sys.modules["netkin.cli.outputs"], "find_spec", lambda name: None)
    result = netkin("compare netkin:digits --data digits:test --figure ab.png")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "install it with `pip install 'netkin[figures]'`." in result.stderr
