import pickle
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from netkin.errors import NameClash, NoValue, UnknownName
from netkin.results import Comparisons
from netkin.results.labels import NOT_ASKED
from table_worlds import as_caveats, sentences


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


def layers(count, name):
    return tuple(f"{name}{k}" for k in range(count))


def same_depth_slowly(rows, columns):
    """Each layer of the shallower model with the nearest depth of the other, the lower one of two, by search."""
    if rows > columns:
        return [(i, j) for j, i in same_depth_slowly(columns, rows)]
    depths = [[Fraction(i, n - 1) if n > 1 else Fraction(0) for i in range(n)] for n in (rows, columns)]
    return [(i, min(range(columns), key=lambda j: (abs(depths[1][j] - at), j))) for i, at in enumerate(depths[0])]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 25])
@pytest.mark.parametrize("columns", [1, 2, 4, 7, 64])
def test_the_summary_is_the_mean_over_layers_at_the_same_relative_depth(made, rows, columns):
    values = np.random.default_rng(rows * columns).random((rows, columns))
    pairs = same_depth_slowly(rows, columns)
    for sides in (("p", "p"), ("p", "q")):  # with shared names or without: names do not matter
        table = made.table(rows=layers(rows, sides[0]), columns=layers(columns, sides[1]), values=values)
        many = Comparisons([made.comparison(table)])
        expected = np.mean([values[pair] for pair in pairs])
        np.testing.assert_allclose(many.summary(), [[np.nan, expected], [expected, np.nan]], rtol=1e-12)
        np.testing.assert_array_equal(many.layer_counts(), [[0, min(rows, columns)], [min(rows, columns), 0]])
    turned = made.table(rows=layers(columns, "q"), columns=layers(rows, "p"), values=values.T)
    assert Comparisons([made.comparison(turned)]).summary()[0, 1] == pytest.approx(expected, rel=1e-12)


def test_networks_that_happen_to_share_a_few_names_are_not_read_at_these_alone(made):
    # two shallow networks whose lower layers differ, and a deep one that shares the name of the top layer alone
    shallow, deep = ("stem", "block", "top"), ("a", "b", "c", "d", "top")
    near = np.array([[0.8, 0.1, 0.1], [0.1, 0.9, 0.1], [0.1, 0.1, 1.0]])
    far = np.array([[0.2, 0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.3, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1, 1.0]])
    tables = {
        ("s0", "s1"): made.table(rows=shallow, columns=shallow, values=near),
        ("s0", "deep"): made.table(rows=shallow, columns=deep, values=far),
        ("s1", "deep"): made.table(rows=shallow, columns=deep, values=far),
    }
    many = Comparisons(made.comparison(table, a=a, b=b) for (a, b), table in tables.items())
    np.testing.assert_allclose(many.summary()[0, 1:], [0.9, 0.5])  # by names 0.9 and 1.0
    assert many.tree()[0, :2].tolist() == [0, 1]
    assert many.clusters(2) == {"s0": 0, "s1": 0, "deep": 1}
    np.testing.assert_array_equal(many.layer_counts(), [[0, 3, 3], [3, 0, 3], [3, 3, 0]])
    assert "mean over 3 pairs of layers at the same relative depth" in many.summaries()["cka"].quantity.convention


def test_a_pair_whose_layers_at_one_depth_were_not_all_asked_for_is_a_hole_with_that_reason(made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    names = {"small": ("in", "mid", "out"), "deep": ("in", "a", "b", "c", "out"), "twin": ("in", "mid", "out")}
    comparisons = []
    for a, b in (("small", "deep"), ("small", "twin"), ("deep", "twin")):  # by `pairs="corresponding"`
        asked = np.array([[x == y for y in names[b]] for x in names[a]])
        holes = {(x, y): NOT_ASKED for x in names[a] for y in names[b] if x != y}
        table = made.table(rows=names[a], columns=names[b], values=np.where(asked, 0.5, np.nan), missing=holes)
        comparisons.append(made.comparison(table, a=a, b=b))
    many = Comparisons(comparisons)
    np.testing.assert_array_equal(np.isfinite(many.summary()), [[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    with pytest.raises(NoValue, match="1 of the 3 pairs of layers at the same relative depth were not asked for"):
        many.summaries()["small", "deep"]
    assert "1 of the 3 pairs of layers at the same relative depth were not asked for" in str(many)


def test_the_text_has_the_number_of_layers_behind_each_mean_where_they_differ(made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    holes = {("out", "out"): "constant"}
    less = made.table(rows=("in", "out"), columns=("in", "out"), values=[[0.5, 0.5], [0.5, np.nan]], missing=holes)
    whole = replace(less, values=np.full((2, 2), 0.5), missing={})
    pairs = (("x", "y", less), ("x", "z", whole), ("y", "z", whole))
    lines = str(Comparisons(made.comparison(t, a=a, b=b) for a, b, t in pairs)).splitlines()
    start = lines.index("the number of pairs of layers behind each mean")
    assert lines[start + 1 :] == ["   x  y  z", "x  –  1  2", "y  1  –  2", "z  2  2  –"]


def test_the_text_has_the_warnings_of_all_pairs_each_once_and_counts_what_is_too_much(three):
    pairs = {pair: replace(one, caveats=as_caveats("random weights", f"few of {pair}")) for pair, one in three.items()}
    many = Comparisons(pairs)
    assert sentences(many) == ("random weights", *(f"few of {pair}" for pair in pairs))
    assert str(many).count("warning: random weights") == 1
    assert "more warning" not in str(many)
    loud = Comparisons(
        {pair: replace(one, caveats=as_caveats(*(f"{pair}, {k}" for k in range(4)))) for pair, one in three.items()}
    )
    assert str(loud).count("warning: ") == 5
    assert "7 more warnings: each pair shows its own" in str(loud)


def test_the_summary_leaves_holes_out(made):
    many = Comparisons(
        [made.comparison(made.holed(values=[[np.nan, 0.1], [0.1, 0.5]], missing={("in", "in"): "dead"}))]
    )
    assert many.summary()[0, 1] == 0.5


def test_a_pair_of_nothing_but_holes_has_no_summary(made):
    table = made.table(rows=("p",), columns=("p",), values=[[np.nan]], missing={("p", "p"): "dead"})
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
        "3 models, 3 pairs: means over layers at the same relative depth",
        "on digits: 1,797 examples",
        "",
        "cka: similarity (higher is closer), 0 to 1, exact",
        "      x     y     z",
        "x     –  0.20  0.40",
        "y  0.20     –  0.60",
        "z  0.40  0.60     –",
        "each mean is over 3 pairs of layers",
    ]


def test_tasks_are_called_so_and_small_means_keep_their_digits(made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def pair(a, b, value):
        table = made.table(values=np.full((3, 3), value), parameters={"shared_examples": float(a == b)})
        return replace(made.comparison(table), a=a, b=b)

    tasks = Comparisons([pair("x", "x", 1.0), pair("x", "y", 0.0123), pair("y", "y", 1.0)])
    lines = str(tasks).splitlines()
    assert lines[0] == "2 tasks, 3 pairs: means over layers at the same relative depth"
    assert lines[5:7] == ["x  1.000  0.012", "y  0.012  1.000"]
    alone = Comparisons([pair("x", "x", 1.0)])
    assert str(alone).startswith("1 task, 1 pair: ")
    assert repr(alone) == "Comparisons(1 model, 1 pair)"
