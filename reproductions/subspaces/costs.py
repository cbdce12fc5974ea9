"""What it costs to compare networks by their atoms, and by their outputs on probing images.

Claim: subspaces/cost. Operations are counted at the papers' widths at both scales; times are those of the scale.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import netkin as nk
from netkin.representations.filters import atom_layers
from netkin.sources.architectures import alexnet, resnet18
from reproductions.claims import Decision, Finding, Measured, all_of, claim, verdict
from reproductions.laboratory import Lab
from reproductions.subspaces import nets
from reproductions.subspaces.pairs import ATOM, CCA, CKA, WEIGHT, cosines, probes

NETWORKS = 10
REPEATS = {"cpu": 5, "gpu": 5}
BATCH = 100  # of probing images
PRINTED, MANY = 10_000, 100  # probes of section 2.3; networks of Table 1
MILLION = 1e6
LITTLE = 0.01
COUNTED: dict[str, Callable[[], nn.Module]] = {"ResNet-18": resnet18, "AlexNet": alexnet}
OPERATIONS = "times fewer operations than {}, one pair of {}, 10,000 probes"
TIMES = "times less time than {}, all pairs of ten AlexNets"
MEMORY = "GPU memory of {}, beside the networks"
MORE = "the saving in operations at 100 networks, over that at 10"
Way = Callable[[], Any]


@dataclass(frozen=True)
class Layer:
    """A convolution of 3 × 3 kernels, with the sizes on which its costs depend."""

    inputs: int
    channels: int
    places: int
    kernel: int = 9
    atoms: int = 9


@claim(
    "subspaces/cost",
    figure="Fig. 3a",
    sentence="calculating the filter subspace similarity is significantly faster (million times), requiring 0 GPU "
    "memory usage than probing-based methods. Note that the advantages in computational efficiency of filter subspace "
    "similarity become more prominent as the number of models increases.",
    expected={OPERATIONS.format("CCA", "ResNet-18"): "1.14e7 (a network that is not named)",
              OPERATIONS.format("CKA", "ResNet-18"): "1.2e5 (Table 1), 1.6e4 (Table 2)",
              TIMES.format("CCA"): "1.2e5 (Table 1), 325 (Table 2)",
              TIMES.format("CKA"): "5.8e3 (Table 1), 375 (Table 2)", MORE: "above 1"},
    control="`weight_cosine`, which needs no images either; of the number of networks, two forward passes for a pair",
    criterion="Operations are multiply-adds: the forward passes of both networks, covariances n·hw·c² within and "
    "between them, c³ for each of three decompositions of CCA; and m·k² for atoms. Times are of `nk.compare_many` and "
    "`nk.atom_similarity` for ten networks that are in memory already. Four parts, and at gpu scale a fifth: a million "
    "times fewer operations than CCA, and than CKA, and a million times less time than CCA, and than CKA, each more "
    "than the control's saving, times by the 95% interval of Student's t over repetitions; less than a hundredth of "
    "CCA's GPU memory. Whether more networks make the saving larger is counted, with N forward passes for N networks, "
    "and makes a last part.",
    measures=[ATOM, WEIGHT, CCA, CKA],
)  # fmt: skip
def cost(lab: Lab) -> Finding:
    """Counted operations, measured times and GPU memory."""
    measured, controls = dict[str, Measured](), dict[str, Measured]()
    parts: list[Decision] = []
    for name, build in COUNTED.items():
        for way in ("CCA", "CKA"):
            words = OPERATIONS.format(way, name)
            ours, plain = (saving(sizes(build), way, 2, PRINTED, data_free=one) for one in ("atoms", "weights"))
            measured[words], controls[words] = Measured(ours), Measured(plain)
            if name == "ResNet-18":
                parts.append(MILLION <= ours > plain)
    found = spent(lab)
    for way in ("CCA", "CKA"):
        words = TIMES.format(way)
        measured[words], controls[words] = (_ratios(found[way][0], found[one][0]) for one in ("atoms", "weights"))
        parts.append(all_of(measured[words].above(MILLION), measured[words].value > controls[words].value))
    measured |= {f"seconds of {way}": Measured.over(own, "s") for way, (own, _) in found.items()}
    if lab.device.type == "cuda":
        measured |= {MEMORY.format(way): Measured(peak, unit="MB") for way, (_, peak) in found.items()}
        parts.append(found["atoms"][1] < LITTLE * found["CCA"][1])
    measured[MORE] = Measured(growth(sizes(alexnet), passes=1))
    controls[MORE] = Measured(growth(sizes(alexnet), passes=2))
    parts.append(measured[MORE].value > 1)
    return Finding(verdict(*parts), measured, controls, _note(lab), _curves(), range(REPEATS[lab.scale]))


def sizes(build: Callable[[], nn.Module]) -> list[Layer]:
    """Return the sizes of a network's convolutions of 3 × 3 on images of 32 × 32; nothing is computed."""
    with torch.device("meta"):
        model, image = build().eval(), torch.zeros(1, 3, 32, 32)
    convs = {name: one for name, one in model.named_modules() if getattr(one, "kernel_size", None) == (3, 3)}
    with nk.recording(model, list(convs)) as outputs:
        model(image)
    return [Layer(one.in_channels, one.out_channels, outputs[name][0, 0].numel()) for name, one in convs.items()]


