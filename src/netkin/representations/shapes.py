"""Shapes: what one example is, once a layer has given its output for a batch.

=========== ============================ ==============================================================
name        fits                         rows
=========== ============================ ==============================================================
`pool`      n × c × space (4-d and up)   n × c, the mean over space; the default there
`positions` n × c × space                one row for each place: n·h·w × c
`flatten`   everything                   n × all features; padded tokens count as zero
`dft`       n × c × space                the maps themselves, to be compared frequency by frequency
`mean`      n × tokens × features        n × features, the mean over valid tokens; the default there
`tokens`    n × tokens × features        one row for each valid token
`cls`       n × tokens × features        the first valid token of each example
`last`      n × tokens × features        the last valid token of each example, padded left or right
`matrix`    n × d, and n as n × 1        the output itself, whichever shape is requested
=========== ============================ ==============================================================

The shapes `mean`, `tokens` and `last` may be of some positions alone, as ``tokens[1:]``: Python's slices of the valid
tokens of each sequence, whichever side is padded.

A mask (n × tokens, boolean or integer, true for valid tokens) marks padding. Half-precision outputs are
raised to float32 before anything is summed. A function from a layer's output to rows also serves as a shape, for
instance for outputs n × h × w × c or n × c × length, whose dimensions are ambiguous. It gets the output as
the layer gave it; for all other shapes the axis of the examples comes first.
See `batch_axis` for how that axis is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from netkin.errors import InvalidValue, ShapeError, UnknownName, did_you_mean
from netkin.representations.layers import hint_for, matching_names, modules, split_call

SUMMED = (torch.float32, torch.float64)  # precisions that are summed as they come; others are raised to the first
PLACES = 32  # maps with fewer places are turned into rows: products of single examples would be too small
__all__ = ["cls", "dft", "flatten", "last", "mean", "pool", "positions", "resize_to", "tokens"]

Shape = str | Callable[[Tensor], Tensor] | None


class TokenMask:
    """Which tokens of a batch are valid, counted once, on the device of the mask, for all layers.

    Nothing waits for a GPU if the mask came on the CPU; what layers need is moved to their device once.
    """

    def __init__(self, mask: Any):
        self._mask = torch.as_tensor(mask)
        self._moved: dict[tuple[str, torch.device], Tensor] = {}
        self._at: dict[str, TokenMask] = {}
        self._where = ""  # the positions that it was restricted to

    @cached_property
    def tokens(self) -> Tensor:
        """The mask, true for valid tokens, where it came."""
        if self._mask.is_floating_point() or self._mask.is_complex():
            raise InvalidValue(
                f"a mask must be boolean or integer, true for valid tokens; got {self._mask.dtype}.", argument="mask"
            )
        return self._mask != 0

    def at(self, positions: str) -> TokenMask:
        """Return the mask of the tokens at some positions of their sequences, in which padding does not count."""
        if positions and positions not in self._at:
            places, lengths = self.tokens.cumsum(1) - 1, self.tokens.sum(1, keepdim=True)
            where = as_slice(positions)
            start = where.start if where.start >= 0 else (lengths + where.start).clamp(min=0)
            stop = lengths if where.stop is None else where.stop if where.stop >= 0 else lengths + where.stop
            chosen = (places >= start) & (places < stop) & ((places - start) % where.step == 0)
            self._at[positions] = TokenMask(self.tokens & chosen)
            self._at[positions]._where = positions
        return self._at[positions] if positions else self

    @cached_property
    def empty(self) -> int:
        """How many examples have no valid token."""
        return int((~self.tokens.any(dim=1)).sum())

    def valid(self, sequences: Tensor) -> Tensor:
        """Return the mask of these sequences, examples × tokens, on their device."""
        if self.tokens.shape != sequences.shape[:2]:
            raise ShapeError(
                f"the mask has shape {tuple(self.tokens.shape)} and the output {tuple(sequences.shape)}; "
                "the mask must be examples × tokens of this output, so pass a function as shape for this layer."
            )
        return self._on("tokens", sequences.device, lambda: self.tokens)

    def places(self, sequences: Tensor) -> Tensor:
        """Return where the valid tokens are among all tokens of these sequences, one example after the other."""
        self.valid(sequences)
        return self._on("places", sequences.device, lambda: self.tokens.flatten().nonzero()[:, 0])

    def require_tokens(self) -> None:
        """Refuse examples without a valid token."""
        if self.empty:
            raise InvalidValue(
                f"{self.empty} of {len(self.tokens)} examples have no valid token "
                f"{f'at the positions {self._where}' if self._where else 'in their mask'}; leave these examples out."
            )

    def _on(self, what: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        if (what, device) not in self._moved:
            self._moved[what, device] = make().to(device, non_blocking=True)
        return self._moved[what, device]


Mask = Tensor | TokenMask | None


def flatten(output: Tensor, mask: Mask = None) -> Tensor:
    """Return one row per example with all its features side by side; padded tokens are set to zero.

    Example:
        >>> flatten(torch.ones(2, 3, 4, 4)).shape
        torch.Size([2, 48])
    """
    if mask is not None and output.ndim == 3:
        output = output.masked_fill(~token_mask(mask).valid(output)[..., None], 0)
    return _raised(output.reshape(len(output), output.shape[1:].numel()))


def positions(output: Tensor) -> Tensor:
    """Return one row per place of each feature map, with its channels as features."""
    maps = _fitting(output, "positions")
    return _raised(maps.movedim(1, -1).reshape(-1, maps.shape[1]))


def dft(output: Tensor) -> Tensor:
    """Return the maps themselves, n × c × space: `nk.compare` and `nk.dft_cca` take them frequency by frequency."""
    return _raised(_fitting(output, "dft"))


def pool(output: Tensor) -> Tensor:
    """Return one row per example: each channel's mean over space."""
    maps = _fitting(output, "pool")
    return maps.mean(dim=tuple(range(2, maps.ndim)), dtype=_summing_dtype(maps))


