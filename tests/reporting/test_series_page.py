"""The page of a series as text: what stands in it, without a browser."""

import base64
import html
import io
import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from netkin.errors import InvalidValue
from netkin.reporting import report
from netkin.reporting.charts import StepAxis, spread
from netkin.reporting.grids import frames, shades
from netkin.reporting.html import png
from netkin.reporting.page import page
from netkin.results import load
from table_worlds import as_caveats


def words(text):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script)\b.*?</\1>", "", text, flags=re.S)))


def test_every_number_a_step_points_at_is_the_saved_one(made, tmp_path):
    made.series(measures=("svcca", "procrustes_distance"), constant=10).save(tmp_path / "run.netkin")
    saved = load(tmp_path / "run.netkin")
    text = page(saved)
    assert made.page_in(text)["timeline"]["steps"] == list(saved.steps)
    for heatmap, measure in zip(made.blocks_in(text, "heatmap"), saved.measures, strict=True):
        for frame, step in zip(heatmap["frames"], saved.steps, strict=True):
            table = saved[step][measure]
            values = np.array(frame["values"], dtype=float)
            assert np.array_equal(values, table.values, equal_nan=True)
            missing = {(i, j): reason for reason, cells in frame["missing"].items() for i, j in cells}
            assert {(table.layers_a[i], table.layers_b[j]): reason for (i, j), reason in missing.items()} == dict(
                table.missing
            )


def test_a_reason_is_said_once_however_many_steps_and_pairs_it_is_about(made):
    text = html.unescape(page(made.series(measures=("svcca", "cka"), constant=100)))
    assert "no value: layer 'conv2' is constant over the data (4 pairs at 2 of 4 steps, by every measure)" in text


def test_the_table_tells_when_each_layer_settles(made):
    series = made.series()
    found = re.findall(r'<tr><th scope="row"><bdi>(\w+)</bdi></th>((?:<td>[^<]*</td>){3})</tr>', page(series))[:4]
    for layer, cells in found:
        reached = [series.reached(threshold)[layer] for threshold in (0.9, 0.99, 0.999)]
        told = ["–" if step is None else f"{step:,}" for step in reached]
        assert re.findall(r"<td>([^<]*)</td>", cells) == told
    assert [layer for layer, _ in found] == list(series.layers)
    assert "– not before the last step" in words(page(series))


def test_bottom_up_is_told_as_a_verdict_a_number_and_counted_pairs(made):
    series = made.series(tuple(range(0, 101, 5)), tuple(f"layer{i}" for i in range(8)))
    trend, reached = series.bottom_up(0.9), list(series.reached(0.9).values())
    late = [101 if step is None else step for step in reached]
    apart = [(a, b) for a, b in combinations(late, 2) if a != b]
    text = words(page(series))
    assert trend.p < 0.05
    assert f"At 0.9: bottom-up, τ = {trend.tau:.2f} ± {trend.error:.2f}." in text
    assert (
        f"In {sum(a < b for a, b in apart)} of the {len(apart)} pairs of layers that settle at different steps" in text
    )
    head = html.unescape(re.search(r'class="headline">(.*?)<', page(series))[1])
    assert "By svcca, lower layers reach 0.9 before upper ones: Kendall's τ between depth and step is" in head
    assert not re.search(r"\bp\b|p-value|chance", head)  # of which only a control can tell
    assert "networks that learn nothing may have an order of depth too" in text


def test_layers_that_are_there_at_the_first_step_are_left_out_and_counted(made):
    rows, steps = ("a", "b", "c", "d"), (0, 1, 2, 3)
    at = {"a": 0, "b": 1, "c": 2, "d": 2}
    comparisons = [
        made.comparison(made.table("svcca", rows, values=np.diag([1.0 if step >= at[r] else 0.5 for r in rows])))
        for step in steps
    ]
    text = words(page(type(made.series())(run="run", steps=steps, comparisons=comparisons, final_step=3)))
    assert "over 3 layers; 1 that is there at the first step is left out." in text
    assert "In 2 of the 2 pairs of layers that settle at different steps" in text  # and not in 5 of 5


def test_an_order_that_chance_may_have_made_is_not_called_one(made):
    series = made.series()
    text, trend = words(page(series)), series.bottom_up(0.9)
    assert trend.p > 0.05
    assert "At 0.9: leaning bottom-up, τ = " in text
    assert f"against layers that settle in random order is {trend.p:.2g}, so this may be chance." in text


