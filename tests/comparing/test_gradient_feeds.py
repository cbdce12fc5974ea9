"""Features and gradients in one pass: exact kernels over the same examples, sketches over different data."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.errors import InvalidValue
from netkin.identity.data import contents
from netkin.measures import kernel_cka, kernel_cka_uncentered, kernel_nbs
from netkin.statistics.sketches import LayerSketches, Sketch, SketchSettings
from refusals import refused


def net(seed, width=6, classes=3):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, width), nn.ReLU(inplace=True), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)]
    return nn.Sequential(*layers).double()


def inputs(n, seed=0):
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LAYERS = ["0", "2", "4"]
KERNELS = ["features", "gradients", "sum", "product", "hadamard", "transport"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_exact_measures_are_those_of_matrices_recorded_apart(kernel):
    a, b, data = net(0), net(1, width=5, classes=4), inputs(40)
    names = [f"{name}(kernel={kernel})" for name in ("kernel_cka", "kernel_cka_uncentered", "kernel_nbs")]
    found = nk.compare(a, b, data, measures=names, layers=LAYERS)
    rows = [(nk.activations(m, LAYERS, data), nk.gradients(m, LAYERS, data)) for m in (a, b)]
    for function, name in zip((kernel_cka, kernel_cka_uncentered, kernel_nbs), names, strict=True):
        for x in LAYERS:
            for y in LAYERS:
                wanted = function(*((F[z], G[z]) for (F, G), z in zip(rows, (x, y), strict=True)), kernel=kernel)
                assert found[name][x, y] == pytest.approx(float(wanted), abs=1e-10)


def test_the_kernel_of_features_alone_is_cka_and_needs_no_gradients():
    a, b, data = net(0), net(1), inputs(40)
    found = nk.compare(a, b, data, measures=["kernel_cka(kernel=features)", "cka"], layers=LAYERS)
    assert np.allclose(found["kernel_cka(kernel=features)"].values, found["cka"].values, atol=1e-10)
    assert "backward" not in str(nk.explain(a, b, data, measures=["kernel_cka(kernel=features)"], layers=LAYERS))


def test_one_forward_and_one_backward_pass_serve_all_measures():
    a, b, data, runs = net(0), net(1), inputs(64), []
    for model in (a, b):
        model[0].register_forward_hook(lambda *_: runs.append("forward"))
        model[4].register_full_backward_hook(lambda *_: runs.append("backward"))
    batches = [data[:32], data[32:]]
    nk.compare(a, b, batches, measures=["kernel_cka", "sketched_nbs(buckets=8)", "cka", "cka_minibatch"], layers=LAYERS)
    assert runs.count("forward") == 4 + 2 * 2  # and two runs of few examples, which show the layers
    assert runs.count("backward") == 4 + 2  # and one for each model that shows that examples are not mixed


def test_the_plan_tells_of_backward_passes():
    plan = str(
        nk.explain(net(0), net(1), inputs(40), measures=["kernel_nbs(beta=0.25)", "sketched_cka"], layers=LAYERS)
    )
    assert "backward passes: 2 after each of these, of the loss tempered by 0.25, tempered by 0.5" in plan
    assert "Sketch of psi in 512 buckets" in plan
    assert "Kernels of features and gradients, a sample of at most 2,048 rows" in plan


def test_sketches_of_different_data_are_those_made_by_hand():
    a, b = net(0), net(1, classes=5)
    first, second = inputs(70, 1), inputs(45, 2)
    measure = "sketched_cka_uncentered(kernel=sum, buckets=16, seed=3)"
    found = nk.compare(nk.ModelInput(a, data=first), nk.ModelInput(b, data=second), measures=measure, layers=LAYERS)
    sides = []
    for model, data in ((a, first), (b, second)):
        collector = LayerSketches(["x"], SketchSettings(16, 1, 3))
        F, G = nk.activations(model, ["2"], data)["2"], nk.gradients(model, ["2"], data)["2"]
        collector.update({"activations": {"x": F}, "gradients": {"x": G}}, contents(data, len(data)).numpy())
        sides.append(collector.side("x"))
    assert found["2", "2"] == pytest.approx(Sketch(*sides).alignment("sum").item(), abs=1e-10)


def test_order_batches_and_parts_of_the_data_do_not_matter():
    a, b, data = net(0), net(1), inputs(60)
    measures = ["sketched_cka(buckets=16)", "sketched_nbs(kernel=hadamard, buckets=16)"]
    options = {"measures": measures, "layers": LAYERS}
    whole = nk.compare(a, b, data, **options)
    mixed = data[torch.randperm(60)]
    other = nk.compare(a, b, DataLoader(TensorDataset(mixed), batch_size=17), **options)
    parts = [nk.collect(a, b, data, part=(i, 3), **options) for i in (3, 1, 2)]
    merged = nk.merge(parts).compute()
    for name in whole.tables:
        assert np.allclose(other[name].values, whole[name].values, atol=1e-10)
        assert np.allclose(merged[name].values, whole[name].values, atol=1e-10)


def test_of_different_data_all_examples_are_counted_and_each_part_has_its_share_of_both():
    a, b = net(0), net(1)
    first, second = nk.ModelInput(a, data=inputs(70, 1)), nk.ModelInput(b, data=list(inputs(45, 2).split(20)))
    options = {"measures": "sketched_cka(buckets=16)", "layers": LAYERS}
    whole = nk.compare(first, second, **options)
    parts = [nk.collect(first, second, part=(i, 3), **options) for i in (1, 2, 3)]
    merged = nk.merge(parts)
    assert whole.examples == merged.examples == 70 + 45
    assert [part.examples for part in parts] == [23 + 15, 23 + 15, 24 + 15]
    (measure, *_) = merged.record.measures
    assert np.allclose(merged.compute()[measure].values, whole[measure].values, atol=1e-10)
    assert (parts[0].missing != "", merged.missing) == (True, "")
    assert merged.record.part == "1/3, 2/3, 3/3"
    assert nk.compare(a, b, inputs(45, 2), **options).examples == 45
    assert nk.explain(nk.ModelInput(a, data=list(inputs(70, 1).split(20))), second, **options).passes == 4 + 3


def test_statistics_are_saved_and_say_what_they_can_not_serve(tmp_path):
    a, b, data = net(0), net(1), inputs(60)
    kept = nk.collect(a, b, data, measures=["sketched_cka(buckets=16)", "kernel_cka"], layers=LAYERS)
    kept.save(tmp_path / "kept.stats")
    again = nk.load(tmp_path / "kept.stats")
    assert np.allclose(again.compute("kernel_cka").to_numpy(), kept.compute("kernel_cka").to_numpy(), atol=0)
    assert again.compute("kernel_nbs(kernel=product)")["2", "2"] > 0
    with pytest.raises(InvalidValue, match=r"beta=0.1 \(these have beta=0.5\)"):
        again.compute("sketched_cka(buckets=16, beta=0.1)")


def test_exact_kernels_have_error_bars_and_sketches_say_why_not():
    found = nk.compare(
        net(0), net(1), inputs(120), measures=["kernel_cka", "sketched_cka"], layers=LAYERS, errors=True, chunks=8
    )
    assert (found["kernel_cka(kernel=hadamard)"].errors > 0).all()
    assert "random by its seed" in next(iter(found["sketched_cka(buckets=512, kernel=psi)"].error_reasons.values()))


def test_a_layer_that_the_loss_does_not_reach_is_a_hole_with_the_reason():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.side, self.head = nn.Linear(4, 5), nn.Linear(4, 3)

        def forward(self, batch):
            self.side(batch)
            return self.head(batch)

    model, data = Aside().double(), inputs(30)
    found = nk.compare(model, copy.deepcopy(model), data, measures=["kernel_cka", "sketched_cka(buckets=8)", "cka"])
    assert found["cka"]["side", "head"] > 0
    for name in ("kernel_cka(kernel=hadamard)", "sketched_cka(buckets=8, kernel=psi)"):
        assert "no path leads from it to the loss" in found[name].missing["side", "head"]
        assert found[name]["head", "head"] == pytest.approx(1)


def test_what_has_no_gradients_is_refused():
    rows = {"x": inputs(30)}
    with pytest.raises(InvalidValue, match="holds recorded rows, which have no gradients; pass the model"):
        nk.compare(rows, {"y": inputs(30, 1)}, measures="kernel_cka")
    with refused(InvalidValue, "beta"):
        nk.compare(net(0), net(1), inputs(30), measures="kernel_cka(beta=1.0)")


def test_a_gradient_that_is_no_number_is_refused_with_its_place():
    class Root(nn.Module):
        """Finite itself, and without a slope where all is zero, as in a long batch."""

        def forward(self, batch):
            return (batch.abs() * (len(batch) < 20)).sqrt()

    torch.manual_seed(0)
    broken = nn.Sequential(nn.Linear(4, 6), Root(), nn.Linear(6, 3)).double()
    batches = [inputs(8), inputs(30)]
    with pytest.raises(InvalidValue, match="the gradient at layer '0' of 'a' in batch 1"):
        nk.compare(broken, net(1), batches, measures="kernel_cka", layers=["0"])
