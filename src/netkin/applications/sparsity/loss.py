"""The CKA sparsity loss: a term of the loss that lowers the similarity between a network's layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from netkin.arrays import at_least_single, summing_dtype
from netkin.errors import ForwardError, InvalidValue, ShapeError, require_at_least, require_listed
from netkin.measures import cca_mean_squared
from netkin.measures.kernels import batch_gram, gram_cosines
from netkin.representations import shapes
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import device_of, dtype_of
from netkin.representations.layers import Spec, choose, layer_label, modules, stages, unwrapped
from netkin.statistics import Moments
from netkin.statistics.rows import RowsSide
from netkin.training import Hook

if TYPE_CHECKING:
    from typing_extensions import Self

VARIANTS = ("stage", "augmented", "cca")
LEAST = {"biased": 2, "debiased": 4}  # examples that an estimator needs


class Seen(NamedTuple):
    """What is kept of a layer's output: its Gram matrix, or its rows for CCA, and the shape of one example."""

    layer: str
    shape: tuple[int, ...]
    kept: Tensor


class CKASparsityLoss(Hook):
    """β times the similarity between the layers of a network, to be added to its loss: CKA-SR.

    It is a hook of `nk.train`; in any other loop add `term()` to the loss after each forward pass. With
    ``variant="stage"`` the term is ``β Σ_stages Σ_i Σ_j CKA(X_i, X_j)`` over the layers of a stage, i = j included
    (eq. 11); with "augmented" it is β times the mean CKA over all pairs of different layers, of any shapes (eq. 14, as
    in the paper's listing); "cca" is as "stage" with `cca_mean_squared` of positions (or tokens) in place of CKA. Rows
    are centred. A layer that does not vary over the samples counts as 0.

    `every` counts forward passes with gradients, from the first on: under gradient accumulation those of the parts of a
    batch. On the others the term is 0; on those that count it is not multiplied by `every`. Of several processes each
    has the term of its own samples. The model carries hooks until `close()`, or the end of a `with`.

    Args:
        model: The network that is trained; a wrapper for several processes or of `torch.compile` is looked through.
        stages: Whose layers are compared: each a container as "layer1", or a list of layers as in `nk.layers`. By
            default the layers of each container of blocks, grouped by the shape of their outputs.
        beta: The factor of the term, 0 or more.
        samples: How many examples of a batch are compared, the first ones; None for all. The first axis of a layer's
            output counts them.
        every: The term is taken at the first of so many forward passes.
        variant: "stage", "augmented" or "cca".
        estimator: "biased" as in the paper, or "debiased", which takes off what few examples add to the CKA of wide
            layers.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> penalty = CKASparsityLoss(model, beta=1e-3)
        >>> loss = model(torch.randn(16, 4)).square().mean() + penalty.term()
        >>> penalty.close()
    """

    def __init__(
        self,
        model: nn.Module,
        stages: str | Sequence[Spec] | None = None,
        *,
        beta: float,
        samples: int | None = 8,
        every: int = 5,
        variant: str = "stage",
        estimator: str = "biased",
    ):
        _require_settings(beta, samples, every, variant, estimator)
        self.model, self.beta, self.every = unwrapped(model), float(beta), int(every)
        self.samples = None if samples is None else int(samples)
        self.variant, self.estimator, self.automatic = variant, estimator, stages is None
        self.stages = _chosen(model, stages, variant)
        self.settings = {name: getattr(self, name) for name in ("beta", "samples", "every", "variant", "estimator")}
        self.settings["stages"] = self.stages
        self.batches = 0  # forward passes with gradients so far
        self.value: Tensor | None = None  # the last similarity, without β
        self._seen: dict[str, list[Seen]] = {}
        self._counts = self._due = self._waits = False
        known = modules(model)
        self._root = self.model.register_forward_pre_hook(_Tap(self, None))
        names = dict.fromkeys(name for stage in self.stages for name in stage)
        self._handles = [known[name].register_forward_hook(_Tap(self, name)) for name in names]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in (self._root, *self._handles):
            handle.remove()
        self._handles, self._seen, self._waits = [], {}, False

    def term(self) -> Tensor:
        """Return β times the similarity in the forward pass that was just taken, or 0 if that one does not count."""
        if not self._handles:
            raise InvalidValue("the loss is closed and has no hooks on the model; make another one.")
        if not self._waits:
            raise InvalidValue("`term()` needs a forward pass of the model with gradients first, one for each term.")
        found, self._seen, self._waits = self._seen, {}, False
        if not self._due:
            return torch.zeros((), dtype=self._dtype, device=device_of(self.model))
        groups = self._groups(found)
        if not any(one.requires_grad for group in groups for one in group):
            raise ForwardError(
                "none of the layers has gradients: they are frozen, or run under checkpointing with "
                "use_reentrant=True; pass use_reentrant=False, or `stages` that are trained."
            )
        value = self._similarity(groups).to(self._dtype)
        self.value = value.detach()
        return self.beta * value

    @property
    def _dtype(self) -> torch.dtype:
        return at_least_single(dtype_of(self.model) or torch.float32)

    # --- what a training loop asks ------------------------------------------------------------------------------------

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Refuse to be a hook of the training of another model."""
        if unwrapped(model) is not self.model:
            raise InvalidValue(
                "this CKA sparsity loss watches another model than the one that is trained; make one for this model."
            )

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, step: int) -> Tensor:
        """Return the term, which `nk.train` adds to its loss."""
        return self.term()

    def state_dict(self) -> dict[str, Any]:
        """Return how many forward passes were counted."""
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from what `state_dict` returned."""
        batches = state.get("batches")
        if not (isinstance(batches, int) and batches >= 0):
            raise InvalidValue(f"the state of a CKA sparsity loss is a number of `batches`; got {dict(state)!r}.")
        self.batches = batches

    # --- what hooks of the model call ---------------------------------------------------------------------------------

    def count_by_hand(self) -> None:
        """Leave `begin_batch` before each forward pass to the caller, where the model itself is not what is called."""
        self._root.remove()

    def begin_batch(self) -> None:
        """Count a forward pass, if gradients are on."""
        self._counts = self._waits = torch.is_grad_enabled()
        self._seen = {}
        if self._counts:
            self._due = self.batches % self.every == 0
            self.batches += 1

    def see(self, name: str, output: Any) -> None:
        """Take what is needed of a layer's output, at once: what runs next may change it in place."""
        if not self._counts or not (self._waits or torch.is_grad_enabled()):
            return  # also where a layer runs for itself after the pass, as in a validation
        tensor = main_tensor(output, name)
        self._require_enough_examples(name, tensor)
        if self._due:
            kept = self._kept(tensor if self.samples is None else tensor[: self.samples])
            if self._waits:  # not when checkpointing runs the layer again, which must yet compute the same
                self._seen.setdefault(name, []).append(Seen(name, tuple(tensor.shape[1:]), kept))

    def _require_enough_examples(self, name: str, output: Tensor) -> None:
        count = len(output) if output.ndim else 0
        if self.samples is not None and count < self.samples:
            raise ShapeError(
                f"a batch of {count} examples is smaller than samples={self.samples} at {layer_label(name)}; take "
                "larger batches, leave out a small last one (drop_last=True), or take fewer samples."
            )
        if count < LEAST[self.estimator]:
            raise ShapeError(
                f"the {self.estimator} CKA needs batches of at least {LEAST[self.estimator]} examples; "
                f"{layer_label(name)} gave {count}."
            )

    def _kept(self, output: Tensor) -> Tensor:
        if self.variant != "cca":
            return batch_gram(output.reshape(len(output), -1))
        rows, _ = shapes.rows_of(output, "tokens" if output.ndim == 3 else "positions")
        return rows.to(summing_dtype(rows.device), copy=True)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _groups(self, found: Mapping[str, list[Seen]]) -> list[list[Tensor]]:
        """Return what was kept of each stage's layers; all layers are one stage where all pairs are compared."""
        missing = [name for stage in self.stages for name in stage if name not in found]
        if missing:
            raise ForwardError(
                f"{layer_label(missing[0])} did not run in this forward pass ({len(missing)} of "
                f"{sum(map(len, self.stages))} layers did not); choose `stages` of layers that run, and make the loss "
                "before a compiled model first runs."
            )
        seen = [[one for name in stage for one in found[name]] for stage in self.stages]
        if self.variant == "augmented":
            return [[one.kept for stage in seen for one in stage]]
        groups = [group for stage in seen for group in _by_shape(stage, self.automatic)]
        if not groups:
            raise ShapeError(
                "no two layers of a stage have outputs of one shape; name `stages`, or take 'augmented'.",
                argument="stages",
            )
        if self.variant == "cca":
            _require_more_rows_than_features(groups)
        return [[one.kept for one in group] for group in groups]

    def _similarity(self, groups: list[list[Tensor]]) -> Tensor:
        if self.variant == "cca":
            return torch.stack([_cca_sum(group) for group in groups]).sum()
        parts = [one for group in groups for one in group]
        if len({len(one) for one in parts}) > 1:
            raise ShapeError(
                f"layers gave outputs of {min(map(len, parts))} to {max(map(len, parts))} examples; choose `stages` of "
                "layers with one row an example."
            )
        table = gram_cosines(torch.stack([one.to(parts[0].device) for one in parts]), self.estimator == "debiased")
        if self.variant == "augmented":
            return (table.sum() - table.diagonal().sum()) / (len(parts) * (len(parts) - 1))
        sizes = [len(group) for group in groups]
        return torch.stack([rows.split(sizes, 1)[k].sum() for k, rows in enumerate(table.split(sizes))]).sum()


