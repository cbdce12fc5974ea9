"""Recordings in files as others write them, of a small language model with residual blocks."""

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn


class Mixer(nn.Module):
    """A residual block in which every token sees those before it."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.value = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.scale = 1.0

    def forward(self, hidden, mask):
        values = self.value(self.norm(hidden)) * mask[..., None].to(hidden.dtype)
        counts = mask.cumsum(1).clamp(min=1)[..., None].to(hidden.dtype)
        hidden = hidden + self.scale * values.cumsum(1) / counts
        return hidden + self.down(self.act(self.up(hidden)))


class Language(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, width=16, vocabulary=40, blocks=4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Mixer(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))


def language(seed=0):
    torch.manual_seed(seed)
    model = Language()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2) if weight.ndim > 1 else weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def token_batches(batches=3, size=8, length=11, padded="right", seed=3):
    drawn, found = torch.Generator().manual_seed(seed), []
    for _ in range(batches):
        ids = torch.randint(0, 40, (size, length), generator=drawn)
        mask = torch.ones_like(ids)
        for place in range(size):
            short = 0 if padded is None else place % 6
            if padded == "left":
                mask[place, :short] = 0
            elif short:
                mask[place, length - short :] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def boundaries(model, batch):
    """Return the residual stream before the first block and after each, by hooks of torch alone."""
    states = []
    handles = [model.blocks[0].register_forward_pre_hook(lambda module, args: states.append(args[0].clone()))]
    handles += [
        block.register_forward_hook(lambda module, args, output: states.append(output)) for block in model.blocks
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return states


def as_vllm(model, batches, folder, columns=None, order=None):
    """Write a file for each sequence, as vLLM does, with a lock beside it."""
    folder.mkdir()
    number = 0
    for batch in batches:
        states = boundaries(model, batch)
        for place in range(len(batch["input_ids"])):
            valid = batch["attention_mask"][place].bool()
            chosen = [state[place][valid] for state in states]
            chosen = chosen if columns is None else [chosen[column] for column in columns]
            name = folder / f"cmpl-{number if order is None else order[number]}.safetensors"
            tensors = {"hidden_states": torch.stack(chosen, 1), "token_ids": batch["input_ids"][place][valid].clone()}
            save_file(tensors, name)
            name.with_name(name.name + ".lock").touch()
            number += 1
    return folder


def matrices(examples=90, seed=0):
    drawn = np.random.default_rng(seed)
    rows = drawn.normal(size=(examples, 6)).astype(np.float32)
    return rows, (rows @ drawn.normal(size=(6, 5)) + 0.5 * drawn.normal(size=(examples, 5))).astype(np.float32)
