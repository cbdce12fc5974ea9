"""Stitches on the page: what they say, their warnings, and means over several pairs of models."""

import math

import numpy as np
import pytest

from netkin.reporting.page import page
from netkin.results import Comparisons
from table_worlds import as_caveats


def test_a_stitch_has_its_meaning_direction_and_scale(made):
    said = {"means": "What a stitch can do.", "cannot_see": "How the layers look."}
    warnings = ("a high similarity goes with a useless stitch",)
    text = page(made.comparison(made.table(), made.stitched(**said), caveats=as_caveats(*warnings)))
    assert "<p>What a stitch can do.</p><p><strong>What it can't see. </strong>How the layers look.</p>" in text
    assert "score of a stitch: higher is better · from 0 up" in text
    assert "a high similarity goes with a useless stitch" in text
    assert "range of the values here" not in text


def test_several_comparisons_show_means_and_deviations(made):
    many = Comparisons(
        [
            made.comparison(made.table(), made.stitched(value), a=a, b=b)
            for value, a, b in [(0.8, "x", "y"), (1.0, "y", "x")]
        ]
    )
    text = page(many)
    assert "Layer by layer, over all pairs of models" in text
    assert (
        "Mean ± standard deviation over 2 pairs of models, fewer where values are missing. Layers that not all" in text
    )
    # in a matrix, since by cka every layer meets every layer
    assert text.partition("<script")[0].count("0.90 ±0.14") == 3


def test_where_each_layer_meets_one_other_the_methods_stand_side_by_side(made):
    of = [("x", "y", 0.8), ("y", "x", 1.0)]
    each = [made.comparison(made.stitched(value), made.stitched(value / 2, "identity"), a=a, b=b) for a, b, value in of]
    text = page(Comparisons(each))
    head = text.partition("Layer by layer, over all pairs")[2].partition("</thead>")[0]
    assert head.index("least_squares") < head.index("identity")
    assert "0.45 ±0.07" in text


def test_comparisons_without_stitches_or_shared_layers_have_no_such_section(made):
    plain = [made.comparison(a="x", b="y"), made.comparison(a="y", b="z")]
    assert "over all pairs of models" not in page(Comparisons(plain))
    other = made.stitched()
    assert "over all pairs of models" not in page(made.comparison(other))


def test_a_mean_leaves_holes_out(made):
    of = [made.comparison(made.stitched(0.8)), made.comparison(made.stitched([np.nan, 0.6, 0.6]), b="other")]
    table = Comparisons(of).spread()["relative_accuracy(method=least_squares)"]
    assert table.values.diagonal().tolist() == pytest.approx([0.8, 0.7, 0.7])
    assert math.isnan(table.errors[0, 0])
    assert table.errors[1, 1] == pytest.approx(np.std([0.8, 0.6], ddof=1))
    assert table.quantity.error == "standard deviation over 2 pairs of models, fewer where values are missing"
    assert "±: median 0.14, largest 0.14, standard deviation over 2 pairs" in str(table)


def test_where_no_pair_has_a_value_the_mean_has_none(made):
    holed = made.stitched([np.nan, 0.6, 0.6])
    spread = Comparisons([made.comparison(holed, a="x", b="y"), made.comparison(holed, a="y", b="x")]).spread()
    assert "no pair of models has a value here" in spread.table().missing.values()
    assert spread.table().quantity.error == "standard deviation over 2 pairs of models"
