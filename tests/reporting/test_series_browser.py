"""The page of a series in a real browser: going through time by mouse, keys, playing and address."""

import csv
import io
import json
import time

import numpy as np
import pytest

from netkin.reporting import report
from netkin.reporting.words import number
from netkin.results import document

TIP, READOUT, SHOWN = "#tip", "figure .readout", "#shown"


def cell(page, row, column):
    return page.locator(f"section.measure:visible tbody tr >> nth={row}").locator("td").nth(column)


def cells(page):
    return page.evaluate(
        "[...document.querySelector('section.measure:not([hidden]) table.heat').tBodies[0].rows]"
        ".map(row => [...row.cells].slice(1).map(cell => cell.textContent))"
    )


def told(series, step, measure="svcca"):
    """What the cells show: two decimals."""
    values = series[step][measure].values
    return [["–" if np.isnan(v) else f"{v:.2f}" for v in row] for row in values]


def wait_for(page, selector, text, seconds=8):
    """Wait until an element's text begins with `text`; the page's policy lets no one evaluate strings in it."""
    end = time.perf_counter() + seconds
    while not page.locator(selector).text_content().startswith(text):
        assert time.perf_counter() < end, page.locator(selector).text_content()
        page.wait_for_timeout(20)


def test_the_slider_goes_through_the_steps_by_keys_alone(opened, made):
    series = made.series(constant=10)
    page = opened(series)
    page.locator("#when").focus()
    keys = ("", "ArrowRight", "ArrowRight", "Home", "End")
    for key, step in zip(keys, (0, 10, 100, 0, 1000), strict=True):
        if key:
            page.keyboard.press(key)
        assert page.locator(SHOWN).text_content() == f"step {step:,} · {series.steps.index(step) + 1} of 4"
        assert cells(page) == told(series, step)
        assert page.locator(".when").text_content() == f"step {step:,}"
        assert page.locator("#when").get_attribute("aria-valuetext") == f"step {step:,}"


def test_the_best_matches_and_colours_follow_the_step(opened, made):
    series = made.series(constant=10)
    page = opened(series)
    assert page.locator(".heat td.best").count() == 3  # one row is constant, and has none
    assert page.locator(".heat td.hole").count() == 4
    page.locator("#on").click()
    assert page.locator(".heat td.best").count() == 4
    assert page.locator(".heat td.hole").count() == 0
    page.locator("#values").uncheck()
    assert not page.locator(".path").is_visible()
    page.locator("#path").check()
    centres = page.evaluate(
        """() => { const svg = document.querySelector('.path'), box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('circle')].map(dot => {
          const at = document.querySelectorAll('td.best')[Math.floor(dot.getAttribute('cy'))].getBoundingClientRect();
          return [box.left + box.width * dot.getAttribute('cx') / 4 - at.left - at.width / 2,
                  box.top + box.height * dot.getAttribute('cy') / 4 - at.top - at.height / 2] }) }"""
    )
    assert len(centres) == 4
    assert np.abs(centres).max() < 1.5


def test_the_first_frame_is_drawn_the_same_by_python_and_by_the_script(opened, made):
    page = opened(made.series(constant=10))
    kinds = "[...document.querySelectorAll('.heat tbody td')].map(cell => cell.className)"
    drawing = "document.querySelector('.path').innerHTML.length > 0"
    before = page.evaluate(kinds)
    page.locator("#on").click()
    assert page.evaluate(kinds) != before
    page.locator("#back").click()
    assert page.evaluate(kinds) == before
    assert page.evaluate(drawing)


def test_hovering_tells_the_value_and_the_step(opened, made):
    series = made.series()
    page = opened(series)
    page.locator("#on").click()
    cell(page, 1, 2).hover()
    value = number(series[10]["svcca"]["conv2", "fc"])
    assert page.locator(TIP).text_content() == f"conv2 × fc at step 10: {value}"
    page.keyboard.press("Escape")


def test_a_focused_cell_tells_its_new_value_when_the_step_changes(opened, made):
    series = made.series()
    page = opened(series)
    cell(page, 0, 1).click()
    page.evaluate("location.hash = '#step=100'")
    wait_for(page, SHOWN, "step 100 ")
    said = page.locator(READOUT).text_content()
    assert said == f"conv1 × conv2 at step 100: {number(series[100]['svcca']['conv1', 'conv2'])}"


def test_a_hole_tells_its_reason(opened, made):
    page = opened(made.series(constant=10))
    cell(page, 1, 2).hover()
    assert page.locator(TIP).text_content() == (
        "conv2 × fc at step 0: no value, layer 'conv2' is constant over the data"
    )


def test_playing_goes_to_the_end_and_stops_there(opened, made):
    page = opened(made.series())
    play = page.locator("#play")
    assert page.locator(SHOWN).text_content().startswith("step 0 ")  # never by itself
    play.focus()
    page.keyboard.press("Enter")
    assert play.text_content() == "Pause"
    wait_for(page, "#play", "Play")
    assert page.locator(SHOWN).text_content() == "step 1,000 · 4 of 4"
    play.click()  # from the beginning again
    assert page.locator(SHOWN).text_content().startswith("step 0 ")
    play.click()
    assert play.text_content() == "Play"


