"""What a recorder says no to, in one sentence each."""

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.dynamics.states import Moment
from netkin.errors import FileError, ForwardError, InvalidValue, UnknownName
from recorder_worlds import images, net
from refusals import refusals, refused


def test_a_measure_that_looks_at_single_units_is_refused():
    refusals(
        (lambda: nk.DynamicsRecorder(net(), images(), measures="pwcca"), InvalidValue, ""),
        (lambda: nk.DynamicsRecorder(net(), images()).series(["cka", "cka_rbf"]), InvalidValue, ""),
        (lambda: nk.DynamicsRecorder(net(), images(), measures=[]), InvalidValue, "measures"),
    )


def test_frequencies_are_refused():
    with pytest.raises(
        InvalidValue, match="shape 'dft' has a block for each frequency; save checkpoints and use `nk.dyn"
    ):
        nk.DynamicsRecorder(net(), images(), shape="dft")
    with pytest.raises(InvalidValue, match="shape 'dft'"):
        nk.DynamicsRecorder(net(), images(), shape={"0": "dft"})


def test_wrong_options_are_refused_before_training():
    refusals(
        (lambda: nk.DynamicsRecorder(net(), images(), every=0), InvalidValue, "every"),
        (lambda: nk.DynamicsRecorder(net(), images(), batch=2.5), InvalidValue, "batch"),
        (lambda: nk.DynamicsRecorder(net(), images(), layers=["conv9"]), UnknownName, "layers"),
        (lambda: nk.DynamicsRecorder(net(), images(), examples=0), InvalidValue, "examples"),
    )


def test_a_step_that_is_not_after_the_last_is_refused():
    recorder = nk.DynamicsRecorder(net(), images(), layers=["0"])
    recorder.probe(5)
    with pytest.raises(
        InvalidValue, match="last probe was taken at step 5, and step 3 is not after it; `recorder.forget.*2"
    ):
        recorder.probe(3)
    recorder.forget(after=2)
    recorder.probe(3)


def test_a_series_without_probes_is_refused():
    with pytest.raises(InvalidValue, match="no probe has been taken yet"):
        nk.DynamicsRecorder(net(), images()).series()


def test_other_examples_are_refused_when_a_recording_goes_on(tmp_path):
    recorder = nk.DynamicsRecorder(net(), images())
    recorder.probe(0)
    recorder.save(tmp_path / "run.netkin")
    with pytest.raises(InvalidValue, match="taken on other examples of 'Tensor' than those of 'Tensor' given now"):
        nk.DynamicsRecorder(net(), images().flip(0)).load(tmp_path / "run.netkin")


def test_a_file_of_another_kind_or_a_damaged_one_is_refused(tmp_path):
    recorder = nk.DynamicsRecorder(net(), images())
    recorder.probe(0)
    recorder.series().save(tmp_path / "series.netkin")
    with pytest.raises(FileError, match="holds 'series', not 'recording'"):
        recorder.load(tmp_path / "series.netkin")
    nk.files.write(tmp_path / "bad.netkin", "recording", {"moments": [{"step": 1}]}, {"x": np.ones(1)})
    with pytest.raises(FileError, match="bad.netkin' is damaged: .*missing 2 required"):
        recorder.load(tmp_path / "bad.netkin")
    recorder.save(tmp_path / "run.netkin")
    with pytest.raises(FileError, match="holds a 'recording', which takes no models; got 1"):
        nk.load(tmp_path / "run.netkin", net())


def test_layers_that_come_and_go_are_refused():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.both = nn.Linear(3, 3), nn.Linear(3, 3), True

        def forward(self, x):
            return self.b(self.a(x)) if self.both else self.a(x)

    model = Fickle()
    recorder = nk.DynamicsRecorder(model, torch.randn(9, 3))
    recorder.probe(0)
    model.both = False
    with pytest.raises(ForwardError, match="layer 'b' does not run in every batch"):
        recorder.probe(1)


def test_another_shape_is_refused_when_a_recording_goes_on():
    recorder, other = (nk.DynamicsRecorder(net(), images(), shape=shape) for shape in ("pool", "flatten"))
    recorder.probe(0)
    other.load_state_dict(recorder.state_dict())
    with pytest.raises(InvalidValue, match="layer '0' was recorded with shape 'pool' and now has 'flatten'"):
        other.probe(1)


def test_a_sharded_model_is_refused():
    class FullyShardedDataParallel(nn.Sequential):
        """Stands for torch's own, which needs several processes."""

    with refused(InvalidValue):
        nk.DynamicsRecorder(FullyShardedDataParallel(nn.Linear(2, 2)), torch.randn(5, 2)).probe(0)


def test_a_moment_of_layers_without_values_has_none():
    assert Moment(0, "step", {}, 3).layers == []
