"""What is asked of stitches: two models or more, data, layers, and the methods by which the maps are found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import nn

from netkin.applications.experiment import Experiment
from netkin.applications.stitching.evaluating import USUAL, known_scores
from netkin.applications.stitching.joining import Joints, Pair, joints
from netkin.applications.stitching.maps import find, identity, random, with_seed
from netkin.applications.stitching.network import Stitch
from netkin.applications.stitching.training import NAME, TRAINING, BatchesDigest, TaskLoss
from netkin.comparing.comparer import Comparer, load_comparer
from netkin.comparing.feed import data_name
from netkin.comparing.spec import declarations, option
from netkin.errors import InvalidValue, NameClash, UnknownName, require_at_least
from netkin.identity import described_call, function_digest
from netkin.progress import ProgressOption
from netkin.representations import batches_of
from netkin.representations.inputs import reported_batches
from netkin.results.labels import parse_id
from netkin.sources.batches import overlap_remark

FITTED, JUDGED, VALIDATED = "fitting data digest", "test data digest", "validation data digest"
MethodLike = str | TaskLoss
Saved = Comparer | str | os.PathLike[str] | Sequence[Comparer | str | os.PathLike[str]] | None


@dataclass(frozen=True)
class StitchMethod:
    """One method: its id, the direct method that gives its map, and how that is trained, if it is."""

    id: str
    start: str
    training: TaskLoss | None = None

    @property
    def identity(self) -> str:
        """The id, with the digest of a loss that is a function."""
        labels = "soft" if self.training is None else self.training.labels
        return f"{self.id}, loss {function_digest(labels)}" if callable(labels) else self.id

    @property
    def is_blind(self) -> bool:
        """Whether its map, before any training, is the same for any data."""
        return find(self.start)[0] in (identity, random)


def find_method(method: MethodLike, seed: int, options: Mapping[str, Any] | None = None) -> StitchMethod:
    """Return a method as it was requested, with `options` of a training.

    `seed` is that of what is random, unless the method names one of its own.
    """
    name, given = (parse_id(method) if isinstance(method, str) else None) or (method, {})
    if name == NAME:
        training = TaskLoss.read(str(method), {**({} if "seed" in given else {"seed": seed}), **(options or {})})
        return StitchMethod(str(training), training.start, training)
    for key in options or {}:
        if isinstance(method, TaskLoss):
            raise InvalidValue(f"`{key}` is given as well as a `TaskLoss`; set it there.", argument=key)
        raise UnknownName(f"{method!r} has no option {key!r}; such options belong to {NAME!r}.", argument=key)
    if isinstance(method, TaskLoss):
        return StitchMethod(str(method), method.start, method)
    find(method, others=[NAME])
    spelled = f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})" if given else str(name)
    return StitchMethod(spelled, with_seed(spelled, seed))


def find_methods(methods: MethodLike | Sequence[MethodLike], seed: int) -> dict[str, StitchMethod]:
    """Return methods by their ids, each once; none at all is refused."""
    given = [methods] if isinstance(methods, (str, TaskLoss)) else list(methods)
    if not given:
        raise InvalidValue("`methods` is empty; name at least one, e.g. 'least_squares'.", argument="methods")
    return {one.id: one for one in (find_method(method, seed) for method in given)}


@dataclass(frozen=True, kw_only=True)
class StitchRequest(Experiment):
    """What is asked of stitches.

    Args:
        models: the models, by the names that results call them.
        data: the examples from which the maps are found; None where `statistics` give them.
        methods: how the maps are found.
    """

    methods: tuple[StitchMethod, ...]
    validation: Any = option(
        None, "the examples on which a training is evaluated meanwhile; by default part of `data`."
    )
    resize: str | None = option(
        None, 'how maps get another size: "average", "bilinear" or "nearest"; by default "average" to a smaller one, '
        'else "bilinear".'
    )  # fmt: skip
    statistics: Saved = option(
        None, "what `nk.collect` returned for the same models, or its file, from which direct methods read their maps: "
        "a few examples of `data`, or of `test`, are run to learn the layers, and no more is read. For several models "
        "a list of these."
    )  # fmt: skip
    pairs: Any = option(
        "corresponding", '"corresponding", "all" (every layer into every layer) or a list of (layer, layer).'
    )
    layers: Any = option(None, "which layers (see `nk.layers`), for both models or by their names.")
    measures: Any = option(("cka",), "similarities of the same layers, tabulated too.")
    scores: str | Sequence[str] = option(USUAL, "which numbers of an evaluation.")
    shape: Any = option(None, "what one example is for the similarities; by default a place, as for stitches.")
    test_examples: int | None = option(None, "how many examples of the test data to read.")
    each: Callable[[Stitch], None] | None = option(None, "a function that is called with every `Stitch`.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_examples is not None:
            require_at_least(1, test_examples=self.test_examples)
        if self.data is None and not self.saved:
            raise InvalidValue(
                "`data` is missing: pass a loader, an iterable of batches or one array of inputs.", argument="data"
            )
        if self.data is None and (self.test is None or any(method.training for method in self.methods)):
            raise InvalidValue(
                "statistics give the maps of direct methods alone: pass `data` for a training, and `test` to "
                "evaluate on.",
                argument="data",
            )

    @classmethod
    def of_sweep(
        cls, models: Mapping[str, nn.Module], data: Any, test: Any, methods: Any, options: Any
    ) -> StitchRequest:
        """Return what is asked of a sweep, which reads its data several times."""
        chosen = tuple(find_methods(methods, options.get("seed", 0)).values())
        if any(one.training is not None and one.training.resume is not None for one in chosen):
            raise InvalidValue("`resume` is for a single stitch; a sweep continues by `save`.", argument="resume")
        options = {**options, "scores": known_scores(options.get("scores", USUAL))}
        request = cls(models=models, data=data, test=test, methods=chosen, **options)
        request.require_rereadable("a sweep", "data", "test", "validation")
        return request

    def require_rereadable(self, what: str, *names: str) -> None:
        """Refuse data that can be read once only, as `what` reads them several times."""
        for name in names:
            if isinstance(getattr(self, name), Iterator):
                raise InvalidValue(
                    f"`{name}` is an iterator, which gives its batches once, and {what} reads them several times; "
                    "pass a loader or a list.",
                    argument=name,
                )

    @cached_property
    def saved(self) -> tuple[Comparer, ...]:
        """The statistics from which direct maps are read, opened."""
        several = self.statistics if isinstance(self.statistics, (list, tuple)) else [self.statistics]
        opened = list[Comparer]()
        for one in several:
            if not isinstance(one, (Comparer, str, os.PathLike, type(None))):
                raise InvalidValue(
                    f"`statistics` is what `nk.collect` returned, its file, or a list of these; got "
                    f"{type(one).__name__}.",
                    argument="statistics",
                )
            opened += [] if one is None else [one if isinstance(one, Comparer) else load_comparer(one)]
        return tuple(opened)

    @property
    def tried(self) -> tuple[Any, int | None]:
        """The data of which a few examples are tried out, and the maximal number of examples."""
        return self.judging if self.data is None else (self.data, self.examples)

    @property
    def judging(self) -> tuple[Any, int | None]:
        """The data on which stitches are evaluated, and the maximal number of examples; else those of the fitting."""
        if self.test is None:
            return self.data, self.examples if self.test_examples is None else self.test_examples
        return self.test, self.test_examples

    def joints(self, names: Pair) -> Joints:
        """Return which layers of two of the models can be joined, tried out on the first examples."""
        a, b = (self.given_models[name] for name in names)
        first = next(batches_of(*self.tried))
        return joints(a, b, first, self.layers, self.pairs, resize=self.resize, names=names)

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digests of the data, which are read for them, and the batches and order of those to train on."""
        fitted, batches, order = ("none", 0, "") if self.data is None else digest_of(self.data, self.examples)
        same = self.judging[0] is self.data and self.judging[1] == self.examples
        judged = fitted if same else digest_of(*self.judging)[0]
        validated, _, then = ("none", 0, "") if self.validation is None else digest_of(self.validation)
        kept = ", ".join(one.digest.hex for one in self.saved)
        fitted = f"{kept} of statistics, data {fitted}" if kept else fitted
        return {FITTED: fitted, JUDGED: judged, VALIDATED: validated, "batches": f"{batches} batches{order}{then}"}

    @property
    def settings(self) -> dict[str, str]:
        """What the scores of a stitch depend on beside models, data, layers and method."""
        return {"resize": str(self.resize), "seed": str(self.seed)}

    @property
    def identity(self) -> dict[str, Any]:
        """What all stitches depend on; more models may join them."""
        data = {name: text for name, text in self.digests.items() if name != "batches"}
        return super().identity | data | self.settings

    @cached_property
    def overlap(self) -> str:
        """How many test examples are among those of the fit, as a warning; empty if none are."""
        return "" if self.test is None else overlap_remark(self.data, self.test, self.examples, self.test_examples)

    def call(self, name: str, **models: Any) -> str:
        """Return the command or the call that requests a sweep."""
        told = ("pairs", "layers", "measures", "scores", "shape", "resize", "seed", "examples", "test_examples")
        test, methods = None if self.test is None else data_name(self.test), [method.id for method in self.methods]
        options = {name: getattr(self, name) for name in told}
        return described_call(name, **models, data=data_name(self.data), test=test, methods=methods, **options)


