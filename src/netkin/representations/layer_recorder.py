"""Recorder: what the layers of a model give for a batch, as rows made on the model's device while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from netkin.arrays import all_finite, require_finite
from netkin.errors import ForwardError, ShapeError
from netkin.representations.batch_axis import LayerFacts, LearntLayers, learn, rows_at, without_examples
from netkin.representations.hooks import React, Watch, apart, copied, main_tensor, watching
from netkin.representations.inputs import (
    Forward,
    Transform,
    attention_mask,
    device_of,
    dtype_of,
    length_if_known,
    require_finite_inputs,
    run_unwrapped,
    to_model,
    transformed,
)
from netkin.representations.layers import Spec, choose, layer_label, require_weights, split_call, unwrapped
from netkin.representations.shapes import (
    Shape,
    TokenMask,
    adjoint_rows,
    is_custom,
    shape_for,
    shape_name,
    token_mask,
    valid_tokens,
)
from netkin.settings import model_lock, random_states_kept


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

    It looks only while it runs the model itself, so that two recorders may share one model. Before the first batch
    `batch_axis.learn` is called, and what it showed is in `learnt`.

    Args:
        model: the model, in the mode in which it is to run.
        layers: which layers, as `choose` reads it; None for the default ones.
        shape: what one example is, for all layers or by name; None for `pool` and `mean`.
        forward: runs the model on a batch; None to call it with the batch's inputs.
        transform: changes the inputs before they are given to this model.
        reduce: what to keep of (layer, rows, which tokens they are or None) while the model runs; None for the rows.
        taps: where and of what gradients are taken, `gradients.Taps`; None for none.
        keeps_output: whether the output of the whole model is kept.
        learnt: what another recorder for this model has learnt.
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
        learnt: LearntLayers | None = None,
        as_run: bool = False,
    ):
        self._root = unwrapped(model)
        require_weights(self._root)
        for layer_shape in shape.values() if isinstance(shape, Mapping) else [shape]:
            shape_name(layer_shape)
        self.model, self.layers, self.by_default = model, choose(model, layers), layers is None
        self.shape, self.forward, self.transform, self.reduce = shape, forward, transform, reduce
        self.taps, self.keeps_output, self.as_run = taps, keeps_output, as_run
        self.learnt = learnt
        self.batches = 0
        self._shapes: dict[str, Shape] = {}  # by layer
        self._watch: Watch | None = None  # while the hooks are on the model, and then
        self._home: Any = None  # its device and precision

    @property
    def facts(self) -> Mapping[str, LayerFacts]:
        """What is known of each layer that gives rows, once a batch was seen."""
        return {} if self.learnt is None else self.learnt.facts

    @contextmanager
    def open(self) -> Iterator[None]:
        """Put hooks on the model while the `with` lasts."""
        with model_lock(), watching(self.model, self.layers, _ignore) as watch:
            self._watch, self._home = watch, (device_of(self.model), dtype_of(self.model))
            try:
                yield
            finally:
                self._watch = None

    def __call__(self, batch: Any) -> Recorded:
        """Return what the model gives for one batch; before the first one `learn` is called with it."""
        if self._watch is None:
            with self.open():
                return self(batch)
        batch, mask = self._fed(batch)
        learnt = self.learnt or self._learn(batch)
        facts, length, taps = learnt.facts, length_if_known(batch), self.taps
        tokens = None if mask is None else mask.tokens
        rows, others = dict[str, Any](), set[str]()

        def take(name: str, output: Any) -> Any:
            if name not in facts:
                others.add(name)
                return None
            axis = facts[name].axis
            shape = self._shapes[name] if name in self._shapes else self._shape_of(name)
            output = output if taps is None else taps.take(name, output)
            # a dense floating tensor nearly always
            is_dense = type(output) is Tensor and output.layout == torch.strided and not output.is_nested
            tensor = output if is_dense and output.is_floating_point() else main_tensor(output, name)
            tensor = tensor if taps is None else tensor.detach()
            if length is not None and tensor.shape[axis : axis + 1] != (length,) and not is_custom(shape):
                raise ShapeError(f"{without_examples(name, tensor, length)}.")
            matrix, kind = rows_at(name, tensor, axis, shape, mask)
            valid = None if mask is None else valid_tokens(mask, kind)
            result = matrix if self.reduce is None else self.reduce(name, matrix, valid)
            rows[name] = apart(result, tensor)
            return None if taps is None else output

        gradients: dict[Any, dict[str, Tensor]] = {}
        with nullcontext() if taps is None else taps.open():
            batch = batch if taps is None else taps.without_inference(batch)
            output = self._run(batch, take)
            if others or rows.keys() != facts.keys():
                self._require_same_calls(facts.keys() - rows.keys(), others)
            if taps is not None:
                axes = {name: fact.axis for name, fact in facts.items()}
                gradients = {
                    target: {name: self._gradient_rows(name, gradient, mask) for name, gradient in at_layers.items()}
                    for target, at_layers in taps.gradients_at_layers(output, batch, axes, tokens).items()
                }
        self.batches += 1
        masks = {} if mask is None else {name: valid_tokens(mask, facts[name].shape) for name in facts}
        valid = {name: tokens for name, tokens in masks.items() if tokens is not None}
        return Recorded({name: rows[name] for name in facts}, gradients, output if self.keeps_output else None, valid)

    def learn(self, batch: Any) -> Mapping[str, LayerFacts]:
        """Run few examples of a batch, and return what this shows of each layer."""
        if self._watch is None:
            with self.open():
                return self.learn(batch)
        return self._learn(self._fed(batch)[0]).facts

    def require_finite(self, recorded: Recorded, batch: Any) -> None:
        """Refuse rows or gradients with NaN or Inf; those that are in the inputs are told as such."""
        by_layer = [("", recorded.rows), *(("the gradient at ", rows) for rows in recorded.gradients.values())]
        if bool(all_finite([matrix for _, rows in by_layer for matrix in rows.values()])):
            return
        require_finite_inputs(batch, self.transform, self.batches - 1)
        for what, rows in by_layer:
            for name, matrix in rows.items():
                require_finite(matrix, f"{what}{layer_label(name)} in batch {self.batches - 1}")

    def _fed(self, batch: Any) -> tuple[Any, TokenMask | None]:
        """Return a batch as the model gets it, and which of its tokens are valid."""
        batch = batch if self.transform is None else transformed(batch, self.transform)
        mask = attention_mask(batch)  # as it came: on the CPU its tokens are counted without waiting for a GPU
        return to_model(self.model, batch, self._home), None if mask is None else token_mask(copied(mask))

    def _run(self, batch: Any, react: React) -> Any:
        """Run the model, while `react` is called with what layers give; not with what they give to other callers."""
        assert self._watch is not None
        self._watch.react = react
        try:
            return run_unwrapped(self._root, batch, self.forward)
        finally:
            self._watch.react = _ignore

    def _shape_of(self, name: str) -> Shape:
        if name not in self._shapes:
            self._shapes[name] = shape_for(name, self.shape)
        return self._shapes[name]

    def _learn(self, batch: Any) -> LearntLayers:
        with random_states_kept(self.model):
            learnt = learn(self._run, batch, self.layers, self._shape_of, is_default=self.by_default)
        names = learnt.facts if self.as_run else self._in_order(learnt.facts)
        self.learnt = LearntLayers({name: learnt.facts[name] for name in names}, learnt.left_out)
        return self.learnt

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Return names in the order of the chosen layers and of their calls."""
        places = {name: place for place, name in enumerate(self.layers)}
        calls = {name: split_call(name) for name in names}
        return sorted(calls, key=lambda name: (places.get(name, places.get(calls[name][0], 0)), calls[name][1] or 0))

    def _gradient_rows(self, name: str, gradient: Tensor, mask: TokenMask | None) -> Tensor:
        axis = self.facts[name].axis
        return adjoint_rows(gradient.movedim(axis, 0) if axis else gradient, self.facts[name].shape, mask)

    def _require_same_calls(self, missing: Iterable[str], others: Iterable[str]) -> None:
        """Refuse a batch in which layers are missing, or run more often than in the first one."""
        assert self.learnt is not None
        stems = {split_call(name)[0] for name in self.facts}
        new = {name for name in others if name not in self.learnt.left_out and split_call(name)[0] in stems}
        for name in sorted({*missing, *new}):
            here = "runs" if name in new else "does not run"
            raise ForwardError(
                f"{layer_label(name)} does not run in every batch: in batch {self.batches} it {here}, unlike before; "
                "choose layers, or calls such as 'relu#2', that run in every batch."
            )


def _ignore(name: str, output: Any) -> None:
    """React to nothing."""
