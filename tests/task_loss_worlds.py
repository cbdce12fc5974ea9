"""Pairs of small networks whose best stitch is known, for the tests of task-loss training."""

from contextlib import contextmanager

import torch
from torch import nn

from netkin.applications.stitching.fitting import fit_by_pass
from netkin.applications.stitching.joining import joints
from netkin.applications.stitching.maps import matched
from netkin.applications.stitching.network import Stitched, Transformation
from netkin.applications.stitching.training import TaskLoss, train_map
from netkin.representations import batches_of


def joined(a, layer_a, b, layer_b, data, settings=None, cuts=True):
    """Return the network that a training begins with."""
    settings, pair = settings or TaskLoss(), (layer_a, layer_b)
    found = joints(a, b, next(batches_of(data)), pairs=[pair])
    fit = fit_by_pass(batches_of(data), found)
    start = Transformation(matched(fit.moments(pair), settings.start), found.adapters[pair], rank=settings.rank)
    return Stitched(a, layer_a, b, layer_b, start.to(next(b.parameters()).dtype), cuts=cuts)


def trained_from(a, layer_a, b, layer_b, data, cuts=True, **options):
    """Return a trained network and the record of its training."""
    settings = TaskLoss(**options)
    network = joined(a, layer_a, b, layer_b, data, settings, cuts)
    return network, train_map(network, data, settings)


@contextmanager
def seeded(seed):
    """Draw from a seed of torch's own generator, and leave its state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def batches(inputs, labels, size=50):
    return [(inputs[i : i + size], labels[i : i + size]) for i in range(0, len(inputs), size)]


def perceptron(seed, *, width=8, sharp=5.0, dtype=torch.float32):
    """Return a network of one hidden layer with decided answers."""
    with seeded(seed):
        model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    with torch.no_grad():
        model[2].weight *= sharp
    return model.to(dtype).eval()


def two_perceptrons(dtype=torch.float32, examples=400):
    """Return two unrelated networks and labelled data."""
    a, b = perceptron(0, dtype=dtype), perceptron(1, dtype=dtype)
    inputs = torch.randn(examples, 6, generator=torch.Generator().manual_seed(2), dtype=dtype)
    with torch.no_grad():
        return a, b, batches(inputs, b(inputs).argmax(1))


def convnet(seed):
    """Return a small convolutional network with batch normalisation, dropout and a step in place."""
    with seeded(seed):
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5),
            nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3),
        )  # fmt: skip
        for _ in range(3):
            model(torch.randn(20, 2, 6, 6))
    return model


def images(examples=60):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(examples, 2, 6, 6, generator=generator)
    labels = torch.randint(0, 3, (examples,), generator=generator)
    with torch.no_grad():
        labels[::2] = convnet(1).eval()(inputs[::2]).argmax(1)  # which knows them better than by chance
    return batches(inputs, labels, 20)


class Tagger(nn.Module):
    """Scores for each token of a sequence."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.Linear(5, 3))

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids)


def two_taggers():
    """Return two networks, data of which some tokens are padding, and the same with other tokens there."""
    with seeded(0):
        a, b = Tagger(), Tagger()
    ids = torch.randint(0, 9, (20, 4), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(20, 4, dtype=torch.long)
    mask[:10, 2:] = 0
    rest = {"attention_mask": mask, "labels": ids % 3}
    return a, b, [{"input_ids": ids, **rest}], [{"input_ids": torch.where(mask == 1, ids, 8 - ids), **rest}]


class Quarrel(nn.Module):
    """Two loud units that mean nothing, and two quiet ones: the answer is which of these is larger, or neither."""

    def __init__(self, rotation):
        super().__init__()
        self.turn = nn.Linear(4, 4, bias=False)
        self.back = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.turn.weight.copy_(rotation)
            self.back.weight.copy_(rotation.T)

    def forward(self, inputs):
        quiet = nn.functional.softplus(self.back(self.turn(inputs))[:, 2:])
        return 10 * torch.cat([quiet, torch.full_like(quiet[:, :1], 0.7)], 1)


def quiet_world(examples=600):
    """Return two networks that turn the same four units differently, and data of which the loud half means nothing."""
    generator = torch.Generator().manual_seed(4)
    turns = [torch.linalg.qr(torch.randn(4, 4, generator=generator)).Q for _ in range(2)]
    inputs = torch.randn(3 * examples, 4, generator=generator) * torch.tensor([6.0, 6.0, 1.0, 1.0])
    a, b = (Quarrel(turn).eval() for turn in turns)
    with torch.no_grad():
        first, second, _ = b(inputs).sort(descending=True).values.T
        inputs = inputs[first - second > 1.5][:examples]
        return a, b, batches(inputs, b(inputs).argmax(1), 100)
