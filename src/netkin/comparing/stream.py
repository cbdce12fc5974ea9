"""`Stream`: models run on data, batch by batch; what they give for the same examples is a `Batch`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import all_finite, require_finite
from netkin.comparing.alignment import ONE_ROW, size_of_layer
from netkin.comparing.feed import Feed
from netkin.comparing.sides import Reads, RecordedSide, Side
from netkin.errors import InvalidValue, ShapeError, blame
from netkin.identity.data import contents
from netkin.representations.gradients import Target, logits_of
from netkin.representations.inputs import labels_of
from netkin.settings import exact_matrix_products
from netkin.statistics.collector import Key, LayerSize, name_of

NOTHING: Mapping[Any, Any] = MappingProxyType({})


class KeptLayer(NamedTuple):
    """What is kept of one layer's rows until the batch is folded in."""

    rows: Tensor | None
    reduced: tuple[Any, ...] = ()  # by the collectors that reduce, in their order
    witness: Tensor | None = None  # a number that is finite if the rows are; None where the rows are there themselves
    length: int = 0


class Doubt:
    """Whether a batch on a GPU may hold NaN or Inf: the answer is sent when the batch is made, and read one later."""

    def __init__(self, finite: Tensor, locate: Callable[[], None]):
        self._locate = locate
        self._finite = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
        # asked for later, the answer would wait for all that the device has been given until then
        self._sent = torch.cuda.current_stream(finite.device).record_event()

    def require_finite(self) -> None:
        """Refuse the batch if it holds NaN or Inf."""
        self._sent.synchronize()
        if not bool(self._finite):
            self._locate()


