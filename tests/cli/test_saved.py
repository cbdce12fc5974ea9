"""`netkin report`, `netkin show` and `netkin jobs`: what earlier commands left."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
import netkin as package
from netkin import files
from netkin.errors import FileError
from netkin.jobs import Cancelled, Job
from netkin.results import Series
from quickly import slow_but


@pytest.fixture
def saved(netkin):
    """A comparison saved as `ab.netkin` in the folder at hand."""
    assert netkin('compare netkin:digits --data digits:test --layers "relu*" --out ab.netkin').exit_code == 0


@pytest.mark.usefixtures("saved")
def test_the_page_lies_beside_the_file_unless_said_otherwise(netkin):
    assert netkin("report ab.netkin").stdout == "ab.html\n"
    assert netkin("report ab.netkin --out other.html").stdout == "other.html\n"
    assert "give --overwrite" in netkin("report ab.netkin").stderr
    assert json.loads(netkin("report ab.netkin --json --overwrite").stdout) == {"report": "ab.html"}
    for page in ("ab.html", "other.html"):
        assert "relu4" in Path(page).read_text(encoding="utf-8")


@pytest.mark.usefixtures("saved")
def test_several_files_share_a_page(netkin):
    netkin("compare netkin:digits --data digits:test --layers fc --out c.netkin")
    assert netkin("report ab.netkin c.netkin --out both.html").exit_code == 0
    page = Path("both.html").read_text(encoding="utf-8")
    assert "relu4" in page
    assert "fc" in page


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
        ("report broken.netkin --out nowhere/x.html", 2, "the folder 'nowhere' does not exist."),
    ],
)
def test_what_cannot_be_read_or_written_is_refused(netkin, line, code, words):
    Path("broken.netkin").write_bytes(b"\x09\0\0\0\0\0\0\0{")
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in " ".join(result.stderr.split())


def test_a_comparison_writes_its_page_and_its_figures_at_once(netkin):
    line = 'compare netkin:digits --data digits:test --layers "relu*" --report ab.html --figure ab.png --out ab.netkin'
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
    assert "the folder 'nowhere' does not exist." in " ".join(result.stderr.split())


def test_a_figure_of_an_unknown_kind_is_found_before_the_work(netkin):
    result = netkin("compare netkin:digits --data digits:test --figure ab.docx")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a figure's name ends in .png or .svg or .pdf; got 'ab.docx'." in " ".join(result.stderr.split())


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


PASS = "netkin:digits --data digits:test --examples 40 --layers relu1 --layers relu2 --quiet"


def test_a_comparison_is_described(netkin):
    assert netkin(f"compare {PASS} --measure cka --measure angular_cka --out ab.netkin").exit_code == 0
    lines = netkin("show ab.netkin").stdout.splitlines()
    told = {line[2:].split("  ")[0]: line.strip().split("  ")[-1].strip() for line in lines[1:]}
    assert lines[0] == "ab.netkin: comparison"
    assert told["tables"] == "cka, angular_cka"
    assert (told["layers a"], told["examples"]) == ("relu1, relu2", "40")
    assert (told["shapes a"], told["widths a"]) == ("relu1 pool, relu2 pool", "relu1 16, relu2 32")
    assert told["call"] == f"netkin compare {PASS} --measure cka --measure angular_cka --out ab.netkin"
    assert told["arrays"] == "2 of 8 numbers, 64 bytes"
    found = json.loads(netkin("show ab.netkin --json").stdout)
    assert found.pop("arrays") == {
        name: {"dtype": "F64", "shape": [2, 2]} for name in ("tables/cka/values", "tables/angular_cka/values")
    }
    assert found == nk.read_header("ab.netkin") == files.read_header("ab.netkin")


def test_several_comparisons_are_named_with_what_they_were_made_of(netkin):
    tasks = "seen=netkin:digits,digits:train fresh=netkin:digits,digits:test"
    line = f"tasks {tasks} --examples 40 --layers relu1 --measure sketched_cka(buckets=8) --seeds 2 --quiet"
    assert netkin(f"{line} --out t.netkin").exit_code == 0
    lines = [" ".join(line.split()) for line in netkin("show t.netkin").stdout.splitlines()]
    assert lines[:2] == ["t.netkin: comparisons", "comparisons seen and seen, seen and fresh, fresh and fresh"]
    assert lines[2] == "tables sketched_cka(buckets=8, kernel=psi, seeds=2)"
    assert lines[3].startswith("data digits:train, a sample of 40 of 1,437")


def test_a_header_of_any_shape_is_described(netkin):
    odd = {"comparisons": [3, {"a": "a", "b": "b", "tables": [[], "cka"]}]}
    files.write("odd.netkin", "series", odd, {})
    shown = netkin("show odd.netkin")
    assert shown.exit_code == 0
    assert "a and b" in shown.stdout


def test_statistics_are_described(netkin):
    assert netkin(f"collect {PASS} --out part.stats").exit_code == 0
    assert netkin("show part.stats").stdout.startswith("part.stats: statistics\n")


def test_a_training_says_how_far_it_is_and_what_it_belongs_to(netkin):
    inputs = torch.linspace(-1, 1, 64)[:, None]
    options = {"epochs": 2, "batch": 32, "loss": torch.nn.functional.mse_loss, "save": "t.netkin", "progress": False}
    nk.train(torch.nn.Linear(1, 1), (inputs, inputs), seed=3, **options)
    lines = [" ".join(line.split()) for line in netkin("jobs show t.netkin").stdout.splitlines()]
    assert lines[0] == "t.netkin.job: training, done, 4 of 4 steps"
    assert "seed 3" in lines
    assert any(line.startswith("recipe epochs=2, batch=32") for line in lines)
    with pytest.raises(FileError, match=r"'t.netkin' is no netkin file"):  # it holds the trained weights
        nk.load("t.netkin")


def test_what_is_no_file_of_ours_is_refused(netkin):
    Path("diary").write_text("Dear diary,")
    for name, words in (("diary", "is no netkin file"), ("gone", "cannot read 'gone': No such file")):
        result = netkin(f"show {name}")
        assert (result.exit_code, result.stdout) == (1, "")
        assert words in result.stderr


@pytest.mark.parametrize(
    "line", slow_but(["report ab.netkin --out ab.html", "show ab.netkin"], "report ab.netkin --out ab.html")
)
def test_torch_is_not_needed(netkin, line):
    assert netkin(f"compare {PASS} --out ab.netkin").exit_code == 0
    program = (
        "import sys; sys.modules['torch'] = None\nfrom netkin.cli import cli\n"
        f"cli({line.split()!r}, prog_name='netkin', standalone_mode=False)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(files.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "ab." in done.stdout


def test_arrays_are_not_read(netkin, monkeypatch):
    assert netkin(f"compare {PASS} --out ab.netkin").exit_code == 0
    contents = bytearray(Path("ab.netkin").read_bytes())
    contents[-1] ^= 1
    Path("ab.netkin").write_bytes(contents)
    assert netkin("show ab.netkin").exit_code == 0
    result = netkin("report ab.netkin")
    assert result.exit_code == 1
    assert (
        "'ab.netkin' is damaged: ValueError: its arrays are not those that were written; take another copy"
        in result.stderr
    )


@pytest.fixture
def done(tmp_path):
    with Job.beside(tmp_path / "ab.netkin", "sweep", {"seed": 0}, call="stitch_all()") as job:
        job.expect(["x"])
        job.keep("x", {})
    return tmp_path


def test_jobs_are_listed_with_their_progress(netkin, done):
    found = netkin(f"jobs list {done}")
    assert found.output == f"{done / 'ab.netkin.job'}: sweep, done, 1 of 1 part\n"


def test_a_result_stands_for_the_job_beside_it(netkin, done):
    (done / "ab.netkin").touch()
    (done / "alone.netkin").touch()
    assert netkin(f"jobs list {done / 'ab.netkin'}").stdout == netkin(f"jobs list {done}").stdout
    refused = netkin(f"jobs show {done / 'alone.netkin'}")
    assert refused.exit_code == 1
    assert "alone.netkin'; `netkin jobs list` lists those below a folder." in refused.stderr


def test_one_job_is_shown_with_what_it_works_on(netkin, done):
    first, *facts = netkin(f"jobs show {done / 'ab.netkin'}").stdout.splitlines()
    assert first.endswith("sweep, done, 1 of 1 part")
    assert dict(line.split(maxsplit=1) for line in facts)["call"] == "stitch_all()"
    assert facts[-1].split() == ["seed", "0"]
    assert json.loads(netkin(f"jobs show {done / 'ab.netkin'} --json").stdout)["condition"] == "done"


def test_json_has_all_of_the_state(netkin, done):
    (state,) = json.loads(netkin(f"jobs list {done} --json").output)
    assert (state["condition"], state["done"], state["call"]) == ("done", 1, "stitch_all()")
    assert state["identity"] == {"seed": 0}


def test_a_folder_without_jobs_says_so(netkin, tmp_path):
    found = netkin(f"jobs list {tmp_path}")
    assert (found.exit_code, found.stdout, found.stderr) == (0, "no jobs found\n", "")


def test_a_folder_that_is_not_there_is_refused(netkin):
    found = netkin("jobs list gone")
    assert (found.exit_code, found.stdout) == (1, "")
    assert "there is no job at 'gone'; `netkin jobs list` lists those below a folder." in found.stderr


def test_a_job_that_is_over_is_shown_and_can_not_be_cancelled(netkin, done):
    assert netkin(f"jobs watch {done / 'ab.netkin'}").stdout.endswith("sweep, done, 1 of 1 part\n")
    refused = netkin(f"jobs cancel {done / 'ab.netkin'}")
    assert refused.exit_code == 1
    assert "is done, with 1 of 1 part done; only a running job can be cancelled." in refused.stderr
    assert netkin(f"jobs watch {done / 'cd.netkin'}").exit_code == 1
    assert netkin("jobs watch").exit_code == netkin("jobs list a b").exit_code == netkin("jobs a").exit_code == 2


def test_a_running_job_is_watched_until_it_is_cancelled(netkin, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["netkin.cli.saved"], "PAUSE", 0.01)
    ready, ended = threading.Event(), []

    def work():
        try:
            with Job(tmp_path / "job", "count", {}) as job:
                number = 0
                while True:
                    job.part(str(number), dict)
                    number += 1
                    ready.set()
        except Cancelled as fault:
            ended.append(fault)

    worker = threading.Thread(target=work)
    worker.start()
    assert ready.wait(30)
    assert netkin(f"jobs cancel {tmp_path / 'job'}").exit_code == 0
    found = netkin(f"jobs watch {tmp_path / 'job'}")
    worker.join(30)
    assert ended
    assert ": count, cancelled, " in found.stdout


def test_a_job_whose_folder_is_deleted_when_it_ends_is_done(netkin, tmp_path, monkeypatch):
    def vanish(seconds):
        shutil.rmtree(tmp_path / "job")

    with Job(tmp_path / "job", "claim", {}) as job:
        job.advance(2, 3, "tasks")
        written = (tmp_path / "job" / "job.json").read_bytes()
    (tmp_path / "job" / "job.json").write_bytes(written)  # as if it were running
    monkeypatch.setattr(sys.modules["netkin.cli.saved"].time, "sleep", vanish)
    found = netkin(f"jobs watch {tmp_path / 'job'}")
    assert found.exit_code == 0, found.stderr
    assert found.stdout.endswith("claim, done, 3 of 3 tasks\n")


@pytest.mark.usefixtures("saved")
def test_two_results_are_set_side_by_side(netkin):
    assert (
        netkin('compare netkin:digits --data digits:test --examples 90 --layers "relu*" --out few.netkin').exit_code
        == 0
    )
    shown = netkin("show ab.netkin few.netkin")
    assert shown.stdout.startswith("ab.netkin → few.netkin: comparison\n\ncka: 16 numbers in both, largest difference")
    assert "examples: 360 → 90" in shown.stdout
    document = json.loads(netkin("show ab.netkin few.netkin --json").stdout)
    assert len(document["changes"]) == 16
    assert document["facts"]["examples"] == {"old": 360, "new": 90}


@pytest.mark.usefixtures("saved")
def test_the_numbers_of_a_file_are_written_as_a_table(netkin):
    pandas = pytest.importorskip("pandas")
    assert netkin("show ab.netkin --csv ab.csv").stderr == "numbers in ab.csv\n"
    frame = pandas.read_csv("ab.csv")
    assert list(frame.columns[:5]) == ["model_a", "model_b", "measure", "layer_a", "layer_b"]
    table = nk.load("ab.netkin")["cka"]
    assert all(table[row.layer_a, row.layer_b] == row.value for row in frame.itertuples())
    assert "give --overwrite" in netkin("show ab.netkin --csv ab.csv").stderr
