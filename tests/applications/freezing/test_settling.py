"""The similarity schedule: a group is frozen once it stays like its own recent past, and not before those below it."""

import pytest
import torch
from torch import nn

import netkin as nk
from freezing_worlds import Net, data, sgd, train, update
from netkin.errors import InvalidValue
from netkin.sources.architectures import seeded
from refusals import refusals, refused


def chain(width=6, depth=4):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


@pytest.fixture
def model():
    return seeded(chain, 0)


@pytest.fixture
def probe():
    return torch.randn(40, 6, generator=torch.Generator().manual_seed(2))


def shake(module, seed, size=1.0):
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(seed)) * size)


def test_units_that_stand_still_are_frozen_in_order_and_moving_ones_are_not(model, probe):
    with nk.FreezeTraining(model, "similarity", probe=probe, every=1, patience=2, past=2) as freezing:
        for step in range(1, 9):
            shake(model[2], step)  # groups 0 and 1 stand still, group 2 never
            freezing.step()
            # a probe at the start and one more make the past; the next two are the patience
            assert freezing.frozen == (["0", "1"] if step >= 3 else [])


def test_a_unit_that_settled_early_waits_for_those_below(model, probe):
    with nk.FreezeTraining(model, "similarity", probe=probe, every=1, patience=2, past=1) as freezing:
        for step in range(1, 7):
            if step <= 3:
                shake(model[0], step)
            freezing.step()
            assert freezing.frozen == ([] if step < 5 else ["0", "1", "2"])


def test_a_rotated_unit_has_not_changed(model, probe, worlds):
    """CKA sees what a layer represents, not how: weights that only turn are weights that have settled."""
    turn = torch.from_numpy(worlds.rotation(6)).float()
    with nk.FreezeTraining(
        model, "similarity", probe=probe, every=1, patience=3, past=1, layers=["0", "3"]
    ) as freezing:
        for _ in range(3):
            with torch.no_grad():
                model[0].weight.copy_(turn @ model[0].weight)
                model[0].bias.copy_(turn @ model[0].bias)
            freezing.step()
        assert freezing.frozen == ["0"]
        assert [values["0"] for values in freezing.history] == [pytest.approx(1, abs=1e-5)] * 3


def test_the_values_are_the_least_similarities_to_the_last_probes(model, probe):
    """Against activations kept by hand and compared two by two."""
    kept = [nk.activations(model, ["0", "1"], probe)]
    options = {"probe": probe, "every": 2, "past": 2, "measures": "nbs", "layers": ["0", "1"], "patience": 99}
    with nk.FreezeTraining(model, "similarity", **options) as freezing:
        for step in range(1, 9):
            shake(model[0], step, 0.1)
            freezing.step()
            if step % 2 == 0:
                kept.append(nk.activations(model, ["0", "1"], probe))
    assert [values["step"] for values in freezing.history] == [4, 6, 8]
    for place, values in enumerate(freezing.history, start=2):
        for name in ("0", "1"):
            expected = min(float(nk.nbs(kept[place][name], kept[place - back][name])) for back in (1, 2))
            assert values[name] == pytest.approx(expected, abs=1e-6)


def test_a_value_below_the_threshold_begins_the_count_anew(model, probe):
    with nk.FreezeTraining(
        model, "similarity", probe=probe, every=1, patience=3, past=1, layers=["0", "3"]
    ) as freezing:
        for step in range(1, 6):
            if step == 3:
                shake(model[0], step)
            freezing.step()
        assert freezing.frozen == []
        assert freezing.step() == ["0"]


def test_a_small_network_freezes_itself_as_it_converges():
    net = seeded(Net, 0)
    batches = data(60)
    options = {"steps": 60, "probe": batches[0][0], "every": 2, "threshold": 0.95}
    with nk.FreezeTraining(net, "similarity", **options) as freezing:
        optimizer = sgd(net)
        rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=40)
        for batch in batches:
            update(net, optimizer, *batch)
            rates.step()
            freezing.step()
        assert freezing.frozen == ["conv1", "conv2", "conv3"]
        assert freezing.plan == {"conv1": None, "conv2": None, "conv3": None, "out": None}


