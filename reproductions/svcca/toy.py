"""The toy regression. Four hidden layers of 200 units learn four functions of one number.

Claims: svcca/toy-directions and svcca/toy-projection.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import netkin as nk
from netkin.sources.architectures import seeded
from netkin.training import Recipe, train
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab
from reproductions.recipes import length_words

WIDTH, POINTS, PENULTIMATE = 200, 513, "7"
RECIPE = Recipe(steps=1000, batch=POINTS, lr=1e-3, optimizer="adam", schedule="cosine", order="given")
PAIRS, SHOWN = 5, 5  # pairs of networks, and how many neurons or directions of each are looked at
NEURONS, SVD, SVCCA = "neurons of highest activation", "SVD directions", "SVCCA directions"
ALIKE = f"mean correlation of the first {SHOWN} {SVCCA}"
FEW = (2, 6, 15, 30)
INPUTS = torch.linspace(-1, 1, POINTS).unsqueeze(1)
SEEN, NEW = INPUTS[::2], INPUTS[1::2]  # what networks and directions learn from, and what they are tried on


@claim(
    "svcca/toy-directions",
    figure="Fig. 1",
    sentence="although looking at just neurons (b) seems to indicate that the networks learn very different "
    "representations, looking at the SVCCA subspace (d) shows that the information in the representations are (up to a "
    "sign) nearly identical.",
    expected={
        ALIKE: "almost visually identical",
        f"mean correlation of the first {SHOWN} {NEURONS}": "very different",
    },
    control="the same networks before training",
    criterion="Holds if the first five SVCCA directions of two networks, on points that they were not found on, "
    "correlate by more than 0.99, the five neurons of highest activation by less than 0.9, and the SVCCA directions by "
    "more than those of the same networks before training, pair by pair; each by the 95% interval of Student's t over "
    "the pairs.",
    measures=["svcca"],
    scales=("cpu",),
    training=lambda *_: length_words(RECIPE),
)
def toy_directions(lab: Lab) -> Finding:
    """The i-th of one network against the i-th of the other: neurons, principal directions, SVCCA directions."""
    found = {SVCCA: _aligned, NEURONS: _neurons, SVD: _principal}
    signals = {name: [pick(_net(2 * i), _net(2 * i + 1)) for i in range(PAIRS)] for name, pick in found.items()}
    alike = {name: [_correlation(*pair) for pair in pairs] for name, pairs in signals.items()}
    before = {
        name: [_correlation(*pick(_fresh(2 * i), _fresh(2 * i + 1))) for i in range(PAIRS)]
        for name, pick in found.items()
    }
    measured, controls = (
        {f"mean correlation of the first {SHOWN} {name}": Measured.over(values) for name, values in one.items()}
        for one in (alike, before)
    )
    visible = Measured.over(alike[NEURONS]).below(0.9)
    return Finding(
        verdict(all_of(measured[ALIKE].above(0.99), visible, gains(alike[SVCCA], before[SVCCA]).above(0))),
        measured
        | {"relative error of the networks on new points": Measured.over(_misfit(_net(i)) for i in range(2 * PAIRS))},
        controls,
        note="Hidden layers of 200 ReLUs, trained on 257 points; correlations, up to a sign, on the 256 in between.",
        curves={
            f"The first of the {name}": {
                "input": NEW[::8, 0].tolist(),
                "network 1": _standard(pairs[0][0][::8, 0]),
                "network 2": _standard(pairs[0][1][::8, 0]),
            }
            for name, pairs in signals.items()
        },
        seeds=tuple(range(2 * PAIRS)),
    )


@claim(
    "svcca/toy-projection",
    figure="Fig. 3",
    sentence="By 30, the output looks very similar to the full 200 neuron output.",
    expected={f"error of the output on 30 of {WIDTH} directions": "looks very similar"},
    control="as many random neurons, from which the others are predicted",
    criterion="Holds if the output on 30 SVCCA directions differs from the full output by less than 5% of its standard "
    "deviation, and by less than the output on 30 random neurons from which the others are predicted, which is the "
    "same projection on other directions; each by the 95% interval of Student's t over the pairs of networks.",
    measures=["svcca_by_sum"],
    scales=("cpu",),
    training=lambda *_: length_words(RECIPE),
)
def toy_projection(lab: Lab) -> Finding:
    """The error of each network's output when its penultimate layer is projected on few directions or neurons."""
    ours, control = ({k: _errors(k, neurons) for k in FEW} for neurons in (False, True))
    measured, controls = (
        {f"error of the output on {k} of {WIDTH} directions": Measured.over(values) for k, values in one.items()}
        for one in (dict(sorted(ours.items(), reverse=True)), control)
    )
    small = measured[f"error of the output on 30 of {WIDTH} directions"].below(0.05)
    return Finding(
        verdict(all_of(small, gains(control[30], ours[30]).above(0))),
        measured,
        controls,
        note="Root mean square over new points, in standard deviations of the full output, the mean of both networks "
        "of a pair. Directions by the rule of the paper's appendix, on Σσ, at 99.9%: the 99% of the variance that "
        "section 2 names keeps about 5 of these layers' 200 directions, fewer than the figure shows.",
        curves={
            "Error by the number of directions": {
                "directions": list(FEW),
                **line("SVCCA directions", ours.values()),
                **line("random neurons", control.values()),
            },
            "The first output on few directions": _outputs(0),
        },
        seeds=tuple(range(2 * PAIRS)),
    )


