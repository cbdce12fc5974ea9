"""Portions: a batch as the training of a stitch needs it, picked from and joined with others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netkin.applications.stitching.joining import Stitched
from netkin.applications.stitching.losses import refuse_unfit_labels
from netkin.errors import ShapeError
from netkin.representations import recording
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import feed, labels_of, mask_of, prepared, take
from netkin.representations.nesting import leaves, parts, rebuilt


@dataclass(frozen=True)
class Portion:
    """Some examples: what the first model gives at its layer, and what the second gives by itself.

    None stands for what is not wanted, or must be computed from the `batch` again.
    """

    head: Tensor | None = None
    answers: Tensor | None = None  # the second model's own
    own: Tensor | None = None  # the second model's own activations at its layer
    labels: Any = None
    mask: Tensor | None = None  # which tokens of sequences are no padding
    batch: Any = None  # kept only where the second model needs it: it runs whole where it can't be cut

    @property
    def is_whole(self) -> bool:
        """Whether it holds all that a stitch is judged by."""
        return self.head is not None and self.answers is not None and self.own is not None

    @property
    def bytes(self) -> int:
        """How much memory the portion takes."""
        tensors = [leaf for _, leaf in leaves(self) if isinstance(leaf, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def portion(network: Stitched, batch: Any, *, head: bool = True, answers: bool = True, own: bool = True) -> Portion:
    """Return what is wanted of a batch; of the models no more runs than that needs, and nothing keeps a graph."""
    theirs = _of_second(network, batch, own) if answers or own else (None, None)
    return Portion(
        head=network.begin(batch) if head else None,
        answers=theirs[0] if answers else None,
        own=theirs[1],
        labels=_labels(network, batch),
        mask=_mask(network, batch),
        batch=batch if network.tail.graph is None else None,
    )


def labelled(network: Stitched, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; labels that are missing, or no classes of the second model, are refused."""
    few = None
    for batch in batches:
        few = portion(network, take(batch, 1), head=False, own=False).answers if few is None else few
        refuse_unfit_labels(_labels(network, batch), few)
        yield batch


def picked(structure: Any, length: int, index: Any) -> Any:
    """Return the examples at `index`, a slice or a tensor, of everything in a structure that has `length` of them."""
    if isinstance(structure, (Tensor, np.ndarray)):
        if not structure.ndim or len(structure) != length:
            return structure
        return structure[_within_reach(structure, index)]
    if isinstance(structure, list) and len(structure) == length and not any(parts(one) for one in structure):
        if isinstance(structure[0], (Tensor, np.ndarray)):
            return [picked(one, length, index) for one in structure]
        return structure[index] if isinstance(index, slice) else [structure[i] for i in index.tolist()]
    inside = parts(structure)
    return rebuilt(structure, {key: picked(one, length, index) for key, one in inside.items()}) if inside else structure


def joined(portions: Sequence[Any]) -> Any:
    """Return several portions, or anything alike in them, as one."""
    first = portions[0]
    if isinstance(first, (Tensor, np.ndarray)):
        _refuse_uneven([tuple(one.shape[1:]) for one in portions])
        return torch.cat([torch.as_tensor(one) for one in portions])
    if isinstance(first, list) and not any(parts(one) or isinstance(one, (Tensor, np.ndarray)) for one in first):
        return [one for part in portions for one in part]
    inside = parts(first)
    return rebuilt(first, {key: joined([parts(one)[key] for one in portions]) for key in inside}) if inside else first


def _of_second(network: Stitched, batch: Any, own: bool) -> tuple[Tensor, Tensor | None]:
    network.cut()  # before hooks are in place
    if not own:
        return main_tensor(feed(network.b, batch), "").clone(), None
    with recording(network.b, [network.layer_b]) as kept:
        answers = main_tensor(feed(network.b, batch), "").clone()
    return answers, kept[network.layer_b]


def _labels(network: Stitched, batch: Any) -> Any:
    labels = labels_of(batch)
    if isinstance(labels, list) and not any(parts(one) or isinstance(one, Tensor) for one in labels):
        labels = torch.as_tensor(labels)
    return prepared(network.b, labels)


def _mask(network: Stitched, batch: Any) -> Tensor | None:
    mask = mask_of(batch)
    return None if mask is None else prepared(network.b, torch.as_tensor(mask) != 0)


def _within_reach(array: Any, index: Any) -> Any:
    """Return the index where the array is."""
    if not isinstance(index, Tensor):
        return index
    return index.to(array.device, non_blocking=True) if isinstance(array, Tensor) else index.cpu().numpy()


def _refuse_uneven(shapes: list[tuple[int, ...]]) -> None:
    if len(set(shapes)) > 1:
        raise ShapeError(
            f"batches of examples of different shapes, {shapes[0]} and {next(s for s in shapes if s != shapes[0])}, "
            "can't be dealt out anew; leave `batch` out."
        )
