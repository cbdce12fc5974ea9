"""The filters of layers, for measures that are fed by weights: atoms with their coefficients, or plain kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from netkin.arrays import as_tensor, at_least_single, require_finite
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName
from netkin.identity import weights_digest
from netkin.results.caveats import Caveat
from netkin.statistics.collector import (
    Collector,
    CostEstimate,
    Key,
    Pair,
    Settings,
    Study,
    require_pair,
    shape_in_words,
)
from netkin.statistics.storage import Stored

GAUGES = ("stored", "orthonormal")
EVEN = 1.5  # the largest ratio of singular values of coefficients that count as orthonormal but for a factor


@dataclass(eq=False)
class FilterSide(Stored):
    """What is kept of one layer: its atoms as m × k², and which coefficients they go with; or its plain filters."""

    name: str
    atoms: Tensor | None = None  # m × k², float64
    coefficients: str = ""  # their digest
    gram: Tensor | None = None  # αᵀα, m × m
    spread: Tensor | None = None  # FᵀF of the filters as a matrix, k² × k²
    kernel: tuple[int, ...] = ()
    weight: Tensor | None = None  # all weights of the layer, in a row where these are several tensors
    shapes: tuple[tuple[int, ...], ...] = ()  # of these tensors
    resolution: float = 0.0  # the rounding unit of the filters as they came

    def require_atoms(self) -> Tensor:
        """Return the layer's atoms, m × k²; a layer of plain filters is refused."""
        if self.atoms is None:
            raise NoValue(
                "plain filters have no atoms; `nk.share_coefficients` makes networks whose atoms can be compared, "
                "and 'grassmann(atoms=4)' reads plain filters."
            )
        return self.atoms

    def basis(self, count: int) -> Tensor:
        """Return an orthonormal basis of the span of the atoms, or of the `count` leading directions of the filters."""
        if count < 0:
            raise InvalidValue(
                f"`atoms` is a number of directions, or 0 for the layer's own atoms; got {count!r}.", argument="atoms"
            )
        spread = self.require_filters()
        if count:
            values, vectors = torch.linalg.eigh(spread)
            sizes, directions = values.flip(0).clamp(min=0).sqrt(), vectors.flip(1).T
        elif self.atoms is None:
            raise NoValue(f"{self.name} has plain filters; say how many directions: 'grassmann(atoms=4)'.")
        else:
            _, sizes, directions = torch.linalg.svd(self.atoms, full_matrices=False)
        # of a Gram matrix half of the digits are left
        eps = (torch.finfo(sizes.dtype).eps * len(directions)) ** (0.5 if count else 1)
        rank = int((sizes > sizes[0] * max(eps, 4 * self.resolution)).sum())
        return directions[: min(rank, count or rank)]

    def require_filters(self) -> Tensor:
        """Return `spread`; a layer without kernels larger than 1 × 1, or with nothing but zeros in them, is refused."""
        if self.spread is None:
            raise NoValue("a layer without filters larger than 1 × 1 has no atoms and no subspace of them.")
        if not bool(self.spread.any()):
            raise NoValue(f"the filters of {self.name} are all zero.")
        return self.spread


