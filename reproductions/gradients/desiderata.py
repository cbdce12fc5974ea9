"""What a measure should say of networks that were trained on the same or on different sets of images.

Claim: gradients/desiderata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
from torch import Tensor

from reproductions.claims import Finding, Measured, all_of, claim, verdict
from reproductions.gradients.nets import LONG, SEEDS, SETS, names
from reproductions.gradients.orderings import (
    BY_T,
    DESIDERATA,
    KERNELS,
    RIGHT,
    cka,
    crossed,
    gains_in_shares,
    groups,
    jackknifed,
    kernels,
    lines,
    nbs,
    noise,
    on_halves,
    pairs_curve,
    scores,
    shares,
    similarity,
    unit,
)  # fmt: skip
from reproductions.gradients.readings import BOTH, Kept, networks_in_words, read_all
from reproductions.laboratory import Lab

INDICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"CKA": cka, "NBS": nbs}
OTHERS = ("features", "gradients", "hadamard", "sum", "product", "transport", "psi")
SHARED, NOISE, FRESH = "as in the paper: shared buckets", "noise of the same spectra", "before training, halves"
BETTER = "both minus features alone by CKA"
BY_SPECTRA = "correlation of similarities across sets with those of random directions of the same spectra"
FIRST = "desideratum 1 by CKA"


@claim(
    "gradients/desiderata",
    figure="Fig. 1",
    sentence="By incorporating gradient vectors into comparison in our proposed fashion in Eq. 7 … our method is "
    "capable of matching all three ideal behaviours described above. The relative comparison results are also "
    "consistent between two related similarity indices including CKA and NBS.",
    expected={FIRST: "met", "desideratum 2 by CKA": "met", "desideratum 3 by CKA": "met", "desideratum 1 by NBS": "met",
              "desideratum 2 by NBS": "met", "desideratum 3 by NBS": "met",
              BETTER: "above 0"},
    control="for desideratum 1 noise with the spectra of the networks' kernels, its directions shared within a set as "
    "buckets are; for the others networks before training",
    criterion="Pairs of ResNet-18s are compared block by block by sketched kernels K̃_f ∘ K̃_g. Seven parts. For each of "
    "CKA and NBS and each of the three desiderata of section 5.1 the share of orderings that are right, in the mean "
    f"over blocks, is above {RIGHT} and above the control's. Desideratum 1 is taken as in the paper, all networks of a "
    "set in the same buckets; the others with buckets of each network's own, one network of a pair on one half of its "
    "test images and the other on the other half, so that the chance of buckets is in the error. And the mean share of "
    "the three desiderata by CKA, all on halves, is higher with features and gradients than with features alone. All "
    f"{BY_T}.",
    measures=["sketched_cka_by_buckets", "sketched_nbs"],
    papers_training=LONG,
)  # fmt: skip
def desiderata(lab: Lab) -> Finding:
    """Shares of right orderings, with networks sketched on disjoint halves, and in all controls."""
    wanted = {kind: names(lab, kind) for kind in ("trained", "untrained", "shuffled")}
    wanted["cut"] = [*names(lab, "trained", SETS[:1]), *names(lab, "cut", SETS[1:2]), *names(lab, "trained", SETS[2:])]
    kept, sets = {kind: read_all(lab, some) for kind, some in wanted.items()}, groups(lab)
    halves = {(kernel, index): on_halves(kept["trained"], kernel, INDICES[index]) for kernel in KERNELS
              for index in INDICES}  # fmt: skip
    cases = _cases(kept, sets)
    measured, controls, parts = {}, {}, []
    for index in INDICES:
        ours = [cases[SHARED, index], halves["hadamard", index], halves["hadamard", index]]
        theirs = [cases[NOISE, index], cases[FRESH, index], cases[FRESH, index]]
        for d, own, other in zip(DESIDERATA, ours, theirs, strict=True):
            name = f"desideratum {d} by {index}"
            measured[name], controls[name] = scores(own, sets)[d - 1], scores(other, sets)[d - 1]
            gain = jackknifed(partial(gains_in_shares, own, other), sets)[d - 1]
            parts.append(all_of(measured[name].above(RIGHT), gain.above(0)))
    tables = halves["hadamard", "CKA"], halves["features", "CKA"]
    measured[BETTER] = jackknifed(lambda some: gains_in_shares(*tables, some).mean(), sets)
    measured[BY_SPECTRA] = jackknifed(partial(_by_spectra, kept["trained"], tables[0]), sets)
    return Finding(
        verdict(*parts, measured[BETTER].above(0)),
        measured | _on_halves(halves, sets),
        controls,
        networks_in_words(lab, wanted),
        _by_block(halves, sets) | _case_curves(cases, sets) | _kernel_curve(kept["trained"], sets),
        lab.seeds(SEEDS[lab.scale]),
    )


def _cases(kept: Mapping[str, Sequence[Kept]], sets: Sequence[Sequence[int]]) -> dict[tuple[str, str], np.ndarray]:
    """Return the similarities by features and gradients in all controls, by name and index."""
    ours, members = kept["trained"], [group for group, own in enumerate(sets) for _ in own]
    whole, other = (kernels(ours, label, "hadamard") for label in ("whole", "other"))
    parts = [noise(kernels(ours, "whole", part), members, seed) for seed, part in enumerate(BOTH)]
    found = {("independent buckets", "CKA"): crossed(cka, whole, other)}
    for index, function in INDICES.items():
        for name, some in ((SHARED, whole), (NOISE, parts[0] * parts[1])):
            found[name, index] = function(some, some).cpu().numpy()
        found[FRESH, index] = on_halves(kept["untrained"], "hadamard", function)
    return found | {
        ("training images, unequal N", "CKA"): similarity(ours, "train", "hadamard", cka),
        ("disjoint halves", "CKA"): on_halves(ours, "hadamard", cka),
        ("ten classes of CIFAR-100, halves", "CKA"): on_halves(kept["cut"], "hadamard", cka),
        ("shuffled labels, halves", "CKA"): on_halves(kept["shuffled"], "hadamard", cka),
    }


def _by_spectra(kept: Sequence[Kept], table: np.ndarray, sets: Sequence[Sequence[int]]) -> float:
    """Return how well tr K tr L / (M ‖K‖ ‖L‖) tells the similarities of networks of different sets.

    That is the mean of the alignment over all rotations of one of the kernels against the other.
    """
    sizes = [unit(kernels(kept, label, "hadamard")).diagonal(dim1=-2, dim2=-1) for label in ("first", "second")]
    first, second = (one.sum(-1).cpu().numpy() / one.shape[-1] ** 0.5 for one in sizes)  # networks × blocks
    pairs = [(i, j) for a, b in combinations(sets, 2) for i in a for j in b]
    told = [(first[i] * second[j] + second[i] * first[j]) / 2 for i, j in pairs]
    return float(np.corrcoef(np.ravel(told), np.ravel([table[:, i, j] for i, j in pairs]))[0, 1])


def _case_curves(
    cases: Mapping[tuple[str, str], np.ndarray], sets: Sequence[Sequence[int]]
) -> dict[str, dict[str, list[Any]]]:
    chosen = {name: table for (name, index), table in cases.items() if index == "CKA"}
    found = [scores(table, sets) for table in chosen.values()]
    curve: dict[str, list[Any]] = {"case": list(chosen)}
    for d in DESIDERATA:
        curve |= lines(f"desideratum {d}", [one[d - 1] for one in found])
    return {
        "Share of right orderings by CKA of features and gradients": curve,
        "Similarity on disjoint halves": pairs_curve(chosen["disjoint halves"], sets),
        "Similarity with shared buckets": pairs_curve(chosen[SHARED], sets),
    }


def _kernel_curve(kept: Sequence[Kept], sets: Sequence[Sequence[int]]) -> dict[str, dict[str, list[Any]]]:
    """Return the shares for other kernels, with shared buckets as in Figs. 7 and 8."""
    curve: dict[str, list[Any]] = {"kernel": list(OTHERS)}
    for index, function in INDICES.items():
        found = [scores(similarity(kept, "whole", kernel, function), sets) for kernel in OTHERS]
        for d in DESIDERATA:
            curve |= lines(f"desideratum {d} by {index}", [one[d - 1] for one in found])
    return {"Share of right orderings by kernel, with shared buckets": curve}


def _by_block(
    halves: Mapping[tuple[str, str], np.ndarray], sets: Sequence[Sequence[int]]
) -> dict[str, dict[str, list[Any]]]:
    found = {key: jackknifed(partial(shares, table), sets) for key, table in halves.items()}
    curves = {}
    for index in INDICES:
        for d in DESIDERATA:
            curve: dict[str, list[Any]] = {"block": list(range(1, found["hadamard", index].shape[1] + 1))}
            for kernel, words in KERNELS.items():
                curve |= lines(words, found[kernel, index][d - 1])
            curves[f"Desideratum {d} by {index}: share of right orderings"] = curve
    return curves


def _on_halves(halves: Mapping[tuple[str, str], np.ndarray], sets: Sequence[Sequence[int]]) -> dict[str, Measured]:
    found = {}
    for (kernel, index), table in halves.items():
        for d, one in zip(DESIDERATA, scores(table, sets), strict=True):
            if kernel != "hadamard" or d == 1:
                found[f"desideratum {d} by {index} on halves, {KERNELS[kernel]}"] = one
    return found
