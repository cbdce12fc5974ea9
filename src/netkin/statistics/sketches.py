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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from scipy.sparse import csc_matrix
from torch import Tensor

from netkin.arrays import as_matrix, summing_dtype
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName, did_you_mean
from netkin.statistics import schema
from netkin.statistics.bucket_sums import LABELS, BucketSums, psi_width
from netkin.statistics.collector import (
    CostEstimate,
    Key,
    Study,
    hashes,
    label,
    name_of,
    refuse_other_width,
    row_examples,
    row_numbers,
)
from netkin.statistics.kernel_pairs import (
    KERNELS,
    LOSS,
    KernelPair,
    KernelSide,
    LossCollector,
    LossSettings,
    checked_kernel,
    given_rows,
)

if TYPE_CHECKING:
    from typing_extensions import Self

SKETCHING = ("buckets", "stacks", "seed", *LOSS)
SHARE = 2**21  # numbers that are worth a thread


class Sketch(KernelPair):
    """Two layers, each sketched over its own data."""

    collectors: ClassVar[tuple[type, ...]] = ()

    @classmethod
    def of(
        cls, X: Any, Y: Any, *, kernel: str = "hadamard", buckets: int = 512, stacks: int = 1, seed: int = 0
    ) -> Sketch:
        """Return the pair of two layers, each given as (features, gradients); rows of one number are one example."""
        made = LayerSketches.of({"`X`": X, "`Y`": Y}, kernel=kernel, buckets=buckets, stacks=stacks, seed=seed)
        return made["`X`", "`Y`"]


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
                f"stacks={self.stacks}."
            )

    def joined(self, other: SketchSettings) -> SketchSettings | None:
        if replace(other, parts=self.parts) != self:
            return None
        return replace(self, parts=tuple(sorted({*self.parts, *other.parts})))


