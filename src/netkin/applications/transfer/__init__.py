"""Transfer: which pretrained model to start from, its accuracy without training, and the similarity of tasks.

`recommend` ranks several pretrained models for some labelled data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from netkin import __version__
from netkin.applications.experiment import DECLARED, Experiment, ExperimentOptions
from netkin.applications.transfer.evidence import (
    Array,
    Evidence,
    adaptation_score,
    evidence_of,
    feature_layer,
    layer_embeddings,
    mean_embedding_norm,
)
from netkin.applications.transfer.fisher import (
    TaskEmbedding,
    fisher_rao_distance,
    fisher_rao_norm,
    task2vec,
    task2vec_cosine,
    task2vec_distance,
)
from netkin.applications.transfer.ridge import KernelRidge, kernel_ridge, load_kernel_ridge
from netkin.applications.transfer.scores import (
    BESIDE,
    DEFAULT,
    RELIABILITY,
    SCORES,
    TransferScore,
    find_score,
    transfer_scores,
)
from netkin.applications.transfer.task_similarity import explain_task_similarity, task_similarity
from netkin.applications.transfer.tasks import compare_tasks, explain_compare_tasks, seed_values
from netkin.comparing.feed import data_name
from netkin.comparing.sides import named_models
from netkin.comparing.spec import functions_by_name, layers_by_name, takes_options
from netkin.errors import ForwardError, InvalidValue, NetkinError, NoValue, SourceError, UnknownName
from netkin.identity import described_call, weights_digest
from netkin.progress import showing, with_progress
from netkin.representations.activations import activations
from netkin.representations.inputs import Forward, Transform, examples_in, reshuffles
from netkin.results import Ranking, Values
from netkin.results.caveats import Caveat
from netkin.results.labels import plural
from netkin.sources.weights import remark_on
from netkin.statistics.collector import chunk_of
from netkin.training.work_plan import Planning, Work, WorkPlan, planned

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "SCORES", "KernelRidge", "TaskEmbedding", "adaptation_score", "compare_tasks", "explain_compare_tasks",
    "explain_recommend", "explain_task_similarity", "fisher_rao_distance", "fisher_rao_norm", "kernel_ridge",
    "layer_embeddings", "load_kernel_ridge", "mean_embedding_norm", "recommend",
    "seed_values", "task2vec", "task2vec_cosine", "task2vec_distance", "task_similarity", "transfer_scores",
]  # fmt: skip

CHUNKS = 20
FEW = 5  # examples of a class, below which a score says little


@dataclass
class _ScoredModel:
    """What is known of one model: numbers by score, or the reasons why there are none."""

    name: str
    parameters: int = 0
    weights: str = ""
    values: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    replicates: dict[str, Array] = field(default_factory=dict)
    without_error: str = ""
    fault: NetkinError | None = None
    data: str = ""
    labels: Array = field(default_factory=lambda: np.arange(0))  # none of one that was not read
    digest: str = ""
    width: int = 0
    caveats: tuple[Caveat, ...] = ()


@planned
@takes_options(without="test transform forward save overwrite partial", declared=DECLARED)
def recommend(
    models: Mapping[str, nn.Module | str] | Iterable[str],
    data: Any,
    *,
    score: str | None = None,
    scores: Iterable[str] | None = None,
    errors: bool = True,
    chunks: int = CHUNKS,
    layers: str | Mapping[str, str] | None = None,
    transforms: Transform | Mapping[str, Transform] | None = None,
    forwards: Forward | Mapping[str, Forward] | None = None,
    **options: Unpack[ExperimentOptions],
) -> Planning[WorkPlan, Ranking]:
    """Return pretrained models ranked by a transfer score on labelled data, without training any of them.

    Each model runs once over the data. A score is read from its features before the last layer, and some scores from
    its probabilities or gradients. Standard errors come from leaving out one chunk of the examples in turn. They are
    those of the examples alone: more examples would hardly change an order that is clear by them. Whether models rank
    so after fine-tuning is another matter: `ranking.reliability` says how well each score agreed with it in netkin's
    trials (see the guide "Which model to start from"), and `ranking.agreement` whether the scores agree here. A model
    that can't be run, and a score that does not serve a model, have no value, with the reason.

    Args:
        models: models by name, or names of models as `nk.load_model` takes them; those are loaded one at a time.
        data: batches of (inputs, labels) that come in the same order each time, or the name of data as `nk.load_data`
            takes it; by name, images and text reach a Hugging Face model as its own folder says.
        score: the score that decides the rank, by default "h_score_regularised", the cheapest of the best ones.
        scores: other scores to show as well; by default "linear_probe", unless `score` is given.
        errors: take standard errors of the scores, by leaving out one chunk of the examples in turn.
        chunks: the number of chunks for standard errors.
        layers: the layer whose outputs are the features, for all models or by name; by default the one before the last.
        transforms: a function of the inputs of a batch, for all models or by name.
        forwards: a function ``forward(model, batch)`` that runs a model, for all models or by name.

    Example:
        >>> import torch
        >>> labels = torch.arange(200) % 3
        >>> inputs = torch.eye(4)[labels] + 0.3 * torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> models = {name: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for name in ("sees", "blind")}
        >>> _ = nn.init.eye_(models["sees"][0].weight), nn.init.ones_(models["blind"][0].weight)
        >>> ranking = recommend(models, [(inputs, labels)], score="knn", progress=False)
        >>> ranking.best, ranking.lead.clear
        ('sees', True)
    """
    experiment = Experiment(models=named_models(models), data=data, **options)
    beside = scores if scores is not None else [BESIDE] if score is None else []
    wanted = [find_score(name) for name in dict.fromkeys([score or DEFAULT, *beside])]
    names, count = list(experiment.models), chunks if errors else 0
    layer_of = layers_by_name(layers, names)
    transform_of = functions_by_name("transforms", transforms, names)
    forward_of = functions_by_name("forwards", forwards, names)
    _require_fit(experiment, count)

    def reading(name: str) -> dict[str, Any]:
        return {"layer": layer_of[name], "transform": transform_of[name], "forward": forward_of[name]}

    yield lambda: _plan(experiment, reading, wanted, count)
    common: Any = {"examples": experiment.examples, "device": experiment.device}
    scored = list[_ScoredModel]()
    with showing(experiment.progress):
        for name in with_progress(names, "scoring", "models"):
            scored.append(_scored(experiment, name, wanted, partial(evidence_of, **common, **reading(name)), count))
    _require_same_examples(scored, paired=not isinstance(data, str))
    call = described_call(
        "nk.recommend", models=names, score=wanted[0].name, scores=[one.name for one in wanted[1:]],
        layer=layers, forward=forwards, transform=transforms,
    )  # fmt: skip
    return _ranking(experiment, scored, wanted, count, call)


explain_recommend = recommend.explain


def _plan(
    experiment: Experiment, reading: Callable[[str], dict[str, Any]], scores: Sequence[TransferScore], chunks: int
) -> WorkPlan:
    """Return what the scoring would take; two examples are run through each model, to learn how wide features are."""
    work, widest, notes = [], 0, []
    backward = int(any(score.needs_gradients for score in scores))
    for name in experiment.models:
        model, data, how = experiment.load_model(name), experiment.load_data(name), reading(name)
        work.append(Work(f"reading {name}", examples_in(data, experiment.examples), backward=backward))
        if isinstance(data, Iterator):
            continue  # what is read of it is gone
        layer = how.pop("layer") or feature_layer(model)
        try:
            with experiment.lending(model):
                features = activations(model, layer, data, examples=2, progress=False, **how)
            widest = max([widest, *(rows.shape[1] for rows in features.values())])
        except NetkinError as fault:
            notes.append(f"{name!r} can't be run: {fault}")
    whole = f"{plural(len(scores), 'score')} of each model, of all examples"
    notes.append(f"{whole}, and without each of {chunks} chunks" if chunks else whole)
    memory = {"features of one model": 8 * (work[0].examples or 0) * widest * (1 + backward)}
    return WorkPlan(tuple(work), memory, tuple(notes))


def _require_fit(experiment: Experiment, chunks: int) -> None:
    """Refuse before the work what would end it."""
    if chunks == 1:
        raise InvalidValue("standard errors need at least 2 chunks; got 1.", argument="chunks", value=1)
    data = experiment.data
    if len(experiment.models) > 1 and (hasattr(data, "__next__") or reshuffles(data)):
        raise InvalidValue(
            "every model must see the same examples in the same order, and these data give them once or in another "
            "order each time; pass a list of batches, or a loader with shuffle=False."
        )


def _scored(
    experiment: Experiment, name: str, scores: Sequence[TransferScore], read: Callable[..., Evidence], chunks: int
) -> _ScoredModel:
    """Return all that one of the models gives; one that can't be run has the fault."""
    model, data = experiment.load_model(name), experiment.load_data(name)
    random = remark_on(model)
    scored = _ScoredModel(
        name, sum(weight.numel() for weight in model.parameters()), weights_digest(model), data=data_name(data),
        caveats=(Caveat("random-weights", random),) if random else (),
    )  # fmt: skip
    try:
        evidence, scored.missing = _evidence(partial(read, model, data), scores)
    except (SourceError, UnknownName):
        raise
    except NetkinError as fault:
        scored.fault, scored.missing = fault, {score.name: str(fault).rstrip(".") for score in scores}
        return scored
    scored.labels, scored.digest, scored.width = evidence.labels, evidence.digest, evidence.features.shape[1]
    _take_scores(scored, evidence, scores, chunks)
    return scored


