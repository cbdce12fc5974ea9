"""Fitting: how often the models run, and maps that are read from saved statistics."""

from collections import Counter

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.stitching import fit_all
from netkin.errors import FileError, InvalidValue, UnknownName
from quickly import slow_but
from refusals import refusals, refused
from stitching_worlds import Maps, Rows, built, drawn, labelled
from table_worlds import sentences

IMAGES = (3, 12, 12)


class Counted(nn.Module):
    """Stands before the first layer and notes of how many examples each run of the model is."""

    def __init__(self, inner, runs):
        super().__init__()
        self.inner, self.runs = inner, runs

    def forward(self, x):
        self.runs[len(x)] += 1
        return self.inner(x)


@pytest.fixture
def counted():
    """Return two models with labelled batches of 40, and the runs of each."""
    models, runs = (built(Maps), built(Maps, seed=1)), (Counter(), Counter())
    data = labelled(models[1], *IMAGES)
    for model, own in zip(models, runs, strict=True):
        model.front = Counted(model.front, own)
    return *models, data, runs


def test_a_sweep_runs_each_model_three_times_on_a_batch_and_a_few_times_on_few_examples(counted):
    a, b, data, runs = counted
    found = nk.stitch_all(a, b, data, data, ["least_squares", "procrustes"], layers=["mid", "after", "out"])
    assert not any(table.missing.keys() & {("mid", "mid")} for table in found.tables.values())
    for own in runs:  # for the map, for the similarity and for the evaluation
        assert own[40] == 3 * len(data)
    few = [sum(count for size, count in own.items() if size < 40) for own in runs]
    assert few == [4, 5]


def test_many_direct_stitches_take_one_run_of_each_model_on_a_batch(counted):
    a, b, data, runs = counted
    fit_all(a, b, [("mid", "mid"), ("after", "after")], data, ["least_squares", "ridge", "permutation"])
    assert [own[40] for own in runs] == [len(data)] * 2
    assert [sum(own.values()) - own[40] for own in runs] == [2, 3]


def test_a_single_stitch_stops_the_first_model_at_its_layer(counted):
    a, b, data, runs = counted
    nk.stitch(a, "mid", b, "mid", data, test=data)
    assert [own[40] for own in runs] == [2 * len(data)] * 2
    assert [sum(own.values()) - own[40] for own in runs] == [2, 3]


@pytest.mark.parametrize("how", ["least_squares", "procrustes", "lasso", "ridge(affine=False)"])
def test_maps_are_read_from_saved_statistics(counted, how, tmp_path):
    a, b, data, runs = counted
    options = {"shape": "positions", "layers": ["mid", "after"], "pairs": "all"}
    nk.collect(a, b, data, measures=["cka"], **options).save(tmp_path / "ab.netkin")
    before = [own[40] for own in runs]
    kept = nk.load(tmp_path / "ab.netkin")
    found = nk.stitch(a, "mid", b, "after", data, how, statistics=kept)
    assert [own[40] for own in runs] == before
    expected = nk.stitch(a, "mid", b, "after", data, how)
    assert torch.allclose(found.map.weight, expected.map.weight, atol=1e-7)
    assert torch.allclose(found.map.bias, expected.map.bias, atol=1e-6)
    assert found.examples == expected.examples == 120


def test_maps_that_shrink_are_read_where_they_were_averaged():
    a, b = built(Maps), built(Maps, seed=1, stride=2)
    data = drawn(60, *IMAGES)
    kept = nk.collect(a, b, data, measures=["cka"], shape="positions", resize="average", layers=["mid"])
    found = fit_all(a, b, [("mid", "mid")], data, statistics=kept)[("mid", "mid"), "least_squares"]
    expected = nk.stitch(a, "mid", b, "mid", data)
    assert torch.allclose(found.map.weight, expected.map.weight, atol=1e-7)
    with refused(InvalidValue, "statistics"):
        nk.stitch(a, "mid", b, "mid", data, resize="bilinear", statistics=kept)
    back = nk.collect(b, a, data, measures=["cka"], shape="positions", resize="average", layers=["mid"])
    with refused(InvalidValue, "statistics"):
        nk.stitch(b, "mid", a, "mid", data, statistics=back)


def test_statistics_of_something_else_are_refused():
    a, b, data = built(Maps), built(Maps, seed=1), drawn(60, *IMAGES)
    pooled = nk.collect(a, b, data, measures=["cka"], layers=["mid"])
    refusals(
        (lambda: nk.stitch(a, "mid", b, "mid", data, statistics=pooled), InvalidValue, "statistics"),
        (lambda: nk.stitch(a, "after", b, "after", data, statistics=pooled), UnknownName, "statistics"),
    )
    other = built(Maps, seed=2)
    with refused(InvalidValue, "statistics"):
        nk.stitch(a, "mid", other, "mid", data, statistics=pooled)
    with refused(InvalidValue, "statistics"):
        nk.stitch(a, "mid", other, "mid", data, statistics=[pooled, nk.collect(b, other, data, layers=["mid"])])
    for strange in (3, {("a", "b"): pooled}, [pooled, 3]):
        with refused(InvalidValue, "statistics"):
            nk.stitch(a, "mid", b, "mid", data, statistics=strange)
    kernels = nk.collect(a, b, data, measures=["cka_minibatch"], layers=["mid"], shape="positions")
    with refused(InvalidValue, "statistics"):
        nk.stitch(a, "mid", b, "mid", data, statistics=kernels)


