"""Runs: which checkpoints are found, in which order, and what is refused in one sentence."""

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from netkin.errors import InvalidValue, NameClash, SourceError, UnknownName
from netkin.sources.runs import as_checkpoint, built, open_run, step_in
from refusals import refused


def net(width=3):
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))


@pytest.fixture
def folder(tmp_path):
    """Put state dicts under the given names into a folder; their first bias is the number of the file."""
    torch.manual_seed(0)

    def made(*names):
        for number, name in enumerate(names):
            state = net().state_dict() | {"0.bias": torch.full((3,), float(number))}
            (tmp_path / name).parent.mkdir(exist_ok=True)
            if name.endswith(".safetensors"):
                safetensors.torch.save_file(state, tmp_path / name)
            else:
                torch.save(state, tmp_path / name)
        return tmp_path

    return made


@pytest.mark.parametrize(
    "name, step",
    [
        ("step_100.pt", (100, "step")),
        ("step-000100.safetensors", (100, "step")),
        ("epoch-3.safetensors", (3, "epoch")),
        ("epoch=3-step=500.ckpt", (500, "step")),
        ("epoch=3-step=500-v2.ckpt", (500, "step")),
        ("checkpoint-500", (500, "step")),
        ("resnet20_seed0_iter_40.pth", (40, "step")),
        ("resnet20-40.pt", (40, "step")),
        ("model_10k.pt", (10_000, "step")),
        ("step2M.pt", (2_000_000, "step")),
        ("7.pt2", (7, "step")),
        ("net.12.pt", (12, "step")),
        ("epoch12_loss0.pt", (12, "epoch")),
        ("deep_3.pt", (3, "step")),
        ("ep3.pt", (3, "epoch")),
        ("last.ckpt", None),
        ("best.safetensors", None),
    ],
)
def test_names_tell_their_step(name, step):
    assert step_in(name) == step


def test_the_checkpoints_of_a_folder_come_in_the_order_of_their_steps(folder):
    run = open_run(folder("step_9.pt", "step_100.pt", "step_10.safetensors"), net)
    assert run.steps == (9, 10, 100)
    assert run.unit == "step"
    assert [run.at(step)[0].bias[0].item() for step in run.steps] == [0, 2, 1]
    assert not run.at(9).training


def test_what_has_no_step_in_its_name_is_passed_over_in_a_folder(folder):
    place = folder("epoch1.pt", "epoch2.pt", "best.pt", ".hidden3.pt")
    (place / "notes7.txt").write_text("")
    run = open_run(place, net)
    assert (run.steps, run.unit, run.passed_over, run.name) == ((1, 2), "epoch", ("best.pt",), str(place))


def test_some_number_is_no_step_beside_names_that_say_step(folder):
    assert open_run(folder("net-1.pt", "best_resnet20.pt"), net).steps == (1, 20)
    run = open_run(folder("step_100.pt", "step_200.pt"), net)
    assert (run.steps, run.passed_over) == ((100, 200), ("best_resnet20.pt", "net-1.pt"))


def test_a_list_of_files_serves_too(folder):
    place = folder("step_1.pt", "step_2.pt", "step_3.pt")
    run = open_run([place / "step_3.pt", str(place / "step_1.pt")], net)
    assert run.steps == (1, 3)


def test_a_mapping_takes_files_states_and_models(folder):
    first, last = net(), net()
    run = open_run({5: first.state_dict(), 0: folder("a.pt") / "a.pt", 9: last}, first, name="mine")
    assert (run.steps, run.name) == ((0, 5, 9), "mine")
    assert run.at(9) is last
    torch.testing.assert_close(run.at(5)[0].weight, first[0].weight)
    assert run.at(0)[0].bias.tolist() == [0, 0, 0]
    assert run.at(0) is not first


def test_the_network_may_be_a_name_a_function_or_a_module_which_stays_as_it_is(folder):
    place, own = folder("step_1.pt", "step_2.pt"), net()
    before = copy.deepcopy(own.state_dict())
    for model in (own, net):
        assert open_run(place, model).at(2)[0].bias.tolist() == [1, 1, 1]
    torch.testing.assert_close(own.state_dict(), before)
    assert type(built("netkin:digits")).__name__ == "ConvNet"


