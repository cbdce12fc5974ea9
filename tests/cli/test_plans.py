"""`--plan`: every command that runs models says what it would take, as the library does, and does nothing of it."""

import json

import pytest

import netkin as nk

COMMANDS = {
    "recommend": "recommend a=netkin:digits b=netkin:digits --data digits:test --examples 50",
    "tasks": "tasks a=netkin:digits,digits:test b=netkin:digits,digits:train --layers relu* --examples 20 --seeds 1",
    "scores of tasks": "tasks a=netkin:digits,digits:test b=netkin:digits,digits:train --score fisher_rao",
    "compress": "compress netkin:digits --layer fc --k 0.5 --data digits:test --out small.netkin",
    "sparsity": "sparsity netkin:digits --data digits:test",
    "classes": "classes netkin:digits --data digits:test",
    "federate": "federate netkin:digits --data digits:test --classes 2 --rounds 3 --out users.netkin",
    "continual": "continual netkin:digits --data digits:train --test digits:test --recipe epochs=1 --out tasks",
    "train": "train netkin:digits --data digits:train --test digits:test --epochs 2 --out digits.pt",
}


@pytest.mark.parametrize("line", COMMANDS.values(), ids=COMMANDS)
def test_a_plan_is_printed_and_nothing_is_written(netkin, tmp_path, line):
    printed = netkin(f"{line} --plan")
    assert "examples forward" in printed.stdout
    assert printed.exit_code == 0
    assert not list(tmp_path.iterdir())


def test_a_plan_is_that_of_the_library(netkin):
    line = "train netkin:digits --data digits:train --test digits:test --epochs 2 --batch 100"
    plan = nk.explain_train(nk.load_model("netkin:digits"), "digits:train", test="digits:test", epochs=2, batch=100)
    assert netkin(f"{line} --plan").stdout == f"{plan}\n"
    told = json.loads(netkin(f"{line} --plan --json").stdout)
    assert [part["steps"] for part in told["work"]] == [30, 0]


def test_a_plan_that_would_be_refused_says_so_and_exits_with_1(netkin):
    printed = netkin("classes netkin:digits --data digits:test --memory 1KB --plan")
    assert printed.exit_code == 1
    assert "would be refused: " in printed.stdout
