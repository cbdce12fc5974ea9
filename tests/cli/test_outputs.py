"""What commands read and write: nothing is overwritten by surprise, and the numbers are never lost."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import netkin.applications.dynamics  # noqa: F401 - before a test replaces what it imports
from netkin import files
from netkin.cli import cli
from netkin.cli.options import as_bytes
from netkin.errors import FileError
from netkin.results import load
from netkin.training import untrained_digits_net

MODEL = "netkin:digits@first.pt"
PASS = f"{MODEL} --data digits:test --examples 40 --layers relu1 --quiet"
RUN = "dynamics run --model netkin:digits --data digits:test --examples 40 --layers relu1"
COMMANDS = {
    "compare --out": f"compare {PASS} --out OUT",
    "compare --report": f"compare {PASS} --report OUT.html",
    "compare --figure": f"compare {PASS} --figure OUT.png",
    "collect --out": f"collect {PASS} --out OUT",
    "merge --out": "merge part.stats --out OUT",
    "dynamics --out": f"{RUN} --out OUT",
    "dynamics --report": f"{RUN} --report OUT.html",
    "dynamics --figure": f"{RUN} --figure OUT.svg",
    "stitch --out": f"stitch {MODEL} {MODEL} --at relu2 --data digits:train --examples 200 --out OUT",
    "stitch --report": f"stitch {MODEL} {MODEL} --at relu2 --data digits:train --examples 200 --report OUT.html",
    "stitch --figure": f"stitch {MODEL} {MODEL} --at relu2 --data digits:train --examples 200 --figure OUT.pdf",
    "stitch --map": f"stitch {MODEL} {MODEL} --at relu2 --data digits:train --examples 200 --map OUT",
    "tasks --out": f"tasks a={MODEL},digits:test --examples 40 --layers relu1 --seeds 1 --out OUT",
    "tasks --report": f"tasks a={MODEL},digits:test --examples 40 --layers relu1 --seeds 1 --report OUT.html",
    "tasks --figure": f"tasks a={MODEL},digits:test --examples 40 --layers relu1 --seeds 1 --figure OUT.svg",
    "compress --out": f"compress {MODEL} --layer fc --k 4 --data digits:train --examples 200 --out OUT",
    "report --out": "report ab.netkin --out OUT.html",
}
# drawing takes longer than all else
WRITING = [pytest.param(name, marks=[pytest.mark.slow] * ("--figure" in name)) for name in COMMANDS]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with weights, a run, a comparison and statistics."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        torch.save(untrained_digits_net(0).state_dict(), "first.pt")
        Path("run").mkdir()
        for step in (1, 2):
            torch.save(untrained_digits_net(step).state_dict(), f"run/step_{step}.pt")
        for line in (f"compare {PASS} --out ab.netkin", f"collect {PASS} --out part.stats"):
            assert CliRunner().invoke(cli, line.split(), prog_name="netkin").exit_code == 0
    return folder


@pytest.fixture
def place(netkin, tmp_path, made):
    """A copy of what was made, in the folder at hand."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def output_of(line):
    return Path(next(word for word in line.split() if word.startswith("OUT")))


def no_work(*_, **__):
    pytest.fail("the work has begun")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_is_there_is_refused_before_the_work(netkin, place, monkeypatch, name):
    line = COMMANDS[name]
    out = output_of(line)
    out.write_bytes(b"precious")
    monkeypatch.setattr("netkin.sources.load_model", no_work)
    monkeypatch.setattr("netkin.sources.load_data", no_work)
    monkeypatch.setattr("netkin.sources.runs.open_run", no_work)
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (1, ""), result.stderr
    assert (
        result.stderr
        == f"netkin: {name.split()[1]} would write over '{out}'; choose another name, or give --overwrite.\n"
    )
    assert out.read_bytes() == b"precious"


