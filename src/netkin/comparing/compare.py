"""`compare`, `compare_many`, `collect`, `explain`: models or recorded rows in; a labelled result or its plan out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import nn

from netkin.comparing.alignment import Pairs
from netkin.comparing.collecting import Feed, Pass
from netkin.comparing.interrupting import Interruption
from netkin.comparing.planning import Plan, explained, memory_limit, refuse_stream
from netkin.comparing.study import Statistics, found_measures
from netkin.comparing.subjects import Options, Runner, Subject
from netkin.comparing.tabulating import comparison_of
from netkin.errors import NameClash, ValueFault
from netkin.measures.registry import Measure
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape
from netkin.results import Comparison, Comparisons
from netkin.statistics.collector import Study


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
) -> Comparison:
    """Return how alike the layers of two models are, by every measure asked for, from one pass over the data.

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
        memory: the most bytes that statistics may take; by default a quarter of what is free.
        seed: of the sample of rows that some measures look at.
        device: where the models run; by default where they are.
        transforms: a function of the inputs, or one for each model.
        forward: a function ``forward(model, batch)``, or one for each model.
        partial: whether Ctrl-C returns what is finished.
        names: what the result calls the two.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> comparison = compare({"x": X}, {"twice": 2 * X, "square": X**2})
        >>> round(comparison["x", "twice"], 6)
        1.0
    """
    found = found_measures(measures)
    given, pair = _two(a, b, names, alone=b is None or (b is a and transforms is None and forward is None))
    options = Options(layers, _places(given), shape, resize, transforms, forward, device)
    runners = [options.runner(name, thing) for name, thing in given.items()]
    study = Study({}, [], limit=memory_limit(memory), seed=seed)
    shown = (names[0], names[0]) if b is None or (len(given) == 1 and names[1] == "b") else names
    called = dict(zip(pair, shown, strict=True))
    return _compared(runners, data, found, Pairs([pair], pairs), study, examples, partial, called)[0]


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
) -> Plan:
    """Return what `compare` would do with the same arguments, and what that costs; nothing is collected.

    The first batch is read and two of its examples are run through each model, once, to learn the layers' names and
    widths; a loader can be walked through again afterwards. What `compare` would then refuse, over pairs or memory,
    stands as the same sentence in the plan's `refused`; models that can't be run on the data are refused at once. The
    arguments are those of `nk.compare`.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> plan = explain({"x": X, "half": X[:, :4]}, {"y": X**2}, measures=["cka", "svcca"])
        >>> plan.pairs, plan.examples, plan.passes, plan.operations
        (2, 50, 0, 12000)
    """
    found = found_measures(measures)
    given, pair = _two(a, b, names, alone=b is None or (b is a and transforms is None and forward is None))
    options = Options(layers, _places(given), shape, resize, transforms, forward, device)
    wanted = Pairs([pair], pairs)
    runners = [options.runner(name, thing) for name, thing in given.items()]
    for own in (data, *(runner.data for runner in runners)):
        refuse_stream(own)
    feed = Feed(runners, data, examples)
    study = Study({}, [], examples=feed.expected, limit=memory_limit(memory), seed=seed)
    return explained(runners, found, wanted, feed, study)


def compare_many(
    models: Mapping[str, Any] | Sequence[Any],
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
) -> Comparisons:
    """Return the comparisons of all pairs of several models; each model runs once on each batch.

    `models` is a mapping from names to models (or recorded mappings), or a list, whose names are then 0, 1, 2, ...; the
    other arguments are those of `nk.compare`.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> many = compare_many({"a": {"x": X}, "b": {"x": X + 1}, "c": {"x": X**2}})
        >>> round(many["a", "b"]["x", "x"], 6)
        1.0
    """
    given = dict(models) if isinstance(models, Mapping) else {str(i): model for i, model in enumerate(models)}
    if len(given) < 2:
        raise ValueFault(f"`compare_many` needs at least two models; got {len(given)}.")
    found = found_measures(measures)
    options = Options(layers, {name: name for name in given}, shape, resize, transforms, forward, device)
    runners = [options.runner(name, thing) for name, thing in given.items()]
    study = Study({}, [], limit=memory_limit(memory), seed=seed)
    wanted = Pairs(list(combinations(given, 2)), pairs)
    return Comparisons(_compared(runners, data, found, wanted, study, examples, partial, {}))


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

    `a` is run before `b` on each batch, so that `b` may hand out parts of what `a` has computed.
    """
    study, pair = Study({}, [], limit=memory_limit(memory), seed=seed), (a.name, b.name)
    return _compared([a, b], data, found_measures(measures), Pairs([pair]), study, examples, partial, {})[0]


def _compared(
    runners: Sequence[Runner],
    data: Any,
    measures: Sequence[Measure],
    pairs: Pairs,
    study: Study,
    examples: int | None,
    partial: bool,
    names: Mapping[str, str],
) -> list[Comparison]:
    statistics, interruption = taken(runners, data, measures, pairs, study, examples, partial)
    statistics.names = dict(names)
    return [comparison_of(statistics, measures, pair, interruption) for pair in pairs.of]


def taken(
    runners: Sequence[Runner],
    data: Any,
    measures: Sequence[Measure],
    pairs: Pairs,
    study: Study,
    examples: int | None = None,
    partial: bool = False,
) -> tuple[Statistics, Interruption]:
    """Return what one pass over the data left, and whether it was interrupted."""
    feed = Feed(runners, data, examples)
    study = replace(study, examples=feed.expected)
    one = Pass(runners, measures, pairs, study, partial=partial)
    statistics = one.run(feed)
    statistics.data = name_of(data)
    return statistics, one.interruption


def _two(a: Any, b: Any, names: Any, alone: bool) -> tuple[dict[str, Any], tuple[str, str]]:
    """Return what is to be compared by its names, and which two names make the pair."""
    if not (isinstance(names, (tuple, list)) and len(names) == 2 and all(isinstance(name, str) for name in names)):
        raise ValueFault(f"`names` must be two texts; got {names!r}.")
    given = {names[0]: a} if alone else {names[0]: a, names[1]: b}
    if not alone and len(given) < 2:
        raise NameClash(f"both models are named {names[0]!r}; give them two `names`.")
    return given, (names[0], names[0] if alone else names[1])


def _places(given: Mapping[str, Any]) -> dict[str, str]:
    return dict(zip(given, ("a", "b"), strict=False))


def name_of(data: Any) -> str:
    """Return what a result calls its data: their own name, or their type's."""
    if data is None:
        return "recorded"
    name = getattr(data, "name", None)
    if isinstance(name, str):
        return name
    inner = getattr(data, "dataset", None)
    return type(inner).__name__ if inner is not None else type(data).__name__
