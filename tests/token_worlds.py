"""Small vision transformers whose tokens are dropped, and decisions that are known beforehand."""

import torch
from torch import nn

from netkin.sources.architectures import VisionTransformer

HF = ["ViTForImageClassification", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"]


def small_vit(dtype=torch.float32, depth=4):
    """Return a network of 16 patches, width 32 and 2 heads, with weights large enough that tokens differ."""
    torch.manual_seed(0)
    model = VisionTransformer(16, 4, 32, depth, 2, 5)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight *= 3
    return model.to(dtype).eval()


class MeanViT(VisionTransformer):
    """The same without a class token: the head reads the mean over the patches."""

    def __init__(self):
        super().__init__(16, 4, 32, 4, 2, 5)
        del self.embed.class_token

    def tokens(self, images):
        return self.embed.patches(images).flatten(2).transpose(1, 2) + self.embed.places[:, 1:]

    def forward(self, images):
        return self.head(self.norm(self.blocks(self.tokens(images))).mean(1))


def mean_vit(dtype=torch.float32):
    torch.manual_seed(0)
    return MeanViT().to(dtype).eval()


def hugging_face(name, dtype=torch.float32):
    """Return a small ViT or DeiT of Hugging Face with random weights."""
    import transformers

    config = {"ViT": transformers.ViTConfig, "DeiT": transformers.DeiTConfig}[name.partition("For")[0]]
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    model = getattr(transformers, name)(
        config(**sizes, image_size=16, patch_size=4, num_labels=5, initializer_range=0.3)
    )
    return model.to(dtype).eval()


def pictures(n=3, dtype=torch.float32):
    return torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


class Fixed(nn.Module):
    """A predictor that always keeps the same patches of those that a stage is given."""

    def __init__(self, favourites):
        super().__init__()
        self.favourites = list(favourites)

    def forward(self, tokens, kept):
        """Return scores that no noise can change."""
        odds = torch.full(kept.shape, -1e4, dtype=kept.dtype, device=kept.device)
        odds[:, self.favourites] = 1e4
        return torch.stack([torch.zeros_like(odds), odds], dim=-1)


def fix(sparse, *, training, stages):
    """Make a network keep the patches in `stages`, lists of numbers, one within the other."""
    before = list(range(16))
    for place, left in zip(sparse.at, stages, strict=True):
        among = left if training else [before.index(one) for one in left]
        sparse.encoder.predictors[str(place)] = Fixed(among)
        before = left
    return sparse.train(training)
