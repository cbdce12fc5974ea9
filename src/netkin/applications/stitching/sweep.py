"""One sweep: layers of one model stitched into layers of another, by several methods, beside their similarity.

The fitting data are read once for all pairs and direct methods. The test data are read once for the similarities, and
as often as memory requires, usually once, for the evaluation. Training on the task loss starts from the map of the
fitting pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from netkin import files
from netkin.applications.stitching.ends import Pair
from netkin.applications.stitching.evaluating import Evaluation, evaluate_each
from netkin.applications.stitching.fitting import (
    FITTED,
    JUDGED,
    Asked,
    Fit,
    collect_warnings,
    fit_by_pass,
    fit_saved,
    lend_both,
    train_stitch,
)
from netkin.applications.stitching.network import Stitch
from netkin.applications.stitching.stitch_scores import (
    FLATTERED,
    UNFINISHED,
    contrasts,
    lost_score,
    restrict,
    score_tables,
)
from netkin.applications.stitching.task_loss import Way
from netkin.comparing.compare import compare
from netkin.comparing.feed import data_name
from netkin.comparing.pass_statistics import found_measures
from netkin.errors import FileFault, ForwardError, NetkinError, NoValue, ShapeError, ValueFault
from netkin.identity import settings_digest, weights_digest
from netkin.jobs import Job, Part
from netkin.memory import free_memory
from netkin.progress import Interruption, reported
from netkin.representations.inputs import device_of, watched
from netkin.results import Comparison, Comparisons, Values
from netkin.results.packing import packed, unpacked
from netkin.results.records import checked
from netkin.settings import random_states_kept

NUMBERS = 3  # matrices of a stitch's evaluation, as wide as the second layer each
Work = tuple[Pair, Way]
Store = Callable[[Pair, Comparison], None]


@dataclass(frozen=True)
class _Outcome:
    """What became of a stitch: what it is worth, or why there is none."""

    evaluation: Evaluation | None = None
    reason: str = ""
    few: tuple[str, ...] = ()  # that it is from too few rows, in words
    cut: str = ""  # how the second model was cut
    fitted: int = 0
    fitting_digest: str = ""

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
        return checked(cls, {**part.values, "evaluation": found or None})


class Sweep:
    """One model stitched into another; the job holds what is finished, and `store` receives the results so far."""

    def __init__(
        self, a: nn.Module, b: nn.Module, names: Pair, asked: Asked, job: Job, store: Store, weights: Mapping[str, str]
    ):
        self.a, self.b, self.names, self.asked, self.job, self.store = a, b, names, asked, job, store
        self.weights = weights
        with lend_both(a, b, asked.device):
            found = asked.joints(a, b, names)
        self.saved = fit_saved(asked.saved, found, list(weights.values())) if asked.saved else None
        self.statistics = None if self.saved is None else self.saved.statistics
        self.joints = found if self.saved is None else self.saved.joints
        self.work: list[Work] = [(pair, way) for pair in self.joints.meetings for way in asked.ways]
        self.outcomes: dict[Work, _Outcome | None] = dict.fromkeys(self.work)  # None: not yet
        self.made: list[Stitch] = []

    def run(self, interruption: Interruption) -> Comparison:
        """Return the comparison; an interruption that was requested leaves the rest as holes."""
        for key in self.work:
            self.outcomes[key] = self.job.recall(self.part(key), _Outcome.unpacked)
        with lend_both(self.a, self.b, self.asked.device):
            self.similarity = self._similarity()
            with interruption.ending("stitching"):
                self._stitch()
        self.store(self.names, found := self._so_far())
        each = self.asked.each
        for one in self.made:
            one.transformation.to(device_of(self.b))
            if each is not None:
                each(one)
        return found

    @property
    def tables(self) -> dict[str, Values]:
        """The scores of all stitches so far, as tables."""
        found: dict[tuple[Pair, str], Evaluation | str] = {
            (pair, way.id): str(reason) for pair, reason in self.joints.refused.items() for way in self.asked.ways
        }
        for (pair, way), one in self.outcomes.items():
            if one is not None:
                found[pair, way.id] = one.evaluation or one.reason
        hows = [way.id for way in self.asked.ways]
        return score_tables(self.joints.layers, self.joints.wanted, hows, self.asked.scores, found)

    def part(self, key: Work) -> str:
        """Return the name of the part of the job that holds a stitch."""
        (x, y), way = key
        # what is trained depends on its batches, too; without a file nothing is continued, and they need not be counted
        batches = f", {self.asked.digests['batches']} batches" if way.training and self.job.folder else ""
        return f"{self.names[0]} into {self.names[1]}: {x!r} into {y!r} by {way.identity}{batches}"

    def _stitch(self) -> None:
        # a caller that receives each stitch gets all of them
        work = [key for key in self.work if self.asked.each is not None or self.outcomes[key] is None]
        if not work:
            return
        self.store(self.names, self._so_far())
        fit = self.saved or fit_by_pass(watched(self.asked.data, self.asked.examples, "fitting"), self.joints)
        begun = {key: self._start(fit, *key) for key in work}
        made = {key: found for key, found in begun.items() if found is not None}
        self._evaluate([(key, *found) for key, found in made.items() if key[1].training is None])
        longer = [(key, *found) for key, found in made.items() if key[1].training is not None]
        for key, one, known in reported(longer, "on the task loss", "stitches"):
            self.job.check()
            self._train(key, one, known)

    def _start(self, fit: Fit, pair: Pair, way: Way) -> tuple[Stitch, _Outcome] | None:
        """Return the stitch of a pair by a method, before any training; None where there is no map."""
        few = list[str]()
        origin = {"call": self.job.state.call, **self.weights}
        try:
            with collect_warnings(few):
                one = fit.stitch(pair, way, self.asked.seed, origin)
        except (NoValue, ValueFault) as reason:  # a layer that does not vary; a rank above the width
            self._keep((pair, way), _Outcome(reason=str(reason)))
            return None
        return one, _Outcome(None, "", tuple(few), one.network.tail.how, fit.examples, fit.digest)

    def _evaluate(self, made: Sequence[tuple[Work, Stitch, _Outcome]]) -> None:
        """Evaluate stitches together, as many as memory allows in one pass over the test data."""
        for portion in portions_in_memory([one.transformation.meeting.b.width for _, one, _ in made]):
            some = made[portion]
            self.job.check()
            begun, networks = perf_counter(), [one.network for _, one, _ in some]
            try:
                found = evaluate_each(networks, *self.asked.judging, name=self.names[0])
            except (ForwardError, ValueFault) as fault:  # of the models themselves, or of the data
                found = [fault] * len(networks)
            each = (perf_counter() - begun) / len(networks)
            for (key, one, known), evaluation in zip(some, found, strict=True):
                self._note(key, one, known, evaluation, each)
            self.store(self.names, self._so_far())

    def _note(
        self, key: Work, one: Stitch, known: _Outcome, found: Evaluation | NetkinError, seconds: float | None = None
    ) -> None:
        if isinstance(found, NetkinError):
            self._keep(key, replace(known, reason=str(found)), seconds)
            return
        self._keep(key, replace(known, evaluation=found), seconds)
        if self.asked.each is not None:
            self.made.append(replace(one, evaluation=found))

    def _keep(self, key: Work, outcome: _Outcome, seconds: float | None = None) -> None:
        self.outcomes[key] = outcome
        self.job.keep(self.part(key), outcome.packed(), seconds=seconds)

    def _train(self, key: Work, one: Stitch, known: _Outcome) -> None:
        asked, (_, way), standing = self.asked, key, f"{self.part(key)}: standing"
        assert way.training is not None
        begun, place = perf_counter(), None if self.job.folder is None else (self.job, standing)
        given: dict[str, Any] = {"validation": asked.validation, "examples": asked.examples, "place": place}
        found: Evaluation | NetkinError
        try:
            one = train_stitch(one, asked.data, way.training, **given)
            (found,) = evaluate_each([one.network], *asked.judging, name=self.names[0])
        except (ForwardError, ShapeError, ValueFault) as reason:  # it came to NaN, or no gradient comes back
            found = reason
        self._note(key, one, known, found, perf_counter() - begun)
        self.job.drop(standing)
        self.store(self.names, self._so_far())

    @cached_property
    def _asked_of_similarity(self) -> dict[str, Any]:
        """The arguments of `compare` other than models, data and names."""
        asked, (ours, theirs) = self.asked, self.joints.layers
        shape, resize = self.joints.shape if asked.shape is None else (asked.shape, None)
        layers: Any = {"a": ours, "b": theirs} if self.a is not self.b else list(dict.fromkeys((*ours, *theirs)))
        return {
            "layers": layers, "pairs": list(self.joints.wanted), "shape": shape, "resize": resize, "seed": asked.seed
        }  # fmt: skip

    @cached_property
    def similarity_part(self) -> str:
        """The name of the part of the job that holds the similarities."""
        measures = [(measure.id, measure.function) for measure in found_measures(self.asked.measures)]
        settings = settings_digest({"measures": measures, **self._asked_of_similarity})
        return f"{self.names[0]} into {self.names[1]}: similarity {settings}"

    def _similarity(self) -> Comparison:
        """Return the comparison of the same pairs of layers on the test data."""
        known = self.job.recall(self.similarity_part, lambda part: unpacked(part.values, part.arrays))
        if known is not None:
            return known
        data, examples = self.asked.judging
        options = self._asked_of_similarity | {"examples": examples, "names": self.names}
        found = compare(self.a, self.b, data, self.asked.measures, **options)
        self.job.keep(self.similarity_part, *packed(found))
        return found

    def _so_far(self) -> Comparison:
        similar, layers, stitches = self.similarity, self.joints.layers, self.tables
        tables = {name: restrict(table, layers) for name, table in similar.tables.items()}
        outcomes = [outcome for outcome in self.outcomes.values() if outcome is not None]
        doubts = dict.fromkeys(one.evaluation.doubt for one in outcomes if one.evaluation and one.evaluation.doubt)
        done = len(outcomes) == len(self.work)
        said = [*similar.warnings, *filter(None, doubts), *contrasts(list(tables.values()), stitches)]
        few = [word for one in outcomes for word in one.few]
        said += [few[0] + (f" This holds for {len(few):,} stitches." if len(few) > 1 else "")] if few else []
        if self.statistics is not None and self.statistics.missing:
            said.append(self.statistics.missing)
        said += [FLATTERED] if self._is_flattered(outcomes) else list(filter(None, [self.asked.overlap]))
        said += [UNFINISHED] * (not done)
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
            data=data_name(self.asked.judging[0]),
            examples=similar.examples,
            seed=self.asked.seed,
            version=similar.version,
            warnings=tuple(said),
            provenance=self._provenance(outcomes),
            complete=done,
        )

    def _is_flattered(self, outcomes: Sequence[_Outcome]) -> bool:
        """Return whether stitches are evaluated on the data they were fitted on."""
        if self.statistics is not None:
            return self.similarity.provenance.get("data digest") == self.statistics.digest.hex
        judged = ((one.evaluation.digest, one.fitting_digest) for one in outcomes if one.evaluation)
        return self.asked.test is None or any(digest == fitted for digest, fitted in judged)

    def _provenance(self, outcomes: Sequence[_Outcome]) -> dict[str, str]:
        asked = self.asked
        fits = [one for one in outcomes if one.fitted]
        data = data_name(asked.data) if self.statistics is None else f"statistics of {self.statistics.data}"
        fitting = {"fitted on": data, "fitting examples": f"{fits[0].fitted:,}"} if fits else {}
        cut = {y: one.cut for ((_, y), _), one in self.outcomes.items() if one is not None and one.cut}
        words = {f"cut after {layer!r}": f"first model stopped, second {how}" for layer, how in cut.items()}
        which = asked.pairs if isinstance(asked.pairs, str) else f"{len(self.joints.wanted):,} listed"
        resize = asked.resize or "average where maps shrink, bilinear where they grow"
        own = {"call": self.job.state.call, "pairs": which, "resize of stitches": resize}
        losses = {f"loss of {way.id}": way.identity for way in asked.ways if way.identity != way.id}
        known = {f"asked {key}": value for key, value in asked.settings.items()}
        if self.job.folder is not None:  # the digests as the data were read for the job, or else by the passes
            known |= {key: text for key, text in asked.digests.items() if key != "batches"}
        else:
            fitted = next((one.fitting_digest for one in outcomes if one.fitting_digest), "")
            judged = next((one.evaluation.digest for one in outcomes if one.evaluation), "")
            known |= {key: text for key, text in ((FITTED, fitted), (JUDGED, judged)) if text}
        return {**self.similarity.provenance, **own, **fitting, **words, **losses, **known}


def portions_in_memory(widths: Sequence[int]) -> list[slice]:
    """Return stitches into layers of these widths in portions, as many at a time as have room for their evaluation."""
    limit, begun, size = free_memory() // 4, 0, 0
    found = list[slice]()
    for place, width in enumerate(widths):
        own = NUMBERS * 8 * width**2
        if place > begun and size + own > limit:
            found.append(slice(begun, place))
            begun, size = place, 0
        size += own
    return [*found, slice(begun, len(widths))] if widths else []


class SweepFile:
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
            lost = f"a sweep of {a!r} into {b!r}"
            if (a, b) in asked:
                lost = lost_score(one, asked[a, b].joints.wanted, asked[a, b].tables)
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


def run_sweeps(
    models: Mapping[Pair, tuple[nn.Module, nn.Module]], asked: Asked, results: SweepFile, partial: bool, call: str
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
        with job, interruption.ending("stitching", lambda: bool(done)):
            job.expect(name for one in sweeps for name in (one.similarity_part, *map(one.part, one.work)))
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
