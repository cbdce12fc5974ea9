import numpy as np

from netkin.results import Comparisons


def test_a_comparison_shows_itself_in_a_notebook(made):
    shown = made.comparison(made.holed(), made.distance(), warnings=("mind the gap",))._repr_html_()
    assert "conv1 × conv1: 0.9091" in shown
    assert "conv2 × head: no value, layer &#x27;head&#x27; is constant over the data" in shown
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
