"""The page in a real browser: what people see, hear, press and save."""

import csv
import io
import json

import numpy as np
import pytest

from netkin.reporting.words import number
from netkin.results import Comparisons, document

TIP, READOUT = "#tip", "figure >> nth=0 >> .readout"


def cell(page, row, column, figure=0):
    return page.locator(f"figure >> nth={figure} >> tbody tr >> nth={row}").locator("td").nth(column)


def box_size(page):
    return page.evaluate("document.querySelector('tbody td').getBoundingClientRect().width")


def test_hovering_tells_the_saved_numbers(opened, made):
    comparison = made.comparison()
    page = opened(comparison)
    for figure, table in enumerate(comparison.tables.values()):
        for i, a in enumerate(table.layers_a):
            for j, b in enumerate(table.layers_b):
                cell(page, i, j, figure).hover()
                said = page.locator(TIP).text_content().partition(", best match")[0]
                assert said == f"{a} × {b}: {number(table[a, b])}"


def test_arrow_keys_tell_the_saved_numbers(opened, made):
    table = made.table(errors=np.full((3, 3), 0.0125))
    page = opened(made.comparison(table))
    cell(page, 0, 0).focus()
    for key, pair in [
        ("ArrowRight", (0, 1)), ("ArrowDown", (1, 1)), ("End", (1, 2)), ("Control+End", (2, 2)), ("ArrowDown", (2, 2)),
        ("ArrowUp", (1, 2)), ("Home", (1, 0)), ("PageUp", (0, 0)),
    ]:  # fmt: skip
        page.keyboard.press(key)
        if pair == (0, 0):  # ten rows up is the name of the column
            assert page.locator(READOUT).text_content() == "conv1, pool, 32 wide"
            continue
        names = table.layers_a[pair[0]], table.layers_b[pair[1]]
        said = page.locator(READOUT).text_content().partition(", best match")[0]
        assert said == f"{names[0]} × {names[1]}: {number(table[names])} ± 0.0125 standard error"
        assert page.locator(TIP).is_visible()
    page.keyboard.press("Escape")
    assert not page.locator(TIP).is_visible()


def test_the_readout_is_read_aloud_and_one_cell_takes_part_in_tabbing(opened, made):
    page = opened(made.comparison(made.table()))
    assert page.locator("figure [role=status][aria-live=polite] .readout").count() == 1
    cell(page, 1, 1).click()
    assert page.locator("table.heat [tabindex='0']").count() == 1
    assert page.evaluate("document.activeElement.tagName") == "TD"


def test_a_layers_name_tells_its_shape_and_best_match(opened, made):
    page = opened(made.comparison(made.table()))
    page.locator("tbody th").first.hover()
    assert page.locator(TIP).text_content() == "conv1, pool, 16 wide; best match conv1"


def test_a_hole_tells_its_reason(opened, made):
    page = opened(made.comparison(made.holed()))
    cell(page, 1, 2).hover()
    assert page.locator(TIP).text_content() == "conv2 × head: no value, layer 'head' is constant over the data"


def test_the_slider_makes_cells_larger(opened, made):
    page = opened(made.comparison(made.table()))
    before = box_size(page)
    page.locator("#zoom").fill("2")
    assert box_size(page) == pytest.approx(2 * before, abs=2)


def test_values_and_best_matches_are_switched(opened, made):
    page = opened(made.comparison(made.table()))
    colour = "getComputedStyle(document.querySelector('tbody td')).color"
    assert page.evaluate(colour) != "rgba(0, 0, 0, 0)"
    page.locator("#values").uncheck()
    assert page.evaluate(colour) == "rgba(0, 0, 0, 0)"
    assert page.locator(".path").is_visible()
    page.locator("#path").uncheck()
    assert not page.locator(".path").is_visible()


