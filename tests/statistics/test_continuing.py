"""A statistic saved and read back goes on as if never stopped."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from netkin import files
from netkin.errors import FileError
from netkin.measures import measures
from netkin.statistics import LayerGrams, LayerMoments, LayerRows, Outputs, layer_moments
from netkin.statistics.collector import Numbers
from netkin.statistics.statistic import Stored, from_plain, to_plain

MAKERS = {
    "moments": lambda: LayerMoments([(["a"], ["b"])], debiased=True),
    "float32 moments": lambda: LayerMoments([(["a"], ["b"])], debiased=True, precision=torch.float32),
    "grams": lambda: LayerGrams([(["a"], ["b"])], batch=16),
    "rbf grams": lambda: LayerGrams([(["a"], ["b"])], batch=16, kernel="rbf", fraction=0.8),
    "grams of the first batch's size": lambda: LayerGrams([(["a"], ["b"])]),
    "rows": lambda: LayerRows(["a", "b"]),
    "capped rows": lambda: LayerRows(["a", "b"], cap=20, seed=3),
}
READER = {LayerMoments: "cka_debiased", LayerGrams: "cka_minibatch", LayerRows: "cka_rbf"}


def value_of(collector):
    return float(measures()[READER[type(collector)]](collector["a", "b"]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("stop", [0, 5, 33, 64, 77])
@pytest.mark.parametrize("kind", MAKERS)
def test_stopping_anywhere_changes_nothing(worlds, tmp_path, monkeypatch, kind, stop, dtype):
    monkeypatch.setattr(layer_moments, "FOLD", 30)
    X, Y = (Z.astype(dtype) for Z in worlds.related(90, 4, 3))
    through, stopped = MAKERS[kind](), MAKERS[kind]()
    cuts = sorted({0, 11, stop, 50, 90})
    for start, end in itertools.pairwise(cuts):
        if start == stop:
            stopped.save(tmp_path / "s.netkin", overwrite=True)
            stopped = type(stopped).load(tmp_path / "s.netkin")
        for collector in (through, stopped):
            collector.update({"a": X[start:end], "b": Y[start:end]})
    # folding at another moment shifts by another mean, which float32 products notice in the last digits
    assert value_of(stopped) == pytest.approx(value_of(through), abs=1e-7 if "float32" in kind else 1e-12)


@pytest.mark.parametrize("kind", MAKERS)
def test_saving_changes_nothing_in_the_one_that_goes_on(worlds, tmp_path, kind):
    X, Y = worlds.related(90, 4, 3)
    saved, unsaved = MAKERS[kind](), MAKERS[kind]()
    for start in range(0, 90, 18):
        for collector in (saved, unsaved):
            collector.update({"a": X[start : start + 18], "b": Y[start : start + 18]})
        saved.save(tmp_path / "s.netkin", overwrite=True)
    assert value_of(saved) == pytest.approx(value_of(unsaved), abs=1e-7 if "float32" in kind else 1e-12)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_saved_part_merges_like_a_live_one(worlds, tmp_path, kind):
    X, Y = worlds.related(64, 4, 3)
    parts = []
    for rows in (range(32), range(32, 64)):
        part = MAKERS[kind]()
        batch = {"a": X[rows.start : rows.stop], "b": Y[rows.start : rows.stop]}
        part.update(batch, rows) if isinstance(part, LayerRows) else part.update(batch)
        parts.append(part)
    parts[1].save(tmp_path / "s.netkin")
    again = type(parts[1]).load(tmp_path / "s.netkin")
    assert value_of(parts[0].merge(again)) == pytest.approx(value_of(parts[0].merge(parts[1])), abs=1e-13)
    assert value_of(again.merge(parts[0])) == pytest.approx(value_of(parts[1].merge(parts[0])), abs=1e-13)


def test_many_layers_and_rectangles_come_back(worlds, tmp_path):
    layers = {name: worlds.normal(40, width) for name, width in zip("abcd", (2, 3, 4, 5), strict=True)}
    collector = LayerMoments([(["a", "b"], ["c", "d"]), (["a", "b"], ["a", "b"])])
    collector.update(layers)
    collector.save(tmp_path / "s.netkin")
    again = LayerMoments.load(tmp_path / "s.netkin")
    for pair in ("ac", "db", "ab", "aa"):
        assert float(measures()["cka"](again[tuple(pair)])) == float(measures()["cka"](collector[tuple(pair)]))


def test_outputs_come_back(worlds, tmp_path):
    outputs = Outputs(classes=3)
    outputs.update(worlds.normal(20, 3), worlds.normal(20, 3), worlds.rng.integers(0, 3, 20))
    outputs.save(tmp_path / "s.netkin")
    again = Outputs.load(tmp_path / "s.netkin")
    for collector in (outputs, again):
        collector.update(np.eye(3), np.eye(3), [0, 1, 1])
    assert torch.equal(outputs.joint, again.joint)
    assert (outputs.n, outputs.accuracy_a, outputs.cross_entropy_ab) == (
        again.n,
        again.accuracy_a,
        again.cross_entropy_ab,
    )


def test_a_statistic_of_another_kind_is_refused(tmp_path):
    Outputs(classes=3).save(tmp_path / "s.netkin")
    with pytest.raises(FileError, match="holds 'Outputs', not 'LayerMoments'"):
        LayerMoments.load(tmp_path / "s.netkin")


def test_a_damaged_statistic_is_refused_with_its_name(tmp_path):
    path = tmp_path / "s.netkin"
    for header in ({}, {"pair_blocks": [[["a"], ["b"]]], "layers": [["a", 1.0, 1e-7]]}):
        files.write(path, "LayerMoments", header, {"other": np.zeros(1)}, overwrite=True)
        with pytest.raises(FileError, match="s.netkin.*is damaged"):
            LayerMoments.load(path)
    save_file({"x": np.zeros(1)}, path)
    with pytest.raises(FileError, match="not one that netkin wrote"):
        Outputs.load(path)
    path.write_bytes(b"half")
    with pytest.raises(FileError, match="s.netkin"):
        LayerRows.load(path)


def test_a_file_is_read_whatever_module_its_classes_were_in_when_it_was_written():
    tensors = {}
    written = to_plain(Numbers(next=7, given=True), tensors, "numbers")
    assert written["class"] == "netkin.Numbers"
    assert from_plain(written, tensors) == Numbers(next=7, given=True)


def test_files_tell_all_classes_of_netkin_apart():
    def below(kind):
        return [one for child in kind.__subclasses__() for one in (child, *below(child))]

    names = [kind.__qualname__ for kind in below(Stored) if kind.__module__.startswith("netkin.")]
    assert sorted(names) == sorted(set(names))
    assert not [name for name in names if "." in name]


def test_reading_parts_takes_time_with_their_number_not_its_square(worlds):
    class Tensors(dict):
        """Tensors of which each is asked for by its name, as a search for the part's own would read all of them."""

        def __iter__(self):
            raise AssertionError("all tensors are read for one part")

        items = keys = values = __iter__

    X, Y = worlds.related(30, 4, 3)
    made = LayerMoments([(["a"], ["b"])], debiased=True)
    made.update({"a": X, "b": Y})
    tensors = {}
    written = to_plain({"first": [made], "second": {"third": made}}, tensors, "all")
    again = from_plain(written, Tensors(tensors))
    assert value_of(again["first"][0]) == value_of(again["second"]["third"]) == value_of(made)
