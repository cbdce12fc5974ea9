"""`netkin stitch` on the command line."""

import json
from importlib import import_module

import numpy as np
import pytest
import torch

import netkin as nk
from netkin import results
from netkin.applications.stitching import sweep
from netkin.applications.stitching.evaluating import SCORES, USUAL
from netkin.cli.stitch import stitch
from netkin.sources.batches import sample

NETS = """
from netkin.training import untrained_digits_net


def one():
    return untrained_digits_net(1)


def two():
    return untrained_digits_net(2)


def three():
    return untrained_digits_net(3)
"""
TEST = "--test digits:test --test-examples 90"
DATA = f"--data digits:train --examples 200 {TEST}"
AB = f"stitch nk_stitch_nets:one nk_stitch_nets:two {DATA}"


@pytest.fixture
def netkin(netkin, tmp_path, monkeypatch):
    (tmp_path / "nk_stitch_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    return netkin


def test_the_numbers_are_those_of_the_library(netkin):
    result = netkin(f"{AB} --all --layers relu3 --layers fc --method least_squares --method procrustes --out ab.netkin")
    assert (result.exit_code, result.stderr) == (0, "saved to ab.netkin\n")
    a, b = (nk.load_model(f"nk_stitch_nets:{name}") for name in ("one", "two"))
    train, test = sample(nk.load_data("digits:train"), 200), sample(nk.load_data("digits:test"), 90)
    saved = results.load("ab.netkin")
    assert (saved.a, saved.b) == ("nk_stitch_nets:one", "nk_stitch_nets:two")
    for how in ("least_squares", "procrustes"):
        alone = nk.stitch(a, "relu3", b, "relu3", train, how, test).evaluation
        assert saved[f"agreement(method={how})"]["relu3", "relu3"] == pytest.approx(alone.agreement, abs=0.006)
        assert f"{saved[f'relative_accuracy(method={how})']['fc', 'fc']:.2f}" in result.stdout
    lines = result.stdout.splitlines()
    assert lines[0] == "nk_stitch_nets:one stitched into nk_stitch_nets:two, layer by layer"
    place = next(i for i, line in enumerate(lines) if line.startswith("relative_accuracy(method=procrustes)"))
    head = next(i for i, line in enumerate(lines[place:], place) if line.split() == ["least_squares", "procrustes"])
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["relu3", "fc"]


def test_one_layer_into_another(netkin):
    document = json.loads(netkin(f"{AB} --at relu2 --into relu3 --at relu3 --into relu3 --json").stdout)
    assert (document["layers_a"], document["layers_b"]) == (["relu2", "relu3"], ["relu3"])
    table = document["tables"]["relative_accuracy(method=least_squares)"]
    assert all(row[0] >= 0 for row in table["values"])
    assert table["quantity"]["bounds"] == [0, None]
    assert document["provenance"]["pairs"] == "2 listed"
    assert document["provenance"]["call"] == f"netkin {AB} --at relu2 --into relu3 --at relu3 --into relu3 --json"


def test_every_layer_into_every_layer_with_the_reasons_of_holes(netkin):
    result = netkin(f"{AB} --all --matrix --layers relu4 --layers fc --score agreement")
    assert result.exit_code == 0
    assert "agreement(method=least_squares)" in result.stdout
    assert "rows have no positions, so rows of width 10 can't be stitched into maps" in " ".join(result.stdout.split())


def test_several_models_give_a_mean_and_a_spread_and_one_page(netkin, tmp_path):
    line = f"{AB.replace('two ', 'two nk_stitch_nets:three ')} --all --layers relu4 --out many.netkin --report m.html"
    result = netkin(line)
    assert result.exit_code == 0
    assert "standard deviation over 6 pairs of models" in result.stdout
    assert len(results.load("many.netkin")) == 6
    page = (tmp_path / "m.html").read_text()
    assert "Layer by layer, over all pairs of models" in page
    assert "What a stitched network can do" in page


def test_a_warning_stands_below_the_tables(netkin):
    result = netkin(f"{AB} --at fc --method identity".replace(TEST, ""))
    assert "warning: the stitches are evaluated on the data on which they were fitted" in (
        " ".join(result.stdout.split())
    )


def test_the_warning_names_the_option_that_mends_it(netkin):
    result = netkin(f"{AB} --at fc --method identity".replace(TEST, ""))
    assert "give other data as `test`." in " ".join(result.stdout.split())


def test_without_test_data_the_examples_of_the_fitting_judge(netkin):
    line = f"{AB} --at fc --json".replace(TEST, "")
    assert json.loads(netkin(line).stdout)["examples"] == 200
    result = netkin(f"{line} --test-examples 50")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--test-examples needs --test; without it, stitches are evaluated on --examples." in result.stderr


def test_samples_are_named_in_the_provenance(netkin):
    document = json.loads(netkin(f"{AB} --at fc --json --test-examples 50 --balanced --seed 2").stdout)
    assert document["examples"] == 50
    assert document["data"] == "digits:test, a balanced sample of 50 of 360 (seed 2)"
    assert document["provenance"]["fitted on"] == "digits:train, a balanced sample of 200 of 1,437 (seed 2)"


def test_each_model_may_have_its_own_layers(netkin):
    document = json.loads(netkin(f"{AB} --all --matrix --layers a:relu3 --layers 'b:relu[34]' --json").stdout)
    assert (document["layers_a"], document["layers_b"]) == (["relu3"], ["relu3", "relu4"])
    document = json.loads(netkin(f"{AB} --all --layers b:fc --json").stdout)
    assert (len(document["layers_a"]) > 1, document["layers_b"]) == (True, ["fc"])


def test_models_may_be_given_names(netkin):
    document = json.loads(netkin(f"{AB} --at fc --name one --name two --json").stdout)
    assert (document["a"], document["b"]) == ("one", "two")


def test_the_map_of_one_stitch_is_written(netkin):
    result = netkin(f"{AB} --at relu2 --into relu3 --method procrustes --map map.netkin")
    assert (result.exit_code, result.stderr) == (0, "map in map.netkin\n")
    a, b = (nk.load_model(f"nk_stitch_nets:{name}") for name in ("one", "two"))
    found = nk.load_stitch("map.netkin", a, b)
    alone = nk.stitch(a, "relu2", b, "relu3", sample(nk.load_data("digits:train"), 200), "procrustes")
    assert (found.layers, found.method) == (("relu2", "relu3"), "procrustes")
    torch.testing.assert_close(found.map.weight, alone.map.weight)
    assert f"{found.relative_accuracy:.2f}" in result.stdout


@pytest.mark.slow
def test_a_map_is_written_over_nothing_unless_that_is_allowed(netkin, tmp_path):
    netkin(f"{AB} --at relu3 --out sweep.netkin --map map.netkin")
    for name in ("sweep", "map"):
        before = (tmp_path / f"{name}.netkin").read_bytes()
        result = netkin(f"{AB} --at relu3 --map {name}.netkin")
        assert f"--map would write over '{name}.netkin'; choose another name, or give --overwrite." in result.stderr
        assert (tmp_path / f"{name}.netkin").read_bytes() == before
    assert netkin(f"{AB} --at relu3 --map map.netkin --overwrite").exit_code == 0


def test_one_file_for_two_results_is_refused(netkin, tmp_path):
    result = netkin(f"{AB} --at relu3 --out same.netkin --map same.netkin")
    assert "--out and --map both name same.netkin; give each its own file." in result.stderr
    assert not (tmp_path / "same.netkin").exists()


def test_no_map_is_written_where_there_is_no_stitch(netkin, tmp_path):
    result = netkin(f"{AB} --at fc --into relu1 --map map.netkin")
    told = "no map in map.netkin: there is no stitch\nno stitch has a value; the reasons stand below the table\n"
    assert (result.exit_code, result.stderr) == (1, told)
    assert "rows have no positions" in " ".join(result.stdout.split())
    assert not (tmp_path / "map.netkin").exists()


@pytest.mark.slow
def test_a_reader_who_stops_reading_leaves_all_files(netkin, tmp_path, monkeypatch):
    def broken(*given):
        raise BrokenPipeError

    monkeypatch.setattr(import_module("netkin.cli.stitch"), "_as_text", broken)
    result = netkin(f"{AB} --at fc --report p.html --figure p.png --map map.netkin")
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["map", "report:", "figure"]
    assert all((tmp_path / name).stat().st_size for name in ("p.html", "p.png", "map.netkin"))


def test_a_file_with_another_sweep_is_refused_and_stays(netkin, tmp_path):
    whole = AB.replace(" --test-examples 90", "")
    netkin(f"{whole} --at fc --out c.netkin")
    before = (tmp_path / "c.netkin").read_bytes()
    result = netkin(f"{whole} --at fc --out c.netkin".replace("digits:test", "digits:train"))
    assert result.exit_code == 1
    assert "'c.netkin.job' holds a sweep that differs in test data (" in result.stderr
    assert (tmp_path / "c.netkin").read_bytes() == before


def test_the_scores_of_the_help_are_those_of_the_library():
    (option,) = [one for one in stitch.params if one.name == "scores"]
    assert f"by default {', '.join(USUAL[:-1])} and {USUAL[-1]}." in option.help
    assert all(score in option.help for score in SCORES)


def test_the_same_model_twice_is_told_apart(netkin):
    document = json.loads(netkin(f"stitch netkin:digits netkin:digits {DATA} --at fc --json").stdout)
    assert (document["a"], document["b"]) == ("netkin:digits (1)", "netkin:digits (2)")
    assert document["tables"]["agreement(method=least_squares)"]["values"] == [[1.0]]


@pytest.mark.slow
def test_an_interrupted_command_shows_what_is_finished_and_goes_on(netkin, monkeypatch):
    line = f'{AB} --all --layers relu4 --layers fc --method least_squares --method "task_loss(steps=1)" --out ab.netkin'

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(sweep, "train_stitch", interrupted)
        result = netkin(line)
    assert result.exit_code == 130
    assert "interrupted: some stitches were not reached" in " ".join(result.stdout.split())
    assert (
        "netkin: interrupted, with 2 of 4 stitches done in ab.netkin; run the same command again to resume.\n"
        in result.stderr
    )
    again = netkin(line)
    assert again.exit_code == 0
    assert results.load("ab.netkin").complete


@pytest.mark.parametrize(
    "options, words",
    [
        ("--all --method least_square", "no matching method named 'least_square'; did you mean 'least_squares'?"),
        ("--at reluu1", "did you mean 'relu1'?"),
        ("--all --score agreements", "no score named 'agreements'; did you mean 'agreement'?"),
        ("--at relu1 --method 'task_loss(epoch=1)'", "'task_loss' has no option 'epoch'; did you mean 'epochs'?"),
    ],
)
def test_what_is_unknown_is_refused_in_one_sentence(netkin, options, words):
    result = netkin(f"{AB} {options}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("netkin: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_a_model_that_crashes_ends_the_command_in_one_sentence(netkin):
    result = netkin("stitch netkin:tiny10 netkin:tiny10 --at relu1 --data digits:train")
    assert result.exit_code == 1
    assert "ConvNet could not be run on inputs of type float32 and shape (4, 1, 8, 8) (RuntimeError" in result.stderr


def test_test_data_that_do_not_fit_are_refused_in_one_sentence(netkin, tmp_path):
    np.savez(tmp_path / "large.npz", inputs=np.zeros((4, 3, 8, 8), np.float32))
    result = netkin("stitch netkin:digits netkin:digits --at fc --data digits:train --test npz:large.npz")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "expected input[4, 3, 8, 8] to have 1 channels" in result.stderr


@pytest.mark.parametrize(
    "options, words",
    [
        ("", "give either --all, or --at LAYER."),
        ("--all --at relu1", "give either --all, or --at LAYER."),
        ("--at relu1 --matrix", "--matrix needs --all."),
        ("--at relu1 --layers fc", "--layers needs --all."),
        ("--at relu1 --at relu2 --into relu3", "each --at has one --into, or none has; got 2 and 1."),
        ("--at relu1 --layers b:fc", "--layers needs --all."),
        ("--all --name one", "--name is given once for each model, or not at all; got 1 for 2 models."),
        ("--all --name one --name one", "names of models must differ; got one, one."),
        ("--all --map m.netkin", "--map writes one stitch: of two models, at one --at, by one --method."),
        ("--at fc --method ridge --method procrustes --map m.netkin", "--map writes one stitch"),
        ("--all --report x.pdf", "a page's name ends in .html or .htm; got 'x.pdf'."),
        ("--all --figure x.gif", "a figure's name ends in .png or .svg or .pdf; got 'x.gif'."),
        ("--all --out nowhere/x.netkin", "the folder 'nowhere' does not exist."),
    ],
)
def test_options_that_make_no_sense_are_a_misuse(netkin, options, words):
    result = netkin(f"{AB} {options}")
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_layers_of_one_model_among_three_are_a_misuse(netkin):
    result = netkin(f"{AB.replace('two ', 'two nk_stitch_nets:three ')} --all --layers nk_stitch_nets:one:fc")
    assert result.exit_code == 2
    assert "layers of one model can be chosen among two models; got 3." in " ".join(result.stderr.split())


def test_one_model_alone_is_a_misuse(netkin):
    result = netkin(f"stitch netkin:digits {DATA} --all")
    assert result.exit_code == 2
    assert "to stitch a model with itself, name it twice." in " ".join(result.stderr.split())


@pytest.mark.slow
def test_test_data_that_are_the_fitting_data_are_told(netkin):
    line = f"{AB} --at fc".replace(f"--examples 200 {TEST}", "--test {}")
    told = "the stitches are evaluated on the data on which they were fitted"
    assert told in " ".join(netkin(line.format("digits:train")).stdout.split())
    assert told not in " ".join(netkin(line.format("digits:test")).stdout.split())


@pytest.mark.slow
def test_test_data_that_overlap_the_fitting_data_are_told_with_their_number(netkin):
    line = f"{AB} --at fc".replace(f"--examples 200 {TEST}", "--test digits:train {}")
    some = " ".join(netkin(line.format("--examples 300")).stdout.split())
    assert "300 of the 1,437 test examples are also among the 300 of `data`, which flatters the result" in some
    assert "also among" not in " ".join(netkin(line.format("")).stdout.split())  # the same data: told in other words
    assert "also among" not in " ".join(netkin(f"{AB} --at fc").stdout.split())


def test_what_a_sweep_would_take_is_explained(netkin, tmp_path):
    line = f"{AB} --all --matrix --layers relu1 --layers fc --method ridge --method 'task_loss(epochs=3)' --plan"
    result = netkin(f"{line} --out ab.netkin")
    assert (result.exit_code, result.stderr) == (0, "")
    assert not (tmp_path / "ab.netkin").exists()
    text = result.stdout
    assert "into 'nk_stitch_nets:two': 3 of 4 pairs of layers can be joined" in text
    assert "1 can't be joined: rows have no positions" in text
    assert "method ridge: read from the sums" in text
    assert "method task_loss(epochs=3): trained from least_squares, 3 epochs" in text
    plan = json.loads(netkin(f"{line} --json").stdout)
    test, batches = 90, (2, 1)  # of 128
    assert (plan["pairs"], plan["joined"], plan["examples"]) == (4, 3, 2 * 200 + (4 + 3 * 2) * test)
    assert plan["passes"] == 2 * batches[0] + (4 + 3 * 2) * batches[1]
    assert list(plan["refused"]) == ["fc into relu1"]
    assert netkin(f"{AB} --at fc --into relu1 --plan").exit_code == 1
    three = netkin(f"{AB.replace('two ', 'two nk_stitch_nets:three ')} --all --plan")
    assert (three.exit_code, "--plan is for two models; got 3." in three.stderr) == (2, True)


def test_maps_are_read_from_a_file_of_statistics(netkin):
    layers = "--layers relu3 --shape positions"
    models = "nk_stitch_nets:one nk_stitch_nets:two"
    assert netkin(f"collect {models} --data digits:train --examples 200 {layers} --out all.stats").exit_code == 0
    found = [
        json.loads(netkin(f"stitch {models} --at relu3 --data {data} --test digits:test --json").stdout)
        for data in ("all.stats", "digits:train --examples 200")
    ]
    values = [one["tables"]["agreement(method=least_squares)"]["values"][0][0] for one in found]
    assert values[0] == pytest.approx(values[1], abs=0.01)
    assert found[0]["provenance"]["fitting examples"] == "200"
    plan = netkin(f"stitch {models} --at relu3 --data all.stats --test digits:test --plan").stdout
    assert "method least_squares: read from the saved statistics" in plan
    assert "  0 on each batch for the maps; 4 on each of the test for similarities and evaluation" in plan
    alone = netkin(f"stitch {models} --at relu3 --data all.stats")
    assert alone.exit_code == 2
    assert "is a file of statistics, which serves two models, needs --test" in " ".join(alone.stderr.split())