class _Tap:
    """A hook of one layer, or of the model itself before it runs; in a copy of the model it does nothing."""

    def __init__(self, loss: CKASparsityLoss | None, name: str | None):
        self.loss, self.name = loss, name

    def __call__(self, module: nn.Module, inputs: Any, output: Any = None) -> None:
        if self.loss is None:
            return
        if getattr(module, "_is_replica", False):
            raise ForwardError(
                "`DataParallel` runs copies of the model, whose layers can't be compared; use "
                "`DistributedDataParallel`."
            )
        if self.name is None:
            self.loss.begin_batch()
        else:
            self.loss.see(self.name, output)

    def __deepcopy__(self, memo: Any) -> _Tap:
        return _Tap(None, self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Tap, (None, self.name)


def _by_shape(stage: list[Seen], automatic: bool) -> list[list[Seen]]:
    """Return the parts of a stage whose outputs have one shape; a stage that was named must have one alone."""
    groups: dict[tuple[int, ...], list[Seen]] = {}
    for one in stage:
        groups.setdefault(one.shape, []).append(one)
    if automatic:
        return [group for group in groups.values() if len(group) > 1]
    if len(groups) > 1:
        first, other, *_ = groups
        raise ShapeError(
            f"a stage has layers of one shape; got {first} and {other}. Name others, or take variant='augmented', "
            "which compares layers of any shapes."
        )
    return list(groups.values())


def _require_more_rows_than_features(groups: list[list[Seen]]) -> None:
    for layer, _, rows in (one for group in groups for one in group):
        if len(rows) - 1 <= rows.shape[1]:
            raise ShapeError(
                f"CCA of {len(rows)} rows of {rows.shape[1]} features is 1 whatever a layer does, as at "
                f"{layer_label(layer)}; take more `samples`, or variant='stage'."
            )


def _cca_sum(group: list[Tensor]) -> Tensor:
    """Return the sum of `cca_mean_squared` over all ordered pairs of layers, 1 for a layer with itself."""
    sides = [RowsSide(rows, f"layer {place}") for place, rows in enumerate(group)]
    varying = [side for side in sides if side.varies]
    pairs = [(one, other) for place, one in enumerate(varying) for other in varying[:place]]
    values = [cca_mean_squared(Moments(one, other)) for one, other in pairs]
    return len(varying) + 2 * sum(values, start=group[0].new_zeros(()))


def _chosen(model: nn.Module, wanted: Any, variant: str) -> list[list[str]]:
    """Return the layers of each stage by name."""
    if wanted is None:
        found = list(stages(model).values())
        if variant == "augmented":
            found = [[name for stage in found for name in stage]]
        kept = [stage for stage in found if len(stage) > 1]
        if not kept:
            raise InvalidValue("the model has no stage of two layers or more; name its `stages`.", argument="stages")
        return kept
    listed = [wanted] if isinstance(wanted, str) else list(wanted)
    found = [_layers_of(model, one) for one in listed]
    if variant == "augmented":
        found = [list(dict.fromkeys(name for stage in found for name in stage))]
    for one, stage in zip(listed, found, strict=False):
        if len(stage) < 2:
            raise InvalidValue(
                f"a stage needs two layers or more; {one!r} has {len(stage)}: {', '.join(stage)}. Layers of one stage "
                "are named in a list of their own, as [['layer1.0', 'layer1.1']].",
                argument="stages",
            )
    if not found or not found[0]:
        raise InvalidValue("`stages` is empty; leave it out to have them chosen.", argument="stages")
    return found


def _layers_of(model: nn.Module, one: Spec) -> list[str]:
    inside = stages(model).get(one) if isinstance(one, str) else None
    return inside if inside is not None else choose(model, one)


def _require_settings(beta: Any, samples: Any, every: Any, variant: str, estimator: str) -> None:
    if not (isinstance(beta, Real) and 0 <= float(beta) < math.inf):
        raise InvalidValue(f"`beta` is a number of 0 or more; got {beta!r}.", argument="beta")
    require_listed("variant", variant, VARIANTS)
    require_listed("estimator", estimator, LEAST)
    if variant == "cca" and estimator == "debiased":
        raise InvalidValue(
            "estimator='debiased' is that of CKA, and variant='cca' has none; leave it out.", argument="estimator"
        )
    if samples is not None:
        require_at_least(LEAST[estimator], samples=samples)
    require_at_least(1, every=every)
