"""The registry: names, parameters, ids, and measures from elsewhere."""

import ast
import inspect
import math
import pydoc
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import netkin as nk
from netkin import measures as m
from netkin.errors import InflatedWarning, NameClash, NetkinError, NoValue, PackageWarning, UnknownName, ValueFault
from netkin.measures import broken_packages, find, measure, measures, registry
from netkin.measures.registry import value_of
from netkin.statistics import Grams, Moments, Rows, Spectra

PLAIN = {"higher_is_closer": True, "bounds": (0.0, 1.0), "unchanged_by": {"rotation"}, "reference": "nobody (2024)"}


@pytest.fixture
def own_registry(monkeypatch):
    """Let a test add measures that are gone afterwards."""
    measures()
    monkeypatch.setattr(registry, "_MEASURES", dict(registry._MEASURES))
    yield registry._MEASURES
    registry._load_entry_points.cache_clear()
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


@pytest.mark.parametrize("name", measures())
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
    "spec, sentence",
    [
        ("ckaa", "no measure named 'ckaa'; did you mean 'cka'\\? `netkin measures` lists all\\."),
        ("svca(variance=0.9)", "no measure named 'svca'; did you mean 'svcca'\\?"),
        ("zzz", "no measure named 'zzz'; `netkin measures` lists all\\."),
        (
            "svcca(varianc=0.9)",
            "'svcca' has no parameter 'varianc'; did you mean 'variance'\\? its parameters are variance\\.",
        ),
        ("svcca(q=0.9)", "'svcca' has no parameter 'q'; its parameters are variance\\."),
        ("cka(variance=0.9)", "'cka' has no parameter 'variance'; it has no parameters\\."),
        ("svcca(0.9)", "'svcca\\(0.9\\)' is no measure; write a name, or a name with parameters"),
        ("svcca(variance=0.9", "is no measure; write a name"),
        ("svcca(**x)", "is no measure; write a name"),
        ("", "'' is no measure; write a name"),
        ("cka + nbs", "is no measure; write a name"),
        ("a.cka", "is no measure; write a name"),
        ("cka\0", "is no measure; write a name"),
        ("svcca(variance=1/2)", "'svcca\\(variance=1/2\\)': the value of a parameter must be a number or a word\\."),
        ("svcca(variance=f(2))", "the value of a parameter must be a number or a word"),
        ("svcca(variance={[]: 1})", "the value of a parameter must be a number or a word"),
        ("svcca(variance=0.9, variance=0.8)", "variance"),
    ],
)
def test_what_cannot_be_found_is_refused_with_advice(spec, sentence):
    with pytest.raises(UnknownName, match=sentence):
        find(spec)