@dataclass(frozen=True)
class Batch:
    """What one step of the data gives, of the same examples for all its layers.

    Args:
        numbers: those of the examples, by which they are known in every part of the data.
        layers: what is kept of each layer.
        doubt: whether NaN or Inf may be among them; None where there are none.
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
    doubt: Doubt | None
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
    valid: Mapping[Key, Tensor] = NOTHING,
    gradients: Mapping[Target, Mapping[Key, Tensor]] = NOTHING,
    outputs: Mapping[str, tuple[Tensor, Any]] = NOTHING,
    **fields: Any,
) -> Batch:
    """Return a batch of what layers gave, which must be for the same examples; here alone NaN and Inf are looked for.

    Args:
        layers: what is kept of each layer.
        sizes: what is known of the layers.
        known: the number of examples, if it is known.
        numbers: returns the numbers of so many examples.
        locate: refuses the batch if NaN or Inf are in it, naming the layer.
        valid: which tokens of each example the rows are.
        gradients: at the layers, by the loss.
        outputs: logits and labels by model.
        **fields: further fields of the batch.
    """
    for key, kept in layers.items():
        if not kept.length and sizes[key].kind == "tokens":
            raise InvalidValue(
                f"layer {name_of(key)!r} gave no token for a batch ({sizes[key].shape}): all its sequences are shorter "
                "or masked; leave them out, or take larger batches.",
                argument="positions",
            )
    watched = [kept.rows if kept.witness is None else kept.witness for kept in layers.values()]
    watched += [rows for at_layers in gradients.values() for rows in at_layers.values()]
    watched += [logits for logits, _ in outputs.values()]
    finite = all_finite(rows for rows in watched if rows is not None)
    doubt = Doubt(finite, locate) if finite.is_cuda else None
    if doubt is None and not bool(finite):
        locate()
    lengths = {key: kept.length for key, kept in layers.items() if sizes[key].kind in ONE_ROW}
    if len(set(lengths.values())) > 1:
        (a, n), (b, m) = (extreme(lengths.items(), key=lambda item: item[1]) for extreme in (min, max))
        raise ShapeError(
            f"layer {name_of(a)!r} gave {n:,} rows and layer {name_of(b)!r} {m:,} for the same batch; models and "
            "transforms must keep every example."
        )
    count = next(iter(lengths.values()), None) or known or min(kept.length for kept in layers.values())
    if valid:
        _require_paired_tokens(valid)
    return Batch(
        numbers(count), layers, doubt, **{"count": count} | fields, valid=valid, gradients=gradients, outputs=outputs
    )


def _require_paired_tokens(valid: Mapping[Key, Tensor]) -> None:
    """Refuse masks by which as many rows belong to other examples, which would be paired by their order alone."""
    masks = list({id(mask): (key, mask) for key, mask in valid.items()}.values())
    for (a, mask), (b, other) in combinations(masks, 2):
        counts = mask.sum(1).cpu(), other.sum(1).cpu()
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
        reads: what is read of each model.
    """

    def __init__(self, sides: Sequence[Side], feed: Feed, reads: Reads):
        self.sides, self.feed, self.reads, self.sizes = sides, feed, reads, dict[Key, LayerSize]()
        self.batch_length = 0  # examples in the first batch
        self.first: Any = None  # batches by side, which the models have not run on yet
        self._batches, self._steps = 0, iter(feed)
        self._numbers = np.arange(0)  # of the examples that run
        self._searched: int | None = None  # the batch that is run again to find NaN and Inf
        self._seen: Counter[str] = Counter()  # examples of each model
        self._owns_rows = all(side.owns_rows for side in sides)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let the models run while the `with` lasts; they are left as they were."""
        reads = replace(self.reads, reduce=self._keep if self.reads.reduce is not None else None)
        with ExitStack() as stack:
            for side in self.sides:
                stack.enter_context(side.open(reads))
            yield

    def learn(self) -> dict[Key, LayerSize]:
        """Return the layers as few examples of the first batch show them."""
        self.first = next(self._steps)
        self.batch_length = next((side.length(batch) for side, batch in self.first.items()), None) or 1
        for side, batch in self.first.items():
            try:
                facts = side.learn(batch)
            except Exception as fault:
                self._blame(fault, side, batch, 0)
                raise
            count = side.length(batch) or 1
            for layer, fact in facts.items():
                size = size_of_layer(side.name, layer, fact, self.reads.resizes)
                # where they are not paired, batches may differ in size; what matters is how many rows an example has
                examples = count if self.feed.paired else 1
                rows = max(size.rows * examples // fact.examples, 1)
                self.sizes[size.key] = replace(size, rows=rows, examples=examples)
        return self.sizes

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batch of each step; where nothing pairs the models' examples, one for each model."""
        step, self.first = self.first, None
        while step is not None:
            if self.feed.paired:
                side, batch = next(iter(step.items()))
                yield self._run(step, side.length(batch), content_of(step))
            else:
                counted = set[int]()
                for side, batch in step.items():
                    is_new, length = id(batch) not in counted, side.length(batch) or 0
                    counted.add(id(batch))
                    content = batch if is_new and self.feed.is_one else None
                    yield self._run({side: batch}, length, content, count=length if is_new else 0)
            self._batches += 1
            step = next(self._steps, None)

    def _run(self, step: Mapping[Side, Any], known: int | None, content: Any, **fields: Any) -> Batch:
        first = next(iter(step))
        numbers = partial(self.feed.numbers, first, self._seen[first.name])
        self._numbers = numbers(known or 0)
        layers, valid, outputs = dict[Key, KeptLayer](), dict[Key, Tensor](), dict[str, tuple[Tensor, Any]]()
        gradients: dict[Target, dict[Key, Tensor]] = {target: {} for target in self.reads.targets}
        for side, batch in step.items():
            try:
                recorded = side.read(batch)
            except Exception as fault:
                self._blame(fault, side, batch, self._batches)
                raise
            for layer, kept in recorded.rows.items():
                layers[side.name, layer] = kept if isinstance(kept, KeptLayer) else KeptLayer(kept, length=len(kept))
            valid |= {(side.name, layer): mask for layer, mask in recorded.valid.items()}
            for target, at_layers in recorded.gradients.items():
                gradients[target] |= {(side.name, layer): rows for layer, rows in at_layers.items()}
            if self.reads.outputs:
                outputs[side.name] = logits_of(recorded.output).detach(), labels_of(batch)
        whole = make_batch(
            layers, self.sizes, known, numbers, partial(self._locate, step, self._batches), valid=valid,
            gradients=gradients, outputs=outputs, hashes=self._hashes_of(step) if self.reads.hashes else NOTHING,
            owns_rows=self._owns_rows, content=None if known is None else content, **fields,
        )  # fmt: skip
        for side in step:
            self._seen[side.name] += len(whole.numbers)
        return whole

    def _hashes_of(self, step: Mapping[Side, Any]) -> dict[str, np.ndarray]:
        lengths = {side: side.length(batch) for side, batch in step.items() if not isinstance(side, RecordedSide)}
        return {
            side.name: contents(step[side], length).cpu().numpy()
            for side, length in lengths.items()
            if length is not None
        }

    def _keep(self, model: str, layer: str, rows: Tensor, valid: Tensor | None) -> Any:
        """Return what is kept of a layer's rows, which has just run."""
        if self._searched is not None:
            require_finite(rows, _place(layer, model, self._searched))
        try:
            with exact_matrix_products():
                return self.reads.reduce((model, layer), rows, valid, self._numbers)
        except InvalidValue:
            require_finite(rows, _place(layer, model, self._batches))
            raise

    # --- NaN and Inf --------------------------------------------------------------------------------------------------

    def _locate(self, step: Mapping[Side, Any], number: int) -> None:
        """Run a batch again, and refuse NaN and Inf with the name of their layer."""
        self._searched = number
        try:
            for side, batch in step.items():
                recorded = side.read(batch)
                for layer, rows in recorded.rows.items():
                    if isinstance(rows, Tensor):
                        require_finite(rows, _place(layer, side.name, number))
                for at_layers in recorded.gradients.values():
                    for layer, rows in at_layers.items():
                        require_finite(rows, f"the gradient at {_place(layer, side.name, number)}")
                if self.reads.outputs:
                    logits = logits_of(recorded.output).detach()
                    require_finite(logits, f"the output of {side.name!r} in batch {number}")
        except Exception as fault:
            self._blame(fault, side, batch, number)
            raise
        finally:
            self._searched = None

    def _blame(self, fault: Exception, side: Side, batch: Any, number: int) -> None:
        """Give a fault the name of its model; NaN and Inf that were in the inputs are no fault of a layer."""
        blame(fault, side.name)
        if isinstance(fault, InvalidValue):
            side.require_finite_inputs(batch, number)


def content_of(step: Mapping[Side, Any]) -> Any:
    """Return what the digest of the data is taken of: the batches of all sides, each once, or recorded rows."""
    contents: dict[int, Any] = {}
    for side, batch in step.items():
        if isinstance(side, RecordedSide):
            contents[id(side)] = side.content(batch)
        else:
            contents[id(batch)] = batch
    if len(contents) == 1:
        return next(iter(contents.values()))
    return {f"data {place}": content for place, content in enumerate(contents.values())}


def _place(layer: str, model: str, number: int) -> str:
    return f"layer {layer!r} of {model!r} in batch {number}"
