"""`model_directions`: the aligned directions of two layers, from one pass of their models over the data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from netkin.comparing.alignment import Pairs
from netkin.comparing.planning import memory_limit
from netkin.comparing.request import Options, Request
from netkin.errors import InflatedWarning, outside
from netkin.measures import Directions, svcca_directions
from netkin.measures.registry import find
from netkin.progress import ProgressOption, showing
from netkin.representations.cutting import known_layer
from netkin.representations.shapes import Shape
from netkin.sources.names import by_name
from netkin.statistics.collector import Study


@by_name(models="a b", data="data")
def model_directions(
    a: nn.Module,
    layer: str,
    b: nn.Module | None = None,
    layer_b: str | None = None,
    data: Any = None,
    *,
    variance: float = 0.99,
    by: str = "variance",
    examples: int | None = None,
    shape: Shape | Mapping[str, Shape] = None,
    memory: int | None = None,
    device: torch.device | str | None = None,
    transforms: Any = None,
    forward: Any = None,
    progress: ProgressOption = None,
) -> Directions:
    """Return the SVCCA directions of a layer of `a` with a layer of `b`; each model runs once on each batch.

    Without `layer_b` it is the layer of the same name. Without `b` it is a layer of `a` itself, and the model's own
    output, the logits of a classifier, where none is named. The first side, ``.x``, belongs to `a`.

    Args:
        a: the first model.
        layer: its layer.
        b: the second model.
        layer_b: its layer.
        data: a loader, an iterable of batches or one array of inputs.
        variance: the share that the kept directions of each layer hold.
        by: "variance" for Σσ², "sum" for Σσ.
        examples: the number of examples after which the pass ends.
        shape: what one example is (see `nk.shapes`).
        memory: the most bytes that statistics may take.
        device: where the models run.
        transforms: a function of the inputs, or one for each model.
        forward: a function ``forward(model, batch)``, or one for each model.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model_directions(model, "1", data=torch.randn(200, 4)).y.width
        3
    """
    other = layer_b if layer_b is not None else "" if b is None else layer
    for model, name in ((a, layer), (a if b is None else b, other)):
        if isinstance(model, nn.Module):
            known_layer(model, name)
    alone = b is None or (b is a and transforms is None and forward is None)
    given: dict[str, Any] = {"a": a} if alone else {"a": a, "b": b}
    pair = ("a", "a" if alone else "b")
    chosen = {"a": [*dict.fromkeys([layer, other])]} if alone else {"a": [layer], "b": [other]}
    options = Options(chosen, {name: name for name in given}, shape, None, transforms, forward, device)
    wanted = Pairs([pair], [(layer, other)])
    study = Study({}, [], limit=memory_limit(memory))
    with showing(progress):
        statistics = Request(given, options, wanted, study, data, examples).collect([find("svcca")], {})
    moments = statistics.pair(find("svcca"), ("a", layer), (pair[1], other))
    if moments.few_examples:
        warnings.warn(moments.few_examples, InflatedWarning, stacklevel=outside())
    return svcca_directions(moments, variance=variance, by=by)
