"""Borrowed models: everything is as it was when we leave."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import netkin as nk
from netkin.errors import InvalidValue
from netkin.representations import Recorder, activations
from netkin.representations.hooks import inference_mode_of
from netkin.representations.inputs import model_precision, precision_in_words
from netkin.settings import frozen, tf32_in
from worlds import data_parallel


def state(model):
    """Return all that a guest could have changed, in comparable form."""
    return {
        "training": [module.training for module in model.modules()],
        "grad": [parameter.requires_grad for parameter in model.parameters()],
        "buffers": [buffer.tolist() for buffer in model.buffers()],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "enabled": torch.is_grad_enabled(),
        "fused": torch.backends.mha.get_fastpath_enabled(),
    }


@pytest.fixture
def uneven(residual):
    """A model some of whose modules train, others do not; the same for its gradients."""
    residual.train()
    residual.layer1.eval()
    residual.layer1[1].train()
    residual.fc.weight.requires_grad_(False)
    return residual


def expecting(fault):
    return pytest.raises(fault) if fault else nullcontext()


def disturb():
    torch.rand(3)
    random.random()
    np.random.rand(3)


def test_inside_the_models_evaluate_and_build_no_graph(uneven, images):
    with inference_mode_of(uneven):
        assert not any(module.training for module in uneven.modules())
        assert not uneven(images).requires_grad
        assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("fault", [None, RuntimeError, KeyboardInterrupt])
def test_afterwards_all_is_as_it_was(uneven, images, fault):
    before = state(uneven)
    with expecting(fault), inference_mode_of(uneven, nn.Dropout()):
        disturb()
        uneven(images)
        if fault:
            raise fault
    assert state(uneven) == before


@pytest.mark.parametrize("fault", [None, RuntimeError, KeyboardInterrupt])
def test_activations_leave_all_as_it_was(uneven, images, fault):
    def stream():
        yield images
        disturb()
        if fault:
            raise fault
        yield images

    before = state(uneven)
    with expecting(fault):
        activations(uneven, data=stream())
    assert state(uneven) == before


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_a_fault_inside_the_forward_leaves_all_as_it_was(uneven, images, fault):
    def crash(module, inputs):
        raise fault

    before = state(uneven)
    handle = uneven.layer2.register_forward_pre_hook(crash)
    with pytest.raises(fault):
        activations(uneven, data=images)
    handle.remove()
    assert state(uneven) == before


def test_an_overridden_eval_is_not_called():
    class Merging(nn.Linear):
        def train(self, mode=True):
            if not mode:
                self.weight.data.zero_()
            return super().train(mode)

    model = Merging(2, 2)
    with inference_mode_of(model):
        assert not model.training
    assert model.weight.abs().sum() > 0


def test_a_compiled_model_is_a_host_too(residual):
    compiled = torch.compile(residual.train(), backend="eager")
    residual.bn1.eval()
    before = [module.training for module in residual.modules()]
    with inference_mode_of(compiled):
        assert not any(module.training for module in residual.modules())
    assert [module.training for module in residual.modules()] == before


class Looking(nn.Module):
    """Notes where TF32 is allowed while it runs."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Linear(4, 3), []

    def forward(self, batch):
        self.seen.append(tf32_in())
        return self.inner(batch)


def test_a_model_runs_in_the_precision_that_is_set_unless_it_must_be_exact():
    model, data, kept = Looking(), torch.randn(5, 4), []
    allowed = tf32_in()
    assert "convolutions" in allowed  # as torch has it unless told otherwise
    with inference_mode_of(model):
        Recorder(model, "inner", reduce=lambda name, rows, valid: kept.append(tf32_in()) or True)(data)
    activations(model, "inner", data)
    activations(model, "inner", data, exact_model=True)
    with inference_mode_of(model, exact=True):
        model(data)
    assert model.seen == [allowed] * 6 + [()] * 4
    assert kept == [allowed]  # the pass sees to it that its own products are exact
    assert tf32_in() == allowed


def test_the_precision_of_models_is_told_in_words():
    single, half, bare = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16), nn.ReLU()
    assert model_precision(single) == model_precision(single, bare, exact=True) == "float32, exact"
    assert model_precision(single, half, single) == "float32, exact and bfloat16"
    assert model_precision(bare) == "no weights"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model_precision(single) == "float32, exact, autocast to bfloat16"
    assert precision_in_words("float64", ("products",)) == "float64"
    assert precision_in_words("float32", ("convolutions",)) == "float32, TF32 in convolutions"
    three = "float32, TF32 in products, convolutions and recurrent layers"
    assert precision_in_words("float32", ("products", "convolutions", "recurrent layers")) == three


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_a_gpu_rounds_to_tf32_unless_it_must_be_exact():
    model, images = nn.Conv2d(64, 64, 3).cuda(), torch.randn(8, 64, 32, 32, device="cuda")
    exact = nn.functional.conv2d(images.double(), model.weight.double(), model.bias.double())
    faults = []
    for must_be_exact in (False, True):
        with inference_mode_of(model, exact=must_be_exact):
            faults.append(((model(images).double() - exact).abs().max() / exact.abs().max()).item())
    assert faults[0] > 1e-5 > faults[1]
    assert model_precision(model) == "float32, TF32 in convolutions and recurrent layers"
    assert model_precision(model, exact=True) == "float32, exact"


@pytest.mark.parametrize(
    "run",
    [
        lambda model, data: activations(model, data=data),
        lambda model, data: activations(data_parallel(model), data=data),
        lambda model, data: nk.compare(model, data=data),
        lambda model, data: nk.explain(model, data=data),
        lambda model, data: nk.DynamicsRecorder(model, data),
        lambda model, data: inference_mode_of(nn.Linear(2, 2), model).__enter__(),
    ],
)
def test_lazy_modules_are_refused_before_they_draw_their_weights(run):
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(2)))
    with pytest.raises(InvalidValue, match=r"layer '.*1\.0' is a lazy module without weights yet; run the model once"):
        run(model, torch.randn(5, 4))
    assert is_lazy(model[1][1].weight)
    model(torch.randn(5, 4))
    assert list(activations(model, data=torch.randn(5, 4))) == ["0", "1"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_random_state_of_the_models_device_is_as_it_was(residual):
    residual.cuda()
    before = torch.cuda.get_rng_state()
    with inference_mode_of(residual):
        torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("fault", [None, RuntimeError])
def test_frozen_weights_ask_for_no_gradient_and_have_their_own_flags_afterwards(uneven, fault):
    before = state(uneven)
    with expecting(fault), frozen(uneven):
        assert not any(weight.requires_grad for weight in uneven.parameters())
        if fault:
            raise fault
    assert state(uneven) == before
    assert {True, False} == {*before["grad"]}
