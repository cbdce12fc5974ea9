"""`LayerSketches` and `Sketch`: features and gradients summed into random buckets, for data sets of any sizes.

Every example falls into one of M buckets with a random sign (CountSketch), the same for its features and its gradients.
The sums of the buckets stand for the examples: inner products of sketches are right on average, with an error that
falls with √M. Bucket and sign follow from the seed and from what the example is, so that the order of the data, their
batches and the parts in which they were read do not matter, and examples of two data sets have nothing in common.

Labels can be summed beside them, one-hot: ``labels`` with the signs, as a linear kernel requests, and ``counts``
without, for the product of two sketched kernels, in which the sign of an example cancels.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.sparse import csc_matrix
from torch import Tensor

from netkin.arrays import as_matrix, summing_dtype
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName, did_you_mean
from netkin.statistics.collector import (
    Collector,
    CostEstimate,
    Key,
    Study,
    hashes,
    label,
    name_of,
    require_size,
    row_examples,
    row_numbers,
)
from netkin.statistics.kernel_pairs import (
    KERNELS,
    LOSS,
    KernelPair,
    KernelSide,
    LossSettings,
    checked_kernel,
    features_and_gradients,
)
from netkin.statistics.storage import Stored

if TYPE_CHECKING:
    from typing_extensions import Self

SKETCHING = ("buckets", "stacks", "seed", *LOSS)
SHARE = 2**21  # numbers that are worth a thread
PSI_WIDTH = 2048  # the least numbers that stand for g fᵀ where it has more
LABELS = ("labels", "counts")  # sums of one-hot labels, with signs and without


class Sketch(KernelPair):
    """Two layers, each sketched over its own data."""

    @classmethod
    def of(cls, X: Any, Y: Any, **options: Any) -> Sketch:
        """Return the pair of two layers, each given as (features, gradients); rows of one number are one example.

        `options` are those of `LayerSketches.of`.
        """
        return LayerSketches.of({"`X`": X, "`Y`": Y}, **options)["`X`", "`Y`"]


@dataclass(frozen=True)
class SketchSettings(LossSettings):
    """How many buckets, in how many stacks, from which seed, and what is summed in them."""

    buckets: int = 512
    stacks: int = 1
    seed: int = 0
    parts: tuple[str, ...] = ("features", "gradients")

    def __post_init__(self) -> None:
        if self.buckets < 1 or self.stacks < 1 or self.buckets % self.stacks:
            raise InvalidValue(
                f"a sketch needs at least 1 bucket, in stacks of equal height; got buckets={self.buckets}, "
                f"stacks={self.stacks}.",
                argument="buckets",
            )

    def joined(self, other: SketchSettings) -> SketchSettings | None:
        if replace(other, parts=self.parts) != self:
            return None
        return replace(self, parts=tuple(sorted({*self.parts, *other.parts})))


class LayerSketches(Collector):
    """Sketches of many layers, each over the data of its own model."""

    holds = "Sketch"
    feeds = frozenset({"activations", "gradients"})
    by_content = True

    def __init__(self, names: Sequence[Key], settings: SketchSettings):
        self.names, self.settings = list(names), settings
        self.layers = {name: BucketSums(settings.buckets) for name in self.names}

    @classmethod
    def feeds_for(cls, settings: SketchSettings) -> frozenset[str]:
        feeds = frozenset({"outputs"} if "labels" in settings.parts else ())
        return feeds | ({"activations"} if {*settings.parts} <= {"features", "labels"} else cls.feeds)

    @classmethod
    def settings_for(cls, measure: Any) -> SketchSettings:
        options = {name: value for name, value in measure.settings.items() if name in SKETCHING}
        return SketchSettings(**options, parts=KERNELS[checked_kernel(measure.settings["kernel"])])

    @classmethod
    def cost(cls, settings: SketchSettings, study: Study) -> CostEstimate | None:
        if study.spectral:
            return None
        buckets = settings.buckets
        numbers = 2 * buckets  # columns of the kernels of two layers, buckets × buckets each
        for layer in study.sizes:
            for part in settings.parts:
                if part != "labels":  # whose classes are few
                    numbers += psi_width(layer.width, buckets) if part == "psi" else layer.width
        words = f"Sketch of {', '.join(settings.parts)} in {buckets:,} buckets"
        return CostEstimate(8 * buckets * numbers, words, "sketches")

    @classmethod
    def start(cls, settings: SketchSettings, study: Study) -> Self:
        made = cls(list(study.layers), settings)
        for key, sums in made.layers.items():
            sums.resolution = study.resolutions.get(key, 0.0)
        return made

    @classmethod
    def of(
        cls, rows: Mapping[Key, Any], *, kernel: str = "hadamard", buckets: int = 512, stacks: int = 1, seed: int = 0
    ) -> Self:
        """Return sketches of layers given as (features, gradients) or features; rows of one number are one example."""
        made = cls(list(rows), SketchSettings(buckets, stacks, seed, KERNELS[checked_kernel(kernel)]))
        pairs = {key: features_and_gradients(layer, name_of(key), kernel) for key, layer in rows.items()}
        for key, (features, gradients) in pairs.items():  # which may be of different data
            fed = {"activations": {key: features}} | ({} if gradients is None else {"gradients": {key: gradients}})
            made._take(fed, np.arange(len(features)))
        return made

    def serves(self, settings: SketchSettings) -> str:
        lacks = [part for part in settings.parts if part not in self.settings.parts]
        return self.settings.lacking(settings, SKETCHING) or (f"the {' and '.join(lacks)}" if lacks else "")

    def update(self, rows: Mapping[Any, Any], numbers: Any = None, *, owners: Mapping[Key, Any] | None = None) -> None:
        """Add rows of features and gradients; `numbers` identify the examples in any order.

        Labels come as ``{"outputs": {model or layer: (logits, labels)}}``, of which the logits are not examined.
        """
        with torch.no_grad():
            self._take(rows, numbers, owners)

    def _take(self, rows: Mapping[Any, Any], numbers: Any, owners: Mapping[Key, np.ndarray] | None = None) -> None:
        features, gradients = rows.get("activations", {}), rows.get("gradients", {})
        self.clear_cache()
        placings: dict[Any, Placing] = {}  # which most layers share
        for key in self.names:
            parts = self._parts(key, features.get(key), gradients.get(key))
            if not parts:
                continue
            first, owner = next(iter(parts.values())), (owners or {}).get(key)
            form = (len(first), first.device, key if owner is not None else None)
            if form not in placings:
                ids = np.arange(len(first)) if numbers is None else np.asarray(numbers)
                placings[form] = Placing(self.settings, row_numbers(ids, len(first), owner), first.device)
            if "labels" in self.settings.parts:  # refused, if so, before anything is added
                labels = _labels_of_rows(rows.get("outputs", {}), key, len(first), owner)
                self.layers[key].add_labels(labels, placings[form])
            self.layers[key].add(parts, placings[form])

    def _parts(self, key: Key, features: Any, gradients: Any) -> dict[str, Tensor]:
        """Return what is summed of a batch; without gradients no path leads from the layer to the loss."""
        f, g = (rows if rows is None else as_matrix(rows, name_of(key), check=False) for rows in (features, gradients))
        if f is None and g is None:
            return {}
        sums, width = self.layers[key], (g if f is None else f).shape[1]  # type: ignore[union-attr]
        require_size(key, (width,), (sums.width or width,))
        sums.width = width
        there = {"features": f is not None, "gradients": g is not None}
        parts = [part for part in self.settings.parts if part != "labels" and there.get(part, all(there.values()))]
        return {part: sketched_part(part, f, g, self.settings.seed, psi_width(width, sums.buckets)) for part in parts}

    def merge(self, other: Self) -> Self:
        self._require_alike(other, layers="names", settings="settings")
        made = type(self)(self.names, self.settings)
        made.layers = {name: sums.merged(other.layers[name]) for name, sums in self.layers.items()}
        return made

    def side(self, key: Key) -> KernelSide:
        """Return the sketch of one layer, as kernels are read from it."""
        sums = self.sums(key)
        parts = {part: numbers for part, numbers in sums.parts.items() if part not in LABELS}
        return self.once(key, lambda: KernelSide(label(key), parts, sums.totals, sums.signs, sums.n, sums.resolution))

    def sums(self, key: Key) -> BucketSums:
        """Return what was summed of one layer."""
        if key not in self.layers:
            hint = did_you_mean(name_of(key), map(name_of, self.names))
            raise UnknownName(f"no layer {name_of(key)!r} in these sketches{hint}")
        sums = self.layers[key]
        if not sums.n:
            raise NoValue(f"{label(key)} was fed no rows, or no path leads from it to the loss.")
        for part, total in sums.totals.items():  # seen here and not batch by batch, for which a GPU would be waited for
            if not bool(total.isfinite().all()):
                raise InvalidValue(f"{part} of {label(key)} hold NaN or Inf; fix the model or leave those out.")
        return sums

    def pair(self, a: Key, b: Key, without: int | None = None) -> Sketch:
        return Sketch(self.side(a), self.side(b))

    def exactness_of(self, pairs: Sequence[tuple[Key, Key]]) -> str:
        return "sketched"


# --- buckets ----------------------------------------------------------------------------------------------------------


class BucketSums(Stored):
    """What is summed of one layer."""

    def __init__(self, buckets: int):
        self.buckets, self.n, self.width = buckets, 0, 0
        self.resolution = 0.0  # the rounding unit of the rows as they came
        self.parts: dict[str, Tensor] = {}
        self.totals: dict[str, Tensor] = {}
        self.signs: Any = None  # until the device is known from the first batch

    def add(self, rows: Mapping[str, Tensor], placing: Placing) -> None:
        """Add rows of each part to their buckets."""
        first = next(iter(rows.values()))
        dtype, self.resolution = summing_dtype(first.device), max(self.resolution, torch.finfo(first.dtype).eps)
        fresh = placing.signs_by_bucket.to(dtype)
        self.signs = fresh if self.signs is None else self.signs + fresh
        for part, numbers in rows.items():
            if part in self.parts:
                placing.add(numbers, self.parts[part])
            else:
                self.parts[part] = placing.sums(numbers)
            total = numbers.sum(0, dtype=dtype)
            self.totals[part] = self.totals[part] + total if part in self.totals else total
        self.n += len(first)

    def add_labels(self, labels: np.ndarray, placing: Placing) -> None:
        """Add the label of each row to its bucket."""
        for part, sums in zip(LABELS, placing.label_sums(labels), strict=True):
            self.parts[part] = _sum_of_classes(self.parts[part], sums) if part in self.parts else sums

    def merged(self, other: BucketSums) -> BucketSums:
        if not (self.n and other.n):
            return deepcopy(self if self.n else other)  # sums grow in their place
        made = BucketSums(self.buckets)
        made.n, made.width, made.resolution = self.n + other.n, self.width, max(self.resolution, other.resolution)
        made.signs = self.signs + other.signs
        add = dict.fromkeys(LABELS, _sum_of_classes)
        made.parts = {part: add.get(part, torch.add)(sums, other.parts[part]) for part, sums in self.parts.items()}
        made.totals = {part: total + other.totals[part] for part, total in self.totals.items()}
        return made


def psi_width(width: int, buckets: int) -> int:
    """Return how many numbers stand for ``g fᵀ`` of a layer with `width` units: all of them where they are few.

    More buckets with as many numbers as before would converge to the kernel of these numbers, and not to that of g fᵀ.
    """
    return min(width**2, max(PSI_WIDTH, 4 * buckets))


def _sum_of_classes(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of two matrices; the narrower one has zeros in the columns it lacks."""
    narrow, wide = sorted((first, second), key=lambda sums: sums.shape[1])
    return torch.nn.functional.pad(narrow, (0, wide.shape[1] - narrow.shape[1])) + wide


