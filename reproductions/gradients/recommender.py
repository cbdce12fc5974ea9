"""The recommender, judged: do scores that train nothing rank pretrained networks as fine-tuning does?

Claim: gradients/recommender. The controls are the same scores with shuffled labels, and random ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import kendalltau, weightedtau

from netkin.applications.transfer.evidence import Evidence, evidence_of
from netkin.applications.transfer.scores import SCORES, TransferScore
from netkin.errors import NoValue
from reproductions.claims import Decision, Finding, Measured, all_of, claim, verdict
from reproductions.gradients.candidates import (
    BATCH,
    SETTINGS,
    SOURCES,
    TARGETS,
    candidate,
    candidates,
    given,
    images_of,
    probe_accuracy,
    runs,
    train_run,
    tuned_accuracy,
)
from reproductions.laboratory import Lab
from reproductions.recipes import length_words

OURS = ("kernel_ridge_hadamard", "kernel_ridge", "kernel_ridge_features", "mean_embedding_norm", "adaptation_score")
LEADING = OURS[0]
BOTH_WAYS = OURS[3:]  # a high value is read as similar, and as a need to adapt
SHORT_PROBE = "linear_probe on 1% of the data"
NAIVE = ("source accuracy", "parameters")
RANDOM = "random ranks"
TRUTHS = {"tuned": "fine-tuning", "probe": "a linear probe"}
LEAST = 50  # images that the short probe gets
RESAMPLES, RESAMPLES_WEIGHTED, DRAWS = 2_000, 200, 500
Array = np.ndarray
Results = dict[str, dict[str, Any]]  # by candidate


@dataclass(frozen=True)
class Agreement:
    """How far ranks agree with those of a truth, the mean over targets: a number and its bootstrap replicates."""

    value: float
    replicates: Array

    @property
    def error(self) -> float:
        return float(np.nanstd(self.replicates, ddof=1))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% bootstrap interval."""
        low, high = np.nanquantile(self.replicates, [0.025, 0.975])
        return float(low), float(high)

    def minus(self, other: Agreement) -> Agreement:
        """Return the difference, resample by resample."""
        return Agreement(self.value - other.value, self.replicates - other.replicates)

    def turned(self) -> Agreement:
        """Return the agreement of the opposite ranks."""
        return Agreement(-self.value, -self.replicates)

    @property
    def above_zero(self) -> Decision:
        """Whether the interval lies above 0; None if it holds 0."""
        low, high = self.interval
        return True if low > 0 else False if high < 0 else None


@claim(
    "gradients/recommender",
    figure="Sec. 6",
    sentence="For future work we would like to explore using this method as a recommender system given large "
    "collections of pre-trained models and query datasets.",
    expected={LEADING: "not measured"},
    control="the same scores with shuffled labels",
    criterion="Kendall's τ between a score and the accuracy after fine-tuning on few images, over networks that never "
    "saw the target, averaged over targets. Two parts: τ of kernel ridge regression on the paper's sketched kernel is "
    "above 0, and above that with shuffled labels; and it is above that of every score of others. Each by the 95% "
    "bootstrap interval over trainings; holds if both, in part if one.",
    measures=[],
    training=lambda scale, _: f"{length_words(SETTINGS[scale].recipe)}, then {length_words(SETTINGS[scale].tuning)}",
)
def recommender(lab: Lab) -> Finding:
    """Every score of every candidate for every target, beside what a probe and fine-tuning reach."""
    for name in dict.fromkeys(name.partition("/")[0] for name in (*SOURCES, *TARGETS)):
        lab.images_of(name)  # so that the record names them, whichever process reads them
    lab.over(train_run, runs(lab))
    tasks = [[name, target] for target in TARGETS for name in candidates(lab, target)]
    found: dict[str, Results] = {target: {} for target in TARGETS}
    for (name, target), result in zip(tasks, lab.over(judged, tasks, keep=True), strict=True):
        found[target][name] = result
    draws = resampled(runs(lab), RESAMPLES)
    tuned, probed, control = (
        {name: agreement(found, draws, name, truth, part) for name in names(found)}
        for truth, part in (("tuned", "scores"), ("probe", "scores"), ("tuned", "shuffled"))
    )
    count = len(runs(lab))
    return Finding(
        verdict(*_parts(tuned, control)),
        {name: Measured(one.value, one.error, count) for name, one in tuned.items()} | {RANDOM: _random(found, count)},
        {name: Measured(one.value, one.error, count) for name, one in control.items() if name in SCORES},
        note=_note(lab, found, tuned),
        curves=_curves(found, tuned, probed, draws),
        seeds=(0,),
    )


