"""Sweeps: layers of one model stitched into layers of another, by several methods, beside their similarity.

The fitting data are passed through once for all pairs and direct methods, the test data once for the similarities and
as often as memory asks for, usually once, for the evaluation. What trains on the task loss begins with the map that the
fitting pass gave.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch import nn

from netkin.applications.stitching.asking import Asked, How, Way, asked_ways
from netkin.applications.stitching.evaluating import Evaluation, evaluated, evaluated_all
from netkin.applications.stitching.fitting import Fit, fitted
from netkin.applications.stitching.joining import both_lent
from netkin.applications.stitching.joints import Pair, joints
from netkin.applications.stitching.keeping import Keeping
from netkin.applications.stitching.stitch import started, trained_stitch
from netkin.applications.stitching.stitches import Stitch
from netkin.applications.stitching.worth import USUAL, Ledger, among, contrasts, known_scores
from netkin.comparing.compare import compare
from netkin.comparing.interrupting import Interruption
from netkin.comparing.request import name_of
from netkin.errors import ForwardError, InflatedWarning, NoValue, ShapeError, ValueFault
from netkin.memory import free_memory
from netkin.progress import ProgressOption, reported, showing
from netkin.representations import batches_of
from netkin.representations.inputs import device_of
from netkin.results import Comparison, Comparisons

FLATTERED = (
    "the stitches are judged on the very data they were fitted on, which flatters them; pass other data as `test` "
    "(--test on the command line)."
)
UNFINISHED = "interrupted: some stitches were not reached, and have no value."
NUMBERS = 3  # matrices of a stitch's evaluation, as wide as the second layer each

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
    scores: str | Sequence[str] = USUAL,
    shape: Any = None,
    resize: str | None = None,
    examples: int | None = None,
    test_examples: int | None = None,
    validation: Any = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    partial: bool = False,
    each: Callable[[Stitch], None] | None = None,
    names: tuple[str, str] = ("a", "b"),
    progress: ProgressOption = None,
) -> Comparison:
    """Return what stitches of layers of `a` into layers of `b` are worth, beside how similar these layers are.

    Tables such as ``relative_accuracy(how=least_squares)`` stand beside those of `measures` in one comparison, and its
    warnings name the layers where the two disagree. `hows` are methods as in `nk.stitch`; options of a training are
    written ``"task_loss(epochs=3)"``, or given as a `TaskLoss`. `pairs` is "corresponding", "all" (every layer into
    every layer) or a list; pairs that can't be joined are holes with their reason. `scores` are numbers of an
    evaluation. Similarities compare the layers place by place, as stitches do, unless `shape` says otherwise.

    `examples` limits those of `data`, `test_examples` those of `test`; without `test` the stitches are judged on the
    examples they were fitted on. `each` is called with every `Stitch`.

    With `save` the result is written to that file as it grows, and the same call continues there, also with more
    methods or layers; a file that holds anything else is refused. With ``partial=True`` Ctrl-C returns what is
    finished.

    Args:
        a: the first model.
        b: the second model.
        data: the examples the maps are found on.
        test: the examples they are judged on.
        hows: one method or several.
        pairs: "corresponding", "all" or a list of (layer, layer).
        layers: which layers (see `nk.layers`), for all models or by "a" and "b".
        measures: similarities to stand beside.
        scores: numbers of an evaluation.
        shape: what one example is for the similarities.
        resize: how maps get another size.
        examples: how many examples of `data` are read.
        test_examples: how many of `test`.
        validation: what a training is judged on meanwhile.
        device: where the models run meanwhile.
        seed: of random maps and of training.
        save: the file that grows with the result, and in which the same call continues.
        partial: whether Ctrl-C returns what is finished.
        each: a function that is called with every `Stitch`.
        names: what the result calls the two.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> inputs = torch.eye(4).repeat(10, 1) + torch.arange(40).unsqueeze(1) / 40
        >>> batches = [(inputs, model(inputs).argmax(1))]
        >>> found = stitch_all(model, model, batches, batches, ["least_squares", "random"])
        >>> round(found["relative_accuracy(how=least_squares)"]["1", "1"], 3)
        1.0
    """
    asked = Asked(
        ways=asked_ways(hows, seed), scores=known_scores(scores), data=data, test=test, measures=measures,
        layers=layers, pairs=pairs, shape=shape, resize=resize, examples=examples, test_examples=test_examples,
        validation=validation, device=device, seed=seed, each=each,
    )  # fmt: skip
    with showing(progress):
        return _Sweep(a, b, names, asked, Keeping(save, [names], several=False)).run(Interruption(partial))


def stitch_many(
    models: Mapping[str, nn.Module] | Sequence[nn.Module],
    data: Any,
    test: Any = None,
    hows: How | Sequence[How] = ("least_squares",),
    *,
    pairs: Any = "corresponding",
    layers: Any = None,
    measures: Any = ("cka",),
    scores: str | Sequence[str] = USUAL,
    shape: Any = None,
    resize: str | None = None,
    examples: int | None = None,
    test_examples: int | None = None,
    validation: Any = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    partial: bool = False,
    each: Callable[[Stitch], None] | None = None,
    progress: ProgressOption = None,
) -> Comparisons:
    """Return the sweeps of all ordered pairs of several models; `spread()` of them has the means over the pairs.

    Everything is as in `stitch_all`.

    Args:
        models: a mapping from names to models, or a list, whose names are then 0, 1, 2, ...
        data: the examples the maps are found on.
        test: the examples they are judged on.
        hows: one method or several.
        pairs: "corresponding", "all" or a list of (layer, layer).
        layers: which layers (see `nk.layers`).
        measures: similarities to stand beside.
        scores: numbers of an evaluation.
        shape: what one example is for the similarities.
        resize: how maps get another size.
        examples: how many examples of `data` are read.
        test_examples: how many of `test`.
        validation: what a training is judged on meanwhile.
        device: where the models run meanwhile.
        seed: of random maps and of training.
        save: the file that grows with the result, and in which the same call continues.
        partial: whether Ctrl-C returns what is finished.
        each: a function that is called with every `Stitch`.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
    """
    given = dict(models) if isinstance(models, Mapping) else {str(i): model for i, model in enumerate(models)}
    if len(given) < 2:
        raise ValueFault(f"`stitch_many` needs at least two models; got {len(given)}.")
    asked = Asked(
        ways=asked_ways(hows, seed), scores=known_scores(scores), data=data, test=test, measures=measures,
        layers=layers, pairs=pairs, shape=shape, resize=resize, examples=examples, test_examples=test_examples,
        validation=validation, device=device, seed=seed, each=each,
    )  # fmt: skip
    with showing(progress):
        return _Tour(given, asked, save).run(partial)


class _Tour:
    """Sweeps of all ordered pairs of models, one after the other."""

    def __init__(self, models: Mapping[str, nn.Module], asked: Asked, save: str | os.PathLike[str] | None):
        self.models, self.asked, self.of = models, asked, list(permutations(models, 2))
        self.keeping = Keeping(save, self.of, several=True)

    def run(self, partial: bool) -> Comparisons:
        interruption = Interruption(partial)
        done: list[Comparison] = []
        with interruption.ending("touring", lambda: bool(done)):
            for pair in reported(self.of, "stitching", "pairs of models"):
                a, b = (self.models[name] for name in pair)
                done.append(_Sweep(a, b, pair, self.asked, self.keeping).run(interruption))
                if interruption.ended:
                    break
        return Comparisons(done)


class _Sweep:
    """One model stitched into another; `keeping` has what an earlier sweep found and takes what is finished."""

    def __init__(self, a: nn.Module, b: nn.Module, names: tuple[str, str], asked: Asked, keeping: Keeping):
        self.a, self.b, self.names, self.asked, self.keeping = a, b, names, asked, keeping
        self.question = {} if keeping.path is None else asked.question(a, b)
        first = next(batches_of(asked.data, asked.examples))
        with both_lent(a, b, asked.device):
            self.joints = joints(a, b, first, asked.layers, asked.pairs, resize=asked.resize, names=names)
        hows = [way.id for way in asked.ways]
        self.ledger = Ledger(self.joints.layers, self.joints.wanted, hows, asked.scores)
        known = keeping.known(names, self.question, self.ledger)
        if known is not None:
            self.ledger.recall(known)
        for pair, reason in self.joints.refused.items():
            for how in hows:
                self.ledger.refuse(pair, how, reason)
        self.cut: dict[str, str] = {}  # how the second model was cut, by layer
        self.made: list[Stitch] = []
        self.few: list[str] = []  # stitches from too few rows, in words
        self.doubts: dict[str, None] = {}  # about the test data
        self.fitted = 0

    def run(self, interruption: Interruption) -> Comparison:
        """Return the comparison; an interruption that was asked for leaves the rest as holes."""
        with both_lent(self.a, self.b, self.asked.device):
            self.similarity = self._similarity()
            with interruption.ending("stitching"):
                self._stitched()
        found, each = self._stored(), self.asked.each
        for one in self.made:
            one.transformation.to(device_of(self.b))
            if each is not None:
                each(one)
        return found

    def _stored(self) -> Comparison:
        found = self._so_far()
        self.keeping.store(self.names, found)
        return found

    def _stitched(self) -> None:
        work = [(pair, way) for pair in self.joints.joinable for way in self.asked.ways]
        if self.asked.each is None:  # who wants to see each stitch gets all of them
            work = [(pair, way) for pair, way in work if not self.ledger.knows(pair, way.id)]
        if not work:
            return
        self._stored()
        pairs, asked = list(dict.fromkeys(pair for pair, _ in work)), self.asked
        fit = fitted(self.a, self.b, pairs, asked.data, examples=asked.examples, resize=asked.resize, names=self.names)
        self.fitted = fit.examples
        made = {(pair, way): one for pair, way in work if (one := self._started(fit, pair, way)) is not None}
        self._judged([(key, one) for key, one in made.items() if key[1].training is None])
        longer = [(key, one) for key, one in made.items() if key[1].training is not None]
        for key, one in reported(longer, "on the task loss", "stitches"):
            self._trained(key, one)

    def _started(self, fit: Fit, pair: Pair, way: Way) -> Stitch | None:
        """Return the stitch of a pair by a method, before any training; None where there is no map."""
        cuts, seed = self.joints.cuts[pair[1]], self.asked.seed
        try:
            with _carried(self.few):
                one = started(self.a, self.b, fit, pair, way, cuts=cuts, names=self.names, seed=seed)
        except (NoValue, ValueFault) as reason:  # a layer that does not vary; a rank above the width
            self.ledger.refuse(pair, way.id, str(reason))
            return None
        self.cut[pair[1]] = one.network.tail.how
        return one

    def _judged(self, made: Sequence[tuple[Work, Stitch]]) -> None:
        """Evaluate stitches together, as many as memory allows in one pass over the test data."""
        for some in _portions(made):
            networks = [one.network for _, one in some]
            try:
                found: Sequence[Evaluation | None] = evaluated_all(networks, *self.asked.judging, name=self.names[0])
            except (ForwardError, ValueFault):  # one gives NaN: which one shows when each has its own pass
                found = [None] * len(networks)
            for (key, one), evaluation in zip(some, found, strict=True):
                self._note(key, one, evaluation)
            self._stored()

    def _note(self, key: Work, one: Stitch, evaluation: Evaluation | None = None) -> None:
        pair, way = key
        try:
            evaluation = evaluation or evaluated(one.network, *self.asked.judging, name=self.names[0])
        except (ForwardError, ValueFault) as reason:
            self.ledger.refuse(pair, way.id, str(reason))
            return
        self.ledger.note(pair, way.id, evaluation)
        self.doubts |= {evaluation.doubt: None} if evaluation.doubt else {}
        if self.asked.each is not None:
            self.made.append(replace(one, evaluation=evaluation))

    def _trained(self, key: Work, one: Stitch) -> None:
        asked, (pair, way) = self.asked, key
        assert way.training is not None
        try:
            done = trained_stitch(one, asked.data, way.training, validation=asked.validation, examples=asked.examples)
        except (ForwardError, ShapeError) as reason:  # it came to NaN, or no gradient comes back
            self.ledger.refuse(pair, way.id, str(reason))
        else:
            self._note(key, done)
        self._stored()

    def _similarity(self) -> Comparison:
        """Return the comparison of the same pairs of layers on the test data."""
        asked, (ours, theirs) = self.asked, self.joints.layers
        data, examples = asked.judging
        shape, resize = self.joints.shape if asked.shape is None else (asked.shape, None)
        layers: Any = {"a": ours, "b": theirs} if self.a is not self.b else list(dict.fromkeys((*ours, *theirs)))
        return compare(
            self.a, self.b, data, asked.measures, layers=layers, pairs=list(self.joints.wanted), examples=examples,
            shape=shape, resize=resize, seed=asked.seed, names=self.names,
        )  # fmt: skip

    def _so_far(self) -> Comparison:
        similar, layers, stitches = self.similarity, self.joints.layers, self.ledger.tables()
        tables = {name: among(table, layers) for name, table in similar.tables.items()}
        done = all(self.ledger.knows(pair, way.id) for pair in self.joints.wanted for way in self.asked.ways)
        said = [*similar.warnings, *self.doubts, *contrasts(list(tables.values()), stitches), *_counted(self.few)]
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
            data=name_of(self.asked.judging[0]),
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


@contextmanager
def _carried(said: list[str]) -> Iterator[None]:
    """Note what warns of numbers easily misread inside the `with`: the comparison tells it. Other warnings go on."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", InflatedWarning)
        yield
    for one in heard:
        if issubclass(one.category, InflatedWarning):
            said.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _counted(said: Sequence[str]) -> list[str]:
    """Return the first of sentences that say the same of several stitches, with their number."""
    return [said[0] + (f" This holds for {len(said):,} stitches." if len(said) > 1 else "")] if said else []


def _portions(made: Sequence[tuple[Work, Stitch]]) -> Iterator[list[tuple[Work, Stitch]]]:
    """Yield stitches, as many at a time as have room for what their evaluation keeps."""
    some: list[tuple[Work, Stitch]] = []
    limit, size = free_memory() // 4, 0
    for key, one in made:
        own = NUMBERS * 8 * one.transformation.meeting.b.width**2
        if some and size + own > limit:
            yield some
            some, size = [], 0
        some.append((key, one))
        size += own
    if some:
        yield some
