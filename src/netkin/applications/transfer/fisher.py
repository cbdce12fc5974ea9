"""Fisher information of a network's weights, by which Task2Vec describes a task: Achille et al. (2019).

The Fisher–Rao norm of a network on some data is that of Liang et al. (2019).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.linalg import vector_norm

from netkin.applications.experiment import DECLARED, Experiment, ExperimentOptions
from netkin.applications.transfer.evidence import NO_JOB
from netkin.arrays import at_least_single, require_finite, summing_dtype
from netkin.comparing.spec import takes_options
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName, did_you_mean
from netkin.identity import weights_digest
from netkin.memory import free_memory, is_cuda
from netkin.representations.gradients import Taps, Target, are_probabilities, class_logits, logits_of, pulling
from netkin.representations.hooks import inference_mode_of, mapped, watching
from netkin.representations.inputs import Forward, batch_length, call, labels_of, prepare_batch, reported_batches, take
from netkin.representations.layer_recorder import Recorder
from netkin.representations.layer_weights import own_weights, with_plain_weights
from netkin.representations.layers import Spec, choose, modules, split_call, unwrapped
from netkin.settings import called_with
from netkin.sources.names import by_name
from netkin.statistics.collector import hashes
from netkin.statistics.layer_filters import weights_in

if TYPE_CHECKING:
    from typing_extensions import Unpack

ROOM = 2**28  # bytes for gradients of single examples on the host, where more is not faster
DISTRIBUTIONS = ("model", "tempered", "labels")
Pullback = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class TaskEmbedding:
    """A task by the Fisher information of a network's filters on its data, as `task2vec` finds it.

    `values` holds a number for each filter, `filters` the weights that they belong to and how many each has, `network`
    the digest of these weights, `examples` how many were read, and `labels` what y stands for.
    """

    values: np.ndarray
    filters: tuple[tuple[str, int], ...]
    network: str
    examples: int
    labels: str

    def __repr__(self) -> str:
        return f"TaskEmbedding of {len(self.values):,} filters, {self.examples:,} examples, y: {self.labels}"


@by_name(models="model", data="data")
@takes_options(NO_JOB, DECLARED)
def task2vec(
    model: nn.Module,
    data: Any,
    *,
    backbone: Spec = None,
    samples: int | None = None,
    outputs: str = "categorical",
    exact_model: bool = False,
    **options: Unpack[ExperimentOptions],
) -> TaskEmbedding:
    """Return the diagonal Fisher information of a network's weights on some data, averaged within each filter.

    The mean over the examples x of ``E_{y ~ p(y|x)} (∂ log p(y|x) / ∂w)²``, from the gradient of every single example,
    and its mean over the weights of a filter (an output channel): Achille et al. (2019), arXiv:1902.03545. As in the
    authors' code biases don't count, and scales of norm layers are filters of one weight. Weights that are computed, by
    masks or `weight_norm`, count as those of the same network with plain ones. The model is in evaluation
    mode, and is left as it was. Task2Vec compares data sets by one reference network, with a head fitted to each.

    Args:
        model: the model, which is left as it was.
        data: a loader, an iterable of batches, or one array of inputs; labels are not read.
        backbone: the modules whose weights count, with all inside them; None for all but the one that runs last.
        samples: how many y are drawn for an example; by default the exact mean, with a backward pass for each class.
        seed: of the draws of y.
        outputs: what the model gives: "categorical" logits, "multilabel" logits or "continuous" means of Gaussians.
        examples: how many examples to read; None for all.
        exact_model: whether float32 in the model on a GPU must not be rounded to TF32.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> task2vec(model, torch.ones(5, 4)).filters
        (('0.weight', 8),)
    """
    Target("labels", outputs=outputs)  # refuses kinds of outputs that there are not
    if samples is not None and (samples < 1 or outputs != "categorical"):
        raise InvalidValue(
            f"`samples` draws at least 1 class for an example, of categorical outputs; got {samples} for {outputs} "
            "ones. Leave it out for the exact mean.",
            argument="samples",
        )
    experiment, fisher, seen = Experiment(models={"model": model}, data=data, **options), None, 0
    with experiment.lending(model), torch.inference_mode(False):
        model = with_plain_weights(model)
        with inference_mode_of(model, exact=exact_model):
            for batch in reported_batches(data, experiment.examples, "reading"):
                if fisher is None:
                    names, probabilities = _backbone(model, backbone, batch, experiment)
                    running = _Running(model, experiment.forward, probabilities and outputs == "categorical")
                    fisher = _Fisher(running, names, outputs, samples, experiment.seed)
                fisher.add(Taps.without_inference(prepare_batch(model, batch, experiment.transform)), seen)
                seen += batch_length(batch)
    assert fisher is not None  # data without batches were refused
    return fisher.embedding(seen)


def task2vec_distance(a: TaskEmbedding, b: TaskEmbedding, *, independent: bool = False) -> float:
    """Return the distance of two tasks, from 0 to 1: the cosine distance of ``a/(a + b)`` and ``b/(a + b)``.

    It is the symmetric one of Achille et al. (2019), in which every filter counts alike, however large its Fisher
    information; `task2vec_cosine` is the plain cosine. Filters without information in both tasks are left out.

    Both embeddings are of one reference network. With `independent` each may be of a network of its own, of the same
    form: filters of the same place are then compared, though nothing makes them alike.
    """
    _require_comparable(a, b, independent)
    total = a.values + b.values
    kept = total > 0
    x, y = a.values[kept] / total[kept], b.values[kept] / total[kept]
    return max(0.0, float(1 - x @ y / (np.linalg.norm(x) * np.linalg.norm(y))))


def task2vec_cosine(a: TaskEmbedding, b: TaskEmbedding, *, independent: bool = False) -> float:
    """Return the similarity of two tasks, from 0 to 1: the plain cosine of their embeddings.

    With it Tang et al. (2020), arXiv:2003.11498, compare networks in Fig. 2. The few filters with the largest Fisher
    information decide it. What `a`, `b` and `independent` are, see `task2vec_distance`.
    """
    _require_comparable(a, b, independent)
    x, y = a.values / np.linalg.norm(a.values), b.values / np.linalg.norm(b.values)
    return min(1.0, float(x @ y))


def _require_comparable(a: TaskEmbedding, b: TaskEmbedding, independent: bool) -> None:
    if a.filters != b.filters:
        raise ShapeError(
            f"the embeddings have {len(a.values):,} and {len(b.values):,} filters, of other weights; take both of "
            "networks of the same form, with the same `backbone`."
        )
    if a.network != b.network and not independent:
        raise InvalidValue(
            "the embeddings are of networks with different weights, whose filters don't correspond; take both of one "
            "reference network, or pass independent=True.",
            argument="independent",
        )
    if not (a.values.any() and b.values.any()):
        raise NoValue("one of the tasks has no Fisher information: the network's outputs don't depend on its weights.")


@by_name(models="model", data="data")
@takes_options(f"{NO_JOB} seed", DECLARED)
def fisher_rao_norm(
    model: nn.Module,
    data: Any,
    *,
    depth: int | None = None,
    labels: str = "model",
    beta: float = 0.5,
    outputs: str = "categorical",
    exact_model: bool = False,
    **options: Unpack[ExperimentOptions],
) -> float:
    """Return ``(L + 1) √E⟨f, ∇ loss⟩²``, with f the network's output and L its number of hidden layers.

    Liang et al. (2019), arXiv:1711.01530; Eq. 3 of Tang et al. (2020). For a network without biases whose activations
    are piecewise linear it is ``√(θᵀ F θ)``, with F the Fisher information and θ all weights; for others it is what the
    formula says.

    Args:
        model: the model, which is left as it was.
        data: a loader, an iterable of batches, or one array of inputs; with labels="labels" batches hold labels.
        depth: L; None for one less than the modules with a matrix or a kernel of weights.
        labels: where y is from: "model", the prediction p; "tempered", p^β; both as exact means; "labels" of the data.
        beta: the exponent by which the prediction is tempered, from 0 to below 1.
        outputs: what the model gives: "categorical" logits, "multilabel" logits or "continuous" means of Gaussians.
        examples: how many examples to read; None for all.
        exact_model: whether float32 in the model on a GPU must not be rounded to TF32.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.eye_(model.weight)
        >>> round(fisher_rao_norm(model, torch.tensor([[2.0, 0.0]])), 3)  # 2 √(p (1 - p)), p = 1/(1 + e^-2)
        0.648
    """
    if labels not in DISTRIBUTIONS:
        every, hint = ", ".join(map(repr, DISTRIBUTIONS)), did_you_mean(str(labels), DISTRIBUTIONS) or "."
        raise UnknownName(f"no distribution of y named {labels!r}{hint} There are {every}.", argument="labels")
    target = Target("labels" if outputs == "continuous" or labels == "labels" else "tempered", beta, outputs)
    if depth is not None and depth < 0:
        raise InvalidValue(f"`depth`, the number of hidden layers, must be at least 0; got {depth}.", argument="depth")
    layers = {id(one): one for one in modules(model).values()}.values()
    with_weights = [any(w.ndim > 1 for w in weights_in(own_weights(one)).values()) for one in layers]
    if depth is None and not any(with_weights):
        raise InvalidValue("the model has no layer with a matrix of weights to count; pass `depth`.", argument="depth")
    experiment = Experiment(models={"model": model}, data=data, **options)
    factor, total, seen = sum(with_weights) if depth is None else depth + 1, 0.0, 0
    with experiment.lending(model), torch.inference_mode(False), inference_mode_of(model, exact=exact_model):
        for batch in reported_batches(data, experiment.examples, "reading"):
            batch = Taps.without_inference(prepare_batch(model, batch, experiment.transform))
            logits = logits_of(call(model, batch, experiment.forward)).detach()
            require_finite(logits, "the model's output")
            logits = class_logits(logits) if outputs == "categorical" else logits
            squares = _squared_products(logits, labels_of(batch), labels, target)
            total, seen = total + float(squares.sum()), seen + len(squares)
    return factor * (total / seen) ** 0.5


def fisher_rao_distance(a: float, b: float) -> float:
    """Return ``|a - b| / √(a b)`` of two Fisher–Rao norms: section 4 of Tang et al. (2020).

    Example:
        >>> fisher_rao_distance(1.0, 4.0)
        1.5
    """
    if not (a > 0 and b > 0):
        raise InvalidValue(f"the distance is that of two norms above 0; got {a:g} and {b:g}.")
    return abs(a - b) / (a * b) ** 0.5


class _Running(nn.Module):
    """A model as a function of a batch that gives its logits."""

    def __init__(self, model: nn.Module, forward: Forward | None, probabilities: bool):
        super().__init__()
        self.model, self.run, self.probabilities = unwrapped(model), forward, probabilities

    def forward(self, batch: Any) -> Tensor:
        logits = logits_of(call(self.model, batch, self.run))
        if self.probabilities:  # a class of probability 0 adds nothing to the Fisher information, whatever its logit
            logits = logits.to(at_least_single(logits.dtype))
            logits = logits.clamp(min=torch.finfo(logits.dtype).tiny).log()
        return logits


class _Fisher:
    """The sums of squared gradients of every filter over the examples."""

    def __init__(self, running: _Running, names: Sequence[str], outputs: str, samples: int | None, seed: int):
        self.running, self.outputs, self.samples, self.seed = running, outputs, samples, seed
        known = dict(running.model.named_parameters())
        self.weights = {f"model.{name}": known[name].detach() for name in names}
        self.sums = [torch.zeros(len(one), dtype=torch.float64) for one in self.weights.values()]
        self.classes, self.at_once = 0, True

    def add(self, batch: Any, first: int) -> None:
        """Add the examples of a batch, of which the first has the number `first`."""
        tensors, rebuild = _examples_of(batch)
        draws = self._draws(first + np.arange(len(tensors[0]))).to(tensors[0].device, summing_dtype(tensors[0].device))
        size = sum(one.numel() * one.element_size() for one in self.weights.values())
        room = free_memory(tensors[0].device) // 16 if is_cuda(tensors[0].device) else ROOM
        with Taps(self.running, []).open():
            for part in zip(*(one.split(max(1, room // size)) for one in (draws, *tensors)), strict=True):
                self._add(*part, rebuild=rebuild)

    def embedding(self, examples: int) -> TaskEmbedding:
        sizes = [one[0].numel() for one in self.weights.values()]
        values = torch.cat([total / size / examples for total, size in zip(self.sums, sizes, strict=True)])
        require_finite(values, "the Fisher information")
        filters = tuple((name.removeprefix("model."), len(one)) for name, one in self.weights.items())
        expectation = f"{self.samples} draws from the prediction, seed {self.seed}" if self.samples else "expected"
        labels = f"{expectation}, {self.classes} outputs, {self.outputs}"
        return TaskEmbedding(values.numpy(), filters, weights_digest(self.weights), examples, labels)

    def _add(self, draws: Tensor, *tensors: Tensor, rebuild: Callable[[Sequence[Tensor]], Any]) -> None:
        if self.at_once:
            try:
                with torch.no_grad(), warnings.catch_warnings():  # transforms take gradients all the same
                    warnings.filterwarnings("ignore", "There is a performance drop")
                    found = vmap(lambda draw, *own: self._of_one(rebuild(own), draw))(draws, *tensors)
                self.sums = [total + fresh.sum(0).cpu() for total, fresh in zip(self.sums, found, strict=True)]
                return
            except RuntimeError:  # the model does what can't be done for many examples at once; one alone may work
                self.at_once = False
        for draw, *own in zip(draws, *tensors, strict=True):
            with pulling():
                alone = self._of_one_alone(rebuild(own), draw)
            self.sums = [total + fresh.cpu() for total, fresh in zip(self.sums, alone, strict=True)]

    def _of_one(self, batch: Any, draw: Tensor) -> list[Tensor]:
        logits, pullback = vjp(lambda weights: called_with(self.running, weights, batch), self.weights)[:2]
        return self._squares(logits, lambda step: list(pullback(step)[0].values()), draw)

    def _of_one_alone(self, batch: Any, draw: Tensor) -> list[Tensor]:
        weights = {name: one.clone().requires_grad_() for name, one in self.weights.items()}
        logits = called_with(self.running, weights, batch)

        def pullback(step: Tensor) -> list[Tensor]:
            found = torch.autograd.grad(logits, list(weights.values()), step, retain_graph=True, allow_unused=True)
            return [torch.zeros_like(w) if g is None else g for w, g in zip(weights.values(), found, strict=True)]

        return self._squares(logits.detach(), pullback, draw)

    def _squares(self, logits: Tensor, pullback: Pullback, draw: Tensor) -> list[Tensor]:
        """Return the squared gradients of one example, summed over each filter and over the draws of y."""
        require_rows(logits, self.outputs)
        self.classes = logits.shape[1]
        totals: list[Any] = [0.0] * len(self.weights)
        for step in self._steps(logits[0].to(draw.dtype), draw):
            for place, one in enumerate(pullback(step.to(logits.dtype).unsqueeze(0))):
                totals[place] = totals[place] + vector_norm(one.reshape(len(one), -1), dim=1, dtype=draw.dtype).square()
        return totals

    def _steps(self, logits: Tensor, draw: Tensor) -> Iterator[Tensor]:
        """Yield gradients of log p at the logits, weighed so that the sum of their squares is the mean over y."""
        p, one = logits.softmax(0), torch.eye(len(logits), dtype=logits.dtype, device=logits.device)
        if self.outputs == "continuous":  # a Gaussian of variance 1
            yield from one
        elif self.outputs == "multilabel":
            odds = logits.sigmoid()
            yield from one * (odds * (1 - odds)).sqrt()
        elif self.samples is None:
            yield from (one - p) * p.sqrt().unsqueeze(1)
        else:
            for u in draw:
                drawn = (p.cumsum(0) <= u).sum().clamp(max=len(logits) - 1)
                yield ((torch.arange(len(logits), device=p.device) == drawn).to(p) - p) / self.samples**0.5

    def _draws(self, numbers: np.ndarray) -> Tensor:
        """Return a number in [0, 1) for each draw of each example, whatever the batches."""
        count = self.samples or 0
        mixed = hashes(self.seed, numbers[:, None] * max(count, 1) + np.arange(count))
        return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) / 2.0**53)


def _backbone(model: nn.Module, spec: Spec, batch: Any, experiment: Experiment) -> tuple[list[str], bool]:
    """Return the names of the weights of the backbone, and whether the model gives probabilities.

    A model that mixes the examples of a batch is refused.
    """
    owned = {name: weights_in(own_weights(module)) for name, module in modules(model).items()}
    ran, probable = list[str](), list[bool]()
    few = take(batch, 4)

    def squares(outputs: Tensor, labels: Any) -> Tensor:  # a plain sum of probabilities is 1 and has no gradient
        probable.append(are_probabilities(outputs))
        return outputs.flatten(1).square().sum(1)

    with watching(model, [name for name, own in owned.items() if own], lambda name, _: ran.append(name)):
        taps = Taps(model, [Target(squares)])
        Recorder(model, forward=experiment.forward, transform=experiment.transform, taps=taps)(few)
    heads = {id(one) for one in owned[split_call(ran[-1])[0]].values()} if spec is None and ran else set()
    chosen = choose(model, spec) if spec is not None else [""]
    within = [name for name in owned if any(not stem or name == stem or name.startswith(f"{stem}.") for stem in chosen)]
    inside = {id(weight) for name in within for weight in owned[name].values()}
    found = [name for name, one in unwrapped(model).named_parameters() if id(one) in inside - heads]
    if not found:
        raise InvalidValue(
            "no weights are left for the embedding: the model's only layer with weights is its head; name the "
            "`backbone` whose weights count."
        )
    return found, probable[0]


def _examples_of(batch: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of a batch that hold an entry for each example, and how one's entries become a batch."""
    count = batch_length(batch)
    found: list[Tensor] = []
    mapped(lambda leaf: found.append(leaf) if _is_of(leaf, count) else None, batch)

    def rebuild(own: Sequence[Tensor]) -> Any:
        rest = iter(own)  # copies, since a model may write into its input
        return mapped(lambda leaf: next(rest).clone().unsqueeze(0) if _is_of(leaf, count) else leaf, batch)

    return found, rebuild