def test_playing_is_slow_for_those_who_asked_for_little_motion(opened, made):
    page = opened(made.large_series(4, 60), calm=True)
    page.locator("#play").click()
    page.wait_for_timeout(1000)
    assert page.locator(SHOWN).text_content() == "step 0 · 1 of 60"
    wait_for(page, SHOWN, "step 1,000 ")
    page.locator("#play").click()
    hasty = opened(made.large_series(4, 60))
    hasty.locator("#play").click()
    wait_for(hasty, SHOWN, "step 4,000 ", seconds=3)


def test_touching_the_slider_stops_playing(opened, made):
    page = opened(made.series())
    page.locator("#play").click()
    page.locator("#when").focus()
    page.keyboard.press("End")
    assert page.locator("#play").text_content() == "Play"


def test_the_address_keeps_step_and_measure(opened, made):
    series = made.series(measures=("svcca", "procrustes_distance"))
    page = opened(series)
    page.locator("#measure").select_option("procrustes_distance")
    page.locator("#on").click()
    assert page.evaluate("location.hash") == "#step=10&measure=procrustes_distance"
    again = opened(series, hash="#step=100&measure=procrustes_distance")
    assert again.locator(SHOWN).text_content() == "step 100 · 3 of 4"
    assert again.locator("figure:visible h3").text_content() == "procrustes_distance"
    assert cells(again) == told(series, 100, "procrustes_distance")
    assert opened(series, hash="#step=99&measure=nonsense").locator(SHOWN).text_content() == "step 10 · 2 of 4"
    assert opened(series, hash="#step=x").locator(SHOWN).text_content() == "step 0 · 1 of 4"


def test_the_panes_open_their_steps(opened, made):
    page = opened(made.series())
    panes = page.locator(".panes button")
    assert panes.all_text_contents() == ["step 0", "step 10", "step 100", "step 1,000"]
    panes.nth(2).click()
    assert page.locator(SHOWN).text_content() == "step 100 · 3 of 4"
    assert [pane.get_attribute("aria-current") for pane in panes.all()] == ["false", "false", "true", "false"]


def test_arrow_keys_go_along_the_lines_and_tell_the_saved_numbers(opened, made):
    series = made.series(constant=100)
    own = dict(zip(series.layers, series.own().T, strict=True))
    page = opened(series)
    page.locator(".spot").focus()
    for key, layer, step in [
        ("", "conv1", 0), ("ArrowRight", "conv1", 10), ("ArrowDown", "fc", 10), ("ArrowUp", "conv1", 10),
        ("End", "conv1", 1000), ("ArrowDown", "conv2", 1000), ("ArrowLeft", "conv2", 100), ("ArrowLeft", "conv2", 100),
        ("Home", "conv2", 100),
    ]:  # fmt: skip
        if key:
            page.keyboard.press(key)
        said = f"{layer}, step {step:,}: {number(own[layer][series.steps.index(step)])}"
        assert page.locator(".ways .readout").text_content() == said
        assert page.locator(TIP).text_content() == said
        assert page.locator(".spot").get_attribute("aria-label") == said
    page.keyboard.press("Enter")
    assert page.locator(SHOWN).text_content() == "step 100 · 3 of 4"


def test_the_spot_lies_on_its_line(opened, made):
    page = opened(made.series())
    page.locator(".field").scroll_into_view_if_needed()
    field = page.locator(".field").bounding_box()
    page.mouse.move(field["x"] + field["width"] * 0.7, field["y"] + field["height"] * 0.8)
    off = page.evaluate(
        """() => { const spot = document.querySelector('.spot').getBoundingClientRect();
        const line = document.querySelector('.lit .way');
        const box = document.querySelector('.field').getBoundingClientRect();
        const points = [...line.getAttribute('d').matchAll(/[ML]([-\\d.e]+) ([-\\d.e]+)/g)];
        return Math.min(...points.map(([, x, y]) => Math.hypot(
          box.left + box.width * x / 1000 - spot.left - spot.width / 2,
          box.top + box.height * y / 1000 - spot.top - spot.height / 2))) }"""
    )
    assert off < 1.5
    page.mouse.click(field["x"] + field["width"] - 2, field["y"] + 2)
    assert page.locator(SHOWN).text_content() == "step 1,000 · 4 of 4"


def test_the_key_brings_a_line_to_the_front(opened, made):
    page = opened(made.series())
    button = page.locator(".ways .key button").nth(2)
    lit = "[...document.querySelectorAll('g.line.lit')].map(line => line.style.color)"
    button.focus()
    colour = page.evaluate(lit)
    assert len(colour) == 1
    page.keyboard.press("Enter")
    page.locator("#when").focus()
    assert page.evaluate(lit) == colour
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    page.locator("#when").focus()
    page.mouse.move(0, 0)
    assert page.evaluate(lit) == []


def downloaded(page, selector):
    with page.expect_download() as found:
        page.locator(selector).first.click()
    return found.value


