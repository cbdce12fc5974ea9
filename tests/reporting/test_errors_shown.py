"""Standard errors on the page, in figures and in notebooks."""

import csv
import io
import re

import numpy as np
import pytest

from netkin.reporting import plot
from netkin.reporting.page import page
from netkin.reporting.words import number
from netkin.results.text import values_and_errors
from refusals import refusals

RANKS = "ranks are not smooth"


def cells_of(text):
    """Return value and error of all cells of all heatmaps, in order."""
    return re.findall(r"<td class=[^>]+>([^<]+)(?:<i>([^<]+)</i>)?", text)


def test_cells_show_their_errors(made):
    table = made.jackknifed()
    texts, tails = values_and_errors(table.values, table.errors)
    expected = [(text, tail) for row in zip(texts, tails, strict=True) for text, tail in zip(*row, strict=True)]
    assert cells_of(page(made.comparison(table))) == expected
    assert all(tail.startswith("±0.0") for _, tail in expected)


def test_a_list_shows_its_errors(made):
    table = made.jackknifed(made.diagonal)
    shown = cells_of(page(made.comparison(table)))
    assert shown == [(f"{table.values[i, i]:.2f}", f"±{table.errors[i, i]:.2f}") for i in range(3)]


def test_tables_in_one_list_say_whose_errors_they_tell(made):
    ids = [f"svcca(variance={share})" for share in (0.9, 0.95)]
    text = page(made.comparison(*(made.jackknifed(made.diagonal, id=id) for id in ids)))
    assert all(f"Standard errors of {id}: median" in text for id in ids)


def test_cells_without_room_leave_errors_to_the_line_below(made):
    rows = tuple(f"block{i}" for i in range(31))
    table = made.jackknifed(rows=rows)
    text = page(made.comparison(table))
    assert "<i>" not in text
    told = f"Standard errors: median {np.median(table.errors):.2g}, largest {table.errors.max():.2g}, by the jackknife"
    assert told in text
    assert "<i>" in page(made.comparison(made.jackknifed(rows=rows[:30])))


def test_values_without_an_error_say_why(made):
    pairs = {(a, b): RANKS for a in ("conv1", "conv2", "head") for b in ("conv1", "conv2", "head")}
    text = page(made.comparison(made.table("rsa", error_reasons=pairs)))
    assert f"No standard error: {RANKS} (9 pairs)." in text
    assert text.partition("<script")[0].count(RANKS) == 2  # below the heatmap, and among the conventions


def test_more_bias_than_error_is_said_with_the_measure_without_it(made):
    text = page(made.comparison(made.jackknifed(shift=0.05, debiased_as="cka_debiased")))
    note = re.search(r'class="bias"><strong>Bias. </strong>([^<]+)', text)[1]
    assert note.startswith("For 9 of 9 pairs the jackknife finds a bias larger than the standard error, up to ")
    assert note.endswith("; cka_debiased corrects for it.")
    assert 'class="bias"' not in page(made.comparison(made.jackknifed()))


def test_best_matches_come_with_their_margins(made):
    table = made.jackknifed(spread=0.2)
    text = page(made.comparison(table))
    matches = table.best_matches()
    assert {match.clear for match in matches.values()} == {True, False}
    for match in matches.values():
        assert f"<td>{number(match.margin)} ± {number(match.margin_error)}</td>" in text
    unclear = sum(not match.clear for match in matches.values())
    assert f"Best matches: {unclear} of 3 {'is' if unclear == 1 else 'are'} not clearly better" in text
    assert "how far the second is behind" not in page(made.comparison(made.table()))


def test_the_headline_has_the_error_of_its_value(made):
    table = made.jackknifed()
    best = max(table.best_matches().values(), key=lambda match: match.value)
    assert f"at {best.value:.2f} ± {best.error:.1g};" in page(made.comparison(table))


@pytest.mark.parametrize("make", ["table", "distance"])
def test_the_profile_has_bars_to_the_ends_of_the_intervals(made, make):
    table = made.jackknifed(getattr(made, make))
    text = page(made.comparison(table))
    (chart,) = made.charts_in(text)
    size = table.bounds[1]
    for k, (_, *ends) in enumerate(chart["bars"]):
        shares = [end[k, k] / size for end in table.interval()]
        places = [1000 * (1 - share if table.higher_is_closer else share) for share in shares]
        assert [float(end) for end in ends] == pytest.approx(places, abs=0.6)
    assert len(chart["bars"]) == 3
    assert "Bars are 95 % intervals." in text
    assert 'class="whisker"' not in page(made.comparison(made.table()))


def test_points_of_several_measures_stand_apart_where_they_have_bars(made):
    (apart,) = made.charts_in(page(made.comparison(made.jackknifed(), made.jackknifed(id="nbs"))))
    first, second = ([float(x) for x, *_ in apart["bars"][k : k + 3]] for k in (0, 3))
    assert all(0 < b - a < 20 for a, b in zip(first, second, strict=True))
    (together,) = made.charts_in(page(made.comparison(made.table(), made.table("nbs"))))
    assert together["paths"][0] == together["paths"][1]


def test_the_page_tells_intervals_reasons_and_margins(made, opened):
    table = made.jackknifed(error_reasons={("head", "conv1"): RANKS})
    shown = opened(made.comparison(table))
    low, high = (end[0, 0] for end in table.interval())
    match = table.best_matches()["conv1"]
    cells = shown.locator("tbody tr")
    cells.nth(0).locator("td").nth(0).hover()
    assert shown.locator("#tip").text_content() == (
        f"conv1 × conv1: {number(table.values[0, 0])} ± {number(table.errors[0, 0])} standard error, "
        f"95 % interval {number(low)} to {number(high)}, best match of conv1, "
        f"ahead of conv2 by {number(match.margin)} ± {number(match.margin_error)}"
    )
    cells.nth(2).locator("td").nth(0).hover()
    assert shown.locator("#tip").text_content().endswith(f", no standard error: {RANKS}")


