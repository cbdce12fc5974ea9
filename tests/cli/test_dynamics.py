import json
from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.applications import dynamics as room
from netkin.sources.architectures import char_lstm, seeded
from netkin.training import trained_digits_net, untrained_digits_net

LINE = 'dynamics run --model netkin:digits --data digits:test --layers "relu*"'


@pytest.fixture(scope="module")
def states():
    """The same network before training and after one and two epochs."""
    models = [untrained_digits_net(0), *(trained_digits_net(0, epochs=epochs) for epochs in (1, 2))]
    return {epoch: models[i].state_dict() for i, epoch in enumerate((0, 2, 3))}


@pytest.fixture
def run(netkin, states):
    """A folder `run` with checkpoints in the folder at hand."""
    Path("run").mkdir()
    for epoch, state in states.items():
        torch.save(state, f"run/epoch_{epoch}.pt")


@pytest.mark.usefixtures("run")
def test_a_run_is_followed_printed_and_saved(netkin, states):
    result = netkin(f"{LINE} --out run.netkin")
    assert result.exit_code == 0, result.output
    assert "run: each layer against its own final state at 3 epochs, 0 to 3" in result.stdout
    assert "bottom-up at 0.9" in result.stdout
    assert result.stderr.endswith("saved to run.netkin\n")
    saved = nk.load("run.netkin")
    assert saved.layers == ("relu1", "relu2", "relu3", "relu4")
    expected = nk.dynamics(states, nk.load_data("digits:test"), model="netkin:digits", layers="relu*")
    np.testing.assert_allclose(saved.to_numpy(), expected.to_numpy(), atol=1e-9)


def test_recurrent_networks_are_followed_over_text(netkin):
    Path("story.txt").write_text("to be or not to be, that is the question. " * 30)
    Path("lstm").mkdir()
    for step in (1, 2):
        model = seeded(lambda: char_lstm(vocabulary=20, width=6), seed=step)
        torch.save(model.state_dict(), f"lstm/step_{step}.pt")
    line = "dynamics lstm --model netkin:char_lstm,vocabulary=20,width=6 --data text,window=16:story.txt"
    document = json.loads(netkin(f"{line} --shape tokens --layers LSTM --json").stdout)
    assert document["layers"] == ["lstm1", "lstm2"]
    assert document["comparisons"][0]["shapes_a"] == {"lstm1": "tokens", "lstm2": "tokens"}
    assert 0 < document["measures"]["svcca"]["own"][0][0] < 0.99


@pytest.mark.usefixtures("run")
def test_json_holds_all_and_is_valid_for_strict_readers(netkin):
    line = f"{LINE} --measure cka --measure gulp --examples 100 --steps 2 --seed 3 --json"
    document = json.loads(netkin(line).stdout, parse_constant=pytest.fail)
    assert (document["run"], document["unit"], document["steps"]) == ("run", "epoch", [0, 3])
    assert document["comparisons"][0]["examples"] == 100
    assert document["comparisons"][0]["data"] == "digits:test, a sample of 100 of 360 (seed 3)"
    assert document["measures"]["cka"]["own"][-1] == pytest.approx([1] * 4)
    assert set(document["measures"]["cka"]["reached"]) == {"0.9", "0.99", "0.999"}
    assert {"tau", "error", "p", "layers", "never"} == set(document["measures"]["cka"]["bottom_up"]["0.9"]) or (
        document["measures"]["cka"]["bottom_up"]["0.9"]["tau"] is None
    )
    assert document["measures"]["gulp"]["reached"] == {}


