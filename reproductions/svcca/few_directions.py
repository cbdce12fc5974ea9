"""Few SVCCA directions of a layer do the work of all its neurons, and each is spread over several neurons.

Claims: svcca/few-directions and svcca/distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import netkin as nk
from netkin.applications.interpretation import Neurons
from netkin.measures import AlignedSide
from reproductions.claims import Finding, Measured, all_of, claim, gains, verdict
from reproductions.laboratory import Lab

# the paper's pool1, fc1 and fc2, after their ReLUs; its pool1 is the second pool, counted from 0
LAYERS = {"pool1": "pool2", "fc1": "relu6", "fc2": "relu7"}
COUNTS = (1, 2, 3, 5, 7, 10, 15, 20, 25, 35, 50, 75, 100, 150, 200, 300, 400, 512)
FEW, SOME = {"pool1": 10, "fc1": 25, "fc2": 25}, 20  # directions; those of fc1 are the paper's
UNITS = (20, 50, 100, 200, 300, 400, 512)
DRAWS = 3  # of random neurons
EXAMPLES = 10_000  # training images that directions are found on, at most
PAIRS = {"cpu": 3, "gpu": 5}  # of networks, which find their directions together
LOST = 0.02
KEPT = f"fc1: share of the accuracy kept by {FEW['fc1']} directions"
DISTRIBUTED = "fc1: test accuracy lost by 100 neurons of 20 directions"


@dataclass(frozen=True)
class Layer:
    """One layer of one network: its directions, those of largest variance, its test features, and what follows it."""

    side: AlignedSide
    principal: AlignedSide
    features: Tensor
    labels: Tensor
    tail: nn.Sequential

    def on(self, kept: AlignedSide | Neurons, k: int | None = None) -> float:
        """Return the test accuracy with the layer restricted to what is kept."""
        with nk.project(self.tail, "0", kept, k):
            return self.accuracy()

    @torch.no_grad()
    def accuracy(self) -> float:
        parts = zip(self.features.split(1000), self.labels.split(1000), strict=True)
        return sum(int((self.tail(rows).argmax(1) == truth).sum()) for rows, truth in parts) / len(self.labels)


def _directions(layer: Layer, k: int) -> float | None:
    return layer.on(layer.side, k) if k <= layer.side.kept else None


def _principal(layer: Layer, k: int) -> float | None:
    return layer.on(layer.principal, k) if k <= layer.principal.kept else None


def _random(layer: Layer, k: int, rest: str = "mean") -> float | None:
    draws = [torch.Generator().manual_seed(seed) for seed in range(DRAWS)]
    return _mean(layer.on(nk.random_neurons(layer.side, k, rest=rest, generator=draw)) for draw in draws)


def _largest(layer: Layer, k: int, rest: str = "mean") -> float | None:
    return layer.on(nk.largest_neurons(layer.side, k, rest=rest))


LINES: dict[str, Callable[[Layer, int], float | None]] = {
    "directions": _directions,
    "principal directions": _principal,
    "random neurons": _random,
    "neurons of largest activation": _largest,
    "random neurons, others predicted": partial(_random, rest="predicted"),
    "largest neurons, others predicted": partial(_largest, rest="predicted"),
}
BASELINES = tuple(name for name in LINES if "neurons" in name)


@claim(
    "svcca/few-directions",
    figure="Fig. 2a",
    sentence="for a network trained on CIFAR-10, the first 25 dimensions provide nearly the same accuracy as using all "
    "512 dimensions of a fully connected layer with 512 neurons … Both of these baselines require far more directions.",
    expected={KEPT: "nearly all"},
    control="as many principal directions, those of largest variance",
    criterion="Two parts. 25 SVCCA directions of fc1 keep more than 95% of the test accuracy, and more than 25 "
    "principal directions do. And in both fc layers they keep more than 25 random neurons and the 25 of largest "
    "activation, the others held at their mean or predicted. Each pair of networks by pair, by the 95% interval of "
    "Student's t over the pairs; in part if one of the two.",
    measures=["svcca"],
)
def few_directions(lab: Lab) -> Finding:
    """Test accuracy with one layer restricted to k directions or neurons, without any training after that."""
    layers = {name: list(_layers(lab, name)) for name in LAYERS}
    shares = {name: {line: _shares(line, nets, FEW[name]) for line in LINES} for name, nets in layers.items()}
    names = {name: f"{name}: share of the accuracy kept by {FEW[name]} directions" for name in LAYERS}
    measured = {names[name]: Measured.over(shares[name]["directions"]) for name in ("fc1", "fc2", "pool1")}
    controls = {names[name]: Measured.over(shares[name]["principal directions"]) for name in ("fc1", "fc2", "pool1")}
    ahead = [_gain(shares[name], line) for name in ("fc1", "fc2") for line in BASELINES]
    for name, lines in shares.items():
        for line in BASELINES:
            controls[f"{name}: share of the accuracy kept by {FEW[name]} {line}"] = Measured.over(lines[line])
        measured[f"{name}: directions kept at 99%"] = Measured.over(_by_pair([one.side.kept for one in layers[name]]))
    measured["test accuracy"] = Measured.over(_by_pair([layer.accuracy() for layer in layers["fc1"]]))
    return Finding(
        verdict(all_of(measured[KEPT].above(0.95), _gain(shares["fc1"], "principal directions")), all_of(*ahead)),
        measured,
        controls,
        note="Directions of two initialisations, found on training images; accuracy on test images, the mean of both "
        "networks. pool1 is taken place by place, so its neurons are channels. The paper does not say what its "
        "baselines do with the other neurons; predicting them from the chosen ones is the very projection that "
        "directions get. Where a layer keeps fewer directions than a number names, all of them are used.",
        curves={
            f"Test accuracy on k directions or neurons of {name}": _curve(nets[:2]) for name, nets in layers.items()
        },
        seeds=tuple(range(2 * PAIRS[lab.scale])),
    )


@claim(
    "svcca/distributed",
    figure="Fig. 2b",
    sentence="keeping even 100 fc1 neurons cannot maintain the accuracy of the first 20 SVCCA directions … suggests "
    "that those 20 SVCCA directions are distributed across 5 or more neurons each, on average.",
    expected={DISTRIBUTED: "above 0", "fc1: neurons for each of 20 directions": "5 or more"},
    control="20 directions that are single neurons, those of largest activation",
    criterion=f"Holds if 100 neurons of fc1, chosen for the first 20 directions, have a test accuracy lower than these "
    f"directions by more than {LOST}, and by more than 100 neurons chosen for 20 directions that are single neurons, "
    "pair of networks by pair; both by the 95% interval of Student's t over the pairs.",
    measures=["svcca"],
)
def distributed(lab: Lab) -> Finding:
    """Test accuracy on the first 20 directions, and on the m neurons most aligned with them."""
    layers = {name: list(_layers(lab, name)) for name in ("fc1", "fc2")}
    single = {name: [replace(one, side=axis_aligned(one.side, SOME)) for one in nets] for name, nets in layers.items()}
    measured, controls = (_losses(found) for found in (layers, single))
    ours, control = (_lost(found["fc1"], 100) for found in (layers, single))
    for name, nets in layers.items():
        needed = [_needed(net) / SOME for net in nets]
        measured[f"{name}: neurons for each of {SOME} directions"] = Measured.over(_by_pair(needed))
    return Finding(
        verdict(all_of(measured[DISTRIBUTED].above(LOST), gains(ours, control).above(0))),
        measured,
        controls,
        note="The layer is projected on the directions; then the m neurons that vary most in their span are kept and "
        f"the others held at their mean. Neurons needed: the fewest of {', '.join(map(str, UNITS))} that keep 98% of "
        f"the accuracy of {SOME} directions. Also of 20 single neurons the others are predicted first, so that what is "
        "lost then is lost by dropping predictions and not by being distributed.",
        curves={
            f"Test accuracy on m neurons of k directions of {name}": _spread(nets) for name, nets in layers.items()
        },
        seeds=tuple(range(2 * PAIRS[lab.scale])),
    )


def _losses(layers: Mapping[str, Sequence[Layer]]) -> dict[str, Measured]:
    found = {}
    for name, nets in layers.items():
        for m in (100, SOME):
            found[f"{name}: test accuracy lost by {m} neurons of {SOME} directions"] = Measured.over(_lost(nets, m))
        whole = _by_pair(_aligned(nets, SOME, nets[0].side.width))
        found[f"{name}: test accuracy on {SOME} directions"] = Measured.over(whole)
    return found


def _lost(nets: Sequence[Layer], m: int) -> list[float]:
    """Return the accuracy that m neurons lose of that of the directions they are chosen for, by pair of networks."""
    whole, few = _aligned(nets, SOME, nets[0].side.width), _aligned(nets, SOME, m)
    return _by_pair([one - other for one, other in zip(whole, few, strict=True)])


def axis_aligned(side: AlignedSide, k: int) -> AlignedSide:
    """Return the k units of largest activation as the directions of a layer, made orthonormal over the examples."""
    chosen = torch.tensor(nk.largest_neurons(side, k).chosen, device=side.mean.device)
    covariance = side.covariance(chosen)
    factor = torch.linalg.cholesky(covariance[:, chosen] + 1e-9 * covariance.abs().max() * torch.eye(k).to(covariance))
    units = torch.eye(side.width).to(covariance)[:, chosen]
    transform = torch.linalg.solve_triangular(factor, units.mT, upper=False).mT
    patterns = torch.linalg.solve_triangular(factor, covariance, upper=False)
    return replace(side, transform=transform, patterns=patterns, kept=k)


def _by_pair(values: Sequence[float]) -> list[float]:
    """Return the means of the two networks of each pair, which are not independent of each other."""
    return [(one + other) / 2 for one, other in zip(values[::2], values[1::2], strict=True)]


def _gain(shares: Mapping[str, list[float]], line: str) -> bool | None:
    return gains(shares["directions"], shares[line]).above(0)


def _layers(lab: Lab, name: str) -> Iterator[Layer]:
    """Yield the layer of each network; two networks next to each other find their directions together."""
    runs = lab.trained_all(("convnet", seed) for seed in lab.seeds(2 * PAIRS[lab.scale]))
    images, layer = lab.images(), LAYERS[name]
    data, shape = images.train_images[:EXAMPLES], "positions" if name == "pool1" else None
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        found = nk.model_directions(first.model, layer, second.model, data=data, shape=shape)
        for model, side in ((first.model, found.x), (second.model, found.y)):
            principal = nk.model_directions(model, layer, model, data=data, shape=shape).x
            with torch.no_grad():
                parts = [nk.run_until(model, layer, part) for part in images.test_images.split(1000)]
            yield Layer(side, principal, torch.cat(parts), images.test_labels, tail(model, layer))


def tail(model: nn.Module, layer: str) -> nn.Sequential:
    """Return what a chain of layers does after `layer`, whose place is taken by an identity."""
    names = [name for name, _ in model.named_children()]
    steps = list(model.children())[names.index(layer) + 1 :]
    flat = [part for step in steps for part in ((nn.Flatten(), step) if isinstance(step, nn.Linear) else (step,))]
    return nn.Sequential(nn.Identity(), *flat).eval()


def _shares(line: str, nets: Sequence[Layer], k: int) -> list[float]:
    """Return the share of the accuracy that `k` directions or neurons keep, or all where there are fewer, by pair."""
    most = {"directions": "side", "principal directions": "principal"}
    counts = [min(k, getattr(net, most[line]).kept if line in most else net.side.width) for net in nets]
    return _by_pair(
        [(LINES[line](net, count) or 0.0) / net.accuracy() for net, count in zip(nets, counts, strict=True)]
    )


def _curve(nets: Sequence[Layer]) -> dict[str, list[float | None]]:
    counts = [k for k in COUNTS if k <= nets[0].side.width]
    lines = {line: [_known_mean(run(net, k) for net in nets) for k in counts] for line, run in LINES.items()}
    return {
        "k": [float(k) for k in counts],
        **lines,
        "all neurons": [_mean(net.accuracy() for net in nets)] * len(counts),
    }


def _aligned(nets: Sequence[Layer], k: int, m: int) -> list[float]:
    return [net.on(nk.aligned_neurons(net.side, k, m)) for net in nets]


def _needed(net: Layer) -> int:
    """Return the fewest neurons of those tried that do nearly as well as the directions that they are chosen for."""
    whole = net.on(net.side, SOME)
    return next(m for m in UNITS if _aligned([net], SOME, m)[0] >= 0.98 * whole)


def _spread(nets: Sequence[Layer]) -> dict[str, list[float]]:
    counts = [k for k in COUNTS[3:12] if all(k <= net.side.kept for net in nets)]
    lines = {f"{m} neurons": [_mean(_aligned(nets, k, m)) for k in counts] for m in (50, 100, 200, 512)}
    return {"directions": [float(k) for k in counts], **lines}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _known_mean(values: Iterable[float | None]) -> float | None:
    numbers = list(values)
    return None if None in numbers else _mean(number for number in numbers if number is not None)
