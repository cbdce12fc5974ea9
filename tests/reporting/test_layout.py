"""Where things stand on the page, what is folded and left out, and how it is printed."""

import re
import zlib

import numpy as np
import pytest

from netkin.reporting.grids import grids_of
from netkin.reporting.page import page
from netkin.results import Comparisons, Ranking
from table_worlds import as_caveats, table_of

RECTANGLE = (
    "one => { const {left, right, top, bottom} = one.getBoundingClientRect(); return {left, right, top, bottom} }"
)


def pair_blocks(page, selector):
    return [one.evaluate(RECTANGLE) for one in page.locator(selector).all()]


def shades(page):
    return [int(kind[1:]) for kind in page.evaluate(
        "[...document.querySelectorAll('tbody td[class^=c]')].map(cell => cell.className.split(' ')[0])")]  # fmt: skip


def test_what_is_said_alike_of_several_layers_is_said_once_and_folded(made):
    rows = tuple(f"layer{k}" for k in range(14))
    values, holes = made.table(rows=rows).values.copy(), {}
    for k in range(2, 13):
        values[k], holes = np.nan, holes | {(rows[k], b): f"layer 'b/{rows[k]}' is constant (width {k})" for b in rows}
    values[0, 0], holes["layer0", "layer0"] = np.nan, "too few examples"
    text = page(made.comparison(made.table(rows=rows, values=values, missing=holes)))
    folded = re.search(r'<details class="reasons"><summary>(.*?)</summary>(.*?)</details>', text)
    assert folded[1].endswith("No value for 155 pairs, for 2 reasons")
    assert re.findall("<li>(.*?)</li>", folded[2])[0].startswith(
        "11 layers: constant (154 pairs): b/layer2, b/layer3, "
    )


def test_one_long_reason_is_folded_under_its_first_words(made):
    values, holes = made.table().values.copy(), {}
    for a in ("conv1", "conv2"):
        values[:, ("conv1", "conv2").index(a)] = np.nan
        holes |= {
            (b, a): f"layer 'b/{a}' is constant over the data; {'pass other examples. ' * 9}"
            for b in made.table().layers_a
        }
    text = page(made.comparison(made.table(values=values, missing=holes)))
    summary, rest = re.search(r'<details class="reasons"><summary>(.*?)</summary>(.*?)</details>', text).groups()
    assert summary.endswith("No value for 6 pairs: 2 layers: constant over the data")
    assert "pass other examples" in rest
    assert "b/conv1, b/conv2" in rest


def test_columns_without_any_value_are_left_out_and_named(made):
    values, holes = made.table().values.copy(), {(a, "conv2"): "it is constant" for a in ("conv1", "conv2", "head")}
    values[:, 1] = np.nan
    text = page(made.comparison(made.table(values=values, missing=holes)))
    table = re.search(r'<table role="grid".*?</table>', text)[0]
    assert re.findall(r'<th scope="col"><span><bdi>(\w+)', table) == ["conv1", "head"]
    assert table.partition("<tbody>")[2].count("<td class=") == 6
    assert "Not shown, without any value: 1 column (conv2)." in text
    assert 'data-columns="0 2"' in text


def test_best_matches_are_joined_only_where_no_number_lies_between(made):
    gaps = r'<path d="([^"]*)" class="gaps over"'
    (near,) = re.findall(gaps, page(made.comparison(made.table())))
    assert near.count("M") == 2
    values = np.eye(3)[[2, 0, 1]]
    assert re.findall(gaps, page(made.comparison(made.table(values=values)))) == ["M0.92 1.92L1.08 2.08"]


def test_a_page_of_classes_is_named_by_its_model_and_marks_no_best_match(made):
    table = made.table(rows=("0", "1", "2"), columns=("cat", "dog"), axes=("layer", "class"))
    text = page(made.comparison(table, a="netkin:digits@s0.pt", b="classes", provenance={"model a": "ConvNet"}))
    whole = "netkin:digits@s0.pt and classes"
    assert f'<h1 title="{whole}">netkin:digits@s0.pt: which layers follow which classes</h1>' in text
    unnamed = page(made.comparison(table, a="layers", b="classes", provenance={"model a": "ConvNet"}))
    assert '<h1 title="layers and classes">Which layers follow which classes</h1>' in unnamed
    assert " best>" not in text
    assert 'class="c' in text or "class=c" in text


def test_settings_at_their_defaults_are_folded(made):
    text = page(made.comparison(seed=0, provenance={"resize": "average", "pairs": "all", "torch": "2.13"}))
    shown, _, folded = text.partition("Where these numbers come from")[2].partition("settings at their defaults")
    for word in ("resize", "data", "examples"):
        assert f'<th scope="row">{word}</th>' in shown
    for word in ("seed", "pairs", "torch", "complete"):
        assert f'<th scope="row">{word}</th>' in folded
        assert f'<th scope="row">{word}</th>' not in shown


