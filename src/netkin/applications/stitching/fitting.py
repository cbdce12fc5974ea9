"""Fitting: what direct matching needs of all pairs of layers that are to be stitched, in one pass over the data.

Rows are places of maps, tokens of sequences, or examples. Both models run once on each batch, and nothing is kept but
sums, so memory does not grow with the number of examples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.stitching.ends import End, Meeting, Pair, fitting_mask, gives_lines
from netkin.applications.stitching.gathering import Gathering
from netkin.applications.stitching.matching import LinearMap, find, least_squares, matched, reduced_rank
from netkin.errors import ForwardError, InflatedWarning, NetkinError, ShapeError, UnknownName, ValueFault
from netkin.identity import UnorderedDigest
from netkin.representations import guest
from netkin.representations.cutting import known_layer, run_until
from netkin.representations.hooks import main_tensor, watching
from netkin.representations.inputs import batch_length, feed, mask_of, take, watched
from netkin.representations.layers import layer_label, modules, split_call, unwrapped
from netkin.representations.nesting import at, path_to_tensor
from netkin.statistics import Moments

React = Callable[[str, Tensor], None]


class Fit:
    """What one pass told of the pairs of layers: how they meet, and what direct matching reads."""

    def __init__(
        self, meetings: Mapping[Pair, Meeting], gathering: Gathering, names: tuple[str, str], digest: UnorderedDigest
    ):
        self.meetings, self.digest, self.examples = meetings, digest, digest.count
        self._gathering, self._names = gathering, names

    def moments(self, pair: Pair) -> Moments:
        """Return the moments of a pair, the first layer in the form of the second; of that one only the mean."""
        return self._gathering.moments(_keys(pair, self.meetings[pair], self._names))

    def map(self, pair: Pair, how: str) -> LinearMap:
        """Return the map that a direct method finds; where any data would be met exactly a warning says so."""
        moments = self.moments(pair)
        method, parameters = find(how)
        unknowns = moments.x.width + parameters.get("affine", True)
        if moments.n < unknowns and method in (least_squares, reduced_rank):
            warnings.warn(
                f"{moments.n:,} rows of {moments.x.name} are fewer than the {unknowns:,} unknowns for each unit, so "
                f"{how!r} meets these rows whatever they are; give more data, {10 * unknowns:,} rows or so, or choose "
                "'ridge'.",
                InflatedWarning,
                stacklevel=2,
            )
        return matched(moments, how)


def fitted(
    a: nn.Module,
    b: nn.Module,
    pairs: Sequence[Pair],
    data: Any,
    *,
    examples: int | None = None,
    resize: str | None = None,
    names: tuple[str, str] = ("a", "b"),
    look: Callable[[Any], None] | None = None,
) -> Fit:
    """Return the moments of pairs of layers of `a` and `b` over the data.

    `look` is called with a few examples before all others are passed through.
    """
    with guest(a, b, exact=True):
        batches = watched(data, examples, "fitting")
        first = next(batches)
        meetings = meetings_of(a, b, pairs, first, resize=resize, names=names)
        if look is not None:
            look(take(first, 4))
        gathering = Gathering(_keys(pair, meeting, names) for pair, meeting in meetings.items())
        digest = UnorderedDigest()
        with _both(a, b, meetings, gathering, names) as fold:
            for batch in chain([first], batches):
                fold(batch)
                digest.update(batch, batch_length(batch))
    return Fit(meetings, gathering, names, digest)


def meetings_of(
    a: nn.Module,
    b: nn.Module,
    pairs: Sequence[Pair],
    batch: Any,
    *,
    resize: str | None = None,
    names: tuple[str, str] = ("a", "b"),
) -> dict[Pair, Meeting]:
    """Return how the layers of each pair meet, learned from a few examples of a batch."""
    if not pairs:
        raise ValueFault("no pairs of layers to stitch were given.")
    ours = _ends(a, [x for x, _ in pairs], batch, names[0])
    theirs = _ends(b, [y for _, y in pairs], batch, names[1])
    return {(x, y): Meeting(ours[x], theirs[y], resize) for x, y in pairs}


def _ends(model: nn.Module, layers: Sequence[str], batch: Any, name: str) -> dict[str, End]:
    """Return the ends of layers; one that can't be joined to anything is refused."""
    ends: dict[str, End] = {}
    with named(model, name):
        found = ends_of(model, partial(_outputs, model, layers, name), batch, name)
    for layer, end in found.items():
        if isinstance(end, NetkinError):
            raise end
        ends[layer] = end
    return ends


def ends_of(
    model: nn.Module, run: Callable[[Any], Mapping[str, Tensor]], batch: Any, name: str
) -> dict[str, End | NetkinError]:
    """Return what each layer is that `run` gives the outputs of, or why it can't be joined to anything.

    The latter is so where the output for an example depends on the others in the batch.
    """
    known = modules(model)
    ends: dict[str, End | NetkinError] = {}
    with guest(model, exact=True):
        many, few = ({**run(take(batch, count))} for count in (4, 2))
    for layer, output in few.items():
        who = f"{layer_label(layer)} of {name!r}"
        try:
            said = f"{who} gives other values for an example when other examples are in its batch, or by chance"
            _refuse_dependent(output, many.get(layer, output), said)
            ends[layer] = End.of(output, who, line=gives_lines(known, split_call(layer)[0]))
        except (ShapeError, ValueFault) as reason:
            ends[layer] = reason
    return ends


