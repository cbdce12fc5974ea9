import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from netkin.errors import InvalidValue, NoValue, UnknownName
from netkin.results import Comparison, Series, load
from refusals import refused
from table_worlds import sentences

STEPS = (0, 100, 200, 300, 400)
# each layer against its final state: rows are steps, the last of which is the final one
UPWARDS = np.array([[0.5, 0.2, 0.1], [0.95, 0.3, 0.2], [0.99, 0.92, 0.5], [0.99, 0.95, 0.93], [1, 1, 1]])


def series(made, own=UPWARDS, steps=STEPS, **changes):
    comparisons = []
    for step, values in zip(STEPS if len(steps) < len(own) else steps, own, strict=True):
        matrix = np.full((3, 3), 0.05) + np.diag(np.asarray(values) - 0.05)
        comparisons.append(made.comparison(made.table("svcca", values=matrix), a=f"step {step}", b=f"step {steps[-1]}"))
    return Series(**{"run": "toy", "steps": steps, "comparisons": comparisons, "final_step": steps[-1]} | changes)


@pytest.fixture
def world(made):
    return SimpleNamespace(series=lambda *given, **changes: series(made, *given, **changes), made=made)


def test_a_step_finds_its_comparison(world):
    one = world.series()
    assert one[100]["conv1", "conv1"] == pytest.approx(0.95)
    assert isinstance(one[0], Comparison)
    assert (len(one), list(one), 100 in one, 50 in one) == (5, list(STEPS), True, False)
    assert one.layers == ("conv1", "conv2", "head")
    assert one.measures == ("svcca",)


def test_an_unknown_step_is_refused(world):
    with pytest.raises(UnknownName, match="no step 50 in this series; it has 0, 100, 200, 300, 400"):
        world.series()[50]


def test_each_layer_is_read_against_its_own_final_state(world):
    np.testing.assert_allclose(world.series().own(), UPWARDS)
    np.testing.assert_allclose(world.series().own("svcca"), UPWARDS)
    assert world.series().to_numpy().shape == (5, 3, 3)


def test_layers_without_a_final_state_of_their_own_are_left_out(world):
    tables = [world.made.table(rows=("in", "mid", "out"), columns=("mid", "out"), values=v) for v in (
        [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], [[0.1, 0.2], [1.0, 0.4], [0.5, 1.0]])]  # fmt: skip
    one = Series(run="r", steps=(1, 2), comparisons=[world.made.comparison(t) for t in tables], final_step=2)
    assert one.layers == ("mid", "out")
    np.testing.assert_array_equal(one.own(), [[0.3, 0.6], [1, 1]])


def test_the_step_from_which_a_layer_stays_is_found(world):
    assert world.series().reached(0.9) == {"conv1": 100, "conv2": 200, "head": 300}
    assert world.series().reached(0.99) == {"conv1": 200, "conv2": None, "head": None}


def test_a_lucky_moment_does_not_count(world):
    own = UPWARDS.copy()
    own[0, 2] = 0.97
    assert world.series(own).reached(0.9)["head"] == 300


def test_the_final_step_does_not_count_as_arrival(world):
    assert world.series().reached(0.999) == {"conv1": None, "conv2": None, "head": None}
    only = world.series(UPWARDS[-1:], (400,))
    assert only.reached(0.1) == {"conv1": None, "conv2": None, "head": None}


def test_a_distance_is_there_at_or_below_the_threshold(world):
    facts = {"higher_is_closer": False, "bounds": (0, 2)}
    tables = [world.made.table("d", values=np.full((3, 3), v), **facts) for v in (1.5, 0.2, 0.0)]
    one = Series(run="r", steps=(1, 2, 3), comparisons=[world.made.comparison(t) for t in tables], final_step=3)
    assert set(one.reached(0.2).values()) == {2}
    with pytest.raises(InvalidValue, match="d lies between 0 and 2; a threshold of 3 does not"):
        one.reached(3)


def test_a_missing_value_is_never_there(world):
    holed = world.made.holed(values=[[np.nan, 0.1], [0.1, 0.95]], missing={("in", "in"): "constant"})
    last = world.made.holed(values=[[1, 0.1], [0.1, 1]], missing={})
    one = Series(run="r", steps=(1, 2), comparisons=[world.made.comparison(t) for t in (holed, last)], final_step=2)
    assert one.reached(0.9) == {"in": None, "out": 1}


def test_bottom_up_and_top_down_are_one_and_minus_one(world):
    assert world.series().bottom_up(0.9).tau == 1
    assert world.series(UPWARDS[:, ::-1]).bottom_up(0.9).tau == -1


def test_layers_that_never_arrive_tie_at_the_last_step(world):
    found = world.series().bottom_up(0.99)
    assert (found.never, found.layers) == (2, 3)
    assert found.tau == pytest.approx(2 / np.sqrt(6))
    with pytest.raises(NoValue, match="no order among 3 layers"):
        world.series().bottom_up(0.999)


