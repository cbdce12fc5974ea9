"""Refusals on the command line speak of the options that a user typed, not of the arguments of the library."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import netkin
from netkin.cli import cli
from netkin.cli.outputs import in_options

DIGITS = "netkin:digits netkin:digits --data digits:test --examples 60 --layers fc"
STITCH = "stitch netkin:digits netkin:digits --data digits:test --examples 60"
LEARN = "learn-tasks netkin:digits --data digits:test --test digits:test --recipe epochs=1"
FEDERATE = "federate netkin:digits --data digits:test --classes 2 --rounds 1"
REFUSED = {
    f"compare {DIGITS} --memory 1KB": "fewer --examples, fewer --layers, or a higher --memory.",
    f"compare {DIGITS} --errors --chunks 100": "--chunks 100 are more than the 60 examples",
    f"compare {DIGITS} --resize average": "--resize goes with --shape positions or --shape dft; got no --shape.",
    "compare netkin:digits --data digits:test --layers nothing": "no layer named 'nothing'; `netkin layers MODEL`",
    f"compare {DIGITS} --engine distributed": "--engine distributed needs a group of processes",
    f"collect {DIGITS} --out a.stats --memory 1KB": "fewer --layers, or a higher --memory.",
    f"{STITCH} --at relu2 --how 'task_loss(rate=-1)'": "`rate` must be above 0",
    "compress netkin:digits --layer fc --data digits:test": "one of --k, --variance and --accuracy-drop, which",
    "compress netkin:digits --layer fc --k 8 --variance 0.5 --data digits:test": "got --k and --variance.",
    "compress netkin:digits --layer fc --variance 2 --data digits:test": "--variance must lie above 0",
    "compress netkin:digits --layer fc --k 900 --data digits:test": "so --k must lie between 1 and 64; got 900.",
    f"{LEARN} --tasks 9": "--tasks is a number of tasks with 2 classes or more each",
    f"{LEARN} --method ewc --strength -1": "--strength is a number of 0 or more",
    f"{FEDERATE} --share 0": "--share is a share of the clients",
    f"{FEDERATE} --coefficients fixed": "no layers made of atoms; make some by --atoms, or give no --coefficients.",
    f"{FEDERATE} --coefficients pretrained --atoms 2": "give --public",
    LEARN.removesuffix("epochs=1") + "rate=0.1": "needs either `epochs` or `steps`, such as --recipe epochs=10; got",
    f"{LEARN},drop_last=true,batch=999": "take a smaller `batch` or --recipe drop_last=False.",
    "sensitivity netkin:digits --data digits:test --names a,b": "--names has 2 names and the model 10 outputs",
    "atoms netkin:digits netkin:digits": "--atoms gives networks of one architecture some.",
    "atoms a=netkin:digits b=netkin:digits --atoms 2 --source c": "--source is 'joint' or the name of a network",
    "tasks a=netkin:digits,digits:test --seeds 1 --measure cka": "take a measure of sketches",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:60])
def test_a_refusal_speaks_of_options(netkin, line):
    result = netkin(line)
    assert result.exit_code in (1, 2), result.output
    said = " ".join(result.stderr.split())
    assert REFUSED[line] in said
    known = {str(one.name) for one in cli.commands[line.split()[0]].params} | {"overwrite"}
    for name in re.findall(r"`(\w+)=?`", said) + re.findall(r"(?<![\w,(])(\w+)=(?:True|False|None|['\[])", said):
        assert name not in known, said


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("report a.netkin --out nodir/x.html", 2, "the folder 'nodir' does not exist"),
        ("completion bash --title x", 2, "No such option"),
        ("show gone.netkin", 1, "cannot read 'gone.netkin'"),
    ],
)
def test_a_simple_misuse_is_refused_without_torch(tmp_path, line, code, words):
    (tmp_path / "a.netkin").write_text("{}")
    program = (
        "import sys, netkin.cli\n"
        f"try: netkin.cli.cli({line.split()!r})\n"
        "except SystemExit as leaving:\n"
        "    assert 'torch' not in sys.modules, 'torch was imported'\n"
        "    raise"
    )
    done = run_alone(program, tmp_path)
    assert done.returncode == code, done.stderr
    assert words in " ".join(done.stderr.split())


def run_alone(program, folder):
    """Run a program in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(Path(netkin.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, env=environment)


def test_plans_speak_of_options_too(netkin):
    result = netkin(f"explain {DIGITS} --memory 1KB")
    assert result.exit_code == 1
    assert "or a higher --memory." in result.stdout


@pytest.mark.parametrize(
    "sentence, wanted",
    [
        ("start again with `overwrite=True`.", "start again with --overwrite."),
        ("collect with measures=['sketched_cka(buckets=2, seed=3)'].", "--measure 'sketched_cka(buckets=2, seed=3)'."),
        ("the table svcca(k=3, examples=9) is kept", None),
        ("collect with measures=['cka', 'svcca(k=2)'].", "collect with --measure cka --measure 'svcca(k=2)'."),
        ("take 'reduced_rank(examples=8)' as in `images,examples=3:DIR`.", None),
        ("the model's layers, `nn.Linear`, and the second's examples=3 or seed=1.5", "examples 3 or seed=1.5"),
        ("pass `test` (--test on the command line).", None),
        ("a list of pairs, `pairs=[(layer, layer), ...]`.", None),
        ("see `nk.merge` and `nk.load(path)`.", "see `netkin merge` and `nk.load(path)`."),
    ],
)
def test_arguments_become_options_and_nothing_else_changes(sentence, wanted):
    options = [
        ["--measure", "measures"], ["--examples"], ["--overwrite"], ["--pairs"], ["--layers"],
    ]  # fmt: skip
    context = click.Context(click.Command("f", params=[click.Option(names) for names in options]), click.Context(cli))
    assert in_options(sentence, context).endswith(wanted or sentence)
    assert wanted or in_options(sentence, context) == sentence


def test_pairs_of_a_sweep_are_asked_for_by_its_own_option():
    context = click.Context(cli.commands["stitch"], parent=click.Context(cli))
    assert in_options("take pairs='all', or a list.", context) == "take --matrix, or a list."
