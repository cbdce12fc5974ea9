"""Small models of token sequences, and ragged sequences with their masks."""

import torch
from torch import nn

LINEAR = ["cka", "cka_debiased", "angular_cka", "procrustes_distance", "nbs", "svcca(variance=0.9)", "cca_mean"]


class Blocks(nn.Module):
    """Tokens through a few blocks; `attention_mask` says which of them count."""

    def __init__(self, width=12, depth=3):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return hidden


def models(**options):
    torch.manual_seed(0)
    return Blocks(**options).eval(), Blocks(**options).eval()


def sequences(count=40, length=9, batch=8, ragged=True):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (count, length), generator=draw)
    lengths = torch.randint(3, length + 1, (count, 1), generator=draw) if ragged else length
    mask = (torch.arange(length) < lengths).long().expand(count, length)
    return [{"input_ids": i, "attention_mask": m} for i, m in zip(ids.split(batch), mask.split(batch), strict=True)]