def test_colours_span_the_bounds_and_can_be_fitted_to_the_page(opened, made):
    tables = [made.table("cka", values=0.4 + 0.05 * np.arange(9.0).reshape(3, 3)), made.table("nbs")]
    page = opened(made.comparison(*tables))
    before = shades(page)
    assert before[:9] == [round(255 * value) for value in tables[0].values.ravel()]
    page.locator("#fit").check()
    fitted = shades(page)
    assert fitted[:9] == [round(255 * k / 8) for k in range(9)]
    assert (min(fitted[9:]), max(fitted[9:])) == (0, 255)
    legend = page.locator("figure[data-measure=cka] .legend > span")
    assert [legend.nth(k).text_content() for k in (0, 2)] == ["0.4 far", "close 0.8"]
    page.locator("#fit").uncheck()
    assert shades(page) == before
    assert legend.nth(0).text_content() == "0 far"


def test_the_run_at_a_glance_is_fitted_with_its_heatmap(opened, made):
    page = opened(made.series())
    first = page.locator(".panes img").first
    before = first.get_attribute("src")
    page.locator("#fit").check()
    assert first.get_attribute("src") != before
    least, most = min(shades(page)), max(shades(page))
    page.locator(".panes button").last.click()
    assert max(shades(page)) == 255
    assert least == 0 < most < 255


def test_the_row_and_the_column_that_are_pointed_at_are_marked(opened, made):
    page = opened(made.comparison())
    cell = page.locator("tbody tr").nth(1).locator("td").nth(2)
    cell.hover()
    assert page.locator("th.on").all_text_contents() == ["head", "conv2"]
    row, column = pair_blocks(page, ".band")
    (own,) = [cell.evaluate(RECTANGLE)]
    assert abs(row["top"] - own["top"]) <= 1
    assert abs(column["left"] - own["left"]) <= 1
    page.mouse.move(5, 5)
    assert page.locator(".band").count() == page.locator("th.on").count() == 0


def test_names_of_columns_stay_below_the_controls_while_the_page_scrolls(opened, made):
    page = opened(made.comparison(made.large(40)["cka"]))
    page.locator("tbody tr").nth(30).scroll_into_view_if_needed()
    page.mouse.wheel(0, 250)
    page.wait_for_timeout(150)
    (bar,), head = pair_blocks(page, ".toolbar"), pair_blocks(page, "thead th")[0]
    assert bar["top"] == 0
    assert head["top"] == pytest.approx(bar["bottom"], abs=1)


@pytest.mark.parametrize("kind", ["comparison", "series", "sweep"])
def test_on_a_phone_the_first_picture_is_on_the_first_screen(opened, made, kind):
    caveats = as_caveats("fewer examples than features: values are inflated; 3,000 examples would do") * 3
    page = opened(getattr(made, kind)(caveats=caveats), width=390)
    page.set_viewport_size({"width": 390, "height": 844})
    picture = pair_blocks(page, "main table.heat, main .field, main .panes img")[0]
    assert picture["top"] < 600
    page.get_by_text("Before you read the numbers (").click()
    assert page.get_by_text("3,000 examples would do").first.is_visible()
    assert not page.locator("#zoom").is_visible()
    page.get_by_role("button", name="View and save").click()
    assert page.locator("#zoom").is_visible()


def test_four_cards_stand_two_by_two_on_a_wide_screen_with_words_beside_pictures(opened, made):
    page = opened(made.comparison(*(made.table(id) for id in ("cka", "nbs", "svcca", "pwcca"))), width=1600)
    cards = pair_blocks(page, ".cards > .card")
    assert [len({round(card[side]) for card in cards}) for side in ("left", "top")] == [2, 2]
    assert cards[1]["right"] - cards[0]["left"] > 1500
    picture, beside = pair_blocks(page, ".picture")[0], pair_blocks(page, ".beside")[0]
    assert beside["left"] >= picture["right"]
    assert abs(beside["top"] - picture["top"]) < 10


def test_one_heatmap_has_its_profile_beside_it_on_a_wide_screen(opened, made):
    page = opened(made.comparison(made.table()), width=1440)
    heatmap, profile = (pair_blocks(page, f".halves > section:nth-child({k}) .card")[0] for k in (1, 2))
    assert profile["left"] > heatmap["right"]
    assert (profile["top"], profile["bottom"]) == pytest.approx((heatmap["top"], heatmap["bottom"]), abs=1)


def test_three_small_cards_stand_in_one_row_on_a_wide_screen(opened, made):
    page = opened(made.comparison(*(made.table(id) for id in ("cka", "nbs", "svcca"))), width=1440)
    cards = pair_blocks(page, ".cards > .card")
    assert [len({round(card[side]) for card in cards}) for side in ("left", "top")] == [3, 1]


