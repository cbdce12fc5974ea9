"""Comparisons in which each layer meets one other: lists of layers by methods, and no empty matrices."""

import re

import numpy as np
import pytest

from netkin.reporting.grids import grids_of, summary_grids
from netkin.reporting.page import notebook_view, page
from netkin.reporting.words import headline
from netkin.results import Comparisons

LONG = [f"netkin:tiny10@/data/checkpoints/tiny10_cifar10_seed{i}.pt" for i in range(3)]


def test_a_list_has_layers_in_rows_and_methods_in_columns(made):
    is_score, entropy, cka = grids_of(made.sweep())
    assert (cka.id, cka.columns, is_score.columns) == ("cka", ("cka",), ("least_squares", "task_loss"))
    assert is_score.rows == ("conv1", "conv2", "head")
    assert entropy.values.tolist() == [[0.5, 0.4], [1.06, 0.85], [0.9, 0.8]]
    assert not cka.best


def test_the_page_of_a_list_has_no_matrix_and_no_best_match(made):
    text = page(made.sweep())
    assert "Every layer with every layer" not in text
    assert text.index("Profile of corresponding layers") < text.index("Layer by layer</h2>")
    assert "not asked for (" not in text
    assert "<td class=hole" not in text
    assert 'best"' not in text.partition("<main>")[2].partition("</main>")[0]
    assert "3 pairs of layers" in text
    assert "0 of 3; 6 more were not asked for" in text
    assert '<label hidden><input type="checkbox" id="path">' in text


def test_a_comparison_of_corresponding_layers_is_a_list_too(made):
    text = page(made.comparison(made.diagonal()))
    assert "Layer by layer</h2>" in text
    assert text.count("<td class=c") == 3


def test_a_hole_of_a_list_has_its_reason(made):
    both = [made.stitched([0.9, np.nan, 0.8], how) for how in ("least_squares", "identity")]
    assert "no value: conv2 can't be joined (1 pair)" in page(made.comparison(*both)).replace("&#x27;", "'")


def test_pairs_of_other_names_are_listed_and_drawn(made):
    rows, columns = ("a", "b"), ("b", "c")
    holes = dict.fromkeys([("a", "c"), ("b", "b")], "this pair was not asked for")
    values = [[0.9, np.nan], [np.nan, 0.8]]
    found = made.comparison(made.table(rows=rows, columns=columns, values=values, missing=holes))
    assert grids_of(found)[0].rows == ("a × b", "b × c")
    assert made.charts_in(page(found))[0]["names"] == ["a × b", "b × c"]
    assert headline(found).endswith("the pairs that were compared are at 0.85 on average.")


def test_a_row_with_one_value_has_no_best_match(made):
    column = made.comparison(made.table(rows=("a", "b"), columns=("x",)))
    assert grids_of(column)[0].best == {}
    assert grids_of(made.comparison(made.table()))[0].best == {0: 0, 1: 1, 2: 2}


def test_tables_of_one_score_share_their_scale(made):
    sweep = made.sweep()
    assert {(g.scale.low, g.scale.high) for g in grids_of(sweep) if g.id == "cross_entropy"} == {(0.4, 1.06)}
    drawn = page(sweep).partition("</section>")[0]
    titles = re.findall(r'<figure class="curve"><p class="facts-line">([^<]*)</p>', drawn)
    assert titles == [
        "relative_accuracy (higher is better)",
        "cross_entropy (lower is better)",
        "cka (higher is closer)",
    ]
    _, last, _ = made.charts_in(page(sweep))
    assert last["up"] == [1.06, 0.4]  # 0.85 is better than 1.06
    heights = [float(path.split("L")[1].split()[1]) for path in last["paths"]]
    assert heights == pytest.approx([1000, 1000 * (0.85 - 0.4) / 0.66], abs=0.6)
    kinds = re.findall(r'class="line (k\d)"[^>]*><path d="M0 8H28"', drawn)
    assert kinds == ["k0", "k1", "k0", "k1", "k2"]  # a method has one colour in all charts
    matrices = [
        made.distance(f"gulp(ridge={r})", bounds=(0, np.inf), values=np.full((3, 3), r) + np.eye(3)) for r in (1, 3)
    ]
    assert {(g.scale.low, g.scale.high) for g in grids_of(made.comparison(*matrices))} == {(1, 4)}


def test_summaries_of_one_score_share_their_scale(made):
    many = [made.sweep(a=a, b=b) for a, b in [("x", "y"), ("y", "x")]]
    ends = {g.id: (g.scale.low, g.scale.high) for g in summary_grids(many) if g.id.startswith("cross_entropy")}
    assert len(ends) == 2
    assert len(set(ends.values())) == 1


