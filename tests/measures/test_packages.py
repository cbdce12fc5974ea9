"""Measures and pair types from elsewhere: packages offer them, and a broken one is told and passed over."""

import ast
import inspect
import math
import pydoc
from types import SimpleNamespace

import pytest
import torch

import netkin as nk
from netkin import measures as m
from netkin.errors import InflatedWarning, InvalidValue, NameClash, PackageWarning, UnknownName
from netkin.measures import broken_packages, find, measure, measures, registry
from netkin.results.caveats import Caveat
from netkin.statistics import Grams, Moments, Pair, Spectra
from refusals import refused

PLAIN = {"higher_is_closer": True, "bounds": (0.0, 1.0), "unchanged_by": {"rotation"}, "reference": "nobody (2024)"}


@pytest.fixture
def own_registry(monkeypatch):
    """Let a test add measures that are gone afterwards."""
    measures()
    monkeypatch.setattr(registry, "_MEASURES", dict(registry._MEASURES))
    yield registry._MEASURES
    registry.broken_packages.cache_clear()
    registry._warn_of.cache_clear()


# --- measures from elsewhere ------------------------------------------------------------------------------------------


def offer(monkeypatch, load, dist=None):
    """Let an installed package offer measures."""
    entry = SimpleNamespace(load=load, name="theirs", value="theirs.measures", dist=dist)
    registry.broken_packages.cache_clear()
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
        NameClash,
        match="two measures are named 'cka'.* one in netkin.measures.linear.* one in .*test_packages; rename",
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
    with pytest.warns(PackageWarning, match=f"{sentence} named 'gone'; fix or uninstall the package, all other"):
        assert find("cka").function is nk.cka
    assert find("nbs").function is nk.nbs  # and no second warning, which would be an error here
    assert broken_packages().keys() == {package}
    assert "half_way" not in own_registry
    with refused(UnknownName, "measures"):
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
    with pytest.warns(PackageWarning, match="'broken'.*RuntimeError: mine does not; fix"):
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
    assert all(callable(getattr(nk, name)) for name in ours)
    assert {name for name in ours if measures()[name].takes_matrices} <= set(nk.__all__)


def test_type_checkers_see_every_measure_at_the_front_door():
    tree = ast.parse(inspect.getsource(nk))
    seen = {name.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    assert set(nk._ROOMS["netkin.measures"]) <= seen


def test_help_shows_matrices_and_the_parameters_of_the_measure():
    assert str(inspect.signature(nk.cka)) == "(X, Y, /) -> float | torch.Tensor"
    assert str(inspect.signature(nk.svcca)) == "(X, Y, /, *, variance: float = 0.99) -> float | torch.Tensor"
    assert "svcca(X, Y, /, *, variance: float = 0.99)" in pydoc.plain(pydoc.render_doc(nk.svcca))
    assert inspect.getdoc(nk.cka).startswith("Return how similarly two layers arrange the examples")


def test_an_unknown_invariance_is_refused():
    with pytest.raises(
        InvalidValue, match="`unchanged_by` takes rotation, scaling, translation, invertible; got mirrors\\."
    ):

        @measure(**PLAIN | {"unchanged_by": {"rotation", "mirrors"}})
        def mirrored(moments: Moments):
            """Return nothing."""


def test_a_measure_must_say_what_it_reads(own_registry):
    with pytest.raises(
        InvalidValue, match="annotate the first argument of 'unsaid' with the statistic it reads, e.g. `Moments`"
    ):

        @measure(**PLAIN)
        def unsaid(moments):
            """Return nothing."""

    with pytest.raises(InvalidValue, match="annotate the first argument of 'late'"):

        @measure(**PLAIN)
        def late(moments, *, second: Moments):
            """Return nothing."""

    with pytest.raises(InvalidValue, match="annotate the first argument of 'wrong'"):

        @measure(**PLAIN)
        def wrong(moments: int) -> float:
            """Return nothing."""


# --- pair types -------------------------------------------------------------------------------------------------------


class Sizes(Pair):
    """A pair type of somebody else: the numbers of rows and units."""

    def __init__(self, shapes, power):
        self.shapes, self.power = shapes, power

    @classmethod
    def of(cls, X, Y, *, power):
        return cls([X.shape, Y.shape], power)

    @classmethod
    def options(cls, facts, settings):
        return {"power": settings["power"]}

    def caveats(self, facts, settings):
        narrow = self.shapes[0][1] < 3 and settings["power"] > 1
        return [Caveat("narrow", "these layers are narrow.")] if narrow else []


def test_a_measure_may_read_a_pair_type_of_its_own(own_registry, worlds):
    @measure(**PLAIN)
    def widths(sizes: Sizes, *, power: float = 1.0):
        """Return the ratio of the widths."""
        return (sizes.shapes[0][1] / sizes.shapes[1][1]) ** sizes.power

    assert widths(worlds.normal(5, 4), worlds.normal(5, 8), power=2.0) == 0.25
    assert find("widths(power=2)").options == {"power": 2.0}
    pair = find("widths(power=2)").pair(worlds.normal(5, 2), worlds.normal(5, 8))
    assert find("widths(power=2)").caveats(pair) == [Caveat("narrow", "these layers are narrow.")]
    assert find("widths").caveats(pair) == []
    with pytest.warns(InflatedWarning, match="these layers are narrow") as caught:
        widths(worlds.normal(5, 2), worlds.normal(5, 8), power=2.0)
    assert caught[0].filename == __file__


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
    @measure(**PLAIN | {"bounds": (-math.inf, math.inf)})
    def plain_hsic(grams: Grams):
        """Return the HSIC."""
        return grams.cross

    X, Y = worlds.related(40, 4, 3)
    assert plain_hsic(X, Y) == pytest.approx(float(Grams.of(X, Y, batch=128, kernel="linear").cross))
