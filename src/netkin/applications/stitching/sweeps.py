"""Sweeps of one or many pairs of models, as one job: `stitch_all` and `stitch_many`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from netkin import files
from netkin.applications.stitching.asking import Asked, How, asked_ways
from netkin.applications.stitching.joints import Pair
from netkin.applications.stitching.stitches import Stitch
from netkin.applications.stitching.sweep import Sweep
from netkin.applications.stitching.worth import USUAL, known_scores
from netkin.comparing.interrupting import Interruption
from netkin.comparing.request import name_of
from netkin.errors import FileFault, ValueFault
from netkin.identity import described_call, weights_digest
from netkin.jobs import Job
from netkin.progress import ProgressOption, reported, showing
from netkin.representations.guests import random_states_kept
from netkin.representations.layers import unwrapped
from netkin.results import Comparison, Comparisons
from netkin.sources.names import by_name


@by_name(models="a b", data="data test")
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
    overwrite: bool = False,
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

    With `save` the result is written to that file as it grows, and the same call continues there, also after the
    process was killed, and with more methods or layers: what is finished lies beside the file, in a folder such as
    ``ab.netkin.job`` (see `netkin.jobs`). A file that holds anything else is refused unless `overwrite`. With
    ``partial=True`` Ctrl-C returns what is finished.

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
        overwrite: whether to begin anew where the file holds something else.
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
        call = _called("nk.stitch_all", asked, a=unwrapped(a), b=unwrapped(b))
        (found,) = _swept(
            {(names[0], names[1]): (a, b)}, asked, _Results(save, overwrite, several=False), partial, call
        )
    return found


@by_name(models="models", data="data test")
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
    overwrite: bool = False,
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
        overwrite: whether to begin anew where the file holds something else.
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
    pairs_of_models = {(x, y): (given[x], given[y]) for x, y in permutations(given, 2)}
    call = _called("nk.stitch_many", asked, models=list(given))
    with showing(progress):
        return Comparisons(_swept(pairs_of_models, asked, _Results(save, overwrite, several=True), partial, call))


def _called(name: str, asked: Asked, **models: Any) -> str:
    """Return the command or the call that asks for a sweep."""
    options = {key: getattr(asked, key) for key in ("pairs", "layers", "measures", "scores", "shape", "resize", "seed")}
    counts = {"examples": asked.examples, "test_examples": asked.test_examples}
    test, hows = None if asked.test is None else name_of(asked.test), [way.id for way in asked.ways]
    return described_call(name, **models, data=name_of(asked.data), test=test, hows=hows, **options, **counts)


class _Results:
    """The file in which sweeps grow, beside their job; without a path, none. That of `several` pairs holds all of them.

    Numbers in it that are not asked for would be lost, and are a reason to refuse.
    """

    def __init__(self, path: str | os.PathLike[str] | None, overwrite: bool, *, several: bool):
        self.path, self.overwrite, self.several = path, overwrite, several
        files.refuse_output(path, "comparisons" if several else "comparison", overwrite=overwrite)
        self.found: dict[Pair, Comparison] = {}

    def load(self, sweeps: Sequence[Sweep]) -> None:
        """Take over what the file holds, if there is one and all of it is asked for again."""
        if self.path is None or self.overwrite or not Path(self.path).exists():
            return
        held = Comparisons.load(self.path) if self.several else Comparisons([Comparison.load(self.path)])
        asked = {sweep.names: sweep for sweep in sweeps}
        for (a, b), one in held.items():
            lost = asked[a, b].ledger().lost(one) if (a, b) in asked else f"a sweep of {a!r} into {b!r}"
            if lost:
                raise FileFault(
                    f"{os.fspath(self.path)!r} holds {lost}, which is not asked for and would be lost; ask for it too, "
                    "or give another file or delete it."
                )
        self.found = dict(held)

    def store(self, names: Pair, found: Comparison) -> None:
        """Take what is known of a pair of models by now."""
        self.found[names] = found
        if self.path is not None:
            (Comparisons(self.found) if self.several else found).save(self.path)


def _swept(
    models: Mapping[Pair, tuple[nn.Module, nn.Module]],
    asked: Asked,
    results: _Results,
    partial: bool,
    call: str,
) -> list[Comparison]:
    """Return the sweeps of pairs of models, one after the other, as one job."""
    every = {id(model): model for pair in models.values() for model in pair}
    weights = {key: weights_digest(model) for key, model in every.items()}
    interruption, done = Interruption(partial), list[Comparison]()
    with random_states_kept(*every.values(), data=[asked.data, asked.test, asked.validation]):
        identity = {} if results.path is None else _identity(models, weights, asked, results.several)
        job = Job.beside(results.path, "sweep", identity, call=call, overwrite=results.overwrite)
        sweeps = []
        for names, (a, b) in models.items():
            own = {"weights a": weights[id(a)], "weights b": weights[id(b)]}
            sweeps.append(Sweep(a, b, names, asked, job, results.store, own))
        results.load(sweeps)
        with job, interruption.ending("touring", lambda: bool(done)):
            job.expect(name for sweep in sweeps for name in sweep.parts)
            for sweep in reported(sweeps, "stitching", "pairs of models") if results.several else sweeps:
                done.append(sweep.run(interruption))
                if interruption.ended:
                    break
    return done


def _identity(
    models: Mapping[Pair, tuple[nn.Module, nn.Module]], weights: Mapping[int, str], asked: Asked, several: bool
) -> dict[str, Any]:
    """Return what all stitches depend on; more models may join a sweep of `several`."""
    named = {
        name: weights[id(model)] for names, pair in models.items() for name, model in zip(names, pair, strict=True)
    }
    (first, second), *_ = models.values()
    two = {
        "names": " into ".join(next(iter(models))),
        "weights a": weights[id(first)],
        "weights b": weights[id(second)],
    }
    digests = {key: text for key, text in asked.digests.items() if key != "batches"}
    return digests | asked.settings | ({"weights": named} if several else two)
