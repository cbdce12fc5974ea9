"""Training a map on the task of the stitched network: both models stay as they are, and only the map is trained.

The first model's activations are computed once and kept if all of them fit the memory; then neither the data nor the
first model are needed again. Otherwise the data are read and both models run in every epoch. Gradients go back through
the tail of the second model, to no weight of its own. The steps are those of `netkin.training.loop`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from netkin.applications.stitching.evaluating import ActivationSimilarity, drop_padding, value_if_any
from netkin.applications.stitching.joining import LayerOutput
from netkin.applications.stitching.maps import find, with_seed
from netkin.applications.stitching.network import Stitch, Stitched
from netkin.arrays import label_tensor
from netkin.comparing.spec import declarations, option
from netkin.errors import (
    ForwardError,
    InvalidValue,
    MemoryLimit,
    ShapeError,
    UnknownName,
    did_you_mean,
    outside,
    require_at_least,
    require_listed,
)
from netkin.files import Location
from netkin.identity import (
    COMPARE,
    DataDigest,
    UnorderedDigest,
    forms_by_name,
    in_words,
    settings_digest,
    state_noted,
    weights_digest,
)
from netkin.jobs import Job
from netkin.measures import cka
from netkin.measures.kernels import batch_cka
from netkin.memory import format_bytes
from netkin.representations import batches_of, inference_mode_of, recording
from netkin.representations.hooks import leaves, main_tensor, mapped, parts, rebuilt
from netkin.representations.inputs import (
    attention_mask,
    batch_length,
    examples_at,
    feed,
    labels_of,
    loader_of,
    prepare_batch,
    reported_batches,
    sampler_of,
    take,
)
from netkin.representations.shapes import fitting_mask
from netkin.results.labels import parse_id
from netkin.settings import frozen
from netkin.sources.batches import Batches
from netkin.statistics import Moments
from netkin.training.loop import Loop, count_right
from netkin.training.recipe import Hook, Recipe
from netkin.training.saving import PartSaving

NAME = "task_loss"
NOT_THE_COURSE = ("epochs", "steps", "memory", "resume")  # may differ when a training goes on
ROWS = ("places", "examples")  # what a row is, of which the CKA is taken
TaskLossFunction = Callable[[Tensor, Any, Any], Tensor]  # (answers, the second model's own answers, labels)
ScoreRecord = dict[str, Any]
Read = Callable[[], Iterable[Any]]  # gives the batches, the same each time
JobPart = tuple[Job, str]  # a job, and the name of its part


@dataclass(frozen=True)
class TaskLoss:
    """How to train a stitch.

    What is minimised is the task loss, ``+ l1 Σ|M| + cka_penalty · CKA + weight_decay/2 (‖M‖² + ‖b‖²)``; with
    a `rank` the squares are those of both factors of M, ``‖U‖² + ‖V‖²``. The task loss is the cross-entropy to the
    second model's answers ("soft"), to the labels of the data ("true"), or a function ``loss(answers, own_answers,
    labels)`` of the stitched network's answers, the second model's own, and the labels of a batch. The CKA is that of a
    batch with the second model's own activations.

    Training takes Adam's steps from the map of the direct method `init`; least squares of a given `rank` means
    `reduced_rank`. By what is minimised the stitch is evaluated on a fixed sample. The last stitch is taken, with a
    warning if it is worse than the first; with `patience` the best one. After a training with `l1`, entries below
    `threshold` are set to zero. The options are those of `nk.stitch`, which describes them.

    Example:
        >>> TaskLoss.read("task_loss(init=procrustes, rank=8)", {"epochs": 3})
        task_loss(init=procrustes, rank=8, epochs=3)
    """

    labels: str | TaskLossFunction = option(
        "soft", '"soft" for the second model\'s answers, "true" for the labels of the data, or a function.'
    )
    init: str = option("least_squares", "the direct method to start from.")
    rank: int | None = option(None, "the rank of the map; None for a full one.")
    l1: float = option(0.0, "the weight of Σ|M|.")
    threshold: float = option(1e-4, "the size below which entries are set to zero after a training with `l1`.")
    cka_penalty: float = option(0.0, "the weight of the CKA with the second model's own activations.")
    cka_of: str = option(
        "places", 'what a row of this CKA is: of "places" a place of a map or a token, of "examples" the whole of it.'
    )
    epochs: int = option(10, "the number of rounds over the data.")
    steps: int | None = option(None, "the number of steps, in place of `epochs`.")
    batch: int | None = option(None, "how many examples a step has; None takes the data's own batches.")
    lr: float = option(1e-3, "the learning rate of Adam.")
    weight_decay: float = option(0.0, "the weight of the squares.")
    patience: int | None = option(None, "after how many evaluations without a better one the training ends.")
    every: int | None = option(None, "the number of steps between two evaluations; None: a round.")
    sample: int = option(1000, "the most examples of an evaluation.")
    memory: int = option(4 * 2**30, "the most bytes of the first model's activations that are kept.")
    autocast: bool = option(False, "whether the models run in bfloat16 where torch's autocast allows it.")
    seed: int = option(0, "the seed of the order of the examples and of a random `init`.")
    resume: Location | None = option(None, "a folder in which an interrupted training goes on.")

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("rank", "steps", "batch", "patience", "every")}
        require_at_least(
            1, epochs=self.epochs, sample=self.sample, **{k: v for k, v in counts.items() if v is not None}
        )
        require_at_least(0, memory=self.memory, seed=self.seed)
        for name in ("l1", "threshold", "weight_decay", "lr", "cka_penalty"):
            value = getattr(self, name)
            least = {"lr": " above 0", "cka_penalty": ""}.get(name, " of 0 or more")
            is_finite = isinstance(value, (int, float)) and math.isfinite(value)
            if not is_finite or (least and value < 0) or (name == "lr" and value == 0):
                raise InvalidValue(f"`{name}` must be a number{least}; got {value!r}.", argument=name, value=value)
        require_listed("cka_of", self.cka_of, ROWS)
        if not callable(self.labels) and self.labels not in LOSSES:
            raise UnknownName(
                f"`labels` is 'soft', 'true' or a function (answers, own_answers, labels); got {self.labels!r}.",
                argument="labels",
            )
        find(self.start)
        if self.l1 and self.rank is not None:
            raise InvalidValue(
                f"`l1={self.l1:g}` sets single entries of the matrix to zero, which a product of two factors of "
                f"`rank={self.rank}` can't have; choose one of the two.",
                argument="l1",
            )

    @classmethod
    def read(cls, method: str = NAME, options: Mapping[str, Any] | None = None) -> TaskLoss:
        """Return what `method`, such as ``"task_loss(rank=8)"``, and options by keyword request together."""
        apart = parse_id(method)
        if apart is None or apart[0] != NAME:
            raise UnknownName(
                f"{method!r} is no task loss; write {NAME!r}, or with options '{NAME}(rank=8)'.", argument="method"
            )
        given = {**apart[1], **(options or {})}
        for key in given:
            if key not in TRAINING:
                hint = did_you_mean(key, TRAINING) or ";"
                raise UnknownName(
                    f"{NAME!r} has no option {key!r}{hint} its options are {', '.join(TRAINING)}.", argument=key
                )
        return cls(**given)

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
        return {name: getattr(self, name) for name in TRAINING if name not in NOT_THE_COURSE}

    def __str__(self) -> str:
        changed = []
        for name, declared in TRAINING.items():
            value = getattr(self, name)
            if value == declared.default:
                continue
            if callable(value):
                kind = getattr(value, "__qualname__", type(value).__qualname__)
                value = f"{getattr(value, '__module__', '')}.{kind}"
            changed.append(f"{name}={value}")
        return f"{NAME}({', '.join(changed)})" if changed else NAME

    __repr__ = __str__


TRAINING = declarations(TaskLoss)


# --- what is minimised ------------------------------------------------------------------------------------------------


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


def require_labels(labels: Any, answers: Tensor | None) -> None:
    """Refuse labels that are missing or no class numbers; `answers` are some logits, which give the classes."""
    assert answers is not None
    classes = scores(answers).shape[1]
    if not isinstance(labels, Tensor):
        raise InvalidValue(
            "labels='true' needs labels, and the data have none; give batches (inputs, labels).", argument="labels"
        )
    if labels.ndim != answers.ndim - 1 or labels.is_floating_point() or labels.is_complex():
        wanted = "one for each example" if answers.ndim == 2 else "one for each place of a sequence"
        raise ShapeError(
            f"labels='true' needs class numbers, {wanted}; got labels of shape {tuple(labels.shape)} and "
            f"{labels.dtype}. Give whole numbers, or a function (answers, own_answers, labels) as `labels`.",
            argument="labels",
        )
    below = (labels < 0) & (answers.ndim == 2)  # in sequences -100 marks what does not count
    outside = labels[below | (labels >= classes)]
    if len(outside):
        raise InvalidValue(
            f"labels='true' needs labels from 0 to {classes - 1}, as the second model has {classes} classes; "
            f"{len(outside):,} of {labels.numel():,} lie outside, such as {int(outside[0])}. Leave out those examples, "
            "or go by the second model's answers: labels='soft'.",
            argument="labels",
        )


def cka_rows(output: Tensor, mask: Tensor | None, end: LayerOutput, of: str) -> Tensor:
    """Return what the CKA penalty compares: a row a place, or a row an example, where padding counts as zero."""
    if of == "places":
        return end.rows(output, mask)
    valid = None if end.kind == "maps" else fitting_mask(mask, output)
    return (output if valid is None else output.masked_fill(~valid.unsqueeze(-1), 0)).flatten(1)


@torch.no_grad()
def shrink(optimizer: Adam, weight: Tensor, l1: float) -> None:
    """Take the proximal step of ``l1 Σ|w|`` that belongs to Adam's last step, so that entries become exactly zero.

    Adam divides the gradient of every entry by ``√v + ε``; in that metric the step shrinks the entry by
    ``lr · l1 / (√v + ε)`` (ProxGen; Yun, Lozano and Yang, NeurIPS 2021). It rests where the gradient of the task
    loss is l1 against the sign of the entry, or at most l1 where the entry is zero: at a minimum of the penalised loss.
    A plain subgradient would leave such entries to tremble about zero by the learning rate.
    """
    state, group = optimizer.state[weight], optimizer.param_groups[0]
    seen = 1 - group["betas"][1] ** float(state["step"])  # the step is counted on the CPU
    metric = (state["exp_avg_sq"] / seen).sqrt() + group["eps"]
    weight.copy_(weight.sign() * (weight.abs() - group["lr"] * l1 / metric).clamp(min=0))


# --- the examples -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Portion:
    """Some examples: what the first model gives at its layer, and what the second gives by itself.

    None means not needed.
    """

    head: Tensor | None = None
    answers: Tensor | None = None  # the second model's own
    own: Tensor | None = None  # the second model's own activations at its layer
    labels: Any = None
    mask: Tensor | None = None  # which tokens of sequences are no padding
    batch: Any = None  # kept only where the second model needs it: it runs whole where it can't be cut

    @property
    def bytes(self) -> int:
        """How much memory the portion takes."""
        tensors = [leaf for _, leaf in leaves(self) if isinstance(leaf, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def portion(network: Stitched, batch: Any, *, head: bool = True, answers: bool = True, own: bool = True) -> Portion:
    """Return what is wanted of a batch; of the models no more runs than that needs, and nothing keeps a graph."""
    said, activations, mask = None, None, attention_mask(batch)
    if answers or own:
        network.cut()  # before hooks are in place
        with recording(network.b, [network.layer_b]) if own else nullcontext() as kept:
            said = main_tensor(feed(network.b, batch), "").clone()
        activations = None if kept is None else kept[network.layer_b]
    labels = labels_of(batch)
    plain = isinstance(labels, list) and not any(parts(one) or isinstance(one, Tensor) for one in labels)
    if plain or isinstance(labels, (Tensor, np.ndarray)):
        labels = label_tensor(labels)
    return Portion(
        head=network.begin(batch) if head else None,
        answers=said if answers else None,
        own=activations,
        labels=prepare_batch(network.b, labels),
        mask=None if mask is None else prepare_batch(network.b, torch.as_tensor(mask) != 0),
        batch=batch if network.tail.graph is None else None,
    )


def join(portions: Sequence[Any]) -> Any:
    """Return several portions, or anything alike in them, as one."""
    first = portions[0]
    if isinstance(first, (Tensor, np.ndarray)):
        shapes = [tuple(one.shape[1:]) for one in portions]
        if len(set(shapes)) > 1:
            raise ShapeError(
                f"batches of examples of different shapes, {shapes[0]} and "
                f"{next(shape for shape in shapes if shape != shapes[0])}, can't be put into other batches; leave "
                "`batch` out.",
                argument="batch",
            )
        return torch.cat([torch.as_tensor(one) for one in portions])
    if isinstance(first, list) and not any(parts(one) or isinstance(one, (Tensor, np.ndarray)) for one in first):
        return [one for part in portions for one in part]
    inside = parts(first)
    return rebuilt(first, {key: join([parts(one)[key] for one in portions]) for key in inside}) if inside else first


class InMemory:
    """All that training needs, in memory: batches as they came, or regrouped, `batch` examples each."""

    def __init__(self, portions: Sequence[Portion], seed: int, batch: int | None):
        self.portions, self.seed, self.batch = portions, seed, batch
        self.state = torch.zeros((), dtype=torch.int64)  # the number of the epoch, of which its order is a function

    def load(self, state: Tensor) -> None:
        """Let the next epoch be the one that began at `state`."""
        self.state = state.cpu()

    @property
    def per_epoch(self) -> int:
        """The number of steps in an epoch."""
        return len(self.portions) if self.batch is None else -(-len(_head(self.portions[0])) // self.batch)

    def epoch(self, skip: int = 0) -> Iterator[Portion]:
        """Yield the portions of the next epoch in its own random order, after the first `skip`."""
        number, self.state = int(self.state), self.state + 1
        mixed = np.random.SeedSequence([self.seed, number]).generate_state(1, np.uint64)[0] >> np.uint64(1)
        generator = torch.Generator().manual_seed(int(mixed))
        if self.batch is None:
            places = torch.randperm(len(self.portions), generator=generator)[skip:]
            yield from (self.portions[place] for place in places.tolist())
            return
        (whole,) = self.portions
        order = torch.randperm(len(_head(whole)), generator=generator).to(_head(whole).device)
        for index in order.split(self.batch)[skip:]:
            yield examples_at(whole, len(order), index)


@dataclass(frozen=True)
class Reread:
    """Data that are read in every epoch, in their own order, and of which portions are made anew."""

    batches: Read
    make: Callable[[Any], Portion]
    per_epoch: int

    state = torch.zeros(())  # the order is the data's own

    def load(self, state: Tensor) -> None:
        """Every epoch is alike."""

    def epoch(self, skip: int = 0) -> Iterator[Portion]:
        """Yield the portions of an epoch after the first `skip`."""
        count = skip
        for batch in islice(self.batches(), skip, self.per_epoch):
            count += 1
            yield self.make(batch)
        if count < self.per_epoch:
            raise InvalidValue(
                f"the data gave {self.per_epoch:,} batches at first and {count:,} when read again; pass data that give "
                "the same each time.",
                argument="data",
            )


class Sampling:
    """Picks at most `limit` examples, spread evenly over batches whose number is not known beforehand.

    Every `stride`-th example is picked; when they become too many every other one is let go.
    """

    def __init__(self, limit: int):
        self.limit, self.stride, self._seen = limit, 1, 0
        self._pieces: list[tuple[int, Portion]] = []  # the place of the first example, and the examples

    @property
    def portions(self) -> list[Portion]:
        """The examples picked."""
        return [piece for _, piece in self._pieces]

    def offer(self, network: Stitched, batch: Any, whole: Portion | None = None) -> None:
        """Pick from a batch, or from the `whole` of what both models make of it; else they run on what was picked."""
        length, first = batch_length(batch), -self._seen % self.stride
        if first < length:
            picked = examples_at(batch if whole is None else whole, length, slice(first, None, self.stride))
            few = portion(network, picked) if whole is None else _own_memory(picked)
            self._pieces.append((self._seen + first, few))
        self._seen += length
        while self._seen > self.limit * self.stride:
            self._thin()

    def _thin(self) -> None:
        pieces, stride, self.stride = self._pieces, self.stride, 2 * self.stride
        self._pieces = []
        for place, piece in pieces:
            first, count = int(place % self.stride != 0), len(_head(piece))
            if first < count:
                thinner = examples_at(piece, count, slice(first, None, 2))
                self._pieces.append((place + first * stride, _own_memory(thinner)))


def _head(examples: Portion) -> Tensor:
    assert examples.head is not None
    return examples.head


def _own_memory(piece: Portion) -> Portion:
    """Return a portion whose tensors are no views that hold on to what was let go."""
    return mapped(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, piece)


class BatchesDigest:
    """A digest of batches that pass: `examples` in any order, and `order` for data that give the same each time."""

    def __init__(self, data: Any):
        self.examples, self.sizes = UnorderedDigest(), list[int]()
        self._ordered = DataDigest(labels=True) if _keeps_order(data) else None

    def passing(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, and note them."""
        for batch in batches:
            length = batch_length(batch)
            self.examples.update(batch, length)
            self.sizes.append(length)
            if self._ordered is not None:
                self._ordered.update(batch, range(self._ordered.count, self._ordered.count + length))
            yield batch

    @property
    def order(self) -> str:
        """A text that changes with the order and with the sizes of the batches, empty for data that may shuffle."""
        return "" if self._ordered is None else settings_digest([self._ordered.hex, self.sizes])


