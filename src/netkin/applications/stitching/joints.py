"""Joints: which pairs of layers of two models can be joined, tested on a few examples.

A trial run determines the kind of activations of each layer, whether those of an example depend on the others in its
batch, and after which layers the second model can be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.stitching.ends import End, Meeting, Pair, gives_lines
from netkin.comparing.alignment import Pairs
from netkin.errors import ForwardError, NetkinError, ShapeError, UnknownName, ValueFault
from netkin.representations import guest, recording
from netkin.representations.cutting import Traces, agrees, known_layer, reaches_around, run_until, tail
from netkin.representations.hooks import at, main_tensor, path_to_tensor, uncompiled
from netkin.representations.inputs import batch_length, feed, take
from netkin.representations.layers import choose, layer_label, modules, split_call, unwrapped

Observe = Callable[[str, Tensor], None]
FEW = 4  # examples on which layers are tried out


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
    meetings: Mapping[Pair, Meeting]
    refused: Mapping[Pair, NetkinError]
    widths: tuple[Mapping[str, int], Mapping[str, int]]
    forms: Mapping[str, str]
    cuts: Mapping[str, bool] = field(default_factory=dict)
    unequal: bool = False  # whether maps of different sizes are joined

    def refuse(self) -> None:
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
    found = {(x, y): _meeting(ours[x], theirs[y], resize) for x, y in wanted}
    cuts = _cuts(trial, {y for (_, y), one in found.items() if isinstance(one, Meeting)})
    for pair, one in found.items():
        reason = cuts.get(pair[1])
        found[pair] = reason if isinstance(one, Meeting) and isinstance(reason, NetkinError) else one
    known = [{layer: end for layer, end in ends.items() if isinstance(end, End)} for ends in (ours, theirs)]
    spaces = [{layer: end.space for layer, end in ends.items()} for ends in known]
    return Joints(
        models=(a, b),
        names=names,
        layers=given,
        wanted=wanted,
        meetings={pair: one for pair, one in found.items() if isinstance(one, Meeting)},
        refused={pair: one for pair, one in found.items() if isinstance(one, NetkinError)},
        widths=({x: end.width for x, end in known[0].items()}, {y: end.width for y, end in known[1].items()}),
        forms={layer: end.form for ends in known for layer, end in ends.items()},
        cuts={layer: cut for layer, cut in cuts.items() if isinstance(cut, bool)},
        unequal=any(spaces[0].get(x) != spaces[1].get(y) for x, y in wanted),
    )


def over_length(output: Tensor) -> Tensor:
    """Return the mean over the places of maps of one dimension."""
    return output.mean(2)


def _choose_layers(
    a: nn.Module, b: nn.Module, layers: Any, pairs: Any, names: tuple[str, str]
) -> tuple[list[str], list[str]]:
    """Return the layers of both models that are tried out: those that listed pairs name, or those requested."""
    if layers is None and not isinstance(pairs, str):
        listed: list[Pair] = Pairs([], pairs).which
        return _known_layers(a, [x for x, _ in listed], names[0]), _known_layers(b, [y for _, y in listed], names[1])
    both = layers if isinstance(layers, Mapping) else {"a": layers, "b": layers}
    strange = next((key for key in both if key not in ("a", "b")), None)
    if strange is not None:
        raise ValueFault(f"`layers` names {strange!r}; the models are 'a' and 'b'.")
    with _naming(a, names[0]):
        ours = choose(a, both.get("a"))
    with _naming(b, names[1]):
        return ours, choose(b, both.get("b"))


def _known_layers(model: nn.Module, layers: Sequence[str], name: str) -> list[str]:
    """Return single layers of a model by name."""
    with _naming(model, name):
        known = modules(model)
        for layer in layers:
            if split_call(layer)[0] not in known:
                known_layer(model, layer)  # refuses it
        return list(dict.fromkeys(layers))


@contextmanager
def _naming(model: nn.Module, name: str) -> Iterator[None]:
    """Say in which model a layer was not found."""
    try:
        yield
    except UnknownName as fault:
        raise UnknownName(f"in {name!r}, a {type(unwrapped(model)).__name__}: {fault}") from fault


@dataclass(frozen=True)
class _Trial:
    """What a model gives for a few examples: the end of each layer or why it has none, its outputs, and the answers.

    `fewer` are the answers for the first two of the examples, `again` those for all of them in another run.
    """

    model: nn.Module
    name: str
    few: Any
    ends: Mapping[str, End | NetkinError]
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

        def keep(layer: str, output: Tensor) -> None:
            outputs[layer] = output.clone()

        return run_layers(model, layers, few, keep, name, whole=whole), outputs

    with guest(model, exact=True):
        (answers, many), (fewer, few) = (run(take(batch, count)) for count in (FEW, 2))
        again = run(take(batch, FEW))[0] if whole else None
    known = modules(model)
    ends = {layer: _end(known, layer, output, many.get(layer, output), name) for layer, output in few.items()}
    return _Trial(model, name, take(batch, FEW), ends, many, answers, fewer, again)


def _end(known: Mapping[str, nn.Module], layer: str, few: Tensor, many: Tensor, name: str) -> End | NetkinError:
    """Return what a layer is, or why it can't be joined: where an example's output depends on the others."""
    who = f"{layer_label(layer)} of {name!r}"
    try:
        said = f"{who} gives other values for an example when other examples are in its batch, or by chance"
        _refuse_dependent(few, many, said)
        return End.of(few, who, line=gives_lines(known, split_call(layer)[0]))
    except (ShapeError, ValueFault) as reason:
        return reason


def _meeting(ours: End | NetkinError, theirs: End | NetkinError, resize: str | None) -> Meeting | NetkinError:
    """Return how two layers are connected, or why they can't be joined."""
    for end in (ours, theirs):
        if isinstance(end, NetkinError):
            return end
    assert isinstance(ours, End)
    assert isinstance(theirs, End)
    try:
        return Meeting(ours, theirs, resize)
    except ShapeError as reason:
        return reason


