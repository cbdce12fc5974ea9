"""`sparsity_study`: networks side by side: sparsity of weights, similarity of layers, and the effect of pruning.

What pruning saves is measured on linear layers, with the sparse formats that PyTorch has. CSR keeps the weights that
are not zero with their indices, on any device. 2:4 semi-structured sparsity keeps two of each four weights in a row, in
half precision on a GPU with sparse tensor cores; it needs a mask of its own, which is made here by size. Convolutions
have no sparse format in PyTorch and stay dense, whatever is masked.
"""

from __future__ import annotations

import copy
import io
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from netkin import __version__
from netkin.applications.experiment import DECLARED, Experiment, ExperimentOptions
from netkin.applications.sparsity.masks import (
    baked_state,
    layer_table,
    packed_bytes,
    prunable_layers,
    put_masks,
    weight_sizes,
)
from netkin.applications.sparsity.sparsify import magnitude_scores, masks_overall, require_sparsity
from netkin.comparing.compare import compare, explain
from netkin.comparing.sides import named_models
from netkin.comparing.spec import takes_options
from netkin.errors import InvalidValue, require_at_least
from netkin.identity import with_call
from netkin.progress import command, with_progress
from netkin.representations.inputs import batch_length, device_of, examples_in
from netkin.representations.layers import Spec, modules, unwrapped
from netkin.representations.shapes import Shape
from netkin.results.comparison import Comparison
from netkin.results.labels import plural
from netkin.results.weight_sparsity import LinearCost, SparsityStudy
from netkin.sources.names import by_name
from netkin.sources.weights import random_weights
from netkin.training import accuracy
from netkin.training.example_order import arrays_in, in_order
from netkin.training.work_plan import Planning, Work, WorkPlan, planned

if TYPE_CHECKING:
    from typing_extensions import Unpack

EPSILONS = (1e-4, 1e-3, 1e-2)
RELATIVE = (0.01, 0.1, 0.5)
SPARSITIES = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99)
BINS = 80
SECONDS = 0.05  # that each timing lasts
Apply = Callable[[Tensor], Tensor]
FIRST = 0.999  # the share of weights that the histograms show; the outermost bins hold the rest


@with_call
@planned
@by_name(models="models", data="data")
@takes_options(without="test transform forward seed save overwrite partial", declared=DECLARED)
def sparsity_study(
    models: nn.Module | Mapping[str, nn.Module],
    data: Any = None,
    *,
    epsilons: float | Sequence[float] = EPSILONS,
    relative: float | Sequence[float] = RELATIVE,
    sparsities: float | Sequence[float] = SPARSITIES,
    layers: Spec = None,
    shape: Shape = None,
    costs: bool = False,
    **options: Unpack[ExperimentOptions],
) -> Planning[WorkPlan, SparsityStudy]:
    """Return how sparse networks are, how their weights are distributed, and what pruning does to them; side by side.

    With labelled `data`, which should be test data, it also takes the accuracy after pruning and `cka_debiased` of each
    network's layers with each other. The networks are left as they are.

    Args:
        models: One network, or several, best by name, as ``{"before": a, "after": b}``.
        data: Labelled examples: arrays `(inputs, labels)`, or a loader of batches.
        epsilons: Sizes below which weights are counted.
        relative: The same in units of each layer's r.m.s. over weights that are left (see `epsilon_sparsity`).
        sparsities: Shares of the smallest weights, over all layers, without which accuracy is taken; none for no
            accuracies, where the data have no labels.
        layers: Which layers have weights that count; all linear and convolutional ones by default.
        shape: What one example of a layer is for the similarity, as for `nk.compare`; `CKASparsityLoss` has "flatten".
        examples: How many examples are read for the similarity of layers; all by default.
        costs: Whether to time linear layers in the sparse formats that PyTorch has.

    Example:
        >>> study = sparsity_study(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> study.networks["model"].weights, sum(study.histograms["model"])
        (48, 48)
    """
    if isinstance(models, Mapping) and "sparsity" in models:
        raise InvalidValue("'sparsity' is the name of the pruned shares in the study; call the network something else.")
    several = {"model": models} if isinstance(models, nn.Module) else named_models(models)
    experiment, shares = Experiment(models=several, data=data, **options), _numbers(sparsities)
    require_sparsity(*shares)
    small, named = (_numbers(epsilons), _numbers(relative)), experiment.given_models
    yield lambda: _plan(experiment, shares if data is not None else (), shape, costs)
    tables = {name: layer_table(model, prunable_layers(model, layers), *small) for name, model in named.items()}
    edges, histograms = _histograms(named, layers)
    drawn = random_weights(named.values())
    curve, interlayer = dict[str, tuple[float, ...]](), dict[str, Comparison]()
    measured: dict[str, tuple[LinearCost, ...]] = {}
    for name in with_progress(named, "looking at networks", "networks", experiment.progress):
        model = named[name]
        with experiment.lending(model):
            if data is not None and shares:
                curve[name] = tuple(accuracy_after_pruning(model, data, shares, layers=layers))
            if data is not None:
                interlayer[name] = _interlayer(name, model, data, shape, experiment.examples)
            if costs:
                measured[name], costs_on = tuple(linear_costs(model)), _device(model)
    first = next(iter(interlayer.values()), None)
    return SparsityStudy(
        tables, edges, histograms,
        {name: _sizes(model) for name, model in named.items()},
        {"sparsity": shares, **curve} if curve else {},
        interlayer, measured,
        costs_on=costs_on if costs else "",
        data="" if first is None else first.data, examples=0 if first is None else first.examples,
        version=__version__, provenance={"call": command()} | drawn,
    )  # fmt: skip


