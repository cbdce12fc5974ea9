"""The page and the figure of a federation."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from netkin.errors import InvalidValue
from netkin.reporting import plot, report
from netkin.reporting.page import page
from netkin.results import document
from netkin.results.federation import RoundRecord
from result_worlds import accuracy, federation, similarity
from table_worlds import as_caveats

HOSTILE = "</script><img src=x onerror=alert(1)>"


def words(text):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(style|script).*?</\1>", "", text)))


def test_the_page_says_what_the_federation_says(tmp_path):
    found = federation()
    text = words(page(found))
    for said in ("fedper with evolving coefficients: 4 clients, 3 rounds",
                 "The mean accuracy of 4 clients is 0.3150, from 0.3000 (client u0) to 0.3300 (client u3).",
                 "1 of 12 updates did not count.",
                 "Round 2, client u0: dropped out: no update came.", "4,800 examples",
                 "The server sees the body.", "body: 4 numbers each way", "cluster 1: u0, u2", "cluster 2: u1, u3",
                 "Dendrogram", "nk.federate()", "epochs=1"):  # fmt: skip
        assert said in text
    rows = re.findall(r'<th scope="row"><bdi>(u\d)</bdi></th>((?:<td>[^<]*</td>)+)', page(found))
    cells = {client: re.findall("<td>([^<]*)", row) for client, row in rows}
    assert cells["u0"] == ["1,200", "0.3000", "3", "2", "1"]
    assert cells["u3"] == ["1,200", "0.3300", "3", "3", "2"]
    assert report(found, tmp_path / "users.html").exists()


def test_lines_stand_where_the_accuracies_lie(made):
    drawn = re.search(r"(?s)<strong>Accuracy</strong>.*?</figure>", page(federation()))[0]
    chart, _ = made.charts_in(page(federation()))
    (low, bottom), (high, top) = min(chart["ticks"].items()), max(chart["ticks"].items())
    values = [[accuracy(k, number) for number in (1, 2, 3)] for k in range(4)]
    for line, wanted in zip(chart["lines"], [np.mean(values, axis=0), *values], strict=True):
        assert line["values"] == pytest.approx(wanted, abs=1e-6)
    for path, wanted in zip(chart["paths"], [np.mean(values, axis=0), *values], strict=True):
        heights = [float(point.split()[1]) / 10 for point in path[1:].split("L")]
        places = [bottom + (v - low) / (high - low) * (top - bottom) for v in wanted]
        assert heights == pytest.approx(places, abs=0.06)
    assert [line["name"] for line in chart["lines"]] == ["mean", "u0", "u1", "u2", "u3"]
    assert re.findall(r'class="tick across[^>]*>([^<]*)<', drawn) == ["1", "2", "3"]
    assert "round →" in drawn


def test_of_many_clients_the_mean_and_the_ends_are_drawn_and_the_heatmap_has_all(made):
    text = page(federation(20))
    assert [line["name"] for line in made.charts_in(text)[0]["lines"]] == ["mean", "highest", "lowest"]
    values = made.blocks_in(text, "heatmap")[0]["values"]
    assert np.array(values).shape == (20, 3)
    assert values[7][1] == accuracy(7, 2)


def test_the_table_of_very_many_clients_is_folded():
    assert '<details class="card"><summary>Each of them</summary>' in page(federation(25))
    assert "Each of them" not in page(federation(24))


def test_clusters_stand_together_with_lines_between_them(made):
    text = page(federation(6))
    _, heatmap = made.blocks_in(text, "heatmap")
    assert heatmap["rows"] == heatmap["columns"] == ["u0", "u2", "u4", "u1", "u3", "u5"]
    values = np.array(heatmap["values"])
    assert (values[:3, :3] >= 0.9).all()
    assert (values[:3, 3:] == 0.1).all()
    assert '<path d="M0 3H6M3 0V6">' in text
    assert heatmap["best"] == [None] * 6


def test_the_page_holds_the_federation_but_for_its_weights(saved_by, made):
    found = federation()
    assert saved_by(page(found), found)
    told = document(found)
    assert told["clusters"] == [0, 1, 0, 1]
    assert "shared" not in told
    assert made.page_in(page(found))["csv"][1][0] == ["u0", 1200, 0.3, 3, 2, 1]


def test_without_tests_there_is_the_loss_and_without_atoms_no_similarity():
    text = words(page(federation(tested=False, alike=False)))
    assert "No client was tested; their mean training loss went from 1.0000 to 0.3333." in text
    assert "`test_every=1` does so after every round" in text
    assert "Which clients are alike" not in text
    assert "cluster" not in text
    silent = federation(tested=False, alike=False)
    bare = RoundRecord(1, silent.clients, (), dict.fromkeys(silent.clients, "failed"), None)
    text = words(page(replace(silent, rounds=(bare,))))
    assert "No client was tested. 4 of 4 updates did not count." in text
    assert "1 more fault of clients; all are listed below." in text


def test_a_client_without_tests_is_a_hole_with_its_reason(made):
    found = federation()
    left, *by_round = ({k: v for k, v in one.accuracy.items() if k != "u1"} for one in (found, *found.rounds))
    records = tuple(replace(one, accuracy=own) for one, own in zip(found.rounds, by_round, strict=True))
    text = page(replace(found, rounds=records, accuracy=left, unjudged={"u1": "it has no test examples"}))
    assert "Client u1 was not tested: it has no test examples." in words(text)
    assert [1, 0] in made.blocks_in(text, "heatmap")[0]["missing"]["it has no test examples"]
    assert "<bdi>u1</bdi></th><td>1,200</td><td>–</td>" in text


def test_what_went_wrong_is_told_also_where_an_update_counted():
    found = federation()
    one = replace(found.rounds[0], faults={"u1": "came late: an update of round 0 in round 1"})
    alike = replace(found.similarity, caveats=as_caveats("coefficients are not orthonormal"))
    text = words(page(replace(found, rounds=(one,), untuned={"u2": "it failed"}, similarity=alike,
                              caveats=as_caveats("at chance"))))  # fmt: skip
    assert "Round 1, client u1: came late: an update of round 0 in round 1 (its update of this round counted)." in text
    assert "Client u2 could not be fine-tuned: it failed." in text
    assert "coefficients are not orthonormal" in text
    assert "at chance" in text
    assert "did not count" not in text


def test_hostile_names_break_nothing():
    found = federation()
    names = (HOSTILE, *found.clients[1:])
    record = RoundRecord(1, names, names[1:], {HOSTILE: HOSTILE}, 0.5, dict.fromkeys(names, 0.5))
    bad = {"clients": names, "examples": dict.fromkeys(names, 3), "accuracy": dict.fromkeys(names, 0.5),
           "rounds": (record,), "similarity": similarity(names), "algorithm": HOSTILE}  # fmt: skip
    assert HOSTILE not in page(replace(found, **bad))


@pytest.mark.slow
def test_a_figure_has_the_lines_of_all_clients_and_the_similarity(tmp_path):
    found = federation()
    figure = found.plot(path=tmp_path / "users.svg")
    lines = figure.axes[0].lines
    assert [list(line.get_ydata()) for line in lines[1:]] == [[accuracy(k, n) for n in (1, 2, 3)] for k in range(4)]
    assert list(lines[0].get_ydata()) == pytest.approx([0.115, 0.215, 0.315])
    _, alike = [ax for ax in figure.axes if ax.images]
    assert [label.get_text() for label in alike.get_xticklabels()] == ["u0", "u2", "u1", "u3"]
    alone = plot(federation(tested=False, alike=False))
    assert alone.axes[0].get_ylabel() == "Training loss"
    assert list(alone.axes[0].lines[0].get_ydata()) == [1, 1 / 2, 1 / 3]
    assert found.plot(ax=alone.axes[0]) is alone
    with pytest.raises(InvalidValue, match="`measures` chooses among those of comparisons"):
        plot(found, "accuracy")


def test_a_federation_fills_a_page_by_itself():
    with pytest.raises(InvalidValue, match="a federation has a page of its own; got 2 results"):
        page([federation(), federation()])
    assert page([federation()]).startswith("<!DOCTYPE html>")


def test_the_table_of_clients_is_one_on_the_page_and_in_pandas():
    pytest.importorskip("pandas")
    found = federation(5)
    frame = found.to_pandas()
    assert list(frame.columns) == ["examples", "accuracy", "asked", "counted", "cluster"]
    assert frame.loc["u0"].tolist() == [1200, 0.3, 3, 2, 1]
    assert list(federation(alike=False).to_pandas().columns) == ["examples", "accuracy", "asked", "counted"]


def test_a_federation_without_clients_has_a_page_and_a_table_without_rows(made):
    found = federation(0, rounds=0, alike=False)
    heads = ["client", "examples", "accuracy", "asked", "counted"]
    assert made.page_in(page(found))["csv"] == [heads, []]
    pytest.importorskip("pandas")
    assert found.to_pandas().shape == (0, 4)


def saved(browser_page, kind):
    with browser_page.expect_download() as found:
        browser_page.locator(f".toolbar button[data-save={kind}]").click()
    return found.value.path().read_text(encoding="utf-8")


def test_in_the_browser_cells_tell_their_numbers_and_all_is_saved(opened):
    found = federation(5)
    shown = opened(found)
    shown.locator("figure[data-grid] >> nth=0 >> tbody tr >> nth=2").locator("td").nth(1).hover()
    assert shown.locator("#tip").text_content() == "u2 × round 2: 0.2200"
    assert json.loads(saved(shown, "json"))["accuracy"] == found.accuracy
    lines = saved(shown, "csv").splitlines()
    assert lines[0] == "client,examples,accuracy,asked,counted,cluster"
    assert lines[1] == "u0,1200,0.3,3,2,1"
    bare = opened(federation(tested=False, alike=False))
    assert not bare.locator("#zoom").is_visible()
    assert bare.locator(".toolbar button[data-save=csv]").is_visible()
    assert opened(found, width=400).evaluate("document.documentElement.scrollWidth") <= 400