def test_layers_whose_settling_knows_no_depth_are_told_so(made):
    rows, steps = ("a", "b", "c", "d"), (0, 1, 2, 3)
    at = {"a": 1, "b": 2, "c": 2, "d": 1}  # as many pairs up as down
    comparisons = [
        made.comparison(made.table("svcca", rows, values=np.diag([1.0 if step >= at[r] else 0.5 for r in rows])))
        for step in steps
    ]
    series = type(made.series())(run="run", steps=steps, comparisons=comparisons, final_step=3)
    assert series.bottom_up(0.9).tau == 0
    text = words(page(series))
    assert "At 0.9: no clear order, τ = 0.00" in text
    assert "layers reach 0.9 in no clear order of depth" in text


def test_from_the_top_down_is_told_too(made):
    steps, rows = tuple(range(0, 101, 5)), tuple(f"layer{i}" for i in range(8))
    upside_down = made.series(steps, rows[::-1])
    flipped = [
        made.comparison(made.table("svcca", rows, values=c["svcca"].values[::-1, ::-1]), a=c.a, b=c.b)
        for c in upside_down.comparisons
    ]
    series = type(upside_down)(run="run", steps=steps, comparisons=flipped, final_step=100)
    assert "upper layers reach 0.9 before lower ones" in words(page(series))
    assert "At 0.9: top-down, τ = -" in words(page(series))


def test_layers_that_settle_together_have_no_order(made):
    text = words(page(made.series((0, 1000))))
    assert "At 0.9, 0.99, 0.999: no order. There is no order among 4 layers of which none reaches the threshold" in text
    assert "4 layers at 2 steps, each with its final state at step 1,000." in text


def test_a_distance_has_no_marks_to_reach(made):
    text = words(page(made.series(measures=("procrustes_distance",))))
    assert "procrustes_distance is no similarity that ends at 1, so there is no mark to reach." in text
    assert "distance from its final state, closer is up" in text


def test_layers_that_never_settle_are_counted(made):
    series = made.series(tuple(range(0, 101, 5)), tuple(f"layer{i}" for i in range(8)))
    late = series.bottom_up(0.999).never
    assert late
    assert f"{late} of 8 layers get there only at the end, and count as equally late." in words(page(series))


def test_provenance_tells_what_holds_always_and_what_changes_from_step_to_step(made):
    text = words(page(made.series(unit="epoch", missing=(400, 700), caveats=as_caveats("mind the gap"))))
    for told in (
        "device cpu", "folder runs/a", "run at each epoch, 4 layers", "run at the final epoch 1,000, 4 layers",
        "epochs missing 400, 700", "no, it was interrupted", "100 run@100 1,797 step_100.pt", "mind the gap",
        "interrupted: 2 of 6 steps are missing.", "0 of 64", "biased HSIC, centred",
    ):  # fmt: skip
        assert told in text, told


def test_the_folder_of_a_run_stands_in_the_provenance_alone(made):
    series = replace(made.series(), run="/home/ann/runs/wide")
    above, _, below = page(series).partition("Where these numbers come from")
    assert "/home/ann" not in above
    assert "<h1>wide, from step to step</h1>" in above
    assert "<td>/home/ann/runs/wide</td>" in below


def test_an_interrupted_series_says_so(made):
    assert "This series was interrupted" in page(made.series(complete=False))


def test_the_measures_can_be_chosen_where_there_are_several(made):
    assert '<select id="measure">' in page(made.series(measures=("svcca", "cka")))
    assert '<select id="measure">' not in page(made.series())


def test_hostile_names_stay_text(made):
    text = page(made.series(rows=(made.NAME, "b"), run=made.NAME, unit=made.NAME))
    assert "<img src=x" not in text
    assert made.page_in(text)["results"][0]["run"] == made.NAME
    assert text.count("<script") == 2


def test_the_page_holds_no_address(made):
    assert not re.search(
        r"https?:|//[a-z]|url\((?!#)|@import|srcset|<link|<iframe|<base",
        re.sub(r'base64,[^"]*|(?<="float64":")[^"]*|(?<="results":")[^"]*', "", page(made.series())),
    )


@pytest.mark.parametrize("steps", [(7,), (0, 1), (0, 5, 10)])
@pytest.mark.parametrize("rows", [("only",), ("a", "b")])
def test_odd_sizes_are_drawn(made, steps, rows):
    (heatmap,) = made.blocks_in(page(made.series(steps, rows)), "heatmap")
    assert len(heatmap["frames"]) == len(steps)


