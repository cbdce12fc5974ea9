"""How alike the blocks of networks are, within a network and across networks of different sets.

Claim: gradients/blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from statistics import mean
from typing import Any

import numpy as np

from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.gradients.nets import LONG, SEEDS, SETS, WORDS, names
from reproductions.gradients.orderings import BY_T, KERNELS, cka_of_blocks, groups, jackknifed, kernels
from reproductions.gradients.readings import Kept, networks_in_words, read_all
from reproductions.laboratory import Lab

JUMPS = (3, 8)  # the blocks after which the paper sees a critical change
OTHER_JUMPS = (2, 7)  # the same, if the paper counted the input, the convolution and the stem as 0, 1 and 2
EARLY = 7  # the last block before block 8
LAST = (8, 9)  # blocks 9 and 10, counted from 0
NATURAL = SETS[:2]
ABOVE = "above the others"
NAME = f"CIFAR-10, drop from block 3 to 4 {ABOVE}"
EARLY_MORE = "CIFAR-100, similarity to early blocks minus that of the other sets"
EARLY_LATE = "CIFAR-100, similarity to early minus late blocks"
UNLIKE = "blocks 9 and 10: SVHN with the others minus CIFAR-10 with CIFAR-100"


@claim(
    "gradients/blocks",
    figure="Fig. 5",
    sentence="CIFAR-10 and CIFAR-100 have similar behaviours of the similarity across layers, and the critical changes "
    "happen at ResBlock3 to ResBlock4 and ResBlock8 to ResBlock9. All layers from CIFAR-100 have high similarity "
    "scores to layers before ResBlock8 of models trained on CIFAR-10 and SVHN. … ResBlock9 and 10 of an SVHN model are "
    "always not similar to those blocks in CIFAR-10 and CIFAR-100",
    expected={NAME: "above 0", f"CIFAR-10, drop from block 8 to 9 {ABOVE}": "above 0",
              f"CIFAR-100, drop from block 3 to 4 {ABOVE}": "above 0",
              f"CIFAR-100, drop from block 8 to 9 {ABOVE}": "above 0",
              EARLY_MORE: "above 0", EARLY_LATE: "above 0", UNLIKE: "below 0"},
    control="networks before training",
    criterion="CKA of K̃_f ∘ K̃_g between blocks of ResNet-18s, within a network from one sketch, across networks from "
    "disjoint halves of the images. A drop is 1 minus the similarity of a block to the next. Four parts: for CIFAR-10 "
    "and CIFAR-100 the drop from block 3 to 4 is larger than the mean of the drops that the paper does not name; the "
    "same for 8 to 9; all blocks of CIFAR-100 are more similar to the blocks before 8 of the other sets' networks than "
    "to the later ones, and than the blocks of the other two sets are to such blocks of theirs; and blocks 9 and 10 of "
    "SVHN are less similar to those of CIFAR-10 and CIFAR-100 than these are to each other. Each also differs, in the "
    f"same direction, from networks before training. Drops network by network by Student's t, the rest {BY_T}.",
    measures=["sketched_cka_by_buckets"],
    papers_training=LONG,
)  # fmt: skip
def blocks(lab: Lab) -> Finding:
    """Maps of similarities of all blocks, and what the paper reads off them."""
    wanted, sets = {kind: names(lab, kind) for kind in ("trained", "untrained")}, groups(lab)
    kept = {kind: read_all(lab, some) for kind, some in wanted.items()}
    drops = {kind: drops_of(some, "hadamard") for kind, some in kept.items()}
    maps = {kind: across(some, "hadamard") for kind, some in kept.items()}
    measured, controls, parts = {}, {}, []
    for jump in JUMPS:
        conditions = []
        for given in NATURAL:
            ours, theirs = (_jumps(drops[kind][sets[SETS.index(given)]], jump) for kind in wanted)
            name = f"{WORDS[given]}, drop from block {jump} to {jump + 1} {ABOVE}"
            measured[name], controls[name] = Measured.over(ours), Measured.over(theirs)
            conditions += [measured[name].above(0), gains(ours, theirs).above(0)]
        parts.append(all_of(*conditions))
    more = {}
    for name, contrast in CONTRASTS.items():
        found = jackknifed(lambda some, f=contrast: np.array([f(one, some) for one in maps.values()]), sets)  # type: ignore[misc]
        measured[name], controls[name] = found
        more[name] = jackknifed(lambda some, f=contrast: f(maps["trained"], some) - f(maps["untrained"], some), sets)  # type: ignore[misc]
    parts.append(all_of(*(test for name in (EARLY_MORE, EARLY_LATE)
                          for test in (measured[name].above(0), more[name].above(0)))))  # fmt: skip
    parts.append(all_of(measured[UNLIKE].below(0), more[UNLIKE].below(0)))
    for jump in OTHER_JUMPS:
        for given in NATURAL:
            some = _jumps(drops["trained"][sets[SETS.index(given)]], jump)
            measured[f"{WORDS[given]}, drop from block {jump} to {jump + 1} {ABOVE}"] = Measured.over(some)
    note = (
        "Counted from the input, the first convolution and the stem as 0, 1 and 2, the paper's blocks 3 to 4 and 8 to "
        "9 would be 2 to 3 and 7 to 8 here, and its 9 and 10 the last stage. The maps of ResNet-50 (Figs. 11 and 12) "
        "carry no words of their own and are left out."
    )
    return Finding(
        verdict(*parts), measured, controls, f"{note} {networks_in_words(lab, wanted)}",
        _drop_curves(kept["trained"], sets) | _reach_curve(maps["trained"], sets) | _maps(maps["trained"], sets),
        lab.seeds(SEEDS[lab.scale]),
    )  # fmt: skip


def drops_of(kept: Sequence[Kept], kernel: str) -> np.ndarray:
    """Return 1 minus the similarity of each block to the next within each network, networks × steps."""
    found = kernels(kept, "first", kernel)
    return np.stack([1 - np.diagonal(cka_of_blocks(one[None], one[None])[0, :, 0], 1) for one in found])


def across(kept: Sequence[Kept], kernel: str) -> np.ndarray:
    """Return the similarities of all blocks of all networks, each pair on disjoint halves of the images."""
    found = cka_of_blocks(kernels(kept, "first", kernel), kernels(kept, "second", kernel))
    return (found + found.transpose(2, 3, 0, 1)) / 2


def _jumps(drops: np.ndarray, jump: int) -> list[float]:
    """Return by how much the drop after a block is above the mean of those that the paper does not name."""
    rest = [step for step in range(1, drops.shape[1] + 1) if step not in (*JUMPS, jump)]
    return [float(one[jump - 1] - mean(one[step - 1] for step in rest)) for one in drops]


def _reach(found: np.ndarray, sets: Sequence[Sequence[int]], which: int) -> np.ndarray:
    """Return the mean similarity of all blocks of one set's networks to each block of the others'."""
    others = [j for k, own in enumerate(sets) if k != which for j in own]
    return found[list(sets[which])][:, :, others].mean((0, 1, 2))


def _early_more(found: np.ndarray, sets: Sequence[Sequence[int]]) -> float:
    reach = [_reach(found, sets, which)[:EARLY].mean() for which in range(len(SETS))]
    return float(reach[1] - (reach[0] + reach[2]) / 2)


def _early_late(found: np.ndarray, sets: Sequence[Sequence[int]]) -> float:
    reach = _reach(found, sets, 1)
    return float(reach[:EARLY].mean() - reach[EARLY:].mean())


def _unlike(found: np.ndarray, sets: Sequence[Sequence[int]]) -> float:
    ten, hundred, digits = (list(own) for own in sets)
    last = found[:, LAST][:, :, :, LAST].mean((1, 3))
    return float(last[np.ix_(digits, ten + hundred)].mean() - last[np.ix_(ten, hundred)].mean())


CONTRASTS = {EARLY_MORE: _early_more, EARLY_LATE: _early_late, UNLIKE: _unlike}


def _drop_curves(kept: Sequence[Kept], sets: Sequence[Sequence[int]]) -> dict[str, dict[str, list[Any]]]:
    found = {kernel: drops_of(kept, kernel) for kernel in KERNELS}
    curves = {}
    for given, own in zip(SETS, sets, strict=True):
        steps = [f"{step} to {step + 1}" for step in range(1, found["hadamard"].shape[1] + 1)]
        curve: dict[str, list[Any]] = {"blocks": steps}
        for kernel, words in KERNELS.items():
            curve |= line(words, found[kernel][own].T)
        curves[f"{WORDS[given]}: drop of similarity from a block to the next"] = curve
    return curves


def _reach_curve(found: np.ndarray, sets: Sequence[Sequence[int]]) -> dict[str, dict[str, list[Any]]]:
    curve: dict[str, list[Any]] = {"block": list(range(1, found.shape[1] + 1))}
    for which, given in enumerate(SETS):
        curve[WORDS[given]] = [float(value) for value in _reach(found, sets, which)]
    return {"Mean similarity of a set's blocks to each block of the other sets": curve}


def _maps(found: np.ndarray, sets: Sequence[Sequence[int]]) -> dict[str, dict[str, list[Any]]]:
    """Return the maps of Fig. 5, a line for each block of the first set."""
    curves = {}
    for a, b in combinations_with_replacement(range(len(SETS)), 2):
        pairs = [(i, j) for i in sets[a] for j in sets[b] if i != j]
        table = np.mean([found[i, :, j] for i, j in pairs], 0)
        curve: dict[str, list[Any]] = {f"block of {WORDS[SETS[b]]}": list(range(1, table.shape[1] + 1))}
        curve |= {f"block {k}": [float(value) for value in row] for k, row in enumerate(table, 1)}
        curves[f"Blocks of {WORDS[SETS[a]]} with blocks of {WORDS[SETS[b]]}"] = curve
    return curves
