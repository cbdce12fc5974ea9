"""`Stitch`: two models joined, and how that came to be; in a file without the models themselves."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, overload

import torch
from torch import Tensor, nn

from netkin import __version__, files
from netkin.applications.stitching.ends import End, Meeting
from netkin.applications.stitching.evaluating import Evaluation, evaluated
from netkin.applications.stitching.joining import Stitched, stitched_network
from netkin.applications.stitching.matching import LinearMap
from netkin.applications.stitching.transformations import Transformation
from netkin.errors import FileFault, InflatedWarning, NoValue
from netkin.identity import weights_digest
from netkin.representations.inputs import FLOATING, dtype_of
from netkin.representations.layers import modules, split_call, unwrapped
from netkin.results.records import checked, now

KIND = "stitch"
SIDES = ("first", "second")
FIELDS = ("method", "examples", "names", "seed", "history", "training", "version", "created", "provenance")


@dataclass(frozen=True, repr=False)
class Stitch:
    """A stitch of two models: the transformation, the network it makes, and how it came to be.

    `method` is how the transformation was found, from so many `examples`. `network` is an ordinary module that holds
    both models themselves, not copies. Of a training on the task loss `history` has a record every so many steps, and
    `training` says how it ended. `provenance` has the digests of weights, data and settings, and the call.
    """

    network: Stitched
    method: str
    examples: int
    names: tuple[str, str] = ("a", "b")
    seed: int = 0
    evaluation: Evaluation | None = None
    history: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    training: Mapping[str, Any] | None = field(default=None, repr=False)
    version: str = __version__
    created: str = field(default_factory=now)
    provenance: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def transformation(self) -> Transformation:
        """The map from the first model's layer to the second's, an ordinary module."""
        return self.network.transformation

    @property
    def layers(self) -> tuple[str, str]:
        """The layer of the first model and that of the second."""
        return self.network.layer_a, self.network.layer_b

    @property
    def resize(self) -> str | None:
        """How maps were brought to the other size; None where that was not needed."""
        return self.transformation.meeting.resize

    @property
    def how(self) -> str:
        """How the models were cut, and what is wasted, in words."""
        return self.network.how

    @property
    def map(self) -> LinearMap:
        """The map of channels: `weight` p × q, `bias` of length q."""
        return self.transformation.as_map()

    @property
    def relative_accuracy(self) -> float:
        """The accuracy of the stitched network on the `test` data, as a share of the second model's."""
        judged = self.evaluation
        if judged is None or judged.accuracy is None:
            raise NoValue("there is no relative accuracy without labelled test data; pass `test=` or call `evaluate`.")
        if judged.relative_accuracy is None:
            raise NoValue(
                f"there is no relative accuracy, as the second model itself gets none of {judged.examples:,} test "
                "examples right; are these its labels?"
            )
        return judged.relative_accuracy

    def evaluate(self, data: Any, *, examples: int | None = None) -> Evaluation:
        """Return what the stitched network can do on `data`: batches ``(inputs, labels)``, or inputs alone."""
        judged = evaluated(self.network, data, examples, name=self.names[0])
        warn_of_doubt(judged)
        return judged

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the transformation and how it came to be to one file; the models are not in it.

        A file that holds no stitch is written over only with `overwrite`.
        """
        network, transformation = self.network, self.transformation
        models = [Description.of(model) for model in (network.a, network.b)]
        weights = {f"weights {side}": model.digests[model.precision] for side, model in zip("ab", models, strict=True)}
        header = {name: getattr(self, name) for name in FIELDS} | {
            "layers": self.layers,
            "ends": [asdict(transformation.meeting.a), asdict(transformation.meeting.b)],
            "resize": transformation.meeting.resize,
            "rank": transformation.rank,
            "cuts": network.cuts,
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "models": [asdict(model) for model in models],
            "provenance": {**weights, **self.provenance},
        }
        arrays = {name: tensor.detach().cpu().double().numpy() for name, tensor in transformation.state_dict().items()}
        files.write(path, KIND, header, arrays, overwrite=overwrite)

    def plot(self, path: str | os.PathLike[str] | None = None, ax: Any = None, *, overwrite: bool = False) -> Any:
        """Return a figure of the matrix, or draw it into `ax`; write it where a `path` is given."""
        title = f"{self.method}: {' → '.join(self._ends)}"
        matrices = import_module("netkin.reporting.figures")
        return matrices.plot_matrix(self.map.weight.cpu().numpy(), self._ends, title, path, ax, overwrite=overwrite)

    @property
    def _ends(self) -> tuple[str, str]:
        return _ends_of(self.names, self.layers)

    def __str__(self) -> str:
        return _as_text(self, self.how)

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class StitchRecord:
    """What a stitch's file tells without the two models: how it came to be, what it was worth, and its transformation.

    `models` describes the models that belong to it; `cuts` says whether the second one was cut at its layer.
    """

    method: str
    examples: int
    names: tuple[str, str]
    layers: tuple[str, str]
    seed: int
    evaluation: Evaluation | None
    history: tuple[dict[str, Any], ...]
    training: Mapping[str, Any] | None
    version: str
    created: str
    models: tuple[Description, Description]
    transformation: Transformation
    cuts: bool
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def map(self) -> LinearMap:
        """The map of channels: `weight` p × q, `bias` of length q."""
        return self.transformation.as_map()

    @property
    def _ends(self) -> tuple[str, str]:
        return _ends_of(self.names, self.layers)

    def __str__(self) -> str:
        return _as_text(self)

    __repr__ = __str__


def _ends_of(names: tuple[str, str], layers: tuple[str, str]) -> tuple[str, str]:
    first, second = (f"{name}/{layer}" if layer else name for name, layer in zip(names, layers, strict=True))
    return first, second


def _as_text(stitch: Stitch | StitchRecord, how: str = "") -> str:
    meeting = stitch.transformation.meeting
    heading = f"{' → '.join(stitch._ends)} by {stitch.method}, from {stitch.examples:,} examples"
    judged = "" if stitch.evaluation is None else str(stitch.evaluation)
    return "\n".join(filter(None, [heading, f"{meeting.a} → {meeting.b}", how, judged]))


def warn_of_doubt(judged: Evaluation) -> None:
    """Warn where an evaluation is easily misread."""
    if judged.doubt:
        warnings.warn(judged.doubt, InflatedWarning, stacklevel=3)


@overload
def load_stitch(path: str | os.PathLike[str], a: nn.Module, b: nn.Module) -> Stitch: ...


@overload
def load_stitch(path: str | os.PathLike[str]) -> StitchRecord: ...


def load_stitch(
    path: str | os.PathLike[str], a: nn.Module | None = None, b: nn.Module | None = None
) -> Stitch | StitchRecord:
    """Return the stitch that was saved at `path`, joining `a` and `b`: the models of then, loaded anew.

    Without models the record of the stitch comes back, with its transformation.

    Other architectures, or models without the layers, are refused. Other weights give a warning, and what the stitch
    was worth with those of then is dropped; the same weights in another precision are no others.
    """
    record = _record(path)
    if a is None or b is None:
        return record
    known, layers, evaluation, read = record.models, record.layers, record.evaluation, record.transformation
    given = [Description.of(model) for model in (a, b)]
    for which, then, found in zip(SIDES, known, given, strict=True):
        _refuse_other(path, which, then, found)
    for which, model, layer in zip(SIDES, (a, b), layers, strict=True):
        if split_call(layer)[0] not in modules(model):
            raise FileFault(f"{str(path)!r} holds a stitch at layer {layer!r} of the {which} model, which has none.")
    others = [which for which, *both in zip(SIDES, known, given, strict=True) if not have_same_weights(*both)]
    if others:
        _warn_of_others(path, others, evaluation)
    network = stitched_network(a, b, layers, read.as_map(), read.meeting, rank=read.rank, cuts=record.cuts)
    network.transformation.load_state_dict(read.state_dict())  # a bottleneck has its own factors
    facts = {name: getattr(record, name) for name in FIELDS}
    return Stitch(network, **facts, evaluation=None if others else evaluation)


def _record(path: str | os.PathLike[str]) -> StitchRecord:
    header, arrays = files.read(path, kind=KIND)
    with files.damage_reported(path):
        transformation = _transformation(header, arrays)
        rest = {
            name: value for name, value in header.items() if name not in ("kind", "format", "ends", "resize", "rank")
        }
        return checked(StitchRecord, rest | {"transformation": transformation})


@dataclass(frozen=True)
class Description:
    """What a model is known again by: its class, the shapes of its tensors, and their digest in each precision."""

    kind: str
    shapes: Mapping[str, list[int]]
    precision: str
    digests: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> Description:
        """Describe a model."""
        model = unwrapped(model)
        state = {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
        shapes = {name: list(tensor.shape) for name, tensor in state.items()}
        digests = {_dtype_name(dtype): weights_digest(state, dtype) for dtype in FLOATING}
        return cls(type(model).__name__, shapes, _dtype_name(dtype_of(model) or torch.float32), digests)

    def shape(self, name: str) -> str:
        """Return the shape of a tensor in words."""
        return " × ".join(map(str, self.shapes[name])) or "one number" if name in self.shapes else "absent"


def _transformation(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Transformation:
    first, second = (checked(End, end) for end in header["ends"])
    most = sum(array.size for array in arrays.values())
    if not (0 < first.width <= most and 0 < second.width <= most):
        raise ValueError(f"its layers have {first.width:,} and {second.width:,} channels, and the map {most:,} numbers")
    blank = LinearMap(torch.zeros(first.width, second.width), torch.zeros(second.width))
    transformation = Transformation(blank, Meeting(first, second, header["resize"]), rank=header["rank"]).double()
    state = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    wanted, found = (
        {name: tuple(one.shape) for name, one in each.items()} for each in (transformation.state_dict(), state)
    )
    if wanted != found:
        raise ValueError(f"its weights have shapes {found}, and the layers need {wanted}")
    transformation.load_state_dict(state)
    return transformation


def have_same_weights(one: Description, other: Description) -> bool:
    """Tell whether two models have the same weights, in the coarser of their precisions."""
    both = [dtype for dtype in FLOATING if _dtype_name(dtype) in (one.precision, other.precision)]
    coarser = _dtype_name(max(both, key=lambda dtype: torch.finfo(dtype).eps))
    return one.digests[coarser] == other.digests[coarser]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_other(path: Any, which: str, then: Description, given: Description) -> None:
    odd = [name for name in {**then.shapes, **given.shapes} if then.shape(name) != given.shape(name)]
    if odd:
        raise FileFault(
            f"{str(path)!r} holds a stitch whose {which} model is another architecture, a {then.kind}: {odd[0]!r} "
            f"is {then.shape(odd[0])} there and {given.shape(odd[0])} in the {given.kind} given ({len(odd):,} differ)."
        )


def _warn_of_others(path: Any, others: list[str], evaluation: Evaluation | None) -> None:
    who = f"the {' and the '.join(others)} model {'has' if len(others) == 1 else 'have'}"
    dropped = "; its evaluation is dropped, call `evaluate`" if evaluation is not None else ""
    warnings.warn(
        f"{who} other weights than when the stitch in {str(path)!r} was made, and it fits those alone{dropped}.",
        stacklevel=3,
    )
