"""Evidence: features, probabilities and labels of a pretrained model on labelled data, from one forward pass.

A mean embedding is the mean of a data set in the feature space of a model's features and gradients:
Tang et al. (2020), sections 5.3, 5.4 and appendix F.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.experiment import DECLARED, Experiment, ExperimentOptions
from netkin.arrays import as_matrix, label_tensor, resolution_of
from netkin.comparing.spec import takes_options
from netkin.errors import ForwardError, InvalidValue, NetkinError, NoValue, ShapeError
from netkin.identity.data import DataDigest, contents
from netkin.representations import layers
from netkin.representations.activations import ModelReading, RowsByLayer
from netkin.representations.gradients import ExampleLosses, Target, are_probabilities, logits_of
from netkin.representations.inputs import Forward, batch_length, call, inputs_of, labels_of
from netkin.representations.layers import Spec, modules
from netkin.representations.shapes import Shape
from netkin.sources.names import by_name
from netkin.statistics.outer_products import LayerEmbeddings

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = np.ndarray
NO_JOB = "test save overwrite partial"  # options of an experiment that are none of a single pass


@dataclass(frozen=True)
class Evidence:
    """What a model gives for labelled data: features and probabilities, a row for each example, and the labels.

    `gradients` are those of the tempered loss at the features, where they were requested. `digest` tells inputs and
    labels, in their order, from others; `numbers` are the examples' places in that order, which a part keeps.
    `resolution` is the rounding unit of the features as they came, before they were raised to float64.
    """

    features: Array
    labels: Array
    probabilities: Array | None = None
    gradients: Array | None = None
    digest: str = ""
    numbers: Array = field(default_factory=lambda: np.arange(0))
    resolution: float = float(np.finfo(np.float64).eps)

    @classmethod
    def of(
        cls,
        features: Any,
        labels: Any,
        probabilities: Any = None,
        gradients: Any = None,
        digest: str = "",
        resolution: float | None = None,
    ) -> Evidence:
        """Return checked evidence, in float64, with labels counted from 0 without gaps.

        Args:
            features: a row for each example.
            labels: the number of each example's class.
            probabilities: those of the model's own classes.
            gradients: those of each example's loss at its features.
            digest: identifies the data.
            resolution: the rounding unit of the features, by default that of their type.
        """
        matrix = as_matrix(features, "features").detach().cpu()
        rows = matrix.double().numpy()
        given = np.asarray(labels)
        if given.shape != (len(rows),):
            raise ShapeError(
                f"there are {len(rows):,} rows of features and labels of shape {given.shape}; give one each."
            )
        if given.dtype.kind not in "iub":
            raise InvalidValue(f"labels of classes are whole numbers; got {given.dtype}.")
        classes, compact = np.unique(given, return_inverse=True)
        if len(classes) < 2:
            raise InvalidValue(
                f"all {len(rows):,} examples have the label {classes[0]}; a score needs two classes or more."
            )
        known = None if probabilities is None else _probabilities(probabilities, len(rows))
        pulls = None if gradients is None else _gradients(gradients, rows.shape)
        unit = resolution or resolution_of(features, matrix)
        return cls(rows, compact, known, pulls, digest, np.arange(len(rows)), unit)

    def part(self, rows: Array) -> Evidence:
        """Return the evidence of some examples, chosen by a mask; a part that lacks a class is refused."""
        missing = self.classes - len(np.unique(self.labels[rows]))
        if missing:
            raise NoValue(
                f"{missing} of the {self.classes} classes {'have' if missing > 1 else 'has'} no example in a part of "
                f"{int(np.sum(rows)):,}; take more examples or fewer chunks."
            )
        known, pulls = (None if one is None else one[rows] for one in (self.probabilities, self.gradients))
        return Evidence(
            self.features[rows], self.labels[rows], known, pulls, numbers=self.numbers[rows], resolution=self.resolution
        )

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def one_hot(self) -> Array:
        return np.eye(self.classes)[self.labels]

    @property
    def source(self) -> Array:
        """The probabilities of the model's own classes."""
        if self.probabilities is None:
            raise NoValue(
                "this score reads the model's probabilities, and the model has no classes of its own; ask for scores "
                "that read features, such as 'logme'."
            )
        return self.probabilities

    @property
    def pulls(self) -> Array:
        """The gradients of the model's own loss at the features."""
        if self.gradients is None:
            raise NoValue(
                "this score reads gradients of the model's own loss, and the model has no classes of its own."
            )
        return self.gradients

    def by_class(self) -> Iterator[Array]:
        """Yield the features of each class."""
        for one in range(self.classes):
            yield self.features[self.labels == one]


