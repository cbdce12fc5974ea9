"""Conv layers by their frequencies: DFT-CCA against CCA of flattened maps, and against the forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from clock import peak_megabytes, ratio, seconds
from nets import batches, forward_both
from torch import Tensor, nn

import netkin as nk
from netkin.sources.architectures import architecture, seeded

SIZE = (32, 16, 16)  # channels, height, width: 8,192 features
BASE = 72  # images, each in all 256 translations: more examples than both layers have features


def dft_cca() -> dict[str, Any]:
    """Return how much faster and smaller the blocks are than the whole, on data closed under translation."""
    _dft(1)  # loads the libraries, which is nobody's memory
    before, values = peak_megabytes(), {}
    times = {"dft": min(seconds(lambda: values.update(dft=_dft(BASE))) for _ in range(3))}
    peaks = {"dft": peak_megabytes() - before}
    times["flattened"] = seconds(lambda: values.update(flattened=_flattened(BASE)))
    peaks["flattened"] = peak_megabytes() - before
    return {
        "seconds": times["dft"],
        "flattened_seconds": times["flattened"],
        "ratio": times["flattened"] / times["dft"],
        "megabytes": peaks["dft"],
        "flattened_megabytes": peaks["flattened"],
        "memory": peaks["dft"] / peaks["flattened"],
        "value": values["dft"],
        "error": abs(values["dft"] - values["flattened"]),
    }


def _dft(images: int) -> float:
    collector = nk.LayerSpectra([(["x"], ["y"])])
    for x, y in _closed(images):
        collector.update({"x": x, "y": y})
    return float(nk.cca_mean(collector["x", "y"]))


def _flattened(images: int) -> float:
    collector = nk.LayerMoments([(["x"], ["y"])])
    for x, y in _closed(images):
        collector.update({"x": x.flatten(1), "y": y.flatten(1)})
    return float(nk.cca_mean(collector["x", "y"]))


def _closed(images: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two related layers' maps for one image after another, in all its translations."""
    draw = torch.Generator().manual_seed(0)
    mixing = torch.randn(SIZE[0], SIZE[0], generator=draw)
    for _ in range(images):
        x = torch.randn(SIZE, generator=draw)
        y = torch.einsum("chw,cd->dhw", x.relu(), mixing) / 8 + torch.randn(SIZE, generator=draw)
        yield _shifted(x), _shifted(y)


def _shifted(one: Tensor) -> Tensor:
    """Return a map in all its circular translations, the windows of a map tiled twice each way."""
    _, height, width = SIZE
    windows = one.repeat(1, 2, 2).unfold(1, height, 1).unfold(2, width, 1)[:, :height, :width]
    return windows.permute(1, 2, 0, 3, 4).reshape(-1, *SIZE)


def dft_resnet(measure: str, count: int = 79) -> dict[str, Any]:
    """Return the comparison of the nine blocks of two ResNet-20 over their forward passes, on 128 × `count` images."""
    models, images = (_resnet(0), _resnet(1)), batches(count)
    layers = [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)]
    work = lambda: nk.compare(*models, images, [measure], layers=layers, pairs="corresponding", shape="dft")  # noqa: E731
    return ratio(work, lambda: forward_both(models, images), repeats=3)


def _resnet(seed: int) -> nn.Module:
    return seeded(architecture("resnet20"), seed).eval()
