"""The encoder of a network that drops tokens: which ones go, and how the blocks run without them.

Dynamic token sparsification, Rao et al. (2021), arXiv:2106.02034, with the keep probability of Eq. 13 of the CKA
sparsity paper as `docs/decisions/0014` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from netkin.arrays import at_least_single
from netkin.errors import ForwardError

PRINTED = "printed"  # Eq. 13 as it is printed
CERTAIN = 1e-6  # how near to 0 and 1 a probability of keeping is taken in training
SLOPE = 4.0  # of log odds by probability at ½, so that Eq. 13 is met there to first order


class TokenPredictor(nn.Module):
    """The prediction module: scores for dropping and keeping a token, from itself and the mean of those still there."""

    def __init__(self, width: int, keep: float):
        super().__init__()
        half, quarter = max(1, width // 2), max(1, width // 4)
        self.features = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * half), nn.GELU())
        last = nn.Linear(quarter, 2)
        self.scores = nn.Sequential(nn.Linear(2 * half, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), last)
        with torch.no_grad():  # so that about the share wanted is kept at first
            last.bias.copy_(torch.tensor([1 - keep, keep]).clamp(min=0.01).log())

    def forward(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Return n × tokens × 2 scores; those of tokens with ``kept`` 0 count for no other."""
        local, common = self.features(tokens).chunk(2, dim=-1)
        shares = kept / kept.sum(1, keepdim=True).clamp(min=1)  # before they are rounded: bfloat16 counts to 256
        mean = (common * shares.to(common.dtype)[..., None]).sum(1, keepdim=True)
        return self.scores(torch.cat([local, mean.expand_as(local)], dim=-1))


def token_cka(tokens: Tensor) -> Tensor:
    """Return the linear CKA of every two tokens of each image, n × tokens × tokens, from n × tokens × width.

    A token is a matrix of one column, its features the rows, so that one image has all that is needed, and CKA is the
    squared correlation of two tokens over their features. A token whose features are all the same has CKA 0.

    Example:
        >>> token_cka(torch.tensor([[[0.0, 1.0, 2.0], [6.0, 4.0, 2.0], [1.0, 0.0, 1.0]]])).round(decimals=3)
        tensor([[[1., 1., 0.],
                 [1., 1., 0.],
                 [0., 0., 1.]]])
    """
    with torch.autocast(tokens.device.type, enabled=False):
        X = tokens.to(at_least_single(tokens.dtype))
        X = X / X.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(X.dtype).tiny)
        X = X - X.mean(-1, keepdim=True)
        norms = X.norm(dim=-1, keepdim=True)
        rounding = 4 * torch.finfo(X.dtype).eps * X.shape[-1] ** 0.5
        X = torch.where(norms > rounding, X / norms.clamp(min=rounding), 0)
        return (X @ X.transpose(1, 2)).square()


def mean_token_cka(tokens: Tensor, kept: Tensor) -> Tensor:
    """Return the mean CKA of each token with the other kept ones, n × tokens: the sum in Eq. 13 over its terms."""
    pairs, counts = token_cka(tokens), kept.to(at_least_single(tokens.dtype))
    with torch.autocast(tokens.device.type, enabled=False):  # it would round the sums
        with_others = (pairs @ counts[..., None])[..., 0] - pairs.diagonal(dim1=1, dim2=2) * counts
    return with_others / (counts.sum(1, keepdim=True) - counts).clamp(min=1)


class LastPass:
    """What a training pass leaves for the losses; copies and files of a model go without."""

    def __init__(self) -> None:
        self.decisions: list[Tensor] = []  # n × patches of 0 and 1 after each stage
        self.tokens = torch.empty(0)  # n × patches × width, after the last block

    def __reduce__(self) -> Any:
        return LastPass, ()

    def __repr__(self) -> str:
        return "LastPass()"


