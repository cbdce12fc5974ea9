"""Scaling: one comparison on two processes, many checkpoints within the memory of the plan, and what Ray adds.

`python bench/run.py two_processes thousand_checkpoints ray_checkpoints` measures; each takes some minutes on two cores.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from clock import seconds

import netkin as nk

IMAGES, BATCH, REPEATS = 2_048, 128, 5
MEASURES = ["cka", "svcca"]
CHECKPOINTS, EXAMPLES, WIDTH = 1_000, 512, 24
MEMORY = 500_000_000  # bytes for the statistics, rows and models of a thousand checkpoints
LAYERS = ["1", "3"]
FEW, TURNS = 100, 3  # checkpoints for Ray, and how often both ways run


# --- one comparison on two processes ----------------------------------------------------------------------------------


def two_processes() -> dict[str, Any]:
    """Return how much faster two processes are than one, for a comparison and for its forward passes alone.

    The two ranks measure in turn, several times: one alone, both together, each with one thread.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), folder], env=environment, stdout=subprocess.PIPE, text=True
            )
            for rank in (0, 1)
        ]
        said = [one.communicate()[0] for one in ranks]
    if any(one.returncode for one in ranks):
        raise SystemExit("a rank has failed")
    times = json.loads(said[0].splitlines()[-1])
    gains = {what: [alone / both for alone, both in zip(*times[what], strict=True)] for what in times}
    ratios = [ours / floor for ours, floor in zip(gains["compare"], gains["forward"], strict=True)]
    return {
        "ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios), "repeats": REPEATS, "threads": 1,
        "gain": median(gains["compare"]), "floor_gain": median(gains["forward"]), "seconds": min(times["compare"][0]),
    }  # fmt: skip


def rank_main(rank: int, folder: str) -> None:
    """Measure as one of two ranks."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=30))
    models = [nk.load_model("netkin:resnet20", seed=seed) for seed in (0, 1)]
    images = torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    share = images[rank * IMAGES // 2 : (rank + 1) * IMAGES // 2]

    def compare(engine: str) -> Any:
        return nk.compare(*models, images, MEASURES, engine=engine, progress=False)

    times: dict[str, tuple[list[float], list[float]]] = {"compare": ([], []), "forward": ([], [])}
    for _ in range(REPEATS + 1):
        works: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "forward": (lambda: _forward(models, images), lambda: _forward(models, share)),
            "compare": (lambda: compare("local"), lambda: compare("distributed")),
        }
        for what, (alone, together) in works.items():
            if rank == 0:
                times[what][0].append(seconds(alone))
            times[what][1].append(_together(together))
    if rank == 0:  # the first round warms up
        print(json.dumps({what: [one[1:] for one in both] for what, both in times.items()}))
    dist.barrier()
    dist.destroy_process_group()


@torch.inference_mode()
def _forward(models: list[torch.nn.Module], images: torch.Tensor) -> None:
    for batch in images.split(BATCH):
        for model in models:
            model(batch)


def _together(work: Callable[[], Any]) -> float:
    """Return how long both ranks take, from when both have come until both are done."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


# --- many checkpoints -------------------------------------------------------------------------------------------------


def thousand_checkpoints(count: int = CHECKPOINTS) -> dict[str, Any]:
    """Return what all pairs of many checkpoints took, beside what the plan said: seconds, and bytes at the peak."""
    with tempfile.TemporaryDirectory() as folder:
        models, data = checkpoints(Path(folder), count), inputs()
        options: dict[str, Any] = {"layers": LAYERS, "pairs": "corresponding", "memory": MEMORY, "progress": False}
        small = dict(list(models.items())[:12])
        nk.compare_many(small, data, "cka", **options)  # what is loaded once, whatever the work
        plan = nk.explain_many(models, data, "cka", **options)
        before = _peak()
        begin, used = time.perf_counter(), time.process_time()
        many = nk.compare_many(models, data, "cka", **options)
        took, used, grown = time.perf_counter() - begin, time.process_time() - used, _peak() - before
        assert len(many) == count * (count - 1) // 2
    return {
        "checkpoints": count, "pairs": len(many), "blocks": len(plan.schedule.blocks), "forward_passes": plan.passes,
        "planned_bytes": plan.bytes, "result_bytes": plan.result, "peak_bytes": grown,
        "seconds": took, "cpu_seconds": used, "ratio": grown / plan.bytes, "threads": torch.get_num_threads(),
    }  # fmt: skip


def ray_checkpoints(count: int = FEW) -> dict[str, Any]:
    """Return how much longer all pairs of a hundred checkpoints take by one worker of Ray than in this process.

    Ray's own start, and that of its worker, which imports torch and netkin, are told apart. Both ways run in turn, and
    the ratio is that of the sums: `ratio` of the time on the wall, `cpu_ratio` of that of all processes.
    """
    import ray

    # workers of Ray leave processors to others, which would count as Ray's time where a machine has more to do
    os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    torch.set_num_threads(1)
    options: dict[str, Any] = {"layers": LAYERS, "pairs": "corresponding", "progress": False}
    with tempfile.TemporaryDirectory() as folder:
        models = checkpoints(Path(folder), count)
        few = dict(list(models.items())[:2])

        def by_ray(some: dict[str, str]) -> Any:
            return nk.compare_many(some, "scaling:batches", MEASURES, engine="ray", **options)

        def here() -> Any:
            return nk.compare_many(models, batches(), MEASURES, **options)

        def start() -> None:
            ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
            by_ray(few)

        began = seconds(start)
        here()
        times = [(*_spent(here), *_spent(lambda: by_ray(models))) for _ in range(TURNS)]
        ray.shutdown()
    wall, cpu, ray_wall, ray_cpu = map(sum, zip(*times, strict=True))
    return {
        "floor_seconds": wall / TURNS, "seconds": ray_wall / TURNS, "ratio": ray_wall / wall,
        "floor_cpu_seconds": cpu / TURNS, "cpu_seconds": ray_cpu / TURNS, "cpu_ratio": ray_cpu / cpu,
        "load": os.getloadavg()[1], "start_seconds": began, "checkpoints": count, "threads": 1,
    }  # fmt: skip


def _spent(work: Callable[[], Any]) -> tuple[float, float]:
    """Return how long `work` takes, on the wall and of the processors, with all processes that this one has started."""
    before, took = _processor_seconds(), seconds(work)
    return took, _processor_seconds() - before


def _processor_seconds() -> float:
    import psutil

    times = [one.cpu_times() for one in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(one.user + one.system for one in times)


def checkpoints(folder: Path, count: int) -> dict[str, str]:
    """Return the names of the checkpoints of a small net on its way, by their steps."""
    torch.manual_seed(0)
    model = small_net()
    found = {}
    for step in range(count):
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * torch.randn_like(weight)
        torch.save(model.state_dict(), folder / f"step{step}.pt")
        found[f"step {step}"] = f"scaling:small_net@{folder / f'step{step}.pt'}"
    return found


def small_net() -> torch.nn.Module:
    """Return a net of three layers."""
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )  # fmt: skip


def inputs() -> torch.Tensor:
    """Return the examples that all checkpoints see."""
    return torch.randn(EXAMPLES, 16, generator=torch.Generator().manual_seed(1))


def batches() -> list[torch.Tensor]:
    """Return the same by the name under which workers find them."""
    return list(inputs().split(BATCH))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), sys.argv[2])
