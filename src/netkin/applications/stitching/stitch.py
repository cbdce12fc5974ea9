"""`stitch`: the head of one model joined to the tail of another by the best map of a kind, and what that is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from netkin.applications.stitching.asking import Way, listed, way_of
from netkin.applications.stitching.ends import Pair
from netkin.applications.stitching.evaluating import evaluated_all
from netkin.applications.stitching.fitting import Fit, fitted, refuse_unsteady
from netkin.applications.stitching.joining import Cutting, both_lent, stitched_network
from netkin.applications.stitching.map_training import Place, trained
from netkin.applications.stitching.matching import find
from netkin.applications.stitching.stitches import Stitch, warn_of_doubt
from netkin.applications.stitching.task_loss import TaskLoss
from netkin.applications.stitching.transformations import refuse_unfit_rank
from netkin.comparing.request import name_of
from netkin.errors import ValueFault
from netkin.identity import described_call, settings_digest, weights_digest
from netkin.progress import ProgressOption, showing
from netkin.representations.guests import random_states_kept
from netkin.representations.inputs import device_of
from netkin.representations.layers import unwrapped
from netkin.sources.names import by_name


@by_name(models="a b", data="data test")
def stitch(
    a: nn.Module,
    layer_a: str,
    b: nn.Module,
    layer_b: str,
    data: Any,
    how: str | TaskLoss = "least_squares",
    test: Any = None,
    *,
    examples: int | None = None,
    resize: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    names: tuple[str, str] = ("a", "b"),
    validation: Any = None,
    progress: ProgressOption = None,
    **training: Any,
) -> Stitch:
    """Return a network that runs `a` up to `layer_a`, maps its activations, and goes on with `b` after `layer_b`.

    `how` is a direct method, read from the moments of both layers over `data`: `least_squares`, `ridge(alpha=1.0)`,
    `procrustes`, `reduced_rank(k=8)`, `lasso(alpha=0.01)`, `permutation`, `identity` or `random`; or `task_loss`, which
    trains the map, with the options of `TaskLoss` by keyword or as one, and is judged meanwhile on `validation`, or
    else on part of `data`. With `test` the stitch is judged at once.

    Maps of another size are resized: by `average` where they shrink, else `bilinear`, unless `resize` names another
    way.

    Args:
        a: the first model.
        layer_a: its layer.
        b: the second model.
        layer_b: its layer.
        data: the examples the map is found on.
        how: the method, as text or as a `TaskLoss`.
        test: the examples it is judged on.
        examples: how many examples of `data` are read.
        resize: how maps get another size.
        device: where the models run meanwhile.
        seed: of random maps and of training.
        names: what the result calls the two.
        validation: what a training is judged on meanwhile.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        training: options of `TaskLoss`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> inputs = torch.eye(4).repeat(10, 1) + torch.arange(40).unsqueeze(1) / 40
        >>> batches = [(inputs, model(inputs).argmax(1))]
        >>> round(stitch(model, "1", model, "1", batches, test=batches).relative_accuracy, 3)
        1.0
    """
    way, pair = way_of(how, seed, training), (layer_a, layer_b)
    call = described_call(
        "nk.stitch", a=unwrapped(a), layer_a=layer_a, b=unwrapped(b), layer_b=layer_b, data=name_of(data), how=way.id,
        examples=examples, resize=resize, seed=seed,
    )  # fmt: skip
    order = _Order(examples, resize, seed, names, call)
    if way.training is not None:
        _refuse_iterator(data)
    with showing(progress), both_lent(a, b, device), random_states_kept(a, b, data=[data, test, validation]):
        found = _fit_all(a, b, [pair], data, {way.id: way}, order)[pair, way.id]
        if way.training is not None:
            found = trained_stitch(found, data, way.training, validation=validation, examples=examples)
        if test is not None:
            found = replace(found, evaluation=found.evaluate(test))
    found.transformation.to(device_of(b))
    return found


def fit_all(
    a: nn.Module,
    b: nn.Module,
    pairs: Sequence[Pair],
    data: Any,
    hows: Sequence[str] = ("least_squares",),
    test: Any = None,
    *,
    examples: int | None = None,
    resize: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    names: tuple[str, str] = ("a", "b"),
) -> dict[tuple[Pair, str], Stitch]:
    """Return the stitches of many pairs of layers by direct methods, all from one pass over `data`.

    They are found by ``(layer_a, layer_b), how``. With `test` all are judged, in one more pass.
    """
    ways = {str(how): way_of(how, seed) for how in listed(hows)}
    given: dict[str, Any] = {"a": unwrapped(a), "b": unwrapped(b), "pairs": list(pairs), "data": name_of(data)}
    call = described_call("fit_all", **given, hows=list(ways), examples=examples, resize=resize, seed=seed)
    for how in ways:
        find(how)  # refuses a training
    with both_lent(a, b, device), random_states_kept(a, b, data=[data, test]):
        made = _fit_all(a, b, pairs, data, ways, _Order(examples, resize, seed, names, call))
        if test is not None:
            judged = evaluated_all([one.network for one in made.values()], test, name=names[0])
            made = {key: replace(one, evaluation=e) for (key, one), e in zip(made.items(), judged, strict=True)}
            warn_of_doubt(judged[0])  # of the second model, which is the same in all
    for one in made.values():
        one.transformation.to(device_of(b))
    return made


def started(
    a: nn.Module,
    b: nn.Module,
    fit: Fit,
    pair: Pair,
    way: Way,
    *,
    cuts: bool,
    names: tuple[str, str],
    seed: int,
    origin: Mapping[str, str],
) -> Stitch:
    """Return the stitch of a pair of layers by a method, before any training; `origin` is the models' and the call."""
    rank = None if way.training is None else way.training.rank
    refuse_unfit_rank(rank, fit.meetings[pair])  # by its own name: the start would call it `k`
    network = stitched_network(a, b, pair, fit.map(pair, way.start), fit.meetings[pair], rank=rank, cuts=cuts)
    asked = {"layers": pair, "how": way.identity, "start": way.start, "seed": seed}
    settings = settings_digest(asked | {"resize": fit.meetings[pair].resize})
    provenance = {**origin, "data digest": str(fit.digest), "settings digest": settings}
    examples = 0 if way.is_blind else fit.examples
    return Stitch(network, way.id, examples, names=names, seed=seed, provenance=provenance)


