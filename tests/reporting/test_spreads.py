"""Stitches on the page: what they say, their warnings, and means over several pairs of models."""

import math

import numpy as np
import pytest

from netkin.reporting.page import page
from netkin.results import Comparisons, Spread


def stitched(made, value=0.9, how="least_squares", **changes):
    values, rows = np.full((3, 3), np.nan), ("conv1", "conv2", "head")
    np.fill_diagonal(values, value)
    holes = {(x, y): "this pair was not asked for" for x in rows for y in rows if x != y}
    facts = {"name": "relative_accuracy", "parameters": {"how": how}, "bounds": (0, math.inf), "symmetric": False}
    return made.table(f"relative_accuracy(how={how})", rows, **{"values": values, "holes": holes} | facts | changes)


def test_a_stitch_has_its_meaning_direction_and_scale(made):
    text = page(
        made.comparison(made.table(), stitched(made), warnings=("a high similarity goes with a useless stitch",))
    )
    assert "What a stitched network can do" in text
    assert "worth of a stitch: higher is better · from 0 up" in text
    assert "a high similarity goes with a useless stitch" in text
    assert "range of the values here" not in text


def test_several_comparisons_show_means_and_deviations(made):
    many = Comparisons(
        [
            made.comparison(made.table(), stitched(made, value), a=a, b=b)
            for value, a, b in [(0.8, "x", "y"), (1.0, "y", "x")]
        ]
    )
    text = page(many)
    assert "Layer by layer, over all pairs of models" in text
    assert "Mean ± standard deviation over the 2 comparisons" in text
    assert text.count("0.90 ± 0.14") == 3  # in a matrix, since by cka every layer meets every layer


def test_where_each_layer_meets_one_other_the_methods_stand_side_by_side(made):
    of = [("x", "y", 0.8), ("y", "x", 1.0)]
    each = [
        made.comparison(stitched(made, value), stitched(made, value / 2, "identity"), a=a, b=b) for a, b, value in of
    ]
    text = page(Comparisons(each))
    head = text.partition("Layer by layer, over all pairs")[2].partition("</thead>")[0]
    assert head.index("least_squares") < head.index("identity")
    assert "0.45 ± 0.07" in text


def test_comparisons_without_stitches_or_shared_layers_have_no_such_section(made):
    plain = [made.comparison(a="x", b="y"), made.comparison(a="y", b="z")]
    assert "over all pairs of models" not in page(Comparisons(plain))
    other = stitched(made)
    assert "over all pairs of models" not in page(made.comparison(other))


def test_a_mean_leaves_holes_out(made):
    holed = stitched(made, 0.6)
    values, holes = holed.values.copy(), dict(holed.holes) | {("conv1", "conv1"): "a reason"}
    values[0, 0] = np.nan
    less = stitched(made, values=values, holes=holes)
    cells = Spread.of([made.comparison(stitched(made, 0.8)), made.comparison(less)])[
        "relative_accuracy(how=least_squares)"
    ]
    assert cells.counts.diagonal().tolist() == [1, 2, 2]
    assert cells.means.diagonal().tolist() == pytest.approx([0.8, 0.7, 0.7])
    assert math.isnan(cells.deviations[0, 0])
    assert cells.deviations[1, 1] == pytest.approx(np.std([0.8, 0.6], ddof=1))
    assert (cells.written(0, 0), cells.written(1, 1), cells.written(0, 1)) == ("0.80", "0.70 ± 0.14", "–")
