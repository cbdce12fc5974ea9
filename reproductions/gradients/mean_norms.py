"""The norm of the mean embedding of a target set under a network of a source set, and what two indices make of it.

Claims: gradients/mean-embedding and gradients/factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import mean
from typing import Any

import numpy as np

from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.gradients.nets import KINDS, LONG, SEEDS, SETS, WORDS, names
from reproductions.gradients.orderings import RIGHT, groups
from reproductions.gradients.readings import NORMED, QUANTITIES, blocks, networks_in_words, read_all
from reproductions.laboratory import Lab

OWN = "share of orderings: the norm is smallest on the network's own set"
DIGITS = "share of orderings: SVHN above the other set of natural images, by "
QUANTITY_WORDS = dict(zip(QUANTITIES, ("‖μ‖", "‖K‖/N²", "√Tr K/N"), strict=True))
DEEPER = "log of ‖μ‖ of ResNet-50 over ResNet-18"
BY_CKA, BY_NBS = "‖μ‖ / (‖K‖/N²)", "‖μ‖ / (√Tr K/N)"
OWN_HIGHER = "share of orderings: own set highest, by "
DIGITS_HIGHER = "share of orderings: SVHN highest, by "
BY_T = "seed by seed, in the mean over blocks and sources, by the 95% interval of Student's t"
Ratio = Callable[[np.ndarray], np.ndarray]


@claim(
    "gradients/mean-embedding",
    figure="Fig. 4",
    sentence="when a dataset D_T is chosen to be the same as the one used to train the neural network which is D_S, "
    "the norm should be reasonably small … The norm easily separates out SVHN when the base model is trained on "
    "natural images, and other two struggles to achieve. … a neural network with more layers should give larger "
    "norms at individual layers",
    expected={OWN: "all", f"{DIGITS}‖μ‖": "all", f"{DIGITS}‖K‖/N²": "struggles", f"{DIGITS}√Tr K/N": "fails",
              DEEPER: "above 0"},
    control="networks before training; for the depth, ResNet-18s of different seeds, whose differences have a mean of "
    "0 by construction, so that only their spread counts",
    criterion="Exact kernels K_f ∘ K_g of flattened blocks on as many test images of each set. Five parts. The share "
    f"of orderings in which ‖μ‖ on the source set is below that on another is above {RIGHT} and above the control's; "
    "for networks of CIFAR-10 and CIFAR-100 the share in which ‖μ‖ on SVHN is above that on the other set of natural "
    f"images is above {RIGHT} and above the control's; the same share by ‖K‖/N² is lower than by ‖μ‖; so is that by "
    "√Tr K/N; and ‖μ‖ is larger for ResNet-50 than for ResNet-18 trained on as many images, in the mean log over the "
    "stem, the ends of the four stages and the pooled output and over all targets, more than for the control. "
    f"All {BY_T}.",
    papers_training=LONG,
)  # fmt: skip
def mean_embedding(lab: Lab) -> Finding:
    """Orderings of norms on three targets, and of two depths."""
    wanted = {kind: names(lab, kind) for kind in ("trained", "untrained", "deep")}
    found = {kind: norms_of(lab, some) for kind, some in wanted.items()}
    ours, control = found["trained"], found["untrained"]
    own, own_control = ([_own_share(one[..., 0], np.less) for one in by_seed(lab, some)] for some in (ours, control))
    digits, digits_control = (
        {q: [_digits_share(one[..., k]) for one in by_seed(lab, some)] for k, q in enumerate(QUANTITIES)}
        for some in (ours, control)
    )
    deeper, same = _depth_gains(lab, ours, found["deep"])
    measured = {OWN: Measured.over(own)} | _digit_numbers(digits) | {DEEPER: Measured.over(deeper)}
    controls = {OWN: Measured.over(own_control)} | _digit_numbers(digits_control) | {DEEPER: Measured.over(same)}
    parts = [
        all_of(measured[OWN].above(RIGHT), gains(own, own_control).above(0)),
        all_of(measured[f"{DIGITS}‖μ‖"].above(RIGHT), gains(digits["norm"], digits_control["norm"]).above(0)),
        *(gains(digits["norm"], digits[quantity]).above(0) for quantity in QUANTITIES[1:]),
        all_of(measured[DEEPER].above(0), gains(deeper, same).above(0)),
    ]
    note = (
        f"{NORMED[lab.scale]:,} test images of each set. ResNet-50s see as many training images as ResNet-18s, in "
        "batches of half the size and at half the rate. Fig. 4 scales its quantities by the number of layers, which "
        "would add log(50/18) to the difference of depths."
    )
    return Finding(
        verdict(*parts), measured, controls, f"{note} {networks_in_words(lab, wanted)}",
        _curves(lab, ours, {words: itemgetter((..., k)) for k, words in enumerate(QUANTITY_WORDS.values())}),
        lab.seeds(SEEDS[lab.scale]),
    )  # fmt: skip


@claim(
    "gradients/factors",
    figure="Fig. 6",
    sentence="the former quantity specified above gives higher values when D_S = D_T, while the latter one always "
    "assigns higher values to SVHN as D_T no matter if the model was trained on SVHN or not. … It implies that CKA is "
    "a better similarity index than NBS at least in our experiments.",
    expected={f"{OWN_HIGHER}{BY_CKA}": "all", f"{DIGITS_HIGHER}{BY_NBS}": "all", f"{OWN_HIGHER}{BY_NBS}": "few"},
    control="networks before training",
    criterion="Both quantities of Eq. 19 from exact kernels of flattened blocks, on as many test images of each set. "
    f"Three parts. The share of orderings in which the one with CKA's factor is higher on the source set than on "
    f"another is above {RIGHT} and above the control's; the share in which the one with NBS's factor is higher on SVHN "
    f"than on another set, whatever the source, is above {RIGHT} and above the control's; and the former share is "
    f"higher by CKA's than by NBS's factor. All {BY_T}.",
    papers_training=LONG,
)
def factors(lab: Lab) -> Finding:
    """Orderings of the two quantities of Eq. 19 on three targets."""
    wanted = {kind: names(lab, kind) for kind in ("trained", "untrained")}
    found = {kind: norms_of(lab, some) for kind, some in wanted.items()}
    own, digits = (
        {(kind, words): [share(ratio(one)) for one in by_seed(lab, some)]
         for kind, some in found.items() for words, ratio in RATIOS.items()}
        for share in (lambda table: _own_share(table, np.greater), _digits_highest)
    )  # fmt: skip
    measured, controls = (
        {f"{OWN_HIGHER}{words}": Measured.over(own[kind, words]) for words in RATIOS}
        | {f"{DIGITS_HIGHER}{words}": Measured.over(digits[kind, words]) for words in RATIOS}
        for kind in wanted
    )
    parts = [
        all_of(measured[f"{OWN_HIGHER}{BY_CKA}"].above(RIGHT), _gain(own, BY_CKA).above(0)),
        all_of(measured[f"{DIGITS_HIGHER}{BY_NBS}"].above(RIGHT), _gain(digits, BY_NBS).above(0)),
        gains(own["trained", BY_CKA], own["trained", BY_NBS]).above(0),
    ]
    return Finding(
        verdict(*parts), measured, controls,
        f"{NORMED[lab.scale]:,} test images of each set. {networks_in_words(lab, wanted)}",
        _curves(lab, found["trained"], RATIOS), lab.seeds(SEEDS[lab.scale]),
    )  # fmt: skip


RATIOS: dict[str, Ratio] = {
    BY_CKA: lambda one: one[..., 0] / one[..., 1],
    BY_NBS: lambda one: one[..., 0] / one[..., 2],
}


def norms_of(lab: Lab, wanted: list[str]) -> np.ndarray:
    """Return the quantities of networks, networks × targets × blocks × quantities."""
    return np.stack([one["norms"].cpu().numpy() for one in read_all(lab, wanted)])


def by_seed(lab: Lab, found: np.ndarray) -> list[np.ndarray]:
    """Return for each seed what was found of its networks, sources first."""
    return [found[list(some)] for some in zip(*groups(lab), strict=True)]


def _own_share(table: np.ndarray, is_better: Callable[..., Any]) -> float:
    """Return in which share of orderings the own target is better than another; sources × targets × blocks."""
    return mean(
        float(is_better(table[source, source], table[source, target]).mean())
        for source in range(len(SETS)) for target in range(len(SETS)) if target != source
    )  # fmt: skip


def _digits_share(table: np.ndarray) -> float:
    """Return in which share of orderings SVHN is above the other natural set, for networks of natural images."""
    return mean(float((table[source, 2] > table[source, 1 - source]).mean()) for source in (0, 1))


def _digits_highest(table: np.ndarray) -> float:
    """Return in which share of orderings SVHN is above another set, whatever the source."""
    return float((table[:, 2:] > table[:, :2]).mean())


def _digit_numbers(shares: Mapping[str, Sequence[float]]) -> dict[str, Measured]:
    return {f"{DIGITS}{QUANTITY_WORDS[quantity]}": Measured.over(some) for quantity, some in shares.items()}


def _gain(shares: Mapping[tuple[str, str], Sequence[float]], words: str) -> Measured:
    return gains(shares["trained", words], shares["untrained", words])


def _depth_gains(lab: Lab, shallow: np.ndarray, deep: np.ndarray) -> tuple[list[float], list[float]]:
    """Return the mean log ratios of norms at common places, by seed: of two depths, and of two seeds of the one."""
    few, many = (np.log(one[:, :, common(lab, kind), 0]) for one, kind in ((shallow, "trained"), (deep, "deep")))
    ours = [float((b - a).mean()) for a, b in zip(by_seed(lab, few), by_seed(lab, many), strict=True)]
    seeds = by_seed(lab, few)
    return ours, [float((seeds[k] - seeds[k - 1]).mean()) for k in range(len(seeds))]


def common(lab: Lab, kind: str) -> list[int]:
    """Return the places of the stem, of the last blocks of the stages and of the pooled output among the blocks."""
    inner = blocks(lab.recipe(KINDS[kind].recipe).build())
    stages = [name.partition(".")[0] for name in inner]
    return [k for k, stage in enumerate(stages) if stage not in stages[k + 1 :]] + [len(inner)]


def _curves(lab: Lab, found: np.ndarray, quantities: Mapping[str, Ratio]) -> dict[str, dict[str, list[Any]]]:
    """Return each quantity by block, for each source a chart with a line for each target."""
    curves = {}
    for words, quantity in quantities.items():
        table = quantity(found)  # networks × targets × blocks
        for source, own in zip(SETS, groups(lab), strict=True):
            curve: dict[str, list[Any]] = {"block": list(range(1, table.shape[2] + 1))}
            for place, target in enumerate(SETS):
                curve |= line(WORDS[target], table[own][:, place].T)
            curves[f"{words} of networks of {WORDS[source]}"] = curve
    return curves
