"""What stitches are worth: why a number may be missing, and the warnings where similarity and worth disagree."""

import math

import numpy as np
import pytest

import netkin as nk
from netkin.applications.stitching import Evaluation, evaluating
from netkin.applications.stitching.structure import contrasts
from netkin.applications.stitching.sweep import score_tables
from netkin.errors import InvalidValue, UnknownName
from netkin.reporting.grids import Scale
from netkin.results.labels import NOT_ASKED
from refusals import refused
from table_worlds import sentences, table_of
from task_loss_worlds import quiet_world


def test_a_high_similarity_with_a_useless_stitch_is_named():
    a, b, data = quiet_world()
    found = nk.stitch_all(a, b, data, data, ["least_squares", "permutation"], layers=["turn"])
    low = found["relative_accuracy(method=permutation)"]["turn", "turn"]
    assert found["cka"]["turn", "turn"] > 0.99
    assert low < 0.5
    said, same = sentences(found)
    assert "evaluated on the data on which they were fitted" in same
    assert (
        "a high similarity goes with a useless stitch (cka of 0.8 or more, relative accuracy below 0.5): turn" in said
    )


def test_a_baseline_that_fits_nothing_is_no_useless_stitch():
    a, b, data = quiet_world()
    found = nk.stitch_all(a, b, data, data, ["least_squares", "identity", "random(seed=1)"], layers=["turn"])
    assert found["relative_accuracy(method=random(seed=1))"]["turn", "turn"] < 0.5
    assert not any("useless" in warning for warning in sentences(found))


def test_test_examples_that_are_also_fitted_on_are_counted():
    a, b, data = quiet_world()
    some = [data[0], *((inputs + 1, labels) for inputs, labels in data[1:])]
    found = nk.stitch_all(a, b, data, some, ["least_squares"], layers=["turn"])
    count, total = len(data[0][0]), sum(len(inputs) for inputs, _ in data)
    told = f"{count:,} of the {total:,} test examples are also among the {total:,} of `data`, which flatters the result"
    assert sum(warning.startswith(told) for warning in sentences(found)) == 1


@pytest.mark.parametrize(
    "like, value, words",
    [
        (0.8, 0.49, "a high similarity goes with a useless stitch (cka of 0.8 or more, relative accuracy below 0.5): "
                    "x (cka 0.80; 0.49 by ridge)."),
        (0.49, 0.9, "a low similarity goes with a good stitch (cka below 0.5, relative accuracy of 0.9 or more): "
                    "x (cka 0.49; 0.90 by ridge)."),
        (0.79, 0.1, None), (0.9, 0.5, None), (0.5, 1.0, None), (0.1, 0.89, None),
    ],
)  # fmt: skip
def test_the_thresholds_are_those_of_the_sentence(like, value, words):
    said = list(map(str, contrasts([similarity(like)], stitches("relative_accuracy", value))))
    assert [sentence.startswith(words) for sentence in said] == ([True] if words else [])


@pytest.mark.parametrize(
    "like, value, words",
    [
        (0.4999, 0.9, "(cka 0.4999; 0.90 by ridge)"),
        (0.8, 0.49996, "(cka 0.80; 0.49996 by ridge)"),
        (0.4999999999999999, 1.0, "(cka 0.4999999999999999; 1.00 by ridge)"),
    ],
)
def test_a_number_is_not_rounded_to_the_other_side_of_its_limit(like, value, words):
    (said,) = map(str, contrasts([similarity(like)], stitches("relative_accuracy", value)))
    assert words in said


def test_many_layers_are_counted_not_listed():
    names = tuple(f"l{i}" for i in range(9))
    likes, values = np.full((9, 9), np.nan), np.full((9, 9), np.nan)
    np.fill_diagonal(likes, 0.95)
    np.fill_diagonal(values, 0.1)
    holes = {(x, y): NOT_ASKED for x in names for y in names if x != y}
    measure = table("cka", likes, names, missing=holes)
    judged = {"r": table("r", values, names, missing=holes, name="relative_accuracy", parameters={"method": "ridge"})}
    (said,) = map(str, contrasts([measure], judged))
    assert "l5 (cka 0.95; 0.10 by ridge), and 3 more." in said


