"""`netkin diff`: what it prints and writes, and the conditions under which it fails."""

import json

import pytest
import torch

import netkin as nk

HEAD = "diff netkin:digits@before.pt netkin:digits@after.pt --data digits:test --examples 16"


@pytest.fixture
def run(netkin):
    model = nk.load_model("netkin:digits")
    torch.save(model.state_dict(), "before.pt")
    with torch.no_grad():
        model.get_submodule("conv3").weight[2] *= 1.5
    torch.save(model.state_dict(), "after.pt")
    return netkin


def test_the_module_at_fault_is_printed_and_written(run):
    done = run(f"{HEAD} -o ab.netkin --report ab.html")
    assert done.exit_code == 0, done.stderr
    assert "conv3 (Conv2d) differs by" in done.stdout
    assert nk.load("ab.netkin").first == "conv3"


def test_json_holds_the_verdict(run):
    assert json.loads(run(f"{HEAD} --json").stdout)["first"] == "conv3"


@pytest.mark.parametrize(
    "condition, code", [("ratio>1e9", 0), ("ratio>100", 3), ("standing_out >= 1", 3), ("kl>1e6", 0), ("agreement<2", 3)]
)
def test_a_condition_that_holds_gives_exit_code_3(run, condition, code):
    done = run(f"{HEAD} --fail-if {condition!r}")
    assert done.exit_code == code
    assert ("holds" in done.stderr) == (code == 3)


@pytest.mark.parametrize("condition", ["kl", "kl=1", "colour>3", "kl>high", "kl>1e"])
def test_what_is_no_condition_is_wrong_usage(run, condition):
    assert run(f"{HEAD} --fail-if {condition!r}").exit_code == 2


def test_modules_are_matched_by_the_names_that_are_typed(run):
    assert run(f"{HEAD} --match conv3=conv3").exit_code == 0
    assert run(f"{HEAD} --match conv3").exit_code == 2
    refused = run(f"{HEAD} --match conv9=conv3")
    assert (refused.exit_code, "--match" in refused.stderr) == (1, True)


def test_the_plan_runs_no_comparison(run):
    done = run(f"{HEAD} --plan --json")
    assert json.loads(done.stdout)["modules"] == 14
    assert "reference" in run(f"{HEAD} --plan").stdout


def test_models_are_served_as_the_option_says(run):
    done = run("diff netkin:digits netkin:digits --data digits:test --serve sideways")
    assert done.exit_code == 2
    refused = run(f"{HEAD} --serve decode")
    assert (refused.exit_code, "--serve" in refused.stderr) == (1, True)
