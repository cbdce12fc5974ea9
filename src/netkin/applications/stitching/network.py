"""The stitched network: the head of one model, a transformation, and the tail of another, as one ordinary module.

The `Transformation` is the map as a module: a 1 × 1 convolution, a linear layer, or one linear layer for every token.
A `Stitch` is that network and how it came to be; its file holds the transformation without the models.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from netkin import __version__, files
from netkin.applications.stitching.evaluating import Evaluation, evaluate_all, warn_of_doubt
from netkin.applications.stitching.joining import Adapter, LayerOutput, Pair
from netkin.applications.stitching.maps import LinearMap
from netkin.arrays import HALF
from netkin.errors import FileError, InvalidValue, NoValue, ShapeError, outside
from netkin.identity import weights_digest
from netkin.progress import ProgressOption, showing
from netkin.representations.cutting import Tail, run_until, tail
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import FLOATING, Forward, device_of, dtype_of
from netkin.representations.layers import modules, split_call, unwrapped
from netkin.results.records import as_record, now
from netkin.settings import evaluating
from netkin.sources.names import by_name

KIND = "stitch"
FIELDS = ("method", "examples", "names", "seed", "history", "training", "version", "created", "provenance")


class Transformation(nn.Module):
    """Brings activations of one layer into the form of another and maps their channels: ``x @ matrix + shift``.

    With `rank` the map is a bottleneck of two factors, which start as the best approximation of the matrix given.
    """

    def __init__(self, linear: LinearMap, adapter: Adapter, *, rank: int | None = None):
        super().__init__()
        p, q = adapter.a.width, adapter.b.width
        if linear.weight.shape != (p, q):
            raise ShapeError(f"the map is {tuple(linear.weight.shape)}, and the layers need {(p, q)}.")
        require_rank(rank, adapter)
        self.adapter, self.rank = adapter, rank
        narrowing = [] if rank is None else [_layer(adapter.b, p, rank, bias=False)]
        self.linear = nn.Sequential(*narrowing, _layer(adapter.b, rank or p, q, bias=True))
        self.set(linear)

    def forward(self, output: Tensor) -> Tensor:
        """Return what the second model's layer would have given."""
        return self.linear(self.adapter(output))

    @property
    def matrix(self) -> Tensor:
        """The map of channels, p × q."""
        first, *others = [weight.flatten(1).T for weight in self._weights]
        return first if not others else first @ others[0]

    @property
    def shift(self) -> Tensor:
        """What is added, of length q."""
        return self.linear[-1].get_parameter("bias")

    @property
    def _weights(self) -> list[Tensor]:
        return [part.get_parameter("weight") for part in self.linear]

    @torch.no_grad()
    def set(self, linear: LinearMap) -> None:
        """Take over a map; a bottleneck takes its best approximation in the Frobenius norm."""
        factors = [linear.weight] if self.rank is None else _factor(linear.weight, self.rank)
        for weight, factor in zip(self._weights, factors, strict=True):
            weight.copy_(factor.T.reshape(weight.shape))
        self.shift.copy_(linear.bias)

    def as_map(self) -> LinearMap:
        """Return the map of channels unchanged."""
        return LinearMap(self.matrix.detach().double(), self.shift.detach().double())


def read_transformation(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Transformation:
    """Return the transformation that a file holds."""
    first, second = (as_record(LayerOutput, end) for end in header["ends"])
    (p, q), rank = (first.width, second.width), header["rank"]
    held, needed = sum(array.size for array in arrays.values()), q + (p * q if rank is None else (p + q) * rank)
    if held != needed or min(p, q, rank or 1) < 1:  # before a map of any size is made
        raise ValueError(
            f"its layers have {p:,} and {q:,} channels, and the map {held:,} numbers in place of {needed:,}"
        )
    blank = LinearMap(torch.zeros(p, q), torch.zeros(q))
    transformation = Transformation(blank, Adapter(first, second, header["resize"]), rank=rank).double()
    transformation.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    return transformation


def require_rank(rank: int | None, adapter: Adapter) -> None:
    """Refuse a rank that no map between two layers has."""
    most = min(adapter.a.width, adapter.b.width)
    if rank is not None and not 1 <= rank <= most:
        raise InvalidValue(f"`rank` must lie between 1 and the smaller width, {most:,}; got {rank}.", argument="rank")


def _layer(end: LayerOutput, inputs: int, outputs: int, bias: bool) -> nn.Module:
    # its weights are set at once, so none are drawn: the random state of the user stays as it is
    if end.kind != "maps":
        return skip_init(nn.Linear, inputs, outputs, bias=bias)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(end.space) - 1]
    return skip_init(kind, inputs, outputs, kernel_size=1, bias=bias)


