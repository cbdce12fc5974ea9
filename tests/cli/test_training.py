"""`netkin federate` and `netkin continual`."""

import json

import numpy as np
import pytest

import netkin as nk

FEDERATE = (
    "federate netkin:digits --data digits:train --test digits:test --clients 5 --classes 2 --partition groups "
    "--rounds 2 --atoms 4 --algorithm fedper --coefficients evolving --recipe lr=0.05,batch=64 --seed 3"
)


@pytest.mark.slow
def test_one_command_answers_with_words_a_file_a_page_and_a_figure(netkin, tmp_path):
    result = netkin(f"{FEDERATE} --out u.netkin --report u.html --figure u.png")
    assert result.exit_code == 0, result.output
    assert "fedper with evolving coefficients: 5 clients, 2 rounds" in result.stdout
    assert "clusters by atom_cosine" in result.stdout
    assert "saved to u.netkin" in result.stderr
    found = nk.load("u.netkin")
    split = nk.split_by_classes("digits:train", 5, 2, test="digits:test", partition="groups", seed=3)
    network = nk.decompose(nk.load_model("netkin:digits", seed=3), atoms=4).model
    again = nk.federate(
        network, split.train, "fedper", test=split.test, test_every=1, coefficients="evolving", rounds=2, lr=0.05,
        batch=64, seed=3, progress=False,
    )  # fmt: skip
    assert found.accuracy == again.accuracy
    assert found.accuracies == again.accuracies
    assert list(found.accuracies) == [1, 2]
    np.testing.assert_array_equal(found.similarity.to_numpy(), again.similarity.to_numpy())
    assert "Which clients are alike" in (tmp_path / "u.html").read_text()
    assert (tmp_path / "u.png").read_bytes().startswith(b"\x89PNG")
    assert "--recipe lr=0.05,batch=64" in found.provenance["call"]


@pytest.mark.slow
def test_more_rounds_go_on_and_other_settings_are_refused_but_with_overwrite(netkin):
    short = FEDERATE.replace("--rounds 2", "--rounds 1")
    assert netkin(f"{short} --out u.netkin").exit_code == 0
    longer = netkin(f"{FEDERATE} --out u.netkin --json")
    whole = netkin(f"{FEDERATE} --json")
    assert longer.exit_code == 0, longer.output
    assert json.loads(longer.stdout)["accuracy"] == json.loads(whole.stdout)["accuracy"]
    other = netkin(f"{FEDERATE} --out u.netkin --prox 0.7")
    assert other.exit_code == 1
    assert "--overwrite" in other.stderr
    assert netkin(f"{FEDERATE} --out u.netkin --prox 0.7 --overwrite").exit_code == 0


@pytest.mark.slow
def test_json_says_what_the_saved_result_says_and_report_makes_its_page(netkin, tmp_path):
    told = json.loads(netkin(f"{FEDERATE} --json --out u.netkin").stdout)
    found = nk.load("u.netkin")
    assert found.title == "fedper with evolving coefficients: 5 clients, 2 rounds"
    assert told["clusters"] == list(found.clusters)
    assert netkin("report u.netkin --out u.html").exit_code == 0
    assert "The mean accuracy of 5 clients is" in (tmp_path / "u.html").read_text()
    alone = netkin("report u.netkin u.netkin --out both.html")
    assert alone.exit_code == 1
    assert (
        "holds a Federation, which needs a report of its own; run `netkin report` on that file alone." in alone.stderr
    )


def test_without_test_data_nothing_is_tested(netkin):
    line = "federate netkin:digits --data digits:train --clients 3 --classes 2 --rounds 1 --json"
    found = json.loads(netkin(line).stdout)
    assert found["accuracy"] == {}
    assert found["mean_accuracy"] is None
    assert found["similarity"] is None
    line = line.replace("--clients", "--test digits:test --test-every 0 --clients")
    found = json.loads(netkin(line).stdout)
    assert len(found["accuracy"]) == 3
    assert found["rounds"][0]["accuracy"] == {}


