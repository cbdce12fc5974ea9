"""States: what is kept of one layer at one moment of training, enough for every linear measure unchanged by rotation.

Of n rows and d features n × d numbers are kept, unchanged. A layer wider than its rows is turned into its row space:
n × n numbers at most, in float64, whose inner products, also with the mean, are the layer's own. So a state takes no
more than n · min(n, d) numbers, however large the feature maps behind it are. A `Moment` holds the states of one step.

A `Probe` runs the same few `Examples` through a model that is being trained.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.comparing.alignment import Alignment, Pairs
from netkin.comparing.comparer import Comparer, measures_of
from netkin.comparing.spec import Spec as CompareSpec
from netkin.errors import ForwardError, InvalidValue, NoValue
from netkin.identity import settings_digest
from netkin.measures.registry import Measure
from netkin.representations import Recorder, batches_of, inference_mode_of
from netkin.representations.batch_axis import LearntLayers
from netkin.representations.hooks import mapped
from netkin.representations.inputs import Forward, Transform, device_of, length_if_known
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape
from netkin.results import Comparison
from netkin.settings import random_states_kept
from netkin.statistics import LayerSize, LinearRows, Moments, Study
from netkin.statistics.collector import Key
from netkin.statistics.linear_algebra import self_product
from netkin.statistics.rows import RowsSide


@dataclass(frozen=True)
class LayerState:
    """One layer at one step: its `rows` up to a rotation, on the CPU, its own `width` and what one example is.

    A layer that held NaN or Inf has no columns, and `fault` is the reason. `resolution` is the rounding unit of
    the data as they came, which the rows no longer show; 0 where they do.
    """

    rows: Tensor
    width: int
    shape: str
    fault: str = ""
    resolution: float = 0.0

    @property
    def bytes(self) -> int:
        """The memory that the rows take."""
        return self.rows.nbytes

    def side(self, name: str) -> RowsSide:
        """Return the layer as one side of a pair, with products in float64."""
        if self.fault:
            raise NoValue(f"{name} {self.fault}")
        return RowsSide(self.rows, name, torch.float64, width=self.width, resolution=self.resolution or None)


def state_of(rows: Tensor, shape: str, resolution: float = 0.0) -> LayerState:
    """Return what is kept of a layer's rows; nothing that shares their memory.

    `resolution` is the rounding unit of the layer's output, where it is not that of the rows.

    Example:
        >>> state = state_of(torch.randn(8, 1000), "flatten")
        >>> tuple(state.rows.shape), state.width
        ((8, 8), 1000)
    """
    count, width = rows.shape
    if not torch.isfinite(rows.sum()):
        wrong = int((~torch.isfinite(rows)).sum())
        if wrong:
            found = f"held {wrong:,} NaN or Inf among {rows.numel():,} values when the probe was taken."
            return LayerState(torch.zeros(count, 0), width, shape, found)
    kept = turned(rows) if width > count else rows.detach().to("cpu", copy=True).contiguous()
    return LayerState(kept, width, shape, resolution=resolution or torch.finfo(rows.dtype).eps)


def bytes_of(count: int, width: int, itemsize: int) -> int:
    """Return the most memory that the state of a layer of `count` rows and `width` features can take."""
    return 8 * count * count if width > count else itemsize * count * width


def turned(rows: Tensor) -> Tensor:
    """Return rows of n numbers at most with the same mean, lengths and angles as `rows`, in float64 on the CPU.

    The mean is taken off and joins the rows as one more, brought to their size, so that a large mean does not drown
    them. Of the n centred rows the last is minus the sum of the others: with A the first n - 1 and the mean, and
    ``AAᵀ = LLᵀ``, the rows of L replace those of A.
    """
    side = RowsSide(rows.detach().to("cpu") if rows.device.type == "mps" else rows.detach(), precision=torch.float64)
    mean = side.mean * side.scale
    length = float(mean.norm())
    try:
        size = float(side.norm) / len(rows) ** 0.5
    except NoValue:  # a constant layer is nothing but its mean
        return torch.full((len(rows), 1), length / side.scale, dtype=torch.float64)
    weight = size / length if length else 1.0
    centred = side.rows
    gram = _bordered(self_product(centred.mT), centred @ mean.mT * weight, (weight * length) ** 2)
    inside = _factor(gram, side.rounding)
    return ((inside[:-1] + inside[-1:] / weight) / side.scale).contiguous()


def _factor(gram: Tensor, rounding: float) -> Tensor:
    """Return rows with the inner products of n centred rows and one more, on the CPU.

    Where the first n - 1 rows and the one more depend on each other, ``U√Λ`` of ``UΛUᵀ`` takes the place of L.
    """
    count = len(gram) - 1
    free = torch.arange(count + 1, device=gram.device) != count - 1
    factor, failed = torch.linalg.cholesky_ex(gram[free][:, free])
    pivots = torch.diagonal(factor).square()
    if not int(failed) and bool((pivots > count * rounding * torch.diagonal(gram).max()).all()):
        factor = factor.cpu()
        return torch.cat([factor[:-1], -factor[:-1].sum(0, keepdim=True), factor[-1:]])
    values, vectors = torch.linalg.eigh(gram.cpu())
    real = values > count * rounding * values.max()
    return vectors[:, real] * values[real].sqrt()


def _bordered(gram: Tensor, border: Tensor, corner: float) -> Tensor:
    """Return a Gram matrix with one more example, by its products with the others and with itself."""
    last = torch.cat([border.mT, border.new_full((1, 1), corner)], dim=1)
    return torch.cat([torch.cat([gram, border], dim=1), last])


def require_measure(name: str, unchanged_by: frozenset[str], linear: bool) -> None:
    """Refuse a measure that these states don't suffice for."""
    if not linear:
        raise InvalidValue(
            f"a recorder keeps what linear measures read, and {name!r} is none; save checkpoints and use `nk.dynamics`."
        )
    if "rotation" not in unchanged_by:
        raise InvalidValue(
            f"a recorder keeps each layer up to a rotation, and {name!r} looks at single neurons; save checkpoints and "
            "use `nk.dynamics`."
        )