@pytest.mark.parametrize("name", WRITING)
def test_with_overwrite_it_is_written_over(netkin, place, name):
    line = COMMANDS[name]
    output_of(line).write_bytes(b"precious")
    result = netkin(f"{line} --overwrite")
    assert result.exit_code == 0, result.stderr
    assert output_of(line).stat().st_size > len(b"precious")
    again = netkin(line)  # what a job has made it may go on with
    assert again.exit_code == (0 if name in ("dynamics --out", "stitch --out") else 1)


@pytest.mark.parametrize("option", ["--report", "--out", "--figure"])
def test_weights_are_never_replaced_by_a_result(netkin, place, option):
    before = Path("first.pt").read_bytes()
    result = netkin(f"compare {PASS} {option} first.pt")
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    assert Path("first.pt").read_bytes() == before


@pytest.mark.parametrize("name", WRITING)
def test_what_fails_while_writing_does_not_take_the_numbers_along(netkin, place, monkeypatch, name):
    if name in ("report --out", "collect --out", "merge --out", "dynamics --out", "stitch --out"):
        pytest.skip("prints no numbers, or writes them as they come, as below")

    def failing(*_, **__):
        raise FileError("cannot write 'it': No space left on device.")

    monkeypatch.setattr(files, "write_bytes", failing)
    result = netkin(COMMANDS[name])
    assert result.exit_code == 1
    assert len(result.stdout) > 20
    assert result.stderr.strip().splitlines()[-1] == "netkin: cannot write 'it': No space left on device."
    assert not output_of(COMMANDS[name]).exists()


TASKS = "--method finetune --data digits:train --test digits:test --tasks 2 --recipe epochs=1"
CLIENTS = "--data digits:train --test digits:test --classes 5 --clients 2 --rounds 1 --recipe epochs=1"
FIVE = "--measure cka --measure nbs --measure gulp --measure cca_mean --measure cka_debiased"
GROWING = {
    "series": "dynamics run --model netkin:digits --data digits:test --examples 40 --out OUT",
    "sweep": f"stitch {MODEL} {MODEL} --all --data digits:train --examples 200 --out OUT",
    "comparison": f"compare a={MODEL} b={MODEL} c=netkin:digits --data digits:test --examples 40 {FIVE} --out OUT",
    "federation": f"federate {MODEL} {CLIENTS} --out OUT",
    "task sequence": f"continual {MODEL} {TASKS} --out OUT",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "federation")) for kind in GROWING]
)
def test_files_that_grow_with_the_work_do_not_either(netkin, place, files_up_to, kind):
    out = "OUT/finetune.netkin" if kind == "task sequence" else "OUT"
    with files_up_to(11000):
        result = netkin(GROWING[kind])
    assert result.exit_code == 1, result.stderr
    assert "saved to" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert re.match(rf"netkin: cannot write '{out}.*': File too large; what is kept \(\d+ of \d+ \w+\) is cont", last)
    assert not list(Path().rglob(".*"))
    whole = netkin(GROWING[kind])
    assert whole.exit_code == 0
    assert whole.stdout == result.stdout
    assert "saved to OUT" in whole.stderr
    assert str(load(out))


def test_a_crash_while_drawing_does_not_either(netkin, place, monkeypatch):
    monkeypatch.setattr("netkin.reporting.report", lambda *_, **__: 1 / 0)
    result = netkin(f"compare {PASS} --report ab.html --out ab2.netkin")
    assert result.exit_code == 1
    assert "relu1" in result.stdout
    assert "netkin: cannot write 'ab.html': ZeroDivisionError: division by zero" in result.stderr
    assert load("ab2.netkin").layers_a == ("relu1",)


@pytest.mark.parametrize("option, name", [("--out", "printed.netkin"), ("--report", "printed.html")])
def test_a_file_that_the_command_prints_into_is_refused(netkin, place, monkeypatch, option, name):
    with open(name, "w") as printed, monkeypatch.context() as patch:
        patch.setattr("netkin.sources.load_model", no_work)
        patch.setattr(os, "fstat", lambda stream, fstat=os.fstat: fstat(printed.fileno() if stream == 1 else stream))
        result = netkin(f"compare {PASS} {option} {name} --overwrite")
    assert result.exit_code == 2
    assert f"{option} names {name}, into which the command prints; give it its own file." in result.stderr
    assert netkin(f"compare {PASS} {option} {name} --overwrite").exit_code == 0


