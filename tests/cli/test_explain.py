import json

from netkin.comparing import explain
from netkin.sources import load_data, load_model

DIGITS = "explain netkin:digits --data digits:test"


def test_the_plan_is_that_of_the_library(netkin):
    plan = explain(load_model("netkin:digits"), data=load_data("digits:test"), memory=10**9)
    shown = json.loads(netkin(f"{DIGITS} --memory 1GB --json").stdout)
    assert (shown["pairs"], shown["bytes"], shown["passes"]) == (plan.pairs, plan.bytes, 3)
    assert list(shown["widths"]["netkin:digits"]) == list(plan.widths["a"])


def test_the_text_tells_cost_and_memory(netkin):
    result = netkin(f'{DIGITS} --layers "relu*" --measure cka --measure cka_rbf')
    assert result.exit_code == 0
    for words in ("4 layers, the widest", "pairs: 16", "examples: 360, in 3 batches of up to 128", "forward passes: 3,",
                  "cka_rbf: Rows, a sample of at most 2,048", "memory: ", " multiply-adds for statistics"):  # fmt: skip
        assert words in result.stdout


def test_what_would_be_refused_is_said_with_exit_code_1(netkin):
    line = "netkin:digits --data digits:test --shape flatten --memory 1MB"
    plan, refusal = netkin(f"explain {line}"), netkin(f"compare {line}")
    assert plan.exit_code == refusal.exit_code == 1
    assert plan.stdout.splitlines()[-1] == refusal.stderr.strip().replace("netkin: ", "would be refused: ")
    assert json.loads(netkin(f"explain {line} --json").stdout)["refused"] in refusal.stderr


def test_an_unknown_name_is_one_sentence_as_in_compare(netkin):
    result = netkin(f"{DIGITS} --measure ckaa")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "did you mean 'cka'?" in result.stderr
