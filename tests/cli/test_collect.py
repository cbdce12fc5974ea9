"""A comparison in parts: `netkin collect`, `netkin merge`, `netkin compare FILE`, and `--engine distributed`."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import netkin as nk
from netkin import results
from netkin.cli import cli
from netkin.comparing.compare import compare
from netkin.memory import format_bytes
from netkin.sources import load_data, load_model
from netkin.sources.architectures import architecture, seeded

MODELS = "netkin:digits netkin:digits@other.pt --data digits:test --layers relu1 --layers fc"


@pytest.fixture
def weights(netkin):
    """The weights `other.pt` of a second network, in the folder at hand."""
    torch.save(seeded(architecture("digits"), 7).state_dict(), "other.pt")


@pytest.fixture(scope="module")
def thirds(tmp_path_factory):
    """A folder with statistics of the thirds of the data, `1.stats` to `3.stats`, in chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("thirds"))
        torch.save(seeded(architecture("digits"), 7).state_dict(), "other.pt")
        for part in (1, 2, 3):
            line = f"collect {MODELS} --part {part}/3 --errors --chunks 8 --out {part}.stats"
            result = CliRunner().invoke(cli, line.split(), prog_name="netkin")
            assert (result.exit_code, result.exception) == (0, None)
        return Path().absolute()


@pytest.fixture
def parts(netkin, thirds):
    """Those statistics and `other.pt`, in the folder at hand."""
    shutil.copytree(thirds, ".", dirs_exist_ok=True)


