"""`netkin classes`."""

import json
from pathlib import Path

import numpy as np
import pytest

import netkin as nk

LINE = "classes netkin:digits --data digits:test --layers relu*"


def test_layers_meet_classes_as_in_the_library(netkin):
    result = netkin(f"{LINE} --class 3 --class 8 --measure cca_mean --measure cka --out classes.netkin --json")
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


def test_folders_of_images_name_the_classes(netkin):
    pillow = pytest.importorskip("PIL.Image", reason="image files need Pillow: pip install 'netkin[images]'")
    pixels = np.random.default_rng(0).integers(256, size=(30, 32, 32, 3), dtype=np.uint8)
    names = [f"{place:02d} {animal}" for place, animal in enumerate(["ant", "bee", "cow", "10", *"efghij"])]
    for place, name in enumerate(names):
        Path("photos", name).mkdir(parents=True)
        for which in range(3):
            pillow.fromarray(pixels[3 * place + which]).save(f"photos/{name}/{which}.png")
    line = "classes netkin:tiny10 --data images:photos --layers conv1 --json"
    columns = {
        "": names,
        "--class '01 bee' --class 2": names[1:3],
        f"--names {','.join('abcdefghij')}": [*"abcdefghij"],
    }
    for more, expected in columns.items():
        result = netkin(f"{line} {more}")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["layers_b"] == expected
    assert nk.load_data("images:photos").part(0, 9).classes == tuple(names)
    Path("flat").mkdir()
    pillow.fromarray(pixels[0]).save("flat/a.png")
    assert nk.load_data("images:flat").classes == ()


@pytest.mark.parametrize(
    "more, words",
    [
        ("--class 12", "`classes` must be a whole number from 0 to 9; got 12."),
        ("--class cat", "no class named 'cat'"),
        ("--names cat,dog", "--names: `names` has 2 names and the model 10 outputs; give one for each."),
        ("--measure ckaa", "no measure named 'ckaa'; did you mean 'cka'"),
    ],
)
def test_refusals_are_one_sentence(netkin, more, words):
    result = netkin(f"{LINE} {more}")
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stdout == ""
