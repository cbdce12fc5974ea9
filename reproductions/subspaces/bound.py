"""How far features move where atoms do, against the bound of Prop. 2.1.

Claim: subspaces/bound. For one layer the bound is algebra (see docs/subspaces.md); Fig. 8a shows two.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from netkin.representations.filters import AtomConv2d
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab

SEEDS = 5
POINTS = 200  # changes of the atoms for each network
SIZE, ATOMS = 16, 9
WIDTHS = {"one channel": (1, 1, 1), "16 channels": (3, 16, 16), "64 channels": (3, 64, 64)}
LARGE = 10.0  # coefficients with which two layers pass the bound, which is of one
SMALLEST = 1e-3  # of the size of a change of atoms, beside their own size
BELOW, TIGHT = "share of points below the line", "median share of the bound that is reached"


@claim(
    "subspaces/bound",
    figure="Fig. 8a",
    sentence="The model F here is a 2-layer CNN with coefficient α and atom D generated from normal distribution "
    "N(0, 1) … All the points are below the line which is the bound provided by Proposition 2.1, reflecting that the "
    "representation variations are dominated by filter atoms.",
    expected={f"two layers, {name}: {BELOW}": "all" for name in WIDTHS},
    control="as large changes of the atoms, with coefficients drawn anew: they are not shared, and dominate",
    criterion="Two convolutions with a ReLU between, N(0, 1) coefficients, atoms and image; atoms of both move by a "
    "random change of 10⁻³ to 1 times their size. The bound is ‖α‖ λ √|B| ‖Dᵤ − Dᵥ‖ with α and D of both layers as one "
    "vector and λ of the image over all its channels. Three parts, one for each width, 1, 16 and 64 channels: every "
    "point of every seed is below the line, and of the control's some are not.",
    scales=("cpu",),
)
def bound(lab: Lab) -> Finding:
    """Points below the line for two layers of three widths; and for one layer, as Prop. 2.1 has it."""
    measured, controls, parts = dict[str, Measured](), dict[str, Measured](), []
    curves = dict[str, dict[str, list[Any]]]()
    for name, widths in WIDTHS.items():
        for words, few in (("two layers", widths), ("one layer", widths[:2])):
            ours = [points(few, seed, shared=True) for seed in lab.seeds(SEEDS)]
            control = [points(few, seed, shared=False) for seed in lab.seeds(SEEDS)]
            for kept, found in ((measured, ours), (controls, control)):
                kept[f"{words}, {name}: {BELOW}"] = Measured.over(below(one) for one in found)
                kept[f"{words}, {name}: {TIGHT}"] = Measured.over(reached(one) for one in found)
            if few is widths:
                curves[f"Two layers, {name}"] = _curve(ours[0])
                parts.append(all(below(one) == 1 for one in ours) and any(below(one) < 1 for one in control))
    large = [points(WIDTHS["one channel"], seed, shared=True, times=LARGE) for seed in lab.seeds(SEEDS)]
    measured[f"two layers, coefficients {LARGE:g} times as large: {BELOW}"] = Measured.over(map(below, large))
    order = sorted(measured, key=lambda words: (words.startswith("one"), TIGHT in words))
    note = (
        f"{POINTS} points of each of {SEEDS} seeds, images of {SIZE} × {SIZE}, {ATOMS} atoms of 3 × 3. For two layers "
        "the line is no bound: it grows as the coefficients do, and features as their square."
    )
    return Finding(
        verdict(*parts), {words: measured[words] for words in order}, controls, note, curves, lab.seeds(SEEDS)
    )


Point = tuple[float, float, float]  # the change of atoms, that of features, and the bound


def points(widths: tuple[int, ...], seed: int, *, shared: bool, times: float = 1.0) -> list[Point]:
    """Return changes of the atoms of one network and what they do to its features on one image.

    Coefficients are `times` as large as drawn; without `shared` others are drawn for each change.
    """
    draw = torch.Generator().manual_seed(seed)
    network = _drawn(widths, draw, times)
    image = torch.randn(1, widths[0], SIZE, SIZE, generator=draw, dtype=torch.float64)
    before, atoms = _features(network, image), [layer.atoms.clone() for layer in network]
    factor = _norm([layer.coefficients for layer in network]) * largest_patch(image) * SIZE
    found = []
    for far in torch.logspace(0, 1, POINTS, base=SMALLEST).tolist():
        moved = network if shared else _drawn(widths, draw, times)
        changes = [far * torch.randn(one.shape, generator=draw, dtype=torch.float64) for one in atoms]
        for layer, own, change in zip(moved, atoms, changes, strict=True):
            layer.atoms.copy_(own + change)
        size = _norm(changes)
        found.append((size, float((_features(moved, image) - before).norm()), factor * size))
    return found


def below(found: list[Point]) -> float:
    """Return the share of points below the line."""
    return sum(change <= most for _, change, most in found) / len(found)


def reached(found: list[Point]) -> float:
    """Return the median of the changes over their bounds."""
    return median(change / most for _, change, most in found)


def largest_patch(image: Tensor) -> float:
    """Return λ: the largest norm of a patch of 3 × 3 of an image that goes on around its edges."""
    return float(nn.functional.unfold(nn.functional.pad(image, [1] * 4, mode="circular"), 3).norm(dim=1).max())


@torch.no_grad()
def _drawn(widths: tuple[int, ...], draw: torch.Generator, times: float) -> list[AtomConv2d]:
    options: dict[str, Any] = {"padding": 1, "padding_mode": "circular", "bias": False, "dtype": torch.float64}
    layers = [AtomConv2d(a, b, 3, atoms=ATOMS, **options) for a, b in pairwise(widths)]
    for layer in layers:
        layer.requires_grad_(False)
        for part in (layer.coefficients, layer.atoms):
            part.copy_(torch.randn(part.shape, generator=draw, dtype=torch.float64))
        layer.coefficients.mul_(times)
    return layers


def _features(layers: list[AtomConv2d], image: Tensor) -> Tensor:
    features = layers[0](image)
    for layer in layers[1:]:
        features = layer(features.relu())
    return features


def _norm(parts: list[Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).norm())


def _curve(found: list[Point]) -> dict[str, list[Any]]:
    some = sorted(found)[:: POINTS // 20]
    return {"change of atoms": [one[0] for one in some], "change of features": [one[1] for one in some],
            "bound": [one[2] for one in some]}  # fmt: skip
