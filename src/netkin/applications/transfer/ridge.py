"""Kernel ridge regression on sketched kernels: the classes of new examples, from a model that is not trained further.

`kernel_ridge(model, train, *, layers=None, kernel="features", buckets=512, seed=0, ridge=None, shape=None, ...)` reads
the labelled data once and returns a `KernelRidge`, one fit for each layer. ``fit.predict(data)`` and
``fit.accuracy(data)`` are mappings of layers to class numbers and to shares; ``fit.ridge`` holds the ridge of each
layer.

Appendix G of Tang et al. (2020): with K̃ the kernel of the buckets, T̃ their labels and k(x) the kernel of the buckets
with a new example, the scores of the classes are ``T̃ (K̃ + αI)⁻¹ k(x)``. Gradients are those of the tempered loss, so
that a new example needs no label.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin import files
from netkin.applications.experiment import DECLARED, Experiment, ExperimentOptions
from netkin.applications.transfer.evidence import NO_JOB
from netkin.arrays import summing_dtype
from netkin.comparing.spec import takes_options
from netkin.errors import InvalidValue, MemoryLimit, NoValue
from netkin.identity import weights_digest
from netkin.identity.data import contents
from netkin.memory import format_bytes, free_memory
from netkin.progress import ProgressOption
from netkin.representations.activations import ModelReading, RowsByLayer
from netkin.representations.gradients import Target
from netkin.representations.inputs import Forward, Transform, batch_length, labels_of
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape
from netkin.results.labels import plural
from netkin.sources.names import by_name
from netkin.statistics.kernel_pairs import KERNELS, checked_kernel
from netkin.statistics.sketches import LABELS, LayerSketches, SketchSettings, class_labels, psi_width, sketched_part

if TYPE_CHECKING:
    from typing_extensions import Unpack

KIND = "kernel ridge"  # of a file
RIDGES = 10.0 ** np.arange(-9, 4.5, 0.5)  # tried, as multiples of Tr K̃ over the number of examples


@by_name(models="model", data="train")
@takes_options(NO_JOB, DECLARED)
def kernel_ridge(
    model: nn.Module,
    train: Any,
    *,
    layers: Spec = None,
    kernel: str = "features",
    buckets: int = 512,
    stacks: int = 1,
    ridge: float | None = None,
    classes: int | None = None,
    shape: Shape | Mapping[str, Shape] = None,
    beta: float = 0.5,
    outputs: str = "categorical",
    **options: Unpack[ExperimentOptions],
) -> KernelRidge:
    """Return a classifier at each layer of a model, by ridge regression from the sketched kernel onto the labels.

    One pass over the data, whose memory does not grow with them.

    Args:
        model: the model, which is left as it was.
        train: a loader, or an iterable of batches of (inputs, labels).
        layers: names, globs, module types or a list of those; None for the default layers.
        kernel: "features", which needs no gradients, "psi", "hadamard" (the paper's), "gradients", "sum" or "product".
        buckets: into how many sums the examples go.
        stacks: into how many of these sums each example goes.
        seed: of the buckets and the signs of the examples.
        ridge: α as a multiple of Tr K̃ over the number of examples; None for the best of `RIDGES`, for each layer,
            when every bucket is predicted from the others.
        classes: how many there are; None for as many as the labels show.
        shape: what one example is, for all layers or by name; None for `pool` and `mean`.
        beta: the exponent by which the prediction is tempered whose loss gives the gradients.
        outputs: what the model gives: "categorical" or "multilabel" logits.
        examples: how many examples to read; None for all.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> points = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.1], [-2.0, 0.1]])
        >>> fit = kernel_ridge(model, [(points, torch.tensor([0, 1, 0, 1]))], layers="0", kernel="features", ridge=0.1)
        >>> fit.accuracy([(3 * points, torch.tensor([0, 1, 0, 1]))])
        {'0': 1.0}
    """
    parts = KERNELS[checked_kernel(kernel)]
    if kernel == "transport":
        raise InvalidValue(
            "kernel='transport' has no value between a bucket and a new example; take another kernel.",
            argument="kernel",
        )
    if ridge is not None and not ridge > 0:
        raise InvalidValue(f"`ridge` must be above 0; got {ridge:g}.", argument="ridge")
    if classes is not None and not 2 <= classes <= buckets:
        raise InvalidValue(
            f"`classes` must be at least 2 and at most as many as the {buckets:,} buckets; got {classes}.",
            argument="classes",
        )
    experiment = Experiment(models={"model": model}, data=train, **options)
    settings = SketchSettings(buckets, stacks, experiment.seed, (*parts, "labels"), beta=beta, outputs=outputs)
    target = Target("tempered", beta, outputs)
    reading_options = {"shape": shape, "forward": experiment.forward, "transform": experiment.transform}
    reading = _reading(model, kernel, target, reading_options)
    with experiment.lending(model):
        sketches = _sketched(reading, experiment, layers, settings, classes)
    fits, left_out = {}, {}
    for name in map(str, sketches.names):
        own = sketches.sums(name)
        try:
            fits[name] = fitted(own.parts, own.n, kernel, ridge)
        except NoValue as fault:
            left_out[name] = f"layer {name!r}: {fault}"
    if left_out and (layers is not None or not fits):
        raise NoValue(next(iter(left_out.values())))
    return KernelRidge(
        reading, experiment.seed, target, fits, classes or len(next(iter(fits.values())).coefficients), left_out
    )


@dataclass(frozen=True)
class LayerRidge:
    """The fit at one layer: the scores of the classes are ``coefficients k(x)``.

    `ridge` is α as a multiple of Tr K̃ over the number of examples; `sums` hold the buckets of each part that the
    kernel reads.
    """

    kernel: str
    ridge: float
    coefficients: Tensor  # T̃ (K̃ + αI)⁻¹, classes × buckets
    sums: Mapping[str, Tensor]
    _moved: dict[torch.device, list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def scores(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the scores of the classes, a row for each example, from what the kernel reads of it."""
        device = next(iter(rows.values())).device
        if device not in self._moved:
            self._moved[device] = [one.to(device, summing_dtype(device)) for one in self._factors()]
        factors = self._moved[device]
        products = [rows[part].to(one.dtype) @ one for part, one in zip(self.sums, factors, strict=False)]
        if self.kernel == "hadamard":
            return products[0] * products[1] @ factors[2]
        return sum(products[1:], products[0])

    def _factors(self) -> list[Tensor]:
        """Return what the rows are multiplied by: for a linear kernel the weights of the classes, width × classes."""
        if self.kernel == "hadamard":
            return [*(one.mT for one in self.sums.values()), self.coefficients.mT]
        return [(self.coefficients @ one).mT for one in self.sums.values()]


