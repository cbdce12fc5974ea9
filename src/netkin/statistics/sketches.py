"""`LayerSketches` and `Sketch`: features and gradients summed into random buckets, for data sets of any sizes.

Every example falls into one of M buckets with a random sign (CountSketch), the same for its features and its gradients.
The sums of the buckets stand for the examples: inner products of sketches are right on average, with an error that
falls with √M. Bucket and sign follow from the seed and from what the example is, so that the order of the data, their
batches and the parts in which they were read do not matter, and examples of two data sets have nothing in common.

`Kernels` is the same without sketching: every example is a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from netkin.arrays import as_matrix, summing_dtype
from netkin.errors import NoValue, ShapeError, UnknownName, ValueFault, did_you_mean
from netkin.statistics.collector import (
    Collector,
    Key,
    Price,
    Settings,
    Study,
    hashes,
    key_from,
    label,
    name_of,
    refuse_other_width,
    row_numbers,
)

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
OF_KERNELS = ("hadamard", "transport")  # made of kernel matrices, which no sums of examples can centre
PSI_WIDTH = 2048  # numbers that stand for g fᵀ


class KernelSide:
    """One layer: sums over buckets of its features, its gradients and what is made of both, M × width each.

    `totals` are the plain sums over all examples and `signs` the sums of the signs in each bucket: centred about the
    mean of the examples, a sum of the buckets is ``S X - (S 1) meanᵀ``. `is_exact` where every example is a bucket.
    """

    def __init__(
        self,
        name: str,
        sums: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
        signs: Tensor,
        n: int,
        is_exact: bool = False,
    ):
        self.name, self.sums, self.totals, self.signs, self.n, self.is_exact = name, sums, totals, signs, n, is_exact
        self._kernels: dict[tuple[str, str], Tensor] = {}
        self._roots: dict[tuple[str, str], Tensor] = {}

    def kernel(self, kind: str, centring: str = "") -> Tensor:
        """Return the kernel matrix of the buckets; `centring` about the mean of "examples" or of "buckets"."""
        if (kind, centring) not in self._kernels:
            plainly = centring == "buckets" or (centring == "examples" and self.is_exact)
            made = self._made(kind, "" if plainly else centring)
            self._kernels[kind, centring] = _about_means(made) if plainly else made
        return self._kernels[kind, centring]

    def root(self, kind: str, centring: str = "") -> Tensor:
        """Return a matrix R with ``R Rᵀ`` the kernel."""
        if (kind, centring) not in self._roots:
            values, vectors = torch.linalg.eigh(self.kernel(kind, centring))
            self._roots[kind, centring] = vectors * values.clamp(min=0).sqrt()
        return self._roots[kind, centring]

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
            raise NoValue(f"{self.name} holds no {part}; collect with a measure that reads them.")
        rows = self.sums[part]
        if centring:
            rows = rows - self.signs.unsqueeze(-1) * (self.totals[part] / self.n)
        return rows @ rows.mT


class KernelPair:
    """Two layers, each with the kernels of its features and gradients."""

    def __init__(self, x: KernelSide, y: KernelSide):
        if len(x.signs) != len(y.signs):
            raise NoValue(
                f"{x.name} has {len(x.signs):,} buckets and {y.name} {len(y.signs):,}; take as many for both."
            )
        self.x, self.y = x, y

    @classmethod
    def options(cls, facts: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the measure asks to be sketched, and how."""
        return {name: settings[name] for name in ("kernel", "buckets", "stacks", "seed") if name in settings}

    def caution(self, facts: Any, settings: Mapping[str, Any]) -> str:
        """Return an empty string: nothing is known that would mislead."""
        return ""

    def alignment(self, kernel: str, centring: str = "") -> Tensor:
        """Return the cosine of the two kernel matrices."""
        K, L = (side.kernel(kernel, centring) for side in (self.x, self.y))
        return (K * L).sum() / self._size(K, self.x) / self._size(L, self.y)

    def bures(self, kernel: str, centring: str = "") -> Tensor:
        """Return the normalised Bures similarity of the two kernel matrices."""
        R, S = (side.root(kernel, centring) for side in (self.x, self.y))
        return torch.linalg.svdvals(R.mT @ S).sum() / self._size(R, self.x) / self._size(S, self.y)

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
        x, y = (_exact_side(name, *_given(one, name, kernel), kernel) for one, name in ((X, "`X`"), (Y, "`Y`")))
        if x.n != y.n:
            raise ShapeError(f"`X` and `Y` must describe the same examples; got {x.n} rows and {y.n} rows.")
        return cls(x, y)


