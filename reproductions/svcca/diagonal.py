"""A channel's covariance is nearly diagonal in the Fourier basis, and exactly on data closed under shifts.

Claim: svcca/diagonal.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from netkin.representations import run_until
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab

SEEDS = {"cpu": 2, "gpu": 3}
EXAMPLES = {"cpu": 1_000, "gpu": 5_000}
LAYER = "layer2.0"  # 16 × 16 maps
SHIFTED = 8  # images, each in all its 256 even shifts


@claim(
    "svcca/diagonal",
    figure="Fig. App. 2",
    sentence="Even without enforcing translation invariance, we see that the covariance in the DFT basis is "
    "approximately diagonal. … The covariance matrix is exactly diagonal for a translation invariant dataset in a DFT "
    "basis.",
    expected={
        "off the diagonal, Fourier basis, images as they are": "little",
        "off the diagonal, Fourier basis, images in all shifts": 0.0,
        "off the diagonal, pixel basis, images as they are": "much",
    },
    criterion="Holds if the share of a channel's covariance energy off the diagonal, in the mean over channels, is "
    "below 1e-8 for images in all shifts, and for images as they are in the Fourier basis below 0.5 and below half of "
    "that in the pixel basis; in part if one of the two.",
)
def diagonal(lab: Lab) -> Finding:
    """Channels of a ResNet's block, its paddings made circular for the images in all shifts."""
    seeds = lab.seeds(SEEDS[lab.scale])
    shares = [_shares(lab, lab.trained("resnet", seed).model) for seed in seeds]
    measured = {name: Measured.over(one[name] for one in shares) for name in shares[0]}
    natural = measured["off the diagonal, Fourier basis, images as they are"].value
    pixels = measured["off the diagonal, pixel basis, images as they are"].value
    closed = measured["off the diagonal, Fourier basis, images in all shifts"].value
    return Finding(
        verdict(closed < 1e-8, natural < 0.5 and natural < pixels / 2),
        measured,
        note=f"Layer {LAYER} of a ResNet trained on CIFAR-10 (the paper takes one trained on ImageNet). Energy is the "
        f"sum of squared covariances. In all shifts: {SHIFTED} images in the 256 shifts that move the map by whole "
        "places, through the same weights with circular padding, in float64.",
        seeds=tuple(seeds),
    )


def _shares(lab: Lab, model: nn.Module) -> dict[str, float]:
    natural = _maps(model, lab.probe(EXAMPLES[lab.scale]))
    closed = _maps(circular(model), shifts(lab.probe(SHIFTED).double()))
    return {
        "off the diagonal, pixel basis, images as they are": off_diagonal(natural.flatten(2)),
        "off the diagonal, Fourier basis, images as they are": off_diagonal(_spectra(natural)),
        "off the diagonal, pixel basis, images in all shifts": off_diagonal(closed.flatten(2)),
        "off the diagonal, Fourier basis, images in all shifts": off_diagonal(_spectra(closed)),
    }


def circular(model: nn.Module) -> nn.Module:
    """Return a copy of a network, in float64, whose convolutions wrap around at the border."""
    changed = copy.deepcopy(model).double()
    for module in changed.modules():
        if isinstance(module, nn.Conv2d) and any(module.padding):
            module.padding_mode = "circular"
    return changed


def shifts(images: Tensor, step: int = 2) -> Tensor:
    """Return the images in all circular shifts by multiples of `step`."""
    height, width = images.shape[-2:]
    moves = [(down, across) for down in range(0, height, step) for across in range(0, width, step)]
    return torch.cat([images.roll(move, (2, 3)) for move in moves])


def off_diagonal(channels: Tensor) -> float:
    """Return the share of covariance energy off the diagonal, the mean over channels of n × channels × features."""
    centred = (channels - channels.mean(0)).transpose(0, 1)
    energy = (centred.mH @ centred).abs().square()
    own = torch.diagonal(energy, dim1=1, dim2=2).sum(1)
    varies = own > 0
    return float((1 - own[varies] / energy.sum((1, 2))[varies]).mean())


def _spectra(maps: Tensor) -> Tensor:
    return torch.fft.fft2(maps, norm="ortho").flatten(2)


@torch.no_grad()
def _maps(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([run_until(model, LAYER, part).double() for part in images.split(500)])