def test_the_csv_holds_every_step(opened, made):
    series = made.series(measures=("svcca", "cka"), constant=10)
    file = downloaded(opened(series), "button[data-save=csv]")
    rows = list(csv.DictReader(io.StringIO(file.path().read_text(encoding="utf-8"))))
    assert file.suggested_filename == "run.csv"
    assert len(rows) == 2 * 4 * 16
    for row in rows:
        table, pair = series[int(row["step"])][row["measure"]], (row["layer"], row["final_layer"])
        assert row["reason"] == table.missing.get(pair, "")
        assert row["value"] == "" if pair in table.missing else float(row["value"]) == float(number(table[pair]))


def test_json_and_pictures_are_saved(opened, made):
    series = made.series()
    page = opened(series, hash="#step=100")
    told = downloaded(page, "button[data-save=json]").path().read_text(encoding="utf-8")
    assert json.loads(told) == json.loads(json.dumps(document(series)))
    drawing = downloaded(page, "button[data-save=svg]")
    assert drawing.suggested_filename == "svcca of run at step 100 and the end.svg"
    assert ">svcca: run at step 100 (rows), final (columns)</text>" in drawing.path().read_text(encoding="utf-8")
    assert downloaded(page, "button[data-save=png]").path().read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["series", "large_series"])
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_sideways_scrolling(opened, made, kind, dark):
    page = opened(getattr(made, kind)(), width=360, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#when").bounding_box()["width"] > 250
    outside = "[...document.querySelectorAll('.tick')].filter(t => t.getBoundingClientRect().right > innerWidth).length"
    assert page.evaluate(outside) == 0


def test_a_large_heatmap_is_seen_whole_and_the_timeline_stays_in_sight(opened, made):
    page = opened(made.large_series())
    sizes = page.evaluate(
        "(({scrollHeight, clientHeight}) => [scrollHeight, clientHeight])(document.querySelector('.box'))"
    )
    assert sizes[0] <= sizes[1]
    page.evaluate("scrollTo(0, 1500)")
    assert page.locator("#when").bounding_box()["y"] < 60


def test_lines_have_enough_contrast_on_both_pages(opened, made):
    lightness = """(name) => { const probe = document.createElement('span'); document.body.append(probe);
        probe.style.color = `var(${name})`; const rgb = getComputedStyle(probe).color.match(/\\d+/g);
        const linear = rgb.slice(0, 3).map(v => v / 255)
            .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2] }"""
    for dark in (False, True):
        page = opened(made.series(), dark=dark)
        back = page.evaluate(lightness, "--card")
        found = [page.evaluate(lightness, f"--d{k}") for k in range(32)]
        assert found == sorted(found)  # the first layer is the darkest
        for own in found:
            low, high = sorted([own, back])
            assert (high + 0.05) / (low + 0.05) >= 3


def test_the_printed_page_shows_every_measure_at_the_step_and_no_controls(opened, made):
    series = made.series(measures=("svcca", "cka"))
    page = opened(series, dark=True, hash="#step=100")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("section.measure:visible").count() == 2
    assert page.locator(".controls:visible").count() == 0
    assert page.locator(".when").all_text_contents() == ["step 100"] * 2
    assert page.locator(".panes img:visible").count() == 8
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")


def test_without_a_script_everything_is_there(browser, made, tmp_path):
    report(made.series(measures=("svcca", "cka")), tmp_path / "page.html")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("section.measure:visible").count() == 2
    assert page.locator(".controls:visible").count() == 0
    context.close()


def test_a_series_without_a_measure_opens(opened, made):
    assert opened(made.series(measures=())).locator("#theme").text_content() == "Dark page"


def test_hostile_names_stay_text_in_the_browser(opened, made):
    page = opened(made.series(rows=(made.NAME, "b"), run=made.NAME, unit="epoch"))
    cell(page, 0, 0).hover()
    assert page.locator(TIP).text_content().startswith(f"{made.NAME} × {made.NAME} at epoch 0: ")
    page.locator(".spot").focus()
    assert page.locator(TIP).text_content().startswith(f"{made.NAME}, epoch 0: ")
    assert page.locator("img[src=x]").count() == 0


def test_a_large_series_opens_whole_and_turns(opened, made):
    page = opened(made.large_series())
    shown = page.evaluate(
        """async () => { const slider = document.querySelector('#when'), shown = [];
        for (let k = 0; k <= 20; k += 1) { slider.value = k; slider.dispatchEvent(new Event('input'));
          await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
          shown.push(document.querySelector('.when').textContent); }
        return shown }"""
    )
    assert len(set(shown)) == 21


def test_a_chart_is_as_wide_as_its_place_and_a_table_that_is_wider_says_so(opened, made):
    page = opened(made.large(40), width=360)
    assert page.evaluate(
        "[...document.querySelectorAll('.field')].every(f => f.clientWidth > 180 && f.clientWidth < 360)"
    )
    assert page.locator(".hint:visible").first.text_content() == "Wider than this screen: scroll sideways ⟷"
