"""The CKA sparsity loss: what it takes beside the training steps of a ResNet-20, and beside the paper's double loop.

`python bench/sparsity.py --device cuda` prints the figures of a GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from clock import ratio
from nets import batches
from torch import Tensor
from torch.nn.functional import cross_entropy

import netkin as nk
from netkin.measures.kernels import batch_gram, gram_cosines
from netkin.sources.architectures import seeded, thin

STEPS = 5  # that are timed together


class Training:
    """A ResNet-20 that takes steps of 128 images, with the loss or without."""

    def __init__(self, device: str):
        self.device, self.model = device, seeded(lambda: thin(20), 0).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        labels = torch.arange(128, device=device) % 10
        self.batches = [(images.to(device), labels) for images in batches(STEPS)]

    def steps(self, penalty: nk.CKASparsityLoss | None = None) -> None:
        """Take some steps; a loss has its hooks on the model."""
        for images, labels in self.batches:
            loss = cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            (loss if penalty is None else loss + penalty.term()).backward()
            self.optimizer.step()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def beside_plain(self, **options: Any) -> dict[str, Any]:
        """Return steps with the loss, against the same steps without."""

        def penalised() -> None:
            with nk.CKASparsityLoss(self.model, beta=1e-4, **options) as penalty:
                self.steps(penalty)

        penalised()
        return ratio(penalised, self.steps, repeats=5)


def sparsity_loss(device: str = "cpu") -> dict[str, Any]:
    """Return steps with the loss of 8 samples at every fifth batch, against steps without."""
    return Training(device).beside_plain(samples=8, every=5)


def sparsity_loss_whole(device: str = "cpu") -> dict[str, Any]:
    """Return steps with the loss of all examples at every batch, against steps without."""
    return Training(device).beside_plain(samples=None, every=1)


def sparsity_listing(device: str = "cpu", samples: int = 128) -> dict[str, Any]:
    """Return the paper's double loop over nine blocks and its gradients, against one product of their Gram matrices."""
    model, images = seeded(lambda: thin(20), 0).to(device), batches(1, samples)[0].to(device)
    blocks = [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)]
    with nk.recording(model, blocks) as recorded, torch.no_grad():
        model(images)
    outputs = [recorded[name].clone().requires_grad_() for name in blocks]
    values = [float(way(outputs).detach()) for way in (listing, product)]

    def run(way: Any) -> None:
        way(outputs).backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return ratio(lambda: run(listing), lambda: run(product)) | {"error": abs(values[0] - values[1])}


def product(outputs: list[Tensor]) -> Tensor:
    """Return the augmented loss as netkin takes it."""
    table = gram_cosines(torch.stack([batch_gram(one.flatten(1)) for one in outputs]))
    return (table.sum() - table.diagonal().sum()) / (len(outputs) * (len(outputs) - 1))


# --- the listing of section 4.1, but for the device -------------------------------------------------------------------


def listing(blocklist: list[Tensor]) -> Tensor:
    """Return the augmented loss as printed."""
    loss = torch.zeros(1, device=blocklist[0].device)
    for i in range(len(blocklist) - 1):
        for j in range(i + 1, len(blocklist)):
            loss += _linear_cka(blocklist[i].flatten(1).float(), blocklist[j].flatten(1).float())
    return 2 * loss / len(blocklist) / (len(blocklist) - 1)


def _linear_cka(X: Tensor, Y: Tensor) -> Tensor:
    return _linear_hsic(X, Y) / (torch.sqrt(_linear_hsic(X, X)) * torch.sqrt(_linear_hsic(Y, Y)))


def _linear_hsic(X: Tensor, Y: Tensor) -> Tensor:
    return torch.sum(_centering(torch.mm(X, X.T)) * _centering(torch.mm(Y, Y.T)))


def _centering(K: Tensor) -> Tensor:
    n = K.size(0)
    H = torch.eye(n, device=K.device) - torch.ones([n, n], device=K.device) / n
    return torch.mm(torch.mm(H, K), H)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device
    for task in (sparsity_loss, sparsity_loss_whole, sparsity_listing):
        print(task.__name__, {name: float(f"{value:.3g}") for name, value in task(device).items()}, flush=True)
    print("sparsity_listing of 8 images", sparsity_listing(device, 8))
