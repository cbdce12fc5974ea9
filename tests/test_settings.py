"""Settings of torch come back as they were, whoever has set them and in which order threads leave."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from netkin.settings import SharedSetting, called_with, exact_products, rounded_products, tf32_in, unfused_attention

SRC = Path(__file__).parents[1] / "src"
HAS_PRECISIONS = hasattr(torch.backends, "fp32_precision")

# Convolutions begin in a state of their own, which can't be set again: every case needs a process that is new.
SCRIPT = """
import json, os, sys, torch, warnings
from netkin.settings import exact_products, rounded_products, tf32_in
warnings.simplefilter("ignore")
backends = torch.backends
owners = {"all": backends, "cuda": backends.cudnn, "products": backends.cuda.matmul}
owners |= {"conv": backends.cudnn.conv, "rnn": backends.cudnn.rnn} if hasattr(backends.cudnn, "conv") else {}

def read(owner, name):
    try:
        return getattr(owner, name)
    except Exception as fault:
        return type(fault).__name__

def state():
    found = [read(owner, "fp32_precision") for owner in owners.values()]
    return found + [read(owners["products"], "allow_tf32"), read(backends.cudnn, "allow_tf32")]

def everything():
    found = [state()]
    for owner in ("cuda", "all"):
        for precision in ("ieee", "tf32", "none"):
            if hasattr(backends, "fp32_precision"):
                owners[owner].fp32_precision = precision
            found.append(state())
    return found

def answers(steps, inside):
    exec(steps)
    if inside:
        with exact_products():
            found = [tf32_in()]
            with exact_products():
                found.append(tf32_in())
            with rounded_products():
                found.append(tf32_in())
            found.append(tf32_in())
        assert found == [(), (), ("products",), ()], found
    return everything()

for steps in json.loads(sys.argv[1]):
    for inside in (False, True):
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps([steps, inside, answers(steps, inside)]), flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
"""
FLAGS = [
    "",
    "backends.cudnn.allow_tf32 = False",
    "backends.cuda.matmul.allow_tf32 = True",
    "torch.set_float32_matmul_precision('medium')",
]
PRECISIONS = [
    "backends.fp32_precision = 'tf32'",
    "backends.fp32_precision = 'ieee'",
    "backends.cudnn.fp32_precision = 'tf32'",
    "backends.cudnn.fp32_precision = 'ieee'; backends.fp32_precision = 'tf32'",
    "backends.cudnn.fp32_precision = 'tf32'; backends.fp32_precision = 'tf32'",
    "backends.cuda.matmul.fp32_precision = 'tf32'",
    "backends.cuda.matmul.fp32_precision = 'ieee'; backends.fp32_precision = 'ieee'",
    "backends.cudnn.conv.fp32_precision = 'ieee'",
    "backends.cudnn.conv.fp32_precision = 'tf32'; backends.cudnn.rnn.fp32_precision = 'none'",
    "torch.set_float32_matmul_precision('high'); backends.cudnn.conv.fp32_precision = 'ieee'",
]
STEPS = FLAGS + PRECISIONS * HAS_PRECISIONS


@pytest.fixture(scope="module")
def answers():
    """What can be read of torch's settings, then and after further steps, without and with exact products between."""
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(STEPS)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return {(steps, inside): answer for steps, inside, answer in found}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
@pytest.mark.parametrize("steps", STEPS)
def test_products_are_exact_inside_and_all_is_as_it_was_afterwards(answers, steps):
    assert answers[steps, True] == answers[steps, False]


def test_a_setting_is_put_back_by_the_last_user_whatever_the_order():
    values = ["own"]

    def change():
        before = values[-1]
        values.append("changed")
        return lambda: values.append(before)

    setting = SharedSetting(change)
    first, second = setting.changed(), setting.changed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert values == ["own", "changed"]
    second.__exit__(None, None, None)
    assert values == ["own", "changed", "own"]


def test_overlapping_threads_leave_torch_as_it_was():
    before = tf32_in(), torch.backends.mha.get_fastpath_enabled()
    assert "convolutions" in before[0]
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def work():
        with exact_products(), unfused_attention():
            inside.set()
            leave.wait(10)
            seen.append((tf32_in(), torch.backends.mha.get_fastpath_enabled()))

    thread = threading.Thread(target=work)
    with exact_products(), unfused_attention():
        thread.start()
        inside.wait(10)
        with rounded_products():
            assert tf32_in() == ()  # another thread needs exact ones
    leave.set()
    thread.join()
    assert seen == [((), False)]
    assert (tf32_in(), torch.backends.mha.get_fastpath_enabled()) == before
    with rounded_products():
        assert "products" in tf32_in()
    assert tf32_in() == before[0]
    with exact_products(), rounded_products():
        assert tf32_in() == ("products",)
    assert tf32_in() == before[0]


class Twice(torch.nn.Module):
    """A network with one module under two names, and one weight in two modules."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.second, self.last.weight = self.first, self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu())


def test_a_module_under_two_names_has_its_own_weights_after_a_call_with_others():
    model, x = Twice(), torch.randn(5, 3)
    before = dict(model.named_parameters())
    doubled = {name: 2 * one.detach() for name, one in before.items()}
    found = called_with(model, doubled, x)
    assert dict(model.named_parameters()) == before  # the same objects
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(2)
    assert torch.equal(found, model(x))