@pytest.mark.parametrize("width", [390, 1440])
def test_names_below_the_chart_of_many_layers_do_not_overlap(opened, made, width):
    page = opened(made.large(), width=width)
    names = page.locator(".profile .field").first.locator(".tick.across").filter(visible=True)
    anchors = [one["right"] for one in names.evaluate_all(f"all => all.map({RECTANGLE})")]
    assert len(anchors) > 5
    assert np.diff(anchors).min() > 12 / np.sin(np.radians(38)) - 1  # slanted lines of 12 pixels


def printed_pages(pdf):
    """Return how many pieces of text each page of a document of Chromium's has."""
    objects = {int(n): body for n, body in re.findall(rb"\n(\d+) 0 obj(.*?)endobj", pdf, re.DOTALL)}
    found = []
    for body in objects.values():
        if re.search(rb"/Type\s*/Page\b(?!s)", body):
            content = objects[int(re.search(rb"/Contents (\d+) 0 R", body)[1])]
            stream = re.search(rb"stream\r?\n(.*?)endstream", content, re.DOTALL)[1]
            found.append(len(re.findall(rb"T[jJ]", zlib.decompress(stream))))
    return found


def test_a_printed_page_begins_with_the_first_picture_and_none_is_blank(opened, made):
    tables = [made.jackknifed(id=id) for id in ("cka", "nbs", "svcca", "pwcca")]
    pages = printed_pages(opened(made.comparison(*tables)).pdf(format="A4"))
    cells = sum(len(line) for line in grids_of(made.comparison(tables[0]))[0].texts)
    assert pages[0] > 40 + cells
    assert min(pages) > 0
    assert len(pages) <= 6


def test_pictures_are_saved_under_names_that_can_be_read(opened, made):
    page = opened(made.comparison(a="runs/wide/seed0/final.pt", b="runs/wide/seed1/final.pt"))
    with page.expect_download() as found:
        page.locator("button[data-save=svg]").first.click()
    assert found.value.suggested_filename == "cka of seed0 and seed1.svg"
    page = opened([made.comparison(a=a, b=b) for a, b in ("xy", "xz", "yz")])
    with page.expect_download() as found:
        page.locator("button[data-save=svg]").first.click()
    assert found.value.suggested_filename == "cka models by models.svg"
    assert "cka: models by models" in found.value.path().read_text()


def overlaps(boxes):
    """Return the pairs of boxes that lie on one another."""
    return [
        (one, other)
        for k, one in enumerate(boxes)
        for other in boxes[k + 1 :]
        if one["left"] < other["right"]
        and other["left"] < one["right"]
        and one["top"] < other["bottom"]
        and other["top"] < one["bottom"]
    ]


@pytest.mark.parametrize("width", [390, 1000, 1440])
def test_numbers_below_small_rankings_do_not_overlap(opened, width):
    scores = {"knn": 1.0, "logme": -2.0, "leep": -3.0, "nleep": 0.02, "hscore": 30.0, "lda": 1500.0}
    shared = {"layers_a": ("digits",), "layers_b": ("resnet50", "vgg"), "bounds": (-np.inf, np.inf), "kind": "score"}
    shared |= {"parameters": {}, "higher_is_closer": True, "symmetric": False, "axes": ("data", "model")}
    shared |= {"convention": "counts", "statistic": "Evidence"}
    values = np.array([[0.4, 0.8]])
    tables = {name: table_of(id=name, name=name, values=scale * values, **shared) for name, scale in scores.items()}
    facts = {"data": "digits", "examples": 54, "classes": 3, "parameters": {}, "version": "0.1.0"}
    page = opened(Ranking(score="knn", tables=tables, costs=dict.fromkeys(scores, 1.0), **facts), width=width)
    for card in page.locator(".dotted").all():
        ticks = [one.evaluate(RECTANGLE) for one in card.locator(".ticks span").all()]
        track = card.locator(".track").first.evaluate(RECTANGLE)
        assert len(ticks) > 1
        assert not overlaps(ticks)
        assert track["right"] - track["left"] > 100


def test_bars_of_errors_lie_inside_the_profile(opened, made):
    values = np.array([[0.26, 0.29], [0.22, 0.1]])
    table = made.jackknifed(
        id="sketched_cka", rows=("x", "z"), values=values, spread=0.2, parameters={"shared_examples": 0.0}
    )
    page = opened(made.comparison(table), width=1440)
    (field,) = pair_blocks(page, ".profile .field")
    bars = pair_blocks(page, ".whisker")
    assert len(bars) == 2
    assert all(field["top"] - 1 <= bar["top"] and bar["bottom"] <= field["bottom"] + 1 for bar in bars)


