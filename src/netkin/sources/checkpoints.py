"""Checkpoints: a network as it was at one step of its training, and the step that a file's name tells."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from netkin.errors import SourceError, ValueFault
from netkin.identity import weights_digest
from netkin.sources.architectures import seeded
from netkin.sources.models import load_model
from netkin.sources.reading import near, refusing_unreadable
from netkin.sources.weights import mismatches, read_state, renamed

ENDINGS = (".pt", ".pth", ".th", ".bin", ".ckpt", ".safetensors", ".pt2")
IN_FOLDERS = ("model.safetensors", "pytorch_model.bin")  # weights as the Hugging Face Trainer names them
_NUMBER = r"[ =_.-]*(\d+)([kKmM](?![A-Za-z]))?"
_STEP = re.compile(rf"(?:step|iter|iteration|checkpoint|ckpt|batch)s?{_NUMBER}", re.IGNORECASE)
_EPOCH = re.compile(rf"(?:epoch|(?<![A-Za-z])ep)s?{_NUMBER}", re.IGNORECASE)
_ANY = re.compile(_NUMBER)
_VERSION = re.compile(r"-v\d+$")  # what Lightning adds to a name that is taken
_THOUSANDS = {"": 1, "k": 1_000, "m": 1_000_000}

Architecture = str | nn.Module | Callable[[], nn.Module]
Given = Path | Mapping[str, Tensor] | nn.Module
digest = weights_digest  # its earlier name


@dataclass(frozen=True)
class Checkpoint:
    """What was given for one step: a file, a folder, a state dict or the model itself."""

    step: int
    given: Given
    unit: str = "step"

    @property
    def words(self) -> str:
        """What a refusal calls it."""
        place = f" ({str(self.given)!r})" if isinstance(self.given, Path) else ""
        return f"{self.unit} {self.step}{place}"

    def read(self, architecture: Architecture | None = None) -> tuple[nn.Module, list[str]]:
        """Return the network of this checkpoint in evaluation mode, and in words what of its weights did not fit.

        A model that was given comes back as it is.
        """
        if isinstance(self.given, nn.Module):
            return self.given, []
        with refusing_unreadable(self.words):
            if isinstance(self.given, Path) and self._is_whole(architecture):
                is_program = self.given.suffix == ".pt2"
                return load_model(str(self.given) if is_program else f"hf:{self.given}"), []
            if architecture is None:
                raise SourceError(self._bare())
            return self._filled(built(architecture))

    def _is_whole(self, architecture: Architecture | None) -> bool:
        """Tell whether the file or folder needs no architecture from elsewhere."""
        assert isinstance(self.given, Path)
        return self.given.suffix == ".pt2" or (architecture is None and (self.given / "config.json").is_file())

    def _bare(self) -> str:
        return (
            f"{self.words} holds weights alone, which do not say what network they belong to; name it with `model`, "
            "as in model='netkin:resnet20' or 'package.module:function'."
        )

    def _filled(self, model: nn.Module) -> tuple[nn.Module, list[str]]:
        wanted = model.state_dict()
        state = _fitting(self._state(), wanted)
        faults = mismatches(state, wanted)
        if not faults:
            model.load_state_dict(state, strict=False)  # counts of batches may be absent, which `mismatches` allows
        return model.eval(), faults

    def _state(self) -> dict[str, Tensor]:
        if isinstance(self.given, Mapping):
            return dict(self.given)
        assert isinstance(self.given, Path)
        if not self.given.is_dir():
            return read_state(self.given)
        inside = [self.given / name for name in IN_FOLDERS if (self.given / name).is_file()]
        if not inside:
            raise SourceError(f"the folder {str(self.given)!r} holds no {' or '.join(IN_FOLDERS)}.")
        return read_state(inside[0])


def built(architecture: Architecture) -> nn.Module:
    """Return a network to put weights into, of its own: by name, from a function, or as a copy of a model."""
    if isinstance(architecture, str):
        return load_model(architecture)
    if isinstance(architecture, nn.Module):
        return copy.deepcopy(architecture)
    if not callable(architecture):
        raise ValueFault(
            f"`model` must be a builder's name, a torch module or a function that returns one; got "
            f"{type(architecture).__name__}."
        )
    model = seeded(architecture)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"`model` must return a torch.nn.Module; it returned an object of type {type(model).__name__}."
        )
    return model


def step_in(name: str, *, bare: bool = True) -> tuple[int, str] | None:
    """Return the step that a name tells and its unit, or None.

    A number after `step`, `iter`, `checkpoint`, `ckpt` or `batch` counts before one after `epoch`, and that before the
    last number of the name, a bare one, where `bare` allows it; `10k` is 10,000.

    Example:
        >>> step_in("step_100.pt"), step_in("epoch=3-step=500.ckpt"), step_in("epoch-3.safetensors")
        ((100, 'step'), (500, 'step'), (3, 'epoch'))
    """
    stem = name
    while Path(stem).suffix in ENDINGS:
        stem = Path(stem).stem
    stem = _VERSION.sub("", stem)
    patterns = [(_STEP, "step"), (_EPOCH, "epoch"), *([(_ANY, "step")] if bare else [])]
    for pattern, unit in patterns:
        found = pattern.findall(stem)
        if found:
            number, thousands = found[-1]
            return int(number) * _THOUSANDS[thousands.lower()], unit
    return None


def as_checkpoint(given: Any, step: int, unit: str = "step") -> Checkpoint:
    """Return one checkpoint; what is no path, state dict or model is refused, and so is a file that is not there."""
    if isinstance(given, nn.Module):
        return Checkpoint(step, given, unit)
    if isinstance(given, Mapping):
        strange = [str(key) for key, value in given.items() if not isinstance(value, Tensor)]
        if strange or not given:
            held = f"{strange[0]!r} is no tensor" if strange else "it is empty"
            raise ValueFault(f"the state dict of {unit} {step} must hold tensors by name; {held}.")
        return Checkpoint(step, given, unit)
    if not isinstance(given, (str, Path)):
        raise ValueFault(f"{unit} {step} must be a file, a state dict or a torch module; got {type(given).__name__}.")
    path = Path(given).expanduser()
    if not path.exists():
        raise SourceError(f"found no checkpoint {str(path)!r} for {unit} {step}{near(path) or '.'}")
    return Checkpoint(step, path, unit)


def _fitting(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` under the wanted names; where one prefix leads to all of them, as in a Lightning module, by it."""
    found = renamed(state, wanted)
    if all(name in wanted for name in found):
        return found
    first = next(iter(wanted), "")
    prefixes = [name.removesuffix(first) for name in state if name.endswith(f".{first}")]
    leading = [prefix for prefix in prefixes if all(prefix + name in state for name in wanted)]
    return {name: state[leading[0] + name] for name in wanted} if len(leading) == 1 else found
