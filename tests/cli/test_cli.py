import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import click
import click.testing
import pytest
import torch

import netkin as nk
import netkin as package
from netkin import progress
from netkin.applications.stitching import stitch_all
from netkin.cli import FAMILIES, cli, commands
from netkin.cli.options import GROUPS, HEADINGS
from netkin.cli.outputs import with_refusals
from netkin.cli.running import named_models
from netkin.errors import ShapeError
from netkin.jobs import Job
from netkin.sources.architectures import architecture, seeded
from quickly import slow_after, slow_but

COMMANDS = commands()
SLOW = ("demo", "federate", "continual", "sparsity", "tasks", "train")  # which have quick tests of their own


def example_of(command):
    lines = (command.epilog or "").replace("Example: ", "").splitlines()
    return next(line.strip() for line in lines if line.strip().startswith("netkin "))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with what the examples read: a comparison with a job, parts of one, a run, and two networks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("made"))
        lines = ["compare netkin:digits --data digits:test --layers fc --out ab.netkin"]
        for part in (1, 2, 3):
            lines.append(f"collect netkin:digits --data digits:test --layers fc --part {part}/3 --out {part}.stats")
        for line in lines:
            assert click.testing.CliRunner().invoke(cli, line.split()).exit_code == 0
        with Job("ab.netkin.job", "comparison", {}) as job:
            job.part("all", dict)
        Path("runs/digits").mkdir(parents=True)
        for step, name in ((0, "digits.pt"), (1, "before.pt"), (2, "after.pt")):
            torch.save(seeded(architecture("digits"), step).state_dict(), name)
            if step:
                shutil.copy(name, f"runs/digits/step_{step}.pt")
        return Path().absolute()


@pytest.fixture
def saved_before(netkin, made):
    """Those files in the folder at hand."""
    shutil.copytree(made, ".", dirs_exist_ok=True)


@pytest.mark.usefixtures("saved_before", "shared_nets")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in sorted(set(COMMANDS) - {"jobs cancel"})],
)
def test_the_help_of_every_command_ends_with_an_example_that_runs(netkin, name):
    example = example_of(COMMANDS[name])
    assert netkin(f"{name} --help").stdout.rstrip().endswith(example)
    if name == "collect":  # whose output `merge` reads
        Path("1.stats").unlink()
    if name == "train":  # whose output others read
        Path("digits.pt").unlink()
    result = netkin(example.removeprefix("netkin "))
    assert (result.exit_code, result.exception) == (0, None)
    assert result.stdout


def test_the_help_names_all_commands_and_how_to_write_models_and_data(netkin):
    result = netkin("--help")
    assert result.exit_code == 0
    for word in (*cli.commands, "BUILDER[@WEIGHTS]", "hf:DIR", ".pt2", "images:DIR", "Example: netkin demo"):
        assert word in result.stdout


def test_every_command_stands_below_a_heading():
    assert {name for names in FAMILIES.values() for name in names.split()} >= set(cli.commands)


SHARED = (
    "--examples", "--balanced", "--layers", "--shape", "--memory", "--device", "--seed", "--json", "--data",
    "--measure", "--errors", "--chunks", "--exact-model", "--pairs", "--resize", "--batch-size",
)  # fmt: skip


@pytest.mark.parametrize("name", ["compare", "collect"])
def test_commands_that_compare_share_their_options(name):
    texts = {option.opts[0]: option.help for option in COMMANDS[name].params if isinstance(option, click.Option)}
    assert set(SHARED) <= set(texts)
    assert all(texts.values())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_can_be_quiet(name, monkeypatch):
    """The option holds while the command runs and no longer."""
    chosen = []
    look = with_refusals(lambda **options: chosen.append(progress._chosen.get()))
    monkeypatch.setattr(COMMANDS[name], "callback", look)
    plain = shlex.split(example_of(COMMANDS[name]))[1:]
    for line in ([*plain, "--quiet"], plain):
        assert click.testing.CliRunner().invoke(cli, line).exit_code == 0
    assert chosen == [False, None]


def test_a_quiet_command_that_is_misused_leaves_progress_as_it_was():
    line = "compare a --data d --quiet --pairs wrong"
    assert click.testing.CliRunner().invoke(cli, line.split()).exit_code == 2
    assert progress._chosen.get() is None
    assert progress._chosen.get() is None


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"demo", "completion", "jobs cancel"}))
def test_every_command_with_results_can_print_json(name):
    assert "--json" in [name for option in COMMANDS[name].params for name in option.opts]


def test_the_version_is_the_packages(netkin):
    assert netkin("--version").stdout == f"netkin, version {package.__version__}\n"


def run_python(*arguments):
    environment = os.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1])}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_help_does_not_import_torch():
    script = "import sys; from netkin.cli import cli; cli(['compare', '--help'], standalone_mode=False); {}"
    result = run_python("-c", script.format("sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"))
    assert result.returncode == 0, result.stderr


def test_the_package_runs_as_a_module():
    result = run_python("-m", "netkin", "compare")
    assert result.returncode == 2
    assert "netkin compare" in result.stderr


