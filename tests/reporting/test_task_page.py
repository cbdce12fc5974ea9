"""The page and the figure of tasks that were learnt in a row."""

import re
from dataclasses import replace

import numpy as np
import pytest

from netkin.errors import InvalidValue, ShapeError
from netkin.reporting import plot, report
from netkin.reporting.page import page
from result_worlds import FINETUNE, JOINT, TASKS, ensembles, way
from table_worlds import as_caveats

HOSTILE = "</script><img src=x onerror=alert(1)>"


def words(text):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(style|script).*?</\1>", "", text)))


def by_hand(accuracies):
    """Return ACC, BWT and FWT with their standard errors, as sums over tasks."""
    found = {"ACC": [], "BWT": [], "FWT": []}
    for R in accuracies:
        last = len(R) - 1
        found["ACC"].append(sum(R[last][j] for j in range(last)) / last)
        found["BWT"].append(sum(R[last][j] - R[j + 1][j] for j in range(last - 1)) / (last - 1))
        found["FWT"].append(sum(R[j][j] - R[0][j] for j in range(1, last)) / (last - 1))
    return [f"{np.mean(own):.4f} ± {np.std(own, ddof=1) / 2**0.5:.4f}" for own in found.values()]


def test_the_page_of_several_ways_says_what_each_reached_and_keeps(tmp_path):
    text = page([way(), way("joint", JOINT), ensembles()])
    rows = dict(re.findall(r'<th scope="row"><bdi>(\w+)</bdi></th>((?:<td>[^<]*</td>){5})', text))
    assert re.findall("<td>([^<]*)", rows["finetune"]) == [*by_hand(FINETUNE), "130", "1,390"]
    assert re.findall("<td>([^<]*)", rows["joint"])[:3] == ["0.9000 ± 0.0000", "–", "–"]
    for said in ("3 tasks learnt in a row by 2 methods", "ACC: joint 0.9000 ± 0.0000, finetune 0.6333 ± 0.0000.",
                 "mind finetune", "mind joint", "task-incremental", "digest 12ab", "epochs=2",
                 "chosen as most similar by atom_cosine, among earlier", "not trained yet (6 pairs)"):  # fmt: skip
        assert said in words(text)
    assert '<th scope="row"><bdi>4-5</bdi></th><td>0.7000</td><td>0.7500</td><td>0.8000</td><td>2-3, 0-1</td>' in text
    assert report([way()], tmp_path / "tasks.html").exists()


def test_one_way_or_ensembles_alone_have_a_page_too():
    assert "3 tasks learnt in a row by &#39;finetune&#39;" in page(way())
    alone = words(page(ensembles()))
    assert "Alone the networks reach 0.7000 ± 0.0000, together 0.7500 ± 0.0000;" in alone
    single = way(seeds=(4,), accuracies=FINETUNE[:1])
    assert "ACC, is 0.6333; BWT is -0.4000." in words(page(single))


def test_heatmaps_hold_the_means_over_seeds_and_mark_no_best(made):
    finetune, joint = made.blocks_in(page([way(), way("joint", JOINT)]), "heatmap")
    assert finetune["rows"] == ["start", *TASKS]
    np.testing.assert_allclose(finetune["values"], FINETUNE.mean(0))
    np.testing.assert_allclose(finetune["errors"], FINETUNE.std(0, ddof=1) / 2**0.5)
    assert finetune["best"] == [None] * 4
    assert joint["values"][1] == [None] * 3


