"""Digests of settings and functions, and the calls that results name."""

import functools
import importlib
import json
import math
import sys
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue
from netkin.identity import described_call, function_digest, settings_digest, source_digest
from refusals import refused


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Point:
    x: float
    y: float = 0.0


def test_equal_settings_have_equal_digests():
    for one, other in [
        ({"a": 1, "b": {"c": 2, "d": 3}}, OrderedDict(b={"d": 3, "c": 2}, a=1)),
        ([1, (2, 3)], (1, [2, 3])),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        (np.float64(0.5), 0.5),
        (np.arange(3), torch.arange(3)),
        (np.array(3.0, np.float32), torch.tensor(3.0)),
        (Point(1.0), Point(1.0, 0.0)),
        (math.nan, float("nan")),
        (json.loads(json.dumps({"k": [1, 0.1, None, "a"]})), {"k": (1, 0.1, None, "a")}),
    ]:
        assert settings_digest(one) == settings_digest(other)


def test_other_settings_have_other_digests():
    values = [
        None, True, 1, 1.0, "1", b"1", 1j, [], {}, [[]], [1], ["1"], [1, 2], [2, 1], {"a": 1}, {"a": 2}, {"b": 1},
        {1: "a"}, {"1": "a"}, set(), {1, 2}, -0.0, 0.0, "a, str 'b'", ["a", "b"], Colour.RED, Colour.BLUE, Point(1.0),
        Point(2.0), torch.float32, torch.float16, torch.device("cpu"), Path("a"), slice(1), slice(2), range(3),
        torch.arange(3), torch.arange(3.0), nn.Identity(), len, sum, Point, lambda x: x,
    ]  # fmt: skip
    assert len({settings_digest(value) for value in values}) == len(values)


def test_settings_without_a_digest_are_refused_by_their_place():
    with pytest.raises(InvalidValue) as refused:
        settings_digest({"a": [1, object()]})
    assert refused.value.argument == "settings['a'][1]"
    assert settings_digest([1, object()], strict=False) == settings_digest([1, object()], strict=False)


def closing_over(value):
    return lambda x: x + value


def calling_itself(step):
    def down(n):
        return down(n - step) if n > 0 else 0

    return down


class Scaling:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by

    def method(self, x):
        return x * self.by


def test_the_same_function_has_the_same_digest():
    for make in (closing_over, calling_itself, Scaling, lambda value: Scaling(value).method):
        assert function_digest(make(2)) == function_digest(make(2)) != function_digest(make(3))


def test_a_changed_function_is_noticed():
    functions = [
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x - 1,
        lambda x: x.sin(),
        lambda x: x.cos(),
        lambda x, y=1: x,
        lambda x, y=2: x,
        lambda x, *, y=2: x,
        lambda x: [y + 1 for y in x],
        lambda x: [y + 2 for y in x],
        lambda x: x in {"a", "b"},
        lambda x: x in {"a", "c"},
        closing_over(torch.zeros(2)),
        closing_over(torch.ones(2)),
        closing_over(closing_over(1)),
        closing_over(closing_over(2)),
        functools.partial(max, 1),
        functools.partial(max, 2),
        functools.partial(max, default=2),
        max, min, torch.sin, torch.cos, np.sin, Scaling, "a".upper, "b".upper,
        nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(3, 2).forward,
    ]  # fmt: skip
    assert len({function_digest(function) for function in functions}) == len(functions)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not say which lambda of a line it is")
def test_lambdas_in_one_line_are_told_apart():
    plus, minus, nested, plain = lambda x: x + 1, lambda x: x - 1, lambda x: lambda y: x * y, lambda x: x
    functions = [plus, minus, nested, nested(2), plain]
    assert len({source_digest(function) for function in functions}) == len(functions)


