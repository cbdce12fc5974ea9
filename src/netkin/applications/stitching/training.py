"""The task loss: the settings for training a stitch on the task of the stitched network, and the losses.

Written as measures are, ``"task_loss(init=procrustes, rank=8)"``, it means the same in Python and on the command line.
A `Way` is a method, direct or trained, as requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Adam

from netkin.applications.stitching.maps import find, identity, random, with_seed
from netkin.applications.stitching.joining import End
from netkin.errors import InvalidValue, ShapeError, UnknownName, did_you_mean
from netkin.files import Location
from netkin.identity import function_digest
from netkin.representations.shapes import fitting_mask
from netkin.results.labels import parse_id

NAME = "task_loss"
_COUNTS = ("rank", "epochs", "steps", "batch", "patience", "every", "sample")
_NOT_BELOW_ZERO = ("l1", "threshold", "decay", "memory")
_LARGEST = 1e30  # beyond it Adam's own products overflow float32
_ALSO_CALLED = {
    "lr": "rate",
    "learning_rate": "rate",
    "weight_decay": "decay",
    "batch_size": "batch",
    "num_epochs": "epochs",
}
_NOT_THE_COURSE = ("epochs", "steps", "memory", "resume")  # may differ when a training goes on
ROWS = ("places", "examples")  # what a row is, of which the CKA is taken
TaskLossFunction = Callable[[Tensor, Any, Any], Tensor]  # (answers, the second model's own answers, labels)


@dataclass(frozen=True)
class TaskLoss:
    """How to train a stitch.

    What is minimised is the task loss, ``+ l1 Σ|M| + cka_penalty · CKA + decay/2 (‖M‖² + ‖b‖²)``; with a `rank` the
    decay is that of both factors of M in its place, ``‖U‖² + ‖V‖²``. `labels` are the second model's answers ("soft"),
    those of the data ("true"), or a function ``loss(answers, own_answers, labels)`` of the stitched network's answers,
    the second model's own, and the labels of a batch. The CKA is that of a batch with the second model's own
    activations, a row being a place of a map or a token; with ``cka_of="examples"`` a whole map or sequence.

    `init` is a direct method; least squares of a given `rank` means `reduced_rank`. Training takes `steps`, or else
    `epochs` rounds, of Adam at learning rate `rate`, on the batches that the data come in unless `batch` requests
    others. `every` so many steps (None: once a round) the stitch is evaluated on a fixed sample of at most `sample`
    examples, by what is minimised. The last stitch is taken, with a warning if it is worse than the first; with
    `patience` the best one is, and training ends after so many judgements without a better one. After a training with
    `l1`, entries below `threshold` are set to zero. Up to `memory` bytes of the first model's activations are kept.
    With `resume`, a folder, an interrupted training of the same models on the same data resumes where it stopped.

    Args:
        labels: "soft", "true" or a function.
        init: the direct method to start from.
        rank: that of the map; None for a full one.
        l1: weight of Σ|M|.
        threshold: below which entries are set to zero after a training with `l1`.
        cka_penalty: weight of the CKA with the second model's own activations.
        cka_of: "places" or "examples".
        epochs: rounds over the data.
        steps: steps of training, in place of `epochs`.
        batch: examples of a step; None takes the data's own batches.
        rate: the learning rate.
        decay: weight of the squares.
        patience: judgements without a better one before training ends.
        every: steps between two judgements; None: a round.
        sample: the most examples of a judgement.
        memory: the most bytes of activations that are kept.
        autocast: whether the models run in bfloat16 where torch's autocast allows it.
        seed: of the order of the examples and of the sample.
        resume: the folder in which an interrupted training goes on.

    Example:
        >>> TaskLoss.read("task_loss(init=procrustes, rank=8)", {"epochs": 3})
        task_loss(init=procrustes, rank=8, epochs=3)
    """

    labels: str | TaskLossFunction = "soft"
    init: str = "least_squares"
    rank: int | None = None
    l1: float = 0.0
    threshold: float = 1e-4
    cka_penalty: float = 0.0
    cka_of: str = "places"
    epochs: int = 10
    steps: int | None = None
    batch: int | None = None
    rate: float = 1e-3
    decay: float = 0.0
    patience: int | None = None
    every: int | None = None
    sample: int = 1000
    memory: int = 4 * 2**30
    autocast: bool = False
    seed: int = 0
    resume: Location | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            _refuse_unfit(field.name, getattr(self, field.name), field.default)
        if not callable(self.labels) and self.labels not in LOSSES:
            raise UnknownName(
                f"`labels` is 'soft', 'true' or a function (answers, own_answers, labels); got {self.labels!r}.",
                argument="labels",
            )
        if not isinstance(self.init, str):
            raise InvalidValue(
                f"`init` must name a direct method, such as 'least_squares'; got {self.init!r}.", argument="init"
            )
        find(self.start)
        if self.l1 and self.rank is not None:
            raise InvalidValue(
                f"`l1={self.l1:g}` sets single entries of the matrix to zero, which a product of two factors of "
                f"`rank={self.rank}` can't have; choose one of the two."
            )

    @classmethod
    def read(cls, how: str = NAME, options: Mapping[str, Any] | None = None) -> TaskLoss:
        """Return what `how`, such as ``"task_loss(rank=8)"``, and options by keyword request together."""
        apart, options = parse_id(how), options or {}
        if apart is None or apart[0] != NAME:
            raise UnknownName(f"{how!r} is no task loss; write {NAME!r}, or with options '{NAME}(rank=8)'.")
        known = [field.name for field in fields(cls)]
        for key in (*apart[1], *options):
            if key not in known:
                raise UnknownName(
                    f"{NAME!r} has no option {key!r}{did_you_mean(_ALSO_CALLED.get(key, key), known) or ';'} "
                    f"its options are {', '.join(known)}."
                )
        twice = sorted(apart[1].keys() & options.keys())
        if twice:
            raise InvalidValue(f"`{twice[0]}` is given twice, in {how!r} and by keyword; leave one out.")
        return cls(**apart[1], **options)

    @property
    def start(self) -> str:
        """The direct method, with its parameters, that gives the map to start from."""
        if self.init == "least_squares" and self.rank is not None:
            return f"reduced_rank(k={self.rank})"
        return with_seed(self.init, self.seed)

    @property
    def loss(self) -> TaskLossFunction:
        """The task loss as a function."""
        return self.labels if callable(self.labels) else LOSSES[self.labels]

    @property
    def looks_at_own(self) -> bool:
        """Whether training needs the second model's own answers."""
        return self.labels != "true"

    @property
    def words(self) -> str:
        """How long it trains, as text."""
        return f"{self.steps:,} steps" if self.steps is not None else f"{self.epochs:,} epochs"

    @property
    def course(self) -> dict[str, Any]:
        """The options on which the course of a training depends."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_THE_COURSE}

    def __str__(self) -> str:
        changed = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if callable(value):
                kind = getattr(value, "__qualname__", type(value).__qualname__)
                value = f"{getattr(value, '__module__', '')}.{kind}"
            changed.append(f"{field.name}={value}")
        return f"{NAME}({', '.join(changed)})" if changed else NAME

    __repr__ = __str__


def is_task_loss(how: str) -> bool:
    """Return whether `how` requests a training and not for a direct method."""
    apart = parse_id(how) if isinstance(how, str) else None
    return apart is not None and apart[0] == NAME


def _refuse_unfit(name: str, value: Any, default: Any) -> None:
    if value is None and default is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name in _COUNTS and not (number and isinstance(value, int) and value >= 1):
        raise InvalidValue(f"`{name}` must be a whole number from 1 up; got {value!r}.")
    if name in _NOT_BELOW_ZERO and not (number and 0 <= value <= _LARGEST):
        raise InvalidValue(f"`{name}` must be a number from 0 to {_LARGEST:g}; got {value!r}.")
    if name == "rate" and not (number and 0 < value <= _LARGEST):
        raise InvalidValue(f"`rate` must be above 0 and at most {_LARGEST:g}; got {value!r}.", argument="rate")
    if name == "cka_penalty" and not (number and abs(value) <= _LARGEST):
        raise InvalidValue(f"`cka_penalty` must be a number of at most {_LARGEST:g}, up or down; got {value!r}.")
    if name == "cka_of" and value not in ROWS:
        raise UnknownName(f"`cka_of` is 'places' or 'examples'; got {value!r}.")
    if name == "autocast" and not isinstance(value, bool):
        raise InvalidValue(f"`autocast` must be True or False; got {value!r}.")
    if name == "seed" and not (number and isinstance(value, int) and value >= 0):
        raise InvalidValue(f"`seed` must be a whole number from 0 up; got {value!r}.", argument="seed")


def soft(answers: Tensor, own: Tensor, labels: Any = None) -> Tensor:
    """Return the cross-entropy to the second model's soft answers, which the stitched network then imitates."""
    if len(answers) != len(own):
        raise ShapeError(
            f"the stitched network gave {len(answers)} answers and the second model {len(own)} for the same batch; a "
            "model must answer for every example."
        )
    return functional.cross_entropy(scores(answers), scores(own).softmax(1))


