"""The page, the figure and the notebook's view of a ranking."""

import re
from dataclasses import replace

import numpy as np
import pytest

from netkin.errors import InvalidValue
from netkin.reporting import notebook_view, plot, report
from netkin.reporting.page import page
from result_worlds import ranking

HOSTILE = "</script><img src=x onerror=alert(1)>"


def words(text):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(style|script).*?</\1>", "", text)))


def test_the_page_says_what_the_ranking_says(tmp_path):
    ranked = ranking()
    text = words(page(ranked))
    for said in ("3 models for digits", "54 examples", "3 classes", "mind this", "comes first by knn", "knn counts",
                 "jackknife over 6 chunks of examples", "64 wide", "12ab", "Standard errors are those of the examples",
                 "1 forward pass of each model"):  # fmt: skip
        assert said in text
    rows = re.findall(r'<th scope="row">(\d)\. <bdi>(\w)</bdi></th><td>([^<]*)</td><td>([^<]*)</td>', page(ranked))
    assert [row[:2] for row in rows] == [("1", "c"), ("2", "b"), ("3", "a")]
    assert [row[2] for row in rows] == [cells[0] for cells in ranked.cells()]
    assert report(ranked, tmp_path / "r.html").exists()
    with pytest.raises(InvalidValue, match="a ranking has a page of its own; got 2 results"):
        page([ranked, ranked])


def test_page_and_notebook_say_how_reliable_scores_are_and_whether_they_agree():
    ranked = ranking(reliability={"knn": (0.59, 0.07)})
    for text in (words(page(ranked)), words(notebook_view(ranked))):
        assert "Scores disagree: by logme &#x27;a&#x27; comes first" in text.replace("&#39;", "&#x27;")
        assert "0.59 ± 0.07 by knn" in text
    assert "τ with fine-tuning 0.59 ± 0.07" in words(page(ranked))
    assert "τ with fine-tuning" not in words(page(ranking()))


def test_the_page_holds_the_whole_ranking(saved_by):
    ranked = ranking(reliability={"knn": (0.59, 0.07)})
    assert saved_by(page(ranked), ranked)


def test_dots_stand_where_the_values_lie_and_bars_reach_as_far_as_intervals():
    ranked = ranking()
    first = re.search(r"(?s)<h3>knn</h3>.*?</figure>", page(ranked))[0]
    ticks = {float(t): float(x) for x, t in re.findall(r'<span style="left:([\d.]+)%">([\d.]+)</span>', first)}
    (low, a), (high, b) = min(ticks.items()), max(ticks.items())
    places = [float(x) for x in re.findall(r'class="dot" style="left:([\d.]+)%"', first)]
    bars = [
        tuple(map(float, bar)) for bar in re.findall(r'class="interval" style="left:([\d.]+)%;width:([\d.]+)%', first)
    ]
    table = ranked.table()
    for model, x, (left, width) in zip(ranked.models, places, bars, strict=True):
        k = table.layers_b.index(model)
        wanted = [a + (value - low) / (high - low) * (b - a) for value in
                  (table.values[0, k], *(end[0, k] for end in table.interval()))]  # fmt: skip
        assert [x, left, left + width] == pytest.approx(wanted, abs=0.02)


def test_numbers_beside_dots_have_the_digits_of_the_table_and_names_are_whole():
    names = tuple(f"a network with a rather long name, number {k}" for k in range(3))
    ranked = ranking(names)
    first = re.search(r"(?s)<h3>knn</h3>.*?</figure>", page(ranked))[0]
    assert re.findall(r'class="value"[^>]*>([^<]*)<', first) == [cells[0] for cells in ranked.cells()]
    assert re.findall(r'class="model"[^>]*><bdi>([^<]*)', first) == list(ranked.models)


def test_holes_missing_errors_and_hostile_names_are_shown():
    names = (HOSTILE, "b", "c")
    text = page(ranking(names, errors=False))
    assert HOSTILE not in text
    assert "not asked for" in words(text)
    values, holes = np.array([[np.nan] * 3]), {("digits", name): "it crashed" for name in names}
    ranked = ranking(names, errors=False)
    empty = replace(ranked.table(), values=values, missing=holes)
    bare = ranking(names, errors=False, tables={"knn": empty, "logme": ranked.table("logme")})
    assert "It has no value for any model." in words(page(bare))
    assert "has no value by knn: it crashed" in words(page(bare))


def test_a_figure_has_a_panel_for_each_score(tmp_path):
    ranked = ranking()
    figure = ranked.plot(path=tmp_path / "r.svg")
    assert [ax.get_xlabel() for ax in figure.axes] == ["knn (higher is better)", "logme (higher is better)"]
    (line,) = figure.axes[1].lines[:1]
    assert sorted(line.get_xdata()) == pytest.approx(sorted(ranked.table("logme").values[0]))
    alone = plot(ranked, "logme")
    assert len(alone.axes) == 1
    ax = alone.axes[0]
    assert ranked.plot(ax=ax) is alone
    assert "comes first by knn" in words(notebook_view(ranked))
    assert ranked._repr_html_() == notebook_view(ranked)


@pytest.mark.parametrize("width", [390, 1440])
def test_the_numbers_of_the_axis_stand_below_the_dots(opened, width):
    page = opened(ranking(tuple(f"a network with a rather long name, number {k}" for k in range(3))), width=width)
    ends = "all => all.map(one => [one.getBoundingClientRect().left, one.getBoundingClientRect().right])"
    card = page.locator("figure").first
    (ticks,), tracks = (card.locator(part).evaluate_all(ends) for part in (".ticks", ".track"))
    assert len(tracks) == 3
    assert all(track == pytest.approx(ticks, abs=1) for track in tracks)