def judged(lab: Lab, task: Sequence[str]) -> dict[str, Any]:
    """Return the scores of a candidate for a target, with shuffled labels too, and the accuracies in the end."""
    name, target = task
    model, source_accuracy = candidate(lab, name)
    images, labels = given(lab, target, SETTINGS[lab.scale].examples)
    batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    evidence = evidence_of(model, batches, gradients=True, progress=False)
    share = max(len(images_of(lab, target).train_labels) // 100, LEAST)
    short = Evidence.of(evidence.features[:share], evidence.labels[:share])
    scores, seconds = _scored(evidence)
    scores |= {SHORT_PROBE: _value(SCORES["linear_probe"], short), NAIVE[0]: source_accuracy}
    scores[NAIVE[1]] = float(sum(weight.numel() for weight in model.parameters()))
    mixed = np.random.default_rng(0).permutation(evidence.labels)
    blind = Evidence.of(evidence.features, mixed, evidence.probabilities, evidence.gradients)
    return {
        "scores": scores,
        "shuffled": _scored(blind)[0],
        "seconds": seconds,
        "probe": probe_accuracy(lab, model, target),
        "tuned": tuned_accuracy(lab, model, target),
    }


def _scored(evidence: Evidence) -> tuple[dict[str, float | None], dict[str, float]]:
    """Return the values of all scores, and the seconds that each took."""
    values, seconds = dict[str, float | None](), dict[str, float]()
    for name, score in SCORES.items():
        started = time.perf_counter()
        values[name] = _value(score, evidence)
        seconds[name] = time.perf_counter() - started
    return values, seconds


def _value(score: TransferScore, evidence: Evidence) -> float | None:
    try:
        value = score.function(evidence)
    except NoValue:
        return None
    return value if np.isfinite(value) else None


# --- agreement of ranks -----------------------------------------------------------------------------------------------


def names(found: Mapping[str, Results]) -> list[str]:
    """Return the names of all scores."""
    return list(next(iter(next(iter(found.values())).values()))["scores"])


def columns(results: Results, name: str, truth: str, part: str) -> tuple[Array, Array]:
    """Return a score and the truth of all candidates; a candidate without a value comes last, as nothing speaks for it.

    What reads no labels, such as the naive ranks, is the same with shuffled labels.
    """
    values = [one[part].get(name, one["scores"][name]) for one in results.values()]
    return np.array([-np.inf if v is None else v for v in values]), np.array([one[truth] for one in results.values()])


def resampled(all_runs: Sequence[str], count: int) -> dict[str, Array]:
    """Return how often each training is drawn in each of `count` resamples; what comes of one stays together."""
    draws = np.random.default_rng(0).multinomial(len(all_runs), np.full(len(all_runs), 1 / len(all_runs)), count)
    return dict(zip(all_runs, draws.T, strict=True))


def agreement(
    found: Mapping[str, Results], draws: Mapping[str, Array], name: str, truth: str, part: str = "scores"
) -> Agreement:
    """Return Kendall's τ of a score with a truth within each target, averaged over the targets.

    Args:
        found: the results of all candidates by target.
        draws: the resamples of trainings.
        name: the score.
        truth: "tuned" or "probe".
        part: "scores", or "shuffled" for those with shuffled labels.
    """
    values, replicates = [], []
    for results in found.values():
        score, reached = columns(results, name, truth, part)
        weights = np.array([draws[one.rpartition("/")[0]] for one in results], dtype=float)
        values.append(tau(score, reached, np.ones((len(score), 1)))[0])
        replicates.append(tau(score, reached, weights))
    return Agreement(float(np.mean(values)), np.nanmean(replicates, axis=0))


def tau(first: Array, second: Array, weights: Array) -> Array:
    """Return Kendall's τ-b of two rankings, in which row i counts ``weights[i]`` times, for each column of weights.

    Copies of a row tie with each other in both rankings, and ties leave the count.
    """
    one, other = (np.sign(ranks[:, None] - ranks[None]) for ranks in map(_ranks, (first, second)))
    pairs = [np.einsum("ib,ij,jb->b", weights, matrix, weights) for matrix in (one * other, one**2, other**2)]
    with np.errstate(invalid="ignore", divide="ignore"):
        return pairs[0] / np.sqrt(pairs[1] * pairs[2])


def _ranks(values: Array) -> Array:
    """Return the places of values among each other, in which infinite ones can be subtracted."""
    return np.unique(values, return_inverse=True)[1].astype(float)


def weighted(found: Mapping[str, Results], draws: Mapping[str, Array], name: str, truth: str) -> Agreement:
    """Return the same of the weighted τ, in which the first places count most."""
    values, replicates = [], []
    for results in found.values():
        score, reached = columns(results, name, truth, "scores")
        values.append(_weighted_tau(score, reached))
        drawn = np.array([draws[one.rpartition("/")[0]] for one in results])[:, :RESAMPLES_WEIGHTED]
        rows = [np.repeat(np.arange(len(score)), counts) for counts in drawn.T]
        replicates.append([_weighted_tau(score[own], reached[own]) for own in rows])
    return Agreement(float(np.mean(values)), np.nanmean(replicates, axis=0))


def _weighted_tau(score: Array, reached: Array) -> float:
    return float(weightedtau(_ranks(score), _ranks(reached)).statistic) if len(np.unique(reached)) > 1 else np.nan


def _random(found: Mapping[str, Results], count: int) -> Measured:
    """Return what random ranks reach: the mean and the spread over draws."""
    draw, reached = np.random.default_rng(0), [[one["tuned"] for one in results.values()] for results in found.values()]
    taus = [np.mean([kendalltau(draw.random(len(own)), own).statistic for own in reached]) for _ in range(DRAWS)]
    return Measured(float(np.mean(taus)), float(np.std(taus, ddof=1)), count)


# --- what follows -----------------------------------------------------------------------------------------------------


def _parts(tuned: Mapping[str, Agreement], control: Mapping[str, Agreement]) -> list[Decision]:
    ours = tuned[LEADING]
    peers = [name for name in tuned if name not in (*OURS, *NAIVE)]
    works = all_of(ours.above_zero, ours.minus(control[LEADING]).above_zero)
    return [works, all_of(*(ours.minus(tuned[peer]).above_zero for peer in peers))]


def behind(tuned: Mapping[str, Agreement]) -> dict[str, Agreement]:
    """Return for each score of `nk.recommend` how far it is behind the best of them.

    Of those that the paper reads both ways the better way counts, a choice in hindsight that speaks for them.
    """
    own = {name: one for name, one in tuned.items() if name in SCORES}
    own |= {name: one.turned() for name, one in own.items() if name in BOTH_WAYS and one.value < 0}
    best = max(own.values(), key=lambda one: one.value)
    return {name: best.minus(one) for name, one in own.items()}


def default(lags: Mapping[str, tuple[float, float]], seconds: Mapping[str, float]) -> str:
    """Return the default score: the cheapest of those that are not clearly behind the best.

    `lags` are the 95% intervals of how far a score is behind. Scores that serve models without classes of their own go
    before others; cost is counted in forward passes, then in seconds.
    """
    level = [name for name, (low, _) in lags.items() if low <= 0]
    return min(level, key=lambda name: (SCORES[name].needs_head, SCORES[name].passes, seconds[name]))


def _seconds(found: Mapping[str, Results]) -> dict[str, float]:
    taken = [one["seconds"] for results in found.values() for one in results.values()]
    return {name: float(np.median([own[name] for own in taken])) for name in taken[0]}


def _note(lab: Lab, found: Mapping[str, Results], tuned: Mapping[str, Agreement]) -> str:
    lags, setting = behind(tuned), SETTINGS[lab.scale]
    chosen = default({name: one.interval for name, one in lags.items()}, _seconds(found))
    best = min(lags, key=lambda name: lags[name].value)
    level = sum(one.interval[0] <= 0 for one in lags.values())
    counts = [len(results) for results in found.values()]
    signs = "; ".join(
        f"{name} has τ = {tuned[name].value:.2f} ± {tuned[name].error:.2f} where a high value is read as similar "
        f"(section 5.4) and {-tuned[name].value:.2f} where it is read as a need to adapt (appendix F)"
        for name in BOTH_WAYS
    )
    return (
        f"{min(counts)} to {max(counts)} candidates for each of {len(found)} targets, from {len(runs(lab))} trainings "
        f"of {len({run.partition('/')[0] for run in runs(lab)})} architectures, each taken after "
        f"{' and '.join(map(str, setting.snapshots))} steps of {setting.recipe.batch} images; none saw an image of its "
        f"target. Scores read {setting.examples:,} labelled images; fine-tuning gets {setting.tuned_on:,}, the probe "
        f"all. The best score is {best}; {level} of {len(lags)} are not clearly behind it, and the cheapest of these, "
        f"which is the default of nk.recommend by its rule, is {chosen}. {signs}."
    )


def _curves(
    found: Mapping[str, Results],
    tuned: Mapping[str, Agreement],
    probed: Mapping[str, Agreement],
    draws: Mapping[str, Array],
) -> dict[str, dict[str, list[Any]]]:
    order = sorted(tuned, key=lambda name: -tuned[name].value)
    curves: dict[str, dict[str, list[Any]]] = {}
    for truth, plain in (("tuned", tuned), ("probe", probed)):
        lines: dict[str, list[Any]] = {"score": list(order)}
        for word, own in (("τ", plain), ("weighted τ", {name: weighted(found, draws, name, truth) for name in order})):
            lines |= {word: [own[name].value for name in order], f"{word} ±": [own[name].error for name in order]}
        curves[f"Agreement with {TRUTHS[truth]}, mean over targets"] = lines
    lags, seconds = behind(tuned), _seconds(found)
    known = [name for name in order if name in lags]
    curves["Behind the best score, and what a score costs"] = {
        "score": known,
        "behind": [lags[name].value for name in known],
        "low": [lags[name].interval[0] for name in known],
        "high": [lags[name].interval[1] for name in known],
        "forward passes": [SCORES[name].passes for name in known],
        "seconds": [seconds[name] for name in known],
    }
    shown = [LEADING, *(name for name in order if name != LEADING)][:6]
    curves["τ with fine-tuning on each target"] = {"target": list(found)} | {
        name: [_tau_on(results, name) for results in found.values()] for name in shown
    }
    curves["Accuracy of the best and the worst candidate"] = {"target": list(found)} | {
        f"{end}, {TRUTHS[truth]}": [float(of([one[truth] for one in results.values()])) for results in found.values()]
        for truth in TRUTHS
        for end, of in (("best", max), ("worst", min))
    }
    return curves


def _tau_on(results: Results, name: str) -> float:
    score, reached = columns(results, name, "tuned", "scores")
    return float(tau(score, reached, np.ones((len(score), 1)))[0])
