"""The page of reproductions, and its charts."""

import re
from itertools import pairwise

import pytest

from netkin.errors import FileError, InvalidValue
from netkin.reporting.blocks import Page
from netkin.reporting.charts import Axis, axis_across, axis_up, tick_text
from netkin.reporting.html import html_of
from netkin.reporting.parts import curve
from reproductions.page import claims_page, report_claims, tally
from reproductions.record import Claim, Measured

HOSTILE = "</script><img src=x onerror=alert(1)>"


def claim(**changes):
    facts = {
        "id": "toys/halving",
        "figure": "Fig. 2a",
        "sentence": "a copy is half as large",
        "expected": {"size": "about 0.5"},
        "criterion": "holds if the size is below 0.6",
        "measured": {"size": Measured(0.512, 0.012, 3), "time": Measured(12, unit="s")},
        "control": "copies of other toys",
        "controls": {"size": Measured(0.95, 0.02, 3)},
        "settings": {"net": "epochs=3"},
        "verdict": "holds",
        "scale": "cpu",
        "seeds": (0, 1, 2),
        "note": "one of three was larger",
        "curves": {"Sizes": {"copy": [1, 2, 3, 4], "mean": [0.9, 0.6, None, 0.5], "mean ±": [0.1, 0.2, None, 0]}},
        "provenance": {
            "paper": "Toy (2020), Toys.",
            "device": "CPU, 2 threads",
            "data": "toys, 6 images",
            "commit": "0123abcd",
        },
        "seconds": 1234.5,
        "created": "2025-01-02T03:04:05+00:00",
        "version": "0.1.0",
    }
    return Claim(**(facts | changes))


def drawn(numbers):
    """Return a page with one chart."""
    return html_of(Page("t", "s", blocks=[curve("t", numbers, "chart")]))


