"""Small networks to stitch, and worlds in which one is the other with its hidden units turned."""

import copy

import torch
from torch import nn


class Rows(nn.Module):
    """Linear layers; nothing stands between `mid` and `after`."""

    def __init__(self, width=6):
        super().__init__()
        self.front, self.mid, self.after = nn.Linear(5, 8), nn.Linear(8, width), nn.Linear(width, 7)
        self.out = nn.Linear(7, 4)

    def forward(self, x):
        return self.out(self.after(self.mid(self.front(x).relu())).relu())


class Maps(nn.Module):
    """Convolutions; nothing stands between `mid` and `after`."""

    def __init__(self, width=6, stride=1):
        super().__init__()
        self.front, self.mid = nn.Conv2d(3, 8, 3), nn.Conv2d(8, width, 3, stride=stride)
        self.after, self.out = nn.Conv2d(width, 7, 1), nn.Linear(7, 4)

    def forward(self, x):
        return self.out(self.after(self.mid(self.front(x).relu())).relu().mean((2, 3)))


class Tokens(nn.Module):
    """One linear layer for every token."""

    def __init__(self, width=6):
        super().__init__()
        self.front, self.mid, self.after = nn.Linear(5, 8), nn.Linear(8, width), nn.Linear(width, 7)
        self.out = nn.Linear(7, 4)

    def forward(self, x):
        return self.out(self.after(self.mid(self.front(x).relu())).relu().mean(1))


class Lines(nn.Sequential):
    """Convolutions of one dimension."""

    def __init__(self, width):
        super().__init__()
        for name, part in {
            "conv": nn.Conv1d(3, width, 3), "norm": nn.BatchNorm1d(width), "relu": nn.ReLU(), "pool": nn.AvgPool1d(2),
            "flat": nn.Flatten(), "out": nn.Linear(4 * width, 4),
        }.items():  # fmt: skip
            self.add_module(name, part)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(x + self.conv(x))


class Residual(nn.Module):
    """Two residual blocks."""

    def __init__(self, width=6):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, width, 3), nn.Sequential(Block(width), Block(width))
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        return self.out(self.blocks(self.stem(x)).mean((2, 3)))


class Shares(nn.Module):
    """One ReLU for two places."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.out, self.relu = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 4), nn.ReLU()

    def forward(self, x):
        return self.out(self.relu(self.two(self.relu(self.one(x)))))


class Spoken(nn.Module):
    """Takes keywords and gives a mapping, as language models do."""

    def __init__(self, width=6):
        super().__init__()
        self.embed, self.mid, self.out = nn.Embedding(20, 8), nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, input_ids, attention_mask):
        states = self.mid(self.embed(input_ids).relu())
        weights = attention_mask.unsqueeze(-1).to(states)
        return {"hidden": states, "logits": self.out((states.relu() * weights).sum(1) / weights.sum(1))}


SHAPES = {"rows": (Rows, (5,)), "maps": (Maps, (3, 12, 12)), "tokens": (Tokens, (9, 5))}


def drawn(*shape, dtype=torch.float64, seed=0):
    """Return normal numbers drawn from `seed`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def built(kind, *arguments, seed=0, dtype=torch.float64, **options):
    """Return a network in evaluation mode, its weights drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(*arguments, **options).to(dtype).eval()


def labelled(model, *shape, batches=3, n=40, seed=5):
    """Return batches of random inputs, labelled with the model's own answers."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(n, *shape, generator=generator, dtype=torch.float64) for _ in range(batches)]
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        return [(x, model(x.to(dtype)).argmax(1)) for x in inputs]


@torch.no_grad()
def turned(model, matrix, back=None):
    """Return a copy whose units at `mid` are ``h @ matrix``; `back`, if given, undoes that in `after`."""
    other = copy.deepcopy(model)
    other.mid.weight.copy_(torch.tensordot(matrix.T, model.mid.weight, 1))
    other.mid.bias.copy_(model.mid.bias @ matrix)
    if back is not None:
        weight = model.after.weight
        other.after.weight.copy_(torch.einsum("ko...,po->kp...", weight, back))
    return other
