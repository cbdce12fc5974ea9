"""Options: what is said once for all models, or for each; they make subjects of what was passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from netkin.comparing.meeting import ResizablePositions
from netkin.comparing.subjects import ModelSubject, RecordedSubject, Subject
from netkin.errors import UnknownName, ValueFault
from netkin.representations import dft, positions
from netkin.representations.layers import Spec
from netkin.representations.shapes import name_of


class Options:
    """What is said once for all models, or for each."""

    def __init__(
        self,
        layers: Any,
        places: Mapping[str, str],
        shape: Any,
        resize: str | None,
        transforms: Any,
        forward: Any,
        device: torch.device | str | None,
    ):
        if resize not in (None, "average"):
            raise UnknownName(f"`resize` is None or 'average'; got {resize!r}.")
        if resize and shape not in ("positions", positions, "dft", dft):
            raise ValueFault(f"`resize` goes with shape='positions' or 'dft'; got shape={shape!r}.")
        _refuse_beside_dft(shape)
        self.layers, self.places, self.device = layers, places, device
        self._shape, self._resizes = shape, bool(resize)
        self.transforms = _one_each("transforms", transforms, list(places))
        self.forward = _one_each("forward", forward, list(places))

    @property
    def shape(self) -> Any:
        return ResizablePositions() if self._resizes and self._shape in ("positions", positions) else self._shape

    def layers_of(self, name: str) -> Spec:
        if not isinstance(self.layers, Mapping):
            return self.layers
        unknown = set(self.layers) - set(self.places.values()) - set(self.places)
        if unknown:
            raise ValueFault(
                f"`layers` names {sorted(unknown)[0]!r}; the models are {', '.join(map(repr, self.places))}."
            )
        return self.layers.get(name, self.layers.get(self.places[name]))

    def subject(self, name: str, thing: Any) -> Subject:
        subject = self._subject(name, thing)
        subject.averages = subject.averages or (self._resizes and self._shape in ("dft", dft))
        return subject

    def _subject(self, name: str, thing: Any) -> Subject:
        if isinstance(thing, Subject):
            return thing
        if isinstance(thing, nn.Module):
            return ModelSubject(
                name, thing, self.layers_of(name), self.shape, self.forward[name], self.transforms[name], self.device
            )
        if isinstance(thing, Mapping):
            return RecordedSubject(name, thing, self.layers_of(name), self.shape)
        raise ValueFault(
            f"{name!r} must be a torch module or a mapping of layer names to arrays; got {type(thing).__name__}."
            + (" `nk.load_model` makes a model of a text." if isinstance(thing, str) else "")
        )


def _refuse_beside_dft(shape: Any) -> None:
    """Refuse a mapping of shapes in which some layers go by frequencies and others by places or tokens."""
    shapes = [name_of(one) for one in shape.values()] if isinstance(shape, Mapping) else []
    several = next((one for one in shapes if one in ("positions", "tokens")), None)
    if "dft" in shapes and several:
        raise ValueFault(
            f"beside 'dft' every layer must give one row an example, and {several!r} gives several; "
            "use 'pool' or 'mean' for the others."
        )


def _one_each(what: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    if given is None or callable(given):
        return dict.fromkeys(names, given)
    if isinstance(given, Mapping):
        return {name: given.get(name) for name in names}
    if len(given) != len(names):
        raise ValueFault(f"`{what}` must be one function or one for each of the {len(names)} models; got {len(given)}.")
    return dict(zip(names, given, strict=True))
