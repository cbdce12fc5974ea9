"""`stitch`: the head of one model joined to the tail of another by the best map of a kind, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from netkin.applications.stitching.evaluating import evaluated_all
from netkin.applications.stitching.fitting import Fit, Pair, fitted
from netkin.applications.stitching.joining import Stitched, cuts_truly, precise
from netkin.applications.stitching.matching import find, identity, matched, random
from netkin.applications.stitching.stitches import Stitch
from netkin.applications.stitching.task_loss import TaskLoss, is_task_loss
from netkin.applications.stitching.training import trained
from netkin.applications.stitching.transformations import Transformation
from netkin.comparing.subjects import lent
from netkin.errors import UnknownName, ValueFault
from netkin.representations.feeding import device_of
from netkin.results.identifiers import taken_apart


def stitch(
    a: nn.Module,
    layer_a: str,
    b: nn.Module,
    layer_b: str,
    data: Any,
    how: str = "least_squares",
    test: Any = None,
    *,
    examples: int | None = None,
    resize: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    names: tuple[str, str] = ("a", "b"),
    validation: Any = None,
    **training: Any,
) -> Stitch:
    """Return a network that runs `a` up to `layer_a`, maps its activations, and goes on with `b` after `layer_b`.

    `how` is a direct method, read from the moments of both layers over `data`: `least_squares`, `ridge(alpha=1.0)`,
    `procrustes`, `reduced_rank(k=8)`, `lasso(alpha=0.01)`, `permutation`, `identity` or `random`; or `task_loss`, which
    trains the map, with the options of `TaskLoss` by keyword, and is judged meanwhile on `validation`, or else on part
    of `data`. With `test` the stitch is judged at once.

    Maps of another size are resized: by `average` where they shrink, else `bilinear`, unless `resize` names another
    way. `examples` limits those of `data`; `device` is where the models run meanwhile.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> batches = [(torch.randn(50, 4), torch.randint(0, 3, (50,)))]
        >>> round(stitch(model, "1", model, "1", batches, test=batches).relative_accuracy, 3)
        1.0
    """
    settings = _asked(how, seed, training)
    start, pair = how if settings is None else settings.start, (layer_a, layer_b)
    order = _Order(examples, resize, seed, names, settings)
    with _on(device, a, b):
        found = _fit_all(a, b, [pair], data, [start], order)[pair, start]
        if settings is not None:
            found = _trained(found, data, settings, validation, examples)
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
    for how in hows:
        find(how)
    with _on(device, a, b):
        made = _fit_all(a, b, pairs, data, hows, _Order(examples, resize, seed, names))
        if test is not None:
            judged = evaluated_all([one.network for one in made.values()], test)
            made = {key: replace(one, evaluation=e) for (key, one), e in zip(made.items(), judged, strict=True)}
    for one in made.values():
        one.transformation.to(device_of(b))
    return made


def _asked(how: str, seed: int, training: dict[str, Any]) -> TaskLoss | None:
    """Return how a stitch is to be trained, or None where `how` is a direct method."""
    if is_task_loss(how):
        given = taken_apart(how)
        own = {} if given and "seed" in given[1] else {"seed": seed}
        return TaskLoss.read(how, own | training)
    find(how)
    if training:
        raise UnknownName(f"{how!r} has no option {next(iter(training))!r}; such options belong to 'task_loss'.")
    return None


def _trained(found: Stitch, data: Any, settings: TaskLoss, validation: Any, examples: int | None) -> Stitch:
    done = trained(found.network, data, settings, validation=validation, examples=examples)
    ended = {"steps": done.steps, "step": done.step, "stopped": done.stopped, "kept": done.kept, "final": done.final}
    return replace(found, method=str(settings), history=done.history, training=ended)


@dataclass(frozen=True)
class _Order:
    """What all stitches of one pass have in common."""

    examples: int | None
    resize: str | None
    seed: int
    names: tuple[str, str]
    training: TaskLoss | None = None

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or len(self.names) != 2:
            raise ValueFault(f"`names` are two, one for each model; got {self.names!r}.")


def _fit_all(
    a: nn.Module, b: nn.Module, pairs: Sequence[Pair], data: Any, hows: Sequence[str], order: _Order
) -> dict[tuple[Pair, str], Stitch]:
    blind = not order.training and all(find(how)[0] in (identity, random) for how in hows)  # to the data
    examples = 4 if blind else order.examples
    fit = fitted(a, b, pairs, data, examples=examples, resize=order.resize, names=order.names)
    cuts = {layer: cuts_truly(b, layer, fit.few, order.names[1]) for layer in dict.fromkeys(y for _, y in pairs)}
    made = {}
    for pair in fit.meetings:
        for how in hows:
            transformation = _transformation(fit, pair, how, order, b)
            network = Stitched(a, pair[0], b, pair[1], transformation, cuts=cuts[pair[1]])
            made[pair, how] = Stitch(network, how, 0 if blind else fit.examples, names=order.names, seed=order.seed)
    return made


def _transformation(fit: Fit, pair: Pair, how: str, order: _Order, b: nn.Module) -> Transformation:
    method, parameters = find(how)
    moments = fit.moments(pair)
    linear = random(moments, **({"seed": order.seed} | parameters)) if method is random else matched(moments, how)
    made = Transformation(linear, fit.meetings[pair], rank=order.training.rank if order.training else None)
    made.to(device_of(b), precise(b)).set(linear)  # again, where it may be float64 by now
    return made


def _on(device: torch.device | str | None, a: nn.Module, b: nn.Module) -> ExitStack:
    """Lend the models to `device` until the `with` ends."""
    with ExitStack() as stack:
        for model in [a] if a is b else [a, b]:
            stack.enter_context(lent(model, device))
        return stack.pop_all()
