"""`TaskLoss`: how a stitch is trained on what the stitched network can do, all options in one record.

Written as measures are, ``"task_loss(init=procrustes, rank=8)"``, it means the same in Python and on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from netkin.applications.stitching.losses import ROWS, Loss, loss_named
from netkin.applications.stitching.matching import find, seeded
from netkin.errors import UnknownName, ValueFault, did_you_mean
from netkin.files import Location
from netkin.results.labels import taken_apart

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


@dataclass(frozen=True)
class TaskLoss:
    """How to train a stitch.

    What is minimised is the task loss, ``+ l1 Σ|M| + cka_penalty · CKA + decay/2 (‖M‖² + ‖b‖²)``; with a `rank` the
    decay is that of both factors of M in its place, ``‖U‖² + ‖V‖²``. `labels` are the second model's answers ("soft"),
    those of the data ("true"), or a function ``loss(answers, own_answers, labels)`` of the stitched network's answers,
    the second model's own, and the labels of a batch. The CKA is that of a batch with the second model's own
    activations, a row being a place of a map or a token; with ``cka_of="examples"`` a whole map or sequence.

    `init` is a direct method; least squares of a given `rank` means `reduced_rank`. Training takes `steps`, or else
    `epochs` rounds, of Adam at learning rate `rate`, on the batches that the data come in unless `batch` asks for
    others. `every` so many steps (None: once a round) the stitch is judged on a fixed sample of at most `sample`
    examples, by what is minimised. The last stitch is taken, with a warning if it is worse than the first; with
    `patience` the best one is, and training ends after so many judgements without a better one. After a training with
    `l1`, entries below `threshold` are set to zero. Up to `memory` bytes of the first model's activations are kept.
    With `resume`, a folder, an interrupted training of the same models on the same data goes on where it was.

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

    labels: str | Loss = "soft"
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
        loss_named(self.labels)
        if not isinstance(self.init, str):
            raise ValueFault(f"`init` must name a direct method, such as 'least_squares'; got {self.init!r}.")
        find(self.start)
        if self.l1 and self.rank is not None:
            raise ValueFault(
                f"`l1={self.l1:g}` sets single entries of the matrix to zero, which a product of two factors of "
                f"`rank={self.rank}` can't have; choose one of the two."
            )

    @classmethod
    def read(cls, how: str = NAME, options: Mapping[str, Any] | None = None) -> TaskLoss:
        """Return what `how`, such as ``"task_loss(rank=8)"``, and options by keyword ask for together."""
        apart, options = taken_apart(how), options or {}
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
            raise ValueFault(f"`{twice[0]}` is given twice, in {how!r} and by keyword; leave one out.")
        return cls(**apart[1], **options)

    @property
    def start(self) -> str:
        """The direct method, with its parameters, that gives the map to start from."""
        if self.init == "least_squares" and self.rank is not None:
            return f"reduced_rank(k={self.rank})"
        return seeded(self.init, self.seed)

    @property
    def loss(self) -> Loss:
        """The task loss as a function."""
        return loss_named(self.labels)

    @property
    def looks_at_own(self) -> bool:
        """Whether training needs the second model's own answers."""
        return self.labels != "true"

    @property
    def course(self) -> dict[str, Any]:
        """The options on which the course of a training depends."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_THE_COURSE}

    def __str__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = [f"{f.name}={_as_setting(given[f.name])}" for f in fields(self) if given[f.name] != f.default]
        return f"{NAME}({', '.join(changed)})" if changed else NAME

    __repr__ = __str__


def is_task_loss(how: str) -> bool:
    """Tell whether `how` asks for a training and not for a direct method."""
    apart = taken_apart(how) if isinstance(how, str) else None
    return apart is not None and apart[0] == NAME


def _refuse_unfit(name: str, value: Any, default: Any) -> None:
    if value is None and default is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name in _COUNTS and not (number and isinstance(value, int) and value >= 1):
        raise ValueFault(f"`{name}` must be a whole number from 1 up; got {value!r}.")
    if name in _NOT_BELOW_ZERO and not (number and 0 <= value <= _LARGEST):
        raise ValueFault(f"`{name}` must be a number from 0 to {_LARGEST:g}; got {value!r}.")
    if name == "rate" and not (number and 0 < value <= _LARGEST):
        raise ValueFault(f"`rate` must be above 0 and at most {_LARGEST:g}; got {value!r}.")
    if name == "cka_penalty" and not (number and abs(value) <= _LARGEST):
        raise ValueFault(f"`cka_penalty` must be a number of at most {_LARGEST:g}, up or down; got {value!r}.")
    if name == "cka_of" and value not in ROWS:
        raise UnknownName(f"`cka_of` is 'places' or 'examples'; got {value!r}.")
    if name == "autocast" and not isinstance(value, bool):
        raise ValueFault(f"`autocast` must be True or False; got {value!r}.")
    if name == "seed" and not (number and isinstance(value, int) and value >= 0):
        raise ValueFault(f"`seed` must be a whole number from 0 up; got {value!r}.")


def _as_setting(value: Any) -> Any:
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value
