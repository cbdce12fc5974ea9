"""Marks: short texts that tell batches, data and models from others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netkin.identity.data import contents, summed_hashes
from netkin.representations.inputs import batch_length
from netkin.representations.nesting import leaves


def marked(structure: Any) -> str:
    """Return what tells a structure from another: a digest of all the bits of its arrays, and of what else it holds."""
    total = blake2b(digest_size=16)
    for _, leaf in leaves(structure):
        if isinstance(leaf, (Tensor, np.ndarray)):
            tensor = torch.as_tensor(leaf).detach().cpu().contiguous()
            total.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
            total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
        else:
            total.update(f"{leaf!r};".encode())
    return total.hexdigest()


class Marks:
    """The mark of all examples that passed, inputs and labels, in whatever order and batches they came."""

    def __init__(self) -> None:
        self._sum, self.count = 0, 0

    def noting(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, and mark their examples."""
        for batch in batches:
            length = batch_length(batch)
            # without numbers, unlike `DataDigest`: training deals out the same examples in another order
            self._sum += summed_hashes(contents(batch, length, labels=True))
            self.count += length
            yield batch

    def __str__(self) -> str:
        return f"{self.count:,} examples, mark {self._sum % 2**64:016x}"
