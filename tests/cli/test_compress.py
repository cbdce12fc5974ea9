"""`netkin compress` on the command line."""

import json

import pytest
import torch

import netkin as nk

DIGITS = "compress netkin:digits --data digits:test --layer conv4 --layer fc"


def test_the_table_is_that_of_the_library_and_the_file_can_be_loaded(netkin):
    result = netkin(f"{DIGITS} --k 8 --from-the-top --orthogonal --save small.netkin")
    random = "warning: 'netkin:digits' was given no weights, so they are random, drawn from seed 0.\n"
    assert (result.exit_code, result.stderr) == (0, f"{random}saved to small.netkin\n")
    model, data = nk.load_model("netkin:digits"), nk.load_data("digits:test")
    same = {"k": 8, "order": "from_the_top", "projection": "orthogonal"}
    small = nk.compress(model, ["conv4", "fc"], data=data, **same)
    assert result.stdout == f"{small.compression}\n"
    images = next(iter(data))[0]
    assert torch.equal(nk.load_compressed("small.netkin", model)(images), small(images))


def test_shares_and_json(netkin):
    shown = json.loads(netkin(f"{DIGITS} --k 0.25 --examples 128 --test digits:train --json").stdout)
    assert [row["kept"] for row in shown["layers"]] == [8, 16]
    assert (shown["examples"], shown["against"]) == (128, "logits")
    assert shown["data"] == "digits:test, a sample of 128 of 360 (seed 0)"


def test_against_another_model(netkin):
    result = netkin(f"{DIGITS} --variance 0.5 --against netkin:digits")
    assert result.stdout.startswith(
        "2 layers compressed against another ConvNet (least squares, at once, 360 examples)"
    )


@pytest.mark.parametrize(
    "line, code, message",
    [
        ("compress netkin:digits --data digits --layer fc", 1, "pass one of `k`, `variance` and `accuracy_drop`"),
        ("compress netkin:digits --data digits --layer con4 --k 2", 1, "no layer named 'con4'; did you mean 'conv4'?"),
        ("compress netkin:digits --data digits --layer fc --k some", 2, "'some' is neither a whole number nor a share"),
        (
            "compress netkin:tiny10 --data digits --layer fc --k 2",
            1,
            "could not be run on inputs of shape (128, 1, 8, 8)",
        ),
        ("compress netkin:digits --data digits --layer fc --k 2 --save no/x", 2, "there is no folder 'no'"),
    ],
)
def test_refusals_are_one_sentence(netkin, line, code, message):
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
