"""Sweeps in files: what is kept when interrupted, what goes on, and files that are not written over."""

import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin import files
from netkin.applications.stitching import TaskLoss, sweep
from netkin.applications.stitching.fitting import FittedMoments
from netkin.applications.stitching.request import digest_of
from netkin.comparing.tabulating import INTERRUPTED
from netkin.errors import FileError
from netkin.results import Comparison, Comparisons
from quickly import slow_after
from table_worlds import sentences
from task_loss_worlds import images, perceptron, two_perceptrons

LEAST = "relative_accuracy(method=least_squares)"


@pytest.fixture(scope="module")
def world():
    return two_perceptrons(examples=200)


@pytest.fixture(scope="module")
def swept(world, tmp_path_factory):
    """A folder with a sweep that is done and its job."""
    (a, b, data), folder = world, tmp_path_factory.mktemp("swept")
    nk.stitch_all(a, b, data, data[:3], save=folder / "ab.netkin")
    return folder


def interrupted_after(count, monkeypatch):
    """Let training be interrupted after so many stitches."""
    real, left = sweep.train_stitch, [count]

    def some(*arguments, **options):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(*arguments, **options)

    monkeypatch.setattr(sweep, "train_stitch", some)


def test_what_is_finished_is_kept(world, monkeypatch):
    a, b, data = world
    interrupted_after(1, monkeypatch)
    found = nk.stitch_all(a, b, data, data, ["least_squares", "task_loss(steps=2)"], partial=True)
    assert not found.complete
    assert np.isfinite(found[LEAST]["2", "2"])
    table = found["relative_accuracy(method=task_loss(steps=2))"]
    assert np.isfinite(table["0", "0"])
    assert table.missing["1", "1"] == INTERRUPTED
    assert "interrupted: some stitches were not reached, and have no value." in sentences(found)