def test_a_list_tells_errors_too(made, opened):
    unasked = made.diagonal().missing
    table = made.jackknifed(made.diagonal)
    other = made.diagonal(id="rsa", error_reasons={(a, a): RANKS for a in table.layers_a}, missing=unasked)
    shown = opened(made.comparison(table, other))
    figures = shown.locator("figure.card")
    figures.nth(0).locator("tbody td").nth(1).hover()
    assert f"± {number(table.errors[1, 1])} standard error, 95 % interval" in shown.locator("#tip").text_content()
    figures.nth(1).locator("tbody td").nth(0).hover()
    assert shown.locator("#tip").text_content().endswith(f"no standard error: {RANKS}")


def test_the_csv_is_the_long_form(made, opened):
    table = made.jackknifed(error_reasons={("head", "conv1"): RANKS})
    comparison = made.comparison(table, made.holed())
    shown = opened(comparison)
    with shown.expect_download() as waiting:
        shown.locator("button[data-save=csv]").click()
    rows = list(csv.DictReader(io.StringIO(waiting.value.path().read_text(encoding="utf-8"))))
    frame = comparison.to_pandas()
    assert list(rows[0]) == list(frame.columns)
    for word in ("value", "error", "low", "high"):
        column = [float(row[word]) if row[word] else np.nan for row in rows]
        assert np.allclose(column, frame[word], equal_nan=True, rtol=1e-12)
    assert [row["reason"] for row in rows] == frame.reason.tolist()


def test_errors_are_seen_without_pointing(made, opened):
    shown = opened(made.comparison(made.jackknifed()))
    assert shown.locator("tbody td i").first.is_visible()
    assert shown.get_by_text("Standard errors: median").is_visible()
    shown.locator("#values").uncheck()
    assert not shown.locator("tbody td i").first.is_visible()


def test_cells_hold_their_errors_whole(made, opened):
    rows = tuple(f"block{i}" for i in range(12))
    shown = opened(made.comparison(made.jackknifed(rows=rows)))
    spills = shown.evaluate(
        """() => [...document.querySelectorAll("tbody td i")].filter((error) => {
          const range = document.createRange();
          range.selectNodeContents(error);
          const [own, cell] = [range.getBoundingClientRect(), error.parentElement.getBoundingClientRect()];
          return own.left < cell.left || own.right > cell.right || own.bottom > cell.bottom + 0.5;
        }).length"""
    )
    assert spills == 0


def test_a_notebook_shows_errors(made):
    table = made.jackknifed()
    shown = made.comparison(table)._repr_html_()
    assert f"conv1 × conv1: {number(table.values[0, 0])} ± {number(table.errors[0, 0])}" in shown
    assert f"<small>±{table.errors[0, 0]:.2f}</small>" in shown
    assert "Standard errors: median" in shown


def bars_of(axes):
    """Return middle and both ends of every bar, line by line."""
    segments = [collection.get_segments() for collection in axes.collections if hasattr(collection, "get_segments")]
    return [[sorted(float(y) for _, y in bar) for bar in line] for line in segments]


def test_a_figure_has_a_profile_with_bars(made):
    pytest.importorskip("matplotlib")
    tables = made.jackknifed(), made.jackknifed(id="nbs", seed=1)
    figure = plot(made.comparison(*tables))
    profile = figure.axes[-1]
    for line, table in zip(bars_of(profile), tables, strict=True):
        low, high = table.interval()
        assert line == [pytest.approx([low[i, i], high[i, i]]) for i in range(3)]
    assert [text.get_text() for text in profile.get_legend().get_texts()] == ["cka", "nbs"]
    assert "95 % intervals" in profile.get_ylabel()
    assert [label.get_text() for label in profile.get_xticklabels()] == ["conv1", "conv2", "head"]


def test_measures_of_several_scales_have_a_profile_each_or_share_axes_by_closeness(made):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    distance = made.jackknifed(made.distance)
    both = made.comparison(made.jackknifed(), distance)
    for axes, table in zip(plot(both).axes[-2:], both.tables.values(), strict=True):
        low, high = table.interval()
        assert bars_of(axes)[0] == [pytest.approx([low[i, i], high[i, i]]) for i in range(3)]
    profile = Figure().add_subplot()
    both.plot(ax=profile, profile=True)
    low, high = (1 - end / distance.bounds[1] for end in distance.interval())
    assert bars_of(profile)[1] == [pytest.approx(sorted([low[i, i], high[i, i]])) for i in range(3)]
    assert [label.get_text() for label in profile.get_yticklabels()] == ["far", "close"]


def test_a_profile_is_drawn_where_it_is_asked_for(made):
    pytest.importorskip("matplotlib")
    plain, jackknifed = made.comparison(made.table()), made.comparison(made.jackknifed())
    assert len(plot(plain).axes) == len(plot(jackknifed, profile=False).axes) == 2  # heatmap and bar of colours
    assert len(plot(plain, profile=True).axes) == len(jackknifed.plot().axes) == 3
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    assert jackknifed.plot("cka", ax=axes, profile=True) is axes.figure
    assert len(bars_of(axes)) == 1
    assert not axes.images


def test_what_has_no_profile_is_refused(made):
    pytest.importorskip("matplotlib")
    from netkin.errors import InvalidValue

    classes = made.comparison(made.jackknifed(axes=("layer", "class")))
    assert len(plot(classes).axes) == 2
    refusals(
        (lambda: plot(classes, profile=True), InvalidValue, "profile"),
        (lambda: plot(made.series(), profile=True), InvalidValue, "profile"),
    )
