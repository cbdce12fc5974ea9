import numpy as np

from netkin.results import Comparisons
from table_worlds import as_caveats


def test_a_comparison_shows_itself_in_a_notebook(made):
    shown = made.comparison(made.holed(), made.distance(), caveats=as_caveats("mind the gap"))._repr_html_()
    assert "conv1 × conv1: 0.9091" in shown
    assert "conv2 × head: no value, layer &#39;head&#39; is constant over the data" in shown
    assert shown.count("<table") == 2
    assert "warning: mind the gap" in shown
    assert "<script" not in shown


def test_hostile_names_stay_text_in_a_notebook(made):
    assert "<img" not in made.hostile()._repr_html_()


def test_a_large_comparison_shows_its_first_measure_and_names_the_rest(made):
    shown = made.large()._repr_html_()
    assert shown.count("<table") == 1
    assert "not shown here: svcca, procrustes_distance, nbs" in shown


def test_many_comparisons_show_their_summaries(made):
    pairs = [made.comparison(a=a, b=b) for a, b in [("x", "y"), ("x", "z")]]
    assert f"x × y: {np.diag(made.table().values).mean():.4f}" in Comparisons(pairs)._repr_html_()
    assert "conv1 × conv1" in Comparisons(pairs[:1])._repr_html_()


def test_a_series_shows_itself_in_a_notebook(made):
    series = made.series(measures=("svcca", "cka"), constant=10, caveats=as_caveats("mind the gap"))
    shown = series._repr_html_()
    assert shown.count("<img ") == 4
    assert shown.count('class="way"') == 4
    assert all(f"<small>step {step:,}</small>" in shown for step in series.steps)
    assert "By svcca, lower layers reach 0.9 before upper ones" in shown
    assert "warning: mind the gap" in shown
    assert "not shown here: cka" in shown
    assert "<script" not in shown
    assert "background:#fff" not in shown  # a dark notebook stays dark


def test_hostile_names_of_a_series_stay_text_in_a_notebook(made):
    assert "<img src=x" not in made.series(rows=(made.NAME, "b"), run=made.NAME)._repr_html_()


def test_a_series_without_measures_or_lines_shows_its_sentence(made):
    assert "3 layers at 4 steps" in made.series(measures=())._repr_html_()
    tables = [made.table("svcca", ("a", "b"), ("x", "y", "z"))] * 2
    series = type(made.series())(run="r", steps=(1, 2), comparisons=[made.comparison(t) for t in tables], final_step=2)
    assert "none of which the final checkpoint has under the same name" in series._repr_html_()
