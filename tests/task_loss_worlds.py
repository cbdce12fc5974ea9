"""Pairs of small networks whose best stitch is known, for the tests of task-loss training."""

import torch
from torch import nn

from netkin.applications.stitching.fitting import fitted
from netkin.applications.stitching.joining import Stitched
from netkin.applications.stitching.matching import matched
from netkin.applications.stitching.task_loss import TaskLoss
from netkin.applications.stitching.transformations import Transformation


def joined(a, layer_a, b, layer_b, data, settings=None, cuts=True):
    """Return the network that a training begins with."""
    settings, pair = settings or TaskLoss(), (layer_a, layer_b)
    fit = fitted(a, b, [pair], data)
    start = Transformation(matched(fit.moments(pair), settings.start), fit.meetings[pair], rank=settings.rank)
    return Stitched(a, layer_a, b, layer_b, start.to(next(b.parameters()).dtype), cuts=cuts)


def batches(inputs, labels, size=50):
    return [(inputs[i : i + size], labels[i : i + size]) for i in range(0, len(inputs), size)]


def perceptron(seed, *, width=8, sharp=5.0, dtype=torch.float32):
    """Return a network of one hidden layer with decided answers."""
    torch.manual_seed(seed)
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
    torch.manual_seed(seed)
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
    return batches(inputs, torch.randint(0, 3, (examples,), generator=generator), 20)


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
