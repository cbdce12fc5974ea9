"""Training a stitch on the task loss: both models are fixed, and only the transformation is trained.

The first model runs without a graph, once on every example where its activations fit the memory; the second model's
outputs are computed once. Gradients go back through the tail of the second model, to no weight of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from netkin.applications.stitching.network import Stitched
from netkin.applications.stitching.training import TaskLoss, cka_rows, cut, drop_padding, shrink
from netkin.applications.stitching.training_batches import (
    BatchesDigest,
    InMemory,
    Portion,
    Reread,
    Sampling,
    ScoreRecord,
    check_labels,
    read_course,
    sample_scores,
)
from netkin.errors import FileError, ForwardError, outside
from netkin.identity import COMPARE, forms_by_name, in_words, state_noted, weights_digest
from netkin.jobs import Job
from netkin.measures.kernels import batch_cka
from netkin.representations import batches_of, inference_mode_of
from netkin.representations.hooks import main_tensor
from netkin.settings import frozen
from netkin.training.loop import Loop
from netkin.training.recipe import Hook, Recipe
from netkin.training.saving import PartSaving

Weights = dict[str, Tensor]
JobPart = tuple[Job, str]  # a job, and the name of its part


@dataclass(frozen=True)
class Training:
    """What a training did: its record step by step, and that of the transformation it ended with.

    `stopped` is whether patience ended it, `step` from which step the transformation is, and `kept` what of the
    first model's work was kept in memory.
    """

    history: tuple[ScoreRecord, ...] = field(repr=False)
    final: ScoreRecord
    steps: int
    step: int
    stopped: bool
    kept: str
    examples: int
    data: str = ""  # the mark of the examples trained on


def train_map(
    network: Stitched,
    data: Any,
    settings: TaskLoss | None = None,
    *,
    validation: Any = None,
    examples: int | None = None,
    place: JobPart | None = None,
) -> Training:
    """Train the transformation of a stitched network in place, and return the record.

    The stitch is evaluated on a sample of `validation`, or of `data` where none is given; patience depends on it, so it
    should be no data that the stitch is tested on. If anything goes wrong the transformation is as it was before.
    A training that ends worse than it began warns. Its state is kept at `place`, in a job of which it is a part.
    """
    settings = settings or TaskLoss()
    first = _weights(network)
    try:
        with inference_mode_of(network.a, network.b, exact=True), frozen(network.a, network.b):
            done = _trained(network, data, settings, validation, examples, place)
    except BaseException:
        network.transformation.load_state_dict(first)
        raise
    finally:
        network.transformation.zero_grad(set_to_none=True)
    began, ended = done.history[0]["objective"], done.final["objective"]
    if ended > began + 1e-3 * abs(began):  # less is rounding, or Adam's trembling
        warnings.warn(
            f"training ended worse than it began: what is minimised is {ended:.4g} on the sample, and was {began:.4g} "
            f"before; take a `rate` smaller than {settings.rate:g}, or keep the best stitch by `patience=`.",
            stacklevel=outside(),
        )
    return done


def objective(network: Stitched, portion: Portion, settings: TaskLoss) -> Tensor:
    """Return what training minimises: the task loss and the CKA penalty of a portion.

    The decay is no part of it, as Adam adds it by itself, nor the L1 penalty: `shrink` takes its step after Adam's.
    """
    if portion.head is None:
        with torch.no_grad():
            head = network.begin(portion.batch)
    else:
        head = portion.head
    transformed = network.transformation(head)
    penalised = bool(settings.cka_penalty)
    # the tail may begin with a step in place
    answers = main_tensor(network.finish(transformed.clone() if penalised else transformed, portion.batch), "")
    value = settings.loss(*drop_padding(answers, portion.answers, portion.labels, portion.mask))
    if penalised:
        assert portion.own is not None
        end = network.transformation.meeting.b
        both = (cka_rows(side, portion.mask, end, settings.cka_of) for side in (transformed, portion.own))
        value = value + settings.cka_penalty * batch_cka(*both)
    return value


class ScoresAndPatience(Hook):
    """Scores the stitch on a sample every so many steps, keeps the best one, and ends a training without progress."""

    def __init__(self, network: Stitched, sample: Sequence[Portion], settings: TaskLoss, per_epoch: int, total: int):
        self.network, self.sample, self.settings = network, sample, settings
        self.per_epoch, self.total, self.every = per_epoch, total, settings.every or per_epoch
        self.first = self.best = _weights(network)
        self.best_step = self.records_since_best = 0
        self.losses: list[Tensor] = []  # of the steps since the last record, never waited for before the next
        before = {"step": 0, "epoch": 0.0, "training_loss": None}
        self.history: list[ScoreRecord] = [before | self.scores("before training")]

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer: Any = optimizer
        # all but the shift, which no penalty draws to zero
        self.shrinking = [weight for weight in model.parameters() if weight is not self.network.transformation.shift]

    def objective(self, portion: Portion, step: int) -> Tensor:
        """Return what is minimised on a portion of the examples."""
        value = objective(self.network, portion, self.settings)
        if not value.requires_grad:
            raise ForwardError(
                f"no gradient comes back from the second model's output to its layer {self.network.layer_b!r}, so "
                "the task loss can't train a stitch there; use a direct method."
            )
        self.losses.append(value.detach())
        return value

    def after_step(self, model: nn.Module, step: int) -> None:
        if self.settings.l1:
            for weight in self.shrinking:
                shrink(self.optimizer, weight, self.settings.l1)
        if step % self.every == 0 or step == self.total:
            self._score(step)

    def should_stop(self, step: int) -> bool:
        return self.settings.patience is not None and self.records_since_best >= self.settings.patience

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("first", "best", "best_step", "records_since_best", "history")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not all(_is_near(state["first"].get(name), weight.cpu()) for name, weight in self.first.items()):
            raise FileError(
                f"{str(self.settings.resume)!r} holds a training that began from another transformation; give the same "
                "one, or another path."
            )
        vars(self).update(state)

    def _score(self, step: int) -> None:
        losses, self.losses = torch.stack(self.losses), []
        bad = (~torch.isfinite(losses)).nonzero()
        if len(bad):
            raise ForwardError(
                f"training came to NaN or Inf at step {step - len(losses) + 1 + int(bad[0]):,} of {self.total:,} with "
                f"`rate={self.settings.rate:g}`; the transformation is as it was before. Take a smaller `rate`."
            )
        scores = self.scores(f"at step {step}")
        best = next(record for record in self.history if record["step"] == self.best_step)
        if scores["objective"] < best["objective"]:
            self.best, self.best_step, self.records_since_best = _weights(self.network), step, 0
        else:
            self.records_since_best += 1
        passed = {"step": step, "epoch": step / self.per_epoch, "training_loss": float(losses.mean())}
        self.history.append(passed | scores)

    def scores(self, when: str) -> ScoreRecord:
        """Return the scores of the stitch on the sample, and what is minimised."""
        settings, transformation = self.settings, self.network.transformation
        record = sample_scores(self.network, self.sample, settings.loss, settings.cka_of)
        cka = record["cka" if settings.cka_of == "places" else "cka_of_examples"] or 0.0
        size = sum(float(weight.detach().square().sum()) for weight in transformation.parameters())
        entries = float(transformation.matrix.abs().sum()) if settings.l1 else 0.0
        total = record["loss"] + settings.l1 * entries + settings.cka_penalty * cka + settings.decay / 2 * size
        if not math.isfinite(total):
            raise ForwardError(
                f"the stitched network gives NaN or Inf on the sample {when}; test both models on these data "
                "first, or take another `init`, or a smaller `rate`."
            )
        return {"loss": record.pop("loss"), "objective": total, **record}


def _trained(
    network: Stitched, data: Any, settings: TaskLoss, validation: Any, examples: int | None, place: JobPart | None
) -> Training:
    digests = {"data": BatchesDigest(data), "validation data": BatchesDigest(validation)}
    sampling = Sampling(settings.sample)
    read = partial(batches_of, data, examples)
    batches = read() if settings.looks_at_own else check_labels(network, read())
    course = read_course(
        network, _with_digest(digests["data"], batches), read, settings, sampling if validation is None else None
    )
    if validation is not None:
        for batch in _with_digest(digests["validation data"], batches_of(validation)):
            sampling.offer(network, batch)
    length: dict[str, Any] = {"steps": settings.steps} if settings.steps else {"epochs": settings.epochs}
    recipe = Recipe(
        **length, optimizer="adam", rate=settings.rate, decay=settings.decay,
        precision="bf16" if settings.autocast else "float32",
    )  # fmt: skip
    per_epoch = course.per_epoch
    hook = ScoresAndPatience(
        network, sampling.portions, settings, per_epoch, settings.steps or settings.epochs * per_epoch
    )
    loop = Loop(network.transformation, course, recipe, hook.objective, [hook], seed=settings.seed, every=hook.every)
    with _saving(network, course, settings, digests, place) as saving, torch.enable_grad():
        loop.run(saving)
        saving.tell(loop.step, loop.step)  # patience may have ended it early
    stopped = hook.should_stop(loop.step)
    if settings.patience is not None:
        network.transformation.load_state_dict(hook.best)
    for weight in hook.shrinking if settings.l1 else []:
        cut(weight, settings.threshold)
    step = loop.step if settings.patience is None else hook.best_step
    final = {"step": step, **hook.scores("in the end")}
    examples_digest = str(digests["data"].examples)
    return Training(
        tuple(hook.history), final, loop.step, step, stopped, course.words, course.examples, examples_digest
    )


def _with_digest(digest: BatchesDigest, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches, whose examples are noted as they pass."""
    for batch in batches:
        digest.update(batch)
        yield batch


