"""Options are declared once: what calls, help and type checkers show is the declaration."""

import inspect
from dataclasses import fields

import numpy as np
import pytest

import netkin as nk
from netkin.comparing.spec import DECLARED, Options, Run, Spec, sentence_of
from netkin.errors import InvalidValue, UnknownName
from netkin.identity import described_call
from refusals import refused

CALLS = [nk.compare, nk.collect, nk.explain, nk.compare_many, nk.explain_many]


def test_type_checkers_are_told_what_is_declared():
    declared = {one.name: one.type for kind in (Spec, Run) for one in fields(kind) if one.name != "measures"}
    given = {name: getattr(hint, "__forward_arg__", hint) for name, hint in Options.__annotations__.items()}
    assert given == declared


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_each_keyword_is_shown_with_its_default_and_its_sentence(call):
    keywords = {
        name: parameter
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert {"layers", "shape", "errors", "memory", "progress"} <= keywords.keys()
    for name, parameter in keywords.items():
        assert parameter.default == DECLARED[name].default
        assert f"\n    {name}: {sentence_of(name)}\n" in inspect.getdoc(call)


def test_an_unknown_keyword_is_refused_with_the_nearest():
    with pytest.raises(
        TypeError, match=r"compare\(\) got an unexpected keyword argument 'layer'; did you mean 'layers'"
    ):
        nk.compare({"x": np.eye(5)}, layer="x")
    with pytest.raises(TypeError, match="unexpected keyword argument 'part'"):
        nk.compare({"x": np.eye(5)}, part="1/2")


REFUSED = [
    ({"pairs": "some"}, UnknownName, "pairs"),
    ({"pairs": []}, InvalidValue, "pairs"),
    ({"pairs": [("x",)]}, InvalidValue, "pairs"),
    ({"examples": 0}, InvalidValue, "examples"),
    ({"examples": 2.5}, InvalidValue, "examples"),
    ({"seed": 0.5}, InvalidValue, "seed"),
    ({"errors": True, "chunks": 1}, InvalidValue, "chunks"),
    ({"memory": 0}, InvalidValue, "memory"),
    ({"memory": "2GB"}, InvalidValue, "memory"),
    ({"resize": "nearest"}, UnknownName, "resize"),
    ({"resize": "average", "shape": "pool"}, InvalidValue, "resize"),
    ({"shape": {"a": "dft", "b": "tokens"}}, InvalidValue, "shape"),
    ({"names": ("one",)}, InvalidValue, "names"),
    ({"part": "4/3"}, InvalidValue, "part"),
    ({"start": -1}, InvalidValue, "start"),
    ({"rows": 0}, InvalidValue, "rows"),
]


@pytest.mark.parametrize(("options", "kind", "argument"), REFUSED)
def test_what_can_not_be_is_refused_when_the_spec_is_made(options, kind, argument):
    with refused(kind, argument) as fault:
        Spec(**options)
    assert f"`{argument}`" in str(fault.value) or argument in ("part", "shape")


def test_the_call_of_a_result_names_what_was_given():
    found = nk.compare({"x": np.eye(5)}, measures="cka", layers=["x"], seed=3)
    assert found.provenance["call"] == described_call(
        "nk.compare", a={"x": np.eye(5)}, measures="cka", layers=["x"], seed=3
    )
