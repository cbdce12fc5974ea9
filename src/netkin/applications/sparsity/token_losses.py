"""The losses by which a network learns which tokens to drop, those of Rao et al. (2021), arXiv:2106.02034."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from netkin.arrays import at_least_single
from netkin.errors import ShapeError, ValueFault
from netkin.identity import weights_digest
from netkin.representations.guests import evaluating
from netkin.representations.hooks import main_tensor, recording
from netkin.representations.inputs import device_of
from netkin.representations.layers import unwrapped
from netkin.training import Hook
from netkin.training.loop import outputs_of

if TYPE_CHECKING:
    from netkin.applications.sparsity.tokens import SparseTokens


def ratio_loss(decisions: Sequence[Tensor], keep: float) -> Tensor:
    """Return the mean over images and stages s of ``(keepˢ - share kept after stage s)²``."""
    shares = torch.stack([kept.mean(dim=1) for kept in decisions])
    wanted = torch.tensor([keep ** (stage + 1) for stage in range(len(decisions))]).to(shares)
    return (shares - wanted[:, None]).square().mean()


def distillation_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the KL divergence of the teacher's class probabilities from the network's, the mean over images."""
    own, others = (one.flatten(0, -2).to(at_least_single(one.dtype)).log_softmax(1) for one in (logits, targets))
    return F.kl_div(own, others, reduction="batchmean", log_target=True)


def token_loss(tokens: Tensor, targets: Tensor, kept: Tensor) -> Tensor:
    """Return the mean squared difference to the teacher's tokens, over those still kept in the end.

    Tokens are those after the last block, each with mean 0 and variance 1, so that the loss has no scale of its own.
    """
    own, others = (F.layer_norm(one.to(at_least_single(one.dtype)), one.shape[-1:]) for one in (tokens, targets))
    counts = kept.detach()
    return ((own - others).square().mean(-1) * counts).sum() / counts.sum().clamp(min=1)


class TokenLosses(Hook):
    """What is added to the cross entropy while a network learns which tokens to drop.

    It is a hook of `nk.train`; in any other loop add `term(images, outputs)` to the loss after each forward pass.

    Args:
        model: What `nk.sparsify_tokens` returned.
        teacher: The network that is imitated, mostly the one that was given to `nk.sparsify_tokens`; None for none.
        ratio: The factor of the ratio loss.
        distillation: The factor of the KL divergence from the teacher's classes.
        tokens: The factor of the squared difference to the teacher's tokens.

    Example:
        >>> from netkin.applications.sparsity import sparsify_tokens
        >>> from netkin.sources.architectures import vit
        >>> plain, images = vit(), torch.zeros(2, 3, 32, 32)
        >>> model = sparsify_tokens(plain, keep=0.7)
        >>> losses = TokenLosses(model, teacher=plain)
        >>> sorted(losses.parts(images, model.train()(images)))
        ['distillation', 'ratio', 'tokens']
    """

    def __init__(
        self, model: nn.Module, teacher: nn.Module | None = None, *, ratio: float = 2.0, distillation: float = 0.5,
        tokens: float = 0.5,
    ):  # fmt: skip
        self.model: SparseTokens = unwrapped(model)  # type: ignore[assignment]
        if not hasattr(self.model, "last_pass"):
            raise ValueFault(
                f"`TokenLosses` are of what `nk.sparsify_tokens` returns; got {type(self.model).__name__}."
            )
        self.teacher, self.factors = teacher, {"ratio": ratio, "distillation": distillation, "tokens": tokens}
        for name, factor in self.factors.items():
            if not 0 <= factor < float("inf"):
                raise ValueFault(f"`{name}` is the factor of a loss, a number of 0 or more; got {factor!r}.")
        self.settings = {**self.factors, "teacher": None if teacher is None else weights_digest(teacher)}

    def parts(self, inputs: Any, outputs: Any) -> dict[str, Tensor]:
        """Return the losses of the training pass that was just taken, by name, without their factors."""
        last = self.model.last_pass()
        found = {"ratio": ratio_loss(last.decisions, self.model.keep)} if self.model.predicts else {}
        if self.teacher is None:
            return found
        targets, tokens = self._taught(inputs)
        found["distillation"] = distillation_loss(main_tensor(outputs, ""), targets)
        if tokens is not None:
            found["tokens"] = token_loss(last.tokens, _fitting(tokens, last.tokens), last.decisions[-1])
        return found

    def term(self, inputs: Any, outputs: Any) -> Tensor:
        """Return the sum of the losses, each times its factor."""
        none = main_tensor(outputs, "").new_zeros(())
        return sum((self.factors[name] * part for name, part in self.parts(inputs, outputs).items()), start=none)

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, step: int) -> Tensor:
        """Return the sum, which `nk.train` adds to its loss."""
        return self.term(inputs, outputs)

    def _taught(self, inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the teacher's logits and, where they are wanted, its tokens after the last block."""
        assert self.teacher is not None
        if device_of(self.teacher) != device_of(self.model):
            raise ValueFault(
                f"the teacher lies on {device_of(self.teacher)} and the network on {device_of(self.model)}; put both "
                "on one device."
            )
        with evaluating(self.teacher), torch.no_grad():
            if not self.factors["tokens"]:
                return main_tensor(outputs_of(self.teacher, inputs), ""), None
            with recording(self.teacher, last := self.model.last_block) as seen:
                logits = main_tensor(outputs_of(self.teacher, inputs), "")
        return logits, seen[last][:, self.model.prefix :]


def _fitting(targets: Tensor, tokens: Tensor) -> Tensor:
    if targets.shape != tokens.shape:
        raise ShapeError(
            f"the teacher's tokens have shape {tuple(targets.shape)} and the network's {tuple(tokens.shape)}; pass "
            "`tokens=0` to imitate its classes alone."
        )
    return targets
