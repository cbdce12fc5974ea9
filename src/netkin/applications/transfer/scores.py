"""Transfer scores: how well a pretrained model suits labelled data, from one forward pass and without training it.

Each is a function of the model's outputs for the data: the features before its last layer, its probabilities over the
classes that it was trained on, and the labels of the data. A higher score predicts a better transfer.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.experiment import DECLARED, ExperimentOptions
from netkin.applications.transfer.evidence import NO_JOB, Array, Evidence, evidence_of
from netkin.applications.transfer.ridge import fitted
from netkin.comparing.spec import takes_options
from netkin.errors import NoValue, UnknownName, did_you_mean, outside
from netkin.results.quantity import Quantity
from netkin.sources.names import by_name
from netkin.statistics.collector import hashes
from netkin.statistics.kernel_pairs import KERNELS
from netkin.statistics.outer_products import LayerEmbeddings, MeanEmbedding
from netkin.statistics.rows import RowsSide
from netkin.statistics.sketches import BucketSums, LayerSketches, SketchSettings, sketched_part

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT = "h_score_regularised"  # of `recommend`: see the table in docs/recommend.md
BESIDE = "linear_probe"  # shown beside it: the best in that table, and it follows the labels, not the models
# Kendall's τ of the order by a score, the best first, with the order after fine-tuning, and its standard error: the
# means over targets of the claim gradients/recommender, at gpu scale
RELIABILITY = {
    "leep": (0.59, 0.08), "nce": (0.39, 0.09), "h_score": (0.50, 0.08), "h_score_regularised": (0.70, 0.05),
    "logme": (0.66, 0.07), "transrate": (0.49, 0.09), "gbc": (0.25, 0.14), "knn": (0.59, 0.07),
    "linear_probe": (0.72, 0.05), "kernel_ridge_features": (0.62, 0.05), "kernel_ridge_hadamard": (0.35, 0.08),
    "kernel_ridge": (0.42, 0.08), "mean_embedding_norm": (0.24, 0.10), "adaptation_score": (0.49, 0.06),
}  # fmt: skip
PAPER = "Tang et al. (2020), arXiv:2003.11498"
FEEDS = ("activations", "gradients")
BUCKETS = 512  # of sketched kernels
NEIGHBOURS = 5
GBC_WIDTH = 64  # principal directions, as its paper has it
FOLDS = 0x666F6C64  # salt of the hash that gives an example its fold
STEPS = 100  # of LogME's fixed point at most


@dataclass(frozen=True)
class TransferScore:
    """A transfer score: what it is, the function of evidence that gives it, and what it costs.

    `passes` is its cost in forward passes over the examples, a backward pass counted as two. One that `needs_head`
    has no value for a model without classes of its own.
    """

    quantity: Quantity
    function: Callable[[Evidence], float]
    passes: int = 1
    needs_head: bool = False

    @property
    def name(self) -> str:
        return self.quantity.id

    @property
    def needs_gradients(self) -> bool:
        return self.passes > 1

    def value(self, evidence: Evidence) -> float:
        """Return the score as a finite number; where it has none, the reason is raised."""
        try:
            with np.errstate(all="ignore"):
                value = float(self.function(evidence))
        except np.linalg.LinAlgError as fault:
            raise NoValue(f"the features have no decomposition: {fault}.") from fault
        if not math.isfinite(value):
            raise NoValue(f"the score comes out as {value}; more examples of each class may give it a value.")
        return value


SCORES: dict[str, TransferScore] = {}
Scoring = Callable[[Evidence], float]


def score(
    reference: str,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    passes: int = 1,
    higher_is_better: bool = True,
    needs_head: bool = False,
    name: str = "",
) -> Callable[[Scoring], Scoring]:
    """Register a transfer score.

    Args:
        reference: where it comes from.
        bounds: between which numbers it lies.
        passes: its cost in forward passes, a backward pass counted as two; with more than one it reads gradients.
        higher_is_better: whether a higher score predicts better transfer.
        needs_head: whether it reads the model's own classes.
        name: what it is called, where that is not the function's name.
    """

    def register(function: Scoring) -> Scoring:
        first = inspect.cleandoc(function.__doc__ or "").partition("\n")[0]
        summary = first.removeprefix("Return ").replace("``", "").rstrip(".")
        quantity = Quantity(
            id=name or function.__name__, kind="score", higher_is_closer=higher_is_better, bounds=bounds,
            convention=f"{summary}; {reference}", reference=reference,
        )  # fmt: skip
        SCORES[quantity.id] = TransferScore(quantity, function, passes, needs_head or passes > 1)
        return function

    return register


@by_name(models="model", data="data")
@takes_options(f"{NO_JOB} seed", DECLARED)
def transfer_scores(
    model: nn.Module,
    data: Any,
    scores: Iterable[str] | None = None,
    *,
    layer: str | None = None,
    **options: Unpack[ExperimentOptions],
) -> dict[str, float]:
    """Return how well a pretrained model suits labelled data, by each score, from one forward pass over them.

    Scores that read the model's own classes are left out where it has none, unless they are requested. Those that read
    gradients take a backward pass too, and are there when they are requested. A score that has no value on these data
    is left out with a warning that says why; if it was requested, the reason is raised.

    Args:
        model: the model, which is left as it was.
        data: a loader, or an iterable of batches of (inputs, labels).
        scores: the names of scores, by default all in `SCORES` that read no gradients.
        layer: the layer whose outputs are the features, by default the last one before the model's output.
        examples: how many examples to read; None for all.
    """
    named = [name for name, one in SCORES.items() if not one.needs_gradients] if scores is None else scores
    wanted, found = [find_score(name) for name in named], {}
    evidence = evidence_of(model, data, layer, gradients=any(one.needs_gradients for one in wanted), **options)
    if scores is None and evidence.probabilities is None:
        wanted = [one for one in wanted if not one.needs_head]
    for one in wanted:
        try:
            found[one.name] = one.value(evidence)
        except NoValue as reason:
            if scores is not None:
                raise NoValue(f"{one.name!r} has no value: {reason}") from reason
            warnings.warn(f"{one.name!r} is left out, since it has no value: {reason}", stacklevel=outside())
    return found


def find_score(name: str) -> TransferScore:
    """Return the score of that name."""
    if name not in SCORES:
        raise UnknownName(
            f"no transfer score named {name!r}{did_you_mean(name, SCORES) or ';'} there are {', '.join(SCORES)}."
        )
    return SCORES[name]


@score("Nguyen et al. (2020), arXiv:2002.12462", (-math.inf, 0), needs_head=True)
def leep(evidence: Evidence) -> float:
    """Return the mean log-likelihood of the labels, predicted from the model's own classes.

    With P(y, z) the mean of the probability of the class z over the examples of the label y, an example's label has
    the likelihood ``Σ_z P(y | z) p(z | x)``.
    """
    joint = evidence.one_hot.T @ evidence.source / len(evidence.labels)
    given = joint / np.maximum(joint.sum(0), np.finfo(float).tiny)
    likelihood = (evidence.source * given[evidence.labels]).sum(1)
    return float(np.log(likelihood).mean())


@score("Tran et al. (2019), arXiv:1908.08142", (-math.inf, 0), needs_head=True)
def nce(evidence: Evidence) -> float:
    """Return minus the entropy of the labels, given the class that the model names: ``-H(Y | Z)`` in nats."""
    named = np.eye(evidence.source.shape[1])[evidence.source.argmax(1)]
    joint = evidence.one_hot.T @ named / len(named)
    given = joint / np.maximum(joint.sum(0), np.finfo(float).tiny)
    return float((joint * np.log(np.where(given > 0, given, 1))).sum())


@score("Bao et al. (2019), arXiv:2212.10082", (0, math.inf))
def h_score(evidence: Evidence) -> float:
    """Return ``tr(cov(f)⁺ cov(E[f | y]))``, the share of the features' whitened variance that the labels explain.

    Directions in which the features vary by no more than rounding are left out, by the rule that CCA uses.
    """
    side = RowsSide(torch.from_numpy(evidence.features), "the layer of features", resolution=evidence.resolution)
    whitened, labels = side.whitened.numpy(), evidence.one_hot
    return float(((labels.T @ whitened) ** 2 / labels.sum(0)[:, None]).sum())


@score("Ibrahim et al. (2021), arXiv:2110.06893", (0, math.inf))
def h_score_regularised(evidence: Evidence) -> float:
    """Return the H-score with covariances shrunk by the rule of Ledoit and Wolf, for few examples or many features."""
    centred, means = _about_mean(evidence)
    n, d = centred.shape
    covariance = centred.T @ centred / n
    mean = np.trace(covariance) / d
    spread = ((covariance - mean * np.eye(d)) ** 2).sum()
    noise = ((centred**2).sum(1) ** 2).mean() - (covariance**2).sum()
    share = 0.0 if spread == 0 else min(max(noise / n, 0.0), spread) / spread
    shrunk = (1 - share) * covariance + share * mean * np.eye(d)
    return float(np.trace(np.linalg.pinv(shrunk, hermitian=True) @ ((1 - share) * means.T @ means / n)))


@score("You et al. (2021), arXiv:2102.11005")
def logme(evidence: Evidence) -> float:
    """Return the logarithm of the evidence of a Bayesian linear model of each label, the mean over labels and examples.

    Precisions α of the weights and β of the noise are those of the greatest evidence, found by MacKay's fixed point.
    """
    U, S, _ = np.linalg.svd(evidence.features, full_matrices=False)
    return float(
        np.mean([_log_evidence(U.T @ y, float(y @ y), S, evidence.features.shape) for y in evidence.one_hot.T])
    )


def _log_evidence(turned: Array, size: float, S: Array, shape: tuple[int, ...]) -> float:
    """Return the greatest log evidence over the number of examples; `turned` is Uᵀy, `size` ‖y‖²."""
    n, d = shape
    alpha = beta = 1.0
    left = max(size - float(turned @ turned), 0.0)  # what no weights explain
    for _ in range(STEPS):
        gamma = float((beta * S**2 / (alpha + beta * S**2)).sum())
        weights = beta * S * turned / (alpha + beta * S**2)
        length, rest = float(weights @ weights), left + float(((turned - S * weights) ** 2).sum())
        before = (alpha, beta)
        alpha, beta = gamma / max(length, 1e-300), (n - gamma) / max(rest, 1e-300)
        if np.allclose((alpha, beta), before, rtol=1e-6):
            break
    weights = beta * S * turned / (alpha + beta * S**2)
    length, rest = float(weights @ weights), left + float(((turned - S * weights) ** 2).sum())
    logdet = float(np.log(alpha + beta * S**2).sum()) + (d - len(S)) * np.log(alpha)
    found = d * np.log(alpha) + n * np.log(beta) - n * np.log(2 * np.pi) - beta * rest - alpha * length - logdet
    return found / 2 / n


@score("Huang et al. (2022), arXiv:2106.09362")
def transrate(evidence: Evidence) -> float:
    """Return how many more nats it takes to code all features than those of one class, to a precision of 1e-4.

    All classes count alike, as in the paper's code: the rate of one class is the plain mean over classes, not a mean
    over examples, so that with classes of unequal sizes the small ones count as much as the large ones.
    """
    centred = evidence.features - evidence.features.mean(0)
    rates = [_coding_rate(centred[evidence.labels == one]) for one in range(evidence.classes)]
    return _coding_rate(centred) - float(np.mean(rates))


def _coding_rate(rows: Array, precision: float = 1e-4) -> float:
    values = np.linalg.svd(rows, compute_uv=False) ** 2
    return float(np.log1p(values / (len(rows) * precision)).sum() / 2)


@score("Pándy et al. (2022), arXiv:2111.12780", (-math.inf, 0))
def gbc(evidence: Evidence) -> float:
    """Return minus the overlap of the classes, seen as Gaussians with diagonal covariances in 64 principal directions.

    ``-Σ exp(-D)`` over ordered pairs of classes, D the Bhattacharyya distance.
    """
    if not np.ptp(evidence.features, axis=0).any():
        raise NoValue("all examples have the same features, and classes without any spread are no Gaussians.")
    centred = evidence.features - evidence.features.mean(0)
    _, _, V = np.linalg.svd(centred, full_matrices=False)
    rows = centred @ V[:GBC_WIDTH].T
    parts = [rows[evidence.labels == one] for one in range(evidence.classes)]
    means = np.stack([part.mean(0) for part in parts])
    floor = 1e-10 * rows.var(0).max()
    variances = np.stack([part.var(0) for part in parts]) + floor
    total = 0.0
    for i in range(len(parts)):
        between = (variances[i] + variances) / 2
        distance = ((means[i] - means) ** 2 / between).sum(1) / 8
        distance += np.log(between / np.sqrt(variances[i] * variances)).sum(1) / 2
        total += float(np.exp(-np.delete(distance, i)).sum())
    return -total


@score("leave-one-out accuracy of the five nearest neighbours", (0, 1))
def knn(evidence: Evidence) -> float:
    """Return how often the five nearest other examples, by the cosine of centred features, vote for the label."""
    centred = evidence.features - evidence.features.mean(0)
    unit = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), np.finfo(float).tiny)
    count, right = min(NEIGHBOURS, len(unit) - 1), 0
    for start in range(0, len(unit), 1024):
        cosine = unit[start : start + 1024] @ unit.T
        cosine[np.arange(len(cosine)), start + np.arange(len(cosine))] = -np.inf
        nearest = np.argpartition(-cosine, count - 1, axis=1)[:, :count]
        weights = np.take_along_axis(cosine, nearest, 1) + 1  # breaks ties by cosine
        votes = np.zeros((len(cosine), evidence.classes))
        np.add.at(votes, (np.arange(len(cosine))[:, None], evidence.labels[nearest]), 1 + 1e-6 * weights)
        right += int((votes.argmax(1) == evidence.labels[start : start + 1024]).sum())
    return right / len(unit)


@score("accuracy of a ridge classifier, five folds", (0, 1))
def linear_probe(evidence: Evidence) -> float:
    """Return the cross-validated accuracy of ridge regression onto the labels, at the best of its ridges.

    An example's fold follows from its number, so that it stays where it is when others are left out.
    """
    folds, right = folds_of(evidence), np.zeros(len(RIDGES))
    for fold in np.unique(folds):
        right += _ridge_right(evidence, folds != fold)
    return float(right.max() / len(folds))


def folds_of(evidence: Evidence, count: int = 5) -> Array:
    """Return the fold of each example, by its number; one example at least stays outside each fold."""
    folds = (hashes(FOLDS, evidence.numbers) % np.uint64(count)).astype(np.int64)
    return folds if len(np.unique(folds)) > 1 else np.arange(len(folds)) % count


RIDGES = 10.0 ** np.arange(-6, 3)


def _ridge_right(evidence: Evidence, inside: Array) -> Array:
    """Return for each ridge how many of the examples outside the fit are classified right."""
    rows, wanted = evidence.features[inside], evidence.one_hot[inside]
    mean, level = rows.mean(0), wanted.mean(0)
    rows, seen, aims = rows - mean, evidence.features[~inside] - mean, wanted - level
    # of the smaller product: five times as fast as the SVD, and at ridges from 1e-6 of the largest value as good
    if rows.shape[1] <= len(rows):
        values, vectors = np.linalg.eigh(rows.T @ rows)
        seen, turned = seen @ vectors, vectors.T @ (rows.T @ aims)
    else:
        values, vectors = np.linalg.eigh(rows @ rows.T)
        seen, turned = (seen @ rows.T) @ vectors, vectors.T @ aims
    values = values.clip(min=0)
    scale = float(values.max()) or 1.0  # of constant features no weight matters
    found = []
    for ridge in RIDGES:
        guess = seen @ (turned / (values + ridge * scale)[:, None]) + level
        found.append((guess.argmax(1) == evidence.labels[~inside]).sum())
    return np.array(found)


@score(f"{PAPER}, appendix G; five folds", (0, 1))
def kernel_ridge_features(evidence: Evidence) -> float:
    """Return the cross-validated accuracy of ridge regression from the features' kernel, sketched in 512 buckets."""
    return _kernel_ridge(evidence, "features")


