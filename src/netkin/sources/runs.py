"""Training runs: checkpoints of a folder, a list or a mapping, in the order of the steps in their names."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
from netkin.sources.weights import list_names, mismatches, read_state, renamed

ENDINGS = (".pt", ".pth", ".th", ".bin", ".ckpt", ".safetensors", ".pt2")
IN_FOLDERS = ("model.safetensors", "pytorch_model.bin")  # weights as the Hugging Face Trainer names them
_NUMBER = r"[ =_.-]*(\d+)([kKmM](?![A-Za-z]))?"
_STEP = re.compile(rf"(?:step|iter|iteration|checkpoint|ckpt|batch)s?{_NUMBER}", re.IGNORECASE)
_EPOCH = re.compile(rf"(?:epoch|(?<![A-Za-z])ep)s?{_NUMBER}", re.IGNORECASE)
_ANY = re.compile(_NUMBER)
_VERSION = re.compile(r"-v\d+$")  # what Lightning adds to a name that is taken
_THOUSANDS = {"": 1, "k": 1_000, "m": 1_000_000}
LEAST = 2  # checkpoints of a run

Architecture = str | nn.Module | Callable[[], nn.Module]
Source = Path | Mapping[str, Tensor] | nn.Module


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one step: a file, a folder, a state dict or the model itself."""

    step: int
    source: Source
    unit: str = "step"

    @property
    def words(self) -> str:
        """What a refusal calls it."""
        place = f" ({str(self.source)!r})" if isinstance(self.source, Path) else ""
        return f"{self.unit} {self.step}{place}"

    def read(self, architecture: Architecture | None = None) -> tuple[nn.Module, list[str]]:
        """Return the network of this checkpoint in evaluation mode, and as text what of its weights did not fit.

        A model that was given comes back as it is.
        """
        if isinstance(self.source, nn.Module):
            return self.source, []
        with refusing_unreadable(self.words):
            if isinstance(self.source, Path) and self.source.suffix == ".pt2":
                return load_model(str(self.source)), []
            if architecture is None and isinstance(self.source, Path) and (self.source / "config.json").is_file():
                return load_model(f"hf:{self.source}"), []
            if architecture is None:
                raise SourceError(
                    f"{self.words} holds weights alone, which do not say what network they belong to; name it with "
                    "`model`, as in model='netkin:resnet20' or model='package.module:function'.",
                    argument="model",
                )
            model = built(architecture)
            weights = model.state_dict()
            state = _fitting(self._state(), weights)
            faults = mismatches(state, weights)
            if not faults:
                model.load_state_dict(state, strict=False)  # counts of batches may be absent, which `mismatches` allows
            return in_evaluation(model), faults

    def _state(self) -> dict[str, Tensor]:
        if isinstance(self.source, Mapping):
            return dict(self.source)
        assert isinstance(self.source, Path)
        if not self.source.is_dir():
            return read_state(self.source)
        inside = [self.source / name for name in IN_FOLDERS if (self.source / name).is_file()]
        if not inside:
            raise SourceError(f"the folder {str(self.source)!r} holds no {' or '.join(IN_FOLDERS)}.")
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
            f"{type(architecture).__name__}.",
            argument="model",
        )
    model = seeded(architecture)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"`model` must return a torch.nn.Module; it returned an object of type {type(model).__name__}.",
            argument="model",
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
    for pattern, unit in [(_STEP, "step"), (_EPOCH, "epoch"), *([(_ANY, "step")] if bare else [])]:
        if numbers := pattern.findall(stem):
            number, thousands = numbers[-1]
            return int(number) * _THOUSANDS[thousands.lower()], unit
    return None