class Sketch(KernelPair):
    """Two layers, each sketched over its own data."""

    collectors: ClassVar[tuple[type, ...]] = ()

    @classmethod
    def of(
        cls, X: Any, Y: Any, *, kernel: str = "hadamard", buckets: int = 512, stacks: int = 1, seed: int = 0
    ) -> Sketch:
        """Return the pair of two layers, each given as (features, gradients); rows of one number are one example."""
        settings = SketchSettings(buckets, stacks, seed, KERNELS[checked_kernel(kernel)])
        sides = []
        for one, name in ((X, "`X`"), (Y, "`Y`")):
            features, gradients = _given(one, name, kernel)
            collector = LayerSketches([name], settings)
            fed = {"activations": {name: features}} | ({} if gradients is None else {"gradients": {name: gradients}})
            collector.update(fed, np.arange(len(features)))
            sides.append(collector.side(name))
        return cls(*sides)


@dataclass(frozen=True)
class SketchSettings(Settings):
    """How many buckets, in how many stacks, from which seed, and what is summed in them."""

    buckets: int = 512
    stacks: int = 1
    seed: int = 0
    parts: tuple[str, ...] = ("features", "gradients")
    target: str = "tempered"
    beta: float = 0.5

    def __post_init__(self) -> None:
        if self.buckets < 1 or self.stacks < 1 or self.buckets % self.stacks:
            raise ValueFault(
                f"a sketch needs at least 1 bucket, in stacks of equal height; got buckets={self.buckets}, "
                f"stacks={self.stacks}."
            )

    def joined(self, other: SketchSettings) -> SketchSettings | None:
        if replace(other, parts=self.parts) != self:
            return None
        return replace(self, parts=tuple(sorted({*self.parts, *other.parts})))

    @classmethod
    def from_json(cls, header: Mapping[str, Any]) -> SketchSettings:
        return cls(**{**header, "parts": tuple(header["parts"])})


class _Sums:
    """What is summed of one layer."""

    def __init__(self, settings: SketchSettings):
        self.settings, self.n, self.width = settings, 0, 0
        self.parts: dict[str, Tensor] = {}
        self.totals: dict[str, Tensor] = {}
        self.signs: Tensor | None = None

    def add(self, rows: Mapping[str, Tensor], buckets: Tensor, signs: Tensor) -> None:
        """Add rows of each part to their buckets; `buckets` and `signs` are stacks × rows."""
        first = next(iter(rows.values()))
        dtype, count = summing_dtype(first.device), self.settings.buckets
        fresh = torch.bincount(buckets.flatten(), signs.flatten(), minlength=count).to(dtype)
        self.signs = fresh if self.signs is None else self.signs + fresh
        for part, own in rows.items():
            sums, total = bucket_sums(own, buckets, signs, count).to(dtype), own.sum(0, dtype=dtype)
            self.parts[part] = self.parts[part] + sums if part in self.parts else sums
            self.totals[part] = self.totals[part] + total if part in self.totals else total
        self.n += len(first)

    def merged(self, other: _Sums) -> _Sums:
        made = _Sums(self.settings)
        if not (self.n and other.n):
            made.__dict__.update((self if self.n else other).__dict__)
            return made
        made.n, made.width = self.n + other.n, self.width
        assert self.signs is not None
        assert other.signs is not None
        made.signs = self.signs + other.signs
        made.parts = {part: sums + other.parts[part] for part, sums in self.parts.items()}
        made.totals = {part: total + other.totals[part] for part, total in self.totals.items()}
        return made