@pytest.mark.parametrize(
    "change, code, said",
    [
        ("--classes 11", 1, "a client can't have 11 classes: the data have 10."),
        ("--client-fraction 0", 1, "--client-fraction: `client_fraction` is a share of the clients"),
        ("--recipe lr", 2, "a setting is written NAME=VALUE, as lr=0.05; got 'lr'"),
        ("--recipe lr=1", 2, "'lr' is given twice"),
        ("--recipe lrs=1", 1, "a recipe has no 'lrs'; did you mean 'lr'?"),
        ("--recipe head=fc", 1, "a recipe has no 'head'"),
        ("--algorithm fedavgg", 2, "'fedavgg' is not one of"),
        ("--coefficients pretrained", 1, "--public: "),
        ("--data nothing:here", 1, "nothing:here"),
        ("--report u.txt", 2, "a page's name ends in .html"),
        ("--out nowhere/u.netkin", 2, "the folder 'nowhere' does not exist"),
        ("--device tpu7", 1, "there is no device 'tpu7' here"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(netkin, tmp_path, change, code, said):
    result = netkin(f"{FEDERATE} --out u.netkin {change}")
    assert result.exit_code == code, result.output
    assert said in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_personal_atoms_need_a_network_of_atoms(netkin):
    refused = netkin(FEDERATE.replace("--atoms 4", ""))
    assert refused.exit_code == 1
    assert "atoms" in refused.stderr


def test_names_of_algorithms_and_sources_are_those_of_the_library():
    from netkin.applications.federated import ALGORITHMS, SOURCES
    from netkin.cli import federate as module

    command = {option.name: option for option in module.params}
    assert list(command["algorithm"].type.choices) == list(ALGORITHMS)
    assert list(command["coefficients"].type.choices) == list(SOURCES)


@pytest.mark.slow
def test_an_interrupted_command_says_how_far_it_came(netkin, monkeypatch):
    from netkin.applications import federated

    drawn = federated.sampled

    def stopped(names, share, seed, number):
        if number == 2:
            raise KeyboardInterrupt
        return drawn(names, share, seed, number)

    monkeypatch.setattr(federated, "sampled", stopped)
    result = netkin(f"{FEDERATE} --out u.netkin")
    assert result.exit_code == 130
    assert "1 of 2 rounds done in u.netkin; run the same command again to resume." in result.stderr
    monkeypatch.setattr(federated, "sampled", drawn)
    assert netkin(f"{FEDERATE} --out u.netkin").exit_code == 0


LEARN = "continual netkin:digits --data digits:train --test digits:test --tasks 2 --recipe epochs=1,batch=64,lr=0.02"


@pytest.mark.slow
def test_several_methods_answer_with_words_files_a_page_and_a_figure(netkin, tmp_path):
    result = netkin(f"{LEARN} --method atoms --method replay --examples 20 --out seq --report t.html --figure t.svg")
    assert result.exit_code == 0, result.output
    for said in (
        "2 tasks learnt in a row by 'atoms'",
        "2 tasks learnt in a row by 'replay'",
        "ACC: ",
        "BWT: ",
        "FWT: ",
    ):
        assert said in result.stdout
    found = nk.load("seq/replay.netkin")
    tasks = nk.split_tasks("digits:train", "digits:test", tasks=2)
    expected = nk.learn_tasks(
        "netkin:digits", tasks, "replay", options={"examples": 20}, epochs=1, batch=64, lr=0.02, progress=False
    )
    assert found.accuracies.tolist() == expected.record.accuracies.tolist()
    page = (tmp_path / "t.html").read_text()
    assert "2 tasks learnt in a row by 2 methods" in page
    assert "svg" in (tmp_path / "t.svg").read_text()[:400]
    assert netkin("report seq/atoms.netkin seq/replay.netkin --out again.html").exit_code == 0
    assert "2 tasks learnt in a row by 2 methods" in (tmp_path / "again.html").read_text()


@pytest.mark.slow
def test_json_is_a_document_of_one_method_and_a_list_of_several(netkin):
    one = json.loads(netkin(f"{LEARN} --order 5 --json").stdout)
    assert one["tasks"] == [task.name for task in nk.split_tasks("digits:train", "digits:test", 2, seed=5)]
    assert one["metrics"]["ACC"]["error"] is None
    several = json.loads(netkin(f"{LEARN} --method joint --method finetune --json").stdout)
    assert [own["method"] for own in several] == ["joint", "finetune"]
    assert several[0]["metrics"]["BWT"]["mean"] is None


@pytest.mark.slow
def test_the_same_command_goes_on_where_it_stopped(netkin, monkeypatch):
    from netkin.applications.continual.learners import FineTuning

    line = f"{LEARN} --method finetune --json"
    whole, learn = json.loads(netkin(line).stdout), FineTuning.learn

    def stopped(self, task, recipe, **options):
        if task == 1:
            raise KeyboardInterrupt
        learn(self, task, recipe, **options)

    monkeypatch.setattr(FineTuning, "learn", stopped)
    result = netkin(f"{line} --out seq")
    assert result.exit_code == 130
    assert "1 of 2 tasks done in seq/finetune.netkin; run the same command again to resume." in result.stderr
    monkeypatch.setattr(FineTuning, "learn", learn)
    assert json.loads(netkin(f"{line} --out seq").stdout)["accuracies"] == whole["accuracies"]


@pytest.mark.parametrize(
    "change, code, said",
    [
        ("--tasks 3", 1, "10 classes can't be split into 3 tasks of equally many."),
        ("--tasks 6", 1, "--tasks: `tasks` must be a whole number from 1 to 5"),
        ("--strength 2", 2, "--strength needs --method ewc."),
        ("--examples 2", 2, "--examples needs --method ewc or replay."),
        ("--method ewc --strength -1", 1, "--strength: `strength` is a number of 0 or more; got -1.0."),
        ("--method ewe", 2, "'ewe' is not one of"),
        ("--head conv1", 1, "conv1"),
        ("--data npz:none.npz", 1, "none.npz"),
        ("--figure t.txt", 2, "a figure's name ends in"),
        ("--out a/b", 1, "cannot make the folder 'a/b'"),
    ],
)
def test_bad_input_of_tasks_is_one_sentence_and_leaves_nothing_behind(netkin, tmp_path, change, code, said):
    result = netkin(f"{LEARN} --out seq {change}")
    assert result.exit_code == code, result.output
    assert said in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_needs_epochs_or_steps(netkin):
    result = netkin("continual netkin:digits --data digits:train --test digits:test")
    assert result.exit_code == 1
    assert "a recipe needs either `epochs` or `steps`" in result.stderr


def test_methods_and_options_are_those_of_the_library():
    from netkin.applications.continual.learners import LEARNERS
    from netkin.cli.options import KNOWN

    assert KNOWN["learners"] == list(LEARNERS)
    assert KNOWN["options of learners"] == {name: list(one.options) for name, one in LEARNERS.items()}


def test_a_file_of_another_kind_in_the_folder_is_kept(netkin, tmp_path):
    (tmp_path / "seq").mkdir()
    (tmp_path / "seq" / "atoms.netkin").write_text("mine")
    result = netkin(f"{LEARN} --out seq")
    assert result.exit_code == 1
    assert "--overwrite" in result.stderr
    assert (tmp_path / "seq" / "atoms.netkin").read_text() == "mine"
