"""The base of all statistics: they are updated, merged, written to a file and read back. `Outputs` is the smallest.

A file holds the attributes that a class names in `stored`: numbers, texts, tensors, arrays, and lists, tuples, mappings
and `Stored` objects of these. Nothing but such classes is made when a file is read, and none of their code is run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from netkin import files
from netkin.arrays import as_tensor, label_tensor, require_finite, summing_dtype
from netkin.errors import FileError, InvalidValue, NoValue, ShapeError
from netkin.statistics import schema

if TYPE_CHECKING:
    from typing_extensions import Self

_CLASSES: dict[str, type[Stored]] = {}
_RENAMED = {"_Incomplete": "IncompleteBatch"}


def _known_as(full_name: str) -> str:
    """Return the name of a class in files: one of netkin by its own name, wherever its module was or is."""
    package, *_, name = full_name.split(".")
    return f"netkin.{_RENAMED.get(name, name)}" if package == "netkin" else full_name


def _name_of_class(kind: type) -> str:
    return _known_as(f"{kind.__module__}.{kind.__qualname__}")


class Stored:
    """An object that a file can hold, by the attributes that its class names, each with its field of `schema`."""

    stored: ClassVar[Collection[str]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _CLASSES[_name_of_class(cls)] = cls

    def flush(self) -> None:
        """Bring the object into the form in which it is stored."""

    def check(self) -> None:
        """Refuse attributes from a file that do not fit each other, by a `ValueError`; each fits its own field."""

    def clear_cache(self) -> None:
        """Forget what was computed from the stored attributes, and can be computed again."""

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a file must hold: named tensors, and the rest as JSON."""
        tensors: dict[str, Tensor] = {}
        self.flush()
        return tensors, {name: to_plain(getattr(self, name), tensors, name) for name in self.stored}

    @classmethod
    def _restored(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any], under: str = "") -> Self:
        """Return the object that `_state` described; the names of its tensors begin with `under`."""
        made = cls.__new__(cls)
        for name in cls.stored:
            if name in header or not hasattr(cls, name):  # else the default of what files of older versions lack
                setattr(made, name, from_plain(header[name], tensors, under))
        if isinstance(cls.stored, Mapping):
            schema.check_fields(made, cls.stored)
        made.check()
        made.clear_cache()
        return made


