"""Whether vision transformers that drop tokens are more accurate with terms for the similarity of layers and tokens.

Claims: sparsity/tokens and sparsity/tokens-apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from netkin.applications.sparsity import TokenLosses, sparsify_tokens, token_costs
from netkin.training import accuracy, train
from reproductions.claims import Finding, Measured, all_of, claim, gains, verdict
from reproductions.laboratory import Lab
from reproductions.sparsity.nets import (
    BY_T,
    STRENGTHS,
    Case,
    Choice,
    chosen,
    fresh,
    interlayer,
    noise_words,
    once,
    pictures,
    setting_words,
    term,
)

NET = "vit-tokens"
SEEDS = {"cpu": 3, "gpu": 5}
KEEPS = (0.7, 0.9)  # of the tokens, at each of three stages
FINE: dict[str, dict[str, Any]] = {  # how dropping is learnt after the training of all tokens
    "cpu": {"steps": 60, "lr": 5e-4, "warmup": 10},
    "gpu": {"epochs": None, "steps": 120, "lr": 2e-4, "warmup": 10},
}
WAYS: dict[str, dict[str, Any]] = {
    "predicted": {"predict": True, "similarity": False},
    "Eq. 13": {"predict": True, "similarity": True},
    "Eq. 13 as printed": {"predict": True, "similarity": "printed"},
    "random": {"predict": False, "similarity": False},
}
STARTS = {"base": "plain", "stage": "CKA-SR"}
TARGETS = {"random": "random targets"}  # the control of pretraining, by predicted tokens alone
Found = Mapping[tuple[str, float, int], dict[str, Any]]  # by arm, β and seed


def difference(keep: float) -> str:
    """Return the name of what both changes together add."""
    return f"keep {keep:g}: CKA-SR with Eq. 13 less plain without"


def both(keep: float) -> str:
    """Return the name of what the row of Table 1 adds, with Eq. 13 as it is printed."""
    return f"keep {keep:g}: CKA-SR with Eq. 13 as printed less plain without"


@claim(
    "sparsity/tokens",
    figure="Table 1",
    sentence="we calculate the CKA similarity between tokens produced by our CKA-SR model and introduce this "
    "similarity into the decision process of dynamic token sparsification … And the results are shown in Table 1.",
    expected={difference(0.7): "0.24 (71.11 → 71.35)", difference(0.9): "0.21 (72.31 → 72.52)"},
    control="tokens that are dropped at random, from the network pretrained with CKA-SR",
    criterion="A small vision transformer on CIFAR-10, trained with all tokens and then with dropped ones by the "
    "losses of the dynamic method, the network before as teacher. Each of three stages keeps 0.7 or 0.9 of the tokens. "
    f"β of the training with all tokens is the best of {len(STRENGTHS['stage'])} values on held-out training images. "
    "Two parts, one for each ratio: from a network trained with CKA-SR and with Eq. 13 as `docs/decisions/0014` reads "
    "it the test accuracy is higher than from a plain one without Eq. 13, and higher than with random dropping, in "
    f"pairs of one seed, {BY_T} over the seeds. What each of the two changes alone adds is measured beside it.",
    measures=["cka", "cka_debiased"],
    training=lambda scale, network: f"{network}, then {FINE[scale]['steps']} steps with dropped tokens",
)
def tokens(lab: Lab) -> Finding:
    """Test accuracies with dropped tokens, by pretraining, keep ratio and way of dropping."""
    seeds, choice, found = networks(lab, STARTS)
    gained, controls, decided = dict[str, Measured](), dict[str, Measured](), []
    for keep in KEEPS:
        plain = _by_seed(found, "base", _name(keep, "predicted"))
        ours, random = (_by_seed(found, "stage", _name(keep, way)) for way in ("Eq. 13", "random"))
        name, beyond = difference(keep), gains(ours, random)
        gained |= {name: gains(ours, plain), f"keep {keep:g}: CKA-SR with Eq. 13 less random dropping": beyond}
        gained |= _alone(found, keep, plain)
        controls[name] = gains(random, plain)
        decided.append(all_of(gained[name].above(0), beyond.above(0)))
    return Finding(
        verdict(*decided),
        gained | _numbers(found) | {"networks trained to choose β": Measured(len(choice.accuracies))},
        controls,
        f"{noise_words(gained)} {setting_words(lab, NET)} Dropping is learnt with {_fine_words(lab)}. β, with "
        f"accuracies in % on held-out images: {choice.words}.",
        seeds=seeds,
    )


@claim(
    "sparsity/tokens-apart",
    figure="Table 1",
    sentence="we calculate the CKA similarity between tokens produced by our CKA-SR model and introduce this "
    "similarity into the decision process of dynamic token sparsification … And the results are shown in Table 1.",
    expected={both(0.7): "0.24 (71.11 → 71.35)", both(0.9): "0.21 (72.31 → 72.52)"},
    control="for CKA-SR, pretraining with samples in random order in place of the layers compared; for Eq. 13, tokens "
    "that are dropped at random from the same network",
    criterion="The networks of sparsity/tokens, with what Table 1 adds taken apart. Six parts, three for each ratio of "
    "0.7 and 0.9. CKA-SR alone: from a network trained with it and without Eq. 13 the test accuracy is higher than "
    "from a plain one without Eq. 13, and than from one trained with random targets and the same β. Eq. 13 alone, as "
    "`docs/decisions/0014` reads it: from the plain network it is higher with Eq. 13 than without, and than with "
    "random dropping. Eq. 13 alone as it is printed, the probability less the sum of all CKA, cut off at 0 and 1 in "
    f"training: the same. In pairs of one seed, {BY_T} over the seeds. The row of Table 1, CKA-SR with Eq. 13 as "
    "printed, is measured beside them.",
    measures=["cka", "cka_debiased"],
    training=lambda scale, network: f"{network}, then {FINE[scale]['steps']} steps with dropped tokens",
)
def tokens_apart(lab: Lab) -> Finding:
    """What CKA-SR adds without Eq. 13, and what Eq. 13 in two readings adds without CKA-SR, by keep ratio."""
    seeds, choice, found = networks(lab, STARTS | TARGETS)
    gained, controls, decided = dict[str, Measured](), dict[str, Measured](), []
    for keep in KEEPS:
        values = {(arm, way): _by_seed(found, arm, _name(keep, way)) for arm in STARTS for way in WAYS}
        plain, random = values["base", "predicted"], values["base", "random"]
        targets = _by_seed(found, "random", _name(keep, "predicted"))
        changes = {
            f"keep {keep:g}: CKA-SR alone": (values["stage", "predicted"], targets),
            f"keep {keep:g}: Eq. 13 alone": (values["base", "Eq. 13"], random),
            f"keep {keep:g}: Eq. 13 as printed, alone": (values["base", "Eq. 13 as printed"], random),
        }
        gained[both(keep)] = gains(values["stage", "Eq. 13 as printed"], plain)
        controls[both(keep)] = gains(values["stage", "random"], plain)
        for name, (ours, control) in changes.items():
            gained[name], gained[f"{name}, less its control"] = gains(ours, plain), gains(ours, control)
            controls[name] = gains(control, plain)
            decided.append(all_of(gained[name].above(0), gained[f"{name}, less its control"].above(0)))
    return Finding(
        verdict(*decided),
        gained | _numbers(found) | _accuracies(found, TARGETS, ("all", *(_name(keep, "predicted") for keep in KEEPS))),
        controls,
        f"{noise_words(gained)} {setting_words(lab, NET)} Dropping is learnt with {_fine_words(lab)}. β, with "
        f"accuracies in % on held-out images: {choice.words}.",
        seeds=seeds,
    )


def networks(lab: Lab, arms: Iterable[str]) -> tuple[list[int], Choice, Found]:
    """Return the seeds, the β that was chosen, and what was found of the networks of each arm."""
    choice = chosen(lab, {"stage": (Case(NET, sparsity=0.0), "stage")})["stage"]
    seeds = list(lab.seeds(SEEDS[lab.scale]))
    tasks = [(arm, 0.0 if arm == "base" else choice.strength, seed) for arm in arms for seed in seeds]
    return seeds, choice, once(lab, accuracies, tasks)


def accuracies(lab: Lab, task: tuple[str, float, int]) -> dict[str, Any]:
    """Return test accuracies, in percent, of a network with all tokens and with each way of dropping, and costs."""
    arm, strength, seed = task
    case = Case(NET, sparsity=0.0, arm=arm, strength=strength, seed=seed)
    model, images, recipe = fresh(lab, case), pictures(lab, case.of), lab.recipe(NET).recipe
    with term(model, case) as hook:
        train(model, images.train, recipe, seed=seed, hooks=[hook], progress=False)
    model.eval()
    found: dict[str, Any] = {
        "all": _judged(model, images.test, seed),
        "similarity": interlayer(model, images.test_images[:200]),
    }
    found["costs"] = {"all": list(token_costs(model, images.test_images[:1]))}
    for keep in KEEPS:
        for way, settings in WAYS.items() if arm in STARTS else [("predicted", WAYS["predicted"])]:
            fewer = sparsify_tokens(model, keep, seed=seed, **settings).train()
            losses = TokenLosses(fewer, model)
            fine = recipe.but(**FINE[lab.scale])
            train(fewer, images.train, fine, seed=seed, hooks=[losses], progress=False)
            found[_name(keep, way)] = _judged(fewer, images.test, seed)
            found["costs"][_name(keep, way)] = list(token_costs(fewer, images.test_images[:1]))
    return found


def _judged(model: nn.Module, test: Any, seed: int) -> float:
    """Return the accuracy in percent; what is dropped at random follows from the seed."""
    devices = [test[0].device] if test[0].is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return 100 * accuracy(model, test, precision="auto")


def _name(keep: float, way: str) -> str:
    return f"keep {keep:g}, {way}"


def _by_seed(found: Found, arm: str, name: str) -> list[float]:
    return [own[name] for (one, _, _), own in found.items() if one == arm]


def _alone(found: Found, keep: float, plain: list[float]) -> dict[str, Measured]:
    """Return what pretraining alone adds, and what Eq. 13 alone."""
    pretrained, decided = (
        _by_seed(found, "stage", _name(keep, "predicted")),
        _by_seed(found, "base", _name(keep, "Eq. 13")),
    )
    return {
        f"keep {keep:g}: CKA-SR without Eq. 13 less plain without": gains(pretrained, plain),
        f"keep {keep:g}: plain with Eq. 13 less plain without": gains(decided, plain),
    }


def _numbers(found: Found) -> dict[str, Measured]:
    """Return all accuracies, the similarity of blocks, and what the networks cost."""
    made = _accuracies(found, STARTS, ("all", *(_name(keep, way) for keep in KEEPS for way in WAYS)))
    costs = next(iter(found.values()))["costs"]
    for name in ("all", *(_name(keep, "Eq. 13") for keep in KEEPS)):
        made[f"{name}: parameters"] = Measured(costs[name][0])
        made[f"{name}: multiply-adds an image"] = Measured(costs[name][1])
    return made


def _accuracies(found: Found, starts: Mapping[str, str], names: Iterable[str]) -> dict[str, Measured]:
    """Return the accuracies of networks of some arms by name, then the similarity of their blocks."""
    made = {f"{words}, {name}: test accuracy, %": Measured.over(_by_seed(found, arm, name))
            for arm, words in starts.items() for name in names}  # fmt: skip
    for arm, words in starts.items():
        made[f"{words}: interlayer `cka_debiased`"] = Measured.over(_by_seed(found, arm, "similarity"))
    return made


def _fine_words(lab: Lab) -> str:
    return ", ".join(f"{name}={value}" for name, value in FINE[lab.scale].items() if value is not None)
