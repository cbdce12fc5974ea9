"""How far sketches of g fᵀ are from the exact kernel, and which kernel predicts best: the tables of docs/gradients.md.

`python bench/sketches.py` takes random layers and the bundled digits; with two ResNet-20 and data, such as
`netkin:resnet20@a.pt netkin:resnet20@b.pt cifar10:DIR`, their pooled layers replace those of untrained ResNet-18.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from nets import nets
from torch import Tensor
from torch.nn.functional import interpolate

import netkin as nk
from netkin.statistics.linear_algebra import centred
from netkin.statistics.sketches import Placing, SketchSettings, tensor_sketch

EXAMPLES, SEEDS, BUCKETS = 1_000, 3, (128, 512, 2048)
BEFORE = 2_048  # numbers of ψ, whatever the buckets, in earlier versions
FORMS = ("`psi`", "2,048 numbers of ψ", "all numbers of ψ", "`hadamard`")
KERNELS = ("features", "gradients", "sum", "product", "hadamard", "psi")
Layer = tuple[Tensor, Tensor]  # features and gradients


def relu_layers(width: int, apart: float) -> tuple[Layer, Layer]:
    """Return two layers of ReLU units of ten classes of points; with apart=0 they are the same."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    points = normal(EXAMPLES, 20) + 1.5 * normal(10, 20)[torch.randint(10, (EXAMPLES,), generator=draw)]
    weights, head = normal(20, width) / 20**0.5, normal(width, 10) / width**0.5
    found = []
    for _ in range(2):
        features = (points @ (weights + apart * normal(20, width) / 20**0.5)).relu()
        logits = 3 * features @ (head + apart * normal(width, 10) / width**0.5)
        gradients = (logits.softmax(1) - (logits / 2).softmax(1)) @ head.mT
        found.append((features, gradients * (features > 0)))
    return found[0], found[1]


def broad_layers(width: int = 256) -> tuple[Layer, Layer]:
    """Return two layers of ReLU units whose kernels have many directions of like size: points without classes."""
    draw = np.random.default_rng(0)
    points, weights, pulls = (draw.normal(size=shape) for shape in ((EXAMPLES, 20), (20, width), (EXAMPLES, 20)))
    found = []
    for _ in range(2):
        own, back = (weights + 0.3 * draw.normal(size=weights.shape) for _ in range(2))
        features = np.maximum(points @ own, 0)
        found.append((torch.tensor(features), torch.tensor((pulls @ back) * (features > 0))))
    return found[0], found[1]


def pooled_layers(models: Any, data: Any, layers: list[str]) -> Iterator[tuple[str, Layer, Layer]]:
    """Yield the same layer of two networks, read from the first examples."""
    read = [[take(model, layers, data, examples=EXAMPLES, progress=False) for take in (nk.activations, nk.gradients)]
            for model in models]  # fmt: skip
    for name in layers:
        one, other = ((features[name].double(), gradients[name].double()) for features, gradients in read)
        yield name, one, other


def rows_of(arguments: list[str]) -> Iterator[tuple[str, Layer, Layer]]:
    """Yield pairs of layers with what they are."""
    for words, width, apart in (*(("alike", width, 0.1) for width in (16, 64, 256, 512)), ("unlike", 256, 3.0)):
        yield f"ReLU, {words}", *relu_layers(width, apart)
    yield "ReLU, no classes", *broad_layers()
    if arguments:
        first, second, data = arguments
        models = [nk.load_model(name) for name in (first, second)]
        names, batches = ["layer1.0", "layer2.0", "layer3.2"], nk.load_data(data, batch_size=100)
        what = "ResNet-20, trained, "
    else:
        models, names, what = list(nets()), ["layer1.0", "layer4.1"], "ResNet-18, "
        digits = list(nk.load_data("digits:train", batch_size=100))[: EXAMPLES // 100]
        batches = [interpolate(torch.as_tensor(batch[0]), 32).expand(-1, 3, -1, -1) for batch in digits]
    for name, one, other in pooled_layers(models, batches, names):
        yield what + name, one, other


def by_form(layers: tuple[Layer, Layer], buckets: int, seed: int) -> list[float]:
    """Return the CKA of two layers by each of `FORMS`."""
    placing = Placing(SketchSettings(buckets=buckets, seed=seed), np.arange(EXAMPLES), torch.device("cpu"))

    def of(bucket_kernel: Callable[[Tensor, Tensor], Tensor]) -> float:
        K, L = (bucket_kernel(*layer) for layer in layers)
        return float((K * L).sum() / K.norm() / L.norm())

    def before(f: Tensor, g: Tensor) -> Tensor:
        psi = tensor_sketch(f, g, seed, BEFORE)
        sums = placing.sums(psi - psi.mean(0))
        return sums @ sums.mT

    def whole(f: Tensor, g: Tensor) -> Tensor:
        return placing.sums(placing.sums(kernel(f, g)).mT)

    options = {"buckets": buckets, "seed": seed}
    return [
        float(nk.sketched_cka(*layers, kernel="psi", **options)), of(before), of(whole),
        float(nk.sketched_cka_by_buckets(*layers, kernel="hadamard", **options)),
    ]  # fmt: skip


def kernel(f: Tensor, g: Tensor) -> Tensor:
    """Return the exact kernel of g fᵀ about the mean of the examples."""
    return centred((f @ f.mT) * (g @ g.mT))


def errors(arguments: list[str]) -> None:
    """Print the error of each form, its mean and its standard deviation over seeds."""
    print("| layers | width | exact | buckets | " + " | ".join(FORMS) + " |")
    print("|---|---|---|---|" + "---|" * len(FORMS))
    for what, one, other in rows_of(arguments):
        exact = float(nk.kernel_cka(one, other))
        for buckets in BUCKETS:
            found = np.array([by_form((one, other), buckets, seed) for seed in range(SEEDS)]) - exact
            cells = [f"{mean:+.3f} ± {spread:.3f}" for mean, spread in zip(found.mean(0), found.std(0), strict=True)]
            head = f"| {what} | {one[0].shape[1]} | {exact:.3f} | {buckets:,} |"
            print(head, " | ".join(cells), "|", flush=True)


def accuracies() -> None:
    """Print the accuracy of kernel ridge on digits, with the trained network of the package and before training."""
    train, test = (nk.load_data(f"digits:{part}", batch_size=100) for part in ("train", "test"))
    layers = ["conv1", "conv2", "conv4", "relu4"]
    print("| network | kernel | " + " | ".join(layers) + " |\n|---|---|" + "---|" * len(layers))
    for what in ("untrained", "trained"):
        model = nk.training.trained_digits_net(0) if what == "trained" else nk.training.untrained_digits_net(0)
        for name in KERNELS:
            found = [
                nk.kernel_ridge(model, train, layers=layers, kernel=name, seed=seed, progress=False).accuracy(
                    test, progress=False
                )
                for seed in range(SEEDS)
            ]
            cells = [f"{np.mean([one[layer] for one in found]):.2f}" for layer in layers]
            print(f"| {what} | `{name}` |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    errors(sys.argv[1:])
    accuracies()
