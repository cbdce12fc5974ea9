"""`Kernels` and `LayerKernels`: kernel matrices of features and gradients, exact over the same examples.

What two kernel matrices have in common is read here for sketches too, in which a bucket stands for several examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from netkin.arrays import as_matrix, require_finite, summing_dtype
from netkin.errors import NoValue, ShapeError, UnknownName, did_you_mean
from netkin.results.caveats import Caveat
from netkin.statistics import schema
from netkin.statistics.collector import Collector, CostEstimate, Key, Settings, Study, keys_of, label
from netkin.statistics.layer_rows import CAP, LayerRows, SampleSettings
from netkin.statistics.linear_algebra import power_of_two

if TYPE_CHECKING:
    from typing_extensions import Self

KERNELS = {  # of a layer's features and gradients, and what of them must be sketched
    "features": ("features",),
    "gradients": ("gradients",),
    "sum": ("features", "gradients"),
    "product": ("product",),
    "hadamard": ("features", "gradients"),
    "psi": ("psi",),
    "transport": ("features", "gradients"),
}
LOSS = ("target", "beta", "outputs")  # the settings of a loss
OF_KERNELS = ("hadamard", "transport")  # made of kernel matrices, which no sums of examples can centre


class KernelSide:
    """One layer: sums over buckets of its features, its gradients and what is made of both, M × width each.

    `totals` are the plain sums over all examples and `signs` the sums of the signs in each bucket: centred about the
    mean of the examples, a sum of the buckets is ``S X - (S 1) meanᵀ``. `is_exact` where every example is a bucket,
    `resolution` is the rounding unit of the examples as they came.
    """

    def __init__(
        self,
        name: str,
        sums: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
        signs: Tensor,
        n: int,
        resolution: float,
        is_exact: bool = False,
    ):
        self.name, self.signs, self.n, self.resolution, self.is_exact = name, signs, n, resolution, is_exact
        for part, one in sums.items():
            require_finite(one.detach(), f"{part} of {name}")  # a GPU is not waited for while batches come
        scales = _scales(sums)  # kernels are products of four such numbers, and their cosines of eight
        self.sums = {part: one * scales[part] for part, one in sums.items()}
        self.totals = {part: one * scales[part] for part, one in totals.items()}
        self._kernels: dict[tuple[str, str], Tensor] = {}
        self._roots: dict[str, Tensor] = {}

    def kernel(self, kind: str, centring: str = "") -> Tensor:
        """Return the kernel matrix of the buckets; `centring` about the mean of "examples" or of "buckets"."""
        if (kind, centring) not in self._kernels:
            made = self._made(kind, "")
            if centring:
                # a linear kernel about the mean of its examples is that of rows about their mean, which loses no digits
                plainly = centring == "buckets" or (self.is_exact and (kind in OF_KERNELS or self._is_psi(kind)))
                whole, made = made, _about_means(made) if plainly else self._made(kind, centring)
                # what rounding leaves where all examples are the same (of products, sums or the examples) is nothing
                eps = torch.finfo(made.dtype).eps
                noise = max(8 * eps if plainly else 64 * eps**2, 4 * self.resolution**2 / self.n**0.5)
                made = made * (made.detach().norm() > noise * whole.detach().norm())
            self._kernels[kind, centring] = made
        return self._kernels[kind, centring]

    def root(self, kind: str) -> Tensor:
        """Return a matrix R with ``R Rᵀ`` the kernel."""
        if kind not in self._roots:
            values, vectors = torch.linalg.eigh(self.kernel(kind))
            self._roots[kind] = vectors * values.clamp(min=0).sqrt()
        return self._roots[kind]

    def _made(self, kind: str, centring: str) -> Tensor:
        if kind in OF_KERNELS and centring:
            raise NoValue(
                f"kernel={kind!r} is made of sketched kernels, which can't be centred about the mean of the examples; "
                "take kernel='psi', or the measure that centres about the mean of the buckets."
            )
        kernels = [self._linear(part, centring) for part in KERNELS["hadamard" if self._is_psi(kind) else kind]]
        if kind == "transport":
            return _transported(*kernels)
        return kernels[0] * kernels[1] if kind == "hadamard" or self._is_psi(kind) else sum(kernels[1:], kernels[0])

    def _is_psi(self, kind: str) -> bool:
        """Whether the kernel is that of ``g fᵀ`` itself, which is the product of the kernels where these are exact."""
        return kind == "psi" and self.is_exact

    def _linear(self, part: str, centring: str) -> Tensor:
        if part not in self.sums:
            raise NoValue(f"{self.name} has no {part}: no path leads from it to the loss.")
        rows = self.sums[part]
        if centring:
            rows = rows - self.signs.unsqueeze(-1) * (self.totals[part] / self.n)
        return rows @ rows.mT


class KernelPair:
    """Two layers, each with the kernels of its features and gradients."""

    takes_matrices: ClassVar[bool] = False  # a layer is a pair of them

    def __init__(self, x: KernelSide, y: KernelSide):
        if len(x.signs) != len(y.signs):
            raise NoValue(
                f"{x.name} has {len(x.signs):,} buckets and {y.name} {len(y.signs):,}; use the same number for both."
            )
        self.x, self.y = x, y

    @classmethod
    def options(cls, facts: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the measure asks to be sketched, and how."""
        return {name: settings[name] for name in ("kernel", "buckets", "stacks", "seed") if name in settings}

    def caveats(self, facts: Any, settings: Mapping[str, Any]) -> list[Caveat]:
        """Return nothing: nothing is known that would mislead."""
        return []

    def alignment(self, kernel: str, centring: str = "") -> Tensor:
        """Return the cosine of the two kernel matrices."""
        K, L = (side.kernel(kernel, centring) for side in (self.x, self.y))
        return (K * L.to(K)).sum() / self._size(K, self.x) / self._size(L, self.y).to(K)

    def bures(self, kernel: str) -> Tensor:
        """Return the normalised Bures similarity of the two kernel matrices."""
        R, S = (side.root(kernel) for side in (self.x, self.y))
        return torch.linalg.svdvals(R.mT @ S.to(R)).sum() / self._size(R, self.x) / self._size(S, self.y).to(R)

    @staticmethod
    def _size(matrix: Tensor, side: KernelSide) -> Tensor:
        size = matrix.norm()
        if not bool(size > 0):
            raise NoValue(f"{side.name} is the same for all examples, or has no gradient.")
        return size


