"""Evaluating stitches: task scores of the stitched network, and the similarity of activations at the joint.

During training a stitch is evaluated in this way on a fixed sample.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from netkin.applications.stitching.ends import End
from netkin.applications.stitching.portions import Portion, Sampling
from netkin.applications.stitching.task_loss import TaskLossFunction, cka_rows, drop_padding
from netkin.arrays import refuse_non_finite, summing_dtype
from netkin.errors import ForwardError, InflatedWarning, NetkinError, NoValue, ShapeError, ValueFault, outside
from netkin.identity import UnorderedDigest
from netkin.measures import cca_mean, cka, svcca
from netkin.representations import guest, recording
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import attention_mask, batch_length, feed, labels_of, watched
from netkin.representations.layers import layer_label
from netkin.representations.shapes import fitting_mask
from netkin.statistics import LayerMoments, Moments, Outputs

if TYPE_CHECKING:
    from netkin.applications.stitching.network import Stitched

ScoreRecord = dict[str, Any]


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
            raise ValueFault(
                f"batch {self.batches} of the data has {here}, and the batches before it have {before}; give every "
                "batch as `(inputs, labels)`, or all without labels."
            )
        self.labelled = labels is not None
        return None if labels is None else torch.as_tensor(labels, device=device)

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

    def __init__(self, end: End, what: str = "what the stitch makes of the first model's layer"):
        self.end, self.what, self.batches = end, what, 0
        self.moments = LayerMoments([(["stitched"], ["b"])])
        self._distance = 0.0

    def update(self, transformed: Tensor, own: Tensor, mask: Any = None) -> None:
        """Add one batch; a `mask` marks the valid tokens of sequences."""
        ours, theirs = self.end.rows(transformed, mask), self.end.rows(own, mask)
        distance = float((ours - theirs).to(summing_dtype(ours.device)).square().sum())
        if not math.isfinite(distance):
            refuse_non_finite(ours, f"{self.what} in batch {self.batches}")
            refuse_non_finite(theirs, f"what the second model itself gives there in batch {self.batches}")
        self._distance += distance
        self.moments.update({"stitched": ours, "b": theirs})
        self.batches += 1

    def values(self) -> dict[str, float | None]:
        """Return `r2`, `cka`, `cca` and `svcca`; None where a layer does not vary.

        R² is not refitted: ``1 - ‖AM + b - B‖² / ‖B - mean‖²``, which may be negative.
        """
        pair = self.moments["stitched", "b"]
        return {
            "r2": _if_any(lambda: 1 - self._distance / (float(pair.y.trace) / pair.y.scale**2)),
            "cka": _if_any(lambda: cka(pair)),
            "cca": _if_any(lambda: cca_mean(pair)),
            "svcca": _if_any(lambda: svcca(pair)),
        }


class Tally:
    """The statistics of an evaluation, folded in batch by batch."""

    def __init__(self, network: Stitched, name: str = "a") -> None:
        self.answers = Answers()
        what = f"what the stitch makes of {layer_label(network.layer_a)} of {name!r}"
        self.similarity = ActivationSimilarity(network.transformation.meeting.b, what)

    def update(self, transformed: Tensor, own: Tensor, answers: Any, own_answers: Any, batch: Any) -> None:
        """Add one batch: activations as transformed and as the second model's own, and the answers of both."""
        self.similarity.update(transformed, own, attention_mask(batch))
        self.answers.update(answers, own_answers, batch)

    def evaluation(self, digest: str) -> Evaluation:
        """Return the numbers, with the digest of the data."""
        said = self.answers.counts
        assert said is not None
        accuracy, accuracy_b = self.answers.accuracies
        return Evaluation(
            examples=self.answers.examples,
            accuracy=accuracy,
            accuracy_b=accuracy_b,
            cross_entropy=said.cross_entropy_ab,
            agreement=said.agreement,
            classes=said.classes,
            digest=digest,
            **self.similarity.values(),
        )


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
    tallies, b, digest = [Tally(network, name) for network in networks], networks[0].b, UnorderedDigest()
    for network in networks:
        network.cut()  # before hooks are in place
    layers = list(dict.fromkeys(network.layer_b for network in networks))
    faults: dict[int, NetkinError] = {}
    with guest(networks[0].a, b, exact=True):
        for batch in watched(data, examples, "evaluating"):
            with recording(b, layers) as kept:
                own_answers, own = feed(b, batch), {layer: kept[layer] for layer in layers}
            heads = _heads(networks, batch)
            for place, (network, tally) in enumerate(zip(networks, tallies, strict=True)):
                try:
                    if place not in faults:
                        _fold(network, tally, heads[network.layer_a], own[network.layer_b], own_answers, batch)
                except (ForwardError, ValueFault) as fault:
                    faults[place] = fault
            digest.update(batch, batch_length(batch))
    return [faults.get(place) or tally.evaluation(str(digest)) for place, tally in enumerate(tallies)]


