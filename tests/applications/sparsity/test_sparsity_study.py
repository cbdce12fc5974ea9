"""ε-sparsity by known answers and NumPy, Theorem 1, and what a study of networks holds."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.sparsity.masks import (
    bake_masks,
    epsilon_sparsity,
    layer_table,
    masks_of,
    prunable_layers,
    put_masks,
)
from netkin.applications.sparsity.sparsify import sparsify
from netkin.applications.sparsity.sparsity_study import (
    accuracy_after_pruning,
    csr_cost,
    linear_costs,
    sparsity_study,
    two_four_cost,
    two_four_mask,
)
from netkin.errors import FileError, InvalidValue
from netkin.results.weight_sparsity import LinearCost
from quickly import slow_but
from refusals import refused


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10), nn.ReLU(), nn.Linear(10, 3)
        )


def labelled(n=40, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 6, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)


def slow_share(model, epsilon, relative=False, of_left=False):
    """The ε-sparsity in NumPy, from the weights and masks themselves."""
    below = count = 0
    masks = masks_of(model)
    for name, layer in prunable_layers(model).items():
        weight = layer.weight.detach().double().numpy().ravel()
        left = masks[name].numpy().ravel() if name in masks else weight != 0
        limit = epsilon * np.sqrt(np.mean(weight[left] ** 2)) if relative else epsilon
        chosen = weight[left] if of_left else weight
        below += np.count_nonzero(np.abs(chosen) < limit)
        count += len(chosen)
    return below / count


@pytest.mark.parametrize("masked", [False, True, "baked"])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("of_left", [False, True])
def test_epsilon_sparsity_is_the_share_of_small_weights(masked, relative, of_left):
    model = net()
    if masked:
        sparsify(model, 0.7)
    if masked == "baked":
        bake_masks(model)
    for epsilon in (1e-3, 0.02, 0.3, 5.0):
        found = epsilon_sparsity(model, epsilon, relative=relative, of_left=of_left)
        assert found == pytest.approx(slow_share(model, epsilon, relative, of_left))


def test_the_relative_kind_does_not_change_with_a_layers_scale_and_the_absolute_does():
    model = net()
    sparsify(model, 0.5)
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        scaled[3].parametrizations.weight.original.mul_(64.0)
    assert epsilon_sparsity(scaled, 0.5, relative=True) == epsilon_sparsity(model, 0.5, relative=True)
    assert epsilon_sparsity(scaled, 0.05) < epsilon_sparsity(model, 0.05)


def test_epsilon_sparsity_becomes_sparsity_below_the_smallest_weight():
    """Theorem 1: W' has values below ε where W has zeros; their outputs differ by less and less as ε falls."""
    model = nn.Linear(50, 20).double()
    sparsify(model, 0.8)
    bake_masks(model)
    least = model.weight[model.weight != 0].abs().min().item()
    inputs = torch.randn(30, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(20, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.999
    differences = []
    for epsilon in (least / 10, least / 1e3, least / 1e5):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.weight.copy_(torch.where(model.weight == 0, epsilon * noise, model.weight))
        assert epsilon_sparsity(other, epsilon) == pytest.approx(0.8, abs=1e-12)
        differences.append((model(inputs) - other(inputs)).norm().item())
    assert epsilon_sparsity(model, least) == pytest.approx(0.8, abs=1e-12)
    assert differences[1] == pytest.approx(differences[0] / 100, rel=1e-6)
    assert differences[2] == pytest.approx(differences[0] / 1e4, rel=1e-6)


def test_a_layer_of_zeros_counts_as_below_and_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight.zero_()
        model[0].weight.fill_(1.0)
    assert epsilon_sparsity(model, 0.5, relative=True) == 0.5
    assert layer_table(model, prunable_layers(model)).emptied == ("1",)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_counted_in_double(dtype):
    model = nn.Linear(300, 300).to(dtype)
    with torch.no_grad():
        model.weight.fill_(300.0)  # whose square half precision does not hold
    (row,) = layer_table(model, prunable_layers(model)).layers
    assert row.rms == 300.0


@pytest.mark.parametrize("epsilon", [0, -1.0, float("inf"), float("nan"), True])
def test_an_epsilon_that_is_no_size_is_refused(epsilon):
    with pytest.raises(InvalidValue, match="ε is a size above 0"):
        epsilon_sparsity(net(), epsilon)


def test_weights_that_are_not_finite_are_refused():
    model = net()
    model[3].weight.data[0, 0] = math.nan
    with pytest.raises(InvalidValue, match="1 of 960 weights of layer '3' are not finite"):
        epsilon_sparsity(model, 0.1)


# --- accuracy after pruning -------------------------------------------------------------------------------------------


def test_accuracy_after_pruning_is_that_of_a_thresholded_copy():
    model, data = net(), labelled()
    before = copy.deepcopy(model.state_dict())
    found = accuracy_after_pruning(model, data, [0.9, 0.0, 0.5])
    sizes = np.sort(np.concatenate([model[k].weight.detach().abs().numpy().ravel() for k in (0, 3, 5)]))
    for sparsity, value in zip([0.9, 0.0, 0.5], found, strict=True):
        thin = copy.deepcopy(model)
        count = round(sparsity * len(sizes))
        with torch.no_grad():
            for k in (0, 3, 5):
                thin[k].weight.mul_(thin[k].weight.abs() > (sizes[count - 1] if count else -1))
            assert value == (thin(data[0]).argmax(1) == data[1]).double().mean().item()
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_model_that_is_as_sparse_already_is_as_it_is():
    model, data = net(), labelled()
    sparsify(model, 0.8)
    plain = nk.training.accuracy(model, data)
    first, second, third = accuracy_after_pruning(model, data, [0.0, 0.5, 0.8])
    assert first == second == third == plain
    assert masks_of(model)["0"].float().mean() < 1


def test_shares_outside_their_range_and_data_without_labels_are_refused():
    with refused(InvalidValue, "sparsity"):
        accuracy_after_pruning(net(), labelled(), [0.5, 1.0])
    with pytest.raises(InvalidValue, match="none of the labels is a class number"):
        accuracy_after_pruning(net(), labelled()[0], [0.5])


# --- what formats save ------------------------------------------------------------------------------------------------


def test_csr_takes_the_bytes_of_its_three_parts_and_gives_the_dense_outputs():
    weight = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    weight[torch.rand(40, 60, generator=torch.Generator().manual_seed(1)) < 0.9] = 0
    cost = csr_cost("fc", weight, 16, seconds=0.0)
    kept = int((weight != 0).sum())
    assert cost.dense_bytes == 40 * 60 * 4
    assert cost.bytes == kept * (4 + 8) + 41 * 8
    assert cost.sparsity == 1 - kept / 2400
    assert 0 <= cost.error < 1e-5
    assert min(cost.seconds, cost.dense_seconds) > 0


def test_two_of_each_four_are_kept_by_size():
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    mask = two_four_mask(weight).reshape(-1, 4)
    sizes = weight.abs().reshape(-1, 4)
    assert bool((mask.sum(1) == 2).all())
    assert all(own[kept].min() >= own[~kept].max() for own, kept in zip(sizes, mask, strict=True))


def test_a_format_that_is_not_there_says_why():
    cost = two_four_cost("fc", torch.randn(8, 8), 4, seconds=0.0)
    assert cost.reason == "it needs a GPU with sparse tensor cores"
    assert math.isnan(cost.seconds)
    assert "multiple of four" in two_four_cost("fc", torch.randn(8, 6), 4, seconds=0.0).reason


def test_linear_layers_alone_are_measured():
    assert [(row.layer, row.format) for row in linear_costs(net(), seconds=0.0)] == [("3", "CSR"), ("5", "CSR")]
    with pytest.raises(InvalidValue, match="layer '0' is a Conv2d; PyTorch has sparse formats for linear ones"):
        linear_costs(net(), layers=["0"], seconds=0.0)
    assert linear_costs(nn.Conv2d(1, 1, 3), seconds=0.0) == []


# --- a study ----------------------------------------------------------------------------------------------------------


def test_a_study_puts_networks_side_by_side():
    before, after, data = net(), net(1), labelled()
    sparsify(after, 0.9)
    study = sparsity_study({"before": before, "after": after}, data, epsilons=[0.01], relative=[0.1], costs=True)
    assert study.names == ("before", "after")
    assert [study.networks[one].left for one in study.names] == [1044, 1044 - round(0.9 * 1044)]
    assert [sum(study.histograms[one]) for one in study.names] == [1044, 104]
    assert study.networks["after"].shares()[0] == epsilon_sparsity(after, 0.01)
    assert study.accuracy("after") == study.curve["after"][0] == nk.training.accuracy(after, data)
    assert study.shapes == "matrix, pool"
    assert study.sizes["after"][1] < study.sizes["after"][0] > 0
    assert study.examples == 40
    own = nk.compare(after, data=[data], measures=["cka_debiased"])
    values = own.table("cka_debiased").values
    assert study.mean_similarity("after") == pytest.approx(np.nanmean(values[np.tril_indices(len(values), -1)]))
    for words in ("before", "after", "mean cka_debiased", "in CSR", "accuracy without the smallest weights"):
        assert words in str(study)


def test_histograms_count_each_weight_that_is_left_once():
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight[:] = torch.tensor([-1.0, 0.0, 0.4999, 1.0])
    study = sparsity_study(model, sparsities=[])
    edges, counts = study.edges, study.histograms["model"]
    assert (edges[0], edges[-1], len(edges)) == (-1.0, 1.0, 81)
    assert {k: count for k, count in enumerate(counts) if count} == {0: 1, 59: 1, 79: 1}


def test_a_study_without_data_looks_at_weights_alone():
    study = sparsity_study(net())
    assert study.curve == {}
    assert study.interlayer == {}
    assert math.isnan(study.mean_similarity("model"))
    found = nk.document(study)
    assert found["kind"] == "sparsity"
    assert found["networks"]["model"]["weights"] == 1044
    assert found["accuracy"] == {}


def test_the_similarity_is_of_what_is_asked_for_as_one_example():
    model, data = net(), labelled()
    study = sparsity_study({"a": model}, data, shape="flatten", sparsities=0.5, epsilons=0.01)
    values = nk.compare(model, data=[data], measures=["cka_debiased"], shape="flatten").table("cka_debiased").values
    assert study.mean_similarity("a") == pytest.approx(np.nanmean(values[np.tril_indices(len(values), -1)]))
    assert study.shapes == "flatten, matrix"
    assert study.networks["a"].epsilons == (0.01,)
    assert study.curve["sparsity"] == (0.5,)
    assert math.isnan(study.accuracy("a"))


def test_what_a_study_cannot_read_is_refused_before_the_data_are_read():
    for models, words in [
        ({}, "`models` holds no model; give at least one"),
        (3, "must be a mapping from names to models, or a list; got one int"),
        ({"sparsity": net()}, "call the network something else"),
    ]:
        with pytest.raises(InvalidValue, match=words):
            sparsity_study(models)

    def unread():
        raise AssertionError("the data were read")
        yield

    with pytest.raises(InvalidValue, match="ε is a size above 0"):
        sparsity_study(net(), unread(), epsilons=[0.1, -1.0])


def test_unlabelled_data_give_similarity_without_accuracy():
    study = sparsity_study(net(), [labelled()[0]], sparsities=[])
    assert study.curve == {}
    assert 0 < study.mean_similarity("model") < 1


def test_masks_that_leave_nothing_are_told():
    model = nn.Linear(2, 2)
    put_masks(model, {"": torch.zeros(2, 2, dtype=torch.bool)})
    assert sparsity_study(model).networks["model"].emptied == ("",)
    with pytest.raises(InvalidValue, match="no weight is left"):
        epsilon_sparsity(model, 0.1, of_left=True)


@pytest.mark.parametrize("data", slow_but([None, "labelled"], "labelled"))
def test_a_saved_study_comes_back_whole(data, tmp_path):
    sparse = net()
    put_masks(sparse, {name: torch.rand(layer.weight.shape) > 0.5 for name, layer in prunable_layers(sparse).items()})
    models = {"before": net(), "after": sparse}
    study = sparsity_study(models, data and labelled(), sparsities=(0, 0.5), costs=True)
    study.save(tmp_path / "study.netkin")
    found = nk.load(tmp_path / "study.netkin")
    assert isinstance(found, nk.SparsityStudy)
    assert str(found) == str(study)
    assert nk.document(found) == nk.document(study)
    assert found.interlayer == study.interlayer
    page = nk.report(found, tmp_path / "study.html").read_text()
    assert page == nk.report(study, tmp_path / "other.html").read_text()


def test_a_cost_that_there_is_not_stays_unknown(tmp_path):
    row = LinearCost("fc", "2:4", 0.5, 100, math.nan, math.nan, math.nan, math.nan, "it needs a GPU")
    study = replace(sparsity_study(net()), costs={"model": (row,)}, costs_on="CPU")
    study.save(tmp_path / "study.netkin")
    (found,) = nk.load(tmp_path / "study.netkin").costs["model"]
    assert math.isnan(found.bytes)
    assert math.isnan(found.error)
    assert replace(found, bytes=0, dense_seconds=0, seconds=0, error=0) == replace(
        row, bytes=0, dense_seconds=0, seconds=0, error=0
    )


def test_no_other_file_is_written_over(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileError):
        sparsity_study(net()).save(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
