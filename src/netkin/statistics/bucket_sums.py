"""`BucketSums`: what a sketch sums of one layer, bucket by bucket; see `netkin.statistics.sketches`."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import summing_dtype
from netkin.statistics.statistic import Stored

if TYPE_CHECKING:
    from netkin.statistics.sketches import Placing

PSI_WIDTH = 2048  # the least numbers that stand for g fᵀ where it has more
LABELS = ("labels", "counts")  # sums of one-hot labels, with signs and without


class BucketSums(Stored):
    """What is summed of one layer."""

    stored = ("buckets", "n", "width", "parts", "totals", "resolution", "signs")
    resolution = 0.0  # the rounding unit of the rows as they came

    def __init__(self, buckets: int):
        self.buckets, self.n, self.width = buckets, 0, 0
        self.parts: dict[str, Tensor] = {}
        self.totals: dict[str, Tensor] = {}
        self.signs: Any = None  # until the device is known from the first batch

    def add(self, rows: Mapping[str, Tensor], placing: Placing) -> None:
        """Add rows of each part to their buckets."""
        first = next(iter(rows.values()))
        dtype, self.resolution = summing_dtype(first.device), max(self.resolution, torch.finfo(first.dtype).eps)
        fresh = placing.signs_by_bucket.to(dtype)
        self.signs = fresh if self.signs is None else self.signs + fresh
        for part, own in rows.items():
            if part in self.parts:
                placing.add(own, self.parts[part])
            else:
                self.parts[part] = placing.sums(own)
            total = own.sum(0, dtype=dtype)
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


def _sum_of_classes(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two matrices; the narrower one has zeros in the columns it lacks."""
    narrow, wide = sorted((one, other), key=lambda sums: sums.shape[1])
    return torch.nn.functional.pad(narrow, (0, wide.shape[1] - narrow.shape[1])) + wide
