"""Activations: layer outputs over data, as matrices with one row per example; and the `Recorder` that makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from netkin.arrays import all_finite, require_finite
from netkin.errors import ForwardError, NetkinError, ShapeError
from netkin.progress import ProgressOption, reported
from netkin.representations.hooks import (
    React,
    apart,
    copied,
    inference_mode_of,
    main_tensor,
    same_tensors,
    unrecordable,
    watching,
)
from netkin.representations.inputs import (
    Forward,
    Transform,
    attention_mask,
    batches_of,
    device_of,
    dtype_of,
    length_if_known,
    repeated,
    require_finite_inputs,
    run_unwrapped,
    to_model,
    transformed,
)
from netkin.representations.layers import Spec, choose, layer_label, named_outright, refuse_lazy, split_call, unwrapped
from netkin.representations.shapes import (
    Shape,
    TokenMask,
    adjoint_rows,
    axes_of_length,
    is_custom,
    refuse_strange_layers,
    rows_of,
    shape_for,
    shape_name,
    token_mask,
)
from netkin.settings import exact_products, model_lock, random_states_kept
from netkin.sources.names import by_name

FEW = (2, 3)  # examples in the runs that show which axis counts them: with one, a table 1 × t × d would pass for one


@by_name(models="model", data="data")
def activations(
    model: nn.Module,
    layers: Spec = None,
    data: Any = None,
    *,
    shape: Shape | Mapping[str, Shape] = None,
    examples: int | None = None,
    forward: Forward | None = None,
    transform: Transform | None = None,
    device: torch.device | str | None = None,
    exact_model: bool = False,
    progress: ProgressOption = None,
) -> dict[str, Tensor]:
    """Return what the chosen layers give for all of `data`, one matrix per layer, on the CPU or on `device`.

    `data` is a loader, any iterable of batches, or one array of inputs. A default layer that does not run, that
    gives no floating tensor (but None, a number, or nothing), or whose output does not hold the examples (a table of
    positions) is left out; one chosen by name is refused. `Recorder.left_out` holds the reasons.

    Args:
        model: the model, which is left as it was.
        layers: names, globs, module types or a list of those; None for the default layers.
        data: a loader, an iterable of batches, or one array of inputs.
        shape: what one example is, for all layers or by name; None for `pool` and `mean`.
        examples: how many examples to read; None for all.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs of a batch.
        device: where the matrices are put; None for the CPU.
        exact_model: whether float32 in the model on a GPU must not be rounded to TF32, as torch does in convolutions
            unless set otherwise.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> {name: tuple(rows.shape) for name, rows in activations(model, ["0", "2"], torch.ones(5, 4)).items()}
        {'0': (5, 8), '2': (5, 2)}
    """
    matrices: dict[str, list[Tensor]] = {}
    refuse_strange_layers(shape, model)
    recorder = Recorder(model, layers, shape=shape, forward=forward, transform=transform)
    with inference_mode_of(model, exact=exact_model), recorder.open():
        for batch in reported(batches_of(data, examples), "reading", "batches", progress):
            recorded = recorder(batch)
            recorder.require_finite(recorded, batch)
            for name, rows in recorded.rows.items():
                matrices.setdefault(name, []).append(rows.to(device or "cpu"))
    return {name: joined(name, batches) for name, batches in matrices.items()}


@dataclass(frozen=True)
class LayerFacts:
    """What a run of few examples showed of a layer.

    Args:
        axis: the axis of its output that counts the examples.
        shape: the name of the shape that made rows of it.
        size: the shape of these rows.
        dtype: that of their numbers.
        examples: how many examples were run.
        space: the size of the map whose places the rows are, if they are.
        resolution: the rounding unit of the output as it came, before halves were raised.
    """

    axis: int
    shape: str
    size: tuple[int, ...]
    dtype: torch.dtype
    examples: int
    space: tuple[int, ...]
    resolution: float


@dataclass(frozen=True)
class Recorded:
    """What a model gave for one batch: rows by layer, or what `reduce` made of them, gradients and the output.

    `valid` tells which tokens of each example the rows of a layer are, where a mask leaves some out.
    """

    rows: dict[str, Any]
    gradients: Mapping[Any, dict[str, Tensor]] = field(default_factory=dict)
    output: Any = None
    valid: Mapping[str, Tensor] = field(default_factory=dict)


class Recorder:
    """Runs a model on batches, and gives each layer's rows, made on the model's device while it runs.

    It looks only while it runs the model itself, so that two recorders may share one model. Before the first batch two
    runs of few examples show which axis of each layer's output counts the examples, and how large its rows are: see
    `learn`. What they showed is in `facts`, by layer, in the order of running.

    `left_out` holds, for each default layer that gives no rows, the reason as a sentence without its full stop. Layers
    that a glob stands for, and that give what another one gave, are left out too.

    Args:
        model: the model, in the mode in which it is to run.
        layers: which layers, as `choose` reads it; None for the default ones.
        shape: what one example is, for all layers or by name; None for `pool` and `mean`.
        forward: runs the model on a batch; None to call it with the batch's inputs.
        transform: changes the inputs before they are given to this model.
        reduce: what to keep of (layer, rows, which tokens they are or None) while the model runs; None for the rows.
        taps: where and of what gradients are taken, `gradients.Taps`; None for none.
        keeps_output: whether the output of the whole model is kept.
        facts: what another recorder for this model has learnt.
        as_run: whether layers come in the order of running, rather than in that of `layers`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Spec = None,
        *,
        shape: Shape | Mapping[str, Shape] = None,
        forward: Forward | None = None,
        transform: Transform | None = None,
        reduce: Callable[[str, Tensor, Tensor | None], Any] | None = None,
        taps: Any = None,
        keeps_output: bool = False,
        facts: Mapping[str, LayerFacts] | None = None,
        as_run: bool = False,
    ):
        self._root = unwrapped(model)
        refuse_lazy(self._root)
        for one in shape.values() if isinstance(shape, Mapping) else [shape]:
            shape_name(one)
        layers = layers if layers is None or isinstance(layers, (str, type)) else list(layers)
        self.model, self.layers, self.by_default = model, choose(model, layers), layers is None
        self.shape, self.forward, self.transform, self.reduce = shape, forward, transform, reduce
        self.taps, self.keeps_output, self.as_run = taps, keeps_output, as_run
        self._by_glob = set() if layers is None else set(self.layers) - set(named_outright(layers))
        self.facts: dict[str, LayerFacts] | None = None if facts is None else dict(facts)
        self.left_out: dict[str, str] = {}
        self.batches = 0
        self._shapes: dict[str, tuple[Shape, bool]] = {}  # of each layer, and whether it is the caller's own
        self._home: Any = None  # the model's device and precision, while the hooks are on it

    @contextmanager
    def open(self) -> Iterator[None]:
        """Put hooks on the model while the `with` lasts."""
        with model_lock(), watching(self.model, self.layers, _ignore) as self._watch:
            self._home = (device_of(self.model), dtype_of(self.model))
            try:
                yield
            finally:
                self._home = None

    def __call__(self, batch: Any) -> Recorded:
        """Return what the model gives for one batch; before the first one `learn` is called with it."""
        if self._home is None:
            with self.open():
                return self(batch)
        batch, mask = self._fed(batch)
        if self.facts is None:
            self._learn(batch)
        assert self.facts is not None
        facts, length, taps, reduce = self.facts, length_if_known(batch), self.taps, self.reduce
        rows: dict[str, Any] = {}

        def take(name: str, output: Any) -> Any:
            known = facts.get(name)
            if known is None:
                self._refuse_new(name)
                return None
            output = output if taps is None else taps.take(name, output)
            # a dense floating tensor nearly always
            is_dense = type(output) is Tensor and output.layout == torch.strided and not output.is_nested
            tensor = output if is_dense and output.is_floating_point() else main_tensor(output, name)
            tensor = moved = tensor if taps is None else tensor.detach()
            shape, custom = self._shapes.get(name) or self._shape_of(name)
            if not custom:
                if length is not None and tensor.shape[known.axis : known.axis + 1] != (length,):
                    raise ShapeError(_without_examples(name, tensor, length))
                moved = tensor.movedim(known.axis, 0) if known.axis else tensor
            # the model itself runs in the precision that its user has set; netkin's shapes take no products
            with exact_products() if custom else nullcontext():
                try:
                    kept, _ = rows_of(moved, shape, mask)
                except NetkinError as fault:
                    raise type(fault)(f"{layer_label(name)}: {fault}") from fault
                if reduce is not None:
                    valid = mask.tokens if mask is not None and known.shape == "tokens" else None
                    kept = reduce(name, kept, valid)
            rows[name] = apart(kept, tensor)
            return None if taps is None else output

        gradients: dict[Any, dict[str, Tensor]] = {}
        with nullcontext() if taps is None else taps.open():
            batch = batch if taps is None else taps.without_inference(batch)
            output = self._run(batch, take)
            if rows.keys() != facts.keys():
                self._refuse_other_calls(rows)
            if taps is not None:
                axes, tokens = {name: own.axis for name, own in facts.items()}, None if mask is None else mask.tokens
                pulled = taps.pull(output, batch, axes, tokens)
                gradients = {
                    target: {name: self._gradient_rows(name, gradient, mask) for name, gradient in own.items()}
                    for target, own in pulled.items()
                }
        self.batches += 1
        if not self.as_run:
            rows = {name: rows[name] for name in self._in_order(rows)}
        valid = {} if mask is None else {name: mask.tokens for name in rows if facts[name].shape == "tokens"}
        return Recorded(rows, gradients, output if self.keeps_output else None, valid)

    def learn(self, batch: Any) -> dict[str, LayerFacts]:
        """Run few examples of a batch, and return what this shows of each layer.

        The axis of an output that has as many entries as examples were run, twice, counts them. A model that runs on
        batches of one size only, such as an exported program, is run on the whole batch: then the first axis counts
        the examples, if it alone is as long.
        """
        if self._home is None:
            with self.open():
                return self.learn(batch)
        self._learn(self._fed(batch)[0])
        assert self.facts is not None
        return self.facts

    def require_finite(self, recorded: Recorded, batch: Any) -> None:
        """Refuse rows or gradients with NaN or Inf; those that are in the inputs are told as such."""
        every = [("", recorded.rows), *(("the gradient at ", one) for one in recorded.gradients.values())]
        if bool(all_finite([rows for _, own in every for rows in own.values()])):
            return
        require_finite_inputs(batch, self.transform, self.batches - 1)
        for what, own in every:
            for name, rows in own.items():
                require_finite(rows, f"{what}{layer_label(name)} in batch {self.batches - 1}")

    # --- running ------------------------------------------------------------------------------------------------------

    def _fed(self, batch: Any) -> tuple[Any, TokenMask | None]:
        """Return a batch as the model gets it, and which of its tokens are valid."""
        batch = batch if self.transform is None else transformed(batch, self.transform)
        mask = attention_mask(batch)  # as it came: on the CPU its tokens are counted without waiting for a GPU
        return to_model(self.model, batch, self._home), None if mask is None else token_mask(copied(mask))

    def _run(self, batch: Any, react: React) -> Any:
        """Run the model, while `react` is called with what layers give; not with what they give to other callers."""
        self._watch.react = react
        try:
            return run_unwrapped(self._root, batch, self.forward)
        finally:
            self._watch.react = _ignore

    def _gradient_rows(self, name: str, gradient: Tensor, mask: TokenMask | None) -> Tensor:
        assert self.facts is not None
        facts = self.facts[name]
        return adjoint_rows(gradient.movedim(facts.axis, 0) if facts.axis else gradient, facts.shape, mask)

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Return names in the order of the chosen layers and of their calls."""
        places = {name: place for place, name in enumerate(self.layers)}
        calls = {name: split_call(name) for name in names}
        return sorted(calls, key=lambda name: (places.get(name, places.get(calls[name][0], 0)), calls[name][1] or 0))

    def _shape_of(self, name: str) -> tuple[Shape, bool]:
        if name not in self._shapes:
            shape = shape_for(name, self.shape)
            self._shapes[name] = (shape, is_custom(shape))
        return self._shapes[name]

    # --- learning -----------------------------------------------------------------------------------------------------

    def _learn(self, batch: Any) -> None:
        with random_states_kept(self.model):
            try:
                before = self._axes(repeated(batch, FEW[0]))
                refusals = self._learn_from(repeated(batch, FEW[1]), before)
            except Exception:  # a program of fixed size, or nothing to count by; whatever else is wrong comes up again
                refusals = self._learn_from(copied(batch), None)
        for refusal in refusals:
            raise refusal

    def _axes(self, batch: Any) -> dict[str, list[int]]:
        """Return for each call of a layer which axes of its output are as long as the batch."""
        length, axes = length_if_known(batch) or 0, dict[str, list[int]]()

        def note(name: str, output: Any) -> None:
            axes[name] = [] if unrecordable(output) else axes_of_length(main_tensor(output, name), length)

        self._run(batch, note)
        return axes

    def _learn_from(self, batch: Any, before: Mapping[str, list[int]] | None) -> list[NetkinError]:
        """Note what the layers give for a batch, and return what must be refused once the run has come to its end.

        `before` holds the axes that were as long as a batch of another size.
        """
        length, mask = length_if_known(batch), attention_mask(batch)
        tokens = None if mask is None else token_mask(copied(mask))
        facts, left_out, ran, refusals = dict[str, LayerFacts](), dict[str, str](), set[str](), list[NetkinError]()
        is_same = same_tensors()

        def note(name: str, output: Any) -> None:
            ran.add(split_call(name)[0])
            if is_same(output) and name in self._by_glob:
                return
            try:
                axes = None if before is None else before.get(name, [])
                facts[name] = self._facts_of(name, output, length, axes, tokens)
            except _WithoutRows as absent:
                if self.by_default:
                    left_out[name] = absent.fact
                else:
                    refusals.append(absent.refusal)
            except NetkinError as fault:
                refusals.append(fault)

        self._run(batch, note)
        self.facts, self.left_out = facts, left_out
        return [*refusals, *self._refused_idle(ran)]

    def _facts_of(
        self, name: str, output: Any, length: int | None, before: list[int] | None, mask: TokenMask | None
    ) -> LayerFacts:
        if reason := unrecordable(output):
            fact = f"{layer_label(name.removesuffix('#1'))} {reason}"
            raise _WithoutRows(fact, ForwardError(f"{fact}; choose another layer."))
        tensor = main_tensor(output, name)
        shape, custom = self._shape_of(name)
        axis = 0 if custom or length is None else _example_axis(tensor, length, before)
        if axis is None:
            assert length is not None
            fact = _without_examples(name, tensor, length, before is None)
            advice = "pass a function as `shape` that makes rows of it, or choose another layer."
            raise _WithoutRows(fact, ShapeError(f"{fact}; {advice}"))
        tensor = tensor.movedim(axis, 0) if axis else tensor
        with exact_products() if custom else nullcontext():
            try:
                rows, kind = rows_of(tensor, shape, mask)
            except NetkinError as fault:
                raise type(fault)(f"{layer_label(name)}: {fault}") from fault
        space = tuple(tensor.shape[2:]) if kind == "positions" else ()
        resolution = _resolution(tensor, kind, rows)
        return LayerFacts(axis, kind, tuple(rows.shape), rows.dtype, length or 1, space, resolution)

    def _refused_idle(self, ran: set[str]) -> list[NetkinError]:
        """Leave out default layers that did not run; return the refusal of others, and of a model without any rows."""
        assert self.facts is not None
        idle = [name for name in self.layers if split_call(name)[0] not in ran]
        if self.by_default:
            self.left_out |= {name: f"{layer_label(name)} did not run in batch 0" for name in idle}
        elif idle:
            return [ForwardError(f"{layer_label(idle[0])} did not run in batch 0; choose layers that always run.")]
        if self.facts:
            return []
        return [
            ForwardError(
                f"none of the model's {len(self.layers)} default layers gives rows in batch 0: "
                f"{next(iter(self.left_out.values()), 'none ran')}; name layers that do."
            )
        ]

    def _refuse_new(self, name: str) -> None:
        """Refuse a call that was not among the first ones, of a layer that gave rows there."""
        stem, _ = split_call(name)
        if name not in self.left_out and any(split_call(known)[0] == stem for known in self.facts or ()):
            self._refuse_call(name)

    def _refuse_other_calls(self, rows: Mapping[str, Any]) -> None:
        assert self.facts is not None
        self._refuse_call(min(self.facts.keys() ^ rows.keys()))

    def _refuse_call(self, name: str) -> None:
        here = "does not run" if name in (self.facts or ()) else "runs"
        raise ForwardError(
            f"{layer_label(name)} does not run in every batch: in batch {self.batches} it {here}, unlike before; "
            "choose layers, or calls such as 'relu#2', that run in every batch."
        )


def _ignore(name: str, output: Any) -> None:
    """React to nothing."""


class _WithoutRows(Exception):
    """A layer gives no rows, for the reason `fact`: it is left out, or refused if it was named."""

    def __init__(self, fact: str, refusal: NetkinError):
        self.fact, self.refusal = fact, refusal


def _example_axis(output: Tensor, length: int, before: list[int] | None) -> int | None:
    """Return the axis that counts the examples, or None.

    `before` are the axes that were as long as a batch of another size; None if there was no such batch.
    """
    here = axes_of_length(output, length)
    if before is None:
        return 0 if here == [0] else None
    both = [axis for axis in here if axis in before]
    return both[0] if len(both) == 1 or 0 in both else None


def _without_examples(name: str, output: Tensor, length: int, is_unclear: bool = False) -> str:
    """Return the text for an output in which the examples were not found."""
    fact = f"{layer_label(name)} gives an output of shape {tuple(output.shape)} for a batch of {length} examples"
    if is_unclear and axes_of_length(output, length):
        return f"{fact}, and which of its axes counts them is unclear, as the model runs on batches of this size only"
    return f"{fact}, and none of its axes counts them"


def _resolution(output: Tensor, shape: str, rows: Tensor) -> float:
    """Return the rounding unit of rows made of `output`: halves are raised, and means round less than single values."""
    averaged = output.shape[2:].numel() if shape == "pool" else output.shape[1] if shape == "mean" else 1
    return max(torch.finfo(output.dtype).eps / averaged**0.5, torch.finfo(rows.dtype).eps)


def joined(name: str, batches: list[Tensor]) -> Tensor:
    """Return the rows of all batches of a layer, one after the other."""
    widths = sorted({batch.shape[1:].numel() for batch in batches})
    if len({batch.shape[1:] for batch in batches}) > 1:
        raise ShapeError(
            f"{layer_label(name)} has {widths[0]} features in one batch and {widths[-1]} in another; pad all batches "
            "to one length, or choose a shape such as 'mean' or 'pool'."
        )
    return torch.cat(batches)
