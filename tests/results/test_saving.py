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
from netkin.errors import FileError
from netkin.results import Comparison, Comparisons, document, load
from table_worlds import as_caveats


@pytest.fixture
def rich(made):
    facts = {"parameters": {"variance": 0.95, "k": 3, "how": "sum"}, "errors": [[0.1, np.nan], [0.2, 0.3]]}
    table = made.holed(id="svcca(variance=0.95)", bounds=(0, np.inf), higher_is_closer=False, **facts)
    return made.comparison(made.holed(), table, caveats=as_caveats("λ is small"), complete=False, seed=np.int64(3))


def test_a_saved_comparison_comes_back_the_same(rich, tmp_path):
    rich.save(tmp_path / "ab.netkin")
    assert Comparison.load(tmp_path / "ab.netkin") == load(str(tmp_path / "ab.netkin")) == rich


def test_saved_comparisons_come_back_the_same(made, rich, tmp_path):
    many = Comparisons([made.comparison(a="x", b="y"), rich])
    many.save(tmp_path / "many.netkin")
    assert Comparisons.load(tmp_path / "many.netkin") == load(tmp_path / "many.netkin") == many


def test_comparisons_that_differ_in_everything_come_back_the_same(made, rich, tmp_path):
    numbers = [made.table(parameters={"k": k}) for k in (1, 1.0, True)]
    apart = [made.comparison(one, a=f"k {place}", b="y") for place, one in enumerate(numbers)]
    errors = made.comparison(made.jackknifed(), made.jackknifed(chunks=7, id="svcca"), a="errors", b="y", caveats=())
    reasons = made.comparison(made.table(error_reasons={("conv1", "head"): "no chunks"}), a="reasons", b="y")
    small = made.comparison(made.table(rows=("in",), columns=("in", "out")), a="small", b="y")
    many = Comparisons([*apart, errors, rich, reasons, small], failed={"z": "it gives NaN"})
    many.save(tmp_path / "many.netkin")
    again = load(tmp_path / "many.netkin")
    assert again == many
    assert again.failed == many.failed
    assert [repr(again[f"k {place}", "y"]["cka"].quantity.parameters["k"]) for place in range(3)] == [
        "1",
        "1.0",
        "True",
    ]
    assert list(again["errors", "y"].tables) == ["cka", "svcca"]


def test_infinite_parameters_come_back_the_same(made, tmp_path):
    one = made.comparison(made.table(parameters={"most": np.inf, "least": -np.inf, "word": "inf"}), a="x", b="y")
    many = Comparisons([one])
    for result in (one, many):
        result.save(tmp_path / "ab.netkin", overwrite=True)
        json.dumps(document(result), allow_nan=False)
        assert load(tmp_path / "ab.netkin") == result


def test_what_many_comparisons_share_is_written_once(made, tmp_path):
    said = {"weights a": "7b5fa553486b927b55e8b4c1", "plan": "Moments, streamed"}
    for count in (10, 40):
        pairs = [(f"step {a}", f"step {b}") for a in range(count) for b in range(a)]
        Comparisons([made.comparison(a=a, b=b, provenance=said, created="then") for a, b in pairs]).save(
            tmp_path / f"{count}.netkin"
        )
    few, many = (json.dumps(files.read_header(tmp_path / f"{count}.netkin")) for count in (10, 40))
    assert len(many) < len(few) + 40 * len('"step 10", "step 10", ')  # no header can be longer than 100 MB


def test_a_file_is_read_once(rich, tmp_path, monkeypatch):
    rich.save(tmp_path / "ab.netkin")
    reads, read = [], files.read
    monkeypatch.setattr(files, "read", lambda *asked: reads.append(asked) or read(*asked))
    assert load(tmp_path / "ab.netkin") == rich
    assert len(reads) == 1


def test_the_other_kind_is_refused(made, tmp_path):
    made.comparison().save(tmp_path / "one")
    with pytest.raises(FileError, match="one' holds 'comparison', not 'comparisons'; load it as what it is"):
        Comparisons.load(tmp_path / "one")


def test_a_file_of_ours_that_is_no_result_is_refused(tmp_path):
    files.write(tmp_path / "m", "moments", {}, {"n": np.ones(1)})
    with pytest.raises(FileError, match="m' holds 'moments', which is no result; those are 'comparison'"):
        load(tmp_path / "m")


def test_statistics_are_loaded_by_those_who_know_them(tmp_path, monkeypatch):
    files.write(tmp_path / "s", "statistics", {}, {"n": np.ones(1)})
    study = ModuleType("netkin.comparing.comparer")
    study.load_comparer = lambda path: ("statistics from", path)
    monkeypatch.setitem(sys.modules, "netkin.comparing.comparer", study)
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
        lambda header: header["tables"]["cka"].pop("quantity"),
        lambda header: header["tables"]["cka"]["missing"].clear(),
        lambda header: header.update(tables={"cka": {}}),
        lambda header: header.update(tables=3),
    ],
)
def test_a_damaged_header_is_refused(rich, tmp_path, harm):
    rich.save(tmp_path / "whole")
    header, arrays = files.read(tmp_path / "whole")
    harm(header)
    save_file(arrays, tmp_path / "harmed", {"netkin": json.dumps(header)})
    with pytest.raises(FileError, match="harmed' is damaged: "):
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


def test_a_file_and_a_document_say_the_same_of_a_result(rich, tmp_path):
    rich.save(tmp_path / "ab.netkin")
    header, told = files.read_header(tmp_path / "ab.netkin"), document(rich)
    assert told.keys() == header.keys()
    assert all(told[name] == header[name] for name in header if name != "tables")
    for name, table in header["tables"].items():
        assert told["tables"][name].keys() - table.keys() == {"best_matches", "low", "high"}
        assert (
            told["tables"][name]["missing"]
            == table["missing"]
            == {"layer 'out' is constant over the data": [["in", "out"]]}
        )


@pytest.mark.parametrize(
    "content", [{"kind": "diary"}, {"kind": "comparison", "format": 7}, {"kind": "series"}, {}, [{}], [1]]
)
def test_other_json_is_refused(tmp_path, content):
    (tmp_path / "f.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match="f.json' "):
        load(tmp_path / "f.json")


def test_models_are_for_files_that_need_them(made, tmp_path):
    made.comparison().save(tmp_path / "one")
    with pytest.raises(FileError, match="one' holds 'comparison', which takes no models; got 2"):
        load(tmp_path / "one", object(), object())


def test_no_module_is_imported_because_a_file_names_it(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    for kind in ("evil", "evil:load", "os.system", "netkin.cli", "__main__"):
        files.write(tmp_path / "f", kind, {"module": "evil", "reader": "evil:load"}, {}, overwrite=True)
        with pytest.raises(FileError, match="which is no result; those are 'comparison'"):
            load(tmp_path / "f")


def test_a_table_says_what_its_numbers_are(made, tmp_path):
    assert (made.table().quantity.kind, made.table().axes, made.table().quantity.unit) == (
        "similarity",
        ("layer", "layer"),
        "",
    )
    assert made.table(higher_is_closer=False).quantity.kind == "distance"
    angles = made.table(higher_is_closer=False, unit="radians", axes=("layer", "class"))
    made.comparison(angles).save(tmp_path / "ab")
    assert load(tmp_path / "ab").table() == angles
    assert angles.facts()["unit"] == "radians"