class TokenEncoder(nn.Module):
    """The blocks of a vision transformer with its stages between them; takes the place of their list."""

    def __init__(
        self, blocks: Sequence[nn.Module], predictors: nn.ModuleDict, at: tuple[int, ...], prefix: int, keep: float,
        similarity: float | str,
    ):  # fmt: skip
        super().__init__()
        self.blocks, self.predictors = nn.ModuleList(blocks), predictors
        self.at, self.prefix, self.keep, self.similarity = at, prefix, keep, similarity
        self.last = LastPass()

    def forward(self, tokens: Tensor, *rest: Any, **options: Any) -> Any:
        """Return the tokens after all blocks: fewer in evaluation mode, as many as there were in training mode."""
        if any(isinstance(one, Tensor) for one in (*rest, *options.values())):
            raise ForwardError("tokens can't be dropped where the input has a mask of its own; pass images alone.")
        return (self.masked if self.training else self.pruned)(tokens, *rest, **options)

    def counts(self, patches: int) -> list[int]:
        """Return how many patches are left after each stage, at least one."""
        # with a little more, so that rounding takes no token away: 0.7 * 0.7 * 100 is below 49
        return [max(1, math.floor(patches * self.keep ** (stage + 1) + 1e-6)) for stage in range(len(self.at))]

    def pruned(self, tokens: Tensor, *rest: Any, places: list[Tensor] | None = None, **options: Any) -> Any:
        """Run the blocks and remove tokens at each stage; `places` collects which patches are left."""
        counts, output = iter(self.counts(tokens.shape[1] - self.prefix)), tokens
        for number, block in enumerate(self.blocks):
            if number in self.at:
                chosen = self._best(number, tokens[:, self.prefix :], next(counts))
                if places is not None:
                    places.append(places[-1].gather(1, chosen) if places else chosen)
                rows = chosen[..., None].expand(-1, -1, tokens.shape[2])
                tokens = torch.cat([tokens[:, : self.prefix], tokens[:, self.prefix :].gather(1, rows)], dim=1)
            output = block(tokens, *rest, **options)
            tokens = tokens_in(output)
        return output

    @_disable_dynamo  # a compiler would have to see through `MaskedAttention`; the public form imports it at once
    def masked(self, tokens: Tensor, *rest: Any, **options: Any) -> Any:
        """Run the blocks on all tokens, without attention to those that a stage has dropped."""
        patches, output = tokens.shape[1] - self.prefix, tokens
        decisions: list[Tensor] = []
        kept = torch.ones(len(tokens), patches, dtype=at_least_single(tokens.dtype), device=tokens.device)
        for number, block in enumerate(self.blocks):
            if number in self.at:
                count = self.counts(patches)[len(decisions)]
                kept = kept * self._decided(number, tokens[:, self.prefix :], kept, count)
                decisions.append(kept)
            output = self.run(number, tokens, kept, *rest, **options) if decisions else block(tokens, *rest, **options)
            tokens = tokens_in(output)
        self.last.decisions, self.last.tokens = decisions, tokens[:, self.prefix :]
        return output

    def run(self, number: int, tokens: Tensor, kept: Tensor, *rest: Any, **options: Any) -> Any:
        """Run one block with attention to the kept patches and to the tokens in front of them."""
        block = self.blocks[number]
        if getattr(block, "gradient_checkpointing", False) and self.training:
            raise ForwardError(
                "gradient checkpointing runs blocks again without the mask of dropped tokens; turn it off."
            )
        attention = MaskedAttention(F.pad(kept, (self.prefix, 0), value=1.0))
        with attention:
            output = block(tokens, *rest, **options)
        if not attention.calls:
            raise ForwardError(
                "it does not call torch's `scaled_dot_product_attention`, or hides it as `nn.MultiheadAttention` does."
            )
        return output

    def log_odds(self, number: int, patches: Tensor, kept: Tensor) -> Tensor:
        """Return log π'/(1 - π') of each patch, π' the probability that it is kept, n × patches."""
        found = self._predicted(number, patches, kept)
        if self.similarity:
            shared, counts = mean_token_cka(patches.detach(), kept.detach()), kept.detach()
            mean = (shared * counts).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)
            return found - SLOPE * float(self.similarity) * (shared - mean)
        return found if self.predictors else torch.rand_like(kept)

    def printed_probability(self, number: int, patches: Tensor, kept: Tensor) -> Tensor:
        """Return π' of each patch as Eq. 13 prints it, π less the sum of its CKA with all other kept ones."""
        counts = kept.detach()
        others = counts.sum(1, keepdim=True) - counts
        return self._predicted(number, patches, kept).sigmoid() - others * mean_token_cka(patches.detach(), counts)

    def _predicted(self, number: int, patches: Tensor, kept: Tensor) -> Tensor:
        """Return log π/(1 - π) by the prediction module; 0 without one."""
        if str(number) not in self.predictors:
            return torch.zeros_like(kept)
        scores = self.predictors[str(number)](patches, kept)
        return (scores[..., 1] - scores[..., 0]).to(kept.dtype)

    def _scores(self, number: int, patches: Tensor, kept: Tensor) -> Tensor:
        """Return by what tokens are ordered, the higher the sooner kept."""
        return (self.printed_probability if self.similarity == PRINTED else self.log_odds)(number, patches, kept)

    def weigh(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Weigh tokens in training so that a mean over all patches becomes that of the kept ones; a forward hook."""
        if not self.training or not self.last.decisions:
            return None
        kept, tokens = self.last.decisions[-1], tokens_in(output)
        if tokens.ndim != 3 or tokens.shape[:2] != (len(kept), self.prefix + kept.shape[1]):
            if self.prefix:
                return None  # the norm of the class token alone
            raise ForwardError(
                f"the norm after the blocks gives shape {tuple(tokens.shape)} and not the tokens, so that dropped ones "
                "can't be left out of their mean; a model without class token must norm its tokens, then pool them."
            )
        weights = kept * (kept.shape[1] / kept.sum(1, keepdim=True).clamp(min=1))
        weights = F.pad(weights, (self.prefix, 0), value=1.0).to(tokens.dtype)[..., None]
        return (tokens * weights, *output[1:]) if isinstance(output, tuple) else tokens * weights

    def _best(self, number: int, patches: Tensor, count: int) -> Tensor:
        kept = torch.ones(patches.shape[:2], dtype=at_least_single(patches.dtype), device=patches.device)
        order = self._scores(number, patches, kept).argsort(dim=1, descending=True, stable=True)
        return order[:, :count].sort(dim=1).values

    def _decided(self, number: int, patches: Tensor, kept: Tensor, count: int) -> Tensor:
        scores = self._scores(number, patches, kept)
        if self.predictors:
            return straight_through(scores.logit(eps=CERTAIN) if self.similarity == PRINTED else scores)
        order = scores.masked_fill(kept == 0, -torch.inf).argsort(dim=1, descending=True, stable=True)
        return torch.zeros_like(kept).scatter(1, order[:, :count], 1.0)


def tokens_in(output: Any) -> Tensor:
    """Return the tokens that a block gives, alone or first of several things."""
    return output[0] if isinstance(output, tuple) else output


class MaskedAttention(TorchFunctionMode):
    """Inside the `with`, torch's attention sees only the tokens that are kept, and each token itself.

    Blocks of any make are masked so, as long as they call `torch.nn.functional.scaled_dot_product_attention`.
    """

    def __init__(self, kept: Tensor):
        super().__init__()
        self.kept, self.calls = kept, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run attention with the mask, and all else as it is."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return masked_attention(self.kept, *args, **(kwargs or {}))


def masked_attention(
    kept: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return attention in which token j counts ``kept[n, j]``, 0 or 1, for all others and 1 for itself.

    ``exp(P_ij) G_ij / Σ_k exp(P_ik) G_ik``: the values are those without the dropped tokens, and the gradient reaches
    `kept` at dropped ones too. There it is as if a token counted at most as much as the best kept one, which bounds it.
    """
    wanted = (*kept.shape, kept.shape[1])
    if attn_mask is not None or is_causal or enable_gqa or query.ndim != 4:
        raise ForwardError("an attention with a mask, a causal order or groups of its own can't leave tokens out.")
    if (query.shape[0], query.shape[2], key.shape[2]) != wanted:
        raise ForwardError(
            f"the attention runs over {key.shape[2]} of {kept.shape[1]} tokens at a time, so that none can be left out."
        )
    itself = torch.eye(kept.shape[1], dtype=torch.bool, device=kept.device)
    G = torch.where(itself, 1.0, kept[:, None, None, :])
    P = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    P = P.to(at_least_single(P.dtype))
    # dropped tokens must not set the scale: with a large P they would push the kept ones to zero
    peak = P.detach().masked_fill(G == 0, -torch.inf).amax(-1, keepdim=True)
    weights = (P - peak).clamp(max=0).exp() * G
    weights = weights / weights.sum(-1, keepdim=True)
    return F.dropout(weights, dropout_p).to(value.dtype) @ value


def straight_through(log_odds: Tensor) -> Tensor:
    """Return a decision of 0 or 1 for each token, 1 with the probability of the log odds, by Gumbel softmax.

    The gradient is that of ``σ(log odds + noise)``, the softmax of two classes with Gumbel noise at temperature 1.
    """
    waiting = torch.empty((2, *log_odds.shape), dtype=log_odds.dtype, device=log_odds.device).exponential_()
    noise = waiting.clamp(min=torch.finfo(log_odds.dtype).tiny).log()
    soft = (log_odds + noise[0] - noise[1]).sigmoid()
    return (soft > 0.5).to(soft.dtype) + (soft - soft.detach())  # the difference is exactly zero