def run_in_shell(line):
    """Run `netkin` with redirections, as people type them."""
    environment = os.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1])}
    line = line.replace("netkin", f"{shlex.quote(sys.executable)} -m netkin", 1)
    return subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize(
    "line",
    slow_but(
        ["netkin --help", "netkin compare --help", "netkin --version", "netkin completion bash"], "netkin --version"
    ),
)
def test_a_full_disk_under_the_output_is_told_in_one_sentence(line):
    result = run_in_shell(f"{line} > /dev/full")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "netkin: the output could not be written: No space left on device.\n"
    assert run_in_shell(f"{line} > /dev/full 2> /dev/full").returncode == 1


@pytest.mark.slow
def test_a_command_runs_with_closed_streams(tmp_path):
    line = "netkin compare netkin:digits --data digits:test --examples 50 --layers fc"
    plain, closed = run_in_shell(line), run_in_shell(f"{line} 2>&-")
    assert (closed.returncode, closed.stdout) == (0, plain.stdout)
    assert run_in_shell(f"{line} --out {tmp_path}/ab.netkin <&- >&- 2>&-").returncode == 0
    assert package.load(tmp_path / "ab.netkin").examples == 50


@pytest.mark.parametrize(
    "line",
    [
        "compare netkin:digits '' --data digits:test", "compare '' netkin:digits --data digits:test",
        "compare '' --data digits:test", "compare netkin:digits netkin:digits '' --data digits:test",
        "compare netkin:digits --data ''", "compare netkin:digits --data=", "sparsity ''", "sparsity netkin:digits ''",
        "stitch '' '' --at fc --data digits:test", "report ''", "show ''", "merge '' --out a.stats", "''",
    ],
)  # fmt: skip
def test_an_empty_argument_is_a_misuse(netkin, line):
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "an argument is empty" in result.stderr


def test_an_empty_name_of_a_layer_is_the_whole_model(netkin):
    result = netkin("compare netkin:digits --data digits:test --examples 50 --layers '' --layers fc --json")
    assert json.loads(result.stdout)["layers_a"] == ["fc", ""]


@pytest.mark.parametrize("charset", ["cp1252", "latin-1"])
def test_numbers_are_printed_in_an_encoding_that_lacks_some_characters(charset):
    runner = click.testing.CliRunner(charset=charset)
    result = runner.invoke(cli, ["list", "measures"])
    assert (result.exit_code, result.exception) == (0, None)
    assert "from 0 to ?." in result.stdout
    listed = json.loads(runner.invoke(cli, ["list", "measures", "--json"]).stdout)
    assert any("π" in json.dumps(one, ensure_ascii=False) for one in listed)


@pytest.mark.parametrize(
    "line", ["compare", "compare netkin:digits", "nonsense", "list", "list layers", "list measures --nonsense"]
)
def test_a_misuse_gives_2(netkin, line):
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (2, "")


def command_that_raises(error):
    @click.command()
    @with_refusals
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    "error, code, words",
    [
        (ShapeError("`X` has 5 rows\n and `Y` 4."), 1, "netkin: `X` has 5 rows and `Y` 4.\n"),
        (KeyboardInterrupt(), 130, "\nnetkin: interrupted.\n"),
        (
            PermissionError(13, "Permission denied", "/elsewhere/x"),
            1,
            "netkin: [Errno 13] Permission denied: '/elsewhere/x'\n",
        ),
    ],
)
def test_a_refusal_is_one_sentence_on_stderr_and_an_exit_code(error, code, words):
    result = click.testing.CliRunner().invoke(command_that_raises(error))
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", words)


def test_an_unexpected_error_is_one_sentence():
    result = click.testing.CliRunner().invoke(command_that_raises(ZeroDivisionError("by nothing")))
    words = (
        "netkin: met an unexpected error: ZeroDivisionError: by nothing; `netkin --debug ...` shows where it arose.\n"
    )
    assert (result.exit_code, result.stderr) == (1, words)


def test_debug_shows_where_a_refusal_came_from(netkin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nk_debugged.py").write_text("def make():\n    raise KeyError('pixels')\n    yield\n")
    line = "compare netkin:digits --data nk_debugged:make"
    plain, whole = netkin(line), netkin(f"--debug {line}")
    assert (plain.exit_code, whole.exit_code) == (1, 1)
    assert "Traceback" not in plain.stderr
    assert "KeyError: 'pixels'" in whole.stderr
    assert whole.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]


def test_two_models_without_weights_are_drawn_apart(netkin):
    result = netkin("compare netkin:digits netkin:digits --data digits:test --examples 50 --layers fc --json")
    document = json.loads(result.stdout)
    assert [f"drawn from seed {seed}" in str(document["caveats"]) for seed in (0, 1)] == [True, True]


