"""Files of ours whose contents were harmed: each opens as a result that can be used, or is refused in a sentence."""

import os
import random
import shutil

import pytest
import torch
from click.testing import CliRunner
from hypothesis import settings
from torch import nn

import netkin as nk
from netkin import files
from netkin.cli import cli
from netkin.errors import FileError, NetkinError
from netkin.results.packing import READERS, RESULTS
from quickly import slow_after, slow_but
from tests.file_worlds import WHOLE, network, use, write_harmed, write_whole

# of each file; as for properties that hypothesis tests, the everyday run tries fewer
CASES = int(os.environ.get("NETKIN_FUZZ", min(40, settings.default.max_examples)))
MANY = 100


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a folder with a whole file of every kind."""
    return write_whole(tmp_path_factory.mktemp("whole"))


def opened(path):
    """Return what a file gives: without models and, if it belongs to some, with them."""
    kind = files.read_header(path)["kind"]
    count = READERS[kind][2] if kind in READERS else 0
    found = [] if kind == "kernel ridge" else [nk.load(path)]
    return found + ([nk.load(path, *[network()] * count)] if count else [])


def test_every_kind_that_can_be_loaded_has_a_file_here(whole):
    assert {path.name for path in whole.iterdir()} == {*WHOLE}
    kinds = {path: files.read_header(path)["kind"] for path in whole.iterdir()}
    assert {*kinds.values()} == {*RESULTS, *READERS}
    passes = [nk.load(path) for path, kind in kinds.items() if kind == "statistics"]
    collectors = {kind.kind for measure in nk.measures.measures().values() for kind in measure.facts.reads.collectors}
    assert {one.kind for found in passes for one in found.every()} == collectors
    chunked = [found for found in passes if found.study.chunks]
    assert {"LayerMoments", "LayerRows"} <= {one.kind for found in chunked for one in found.every()}


@pytest.mark.parametrize("cases", [CASES, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.filterwarnings("ignore")
def test_a_harmed_file_opens_as_something_or_is_refused(whole, tmp_path, name, cases):
    refusals, harm = [], tmp_path / "harmed"
    for case in range(cases):
        write_harmed(whole / name, harm, random.Random(f"{name} {case}"))
        shown = CliRunner().invoke(cli, ["show", str(harm)]).exception
        assert shown is None or isinstance(shown, SystemExit), f"case {case} of {name} can't be shown: {shown!r}"
        try:
            found = opened(harm)
        except FileError as refusal:
            refusals.append(str(refusal))
            continue
        except Exception as fault:
            if name == "kernel ridge" and "pass that model" in str(fault):
                continue
            pytest.fail(f"case {case} of {name} can't be loaded: {fault!r}")
        try:
            for result in found:
                use(result, NetkinError)
        except Exception as fault:
            pytest.fail(f"case {case} of {name} can't be used: {fault!r}")
    assert all("harmed'" in refusal for refusal in refusals)
    assert len(refusals) > cases // 3


def nets(count):
    for seed in range(count):
        torch.manual_seed(seed)
        yield nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


def batches():
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(9))
    return [(part, torch.arange(20) % 3) for part in inputs.split(20)]


JOBS = {
    "training": lambda path: nk.train(*nets(1), batches(), epochs=2, optimizer="adam", save=path, every=2),
    "sweep": lambda path: nk.stitch_all(
        *nets(2), batches(), batches(), ["ridge", "task_loss(epochs=1, every=2)"], layers=["1"], save=path
    ),
    "study": lambda path: nk.dynamics(dict(enumerate(nets(3))), batches(), "cka", save=path),
    "many": lambda path: nk.compare_many(dict(zip("abc", nets(3), strict=True)), batches(), "cka", save=path),
    "stitch": lambda path: nk.stitch(*pairs(), batches(), "task_loss", epochs=1, resume=path),
}


def pairs():
    a, b = nets(2)
    return a, "1", b, "1"


SLOW = ("sweep", "stitch")  # whose parts are kept as those of a study and a training are


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in JOBS])
@pytest.mark.filterwarnings("ignore")
def test_work_goes_on_from_harmed_parts_or_refuses_them(tmp_path, name):
    work, place, harm = JOBS[name], tmp_path / "whole", tmp_path / "harmed"
    place.mkdir()
    work(place / "run")
    written = [path for path in sorted(place.rglob("*")) if path.is_file() and path.name != "lock"]
    refused = []
    for case in range(CASES // 2):
        draw = random.Random(f"{name} {case}")
        shutil.copytree(place, harm)
        chosen = draw.choice(written)
        write_harmed(chosen, harm / chosen.relative_to(place), draw)
        try:
            work(harm / "run")
        except FileError as refusal:
            refused.append(str(refusal))
        except Exception as fault:
            pytest.fail(f"case {case} of {name}, {chosen.name}, ends in {fault!r}")
        shutil.rmtree(harm)
    assert len(refused) > CASES // 10
    assert all("harmed" in refusal for refusal in refused)


@pytest.mark.parametrize("name", slow_after(8, WHOLE))
@pytest.mark.filterwarnings("ignore")
def test_whole_files_open_and_can_be_used(whole, name):
    found = opened(whole / name)
    for result in found:
        use(result, NetkinError)  # as a measure that they do not serve
        assert str(result)
    assert found


@pytest.mark.parametrize("name", slow_but(WHOLE, *list(WHOLE)[::4]))
def test_a_flipped_bit_is_found_wherever_it_lies(whole, tmp_path, name):
    contents, draw = (whole / name).read_bytes(), random.Random(name)
    start = 8 + int.from_bytes(contents[:8], "little")  # of the arrays
    head, tail = range(start), range(start, len(contents))
    chosen = [*draw.sample(head, 5 * CASES), *draw.sample(tail, min(2 * CASES, len(tail)))]
    for position in [*range(16), *chosen, start - 1, len(contents) - 1]:
        harmed = bytearray(contents)
        harmed[position] ^= 1 << draw.randrange(8)
        (tmp_path / "harmed").write_bytes(harmed)
        with pytest.raises(FileError):
            files.read(tmp_path / "harmed")
        if position >= start:  # a header is as it was, and can be read without the arrays
            assert files.read_header(tmp_path / "harmed") == files.read_header(whole / name)