@pytest.mark.parametrize("errors", [False, True])
def test_twelve_columns_are_seen_whole_in_one_of_two_cards(opened, made, errors):
    rows = tuple(f"stage{k // 4}.block{k % 4}.conv2" for k in range(12))
    make = made.jackknifed if errors else made.table
    page = opened(made.comparison(make(id="cka", rows=rows), make(id="nbs", rows=rows)), width=1440)
    boxes = page.locator(".box").all()
    assert len(boxes) == 2
    assert all(box.evaluate("box => box.scrollWidth <= box.clientWidth + 1") for box in boxes)
    assert page.locator(".hint:visible").count() == 0


@pytest.mark.parametrize("count, measures", [(3, 1), (8, 1), (8, 2)])
def test_no_card_of_the_models_has_a_large_empty_part(opened, made, count, measures):
    names = [f"model{k}" for k in range(count)]
    tables = [made.table(id) for id in ("cka", "nbs")[:measures]]
    pairs = [made.comparison(*tables, a=a, b=b) for k, a in enumerate(names) for b in names[k + 1 :]]
    page = opened(Comparisons(pairs), width=1440)
    for card in page.locator(".summary .card:visible").all():
        bottom = card.evaluate(
            "card => Math.max(...[...card.querySelectorAll('*')].map(one => one.getBoundingClientRect().bottom))"
        )
        assert card.evaluate(RECTANGLE)["bottom"] - bottom < 40


def test_means_of_eight_models_stand_in_their_cells_beside_many_layers(opened, made):
    rows = tuple(f"layer{k}" for k in range(14))
    names = [f"model{k}" for k in range(8)]
    pairs = [made.comparison(made.table(rows=rows), a=a, b=b) for k, a in enumerate(names) for b in names[k + 1 :]]
    page = opened(Comparisons(pairs), width=1440)
    colours = "cells => cells.map(cell => getComputedStyle(cell).color)"
    clear = "rgba(0, 0, 0, 0)"
    assert not page.locator("#values").is_checked()
    assert clear not in page.locator(".summary figure tbody td").evaluate_all(colours)
    assert set(page.locator("article:visible figure tbody td").evaluate_all(colours)) == {clear}


def test_a_debiased_similarity_is_coloured_from_nothing_on(made):
    near_nothing, opposed = (
        made.comparison(made.table("cka_debiased", values=np.array([[low, 0.5, 1.0]] * 3), bounds=(-1, 1)))
        for low in (-0.02, -0.6)
    )
    assert [grids_of(one)[0].scale.far for one in (near_nothing, opposed)] == [0, -1]
    assert grids_of(near_nothing)[0].scale.shade_numbers(np.array([-0.02, 0.5]))[0] == 0


def test_a_debiased_similarity_has_a_bar_of_colours_from_nothing_on(opened, made):
    page = opened(made.comparison(made.table("cka_debiased", bounds=(-1, 1))), width=1440)
    ends = page.locator("figure[data-measure=cka_debiased] .legend > span")
    assert [ends.nth(k).text_content() for k in (0, 2)] == ["0 far", "close 1"]
    assert max(shades(page)) - min(shades(page)) > 120


COLOUR = "all => all.map(one => getComputedStyle(one).color)"


@pytest.mark.parametrize("dark", [False, True])
def test_models_of_one_group_have_one_colour_in_the_tree_and_in_the_plane(opened, made, dark):
    names = [f"model{k}" for k in range(4)]
    pairs = [(a, b) for k, a in enumerate(names) for b in names[k + 1 :]]
    near = {(names[0], names[1]), (names[2], names[3])}
    values = {pair: np.eye(3) * (0.95 if pair in near else 0.1) for pair in pairs}
    page = opened([made.comparison(made.table(values=values[a, b]), a=a, b=b) for a, b in pairs], dark=dark)
    for drawing in ("Tree of the networks", "Networks in a plane"):
        named = page.locator(f"svg[aria-label='{drawing}'] g > text").filter(has_text="model")
        found = dict(zip(named.all_text_contents(), named.evaluate_all(COLOUR), strict=True))
        assert found["model0"] == found["model1"] != found["model2"] == found["model3"]


@pytest.mark.parametrize("width", [390, 1440])
def test_a_notebook_has_a_bar_of_colours_beside_each_heatmap(browser, made, width):
    page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
    page.set_content(made.comparison()._repr_html_())
    bars, tables = (page.locator(part).all() for part in ("span[style*=linear-gradient]", "table"))
    assert len(bars) == len(tables) == 2
    for bar, table in zip(bars, tables, strict=True):
        place, below = bar.evaluate(RECTANGLE), table.evaluate(RECTANGLE)
        assert place["right"] - place["left"] >= 60
        assert place["bottom"] <= below["top"]
    page.context.close()
