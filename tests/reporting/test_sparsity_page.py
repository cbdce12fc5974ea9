"""The page and the figure of a sparsity study: every number is on it, names are escaped, and it needs no data."""

import csv
import io
import json
import re

import pytest
import torch
from torch import nn

from netkin.applications.sparsity import sparsity_study
from netkin.reporting import plot, report
from netkin.reporting.page import page as sparsity_page
from netkin.results import document
from result_worlds import studied


@pytest.fixture(scope="module")
def study():
    return studied()


def test_the_page_tells_what_the_study_holds(study):
    page = sparsity_page(study)
    table = study.networks["after"]
    shares = table.shares()[0], table.shares(of_left=True)[0]
    for words in (
        "after keeps 60 of 300 weights (sparsity 0.8)",
        "below 0.05</th>",
        f"{shares[0]:.2%} · {shares[1]:.2%}",
        f"{study.sizes['after'][1]:,}",
        "Convolutions stay dense",
        f"mean over pairs of different layers: {study.mean_similarity('after'):.4f}",
        "Accuracy without the smallest weights",
        f", accuracy {study.accuracy('after'):.3f}",
        f"accuracy</th><td>{study.accuracy('before <b>'):.4f}</td><td>{study.accuracy('after'):.4f}</td>",
        f"two layers, mean</th><td>{study.mean_similarity('before <b>'):.4f}</td>",
        "What one example is: matrix.",
        "CSR",
    ):
        assert words in page, words
    assert "before &lt;b&gt;" in page
    assert "before <b>" not in page


def test_the_page_carries_the_study(study, saved_by):
    assert saved_by(sparsity_page(study), study)


def test_bars_have_the_heights_of_their_counts(study):
    page = sparsity_page(study)
    counts = study.histograms["after"]
    drawn = re.findall(r'<path d="([^"]*)" class="area"', page)[1]
    tops = [1 - float(one) / 1000 for one in re.findall(r"V([\d.]+)h", drawn)]
    field = page.split('class="field"')[2].partition('class="tick across"')[0]
    highest = max(float(tick) for tick in re.findall(r'class="tick"[^>]*>([\d.]+)<', field))
    assert [top * highest for top in tops] == pytest.approx([count / sum(counts) for count in counts], abs=1e-4)


def test_a_study_of_weights_alone_has_a_page_and_emptied_layers_are_warned_of(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.zero_()
    study = sparsity_study(model)
    report(study, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "no weight is left in 0; its output is constant" in text
    assert "Similarity of the layers" not in text
    assert ">accuracy</th>" not in text
    assert "Times were not measured here" in text


@pytest.mark.slow
def test_the_figure_has_a_panel_for_each_part(study, tmp_path):
    pytest.importorskip("matplotlib")
    figure = plot(study, path=tmp_path / "study.png")
    titles = [ax.get_title() for ax in figure.axes]
    assert "after, sparsity 0.800" in titles
    assert "accuracy" in [ax.get_ylabel() for ax in figure.axes]
    bars = next(ax for ax in figure.axes if ax.get_title().startswith("after")).patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(1)
    assert (tmp_path / "study.png").stat().st_size > 1000
    assert len(plot(sparsity_study(nn.Linear(3, 3))).axes) == 1


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False)])
def test_the_page_fits_its_screen(study, opened, width, dark):
    page = opened(study, width=width, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.locator("table.heatmap td, figure tbody td").first.hover()
    assert page.locator(".readout").first.inner_text() != ""


def test_the_numbers_are_saved_whole(study, opened):
    page = opened(study)
    for kind in ("json", "csv"):
        with page.expect_download() as found:
            page.locator(f"button[data-save={kind}]").first.click()
        text = found.value.path().read_text(encoding="utf-8")
        assert found.value.suggested_filename == f"sparsity.{kind}"
        if kind == "json":
            assert json.loads(text) == json.loads(json.dumps(document(study)))
        else:
            rows = list(csv.DictReader(io.StringIO(text)))
            assert [int(row["left"]) for row in rows if row["network"] == "after"] == [48, 12]
            assert len(rows) == 4
