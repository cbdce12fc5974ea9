"""Tokens: vision transformers that drop the tokens of an image they need least, and the losses by which they learn to.

The method and its losses are those of Rao et al. (2021), arXiv:2106.02034.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from netkin.applications.sparsity.token_encoder import PRINTED, LastPass, TokenEncoder, TokenPredictor, tokens_in
from netkin.arrays import at_least_single
from netkin.errors import ForwardError, InvalidValue, ShapeError, UnknownName, did_you_mean, require_at_least
from netkin.identity import weights_digest
from netkin.representations.hooks import inference_mode_of, main_tensor, recording
from netkin.representations.inputs import batch_length, device_of, dtype_of, outputs_of
from netkin.representations.layers import modules, require_weights, stages, unwrapped
from netkin.settings import evaluating
from netkin.sources.architectures import seeded
from netkin.training import Hook

PREFIX = re.compile(r"(^|[._])((cls|class)(_?(token|embed|embedding))?|(dist|distillation|reg|register)_?tokens?)$")


def sparsify_tokens(
    model: nn.Module,
    keep: float = 0.7,
    at: int | Iterable[int] | None = None,
    *,
    similarity: bool | float | Literal["printed"] = True,
    predict: bool = True,
    prefix: int | None = None,
    blocks: str | None = None,
    seed: int = 0,
) -> SparseTokens:
    """Return a copy of a vision transformer that keeps a share of the tokens at each of some stages.

    In evaluation mode tokens are dropped for good, each image by itself, and the blocks after a stage have less to do.
    In training mode they are masked in attention, by decisions of 0 and 1 that the gradient passes: see `TokenLosses`.
    `model` itself stays as it is.

    Args:
        model: A vision transformer: `netkin:vit`, ViT or DeiT of Hugging Face, or any with a list of blocks whose
            attention is torch's `scaled_dot_product_attention`.
        keep: The share of tokens that each stage keeps: after three stages of 0.7 there are 0.343 left.
        at: Before which blocks tokens are dropped, counted from 0; by default after a quarter, a half and three
            quarters of them, 3, 6 and 9 of 12.
        similarity: Whether tokens that are similar to the others are dropped first, Eq. 13 in log odds; a number is the
            factor of that penalty. "printed" takes Eq. 13 as it is printed, with the sum over all others: most such
            "probabilities" are below 0, and in training these tokens are dropped.
        predict: Whether modules are learnt that predict the tokens to keep. If not, similarity decides, or if that
            is False too, chance.
        prefix: How many tokens in front are no patches and always kept; found by the names of class, distillation and
            register tokens unless given.
        blocks: The name of the list of blocks, where a model has several.
        seed: From which the first weights of the new modules follow.

    Example:
        >>> from netkin.sources.architectures import vit
        >>> model = sparsify_tokens(vit(), keep=0.5, at=(2, 4)).eval()
        >>> [tuple(stage.shape) for stage in model.kept(torch.zeros(3, 3, 32, 32))]
        [(3, 32), (3, 16)]
    """
    _require_settings(keep, similarity, prefix)
    require_weights(unwrapped(model))
    own = copy.deepcopy(unwrapped(model))
    choose_attention = getattr(own, "set_attn_implementation", None)  # of Hugging Face
    if callable(choose_attention):
        choose_attention("sdpa")
    name = _blocks_of(own, blocks)
    listed = [*own.get_submodule(name).children()]
    places, width = _places(at, len(listed)), _width(listed[0], name)
    ahead = _prefix_of(own, width) if prefix is None else prefix
    predictors = seeded(lambda: _predictors(places, width, keep), seed) if predict else nn.ModuleDict()
    predictors.to(device=device_of(own), dtype=dtype_of(own)).train(own.training)
    penalty = similarity if isinstance(similarity, str) else float(similarity)
    encoder = TokenEncoder(listed, predictors, places, ahead, keep, penalty)
    encoder.train(own.training)
    _require_maskable(encoder, name, width)
    return SparseTokens(own, name, encoder)


class SparseTokens(nn.Module):
    """A vision transformer with fewer and fewer tokens, as `sparsify_tokens` makes it; called as the model inside."""

    def __init__(self, model: nn.Module, blocks: str, encoder: TokenEncoder):
        super().__init__()
        self.model, self.keep, self.at, self.prefix = model, encoder.keep, encoder.at, encoder.prefix
        self.last_block = f"{blocks}.{len(encoder.blocks) - 1}"  # its name in the model that was given
        norm = _norm_after(model, blocks)
        old, (parent, _, name) = model.get_submodule(blocks), blocks.rpartition(".")
        # a model goes through its list of blocks, or calls it
        new = nn.Sequential(encoder) if isinstance(old, nn.Sequential) else nn.ModuleList([encoder])
        setattr(model.get_submodule(parent), name, new)
        (encoder if norm is None else norm).register_forward_hook(encoder.weigh)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what the model inside gives."""
        return self.model(*inputs, **options)

    @property
    def encoder(self) -> TokenEncoder:
        """The blocks and the stages between them."""
        return next(one for one in self.model.modules() if isinstance(one, TokenEncoder))

    @property
    def predicts(self) -> bool:
        """Whether modules are learnt that predict the tokens to keep."""
        return bool(self.encoder.predictors)

    def last_pass(self) -> LastPass:
        """Return the decisions and the tokens of the last pass in training mode."""
        if not self.encoder.last.decisions:
            raise InvalidValue("the losses need a forward pass in training mode first; call `train()`, then the model.")
        return self.encoder.last

    @torch.no_grad()
    def kept(self, *inputs: Any, **options: Any) -> list[Tensor]:
        """Return the numbers of the patches of each image that are left after each stage, n × count."""
        seen, encoder = list[tuple[Any, Any]](), self.encoder
        with inference_mode_of(self):
            see = encoder.register_forward_pre_hook(lambda _, *call: seen.append(call), with_kwargs=True)
            try:
                self(*inputs, **options)
            finally:
                see.remove()
            places: list[Tensor] = []
            encoder.pruned(*seen[0][0], places=places, **seen[0][1])
        return places

    def extra_repr(self) -> str:
        """Tell the settings."""
        return f"keep={self.keep:g}, at={self.at}, prefix={self.prefix}, similarity={self.encoder.similarity}"


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
        own = unwrapped(model)
        if not isinstance(own, SparseTokens):
            raise InvalidValue(f"`TokenLosses` are of what `nk.sparsify_tokens` returns; got {type(own).__name__}.")
        self.model, self.teacher = own, teacher
        self.factors: dict[str, Any] = {"ratio": ratio, "distillation": distillation, "tokens": tokens}
        for name, factor in self.factors.items():
            if not isinstance(factor, Real) or not 0 <= float(factor) < float("inf"):
                raise InvalidValue(f"`{name}` is the factor of a loss, a number of 0 or more; got {factor!r}.")
        self.settings = {**self.factors, "teacher": None if teacher is None else weights_digest(unwrapped(teacher))}

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
            raise InvalidValue(
                f"the teacher lies on {device_of(self.teacher)} and the network on {device_of(self.model)}; put both "
                "on one device."
            )
        with evaluating(self.teacher), torch.no_grad():
            if not self.factors["tokens"]:
                return main_tensor(outputs_of(self.teacher, inputs), ""), None
            with recording(self.teacher, last := self.model.last_block) as seen:
                logits = main_tensor(outputs_of(self.teacher, inputs), "")
        return logits, seen[last][:, self.model.prefix :]


