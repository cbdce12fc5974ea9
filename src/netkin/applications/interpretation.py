"""Interpretation: which directions of a layer matter (`project`), and in which layers a class is represented.

`project` runs a model with one layer restricted to few directions, or to few of its neurons. Neurons are chosen at
random, by size or by an aligned subspace, as a baseline for directions. `rest` defines the values of the others.
``"mean"`` sets them to their mean over the examples. ``"predicted"`` gives each the best linear prediction from the
chosen ones, which is the projection that directions are given: every neuron, as a vector over the examples, goes to the
nearest one in the span of the chosen ones.

`class_sensitivity` is the correlation of every layer with the logit of each class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.experiment import DECLARED as EXPERIMENT
from netkin.applications.experiment import plan_of_pass
from netkin.arrays import exact_products, label_tensor, summing_dtype
from netkin.comparing.compare import compare_sides, explain_sides
from netkin.comparing.sides import ModelInput, ModelSide, Reads, Side
from netkin.comparing.spec import DECLARED as COMPARING
from netkin.comparing.spec import Spec as CompareSpec
from netkin.comparing.spec import takes_options
from netkin.errors import InvalidValue, ShapeError, UnknownName, did_you_mean, require_at_least, require_listed
from netkin.identity import with_call
from netkin.measures import AlignedSide, Directions
from netkin.progress import showing
from netkin.representations import replacing, rows_of
from netkin.representations.batch_axis import LayerFacts
from netkin.representations.hooks import main_tensor, unrecordable, watching
from netkin.representations.inputs import Forward, call, labels_of
from netkin.representations.layer_recorder import Recorded
from netkin.representations.layers import Spec, choose, layer_label, unwrapped
from netkin.results import Comparison, Values
from netkin.results.records import distinct
from netkin.sources.batches import class_names
from netkin.sources.names import by_name
from netkin.training.work_plan import Planning, WorkPlan, planned

REST = ("mean", "predicted")
ITSELF = "its output is the logits themselves"
Restriction = tuple[Tensor, Tensor, Tensor]  # mean, p × k, k × p


@dataclass(frozen=True, eq=False, repr=False)
class Neurons:
    """Chosen neurons of a layer, and the map that restricts it to them: ``mean + (x - mean) @ encode @ decode``."""

    chosen: tuple[int, ...]
    mean: Tensor
    encode: Tensor
    decode: Tensor

    def __repr__(self) -> str:
        return f"Neurons({len(self.chosen)} of {len(self.mean)})"


def random_neurons(
    directions: AlignedSide | Directions, k: int, *, rest: str = "mean", generator: torch.Generator | None = None
) -> Neurons:
    """Return `k` neurons chosen at random, the same ones each time unless a `generator` is given.

    Example:
        >>> from netkin.measures import svcca_directions
        >>> X = torch.randn(99, 6, generator=torch.Generator().manual_seed(0))
        >>> random_neurons(svcca_directions(X, X), k=2)
        Neurons(2 of 6)
    """
    side = side_of(directions)
    require_at_least(1, side.width, k=k)
    drawn = torch.randperm(side.width, generator=generator or torch.Generator().manual_seed(0))
    return _chosen_neurons(side, drawn[:k], rest)


def largest_neurons(directions: AlignedSide | Directions, k: int, *, rest: str = "mean") -> Neurons:
    """Return the `k` neurons of largest activation: the root of their mean square over the examples."""
    side = side_of(directions)
    require_at_least(1, side.width, k=k)
    return _chosen_neurons(side, _largest(side.activity, k), rest)


def aligned_neurons(directions: AlignedSide | Directions, k: int, m: int) -> Neurons:
    """Return the `m` neurons most aligned with the first `k` directions: those that vary most inside their span.

    The layer is first projected on the `k` directions; of what comes out the `m` neurons are kept and the others held
    at their mean, as in Fig. 2b of the SVCCA paper. No other `m` neurons keep more of the projected layer's variance.
    """
    side = side_of(directions)
    encode, decode = side.projection(k)
    require_at_least(1, side.width, m=m)
    chosen = _largest(decode.square().sum(0), m)
    masked = torch.zeros_like(decode)
    masked[:, chosen] = decode[:, chosen]
    return Neurons(tuple(chosen.tolist()), side.mean, encode, masked)


def side_of(directions: AlignedSide | Directions) -> AlignedSide:
    """Return the side that is meant: of a pair the first."""
    if isinstance(directions, Directions):
        return directions.x
    if not isinstance(directions, AlignedSide):
        raise InvalidValue(
            f"directions come from `nk.svcca_directions` or `nk.model_directions`; got {type(directions).__name__}.",
            argument="directions",
        )
    return directions


def _chosen_neurons(side: AlignedSide, chosen: Tensor, rest: str) -> Neurons:
    require_listed("rest", rest, REST)
    chosen = chosen.sort().values.to(side.mean.device)
    identity = torch.eye(side.width, dtype=side.mean.dtype, device=side.mean.device)
    decode = identity[chosen] if rest == "mean" else _prediction(side.covariance(chosen), chosen)
    return Neurons(tuple(chosen.tolist()), side.mean, identity[:, chosen], decode)


def _prediction(covariance: Tensor, chosen: Tensor) -> Tensor:
    """Return the least-squares map from the chosen neurons to all, k × p; dead and doubled neurons are harmless."""
    return torch.linalg.pinv(covariance[:, chosen], rtol=1e-12, hermitian=True) @ covariance


def _largest(sizes: Tensor, count: int) -> Tensor:
    return sizes.argsort(descending=True, stable=True)[:count]


@contextmanager
def project(
    model: nn.Module, layer: str, directions: AlignedSide | Directions | Neurons, k: int | None = None
) -> Iterator[None]:
    """Inside the `with`, `layer` gives its output projected on the first `k` of its directions, or on chosen neurons.

    Of a pair of `directions` the first side is meant; without `k` all that were kept are used. The projection is that
    of section 2.1 of the SVCCA paper: every neuron becomes its nearest sum of the directions, about the mean of the
    examples that they were found on. A feature map is projected channel by channel at each place, or as a whole where
    the directions are those of the flattened map; of tokens each one is. The model keeps its mode and its gradients.

    Example:
        >>> import torch
        >>> from netkin.comparing import model_directions
        >>> model, data = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), torch.randn(200, 4)
        >>> found = model_directions(model, "0", data=data, variance=1.0)
        >>> with project(model, "0", found, k=3):
        ...     few = model(data)
        >>> torch.allclose(few, model(data), atol=1e-5)
        True
    """
    with replacing(model, layer, partial(_projected, layer, _restriction(directions, k))):
        yield


def _restriction(directions: AlignedSide | Directions | Neurons, k: int | None) -> Restriction:
    if isinstance(directions, Neurons):
        if k is not None:
            raise InvalidValue(
                f"{len(directions.chosen):,} neurons are chosen already; leave `k` out, or choose {k:,} neurons.",
                argument="k",
            )
        return directions.mean, directions.encode, directions.decode
    side = side_of(directions)
    return side.mean, *side.projection(side.kept if k is None else k)


def _projected(layer: str, restriction: Restriction, output: Tensor) -> Tensor:
    width = len(restriction[0])
    if output.ndim >= 4 and output.shape[1] == width:
        return _nearest(output.movedim(1, -1), restriction).movedim(-1, 1)
    if output.ndim in (2, 3) and output.shape[-1] == width:
        return _nearest(output, restriction)
    if output.ndim >= 3 and output.shape[1:].numel() == width:
        return _nearest(output.flatten(1), restriction).reshape(output.shape)
    raise ShapeError(
        f"{layer_label(layer)} gives an output of shape {tuple(output.shape)}, which does not fit the {width:,} "
        "features that the directions or neurons were found on; find them on this layer."
    )


def _nearest(rows: Tensor, restriction: Restriction) -> Tensor:
    """Return the rows restricted, in float64: directions may be as small as their singular values are large."""
    mean, encode, decode = (part.to(rows.device, summing_dtype(rows.device)) for part in restriction)
    with exact_products():
        return (mean + (rows.to(mean) - mean) @ encode @ decode).to(rows.dtype)


# --- class sensitivity ------------------------------------------------------------------------------------------------


NAMED = "layers examples shape memory seed device transform forward progress"
OPTIONS = {name: {**COMPARING, **EXPERIMENT}[name] for name in NAMED.split()}


@with_call
@planned
@by_name(models="model", data="data")
@takes_options(declared=OPTIONS)
def class_sensitivity(
    model: nn.Module,
    data: Any,
    classes: int | str | Sequence[int | str] | None = None,
    measures: Any = "cca_mean",
    *,
    names: Sequence[str] | None = None,
    name: str = "layers",
    **options: Any,
) -> Planning[WorkPlan, Comparison]:
    """Return how closely every layer follows the logit of each class: a comparison of layers with classes.

    The logits are the model's own output, one column a class. `classes` are numbers of columns, or `names` of them; all
    of them if none are given. Where the batches carry labels, a class that is requested and occurs in none is refused.
    `measures` is one or several of those that `nk.compare` takes, as are the options. With `cca_mean`, the default, a
    value is the largest correlation that any weighted sum of the layer's neurons has with the logit. The layer that
    gives the logits has no values, as it would be compared with itself.

    Conv layers are pooled by default. That is also what DFT-CCA gives: a logit is the same at every place, so it has
    the zero frequency alone, and there a map's spectrum is its channel means, up to a factor that does not affect CCA.

    Args:
        model: a classifier.
        data: a loader, an iterable of batches or one array of inputs.
        classes: which classes, by number or name; all of them by default.
        measures: one measure or several.
        names: the classes' names, in the order of the logits; by default those that the data have, such as folders.
        name: what the result calls the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = class_sensitivity(model, torch.randn(200, 4), names=["cat", "dog", "car"])
        >>> found.layers_b, 0 < found["0", "dog"] < 1
        (('cat', 'dog', 'car'), True)
    """
    unwrapped(model)  # refuses what is no module
    of_model = {option: options.pop(option, None) for option in ("layers", "shape", "transform", "device")}
    logits = Logits(classes, names, class_names(data), of_model["layers"], options.pop("forward", None))
    rows = ModelSide(name, ModelInput(model, forward=logits.run, **of_model))
    progress, spec = options.pop("progress", None), CompareSpec(measures=measures, **options)
    yield lambda: plan_of_pass("comparing layers with classes", explain_sides(rows, logits, data, spec))
    with showing(progress):
        comparison = compare_sides(rows, logits, data, spec)
    logits.require_class()
    tables = {name: _without_logits(table, logits.layers) for name, table in comparison.tables.items()}
    return replace(comparison, tables=tables)


explain_class_sensitivity = class_sensitivity.explain


def _without_logits(table: Values, layers: Collection[str]) -> Values:
    """Return a table of layers by classes in which the layers that give the logits themselves have no value."""
    own = [name in layers for name in table.layers_a]
    missing = {(name, one): ITSELF for name in table.layers_a for one in table.layers_b if name in layers}
    values = np.where(np.array(own)[:, None], np.nan, table.values)
    return replace(table, axes=("layer", "class"), values=values, missing={**table.missing, **missing})


class Logits(Side):
    """The columns of a model's output, each a "layer"; `run` is the forward that lets it see them.

    `layers` are those among the chosen ones whose output is the model's own, known after the first batch.
    """

    def __init__(
        self, classes: Any, names: Sequence[str] | None, known: Sequence[str], chosen: Spec, forward: Forward | None
    ):
        self.name, self.layers = "classes", set[str]()
        several = isinstance(classes, Iterable) and not isinstance(classes, str)
        self._asked = list(classes) if several else classes if classes is None else [classes]
        self._names, self._known, self._forward = names, known, forward
        self._chosen = chosen
        self._columns: dict[str, int] = {}
        self._seen: Counter[int] = Counter()
        self._output: Any = None
        self._reduce: Any = None

    @property
    def origin(self) -> dict[str, str]:
        return {"model": "logits", "forward": getattr(self._forward, "__qualname__", "none")}

    def run(self, model: nn.Module, batch: Any) -> Any:
        """Run the model as it would be, and keep what it gives until the batch is done."""
        given: dict[str, tuple[ref[Tensor], int]] = {}

        def note(name: str, output: Any) -> None:
            if not unrecordable(output) and not (tensor := main_tensor(output, name)).is_inference():
                given[name] = (ref(tensor), tensor._version)

        with nullcontext() if self._columns else watching(model, choose(model, self._chosen), note):
            self._output = call(model, batch, self._forward)
        if not unrecordable(self._output):
            logits = main_tensor(self._output, "")
            whole = (logits, logits._base)  # a layer may give the logits, or what they are a part of
            for name, (tensor, version) in given.items():
                if any(tensor() is one for one in whole if one is not None) and version == logits._version:
                    self.layers.add(name)
        return self._output

    @contextmanager
    def open(self, reads: Reads) -> Iterator[None]:
        if reads.targets:
            raise InvalidValue("logits have no gradients at themselves; choose a measure of activations.")
        self._reduce = reads.reduce
        yield

    def learn(self, batch: Any) -> dict[str, LayerFacts]:
        """Return the columns of the model's output, which it has given for few examples of the batch."""
        output, self._output = _matrix(main_tensor(self._output, "")), None
        known = self._known if len(self._known) == output.shape[1] else None
        self._columns = _columns(self._asked, known if self._names is None else self._names, output.shape[1])
        examples, resolution = len(output), torch.finfo(output.dtype).eps
        facts = LayerFacts(0, "matrix", (examples, 1), output.dtype, examples, (), resolution)
        return dict.fromkeys(self._columns, facts)

    def read(self, batch: Any) -> Recorded:
        output, self._output = _matrix(main_tensor(self._output, "")), None
        self._seen.update(_labels(batch))
        rows = {name: output[:, [column]] for name, column in self._columns.items()}
        if self._reduce is not None:
            rows = {name: self._reduce(self.name, name, column, None) for name, column in rows.items()}
        return Recorded(rows)

    def require_class(self) -> None:
        """Refuse a class that was requested and that the labels, if there were any, never named."""
        absent = [name for name, column in self._columns.items() if self._asked is not None and not self._seen[column]]
        if self._seen and absent:
            raise InvalidValue(
                f"class {absent[0]!r} does not occur among the {self._seen.total():,} labels of the data; "
                "pass data that hold it, or leave it out.",
                argument="classes",
            )


