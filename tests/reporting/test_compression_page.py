"""The page and the figure of a compression, and its document."""

from dataclasses import replace

import pytest

import netkin as nk
from netkin.errors import InvalidValue
from netkin.reporting.blocks import Lines, blocks_of
from netkin.reporting.page import page, page_of
from netkin.reporting.words import figure_caption
from result_worlds import compressed


@pytest.fixture
def table():
    return compressed()


def charts_of(table):
    return [block.chart for block in blocks_of(page_of(table)) if isinstance(block, Lines)]


def test_the_page_says_what_was_saved_and_what_it_cost(table, tmp_path, saved_by, made):
    text = nk.report(table, tmp_path / "small.html").read_text(encoding="utf-8")
    assert "2 layers of &lt;digits&gt; compressed" in text
    assert "2,000 → 1,500 parameters (75%), accuracy 0.9700 → 0.7500." in text
    assert "fc: saves no parameters." in text
    assert "&lt;conv&gt;" in text
    assert "<conv>" not in text
    assert "ab12" in text
    assert saved_by(text, table)
    assert made.page_in(text)["csv"][1][0][:4] == ["fc", "Linear", 64, 16]


def test_the_charts_are_the_shares_of_each_layer(table):
    kept, right = charts_of(table)
    assert {line.name: list(line.values) for line in kept.lines} == {
        "directions": [16 / 64, 8 / 32], "parameters": [1204 / 650, 0.25], "multiply-adds": [1184 / 640, 0.25],
        "variance held": [0.9, 0.5],
    }  # fmt: skip
    assert list(right.places) == ["original", "fc", "<conv>"]
    assert list(right.lines[0].values) == [0.97, 0.95, 0.75]
    figure = table.plot()
    assert len(figure.axes) == 2
    assert figure.axes[1].lines[0].get_ydata().tolist() == [0.97, 0.95, 0.75]


def test_without_labels_there_is_no_accuracy(table):
    rows = tuple(replace(row, accuracy=None) for row in table)
    unlabelled = replace(table, layers=rows, accuracy_before=None, accuracy_after=None)
    assert [chart.title for chart in charts_of(unlabelled)] == ["share kept"]
    assert "accuracy 0" not in page(unlabelled)
    assert unlabelled.conclusion.endswith("2,000 → 1,500 parameters (75%).")


def test_it_shares_no_page(table):
    with pytest.raises(InvalidValue, match="got Compression"):
        page([table, table])


def test_the_caption_of_the_figure_is_about_a_compression(table):
    said = "What 2 compressed layers kept of what there was, on digits:train, 1,437 examples. Below, the accuracy"
    assert figure_caption(table).startswith(said)
    assert (
        figure_caption(replace(table, accuracy_before=None, data=""))
        == "What 2 compressed layers kept of what there was."
    )


def test_a_table_of_an_earlier_version_names_no_model(table):
    text = page(replace(table, model=""))
    assert "2 layers compressed, 75% of the parameters left" in text
    assert "not named" in text
