"""Whether a term for the similarity of layers makes dense networks more accurate, and more of their weights small.

Claim: sparsity/pretraining.
"""

from __future__ import annotations

from reproductions.claims import Finding, Measured, all_of, claim, verdict
from reproductions.laboratory import Lab
from reproductions.sparsity.nets import (
    BY_T,
    RELATIVE,
    STRENGTHS,
    Case,
    chosen,
    gain,
    mean_of,
    measured_whole,
    noise_words,
    over_seeds,
    setting_words,
)

SEEDS = {"cpu": 3, "gpu": 5}
ARMS = {"base": "β = 0", "stage": "CKA-SR", "random": "random targets", "decay": "weight decay"}
GAIN, SMALL = "CKA-SR less β = 0", f"weights below {RELATIVE:g} of a layer's r.m.s., %: CKA-SR less β = 0"


@claim(
    "sparsity/pretraining",
    figure="Table 4",
    sentence="our CKA-SR increases both the sparsity (by making parameters more concentrated around 0) and the "
    "classification accuracy of ResNet18 and ResNet50 models",
    expected={GAIN: "0.71 (75.61 → 76.32)", SMALL: "above 0 (Fig. 3)"},
    control="samples in random order in place of the layers compared; and weight decay given as many trials",
    criterion="A ResNet-18 of half the width, without masks, on CIFAR-100. β, and the weight decay of the control, are "
    f"each the best of {len(STRENGTHS['stage'])} values on held-out training images. Two parts: with CKA-SR the test "
    "accuracy is higher than with β = 0, than with random targets and than with that weight decay; and the share of "
    f"weights below {RELATIVE:g} of their layer's r.m.s. is higher than with β = 0 and with random targets. In pairs "
    f"of one seed with the same start and batches, {BY_T} over the seeds.",
    measures=["cka", "cka_debiased"],
)
def pretraining(lab: Lab) -> Finding:
    """Test accuracies and shares of small weights of dense networks."""
    case, count = Case("resnet18-pretrained", "cifar100", sparsity=0.0), SEEDS[lab.scale]
    choices = chosen(lab, {arm: (case, arm) for arm in ("stage", "decay")})
    strengths = {"base": 0.0, "random": choices["stage"].strength} | {arm: one.strength for arm, one in choices.items()}
    arms = {arm: over_seeds(case._replace(arm=arm, strength=strengths[arm]), count) for arm in ARMS}
    found = measured_whole(lab, [one for own in arms.values() for one in own])
    gained = {
        f"CKA-SR less {words}": gain(found, arms["stage"], arms[arm]) for arm, words in ARMS.items() if arm != "stage"
    }
    what = "relatively small"
    small, beyond = (gain(found, arms["stage"], arms[arm], what) for arm in ("base", "random"))
    parts = all_of(*(one.above(0) for one in gained.values())), all_of(small.above(0), beyond.above(0))
    gained |= {SMALL: small, SMALL.replace("β = 0", "random targets"): beyond}
    numbers = {
        "accuracy": "test accuracy, %",
        "similarity": "interlayer `cka_debiased`",
        "seconds": "seconds of a training",
    }
    numbers[what] = f"weights below {RELATIVE:g} of a layer's r.m.s., %"
    return Finding(
        verdict(*parts),
        gained
        | {f"{ARMS[arm]}: {words}": mean_of(found, own, name)
           for arm, own in arms.items() for name, words in numbers.items()}
        | {"networks trained to choose strengths": Measured(sum(len(one.accuracies) for one in choices.values()))},
        {GAIN: gain(found, arms["random"], arms["base"]), SMALL: gain(found, arms["random"], arms["base"], what)},
        f"{noise_words(gained)} {setting_words(lab, case.net)} Strengths, with accuracies in % on held-out images: "
        f"{'; '.join(f'{ARMS[arm]} {one.words}' for arm, one in choices.items())}.",
        seeds=lab.seeds(count),
    )  # fmt: skip
