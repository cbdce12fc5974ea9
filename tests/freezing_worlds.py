"""A small network and its training, for the tests of freeze training: the same numbers in every run."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    """Three convolutions with norms, and a head: what a hand-written loop can cut in two at any place."""

    def __init__(self):
        super().__init__()
        for number, inputs in enumerate((2, 4, 4), start=1):
            self.add_module(f"conv{number}", nn.Conv2d(inputs, 4, 3, padding=1))
            self.add_module(f"bn{number}", nn.BatchNorm2d(4))
        self.out = nn.Linear(4, 3)

    def forward(self, images, detached=0):
        for number in (1, 2, 3):
            images = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(images)).relu()
            if number == detached:
                images = images.detach()
        return self.out(images.mean(dim=(2, 3)))


def data(steps=12, size=8):
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 2, 6, 6, generator=draw), torch.randint(0, 3, (size,), generator=draw)) for _ in range(steps)
    ]


def update(model, optimizer, images, labels, **options):
    optimizer.zero_grad()
    cross_entropy(model(images, **options), labels).backward()
    optimizer.step()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, **options)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train(model, optimizer, freezing, batches, train_mode=True):
    for images, labels in batches:
        if train_mode:
            model.train()  # as at the start of each epoch
        update(model, optimizer, images, labels)
        freezing.step()
