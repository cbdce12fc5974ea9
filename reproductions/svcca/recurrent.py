"""The lower layers of a stacked LSTM settle before the upper ones.

Claim: svcca/recurrent.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import netkin as nk
from netkin.sources.architectures import CharLSTM, seeded
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab
from reproductions.svcca.bottom_up import order

MARK = 0.9
PARTS = (0.0, 0.01, 0.02, *(place / 20 for place in range(1, 21)))  # of the training time, where states are kept


@dataclass(frozen=True)
class Setting:
    """The size of the network and of its training."""

    width: int
    depth: int
    window: int
    batch: int
    steps: int
    rate: float
    seeds: int
    pieces: int  # of held-out text that states are compared on


SETTINGS = {
    "cpu": Setting(width=64, depth=3, window=32, batch=32, steps=1500, rate=4e-3, seeds=3, pieces=200),
    "gpu": Setting(width=256, depth=3, window=64, batch=64, steps=6000, rate=2e-3, seeds=5, pieces=1000),
}


@claim(
    "svcca/recurrent",
    figure="App. 6",
    sentence="Learning dynamics of the different layers of a stacked LSTM trained on the Penn Tree Bank language "
    "modeling task. We observe a similar pattern to that of convolutional architectures trained on image data: lower "
    "layer converge faster than upper layers.",
    expected={f"τ of depth and the step of reaching {MARK}": "above 0"},
    criterion="Holds if Kendall's τ between a layer's depth and the step from which on its SVCCA with its own final "
    f"state stays at {MARK} or above is above 0 by more than two standard errors over the seeds, and every layer's "
    "mean SVCCA over the run is above that of the layer above it; in part if one of the two.",
)
def recurrent(lab: Lab) -> Finding:
    """Hidden states at all times as rows, on text that was not trained on."""
    setting = SETTINGS[lab.scale]
    lab.text()  # refused before any training
    found = lab.over(followed, lab.seeds(setting.seeds))
    runs = [series for series, _ in found]
    means = [series.mean_over_time() for series in runs]
    layers = runs[0].layers
    leads = {
        f"{low} ahead of {high}": Measured.over(mean[low] - mean[high] for mean in means)
        for low, high in pairwise(layers)
    }
    tau = Measured.over(order(one, MARK, layers) for one in runs)
    measured = {f"τ of depth and the step of reaching {MARK}": tau} | leads
    measured["τ of depth and the mean over time"] = Measured.over(order(one, None, layers) for one in runs)
    measured |= {
        f"{layer}: mean similarity over time": Measured.over(mean[layer] for mean in means) for layer in layers
    }
    measured["loss on held-out text"] = Measured.over([loss for _, loss in found], "nats a character")
    own = np.mean([series.own() for series in runs], axis=0)
    return Finding(
        verdict(tau.value > 2 * (tau.error or 0), all(lead.value > 0 for lead in leads.values())),
        measured,
        note=f"A character LSTM of {setting.depth} layers of {setting.width} units on tiny Shakespeare, in place of "
        "the paper's word model on Penn Treebank, which we do not have.",
        curves={
            "Each LSTM layer and its final state": {"step": list(runs[0].steps)}
            | {layer: own[:, i].tolist() for i, layer in enumerate(layers)}
        },
        seeds=tuple(lab.seeds(setting.seeds)),
    )


def followed(lab: Lab, seed: int) -> tuple[nk.Series, float]:
    """Return a run's LSTM layers against their final states, and its loss on held-out text."""
    setting = SETTINGS[lab.scale]
    inputs, labels = (part.to(lab.device) for part in _pieces(lab, setting))
    held_out = slice(len(inputs) - setting.pieces, None)
    model = seeded(lambda: CharLSTM(int(inputs.max()) + 1, setting.width, setting.depth), seed).to(lab.device)
    states = trained(model, inputs[: held_out.start], labels[: held_out.start], setting, seed)
    with torch.no_grad():
        loss = _loss(model, inputs[held_out], labels[held_out]).item()
    probe = list(inputs[held_out].split(100))
    series = nk.dynamics(states, probe, model=model, layers=nn.LSTM, shape="tokens", name=f"LSTM, seed {seed}")
    return series, loss


def trained(model: nn.Module, inputs: Tensor, labels: Tensor, setting: Setting, seed: int) -> dict[int, Any]:
    """Train `model` on pieces of text drawn at random, and return its states on the way."""
    optimizer = torch.optim.Adam(model.parameters(), setting.rate)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)
    generator = torch.Generator().manual_seed(seed)
    wanted, kept = {round(part * setting.steps) for part in PARTS}, {0: _copied(model)}
    model.train()
    for step in tqdm(range(1, setting.steps + 1), desc="training", unit=" steps", delay=2, leave=False):
        rows = torch.randint(len(inputs), (setting.batch,), generator=generator).to(inputs.device)
        optimizer.zero_grad(set_to_none=True)
        _loss(model, inputs[rows], labels[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        if step in wanted:
            kept[step] = _copied(model)
    model.eval()
    return kept


def _pieces(lab: Lab, setting: Setting) -> list[Tensor]:
    batches = list(nk.load_data(f"text,window={setting.window}:{lab.text()}", batch_size=4096))
    return [torch.cat(part) for part in zip(*batches, strict=True)]


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
