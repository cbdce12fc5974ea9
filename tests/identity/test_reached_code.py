"""What a function or a model reaches beside its own code: a change anywhere in it changes the digest, and only that."""

import copy
import logging
import subprocess
import sys
from argparse import Namespace
from collections import deque
from datetime import date
from decimal import Decimal
from functools import lru_cache, partial
from operator import itemgetter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from netkin.identity import form_digest, function_digest, settings_digest

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
    "aside by a text": lambda x: getattr({aside}, "shifted")(x),
    "aside by texts": lambda x: [getattr({aside}, name)(x) for name in ("shifted", "other")],
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
    assert {name for name in before if function_digest(before[name]) != function_digest(after[name])} == {
        "aside", "aside by a text", "aside by texts",
    }  # fmt: skip


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


def test_a_model_is_the_same_on_every_device():
    digests = []
    for rank in range(2):
        model = nn.Sequential(nn.Linear(2, 2))
        model.device, model.home, model.hf_device_map = torch.device("cuda", rank), f"cuda:{rank}", {"": rank}
        model[0]._hf_hook = f"executes on {rank}"
        digests.append(form_digest(model))
    assert digests == [form_digest(nn.Sequential(nn.Linear(2, 2)))] * 2


class Wrapping(nn.Module):
    def __init__(self, inner, **attributes):
        super().__init__()
        self.model = inner
        vars(self).update(attributes)

    def forward(self, x):
        parts = []
        parts.append(self.model(x))
        return parts[0] * self.settings["by"]


def test_a_global_that_is_named_like_an_attribute_does_not_count(monkeypatch):
    wrap = Wrapping(nn.Linear(3, 3), settings={"by": 1})
    first = form_digest(wrap)
    monkeypatch.setitem(globals(), "model", nn.Linear(3, 3))
    assert form_digest(wrap) == first


def test_settings_that_the_forward_reads_count_though_it_appends_to_a_list_of_its_own():
    inner = nn.Linear(3, 3)
    assert form_digest(Wrapping(inner, settings={"by": 1})) != form_digest(Wrapping(inner, settings={"by": 2}))


def test_objects_of_python_itself_count_with_what_they_hold():
    pairs = [
        (Namespace(k=1), Namespace(k=2)), (SimpleNamespace(k=1), SimpleNamespace(k=2)), (Decimal(1), Decimal(2)),
        (itemgetter(0), itemgetter(1)), (deque([1]), deque([2])), (date(2026, 1, 1), date(2026, 1, 2)),
    ]  # fmt: skip
    for one, other in pairs:
        first, same, changed = (function_digest(partial(print, value)) for value in (one, copy.copy(one), other))
        assert first == same != changed
    log, another = (function_digest(partial(print, logging.getLogger(name))) for name in ("a", "b"))
    assert log == another


def test_the_order_of_a_mapping_does_not_count_where_values_are_shared():
    def one(x):
        return x

    assert settings_digest({"a": one, "b": one}) == settings_digest({"b": one, "a": one})


def test_a_cached_function_counts_with_its_code():
    first, second = (lru_cache(eval(f"lambda x: x + {k}")) for k in (1, 2))
    assert function_digest(first) != function_digest(second)


def test_weights_and_what_is_made_of_them_are_no_part_of_a_form():
    torch.manual_seed(0)
    lstm, other = nn.LSTM(3, 4), nn.LSTM(3, 4)
    assert form_digest(lstm) == form_digest(other)
    pruned = nn.Sequential(nn.Linear(3, 3))
    prune.l1_unstructured(pruned[0], "weight", 0.5)
    first = form_digest(pruned)
    with torch.no_grad():
        pruned[0].weight_orig.mul_(2)
    pruned(torch.ones(1, 3))
    assert form_digest(pruned) == first


def test_a_wrapper_of_torch_is_no_part_of_a_form():
    model = made().Block()
    assert (
        form_digest(nn.DataParallel(model)) == form_digest(torch.compile(model, backend="eager")) == form_digest(model)
    )
    before = form_digest(model)
    model._compile_kwargs = {"backend": "eager"}  # as `torch.compile` leaves it where Lightning is imported
    assert form_digest(model) == before


def test_many_objects_that_hold_each_other_are_read_in_no_time():
    blocks = [Wrapping(nn.Identity(), settings={}) for _ in range(30)]
    for block in blocks:
        block.others = [one for one in blocks if one is not block]
    first = form_digest(blocks[0])
    blocks[7].power = 2
    assert form_digest(blocks[0]) != first
    long = None
    for _ in range(2000):
        long = SimpleNamespace(inner=long)
    assert function_digest(partial(print, long, np.array([None, "a"], dtype=object)))
