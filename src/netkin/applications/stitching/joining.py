"""Joining: the kind of activations a layer gives, in which form they meet another's, and which layers can be joined.

Feature maps are n × c × space, tokens n × t × d, rows n × d. A map becomes tokens, one for each position, with its
mean in front for each class token; tokens become a map again without their class tokens.

Three dimensions are n × c × length, a map of one dimension, where the module's type says so (see `gives_lines`). All
others are tokens. Tokens without class tokens become such a one-dimensional map.

Joints: which pairs of layers of two models can be joined, tested on a few examples. A trial run determines the kind of
activations of each layer, whether those of an example depend on the others in its batch, and after which layers the
second model can be cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from netkin.comparing.alignment import Pairs
from netkin.comparing.spec import layers_by_name
from netkin.errors import ForwardError, InvalidValue, NetkinError, ShapeError, UnknownName
from netkin.representations import inference_mode_of, recording, rows_of
from netkin.representations.cutting import Traces, agrees, known_layer, reaches_around, run_layers, run_until, tail
from netkin.representations.hooks import at, main_tensor, path_to_tensor, uncompiled
from netkin.representations.inputs import batch_length, feed, take
from netkin.representations.layers import choose, gives_lines, layer_label, modules, split_call, unwrapped
from netkin.representations.shapes import fitting_mask, over_length, resized, rows_by_place
from netkin.results.values import Pair as Pair

FEW = 4  # examples on which layers are tried out
RESIZES = ("average", "bilinear", "nearest")
CLASS_TOKENS = 5  # at most: one for the class and four registers


@dataclass(frozen=True)
class LayerOutput:
    """One layer's side of a stitch: the kind and the sizes of its output."""

    kind: str
    width: int
    space: tuple[int, ...] = ()  # of a map
    tokens: int = 0

    @classmethod
    def of(cls, output: Tensor, name: str, *, line: bool = False) -> LayerOutput:
        """Return the end that a layer's `output` is; three dimensions are tokens, or a map of one where `line`."""
        if output.ndim in (4, 5) or (output.ndim == 3 and line):
            return cls("maps", output.shape[1], tuple(output.shape[2:]))
        if output.ndim == 3:
            return cls("tokens", output.shape[2], tokens=output.shape[1])
        if output.ndim == 2:
            return cls("rows", output.shape[1])
        raise ShapeError(
            f"{name} gives an output of shape {tuple(output.shape)}; a stitch joins feature maps, tokens or rows."
        )

    @property
    def is_line(self) -> bool:
        """Whether this is a map of one dimension."""
        return len(self.space) == 1

    @property
    def form(self) -> str:
        """The kind, with maps of one dimension as a kind of their own."""
        return "lines" if self.is_line else self.kind

    def spread(self, output: Tensor) -> Tensor:
        """Return activations in an unambiguous form: a map of one dimension has two, n × c × 1 × length."""
        return output.unsqueeze(2) if self.is_line else output

    def rows(self, output: Tensor, mask: Any = None) -> Tensor:
        """Return activations of this end as rows: one for each place, valid token or example."""
        spread = self.spread(output)
        return rows_by_place(spread, fitting_mask(mask, spread))

    def places(self, other: LayerOutput) -> tuple[int, ...]:
        """Return the size of the map that this end is, or is laid out as for `other`: a line or a square."""
        if self.kind == "maps":
            return self.space
        if other.is_line:
            return (self.tokens,)
        side = math.isqrt(self.tokens)
        if self.tokens - side**2 > CLASS_TOKENS:
            raise ShapeError(
                f"{self} are no square of positions with up to {CLASS_TOKENS} class tokens before it, so they can't be "
                "laid out as a map; stitch them with tokens."
            )
        return side, side

    def __str__(self) -> str:
        size = f" of length {self.space[0]}" if self.is_line else f" of {'×'.join(map(str, self.space))}"
        sizes = {"maps": size, "tokens": f", {self.tokens} a sequence"}
        return f"{self.kind} of width {self.width}{sizes.get(self.kind, '')}"


