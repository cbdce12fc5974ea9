"""Digests: the same for the same weights, settings and functions, and other ones for others."""

import functools
import json
import math
import struct
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue
from netkin.identity import described_call, function_digest, settings_digest, weights_digest

SCALE = 2


def net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)


def changed(model, name, value):
    state = model.state_dict()
    state[name] = value
    return state


# weights


def test_the_digest_of_weights_is_that_of_their_bytes():
    state = {"w": torch.tensor([[1.0, -2.0]]), "n": torch.tensor(7)}
    told = b"w torch.float32 (1, 2);" + struct.pack("<2f", 1, -2) + b"n torch.int64 ();" + struct.pack("<q", 7)
    assert weights_digest(state) == blake2b(told, digest_size=12).hexdigest()


def test_a_copy_has_the_same_digest_and_any_change_another():
    model, digest = net(), weights_digest(net())
    assert weights_digest(model) == weights_digest(model.state_dict()) == digest
    nudged = model[0].weight.detach().clone()
    nudged[0, 0, 0, 0] = torch.nextafter(nudged[0, 0, 0, 0], torch.tensor(9.0))
    assert weights_digest(changed(model, "0.weight", nudged)) != digest
    assert weights_digest(changed(model, "1.num_batches_tracked", torch.tensor(1))) != digest
    assert weights_digest(changed(model, "0.weight", model[0].weight.flatten())) != digest
    assert weights_digest(changed(model, "other", torch.ones(1))) != digest
    assert weights_digest(dict(reversed(model.state_dict().items()))) != digest


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_to_the_coarser_precision_a_model_and_its_copy_agree(precision):
    model = net(torch.float64)
    copied = net(torch.float64).to(precision)
    assert weights_digest(copied, precision) == weights_digest(model, precision) == weights_digest(copied)
    assert weights_digest(copied) != weights_digest(model)
    assert weights_digest(net(torch.float64, seed=1), precision) != weights_digest(model, precision)


def test_rounding_leaves_whole_numbers_as_they_are():
    big = 2**24 + 1  # not in float32
    first, second = ({"n": torch.tensor(number)} for number in (big, big - 1))
    assert weights_digest(first, torch.float32) != weights_digest(second, torch.float32)


def test_weights_of_all_kinds_have_a_digest():
    weight = torch.randn(3, 4, dtype=torch.complex128)
    assert weights_digest({"w": weight}, torch.float32) == weights_digest({"w": weight.to(torch.complex64)})
    assert weights_digest({"w": weight.conj()}) != weights_digest({"w": weight})
    assert weights_digest({"w": weight.conj()}) == weights_digest({"w": weight.conj().resolve_conj()})
    real = weight.real
    assert weights_digest({"w": real.T}) == weights_digest({"w": real.T.contiguous()})
    assert weights_digest({"w": real.to_sparse()}) == weights_digest({"w": real})
    assert weights_digest({"w": torch.empty(0, 3)}) != weights_digest({"w": torch.empty(3, 0)})
    assert weights_digest(nn.Module()) == weights_digest({})
    assert weights_digest({"w": torch.tensor(True)}) != weights_digest({"w": torch.tensor(False)})


def test_tied_weights_count_under_each_of_their_names():
    tied, apart = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    tied[1].weight = tied[0].weight
    apart.load_state_dict(tied.state_dict())
    assert weights_digest(tied) == weights_digest(apart)


def test_wrappers_of_torch_do_not_count():
    model = net()
    inside = nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:])
    assert weights_digest(nn.DataParallel(model)) == weights_digest(torch.compile(model, backend="eager"))
    assert weights_digest(inside) == weights_digest(model)


