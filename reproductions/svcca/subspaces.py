"""What follows from algebra, in the paper's appendix: known subspaces, a recovered signal, covariances by Fourier.

Claims: svcca/known-subspaces, svcca/recovered-signal, svcca/diagonal and svcca/diagonal-of-shifts. Of natural images
the third is an observation; the others are identities.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import netkin as nk
from netkin.representations import run_until
from reproductions.claims import Finding, Measured, all_of, claim, gains, verdict
from reproductions.laboratory import Lab

EXAMPLES, SHARED, OTHER, NOISE = 2000, 50, 150, 0.005
SIGNALS = 3  # neurons that are mixed with each other
SEEDS = {"cpu": 3, "gpu": 5}
IMAGES = {"cpu": 1_000, "gpu": 5_000}
LAYER = "layer2.0"  # 16 × 16 maps
SHIFTED = 8  # images, each in all its 256 even shifts
LITTLE = 0.5
FOURIER = "share of the covariance off the diagonal in the Fourier basis"
PIXELS = "share of the covariance off the diagonal in the pixel basis"


@claim(
    "svcca/known-subspaces",
    figure="App. B.0.1",
    sentence="looking at the canonical correlation coefficients of (A, B) and (A, C) will give the same result … by "
    "first applying SVD … we can distinguish between pathological cases like the one above.",
    expected={
        "correlations at 1 of A and B": 50,
        "correlations at 1 of A and C": 50,
        "directions kept of B": "50, those aligned with A",
        "directions kept of C": "more: it has 150 more useful directions",
    },
    criterion="Holds if CCA gives 50 correlations of 1 for both pairs, and SVCCA keeps 50 directions of B and at least "
    "195 of C; in part if one of the two.",
    measures=["cca_mean", "svcca"],
    kind="identity",
    scales=("cpu",),
)
def known_subspaces(lab: Lab) -> Finding:
    """A has 50 directions; B these and 150 of noise; C these and 150 others as strong."""
    seeds = lab.seeds(5)
    worlds = [_world(seed) for seed in seeds]
    ones = {name: [_ones(world["A"], world[name]) for world in worlds] for name in "BC"}
    kept = {name: [nk.svcca_directions(world["A"], world[name]).y.kept for world in worlds] for name in "BC"}
    alike = [count == SHARED for counts in ones.values() for count in counts]
    apart = [b == SHARED and c >= 195 for b, c in zip(kept["B"], kept["C"], strict=True)]
    return Finding(
        verdict(all(alike), all(apart)),
        {f"correlations at 1 of A and {name}": Measured.over(counts) for name, counts in ones.items()}
        | {f"directions kept of {name}": Measured.over(counts) for name, counts in kept.items()}
        | {
            f"{measure} of two layers that share A beside {rest}": Measured.over(
                float(getattr(nk, measure)(world[name], world[f"{name}'"])) for world in worlds
            )
            for measure in ("cca_mean", "svcca")
            for name, rest in (("B", "noise"), ("C", "other useful directions"))
        },
        note=f"A, B and C are exact: orthonormal columns over {EXAMPLES:,} examples, the noise {NOISE} as large. The "
        "two layers that share A show what aggregating does: to CCA they are a quarter alike either way.",
        seeds=tuple(seeds),
    )


@claim(
    "svcca/recovered-signal",
    figure="Fig. App. 1",
    sentence="applying CCA to the distorted directions and the original signal … succeeds in recovering the original "
    "signal.",
    expected={"correlation of the recovered with the original neurons": "recovered"},
    criterion="Holds if the three recovered neurons correlate with the original ones by at least 0.999, and the "
    "distorted ones by less than 0.9 on average.",
    measures=["cca_mean"],
    kind="identity",
    scales=("cpu",),
)
def recovered_signal(lab: Lab) -> Finding:
    """Three neurons of largest activation of the penultimate layer, permuted, rotated and scaled, and brought back."""
    model, images = lab.trained("convnet", 0).model, lab.probe(1000)
    rows = nk.activations(model, ["bn4"], images)["bn4"].double()
    original = rows[:, rows.square().mean(0).argsort(descending=True)[:SIGNALS]]
    before, after = [], []
    for seed in lab.seeds(5):
        distorted = _distorted(original, seed)
        found = nk.svcca_directions(original, distorted, variance=1.0)
        recovered = found.x.mean + found.y.directions(distorted) @ found.x.patterns
        before.append(_correlation(distorted, original))
        after.append(_correlation(recovered, original))
    return Finding(
        verdict(min(after) >= 0.999 and sum(before) / len(before) < 0.9),
        {
            "correlation of the recovered with the original neurons": Measured.over(after),
            "correlation of the distorted with the original neurons": Measured.over(before),
        },
        note="The least correlation among the three neurons of the trained network, over five random distortions.",
        curves={
            "One neuron, its distorted copy and what CCA makes of it": {
                "image": list(range(60)),
                "original": _standard(original[:60, 0]),
                "distorted": _standard(distorted[:60, 0]),
                "recovered": _standard(recovered[:60, 0]),
            }
        },
        seeds=tuple(lab.seeds(5)),
    )


@claim(
    "svcca/diagonal",
    figure="Fig. App. 2",
    sentence="Even without enforcing translation invariance, we see that the covariance in the DFT basis is "
    "approximately diagonal.",
    expected={FOURIER: "little", PIXELS: "much"},
    control="the same maps with their places in random order, the same for all images",
    criterion=f"Holds if of a channel's covariance energy, in the mean over channels and for images as they are, the "
    f"share off the diagonal in the Fourier basis is below {LITTLE}, below that in the pixel basis, and below that of "
    "maps whose places are in random order, the last two seed by seed, each by the 95% interval of Student's t over "
    "the seeds.",
)
def diagonal(lab: Lab) -> Finding:
    """Channels of a ResNet's block, in two bases, and with their places in random order."""
    seeds = lab.seeds(SEEDS[lab.scale])
    maps = [_maps(run.model, lab.probe(IMAGES[lab.scale])) for run in lab.trained_all(("resnet", s) for s in seeds)]
    mixed = [_mixed(one, seed) for seed, one in zip(seeds, maps, strict=True)]
    fourier, pixels, control = (
        [off_diagonal(of(one)) for one in some] for of, some in ((_spectra, maps), (_flat, maps), (_spectra, mixed))
    )
    share = Measured.over(fourier)
    beyond = [gains(other, fourier).above(0) for other in (pixels, control)]
    return Finding(
        verdict(all_of(share.below(LITTLE), *beyond)),
        {FOURIER: share, PIXELS: Measured.over(pixels)},
        {FOURIER: Measured.over(control), PIXELS: Measured.over(off_diagonal(_flat(one)) for one in mixed)},
        note=f"Layer {LAYER} of a ResNet trained on CIFAR-10 (the paper takes one trained on ImageNet). Energy is the "
        "sum of squared covariances.",
        seeds=tuple(seeds),
    )