class Kernels(KernelPair):
    """Two layers with their exact kernels over the same examples."""

    collectors: ClassVar[tuple[type, ...]] = ()

    @classmethod
    def of(cls, X: Any, Y: Any, *, kernel: str = "hadamard", **unused: Any) -> Kernels:
        """Return the pair of two layers, each given as (features, gradients), or as features alone."""
        x, y = (exact_side(name, *given_rows(one, name, kernel)) for one, name in ((X, "`X`"), (Y, "`Y`")))
        if x.n != y.n:
            raise ShapeError(f"`X` and `Y` must describe the same examples; got {x.n} rows and {y.n} rows.")
        return cls(x, y)


@dataclass(frozen=True, kw_only=True)
class LossSettings(Settings):
    """Which loss gradients are of."""

    target: str = "tempered"
    beta: float = 0.5
    outputs: str = "categorical"


class LossCollector(Collector):
    """A collector of features and gradients."""

    feeds = frozenset({"activations", "gradients"})
    asking: ClassVar[type[LossSettings]]
    settled: Mapping[str, Any]  # the settings, as a file holds them

    @property
    def settings(self) -> Any:
        return self.asking.from_json(self.settled)

    def check(self) -> None:
        self.asking.from_json(self.settled)  # refuses those of other types

    @classmethod
    def loss_for(cls, settings: LossSettings) -> dict[str, Any]:
        return {"kind": settings.target, "beta": settings.beta, "outputs": settings.outputs}

    def _other(self, settings: Any, names: Sequence[str]) -> str:
        """Return the first of the settings `names` that differs here, as text."""
        found = ((name, getattr(settings, name), getattr(self.settings, name)) for name in names)
        return next((f"{name}={one} (these have {name}={mine})" for name, one, mine in found if one != mine), "")


@dataclass(frozen=True)
class KernelSettings(LossSettings):
    """Which loss gradients are of, and whether they are needed at all."""

    gradients: bool = True

    def joined(self, other: KernelSettings) -> KernelSettings | None:
        both = self.gradients or other.gradients
        mine, theirs = (replace(one, gradients=both) for one in (self, other))
        return mine if mine == theirs or not other.gradients else theirs if not self.gradients else None


