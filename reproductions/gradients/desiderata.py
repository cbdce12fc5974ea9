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
from reproductions.gradients.nets import SEEDS, SETS, names
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
from reproductions.gradients.readings import Kept, networks_in_words, read_all
from reproductions.laboratory import Lab

INDICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"CKA": cka, "NBS": nbs}
OTHERS = ("features", "gradients", "hadamard", "sum", "product", "transport", "psi")
SHARED, NOISE = "as in the paper: shared buckets", "noise of the same spectra"
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
              "both minus features alone by CKA": "above 0"},
    control="networks before training",
    criterion="Pairs of ResNet-18s are compared block by block by sketched kernels K̃_f ∘ K̃_g. Networks of one set "
    "that share images share buckets and are close by construction, so one network of each pair is sketched on one "
    "half of its test images and the other on the other half. Seven parts. For each of CKA and NBS and each of the "
    "three desiderata of section 5.1 the share of orderings that are right, in the mean over blocks, is above "
    f"{RIGHT} and above that of networks before training; and the mean share over the three desiderata by CKA is "
    f"higher with features and gradients than with features alone. All {BY_T}.",
    measures=["sketched_cka_by_buckets", "sketched_nbs"],
)  # fmt: skip
def desiderata(lab: Lab) -> Finding:
    """Shares of right orderings, with networks sketched on disjoint halves, and in all controls."""
    wanted = {kind: names(lab, kind) for kind in ("trained", "untrained", "shuffled")}
    wanted["cut"] = [*names(lab, "trained", SETS[:1]), *names(lab, "cut", SETS[1:2]), *names(lab, "trained", SETS[2:])]
    kept, sets = {kind: read_all(lab, some) for kind, some in wanted.items()}, groups(lab)
    halves = {(kernel, index): on_halves(kept["trained"], kernel, INDICES[index]) for kernel in KERNELS
              for index in INDICES}  # fmt: skip
    control = {index: on_halves(kept["untrained"], "hadamard", INDICES[index]) for index in INDICES}
    measured, controls, parts = {}, {}, []
    for index in INDICES:
        ours, theirs = (scores(one, sets) for one in (halves["hadamard", index], control[index]))
        more = jackknifed(partial(gains_in_shares, halves["hadamard", index], control[index]), sets)
        for d, (own, other, gain) in zip(DESIDERATA, zip(ours, theirs, more, strict=True), strict=True):
            measured[f"desideratum {d} by {index}"], controls[f"desideratum {d} by {index}"] = own, other
            parts.append(all_of(own.above(RIGHT), gain.above(0)))
    tables = halves["hadamard", "CKA"], halves["features", "CKA"]
    gain = jackknifed(lambda some: gains_in_shares(*tables, some).mean(), sets)
    measured["both minus features alone by CKA"] = gain
    cases = _cases(kept, sets)
    measured[BY_SPECTRA] = jackknifed(partial(_by_spectra, kept["trained"], cases["disjoint halves"]), sets)
    for d, own, other in zip(DESIDERATA, scores(cases[SHARED], sets), scores(cases[NOISE], sets), strict=True):
        name = f"desideratum {d} by CKA with shared buckets, as in the paper (control: noise)"
        measured[name], controls[name] = own, other
    return Finding(
        verdict(*parts, gain.above(0)),
        measured | _alone(halves, sets),
        controls,
        f"{networks_in_words(lab, wanted)}",
        _by_block(halves, sets) | _case_curves(cases, sets) | _kernel_curve(kept["trained"], sets),
        lab.seeds(SEEDS[lab.scale]),
    )


def _cases(kept: Mapping[str, Sequence[Kept]], sets: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the similarities by CKA of features and gradients in all controls."""
    ours, members = kept["trained"], [group for group, own in enumerate(sets) for _ in own]
    whole, other = (kernels(ours, label, "hadamard") for label in ("whole", "other"))
    fake = noise(kernels(ours, "whole", "features"), members, 1) * noise(
        kernels(ours, "whole", "gradients"), members, 2
    )
    return {
        "disjoint halves": on_halves(ours, "hadamard", cka),
        SHARED: cka(whole, whole).cpu().numpy(),
        "training images, unequal N": similarity(ours, "train", "hadamard", cka),
        "independent buckets": crossed(cka, whole, other),
        NOISE: cka(fake, fake).cpu().numpy(),
        "ten classes of CIFAR-100": on_halves(kept["cut"], "hadamard", cka),
        "shuffled labels": on_halves(kept["shuffled"], "hadamard", cka),
        "before training": on_halves(kept["untrained"], "hadamard", cka),
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


def _case_curves(cases: Mapping[str, np.ndarray], sets: Sequence[Sequence[int]]) -> dict[str, dict[str, list[Any]]]:
    found = [scores(table, sets) for table in cases.values()]
    curve: dict[str, list[Any]] = {"case": list(cases)}
    for d in DESIDERATA:
        curve |= lines(f"desideratum {d}", [one[d - 1] for one in found])
    return {
        "Share of right orderings by CKA of features and gradients": curve,
        "Similarity on disjoint halves": pairs_curve(cases["disjoint halves"], sets),
        "Similarity with shared buckets": pairs_curve(cases[SHARED], sets),
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


def _alone(halves: Mapping[tuple[str, str], np.ndarray], sets: Sequence[Sequence[int]]) -> dict[str, Measured]:
    found = {}
    for (kernel, index), table in halves.items():
        for d, one in zip(DESIDERATA, scores(table, sets), strict=True) if kernel != "hadamard" else ():
            found[f"desideratum {d} by {index}, {kernel} alone"] = one
    return found