@pytest.mark.parametrize(
    "spec, sentence",
    [
        ("svcca(variance=lots)", "`variance` must be of type float, like its default 0.99; got 'lots'\\."),
        ("svcca(variance=True)", "`variance` must be of type float"),
        ("svcca(variance=None)", "`variance` must be of type float.*got None"),
        ("svcca_k(k=2.5)", "`k` must be of type int, like its default 10; got 2.5\\."),
        ("svcca_k(k=True)", "`k` must be of type int, like its default 10; got True\\."),
        ("cka_minibatch(kernel=3)", "`kernel` must be of type str, like its default 'linear'; got 3\\."),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused(spec, sentence):
    with pytest.raises(ValueFault, match=sentence):
        find(spec)


def test_a_parameter_that_is_none_by_default_is_set_by_its_annotation(own_registry):
    @measure(**PLAIN)
    def optional(moments: Moments, *, k: int | None = None, share: float | None = None, free=None):
        """Return nothing."""

    assert find("optional(k=3, share=1, free=word)").settings == {"k": 3, "share": 1.0, "free": "word"}
    assert find("optional(k=None)").id == "optional"
    assert find("optional(share=1)").id == "optional(share=1.0)"
    with pytest.raises(ValueFault, match="`k` must be of type int or None, like its default None; got 2.5\\."):
        find("optional(k=2.5)")
    with pytest.raises(ValueFault, match="`share` must be of type float or None"):
        find("optional(share=lots)")


def test_a_number_too_large_for_a_float_is_refused():
    with pytest.raises(NetkinError, match="variance"):
        find(f"svcca(variance={'9' * 400})")


@pytest.mark.parametrize("thing", [5, None, 2.5, ["cka"]])
def test_what_is_neither_text_nor_function_is_refused(thing):
    with pytest.raises(UnknownName, match="is no measure"):
        find(thing)


def test_a_function_that_only_bears_the_name_of_a_measure_is_refused():
    def cka(X, Y):
        return 0.0

    with pytest.raises(UnknownName, match="cka"):
        find(cka)


@given(st.text("cka sv_()=,.0195'\"{}[]:*-\n#", max_size=25))
def test_any_text_names_a_measure_or_is_refused(text):
    with suppress(NetkinError):
        assert find(text).name in measures()


@pytest.mark.parametrize(
    "name, parameters, sentence",
    [
        ("svcca", {"variance": 0.0}, "`variance` must lie above 0 and at most at 1; got 0.0\\."),
        ("svcca", {"variance": 1.01}, "`variance` must lie above 0 and at most at 1; got 1.01\\."),
        ("svcca", {"variance": math.nan}, "`variance` must lie above 0"),
        ("svcca_by_sum", {"variance": -1.0}, "`variance` must lie above 0 and at most at 1; got -1.0\\."),
        ("svcca_k", {"k": 0}, "`k` must be at least 1; got 0\\."),
        ("shape_distance", {"alpha": 1.5}, "`alpha` must lie between 0 and 1; got 1.5\\."),
        ("shape_distance", {"alpha": math.nan}, "`alpha` must lie between 0 and 1"),
        ("shape_distance", {"whitening": "zca"}, "`whitening` is 'second_moment'.* or 'covariance'.*; got 'zca'\\."),
        ("gulp", {"ridge": 0.0}, "`ridge` must be above 0; got 0.0\\."),
        ("gulp", {"ridge": math.inf}, "`ridge` must be.*inf"),
        ("cka_rbf", {"fraction": 0.0}, "`fraction` must be above 0; got 0.0\\."),
        ("cka_rbf", {"fraction": math.inf}, "`fraction` must be.*inf"),
        ("cka_rbf_debiased", {"fraction": -0.4}, "`fraction` must be above 0; got -0.4\\."),
        ("cka_minibatch", {"kernel": "rbf", "fraction": 0.0}, "`fraction` must be above 0"),
        ("cka_minibatch", {"batch": 3}, "a mini-batch needs at least 4 examples for HSIC₁; got batch=3\\."),
        ("cka_minibatch", {"kernel": "cubic"}, "no kernel named 'cubic'; choose one of linear, rbf\\."),
    ],
)
def test_a_parameter_out_of_range_is_refused(worlds, value, name, parameters, sentence):
    with pytest.raises((ValueFault, UnknownName), match=sentence):
        value(name, *worlds.related(20, 4, 3), **parameters)


# --- measures from elsewhere ------------------------------------------------------------------------------------------


def offer(monkeypatch, load, dist=None):
    """Let an installed package offer measures."""
    entry = SimpleNamespace(load=load, name="theirs", value="theirs.measures", dist=dist)
    registry._load_entry_points.cache_clear()
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "netkin.measures" else [])


def test_a_package_may_offer_measures_of_its_own(monkeypatch, own_registry, worlds):
    def load():
        @measure(**PLAIN)
        def trace_ratio(moments: Moments, *, power: float = 1.0):
            """Return the smaller size over the larger."""
            return torch.minimum(moments.x_norm, moments.y_norm) / torch.maximum(moments.x_norm, moments.y_norm)

    offer(monkeypatch, load)
    assert find("trace_ratio(power=2)").id == "trace_ratio(power=2.0)"
    assert measures()["trace_ratio"].summary == "Return the smaller size over the larger."
    X, _ = worlds.related(20, 3, 3)
    assert measures()["trace_ratio"].function(X, 2 * X) == pytest.approx(0.5)


def test_entry_points_are_loaded_once(monkeypatch, own_registry):
    loads = []
    offer(monkeypatch, lambda: loads.append(1))
    measures()
    measures()
    assert loads == [1]


def test_two_measures_of_one_name_are_refused(own_registry):
    with pytest.raises(
        NameClash, match="two measures are named 'cka'.* one in netkin.measures.linear.* one in .*test_registry; rename"
    ):

        @measure(**PLAIN)
        def cka(moments: Moments):
            """Return nothing new."""


def test_a_package_that_takes_a_name_of_ours_is_left_out(monkeypatch, own_registry, worlds):
    def load():
        @measure(**PLAIN)
        def cka(moments: Moments):
            """Return nothing new."""

    offer(monkeypatch, load)
    with pytest.warns(PackageWarning, match="package 'theirs'.*NameClash: two measures are named 'cka'.*rename one;"):
        found = find("cka")
    assert found.function is nk.cka


@pytest.mark.parametrize("dist, package", [(SimpleNamespace(name="their-package"), "their-package"), (None, "theirs")])
def test_a_package_that_fails_to_load_is_named_and_leaves_nothing_behind(monkeypatch, own_registry, dist, package):
    def load():
        @measure(**PLAIN)
        def half_way(moments: Moments):
            """Return nothing."""

        raise ImportError("no module named 'gone'")

    offer(monkeypatch, load, dist)
    sentence = f"the measures of package '{package}' in 'theirs.measures' could not be loaded: ImportError: no module"
    with pytest.warns(PackageWarning, match=f"{sentence} named 'gone'; mend or uninstall the package, all other"):
        assert find("cka").function is nk.cka
    assert find("nbs").function is nk.nbs  # and no second warning, which would be an error here
    assert broken_packages().keys() == {package}
    assert "half_way" not in own_registry
    with pytest.raises(UnknownName, match=f"no measure named 'half_way'; .*a package that failed: {sentence}"):
        find("half_way")


def test_one_broken_package_does_not_keep_another_from_being_loaded(monkeypatch, own_registry):
    def load():
        @measure(**PLAIN)
        def theirs_works(moments: Moments):
            """Return nothing."""

    def fail():
        raise RuntimeError("mine does not.")

    offer(monkeypatch, fail, SimpleNamespace(name="broken"))
    (entry,) = registry.entry_points("netkin.measures")
    other = SimpleNamespace(load=load, name="other", value="other.measures", dist=None)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry, other])
    with pytest.warns(PackageWarning, match="'broken'.*RuntimeError: mine does not; mend"):
        assert find("theirs_works").name == "theirs_works"


