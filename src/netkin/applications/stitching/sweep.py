"""Sweeps: layers of one model stitched into layers of another, by several methods, beside their similarity.

The fitting data are passed through once for all pairs and direct methods, the test data once for their evaluation and
once for the similarities. What trains on the task loss begins with the map that the same pass gave.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from netkin.applications.stitching.asking import Asked, How, Way, asked_ways
from netkin.applications.stitching.evaluating import Evaluation, evaluated, evaluated_all
from netkin.applications.stitching.fitting import Fit, fitted
from netkin.applications.stitching.joining import Stitched, precise
from netkin.applications.stitching.joints import Pair, joints
from netkin.applications.stitching.matching import matched
from netkin.applications.stitching.training import trained
from netkin.applications.stitching.transformations import Transformation
from netkin.applications.stitching.worth import Ledger, among, contrasts, known_scores
from netkin.comparing import compare
from netkin.comparing.compare import name_of
from netkin.comparing.interrupting import Interruption
from netkin.comparing.plan import free_memory
from netkin.comparing.subjects import lent
from netkin.errors import ForwardError, NoValue, ShapeError, ValueFault
from netkin.representations import batches_of
from netkin.representations.feeding import device_of
from netkin.results import Comparison, Comparisons

SCORES = ("relative_accuracy", "agreement", "cross_entropy")
FLATTERED = (
    "the stitches are judged on the very data they were fitted on, which flatters them; pass other data as `test`."
)
UNFINISHED = "interrupted: some stitches were not reached, and have no value."
NUMBERS = 3  # matrices of a stitch's evaluation, as wide as the second layer each

Store = Callable[[Comparison], None]
Work = tuple[Pair, Way]


def stitch_all(
    a: nn.Module,
    b: nn.Module,
    data: Any,
    test: Any = None,
    hows: How | Sequence[How] = ("least_squares",),
    *,
    pairs: Any = "corresponding",
    layers: Any = None,
    measures: Any = ("cka",),
    scores: str | Sequence[str] = SCORES,
    shape: Any = None,
    resize: str | None = None,
    examples: int | None = None,
    validation: Any = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    partial: bool = False,
    names: tuple[str, str] = ("a", "b"),
) -> Comparison:
    """Return what stitches of layers of `a` into layers of `b` are worth, beside how similar these layers are.

    Tables such as ``relative_accuracy(how=least_squares)`` stand beside those of `measures` in one comparison, and its
    warnings name the layers where the two disagree. `hows` are methods as in `nk.stitch`; options of a training are
    written ``"task_loss(epochs=3)"``, or given as a `TaskLoss`. `pairs` is "corresponding", "all" (every layer into
    every layer) or a list; pairs that can't be joined are holes with their reason. `scores` are numbers of an
    evaluation. Similarities compare the layers place by place, as stitches do, unless `shape` says otherwise.

    With `save` the result is written to that file as it grows, and the same call continues there: a stitch is kept
    whose models, data and options are the same. With ``partial=True`` Ctrl-C returns what is finished.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> batches = [(torch.randn(50, 4), torch.randint(0, 3, (50,)))]
        >>> found = stitch_all(model, model, batches, batches, ["least_squares", "random"])
        >>> round(found["relative_accuracy(how=least_squares)"]["1", "1"], 3)
        1.0
    """
    asked = Asked(
        asked_ways(hows, seed), data, test, measures, known_scores(scores), layers, pairs, shape, resize, examples,
        validation, device, seed,
    )  # fmt: skip
    known = None if save is None or not Path(save).exists() else Comparison.load(save)
    store: Store = (lambda found: None) if save is None else (lambda found: found.save(save))
    return _Sweep(a, b, names, asked, known, store, saves=save is not None).run(Interruption(partial))


def stitch_many(
    models: Mapping[str, nn.Module] | Sequence[nn.Module],
    data: Any,
    test: Any = None,
    hows: How | Sequence[How] = ("least_squares",),
    *,
    pairs: Any = "corresponding",
    layers: Any = None,
    measures: Any = ("cka",),
    scores: str | Sequence[str] = SCORES,
    shape: Any = None,
    resize: str | None = None,
    examples: int | None = None,
    validation: Any = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    partial: bool = False,
) -> Comparisons:
    """Return the sweeps of all ordered pairs of several models; `spread()` of them has the means over the pairs.

    `models` is a mapping from names to models, or a list, whose names are then 0, 1, 2, ...; all else is as in
    `stitch_all`.
    """
    given = dict(models) if isinstance(models, Mapping) else {str(i): model for i, model in enumerate(models)}
    if len(given) < 2:
        raise ValueFault(f"`stitch_many` needs at least two models; got {len(given)}.")
    asked = Asked(
        asked_ways(hows, seed), data, test, measures, known_scores(scores), layers, pairs, shape, resize, examples,
        validation, device, seed,
    )  # fmt: skip
    return _Tour(given, asked, save).run(partial)


class _Tour:
    """Sweeps of all ordered pairs of models, one after the other."""

    def __init__(self, models: Mapping[str, nn.Module], asked: Asked, save: str | os.PathLike[str] | None):
        self.models, self.asked, self.save = models, asked, save
        self.of = list(permutations(models, 2))
        known = {} if save is None or not Path(save).exists() else dict(Comparisons.load(save))
        self.known = {pair: known[pair] for pair in self.of if pair in known}
        self.done: dict[Pair, Comparison] = {}

    def run(self, partial: bool) -> Comparisons:
        interruption = Interruption(partial)
        with interruption.ending("touring", lambda: bool(self.done)):
            for pair in tqdm(self.of, desc="stitching", unit=" pairs of models", delay=2, leave=False):
                self._swept(pair, interruption)
                if interruption.ended:
                    break
        return Comparisons(self.done)

    def _swept(self, pair: Pair, interruption: Interruption) -> None:
        a, b = (self.models[name] for name in pair)

        def store(found: Comparison) -> None:
            self.done[pair] = found
            if self.save is not None:
                Comparisons(self.known | self.done).save(self.save)

        saves = self.save is not None
        self.done[pair] = _Sweep(a, b, pair, self.asked, self.known.get(pair), store, saves=saves).run(interruption)


class _Sweep:
    """One model stitched into another; `known` is what an earlier sweep found, `store` takes what is finished."""

    def __init__(
        self,
        a: nn.Module,
        b: nn.Module,
        names: tuple[str, str],
        asked: Asked,
        known: Comparison | None,
        store: Store,
        *,
        saves: bool,
    ):
        self.a, self.b, self.names, self.asked, self.store = a, b, names, asked, store
        self.question = asked.question(a, b) if saves else {}
        first = next(batches_of(asked.data, asked.examples))
        with _on(asked.device, a, b):
            self.joints = joints(a, b, first, asked.layers, asked.pairs, resize=asked.resize, names=names)
        hows = [way.id for way in asked.ways]
        self.ledger = Ledger(self.joints.layers, self.joints.wanted, hows, asked.scores)
        if known is not None and all(known.provenance.get(key) == value for key, value in self.question.items()):
            self.ledger.recall(known)
        for pair, reason in self.joints.refused.items():
            for how in hows:
                self.ledger.refuse(pair, how, reason)
        self.cut: dict[str, str] = {}  # how the second model was cut, by layer
        self.fitted = 0

    def run(self, interruption: Interruption) -> Comparison:
        """Return the comparison; an interruption that was asked for leaves the rest as holes."""
        with _on(self.asked.device, self.a, self.b):
            self.similarity = self._similarity()
            with interruption.ending("stitching"):
                self._stitched()
        found = self._so_far()
        self.store(found)
        return found

    def _stitched(self) -> None:
        work = [(pair, way) for pair in self.joints.joinable for way in self.asked.ways]
        work = [(pair, way) for pair, way in work if not self.ledger.knows(pair, way.id)]
        if not work:
            return
        self.store(self._so_far())
        pairs, asked = list(dict.fromkeys(pair for pair, _ in work)), self.asked
        fit = fitted(self.a, self.b, pairs, asked.data, examples=asked.examples, resize=asked.resize, names=self.names)
        self.fitted = fit.examples
        made = {(pair, way): network for pair, way in work if (network := self._network(fit, pair, way)) is not None}
        self._judged([(key, network) for key, network in made.items() if key[1].training is None])
        longer = [(key, network) for key, network in made.items() if key[1].training is not None]
        for key, network in tqdm(longer, desc="on the task loss", unit=" stitches", delay=2, leave=False):
            self._trained(key, network)

    def _network(self, fit: Fit, pair: Pair, way: Way) -> Stitched | None:
        """Return the stitched network of a pair by a method, before any training; None where there is no map."""
        try:
            linear = matched(fit.moments(pair), way.start)
            rank = way.training.rank if way.training else None
            transformation = Transformation(linear, fit.meetings[pair], rank=rank)
        except (NoValue, ValueFault) as reason:  # a layer that does not vary; a rank above the width
            self.ledger.refuse(pair, way.id, str(reason))
            return None
        cuts = self.joints.cuts[pair[1]]
        transformation = transformation.to(device_of(self.b), precise(self.b))
        network = Stitched(self.a, pair[0], self.b, pair[1], transformation, cuts=cuts)
        self.cut[pair[1]] = network.tail.how
        return network

    def _judged(self, made: Sequence[tuple[Work, Stitched]]) -> None:
        """Evaluate stitches together, as many as memory allows at a time, in one pass over the test data."""
        for some in _portions(made):
            networks = [network for _, network in some]
            try:
                found: Sequence[Evaluation | None] = evaluated_all(networks, self.asked.judged_on)
            except ForwardError:  # one gives NaN: which one shows when each has its own pass
                found = [None] * len(networks)
            for (key, network), evaluation in zip(some, found, strict=True):
                self._note(key, network, evaluation)
            self.store(self._so_far())

    def _note(self, key: Work, network: Stitched, evaluation: Evaluation | None) -> None:
        pair, way = key
        try:
            self.ledger.note(pair, way.id, evaluation or evaluated(network, self.asked.judged_on))
        except ForwardError as reason:
            self.ledger.refuse(pair, way.id, str(reason))

    def _trained(self, key: Work, network: Stitched) -> None:
        asked, (pair, way) = self.asked, key
        try:
            trained(network, asked.data, way.training, validation=asked.validation, examples=asked.examples)
        except (ForwardError, ShapeError) as reason:  # it came to NaN, or no gradient comes back
            self.ledger.refuse(pair, way.id, str(reason))
        else:
            self._note(key, network, None)
        self.store(self._so_far())

    def _similarity(self) -> Comparison:
        """Return the comparison of the same pairs of layers on the test data."""
        asked, (ours, theirs) = self.asked, self.joints.layers
        shape, resize = asked.shape, None
        if shape is None and "tokens" not in self.joints.kinds:
            shape, resize = "positions", "average"
        layers: Any = {"a": ours, "b": theirs} if self.a is not self.b else list(dict.fromkeys((*ours, *theirs)))
        return compare(
            self.a, self.b, asked.judged_on, asked.measures, layers=layers, pairs=list(self.joints.wanted),
            shape=shape, resize=resize, seed=asked.seed, names=self.names,
        )  # fmt: skip

    def _so_far(self) -> Comparison:
        similar, layers, stitches = self.similarity, self.joints.layers, self.ledger.tables()
        tables = {name: among(table, layers) for name, table in similar.tables.items()}
        done = all(self.ledger.knows(pair, way.id) for pair in self.joints.wanted for way in self.asked.ways)
        said = [*similar.warnings, *contrasts(list(tables.values()), stitches)]
        said += [FLATTERED] * (self.asked.test is None) + [UNFINISHED] * (not done)
        return Comparison(
            a=self.names[0],
            b=self.names[1],
            layers_a=layers[0],
            layers_b=layers[1],
            tables=tables | stitches,
            shapes_a={layer: shape for layer, shape in similar.shapes_a.items() if layer in layers[0]},
            shapes_b={layer: shape for layer, shape in similar.shapes_b.items() if layer in layers[1]},
            widths_a=self.joints.widths[0],
            widths_b=self.joints.widths[1],
            data=name_of(self.asked.judged_on),
            examples=similar.examples,
            seed=self.asked.seed,
            version=similar.version,
            warnings=tuple(said),
            provenance=self._provenance(),
            complete=done,
        )

    def _provenance(self) -> dict[str, str]:
        asked = self.asked
        fitting = {"fitted on": name_of(asked.data), "fitting examples": f"{self.fitted:,}"} if self.fitted else {}
        cut = {f"cut after {layer!r}": f"first model stopped, second {words}" for layer, words in self.cut.items()}
        which = asked.pairs if isinstance(asked.pairs, str) else f"{len(self.joints.wanted):,} listed"
        resize = asked.resize or "average where maps shrink, bilinear where they grow"
        own = {"pairs": which, "resize of stitches": resize}
        return {**self.similarity.provenance, **own, **fitting, **cut, **self.question}


def _portions(made: Sequence[tuple[Work, Stitched]]) -> Iterator[list[tuple[Work, Stitched]]]:
    """Yield stitches, as many at a time as have room for what their evaluation keeps."""
    some: list[tuple[Work, Stitched]] = []
    limit, size = free_memory() // 4, 0
    for key, network in made:
        own = NUMBERS * 8 * network.transformation.meeting.b.width**2
        if some and size + own > limit:
            yield some
            some, size = [], 0
        some.append((key, network))
        size += own
    if some:
        yield some


@contextmanager
def _on(device: torch.device | str | None, a: nn.Module, b: nn.Module) -> Iterator[None]:
    """Lend the models to `device` while the `with` lasts."""
    with ExitStack() as stack:
        for model in [a] if a is b else [a, b]:
            stack.enter_context(lent(model, device))
        yield