def test_without_partial_an_interruption_goes_through(world, monkeypatch):
    a, b, data = world
    interrupted_after(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        nk.stitch_all(a, b, data, data, "task_loss(steps=2)")


def test_a_saved_sweep_goes_on_where_it_was(world, monkeypatch, tmp_path):
    a, b, data = world
    asked = {"methods": ["least_squares", "task_loss(steps=2)"], "save": tmp_path / "ab.netkin"}
    whole = nk.stitch_all(a, b, data, data, asked["methods"])
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
        np.testing.assert_array_equal(found[name].values, own.values)


def same(one, other):
    """Tell whether two sweeps are the same but for the time at which they were put together."""
    return replace(one, created="") == replace(other, created="")


class Counted:
    """Batches that count how often they are read to the end."""

    def __init__(self, batches):
        self.batches, self.passes = batches, 0

    def __iter__(self):
        yield from self.batches
        self.passes += 1


def test_a_repeated_sweep_is_read_back_with_its_warnings_and_provenance(world, monkeypatch, tmp_path):
    a, b, data = world
    save, asked = tmp_path / "ab.netkin", {"methods": ["least_squares", "random"], "examples": 6}
    first = nk.stitch_all(a, b, data, save=save, **asked)
    assert any("fewer than the" in said for said in sentences(first))
    assert {"fitted on", "cut after '1'", "call", "fitting data digest"} <= first.provenance.keys()
    monkeypatch.setattr(sweep, "fit_by_pass", lambda *given, **options: pytest.fail("fitted again"))
    monkeypatch.setattr(sweep, "compare", lambda *given, **options: pytest.fail("compared again"))
    again = nk.stitch_all(a, b, data, save=save, **asked)
    assert same(again, first)
    assert same(Comparison.load(save), first)


@pytest.mark.slow
def test_a_resumed_sweep_does_not_compute_its_similarity_again(world, monkeypatch, tmp_path):
    a, b, data = world
    asked = {"methods": ["least_squares", "task_loss(steps=2)"], "save": tmp_path / "ab.netkin"}
    with monkeypatch.context() as context:
        interrupted_after(1, context)
        with pytest.raises(KeyboardInterrupt):
            nk.stitch_all(a, b, data, data, **asked)
    monkeypatch.setattr(sweep, "compare", lambda *given, **options: pytest.fail("compared again"))
    found = nk.stitch_all(a, b, data, data, **asked)
    monkeypatch.undo()
    assert same(found, nk.stitch_all(a, b, data, data, **asked | {"save": tmp_path / "whole.netkin"}))


def test_a_stitch_that_gives_nan_costs_no_pass_of_its_own(world, monkeypatch):
    a, b, data = world
    test, real = Counted(data), FittedMoments.stitch

    def spoiled(fit, pair, way, *given):
        one = real(fit, pair, way, *given)
        if (pair, way.id) == (("1", "1"), "procrustes"):
            with torch.no_grad():
                one.transformation.shift[0] = torch.nan
        return one

    whole = nk.stitch_all(a, b, data, data, ["least_squares", "procrustes"])
    monkeypatch.setattr(FittedMoments, "stitch", spoiled)
    found = nk.stitch_all(a, b, data, test, ["least_squares", "procrustes"])
    assert test.passes == 2  # that of the similarities and that of the evaluation
    table = found["relative_accuracy(method=procrustes)"]
    assert "what the stitch makes of layer '1' of 'a' in batch 0 holds 50 NaN" in table.missing["1", "1"]
    for name, own in whole.tables.items():
        kept = [(i, j) for i, j in np.argwhere(np.isfinite(own.values)) if not ("procrustes" in name and i == 1)]
        assert all(found[name].values[i, j] == own.values[i, j] for i, j in kept)


def test_a_shuffling_loader_leaves_the_random_states_as_they_were(world):
    a, b, data = world
    inputs, labels = (torch.cat(parts) for parts in zip(*data, strict=True))
    loader = DataLoader(TensorDataset(inputs, labels), 50, shuffle=True)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    nk.stitch_all(a, b, loader, loader, ["least_squares", "task_loss(steps=2)"])
    nk.stitch(a, "1", b, "1", loader, test=loader)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_a_second_sweep_into_the_same_file_is_refused_while_the_first_one_runs(world, tmp_path):
    a, b, data = world
    save, refused = tmp_path / "ab.netkin", []

    def watching(done, total, what):
        if what == "evaluating" and not refused:
            with pytest.raises(FileError, match="ab.netkin.job' is being worked on by another process"):
                nk.stitch_all(a, b, data, data, "procrustes", save=save, progress=False)
            refused.append(what)

    found = nk.stitch_all(a, b, data, data, save=save, progress=watching)
    assert refused
    assert Comparison.load(save) == found


def test_another_loss_under_the_same_name_is_not_taken_for_the_old_one(world, tmp_path):
    a, b, data = world

    def scaled(by):
        return lambda answers, own, labels: (answers - by * own).square().mean()

    def swept(by):
        how = TaskLoss(labels=scaled(by), steps=4)
        return nk.stitch_all(a, b, data, data, how, layers="1", scores="r2", save=tmp_path / "ab.netkin")

    first, other = swept(1.0), swept(3.0)
    (name,) = [name for name in first.tables if name.startswith("r2")]
    assert first[name]["1", "1"] != other[name]["1", "1"]
    assert same(swept(1.0), first)


def test_a_sweep_is_known_by_its_digests_and_its_call(world, tmp_path):
    a, b, data = world
    alone, kept = nk.stitch_all(a, b, data, data), nk.stitch_all(a, b, data, data, save=tmp_path / "ab.netkin")
    assert alone.provenance["call"].startswith(
        "nk.stitch_all(a=Sequential, b=Sequential, data='list', test='list', methods=['least_squares'], pairs='corr"
    )
    for key in ("call", "weights a", "weights b", "fitting data digest", "test data digest", "asked seed"):
        assert alone.provenance[key] == kept.provenance[key]
    assert alone.provenance["fitting data digest"].startswith("200 examples, mark ")
    state = nk.jobs.read(tmp_path / "ab.netkin")
    assert (state.kind, state.condition, state.progress) == ("sweep", "done", "3 of 3 stitches")


def test_parts_say_how_long_they_took(world, tmp_path):
    a, b, data = world
    nk.stitch_all(a, b, data, data, ["least_squares", "task_loss(steps=2)"], layers="1", save=tmp_path / "ab.netkin")
    seconds = [files.read_header(path)["seconds"] for path in (tmp_path / "ab.netkin.job" / "parts").iterdir()]
    assert len(seconds) == 3
    assert all(one > 0 for one in seconds)


def test_more_methods_and_layers_are_added(world, tmp_path):
    a, b, data = world
    save = tmp_path / "ab.netkin"
    nk.stitch_all(a, b, data, data, layers="1", save=save)
    more = nk.stitch_all(a, b, data, data, ["least_squares", "procrustes"], save=save)
    assert Comparison.load(save) == more
    assert np.isfinite(more["agreement(method=procrustes)"]["2", "2"])


def test_data_in_another_order_are_the_same_data(world, monkeypatch, tmp_path):
    a, b, data = world
    save = tmp_path / "ab.netkin"
    before = nk.stitch_all(a, b, data, data, save=save)
    monkeypatch.setattr(sweep, "fit_by_pass", lambda *given, **options: pytest.fail("fitted again"))
    again = nk.stitch_all(a, b, data[::-1], data[::-1], save=save)
    assert replace(again, created=before.created) == before  # which may be a second ago


def _regrouped(data, sizes):
    return list(zip(*(torch.cat(part).split(sizes) for part in zip(*data, strict=True)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "validation"])
@pytest.mark.parametrize(
    "change", [lambda data: data[::-1], lambda data: _regrouped(data, [20, 80, 50, 50])], ids=["order", "sizes"]
)
def test_a_stitch_is_trained_again_on_other_batches(world, monkeypatch, tmp_path, name, change):
    a, b, data = world
    trained, train_stitch = [], sweep.train_stitch
    monkeypatch.setattr(sweep, "train_stitch", lambda *given, **by: trained.append(given) or train_stitch(*given, **by))
    how = "task_loss(steps=3, batch=10)" if name == "data" else "task_loss(epochs=3, sample=16, patience=1)"
    given = {"test": data[:1], "methods": ["least_squares", how], "layers": "1", "data": data, "validation": data}
    for _ in range(2):
        nk.stitch_all(a, b, **given, save=tmp_path / "ab.netkin")
        assert len(trained) == 1
    given[name] = change(data)
    again = nk.stitch_all(a, b, **given, save=tmp_path / "ab.netkin")
    assert len(trained) == 2
    alone = nk.stitch_all(a, b, **given)
    for score in (one for one in alone.measures if "task_loss" in one):
        assert np.array_equal(again[score].to_numpy(), alone[score].to_numpy(), equal_nan=True)


def test_a_stitch_that_was_trained_on_a_shuffling_loader_is_not_trained_again(world, monkeypatch, tmp_path):
    a, b, data = world
    pairs = TensorDataset(*(torch.cat(part) for part in zip(*data, strict=True)))
    given = {"test": data, "methods": "task_loss(steps=2)", "layers": "1", "save": tmp_path / "ab.netkin"}
    first = nk.stitch_all(a, b, DataLoader(pairs, 50, shuffle=True), **given)
    monkeypatch.setattr(sweep, "train_stitch", lambda *given, **options: pytest.fail("trained again"))
    again = nk.stitch_all(a, b, DataLoader(pairs, 50, shuffle=True), **given)
    assert all(np.array_equal(again[one].to_numpy(), first[one].to_numpy(), equal_nan=True) for one in first.measures)


@pytest.mark.parametrize(
    "changes, words",
    slow_after(4, [
        ({"test": slice(1)}, r"differs in test data \('150 examples', not '50 examples'\); "
                             r"a loader that shuffles or draws at random gives other data each time; ask for the same"),
        ({"data": slice(1)}, r"differs in fitting data \("),
        ({"test": None}, r"differs in test data \("),
        ({"examples": 120}, r"differs in fitting data \("),
        ({"test_examples": 120}, r"differs in test data \("),
        ({"validation": slice(1)}, r"differs in validation data \('none', not '50 examples'\)"),
        ({"a": 9}, r"differs in weights of 'a'; ask for the same again, give another path or delete"),
        ({"seed": 1, "resize": "nearest"}, r"differs in resize \('None', not 'nearest'\) and seed \('0', not '1'\); "),
        ({"names": ("x", "y")}, r"a sweep of 'a' into 'b', which is not asked for and would be lost"),
        ({"methods": "procrustes"}, r"holds relative_accuracy\(method=least_squares\) of '0' into '0', which is not "
                                 r"asked for and would be lost; ask for it too, or give another file or delete it\.$"),
        ({"layers": ["0", "1"]}, r"holds relative_accuracy\(method=least_squares\) of '2' into '2', which is not"),
    ], several=True),
)  # fmt: skip
def test_a_file_with_another_sweep_is_refused_and_stays(world, swept, tmp_path, changes, words):
    a, b, data = world
    save, part = shutil.copytree(swept, tmp_path, dirs_exist_ok=True) / "ab.netkin", data[:3]
    before = save.read_bytes()
    given = {"data": data, "test": part, "a": a} | changes
    given |= {name: data[one] for name, one in given.items() if isinstance(one, slice)}
    given["a"] = perceptron(9) if given["a"] == 9 else a
    with pytest.raises(FileError, match=f"^'{save}(.job)?' .*{words}"):
        nk.stitch_all(b=b, save=save, **given)
    assert save.read_bytes() == before


def test_a_file_with_a_comparison_is_refused_and_stays(world, tmp_path):
    a, b, data = world
    save = tmp_path / "ab.netkin"
    nk.compare(a, b, data).save(save)
    before = save.read_bytes()
    with pytest.raises(FileError, match="would write over '.*ab.netkin'; choose another name"):
        nk.stitch_all(a, b, data, data, save=save)
    assert save.read_bytes() == before


def test_a_sweep_that_hands_over_its_stitches_keeps_what_was_found_if_it_is_interrupted(world, monkeypatch, tmp_path):
    a, b, data = world
    asked = {"methods": ["task_loss(steps=2)"], "save": tmp_path / "ab.netkin"}
    nk.stitch_all(a, b, data, data, **asked)
    interrupted_after(1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        nk.stitch_all(a, b, data, data, each=print, **asked)
    assert Comparison.load(asked["save"]).complete


@pytest.mark.slow
def test_a_tour_of_other_models_is_refused(world, tmp_path):
    a, b, data = world
    save = tmp_path / "many.netkin"
    nk.stitch_many({"a": a, "b": b}, data, data, save=save)
    with pytest.raises(FileError, match="holds a sweep of 'a' into 'b', which is not asked for and would be lost"):
        nk.stitch_many({"b": b, "c": a}, data, data, save=save)
    with pytest.raises(FileError, match=r"holds a sweep that differs in weights of 'a' and weights of 'b';"):
        nk.stitch_many({"a": b, "b": a}, data, data, save=save)
    many = nk.stitch_many({"a": a, "b": b, "c": perceptron(7)}, data, data, save=save)
    assert len(many) == len(Comparisons.load(save)) == 6


def test_a_tour_goes_on_where_it_was(world, monkeypatch, tmp_path):
    a, b, data = world
    asked = {"methods": ["task_loss(steps=1)"], "layers": "1", "save": tmp_path / "many.netkin"}
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
    text, count, order = digest_of(data)
    assert digest_of(images()) == (text, count, order)
    assert digest_of(data[::-1])[:2] == (text, count)
    assert digest_of([(inputs, labels + 1), *others])[0] != text
    assert digest_of([(inputs + 1, labels), *others])[0] != text
    assert digest_of(data, 30)[0] != text
    assert digest_of(data[::-1])[2] != order