@contextmanager
def _saving(
    network: Stitched, course: InMemory | Reread, settings: TaskLoss, digests: Mapping[str, BatchesDigest],
    place: JobPart | None,
) -> Iterator[PartSaving]:  # fmt: skip
    """Yield where the training's state is kept: as a part of the sweep's job, or in a job of its own."""
    if settings.resume is None:
        yield PartSaving(*(place or ()))
        return
    identity = {name: in_words(value) for name, value in settings.course.items()} | {
        "layers": f"{network.layer_a!r} into {network.layer_b!r}",
        "batches": f"{course.per_epoch:,} an epoch",
        "forms of the activations": network.transformation.meeting.words or "none",
        "weights of the first model": weights_digest(network.a),
        "weights of the second model": weights_digest(network.b),
        **{name: str(digest.examples) for name, digest in digests.items()},
        "order of the examples": f"digest {digests['data'].order}",
        "order of the validation examples": f"digest {digests['validation data'].order}",
    }
    models = {"first": network.a, "second": network.b}
    known: dict[str, Any] = {**identity, "architecture": forms_by_name(models)}
    job = Job(settings.resume, "training", known, call=str(settings), compare=COMPARE)
    with job, state_noted(job, models):
        yield PartSaving(job, "standing", is_whole=True)


def _is_near(held: Tensor | None, first: Tensor) -> bool:
    # solved again on another device a map may differ by rounding
    if held is None or held.shape != first.shape:
        return False
    return bool((held.double() - first.double()).norm() <= 1e-2 * first.double().norm().clamp(min=1e-30))


def _weights(network: Stitched) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in network.transformation.state_dict().items()}
