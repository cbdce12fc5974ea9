"""What a measure should say of networks that were trained on the same or on different sets of images.

Claims: gradients/desiderata, gradients/other-measures and gradients/buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from torch import Tensor

import netkin as nk
from netkin.applications.transfer.fisher import TaskEmbedding
from reproductions.claims import Finding, Measured, all_of, claim, verdict
from reproductions.gradients.nets import NEEDS, SEEDS, SETS, WORDS, names
from reproductions.gradients.orderings import (
    DESIDERATA,
    cka,
    crossed,
    folded,
    jackknifed,
    kernels,
    nbs,
    noise,
    shares,
)
from reproductions.gradients.readings import BUCKETS, SEEN, Kept, accuracies, read_all
from reproductions.laboratory import Lab

RIGHT = 0.75  # the share of orderings, half way from chance to all
FEW = {"cpu": 32, "gpu": 128}
TOO_FEW = {"cpu": 4, "gpu": 8}
ALIKE = 0.95  # correlation of two pictures
NEAR = 0.1  # difference of shares
INDICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"CKA": cka, "NBS": nbs}
KERNELS = {"features": "features", "gradients": "gradients", "hadamard": "both"}
OTHERS = ("features", "gradients", "hadamard", "sum", "product", "transport", "psi")
BY_T = "by the 95% interval of Student's t, errors by the jackknife over networks"
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
        more = jackknifed(lambda some, i=index: _mean(halves["hadamard", i], some) - _mean(control[i], some), sets)
        for d, (own, other, gain) in zip(DESIDERATA, zip(ours, theirs, more, strict=True), strict=True):
            measured[f"desideratum {d} by {index}"], controls[f"desideratum {d} by {index}"] = own, other
            parts.append(all_of(own.above(RIGHT), gain.above(0)))
    gain = jackknifed(
        lambda some: _mean(halves["hadamard", "CKA"], some).mean() - _mean(halves["features", "CKA"], some).mean(), sets
    )
    measured["both minus features alone by CKA"] = gain
    cases = _cases(kept, sets)
    return Finding(
        verdict(*parts, gain.above(0)),
        measured | _alone(halves, sets),
        controls,
        f"{networks_in_words(lab, wanted)}",
        _by_block(halves, sets) | _case_curves(cases, sets) | _kernel_curve(kept["trained"], sets),
        lab.seeds(SEEDS[lab.scale]),
    )


@claim(
    "gradients/other-measures",
    figure="Fig. 2",
    sentence="when it [Task2Vec] is used to compare independently trained models, it doesn't provide insightful "
    "similarity scores. A distance measure based on the FR norm is presented in Fig. 3, and it does not meet the "
    "desiderata.",
    expected={"Task2Vec, worst desideratum": "not met", "Fisher–Rao distance, worst desideratum": "not met",
              "Task2Vec, SVHN with itself minus SVHN with others": "below 0",
              "Fisher–Rao distance, CIFAR-100 told from SVHN": "no"},
    control="CKA of features and gradients between the same networks, sketched on disjoint halves",
    criterion="Independently trained ResNet-18s, each on the test images of its own set. Four parts: of Task2Vec, and "
    f"of the Fisher–Rao distance, the share of right orderings is below {RIGHT} in the worst of the three desiderata, "
    "and below that of the control in its worst; pairs of SVHN networks are less similar by Task2Vec than SVHN with "
    "CIFAR networks (Fig. 2); and by the Fisher–Rao distance the share of orderings in which networks of CIFAR-100 and "
    f"of SVHN are each closer to their own kind than to the other is below {RIGHT} (Fig. 3). All {BY_T}.",
)  # fmt: skip
def other_measures(lab: Lab) -> Finding:
    """Whole networks compared by Task2Vec and by Fisher–Rao norms."""
    wanted, sets = names(lab, "trained"), groups(lab)
    kept = read_all(lab, wanted)
    tables = {"Task2Vec": task2vec_similarity(kept), "Fisher–Rao distance": fisher_rao_similarity(kept)}
    ours = on_halves(kept, "hadamard", cka)
    worst = int(np.argmin(_mean(ours, sets)))
    measured, controls, parts = {}, {}, []
    for name, table in tables.items():
        bad = int(np.argmin(_mean(table, sets)))
        own = jackknifed(lambda some, t=table, b=bad: _mean(t, some)[b], sets)
        gain = jackknifed(lambda some, t=table, b=bad: _mean(t, some)[b] - _mean(ours, some)[worst], sets)
        measured[f"{name}, worst desideratum"] = own
        controls[f"{name}, worst desideratum"] = jackknifed(lambda some: _mean(ours, some)[worst], sets)
        parts.append(all_of(own.below(RIGHT), gain.below(0)))
    inside = jackknifed(lambda some: _inside(tables["Task2Vec"], some, 2), sets)
    told = jackknifed(lambda some: _told(tables["Fisher–Rao distance"], some), sets)
    measured["Task2Vec, SVHN with itself minus SVHN with others"] = inside
    measured["Fisher–Rao distance, CIFAR-100 told from SVHN"] = told
    for name, table in tables.items():
        measured |= {f"{name}, desideratum {d}": one for d, one in zip(DESIDERATA, scores(table, sets), strict=True)}
    controls["Task2Vec, SVHN with itself minus SVHN with others"] = jackknifed(lambda s: _inside(ours, s, 2), sets)
    controls["Fisher–Rao distance, CIFAR-100 told from SVHN"] = jackknifed(lambda s: _told(ours, s), sets)
    curves = {f"Similarity by {name}": _pairs_curve(table, sets) for name, table in tables.items()}
    note = (
        f"Task2Vec is the diagonal of the Fisher information of all filters but the head's, on {SEEN[lab.scale]} test "
        "images, one y drawn for each; similarity is 1 minus its distance. y of the Fisher–Rao norm is from the "
        f"prediction, in exact mean; similarity is minus the distance. {networks_in_words(lab, {'trained': wanted})}"
    )
    return Finding(
        verdict(*parts, inside.below(0), told.below(RIGHT)), measured, controls, note, curves,
        lab.seeds(SEEDS[lab.scale]),
    )  # fmt: skip


@claim(
    "gradients/buckets",
    figure="App. C",
    sentence="We tested both M = 512 and M = 128, and there is no significant difference between these two settings.",
    expected={"correlation of the pictures": "about 1", "largest difference of shares": "about 0"},
    control="a sketch with too few buckets, 8 of 512 (4 of 128 at cpu scale)",
    criterion="CKA of K̃_f ∘ K̃_g between ResNet-18s on the test images, from a sketch of M = 512 buckets and from an "
    "independent one of M = 128 (128 and 32 at cpu scale). Two parts: over the six pairs of sets and all blocks the "
    f"mean similarities of the two are correlated above {ALIKE}, and more than those of the control; and the shares of "
    f"right orderings differ by less than {NEAR} in the mean over blocks, for each desideratum. All {BY_T}.",
    measures=["sketched_cka_by_buckets"],
)
def buckets(lab: Lab) -> Finding:
    """The picture of Fig. 1 from many and from few buckets."""
    wanted, sets = names(lab, "trained"), groups(lab)
    kept = read_all(lab, wanted)
    many = similarity(kept, "whole", "hadamard", cka)
    few, control = (fewer(kept, m[lab.scale]) for m in (FEW, TOO_FEW))
    again = similarity(kept, "other", "hadamard", cka)
    alike, chance = (jackknifed(lambda some, t=t: _likeness(many, t, some), sets) for t in (few, control))
    gain = jackknifed(lambda some: _likeness(many, few, some) - _likeness(many, control, some), sets)
    apart, too_far = (jackknifed(lambda some, t=t: _mean(t, some) - _mean(many, some), sets) for t in (few, control))
    far = max(range(3), key=lambda d: abs(apart[d].value))
    measured = {"correlation of the pictures": alike, "largest difference of shares": apart[far]}
    measured["correlation of the pictures, as many buckets and another seed"] = jackknifed(
        lambda some: _likeness(many, again, some), sets
    )
    measured |= {f"difference of shares, desideratum {d}": one for d, one in zip(DESIDERATA, apart, strict=True)}
    controls = {"correlation of the pictures": chance, "largest difference of shares": too_far[far]}
    curves = {
        f"M = {count}": _pairs_curve(table, sets)
        for count, table in ((BUCKETS[lab.scale], many), (FEW[lab.scale], few), (TOO_FEW[lab.scale], control))
    }
    return Finding(
        verdict(all_of(alike.above(ALIKE), gain.above(0)), all_of(*(one.within(-NEAR, NEAR) for one in apart))),
        measured, controls, f"{networks_in_words(lab, {'trained': wanted})}", curves, lab.seeds(SEEDS[lab.scale]),
    )  # fmt: skip


def groups(lab: Lab) -> list[list[int]]:
    """Return the places of the networks of each set, as `names` gives them."""
    count = SEEDS[lab.scale]
    return [list(range(count * k, count * (k + 1))) for k in range(len(SETS))]


def similarity(kept: Sequence[Kept], label: str, kernel: str, index: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
    """Return the similarities of networks, each with one sketch, blocks × networks × networks."""
    found = kernels(kept, label, kernel)
    return index(found, found).cpu().numpy()


def on_halves(kept: Sequence[Kept], kernel: str, index: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
    """Return the similarities of networks of which one sees one half of its images and the other the other half."""
    return crossed(index, kernels(kept, "first", kernel), kernels(kept, "second", kernel))


def fewer(kept: Sequence[Kept], count: int) -> np.ndarray:
    """Return the similarities of networks from the other seed's sketches with fewer buckets."""
    parts = [folded(kernels(kept, "other", part), count) for part in ("features", "gradients")]
    return cka(parts[0] * parts[1], parts[0] * parts[1]).cpu().numpy()


