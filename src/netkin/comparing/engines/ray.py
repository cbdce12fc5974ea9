"""The engine on Ray: tasks of (models, share of the data), a tree of merges, and tables read where there is room."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from netkin.comparing.alignment import Pairs
from netkin.comparing.engines import ClusterTask, Engine, Terms, named_models, plain_measures, terms_for, terms_of
from netkin.comparing.engines.cluster import Cluster
from netkin.comparing.engines.worker import Message, as_fault, complete
from netkin.comparing.many_models import PairsPlan, in_files, in_hours, unpacked_plan
from netkin.comparing.pairs_job import identity_of_study
from netkin.comparing.pass_statistics import Statistics, from_arrays
from netkin.errors import InvalidValue, NetkinError, SourceError
from netkin.identity import COMPARE, described_call, settings_digest
from netkin.jobs import Job, beside
from netkin.measures.registry import Measure
from netkin.results import Comparison
from netkin.results.packing import unpacked_columns
from netkin.results.values import Pair
from netkin.statistics.collector import Study

if TYPE_CHECKING:
    from netkin.comparing.request import Options

HOME = complete.__module__  # where a worker finds its tasks
MODELS_PER_TASK = 8  # models that one task inspects
SHARES = 2  # of the data, for each task that can run at once


class Ray(Engine):
    """A cluster of Ray, by default one that is started on this machine and that no other can reach.

    Models, data and functions are given by name, as on the command line: ``nk.compare("nets:first@a.pt",
    "nets:second@b.pt", "images:photos", engine="ray")``. With `job` each finished share of the data is a part in that
    folder, and the same call continues there, also after the process was killed.

    Args:
        address: of a running cluster, as "10.0.0.1:6379", or "auto"; None starts one here, on the loopback address.
        job: the folder in which finished parts are kept.
        overwrite: whether another job in that folder is deleted, and the work starts again.
        gpus: the share of a GPU that each task requests, where models run on "cuda".
        shares: into how many shares the data are split; by default twice as many as tasks can run at once.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        job: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        gpus: float = 1.0,
        shares: int | None = None,
    ):
        if isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not gpus > 0:
            raise InvalidValue(f"`gpus` is the share of a GPU that a task needs, as 0.5; got {gpus!r}.")
        if shares is not None and (isinstance(shares, bool) or not isinstance(shares, int) or shares < 1):
            raise InvalidValue(f"`shares` is the number of shares of the data, from 1 on; got {shares!r}.")
        self.address, self.job, self.overwrite, self.gpus, self.shares = address, job, overwrite, float(gpus), shares

    def beside(self, result: str | os.PathLike[str], overwrite: bool) -> Ray:
        """Return this engine with its job beside a result, unless it has one."""
        job, overwrite = (beside(result), overwrite) if self.job is None else (self.job, self.overwrite)
        return Ray(self.address, job=job, overwrite=overwrite, gpus=self.gpus, shares=self.shares)

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def request(self, given: Mapping[str, Any], options: Options, pairs: Pairs, study: Study, *rest: Any) -> RayRequest:
        return RayRequest(self, given, options, pairs, study, *rest)


