"""Where training starts, whether it ends at the same accuracy, and what lies between two ends.

Claims: matching/starts and matching/mode-connectivity.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import mean, stdev
from typing import Any

from netkin.applications.stitching import Stitch, barrier
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, ring
from reproductions.matching.stitches import Batches, Wanted, judging, made, origin, shares, size, task_loss

LAYER = "Layer 3"
STARTS = {"cpu": 3, "gpu": 50}
LONGER = {"cpu": {"epochs": 8, "rate": 1e-2, "every": 160}, "gpu": {"epochs": 15, "rate": 5e-3, "every": 750}}
ENDS = {"cpu": 2, "gpu": 5}  # random starts for each layer
AMONG = {"cpu": (3, 5, 7), "gpu": (1, 2, 3, 4, 5, 6, 7, 8)}
FIRST = 3  # layers that are not connected, the paper says
GOOD, SAME = 0.80, 0.05
TEST = {"cpu": 500, "gpu": 2_000}


def wishes(lab: Lab, layer: str, init: str, count: int) -> list[Wanted]:
    """Return stitches of one pair from several starts; from least squares only the order of the images differs."""
    (pair, *_) = ring(lab, "tiny10", 2)
    name = layers(lab, "tiny10")[layer]
    return [task_loss(pair, name, init=init, seed=seed, **LONGER[lab.scale]) for seed in range(count)]


@claim(
    "matching/starts",
    figure="Fig. 6",
    sentence="in most cases the stitched networks achieve the same order of accuracy, although not always; the "
    "training process might get stuck at poor local minima. However, the optimal least squares matching "
    "initialization performs consistently well.",
    expected={"share of random starts that end near the least-squares ones": "most"},
    criterion="One pair of Tiny-10s at Layer 3. Holds if at least half of the random starts end within 0.05 of the "
    "mean relative accuracy of the least-squares starts; these have the higher mean; and all of these end within 0.05 "
    "of their mean. In part if some of these three.",
)
def starts(lab: Lab) -> Finding:
    """Relative accuracy after training from random maps and from the least-squares map."""
    count = STARTS[lab.scale]
    halves = {init: wishes(lab, LAYER, init, count) for init in ("random", "least_squares")}
    random, direct = shares(lab, halves).values()
    near = mean(abs(value - mean(direct)) <= SAME for value in random)
    steady = max(abs(value - mean(direct)) for value in direct) <= SAME
    measured = {
        "share of random starts that end near the least-squares ones": Measured(near, n=count),
        "relative accuracy from random starts": Measured.over(random),
        "relative accuracy from least-squares starts": Measured.over(direct),
        "spread from random starts": Measured(stdev(random), n=count),
        "spread from least-squares starts": Measured(stdev(direct), n=count),
        "worst of the random starts": Measured(min(random), n=count),
        "worst of the least-squares starts": Measured(min(direct), n=count),
    }
    lines = {"random": sorted(random), "least squares": sorted(direct)}
    curves: dict[str, Any] = {"Relative accuracies, sorted": {"start": list(range(1, count + 1)), **lines}}
    conditions = (near >= 0.5, mean(direct) >= mean(random), steady)
    return Finding(verdict(*conditions), measured, origin(lab, "tiny10"), curves, range(count))


@claim(
    "matching/mode-connectivity",
    figure="Sec. 8",
    sentence="mode connectivity holds on most layers, i.e. the convex combination of the stitching layers perform "
    "similarly. However, on the first three layers, we noticed an unforeseen lack of mode connectivity, even though "
    "the relative accuracies of the corresponding transformations were high.",
    expected={
        "drop between stitches of the first three layers": "large",
        "drop between stitches of the later layers": "small",
    },
    criterion=f"Stitches of one pair of Tiny-10s from random starts with a relative accuracy of at least {GOOD:.2f}; "
    f"the drop is how far the relative accuracy on the line between two falls below that of the ends, at most, in the "
    f"mean over pairs of stitches. Holds if it is at most {SAME} at every later layer and above {SAME} at every one of "
    f"the first three layers that has two such stitches; in part if one of the two.",
)
def mode_connectivity(lab: Lab) -> Finding:
    """The loss barrier between stitches from different random starts, layer by layer."""
    wanted = {f"Layer {k}": wishes(lab, f"Layer {k}", "random", ENDS[lab.scale]) for k in AMONG[lab.scale]}
    stitches = made(lab, [one for ones in wanted.values() for one in ones])
    ends = {layer: [stitches[one] for one in ones] for layer, ones in wanted.items()}
    good = {layer: [one for one in ones if one.relative_accuracy >= GOOD] for layer, ones in ends.items()}
    test = judging(lab, count=TEST[lab.scale])
    drops = {layer: drop(ones, test) for layer, ones in good.items() if len(ones) > 1}
    first = {layer: values for layer, values in drops.items() if int(layer.split()[1]) <= FIRST}
    later = {layer: values for layer, values in drops.items() if layer not in first}
    measured = {
        f"{layer}: stitches of at least {GOOD:.0%}": Measured(len(ones), n=len(ends[layer]))
        for layer, ones in good.items()
    }
    measured |= {f"{layer}: drop between stitches": Measured.over(values) for layer, values in drops.items()}
    for words, part in (("the first three layers", first), ("the later layers", later)):
        if part:
            every = [value for values in part.values() for value in values]
            measured[f"drop between stitches of {words}"] = Measured.over(every)
    line: dict[str, Any] = {"layer": list(drops), "drop": [mean(values) for values in drops.values()]}
    curves = {"Drop of relative accuracy between stitches": line} if drops else {}
    conditions = (
        bool(later) and all(mean(values) <= SAME for values in later.values()),
        bool(first) and all(mean(values) > SAME for values in first.values()),
    )
    note = f"Lines between stitches are followed on {size(test):,} test images. {origin(lab, 'tiny10')}"
    return Finding(verdict(*conditions), measured, note, curves, range(ENDS[lab.scale]))


def drop(ends: Sequence[Stitch], test: Batches) -> list[float]:
    """Return how far relative accuracy falls between any two stitches."""
    return [barrier(one, other, test, points=5).drop for one, other in combinations(ends, 2)]
