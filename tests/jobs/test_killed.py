"""Work that is killed by kill -9 at random moments and continued gives what uninterrupted work gives, bit for bit.

`NETKIN_KILLS=50 pytest tests/jobs/test_killed.py` kills fifty times.
"""

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import netkin as nk
from netkin import files, jobs
from netkin.results import Comparison, Series

KILLS = int(os.environ.get("NETKIN_KILLS", "4"))
TIMES = ("created",)


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
    hows = ["least_squares", "procrustes", "random", "task_loss(epochs=8, every=3)", "task_loss(rank=2, epochs=6)"]
    return nk.stitch_all(a, b, batches(), batches(), hows, examples=200, save=path, progress=False)


def followed(path):
    run = dict(enumerate(nets(12)))
    return nk.dynamics(run, batches(), ["svcca", "cka"], transform=lambda batch: (2 * batch[0], batch[1]), save=path)


WORK = {"sweep": (swept, Comparison), "study": (followed, Series)}


def slowed():
    """Let each part take a little, so that there are moments to be killed at, also while a file is being written."""
    write = files.write_bytes

    def slow(path, contents, *given, **options):
        time.sleep(0.004)
        write(path, contents, *given, **options)

    files.write_bytes = slow


def killed(name, path, after):
    """Do the work in a process of its own, and kill it so many seconds after its job began; tell whether it ended."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, name, str(path)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.kill()
        errors = process.communicate()[1]
    assert process.returncode in (0, -9), errors
    return process.returncode == 0


def without_times(result):
    if isinstance(result, Series):
        return replace(result, comparisons=tuple(map(without_times, result.comparisons)))
    return replace(result, **dict.fromkeys(TIMES, ""))


@pytest.mark.parametrize("name", WORK)
def test_continued_after_kill_9_is_uninterrupted_bit_for_bit(name, tmp_path):
    work, kind = WORK[name]
    torch.set_num_threads(1)
    begun = time.perf_counter()
    whole = without_times(work(tmp_path / "whole.netkin"))
    took, draw, kills, rounds = time.perf_counter() - begun, random.Random(0), 0, 0
    while kills < KILLS:
        rounds += 1
        path = tmp_path / f"{rounds}.netkin"
        while kills < KILLS and not killed(name, path, draw.uniform(0, 2 * took)):
            kills += 1
            assert not path.exists() or kind.load(path)  # never half a file
        assert without_times(work(path)) == whole
        assert without_times(kind.load(path)) == whole
        assert jobs.read(path).condition == "done"
        assert not list(tmp_path.rglob(".*"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    slowed()
    chosen, _ = WORK[sys.argv[1]]
    print("ready", flush=True)
    chosen(Path(sys.argv[2]))
