"""Sweeps: all pairs and methods from one pass, holes with reasons, several models, and what is refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.stitching import TaskLoss, evaluating, fit_all
from netkin.applications.stitching.request import find_method, find_methods
from netkin.errors import InvalidValue, NameClash, NoValue, UnknownName
from netkin.results.labels import NOT_ASKED
from quickly import slow_after
from refusals import refusals, refused
from table_worlds import sentences
from task_loss_worlds import convnet, images, perceptron, seeded, two_perceptrons

LEAST = "relative_accuracy(method=least_squares)"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.inner(x)) + x


@pytest.fixture(scope="module")
def world():
    return two_perceptrons(examples=200)


def test_every_number_is_that_of_a_single_stitch(world):
    a, b, data = world
    hows = ["least_squares", "procrustes", "reduced_rank(k=2)", "random", "task_loss(steps=3, seed=3)"]
    found = nk.stitch_all(a, b, data, data[:2], hows, scores=list(evaluating.SCORES), seed=3)
    for how in hows:
        for layer in "012":
            alone = nk.stitch(a, layer, b, layer, data, how, data[:2], **({} if "task" in how else {"seed": 3}))
            own = alone.evaluation.as_dict()
            own |= {f"stitched_{name}": own[name] for name in ("cka", "cca", "svcca")}
            for name in evaluating.SCORES:
                assert found[f"{name}(method={how})"][layer, layer] == pytest.approx(own[name], abs=1e-5)


def test_the_similarities_are_those_of_a_comparison_place_by_place():
    a, b, data = convnet(0), convnet(1), images()
    found = nk.stitch_all(a, b, data, data, layers=["2", "6"], measures=["cka", "svcca"], pairs="all")
    beside = nk.compare(
        a, b, data, ["cka", "svcca"], layers=["2", "6"], shape="positions", resize="average", names=("a", "b")
    )
    for measure in ("cka", "svcca"):
        np.testing.assert_allclose(found[measure].values, beside[measure].values)
    pooled = nk.stitch_all(a, b, data, data, layers=["2", "6"], shape="pool")
    assert pooled.shapes_a == {"2": "pool", "6": "pool"}
    assert found.widths_a == {"2": 4, "6": 5}


def counting(model):
    """Count the examples that the first layer of a model sees."""
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    return seen


def test_fitting_and_judging_take_one_pass_each_however_many_stitches():
    a, b, data = convnet(0), convnet(1), images()
    seen, runs = (counting(a), counting(b)), []
    for hows in (["least_squares"], ["least_squares", "procrustes", "permutation"]):
        nk.stitch_all(a, b, data, data, hows, layers=["2", "6"], pairs="all")
        runs.append([sum(one) for one in seen])
        for one in seen:
            one.clear()
    assert runs[0] == runs[1]
    assert max(runs[0]) < 4 * 60  # fitting, judging, similarities, and a few examples to try things out


def test_layers_that_cannot_be_joined_are_holes_with_their_reason():
    a, b, data = convnet(0), convnet(1), images()
    found = nk.stitch_all(a, b, data, data, ["least_squares", "reduced_rank(k=4)"], layers=["2", "6", "9"], pairs="all")
    assert found.complete
    table = found[LEAST]
    assert np.isfinite(table.values).sum() == 7
    assert table.missing["9", "2"].startswith("rows have no positions, so rows of width 3 can't be stitched into maps")
    narrow = found["relative_accuracy(method=reduced_rank(k=4))"]
    assert narrow.missing["2", "9"] == "`k` must lie between 1 and the smaller width, 3; got 4."
    assert np.isfinite(narrow["2", "6"])


def test_a_layer_with_a_path_around_it_is_a_hole_and_its_block_is_not():
    with seeded(0):
        nets = [nn.Sequential(nn.Linear(6, 8), Block(8), nn.Linear(8, 3)).eval() for _ in range(2)]
    data = [x for x, _ in two_perceptrons(examples=100)[2]]
    found = nk.stitch_all(*nets, data, data, pairs=[("1", "1"), ("1.inner", "1.inner")])
    agreement = found["agreement"]
    assert np.isfinite(agreement["1", "1"])
    assert "choose '1', which encloses both" in agreement.missing["1.inner", "1.inner"]
    assert agreement.missing["1", "1.inner"] == NOT_ASKED


def test_a_dead_layer_is_a_hole(world):
    _, b, data = world
    dead = perceptron(5)
    with torch.no_grad():
        dead[0].bias.fill_(-1e3)
    found = nk.stitch_all(dead, b, data, data)
    assert found[LEAST].missing["1", "1"].startswith("layer '1' of 'a' is constant over the 200 examples (width 8)")
    assert np.isfinite(found[LEAST]["0", "0"])


def test_without_labels_agreement_is_there_and_accuracy_is_a_hole(world):
    a, b, data = world
    inputs = torch.cat([x for x, _ in data])
    found = nk.stitch_all(a, b, inputs, inputs)
    assert found[LEAST].missing["1", "1"] == "the test data have no labels"
    assert np.isfinite(found["agreement(method=least_squares)"]["1", "1"])


def test_a_stitch_that_diverges_is_a_hole_and_the_others_stay(world):
    a, b, data = world
    ways = ["least_squares", TaskLoss(steps=40, lr=1e30)]
    found = nk.stitch_all(a, b, data, data, ways, layers="1")
    assert found.complete
    assert np.isfinite(found[LEAST]["1", "1"])
    (reason,) = found[f"relative_accuracy(method={ways[1]})"].missing.values()
    assert "NaN or Inf" in reason


def test_models_are_left_as_they_were(world):
    a, b, data = convnet(0).train(), convnet(1).train(), images()
    before = [copy.deepcopy(model.state_dict()) for model in (a, b)]
    state = torch.get_rng_state()
    nk.stitch_all(a, b, data, data, ["least_squares", "task_loss(steps=2)"], layers=["2", "6"])
    for model, then in zip((a, b), before, strict=True):
        assert model.training
        assert all(torch.equal(tensor, then[name]) for name, tensor in model.state_dict().items())
        assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())


def test_stitches_judged_on_their_own_data_are_told_so(world):
    a, b, data = world
    said = sentences(nk.stitch_all(a, b, data))[-1]
    assert said.startswith(
        "the stitches are evaluated on the data on which they were fitted, which flatters them; give"
    )
    assert said.endswith("other data as `test`.")


@pytest.mark.parametrize(
    "limits, judged",
    slow_after(1, [({}, 200), ({"examples": 60}, 60), ({"examples": 60, "test_examples": 70}, 70)], several=True),
)
def test_without_test_data_the_examples_of_the_fitting_judge(world, limits, judged):
    a, b, data = world
    found = nk.stitch_all(a, b, data, None, ["least_squares", "task_loss(steps=1)"], **limits)
    assert found.examples == judged
    for how in ("least_squares", "task_loss(steps=1)"):
        assert found[f"agreement(method={how})"].exactness == f"on {judged} test examples"
    alone = nk.stitch(a, "1", b, "1", data, examples=limits.get("examples")).evaluate(data, examples=judged)
    assert found["agreement(method=least_squares)"]["1", "1"] == alone.agreement
    beside = nk.compare(a, b, data, examples=judged, pairs="corresponding")
    assert found["cka"]["1", "1"] == pytest.approx(beside["1", "1"])


def test_what_is_easily_misread_is_told_once(world):
    a, b, data = world
    said = sentences(nk.stitch_all(a, b, data, data, examples=7))
    (few,) = [one for one in said if "fewer than the 9 unknowns for each neuron" in one]
    assert few.endswith("This holds for 2 stitches.")
    wrong = [(x, (labels + 1) % 3) for x, labels in data]
    (doubt,) = [one for one in sentences(nk.stitch_all(a, b, data, wrong)) if "no more than chance" in one]
    assert doubt.startswith("the second model itself gets 0.0% of 200 examples right")


def test_test_examples_limit_the_test_data_alone(world):
    a, b, data = world
    found = nk.stitch_all(a, b, data, data, test_examples=30)
    assert (found.examples, found.provenance["fitting examples"]) == (30, "200")
    assert found["agreement"].exactness == "on 30 test examples"


def test_a_function_hears_of_the_progress_with_its_end_where_the_data_tell(world):
    a, b, data = world
    heard = {}
    hows, note = ["least_squares", "task_loss(steps=3)"], lambda done, total, what: heard.update({what: (done, total)})
    nk.stitch_all(a, b, data, data, hows, layers="0", test_examples=30, progress=note)
    assert heard["fitting"] == (200, 200)
    assert heard["evaluating"] == (30, 30)
    assert (heard["training"], heard["on the task loss"]) == ((3, 3), (1, 1))
    heard.clear()
    nk.stitch_many([a, b], data, data, layers="0", progress=note)
    assert heard["stitching"] == (2, 2)
    heard.clear()
    nk.stitch(a, "0", b, "0", data, progress=note)
    assert heard == {"fitting": (200, 200)}


def test_each_stitch_is_handed_over_as_one_made_alone(world):
    a, b, data = world
    made = []
    nk.stitch_all(a, b, data, data, ["random", "task_loss(steps=2)"], layers="1", seed=3, each=made.append)
    for one, how in zip(made, ["random", "task_loss(steps=2)"], strict=True):
        alone = nk.stitch(a, "1", b, "1", data, how, data, seed=3)
        assert (one.method, one.examples, one.layers) == (alone.method, alone.examples, alone.layers)
        assert torch.equal(one.map.weight, alone.map.weight)
        assert one.evaluation == alone.evaluation
        assert len(one.history) == len(alone.history)


def test_a_saved_sweep_hands_over_all_stitches_again(world, tmp_path):
    a, b, data = world
    for _ in range(2):
        made = []
        nk.stitch_all(a, b, data, data, each=made.append, save=tmp_path / "ab.netkin")
        assert [one.layers for one in made] == [("0", "0"), ("1", "1"), ("2", "2")]


def test_stitches_into_a_model_of_double_precision_are_as_precise():
    a, _, data = two_perceptrons(torch.float64, examples=200)
    found = nk.stitch_all(a, a, data, data, layers="0", scores="r2")
    assert 1 - found["r2"]["0", "0"] < 1e-20


@pytest.mark.parametrize(
    "layers, pairs, shape",
    [
        (["0", "4"], "corresponding", "positions"),
        (["0", "4", "7"], "all", "positions, larger maps averaged down"),
    ],
)
def test_maps_are_said_to_be_averaged_down_only_where_they_are(layers, pairs, shape):
    a, b, data = convnet(0), convnet(1), images()
    found = nk.stitch_all(a, b, data, data, layers=layers, pairs=pairs)
    assert set(found.shapes_a.values()) == {shape}


def test_tables_are_found_by_a_part_of_their_id(world):
    a, b, data = world
    found = nk.stitch_all(a, b, data, data, ["reduced_rank(k=2)"], layers="1")
    assert found["agreement"].id == "agreement(method=reduced_rank(k=2))"
    assert found["agreement(method=reduced_rank(k=2))"] is found["agreement"]
    assert found["agreement"].quantity.parameters == {"method": "reduced_rank(k=2)"}


def test_the_long_table_has_only_pairs_that_were_asked_for(world):
    pytest.importorskip("pandas")
    a, b, data = world
    frame = nk.stitch_all(a, b, data, data, scores="agreement").to_pandas()
    assert frame["layer_a"].tolist() == frame["layer_b"].tolist() == ["0", "1", "2"] * 2


def test_how_the_models_were_cut_is_told(world):
    a, b, data = world
    told = nk.stitch_all(a, b, data, data, layers="1").provenance
    assert "nothing before it is computed" in told["cut after '1'"]
    assert told["fitting examples"] == "200"


# --- several models ---------------------------------------------------------------------------------------------------


def test_all_ordered_pairs_of_several_models_and_their_spread(world):
    a, b, data = world
    many = nk.stitch_many({"a": a, "b": b, "c": perceptron(7)}, data, data, layers="1", scores="agreement")
    assert list(many) == [("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b")]
    values = [one["agreement"]["1", "1"] for one in many.values()]
    table = many.spread()["agreement(method=least_squares)"]
    assert table["1", "1"] == pytest.approx(np.mean(values))
    assert table.errors[0, 0] == pytest.approx(np.std(values, ddof=1))
    assert "standard deviation over 6 pairs of models" in str(many.spread())


def test_a_matrix_for_each_measure_where_layers_meet_many(world):
    a, b, data = world
    many = nk.stitch_many([a, b], data, data, pairs="all", scores="agreement")
    assert "agreement(method=least_squares): score of a stitch" in str(many.spread())


def test_models_without_a_common_layer_have_no_spread(world):
    a, b, data = world
    other = nn.Sequential()
    for name, layer in zip("xyz", b, strict=True):
        other.add_module(name, layer)
    many = nk.stitch_many([a, other], data, data)
    with pytest.raises(NoValue, match="share no names of layers"):
        many.spread()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, fault, words",
    [
        ({"methods": []}, InvalidValue, "`methods` is empty"),
        ({"methods": "least_square"}, UnknownName, "did you mean 'least_squares'"),
        ({"methods": "task_loss(epoch=1)"}, UnknownName, "did you mean 'epochs'"),
        (
            {"methods": TaskLoss(resume="x")},
            InvalidValue,
            "`resume` is for a single stitch; a sweep continues by `save`",
        ),
        ({"scores": "agreements"}, UnknownName, "no score named 'agreements'; did you mean 'agreement'"),
        ({"scores": []}, InvalidValue, "`scores` is empty; name at least one, e.g. 'relative_accuracy'."),
        ({"examples": 0}, InvalidValue, "`examples` must be a whole number of 1 or more; got 0."),
        ({"test_examples": 0}, InvalidValue, "`test_examples` must be a whole number of 1 or more; got 0."),
        ({"pairs": [("1", "11")]}, UnknownName, "no layer named '11'"),
        ({"pairs": "some"}, UnknownName, "`pairs` is 'all', 'corresponding', 'band:2' or a list"),
        ({"layers": {"c": "1"}}, InvalidValue, "`layers` names 'c'; the models are 'a', 'b'"),
        ({"names": ("x", "x")}, NameClash, "both models are named 'x'"),
    ],
)
def test_what_makes_no_sense_is_refused(world, options, fault, words):
    a, b, data = world
    with pytest.raises(fault, match=words):
        nk.stitch_all(a, b, data, data, **options)


def test_data_that_can_be_read_once_are_refused(world):
    a, b, data = world
    refusals(
        (lambda: nk.stitch_all(a, b, data, iter(data)), InvalidValue, "test"),
        (lambda: nk.stitch_all(a, b, None), InvalidValue, "data"),
        (lambda: nk.stitch_many([a], data), InvalidValue, "models"),
    )


def test_methods_are_written_alike_and_taken_once():
    ways = find_methods(["reduced_rank( k = 8 )", "reduced_rank(k=8)", "random", "task_loss"], seed=2)
    assert list(ways) == ["reduced_rank(k=8)", "random", "task_loss(seed=2)"]
    assert [way.start for way in ways.values()] == ["reduced_rank(k=8)", "random(seed=2)", "least_squares"]


def test_a_single_stitch_takes_its_training_as_a_record_too(world):
    a, b, data = world
    one, other = (nk.stitch(a, "1", b, "1", data, how) for how in (nk.TaskLoss(steps=2), "task_loss(steps=2)"))
    assert torch.equal(one.map.weight, other.map.weight)
    assert one.method == other.method == "task_loss(steps=2)"


def test_options_of_a_training_stand_in_one_place():
    assert find_method("task_loss", 2, {"epochs": 3}).id == "task_loss(epochs=3, seed=2)"
    assert find_method(TaskLoss(epochs=3), 2).id == "task_loss(epochs=3)"
    refusals(
        (lambda: find_method(TaskLoss(epochs=3), 2, {"rank": 1}), InvalidValue, "rank"),
        (lambda: find_method("ridge", 2, {"epochs": 3}), UnknownName, "epochs"),
    )


@pytest.mark.parametrize("test", [None, "data"])
def test_no_method_at_all_is_refused(world, test):
    a, b, data = world
    with refused(InvalidValue, "methods"):
        fit_all(a, b, [("1", "1")], data, [], data if test else None)
