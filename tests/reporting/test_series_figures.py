import sys
from dataclasses import replace

import numpy as np
import pytest

from netkin.errors import InvalidValue, ShapeError, UnknownName
from netkin.reporting import plot
from refusals import refused

matplotlib = pytest.importorskip("matplotlib")


def heatmaps(figure):
    return [axes for axes in figure.axes if axes.images]


def charts(figure):
    return [axes for axes in figure.axes if axes.lines]


def test_panes_stand_above_the_lines_of_each_measure(made):
    series = made.series(measures=("svcca", "procrustes_distance"), constant=10)
    figure = series.plot()
    panes = heatmaps(figure)
    assert [axes.get_title() for axes in panes] == ["step 0", "step 10", "step 100", "step 1,000"] * 2
    for axes, step in zip(panes, series.steps, strict=False):
        assert np.array_equal(axes.images[0].get_array().filled(np.nan), series[step]["svcca"].values, equal_nan=True)
    for axes, measure in zip(charts(figure), series.measures, strict=True):
        drawn = np.array([line.get_ydata() for line in axes.lines])
        assert np.array_equal(drawn.T[:-1], series.own(measure)[:-1], equal_nan=True)
        assert np.isnan(drawn.T[-1]).all()  # what is so by construction is drawn faintly
        faint = [part.get_segments()[0][-1] for part in axes.collections]
        assert [tuple(end) for end in faint] == [(1000, own) for own in series.own(measure)[-1]]
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(series.layers)


def test_holes_are_hatched_at_their_step(made):
    panes = heatmaps(made.series(constant=10).plot())
    assert [sum(patch.get_hatch() == "/////" for patch in axes.patches) for axes in panes] == [4, 0, 0, 0]


def test_the_steps_are_chosen(made):
    series = made.series()
    assert [axes.get_title() for axes in heatmaps(series.plot(steps=[1000, 10]))] == ["step 1,000", "step 10"]
    with pytest.raises(UnknownName, match="no step 7 in this series; it has 0, 10, 100, 1000."):
        series.plot(steps=[7])
    with refused(InvalidValue, "steps"):
        plot(made.comparison(), steps=[7])


@pytest.mark.slow
def test_of_many_steps_five_are_shown(made):
    assert len(heatmaps(made.large_series().plot())) == 5


def test_every_step_with_every_other_is_drawn_with_marks_where_layers_settle(made):
    series = made.series()
    steps = tuple(map(str, series.steps))
    tables = [made.table(f"svcca of {layer}", steps) for layer in series.layers]
    figure = replace(series, between=made.comparison(*tables)).plot()
    maps = heatmaps(figure)[len(series.steps) :]
    assert [axes.get_title() for axes in maps] == list(series.layers)
    assert [axes.get_ylabel() for axes in maps] == ["step", "", "", ""]
    for axes, table in zip(maps, tables, strict=True):
        assert np.array_equal(axes.images[0].get_array(), table.values)
    reached = [sum(series.reached(mark)[layer] is not None for mark in (0.99, 0.999)) for layer in series.layers]
    assert [len(axes.lines) for axes in maps] == [2 * count for count in reached]
    assert sum(reached) > 0


def test_many_layers_are_told_by_a_bar_of_colours(made):
    figure = made.large_series().plot()
    chart = charts(figure)[0]
    assert chart.get_legend() is None
    assert len(chart.lines) == 30
    names = [text.get_text() for axes in figure.axes for text in axes.get_yticklabels()]
    assert "stage0.block0" in names
    assert len({line.get_color() for line in chart.lines}) > 25


@pytest.mark.parametrize(
    "steps, kind", [((0, 10, 100, 1000), "symlog"), ((1, 10, 100, 1000), "log"), ((0, 10, 20, 30), "linear")]
)
def test_the_axis_fits_the_steps(made, steps, kind):
    chart = charts(made.series(steps).plot())[0]
    assert chart.get_xscale() == kind
    assert chart.get_xlabel() == "step"
    assert chart.get_xticklabels()[-1].get_text() == ("1k" if steps[-1] == 1000 else "30")


def test_closer_is_up_whatever_the_direction(made):
    ends = [charts(made.series(measures=(id,)).plot())[0].get_ylim() for id in ("svcca", "procrustes_distance")]
    assert ends[0][0] < ends[0][1]
    assert ends[1][0] > ends[1][1]


def test_the_lines_alone_go_into_axes_of_ones_own(made):
    figure = matplotlib.figure.Figure()
    axes = figure.add_subplot()
    series = made.series(measures=("svcca", "cka"))
    assert series.plot("cka", ax=axes) is figure
    assert len(axes.lines) == 4
    assert not axes.images
    with pytest.raises(ShapeError, match="takes one measure, and here are 2: svcca, cka. Name a measure."):
        series.plot(ax=axes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending, start", [(".png", b"\x89PNG"), (".svg", b"<?xml"), pytest.param(".pdf", b"%PDF", marks=pytest.mark.slow)]
)
def test_the_ending_chooses_the_kind_of_file(made, tmp_path, ending, start):
    made.series(rows=("$x", "<b>y$")).plot(path=tmp_path / f"run{ending}")
    assert (tmp_path / f"run{ending}").read_bytes().startswith(start)


@pytest.mark.slow
def test_the_words_of_an_svg_are_text_and_the_file_is_the_same_each_time(made, tmp_path):
    for name in ("1.svg", "2.svg"):
        plot(made.series(rows=("$x", "<b>y$")), path=tmp_path / name)
    text = (tmp_path / "1.svg").read_text()
    assert text.count(">$x</text>") >= 2
    assert text == (tmp_path / "2.svg").read_text()


def test_what_cannot_be_drawn_is_refused(made):
    with pytest.raises(UnknownName, match="no measure 'svcc' in this comparison; did you mean 'svcca'"):
        made.series().plot("svcc")
    with pytest.raises(InvalidValue, match="nothing to draw: this result holds no measure."):
        made.series(measures=()).plot()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(7,), (0, 5)])
@pytest.mark.parametrize("rows", [("only",), ("a", "b")])
def test_odd_sizes_are_drawn(made, steps, rows):
    figure = made.series(steps, rows).plot()
    figure.canvas.draw()
    assert [axes.images[0].get_array().shape for axes in heatmaps(figure)] == [(len(rows), len(rows))] * len(steps)


def test_layers_without_any_value_are_drawn_as_holes(made):
    figure = made.series(rows=("a", "b"), constant=2000).plot()
    figure.canvas.draw()
    assert any(patch.get_hatch() == "/////" for axes in heatmaps(figure) for patch in axes.patches)


def test_pyplot_is_left_alone(made):
    before = dict(matplotlib.rcParams)
    made.series().plot()
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