def places(settings: SketchSettings, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bucket and the sign of each example in each stack, stacks × examples; signs are ±1/√stacks."""
    height = settings.buckets // settings.stacks
    mixed = np.stack([hashes(settings.seed * settings.stacks + stack + 1, ids) for stack in range(settings.stacks)])
    buckets = (mixed % np.uint64(height)).astype(np.int64) + height * np.arange(settings.stacks)[:, None]
    signs = 1.0 - 2.0 * (mixed >> np.uint64(63)).astype(np.float64)
    return buckets, signs / np.sqrt(settings.stacks)


class Placing:
    """The buckets and signs of some examples, on the device of their rows."""

    def __init__(self, settings: SketchSettings, ids: np.ndarray, device: Any):
        self.count, self._buckets, self._signs, self._device = settings.buckets, *places(settings, ids), device

    @cached_property
    def signs_by_bucket(self) -> Tensor:
        """The sum of the signs in each bucket."""
        sums = np.bincount(self._buckets.ravel(), self._signs.ravel(), minlength=self.count)
        return torch.from_numpy(sums).to(self._device, summing_dtype(self._device))

    @cached_property
    def _on_device(self) -> tuple[Tensor, Tensor]:
        signs = torch.from_numpy(self._signs).to(self._device, summing_dtype(self._device))
        return torch.from_numpy(self._buckets).to(self._device), signs

    def label_sums(self, labels: np.ndarray) -> list[Tensor]:
        """Return the sums of one-hot labels in all buckets, with their signs and without; on the host."""
        classes = int(labels.max()) + 1
        if classes > self.count:
            raise InvalidValue(
                f"the label {classes - 1} means at least {classes:,} classes, which {self.count:,} buckets can't "
                "keep apart; use at least as many buckets as classes."
            )
        cells = (self._buckets * classes + labels).ravel()
        sums = [np.bincount(cells, weights.ravel(), self.count * classes) for weights in (self._signs, self._signs**2)]
        return [torch.from_numpy(of_cells.reshape(self.count, classes)) for of_cells in sums]

    def sums(self, rows: Tensor) -> Tensor:
        """Return the signed sums of rows in all buckets."""
        made = torch.zeros(self.count, rows.shape[1], dtype=summing_dtype(rows.device), device=rows.device)
        self.add(rows, made)
        return made

    def add(self, rows: Tensor, sums: Tensor) -> None:
        """Add rows with their signs to the sums of buckets, each row to one bucket of every stack."""
        has_graph = rows.requires_grad and torch.is_grad_enabled()
        if rows.device.type == "cpu" and len(rows) >= self.count and not has_graph:
            sums += torch.from_numpy(self._summed(rows.detach().numpy()))
            return
        for buckets, sign in zip(*self._on_device, strict=True):  # few rows do not touch all buckets
            sums.index_add_(0, buckets, rows * sign.unsqueeze(-1))

    def _summed(self, rows: np.ndarray) -> np.ndarray:
        """Return the sums, many rows shared out to threads: each reads its own in order, and its sums fit a cache."""
        threads = max(1, min(torch.get_num_threads(), rows.size // SHARE))
        ends = np.linspace(0, len(rows), threads + 1).astype(int)
        shares = list(itertools.pairwise(ends))
        if threads == 1:
            return self._product(rows, *shares[0])
        with ThreadPoolExecutor(threads) as pool:
            return np.sum(list(pool.map(lambda ends: self._product(rows, *ends), shares)), axis=0)

    def _product(self, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return the product of the sketching matrix, a column for each example, with a share of the rows."""
        buckets, signs = self._buckets[:, start:stop], self._signs[:, start:stop].astype(rows.dtype)
        stacks, n = buckets.shape
        entries = (signs.T.ravel(), buckets.T.ravel(), np.arange(0, stacks * n + 1, stacks))
        return csc_matrix(entries, shape=(self.count, n)) @ rows[start:stop]


def tensor_sketch(features: Tensor, gradients: Tensor, seed: int, width: int) -> Tensor:
    """Return `width` numbers for each example that represent ``g fᵀ``; products are ``⟨f, f'⟩⟨g, g'⟩`` on average.

    Pham and Pagh (2013): the sketch of an outer product is the circular convolution of the sketches of its factors.
    """
    spectra = []
    for salt, rows in ((1, features), (2, gradients)):
        mixed = hashes(seed * 4 + salt, np.arange(rows.shape[1]) + (salt << 40))
        places = torch.from_numpy((mixed % np.uint64(width)).astype(np.int64)).to(rows.device)
        signs = torch.from_numpy(1.0 - 2.0 * (mixed >> np.uint64(63)).astype(np.float64)).to(rows)
        made = torch.zeros(len(rows), width, dtype=rows.dtype, device=rows.device).index_add_(1, places, rows * signs)
        spectra.append(torch.fft.rfft(made))
    return torch.fft.irfft(spectra[0] * spectra[1], n=width)


def sketched_part(part: str, features: Any, gradients: Any, seed: int, width: int | None = None) -> Tensor:
    """Return what is summed of each example; of g fᵀ all its numbers, if `width` is as many, else their sketch.

    Without `width` it is that of 512 buckets or fewer.
    """
    if part == "psi":
        width = width or psi_width(features.shape[1], SketchSettings.buckets)
        if width == features.shape[1] ** 2:
            return (gradients.unsqueeze(2) * features.unsqueeze(1)).flatten(1)
        return tensor_sketch(features, gradients, seed, width)
    return features * gradients if part == "product" else features if part == "features" else gradients


def class_labels(labels: Any, count: int) -> np.ndarray:
    """Return the labels of `count` examples as whole numbers from 0 on, or refuse them."""
    if labels is None:
        raise InvalidValue("there are no labels in the batches; give batches of (inputs, labels).")
    labels = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if labels.shape != (count,) or labels.dtype.kind not in "iub":
        raise ShapeError(
            f"labels are one whole number for each of {count:,} examples; got shape {labels.shape} of {labels.dtype}."
        )
    if labels.min() < 0:
        raise InvalidValue(f"labels count the classes from 0; got {labels.min()}.")
    return labels.astype(np.int64)


def _labels_of_rows(outputs: Mapping[Any, Any], key: Key, count: int, owner: np.ndarray | None) -> np.ndarray:
    """Return the label of each of a layer's `count` rows."""
    model = key[0] if isinstance(key, tuple) else key
    _, labels = outputs.get(key, outputs.get(model, (None, None)))
    labels = class_labels(labels, 0 if labels is None else len(labels))
    return labels[row_examples(np.arange(len(labels)), count, owner)]