def words(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(style|script).*?</\1>", "", page)))


def test_the_page_says_all_that_is_recorded():
    text = words(claims_page([claim(), claim(scale="gpu", verdict="does not hold", measured={"size": Measured(0.7)})]))
    for said in (
        "1 claim, of which 1 does not hold", "Toy (2020), Toys.", "Fig. 2a", "a copy is half as large", "about 0.5",
        "Criterion. Holds if the size is below 0.6", "0.512 ± 0.012 (n = 3)", "12 s", "0.7", "one of three was larger",
        "cpu: ● holds", "gpu: ○ does not hold", "CPU, 2 threads", "toys, 6 images", "1,234 s", "2025-01-02", "0, 1, 2",
        "At cpu scale.", "Made by netkin 0.1.0.", "Control. Copies of other toys", "0.950 ± 0.020 (n = 3)",
        "commit 0123abcd", "network net", "epochs=3", "so by its criterion the claim holds.",
    ):  # fmt: skip
        assert said in text
    assert text.count("a copy is half as large") == 1


def test_the_command_and_the_digests_of_data_are_folded_and_old_records_say_that_they_have_none():
    call = "python -m reproductions toys/halving --scale cpu --device cpu"
    new = claims_page([claim(call=call, data={"toys, 4 training images": "ab12"})])
    folded = words(new[new.index("<details") :])
    assert f"command {call}" in folded
    assert "digest of toys, 4 training images ab12" in folded
    assert "digests of the data none, as it reads no data" in words(claims_page([claim(call=call)]))
    assert "command not recorded" in words(claims_page([claim()]))
    assert "digests of the data not recorded" in words(claims_page([claim()]))


def test_how_long_the_paper_and_we_trained_stands_with_each_claim():
    claims = [claim(), claim(scale="gpu"), claim(id="toys/other")]
    trainings = {("toys/halving", "cpu"): ("90 epochs", "2 epochs"), ("toys/halving", "gpu"): ("90 epochs", "9 epochs")}
    text = words(claims_page(claims, trainings=trainings | {("toys/other", "cpu"): ("", "")}))
    assert "Training. The paper: 90 epochs; here 2 epochs (cpu scale); here 9 epochs (gpu scale)." in text
    assert text.count("Training.") == 1
    text = words(claims_page(claims, trainings={("toys/other", "cpu"): ("", "3 epochs")}))
    assert "Training. The paper: not stated; here 3 epochs (cpu scale)." in text


def test_what_was_noted_later_stands_with_its_record_alone():
    one, other = claim(), claim(id="toys/other")
    page = claims_page([one, other], {(one.id, "cpu"): [f"Measured on a slow day {HOSTILE}"]})
    assert words(page).count("Noted later, cpu scale. Measured on a slow day") == 1
    assert page.index("slow day") < page.index('id="toys-other"')
    assert "<img" not in page


def test_the_overview_leads_to_each_claim():
    page = claims_page([claim(), claim(id="toys/other", verdict="holds in part"), claim(id="games/x")])
    anchors = re.findall(r'href="#([^"]*)"', page)
    assert anchors[:4] == ["table-of-toys", "table-of-games", "claims-of-toys", "claims-of-games"]
    assert anchors[4:] == ["toys-halving", "toys-other", "games-x"]
    assert all(page.count(f'id="{anchor}"') == 1 for anchor in anchors)
    heads = ["<h2>toys</h2>", "<h2>games</h2>", "<h2>toys, claim by claim</h2>", 'id="toys-halving"', "games, claim by"]
    assert sorted(heads, key=page.index) == heads  # the tables of all papers come first


def test_the_tally_counts_each_claim_once_at_its_largest_scale():
    three = [claim(), claim(scale="gpu", verdict="holds in part"), claim(id="toys/b"), claim(id="toys/c")]
    assert tally(three) == "3 claims, of which 2 hold, 1 holds in part"
    assert tally([claim(id=f"toys/{k}", verdict="does not hold") for k in "ab"]) == "2 claims, of which 2 do not hold"
    open_ = [claim(id=f"toys/{k}", verdict="undecided") for k in "ab"]
    assert tally(open_) == "2 claims, of which 2 are undecided"
    algebra = claim(id="toys/algebra", kind="identity", control="", controls={})
    assert tally([claim(), algebra]) == "1 claim, of which 1 holds; 1 identity, of which 1 holds"


def test_the_page_holds_no_address_and_hostile_words_stay_text():
    strange = {"sentence": HOSTILE, "note": HOSTILE, "criterion": HOSTILE, "figure": HOSTILE, "version": HOSTILE}
    curves = {HOSTILE: {HOSTILE: [HOSTILE, "b"], "line" + HOSTILE: [1, 2]}}
    maps = {"expected": {HOSTILE: HOSTILE}, "provenance": {HOSTILE: HOSTILE, "paper": HOSTILE}, "curves": curves}
    page = claims_page([claim(**strange, **maps)])
    assert "<img" not in page
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import|srcset|<link|<iframe|<base", page)
    assert "Content-Security-Policy" in page


def test_the_verdict_stands_first(made):
    text = claims_page([claim()])
    assert re.search(r"<thead><tr><th scope=\"col\">verdict</th>", text)
    assert text.index('<article class="card claim"') < text.index('<p class="first">') < text.index("<blockquote>")


def test_a_page_of_nothing_is_refused_and_a_page_is_written_whole(tmp_path):
    with pytest.raises(InvalidValue, match="a page of reproductions needs at least one recorded claim; got none."):
        claims_page([])
    assert report_claims([claim()], tmp_path / "x.html").read_text() == claims_page([claim()])
    with pytest.raises(FileError, match="cannot write"):
        report_claims([claim()], tmp_path / "gone" / "x.html")


def test_a_line_breaks_at_a_hole_and_every_point_tells_its_value_with_its_error(made):
    text = drawn(claim().curves["Sizes"])
    (chart,) = made.charts_in(text)
    assert [part.count("L") for part in chart["paths"][0].split("M")[1:]] == [1, 0]
    (line,) = chart["lines"]
    assert (line["values"], line["errors"]) == ([0.9, 0.6, None, 0.5], [0.1, 0.2, None, 0])
    assert len(chart["bars"]) == 2
    assert "mean ±" not in text


def test_points_stand_where_their_numbers_say(made):
    (chart,) = made.charts_in(drawn({"x": [0, 5, 10], "y": [0.0, 0.5, 1.0]}))
    assert chart["paths"] == ["M0 1000L500 500L1000 0"]
    assert (chart["x"], chart["lines"][0]["values"], chart["up"]) == ([0, 0.5, 1], [0, 0.5, 1], [0, 1])
    assert chart["ticks"] == {0: 100, 0.2: 80, 0.4: 60, 0.6: 40, 0.8: 20, 1: 0}


def test_names_may_stand_on_the_x_axis(made):
    text = drawn({"layer": ["conv1", "fc"], "svcca": [0.5, 0.6]})
    assert re.search(r">conv1</span>.*>fc</span>", text)
    (chart,) = made.charts_in(text)
    assert (chart["x"], chart["names"], chart["across"]) == ([0.25, 0.75], ["conv1", "fc"], "layer")
    assert chart["lines"][0]["values"] == [0.5, 0.6]


def test_a_curve_without_any_value_is_left_out():
    assert curve("t", {"x": [1, 2], "y": [None, None]}, "chart") is None
    assert "<figure" not in claims_page([claim(curves={"t": {"x": [1, 2], "y": [None, None]}})])


def test_more_lines_than_colours_are_told_apart_by_their_marks():
    text = drawn({"x": [1]} | {f"line {k}": [k] for k in range(32)})
    looks = re.findall(r'<g class="line (k\d)"[^>]*><path d="M0 8H28".*?stroke-linecap="(\w+)"', text)
    assert len(looks) == 32
    assert len(set(looks[:16])) == 16


@pytest.mark.parametrize(
    "values, logarithmic",
    [
        ([1, 2, 4, 8, 512], True),
        ([0, 1, 2, 512], False),
        ([1, 2, 3, 4], False),
        ([1, 1.1, 9], False),
        ([-1, 10, 100], False),
    ],
)
def test_the_x_axis_is_in_logarithms_where_that_parts_the_points(values, logarithmic):
    assert axis_across(values) == Axis(min(values), max(values), logarithmic)


@pytest.mark.parametrize(
    "values, ends",
    [
        ([0.1, 0.9], (0, 1)),
        ([0.83, 0.907], (0.82, 0.92)),
        ([5, 5], (2, 8)),
        ([0, 0], (-0.6, 0.6)),
        ([-3, 40], (-10, 40)),
    ],
)
def test_the_y_axis_ends_at_round_numbers(values, ends):
    found = axis_up(values)
    assert (found.low, found.high) == pytest.approx(ends)
    assert found.low <= min(values) <= max(values) <= found.high


@pytest.mark.parametrize(
    "axis", [Axis(0, 1), Axis(3, 40, True), Axis(0.001, 1e4, True), Axis(-7, 12345), Axis(1, 10, True)]
)
def test_ticks_lie_on_the_axis_and_are_few(axis):
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(-1e-9 <= axis.place(tick) <= 1 + 1e-9 for tick in ticks)
    gaps = [b - a for a, b in pairwise(ticks)]
    assert axis.logarithmic or gaps == pytest.approx([gaps[0]] * len(gaps))


@pytest.mark.parametrize("high", [5e-324, 1e-310, 1e300])
def test_the_smallest_and_largest_numbers_have_ticks(high):
    ticks = Axis(0, high).ticks()
    assert ticks[0] == 0
    assert all(0 <= tick <= high for tick in ticks)


def test_one_place_on_the_x_axis_is_drawn_in_the_middle():
    assert axis_across([7, 7]).place(7) == 0.5
    assert [tick_text(value) for value in (0, -2.5, 1500, 1e-7)] == ["0", "-2.5", "1,500", "1e-7"]


@pytest.fixture
def opened(browser, tmp_path):
    """Open the page of claims; troubles and requests fail the test."""
    contexts, troubles, address = [], [], (tmp_path / "page.html").as_uri()

    def open_page(*claims, width=1280, dark=False):
        report_claims(claims, tmp_path / "page.html")
        scheme = "dark" if dark else "light"
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: request.url == address or troubles.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not troubles


def test_pointing_at_a_mark_tells_its_value_and_arrow_keys_go_on(opened):
    page = opened(claim())
    page.locator(".field").first.hover(position={"x": 3, "y": 3})
    assert page.locator("#tip").text_content() == "mean, copy 1: 0.9000 ± 0.1000"
    page.locator(".spot").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").text_content() == "mean, copy 2: 0.6000 ± 0.2000"


def test_the_page_can_be_dark_or_light(opened):
    page = opened(claim(), dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(17, 19, 24)"
    page.get_by_role("button", name="Light page").click()
    assert page.evaluate(ground) == "rgb(246, 247, 249)"


def test_the_page_fits_a_telephone(opened):
    page = opened(claim(), claim(scale="gpu"), width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    table = page.locator(".overview").first
    assert table.evaluate("(one) => one.scrollWidth <= one.closest('.scroll').clientWidth")
    ours = table.locator("td[data-label='ours']").first
    assert ours.text_content() == "0.512 ± 0.012 (n = 3)"
    assert ours.bounding_box()["x"] + ours.bounding_box()["width"] <= 390
    assert ours.evaluate("(one) => getComputedStyle(one, '::before').content") == '"ours"'


def test_charts_of_one_title_stand_beside_each_other(opened):
    page = opened(claim(), claim(scale="gpu"))
    tops = page.evaluate("[...document.querySelectorAll('figure.curve')].map((f) => f.getBoundingClientRect().top)")
    assert len(tops) == 2
    assert tops[0] == tops[1]
