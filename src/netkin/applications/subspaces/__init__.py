"""Networks as filter atoms: coefficients that several share, and similarity of many networks without data.

The coefficients are those of one of the networks, or those that fit all of them best. `Decorrelation` is a term of the
loss that keeps the channels of a layer's output apart while atoms are trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from netkin.applications.experiment import DECLARED
from netkin.comparing.networks import NearestNetworks, atom_similarity, nearest_networks, times
from netkin.comparing.sides import named_models
from netkin.comparing.spec import takes_options
from netkin.errors import InvalidValue, NameClash, ShapeError, require_at_least, require_listed
from netkin.progress import showing, with_progress
from netkin.representations.filters import (
    AtomConv2d,
    exact_count,
    filter_matrix,
    filters_in,
    freeze_except,
    leading_atoms,
    put,
    with_atoms,
)
from netkin.representations.hooks import main_tensor
from netkin.representations.layers import Spec, choose, modules, unwrapped
from netkin.sources.names import by_name
from netkin.sources.weights import keep_remark
from netkin.training import Hook

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Decorrelation", "NearestNetworks", "Sharing", "atom_similarity", "nearest_networks", "share_coefficients",
]  # fmt: skip


JOINT = "joint"
EXACT = 128  # rows or columns of filters up to which a singular value decomposition is quick
FilterLayer = nn.Conv2d | AtomConv2d


@dataclass(frozen=True, eq=False)
class Sharing:
    """Networks that share the coefficients of each layer, and how much of each network that form explains.

    `explained[layer][network]` is the share of the filters' sum of squares, from 0 to 1, that the shared coefficients
    reach. `control` is the mean share for the same networks with their channels shuffled, which differ in nothing but
    the order of channels: what goes beyond it is what the networks have in common. `left` says which convolutions are
    as they were, and why.
    """

    models: Mapping[str, nn.Module]
    explained: Mapping[str, Mapping[str, float]]
    control: Mapping[str, float]
    source: str
    left: Mapping[str, str]

    def __str__(self) -> str:
        origin = "fitted to all" if self.source == JOINT else f"of {self.source!r}"
        lines = [f"{len(self.models)} networks with coefficients {origin}; shares of the filters that they explain:"]
        for layer, own in self.explained.items():
            shares = ", ".join(f"{share:.3f}" for share in list(own.values())[:8]) + ", ..." * (len(own) > 8)
            lines.append(f"{layer}: {shares} (channels shuffled: {self.control[layer]:.3f})")
        return "\n".join([*lines, *(f"{name}: left as it is, {why}" for name, why in self.left.items())])


@by_name(models="models")
@takes_options(declared={"progress": DECLARED["progress"]})
def share_coefficients(
    models: Mapping[str, nn.Module] | Iterable[nn.Module],
    atoms: int | None = None,
    *,
    source: str = JOINT,
    block: int | None = None,
    fused: bool = True,
    train_only: str | Sequence[str] = (),
    **options: Any,
) -> Sharing:
    """Return copies of networks in which each layer has atoms of its own and coefficients that all share.

    With ``source="joint"`` the coefficients are those that leave the least error in all networks together: a truncated
    singular value decomposition of their filters side by side. Or they are the best ones of the network that `source`
    names. The coefficients are orthonormal, so that `atom_cosine` is the cosine of the filters in their shared form.

    Networks with different initialisations have little in common beyond chance: read `explained` before the similarity.

    Args:
        models: networks of one architecture, by name or in a row.
        atoms: how many atoms a layer has; by default as many as a kernel has numbers, or as layers of atoms have.
        source: "joint" for coefficients that fit all, or the name of the network whose coefficients the others get.
        block: for networks of different widths, the side of the block of coefficients that is repeated over channels.
        fused: whether the new layers make their filters first (see `AtomConv2d`).
        train_only: what may be trained further, "atoms" or layers by name; all where not given.

    Example:
        >>> start = nn.Sequential(nn.Conv2d(3, 8, 3))
        >>> shared = share_coefficients({"a": start, "b": nn.Sequential(nn.Conv2d(3, 8, 3))}, source="a")
        >>> round(shared.explained["0"]["a"], 6), shared.explained["0"]["b"] < 1
        (1.0, True)
    """
    given = _given(models, source, atoms)
    found = {name: filters_in(model) for name, model in given.items()}
    made = {name: copy for name, (copy, _, _) in found.items()}
    explained, control = dict[str, dict[str, float]](), dict[str, float]()
    names = _common_layers({name: layers for name, (_, layers, _) in found.items()})
    with showing(options.get("progress")):
        for layer in with_progress(names, "sharing coefficients", "layers"):
            own = {name: layers[layer] for name, (_, layers, _) in found.items()}
            count = atoms or max(map(exact_count, own.values()))
            shared = _Layer(own, _block_of(layer, own, block), source, count)
            filters = {name: filter_matrix(one) for name, one in own.items()}
            U, D, explained[layer] = shared.fitted(filters)
            control[layer] = shared.control(filters)
            for name, one in own.items():
                put(made[name], one, with_atoms(one, U, D[name], fused=fused, block=shared.block))
    for name, model in given.items():
        keep_remark(model, made[name])
    for network in made.values() if train_only else ():
        freeze_except(network, train_only)
    return Sharing(
        made, explained, control, source, {k: why for _, _, left in found.values() for k, why in left.items()}
    )


def _given(models: Any, source: str, atoms: Any) -> dict[str, nn.Module]:
    """Return the networks by name; refuse too few of them, and options that mean nothing."""
    given = named_models(models)
    if len(given) < 2:
        raise InvalidValue(f"coefficients are shared by two networks or more; got {len(given)}.", argument="models")
    if JOINT in given:
        raise NameClash("a network can't be named 'joint', which is a `source` of coefficients; name it otherwise.")
    require_listed("source", source, (JOINT, *given))
    if atoms is not None:
        require_at_least(1, atoms=atoms)
    return given


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of all networks: as it is, and as matrices of filters."""

    own: Mapping[str, FilterLayer]
    block: tuple[int, int]
    source: str
    atoms: int

    def fitted(self, filters: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
        """Return the coefficients, the atoms of each network, and how much of each network they explain."""
        copies = {name: F.shape[0] / math.prod(self.block) for name, F in filters.items()}
        means = {name: _mean_block(F, self.own[name], self.block) for name, F in filters.items()}
        sides = [means[name] * copies[name] ** 0.5 for name in (means if self.source == JOINT else [self.source])]
        U = _leading(torch.cat(sides, 1), self.atoms)
        D = {name: U.T @ mean for name, mean in means.items()}
        totals = {name: float(F.square().sum()) for name, F in filters.items()}
        shares = {name: copies[name] * float(D[name].square().sum()) for name in filters}
        return U, D, {name: min(1.0, shares[name] / total) if total else 1.0 for name, total in totals.items()}

    def control(self, filters: Mapping[str, Tensor]) -> float:
        """Return the mean share that is explained of networks whose channels are shuffled, each in its own order."""
        generator = torch.Generator().manual_seed(0)
        shuffled = {name: _shuffled(F, self.own[name], generator) for name, F in filters.items() if name != self.source}
        _, _, shares = self.fitted(dict(filters) | shuffled)
        return sum(shares[name] for name in shuffled) / len(shuffled)


def _leading(F: Tensor, count: int) -> Tensor:
    """Return the leading left singular vectors of filters side by side; of many networks, from the smaller Gram matrix.

    That is about three times as fast as a singular value decomposition, and misses only rounding of the sum of squares.
    """
    rows, columns = F.shape
    if min(rows, columns) <= EXACT:
        return leading_atoms(F, count)[0]
    U = torch.linalg.eigh(F @ F.T if rows < columns else F.T @ F).eigenvectors.flip(1)[:, :count]
    U = U if rows < columns else torch.linalg.qr(F @ U).Q
    D = U.T @ F
    return U * torch.where(D.gather(1, D.abs().argmax(1, keepdim=True)) < 0, -1.0, 1.0).to(U).T


def _shuffled(F: Tensor, layer: FilterLayer, generator: torch.Generator) -> Tensor:
    cube = F.reshape(-1, layer.out_channels, F.shape[1])
    rows, columns = (torch.randperm(size, generator=generator) for size in cube.shape[:2])
    return cube[rows][:, columns].flatten(0, 1)


def _mean_block(F: Tensor, layer: FilterLayer, block: tuple[int, int]) -> Tensor:
    """Return the mean of all blocks of channels, which is what repeated coefficients can stand for at best."""
    rows, columns = block
    parts = F.reshape(layer.in_channels // layer.groups // rows, rows, layer.out_channels // columns, columns, -1)
    return parts.mean((0, 2)).flatten(0, 1)


def _common_layers(found: Mapping[str, Mapping[str, FilterLayer]]) -> list[str]:
    """Return the names of the layers, which must be the same in all networks."""
    first, layers = next(iter(found.items()))
    for name, own in found.items():
        if list(own) != list(layers):
            apart = sorted(set(own) ^ set(layers)) or list(own)
            raise ShapeError(
                f"networks that share coefficients have the same convolutions; {first!r} and {name!r} differ in "
                f"{apart[0]!r}."
            )
    return list(layers)


def _block_of(layer: str, own: Mapping[str, FilterLayer], block: int | None) -> tuple[int, int]:
    """Return the block of coefficients that fits a layer of all networks; the whole layer where all are of one size."""
    shapes: dict[str, Any] = {name: tuple(one.weight.shape) for name, one in own.items()}
    first, shape = next(iter(shapes.items()))
    for name, other in shapes.items():
        if other[2:] != shape[2:]:
            raise ShapeError(
                f"layer {layer!r} has kernels of {times(shape[2:])} in {first!r} and of {times(other[2:])} in "
                f"{name!r}; atoms are shared among kernels of one size."
            )
        if block is None and other != shape:
            raise ShapeError(
                f"layer {layer!r} is {times(shape[:2])} channels in {first!r} and {times(other[:2])} in {name!r}; "
                "pass `block=`, the side of a block of coefficients that is repeated over channels, or use "
                "'grassmann(atoms=4)', which needs no shared coefficients."
            )
    if block is None:
        return shape[1], shape[0]
    require_at_least(1, block=block)
    sizes = list(shapes.values())
    return math.gcd(block, *(size[1] for size in sizes)), math.gcd(block, *(size[0] for size in sizes))


def channel_correlation(maps: Tensor) -> Tensor:
    """Return ``Σ_{i≠j} (ZᵀZ / rows)²_ij`` of a layer's output, n × channels × ... or n × channels.

    The rows of Z are the examples, and with maps their places, so that the value does not grow with the batch.

    Example:
        >>> float(channel_correlation(torch.tensor([[1.0, 1.0], [1.0, -1.0]])))
        0.0
        >>> float(channel_correlation(torch.tensor([[1.0, 2.0], [1.0, 2.0]])))
        8.0
    """
    if maps.ndim < 2:
        raise ShapeError(f"channels are the second axis of a layer's output; got shape {tuple(maps.shape)}.")
    with torch.autocast(maps.device.type, enabled=False):
        Z = maps.movedim(1, -1).flatten(0, -2).to(torch.promote_types(maps.dtype, torch.float32))
        gram = Z.T @ Z / len(Z)
        return (gram - gram.diagonal().diag()).square().sum()


class Decorrelation(Hook):
    """Adds β Σ_{i≠j} (ZᵀZ / rows)²_ij of some layers' outputs to the loss, while the `with` lasts.

    It is a hook of `nk.train`; in any other training loop add its `term()` to the loss after each forward pass. The
    paper's ZᵀZ is not divided by the rows, the examples times the places of a map: its β times rows² is the β here,
    3e-3 with 128 maps of 8 × 8 one of 2e5.

    Args:
        model: the network that is trained.
        beta: the factor of the term.
        layers: whose channels are kept apart, as in `nk.layers`; by default those of all convolutions.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
        >>> with Decorrelation(model, beta=0.1) as apart:
        ...     loss = model(torch.ones(2, 1, 3, 3)).sum() + apart.term()
        >>> loss.requires_grad, len(model[0]._forward_hooks)
        (True, 0)
    """

    def __init__(self, model: nn.Module, beta: float, layers: Spec = None):
        if not beta >= 0:
            raise InvalidValue(f"`beta` is a number of 0 or more; got {beta!r}.", argument="beta")
        known = modules(model)
        convs = [name for name, one in known.items() if isinstance(one, (nn.Conv2d, AtomConv2d))]
        self.names = convs if layers is None else choose(model, layers)
        if not self.names:
            raise InvalidValue("the model has no convolutions whose channels could be kept apart; name its `layers`.")
        self.model, self.beta, self.settings = unwrapped(model), beta, {"beta": beta, "layers": self.names}
        self._layers = [known[name] for name in self.names]
        self._terms: list[Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [self.model.register_forward_pre_hook(self._forget)]
        self._handles += [layer.register_forward_hook(self._see) for layer in self._layers]
        return self

    def __exit__(self, *fault: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._terms = [], []

    def term(self) -> Tensor:
        """Return β times the sum over the layers, of the forward pass that was just taken."""
        if not self._handles:
            raise InvalidValue("`Decorrelation` sees the outputs of a model inside its `with` alone.")
        if not self._terms:
            raise InvalidValue("the term is that of a forward pass with gradients; run the model on a batch first.")
        found, self._terms = self._terms, []
        return self.beta * torch.stack(found).sum()

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, step: int) -> Tensor:
        """Return the term, which `nk.train` adds to its loss."""
        return self.term()

    def _forget(self, *call: Any) -> None:
        self._terms = []

    def _see(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():  # of a copy: a ReLU that works in place is about to change the output
            self._terms.append(channel_correlation(main_tensor(output, "").clone()))