def _is_of(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == count


def require_rows(logits: Tensor, outputs: str) -> None:
    """Refuse outputs that are not one row for an example, or a single logit for one class of many."""
    if logits.ndim != 2:
        raise ShapeError(
            f"one row of outputs is needed for an example; the model gives {tuple(logits.shape[1:])}. Pass `forward=`, "
            "a function of (model, batch) that returns rows.",
            argument="forward",
        )
    if outputs == "categorical" and logits.shape[1] < 2:
        raise ShapeError(
            "the model gives 1 output for each example, and one class of one is certain; pass outputs='multilabel' for "
            "the logit of yes or no, or outputs='continuous'."
        )


def _squared_products(logits: Tensor, given: Any, labels: str, target: Target) -> Tensor:
    """Return the mean of ``⟨f, ∇ loss⟩²`` over y, for each example."""
    f = logits.to(summing_dtype(logits.device))
    if labels == "labels":
        with torch.enable_grad():
            inner = f.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(target.losses(inner, given).sum(), inner)
        return (f * gradient).flatten(1).sum(1).square()
    require_rows(f, target.outputs)
    factor = target.beta if labels == "tempered" else 1.0
    if target.outputs == "continuous":  # a Gaussian of variance 1, or 1/β
        if not factor:
            raise InvalidValue(
                "a Gaussian is tempered with `beta` above 0; got 0, at which it has no width.", argument="beta"
            )
        return f.square().sum(1) / factor
    if target.outputs == "multilabel":
        p, q = f.sigmoid(), (factor * f).sigmoid()
        return (f * (p - q)).sum(1).square() + (f.square() * q * (1 - q)).sum(1)
    from_mean = (f * f.softmax(1)).sum(1, keepdim=True) - f
    return ((factor * f).softmax(1) * from_mean.square()).sum(1)