class Filters(Pair):
    """Two layers' filters, as measures of atoms, subspaces and weights read them."""

    takes_matrices: ClassVar[bool] = False  # it takes atoms, or weights, of a layer each

    def __init__(self, x: FilterSide, y: FilterSide):
        self.x, self.y = x, y

    @classmethod
    def of(cls, X: Any, Y: Any) -> Filters:
        """Return the pair of two sets of atoms, m × height × width each, that go with the same coefficients."""
        return cls(_side_of_array(X, "X"), _side_of_array(Y, "Y"))

    def caveats(self, facts: Any, settings: Mapping[str, Any]) -> list[Caveat]:
        caveat = None
        if "atoms" in settings:
            caveat = self._fullness(settings["atoms"])
        elif settings.get("gauge") == "stored" and self.x.gram is not None and self._shares_coefficients:
            caveat = gauge_caveat({self.x.name: self.x.gram})
        return [] if caveat is None else [caveat]

    def atoms(self, gauge: str) -> tuple[Tensor, Tensor]:
        """Return the atoms of both as unit vectors, if they go with the same coefficients."""
        require_gauge(gauge)
        self._require_filters_of_one_size()
        x, y = self.x.require_atoms(), self.y.require_atoms()
        _require_one_count(x, y)
        if not self._shares_coefficients:
            raise NoValue(
                "layers with coefficients of their own have no atoms that could be compared; `nk.share_coefficients` "
                "makes networks that share them, and 'grassmann' needs none shared."
            )
        if gauge == "orthonormal" and self.x.gram is not None:
            values, vectors = torch.linalg.eigh(self.x.gram)
            root = values.clamp(min=0).sqrt()[:, None] * vectors.T
            x, y = root @ x, root @ y
        return _unit(x, f"the atoms of {self.x.name}"), _unit(y, f"the atoms of {self.y.name}")

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of both as unit vectors."""
        vectors = []
        for side in (self.x, self.y):
            if side.weight is None:
                raise NoValue(f"{side.name} has no weights of its own; those of layers inside it are theirs.")
            if side.shapes != self.x.shapes:
                raise NoValue("weights of different shapes have no cosine; compare layers of one shape.")
            vectors.append(_unit(side.weight, f"the weights of {side.name}"))
        return vectors[0], vectors[1]

    def bases(self, atoms: int) -> tuple[Tensor, Tensor]:
        """Return orthonormal bases of both subspaces, of the atoms' span or of so many leading directions."""
        self._require_filters_of_one_size()
        if not atoms and self.x.atoms is not None and self.y.atoms is not None:
            _require_one_count(self.x.atoms, self.y.atoms)
        return self.x.basis(atoms), self.y.basis(atoms)

    @property
    def _shares_coefficients(self) -> bool:
        return self.x.coefficients == self.y.coefficients

    def _require_filters_of_one_size(self) -> None:
        for side in (self.x, self.y):
            side.require_filters()
        if self.x.kernel != self.y.kernel:
            sizes = [shape_in_words(side.kernel) for side in (self.x, self.y)]
            raise NoValue(
                f"kernels of {sizes[0]} and of {sizes[1]} have no common space; compare layers of one kernel size."
            )

    def _fullness(self, atoms: int) -> Caveat | None:
        """Return a caveat if the subspaces are the whole space of kernels."""
        size = math.prod(self.x.kernel)
        with suppress(NoValue):  # which is reported when the pair is measured
            count = min(len(basis) for basis in self.bases(atoms))
            if count == size:
                where = f"kernels of {shape_in_words(self.x.kernel)}"
                sentence = (
                    f"{count} independent atoms span the whole space of {where}, in which any two subspaces are the "
                    f"same: 'grassmann' says nothing there; take fewer than {size} atoms."
                )
                return Caveat("whole-space", sentence, size=count)
        return None


def _require_one_count(x: Tensor, y: Tensor) -> None:
    if len(x) != len(y):
        raise NoValue(f"one layer has {len(x)} atoms and the other {len(y)}; decompose both into the same number.")


def gauge_caveat(grams: Mapping[str, Tensor]) -> Caveat | None:
    """Return a caveat on the layer whose coefficients, by their αᵀα, are the furthest from orthonormal, if any is."""
    ratios = {name: _singular_ratio(gram) for name, gram in grams.items()}
    name, ratio = max(ratios.items(), key=lambda item: item[1], default=("", 0.0))
    if ratio <= EVEN:
        return None
    more = sum(other > EVEN for other in ratios.values()) - 1
    others = f", and those of {more} other layer{'s' if more > 1 else ''} are not either" if more else ""
    sentence = (
        f"the coefficients of {name} are not orthonormal (their singular values differ by a factor of {ratio:.2g})"
        f"{others}, so that the cosine of atoms depends on how filters are split into atoms and coefficients; "
        "gauge='orthonormal' does not."
    )
    return Caveat("uneven-coefficients", sentence, size=ratio)


def _singular_ratio(gram: Tensor) -> float:
    """Return the ratio of the largest to the smallest singular value of coefficients, at most 1e6."""
    values = torch.linalg.eigvalsh(gram)
    return float((values[-1] / values[0].clamp(min=values[-1] * 1e-12)).sqrt())


def require_gauge(gauge: str) -> None:
    """Refuse a choice of atoms that there is not."""
    if gauge not in GAUGES:
        raise UnknownName(f"`gauge` is {' or '.join(map(repr, GAUGES))}; got {gauge!r}.", argument="gauge")


def orthonormal_gauge(atoms: Tensor, coefficients: Tensor) -> Tensor:
    """Return atoms, ... × m × k², as those that make the same filters with orthonormal coefficients."""
    A = coefficients.to(atoms).flatten(1)
    return torch.linalg.qr(A.T, mode="r").R @ atoms


def _side_of_array(array: Any, name: str) -> FilterSide:
    tensor = as_tensor(array, name)
    require_finite(tensor, f"`{name}`")
    if tensor.ndim < 2:
        raise ShapeError(
            f"`{name}` must hold atoms, m × height × width, or the weights of a layer; got shape "
            f"{tuple(tensor.shape)}.",
            argument=name,
        )
    atoms = tensor.cpu().double().flatten(1)
    kernel, eps = tuple(tensor.shape[1:]), torch.finfo(tensor.dtype).eps
    return FilterSide(f"`{name}`", atoms, "given", None, atoms.T @ atoms, kernel, atoms, (tuple(atoms.shape),), eps)


def _unit(tensor: Tensor, what: str) -> Tensor:
    vector = tensor.flatten().double()
    size = vector.norm()
    if not bool(size > 0):
        raise NoValue(f"{what} are all zero.")
    return vector / size


