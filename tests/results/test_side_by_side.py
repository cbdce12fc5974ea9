"""Two saved results side by side."""

import numpy as np
import pytest

import netkin as nk
from netkin.errors import InvalidValue
from netkin.results import Ranking, document
from netkin.results.side_by_side import side_by_side
from table_worlds import table_of


@pytest.fixture
def saved(tmp_path):
    """Two comparisons of the same layers on other data, of which the second has another measure as well."""
    rng = np.random.default_rng(0)
    first, second = ({"in": rng.normal(size=(40, 3)), "out": rng.normal(size=(40, 2))} for _ in range(2))
    nk.compare(first, second, measures=["cka"]).save(tmp_path / "old.netkin")
    shifted = first | {"out": second["out"]}
    nk.compare(shifted, second, measures=["cka", "nbs"]).save(tmp_path / "new.netkin")
    return tmp_path / "old.netkin", tmp_path / "new.netkin"


def test_numbers_are_matched_by_measure_and_layers(saved):
    old, new = map(nk.load, saved)
    pairs = side_by_side(*saved)
    assert pairs.columns == ("measure", "layer_a", "layer_b")
    by_names = {change.names: change for change in pairs.changes}
    same = by_names["cka", "in", "in"]
    assert (same.old, same.difference) == (old["cka"]["in", "in"], 0)
    moved = pairs.moved[0]
    assert moved.names == ("cka", "out", "out")
    assert moved.difference == new["cka"]["out", "out"] - old["cka"]["out", "out"]
    assert by_names["nbs", "in", "in"].old is None


def test_the_text_says_what_differs_and_what_stands_in_one_result_alone(saved):
    text = str(side_by_side(*saved))
    assert "cka: 4 numbers in both, largest difference" in text
    assert "nbs: 0 numbers in both, 4 only in the new result" in text
    assert "data digest: " in text


def test_a_result_beside_itself_differs_in_nothing(saved):
    same = side_by_side(saved[0], saved[0])
    assert (same.moved, same.facts) == ((), {})
    assert str(same) == "cka: 4 numbers in both, all equal"


def test_the_document_has_a_row_for_each_number(saved):
    rows = document(side_by_side(*saved))["changes"]
    assert rows[0].keys() == {"measure", "layer_a", "layer_b", "old", "new", "difference"}
    assert len(rows) == 8


@pytest.fixture
def two_rankings():
    """The same two models, ranked by the same score with other values."""
    facts = {"costs": {"leep": 1.0}, "parameters": {"a": 1, "b": 2}, "data": "d", "examples": 9, "classes": 3}
    tables = [
        table_of(id="leep", layers_a=("d",), layers_b=("a", "b"), values=[values])
        for values in ([0.5, 0.75], [0.75, 0.75])
    ]
    return [Ranking(score="leep", tables={"leep": table}, version="0.1", **facts) for table in tables]


def test_rankings_are_matched_by_score_and_model(tmp_path, two_rankings):
    paths = [tmp_path / "old.netkin", tmp_path / "new.netkin"]
    for ranking, path in zip(two_rankings, paths, strict=True):
        ranking.save(path)
    found = {change.names: change.difference for change in side_by_side(*paths).changes}
    assert found["leep", "a"] == pytest.approx(0.25)


def test_files_of_two_kinds_are_refused(saved, tmp_path, two_rankings):
    two_rankings[0].save(tmp_path / "ranking.netkin")
    with pytest.raises(InvalidValue, match="a 'comparison' and .* a 'ranking'; give two results of one kind"):
        side_by_side(saved[0], tmp_path / "ranking.netkin")


def test_of_statistics_the_facts_differ(tmp_path):
    rng = np.random.default_rng(0)
    for name, count in (("old", 40), ("new", 50)):
        nk.collect({"in": rng.normal(size=(count, 3))}).save(tmp_path / name)
    found = side_by_side(tmp_path / "old", tmp_path / "new")
    assert found.changes == ()
    assert found.facts["examples"] == (40, 50)