def as_checkpoint(content: Any, step: int, unit: str = "step") -> Checkpoint:
    """Return one checkpoint; what is no path, state dict or model is refused, and so is a file that is not there."""
    if isinstance(content, nn.Module):
        return Checkpoint(step, content, unit)
    if isinstance(content, Mapping):
        strange = [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
        if strange or not content:
            fault = f"{strange[0]!r} is no tensor" if strange else "it is empty"
            raise InvalidValue(f"the state dict of {unit} {step} must hold tensors by name; {fault}.", argument="run")
        return Checkpoint(step, content, unit)
    if not isinstance(content, (str, os.PathLike)):
        raise InvalidValue(
            f"{unit} {step} must be a file, a state dict or a torch module; got {type(content).__name__}.",
            argument="run",
        )
    path = Path(content).expanduser()
    if not path.exists() and ":" in str(content):
        return Checkpoint(step, load_model(str(content), seed=step), unit)
    if not path.exists():
        raise SourceError(f"found no checkpoint {str(path)!r} for {unit} {step}{near(path) or '.'}", argument="run")
    return Checkpoint(step, path, unit)


def _fitting(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` under the wanted names; where one prefix leads to all of them, as in a Lightning module, by it."""
    fitting = renamed(state, wanted)
    if all(name in wanted for name in fitting):
        return fitting
    first = next(iter(wanted), "")
    prefixes = [name.removesuffix(first) for name in state if name.endswith(f".{first}")]
    leading = [prefix for prefix in prefixes if all(prefix + name in state for name in wanted)]
    return {name: state[leading[0] + name] for name in wanted} if len(leading) == 1 else fitting


@dataclass(frozen=True)
class TrainingRun:
    """A training run: its checkpoints in the order of their steps, and the network that bare weights belong to.

    `passed_over` are the names in its folder that tell no step.
    """

    name: str
    checkpoints: tuple[Checkpoint, ...]
    architecture: Architecture | None = None
    passed_over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.checkpoints) < LEAST:
            only = f"1: {self.checkpoints[0].words}" if self.checkpoints else "none"
            raise SourceError(
                f"{self.name!r} needs at least {LEAST} checkpoints, one of them the final one; got {only}.",
                argument="run",
            )

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
        if self.architecture is not None:
            is_whole = isinstance(self.architecture, str) and self.architecture.startswith("hf:")
            return [str(self.architecture)] if is_whole else []
        last = self.checkpoints[-1].source
        return [f"hf:{last}"] if isinstance(last, Path) and (last / "config.json").is_file() else []

    def data(self, data: Any) -> Any:
        """Return data, by their name too, as the networks of the run take them."""
        models = [*self.whole, self.checkpoints[-1].source]
        return load_data(data, models=models) if isinstance(data, str) else data

    def at(self, step: int) -> nn.Module:
        """Return the network at `step`, which must have the architecture that the run ends with."""
        self._require_steps([step])
        if step == self.steps[-1]:
            return self.final
        checkpoint = self.checkpoints[self.steps.index(step)]
        final = self.final.state_dict()
        model, faults = checkpoint.read(self.architecture)
        faults = faults or mismatches(model.state_dict(), final)
        if faults:
            raise SourceError(
                f"the architecture changes within the run: at {checkpoint.words}, compared with {self.unit} "
                f"{self.steps[-1]}, {'; '.join(faults)}. Choose `steps` from one side of the change."
            )
        return model

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
            raise InvalidValue(
                f"`steps` is a list of {self.unit}s or how many of them; got {steps!r}.", argument="steps"
            )
        if isinstance(steps, Integral):
            if int(steps) < LEAST:
                raise InvalidValue(f"a run needs at least {LEAST} {self.unit}s; got steps={steps}.", argument="steps")
            places = np.linspace(0, len(self.steps) - 1, min(int(steps), len(self.steps))).round().astype(int)
            chosen = {self.steps[place] for place in places.tolist()}
        else:
            chosen = {*steps, self.steps[-1]}
            self._require_steps(chosen)
        return replace(self, checkpoints=tuple(part for part in self.checkpoints if part.step in chosen))

    def _require_steps(self, steps: Iterable[Any]) -> None:
        strange = [step for step in steps if step not in self.steps]
        if strange:
            listed_steps = [*map(str, self.steps[:6]), *([f"... {self.steps[-1]}"] if len(self.steps) > 6 else [])]
            raise UnknownName(
                f"no {self.unit} {strange[0]} in this run; it has {', '.join(listed_steps)}.", argument="steps"
            )


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
        checkpoints, passed_over = _in_folder(Path(run).expanduser())
        return TrainingRun(name or str(Path(run).expanduser()), _ordered(checkpoints), model, passed_over)
    if isinstance(run, Mapping):
        checkpoints = [as_checkpoint(content, _whole(step)) for step, content in run.items()]
    elif isinstance(run, Iterable) and not isinstance(run, (nn.Module, Tensor)):
        checkpoints = [_from_name(content) for content in run]
    else:
        raise InvalidValue(
            f"a run is a folder, a list of files, or a mapping from steps to checkpoints; got {type(run).__name__}.",
            argument="run",
        )
    return TrainingRun(name or "run", _ordered(checkpoints), model)


def _in_folder(folder: Path) -> tuple[list[Checkpoint], tuple[str, ...]]:
    """Return the checkpoints in a folder, and the names there that tell no step."""
    if not folder.is_dir():
        is_file = folder.is_file()
        raise SourceError(
            f"{str(folder)!r} is "
            + ("a file; name the folder of the checkpoints." if is_file else f"no folder{near(folder) or '.'}")
        )
    with refusing_unreadable(str(folder)):
        entries = sorted(entry for entry in folder.iterdir() if _is_checkpoint(entry))
    if not entries:
        raise SourceError(
            f"{str(folder)!r} holds no checkpoints: no file that ends in {', '.join(ENDINGS)}, and no folder with a "
            f"{' or '.join(IN_FOLDERS)}."
        )
    steps = {entry: step_in(entry.name, bare=False) for entry in entries}
    if not any(steps.values()):  # where some say step or epoch, the 20 of `best_resnet20.pt` is no step
        steps = {entry: step_in(entry.name) for entry in entries}
    checkpoints = [as_checkpoint(entry, *step) for entry, step in steps.items() if step]
    if not checkpoints:
        raise SourceError(
            f"none of the {len(entries)} checkpoints in {str(folder)!r} has a step in its name "
            f"({list_names([entry.name for entry in entries])}); name them like step_100.pt, or pass a mapping from "
            "steps to files."
        )
    return checkpoints, tuple(entry.name for entry, step in steps.items() if not step)


def _is_checkpoint(entry: Path) -> bool:
    if entry.is_dir():
        return any((entry / name).is_file() for name in (*IN_FOLDERS, *(f"{name}.index.json" for name in IN_FOLDERS)))
    return entry.suffix in ENDINGS and not entry.name.startswith(".")


def _from_name(path: Any) -> Checkpoint:
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidValue(
            f"a list of checkpoints holds files, whose names tell the steps; got {type(path).__name__}. Pass a "
            "mapping from steps to checkpoints.",
            argument="run",
        )
    step = step_in(Path(path).name)
    if step is None:
        raise SourceError(
            f"{str(path)!r} has no step in its name; name it like step_100.pt, or pass a mapping from steps to files.",
            argument="run",
        )
    return as_checkpoint(path, *step)


def _whole(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, Integral):
        raise InvalidValue(f"the steps of a run are whole numbers; got {step!r}.", argument="run")
    return int(step)


def _ordered(checkpoints: list[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return checkpoints by their steps; two of one step, and steps beside epochs, are refused."""
    by_unit = {checkpoint.unit: checkpoint for checkpoint in checkpoints}
    if len(by_unit) > 1:
        raise InvalidValue(
            f"{str(by_unit['step'].source)!r} tells its step and {str(by_unit['epoch'].source)!r} its epoch; pass a "
            "mapping from steps to files."
        )
    checkpoints = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    for first, second in pairwise(checkpoints):
        if first.step == second.step:
            raise NameClash(
                f"{str(first.source)!r} and {str(second.source)!r} are both {first.unit} {first.step}; leave one of "
                "them out."
            )
    return tuple(checkpoints)