def test_the_statement_around_a_lambda_does_not_count(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, line in (("early", "f = lambda x: x + 1"), ("later", "some = print, f = 3, lambda x: x + 1")):
        (tmp_path / f"{name}_lambda.py").write_text(line.replace("some = print, f = 3,", "other, f = 3,") + "\n")
    first, second = (importlib.import_module(f"{name}_lambda").f for name in ("early", "later"))
    second.__module__ = first.__module__
    assert function_digest(first) == function_digest(second)


def test_the_values_of_a_function_are_left_out_of_the_digest_of_its_source():
    assert source_digest(closing_over(1)) == source_digest(closing_over(2)) != source_digest(calling_itself(1))
    assert source_digest(Scaling(1)) == source_digest(Scaling(2)) != source_digest(Point(1.0))


def test_functions_without_a_source_are_known_by_their_names():
    found = {}
    exec("def f(x): return x\ndef g(x): return x", found)
    assert function_digest(found["f"]) != function_digest(found["g"])


def test_what_a_function_reads_by_a_global_name_is_given_up(monkeypatch):
    def reading(x):
        return x * globals()["K"]

    monkeypatch.setitem(globals(), "K", 1)
    before = function_digest(reading)
    monkeypatch.setitem(globals(), "K", 2)
    assert function_digest(reading) == before


def test_what_is_no_function_is_refused():
    with refused(InvalidValue, "function"):
        function_digest(3)


def test_a_call_is_described_by_its_options_or_by_the_command():
    from netkin.progress import as_command, command

    assert (
        described_call("nk.f", model=nn.Linear(1, 1), k=[1, 2], how=len, data=None)
        == "nk.f(model=Linear, k=[1, 2], how=len)"
    )
    assert len(described_call("nk.f", layers=list(range(1000)))) < 250
    with as_command("netkin f --k 1"):
        assert described_call("nk.f", k=1) == command() == "netkin f --k 1"
    assert command() == ""


def test_every_result_names_the_call_that_made_it(tmp_path):
    net, other = (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in "ab")
    x, silent = torch.randn(40, 4), {"progress": False}
    many = nk.compare_many({"a": net, "b": other}, x, save=tmp_path / "many.netkin", **silent)
    series = nk.dynamics({0: net, 1: other}, x, **silent)
    found = {
        "nk.compare(a=Sequential, b=Sequential, data=Tensor, measures='cka', layers=['0'])": nk.compare(
            net, other, x, measures="cka", layers=["0"], **silent
        ),
        "nk.compare_many(models={'a': Sequential, 'b': Sequential}, data=Tensor)": many["a", "b"],
        "Comparer.compute(measures=['nbs'])": nk.collect(net, data=x, **silent).compute(["nbs"]),
        "nk.class_sensitivity(model=Sequential, data=Tensor)": nk.class_sensitivity(net, x, **silent),
        "nk.compare_tasks(tasks={'a': (Sequential, Tensor)})": nk.compare_tasks({"a": (net, x)}, **silent)["a", "a"],
        "nk.sparsity_study(models=Sequential)": nk.sparsity_study(net, **silent),
        series.provenance["call"]: series.comparisons[0],
    }
    assert {call: one.provenance["call"] for call, one in found.items()} == {call: call for call in found}
    assert series.provenance["call"].startswith("nk.dynamics(")
    assert nk.load(tmp_path / "many.netkin")["a", "b"].provenance == many["a", "b"].provenance


def test_of_long_data_no_more_is_read_than_a_call_shows():
    class Long(list):
        def __iter__(self):
            for place, one in enumerate(super().__iter__()):
                assert place < 1_000, "read on"
                yield one

    shown = described_call("nk.compare", data=Long(range(10_000)))
    assert shown == f"nk.compare(data={str(list(range(10_000)))[:197]}...)"
    assert described_call("f", data=[1, (2,), {"a": None}]) == "f(data=[1, (2,), {'a': None}])"


def test_a_call_may_have_an_argument_called_name():
    assert described_call("f", name="seed 0") == "f(name='seed 0')"
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(12, 4, generator=draw), torch.arange(12) % 3)]
    found = nk.class_sensitivity(nn.Sequential(nn.Linear(4, 3)), data, layers=["0"], name="seed 0")
    assert "name='seed 0'" in found.provenance["call"]


def test_a_call_that_makes_no_sense_is_refused_by_the_function_itself():
    with pytest.raises(TypeError, match="compare.*unexpected keyword argument 'measuers'"):
        nk.compare(nn.Linear(1, 1), measuers="cka")


def test_a_saved_study_of_sparsity_keeps_its_call(tmp_path):
    study = nk.sparsity_study(nn.Linear(4, 3), progress=False)
    study.save(tmp_path / "study.netkin")
    assert nk.load(tmp_path / "study.netkin").provenance == {"call": "nk.sparsity_study(models=Linear)"}
