"""The state from which a training resumes, as a part of a job, and what identifies a training.

The state holds weights, buffers, and the attributes that models and hooks change; no code. A job of another model,
recipe, seed or of other data is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.identity import forms_by_name, function_digest, settings_digest, source_digest, weights_digest
from netkin.identity.form import OF_EVERY_MODULE
from netkin.jobs import Job, Part
from netkin.representations.inputs import device_of
from netkin.settings import generator_states, load_generator_states, seed_all
from netkin.statistics import storage
from netkin.training.recipe import METHODS, Hook, Recipe, WrappedHook

DEEPEST = 20  # lists in lists
KIND, STATE = "training", "state"  # of the job, and the name of its part
Digest = Callable[[], str]  # reads data and returns their digest


@dataclass(frozen=True)
class PartSaving:
    """The state of a training as a part of a job, which may hold others; without a job nothing is kept.

    The states of the generators of `test`, a loader that is read after each epoch, are kept and restored with the rest.
    """

    job: Job | None = None
    name: str = ""
    is_whole: bool = False  # the job consists of this training alone, and its progress is that of the job
    test: Any = None

    @property
    def keeps(self) -> bool:
        """Whether the state is kept anywhere."""
        return self.job is not None

    @property
    def where(self) -> str:
        """The place of the state, as errors name it."""
        return "" if self.job is None else str(self.job.folder)

    def read(self) -> dict[str, Any] | None:
        """Return where the training stood, or None where it is new."""
        if self.job is None:
            return None
        return self.job.recall(self.name, self._unpacked)

    def _unpacked(self, part: Part) -> dict[str, Any]:
        state = unpack_state(part.values["state"], part.arrays)
        load_generator_states(self.test, state["test_state"])
        return state

    def write(self, state: Mapping[str, Any], total: int | None) -> None:
        """Keep the state: nested mappings and lists of tensors, numbers and texts."""
        if self.job is not None:
            values, arrays = pack_state({"test_state": generator_states(self.test), **state})
            self.job.keep(self.name, {"state": values}, arrays)
            self.tell(state["step"], total)
            self.job.check()  # a request to cancel ends the training here

    def tell(self, step: int, total: int | None) -> None:
        """Let `netkin jobs` show how far the training is."""
        if self.job is not None and self.is_whole:
            self.job.advance(step, total, "steps")


def identity_of(
    model: nn.Module, recipe: Recipe, seed: int, loss: Any, hooks: Iterable[Any], data: Digest, test: Digest | None
) -> dict[str, Any]:
    """Return what identifies a training, by name and as text.

    A hook is identified by its source code and by its attribute `settings`, if it has one.

    Args:
        model: The model before its first step.
        recipe: How it is trained.
        seed: From which orders, augmentation and dropout follow.
        loss: The loss that was given, None for the cross entropy.
        hooks: Those of the training.
        data: Returns the digest of the examples.
        test: The same for the data to test on, or None.
    """
    seed_all(device_of(model), seed, -1)
    still = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    names = [getattr(hook, "name", type(hook).__qualname__) for hook in hooks]
    given = [hook.given if isinstance(hook, WrappedHook) else hook for hook in hooks]
    codes = [(hook.settings, _hook_digests(own)) for hook, own in zip(hooks, given, strict=True)]
    return {
        "recipe": f"{recipe.words}; digest {settings_digest(recipe)}",
        "seed": str(seed),
        "model": f"digest {settings_digest([weights_digest(model), still])}",
        "architecture": forms_by_name({"model": model}),
        "loss": "cross entropy" if loss is None else f"digest {function_digest(loss)}",
        "hooks": f"{', '.join(names) or 'none'}; digest {settings_digest([names, codes])}",
        "data": data(),
        "test data": "none" if test is None else test(),
    }


def _hook_digests(hook: Any) -> list[str]:
    """Return the digests of a hook's source, and of that of methods which the object itself holds."""
    own = [vars(hook)[name] for name in METHODS if hasattr(hook, "__dict__") and name in vars(hook)]
    return [source_digest(hook), *map(source_digest, filter(callable, own))]


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's weights and buffers, those too that its own state dict leaves out."""
    own = model.state_dict()
    others = {name: buffer for name, buffer in model.named_buffers() if name not in own}
    return {"weights": dict(own), "buffers": others}


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a model the weights and buffers that `model_state` returned, also those that a forward pass first makes."""
    for place, value in state["weights"].items():
        owner, _, name = place.rpartition(".")
        buffers = model.get_submodule(owner)._buffers if place not in model.state_dict() else {}
        if name in buffers:
            buffers[name] = value.to(device_of(model))
    model.load_state_dict(state["weights"])
    known = dict(model.named_buffers())
    for name, value in state["buffers"].items():
        known[name].copy_(value)


def pack_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return JSON for nested mappings and lists of tensors, numbers and texts, and the arrays of their tensors."""
    tensors: dict[str, Tensor] = {}
    values = storage.to_plain(state, tensors, "")
    return values, {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


def unpack_state(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return what `pack_state` took apart."""
    return storage.from_plain(values, {name: torch.from_numpy(array.copy()) for name, array in arrays.items()})


# --- attributes -------------------------------------------------------------------------------------------------------


class ChangingAttributes:
    """The plain attributes of a model's modules and of hooks, of which those that changed are saved.

    These are numbers, texts, tensors, and lists and mappings of them; weights and buffers are saved as such, and a hook
    with a `state_dict` says itself what it needs.
    """

    def __init__(self, model: nn.Module, hooks: Iterable[Any]):
        self.owners: dict[str, Any] = {f"model/{place}": module for place, module in model.named_modules()}
        given = [hook.given if isinstance(hook, WrappedHook) else hook for hook in hooks]
        without_state = [hook for hook in given if not _has_state(hook)]
        self.owners |= {f"hook/{number}": hook for number, hook in enumerate(without_state)}
        self.before = {place: settings_digest(value) for place, _, value in self._found()}

    def _found(self) -> Iterator[tuple[str, str, Any]]:
        for place, owner in self.owners.items():
            for name, value in getattr(owner, "__dict__", {}).items():
                if name not in OF_EVERY_MODULE and _is_plain(value):
                    yield f"{place}/{name}", name, value

    def changed(self) -> dict[str, Any]:
        """Return the attributes that are not as they were at the start, by their place."""
        return {
            place: copy.deepcopy(value)
            for place, _, value in self._found()
            if self.before.get(place) != settings_digest(value)
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Put attributes back; what functions keep in lists and globals of others is not saved."""
        for place, value in state.items():
            owner, _, name = place.rpartition("/")
            known = getattr(self.owners[owner], name, None)
            setattr(self.owners[owner], name, value.to(known.device) if isinstance(known, Tensor) else value)


def _has_state(hook: Any) -> bool:
    own = getattr(type(hook), "state_dict", None)
    return own is not None and own is not Hook.state_dict


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in (list, tuple, dict) and depth < DEEPEST:
        keys, values = (value.keys(), value.values()) if isinstance(value, dict) else ((), value)
        return all(isinstance(key, (bool, int, float, str, tuple)) for key in keys) and all(
            _is_plain(one, depth + 1) for one in values
        )
    if type(value) is Tensor:
        return value.layout == torch.strided and not (value.requires_grad or value.is_quantized or value.is_meta)
    return value is None or type(value) in (bool, int, float, str)
