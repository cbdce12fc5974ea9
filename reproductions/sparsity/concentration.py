"""Whether a larger β makes layers less similar and more weights small.

Claim: sparsity/concentration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproductions.claims import Finding, Measured, all_of, claim, line, verdict
from reproductions.laboratory import Lab
from reproductions.sparsity.nets import (
    ABSOLUTE,
    BY_T,
    RELATIVE,
    Case,
    Found,
    gain,
    mean_of,
    measured_whole,
    noise_words,
    over_seeds,
    setting_words,
    values,
)

SEEDS = {"cpu": 3, "gpu": 5}
BETAS = {"resnet20-sparse": (0.0, 8e-4, 1e-2, 1e-1), "resnet56-sparse": (0.0, 8e-4, 1e-2)}
NETS = {"resnet20-sparse": "ResNet-20", "resnet56-sparse": "ResNet-56"}
NUMBERS = {
    "similarity": "interlayer `cka_debiased`",
    "relatively small": f"weights below {RELATIVE:g} of a layer's r.m.s., %",
    "small": f"weights below {ABSOLUTE:g}, %",
}


def change(net: str, what: str) -> str:
    """Return the name of what the largest β does to a number."""
    return f"{NETS[net]}: {NUMBERS[what]}, largest β less β = 0"


@claim(
    "sparsity/concentration",
    figure="Fig. 1 and 2",
    sentence="with the increase of hyperparameter β, the interlayer feature similarity decreases and the network "
    "sparsity increases",
    expected={change("resnet20-sparse", "similarity"): "below 0"}
    | {change(net, what): "below 0" if what == "similarity" else "above 0" for net in NETS for what in NUMBERS},
    control="the term on samples in random order, with the largest β",
    criterion="ResNet-20 and ResNet-56 on CIFAR-10, masked at random by ERK ratios to 0.95, with four and three values "
    "of β of which none is chosen. Six parts, three for each network: with the largest β the mean `cka_debiased` of "
    "two layers of a stage on test images is lower than with β = 0, and lower than with random targets; the share of "
    f"weights left that are below {RELATIVE:g} of their layer's r.m.s. is higher than both, and so is the share below "
    f"{ABSOLUTE:g}, which a rescaling that batch norm cancels would change. In pairs of one seed, {BY_T} over the "
    "seeds.",
    measures=["cka_debiased"],
)
def concentration(lab: Lab) -> Finding:
    """Similarities of layers and shares of small weights by β."""
    count = SEEDS[lab.scale]
    by_beta = {net: {beta: over_seeds(_case(net, beta), count) for beta in betas} for net, betas in BETAS.items()}
    random = {net: over_seeds(Case(net, arm="random", strength=betas[-1]), count) for net, betas in BETAS.items()}
    wanted = [case for own in by_beta.values() for some in own.values() for case in some]
    wanted += [case for own in random.values() for case in own]
    found = measured_whole(lab, sorted(wanted, key=lambda case: case.net, reverse=True))  # the longest first
    changes, beyond, controls, decided = dict[str, Measured](), dict[str, Measured](), dict[str, Measured](), []
    for net, own in by_beta.items():
        first, largest = own[0.0], own[BETAS[net][-1]]
        for what in NUMBERS:
            name, sign = change(net, what), -1 if what == "similarity" else 1
            past = name.replace("β = 0", "random targets")
            changes[name] = gain(found, largest, first, what)
            controls[name] = gain(found, random[net], first, what)
            beyond[past] = gain(found, largest, random[net], what)
            both = changes[name], beyond[past]
            decided.append(all_of(*(one.above(0) if sign > 0 else one.below(0) for one in both)))
    return Finding(
        verdict(*decided),
        changes | beyond | _by_beta(found, by_beta),
        controls,
        f"{noise_words(changes | beyond)} ResNet-20: {setting_words(lab, 'resnet20-sparse')} ResNet-56: "
        f"{setting_words(lab, 'resnet56-sparse')} Shares are of weights that are not masked.",
        {f"{NUMBERS[what]}, by β": _curve(found, by_beta, what) for what in NUMBERS},
        lab.seeds(count),
    )


def _case(net: str, beta: float) -> Case:
    return Case(net, arm="stage", strength=beta) if beta else Case(net)


def _by_beta(found: Mapping[Case, Found], by_beta: Mapping[str, Mapping[float, list[Case]]]) -> dict[str, Measured]:
    """Return all numbers of all networks, and their accuracies, which say what it costs."""
    return {
        f"{NETS[net]}, β = {beta:g}: {words}": mean_of(found, some, what)
        for net, own in by_beta.items()
        for beta, some in own.items()
        for what, words in (NUMBERS | {"accuracy": "test accuracy, %"}).items()
    }


def _curve(found: Mapping[Case, Found], by_beta: Mapping[str, Mapping[float, list[Case]]], what: str) -> dict[str, Any]:
    """Return a line for each network; the longest list of β is the axis, and a shorter one ends early."""
    betas = max(BETAS.values(), key=len)
    curve: dict[str, Any] = {"β": [f"{beta:g}" for beta in betas]}
    for net, own in by_beta.items():
        made = line(NETS[net], [values(found, some, what) for some in own.values()])
        curve |= {name: [*points, *[None] * (len(betas) - len(points))] for name, points in made.items()}
    return curve