def saving(
    layers: Sequence[Layer], way: str, networks: int, images: int, data_free: str = "atoms", passes: int = 1
) -> float:
    """Return how many times more operations CCA or CKA take for all pairs of networks than what needs no images.

    Args:
        layers: The convolutions of a network.
        way: "CCA" or "CKA".
        networks: How many are compared, all with all.
        images: How many probing images there are.
        data_free: "atoms" or "weights".
        passes: 1 where a network sees the images once, 2 where each pair sees them anew.
    """
    pairs = networks * (networks - 1) / 2
    forward = images * sum(one.places * one.kernel * one.inputs * one.channels for one in layers)
    covariance = images * sum(one.places * one.channels**2 for one in layers)
    cubes = sum(one.channels**3 for one in layers) if way == "CCA" else 0
    once = (networks if passes == 1 else 2 * pairs) * (forward + covariance + cubes)
    free = sum(one.kernel * (one.atoms if data_free == "atoms" else one.inputs * one.channels) for one in layers)
    return (once + pairs * (covariance + cubes)) / (pairs * free)


def growth(layers: Sequence[Layer], passes: int) -> float:
    """Return by how much the saving against CCA grows from ten networks to a hundred."""
    many, few = (saving(layers, "CCA", count, PRINTED, passes=passes) for count in (MANY, NETWORKS))
    return many / few


def spent(lab: Lab) -> dict[str, tuple[list[float], float]]:
    """Return the seconds of each repetition and the peak of GPU memory, in MB, of each way to compare ten networks."""
    models = dict(zip(map(str, range(NETWORKS)), nets.copies(nets.start(lab, "alexnet"), NETWORKS), strict=True))
    for seed, model in enumerate(models.values()):
        _moved(model.eval(), seed)
    return {way: _timed(lab, work) for way, work in ways(models, list(probes(lab).split(BATCH))).items()}


@torch.no_grad()
def _moved(model: nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _, layer in atom_layers(model):
        layer.atoms.add_(0.3 * torch.randn(layer.atoms.shape, generator=draw).to(layer.atoms))


def ways(models: dict[str, nn.Module], batches: list[Tensor]) -> dict[str, Way]:
    """Return functions that compare all pairs of networks: without images, and with them."""
    layers = [name for name, _ in atom_layers(models["0"])]
    options: dict[str, Any] = {"layers": layers, "pairs": "corresponding", "shape": "positions", "progress": False}
    return {
        "atoms": partial(nk.atom_similarity, models, progress=False),
        "weights": partial(_weights, list(models.values())),
        "CKA": partial(nk.compare_many, models, batches, CKA, **options),
        "CCA": partial(nk.compare_many, models, batches, CCA, **options),
    }


def _weights(models: list[nn.Module]) -> None:
    for parts in zip(*([layer for _, layer in atom_layers(model)] for model in models), strict=True):
        cosines([layer.weight.detach() for layer in parts])


def _timed(lab: Lab, work: Way) -> tuple[list[float], float]:
    """Return the seconds of each repetition after a first one, and the peak of GPU memory in MB."""
    on_gpu = lab.device.type == "cuda"
    work()
    if on_gpu:
        torch.cuda.synchronize(lab.device)
        torch.cuda.reset_peak_memory_stats(lab.device)
        held = torch.cuda.memory_allocated(lab.device)
    found = []
    for _ in range(REPEATS[lab.scale]):
        began = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize(lab.device)
        found.append(time.perf_counter() - began)
    return found, (torch.cuda.max_memory_allocated(lab.device) - held) / 1e6 if on_gpu else 0.0


def _ratios(slow: list[float], fast: list[float]) -> Measured:
    return Measured.over(one / other for one, other in zip(slow, fast, strict=True))


def _note(lab: Lab) -> str:
    layers = sizes(resnet18)
    grams = PRINTED**2 * sum(one.places * one.channels for one in layers)
    forward = PRINTED * sum(one.places * one.kernel * one.inputs * one.channels for one in layers)
    printed = (forward + grams) / sum(one.kernel * one.atoms for one in layers)
    return (
        f"{len(probes(lab)):,} probing images, positions as rows, times of ten networks together. By the formula of "
        f"section 2.3, with n²·hw·c for Gram matrices and one forward pass, CCA of ResNet-18 has {printed:.2g} times "
        "the operations of atoms. The paper's tables are of 100 clients and of ten tasks with networks of their own."
    )


def _curves() -> dict[str, dict[str, list[Any]]]:
    layers, counts, images = sizes(alexnet), (2, 5, 10, 20, 50, 100, 1000), (100, 1000, 10_000, 50_000)
    by_networks = {way: [saving(layers, way, count, 1000) for count in counts] for way in ("CCA", "CKA")}
    by_images = {way: [saving(layers, way, 2, count) for count in images] for way in ("CCA", "CKA")}
    return {
        "Times fewer operations by networks, 1,000 images": {"networks": list(counts)} | by_networks,
        "Times fewer operations by images, one pair": {"images": list(images)} | by_images,
    }