class SweepOptions(TypedDict, total=False):
    """The keywords of a sweep, for type checkers; a test holds it equal to what is declared."""

    examples: int | None
    seed: int
    device: torch.device | str | None
    save: str | os.PathLike[str] | None
    overwrite: bool
    partial: bool
    progress: ProgressOption
    validation: Any
    resize: str | None
    statistics: Saved
    pairs: Any
    layers: Any
    measures: Any
    scores: str | Sequence[str]
    shape: Any
    test_examples: int | None
    each: Callable[[Stitch], None] | None


SWEEP = {name: one for name, one in declarations(StitchRequest).items() if name in SweepOptions.__annotations__}
FIT = {name: SWEEP[name] for name in ("examples", "seed", "device", "progress", "resize", "statistics")}
STITCH = FIT | {"validation": SWEEP["validation"]} | {name: TRAINING[name] for name in TRAINING if name != "seed"}


def two_models(a: nn.Module, b: nn.Module, names: tuple[str, str]) -> dict[str, nn.Module]:
    """Return two models by their names."""
    if isinstance(names, str) or len(names) != 2:
        raise InvalidValue(
            f"`names` must be two, one for each model, such as ('old', 'new'); got {names!r}.", argument="names"
        )
    if names[0] == names[1]:
        raise NameClash(f"both models are named {names[0]!r}; give them two `names`.", argument="names")
    return dict(zip(names, (a, b), strict=True))


def digest_of(data: Any, examples: int | None = None) -> tuple[str, int, str]:
    """Return a text that changes with any example, input or label, but not with their order; and how many batches.

    The third is a text that changes with the order and with the sizes of the batches, empty for data that may shuffle.
    """
    found = BatchesDigest(data)
    for _ in found.passing(reported_batches(data, examples, "reading the data")):
        pass
    return str(found.examples), len(found.sizes), found.order and f", order {found.order}"