def _factor(weight: Tensor, rank: int) -> list[Tensor]:
    """Return two factors of equal size whose product is the best approximation of that rank."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    root = values[:rank].sqrt()
    return [left[:, :rank] * root, root.unsqueeze(1) * right[:rank]]


class Stitched(nn.Module):
    """The head of `a` up to `layer_a`, the transformation, and what `b` does after `layer_b`.

    Both models run in evaluation mode, whatever their own mode and `train()`: a stitch must not change their
    statistics. Afterwards they have their own mode again.
    """

    def __init__(
        self, a: nn.Module, layer_a: str, b: nn.Module, layer_b: str, transformation: Transformation, cuts: bool = True
    ):
        super().__init__()
        self.a, self.b, self.transformation = a, b, transformation
        self.layer_a, self.layer_b, self.cuts = layer_a, layer_b, cuts
        self._tail: list[Tail] = []  # in a list, so that it is no child of this module

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the output of the second model for what the first makes of the inputs.

        Both models get them as they are given here. A single one may also be a batch, which is fed as `nk.stitch` does:
        of a tuple the first element, a mapping as keywords without its labels.
        """
        if len(inputs) == 1 and not keywords:
            return self.finish(self.transformation(self.begin(inputs[0])), inputs[0])
        batch = (inputs, keywords)
        return self.finish(self.transformation(self.begin(batch, _called)), batch, _called)

    def begin(self, batch: Any, forward: Forward | None = None) -> Tensor:
        """Return what the first model gives at its layer; nothing after it is computed."""
        with evaluating(self.a):
            given = run_until(self.a, self.layer_a, batch, forward)
        return main_tensor(given, self.layer_a).to(self.transformation.shift)

    def finish(self, output: Tensor, batch: Any, forward: Forward | None = None) -> Any:
        """Return what the second model makes of `output` at its layer."""
        given = dtype_of(self.b)
        if given in HALF:  # the transformation is more precise, so that training can take small steps
            output = output.to(given)
        recurrent = torch.is_grad_enabled() and any(isinstance(one, nn.RNNBase) for one in self.b.modules())
        # in evaluation mode gradients can't go back through recurrent layers of cuDNN, through torch's own they can
        with evaluating(self.b), torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
            return self.tail(output, batch, forward)

    @property
    def tail(self) -> Tail:
        """What the second model does after its layer."""
        self.cut()
        return self._tail[0]

    def cut(self) -> None:
        """Cut the second model now, unless that was done: once it has hooks it can't be."""
        if self._tail:
            return
        with evaluating(self.b):  # what depends on the mode is fixed when the model is traced
            found = tail(self.b, self.layer_b)
        uncut = found.graph is not None and not self.cuts
        self._tail.append(Tail(self.layer_b, self.b, None, "its cut gave other numbers") if uncut else found)

    @property
    def cut_words(self) -> str:
        """How both models were cut and what is wasted, as text."""
        met = self.transformation.adapter.words
        head = f"first model stopped after {self.layer_a!r}, nothing after it is computed"
        return "; ".join(filter(None, [head, met, f"second model {self.tail.cut_words}"]))

    def train(self, mode: bool = True) -> Stitched:
        """Set the mode of the transformation alone."""
        self.training = mode
        self.transformation.train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tail": []}  # made again from the models when needed

    def _apply(self, fn: Any, recurse: bool = True) -> Stitched:
        self._tail.clear()  # it may hold tensors that `fn` replaces
        super()._apply(fn, recurse)
        return self


def stitched_network(
    a: nn.Module,
    b: nn.Module,
    pair: Pair,
    linear: LinearMap,
    adapter: Adapter,
    rank: int | None = None,
    cuts: bool = True,
) -> Stitched:
    """Return layers of two models joined by a map, which is where `b` is, in the precision of `b`, or float32 at least.

    Args:
        a: the first model.
        b: the second model.
        pair: the layer of each.
        linear: the map of channels.
        adapter: how the activations of the first take the form of the second.
        rank: that of a bottleneck; None for a full map.
        cuts: whether `b` can be cut at its layer (see `joints`).
    """
    given = dtype_of(b)
    transformation = Transformation(linear, adapter, rank=rank)
    transformation.to(device_of(b), torch.float32 if given in HALF else given)
    transformation.set(linear)  # again, where it may be float64 by now
    return Stitched(a, pair[0], b, pair[1], transformation, cuts=cuts)


def _called(model: nn.Module, batch: Any) -> Any:
    inputs, keywords = batch
    return model(*inputs, **keywords)


