"""`netkin tasks` and `netkin recommend`."""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.applications.transfer.scores import BESIDE, DEFAULT, SCORES
from netkin.sources.architectures import architecture, seeded
from netkin.sources.batches import sample
from table_worlds import sentences

FIRST, SECOND = "netkin:digits@first.pt", "netkin:digits@second.pt"
SHORT = "--layers relu1 --layers fc --quiet"
TASKS = f"few={FIRST},digits:test many={SECOND},digits:train {SHORT}"
MEASURES = "--measure 'sketched_cka(buckets=32)' --measure 'sketched_cka_by_buckets(buckets=32)'"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the weights of two networks as they were drawn, and of one that was trained for a moment."""
    folder = tmp_path_factory.mktemp("made")
    trained, fresh = nk.load_model("netkin:digits"), nk.load_model("netkin:digits", seed=1)
    nk.train(trained, nk.load_data("digits:train"), steps=10, progress=False)
    first, second = (seeded(architecture("digits"), seed) for seed in (0, 1))
    for name, model in {"first": first, "second": second, "trained": trained, "fresh": fresh}.items():
        torch.save(model.state_dict(), folder / f"{name}.pt")
    return folder


@pytest.fixture(autouse=True)
def networks(netkin, made):
    """The weights of two networks, in the folder at hand."""
    for name in ("first", "second"):
        shutil.copy(made / f"{name}.pt", ".")


def done(result):
    assert (result.exit_code, result.exception) == (0, None), result.stderr
    return result


def refusal(netkin, line, code=1):
    """Return the sentence of a command that is refused, which has printed and written nothing else."""
    before = sorted(path.name for path in Path().iterdir())
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (code, "")
    assert sorted(path.name for path in Path().iterdir()) == before
    return " ".join(result.stderr.split())


@cache
def library(seeds=5):
    """What the library says of the two tasks, whose weights are the same in every test."""
    models = nk.load_model(FIRST), nk.load_model(SECOND)
    tasks = {"few": (models[0], nk.load_data("digits:test")), "many": (models[1], nk.load_data("digits:train"))}
    measures = ["sketched_cka(buckets=32)", "sketched_cka_by_buckets(buckets=32)"]
    return nk.compare_tasks(tasks, measures, layers=["relu1", "fc"], seeds=seeds)


@pytest.mark.slow
def test_the_command_is_the_function(netkin):
    outputs = "--out tasks.netkin --report tasks.html --figure tasks.png"
    result = done(netkin(f"tasks {TASKS} {MEASURES} {outputs}"))
    saved, expected = nk.load("tasks.netkin"), library()
    assert list(saved) == [("few", "few"), ("few", "many"), ("many", "many")]
    for pair in saved:
        assert np.allclose(saved[pair].to_numpy(), expected[pair].to_numpy(), atol=1e-9)
        for id_, table in saved[pair].tables.items():
            assert np.allclose(table.to_errors(), expected[pair][id_].to_errors(), atol=1e-9, equal_nan=True)
    assert saved["few", "many"].examples == 360 + 1437
    assert saved["few", "many"].provenance["call"].startswith("netkin tasks few=")
    assert "sketched_cka(buckets=32, kernel=psi, seeds=5)" in result.stdout
    said = " ".join(result.stdout.split())
    assert (
        "warning: values of pairs with the same examples in the same buckets (each task with itself) can't be" in said
    )
    assert Path("tasks.html").stat().st_size > 1000
    assert Path("tasks.png").stat().st_size > 1000
    assert "comparisons" in done(netkin("show tasks.netkin")).stdout
    done(netkin("report tasks.netkin --out again.html"))
    assert Path("again.html").read_text() == Path("tasks.html").read_text()


@pytest.mark.slow
def test_json_holds_all_numbers(netkin):
    text = done(netkin(f"tasks {TASKS} --measure 'sketched_cka(buckets=32)' --seeds 2 --json")).stdout
    document = json.loads(text)
    assert document["kind"] == "comparisons"
    (found,) = [one for one in document["comparisons"] if (one["a"], one["b"]) == ("few", "many")]
    ((_, table),) = found["tables"].items()
    assert np.allclose(table["values"], library(seeds=2)["few", "many"]["sketched_cka"].values, atol=1e-9)


def test_buckets_can_be_independent_for_the_same_data(netkin):
    line = (
        f"tasks one={FIRST},digits:test two={FIRST},digits:test {SHORT} --measure 'sketched_cka(buckets=32)' --seeds 2"
    )
    found = {}
    for more in ("", "--independent-buckets"):
        done(netkin(f"{line} {more} --out t.netkin --overwrite"))
        found[more] = np.diag(nk.load("t.netkin")["one", "two"].to_numpy())
    assert np.allclose(found[""], 1)
    assert (found["--independent-buckets"] < 0.7).all()


def test_examples_are_a_sample_of_each_task(netkin):
    done(netkin(f"tasks {TASKS} --examples 40 --measure 'sketched_cka(buckets=8)' --seeds 1 --out t.netkin"))
    assert {pair: one.examples for pair, one in nk.load("t.netkin").items()} == {
        ("few", "few"): 40, ("few", "many"): 80, ("many", "many"): 40
    }  # fmt: skip


# --- one number for each pair of tasks --------------------------------------------------------------------------------

SCORED = f"tasks few={FIRST},digits:test many={FIRST},digits:train other={SECOND},digits:test --examples 60 --quiet"


def test_tasks_are_compared_by_a_score(netkin):
    result = done(netkin(f"{SCORED} --score fisher_rao --out t.netkin --report t.html --figure t.png"))
    assert "fisher_rao: distance (lower is closer), from 0" in result.stdout
    found = nk.load("t.netkin")
    data = {part: nk.load_data(f"digits:{part}") for part in ("test", "train")}
    drawn = {part: sample(own, 60) for part, own in data.items()}
    first, second = nk.load_model(FIRST), nk.load_model(SECOND)
    tasks = {"few": (first, drawn["test"]), "many": (first, drawn["train"]), "other": (second, drawn["test"])}
    expected = nk.task_similarity(tasks, "fisher_rao", progress=False)
    assert found.to_numpy().tolist() == expected.to_numpy().tolist()
    assert (
        found.data == "digits:test, a sample of 60 of 360 (seed 0) and digits:train, a sample of 60 of 1,437 (seed 0)"
    )


def test_task2vec_of_networks_with_other_weights_is_taken_on_request(netkin):
    line = f"{SCORED} --score task2vec --samples 1 --out t.netkin"
    assert "--independent: the embeddings are of networks with different weights" in refusal(netkin, line)
    done(netkin(f"{line} --independent"))
    assert nk.load("t.netkin")["few", "other"] > nk.load("t.netkin")["few", "many"] > 0


def test_task2vec_takes_random_models_of_one_name_for_one_network(netkin):
    line = (
        "tasks few=netkin:digits,digits:test many=netkin:digits,digits:train --examples 40 --samples 1 --out t.netkin"
    )
    done(netkin(f"{line} --score task2vec"))
    found, model = nk.load("t.netkin"), nk.load_model("netkin:digits", seed=0)
    data = [sample(nk.load_data(f"digits:{part}"), 40) for part in ("test", "train")]
    a, b = (nk.task2vec(model, one, samples=1, progress=False) for one in data)
    assert found["few", "many"] == nk.task2vec_distance(a, b) > 0


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("--score task2vec --layers fc", "--layers does not go with --score."),
        ("--score task2vec --seeds 3", "--seeds does not go with --score."),
        ("--score fisher_rao --samples 3", "--samples needs --score task2vec."),
        ("--independent", "--independent needs --score task2vec."),
        ("--score task3vec", "'task3vec' is not one of"),
    ],
)
def test_options_that_would_do_nothing_are_refused(netkin, rest, said):
    assert said in refusal(netkin, f"{SCORED} {rest}", code=2)


def test_options_of_models_and_data_stay_with_them():
    from netkin.cli.several_models import _parse_task

    assert _parse_task("t=netkin:tiny10,width=4@w.pt,images,size=64:DIR") == (
        "t", ["netkin:tiny10,width=4@w.pt", "images,size=64:DIR"],
    )  # fmt: skip
    assert _parse_task("t=a.b:c,images:x,y=1") == ("t", ["a.b:c", "images:x,y=1"])


# --- files of sketches ------------------------------------------------------------------------------------------------

ASKED = " ".join(f"--measure 'sketched_cka{by}(buckets=32, seed={k})'" for by in ("", "_by_buckets") for k in (0, 1))


def collected(netkin, model, data, out, more=""):
    return done(netkin(f"collect {model} --data {data} {SHORT} {ASKED} --out {out} {more}"))


@pytest.mark.slow
def test_parts_of_a_task_merge_to_the_whole_in_any_order(netkin):
    collected(netkin, SECOND, "digits:train", "whole.stats")
    collected(netkin, FIRST, "digits:test", "few.stats")
    for part in (1, 2, 3):
        collected(netkin, SECOND, "digits:train", f"{part}.stats", f"--part {part}/3 --batch-size {40 + 7 * part}")
    for order in ("123", "312", "231"):
        merged = done(netkin(f"merge {' '.join(f'{k}.stats' for k in order)} --out {order}.stats"))
        assert "1,437 examples (0 to 1,436)" in merged.stdout
    for name in ("whole", "123", "312", "231"):
        done(netkin(f"tasks few=few.stats many={name}.stats --out {name}.netkin"))
    whole, direct = nk.load("whole.netkin"), library(seeds=2)
    assert list(whole) == [("few", "few"), ("few", "many"), ("many", "many")]
    assert whole.measures == direct.measures
    for pair in whole:
        assert np.allclose(whole[pair].to_numpy(), direct[pair].to_numpy(), atol=1e-7)
        for order in ("123", "312", "231"):  # sums of float32 rows
            assert np.allclose(whole[pair].to_numpy(), nk.load(f"{order}.netkin")[pair].to_numpy(), atol=1e-7)


def test_a_file_stands_beside_a_model(netkin):
    collected(netkin, FIRST, "digits:test", "few.stats")
    done(netkin(f"tasks few=few.stats many={SECOND},digits:train {SHORT} --out t.netkin"))
    found, direct = nk.load("t.netkin"), library(seeds=2)
    for pair in direct:
        assert np.allclose(found[pair].to_numpy(), direct[pair].to_numpy(), atol=1e-7)


def test_a_part_that_comes_twice_is_refused(netkin):
    collected(netkin, FIRST, "digits:test", "1.stats", "--part 1/2")
    assert "both hold the examples 0 to 179" in refusal(netkin, "merge 1.stats 1.stats --out all.stats")


def test_missing_parts_are_warned_of(netkin):
    collected(netkin, FIRST, "digits:test", "1.stats", "--part 1/2")
    result = done(netkin("tasks few=1.stats --out t.netkin"))
    assert "180 of 360 examples are present; missing: 180 to 359" in result.stderr
    assert any("180 of 360 examples" in warning for warning in sentences(nk.load("t.netkin")["few", "few"]))


@pytest.mark.parametrize(
    "first, second, words",
    [
        ("beta=0.25", "beta=0.75", "beta=0.25 (these have beta=0.75)"),
        ("buckets=16", "buckets=32", "buckets=16 (these have buckets=32)"),
        ("seed=3", "seed=4", "seed=3 (these have seed=4)"),
    ],
)
def test_files_of_other_sketches_are_refused_with_both_values(netkin, first, second, words):
    for name, one in (("a", first), ("b", second)):
        done(netkin(f"collect {FIRST} --data digits:test {SHORT} --measure 'sketched_cka({one})' --out {name}.stats"))
    said = refusal(netkin, "tasks a=a.stats b=b.stats")
    assert "task 'b': these statistics can't serve 'sketched_cka(" in said
    assert words in said


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task", ["netkin:digits", "a=netkin:digits", "netkin:digits,digits:test", "=m,d", "a=", "a=,d"]
)
def test_what_is_no_task_is_a_misuse(netkin, task):
    said = refusal(netkin, f"tasks {task}", code=2)
    assert "a task is written NAME=MODEL,DATA, as in seen=netkin:digits,digits:train, or NAME=STATISTICS" in said
    assert f"got {task!r}" in said


def test_a_result_is_no_task(netkin, tmp_path):
    line = f"compare {FIRST} {SECOND} --data digits:test --examples 40 --layers relu1"
    assert netkin(f"{line} --out ab.netkin").exit_code == 0
    said = refusal(netkin, f"tasks a={FIRST},digits:test b=ab.netkin")
    assert "'ab.netkin' holds a finished result and no statistics; `netkin report ab.netkin` shows it." in said


def test_two_tasks_of_one_name_are_refused(netkin):
    line = f"tasks a={FIRST},digits:test b={FIRST},digits:test b={SECOND},digits:test"
    assert "two tasks are named 'b'; give each its own name." in refusal(netkin, line)


def test_a_file_that_is_not_there_is_no_task(netkin):
    assert "got 'a=none.stats'" in refusal(netkin, "tasks a=none.stats", code=2)


@pytest.mark.parametrize(
    "measure, words",
    [
        ("sketched_cka(beta=1.0)", "`beta` must be at least 0 and below 1; got 1"),
        ("sketched_cka(buckets=0)", "needs at least 1 bucket"),
        ("cka", "'cka' pairs the examples of two models"),
        ("skeched_cka", "did you mean 'sketched_cka'"),
    ],
)
def test_measures_that_cannot_be_are_refused(netkin, measure, words):
    assert words in refusal(netkin, f"tasks a={FIRST},digits:test {SHORT} --measure '{measure}' --out t.netkin")


def test_data_without_examples_and_a_model_that_crashes_are_refused_by_name(netkin):
    np.savez("empty.npz", images=np.zeros((0, 1, 8, 8), np.float32))
    assert "empty.npz" in refusal(netkin, f"tasks a={FIRST},npz:empty.npz")
    np.savez("wide.npz", images=np.zeros((4, 3, 8, 8), np.float32))
    assert "input[4, 3, 8, 8] to have 1 channels" in refusal(netkin, f"tasks a={FIRST},npz:wide.npz")


def test_a_file_that_holds_something_else_is_not_written_over(netkin):
    Path("t.netkin").write_text("precious")
    assert "--out would write over 't.netkin'" in refusal(netkin, f"tasks {TASKS} --out t.netkin")


@pytest.fixture
def weights(netkin, made):
    """Two networks of the bundled digits, one trained for a moment and one as it was drawn, in the folder at hand."""
    for name in ("trained", "fresh"):
        shutil.copy(made / f"{name}.pt", ".")
    return "netkin:digits@trained.pt netkin:digits@fresh.pt"


def test_one_command_answers_with_a_table_a_file_and_a_page(netkin, weights, tmp_path):
    line = f"recommend {weights} --data digits:test --score knn --score logme --examples 200 --chunks 5"
    result = netkin(f"{line} --out r.netkin --report r.html --figure r.png")
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


def test_the_document_is_json(netkin, weights):
    result = netkin(f"recommend {weights} --data digits:test --score h_score_regularised --no-errors --json")
    document = json.loads(result.stdout)
    assert document["kind"] == "ranking"
    assert document["examples"] == 360
    assert document["ranks"][0]["error"] is None
    assert document["score"] == "h_score_regularised"


def test_a_model_that_does_not_fit_the_data_is_listed_last(netkin, weights):
    result = netkin(f"recommend netkin:tiny10 {weights} --data digits:test --score knn --examples 100 --chunks 3")
    assert result.exit_code == 0, result.stderr
    assert "'netkin:tiny10' has no value by any score: ConvNet could not be run on inputs of type float32" in " ".join(
        result.stdout.split()
    )


@pytest.mark.parametrize(
    ("rest", "code", "said"),
    [
        ("--data digits:test --score knm", 1, "no transfer score named 'knm'; did you mean 'knn'"),
        ("--data nowhere:x", 1, "nowhere"),
        ("--data digits:test --device cuda:9", 1, "there is no device 'cuda:9' here"),
        ("--data digits:test --report r.txt", 2, "a page's name ends in .html"),
        ("--data digits:test --out trained.pt", 1, "trained.pt"),
        ("", 2, "Missing option '--data'"),
    ],
)
def test_what_can_not_be_done_is_told_in_one_sentence(netkin, weights, rest, code, said):
    result = netkin(f"recommend {weights} {rest}")
    assert result.exit_code == code
    assert said in result.stderr


def test_several_files_with_a_ranking_are_refused(netkin, weights):
    for name in ("a", "b"):
        netkin(f"recommend {weights} --data digits:test --score knn --no-errors --out {name}.netkin")
    result = netkin("report a.netkin b.netkin")
    assert result.exit_code == 1
    assert "holds a Ranking, which needs a report of its own" in result.stderr


def test_models_are_called_what_the_command_calls_them(netkin, weights):
    rest = "--data digits:test --score knn --no-errors --examples 50"
    result = netkin(f"recommend good=netkin:digits@trained.pt netkin:digits@fresh.pt {rest} --json")
    assert {row["model"] for row in json.loads(result.stdout)["ranks"]} == {"good", "netkin:digits@fresh.pt"}
    twice = netkin(f"recommend good=netkin:digits@trained.pt good=netkin:digits@fresh.pt {rest}")
    assert (twice.exit_code, twice.stdout) == (2, "")
    assert "names of models must differ; got good, good." in twice.stderr
    over = netkin(f"recommend good=netkin:digits@trained.pt --data digits:test --out trained.pt --overwrite {rest}")
    assert "trained.pt" in over.stderr


def test_models_may_have_names_by_an_option(netkin, weights):
    line = f"recommend {weights} --data digits:test --score knn --examples 50 --no-errors --json"
    ranking = json.loads(netkin(f"{line} --name one --name two").stdout)
    assert {row["model"] for row in ranking["ranks"]} == {"one", "two"}
    refused = netkin(f"{line} --name one")
    assert (refused.exit_code, "once for each model, or not at all; got 1 for 2 models." in refused.stderr) == (2, True)


def test_the_help_names_every_score_and_the_default(netkin):
    said = " ".join(netkin("recommend --help").stdout.split())
    assert all(f" {name}" in said for name in SCORES)
    assert f"by default {DEFAULT}, with {BESIDE} beside it." in said


def test_without_a_named_score_a_linear_probe_stands_beside_the_default(netkin, weights):
    line = f"recommend {weights} --data digits:test --examples 100 --no-errors"
    document = json.loads(netkin(f"{line} --json").stdout)
    assert [document["score"], *document["reliability"]] == [DEFAULT, DEFAULT, BESIDE]
    assert {row["score"] for row in document["ranks"]} == {DEFAULT, BESIDE}
    assert "Kendall's τ = 0.70 ± 0.05 by h_score_regularised, 0.72 ± 0.05 by linear_probe" in " ".join(
        netkin(line).stdout.split()
    )
    named = json.loads(netkin(f"{line} --score knn --json").stdout)
    assert {row["score"] for row in named["ranks"]} == {"knn"}