def _evidence(read: Callable[..., Evidence], scores: Sequence[TransferScore]) -> tuple[Evidence, dict[str, str]]:
    """Return the evidence, and why scores that read gradients have no value where the model has no logits."""
    by_gradients = [score.name for score in scores if score.needs_gradients]
    try:
        return read(gradients=bool(by_gradients)), {}
    except ForwardError as fault:
        if not by_gradients or len(by_gradients) == len(scores):
            raise
        return read(), dict.fromkeys(by_gradients, str(fault).rstrip("."))


def _take_scores(scored: _ScoredModel, evidence: Evidence, scores: Sequence[TransferScore], chunks: int) -> None:
    """Take every score of all examples, and of all but each chunk."""
    try:
        parts = _parts(evidence, chunks)
    except NoValue as reason:
        parts, scored.without_error = [], str(reason).rstrip(".")
    for score in scores:
        try:
            scored.values[score.name] = score.value(evidence)
        except NoValue as reason:
            scored.missing.setdefault(score.name, str(reason).rstrip("."))
            continue
        scored.replicates[score.name] = np.array([_number_or_nan(score, part) for part in parts])


def _parts(evidence: Evidence, chunks: int) -> list[Evidence]:
    """Return the evidence without each chunk in turn; where that can't be, the reason is raised."""
    if not chunks:
        return []
    count = len(evidence.labels)
    chunk = chunk_of(np.arange(count), chunks)
    if len(np.unique(chunk)) < chunks:
        raise NoValue(f"{count:,} examples do not fill {chunks} chunks.")
    return [evidence.part(chunk != number) for number in range(chunks)]


