"""The registry: names, parameters, ids, and measures from elsewhere."""

import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import netkin as nk
from netkin import measures as m
from netkin.comparing.compare import compare
from netkin.errors import InflatedWarning, InvalidValue, NetkinError, NoValue, UnknownName
from netkin.measures import find, measure, measures, registry
from netkin.measures.registry import value_of
from netkin.statistics import Grams, Moments, Rows
from refusals import refusals, refused

PLAIN = {"higher_is_closer": True, "bounds": (0.0, 1.0), "unchanged_by": {"rotation"}, "reference": "nobody (2024)"}


@pytest.fixture
def own_registry(monkeypatch):
    """Let a test add measures that are gone afterwards."""
    measures()
    monkeypatch.setattr(registry, "_MEASURES", dict(registry._MEASURES))
    yield registry._MEASURES
    registry.broken_packages.cache_clear()
    registry._warn_of.cache_clear()


# --- names and parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, id_, settings",
    [
        ("cka", "cka", {}),
        (" cka ", "cka", {}),
        ("cka()", "cka", {}),
        ("svcca(variance=0.95)", "svcca(variance=0.95)", {"variance": 0.95}),
        ("svcca( variance = .95 )", "svcca(variance=0.95)", {"variance": 0.95}),
        ("svcca(variance=0.99)", "svcca", {"variance": 0.99}),
        ("svcca(variance=1)", "svcca(variance=1.0)", {"variance": 1.0}),
        ("svcca_k(k=10)", "svcca_k", {"k": 10}),
        ("svcca_k(k=3)", "svcca_k(k=3)", {"k": 3}),
        ("gulp(ridge=1e-3)", "gulp(ridge=0.001)", {"ridge": 0.001}),
        ("cka_minibatch", "cka_minibatch(batch=128)", {"batch": 128, "kernel": "linear", "fraction": 0.4}),
        ("cka_minibatch(batch=128)", "cka_minibatch(batch=128)", {"batch": 128, "kernel": "linear", "fraction": 0.4}),
        (
            "cka_minibatch(kernel=rbf, batch=64)",
            "cka_minibatch(batch=64, kernel=rbf)",
            {"batch": 64, "kernel": "rbf", "fraction": 0.4},
        ),
        (
            "cka_minibatch(kernel='rbf')",
            "cka_minibatch(batch=128, kernel=rbf)",
            {"batch": 128, "kernel": "rbf", "fraction": 0.4},
        ),
    ],
)
def test_a_written_measure_is_found(spec, id_, settings):
    found = find(spec)
    assert found.id == id_
    assert found.settings == settings
    assert find(found.id).id == id_
    assert find(found) is found


@pytest.mark.parametrize("name", measures(matrices=True))
def test_a_measure_is_found_by_name_and_by_its_function(name):
    assert find(name).name == name
    assert find(getattr(m, name)).id == find(name).id
    assert getattr(m, name) is measures()[name].function
    assert find(find(name).id).settings == find(name).settings


def test_parameters_reach_the_number(worlds):
    X, Y = worlds.related(40, 6, 5)
    assert float(find("svcca(variance=0.5)")(Moments.of(X, Y))) == pytest.approx(m.svcca(X, Y, variance=0.5))
    assert float(find("svcca_k(k=1)")(Moments.of(X, Y))) == pytest.approx(m.svcca_k(X, Y, k=1))
    assert float(find("cka_minibatch(batch=8)")(Grams.of(X, Y, batch=8))) == pytest.approx(
        m.cka_minibatch(X, Y, batch=8)
    )


def test_two_ids_never_mean_the_same_number():
    assert find("svcca(variance=1)").id == find("svcca(variance=1.0)").id
    assert find("cka_minibatch(batch=32, kernel=rbf)").id == find("cka_minibatch(kernel='rbf', batch=32)").id