def fitted(sums: Mapping[str, Tensor], n: int, kernel: str, ridge: float | None = None) -> LayerRidge:
    """Return the fit to the sums over buckets of `n` examples: the parts that the kernel reads, and their labels.

    Any sums will do: with every example a bucket of its own it is kernel ridge regression on the exact kernel.
    """
    own = {part: sums[part].detach().cpu().double() for part in KERNELS[kernel]}
    wanted = sums["counts" if kernel == "hadamard" else "labels"].cpu().double()
    kernels = [one @ one.mT for one in own.values()]
    K = kernels[0] * kernels[1] if kernel == "hadamard" else sum(kernels[1:], kernels[0])
    mean = float(K.trace()) / n
    if not 0 < mean < float("inf"):
        raise NoValue(f"its kernel is {'zero for all examples' if mean == 0 else 'not finite'}.")
    # torch's own gives up on kernels of low rank with many empty buckets
    values, vectors = map(torch.from_numpy, np.linalg.eigh((K / mean).numpy()))
    values = values.clamp(min=0)
    turned = vectors.mT @ wanted
    if ridge is None:
        ridge = min(RIDGES.tolist(), key=lambda one: held_out_error(values, vectors, turned, one))
    coefficients = (vectors @ (turned / (values + ridge).unsqueeze(-1)) / mean).mT
    return LayerRidge(kernel, ridge, coefficients, own)


def held_out_error(values: Tensor, vectors: Tensor, turned: Tensor, ridge: float) -> float:
    """Return the mean squared error of the labels of a bucket that is predicted from all others.

    Without another fit: the residual of bucket m is ``(A T)ₘ / Aₘₘ`` with ``A = (K + αI)⁻¹``.
    """
    inverse = 1 / (values + ridge)
    residuals = vectors @ (inverse.unsqueeze(-1) * turned) / (vectors.square() @ inverse).unsqueeze(-1)
    return float(residuals.square().mean())


