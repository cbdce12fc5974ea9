"""`Stream`: models run on data, batch by batch; what they give for the same examples is a `Batch`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import all_finite, require_finite
from netkin.comparing.alignment import ONE_ROW, size_of_layer
from netkin.comparing.feed import Feed
from netkin.comparing.sides import Reads, Side
from netkin.errors import InvalidValue, ShapeError, blame
from netkin.identity.data import contents
from netkin.representations.activations import Recorded
from netkin.representations.gradients import Target, logits_of
from netkin.representations.inputs import labels_of
from netkin.settings import exact_matrix_products
from netkin.statistics.collector import Key, LayerSize, name_of

Reduce = Callable[[Key, Tensor, Tensor | None, np.ndarray], Any]


class KeptLayer(NamedTuple):
    """What is kept of one layer's rows until the batch is folded in."""

    rows: Tensor | None
    reduced: tuple[Any, ...] = ()  # by the collectors that reduce, in their order
    witness: Tensor | None = None  # a number that is finite if the rows are; None where the rows are there themselves
    length: int = 0


class Doubt:
    """Whether a batch may hold NaN or Inf, and how to find them: `settle` refuses it if it does.

    On a GPU the answer is sent when the batch is made, and waited for one batch later.
    """

    def __init__(self, fine: Tensor, locate: Callable[[], None]):
        self._fine, self._locate, self._sent, self.waits = fine, locate, None, fine.is_cuda  # type: Any, Any, Any, bool
        if self.waits:  # asked for later, it would wait for all that the device has been given until then
            self._fine = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(fine, non_blocking=True)
            self._sent = torch.cuda.current_stream(fine.device).record_event()

    def settle(self) -> None:
        """Look for NaN and Inf where there is a doubt."""
        if self._sent is not None:
            self._sent.synchronize()
        if not bool(self._fine):
            self._locate()


@dataclass(frozen=True)
class Batch:
    """What one step of the data gives, of the same examples for all its layers.

    Args:
        numbers: those of the examples, by which they are known in every part of the data.
        layers: what is kept of each layer.
        doubt: whether NaN or Inf may be among them.
        count: how many examples it adds; where models have data of their own, one batch for each adds its own.
        valid: which tokens of each example the rows are, of layers whose examples have different numbers of them.
        gradients: at the layers, by the loss.
        outputs: logits and labels by model.
        hashes: of what the examples are, by model.
        content: what the digest of the data is taken of; None where another batch of this step has it.
        owns_rows: whether nothing else will change the rows.
    """

    numbers: np.ndarray
    layers: Mapping[Key, KeptLayer]
    doubt: Doubt
    count: int
    valid: Mapping[Key, Tensor] = field(default_factory=dict)
    gradients: Mapping[Target, Mapping[Key, Tensor]] = field(default_factory=dict)
    outputs: Mapping[str, tuple[Tensor, Any]] = field(default_factory=dict)
    hashes: Mapping[str, np.ndarray] = field(default_factory=dict)
    content: Any = None
    owns_rows: bool = False


def make_batch(
    layers: Mapping[Key, KeptLayer],
    sizes: Mapping[Key, LayerSize],
    known: int | None,
    numbers: Callable[[int], np.ndarray],
    locate: Callable[[], None],
    *,
    gradients: Mapping[Target, Mapping[Key, Tensor]] | None = None,
    outputs: Mapping[str, tuple[Tensor, Any]] | None = None,
    **others: Any,
) -> Batch:
    """Return a batch of what layers gave, which must be for the same examples; here alone NaN and Inf are looked for.

    Args:
        layers: what is kept of each layer.
        sizes: what is known of the layers.
        known: the number of examples, if it is known.
        numbers: returns the numbers of so many examples.
        locate: refuses the batch if NaN or Inf are in it, naming the layer.
        gradients: at the layers, by the loss.
        outputs: logits and labels by model.
        **others: further fields of the batch.
    """
    gradients, outputs = gradients or {}, outputs or {}
    looked_at = [kept.rows if kept.witness is None else kept.witness for kept in layers.values()]
    looked_at += [rows for at_layers in gradients.values() for rows in at_layers.values()]
    looked_at += [logits for logits, _ in outputs.values()]
    doubt = Doubt(all_finite(rows for rows in looked_at if rows is not None), locate)
    if not doubt.waits:
        doubt.settle()
    count = _examples_in(layers, sizes, known)
    _refuse_unpaired_tokens(others.get("valid") or {}, sizes)
    return Batch(numbers(count), layers, doubt, **{"count": count} | others, gradients=gradients, outputs=outputs)


