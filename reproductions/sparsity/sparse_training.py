"""Whether a term for the similarity of layers makes networks that are sparse from the start more accurate.

Claim: sparsity/random-sparse-training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproductions.claims import Finding, Measured, all_of, claim, line, verdict
from reproductions.laboratory import Lab
from reproductions.sparsity.nets import (
    BY_T,
    SEEDS,
    STRENGTHS,
    WORDS,
    Case,
    Choice,
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

SPARSITIES = (0.90, 0.95, 0.98)  # with all seeds
OTHERS = (0.70, 0.85, 0.998)  # with one
CHOICE = 0.95  # where strengths are chosen, and controls are measured
ARMS = {"base": "β = 0", "stage": "CKA-SR", "augmented": "AugCKA-SR"}
ARMS |= {"random": "random targets", "decay": "weight decay"}
PAPER = {  # Table 5, in percent
    "base": {0.70: 65.42, 0.85: 60.37, 0.90: 56.96, 0.95: 47.27, 0.98: 33.74, 0.998: 2.95},
    "stage": {0.70: 65.60, 0.85: 60.86, 0.90: 57.25, 0.95: 48.26, 0.98: 34.44, 0.998: 3.32},
    "augmented": {0.70: 65.85, 0.85: 60.89, 0.90: 57.02, 0.95: 48.39, 0.98: 34.60, 0.998: 3.04},
}
Arms = Mapping[str, list[Case]]


def difference(arm: str, sparsity: float, of: str = "cifar100") -> str:
    """Return the name of the gain of an arm."""
    return f"{WORDS[of]} at {sparsity:g}: {ARMS[arm]} less β = 0"


def of_arm(arm: str, sparsity: float, of: str = "cifar100") -> str:
    """Return the name of the accuracy of an arm."""
    return f"{WORDS[of]} at {sparsity:g}: {ARMS[arm]}, test accuracy, %"


def _expected() -> dict[str, float | str]:
    """Return what the paper prints: differences in points, then all accuracies."""
    found: dict[str, float | str] = {
        difference(arm, sparsity): round(PAPER[arm][sparsity] - PAPER["base"][sparsity], 2)
        for sparsity in (CHOICE, *SPARSITIES) for arm in ("stage", "augmented")
    }  # fmt: skip
    found[difference("stage", CHOICE, "cifar10")] = "0.87 (the best of 12 values of β on test; their mean is 0.23)"
    return found | {of_arm(arm, sparsity): value for arm, own in PAPER.items() for sparsity, value in own.items()}


@claim(
    "sparsity/random-sparse-training",
    figure="Table 5",
    sentence="Table 5 shows that AugCKA-SR is effective in Random Sparse Training and outperforms original CKA-SR in "
    "most sparsity levels",
    expected=_expected(),
    control="samples in random order in place of the layers compared; and weight decay given as many trials",
    criterion="ResNet-20 on CIFAR-100, masked at random by ERK ratios. Differences of test accuracy in points, in "
    f"pairs of one seed with the same masks, start and batches, {BY_T} over the seeds. β, and the weight decay of the "
    f"control, are each the best of {len(STRENGTHS['stage'])} values on held-out training images at 0.95, and taken at "
    "every sparsity; random targets have the β of CKA-SR. Seven parts: CKA-SR and AugCKA-SR are above β = 0 at 0.90, "
    "0.95 and 0.98, and CKA-SR on CIFAR-10 at 0.95; at 0.95 a part also needs more than random targets and, on "
    "CIFAR-100, than weight decay. Sparsities of one seed decide nothing.",
    measures=["cka"],
)
def random_sparse_training(lab: Lab) -> Finding:
    """Test accuracies with and without the term, by sparsity, with a search on held-out images before them."""
    count, hundred, ten = SEEDS[lab.scale], Case(of="cifar100", sparsity=CHOICE), Case(of="cifar10", sparsity=CHOICE)
    choices = chosen(
        lab, {arm: (hundred, arm) for arm in ("stage", "augmented", "decay")} | {"CIFAR-10, stage": (ten, "stage")}
    )
    arms = {sparsity: _arms(hundred._replace(sparsity=sparsity), choices, count) for sparsity in SPARSITIES}
    once = {sparsity: _arms(hundred._replace(sparsity=sparsity), choices, 1) for sparsity in OTHERS}
    tens = _arms(ten, {"stage": choices["CIFAR-10, stage"]}, count, ("base", "stage", "random"))
    found = measured(
        lab, [case for some in (*arms.values(), *once.values(), tens) for own in some.values() for case in own]
    )
    gained = {difference(arm, sparsity): gain(found, own[arm], own["base"])
              for sparsity, own in arms.items() for arm in own if arm in ("stage", "augmented")}  # fmt: skip
    gained[difference("stage", CHOICE, "cifar10")] = gain(found, tens["stage"], tens["base"])
    beyond = _beyond_controls(found, arms[CHOICE], tens)
    decided = [all_of(one.above(0), *(other.above(0) for other in beyond.get(name, {}).values()))
               for name, one in gained.items()]  # fmt: skip
    apart = {f"{name}, beyond {control}": one for name, own in beyond.items() for control, one in own.items()}
    accuracies = {of_arm(arm, own[0].sparsity, own[0].of): mean_of(found, own)
                  for some in (*arms.values(), *once.values(), tens) for arm, own in some.items()}  # fmt: skip
    return Finding(
        verdict(*decided),
        gained | apart | accuracies | _costs(found, arms[CHOICE], choices),
        {difference(arm, CHOICE): gain(found, arms[CHOICE][control], arms[CHOICE]["base"])
         for arm, control in (("stage", "random"), ("augmented", "decay"))}
        | {difference("stage", CHOICE, "cifar10"): gain(found, tens["random"], tens["base"])},
        f"{noise_words(gained | apart)} {_note(lab, choices)}",
        {"Test accuracy on CIFAR-100, %": _curve(found, arms | once)},
        lab.seeds(count),
    )  # fmt: skip


def _arms(case: Case, choices: Mapping[str, Choice], count: int, wanted: tuple[str, ...] = ()) -> dict[str, list[Case]]:
    """Return the networks of each arm by seed; controls only at the sparsity at which strengths are chosen."""
    default = ("base", "stage", "augmented", *(("random", "decay") if case.sparsity == CHOICE else ()))
    strengths = {"base": 0.0, "random": choices["stage"].strength} | {arm: one.strength for arm, one in choices.items()}
    return {arm: over_seeds(case._replace(arm=arm, strength=strengths[arm]), count) for arm in wanted or default}


def _beyond_controls(found: Mapping[Case, Found], hundred: Arms, ten: Arms) -> dict[str, dict[str, Measured]]:
    """Return by the name of a gain how much the arm is above each control."""
    return {
        difference("stage", CHOICE): {
            ARMS[one]: gain(found, hundred["stage"], hundred[one]) for one in ("random", "decay")
        },
        difference("augmented", CHOICE): {
            ARMS[one]: gain(found, hundred["augmented"], hundred[one]) for one in ("random", "decay")
        },
        difference("stage", CHOICE, "cifar10"): {ARMS["random"]: gain(found, ten["stage"], ten["random"])},
    }


def _costs(found: Mapping[Case, Found], arms: Arms, choices: Mapping[str, Choice]) -> dict[str, Measured]:
    """Return what the term and the search cost."""
    seconds = {f"seconds of a training: {ARMS[arm]}": mean_of(found, own, "seconds") for arm, own in arms.items()}
    trials = sum(len(one.accuracies) for one in choices.values())
    return seconds | {
        "networks trained to choose strengths": Measured(trials),
        "networks trained beside those": Measured(len(found)),
        "seconds of training to choose strengths": Measured(sum(one.seconds for one in choices.values())),
    }


def _note(lab: Lab, choices: Mapping[str, Choice]) -> str:
    picked = "; ".join(f"{arm} {one.words}" for arm, one in choices.items())
    return (
        f"{setting_words(lab, 'resnet20-sparse')} Strengths, with accuracies in % on held-out images: {picked}. In the "
        "table of controls AugCKA-SR stands beside weight decay."
    )


def _curve(found: Mapping[Case, Found], arms: Mapping[float, Arms]) -> dict[str, Any]:
    order = sorted(arms)
    curve: dict[str, Any] = {"sparsity": order}
    for arm in ("base", "stage", "augmented"):
        curve |= line(ARMS[arm], [values(found, arms[sparsity][arm]) for sparsity in order])
    return curve
