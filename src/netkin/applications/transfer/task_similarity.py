"""The similarity of tasks in one number for each pair: by Task2Vec, or by Fisher–Rao norms.

`compare_tasks` compares the same tasks block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from netkin import __version__
from netkin.applications.experiment import Experiment
from netkin.applications.transfer.fisher import (
    TaskEmbedding,
    fisher_rao_distance,
    fisher_rao_norm,
    task2vec,
    task2vec_cosine,
    task2vec_distance,
)
from netkin.applications.transfer.tasks import about_task, model_input
from netkin.comparing.feed import data_name
from netkin.errors import InvalidValue, require_listed
from netkin.identity import DataDigest, weights_digest, with_call
from netkin.progress import ProgressOption, command, showing, with_progress
from netkin.representations.hooks import inference_mode_of, main_tensor
from netkin.representations.inputs import batch_length, batches_of, examples_in, feed, take
from netkin.results import Comparison, Values
from netkin.results.quantity import Quantity
from netkin.settings import loaders_kept
from netkin.sources.names import loaded_by_name
from netkin.sources.weights import random_weights
from netkin.training.work_plan import Planning, Work, WorkPlan, planned

NO_ERROR = "none: the examples are not kept apart"


@dataclass(frozen=True)
class TaskScore:
    """A number for two tasks: what it is, what is computed of each task, and how two of these are compared."""

    quantity: Quantity
    read: Callable[..., TaskEmbedding | float]
    compare: Callable[..., float]


SCORES = {
    score.quantity.id: score
    for score in (
        TaskScore(
            Quantity(
                id="task2vec", higher_is_closer=False, bounds=(0, 1), symmetric=True, error=NO_ERROR,
                convention="cosine distance of a/(a + b) and b/(a + b), the Fisher information of each filter",
                reference="Achille et al. (2019), arXiv:1902.03545",
                means="0 if the same filters of the network matter in the same proportion to both tasks. Every filter "
                "counts alike.",
                cannot_see="What a filter computes, and which classes the tasks have.",
            ),
            task2vec, task2vec_distance,
        ),
        TaskScore(
            Quantity(
                id="task2vec_cosine", bounds=(0, 1), symmetric=True, error=NO_ERROR,
                convention="cosine of the Fisher information of each filter",
                reference="Tang et al. (2020), arXiv:2003.11498",
                means="1 if the same filters of the network matter in the same proportion to both tasks. The few "
                "filters with the largest Fisher information decide it.",
                cannot_see="What a filter computes, and which classes the tasks have.",
            ),
            task2vec, task2vec_cosine,
        ),
        TaskScore(
            Quantity(
                id="fisher_rao", higher_is_closer=False, bounds=(0, float("inf")), symmetric=True, error=NO_ERROR,
                convention="|a - b| / √(a b) of two Fisher–Rao norms",
                reference="Tang et al. (2020), arXiv:2003.11498",
                means="0 if the Fisher–Rao norms of the two networks, each on its own data, are equal.",
                cannot_see="Everything but the size of the two norms: different networks may have equal ones.",
            ),
            fisher_rao_norm, fisher_rao_distance,
        ),
    )
}  # fmt: skip


@with_call
@planned
def task_similarity(
    tasks: Mapping[str, Any],
    score: str = "task2vec",
    *,
    independent: bool = False,
    progress: ProgressOption = None,
    **options: Any,
) -> Planning[WorkPlan, Comparison]:
    """Return how similar tasks are by one number for each pair, with the tasks in rows and columns.

    Each model runs once over its own data. Task2Vec compares data sets by one reference network, with a head fitted to
    each: tasks that name the same model have the same weights, also where these are random. The Fisher–Rao distance
    compares any networks, and with it, or with `independent`, each random model has weights of its own.

    Args:
        tasks: from names to (model, data).
        score: "task2vec" (a distance), "task2vec_cosine" (a similarity) or "fisher_rao" (a distance).
        independent: whether Task2Vec compares networks with different weights too, whose filters don't correspond.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        **options: those of `nk.task2vec` or `nk.fisher_rao_norm`, for all tasks.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> found = task_similarity({"few": (model, inputs[:20]), "many": (model, inputs[20:])})
        >>> found.layers_a, round(found["few", "few"], 9)
        (('few', 'many'), 0.0)
    """
    require_listed("score of tasks", score, SCORES, "score")
    if not isinstance(tasks, Mapping) or len(tasks) < 2:
        sentence = "`tasks` is a mapping from names to (model, data), with two tasks at least."
        raise InvalidValue(sentence, argument="tasks")
    tasks = loaded_by_name(tasks, same_weights=SCORES[score].read is task2vec and not independent)
    yield lambda: _plan(tasks, SCORES[score], options)
    chosen, networks, read = SCORES[score], list[Any](), dict[str, Any]()
    provenance, seen, names = {"call": command()}, list[_DigestedData](), tuple(tasks)
    with showing(progress):
        for name, task in with_progress(tasks.items(), "embedding", "tasks", total=len(tasks)):
            with about_task(name), loaders_kept(task[1] if isinstance(task, tuple) else None):
                side = model_input(task)
                data = _DigestedData(side.data, options.get("examples"))
                read[name] = chosen.read(side.model, data, **options)
            networks.append(side.model)
            seen.append(data)
            provenance |= {f"weights of {name}": weights_digest(side.model), f"data of {name}": data.described}
    provenance |= random_weights(dict.fromkeys(networks))
    samples = options.get("samples")
    settings = {"independent": True} if independent and chosen.read is task2vec else {}
    values = np.array([[chosen.compare(read[a], read[b], **settings) for b in tasks] for a in tasks])
    table = Values(
        quantity=chosen.quantity, layers_a=names, layers_b=names, values=values, statistic="Fisher information",
        axes=("network", "network"), exactness=f"estimated from {samples} draws of y" if samples else "exact",
    )  # fmt: skip
    widths = {name: len(one.values) if isinstance(one, TaskEmbedding) else 1 for name, one in read.items()}
    return Comparison(
        a="tasks", b="tasks", layers_a=names, layers_b=names, tables={score: table}, shapes_a={}, shapes_b={},
        widths_a=widths, widths_b=widths, data=" and ".join(dict.fromkeys(data.name for data in seen)),
        examples=sum(data.digest.count for data in seen), seed=options.get("seed", 0), version=__version__,
        provenance=provenance,
    )  # fmt: skip


explain_task_similarity = task_similarity.explain


def _plan(tasks: Mapping[str, Any], score: TaskScore, options: Mapping[str, Any]) -> WorkPlan:
    """Return what the embeddings would take; two examples of a task are run, to learn how many classes there are."""
    work, memory = [], 0
    for name, task in tasks.items():
        with about_task(name), loaders_kept(task[1] if isinstance(task, tuple) else None):
            side = model_input(task)
            draws = options.get("samples") if score.read is task2vec else 1
            if draws is None:
                experiment = Experiment(models={name: side.model}, data=side.data, device=options.get("device"))
                with experiment.lending(side.model), inference_mode_of(side.model):
                    few = take(next(batches_of(side.data)), 2)
                    outputs = feed(side.model, few, options.get("forward"), options.get("transform"))
                draws = main_tensor(outputs, "").shape[-1]
            work.append(Work(f"embedding {name}", examples_in(side.data, options.get("examples")), backward=draws))
            memory = max(memory, sum(weight.nbytes for weight in side.model.parameters()))
    return WorkPlan(tuple(work), {"the Fisher information of one network": 2 * memory})


class _DigestedData:
    """The batches of some data, whose digest is that of what was read."""

    def __init__(self, data: Any, examples: int | None):
        self.data, self.examples, self.name, self.digest = data, examples, data_name(data), DataDigest()

    @property
    def described(self) -> str:
        return f"{self.name}, {self.digest.count:,} examples; digest {self.digest.hex}"

    def __iter__(self) -> Iterator[Any]:
        stop = 0
        for batch in batches_of(self.data, self.examples):
            start, stop = stop, stop + batch_length(batch)
            self.digest.update(batch, np.arange(start, stop))
            yield batch
