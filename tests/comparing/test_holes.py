"""Where a pair has no value there is a hole with its reason; where nothing can be trusted there is a refusal."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName
from netkin.measures import measures
from refusals import refusals
from table_worlds import sentences

EVERY = sorted(measures(matrices=True))


def test_a_constant_layer_is_a_hole_and_harms_no_other(worlds):
    X, Y = worlds.related(40, 4, 5)
    whole = nk.compare({"x": X}, {"y": Y}, measures=EVERY)
    comparison = nk.compare({"x": X, "still": np.full((40, 3), 2.5)}, {"y": Y}, measures=EVERY)
    for measure in comparison:
        assert comparison[measure]["x", "y"] == pytest.approx(whole[measure]["x", "y"], abs=1e-12), measure
    with pytest.raises(NoValue, match="cka has no value for 'still' and 'y': layer 'a/still' is constant over the 40"):
        comparison["cka"]["still", "y"]
    assert ("still", "y") in comparison["cka_minibatch"].missing
    assert all(reason for table in comparison.tables.values() for reason in table.missing.values())


@pytest.mark.parametrize("measure", ["cka", "cca_mean", "cka_rbf", "cka_minibatch(batch=16)"])
@pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")
def test_maps_of_different_sizes_are_holes_that_name_the_way_out(maps, images, measure):
    a, b = maps(), maps()
    layers = ["conv1", "conv2", "fc"]
    comparison = nk.compare(a, b, images[:16], measure, layers=layers, shape="positions")
    table = comparison.table()
    assert set(table.missing) == {(x, y) for x in layers for y in layers if x != y}
    assert table.missing["conv1", "conv2"] == (
        "layer 'conv1' of 'a' gives 64 rows an example and layer 'conv2' of 'b' 16; "
        """say resize="average" to average the larger map down, or use a shape with one row an example, """
        "such as 'pool' or 'mean'."
    )
    assert "resize" not in table.missing["fc", "conv2"]
    for layer in layers:
        rows = [nk.activations(model, layer, images[:16], shape="positions")[layer] for model in (a, b)]
        plain = measures()[table.quantity.name].function(*rows, **table.quantity.parameters)
        assert comparison[layer, layer] == pytest.approx(float(plain), abs=1e-5)


def test_where_nothing_meets_all_are_holes(worlds):
    maps = {"x": worlds.normal(9, 2, 4, 4)}, {"y": worlds.normal(9, 2, 2, 2)}
    comparison = nk.compare(*maps, measures=["cka", "cka_rbf", "cka_minibatch(batch=4)"], shape="positions")
    assert all(len(table.missing) == 1 for table in comparison.tables.values())
    assert comparison.examples == 9


@pytest.mark.parametrize("shape", ["pool", "flatten", "positions"])
@pytest.mark.parametrize("measure", ["cka", "cca_mean", "cka_rbf", "cka_minibatch(batch=16)", "cka_minibatch(batch=9)"])
@pytest.mark.parametrize("shift", [0, 1000])
def test_nan_is_refused_with_model_layer_batch_and_count(maps, images, shape, measure, shift):
    a, b = maps(), maps()
    images = images + shift
    images[20, 1, 3, 3] = 7777
    count = sum(rows.isnan().sum() for rows in nk_rows(b, spoilt(images), shape))
    with pytest.raises(InvalidValue, match=rf"layer 'conv1' of 'b' in batch 1 holds {count} NaN or Inf among"):
        nk.compare(a, b, list(images.split(16)), measure, layers={"a": "fc", "b": "conv1"},
                   shape=shape, forward=(None, lambda model, batch: model(spoilt(batch))))  # fmt: skip


@pytest.mark.parametrize("shape", ["pool", "positions"])
@pytest.mark.parametrize("measure", ["cka", "cca_mean", "cka_rbf", "cka_minibatch(batch=16)"])
def test_nan_in_the_inputs_is_no_fault_of_a_layer(maps, images, shape, measure):
    images[20, 1, 3, 3], images[21] = torch.nan, torch.inf
    batches = [(part, torch.zeros(len(part))) for part in images.split(16)]
    count, of = 1 + images[21].numel(), images[:16].numel()
    said = f"the inputs in batch 1 hold {count} NaN or Inf among {of:,} values, the first in its example 4; mend"
    for call in (
        lambda: nk.compare(maps(), maps(), batches, measure, shape=shape),
        lambda: nk.activations(maps(), data=batches),
        lambda: nk.class_sensitivity(maps(), batches),
    ):
        with pytest.raises(InvalidValue, match=said):
            call()
    repaired = nk.compare(maps(), maps(), batches, measure, shape=shape, transforms=lambda x: x.nan_to_num(posinf=0))
    assert repaired.examples == len(images)


def test_nan_of_a_transform_is_told_as_such(maps, images):
    images[20] = -1e9
    batches = list(images.split(16))
    for call in (
        lambda: nk.compare(maps(), maps(), batches, transforms=(None, lambda x: (x + 1e6).sqrt())),
        lambda: nk.activations(maps(), data=batches, transform=lambda x: (x + 1e6).sqrt()),
    ):
        with pytest.raises(InvalidValue, match=r"what `transform` makes of the inputs in batch 1 hold.* example 4;"):
            call()


def spoilt(images, by=torch.nan):
    """Return images in which NaN, or Inf, stands for a mark."""
    return images.masked_fill(images == 7777, by)


def nk_rows(model, images, shape):
    """Yield the rows of the first convolution, NaN and all."""
    with torch.no_grad():
        yield getattr(nk, shape)(model.conv1(images))


def test_infinity_is_refused_and_large_numbers_are_not(identity):
    rows = torch.randn(30, 4)
    rows[12, 3] = 7777
    with pytest.raises(InvalidValue, match="layer 'whole' of 'a' in batch 1 holds 1 NaN or Inf among 40 values"):
        nk.compare(identity(), data=list(rows.split(10)), forward=lambda model, batch: model(spoilt(batch, torch.inf)))
    assert nk.compare(identity(), data=torch.randn(30, 4) * 1e37)["whole", "whole"] == pytest.approx(1)


def test_nan_in_recorded_rows_is_refused():
    rows = np.ones((600, 3))
    rows[590] = np.nan
    with pytest.raises(InvalidValue, match="layer 'x' of 'a' in batch 1 holds 3 NaN or Inf among 264 values"):
        nk.compare({"x": rows})


def test_one_example_gives_holes_only(maps, images):
    comparison = nk.compare(maps(), maps(), images[:1], EVERY)
    for name, table in comparison.tables.items():
        if "uncentered" not in name and name != "magnitude_difference":  # these have a value for a single point
            assert len(table.missing) == table.values.size, name
    assert "constant over the 1 examples" in next(iter(comparison["cka"].missing.values()))
    assert "needs at least 4 examples in a mini-batch; 1 were seen" in str(comparison["cka_minibatch"].missing)


def test_an_infinite_value_is_a_hole(worlds):
    X, _ = worlds.related(30, 3, 3)
    comparison = nk.compare({"x": X}, measures="gaussian_mutual_information")
    with pytest.raises(NoValue, match="infin"):
        comparison["x", "x"]


def test_unknown_names_are_refused_before_any_model_runs(maps, images):
    model = maps()
    refusals(
        (lambda: nk.compare(model, data=images, measures="ckaa"), UnknownName, "measures"),
        (lambda: nk.compare(model, data=images, shape="pol"), UnknownName, "shape"),
        (lambda: nk.compare(model, data=images, layers="convv1"), UnknownName, "layers"),
        (lambda: nk.compare(model, data=images, measures=[]), InvalidValue, "measures"),
    )
    assert model.calls == 0
    with pytest.raises(ShapeError, match="layer 'conv1': shape 'cls' does not fit"):
        nk.compare(model, data=images, shape="cls")


class Silent(nn.Module):
    """A layer that gives what is no rows."""

    def __init__(self, given):
        super().__init__()
        self.given = given

    def forward(self, x):
        return self.given


class Talkative(nn.Module):
    """Two layers, and some that give nothing to compare."""

    def __init__(self, given):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.silent = nn.ModuleDict({f"s{i}": Silent(one) for i, one in enumerate(given)})

    def forward(self, x):
        h = self.first(x)
        for layer in self.silent.values():
            layer(h)
        return self.last(h)


def test_default_layers_that_give_no_rows_are_named_in_the_warnings_and_the_plan():
    a, b, inputs = Talkative([None, 3, True]), Talkative([None] * 9), torch.randn(40, 4)
    found = nk.compare(a, b, inputs)
    assert (found.layers_a, found.complete) == (("first", "last"), True)
    named = ", ".join([*(f"'silent.s{i}' of 'a'" for i in range(3)), *(f"'silent.s{i}' of 'b'" for i in range(5))])
    why = "layer 'silent.s0' gives no floating tensor to record, but NoneType"
    assert sentences(found)[0] == f"default layers were left out: {named} and 4 others. Why: {why}."
    plan = str(nk.explain(a, b, inputs))
    assert f"  left out of 'a': {why}\n" in plan
    assert plan.count("  left out of 'b': ") == 9


class Dying(nn.Module):
    """A network behind whose first activation nothing depends on the input."""

    def __init__(self, dead):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 5)
        if dead:
            nn.init.constant_(self.first.bias, -1e4)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.relu(self.first(x)))))


KERNELS = ["hadamard", "features", "gradients", "sum", "product"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [7, 32])  # of batches, on which the rounding of gradients depends
def test_layers_that_are_the_same_for_all_examples_have_no_centred_kernels(dtype, size):
    torch.manual_seed(0)
    alive, dead = Dying(False).to(dtype), Dying(True).to(dtype)
    data = list(torch.randn(100, 8, dtype=dtype).split(size))
    measures = [f"kernel_cka(kernel={kernel})" for kernel in KERNELS]
    measures += [f"sketched_cka(kernel={kernel})" for kernel in ("psi", *KERNELS[1:])]
    found = nk.compare(alive, dead, data, measures, layers=["middle", "last"], progress=False)
    for name in found.measures:
        assert len(found[name].missing) == 4, name
        assert all("is the same for all examples" in reason for reason in found[name].missing.values())
    alone = nk.compare(alive, alive, data, measures, layers=["middle", "last"], progress=False)
    assert not any(alone[name].missing for name in alone.measures)


@pytest.mark.parametrize(
    ("dtype", "spread"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 0.04), (torch.float16, 0.01)]
)
@pytest.mark.parametrize("n", [20, 500])
def test_kernels_of_layers_that_vary_little_about_their_mean_are_those_of_cka(worlds, dtype, spread, n):
    varying = torch.tensor(worlds.normal(n, 6))
    X, Y = (3 + spread * varying).to(dtype), (varying @ torch.tensor(worlds.normal(6, 5))).to(dtype)
    x, y = (one.double().numpy() - one.double().numpy().mean(0) for one in (X, Y))
    wanted = np.linalg.norm(x.T @ y) ** 2 / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)
    found = nk.compare({"x": X}, {"y": Y}, measures="kernel_cka(kernel=features)", progress=False)
    assert found["x", "y"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("chunks", [{}, {"errors": True, "chunks": 2}], ids=["plain", "with errors"])
@pytest.mark.parametrize("beside", [[], ["cka", "pwcca"]], ids=["alone", "beside others"])
def test_a_fault_of_a_measure_names_it_and_its_pair_once(worlds, chunks, beside):
    def refusing(moments):
        raise InvalidValue("these layers are too alike.")

    X, Y = worlds.related(40, 4, 5)
    measure = type(measures()["svcca"])(refusing, replace(measures()["svcca"].facts, needs=""))
    with pytest.raises(InvalidValue) as fault:
        nk.compare({"x": X}, {"y": Y}, measures=[*beside, measure], names=("ours", "theirs"), **chunks)
    assert str(fault.value) == (
        "refusing of layer 'x' of 'ours' and layer 'y' of 'theirs': these layers are too alike."
    )


def test_a_fault_without_one_chunk_names_its_pair_too(worlds, monkeypatch):
    X, Y = worlds.related(40, 4, 5)
    statistics = nk.collect({"x": X}, {"y": Y}, measures="cka_minibatch(batch=4)", errors=True, chunks=2)
    (collector,) = statistics.every()
    pair = collector.pair

    def faulty(a, b, without=None):
        if without is not None:
            raise InvalidValue("a chunk is damaged.")
        return pair(a, b)

    monkeypatch.setattr(collector, "pair", faulty)
    with pytest.raises(
        InvalidValue, match=r"^cka_minibatch\(batch=4\) of layer 'x' of 'a' and layer 'y' of 'b': a chunk"
    ):
        statistics.compute()


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes came with Python 3.11")
def test_a_fault_of_another_package_keeps_its_kind_and_names_the_pair_in_a_note(worlds):
    def broken(statistic, **settings):
        raise ZeroDivisionError("of theirs")

    X, Y = worlds.related(40, 4, 5)
    for name in ("cka", "cka_rbf"):
        found = measures()[name]
        with pytest.raises(ZeroDivisionError) as fault:
            nk.compare({"x": X}, {"y": Y}, measures=[type(found)(broken, found.facts)])
        assert str(fault.value) == "of theirs"
        assert fault.value.__notes__ == ["while measuring broken of layer 'x' of 'a' and layer 'y' of 'b'"]
