import importlib
import sys

import numpy as np
import pytest

from netkin.applications.stitching import Barrier
from netkin.errors import FileError, InvalidValue, MissingExtra, ShapeError, UnknownName
from netkin.reporting import plot
from netkin.reporting.figures import drawing
from netkin.results import Comparisons

matplotlib = pytest.importorskip("matplotlib")
styles = pytest.importorskip("matplotlib.style")


def heatmaps(figure):
    return [axes for axes in figure.axes if axes.images]


def test_each_measure_gets_a_panel_with_the_numbers(made):
    comparison = made.comparison(made.holed(), made.distance())
    panels = heatmaps(comparison.plot())
    for axes, table in zip(panels, comparison.tables.values(), strict=True):
        assert np.array_equal(axes.images[0].get_array().filled(np.nan), table.values, equal_nan=True)
    assert [label.get_text() for label in panels[0].get_xticklabels()] == ["conv1", "conv2", "head"]


def test_some_measures_are_drawn_in_the_order_of_their_names(made):
    comparison = made.comparison(made.holed(), made.distance(), made.table("nbs"))
    ids = list(comparison.measures)
    for wanted in ([ids[2], ids[0]], [ids[1]]):
        panels = heatmaps(plot(Comparisons([comparison]), wanted))
        for axes, id in zip(panels, wanted, strict=True):
            assert np.array_equal(axes.images[0].get_array().filled(np.nan), comparison[id].values, equal_nan=True)
    assert len(heatmaps(comparison.plot(measures=ids[1]))) == len(heatmaps(plot(comparison, measures=ids[1]))) == 1


def test_close_is_bright_whatever_the_direction(made):
    similar, distant = heatmaps(plot(made.comparison()))
    assert similar.images[0].cmap(1.0) == distant.images[0].cmap(0.0)


def test_the_bar_names_the_measure_and_its_direction(made):
    figure = plot(made.comparison())
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert "cka (higher is closer)" in labels
    assert "procrustes_distance\n(lower is closer)" in labels


def test_no_label_of_a_bar_reaches_beyond_its_heatmap(made):
    figure = plot(
        made.comparison(*(made.table(f"{name}(kernel=hadamard, buckets=512)") for name in ("long_name", "b")))
    )
    figure.canvas.draw()
    labels = [axes.yaxis.label for axes in figure.axes if "hadamard" in axes.get_ylabel()]
    assert len(labels) == 2
    for label, heat in zip(labels, heatmaps(figure), strict=True):
        assert label.get_window_extent().height <= heat.get_window_extent().height


def test_few_cells_show_their_values_and_frames_mark_best_matches(made):
    axes = heatmaps(plot(made.comparison(made.holed())))[0]
    written = {(round(text.get_position()[1]), round(text.get_position()[0])): text.get_text() for text in axes.texts}
    values = made.holed().values
    assert written == {(i, j): f"{values[i, j]:.2f}" for i, j in np.argwhere(np.isfinite(values)).tolist()}
    hatched = [(patch.get_x(), patch.get_y()) for patch in axes.patches if patch.get_hatch()]
    assert hatched == [(1.5, 0.5)]
    frames = {(round(p.get_y() + 0.44), round(p.get_x() + 0.44)) for p in axes.patches if not p.get_hatch()}
    assert frames == {(0, 0), (1, 1), (2, 2)}
    assert not axes.collections


def test_the_best_matches_of_many_layers_are_dots(made):
    axes = heatmaps(plot(made.large(), "cka"))[0]
    assert not axes.texts
    assert [[i, j] for j, i in axes.collections[0].get_offsets().tolist()] == sorted(
        [i, j] for i, j in enumerate(np.argmax(made.large().tables["cka"].values, axis=1))
    )


def test_figures_can_be_read_on_a_dark_background(made):
    light, dark = (_luminances(plot, made, style) for style in ("default", "dark_background"))
    assert max(light) < 0.55
    assert min(dark) > 0.2


def _luminances(plot, made, style):
    with styles.context(style):
        lines = plot(made.series()).axes[-1].lines
    return [
        0.2126 * r + 0.7152 * g + 0.0722 * b
        for r, g, b in (drawing.matplotlib("matplotlib.colors").to_rgb(x.get_color()) for x in lines)
    ]


def test_many_layers_have_fewer_names(made):
    assert len(heatmaps(plot(made.large(), "cka"))[0].get_xticks()) <= 32


@pytest.mark.parametrize(
    "ending, start", [(".png", b"\x89PNG"), (".svg", b"<?xml"), pytest.param(".pdf", b"%PDF", marks=pytest.mark.slow)]
)
def test_the_ending_chooses_the_kind_of_file(made, tmp_path, ending, start):
    made.comparison().plot(path=tmp_path / f"ab{ending}")
    assert (tmp_path / f"ab{ending}").read_bytes().startswith(start)


def test_the_words_of_an_svg_are_text_and_the_file_is_the_same_each_time(made, tmp_path):
    for name in ("1.svg", "2.svg"):
        plot(made.comparison(made.table(rows=("$x", "<b>y$"))), path=tmp_path / name)
    text = (tmp_path / "1.svg").read_text()
    assert ">$x</text>" in text
    assert ">&lt;b&gt;y$</text>" in text
    assert text == (tmp_path / "2.svg").read_text()