@contextmanager
def named(model: nn.Module, name: str) -> Iterator[None]:
    """Say of which model it was that a layer was not found."""
    try:
        yield
    except UnknownName as fault:
        raise UnknownName(f"in {name!r}, a {type(unwrapped(model)).__name__}: {fault}") from fault


def refuse_unsteady(b: nn.Module, batch: Any, name: str = "b") -> None:
    """Refuse a second model whose answers are not finite, or change by chance or with the other examples."""
    with guest(b, exact=True):
        whole = feed(b, take(batch, 4))
        path = path_to_tensor(whole)
        if path is None:  # it answers in no floating numbers
            return
        many, again, few = (at(output, path) for output in (whole, feed(b, take(batch, 4)), feed(b, take(batch, 2))))
    bad = int((~torch.isfinite(many)).sum())
    if bad:
        raise ValueFault(
            f"the output of {name!r} holds {bad:,} NaN or Inf among {many.numel():,} values for the first "
            f"{batch_length(take(batch, 4))} examples; mend its weights, or leave out these examples."
        )
    _refuse_apart(many, again, f"{name!r} answers the same examples differently when it is asked again")
    _refuse_dependent(few, many, f"{name!r} gives other answers for an example when other examples are in its batch")


def _outputs(model: nn.Module, layers: Sequence[str], name: str, batch: Any) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}
    with _watched(model, layers, lambda layer, output: outputs.update({layer: output.clone()}), name) as run:
        run(batch)
    return outputs


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


@contextmanager
def _both(
    a: nn.Module, b: nn.Module, meetings: Mapping[Pair, Meeting], gathering: Gathering, names: tuple[str, str]
) -> Iterator[Callable[[Any], None]]:
    """Give a function that folds a batch in, with the hooks of both models in place."""
    forms: dict[str, dict[str, Meeting]] = {}
    for pair, meeting in meetings.items():
        forms.setdefault(pair[0], {})[_keys(pair, meeting, names)[0]] = meeting
    aims = {pair[1]: meeting.b for pair, meeting in meetings.items()}
    masks: list[Any] = [None]

    def first(layer: str, output: Tensor) -> None:
        for key, meeting in forms[layer].items():
            form = meeting.b.spread(meeting(output))
            gathering.first(key, form, fitting_mask(masks[0], form))

    def second(layer: str, output: Tensor) -> None:
        form = aims[layer].spread(output)
        gathering.second(_named(layer, names[1]), form, fitting_mask(masks[0], form))

    with ExitStack() as stack:
        run_a = stack.enter_context(_watched(a, list(forms), first, names[0]))
        run_b = stack.enter_context(_watched(b, list(aims), second, names[1]))

        def fold(batch: Any) -> None:
            masks[0] = mask_of(batch)
            run_a(batch)
            run_b(batch)
            gathering.batch_is_over()

        yield fold


@contextmanager
def _watched(model: nn.Module, layers: Sequence[str], react: React, name: str) -> Iterator[Callable[[Any], None]]:
    """Give a function that runs the model on a batch and reacts to its layers, but not in other runs.

    With one layer, the model is run no further than to it.
    """
    calls: dict[str, list[str]] = {}
    for layer in dict.fromkeys(layers):
        stem, call = known_layer(model, layer)
        calls.setdefault(f"{stem}#{call or 1}", []).append(layer)
    ours, ran = [False], set()

    def reacting(call: str, output: Any) -> None:
        if ours[0]:
            ran.add(call)
            for layer in calls[call]:
                react(layer, main_tensor(output, layer))

    def run(batch: Any) -> None:
        ran.clear()
        ours[0] = True
        try:
            _run(model, [layers[0] for layers in calls.values()], batch)
        finally:
            ours[0] = False
        for call in calls.keys() - ran:
            raise ForwardError(
                f"{layer_label(calls[call][0])} of {name!r} did not run in the forward of this batch; "
                "choose one that does."
            )

    with watching(model, list(calls), reacting):
        yield run


def _run(model: nn.Module, layers: Sequence[str], batch: Any) -> None:
    if len(layers) == 1:
        run_until(model, layers[0], batch)
    else:
        feed(model, batch)


def _keys(pair: Pair, meeting: Meeting, names: tuple[str, str]) -> tuple[str, str]:
    """Return the names under which a pair is gathered: the first layer in each form that is wanted once."""
    count = f"{meeting.b.tokens} tokens" if meeting.words and meeting.b.tokens else ""
    form = ", ".join(filter(None, [meeting.words, count]))
    return f"{_named(pair[0], names[0])}{f' ({form})' if form else ''}", _named(pair[1], names[1])


def _named(layer: str, model: str) -> str:
    return f"{layer_label(layer)} of {model!r}"
