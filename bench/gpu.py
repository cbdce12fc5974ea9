"""What is measured on a GPU: `python bench/gpu.py OUT.json` measures it all, or what is named behind it.

`bench/run.py` shows it.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clock import ratio
from freezing import NETS, freezing
from gradients import gradients, sketched, sketched_flatten
from nets import batches, convolutions, minibatch_in_float64, nets
from probing import SHAPES, probing
from reading import reading
from torch import Tensor, nn

import netkin as nk
from netkin.statistics import Moments
from training import NAMES, training

BATCH, COUNT = 512, 40
LINEAR = [name for name, measure in nk.measures.measures().items() if measure.facts.reads is Moments]


@torch.no_grad()
def forward_both(models: tuple[nn.Module, nn.Module], images: list[Tensor]) -> None:
    """Run both networks on all batches and wait for the last: the floor, in the precision that torch is set to."""
    for batch in images:
        for model in models:
            model(batch)
    torch.cuda.synchronize()


def waited(work: Any) -> Any:
    result = work()
    torch.cuda.synchronize()
    return result


def minibatch(models: Any, images: list[Tensor], layers: list[str]) -> Any:
    measure = f"cka_minibatch(batch={BATCH})"
    return waited(lambda: nk.compare(*models, images, measures=[measure], layers=layers, shape="flatten"))


def minibatch_error(models: Any, images: list[Tensor], layers: list[str]) -> float:
    """Return how far the pass is from the same estimator in float64."""
    ours = minibatch(models, images, layers).to_numpy()
    return float(np.abs(ours - minibatch_in_float64(models, images, layers)).max())


def pool(models: Any, images: list[Tensor], layers: list[str], **options: Any) -> dict[str, Any]:
    """Return the pass that collects for all linear measures against the forward passes, and the time to read them."""

    def collected() -> Any:
        return nk.collect(*models, images, LINEAR, layers=layers, progress=False, **options)

    waited(collected)
    took = ratio(lambda: waited(collected), lambda: forward_both(models, images), repeats=5)
    statistics = waited(collected)
    waited(statistics.compute)  # what is loaded and compiled at the first call is left aside
    statistics = waited(collected)
    start = time.perf_counter()
    waited(lambda: statistics.compute(progress=False))
    return {"measures": len(LINEAR), "reading_seconds": time.perf_counter() - start} | took


def synchronisations(models: Any, images: list[Tensor], layers: list[str]) -> int:
    """Return how many more times the host waits for the device when there are ten more batches."""
    counts = []
    for count in (5, 15):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            minibatch(models, images[:count], layers)
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(one.message) for one in caught))
    return counts[1] - counts[0]


def devices_agree() -> dict[str, float]:
    """Return for every measure how far the values on the GPU and on the CPU lie apart, in float32 inputs."""
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(2_000, 96, generator=draw).relu()
    Y = (X @ torch.randn(96, 64, generator=draw) + torch.randn(2_000, 64, generator=draw)).relu()
    apart = {}
    for name, measure in nk.measures.measures().items():
        here, there = (float(measure.function(X.to(place), Y.to(place))) for place in ("cpu", "cuda"))
        apart[name] = abs(here - there) / max(1.0, abs(here))
    return apart


def models_agree(models: Any, images: Tensor, layers: list[str]) -> float:
    """Return how far two whole comparisons lie apart, one run on the GPU and one on the CPU."""
    measures = ["cka", f"cka_minibatch(batch={len(images)})", "nbs", "svcca_k"]
    there = nk.compare(*models, [images], measures=measures, layers=layers, exact_model=True).to_numpy()
    here = nk.compare(
        *(copy.deepcopy(model).cpu() for model in models), [images.cpu()], measures=measures, layers=layers
    )
    return float(np.abs(there - here.to_numpy()).max())


def tasks() -> dict[str, Callable[[], Any]]:
    """Return what is measured by its name, in the order in which it is."""
    models = tuple(model.cuda() for model in nets())
    images = [batch.cuda() for batch in batches(COUNT, BATCH)]
    layers = convolutions(models[0])

    def minibatches() -> dict[str, float]:
        minibatch(models, images, layers)
        return ratio(lambda: minibatch(models, images, layers), lambda: forward_both(models, images), 5)

    return {
        "devices_agree": devices_agree,
        "models_agree": lambda: models_agree(models, images[0][:256], layers),
        "minibatch_error": lambda: minibatch_error(models, images[:2], layers),
        "synchronisations_in_ten_batches": lambda: synchronisations(models, images, layers),
        "minibatch": minibatches,
        "pool": lambda: pool(models, images, layers),
        "pool of 81,920 images": lambda: pool(models, 4 * images, layers),
        "pool with errors": lambda: pool(models, images, layers, errors=True),
        "reading": lambda: reading("cuda"),
        "freezing": lambda: {name: freezing(name, batch=512, repeats=20, device="cuda") for name in NETS},
        "probing": lambda: {shape: probing(shape, steps=100, device="cuda") for shape in SHAPES},
        "training": lambda: {name: training(name, "cuda") for name in NAMES},
        "gradients": lambda: gradients("cuda"),
        "sketched": lambda: sketched("cuda"),
        "sketched_flatten": lambda: sketched_flatten("cuda"),
    }


def main(out: Path, asked: list[str]) -> None:
    """Measure what is asked for, or everything, and write it down at once; other figures in the file are kept."""
    figures: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    figures |= {"date": date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    figures |= {"netkin": nk.__version__, "batch": BATCH, "images": BATCH * COUNT}
    for name, task in tasks().items():
        if not asked or name in asked:
            figures[name] = task()
            print(json.dumps({name: figures[name]}), flush=True)
            out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2:])
