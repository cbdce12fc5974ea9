"""What of the term matters: how many samples and batches it is taken on, and whether CCA does as well as CKA.

Claims: sparsity/samples-and-batches and sparsity/cca.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab
from reproductions.sparsity import nets
from reproductions.sparsity.nets import (
    BY_T,
    STRENGTHS,
    Case,
    Found,
    chosen,
    gain,
    mean_of,
    measured,
    noise_words,
    over_seeds,
    setting_words,
    values,
)

SEEDS = {"cpu": 3, "gpu": 5}
BETAS = (1e-5, 1e-4, 8e-4, 1e-2)
WHOLE, CHEAP, CHEAPEST = "all samples, every batch", "8 samples, every 5th batch", "4 samples, every 5th batch"
VARIANTS: dict[str, tuple[int | None, int]] = {WHOLE: (None, 1), CHEAP: (8, 5), CHEAPEST: (4, 5)}
SELECTION = "best of all on test less their mean"
FAILED = 0.5  # of the accuracy of β = 0 with the same seed: what is below has not converged
Grid = Mapping[str, Mapping[float, list[Case]]]


@claim(
    "sparsity/samples-and-batches",
    figure="Table 2",
    sentence="the performance is slightly worse than full CKA-SR (our original method which calculates CKA-SR for each "
    "sample in each batch), but it's still better than the baseline method",
    expected={f"{CHEAP} less β = 0": 0.335, f"{WHOLE} less β = 0": 0.305}
    | {f"{CHEAPEST} less β = 0": "-1.77 (76.08 at β = 0.01; 0.33 without)", f"{WHOLE} less {CHEAP}": -0.03}
    | {SELECTION: "0.64 (85.03, the best of 12 values of β, of mean 84.39)"},
    control="samples in random order in place of the layers compared, with each β",
    criterion=f"ResNet-20 on CIFAR-10 at 0.95, with β = {', '.join(f'{beta:g}' for beta in BETAS)}; a variant's value "
    "is the mean over all β, so that none is chosen. Three parts: the term of 8 samples in every fifth batch is above "
    "β = 0 and above random targets of as many; so is that of 4 samples above β = 0; and the term of all samples in "
    f"every batch is above that of 8. In pairs of one seed with the same masks, start and batches, {BY_T} over the "
    "seeds. What the best of all values on test adds to their mean is measured beside them.",
    measures=["cka"],
)
def samples_and_batches(lab: Lab) -> Finding:
    """Test accuracies by β and variant."""
    base, grid = over_seeds(Case(), SEEDS[lab.scale]), _grid(lab, "stage", VARIANTS)
    random = _grid(lab, "random", {CHEAP: VARIANTS[CHEAP]})[CHEAP]
    everything = [case for own in (*grid.values(), random) for some in own.values() for case in some]
    found = measured(lab, [*base, *everything])
    plain, chance = values(found, base), _by_seed(found, random)
    by_seed = {name: _by_seed(found, own) for name, own in grid.items()}
    gained = {f"{name} less β = 0": gains(own, plain) for name, own in by_seed.items()}
    gained[f"{WHOLE} less {CHEAP}"] = gains(by_seed[WHOLE], by_seed[CHEAP])
    gained[f"{CHEAP} less random targets"] = beyond = gains(by_seed[CHEAP], chance)
    parts = (
        all_of(gained[f"{CHEAP} less β = 0"].above(0), beyond.above(0)),
        gained[f"{CHEAPEST} less β = 0"].above(0),
        gained[f"{WHOLE} less {CHEAP}"].above(0),
    )
    cells = {f"{name}: β = {beta:g}": mean_of(found, some) for name, own in grid.items() for beta, some in own.items()}
    means = [one.value for one in cells.values()]
    seconds = {
        f"{name}: seconds of a training": mean_of(found, own[BETAS[-1]], "seconds") for name, own in grid.items()
    }
    return Finding(
        verdict(*parts),
        gained
        | {SELECTION: Measured(max(means) - mean(means), n=len(means))}
        | {"β = 0: test accuracy, %": mean_of(found, base)} | cells | seconds,
        {f"{CHEAP} less β = 0": gains(chance, plain)},
        f"{noise_words(gained)} {setting_words(lab, 'resnet20-sparse')} All {len(means)} cells are reported, each of "
        f"{len(base)} seeds.",
        {"Test accuracy by β, %": _curve(found, grid, base)},
        lab.seeds(len(base)),
    )  # fmt: skip


def _grid(lab: Lab, arm: str, variants: Mapping[str, tuple[int | None, int]]) -> dict[str, dict[float, list[Case]]]:
    return {
        name: {
            beta: over_seeds(Case(arm=arm, strength=beta, samples=samples, every=every), SEEDS[lab.scale])
            for beta in BETAS
        }
        for name, (samples, every) in variants.items()
    }


def _by_seed(found: Mapping[Case, Found], by_beta: Mapping[float, list[Case]]) -> list[float]:
    """Return the mean accuracy over all β, by seed."""
    return [mean(values(found, some)) for some in zip(*by_beta.values(), strict=True)]


def _curve(found: Mapping[Case, Found], grid: Grid, base: Sequence[Case]) -> dict[str, Any]:
    curve: dict[str, Any] = {"β": [f"{beta:g}" for beta in BETAS]}
    for name, own in grid.items():
        curve |= line(name, [values(found, some) for some in own.values()])
    return curve | line("β = 0", [values(found, base)] * len(BETAS))


# --- CCA --------------------------------------------------------------------------------------------------------------

ARMS = {"base": "β = 0", "cca": "CCA", "stage": "CKA-SR", "random": "random targets"}


@claim(
    "sparsity/cca",
    figure="Table 3",
    sentence="CCA also increases the performance of sparse training, but the increment is smaller than CKA-SR. "
    "Besides, CCA is less robust than CKA, which means sparse training with CCA is harder to converge than CKA-SR.",
    expected={"CKA-SR less CCA": 0.45, "CCA less β = 0": 0.42, "CKA-SR less β = 0": 0.87}
    | {"CCA: failures to converge, %": "more than of CKA-SR"},
    control="samples in random order in place of the layers compared, with the β of CKA-SR",
    criterion="ResNet-20 on CIFAR-10 at 0.95; CCA is `cca_mean_squared` of positions. β is for each the best of "
    f"{len(STRENGTHS['cca'])} values on held-out training images. Three parts: CCA is above β = 0, and above random "
    "targets; CKA-SR is above CCA; in pairs of one seed with the same masks, start and batches, "
    f"{BY_T} over the seeds; and more trainings with CCA fail to converge, trials included, by the same interval: with "
    f"weights that are no numbers, or an accuracy below {FAILED:g} of that of β = 0 with the same seed. No failure of "
    "either leaves the third part undecided.",
    measures=["cka", "cca_mean_squared"],
)
def cca_and_cka(lab: Lab) -> Finding:
    """Test accuracies with the similarity of layers by CCA and by CKA, and how often training fails."""
    count, case = nets.SEEDS[lab.scale], Case()
    choices = chosen(lab, {"stage": (case, "stage"), "cca": (case, "cca")})
    strengths = {"base": 0.0, "random": choices["stage"].strength} | {arm: one.strength for arm, one in choices.items()}
    arms = {arm: over_seeds(case._replace(arm=arm, strength=strengths[arm]), count) for arm in ARMS}
    found = measured(lab, [one for own in arms.values() for one in own])
    gained = {f"{ARMS[one]} less {ARMS[other]}": gain(found, arms[one], arms[other])
              for one, other in (("stage", "cca"), ("cca", "base"), ("stage", "base"), ("cca", "random"))}  # fmt: skip
    failed = {arm: _failures(lab, found, arms[arm], arms["base"]) for arm in ("cca", "stage")}
    more = gains(failed["cca"], failed["stage"])
    parts = (
        all_of(gained["CCA less β = 0"].above(0), gained["CCA less random targets"].above(0)),
        gained["CKA-SR less CCA"].above(0),
        more.above(0) if any(failed["cca"] + failed["stage"]) else None,
    )
    chance = gain(found, arms["random"], arms["base"])
    return Finding(
        verdict(*parts),
        gained
        | {f"{ARMS[arm]}: failures to converge, %": Measured.over(own) for arm, own in failed.items()}
        | {"failures to converge, %: CCA less CKA-SR": more}
        | {f"{words}: test accuracy, %": mean_of(found, arms[arm]) for arm, words in ARMS.items()}
        | {f"{words}: seconds of a training": mean_of(found, arms[arm], "seconds") for arm, words in ARMS.items()}
        | {"networks trained to choose β": Measured(sum(len(one.accuracies) for one in choices.values()))},
        {"CKA-SR less CCA": gain(found, arms["random"], arms["cca"])}
        | dict.fromkeys(("CCA less β = 0", "CKA-SR less β = 0"), chance),
        f"{noise_words(gained)} {setting_words(lab, 'resnet20-sparse')} β, with accuracies in % on held-out images: "
        f"CKA-SR {choices['stage'].words}; CCA {choices['cca'].words}.",
        seeds=lab.seeds(count),
    )


def _failures(lab: Lab, found: Mapping[Case, Found], ours: Sequence[Case], base: Sequence[Case]) -> list[float]:
    """Return of each training of an arm, those of its trials included, whether it failed: 0 or 100."""
    arm = ours[0].arm
    trials = [Case(arm=arm, strength=one, seed=nets.SEARCH, held_out=True) for one in STRENGTHS[arm]]
    return failures({**found, **measured(lab, trials)}, [*ours, *trials], base)


def failures(found: Mapping[Case, Found], ours: Sequence[Case], base: Sequence[Case]) -> list[float]:
    """Return 100 of each network that is no numbers, or far below β = 0 of its seed (a trial: of all), else 0."""
    by_seed = {case.seed: found[case]["accuracy"] for case in base}
    usual = mean(by_seed.values())
    failed = [
        bool(found[case]["failed"]) or found[case]["accuracy"] < FAILED * by_seed.get(case.seed, usual) for case in ours
    ]
    return [100.0 * one for one in failed]