def test_stitches_are_poor_or_good_and_no_distances(made):
    text = page(made.sweep())
    body = text.partition("<main>")[2].partition("</main>")[0]
    assert "1.06 poor" in body
    assert "good 0.4<" in body
    assert "cross_entropy(method=task_loss)" in body
    assert "cross_entropy (lower is better)" in body
    assert "distance" not in body
    alone = page(made.comparison(made.stitched())).partition("<main>")[2].partition("</main>")[0]
    assert "relative_accuracy (higher is better)" in alone
    assert "close" not in alone.partition("Where these numbers")[0]


def test_a_distance_is_still_far_or_close(made):
    text = page(made.comparison())
    assert "procrustes_distance (lower is closer)" in text
    assert made.charts_in(text)[1]["up"] == pytest.approx([np.sqrt(2), 0], abs=1e-5)


def test_the_headline_of_stitches_tells_the_best_one(made):
    assert headline(made.comparison(made.stitched([0.9, 0.7, 0.8]))) == (
        "By relative_accuracy, the best stitch is that at conv1, at 0.90; on average it is 0.80."
    )
    assert headline(made.sweep()) == (
        "By relative_accuracy, the best stitch is that at conv1 by least_squares, at 1.00; on average least_squares "
        "reaches 0.83 and task_loss reaches 0.83."
    )


def test_long_names_of_models_are_shortened_and_given_whole(made):
    text = page(made.sweep(a=LONG[0], b=LONG[1]))
    bare = [name.replace("/data/checkpoints/", "") for name in LONG]
    assert f'<h1 title="{bare[0]} and {bare[1]}">seed0 stitched into seed1, layer by layer</h1>' in text
    assert f'<span title="{bare[0]}"><bdi>seed0</bdi></span> → ' in text
    assert text.partition("Where these numbers come from")[2].count(f"<td>{LONG[0]}, 3 layers</td>") == 1
    many = page(Comparisons([made.sweep(a=a, b=b) for a, b in [LONG[:2], LONG[1:]]]))
    assert f'title="{bare[2]}" aria-label="{bare[2]}"><bdi>seed2</bdi>' in many
    assert '<p class="headline">seed0 and seed1; seed1 and seed2.</p>' in many


def test_paths_stand_in_the_provenance_alone(made):
    place = "cifar10:/data/cifar, a sample of 300 of 10,000"
    known = {"call": f"netkin compare {LONG[0]} {LONG[1]}"}
    pairs = [made.comparison(a=a, b=b, data=place, provenance=known) for a, b in (LONG[:2], LONG[1:])]
    for results in (pairs[:1], pairs):
        shown = re.sub(r"(?s)<script.*?</script>", "", page(results))
        above, _, below = shown.partition("Where these numbers come from")
        assert "/data/" not in above
        assert "cifar10:cifar, a sample of 300 of 10,000" in above
        assert f"<td>{LONG[0]}, 3 layers</td>" in below
        assert f"<td>{place}</td>" in below
    names = ("/a/best.pt", "/b/best.pt")  # which differ in their folders alone
    assert 'title="/a/best.pt"' in page(made.comparison(a=names[0], b=names[1]))


def test_what_is_said_of_every_layer_is_said_once(made):
    cut = {f"cut after {layer!r}": f"second cut after {layer!r}: quick" for layer in ("conv1", "conv2", "head")}
    text = page(made.sweep(provenance={"device": "cpu"} | cut))
    assert "cut after each layer</th><td>second cut after it: quick</td>" in text
    assert "cut after &#x27;conv1" not in text.partition('id="data"')[0]
    cut["cut after 'head'"] = "second run whole"
    text = page(made.sweep(provenance=cut))
    assert "cut after 2 layers</th><td>second cut after it: quick\nconv1, conv2</td>" in text
    assert "cut after head</th><td>second run whole</td>" in text


def test_a_notebook_shows_lists_too(made):
    view = notebook_view(made.sweep())
    assert 'title="conv2, cross_entropy(method=task_loss): 0.8500"' in view
    assert "<b>seed0 and seed1</b>, digits" in view
    assert "(rows)" not in view


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_file_in_the_place_of_a_measure_is_told_where_it_belongs(made, ending, tmp_path):
    many = Comparisons([made.comparison(a=a, b=b) for a, b in [("x", "y"), ("x", "z")]])
    for result in (made.comparison(), many, made.series()):
        with pytest.raises(
            ValueError, match=f"'s.{ending}' is a file, and no measure; pass it as `path='s.{ending}'`."
        ):
            result.plot(f"s.{ending}")
    with pytest.raises(ValueError, match="is a file, and no measure"):
        made.comparison().plot(tmp_path / f"s.{ending}")


def test_the_figure_of_a_list_has_methods_in_columns(made):
    pytest.importorskip("matplotlib")
    figure = made.sweep(a=LONG[0], b=LONG[1]).plot("cross_entropy(method=task_loss)")
    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == [[0.4], [0.85], [0.8]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["task_loss"]
    assert axes.get_ylabel() == "seed0 → seed1"
    assert figure.axes[1].get_ylabel() == "cross_entropy (lower is better)"