def evidence_of(
    model: nn.Module, data: Any, layer: str | None = None, *, gradients: bool = False,
    **options: Unpack[ExperimentOptions],
) -> Evidence:  # fmt: skip
    """Return what a model gives for labelled data: features at a layer, by default the last one before its output.

    With `gradients` those of the tempered loss at the features as well, by a backward pass.
    """
    experiment, chosen = Experiment(models={"model": model}, data=data, **options), layer or feature_layer(model)
    read = _Reading(chosen, experiment.forward)
    reading = ModelReading(model, Target() if gradients else None, None, read.forward, experiment.transform)
    with experiment.lending(model):
        resolutions = reading.run(read.add, data, [chosen], experiment.examples)
    return read.evidence(resolutions[chosen])


class _Reading:
    """What is kept of a pass: the model's outputs are noted as it runs, and cut to what scores read."""

    def __init__(self, layer: str, forward: Forward | None):
        self._layer, self._forward, self._outputs = layer, forward, list[Any]()
        self._rows, self._labels, self._pulls = list[Tensor](), list[Tensor](), list[Tensor]()
        self._logits, self._digest = list[Tensor | None](), DataDigest(labels=True)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        try:
            self._outputs.append(call(model, batch, self._forward))
        except NetkinError:
            raise
        except Exception as fault:  # a model may raise anything
            shape = tuple(getattr(inputs_of(batch), "shape", ()))
            said = next(iter(str(fault).strip().splitlines()), "").rstrip(".")
            raise ForwardError(
                f"it could not be run on inputs of shape {shape}: {type(fault).__name__}: {said}; give data of the "
                "size and channels that it takes, or change its inputs by a function, `transform`."
            ) from fault
        return self._outputs[-1]

    def add(self, batch: Any, features: RowsByLayer, gradients: RowsByLayer) -> None:
        rows, pulls, given = features[self._layer], gradients.get(self._layer), labels_of(batch)
        if given is None:
            raise InvalidValue("a transfer score needs labels, and the batches hold none; give (inputs, labels).")
        if not np.ndim(given):
            raise ShapeError(
                f"a transfer score needs a label for each example; got {given!r} for {len(rows)} examples."
            )
        labels = label_tensor(given).cpu()
        if labels.shape != (len(rows),):
            raise ShapeError(
                f"there are {len(rows):,} rows of features and labels of shape {tuple(labels.shape)}; give one each."
            )
        start = self._digest.count
        self._digest.update(batch, np.arange(start, start + len(rows)))
        self._rows.append(rows.detach().cpu())
        self._labels.append(labels)
        self._logits.append(_class_logits(self._outputs, len(rows)))
        if pulls is not None:
            self._pulls.append(pulls.cpu())
        self._outputs.clear()

    def evidence(self, resolution: float) -> Evidence:
        known, probabilities = [one for one in self._logits if one is not None], None
        if len(known) == len(self._rows):
            outputs = torch.cat(known)
            logits = outputs.float().log() if are_probabilities(outputs) else outputs.float()
            probabilities = logits.softmax(1)
        pulls = torch.cat(self._pulls) if self._pulls else None
        features, labels = torch.cat(self._rows), torch.cat(self._labels).numpy()
        return Evidence.of(features, labels, probabilities, pulls, self._digest.hex, resolution)


def feature_layer(model: nn.Module) -> str:
    """Return the layer whose outputs are the features: the last one before the model's output.

    A softmax at the end belongs to the output, so that features are the same with it and without.
    """
    names = layers(model)
    if isinstance(modules(model)[names[-1]], nn.Softmax | nn.LogSoftmax):
        names = names[:-1]
    if len(names) < 2:
        raise InvalidValue(f"the model has {len(names)} layer to choose from; name the one whose outputs are features.")
    return names[-2]


def _class_logits(outputs: list[Any], count: int) -> Tensor | None:
    """Return the logits of the model's own classes for `count` examples; None where it has none, as without a head."""
    for output in reversed(outputs):  # which may hold those of a few examples, from which axes were learnt
        try:
            found = logits_of(output)
        except ForwardError:
            return None
        if len(found) == count:
            return found.detach().cpu() if found.ndim == 2 and found.shape[1] > 1 else None
    return None