def true(answers: Tensor, own: Any, labels: Tensor) -> Tensor:
    """Return the cross-entropy to the true labels."""
    return functional.cross_entropy(scores(answers), labels.flatten().long())


LOSSES: dict[str, TaskLossFunction] = {"soft": soft, "true": true}


def scores(answers: Tensor) -> Tensor:
    """Return a classifier's answers as a matrix, one row an example or a place of a sequence."""
    rows = answers.flatten(0, 1) if answers.ndim == 3 else answers
    if rows.ndim != 2 or rows.shape[1] < 2:
        raise ShapeError(
            f"the second model's output has shape {tuple(answers.shape)} and is no row of scores for each example; "
            "pass a function (answers, own_answers, labels) as `labels`."
        )
    return rows


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


def refuse_unfit_labels(labels: Any, answers: Tensor | None) -> None:
    """Refuse labels that are missing or no class numbers; `answers` are some logits, which give the classes."""
    assert answers is not None
    classes = scores(answers).shape[1]
    if not isinstance(labels, Tensor):
        raise InvalidValue("labels='true' needs labels, and the data have none; give batches (inputs, labels).")
    if labels.ndim != answers.ndim - 1 or labels.is_floating_point() or labels.is_complex():
        wanted = "one for each example" if answers.ndim == 2 else "one for each place of a sequence"
        raise ShapeError(
            f"labels='true' needs class numbers, {wanted}; got labels of shape {tuple(labels.shape)} and "
            f"{labels.dtype}. Give whole numbers, or a function (answers, own_answers, labels) as `labels`."
        )
    below = (labels < 0) & (answers.ndim == 2)  # in sequences -100 marks what does not count
    outside = labels[below | (labels >= classes)]
    if len(outside):
        raise InvalidValue(
            f"labels='true' needs labels from 0 to {classes - 1}, as the second model has {classes} classes; "
            f"{len(outside):,} of {labels.numel():,} lie outside, such as {int(outside[0])}. Leave out those examples, "
            "or go by the second model's answers: labels='soft'."
        )