def _fold(network: Stitched, tally: Tally, head: Tensor, own: Tensor, own_answers: Any, batch: Any) -> None:
    transformed = network.transformation(head.to(network.transformation.shift))
    answers = network.finish(transformed.clone(), batch)
    tally.update(transformed, own, answers, own_answers, batch)


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
            f"the second model's output has shape {tuple(logits.shape)}; a stitch is judged by the scores of a "
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
    valid = fitting_mask(mask, own)
    counts = torch.ones(own.shape[:2], dtype=torch.bool) if valid is None else torch.as_tensor(valid) != 0
    counts = counts.to(own.device)
    if labels is not None:
        if labels.shape != own.shape[:2]:
            raise ShapeError(
                f"the labels have shape {tuple(labels.shape)}, and the second model answers for {own.shape[0]:,} × "
                f"{own.shape[1]:,} places; give one label for each place, -100 where it does not count."
            )
        counts = counts & (labels >= 0)
    return logits[counts], own[counts], None if labels is None else labels[counts]


def _if_any(value: Callable[[], Any]) -> float | None:
    """Return a value, or None where a layer does not vary and there is none."""
    try:
        return float(value())
    except NoValue:
        return None


@dataclass(frozen=True)
class Sample:
    """The examples on which a stitch is evaluated while it is trained."""

    portions: list[Portion]

    @classmethod
    def of(cls, network: Stitched, batches: Iterable[Any], limit: int) -> Sample:
        """Return a sample of batches that are not trained on."""
        sampling = Sampling(limit)
        for batch in batches:
            sampling.offer(network, batch)
        return cls(sampling.portions)

    @torch.no_grad()
    def record(self, network: Stitched, loss: TaskLossFunction, cka_of: str = "places") -> ScoreRecord:
        """Return loss, accuracy, agreement with the second model, and the similarity of the activations at the joint.

        `r2` is not refitted: ``1 - ‖AM + b - B‖² / ‖B - mean‖²``, which may be negative. None stands where the sample
        has no labels, the answers are no scores, or the activations do not vary. All similarities are place by
        place; with ``cka_of="examples"`` there is `cka_of_examples` too.
        """
        end, total, count = network.transformation.meeting.b, 0.0, 0
        similarity, whole = (
            ActivationSimilarity(end),
            list[list[Tensor]](),
        )  # activations of both sides, a row an example
        right, same = list[tuple[Tensor, Any]](), list[tuple[Tensor, Any]]()  # classes as answered and as wanted
        for one in self.portions:
            assert one.own is not None
            transformed = network.transformation(one.head)
            similarity.update(transformed, one.own, one.mask)
            if cka_of == "examples":
                whole.append([cka_rows(side, one.mask, end, cka_of) for side in (transformed, one.own)])
            answers = main_tensor(network.finish(transformed.clone(), one.batch), "")
            answers, own, labels = drop_padding(answers, one.answers, one.labels, one.mask)
            total, count = total + float(_single(loss(answers, own, labels))) * len(answers), count + len(answers)
            if answers.ndim in (2, 3) and answers.shape[-1] > 1:
                same.append((answers.argmax(-1), own.argmax(-1)))
                right.append((answers.argmax(-1), labels))
        found = {"loss": total / count, "accuracy": _share(right), "agreement": _share(same), **similarity.values()}
        if cka_of == "examples":
            X, Y = (_together(side, end) for side in zip(*whole, strict=True))
            found["cka_of_examples"] = _if_any(lambda: cka(Moments.of(X, Y, None)))
        return found


def _together(parts: Sequence[Tensor], end: End) -> Tensor:
    """Return rows of several portions as one matrix; shorter sequences end in zeros, as padding does."""
    least, most = (chosen(part.shape[1] for part in parts) for chosen in (min, max))
    if least != most and end.kind == "maps":
        raise ShapeError(
            f"cka_of='examples' compares whole maps, which must have one size; got {least:,} and {most:,} values an "
            "example. Give inputs of one size, or take cka_of='places'."
        )
    return torch.cat([functional.pad(part, (0, most - part.shape[1])) for part in parts])


def _share(pairs: Sequence[tuple[Tensor, Any]]) -> float | None:
    """Return the share of classes that are as wanted; None where some can't be compared."""
    for said, wanted in pairs:
        if not isinstance(wanted, Tensor) or wanted.numel() != said.numel() or wanted.is_floating_point():
            return None
    count = sum(said.numel() for said, _ in pairs)
    return sum(int((said.flatten() == wanted.flatten()).sum()) for said, wanted in pairs) / count if count else None


def _single(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ShapeError(f"the loss given as `labels` must return one number as a tensor; got {got}.")
    return value
