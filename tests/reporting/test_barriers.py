"""The picture of the way between two stitches."""

import pytest

from netkin.applications.stitching import Barrier
from netkin.errors import ValueFault
from netkin.reporting.figures.drawing import empty_figure

WEIGHTS, LOSSES = (0.0, 0.5, 1.0), (0.2, 0.9, 0.4)


def barrier(accuracies=()):
    return Barrier(WEIGHTS, LOSSES, accuracies, accuracies, examples=1200)


def lines(ax):
    return [[line.get_ydata()[0], line.get_ydata()[-1], len(line.get_ydata())] for line in ax.lines]


def test_the_losses_stand_beside_the_straight_line_between_the_ends():
    (ax,) = barrier().plot().axes
    assert lines(ax) == [[0.2, 0.4, 2], [0.2, 0.4, 3]]
    assert list(ax.lines[1].get_ydata()) == list(LOSSES)
    assert ax.get_title() == "barrier 0.6000, 1,200 examples"
    assert ax.get_ylabel() == "cross-entropy"


def test_accuracies_have_a_scale_of_their_own():
    _, ax = barrier((0.9, 0.1, 0.8)).plot().axes
    assert ax.get_ylabel() == "relative accuracy"
    assert list(ax.lines[0].get_ydata()) == [0.9, 0.1, 0.8]


def test_it_is_drawn_into_axes_or_a_file(tmp_path):
    ax = empty_figure(2, 2).add_subplot()
    assert barrier().plot(ax=ax) is ax.figure
    barrier().plot(tmp_path / "way.svg")
    assert (tmp_path / "way.svg").read_text().startswith("<?xml")
    with pytest.raises(ValueFault, match="a figure ends in .png, .svg, .pdf"):
        barrier().plot(tmp_path / "way.gif")
