"""`netkin recommend` on the command line."""

import json

import pytest
import torch

import netkin as nk
from netkin.applications.transfer.scores import DEFAULT, SCORES


@pytest.fixture
def weights(netkin, tmp_path):
    """Two networks of the bundled digits, one trained for a moment and one as it was drawn."""
    trained, fresh = nk.load_model("netkin:digits"), nk.load_model("netkin:digits", seed=1)
    nk.train(trained, nk.load_data("digits:train"), steps=10, progress=False)
    for name, model in (("trained", trained), ("fresh", fresh)):
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
    return "netkin:digits@trained.pt netkin:digits@fresh.pt"


def test_one_command_answers_with_a_table_a_file_and_a_page(netkin, weights, tmp_path):
    line = f"recommend {weights} --data digits:test --score knn --score logme --examples 200 --chunks 5"
    result = netkin(f"{line} --save r.netkin --report r.html --figure r.png")
    assert result.exit_code == 0, result.stderr
    assert "2 models for digits:test, a sample of 200 of 360 (seed 0): 200 examples" in result.stdout
    assert "comes first by knn; its lead over" in result.stdout
    assert "saved to r.netkin" in result.stderr
    ranking = nk.load(tmp_path / "r.netkin")
    assert ranking.scores == ("knn", "logme")
    assert str(ranking) + "\n" == result.stdout
    names = ["netkin:digits@trained.pt", "netkin:digits@fresh.pt"]
    other = nk.recommend(names, "digits:test", score="knn", scores=["logme"], examples=200, chunks=5, progress=False)
    assert dict(other.tables) == dict(ranking.tables)
    assert "Which model to start from" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    shown = netkin("show r.netkin")
    assert "r.netkin: ranking" in shown.stdout
    assert "tables" in shown.stdout
    again = netkin("report r.netkin --out again.html")
    assert again.exit_code == 0, again.stderr


def test_the_document_is_json_and_can_be_opened(netkin, weights, tmp_path):
    result = netkin(
        f"recommend {weights} --data digits:test --score h_score_regularised --no-errors --examples 0 --json"
    )
    document = json.loads(result.stdout)
    assert document["kind"] == "ranking"
    assert document["examples"] == 360
    assert document["ranks"][0]["error"] is None
    (tmp_path / "r.json").write_text(result.stdout)
    assert nk.load(tmp_path / "r.json").score == "h_score_regularised"


def test_a_model_that_does_not_fit_the_data_is_listed_last(netkin, weights):
    result = netkin(f"recommend netkin:tiny10 {weights} --data digits:test --score knn --examples 100 --chunks 3")
    assert result.exit_code == 0, result.stderr
    assert "'netkin:tiny10' has no value by any score: it could not be run on inputs of shape" in " ".join(
        result.stdout.split()
    )


@pytest.mark.parametrize(
    ("rest", "code", "said"),
    [
        ("--data digits:test --score knm", 1, "no transfer score named 'knm'; did you mean 'knn'"),
        ("--data nowhere:x", 1, "nowhere"),
        ("--data digits:test --device cuda:9", 1, "there is no device 'cuda:9' here"),
        ("--data digits:test --report r.txt", 2, "a page's name ends in .html"),
        ("--data digits:test --save trained.pt", 1, "trained.pt"),
        ("", 2, "Missing option '--data'"),
    ],
)
def test_what_can_not_be_done_is_told_in_one_sentence(netkin, weights, rest, code, said):
    result = netkin(f"recommend {weights} {rest}")
    assert result.exit_code == code
    assert said in result.stderr


def test_several_files_with_a_ranking_are_refused(netkin, weights):
    for name in ("a", "b"):
        netkin(f"recommend {weights} --data digits:test --score knn --no-errors --save {name}.netkin")
    result = netkin("report a.netkin b.netkin")
    assert result.exit_code == 1
    assert "the ranking for digits:test fills a page by itself" in result.stderr


def test_models_are_called_what_the_command_calls_them(netkin, weights):
    rest = "--data digits:test --score knn --no-errors --examples 50"
    result = netkin(f"recommend good=netkin:digits@trained.pt netkin:digits@fresh.pt {rest} --json")
    assert {row["model"] for row in json.loads(result.stdout)["ranks"]} == {"good", "netkin:digits@fresh.pt"}
    twice = netkin(f"recommend good=netkin:digits@trained.pt good=netkin:digits@fresh.pt {rest}")
    assert (twice.exit_code, twice.stdout) == (1, "")
    assert "two models are named 'good'; write NAME=MODEL" in twice.stderr
    over = netkin(f"recommend good=netkin:digits@trained.pt --data digits:test --save trained.pt --force {rest}")
    assert "trained.pt" in over.stderr


def test_the_help_names_every_score_and_the_default(netkin):
    said = " ".join(netkin("recommend --help").stdout.split())
    assert all(f" {name}" in said for name in SCORES)
    assert f"by default {DEFAULT}." in said