def tokens(output: Tensor, mask: Mask = None) -> Tensor:
    """Return one row per valid token."""
    sequences = _fitting(output, "tokens")
    rows = sequences.flatten(0, 1)
    return _raised(rows if mask is None else rows.index_select(0, token_mask(mask).places(sequences)))


def mean(output: Tensor, mask: Mask = None) -> Tensor:
    """Return one row per example: the mean over its valid tokens."""
    sequences = _fitting(output, "mean")
    if mask is None:
        return sequences.mean(dim=1, dtype=_summing_dtype(sequences))
    valid = _never_empty(sequences, mask)
    # filled rather than multiplied: padding may hold NaN, and NaN times zero is NaN
    total = sequences.masked_fill(~valid[..., None], 0).sum(dim=1, dtype=_summing_dtype(sequences))
    return total / valid.sum(dim=1, keepdim=True)


def cls(output: Tensor, mask: Mask = None) -> Tensor:
    """Return one row per example: its first valid token, which is position 0 unless that is padding."""
    sequences = _fitting(output, "cls")
    if mask is None:
        return _raised(sequences[:, 0])
    return _raised(_picked(sequences, _first(_never_empty(sequences, mask))))


def last(output: Tensor, mask: Mask = None) -> Tensor:
    """Return one row per example: its last valid token, whichever side is padded."""
    sequences = _fitting(output, "last")
    if mask is None:
        return _raised(sequences[:, -1])
    valid = _never_empty(sequences, mask)
    return _raised(_picked(sequences, valid.shape[1] - 1 - _first(valid.flip(1))))


def resize_to(maps: Tensor, size: int | tuple[int, ...]) -> Tensor:
    """Return feature maps averaged to another size of space: what ``resize="average"`` means.

    Example:
        >>> resize_to(torch.ones(2, 3, 8, 8), (4, 4)).shape
        torch.Size([2, 3, 4, 4])
    """
    averages: dict[int, Callable[..., Tensor]] = {4: functional.adaptive_avg_pool2d, 5: functional.adaptive_avg_pool3d}
    if maps.ndim not in averages:
        raise ShapeError(
            f"only feature maps n × c × h × w or n × c × d × h × w can be resized; got shape {tuple(maps.shape)}."
        )
    return averages[maps.ndim](_raised(maps), size)


