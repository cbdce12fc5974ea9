"""The public calls: `stitch`, `fit_all`, and sweeps of one or many pairs of models as one job.

All take the same steps: pairs of layers are checked on a few examples, one pass over the data gives the sums, direct
methods compute their maps from them, and trained methods start from such a map.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from netkin import files
from netkin.applications.stitching.direct import find
from netkin.applications.stitching.ends import Pair
from netkin.applications.stitching.evaluating import evaluate_all, warn_of_doubt
from netkin.applications.stitching.fitting import fit_by_pass, fit_saved, lend_both, train_stitch
from netkin.applications.stitching.joints import FEW, joints
from netkin.applications.stitching.network import Stitch
from netkin.applications.stitching.stitch_scores import USUAL, known_scores
from netkin.applications.stitching.sweep import Asked, Saved, Sweep
from netkin.applications.stitching.task_loss import How, Way, as_list, find_way, find_ways
from netkin.comparing.feed import data_name
from netkin.errors import FileFault, UnknownName, ValueFault, also_called, did_you_mean
from netkin.identity import described_call, weights_digest
from netkin.jobs import Job
from netkin.progress import Interruption, ProgressOption, reported, showing
from netkin.representations.guests import random_states_kept
from netkin.representations.inputs import device_of, watched
from netkin.representations.layers import unwrapped
from netkin.results import Comparison, Comparisons
from netkin.sources.names import by_name


@by_name(models="a b", data="data test")
def stitch(
    a: nn.Module,
    layer_a: str,
    b: nn.Module,
    layer_b: str,
    data: Any = None,
    how: How = "least_squares",
    test: Any = None,
    *,
    examples: int | None = None,
    resize: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    names: tuple[str, str] = ("a", "b"),
    validation: Any = None,
    statistics: Saved = None,
    progress: ProgressOption = None,
    **training: Any,
) -> Stitch:
    """Return a network that runs `a` up to `layer_a`, maps its activations, and continues with `b` after `layer_b`.

    Args:
        a: the first model.
        layer_a: its layer.
        b: the second model.
        layer_b: its layer.
        data: the examples from which the map is found.
        how: a direct method: `least_squares`, `ridge(alpha=1.0)`, `procrustes`, `reduced_rank(k=8)`,
            `lasso(alpha=0.01)`, `permutation`, `identity` or `random`; or `task_loss`, which trains the map, also as a
            `TaskLoss`.
        test: the examples on which the stitch is evaluated at once.
        examples: how many examples of `data` are read.
        resize: how maps get another size; by default `average` where they shrink, else `bilinear`.
        device: where the models run meanwhile.
        seed: seed for random maps and for training.
        names: what the result calls the two models.
        validation: the examples on which a training is evaluated meanwhile; by default part of `data`.
        statistics: what `nk.collect` returned for the same models, or its file, from which a direct method then reads
            its map: of `data`, or without them of `test`, a few examples are tried out, and no more is read.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        training: options of `TaskLoss`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> inputs = torch.eye(4).repeat(10, 1) + torch.arange(40).unsqueeze(1) / 40
        >>> batches = [(inputs, model(inputs).argmax(1))]
        >>> round(stitch(model, "1", model, "1", batches, test=batches).relative_accuracy, 3)
        1.0
    """
    way, pair = find_way(how, seed, training), (layer_a, layer_b)
    call = described_call(
        "nk.stitch", a=unwrapped(a), layer_a=layer_a, b=unwrapped(b), layer_b=layer_b, data=data_name(data), how=way.id,
        examples=examples, resize=resize, seed=seed,
    )  # fmt: skip
    if way.training is not None and isinstance(data, Iterator):
        raise ValueFault(
            "`data` is an iterator, which gives its batches once, and a training reads them several times; pass a "
            "loader or a list."
        )
    asked = Asked(
        ways=(way,), data=data, test=test, pairs=[pair], examples=examples, resize=resize, seed=seed, saved=statistics
    )  # fmt: skip
    with showing(progress), lend_both(a, b, device), random_states_kept(a, b, data=[data, test, validation]):
        one = _make_stitches(a, b, asked, names, call)[pair, way]
        if way.training is not None:
            one = train_stitch(one, data, way.training, validation=validation, examples=examples)
        if test is not None:
            one = replace(one, evaluation=one.evaluate(test))
    one.transformation.to(device_of(b))
    return one


def fit_all(
    a: nn.Module,
    b: nn.Module,
    pairs: Sequence[Pair],
    data: Any = None,
    hows: Sequence[str] = ("least_squares",),
    test: Any = None,
    *,
    examples: int | None = None,
    resize: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    names: tuple[str, str] = ("a", "b"),
    statistics: Saved = None,
) -> dict[tuple[Pair, str], Stitch]:
    """Return the stitches of many pairs of layers by direct methods, by ``(layer_a, layer_b), how``, from one pass.

    Args:
        a: the first model.
        b: the second model.
        pairs: a layer of the first and one of the second, for each stitch.
        data: the examples from which the maps are found.
        hows: direct methods as in `stitch`.
        test: the examples on which all stitches are evaluated, in one more pass.
        examples: how many examples of `data` are read.
        resize: how maps get another size.
        device: where the models run meanwhile.
        seed: seed for random maps.
        names: what the results call the two models.
        statistics: what `nk.collect` returned, or its file, read in place of a pass over `data`, as in `stitch`.
    """
    ways = {str(how): find_way(how, seed) for how in as_list(hows)}
    of: dict[str, Any] = {"a": unwrapped(a), "b": unwrapped(b), "pairs": list(pairs), "data": data_name(data)}
    given: dict[str, Any] = {"examples": examples, "resize": resize, "seed": seed}
    call = described_call("fit_all", **of, hows=list(ways), **given)
    for how in ways:
        find(how)  # refuses a training
    asked = Asked(ways=tuple(ways.values()), data=data, test=test, pairs=pairs, saved=statistics, **given)
    with lend_both(a, b, device), random_states_kept(a, b, data=[data, test]):
        found = _make_stitches(a, b, asked, names, call)
        made = {(pair, how): found[pair, way] for pair in dict.fromkeys(pairs) for how, way in ways.items()}
        if test is not None:
            judged = evaluate_all([one.network for one in made.values()], test, name=names[0])
            made = {key: replace(one, evaluation=e) for (key, one), e in zip(made.items(), judged, strict=True)}
            warn_of_doubt(judged[0])  # of the second model, which is the same in all
    for one in made.values():
        one.transformation.to(device_of(b))
    return made


def _make_stitches(
    a: nn.Module, b: nn.Module, asked: Asked, names: tuple[str, str], call: str
) -> dict[tuple[Pair, Way], Stitch]:
    """Return the stitches of pairs of layers, before any training; a pair that can't be joined is refused."""
    if isinstance(names, str) or len(names) != 2:
        raise ValueFault(f"`names` must be two, one for each model, such as ('old', 'new'); got {names!r}.")
    if not asked.pairs:
        raise ValueFault("no pairs of layers to stitch were given.")
    data, examples = asked.tried
    few = asked.statistics is not None or all(way.is_blind for way in asked.ways)
    batches = watched(data, FEW if few else examples, "fitting")
    first = next(batches)
    found = joints(a, b, first, pairs=asked.pairs, resize=asked.resize, names=names)
    found.refuse()
    if asked.statistics is None:
        fit = fit_by_pass(a, b, chain([first], batches), found, names)
    else:
        fit = fit_saved(asked.statistics, a, b, found, names)
        fit.joints.refuse()
    origin = {"call": call, "weights a": weights_digest(a), "weights b": weights_digest(b)}
    return {(pair, way): fit.stitch(pair, way, asked.seed, origin) for pair in found.meetings for way in asked.ways}