@pytest.mark.parametrize(
    "spec, argument",
    [
        ("ckaa", "measures"),
        ("svca(variance=0.9)", "measures"),
        ("zzz", "measures"),
        ("svcca(varianc=0.9)", "varianc"),
        ("svcca(q=0.9)", "q"),
        ("cka(variance=0.9)", "variance"),
        ("svcca(0.9)", "measures"),
        ("svcca(variance=0.9", "measures"),
        ("svcca(**x)", "**"),
        ("", "measures"),
        ("cka + nbs", "measures"),
        ("a.cka", "measures"),
        ("cka\0", "measures"),
        ("svcca(variance=1/2)", "measures"),
        ("svcca(variance={[]: 1})", "measures"),
        ("svcca(variance=0.9, variance=0.8)", "measures"),
    ],
)
def test_what_cannot_be_found_is_refused_with_advice(spec, argument):
    with refused(UnknownName, argument):
        find(spec)


@pytest.mark.parametrize(
    "spec, argument",
    [
        ("svcca(variance=f(2))", "variance"),
        ("svcca(variance=lots)", "variance"),
        ("svcca(variance=True)", "variance"),
        ("svcca(variance=None)", "variance"),
        ("svcca_k(k=2.5)", "k"),
        ("svcca_k(k=True)", "k"),
        ("cka_minibatch(kernel=3)", "kernel"),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused(spec, argument):
    with refused(InvalidValue, argument):
        find(spec)


def test_a_parameter_that_is_none_by_default_takes_anything(own_registry):
    @measure(**PLAIN)
    def optional(moments: Moments, *, k=None, free=None):
        """Return nothing."""

    assert find("optional(k=3, free=word)").settings == {"k": 3, "free": "word"}
    assert find("optional(k=None)").id == "optional"


def test_a_number_too_large_for_a_float_is_refused():
    with pytest.raises(NetkinError, match="variance"):
        find(f"svcca(variance={'9' * 400})")


@pytest.mark.parametrize("thing", [5, None, 2.5, ["cka"]])
def test_what_is_neither_text_nor_function_is_refused(thing):
    with refused(UnknownName, "measures"):
        find(thing)


def test_a_function_that_only_bears_the_name_of_a_measure_is_refused():
    def cka(X, Y):
        return 0.0

    with refused(UnknownName, "measures"):
        find(cka)


@given(st.text("cka sv_()=,.0195'\"{}[]:*-\n#", max_size=25))
def test_any_text_names_a_measure_or_is_refused(text):
    with suppress(NetkinError):
        assert find(text).name in measures()


@pytest.mark.parametrize(
    "name, parameters, kind, argument",
    [
        ("svcca", {"variance": 0.0}, InvalidValue, "variance"),
        ("svcca", {"variance": 1.01}, InvalidValue, "variance"),
        ("svcca", {"variance": math.nan}, InvalidValue, "variance"),
        ("svcca_by_sum", {"variance": -1.0}, InvalidValue, "variance"),
        ("svcca_k", {"k": 0}, InvalidValue, "k"),
        ("shape_distance", {"alpha": 1.5}, InvalidValue, "alpha"),
        ("shape_distance", {"alpha": math.nan}, InvalidValue, "alpha"),
        ("shape_distance", {"whitening": "zca"}, UnknownName, "whitening"),
        ("gulp", {"ridge": 0.0}, InvalidValue, "ridge"),
        ("gulp", {"ridge": math.inf}, InvalidValue, "ridge"),
        ("cka_rbf", {"fraction": 0.0}, InvalidValue, "fraction"),
        ("cka_rbf", {"fraction": math.inf}, InvalidValue, "fraction"),
        ("cka_rbf_debiased", {"fraction": -0.4}, InvalidValue, "fraction"),
        ("cka_minibatch", {"kernel": "rbf", "fraction": 0.0}, InvalidValue, "fraction"),
        ("cka_minibatch", {"batch": 3}, InvalidValue, "batch"),
        ("cka_minibatch", {"kernel": "cubic"}, UnknownName, "kernel"),
    ],
)
def test_a_parameter_out_of_range_is_refused(worlds, value, name, parameters, kind, argument):
    with refused(kind, argument):
        value(name, *worlds.related(20, 4, 3), **parameters)


# --- what a jackknife serves ------------------------------------------------------------------------------------------


def test_why_a_jackknife_does_not_serve_is_said():
    median = "its kernel width is a median, which the jackknife does not serve"
    unfit = {name: found.jackknife_reason for name, found in measures().items() if found.jackknife_reason}
    sketched = {name: reason for name, reason in unfit.items() if name.startswith("sketched")}
    assert set(sketched.values()) == {
        "it is random by its seed: repeat it over seeds, which the jackknife does not serve"
    }
    assert {name: unfit[name] for name in unfit.keys() - sketched.keys()} == {
        "cka_rbf": median,
        "cka_rbf_debiased": median,
    }
    assert find("cka_minibatch(kernel=rbf)").jackknife_reason == median
    assert find("cka_minibatch(batch=32)").jackknife_reason == ""


def test_a_measure_that_is_not_smooth_has_a_reason_without_words_of_its_own(own_registry):
    @measure(**PLAIN, smooth=False)
    def nearest(rows: Rows):
        """Return nothing."""

    sentence = "it has medians, neighbours or matchings, which the jackknife does not serve"
    assert find("nearest").jackknife_reason == sentence


def test_the_measure_without_bias_is_named_and_exists():
    named = {name: found.facts.debiased_as for name, found in measures().items() if found.facts.debiased_as}
    assert named == {"cka": "cka_debiased", "cka_rbf": "cka_rbf_debiased"}
    assert set(named.values()) <= set(measures())


def test_measures_hands_out_a_copy():
    measures().clear()
    assert "cka" in measures()


# --- calling ----------------------------------------------------------------------------------------------------------


class Borrowed:
    """An array of another library: it offers DLPack and nothing else."""

    def __init__(self, array):
        self._tensor = torch.as_tensor(array)

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("name", measures(matrices=True))
def test_arrays_of_other_libraries_are_welcome_and_give_a_float(worlds, value, name):
    X, Y = worlds.related(40, 6, 5)
    number = value(name, Borrowed(X), Borrowed(Y))
    assert type(number) is float
    assert number == pytest.approx(value(name, X, Y), abs=1e-14)


@pytest.mark.parametrize("name", [name for name, found in measures().items() if found.facts.whitens])
def test_fewer_examples_than_features_are_warned_about_with_the_numbers(worlds, name):
    X, Y = worlds.of_rank(10, 8, 3), worlds.of_rank(10, 6, 2)
    sentence = "10 examples are fewer than the 8 \\+ 6 features of the two layers: .*inflated; 14 examples.* would do"
    with pytest.warns(InflatedWarning, match=sentence) as caught:
        measures()[name].function(X, Y)
    assert caught[0].filename == __file__


def test_what_whitens_nothing_is_not_warned_about(worlds):
    X, Y = worlds.of_rank(10, 8, 3), worlds.of_rank(10, 6, 2)
    assert m.shape_distance(X, Y, alpha=1.0) == pytest.approx(m.procrustes_angular(X, Y))  # a warning would be an error
    assert find("shape_distance(alpha=1)").caveats(Moments.of(X, Y)) == []
    assert "10 examples are fewer" in str(find("shape_distance(alpha=0.9)").caveats(Moments.of(X, Y))[0])
    assert find("shape_distance").facts.whitens
    assert find("shape_distance(alpha=1)").options == {"precision": torch.float64}


@pytest.mark.parametrize("name", measures(matrices=True))
def test_enough_examples_and_measures_of_norms_are_not_warned_about(worlds, name):
    facts = measures()[name].facts
    n = 14 if facts.whitens else 200 if facts.debiased_as else 8
    X, Y = worlds.normal(n, 8), worlds.normal(n, 6)
    if name == "cka_rbf":
        X, Y = X[:, :1], Y[:, :1]
    if name == "gaussian_mutual_information":
        X, Y = X[:, :3], Y[:, :3]
    assert math.isfinite(measures()[name].function(X, Y))


def test_one_matrix_alone_is_refused(worlds):
    refusals(
        (lambda: m.cka(worlds.normal(5, 2)), InvalidValue, ""),
        (lambda: m.cka_minibatch(Moments.of(worlds.normal(5, 2), worlds.normal(5, 2))), InvalidValue, ""),
    )


def test_an_unknown_keyword_is_a_type_error_as_in_any_function(worlds):
    with pytest.raises(TypeError, match="variance"):
        m.cka(*worlds.related(200, 3, 3), variance=0.9)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_value_is_a_float_and_what_is_not_finite_is_refused(own_registry, worlds, number):
    @measure(**PLAIN)
    def undefined(moments: Moments):
        """Return nothing."""
        return torch.tensor(number) * moments.x_norm

    X, Y = worlds.related(200, 3, 3)
    pair = Moments.of(X, Y)
    assert value_of(find("cka"), pair) == pytest.approx(m.cka(X, Y))
    calls = [
        lambda: value_of(find("undefined"), pair),
        lambda: undefined(X, Y),
        lambda: undefined(torch.tensor(X, requires_grad=True), torch.tensor(Y)),
    ]
    for call in calls:
        with pytest.raises(NoValue, match="undefined is not a finite number for this pair\\."):
            call()


@pytest.mark.parametrize("number", [3.0, -0.01, 1.002])
def test_a_value_outside_the_declared_bounds_is_none(own_registry, worlds, number):
    @measure(**PLAIN)
    def boundless(moments: Moments):
        """Return what its declaration excludes."""
        return torch.tensor(number)

    X, Y = worlds.related(50, 3, 3)
    for call in (lambda: boundless(X, Y), lambda: value_of(find("boundless"), Moments.of(X, Y))):
        with pytest.raises(NoValue, match=f"boundless gave {number:g} .* declared bounds are 0 to 1"):
            call()
    found = compare({"x": X}, {"y": Y}, measures=["boundless", "cka"])
    assert "declared bounds are 0 to 1" in found["boundless"].missing["x", "y"]
    assert found["cka"]["x", "y"] == pytest.approx(m.cka(X, Y))


@pytest.mark.parametrize("number", [1.0 + 1e-5, -1e-5])
def test_rounding_may_carry_a_value_a_little_beyond_its_bounds(own_registry, worlds, number):
    @measure(**PLAIN)
    def rounded(moments: Moments):
        """Return a number that is at its bound but for rounding."""
        return torch.tensor(number)

    assert rounded(*worlds.related(50, 3, 3)) == pytest.approx(number)


@pytest.mark.parametrize(
    "spec, sentence",
    [
        ("svcca(variance=2)", "`variance` must lie above 0 and at most at 1; got 2.0."),
        ("svcca_k(k=0)", "`k` must be at least 1; got 0."),
        ("cka_rbf(fraction=0)", "`fraction` must be above 0; got 0.0."),
        ("cka_minibatch(kernel=foo)", "no kernel named 'foo'; choose one of linear, rbf."),
    ],
)
def test_a_parameter_out_of_range_is_refused_before_any_data_are_read(spec, sentence):
    class Unread:
        def __iter__(self):
            raise AssertionError("the data were read")

    with pytest.raises((InvalidValue, UnknownName)) as refusal:
        nk.compare(nn.Linear(2, 2), nn.Linear(2, 2), data=Unread(), measures=spec)
    assert str(refusal.value) == sentence


def test_a_parameter_that_the_data_decide_on_is_no_fault_of_its_own():
    assert find("svcca_k(k=500)").id == "svcca_k(k=500)"
    assert find("cka_minibatch(batch=256)").id == "cka_minibatch(batch=256)"
