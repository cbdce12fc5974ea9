"""`compare_many` and `explain_many`: all pairs of several models, and the plan of the passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from netkin.comparing.alignment import Pairs
from netkin.comparing.all_pairs import AllPairs
from netkin.comparing.engines import Engine
from netkin.comparing.pairs_plan import PairsPlan
from netkin.comparing.request import Options
from netkin.comparing.study import found_measures
from netkin.errors import ValueFault, also_called
from netkin.progress import ProgressOption, showing
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape
from netkin.results import Comparisons
from netkin.sources.names import by_name
from netkin.statistics.collector import Study


@also_called(measures="measure")
@by_name(models="models", data="data")
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
    rows: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    transforms: Any = None,
    forward: Any = None,
    partial: bool = False,
    errors: bool = False,
    chunks: int = 20,
    exact_model: bool = False,
    engine: str | Engine = "local",
    progress: ProgressOption = None,
) -> Comparisons:
    """Return the comparisons of all pairs of several models; each model runs once on each batch, if memory allows.

    Models in a list are named 0, 1, 2, ... A text is a model by name, as `nk.load_model` takes it, which is loaded when
    its turn comes. What does not fit the memory in one pass is split into several, in each of which some models are
    compared with some others, with the same numbers; `nk.explain_many` shows how.

    Args:
        models: a mapping from names to models, texts for `nk.load_model`, recorded mappings or subjects, or a list.
        data: a loader, an iterable of batches or one array of inputs.
        measures: one measure or several, by name with parameters, or as functions.
        layers: which layers, for all models or by name of the model.
        pairs: "all", "corresponding" or a list of (layer, layer).
        examples: the number of examples after which the pass ends.
        shape: what one example is (see `nk.shapes`).
        resize: "average" averages the larger of two maps down.
        memory: the most bytes that statistics may take, with the rows and models that are held beside them.
        rows: how many examples may be sampled, where models would run several times otherwise; the result
            names the sample.
        seed: seed of the sample of rows that kernel measures read.
        device: where the models run.
        transforms: a function of the inputs, or one for each model.
        forward: a function ``forward(model, batch)``, or one for each model.
        partial: whether Ctrl-C returns what is finished.
        errors: whether values get standard errors.
        chunks: how many chunks of the examples are left out in turn for them.
        exact_model: whether float32 in a model on a GPU must not be rounded to TF32.
        engine: "local" for this process, "distributed" for those that torchrun started, "ray" or an `nk.Ray` for a
            cluster; models, data and functions are then given by name, and models that fail are left out.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> many = compare_many({"a": {"x": X}, "b": {"x": X + 1}, "c": {"x": X**2}})
        >>> round(many["a", "b"]["x", "x"], 6)
        1.0
    """
    with showing(progress):
        study = made_study(memory, seed, errors, chunks)
        options = (layers, shape, resize, transforms, forward, device, exact_model)
        every = _all_pairs(models, options, pairs, study, data, examples, rows, partial, engine)
        return Comparisons(every.compare(found_measures(measures)), every.failed)


def explain_many(
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
    rows: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    transforms: Any = None,
    forward: Any = None,
    errors: bool = False,
    chunks: int = 20,
    exact_model: bool = False,
    progress: ProgressOption = None,
) -> PairsPlan:
    """Return how `compare_many` would go about the same arguments: passes, bytes and hours, before anything starts.

    One model of each architecture is run on the first batch, and two models are compared on a few batches to see how
    long that takes.

    Args:
        models: a mapping from names to models, or a list; models may be given by name, as `nk.load_model` takes it.
        data: a loader, an iterable of batches or one array of inputs.
        measures: one measure or several, by name with parameters, or as functions.
        layers: which layers, for all models or by name of the model.
        pairs: "all", "corresponding" or a list of (layer, layer).
        examples: the number of examples after which a pass ends.
        shape: what one example is (see `nk.shapes`).
        resize: "average" averages the larger of two maps down.
        memory: the most bytes that statistics may take, with the rows and models that are held beside them.
        rows: how many examples may be sampled, where models would run several times otherwise.
        seed: seed of the sample of rows.
        device: where the models run.
        transforms: a function of the inputs, or one for each model.
        forward: a function ``forward(model, batch)``, or one for each model.
        errors: whether values get standard errors.
        chunks: how many chunks of the examples are left out in turn for them.
        exact_model: whether float32 in a model on a GPU must not be rounded to TF32.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> nets = {f"net {seed}": torch.nn.Linear(4, 8) for seed in range(10)}
        >>> plan = explain_many(nets, torch.randn(50, 4), progress=False)
        >>> plan.pairs, plan.passes, len(plan.way.blocks)
        (45, 10, 1)
    """
    with showing(progress):
        study = made_study(memory, seed, errors, chunks)
        options = (layers, shape, resize, transforms, forward, device, exact_model)
        every = _all_pairs(models, options, pairs, study, data, examples, rows)
        return every.explain(found_measures(measures))


def _all_pairs(models: Any, options: tuple[Any, ...], pairs: Any, study: Study, *rest: Any) -> AllPairs:
    """Return the call for all pairs of `models`."""
    given = dict(models) if isinstance(models, Mapping) else {str(i): model for i, model in enumerate(models)}
    if len(given) < 2:
        raise ValueFault(f"`compare_many` needs at least two models; got {len(given)}.")
    layers, *others = options
    made = Options(layers, {name: name for name in given}, *others)
    return AllPairs(given, made, Pairs(list(combinations(given, 2)), pairs), study, *rest)


def made_study(memory: int | None, seed: int, errors: bool, chunks: int) -> Study:
    """Return the study of a call."""
    if errors and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 2):
        raise ValueFault(f"standard errors need at least 2 chunks of the examples; got chunks={chunks!r}.")
    # without a limit the device decides, once it is known
    return Study({}, [], limit=-1 if memory is None else memory, chunks=chunks if errors else 0, seed=seed)
