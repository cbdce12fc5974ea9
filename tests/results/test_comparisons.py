import pickle
from dataclasses import replace

import numpy as np
import pytest

from netkin.errors import NameClash, UnknownName
from netkin.results import Comparisons


@pytest.fixture
def three(made):
    pairs = [("x", "y", 0.2), ("x", "z", 0.4), ("y", "z", 0.6)]
    return Comparisons(made.comparison(made.table(values=np.full((3, 3), v)), a=a, b=b) for a, b, v in pairs)


def test_a_pair_of_models_finds_its_comparison(three):
    assert three["x", "z"]["conv1", "head"] == 0.4
    assert len(three) == 3
    assert list(three) == [("x", "y"), ("x", "z"), ("y", "z")]
    assert three.models == ("x", "y", "z")


def test_a_mapping_is_welcome_too(three):
    assert Comparisons(dict(three)) == three


def test_get_and_in_work_as_in_any_mapping(three):
    assert ("x", "y") in three
    assert ("y", "x") not in three
    assert three.get(("q", "x")) is None
    assert three.get(("x", "y")) is three["x", "y"]


def test_the_other_direction_is_named(three):
    with pytest.raises(UnknownName, match="no comparison of 'y' with 'x', but one of 'x' with 'y'; ask for that"):
        three["y", "x"]


def test_an_unknown_model_gets_a_hint(made):
    many = Comparisons([made.comparison(a="first", b="second")])
    with pytest.raises(
        UnknownName, match="no comparison of 'frist' with 'second'; did you mean 'first'. The models are first"
    ):
        many["frist", "second"]
    with pytest.raises(UnknownName, match=r"no comparison of 'qqq' with 'first'\. The models are first, second\."):
        many["qqq", "first"]


@pytest.mark.parametrize("key", ["x", 3, ("x",)])
def test_anything_but_a_pair_of_models_is_refused(three, key):
    with pytest.raises(UnknownName, match="ask for a pair of models"):
        three[key]


def test_one_pair_twice_is_refused(made):
    with pytest.raises(NameClash, match="two comparisons of 'x' with 'y'"):
        Comparisons([made.comparison(a="x", b="y"), made.comparison(a="x", b="y")])


def test_the_summary_is_symmetric_with_an_empty_diagonal(three):
    expected = [[np.nan, 0.2, 0.4], [0.2, np.nan, 0.6], [0.4, 0.6, np.nan]]
    np.testing.assert_allclose(three.summary("cka"), expected)


def test_the_summary_reads_layers_of_the_same_name(made):
    table = made.table(rows=("p", "q"), columns=("q", "r"), values=[[0.9, 0.8], [0.3, 0.7]])
    assert Comparisons([made.comparison(table)]).summary()[0, 1] == 0.3


def test_the_text_has_the_warnings_of_all_pairs_each_once_and_counts_what_is_too_much(three):
    pairs = {pair: replace(one, warnings=("random weights", f"few of {pair}")) for pair, one in three.items()}
    many = Comparisons(pairs)
    assert many.warnings == ("random weights", *(f"few of {pair}" for pair in pairs))
    assert str(many).count("warning: random weights") == 1
    assert "more warning" not in str(many)
    loud = Comparisons(
        {pair: replace(one, warnings=tuple(f"{pair}, {k}" for k in range(4))) for pair, one in three.items()}
    )
    assert str(loud).count("warning: ") == 5
    assert "7 more warnings: each pair shows its own" in str(loud)


def test_without_common_names_the_summary_reads_the_best_matches(made):
    table = made.table(rows=("p", "q"), columns=("r", "s"), values=[[0.9, 0.8], [0.3, 0.7]])
    assert Comparisons([made.comparison(table)]).summary()[0, 1] == pytest.approx(0.8)


def test_the_summary_leaves_holes_out(made):
    many = Comparisons([made.comparison(made.holed(values=[[np.nan, 0.1], [0.1, 0.5]], holes={("in", "in"): "dead"}))])
    assert many.summary()[0, 1] == 0.5


def test_a_pair_of_nothing_but_holes_has_no_summary(made):
    table = made.table(rows=("p",), columns=("p",), values=[[np.nan]], holes={("p", "p"): "dead"})
    assert np.isnan(Comparisons([made.comparison(table)]).summary()).all()


def test_an_asymmetric_measure_is_not_mirrored(made):
    summary = Comparisons([made.comparison(made.table(symmetric=False))]).summary()
    assert summary[0, 1] == 1
    assert np.isnan(summary[1, 0])


def test_copies_are_equal(three):
    assert pickle.loads(pickle.dumps(three)) == three


def test_the_words_say_what_it_is(three, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert repr(three) == "Comparisons(3 models, 3 pairs)"
    assert str(three).splitlines() == [
        "3 models, 3 pairs: means over layers of the same name",
        "on digits: 1,797 examples",
        "",
        "cka: similarity (higher is closer), 0 to 1, exact",
        "      x     y     z",
        "x     –  0.20  0.40",
        "y  0.20     –  0.60",
        "z  0.40  0.60     –",
    ]


def test_tasks_are_called_so_and_small_means_keep_their_digits(made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def pair(a, b, value):
        table = made.table(values=np.full((3, 3), value), parameters={"shared_examples": float(a == b)})
        return replace(made.comparison(table), a=a, b=b)

    tasks = Comparisons([pair("x", "x", 1.0), pair("x", "y", 0.0123), pair("y", "y", 1.0)])
    lines = str(tasks).splitlines()
    assert lines[0] == "2 tasks, 3 pairs: means over layers of the same name"
    assert lines[5:7] == ["x  1.000  0.012", "y  0.012  1.000"]
    alone = Comparisons([pair("x", "x", 1.0)])
    assert str(alone).startswith("1 task, 1 pair: ")
    assert repr(alone) == "Comparisons(1 model, 1 pair)"