def _number_or_nan(score: TransferScore, evidence: Evidence) -> float:
    try:
        return score.value(evidence)
    except NoValue:
        return np.nan  # the table then states that there is no error, and why


def _require_same_examples(scored: Sequence[_ScoredModel], paired: bool) -> None:
    """Refuse models that saw other examples, and a call in which no model could be run."""
    read = [model for model in scored if len(model.labels)]
    if not read:
        first = next(model for model in scored if model.fault is not None)
        assert first.fault is not None
        raise type(first.fault)(f"no model could be scored; {first.name}: {first.fault}")
    for model in read[1:]:
        if not np.array_equal(model.labels, read[0].labels) or (paired and model.digest != read[0].digest):
            raise InvalidValue(
                f"{model.name!r} was given other examples than {read[0].name!r}, or the same in another order; pass "
                "data that come in the same order each time, such as a loader with shuffle=False."
            )


def _ranking(
    experiment: Experiment, scored: Sequence[_ScoredModel], scores: Sequence[TransferScore], chunks: int, call: str
) -> Ranking:
    first = next(model for model in scored if len(model.labels))
    class_sizes = np.bincount(first.labels)
    chunk_sizes = np.bincount(chunk_of(np.arange(len(first.labels)), chunks)) if chunks else np.array([])
    data = experiment.data if isinstance(experiment.data, str) else first.data
    data = first.data if len({model.data for model in scored}) == 1 else data  # each processed for its model
    provenance = {"call": call} | {f"weights of {model.name}": model.weights for model in scored}
    provenance |= {f"features of {model.name}": f"{model.width} wide" for model in scored if model.width}
    provenance |= {"chunks": str(chunks), "seed": str(experiment.seed), "data digest": scored[0].digest or "not known"}
    return Ranking(
        score=scores[0].name,
        tables={score.name: _table(score, scored, data, chunk_sizes) for score in scores},
        costs={score.name: float(score.passes) for score in scores},
        reliability={score.name: RELIABILITY[score.name] for score in scores if score.name in RELIABILITY},
        parameters={model.name: model.parameters for model in scored},
        data=data,
        examples=len(first.labels),
        classes=len(class_sizes),
        version=__version__,
        caveats=tuple(dict.fromkeys(_caveats(scored, scores, class_sizes))),
        provenance=provenance,
    )