@score(f"{PAPER}, appendix G; five folds", (0, 1), passes=3)
def kernel_ridge_hadamard(evidence: Evidence) -> float:
    """Return that accuracy from the product of the sketched kernels of features and gradients, as the paper has it."""
    return _kernel_ridge(evidence, "hadamard")


@score(f"{PAPER}, appendix G; five folds", (0, 1), passes=3, name="kernel_ridge")
def kernel_ridge_psi(evidence: Evidence) -> float:
    """Return that accuracy from the sketched kernel of g fᵀ, with features f and gradients g."""
    return _kernel_ridge(evidence, "psi")


def _kernel_ridge(evidence: Evidence, kernel: str) -> float:
    """Return how often the label is predicted from the sketch of the other folds."""
    if evidence.classes > BUCKETS:
        raise NoValue(f"the labels of {evidence.classes:,} classes do not fit {BUCKETS} buckets.")
    folds, right = folds_of(evidence), 0
    labels = torch.from_numpy(evidence.labels)
    read = torch.from_numpy(evidence.features), None if kernel == "features" else torch.from_numpy(evidence.pulls)
    rows = {part: sketched_part(part, *read, 0) for part in KERNELS[kernel]}
    settings = SketchSettings(BUCKETS, parts=(*KERNELS[kernel], "labels"))
    sums = {fold: _bucket_sums(evidence, read, settings, folds == fold) for fold in np.unique(folds)}
    for fold in sums:
        others = reduce(BucketSums.merged, (own for other, own in sums.items() if other != fold))
        chosen = torch.from_numpy(folds == fold)
        guess = fitted(others.parts, others.n, kernel).scores({part: own[chosen] for part, own in rows.items()})
        right += int((guess.argmax(1) == labels[chosen]).sum())
    return right / len(folds)


