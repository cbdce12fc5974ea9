from types import SimpleNamespace

import numpy as np
import pytest

from netkin.results import Comparison
from table_worlds import table_of


def table(id="cka", rows=("conv1", "conv2", "head"), columns=("conv1", "conv2", "head"), **changes):
    values = np.round(1 / (1 + np.abs(np.arange(len(rows))[:, None] - np.arange(len(columns)))), 3)
    facts = {"name": id.split("(")[0], "parameters": {}, "values": values, "higher_is_closer": True, "bounds": (0, 1)}
    words = {"symmetric": True, "convention": "biased HSIC, centred", "statistic": "Moments", "exactness": "exact"}
    return table_of(id=id, layers_a=rows, layers_b=columns, **(facts | words | changes))


def jackknifed(chunks=5, spread=0.01, seed=0, **changes):
    """A table with replicates and no bias: values off their bounds, and chunks of unequal sizes."""
    sides = {name: changes[name] for name in ("rows", "columns") if name in changes}
    values = np.asarray(changes.pop("values", 0.9 * table(**sides).values))
    noise = np.random.default_rng(seed).normal(size=(chunks, *values.shape))
    sizes = np.arange(10, 10 + chunks)
    noise -= np.average(noise, axis=0, weights=1 - sizes / sizes.sum())
    facts = {"replicates": values + spread * noise, "chunk_sizes": tuple(sizes.tolist())}
    return table(**{"values": values} | facts | changes)


def comparison(*tables, a="seed0", b="seed1", **changes):
    tables = tables or (table(),)
    rows, columns = tables[0].layers_a, tables[0].layers_b
    shapes = {"shapes_a": dict.fromkeys(rows, "pool"), "shapes_b": dict.fromkeys(columns, "pool")}
    widths = {"widths_a": dict.fromkeys(rows, 16), "widths_b": dict.fromkeys(columns, 32)}
    facts = {"data": "digits", "examples": 1797, "seed": 0, "version": "0.1.0", "provenance": {"device": "cpu"}}
    named = {"a": a, "b": b, "layers_a": rows, "layers_b": columns, "tables": {t.id: t for t in tables}}
    return Comparison(**(named | shapes | widths | facts | changes))


def holed(**changes):
    values, holes = [[1.0, np.nan], [0.25, 0.5]], {("in", "out"): "layer 'out' is constant over the data"}
    return table(rows=("in", "out"), columns=("in", "out"), **({"values": values, "missing": holes} | changes))


@pytest.fixture
def made():
    """Small results to look at: `made.table()`, `made.holed()`, `made.jackknifed()`, `made.comparison(*tables)`."""
    return SimpleNamespace(table=table, holed=holed, jackknifed=jackknifed, comparison=comparison)
