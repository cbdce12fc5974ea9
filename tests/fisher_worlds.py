"""Worlds of Fisher information: small models, their inputs, and every y with its probability and log-likelihood."""

from itertools import product

import torch
from torch import nn


class Twice(nn.Module):
    """Its head comes first and runs last; it calls one layer two times, with an in-place step after each."""

    def __init__(self):
        super().__init__()
        self.head, self.first, self.again = nn.Linear(6, 3), nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, batch):
        batch = self.first(batch).relu_()
        return {"logits": self.head(self.again(self.again(batch)).relu_()), "more": batch.detach()}


def convnet():
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3, stride=2), nn.Flatten()]
    model = nn.Sequential(*first, nn.Linear(80, 4)).double()
    model[1].running_mean.normal_()
    return model


def pictures():
    return torch.randn(9, 3, 11, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rows():
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def made(kind):
    torch.manual_seed(3)
    return kind().double().eval()


def of_classes(logits):
    for log_p in logits.log_softmax(0):
        yield log_p.detach().exp(), log_p


def of_many(logits):
    for y in product([0.0, 1.0], repeat=len(logits)):
        log_p = -nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(y).to(logits), reduction="sum")
        yield log_p.detach().exp(), log_p


def of_numbers(logits):
    for signs in product([-1.0, 1.0], repeat=len(logits)):  # draws with the mean and variance of the Gaussian
        y = logits.detach() + torch.tensor(signs).to(logits)
        yield 0.5 ** len(logits), -(y - logits).square().sum() / 2