class Moment:
    """The layers' states at one step, with the decompositions that all their pairs share."""

    def __init__(self, step: int, unit: str, states: Mapping[str, LayerState], examples: int):
        self.step, self.name, self.states, self.examples = step, f"{unit} {step}", dict(states), examples
        self._sides: dict[str, RowsSide] = {}

    def side(self, layer: str) -> RowsSide:
        """Return a layer as one side of a pair."""
        if layer not in self._sides:
            self._sides[layer] = self.states[layer].side(f"layer {f'{self.name}/{layer}'!r}")
        return self._sides[layer]

    def clear_cache(self) -> None:
        """Forget the decompositions, which take more memory than the states."""
        self._sides.clear()

    @property
    def layers(self) -> list[LayerSize]:
        """The layers as a comparison lists them."""
        return [
            LayerSize(self.name, name, state.width, len(state.rows), self.examples, state.shape)
            for name, state in self.states.items()
        ]


class StateRows(LinearRows):
    """The states of two moments as a collector, so that they are compared like rows that a pass has kept."""

    kind = LinearRows.kind

    def __init__(self, a: Moment, b: Moment):
        super().__init__([([layer.key for layer in a.layers], [layer.key for layer in b.layers])])
        self._moments = {a.name: a, b.name: b}

    def pair(self, a: Any, b: Any, without: int | None = None) -> Moments:
        """Return the layers `a` and `b`, each (moment, layer), as linear measures read them."""
        x, y = (self._moments[name].side(layer) for name, layer in (a, b))
        return Moments(x, y)


def reads_states(measure: Measure) -> bool:
    """Return whether a measure can be read from states."""
    return any(kind.kind == StateRows.kind for kind in getattr(measure.facts.reads, "collectors", ()))