# --- the collector ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilterSettings(Settings):
    """Whether whole weights are needed, beside atoms and small matrices."""

    whole: bool = False

    def joined(self, other: FilterSettings) -> FilterSettings:
        return FilterSettings(self.whole or other.whole)


class LayerFilters(Collector):
    """The filters of many layers: atoms, a digest of their coefficients, and small Gram matrices; weights if asked."""

    holds = "Filters"
    feeds = frozenset({"weights"})
    needs = "filters larger than 1 × 1"

    def __init__(self, whole: bool = False):
        self.whole = whole
        self.sides: dict[Key, FilterSide] = {}

    @classmethod
    def settings_for(cls, measure: Any) -> FilterSettings:
        return FilterSettings(not {"gauge", "atoms"} & set(measure.settings))

    @classmethod
    def cost(cls, settings: FilterSettings, study: Study) -> CostEstimate:
        if settings.whole:
            return CostEstimate(8 * sum(layer.width for layer in study.sizes), "weights as they are", "the weights")
        return CostEstimate(2**14 * len(study.layers), "atoms and small Gram matrices of filters", "the atoms")

    @classmethod
    def start(cls, settings: FilterSettings, study: Study) -> LayerFilters:
        return cls(settings.whole)

    @classmethod
    def takes(cls, settings: FilterSettings, tensors: Mapping[str, Tensor]) -> bool:
        return bool(weights_in(tensors)) if settings.whole else has_filters(tensors)

    def serves(self, settings: FilterSettings) -> str:
        return "the weights" if settings.whole and not self.whole else ""

    def update(self, rows: Mapping[Any, Any], numbers: Any = None, *, owners: Mapping[Key, Any] | None = None) -> None:
        """Read the weights of all layers, which come once."""
        for key, tensors in rows["weights"].items():
            name = f"layer {key[1]!r} of {key[0]!r}" if isinstance(key, tuple) else f"layer {key!r}"
            self.sides[key] = side_of(name, {part: tensor.detach() for part, tensor in tensors.items()}, self.whole)

    def merge(self, other: LayerFilters) -> LayerFilters:
        self._require_alike(other, settings="whole")
        return self  # all parts of the data have the same models

    def pair(self, a: Key, b: Key, without: int | None = None) -> Filters:
        require_pair(a, b, list(self.sides), "filters")
        return Filters(self.sides[a], self.sides[b])


def weights_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights among the tensors of a layer: matrices, kernels and scales of norm layers, but no biases.

    Example:
        >>> layer = torch.nn.LSTM(4, 2)
        >>> list(weights_in(dict(layer.named_parameters())))
        ['weight_hh_l0', 'weight_ih_l0']
    """
    return {
        name: tensor for name, tensor in sorted(tensors.items())
        if tensor.is_floating_point() and tensor.ndim > (name != "weight")
    }  # fmt: skip


def has_filters(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the tensors of a layer hold kernels larger than 1 × 1."""
    held = tensors.get("atoms", tensors.get("weight"))
    if held is None or held.ndim != (3 if "atoms" in tensors else 4):
        return False
    return "coefficients" in tensors or held.shape[2:].numel() > 1


def side_of(name: str, tensors: Mapping[str, Tensor], whole: bool) -> FilterSide:
    """Return what is kept of a layer with these tensors, by their names in it."""
    for part, tensor in tensors.items():
        require_finite(tensor, f"{part!r} of {name}")
    if "atoms" not in tensors:
        weights = [_raised(tensor) for tensor in weights_in(tensors).values()] if whole else []
        weight = torch.cat([tensor.flatten() for tensor in weights]) if len(weights) > 1 else next(iter(weights), None)
        shapes = tuple(tuple(tensor.shape) for tensor in weights)
        if not has_filters(tensors):
            return FilterSide(name, weight=weight, shapes=shapes)
        kernels = tensors["weight"]
        F, eps = kernels.cpu().double().flatten(2).flatten(0, 1), torch.finfo(kernels.dtype).eps
        return FilterSide(name, None, "", None, F.T @ F, tuple(kernels.shape[2:]), weight, shapes, eps)
    atoms, alpha = (tensors[part].cpu().double() for part in ("atoms", "coefficients"))
    D, A, eps = atoms.flatten(1), alpha.flatten(1), torch.finfo(tensors["atoms"].dtype).eps
    gram = A @ A.T
    filters = None
    if whole and "weight" in tensors:  # where coefficients are repeated over channels
        filters = _raised(tensors["weight"])
    elif whole:
        filters = torch.einsum("aio,ahw->oihw", alpha, atoms)
    digest, kernel = weights_digest({"coefficients": tensors["coefficients"]}), tuple(atoms.shape[1:])
    shapes = () if filters is None else (tuple(filters.shape),)
    return FilterSide(name, D, digest, gram, D.T @ gram @ D, kernel, filters, shapes, eps)


def _raised(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU as it is, or in float32 where it is only half of that."""
    return tensor.to("cpu", at_least_single(tensor.dtype))