SHAPES: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (flatten, positions, pool, dft, tokens, mean, cls, last)
}
FOR_MAPS = ("pool", "positions", "flatten", "dft")
FOR_TOKENS = ("mean", "tokens", "cls", "last", "flatten")
AT_POSITIONS = ("tokens", "mean", "last")  # which may be of some positions alone


def rows_of(output: Tensor, shape: Shape = None, mask: Mask = None) -> tuple[Tensor, str]:
    """Return a layer's output as a matrix of rows (with `dft`, as maps), and the name of the shape that made it.

    Matrices pass through under the name ``matrix``; None is `pool` for feature maps and `mean` for tokens.
    """
    name = "" if shape is None else shape_name(shape)
    if callable(shape) and name not in SHAPES:
        return _matrix_from(shape(output), name), name
    if output.ndim == 0:
        raise ShapeError("the output is a single number for the whole batch; choose a layer with one row per example.")
    if output.ndim <= 2:
        rows = output if output.ndim == 2 else output[:, None]
        return (rows if rows.dtype in SUMMED else rows.float()), "matrix"
    if "[" in name:
        return _rows_at_positions(output, *split_positions(name), mask)
    name = name or ("mean" if output.ndim == 3 else "pool")
    function = SHAPES[name]
    return (function(output, mask) if name in FOR_TOKENS else function(output)), name


def _rows_at_positions(output: Tensor, name: str, positions: str, mask: Mask) -> tuple[Tensor, str]:
    """Return the rows of some positions of sequences, and the name of the shape with them."""
    if output.ndim != 3:
        raise ShapeError(
            f"positions={positions!r} are those of tokens, and an output of shape {tuple(output.shape)} is taken as "
            "n × c × space; choose layers of tokens, or leave `positions` out."
        )
    name = name or "mean"
    return SHAPES[name](*at_positions(output, mask, positions)), f"{name}[{positions}]"


def adjoint_rows(gradient: Tensor, name: str, mask: Mask = None) -> Tensor:
    """Return the gradient at a layer's output in the rows of the shape `name`, as given by `rows_of`.

    What is averaged in an output is summed in its gradient: a step of the average, made at all places alike.
    """
    if name == "pool":
        return gradient.sum(dim=tuple(range(2, gradient.ndim)), dtype=_summing_dtype(gradient))
    kind, positions = split_positions(name)
    if kind == "mean":
        gradient, mask = at_positions(gradient, mask, positions)
        valid = None if mask is None else _never_empty(gradient, mask)
        at_valid = gradient if valid is None else gradient.masked_fill(~valid[..., None], 0)
        return at_valid.sum(dim=1, dtype=_summing_dtype(gradient))
    if kind not in ("matrix", *SHAPES):
        raise InvalidValue(
            f"gradients can't be put in the rows of the function {name!r}; choose {_list(SHAPES)}.", argument="shape"
        )
    return rows_of(gradient, None if name == "matrix" else name, mask)[0]


def shape_name(shape: Shape) -> str:
    """Return the name of a shape, empty for the default; a name that is none is refused."""
    if shape is None:
        return ""
    if callable(shape):
        name = getattr(shape, "__name__", type(shape).__name__)
        return name if shape is SHAPES.get(name) or name not in SHAPES else f"custom {name}"
    kind, positions = split_positions(shape)
    if positions and kind in ("", *AT_POSITIONS):
        return kind + f"[{normal_positions(positions)}]"
    if positions or kind not in SHAPES:
        raise UnknownName(
            f"no shape named {shape!r}{did_you_mean(str(shape), SHAPES) or ';'} there are {_list(SHAPES)}.",
            argument="shape",
        )
    return shape


def split_positions(name: str) -> tuple[str, str]:
    """Return the name of a shape and the positions that it is of, empty for all.

    Example:
        >>> split_positions("tokens[1:]"), split_positions("mean")
        (('tokens', '1:'), ('mean', ''))
    """
    kind, bracket, positions = name.partition("[") if name.endswith("]") else (name, "", "")
    return kind, positions.removesuffix("]") if bracket else ""


def has_first(name: str) -> bool:
    """Return whether the first token of a sequence is among those that a shape of this name is of."""
    positions = split_positions(name)[1]
    return not positions or as_slice(positions).start == 0


