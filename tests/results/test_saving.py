import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

import netkin.files as files
from netkin.errors import FileFault
from netkin.results import Comparison, Comparisons, load


@pytest.fixture
def rich(made):
    facts = {"parameters": {"variance": 0.95, "k": 3, "how": "sum"}, "errors": [[0.1, np.nan], [0.2, 0.3]]}
    table = made.holed(id="svcca(variance=0.95)", bounds=(0, np.inf), higher_is_closer=False, **facts)
    return made.comparison(made.holed(), table, warnings=("λ is small",), complete=False, seed=np.int64(3))


def test_a_saved_comparison_comes_back_the_same(rich, tmp_path):
    rich.save(tmp_path / "ab.netkin")
    assert Comparison.load(tmp_path / "ab.netkin") == load(str(tmp_path / "ab.netkin")) == rich


def test_saved_comparisons_come_back_the_same(made, rich, tmp_path):
    many = Comparisons([made.comparison(a="x", b="y"), rich])
    many.save(tmp_path / "many.netkin")
    assert Comparisons.load(tmp_path / "many.netkin") == load(tmp_path / "many.netkin") == many


def test_a_file_is_read_once(rich, tmp_path, monkeypatch):
    rich.save(tmp_path / "ab.netkin")
    reads, read = [], files.read
    monkeypatch.setattr(files, "read", lambda *asked: reads.append(asked) or read(*asked))
    assert load(tmp_path / "ab.netkin") == rich
    assert len(reads) == 1


def test_the_other_kind_is_refused(made, tmp_path):
    made.comparison().save(tmp_path / "one")
    with pytest.raises(FileFault, match="one' holds 'comparison', not 'comparisons'; load it as what it is"):
        Comparisons.load(tmp_path / "one")


def test_a_file_of_ours_that_is_no_result_is_refused(tmp_path):
    files.write(tmp_path / "m", "moments", {}, {"n": np.ones(1)})
    with pytest.raises(FileFault, match="m' holds 'moments', which is no result; those are 'comparison'"):
        load(tmp_path / "m")


def test_statistics_are_loaded_by_those_who_know_them(tmp_path, monkeypatch):
    files.write(tmp_path / "s", "statistics", {}, {"n": np.ones(1)})
    study = ModuleType("netkin.comparing.study")
    study.load_statistics = lambda path: ("statistics from", path)
    monkeypatch.setitem(sys.modules, "netkin.comparing.study", study)
    assert load(tmp_path / "s") == ("statistics from", tmp_path / "s")


def test_a_loaded_result_is_frozen(made, tmp_path):
    made.comparison().save(tmp_path / "one")
    with pytest.raises(ValueError, match="read-only"):
        load(tmp_path / "one")["cka"].values[:] = 0


@pytest.mark.parametrize(
    "harm",
    [
        lambda header: header.pop("tables"),
        lambda header: header.pop("data"),
        lambda header: header.update(surprise=1),
        lambda header: header["layers_a"].pop(),
        lambda header: header["tables"][0].pop("bounds"),
        lambda header: header["tables"][0]["holes"].clear(),
        lambda header: header.update(tables=[{}, {}]),
        lambda header: header.update(tables=3),
    ],
)
def test_a_damaged_header_is_refused(rich, tmp_path, harm):
    rich.save(tmp_path / "whole")
    header, arrays = files.read(tmp_path / "whole")
    harm(header)
    save_file(arrays, tmp_path / "harmed", {"netkin": json.dumps(header)})
    with pytest.raises(FileFault, match="harmed' is damaged: "):
        load(tmp_path / "harmed")


def test_results_are_read_and_shown_without_torch(rich, tmp_path):
    rich.save(tmp_path / "ab.netkin")
    program = (
        "import sys, netkin.results as results; c = results.load(sys.argv[1]); print(c); c.best_matches('cka')\n"
        "assert not {'torch', 'pandas', 'xarray'} & set(sys.modules), 'something large was imported'"
    )
    source = {"PYTHONPATH": str(Path(files.__file__).parents[1])}
    command = [sys.executable, "-c", program, tmp_path / "ab.netkin"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | source)
    assert done.returncode == 0, done.stderr
    assert "layer 'out' is constant" in done.stdout