def test_one_measure_is_drawn_into_axes_of_ones_own(made):
    figure = matplotlib.figure.Figure()
    axes = figure.add_subplot()
    assert made.comparison().plot("cka", ax=axes) is figure
    assert axes.images
    with pytest.raises(
        ShapeError, match="takes one heatmap, and here are 2: cka, procrustes_distance. Name a measure."
    ):
        made.comparison().plot(ax=axes)


def test_the_summaries_of_many_are_drawn(made):
    many = Comparisons([made.comparison(a=a, b=b) for a, b in [("x", "y"), ("x", "z")]])
    assert len(heatmaps(many.plot())) == 2
    assert len(heatmaps(many.plot("cka"))) == 1
    with pytest.raises(InvalidValue, match="nothing to draw: no summary of 'nbs'."):
        many.plot("nbs")


def test_what_cannot_be_drawn_is_refused(made, tmp_path):
    with pytest.raises(InvalidValue, match="a figure ends in .png, .svg, .pdf; got 'ab.gif'."):
        plot(made.comparison(), path="ab.gif")
    with pytest.raises(InvalidValue, match="nothing to draw: this result holds no measure."):
        plot(made.comparison(tables={}))
    with pytest.raises(UnknownName, match="no measure 'ckaa' in this comparison; did you mean 'cka'"):
        plot(made.comparison(), "ckaa")
    with pytest.raises(FileError, match="cannot write '.*gone.ab.png': No such file or directory"):
        plot(made.comparison(), path=tmp_path / "gone" / "ab.png")


def test_without_matplotlib_the_extra_is_named(made, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(drawing, "import_module", missing)
    with pytest.raises(
        MissingExtra, match="needs the package 'matplotlib'; install it with `pip install 'netkin.figures"
    ):
        plot(made.comparison())


def test_values_all_alike_and_a_single_layer_are_drawn(made):
    alike = made.table(rows=("only",), values=[[3.0]], bounds=(0, np.inf))
    figure = plot(made.comparison(alike))
    figure.canvas.draw()
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["only"]


def test_matplotlibs_global_state_is_left_alone(made):
    before = dict(matplotlib.rcParams)
    plot(made.comparison())
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not importlib.import_module("matplotlib.pyplot").get_fignums()


def test_a_caption_says_what_is_shown_and_names_of_models_are_written_once(made):
    figure = plot(made.comparison(*(made.holed(id) for id in ("cka", "nbs", "svcca", "pwcca"))))
    assert " ".join(figure.get_supxlabel().split()) == (
        "Layers of seed0 (rows) and of seed1 (columns), on digits, 1,797 examples. Marked: each row's best match. "
        "Hatched: no value."
    )
    panels = heatmaps(figure)
    assert [(axes.get_ylabel(), axes.get_xlabel()) for axes in panels] == [
        ("seed0", ""), ("", ""), ("seed0", "seed1"), ("", "seed1"),
    ]  # fmt: skip
    written = [[label.get_text() for label in axes.get_yticklabels()] for axes in panels]
    assert [any(labels) for labels in written] == [True, False, True, False]
    assert plot(made.comparison(), caption=False).get_supxlabel() == ""
    axes = matplotlib.figure.Figure().add_subplot()
    assert plot(made.comparison(), "cka", ax=axes).get_supxlabel() == ""


def test_every_kind_of_result_has_a_caption(made):
    assert "run: svcca of the layers at each step" in " ".join(plot(made.series()).get_supxlabel().split())
    assert (
        plot(made.sweep()).get_supxlabel().strip().startswith("Stitches of seed0 into seed1, layer by layer, on digits")
    )
    assert "Hatched" not in plot(made.sweep()).get_supxlabel()


# --- the way between two stitches ------------------------------------------------------------------------------------

WEIGHTS, LOSSES = (0.0, 0.5, 1.0), (0.2, 0.9, 0.4)


def barrier(accuracies=()):
    return Barrier(WEIGHTS, LOSSES, accuracies, accuracies, examples=1200)


def ends(ax):
    return [[line.get_ydata()[0], line.get_ydata()[-1], len(line.get_ydata())] for line in ax.lines]


def test_the_losses_stand_beside_the_straight_line_between_the_ends():
    (ax,) = barrier().plot().axes
    assert ends(ax) == [[0.2, 0.4, 2], [0.2, 0.4, 3]]
    assert list(ax.lines[1].get_ydata()) == list(LOSSES)
    assert ax.get_title() == "barrier 0.6000, 1,200 examples"
    assert ax.get_ylabel() == "cross-entropy"


def test_accuracies_have_a_scale_of_their_own():
    _, ax = barrier((0.9, 0.1, 0.8)).plot().axes
    assert ax.get_ylabel() == "relative accuracy"
    assert list(ax.lines[0].get_ydata()) == [0.9, 0.1, 0.8]


def test_it_is_drawn_into_axes_or_a_file(tmp_path):
    ax = drawing.empty_figure(2, 2).add_subplot()
    assert barrier().plot(ax=ax) is ax.figure
    barrier().plot(tmp_path / "way.svg")
    assert (tmp_path / "way.svg").read_text().startswith("<?xml")
    with pytest.raises(InvalidValue, match="a figure ends in .png, .svg, .pdf"):
        barrier().plot(tmp_path / "way.gif")