def test_pooled_maps_are_read_for_a_layer_of_rows():
    a, b, data = built(Maps), built(Maps, seed=1), drawn(60, *IMAGES)
    kept = nk.collect(a, b, data, measures=["cka"], layers={"a": ["mid"], "b": ["out"]}, pairs="all")
    found = nk.stitch(a, "mid", b, "out", data, statistics=kept)
    assert torch.allclose(found.map.weight, nk.stitch(a, "mid", b, "out", data).map.weight, atol=1e-7)


def test_rows_are_read_as_they_are():
    a, b = built(Rows), built(Rows, seed=1)
    data = labelled(b, 5)
    kept = nk.collect(a, b, data, measures=["cka"], layers=["mid"])
    found = nk.stitch(a, "mid", b, "mid", data, statistics=kept)
    assert torch.allclose(found.map.weight, nk.stitch(a, "mid", b, "mid", data).map.weight, atol=1e-7)


def test_a_sweep_reads_its_maps_from_a_file_and_runs_the_models_for_the_scores_alone(counted, tmp_path):
    a, b, data, runs = counted
    layers, hows = ["mid", "after"], ["least_squares", "procrustes"]
    nk.collect(a, b, data, layers=layers, shape="positions").save(tmp_path / "ab.netkin")
    expected = nk.stitch_all(a, b, data, data, hows, layers=layers)
    for own in runs:
        own.clear()
    found = nk.stitch_all(a, b, None, data, hows, layers=layers, statistics=tmp_path / "ab.netkin")
    assert [own[40] for own in runs] == [2 * len(data)] * 2  # for the similarity and for the evaluation
    for name, table in expected.tables.items():
        assert found[name].corresponding() == pytest.approx(table.corresponding(), abs=1e-6)
    assert found.provenance["fitting examples"] == "120"
    assert found.provenance["fitted on"] == "statistics of list"
    assert any("the data on which they were fitted" in said for said in sentences(found))
    others = [(inputs + 1, labels) for inputs, labels in data]
    apart = nk.stitch_all(a, b, data, others, layers=layers, statistics=nk.load(tmp_path / "ab.netkin"))
    assert not any("the data on which they were fitted" in said for said in sentences(apart))


def test_layers_that_statistics_lack_are_holes_of_a_sweep_and_none_at_all_are_refused():
    a, b = built(Maps), built(Maps, seed=1)
    data = labelled(b, *IMAGES)
    kept = nk.collect(a, b, data, layers=["mid"], shape="positions")
    found = nk.stitch_all(a, b, data, data, layers=["mid", "after"], statistics=kept)
    table = found["agreement(method=least_squares)"]
    assert "hold no layer 'after' of 'a'; collect with layers that name it" in table.missing["after", "after"]
    assert table["mid", "mid"] == nk.stitch_all(a, b, data, data, layers=["mid"])[table.id]["mid", "mid"]
    with pytest.raises(UnknownName, match="hold no layer 'after' of 'a'"):
        nk.stitch_all(a, b, data, data, layers=["after"], statistics=kept)
    both = nk.collect(a, b, data, layers=["mid", "after"], shape="positions", pairs="corresponding")
    with pytest.raises(
        InvalidValue, match="no moments of 'mid' of 'a' and 'after' of 'b' together; collect with pairs="
    ):
        nk.stitch(a, "mid", b, "after", data, statistics=both)


def test_statistics_alone_give_no_training_and_no_evaluation():
    a, b, data = built(Rows), built(Rows, seed=1), drawn(60, 5)
    kept = nk.collect(a, b, data, layers=["mid"])
    refusals(
        (lambda: nk.stitch_all(a, b, statistics=kept), InvalidValue, "data"),
        (lambda: nk.stitch(a, "mid", b, "mid", None, "task_loss", data, statistics=kept), InvalidValue, "data"),
        (lambda: nk.stitch_all(a, b, test=data), InvalidValue, "data"),
    )
    one = nk.stitch(a, "mid", b, "mid", test=data, statistics=kept)
    assert torch.allclose(one.map.weight, nk.stitch(a, "mid", b, "mid", data).map.weight, atol=1e-7)


