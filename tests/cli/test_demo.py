import re

import numpy as np
import pytest
from click.testing import CliRunner

from netkin import results
from netkin.cli import cli
from netkin.cli.demo import observations
from netkin.results import Comparison
from netkin.sources import load_data, load_model
from netkin.training import accuracy
from table_worlds import table_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(folder, trained_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("netkin.training.trained_digits_net", trained_once)
        result = CliRunner().invoke(cli, ["demo", "--out", str(folder)])
    assert (result.exit_code, result.exception) == (0, None)
    return result


@pytest.mark.slow
def test_the_demo_trains_compares_saves_and_says_what_to_notice(shown, folder):
    first, second = results.load(folder / "seed0-seed1.netkin"), results.load(folder / "seed0-untrained.netkin")
    assert first.measures == second.measures == ("cka", "svcca(variance=0.95)", "procrustes_distance")
    assert (first.examples, first.layers_a) == (360, ("relu1", "relu2", "relu3", "relu4", "fc"))
    assert "What to notice" in shown.stdout
    assert str(folder / "seed0-seed1.netkin") in shown.stdout


@pytest.mark.slow
def test_the_demo_ends_with_the_report_and_its_path(shown, folder):
    assert shown.stdout.rstrip().endswith(str(folder / "report.html"))
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("seed0", "seed1", "untrained", "relu4"))


@pytest.mark.slow
def test_progress_goes_to_stderr_only(shown):
    assert "training" not in shown.stdout
    assert shown.stderr.count("training a network") == 2


@pytest.mark.slow
def test_the_networks_it_saves_have_the_accuracies_it_prints(shown, folder):
    printed = dict(re.findall(r"(seed\d|untrained) ([\d.]+)%", shown.stdout))
    assert list(printed) == ["seed0", "seed1", "untrained"]
    for name, share in printed.items():
        model = load_model(f"netkin:digits@{folder / name}.safetensors")
        assert f"{accuracy(model, load_data('digits:test')):.1%}" == f"{share}%"
    assert float(printed["seed0"]) > 95


@pytest.mark.slow
def test_the_next_command_it_proposes_runs(shown, netkin):
    line = next(line.strip() for line in shown.stdout.splitlines() if line.strip().startswith("netkin compare"))
    assert netkin(line.removeprefix("netkin ")).exit_code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("shared_nets")
def test_the_same_seed_shows_the_same(shown, folder, netkin):
    assert netkin(f"demo --seed 0 --out {folder} --overwrite").stdout == shown.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("shared_nets")
def test_a_quiet_demo_shows_no_progress(tmp_path):
    result = CliRunner().invoke(cli, ["demo", "--quiet", "--out", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "seed0" in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("shared_nets")
def test_on_a_full_disk_only_files_that_were_written_are_named(netkin, tmp_path, files_up_to):
    with files_up_to(20_000):
        result = netkin(f"demo --out {tmp_path}")
    assert result.exit_code == 1
    assert f"Saved\n  {tmp_path / 'seed0-seed1.netkin'}\n  {tmp_path / 'seed0-untrained.netkin'}\n" in result.stdout
    assert not any(words in result.stdout for words in (".safetensors", "Go on with", "Open the report"))
    assert result.stderr.count("File too large") == 4


def comparison(b, values, higher_is_closer=True, missing=None):
    layers = ("in", "out")
    table = table_of(
        id="likeness", name="likeness", parameters={}, layers_a=layers, layers_b=layers, values=np.array(values),
        missing=missing or {}, higher_is_closer=higher_is_closer, bounds=(0, 1), symmetric=True, convention="",
        statistic="",
    )  # fmt: skip
    shapes, widths = {"in": "pool", "out": "pool"}, {"in": 2, "out": 2}
    return Comparison(
        a="one", b=b, layers_a=layers, layers_b=layers, tables={"likeness": table}, shapes_a=shapes, shapes_b=shapes,
        widths_a=widths, widths_b=widths, data="d", examples=9, seed=0, version="0",
    )  # fmt: skip


ALIKE, APART = [[0.9, 0.1], [0.2, 0.7]], [[0.3, 0.5], [0.6, 0.1]]


def test_the_closer_pair_is_named_with_the_means():
    sentence = observations(comparison("two", ALIKE), comparison("raw", APART))[0]
    assert sentence == (
        "likeness, a similarity: layers of the same name average 0.80 for one and two and 0.20 for one and raw, "
        "so one is closer to two."
    )


def test_a_distance_is_read_the_other_way_round():
    sentence = observations(comparison("two", ALIKE, False), comparison("raw", APART, False))[0]
    assert sentence.startswith("likeness, a distance:")
    assert sentence.endswith("so one is closer to raw.")


def test_the_conclusion_turns_when_the_numbers_do():
    assert observations(comparison("two", APART), comparison("raw", ALIKE))[0].endswith("so one is closer to raw.")
    same = observations(comparison("two", ALIKE), comparison("raw", ALIKE))[0]
    assert same.endswith("so one is as close to two as to raw.")


def test_the_layers_most_and_least_alike_are_named():
    sentences = observations(comparison("two", ALIKE), comparison("raw", APART, False))
    assert sentences[1] == "By likeness, one and two are most alike at in (0.90) and differ most at out (0.70)."
    assert sentences[2] == "By likeness, one and raw are most alike at out (0.10) and differ most at in (0.30)."


def test_layers_that_find_their_counterpart_are_counted():
    sentences = observations(comparison("two", ALIKE), comparison("raw", APART))
    assert sentences[3].endswith("closest layer in two is the one of the same name: 2 of 2 by likeness.")
    assert sentences[4].endswith("closest layer in raw is the one of the same name: 0 of 2 by likeness.")


def test_holes_are_left_out():
    holey = comparison("two", [[float("nan"), 0.1], [0.2, 0.7]], missing={("in", "in"): "constant"})
    assert "average 0.70 for one and two" in observations(holey, comparison("raw", APART))[0]
    empty = comparison(
        "two", np.full((2, 2), np.nan), missing={(a, b): "x" for a in ("in", "out") for b in ("in", "out")}
    )
    assert len(observations(empty, comparison("raw", APART))) == 3
