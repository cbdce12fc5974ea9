"""Sweeps in files: what is kept when interrupted, what goes on, and files that are not written over."""

import numpy as np
import pytest

import netkin as nk
from netkin.applications.stitching import sweep
from netkin.applications.stitching.asking import digest_of
from netkin.comparing.tabulating import INTERRUPTED
from netkin.errors import FileFault
from netkin.results import Comparison, Comparisons
from task_loss_worlds import images, perceptron, two_perceptrons

LEAST = "relative_accuracy(how=least_squares)"


@pytest.fixture(scope="module")
def world():
    return two_perceptrons(examples=200)


def interrupted_after(count, monkeypatch):
    """Let training be interrupted after so many stitches."""
    real, left = sweep.trained_stitch, [count]

    def some(*arguments, **options):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(*arguments, **options)

    monkeypatch.setattr(sweep, "trained_stitch", some)


def test_what_is_finished_is_kept(world, monkeypatch):
    a, b, data = world
    interrupted_after(1, monkeypatch)
    found = nk.stitch_all(a, b, data, data, ["least_squares", "task_loss(steps=2)"], partial=True)
    assert not found.complete
    assert np.isfinite(found[LEAST]["2", "2"])
    table = found["relative_accuracy(how=task_loss(steps=2))"]
    assert np.isfinite(table["0", "0"])
    assert table.holes["1", "1"] == INTERRUPTED
    assert "interrupted: some stitches were not reached, and have no value." in found.warnings


def test_without_partial_an_interruption_goes_through(world, monkeypatch):
    a, b, data = world
    interrupted_after(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        nk.stitch_all(a, b, data, data, "task_loss(steps=2)")


def test_a_saved_sweep_goes_on_where_it_was(world, monkeypatch, tmp_path):
    a, b, data = world
    asked = {"hows": ["least_squares", "task_loss(steps=2)"], "save": tmp_path / "ab.netkin"}
    whole = nk.stitch_all(a, b, data, data, asked["hows"])
    with monkeypatch.context() as context:
        interrupted_after(2, context)
        with pytest.raises(KeyboardInterrupt):
            nk.stitch_all(a, b, data, data, **asked)
    assert not Comparison.load(asked["save"]).complete
    with monkeypatch.context() as context:
        interrupted_after(1, context)  # the third and last
        found = nk.stitch_all(a, b, data, data, **asked)
    assert found.complete
    assert Comparison.load(asked["save"]) == found
    for name, own in whole.tables.items():
        np.testing.assert_allclose(found[name].values, own.values, atol=1e-6)


def test_a_finished_sweep_is_not_fitted_again(world, monkeypatch, tmp_path):
    a, b, data = world
    save = tmp_path / "ab.netkin"
    first = nk.stitch_all(a, b, data, data, save=save)
    monkeypatch.setattr(sweep, "fitted", lambda *given, **options: pytest.fail("fitted again"))
    again = nk.stitch_all(a, b, data, data, save=save)
    np.testing.assert_array_equal(again[LEAST].values, first[LEAST].values)


def test_more_methods_and_layers_are_added(world, tmp_path):
    a, b, data = world
    save = tmp_path / "ab.netkin"
    nk.stitch_all(a, b, data, data, layers="1", save=save)
    more = nk.stitch_all(a, b, data, data, ["least_squares", "procrustes"], save=save)
    assert Comparison.load(save) == more
    assert np.isfinite(more["agreement(how=procrustes)"]["2", "2"])


def test_data_in_another_order_are_the_same_data(world, monkeypatch, tmp_path):
    a, b, data = world
    save = tmp_path / "ab.netkin"
    nk.stitch_all(a, b, data, data, save=save)
    monkeypatch.setattr(sweep, "fitted", lambda *given, **options: pytest.fail("fitted again"))
    nk.stitch_all(a, b, data[::-1], data[::-1], save=save)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"test": slice(1)}, r"holds a sweep of other data \(test digest differs; a loader that draws its examples "
                             r"anew gives other data each time\); give another file or delete it\.$"),
        ({"data": slice(1)}, r"a sweep of other data \(data digest differs; "),
        ({"test": None}, r"a sweep of other data \(test digest differs; "),
        ({"examples": 120}, r"a sweep of other data \(data digest differs; "),
        ({"test_examples": 120}, r"a sweep of other data \(test digest differs; "),
        ({"validation": slice(1)}, r"a sweep of other data \(validation digest differs; "),
        ({"a": 9}, r"a sweep of other models \(weights a differs\); give another file or delete it\.$"),
        ({"seed": 1, "resize": "nearest"}, r"a sweep of other options \(asked resize and asked seed differ\); "),
        ({"hows": "procrustes"}, r"holds relative_accuracy\(how=least_squares\) of '0' into '0', which is not asked "
                                 r"for and would be lost; ask for it too, or give another file or delete it\.$"),
        ({"layers": ["0", "1"]}, r"holds relative_accuracy\(how=least_squares\) of '2' into '2', which is not"),
    ],
)  # fmt: skip
def test_a_file_with_another_sweep_is_refused_and_stays(world, tmp_path, changes, words):
    a, b, data = world
    save, part = tmp_path / "ab.netkin", data[:3]
    nk.stitch_all(a, b, data, part, save=save)
    before = save.read_bytes()
    given = {"data": data, "test": part, "a": a} | changes
    given |= {name: data[one] for name, one in given.items() if isinstance(one, slice)}
    given["a"] = perceptron(9) if given["a"] == 9 else a
    with pytest.raises(FileFault, match=f"^{str(save)!r} .*{words}"):
        nk.stitch_all(b=b, save=save, **given)
    assert save.read_bytes() == before