def test_without_labels_the_warning_goes_by_agreement():
    (said,) = map(str, contrasts([similarity(0.9)], stitches("agreement", 0.2)))
    assert "agreement below 0.5" in said


def test_nothing_is_said_beside_a_distance():
    far = table("gulp", [[0.9]], higher_is_closer=False, bounds=(0, np.inf))
    assert not list(contrasts([far], stitches("relative_accuracy", 0.1)))


def test_every_score_has_a_meaning_and_no_measure_has_its_name():
    from netkin.measures import measures

    assert all(
        score.quantity.means.endswith(".") and score.quantity.cannot_see.endswith(".")
        for score in evaluating.SCORES.values()
    )
    assert not set(evaluating.SCORES) & set(measures())


def test_relative_accuracy_is_shown_from_zero_to_one_unless_it_is_more():
    assert Scale.of(table("r", [[0.9]], name="relative_accuracy", bounds=(0, np.inf))) == Scale(0, 1, True)
    above = Scale.of(table("r", [[1.2]], name="relative_accuracy", bounds=(0, np.inf)))
    assert (above.low, above.high, above.open_ended) == (0, 1.2, True)


def evaluation(**changes):
    numbers = dict.fromkeys(("accuracy", "accuracy_b", "cross_entropy", "agreement", "r2", "cka", "cca", "svcca"), 0.5)
    return Evaluation(**{"examples": 10, **numbers, **changes})


@pytest.mark.parametrize(
    "score, changes, reason",
    [
        ("accuracy", {"accuracy": None, "accuracy_b": None}, "the test data have no labels"),
        ("relative_accuracy", {"accuracy": None, "accuracy_b": None}, "the test data have no labels"),
        ("relative_accuracy", {"accuracy_b": 0.0}, "the second model gives no right answer on the test data"),
        ("r2", {"accuracy": None, "r2": None}, "the second model's activations do not vary over the test data"),
        ("r2", {"r2": -math.inf}, "it is no finite number on the test data"),
        ("stitched_cka", {"cka": None}, "the mapped activations do not vary over the test data"),
        ("stitched_cca", {"cca": None, "r2": None}, "the second model's activations do not vary over the test data"),
        ("stitched_svcca", {"accuracy": None, "svcca": None}, "the mapped activations do not vary over the test data"),
        ("cross_entropy", {"cross_entropy": math.inf},
         "the stitched network's answers lie too far from the second model's for a finite cross-entropy"),
        ("agreement", {"agreement": math.nan}, "it is no finite number on the test data"),
    ],
)  # fmt: skip
def test_each_score_has_its_own_reason_to_be_missing(score, changes, reason):
    found = {(("x", "y"), "ridge"): evaluation(**changes)}
    tables = score_tables((["x"], ["y"]), [("x", "y")], ["ridge"], list(evaluating.SCORES), found)
    assert tables[f"{score}(method=ridge)"].missing == {("x", "y"): reason}


def test_unknown_scores_and_none_are_refused():
    assert evaluating.known_scores(["r2", "r2"]) == ("r2",)
    with refused(InvalidValue, "scores"):
        evaluating.known_scores([])
    with pytest.raises(UnknownName, match="no score named 'agreements'; did you mean 'agreement'"):
        evaluating.known_scores("agreements")


def table(id, values, names=("x",), **changes):
    facts = {"name": id, "parameters": {}, "higher_is_closer": True, "bounds": (0, 1), "symmetric": True}
    words = {"convention": "", "statistic": "Moments"}
    return table_of(id=id, layers_a=names, layers_b=names, values=values, **(facts | words | changes))


def similarity(value):
    return table("cka", [[value]])


def stitches(name, value):
    id = f"{name}(method=ridge)"
    return {id: table(id, [[value]], name=name, parameters={"method": "ridge"}, bounds=(0, np.inf))}
