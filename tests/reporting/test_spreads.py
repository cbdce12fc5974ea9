"""Stitches on the page: what they say, their warnings, and means over several pairs of models."""

import math

import numpy as np
import pytest

from netkin.reporting.page import page
from netkin.results import Comparisons, Spread
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
    assert "Mean ± standard deviation over 2 pairs of models. Layers that not all models have are left out." in text
    # in a matrix, since by cka every layer meets every layer
    assert text.partition("<script")[0].count("0.90 ± 0.14") == 3


def test_where_each_layer_meets_one_other_the_methods_stand_side_by_side(made):
    of = [("x", "y", 0.8), ("y", "x", 1.0)]
    each = [made.comparison(made.stitched(value), made.stitched(value / 2, "identity"), a=a, b=b) for a, b, value in of]
    text = page(Comparisons(each))
    head = text.partition("Layer by layer, over all pairs")[2].partition("</thead>")[0]
    assert head.index("least_squares") < head.index("identity")
    assert "0.45 ± 0.07" in text


def test_comparisons_without_stitches_or_shared_layers_have_no_such_section(made):
    plain = [made.comparison(a="x", b="y"), made.comparison(a="y", b="z")]
    assert "over all pairs of models" not in page(Comparisons(plain))
    other = made.stitched()
    assert "over all pairs of models" not in page(made.comparison(other))


def test_a_mean_leaves_holes_out(made):
    of = [made.comparison(made.stitched(0.8)), made.comparison(made.stitched([np.nan, 0.6, 0.6]))]
    cells = Spread.of(of)["relative_accuracy(how=least_squares)"]
    assert cells.counts.diagonal().tolist() == [1, 2, 2]
    assert cells.means.diagonal().tolist() == pytest.approx([0.8, 0.7, 0.7])
    assert math.isnan(cells.deviations[0, 0])
    assert cells.deviations[1, 1] == pytest.approx(np.std([0.8, 0.6], ddof=1))
    assert (cells.written(0, 0), cells.written(1, 1), cells.written(0, 1)) == ("0.80", "0.70 ± 0.14", "–")


def test_where_values_are_missing_the_count_is_told(made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    whole, holed = made.stitched(0.8), made.stitched([np.nan, 0.6, 0.6])
    models = [("x", "y", whole), ("y", "x", holed), ("x", "z", whole), ("z", "x", holed)]
    many = Comparisons([made.comparison(made.diagonal(), table, a=a, b=b) for a, b, table in models])
    told = "over 2 to 4 pairs of models, fewer where values are missing: conv1 2 to 4"
    assert str(many.spread()).endswith(f"mean ± standard deviation {told}")
    assert f"Mean ± standard deviation {told}." in page(many)
    alone = [made.comparison(table, a=a, b=b) for a, b, table in models]
    assert "over 2 to 4 pairs of models, fewer where values are missing: conv1 2." in page(Comparisons(alone))
    less = [made.comparison(holed, a="x", b="y"), made.comparison(holed, a="y", b="x")]
    assert Spread.of(less).count_text() == "2 pairs of models"


def test_of_many_places_with_fewer_values_a_few_are_named(made):
    rows = tuple("abcdefghij")
    each = [made.comparison(made.diagonal(values, rows=rows)) for values in (0.5, [0.5] + 9 * [np.nan])]
    assert Spread.of(each).count_text() == (
        "1 to 2 pairs of models, fewer where values are missing: b 1, c 1, d 1, e 1, f 1, g 1, and 3 more"
    )
