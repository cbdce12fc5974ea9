"""Refusals on the command line name the option at fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import netkin

DIGITS = "netkin:digits netkin:digits --data digits:test --examples 60 --layers fc"
LEARN = "continual netkin:digits --data digits:test --test digits:test --recipe epochs=1"
FEDERATE = "federate netkin:digits --data digits:test --classes 2 --rounds 1"
REFUSED = {
    f"compare {DIGITS} --memory 1KB": "--memory",
    f"compare {DIGITS} --errors --chunks 100": "--chunks",
    f"compare {DIGITS} --resize average": "--resize",
    "compare netkin:digits --data digits:test --layers nothing": "--layers",
    f"compare {DIGITS} --engine distributed": "--engine",
    f"collect {DIGITS} --out a.stats --memory 1KB": "--memory",
    "compress netkin:digits --layer fc --data digits:test": "--k",
    "compress netkin:digits --layer fc --k 8 --variance 0.5 --data digits:test": "--k",
    "compress netkin:digits --layer fc --variance 2 --data digits:test": "--variance",
    "compress netkin:digits --layer fc --k 900 --data digits:test": "--k",
    f"{LEARN} --tasks 9": "--tasks",
    f"{LEARN} --method ewc --strength -1": "--strength",
    f"{FEDERATE} --client-fraction 0": "--client-fraction",
    f"{FEDERATE} --coefficients fixed": "--coefficients",
    f"{FEDERATE} --coefficients pretrained --atoms 2": "--public",
    LEARN.removesuffix("epochs=1") + "lr=0.1": "--recipe",
    f"{LEARN},drop_last=true,batch=999": "--recipe",
    "classes netkin:digits --data digits:test --names a,b": "--names",
    "atoms netkin:digits netkin:digits": "--atoms",
    "atoms a=netkin:digits b=netkin:digits --atoms 2 --source c": "--source",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:60])
def test_a_refusal_names_the_option(netkin, line):
    result = netkin(line)
    assert result.exit_code == 1, result.output
    assert f"netkin: {REFUSED[line]}: " in result.stderr


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("report a.netkin --out nodir/x.html", 2, "the folder 'nodir' does not exist"),
        pytest.param("completion bash --title x", 2, "No such option", marks=pytest.mark.slow),
        pytest.param("show gone.netkin", 1, "cannot read 'gone.netkin'", marks=pytest.mark.slow),
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
