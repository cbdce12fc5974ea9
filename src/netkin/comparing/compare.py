"""`compare`, `compare_many`, `explain`: models or recorded rows in; a labelled comparison or its plan out."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import nn

from netkin import __version__
from netkin.comparing.collecting import Collection
from netkin.comparing.costs import Needs
from netkin.comparing.explaining import explained, refuse_stream
from netkin.comparing.options import Options
from netkin.comparing.pairing import Pairs
from netkin.comparing.plan import Plan
from netkin.comparing.subjects import RecordedSubject, Subject
from netkin.comparing.tabulating import Tables
from netkin.errors import NameClash, ShapeError, ValueFault
from netkin.measures.registry import Measure, find
from netkin.representations import batches_of
from netkin.representations.inputs import examples_in
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape
from netkin.results import Comparison, Comparisons

CHUNK = 512  # examples of recorded rows taken at a time


def compare(
    a: nn.Module | Mapping[str, Any],
    b: nn.Module | Mapping[str, Any] | None = None,
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

    `layers` is a choice for both (see `nk.layers`) or a mapping from "a" and "b" to a choice each; `pairs` is "all",
    "corresponding" or a list of (layer, layer); `shape` says what one example is, and with ``shape="positions"`` or
    ``"dft"`` ``resize="average"`` averages the larger of two feature maps down; `examples` ends the pass early;
    `memory` limits the statistics, in bytes (by default a quarter of what is free); `device` is where the models run.
    `transforms` and `forward` are functions, or a pair of them, one for each model. With ``partial=True`` Ctrl-C
    returns what is finished.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> comparison = compare({"x": X}, {"twice": 2 * X, "square": X**2})
        >>> round(comparison["x", "twice"], 6)
        1.0
    """
    given, pair = _two(a, b, names, alone=b is None or (b is a and transforms is None and forward is None))
    places = dict(zip(given, ("a", "b"), strict=False))
    options = Options(layers, places, shape, resize, transforms, forward, device)
    collection, found = collected(given, data, measures, Pairs([pair], pairs), options, examples, memory, seed, partial)
    shown = (names[0], names[0]) if b is None or (len(given) == 1 and names[1] == "b") else names
    return _comparison(collection, found, pair, shown, data, seed)