@pytest.mark.parametrize("where", ["gone/f", "folder"])
def test_a_place_that_cannot_be_written_is_found_before_the_work(netkin, place, monkeypatch, where):
    Path("folder").mkdir()
    monkeypatch.setattr("netkin.sources.load_model", no_work)
    result = netkin(f"compare {PASS} --out {where}")
    assert result.exit_code == 2
    assert result.stdout == ""


def test_a_result_names_the_command_that_made_it(netkin, place):
    assert load("ab.netkin").provenance["call"] == f"netkin compare {PASS} --out ab.netkin"


def test_the_demo_destroys_no_file_of_its_folder(netkin, tmp_path):
    Path("netkin-demo").mkdir()
    Path("netkin-demo/seed0.safetensors").write_bytes(b"precious")
    result = netkin("demo --quiet")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--out would write over 'netkin-demo/seed0.safetensors'; choose another name" in result.stderr
    assert os.listdir("netkin-demo") == ["seed0.safetensors"]
    assert Path("netkin-demo/seed0.safetensors").read_bytes() == b"precious"


def test_one_file_for_two_outputs_is_refused(netkin, place):
    result = netkin(f"stitch {MODEL} {MODEL} --at relu2 --data digits:train --out one.netkin --map ./one.netkin")
    assert result.exit_code == 2
    assert "--out and --map both name one.netkin; give each its own file." in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "text, size",
    [
        ("1000", 1000),
        ("500MB", 500_000_000),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("1KiB", 1024),
    ],
)
def test_amounts_of_memory_are_read_as_people_write_them(text, size):
    assert as_bytes(text) == size


