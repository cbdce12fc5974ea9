"""`netkin learn-tasks` on the command line."""

import json

import pytest

import netkin as nk

LINE = "learn-tasks netkin:digits --data digits:train --test digits:test --tasks 2 --recipe epochs=1,batch=64,rate=0.02"


def test_several_methods_answer_with_words_files_a_page_and_a_figure(netkin, tmp_path):
    result = netkin(f"{LINE} --method atoms --method replay --examples 20 --save seq --report t.html --figure t.svg")
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
        "netkin:digits", tasks, "replay", options={"examples": 20}, epochs=1, batch=64, rate=0.02, progress=False
    )
    assert found.accuracies.tolist() == expected.record.accuracies.tolist()
    page = (tmp_path / "t.html").read_text()
    assert "2 tasks learnt in a row in 2 ways" in page
    assert "svg" in (tmp_path / "t.svg").read_text()[:400]
    assert netkin("report seq/atoms.netkin seq/replay.netkin --out again.html").exit_code == 0
    assert "2 tasks learnt in a row in 2 ways" in (tmp_path / "again.html").read_text()


def test_json_is_a_document_of_one_method_and_a_list_of_several(netkin, tmp_path):
    one = netkin(f"{LINE} --order 5 --json").stdout
    (tmp_path / "one.json").write_text(one)
    record = nk.load("one.json")
    assert record.tasks == tuple(task.name for task in nk.split_tasks("digits:train", "digits:test", 2, seed=5))
    assert json.loads(one)["metrics"]["ACC"] == {"mean": record.acc[0], "error": None}
    several = json.loads(netkin(f"{LINE} --method joint --method finetune --json").stdout)
    assert [own["method"] for own in several] == ["joint", "finetune"]
    assert several[0]["metrics"]["BWT"]["mean"] is None


def test_the_same_command_goes_on_where_it_stopped(netkin, monkeypatch):
    from netkin.applications.continual.learners import FineTuning

    line = f"{LINE} --method finetune --json"
    whole, learn = json.loads(netkin(line).stdout), FineTuning.learn

    def stopped(self, task, recipe, **options):
        if task == 1:
            raise KeyboardInterrupt
        learn(self, task, recipe, **options)

    monkeypatch.setattr(FineTuning, "learn", stopped)
    result = netkin(f"{line} --save seq")
    assert result.exit_code == 130
    assert "1 of 2 tasks done in seq/finetune.netkin; the same command continues." in result.stderr
    monkeypatch.setattr(FineTuning, "learn", learn)
    assert json.loads(netkin(f"{line} --save seq").stdout)["accuracies"] == whole["accuracies"]


@pytest.mark.parametrize(
    "change, code, said",
    [
        ("--tasks 3", 1, "10 classes can't be split into 3 tasks of equally many."),
        ("--tasks 6", 1, "`tasks` is a number of tasks with 2 classes or more each, 1 to 5"),
        ("--strength 2", 2, "--strength goes with --method ewc."),
        ("--examples 2", 2, "--examples goes with --method ewc or replay."),
        ("--method ewc --strength -1", 1, "`strength` is a number of 0 or more; got -1.0."),
        ("--method ewe", 2, "'ewe' is not one of"),
        ("--head conv1", 1, "conv1"),
        ("--data npz:none.npz", 1, "none.npz"),
        ("--figure t.txt", 2, "a figure's name ends in"),
        ("--save a/b", 1, "cannot make the folder 'a/b'"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(netkin, tmp_path, change, code, said):
    result = netkin(f"{LINE} --save seq {change}")
    assert result.exit_code == code, result.output
    assert said in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_needs_epochs_or_steps(netkin):
    result = netkin("learn-tasks netkin:digits --data digits:train --test digits:test")
    assert result.exit_code == 1
    assert "a recipe needs either `epochs` or `steps`" in result.stderr


def test_methods_and_options_are_those_of_the_library():
    from netkin.applications.continual.learners import LEARNERS
    from netkin.cli import learn_tasks as command
    from netkin.cli.learn_tasks import METHODS, OPTIONS

    assert list(METHODS) == list(LEARNERS)
    assert {name: tuple(one.options) for name, one in LEARNERS.items() if one.options} == OPTIONS
    assert command.name == "learn-tasks"


def test_a_file_of_another_kind_in_the_folder_is_kept(netkin, tmp_path):
    (tmp_path / "seq").mkdir()
    (tmp_path / "seq" / "atoms.netkin").write_text("mine")
    result = netkin(f"{LINE} --save seq")
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert (tmp_path / "seq" / "atoms.netkin").read_text() == "mine"
