"""The claims about filter subspaces, on small networks of made-up images: what they measure is what they say."""

from pathlib import Path

import pytest
import torch

from netkin.representations.filters import atom_layers
from netkin.sources.architectures import ResNet, alexnet, vgg11
from netkin.training import Recipe
from reproductions import laboratory
from reproductions.laboratory import Images, Lab, Network
from reproductions.subspaces import nets

CLASSES = {"cifar10": 10, "cifar100": 20, "svhn": 10}


def made_up(name, seed, size=32):
    """Return 200 and 100 images, each a noisy picture of its class."""
    generator = torch.Generator().manual_seed(seed)
    classes = CLASSES[name]
    pictures = torch.randn(classes, 3, 4, 4, generator=generator)
    parts = []
    for count in (200, 100):
        labels = torch.arange(count) % classes
        noise = torch.randn(count, 3, size, size, generator=generator)
        parts += [torch.nn.functional.interpolate(pictures[labels], scale_factor=size // 4) + noise, labels]
    return Images(name, tuple(map(str, range(classes))), *parts)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory of three made-up sets, with narrow networks that are trained for few steps."""
    with pytest.MonkeyPatch.context() as patch:
        recipe = Recipe(steps=6, batch=10, rate=0.01, drop_last=True)
        patch.setitem(laboratory.RECIPES, "cpu", {
            "resnet18-atoms": Network(lambda: ResNet((1, 1), (4, 4)), recipe),
            "alexnet-atoms": Network(lambda: alexnet(width=2), recipe),
            "vgg11-atoms": Network(lambda: vgg11(width=2), recipe),
        })  # fmt: skip
        lab = Lab("cpu", cache=tmp_path_factory.mktemp("cache"), data=Path("nowhere"))
        lab.__dict__["_sets"] = {name: made_up(name, seed) for seed, name in enumerate(CLASSES)}
        yield lab


# --- the networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", nets.HEADS)
def test_only_atoms_and_linear_layers_are_trained(lab, name):
    begin = nets.start(lab, name)
    model = nets.copies(begin, 1)[0]
    nets.train_all(lab, name, [model], [nets.tasks(lab, 2)[0].train])
    before, after = dict(begin.named_parameters()), dict(model.named_parameters())
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    heads = {key for key in before if key.startswith("fc")}
    assert moved == heads | {f"{layer}.atoms" for layer, _ in atom_layers(begin)}
    assert not model.training


def test_a_start_depends_on_its_seed_alone_and_not_on_the_number_of_classes(lab):
    one, other, third = nets.start(lab, "vgg11", 1), nets.start(lab, "vgg11", 1, classes=7), nets.start(lab, "vgg11", 2)
    for (_, a), (_, b), (_, c) in zip(*map(atom_layers, (one, other, third)), strict=True):
        assert torch.equal(a.atoms, b.atoms)
        assert torch.equal(a.coefficients, b.coefficients)
        assert not torch.equal(a.coefficients, c.coefficients)
    assert other.fc.out_features == 7


def test_filters_keep_the_size_of_what_goes_through_a_relu(lab):
    found = list(atom_layers(nets.start(lab, "vgg11")))
    sizes = [float(layer.weight.detach().var() * 9 * layer.in_channels / 2) for _, layer in found]
    assert sum(sizes) / len(sizes) == pytest.approx(1, abs=0.25)
    assert all(layer.bias.abs().max() == 0 for _, layer in found)


def test_tasks_part_the_classes_of_a_set(lab):
    found = nets.tasks(lab, 4)
    assert [len(task.classes) for task in found] == [5] * 4
    assert sum(len(task.train_images) for task in found) == 200
    assert all(set(task.train_labels.tolist()) == set(range(5)) for task in found)
    whole = lab.images_of("cifar100")
    assert torch.equal(found[1].test_images, whole.test_images[(whole.test_labels >= 5) & (whole.test_labels < 10)])


def test_shuffled_labels_are_the_same_ones_in_another_order(lab):
    task = nets.tasks(lab, 4)[0]
    other = nets.shuffled(task, 0)
    assert torch.equal(other.train_labels.sort().values, task.train_labels.sort().values)
    assert not torch.equal(other.train_labels, task.train_labels)
    assert torch.equal(other.test_labels, task.test_labels)


def test_a_walk_goes_as_far_as_training_in_each_layer_and_elsewhere(lab):
    begin, task = nets.start(lab, "resnet18"), nets.tasks(lab, 2)[0]
    [model] = nets.train_all(lab, "resnet18", nets.copies(begin, 1), [task.train])
    walk = nets.walked(begin, model, 3, task.train_images)
    ends, ways = nets.atoms_of(model), nets.atoms_of(walk)
    for name, first in nets.atoms_of(begin).items():
        assert (ends[name] - first).norm() > 0
        torch.testing.assert_close((ends[name] - first).norm(), (ways[name] - first).norm())
        assert not torch.allclose(ends[name], ways[name])
