"""Claim 5: at a given rank, a bottleneck trained on the task loss beats the cut by singular values."""

from __future__ import annotations

from statistics import mean

from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, origin, ring
from reproductions.matching.stitches import Wanted, judged, task_loss

RANKS = (4, 8, 16)
LAYERS = ("Layer 3", "Layer 6")
PAIRS = {"cpu": 1, "gpu": 10}


@claim(
    "matching/low-rank",
    figure="Fig. 7",
    sentence="It is clear that task loss matching outperforms least squares matching in the activation space when the "
    "rank of the transformation is fixed.",
    expected={
        f"{layer}, rank {k}: relative accuracy, task loss minus SVD": "above 0" for layer in LAYERS for k in RANKS
    },
    criterion="Holds if at Layers 3 and 6 of Tiny-10 and at each of the ranks 4, 8 and 16 a bottleneck trained on the "
    "task loss has a higher relative accuracy, in the mean over pairs, than reduced-rank regression; in part if at "
    "some.",
)
def low_rank(lab: Lab) -> Finding:
    """Relative accuracy of stitches of rank 4, 8 and 16, both ways."""
    pairs, names = ring(lab, "tiny10", PAIRS[lab.scale]), layers(lab, "tiny10")
    points = [(layer, k) for layer in LAYERS for k in RANKS]
    direct = {p: [Wanted(*pair, names[p[0]], f"reduced_rank(k={p[1]})") for pair in pairs] for p in points}
    trained = {p: [task_loss(pair, names[p[0]], rank=p[1]) for pair in pairs] for p in points}
    found = judged(lab, [one for half in (direct, trained) for ones in half.values() for one in ones])
    shares = [
        {p: [float(found[one].relative_accuracy or 0) for one in ones] for p, ones in half.items()}
        for half in (direct, trained)
    ]
    gains = {p: [y - x for x, y in zip(shares[0][p], shares[1][p], strict=True)] for p in points}
    measured = {f"{l}, rank {k}: relative accuracy, task loss minus SVD": Measured.over(gains[l, k]) for l, k in points}
    for words, half in zip(("SVD", "task loss"), shares, strict=True):
        measured |= {f"{l}, rank {k}: relative accuracy by {words}": Measured.over(half[l, k]) for l, k in points}
    curves = {
        f"Relative accuracy at {layer}": {"rank": list(RANKS)}
        | {
            words: [mean(half[layer, k]) for k in RANKS]
            for words, half in zip(("SVD", "task loss"), shares, strict=True)
        }
        for layer in LAYERS
    }
    return Finding(
        verdict(*(mean(values) > 0 for values in gains.values())),
        measured,
        origin(lab, "tiny10"),
        curves,
        range(len(pairs)),
    )