class LayerSketches(LossCollector):
    """Sketches of many layers, each over the data of its own model."""

    kind = "LayerSketches"
    holds = "Sketch"
    pairs_rows = False
    by_content = True
    exactness = "sketched"
    stored = schema.fields(
        names=schema.NAMES, settled=schema.SETTINGS, _layers=schema.mapping_of(schema.object_of(BucketSums)),
    )  # fmt: skip
    asking = SketchSettings

    def __init__(self, names: Sequence[Key], settings: SketchSettings):
        self.names, self.settled = list(names), settings.to_json()
        self._layers = {name: BucketSums(settings.buckets) for name in self.names}
        self.clear_cache()

    def check(self) -> None:
        buckets, parts = self.settings.buckets, {*self.settings.parts, *LABELS}
        fit = all(one.buckets == buckets and {*one.parts} <= parts for one in self._layers.values())
        schema.refuse_unless(fit and list(self._layers) == self.names, "the layers and their buckets")

    @classmethod
    def feeds_for(cls, settings: SketchSettings) -> frozenset[str]:
        feeds = frozenset({"outputs"} if "labels" in settings.parts else ())
        return feeds | ({"activations"} if {*settings.parts} <= {"features", "labels"} else cls.feeds)

    @classmethod
    def settings_for(cls, measure: Any) -> SketchSettings:
        own = measure.settings
        kept = {name: own[name] for name in SKETCHING if name in own}
        return SketchSettings(**kept, parts=KERNELS[checked_kernel(own["kernel"])])

    @classmethod
    def cost(cls, settings: SketchSettings, study: Study) -> CostEstimate | None:
        if study.spectral:
            return None
        summed = [part for part in settings.parts if part != "labels"]  # whose classes are few
        widths = [
            psi_width(one.width, settings.buckets) if part == "psi" else one.width
            for one in study.sizes
            for part in summed
        ]
        rows = study.examples and sum(one.rows_of(study.examples) * one.width for one in study.sizes)
        words = f"Sketch of {', '.join(settings.parts)} in {settings.buckets:,} buckets"
        pair = 2 * settings.buckets  # columns of the kernels of two layers, buckets × buckets each
        return CostEstimate(8 * settings.buckets * (sum(widths) + pair), words, "sketches", rows)

    @classmethod
    def start(cls, settings: SketchSettings, study: Study) -> Self:
        made = cls(list(study.layers), settings)
        for key, own in made._layers.items():
            own.resolution = study.resolutions.get(key, 0.0)
        return made

    @classmethod
    def of(
        cls, rows: Mapping[Key, Any], *, kernel: str = "hadamard", buckets: int = 512, stacks: int = 1, seed: int = 0
    ) -> Self:
        """Return sketches of layers given as (features, gradients) or features; rows of one number are one example."""
        made = cls(list(rows), SketchSettings(buckets, stacks, seed, KERNELS[checked_kernel(kernel)]))
        given = {key: given_rows(one, name_of(key), kernel) for key, one in rows.items()}
        for key, (features, gradients) in given.items():  # which may be of different data
            fed = {"activations": {key: features}} | ({} if gradients is None else {"gradients": {key: gradients}})
            made._take(fed, np.arange(len(features)))
        return made

    def serves(self, settings: SketchSettings) -> str:
        lacks = [part for part in settings.parts if part not in self.settings.parts]
        return self._other(settings, SKETCHING) or (f"the {' and '.join(lacks)}" if lacks else "")

    def update(
        self, rows: Mapping[Any, Any], numbers: Any = None, owners: Mapping[Key, np.ndarray] | None = None
    ) -> None:
        """Add rows of features and gradients; `numbers` identify the examples in any order.

        Labels come as ``{"outputs": {model or layer: (logits, labels)}}``, of which the logits are not examined.
        """
        with torch.no_grad():
            self._take(rows, numbers, owners)

    def _take(self, rows: Mapping[Any, Any], numbers: Any, owners: Mapping[Key, np.ndarray] | None = None) -> None:
        features, gradients = rows.get("activations", {}), rows.get("gradients", {})
        self.clear_cache()
        placings: dict[Any, Placing] = {}  # which most layers share
        for key in (key for key in self.names if key in features or key in gradients):
            found = {"features": features.get(key), "gradients": gradients.get(key)}
            made = self._parts({name: one for name, one in found.items() if one is not None}, key)
            if not made:
                continue
            first, owner = next(iter(made.values())), (owners or {}).get(key)
            form = (len(first), first.device, key if owner is not None else None)
            if form not in placings:
                ids = np.arange(len(first)) if numbers is None else np.asarray(numbers)
                placings[form] = Placing(self.settings, row_numbers(ids, len(first), owner), first.device)
            if "labels" in self.settings.parts:  # refused, if so, before anything is added
                labels = _labels_of_rows(rows.get("outputs", {}), key, len(first), owner)
                self._layers[key].add_labels(labels, placings[form])
            self._layers[key].add(made, placings[form])

    def _parts(self, found: Mapping[str, Tensor], key: Key) -> dict[str, Tensor]:
        """Return what is summed of a batch."""
        given = {name: as_matrix(one, name_of(key), check=False) for name, one in found.items()}
        f, g = (given.get(name) for name in ("features", "gradients"))
        layer, width = self._layers[key], next(iter(given.values())).shape[1]
        refuse_other_width(key, width, layer.width or width)
        layer.width = width
        # without gradients no path leads from the layer to the loss
        there = {"features": f is not None, "gradients": g is not None}
        parts = [one for one in self.settings.parts if one != "labels" and there.get(one, all(there.values()))]
        return {part: sketched_part(part, f, g, self.settings.seed, psi_width(width, layer.buckets)) for part in parts}

    def merge(self, other: Self) -> Self:
        self._refuse_unlike(other, layers="names", settings="settings")
        made = type(self)(self.names, self.settings)
        made._layers = {name: own.merged(other._layers[name]) for name, own in self._layers.items()}
        return made

    def side(self, key: Key) -> KernelSide:
        """Return the sketch of one layer, as kernels are read from it."""
        own = self.sums(key)
        if key not in self._sides:
            parts = {part: sums for part, sums in own.parts.items() if part not in LABELS}
            self._sides[key] = KernelSide(label(key), parts, own.totals, own.signs, own.n, own.resolution)
        return self._sides[key]

    def sums(self, key: Key) -> BucketSums:
        """Return what was summed of one layer."""
        if key not in self._layers:
            hint = did_you_mean(name_of(key), map(name_of, self.names))
            raise UnknownName(f"no layer {name_of(key)!r} in these sketches{hint}")
        own = self._layers[key]
        if not own.n:
            raise NoValue(f"{label(key)} was fed no rows, or no path leads from it to the loss.")
        strange = [part for part, total in own.totals.items() if not bool(total.isfinite().all())]
        if strange:  # seen here and not batch by batch, for which a GPU would be waited for
            raise InvalidValue(f"{strange[0]} of {label(key)} hold NaN or Inf; fix the model or leave those out.")
        return own

    def pair(self, a: Key, b: Key, without: int | None = None) -> Sketch:
        return Sketch(self.side(a), self.side(b))

    def clear_cache(self) -> None:
        self._sides: dict[Key, KernelSide] = {}


# --- buckets ----------------------------------------------------------------------------------------------------------


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
        found = np.bincount(self._buckets.ravel(), self._signs.ravel(), minlength=self.count)
        return torch.from_numpy(found).to(self._device, summing_dtype(self._device))

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
        found = [np.bincount(cells, one.ravel(), self.count * classes) for one in (self._signs, self._signs**2)]
        return [torch.from_numpy(one.reshape(self.count, classes)) for one in found]

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
        for own, sign in zip(*self._on_device, strict=True):  # few rows do not touch all buckets
            sums.index_add_(0, own, rows * sign.unsqueeze(-1))

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


def class_labels(given: Any, count: int) -> np.ndarray:
    """Return the labels of `count` examples as whole numbers from 0 on, or refuse them."""
    if given is None:
        raise InvalidValue("there are no labels in the batches; give batches of (inputs, labels).")
    found = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if found.shape != (count,) or found.dtype.kind not in "iub":
        raise ShapeError(
            f"labels are one whole number for each of {count:,} examples; got shape {found.shape} of {found.dtype}."
        )
    if found.min() < 0:
        raise InvalidValue(f"labels count the classes from 0; got {found.min()}.")
    return found.astype(np.int64)


def _labels_of_rows(outputs: Mapping[Any, Any], key: Key, count: int, owner: np.ndarray | None) -> np.ndarray:
    """Return the label of each of a layer's `count` rows."""
    model = key[0] if isinstance(key, tuple) else key
    _, given = outputs.get(key, outputs.get(model, (None, None)))
    labels = class_labels(given, 0 if given is None else len(given))
    return labels[row_examples(np.arange(len(labels)), count, owner)]