def _cuts(trial: _Trial, layers: Iterable[str]) -> dict[str, bool | NetkinError]:
    """Return for each layer of the second model whether it can be cut there, or else why no stitch may end there."""
    cuts: dict[str, bool | NetkinError] = {}
    traces: Traces = {}
    with guest(trial.model, exact=True):
        try:
            _refuse_unsteady(trial)
        except ValueFault as reason:
            return dict.fromkeys(layers, reason)
        for layer in layers:
            try:
                cuts[layer] = _can_be_cut(trial, layer, traces)
            except ValueFault as reason:
                cuts[layer] = reason
    return cuts


def _refuse_unsteady(trial: _Trial) -> None:
    """Refuse a second model whose outputs are not finite, or are random or depend on the other examples."""
    path = path_to_tensor(trial.answers)
    if path is None:  # it answers in no floating numbers
        return
    many, few, again = (at(answers, path) for answers in (trial.answers, trial.fewer, trial.again))
    bad = int((~torch.isfinite(many)).sum())
    if bad:
        raise ValueFault(
            f"the output of {trial.name!r} holds {bad:,} NaN or Inf among {many.numel():,} values for the first "
            f"{batch_length(trial.few)} examples; fix its weights, or leave out these examples."
        )
    _refuse_apart(many, again, f"{trial.name!r} answers the same examples differently when it is asked again")
    said = f"{trial.name!r} gives other answers for an example when other examples are in its batch"
    _refuse_dependent(few, many, said)


def _refuse_dependent(few: Tensor, many: Tensor, what: str) -> None:
    if few.ndim and many.ndim and len(few) == 2 < len(many):
        _refuse_apart(few, many[:2], what)


def _refuse_apart(one: Tensor, other: Tensor, what: str) -> None:
    if one.shape != other.shape or not bool(torch.isfinite(other).all()):
        return  # what is not finite is refused elsewhere, with its number
    off = float((other - one).abs().max() / one.abs().max().clamp(min=1e-30))
    if off > (1e-3 if torch.finfo(one.dtype).eps < 1e-6 else 0.1):
        raise ValueFault(
            f"{what} (by {off:.1%} of the largest); a stitch needs models whose evaluation mode draws nothing at "
            "random and uses stored statistics."
        )


def _can_be_cut(trial: _Trial, layer: str, traces: Traces) -> bool:
    """Return whether the model can be cut after a layer: the tail then gives the model's own outputs.

    A layer with a path around it is refused: the model's own features would reach its output beside the stitch.
    """
    output, found = trial.outputs[layer], tail(trial.model, layer, traces=traces)
    with uncompiled(trial.model):  # as the trial ran
        if found.graph is not None and agrees(found, output, trial.few, trial.answers):
            return True
    if layer and reaches_around(trial.model, layer, output, trial.few):
        raise ValueFault(
            f"layer {layer!r} of {trial.name!r} has a path around it, by which its own features would reach its "
            f"output beside the stitch; {_advice(trial.model, layer, trial.few)}."
        )
    return False


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


def run_layers(
    model: nn.Module, layers: Iterable[str], batch: Any, react: Observe, name: str, *, whole: bool = False
) -> Any:
    """Run a model on a batch, call `react` with each of the layers and its output, and return the model's answers.

    With one layer the model is run no further than to it, unless the `whole` is wanted.
    """
    calls: dict[str, list[str]] = {}
    for layer in dict.fromkeys(layers):
        stem, number = split_call(layer)
        calls.setdefault(f"{stem}#{number or 1}", []).append(layer)

    def react_all(call: str, output: Tensor) -> None:
        for layer in calls[call]:
            react(layer, output)

    if len(calls) == 1 and not whole:
        (call,) = calls
        output = run_until(model, calls[call][0], batch)
        return react_all(call, main_tensor(output, calls[call][0]))
    with recording(model, list(calls), react_all) as ran:
        answers = feed(model, batch)
    for call in calls.keys() - ran.keys():
        raise ForwardError(
            f"{layer_label(calls[call][0])} of {name!r} did not run in the forward of this batch; choose one that does."
        )
    return answers