def test_what_a_module_adds_to_its_state_counts():
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def get_extra_state(self):
            return {"scale": self.scale}

    assert weights_digest(Scaled(1)) == weights_digest(Scaled(1)) != weights_digest(Scaled(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_on_the_gpu_have_the_digest_of_the_cpu():
    assert weights_digest(net().cuda()) == weights_digest(net())


def test_weights_without_values_are_refused():
    with pytest.raises(InvalidValue, match="weight 'weight' lies on the meta device and holds no values; load the"):
        weights_digest(nn.Linear(2, 2, device="meta"))


# settings and functions


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
    words = r"`settings\['a'\]\[1\]` is an object of type object, which has no digest; use numbers, texts, lists"
    with pytest.raises(InvalidValue, match=words):
        settings_digest({"a": [1, object()]})


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
    assert function_digest(lambda x: x in {"a", "b", "c"}) == function_digest(lambda x: x in {"c", "b", "a"})


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


def test_a_changed_global_number_is_noticed(monkeypatch):
    before = function_digest(lambda x: x * SCALE)
    monkeypatch.setitem(globals(), "SCALE", 3)
    assert function_digest(lambda x: x * SCALE) != before


def test_what_is_no_function_is_refused():
    with pytest.raises(InvalidValue, match="a function is needed; got int"):
        function_digest(3)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype.*:UserWarning")
def test_nested_weights_have_a_digest_that_changes_with_them(layout):
    def digest(*parts):
        return weights_digest({"weight": torch.nested.nested_tensor(list(parts), layout=layout)})

    assert digest(torch.ones(2), torch.ones(3)) == digest(torch.ones(2), torch.ones(3))
    assert digest(torch.ones(2), torch.ones(3)) != digest(torch.ones(3), torch.ones(2))
    assert digest(torch.ones(2), torch.ones(3)) != digest(torch.ones(2), torch.zeros(3))


def test_a_call_is_described_by_its_options_or_by_the_command():
    from netkin.progress import command, commanded

    assert (
        described_call("nk.f", model=nn.Linear(1, 1), k=[1, 2], how=len, data=None)
        == "nk.f(model=Linear, k=[1, 2], how=len)"
    )
    assert len(described_call("nk.f", layers=list(range(1000)))) < 250
    with commanded("netkin f --k 1"):
        assert described_call("nk.f", k=1) == command() == "netkin f --k 1"
    assert command() == ""


def test_a_callable_object_is_known_by_its_code_too():
    def of(power):
        class Scaled:
            def __init__(self, by):
                self.by = by

        def call(self, x):
            return self.by * x**power

        Scaled.__call__ = call
        return Scaled

    assert function_digest(of(2)(3)) == function_digest(of(2)(3))
    assert len({function_digest(one) for one in (of(2)(3), of(3)(3), of(2)(4))}) == 3


def made(source):
    """Return the function `f` that some source defines."""
    found = {}
    exec(source, found)
    return found["f"]


def test_a_reworded_docstring_keeps_the_digest():
    texts = ['"""One."""', '"""Another\n\n    of several lines."""']
    bodies = [
        "    return x * 2 + 7",
        '    return {"a": x}',
        "    def g():\n        {doc}\n        return x\n    return g",
    ]
    for body in bodies:
        one, other = (made(f"def f(x):\n    {text}\n{body.replace('{doc}', repr(text))}") for text in texts)
        assert function_digest(one) == function_digest(other)


@pytest.mark.parametrize(
    "source",
    [
        'def f(x):\n    """One."""\n    return {}',
        "def f(x):\n    {}\n    return {}",  # the docstring is the value that comes back, too
        "def f(x):\n    return {}",
        "f = lambda x: {}",
        "def f(x):\n    return [{} for _ in x]",
        'def f(x):\n    """One."""\n    def g():\n        return {}\n    return g',
        'def f(x):\n    class A:\n        """One."""\n        b = {}\n    return A',
    ],
)
def test_a_changed_constant_changes_the_digest_with_and_without_a_docstring(source):
    one, other = (made(source.replace("{}", repr(word))) for word in ("first", "second"))
    assert function_digest(one) != function_digest(other)


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
        "Statistics.compare(measures=['nbs'])": nk.collect(net, data=x, **silent).compare(["nbs"]),
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