class Adapter:
    """How the activations of end `a` take the form of end `b`, in their own width; refused where they cannot."""

    def __init__(self, a: LayerOutput, b: LayerOutput, resize: str | None = None):
        if resize not in (None, *RESIZES):
            raise UnknownName(
                f"`resize` is None, 'average', 'bilinear' or 'nearest'; got {resize!r}.", argument="resize"
            )
        if a.kind == "rows" and b.kind != "rows":
            raise ShapeError(
                f"rows have no positions, so {a} can't be stitched into {b}; choose an earlier layer of the first."
            )
        if a.kind == b.kind == "tokens" and a.tokens != b.tokens:
            raise ShapeError(
                f"sequences of {a.tokens} and {b.tokens} tokens can't be stitched token by token; choose layers with "
                "as many tokens, or a layer of rows of the second."
            )
        self.a, self.b = a, b
        sizes = self._sizes
        shrinks = sizes is not None and all(x >= y for x, y in zip(*sizes, strict=True))
        is_needed = sizes is not None and sizes[0] != sizes[1]
        self.resize = (resize or ("average" if shrinks else "bilinear")) if is_needed else None

    @property
    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The sizes of the two maps, or None where none is involved."""
        if self.b.kind == "rows" or self.a.kind == self.b.kind == "tokens":
            return None
        ours, theirs = self.a.places(self.b), self.b.places(self.a)
        if len(ours) != len(theirs):
            raise ShapeError(
                f"{self.a} and {self.b} have different numbers of dimensions and can't be stitched; choose layers with "
                "as many, or a layer of rows of the second."
            )
        return ours, theirs

    def __call__(self, output: Tensor) -> Tensor:
        """Return the activations of `a` in the form of `b`."""
        if self.b.kind == "rows":
            return output if self.a.kind == "rows" else rows_of(self.a.spread(output))[0].to(output.dtype)
        sizes = self._sizes
        if sizes is None:
            return output
        maps = output
        if self.a.kind == "tokens":
            class_tokens = output.shape[1] - math.prod(sizes[0])
            maps = output[:, class_tokens:].transpose(1, 2).unflatten(2, sizes[0])
        if self.resize:
            maps = resized(maps, sizes[1], self.resize)
        if self.b.kind == "maps":
            return maps
        tokens = maps.flatten(2).transpose(1, 2)
        means = tokens.mean(1, keepdim=True).expand(-1, self.b.tokens - tokens.shape[1], -1)
        return torch.cat([means, tokens], 1)

    @property
    def words(self) -> str:
        """What is done, as text; empty where nothing is."""
        steps = [] if self.a.form == self.b.form else [f"{self.a.form} as {self.b.form}"]
        sizes = self._sizes
        if self.resize and sizes:
            ours, theirs = ("×".join(map(str, size)) for size in sizes)
            steps.append(f"{ours} resized to {theirs} ({self.resize})")
        return ", ".join(steps)


@dataclass(frozen=True)
class Joints:
    """The requested pairs of layers: how those that can be joined are connected, and for the others the reason.

    `forms` are the kinds of activations by layer, and `cuts` tells for each layer of the second model whether what
    follows it could be cut off.
    """

    models: tuple[nn.Module, nn.Module]
    names: tuple[str, str]
    layers: tuple[tuple[str, ...], tuple[str, ...]]
    wanted: tuple[Pair, ...]
    adapters: Mapping[Pair, Adapter]
    refused: Mapping[Pair, NetkinError]
    widths: tuple[Mapping[str, int], Mapping[str, int]]
    forms: Mapping[str, str]
    cuts: Mapping[str, bool] = field(default_factory=dict)
    unequal: bool = False  # whether maps of different sizes are joined

    def raise_first(self) -> None:
        """Raise the reason of the first pair that can't be joined."""
        for pair in self.wanted:
            if pair in self.refused:
                raise self.refused[pair]

    @property
    def shape(self) -> tuple[Any, str | None]:
        """The `shape` and `resize` by which similarities compare the layers: by places, or by means over them.

        Places where all are maps of two or three dimensions, or rows; means where there are tokens, or lines.
        """
        if not {"tokens", "lines"} & {*self.forms.values()}:
            return "positions", "average" if self.unequal else None
        return {layer: over_length for layer, form in self.forms.items() if form == "lines"} or None, None