def as_slice(positions: str) -> slice:
    """Return positions as a slice whose start and step are numbers."""
    parts = re.fullmatch(r"(-?\d+)?:(-?\d+)?(?::(\d+)?)?", positions) if isinstance(positions, str) else None
    if parts is None or (parts[3] and not int(parts[3])):
        raise InvalidValue(
            "`positions` are written as a slice of a sequence's tokens, such as '1:', '1:-1' or '::4', with steps "
            f"forwards; got {positions!r}.",
            argument="positions", value=positions,
        )  # fmt: skip
    start, stop, step = (None if part is None else int(part) for part in parts.groups())
    return slice(start or 0, stop, step or 1)


def normal_positions(positions: str) -> str:
    """Return positions in one way of the several in which they can be written; empty for all.

    Example:
        >>> [normal_positions(positions) for positions in ("1:", "1::1", "0::4", "0:-1", ":")]
        ['1:', '1:', '::4', ':-1', '']
    """
    where = as_slice(positions)
    start, stop = where.start or "", "" if where.stop is None else where.stop
    normal = f"{start}:{stop}" + (f":{where.step}" if where.step > 1 else "")
    return "" if normal == ":" else normal


def with_positions(shape: Shape | Mapping[str, Shape], positions: str | None) -> Any:
    """Return a shape, or shapes by layer, of some positions alone; those for which they mean nothing are refused."""
    if not positions or not (positions := normal_positions(positions)):
        return shape
    if isinstance(shape, Mapping):
        return {layer: with_positions(one, positions) for layer, one in shape.items()}
    kind, before = split_positions(shape_name(shape))
    if is_custom(shape) or kind not in ("", *AT_POSITIONS) or before not in ("", positions):
        raise InvalidValue(
            f"positions={positions!r} go with the shapes {_list(AT_POSITIONS)}; got shape={shape_name(shape)!r}. In a "
            f"mapping by layers write those of tokens as 'tokens[{positions}]', and leave `positions` out.",
            argument="positions", value=positions,
        )  # fmt: skip
    return f"{kind}[{positions}]"


def at_positions(sequences: Tensor, mask: Mask, positions: str) -> tuple[Tensor, Mask]:
    """Return sequences and their mask, of some positions alone."""
    if not positions:
        return sequences, mask
    if mask is not None:
        return sequences, token_mask(mask).at(positions)
    chosen = sequences[:, as_slice(positions)]
    if not chosen.shape[1]:
        raise ShapeError(f"positions={positions!r} leave none of the {sequences.shape[1]} tokens of a sequence.")
    return chosen, None


def require_positions(shapes: Iterable[str], positions: str | None) -> None:
    """Refuse positions where no layer gives tokens, as its shape would say."""
    names = list(shapes)
    if positions and normal_positions(positions) and not any(split_positions(shape)[1] for shape in names):
        raise InvalidValue(
            f"positions={positions!r} are those of tokens, and no layer gives any: their shapes are "
            f"{', '.join(sorted(set(names)))}; leave `positions` out.",
            argument="positions", value=positions,
        )  # fmt: skip


def valid_tokens(mask: Mask, name: str) -> Tensor | None:
    """Return which tokens are the rows of a shape of this name, examples × tokens; None for others and no mask."""
    kind, positions = split_positions(name)
    return token_mask(mask).at(positions).tokens if mask is not None and kind == "tokens" else None


def is_custom(shape: Shape) -> TypeGuard[Callable[[Tensor], Tensor]]:
    """Return whether a shape is a function of the caller's own, which gets a layer's output as it is."""
    return callable(shape) and shape_name(shape) not in SHAPES


def shape_for(name: str, shape: Shape | Mapping[str, Shape]) -> Shape:
    """Return the shape for the layer `name`, where `shape` may be one for all or a mapping from layers or globs.

    As in `layers`, ``*`` does not cross dots and ``**`` does; the first glob that fits counts, a plain name before all.

    Example:
        >>> [shape_for(name, {"layer*": "pool", "**": "flatten"}) for name in ("layer1", "layer1.0", "fc")]
        ['pool', 'flatten', 'flatten']
    """
    if not isinstance(shape, Mapping):
        return shape
    names = (name, split_call(name)[0])
    exact = next((layer for layer in names if layer in shape), None)
    matching = (pattern for pattern in shape if matching_names(names, pattern))
    key = exact if exact is not None else next(matching, None)
    return None if key is None else shape[key]