def task2vec_similarity(kept: Sequence[Kept]) -> np.ndarray:
    """Return 1 minus the Task2Vec distances of independent networks, 1 × networks × networks."""
    found = [one["task2vec"].cpu().numpy() for one in kept]
    made = [TaskEmbedding(one, (("filters", len(one)),), str(place), 0, "") for place, one in enumerate(found)]
    return 1 - np.array([[[nk.task2vec_distance(a, b, independent=True) for a in made] for b in made]])


def fisher_rao_similarity(kept: Sequence[Kept]) -> np.ndarray:
    """Return minus the Fisher–Rao distances, 1 × networks × networks."""
    found = [float(one["fisher-rao"]) for one in kept]
    return -np.array([[[nk.fisher_rao_distance(a, b) for a in found] for b in found]])


def scores(table: np.ndarray, sets: Sequence[Sequence[int]]) -> list[Measured]:
    """Return the shares of right orderings of each desideratum in the mean over blocks."""
    return list(jackknifed(lambda some: _mean(table, some), sets))


def _mean(table: np.ndarray, sets: Sequence[Sequence[int]]) -> np.ndarray:
    return shares(table, sets).mean(1)


def _cases(kept: Mapping[str, Sequence[Kept]], sets: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the similarities by CKA of features and gradients in all controls."""
    ours, members = kept["trained"], [group for group, own in enumerate(sets) for _ in own]
    whole, other = (kernels(ours, label, "hadamard") for label in ("whole", "other"))
    fake = noise(kernels(ours, "whole", "features"), members, 1) * noise(
        kernels(ours, "whole", "gradients"), members, 2
    )
    return {
        "disjoint halves": on_halves(ours, "hadamard", cka),
        "as in the paper: shared buckets": cka(whole, whole).cpu().numpy(),
        "training images, unequal N": similarity(ours, "train", "hadamard", cka),
        "independent buckets": crossed(cka, whole, other),
        "noise of the same spectra": cka(fake, fake).cpu().numpy(),
        "ten classes of CIFAR-100": on_halves(kept["cut"], "hadamard", cka),
        "shuffled labels": on_halves(kept["shuffled"], "hadamard", cka),
        "before training": on_halves(kept["untrained"], "hadamard", cka),
    }


def _case_curves(cases: Mapping[str, np.ndarray], sets: Sequence[Sequence[int]]) -> dict[str, dict[str, list[Any]]]:
    found = [scores(table, sets) for table in cases.values()]
    curve: dict[str, list[Any]] = {"case": list(cases)}
    for d in DESIDERATA:
        curve |= _lines(f"desideratum {d}", [one[d - 1] for one in found])
    return {
        "Share of right orderings by CKA of features and gradients": curve,
        "Similarity on disjoint halves": _pairs_curve(cases["disjoint halves"], sets),
        "Similarity with shared buckets": _pairs_curve(cases["as in the paper: shared buckets"], sets),
    }


def _kernel_curve(kept: Sequence[Kept], sets: Sequence[Sequence[int]]) -> dict[str, dict[str, list[Any]]]:
    """Return the shares for other kernels, with shared buckets as in Figs. 7 and 8."""
    curve: dict[str, list[Any]] = {"kernel": list(OTHERS)}
    for index, function in INDICES.items():
        found = [scores(similarity(kept, "whole", kernel, function), sets) for kernel in OTHERS]
        for d in DESIDERATA:
            curve |= _lines(f"desideratum {d} by {index}", [one[d - 1] for one in found])
    return {"Share of right orderings by kernel, with shared buckets": curve}


def _by_block(
    halves: Mapping[tuple[str, str], np.ndarray], sets: Sequence[Sequence[int]]
) -> dict[str, dict[str, list[Any]]]:
    found = {key: jackknifed(lambda some, t=table: shares(t, some), sets) for key, table in halves.items()}
    curves = {}
    for index in INDICES:
        for d in DESIDERATA:
            curve: dict[str, list[Any]] = {"block": list(range(1, found["hadamard", index].shape[1] + 1))}
            for kernel, words in KERNELS.items():
                curve |= _lines(words, found[kernel, index][d - 1])
            curves[f"Desideratum {d} by {index}: share of right orderings"] = curve
    return curves


def _alone(halves: Mapping[tuple[str, str], np.ndarray], sets: Sequence[Sequence[int]]) -> dict[str, Measured]:
    found = {}
    for (kernel, index), table in halves.items():
        for d, one in zip(DESIDERATA, scores(table, sets), strict=True) if kernel != "hadamard" else ():
            found[f"desideratum {d} by {index}, {kernel} alone"] = one
    return found


def _pairs_curve(table: np.ndarray, sets: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    """Return the mean similarities of pairs of sets, by block."""
    means = _pair_means(table, sets)
    return {"block": list(range(1, table.shape[0] + 1))} | {
        name: [float(value) for value in one] for name, one in means.items()
    }


def _pair_means(table: np.ndarray, sets: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    found = {}
    for a, b in combinations_with_replacement(range(len(SETS)), 2):
        pairs = [(i, j) for i in sets[a] for j in sets[b] if i != j]
        found[f"{WORDS[SETS[a]]} with {WORDS[SETS[b]]}"] = np.mean([table[:, i, j] for i, j in pairs], 0)
    return found


def _likeness(one: np.ndarray, other: np.ndarray, sets: Sequence[Sequence[int]]) -> float:
    """Return the correlation of the mean similarities of pairs of sets, over pairs and blocks."""
    flat = [np.concatenate(list(_pair_means(table, sets).values())) for table in (one, other)]
    return float(np.corrcoef(*flat)[0, 1])


def _inside(table: np.ndarray, sets: Sequence[Sequence[int]], which: int) -> float:
    """Return how much more alike networks of one set are than they are to others, in the mean over blocks."""
    own, others = list(sets[which]), [i for k, one in enumerate(sets) if k != which for i in one]
    inside = np.mean([table[:, i, j] for i in own for j in own if i != j])
    return float(inside - table[:, own][:, :, others].mean())


def _told(table: np.ndarray, sets: Sequence[Sequence[int]]) -> float:
    """Return the share of orderings in which CIFAR-100's and SVHN's networks are closer to their own kind."""
    right = [
        (table[:, i, j] > table[:, i, k]).mean()
        for own, other in ((sets[1], sets[2]), (sets[2], sets[1]))
        for i in own for j in own for k in other if i != j
    ]  # fmt: skip
    return float(np.mean(right))


def _lines(name: str, found: Sequence[Measured]) -> dict[str, list[float]]:
    return {name: [one.value for one in found], f"{name} ±": [one.error or 0.0 for one in found]}


def networks_in_words(lab: Lab, wanted: Mapping[str, Sequence[str]]) -> str:
    """Say which networks these are, and how well they do."""
    words = []
    for kind, some in wanted.items():
        found = np.array(accuracies(lab, list(some)))
        means = [f"{100 * found[own].mean():.0f}%" for own in groups(lab)]
        words.append(f"{kind} {', '.join(means)}")
    steps = lab.recipe("resnet18").recipe.steps
    return (
        f"ResNet-18s, {SEEDS[lab.scale]} for each set, trained for {steps} steps; block 1 is the stem, 2 to 9 are the "
        f"residual blocks and 10 the pooled output, flattened. Test accuracy on CIFAR-10, CIFAR-100 and SVHN: "
        f"{'; '.join(words)}. {NEEDS}"
    )
