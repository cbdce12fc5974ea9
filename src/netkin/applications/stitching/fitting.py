"""Fitting: what direct matching needs of all pairs of layers that are to be stitched, in one pass over the data.

Rows are places of maps, tokens of sequences, or examples. Both models run once on each batch, and nothing is kept but
sums, so memory does not grow with the number of examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from netkin.applications.stitching.ends import End, Meeting
from netkin.applications.stitching.gathering import Gathering
from netkin.errors import ForwardError, ValueFault
from netkin.representations import batches_of, guest
from netkin.representations.calls import watching
from netkin.representations.cutting import known_layer, run_until
from netkin.representations.feeding import batch_length, feed, mask_of, take
from netkin.representations.layers import spoken
from netkin.representations.recording import main_tensor
from netkin.statistics import Moments

Pair = tuple[str, str]
React = Callable[[str, Tensor], None]


class Fit:
    """What one pass told of the pairs of layers: how they meet, and what direct matching reads.

    `few` are some examples of the first batch, by which models are tried out.
    """

    def __init__(
        self, meetings: Mapping[Pair, Meeting], gathering: Gathering, names: tuple[str, str], examples: int, few: Any
    ):
        self.meetings, self.examples, self.few = meetings, examples, few
        self._gathering, self._names = gathering, names

    def moments(self, pair: Pair) -> Moments:
        """Return the moments of a pair, the first layer in the form of the second; of that one only the mean."""
        return self._gathering.moments(_keys(pair, self.meetings[pair], self._names))


def fitted(
    a: nn.Module,
    b: nn.Module,
    pairs: Sequence[Pair],
    data: Any,
    *,
    examples: int | None = None,
    resize: str | None = None,
    names: tuple[str, str] = ("a", "b"),
) -> Fit:
    """Return the moments of pairs of layers of `a` and `b` over the data."""
    with guest(a, b):
        batches = batches_of(data, examples)
        first = next(batches)
        meetings = met(a, b, pairs, first, resize=resize, names=names)
        gathering, seen = Gathering(_keys(pair, meeting, names) for pair, meeting in meetings.items()), 0
        with _both(a, b, meetings, gathering, names) as fold:
            for batch in tqdm(chain([first], batches), desc="fitting", unit=" batches", delay=2, leave=False):
                fold(batch)
                seen += batch_length(batch)
    return Fit(meetings, gathering, names, seen, take(first, 4))


def met(
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
    """Return the ends of layers; a layer whose output for an example depends on the others in the batch is refused."""
    many, few = (_outputs(model, layers, take(batch, count), name) for count in (4, 2))
    for layer, output in few.items():
        _refuse_dependent(output, many[layer], f"{spoken(layer)} of {name!r}")
    return {layer: End.of(output, f"{spoken(layer)} of {name!r}") for layer, output in few.items()}


def _outputs(model: nn.Module, layers: Sequence[str], batch: Any, name: str) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}
    with (
        guest(model),
        _watched(model, layers, lambda layer, output: outputs.update({layer: output.clone()}), name) as run,
    ):
        run(batch)
    return outputs


def _refuse_dependent(few: Tensor, many: Tensor, who: str) -> None:
    if len(few) != 2 or len(many) <= 2 or not bool(torch.isfinite(many).all()):
        return  # what is not finite is refused later, with its number
    off = float((many[:2] - few).abs().max() / few.abs().max().clamp(min=1e-30))
    if off > (1e-3 if torch.finfo(few.dtype).eps < 1e-6 else 0.1):
        raise ValueFault(
            f"{who} gives other values for an example when other examples are in its batch, or by chance (they differ "
            f"by {off:.1%} of the largest); a stitch needs a model whose evaluation mode uses stored statistics."
        )


@contextmanager
def _both(
    a: nn.Module, b: nn.Module, meetings: Mapping[Pair, Meeting], gathering: Gathering, names: tuple[str, str]
) -> Iterator[Callable[[Any], None]]:
    """Give a function that folds a batch in, with the hooks of both models in place."""
    forms: dict[str, dict[str, Meeting]] = {}
    for pair, meeting in meetings.items():
        forms.setdefault(pair[0], {})[_keys(pair, meeting, names)[0]] = meeting
    masks: list[Any] = [None]

    def first(layer: str, output: Tensor) -> None:
        for key, meeting in forms[layer].items():
            gathering.first(key, meeting(output), fitting_mask(masks[0], output))

    def second(layer: str, output: Tensor) -> None:
        gathering.second(_named(layer, names[1]), output, fitting_mask(masks[0], output))

    with ExitStack() as stack:
        run_a = stack.enter_context(_watched(a, list(forms), first, names[0]))
        run_b = stack.enter_context(_watched(b, list(dict.fromkeys(y for _, y in meetings)), second, names[1]))

        def fold(batch: Any) -> None:
            masks[0] = mask_of(batch)
            run_a(batch)
            run_b(batch)
            gathering.batch_is_over()

        yield fold


@contextmanager
def _watched(model: nn.Module, layers: Sequence[str], react: React, name: str) -> Iterator[Callable[[Any], None]]:
    """Give a function that runs the model on a batch and reacts to its layers, to none in runs by anybody else.

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
            raise ForwardError(f"{spoken(calls[call][0])} of {name!r} did not run in the forward of this batch.")

    with watching(model, list(calls), reacting):
        yield run


def _run(model: nn.Module, layers: Sequence[str], batch: Any) -> None:
    if len(layers) == 1:
        run_until(model, layers[0], batch)
    else:
        feed(model, batch)


def fitting_mask(mask: Any, output: Tensor) -> Any:
    """Return the batch's mask of valid tokens if it is one for this output, otherwise None."""
    fits = mask is not None and output.ndim == 3 and tuple(mask.shape) == tuple(output.shape[:2])
    return mask if fits else None


def _keys(pair: Pair, meeting: Meeting, names: tuple[str, str]) -> tuple[str, str]:
    """Return the names under which a pair is gathered: the first layer in each form that is wanted once."""
    form = f" ({meeting.words})" if meeting.words else ""
    return f"{_named(pair[0], names[0])}{form}", _named(pair[1], names[1])


def _named(layer: str, model: str) -> str:
    return f"{spoken(layer)} of {model!r}"
