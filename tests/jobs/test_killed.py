"""Work that is killed by kill -9 at random moments, or whose disk is full, and continued gives what uninterrupted
work gives, bit for bit.

`NETKIN_KILLS=50 pytest tests/jobs/test_killed.py` kills fifty times.
"""

import errno
import os
import random
import re
import signal
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

import netkin as nk
from netkin import files, jobs
from netkin.results import Comparison, Comparisons, Series
from netkin.sources.weights import read_state
from netkin.training.saving import unpack_state
from processes import ended, started
from quickly import slow_but

KILLS = int(os.environ.get("NETKIN_KILLS", "4"))
TIMES = ("created",)
FULL = "(File too large|No space left on device); what is kept .* is continued by the same call.$"
FULL = rf"^cannot write '.*ab.netkin(.job/parts/state.netkin)?': {FULL}"


def nets(count):
    """Return a net at several states of a pretended training."""
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        found.append(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).eval())
    return found


def batches():
    torch.manual_seed(9)
    inputs, (model,) = torch.randn(240, 6), nets(1)
    return [(part, model(part).argmax(1)) for part in inputs.split(40)]


def swept(path):
    a, b = nets(2)
    hows = ["least_squares", "random", "task_loss(epochs=2, every=3)"]
    return nk.stitch_all(a, b, batches(), batches(), hows, layers=["1", "3"], save=path, progress=False)


def followed(path):
    run = dict(enumerate(nets(6)))
    return nk.dynamics(run, batches(), ["svcca", "cka"], transform=lambda inputs: 2 * inputs, save=path, progress=False)


def compared(path):
    """Compare all pairs of some nets, in several passes, of which each takes several shares of the data."""
    models = {f"net {place}": net for place, net in enumerate(nets(3))}
    how = {"pairs": "corresponding", "errors": True, "chunks": 2, "memory": 420_000, "progress": False}
    return nk.compare_many(models, batches(), ["cka", "nbs"], save=path, **how)


def learned(path):
    model = nn.Sequential(*nets(1)[0], nn.Dropout(0.2), nn.BatchNorm1d(3))
    recipe = nk.Recipe(epochs=4, optimizer="adam", lr=0.01, schedule="cosine")
    history = nk.train(model, batches(), recipe, test=batches()[:1], seed=3, save=path, every=2, progress=False)
    return model.state_dict(), history


def read_training(path):
    (part,) = jobs.beside(path).glob("parts/*.netkin")
    header, arrays = files.read(part)
    return read_state(path), unpack_state(header["values"]["state"], arrays)["history"]


WORK = {
    "sweep": (swept, nk.load), "study": (followed, nk.load), "pairs": (compared, nk.load),
    "training": (learned, read_training),
}  # fmt: skip


def worked(name, path):
    """Do the work in a process of its own, where each file takes a little to write: a moment to be killed at."""
    write = files.write_bytes

    def slow(*given, **options):
        time.sleep(0.004)
        write(*given, **options)

    files.write_bytes = slow
    torch.set_num_threads(1)
    WORK[name][0](path)


def killed(name, path, after):
    """Do the work in a process of its own, and kill it after so many seconds; tell whether it had not ended before."""
    code = ended(started(worked, name, path), after)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def without_times(result):
    if isinstance(result, Series):
        return replace(result, comparisons=tuple(map(without_times, result.comparisons)))
    if isinstance(result, Comparisons):
        return list(map(without_times, result.values()))
    if isinstance(result, Comparison):
        return replace(result, **dict.fromkeys(TIMES, ""))
    weights, history = result
    plain = {name: weight.tolist() for name, weight in weights.items()}
    return plain, [{name: value for name, value in record.items() if name != "seconds"} for record in history]


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_continued_after_kill_9_is_uninterrupted_bit_for_bit(name, tmp_path):
    work, load = WORK[name]
    torch.set_num_threads(1)
    for file in ("warm.netkin", "whole.netkin"):  # the first of all processes imports what the others have
        begun = time.perf_counter()
        assert not killed(name, tmp_path / file, 600)
    took, draw, kills, rounds = time.perf_counter() - begun, random.Random(0), 0, 0
    whole = without_times(load(tmp_path / "whole.netkin"))
    while kills < KILLS:
        rounds += 1
        path = tmp_path / f"{rounds}.netkin"
        while kills < KILLS and killed(name, path, draw.uniform(0, took)):
            kills += 1
            assert not path.exists() or load(path)  # never half a file
        assert without_times(work(path)) == whole
        assert without_times(load(path)) == whole
        assert jobs.read(path).condition == "done"
        assert not list(tmp_path.rglob(".*"))


@contextmanager
def full_after(writes):
    """Inside the `with`, the disk is full after some files were written."""
    left = iter(range(writes))

    def synced(file):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        yield


def check_full_disk(name, folder, full):
    """See that work whose disk is full gives all numbers, leaves nothing unfinished, and is continued."""
    work, load = WORK[name]
    whole, path = without_times(work(folder / "whole.netkin")), folder / "ab.netkin"
    with full, pytest.warns(nk.UnsavedWarning, match=FULL):
        assert without_times(work(path)) == whole
    assert not list(folder.rglob(".*"))
    assert not path.exists() or load(path)
    begun, parts = jobs.read(path), list(path.with_name("ab.netkin.job").glob("parts/[!p]*"))  # without a plan
    counted = [part for part in parts if "similarity" not in part.name]
    # a training counts its steps, and pairs of models the examples that were read
    assert name in ("training", "pairs") or begun.condition != "failed" or begun.done == len(counted)
    assert without_times(work(path)) == whole
    assert without_times(load(path)) == whole
    assert jobs.read(path).condition == "done"
    return begun


@pytest.mark.parametrize("size", slow_but([4096, 8192], 4096))
@pytest.mark.parametrize("name", slow_but(WORK, "training"))
def test_files_that_are_too_large_take_no_number_along_and_are_written_later(name, size, tmp_path, files_up_to):
    state = check_full_disk(name, tmp_path, files_up_to(size))
    assert state.condition == "failed"
    assert re.match(FULL, state.error)


@pytest.mark.parametrize("writes", slow_but([4, 7], 4))
@pytest.mark.parametrize("name", slow_but(WORK, "study", "pairs"))
def test_a_disk_that_fills_up_takes_no_number_along_and_the_rest_is_continued(name, writes, tmp_path):
    state = check_full_disk(name, tmp_path, full_after(writes))
    assert state.total is None or state.done < state.total
