"""Whether a term that really makes layers less similar makes networks more accurate.

At the β that is best on held-out images the similarity of layers hardly moves. Here β is chosen by that similarity
alone, and it stands beside each accuracy.

Claims: sparsity/pretraining-at-lower-cka and sparsity/random-sparse-training-at-lower-cka.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproductions.claims import Finding, Measured, all_of, claim, line, verdict
from reproductions.laboratory import Lab
from reproductions.sparsity.nets import (
    BY_T,
    RELATIVE,
    SEARCH,
    SEEDS,
    STRENGTHS,
    Case,
    Found,
    chosen,
    gain,
    mean_of,
    measured_whole,
    noise_words,
    over_seeds,
    setting_words,
    values,
)
from reproductions.sparsity.sparse_training import ARMS, CHOICE, PAPER, SPARSITIES

FALL = 0.05  # of the similarity of layers
BETAS = {"stage": (1e-2, 3e-2, 1e-1, 3e-1, 1.0), "augmented": (1e-1, 3e-1, 1.0, 3.0, 10.0)}  # the latter of a mean
CHOSEN = (
    f"β is the smallest of {', '.join(f'{beta:g}' for beta in BETAS['stage'])} (for AugCKA-SR, whose term is a mean "
    f"over pairs, ten times as large) at which the mean `cka_debiased` of two layers of a stage is lower by {FALL:g} "
    "or more than with β = 0, in a network of another seed on held-out training images; if there is none, the largest. "
    "No accuracy chooses it."
)
NUMBERS = {"accuracy": "test accuracy, %", "similarity": "interlayer `cka_debiased`"}
GAIN, FELL, SMALL = (
    f"{words}CKA-SR less β = 0"
    for words in ("", "interlayer `cka_debiased`: ", f"weights below {RELATIVE:g} of a layer's r.m.s., %: ")
)
CONTROL = (
    "samples in random order in place of the layers compared, with the same β; and weight decay, the best of "
    f"{len(STRENGTHS['decay'])} values on held-out images"
)


def lowering(lab: Lab, case: Case, arm: str) -> tuple[float, str]:
    """Return the smallest β of an arm that makes layers less similar on held-out images, and in words what each did."""
    base = case._replace(seed=SEARCH, held_out=True)
    trials = {beta: base._replace(arm=arm, strength=beta) for beta in BETAS[arm]}
    found = measured_whole(lab, [base, *trials.values()])
    similarity = {beta: found[trial]["similarity"] for beta, trial in trials.items()}
    usual = found[base]["similarity"]
    enough = [beta for beta, value in similarity.items() if value <= usual - FALL]
    beta = enough[0] if enough else BETAS[arm][-1]
    listed = ", ".join(f"{one:g}: {value:.3f}" for one, value in similarity.items())
    return beta, f"{ARMS[arm]} {beta:g} (0: {usual:.3f}, {listed})"


def arms_of(lab: Lab, case: Case, strengths: Mapping[str, float], count: int) -> dict[str, list[Case]]:
    """Return the networks of each arm, by seed; "base" without a term beside those that have a strength."""
    return {arm: over_seeds(case._replace(arm=arm, strength=strengths.get(arm, 0.0)), count)
            for arm in ARMS if arm == "base" or arm in strengths}  # fmt: skip


def beside(found: Mapping[Case, Found], arms: Mapping[str, Sequence[Case]], where: str = "") -> dict[str, Measured]:
    """Return the accuracy of each arm with the similarity of its layers beside it."""
    return {
        f"{where}{ARMS[arm]}: {words}": mean_of(found, cases, name)
        for arm, cases in arms.items()
        for name, words in NUMBERS.items()
    }


@claim(
    "sparsity/pretraining-at-lower-cka",
    figure="Table 4",
    sentence="our CKA-SR increases both the sparsity (by making parameters more concentrated around 0) and the "
    "classification accuracy of ResNet18 and ResNet50 models",
    expected={GAIN: "0.71 (75.61 → 76.32)", FELL: "below 0", SMALL: "above 0 (Fig. 3)"},
    control=CONTROL,
    criterion=f"The networks of sparsity/pretraining. {CHOSEN} Three parts: the similarity of layers on test images is "
    "lower than with β = 0 and than with random targets; the test accuracy is higher than with β = 0, than with random "
    f"targets and than with weight decay; and the share of weights below {RELATIVE:g} of their layer's r.m.s. is "
    "higher than with β = 0 and with random targets. In pairs of one seed with the same start and batches, "
    f"{BY_T} over the seeds.",
    measures=["cka", "cka_debiased"],
)
def pretraining_at_lower_cka(lab: Lab) -> Finding:
    """Accuracies and shares of small weights of dense networks whose layers are less similar."""
    case, count = Case("resnet18-pretrained", "cifar100", sparsity=0.0), SEEDS[lab.scale]
    beta, words = lowering(lab, case, "stage")
    decay = chosen(lab, {"decay": (case, "decay")})["decay"]
    arms = arms_of(lab, case, {"stage": beta, "random": beta, "decay": decay.strength}, count)
    found = measured_whole(lab, [one for cases in arms.values() for one in cases])
    less = {
        (what, arm): gain(found, arms["stage"], arms[arm], what)
        for what in ("similarity", "accuracy", "relatively small")
        for arm in ("base", "random", "decay")
    }
    parts = (
        all_of(less["similarity", "base"].below(0), less["similarity", "random"].below(0)),
        all_of(*(less["accuracy", arm].above(0) for arm in ("base", "random", "decay"))),
        all_of(less["relatively small", "base"].above(0), less["relatively small", "random"].above(0)),
    )
    names = {"accuracy": GAIN, "similarity": FELL, "relatively small": SMALL}
    gained = {names[what].replace("β = 0", ARMS[arm]): one for (what, arm), one in less.items()}
    return Finding(
        verdict(*parts),
        gained | beside(found, arms) | {"β": Measured(beta)},
        {name: gain(found, arms["random"], arms["base"], what) for what, name in names.items()},
        f"{noise_words(gained)} {setting_words(lab, case.net)} β, with the similarity of layers on held-out images: "
        f"{words}. Weight decay {decay.words}.",
        seeds=lab.seeds(count),
    )


def difference(arm: str, sparsity: float, what: str = "accuracy") -> str:
    """Return the name of what an arm changes at a sparsity."""
    return f"{'' if what == 'accuracy' else f'{NUMBERS[what]}, '}{sparsity:g}: {ARMS[arm]} less β = 0"


@claim(
    "sparsity/random-sparse-training-at-lower-cka",
    figure="Table 5",
    sentence="Table 5 shows that AugCKA-SR is effective in Random Sparse Training and outperforms original CKA-SR in "
    "most sparsity levels",
    expected={
        difference(arm, sparsity): round(PAPER[arm][sparsity] - PAPER["base"][sparsity], 2)
        for sparsity in (CHOICE, *SPARSITIES)
        for arm in BETAS
    },
    control=CONTROL,
    criterion="ResNet-20 on CIFAR-100, masked at random by ERK ratios, as in sparsity/random-sparse-training. "
    f"{CHOSEN} That is done at 0.95, and the β taken at every sparsity. Six parts, CKA-SR and AugCKA-SR at 0.90, 0.95 "
    "and 0.98: the similarity of layers on test images is lower than with β = 0, and the test accuracy is higher; at "
    "0.95 the accuracy is also higher than with random targets of CKA-SR's β, and than with weight decay. In pairs of "
    f"one seed with the same masks, start and batches, {BY_T} over the seeds.",
    measures=["cka", "cka_debiased"],
)
def random_sparse_training_at_lower_cka(lab: Lab) -> Finding:
    """Accuracies of networks sparse from the start whose layers are less similar, by sparsity."""
    case, count = Case(of="cifar100", sparsity=CHOICE), SEEDS[lab.scale]
    betas, words = zip(*(lowering(lab, case, arm) for arm in BETAS), strict=True)
    decay = chosen(lab, {"decay": (case, "decay")})["decay"]
    strengths = dict(zip(BETAS, betas, strict=True))
    controls = {"random": strengths["stage"], "decay": decay.strength}
    by_sparsity = {
        sparsity: arms_of(
            lab, case._replace(sparsity=sparsity), strengths | (controls if sparsity == CHOICE else {}), count
        )
        for sparsity in SPARSITIES
    }
    found = measured_whole(lab, [one for arms in by_sparsity.values() for cases in arms.values() for one in cases])
    gained, decided = dict[str, Measured](), []
    for sparsity, arms in by_sparsity.items():
        for arm in BETAS:
            name = difference(arm, sparsity)
            gained[name] = gain(found, arms[arm], arms["base"])
            fell = gained[difference(arm, sparsity, "similarity")] = gain(found, arms[arm], arms["base"], "similarity")
            past = {f"{name}, beyond {ARMS[one]}": gain(found, arms[arm], arms[one]) for one in controls if one in arms}
            gained |= past
            decided.append(all_of(fell.below(0), gained[name].above(0), *(one.above(0) for one in past.values())))
    middle, accuracies = by_sparsity[CHOICE], dict[str, Measured]()
    for sparsity, arms in by_sparsity.items():
        accuracies |= beside(found, arms, f"{sparsity:g}: ")
    return Finding(
        verdict(*decided),
        gained
        | accuracies
        | {f"β of {ARMS[arm]}": Measured(beta) for arm, beta in strengths.items()},
        {
            difference(arm, CHOICE, what): gain(found, middle["random"], middle["base"], what)
            for arm in BETAS
            for what in NUMBERS
        },
        f"{noise_words(gained)} {setting_words(lab, case.net)} β, with the similarity of layers on held-out images: "
        f"{'; '.join(words)}. Weight decay {decay.words}.",
        {
            title: {"sparsity": list(SPARSITIES)}
            | {key: points for arm in ("base", *BETAS) for key, points in
               line(ARMS[arm], [values(found, by_sparsity[one][arm], what) for one in SPARSITIES]).items()}
            for what, title in NUMBERS.items()
        },
        lab.seeds(count),
    )  # fmt: skip
