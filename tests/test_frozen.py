"""The numbers of `frozen.json`, asked for through the public door: none may move further than its line allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import frozen
from netkin.measures import measures
from processes import run_ranks


@pytest.fixture(scope="module")
def stored():
    """Return the entries of the file, how far each may move, and the names that were left out."""
    return frozen.load()


def assert_as_stored(stored, made, chapter):
    entries, held, left_out = stored
    entries = {name: entry for name, entry in entries.items() if name.startswith(f"{chapter} | ")}
    found = frozen.changes(entries, held, {name: entry for name, entry in made.items() if name not in left_out})
    assert not found, "\n".join([f"{len(found)} entries differ from the frozen file, first 20:", *found[:20]])


def scenes_of(dtype):
    """Return the makers of a dtype's scenes, each a test of its own where there are several."""
    return frozen.SCENES if dtype == "f64" else frozen.SINGLES if dtype == "f32" else [frozen.half_precision]


LONG = (frozen.images, frozen.maps, frozen.many)  # of which other scenes and `test_golden.py` have the arithmetic
CASES = [
    pytest.param(
        dtype,
        scene,
        marks=[pytest.mark.slow] * (dtype in ("f32", "bf16") or scene in LONG),
        id=f"{dtype}-{scene.__name__}",
    )
    for dtype in frozen.DTYPES
    for scene in scenes_of(dtype)
]


@pytest.mark.parametrize(("dtype", "scene"), CASES)
def test_no_number_moves(stored, dtype, scene):
    assert_as_stored(stored, frozen.entries(dtype, scenes=[scene]), f"{dtype} | {scene.__name__}")


def test_little_is_left_out(stored):
    entries, _, left_out = stored
    assert len(left_out) < len(entries) / 1000


@pytest.mark.slow
def test_two_ranks_compute_the_same(stored, tmp_path):
    run_ranks(frozen.leave_as_rank, tmp_path)
    for rank in range(2):
        assert_spread(stored, tmp_path / f"{rank}.json")


@pytest.mark.slow
def test_workers_of_ray_compute_the_same(stored, tmp_path):
    pytest.importorskip("ray", reason="needs the extra netkin[ray]")
    here = Path(frozen.__file__).parent
    paths = [str(here), str(Path(sys.modules["netkin"].__file__).parents[1])]
    told = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAY_worker_niceness": "0"}
    subprocess.run(
        [sys.executable, frozen.__file__, "--ray", tmp_path], env=told, cwd=tmp_path, check=True, timeout=300
    )
    assert_spread(stored, tmp_path / "0.json")


def assert_spread(stored, path):
    """Assert that what others have computed is in the file, to 1e-10 or what a number is held to."""
    entries, held, left_out = stored
    far = {name: max(1e-10, within) for name, within in held.items()}
    assert_as_stored((entries, far, left_out), json.loads(path.read_text()), "f64 | engines")


def test_every_measure_is_there(stored):
    asked = {name.split(" | ")[-1].split("(")[0] for name in stored[0]}
    ours = {name for name, measure in measures().items() if measure.function.__module__.startswith("netkin.")}
    assert ours <= asked


def test_a_moved_number_a_new_hole_and_a_missing_entry_are_told():
    old = {"a": [[0.5, None]], "b": [[1000.0]], "c": "NoValue", "d": [[1.0]]}
    held = dict.fromkeys(old, 1e-9)
    new = {"a": [[None, None]], "b": [[1000.0 + 2e-6]], "c": "InvalidValue", "e": [[1.0]]}
    assert [line.split()[:2] for line in frozen.changes(old, held, new)] == [
        ["added", "e"], ["moved", "a"], ["moved", "b"], ["moved", "c"], ["removed", "d"],
    ]  # fmt: skip
    assert not frozen.changes(old, held, old | {"a": [[0.5 + 1e-10, None]], "b": [[1000.0 + 9e-7]]})


def test_a_number_may_move_as_far_as_shaken_data_move_it():
    made = {"f64 | s | a": [[0.5]], "f64 | s | b": [[0.5]], "f64 | s | c": [[1e-9]], "f32 | s | d": [[0.5]]}
    shaken = made | {"f64 | s | b": [[0.5 + 3e-11]], "f64 | s | c": [[1e-5]]}
    held = dict(frozen.tolerances(made, [shaken]))
    assert list(held.values()) == [1e-12, pytest.approx(1e-10), float("inf"), 1e-6]
