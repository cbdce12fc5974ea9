"""What becomes of the correlation of atoms with CCA where channels are kept apart.

Claim: subspaces/decorrelation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.subspaces import channel_correlation
from netkin.representations.filters import AtomConv2d
from netkin.training import accuracy
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab
from reproductions.recipes import length_of
from reproductions.subspaces import nets
from reproductions.subspaces.pairs import ATOM, CCA, correlation, covariances, probes, tables

STARTS = {"cpu": 3, "gpu": 5}
SHARES = (0.0, 1.0, 10.0)  # of the term in the loss of guesses, both before training
TRAINING: dict[str, dict[str, Any]] = {  # the term would make gradients large at first
    "cpu": {"steps": 100, "lr": 0.1, "clip": 1.0},
    "gpu": {"lr": 0.1, "clip": 1.0},
}
NEAR = 0.95
NUMBER = "correlation of atoms with CCA at the largest β"
GAIN = "its gain over β = 0"
APART = "root mean square correlation of channels at the largest β"
Term = Callable[[Tensor], Tensor]


def channel_size(maps: Tensor) -> Tensor:
    """Return ``(c - 1) Σ_i (ZᵀZ / rows)²_ii``, which the term of the claim would be if all channels were the same."""
    squares = maps.float().square().mean([0, 2, 3])
    return (maps.shape[1] - 1) * squares.square().sum()


class Penalised(nn.Module):
    """A chain of layers that returns its scores and, in one more column, a term of its convolutions' outputs."""

    beta: Tensor

    def __init__(self, model: nn.Module, term: Term):
        super().__init__()
        self.model, self.term = model, term
        self.register_buffer("beta", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each image, and β times the sum of the terms."""
        features, terms = images, list[Tensor]()
        for name, step in self.model.named_children():
            features = step(features.flatten(1) if name in self.model.flattened else features)  # type: ignore[operator]
            if isinstance(step, AtomConv2d):
                terms.append(self.term(features))
        total = self.beta * torch.stack(terms).sum()
        return torch.cat([features.float(), total.expand(len(features), 1)], 1)


def with_term(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of the scores, and the term that came with them."""
    return nn.functional.cross_entropy(outputs[:, :-1], labels) + outputs[:, -1].mean()


@dataclass(frozen=True)
class Family:
    """What is found of networks of ten tasks from one start: a correlation, their channels' and their accuracy."""

    correlation: float
    channels: float
    accuracy: float


@claim(
    "subspaces/decorrelation",
    figure="Fig. 8b",
    sentence="the correlation between CCA and filter subspace similarity keeps increasing as β increases. The "
    "correlation reaches 0.985 when β = 3 × 10⁻³, indicating a near-linear relationship",
    expected={NUMBER: 0.985, GAIN: "above 0", APART: "lower"},
    control="(c − 1) β Σ_i (ZᵀZ/rows)²_ii in the place of the term: maps shrink, and their channels may stay alike",
    criterion="AlexNets from one start with nine atoms, trained by atoms and heads on ten tasks of ten classes of "
    "CIFAR-100, with β Σ_{i≠j} (ZᵀZ/rows)²_ij of all convolutions in the loss. β is such that the term begins at "
    f"{SHARES[1]:g} and {SHARES[2]:g} times the loss of guesses, ln 10. Correlations are over 45 pairs, similarities "
    "means over layers. Two parts: at the largest β the correlation is above that at β = 0, and above the control's at "
    f"as large a β; and there it is above {NEAR}. By the 95% interval of Student's t over starts.",
    measures=[ATOM, CCA],
    training=lambda scale, _: length_of("alexnet-atoms", scale, **TRAINING[scale]),
)
def decorrelation(lab: Lab) -> Finding:
    """Correlations of two similarities over pairs of networks, by the factor of the term."""
    starts = lab.seeds(STARTS[lab.scale])
    *by_share, control = zip(*(families(lab, start) for start in starts), strict=True)
    ours = dict(zip(SHARES, by_share, strict=True))
    plain, most = ([one.correlation for one in ours[share]] for share in (0.0, SHARES[-1]))
    shrunk = [one.correlation for one in control]
    measured = {NUMBER: Measured.over(most), GAIN: gains(most, plain)}
    controls = {NUMBER: Measured.over(shrunk), GAIN: gains(shrunk, plain)}
    for share, found in ours.items():
        measured[f"correlation at β of {share:g}"] = Measured.over(one.correlation for one in found)
        measured[f"correlation of channels at β of {share:g}"] = Measured.over(one.channels for one in found)
    measured[APART] = Measured.over(one.channels for one in ours[SHARES[-1]])
    controls[APART] = Measured.over(one.channels for one in control)
    risen = all_of(measured[GAIN].above(0), gains(most, shrunk).above(0))
    return Finding(
        verdict(risen, measured[NUMBER].above(NEAR)), measured, controls, _note(lab, ours, control), _curves(ours),  # type: ignore[arg-type]
        starts,
    )  # fmt: skip


def families(lab: Lab, start: int) -> list[Family]:
    """Return what is found of networks from one start, with each share of the term and in the control."""
    begin = nets.start(lab, "alexnet", start)
    ours = [family(lab, Penalised(copy.deepcopy(begin), channel_correlation), share) for share in SHARES]
    return [*ours, family(lab, Penalised(copy.deepcopy(begin), channel_size), SHARES[-1])]


def family(lab: Lab, begin: Penalised, share: float) -> Family:
    """Train networks of ten tasks with a term in the loss, and compare them."""
    tasks = nets.tasks(lab)
    begin.beta.fill_(factor(begin, probes(lab), share))
    sets, own = [task.train for task in tasks], TRAINING[lab.scale]
    wrapped = nets.train_all(lab, "alexnet", nets.copies(lab.placed(begin), len(sets)), sets, loss=with_term, **own)
    models = [one.get_submodule("model") for one in wrapped]
    found = tables(models, probes(lab))
    scores = [accuracy(model, task.test, precision="auto") for model, task in zip(models, tasks, strict=True)]
    some = range(len(models))
    return Family(correlation([found], ATOM, CCA, some), channel_correlations(models, probes(lab)), mean(scores))


@torch.no_grad()
def factor(begin: Penalised, images: Tensor, share: float) -> float:
    """Return the β with which the term of a network before training is that share of ln 10."""
    begin.beta.fill_(1.0)
    return share * math.log(10) / float(begin(images)[0, -1])


def channel_correlations(models: list[nn.Module], images: Tensor) -> float:
    """Return the root mean square correlation of two channels, in the mean over layers and networks."""
    found = []
    for C in covariances(models, images).values():
        for place in range(len(models)):
            own = C[place, :, place]
            alive = own.diagonal() > 0
            own = own[alive][:, alive]
            scaled = own / own.diagonal().sqrt().outer(own.diagonal().sqrt())
            off = ~torch.eye(len(own), dtype=torch.bool, device=own.device)
            found.append(float(scaled[off].square().mean().sqrt()))
    return mean(found)


def _note(lab: Lab, ours: dict[float, Sequence[Family]], control: Sequence[Family]) -> str:
    scores = {f"β of {share:g}": found for share, found in ours.items()} | {"the control": control}
    recipe = nets.recipe(lab, "alexnet").but(**TRAINING[lab.scale])
    told = ", ".join(f"{mean(one.accuracy for one in found):.3f} with {words}" for words, found in scores.items())
    return (
        f"{len(probes(lab)):,} probing images of CIFAR-100. {recipe.words}. Mean test accuracy of ten classes: {told}. "
        "The paper's β is of sums over rows, whose number it leaves open."
    )


def _curves(ours: dict[float, Sequence[Family]]) -> dict[str, dict[str, list[Any]]]:
    points = {
        name: [[getattr(one, name) for one in found] for found in ours.values()] for name in ("correlation", "channels")
    }
    lines = line("atoms with CCA", points["correlation"]) | line("channels with one another", points["channels"])
    return {"Correlation by β": {"β, the term's share of the loss at first": list(ours)} | lines}
