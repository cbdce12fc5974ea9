import copy
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from netkin.errors import InvalidValue, NameClash, NoValue, UnknownName
from refusals import refusals


def test_a_number_is_found_by_the_names_of_its_layers(made):
    assert made.table()["conv1", "head"] == 0.333
    assert type(made.table()["conv1", "head"]) is float


def test_a_hole_says_why(made):
    with pytest.raises(NoValue, match="^cka has no value for 'in' and 'out': layer 'out' is constant over the data$"):
        made.holed()["in", "out"]


def test_an_unknown_layer_gets_a_hint(made):
    refusals(
        (lambda: made.table()["conv3", "head"], UnknownName, ""),
        (lambda: made.table()["head", "zzz"], UnknownName, ""),
        (lambda: made.table(axes=("network", "network"))["head", "zzz"], UnknownName, ""),
    )


@pytest.mark.parametrize("key", ["conv1", 0, ("conv1",)])
def test_anything_but_a_pair_is_refused(made, key):
    with pytest.raises(UnknownName, match="ask for a pair of layers"):
        made.table()[key]


def test_a_table_cannot_be_changed(made):
    table = made.table(parameters={"variance": 0.99})
    with pytest.raises(FrozenInstanceError):
        table.id = "nbs"
    with pytest.raises(ValueError, match="read-only"):
        table.values[0, 0] = 5
    with pytest.raises(TypeError):
        table.quantity.parameters["variance"] = 0.5


def test_a_table_does_not_follow_its_maker(made):
    values = np.eye(3)
    table = made.table(values=values)
    values[0, 0] = 5
    assert table["conv1", "conv1"] == 1


def test_a_missing_value_without_reason_is_refused(made):
    with pytest.raises(InvalidValue, match="a finite value or a reason.*1 differ, first 'in' and 'out' with nan"):
        made.holed(missing={})
    with pytest.raises(InvalidValue, match="first 'in' and 'in' with inf"):
        made.holed(values=[[np.inf, np.nan], [1, 1]])


def test_a_reason_beside_a_value_is_refused(made):
    with pytest.raises(InvalidValue, match=r"1 differ, first 'in' and 'out' with 0\.5"):
        made.holed(values=[[1, 0.5], [1, 1]])


def test_a_hole_in_no_layer_is_refused(made):
    with pytest.raises(UnknownName, match="no layer named 'gone'"):
        made.holed(missing={("gone", "out"): "?"})


def test_layers_of_one_name_are_refused(made):
    with pytest.raises(NameClash, match="rows must have distinct names; 'x' occurs 2 times"):
        made.table(rows=("x", "x", "y"))


def test_best_matches_follow_the_direction(made):
    values = [[0.1, 0.9], [0.8, 0.2]]
    near = made.table(rows=("p", "q"), columns=("r", "s"), values=values)
    far = made.table(rows=("p", "q"), columns=("r", "s"), values=values, higher_is_closer=False)
    assert near.best_matches() == {"p": ("s", 0.9), "q": ("r", 0.8)}
    assert far.best_matches() == {"p": ("r", 0.1), "q": ("s", 0.2)}


def test_the_first_of_equal_matches_is_named(made):
    assert made.table(values=np.ones((3, 3))).best_matches()["head"] == ("conv1", 1.0)


def test_a_row_of_holes_has_no_best_match(made):
    holes = {("in", "in"): "dead", ("in", "out"): "dead"}
    for direction in (True, False):
        table = made.holed(values=[[np.nan, np.nan], [0.25, 0.5]], missing=holes, higher_is_closer=direction)
        assert list(table.best_matches()) == ["out"]


def test_a_table_without_columns_has_no_matches(made):
    assert made.table(rows=("x",), columns=(), values=np.ones((1, 0))).best_matches() == {}


def test_the_matrix_handed_out_is_your_own(made):
    table = made.table()
    table.to_numpy()[:] = 7
    assert table.values.max() == 1


def test_pandas_and_xarray_carry_the_names(made):
    table = made.holed(parameters={"variance": 0.5})
    assert table.to_pandas().loc["out", "in"] == 0.25
    assert table.to_xarray().sel(layer_a="out", layer_b="in") == 0.25
    assert table.to_xarray().attrs["parameter_variance"] == 0.5
    assert np.isnan(table.to_pandas().loc["in", "out"])


def test_equal_tables_are_equal_holes_included(made):
    assert made.holed() == made.holed()
    assert made.holed() != made.holed(symmetric=False)
    assert made.table() != made.table(errors=np.ones((3, 3)))
    assert made.table() != "cka"


def test_tables_with_equal_labels_share_them(made):
    one, other = made.holed(parameters={"k": 1}), made.holed(parameters={"k": 1})
    for name in ("layers_a", "missing", "error_reasons"):
        assert getattr(one, name) is getattr(other, name)
    assert [made.table(parameters={"k": k}).quantity.parameters["k"] for k in (1, 1.0, True)] == [1, 1.0, True]
    assert [type(made.table(parameters={"k": k}).quantity.parameters["k"]) for k in (1, 1.0, True)] == [
        int,
        float,
        bool,
    ]
    with pytest.raises(TypeError, match="does not support item assignment"):
        one.quantity.parameters["k"] = 2


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_are_equal_and_frozen(made, again):
    twin = again(made.holed(errors=np.ones((2, 2))))
    assert twin == made.holed(errors=np.ones((2, 2)))
    assert not twin.values.flags.writeable


def test_the_short_form_says_what_it_is(made):
    assert repr(made.holed()) == "Values('cka', 2 × 2 layers, 1 missing)"


def test_corresponding_layers_are_those_of_the_same_name_without_holes(made):
    assert made.table(rows=("conv1", "head"), columns=("head", "conv1")).corresponding() == {"conv1": 0.5, "head": 0.5}
    holed = made.holed(values=[[1.0, 0.5], [0.25, np.nan]], missing={("out", "out"): "it is constant"})
    assert holed.corresponding() == {"in": 1.0}
    assert made.table(columns=("x", "y")).corresponding() == {}