def _examples_in(layers: Mapping[Key, KeptLayer], sizes: Mapping[Key, LayerSize], known: int | None) -> int:
    """Return the number of examples in a batch, which all models must have kept."""
    single = {key: kept.length for key, kept in layers.items() if sizes[key].shape in ONE_ROW}
    if len(set(single.values())) > 1:
        (a, n), (b, m) = min(single.items(), key=lambda one: one[1]), max(single.items(), key=lambda one: one[1])
        raise ShapeError(
            f"layer {name_of(a)!r} gave {n:,} rows and layer {name_of(b)!r} {m:,} for the same batch; models and "
            "transforms must keep every example."
        )
    return next(iter(single.values()), None) or known or min(kept.length for kept in layers.values())


def _refuse_unpaired_tokens(valid: Mapping[Key, Tensor], sizes: Mapping[Key, LayerSize]) -> None:
    """Refuse masks by which as many rows belong to other examples, which would be paired by their order alone."""
    masks = list({id(mask): (key, mask) for key, mask in valid.items()}.values())
    for (a, one), (b, other) in combinations(masks, 2):
        counts = [mask.sum(1).cpu() for mask in (one, other)]
        if int(counts[0].sum()) == int(counts[1].sum()) and not torch.equal(*counts):
            raise ShapeError(
                f"layers {name_of(a)!r} and {name_of(b)!r} gave as many tokens for a batch and not for each of its "
                "examples, so that they do not pair; use a shape with one row an example, such as 'mean'."
            )