class LayerSketches(Collector):
    """Sketches of many layers, each over the data of its own model."""

    kind = "LayerSketches"
    holds = "Sketch"
    feeds = frozenset({"activations", "gradients"})
    pairs_rows = False
    by_content = True
    exactness = "sketched"

    def __init__(self, names: Sequence[Key], settings: SketchSettings):
        self.names, self.settings = list(names), settings
        self._layers = {name: _Sums(settings) for name in self.names}
        self._sides: dict[Key, KernelSide] = {}

    @classmethod
    def settings_for(cls, measure: Any) -> SketchSettings:
        own = measure.settings
        kept = {name: own[name] for name in ("buckets", "stacks", "seed", "target", "beta") if name in own}
        return SketchSettings(**kept, parts=KERNELS[checked_kernel(own["kernel"])])

    @classmethod
    def price(cls, settings: SketchSettings, study: Study) -> Price | None:
        if study.spectral:
            return None
        widths = [PSI_WIDTH if part == "psi" else one.width for one in study.sizes for part in settings.parts]
        rows = study.examples and sum(one.rows_of(study.examples) * one.width for one in study.sizes)
        words = f"Sketch of {', '.join(settings.parts)} in {settings.buckets:,} buckets"
        return Price(8 * settings.buckets * sum(widths), words, "sketches", rows)

    @classmethod
    def start(cls, settings: SketchSettings, study: Study) -> Self:
        return cls(list(study.layers), settings)

    def serves(self, settings: SketchSettings) -> str:
        for what in ("buckets", "stacks", "seed", "target", "beta"):
            mine, wanted = getattr(self.settings, what), getattr(settings, what)
            if mine != wanted:
                return f"{what}={wanted} (these have {what}={mine})"
        lacks = [part for part in settings.parts if part not in self.settings.parts]
        return f"the {' and '.join(lacks)}" if lacks else ""

    def update(
        self, rows: Mapping[Any, Any], numbers: Any = None, owners: Mapping[Key, np.ndarray] | None = None
    ) -> None:
        """Fold in rows of features and gradients; `numbers` tell what the examples are, whatever their order."""
        features, gradients = rows.get("activations", {}), rows.get("gradients", {})
        self._sides.clear()
        for key in (key for key in self.names if key in features or key in gradients):
            found = {"features": features.get(key), "gradients": gradients.get(key)}
            made = self._parts({name: one for name, one in found.items() if one is not None}, key)
            count = len(next(iter(made.values())))
            ids = np.arange(count) if numbers is None else np.asarray(numbers)
            device = next(iter(made.values())).device
            placed = places(self.settings, row_numbers(ids, count, (owners or {}).get(key)))
            self._layers[key].add(made, *(torch.from_numpy(one).to(device) for one in placed))

    def _parts(self, found: Mapping[str, Tensor], key: Key) -> dict[str, Tensor]:
        """Return what is summed of a batch."""
        f, g = (found.get(name) for name in ("features", "gradients"))
        layer, width = self._layers[key], next(iter(found.values())).shape[1]
        refuse_other_width(key, width, layer.width or width)
        layer.width = width
        made = {}
        for part in self.settings.parts:
            lacks = (f is None and part != "gradients") or (g is None and part != "features")
            if lacks:
                raise ShapeError(f"{label(key)} lacks its {'features' if f is None else 'gradients'} for {part!r}.")
            made[part] = _part(part, f, g, self.settings.seed)
        return made

    def merge(self, other: Self) -> Self:
        self._refuse_unlike(other, layers="names", settings="settings")
        made = type(self)(self.names, self.settings)
        made._layers = {name: own.merged(other._layers[name]) for name, own in self._layers.items()}
        return made

    def side(self, key: Key) -> KernelSide:
        """Return the sketch of one layer."""
        if key not in self._layers:
            hint = did_you_mean(name_of(key), map(name_of, self.names))
            raise UnknownName(f"no layer {name_of(key)!r} in these sketches{hint}")
        own = self._layers[key]
        if not own.n or own.signs is None:
            raise NoValue(f"{label(key)} was fed no rows.")
        if key not in self._sides:
            self._sides[key] = KernelSide(label(key), own.parts, own.totals, own.signs, own.n)
        return self._sides[key]

    def pair(self, a: Key, b: Key, without: int | None = None) -> Sketch:
        return Sketch(self.side(a), self.side(b))

    def release(self) -> None:
        self._sides.clear()

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, counts = {}, []
        for place, own in enumerate(self._layers.values()):
            counts.append([own.n, own.width])
            tensors |= {f"{place}/sums/{part}": sums for part, sums in own.parts.items()}
            tensors |= {f"{place}/totals/{part}": total for part, total in own.totals.items()}
            tensors |= {} if own.signs is None else {f"{place}/signs": own.signs}
        return tensors, {"names": self.names, "settings": self.settings.to_json(), "counts": counts}

    @classmethod
    def _restored(cls, tensors: dict[str, Tensor], header: dict[str, Any]) -> Self:
        made = cls([key_from(name) for name in header["names"]], SketchSettings.from_json(header["settings"]))
        for place, (own, (n, width)) in enumerate(zip(made._layers.values(), header["counts"], strict=True)):
            own.n, own.width, own.signs = int(n), int(width), tensors.get(f"{place}/signs")
            for part in made.settings.parts if own.n else ():
                own.parts[part], own.totals[part] = (tensors[f"{place}/{what}/{part}"] for what in ("sums", "totals"))
        return made