@dataclass(frozen=True)
class KernelRidge:
    """Classifiers at layers of a model, each fitted to the sketched kernel of labelled data."""

    reading: ModelReading
    seed: int
    target: Target
    fits: Mapping[str, LayerRidge]
    classes: int
    left_out: Mapping[str, str] = field(default_factory=dict)  # why default layers have no fit

    def __repr__(self) -> str:
        kernel = next(iter(self.fits.values())).kernel
        return f"KernelRidge of {self.classes} classes, kernel {kernel}, at {', '.join(self.fits)}"

    @property
    def layers(self) -> list[str]:
        return list(self.fits)

    @property
    def ridge(self) -> dict[str, float]:
        """The ridge of each layer: α as a multiple of Tr K̃ over the number of examples."""
        return {name: fit.ridge for name, fit in self.fits.items()}

    def predict(
        self, data: Any, *, examples: int | None = None, progress: ProgressOption = None
    ) -> dict[str, np.ndarray]:
        """Return the class of the highest score for each example, at each layer."""
        found: dict[str, list[np.ndarray]] = {name: [] for name in self.fits}

        def take(batch: Any, features: RowsByLayer, gradients: RowsByLayer) -> None:
            for name, fit in self.fits.items():
                guess = self._scores(fit, features[name], gradients.get(name)).argmax(1)
                found[name].append(guess.cpu().numpy())

        self.reading.run(take, data, self.layers, examples, progress)
        return {name: np.concatenate(classes) for name, classes in found.items()}

    @by_name(data="data")
    def accuracy(self, data: Any, *, examples: int | None = None, progress: ProgressOption = None) -> dict[str, float]:
        """Return the share of labelled examples whose class is predicted right, at each layer."""
        right, counts = dict.fromkeys(self.fits, 0), list[int]()

        def take(batch: Any, features: RowsByLayer, gradients: RowsByLayer) -> None:
            labels = torch.from_numpy(_labels(batch, self.classes))
            counts.append(len(labels))
            for name, fit in self.fits.items():
                guess = self._scores(fit, features[name], gradients.get(name)).argmax(1)
                right[name] += int((guess.cpu() == labels).sum())

        self.reading.run(take, data, self.layers, examples, progress)
        return {name: one / sum(counts) for name, one in right.items()}

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the fits to one file, without the model; over one of another kind only with `overwrite`."""
        reading = self.reading
        custom = {"forward": reading.forward, "transform": reading.transform}
        plain = reading.shape is None or isinstance(reading.shape, str)
        header = {
            "kernel": next(iter(self.fits.values())).kernel, "ridge": self.ridge, "seed": self.seed,
            "classes": self.classes, "beta": self.target.beta, "outputs": self.target.outputs,
            "shape": reading.shape if plain else None, "left_out": dict(self.left_out),
            "functions": [name for name, one in custom.items() if one is not None] + ([] if plain else ["shape"]),
            "weights": weights_digest(reading.model),
        }  # fmt: skip
        arrays: dict[str, np.ndarray] = {}
        for place, fit in enumerate(self.fits.values()):
            tensors = {"coefficients": fit.coefficients, **fit.sums}
            arrays |= {f"{place}/{name}": one.numpy() for name, one in tensors.items()}
        files.write(path, KIND, header, arrays, overwrite=overwrite)

    def _scores(self, fit: LayerRidge, features: Tensor, gradients: Tensor | None) -> Tensor:
        widths = {part: sums.shape[1] for part, sums in fit.sums.items()}
        return fit.scores({part: sketched_part(part, features, gradients, self.seed, widths[part]) for part in widths})


def load_kernel_ridge(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    shape: Shape | Mapping[str, Shape] = None,
    forward: Forward | None = None,
    transform: Transform | None = None,
) -> KernelRidge:
    """Return the fits that were saved at `path`, for the model that they were made with.

    Args:
        path: where they were saved.
        model: the model, with the weights that it had.
        shape: what one example is, where it was given by layer or as a function.
        forward: the function that runs the model, where one was given.
        transform: the function of the inputs, where one was given.
    """
    header, arrays = files.read(path, kind=KIND)
    given: dict[str, Any] = {"shape": shape, "forward": forward, "transform": transform}
    with files.damage_reported(path):
        fits = _unpacked(header, arrays)
        if not fits:
            raise ValueError("it holds no layer")
        target = Target("tempered", float(header["beta"]), str(header["outputs"]))
        seed, classes, left_out = int(header["seed"]), int(header["classes"]), dict(header["left_out"])
        lacks = [one for one in header["functions"] if given[one] is None]
        given["shape"] = header["shape"] if shape is None else shape
        weights = str(header["weights"])
    if lacks:
        raise InvalidValue(f"{str(path)!r} was made with a `{lacks[0]}` that no file can hold; pass the same.")
    if model is None or weights_digest(model) != weights:
        raise InvalidValue(f"{str(path)!r} reads the model with the weights {weights}; pass that model.")
    return KernelRidge(_reading(model, header["kernel"], target, given), seed, target, fits, classes, left_out)


def _unpacked(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, LayerRidge]:
    kernel, fits = checked_kernel(header["kernel"]), {}
    for place, (name, ridge) in enumerate(header["ridge"].items()):
        found = {one: torch.from_numpy(arrays[f"{place}/{one}"].copy()) for one in ("coefficients", *KERNELS[kernel])}
        coefficients = found.pop("coefficients")
        if any(one.shape[0] != coefficients.shape[1] for one in found.values()):
            raise ValueError(
                f"layer {name!r} has {coefficients.shape[1]} coefficients for each class, not one a bucket"
            )
        fits[name] = LayerRidge(kernel, float(ridge), coefficients, found)
    return fits


def _reading(model: nn.Module, kernel: str, target: Target, options: Mapping[str, Any]) -> ModelReading:
    """Return how a model is read: without gradients where the kernel needs none."""
    return ModelReading(model, None if kernel == "features" else target, one_row=True, **options)


def _require_memory(settings: SketchSettings, widths: Mapping[str, int]) -> None:
    """Refuse more buckets than there is memory for: their sums at all layers, and the kernel of one layer at a time."""
    buckets, parts = settings.buckets, [part for part in settings.parts if part not in LABELS]
    numbers = sum(psi_width(width, buckets) if part == "psi" else width for width in widths.values() for part in parts)
    matrices = 4 + 2 * len(parts)  # at the peak of their decomposition, measured
    sums, kernel, free = 8 * buckets * numbers, 8 * buckets**2, free_memory()
    need = sums + matrices * kernel
    if need > free:
        raise MemoryLimit(
            f"{buckets:,} buckets need {format_bytes(need)}: {format_bytes(sums)} for the sums of "
            f"{plural(len(widths), 'layer')}, and {matrices} matrices of buckets × buckets, {format_bytes(kernel)} "
            f"each, to solve one layer; {format_bytes(free)} are free. Use fewer buckets."
        )


def _sketched(
    reading: ModelReading, experiment: Experiment, layers: Spec, settings: SketchSettings, classes: int | None
) -> LayerSketches:
    """Return the sketches of labelled data, of two classes or more."""
    made, seen = list[LayerSketches](), set[int]()

    def take(batch: Any, features: RowsByLayer, gradients: RowsByLayer) -> None:
        labels = _labels(batch, classes)
        seen.update(np.unique(labels).tolist())
        if not made:
            _require_memory(settings, {name: rows.shape[1] for name, rows in features.items()})
            made.append(LayerSketches(list(features), settings))
        outputs = dict.fromkeys(features, (None, labels))
        fed = {"activations": features, "gradients": gradients, "outputs": outputs}
        made[0].update(fed, contents(batch, len(labels)).cpu().numpy())

    reading.run(take, experiment.data, layers, experiment.examples)
    if len(seen) < 2:
        raise InvalidValue(f"all examples have the label {seen.pop()}; a classifier needs two classes or more.")
    return made[0]


def _labels(batch: Any, classes: int | None) -> np.ndarray:
    """Return the labels of a batch; refuse those of other classes than the first `classes`."""
    labels = class_labels(labels_of(batch), batch_length(batch))
    if classes is not None and labels.max() >= classes:
        raise InvalidValue(f"there are {classes:,} classes, 0 to {classes - 1}, and a label is {labels.max()}.")
    return labels
