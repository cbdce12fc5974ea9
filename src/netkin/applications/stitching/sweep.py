"""One sweep: layers of one model stitched into layers of another, by several methods, beside their similarity.

The fitting data are read once for all pairs and direct methods. The test data are read once for the similarities, and
as often as memory requires, usually once, for the evaluation. Training on the task loss starts from the map of the
fitting pass. The scores are tables in the same form as those of similarities.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from math import isfinite, nan
from time import perf_counter
from typing import Any

import numpy as np
from torch import nn

from netkin import files, jobs
from netkin.applications.stitching.ends import Pair
from netkin.applications.stitching.evaluating import MEMORY, SCORES, Evaluation, evaluate_each
from netkin.applications.stitching.fitting import (
    FITTED,
    JUDGED,
    Asked,
    Fit,
    by_name,
    fit_by_pass,
    fit_saved,
    lend_both,
    train_stitch,
)
from netkin.applications.stitching.network import Stitch
from netkin.applications.stitching.structure import contrasts
from netkin.applications.stitching.task_loss import Way
from netkin.comparing.compare import compare
from netkin.comparing.comparer import measures_of
from netkin.comparing.feed import data_name
from netkin.comparing.tabulating import INTERRUPTED
from netkin.errors import FileError, ForwardError, InvalidValue, NetkinError, NoValue, ShapeError
from netkin.identity import COMPARE, settings_digest, state_noted, weights_digest
from netkin.jobs import Job, Part
from netkin.memory import portions_in_memory
from netkin.progress import Interruption, reported
from netkin.representations.inputs import device_of, watched
from netkin.results import Comparison, Comparisons, Values
from netkin.results.caveats import Caveat, grouped
from netkin.results.labels import NOT_ASKED
from netkin.results.records import as_record, packed, unpacked
from netkin.settings import random_states_kept

Work = tuple[Pair, Way]
Layers = tuple[Sequence[str], Sequence[str]]  # rows and columns of tables
Outcomes = Mapping[tuple[Pair, str], Evaluation | str]  # by layers and method: the scores, or why there are none
Store = Callable[[Job, Pair, Comparison], None]
FLATTERED = (
    "the stitches are evaluated on the data on which they were fitted, which flatters them; give other data as `test`."
)
UNFINISHED = "interrupted: some stitches were not reached, and have no value."


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


class Sweep:
    """One model stitched into another; the job holds what is finished, and `store` receives the results so far."""

    def __init__(
        self, a: nn.Module, b: nn.Module, names: Pair, asked: Asked, job: Job, store: Store, weights: Mapping[str, str]
    ):
        self.a, self.b, self.names, self.asked, self.job, self.store = a, b, names, asked, job, store
        self.origin = {"call": job.state.call, **weights}
        with lend_both(a, b, asked.device):
            found = asked.joints(a, b, names)
        self.saved = fit_saved(asked.saved, found, list(weights.values())) if asked.saved else None
        self.statistics = None if self.saved is None else self.saved.statistics
        self.joints = found if self.saved is None else self.saved.joints
        self.work: list[Work] = [(pair, way) for pair in self.joints.meetings for way in asked.ways]
        self.outcomes: dict[Work, _Outcome | None] = dict.fromkeys(self.work)  # None: not yet
        self.made: list[Stitch] = []

    def run(self, interruption: Interruption) -> Comparison:
        """Return the comparison; an interruption that was requested leaves the rest without values."""
        for key in self.work:
            self.outcomes[key] = self.job.recall(self.part(key), _Outcome.unpacked)
        with lend_both(self.a, self.b, self.asked.device):
            self.similarity = self._similarity()
            with interruption.ending("stitching"):
                self._stitch()
        self.store(self.job, self.names, found := self._so_far())
        for one in self.made:
            one.transformation.to(device_of(self.b))
            if self.asked.each is not None:
                self.asked.each(one)
        return found

    @property
    def tables(self) -> dict[str, Values]:
        """The scores of all stitches so far, as tables."""
        hows, refused = [way.id for way in self.asked.ways], self.joints.refused
        found: dict[tuple[Pair, str], Evaluation | str] = {
            (pair, how): str(refused[pair]) for pair in refused for how in hows
        }
        known = {(pair, way.id): one.evaluation or one.reason for (pair, way), one in self.outcomes.items() if one}
        return score_tables(self.joints.layers, self.joints.wanted, hows, self.asked.scores, found | known)

    def lost_score(self, earlier: Comparison) -> str:
        """Return one of the scores of an earlier sweep that is not requested now; empty without any."""
        wanted, tables = set(self.joints.wanted), self.tables
        for name, table in earlier.tables.items():
            for i, j in np.argwhere(np.isfinite(table.values)) if "how" in table.quantity.parameters else ():
                pair = table.layers_a[i], table.layers_b[j]
                if name not in tables or pair not in wanted:
                    return f"{name} of {pair[0]!r} into {pair[1]!r}"
        return ""

    def part(self, key: Work) -> str:
        """Return the name of the part of the job that holds a stitch."""
        (x, y), way = key
        # what is trained depends on its batches, too; without a file nothing is continued, and they need not be counted
        batches = f", {self.asked.digests['batches']}" if way.training and self.job.folder else ""
        return f"{self.names[0]} into {self.names[1]}: {x!r} into {y!r} by {way.identity}{batches}"

    def _stitch(self) -> None:
        # a caller that receives each stitch gets all of them
        work = [key for key in self.work if self.asked.each is not None or self.outcomes[key] is None]
        if not work:
            return
        self.store(self.job, self.names, self._so_far())
        fit = self.saved or fit_by_pass(watched(self.asked.data, self.asked.examples, "fitting"), self.joints)
        made = [(key, *found) for key in work if (found := self._start(fit, *key)) is not None]
        self._evaluate([one for one in made if one[0][1].training is None])
        longer = [one for one in made if one[0][1].training is not None]
        for key, one, known in reported(longer, "on the task loss", "stitches"):
            self.job.check()
            self._train(key, one, known)

    def _start(self, fit: Fit, pair: Pair, way: Way) -> tuple[Stitch, _Outcome] | None:
        """Return the stitch of a pair by a method, before any training; None where there is no map."""
        try:
            one = fit.stitch(pair, way, self.asked.seed, self.origin)
        except (NoValue, InvalidValue) as reason:  # a layer that does not vary; a rank above the width
            self._keep((pair, way), _Outcome(reason=str(reason)))
            return None
        few = fit.few_rows(pair, way.start)
        return one, _Outcome(None, "", few, one.network.tail.how, fit.examples, fit.digest)

    def _evaluate(self, made: Sequence[tuple[Work, Stitch, _Outcome]]) -> None:
        """Evaluate stitches together, as many as memory allows in one pass over the test data."""
        for portion in portions_in_memory([MEMORY * one.transformation.meeting.b.width**2 for _, one, _ in made]):
            some = made[portion]
            self.job.check()
            begun = perf_counter()
            try:
                found = evaluate_each([one.network for _, one, _ in some], *self.asked.judging, name=self.names[0])
            except (ForwardError, InvalidValue) as fault:  # of the models themselves, or of the data
                found = [fault] * len(some)
            each = (perf_counter() - begun) / len(some)
            for (key, one, known), evaluation in zip(some, found, strict=True):
                self._keep(key, known.judged(evaluation), one, each)
            self.store(self.job, self.names, self._so_far())

    def _keep(self, key: Work, outcome: _Outcome, one: Stitch | None = None, seconds: float | None = None) -> None:
        self.outcomes[key] = outcome
        self.job.keep(self.part(key), outcome.packed(), seconds=seconds)
        if one is not None and outcome.evaluation is not None and self.asked.each is not None:
            self.made.append(replace(one, evaluation=outcome.evaluation))

    def _train(self, key: Work, one: Stitch, known: _Outcome) -> None:
        asked, settings, standing = self.asked, key[1].training, f"{self.part(key)}: standing"
        assert settings is not None
        begun, place = perf_counter(), None if self.job.folder is None else (self.job, standing)
        found: Evaluation | NetkinError
        try:
            one = train_stitch(one, asked.data, settings, asked.validation, asked.examples, place)
            (found,) = evaluate_each([one.network], *asked.judging, name=self.names[0])
        except (ForwardError, ShapeError, InvalidValue) as reason:  # it came to NaN, or no gradient comes back
            found = reason
        self._keep(key, known.judged(found), one, perf_counter() - begun)
        self.job.drop(standing)
        self.store(self.job, self.names, self._so_far())

    @cached_property
    def _asked_of_similarity(self) -> dict[str, Any]:
        """The arguments of `compare` other than models, data and names."""
        asked, (ours, theirs) = self.asked, self.joints.layers
        shape, resize = self.joints.shape if asked.shape is None else (asked.shape, None)
        layers: Any = {"a": ours, "b": theirs} if self.a is not self.b else list(dict.fromkeys((*ours, *theirs)))
        pairs = list(self.joints.wanted)
        return {"layers": layers, "pairs": pairs, "shape": shape, "resize": resize, "seed": asked.seed}

    @cached_property
    def similarity_part(self) -> str:
        """The name of the part of the job that holds the similarities."""
        measures = [(measure.id, measure.function) for measure in measures_of(self.asked.measures)]
        settings = settings_digest({"measures": measures, **self._asked_of_similarity})
        return f"{self.names[0]} into {self.names[1]}: similarity {settings}"

    def _similarity(self) -> Comparison:
        """Return the comparison of the same pairs of layers on the test data."""
        known = self.job.recall(self.similarity_part, lambda part: unpacked(Comparison, part.values, part.arrays))
        if known is not None:
            return known
        data, examples = self.asked.judging
        options = self._asked_of_similarity | {"examples": examples, "names": self.names}
        found = compare(self.a, self.b, data, self.asked.measures, **options)
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
            same = self.asked.test is None or any(digest == fitted for digest, fitted in judged)
        overlap = FLATTERED if same else self.asked.overlap
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
            data=data_name(self.asked.judging[0]),
            examples=similar.examples,
            seed=self.asked.seed,
            version=similar.version,
            caveats=tuple(said),
            provenance=self._provenance(outcomes),
            complete=done,
        )

    def _provenance(self, outcomes: Sequence[_Outcome]) -> dict[str, str]:
        asked, fits = self.asked, [one.fitted for one in outcomes if one.fitted]
        data = data_name(asked.data) if self.statistics is None else f"statistics of {self.statistics.record.data}"
        fitting = {"fitted on": data, "fitting examples": f"{fits[0]:,}"} if fits else {}
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


def score_tables(
    layers: Layers, wanted: Collection[Pair], hows: Sequence[str], scores: Sequence[str], found: Outcomes
) -> dict[str, Values]:
    """Return a table for each score and method, those of the first score first, of what was `found` or why not."""
    examples = max((one.examples for one in found.values() if isinstance(one, Evaluation)), default=0)
    tables = dict[str, Values]()
    for name, how in product(scores, hows):
        score, values = SCORES[name], dict[Pair, float | str]()
        for pair in wanted:
            one = found.get((pair, how), INTERRUPTED)
            value = score.read(one) if isinstance(one, Evaluation) else None
            reason = score.why_not(one) if isinstance(one, Evaluation) else one
            values[pair] = value if value is not None and isfinite(value) else reason
        tables[f"{name}(how={how})"] = Values(
            quantity=replace(
                score.quantity,
                id=f"{name}(how={how})",
                parameters={"how": how},
                convention=f"{score.quantity.convention}; stitched by {how}",
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


class SweepFile:
    """The file in which sweeps grow, beside their job; without a path, none. That of `several` pairs holds all of them.

    Numbers in it that are not requested would be lost, and are a reason to refuse.
    """

    def __init__(self, path: str | os.PathLike[str] | None, overwrite: bool, *, several: bool):
        self.path, self.overwrite, self.several = path, overwrite, several
        jobs.refuse_output(path, overwrite=overwrite)
        self.found: dict[Pair, Comparison] = {}

    def load(self, sweeps: Sequence[Sweep]) -> None:
        """Take over what the file holds, if there is one and all of it is requested again."""
        if self.path is None or self.overwrite or not files.is_filled(self.path):
            return
        held = Comparisons.load(self.path) if self.several else Comparisons([Comparison.load(self.path)])
        asked = {sweep.names: sweep for sweep in sweeps}
        for (a, b), one in held.items():
            lost = asked[a, b].lost_score(one) if (a, b) in asked else f"a sweep of {a!r} into {b!r}"
            if lost:
                raise FileError(
                    f"{os.fspath(self.path)!r} holds {lost}, which is not asked for and would be lost; ask for it too, "
                    "or give another file or delete it."
                )
        self.found = dict(held)

    def store(self, job: Job, names: Pair, found: Comparison) -> None:
        """Take what is known of a pair of models by now, and let the job write it."""
        self.found[names] = found
        job.save(lambda: Comparisons(self.found) if self.several else found)


def run_sweeps(
    models: Mapping[Pair, tuple[nn.Module, nn.Module]], asked: Asked, results: SweepFile, partial: bool, call: str
) -> list[Comparison]:
    """Return the sweeps of pairs of models, one after the other, as one job."""
    every = {id(model): model for pair in models.values() for model in pair}
    weights = {key: weights_digest(model) for key, model in every.items()}
    interruption, done, identity = Interruption(partial), list[Comparison](), dict[str, Any]()
    marks = {names: {"weights a": weights[id(a)], "weights b": weights[id(b)]} for names, (a, b) in models.items()}
    with random_states_kept(*every.values(), data=[asked.data, asked.test, asked.validation]):
        if results.path is not None:
            identity = asked.identity(models, marks, results.several)
        job = Job.beside(results.path, "sweep", identity, call=call, overwrite=results.overwrite, compare=COMPARE)
        sweeps = [Sweep(a, b, names, asked, job, results.store, marks[names]) for names, (a, b) in models.items()]
        results.load(sweeps)
        with (
            job,
            state_noted(job, by_name(models, results.several)),
            interruption.ending("stitching", lambda: bool(done)),
        ):
            job.expect(name for one in sweeps for name in (one.similarity_part, *map(one.part, one.work)))
            for sweep in reported(sweeps, "stitching", "pairs of models") if results.several else sweeps:
                done.append(sweep.run(interruption))
                if interruption.ended:
                    break
    return done
