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
from netkin.statistics.collector import Collector, CostEstimate, Key, Pair, Settings, Study, keys_of, label
from netkin.statistics.layer_rows import CAP, LayerRows, SampleSettings
from netkin.statistics.linear_algebra import power_of_two
from netkin.statistics.storage import Cached

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


class KernelSide(Cached):
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
        for part, numbers in sums.items():
            require_finite(numbers.detach(), f"{part} of {name}")  # a GPU is not waited for while batches come
        scales = _scales(sums)  # kernels are products of four such numbers, and their cosines of eight
        self.sums = {part: numbers * scales[part] for part, numbers in sums.items()}
        self.totals = {part: total * scales[part] for part, total in totals.items()}

    def kernel(self, kind: str, centring: str = "") -> Tensor:
        """Return the kernel matrix of the buckets; `centring` about the mean of "examples" or of "buckets"."""
        return self.once(("kernel", kind, centring), lambda: self._kernel(kind, centring))

    def _kernel(self, kind: str, centring: str) -> Tensor:
        kernel = self._of_parts(kind, "")
        if not centring:
            return kernel
        # a linear kernel about the mean of its examples is that of rows about their mean, which loses no digits
        plainly = centring == "buckets" or (self.is_exact and (kind in OF_KERNELS or self._is_psi(kind)))
        centred = _about_means(kernel) if plainly else self._of_parts(kind, centring)
        # what rounding leaves where all examples are the same (of products, sums or the examples) is nothing
        eps = torch.finfo(centred.dtype).eps
        noise = max(8 * eps if plainly else 64 * eps**2, 4 * self.resolution**2 / self.n**0.5)
        return centred * (centred.detach().norm() > noise * kernel.detach().norm())

    def root(self, kind: str) -> Tensor:
        """Return a matrix R with ``R Rᵀ`` the kernel."""
        return self.once(("root", kind), lambda: self._root(kind))

    def _root(self, kind: str) -> Tensor:
        kernel = self.kernel(kind)
        busy = (kernel != 0).any(1)  # LAPACK fails now and then where most buckets hold no example
        values, vectors = torch.linalg.eigh(kernel[busy][:, busy])
        root = kernel.new_zeros(len(kernel), len(values))
        root[busy] = vectors * values.clamp(min=0).sqrt()
        return root

    def _of_parts(self, kind: str, centring: str) -> Tensor:
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


class KernelPair(Pair):
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
        return {name: settings[name] for name in ("kernel", "buckets", "stacks", "seed") if name in settings}

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

    @classmethod
    def of(cls, X: Any, Y: Any, *, kernel: str = "hadamard", **unused: Any) -> Kernels:
        """Return the pair of two layers, each given as (features, gradients), or as features alone."""
        x, y = (exact_side(name, *features_and_gradients(Z, name, kernel)) for Z, name in ((X, "`X`"), (Y, "`Y`")))
        if x.n != y.n:
            raise ShapeError(f"`X` and `Y` must describe the same examples; got {x.n} rows and {y.n} rows.")
        return cls(x, y)


@dataclass(frozen=True, kw_only=True)
class LossSettings(Settings):
    """Which loss gradients are of."""

    target: str = "tempered"
    beta: float = 0.5
    outputs: str = "categorical"

    def lacking(self, wanted: LossSettings, names: Sequence[str]) -> str:
        """Return the first of the settings `names` that is wanted otherwise, as text; empty if none is."""
        for name in names:
            value, held = getattr(wanted, name), getattr(self, name)
            if value != held:
                return f"{name}={value} (these have {name}={held})"
        return ""


@dataclass(frozen=True)
class KernelSettings(LossSettings):
    """Which loss gradients are of, and whether they are needed at all."""

    gradients: bool = True

    def joined(self, other: KernelSettings) -> KernelSettings | None:
        if not other.gradients or not self.gradients:  # the loss counts for that with gradients alone
            return other if other.gradients else self
        return self if self == other else None