@claim(
    "svcca/diagonal-of-shifts",
    figure="Fig. App. 2",
    sentence="The covariance matrix is exactly diagonal for a translation invariant dataset in a DFT basis.",
    expected={FOURIER: 0.0},
    criterion="Holds if for images in all shifts, through a network with circular padding, the share of a channel's "
    "covariance energy off the diagonal is below 1e-8 in the mean over channels.",
    kind="identity",
    scales=("cpu",),
)
def diagonal_of_shifts(lab: Lab) -> Finding:
    """Channels of a ResNet's block with circular padding, for images in all their shifts, in float64."""
    maps = _maps(circular(lab.fresh("resnet", 0).eval()), shifts(lab.probe(SHIFTED).double()))
    shares = {FOURIER: off_diagonal(_spectra(maps)), PIXELS: off_diagonal(_flat(maps))}
    return Finding(
        verdict(shares[FOURIER] < 1e-8),
        {name: Measured(share) for name, share in shares.items()},
        note=f"{SHIFTED} images in the 256 shifts that move the map by whole places, layer {LAYER} before training.",
    )


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


def _flat(maps: Tensor) -> Tensor:
    return maps.flatten(2)


def _mixed(maps: Tensor, seed: int) -> Tensor:
    """Return maps with their places in random order, the same for all."""
    order = torch.randperm(maps[0, 0].numel(), generator=torch.Generator().manual_seed(seed)).to(maps.device)
    return maps.flatten(2)[:, :, order].reshape(maps.shape)


@torch.no_grad()
def _maps(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([run_until(model, LAYER, part).double() for part in images.split(500)])


def _world(seed: int) -> dict[str, Tensor]:
    """Return A, B and C, and two more layers that share A alone with B and with C."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(EXAMPLES, SHARED + 4 * OTHER, dtype=torch.float64, generator=generator)
    shared, *others = torch.linalg.qr(columns - columns.mean(0))[0].split([SHARED] + 4 * [OTHER], dim=1)
    scales = {"B": NOISE, "B'": NOISE, "C": 1.0, "C'": 1.0}
    mixed = {
        name: torch.cat([shared, scale * own], 1) for (name, scale), own in zip(scales.items(), others, strict=True)
    }
    return {"A": shared} | mixed


def _ones(X: Tensor, Y: Tensor) -> int:
    return int((nk.svcca_directions(X, Y, variance=1.0).correlations > 1 - 1e-6).sum())


def _distorted(original: Tensor, seed: int) -> Tensor:
    """Return the neurons permuted, rotated by chance, and scaled by up to ten each way."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(SIGNALS, SIGNALS, dtype=torch.float64, generator=generator))[0]
    scales = 10 ** (2 * torch.rand(SIGNALS, dtype=torch.float64, generator=generator) - 1)
    return original[:, torch.randperm(SIGNALS, generator=generator)] @ rotation * scales


def _correlation(X: Tensor, Y: Tensor) -> float:
    """Return the least absolute correlation of columns of the same place."""
    pairs = zip(X.T, Y.T, strict=True)
    return min(abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) for pair in pairs)


def _standard(signal: Tensor) -> list[float]:
    return ((signal - signal.mean()) / signal.std()).tolist()
