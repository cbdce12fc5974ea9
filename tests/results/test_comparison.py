import copy
import pickle
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from netkin.errors import MissingExtra, NoValue, UnknownName
from netkin.results import Comparisons, Series


@pytest.fixture
def two(made):
    cca = made.table("svcca", parameters={"variance": 0.99}, values=np.eye(3), errors=np.full((3, 3), 0.125))
    return made.comparison(made.table("cka"), cca)


def test_with_one_measure_a_pair_is_a_number(made):
    assert made.comparison()["conv1", "conv2"] == 0.5


def test_with_several_measures_one_must_be_named(two):
    assert two["svcca"]["conv1", "conv1"] == 1
    with pytest.raises(
        UnknownName, match=r"holds 2 measures: cka, svcca. Name one, as in `c\['cka'\]` or `measures='cka'`"
    ):
        two["conv1", "conv2"]
    with pytest.raises(UnknownName, match="holds 2 measures"):
        two.best_matches()


def test_a_hole_speaks_through_the_comparison(made):
    with pytest.raises(NoValue, match="constant over the data"):
        made.comparison(made.holed())["in", "out"]


def test_measures_keep_their_order(two):
    assert two.measures == tuple(two) == ("cka", "svcca")
    assert len(two) == 2


def test_defaults_spelled_out_find_the_same_table(two):
    assert two["svcca(variance=0.99)"] is two["svcca"]
    assert two["svcca( variance = 0.990 )"] is two["svcca"]
    assert "svcca(variance=0.95)" not in two
    assert "cka" in two
    assert 3 not in two


def test_parameters_that_are_asked_for_must_be_what_the_table_has(made):
    c = made.comparison(made.table("svcca(variance=0.95)", parameters={"variance": 0.95, "k": 3}))
    for same in ("svcca", "svcca(k=3)", "svcca(k=3, variance=0.95)"):
        assert c[same] is c["svcca(variance=0.95)"]
    for other in ("svcca(variance=0.9)", "svcca(variance=", "3", "svcca(0.95)", "svcca(**x)", "svcc"):
        assert other not in c


def test_a_name_shared_by_two_tables_needs_its_parameters(made):
    tables = [made.table(f"svcca(variance={share})", parameters={"variance": share}) for share in (0.9, 0.95)]
    c = made.comparison(*tables)
    with pytest.raises(
        UnknownName, match=r"'svcca' may mean 'svcca\(variance=0.9\)' and 'svcca\(variance=0.95\)'; ask"
    ):
        c["svcca"]
    assert "svcca" not in c
    assert c["svcca(variance=0.95)"].quantity.parameters == {"variance": 0.95}


def test_an_exact_id_comes_before_others_of_its_name(made):
    tables = [
        made.table("svcca(variance=0.9)", parameters={"variance": 0.9}),
        made.table("svcca", parameters={"variance": 0.99}),
    ]
    assert made.comparison(*tables)["svcca"].quantity.parameters == {"variance": 0.99}


def test_an_unknown_measure_gets_a_hint(two):
    with pytest.raises(
        UnknownName, match="no measure 'ckaa' in this comparison; did you mean 'cka'. It holds cka, svcca."
    ):
        two["ckaa"]
    with pytest.raises(UnknownName, match=r"no measure 'qqqq' in this comparison\. It holds"):
        two.to_numpy("qqqq")


def test_best_matches_come_from_the_chosen_measure(two):
    assert two.best_matches("svcca")["conv2"] == ("conv2", 1.0)


def test_numpy_stacks_several_measures(two):
    assert two.to_numpy().shape == (2, 3, 3)
    assert (two.to_numpy("svcca") == np.eye(3)).all()


def test_pandas_is_a_table_for_one_and_a_list_for_several(two, made):
    frame = two.to_pandas()
    assert list(frame.columns) == ["measure", "layer_a", "layer_b", "value", "error", "low", "high", "reason"]
    assert len(frame) == 18
    assert frame[frame.measure == "svcca"].error.eq(0.125).all()
    assert two.to_pandas("cka").loc["conv1", "conv2"] == made.comparison().to_pandas().loc["conv1", "conv2"] == 0.5


def test_pandas_lists_the_reason_of_each_hole(made):
    frame = made.comparison(made.holed(), made.holed(id="nbs")).to_pandas()
    assert frame[frame.value.isna()].reason.tolist() == ["layer 'out' is constant over the data"] * 2


@pytest.mark.slow
def test_xarray_carries_names_errors_and_provenance(two):
    data = two.to_xarray()
    assert data["cka"].sel(layer_a="conv1", layer_b="conv2") == 0.5
    assert data["svcca standard error"].max() == 0.125
    assert data.attrs["data"] == "digits"
    assert data.attrs["device"] == "cpu"
    assert data["svcca"].attrs["parameter_variance"] == 0.99


@pytest.mark.parametrize("package", ["pandas", "xarray"])
def test_a_missing_package_names_its_extra(made, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"`to_{package}` needs.*`pip install 'netkin\[{package}\]'`"):
        getattr(made.comparison(), f"to_{package}")()


def test_a_comparison_cannot_be_changed(two, made):
    with pytest.raises(FrozenInstanceError):
        two.seed = 3
    with pytest.raises(TypeError):
        two.tables["cka"] = made.table("cka")


def test_the_time_is_noted_unless_given(made):
    assert made.comparison().created[:2] == "20"
    assert made.comparison(created="then").created == "then"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_are_equal(two, again):
    assert again(two) == two


def test_other_provenance_is_another_comparison(made):
    assert made.comparison(created="then") != made.comparison(created="then", seed=1)
    assert made.comparison() != 3


def test_the_short_form_says_what_it_is(two):
    assert repr(two) == "Comparison('seed0', 'seed1', measures=['cka', 'svcca'], 3 × 3 layers, 1,797 examples)"


def test_a_measure_of_a_result_is_named(made):
    comparison = made.comparison(made.table(), made.table("nbs", values=np.zeros((3, 3))))
    many, given = Comparisons([comparison]), {"measures": "nbs"}
    assert comparison.table(**given).id == "nbs"
    assert comparison.to_numpy(**given).sum() == 0
    assert {row[0] for row in comparison.numbers(**given)} == {"nbs"}
    assert many.summary(**given)[0, 1] == 0
    series = Series(run="run", steps=(1, 2), comparisons=(comparison, comparison), final_step=2)
    assert series.own(**given).sum() == 0