def cka_rows(output: Tensor, mask: Tensor | None, end: End, of: str) -> Tensor:
    """Return what the CKA penalty compares: a row a place, or a row an example, where padding counts as zero."""
    if of == "places":
        return end.rows(output, mask)
    valid = None if end.kind == "maps" else fitting_mask(mask, output)
    return (output if valid is None else output.masked_fill(~valid.unsqueeze(-1), 0)).flatten(1)


@torch.no_grad()
def shrink(optimizer: Adam, weight: Tensor, l1: float) -> None:
    """Take the proximal step of ``l1 Σ|w|`` that belongs to Adam's last step, so that entries become exactly zero.

    Adam divides the gradient of every entry by ``√v + ε``; in that metric the step shrinks the entry by
    ``rate · l1 / (√v + ε)`` (ProxGen; Yun, Lozano and Yang, NeurIPS 2021). It rests where the gradient of the task
    loss is l1 against the sign of the entry, or at most l1 where the entry is zero: at a minimum of the penalised loss.
    A plain subgradient would leave such entries to tremble about zero by the learning rate.
    """
    state, group = optimizer.state[weight], optimizer.param_groups[0]
    seen = 1 - group["betas"][1] ** float(state["step"])  # the step is counted on the CPU
    metric = (state["exp_avg_sq"] / seen).sqrt() + group["eps"]
    weight.copy_(weight.sign() * (weight.abs() - group["lr"] * l1 / metric).clamp(min=0))


@torch.no_grad()
def cut(weight: Tensor, threshold: float) -> None:
    """Set all entries below the threshold to zero."""
    weight.masked_fill_(weight.abs() < threshold, 0)


How = str | TaskLoss


@dataclass(frozen=True)
class Way:
    """One method of a sweep: its id, the direct method that gives its map, and how that is trained, if it is."""

    id: str
    start: str
    training: TaskLoss | None = None

    @property
    def identity(self) -> str:
        """The id, with the digest of a loss that is a function."""
        labels = "soft" if self.training is None else self.training.labels
        return f"{self.id}, loss {function_digest(labels)}" if callable(labels) else self.id

    @property
    def is_blind(self) -> bool:
        """Whether its map, before any training, is the same for any data."""
        return find(self.start)[0] in (identity, random)


def as_list(hows: How | Sequence[How]) -> list[How]:
    """Return methods as a list; none at all is refused."""
    found = [hows] if isinstance(hows, (str, TaskLoss)) else list(hows)
    if not found:
        raise InvalidValue("`hows` is empty; name at least one method, e.g. 'least_squares'.", argument="hows")
    return found


def find_ways(hows: How | Sequence[How], seed: int) -> tuple[Way, ...]:
    """Return the methods of a sweep, each once; one that does not exist is refused."""
    ways = {way.id: way for way in (find_way(how, seed) for how in as_list(hows))}
    if any(way.training is not None and way.training.resume is not None for way in ways.values()):
        raise InvalidValue("`resume` is for a single stitch; a sweep continues by `save`.", argument="resume")
    return tuple(ways.values())


def find_way(how: How, seed: int, options: Mapping[str, Any] | None = None) -> Way:
    """Return a method as it was requested, with `options` of a training.

    `seed` is that of what is random, unless the method names one of its own.
    """
    if isinstance(how, TaskLoss) or is_task_loss(how):
        if not isinstance(how, TaskLoss):
            own_seed = "seed" in (parse_id(how) or ("", {}))[1]
            how, options = TaskLoss.read(how, {**({} if own_seed else {"seed": seed}), **(options or {})}), {}
        for option in options or {}:
            raise InvalidValue(f"`{option}` is given as well as a `TaskLoss`; set it there.")
        return Way(str(how), how.start, how)
    find(how, others=[NAME])
    for option in options or {}:
        raise UnknownName(f"{how!r} has no option {option!r}; such options belong to 'task_loss'.")
    name, given = parse_id(how) or (how, {})
    spelled = f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})" if given else name
    return Way(spelled, with_seed(spelled, seed))
