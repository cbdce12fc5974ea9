"""The numbers of `golden.json`: none may move."""

from __future__ import annotations

import pytest

import golden
import golden_worlds
from netkin.statistics import Grams, Moments, Rows

FORMS = {
    Moments: {"matrices", "gradients", "Moments.of", "LayerMoments", "moments", "rows"},
    Grams: {"matrices", "gradients", "LayerGrams", "grams"},
    Rows: {"matrices", "gradients", "LayerRows", "sample"},
}
SPECTRAL = {"Spectra.of", "LayerSpectra", "spectra"}


@pytest.fixture(scope="module")
def stored():
    """Return the entries of the file, and the names left out of it."""
    return golden.load()


def of_dtype(entries, dtype):
    return {name: value for name, value in entries.items() if name.split("/")[2] == dtype}


@pytest.mark.parametrize(
    "dtype", [pytest.param(one, marks=[pytest.mark.slow] * (one != "f64")) for one in golden_worlds.DTYPES]
)
def test_no_number_moves(stored, dtype):
    entries, left_out = stored
    made = golden.entries(dtypes=[dtype])
    assert of_dtype(made, dtype) == made
    changes = golden.changes(of_dtype(entries, dtype), {name: made[name] for name in made.keys() - left_out})
    assert not changes, "\n".join([f"{len(changes)} entries differ from the golden file, first 20:", *changes[:20]])


def test_the_file_holds_enough_and_leaves_out_little(stored):
    entries, left_out = stored
    numbers = [name for name, value in entries.items() if isinstance(value, float)]
    assert len(numbers) >= 2000
    assert len(left_out) < len(numbers) / 50
    assert not left_out & entries.keys()
    assert {name.split("/")[2] for name in entries} == set(golden_worlds.DTYPES)


@pytest.mark.parametrize("dtype", ["f64", "f32"])
@pytest.mark.parametrize("name", sorted(golden_worlds.ours()))
def test_every_measure_is_there_in_each_form_that_it_can_be_read_in(stored, name, dtype):
    one = golden_worlds.ours()[name]
    forms = FORMS[one.facts.reads] | (SPECTRAL if golden_worlds.in_spectra(one) else set())
    keys = (key.split("/") for key, value in stored[0].items() if isinstance(value, float))
    assert forms <= {form for form, _, there, id, _ in keys if there == dtype and id.partition("(")[0] == name}


def test_a_moved_number_a_changed_text_and_a_missing_entry_are_told():
    old = {"a/b/f64/cka/x~y": 0.5, "a/b/f32/cka/x~y": 0.5, "a/b/f64/cka/hole": "why", "a/b/f64/cka/gone": 1.0}
    new = {"a/b/f64/cka/x~y": 0.5 + 2e-9, "a/b/f32/cka/x~y": 0.5 + 2e-9, "a/b/f64/cka/hole": "because"}
    assert golden.changes(old, new) == [
        "removed  a/b/f64/cka/gone: 1.0",
        "changed  a/b/f64/cka/hole: 'why' -> 'because'",
        "changed  a/b/f64/cka/x~y: 0.5 -> 0.500000002",
    ]


def test_what_rounding_moves_and_roots_near_zero_are_left_out():
    made = {"matrices/s/f64/cka/X~Y": 0.5, "matrices/s/f64/nbs/X~Y": 0.5, "matrices/s/f64/angular_cka/X~Y": 1e-8}
    shaken = made | {"matrices/s/f64/nbs/X~Y": 0.5 + 2e-10}
    assert golden.unsteady(made, [shaken]) == ["matrices/s/f64/angular_cka/X~Y", "matrices/s/f64/nbs/X~Y"]
