"""The claims about features and gradients, on small networks of made-up images: what they measure is what they say."""

from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.sources.architectures import Bottleneck, ResNet
from netkin.training import Recipe
from reproductions import laboratory
from reproductions.gradients import block_maps, desiderata, mean_norms, nets, orderings, other_measures, readings
from reproductions.laboratory import Images, Lab, Network

CLASSES = {"cifar10": 10, "cifar100": 20, "svhn": 10}


def made_up(name, seed):
    """Return 120 and 60 images, each a noisy picture of its class."""
    generator = torch.Generator().manual_seed(seed)
    classes = CLASSES[name]
    pictures = torch.randn(classes, 3, 8, 8, generator=generator)
    parts = []
    for count in (120, 60):
        labels = torch.arange(count) % classes
        noise = torch.randn(count, 3, 32, 32, generator=generator)
        parts += [torch.nn.functional.interpolate(pictures[labels], scale_factor=4) + noise, labels]
    return Images(nets.WORDS[name], tuple(map(str, range(classes))), *parts)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory of three made-up sets, with networks of two stages, trained for few steps."""
    with pytest.MonkeyPatch.context() as patch:
        recipe = Recipe(steps=12, batch=30, rate=0.05, drop_last=True)
        patch.setitem(laboratory.RECIPES, "cpu", {
            "resnet18": Network(lambda: ResNet((2, 2, 2, 2), (2, 2, 4, 4)), recipe),
            "resnet50": Network(lambda: ResNet((1, 1, 2, 1), (2, 2, 2, 2), block=Bottleneck), recipe),
        })  # fmt: skip
        patch.setitem(readings.BUCKETS, "cpu", 32)
        patch.setitem(readings.BATCH, "cpu", 40)
        patch.setitem(readings.NORMED, "cpu", 50)
        patch.setitem(readings.SEEN, "cpu", 8)
        patch.setitem(other_measures.FEW, "cpu", 8)
        patch.setitem(other_measures.TOO_FEW, "cpu", 4)
        lab = Lab("cpu", cache=tmp_path_factory.mktemp("cache"), data=Path("nowhere"))
        lab.__dict__["_sets"] = {name: made_up(name, seed) for seed, name in enumerate(nets.SETS)}
        yield lab


def test_desiderata(lab):
    for claim in (desiderata.desiderata, other_measures.other_measures, other_measures.buckets, block_maps.blocks, mean_norms.mean_embedding, mean_norms.factors):
        found = claim(lab)
        print(found.verdict)
        for name, one in found.measured.items():
            print("   ", name, one, found.controls.get(name))
        print(found.note)
        print(list(found.curves))
    assert 0
