"""Learning dynamics, on runs whose layers come to their final state at known steps."""

import copy
import importlib
import os
import re
import shutil
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.applications.dynamics import dynamics, steps
from netkin.errors import FileError, InvalidValue, MemoryLimit, SourceError, UnknownName
from netkin.representations.shapes import dft
from quickly import slow_after
from refusals import refused
from run_worlds import LAYERS, WIDTH, Fan, run_of


@pytest.fixture
def rows():
    return torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("measure", ["svcca", "cka", "procrustes_distance"])
def test_a_run_from_the_bottom_up_is_read_as_such(rows, measure):
    series = dynamics(run_of(low=10, middle=20, high=40), rows, measure, model=Fan)
    near = 0.999 if series.table().higher_is_closer else 1e-3
    assert series.steps == (0, 10, 20, 30, 40, 50)
    assert series.layers == LAYERS
    assert series.reached(near) == {"low": 10, "middle": 20, "high": 40}
    assert series.bottom_up(near).tau == 1
    np.testing.assert_allclose(series.own()[-1], 1 if near > 0.5 else 0, atol=1e-6)


def test_a_run_from_the_top_down_is_read_as_such(rows):
    series = dynamics(run_of(low=40, middle=20, high=10), rows, model=Fan)
    assert series.reached(0.99) == {"low": 40, "middle": 20, "high": 10}
    assert series.bottom_up(0.99).tau == -1


def test_layers_that_never_arrive_are_counted(rows):
    series = dynamics(run_of(low=10, middle=99, high=99), rows, model=Fan)
    assert series.reached(0.9) == {"low": 10, "middle": None, "high": None}
    assert series.bottom_up(0.9).never == 2


def test_the_numbers_are_those_of_compare(rows):
    run = run_of(low=10, middle=20, high=40)
    series = dynamics(run, rows, ["svcca", "nbs"], model=Fan)
    models = {}
    for step in (20, 50):
        models[step] = Fan()
        models[step].load_state_dict(run[step])
    expected = nk.compare(models[20], models[50], rows, ["svcca", "nbs"])
    for measure in ("svcca", "nbs"):
        np.testing.assert_allclose(series[20][measure].values, expected[measure].values, atol=1e-12)
    assert (series[20].a, series[20].b) == ("step 20", "step 50")
    assert series[20].shapes_b == expected.shapes_b
    assert series[20].examples == 400


def test_every_checkpoint_takes_one_pass_and_the_final_model_one_in_all(rows):
    models = {step: Fan(seed=step) for step in (0, 10, 20)}
    dynamics(models, rows)
    batches = len(rows) // 128 + 1
    assert [model.calls for model in models.values()] == [2 + batches] * 3  # and two runs of few examples


def test_a_final_model_whose_rows_do_not_fit_runs_again(rows, monkeypatch):
    expected = dynamics({step: Fan(seed=step) for step in (0, 10, 20)}, rows)
    monkeypatch.setattr("netkin.applications.dynamics.spare_memory", lambda device: 1)
    models = {step: Fan(seed=step) for step in (0, 10, 20)}
    series = dynamics(models, rows)
    assert [model.calls for model in models.values()] == [6, 6, 14]
    np.testing.assert_array_equal(series.to_numpy(), expected.to_numpy())


def test_measures_that_read_gradients_have_them_of_the_final_model_too(rows):
    models = {step: Fan(seed=step) for step in (0, 20)}
    series = dynamics(models, rows[:60], "kernel_cka")
    expected = nk.compare(models[0], models[20], rows[:60], "kernel_cka")
    np.testing.assert_allclose(series[0].table().values, expected.table().values)


@pytest.mark.parametrize("how", [{"shape": "positions", "resize": "average"}, {"shape": "dft"}, {"shape": dft}])
def test_maps_of_different_size_meet_as_in_compare(how):
    torch.manual_seed(0)
    images = torch.randn(60, 2, 8, 8)
    models = {
        s: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, 2, padding=1)) for s in (1, 2)
    }
    series = dynamics(models, images, "cka", layers=["0", "2"], **how)
    expected = nk.compare(models[1], models[2], images, "cka", layers=["0", "2"], **how)
    np.testing.assert_allclose(series[1].table().values, expected.table().values)


