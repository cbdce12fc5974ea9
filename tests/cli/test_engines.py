"""`--engine distributed`: all ranks work, the first alone prints and writes, and a fault ends all with one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import netkin as nk
from netkin.cli import cli

SOURCES = str(Path(nk.__file__).parents[1])
COMPARE = ["compare", "netkin:digits", "--data", "digits:test", "--layers", "relu*", "--engine", "distributed"]
BROKEN = """
import os
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 3)

    def forward(self, images):
        if os.environ["RANK"] == "1":
            if os.environ.get("KILLED"):
                os.kill(os.getpid(), 9)
            raise OSError("this rank is broken")
        return self.fc(images.flatten(1))


def net():
    torch.manual_seed(0)
    return Net()
"""


def torchrun(folder, *arguments, **environment):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "netkin"]
    around = {"PYTHONPATH": f"{SOURCES}:{folder}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*start, *arguments],
        cwd=folder,
        env=os.environ | around | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_the_first_rank_alone_prints_and_writes(tmp_path):
    done = torchrun(tmp_path, *COMPARE, "--errors", "--save", "ab.netkin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cka: similarity") == 1
    assert done.stderr.count("saved to ab.netkin") == 1
    found = nk.load(tmp_path / "ab.netkin")
    whole = nk.compare(nk.load_model("netkin:digits"), data=nk.load_data("digits:test"), layers="relu*", errors=True)
    assert found["cka"].values == pytest.approx(whole["cka"].values, abs=1e-6)
    assert found["cka"].replicates == pytest.approx(whole["cka"].replicates, abs=1e-6)
    assert found.provenance["call"].startswith("netkin compare netkin:digits --data digits:test")


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_and_nothing_is_written(tmp_path):
    (tmp_path / "broken_nets.py").write_text(BROKEN)
    done = torchrun(tmp_path, "compare", "broken_nets:net", *COMPARE[2:4], *COMPARE[6:], "--save", "ab.netkin")
    assert done.returncode == 1
    assert "netkin: rank 1 failed: OSError: this rank is broken" in done.stderr
    assert "netkin: 'broken_nets:net' could not be run on inputs of shape" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "ab.netkin").exists()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all(tmp_path):
    (tmp_path / "broken_nets.py").write_text(BROKEN)
    done = torchrun(tmp_path, "compare", "broken_nets:net", *COMPARE[2:4], *COMPARE[6:], KILLED="yes")
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "command", [COMPARE, ["collect", *COMPARE[1:], "--out", "a.stats"]], ids=["compare", "collect"]
)
def test_without_torchrun_the_engine_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, command, prog_name="netkin")
    assert result.exit_code == 1
    assert result.stderr.startswith("netkin: engine='distributed' needs a group of processes: start")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_engine_is_a_misuse():
    result = CliRunner().invoke(cli, [*COMPARE[:-1], "cluster"], prog_name="netkin")
    assert result.exit_code == 2
    assert "'cluster' is not one of 'local', 'distributed'" in result.stderr


def test_a_file_of_statistics_takes_no_engine(tmp_path):
    path = tmp_path / "a.stats"
    nk.collect(nk.load_model("netkin:digits"), data=nk.load_data("digits:test"), layers="relu*").save(path)
    result = CliRunner().invoke(cli, ["compare", str(path), "--engine", "distributed"], prog_name="netkin")
    assert result.exit_code == 2
    assert "--engine belongs to the pass over the data" in result.stderr
