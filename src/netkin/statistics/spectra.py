"""`Spectra` and `LayerSpectra`: moments for each spatial frequency, what DFT-CCA of conv layers reads.

On data closed under translation features of different frequencies don't correlate, so that the covariance of flattened
maps falls into blocks of c × c, one for each place of the map (theorem 1 of Raghu et al. 2017, arXiv:1706.05806), and
these blocks are all there is. On other data they are a part; `off_block_share` tells how much lies outside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import as_maps, refuse_non_finite
from netkin.errors import NoValue, ShapeError, UnknownName, ValueFault, did_you_mean
from netkin.statistics.frequencies import apart, common_grid, in_words, off_block_share, placed
from netkin.statistics.layer_moments import Rectangle
from netkin.statistics.moments import Moments
from netkin.statistics.rows import LayerRows
from netkin.statistics.spectral_sides import SpectralSide
from netkin.statistics.spectral_sums import Blocks, Cross, Desk, Key, Layer, View
from netkin.statistics.statistic import Statistic, refuse_missing

if TYPE_CHECKING:
    from typing_extensions import Self

FOLD = 64  # examples gathered before they are transformed
CHUNK = 256  # examples transformed at a time, at most
CACHED = 2**19  # numbers of one layer transformed at a time on a CPU: what its caches hold
SAMPLE = 64  # examples whose maps are kept, to tell how much lies off the blocks


class Spectra(Moments):
    """A pair of layers in blocks, one for each frequency of their maps; the linear measures read it like any moments.

    `pwcca` and `cka_debiased` alone have no value here: they look at single units, or need sums that are not kept.
    """

    @classmethod
    def of(cls, X: Any, Y: Any, precision: torch.dtype | None = torch.float64) -> Spectra:
        """Return the spectra of two layers' maps, n × c × h × w, of the same examples, differentiably.

        A larger map is regrouped to the grid of the smaller; a matrix, n × d, or a map of one place has part in the
        zero frequency alone.
        """
        X, Y = placed(as_maps(X, "X")), placed(as_maps(Y, "Y"))
        if len(X) != len(Y):
            raise ShapeError(
                f"`X` and `Y` must describe the same examples; got {len(X)} and {len(Y)}. "
                "Run both models on the same probe batch."
            )
        for name, maps in (("`X`", X), ("`Y`", Y)):
            refuse_non_finite(maps, name)
        collector = LayerSpectra([(["X"], ["Y"])], precision=precision or X.dtype, sample=0)
        collector.called = {"X": "`X`", "Y": "`Y`"}
        collector._fold({"X": X, "Y": Y.to(X.device)})
        return collector["X", "Y"]


class LayerSpectra(Statistic):
    """Spectra of many layers; `collector[a, b]` is the pair that a measure reads.

    `rectangles` says which pairs are wanted: each is (names, names), all of the first with all of the second.
    `precision` is that of transforms and products; sums are kept in float64. Of `sample` examples the maps are kept, to
    tell how much of the covariance lies off the blocks.

    Example:
        >>> collector = LayerSpectra([(["a"], ["b"])])
        >>> for _ in range(3):
        ...     maps = torch.randn(20, 3, 8, 8)
        ...     collector.update({"a": maps, "b": maps.flip(1)})
        >>> collector["a", "b"].n
        60
    """

    kind = "LayerSpectra"

    def __init__(
        self,
        rectangles: Sequence[Rectangle],
        *,
        precision: torch.dtype = torch.float64,
        sample: int = SAMPLE,
        seed: int = 0,
    ):
        self.rectangles = [(list(left), list(right)) for left, right in rectangles]
        self.names = list(dict.fromkeys(name for pair in self.rectangles for side in pair for name in side))
        self.precision, self.sample, self.seed = precision, sample, seed
        self.called: dict[str, str] = {}  # what messages call a layer, where not by its name
        self._layers: dict[str, Layer] = {}
        self._views: dict[Key, View] = {}
        self._crosses: list[Cross] = []
        self._waiting: dict[str, list[Tensor]] = {name: [] for name in self.names}
        self._rows = LayerRows(self.names, cap=sample, seed=seed) if sample else None
        self._batches, self._seen, self._desk = 0, 0, Desk()
        self._sides: dict[tuple[Key, bool], SpectralSide] = {}
        self._shares: dict[Key, float] = {}

    # --- reading -------------------------------------------------------------------------------------------------

    def __getitem__(self, pair: tuple[str, str]) -> Spectra:
        """Return the spectra of the layers `a` and `b`, in that order."""
        cross, x, y, turned = self._find(*pair)
        first, second = (self._side(key, cross.dtype.is_complex) for key in (x, y))
        whole = cross.whole(x, y)
        return Spectra(second, first, whole.mH) if turned else Spectra(first, second, whole)

    def _side(self, key: Key, in_complex: bool) -> SpectralSide:
        if (key, in_complex) not in self._sides:
            side = self._views[key].side(self._spoken(key[0]), torch.finfo(self.precision).eps)
            if not bool(torch.isfinite(side.total)):
                raise ValueFault(
                    f"{side.name} gave NaN or Inf; mend the model or leave out the examples that cause them."
                )
            self._sides[key, in_complex] = side.in_complex if in_complex and not side.mean.is_complex() else side
        return self._sides[key, in_complex]

    def _find(self, a: str, b: str) -> tuple[Cross, Key, Key, bool]:
        """Return where two layers meet, by which views, and whether they stand there the other way round."""
        self._fold_waiting()
        for name in (a, b):
            if name not in self.names:
                raise UnknownName(f"no layer {name!r} in these spectra{did_you_mean(name, self.names)}")
        if not self._layers:
            raise NoValue("no batch has been folded in yet; call `update` first.")
        for turned in (False, True):
            for cross in self._crosses:
                found = cross.find(*((b, a) if turned else (a, b)))
                if found:
                    return cross, *found, turned
        sizes = [self._layers[name].space for name in (a, b)]
        if common_grid(*sizes) is None:
            raise NoValue(apart(self._spoken(a), sizes[0], self._spoken(b), sizes[1]))
        raise NoValue(f"the pair {a!r}, {b!r} was not collected.")

    @property
    def n(self) -> int:
        """The number of examples so far."""
        self._fold_waiting()
        return max((layer.n for layer in self._layers.values()), default=0)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The channels and the size of the map of every layer seen so far."""
        return {name: layer.size for name, layer in self._layers.items()}

    @property
    def sampled(self) -> int:
        """The number of examples whose maps are kept."""
        return self._rows.n if self._rows else 0

    def off_block_share(self, name: str, other: str | None = None) -> float:
        """Return which share of the energy of a layer's covariance lies off its blocks, from the sample.

        The blocks are those of the grid on which it meets the layer `other`; by default those of its own grid.
        """
        self._fold_waiting()
        if self._rows is None or not self._rows.n:
            raise NoValue("no examples have been kept; collect with `sample=64`, and call `update` first.")
        layer = self._layers[name]
        grid = layer.space if other is None else common_grid(layer.space, self._layers[other].space) or layer.space
        if (name, grid) not in self._shares:
            rows = self._rows[name, name].x.X
            self._shares[name, grid] = off_block_share(rows.reshape(len(rows), *layer.size), grid)
        return self._shares[name, grid]

    # --- folding -------------------------------------------------------------------------------------------------

    def update(self, maps: Mapping[str, Any]) -> None:
        """Fold in one batch: maps n × c × space, or a matrix, for every layer, the same examples in each."""
        refuse_missing(self.names, maps)
        given = {name: self._checked(name, maps[name]) for name in self.names}
        first = self.names[0]
        _refuse_unpaired(given)
        self._keep_some(given)
        for name, array in given.items():
            # what waits must not change when the caller's array does
            self._waiting[name].append(array if len(array) >= FOLD else array.clone())
        self._batches += 1
        if sum(map(len, self._waiting[first])) >= FOLD:
            self._fold_waiting()

    def _keep_some(self, maps: Mapping[str, Tensor]) -> None:
        """Keep the maps of those examples that may be in the sample."""
        places = self._seen + np.arange(len(maps[self.names[0]]))
        self._seen += len(places)
        if self._rows is None:
            return
        chosen = self._rows.promising(places)
        if len(chosen):
            rows = {name: array[chosen.to(array.device)].flatten(1) for name, array in maps.items()}
            self._rows.update(rows, places[chosen.numpy()])

    def _checked(self, name: str, maps: Any) -> Tensor:
        array, waiting = placed(as_maps(maps, name).detach()), self._waiting[name]
        before = self._layers[name].size if name in self._layers else waiting[0].shape[1:] if waiting else None
        if before is not None and tuple(array.shape[1:]) != tuple(before):
            raise ShapeError(
                f"{self._spoken(name)} gave {_sized(array.shape[1:])} in batch {self._batches} and {_sized(before)} "
                "before; bring all inputs to one size, or choose the shape 'pool'."
            )
        if array.device.type == "cpu":
            refuse_non_finite(array, f"{self._spoken(name)} in batch {self._batches}")
        return array

    def _spoken(self, name: str) -> str:
        return self.called.get(name, f"layer {name!r}")

    def _fold_waiting(self) -> None:
        """Transform what waits."""
        if self._waiting[self.names[0]]:
            maps = {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in self._waiting.items()}
            self._waiting = {name: [] for name in self.names}
            self._fold(maps)

    def _fold(self, maps: Mapping[str, Tensor]) -> None:
        self._sides, self._shares = {}, {}
        if not self._layers:
            self._begin(maps)
        first = maps[self.names[0]]
        step = self._step() if first.device.type == "cpu" else 8 * CHUNK
        for start in range(0, len(first), step):
            self._fold_chunk({name: array[start : start + step] for name, array in maps.items()})

    def _step(self) -> int:
        """Return how many examples to take at a time."""
        widest = max((view.width for view in self._views.values()), default=0)
        largest = max(layer.shift.numel() for layer in self._layers.values())
        step = examples_at_once(largest, widest)
        # sums are kept in float64, and adding to them costs float32 more than its caches save
        return step if self.precision == torch.float64 else 2 * step

    def _fold_chunk(self, maps: Mapping[str, Tensor]) -> None:
        """Add the products of a few examples, each view held only while some pair still needs it."""
        taken: dict[Key, Blocks] = {}
        uses = Counter(key for cross in self._crosses for key in cross.keys)
        for cross in self._crosses:
            for name, _ in cross.keys:
                self._take(name, maps[name], taken)
            cross.add(taken)
            uses.subtract(cross.keys)
            for key in cross.keys:
                if not uses[key]:
                    del taken[key]

    def _take(self, name: str, maps: Tensor, taken: dict[Key, Blocks]) -> None:
        """Transform one layer on all its grids, unless that is done."""
        keys = [key for key in self._views if key[0] == name]
        if not any(key in taken for key in keys):
            centred = self._layers[name].centred(maps, self.precision, self._desk)
            taken |= {key: self._views[key].take(centred) for key in keys}

    def _begin(self, maps: Mapping[str, Tensor]) -> None:
        """Find out, now that sizes are known, on which grids the layers meet."""
        self._layers = {name: Layer.starting(array, self.precision) for name, array in maps.items()}
        for left, right in self.rectangles:
            for ours in self._by_size(left):
                for theirs in self._by_size(right):
                    self._join(ours, theirs)

    def _by_size(self, names: Sequence[str]) -> list[list[str]]:
        sizes = {name: self._layers[name].space for name in names}
        return [[name for name in names if sizes[name] == size] for size in dict.fromkeys(sizes.values())]

    def _join(self, left: list[str], right: list[str]) -> None:
        """Set layers of one size beside layers of another, on the grid that they have in common."""
        ours, theirs = (self._layers[names[0]].space for names in (left, right))
        grid = common_grid(ours, theirs)
        if grid is None:
            return
        keys = [(name, grid or ours) for name in left], [(name, grid or theirs) for name in right]
        for key in (*keys[0], *keys[1]):
            if key not in self._views:
                self._views[key] = View(self._layers[key[0]], key[1])
        self._crosses.append(Cross(keys[0], keys[1], self._views))

    # --- merging and files ---------------------------------------------------------------------------------------

    def merge(self, other: Self) -> Self:
        """Return the spectra of the data of both."""
        self._refuse_unlike(other, layers="rectangles", precision="precision", sample="sample", seed="seed")
        self._fold_waiting()
        other._fold_waiting()
        first, second = (self, other) if self._layers else (other, self)
        merged = first._copy()
        if first._layers and second._layers:
            merged._add(second)
        return merged

    def _copy(self) -> Self:
        tensors, header = self._state()
        return self._restored({name: tensor.clone() for name, tensor in tensors.items()}, header)

    def _add(self, other: LayerSpectra) -> None:
        self._refuse_unlike(other, sizes="sizes")
        for name, layer in self._layers.items():
            if not layer.varies:
                layer.scale, layer.varies = other._layers[name].scale, other._layers[name].varies
        for cross, more in zip(self._crosses, other._crosses, strict=True):
            cross.merge(more)
        for key, view in self._views.items():
            view.add(other._views[key])
        for name, layer in self._layers.items():
            layer.add(other._layers[name])
        if self._rows is not None and other._rows is not None:
            self._rows = self._rows.merge(other._rows.renumbered(self._seen))
        self._batches, self._seen = self._batches + other._batches, self._seen + other._seen

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self._fold_waiting()
        tensors: dict[str, Tensor] = {}
        for i, layer in enumerate(self._layers.values()):
            tensors |= {f"shift.{i}": layer.shift, f"total.{i}": layer.total}
        tensors |= {f"own.{i}": _real(view.own) for i, view in enumerate(self._views.values())}
        tensors |= {f"cross.{i}": _real(cross.sums) for i, cross in enumerate(self._crosses)}
        header: dict[str, Any] = {
            "rectangles": self.rectangles,
            "precision": "float32" if self.precision == torch.float32 else "float64",
            "sample": self.sample,
            "seed": self.seed,
            "batches": self._batches,
            "seen": self._seen,
            "layers": [[name, v.scale, v.resolution, v.n, v.varies] for name, v in self._layers.items()],
            "views": list(self._views),
            "crosses": [[cross.left, cross.right] for cross in self._crosses],
        }
        if self._rows is not None:
            rows, header["rows"] = self._rows._state()
            tensors |= {f"rows/{name}": tensor for name, tensor in rows.items()}
        return tensors, header

    @classmethod
    def _restored(cls, tensors: dict[str, Tensor], header: dict[str, Any]) -> Self:
        rectangles = [(left, right) for left, right in header["rectangles"]]
        precision = getattr(torch, header["precision"])
        statistic = cls(rectangles, precision=precision, sample=header["sample"], seed=header["seed"])
        statistic._batches, statistic._seen = header["batches"], header["seen"]
        for i, (name, *facts) in enumerate(header["layers"]):
            statistic._layers[name] = Layer(tensors[f"shift.{i}"], *facts)
            statistic._layers[name].total = tensors[f"total.{i}"]
        for i, key in enumerate(map(_key, header["views"])):
            statistic._views[key] = View(statistic._layers[key[0]], key[1], _complex(tensors[f"own.{i}"], 3))
        for i, sides in enumerate(header["crosses"]):
            left, right = ([_key(key) for key in keys] for keys in sides)
            statistic._crosses.append(Cross(left, right, statistic._views, _complex(tensors[f"cross.{i}"], 3)))
        if "rows" in header:
            rows = {name.removeprefix("rows/"): one for name, one in tensors.items() if name.startswith("rows/")}
            statistic._rows = LayerRows._restored(rows, header["rows"])
        return statistic


def examples_at_once(largest: int, widest: int) -> int:
    """Return how many maps of at most so many numbers to transform at a time, for blocks of at most such a width.

    Few fit the caches, but blocks far wider than that would be read and written too often.
    """
    return min(max(CACHED // largest, widest // 2, 16), CHUNK)


def _refuse_unpaired(maps: Mapping[str, Tensor]) -> None:
    first, *others = maps
    for name in others:
        if len(maps[name]) != len(maps[first]):
            raise ShapeError(
                f"layers {first!r} and {name!r} gave {len(maps[first]):,} and {len(maps[name]):,} examples in one "
                "batch; feed all layers the same examples."
            )


def _sized(size: Sequence[int]) -> str:
    channels, *space = size
    return f"{channels} channels of {in_words(space)}" if space else f"{channels} features"


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _complex(tensor: Tensor, axes: int) -> Tensor:
    """Return a tensor of so many axes; one more are real and imaginary parts, as files know no complex numbers."""
    return torch.view_as_complex(tensor) if tensor.ndim > axes else tensor


def _key(written: Any) -> Key:
    name, grid = written
    return name, tuple(grid)