def test_shuffled_loaders_and_streams_serve(rows):
    run = run_of(low=10, middle=20, high=40)
    loader = DataLoader(TensorDataset(rows), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    expected = dynamics(run, rows, model=Fan).to_numpy()
    for data in (loader, iter(rows.split(100)), list(rows.split(30))):
        np.testing.assert_allclose(dynamics(run, data, model=Fan).to_numpy(), expected, atol=1e-9)


def test_data_that_do_not_fit_are_read_anew(rows, monkeypatch):
    monkeypatch.setattr(steps, "free_memory", lambda device=None: 0)
    run = run_of(low=10, middle=20, high=40)
    loader = DataLoader(TensorDataset(rows), batch_size=64)
    series = dynamics(run, loader, model=Fan)
    assert series.reached(0.99) == {"low": 10, "middle": 20, "high": 40}
    with pytest.raises(MemoryLimit, match="a stream of more than 0 B, which is read once for each checkpoint; pass"):
        dynamics(run, iter(rows.split(100)), model=Fan)


def test_models_and_random_numbers_are_as_before(rows):
    models = {step: Fan(seed=step).train() for step in (0, 10)}
    before = {step: copy.deepcopy(model.state_dict()) for step, model in models.items()}
    state = torch.get_rng_state()
    dynamics(models, rows)
    torch.testing.assert_close(torch.get_rng_state(), state)
    for step, model in models.items():
        assert model.training
        assert not any(module._forward_hooks for module in model.modules())
        torch.testing.assert_close(model.state_dict(), before[step])


def test_the_steps_may_be_chosen(rows):
    run = run_of(low=10, middle=20, high=40)
    assert dynamics(run, rows, model=Fan, steps=[10, 40]).steps == (10, 40, 50)
    assert dynamics(run, rows, model=Fan, steps=3).steps == (0, 20, 50)


def flipped(rows):
    return -rows


def test_options_reach_the_comparison(rows):
    options = {"layers": iter(["high", "low"]), "pairs": "corresponding", "examples": 90, "seed": 4}
    series = dynamics(run_of(low=10, middle=20, high=40), rows, "cka", model=Fan(), **options, transform=flipped)
    assert series.layers == ("low", "high")  # in the order in which they run, which is that of depth
    assert (series[0].examples, series[0].seed) == (90, 4)
    assert series[0]["cka"].missing["high", "low"] == "this pair was not asked for"
    assert series[0].provenance["transform b"] == series[0].provenance["transform a"] == "flipped"


def test_a_result_says_what_it_rests_on(rows, tmp_path):
    for step, state in run_of(low=10, middle=20, high=40).items():
        torch.save(state, tmp_path / f"step_{step}.pt")
    (tmp_path / "best.pt").write_bytes(b"")
    series = dynamics(tmp_path, rows, model=Fan, name="toy")
    assert series.run == "toy"
    assert series.provenance["passed over"] == "best.pt"
    assert series.provenance["asked measures"] == "svcca"
    assert series[10].provenance["checkpoint a"].endswith("step_10.pt")
    assert series[10].data == "Tensor"


class Stopping(Fan):
    """Runs a number of batches and is then interrupted."""

    def __init__(self, seed, after):
        super().__init__(seed)
        self.after = after

    def forward(self, rows):
        if self.calls >= self.after:
            raise KeyboardInterrupt
        return super().forward(rows)


def test_ctrl_c_returns_what_is_finished_if_asked_to(rows):
    models = {0: Fan(0), 10: Stopping(10, after=2), 20: Fan(20)}
    series = dynamics(models, rows, partial=True)
    assert (series.steps, series.missing, series.complete) == ((0, 20), (10,), False)
    with pytest.raises(KeyboardInterrupt):
        dynamics(models, rows)
    with pytest.raises(KeyboardInterrupt):
        dynamics({0: Fan(0), 20: Stopping(20, after=0)}, rows, partial=True)


def test_the_same_call_continues_a_saved_series(rows, tmp_path):
    file, models = tmp_path / "run.netkin", {0: Fan(0), 10: Stopping(10, after=2), 20: Fan(20)}
    with pytest.raises(KeyboardInterrupt):
        dynamics(models, rows, save=file)
    assert nk.load(file).missing == (10,)
    again = {0: Fan(0), 10: Fan(10), 20: Fan(20)}
    series = dynamics(again, rows, save=file)
    assert [model.calls for model in again.values()] == [0, 6, 6]  # and two runs of few examples each
    assert nk.load(file) == series
    np.testing.assert_array_equal(series.to_numpy(), dynamics(again, rows).to_numpy())
    assert series.complete


@pytest.mark.parametrize("changed", [0, 10])
def test_a_step_whose_activation_has_changed_is_compared_again(rows, tmp_path, changed):
    file, models = tmp_path / "run.netkin", {step: nn.Sequential(Fan(step), nn.Tanh()) for step in (0, 10, 20)}
    before = dynamics(models, rows, save=file)
    models[changed][1] = nn.Softplus()  # which has no weights either
    calls = {step: model[0].calls for step, model in models.items()}
    series = dynamics(models, rows, save=file)
    assert [step for step, model in models.items() if model[0].calls > calls[step]] == [changed, 20]
    np.testing.assert_array_equal(series.to_numpy(), dynamics(models, rows).to_numpy())
    assert (series.to_numpy() != before.to_numpy()).any()


def times(factor):
    return lambda batch: factor * batch


def stretched(rows, by=1.0):
    return rows.pow(3) * by


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """A folder with a study that is done and its job, and the options of the study."""
    folder, asked = tmp_path_factory.mktemp("studied"), {"transform": times(2)}
    rows = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(1))
    dynamics({0: Fan(0), 10: Fan(10), 20: Fan(20)}, rows, save=folder / "run.netkin", **asked)
    return folder, asked


