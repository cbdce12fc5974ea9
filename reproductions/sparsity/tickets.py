"""Whether lottery tickets are better with a term for the similarity of layers.

Claim: sparsity/lottery-tickets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from netkin.applications.sparsity import lottery_tickets
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import RECIPES, Lab
from reproductions.sparsity.nets import (
    BY_T,
    PROBES,
    Case,
    chosen,
    fresh,
    interlayer,
    noise_words,
    pictures,
    setting_words,
    term,
)

NET = "resnet20-sparse"
SEEDS = {"cpu": 3, "gpu": 5}
ROUNDS = {"cpu": 2, "gpu": 3}  # of pruning, after the dense training
SHORTER: dict[str, dict[str, Any]] = {"cpu": {}, "gpu": {"steps": 1000}}  # than the trainings of other claims
SPARSITY = 0.95
ARMS = {"base": "β = 0", "stage": "CKA-SR", "random": "random targets"}
GAIN = f"accuracy of the ticket at {SPARSITY:g}: CKA-SR less β = 0"
DENSE = "accuracy of the dense network: CKA-SR less β = 0"
Found = Mapping[tuple[str, float, int], dict[str, Any]]  # by arm, β and seed


@claim(
    "sparsity/lottery-tickets",
    figure="Sec. 1.1",
    sentence="When independently trained, the initialized sub-network can achieve similar accuracy to the original "
    "network. On the basis of LTH, various sparse training methods have been proposed. … CKA-SR is proposed to "
    "explicitly reduce the interlayer similarity … a plug-and-play regularization in sparse training and pruning "
    "methods",
    expected={GAIN: "above 0 (the appendix gives no figure)", DENSE: "none given"},
    control="samples in random order in place of the layers compared, with the same β",
    criterion=f"ResNet-20 on CIFAR-10; iterative magnitude pruning to {SPARSITY:g} with rewinding to the start, the "
    "term in every round or in none. β is the best of four values on held-out training images in random sparse "
    "training at the same sparsity. One part: the test accuracy of the last ticket is higher with the term than with "
    "β = 0, and than with random targets, in pairs of one seed with the same start and batches, "
    f"{BY_T} over the seeds.",
    measures=["cka"],
    training=lambda scale, network: (
        f"{network}, then {ROUNDS[scale]} rounds of "
        f"{SHORTER[scale].get('steps', RECIPES[scale][NET].recipe.steps):,} steps"
    ),
)
def tickets(lab: Lab) -> Finding:
    """Test accuracies of the tickets of all rounds, with the term and without."""
    choice = chosen(lab, {"stage": (Case(), "stage")})["stage"]
    seeds = list(lab.seeds(SEEDS[lab.scale]))
    tasks = [(arm, 0.0 if arm == "base" else choice.strength, seed) for arm in ARMS for seed in seeds]
    found = dict(zip(tasks, lab.over(rounds_of, tasks, keep=True), strict=True))
    last = {arm: _of_round(found, arm, -1) for arm in ARMS}
    gained, beyond = gains(last["stage"], last["base"]), gains(last["stage"], last["random"])
    dense = gains(_of_round(found, "stage", 0), _of_round(found, "base", 0))
    shares = [row[0] for row in found[tasks[0]]["rounds"]]
    told = {GAIN: gained, DENSE: dense, "accuracy of the ticket: CKA-SR less random targets": beyond}
    measured = dict(told)
    measured |= {
        f"accuracy of the ticket at {SPARSITY:g}: {ARMS[arm]}": Measured.over(one) for arm, one in last.items()
    }
    measured |= {f"interlayer `cka_debiased` of the ticket: {ARMS[arm]}": _similarity(found, arm) for arm in ARMS}
    return Finding(
        verdict(all_of(gained.above(0), beyond.above(0))),
        measured | {"networks trained to choose β": Measured(len(choice.accuracies))},
        {GAIN: gains(last["random"], last["base"])},
        f"{noise_words(told)} {setting_words(lab, NET)} {_rounds_words(lab)} β, with accuracies in % on held-out "
        f"images: {choice.words}.",
        {"Test accuracy of tickets, %": _curve(found, shares)},
        seeds,
    )


def rounds_of(lab: Lab, task: tuple[str, float, int]) -> dict[str, Any]:
    """Return sparsity and test accuracy, in percent, of the networks of all rounds, and the last one's similarity."""
    arm, strength, seed = task
    case = Case(NET, sparsity=0.0, arm=arm, strength=strength, seed=seed)
    model, images = fresh(lab, case), pictures(lab, case.of)
    recipe = lab.recipe(NET).recipe.but(**SHORTER[lab.scale])
    options: dict[str, Any] = {"test": images.test, "seed": seed, "progress": False}
    with term(model, case) as hook:
        found = lottery_tickets(
            model, images.train, recipe, sparsity=SPARSITY, rounds=ROUNDS[lab.scale], hooks=[hook], **options
        )
    return {
        "rounds": [[one.sparsity, 100 * one.record["accuracy"]] for one in found.rounds],
        "similarity": interlayer(model, images.test_images[: PROBES[lab.scale]]),
    }


def _rounds_words(lab: Lab) -> str:
    shorter = "".join(f", of {count} {name} each" for name, count in SHORTER[lab.scale].items())
    return f"{ROUNDS[lab.scale]} rounds of pruning after the dense training{shorter}."


def _of_round(found: Found, arm: str, number: int) -> list[float]:
    """Return the accuracies of the networks of a round, by seed."""
    return [own["rounds"][number][1] for (one, _, _), own in found.items() if one == arm]


def _similarity(found: Found, arm: str) -> Measured:
    return Measured.over(own["similarity"] for (one, _, _), own in found.items() if one == arm)


def _curve(found: Found, shares: list[float]) -> dict[str, Any]:
    curve: dict[str, Any] = {"sparsity": shares}
    for arm, words in ARMS.items():
        curve |= line(words, [_of_round(found, arm, number) for number in range(len(shares))])
    return curve
