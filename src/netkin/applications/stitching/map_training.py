"""Training a stitch on the task loss: both models are fixed, and only the transformation is trained.

The first model runs without a graph, once on every example where its activations fit the memory; the second model's
outputs are computed once. Gradients go back through the tail of the second model, to no weight of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from netkin import files
from netkin.applications.stitching.network import Stitched
from netkin.applications.stitching.task_loss import TaskLoss, cka_rows, cut, drop_padding, shrink
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
from netkin.errors import FileError, ForwardError, InvalidValue, outside
from netkin.identity import COMPARE, forms_by_name, in_words, state_noted, weights_digest
from netkin.jobs import Job, Part
from netkin.measures.kernels import batch_cka
from netkin.progress import Report, reporting
from netkin.representations import batches_of, inference_mode_of
from netkin.representations.hooks import main_tensor
from netkin.results.packing import as_record
from netkin.settings import frozen
from netkin.training.saving import pack_state, unpack_state

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


@dataclass
class Standing:
    """How far a training has come: its weights at first, now and at their best, and what was recorded.

    The order of the examples is a function of seed and epoch, so that this is the complete state.
    """

    first: Weights
    now: Weights
    best: Weights
    step: int = 0
    best_step: int = 0
    waited: int = 0  # records since the best one
    history: list[ScoreRecord] = field(default_factory=list)
    adam: dict[str, Any] = field(default_factory=dict)


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
            done = _Trainer(network, data, settings, validation, examples).run(place)
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


class _Trainer:
    """One training, from the first batch to the returned transformation."""

    def __init__(self, network: Stitched, data: Any, settings: TaskLoss, validation: Any, examples: int | None):
        self.network, self.settings = network, settings
        self.digests = {"data": BatchesDigest(data), "validation data": BatchesDigest(validation)}
        sampling = Sampling(settings.sample)
        read = partial(batches_of, data, examples)
        batches = read() if settings.looks_at_own else check_labels(network, read())
        self.course: InMemory | Reread = read_course(
            network, self._with_digest("data", batches), read, settings, sampling if validation is None else None
        )
        if validation is not None:
            for batch in self._with_digest("validation data", batches_of(validation)):
                sampling.offer(network, batch)
        self.sample = sampling.portions
        self.total = settings.steps or settings.epochs * self.course.per_epoch
        self.every = settings.every or self.course.per_epoch
        self.optimizer = torch.optim.Adam(
            network.transformation.parameters(), lr=settings.rate, weight_decay=settings.decay
        )
        # all but the shift, which no penalty draws to zero
        self.shrinking = [w for w in network.transformation.parameters() if w is not network.transformation.shift]
        self.losses: list[Tensor] = []  # of the steps since the last record, never waited for before the next
        self.place: JobPart | None = None
        self.standing: Standing

    def _resume(self) -> Standing | None:
        found = None if self.place is None else find_standing(self.place, _weights(self.network))
        if found is not None and found.step > self.total:
            raise FileError(
                f"{str(self.settings.resume)!r} holds a training of {found.step:,} steps, and {self.total:,} are asked "
                "for; ask for as many or more, or give another path."
            )
        if found is not None and self.place is not None:
            with files.damage_reported(str(self.place[0].folder)):
                self.network.transformation.load_state_dict(found.now)
                self.optimizer.load_state_dict(found.adam)
        return found

    @contextmanager
    def _open_place(self, place: JobPart | None) -> Iterator[JobPart | None]:
        """Give the place where the training's state is kept: the one given, or its own job's."""
        if self.settings.resume is None:
            yield place
            return
        network = self.network
        subjects = {
            "layers": f"{network.layer_a!r} into {network.layer_b!r}",
            "batches": f"{self.course.per_epoch:,} an epoch",
            "forms of the activations": network.transformation.meeting.words or "none",
            "weights of the first model": weights_digest(network.a),
            "weights of the second model": weights_digest(network.b),
        }
        options = {name: in_words(value) for name, value in self.settings.course.items()}
        identity = options | subjects | {name: str(one.examples) for name, one in self.digests.items()}
        orders = {"order of the examples": "data", "order of the validation examples": "validation data"}
        identity |= {words: f"digest {self.digests[name].order}" for words, name in orders.items()}
        models = {"first": network.a, "second": network.b}
        known: dict[str, Any] = {**identity, "architecture": forms_by_name(models)}
        job = Job(self.settings.resume, "training", known, call=str(self.settings), compare=COMPARE)
        with job, state_noted(job, models):
            yield job, "standing"

    def _with_digest(self, name: str, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, whose examples are noted as they pass."""
        for batch in batches:
            self.digests[name].update(batch)
            yield batch

    def run(self, place: JobPart | None) -> Training:
        with self._open_place(place) as self.place:
            weights = _weights(self.network)
            self.standing = self._resume() or Standing(weights, weights, weights)
            if not self.standing.history:
                before = {"step": 0, "epoch": 0.0, "training_loss": None, **self._evaluate("before training")}
                self.standing.history.append(before)
            with reporting(self.total, "training", "steps", done=self.standing.step) as report:
                while self.standing.step < self.total and not self._out_of_patience:
                    self._epoch(report)
            self._tell(self.standing.step)  # which patience may have ended early
            return self._finish()

    def _tell(self, total: int) -> None:
        """Report the progress of a job that consists of this training."""
        if self.place is not None and self.settings.resume is not None:
            self.place[0].advance(self.standing.step, total, "steps")

    def _epoch(self, report: Report) -> None:
        number, start = divmod(self.standing.step, self.course.per_epoch)
        for portion in self.course.epoch(number, start):
            self._step(portion)
            report.update()
            if self.standing.step % self.every == 0 or self.standing.step == self.total:
                self._look()
            if self.standing.step == self.total or self._out_of_patience:
                return
        given = self.standing.step - number * self.course.per_epoch
        if given < self.course.per_epoch:
            raise InvalidValue(
                f"the data gave {self.course.per_epoch:,} batches at first and {given:,} when read again; pass data "
                "that give the same each time."
            )

    def _step(self, portion: Portion) -> None:
        settings, device = self.settings, self.network.transformation.shift.device
        with torch.enable_grad():
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast):
                value = objective(self.network, portion, settings)
            if not value.requires_grad:
                raise ForwardError(
                    f"no gradient comes back from the second model's output to its layer {self.network.layer_b!r}, so "
                    "the task loss can't train a stitch there; use a direct method."
                )
            self.optimizer.zero_grad(set_to_none=True)
            value.backward()
        self.optimizer.step()
        if settings.l1:
            for weight in self.shrinking:
                shrink(self.optimizer, weight, settings.l1)
        self.losses.append(value.detach())
        self.standing.step += 1

    def _look(self) -> None:
        """Record the scores of the stitch, and keep it if it is the best so far."""
        standing, losses = self.standing, torch.stack(self.losses)
        self._refuse_non_finite(losses)
        judged = self._evaluate(f"at step {standing.step}")
        passed = {"step": standing.step, "epoch": standing.step / self.course.per_epoch}
        standing.now = _weights(self.network)
        best = next(record for record in standing.history if record["step"] == standing.best_step)
        if judged["objective"] < best["objective"]:
            standing.best, standing.best_step, standing.waited = standing.now, standing.step, 0
        else:
            standing.waited += 1
        standing.history.append({**passed, "training_loss": float(losses.mean()), **judged})
        self.losses = []
        if self.place is not None:
            standing.adam = self.optimizer.state_dict()
            keep_standing(self.place, standing)
            self._tell(self.total)

    def _evaluate(self, when: str) -> ScoreRecord:
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

    def _refuse_non_finite(self, losses: Tensor) -> None:
        bad = (~torch.isfinite(losses)).nonzero()
        weights = all(bool(torch.isfinite(weight).all()) for weight in self.network.transformation.parameters())
        if len(bad) or not weights:
            step = self.standing.step - len(losses) + 1 + (int(bad[0]) if len(bad) else len(losses) - 1)
            raise ForwardError(
                f"training came to NaN or Inf at step {step:,} of {self.total:,} with `rate={self.settings.rate:g}`; "
                "the transformation is as it was before. Take a smaller `rate`."
            )

    @property
    def _out_of_patience(self) -> bool:
        return self.settings.patience is not None and self.standing.waited >= self.settings.patience

    def _finish(self) -> Training:
        standing, settings = self.standing, self.settings
        if settings.patience is not None:
            self.network.transformation.load_state_dict(standing.best)
        for weight in self.shrinking if settings.l1 else []:
            cut(weight, settings.threshold)
        step = standing.step if settings.patience is None else standing.best_step
        final = {"step": step, **self._evaluate("in the end")}
        return Training(
            tuple(standing.history), final, standing.step, step, self._out_of_patience, self.course.words,
            self.course.examples, str(self.digests["data"].examples),
        )  # fmt: skip


