"""Transfer: which pretrained model to start from, its accuracy without training, and the similarity of tasks.

`recommend` ranks several pretrained models for some labelled data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from netkin import __version__
from netkin.applications.transfer.evidence import (
    Array,
    Evidence,
    adaptation_score,
    evidence_of,
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
from netkin.applications.transfer.tasks import compare_tasks, seed_values
from netkin.comparing.feed import data_name
from netkin.comparing.sides import on_device
from netkin.errors import ForwardError, InvalidValue, NetkinError, NoValue, SourceError, UnknownName
from netkin.identity import described_call, weights_digest
from netkin.progress import ProgressOption, reported, showing
from netkin.representations.inputs import Forward, Transform, reshuffles
from netkin.representations.layers import refuse_lazy
from netkin.results import Ranking, Values
from netkin.results.caveats import Caveat
from netkin.results.records import distinct
from netkin.settings import loaders_kept
from netkin.sources import load_data, load_model
from netkin.sources.batches import sample
from netkin.sources.weights import remark_on
from netkin.statistics.collector import chunk_of

__all__ = [
    "SCORES", "KernelRidge", "TaskEmbedding", "adaptation_score", "compare_tasks", "fisher_rao_distance",
    "fisher_rao_norm", "kernel_ridge", "layer_embeddings", "load_kernel_ridge", "mean_embedding_norm", "recommend",
    "seed_values", "task2vec", "task2vec_cosine", "task2vec_distance", "transfer_scores",
]  # fmt: skip

CHUNKS = 20
FEW = 5  # examples of a class, below which a score says little


@dataclass(frozen=True)
class _RecommendOptions:
    """The options for every model."""

    scores: Sequence[TransferScore]
    data: Any
    examples: int | None
    seed: int
    chunks: int  # 0 for no standard errors
    device: Any
    of_each: Mapping[str, Any]  # layer, forward and transform, for all models or by their names

    @property
    def gradients(self) -> bool:
        return any(score.needs_gradients for score in self.scores)

    def of(self, model: str) -> dict[str, Any]:
        """Return layer, forward and transform of one model."""
        return {name: one.get(model) if isinstance(one, Mapping) else one for name, one in self.of_each.items()}


@dataclass
class _Found:
    """What is found of one model: numbers by score, or the reasons why there are none."""

    name: str
    parameters: int = 0
    origin: str = ""
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


def recommend(
    models: Mapping[str, nn.Module | str] | Iterable[str],
    data: Any,
    *,
    score: str | None = None,
    scores: Iterable[str] | None = None,
    examples: int | None = None,
    errors: bool = True,
    chunks: int = CHUNKS,
    layers: str | Mapping[str, str] | None = None,
    transforms: Transform | Mapping[str, Transform] | None = None,
    forwards: Forward | Mapping[str, Forward] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> Ranking:
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
        examples: how many examples to read; of data by name a sample drawn by `seed`, else the first; None for all.
        errors: whether to take standard errors.
        chunks: how many chunks of examples are left out in turn.
        layers: the layer whose outputs are the features, for all models or by name; by default the one before the last.
        transforms: a function of the inputs of a batch, for all models or by name.
        forwards: a function ``forward(model, batch)`` that runs a model, for all models or by name.
        device: where the models run; by default where they are.
        seed: of the sample of examples.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> labels = torch.arange(200) % 3
        >>> inputs = torch.eye(4)[labels] + 0.3 * torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> models = {name: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for name in ("sees", "blind")}
        >>> _ = nn.init.eye_(models["sees"][0].weight), nn.init.ones_(models["blind"][0].weight)
        >>> ranking = recommend(models, [(inputs, labels)], score="knn", progress=False)
        >>> ranking.best, ranking.lead.clear
        ('sees', True)
    """
    named = _named(models)
    beside = scores if scores is not None else [BESIDE] if score is None else []
    wanted = [find_score(one) for one in dict.fromkeys([score or DEFAULT, *beside])]
    of_each = {"layer": layers, "forward": forwards, "transform": transforms}
    asked = _RecommendOptions(wanted, data, examples, seed, chunks if errors else 0, device, of_each)
    _refuse(named, asked)
    with showing(progress):
        found = [_found(name, named, asked) for name in reported(named, "scoring", "models")]
    _refuse_unpaired(found, paired=not isinstance(data, str))
    return _ranking(found, asked)


