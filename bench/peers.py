"""What is measured of other packages, in an environment of their own: `python bench/peers.py NAME` prints JSON."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from clock import peak_megabytes, ratio
from nets import batches, convolutions, forward_both, minibatch_in_float64, nets
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 2


def torch_cka(models: Any, layers: list[str], loader: DataLoader) -> Any:
    from torch_cka import CKA

    comparison = CKA(*models, "first", "second", layers, layers)
    with torch.no_grad():
        comparison.compare(loader, loader)
    return comparison.hsic_matrix


def ckatorch(models: Any, layers: list[str], loader: DataLoader) -> Any:
    from ckatorch import CKA

    return CKA(*models, layers=layers, first_name="first", second_name="second")(loader, epochs=1)


def pytorch_cka(models: Any, layers: list[str], loader: DataLoader) -> Any:
    from cka import compute_cka

    return compute_cka(*models, loader, layers=layers, model2_layers=layers, device="cpu", progress=False)[0]


def rsatoolbox(X: np.ndarray, Y: np.ndarray) -> float:
    from rsatoolbox.data import Dataset
    from rsatoolbox.rdm import calc_rdm, compare

    rdms = [calc_rdm(Dataset(matrix), method="euclidean") for matrix in (X, Y)]
    return float(compare(*rdms, method="cosine_cov")[0, 0])


WHOLE_MODEL: dict[str, Callable[..., Any]] = {"torch-cka": torch_cka, "ckatorch": ckatorch, "pytorch-cka": pytorch_cka}


def whole_model(name: str) -> dict[str, Any]:
    """Return the time of a whole-model comparison over that of the two forward passes, and the memory at its peak."""
    models, images = nets(), batches(BATCHES)
    layers = convolutions(models[0])
    loader = DataLoader(TensorDataset(torch.cat(images)), batch_size=len(images[0]))
    work = WHOLE_MODEL[name]
    figures = ratio(lambda: work(models, layers, loader), lambda: forward_both(models, images), repeats=1)
    figures |= {"peak_megabytes": peak_megabytes(), "version": version(name)}
    theirs = np.asarray(work(models, layers, loader))
    return figures | {"error": float(np.abs(theirs - minibatch_in_float64(models, images, layers)).max())}


def two_matrices() -> dict[str, Any]:
    """Return the time of linear CKA of two matrices over that of the two Gram products."""
    draw = np.random.default_rng(0)
    X, Y = (draw.normal(size=(1_000, 512)) for _ in range(2))
    figures = ratio(lambda: rsatoolbox(X, Y), lambda: (X @ X.T, Y @ Y.T), repeats=2)
    return figures | {"version": version("rsatoolbox")}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    try:
        print(json.dumps(two_matrices() if sys.argv[1] == "rsatoolbox" else whole_model(sys.argv[1])))
    except RuntimeError as fault:  # a peer that can't do this work is a figure, too
        print(json.dumps({"failed": str(fault), "version": version(sys.argv[1])}))
