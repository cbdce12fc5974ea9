"""Worlds whose shared subspaces are known, from the paper's appendix B.

Claims: svcca/known-subspaces and svcca/recovered-signal.
"""

from __future__ import annotations

import torch
from torch import Tensor

import netkin as nk
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab

EXAMPLES, SHARED, OTHER, NOISE = 2000, 50, 150, 0.005
SIGNALS = 3  # neurons that are mixed with each other


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
