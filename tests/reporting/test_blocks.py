"""Tasks on the page and in figures: the blocks of all tasks against each other, in two pictures for each measure."""

import re
from dataclasses import replace

import numpy as np
import pytest

from netkin.reporting import plot, report
from netkin.reporting.grids import APART, SHARED, Scale, summary_grids
from netkin.reporting.page import page
from netkin.results import Comparisons
from netkin.results.labels import buckets_note

LAYERS = {"a": ("x/y", "z"), "a/x": ("y", "u", "v"), "c": ("z",)}  # whose names are alike when joined by a stroke
SAME = ("a", "c")


@pytest.fixture
def tasks(made):
    """Three tasks, of which `a` and `c` hold the same examples."""
    numbers = np.random.default_rng(0)

    def one(a, b):
        values = numbers.uniform(0.1, 0.3, (len(LAYERS[a]), len(LAYERS[b])))
        values = (values + values.T) / 2 if a == b else values
        shared = 1.0 if a == b or (a, b) == SAME else 0.0
        facts = {"values": values, "parameters": {"seeds": 5, "shared_examples": shared}, "errors": values / 10}
        table = made.table("sketched_cka(seeds=5)", LAYERS[a], LAYERS[b], **facts)
        if (a, b) == ("a", "a/x"):
            values[1, 2] = np.nan
            table = replace(table, values=values, missing={("z", "v"): "no path leads there"})
        return replace(made.comparison(table), a=a, b=b)

    names = list(LAYERS)
    return Comparisons([one(a, b) for k, a in enumerate(names) for b in names[k:]])


def test_each_pair_of_layers_stands_once_on_either_side_of_the_diagonal(tasks):
    shared, apart = summary_grids(list(tasks.values()))
    keys = [(name, layer) for name, layers in LAYERS.items() for layer in layers]
    assert (shared.note, apart.note) == (SHARED, APART)
    for i, (a, x) in enumerate(keys):
        for j, (b, y) in enumerate(keys):
            pair, cell = ((a, b), (x, y)) if (a, b) in tasks else ((b, a), (y, x))
            here, there = (shared, apart) if a == b or set(pair) == set(SAME) else (apart, shared)
            assert np.isnan(there.values[i, j])
            assert there.missing[i, j].endswith("have a picture of their own")
            if set(cell) == {"z", "v"} and set(pair) == {"a", "a/x"}:
                assert here.missing[i, j] == "no path leads there"
            else:
                assert here.values[i, j] == tasks[pair].table()[cell]
                assert here.errors[i, j] == tasks[pair].table()[cell] / 10


def test_borders_stand_where_another_task_begins(tasks):
    assert [grid.borders for grid in summary_grids(list(tasks.values()))] == [[2, 5], [2, 5]]


def test_pairs_of_different_data_have_the_scale_of_their_own_values(tasks):
    shared, apart = summary_grids(list(tasks.values()))
    assert (shared.scale.low, shared.scale.high, shared.scale.open_ended) == (0, 1, False)
    known = apart.values[np.isfinite(apart.values)]
    assert (apart.scale.low, apart.scale.high, apart.scale.open_ended) == (known.min(), known.max(), True)
    table = tasks["a/x", "c"].table()
    assert (Scale.of(table).low, Scale.of(table).high) == (table.values.min(), table.values.max())


def test_the_page_says_which_pairs_can_be_compared_with_each_other(tasks):
    written = page(tasks)
    assert "<h1>3 tasks, block by block</h1>" in written
    assert "Tasks by tasks, block by block" in written
    assert buckets_note(list(tasks.values())) in written.replace("&#39;", "'").replace("&#x27;", "'")
    assert "(each task with itself; a and c) can't be compared with" in " ".join(str(tasks).split())


def test_values_stand_in_the_cells_at_first_where_all_pictures_have_room(tasks, made):
    assert 'class="values-shown' in page(tasks)
    rows = tuple(f"layer{k}" for k in range(8))
    facts = {"parameters": {"shared_examples": 1.0}}
    many = [replace(made.comparison(made.table("s", rows, **facts)), a=a, b=b) for a, b in ("aa", "ab", "bb")]
    assert 'class="values-hidden' in page(many)


