import re
import time

import pytest
from click.testing import CliRunner

from netkin import results
from netkin.cli import cli
from netkin.sources import load_data, load_model
from netkin.training import accuracy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(folder):
    start = time.monotonic()
    result = CliRunner().invoke(cli, ["demo", "--out", str(folder)])
    assert (result.exit_code, result.exception) == (0, None)
    assert time.monotonic() - start < 60
    return result


def test_the_demo_trains_compares_saves_and_says_what_to_notice(shown, folder):
    first, second = results.load(folder / "seed0-seed1.netkin"), results.load(folder / "seed0-untrained.netkin")
    assert first.measures == second.measures == ("cka", "svcca(variance=0.95)", "procrustes_distance")
    assert (first.examples, first.layers_a) == (360, ("relu1", "relu2", "relu3", "relu4", "fc"))
    assert "What to notice" in shown.stdout
    assert str(folder / "seed0-seed1.netkin") in shown.stdout


def test_the_demo_ends_with_the_report_and_its_path(shown, folder):
    assert shown.stdout.rstrip().endswith(str(folder / "report.html"))
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("seed0", "seed1", "untrained", "relu4"))


def test_progress_goes_to_stderr_only(shown):
    assert "training" not in shown.stdout
    assert shown.stderr.count("training a network") == 2


def test_the_networks_it_saves_have_the_accuracies_it_prints(shown, folder):
    printed = dict(re.findall(r"(seed\d|untrained) ([\d.]+)%", shown.stdout))
    assert list(printed) == ["seed0", "seed1", "untrained"]
    for name, share in printed.items():
        model = load_model(f"netkin:digits@{folder / name}.safetensors")
        assert f"{accuracy(model, load_data('digits:test')):.1%}" == f"{share}%"
    assert float(printed["seed0"]) > 95


def test_the_next_command_it_proposes_runs(shown, netkin):
    line = next(line.strip() for line in shown.stdout.splitlines() if line.strip().startswith("netkin compare"))
    assert netkin(line.removeprefix("netkin ")).exit_code == 0


def test_the_same_seed_shows_the_same(shown, folder, netkin):
    assert netkin(f"demo --seed 0 --out {folder}").stdout == shown.stdout


def test_a_quiet_demo_shows_no_progress(tmp_path):
    result = CliRunner().invoke(cli, ["demo", "--quiet", "--out", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "seed0" in result.stdout