class TokenCosts(NamedTuple):
    """What a model costs: all its parameters, and the multiplications with an addition for one image."""

    parameters: int
    multiply_adds: int


def token_costs(model: nn.Module, images: Any) -> TokenCosts:
    """Return the parameters of a model and its multiply-adds for one image, counted on `images` in evaluation mode.

    Papers on vision transformers call multiply-adds FLOPs; they are half of what `torch.utils.flop_counter` counts.

    Example:
        >>> from netkin.sources.architectures import vit
        >>> plain, image = vit(), torch.zeros(1, 3, 32, 32)
        >>> half = token_costs(sparsify_tokens(plain, keep=0.5), image)
        >>> half.multiply_adds < 0.6 * token_costs(plain, image).multiply_adds
        True
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode  # imports a compiler, which takes long

    count = batch_length(images)
    if not count:
        raise ShapeError("the costs of one image are counted on one or more; got none.")
    # attention that is fused on the CPU is not counted
    with inference_mode_of(model), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        outputs_of(model, images)
    return TokenCosts(sum(one.numel() for one in model.parameters()), counter.get_total_flops() // 2 // count)


def _fitting(targets: Tensor, tokens: Tensor) -> Tensor:
    if targets.shape != tokens.shape:
        raise ShapeError(
            f"the teacher's tokens have shape {tuple(targets.shape)} and the network's {tuple(tokens.shape)}; pass "
            "`tokens=0` to imitate its classes alone."
        )
    return targets


def _predictors(places: tuple[int, ...], width: int, keep: float) -> nn.ModuleDict:
    return nn.ModuleDict({str(place): TokenPredictor(width, keep) for place in places})


def _blocks_of(model: nn.Module, wanted: str | None) -> str:
    """Return the name of the list of blocks: several modules, each with an attention inside."""
    known = modules(model)
    if wanted is not None and not isinstance(known.get(wanted), (nn.ModuleList, nn.Sequential)):
        lists = [name for name, one in known.items() if isinstance(one, (nn.ModuleList, nn.Sequential))]
        raise UnknownName(f"the model has no list of blocks named {wanted!r}{did_you_mean(wanted, lists) or '.'}")
    if wanted is not None:
        return wanted
    if any(isinstance(one, TokenEncoder) for one in known.values()):
        raise InvalidValue("the model drops tokens already; give `nk.sparsify_tokens` the one that it was made of.")
    found = [name for name, inside in stages(model).items() if name and all(_attends(known[one]) for one in inside)]
    if not found or any(isinstance(one, nn.Embedding) for one in known.values()):
        raise InvalidValue(
            f"{type(model).__name__} has no tokens of an image to drop: it is no vision transformer with a list of "
            "blocks that hold attention; name the list as `blocks` if it is one."
        )
    if len(found) > 1:
        raise InvalidValue(f"the model has {len(found)} lists of blocks, {', '.join(found)}; name one as `blocks`.")
    return found[0]


def _attends(block: nn.Module) -> bool:
    return any(re.search("att(entio)?n", name) for name, _ in block.named_modules())


def _width(block: nn.Module, name: str) -> int:
    for one in block.modules():
        if isinstance(one, nn.LayerNorm):
            return one.normalized_shape[-1]
        if isinstance(one, nn.Linear):
            return one.in_features
    raise InvalidValue(f"the blocks in {name!r} have no linear layer that would tell the width of their tokens.")


def _prefix_of(model: nn.Module, width: int) -> int:
    """Return how many tokens are learnt and put in front of the patches, by their names."""
    learnt = [one for name, one in model.named_parameters() if PREFIX.search(name) and one.shape[-1:] == (width,)]
    return sum(one.numel() // width for one in learnt)


def _norm_after(model: nn.Module, blocks: str) -> nn.Module | None:
    """Return the norm that comes first after the blocks, by its name or type, in the order of registration."""
    known = modules(model)
    names = [*known]
    after = [name for name in names[names.index(blocks) :] if not f"{name}.".startswith(f"{blocks}.")]
    norms = [
        name for name in after if re.search("norm", f"{name.rpartition('.')[2]} {type(known[name]).__name__}", re.I)
    ]
    return known[norms[0]] if norms else None


def _places(at: int | Iterable[int] | None, depth: int) -> tuple[int, ...]:
    quarters = sorted({depth * quarter // 4 for quarter in (1, 2, 3)})
    places = tuple(quarters if at is None else at if isinstance(at, Iterable) else [at])
    if not places or any(isinstance(one, bool) or not isinstance(one, Integral) for one in places):
        raise InvalidValue(
            f"`at` holds the numbers of blocks before which tokens are dropped, as (3, 6, 9); got {at!r}.",
            argument="at",
        )
    outside = [one for one in places if not 0 <= one < depth]
    if outside:
        raise InvalidValue(
            f"`at` names block {outside[0]}, and the model has the blocks 0 to {depth - 1}.", argument="at"
        )
    if list(places) != sorted(set(places)):
        raise InvalidValue(f"the blocks in `at` must rise, each once; got {places}, and the model has {depth} blocks.")
    return tuple(map(int, places))


def _require_settings(keep: Any, similarity: Any, prefix: Any) -> None:
    if isinstance(keep, bool) or not isinstance(keep, Real) or not 0 < float(keep) <= 1:
        raise InvalidValue(
            f"`keep` is the share of tokens that each stage keeps, above 0 and up to 1; got {keep!r}.", argument="keep"
        )
    is_factor = isinstance(similarity, Real) and 0 <= float(similarity) < float("inf")
    if not is_factor and similarity != PRINTED:
        raise InvalidValue(
            f"`similarity` is True, False, {PRINTED!r} or a factor of 0 or more; got {similarity!r}.",
            argument="similarity",
        )
    if prefix is not None:
        require_at_least(0, prefix=prefix)


@torch.no_grad()
def _require_maskable(encoder: TokenEncoder, name: str, width: int) -> None:
    """Refuse blocks for which a token that is masked is not the same as one that is not there."""
    like = next(encoder.blocks.parameters())
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, encoder.prefix + 6, width, generator=draw).to(like)
    kept = torch.tensor([[1, 0, 1, 1, 0, 1]], dtype=at_least_single(like.dtype), device=like.device)
    left = F.pad(kept, (encoder.prefix, 0), value=1.0)[0] > 0
    for number in range(encoder.at[0], len(encoder.blocks)):
        block = encoder.blocks[number]
        what = f"the attention of block {number} in {name!r} ({type(block).__name__}) can't be masked"
        with evaluating(encoder):
            try:
                masked, removed = encoder.run(number, tokens, kept), block(tokens[:, left])
            except Exception as fault:
                raise ForwardError(f"{what}: {fault}") from fault
        masked, removed = tokens_in(masked)[:, left].double(), tokens_in(removed).double()
        if (masked - removed).norm() > 100 * torch.finfo(like.dtype).eps * removed.norm():
            raise ForwardError(f"{what}: tokens that stay depend on those that are gone.")