def test_fresh_weights_leave_the_random_numbers_alone(folder):
    before = torch.get_rng_state()
    open_run(folder("step_1.pt", "step_2.pt"), "netkin:digits")
    built(net)
    now = torch.get_rng_state()
    assert not torch.equal(before, now)  # the folder's nets drew some
    built(net)
    torch.testing.assert_close(torch.get_rng_state(), now)


def test_lightning_files_give_the_network_inside(tmp_path):
    inner = net()
    state = {f"backbone.{key}": value for key, value in inner.state_dict().items()} | {"weight": torch.ones(3)}
    torch.save({"state_dict": state, "epoch": 1, "global_step": 50}, tmp_path / "epoch=1-step=50.ckpt")
    with_model = {f"model.{key}": value for key, value in inner.state_dict().items()}
    torch.save({"state_dict": with_model}, tmp_path / "epoch=2-step=90.ckpt")
    run = open_run(tmp_path, net)
    assert run.steps == (50, 90)
    for step in run.steps:
        torch.testing.assert_close(run.at(step).state_dict(), inner.state_dict())


def test_folders_of_the_hugging_face_trainer_give_plain_networks(folder):
    run = open_run(folder("checkpoint-500/model.safetensors", "checkpoint-1000/pytorch_model.bin"), net)
    assert run.steps == (500, 1000)
    assert run.at(1000)[0].bias.tolist() == [1, 1, 1]


def test_folders_of_the_hugging_face_trainer_give_whole_models(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8)
    for step in (10, 20):
        transformers.BertModel(config).save_pretrained(tmp_path / f"checkpoint-{step}")
    assert type(open_run(tmp_path).at(10)).__name__ == "BertModel"


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch below 2.8 makes other programs")
def test_exported_programs_need_no_network(tmp_path):
    for step in (1, 2):
        program = torch.export.export(net(), (torch.ones(4, 2),), dynamic_shapes=[{0: torch.export.Dim("n")}])
        torch.export.save(program, tmp_path / f"step{step}.pt2")
    assert open_run(tmp_path).at(1)(torch.ones(3, 2)).shape == (3, 2)


def test_steps_are_chosen_by_name_or_number(folder):
    run = open_run(folder(*(f"step_{step}.pt" for step in range(10))), net)
    assert run.only([2, 4]).steps == (2, 4, 9)
    assert run.only(4).steps == (0, 3, 6, 9)
    assert run.only(99).steps == run.steps
    assert run.only(None) is run


@pytest.mark.parametrize("steps, fault, argument", [
    ([3, 77], UnknownName, "steps"),
    (1, InvalidValue, "steps"),
    (2.0, InvalidValue, "steps"),
    ("all", InvalidValue, "steps"),
    ([3], SourceError, "run"),
])  # fmt: skip
def test_steps_that_are_not_there_are_refused(folder, steps, fault, argument):
    run = open_run(folder(*(f"step_{step}.pt" for step in range(4))), net)
    with refused(fault, argument):
        run.only(steps)
    with refused(UnknownName, "steps"):
        run.at(5)


@pytest.mark.parametrize(
    "names, fault, argument",
    [
        ((), SourceError, ""),
        (("best.pt", "last.pt"), SourceError, ""),
        (("step_1.pt",), SourceError, "run"),
        (("step_1.pt", "step-01.pt"), NameClash, ""),
        (("step_1.pt", "epoch_2.pt"), InvalidValue, ""),
    ],
)
def test_folders_that_are_no_run_are_refused(folder, tmp_path, names, fault, argument):
    folder(*names)
    with refused(fault, argument):
        open_run(tmp_path, net)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "run1").mkdir()
    with pytest.raises(SourceError, match="run2' is no folder; did you mean 'run1'?"):
        open_run(tmp_path / "run2")
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(SourceError, match="x.pt' is a file; name the folder of the checkpoints."):
        open_run(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "run, kind, argument",
    [
        (["best.pt", "last.pt"], SourceError, "run"),
        (["step_1.pt", "step_2.pt"], SourceError, "run"),
        ([{}, {}], InvalidValue, "run"),
        ({"first": "a.pt"}, InvalidValue, "run"),
        ({True: "a.pt"}, InvalidValue, "run"),
        ({1: 3}, InvalidValue, "run"),
        ({1: {}}, InvalidValue, "run"),
        ({1: {"a": 3}}, InvalidValue, "run"),
        (3, InvalidValue, "run"),
        (nn.ReLU(), InvalidValue, "run"),
    ],
)
def test_what_is_no_run_is_refused(run, kind, argument):
    with refused(kind, argument):
        open_run(run)