def origin_of(a: nn.Module, b: nn.Module, call: str) -> dict[str, str]:
    """Return what all stitches of two models in one call have in common."""
    return {"call": call, "weights a": weights_digest(a), "weights b": weights_digest(b)}


def trained_stitch(
    found: Stitch, data: Any, settings: TaskLoss, *, validation: Any, examples: int | None, place: Place | None = None
) -> Stitch:
    """Return a stitch after its transformation was trained, in place, with the record of that."""
    done = trained(found.network, data, settings, validation=validation, examples=examples, place=place)
    ended = {"steps": done.steps, "step": done.step, "stopped": done.stopped, "kept": done.kept, "final": done.final}
    origin = {**found.provenance, "data digest": done.data}
    return replace(found, examples=done.examples, history=done.history, training=ended, provenance=origin)


def _refuse_iterator(data: Any) -> None:
    if isinstance(data, Iterator):
        raise ValueFault(
            "`data` is an iterator, which gives its batches once, and a training reads them several times; pass a "
            "loader or a list."
        )


@dataclass(frozen=True)
class _Order:
    """What all stitches of one pass have in common."""

    examples: int | None
    resize: str | None
    seed: int
    names: tuple[str, str]
    call: str

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or len(self.names) != 2:
            raise ValueFault(f"`names` must be two, one for each model, such as ('old', 'new'); got {self.names!r}.")


def _fit_all(
    a: nn.Module, b: nn.Module, pairs: Sequence[Pair], data: Any, ways: Mapping[str, Way], order: _Order
) -> dict[tuple[Pair, str], Stitch]:
    examples = 4 if all(way.is_blind for way in ways.values()) else order.examples
    cuts: dict[str, bool] = {}

    def look(few: Any) -> None:
        refuse_unsteady(b, few, order.names[1])
        cutting = Cutting(b, few, order.names[1])
        cuts.update({layer: cutting.is_true(layer) for layer in {y: None for _, y in pairs}})

    fit = fitted(a, b, pairs, data, examples=examples, resize=order.resize, names=order.names, look=look)
    common: dict[str, Any] = {"names": order.names, "seed": order.seed, "origin": origin_of(a, b, order.call)}
    return {
        (pair, how): started(a, b, fit, pair, way, cuts=cuts[pair[1]], **common)
        for pair in fit.meetings
        for how, way in ways.items()
    }