@pytest.mark.parametrize("values", [True, False])
def test_the_line_of_best_matches_lies_on_their_cells(opened, made, values):
    page = opened(made.large(20))
    page.locator("#values").set_checked(values)
    places = page.evaluate(
        """() => { const best = [...document.querySelectorAll('td.best')].map(cell => cell.getBoundingClientRect());
        const svg = document.querySelector('.path'), box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('circle')].map((dot, k) => [
          box.left + box.width * dot.getAttribute('cx') / 20 - best[k].left - best[k].width / 2,
          box.top + box.height * dot.getAttribute('cy') / 20 - best[k].top - best[k].height / 2]) }"""
    )
    assert len(places) == 20
    assert np.abs(places).max() < 1.5


def test_the_page_follows_the_readers_colour_mode_and_the_button(opened, made):
    background = "getComputedStyle(document.body).backgroundColor"
    dark, light = (opened(made.comparison(), dark=mode).evaluate(background) for mode in (True, False))
    page = opened(made.comparison(), dark=True)
    assert dark != light
    page.get_by_role("button", name="Light page").click()
    assert page.evaluate(background) == light
    page.get_by_role("button", name="Dark page").click()
    assert page.evaluate(background) == dark


@pytest.mark.parametrize("kind", ["comparison", "large", "hostile"])
def test_a_phone_needs_no_sideways_scrolling_of_the_page(opened, made, kind):
    page = opened(getattr(made, kind)(), width=390)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box = "document.querySelector('.box')"
    page.evaluate(f"{box}.scrollLeft = 200")
    left = page.evaluate(
        f"document.querySelector('tbody th').getBoundingClientRect().left - {box}.getBoundingClientRect().left"
    )
    assert left == pytest.approx(0, abs=1)


def test_names_of_columns_are_seen(opened, made):
    page = opened(made.large(12), width=390)
    gap = page.evaluate(
        """() => { const head = document.querySelectorAll('thead th')[3], own = head.getBoundingClientRect();
        const name = head.querySelector('bdi').getBoundingClientRect();
        return Math.abs(name.left + name.width / 2 - own.left - own.width / 2) }"""
    )
    assert gap < 3


def downloaded(page, selector):
    with page.expect_download() as found:
        page.locator(selector).first.click()
    return found.value


def test_the_csv_holds_the_saved_numbers(opened, made):
    comparison = made.comparison(made.holed(), made.distance(errors=np.full((3, 3), 1 / 3)), a='s"0', b="s,1")
    page = opened(comparison)
    file = downloaded(page, "button[data-save=csv]")
    rows = list(csv.DictReader(io.StringIO(file.path().read_text(encoding="utf-8"))))
    assert file.suggested_filename == "similarity of s 0 and s 1.csv"
    assert len(rows) == 18
    for row in rows:
        table, pair = comparison[row["measure"]], (row["layer_a"], row["layer_b"])
        assert row["reason"] == table.missing.get(pair, "")
        assert row["value"] == "" if pair in table.missing else float(row["value"]) == table[pair]
        assert row["error"] == "" if table.errors is None else float(row["error"]) == 1 / 3


def test_the_json_is_the_document_of_the_command_line(opened, made):
    comparison = made.comparison(made.holed(), made.distance())
    file = downloaded(opened(comparison), "button[data-save=json]")
    assert json.loads(file.path().read_text(encoding="utf-8")) == json.loads(json.dumps(document(comparison)))


def test_standard_errors_and_replicates_are_in_the_json(opened, made):
    comparison = made.comparison(made.jackknifed())
    file = downloaded(opened(comparison), "button[data-save=json]")
    assert json.loads(file.path().read_text(encoding="utf-8")) == json.loads(json.dumps(document(comparison)))


def test_no_cell_of_the_csv_is_a_formula(opened, made):
    names = ("=1+1", "@sum(a1)", "+cmd|' /C calc'!A0", "-2", "\tx", "plain")
    values = np.full((6, 6), -0.25)
    comparison = made.comparison(made.table(rows=names, columns=names, values=values, bounds=(-1, 1)))
    file = downloaded(opened(comparison), "button[data-save=csv]")
    rows = list(csv.DictReader(io.StringIO(file.path().read_text(encoding="utf-8"))))
    assert [row["layer_b"] for row in rows[:6]] == [*(f"'{name}" for name in names[:5]), "plain"]
    assert {row["value"] for row in rows} == {"-0.25"}


