"""The tree and the plane of networks."""

import re
from dataclasses import replace

import numpy as np
import pytest

from netkin.reporting import plot
from netkin.reporting.html import label_places, render
from netkin.reporting.page import page
from netkin.reporting.parts import maps_of
from netkin.results import Comparison, Comparisons
from netkin.results.distances import distances_of, plane_of, tree_of
from table_worlds import changed, table_of

matplotlib = pytest.importorskip("matplotlib")
styles = pytest.importorskip("matplotlib.style")


def networks(values, higher=True):
    names = tuple(f"n{place}" for place in range(len(values)))
    table = table_of(
        id="atom_cosine", name="atom_cosine", parameters={}, layers_a=names, layers_b=names, values=values,
        higher_is_closer=higher, bounds=(-1, 1) if higher else (0, 4), symmetric=True, convention="Eq. 5",
        statistic="Filters", axes=("network", "network"),
    )  # fmt: skip
    return Comparison(
        a="networks", b="networks", layers_a=names, layers_b=names, tables={"atom_cosine": table}, shapes_a={},
        shapes_b={}, widths_a={}, widths_b={}, data="", examples=0, seed=0, version="0.1.0",
    )  # fmt: skip


def test_points_of_a_plane_are_found_again_up_to_a_turn():
    points = np.random.default_rng(0).normal(size=(9, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    places, share = plane_of(distances)
    np.testing.assert_allclose(np.linalg.norm(places[:, None] - places, axis=2), distances, atol=1e-9)
    assert share == pytest.approx(1)


def test_the_nearest_join_first_at_their_mean_angle():
    angles = np.array([[0, 0.1, 1.0, 1.2], [0.1, 0, 1.1, 1.3], [1.0, 1.1, 0, 0.3], [1.2, 1.3, 0.3, 0]])
    found = tree_of(angles)
    assert found[0, :3].tolist() == [0, 1, pytest.approx(0.1)]
    assert found[1, :3].tolist() == [2, 3, pytest.approx(0.3)]
    assert found[2, 2] == pytest.approx(np.mean([1.0, 1.2, 1.1, 1.3]))


def test_similarities_become_angles_and_distances_stay():
    values = np.array([[1, 0.5, 0], [0.5, 1, -1], [0, -1, 1]])
    similar, apart = (
        networks(one, higher).tables["atom_cosine"] for one, higher in ((values, True), (1 - values, False))
    )
    np.testing.assert_allclose(distances_of(similar)[0, 1:], [np.pi / 3, np.pi / 2])
    np.testing.assert_allclose(distances_of(apart), 1 - values)


def test_the_page_tells_the_nearest_and_the_farthest_and_draws_both():
    values = np.array([[1, 0.9, 0.1], [0.9, 1, 0.2], [0.1, 0.2, 1]])
    shown = page(networks(values))
    assert "3 networks, each with every other" in shown
    assert "the closest networks are n0 × n1 at 0.90, and the farthest apart n0 × n2 at 0.10" in shown
    assert shown.count("<polyline") >= 2
    assert 'aria-label="Networks in a plane"' in shown
    assert "layers</td>" not in shown


def test_the_axes_of_the_plane_are_numbered_in_the_unit_of_the_distances():
    values = np.array([[1, 0.9, 0.1], [0.9, 1, 0.2], [0.1, 0.2, 1]])
    _, plane = map(render, maps_of(networks(values).tables["atom_cosine"]))
    number = r'<text x="(-?[\d.]+)" y="(-?[\d.]+)"[^>]*text-anchor="{}"[^>]*>(-?[\d.]+)<'
    across, up = (re.findall(number.format(anchor), plane) for anchor in ("middle", "end"))
    assert min(len(across), len(up)) >= 2
    (left, _, low), *_, (right, _, high) = across
    unit = (float(right) - float(left)) / (float(high) - float(low))  # pixels
    (_, bottom, low), *_, (_, top, high) = up
    assert (float(bottom) - float(top)) / (float(high) - float(low)) == pytest.approx(unit, rel=0.01)
    dots = np.array(re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', plane), dtype=float)
    apart = np.linalg.norm(dots[:, None] - dots, axis=2) / unit  # three points lie in a plane exactly
    np.testing.assert_allclose(apart, np.arccos(values), atol=0.01)


def test_two_networks_and_equal_ones_do_without_a_map_or_with_a_trivial_one():
    assert maps_of(networks(np.ones((2, 2))).tables["atom_cosine"]) == []
    assert "Dendrogram" in page(networks(np.ones((4, 4))))


def many(values, **facts):
    """Return comparisons of all pairs of models of one layer."""
    names = [f"m{place}" for place in range(len(values))]
    own = {"layers_a": ("x",), "layers_b": ("x",), "axes": ("layer", "layer")} | facts
    table = networks(np.eye(3)).tables["atom_cosine"]
    pairs = [(i, j) for i in range(len(names)) for j in range(i + 1, len(names))]
    return Comparisons(
        replace(networks(np.eye(3)), a=names[i], b=names[j], layers_a=("x",), layers_b=("x",),
                tables={"atom_cosine": changed(table, values=[[values[i][j]]], **own)})
        for i, j in pairs
    )  # fmt: skip


def test_many_models_have_a_map_by_each_measure():
    found = many([[1, 0.9, 0.1], [0, 1, 0.2], [0, 0, 1]])
    shown = page(found)
    assert "the closest models are m0 × m1 at 0.90, and the farthest apart m0 × m2 at 0.10" in shown
    assert shown.count('aria-label="Tree of the networks"') == 1
    apart = page(many([[0, 2, 3], [0, 0, 2.5], [0, 0, 0]], higher_is_closer=False, kind="distance", bounds=(0, 4)))
    assert "Average linkage of atom_cosine." in apart


@pytest.mark.parametrize("count", [72, 73, 200])
def test_points_of_many_networks_have_their_names_as_titles_alone(count):
    points = np.random.default_rng(0).normal(size=(count, 2))
    apart = np.linalg.norm(points[:, None] - points, axis=2).clip(max=4)
    _, plane = map(render, maps_of(networks(apart, higher=False).tables["atom_cosine"]))
    assert plane.count("<circle") == plane.count("<title>n") == count
    assert plane.count(">n5</text>") == (count <= 72)


def test_models_that_were_not_all_compared_have_no_map():
    found = many([[1, 0.9, 0.1], [0, 1, 0.2], [0, 0, 1]])
    assert "Dendrogram" not in page(Comparisons(list(found.values())[:2]))
    assert len(plot(Comparisons(list(found.values())[:2])).axes) == 2


def test_the_figure_draws_the_tree_and_the_plane_beside_the_heatmap():
    figure = plot(many([[1, 0.9, 0.1], [0, 1, 0.2], [0, 0, 1]]))
    _, tree, plane, _ = figure.axes
    (lines,) = tree.collections
    assert len(lines.get_segments()) == 2
    assert max(segment[:, 0].max() for segment in lines.get_segments()) == pytest.approx(np.mean(np.arccos([0.1, 0.2])))
    assert [text.get_text() for text in plane.texts] == ["m0", "m1", "m2"]
    assert plane.get_xticks().tolist() == plane.get_yticks().tolist()
    assert len(plane.get_xticks()) > 2
    assert [text.get_text() for text in tree.get_yticklabels()] == ["m2", "m0", "m1"]


def test_the_tree_and_the_plane_have_the_colour_of_the_labels():
    with styles.context("dark_background"):
        _, tree, plane, _ = plot(many([[1, 0.9, 0.1], [0, 1, 0.2], [0, 0, 1]])).axes
    assert {tuple(one) for own in (tree, plane) for one in own.collections[0].get_edgecolor()} == {(1, 1, 1, 1)}


def test_names_inside_the_drawing_are_preferred():
    ((dx, dy),) = label_places([(95.0, 50.0)], ["a long name"], letter=6, line=12, wide=100)
    assert (dx, dy) == (-6 - 66, 0)
    assert label_places([(95.0, 50.0)], ["a long name"], letter=6, line=12) == [(6, 0)]


def test_names_stand_apart_where_points_crowd():
    points = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (2.0, 2.0)]
    names = ["first", "second", "third", "fourth", "fifth"]
    offsets = label_places(points, names, letter=6, line=12)
    boxes = [
        (x + dx, y + dy, x + dx + 6 * len(name)) for (x, y), (dx, dy), name in zip(points, offsets, names, strict=True)
    ]
    for i, (left, middle, right) in enumerate(boxes):
        for other in boxes[:i]:
            assert abs(middle - other[1]) >= 12 - 1e-9 or right <= other[0] or other[2] <= left
