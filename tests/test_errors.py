"""The family of refusals, as the drawing at the top of its file shows it."""

import inspect
import pickle
import re

import pytest

from netkin import errors
from netkin.errors import (
    InflatedWarning,
    InvalidValue,
    NetkinError,
    UnknownName,
    did_you_mean,
    require_at_least,
    require_listed,
)

REFUSALS = [thing for thing in vars(errors).values() if inspect.isclass(thing) and issubclass(thing, NetkinError)]
DRAWN = dict(re.findall(r"[├└]── (\w+) \((\w+)\)", errors.__doc__))


def test_the_drawing_is_complete_and_true():
    family = {refusal for refusal in REFUSALS if refusal is not NetkinError}
    assert {refusal.__name__ for refusal in family} == set(DRAWN)
    for refusal in family:
        assert [base.__name__ for base in refusal.__bases__] == ["NetkinError", DRAWN[refusal.__name__]]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_is_caught_as_ours_and_says_what_it_was_told(refusal):
    with pytest.raises(NetkinError, match="^one clear sentence with 2 numbers\\.$"):
        raise refusal("one clear sentence with 2 numbers.")


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_travels_between_processes(refusal):
    again = pickle.loads(pickle.dumps(refusal("text")))
    assert type(again) is refusal
    assert str(again) == "text"


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_is_documented(refusal):
    assert refusal.__doc__.strip().endswith(".")


def test_a_warning_is_no_refusal():
    assert issubclass(InflatedWarning, UserWarning)
    assert not issubclass(InflatedWarning, NetkinError)


@pytest.mark.parametrize(
    "name, hint",
    [("ckaa", "; did you mean 'cka'?"), ("cca", "; did you mean 'cka'?"), ("zzzz", ""), ("", "")],
)
def test_the_nearest_known_name_is_offered(name, hint):
    assert did_you_mean(name, iter(["cka", "nbs"])) == hint


def test_a_name_that_goes_on_is_offered_before_others_of_its_length():
    claims = ["svcca/bottom-up", "svcca/toy-projection"]
    assert did_you_mean("svcca/toy", claims) == "; did you mean 'svcca/toy-projection'?"


@pytest.mark.parametrize("known", [["net", "Net"], ["Net", "net"]])
def test_of_names_that_differ_in_case_the_one_spelt_alike_is_offered(known):
    assert did_you_mean("nett", known) == "; did you mean 'net'?"
    assert did_you_mean("Nett", known) == "; did you mean 'Net'?"


def test_nothing_known_offers_nothing():
    assert did_you_mean("cka", []) == ""


@pytest.mark.parametrize(
    ("check", "kind", "argument", "value"),
    [
        (lambda: require_at_least(1, chunks=0), InvalidValue, "chunks", 0),
        (lambda: require_at_least(1, chunks=True), InvalidValue, "chunks", True),
        (lambda: require_listed("optimizer", "sgdd", ["sgd"]), UnknownName, "optimizer", "sgdd"),
        (lambda: require_listed("way to learn", "x", ["y"], "method"), UnknownName, "method", "x"),
    ],
)
def test_a_refusal_names_its_argument_and_value(check, kind, argument, value):
    with pytest.raises(kind) as refusal:
        check()
    assert (refusal.value.argument, refusal.value.value) == (argument, value)