def between(a: Moment, b: Moment, measure: Measure) -> dict[str, float]:
    """Return each layer at moment `a` against itself at moment `b`, without those that have no value."""
    shared = [(layer, layer) for layer in b.states if layer in a.states]
    if not shared:
        return {}
    values = comparison(a, b, [measure], shared)[measure.id]
    return {layer: values[layer, layer] for layer, _ in shared if (layer, layer) not in values.missing}


def comparison(
    a: Moment, b: Moment, measures: Sequence[Measure], pairs: Any, data: str = "", origin: Mapping[str, str] = {}
) -> Comparison:
    """Return the layers at moment `a` against those at moment `b`; `origin` is their provenance."""
    found = _statistics(a, b, pairs).compute(measures, progress=False)
    assert isinstance(found, Comparison)
    ranks = {name: text for name, text in found.provenance.items() if name.startswith("directions")}
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    return replace(found, data=data, provenance={**origin, **versions, **ranks})


def _statistics(a: Moment, b: Moment, pairs: Any) -> Comparer:
    """Return the states of two moments as what a pass leaves."""
    layers: dict[Key, LayerSize] = {layer.key: layer for layer in (*a.layers, *b.layers)}
    study = Study(layers, [], examples=a.examples)
    made = Comparer.of(CompareSpec(pairs=pairs), [], Pairs([(a.name, b.name)], pairs), study)
    made.alignment, made.examples, made.collectors = Alignment(layers.values(), []), a.examples, [[StateRows(a, b)]]
    made.note(origins={a.name: {}, b.name: {}})
    return made


# --- probes -----------------------------------------------------------------------------------------------------------


class ProbeExamples:
    """The examples of all probes, read once: `batches`, their `count` and what the data are called.

    A tuple of arrays, or a list of arrays of different shapes as a loader gives it, is one batch. A loader's own
    generator is left in the state it had, so that a training loader may serve.
    """

    def __init__(self, data: Any, examples: int | None = None, batch: int = 512):
        self.name = _name_of(data)
        whole = [data] if _is_one_batch(data) else data
        with inference_mode_of(), random_states_kept(data=[data]):
            self.batches = [mapped(_copied, one) for one in batches_of(whole, examples, batch)]
        lengths = [length_if_known(one) for one in self.batches]
        self.count: int | None = None if None in lengths else sum(length or 0 for length in lengths)

    @cached_property
    def digest(self) -> str:
        """A checksum by which a resumed recording recognises its examples."""
        return settings_digest(self.batches, strict=False)