def test_pictures_are_saved(opened, made):
    page = opened(made.comparison(made.holed()))
    drawing = downloaded(page, "button[data-save=svg]").path().read_text(encoding="utf-8")
    assert drawing.startswith("<svg")
    assert ">conv2</text>" in drawing
    assert drawing.count("url(#hatch)") == 1
    assert downloaded(page, "button[data-save=png]").path().read_bytes().startswith(b"\x89PNG")


def test_hostile_names_stay_text_in_the_browser(opened, made):
    page = opened(made.hostile())
    cell(page, 0, 0).hover()
    assert page.locator(TIP).text_content().startswith(f"{made.NAME} × {made.NAME}: 0.9091")
    cell(page, 0, 1).click()
    assert made.NAME in page.locator(READOUT).text_content()
    assert page.locator("img").count() == 0
    assert made.NAME.replace("<", "&lt;") in downloaded(page, "button[data-save=svg]").path().read_text().replace(
        "&gt;", ">"
    )


def test_points_of_the_profile_tell_their_values(opened, made):
    found = made.comparison(made.table(), made.table("nbs"))
    page = opened(found)
    field = page.locator(".field")
    field.scroll_into_view_if_needed()
    box = field.bounding_box()
    value = found["cka"]["conv2", "conv2"]
    page.mouse.move(box["x"] + box["width"] / 2 + 5, box["y"] + (1 - value) * box["height"] + 4)
    told = [f"{measure}, layer conv2: {number(value)}" for measure in ("cka", "nbs")]  # both lie on one spot here
    assert page.locator(TIP).text_content() == "\n".join(told)
    page.locator(".spot").focus()
    for key, said in [
        ("Home", "cka, layer conv1: "),
        ("ArrowRight", "cka, layer conv2: "),
        ("ArrowDown", "nbs, layer conv2"),
    ]:
        page.keyboard.press(key)
        assert page.locator(TIP).text_content().startswith(said)


def test_a_frame_drawn_with_the_mouse_is_shown_larger_and_the_whole_comes_back(opened, made):
    page = opened(made.comparison(made.table(rows=tuple(f"layer{k}" for k in range(10)))))
    field = page.locator(".field")
    field.scroll_into_view_if_needed()
    box = field.bounding_box()
    x, y = box["x"] + box["width"] * 0.4, box["y"] + 20
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + box["width"] * 0.3, y + 4, steps=4)
    page.mouse.up()
    view = [float(part) for part in page.locator(".field > svg").get_attribute("viewBox").split()]
    assert view == [pytest.approx(400, abs=3), 0, pytest.approx(300, abs=3), 1000]
    assert page.locator(".tick:visible", has_text="layer").all_text_contents() == ["layer4", "layer5", "layer6"]
    page.mouse.move(x, y + 30)
    assert page.locator(TIP).text_content().partition(":")[0] in ("cka, layer layer4", "cka, layer layer5")
    page.get_by_role("button", name="Whole chart").click()
    assert page.locator(".field > svg").get_attribute("viewBox") == "0 0 1000 1000"
    assert page.locator(".tick:visible", has_text="layer").count() == 10
    page.locator(".spot").focus()
    page.keyboard.press("+")
    assert float(page.locator(".field > svg").get_attribute("viewBox").split()[2]) == 500
    page.keyboard.press("Escape")
    assert page.locator(".field > svg").get_attribute("viewBox") == "0 0 1000 1000"