def _named(models: Any) -> dict[str, Any]:
    if isinstance(models, Mapping):
        named = dict(models)
    else:
        if isinstance(models, (str, nn.Module)):
            raise InvalidValue(
                f"`models` are several; got one {type(models).__name__}. Give a mapping or a list of names.",
                argument="models",
            )
        listed = list(models)
        strange = next((one for one in listed if not isinstance(one, str)), None)
        if strange is not None:
            kind = type(strange).__name__
            raise InvalidValue(
                f"a list of `models` holds names; got a {kind}. Give models as a mapping of their names."
            )
        named = dict(zip(distinct(listed, "models"), listed, strict=True))
    if not named:
        raise InvalidValue("`models` holds no model; give at least one.", argument="models")
    return named


def _refuse(named: Mapping[str, Any], asked: _RecommendOptions) -> None:
    """Refuse before the work what would end it."""
    if asked.chunks == 1:
        raise InvalidValue("standard errors need at least 2 chunks; got 1.")
    for what, one in asked.of_each.items():
        stranger = next((name for name in one if name not in named), None) if isinstance(one, Mapping) else None
        if stranger is not None:
            raise UnknownName(f"`{what}s` names {stranger!r}, which is none of the models {', '.join(named)}.")
    if len(named) > 1 and (hasattr(asked.data, "__next__") or reshuffles(asked.data)):
        raise InvalidValue(
            "every model must see the same examples in the same order, and these data give them once or in another "
            "order each time; pass a list of batches, or a loader with shuffle=False."
        )


def _found(name: str, models: Mapping[str, nn.Module | str], asked: _RecommendOptions) -> _Found:
    """Return all that one of the models gives; one that can't be run has the fault."""
    given = models[name]
    model = load_model(given, seed=list(models).index(name)) if isinstance(given, str) else given
    refuse_lazy(model)
    found = _Found(name, sum(weight.numel() for weight in model.parameters()), weights_digest(model))
    data = _data(given, asked)
    found.data, random = data_name(data), remark_on(model)
    found.caveats = tuple(Caveat("data", remark) for remark in getattr(data, "remarks", ()))
    found.caveats += (Caveat("random-weights", random),) if random else ()
    try:
        with on_device(model, asked.device), loaders_kept(data):
            evidence, found.missing = _evidence(model, data, asked, asked.of(name))
    except (SourceError, UnknownName):
        raise
    except NetkinError as fault:
        found.fault, found.missing = fault, {score.name: str(fault).rstrip(".") for score in asked.scores}
        return found
    found.labels, found.digest, found.width = evidence.labels, evidence.digest, evidence.features.shape[1]
    _take_scores(found, evidence, asked)
    return found


def _data(given: nn.Module | str, asked: _RecommendOptions) -> Any:
    """Return the data as a model takes them: those of a name pass through what the model's own folder says."""
    if not isinstance(asked.data, str):
        return asked.data
    return sample(load_data(asked.data, models=[given]), asked.examples, seed=asked.seed)


def _evidence(
    model: nn.Module, data: Any, asked: _RecommendOptions, options: dict[str, Any]
) -> tuple[Evidence, dict[str, str]]:
    """Return the evidence, and why scores that read gradients have no value where the model has no logits."""
    read = partial(evidence_of, model, data, examples=asked.examples, **options)
    if not asked.gradients:
        return read(), {}
    try:
        return read(gradients=True), {}
    except ForwardError as fault:
        plain = [score for score in asked.scores if not score.needs_gradients]
        if not plain:
            raise
        why = str(fault).rstrip(".")
        return read(), {score.name: why for score in asked.scores if score.needs_gradients}


def _take_scores(found: _Found, evidence: Evidence, asked: _RecommendOptions) -> None:
    """Take every score of all examples, and of all but each chunk."""
    try:
        parts = _parts(evidence, asked.chunks)
    except NoValue as reason:
        parts, found.without_error = [], str(reason).rstrip(".")
    for score in asked.scores:
        try:
            found.values[score.name] = score.value(evidence)
        except NoValue as reason:
            found.missing.setdefault(score.name, str(reason).rstrip("."))
            continue
        found.replicates[score.name] = np.array([_number_or_nan(score, part) for part in parts])


def _parts(evidence: Evidence, chunks: int) -> list[Evidence]:
    """Return the evidence without each chunk in turn; where that can't be, the reason is raised."""
    if not chunks:
        return []
    count = len(evidence.labels)
    own = chunk_of(np.arange(count), chunks)
    if len(np.unique(own)) < chunks:
        raise NoValue(f"{count:,} examples do not fill {chunks} chunks.")
    return [evidence.part(own != chunk) for chunk in range(chunks)]