def refusal(netkin, line, code=1):
    """Return the sentence of a command that is refused, which has printed and written nothing else."""
    before = {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (code, "")
    assert {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before
    return " ".join(result.stderr.split())


@pytest.mark.usefixtures("parts")
def test_parts_merge_to_the_comparison_of_the_whole(netkin):
    merged = netkin("merge 2.stats 3.stats 1.stats --out all.stats")
    assert (merged.exit_code, merged.stderr) == (0, "")
    assert netkin("compare all.stats --measure nbs --measure cka --out ab.netkin").exit_code == 0
    models = load_model("netkin:digits"), load_model("netkin:digits@other.pt")
    expected = compare(
        *models, data=load_data("digits:test"), measures=["nbs", "cka"], layers=["relu1", "fc"], errors=True, chunks=8
    )
    saved = results.load("ab.netkin")
    assert (saved.a, saved.b, saved.examples) == ("netkin:digits", "netkin:digits@other.pt", 360)
    for measure in ("nbs", "cka"):
        assert saved[measure].values == pytest.approx(expected[measure].values, abs=1e-6)
        assert saved[measure].errors == pytest.approx(expected[measure].errors, rel=1e-3)


def test_errors_and_their_chunks_reach_the_library(netkin, weights):
    document = json.loads(netkin(f"compare {MODELS} --errors --chunks 6 --json").stdout)
    table = document["tables"]["cka"]
    assert len(table["chunk_sizes"]) == 6
    assert sum(table["chunk_sizes"]) == 360
    replicates = np.array(table["replicates"])
    sizes = np.array(table["chunk_sizes"], float)
    h = (360 / sizes)[:, None, None]  # the delete-a-group jackknife of Busing et al. (1999) for unequal groups
    pseudo = h * np.array(table["values"]) - (h - 1) * replicates
    mean = (pseudo / h).sum(0)
    slow = np.sqrt((((pseudo - mean) ** 2) / (h - 1)).mean(0))
    assert np.array(table["errors"], float) == pytest.approx(slow, rel=1e-6)
    assert "±" in netkin(f"compare {MODELS} --errors").stdout


def test_an_exact_model_is_asked_for(netkin, weights, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "netkin.comparing.compare.compare", lambda *models, **options: asked.append(options["exact_model"])
    )
    for more in ("", "--exact-model"):
        netkin(f"compare {MODELS} {more}")
    assert asked == [False, True]


def test_the_price_of_errors_is_told(netkin, weights):
    told = netkin(f"compare --plan {MODELS} --errors --chunks 6").stdout
    alone = json.loads(netkin(f"compare --plan {MODELS} --json").stdout)["bytes"]
    words = f"whose sums are in that memory, {format_bytes(alone)} without them; every value is read 7 times"
    assert f"error bars: 6 chunks of the examples, {words}" in told
    assert "error bars" not in netkin(f"compare --plan {MODELS}").stdout


@pytest.mark.usefixtures("parts")
def test_a_command_says_what_its_file_holds(netkin):
    line = netkin("merge 1.stats 3.stats --out two.stats")
    words = "netkin:digits and netkin:digits@other.pt on digits:test, 240 examples (0 to 119, 240 to 359) in 8 chunks"
    assert line.stdout == f"two.stats: {words}\n"
    missing = "warning: 240 of 360 examples are present; missing: 120 to 239\n"
    assert line.stderr == missing
    assert netkin("compare two.stats").stderr == missing
    document = json.loads(netkin("merge 1.stats 3.stats --out two.stats --json --overwrite").stdout)
    assert (document["examples"], document["expected"], document["missing"]) == (240, 360, [[120, 240]])
    assert (document["ranges"], document["chunks"]) == ([[0, 120], [240, 360]], 8)
    assert (len(document["settings_digest"]), document["settings"]["chunks"]) == (24, "8")
    assert {"cka", "nbs", "svcca"} <= set(document["measures"])


def test_statistics_of_a_model_with_itself_name_it_once(netkin):
    result = netkin("collect netkin:digits --data digits:test --layers fc --out fc.stats")
    assert result.stdout == "fc.stats: netkin:digits on digits:test, 360 examples (0 to 359)\n"


def test_without_a_measure_that_is_read_for_which_was_collected(netkin, weights):
    netkin(f"collect {MODELS} --measure cka_rbf --measure nbs --out rows.stats")
    assert list(json.loads(netkin("compare rows.stats --json").stdout)["tables"]) == ["cka_rbf", "nbs"]
    netkin(f"collect {MODELS} --out linear.stats")
    assert list(json.loads(netkin("compare linear.stats --json").stdout)["tables"]) == ["cka"]


@pytest.mark.usefixtures("parts")
def test_a_page_and_a_figure_are_made_from_statistics(netkin):
    pytest.importorskip("matplotlib", reason="a figure needs matplotlib: pip install 'netkin[figures]'")
    result = netkin("compare 1.stats --errors --report one.html --figure one.png")
    assert result.exit_code == 0
    assert "±" in Path("one.html").read_text(encoding="utf-8")
    assert Path("one.png").stat().st_size > 1000


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    "other, words",
    [
        ("--part 1/4 --errors --chunks 8", "these parts overlap: both hold the examples 0 to 89"),
        ("--part 2/3", "their numbers of chunks differ, 8 and 0."),
        ("--part 2/3 --errors --chunks 8 --shape flatten", "their layers of 'netkin:digits' differ"),
        ("--part 2/3 --errors --chunks 8 --measure nbs", "their measures differ"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_the_name_of_their_file(netkin, other, words):
    netkin(f"collect {MODELS} {other} --out other.stats")
    said = refusal(netkin, "merge 1.stats other.stats --out all.stats")
    assert said.startswith("netkin: 'other.stats' does not fit the previous parts: ")
    assert words in said


@pytest.mark.usefixtures("parts")
def test_a_part_of_other_weights_is_refused(netkin):
    torch.save(seeded(architecture("digits"), 8).state_dict(), "other.pt")
    netkin(f"collect {MODELS} --part 2/3 --errors --chunks 8 --out 2.stats --overwrite")
    said = refusal(netkin, "merge 1.stats 2.stats --out all.stats")
    assert "their weights of 'netkin:digits@other.pt' differ" in said


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    "line, code, words",
    [
        ("compare 1.stats --measure cka_rbf", 1, "these statistics can't serve 'cka_rbf': they hold LayerMoments."),
        (
            "compare 1.stats --data digits:test",
            2,
            "--data concerns the pass over the data, which '1.stats' already holds",
        ),
        ("compare 1.stats --examples 5", 2, "--examples concerns the pass over the data"),
        ("compare 1.stats --chunks 5 --errors", 2, "--chunks concerns the pass over the data"),
        ("compare 1.stats 2.stats", 2, "'1.stats' is a file of statistics, which holds both models; give it alone."),
        ("compare netkin:digits 2.stats --data digits", 2, "'2.stats' is a file of statistics"),
        ("compare gone.stats", 2, "--data is missing: models need examples to run on. A file of statistics needs none"),
        ("compare netkin:digits", 2, "Error: --data is missing: models need examples to run on."),
        ("report 1.stats", 1, "'1.stats' holds statistics and no values yet; `netkin compare"),
        ("merge other.pt --out all.stats", 1, "'other.pt' is no netkin file, or only a part of one"),
        ("merge gone.stats --out all.stats", 1, "cannot read 'gone.stats': No such file"),
        ("merge 1.stats 2.stats --out other.pt", 1, "--out would write over 'other.pt'; choose"),
        ("merge 1.stats --out nowhere/all.stats", 2, "the folder 'nowhere' does not exist."),
        (
            "compare 1.stats --out 2.stats",
            1,
            "--out would write over '2.stats'; choose",
        ),
        (f"collect {MODELS} --out other.pt", 1, "--out would write over 'other.pt'; choose"),
        (f"collect {MODELS} --part 17/16 --out x.stats", 2, "parts are numbered from 1 to their count; got 17/16."),
        (f"collect {MODELS} --part third --out x.stats", 2, "a part is written as '3/16', the third of sixteen"),
        (f"collect {MODELS} --part 1/400 --out x.stats", 1, "360 examples can't be split into 400 parts; take fewer."),
        (
            f"collect {MODELS} --errors --chunks 400 --out x.stats",
            1,
            "--chunks: chunks=400 are more than the 360 examples;",
        ),
        (f"collect {MODELS} --chunks 5 --out x.stats", 2, "--chunks needs --errors."),
        (f"compare {MODELS} --chunks 5", 2, "--chunks needs --errors."),
        (f"compare {MODELS} --errors --chunks 1", 2, "1 is not in the range x>=2"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_written(netkin, line, code, words):
    assert words in refusal(netkin, line, code)


def test_results_are_told_from_statistics(netkin):
    netkin("compare netkin:digits --data digits:test --layers fc --out ab.netkin")
    words = "netkin: 'ab.netkin' holds a finished result and no statistics; `netkin report ab.netkin` shows it."
    assert refusal(netkin, "compare ab.netkin") == words
    assert refusal(netkin, "merge ab.netkin --out all.stats") == words
    again = netkin("compare netkin:digits --data digits:test --layers fc --measure nbs --out ab.netkin --overwrite")
    assert again.exit_code == 0
    assert results.load("ab.netkin").measures == ("nbs",)


def test_errors_of_statistics_without_chunks_are_refused(netkin):
    netkin("collect netkin:digits --data digits:test --layers fc --out fc.stats")
    said = refusal(netkin, "compare fc.stats --errors")
    assert said.startswith("netkin: 'fc.stats' has no chunks of examples")
    assert said.endswith("collect with --errors.")


def test_parts_of_data_given_one_by_one_have_their_start(netkin, tmp_path):
    (tmp_path / "nk_shards.py").write_text(
        "import os, torch\n"
        "def shard():\n"
        "    first = 30 * int(os.environ['SHARD'])\n"
        "    return [torch.randn(90, 1, 8, 8, generator=torch.Generator().manual_seed(0))[first : first + 30]]\n"
    )
    for shard in range(3):
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SHARD", str(shard))
            line = f"collect netkin:digits --data nk_shards:shard --layers relu1 --layers fc --start {30 * shard}"
            assert netkin(f"{line} --out {shard}.stats").exit_code == 0
    netkin("merge 0.stats 1.stats 2.stats --out all.stats")
    images = torch.randn(90, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = compare(load_model("netkin:digits"), data=images, layers=["relu1", "fc"])
    found = json.loads(netkin("compare all.stats --json").stdout)
    assert found["examples"] == 90
    assert np.array(found["tables"]["cka"]["values"]) == pytest.approx(expected.to_numpy(), abs=1e-6)


SOURCES = str(Path(nk.__file__).parents[1])
COMPARE = ["compare", "netkin:digits", "--data", "digits:test", "--layers", "relu*", "--engine", "distributed"]
BROKEN = """
import os
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 3)

    def forward(self, images):
        if os.environ["RANK"] == "1":
            if os.environ.get("KILLED"):
                os.kill(os.getpid(), 9)
            raise OSError("this rank is broken")
        return self.fc(images.flatten(1))


def net():
    torch.manual_seed(0)
    return Net()
"""


@pytest.fixture
def torchrun(tmp_path, quick_python):
    """Return a function that runs a command of netkin in two ranks, in an empty folder."""
    start = [quick_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "netkin"]
    around = {"PYTHONPATH": f"{SOURCES}:{tmp_path}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    around["PYTHON_EXEC"] = str(quick_python)

    def run(*arguments, **environment):
        environment = os.environ | around | environment
        return subprocess.run(
            [*start, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )

    return run


@pytest.mark.slow
def test_the_first_rank_alone_prints_and_writes(torchrun, tmp_path):
    done = torchrun(*COMPARE, "--errors", "--out", "ab.netkin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cka: similarity") == 1
    assert done.stderr.count("saved to ab.netkin") == 1
    found = nk.load(tmp_path / "ab.netkin")
    whole = nk.compare(nk.load_model("netkin:digits"), data=nk.load_data("digits:test"), layers="relu*", errors=True)
    assert found["cka"].values == pytest.approx(whole["cka"].values, abs=1e-6)
    assert found["cka"].replicates == pytest.approx(whole["cka"].replicates, abs=1e-6)
    assert found.provenance["call"].startswith("netkin compare netkin:digits --data digits:test")


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_and_nothing_is_written(torchrun, tmp_path):
    (tmp_path / "broken_nets.py").write_text(BROKEN)
    done = torchrun("compare", "broken_nets:net", *COMPARE[2:4], *COMPARE[6:], "--out", "ab.netkin")
    assert done.returncode == 1
    assert "netkin: rank 1 failed: OSError: this rank is broken" in done.stderr
    assert "netkin: this rank is broken" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "ab.netkin").exists()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all(torchrun, tmp_path):
    (tmp_path / "broken_nets.py").write_text(BROKEN)
    done = torchrun("compare", "broken_nets:net", *COMPARE[2:4], *COMPARE[6:], KILLED="yes")
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "command", [COMPARE, ["collect", *COMPARE[1:], "--out", "a.stats"]], ids=["compare", "collect"]
)
def test_without_torchrun_the_engine_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, command, prog_name="netkin")
    assert result.exit_code == 1
    assert result.stderr.startswith("netkin: --engine: engine='distributed' needs a group of processes: start")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_engine_is_a_misuse():
    result = CliRunner().invoke(cli, [*COMPARE[:-1], "cluster"], prog_name="netkin")
    assert result.exit_code == 2
    assert "'cluster' is not one of 'local', 'distributed', 'ray'" in result.stderr


def test_a_file_of_statistics_takes_no_engine(tmp_path):
    path = tmp_path / "a.stats"
    nk.collect(nk.load_model("netkin:digits"), data=nk.load_data("digits:test"), layers="relu*").save(path)
    result = CliRunner().invoke(cli, ["compare", str(path), "--engine", "distributed"], prog_name="netkin")
    assert result.exit_code == 2
    assert "--engine concerns the pass over the data" in result.stderr