def test_a_list_tells_its_numbers_and_saves_those_that_were_asked_for(opened, made):
    sweep = made.comparison(made.diagonal(), made.stitched([0.9, np.nan, 0.8]))
    page = opened(sweep)
    assert page.locator("table.heat td.hole").count() == 1
    cell(page, 0, 0, figure=2).hover()  # after two charts
    assert page.locator(TIP).text_content() == "conv1, relative_accuracy(method=least_squares): 0.9000"
    cell(page, 1, 0, figure=2).hover()
    assert page.locator(TIP).text_content().endswith("no value, conv2 can't be joined")
    assert not page.locator("#path").is_visible()
    file = downloaded(page, "button[data-save=csv]").path().read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(file)))
    assert [(row["layer_a"], row["value"]) for row in rows[3:]] == [("conv1", "0.9"), ("conv2", ""), ("head", "0.8")]
    drawing = downloaded(page, "figure >> nth=2 >> button[data-save=svg]").path().read_text(encoding="utf-8")
    assert all(f">{word}</text>" in drawing for word in ("0 poor", "good 1", "least_squares", "head"))


def test_what_is_larger_than_its_place_says_so(opened, made):
    for width, state in ((1280, "hidden"), (360, "visible")):
        page = opened(made.large(30), width=width)
        hint = page.locator(".hint:has(+ .box)").first
        hint.wait_for(state=state)
        assert hint.is_visible() == (state == "visible")


def test_a_picture_of_the_whole_page_has_all_heatmaps(opened, made):
    page = opened(made.large())
    page.locator(":root.drawn").wait_for(state="attached")
    skipped = "table => !table.checkVisibility({ contentVisibilityAuto: true })"
    assert not any(table.evaluate(skipped) for table in page.locator("table.heat").all())
    boxes = "[...document.querySelectorAll('.box')].every(box => box.scrollHeight <= box.clientHeight + 1)"
    assert page.evaluate(boxes)


def test_measures_are_chosen_among_many(opened, made):
    page = opened(made.comparison(*map(made.table, ["cka", "nbs", "svcca", "pwcca", "cca_mean"])))
    shown = page.locator("figure[data-measure]:visible")
    assert shown.count() == 4
    page.locator(".choice input[value=cca_mean]").check()
    page.locator(".choice input[value=cka]").uncheck()
    assert page.locator("figure:visible h3").all_text_contents() == ["nbs", "svcca", "pwcca", "cca_mean"]


def test_comparisons_are_chosen_from_the_list_and_from_the_summary(opened, made):
    many = Comparisons([made.comparison(a=a, b=b) for a, b in [("x", "y"), ("x", "z"), ("y", "z")]])
    page = opened(many)
    visible = page.locator("article:visible h2 >> nth=0")
    assert visible.text_content() == "x and y"
    page.locator("#chooser").select_option("1")
    assert visible.text_content() == "x and z"
    cell(page, 1, 2).click()
    assert visible.text_content() == "y and z"
    for key in ("ArrowUp", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    assert visible.text_content() == "x and y"
    assert downloaded(page, "button[data-save=csv]").suggested_filename == "similarity of x and y.csv"


def test_the_printed_page_shows_all_measures_and_no_controls(opened, made):
    page = opened(made.comparison(*map(made.table, ["cka", "nbs", "svcca", "pwcca", "cca_mean"])), dark=True)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("figure[data-measure]:visible").count() == 5
    assert page.locator(".controls:visible").count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")


def test_text_has_enough_contrast(opened, made):
    lightness = """(pair) => { const probe = document.createElement('span'); document.body.append(probe);
        return pair.map(name => { probe.style.color = `var(${name})`;
        const rgb = getComputedStyle(probe).color.match(/\\d+/g);
        const linear = rgb.slice(0, 3).map(v => v / 255)
            .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2] }) }"""
    texts = ["--ink", "--soft", "--accent", *(f"--k{k}" for k in range(8))]
    for dark in (False, True):
        page = opened(made.comparison(), dark=dark)
        for pair in [(t, b) for t in texts for b in ("--card", "--page")] + [
            ("--warn", "--warn-back"),
            ("--tip", "--tip-ink"),
        ]:
            low, high = sorted(page.evaluate(lightness, list(pair)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (pair, dark)


def test_a_large_page_opens_whole(opened, made):
    page = opened(made.large())
    page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    assert page.locator("td").count() > 14_400
