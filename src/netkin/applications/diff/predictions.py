"""Predictions: how far the distributions of two models' logits lie apart, and how well each predicts what came."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from netkin.errors import ShapeError
from netkin.representations.hooks import parts
from netkin.representations.inputs import attention_mask, inputs_of, labels_of
from netkin.results.diff import OutputDiff

IGNORED = -100  # a label that stands for none
CAUSAL = re.compile("CausalLM|LMHead")  # classes of transformers whose predictions are of the next token


def logits_of(output: Any) -> Tensor | None:
    """Return the logits in a model's output: those of that name, or the one tensor that it is; None without any."""
    logits = parts(output).get("logits", output)
    is_distribution = isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim in (2, 3)
    return logits if is_distribution and logits.shape[-1] > 1 else None


@dataclass
class Predictions:
    """Sums over all predictions of two models."""

    divergence: float = 0.0
    agreeing: int = 0
    count: int = 0
    losses: list[float] = field(default_factory=lambda: [0.0, 0.0])
    targets: int = 0

    def update(self, model: nn.Module, batch: Any, first: Tensor, second: Tensor) -> None:
        """Add the predictions for a batch, of models of the class of `model`."""
        if first.shape != second.shape:
            raise ShapeError(
                f"a gives logits of shape {tuple(first.shape)} and b of {tuple(second.shape)}: they have other lengths "
                "or other vocabularies, so that their predictions can't be compared; give both models the same "
                "inputs, and cut rows that only fill up the larger vocabulary.",
                argument="b",
            )
        logs = [logits.to(first.device).double().log_softmax(-1) for logits in (first, second)]
        valid = _valid(first, batch)
        # what a gives no probability adds nothing; numbers that are missing are infinitely far
        apart = (logs[0].exp() * (logs[0] - logs[1])).masked_fill(logs[0] == -math.inf, 0.0).sum(-1)
        self.divergence += float(apart[valid].nan_to_num(nan=math.inf).sum())
        is_known = ~(logs[0].isnan() | logs[1].isnan()).any(-1)
        self.agreeing += int((is_known & (logs[0].argmax(-1) == logs[1].argmax(-1)))[valid].sum())
        self.count += int(valid.sum())
        self._predict(model, batch, logs, valid)

    def _predict(self, model: nn.Module, batch: Any, logs: list[Tensor], valid: Tensor) -> None:
        targets = labels_of(batch)
        is_causal = CAUSAL.search(type(model).__name__) is not None
        if targets is None and is_causal:
            targets = parts(inputs_of(batch)).get("input_ids", inputs_of(batch))
        if targets is None:
            return
        targets = torch.as_tensor(targets).to(logs[0].device)
        if targets.is_floating_point() or targets.shape != logs[0].shape[:-1]:
            return
        if is_causal:
            logs, targets, valid = [log[:, :-1] for log in logs], targets[:, 1:], valid[:, 1:]
        known = valid & (targets != IGNORED)
        if not known.any() or int(targets[known].max()) >= logs[0].shape[-1]:
            return
        for side, log in enumerate(logs):
            self.losses[side] -= float(log[known].gather(-1, targets[known][:, None].long()).sum())
        self.targets += int(known.sum())

    def compute(self) -> OutputDiff | None:
        """Return what the sums say; None without predictions."""
        if not self.count:
            return None
        perplexities = (
            [math.inf if math.isnan(loss) else math.exp(min(loss / self.targets, 700)) for loss in self.losses]
            if self.targets
            else (None, None)
        )
        return OutputDiff(
            kl=max(self.divergence / self.count, 0.0),
            agreement=self.agreeing / self.count,
            predictions=self.count,
            perplexity_a=perplexities[0],
            perplexity_b=perplexities[1],
        )


def _valid(logits: Tensor, batch: Any) -> Tensor:
    mask = attention_mask(batch)
    if mask is not None and tuple(mask.shape) == tuple(logits.shape[:-1]):
        return torch.as_tensor(mask).to(logits.device).bool()
    return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