@also_called(measures="measure")
@by_name(models="a b", data="data test")
def stitch_all(
    a: nn.Module,
    b: nn.Module,
    data: Any = None,
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
    statistics: Saved = None,
    progress: ProgressOption = None,
) -> Comparison:
    """Return scores of stitches of layers of `a` into layers of `b`, together with the similarity of these layers.

    Tables such as ``relative_accuracy(how=least_squares)`` and those of `measures` are in one comparison, and its
    warnings name the layers where the two disagree. Pairs that can't be joined are holes with their reason.

    Args:
        a: the first model.
        b: the second model.
        data: the examples from which the maps are found.
        test: the examples on which they are evaluated; by default `data`.
        hows: one method or several, as in `nk.stitch`; options of a training as ``"task_loss(epochs=3)"``.
        pairs: "corresponding", "all" (every layer into every layer) or a list of (layer, layer).
        layers: which layers (see `nk.layers`), for both models or by "a" and "b".
        measures: similarities of the same layers, tabulated too.
        scores: which numbers of an evaluation.
        shape: what one example is for the similarities; by default a place, as for stitches.
        resize: how maps get another size.
        examples: how many examples of `data` are read.
        test_examples: how many of `test`.
        validation: the examples on which a training is evaluated meanwhile.
        device: where the models run meanwhile.
        seed: seed for random maps and for training.
        save: the file that grows with the result. The same call continues there, also after the process was killed, and
            with more methods or layers; what is finished lies in a folder beside it (see `netkin.jobs`).
        overwrite: whether something else in the file is deleted, and the work starts again.
        partial: whether Ctrl-C returns what is finished.
        each: a function that is called with every `Stitch`.
        names: what the result calls the two models.
        statistics: what `nk.collect` returned for the same models, or its file, from which direct methods read their
            maps without running the models on `data`, which may then be left out.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> inputs = torch.eye(4).repeat(10, 1) + torch.arange(40).unsqueeze(1) / 40
        >>> batches = [(inputs, model(inputs).argmax(1))]
        >>> found = stitch_all(model, model, batches, batches, ["least_squares", "random"])
        >>> round(found["relative_accuracy(how=least_squares)"]["1", "1"], 3)
        1.0
    """
    asked = _request(
        data, test, hows, scores=scores, seed=seed, measures=measures, layers=layers, pairs=pairs, shape=shape,
        resize=resize, examples=examples, test_examples=test_examples, validation=validation, device=device, each=each,
        saved=statistics,
    )  # fmt: skip
    with showing(progress):
        call = _describe_call("nk.stitch_all", asked, a=unwrapped(a), b=unwrapped(b))
        (found,) = _run_sweeps(
            {(names[0], names[1]): (a, b)}, asked, _Results(save, overwrite, several=False), partial, call
        )
    return found