def test_a_probe_changes_nothing_about_the_training():
    one, other = seeded(Net, 0), seeded(Net, 0)
    for net in (one, other):
        options = {"probe": data(1)[0][0], "every": 1, "patience": 99}  # never reached
        schedule = ("similarity", options) if net is one else ("linear", {"layers": ["conv1", "out"]})
        with nk.FreezeTraining(net, schedule[0], steps=1000, **schedule[1]) as freezing:
            train(net, sgd(net), freezing, data(6))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_unit_that_says_nothing_is_not_settled(probe):
    model = chain()
    with torch.no_grad():
        model[0].weight.zero_()
    with nk.FreezeTraining(model, "similarity", probe=probe, every=1, patience=1, past=1) as freezing:
        freezing.step()
        assert freezing.frozen == []
        assert freezing.history[-1]["0"] is None


def test_a_probe_is_taken_every_hundredth_step_and_its_examples_are_fixed(model, probe):
    batches = iter([probe[:30], probe[30:]])
    with nk.FreezeTraining(model, "similarity", probe=batches, steps=1000, examples=35, past=1) as freezing:
        for _ in range(40):
            freezing.step()
        assert [values["step"] for values in freezing.history] == [10, 20, 30]  # then all are frozen
        assert [len(batch) for batch in freezing._schedule.probe] == [30, 5]


def test_a_measure_of_rows_serves_as_well(model, probe):
    options = {"measures": "cka_rbf", "every": 1, "patience": 1, "past": 1}
    with nk.FreezeTraining(model, "similarity", probe=probe, **options) as freezing:
        assert freezing.step() == ["0", "1", "2"]


def test_a_similarity_schedule_without_what_it_needs_is_refused(model, probe):
    refusals(
        (lambda: nk.FreezeTraining(model, "similarity", steps=100), InvalidValue, "probe"),
        (lambda: nk.FreezeTraining(model, "similarity", probe=probe), InvalidValue, "steps"),
        (lambda: nk.FreezeTraining(model, "similarity", probe=probe, every=1, patience=0), InvalidValue, "patience"),
    )
    with refused(InvalidValue, "measures"):
        nk.FreezeTraining(model, "similarity", probe=probe, every=1, measures="procrustes_distance")
    with refused(InvalidValue, "threshold"):
        nk.FreezeTraining(model, "similarity", probe=probe, every=1, threshold=99)


def test_a_step_told_twice_is_looked_at_once(model, probe):
    """Several batches may make one step; a group must not settle by being compared with itself."""
    with nk.FreezeTraining(model, "similarity", probe=probe, every=1, patience=2, past=1) as freezing:
        assert [freezing.at(1) for _ in range(5)] == [[]] * 5
        assert [values["step"] for values in freezing.history] == [1]
        assert freezing.at(2) == ["0", "1", "2"]


def test_steps_that_are_skipped_take_no_probe_with_them(model, probe):
    with nk.FreezeTraining(model, "similarity", probe=probe, every=3, patience=99, past=1) as freezing:
        for done in (2, 4, 6, 7, 8, 20, 21, 22):
            freezing.at(done)
        assert [values["step"] for values in freezing.history] == [4, 6, 20, 21]
        again = nk.FreezeTraining(model, "similarity", probe=probe, every=3, patience=99, past=1)
        again.load_state_dict(freezing.state_dict())
        assert again._schedule.due == 24
        again.close()


def test_a_probe_that_crashes_leaves_the_model_as_it_was(model):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        nk.FreezeTraining(model, "similarity", probe=torch.ones(4, 9), every=1)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_probe_too_small_for_the_measure_is_refused(model, probe):
    freezing = nk.FreezeTraining(model, "similarity", probe=probe[:8], every=1, past=1, measures="svcca")
    with refused(InvalidValue, "probe"):
        freezing.step()