class LayerKernels(Collector):
    """The rows of features and gradients of many layers, a sample of them, to be read as kernels of both."""

    holds = "Kernels"
    feeds = frozenset({"activations", "gradients"})

    def __init__(self, names: Sequence[Key], settings: KernelSettings, *, seed: int = 0, chunks: int = 0):
        self.names, self.settings = list(names), settings
        self.features = LayerRows(self.names, cap=CAP, seed=seed, chunks=chunks)
        self.gradients: LayerRows | None = None  # whose layers are known from the first batch

    @classmethod
    def feeds_for(cls, settings: KernelSettings) -> frozenset[str]:
        return cls.feeds if settings.gradients else frozenset({"activations"})

    @classmethod
    def settings_for(cls, measure: Any) -> KernelSettings:
        gradients = checked_kernel(measure.settings["kernel"]) != "features"
        return KernelSettings(gradients, **{name: measure.settings[name] for name in LOSS})

    @classmethod
    def cost(cls, settings: KernelSettings, study: Study) -> CostEstimate | None:
        rows = LayerRows.cost(SampleSettings(CAP, 2), study)
        if rows is None:
            return None
        times, what = (2, "features and gradients") if settings.gradients else (1, "features")
        return replace(rows, bytes=times * rows.bytes, words=f"Kernels of {what}, a sample of at most {CAP:,} rows")

    @classmethod
    def start(cls, settings: KernelSettings, study: Study) -> Self:
        made = cls(keys_of(study.pair_blocks), settings, seed=study.seed, chunks=study.chunks)
        made.features.resolutions = study.resolutions
        return made

    def serves(self, settings: KernelSettings) -> str:
        if settings.gradients and not self.settings.gradients:
            return "the gradients"
        return self.settings.lacking(settings, LOSS if settings.gradients else ())

    def update(self, rows: Mapping[Any, Any], numbers: Any = None, *, owners: Mapping[Key, Any] | None = None) -> None:
        """Add rows of features and gradients of the same examples."""
        self.clear_cache()
        self.features.update({"activations": rows["activations"]}, numbers, owners=owners)
        gradients = rows.get("gradients")
        if gradients:
            if self.gradients is None:
                seed, chunks = self.features.seed, self.features.chunks
                self.gradients = LayerRows(list(gradients), cap=CAP, seed=seed, chunks=chunks)
            self.gradients.update({"activations": gradients}, numbers, owners=owners)

    def merge(self, other: Self) -> Self:
        self._require_alike(other, layers="names", settings="settings")
        made = type(self)(self.names, self.settings)
        made.features = self.features.merge(other.features)
        made.gradients = self.gradients or other.gradients
        if self.gradients is not None and other.gradients is not None:
            made.gradients = self.gradients.merge(other.gradients)
        return made

    def side(self, key: Key, without: int | None = None) -> KernelSide:
        """Return one layer, without the examples of one chunk."""

        def make() -> KernelSide:
            F, G = self.features.sample(key, without).X, None
            if self.gradients is not None and key in self.gradients.names:
                G = self.gradients.sample(key, without).X
            return exact_side(label(key), F, G, self.features.resolutions.get(key, 0.0))

        return self.once((key, without), make)

    def pair(self, a: Key, b: Key, without: int | None = None) -> Kernels:
        self.features.pair(a, b, without)  # refuses layers whose rows do not pair up
        return Kernels(self.side(a, without), self.side(b, without))

    def exactness_of(self, pairs: Sequence[tuple[Key, Key]]) -> str:
        return self.features.exactness_of(pairs)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return self.features.chunk_sizes


def checked_kernel(kernel: str) -> str:
    """Return a kernel's name if it is one of ours; refuse it otherwise."""
    if kernel not in KERNELS:
        hint = did_you_mean(kernel, KERNELS) or "."
        raise UnknownName(f"no kernel named {kernel!r}{hint} There are {', '.join(KERNELS)}.", argument="kernel")
    return kernel


def features_and_gradients(layer: Any, name: str, kernel: str) -> tuple[Tensor, Tensor | None]:
    """Return the features and gradients of a layer, as matrices of one shape; gradients may be absent."""
    needs = "gradients" in KERNELS[checked_kernel(kernel)] or kernel in ("product", "psi")
    pair = layer if isinstance(layer, tuple) else (layer, None)
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
    scales = {part: power_of_two(numbers) or 1.0 for part, numbers in sums.items()}
    shared = min((scales[part] for part in ("features", "gradients") if part in scales), default=1.0)
    return scales | {part: shared for part in ("features", "gradients") if part in scales}


def _about_means(kernel: Tensor) -> Tensor:
    rows = kernel - kernel.mean(0, keepdim=True)
    return rows - rows.mean(1, keepdim=True)


def _transported(K: Tensor, L: Tensor) -> Tensor:
    """Return the kernel half way from the features' to the gradients' along optimal transport of Gaussians.

    Section 4 of Tang et al. (2020), 3: with T = K^-½ (K^½ L K^½)^½ K^-½, the kernel is (½I + ½T) K (½I + ½T).
    """
    values, vectors = torch.linalg.eigh(K)
    real = values > len(K) * torch.finfo(K.dtype).eps * values[-1]
    roots, V = values[real].sqrt(), vectors[:, real]
    inner = torch.linalg.eigh(V.mT @ L @ V * roots.unsqueeze(-1) * roots)
    middle = inner[1] * inner[0].clamp(min=0).sqrt() @ inner[1].mT
    T = V @ (middle / roots.unsqueeze(-1) / roots) @ V.mT
    half = (torch.eye(len(K), dtype=K.dtype, device=K.device) + T) / 2
    return half @ K @ half