def require_known_layers(shape: Shape | Mapping[str, Shape], *models: Any) -> None:
    """Refuse a mapping of shapes in which a name or a glob stands for no layer of models or of recorded arrays."""
    if not (isinstance(shape, Mapping) and all(isinstance(model, (nn.Module, Mapping)) for model in models)):
        return  # models given by name are loaded elsewhere
    known = [name for model in models for name in (modules(model) if isinstance(model, nn.Module) else model)]
    for key in shape:
        if split_call(key)[0] not in known and not matching_names(known, key):
            raise UnknownName(
                f"`shape` has {key!r}, and there is no such layer{hint_for(known, key)}", argument="shape"
            )


def _fitting(output: Tensor, name: str) -> Tensor:
    """Return `output` if the shape `name` fits it, otherwise say which ones do."""
    fitting = FOR_MAPS if output.ndim >= 4 else FOR_TOKENS if output.ndim == 3 else ()
    if name in fitting:
        return output
    kind = "n × c × space" if output.ndim >= 4 else "n × tokens × features"
    fact = f"shape {name!r} does not fit an output of shape {tuple(output.shape)}"
    if not fitting:
        raise ShapeError(f"{fact}, which needs none: use it as it is.")
    raise ShapeError(f"{fact}, taken as {kind}; choose {_list(fitting)}, or pass a function.")


def token_mask(mask: Any) -> TokenMask:
    """Return a mask of tokens, which may be one already."""
    return mask if isinstance(mask, TokenMask) else TokenMask(mask)


def _never_empty(sequences: Tensor, mask: Any) -> Tensor:
    mask = token_mask(mask)
    valid = mask.valid(sequences)
    mask.require_tokens()
    return valid


def _first(valid: Tensor) -> Tensor:
    return valid.to(torch.uint8).argmax(dim=1)


def _picked(sequences: Tensor, places: Tensor) -> Tensor:
    return sequences[torch.arange(len(sequences), device=sequences.device), places]


def _matrix_from(rows: Any, name: str) -> Tensor:
    if not isinstance(rows, Tensor) or rows.ndim != 2:
        got = f"shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ShapeError(f"the shape function {name!r} must return a matrix with one row per example; it gave {got}.")
    return _raised(rows)


def _raised(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in SUMMED else tensor.float()


def _summing_dtype(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype in SUMMED else torch.float32


def _list(names: Any) -> str:
    *most, final = [repr(name) for name in names]
    return f"{', '.join(most)} or {final}"


def rows_by_place(output: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return activations as rows: one for each place, valid token or example."""
    if output.ndim == 2:
        return rows_of(output)[0]
    return rows_of(output, "tokens", mask)[0] if output.ndim == 3 else rows_of(output, "positions")[0]


def product_layout(output: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return activations as products take them: maps n × c × places, if there are many places, otherwise rows."""
    if output.ndim > 3 and output[0, 0].numel() >= PLACES:
        maps = output.flatten(2)
        return maps if maps.dtype in (torch.float32, torch.float64) else maps.float()
    return rows_by_place(output, mask)


def fitting_mask(mask: Any, output: Tensor) -> Any:
    """Return the batch's mask of valid tokens if it is one for this output, otherwise None."""
    fits = mask is not None and output.ndim == 3 and tuple(mask.shape) == tuple(output.shape[:2])
    return mask if fits else None


def over_length(output: Tensor) -> Tensor:
    """Return the mean over the places of maps of one dimension."""
    return output.mean(2)


def resized(maps: Tensor, size: tuple[int, ...], method: str) -> Tensor:
    """Return maps in another size, by their average, as the nearest or by linear interpolation."""
    if method == "average" and len(size) == 1:
        return resize_to(maps.unsqueeze(2), (1, *size)).squeeze(2).to(maps.dtype)
    if method == "average":
        return resize_to(maps, size).to(maps.dtype)
    if method == "nearest":
        return functional.interpolate(maps, size, mode=method)
    mode = ("linear", "bilinear", "trilinear")[len(size) - 1]
    return functional.interpolate(maps, size, mode=mode, align_corners=False)