def test_lines_are_means_over_the_tasks_learnt_so_far(made):
    means = [[np.mean(R[k + 1, : k + 1]) for k in range(3)] for R in FINETUNE]
    np.testing.assert_allclose(way().so_far, means)
    (chart,) = made.charts_in(page([way(), way("joint", JOINT)]))
    assert (chart["across"], chart["names"], chart["lines"][0]["name"]) == ("after task", list(TASKS), "finetune")
    assert chart["lines"][0]["values"] == pytest.approx(np.mean(means, 0), abs=1e-6)
    assert chart["lines"][0]["errors"] == pytest.approx(np.std(means, 0, ddof=1) / 2**0.5, abs=1e-6)
    reach = [abs(float(high) - float(low)) for _, low, high in chart["bars"][:2]]
    share = (chart["up"][1] - chart["up"][0]) / 1000
    assert reach == pytest.approx(2 * np.array(chart["lines"][0]["errors"][:2]) / share, abs=0.3)
    assert np.isnan(way("joint", JOINT).so_far[:, :2]).all()


def test_pages_hold_the_records(saved_by, made):
    records = [way(), way("joint", JOINT), ensembles()]
    head, rows = made.page_in(page(records))["csv"]
    assert saved_by(page(records), records)
    assert saved_by(page(records[0]), records[0])
    assert head == ["method", "seed", "after", "task", "accuracy"]
    assert rows[0] == ["finetune", 0, "start", "0-1", 0.5]
    assert ["joint", 0, "0-1", "0-1", None] in rows


def test_ways_of_one_method_are_told_apart_by_their_options():
    several = [way("replay", options={"examples": "50"}), way("replay", options={"examples": "200"}), way(), way()]
    text = words(page(several))
    for said in ("replay (examples=50)", "replay (examples=200)", "finetune (3)", "finetune (4)"):
        assert said in text


def test_other_tasks_and_other_results_on_one_page_are_refused():
    other = replace(way(), tasks=("a", "b", "c"))
    with pytest.raises(
        InvalidValue, match="one sequence of tasks; got 0-1, 2-3, 4-5 and a, b, c. Write a page for each"
    ):
        page([way(), other])
    with pytest.raises(InvalidValue, match="a report shows comparisons.*got TaskAccuracies"):
        page([way(), 3])
    for wrong, told in (([way(), 3], "TaskAccuracies"), ([], "none"), ("t.netkin", "str")):
        with pytest.raises(InvalidValue, match=f"got {told}"):
            plot(wrong)


def test_hostile_names_break_nothing():
    names = (HOSTILE, "b", "c")
    bad = way(HOSTILE, tasks=names, options={HOSTILE: HOSTILE}, caveats=as_caveats(HOSTILE))
    assert HOSTILE not in page([bad, bad, ensembles(tasks=names, members=(((), (HOSTILE,), ()),) * 2)])


@pytest.mark.slow
def test_a_figure_has_a_heatmap_for_each_way(tmp_path):
    figure = plot([way(), way("joint", JOINT)], path=tmp_path / "tasks.png")
    images = [ax.images[0] for ax in figure.axes if ax.images]
    np.testing.assert_allclose(images[0].get_array(), FINETUNE.mean(0))
    assert images[1].get_array().mask.sum() == 6
    alone = way().plot(path=tmp_path / "one.svg")
    assert [ax.get_xlabel() for ax in alone.axes if ax.images] == ["on task"]
    with pytest.raises(ShapeError, match="one pair of axes takes one heatmap, and here are 2"):
        plot([way(), way("joint", JOINT)], ax=alone.axes[0])


def test_in_the_browser_cells_tell_their_numbers_with_errors(opened):
    shown = opened([way(), way("joint", JOINT), ensembles()])
    shown.locator("figure[data-grid] >> nth=0 >> tbody tr >> nth=3").locator("td").nth(0).hover()
    assert shown.locator("#tip").text_content() == "4-5 × 0-1: 0.4000 ± 0.1000 standard error"
    shown.locator("figure[data-grid] >> nth=1 >> tbody tr >> nth=1").locator("td").nth(0).hover()
    assert shown.locator("#tip").text_content() == "0-1 × 0-1: no value, not trained yet"
    assert opened([way(), ensembles()], width=400).evaluate("document.documentElement.scrollWidth") <= 400
