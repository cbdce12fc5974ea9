"""Nets that learnt ImageNet, asked about small images: to which must they adapt, and what do they predict untrained?

Claims: gradients/adaptation-score and gradients/kernel-ridge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from netkin.results.series import kendall
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.gradients.lite_nets import DECAY, FILES, KINDS, RATES, SETS, SETTINGS, Setting, Table, table
from reproductions.laboratory import Lab

HIGH = 1 / 3  # of the layers, the last
NEARLY_ALL = 0.9
RISES = 0.5  # Kendall's τ of accuracy and depth
LARGEST = "share of layers at which SVHN has the largest score"
ABOVE = "CIFAR-100's score less CIFAR-10's at high layers"
BELOW = "half of that less their distance at lower layers"
SIGN = "rank correlation of score and last-layer accuracy over the three sets"
AUTHORS = f"{LARGEST}, off the sketched kernel as the authors' code has it"
BY_T = "by the 95% interval of Student's t"


@claim(
    "gradients/adaptation-score",
    figure="Fig. 13",
    sentence="across models and layers, SVHN gives larger values than CIFAR10 and CIFAR100 do, and CIFAR100 gives "
    "similar values as CIFAR10 does until higher layers where CIFAR100 gives larger values.",
    expected={LARGEST: "all", ABOVE: "above 0", BELOW: "above 0"},
    control="untrained nets of the same form",
    criterion=f"The score of Eq. 48, log(‖μ‖ / (‖K‖/N²)) with the exact kernel, at every block and at the pooled "
    f"output of nets trained on ImageNet, on samples of equal size without common images. Three parts: SVHN has the "
    f"largest score of the three sets at more than {NEARLY_ALL:.0%} of the layers; in the last third of the layers "
    "CIFAR-100's score is above CIFAR-10's; half of that difference is more than the mean absolute difference in the "
    "other layers. Each also by more than in untrained nets. Values are means over the nets, one a sample; "
    f"{BY_T} over the samples.",
    papers_training="published networks of ImageNet",
    training=lambda *_: "published networks of ImageNet",
)
def adaptation_score(lab: Lab) -> Finding:
    """The score of each layer on each set, and the accuracy that the last layer reaches, to tell how to read it."""
    found, own = table(lab), SETTINGS[lab.scale]
    ours, control = (_orders(lab, found, trained) for trained in (True, False))
    parts = [all_of(Measured.over(ours[name]).above(mark), gains(ours[name], control[name]).above(0))
             for name, mark in ((LARGEST, NEARLY_ALL), (ABOVE, 0.0), (BELOW, 0.0))]  # fmt: skip
    curves = {
        f"Score by layer, {'' if trained else 'untrained '}{net}": _score_curve(found, net, trained)
        for trained in (True, False)
        for net in own.nets
    }
    measured = {name: Measured.over(values) for name, values in ours.items()}
    return Finding(
        verdict(*parts),
        measured,
        {name: Measured.over(values) for name, values in control.items()},
        f"{_reading_of(measured[SIGN])} {_setting_words(lab)} A sample has {own.train // own.seeds:,} images.",
        curves,
        lab.seeds(own.seeds),
    )


def _gain(kind: str) -> str:
    return f"{kind}: accuracy of ridge at the pooled output less that of one epoch"


def _gap(kind: str) -> str:
    return f"{kind}: accuracy of a converged last layer less that of ridge at its best layer"


def _trend(kind: str) -> str:
    return f"{kind}: Kendall's τ of accuracy and depth"


@claim(
    "gradients/kernel-ridge",
    figure="Fig. 14",
    sentence="One can observe a clear increasing trend of the performance as the chosen layer gets closer to the "
    "output layer … there is still a gap between the performance of finetuned models and that of our method … models "
    "after finetuning for only one epoch … our method provides better performance overall.",
    expected={_gain("hadamard"): "above 0", _gap("hadamard"): "above 0", _trend("hadamard"): "near 1"}
    | {_gain("features"): "above 0", _gap("features"): "above 0", _trend("features"): "near 1"},
    control="shuffled training labels for the two differences; for the trend untrained nets of the same form",
    criterion="Kernel ridge regression on the sketched kernel of a net trained on ImageNet, the ridge chosen on the "
    "sketch, at the end of each stage and at the pooled output. Three parts for each of `hadamard` and `features`: at "
    "the pooled output it is more accurate on test images than a new last layer after one epoch; at its best layer "
    "less accurate than a last layer trained to convergence; both by more than with shuffled labels; and Kendall's τ "
    f"of accuracy and depth is above {RISES} and above that of untrained nets. Values are means over nets and sets, "
    f"one a seed of sketch and order; {BY_T} over the seeds. `psi` is measured beside them.",
    papers_training="published networks of ImageNet; a last layer for one epoch, and until convergence",
    training=lambda scale, _: (
        "published networks of ImageNet; a last layer for one epoch of batches of "
        f"{SETTINGS[scale].batch}, and until convergence"
    ),
)
def kernel_ridge(lab: Lab) -> Finding:
    """Accuracies of ridge by layer, and of new last layers, trained for an epoch and to the end."""
    found, own = table(lab), SETTINGS[lab.scale]
    true, shuffled, untrained = (
        _differences([found[net, name, trained][key] for net in own.nets for name in SETS], own.seeds)
        for trained, key in ((True, "true"), (True, "shuffled"), (False, "true"))
    )
    control = shuffled | {_trend(kind): untrained[_trend(kind)] for kind in KINDS}
    marks = {_gain: 0.0, _gap: 0.0, _trend: RISES}
    parts = [
        all_of(Measured.over(true[words(kind)]).above(mark), gains(true[words(kind)], control[words(kind)]).above(0))
        for kind in ("hadamard", "features") for words, mark in marks.items()
    ]  # fmt: skip
    return Finding(
        verdict(*parts),
        {name: Measured.over(values) for name, values in true.items()} | _accuracies(found, own),
        {name: Measured.over(control[name]) for name in true},
        f"{_setting_words(lab)} One epoch is SGD with batches of {own.batch}, momentum 0.9 and the best of the rates "
        f"{', '.join(f'{rate:g}' for rate in RATES)} on a held-out fifth; the converged layer is found by L-BFGS; both "
        f"with weight decay {DECAY:g}, on {own.train:,} images of each set. Ridge has {own.buckets} buckets.",
        {f"Accuracy on {words}, mean over the nets": _accuracy_curve(found, own, name) for name, words in SETS.items()},
        lab.seeds(own.seeds),
    )


# --- what the claims read off -----------------------------------------------------------------------------------------


def _orders(lab: Lab, found: Table, trained: bool) -> dict[str, list[float]]:
    """Return by name what the scores say, one value a sample: the mean over the nets."""
    own = SETTINGS[lab.scale]
    made: dict[str, list[float]] = {name: [] for name in (LARGEST, ABOVE, BELOW, SIGN, AUTHORS)}
    for seed in range(own.seeds):
        values = [_order(found, net, trained, seed) for net in own.nets]
        for name, one in made.items():
            one.append(mean(value[name] for value in values))
    return made


def _order(found: Table, net: str, trained: bool, seed: int) -> dict[str, float]:
    ten, hundred, svhn = (found[net, name, trained]["scores"][seed] for name in SETS)
    high = len(svhn) - round(HIGH * len(svhn))
    differences = [one - other for one, other in zip(hundred, ten, strict=True)]
    above = mean(differences[high:])
    sketched = [found[net, name, trained]["sketched scores"][seed] for name in SETS]
    by_score = sorted(SETS, key=lambda name: mean(found[net, name, trained]["scores"][seed]))
    return {
        LARGEST: _share_largest(ten, hundred, svhn),
        ABOVE: above,
        BELOW: above / 2 - mean(map(abs, differences[:high])),
        SIGN: kendall([_beyond_chance(found[net, name, trained]["true"]["converged"], name) for name in by_score]),
        AUTHORS: _share_largest(*sketched),
    }


def _score_curve(found: Table, net: str, trained: bool) -> dict[str, Any]:
    """Return the scores by layer, a line for each set."""
    curve: dict[str, Any] = {"layer": [*found[net, "svhn", trained]["layers"][:-1], "pooled"]}
    for name, words in SETS.items():
        curve |= line(words, zip(*found[net, name, trained]["scores"], strict=True))
    return curve


def _share_largest(*by_layer: Iterable[float]) -> float:
    """Return the share of layers at which the last of several lists has the largest value."""
    return mean(values[-1] == max(values) for values in zip(*by_layer, strict=True))


def _beyond_chance(accuracy: float, name: str) -> float:
    """Return an accuracy with chance as 0 and certainty as 1, so that sets of more classes compare."""
    chance = 1 / (100 if name == "cifar100" else 10)
    return (accuracy - chance) / (1 - chance)


def _reading_of(correlation: Measured) -> str:
    """Return in words which of the paper's two readings of the score measured transfer supports."""
    against, along = correlation.below(0), correlation.above(0)
    if not against and not along:
        return "Whether a high score means similar (section 5.4) or must adapt (appendix F), transfer does not decide."
    goes, section = ("low", "appendix F's, must adapt") if against else ("high", "section 5.4's, similar")
    return (
        f"A high score goes with {goes} accuracy of a converged last layer, beyond chance: of the paper's two readings "
        f"transfer supports {section}."
    )