Sketch.collectors = (LayerSketches,)


# --- buckets ----------------------------------------------------------------------------------------------------------


def places(settings: SketchSettings, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bucket and the sign of each example in each stack, stacks × examples; signs are ±1/√stacks."""
    height = settings.buckets // settings.stacks
    mixed = np.stack([hashes(settings.seed * settings.stacks + stack + 1, ids) for stack in range(settings.stacks)])
    buckets = (mixed % np.uint64(height)).astype(np.int64) + height * np.arange(settings.stacks)[:, None]
    signs = 1.0 - 2.0 * (mixed >> np.uint64(63)).astype(np.float64)
    return buckets, signs / np.sqrt(settings.stacks)


def bucket_sums(rows: Tensor, buckets: Tensor, signs: Tensor, count: int) -> Tensor:
    """Return the signed sums of rows in `count` buckets, each row in one bucket of every stack."""
    n = buckets.shape[1]
    if rows.is_cuda:
        made = torch.zeros(count, rows.shape[1], dtype=rows.dtype, device=rows.device)
        for own, sign in zip(buckets, signs, strict=True):
            made.index_add_(0, own, rows * sign.to(rows.dtype).unsqueeze(-1))
        return made
    columns = np.tile(np.arange(n), len(buckets))
    values = signs.flatten().to(rows.dtype).cpu().numpy()
    matrix = csr_matrix((values, (buckets.flatten().cpu().numpy(), columns)), shape=(count, n))
    return torch.from_numpy(matrix @ rows.detach().cpu().numpy()).to(rows.device)


def tensor_sketch(features: Tensor, gradients: Tensor, seed: int, width: int = PSI_WIDTH) -> Tensor:
    """Return `width` numbers for each example that stand for ``g fᵀ``; products are ``⟨f, f'⟩⟨g, g'⟩`` on average.

    Pham and Pagh (2013): the sketch of an outer product is the circular convolution of the sketches of its factors.
    """
    spectra = []
    for salt, rows in ((1, features), (2, gradients)):
        mixed = hashes(seed * 4 + salt, np.arange(rows.shape[1]) + (salt << 40))
        places = torch.from_numpy((mixed % np.uint64(width)).astype(np.int64)).to(rows.device)
        signs = torch.from_numpy(1.0 - 2.0 * (mixed >> np.uint64(63)).astype(np.float64)).to(rows)
        made = torch.zeros(len(rows), width, dtype=rows.dtype, device=rows.device).index_add_(1, places, rows * signs)
        spectra.append(torch.fft.rfft(made))
    return torch.fft.irfft(spectra[0] * spectra[1], n=width)


def _part(part: str, features: Any, gradients: Any, seed: int) -> Tensor:
    """Return what is summed of each example under a name."""
    if part == "psi":
        return tensor_sketch(features, gradients, seed)
    return features * gradients if part == "product" else features if part == "features" else gradients


# --- kernels ----------------------------------------------------------------------------------------------------------


def checked_kernel(kernel: str) -> str:
    """Return a kernel's name if it is one of ours; refuse it otherwise."""
    if kernel not in KERNELS:
        hint = did_you_mean(kernel, KERNELS) or "."
        raise UnknownName(f"no kernel named {kernel!r}{hint} There are {', '.join(KERNELS)}.")
    return kernel


def _given(one: Any, name: str, kernel: str) -> tuple[Tensor, Tensor | None]:
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


def _exact_side(name: str, features: Tensor, gradients: Tensor | None, kernel: str) -> KernelSide:
    double = summing_dtype(features.device)
    parts = {"features": features.to(double)} | ({} if gradients is None else {"gradients": gradients.to(double)})
    if gradients is not None:
        parts["product"] = parts["features"] * parts["gradients"]
    totals = {part: rows.sum(0) for part, rows in parts.items()}
    return KernelSide(name, parts, totals, torch.ones(len(features)).to(parts["features"]), len(features), True)


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