class LayerKernels(LossCollector):
    """The rows of features and gradients of many layers, a sample of them, to be read as kernels of both."""

    kind = "LayerKernels"
    holds = "Kernels"
    stored = schema.fields(
        names=schema.NAMES, settled=schema.SETTINGS, features=schema.object_of(LayerRows),
        gradients=schema.none_or(schema.object_of(LayerRows)),
    )  # fmt: skip
    asking = KernelSettings

    def __init__(self, names: Sequence[Key], settings: KernelSettings, *, seed: int = 0, chunks: int = 0):
        self.names, self.settled = list(names), settings.to_json()
        self.features = LayerRows(self.names, cap=CAP, seed=seed, chunks=chunks)
        self.gradients: LayerRows | None = None  # whose layers are known from the first batch
        self.clear_cache()

    def check(self) -> None:
        super().check()
        fit = self.features.names == self.names and (
            self.gradients is None or self.features.has_rows_of(self.gradients)
        )
        schema.refuse_unless(fit, "the features and the gradients of layers")

    @classmethod
    def feeds_for(cls, settings: KernelSettings) -> frozenset[str]:
        return cls.feeds if settings.gradients else frozenset({"activations"})

    @classmethod
    def settings_for(cls, measure: Any) -> KernelSettings:
        own = measure.settings
        needs = checked_kernel(own["kernel"]) != "features"
        return KernelSettings(needs, **{name: own[name] for name in LOSS})

    @classmethod
    def cost(cls, settings: KernelSettings, study: Study) -> CostEstimate | None:
        rows = LayerRows.cost(SampleSettings(CAP, 2), study)
        if rows is None:
            return None
        twice = 2 if settings.gradients else 1
        what = "features and gradients" if settings.gradients else "features"
        return replace(
            rows, bytes=twice * rows.bytes, words=f"Kernels of {what}, a sample of at most {CAP:,} rows",
            operations=None if rows.operations is None else twice * rows.operations,
        )  # fmt: skip

    @classmethod
    def start(cls, settings: KernelSettings, study: Study) -> Self:
        made = cls(keys_of(study.pair_blocks), settings, seed=study.seed, chunks=study.chunks)
        made.features.resolutions = study.resolutions
        return made

    @classmethod
    def of(cls, rows: Mapping[Key, Any], *, kernel: str = "hadamard") -> Self:
        """Return all pairs of some layers, each given as (features, gradients) or as features alone, differentiably."""
        given = {key: given_rows(one, label(key), kernel) for key, one in rows.items()}
        gradients = {key: G for key, (_, G) in given.items() if G is not None}
        made = cls(list(rows), KernelSettings(bool(gradients)))
        made.features = LayerRows.of({key: F for key, (F, _) in given.items()})
        made.gradients = LayerRows.of(gradients) if gradients else None
        return made

    def serves(self, settings: KernelSettings) -> str:
        if settings.gradients and not self.settings.gradients:
            return "the gradients"
        return self._other(settings, LOSS if settings.gradients else ())

    def update(self, rows: Mapping[Any, Any], numbers: Any = None, **more: Any) -> None:
        """Add rows of features and gradients of the same examples."""
        self.clear_cache()
        self.features.update({"activations": rows["activations"]}, numbers, **more)
        found = rows.get("gradients")
        if found:
            if self.gradients is None:
                own = self.features
                self.gradients = LayerRows(list(found), cap=CAP, seed=own.seed, chunks=own.chunks)
            owners = {key: one for key, one in more.get("owners", {}).items() if key in found}
            self.gradients.update({"activations": found}, numbers, **({"owners": owners} if owners else {}))

    def merge(self, other: Self) -> Self:
        self._refuse_unlike(other, layers="names", settings="settled")
        made = type(self)(self.names, self.settings)
        made.features = self.features.merge(other.features)
        given = [one.gradients for one in (self, other) if one.gradients is not None]
        made.gradients = given[0].merge(given[1]) if len(given) == 2 else given[0] if given else None
        return made

    def side(self, key: Key, without: int | None = None) -> KernelSide:
        """Return one layer, without the examples of one chunk."""
        if (key, without) not in self._sides:
            F, G = self.features.sample(key, without).X, None
            if self.gradients is not None and key in self.gradients.names:
                G = self.gradients.sample(key, without).X
            self._sides[key, without] = exact_side(label(key), F, G, self.features.resolutions.get(key, 0.0))
        return self._sides[key, without]

    def pair(self, a: Key, b: Key, without: int | None = None) -> Kernels:
        rows = self.features.pair(a, b, without)  # refuses layers whose rows do not pair up
        assert rows.n > 0
        return Kernels(self.side(a, without), self.side(b, without))

    def clear_cache(self) -> None:
        self._sides: dict[tuple[Key, int | None], KernelSide] = {}

    def exactness_of(self, pairs: Sequence[tuple[Key, Key]]) -> str:
        return self.features.exactness_of(pairs)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return self.features.chunk_sizes