def test_the_trend_of_some_layers_may_be_asked_for(world):
    one = world.series(UPWARDS[:, [0, 2, 1]])  # the layer in the middle settles last
    assert one.bottom_up(0.9).tau == pytest.approx(1 / 3)
    assert one.bottom_up(0.9, layers=["conv1", "conv2"]).tau == 1
    with refused(UnknownName, "layer"):
        one.bottom_up(0.9, layers=["haed"])


@pytest.mark.parametrize("there", [0, 2])
def test_layers_at_the_threshold_at_the_first_step_say_nothing_of_settling(world, there):
    own = UPWARDS.copy()
    own[:, there] = 1  # whether this is the lowest layer or the top one
    found = world.series(own).bottom_up(0.9)
    assert (found.tau, found.layers, found.early) == (1, 2, 1)
    assert "1 more there at the first step, left out" in str(found)
    one = world.series(np.column_stack([np.ones((5, 2)), UPWARDS[:, 2]]))
    with pytest.raises(NoValue, match=r"1 layer that reaches .* \(2 at the threshold at the first step are left out"):
        one.bottom_up(0.9)
    with pytest.raises(NoValue, match="all 3 layers reached it by the first step; choose"):
        world.series(np.ones((5, 3))).bottom_up(0.9)


def test_unrelated_networks_whose_similarity_falls_with_depth_do_not_settle_from_the_bottom_up(world):
    # five networks that share nothing: each is as far from the last as the others, lower layers less far
    own = np.vstack([np.tile([0.99, 0.95, 0.4], (4, 1)), np.ones(3)])
    with pytest.raises(NoValue, match="no order among 1 layer of which none reaches"):
        world.series(own).bottom_up(0.9)


def test_a_saved_series_comes_back_the_same(world, tmp_path):
    one = world.series(missing=(250,), unit="epoch", provenance={"data": "digits"})
    one.save(tmp_path / "run.netkin")
    assert Series.load(tmp_path / "run.netkin") == load(tmp_path / "run.netkin") == one
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != world.series()


def test_an_interrupted_series_says_so(world):
    assert world.series().complete
    assert not world.series(missing=(50, 60)).complete
    assert sentences(world.series(missing=(50, 60))) == ("interrupted: 2 of 7 steps are missing.",)


def test_a_data_frame_holds_the_layers_on_their_way(world):
    frame = world.series().to_pandas()
    assert frame.index.name == "step"
    assert frame.loc[100, "conv1"] == pytest.approx(0.95)


def test_with_several_measures_a_data_frame_has_a_row_for_each_number(world):
    tables = world.made.table("cka"), world.made.table("nbs")
    one = Series(run="r", steps=(1, 2), comparisons=[world.made.comparison(*tables)] * 2, final_step=2)
    frame = one.to_pandas()
    assert len(frame) == 2 * 2 * 9
    assert list(frame.columns[:3]) == ["step", "measure", "layer_a"]


def test_the_words_say_what_it_is(world, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert repr(world.series()) == "Series('toy', 5 steps to 400, measures=['svcca'], 3 layers)"
    assert str(world.series()).splitlines() == [
        "toy: each layer against its own final state at 5 steps, 0 to 400",
        "on digits: 1,797 examples, seed 0",
        "",
        "svcca: similarity (higher is closer), layers by steps",
        "          0   100   200   300   400",
        "conv1  0.50  0.95  0.99  0.99  1.00",
        "conv2  0.20  0.30  0.92  0.95  1.00",
        "head   0.10  0.20  0.50  0.93  1.00",
        "",
        "the step from which on a layer stays at or above a similarity",
        "       0.9  0.99  0.999",
        "conv1  100   200      –",
        "conv2  200     –      –",
        "head   300     –      –",
        "–  not before the last step",
        "bottom-up at 0.9: τ = 1.00 ± 0.00, p = 0.33 (3 layers)",
        "bottom-up at 0.99: τ = 0.82 ± 0.67, p = 0.67 (3 layers, 2 of them never before the end)",
        "bottom-up at 0.999: there is no order among 3 layers of which none reaches the threshold before the",
        "   end; choose another threshold, or compare more checkpoints.",
        "τ: 1 if layers settle from the bottom up, -1 if from the top down; p: p-value against random order",
        "   alone; networks that learn nothing may give a small one too, so compare with a control",
    ]


def test_one_reason_for_several_thresholds_is_given_once(world, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = str(world.series([UPWARDS[0], UPWARDS[-1]], (0, 100)))
    assert text.count("there is no order among 3 layers") == 1
    assert "bottom-up at 0.9, 0.99, 0.999: there is no order" in text


def test_of_many_steps_as_many_are_shown_as_fit(world, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    many = world.series([UPWARDS[-1]] * 41, tuple(range(0, 4100, 100)))
    text = str(many)
    assert ", layers by steps, 6 of 41 steps shown" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 60