def _keeps_order(data: Any) -> bool:
    """Return whether data give the same batches in the same order each time, as far as one can see from outside."""
    if isinstance(loader_of(data), DataLoader):
        return isinstance(sampler_of(data), SequentialSampler)
    if isinstance(data, Dataset):
        return not isinstance(data, IterableDataset)
    return isinstance(data, (Tensor, np.ndarray, Mapping, list, tuple, Batches))


# --- the training -----------------------------------------------------------------------------------------------------


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
            f"before; take a `lr` smaller than {settings.lr:g}, or keep the best stitch by `patience=`.",
            stacklevel=outside(),
        )
    return done


def train_stitch(
    found: Stitch, data: Any, settings: TaskLoss, validation: Any, examples: int | None, place: JobPart | None = None
) -> Stitch:
    """Return a stitch after its transformation was trained, in place, with the record of that (see `train_map`)."""
    done = train_map(found.network, data, settings, validation=validation, examples=examples, place=place)
    ended = {"steps": done.steps, "step": done.step, "stopped": done.stopped, "kept": done.kept, "final": done.final}
    origin = {**found.provenance, "data digest": done.data}
    return replace(found, examples=done.examples, history=done.history, training=ended, provenance=origin)


def _trained(
    network: Stitched, data: Any, settings: TaskLoss, validation: Any, examples: int | None, place: JobPart | None
) -> Training:
    digests = {"data": BatchesDigest(data), "validation data": BatchesDigest(validation)}
    read, sampling = partial(batches_of, data, examples), Sampling(settings.sample)
    first = reported_batches(data, examples, "gathering")
    batches = digests["data"].passing(first if settings.looks_at_own else _with_fit_labels(network, first))
    course, kept = _course(network, batches, read, settings, sampling if validation is None else None)
    if validation is not None:
        for batch in digests["validation data"].passing(batches_of(validation)):
            sampling.offer(network, batch)
    recipe = Recipe(
        epochs=None if settings.steps else settings.epochs, steps=settings.steps, optimizer="adam", lr=settings.lr,
        weight_decay=settings.weight_decay, precision="bf16" if settings.autocast else "float32",
    )  # fmt: skip
    hook = ScoresAndPatience(network, sampling.portions, settings, course.per_epoch)
    loop = Loop(network.transformation, course, recipe, hook.objective, [hook], seed=settings.seed, every=hook.every)
    with _saving(network, course.per_epoch, settings, digests, place) as saving, torch.enable_grad():
        loop.run(saving)
        saving.tell(loop.step, loop.step)  # patience may have ended it early
    stopped = hook.should_stop(loop.step)
    if settings.patience is not None:
        network.transformation.load_state_dict(hook.best)
    with torch.no_grad():
        for weight in hook.shrinking if settings.l1 else []:
            weight.masked_fill_(weight.abs() < settings.threshold, 0)
    step = loop.step if settings.patience is None else hook.best_step
    final = {"step": step, **hook.scores("in the end")}
    found = digests["data"].examples
    return Training(tuple(hook.history), final, loop.step, step, stopped, kept, found.count, str(found))