def _targets(inputs: Tensor) -> Tensor:
    """Return the four simple functions; the paper does not name its own."""
    return torch.cat([torch.sin(3 * torch.pi * inputs), inputs.square(), inputs.abs(), torch.tanh(5 * inputs)], 1)


def _built() -> nn.Sequential:
    hidden = [step for pair in pairwise([1] + 4 * [WIDTH]) for step in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 4))


def _fresh(seed: int) -> nn.Module:
    """Return a network before training."""
    return seeded(_built, seed).eval().requires_grad_(False)


@cache
def _net(seed: int) -> nn.Module:
    """Return a trained network."""
    model = seeded(_built, seed)
    train(model, (SEEN, _targets(SEEN)), RECIPE, seed=seed, loss=mse_loss, progress=False)
    return model.eval().requires_grad_(False)


def _misfit(model: nn.Module) -> float:
    return _relative(model(NEW), _targets(NEW))


def _rows(model: nn.Module, inputs: Tensor) -> Tensor:
    return nk.activations(model, [PENULTIMATE], inputs)[PENULTIMATE].double()


@cache
def _directions(first: int) -> nk.measures.Directions:
    rows = (_rows(_net(seed), SEEN) for seed in (first, first + 1))
    moments = nk.Moments.of(*rows)
    return nk.svcca_directions(moments, variance=0.999, by="sum")


def _neurons(*models: nn.Module) -> tuple[Tensor, ...]:
    rows = [_rows(model, NEW) for model in models]
    return tuple(X[:, X.square().mean(0).argsort(descending=True)[:SHOWN]] for X in rows)


def _principal(*models: nn.Module) -> tuple[Tensor, ...]:
    return tuple(_leading(_rows(model, SEEN), _rows(model, NEW)) for model in models)


def _leading(seen: Tensor, new: Tensor) -> Tensor:
    mean = seen.mean(0)
    return (new - mean) @ torch.linalg.svd(seen - mean, full_matrices=False)[2][:SHOWN].mT


def _aligned(*models: nn.Module) -> tuple[Tensor, ...]:
    found = nk.svcca_directions(nk.Moments.of(*(_rows(model, SEEN) for model in models)))
    sides, count = zip((found.x, found.y), models, strict=True), min(SHOWN, len(found.correlations))
    return tuple(side.directions(_rows(model, NEW))[:, :count] for side, model in sides)


def _correlation(X: Tensor, Y: Tensor) -> float:
    """Return the mean absolute correlation of columns of the same place."""
    pairs = [torch.corrcoef(torch.stack(pair))[0, 1].abs() for pair in zip(X.T, Y.T, strict=True)]
    return float(torch.stack(pairs).mean())


def _projected(first: int, side: int, k: int, neurons: bool = False) -> Tensor:
    model, found = _net(first + side), (_directions(first).x, _directions(first).y)[side]
    drawn = torch.Generator().manual_seed(first + side)
    kept = nk.random_neurons(found, k, rest="predicted", generator=drawn) if neurons else found
    with nk.project(model, PENULTIMATE, kept, None if neurons else k):
        return model(NEW)


def _errors(k: int, neurons: bool) -> list[float]:
    """Return the error of the output on k directions or neurons, the mean over both networks of each pair."""
    return [
        sum(_relative(_projected(2 * i, side, k, neurons), _net(2 * i + side)(NEW)) for side in (0, 1)) / 2
        for i in range(PAIRS)
    ]


def _relative(outputs: Tensor, expected: Tensor) -> float:
    """Return the error of the outputs in standard deviations of what is expected, over all four."""
    return float(((outputs - expected).square().mean() / expected.var(0).mean()).sqrt())


def _outputs(column: int) -> dict[str, list[float]]:
    thin = slice(None, None, 8)
    few = {f"{k} directions": _projected(0, 0, k)[thin, column].tolist() for k in FEW}
    return {"input": NEW[thin, 0].tolist(), "all": _net(0)(NEW)[thin, column].tolist()} | few


def _standard(signal: Tensor) -> list[float]:
    """Return a signal without mean, size and sign, for the picture."""
    sign = signal[signal.abs().argmax()].sign()
    return ((signal - signal.mean()) / signal.std() * sign).tolist()
