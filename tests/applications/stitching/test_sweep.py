"""Sweeps: all pairs and methods from one pass, holes with reasons, what is kept when interrupted, and the warnings."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.stitching import TaskLoss, sweep, worth
from netkin.applications.stitching.asking import asked_ways, digest_of
from netkin.comparing.tabulating import INTERRUPTED, NOT_ASKED
from netkin.errors import NameClash, NoValue, UnknownName, ValueFault
from netkin.reporting.meanings import MEANINGS, STITCHES
from netkin.reporting.scales import Scale
from netkin.results import Comparison, Comparisons
from task_loss_worlds import convnet, images, perceptron, quiet_world, two_perceptrons

LEAST = "relative_accuracy(how=least_squares)"


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
    found = nk.stitch_all(a, b, data, data[:2], hows, scores=list(worth.SCORES), seed=3)
    for how in hows:
        for layer in "012":
            alone = nk.stitch(a, layer, b, layer, data, how, data[:2], **({} if "task" in how else {"seed": 3}))
            own = alone.evaluation.as_dict()
            own |= {f"stitched_{name}": own[name] for name in ("cka", "cca", "svcca")}
            for name in worth.SCORES:
                assert found[f"{name}(how={how})"][layer, layer] == pytest.approx(own[name], abs=1e-5)


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
    assert max(runs[0]) < 3 * 60 + 40  # fitting, judging, similarities, and a few examples to try things out


def test_layers_that_cannot_be_joined_are_holes_with_their_reason():
    a, b, data = convnet(0), convnet(1), images()
    found = nk.stitch_all(a, b, data, data, ["least_squares", "reduced_rank(k=4)"], layers=["2", "6", "9"], pairs="all")
    assert found.complete
    table = found[LEAST]
    assert np.isfinite(table.values).sum() == 7
    assert table.holes["9", "2"].startswith("rows have no places, so rows of width 3 can't be stitched into maps")
    narrow = found["relative_accuracy(how=reduced_rank(k=4))"]
    assert narrow.holes["2", "9"] == "`k` must lie between 1 and the smaller width, 3; got 4."
    assert np.isfinite(narrow["2", "6"])


def test_a_layer_with_a_path_around_it_is_a_hole_and_its_block_is_not():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 8), Block(8), nn.Linear(8, 3)).eval() for _ in range(2)]
    data = two_perceptrons(examples=100)[2]
    found = nk.stitch_all(*nets, data, data, pairs=[("1", "1"), ("1.inner", "1.inner")])
    assert np.isfinite(found[LEAST]["1", "1"])
    assert "choose '1', which encloses both" in found[LEAST].holes["1.inner", "1.inner"]
    assert found[LEAST].holes["1", "1.inner"] == NOT_ASKED


def test_a_dead_layer_is_a_hole(world):
    _, b, data = world
    dead = perceptron(5)
    with torch.no_grad():
        dead[0].bias.fill_(-1e3)
    found = nk.stitch_all(dead, b, data, data)
    assert "constant" in found[LEAST].holes["1", "1"] or "does not vary" in found[LEAST].holes["1", "1"]
    assert np.isfinite(found[LEAST]["0", "0"])


def test_without_labels_agreement_is_there_and_accuracy_is_a_hole(world):
    a, b, data = world
    inputs = torch.cat([x for x, _ in data])
    found = nk.stitch_all(a, b, inputs, inputs)
    assert found[LEAST].holes["1", "1"] == "the test data have no labels"
    assert np.isfinite(found["agreement(how=least_squares)"]["1", "1"])


def test_a_stitch_that_diverges_is_a_hole_and_the_others_stay(world):
    a, b, data = world
    ways = ["least_squares", TaskLoss(steps=40, rate=1e36)]
    found = nk.stitch_all(a, b, data, data, ways, layers="1")
    assert found.complete
    assert np.isfinite(found[LEAST]["1", "1"])
    (reason,) = found[f"relative_accuracy(how={ways[1]})"].holes.values()
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


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_a_high_similarity_with_a_useless_stitch_is_named():
    a, b, data = quiet_world()
    found = nk.stitch_all(a, b, data, data, ["least_squares", "random"], layers=["turn"])
    low = found["relative_accuracy(how=random)"]["turn", "turn"]
    assert found["cka"]["turn", "turn"] > 0.99
    assert low < 0.5
    (said,) = found.warnings
    assert (
        "a high similarity goes with a useless stitch (cka of 0.8 or more, relative accuracy below 0.5): turn" in said
    )


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
    said = list(worth.contrasts([similarity(like)], stitches("relative_accuracy", value)))
    assert [sentence.startswith(words) for sentence in said] == ([True] if words else [])


def test_many_layers_are_counted_not_listed():
    names = tuple(f"l{i}" for i in range(9))
    likes, values = np.full((9, 9), np.nan), np.full((9, 9), np.nan)
    np.fill_diagonal(likes, 0.95)
    np.fill_diagonal(values, 0.1)
    holes = {(x, y): NOT_ASKED for x in names for y in names if x != y}
    measure = table("cka", likes, names, holes=holes)
    judged = {"r": table("r", values, names, holes=holes, name="relative_accuracy", parameters={"how": "ridge"})}
    (said,) = worth.contrasts([measure], judged)
    assert "l5 (cka 0.95; 0.10 by ridge), and 3 more." in said


def test_without_labels_the_warning_goes_by_agreement():
    (said,) = worth.contrasts([similarity(0.9)], stitches("agreement", 0.2))
    assert "agreement below 0.5" in said


def test_nothing_is_said_beside_a_distance():
    far = table("gulp", [[0.9]], higher_is_closer=False, bounds=(0, np.inf))
    assert not list(worth.contrasts([far], stitches("relative_accuracy", 0.1)))


def test_stitches_judged_on_their_own_data_are_told_so(world):
    a, b, data = world
    assert any("judged on the very data they were fitted on" in said for said in nk.stitch_all(a, b, data).warnings)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_every_score_has_a_meaning_and_no_measure_has_its_name():
    assert set(STITCHES) == set(worth.SCORES)
    assert not set(STITCHES) & set(MEANINGS)


def test_tables_are_found_by_a_part_of_their_id(world):
    a, b, data = world
    found = nk.stitch_all(a, b, data, data, ["reduced_rank(k=2)"], layers="1")
    assert found["agreement"].id == "agreement(how=reduced_rank(k=2))"
    assert found["agreement(how=reduced_rank(k=2))"] is found["agreement"]
    assert found["agreement"].parameters == {"how": "reduced_rank(k=2)"}


def test_relative_accuracy_is_shown_from_zero_to_one_unless_it_is_more():
    assert Scale.of(table("r", [[0.9]], name="relative_accuracy", bounds=(0, np.inf))) == Scale(0, 1, True)
    above = Scale.of(table("r", [[1.2]], name="relative_accuracy", bounds=(0, np.inf)))
    assert (above.low, above.high, above.open_ended) == (0, 1.2, True)


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
    cells = many.spread()["agreement(how=least_squares)"]
    assert cells.means[0, 0] == pytest.approx(np.mean(values))
    assert cells.deviations[0, 0] == pytest.approx(np.std(values, ddof=1))
    text = str(many.spread())
    assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in text
    assert "standard deviation over 6 pairs of models" in text
    with pytest.raises(NoValue, match="no measure 'cca' here; there are cka, agreement"):
        many.spread()["cca"]


def test_a_matrix_for_each_measure_where_layers_meet_many(world):
    a, b, data = world
    many = nk.stitch_many([a, b], data, data, pairs="all", scores="agreement")
    assert not many.spread().is_profile
    assert "agreement(how=least_squares)\n" in str(many.spread())


def test_models_without_a_common_layer_have_no_spread(world):
    a, b, data = world
    other = nn.Sequential()
    for name, layer in zip("xyz", b, strict=True):
        other.add_module(name, layer)
    many = nk.stitch_many([a, other], data, data)
    with pytest.raises(NoValue, match="share no names of layers"):
        many.spread()


# --- stopping and going on --------------------------------------------------------------------------------------------


def interrupted_after(count, monkeypatch):
    """Let training be interrupted after so many stitches."""
    real, left = sweep.trained, [count]

    def some(*arguments, **options):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(*arguments, **options)

    monkeypatch.setattr(sweep, "trained", some)


def test_what_is_finished_is_kept(world, monkeypatch):
    a, b, data = world
    interrupted_after(1, monkeypatch)
    found = nk.stitch_all(a, b, data, data, ["least_squares", "task_loss(steps=2)"], partial=True)
    assert not found.complete
    assert np.isfinite(found[LEAST]["2", "2"])
    table = found["relative_accuracy(how=task_loss(steps=2))"]
    assert np.isfinite(table["0", "0"])
    assert table.holes["1", "1"] == INTERRUPTED
    assert "interrupted: some stitches were not reached, and have no value." in found.warnings


def test_without_partial_an_interruption_goes_through(world, monkeypatch):
    a, b, data = world
    interrupted_after(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        nk.stitch_all(a, b, data, data, "task_loss(steps=2)")


def test_a_saved_sweep_goes_on_where_it_was(world, monkeypatch, tmp_path):
    a, b, data = world
    asked = {"hows": ["least_squares", "task_loss(steps=2)"], "save": tmp_path / "ab.netkin"}
    whole = nk.stitch_all(a, b, data, data, asked["hows"])
    with monkeypatch.context() as context:
        interrupted_after(2, context)
        with pytest.raises(KeyboardInterrupt):
            nk.stitch_all(a, b, data, data, **asked)
    assert not Comparison.load(asked["save"]).complete
    with monkeypatch.context() as context:
        interrupted_after(1, context)  # the third and last
        found = nk.stitch_all(a, b, data, data, **asked)
    assert found.complete
    assert Comparison.load(asked["save"]) == found
    for name, own in whole.tables.items():
        np.testing.assert_allclose(found[name].values, own.values, atol=1e-6)


def test_other_models_or_data_begin_anew(world, monkeypatch, tmp_path):
    a, b, data = world
    save = tmp_path / "ab.netkin"
    nk.stitch_all(a, b, data, data, save=save)
    calls = []
    monkeypatch.setattr(sweep, "fitted", lambda *given, **options: calls.append(given))
    nk.stitch_all(a, b, data, data, save=save)  # all is there: nothing is fitted
    assert not calls
    monkeypatch.undo()
    other = nk.stitch_all(perceptron(9), b, data, data, save=save)
    assert other == Comparison.load(save)
    assert other[LEAST]["1", "1"] == pytest.approx(
        nk.stitch(perceptron(9), "1", b, "1", data, test=data).relative_accuracy
    )


def test_a_tour_goes_on_where_it_was(world, monkeypatch, tmp_path):
    a, b, data = world
    asked = {"hows": ["task_loss(steps=1)"], "layers": "1", "save": tmp_path / "many.netkin"}
    with monkeypatch.context() as context:
        interrupted_after(1, context)
        many = nk.stitch_many({"a": a, "b": b}, data, data, partial=True, **asked)
    assert [one.complete for one in many.values()] == [True, False]
    with monkeypatch.context() as context:
        interrupted_after(1, context)
        many = nk.stitch_many({"a": a, "b": b}, data, data, **asked)
    assert [one.complete for one in many.values()] == [True, True]
    assert list(Comparisons.load(asked["save"])) == [("a", "b"), ("b", "a")]


def test_the_digest_tells_inputs_and_labels_apart():
    data = images()
    (inputs, labels), *others = data
    assert digest_of(data) == digest_of(images())
    assert digest_of(data) != digest_of([(inputs, labels + 1), *others])
    assert digest_of(data) != digest_of(data, 30)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, fault, words",
    [
        ({"hows": []}, ValueFault, "`hows` is empty"),
        ({"hows": "least_square"}, UnknownName, "did you mean 'least_squares'"),
        ({"hows": "task_loss(epoch=1)"}, UnknownName, "did you mean 'epochs'"),
        ({"hows": TaskLoss(resume="x")}, ValueFault, "`resume` is for a single stitch; a sweep continues by `save`"),
        ({"scores": "agreements"}, UnknownName, "no score named 'agreements'; did you mean 'agreement'"),
        ({"pairs": [("1", "11")]}, UnknownName, "no layer named '11'"),
        ({"pairs": "some"}, UnknownName, "`pairs` is 'all', 'corresponding' or a list"),
        ({"layers": {"c": "1"}}, ValueFault, "`layers` names 'c'; the models are 'a' and 'b'"),
        ({"names": ("x", "x")}, NameClash, "both models are named 'x'"),
    ],
)
def test_what_makes_no_sense_is_refused(world, options, fault, words):
    a, b, data = world
    with pytest.raises(fault, match=words):
        nk.stitch_all(a, b, data, data, **options)


def test_data_that_can_be_read_once_are_refused(world):
    a, b, data = world
    with pytest.raises(ValueFault, match="`test` is an iterator.*pass a loader or a list"):
        nk.stitch_all(a, b, data, iter(data))
    with pytest.raises(ValueFault, match="`data` is missing"):
        nk.stitch_all(a, b, None)
    with pytest.raises(ValueFault, match="`stitch_many` needs at least two models; got 1"):
        nk.stitch_many([a], data)


def test_methods_are_written_alike_and_taken_once():
    ways = asked_ways(["reduced_rank( k = 8 )", "reduced_rank(k=8)", "random", "task_loss"], seed=2)
    assert [way.id for way in ways] == ["reduced_rank(k=8)", "random", "task_loss(seed=2)"]
    assert [way.start for way in ways] == ["reduced_rank(k=8)", "random(seed=2)", "least_squares"]


def table(id, values, names=("x",), **changes):
    facts = {"name": id, "parameters": {}, "higher_is_closer": True, "bounds": (0, 1), "symmetric": True}
    words = {"conventions": "", "statistic": "Moments"}
    return nk.results.Values(id=id, layers_a=names, layers_b=names, values=values, **(facts | words | changes))


def similarity(value):
    return table("cka", [[value]])


def stitches(name, value):
    id = worth.table_id(name, "ridge")
    return {id: table(id, [[value]], name=name, parameters={"how": "ridge"}, bounds=(0, np.inf))}
