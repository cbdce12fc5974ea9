"""Training runs: checkpoints of a folder, a list or a mapping, in the order of the steps in their names."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from netkin.errors import InvalidValue, NameClash, SourceError, UnknownName
from netkin.sources.architectures import seeded
from netkin.sources.datasets import load_data
from netkin.sources.models import in_evaluation, load_model
from netkin.sources.names import near, refusing_unreadable
from netkin.sources.weights import listed, mismatches, read_state, renamed

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
        """Return the network of this checkpoint in evaluation mode, and as text what of its weights did not fit.

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
        """Return whether the file or folder needs no architecture from elsewhere."""
        assert isinstance(self.given, Path)
        return self.given.suffix == ".pt2" or (architecture is None and (self.given / "config.json").is_file())

    def _bare(self) -> str:
        return (
            f"{self.words} holds weights alone, which do not say what network they belong to; name it with `model`, "
            "as in model='netkin:resnet20' or model='package.module:function'."
        )

    def _filled(self, model: nn.Module) -> tuple[nn.Module, list[str]]:
        wanted = model.state_dict()
        state = _fitting(self._state(), wanted)
        faults = mismatches(state, wanted)
        if not faults:
            model.load_state_dict(state, strict=False)  # counts of batches may be absent, which `mismatches` allows
        return in_evaluation(model), faults

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
        raise InvalidValue(
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
    """Return the step in a name and its unit, or None.

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
            raise InvalidValue(f"the state dict of {unit} {step} must hold tensors by name; {held}.")
        return Checkpoint(step, given, unit)
    if not isinstance(given, (str, Path)):
        raise InvalidValue(f"{unit} {step} must be a file, a state dict or a torch module; got {type(given).__name__}.")
    path = Path(given).expanduser()
    if not path.exists() and ":" in str(given):
        from netkin.sources.models import load_model

        return Checkpoint(step, load_model(str(given), seed=step), unit)
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


LEAST = 2


@dataclass(frozen=True)
class TrainingRun:
    """A training run: its checkpoints in the order of their steps, and the network that bare weights belong to."""

    name: str
    checkpoints: tuple[Checkpoint, ...]
    architecture: Architecture | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What its steps count: "step" or "epoch"."""
        return self.checkpoints[-1].unit

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps, rising."""
        return tuple(checkpoint.step for checkpoint in self.checkpoints)

    @property
    def whole(self) -> list[str]:
        """The name by which the run is a Hugging Face model: that of its architecture, or of its last checkpoint."""
        if isinstance(self.architecture, str) and self.architecture.startswith("hf:"):
            return [self.architecture]
        given = self.checkpoints[-1].given
        named = isinstance(given, Path) and self.architecture is None and (given / "config.json").is_file()
        return [f"hf:{given}"] if named else []

    def data(self, given: Any) -> Any:
        """Return data, by their name too, as the networks of the run take them."""
        models = [*self.whole, self.checkpoints[-1].given]
        return load_data(given, models=models) if isinstance(given, str) else given

    def at(self, step: int) -> nn.Module:
        """Return the network at `step`, which must have the architecture that the run ends with."""
        found = {checkpoint.step: checkpoint for checkpoint in self.checkpoints}
        if step not in found:
            raise UnknownName(f"no {self.unit} {step} in this run; it has {_shown(self.steps)}.")
        return self._checked(found[step]) if step != self.steps[-1] else self.final

    @cached_property
    def final(self) -> nn.Module:
        """The network at the last step."""
        last = self.checkpoints[-1]
        model, faults = last.read(self.architecture)
        if faults:
            raise SourceError(
                f"the weights of {last.words} do not fit the {type(model).__name__} given as `model`: "
                f"{'; '.join(faults)}. Name the network that was trained.",
                argument="model",
            )
        return model

    def only(self, steps: Any) -> TrainingRun:
        """Return the run with the steps requested, a list of them or how many; the last one stays among them."""
        if steps is None:
            return self
        if isinstance(steps, str) or not isinstance(steps, (Integral, Iterable)):
            raise InvalidValue(f"`steps` is a list of {self.unit}s or how many of them; got {steps!r}.")
        chosen = self._spread(steps) if isinstance(steps, Integral) else self._listed(steps)
        kept = tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.step in chosen)
        return TrainingRun(self.name, _enough(kept, self.name), self.architecture, self.passed_over)

    def _spread(self, count: Any) -> set[int]:
        if count < LEAST:
            raise InvalidValue(f"a run needs at least {LEAST} {self.unit}s; got steps={count}.")
        places = np.linspace(0, len(self.steps) - 1, min(int(count), len(self.steps))).round().astype(int)
        return {self.steps[place] for place in places.tolist()}

    def _listed(self, steps: Any) -> set[int]:
        wanted = list(steps)
        strange = [step for step in wanted if step not in self.steps]
        if strange:
            raise UnknownName(f"no {self.unit} {strange[0]} in this run; it has {_shown(self.steps)}.")
        return {*wanted, self.steps[-1]}

    def _checked(self, checkpoint: Checkpoint) -> nn.Module:
        final = self.final.state_dict()
        model, faults = checkpoint.read(self.architecture)
        faults = faults or mismatches(model.state_dict(), final)
        if faults:
            raise SourceError(
                f"the architecture changes within the run: at {checkpoint.words}, compared with {self.unit} "
                f"{self.steps[-1]}, {'; '.join(faults)}. Choose `steps` from one side of the change."
            )
        return model


def open_run(run: Any, model: Architecture | None = None, *, name: str | None = None) -> TrainingRun:
    """Return the run that is named by a folder, a list of files, or a mapping from steps to checkpoints.

    A checkpoint is a weights file (`.safetensors`, a state dict saved by torch, a Lightning `.ckpt`), an exported
    program (`.pt2`), a folder that the Hugging Face Trainer wrote; in a mapping also a state dict or a model. Steps are
    read from the names, see `step_in`; what has no number in its name is passed over in a folder and refused in a list,
    and where names of a folder say step or epoch, those that only have some number are passed over, too.
    `model` is the network of bare weights: a builder's name, a module to copy, or a function. A run that is
    open already comes back as it is.
    """
    if isinstance(run, TrainingRun):
        return run
    if isinstance(run, (str, os.PathLike)):
        return _of_folder(Path(run).expanduser(), model, name)
    if isinstance(run, Mapping):
        found = [as_checkpoint(given, _whole(step)) for step, given in run.items()]
        return _ordered(name or "run", found, model)
    if isinstance(run, Sequence) or (isinstance(run, Iterable) and not isinstance(run, (nn.Module, Tensor))):
        return _ordered(name or "run", [_from_name(given) for given in run], model)
    raise InvalidValue(
        f"a run is a folder, a list of files, or a mapping from steps to checkpoints; got {type(run).__name__}."
    )


def _of_folder(folder: Path, model: Architecture | None, name: str | None) -> TrainingRun:
    if not folder.is_dir():
        hint = near(folder) or "."
        is_file = folder.is_file()
        raise SourceError(
            f"{str(folder)!r} is " + ("a file; name the folder of the checkpoints." if is_file else f"no folder{hint}")
        )
    with refusing_unreadable(str(folder)):
        entries = sorted((entry for entry in folder.iterdir() if _is_checkpoint(entry)), key=_natural)
    if not entries:
        raise SourceError(
            f"{str(folder)!r} holds no checkpoints: no file that ends in {', '.join(ENDINGS)}, and no folder with a "
            f"{' or '.join(IN_FOLDERS)}."
        )
    steps = _steps_in_names([entry.name for entry in entries])
    found = [as_checkpoint(entry, *said) for entry in entries if (said := steps[entry.name])]
    if not found:
        raise SourceError(
            f"none of the {len(entries)} checkpoints in {str(folder)!r} has a step in its name "
            f"({listed([entry.name for entry in entries])}); name them like step_100.pt, or pass a mapping from steps "
            "to files."
        )
    passed_over = tuple(name for name, said in steps.items() if not said)
    return _ordered(name or str(folder), found, model, passed_over)


def _steps_in_names(names: Sequence[str]) -> dict[str, tuple[int, str] | None]:
    """Return the step in each name; where some say step or epoch, the 20 of `best_resnet20.pt` is no step."""
    said = {name: step_in(name, bare=False) for name in names}
    return said if any(said.values()) else {name: step_in(name) for name in names}


def _is_checkpoint(entry: Path) -> bool:
    if entry.is_dir():
        return any((entry / name).is_file() for name in (*IN_FOLDERS, *(f"{name}.index.json" for name in IN_FOLDERS)))
    return entry.suffix in ENDINGS and not entry.name.startswith(".")


def _from_name(given: Any) -> Checkpoint:
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidValue(
            f"a list of checkpoints holds files, whose names tell the steps; got {type(given).__name__}. Pass a "
            "mapping from steps to checkpoints."
        )
    said = step_in(Path(given).name)
    if said is None:
        raise SourceError(
            f"{str(given)!r} has no step in its name; name it like step_100.pt, or pass a mapping from steps to files."
        )
    return as_checkpoint(given if isinstance(given, str) else Path(given), *said)


def _whole(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, Integral):
        raise InvalidValue(f"the steps of a run are whole numbers; got {step!r}.")
    return int(step)


def _ordered(
    name: str, found: list[Checkpoint], model: Architecture | None, passed_over: tuple[str, ...] = ()
) -> TrainingRun:
    _refuse_two_units(found)
    found = sorted(found, key=lambda checkpoint: checkpoint.step)
    for one, other in pairwise(found):
        if one.step == other.step:
            raise NameClash(
                f"{str(one.given)!r} and {str(other.given)!r} are both {one.unit} {one.step}; leave one of them out."
            )
    return TrainingRun(name, _enough(tuple(found), name), model, passed_over)


def _refuse_two_units(found: Sequence[Checkpoint]) -> None:
    by_unit = {checkpoint.unit: checkpoint for checkpoint in found}
    if len(by_unit) > 1:
        raise InvalidValue(
            f"{str(by_unit['step'].given)!r} tells its step and {str(by_unit['epoch'].given)!r} its epoch; pass a "
            "mapping from steps to files."
        )


def _enough(found: tuple[Checkpoint, ...], name: str) -> tuple[Checkpoint, ...]:
    if len(found) < LEAST:
        only = f"{len(found)}: {found[0].words}" if found else "none"
        raise SourceError(f"{name!r} needs at least {LEAST} checkpoints, one of them the final one; got {only}.")
    return found


def _natural(path: Path) -> list[Any]:
    """Sort `step_9` before `step_10`."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]


def _shown(steps: Sequence[int], most: int = 6) -> str:
    return ", ".join(map(str, steps[:most])) + (f", ... {steps[-1]}" if len(steps) > most else "")
