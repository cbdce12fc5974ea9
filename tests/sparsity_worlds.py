"""What tests of sparsity share: the CKA loss as the paper printed it, a network with stages, and one for masks."""

import torch
from torch import nn

import netkin as nk
from netkin.applications.sparsity.masks import mask_of, masked_layers, weight_behind

# --- the listing of section 4.1, on the CPU ---------------------------------------------------------------------------


def centering(K):
    n = K.size(0)
    unit = torch.ones([n, n], dtype=K.dtype)
    identity = torch.eye(n, dtype=K.dtype)
    H = identity - unit / n
    return torch.mm(torch.mm(H, K), H)


def linear_hsic(X, Y):
    return torch.sum(centering(torch.mm(X, X.T)) * centering(torch.mm(Y, Y.T)))


def linear_cka(X, Y):
    return linear_hsic(X, Y) / (torch.sqrt(linear_hsic(X, X)) * torch.sqrt(linear_hsic(Y, Y)))


def listing(blocks):
    """Return the loss of AugCKA-SR as printed, without β; `blocks` are stages of outputs."""
    blocklist = [block for stage in blocks for block in stage]
    loss = torch.zeros(1)
    for i in range(len(blocklist) - 1):
        for j in range(i + 1, len(blocklist)):
            loss = loss + linear_cka(blocklist[i].flatten(1).float(), blocklist[j].flatten(1).float())
    return 2 * loss / len(blocklist) / (len(blocklist) - 1)


def double_sum(blocks):
    """Return the double sum of eq. 11 with the listing's CKA, without β; every ordered pair of a stage counts."""
    return sum(linear_cka(one.flatten(1), other.flatten(1)) for stage in blocks for one in stage for other in stage)


# --- a network --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)

    def forward(self, x):
        return torch.relu_(self.norm(self.conv(x)))


class Staged(nn.Module):
    """A stem, two stages of blocks and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Block(4, 4), Block(4, 4), Block(4, 4))
        self.pool = nn.AvgPool2d(2)
        self.layer2 = nn.Sequential(Block(4, 6), Block(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer2(self.pool(self.layer1(self.stem(x)))).mean((2, 3)))


def staged(seed=0):
    torch.manual_seed(seed)
    return Staged()


def outputs(model, x, stages=("layer1", "layer2")):
    """Return what each block gives, by stage; the model runs by hand, without hooks."""
    found, x = [], model.stem(x)
    for name in stages:
        found.append([])
        x = model.pool(x) if name == "layer2" else x
        for block in getattr(model, name):
            x = block(x)
            found[-1].append(x)
    return found


def batches(count, size=8, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 2, 6, 6, generator=draw), torch.randint(0, 3, (size,), generator=draw)) for _ in range(count)
    ]


# --- the loss ---------------------------------------------------------------------------------------------------------

ALL = {"samples": None, "every": 1}


def term_of(model, x, **options):
    """Return the term of one forward pass."""
    with nk.CKASparsityLoss(model, **{"beta": 1.0, **ALL, **options}) as penalty:
        model(x)
        return penalty.term()


def hooks_on(model):
    return [one for module in model.modules() for one in (*module._forward_hooks, *module._forward_pre_hooks)]


# --- masks ------------------------------------------------------------------------------------------------------------


def net(seed=0, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(6, 3),
        ).to(dtype)  # fmt: skip


def labelled(n=48, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 6, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)


def zeros_hold(model):
    """Whether each masked weight, and the number behind it, is exactly zero."""
    found = [(layer.weight, mask_of(layer).mask, weight_behind(layer)) for layer in masked_layers(model).values()]
    assert found
    return all(bool((w[~mask] == 0).all()) and bool((behind[~mask] == 0).all()) for w, mask, behind in found)
