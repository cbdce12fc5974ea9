"""`netkin train`: what it prints and writes, and how it goes on."""

import json
from pathlib import Path

import pytest
import torch

import netkin as nk
from netkin.cli.options import KNOWN
from netkin.training import Recipe
from netkin.training.loop import Loop
from netkin.training.recipe import OPTIMIZERS, SCHEDULES

LINE = "train netkin:digits --data digits:train --optimizer adam --lr 0.003 --epochs 2"


def facts(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_model_is_trained_as_by_the_library_and_read_by_other_commands(netkin):
    result = netkin(f"{LINE} --test digits:test --seed 3 --out digits.pt")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("netkin:digits on digits:train, 1,437 examples: epochs=2, optimizer='adam'")
    assert result.stdout.splitlines()[2].split() == ["epoch", "step", "loss", "test", "loss", "accuracy"]
    assert "saved to digits.pt" in result.stderr
    model = nk.load_model("netkin:digits", seed=3)
    history = nk.train(
        model, "digits:train", test="digits:test", epochs=2, optimizer="adam", lr=0.003, seed=3, progress=False
    )
    saved = nk.load_model("netkin:digits@digits.pt").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    assert result.stdout.splitlines()[-1].endswith(f"{history[-1]['accuracy']:.4f}")
    assert netkin("compare netkin:digits@digits.pt --data digits:test --layers fc").exit_code == 0


@pytest.mark.slow
def test_the_same_command_goes_on_and_another_one_is_refused(netkin):
    first = facts(netkin(f"{LINE} --out digits.safetensors --json"))
    assert nk.jobs.read("digits.safetensors").condition == "done"
    assert facts(netkin(f"{LINE} --out digits.safetensors --json")) == first  # with the seconds of the first
    other = netkin(f"{LINE} --out digits.safetensors --seed 1")
    assert other.exit_code == 1
    assert "holds a training that differs in seed" in other.stderr
    assert "--overwrite" in other.stderr
    assert facts(netkin(f"{LINE} --out digits.safetensors --seed 1 --overwrite --json"))["seed"] == 1


def test_an_interrupted_training_says_how_it_resumes_and_ends_as_if_it_had_not_stopped(netkin, monkeypatch):
    whole = facts(netkin(f"{LINE} --json"))
    update = Loop._update

    def interrupted(self, batch):
        if self.step == 17:
            raise KeyboardInterrupt
        update(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_update", interrupted)
        stopped = netkin(f"{LINE} --checkpoints run --out digits.pt")
    assert stopped.exit_code == 130
    assert "12 of 24 steps done in digits.pt; run the same command again to resume." in stopped.stderr
    resumed = facts(netkin(f"{LINE} --checkpoints run --out digits.pt --json"))
    assert [record["loss"] for record in resumed["history"]] == [record["loss"] for record in whole["history"]]
    assert len(list(Path("run").iterdir())) == 3


@pytest.mark.slow
def test_checkpoints_are_a_run_that_dynamics_reads(netkin):
    assert netkin(f"{LINE} --checkpoints run").exit_code == 0
    assert sorted(path.name for path in Path("run").iterdir()) == ["step_0.pt", "step_12.pt", "step_24.pt"]
    series = netkin("dynamics run --model netkin:digits --data digits:test --layers fc --measure cka --json")
    assert facts(series)["steps"] == [0, 12, 24]
    refused = netkin(f"{LINE} --checkpoints run")
    assert refused.exit_code == 2
    assert "is not empty; give another folder, or --overwrite" in refused.stderr
    assert netkin(f"{LINE} --checkpoints run --overwrite --every 20").exit_code == 0
    assert Path("run/step_20.pt").exists()


def test_layers_are_frozen_by_a_schedule_or_at_fractions(netkin):
    assert facts(netkin(f"{LINE} --freeze linear --json"))["frozen"] == ["conv1", "conv2", "conv3", "conv4"]
    assert facts(netkin(f"{LINE} --freeze conv2=0 --out frozen.pt --json"))["frozen"] == [
        "conv2"
    ]  # and what is before it
    start, end = nk.load_model("netkin:digits", seed=0), nk.load_model("netkin:digits@frozen.pt")
    assert torch.equal(start.conv2.weight, end.conv2.weight)
    assert not torch.equal(start.conv3.weight, end.conv3.weight)
    settled = facts(netkin(f"{LINE} --freeze similarity --json"))["frozen"]
    assert settled == ["conv1", "conv2", "conv3", "conv4"][: len(settled)]


def test_the_similarity_of_layers_is_added_to_the_loss(netkin):
    plain, added = (facts(netkin(f"{LINE} --epochs 1 {more} --json")) for more in ("", "--cka-sr 0.1"))
    assert added["cka"] > 1
    assert added["history"][0]["loss"] > plain["history"][0]["loss"]


def test_a_share_of_the_weights_is_masked_before_training(netkin):
    result = netkin(f"{LINE} --epochs 1 --sparsity 0.8 --method snip --out sparse.pt")
    assert "sparsity 0.8 by snip" in result.stdout
    (table,) = nk.sparsity_study(nk.load_model("netkin:digits@sparse.pt")).networks.values()
    assert table.sparsity == pytest.approx(0.8, abs=1e-3)


def test_a_run_at_chance_level_says_so(netkin):
    result = netkin(f"{LINE} --epochs 1 --lr 1e-9 --test digits:test")
    assert "caveat: 'netkin:digits' is not clearly better than chance on digits:test: " in result.stdout
    assert facts(netkin(f"{LINE} --test digits:test --json"))["caveats"] == []


@pytest.mark.parametrize(
    "change, code, said",
    [
        ("--steps 3", 1, "--epochs: a recipe needs either `epochs` or `steps`, such as epochs=10; got both"),
        ("--optimizer sgdd", 2, "'sgdd' is not one of"),
        ("--data nothing:here", 1, "nothing:here"),
        ("--every 3", 2, "--every needs --checkpoints."),
        ("--freeze conv1=early", 2, "fractions are written as LAYER=FRACTION,..., as conv1=0.3"),
        ("--freeze lineal", 1, "no schedule 'lineal'; did you mean 'linear'?"),
        ("--sparsity 1", 1, "sparsity is the share of masked weights, from 0 to below 1"),
        ("--cka-sr -1", 1, "`beta`"),
        ("--out nowhere/digits.pt", 2, "the folder 'nowhere' does not exist"),
        ("--device tpu7", 1, "there is no device 'tpu7' here"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(netkin, tmp_path, change, code, said):
    result = netkin(f"{LINE} {change}")
    assert result.exit_code == code, result.output
    assert said in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_each_setting_of_a_recipe_is_an_option(netkin):
    assert list(KNOWN["options"]["Recipe"]) == list(Recipe.__dataclass_fields__)
    assert [KNOWN["optimizers"], KNOWN["schedules"]] == [list(OPTIMIZERS), list(SCHEDULES)]
    line = (
        f"{LINE} --batch 64 --nesterov --optimizer sgd --weight-decay 1e-4 --schedule cosine --warmup 1 --clip 1 --flip"
    )
    assert facts(netkin(f"{line} --shift 1 --smoothing 0.1 --drop-last --json"))["recipe"] == (
        "epochs=2, batch=64, lr=0.003, nesterov=True, weight_decay=0.0001, schedule='cosine', warmup=1, clip=1.0, "
        "smoothing=0.1, drop_last=True, shift=1, flip=True"
    )
