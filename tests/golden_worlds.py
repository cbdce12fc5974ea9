"""The seeded data and models that the numbers of the golden file are taken from, and the ledger they are put in."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import netkin as nk
from netkin.measures import Measure, find, measures
from netkin.statistics import Moments

Entry = float | str
Entries = dict[str, Entry]
OF_THE_SCALE = ("procrustes_size_and_shape", "magnitude_difference")  # grow with the data
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PARAMETERS = [
    "svcca(variance=0.9)", "svcca_by_sum(variance=0.8)", "svcca_k(k=3)", "gulp(ridge=0.1)", "shape_distance(alpha=0.2)",
]  # fmt: skip


def ours() -> dict[str, Measure]:
    """Return netkin's own measures by name."""
    return {name: one for name, one in measures(matrices=True).items() if one.function.__module__.startswith("netkin.")}


def linear() -> list[str]:
    """Return all measures that read moments, some with parameters as well."""
    return [name for name, one in ours().items() if one.facts.reads is Moments] + PARAMETERS


def spectral() -> list[str]:
    """Return those that `compare` reads from spectra."""
    return [name for name in linear() if in_spectra(find(name))]


def in_spectra(one: Measure) -> bool:
    """Tell whether a measure can be read from spectra."""
    facts = one.facts
    return facts.reads is Moments and "rotation" in facts.unchanged_by and not facts.debiases


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def numpys_lapack() -> Iterator[None]:
    """Decompose by NumPy's LAPACK in place of torch's; roots of eigenvalues that are zero but for rounding move.

    What needs gradients stays with torch's.
    """

    def decompose(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        def decomposed(A: Tensor, *args: Any, **options: Any) -> Any:
            result = ours(A, *args, **options)
            if A.requires_grad:
                return result
            other = theirs(A.resolve_conj().numpy(), *args, **options)
            if isinstance(result, Tensor):
                return torch.tensor(other, dtype=result.dtype)
            return type(result)([torch.tensor(x, dtype=y.dtype) for x, y in zip(other, result, strict=True)])

        return decomposed

    theirs = {
        "eigh": np.linalg.eigh,
        "eigvalsh": np.linalg.eigvalsh,
        "svd": np.linalg.svd,
        "svdvals": np.linalg.svdvals,
    }
    with ExitStack() as stack:
        for name, function in theirs.items():
            stack.enter_context(mock.patch.object(torch.linalg, name, decompose(getattr(torch.linalg, name), function)))
        yield


class World:
    """Makes arrays of one dtype, the same in every run; `shake` is the seed of the noise laid on them, 0 for none."""

    def __init__(self, dtype: str, shake: int = 0):
        self.name, self.dtype, self.shake = dtype, DTYPES[dtype], shake
        self.double = dtype == "f64"

    def normal(self, label: str, *size: int) -> np.ndarray:
        """Return normal numbers that depend on the label."""
        drawn = np.random.default_rng(zlib.crc32(label.encode())).normal(size=size)
        if not self.shake:
            return drawn
        noise = np.random.default_rng([self.shake, zlib.crc32(label.encode())]).normal(size=size)
        return drawn * (1 + (1e-13 if self.double else 1e-7) * noise)

    def raw(self, scene: str, n: int, *sizes: Any) -> list[np.ndarray]:
        """Return layers n × size that share three directions, bent differently in each."""
        shared, arrays = self.normal(f"{scene} shared", n, 3), []
        for i, size in enumerate(sizes):
            features = (size,) if isinstance(size, int) else tuple(size)
            width = int(np.prod(features))
            bent = np.tanh(shared @ self.normal(f"{scene} {i} map", 3, width) + 0.3 * i)
            spread = 1 + np.arange(width) / width
            arrays.append(((bent + 0.4 * self.normal(f"{scene} {i} own", n, width)) * spread).reshape(n, *features))
        return arrays

    def cast(self, array: np.ndarray) -> Tensor:
        return torch.tensor(array).to(self.dtype)

    def layers(self, scene: str, n: int, *sizes: Any) -> list[Tensor]:
        return [self.cast(array) for array in self.raw(scene, n, *sizes)]


def matrix_scenes(world: World) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Yield scenes of two matrices: a name, the matrices and the scale of the numbers."""
    for name, n, p, q in [
        ("tall", 60, 7, 5), ("equal", 48, 6, 6), ("uneven", 100, 3, 12), ("wide", 12, 20, 30), ("mixed", 20, 6, 40),
        ("three", 3, 2, 2), ("four", 4, 2, 3), ("one-unit", 30, 1, 1),
    ]:  # fmt: skip
        yield name, *world.layers(name, n, p, q), 1.0
    X, Y = world.raw("special", 50, 5, 6)
    yield "same", world.cast(X), world.cast(X), 1.0
    yield "constant", world.cast(0 * X + 2), world.cast(Y), 1.0
    yield "one-row", world.cast(X[:1]), world.cast(Y[:1]), 1.0
    yield "deficient", world.cast(np.hstack([X, X, 2 * X[:, :2]])), world.cast(np.hstack([Y, 0 * Y])), 1.0
    offset, scale = (1e5, 1e30) if world.double else (1e2, 1e15)
    yield "offset", world.cast(X + offset), world.cast(Y - 2 * offset), 1.0
    for name, size in (("huge", scale), ("tiny", 1 / scale)):
        yield name, world.cast(X * size), world.cast(Y * size), size
    yield "uneven-scales", world.cast(X * np.geomspace(1, 100, 5)), world.cast(Y / 64), 1.0


def recorded(world: World, scene: str, n: int, *widths: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return two models' recorded layers: plain ones, one of lower rank, one with dead units and a constant one."""
    p, q, r, s = widths
    one, two, three, four = world.raw(scene, n, p, q, r, s)
    a = {"plain": one, "low": np.hstack([two, two])}
    b = {"plain": three, "dead": np.hstack([four, np.zeros((n, 2))]), "constant": np.full((n, 3), 1.5)}
    return tuple({name: world.cast(array) for name, array in side.items()} for side in (a, b))  # type: ignore[return-value]


def conv_model(world: World, label: str, channels: int, stride: int) -> nn.Module:
    """Return a small conv net whose weights are drawn by NumPy."""
    model = nn.Sequential(
        nn.Conv2d(2, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, 4, 3, stride, 1), nn.Tanh(), nn.Flatten(),
        nn.Linear(4 * (8 // stride) ** 2, 5),
    )  # fmt: skip
    return _drawn(model.to(world.dtype), world, label)


def token_model(world: World, label: str, width: int) -> nn.Module:
    """Return a small net that keeps tokens apart."""
    return _drawn(nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).to(world.dtype), world, label)


def _drawn(model: nn.Module, world: World, label: str) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fan = parameter[0].numel() if parameter.ndim > 1 else 4
            parameter.copy_(world.cast(world.normal(f"{label} {name}", *parameter.shape) / fan**0.5))
    return model.eval()


def batches(array: Tensor, *sizes: int) -> list[Tensor]:
    """Return an array in batches of these sizes."""
    return list(array.split(list(sizes)))


class Ledger:
    """Collects entries of one dtype under their names."""

    def __init__(self, world: World):
        self.world, self.entries = world, Entries()

    def put(self, form: str, scene: str, measure: str, pair: str, value: Entry) -> None:
        name = "/".join((form, scene, self.world.name, measure, pair))
        assert name not in self.entries, name
        self.entries[name] = value

    def call(self, form: str, scene: str, spec: str, read: Callable[[Measure], Any], scale: float = 1.0) -> None:
        """Put down what a measure's function gives, or its refusal, and its warnings."""
        one = find(spec)
        unit = scale if one.name in OF_THE_SCALE else 1.0
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                value: Entry = float(read(one)) / unit
            except nk.NetkinError as refusal:
                value = f"{type(refusal).__name__}: {refusal}"
        self.put(form, scene, one.id, "X~Y", value)
        for i, warning in enumerate(said):
            self.put(form, scene, one.id, f"warning {i}", str(warning.message))

    def comparison(self, form: str, scene: str, comparison: Any) -> None:
        """Put down all values, holes and warnings of a comparison."""
        for id, table in comparison.tables.items():
            for x in table.layers_a:
                for y in table.layers_b:
                    value = table.missing[x, y] if (x, y) in table.missing else table[x, y]
                    self.put(form, scene, id, f"{x}~{y}", value)
        for i, caveat in enumerate(comparison.caveats):
            self.put(form, scene, "warnings", str(i), str(caveat))
        self.put(form, scene, "examples", "", float(comparison.examples))

    def compare(self, form: str, scene: str, *given: Any, **options: Any) -> None:
        """Put down a comparison, or its refusal."""
        try:
            comparison = nk.compare(*given, **options)
        except nk.NetkinError as refusal:
            self.put(form, scene, "refusal", "", f"{type(refusal).__name__}: {refusal}")
        else:
            self.comparison(form, scene, comparison)
