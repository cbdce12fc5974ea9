"""What a function or a model reaches beside its own code: a change anywhere in it changes the digest, and only that."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

from netkin.identity import form_digest, function_digest

SOURCE = """
import logging, numpy as np, torch
from dataclasses import dataclass
from torch import nn
import {aside}

log = logging.getLogger("a")
MEAN, TABLE = torch.zeros(3), [1.0, {{"a": 2}}]
SCALE = 1.0

def helper(x):
    return x * 1

def second(x):
    return helper(x) + (helper(x) if SCALE > 9 else 0)

class Config:
    scale = 1.0

    def scaled(self, x):
        return x * self.scale

CONFIG = Config()

class Called:
    def __call__(self, x):
        return self.inner(x)

class Inherited(Called):
    def inner(self, x):
        return x + 0

@dataclass
class Record:
    by: float = 1.0

    def __call__(self, x):
        return x - 1

class Slots:
    __slots__ = ("by",)

    def __init__(self):
        self.by = 1.0

    def __call__(self, x):
        return x / self.by

class Block(nn.Module):
    slope = 0.1

    def __init__(self):
        super().__init__()
        self.inner, self.power, self.seen, self.calls = nn.Linear(3, 3), 2, [], 0

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        return self._bent(self.inner(x)) ** self.power

    def _bent(self, x):
        return torch.nn.functional.leaky_relu(x, self.slope)

    def unrelated(self):
        return "text"

FUNCTIONS = {{
    "helper": lambda x: helper(x),
    "helper of a helper": lambda x: second(x),
    "tensor": lambda x: x - MEAN,
    "list": lambda x: x * TABLE[0],
    "nested": lambda x: [(lambda one: one * SCALE)(one) for one in x],
    "object": lambda x: CONFIG.scaled(x),
    "class": lambda x: Config().scaled(x),
    "inherited": Inherited(),
    "record": Record(),
    "slots": Slots(),
    "module": Block().forward,
    "aside": lambda x: {aside}.shifted(x),
    "logged": lambda x: (log.info("x"), np.abs(x))[1],
}}
"""


def made(source=SOURCE, aside="def shifted(x):\n    return x + 1\n"):
    """Return the functions of a module of the user's, whose weights follow from the seed."""
    other = type(sys)("aside_of_tests")
    exec(compile(aside, "aside", "exec"), vars(other))
    sys.modules["aside_of_tests"] = other
    user = type(sys)("user_of_tests")
    sys.modules["user_of_tests"] = user
    torch.manual_seed(0)
    exec(compile(source.format(aside="aside_of_tests"), "user", "exec"), vars(user))
    return user


@pytest.mark.parametrize(
    "names, old, new",
    [
        ({"helper", "helper of a helper"}, "return x * 1", "return x * 3"),
        ({"tensor"}, "torch.zeros(3)", "torch.ones(3)"),
        ({"list"}, '{{"a": 2}}', '{{"a": 3}}'),
        ({"nested", "helper of a helper"}, "SCALE = 1.0", "SCALE = 5.0"),
        ({"object", "class"}, "    scale = 1.0", "    scale = 2.0"),
        ({"object", "class"}, "return x * self.scale", "return x + self.scale"),
        ({"inherited"}, "return x + 0", "return x + 1"),
        ({"record"}, "return x - 1", "return x - 2"),
        ({"slots"}, "self.by = 1.0", "self.by = 3.0"),
        ({"slots"}, "return x / self.by", "return x // self.by"),
        ({"module"}, "leaky_relu(x,", "elu(x,"),
        ({"module"}, "slope = 0.1", "slope = 0.2"),
        ({"module"}, "nn.Linear(3, 3), 2,", "nn.Linear(3, 3), 3,"),
    ],
)
def test_a_change_in_what_a_function_reaches_changes_its_digest_and_no_other(names, old, new):
    before, after = (made(source).FUNCTIONS for source in (SOURCE, SOURCE.replace(old, new)))
    assert SOURCE.replace(old, new) != SOURCE
    assert {name for name in before if function_digest(before[name]) != function_digest(after[name])} == names


def test_a_module_of_the_users_counts_where_it_is_read():
    before, after = made().FUNCTIONS, made(aside="def shifted(x):\n    return x + 2\n").FUNCTIONS
    assert {name for name in before if function_digest(before[name]) != function_digest(after[name])} == {"aside"}


def test_a_model_that_has_run_keeps_its_form_and_one_that_differs_does_not():
    user = made()
    model = nn.Sequential(user.Block(), nn.Dropout(0.1))
    first = form_digest(model)
    model(torch.ones(4, 3))
    assert (model[0].calls, form_digest(model)) == (1, first)
    model[0].power = 3
    assert form_digest(model) != first
    for old, new in (("leaky_relu(x,", "elu(x,"), ("slope = 0.1", "slope = 0.2")):
        assert form_digest(nn.Sequential(made(SOURCE.replace(old, new)).Block(), nn.Dropout(0.1))) != first
    assert form_digest(nn.Sequential(made(SOURCE.replace('"text"', '"other"')).Block(), nn.Dropout(0.1))) == first
    assert form_digest(nn.Sequential(user.Block(), nn.Dropout(0.2))) != first


def test_functions_that_call_each_other_are_each_read_once():
    layers = [f"def f{k}(x):\n    return f{k - 1}(x) + f{k - 1}(-x)\n" for k in range(1, 200)]
    scope = {"__name__": "chain_of_tests"}
    exec("def f0(x):\n    return x\n" + "".join(layers), scope)
    digest = function_digest(scope["f40"])
    scope["f0"].__code__ = (lambda x: x + 1).__code__
    assert function_digest(scope["f40"]) != digest


def test_a_logger_counts_by_its_kind_alone():
    digest = function_digest(made().FUNCTIONS["logged"])
    logging.getLogger("another of the tests")
    assert function_digest(made().FUNCTIONS["logged"]) == digest


def test_another_process_finds_the_same_digests():
    code = "import sys; sys.path.insert(0, 'tests/identity'); import test_reached_code as t\nprint(*t.all_digests())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {" ".join(all_digests()) + "\n"}


def all_digests():
    user = made()
    return [*map(function_digest, user.FUNCTIONS.values()), form_digest(user.Block())]
