"""Few SVCCA directions of a layer do the work of all its neurons, and each is spread over several neurons.

Claims: svcca/few-directions and svcca/distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import netkin as nk
from netkin.applications.interpretation import Neurons
from netkin.measures import AlignedSide
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab

# the paper's pool1, fc1 and fc2, after their ReLUs; its pool1 is the second pool, counted from 0
LAYERS = {"pool1": "pool2", "fc1": "relu6", "fc2": "relu7"}
COUNTS = (1, 2, 3, 5, 7, 10, 15, 20, 25, 35, 50, 75, 100, 150, 200, 300, 400, 512)
FEW, SOME = {"pool1": 10, "fc1": 25, "fc2": 25}, 20  # directions; those of fc1 are the paper's
UNITS = (20, 50, 100, 200, 300, 400, 512)
DRAWS = 3  # of random neurons
EXAMPLES = 20_000  # training images that directions are found on, at most
NETS = {"cpu": 2, "gpu": 4}


@dataclass(frozen=True)
class Layer:
    """One layer of one network: its directions, what it gives for the test images, and what the network makes of it."""

    side: AlignedSide
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


def _random(layer: Layer, k: int, rest: str = "mean") -> float | None:
    draws = [torch.Generator().manual_seed(seed) for seed in range(DRAWS)]
    return _mean(layer.on(nk.random_neurons(layer.side, k, rest=rest, generator=draw)) for draw in draws)


def _largest(layer: Layer, k: int, rest: str = "mean") -> float | None:
    return layer.on(nk.largest_neurons(layer.side, k, rest=rest))


LINES: dict[str, Callable[[Layer, int], float | None]] = {
    "SVCCA directions": _directions,
    "random neurons": _random,
    "neurons of largest activation": _largest,
    "random neurons, others predicted": partial(_random, rest="predicted"),
    "largest neurons, others predicted": partial(_largest, rest="predicted"),
}
BASELINES = ("random neurons", "neurons of largest activation")


@claim(
    "svcca/few-directions",
    figure="Fig. 2a",
    sentence="for a network trained on CIFAR-10, the first 25 dimensions provide nearly the same accuracy as using all "
    "512 dimensions of a fully connected layer with 512 neurons … Both of these baselines require far more directions.",
    expected={"fc1: share of the accuracy kept by 25 SVCCA directions": "nearly all"},
    criterion="Holds if 25 directions of fc1 keep at least 95% of the test accuracy, and in both fc layers 25 random "
    "neurons and the 25 of largest activation, the others held at their mean, keep less than 25 directions do; in part "
    "if one of the two.",
)
def few_directions(lab: Lab) -> Finding:
    """Test accuracy with one layer restricted to k directions or neurons, without any training after that."""
    layers = {name: list(_layers(lab, name)) for name in LAYERS}
    shares = {name: {line: _shares(line, nets, FEW[name]) for line in LINES} for name, nets in layers.items()}
    means = {name: {line: _mean(values) for line, values in lines.items()} for name, lines in shares.items()}
    ahead = [means[name]["SVCCA directions"] > means[name][line] for name in ("fc1", "fc2") for line in BASELINES]
    measured = {"test accuracy": Measured.over(layer.accuracy() for layer in layers["fc1"])}
    for name, lines in shares.items():
        for line, values in lines.items():
            measured[f"{name}: share of the accuracy kept by {FEW[name]} {line}"] = Measured.over(values)
        measured[f"{name}: directions kept at 99%"] = Measured.over(layer.side.kept for layer in layers[name])
    return Finding(
        verdict(means["fc1"]["SVCCA directions"] >= 0.95, all(ahead)),
        measured,
        note="Directions of two initialisations, found on training images; accuracy on test images. pool1 is taken "
        "place by place, so its neurons are channels. The paper does not say what its baselines do with the other "
        "neurons; predicting them from the chosen ones is the very projection that directions get, and the stronger "
        "baseline. Where a layer keeps fewer directions than a number names, all of them are used.",
        curves={f"Test accuracy on k directions or neurons of {name}": _curve(nets) for name, nets in layers.items()},
        seeds=tuple(range(NETS[lab.scale])),
    )


@claim(
    "svcca/distributed",
    figure="Fig. 2b",
    sentence="keeping even 100 fc1 neurons cannot maintain the accuracy of the first 20 SVCCA directions … suggests "
    "that those 20 SVCCA directions are distributed across 5 or more neurons each, on average.",
    expected={"fc1: neurons for each of 20 directions": "5 or more"},
    criterion="Holds if 100 neurons of fc1, chosen for the first 20 directions, have a test accuracy lower than these "
    "directions by more than 0.02; in part if 20 neurons have.",
)
def distributed(lab: Lab) -> Finding:
    """Test accuracy on the first 20 directions, and on the m neurons most aligned with them."""
    layers = {name: list(_layers(lab, name)) for name in ("fc1", "fc2")}
    measured, lost = {}, {}
    for name, nets in layers.items():
        measured[f"{name}: test accuracy on {SOME} directions"] = Measured.over(_aligned(nets, SOME, 512))
        for m in (100, SOME):
            measured[f"{name}: test accuracy on {m} neurons of {SOME} directions"] = Measured.over(
                _aligned(nets, SOME, m)
            )
            pairs = zip(_aligned(nets, SOME, 512), _aligned(nets, SOME, m), strict=True)
            lost[name, m] = _mean(whole - few for whole, few in pairs)
        measured[f"{name}: neurons for each of {SOME} directions"] = Measured.over(_needed(net) / SOME for net in nets)
    return Finding(
        verdict(lost["fc1", 100] > 0.02, lost["fc1", SOME] > 0.02),
        measured,
        note="The layer is projected on the directions; then the m neurons that vary most in their span are kept and "
        f"the others held at their mean. Neurons needed: the fewest of {', '.join(map(str, UNITS))} that keep 98% of "
        f"the accuracy of {SOME} directions.",
        curves={
            f"Test accuracy on m neurons of k directions of {name}": _spread(nets) for name, nets in layers.items()
        },
        seeds=tuple(range(NETS[lab.scale])),
    )


def _layers(lab: Lab, name: str) -> Iterator[Layer]:
    """Yield the layer of each network; two networks next to each other find their directions together."""
    runs = lab.trained_all(("convnet", seed) for seed in lab.seeds(NETS[lab.scale]))
    images, layer = lab.images(), LAYERS[name]
    data, shape = images.train_images[:EXAMPLES], "positions" if name == "pool1" else None
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        found = nk.model_directions(first.model, layer, second.model, data=data, shape=shape)
        for model, side in ((first.model, found.x), (second.model, found.y)):
            with torch.no_grad():
                parts = [nk.run_until(model, layer, part) for part in images.test_images.split(1000)]
            yield Layer(side, torch.cat(parts), images.test_labels, tail(model, layer))


def tail(model: nn.Module, layer: str) -> nn.Sequential:
    """Return what a chain of layers does after `layer`, whose place is taken by an identity."""
    names = [name for name, _ in model.named_children()]
    steps = list(model.children())[names.index(layer) + 1 :]
    flat = [part for step in steps for part in ((nn.Flatten(), step) if isinstance(step, nn.Linear) else (step,))]
    return nn.Sequential(nn.Identity(), *flat).eval()


def _shares(line: str, nets: Sequence[Layer], k: int) -> list[float]:
    """Return the share of the accuracy that `k` directions or neurons keep, or all where there are fewer."""
    counts = [min(k, net.side.kept if line == "SVCCA directions" else net.side.width) for net in nets]
    return [(LINES[line](net, count) or 0.0) / net.accuracy() for net, count in zip(nets, counts, strict=True)]


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
