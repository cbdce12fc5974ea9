"""Sweeps: layers of one model stitched into layers of another, by several methods, beside their similarity.

The fitting data are read once for all pairs and direct methods. The test data are read once for the similarities, and
as often as memory requires, usually once, for the evaluation. Training on the task loss starts from the map of the
fitting pass. The scores are tables in the same form as those of similarities. What a sweep would take is its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import permutations, product
from math import isfinite, nan
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from netkin import files
from netkin.applications.stitching.evaluating import MEMORY, SCORES, Evaluation, evaluate_each
from netkin.applications.stitching.fitting import FittedMoments, fit_by_pass, fit_saved
from netkin.applications.stitching.joining import Joints, Pair
from netkin.applications.stitching.network import Stitch
from netkin.applications.stitching.request import (
    FITTED,
    JUDGED,
    SWEEP,
    MethodLike,
    StitchMethod,
    StitchRequest,
    SweepOptions,
    two_models,
)
from netkin.applications.stitching.structure import contrasts
from netkin.applications.stitching.training import train_stitch
from netkin.comparing.compare import compare
from netkin.comparing.comparer import measures_of
from netkin.comparing.feed import data_name
from netkin.comparing.sides import named_models
from netkin.comparing.spec import takes_options
from netkin.comparing.tabulating import INTERRUPTED
from netkin.errors import FileError, ForwardError, InvalidValue, NetkinError, NoValue, ShapeError
from netkin.identity import settings_digest
from netkin.jobs import Job, Part
from netkin.memory import format_bytes, portions_in_memory
from netkin.progress import Interruption, showing, with_progress
from netkin.representations import batches_of
from netkin.representations.inputs import batch_length, device_of, examples_in, reported_batches
from netkin.representations.layers import unwrapped
from netkin.results import Comparison, Comparisons, Values
from netkin.results.caveats import Caveat, grouped
from netkin.results.labels import NOT_ASKED
from netkin.results.records import as_record, packed, unpacked
from netkin.settings import random_states_kept
from netkin.sources.names import by_name
from netkin.training.work_plan import Planning, planned

if TYPE_CHECKING:
    from typing_extensions import Unpack

Work = tuple[Pair, StitchMethod]
Layers = tuple[Sequence[str], Sequence[str]]  # rows and columns of tables
Outcomes = Mapping[tuple[Pair, str], Evaluation | str]  # by layers and method: the scores, or why there are none
FLATTERED = (
    "the stitches are evaluated on the data on which they were fitted, which flatters them; give other data as `test`."
)
UNFINISHED = "interrupted: some stitches were not reached, and have no value."


@planned
@by_name(models="a b", data="data test")
@takes_options(declared=SWEEP)
def stitch_all(
    a: nn.Module,
    b: nn.Module,
    data: Any = None,
    test: Any = None,
    methods: MethodLike | Sequence[MethodLike] = ("least_squares",),
    *,
    names: tuple[str, str] = ("a", "b"),
    **options: Unpack[SweepOptions],
) -> Planning[StitchPlan, Comparison]:
    """Return scores of stitches of layers of `a` into layers of `b`, together with the similarity of these layers.

    Tables such as ``relative_accuracy(method=least_squares)`` and those of `measures` are in one comparison, and its
    warnings name the layers where the two disagree. Pairs that can't be joined are missing with their reason. A saved
    sweep continues with the same call, also with more methods or layers.

    Args:
        a: the first model.
        b: the second model.
        data: the examples from which the maps are found.
        test: the examples on which they are evaluated; by default `data`.
        methods: one method or several, as in `nk.stitch`; options of a training as ``"task_loss(epochs=3)"``.
        names: what the result calls the two models.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> inputs = torch.eye(4).repeat(10, 1) + torch.arange(40).unsqueeze(1) / 40
        >>> batches = [(inputs, model(inputs).argmax(1))]
        >>> found = stitch_all(model, model, batches, batches, ["least_squares", "random"])
        >>> round(found["relative_accuracy(method=least_squares)"]["1", "1"], 3)
        1.0
    """
    request = StitchRequest.of_sweep(two_models(a, b, names), data, test, methods, options)
    call, pair = request.call("nk.stitch_all", a=unwrapped(a), b=unwrapped(b)), (names[0], names[1])
    yield lambda: _plan(request, pair)
    (found,) = _sweeps(request, [pair], call, several=False)
    return found


@by_name(models="models", data="data test")
@takes_options(declared=SWEEP)
def stitch_many(
    models: Mapping[str, nn.Module] | Sequence[nn.Module],
    data: Any = None,
    test: Any = None,
    methods: MethodLike | Sequence[MethodLike] = ("least_squares",),
    **options: Unpack[SweepOptions],
) -> Comparisons:
    """Return the sweeps of all ordered pairs of several models; `spread()` of them has the means over the pairs.

    Args:
        models: a mapping from names to models, or a list, whose names are then 0, 1, 2, ...
        data: the examples from which the maps are found.
        test: the examples on which they are evaluated; by default `data`.
        methods: one method or several, as in `nk.stitch`.
    """
    given = named_models(models)
    if len(given) < 2:
        raise InvalidValue(f"`stitch_many` needs at least two models; got {len(given)}.", argument="models")
    request = StitchRequest.of_sweep(given, data, test, methods, options)
    call = request.call("nk.stitch_many", models=list(given))
    return Comparisons(_sweeps(request, list(permutations(given, 2)), call, several=True))


def _sweeps(request: StitchRequest, pairs: Sequence[Pair], call: str, *, several: bool) -> list[Comparison]:
    """Return the sweeps of pairs of models, one after the other, as one job; the file of `several` holds them all."""
    interruption, done = Interruption(request.partial), list[Comparison]()
    loaders = [request.data, request.test, request.validation]
    with showing(request.progress), random_states_kept(*request.given_models.values(), data=loaders):
        sweeps = [Sweep(request, names, call) for names in pairs]
        found = _held(request, sweeps, several)
        with (
            request.job("sweep", lambda: request.identity, call) as job,
            interruption.ending("stitching", lambda: bool(done)),
        ):

            def store(one: Comparison) -> None:
                found[one.a, one.b] = one
                job.save(lambda: Comparisons(found) if several else one)

            job.expect((one.part(key) for one in sweeps for key in one.work), "stitches")
            for sweep in with_progress(sweeps, "stitching", "pairs of models") if several else sweeps:
                done.append(sweep.run(job, store, interruption))
                if interruption.ended:
                    break
    return done


def _held(request: StitchRequest, sweeps: Sequence[Sweep], several: bool) -> dict[Pair, Comparison]:
    """Return what the file of a sweep holds; numbers in it that are not requested would be lost, and are refused."""
    if request.save is None or request.overwrite or not files.is_filled(request.save):
        return {}
    held = Comparisons.load(request.save) if several else Comparisons([Comparison.load(request.save)])
    asked = {sweep.names: sweep for sweep in sweeps}
    for (a, b), one in held.items():
        lost = asked[a, b].lost_score(one) if (a, b) in asked else f"a sweep of {a!r} into {b!r}"
        if lost:
            raise FileError(
                f"{str(request.save)!r} holds {lost}, which is not asked for and would be lost; ask for it too, or "
                "give another file or delete it.",
                argument="save",
            )
    return dict(held)


@dataclass(frozen=True)
class _Outcome:
    """What became of a stitch: what it is worth, or why there is none."""

    evaluation: Evaluation | None = None
    reason: str = ""
    few: Caveat | None = None  # that it is from too few rows
    cut: str = ""  # how the second model was cut
    fitted: int = 0
    fitting_digest: str = ""

    def judged(self, found: Evaluation | NetkinError) -> _Outcome:
        """Return it with the scores, or with the reason why there are none."""
        return replace(self, reason=str(found)) if isinstance(found, NetkinError) else replace(self, evaluation=found)

    def packed(self) -> dict[str, Any]:
        """Return it for JSON, which has no infinity."""
        judged = None if self.evaluation is None else asdict(self.evaluation)
        numbers = {key: repr(x) if isinstance(x, float) and not isfinite(x) else x for key, x in (judged or {}).items()}
        return {**asdict(self), "evaluation": judged and numbers}

    @classmethod
    def unpacked(cls, part: Part) -> _Outcome:
        """Return what `packed` was made from."""
        found: dict[str, Any] = dict(part.values["evaluation"] or {})
        for key, number in found.items():
            found[key] = float(number) if isinstance(number, str) and key != "digest" else number
        return as_record(cls, {**part.values, "evaluation": found or None})


def joined(request: StitchRequest, names: Pair) -> tuple[Joints, FittedMoments | None]:
    """Return which layers of two models are stitched, and the fit from saved statistics where these are given."""
    with request.lending(*(request.given_models[name] for name in names), data=(request.validation,)):
        found = request.joints(names)
    if not request.saved:
        return found, None
    fit = fit_saved(request.saved, found, [request.weights[name] for name in names])
    return fit.joints, fit


class Sweep:
    """One model stitched into another."""

    def __init__(self, request: StitchRequest, names: Pair, call: str):
        self.request, self.names, self.call = request, names, call
        self.a, self.b = (request.given_models[name] for name in names)
        self.origin = {
            "call": call,
            **{f"weights {side}": request.weights[one] for side, one in zip("ab", names, strict=True)},
        }
        self.joints, self.saved = joined(request, names)
        self.statistics = None if self.saved is None else self.saved.statistics
        self.work: list[Work] = [(pair, method) for pair in self.joints.adapters for method in request.methods]
        self.outcomes: dict[Work, _Outcome | None] = dict.fromkeys(self.work)  # None: not yet
        self.made: list[Stitch] = []

    def run(self, job: Job, store: Callable[[Comparison], None], interruption: Interruption) -> Comparison:
        """Return the comparison; an interruption that was requested leaves the rest without values.

        What is finished is kept in the job, and `store` receives the results so far.
        """
        self.job, self.store = job, store
        for key in self.work:
            self.outcomes[key] = job.recall(self.part(key), _Outcome.unpacked)
        with self.request.lending(self.a, self.b):
            self.similarity = self._similarity()
            with interruption.ending("stitching"):
                self._stitch()
        store(found := self._so_far())
        for one in self.made:
            one.transformation.to(device_of(self.b))
            if self.request.each is not None:
                self.request.each(one)
        return found

    @property
    def tables(self) -> dict[str, Values]:
        """The scores of all stitches so far, as tables."""
        methods, refused = [method.id for method in self.request.methods], self.joints.refused
        found: dict[tuple[Pair, str], Evaluation | str] = {
            (pair, method): str(refused[pair]) for pair in refused for method in methods
        }
        known = {
            (pair, method.id): one.evaluation or one.reason for (pair, method), one in self.outcomes.items() if one
        }
        return score_tables(self.joints.layers, self.joints.wanted, methods, self.request.scores, found | known)

    def lost_score(self, earlier: Comparison) -> str:
        """Return one of the scores of an earlier sweep that is not requested now; empty without any."""
        wanted, tables = set(self.joints.wanted), self.tables
        for name, table in earlier.tables.items():
            for i, j in np.argwhere(np.isfinite(table.values)) if "method" in table.quantity.parameters else ():
                pair = table.layers_a[i], table.layers_b[j]
                if name not in tables or pair not in wanted:
                    return f"{name} of {pair[0]!r} into {pair[1]!r}"
        return ""

    def part(self, key: Work) -> str:
        """Return the name of the part of the job that holds a stitch."""
        (x, y), method = key
        # what is trained depends on its batches, too; without a file nothing is continued, and they need not be counted
        batches = f", {self.request.digests['batches']}" if method.training and self.request.save else ""
        return f"{self.names[0]} into {self.names[1]}: {x!r} into {y!r} by {method.identity}{batches}"

    def _stitch(self) -> None:
        # a caller that receives each stitch gets all of them
        work = [key for key in self.work if self.request.each is not None or self.outcomes[key] is None]
        if not work:
            return
        self.store(self._so_far())
        fit = self.saved or fit_by_pass(
            reported_batches(self.request.data, self.request.examples, "fitting"), self.joints
        )
        made = [(key, *found) for key in work if (found := self._start(fit, *key)) is not None]
        self._evaluate([one for one in made if one[0][1].training is None])
        longer = [one for one in made if one[0][1].training is not None]
        for key, one, known in with_progress(longer, "on the task loss", "stitches"):
            self.job.check()
            self._train(key, one, known)

    def _start(self, fit: FittedMoments, pair: Pair, method: StitchMethod) -> tuple[Stitch, _Outcome] | None:
        """Return the stitch of a pair by a method, before any training; None where there is no map."""
        try:
            one = fit.stitch(pair, method, self.request.seed, self.origin)
        except (NoValue, InvalidValue) as reason:  # a layer that does not vary; a rank above the width
            self._keep((pair, method), _Outcome(reason=str(reason)))
            return None
        few = fit.few_rows(pair, method.start)
        return one, _Outcome(None, "", few, one.network.tail.cut_words, fit.examples, fit.digest)

    def _evaluate(self, made: Sequence[tuple[Work, Stitch, _Outcome]]) -> None:
        """Evaluate stitches together, as many as memory allows in one pass over the test data."""
        for portion in portions_in_memory([MEMORY * one.transformation.adapter.b.width**2 for _, one, _ in made]):
            some = made[portion]
            self.job.check()
            begun = perf_counter()
            try:
                found = evaluate_each([one.network for _, one, _ in some], *self.request.judging, name=self.names[0])
            except (ForwardError, InvalidValue) as fault:  # of the models themselves, or of the data
                found = [fault] * len(some)
            each = (perf_counter() - begun) / len(some)
            for (key, one, known), evaluation in zip(some, found, strict=True):
                self._keep(key, known.judged(evaluation), one, each)
            self.store(self._so_far())

    def _keep(self, key: Work, outcome: _Outcome, one: Stitch | None = None, seconds: float | None = None) -> None:
        self.outcomes[key] = outcome
        self.job.keep(self.part(key), outcome.packed(), seconds=seconds)
        if one is not None and outcome.evaluation is not None and self.request.each is not None:
            self.made.append(replace(one, evaluation=outcome.evaluation))

    def _train(self, key: Work, one: Stitch, known: _Outcome) -> None:
        request, settings, standing = self.request, key[1].training, f"{self.part(key)}: standing"
        assert settings is not None
        begun, place = perf_counter(), None if self.job.folder is None else (self.job, standing)
        found: Evaluation | NetkinError
        try:
            one = train_stitch(one, request.data, settings, request.validation, request.examples, place)
            (found,) = evaluate_each([one.network], *request.judging, name=self.names[0])
        except (ForwardError, ShapeError, InvalidValue) as reason:  # it came to NaN, or no gradient comes back
            found = reason
        self._keep(key, known.judged(found), one, perf_counter() - begun)
        self.job.drop(standing)
        self.store(self._so_far())

    @cached_property
    def _options(self) -> dict[str, Any]:
        """The arguments of `compare` other than models, data and names."""
        request, (ours, theirs) = self.request, self.joints.layers
        shape, resize = self.joints.shape if request.shape is None else (request.shape, None)
        layers: Any = {"a": ours, "b": theirs} if self.a is not self.b else list(dict.fromkeys((*ours, *theirs)))
        pairs = list(self.joints.wanted)
        return {"layers": layers, "pairs": pairs, "shape": shape, "resize": resize, "seed": request.seed}

    @cached_property
    def similarity_part(self) -> str:
        """The name of the part of the job that holds the similarities."""
        measures = [(measure.id, measure.function) for measure in measures_of(self.request.measures)]
        settings = settings_digest({"measures": measures, **self._options})
        return f"{self.names[0]} into {self.names[1]}: similarity {settings}"

    def _similarity(self) -> Comparison:
        """Return the comparison of the same pairs of layers on the test data."""
        known = self.job.recall(self.similarity_part, lambda part: unpacked(Comparison, part.values, part.arrays))
        if known is not None:
            return known
        data, examples = self.request.judging
        options = self._options | {"examples": examples, "names": self.names}
        found = compare(self.a, self.b, data, self.request.measures, **options)
        self.job.keep(self.similarity_part, *packed(found))
        return found

    def _so_far(self) -> Comparison:
        similar, layers, stitches = self.similarity, self.joints.layers, self.tables
        tables = dict[str, Values]()
        for name, one in similar.tables.items():  # with the rows and columns of the sweep
            known = dict(zip(product(one.layers_a, one.layers_b), one.values.flat, strict=True))
            tables[name] = replace(one, **_cells(layers, known | dict(one.missing)))
        outcomes = [one for one in self.outcomes.values() if one is not None]
        doubts = [one.evaluation.doubt for one in outcomes if one.evaluation]
        done = len(outcomes) == len(self.work)
        said = [Caveat("no-better-than-chance", doubt) for doubt in dict.fromkeys(filter(None, doubts))]
        said = [*similar.caveats, *said, *contrasts(list(tables.values()), stitches)]
        said += grouped((one.few for one in outcomes if one.few is not None), "stitches")
        if self.statistics is not None:
            said += [Caveat("missing-parts", self.statistics.missing)] if self.statistics.missing else []
            same = similar.provenance.get("data digest") == self.statistics.digest.hex
        else:
            judged = ((one.evaluation.digest, one.fitting_digest) for one in outcomes if one.evaluation)
            same = self.request.test is None or any(digest == fitted for digest, fitted in judged)
        overlap = FLATTERED if same else self.request.overlap
        said += [Caveat("fitted-on-test", overlap)] if overlap else []
        said += [Caveat("interrupted", UNFINISHED)] * (not done)
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
            data=data_name(self.request.judging[0]),
            examples=similar.examples,
            seed=self.request.seed,
            version=similar.version,
            caveats=tuple(said),
            provenance=self._provenance(outcomes),
            complete=done,
        )

    def _provenance(self, outcomes: Sequence[_Outcome]) -> dict[str, str]:
        request, fits = self.request, [one.fitted for one in outcomes if one.fitted]
        data = data_name(request.data) if self.statistics is None else f"statistics of {self.statistics.record.data}"
        fitting = {"fitted on": data, "fitting examples": f"{fits[0]:,}"} if fits else {}
        cut = {y: one.cut for ((_, y), _), one in self.outcomes.items() if one is not None and one.cut}
        words = {f"cut after {layer!r}": f"first model stopped, second {cut_words}" for layer, cut_words in cut.items()}
        which = request.pairs if isinstance(request.pairs, str) else f"{len(self.joints.wanted):,} listed"
        resize = request.resize or "average where maps shrink, bilinear where they grow"
        own = {"call": self.call, "pairs": which, "resize of stitches": resize}
        losses = {f"loss of {method.id}": method.identity for method in request.methods if method.identity != method.id}
        known = {f"asked {key}": value for key, value in request.settings.items()}
        if request.save is not None:  # the digests as the data were read for the job, or else by the passes
            known |= {key: text for key, text in request.digests.items() if key != "batches"}
        else:
            fitted = next((one.fitting_digest for one in outcomes if one.fitting_digest), "")
            judged = next((one.evaluation.digest for one in outcomes if one.evaluation), "")
            known |= {key: text for key, text in ((FITTED, fitted), (JUDGED, judged)) if text}
        return {**self.similarity.provenance, **own, **fitting, **words, **losses, **known}


def score_tables(
    layers: Layers, wanted: Collection[Pair], methods: Sequence[str], scores: Sequence[str], found: Outcomes
) -> dict[str, Values]:
    """Return a table for each score and method, those of the first score first, of what was `found` or why not."""
    examples = max((one.examples for one in found.values() if isinstance(one, Evaluation)), default=0)
    tables = dict[str, Values]()
    for name, method in product(scores, methods):
        score, values = SCORES[name], dict[Pair, float | str]()
        for pair in wanted:
            one = found.get((pair, method), INTERRUPTED)
            value = score.read(one) if isinstance(one, Evaluation) else None
            reason = score.why_not(one) if isinstance(one, Evaluation) else one
            values[pair] = value if value is not None and isfinite(value) else reason
        tables[f"{name}(method={method})"] = Values(
            quantity=replace(
                score.quantity,
                id=f"{name}(method={method})",
                parameters={"method": method},
                convention=f"{score.quantity.convention}; stitched by {method}",
            ),
            statistic="Moments" if name.startswith("stitched") or name == "r2" else "Outputs",
            exactness=f"on {examples:,} test examples",
            **_cells(layers, values),
        )
    return tables


def _cells(layers: Layers, found: Mapping[Pair, float | str]) -> dict[str, Any]:
    """Return rows, columns and values of a table, and why some are missing, from the value or reason of each pair."""
    cells = {pair: found.get(pair, NOT_ASKED) for pair in product(*layers)}
    values = np.array([nan if isinstance(one, str) else one for one in cells.values()], dtype=float)
    missing = {pair: one for pair, one in cells.items() if isinstance(one, str)}
    ours, theirs = map(tuple, layers)
    return {"layers_a": ours, "layers_b": theirs, "values": values.reshape(len(ours), len(theirs)), "missing": missing}


# --- what a sweep would take ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StitchPlan:
    """What a sweep of stitches would do: how many pairs of layers can be joined, and what that takes.

    `refused` has the reason of each pair that can't be joined. `passes` counts the forward passes of both models, one
    for each batch, and `examples` what goes through a model in them; both are None where the length of the data is
    unknown. The few examples that are tried out first, and trainings, do not count. `bytes` is the memory of the sums.
    """

    pairs: int
    joined: int
    refused: Mapping[Pair, str]
    methods: tuple[str, ...]
    passes: int | None
    bytes: int
    lines: tuple[str, ...]
    examples: int | None = None

    def __str__(self) -> str:
        return "\n".join(self.lines)


explain_stitch = stitch_all.explain


def _plan(request: StitchRequest, names: Pair) -> StitchPlan:
    """Return the plan of one sweep, for which a few examples are run."""
    loaders = [request.data, request.test, request.validation]
    with random_states_kept(*request.given_models.values(), data=loaders):
        found, _ = joined(request, names)
    widths = {x: found.widths[0][x] for x, _ in found.adapters}
    products = sum(widths[x] * found.widths[1][y] for x, y in found.adapters)
    taken = 0 if request.saved else 8 * (sum(width**2 for width in widths.values()) + products)
    runs = _runs(request, found)
    with random_states_kept(data=loaders):
        counts = [_counts(*given, times) for given, times in zip((request.tried, request.judging), runs, strict=True)]
    passes, examples = (None if None in both else sum(both) for both in zip(*counts, strict=True))
    refused = {pair: str(reason) for pair, reason in found.refused.items()}
    facts = (
        len(found.wanted),
        len(found.adapters),
        refused,
        tuple(method.id for method in request.methods),
        passes,
        taken,
    )
    plan = StitchPlan(*facts, (), examples)
    return replace(plan, lines=tuple(_plan_lines(plan, found, request, runs)))


def _runs(request: StitchRequest, found: Joints) -> tuple[int, int]:
    """Return how often the two models run on each batch: of the data to fit on, and of those to evaluate on."""
    stitches = [(y, method.training is None) for _, y in found.adapters for method in request.methods]
    portions = portions_in_memory([MEMORY * found.widths[1][y] ** 2 for y, direct in stitches if direct])
    trained = sum(not direct for _, direct in stitches)  # each is evaluated by itself
    whole = sum(not found.cuts[y] for y, _ in stitches)  # a second model that can't be cut runs for each stitch
    similarities = 1 if found.models[0] is found.models[1] else 2
    fitting = 0 if request.saved or not found.adapters else 2
    return fitting, similarities + 2 * (len(portions) + trained) + whole


def _counts(data: Any, examples: int | None, times: int) -> tuple[int | None, int | None]:
    """Return the forward passes, and the examples in them, if the models run so many times on each batch."""
    count = examples_in(data, examples) if times else 0
    if not count:
        return count, count
    return times * -(-count // batch_length(next(batches_of(data, examples)))), times * count


def _plan_lines(plan: StitchPlan, found: Joints, request: StitchRequest, runs: tuple[int, int]) -> Iterator[str]:
    a, b = found.names
    yield f"stitches of {a!r} into {b!r}: {plan.joined:,} of {plan.pairs:,} pairs of layers can be joined"
    for reason, count in Counter(plan.refused.values()).most_common():
        yield f"  {count:,} can't be joined: {reason}"
    resized = Counter(adapter.words for adapter in found.adapters.values() if adapter.words)
    yield from (f"  {count:,} brought into another form: {words}" for words, count in resized.most_common())
    whole = [layer for layer, cut in found.cuts.items() if not cut]
    if whole:
        yield f"  the second model runs whole behind {', '.join(map(repr, whole))}, as it can't be cut there"
    source = "saved statistics" if request.saved else "sums"
    for method in request.methods:
        source_of_map = (
            f"read from the {source}"
            if method.training is None
            else f"trained from {method.start}, {method.training.words}"
        )
        yield f"method {method.id}: {source_of_map}"
    yield f"memory of the sums: {format_bytes(plan.bytes)}"
    counted = "" if plan.passes is None else f"{plan.passes:,}, of {plan.examples:,} examples in all"
    yield f"forward passes: {counted or 'unknown, as the data do not tell how many examples they have'}"
    yield f"  {runs[0]} on each batch for the maps; {runs[1]} on each of the test for similarities and evaluation"
    if any(method.training is not None for method in request.methods):
        yield "and those of the training, in which the first model runs once on each example where memory allows"
