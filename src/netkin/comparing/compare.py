"""`compare`, `collect`, `explain`, `model_directions`: two models or recorded rows in; a labelled result out."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from netkin.comparing.alignment import Pairs
from netkin.comparing.engines import Engine, Local, named_engine
from netkin.comparing.many_models import compare_many, study_of
from netkin.comparing.pass_statistics import Statistics, found_measures
from netkin.comparing.planning import Plan, memory_limit
from netkin.comparing.request import Options, Request, linear_measures
from netkin.comparing.subjects import Runner, Subject
from netkin.errors import InflatedWarning, InvalidValue, NameClash, outside
from netkin.identity import with_call
from netkin.measures import Directions, svcca_directions
from netkin.measures.registry import find
from netkin.progress import ProgressOption, showing
from netkin.representations.cutting import known_layer
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape, refuse_strange_layers
from netkin.results import Comparison
from netkin.sources.names import by_name
from netkin.statistics.collector import Study

__all__ = ["collect", "compare", "compare_many", "compare_runners", "explain", "merge"]


@with_call
@by_name(models="a b", data="data")
def compare(
    a: nn.Module | Mapping[str, Any] | Subject,
    b: nn.Module | Mapping[str, Any] | Subject | None = None,
    data: Any = None,
    measures: str | Callable[..., Any] | Sequence[Any] = ("cka",),
    *,
    layers: Spec | Mapping[str, Spec] = None,
    pairs: Any = "all",
    examples: int | None = None,
    shape: Shape | Mapping[str, Shape] = None,
    resize: str | None = None,
    memory: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    transforms: Any = None,
    forward: Any = None,
    partial: bool = False,
    names: tuple[str, str] = ("a", "b"),
    errors: bool = False,
    chunks: int = 20,
    exact_model: bool = False,
    engine: str | Engine = "local",
    progress: ProgressOption = None,
) -> Comparison:
    """Return how similar the layers of two models are, by every measure requested, from one pass over the data.

    Each model runs once on each batch, and one iteration over `data` feeds both. `a` and `b` may also be mappings of
    layer names to arrays recorded before; without `b` the layers of `a` are compared with each other.

    Args:
        a: a model, a mapping of layer names to recorded arrays, or an `nk.Subject` with data of its own.
        b: the second one.
        data: a loader, an iterable of batches or one array of inputs.
        measures: one measure or several, by name with parameters, or as functions.
        layers: a choice for both (see `nk.layers`), or a mapping from "a" and "b" to a choice each.
        pairs: "all", "corresponding" or a list of (layer, layer).
        examples: the number of examples after which the pass ends.
        shape: what one example is, for all layers or by layer (see `nk.shapes`).
        resize: "average" averages the larger of two maps down, with shape "positions" or "dft".
        memory: the most bytes that statistics may take; by default a quarter of all memory.
        seed: seed of the sample of rows that kernel measures read.
        device: where the models run; by default where they are.
        transforms: a function of the inputs, or one for each model.
        forward: a function ``forward(model, batch)``, or one for each model.
        partial: whether Ctrl-C returns what is finished.
        names: what the result calls the two.
        errors: whether values get standard errors, from leaving out one chunk of the examples in turn.
        chunks: the number of chunks for standard errors.
        exact_model: whether float32 in a model on a GPU must not be rounded to TF32, which gives the CPU's numbers.
        engine: "local" for this process, "distributed" for those that torchrun started, "ray" or an `nk.Ray` for a
            cluster; models, data and functions are then given by name.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> comparison = compare({"x": X}, {"twice": 2 * X, "square": X**2})
        >>> round(comparison["x", "twice"], 6)
        1.0
    """
    asked, running = locals(), named_engine(engine)
    with showing(progress), running.working():
        request, shown = _request(asked, running)
        return request.compare(found_measures(measures), shown)[0]


@by_name(models="a b", data="data")
def explain(
    a: nn.Module | Mapping[str, Any] | Subject,
    b: nn.Module | Mapping[str, Any] | Subject | None = None,
    data: Any = None,
    measures: str | Callable[..., Any] | Sequence[Any] = ("cka",),
    *,
    layers: Spec | Mapping[str, Spec] = None,
    pairs: Any = "all",
    examples: int | None = None,
    shape: Shape | Mapping[str, Shape] = None,
    resize: str | None = None,
    memory: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    transforms: Any = None,
    forward: Any = None,
    partial: bool = False,
    names: tuple[str, str] = ("a", "b"),
    errors: bool = False,
    chunks: int = 20,
    exact_model: bool = False,
    progress: ProgressOption = None,
) -> Plan:
    """Return what `compare` would do with the same arguments, and what that costs; nothing is collected.

    The first batch is read and two of its examples are run through each model, once, to learn the layers' names and
    widths; a loader can be walked through again afterwards. What `compare` would then refuse, over pairs or memory,
    is the same sentence in the plan's `refused`; models that can't be run on the data are refused at once.

    Args:
        a: a model, a mapping of recorded arrays, or an `nk.Subject`.
        b: the second one.
        data: a loader, an iterable of batches or one array of inputs.
        measures: one measure or several, by name with parameters, or as functions.
        layers: which layers, for all models or by name of the model.
        pairs: "all", "corresponding" or a list of (layer, layer).
        examples: the number of examples after which the pass ends.
        shape: what one example is (see `nk.shapes`).
        resize: "average" averages the larger of two maps down.
        memory: the most bytes that statistics may take.
        seed: seed of the sample of rows that kernel measures read.
        device: where the models run.
        transforms: a function of the inputs, or one for each model.
        forward: a function ``forward(model, batch)``, or one for each model.
        partial: whether Ctrl-C returns what is finished.
        names: what the result calls the two.
        errors: whether values get standard errors.
        chunks: how many chunks of the examples are left out in turn for them.
        exact_model: whether float32 in a model on a GPU must not be rounded to TF32.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> plan = explain({"x": X, "half": X[:, :4]}, {"y": X**2}, measures=["cka", "svcca"])
        >>> plan.pairs, plan.examples, plan.passes, plan.operations
        (2, 50, 0, 12000)
    """
    request, _ = _request(locals(), Local())
    return request.explain(found_measures(measures))


@with_call
@by_name(models="a b", data="data")
def collect(
    a: nn.Module | Mapping[str, Any] | Subject,
    b: nn.Module | Mapping[str, Any] | Subject | None = None,
    data: Any = None,
    measures: str | Callable[..., Any] | Sequence[Any] | None = None,
    *,
    layers: Spec | Mapping[str, Spec] = None,
    pairs: Any = "all",
    examples: int | None = None,
    part: str | tuple[int, int] | None = None,
    start: int | None = None,
    shape: Shape | Mapping[str, Shape] = None,
    resize: str | None = None,
    memory: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    transforms: Any = None,
    forward: Any = None,
    partial: bool = False,
    names: tuple[str, str] = ("a", "b"),
    errors: bool = False,
    chunks: int = 20,
    exact_model: bool = False,
    engine: str | Engine = "local",
    progress: ProgressOption = None,
) -> Statistics:
    """Return what one pass of two models over the data leaves: saved, merged and read by any measure later.

    ``collect(a, b, data=d).compare("nbs")`` is ``compare(a, b, data=d, measures="nbs")``. Parts of the data may be
    collected apart, in any order and on any machine, and merged: ``nk.merge([first, second])``.

    Args:
        a: a model, a mapping of layer names to recorded arrays, or an `nk.Subject` with data of its own.
        b: the second one.
        data: a loader, an iterable of batches or one array of inputs.
        measures: those to be served; without them all linear ones.
        layers: a choice for both (see `nk.layers`), or a mapping from "a" and "b" to a choice each.
        pairs: "all", "corresponding" or a list of (layer, layer).
        examples: the number of examples after which the pass ends.
        part: which part of indexable data, as "3/16": the third of sixteen contiguous ranges.
        start: the number of the first example, for parts that are given as separate loaders; 0 for the first of them.
        shape: what one example is, for all layers or by layer (see `nk.shapes`).
        resize: "average" averages the larger of two maps down, with shape "positions" or "dft".
        memory: the most bytes that statistics may take; by default a quarter of all memory.
        seed: seed of the sample of rows that kernel measures read.
        device: where the models run; by default where they are.
        transforms: a function of the inputs, or one for each model.
        forward: a function ``forward(model, batch)``, or one for each model.
        partial: whether Ctrl-C returns what is finished.
        names: what the result calls the two.
        errors: whether values get standard errors, from leaving out one chunk of the examples in turn.
        chunks: the number of chunks for standard errors.
        exact_model: whether float32 in a model on a GPU must not be rounded to TF32, which gives the CPU's numbers.
        engine: "local" for this process, "distributed" for those that torchrun started, "ray" or an `nk.Ray` for a
            cluster; models, data and functions are then given by name.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(60, 8))
        >>> parts = [collect({"x": X}, {"y": X**2}, part=(i, 3)) for i in (1, 2, 3)]
        >>> round(merge(parts).compare("cka")["x", "y"] - compare({"x": X}, {"y": X**2})["x", "y"], 12)
        0.0
    """
    asked, running = locals(), named_engine(engine)
    with showing(progress), running.working():
        if start is not None and (isinstance(start, bool) or not isinstance(start, int) or start < 0):
            raise InvalidValue(f"`start` is the number of the first example, from 0 on; got {start!r}.")
        request, shown = _request(asked, running)
        found = linear_measures(request.given, shape) if measures is None else found_measures(measures)
        return request.collect(found, shown)


def merge(parts: Sequence[Statistics]) -> Statistics:
    """Return the statistics of all parts of the data together, in any order."""
    found = list(parts)
    if not found:
        raise InvalidValue("there is nothing to merge; pass at least one part.")
    for one in found:
        if not isinstance(one, Statistics):
            raise InvalidValue(
                f"`merge` takes statistics, as `nk.collect` or `nk.load` give them; got {type(one).__name__}."
            )
    while len(found) > 1:  # by halves, so that no part is added to all others one by one
        found = [functools.reduce(Statistics.merge, found[i : i + 2]) for i in range(0, len(found), 2)]
    return found[0]


def compare_runners(
    a: Runner,
    b: Runner,
    data: Any,
    measures: str | Callable[..., Any] | Sequence[Any],
    *,
    examples: int | None = None,
    memory: int | None = None,
    seed: int = 0,
    partial: bool = False,
) -> Comparison:
    """Return the comparison of two runners, for those whose rows and columns are not the layers of two models.

    `a` is run before `b` on each batch, so that `b` may reuse what `a` has computed.
    """
    options = Options(None, {a.name: "a", b.name: "b"}, None, None, None, None, None)
    pairs, study = Pairs([(a.name, b.name)]), study_of(memory, seed, False, 0)
    request = Request({a.name: a, b.name: b}, options, pairs, study, data, examples, partial)
    return request.compare(found_measures(measures), {})[0]


def _request(asked: Mapping[str, Any], engine: Engine) -> tuple[Any, dict[str, str]]:
    """Return one call with all its arguments for an engine, and what the result calls the two models."""
    a, b, names, shape, layers = (asked[name] for name in ("a", "b", "names", "shape", "layers"))
    if not (isinstance(names, (tuple, list)) and len(names) == 2 and all(isinstance(name, str) for name in names)):
        raise InvalidValue(f"`names` must be two texts; got {names!r}.")
    # whether one model is compared with itself; one name may mean two networks with other random weights
    apart = isinstance(a, str) or (isinstance(layers, Mapping) and "b" in layers)
    alone = b is None or (b is a and asked["transforms"] is None and asked["forward"] is None and not apart)
    given: dict[str, Any] = {names[0]: a} if alone else {names[0]: a, names[1]: b}
    if not alone and len(given) < 2:
        raise NameClash(f"both models are named {names[0]!r}; give them two `names`.")
    pair = (names[0], names[0] if alone else names[1])
    refuse_strange_layers(shape, *(getattr(one, "thing", one) for one in given.values()))
    places = dict(zip(given, ("a", "b"), strict=False))
    how = (asked[name] for name in ("resize", "transforms", "forward", "device", "exact_model"))
    options = Options(layers, places, shape, *how)
    study = study_of(*(asked[name] for name in ("memory", "seed", "errors", "chunks")))
    rest = [asked[name] for name in ("data", "examples", "partial", "part", "start") if name in asked]
    shown = (names[0], names[0]) if b is None or (len(given) == 1 and names[1] == "b") else names
    return engine.request(given, options, Pairs([pair], asked["pairs"]), study, *rest), dict(
        zip(pair, shown, strict=True)
    )


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
        warnings.warn(str(moments.few_examples), InflatedWarning, stacklevel=outside())
    return svcca_directions(moments, variance=variance, by=by)