def _bucket_sums(
    evidence: Evidence, read: tuple[Tensor, Tensor | None], settings: SketchSettings, inside: Array
) -> BucketSums:
    """Return the sketch of some examples."""
    sketch, chosen = LayerSketches(["features"], settings), torch.from_numpy(inside)
    parts = {feed: {"features": own[chosen]} for feed, own in zip(FEEDS, read, strict=True) if own is not None}
    sketch.update(parts | {"outputs": {"features": (None, evidence.labels[inside])}}, evidence.numbers[inside])
    return sketch.sums("features")


@score(f"{PAPER}, section 5.3", (0, math.inf), passes=3, name="mean_embedding_norm")
def feature_embedding_norm(evidence: Evidence) -> float:
    """Return ``‖Σ g fᵀ‖ / n``, the norm of the mean of g fᵀ over features f and gradients g; it reads no labels."""
    return _embedding(evidence).norm


@score(f"{PAPER}, Eq. 48", passes=3, higher_is_better=False, name="adaptation_score")
def feature_adaptation(evidence: Evidence) -> float:
    """Return ``log(‖μ‖ / (‖K‖ / n²))``, μ the mean of g fᵀ and K the exact kernel K_f ∘ K_g; it reads no labels.

    A lower one promises more: the paper reads it both ways, and measured transfer decides (see the guide).
    """
    return _embedding(evidence).adaptation_score


def _embedding(evidence: Evidence) -> MeanEmbedding:
    made = LayerEmbeddings(["features"], sample=len(evidence.labels))
    rows, pulls = ({"features": torch.from_numpy(own)} for own in (evidence.features, evidence.pulls))
    made.update(rows, pulls, evidence.numbers)
    return made.embedding("features")


def _about_mean(evidence: Evidence) -> tuple[Array, Array]:
    """Return the centred features and for each example the mean of its class."""
    centred = evidence.features - evidence.features.mean(0)
    means = np.stack([part.mean(0) for part in evidence.by_class()]) - evidence.features.mean(0)
    return centred, means[evidence.labels]
