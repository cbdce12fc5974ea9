"""Filter atoms: what they cost beside probing similarities of the same networks, and beside plain convolutions.

`python bench/subspaces.py` prints the tables of docs/subspaces.md in about a minute.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import torch
from clock import peak_megabytes, ratio, seconds
from nets import batches, lively
from torch import Tensor, nn

import netkin as nk
from netkin.measures.linear import nearest
from netkin.representations.filters import atom_layers
from netkin.sources.architectures import resnet18, seeded

NETWORKS, IMAGES, PROBES = 3, 16, 10_000
WAYS = ("atoms", "cka", "cca")
SIZES = [(64, 32), (128, 16), (256, 8), (512, 4)]  # channels and side of the maps of ResNet-18 on CIFAR images
LAYERS, NUMBERS = 20, 81


def family() -> dict[str, nn.Module]:
    """Return networks that share their coefficients and differ in their atoms."""
    start, found = nk.decompose(lively(seeded(resnet18, 0))).model, {}
    for place in range(NETWORKS):
        found[str(place)] = copy.deepcopy(start)
        draw = torch.Generator().manual_seed(place)
        for _, layer in atom_layers(found[str(place)]):
            layer.atoms.data += 0.1 * layer.atoms.abs().mean() * torch.randn(layer.atoms.shape, generator=draw)
    return found


def operations(n: int = PROBES) -> dict[str, float]:
    """Return multiply-adds for one pair of ResNet-18: the paper's formula, covariances, and atoms."""
    model, image = seeded(resnet18, 0), torch.zeros(1, 3, 32, 32)
    layers = {
        name: one for name, one in model.named_modules() if isinstance(one, nn.Conv2d) and one.kernel_size != (1, 1)
    }
    found = {"atoms": 0.0, "forward": 0.0, "grams as printed": 0.0, "covariances": 0.0}
    with nk.recording(model, list(layers)) as outputs, torch.no_grad():
        model(image)
    for name, layer in layers.items():
        _, c, h, w = outputs[name].shape
        numbers = layer.kernel_size[0] * layer.kernel_size[1]
        found["atoms"] += numbers * min(numbers, layer.weight[:, :, 0, 0].numel())
        found["forward"] += n * h * w * numbers * c * (layer.in_channels // layer.groups)
        found["grams as printed"] += n**2 * h * w * c
        found["covariances"] += n * h * w * c**2
    return found


def one_way(way: str) -> dict[str, float]:
    """Return the seconds and the memory of one similarity of all networks, in this process."""
    models, images = family(), batches(1, IMAGES)
    layers = [name for name, _ in atom_layers(models["0"])]
    options: dict[str, Any] = {"layers": layers, "pairs": "corresponding", "shape": "positions", "progress": False}

    def work() -> None:
        if way == "atoms":
            nk.atom_similarity(models, progress=False)
        else:
            nk.compare_many(models, images, {"cka": "cka", "cca": "cca_rms"}[way], **options)

    nk.atom_similarity([models["0"], models["1"]], progress=False)  # imports what is needed
    before = peak_megabytes()
    return {"seconds": min(seconds(work) for _ in range(3)), "megabytes": peak_megabytes() - before}


def atom_conv() -> dict[str, Any]:
    """Return forward and backward of fused `AtomConv2d` at ResNet-18 sizes, 9 atoms, against `nn.Conv2d`."""
    plain = [nn.Conv2d(c, c, 3, padding=1, bias=False) for c, _ in SIZES]
    atoms = [nk.decompose(nn.Sequential(layer)).model[0] for layer in plain]
    images = [torch.randn(128, c, side, side) for c, side in SIZES]
    return ratio(lambda: _steps(atoms, images), lambda: _steps(plain, images), repeats=3)


def _steps(layers: list[Any], images: list[Tensor]) -> None:
    for layer, image in zip(layers, images, strict=True):
        layer(image.requires_grad_()).sum().backward()


def atom_pairs(networks: int = 10_000) -> dict[str, Any]:
    """Return the five nearest of 10,000 networks of 20 layers × 81 numbers, against the product of all with all."""
    rows = torch.randn(networks, LAYERS, NUMBERS, generator=torch.Generator().manual_seed(0))
    vectors = (rows / rows.norm(dim=2, keepdim=True)).flatten(1)
    before = peak_megabytes()

    def product() -> None:
        for start in range(0, networks, 1024):
            torch.mm(vectors[start : start + 1024], vectors.T)

    found = ratio(lambda: nearest(vectors, LAYERS, 5), product, repeats=2)
    return found | {"megabytes": peak_megabytes() - before}


def main() -> None:
    """Print the tables."""
    counts, taken = operations(), {way: _measured(way) for way in WAYS}
    print(f"| ResNet-18, one pair, {PROBES:,} probes | multiply-adds | of atoms |\n|---|---|---|")
    for what, count in counts.items():
        print(f"| {what} | {count:.2g} | {count / counts['atoms']:.2g} |")
    print(f"\n| {NETWORKS} ResNet-18, all pairs, {IMAGES} probes | seconds | peak MB more |\n|---|---|---|")
    for way, found in taken.items():
        print(f"| {way} | {found['seconds']:.3g} | {found['megabytes']:.0f} |")
    conv, pairs = atom_conv(), atom_pairs()
    print(f"\nfused AtomConv2d against nn.Conv2d: {conv['ratio']:.2f}")
    print(f"10,000 networks, 5 nearest against the product: {pairs['ratio']:.2f}, {pairs['megabytes']:.0f} MB more")


def _measured(way: str) -> dict[str, float]:
    run = subprocess.run([sys.executable, __file__, way], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(one_way(sys.argv[1])))
    else:
        main()