def joints(
    a: nn.Module,
    b: nn.Module,
    batch: Any,
    layers: Any = None,
    pairs: Any = "corresponding",
    *,
    resize: str | None = None,
    names: tuple[str, str] = ("a", "b"),
) -> Joints:
    """Return which pairs of layers can be joined, tested on a few examples of a batch.

    Args:
        a: the first model.
        b: the second model.
        batch: some examples.
        layers: which layers (see `nk.layers`), for both models or by "a" and "b".
        pairs: "corresponding", "all" or a list of (layer, layer).
        resize: how maps get another size.
        names: what messages call the models.
    """
    chosen = _choose_layers(a, b, layers, pairs, names)
    listed = layers is None and not isinstance(pairs, str)
    ours = _try_out(a, chosen[0], batch, names[0], listed=listed, whole=False).ends
    trial = _try_out(b, chosen[1], batch, names[1], listed=listed)
    theirs = trial.ends
    given = (tuple(ours), tuple(theirs))
    sides = names if names[0] != names[1] else ("a", "b")
    wanted = tuple(dict.fromkeys(Pairs([sides], pairs).layer_pairs(dict(zip(sides, given, strict=True)), *sides)))
    found = {(x, y): _adapter(ours[x], theirs[y], resize) for x, y in wanted}
    cuts = _cuts(trial, {y for (_, y), one in found.items() if isinstance(one, Adapter)})
    for pair, one in found.items():
        reason = cuts.get(pair[1])
        found[pair] = reason if isinstance(one, Adapter) and isinstance(reason, NetkinError) else one
    known = [{layer: end for layer, end in ends.items() if isinstance(end, LayerOutput)} for ends in (ours, theirs)]
    spaces = [{layer: end.space for layer, end in ends.items()} for ends in known]
    return Joints(
        models=(a, b),
        names=names,
        layers=given,
        wanted=wanted,
        adapters={pair: one for pair, one in found.items() if isinstance(one, Adapter)},
        refused={pair: one for pair, one in found.items() if isinstance(one, NetkinError)},
        widths=({x: end.width for x, end in known[0].items()}, {y: end.width for y, end in known[1].items()}),
        forms={layer: end.form for ends in known for layer, end in ends.items()},
        cuts={layer: cut for layer, cut in cuts.items() if isinstance(cut, bool)},
        unequal=any(spaces[0].get(x) != spaces[1].get(y) for x, y in wanted),
    )


def _choose_layers(
    a: nn.Module, b: nn.Module, layers: Any, pairs: Any, names: tuple[str, str]
) -> tuple[list[str], list[str]]:
    """Return the layers of both models that are tried out: those that listed pairs name, or those requested."""
    listed = layers is None and not isinstance(pairs, str)
    if listed:
        which: list[Pair] = Pairs([], pairs).which
        both: list[Any] = [list(dict.fromkeys(layers)) for layers in zip(*which, strict=True)]
    else:
        both = list(layers_by_name(layers, names).values())
    found = list[list[str]]()
    for model, name, asked in zip((a, b), names, both, strict=True):
        try:
            for layer in asked if listed else ():
                known_layer(model, layer)  # refuses what is no single layer
            found.append(asked if listed else choose(model, asked))
        except UnknownName as fault:
            raise UnknownName(f"in {name!r}, a {type(unwrapped(model)).__name__}: {fault}") from fault
    return found[0], found[1]


@dataclass(frozen=True)
class _Trial:
    """What a model gives for a few examples: the end of each layer or why it has none, its outputs, and the answers.

    `fewer` are the answers for the first two of the examples, `again` those for all of them in another run.
    """

    model: nn.Module
    name: str
    few: Any
    ends: Mapping[str, LayerOutput | NetkinError]
    outputs: Mapping[str, Tensor]
    answers: Any
    fewer: Any
    again: Any


