"""Restarts: the state of a training in a file, from which it resumes exactly.

The file has netkin's format, is written atomically and contains no code. It identifies its training; a file of another
model, recipe, seed or of other data is refused.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin import files
from netkin.errors import ValueFault
from netkin.files import Location
from netkin.identity import function_digest, settings_digest, weights_digest
from netkin.identity.digests import PLAIN, closed_over
from netkin.jobs import Job, State, beside, refuse_other
from netkin.representations.inputs import device_of
from netkin.statistics import statistic
from netkin.training.example_order import Course, course_of
from netkin.training.recipe import METHODS, Recipe

KIND = "training"
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # the training flag, hooks, and where parts are registered


@dataclass
class Saving:
    """The file of a training that can be resumed, and the job beside it; without a path neither.

    The job's folder, as ``run.netkin.job``, records the progress of the training and locks out other processes.
    """

    path: Location | None
    identity: Mapping[str, str]
    overwrite: bool
    job: Job

    @classmethod
    @contextmanager
    def opened(cls, path: Location | None, identity: Mapping[str, str], call: str, overwrite: bool) -> Iterator[Saving]:
        """Yield the file of a training; one that another process works on, or that holds anything else, is refused."""
        files.refuse_output(path, KIND, overwrite=overwrite)
        job = Job(None if path is None else beside(path), KIND, identity, call=call, overwrite=overwrite)
        saving = cls(path, identity, overwrite, job)
        saving.is_begun()  # refused before the folder is made
        with job:
            yield saving

    def is_begun(self) -> bool:
        """Return whether there is a training to go on with; the file of another one is refused."""
        if self.path is None or self.overwrite or not os.path.exists(self.path) or not os.path.getsize(self.path):
            return False
        header = files.read_header(self.path, KIND)
        with files.damage_reported(self.path):
            held = State(KIND, dict(header["identity"]), folder=str(self.path))
        refuse_other(held, State(KIND, self.identity))
        return True

    def read(self) -> dict[str, Any] | None:
        """Return where the training stood, or None where it is new."""
        if self.path is None or not self.is_begun():
            return None
        header, arrays = files.read(self.path, KIND)
        with files.damage_reported(self.path):
            return unpack_state(header["state"], arrays)

    def write(self, state: Mapping[str, Any]) -> None:
        """Write the state of the training: nested mappings and lists of tensors, numbers and texts."""
        if self.path is not None:
            values, arrays = pack_state(state)
            progress = {name: state[name] for name in ("epoch", "step") if name in state}  # for readers
            header = {"identity": dict(self.identity), "progress": progress, "state": values}
            files.write(self.path, KIND, header, arrays, overwrite=self.overwrite)


def identity_of(
    model: nn.Module, recipe: Recipe, seed: int, loss: Any, hooks: Iterable[Any], course: Course, test: Any
) -> dict[str, str]:
    """Return what identifies a training, by name and as text.

    Args:
        model: The model before its first step.
        recipe: How it is trained.
        seed: From which orders, augmentation and dropout follow.
        loss: The loss that was given, None for the cross entropy.
        hooks: Those of the training.
        course: The examples, which are read.
        test: The data to test on, which are read, or None.
    """
    seed_all(model, seed, -1)
    still = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    names = [getattr(hook, "name", type(hook).__qualname__) for hook in hooks]
    codes = [(hook.settings, [_code_of(getattr(hook, name)) for name in METHODS]) for hook in hooks]
    return {
        "recipe": f"{recipe.words}; digest {settings_digest(recipe)}",
        "seed": str(seed),
        "model": f"digest {settings_digest([weights_digest(model), form_of(model), still])}",
        "loss": "cross entropy" if loss is None else f"digest {_loss_digest(loss)}",
        "hooks": f"{', '.join(names) or 'none'}; digest {settings_digest([names, codes])}",
        "data": course.digest(),
        "test data": "none" if test is None else course_of(test, Recipe(steps=1), 0).digest(),
    }


def form_of(model: nn.Module) -> dict[str, str]:
    """Return what a model is beside its weights and buffers: the kinds of its modules, and all their attributes.

    Example:
        >>> form_of(nn.Dropout(0.1)) == form_of(nn.Dropout(0.2))
        False
    """
    found = {}
    for place, module in model.named_modules():
        found[place] = f"{type(module).__module__}.{type(module).__qualname__}"
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        found |= {f"{place}.{name}": _attribute(value) for name, value in own.items()}
    return found


def _code_of(method: Any) -> Any:
    """Return the code and the plain settings of a hook's method; objects that it reads may change while it works."""
    if isinstance(method, partial):
        return [_code_of(method.func), _plain([*method.args, *method.keywords.values()])]
    function = getattr(method, "__func__", method)
    if not isinstance(function, FunctionType):  # a callable object, or a builtin
        function = vars(type(function)).get("__call__")
    if not isinstance(function, FunctionType):
        return type(method).__qualname__
    return [function.__code__, _plain([*closed_over(function), *(function.__defaults__ or ())])]


def _plain(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, PLAIN)]


def _attribute(value: Any) -> str:
    try:
        return settings_digest(value)
    except ValueFault:  # an object of a kind of its own; where it lies is another place in another process
        return re.sub(r"0x[0-9a-f]+", "", repr(value))


def _loss_digest(loss: Any) -> str:
    found = function_digest(loss)
    return settings_digest([found, form_of(loss)]) if isinstance(loss, nn.Module) else found


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's weights and buffers, those too that its own state dict leaves out."""
    own = model.state_dict()
    others = {name: buffer for name, buffer in model.named_buffers() if name not in own}
    return {"weights": dict(own), "buffers": others}


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a model the weights and buffers that `model_state` returned."""
    model.load_state_dict(state["weights"])
    buffers = dict(model.named_buffers())
    for name, value in state["buffers"].items():
        buffers[name].copy_(value)


def seed_all(model: nn.Module, seed: int, epoch: int) -> None:
    """Let the generators of torch, NumPy and Python, which dropout and loaders draw from, begin an epoch of a seed."""
    mixed = int.from_bytes(blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest(), "little")
    random.seed(mixed)
    np.random.seed(mixed)
    torch.default_generator.manual_seed(mixed)
    if device_of(model).type == "cuda":
        with torch.cuda.device(device_of(model)):
            torch.cuda.manual_seed(mixed)


def random_state(model: nn.Module) -> dict[str, Any]:
    """Return the states of the generators of torch, NumPy and Python."""
    of_numpy: Any = np.random.get_state()
    name, keys, *rest = of_numpy
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
    }
    state["torch"] = torch.get_rng_state()
    if device_of(model).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device_of(model))
    return state


def load_random_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Let the generators go on from where `random_state` found them."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, *rest = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device_of(model).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device_of(model))


def pack_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return JSON for nested mappings and lists of tensors, numbers and texts, and the arrays of their tensors."""
    tensors: dict[str, Tensor] = {}
    values = statistic.to_plain(state, tensors, "")
    return values, {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


def unpack_state(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return what `pack_state` took apart."""
    return statistic.from_plain(values, {name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