def test_products_in_float32_are_refused_where_units_nearly_depend_on_each_other():
    a, b, data = built(Rows).float(), built(Rows, seed=1).float(), drawn(60, 5).float()
    with torch.no_grad():  # two units of the layer that differ by little
        for weight in (a.mid.weight, a.mid.bias):
            weight[1] = weight[0] * (1 + 1e-4)
        a.mid.weight[1, 0] += 1e-3
    coarse = nk.collect(a, b, data, measures=["cka"], layers=["mid"])
    with refused(InvalidValue, "statistics"):
        nk.stitch(a, "mid", b, "mid", data, statistics=coarse)
    nk.stitch(a, "mid", b, "mid", data, "procrustes", statistics=coarse)
    fine = nk.collect(a, b, data, measures=["linear_regression_r2"], layers=["mid"])
    found = nk.stitch(a, "mid", b, "mid", data, statistics=fine).map.weight
    assert torch.allclose(found, nk.stitch(a, "mid", b, "mid", data).map.weight, rtol=1e-5, atol=1e-5)


def test_a_saved_sweep_goes_on_with_the_same_statistics_alone(tmp_path):
    a, b = built(Rows), built(Rows, seed=1)
    data, save = labelled(b, 5), tmp_path / "sweep.netkin"
    kept, other = (nk.collect(a, b, some, layers=["mid", "after"]) for some in (data, data[:2]))
    nk.stitch_all(a, b, test=data, layers=["mid"], statistics=kept, save=save)
    more = nk.stitch_all(a, b, test=data, layers=["mid", "after"], statistics=kept, save=save)
    assert more == nk.load(save)
    assert not more["agreement(method=least_squares)"].missing.keys() & {("mid", "mid"), ("after", "after")}
    with pytest.raises(FileError, match="differs in fitting data"):
        nk.stitch_all(a, b, test=data, layers=["mid", "after"], statistics=other, save=save)


def test_statistics_serve_both_orders_of_their_models(counted):
    a, b, data, runs = counted
    kept = nk.collect(a, b, data, layers={"a": ["mid"], "b": ["after"]}, pairs="all", shape="positions")
    before = [own[40] for own in runs]
    found = nk.stitch(b, "after", a, "mid", data, statistics=kept)
    assert [own[40] for own in runs] == before
    expected = nk.stitch(b, "after", a, "mid", data)
    assert torch.allclose(found.map.weight, expected.map.weight, atol=1e-7)
    assert torch.allclose(found.map.bias, expected.map.bias, atol=1e-6)


@pytest.mark.slow
def test_many_models_are_stitched_from_the_statistics_of_each_two(tmp_path):
    models = {name: built(Rows, seed=seed) for seed, name in enumerate("xyz")}
    data, layers = labelled(models["x"], 5), ["mid", "after"]
    expected = nk.stitch_many(models, data, data, layers=layers)
    nk.collect(models["x"], models["y"], data, layers=layers).save(tmp_path / "xy.netkin")
    kept = [nk.collect(models[x], models[y], data, layers=layers) for x, y in (("z", "x"), ("y", "z"))]
    found = nk.stitch_many(models, test=data, layers=layers, statistics=[tmp_path / "xy.netkin", *kept])
    assert found.keys() == expected.keys()
    for pair, one in expected.items():
        for name, table in one.tables.items():
            assert found[pair][name].corresponding() == pytest.approx(table.corresponding(), abs=1e-6)
        assert found[pair].provenance["fitted on"] == "statistics of list"
    with pytest.raises(InvalidValue, match="no `statistics` are of 'x' and 'y' together"):
        nk.stitch_many(models, test=data, layers=layers, statistics=kept)


class Branching(nn.Module):
    """Can't be cut, as its way depends on the values."""

    def __init__(self):
        super().__init__()
        self.front, self.mid, self.out = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.mid(self.front(x))
        return self.out(x if x.sum() > 0 else -x)


@pytest.mark.parametrize("kind", slow_but([Maps, Branching], Branching))
@pytest.mark.parametrize("case", ["two", "one", "apart", "saved", "trained"])
def test_an_explained_sweep_takes_as_many_forward_passes_as_were_announced(kind, case):
    a, b = built(kind), built(kind, seed=1)
    b = a if case == "one" else b
    shape = IMAGES if kind is Maps else (5,)
    data, runs = labelled(b, *shape), Counter()
    options = {"layers": ["mid", "out"], "methods": ["least_squares", "procrustes"]}
    for model in dict.fromkeys((a, b)):
        model.front = Counted(model.front, runs)
    if case == "saved":
        options["statistics"] = nk.collect(
            a, b, data, layers=["mid", "out"], shape="positions" if kind is Maps else None
        )
    given = {"two": (data,), "one": (data, data), "apart": (data, data[:1]), "saved": (None, data)}.get(
        case, (data, data[:2])
    )
    if case == "trained":  # whose training itself runs on 39 examples and is not counted
        options["methods"], given = ["task_loss(epochs=1)", "ridge"], ([(x[:39], y[:39]) for x, y in data], data[:2])
    plan = nk.explain_stitch(a, b, *given, **options)
    runs.clear()
    nk.stitch_all(a, b, *given, **options)
    if case == "trained":
        assert plan.passes == runs[40] + 2 * len(data)
        assert plan.examples == 40 * runs[40] + 39 * 2 * len(data)
    else:
        assert plan.passes == runs[40]
        assert plan.examples == 40 * runs[40]
    assert f"forward passes: {plan.passes}, of {plan.examples:,} examples in all" in str(plan)