@pytest.mark.parametrize(
    "changes, words",
    slow_after(
        3,
        [
            ({"measures": "cka"}, "differs in measures ('svcca', not 'cka'); ask"),
            ({"layers": ["low"]}, "differs in layers ('None', not '[low]')"),
            ({"examples": 100}, "examples ('None', not '100')"),
            ({"shape": "flatten"}, "differs in shape ('None', not 'flatten')"),
            ({"models": 7}, "differs in final weights;"),
            (
                {"data": 3},
                "a loader that shuffles or draws at random gives other data each time; ask for the same again",
            ),
            ({"transform": times(3)}, "differs in transform; ask"),
            ({"seed": 1}, "differs in seed ('0', not '1')"),
        ],
        several=True,
    ),
    ids=["measure", "layers", "examples", "shape", "models", "data", "transform", "seed"],
)
def test_another_study_is_refused_and_the_file_stays(rows, studied, tmp_path, changes, words):
    folder, asked = studied
    file = shutil.copytree(folder, tmp_path, dirs_exist_ok=True) / "run.netkin"
    before, changes = file.read_bytes(), dict(changes)
    models = {0: Fan(0), 10: Fan(10), 20: Fan(changes.pop("models", 20))}
    data = rows + changes.pop("data", 0)
    with pytest.raises(FileError, match=f"run.netkin.job' holds a series that .*{re.escape(words)}"):
        dynamics(models, data, save=file, **asked | changes)
    assert not any(model.calls for model in models.values())
    assert file.read_bytes() == before
    anew = dynamics(models, data, save=file, overwrite=True, **asked | changes)
    assert all(model.calls for model in models.values())
    assert nk.load(file) == anew


@pytest.mark.parametrize("option", slow_after(1, ["transform", "shape", "forward"]))
def test_numbers_of_a_function_that_has_changed_are_not_taken_for_those_of_the_new_one(rows, tmp_path, option):
    given = {
        "transform": lambda by: times(by),
        "shape": lambda by: lambda rows: stretched(rows, by) + (by > 1),
        "forward": lambda by: lambda model, batch: model(by * batch),
    }[option]
    models, file = {0: Fan(0), 10: Fan(10), 20: Fan(20)}, tmp_path / "run.netkin"
    dynamics(models, rows, save=file, **{option: given(1.0)})
    with pytest.raises(FileError, match=f"differs in {option}; "):
        dynamics(models, rows, save=file, **{option: given(2.0)})
    again = dynamics(models, rows, save=file, **{option: given(1.0)})
    np.testing.assert_array_equal(again.to_numpy(), dynamics(models, rows, **{option: given(1.0)}).to_numpy())


def test_data_that_do_not_fit_are_known_by_all_of_them(rows, tmp_path, monkeypatch):
    module = importlib.import_module("netkin.applications.dynamics")
    models, file = {0: Fan(0), 20: Fan(20)}, tmp_path / "run.netkin"
    whole = dynamics(models, rows, examples=None).provenance["data digest"]
    monkeypatch.setattr(module, "spare_memory", lambda device: 0)
    loader, other = (DataLoader(part, batch_size=50) for part in (rows, torch.cat([rows[:-1], rows[-1:] + 1])))
    assert dynamics(models, loader).provenance["data digest"] == whole
    assert dynamics(models, loader, save=file).provenance["data digest"] == whole
    with pytest.raises(FileError, match="differs in data;"):
        dynamics(models, other, save=file)
    with pytest.raises(FileError, match=r"and examples \('None', not '100'\)"):
        dynamics(models, loader, save=file, examples=100)


def test_a_file_without_its_parts_is_refused(rows, tmp_path):
    file, models = tmp_path / "run.netkin", {0: Fan(0), 20: Fan(20)}
    dynamics(models, rows).save(file)
    before = file.read_bytes()
    with pytest.raises(FileError, match="this would write over '.*run.netkin'; choose another name"):
        dynamics(models, rows, save=file)
    assert file.read_bytes() == before


def test_the_call_and_its_identity_are_in_the_series(rows, tmp_path):
    series = dynamics({0: Fan(0), 20: Fan(20)}, rows, "cka", save=tmp_path / "run.netkin")
    assert series.provenance["call"] == ("nk.dynamics(run='run', data='Tensor', measures=['cka'], pairs='all', seed=0)")
    assert series.provenance["data digest"] == series[0].provenance["data digest"]
    assert series.provenance["final weights"] == series[20].provenance["weights a"]
    state = nk.jobs.read(tmp_path / "run.netkin")
    assert (state.kind, state.condition, state.done, state.total) == ("series", "done", 2, 2)
    assert state.call == series.provenance["call"]


