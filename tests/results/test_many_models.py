"""Many models side by side: labelled summaries, data frames, the tree, the plane and clusters."""

import numpy as np
import pytest

import netkin as nk
from netkin.errors import InvalidValue, NoValue, UnknownName
from netkin.results import Comparisons
from netkin.results.distances import clusters_of, distances_of, plane_of, tree_of
from refusals import refused
from table_worlds import as_caveats, sentences


def many_of(made, values, **facts):
    """Return comparisons of as many models as `values` has rows; `values` above the diagonal are the similarities."""
    names = [f"m{k}" for k in range(len(values))]
    pairs = [(i, j) for i in range(len(names)) for j in range(i + 1, len(names))]
    table = lambda value: made.table(values=np.full((3, 3), value), **facts)  # noqa: E731
    return Comparisons(made.comparison(table(values[i][j]), a=names[i], b=names[j]) for i, j in pairs)


@pytest.fixture
def four(made):
    return many_of(made, [[1, 0.9, 0.1, 0.2], [0, 1, 0.2, 0.1], [0, 0, 1, 0.8], [0, 0, 0, 1]])


def test_summaries_are_one_labelled_comparison(four, tmp_path):
    found = four.summaries()
    assert found["cka"]["m0", "m1"] == found["cka"]["m1", "m0"] == 0.9
    assert found.table().axes == ("network", "network")
    with pytest.raises(NoValue, match="cka has no value for 'm2' and 'm2': no model was compared with itself"):
        found["m2", "m2"]
    found.save(tmp_path / "four.netkin")
    assert nk.load(tmp_path / "four.netkin") == found


def test_only_what_all_pairs_say_alike_is_said_of_the_summaries(made):
    pairs = [("x", "y", "1"), ("x", "z", "2"), ("y", "z", "1")]
    many = Comparisons(
        made.comparison(a=a, b=b, provenance={"seed": s, "device": "cpu"}, caveats=as_caveats(s)) for a, b, s in pairs
    )
    assert dict(many.summaries().provenance) == {"device": "cpu"}
    assert sentences(many.summaries()) == ("1", "2")


def test_no_comparisons_have_no_summaries():
    with pytest.raises(NoValue, match="no comparisons here"):
        Comparisons([]).summaries()


def test_a_measure_that_some_pairs_lack_is_empty_there(made):
    both = made.comparison(made.table(), made.table("nbs"), a="x", b="y")
    many = Comparisons([both, made.comparison(a="x", b="z"), made.comparison(a="y", b="z")])
    np.testing.assert_array_equal(np.isfinite(many.summary("nbs")).sum(), 2)
    with pytest.raises(NoValue, match="nothing was compared by this measure"):
        many.summaries()["nbs"]["x", "z"]
    with pytest.raises(UnknownName, match="no measure 'ckaa' in this comparison; did you mean 'cka'"):
        many.summary("ckaa")


def test_the_tree_joins_the_nearest_first_at_mean_angles(four):
    close, near = np.arccos(0.9), np.arccos(0.8)
    between = np.mean(np.arccos([0.1, 0.2, 0.2, 0.1]))
    np.testing.assert_allclose(four.tree(), [[0, 1, close, 2], [2, 3, near, 2], [4, 5, between, 4]])
    assert four.clusters() == {"m0": 0, "m1": 0, "m2": 1, "m3": 1}
    assert four.clusters(4) == {"m0": 0, "m1": 1, "m2": 2, "m3": 3}
    with refused(InvalidValue, "count"):
        four.clusters(5)


def test_the_plane_keeps_distances_that_fit_in_one(made):
    points = np.random.default_rng(0).normal(size=(5, 2))
    apart = np.linalg.norm(points[:, None] - points, axis=2)
    places = np.array(list(many_of(made, apart, higher_is_closer=False, bounds=(0, np.inf)).plane().values()))
    np.testing.assert_allclose(np.linalg.norm(places[:, None] - places, axis=2), apart, atol=1e-9)
    assert plane_of(apart)[1] == pytest.approx(1)


def test_points_of_three_dimensions_lose_the_least_of_their_spread():
    points = np.random.default_rng(1).normal(size=(6, 3)) * [3, 2, 1]
    apart = np.linalg.norm(points[:, None] - points, axis=2)
    spreads = np.linalg.svd(points - points.mean(0), compute_uv=False) ** 2
    assert plane_of(apart)[1] == pytest.approx(spreads[:2].sum() / spreads.sum())


def test_similarities_without_bounds_lie_apart_by_what_they_lack(made):
    table = made.table(rows=("a", "b", "c"), columns=("a", "b", "c"), bounds=(0, np.inf),
                       values=[[9, 5, 1], [5, 9, 2], [1, 2, 9]])  # fmt: skip
    np.testing.assert_allclose(distances_of(table), [[0, 0, 4], [0, 0, 3], [4, 3, 0]])


def test_of_two_directions_the_mean_counts_and_of_one_its_value(made):
    facts = {"symmetric": False, "higher_is_closer": False, "bounds": (0, np.inf)}
    sides = {"rows": ("a", "b"), "columns": ("a", "b")}
    both = made.table(values=[[0, 1], [3, 0]], **sides, **facts)
    one = made.table(values=[[0, 1], [np.nan, 0]], missing={("b", "a"): "-"}, **sides, **facts)
    assert distances_of(both)[0, 1] == distances_of(both)[1, 0] == 2
    assert distances_of(one)[0, 1] == distances_of(one)[1, 0] == 1
    assert many_of(made, [[0, 1, 2], [0, 0, 4], [0, 0, 0]], **facts).tree()[0, 2] == 1


def test_a_missing_pair_is_named(made):
    many = Comparisons([made.comparison(a="x", b="y"), made.comparison(a="y", b="z")])
    with pytest.raises(NoValue, match="cka has no value for 'x' and 'z': these two were not compared; a tree, a plane"):
        many.tree()


def test_two_models_have_a_tree_and_clusters(made):
    many = Comparisons([made.comparison(a="x", b="y")])
    assert many.tree().shape == (1, 4)
    assert many.clusters() == {"x": 0, "y": 1}


def test_equal_models_lie_on_one_place():
    apart = np.zeros((3, 3))
    np.testing.assert_array_equal(plane_of(apart)[0], 0)
    assert tree_of(apart)[:, 2].tolist() == [0, 0]
    assert len(set(clusters_of(apart, 1))) == 1


def test_a_data_frame_has_models_in_rows_and_columns(four):
    pytest.importorskip("pandas")
    frame = four.to_pandas()
    assert frame.loc["m0", "m2"] == pytest.approx(0.1)
    assert list(frame.columns) == list(four.models)
    numbers = four.to_pandas(long=True)
    assert len(numbers) == 6 * 9
    chosen = numbers[(numbers.model_a == "m2") & (numbers.model_b == "m3")]
    assert set(chosen.value) == {0.8}
    assert list(numbers.columns[:5]) == ["model_a", "model_b", "measure", "layer_a", "layer_b"]


def test_several_measures_come_back_number_by_number(made):
    pytest.importorskip("pandas")
    many = Comparisons([made.comparison(made.table(), made.table("nbs"), a="x", b="y")])
    assert set(many.to_pandas().measure) == {"cka", "nbs"}
    assert many.to_pandas("nbs").shape == (2, 2)