def checked_kernel(kernel: str) -> str:
    """Return a kernel's name if it is one of ours; refuse it otherwise."""
    if kernel not in KERNELS:
        hint = did_you_mean(kernel, KERNELS) or "."
        raise UnknownName(f"no kernel named {kernel!r}{hint} There are {', '.join(KERNELS)}.")
    return kernel


def given_rows(one: Any, name: str, kernel: str) -> tuple[Tensor, Tensor | None]:
    """Return the features and gradients of a layer, as matrices of one shape; gradients may be absent."""
    needs = "gradients" in KERNELS[checked_kernel(kernel)] or kernel in ("product", "psi")
    pair = one if isinstance(one, tuple) else (one, None)
    features, gradients = (None if part is None else as_matrix(part, name) for part in pair)
    if features is None or (needs and gradients is None):
        raise ShapeError(f"the kernel {kernel!r} needs {name} as a tuple (features, gradients).")
    if gradients is not None and gradients.shape != features.shape:
        raise ShapeError(
            f"the features of {name} have shape {tuple(features.shape)} and its gradients {tuple(gradients.shape)}; "
            "take both at the same layer and shape."
        )
    return features, gradients


def exact_side(name: str, features: Tensor, gradients: Tensor | None, resolution: float = 0.0) -> KernelSide:
    """Return a layer in which every example is a bucket of its own.

    `resolution` is the rounding unit of the data as they came, if that is coarser than the features' own.
    """
    double, eps = summing_dtype(features.device), max(resolution, torch.finfo(features.dtype).eps)
    parts = {"features": features.to(double)} | ({} if gradients is None else {"gradients": gradients.to(double)})
    if gradients is not None:
        parts["product"] = parts["features"] * parts["gradients"]
    totals = {part: rows.sum(0) for part, rows in parts.items()}
    return KernelSide(name, parts, totals, torch.ones(len(features)).to(parts["features"]), len(features), eps, True)


def _scales(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return a power of two for each part that brings its numbers near one; features and gradients share theirs."""
    own = {part: power_of_two(one) or 1.0 for part, one in sums.items()}
    shared = min((own[part] for part in ("features", "gradients") if part in own), default=1.0)
    return own | {part: shared for part in ("features", "gradients") if part in own}


def _about_means(kernel: Tensor) -> Tensor:
    rows = kernel - kernel.mean(0, keepdim=True)
    return rows - rows.mean(1, keepdim=True)


def _transported(K: Tensor, L: Tensor) -> Tensor:
    """Return the kernel half way from the features' to the gradients' along optimal transport of Gaussians.

    Section 4 of Tang et al. (2020), 3: with T = K^-½ (K^½ L K^½)^½ K^-½, the kernel is (½I + ½T) K (½I + ½T).
    """
    values, vectors = torch.linalg.eigh(K)
    kept = values > len(K) * torch.finfo(K.dtype).eps * values[-1]
    roots, V = values[kept].sqrt(), vectors[:, kept]
    inner = torch.linalg.eigh(V.mT @ L @ V * roots.unsqueeze(-1) * roots)
    middle = inner[1] * inner[0].clamp(min=0).sqrt() @ inner[1].mT
    T = V @ (middle / roots.unsqueeze(-1) / roots) @ V.mT
    half = (torch.eye(len(K), dtype=K.dtype, device=K.device) + T) / 2
    return half @ K @ half
