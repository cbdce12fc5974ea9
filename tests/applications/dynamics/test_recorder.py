"""The recorder gives the numbers of saved checkpoints, keeps little, and leaves the model as it was."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.errors import ForwardError
from netkin.statistics import Moments
from recorder_worlds import images, net, run, train

FIT = [
    name
    for name, measure in nk.measures.measures().items()
    if measure.facts.reads is Moments and "rotation" in measure.facts.unchanged_by
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(None, marks=SLOW),
        pytest.param("flatten", marks=SLOW),
        "positions",
        pytest.param({"0": "flatten", "4": "pool"}, marks=SLOW),
    ],
)
def test_a_recorder_gives_the_numbers_of_saved_checkpoints(shape):
    model = net()
    recorder = nk.DynamicsRecorder(model, images(), measures=FIT, shape=shape)
    ours, theirs = (saved := run(recorder, model)) and recorder.series(), nk.dynamics(saved, images(), FIT, shape=shape)
    assert ours.steps == theirs.steps
    assert ours.measures == theirs.measures
    assert ours.layers == theirs.layers
    for measure in ours.measures:
        expected = theirs.to_numpy(measure)
        unit = max(1.0, np.nanmax(expected))  # the distance of a layer from itself is rounding times its size
        np.testing.assert_allclose(ours.to_numpy(measure), expected, rtol=1e-6, atol=1e-6 * unit)
    for step in ours:
        a, b = ours[step], theirs[step]
        assert (a.a, a.b, a.examples, a.data) == (b.a, b.b, b.examples, b.data)
        assert (a.shapes_a, a.shapes_b, a.widths_a, a.widths_b) == (b.shapes_a, b.shapes_b, b.widths_a, b.widths_b)
        assert a.caveats == b.caveats or step == ours.final_step  # there half of the pairs mirror the others
        assert {m: set(a[m].missing) for m in a} == {m: set(b[m].missing) for m in b}


def test_the_holes_have_the_reasons_of_a_comparison():
    model = net()
    recorder = nk.DynamicsRecorder(model, images(), measures="cka", shape="positions", layers=["0", "4"])
    saved = run(recorder, model, range(2))
    ours, theirs = (
        recorder.series()[0]["cka"],
        nk.dynamics(saved, images(), "cka", shape="positions", layers=["0", "4"]),
    )
    assert ours.missing == theirs[0]["cka"].missing
    assert "64 rows an example" in ours.missing["0", "4"]


def test_other_measures_may_be_asked_for_afterwards():
    model = net()
    recorder = nk.DynamicsRecorder(model, images(), measures="svcca")
    saved = run(recorder, model)
    ours = recorder.series(["nbs", "svcca(variance=0.9)"], pairs="corresponding")
    theirs = nk.dynamics(saved, images(), ["nbs", "svcca(variance=0.9)"])
    assert ours.measures == ("nbs", "svcca(variance=0.9)")
    for measure in ours.measures:
        np.testing.assert_allclose(ours.own(measure), theirs.own(measure), rtol=1e-6, atol=1e-6)
    assert ours[0]["nbs"].missing["0", "1"] == "this pair was not asked for"


def test_the_log_tells_each_layer_against_its_previous_and_first_probe():
    model, told = net(), []
    recorder = nk.DynamicsRecorder(
        model, images(), measures=["cka", "svcca"], layers=["0", "7"], first=True, log=lambda *news: told.append(news)
    )
    saved = run(recorder, model)
    rows = {step: nk.activations(one, ["0", "7"], images()) for step, one in saved.items()}
    expected = {
        f"cka/{what}/{layer}": nk.cka(rows[step][layer], rows[3][layer]).item()
        for what, step in (("previous", 2), ("first", 0))
        for layer in ("0", "7")
    }
    assert [step for step, _ in told] == [1, 2, 3]
    assert told[-1][1] == pytest.approx(expected, abs=1e-6)
    assert recorder.progress[-1].scalars == told[-1][1]
    assert recorder.progress[0].scalars == {}


def test_several_logs_all_hear_and_those_that_can_finish():
    class Listener:
        def __init__(self):
            self.heard, self.finished = [], None

        def __call__(self, step, values):
            self.heard.append(step)

        def finish(self, recorder):
            self.finished = recorder.steps

    model, plain, listener = net(), [], Listener()
    recorder = nk.DynamicsRecorder(model, images(), log=[lambda step, values: plain.append(step), listener])
    recorder.finish()
    assert listener.finished is None
    run(recorder, model, range(3))
    recorder.finish()
    assert plain == listener.heard == [1, 2]
    assert listener.finished == (0, 1, 2)


def test_only_multiples_of_every_count_unless_anyway():
    recorder = nk.DynamicsRecorder(net(), images(), every=10)
    assert [recorder.probe(step) is not None for step in (0, 5, 10, 15)] == [True, False, True, False]
    assert recorder.probe(17, anyway=True) is not None
    assert recorder.steps == (0, 10, 17)


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x,
        lambda x: x.numpy(),
        lambda x: (x, torch.zeros(len(x))),
        lambda x: [x, torch.zeros(len(x), dtype=torch.int64)],
        lambda x: [(x[:30], 0), (x[30:], 1)],
        lambda x: [x[:16], x[16:32], x[32:]],
        lambda x: TensorDataset(x),
        lambda x: DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=16),
    ],
    ids=["tensor", "array", "tuple", "batch of a loader", "list of batches", "list of arrays", "data set", "loader"],
)
@pytest.mark.parametrize("shape", ["pool", "flatten"])
def test_the_examples_may_come_in_any_form(given, shape):
    model = net()
    recorder, plain = (
        nk.DynamicsRecorder(model, data, measures="cka", shape=shape, examples=36)
        for data in (given(images()), images(36))
    )
    recorder.probe(0), plain.probe(0)
    for name, state in recorder._moments[0].states.items():
        other = plain._moments[0].states[name]
        torch.testing.assert_close(state.rows @ state.rows.T, other.rows @ other.rows.T, rtol=0, atol=1e-4)
    assert recorder._moments[0].examples == 36


def test_a_loader_that_shuffles_is_read_once_and_left_in_its_state():
    draw = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(images(), torch.arange(40)), batch_size=8, shuffle=True, generator=draw)
    expected = [labels.tolist() for _, labels in loader]
    draw.manual_seed(5)
    model = net()
    before = torch.get_rng_state()
    recorder = nk.DynamicsRecorder(model, loader, examples=20)
    assert torch.equal(torch.get_rng_state(), before)
    assert [labels.tolist() for _, labels in loader] == expected
    recorder.probe(0), recorder.probe(1)
    assert min(recorder.progress[1].previous.values()) == pytest.approx(1.0)


def test_the_examples_are_kept_when_the_callers_array_changes():
    data = images()
    recorder = nk.DynamicsRecorder(net(), data, measures="cka")
    recorder.probe(0)
    data += torch.randn_like(data)
    assert min(recorder.probe(1).previous.values()) == pytest.approx(1.0)


def test_training_goes_on_as_if_nobody_had_looked():
    def trained(probed):
        model, draws = net(), []
        recorder = nk.DynamicsRecorder(model, images(), layers=["0", "1", "4"]) if probed else None
        model[1].eval()
        for step in range(3):
            if recorder:
                recorder.probe(step)
            train(model, seed=step)
            draws.append((torch.rand(1).item(), random.random(), np.random.rand()))
        return model, draws

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    alone, draws = trained(probed=False)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    watched, draws_watched = trained(probed=True)
    assert draws == draws_watched
    assert [module.training for module in watched.modules()] == [module.training for module in alone.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.modules())
    for (name, one), other in zip(alone.state_dict().items(), watched.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_batch_norm_statistics_do_not_move():
    model = net().train()
    before = copy.deepcopy(model.state_dict())
    nk.DynamicsRecorder(model, images() + 3).probe(0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training


def test_autocast_around_the_probe_does_not_reach_the_model():
    recorder = nk.DynamicsRecorder(net(), images(), measures="cka")
    recorder.probe(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorder.probe(1)
        assert torch.is_autocast_enabled("cpu")
    first, second = (moment.states for moment in recorder._moments)
    assert all(torch.equal(first[name].rows, second[name].rows) for name in first)


def test_a_model_in_half_precision_is_recorded_in_float32():
    recorder = nk.DynamicsRecorder(net().bfloat16(), images(), measures="cka")
    recorder.probe(0)
    assert {state.rows.dtype for state in recorder._moments[0].states.values()} == {torch.float32, torch.float64}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of torch's own compiler
def test_a_compiled_model_is_looked_through_and_not_compiled_anew():
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    model = net()
    compiled = torch.compile(model, backend=backend)
    recorder, plain = nk.DynamicsRecorder(compiled, images(), measures="cka"), nk.DynamicsRecorder(model, images())
    train(compiled, steps=1)
    before = len(compilations)
    recorder.probe(0), plain.probe(0)
    train(compiled, steps=1)
    assert len(compilations) == before
    ours, theirs = recorder._moments[0].states, plain._moments[0].states
    assert all(torch.equal(ours[name].rows, theirs[name].rows) for name in theirs)


def test_memory_is_told_before_and_after():
    recorder = nk.DynamicsRecorder(net(), images(), shape="flatten", layers=["0", "7"])
    estimate = recorder.memory_per_probe
    assert estimate == 8 * 40 * 40 + 4 * 40 * 3
    assert recorder.memory == 0
    recorder.probe(0), recorder.probe(1)
    assert recorder.memory_per_probe == estimate
    assert recorder.memory == 2 * estimate


def test_only_the_decompositions_still_needed_are_kept():
    model = net()
    recorder = nk.DynamicsRecorder(model, images())
    run(recorder, model)
    recorder.series()
    assert [bool(moment._sides) for moment in recorder._moments] == [False, False, False, True]


def test_a_recording_goes_on_from_a_file(tmp_path):
    model = net()
    recorder = nk.DynamicsRecorder(model, images(), first=True)
    run(recorder, model, range(2))
    recorder.save(tmp_path / "run.netkin")
    again = nk.DynamicsRecorder(model, images(), first=True)
    again.load(tmp_path / "run.netkin")
    assert again.progress == recorder.progress
    assert again.probe(2) == recorder.probe(2)
    mine, theirs = again.series(), recorder.series()
    assert all(np.array_equal(mine.to_numpy(m), theirs.to_numpy(m), equal_nan=True) for m in mine.measures)


@pytest.mark.slow
def test_a_recording_is_read_without_the_model(tmp_path):
    model = net()
    recorder = nk.DynamicsRecorder(model, images(), measures=["cka", "nbs"], run="mine", unit="epoch")
    run(recorder, model)
    recorder.save(tmp_path / "run.netkin")
    found = nk.load(tmp_path / "run.netkin")
    assert (found.steps, found.run, found.unit, tuple(found.progress)) == (
        recorder.steps,
        "mine",
        "epoch",
        recorder.progress,
    )
    assert str(found) == "mine: 4 probes of 8 layers on Tensor, epochs [0, 1, 2, 3]"
    mine, theirs = found.series(), recorder.series()
    assert (mine.run, mine.unit, mine.measures, mine.provenance) == (
        "mine",
        "epoch",
        theirs.measures,
        theirs.provenance,
    )
    for measure in mine.measures:
        assert np.array_equal(mine.to_numpy(measure), theirs.to_numpy(measure), equal_nan=True)
    assert np.array_equal(found.series("svcca").to_numpy(), recorder.series("svcca").to_numpy(), equal_nan=True)
    assert found.provenance["final weights"] == nk.identity.weights_digest(model)
    assert found.provenance["call"].startswith("nk.DynamicsRecorder(model=Sequential, probe='Tensor', run='mine'")
    other = nk.DynamicsRecorder(model, images().flip(0), measures=["cka", "nbs"], run="mine", shape="flatten")
    other.probe(0)
    for digest in ("data digest", "settings digest"):
        assert other.series().provenance[digest] != found.provenance[digest]


def test_a_recording_goes_on_from_a_checkpoint(tmp_path):
    model = net()
    recorder = nk.DynamicsRecorder(model, images(), shape="flatten")
    run(recorder, model)
    torch.save({"recorder": recorder.state_dict()}, tmp_path / "checkpoint.pt")
    again = nk.DynamicsRecorder(model, images(), shape="flatten")
    again.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["recorder"])
    again.forget(after=1)
    assert again.steps == (0, 1)
    assert again.progress == recorder.progress[:2]
    again.probe(2)


def test_a_layer_with_nan_is_a_hole_and_training_goes_on():
    model = net()
    recorder = nk.DynamicsRecorder(model, images(), measures="cka", layers=["0", "7"])
    recorder.probe(0)
    with torch.no_grad():
        model[7].weight[0, 0] = float("nan")
    news = recorder.probe(1)
    assert list(news.previous) == ["0"]
    with torch.no_grad():
        model[7].weight[0, 0] = 0
    recorder.probe(2)
    assert recorder.series()[1]["cka"].missing["7", "7"] == (
        "layer 'step 1/7' held 40 NaN or Inf among 120 values when the probe was taken."
    )


def test_a_series_says_what_it_is():
    model = net()
    recorder = nk.DynamicsRecorder(model, images(), run="seed 0", unit="epoch")
    run(recorder, model, range(2))
    heard = []
    series = recorder.series(progress=lambda *news: heard.append(news))
    assert heard[-1] == (2, 2, "measuring")  # before that ten times a second at most
    assert (series.run, series.unit, series.final_step) == ("seed 0", "epoch", 1)
    assert series[0].a == "epoch 0"
    assert series.provenance["model"] == "Sequential"
    assert series[0].provenance["products"] == "float64"


def test_texts_without_tensors_can_be_probes():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(3, 4)

        def forward(self, texts):
            return self.embed(torch.tensor([[len(text), text.count("a"), 1.0] for text in texts["text"]]))

    data = [{"text": ["a", "banana", "tree"]}, {"text": ["house", "x"]}]
    recorder = nk.DynamicsRecorder(Reader(), data, measures="cka", layers=["embed"], examples=None,
                                   forward=lambda model, batch: model(batch))  # fmt: skip
    with pytest.raises(ForwardError, match="examples of these batches can't be counted; take one probe"):
        recorder.memory_per_probe  # noqa: B018
    recorder.probe(0)
    assert recorder._moments[0].examples == 5
    assert recorder.memory_per_probe == 4 * 5 * 4