@dataclass(frozen=True, repr=False)
class Stitch:
    """A stitch of two models: the transformation, the network it makes, and how it came to be.

    `method` is how the transformation was found, from so many `examples`. `network` is an ordinary module that holds
    both models themselves, not copies. Of a training on the task loss `history` has a record every so many steps, and
    `training` is its record. `provenance` has the digests of weights, data and settings, and the call.
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
        return self.transformation.adapter.resize

    @property
    def cut_words(self) -> str:
        """How the models were cut, and what is wasted, as text."""
        return self.network.cut_words

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

    @by_name(data="data")
    def evaluate(self, data: Any, *, examples: int | None = None, progress: ProgressOption = None) -> Evaluation:
        """Return what the stitched network can do on `data`: batches ``(inputs, labels)``, or inputs alone."""
        with showing(progress):
            (judged,) = evaluate_all([self.network], data, examples, name=self.names[0])
        warn_of_doubt(judged)
        return judged

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the transformation and how it came to be to one file; the models are not in it.

        A file that is there is written over only with `overwrite`.
        """
        network, transformation = self.network, self.transformation
        models = [Description.of(model) for model in (network.a, network.b)]
        weights = {f"weights {side}": model.digests[model.precision] for side, model in zip("ab", models, strict=True)}
        header = {name: getattr(self, name) for name in FIELDS} | {
            "layers": self.layers,
            "ends": [asdict(transformation.adapter.a), asdict(transformation.adapter.b)],
            "resize": transformation.adapter.resize,
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
        title, labels = f"{self.method}: {' → '.join(_labels(self))}", _labels(self)
        figures = import_module("netkin.reporting.figures")
        return figures.plot_matrix(self.map.weight.cpu().numpy(), labels, title, path, ax, overwrite=overwrite)

    def __str__(self) -> str:
        return _as_text(self, self.cut_words)

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class StitchRecord:
    """The content of a stitch's file without the two models: its provenance, its scores, and its transformation.

    `models` describes the models that belong to it; `cuts` is whether the second one was cut at its layer.
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

    def __str__(self) -> str:
        return _as_text(self)

    __repr__ = __str__


def _labels(stitch: Stitch | StitchRecord) -> tuple[str, str]:
    (first, second), (x, y) = stitch.names, stitch.layers
    return f"{first}/{x}" if x else first, f"{second}/{y}" if y else second


def _as_text(stitch: Stitch | StitchRecord, cut_words: str = "") -> str:
    adapter = stitch.transformation.adapter
    heading = f"{' → '.join(_labels(stitch))} by {stitch.method}, from {stitch.examples:,} examples"
    judged = "" if stitch.evaluation is None else str(stitch.evaluation)
    return "\n".join(filter(None, [heading, f"{adapter.a} → {adapter.b}", cut_words, judged]))


@overload
def load_stitch(path: str | os.PathLike[str], a: nn.Module, b: nn.Module) -> Stitch: ...


@overload
def load_stitch(path: str | os.PathLike[str]) -> StitchRecord: ...


@by_name(models="a b")
def load_stitch(
    path: str | os.PathLike[str], a: nn.Module | None = None, b: nn.Module | None = None
) -> Stitch | StitchRecord:
    """Return the stitch that was saved at `path`, joining `a` and `b`, the same two models.

    Without models the record of the stitch comes back, with its transformation. Other architectures, or models without
    the layers, are refused. Other weights give a warning, and the evaluation is dropped; the same weights in another
    precision are no others.
    """
    header, arrays = files.read(path, kind=KIND)
    with files.damage_reported(path):
        rest = {key: one for key, one in header.items() if key not in ("kind", "format", "ends", "resize", "rank")}
        record = as_record(StitchRecord, rest | {"transformation": read_transformation(header, arrays)})
    if a is None or b is None:
        return record
    layers, evaluation, read, others = record.layers, record.evaluation, record.transformation, list[str]()
    for which, model, layer, then in zip(("first", "second"), (a, b), layers, record.models, strict=True):
        given = Description.of(model)
        _require_same_architecture(path, which, then, given)
        if split_call(layer)[0] not in modules(model):
            raise FileError(f"{str(path)!r} holds a stitch at layer {layer!r} of the {which} model, which has none.")
        others += [which] * (not have_same_weights(then, given))
    if others:
        who = f"the {' and the '.join(others)} model {'has' if len(others) == 1 else 'have'}"
        dropped = "; its evaluation is dropped, call `evaluate`" if evaluation is not None else ""
        warnings.warn(
            f"{who} other weights than when the stitch in {str(path)!r} was made, and it fits those alone{dropped}.",
            stacklevel=outside(),
        )
    network = stitched_network(a, b, layers, read.as_map(), read.adapter, rank=read.rank, cuts=record.cuts)
    network.transformation.load_state_dict(read.state_dict())  # a bottleneck has its own factors
    facts = {name: getattr(record, name) for name in FIELDS}
    return Stitch(network, **facts, evaluation=None if others else evaluation)


@dataclass(frozen=True)
class Description:
    """What identifies a model: its class, the shapes of its tensors, and their digest in each precision."""

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
        """Return the shape of a tensor as text."""
        return " × ".join(map(str, self.shapes[name])) or "one number" if name in self.shapes else "absent"


def have_same_weights(one: Description, other: Description) -> bool:
    """Return whether two models have the same weights, in the coarser of their precisions."""
    both = [dtype for dtype in FLOATING if _dtype_name(dtype) in (one.precision, other.precision)]
    coarser = _dtype_name(max(both, key=lambda dtype: torch.finfo(dtype).eps))
    return one.digests[coarser] == other.digests[coarser]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _require_same_architecture(path: Any, which: str, then: Description, given: Description) -> None:
    odd = [name for name in {**then.shapes, **given.shapes} if then.shape(name) != given.shape(name)]
    if odd:
        raise FileError(
            f"{str(path)!r} holds a stitch whose {which} model is another architecture, a {then.kind}: {odd[0]!r} "
            f"is {then.shape(odd[0])} there and {given.shape(odd[0])} in the {given.kind} given ({len(odd):,} differ)."
        )