class Stream:
    """Some models, run on their data side by side: iterate it for its batches, inside ``with stream.open():``.

    Args:
        sides: the models, or what stands for them.
        feed: their data.
        reduce: makes of (layer, rows, which tokens they are or None, numbers of the examples) what is kept of the rows.
        targets: the losses whose gradients are taken.
        outputs: whether outputs of the models are wanted.
        hashes: whether examples are known by their content.
        resizes: whether feature maps may be averaged down to the size of others.
    """

    def __init__(
        self,
        sides: Sequence[Side],
        feed: Feed,
        reduce: Reduce | None = None,
        *,
        targets: Sequence[Target] = (),
        outputs: bool = False,
        hashes: bool = False,
        resizes: bool = False,
    ):
        self.sides, self.feed, self.sizes = sides, feed, dict[Key, LayerSize]()
        self.batch_length = 0  # examples in the first batch
        self._reduce, self._targets, self._outputs, self._hashes = reduce, targets, outputs, hashes
        self._resizes, self._batches, self.first = resizes, 0, None  # type: bool, int, Any
        self._steps: Iterator[Mapping[Side, Any]] = iter(())
        self._numbers = np.arange(0)  # of the examples that run
        self._searching: int | None = None  # the batch that is run again to find NaN and Inf
        self._seen: Counter[str] = Counter()  # examples of each model
        self._owns_rows = all(side.owns_rows for side in sides)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let the models run while the `with` lasts; they are left as they were."""
        reads = Reads(self._keep if self._reduce is not None else None, self._targets, self._outputs)
        with ExitStack() as stack:
            for side in self.sides:
                stack.enter_context(side.open(reads))
            yield

    def learn(self) -> dict[Key, LayerSize]:
        """Return the layers as few examples of the first batch show them."""
        self._steps = iter(self.feed)
        self.first = next(self._steps)
        self.batch_length = next((side.length(batch) for side, batch in self.first.items()), None) or 1
        for side, batch in self.first.items():
            try:
                facts = side.learn(batch)
            except Exception as fault:
                self._blame(fault, side, batch, 0)
                raise
            count = side.length(batch) or 1
            for layer, one in facts.items():
                size = size_of_layer(side.name, layer, one, self._resizes)
                # where they are not paired, batches may differ in size; what matters is how many rows an example has
                examples = count if self.feed.paired else 1
                rows = max(size.rows * examples // one.examples, 1)
                self.sizes[size.key] = replace(size, rows=rows, examples=examples)
        return self.sizes

    def __iter__(self) -> Iterator[Batch]:
        step, self.first = self.first, None
        while step is not None:
            yield from self._batch_of(step)
            self._batches += 1
            step = next(self._steps, None)

    def _batch_of(self, step: Mapping[Side, Any]) -> Iterator[Batch]:
        """Yield the batch of a step, or one for each model where nothing pairs their examples."""
        if self.feed.paired:
            yield self._made(step, self.feed.known, content_of(step))
            return
        counted = set[int]()
        for side, batch in step.items():
            is_new = id(batch) not in counted
            counted.add(id(batch))
            length = side.length(batch) or 0
            content = batch if is_new and self.feed.is_one else None
            yield self._made({side: batch}, length, content, count=length if is_new else 0)

    def _made(self, step: Mapping[Side, Any], known: int | None, content: Any, **others: Any) -> Batch:
        first = next(iter(step))
        numbers = partial(self.feed.numbers, first, self._seen[first.name])
        self._numbers = numbers(known or 0)
        recorded: dict[Side, Recorded] = {}
        for side, batch in step.items():
            try:
                recorded[side] = side.read(batch)
            except Exception as fault:
                self._blame(fault, side, batch, self._batches)
                raise
        layers, valid = dict[Key, KeptLayer](), dict[Key, Tensor]()
        gradients: dict[Target, dict[Key, Tensor]] = {target: {} for target in self._targets}
        for side, own in recorded.items():
            for layer, kept in own.rows.items():
                layers[side.name, layer] = kept if isinstance(kept, KeptLayer) else KeptLayer(kept, length=len(kept))
            valid |= {(side.name, layer): mask for layer, mask in own.valid.items()}
            for target, rows in own.gradients.items():
                gradients[target] |= {(side.name, layer): gradient for layer, gradient in rows.items()}
        batch = make_batch(
            layers, self.sizes, known, numbers, partial(self._locate, step, self._batches), gradients=gradients,
            outputs={side.name: self._logits(side, own, step[side]) for side, own in recorded.items()}
            if self._outputs else {},
            valid=valid, hashes=self._hashes_of(step) if self._hashes else {}, owns_rows=self._owns_rows,
            content=None if known is None else content, **others,
        )  # fmt: skip
        for side in step:
            self._seen[side.name] += len(batch.numbers)
        return batch

    def _logits(self, side: Side, recorded: Recorded, batch: Any) -> tuple[Tensor, Any]:
        return logits_of(recorded.output).detach(), labels_of(batch)

    def _hashes_of(self, step: Mapping[Side, Any]) -> dict[str, np.ndarray]:
        lengths = {side: side.length(batch) for side, batch in step.items() if side.has_content}
        return {
            side.name: contents(side.content(step[side]), length).cpu().numpy()
            for side, length in lengths.items()
            if length is not None
        }

    def _keep(self, model: str, layer: str, rows: Tensor, valid: Tensor | None) -> Any:
        """Return what is kept of a layer's rows, which has just run."""
        assert self._reduce is not None
        if self._searching is not None:
            require_finite(rows, _where(layer, model, self._searching))
        try:
            with exact_matrix_products():
                return self._reduce((model, layer), rows, valid, self._numbers)
        except InvalidValue:
            require_finite(rows, _where(layer, model, self._batches))
            raise

    # --- NaN and Inf --------------------------------------------------------------------------------------------------

    def _locate(self, step: Mapping[Side, Any], number: int) -> None:
        """Run a batch again, and refuse NaN and Inf with the name of their layer."""
        self._searching = number
        try:
            for side, batch in step.items():
                try:
                    self._refuse_non_finite(side, batch, number)
                except Exception as fault:
                    self._blame(fault, side, batch, number)
                    raise
        finally:
            self._searching = None

    def _refuse_non_finite(self, side: Side, batch: Any, number: int) -> None:
        recorded = side.read(batch)
        for layer, rows in recorded.rows.items():
            if isinstance(rows, Tensor):
                require_finite(rows, _where(layer, side.name, number))
        for at_layers in recorded.gradients.values():
            for layer, rows in at_layers.items():
                require_finite(rows, f"the gradient at {_where(layer, side.name, number)}")
        if self._outputs:
            require_finite(self._logits(side, recorded, batch)[0], f"the output of {side.name!r} in batch {number}")

    def _blame(self, fault: Exception, side: Side, batch: Any, number: int) -> None:
        """Give a fault the name of its model; NaN and Inf that were in the inputs are no fault of a layer."""
        blame(fault, side.name)
        if isinstance(fault, InvalidValue):
            side.require_finite_inputs(batch, number)


def content_of(batches: Mapping[Side, Any]) -> Any:
    """Return what of the batches of all sides the digest of the data is taken of, each thing once."""
    every = [side.content(own) for side, own in batches.items()]
    apart = list({id(content): content for content in every}.values())
    return apart[0] if len(apart) == 1 else {f"data {place}": content for place, content in enumerate(apart)}


def _where(layer: str, model: str, number: int) -> str:
    return f"layer {layer!r} of {model!r} in batch {number}"