ODD = (
    "if left", "to stand beside", "what is random", "right answers", "is a result", "chance does", "says no",
    "nobody", "somebody", "believes", "how far it has come", "what becomes of", "several.", "so many", "those to be",
    "the same command continues", "a page for the browser",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_is_written_in_plain_words(netkin, name):
    said = " ".join(netkin(f"{name} --help").stdout.lower().split())
    assert [phrase for phrase in ODD if phrase in said] == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_has_a_help_text(name):
    options = [one for one in COMMANDS[name].params if isinstance(one, click.Option)]
    assert [one.opts[0] for one in options if not one.help or not one.help.endswith(".")] == []


CALLS = {
    "compare": nk.compare, "collect": nk.collect, "stitch": stitch_all, "dynamics": nk.dynamics,
    "recommend": nk.recommend, "classes": nk.class_sensitivity, "compress": nk.compress,
    "sparsity": nk.sparsity_study, "tasks": nk.compare_tasks, "federate": nk.federate, "continual": nk.learn_tasks,
    "train": nk.train,
}  # fmt: skip
SAME = (
    "examples",
    "seed",
    "errors",
    "chunks",
    "device",
    "shape",
    "resize",
    "memory",
    "layers",
    "k",
    "variance",
    "exact_model",
)


@pytest.mark.parametrize("name", CALLS)
def test_an_option_has_the_default_of_its_keyword_in_python(name):
    keywords = inspect.signature(CALLS[name]).parameters
    options = {
        one.name: one.to_info_dict()["default"] for one in COMMANDS[name].params if isinstance(one, click.Option)
    }
    shared = [option for option in SAME if option in options and option in keywords]
    assert shared
    for option in shared:
        default = keywords[option].default
        assert (options[option] or None) == (None if default is inspect.Parameter.empty else default or None), option


PASS = "--data digits:test --examples 40 --layers fc --quiet --json"
NAMED = {  # commands of several models, and where their JSON holds the names
    "compare": (PASS, lambda found: [found["a"], found["b"]]),
    "collect": (f"{PASS} --out ab.stats --overwrite", lambda found: found["models"]),
    "stitch": (
        "--at fc --data digits:train --examples 100 --test digits:test --json",
        lambda found: [found["a"], found["b"]],
    ),
    "atoms": ("--atoms 4 --json", lambda found: found["layers_a"]),
    "sparsity": ("--json", lambda found: list(found["networks"])),
    "recommend": (
        "--data digits:test --examples 40 --score knn --no-errors --json",
        lambda found: sorted(one["model"] for one in found["ranks"]),
    ),
}


@pytest.mark.parametrize("command", slow_after(2, NAMED))
def test_models_are_named_in_front_or_by_an_option(netkin, command):
    rest, names = NAMED[command]
    for line in ("a=netkin:digits b=netkin:digits", "netkin:digits netkin:digits --name a --name b"):
        result = netkin(f"{command} {line} {rest}")
        assert result.exit_code == 0, result.stderr
        assert names(json.loads(result.stdout)) == ["a", "b"]
    both = netkin(f"{command} a=netkin:digits netkin:digits {rest} --name a --name b")
    assert (both.exit_code, "either by --name or as NAME=MODEL" in both.stderr) == (2, True)
    twice = netkin(f"{command} a=netkin:digits a=netkin:digits {rest}")
    assert (twice.exit_code, "names of models must differ; got a, a." in twice.stderr) == (2, True)


def test_a_name_is_told_from_options_and_from_files(netkin, tmp_path):
    (tmp_path / "epoch=3.pt2").write_bytes(b"")
    typed = ["netkin:tiny10,width=8", "epoch=3.pt2", "runs/a=b/net.pt2", "mine=netkin:digits@a=b.pt", "netkin:digits"]
    assert list(named_models([*typed, "netkin:digits"])) == [
        "netkin:tiny10,width=8", "epoch=3.pt2", "runs/a=b/net.pt2", "mine", "netkin:digits (5)", "netkin:digits (6)",
    ]  # fmt: skip


RESULT_OPTIONS = {"-o", "--out", "--report", "--figure", "--title", "--overwrite", "--json"}


def test_commands_that_make_a_result_write_it_by_the_same_options():
    options = {name: {word for one in command.params for word in one.opts} for name, command in COMMANDS.items()}
    makers = {name for name in options if "--figure" in options[name]}
    assert {name: RESULT_OPTIONS - options[name] for name in makers} == {name: set() for name in makers}
    assert [name for name in options if "--out" in options[name] and "-o" not in options[name]] == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_shows_options_in_groups(netkin, name):
    lines = netkin(f"{name} --help").stdout.splitlines()
    headings = [line.rstrip(":") for line in lines if line.endswith(":") and line[0] != " "]
    known = [COMMANDS[name].heading, *GROUPS]
    assert "Options" not in headings
    assert headings == sorted(headings, key=known.index)
    assert headings[-1] == "General"


def test_an_option_of_many_commands_stands_below_a_heading():
    used = Counter(
        option.name for one in COMMANDS.values() for option in one.params if isinstance(option, click.Option)
    )
    own = {"atoms", "methods", "order"}  # which mean something else in each command
    assert {name for name, count in used.items() if count > 2 and name not in HEADINGS} <= own