class Probe:
    """How a model is probed: its layers, what one example is, and how a batch is given to it."""

    def __init__(
        self,
        model: nn.Module,
        layers: Spec = None,
        shape: Shape | Mapping[str, Shape] = None,
        forward: Forward | None = None,
        transform: Transform | None = None,
    ):
        self.model, self._layers, self._shape = model, layers, shape
        self.settings = {"layers": layers, "shape": shape, "forward": forward, "transform": transform}
        self._forward, self._transform = forward, transform
        self._learnt: LearntLayers | None = None  # by the first probe, for all that follow
        Recorder(model, layers, shape=shape)  # refuses unknown layers and shapes before training begins

    def states(self, examples: ProbeExamples) -> dict[str, LayerState]:
        """Return the state of every layer; the model, its buffers and all random states are as before.

        Of one batch only the layer that has just run is held at full size; of several all wait for the last batch.
        """
        whole = len(examples.batches) == 1

        def state(name: str, rows: Tensor, valid: Tensor | None = None) -> LayerState:
            facts = recorder.facts[name]
            return state_of(rows, facts.shape, facts.resolution)

        recorder = self._recorder(state if whole else None)
        kept: dict[str, list[Any]] = {}
        with self._running(recorder):
            for batch in examples.batches:
                for name, part in recorder(batch).rows.items():
                    kept.setdefault(name, []).append(part)
            self._learnt = recorder.learnt
            if whole:
                return {name: state for name, (state,) in kept.items()}
            return {name: state(name, torch.cat(kept.pop(name))) for name in list(kept)}

    def bytes(self, examples: ProbeExamples) -> int:
        """Return the most memory that one probe will take, learnt from a run of few examples."""
        recorder, count = self._recorder(None), examples.count
        if count is None:
            raise ForwardError("the examples of these batches can't be counted; take one probe to learn its memory.")
        with self._running(recorder):
            every = recorder.learn(examples.batches[0]).values()
        return sum(
            bytes_of(facts.size[0] * count // facts.examples, facts.size[1], facts.dtype.itemsize) for facts in every
        )

    def _recorder(self, reduce: Any) -> Recorder:
        return Recorder(
            self.model,
            self._layers,
            shape=self._shape,
            forward=self._forward,
            transform=self._transform,
            reduce=reduce,
            learnt=self._learnt,
        )

    @contextmanager
    def _running(self, recorder: Recorder) -> Iterator[None]:
        """Run the model in its own precision, whatever autocast is on around us."""
        with ExitStack() as stack:
            stack.enter_context(inference_mode_of(self.model, exact=True))
            for device in {device_of(self.model).type, "cpu"}:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(recorder.open())
            yield


def is_first_process() -> bool:
    """Return whether this process is the one of rank 0, or the only one."""
    return rank() == 0


def rank() -> int:
    """Return the rank of this process among those that train together."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _is_one_batch(data: Any) -> bool:
    """Tell inputs with their labels from a list of batches: arrays of different shapes can't both be inputs."""
    if not isinstance(data, (tuple, list)) or not all(isinstance(part, (Tensor, np.ndarray)) for part in data):
        return False
    return isinstance(data, tuple) or len({tuple(part.shape[1:]) for part in data}) > 1


def _copied(leaf: Any) -> Any:
    # a slice would hold on to all of the data, and a reused buffer would change under us
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _name_of(data: Any) -> str:
    name = getattr(data, "name", None)
    if isinstance(name, str):
        return name
    inner = getattr(data, "dataset", None)
    return type(data if inner is None else inner).__name__


def state_measures(measures: Any) -> list[Measure]:
    """Return the measures requested, each once, if what a recorder keeps is enough for them."""
    found = measures_of(measures)
    for measure in found:
        require_measure(measure.id, measure.facts.unchanged_by, linear=reads_states(measure))
    return found


@dataclass(frozen=True)
class DescribedMoment:
    """A moment as the header has it: of each layer name, width, what one example is, any fault, and the resolution."""

    step: int
    examples: int
    layers: tuple[tuple[str, int, str, str] | tuple[str, int, str, str, float], ...]


def described_moment(moment: Moment) -> dict[str, Any]:
    """Return a moment as a header has it."""
    layers = [[name, state.width, state.shape, state.fault, state.resolution] for name, state in moment.states.items()]
    return {"step": moment.step, "examples": moment.examples, "layers": layers}


def moment_from(described: DescribedMoment, tensors: Mapping[str, torch.Tensor], unit: str) -> Moment:
    """Return the moment that a header describes, with its tensors."""
    states = {
        name: LayerState(tensors[f"{described.step}/{i}"].cpu(), width, shape, fault, *resolution)
        for i, (name, width, shape, fault, *resolution) in enumerate(described.layers)
    }
    for name, state in states.items():
        if state.rows.ndim != 2 or not state.rows.is_floating_point() or not (state.rows.numel() or state.fault):
            raise ValueError(f"layer {name!r} has no matrix of rows")
    if described.examples < 1 or any(state.width < 1 or state.resolution < 0 for state in states.values()):
        raise ValueError(f"{unit} {described.step} must have 1 example or more and layers of positive width")
    return Moment(described.step, unit, states, described.examples)