def keep_standing(place: JobPart, standing: Standing) -> None:
    """Save the state of a training; a request to cancel ends it here."""
    job, name = place
    values, arrays = pack_state(vars(standing))
    job.keep(name, {"state": values}, arrays)
    job.check()


def find_standing(place: JobPart, first: Weights) -> Standing | None:
    """Return where a training stood, or None where it is new; one that began elsewhere than at `first` is refused."""
    job, name = place
    standing = job.recall(name, _unpack)
    if standing is None:
        return None
    if standing.first.keys() != first.keys() or not all(_near(standing.first[k], first[k].cpu()) for k in first):
        raise FileError(
            f"{str(job.folder)!r} holds a training that began from another transformation; give the same one, or "
            "another path."
        )
    return standing


def _unpack(part: Part) -> Standing:
    standing = as_record(Standing, unpack_state(part.values["state"], part.arrays))
    if standing.best_step not in {record["step"]: record["objective"] for record in standing.history}:
        raise ValueError(f"it has no record of step {standing.best_step}")
    return standing


def _near(held: Tensor, first: Tensor) -> bool:
    # solved again on another device a map may differ by rounding
    if held.shape != first.shape:
        return False
    return bool((held.double() - first.double()).norm() <= 1e-2 * first.double().norm().clamp(min=1e-30))


def _weights(network: Stitched) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in network.transformation.state_dict().items()}
