"""`netkin sensitivity`."""

import json
from pathlib import Path

import numpy as np
import pytest

import netkin as nk

LINE = "sensitivity netkin:digits --data digits:test --layers relu*"


def test_layers_meet_classes_as_in_the_library(netkin):
    result = netkin(f"{LINE} --class 3 --class 8 --measure cca_mean --measure cka --save classes.netkin --json")
    assert result.exit_code == 0, result.output
    saved = nk.load("classes.netkin")
    assert json.loads(result.stdout) == nk.document(saved)
    assert saved.a == "netkin:digits"
    assert saved.layers_b == ("3", "8")
    expected = nk.class_sensitivity(
        nk.load_model("netkin:digits"), nk.load_data("digits:test"), [3, 8], ["cca_mean", "cka"], layers="relu*"
    )
    for measure in saved.measures:
        np.testing.assert_allclose(saved[measure].values, expected[measure].values, atol=1e-6)


def test_classes_go_by_names(netkin):
    names = "zero,one,two,three,four,five,six,seven,eight,nine"
    result = netkin(f"{LINE} --class three --class 8 --names {names} --report classes.html")
    assert result.exit_code == 0, result.output
    assert "three  eight" in " ".join(result.stdout.split("\n")).replace("   ", "  ")
    page = Path("classes.html").read_text(encoding="utf-8")
    assert "netkin:digits" in page
    assert "eight" in page


@pytest.mark.parametrize(
    "more, words",
    [
        ("--class 12", "no class 12: the model has 10 outputs, 0 to 9."),
        ("--class cat", "no class named 'cat'"),
        ("--names cat,dog", "--names has 2 names and the model 10 outputs; give one for each."),
        ("--measure ckaa", "no measure named 'ckaa'; did you mean 'cka'"),
    ],
)
def test_refusals_are_one_sentence(netkin, more, words):
    result = netkin(f"{LINE} {more}")
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stdout == ""
