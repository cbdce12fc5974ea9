import numpy as np
import pytest

from netkin.reporting.grids import Scale, contrast, depths, ink, palette, shades

# Viénot, Brettel & Mollon (1999): what people without red or green cones see, in linear sRGB
RED_BLIND = np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]])
GREEN_BLIND = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])


def luminances(colours, seen_by):
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    return np.clip(linear @ seen_by.T, 0, 1) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("seen_by", [np.eye(3), RED_BLIND, GREEN_BLIND], ids=["all cones", "red-blind", "green-blind"])
def test_closer_is_lighter_to_everybody(seen_by):
    assert (np.diff(luminances(shades(64) / 255, seen_by)) > 0).all()


def test_steps_look_even():
    lightness = np.cbrt(luminances(shades(17) / 255, np.eye(3)))
    assert np.diff(lightness).max() < 1.6 * np.diff(lightness).min()


def test_the_text_of_every_cell_is_readable():
    inks = {"#000": "#000000", "#fff": "#ffffff"}
    assert min(contrast(shade, inks[ink(shade)]) for shade in palette()) > 4.5


def test_distances_have_the_close_end_where_similarities_have_it():
    values = np.array([0.0, 1.0, np.nan])
    assert Scale(0, 1, True).shade_numbers(values).tolist() == [0, 255, -1]
    assert Scale(0, 1, False).shade_numbers(values).tolist() == [255, 0, -1]


def test_values_a_rounding_beyond_the_bounds_are_coloured_as_the_bounds():
    assert Scale(0, 1, True).shade_numbers(np.array([-1e-9, 1 + 1e-9])).tolist() == [0, 255]


def test_values_all_alike_lie_in_the_middle():
    assert Scale(3, 3, True).closeness(np.array([3.0])).tolist() == [0.5]


def test_a_scale_without_any_value_is_from_0_to_1(made):
    empty = made.table(rows=("a",), values=[[np.nan]], missing={("a", "a"): "constant"}, bounds=(0, np.inf))
    assert (Scale.of(empty).low, Scale.of(empty).high) == (0, 1)


def test_lines_in_a_notebook_can_be_seen_on_white_and_on_black():
    assert all(contrast(colour, page) >= 3 for colour in depths("both") for page in ("#ffffff", "#111111"))