class RayRequest:
    """One call of `compare`, `compare_many` or `collect`, for a cluster; `failed` models are left out."""

    def __init__(
        self,
        engine: Ray,
        given: Mapping[str, Any],
        options: Options,
        pairs: Pairs,
        study: Study,
        data: Any = None,
        examples: int | None = None,
        partial: bool = False,
        part: Any = None,
        start: int | None = None,
    ):
        for name, is_given in {"part": part is not None, "start": start is not None, "partial": partial}.items():
            if is_given:
                raise InvalidValue(
                    f"`{name}` is for one process, and engine='ray' shares the data by itself; leave it out."
                )
        self.engine, self.given, self.options, self.pairs, self.study = engine, given, options, pairs, study
        self.terms = terms_of(given, options, pairs, study, data, examples)
        self.gpus = engine.gpus if self.terms["options"]["device"] == "cuda" else 0.0
        self.failed: dict[str, str] = {}
        self.rows: int | None = None  # how many examples may be sampled
        self.sampled_of: int | None = None  # of how many examples they were, if they had to be

    def compare(self, measures: Sequence[Measure], names: Mapping[str, str]) -> list[Comparison]:
        """Return the comparison of every pair of models but those that failed."""
        blocks = self._done("comparison", measures, names)
        found = (one for message in chain.from_iterable(blocks.values()) for one in unpacked_columns(*message))
        pairs = chain.from_iterable(pairs for block in blocks for pairs in block.groups)
        made = dict(zip(pairs, found, strict=True))
        return [made[pair] for pair in self._sound(self.pairs.of) if pair in made]

    def collect(self, measures: Sequence[Measure], names: Mapping[str, str]) -> Statistics:
        """Return what a pass over all data leaves."""
        (((block, (whole,)),)) = self._done("statistics", measures, names).items()
        return complete(from_arrays(*whole), block.survey.examples, names)

    def _done(
        self, kind: str, measures: Sequence[Measure], names: Mapping[str, str]
    ) -> dict[BlockTasks, list[Message]]:
        """Return what was made of each block of pairs; a block with a model that fails is done again without it."""
        cluster = Cluster(self.engine.address)
        cluster.refuse_too_small(self.gpus)
        survey = Survey.of(cluster, self.terms, self.gpus)
        self._set_aside(survey.faults)
        facts = {"measures": plain_measures(measures), "names": dict(names), "identity": survey.identity}
        with self._job(kind, survey, measures) as job:
            plan = self._planned(cluster, survey, job, facts["measures"])
            blocks = [
                BlockTasks(self.terms, survey, facts | plan, self._sound(pairs), self.gpus) for pairs in plan["blocks"]
            ]
            job.expect(name for block in blocks for name in block.parts(kind, job))
            return self._blocks_done(cluster, job, kind, blocks)

    def _blocks_done(
        self, cluster: Cluster, job: Job, kind: str, blocks: list[BlockTasks]
    ) -> dict[BlockTasks, list[Message]]:
        made: dict[BlockTasks, list[Message]] = {}
        while blocks:
            tasks = [one for block in blocks for one in block.tasks(kind)]
            wanted = {block: block.wanted(kind) for block in blocks}
            found = cluster.results(tasks, job, list(chain.from_iterable(wanted.values())), "comparing")
            faults = [one for one in found.values() if isinstance(one, NetkinError)]
            self._set_aside({getattr(fault, "model", None) or "": fault for fault in faults})
            again = []
            for block, names in wanted.items():
                messages = [found[name] for name in names]
                if any(isinstance(one, NetkinError) for one in messages):
                    again.append(block.without(self.failed))
                else:
                    made[block] = messages  # type: ignore[assignment]
            blocks = [block for block in again if block.pairs]
        job.expect(name for block in made for name in block.parts(kind, job))  # without those that failed
        return made

    def _set_aside(self, faults: Mapping[str, NetkinError]) -> None:
        """Leave models out that failed; where two are compared, or it is no model's fault, the fault is raised."""
        for model, fault in faults.items():
            self.failed[model] = str(fault)
            if not model or len(self.pairs.of) == 1 or not self._sound(self.pairs.of):
                raise fault

    def _sound(self, pairs: Iterable[Sequence[str]]) -> list[Pair]:
        return [(a, b) for a, b in pairs if a not in self.failed and b not in self.failed]

    def _job(self, kind: str, survey: Survey, measures: Sequence[Measure]) -> Job:
        settings = survey.settings | ({} if self.rows is None else {"rows": str(self.rows)})
        identity = identity_of_study(survey.weights, survey.identity, self.options.layers, settings, measures)
        identity |= {"architecture": survey.architectures, "examples": str(survey.examples)}
        given = {"models": list(self.given.values()), "data": self.terms["data"] and self.terms["data"]["name"]}
        call = described_call("nk.compare" if kind == "comparison" else "nk.collect", **given)
        return Job(self.engine.job, kind, identity, call=call, overwrite=self.engine.overwrite, compare=COMPARE)

    def _planned(self, cluster: Cluster, survey: Survey, job: Job, measures: list[list[str]]) -> dict[str, Any]:
        """Return how the work is split, as it was when the job began."""
        pairs = self._sound(self.pairs.of)

        def plan() -> dict[str, Any]:
            limit = self.study.limit if self.study.limit >= 0 else survey.memory(cluster, self.gpus)
            blocks, sample = self._blocks(cluster, pairs, limit, measures)
            slots = cluster.slots(self.gpus)
            each = -(-SHARES * slots // len(blocks)) if slots > 1 or job.folder else 1
            shares = min(survey.shares(self.engine.shares, each), sample or survey.examples or 1)
            return {"memory": limit, "blocks": blocks, "shares": shares, "groups": each, "sample": sample}

        kept = dict(job.part(f"plan of {settings_digest(pairs)}", plan).values)
        self.sampled_of = survey.examples if kept["sample"] else None
        return kept

    def _blocks(
        self, cluster: Cluster, pairs: list[Pair], limit: int, measures: list[list[str]]
    ) -> tuple[list[list[Pair]], int | None]:
        """Return pairs in blocks of models that run together, and how many examples are sampled, None for all.

        A worker finds out how many fit its memory.
        """
        if len(pairs) == 1 or self.terms["data"] is None:
            return [pairs], None
        made = self._asked(cluster, "plan_blocks", pairs, limit, measures)
        return [[(a, b) for a, b in block] for block in made["blocks"]], made["sample"]

    def _asked(
        self, cluster: Cluster, what: str, pairs: list[Pair], limit: int, measures: list[list[str]]
    ) -> dict[str, Any]:
        """Return what a worker says about the plan for some pairs."""
        terms = terms_for(self.terms, named_models(pairs))
        terms |= {"study": terms["study"] | {"limit": limit}}
        arguments = {"terms": terms, "pairs": pairs, "measures": measures, "rows": self.rows}
        task = ClusterTask(f"plan of {len(pairs)} pairs", f"{HOME}:{what}", arguments, gpus=self.gpus)
        made = cluster.results([task], Job(None, "plan", {}), [task.name], "planning")[task.name]
        if isinstance(made, NetkinError):
            raise made
        return made[0]

    def explain(self, measures: Sequence[Measure]) -> PairsPlan:
        """Return the plan that a worker makes for its memory, with the time for all workers together."""
        cluster = Cluster(self.engine.address)
        cluster.refuse_too_small(self.gpus)
        limit = self.study.limit
        if limit < 0:  # as when the work begins, from the models of the first pair
            some = terms_for(self.terms, named_models(self.pairs.of[:1]))
            limit = Survey.of(cluster, some, self.gpus).memory(cluster, self.gpus)
        plan = unpacked_plan(self._asked(cluster, "explain_pairs", self.pairs.of, limit, plain_measures(measures)))
        if plan.seconds is None:
            return plan
        seconds = plan.seconds / (slots := cluster.slots(self.gpus))
        # every share of the data is kept until the tables of its block are
        left, blocks = plan.disk - 2 * plan.way.statistics, len(plan.way.blocks)
        shares = max(1, min(self.engine.shares or -(-SHARES * slots // blocks), plan.way.batches))
        disk = left + blocks * shares * plan.way.statistics
        lines = [in_files(disk, left) if line == in_files(plan.disk, left) else line for line in plan.lines]
        lines.append(in_cluster_hours(cluster, slots, seconds))
        return replace(plan, seconds=seconds, disk=disk, lines=tuple(lines))


def in_cluster_hours(cluster: Cluster, slots: int, seconds: float) -> str:
    """Return how long a cluster takes that runs `slots` tasks at once, in words."""
    nodes = len(cluster.nodes)
    return (
        f"cluster: {slots:,} task{'s' * (slots > 1)} at once on {nodes:,} node{'s' * (nodes > 1)}, about "
        f"{in_hours(seconds)} together, plus the start of workers"
    )


class Survey:
    """What the first inspection of the models and the data found: digests, the number of examples, and faults."""

    def __init__(self, found: Sequence[Mapping[str, Any]], batch_size: int):
        self.identity, self.examples = found[0].get("identity", ""), found[0].get("examples")
        self.is_ordered, self.batch_size = found[0].get("ordered", False), batch_size
        strange = next((one for one in found if one.get("identity", "") != self.identity), None)
        if strange is not None:
            raise SourceError(
                f"the data are not the same on all machines: {self.identity} on one and {strange['identity']} on "
                "another."
            )
        models = {name: own for one in found for name, own in one["models"].items()}
        self.weights = {name: own["weights"] for name, own in models.items() if "weights" in own}
        self.architectures = {
            name: json.loads(own["architecture"]) for name, own in models.items() if "architecture" in own
        }
        self.faults = {name: as_fault(own["fault"]) for name, own in models.items() if "fault" in own}
        self.settings = {what: text for one in found for what, text in one["settings"].items()}
        self._limit = min(one["limit"] for one in found)

    @classmethod
    def of(cls, cluster: Cluster, terms: Terms, gpus: float) -> Survey:
        """Return what the workers find, some models each; where no node can read one, its group is tried without it."""
        names = list(terms["models"])
        groups = [names[place : place + MODELS_PER_TASK] for place in range(0, len(names), MODELS_PER_TASK)]
        headers, faults = list[Mapping[str, Any]](), dict[str, NetkinError]()
        while groups:
            found, again = _inspect_groups(cluster, terms, gpus, groups), []
            for own, one in zip(groups, found, strict=True):
                if not isinstance(one, NetkinError):
                    headers.append(one[0])
                    continue
                model = getattr(one, "model", "")
                if model not in own:
                    raise one
                faults[model] = one
                again.append([name for name in own if name != model])
            groups = [own for own in again if own]
        if not headers:
            raise next(iter(faults.values()))
        made = cls(headers, (terms["data"] or {}).get("batch_size", 1))
        made.faults |= faults
        return made

    def shares(self, asked: int | None, usual: int) -> int:
        """Return into how many shares the data are split: as many as were requested, or of at least a batch each."""
        if self.examples is None or not self.is_ordered:
            return 1
        return max(1, min(asked or usual, self.examples if asked else self.examples // self.batch_size))

    def memory(self, cluster: Cluster, gpus: float) -> int:
        """Return how many bytes the statistics of a task may take."""
        return int(self._limit * min(gpus, 1)) if gpus else min(cluster.memory(), self._limit)


def _inspect_groups(
    cluster: Cluster, terms: Terms, gpus: float, groups: Sequence[Sequence[str]]
) -> list[Message | NetkinError]:
    """Return what is found out of each group of models, or its fault."""
    tasks = [
        ClusterTask(
            f"inspection of {', '.join(own)}", f"{HOME}:inspect_models",
            {"terms": terms_for(terms, own), "models": own}, gpus=gpus,
        )
        for own in groups
    ]  # fmt: skip
    found = cluster.results(tasks, Job(None, "inspection", {}), [one.name for one in tasks], "inspecting models")
    return [found[one.name] for one in tasks]


class BlockTasks:
    """Some pairs of models, whose statistics are collected together: the tasks for them."""

    def __init__(self, terms: Terms, survey: Survey, plan: Mapping[str, Any], pairs: Sequence[Pair], gpus: float):
        self.terms, self.survey, self.plan, self.pairs, self.gpus = terms, survey, plan, list(pairs), gpus
        models = named_models(self.pairs)
        self.label = ", ".join(models) if len(models) <= 4 else f"{len(models)} models"
        # a job to which models are added has several plans, and two of them may split the same models differently
        if len(models) > 2 or plan["sample"] or any(", " in name for name in models):
            self.label += f" ({settings_digest([self.pairs, plan['sample']])[:16]})"
        size = -(-len(self.pairs) // plan["groups"])
        self.groups = [self.pairs[place : place + size] for place in range(0, len(self.pairs), size)]

    def without(self, models: Iterable[str]) -> BlockTasks:
        """Return the block without some models."""
        pairs = [pair for pair in self.pairs if not set(pair) & set(models)]
        return BlockTasks(self.terms, self.survey, self.plan, pairs, self.gpus)

    def tasks(self, kind: str) -> list[ClusterTask]:
        """Return all that is to be done, each task behind those that it follows."""
        count = self.plan["sample"] or self.survey.examples
        shared = {"examples": count, "names": self.plan["names"], "measures": self.plan["measures"]}
        if kind == "comparison" and self.plan["shares"] == len(self.groups) == 1:  # so that nothing travels but values
            (name,) = self.wanted(kind)
            return [
                ClusterTask(
                    name, f"{HOME}:compare_models", self._share_arguments(1) | shared, kept=True, gpus=self.gpus
                )
            ]
        shares, tree = self._shares(), self._merges()
        if kind == "statistics":
            return [*shares, *tree]
        whole = (tree or shares)[-1].name
        readings = [
            ClusterTask(name, f"{HOME}:read_tables", shared | {"pairs": pairs, "after": whole}, (whole,), kept=True)
            for name, pairs in zip(self.wanted(kind), self.groups, strict=True)
        ]
        return [*shares, *tree, *readings]

    def parts(self, kind: str, job: Job) -> list[str]:
        """Return the names of the parts that a job will keep; shares of the data go when the tables are there."""
        wanted = self.wanted(kind)
        is_done = kind == "comparison" and all(map(job.has, wanted))
        return wanted if is_done else [one.name for one in self.tasks(kind) if one.kept]

    def wanted(self, kind: str) -> list[str]:
        """Return the names of the tasks whose results are those of the block."""
        if kind == "statistics":
            return [(self._merges() or self._shares())[-1].name]
        count = len(self.groups)
        return [f"values of {self.label}" + f", {i} of {count}" * (count > 1) for i in range(1, count + 1)]

    def _shares(self) -> list[ClusterTask]:
        every = [self._share_arguments(i) for i in range(1, self.plan["shares"] + 1)]
        return [ClusterTask(one["name"], f"{HOME}:collect_share", one, kept=True, gpus=self.gpus) for one in every]

    def _share_arguments(self, place: int) -> dict[str, Any]:
        names = named_models(self.pairs)
        return {
            "name": self._share(place, place), "share": [place, self.plan["shares"]], "pairs": self.pairs,
            "terms": terms_for(self.terms, names), "measures": self.plan["measures"],
            "memory": self.plan["memory"], "sample": self.plan["sample"], "identity": self.plan["identity"],
            "weights": {name: self.survey.weights[name] for name in names},
        }  # fmt: skip

    def _merges(self) -> list[ClusterTask]:
        """Return a tree of merges, which does not depend on the order in which shares are finished."""
        spans, found = [(i, i) for i in range(1, self.plan["shares"] + 1)], []
        while len(spans) > 1:
            above = []
            for left, right in zip(spans[::2], spans[1::2], strict=False):
                above.append((left[0], right[1]))
                name, after = self._share(*above[-1]), (self._share(*left), self._share(*right))
                found.append(ClusterTask(name, f"{HOME}:merge_shares", {"name": name, "after": after}, after))
            spans = [*above, *spans[len(above) * 2 :]]
        return found

    def _share(self, first: int, last: int) -> str:
        count = self.plan["shares"]
        which = f"share {first}" if first == last else f"shares {first} to {last}"
        return f"{which} of {count} of {self.label}"