@pytest.mark.usefixtures("run")
def test_trends_without_an_order_give_their_reason(netkin):
    document = json.loads(netkin(f"{LINE} --layers relu1 --steps 2 --json").stdout)
    trend = document["measures"]["svcca"]["bottom_up"]["0.999"]
    assert trend["tau"] is None
    assert trend["reason"].startswith("there is no order among 4 layers")


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_a_saved_series_has_a_page_and_lines(netkin):
    result = netkin(f"{LINE} --out run.netkin --report run.html --figure run.svg")
    assert result.exit_code == 0, result.output
    assert "report: open run.html" in result.stderr
    assert "figure in run.svg" in result.stderr
    assert "relu4" in Path("run.html").read_text(encoding="utf-8")
    assert netkin("report run.netkin --out again.html").stdout == "again.html\n"
    assert "relu4" in Path("again.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("run")
def test_a_series_shares_no_page(netkin):
    netkin(f"{LINE} --out run.netkin")
    netkin("compare netkin:digits --data digits:test --layers fc --out ab.netkin")
    result = netkin("report ab.netkin run.netkin")
    assert result.exit_code == 1
    assert "holds a Series, which needs a report of its own; run `netkin report` on that file alone." in result.stderr


@pytest.mark.usefixtures("run")
def test_an_interrupted_command_says_how_far_it_came(netkin, monkeypatch):
    netkin(f"{LINE} --out run.netkin")
    saved = nk.load("run.netkin")
    unfinished = type(saved)(run="run", steps=(0, 3), comparisons=(saved[0], saved[3]), final_step=3, missing=(2,))

    def interrupted(*given, save, **options):
        unfinished.save(save, overwrite=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "dynamics", interrupted)
    result = netkin(f"{LINE} --out run.netkin")
    assert result.exit_code == 130
    assert "2 of 3 steps are in run.netkin; run the same command again to resume." in result.stderr
    assert result.stderr.endswith("netkin: interrupted.\n")


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    "line, words",
    [
        ("dynamics gone --data digits:test", "'gone' is no folder."),
        ("dynamics run --data digits:test", "holds weights alone, which do not say what network they belong to"),
        ("dynamics run --data digits:test --model netkin:tiny10", "do not fit the ConvNet given as `model`"),
        (f"{LINE} --measure svca", "no measure named 'svca'; did you mean 'svcca'?"),
        (f"{LINE} --device gpu", "there is no device 'gpu' here"),
        ("dynamics run --model netkin:digits --data text:run/epoch_0.pt", "is no text in UTF-8"),
        ("dynamics run --model netkin:digits --data digit", "no data set named 'digit'; did you mean 'digits'?"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_sentence(netkin, line, words):
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.startswith("netkin: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


@pytest.mark.usefixtures("run")
def test_data_that_the_model_does_not_take_are_refused_in_one_sentence(netkin):
    Path("story.txt").write_text("to be or not to be, that is the question " * 9)
    result = netkin("dynamics run --model netkin:digits --data text,window=8:story.txt")
    assert result.exit_code == 1
    assert "could not be run on inputs of type int64 and shape" in result.stderr


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    "options, words",
    [
        ("--steps 1", "1 is not in the range x>=2"),
        ("--out nowhere/x.netkin", "the folder 'nowhere' does not exist."),
        ("--report x.pdf", "a page's name ends in .html or .htm; got 'x.pdf'."),
        ("--figure x.txt", "a figure's name ends in .png or .svg or .pdf; got 'x.txt'."),
    ],
)
def test_options_that_make_no_sense_are_a_misuse(netkin, options, words):
    result = netkin(f"{LINE} {options}")
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_measures_of_weights_need_no_data(netkin, states):
    Path("atoms").mkdir()
    for epoch, state in states.items():
        torch.save(state, f"atoms/epoch_{epoch}.pt")
    line = 'dynamics atoms --model netkin:digits --measure weight_cosine --layers "conv*" --report atoms.html --json'
    result = netkin(line)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert np.shape(document["between"]["tables"]["weight_cosine of conv1"]["values"]) == (3, 3)
    assert document["comparisons"][0]["provenance"]["pairs"] == "corresponding"
    assert "Every epoch with every other" in Path("atoms.html").read_text()
    missing = netkin("dynamics atoms --model netkin:digits --measure cka")
    assert missing.exit_code == 2
    assert "--data is missing; only measures of weights, such as atom_cosine, work without it" in missing.stderr


@pytest.mark.slow
def test_checkpoints_of_atoms_are_followed_by_their_atoms(netkin, monkeypatch):
    monkeypatch.syspath_prepend(Path.cwd())
    Path("atom_nets.py").write_text(
        "import netkin as nk\n\n\n"
        "def small():\n    return nk.decompose(nk.load_model('netkin:digits'), atoms=4).model\n"
    )
    Path("atoms").mkdir()
    model = nk.decompose(untrained_digits_net(0), atoms=4).model
    for epoch in range(3):
        torch.save(model.state_dict(), f"atoms/epoch_{epoch}.pt")
        for layer in (model.conv1, model.conv2):
            layer.atoms.data += 0.1 * torch.randn_like(layer.atoms)
    result = netkin("dynamics atoms --model atom_nets:small --measure atom_cosine --report atoms.html --out run.netkin")
    assert result.exit_code == 0, result.output
    assert "from the weights alone: no data were run" in result.stdout
    series = nk.load("run.netkin")
    assert series.layers == ("conv1", "conv2", "conv3", "conv4")
    assert series.between_steps("conv4")[0, 2] == pytest.approx(1)
    assert 0.2 < series.between_steps("conv1")[0, 2] < 1
    assert Path("atoms.html").read_text().count('class="framed"') == 4


@pytest.mark.usefixtures("run")
def test_a_plan_tells_what_the_command_would_do_and_does_nothing(netkin):
    result = netkin(f"{LINE} --plan --out run.netkin")
    assert result.exit_code == 0, result.output
    assert "run 'run': 3 checkpoints, epochs 0 to 3" in result.stdout
    assert "forward passes in all:" in result.stdout
    assert not Path("run.netkin").exists()
    facts = json.loads(netkin(f"{LINE} --plan --json").stdout)
    assert facts["steps"] == [0, 2, 3]
    assert facts["each"]["pairs"] == 16


@pytest.mark.usefixtures("run")
def test_a_plan_that_would_be_refused_exits_with_1(netkin):
    result = netkin(f"{LINE} --plan --memory 100")
    assert result.exit_code == 1
    assert "would be refused" in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("run", "ray_cluster")
def test_a_cluster_follows_a_run(netkin):
    result = netkin(f"{LINE} --examples 60 --engine ray --out run.netkin")
    assert result.exit_code == 0, result.stderr
    assert netkin(f"{LINE} --examples 60 --out one.netkin").exit_code == 0
    found, one = nk.load("run.netkin"), nk.load("one.netkin")
    assert found[0]["svcca"].values == pytest.approx(one[0]["svcca"].values, abs=1e-6)
    assert found.provenance["data digest"] == one.provenance["data digest"]
    explained = netkin(f"{LINE} --examples 60 --engine ray --plan")
    assert explained.exit_code == 0, explained.stderr
    assert "cluster: 2 tasks at once on 2 nodes" in explained.stdout
