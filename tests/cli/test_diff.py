"""`netkin diff`: what it prints and writes, and the conditions under which it fails."""

import json

import pytest
import torch

import netkin as nk
from recording_worlds import as_vllm, language, token_batches

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


def test_recorded_states_need_no_data_where_they_hold_the_tokens(netkin, monkeypatch, tmp_path):
    other = language()
    other.blocks[1].scale = 1.3
    as_vllm(other, token_batches(1), tmp_path / "states")
    done = netkin("diff recording_worlds:language states --report ab.html -o ab.netkin --fail-if 'standing_out>0'")
    assert done.exit_code == 3, done.stderr
    assert "blocks.1 (Mixer) differs by" in done.stdout
    assert nk.load("ab.netkin").first == "blocks.1"
    some = netkin("diff recording_worlds:language states,layers=0-4 --json")
    assert json.loads(some.stdout)["first"] == "blocks.1"
    refused = netkin("diff recording_worlds:language absent/")
    assert (refused.exit_code, "found no file or folder 'absent/'" in refused.stderr) == (1, True)


def test_log_probabilities_are_a_side(netkin, tmp_path):
    record = {"token_ids": [3, 1, 4, 1], "logprobs": [None, -50.0, -50.0, -50.0]}
    (tmp_path / "answers.jsonl").write_text(json.dumps(record))
    done = netkin("diff recording_worlds:language answers.jsonl --fail-if 'logprob>5'")
    assert (done.exit_code, "part at position 1 of sequence 0" in " ".join(done.stdout.split())) == (3, True)
    assert netkin("diff recording_worlds:language answers.jsonl --fail-if 'kl>0'").exit_code == 2


def test_data_are_needed_for_two_models(run):
    done = run("diff netkin:digits@before.pt netkin:digits@after.pt")
    assert (done.exit_code, "--data is missing" in done.stderr) == (2, True)
    (done,) = [run("diff netkin:digits@before.pt states.npz --plan")]
    assert (done.exit_code, "--plan is for two models" in done.stderr) == (2, True)


def test_models_are_served_as_the_option_says(run):
    done = run("diff netkin:digits netkin:digits --data digits:test --serve sideways")
    assert done.exit_code == 2
    refused = run(f"{HEAD} --serve decode")
    assert (refused.exit_code, "--serve" in refused.stderr) == (1, True)