def explain(
    a: nn.Module | Mapping[str, Any],
    b: nn.Module | Mapping[str, Any] | None = None,
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
    stands as the same sentence in the plan's `refused`; models that can't be run on the data are refused at once.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> plan = explain({"x": X, "half": X[:, :4]}, {"y": X**2}, measures=["cka", "svcca"])
        >>> plan.pairs, plan.examples, plan.passes, plan.operations
        (2, 50, 0, 12000)
    """
    given, pair = _two(a, b, names, alone=b is None or (b is a and transforms is None and forward is None))
    places = dict(zip(given, ("a", "b"), strict=False))
    options = Options(layers, places, shape, resize, transforms, forward, device)
    found, wanted = _found(measures), Pairs([pair], pairs)
    subjects = [options.subject(name, thing) for name, thing in given.items()]
    refuse_stream(data)
    batches, expected = _feed(subjects, data, examples)
    return explained(subjects, found, wanted, batches, expected, memory)


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

    `models` is a mapping from names to models (or recorded mappings), or a list, whose names are then 0, 1, 2, ...

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
    of = list(combinations(given, 2))
    options = Options(layers, {name: name for name in given}, shape, resize, transforms, forward, device)
    collection, found = collected(given, data, measures, Pairs(of, pairs), options, examples, memory, seed, partial)
    return Comparisons([_comparison(collection, found, pair, pair, data, seed) for pair in of])


def compare_subjects(
    a: Subject,
    b: Subject,
    data: Any,
    measures: str | Callable[..., Any] | Sequence[Any],
    *,
    examples: int | None = None,
    memory: int | None = None,
    seed: int = 0,
    partial: bool = False,
) -> Comparison:
    """Return the comparison of two subjects, for those whose rows and columns are not the layers of two models.

    `a` is run before `b` on each batch, so that `b` may hand out parts of what `a` has computed.
    """
    found, pair = _found(measures), (a.name, b.name)
    collection = _pass([a, b], data, found, Pairs([pair]), examples, memory, seed, partial)
    return _comparison(collection, found, pair, pair, data, seed)


def _two(a: Any, b: Any, names: Any, alone: bool) -> tuple[dict[str, Any], tuple[str, str]]:
    """Return what is to be compared by its names, and which two names make the pair."""
    if not (isinstance(names, (tuple, list)) and len(names) == 2 and all(isinstance(name, str) for name in names)):
        raise ValueFault(f"`names` must be two texts; got {names!r}.")
    given = {names[0]: a} if alone else {names[0]: a, names[1]: b}
    if not alone and len(given) < 2:
        raise NameClash(f"both models are named {names[0]!r}; give them two `names`.")
    return given, (names[0], names[0] if alone else names[1])


def collected(
    given: Mapping[str, Any],
    data: Any,
    measures: Any,
    pairs: Pairs,
    options: Options,
    examples: int | None,
    memory: int | None,
    seed: int,
    partial: bool,
) -> tuple[Collection, list[Measure]]:
    """Return what one pass over the data told of the pairs, and the measures that were asked for."""
    found = _found(measures)
    subjects = [options.subject(name, thing) for name, thing in given.items()]
    return _pass(subjects, data, found, pairs, examples, memory, seed, partial), found


def _pass(
    subjects: Sequence[Subject],
    data: Any,
    measures: Sequence[Measure],
    pairs: Pairs,
    examples: int | None,
    memory: int | None,
    seed: int,
    partial: bool,
) -> Collection:
    batches, expected = _feed(subjects, data, examples)
    collection = Collection(subjects, Needs.of(measures), pairs, memory, seed, partial)
    collection.run(batches, expected)
    return collection


def _found(measures: Any) -> list[Measure]:
    """Return the measures asked for, each once."""
    asked = [measures] if isinstance(measures, str) or callable(measures) else measures
    found = list({measure.id: measure for measure in map(find, asked)}.values())
    if not found:
        raise ValueFault("`measures` is empty; name at least one, e.g. 'cka'.")
    return found


def _feed(subjects: Sequence[Subject], data: Any, examples: int | None) -> tuple[Iterable[Any], int | None]:
    """Return the batches, and how many examples they hold if that is known."""
    recorded = [subject for subject in subjects if isinstance(subject, RecordedSubject)]
    if not recorded:
        if data is None:
            raise ValueFault("`data` is missing: pass a loader, an iterable of batches or one array of inputs.")
        return batches_of(data, examples), examples_in(data, examples)
    if len(recorded) < len(subjects):
        raise ValueFault(
            "a model and recorded rows can't be compared: nobody knows that they saw the same examples. Record both."
        )
    counts = {subject.name: subject.examples for subject in recorded}
    if len(set(counts.values())) > 1:
        (a, n), (b, m) = next(iter(counts.items())), next(c for c in counts.items() if c[1] != recorded[0].examples)
        raise ShapeError(f"{a!r} holds {n:,} examples and {b!r} {m:,}; record both on the same examples.")
    if data is not None:
        raise ValueFault("recorded rows are compared as they are; leave `data` out.")
    if examples is not None and examples < 1:
        raise ValueFault(f"`examples` must be at least 1; got {examples}.")
    total = min(recorded[0].examples, examples or recorded[0].examples)
    return [slice(start, min(start + CHUNK, total)) for start in range(0, total, CHUNK)], total


def _comparison(
    collection: Collection,
    measures: Sequence[Measure],
    pair: tuple[str, str],
    names: tuple[str, str],
    data: Any,
    seed: int,
) -> Comparison:
    tables = Tables(collection, measures, *pair)
    tables.fill()
    subjects = {subject.name: subject for subject in collection.subjects}
    a, b = pair
    return Comparison(
        a=names[0],
        b=names[1],
        layers_a=tuple(tables.layers_a),
        layers_b=tuple(tables.layers_b),
        tables=tables.tables(),
        shapes_a={layer.name: layer.shape for layer in collection.layers[a]},
        shapes_b={layer.name: layer.shape for layer in collection.layers[b]},
        widths_a={layer.name: layer.width for layer in collection.layers[a]},
        widths_b={layer.name: layer.width for layer in collection.layers[b]},
        data=name_of(data),
        examples=collection.examples,
        seed=seed,
        warnings=tables.warnings(),
        version=__version__,
        provenance=_provenance(collection, subjects[a], subjects[b]),
        complete=not collection.interruption.ended,
    )


def name_of(data: Any) -> str:
    """Return what a result calls its data: their own name, or their type's."""
    if data is None:
        return "recorded"
    name = getattr(data, "name", None)
    if isinstance(name, str):
        return name
    inner = getattr(data, "dataset", None)
    return type(inner).__name__ if inner is not None else type(data).__name__


def _provenance(collection: Collection, a: Subject, b: Subject) -> dict[str, str]:
    products = collection.needs.precision(collection.meeting.layers.values())
    which = collection.pairs.which
    return {
        **{f"{what} {side}": text for side, subject in (("a", a), ("b", b)) for what, text in subject.origin.items()},
        "pairs": which if isinstance(which, str) else f"{len(which):,} listed",
        "resize": "average" if a.resizes else "none",
        "plan": str(collection.plan),
        "products": str(products).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