@pytest.mark.parametrize("text", ["much", "2XB", "-1GB", "", "GB", "1..2GB"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(click.BadParameter, match="is not an amount of memory; write one such as 500MB"):
        as_bytes(text)


def test_no_memory_at_all_is_refused():
    with pytest.raises(click.BadParameter, match="'0GB' is no memory"):
        as_bytes("0GB")


def test_a_path_that_is_no_utf_8_is_written_and_recorded_with_a_replacement(netkin):
    line = ["compare", *f"{MODEL} {PASS} --out".split(), "\udcff.netkin"]
    torch.save(untrained_digits_net(0).state_dict(), "first.pt")
    result = CliRunner().invoke(cli, line, prog_name="netkin")
    assert result.exit_code == 0, result.stderr
    assert "\N{REPLACEMENT CHARACTER}.netkin" in load("\udcff.netkin").provenance["call"]


def test_a_name_that_is_no_utf_8_is_refused_before_the_work(netkin):
    named = [*f"compare {MODEL} {PASS}".split(), "--name", "\udcff", "--name", "b"]
    result = CliRunner().invoke(cli, named, prog_name="netkin")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a name must be text in UTF-8; got '\\udcff'" in " ".join(result.stderr.split())


def test_a_data_name_that_is_no_utf_8_is_refused_before_the_work(netkin):
    line = ["compare", "netkin:digits", "--layers", "relu1", "--out", "a.netkin", "--data", "\udcff=digits:test"]
    result = CliRunner().invoke(cli, line, prog_name="netkin")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "netkin: a name must be text in UTF-8; got '\\udcff'." in " ".join(result.stderr.split())


@pytest.mark.parametrize("name", ["collect --out", "merge --out"])
def test_statistics_that_can_not_be_written_are_not_printed_as_if_they_were(netkin, place, monkeypatch, name):
    def failing(*_, **__):
        raise FileError("cannot write 'it': No space left on device.")

    monkeypatch.setattr(files, "write_bytes", failing)
    result = netkin(COMMANDS[name])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.strip().splitlines()[-1] == "netkin: cannot write 'it': No space left on device."


RANDOM = "'netkin:digits' was given no weights, so they are random, drawn from seed 0."


@pytest.mark.parametrize(
    "line",
    [
        "atoms netkin:digits netkin:digits --atoms 4",
        "sparsity netkin:digits",
        "compress netkin:digits --layer fc --k 4 --data digits:test --examples 100",
    ],
)
def test_a_saved_file_says_that_weights_are_random(netkin, line):
    assert netkin(f"{line} --out a.netkin").exit_code == 0
    assert files.read_header("a.netkin")["provenance"]["random weights"].startswith(RANDOM)
    assert RANDOM in " ".join(netkin("show a.netkin").stdout.split())


@pytest.mark.parametrize("command", ["compare --plan", "collect --out a.stats"])
def test_plans_and_collect_say_that_weights_are_random(netkin, command):
    result = netkin(f"{command} netkin:digits --data digits:test --examples 20 --layers fc")
    assert result.exit_code == 0
    assert f"warning: {RANDOM}" in result.stderr


def test_the_plan_of_several_models_says_which_have_random_weights(netkin):
    torch.save(untrained_digits_net(0).state_dict(), "net.pt")
    line = (
        "compare --plan netkin:digits@net.pt netkin:digits netkin:digits --data digits:test --examples 20 --layers fc"
    )
    result = netkin(line)
    said = [RANDOM.replace("seed 0", f"seed {seed}") for seed in (1, 2)]
    assert result.stderr.splitlines() == [f"warning: {remark}" for remark in said]
    assert "random" not in result.stdout
    assert json.loads(netkin(f"{line} --json").stdout)["warnings"] == said


@pytest.mark.parametrize(
    "line, words",
    [
        (f"compare {PASS} --out ab.csv", "give 'ab.csv' to --csv; --out writes netkin's own format, as in ab.netkin."),
        (f"compare {PASS} --out ab.html", "give 'ab.html' to --report"),
        (f"compare {PASS} --out ab.png", "give 'ab.png' to --figure"),
        (f"compare {PASS} --out ab.json", "--json prints JSON; --out writes"),
        (f"collect {PASS} --out ab.html", "--out writes netkin's own format, as in ab.netkin; got 'ab.html'."),
        (f"compare {PASS} --csv ab.html", "a table's name ends in .csv; got 'ab.html'."),
    ],
)
def test_a_name_of_another_kind_of_file_is_refused_with_the_option_that_writes_it(netkin, line, words):
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.split())


CSV = {
    "compare": (f"compare {PASS}", "model_a,model_b,measure,layer_a,layer_b,value,error,low,high,reason"),
    "dynamics": (RUN, "step,measure,layer_a,layer_b,value,error,low,high,reason"),
    "recommend": (
        f"recommend {MODEL} --data digits:test --examples 40 --no-errors",
        "model,score,value,error,behind,behind_error,clear,reason",
    ),
    "sparsity": (f"sparsity {MODEL}", "network,layer,kind,weights,left,zeros,sparsity,rms"),
    "compress": (
        f"compress {MODEL} --layer fc --k 4 --data digits:train --examples 200",
        "layer,kind,width,kept,parameters_before,parameters_after,multiply_adds_before,multiply_adds_after,variance,"
        "accuracy,notes",
    ),
    "federate": (f"federate {MODEL} {CLIENTS}", "client,examples,accuracy,asked,counted"),
    "continual": (f"continual {MODEL} {TASKS}", "method,seed,after,task,accuracy"),
}


@pytest.mark.parametrize("name", CSV)
def test_every_result_can_be_written_as_one_table(netkin, place, name):
    line, head = CSV[name]
    assert netkin(f"{line} --csv all.csv").exit_code == 0
    first, *rows = csv.reader(Path("all.csv").read_text(encoding="utf-8").splitlines())
    assert first == head.split(",")
    assert {len(row) for row in rows} == {len(first)}
