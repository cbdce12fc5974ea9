"""Stitching: the first layers of one network joined to the last layers of another, and what that shows about both.

All calls take the same steps: pairs of layers are checked on a few examples, one pass over the data gives the sums,
direct methods compute their maps from them, and trained methods start from such a map.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

from torch import nn

from netkin.applications.stitching.evaluating import Evaluation, evaluate_all, warn_of_doubt
from netkin.applications.stitching.fitting import fit_by_pass, fit_saved
from netkin.applications.stitching.joining import FEW, Pair, joints
from netkin.applications.stitching.maps import METHODS, LinearMap, find, matched
from netkin.applications.stitching.network import Stitch, load_stitch
from netkin.applications.stitching.request import (
    FIT,
    STITCH,
    MethodLike,
    StitchMethod,
    StitchRequest,
    find_method,
    find_methods,
    two_models,
)
from netkin.applications.stitching.structure import Barrier, barrier, distance, interpolate, rank, sparsity
from netkin.applications.stitching.sweep import StitchPlan, explain_stitch, stitch_all, stitch_many
from netkin.applications.stitching.training import TRAINING, TaskLoss, train_stitch
from netkin.comparing.feed import data_name
from netkin.comparing.spec import takes_options
from netkin.errors import InflatedWarning, InvalidValue, outside
from netkin.identity import described_call
from netkin.representations.inputs import device_of, reported_batches
from netkin.representations.layers import unwrapped
from netkin.sources.names import by_name

__all__ = [
    "METHODS",
    "Barrier",
    "Evaluation",
    "LinearMap",
    "Stitch",
    "StitchPlan",
    "TaskLoss",
    "barrier",
    "distance",
    "explain_stitch",
    "fit_all",
    "interpolate",
    "load_stitch",
    "matched",
    "rank",
    "sparsity",
    "stitch",
    "stitch_all",
    "stitch_many",
]


@by_name(models="a b", data="data test")
@takes_options(declared=STITCH)
def stitch(
    a: nn.Module,
    layer_a: str,
    b: nn.Module,
    layer_b: str,
    data: Any = None,
    method: MethodLike = "least_squares",
    test: Any = None,
    *,
    names: tuple[str, str] = ("a", "b"),
    **options: Any,
) -> Stitch:
    """Return a network that runs `a` up to `layer_a`, maps its activations, and continues with `b` after `layer_b`.

    Args:
        a: the first model.
        layer_a: its layer.
        b: the second model.
        layer_b: its layer.
        data: the examples from which the map is found.
        method: a direct method: `least_squares`, `ridge(alpha=1.0)`, `procrustes`, `reduced_rank(k=8)`,
            `lasso(alpha=0.01)`, `permutation`, `identity` or `random`; or `task_loss`, which trains the map, also as a
            `TaskLoss`. The options of `TaskLoss` are given here, too.
        test: the examples on which the stitch is evaluated at once.
        names: what the result calls the two models.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> inputs = torch.eye(4).repeat(10, 1) + torch.arange(40).unsqueeze(1) / 40
        >>> batches = [(inputs, model(inputs).argmax(1))]
        >>> round(stitch(model, "1", model, "1", batches, test=batches).relative_accuracy, 3)
        1.0
    """
    models, pair = two_models(a, b, names), (layer_a, layer_b)
    training = {name: value for name, value in options.items() if name in TRAINING and name != "seed"}
    chosen = find_method(method, options.get("seed", 0), training)
    options = {name: value for name, value in options.items() if name not in training}
    request = StitchRequest(models=models, data=data, test=test, methods=(chosen,), pairs=[pair], **options)
    ends = {"a": unwrapped(a), "layer_a": layer_a, "b": unwrapped(b), "layer_b": layer_b}
    call = _call("nk.stitch", request, ends, method=chosen.id)
    if chosen.training is not None:
        request.require_rereadable("a training", "data")
    with request.lending(a, b, data=(request.validation,)):
        one = _fitted(request, call)[pair, chosen]
        if chosen.training is not None:
            one = train_stitch(one, data, chosen.training, request.validation, request.examples)
        if test is not None:
            one = replace(one, evaluation=one.evaluate(test))
    one.transformation.to(device_of(b))
    return one


@takes_options(declared=FIT)
def fit_all(
    a: nn.Module,
    b: nn.Module,
    pairs: Sequence[Pair],
    data: Any = None,
    methods: Sequence[str] = ("least_squares",),
    test: Any = None,
    *,
    names: tuple[str, str] = ("a", "b"),
    **options: Any,
) -> dict[tuple[Pair, str], Stitch]:
    """Return the stitches of many pairs of layers by direct methods, by ``(layer_a, layer_b), method``, from one pass.

    Args:
        a: the first model.
        b: the second model.
        pairs: a layer of the first and one of the second, for each stitch.
        data: the examples from which the maps are found.
        methods: direct methods as in `stitch`.
        test: the examples on which all stitches are evaluated, in one more pass.
        names: what the results call the two models.
    """
    chosen = find_methods(methods, options.get("seed", 0))
    for method in chosen:
        find(method)  # refuses a training
    models = two_models(a, b, names)
    request = StitchRequest(models=models, data=data, test=test, methods=tuple(chosen.values()), pairs=pairs, **options)
    call = _call("fit_all", request, {"a": unwrapped(a), "b": unwrapped(b), "pairs": list(pairs)}, methods=list(chosen))
    with request.lending(a, b):
        found = _fitted(request, call)
        made = {(pair, name): found[pair, one] for pair in dict.fromkeys(pairs) for name, one in chosen.items()}
        if test is not None:
            judged = evaluate_all([one.network for one in made.values()], test, name=names[0])
            made = {key: replace(one, evaluation=e) for (key, one), e in zip(made.items(), judged, strict=True)}
            warn_of_doubt(judged[0])  # of the second model, which is the same in all
    for one in made.values():
        one.transformation.to(device_of(b))
    return made


def _call(name: str, request: StitchRequest, ends: Mapping[str, Any], **methods: Any) -> str:
    options = {option: getattr(request, option) for option in ("examples", "resize", "seed")}
    return described_call(name, **ends, data=data_name(request.data), **methods, **options)


def _fitted(request: StitchRequest, call: str) -> dict[tuple[Pair, StitchMethod], Stitch]:
    """Return the stitches of pairs of layers, before any training; a pair that can't be joined is refused."""
    if not request.pairs:
        raise InvalidValue("no pairs of layers to stitch were given.", argument="pairs")
    names, (a, b) = tuple(request.models), request.given_models.values()
    data, examples = request.tried
    few = request.saved or all(method.is_blind for method in request.methods)
    batches: Iterator[Any] = reported_batches(data, FEW if few else examples, "fitting")
    first = next(batches)
    found = joints(a, b, first, pairs=request.pairs, resize=request.resize, names=(names[0], names[1]))
    found.raise_first()
    weights = list(request.weights.values())
    if request.saved:
        fit = fit_saved(request.saved, found, weights)
        fit.joints.raise_first()
    else:
        fit = fit_by_pass(chain([first], batches), found)
    origin, made = {"call": call, "weights a": weights[0], "weights b": weights[1]}, {}
    for pair, method in product(found.adapters, request.methods):
        made[pair, method] = fit.stitch(pair, method, request.seed, origin)
        few_rows = fit.few_rows(pair, method.start)
        if few_rows is not None:
            warnings.warn(str(few_rows), InflatedWarning, stacklevel=outside())
    return made