explain_sparsity_study = sparsity_study.explain


def _plan(experiment: Experiment, shares: Sequence[float], shape: Shape, costs: bool) -> WorkPlan:
    data, examples, work, memory = experiment.data, experiment.examples, list[Work](), 0
    for name, model in experiment.given_models.items() if data is not None else ():
        with experiment.lending(model):
            plan = explain(model, data=as_batches(data), **_own_similarity(name, shape, examples))
        times = len(set(shares))
        if times:
            arrays = arrays_in(data)
            count = examples_in(data) if arrays is None else batch_length(arrays)
            work.append(Work(f"accuracy of {name} at {times} sparsities", count and times * count))
        work.append(Work(f"similarity of the layers of {name}", plan.examples))
        memory = max(memory, plan.bytes)
    networks = plural(len(experiment.given_models), "network")
    notes = [f"the weights of {networks} are read{', and their linear layers are timed' if costs else ''}"]
    return WorkPlan(tuple(work), {"statistics of one network": memory}, tuple(notes))


def accuracy_after_pruning(
    model: nn.Module, data: Any, sparsities: Sequence[float] = SPARSITIES, *, layers: Spec = None
) -> list[float]:
    """Return the accuracy of `model` on labelled examples without its smallest weights, for each share of them.

    Weights are ranked by size over all prunable layers, and nothing is trained afterwards. Where the model is that
    sparse already, it is as it is.
    """
    require_sparsity(*sparsities)
    work = copy.deepcopy(unwrapped(model))
    names = list(prunable_layers(work, layers))
    found: dict[float, float] = {}
    for sparsity in sorted(set(sparsities)):  # a smaller share is part of a larger one
        scores = magnitude_scores(work, names)
        total = sum(one.numel() for one in scores.values())
        put_masks(work, masks_overall(scores, total - round(sparsity * total)))
        found[sparsity] = accuracy(work, data)
    return [found[sparsity] for sparsity in sparsities]


def _numbers(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, Real) else tuple(given)


def _interlayer(name: str, model: nn.Module, data: Any, shape: Shape, examples: int | None) -> Comparison:
    return compare(model, data=as_batches(data), **_own_similarity(name, shape, examples))


def as_batches(data: Any) -> Any:
    """Return arrays as batches, and other data as they are."""
    return data if arrays_in(data) is None else list(in_order(data))


def _own_similarity(name: str, shape: Shape, examples: int | None) -> dict[str, Any]:
    return {"measures": ["cka_debiased"], "names": (name, name), "shape": shape, "examples": examples}


@torch.no_grad()
def _histograms(models: Mapping[str, nn.Module], layers: Spec) -> tuple[tuple[float, ...], dict[str, tuple[int, ...]]]:
    """Return common edges, and for each network how many of the weights that are left lie between them."""
    weights = {name: _left(model, layers) for name, model in models.items()}
    sizes = torch.cat([one.abs() for one in weights.values()]).sort().values
    most = sizes[min(len(sizes) - 1, int(FIRST * len(sizes)))].item() if len(sizes) else 0.0
    edges = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64) * _rounded_up(most or 1.0)
    inner = edges[1:-1].contiguous()
    counts = {
        name: torch.bincount(torch.bucketize(one, inner, right=True), minlength=BINS) for name, one in weights.items()
    }
    return tuple(edges.tolist()), {name: tuple(one.tolist()) for name, one in counts.items()}