def _number_or_nan(score: TransferScore, evidence: Evidence) -> float:
    try:
        return score.value(evidence)
    except NoValue:
        return np.nan  # the table then states that there is no error, and why


def _refuse_unpaired(found: Sequence[_Found], paired: bool) -> None:
    """Refuse models that saw other examples, and a call in which no model could be run."""
    seen = [one for one in found if len(one.labels)]
    if not seen:
        first = next(one for one in found if one.fault is not None)
        assert first.fault is not None
        raise type(first.fault)(f"no model could be scored; {first.name}: {first.fault}")
    for one in seen[1:]:
        if not np.array_equal(one.labels, seen[0].labels) or (paired and one.digest != seen[0].digest):
            raise InvalidValue(
                f"{one.name!r} was given other examples than {seen[0].name!r}, or the same in another order; pass data "
                "that come in the same order each time, such as a loader with shuffle=False."
            )


def _ranking(found: Sequence[_Found], asked: _RecommendOptions) -> Ranking:
    first = next(one for one in found if len(one.labels))
    counts = np.bincount(first.labels)
    sizes = np.bincount(chunk_of(np.arange(len(first.labels)), asked.chunks)) if asked.chunks else np.array([])
    data = asked.data if isinstance(asked.data, str) else first.data
    named = first.data if len({one.data for one in found}) == 1 else data  # each processed for its model
    tables = {score.name: _table(score, found, named, sizes) for score in asked.scores}
    return Ranking(
        score=asked.scores[0].name,
        tables=tables,
        costs={score.name: float(score.passes) for score in asked.scores},
        reliability={score.name: RELIABILITY[score.name] for score in asked.scores if score.name in RELIABILITY},
        parameters={one.name: one.parameters for one in found},
        data=named,
        examples=len(first.labels),
        classes=len(counts),
        version=__version__,
        caveats=tuple(dict.fromkeys(_caveats(found, asked, counts))),
        provenance=_provenance(found, asked),
    )


def _table(score: TransferScore, found: Sequence[_Found], data: str, sizes: Array) -> Values:
    name, models = score.name, tuple(one.name for one in found)
    whole = len(sizes) > 1 and bool((sizes > 0).all())
    none = np.full(len(sizes), np.nan)
    filled = [one.replicates.get(name, none) for one in found]
    replicates = np.array([own if len(own) else none for own in filled]).T[:, None] if whole else None
    reasons = {(data, one.name): one.without_error for one in found if one.without_error and name in one.values}
    return Values(
        quantity=score.quantity,
        layers_a=(data,),
        layers_b=models,
        values=np.array([[one.values.get(name, np.nan) for one in found]]),
        missing={(data, one.name): one.missing[name] for one in found if name not in one.values},
        statistic="Evidence",
        replicates=replicates,
        chunk_sizes=tuple(sizes.tolist()) if whole else (),
        error_reasons=reasons,
        axes=("data", "model"),
    )


def _caveats(found: Sequence[_Found], asked: _RecommendOptions, counts: Array) -> list[Caveat]:
    said = [caveat for one in found for caveat in one.caveats]
    if counts.min() < FEW:
        rare = int((counts < FEW).sum())
        sentence = (
            f"{rare} of {len(counts)} classes have fewer than {FEW} examples, the rarest {counts.min()}; take more."
        )
        said.append(Caveat("rare-classes", sentence))
    wide = [one.name for one in found if one.width >= counts.sum()]
    if wide and any(score.name == "h_score" for score in asked.scores):
        sentence = (
            f"h_score is the same for all features as wide as there are examples, {counts.sum():,}: those of "
            f"{', '.join(wide)}; take h_score_regularised, or more examples."
        )
        said.append(Caveat("wide-features", sentence))
    return said


def _provenance(found: Sequence[_Found], asked: _RecommendOptions) -> dict[str, str]:
    own = {name: one for name, one in asked.of_each.items() if one is not None}
    scores = [score.name for score in asked.scores]
    call = described_call("nk.recommend", models=[one.name for one in found], score=scores[0], scores=scores[1:], **own)
    facts = {"call": call} | {f"weights of {one.name}": one.origin for one in found}
    facts |= {f"features of {one.name}": f"{one.width} wide" for one in found if one.width}
    return facts | {"chunks": str(asked.chunks), "seed": str(asked.seed), "data digest": found[0].digest or "not known"}
