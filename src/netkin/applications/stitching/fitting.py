"""Fitting: what direct methods need of all pairs of layers that are to be stitched, in one pass over the data.

Rows are places of maps, tokens of sequences, or examples. Both models run once on each batch, and nothing is kept but
sums, so memory does not grow with the number of examples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.stitching.direct import LinearMap, find, least_squares, matched, reduced_rank
from netkin.applications.stitching.ends import Meeting, Pair, fitting_mask, refuse_unfit_rank
from netkin.applications.stitching.gathering import Gathering
from netkin.applications.stitching.joints import Joints, hooked
from netkin.applications.stitching.map_training import Place, trained
from netkin.applications.stitching.network import Stitch, stitched_network
from netkin.applications.stitching.task_loss import TaskLoss, Way
from netkin.comparing.subjects import lent
from netkin.errors import InflatedWarning, outside
from netkin.identity import UnorderedDigest, settings_digest
from netkin.representations import guest
from netkin.representations.inputs import batch_length, mask_of
from netkin.representations.layers import layer_label
from netkin.statistics import Moments


class Fit:
    """What one pass told of the pairs of layers that can be joined; direct methods read their maps from it."""

    def __init__(
        self,
        models: tuple[nn.Module, nn.Module],
        names: tuple[str, str],
        found: Joints,
        gathering: Gathering,
        digest: UnorderedDigest,
    ):
        self.models, self.names, self.joints = models, names, found
        self.digest, self.examples, self._gathering = digest, digest.count, gathering

    def moments(self, pair: Pair) -> Moments:
        """Return the moments of a pair, the first layer in the form of the second; of that one only the mean."""
        return self._gathering.moments(_keys(pair, self.joints.meetings[pair], self.names))

    def map(self, pair: Pair, how: str) -> LinearMap:
        """Return the map that a direct method finds; a warning says so where any data would be met exactly."""
        moments = self.moments(pair)
        method, parameters = find(how)
        unknowns = moments.x.width + parameters.get("affine", True)
        if moments.n < unknowns and method in (least_squares, reduced_rank):
            warnings.warn(
                f"{moments.n:,} rows of {moments.x.name} are fewer than the {unknowns:,} unknowns for each unit, so "
                f"{how!r} meets these rows whatever they are; give more data, {10 * unknowns:,} rows or so, or choose "
                "'ridge'.",
                InflatedWarning,
                stacklevel=outside(),
            )
        return matched(moments, how)

    def stitch(self, pair: Pair, way: Way, seed: int, origin: Mapping[str, str]) -> Stitch:
        """Return the stitch of a pair by a method, before any training; `origin` is where it comes from."""
        meeting, rank = self.joints.meetings[pair], None if way.training is None else way.training.rank
        refuse_unfit_rank(rank, meeting)  # by its own name: the start would call it `k`
        linear = self.map(pair, way.start)
        network = stitched_network(*self.models, pair, linear, meeting, rank=rank, cuts=self.joints.cuts[pair[1]])
        asked = {"layers": pair, "how": way.identity, "start": way.start, "seed": seed, "resize": meeting.resize}
        provenance = {**origin, "data digest": str(self.digest), "settings digest": settings_digest(asked)}
        examples = 0 if way.is_blind else self.examples
        return Stitch(network, way.id, examples, names=self.names, seed=seed, provenance=provenance)


def fitted(a: nn.Module, b: nn.Module, batches: Iterable[Any], found: Joints, names: tuple[str, str]) -> Fit:
    """Return what the batches tell of the pairs of layers of `a` and `b` that can be joined.

    Args:
        a: the first model.
        b: the second model.
        batches: the examples.
        found: which pairs can be joined, and how.
        names: what messages call the models.
    """
    gathering = Gathering(_keys(pair, meeting, names) for pair, meeting in found.meetings.items())
    digest = UnorderedDigest()
    with guest(a, b, exact=True), _both(a, b, found.meetings, gathering, names) as fold:
        for batch in batches:
            fold(batch)
            digest.update(batch, batch_length(batch))
    return Fit((a, b), names, found, gathering, digest)


def trained_stitch(
    found: Stitch, data: Any, settings: TaskLoss, *, validation: Any, examples: int | None, place: Place | None = None
) -> Stitch:
    """Return a stitch after its transformation was trained, in place, with the record of that.

    Args:
        found: the stitch to begin with.
        data: the examples.
        settings: how it is trained.
        validation: the examples it is judged on meanwhile.
        examples: how many of `data` are read.
        place: where the training's standing is kept, in a job of which it is a part.
    """
    done = trained(found.network, data, settings, validation=validation, examples=examples, place=place)
    ended = {"steps": done.steps, "step": done.step, "stopped": done.stopped, "kept": done.kept, "final": done.final}
    origin = {**found.provenance, "data digest": done.data}
    return replace(found, examples=done.examples, history=done.history, training=ended, provenance=origin)


@contextmanager
def both_lent(a: nn.Module, b: nn.Module, device: torch.device | str | None) -> Iterator[None]:
    """Lend two models to `device` while the `with` lasts."""
    with lent(a, device), nullcontext() if a is b else lent(b, device):
        yield


@contextmanager
def noted_warnings(said: list[str]) -> Iterator[None]:
    """Note what warns of numbers easily misread inside the `with`: the comparison tells it. Other warnings go on."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", InflatedWarning)
        yield
    for one in heard:
        if issubclass(one.category, InflatedWarning):
            said.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


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
        gathering.second(_label(layer, names[1]), form, fitting_mask(masks[0], form))

    with ExitStack() as stack:
        run_a = stack.enter_context(hooked(a, list(forms), first, names[0]))
        run_b = stack.enter_context(hooked(b, list(aims), second, names[1]))

        def fold(batch: Any) -> None:
            masks[0] = mask_of(batch)
            run_a(batch)
            run_b(batch)
            gathering.batch_is_over()

        yield fold


def _keys(pair: Pair, meeting: Meeting, names: tuple[str, str]) -> tuple[str, str]:
    """Return the names under which a pair is gathered: the first layer in each form that is wanted once."""
    count = f"{meeting.b.tokens} tokens" if meeting.words and meeting.b.tokens else ""
    form = ", ".join(filter(None, [meeting.words, count]))
    return f"{_label(pair[0], names[0])}{f' ({form})' if form else ''}", _label(pair[1], names[1])


def _label(layer: str, model: str) -> str:
    return f"{layer_label(layer)} of {model!r}"