def _rounded_up(value: float) -> float:
    """Return the next number with two digits, for an axis that can be read."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.6g}")


def _left(model: nn.Module, layers: Spec) -> Tensor:
    parts = []
    for name, layer in prunable_layers(model, layers).items():
        _, left = weight_sizes(name, layer)
        parts.append(layer.weight.detach().double().flatten()[left].cpu())
    return torch.cat(parts)


def _sizes(model: nn.Module) -> tuple[int, int]:
    state, plain = baked_state(model), io.BytesIO()
    torch.save(state, plain)
    return plain.getbuffer().nbytes, len(packed_bytes(state))


def _device(model: nn.Module) -> str:
    device = device_of(model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"


# --- what sparse formats save -----------------------------------------------------------------------------------------


def linear_costs(
    model: nn.Module, *, batch: int = 128, layers: Sequence[str] | None = None, seconds: float = SECONDS
) -> list[LinearCost]:
    """Return size and time of linear layers in sparse formats, beside the dense layer on the same device.

    Args:
        model: The network, with masks or with zeros in its weights.
        batch: Rows of the inputs, which are drawn at random.
        layers: Which linear layers; the five largest by default.
        seconds: How long each is timed.
    """
    require_at_least(1, batch=batch)
    known = {name: layer for name, layer in prunable_layers(model).items() if isinstance(layer, nn.Linear)}
    chosen = list(layers) if layers is not None else _largest(known)
    found = []
    for name in chosen:
        layer = modules(model)[name]
        if not isinstance(layer, nn.Linear):
            raise InvalidValue(
                f"layer {name!r} is a {type(layer).__name__}; PyTorch has sparse formats for linear ones."
            )
        found.append(csr_cost(name, layer.weight.detach(), batch, seconds))
        if layer.weight.is_cuda:
            found.append(two_four_cost(name, layer.weight.detach(), batch, seconds))
    return found


def csr_cost(name: str, weight: Tensor, batch: int, seconds: float = SECONDS) -> LinearCost:
    """Return the cost of a weight matrix in compressed sparse rows."""
    inputs = _inputs(weight, batch)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the format is in beta
            packed = weight.to_sparse_csr()
            size = sum(part.numel() * part.element_size()
                       for part in (packed.values(), packed.col_indices(), packed.crow_indices()))  # fmt: skip
            return _cost(name, "CSR", weight, inputs, size, lambda given: (packed @ given.T).T, seconds)
    except RuntimeError as fault:
        return _none(name, "CSR", weight, fault)


def two_four_cost(name: str, weight: Tensor, batch: int, seconds: float = SECONDS) -> LinearCost:
    """Return the cost of a weight matrix in 2:4 form, in half precision, with a mask of its own."""
    halved = (weight * two_four_mask(weight)).half() if weight.shape[1] % 4 == 0 else weight.half()
    inputs = _inputs(halved, batch)
    try:
        if weight.shape[1] % 4:
            raise RuntimeError(f"its {weight.shape[1]:,} inputs are no multiple of four")
        if not weight.is_cuda:
            raise RuntimeError("it needs a GPU with sparse tensor cores")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the format is a prototype
            packed = torch.sparse.to_sparse_semi_structured(halved)
            size = halved.numel() // 2 * 2 + halved.numel() // 2 * 2 // 8  # halves, and two bits for each
            return _cost(name, "2:4", halved, inputs, size, lambda given: nn.functional.linear(given, packed), seconds)
    except (RuntimeError, NotImplementedError) as fault:
        return _none(name, "2:4", halved, fault)


def two_four_mask(weight: Tensor) -> Tensor:
    """Return the mask that keeps the two largest of each four weights in a row.

    Example:
        >>> two_four_mask(torch.tensor([[1.0, -3.0, 2.0, 0.5]]))
        tensor([[False,  True,  True, False]])
    """
    fours = weight.abs().reshape(-1, 4)
    places = fours.sort(dim=1, descending=True, stable=True).indices[:, :2]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(1, places, True).reshape(weight.shape)


@torch.no_grad()
def _cost(name: str, kind: str, weight: Tensor, inputs: Tensor, size: int, apply: Apply, seconds: float) -> LinearCost:
    dense = nn.functional.linear(inputs, weight)
    error = (apply(inputs) - dense).double().norm() / dense.double().norm().clamp(min=1e-300)
    first, second = (_seconds(work, inputs, seconds) for work in (lambda x: nn.functional.linear(x, weight), apply))
    bytes_ = weight.numel() * weight.element_size()
    return LinearCost(name, kind, _zeros(weight), bytes_, size, first, second, float(error))


def _none(name: str, kind: str, weight: Tensor, fault: Exception) -> LinearCost:
    said = " ".join(str(fault).split())[:160] or type(fault).__name__
    size = weight.numel() * weight.element_size()
    return LinearCost(name, kind, _zeros(weight), size, math.nan, math.nan, math.nan, math.nan, said)


def _zeros(weight: Tensor) -> float:
    return int((weight == 0).sum()) / weight.numel()


def _inputs(weight: Tensor, batch: int) -> Tensor:
    drawn = torch.randn(batch, weight.shape[1], generator=torch.Generator().manual_seed(0))
    return drawn.to(weight.device, weight.dtype)


def _seconds(work: Apply, inputs: Tensor, lasting: float) -> float:
    """Return the median time of a call, over as many as fit into `lasting` seconds."""
    work(inputs)
    found: list[float] = []
    end = time.perf_counter() + lasting
    while not found or time.perf_counter() < end:
        started = _now(inputs)
        work(inputs)
        found.append(_now(inputs) - started)
    return sorted(found)[len(found) // 2]


def _now(inputs: Tensor) -> float:
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
    return time.perf_counter()


def _largest(known: dict[str, nn.Linear], most: int = 5) -> list[str]:
    chosen = sorted(known, key=lambda name: -known[name].weight.numel())[:most]
    return [name for name in known if name in chosen]
