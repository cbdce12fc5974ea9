"""Networks over sequences: a character LSTM for text, and a small vision transformer for 3 × 32 × 32 images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netkin.errors import ForwardError


class CharLSTM(nn.Module):
    """Characters, their embedding, LSTM layers `lstm1`, `lstm2`, ..., and scores for the next character."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.vocabulary, self.depth = vocabulary, depth
        self.embedding = nn.Embedding(vocabulary, width)
        for number in range(1, depth + 1):
            self.add_module(f"lstm{number}", nn.LSTM(width, width, batch_first=True))
        self.out = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Return scores for the next character at every place of sequences of whole numbers."""
        if not torch.compiler.is_compiling():
            self._refuse_unknown(int(characters.max()))
        states = self.embedding(characters)
        for number in range(1, self.depth + 1):
            states, _ = self.get_submodule(f"lstm{number}")(states)
        return self.out(states)

    def _refuse_unknown(self, largest: int) -> None:
        if largest >= self.vocabulary:
            raise ForwardError(
                f"the text has a character number {largest} and this network knows {self.vocabulary} characters; "
                f"build it with `netkin:char_lstm,vocabulary={largest + 1}` or more."
            )


class Embed(nn.Module):
    """Patches of an image as tokens after a class token, with their places added."""

    def __init__(self, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Return n × tokens × width."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(images.shape[0], -1, -1), patches], dim=1) + self.places


class Attention(nn.Module):
    """Every token looks at every token, in several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return as many tokens of the same width."""
        # n × t × 3·heads·d becomes three of n × heads × t × d
        parts = self.qkv(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(*parts.unbind(0)).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two linear layers, each after a norm and with a path around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens after both steps."""
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class VisionTransformer(nn.Module):
    """`embed`, then `blocks`, a `norm`, and a `head` that reads the class token, which is the first."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed = Embed(size, patch, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each image."""
        return self.head(self.norm(self.blocks(self.embed(images)))[:, 0])


def char_lstm(vocabulary: int = 65, width: int = 128, depth: int = 2) -> CharLSTM:
    """Return a fresh character LSTM: embedding, LSTM layers, scores; 65 characters unless `vocabulary` says other."""
    return CharLSTM(vocabulary, width, depth)


def vit(classes: int = 10, depth: int = 6) -> VisionTransformer:
    """Return a fresh small vision transformer for 3 × 32 × 32 images: patches of 4, width 192, 6 blocks of 3 heads."""
    return VisionTransformer(32, 4, 192, depth, 3, classes)
