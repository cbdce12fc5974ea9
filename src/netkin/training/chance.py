"""Chance: which accuracies are no better than that of always giving the most frequent class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from netkin.results.caveats import Caveat

LEVEL = 0.05  # an accuracy that guessing reaches with this probability or more is not clearly better than guessing
NAMED = 5


def chance_of(labels: Tensor) -> float:
    """Return the accuracy of always giving the most frequent class. Labels below 0 do not count.

    Example:
        >>> chance_of(torch.tensor([0, 0, 0, 1, -1]))
        0.75
    """
    counts = torch.bincount(labels[labels >= 0].long())  # which flattens labels of tokens
    return float(counts.max() / counts.sum()) if len(counts) else 1.0


def chance_caveat(
    accuracies: Mapping[str, float], labels: Mapping[str, Tensor], *, units: str, method: str
) -> Caveat | None:
    """Return a caveat that names the tasks or clients whose accuracy is not clearly above chance; None without such.

    An accuracy is clearly above chance if as many right answers or more, each right with the probability of chance,
    have a probability below 0.05.

    Args:
        accuracies: accuracy on the test examples of each task or client.
        labels: labels of these test examples.
        units: what the accuracies are of, as "tasks".
        method: by what they were reached.
    """
    from scipy.stats import binom  # imported where it is needed: it takes a while

    chances = {name: chance_of(labels[name]) for name in accuracies}
    counts = {name: int((labels[name] >= 0).sum()) for name in accuracies}
    unclear = [
        name
        for name, accuracy in accuracies.items()
        if binom.sf(np.rint(accuracy * counts[name]) - 1, counts[name], chances[name]) >= LEVEL
    ]
    if not unclear:
        return None
    reached, chance = (float(np.mean([values[name] for name in unclear])) for values in (accuracies, chances))
    names = ", ".join(unclear[:NAMED]) + ", …" * (len(unclear) > NAMED)
    where = f"{len(unclear)} of {len(accuracies)} {units} ({names})" if len(accuracies) > 1 else names
    sentence = (
        f"{method!r} is not clearly better than chance on {where}: the mean accuracy there is {reached:.3f}, and "
        f"always giving the most frequent class reaches {chance:.3f}. Longer training, smaller batches or another "
        "learning rate may help."
    )
    return Caveat("at-chance", sentence, len(unclear))