def _table(score: TransferScore, scored: Sequence[_ScoredModel], data: str, sizes: Array) -> Values:
    name = score.name
    filled = len(sizes) > 1 and bool((sizes > 0).all())
    without = np.full(len(sizes), np.nan)
    rows = [model.replicates.get(name, without) for model in scored]
    replicates = np.array([row if len(row) else without for row in rows]).T[:, None] if filled else None
    return Values(
        quantity=score.quantity,
        layers_a=(data,),
        layers_b=tuple(model.name for model in scored),
        values=np.array([[model.values.get(name, np.nan) for model in scored]]),
        missing={(data, model.name): model.missing[name] for model in scored if name not in model.values},
        statistic="Evidence",
        replicates=replicates,
        chunk_sizes=tuple(sizes.tolist()) if filled else (),
        error_reasons={
            (data, model.name): model.without_error for model in scored if model.without_error and name in model.values
        },
        axes=("data", "model"),
    )


def _caveats(scored: Sequence[_ScoredModel], scores: Sequence[TransferScore], class_sizes: Array) -> list[Caveat]:
    caveats = [caveat for model in scored for caveat in model.caveats]
    if class_sizes.min() < FEW:
        rare = int((class_sizes < FEW).sum())
        sentence = (
            f"{rare} of {len(class_sizes)} classes have fewer than {FEW} examples, the rarest {class_sizes.min()}; "
            "take more."
        )
        caveats.append(Caveat("rare-classes", sentence))
    wide = [model.name for model in scored if model.width >= class_sizes.sum()]
    if wide and any(score.name == "h_score" for score in scores):
        sentence = (
            f"h_score is the same for all features as wide as there are examples, {class_sizes.sum():,}: those of "
            f"{', '.join(wide)}; take h_score_regularised, or more examples."
        )
        caveats.append(Caveat("wide-features", sentence))
    return caveats