def test_a_file_with_a_comparison_is_refused_and_stays(world, tmp_path):
    a, b, data = world
    save = tmp_path / "ab.netkin"
    nk.compare(a, b, data).save(save)
    before = save.read_bytes()
    with pytest.raises(FileFault, match="holds a comparison that is no sweep of stitches; give another file"):
        nk.stitch_all(a, b, data, data, save=save)
    assert save.read_bytes() == before


def test_a_sweep_that_hands_over_its_stitches_keeps_what_was_found_if_it_is_interrupted(world, monkeypatch, tmp_path):
    a, b, data = world
    asked = {"hows": ["task_loss(steps=2)"], "save": tmp_path / "ab.netkin"}
    nk.stitch_all(a, b, data, data, **asked)
    interrupted_after(1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        nk.stitch_all(a, b, data, data, each=print, **asked)
    assert Comparison.load(asked["save"]).complete


def test_a_tour_of_other_models_is_refused(world, tmp_path):
    a, b, data = world
    save = tmp_path / "many.netkin"
    nk.stitch_many({"a": a, "b": b}, data, data, save=save)
    with pytest.raises(FileFault, match="holds a sweep of 'a' into 'b', which is not asked for; give another file"):
        nk.stitch_many({"b": b, "c": a}, data, data, save=save)
    with pytest.raises(FileFault, match=r"holds a sweep of other models \(weights a and weights b differ\)"):
        nk.stitch_many({"a": b, "b": a}, data, data, save=save)
    many = nk.stitch_many({"a": a, "b": b, "c": perceptron(7)}, data, data, save=save)
    assert len(many) == len(Comparisons.load(save)) == 6


def test_a_tour_goes_on_where_it_was(world, monkeypatch, tmp_path):
    a, b, data = world
    asked = {"hows": ["task_loss(steps=1)"], "layers": "1", "save": tmp_path / "many.netkin"}
    with monkeypatch.context() as context:
        interrupted_after(1, context)
        many = nk.stitch_many({"a": a, "b": b}, data, data, partial=True, **asked)
    assert [one.complete for one in many.values()] == [True, False]
    with monkeypatch.context() as context:
        interrupted_after(1, context)
        many = nk.stitch_many({"a": a, "b": b}, data, data, **asked)
    assert [one.complete for one in many.values()] == [True, True]
    assert list(Comparisons.load(asked["save"])) == [("a", "b"), ("b", "a")]


def test_the_digest_tells_inputs_and_labels_apart_but_not_their_order():
    data = images()
    (inputs, labels), *others = data
    assert digest_of(data) == digest_of(images()) == digest_of(data[::-1])
    assert digest_of(data) != digest_of([(inputs, labels + 1), *others])
    assert digest_of(data) != digest_of([(inputs + 1, labels), *others])
    assert digest_of(data) != digest_of(data, 30)
