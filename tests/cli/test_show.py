"""`netkin show`: what a file holds, from its header alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import netkin as nk
from netkin import files
from netkin.errors import FileFault
from netkin.results import Claim

PASS = "netkin:digits --data digits:test --examples 40 --layers relu1 --layers relu2 --quiet"


def test_a_comparison_is_described(netkin):
    assert netkin(f"compare {PASS} --measure cka --measure angular_cka --save ab.netkin").exit_code == 0
    lines = netkin("show ab.netkin").stdout.splitlines()
    told = {line[2:].split("  ")[0]: line.strip().split("  ")[-1].strip() for line in lines[1:]}
    assert lines[0] == "ab.netkin: comparison"
    assert told["tables"] == "cka, angular_cka"
    assert (told["layers a"], told["examples"]) == ("relu1, relu2", "40")
    assert (told["shapes a"], told["widths a"]) == ("relu1 pool, relu2 pool", "relu1 16, relu2 32")
    assert told["call"] == f"netkin compare {PASS} --measure cka --measure angular_cka --save ab.netkin"
    assert told["arrays"] == "2 of 8 numbers, 64 bytes"
    found = json.loads(netkin("show ab.netkin --json").stdout)
    assert found.pop("arrays") == {name: {"dtype": "F64", "shape": [2, 2]} for name in ("0/values", "1/values")}
    assert found == nk.read_header("ab.netkin") == files.read_header("ab.netkin")


def test_several_comparisons_are_named_with_what_they_were_made_of(netkin):
    tasks = "seen=netkin:digits,digits:train fresh=netkin:digits,digits:test"
    line = f"tasks {tasks} --examples 40 --layers relu1 --measure sketched_cka(buckets=8) --seeds 2 --quiet"
    assert netkin(f"{line} --save t.netkin").exit_code == 0
    lines = [" ".join(line.split()) for line in netkin("show t.netkin").stdout.splitlines()]
    assert lines[:2] == ["t.netkin: comparisons", "comparisons seen and seen, seen and fresh, fresh and fresh"]
    assert lines[2] == "tables sketched_cka(buckets=8, kernel=psi, seeds=2)"
    assert lines[3].startswith("data digits:train, a sample of 40 of 1,437")


def test_statistics_and_claims_are_described(netkin, tmp_path):
    assert netkin(f"collect {PASS} --out part.stats").exit_code == 0
    assert netkin("show part.stats").stdout.startswith("part.stats: statistics\n")
    facts = {"figure": "Fig. 1", "sentence": "sizes halve", "expected": {}, "criterion": "below 1", "measured": {}}
    path = Claim(id="toys/halving", verdict="holds", scale="cpu", **facts).save(tmp_path)
    assert "sizes halve" in netkin(f"show {path}").stdout


def test_a_training_says_how_far_it_is_and_what_it_belongs_to(netkin):
    inputs = torch.linspace(-1, 1, 64)[:, None]
    options = {"epochs": 2, "batch": 32, "loss": torch.nn.functional.mse_loss, "save": "t.netkin", "progress": False}
    nk.train(torch.nn.Linear(1, 1), (inputs, inputs), seed=3, **options)
    lines = [" ".join(line.split()) for line in netkin("show t.netkin").stdout.splitlines()]
    assert lines[:2] == ["t.netkin: training", "progress epoch 2, step 4"]
    assert "seed 3" in lines
    assert any(line.startswith("recipe epochs=2, batch=32") for line in lines)
    with pytest.raises(FileFault, match=r"holds where a training stands, .* `nk.train\(..., save=...\)` goes on"):
        nk.load("t.netkin")


def test_what_is_no_file_of_ours_is_refused(netkin):
    Path("diary").write_text("Dear diary,")
    for name, words in (("diary", "is no netkin file"), ("gone", "cannot read 'gone': No such file")):
        result = netkin(f"show {name}")
        assert (result.exit_code, result.stdout) == (1, "")
        assert words in result.stderr


@pytest.mark.parametrize("line", ["show ab.netkin", "report ab.netkin --out ab.html"])
def test_torch_is_not_needed(netkin, line):
    assert netkin(f"compare {PASS} --save ab.netkin").exit_code == 0
    program = (
        "import sys; sys.modules['torch'] = None\nfrom netkin.cli import cli\n"
        f"cli({line.split()!r}, prog_name='netkin', standalone_mode=False)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(files.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "ab." in done.stdout


def test_arrays_are_not_read(netkin, monkeypatch):
    assert netkin(f"compare {PASS} --save ab.netkin").exit_code == 0
    contents = bytearray(Path("ab.netkin").read_bytes())
    contents[-1] ^= 1
    Path("ab.netkin").write_bytes(contents)
    assert netkin("show ab.netkin").exit_code == 0
    result = netkin("report ab.netkin")
    assert result.exit_code == 1
    assert "'ab.netkin' is damaged: its arrays are not those that were written; take another copy" in result.stderr
