"""Evaluating stitches: task scores of the stitched network, and the similarity of activations at the joint.

Each score of an evaluation stands in a table, with what it means and cannot see.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from netkin.applications.stitching.joining import LayerOutput
from netkin.arrays import label_tensor, require_finite, summing_dtype
from netkin.errors import (
    ForwardError,
    InflatedWarning,
    InvalidValue,
    NetkinError,
    NoValue,
    ShapeError,
    outside,
    require_listed,
)
from netkin.identity import UnorderedDigest
from netkin.measures import cca_mean, cka, svcca
from netkin.measures.registry import LEADING
from netkin.representations import inference_mode_of, recording
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import attention_mask, batch_length, feed, labels_of, reported_batches
from netkin.representations.layers import layer_label
from netkin.representations.shapes import fitting_mask
from netkin.results.quantity import Quantity
from netkin.statistics import LayerMoments, Outputs

if TYPE_CHECKING:
    from netkin.applications.stitching.network import Stitched


@dataclass(frozen=True)
class Evaluation:
    """The scores of a stitch on some data; a value is None where the data have no labels, or it does not exist.

    `cross_entropy` is that of the stitched network to the second model's answers, `r2` how much of the second model's
    activations the transformed ones explain without refitting (so it may be negative); `cka`, `cca` and
    `svcca` compare the same activations, place by place.
    """

    examples: int
    accuracy: float | None
    accuracy_b: float | None
    cross_entropy: float
    agreement: float
    r2: float | None
    cka: float | None
    cca: float | None
    svcca: float | None
    classes: int | None = None
    digest: str = ""  # of the data, in whatever order

    @property
    def relative_accuracy(self) -> float | None:
        """The accuracy of the stitched network, as a share of the second model's."""
        if self.accuracy is None or not self.accuracy_b:
            return None
        return self.accuracy / self.accuracy_b

    @property
    def doubt(self) -> str | None:
        """A sentence if the second model itself predicts the labels no better than chance, else None."""
        if self.accuracy_b is None or self.classes is None or self.accuracy_b > 1 / self.classes:
            return None
        return (
            f"the second model itself gets {self.accuracy_b:.1%} of {self.examples:,} examples right, no more than "
            f"chance among {self.classes:,} classes; are these its labels?"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name."""
        numbers = asdict(self) | {"relative_accuracy": self.relative_accuracy}
        return {name: value for name, value in numbers.items() if name not in ("classes", "digest")}

    def __str__(self) -> str:
        values = {name: value for name, value in self.as_dict().items() if name != "examples"}
        written = (f"{name} {'–' if value is None else f'{value:.4f}'}" for name, value in values.items())
        return f"on {self.examples:,} examples: {', '.join(written)}"


def warn_of_doubt(judged: Evaluation) -> None:
    """Warn where an evaluation is easily misread."""
    if judged.doubt:
        warnings.warn(judged.doubt, InflatedWarning, stacklevel=outside())


class Answers:
    """Agreement of a stitched network's predictions with the labels and the second model, counted batch by batch."""

    def __init__(self) -> None:
        self.counts: Outputs | None = None
        self.examples, self.batches, self.labelled = 0, 0, False

    def update(self, answers: Any, own_answers: Any, batch: Any) -> None:
        """Add one batch; where each place of a sequence has scores, each valid place counts."""
        own = _logits(own_answers, f"the second model in batch {self.batches}")
        logits = _logits(answers, f"the stitched network in batch {self.batches}")
        labels = self._labels(batch, own.device)
        self.examples, self.batches = self.examples + len(logits), self.batches + 1
        logits, own, labels = _valid(logits.to(own.device), own, labels, attention_mask(batch))
        self.counts = self.counts or Outputs(own.shape[1])
        self.counts.update(logits, own, labels)

    def _labels(self, batch: Any, device: torch.device) -> Tensor | None:
        labels = labels_of(batch)
        if self.batches and self.labelled != (labels is not None):
            here, before = ("no labels", "some") if self.labelled else ("labels", "none")
            raise InvalidValue(
                f"batch {self.batches} of the data has {here}, and the batches before it have {before}; give every "
                "batch as `(inputs, labels)`, or all without labels."
            )
        self.labelled = labels is not None
        return None if labels is None else label_tensor(labels, device)

    @property
    def accuracies(self) -> tuple[float, float] | tuple[None, None]:
        """The accuracy of the stitched network and that of the second model, where there are labels."""
        if self.counts is None or not self.labelled:
            return None, None
        return self.counts.accuracy_a, self.counts.accuracy_b


class ActivationSimilarity:
    """How similar transformed activations and the second model's own are, position by position, summed batch by batch.

    `end` is the second model's layer, and `what` the transformed activations as text.
    """

    def __init__(self, end: LayerOutput, what: str = "what the stitch makes of the first model's layer"):
        self.end, self.what, self.batches = end, what, 0
        self.moments = LayerMoments([(["stitched"], ["b"])])
        self._distance = 0.0

    def update(self, transformed: Tensor, own: Tensor, mask: Any = None) -> None:
        """Add one batch; a `mask` marks the valid tokens of sequences."""
        ours, theirs = self.end.rows(transformed, mask), self.end.rows(own, mask)
        distance = float((ours - theirs).to(summing_dtype(ours.device)).square().sum())
        if not math.isfinite(distance):
            require_finite(ours, f"{self.what} in batch {self.batches}")
            require_finite(theirs, f"what the second model itself gives there in batch {self.batches}")
        self._distance += distance
        self.moments.update({"stitched": ours, "b": theirs})
        self.batches += 1

    def values(self) -> dict[str, float | None]:
        """Return `r2`, `cka`, `cca` and `svcca`; None where a layer does not vary.

        R² is not refitted: ``1 - ‖AM + b - B‖² / ‖B - mean‖²``, which may be negative.
        """
        pair = self.moments["stitched", "b"]
        return {
            "r2": value_if_any(lambda: 1 - self._distance / (float(pair.y.trace) / pair.y.scale**2)),
            "cka": value_if_any(lambda: cka(pair)),
            "cca": value_if_any(lambda: cca_mean(pair)),
            "svcca": value_if_any(lambda: svcca(pair)),
        }


def evaluate_all(
    networks: Sequence[Stitched], data: Any, examples: int | None = None, *, name: str = "a"
) -> list[Evaluation]:
    """Return what stitched networks of the same two models can do, in one pass: the models run once on each batch."""
    found = []
    for one in evaluate_each(networks, data, examples, name=name):
        if isinstance(one, NetkinError):
            raise one
        found.append(one)
    return found


def evaluate_each(
    networks: Sequence[Stitched], data: Any, examples: int | None = None, *, name: str = "a"
) -> list[Evaluation | NetkinError]:
    """Return the same, with the reason in place of the scores of a network that gives NaN."""
    b, digest, tallies = networks[0].b, UnorderedDigest(), list[tuple[Answers, ActivationSimilarity]]()
    for network in networks:
        network.cut()  # before hooks are in place
        what = f"what the stitch makes of {layer_label(network.layer_a)} of {name!r}"
        tallies.append((Answers(), ActivationSimilarity(network.transformation.adapter.b, what)))
    layers = list(dict.fromkeys(network.layer_b for network in networks))
    faults: dict[int, NetkinError] = {}
    with inference_mode_of(networks[0].a, b, exact=True):
        for batch in reported_batches(data, examples, "evaluating"):
            with recording(b, layers) as kept:
                own_answers, own = feed(b, batch), {layer: kept[layer] for layer in layers}
            heads = _heads(networks, batch)
            for place, (network, (said, similarity)) in enumerate(zip(networks, tallies, strict=True)):
                if place in faults:
                    continue
                try:
                    head = heads[network.layer_a].to(network.transformation.shift)
                    transformed = network.transformation(head)
                    answers = network.finish(transformed.clone(), batch)
                    similarity.update(transformed, own[network.layer_b], attention_mask(batch))
                    said.update(answers, own_answers, batch)
                except (ForwardError, InvalidValue) as fault:
                    faults[place] = fault
            digest.update(batch, batch_length(batch))
    return [faults.get(place) or _evaluation(*tally, str(digest)) for place, tally in enumerate(tallies)]


def _evaluation(said: Answers, similarity: ActivationSimilarity, digest: str) -> Evaluation:
    counts, (accuracy, accuracy_b) = said.counts, said.accuracies
    assert counts is not None
    return Evaluation(
        examples=said.examples,
        accuracy=accuracy,
        accuracy_b=accuracy_b,
        cross_entropy=counts.cross_entropy_ab,
        agreement=counts.agreement,
        classes=counts.classes,
        digest=digest,
        **similarity.values(),
    )


def _heads(networks: Sequence[Stitched], batch: Any) -> dict[str, Tensor]:
    """Return what the first model gives at all layers that are stitched; it runs once."""
    layers = list(dict.fromkeys(network.layer_a for network in networks))
    if len(layers) == 1:
        return {layers[0]: networks[0].begin(batch)}
    with recording(networks[0].a, layers) as kept:
        feed(networks[0].a, batch)
        return {layer: kept[layer] for layer in layers}


def _logits(answers: Any, whose: str) -> Tensor:
    logits = main_tensor(answers, "")
    if logits.ndim not in (2, 3) or logits.shape[-1] < 2:
        raise ShapeError(
            f"the second model's output has shape {tuple(logits.shape)}; a stitch is evaluated by the scores of a "
            "classifier, one row an example."
        )
    count = int((~torch.isfinite(logits)).sum())
    if count:
        raise ForwardError(
            f"{whose} gives {count:,} NaN or Inf among {logits.numel():,} scores; fix the model or leave out the "
            "examples that cause them."
        )
    return logits


def _valid(logits: Tensor, own: Tensor, labels: Tensor | None, mask: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return scores and labels with one row an example, or one for each place that is no padding."""
    if own.ndim == 2:
        return logits, own, labels
    if labels is not None and labels.shape != own.shape[:2]:
        raise ShapeError(
            f"the labels have shape {tuple(labels.shape)}, and the second model answers for {own.shape[0]:,} × "
            f"{own.shape[1]:,} places; give one label for each place, -100 where it does not count."
        )
    places = torch.ones(own.shape[:2], dtype=torch.bool, device=own.device)
    fits = fitting_mask(mask, own)
    return drop_padding(logits, own, labels, places if fits is None else (torch.as_tensor(fits) != 0).to(own.device))


def drop_padding(answers: Tensor, own: Any, labels: Any, mask: Tensor | None) -> tuple[Tensor, Any, Any]:
    """Return answers, the second model's own and labels, without places of sequences that are padding or unlabelled."""
    if answers.ndim != 3:
        return answers, own, labels
    of_places = isinstance(labels, Tensor) and labels.shape == answers.shape[:2] and not labels.is_floating_point()
    counts = mask if mask is not None and mask.shape == answers.shape[:2] else None
    if of_places:
        counts = labels >= 0 if counts is None else counts & (labels >= 0)  # -100 marks what does not count
    if counts is None:
        return answers, own, labels
    return answers[counts], None if own is None else own[counts], labels[counts] if of_places else labels


def value_if_any(value: Callable[[], Any]) -> float | None:
    """Return a value, or None where a layer does not vary and there is none."""
    try:
        return float(value())
    except NoValue:
        return None


MEMORY = 3 * 8  # bytes of an evaluation, for the square of the second layer's width: three matrices
USUAL = ("relative_accuracy", "agreement", "cross_entropy")
_NO_LABELS = "the test data have no labels"
_NONE_RIGHT = "the second model gives no right answer on the test data"
_TOO_FAR = "the stitched network's answers lie too far from the second model's for a finite cross-entropy"
_CONSTANT = "the second model's activations do not vary over the test data"
_CONSTANT_MAPPED = "the mapped activations do not vary over the test data"
_INFINITE = "it is no finite number on the test data"


def _unlabelled(evaluation: Evaluation) -> str:
    return _NO_LABELS if evaluation.accuracy is None else _NONE_RIGHT


def _unvarying(evaluation: Evaluation) -> str:
    return _CONSTANT if evaluation.r2 is None else _CONSTANT_MAPPED


@dataclass(frozen=True)
class Score:
    """One number of an evaluation: what it is, and why it may be missing."""

    quantity: Quantity
    why_not: Callable[[Evaluation], str]

    def read(self, evaluation: Evaluation) -> float | None:
        """Return the number; those of the joint have no prefix in an evaluation."""
        value: float | None = getattr(evaluation, self.quantity.id.removeprefix("stitched_"))
        return value


def _score(
    id: str, bounds: tuple[float, float], why_not: Callable[[Evaluation], str], convention: str, means: str,
    cannot_see: str, **facts: Any,
) -> tuple[str, Score]:  # fmt: skip
    quantity = Quantity(
        id=id, kind="score", bounds=bounds, convention=convention, means=means, cannot_see=cannot_see, **facts
    )
    return id, Score(quantity, why_not)


SCORES: Mapping[str, Score] = dict([
    _score(
        "relative_accuracy", (0, math.inf), _unlabelled,
        "accuracy of the stitched network over that of the second model, on the test data",
        means="What a stitched network can do: the first model up to its layer, a map, and the second model after "
        "its own. 1 means that it gets as many right as the second model itself.",
        cannot_see="How the layers look: activations that are very different, or very alike, may carry the same "
        "answers or not. A poor value may also mean that the method found a poor map.",
    ),
    _score(
        "accuracy", (0, 1), _unlabelled,
        "share of the test data that the stitched network gets right",
        means="The share of right answers of a stitched network: the first model up to its layer, a map, and the "
        "second model after its own.",
        cannot_see="How good the second model is by itself; relative_accuracy takes that into account.",
    ),
    _score(
        "agreement", (0, 1), lambda e: _INFINITE,
        "share of the test data on which the stitched network answers as the second does",
        means="How often a stitched network gives the answer of the second model itself, right or wrong. 1 means "
        "always.",
        cannot_see="How sure the answers are, and whether they are right; a poor map may be the method's fault.",
    ),
    _score(
        "cross_entropy", (0, math.inf), lambda e: _TOO_FAR,
        "mean cross-entropy, in nats, of the stitched network to the second model's soft answers",
        means="How far the answers of a stitched network are from the second model's own, in nats; the lowest "
        "value possible is the entropy of those answers, which is above 0 where the second model is unsure.",
        cannot_see="Whether the answers are right. One example answered wrongly with certainty can outweigh many "
        "good ones.",
        higher_is_closer=False, unit="nats",
    ),
    _score(
        "r2", (-math.inf, 1), lambda e: _CONSTANT if e.r2 is None else _INFINITE,
        "1 - ‖AM + b - B‖²/‖B - mean‖² of the map as it stands, not refitted",
        means="How much of the second model's activations the mapped ones explain as they stand: 1 is all, 0 no "
        "more than their mean, and below 0 they are farther away than that.",
        cannot_see="Whether what is explained matters to the answers: directions count by their variance alone.",
    ),
    _score(
        "stitched_cka", (0, 1), _unvarying,
        "cka of the mapped activations and the second model's own",
        means="How similarly the mapped activations and the second model's own arrange the examples, place by "
        "place.",
        cannot_see=f"{LEADING} A stitch that works may score low, and one that does not may score high.",
    ),
    _score(
        "stitched_cca", (0, 1), _unvarying,
        "cca_mean of the mapped activations and the second model's own",
        means="The mean canonical correlation of the mapped activations and the second model's own, place by "
        "place.",
        cannot_see="An invertible map does not change it, so it tells little of the map that was found.",
    ),
    _score(
        "stitched_svcca", (0, 1), _unvarying,
        "svcca of the mapped activations and the second model's own",
        means="The mean canonical correlation of the leading directions of the mapped activations and of the "
        "second model's own, place by place.",
        cannot_see="Directions below the cut are ignored, and above it all count equally.",
    ),
])  # fmt: skip


def known_scores(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of scores, each once; one that does not exist is refused."""
    asked = [names] if isinstance(names, str) else list(names)
    if not asked:
        raise InvalidValue("`scores` is empty; name at least one, e.g. 'relative_accuracy'.", argument="scores")
    for name in asked:
        require_listed("score", name, SCORES, "scores")
    return tuple(dict.fromkeys(asked))