def _gradients(given: Any, shape: tuple[int, ...]) -> Array:
    found = as_matrix(given, "gradients").detach().cpu().double().numpy()
    if found.shape != shape:
        raise ShapeError(
            f"`gradients` must be like the features, of shape {shape}; got {found.shape}.", argument="gradients"
        )
    return found


def _probabilities(given: Any, count: int) -> Array:
    found = as_matrix(given, "probabilities").detach().cpu().double().numpy()
    if len(found) != count or (found < 0).any() or not np.allclose(found.sum(1), 1, atol=1e-3):
        raise ShapeError(
            f"`probabilities` must hold for each of {count:,} examples numbers of 0 or more that sum to 1; got shape "
            f"{found.shape}.",
            argument="probabilities",
        )
    return found / found.sum(1, keepdims=True)


@by_name(models="model", data="data")
@takes_options(NO_JOB, DECLARED)
def layer_embeddings(
    model: nn.Module,
    data: Any,
    layers: Spec = None,
    *,
    target: str | ExampleLosses = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
    shape: Shape | Mapping[str, Shape] = None,
    sample: int = 2048,
    buckets: int = 0,
    exact_model: bool = False,
    **options: Unpack[ExperimentOptions],
) -> LayerEmbeddings:
    """Return the mean embeddings of a data set at a model's layers, from one forward and one backward pass.

    ``made.embedding(layer)`` holds ‖μ‖, ‖K‖, Tr K and what Eqs. 19 and 48 make of them; ``made.sketched(layer)`` the
    same as the authors' code reads it off a sketch. Default layers from which no path leads to the loss are left out.

    Args:
        model: the model, which is left as it was.
        data: a loader, an iterable of batches, or one array of inputs; with target="labels" batches hold labels.
        layers: names, globs, module types or a list of those; None for the default layers.
        target: the loss of the gradients: "tempered", "labels", "predicted" or a function (see `nk.gradients`).
        beta: the exponent by which the prediction is tempered, from 0 to below 1.
        outputs: what the model gives: "categorical" logits, "multilabel" logits or "continuous" numbers.
        shape: what one example is, one row each, for all layers or by name; None for `pool` and `mean`.
        examples: how many examples to read; None for all.
        sample: of how many examples rows are kept: beyond it ‖K‖ is estimated from their pairs.
        buckets: into how many buckets to sketch, for `sketched`; 0 for none.
        seed: of the sample and of the buckets.
        exact_model: whether float32 in the model on a GPU must not be rounded to TF32.
    """
    wanted = Target(target, beta, outputs)
    experiment, made = Experiment(models={"model": model}, data=data, **options), list[LayerEmbeddings]()
    reading = ModelReading(model, wanted, shape, experiment.forward, experiment.transform, exact_model, one_row=True)

    def take(batch: Any, features: RowsByLayer, gradients: RowsByLayer) -> None:
        if not made:
            made.append(LayerEmbeddings(list(features), sample=sample, buckets=buckets, seed=experiment.seed))
        what = contents(batch, batch_length(batch)).cpu().numpy() if buckets else None
        made[0].update(features, gradients, contents=what)

    with experiment.lending(model):
        reading.run(take, data, layers, experiment.examples)
    return made[0]


def mean_embedding_norm(model: nn.Module, data: Any, layers: Spec = None, **options: Any) -> dict[str, float]:
    """Return for each layer ‖μ‖, the norm of the mean over the examples of g fᵀ; options as in `layer_embeddings`.

    It is ``√(mean of K)`` over all pairs of examples, with K = K_f ∘ K_g, neither centred nor sketched. The paper reads
    a large one as a data set to which the model must adapt.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.eye_(model.weight)
        >>> found = mean_embedding_norm(model, torch.tensor([[4.0, 0.0]]), "")  # g is p - q = (.1012, -.1012)
        >>> round(found[""], 3)
        0.573
    """
    made = layer_embeddings(model, data, layers, **options)
    return {name: made.embedding(name).norm for name in made.names}


def adaptation_score(model: nn.Module, data: Any, layers: Spec = None, **options: Any) -> dict[str, float]:
    """Return for each layer ``log(‖μ‖ / (‖K‖/N²))``, Eq. 48, with the exact K; options as in `layer_embeddings`.

    Section 5.4 of the paper reads a high score as a data set that is similar to the model's own, appendix F as one to
    which the model must adapt. It grows with log N: compare data sets with the same number of `examples`.
    """
    made = layer_embeddings(model, data, layers, **options)
    return {name: made.embedding(name).adaptation_score for name in made.names}
