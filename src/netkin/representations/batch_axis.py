"""Which axis of each layer's output counts the examples, learnt from two runs of few examples.

Mostly it is the first. But recurrent nets and transformers may give time × examples × features, and a table of
positions has no examples at all, whatever its length. So the model is run on two examples and on three before the first
batch, and the axis that is 2 long in the one run and 3 in the other counts the examples. Where that fails, as with
exported programs of fixed size, the first axis counts them if it alone is as long as the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netkin.errors import ForwardError, NetkinError, ShapeError
from netkin.representations.hooks import React, copied, main_tensor, unrecordable
from netkin.representations.inputs import attention_mask, length_if_known, repeated
from netkin.representations.layers import layer_label, split_call
from netkin.representations.shapes import Mask, Shape, TokenMask, is_custom, rows_of, token_mask
from netkin.settings import exact_products

FEW = (2, 3)  # examples in the two runs: with one, a table 1 × t × d would pass for one

ShapeOf = Callable[[str], Shape]  # what one example is, by the name of the layer


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
class LearntLayers:
    """The facts of each layer that gives rows, in the order of running, and why default layers give none.

    The reasons are sentences without their full stop.
    """

    facts: Mapping[str, LayerFacts]
    left_out: Mapping[str, str]


class NoRows(NamedTuple):
    """Why a layer gives no rows: as a sentence without its full stop, and as the refusal of a layer that was named."""

    reason: str
    refusal: NetkinError


Shown = dict[str, LayerFacts | NoRows | NetkinError]  # by call of a layer, in the order of running


def learn(
    run: Callable[[Any, React], Any], batch: Any, layers: Sequence[str], shape_of: ShapeOf, *, is_default: bool
) -> LearntLayers:
    """Return what runs of few examples of a batch show of each layer.

    Args:
        run: runs the model on a batch, and calls a function with what each layer gives.
        batch: the first batch, as the model gets it.
        layers: the layers that were chosen.
        shape_of: what one example is.
        is_default: whether the user named no layers: then those that give no rows are left out, otherwise refused.
    """
    try:
        axes = _axes_as_long(run, repeated(batch, FEW[0]))
        shown = _shown(run, repeated(batch, FEW[1]), shape_of, axes)
    except Exception:  # a program of fixed size, or nothing to count by; whatever else is wrong comes up again
        shown = _shown(run, copied(batch), shape_of, None)
    facts, left_out = dict[str, LayerFacts](), dict[str, str]()
    for name, fact in shown.items():
        if isinstance(fact, LayerFacts):
            facts[name] = fact
        elif isinstance(fact, NoRows) and is_default:
            left_out[name] = fact.reason
        else:
            raise fact.refusal if isinstance(fact, NoRows) else fact
    ran = {split_call(name)[0] for name in shown}
    idle = [name for name in layers if split_call(name)[0] not in ran]
    if idle and not is_default:
        raise ForwardError(f"{layer_label(idle[0])} did not run in batch 0; choose layers that always run.")
    left_out |= {name: f"{layer_label(name)} did not run in batch 0" for name in idle}
    if not facts:
        raise ForwardError(
            f"none of the model's {len(layers)} default layers gives rows in batch 0: "
            f"{next(iter(left_out.values()), 'none ran')}; name layers that do."
        )
    return LearntLayers(facts, left_out)


def rows_at(name: str, output: Tensor, axis: int, shape: Shape, mask: Mask) -> tuple[Tensor, str]:
    """Return the rows of a layer's output, whose examples `axis` counts, and the name of the shape that made them."""
    try:
        if callable(shape) and is_custom(shape):
            # the model itself runs in the precision that its user has set; netkin's shapes take no products
            with exact_products():
                return rows_of(output, shape, mask)
        return rows_of(output.movedim(axis, 0) if axis else output, shape, mask)
    except NetkinError as fault:
        raise type(fault)(f"{layer_label(name)}: {fault}") from fault


def without_examples(name: str, output: Tensor, length: int, why: str = "none of its axes counts them") -> str:
    """Return the text for an output in which the examples were not found."""
    return (
        f"{layer_label(name)} gives an output of shape {tuple(output.shape)} for a batch of {length} examples, "
        f"and {why}"
    )


def _axes_as_long(run: Callable[[Any, React], Any], batch: Any) -> dict[str, list[int]]:
    """Return for each call of a layer which axes of its output are as long as the batch."""
    length, axes = length_if_known(batch) or 0, dict[str, list[int]]()

    def note(name: str, output: Any) -> None:
        axes[name] = [] if unrecordable(output) else _axes_of_length(main_tensor(output, name), length)

    run(batch, note)
    return axes


def _shown(
    run: Callable[[Any, React], Any], batch: Any, shape_of: ShapeOf, axes: Mapping[str, list[int]] | None
) -> Shown:
    """Return what each call of a layer shows; `axes` were as long as a batch of another size, None without such."""
    length, mask = length_if_known(batch), attention_mask(batch)
    tokens = None if mask is None else token_mask(copied(mask))
    shown: Shown = {}

    def note(name: str, output: Any) -> None:
        try:
            before = None if axes is None else axes.get(name, [])
            shown[name] = _facts_of(name, output, length, shape_of(name), before, tokens)
        except NetkinError as fault:  # kept, so that it is not taken for a fault of this way to learn
            shown[name] = fault

    run(batch, note)
    return shown


def _facts_of(
    name: str, output: Any, length: int | None, shape: Shape, before: list[int] | None, mask: TokenMask | None
) -> LayerFacts | NoRows:
    if reason := unrecordable(output):
        fact = f"{layer_label(name.removesuffix('#1'))} {reason}"
        return NoRows(fact, ForwardError(f"{fact}; choose another layer."))
    tensor = main_tensor(output, name)
    axis = 0 if is_custom(shape) or length is None else _example_axis(tensor, length, before)
    if axis is None:
        assert length is not None
        fact = without_examples(name, tensor, length)
        if before is None and _axes_of_length(tensor, length):
            why = "which of its axes counts them is unclear, as the model runs on batches of this size only"
            fact = without_examples(name, tensor, length, why)
        advice = "pass a function as `shape` that makes rows of it, or choose another layer."
        return NoRows(fact, ShapeError(f"{fact}; {advice}"))
    rows, kind = rows_at(name, tensor, axis, shape, mask)
    tensor = tensor.movedim(axis, 0) if axis else tensor
    # halves are raised, and means round less than single values
    averaged = tensor.shape[2:].numel() if kind == "pool" else tensor.shape[1] if kind.startswith("mean") else 1
    resolution = max(torch.finfo(tensor.dtype).eps / averaged**0.5, torch.finfo(rows.dtype).eps)
    space = tuple(tensor.shape[2:]) if kind == "positions" else ()
    return LayerFacts(axis, kind, tuple(rows.shape), rows.dtype, length or 1, space, resolution)


def _example_axis(output: Tensor, length: int, before: list[int] | None) -> int | None:
    """Return the axis that counts the examples, or None.

    `before` are the axes that were as long as a batch of another size; None if there was no such batch.
    """
    axes = _axes_of_length(output, length)
    if before is None:
        return 0 if axes == [0] else None
    both = [axis for axis in axes if axis in before]
    return both[0] if len(both) == 1 or 0 in both else None


def _axes_of_length(output: Tensor, length: int) -> list[int]:
    return [axis for axis, size in enumerate(output.shape) if size == length]