def test_a_shuffling_loader_leaves_the_random_states_as_they_were(rows):
    own = torch.Generator().manual_seed(5)
    for loader in (DataLoader(rows, batch_size=50, shuffle=True), DataLoader(rows, 50, shuffle=True, generator=own)):
        models = {0: Fan(0), 20: Fan(20)}
        states = torch.get_rng_state(), own.get_state()
        dynamics(models, loader)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert torch.equal(own.get_state(), states[1])


def test_a_cancelled_study_keeps_its_steps_and_goes_on(rows, tmp_path):
    file, models = tmp_path / "run.netkin", {0: Fan(0), 10: Fan(10), 20: Fan(20)}

    def forward(model, batch):
        if model is models[0] and nk.jobs.read(file).status == "running":
            nk.jobs.cancel(file)
        return model(batch)

    with pytest.raises(nk.jobs.Cancelled, match="2 of 3 steps are done"):
        dynamics(models, rows, save=file, forward=forward)
    assert (nk.load(file).missing, nk.jobs.read(file).condition) == ((10,), "cancelled")
    assert dynamics(models, rows, save=file, forward=forward).complete


def test_a_step_with_other_weights_is_done_again(rows, tmp_path):
    file = tmp_path / "run.netkin"
    dynamics({0: Fan(0), 10: Fan(10), 20: Fan(20)}, rows, save=file)
    models = {0: Fan(0), 10: Fan(11), 20: Fan(20)}
    dynamics(models, rows, save=file)
    assert [model.calls for model in models.values()] == [0, 6, 6]  # and two runs of few examples each


def test_another_kind_of_file_is_not_written_over(rows, tmp_path):
    file = tmp_path / "ab.netkin"
    nk.compare(Fan(0), Fan(1), rows).save(file)
    with pytest.raises(FileError, match="would write over '.*ab.netkin'; choose another name"):
        dynamics({0: Fan(0), 10: Fan(10)}, rows, save=file)


def test_a_damaged_checkpoint_is_named_before_the_work(rows, tmp_path):
    for step, state in run_of(low=10, middle=20, high=40).items():
        torch.save(state, tmp_path / f"step_{step}.pt")
    (tmp_path / "step_30.pt").write_bytes(b"nothing of the kind")
    seen = []
    with pytest.raises(SourceError, match="step_30.pt' is damaged"):
        dynamics(tmp_path, rows, model=Fan, forward=lambda model, batch: seen.append(batch))
    assert not seen


@pytest.mark.parametrize(
    "run, options, fault, argument",
    [
        ({0: Fan(0)}, {}, SourceError, "run"),
        ({0: Fan(0).state_dict(), 1: Fan(1).state_dict()}, {}, SourceError, "model"),
        ({0: Fan(0), 1: nn.Linear(6, 6)}, {}, SourceError, ""),
        ({0: Fan(0), 1: Fan(1)}, {"measures": "svca"}, UnknownName, "measures"),
        ({0: Fan(0), 1: Fan(1)}, {"measures": []}, InvalidValue, "measures"),
        ({0: Fan(0), 1: Fan(1)}, {"layers": "lo"}, UnknownName, "layers"),
        ({0: Fan(0), 1: Fan(1)}, {"steps": [7]}, UnknownName, "steps"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(rows, run, options, fault, argument):
    with refused(fault, argument):
        dynamics(run, rows, **options)


def test_missing_data_are_refused():
    with refused(InvalidValue, "data"):
        dynamics({0: Fan(0), 1: Fan(1)}, None)


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt, which a job in a shell's background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_real_signals_leave_a_file_to_continue_from(rows, tmp_path):
    file = tmp_path / "run.netkin"

    def forward(model, batch):
        if model.seed_of == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return model(batch)

    models = {step: Fan(step) for step in (0, 10, 20)}
    for step, model in models.items():
        model.seed_of = step
    with pytest.raises(KeyboardInterrupt):
        dynamics(models, rows, forward=forward, save=file)
    assert nk.load(file).steps == (0, 20)


def test_a_function_hears_of_the_progress_and_nothing_else_is_shown(rows, capsys):
    heard = []
    dynamics({0: Fan(0), 10: Fan(10)}, rows, progress=lambda *news: heard.append(news))
    assert (2, 2, "reading checkpoints") in heard
    assert heard[-1] == (2, 2, "comparing")
    assert capsys.readouterr().out == ""
    with refused(InvalidValue, "progress"):
        dynamics({0: Fan(0), 10: Fan(10)}, rows, progress="yes")