def _setting_words(lab: Lab) -> str:
    own = SETTINGS[lab.scale]
    nets, weights = ", ".join(net.capitalize() for net in own.nets), ", ".join(FILES[net] for net in own.nets)
    return (
        f"EfficientNet-{nets}, weights {weights}; images enlarged to {own.side} × {own.side}, pixels normalised as in "
        "training, (x - 127)/128. Gradients are those of the tempered loss of the 1,000 logits of ImageNet; features "
        "are pooled and their gradients summed."
    )


def _differences(cases: Sequence[Mapping[str, Any]], seeds: int) -> dict[str, list[float]]:
    """Return by name what the accuracies say, one value a seed: the mean over nets and sets."""
    found: dict[str, list[float]] = {}
    for kind in KINDS:
        own = [[(case, case["ridge"][kind][seed]) for case in cases] for seed in range(seeds)]
        found[_gain(kind)] = [mean(by[-1] - case["one epoch"][seed] for case, by in own[seed]) for seed in range(seeds)]
        found[_gap(kind)] = [mean(case["converged"] - max(by) for case, by in one) for one in own]
        found[_trend(kind)] = [mean(kendall(by) for _, by in one) for one in own]
    return found


def _accuracies(found: Table, own: Setting) -> dict[str, Measured]:
    """Return the accuracies on each set over the seeds, the mean over the nets."""
    made = {}
    for name, words in SETS.items():
        cases = [found[net, name, True]["true"] for net in own.nets]
        made[f"{words}: converged"] = Measured(mean(case["converged"] for case in cases))
        by_name = {"one epoch": [case["one epoch"] for case in cases]}
        by_name |= {f"ridge, {kind}": [[by[-1] for by in case["ridge"][kind]] for case in cases] for kind in KINDS}
        made |= {f"{words}: {what}": Measured.over(map(mean, zip(*by, strict=True))) for what, by in by_name.items()}
    return made


def _accuracy_curve(found: Table, own: Setting, name: str) -> dict[str, Any]:
    """Return the accuracies by stage on a set, with those of new last layers as flat lines."""
    cases = [found[net, name, True]["true"] for net in own.nets]
    depth = len(found[own.nets[0], name, True]["depths"])
    curve: dict[str, Any] = {"layer": [*(f"stage {number}" for number in range(1, depth)), "pooled"]}
    untrained = [found[net, name, False]["true"] for net in own.nets]
    for words, kind, some in [*((kind, kind, cases) for kind in KINDS), ("hadamard, untrained", "hadamard", untrained)]:
        by_seed = [[case["ridge"][kind][seed] for case in some] for seed in range(own.seeds)]
        curve |= line(words, [[mean(by[place] for by in one) for one in by_seed] for place in range(depth)])
    curve["one epoch"] = [mean(mean(case["one epoch"]) for case in cases)] * depth
    curve["converged"] = [mean(case["converged"] for case in cases)] * depth
    return curve