def test_the_box_for_values_is_ticked_where_all_pictures_have_room(opened, made, tasks):
    assert opened(tasks).locator("#values").is_checked()
    rows = tuple(f"layer{k}" for k in range(8))
    facts = {"parameters": {"shared_examples": 1.0}}
    many = [replace(made.comparison(made.table("s", rows, **facts)), a=a, b=b) for a, b in ("aa", "ab", "bb")]
    assert not opened(Comparisons(many)).locator("#values").is_checked()


def test_without_pairs_of_different_data_there_is_one_picture_and_no_note(tasks):
    alike = Comparisons([tasks["a", "a"], tasks["a", "c"], tasks["c", "c"]])
    assert [grid.note for grid in summary_grids(list(alike.values()))] == [SHARED]
    assert buckets_note(list(alike.values())) == ""


def test_too_many_layers_for_one_picture_are_told_by_their_means(made):
    rows = tuple(f"layer{k}" for k in range(150))
    facts = {"parameters": {"shared_examples": 1.0}}
    many = [replace(made.comparison(made.table("s", rows, **facts)), a=a, b=b) for a, b in ("aa", "ab", "bb")]
    assert [grid.rows for grid in summary_grids(many)] == [("a", "b")]


def test_a_figure_has_a_panel_for_each_picture(tasks, tmp_path):
    figure = plot(tasks, path=tmp_path / "tasks.png")
    panels = [ax for ax in figure.axes if ax.images and ax.get_title()]
    assert [ax.get_title() for ax in panels] == [SHARED, APART]
    assert all(ax.images[0].get_array().shape == (6, 6) for ax in panels)


def test_the_figure_of_one_task_is_that_of_its_comparison(tasks):
    figure = plot(Comparisons([tasks["a", "a"]]))
    assert np.allclose(figure.axes[0].images[0].get_array(), tasks["a", "a"].to_numpy())


def test_a_cell_tells_its_number_and_opens_its_comparison(opened, tasks):
    shown = opened(tasks)
    row = shown.locator("figure[data-grid='summary 1'] tbody tr").nth(4)
    row.locator("td").nth(5).hover()
    value = tasks["a/x", "c"].table()["v", "z"]
    assert shown.locator("#tip").text_content() == f"a/x/v × c/z: {value:.4f} ± {value / 10:.4f} standard error"
    row.locator("td").nth(4).hover()
    assert shown.locator("#tip").text_content() == f"a/x/v × a/x/v: no value, {SHARED} have a picture of their own"
    row.locator("td").nth(5).click()
    assert shown.locator("article.comparison:visible h2").first.text_content() == "a/x and c"


def test_a_page_of_one_task_is_that_of_its_comparison(tasks, tmp_path):
    written = report(Comparisons([tasks["a", "a"]]), tmp_path / "one.html").read_text(encoding="utf-8")
    assert "Every layer with every layer" in written
    assert "block by block" not in written


def test_the_page_opens_with_two_tasks_and_not_with_one_beside_itself(tasks):
    drawn = page(tasks)
    chosen = re.findall(r"<option[^>]*>([^<]+)</option>", drawn)
    assert chosen[:3] == ["a and a/x", "a and c", "a/x and c"]
    assert "a, a/x, c: 6 pairs, each task beside itself too." in drawn


def test_the_figure_of_tasks_with_the_same_examples_shows_their_blocks_and_no_map(made):
    pytest.importorskip("matplotlib")
    numbers = {"parameters": {"seeds": 5, "shared_examples": 1.0}}
    pairs = [(a, b) for k, a in enumerate("tuv") for b in "tuv"[k:]]
    tables = [made.table("sketched_cka(seeds=5)", ("x", "y"), **numbers) for _ in pairs]
    many = Comparisons([replace(made.comparison(t), a=a, b=b) for t, (a, b) in zip(tables, pairs, strict=True)])
    figure = plot(many)
    (heat,) = [axes for axes in figure.axes if axes.images]
    assert heat.images[0].get_array().shape == (6, 6)
    assert len(figure.axes) == 2  # with its bar
    assert "Each layer of 3 tasks with every layer of each" in " ".join(figure.get_supxlabel().split())
