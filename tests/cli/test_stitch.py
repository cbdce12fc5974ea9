"""`netkin stitch` on the command line."""

import json

import pytest

import netkin as nk
from netkin import results
from netkin.applications.stitching import sweep

NETS = """
from netkin.sources.training import untrained_digits_net


def one():
    return untrained_digits_net(1)


def two():
    return untrained_digits_net(2)


def three():
    return untrained_digits_net(3)
"""
DATA = "--data digits:train --test digits:test --examples 200"
AB = f"stitch nk_stitch_nets:one nk_stitch_nets:two {DATA}"


@pytest.fixture
def netkin(netkin, tmp_path, monkeypatch):
    (tmp_path / "nk_stitch_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    return netkin


def test_the_numbers_are_those_of_the_library(netkin):
    result = netkin(f"{AB} --all --layers relu3 --layers fc --how least_squares --how procrustes --save ab.netkin")
    assert (result.exit_code, result.stderr) == (0, "saved to ab.netkin\n")
    a, b = (nk.load_model(f"nk_stitch_nets:{name}") for name in ("one", "two"))
    train, test = nk.load_data("digits:train"), nk.load_data("digits:test")
    saved = results.load("ab.netkin")
    assert (saved.a, saved.b) == ("nk_stitch_nets:one", "nk_stitch_nets:two")
    for how in ("least_squares", "procrustes"):
        alone = nk.stitch(a, "relu3", b, "relu3", train, how, test, examples=200).evaluation
        assert saved[f"agreement(how={how})"]["relu3", "relu3"] == pytest.approx(alone.agreement, abs=0.006)
        assert f"{saved[f'relative_accuracy(how={how})']['fc', 'fc']:.2f}" in result.stdout
    lines = result.stdout.splitlines()
    table = lines[lines.index("relative_accuracy") :]
    assert table[1].split() == ["least_squares", "procrustes"]
    assert [line.split()[0] for line in table[2:4]] == ["relu3", "fc"]


def test_one_layer_into_another(netkin):
    document = json.loads(netkin(f"{AB} --at relu2 --into relu3 --at relu3 --into relu3 --json").stdout)
    assert (document["layers_a"], document["layers_b"]) == (["relu2", "relu3"], ["relu3"])
    table = document["tables"]["relative_accuracy(how=least_squares)"]
    assert all(row[0] >= 0 for row in table["values"])
    assert table["bounds"] == [0, None]
    assert document["provenance"]["pairs"] == "2 listed"


def test_every_layer_into_every_layer_with_the_reasons_of_holes(netkin):
    result = netkin(f"{AB} --all --matrix --layers relu4 --layers fc --score agreement")
    assert result.exit_code == 0
    assert "agreement(how=least_squares)" in result.stdout
    assert "rows have no places, so rows of width 10 can't be stitched into maps" in " ".join(result.stdout.split())


def test_several_models_give_a_mean_and_a_spread_and_one_page(netkin, tmp_path):
    line = f"{AB.replace('two ', 'two nk_stitch_nets:three ')} --all --layers relu4 --save many.netkin --report m.html"
    result = netkin(line)
    assert result.exit_code == 0
    assert "mean ± standard deviation over 6 pairs of models" in result.stdout
    assert len(results.load("many.netkin")) == 6
    page = (tmp_path / "m.html").read_text()
    assert "Layer by layer, over all pairs of models" in page
    assert "What a stitched network can do" in page


def test_a_warning_stands_below_the_tables(netkin):
    result = netkin(f"{AB} --at fc --how identity".replace("--test digits:test", ""))
    assert "warning: nk_stitch_nets:one into nk_stitch_nets:two: the stitches are judged on the very data" in (
        " ".join(result.stdout.split())
    )


def test_the_same_model_twice_is_told_apart(netkin):
    document = json.loads(netkin(f"stitch netkin:digits netkin:digits {DATA} --at fc --json").stdout)
    assert (document["a"], document["b"]) == ("netkin:digits (1)", "netkin:digits (2)")
    assert document["tables"]["agreement(how=least_squares)"]["values"] == [[1.0]]


def test_an_interrupted_command_shows_what_is_finished_and_goes_on(netkin, monkeypatch):
    line = f'{AB} --all --layers relu4 --layers fc --how least_squares --how "task_loss(steps=1)" --save ab.netkin'

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(sweep, "trained", interrupted)
        result = netkin(line)
    assert result.exit_code == 130
    assert "interrupted: some stitches were not reached" in " ".join(result.stdout.split())
    assert result.stderr.endswith("netkin: interrupted.\n")
    again = netkin(line)
    assert again.exit_code == 0
    assert results.load("ab.netkin").complete


@pytest.mark.parametrize(
    "options, words",
    [
        ("--all --how least_square", "no matching method named 'least_square'; did you mean 'least_squares'?"),
        ("--at reluu1", "did you mean 'relu1'?"),
        ("--all --score agreements", "no score named 'agreements'; did you mean 'agreement'?"),
        ("--at relu1 --how 'task_loss(epoch=1)'", "'task_loss' has no option 'epoch'; did you mean 'epochs'?"),
    ],
)
def test_what_is_unknown_is_refused_in_one_sentence(netkin, options, words):
    result = netkin(f"{AB} {options}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("netkin: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_a_model_that_crashes_is_refused_in_one_sentence(netkin):
    result = netkin("stitch netkin:tiny10 netkin:tiny10 --at relu1 --data digits:train")
    assert result.exit_code == 1
    assert "'netkin:tiny10' could not be run on inputs of shape" in result.stderr


@pytest.mark.parametrize(
    "options, words",
    [
        ("", "say either --all, or --at LAYER for one."),
        ("--all --at relu1", "say either --all, or --at LAYER for one."),
        ("--at relu1 --matrix", "--matrix goes with --all."),
        ("--at relu1 --layers fc", "--layers goes with --all."),
        ("--at relu1 --at relu2 --into relu3", "each --at has one --into, or none has; got 2 and 1."),
        ("--all --save nowhere/x.netkin", "there is no folder 'nowhere' to write into."),
    ],
)
def test_options_that_make_no_sense_are_a_misuse(netkin, options, words):
    result = netkin(f"{AB} {options}")
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_one_model_alone_is_a_misuse(netkin):
    result = netkin(f"stitch netkin:digits {DATA} --all")
    assert result.exit_code == 2
    assert "to stitch a model with itself name it twice." in " ".join(result.stderr.split())
