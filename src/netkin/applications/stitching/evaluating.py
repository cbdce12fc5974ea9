"""Evaluating stitches: what the stitched network can do, and how alike the activations are where it is joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from netkin.applications.stitching.ends import rows
from netkin.applications.stitching.fitting import fitting_mask
from netkin.applications.stitching.joining import Stitched
from netkin.arrays import summing_dtype
from netkin.errors import ForwardError, NoValue, ShapeError
from netkin.measures import cca_mean, cka, svcca
from netkin.representations import batches_of, guest, recording
from netkin.representations.feeding import feed, labels_of, mask_of
from netkin.representations.recording import main_tensor
from netkin.statistics import LayerMoments, Moments, Outputs


@dataclass(frozen=True)
class Evaluation:
    """What a stitch is worth on some data; a value is None where the data have no labels, or it does not exist.

    `cross_entropy` is that of the stitched network to the second model's answers, `r2` how much of the second model's
    activations the transformed ones explain as they stand (not refitted, so it may be negative); `cka`, `cca` and
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

    @property
    def relative_accuracy(self) -> float | None:
        """The accuracy of the stitched network, as a share of the second model's."""
        if self.accuracy is None or not self.accuracy_b:
            return None
        return self.accuracy / self.accuracy_b

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name."""
        return asdict(self) | {"relative_accuracy": self.relative_accuracy}

    def __str__(self) -> str:
        values = {name: value for name, value in self.as_dict().items() if name != "examples"}
        written = (f"{name} {'–' if value is None else f'{value:.4f}'}" for name, value in values.items())
        return f"on {self.examples:,} examples: {', '.join(written)}"


class Answers:
    """Answers of a stitched network beside the second model's own, counted batch by batch."""

    def __init__(self) -> None:
        self.counts: Outputs | None = None
        self.examples, self.labelled = 0, True

    def update(self, answers: Any, own_answers: Any, batch: Any) -> None:
        """Fold in one batch; where each place of a sequence has scores, each valid place counts."""
        logits, own = _logits(answers), _logits(own_answers)
        labels = labels_of(batch)
        self.examples, self.labelled = self.examples + len(logits), self.labelled and labels is not None
        if labels is not None:
            labels = torch.as_tensor(labels, device=own.device)
        logits, own, labels = _valid(logits.to(own.device), own, labels, mask_of(batch))
        self.counts = self.counts or Outputs(own.shape[1])
        self.counts.update(logits, own, labels)


class Tally:
    """The statistics of an evaluation, folded in batch by batch."""

    def __init__(self) -> None:
        self.answers = Answers()
        self.moments = LayerMoments([(["stitched"], ["b"])])
        self._distance = 0.0

    def update(self, transformed: Tensor, own: Tensor, answers: Any, own_answers: Any, batch: Any) -> None:
        """Fold in one batch: activations as transformed and as the second model's own, and the answers of both."""
        mask = fitting_mask(mask_of(batch), own)
        ours, theirs = rows(transformed, mask), rows(own, mask)
        self.moments.update({"stitched": ours, "b": theirs})
        self._distance += float((ours - theirs).to(summing_dtype(ours.device)).square().sum())
        self.answers.update(answers, own_answers, batch)

    def evaluation(self) -> Evaluation:
        """Return the numbers."""
        pair, said = self.moments["stitched", "b"], self.answers.counts
        assert said is not None
        labelled = self.answers.labelled
        return Evaluation(
            examples=self.answers.examples,
            accuracy=said.accuracy_a if labelled else None,
            accuracy_b=said.accuracy_b if labelled else None,
            cross_entropy=said.cross_entropy_ab,
            agreement=said.agreement,
            r2=_if_any(lambda pair: 1 - self._distance / (float(pair.y.trace) / pair.y.scale**2), pair),
            cka=_if_any(cka, pair),
            cca=_if_any(cca_mean, pair),
            svcca=_if_any(svcca, pair),
        )


def evaluated(network: Stitched, data: Any, examples: int | None = None) -> Evaluation:
    """Return what a stitched network can do on the data, beside the second model itself."""
    return evaluated_all([network], data, examples)[0]


def evaluated_all(networks: Sequence[Stitched], data: Any, examples: int | None = None) -> list[Evaluation]:
    """Return what stitched networks of the same two models can do, in one pass: the models run once on each batch."""
    tallies, b = [Tally() for _ in networks], networks[0].b
    for network in networks:
        network.tail  # noqa: B018  cut before hooks are in place
    batches = tqdm(batches_of(data, examples), desc="evaluating", unit=" batches", delay=2, leave=False)
    layers = list(dict.fromkeys(network.layer_b for network in networks))
    with guest(networks[0].a, b):
        for batch in batches:
            with recording(b, layers) as kept:
                own_answers, own = feed(b, batch), {layer: kept[layer] for layer in layers}
            heads = _heads(networks, batch)
            for network, tally in zip(networks, tallies, strict=True):
                transformed = network.transformation(heads[network.layer_a].to(network.transformation.shift))
                answers = network.finish(transformed.clone(), batch)
                tally.update(transformed, own[network.layer_b], answers, own_answers, batch)
    return [tally.evaluation() for tally in tallies]


def _heads(networks: Sequence[Stitched], batch: Any) -> dict[str, Tensor]:
    """Return what the first model gives at all layers that are stitched; it runs once."""
    layers = list(dict.fromkeys(network.layer_a for network in networks))
    if len(layers) == 1:
        return {layers[0]: networks[0].begin(batch)}
    with recording(networks[0].a, layers) as kept:
        feed(networks[0].a, batch)
        return {layer: kept[layer] for layer in layers}


def _logits(answers: Any) -> Tensor:
    logits = main_tensor(answers, "")
    if logits.ndim not in (2, 3) or logits.shape[-1] < 2:
        raise ShapeError(
            f"the second model's output has shape {tuple(logits.shape)}; a stitch is judged by the scores of a "
            "classifier, one row an example."
        )
    if not bool(torch.isfinite(logits).all()):
        raise ForwardError("the stitched network or the second model gives NaN or Inf on these data.")
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
            raise ShapeError(f"there are labels of shape {tuple(labels.shape)} for {tuple(own.shape[:2])} places.")
        counts = counts & (labels >= 0)  # -100 marks what does not count
    return logits[counts], own[counts], None if labels is None else labels[counts]


def _if_any(measure: Any, pair: Moments) -> float | None:
    """Return a value, or None where a layer does not vary and there is none."""
    try:
        return float(measure(pair))
    except NoValue:
        return None