def test_layers_without_a_final_state_have_no_lines(made):
    tables = [made.table("svcca", ("a", "b"), ("x", "y", "z"))]
    comparisons = [made.comparison(*tables), made.comparison(*tables)]
    series = type(made.series())(run="run", steps=(1, 2), comparisons=comparisons, final_step=2)
    text = page(series)
    assert 'data-lines="' not in text
    assert "When each layer settles" not in text
    assert "2 layers at 2 steps, none of which the final checkpoint has under the same name." in words(text)
    assert "The layers of the final checkpoint" in text


def test_a_series_without_a_measure_is_drawn(made):
    text = page(made.series(measures=()))
    assert "Where these numbers come from" in text
    assert 'id="when"' not in text


def test_a_line_is_broken_where_a_value_is_missing(made):
    text = page(made.series((0, 10, 100, 200, 1000), constant=100))
    (chart,) = made.charts_in(text)
    assert [way.count("M") for way in chart["paths"]] == [1, 1, 1, 1]
    assert [way.count("L") for way in chart["paths"]] == [3, 1, 3, 3]
    given = re.findall(r'<path d="M[\d.]+ [\d.]+L1000 ([\d.]+)" class="given"', text)
    assert given == ["0"] * 4  # the last step, where each layer equals itself


@pytest.mark.slow
def test_fifty_steps_of_thirty_layers_stay_small(made):
    assert len(page(made.large_series()).encode()) < 800_000  # all digits of 45,000 numbers


@pytest.mark.parametrize("kind", ["series", "large_series"])
def test_the_json_of_the_page_is_the_series(made, saved_by, kind):
    series = getattr(made, kind)()
    assert saved_by(page(series), series)


def test_a_small_picture_has_a_pixel_a_cell_and_is_clear_in_holes(made):
    image = pytest.importorskip("PIL.Image")
    grid = frames(made.series(constant=10), "svcca")[0]
    drawn = np.array(image.open(io.BytesIO(png(grid))).convert("RGBA"))
    assert drawn.shape == (4, 4, 4)
    assert np.array_equal(drawn[..., 3] == 0, np.isnan(grid.values))
    shade = grid.scale.shade_numbers(grid.values)[0, 0]
    assert drawn[0, 0, :3].tolist() == shades()[shade].tolist()
    assert f"base64,{base64.b64encode(png(grid)).decode()}" in page(made.series(constant=10))


def test_a_series_shares_its_page_with_nothing(made, tmp_path):
    with pytest.raises(
        InvalidValue, match="a series has a page of its own; got 2 results for one page. Write one for each."
    ):
        report([made.series(), made.comparison()], tmp_path / "page.html")
    assert report([made.series()], tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    "steps, logarithmic, ticks",
    [
        ((0, 1, 2, 3), False, [0, 1, 2, 3]),
        ((1, 10, 100, 1000), True, [1, 10, 100, 1000]),
        ((0, 100, 200, 400, 800, 1600), True, [0, 100, 200, 400, 800, 1600]),
        ((500, 1000, 1500), False, [500, 1000, 1500]),
        ((0, 1, 2, 3, 1000), True, [0, 1, 3, 1000]),  # 2 is too near to 3
        (tuple(range(500, 1501, 100)), False, [600, 800, 1000, 1200, 1400]),
        (tuple(100 * 2**k for k in range(9)), True, [100, 1000, 10000]),
        ((7,), False, [7]),
    ],
)
def test_the_axis_fits_the_steps(steps, logarithmic, ticks):
    axis = StepAxis.of(steps)
    assert (axis.logarithmic, axis.ticks()) == (logarithmic, ticks)
    assert axis.places == sorted(axis.places)
    assert len(steps) == 1 or (axis.places[0], axis.places[-1]) == (0, pytest.approx(1))


def test_few_steps_are_all_spread_and_many_evenly():
    assert spread(StepAxis.of((1, 2, 3)), 6) == [0, 1, 2]
    assert spread(StepAxis.of(tuple(range(51))), 6) == [0, 10, 20, 30, 40, 50]


def test_lines_have_bars_where_a_series_has_standard_errors(made):
    steps = (1, 10, 100)
    tables = [made.jackknifed(id="svcca", seed=k) for k in range(3)]
    found = made.series(steps, ("conv1", "conv2", "head"))
    series = replace(found, comparisons=[made.comparison(t, a=f"run@{s}") for t, s in zip(tables, steps, strict=True)])
    (chart,) = made.charts_in(page(series))
    for k, line in enumerate(chart["lines"]):
        assert line["errors"] == pytest.approx([table.to_errors()[k, k] for table in tables], rel=1e-4)
    assert len(chart["bars"]) == 9