def test_bare_weights_without_a_network_are_refused(folder):
    run = open_run(folder("step_1.pt", "step_2.pt"))
    with refused(SourceError, "model"):
        run.at(1)


def test_weights_of_another_network_are_refused(folder):
    run = open_run(folder("step_1.pt", "step_2.pt"), nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2)))
    with refused(SourceError, "model"):
        run.at(1)


def test_a_change_of_architecture_within_the_run_is_named(folder):
    place = folder("step_1.pt", "step_2.pt", "step_3.pt")
    torch.save(net(width=7).state_dict(), place / "step_2.pt")
    run = open_run(place, net)
    run.at(1)
    words = "the architecture changes within the run: at step 2 .'.*step_2.pt'., compared with step 3, 3 of another "
    with pytest.raises(SourceError, match=words + "shape: 0.weight .7 × 2 in the file, 3 × 2 in the model"):
        run.at(2)
    with pytest.raises(SourceError, match="at step 0, compared with step 1, .* 0.weight .7 × 2"):
        open_run({0: net(width=7), 1: net()}).at(0)


def test_a_damaged_file_is_named(folder):
    place = folder("step_1.pt", "step_2.pt")
    (place / "step_1.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(SourceError, match="step_1.pt' is damaged or no weights file"):
        open_run(place, net).at(1)


def test_a_file_that_goes_away_is_named(folder):
    run = open_run(folder("step_1.pt", "step_2.pt"), net)
    Path(run.checkpoints[0].source).unlink()
    with pytest.raises(SourceError, match="found no weights file .*step_1.pt'"):
        run.at(1)


def test_a_folder_that_loses_its_weights_is_named(folder):
    run = open_run(folder("checkpoint-1/model.safetensors", "checkpoint-2/model.safetensors"), net)
    (run.checkpoints[0].source / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="the folder .*checkpoint-1' holds no model.safetensors or pytorch_model.bin"):
        run.at(1)


@pytest.mark.parametrize(
    "model, kind, argument",
    [(3, InvalidValue, "model"),
     (lambda: 3, SourceError, "model"),
     ("netkin:digit", UnknownName, "")],
)  # fmt: skip
def test_what_is_no_network_is_refused(folder, model, kind, argument):
    run = open_run(folder("step_1.pt", "step_2.pt"), model)
    with refused(kind, argument):
        run.at(1)


def test_a_home_folder_is_found(folder, monkeypatch):
    place = folder("step_1.pt", "step_2.pt")
    monkeypatch.setenv("HOME", str(place.parent))
    assert open_run(f"~/{place.name}", net).steps == (1, 2)
    assert as_checkpoint(f"~/{place.name}/step_1.pt", 1).source == place / "step_1.pt"


def test_the_last_checkpoint_of_a_pretrained_model_names_its_folder(tmp_path):
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name in ("config.json", "model.safetensors"):
            (tmp_path / f"checkpoint-{step}" / name).touch()
    assert open_run(tmp_path).whole == [f"hf:{tmp_path / 'checkpoint-2'}"]
    assert open_run(tmp_path, "netkin:digits").whole == []


def test_a_name_with_a_raised_digit_is_no_number(tmp_path):
    for name in ("²1.pt", "²2.pt"):
        torch.save({}, tmp_path / name)
    assert open_run(tmp_path, "netkin:digits").steps == (1, 2)
