"""Marks: short texts that tell batches, data and models from others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.stitching.portions import picked
from netkin.representations.inputs import batch_length
from netkin.representations.nesting import leaves, mapped
from netkin.sources.checkpoints import digest


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


def marked_model(model: nn.Module) -> str:
    """Return what tells a model's weights from others."""
    return digest({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)})


class Marks:
    """The mark of all examples that passed, inputs and labels, in whatever order and batches they came."""

    def __init__(self) -> None:
        self._sum, self._count = 0, 0

    def noting(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, and mark their examples."""
        for batch in batches:
            length = batch_length(batch)
            here = mapped(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, batch)
            for place in range(length):
                self._sum += int(marked(picked(here, length, slice(place, place + 1))), 16)
            self._count += length
            yield batch

    def __str__(self) -> str:
        return f"{self._count:,} examples, mark {self._sum % 2**64:016x}"
