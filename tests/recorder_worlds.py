"""A small network, images for it, and a short training that a recorder watches."""

import copy

import torch
from torch import nn

import netkin as nk


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5),
        nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 3),
    )  # fmt: skip


def images(n=40, seed=1):
    return torch.randn(n, 2, 8, 8, generator=torch.Generator().manual_seed(seed))


def train(model, steps=2, seed=0):
    """Take some steps of training on random images."""
    draw = torch.Generator().manual_seed(seed)
    batches = [
        (torch.randn(16, 2, 8, 8, generator=draw), torch.randint(3, (16,), generator=draw)) for _ in range(steps)
    ]
    nk.train(model, batches, epochs=1, lr=0.1, momentum=0.0, seed=seed)


def run(recorder, model, steps=range(4)):
    """Record a short training; return the checkpoints that were saved on the way."""
    saved = {}
    for step in steps:
        saved[step] = copy.deepcopy(model)
        recorder.probe(step)
        train(model, seed=step)
    return saved
