"""Threads that share models wait for each other, and leave them as they were."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.representations import activations, inference_mode_of, model_lock, recording, run_until
from netkin.representations.hooks import uncompiled

COUNT = 20


@pytest.fixture(autouse=True)
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_two_threads(first, second):
    """Return what both functions give, each called often in a thread of its own."""
    with ThreadPoolExecutor(2) as pool:
        ran = [pool.submit(lambda work=work: [work() for _ in range(COUNT)]) for work in (first, second)]
        return [one.result(60) for one in ran]


@pytest.fixture
def shared():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train()


@pytest.mark.slow
def test_comparisons_of_shared_models_in_two_threads_give_what_they_give_alone(shared):
    other = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).train()
    data = list(torch.randn(40, 4).split(10))
    there, back = nk.compare(shared, other, data).to_numpy(), nk.compare(other, shared, data).to_numpy()
    found = in_two_threads(lambda: nk.compare(shared, other, data), lambda: nk.compare(other, shared, data))
    assert all((one.to_numpy() == there).all() for one in found[0])
    assert all((one.to_numpy() == back).all() for one in found[1])
    assert all(module.training for module in (*shared.modules(), *other.modules()))
    assert not any(module._forward_hooks for module in (*shared.modules(), *other.modules()))


def test_two_models_that_share_a_module_wait_for_each_other(shared):
    first, second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared[2], nn.ReLU())
    inputs, states = torch.randn(30, 4), torch.randn(30, 8)
    expected = [activations(first, ["0.2", "1"], inputs), activations(second, ["0", "1"], states)]
    found = in_two_threads(
        lambda: activations(first, ["0.2", "1"], inputs), lambda: activations(second, ["0", "1"], states)
    )
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(rows[layer], one[layer]) for rows in other for layer in one)
    assert shared[1].training
    assert first.training


def test_a_model_that_is_cut_in_one_thread_is_whole_in_another(shared):
    inputs, inside, done = torch.randn(30, 4), threading.Event(), threading.Event()
    expected = activations(shared, data=inputs)["2"]

    def run_late(model, batch):
        inside.set()
        done.wait(0.2)
        return model(batch)

    def read():
        inside.wait(10)
        found = activations(shared, data=inputs)["2"]
        done.set()
        return found

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(read)
        assert torch.equal(run_until(shared, "0", inputs, run_late), shared[0](inputs))
        assert torch.equal(found.result(60), expected)


def test_a_thread_waits_until_a_guest_has_left(shared):
    began, done = threading.Event(), threading.Event()

    def work():
        began.set()
        with inference_mode_of(shared):
            done.set()

    thread = threading.Thread(target=work)
    with model_lock(), inference_mode_of(shared):
        thread.start()
        began.wait(10)
        assert not done.wait(0.05)
    thread.join(10)
    assert done.is_set()


def test_overlapping_recordings_of_a_compiled_model_leave_it_compiled(shared):
    compiled = torch.compile(shared, backend="eager")
    inner = nn.Linear(4, 3)
    inner.compile(backend="eager")
    for model, layer in ((compiled, "0"), (nn.Sequential(inner), "0")):
        before = [(vars(module).get("forward"), vars(module).get("_compiled_call_impl")) for module in model.modules()]
        first, second = recording(model, layer), uncompiled(model)
        outputs = first.__enter__()
        second.__enter__()
        model(torch.ones(2, 4))
        assert "0" in outputs
        first.__exit__(None, None, None)
        with recording(model, layer) as outputs:
            model(torch.ones(2, 4))
        assert "0" in outputs
        second.__exit__(None, None, None)
        after = [(vars(module).get("forward"), vars(module).get("_compiled_call_impl")) for module in model.modules()]
        assert after == before