def _try_out(
    model: nn.Module, layers: Sequence[str], batch: Any, name: str, *, listed: bool, whole: bool = True
) -> _Trial:
    """Run a model on four examples and on two of them, no further than needed unless the `whole` is wanted."""

    def run(few: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the answers and the outputs of the layers: of those `listed`, or of all their calls."""
        if not listed:
            with recording(model, layers) as kept:
                return feed(model, few), dict(kept)
        outputs: dict[str, Tensor] = {}

        ran = run_layers(model, layers, few, lambda x, output: outputs.update({x: output.clone()}), name, whole=whole)
        return ran, outputs

    with inference_mode_of(model, exact=True):
        (answers, many), (fewer, few) = (run(take(batch, count)) for count in (FEW, 2))
        again = run(take(batch, FEW))[0] if whole else None
    known = modules(model)
    ends: dict[str, LayerOutput | NetkinError] = {}
    for layer, output in few.items():
        who = f"{layer_label(layer)} of {name!r}"
        said = f"{who} gives other values for an example when other examples are in its batch, or by chance"
        try:
            _require_independent(output, many.get(layer, output), said)
            ends[layer] = LayerOutput.of(output, who, line=gives_lines(known, split_call(layer)[0]))
        except (ShapeError, InvalidValue) as reason:
            ends[layer] = reason
    return _Trial(model, name, take(batch, FEW), ends, many, answers, fewer, again)


def _adapter(
    ours: LayerOutput | NetkinError, theirs: LayerOutput | NetkinError, resize: str | None
) -> Adapter | NetkinError:
    """Return how two layers are connected, or why they can't be joined."""
    if isinstance(ours, NetkinError):
        return ours
    if isinstance(theirs, NetkinError):
        return theirs
    try:
        return Adapter(ours, theirs, resize)
    except ShapeError as reason:
        return reason


def _cuts(trial: _Trial, layers: Iterable[str]) -> dict[str, bool | NetkinError]:
    """Return for each layer of the second model whether it can be cut there, or else why no stitch may end there."""
    cuts: dict[str, bool | NetkinError] = {}
    traces: Traces = {}
    with inference_mode_of(trial.model, exact=True):
        for layer in layers:
            try:
                _require_steady(trial)
                output, found = trial.outputs[layer], tail(trial.model, layer, traces=traces)
                with uncompiled(trial.model):  # as the trial ran; a cut must give the model's own outputs
                    cuts[layer] = found.graph is not None and agrees(found, output, trial.few, trial.answers)
                if layer and not cuts[layer] and reaches_around(trial.model, layer, output, trial.few):
                    raise InvalidValue(
                        f"layer {layer!r} of {trial.name!r} has a path around it, by which its own features would "
                        f"reach its output beside the stitch; {_advice(trial.model, layer, trial.few)}."
                    )
            except InvalidValue as reason:
                cuts[layer] = reason
    return cuts


def _require_steady(trial: _Trial) -> None:
    """Refuse a second model whose outputs are not finite, or are random or depend on the other examples."""
    path = path_to_tensor(trial.answers)
    if path is None:  # it answers in no floating numbers
        return
    many, few, again = (at(answers, path) for answers in (trial.answers, trial.fewer, trial.again))
    bad = int((~torch.isfinite(many)).sum())
    if bad:
        raise InvalidValue(
            f"the output of {trial.name!r} holds {bad:,} NaN or Inf among {many.numel():,} values for the first "
            f"{batch_length(trial.few)} examples; fix its weights, or leave out these examples."
        )
    _require_close(many, again, f"{trial.name!r} answers the same examples differently when it is asked again")
    _require_independent(
        few, many, f"{trial.name!r} gives other answers for an example when other examples are in its batch"
    )


def _require_independent(few: Tensor, many: Tensor, what: str) -> None:
    if few.ndim and many.ndim and len(few) == 2 < len(many):
        _require_close(few, many[:2], what)


def _require_close(one: Tensor, other: Tensor, what: str) -> None:
    if one.shape != other.shape or not bool(torch.isfinite(other).all()):
        return  # what is not finite is refused elsewhere, with its number
    off = float((other - one).abs().max() / one.abs().max().clamp(min=1e-30))
    if off > (1e-3 if torch.finfo(one.dtype).eps < 1e-6 else 0.1):
        raise InvalidValue(
            f"{what} (by {off:.1%} of the largest); a stitch needs models whose evaluation mode draws nothing at "
            "random and uses stored statistics."
        )


def _advice(b: nn.Module, layer: str, batch: Any) -> str:
    """Return what to choose instead: the nearest module around `layer` that has no path around itself."""
    above = layer.rpartition(".")[0]
    while above:
        with suppress(ForwardError):  # a list of modules does not run itself
            output = main_tensor(run_until(b, above, batch), above)
            if not reaches_around(b, above, output, batch):
                return f"choose {above!r}, which encloses both"
        above = above.rpartition(".")[0]
    return "choose a layer that all paths lead through"
