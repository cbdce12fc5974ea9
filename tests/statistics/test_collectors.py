"""What all collectors of rows do alike: they refuse what they can't use, and nothing of that stays in them."""

import numpy as np
import pytest

from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName
from netkin.statistics import LayerGrams, LayerMoments, LayerRows, LayerSpectra, LinearRows
from netkin.statistics.storage import to_plain

PAIRS = [(["a"], ["b"]), (["c"], ["b"])]
KINDS = {
    "moments": lambda: LayerMoments(PAIRS),
    "moments of chunks": lambda: LayerMoments(PAIRS, chunks=3),
    "all rows": lambda: LinearRows(PAIRS),
    "sampled rows": lambda: LayerRows(["a", "b", "c"], cap=20),
    "mini-batches": lambda: LayerGrams(PAIRS, batch=8),
    "spectra": lambda: LayerSpectra(PAIRS),
}
BAD = {
    "NaN": lambda rows: np.where(np.arange(rows.size).reshape(rows.shape) == 3, np.nan, rows),
    "Inf": lambda rows: np.where(np.arange(rows.size).reshape(rows.shape) == 3, np.inf, rows),
    "no examples": lambda rows: rows[:0],
    "no features": lambda rows: rows[:, :0],
    "one number": lambda rows: rows.ravel()[0],
    "complex numbers": lambda rows: rows * 1j,
    "a text": lambda rows: "text",
    "another width": lambda rows: np.concatenate([rows, rows], axis=1),
}


@pytest.fixture(params=KINDS)
def fed(request, worlds):
    """Return how a collector is made, one that has seen one batch, and the rows of that batch: maps for spectra."""
    space = (4, 4) if request.param == "spectra" else ()
    rows = {name: worlds.normal(30, width, *space) for name, width in {"a": 2, "b": 3, "c": 4}.items()}
    collector = KINDS[request.param]()
    collector.update(rows)
    return KINDS[request.param], collector, rows


def state_of(collector):
    """Return all that a file would hold of a collector."""
    tensors = {}
    return to_plain(collector, tensors, ""), {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("bad", BAD)
def test_a_batch_that_is_refused_leaves_no_trace(fed, bad):
    make, collector, rows = fed
    for one in (collector, make()) if bad != "another width" else (collector,):
        with pytest.raises((ShapeError, InvalidValue), match="b"):
            one.update(rows | {"b": BAD[bad](rows["b"])})
    with pytest.raises(ShapeError, match="this batch lacks rows for 'b'"):
        collector.update({name: rows[name] for name in "ac"})
    collector.update(rows)
    fresh = make()
    for _ in range(2):
        fresh.update(rows)
    assert state_of(collector) == state_of(fresh)


def test_layers_that_it_was_not_told_of_are_left_alone(fed):
    _, collector, rows = fed
    collector.update(rows | {"extra": "not a matrix"})
    assert collector.names == ["a", "b", "c"]


@pytest.mark.parametrize("pair", [("a", "d"), ("d", "a"), ("a", "c"), ("a", "a")])
def test_a_pair_that_is_not_there_is_refused(fed, pair):
    make, collector, _ = fed
    if "d" not in pair and make is KINDS["sampled rows"]:  # which serve every pair
        assert collector[pair].n == 20
        return
    with pytest.raises(UnknownName if "d" in pair else NoValue):
        collector[pair]
