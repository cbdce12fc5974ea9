"""The tree and the plane of networks."""

import numpy as np
import pytest

from netkin.reporting.page import page
from netkin.reporting.page.model_maps import angles_of, joined_pairs, network_map, scaled
from netkin.results import Comparison, Values


def networks(values, higher=True):
    names = tuple(f"n{place}" for place in range(len(values)))
    table = Values(
        id="atom_cosine", name="atom_cosine", parameters={}, layers_a=names, layers_b=names, values=values,
        higher_is_closer=higher, bounds=(-1, 1) if higher else (0, 4), symmetric=True, conventions="Eq. 5",
        statistic="Filters", axes=("network", "network"),
    )  # fmt: skip
    return Comparison(
        a="networks", b="networks", layers_a=names, layers_b=names, tables={"atom_cosine": table}, shapes_a={},
        shapes_b={}, widths_a={}, widths_b={}, data="", examples=0, seed=0, version="0.1.0",
    )  # fmt: skip


def test_points_of_a_plane_are_found_again_up_to_a_turn():
    points = np.random.default_rng(0).normal(size=(9, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    places, share = scaled(distances)
    np.testing.assert_allclose(np.linalg.norm(places[:, None] - places, axis=2), distances, atol=1e-9)
    assert share == pytest.approx(1)


def test_the_nearest_join_first_at_their_mean_angle():
    angles = np.array([[0, 0.1, 1.0, 1.2], [0.1, 0, 1.1, 1.3], [1.0, 1.1, 0, 0.3], [1.2, 1.3, 0.3, 0]])
    found = joined_pairs(angles)
    assert found[0, :3].tolist() == [0, 1, pytest.approx(0.1)]
    assert found[1, :3].tolist() == [2, 3, pytest.approx(0.3)]
    assert found[2, 2] == pytest.approx(np.mean([1.0, 1.2, 1.1, 1.3]))


def test_similarities_become_angles_and_distances_stay():
    values = np.array([[1, 0.5, 0], [0.5, 1, -1], [0, -1, 1]])
    similar, apart = (
        networks(one, higher).tables["atom_cosine"] for one, higher in ((values, True), (1 - values, False))
    )
    np.testing.assert_allclose(angles_of(similar)[0, 1:], [np.pi / 3, np.pi / 2])
    np.testing.assert_allclose(angles_of(apart), 1 - values)


def test_the_page_tells_the_nearest_and_the_farthest_and_draws_both():
    values = np.array([[1, 0.9, 0.1], [0.9, 1, 0.2], [0.1, 0.2, 1]])
    shown = page(networks(values))
    assert "3 networks, each with every other" in shown
    assert "the closest networks are n0 × n1 at 0.90, and the farthest apart n0 × n2 at 0.10" in shown
    assert shown.count("<polyline") >= 2
    assert 'aria-label="Networks in a plane"' in shown
    assert "layers</td>" not in shown


def test_two_networks_and_equal_ones_do_without_a_map_or_with_a_trivial_one():
    assert network_map(networks(np.ones((2, 2)))) is None
    assert "Which join first" in page(networks(np.ones((4, 4))))