def test_two_broken_modules_of_one_package_are_both_named(monkeypatch, own_registry):
    def fail():
        raise RuntimeError("gone")

    package = SimpleNamespace(name="broken")
    entries = [SimpleNamespace(load=fail, name=name, value=f"broken.{name}", dist=package) for name in ("one", "two")]
    offer(monkeypatch, fail)
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    assert list(broken_packages()) == ["broken"]
    assert all(f"in 'broken.{name}' could not be loaded" in broken_packages()["broken"] for name in ("one", "two"))


def test_the_same_function_defined_again_takes_the_place_of_the_first(own_registry, worlds):
    def cell(number):
        @measure(**PLAIN)
        def settled(moments: Moments):
            """Return a number."""
            return torch.tensor(number)

        return settled

    first, second = cell(0.25), cell(0.75)
    X, Y = worlds.related(20, 3, 3)
    assert measures()["settled"].function is second
    assert (first(X, Y), second(X, Y)) == (0.25, 0.75)


def test_every_measure_of_ours_stands_at_the_front_door():
    ours = {name for name, found in measures().items() if found.function.__module__.startswith("netkin.")}
    assert len(ours) > 20
    assert ours <= set(nk.__all__)


def test_type_checkers_see_every_measure_at_the_front_door():
    tree = ast.parse(inspect.getsource(nk))
    seen = {name.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    assert set(nk._ROOMS["netkin.measures"]) <= seen


@pytest.mark.slow
def test_a_type_checker_knows_what_a_measure_takes_and_gives(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api")
    lines = [
        "import numpy as np, torch, netkin as nk",
        "X, T = np.ones((3, 2)), torch.ones(3, 2)",
        "reveal_type(nk.cka(X, X))",
        "reveal_type(nk.svcca(X, T, variance=0.9))",
        "nk.svcca(X, X, varianc=0.9)",
    ]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    monkeypatch.setenv("MYPYPATH", str(Path(nk.__file__).parents[1]))
    said = api.run(["--config-file=", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "mine.py")])[0]
    revealed = [line.rpartition("is ")[2] for line in said.splitlines() if "Revealed" in line]
    assert revealed == ['"float"', '"torch._tensor.Tensor"']
    assert 'mine.py:5: error: Unexpected keyword argument "varianc"' in said


def test_help_shows_matrices_and_the_parameters_of_the_measure():
    assert str(inspect.signature(nk.cka)) == "(X, Y, /) -> float | torch.Tensor"
    assert str(inspect.signature(nk.svcca)) == "(X, Y, /, *, variance: float = 0.99) -> float | torch.Tensor"
    assert "svcca(X, Y, /, *, variance: float = 0.99)" in pydoc.plain(pydoc.render_doc(nk.svcca))
    assert inspect.getdoc(nk.cka).startswith("Return how alike two layers arrange the examples")


def test_an_unknown_invariance_is_refused():
    with pytest.raises(
        ValueFault, match="`unchanged_by` knows rotation, scaling, translation, invertible; got mirrors\\."
    ):
        measure(**PLAIN | {"unchanged_by": {"rotation", "mirrors"}})


def test_a_measure_must_say_what_it_reads(own_registry):
    with pytest.raises(
        ValueFault, match="annotate the first argument of 'unsaid' with the statistic it reads, e.g. `Moments`"
    ):

        @measure(**PLAIN)
        def unsaid(moments):
            """Return nothing."""

    with pytest.raises(ValueFault, match="annotate the first argument of 'late'"):

        @measure(**PLAIN)
        def late(moments, *, second: Moments):
            """Return nothing."""

    sentence = "annotate the first argument of 'wrong'.*; int is no pair type, it lacks of, options, caution\\."
    with pytest.raises(ValueFault, match=sentence):

        @measure(**PLAIN)
        def wrong(moments: int) -> float:
            """Return nothing."""


# --- pair types -------------------------------------------------------------------------------------------------------


class Sizes:
    """A pair type of somebody else: the numbers of rows and units."""

    def __init__(self, shapes, power):
        self.shapes, self.power = shapes, power

    @classmethod
    def of(cls, X, Y, *, power):
        return cls([X.shape, Y.shape], power)

    @classmethod
    def options(cls, facts, settings):
        return {"power": settings["power"]}

    def caution(self, facts, settings):
        return "these layers are narrow." if self.shapes[0][1] < 3 and settings["power"] > 1 else ""


def test_a_measure_may_read_a_pair_type_of_its_own(own_registry, worlds):
    @measure(**PLAIN)
    def widths(sizes: Sizes, *, power: float = 1.0):
        """Return the ratio of the widths."""
        return (sizes.shapes[0][1] / sizes.shapes[1][1]) ** sizes.power

    assert widths(worlds.normal(5, 4), worlds.normal(5, 8), power=2.0) == 0.25
    assert find("widths(power=2)").options == {"power": 2.0}
    pair = find("widths(power=2)").pair(worlds.normal(5, 2), worlds.normal(5, 8))
    assert find("widths(power=2)").caution(pair) == "these layers are narrow."
    assert find("widths").caution(pair) == ""
    with pytest.warns(InflatedWarning, match="these layers are narrow") as caught:
        widths(worlds.normal(5, 2), worlds.normal(5, 8), power=2.0)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("missing", ["of", "options", "caution"])
def test_a_pair_type_that_lacks_a_method_is_refused_by_its_name(own_registry, missing):
    half = type("Half", (Sizes,), {missing: None})

    def narrow(pair):
        """Return nothing."""

    narrow.__annotations__ = {"pair": half}
    with pytest.raises(ValueFault, match=f"'narrow'.*Half is no pair type, it lacks {missing}\\."):
        measure(**PLAIN)(narrow)


def test_a_subclass_of_what_is_read_is_read(worlds):
    maps = worlds.normal(20, 2, 4, 4)
    spectra = Spectra.of(maps, maps[:, ::-1].copy())
    assert float(m.cka(spectra)) == pytest.approx(1)
    assert Spectra.options(find("cka_debiased").facts, {}) == Moments.options(find("cka_debiased").facts, {})


def test_what_a_pair_type_must_know_of_a_measure():
    assert find("cca_mean").options == {"precision": torch.float64}
    assert find("cka").options == {"precision": None}
    assert find("cka_minibatch(batch=64)").options == {"batch": 64, "kernel": "linear", "fraction": 0.4}
    assert find("cka_rbf").options == {}


def test_a_measure_of_mini_batches_needs_no_parameters_of_their_names(own_registry, worlds):
    @measure(**PLAIN)
    def plain_hsic(grams: Grams):
        """Return the HSIC."""
        return grams.cross

    X, Y = worlds.related(40, 4, 3)
    assert plain_hsic(X, Y) == pytest.approx(float(Grams.of(X, Y, batch=128, kernel="linear").cross))


# --- what a jackknife serves ------------------------------------------------------------------------------------------


def test_why_a_jackknife_does_not_serve_is_said():
    median = "its kernel width is a median, which the jackknife does not serve"
    unfit = {name: found.jackknife_reason for name, found in measures().items() if found.jackknife_reason}
    assert unfit == {"cka_rbf": median, "cka_rbf_debiased": median}
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


@pytest.mark.parametrize("name", measures())
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
    assert find("shape_distance(alpha=1)").caution(Moments.of(X, Y)) == ""
    assert "10 examples are fewer" in find("shape_distance(alpha=0.9)").caution(Moments.of(X, Y))
    assert find("shape_distance").facts.whitens
    assert find("shape_distance(alpha=1)").options == {"precision": torch.float64}


@pytest.mark.parametrize("name", measures())
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
    with pytest.raises(ValueFault, match="`cka` takes two matrices, or one `Moments`; got ndarray\\."):
        m.cka(worlds.normal(5, 2))
    with pytest.raises(ValueFault, match="`cka_minibatch` takes two matrices, or one `Grams`; got Moments\\."):
        m.cka_minibatch(Moments.of(worlds.normal(5, 2), worlds.normal(5, 2)))


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