@also_called(measures="measure")
@by_name(models="models", data="data test")
def stitch_many(
    models: Mapping[str, nn.Module] | Sequence[nn.Module],
    data: Any,
    test: Any = None,
    hows: How | Sequence[How] = ("least_squares",),
    *,
    save: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    partial: bool = False,
    progress: ProgressOption = None,
    **options: Any,
) -> Comparisons:
    """Return the sweeps of all ordered pairs of several models; `spread()` of them has the means over the pairs.

    Args:
        models: a mapping from names to models, or a list, whose names are then 0, 1, 2, ...
        data: the examples from which the maps are found.
        test: the examples on which they are evaluated.
        hows: one method or several.
        save: the file that grows with the result, and in which the same call continues.
        overwrite: whether something else in the file is deleted, and the work starts again.
        partial: whether Ctrl-C returns what is finished.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        options: those of `stitch_all`: `pairs`, `layers`, `measures`, `scores`, `shape`, `resize`, `examples`,
            `test_examples`, `validation`, `device`, `seed` and `each`.
    """
    given = dict(models) if isinstance(models, Mapping) else {str(i): model for i, model in enumerate(models)}
    if len(given) < 2:
        raise ValueFault(f"`stitch_many` needs at least two models; got {len(given)}.")
    asked = _request(data, test, hows, **options)
    pairs_of_models = {(x, y): (given[x], given[y]) for x, y in permutations(given, 2)}
    call = _describe_call("nk.stitch_many", asked, models=list(given))
    with showing(progress):
        return Comparisons(_run_sweeps(pairs_of_models, asked, _Results(save, overwrite, several=True), partial, call))


def _request(
    data: Any, test: Any, hows: How | Sequence[How], *, scores: Any = USUAL, seed: int = 0, **options: Any
) -> Asked:
    known = [field.name for field in fields(Asked)]
    for name in options:
        if name not in known:
            raise UnknownName(f"a sweep has no option {name!r}{did_you_mean(name, known) or '; see `nk.stitch_all`.'}")
    ways, wanted = find_ways(hows, seed), known_scores(scores)
    asked = Asked(ways=ways, scores=wanted, data=data, test=test, seed=seed, **options)
    asked.refuse_iterators()
    return asked


def _describe_call(name: str, asked: Asked, **models: Any) -> str:
    """Return the command or the call that requests a sweep."""
    options = {key: getattr(asked, key) for key in ("pairs", "layers", "measures", "scores", "shape", "resize", "seed")}
    counts = {"examples": asked.examples, "test_examples": asked.test_examples}
    test, hows = None if asked.test is None else data_name(asked.test), [way.id for way in asked.ways]
    return described_call(name, **models, data=data_name(asked.data), test=test, hows=hows, **options, **counts)


class _Results:
    """The file in which sweeps grow, beside their job; without a path, none. That of `several` pairs holds all of them.

    Numbers in it that are not requested would be lost, and are a reason to refuse.
    """

    def __init__(self, path: str | os.PathLike[str] | None, overwrite: bool, *, several: bool):
        self.path, self.overwrite, self.several = path, overwrite, several
        files.refuse_output(path, "comparisons" if several else "comparison", overwrite=overwrite)
        self.found: dict[Pair, Comparison] = {}

    def load(self, sweeps: Sequence[Sweep]) -> None:
        """Take over what the file holds, if there is one and all of it is requested again."""
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


def _run_sweeps(
    models: Mapping[Pair, tuple[nn.Module, nn.Module]], asked: Asked, results: _Results, partial: bool, call: str
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
    every = [one for names, pair in models.items() for one in zip(names, pair, strict=True)]
    named = {name: weights[id(model)] for name, model in every}
    (first, a), (second, b) = every[:2]
    two = {"names": f"{first} into {second}", "weights a": weights[id(a)], "weights b": weights[id(b)]}
    digests = {key: text for key, text in asked.digests.items() if key != "batches"}
    return digests | asked.settings | ({"weights": named} if several else two)
