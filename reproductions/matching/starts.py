"""Where training starts, whether it ends at the same accuracy, and what lies between two ends.

Claims: matching/starts and matching/mode-connectivity.
"""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from netkin.applications.stitching import barrier
from reproductions.claims import Finding, Measured, all_of, claim, gains, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, pairs, untrained
from reproductions.matching.stitches import judging, length, made, origin, shares, size, task_loss

LAYER = "Layer 3"
STARTS = {"cpu": 5, "gpu": 20}
PAIRS = {"cpu": 5, "gpu": 10}  # the paper has ten
LONGER = {"cpu": {"epochs": 8, "lr": 1e-2, "every": 160}, "gpu": {"epochs": 15, "lr": 5e-3, "every": 750}}
EARLY, LATE = {"cpu": (2, 3), "gpu": (1, 2, 3)}, {"cpu": (6, 8), "gpu": (4, 6, 8)}
GOOD, SAME = 0.80, 0.05
TEST = {"cpu": 500, "gpu": 2_000}
NEAR = "share of random starts that end near the least-squares ones"
DROP = "drop between stitches of the later layers"
BY_T = "by the 95% interval of Student's t"


@claim(
    "matching/starts",
    figure="Fig. 6",
    sentence="in most cases the stitched networks achieve the same order of accuracy, although not always; the "
    "training process might get stuck at poor local minima. However, the optimal least squares matching "
    "initialization performs consistently well.",
    expected={"relative accuracy from random starts": "mostly as from least squares", NEAR: "most"},
    control="the same training from random maps, of a first network before training",
    criterion=f"One pair of Tiny-10s at Layer 3. Two parts: the share of random starts that end within {SAME} of the "
    "mean relative accuracy of the least-squares starts is above a half, and above the share of as many random starts "
    "that do so where the first network is not trained; and the least-squares starts end higher than the random ones "
    f"in the mean, and all within {SAME} of their own mean. Shares and means {BY_T} over the starts. In part if one "
    "holds and the other fails.",
    training=lambda scale, networks: length(scale, networks, **LONGER[scale]),
)
def starts(lab: Lab) -> Finding:
    """Relative accuracy after training from random maps and from the least-squares map."""
    count, (pair, *_) = STARTS[lab.scale], pairs(lab, "tiny10", 2)
    layer = layers(lab, "tiny10")[LAYER]
    kinds = ((pair, "random"), (pair, "least_squares"), (untrained(pair), "random"))
    wanted = {(nets, init): [task_loss(nets, layer, init=init, seed=k, **LONGER[lab.scale]) for k in range(count)]
              for nets, init in kinds}  # fmt: skip
    random, direct, control = shares(lab, wanted).values()
    near, as_near = (Measured.over(abs(value - mean(direct)) <= SAME for value in some) for some in (random, control))
    steady = max(abs(value - mean(direct)) for value in direct) <= SAME
    measured = {
        NEAR: near,
        "relative accuracy from random starts": Measured.over(random),
        "relative accuracy from least-squares starts": Measured.over(direct),
        "spread from random starts": Measured(stdev(random), n=count),
        "spread from least-squares starts": Measured(stdev(direct), n=count),
        "worst of the random starts": Measured(min(random), n=count),
        "worst of the least-squares starts": Measured(min(direct), n=count),
    }
    lines = {"random": sorted(random), "least squares": sorted(direct), "first network untrained": sorted(control)}
    most = all_of(near.above(0.5), near.minus(as_near).above(0))
    higher = Measured.over(direct).minus(Measured.over(random)).above(0)
    return Finding(
        verdict(most, all_of(higher, steady)),
        measured,
        {NEAR: as_near, "relative accuracy from random starts": Measured.over(control)},
        origin(lab, "tiny10"),
        {"Relative accuracies, sorted": {"start": list(range(1, count + 1)), **lines}},
        range(count),
    )


@claim(
    "matching/mode-connectivity",
    figure="Sec. 8",
    sentence="mode connectivity holds on most layers, i.e. the convex combination of the stitching layers perform "
    "similarly. However, on the first three layers, we noticed an unforeseen lack of mode connectivity, even though "
    "the relative accuracies of the corresponding transformations were high.",
    expected={DROP: "small", "drop between stitches of the first three layers": "large"},
    control="the first three layers, where the paper found no connectivity",
    criterion=f"Two stitches of a pair of Tiny-10s from random starts; the drop is how far the relative accuracy on "
    f"the line between them falls below that of the ends, at most. Pairs of stitches of which one has a relative "
    f"accuracy below {GOOD:.2f} are left out. Two parts: in the mean over later layers the drop is below {SAME} and "
    f"below that of the first three layers, and in the mean over the first three layers it is above {SAME}; {BY_T} "
    "over the pairs of networks. In part if one of the two.",
    training=lambda scale, networks: length(scale, networks, **LONGER[scale]),
)
def mode_connectivity(lab: Lab) -> Finding:
    """The barrier between two stitches from different random starts, layer by layer, by pair of networks."""
    couples, names = pairs(lab, "tiny10", PAIRS[lab.scale]), layers(lab, "tiny10")
    among = [f"Layer {k}" for k in (*EARLY[lab.scale], *LATE[lab.scale])]
    wanted = {
        (layer, pair): [task_loss(pair, names[layer], init="random", seed=seed, **LONGER[lab.scale]) for seed in (0, 1)]
        for layer in among for pair in couples
    }  # fmt: skip
    stitches, test = made(lab, [one for ones in wanted.values() for one in ones]), judging(lab, count=TEST[lab.scale])
    drops: dict[str, dict[int, float]] = {layer: {} for layer in among}
    for (layer, pair), ones in wanted.items():
        one, other = (stitches[wish] for wish in ones)
        if min(one.relative_accuracy, other.relative_accuracy) >= GOOD:
            drops[layer][couples.index(pair)] = barrier(one, other, test, points=5).drop
    first, later = (_means(drops, numbers[lab.scale], len(couples)) for numbers in (EARLY, LATE))
    measured = {
        f"{layer}: drop between stitches": Measured.over(found.values()) for layer, found in drops.items() if found
    }
    measured |= {f"{layer}: pairs of stitches of at least {GOOD:.0%}": Measured(len(found), n=len(couples))
                 for layer, found in drops.items()}  # fmt: skip
    both = sorted(first.keys() & later.keys())
    early = "drop between stitches of the first three layers"
    if first:
        measured[early] = Measured.over(first.values())
    if later:
        measured[DROP] = Measured.over(later.values())
    apart = gains([first[k] for k in both], [later[k] for k in both]).above(0) if both else None
    parts = (
        all_of(measured[DROP].below(SAME) if later else None, apart),
        measured[early].above(SAME) if first else None,
    )
    shown = [layer for layer in among if drops[layer]]
    line: dict[str, Any] = {"layer": shown, "drop": [mean(drops[layer].values()) for layer in shown]}
    note = f"Lines between stitches are followed on {size(test):,} test images. {origin(lab, 'tiny10')}"
    curves = {"Drop of relative accuracy between stitches": line} if shown else {}
    return Finding(
        verdict(*parts), measured, {DROP: measured[early]} if first else {}, note, curves, range(len(couples))
    )


def _means(drops: dict[str, dict[int, float]], numbers: tuple[int, ...], count: int) -> dict[int, float]:
    """Return the mean drop over some layers, by pair of networks, where there is any."""
    found = {k: [drops[f"Layer {n}"][k] for n in numbers if k in drops[f"Layer {n}"]] for k in range(count)}
    return {k: mean(values) for k, values in found.items() if values}
