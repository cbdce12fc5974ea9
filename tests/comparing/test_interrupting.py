"""Ctrl-C: raised by default, and with `partial=True` an early end that keeps what is finished."""

import signal
import threading
from datetime import datetime, timezone
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.comparing import tabulating
from netkin.progress import Interruption
from netkin.results import Comparison
from netkin.statistics import LayerMoments
from table_worlds import sentences


def interrupted(batches, after, how):
    """Yield batches; when `after` of them have been asked for, interrupt as `how` says."""
    for i, batch in enumerate(batches):
        if i == after:
            how()
        yield batch


def raise_interrupt():
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def listening():
    """Listen to Ctrl-C even where the tests run in the background, whose processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("how", [raise_interrupt, press])
def test_the_batches_so_far_count(state_of, maps, images, how, tmp_path):
    a, b = maps(), maps()
    before, handler = state_of(a), signal.getsignal(signal.SIGINT)
    batches = list(images.split(16))
    comparison = nk.compare(a, b, interrupted(batches, 2, how), ["cka", "cka_minibatch(batch=16)"], partial=True)
    assert not comparison.complete
    assert comparison.examples == 32
    assert sentences(comparison) == ("interrupted: these numbers rest on the first 32 examples.",)
    whole = nk.compare(a, b, batches[:2], ["cka", "cka_minibatch(batch=16)"])
    for measure in whole:
        assert comparison.to_numpy(measure) == pytest.approx(whole.to_numpy(measure), abs=1e-9)
    assert state_of(a) == before
    assert signal.getsignal(signal.SIGINT) is handler
    comparison.save(tmp_path / "part.netkin")
    assert not Comparison.load(tmp_path / "part.netkin").complete


@pytest.mark.parametrize("how", [raise_interrupt, press])
def test_without_partial_it_is_raised(maps, images, how):
    with pytest.raises(KeyboardInterrupt):
        nk.compare(maps(), data=interrupted(images.split(16), 2, how))


def test_before_the_first_batch_is_done_there_is_nothing_to_return(maps, images):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        nk.compare(maps(), data=interrupted(images.split(16), 0, press), partial=True)
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_while_a_model_runs_ends_the_pass(maps, images):
    model = maps()
    model.fc.register_forward_hook(lambda *_: press() if model.calls == 2 + 3 else None)
    comparison = nk.compare(model, data=list(images.split(10)), partial=True)
    assert (comparison.examples, comparison.complete) == (20, False)


def test_ctrl_c_while_a_batch_is_folded_in_waits_for_its_end(maps, images, monkeypatch):
    update, batches = LayerMoments.update, iter(range(5))

    def pressed(self, rows, numbers):
        if next(batches) == 2:
            press()
        update(self, rows, numbers)

    monkeypatch.setattr(LayerMoments, "update", pressed)
    comparison = nk.compare(maps(), data=list(images.split(10)), partial=True)
    assert (comparison.examples, comparison.complete) == (30, False)


def test_a_second_ctrl_c_while_folding_gives_up(maps, images, monkeypatch):
    update, batches = LayerMoments.update, iter(range(5))

    def pressed_twice(self, rows, numbers):
        if next(batches) == 2:
            press()
            press()
        update(self, rows, numbers)

    monkeypatch.setattr(LayerMoments, "update", pressed_twice)
    with pytest.raises(KeyboardInterrupt):
        nk.compare(maps(), data=list(images.split(10)), partial=True)


def test_ctrl_c_while_measuring_leaves_the_rest_as_holes(maps, images, monkeypatch):
    measured = []

    def value_of(measure, statistic):
        measured.append(measure)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.setattr(tabulating, "value_of", value_of)
    many = nk.compare_many([maps(), maps(), maps()], images, layers=["conv1", "fc"], partial=True)
    assert [len(comparison["cka"].missing) for comparison in many.values()] == [1, 4, 4]
    assert not any(comparison.complete for comparison in many.values())
    assert set(many["1", "2"]["cka"].missing.values()) == {"interrupted before this pair was reached"}
    assert sentences(many["0", "1"]) == ("interrupted: some pairs were not reached, and have no value.",)
    measured.clear()
    with pytest.raises(KeyboardInterrupt):
        nk.compare(maps(), maps(), images)


def test_another_thread_is_served_without_touching_signals(maps, images):
    found = []
    batches = interrupted(list(images.split(16)), 1, raise_interrupt)
    worker = threading.Thread(target=lambda: found.append(nk.compare(maps(), data=batches, partial=True)))
    worker.start()
    worker.join()
    assert found[0].examples == 16


def test_a_handler_that_python_does_not_know_is_replaced_by_the_default(monkeypatch):
    put = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: put.append(handler))
    with Interruption(wanted=True).handling():
        pass
    assert put[1] is signal.SIG_DFL


def test_numbers_stay_finite_or_explained(maps, images):
    comparison = nk.compare(maps(), data=interrupted(images.split(1), 1, press), partial=True)
    assert np.isnan(comparison.to_numpy()).all()
    assert "constant over the 1 examples" in next(iter(comparison["cka"].missing.values()))
    assert torch.is_grad_enabled()


class Stopping(torch.nn.Module):
    """A net that stops its process, as Ctrl-C does, after some batches."""

    left = 10**9

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 40), torch.nn.Linear(40, 3)

    def forward(self, inputs):
        self.left -= 1
        return raise_interrupt() if self.left < 0 else self.last(self.first(inputs).tanh())


@pytest.mark.slow
def test_the_file_of_a_continued_job_has_the_bytes_of_one_that_never_stopped(tmp_path, monkeypatch):
    noon = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
    monkeypatch.setattr("netkin.results.records.datetime", SimpleNamespace(now=lambda zone: noon))
    torch.manual_seed(0)
    nets, data = {name: Stopping() for name in "abcd"}, list(torch.randn(600, 4).split(100))
    call = {"measures": ["cka", "svcca"], "progress": False}
    call["memory"] = int(nk.explain_many(nets, data, **call).schedule.statistics * 0.7)  # several passes
    nk.compare_many(nets, data, **call, save=tmp_path / "whole.netkin")
    nets["d"].left = 8
    with pytest.raises(KeyboardInterrupt):
        nk.compare_many(nets, data, **call, save=tmp_path / "parted.netkin")
    nets["d"].left = 10**9
    made = nk.compare_many(nets, data, **call, save=tmp_path / "parted.netkin")
    assert (tmp_path / "parted.netkin").read_bytes() == (tmp_path / "whole.netkin").read_bytes()
    assert {type(text) for one in made.values() for text in one.provenance.values()} == {str}