class Statistic(Stored, ABC):
    """A small, mergeable summary of data, which need not be kept."""

    kind: ClassVar[str]

    @abstractmethod
    def update(self, *args: Any, **options: Any) -> None:
        """Fold one batch in."""

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return the statistic of the data of both; neither is changed."""

    def _copy(self) -> Self:
        tensors, header = self._state()
        return self._restored({name: tensor.clone() for name, tensor in tensors.items()}, header)

    def to_file(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the statistic to one file, at once or not at all."""
        tensors, header = self._state()
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        files.write(path, self.kind, header, arrays, overwrite=overwrite)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Return the statistic that was written to `path`; it can be updated further."""
        header, arrays = files.read(path, kind=cls.kind)
        with files.damage_reported(path):
            return cls._restored({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, header)

    def _refuse_unlike(self, other: Any, **facts: str) -> None:
        """Refuse to merge with a statistic of another kind, or one that differs in some fact, read off an attribute."""
        if type(self) is not type(other):
            raise ShapeError(f"a {self.kind} can't be merged with a {getattr(other, 'kind', type(other).__name__)}.")
        for what, attribute in facts.items():
            mine, theirs = getattr(self, attribute), getattr(other, attribute)
            if mine != theirs:
                raise ShapeError(f"these statistics can't be merged: their {what} differ, {mine!r} and {theirs!r}.")


def to_plain(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return `value` as JSON; tensors and arrays are put into `tensors` under their `path`."""
    if isinstance(value, (Tensor, np.ndarray)):
        tensor = torch.as_tensor(value).detach()
        tensors[path] = _plain(tensor)
        special = {torch.bfloat16: "bfloat16"}.get(tensor.dtype, "complex" if tensor.is_complex() else "tensor")
        return {"array" if isinstance(value, np.ndarray) else special: path}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop]}
    if isinstance(value, Stored):
        inside, header = value._state()
        tensors |= {f"{path}.{name}": tensor for name, tensor in inside.items()}
        return {"class": _name_of_class(type(value)), "path": f"{path}.", "holds": header}
    if isinstance(value, Mapping):
        parts = [
            [to_plain(key, tensors, ""), to_plain(one, tensors, f"{path}.{i}")]
            for i, (key, one) in enumerate(value.items())
        ]
        return {"mapping": parts}
    if isinstance(value, (tuple, list)):
        parts = [to_plain(one, tensors, f"{path}.{i}") for i, one in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise FileError(
        f"a file can't hold a {type(value).__name__}; let what is saved be tensors, numbers, texts, lists and mappings."
    )


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor in the same bits, of a type that NumPy knows."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def from_plain(written: Any, tensors: Mapping[str, Tensor], under: str = "") -> Any:
    """Return what `to_plain` wrote; the names of its tensors begin with `under`."""
    if isinstance(written, list):
        return [from_plain(one, tensors, under) for one in written]
    if not isinstance(written, dict):
        return written
    if "class" in written:
        kind, path = _CLASSES[_known_as(written["class"])], under + written["path"]
        if kind._restored.__qualname__ == Stored._restored.__qualname__:
            return kind._restored(tensors, written["holds"], path)
        own = {name.removeprefix(path): tensor for name, tensor in tensors.items() if name.startswith(path)}
        return kind._restored(own, written["holds"])  # a collector that restores itself knows its own names alone
    ((kind, value),) = written.items()
    makers = {
        "tensor": lambda: tensors[under + value],
        "complex": lambda: torch.view_as_complex(tensors[under + value]),
        "bfloat16": lambda: tensors[under + value].view(torch.bfloat16),
        "float": lambda: float(value),
        "array": lambda: tensors[under + value].numpy(),
        "dtype": lambda: getattr(torch, value),
        "slice": lambda: slice(*value),
        "mapping": lambda: {from_plain(key, tensors, under): from_plain(one, tensors, under) for key, one in value},
        "tuple": lambda: tuple(from_plain(one, tensors, under) for one in value),
    }
    return makers[kind]()


class Outputs(Statistic):
    """Accuracies and agreement of two classifiers as counts, and summed cross-entropies.

    `joint[i, j]` counts the examples that the first calls i and the second j.

    Example:
        >>> outputs = Outputs(classes=2)
        >>> outputs.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]]), [0, 1])
        >>> outputs.accuracy_a, outputs.accuracy_b, outputs.agreement
        (1.0, 0.5, 0.5)
    """

    kind = "Outputs"
    feeds = frozenset({"outputs"})
    _SUMS = ("right_a", "right_b", "entropy_a", "entropy_b", "entropy_ab", "labelled")
    stored = schema.fields(
        classes=schema.COUNT, n=schema.COUNT, joint=schema.tensor("classes", "classes", dtypes=(torch.int64,)),
        _sums=schema.mapping_of(schema.NUMBER, schema.one_of(*_SUMS)),
    )  # fmt: skip

    def __init__(self, classes: int):
        if classes < 2:
            raise InvalidValue(f"a classifier has at least 2 classes; got {classes}.")
        self.classes, self.n = classes, 0
        self.joint = torch.zeros(classes, classes, dtype=torch.int64)
        self._sums = dict.fromkeys(self._SUMS, 0.0)

    def check(self) -> None:
        schema.refuse_unless(self.classes > 1 and {*self._sums} == {*self._SUMS}, "the sums of outputs")

    def update(self, a: Any, b: Any, labels: Any = None) -> None:
        """Add one batch of logits, n × classes each, with the true labels if known."""
        a, b = self._logits(a, "a"), self._logits(b, "b")
        if len(a) != len(b):
            raise ShapeError(f"`a` and `b` must answer for the same examples; got {len(a)} and {len(b)}.")
        if labels is not None:
            labels = self._labels(labels, a)
        said_a, said_b = a.argmax(1), b.argmax(1)
        self.n += len(a)
        self.joint += (
            torch.bincount(said_a * self.classes + said_b, minlength=self.classes**2).reshape_as(self.joint).cpu()
        )
        self._sums["entropy_ab"] += float(F.cross_entropy(a, b.softmax(1), reduction="sum"))
        if labels is None:
            return
        self._sums["labelled"] += len(labels)
        for side, logits, said in (("a", a, said_a), ("b", b, said_b)):
            self._sums[f"right_{side}"] += float((said == labels).sum())
            self._sums[f"entropy_{side}"] += float(F.cross_entropy(logits, labels, reduction="sum"))

    def _labels(self, labels: Any, logits: Tensor) -> Tensor:
        labels = label_tensor(labels, logits.device)
        if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
            raise ShapeError(
                f"labels must be a list of class numbers; got shape {tuple(labels.shape)} of {labels.dtype}."
            )
        if len(labels) != len(logits):
            raise ShapeError(f"there are {len(labels)} labels for {len(logits)} examples.")
        outside = labels[(labels < 0) | (labels >= self.classes)]
        if len(outside):
            raise InvalidValue(f"labels must lie between 0 and {self.classes - 1}; got {int(outside[0])}.")
        return labels.long()

    def _logits(self, logits: Any, name: str) -> Tensor:
        logits = as_tensor(logits, name).detach()
        if logits.ndim != 2 or logits.shape[1] != self.classes:
            raise ShapeError(f"`{name}` must be logits of shape (n, {self.classes}); got {tuple(logits.shape)}.")
        require_finite(logits, f"`{name}`")
        return logits.to(summing_dtype(logits.device))

    def merge(self, other: Self) -> Self:
        """Return the counts of both."""
        self._refuse_unlike(other, classes="classes")
        merged = type(self)(self.classes)
        merged.n, merged.joint = self.n + other.n, self.joint + other.joint
        merged._sums = {name: self._sums[name] + other._sums[name] for name in self._SUMS}
        return merged

    @property
    def agreement(self) -> float:
        """The share of examples on which both give the same answer."""
        return self._share(float(self.joint.trace()), self.n)

    @property
    def accuracy_a(self) -> float:
        """The share of labelled examples that the first gets right."""
        return self._share(self._sums["right_a"], self._sums["labelled"])

    @property
    def accuracy_b(self) -> float:
        """The share of labelled examples that the second gets right."""
        return self._share(self._sums["right_b"], self._sums["labelled"])

    @property
    def cross_entropy_a(self) -> float:
        """The mean cross-entropy of the first to the labels, in nats."""
        return self._share(self._sums["entropy_a"], self._sums["labelled"])

    @property
    def cross_entropy_b(self) -> float:
        """The mean cross-entropy of the second to the labels, in nats."""
        return self._share(self._sums["entropy_b"], self._sums["labelled"])

    @property
    def cross_entropy_ab(self) -> float:
        """The mean cross-entropy of the first to the second's answers, in nats."""
        return self._share(self._sums["entropy_ab"], self.n)

    def _share(self, part: float, whole: float) -> float:
        if not whole:
            raise NoValue(
                "no labelled examples were folded in; pass `labels` to `update`." if self.n else "no batch yet."
            )
        return part / whole