def _with_fit_labels(network: Stitched, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; labels that are missing, or no classes of the second model, are refused."""
    few = None
    for batch in batches:
        few = portion(network, take(batch, 1), head=False, own=False).answers if few is None else few
        require_labels(portion(network, batch, head=False, answers=False, own=False).labels, few)
        yield batch


def _course(
    network: Stitched, batches: Iterable[Any], read: Read, settings: TaskLoss, sampling: Sampling | None
) -> tuple[InMemory | Reread, str]:
    """Return what training reads in every epoch, from a first pass over the `batches`, and what is kept in words.

    `read` gives the batches again. `sampling`, where there is one, picks its examples on the way, out of what is
    computed anyhow if that is enough.
    """
    kept, size, steps, seen, penalised = list[Portion](), 0, 0, 0, bool(settings.cka_penalty)
    for batch in batches:
        steps, seen, one = steps + 1, seen + batch_length(batch), None
        if size <= settings.memory:
            own = penalised or (sampling is not None and settings.looks_at_own)
            one = portion(network, batch, answers=settings.looks_at_own, own=own)
            kept.append(one if penalised else replace(one, own=None))
            size += kept[-1].bytes
        if sampling is not None:
            complete = one is not None and one.answers is not None and one.own is not None
            sampling.offer(network, batch, one if complete else None)
        if size > settings.memory:
            kept.clear()
    limit = format_bytes(settings.memory)
    if kept:
        words = (
            f"activations of the first model on {seen:,} examples kept in memory ({format_bytes(size)} of at most "
            f"{limit}): after one pass it is needed no more, nor are the data"
        )
        return InMemory(kept if settings.batch is None else [join(kept)], settings.seed, settings.batch), words
    if settings.batch is not None:
        raise MemoryLimit(
            f"`batch={settings.batch}` makes other batches of the examples, for which the first model's activations "
            f"must be in memory, and they need more than `memory={settings.memory}` bytes; leave `batch` out, or allow "
            "more.",
            argument="memory",
        )
    make = partial(portion, network, answers=settings.looks_at_own, own=penalised)
    words = (
        f"activations of the first model not kept, as they need more than {limit}: the data are read and the first "
        "model runs in every epoch, in the data's own order"
    )
    return Reread(read, make, steps), words


@contextmanager
def _saving(
    network: Stitched, per_epoch: int, settings: TaskLoss, digests: Mapping[str, BatchesDigest], place: JobPart | None
) -> Iterator[PartSaving]:
    """Yield where the training's state is kept: as a part of the sweep's job, or in a job of its own."""
    if settings.resume is None:
        yield PartSaving(*(place or ()))
        return
    models = {"first": network.a, "second": network.b}
    identity = {name: in_words(value) for name, value in settings.course.items()} | {
        "layers": f"{network.layer_a!r} into {network.layer_b!r}",
        "batches": f"{per_epoch:,} an epoch",
        "forms of the activations": network.transformation.adapter.words or "none",
        **{f"weights of the {name} model": weights_digest(model) for name, model in models.items()},
        **{name: str(digest.examples) for name, digest in digests.items()},
        "order of the examples": f"digest {digests['data'].order}",
        "order of the validation examples": f"digest {digests['validation data'].order}",
        "architecture": forms_by_name(models),
    }
    job = Job(settings.resume, "training", identity, call=str(settings), compare=COMPARE)
    with job, state_noted(job, models):
        yield PartSaving(job, "standing", is_whole=True)


class ScoresAndPatience(Hook):
    """Scores the stitch on a sample every so many steps, keeps the best one, and ends a training without progress."""

    def __init__(self, network: Stitched, sample: Sequence[Portion], settings: TaskLoss, per_epoch: int):
        self.network, self.sample, self.settings, self.per_epoch = network, sample, settings, per_epoch
        self.total, self.every = settings.steps or settings.epochs * per_epoch, settings.every or per_epoch
        self.best, self.best_step, self.records_since_best = _weights(network), 0, 0
        self.losses: list[Tensor] = []  # of the steps since the last record, never waited for before the next
        before = {"step": 0, "epoch": 0.0, "training_loss": None}
        self.history: list[ScoreRecord] = [before | self.scores("before training")]

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer: Any = optimizer
        # all but the shift, which no penalty draws to zero
        self.shrinking = [weight for weight in model.parameters() if weight is not self.network.transformation.shift]

    def objective(self, examples: Portion, step: int) -> Tensor:
        """Return what is minimised on a portion of the examples."""
        value = objective(self.network, examples, self.settings)
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
        return {name: getattr(self, name) for name in ("best", "best_step", "records_since_best", "history")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)

    def _score(self, step: int) -> None:
        losses, self.losses = torch.stack(self.losses), []
        bad = (~torch.isfinite(losses)).nonzero()
        if len(bad):
            raise ForwardError(
                f"training came to NaN or Inf at step {step - len(losses) + 1 + int(bad[0]):,} of {self.total:,} with "
                f"`lr={self.settings.lr:g}`; the transformation is as it was before. Take a smaller `lr`."
            )
        record = self.scores(f"at step {step}")
        best = next(record for record in self.history if record["step"] == self.best_step)
        if record["objective"] < best["objective"]:
            self.best, self.best_step, self.records_since_best = _weights(self.network), step, 0
        else:
            self.records_since_best += 1
        passed = {"step": step, "epoch": step / self.per_epoch, "training_loss": float(losses.mean())}
        self.history.append(passed | record)

    def scores(self, when: str) -> ScoreRecord:
        """Return the scores of the stitch on the sample, and what is minimised."""
        settings, transformation = self.settings, self.network.transformation
        record = sample_scores(self.network, self.sample, settings.loss, settings.cka_of)
        similarity = record["cka" if settings.cka_of == "places" else "cka_of_examples"] or 0.0
        size = sum(float(weight.detach().square().sum()) for weight in transformation.parameters())
        entries = float(transformation.matrix.abs().sum()) if settings.l1 else 0.0
        total = (
            record["loss"]
            + settings.l1 * entries
            + settings.cka_penalty * similarity
            + settings.weight_decay / 2 * size
        )
        if not math.isfinite(total):
            raise ForwardError(
                f"the stitched network gives NaN or Inf on the sample {when}; test both models on these data "
                "first, or take another `init`, or a smaller `lr`."
            )
        return {"loss": record.pop("loss"), "objective": total, **record}


def objective(network: Stitched, examples: Portion, settings: TaskLoss) -> Tensor:
    """Return what training minimises: the task loss and the CKA penalty of a portion.

    Weight decay is no part of it, as Adam adds it by itself, nor the L1 penalty: `shrink` takes its step after Adam's.
    """
    transformed = network.transformation(examples.head)
    penalised = bool(settings.cka_penalty)
    # the tail may begin with a step in place
    answers = main_tensor(network.finish(transformed.clone() if penalised else transformed, examples.batch), "")
    value = settings.loss(*drop_padding(answers, examples.answers, examples.labels, examples.mask))
    if penalised:
        assert examples.own is not None
        end = network.transformation.adapter.b
        both = (cka_rows(side, examples.mask, end, settings.cka_of) for side in (transformed, examples.own))
        value = value + settings.cka_penalty * batch_cka(*both)
    return value


@torch.no_grad()
def sample_scores(
    network: Stitched, sample: Sequence[Portion], loss: TaskLossFunction, cka_of: str = "places"
) -> ScoreRecord:
    """Return loss, accuracy, agreement with the second model, and the similarity of the activations at the joint.

    None stands where the sample has no labels, the answers are no scores, or the activations do not vary. All
    similarities are place by place; with ``cka_of="examples"`` there is `cka_of_examples` too.
    """
    end, total, count = network.transformation.adapter.b, 0.0, 0
    similarity = ActivationSimilarity(end)
    whole = list[list[Tensor]]()  # activations of both sides, a row an example
    right, same = list[tuple[Tensor, Any]](), list[tuple[Tensor, Any]]()  # answers, and the classes wanted
    for one in sample:
        assert one.own is not None
        transformed = network.transformation(one.head)
        similarity.update(transformed, one.own, one.mask)
        if cka_of == "examples":
            whole.append([cka_rows(side, one.mask, end, cka_of) for side in (transformed, one.own)])
        answers = main_tensor(network.finish(transformed.clone(), one.batch), "")
        answers, own, labels = drop_padding(answers, one.answers, one.labels, one.mask)
        value = loss(answers, own, labels)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(f"the loss given as `labels` must return one number as a tensor; got {got}.")
        total, count = total + float(value) * len(answers), count + len(answers)
        if answers.ndim in (2, 3) and answers.shape[-1] > 1:
            same.append((answers, own.argmax(-1)))
            right.append((answers, labels))
    found = {"loss": total / count, "accuracy": _share(right), "agreement": _share(same), **similarity.values()}
    if cka_of == "examples":
        X, Y = (_together(side, end) for side in zip(*whole, strict=True))
        found["cka_of_examples"] = value_if_any(lambda: cka(Moments.of(X, Y, None)))
    return found


def _share(pairs: Sequence[tuple[Tensor, Any]]) -> float | None:
    """Return the share of answers that are as wanted; None where some can't be compared."""
    right = seen = 0
    for answers, wanted in pairs:
        rows = answers.flatten(0, -2)
        if not isinstance(wanted, Tensor) or wanted.is_floating_point() or wanted.numel() != len(rows):
            return None
        some, of = count_right(rows, wanted.flatten())
        right, seen = right + int(some), seen + int(of)
    return right / seen if seen else None


def _together(sides: Sequence[Tensor], end: LayerOutput) -> Tensor:
    """Return rows of several portions as one matrix; shorter sequences end in zeros, as padding does."""
    least, most = (chosen(part.shape[1] for part in sides) for chosen in (min, max))
    if least != most and end.kind == "maps":
        raise ShapeError(
            f"cka_of='examples' compares whole maps, which must have one size; got {least:,} and {most:,} values an "
            "example. Give inputs of one size, or take cka_of='places'."
        )
    return torch.cat([functional.pad(part, (0, most - part.shape[1])) for part in sides])


def _weights(network: Stitched) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.transformation.state_dict().items()}
