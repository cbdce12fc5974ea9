import numpy as np
import pytest

from netkin.results.labels import NOT_ASKED, listing


def asked(made, pairs, rows=("in", "mid", "out"), columns=("in", "mid", "out"), **changes):
    values = np.full((len(rows), len(columns)), np.nan)
    for pair, value in pairs.items():
        values[rows.index(pair[0]), columns.index(pair[1])] = value
    holes = {(x, y): NOT_ASKED for x in rows for y in columns if (x, y) not in pairs}
    holes |= {pair: "a reason" for pair, value in pairs.items() if np.isnan(value)}
    return made.table(rows=rows, columns=columns, values=values, missing=holes, **changes)


def test_layers_that_meet_one_other_are_a_list(made):
    diagonal = {("in", "in"): 0.9, ("mid", "mid"): np.nan, ("out", "out"): 0.5}
    assert listing(made.comparison(asked(made, diagonal))) == [(0, 0), (1, 1), (2, 2)]
    assert listing(made.comparison(asked(made, {("in", "out"): 0.9}))) == [(0, 2)]


@pytest.mark.parametrize("pairs", [{("in", "in"): 0.9, ("in", "out"): 0.2}, {("in", "in"): 0.9, ("out", "in"): 0.2}])
def test_a_layer_that_meets_several_makes_a_matrix(made, pairs):
    assert listing(made.comparison(asked(made, pairs))) == []


def test_whole_tables_and_classes_are_no_lists(made):
    assert listing(made.comparison()) == []
    classes = asked(made, {("in", "0"): 0.9}, rows=("in",), columns=("0",), axes=("layer", "class"))
    assert listing(made.comparison(classes)) == []
    assert listing(made.comparison(tables={})) == []


def test_a_list_is_printed_pair_by_pair(made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    pairs = {("in", "in"): 0.9, ("mid", "out"): np.nan, ("out", "mid"): 0.5}
    methods = [
        asked(made, pairs, id=f"agreement(method={how})", name="agreement", parameters={"method": how}, kind="score")
        for how in ("least_squares", "identity")
    ]
    assert str(made.comparison(asked(made, pairs), *methods)).splitlines()[4:] == [
        "cka: similarity (higher is closer), 0 to 1, exact",
        "            cka",
        "in         0.90",
        "mid × out     –",
        "out × mid  0.50",
        "–  a reason (1 pair)",
        "",
        "agreement(method=least_squares): score of a stitch (higher is better), 0 to 1, exact",
        "agreement(method=identity): score of a stitch (higher is better), 0 to 1, exact",
        "           least_squares  identity",
        "in                  0.90      0.90",
        "mid → out              –         –",
        "out → mid           0.50      0.50",
        "–  a reason (1 pair)",
    ]
    assert str(methods[1]).splitlines()[1] == "           identity"