def _columns(asked: list[Any] | None, names: Sequence[str] | None, count: int) -> dict[str, int]:
    """Return the columns of the classes requested, by name; all of them where none are."""
    if names is not None and len(names) != count:
        raise ShapeError(
            f"`names` has {len(names):,} names and the model {count:,} outputs; give one for each.", argument="names"
        )
    known = distinct(map(str, range(count) if names is None else names), "classes")
    columns = dict[str, int]()
    for one in range(count) if asked is None else asked:
        if isinstance(one, str) and one not in known:
            some = f"{', '.join(known[:3])}{', ...' if count > 3 else ''}"
            hint = did_you_mean(one, known) or f"; the model's outputs are {some}, or what `names=` calls them."
            raise UnknownName(f"no class named {one!r}{hint}", argument="classes", value=one)
        if not isinstance(one, str):
            require_at_least(0, count - 1, classes=one)
        column = known.index(one) if isinstance(one, str) else int(one)
        columns[known[column]] = column
    if not columns:
        raise InvalidValue("`classes` is empty; leave it out for all classes.", argument="classes")
    return columns


def _matrix(output: Tensor) -> Tensor:
    if output.ndim not in (1, 2):
        raise ShapeError(
            f"the model's output has shape {tuple(output.shape)}, and class sensitivity needs one row of logits for "
            "each example; pass a `forward` that returns them."
        )
    return rows_of(output)[0]


def _labels(batch: Any) -> list[int]:
    """Return the labels that come with a batch, where they are whole numbers."""
    found = labels_of(batch)
    if not (isinstance(found, Tensor) or (isinstance(found, np.ndarray) and found.dtype.kind in "biuf")):
        return []
    labels = label_tensor(found)
    return labels.tolist() if labels.ndim == 1 and not labels.is_floating_point() else []
