"""The numbers of `frozen.json`: every measure on every kind of input, through the public door alone.

Nothing here names a statistic, a pass or a planner, so that it runs unchanged whatever happens inside. `golden.json`
beside it holds the measures called with matrices, and single statistics.

A scene is a way to ask for numbers, such as "f64 | images | images, errors | saved parts". For each measure of a
scene the file has one line: how far a number may move, relative or absolute, the values of all pairs of layers (null
for a hole, which must have a reason), and the standard errors where they were asked for. A refusal is its class, not
its sentence.

All comes from seeded NumPy data on one thread. A number is held to 1e-12 in float64 and to 1e-6 in other dtypes, or as
far as it moves when the data are shaken by 1e-13 (1e-7) of themselves or NumPy's LAPACK takes the place of torch's, if
that is more; what moves by more than 1e-6 (1e-3) is rounding rather than a number, and left out. Sketches, where the
last bit of an example decides about its bucket, are held to 1e-9 (1e-5), those of sums of roots to 1e-8; models that
compute in 16 bits to 1e-2.

    PYTHONPATH=src python tests/frozen.py            # show what differs from the file, and by how much
    PYTHONPATH=src python tests/frozen.py --write    # write the file; the data are shaken twice
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from golden_worlds import World, batches, conv_model, numpys_lapack, one_thread, recorded, token_model

FILE = Path(__file__).with_name("frozen.json")
SMALLEST = {"f64": 1e-12}  # of the tolerances, else 1e-6
LARGEST = {"f64": 1e-6}  # else 1e-3
DTYPES = ("f64", "f32", "bf16", "f16")

LINEAR = [
    "cca_mean", "cca_mean_squared", "cca_rms", "svcca", "svcca(variance=0.9)", "svcca_by_sum",
    "svcca_by_sum(variance=0.8)", "svcca_k", "svcca_k(k=3)", "pwcca", "linear_regression_r2", "eigenspace_overlap",
    "eigenspace_overlap_uncentered", "shape_distance", "shape_distance(alpha=0.2)", "gulp", "gulp(ridge=0.1)",
    "gaussian_mutual_information", "cka", "cka_debiased", "cka_uncentered", "angular_cka", "nbs", "nbs_uncentered",
    "procrustes_distance", "procrustes_angular", "procrustes_size_and_shape", "procrustes_disparity",
    "magnitude_difference",
]  # fmt: skip
BY_FREQUENCY = [spec for spec in LINEAR if spec not in ("pwcca", "cka_debiased", "linear_regression_r2")]
ROWS = ["cka_rbf", "cka_rbf(fraction=0.2)", "cka_rbf_debiased"]
BATCHES = ["cka_minibatch(batch=16)", "cka_minibatch(batch=7)", "cka_minibatch(batch=16, kernel=rbf)"]
EVERYTHING = [*LINEAR, *ROWS, *BATCHES]
SINGLE = ["cka", "cka_uncentered", "nbs", "magnitude_difference"]  # for these alone float32 would do
FEW = ["cka", "cka_debiased", "svcca", "pwcca", "linear_regression_r2", "procrustes_distance", "cka_rbf", BATCHES[0]]
EXACT_KERNELS = ["features", "gradients", "sum", "product", "hadamard", "transport"]
KERNELS = [
    f"{name}(kernel={kernel})" for name in ("kernel_cka", "kernel_cka_uncentered", "kernel_nbs")
    for kernel in EXACT_KERNELS
]  # fmt: skip
SKETCHES = [
    f"{name}(kernel={kernel}, buckets=32)"
    for name in ("sketched_cka", "sketched_cka_by_buckets", "sketched_cka_uncentered", "sketched_nbs")
    for kernel in ("psi", *EXACT_KERNELS)
    if name != "sketched_cka" or kernel not in ("hadamard", "transport")
]
WEIGHTS = ["weight_cosine"]
ATOMS = ["atom_cosine", "atom_cosine(gauge=orthonormal)", "atom_angular", "grassmann"]

Entry = Any


# --- what is put down -------------------------------------------------------------------------------------------------


class Book:
    """Scenes of one dtype by name; `shake` is the seed of the noise laid on the data, 0 for none."""

    def __init__(self, dtype: str, folder: Path, shake: int = 0):
        self.world, self.folder, self.chapter, self.entries = World(dtype, shake), folder, "", {}

    def put(self, scene: str, what: str, entry: Entry) -> None:
        name = f"{self.world.name} | {self.chapter} | {scene} | {what}"
        assert name not in self.entries, name
        self.entries[name] = entry

    def compare(self, scene: str, *given: Any, **options: Any) -> None:
        self.attempt(scene, lambda: nk.compare(*given, progress=False, **options))

    def attempt(self, scene: str, make: Callable[[], Any]) -> None:
        """Put down the comparison that is made, or the class of the refusal."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                comparison = make()
            except nk.NetkinError as refusal:
                self.put(scene, "refused", type(refusal).__name__)
                return
        self.comparison(scene, comparison)

    def comparison(self, scene: str, comparison: Any) -> None:
        for what, entry in entries_of(comparison).items():
            self.put(scene, what, entry)

    def rows(self, scene: str, layers: Mapping[str, Any]) -> None:
        """Put down recorded layers: their shapes, a sum and a weighted one."""
        for name, rows in layers.items():
            values = torch.as_tensor(np.asarray(rows.detach().double() if isinstance(rows, Tensor) else rows)).double()
            along = torch.tensor(np.random.default_rng(5).normal(size=tuple(values.shape)))
            scale = max(1.0, float(values.norm()))
            sums = [float(values.sum()) / scale, float((values * along).sum()) / scale, float(values.norm())]
            self.put(scene, f"{name} of {'×'.join(map(str, values.shape))}", [[sums]])

    def ways(
        self, scene: str, a: Any, b: Any, data: Any = None, *, parts: int = 3, only: str = "", **options: Any
    ) -> None:
        """Put down a comparison made at once; from merged parts; and from parts that were saved, also as a whole."""
        make = partial(nk.collect, a, b, data, progress=False, **options)
        measures = options["measures"]
        self.compare(f"{scene} | at once", a, b, data, **options)

        def merged() -> Any:
            return nk.merge([make(part=(part, parts)) for part in (2, *range(3, parts + 1), 1)])

        def loaded() -> Any:
            paths = [self.folder / f"{part}.stats" for part in range(1, parts + 1)]
            for part, path in enumerate(paths, 1):
                make(part=(part, parts)).save(path, overwrite=True)
            together = self.folder / "all.stats"
            nk.load(paths[0]).merge(nk.merge([nk.load(path) for path in paths[1:]])).save(together, overwrite=True)
            return nk.load(together)

        if only != "merged":
            self.attempt(f"{scene} | collected", lambda: make().compute(measures))
        self.attempt(f"{scene} | merged", lambda: merged().compute(measures))
        if only != "merged":
            self.attempt(f"{scene} | saved parts", lambda: loaded().compute(measures))


def entries_of(comparison: Any) -> dict[str, Entry]:
    """Return the entries of a comparison by what they are: its layers and number of examples, and each measure's."""
    entries: dict[str, Entry] = {"layers": [list(comparison.layers_a), list(comparison.layers_b), comparison.examples]}
    for id in comparison.measures:
        table = comparison[id]
        values = [[_number(value) for value in row] for row in table.to_numpy()]
        for x, row in zip(table.layers_a, values, strict=True):
            for y, value in zip(table.layers_b, row, strict=True):
                assert value is not None or table.missing[x, y], "a hole without a reason"
        entries[id] = [values]
        if table.errors is not None:
            entries[id].append([[_number(value) for value in row] for row in table.errors])
    return entries


def _number(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def side(*given: Any, **options: Any) -> Any:
    """Return one side of a comparison with data, layers or weights of its own."""
    return (getattr(nk, "ModelInput", None) or nk.ModelInput)(*given, **options)


# --- scenes ----------------------------------------------------------------------------------------------------------


def records(book: Book) -> None:
    """Recorded rows, more than features: a layer of low rank, one with dead units, a constant one."""
    a, b = recorded(book.world, "frozen", 90, 6, 4, 5, 4)
    book.ways("records", a, b, measures=EVERYTHING)
    book.ways("records, errors", a, b, measures=[*FEW, "nbs", "cca_mean"], errors=True, chunks=5)
    book.compare("records, first 37", a, b, measures=FEW, examples=37)
    book.compare("records, alone", a, measures=FEW)
    book.compare("records, listed pairs", a, b, measures=FEW, pairs=[("plain", "dead"), ("low", "plain")])
    book.compare("records, corresponding", a, b, measures=FEW, pairs="corresponding")
    book.compare("records, three rows", *({k: v[:3] for k, v in side.items()} for side in (a, b)), measures=FEW)
    book.compare("records, one row", *({k: v[:1] for k, v in side.items()} for side in (a, b)), measures=FEW)
    book.ways("records, little memory", *({k: v[:40] for k, v in side.items()} for side in (a, b)),
              measures=LINEAR, memory=60_000, only="merged")  # fmt: skip
    book.compare("records, much too little memory", a, b, measures=FEW, memory=100)
    book.compare("records, single precision", a, b, measures=SINGLE)
    moved = book.world.raw("frozen far", 70, 5, 6)
    far = 1e5 if book.world.double else 1e2
    x, y = book.world.cast(moved[0] + far), book.world.cast(moved[1] - far)
    book.ways("far from zero", {"x": x}, {"y": y}, measures=["cka", "nbs", "procrustes_distance"], only="merged")


def wide(book: Book) -> None:
    """Recorded rows, fewer than features."""
    a, b = recorded(book.world, "frozen wide", 30, 80, 5, 70, 4)
    book.ways("wide", a, b, measures=EVERYTHING)
    book.ways("wide, errors", a, b, measures=["cka", "cka_debiased", "procrustes_distance"], errors=True, chunks=4)


def sampled(book: Book) -> None:
    """More rows than kernels of all pairs can take: a sample, the same however the rows come."""
    X, Y = book.world.layers("frozen sample", 2300, 3, 2)
    book.ways("sample", {"x": X}, {"y": Y}, measures=["cka_rbf", "cka"], seed=5, only="merged")


def maps(book: Book) -> None:
    """Recorded feature maps, in every shape."""
    one, two, large, odd, flat = book.world.layers("frozen maps", 40, (2, 4, 4), (3, 4, 4), (2, 8, 8), (2, 6, 6), 5)
    a, b = {"4": one, "8": large, "flat": flat}, {"4": two, "6": odd, "constant": torch.ones_like(one)}
    everything = [*FEW, "cca_mean", "nbs", "magnitude_difference"]
    book.ways("maps, pool", a, b, measures=everything, shape="pool")
    book.ways("maps, flatten", a, b, measures=everything, shape="flatten")
    book.ways("maps, positions", a, b, measures=everything, shape="positions")
    book.ways("maps, positions averaged", a, b, measures=everything, shape="positions", resize="average")
    book.ways("maps, dft", a, b, measures=BY_FREQUENCY, shape="dft")
    book.ways("maps, dft averaged", a, b, measures=BY_FREQUENCY, shape="dft", resize="average")
    some = {"measures": ["cka", "svcca"], "errors": True, "chunks": 4, "only": "merged"}
    book.ways("maps, dft, errors", {"x": one}, {"y": two}, shape="dft", **some)
    book.ways("maps, positions, errors", {"x": one}, {"y": two}, shape="positions", **some)
    for refused in ("pwcca", "cka_debiased", "linear_regression_r2", "cka_rbf", "cka_minibatch(batch=8)"):
        book.compare(f"maps, dft of {refused}", a, b, measures=refused, shape="dft")
    shapes = {"4": "pool", "*": "flatten"}
    book.compare("maps, a shape each", a, b, measures=everything, shape=shapes)
    line, solid = book.world.layers("frozen solids", 30, (2, 2, 4, 2), (3, 2, 4, 2))
    book.compare("solids, dft", {"x": line}, {"y": solid}, measures=BY_FREQUENCY, shape="dft")
    x, y = book.world.layers("frozen tokens", 30, (5, 4), (5, 3))
    for shape in ("tokens", "mean", "cls", "last", "flatten"):
        book.ways(f"tokens, {shape}", {"x": x}, {"y": y}, measures=everything, shape=shape, only="merged")


def of_sequences(book: Book) -> None:
    """Tokens by their sequences, all of them and a sample, and at some positions."""
    x, y = book.world.layers("frozen sequences", 30, (5, 4), (5, 3))
    asked: dict[str, Any] = {"measures": ["cka_debiased_by_sequence", "cka"], "shape": "tokens"}
    book.ways("sequences", {"x": x}, {"y": y}, errors=True, chunks=4, **asked)
    book.ways("sequences, a sample", {"x": x}, {"y": y}, tokens=60, only="merged", **asked)
    book.ways("sequences, positions", {"x": x}, {"y": y}, positions="1:-1", only="merged", **asked)


def images(book: Book) -> None:
    """Conv nets that are fed images."""
    models = conv_model(book.world, "one", 3, 2), conv_model(book.world, "two", 5, 1)
    inputs, three = book.world.layers("frozen images", 60, (2, 8, 8))[0], ["0", "2", "5"]
    some = {"measures": FEW, "layers": three}
    book.ways("images", *models, inputs, measures=EVERYTHING, layers=three)
    book.ways("images, errors", *models, inputs, errors=True, chunks=4, **some)
    for shape, resize in (("flatten", None), ("positions", None), ("positions", "average")):
        label = f"images, {shape}{' averaged' if resize else ''}"
        book.ways(label, *models, inputs[:32], shape=shape, resize=resize, **some, only="merged")
    for resize in (None, "average"):
        label = f"images, dft{' averaged' if resize else ''}"
        book.ways(label, *models, inputs, shape="dft", resize=resize, measures=BY_FREQUENCY[::3], layers=three)
    for label, sizes in (("even", (20, 20, 20)), ("uneven", (32, 7, 1, 19, 1))):
        book.compare(f"images, {label} batches", *models, batches(inputs, *sizes), measures=EVERYTHING, layers=three)
        book.compare(
            f"images, {label} batches, errors", *models, batches(inputs, *sizes), errors=True, chunks=4, **some
        )
    book.compare("images, first 50", *models, batches(inputs, 32, 28), examples=50, **some)
    later = nk.collect(*models, inputs, layers=three, progress=False)
    later.save(book.folder / "later.stats", overwrite=True)
    book.attempt("images, measures chosen later", lambda: nk.load(book.folder / "later.stats").compute(LINEAR))
    book.compare("images, default layers", *models, inputs, measures="cka")
    book.compare("images, alone", models[0], data=inputs, measures=["cka", "svcca"])
    book.compare("images, patterns", *models, inputs, measures="cka", layers={"a": ["0", "1"], "b": nn.Conv2d})

    def started(*spans: tuple[int, int]) -> Any:
        loaders = {start: DataLoader(inputs[start:stop], batch_size=9) for start, stop in spans}
        how = {"progress": False, "errors": True, "chunks": 4, **some}
        return nk.merge(
            [nk.collect(*models, loader, start=start, **how) for start, loader in loaders.items()]
        ).compute()

    book.attempt("images, parts from a start", lambda: started((0, 25), (40, 60), (25, 40)))
    book.attempt("images, a part is missing", lambda: started((0, 25), (40, 60)))
    book.attempt("images, parts overlap", lambda: started((0, 25), (20, 60)))


def kinds_of_data(book: Book) -> None:
    """The same images as an array, in batches, with labels, by a loader, a generator, a forward or a transform."""
    models = conv_model(book.world, "one", 3, 2), conv_model(book.world, "two", 5, 1)
    inputs, labels = book.world.layers("frozen data", 30, (2, 8, 8))[0], torch.arange(30) % 5

    def call(scene: str, data: Any, **more: Any) -> None:
        book.compare(f"data: {scene}", *models, data, measures=["cka", "svcca"], layers=["0", "5"], **more)

    call("an array", inputs)
    call("NumPy", inputs.numpy())
    call("pairs with labels", list(zip(inputs.split(8), labels.split(8), strict=True)))
    call("a loader", DataLoader(TensorDataset(inputs, labels), batch_size=7))
    call("a data set", TensorDataset(inputs, labels))
    call("a generator", (batch for batch in inputs.split(11)))
    call(
        "mappings",
        [{"pixels": batch} for batch in inputs.split(8)],
        forward=lambda model, batch: model(batch["pixels"]),
    )
    call("a transform", inputs / 2, transforms=lambda batch: batch * 2)
    call("a transform each", inputs / 2, transforms=(lambda batch: batch * 2, lambda batch: batch + batch))
    sides = [side(model, data=part) for model, part in zip(models, (inputs, inputs.flip(0)), strict=True)]
    book.compare("data: of each side", *sides, measures=["cka", "svcca"], layers=["0", "5"])
    layers = [nk.activations(model, ["0", "5"], inputs) for model in models]
    book.compare("data: activations", *layers, measures=["cka", "svcca"])


class Words(nn.Module):
    """Reads words, of which a mask says which there are."""

    def __init__(self, width: int):
        super().__init__()
        self.embed, self.layer = nn.Embedding(11, width), nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        states = self.embed(input_ids)
        for layer in self.layer:
            states = torch.tanh(layer(states))
        return states


def word_model(world: World, label: str, width: int) -> Words:
    """Return a reader of words, its weights drawn by NumPy."""
    model = Words(width).to(world.dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(world.cast(world.normal(f"{label} {name}", *weight.shape) / width**0.5))
    return model


def sentences(count: int = 40, side: str = "right") -> list[dict[str, Tensor]]:
    """Return batches of sentences of 1 to 7 words, each padded as far as it needs."""
    draw, made = np.random.default_rng(3), []
    lengths, words = draw.integers(1, 8, count), draw.integers(1, 11, (count, 7))
    for places in np.array_split(np.arange(count), 4):
        longest = lengths[places].max()
        mask = np.arange(longest) < lengths[places, None]
        ids = words[places, :longest] * mask
        if side == "left":
            order = np.argsort(mask, axis=1, kind="stable")
            ids, mask = np.take_along_axis(ids, order, 1), np.take_along_axis(mask, order, 1)
        made.append({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask).long()})
    return made


def ragged(book: Book) -> None:
    """Models that read sentences of several lengths."""
    models = word_model(book.world, "first", 5), word_model(book.world, "second", 6)
    everything = [*FEW, "nbs", "cca_mean"]
    for shape in ("tokens", "mean", "cls", "last"):
        for padding in ("right", "left"):
            book.compare(
                f"sentences padded {padding}, {shape}", *models, sentences(side=padding), measures=everything,
                shape=shape,
            )  # fmt: skip
        given = {"measures": everything, "shape": shape, "errors": True, "chunks": 4}
        book.compare(f"sentences, {shape}, errors", *models, sentences(), **given)
        single = [spec for spec in everything if shape != "tokens" or "batch" not in spec]
        book.attempt(
            f"sentences, {shape}, merged",
            lambda given=given | {"measures": single}, single=single: nk.merge(
                [
                    nk.collect(*models, [batch], start=10 * place, progress=False, **given)
                    for place, batch in reversed(list(enumerate(sentences())))
                ]
            ).compute(single),
        )
    book.compare("sentences, default", *models, sentences(), measures=["cka"])
    plain = token_model(book.world, "one", 6), token_model(book.world, "two", 5)
    x = book.world.layers("frozen tokens", 30, (5, 4))[0]
    for shape in ("tokens", None):
        book.ways(f"token models, {shape}", *plain, x, measures=FEW, shape=shape, only="merged")


def of_gradients(book: Book) -> None:
    """Kernels of features and gradients, exact and sketched."""
    models = conv_model(book.world, "one", 3, 2), conv_model(book.world, "two", 5, 1)
    inputs, layers = book.world.layers("frozen gradients", 36, (2, 8, 8))[0], ["0", "2"]
    labels = torch.arange(36) % 5
    book.ways("gradients", *models, inputs, measures=[*KERNELS, "cka"], layers=layers)
    book.compare("gradients, uneven batches", *models, batches(inputs, 20, 1, 15), measures=KERNELS[::4], layers=layers)
    book.compare("gradients, flatten", *models, inputs[:20], measures=KERNELS[::5], layers=layers, shape="flatten")
    book.ways("sketches", *models, inputs, measures=SKETCHES, layers=layers)
    book.compare("sketches, uneven batches", *models, batches(inputs, 20, 1, 15), measures=SKETCHES[::4], layers=layers)
    sides = [side(model, data=part) for model, part in zip(models, (inputs, inputs[:21]), strict=True)]
    book.compare("sketches of two data sets", *sides, measures=SKETCHES[::3], layers=layers)
    book.compare(
        "sketches, stacks", *models, inputs, measures=["sketched_cka(buckets=16, stacks=2, seed=2)"], layers=layers
    )
    pairs = list(zip(inputs.split(12), labels.split(12), strict=True))
    for spec in ("target=labels", "target=predicted", "beta=0", "beta=1", "outputs=multilabel",
                 "outputs=continuous"):  # fmt: skip
        book.compare(f"gradients, {spec}", *models, pairs, measures=f"kernel_cka({spec})", layers=layers)
    wanted = book.world.layers("frozen targets", 36, 5)[0]
    targets = list(zip(inputs.split(12), wanted.split(12), strict=True))
    spec = "kernel_cka(outputs=continuous, target=labels)"
    book.compare("gradients, continuous targets", *models, targets, measures=spec, layers=layers)
    for shape in ("pool", "flatten", "positions"):
        for name, record in (("activations", nk.activations), ("gradients", nk.gradients)):
            book.rows(f"{name}, {shape}", record(models[0], layers, pairs, shape=shape))
    words = word_model(book.world, "first", 5)
    for shape in ("tokens", "mean", "cls", "last"):
        book.rows(f"activations of words, {shape}", nk.activations(words, "layer.*", sentences()[:1], shape=shape))


def of_weights(book: Book) -> None:
    """Weights alone, and atoms that convolutions share."""
    one, two = (conv_model(book.world, name, 3, 2) for name in ("one", "two"))
    book.compare("weights", one, two, measures=WEIGHTS)
    book.compare("weights, corresponding", one, two, measures=WEIGHTS, pairs="corresponding")
    inputs = book.world.layers("frozen weights", 20, (2, 8, 8))[0]
    book.compare("weights and rows", one, two, inputs, measures=["weight_cosine", "cka"])
    sides = side(weights=one.state_dict()), side(weights=two.state_dict())
    book.compare("weights without models", *sides, measures=WEIGHTS)
    if not book.world.double:
        return
    shared = nk.share_coefficients({"one": one, "two": two}, atoms=4)
    book.attempt("atoms", lambda: nk.compare(*shared.models.values(), measures=[*ATOMS, *WEIGHTS], progress=False))
    book.attempt("atoms that are not shared", lambda: nk.compare(
        *(nk.decompose(model, atoms=4).model for model in (one, two)), measures=ATOMS, progress=False))  # fmt: skip


def many(book: Book) -> None:
    """Several models, in one pass and in blocks."""
    models = {name: conv_model(book.world, name, 3 + place, 2) for place, name in enumerate("uvwxyz")}
    inputs, specs = book.world.layers("frozen many", 48, (2, 8, 8))[0], [*FEW, "nbs"]
    short = {"measures": ["cka", "svcca", "nbs"]}
    for label, more in {
        "in one pass": {}, "in blocks": {"memory": 400_000}, "linear, in one pass": short,
        "linear, in blocks": {"memory": 60_000, **short}, "linear, in pairs": {"memory": 40_000, **short},
        "a sample": {"memory": 40_000, "rows": 20, **short}, "errors": {"errors": True, "chunks": 4},
        "errors, in blocks": {"errors": True, "chunks": 4, "memory": 60_000, **short},
        "corresponding": {"pairs": "corresponding"}, "flatten": {"shape": "flatten"},
        "dft": {"shape": "dft", "measures": ["cka", "svcca"]}, "gradients": {"measures": KERNELS[::6]},
        "weights": {"measures": WEIGHTS}, "sketches": {"measures": SKETCHES[::7]},
        "too little memory": {"memory": 100},
    }.items():  # fmt: skip
        options = {"measures": specs, "layers": ["0", "2"], "progress": False, **more}
        data = {"": inputs} | (
            {", batches": batches(inputs, 20, 3, 25)} if "memory" in more and label[0] != "t" else {}
        )
        for kind, given in data.items():
            try:
                compared = nk.compare_many(models, given if label != "weights" else None, **options)
            except nk.NetkinError as refusal:
                book.put(f"many, {label}{kind}", "refused", type(refusal).__name__)
                continue
            for (one, other), comparison in compared.items():
                if one in "uw" and other in "vz":
                    book.comparison(f"many, {label}{kind} | {one} {other}", comparison)
    some = dict(list(models.items())[:3])
    path = book.folder / "many.netkin"
    nk.compare_many(some, inputs, specs, layers=["0", "2"], save=path, overwrite=True, progress=False)
    book.comparison("many, saved | u w", nk.load(path)["u", "w"])
    records = {name: nk.activations(model, ["0", "2"], inputs) for name, model in some.items()}
    book.comparison("many, records | u w", nk.compare_many(records, measures=specs, progress=False)["u", "w"])


def runs(book: Book) -> None:
    """A run of checkpoints, each against the last."""
    steps = {step: conv_model(book.world, f"step {min(step, 20)}", 3, 2) for step in (0, 10, 20, 30)}
    inputs = book.world.layers("frozen run", 40, (2, 8, 8))[0]
    for label, data, options in (
        ("run", inputs, {"measures": FEW}), ("run in batches", batches(inputs, 16, 16, 8), {"measures": FEW}),
        ("run, flatten", inputs, {"measures": ["cka", "svcca"], "shape": "flatten"}),
        ("run, dft", inputs, {"measures": ["cka", "svcca"], "shape": "dft", "layers": ["0", "2"]}),
        ("run, gradients", inputs, {"measures": "kernel_cka", "layers": ["0", "2"]}),
        ("run, weights", None, {"measures": "weight_cosine"}),
    ):  # fmt: skip
        series = nk.dynamics(steps, data, progress=False, **options)
        for step in (0, 20):
            book.comparison(f"{label} | {step}", series[step])
        if series.between is not None:
            book.comparison(f"{label} | between", series.between)


def refusals(book: Book) -> None:
    """What is refused, by its class."""
    models = conv_model(book.world, "one", 3, 2), conv_model(book.world, "two", 5, 1)
    inputs = book.world.layers("frozen refusals", 20, (2, 8, 8))[0]
    X, Y = book.world.layers("frozen refused rows", 20, 4, 3)
    spoiled = inputs.clone()
    spoiled[11] = torch.nan
    path = book.folder / "damaged.stats"
    nk.collect({"x": X}, {"y": Y}, progress=False).save(path, overwrite=True)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    part = partial(nk.collect, {"x": X}, {"y": Y}, progress=False)
    rows = partial(nk.compare, {"x": X}, {"y": Y}, progress=False)
    live = partial(nk.compare, *models, progress=False)
    calls: dict[str, Callable[[], Any]] = {
        "unknown measure": lambda: rows(measures="ckaa"),
        "unknown parameter": lambda: rows(measures="svcca(share=0.9)"),
        "parameter out of range": lambda: rows(measures="svcca(variance=2)"),
        "no measure": lambda: rows(measures=[]),
        "unknown shape": lambda: rows(shape="pooled"),
        "unknown resize": lambda: rows(resize="half"),
        "unknown pairs": lambda: rows(pairs="some"),
        "a pair of no layer": lambda: rows(pairs=[("x", "z")]),
        "no examples": lambda: rows(examples=0),
        "one chunk": lambda: rows(errors=True, chunks=1),
        "memory that is none": lambda: rows(memory=0),
        "unknown engine": lambda: rows(engine="cloud"),
        "other numbers of rows": lambda: nk.compare({"x": X}, {"y": Y[:9]}, progress=False),
        "rows with NaN": lambda: nk.compare({"x": X * torch.nan}, {"y": Y}, progress=False),
        "no rows": lambda: nk.compare({"x": X[:0]}, {"y": Y[:0]}, progress=False),
        "no layers": lambda: nk.compare({}, {"y": Y}, progress=False),
        "no data": lambda: live(None),
        "empty data": lambda: live([]),
        "data with NaN": lambda: live(list(spoiled.split(5))),
        "a model and records": lambda: nk.compare(models[0], {"x": X}, inputs, progress=False),
        "mini-batches of parts of sentences": lambda: nk.merge(
            [
                nk.collect(model, data=[batch], start=10 * place, shape="tokens", measures=BATCHES[0], progress=False)
                for model in [word_model(book.world, "first", 5)]
                for place, batch in enumerate(sentences())
            ]
        ),
        "data of another shape": lambda: live(inputs[:, :1]),
        "no layer of that name": lambda: live(inputs, layers="nine*"),
        "gradients of records": lambda: rows(measures="kernel_cka"),
        "weights of records": lambda: rows(measures="weight_cosine"),
        "dft of rows": lambda: live(inputs, layers=["0"], shape="dft", measures="cka_rbf"),
        "a part of none": lambda: part(part="0/3"),
        "a part above all": lambda: part(part="4/3"),
        "the same part twice": lambda: nk.merge([part(part="1/3"), part(part="1/3")]),
        "parts of other settings": lambda: nk.merge([part(part="1/2"), part(part="2/2", seed=3)]),
        "parts of other chunks": lambda: nk.merge(
            [part(part="1/2", errors=True, chunks=3), part(part="2/2", errors=True, chunks=4)]
        ),
        "parts of other measures": lambda: nk.merge([part(part="1/2"), part(part="2/2", measures="cka_rbf")]),
        "parts of other models": lambda: nk.merge(
            [nk.collect(*models, inputs, part="1/2", progress=False),
             nk.collect(*reversed(models), inputs, part="2/2", progress=False)]
        ),
        "nothing to merge": lambda: nk.merge([]),
        "a measure not collected": lambda: part().compute("cka_rbf"),
        "a damaged file": lambda: nk.load(path),
        "no file": lambda: nk.load(book.folder / "absent.netkin"),
        "one model of many": lambda: nk.compare_many({"u": {"x": X}}, progress=False),
        "a run of one step": lambda: nk.dynamics({0: models[0]}, inputs, progress=False),
        "steps that are not there": lambda: nk.dynamics(
            {0: models[0], 1: models[0]}, inputs, steps=[7], progress=False
        ),
        "two measures, one value asked": lambda: rows(measures=["cka", "nbs"])["x", "y"],
        "a hole asked": lambda: nk.compare({"x": X * 0}, {"y": Y}, progress=False)["x", "y"],
    }  # fmt: skip
    for name, call in calls.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call()
            except Exception as refusal:  # one that is not of netkin is put down, too
                book.put(name, "refused", type(refusal).__name__)
            else:
                book.put(name, "refused", "nothing")


def net(place: int = 0) -> nn.Module:
    return conv_model(World("f64"), f"spread {place}", 3 + place, 2)


def first_net() -> nn.Module:
    return net(0)


def second_net() -> nn.Module:
    return net(1)


def third_net() -> nn.Module:
    return net(2)


def pictures() -> Tensor:
    return World("f64").layers("frozen pictures", 50, (2, 8, 8))[0]


SPREAD: dict[str, dict[str, Any]] = {
    "pool": {"measures": [*FEW, "nbs", "cca_mean"]},
    "errors": {"measures": [*FEW, "nbs"], "errors": True, "chunks": 4},
    "flatten": {"measures": FEW, "shape": "flatten"},
    "positions": {"measures": ["cka", "svcca"], "shape": "positions", "resize": "average", "layers": ["0", "2"]},
    "dft": {"measures": ["cka", "svcca"], "shape": "dft", "layers": ["0", "2"]},
    "gradients": {"measures": KERNELS[::6], "layers": ["0", "2"]},
    "sketches": {"measures": SKETCHES[::6], "layers": ["0", "2"]},
    "weights": {"measures": WEIGHTS},
    "many": {"measures": FEW},
}


def spread(name: str, engine: Any = "local") -> dict[str, Any]:
    """Return comparisons of nets by any engine, under the names of their scenes; for Ray all is given by name."""
    options = {"layers": ["0", "2", "5"], "progress": False, "engine": engine} | SPREAD[name]
    if engine in ("local", "distributed"):
        models, data = [net(0), net(1), net(2)], pictures()
    else:
        models, data = [f"frozen:{place}_net" for place in ("first", "second", "third")], "frozen:pictures"
    data = None if name == "weights" else data
    if name != "many":
        return {name: nk.compare(*models[:2], data, **options)}
    compared = nk.compare_many(dict(zip("uvw", models, strict=True)), data, **options)
    return {f"{name} | {one} {other}": comparison for (one, other), comparison in compared.items()}


def engines(book: Book) -> None:
    """What ranks and workers compute as well."""
    for name in SPREAD:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for scene, comparison in spread(name).items():
                book.comparison(scene, comparison)


def leave_spread(folder: Path, engine: Any, rank: int = 0) -> None:
    """Leave in a file what this process gets by an engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = {
            f"f64 | engines | {scene} | {what}": entry
            for name in SPREAD
            for scene, comparison in spread(name, engine).items()
            for what, entry in entries_of(comparison).items()
        }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(made))


def leave_as_rank(rank: int, folder: Path) -> None:
    leave_spread(folder, "distributed", rank)


def half_precision(book: Book) -> None:
    """Rows and models in 16 bits."""
    a, b = recorded(book.world, "frozen", 60, 6, 4, 5, 4)
    book.ways("records", a, b, measures=EVERYTHING)
    a, b = recorded(book.world, "frozen wide", 20, 40, 5, 30, 4)
    book.ways("wide", a, b, measures=FEW, only="merged")
    one, two = book.world.layers("frozen maps", 30, (2, 4, 4), (3, 4, 4))
    for shape in ("pool", "flatten", "positions", "dft"):
        specs = ["cka", "nbs", "svcca", "cca_mean"]
        book.ways(f"maps, {shape}", {"x": one}, {"y": two}, measures=specs, shape=shape, only="merged")
    models = conv_model(book.world, "one", 3, 2), conv_model(book.world, "two", 5, 1)
    inputs = book.world.layers("frozen images", 40, (2, 8, 8))[0]
    book.ways("live models", *models, inputs, measures=["cka", "nbs", "svcca"], layers=["0", "5"], only="merged")


SCENES = [
    records, wide, sampled, maps, of_sequences, images, kinds_of_data, ragged, of_gradients, of_weights, many, runs,
    refusals, engines,
]  # fmt: skip
SINGLES = [records, wide, maps, images, ragged, of_gradients, of_weights]  # those whose float32 goes other ways


def entries(dtype: str, shake: int = 0, scenes: Iterable[Callable[[Book], None]] | None = None) -> dict[str, Entry]:
    """Return all entries of a dtype by name; with a `shake`, of data moved by rounding."""
    made = scenes or (SCENES if dtype == "f64" else SINGLES if dtype == "f32" else [half_precision])
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        book = Book(dtype, Path(folder), shake)
        for scene in made:
            book.chapter = scene.__name__
            scene(book)
    return book.entries


# --- comparing with the file -----------------------------------------------------------------------------------------


def moved(old: Entry, new: Entry) -> float:
    """Return by how much the numbers of two entries differ, relative above 1; inf if anything else differs."""
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return math.inf
        return max((moved(one, other) for one, other in zip(old, new, strict=True)), default=0.0)
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) / max(1.0, abs(old))
    return 0.0 if old == new else math.inf


def load() -> tuple[dict[str, Entry], dict[str, float], set[str]]:
    """Return the entries of the file, how far each may move, and the names that were left out."""
    stored = json.loads(FILE.read_text())
    names = stored["entries"]
    return {k: v[1] for k, v in names.items()}, {k: v[0] for k, v in names.items()}, set(stored["unsteady"])


# refusals of another class than when the file was made; a ForwardError is a RuntimeError, and says the inputs' form too
SHARPER = {"f64 | refusals | data of another shape | refused": ("RuntimeError", "ForwardError")}


def changes(old: Mapping[str, Entry], held: Mapping[str, float], new: Mapping[str, Entry]) -> list[str]:
    """Return a line for each entry that is missing, new or further off than it is held to."""
    lines = [f"removed  {name}" for name in old if name not in new]
    lines += [f"added    {name}" for name in new if name not in old]
    for name in old.keys() & new.keys():
        by = moved(old[name], new[name])
        if by > held[name] and (old[name], new[name]) != SHARPER.get(name):
            lines.append(f"moved    {name} by {by:.1e}, held to {held[name]:.0e}: {old[name]} -> {new[name]}"[:400])
    return sorted(lines)


def tolerances(made: Mapping[str, Entry], shaken: Iterable[Mapping[str, Entry]]) -> Iterator[tuple[str, float]]:
    """Yield for each entry how far it may move: a power of ten that shaken data stay within, or inf if none will do."""
    for name, entry in made.items():
        dtype, measure = name.split(" | ")[0], name.split(" | ")[-1]
        if measure.startswith("sketched"):  # an example's bucket depends on its last bit
            yield name, (1e-8 if "nbs" in measure else 1e-9) if dtype == "f64" else 1e-5
            continue
        if "live models" in name:  # which compute in 16 bits, as each processor does
            yield name, 1e-2
            continue
        by = max((moved(entry, other.get(name)) for other in shaken), default=0.0)
        held = max(SMALLEST.get(dtype, 1e-6), 10 ** math.ceil(math.log10(by)) if 0 < by < math.inf else 0.0)
        yield name, held if by <= LARGEST.get(dtype, 1e-3) else math.inf


def main() -> None:
    """Show what differs from the file; with ``--write``, write it; with ``--ray FOLDER``, leave what Ray computes."""
    if sys.argv[1:2] == ["--ray"]:
        leave_spread(Path(sys.argv[2]), nk.Ray(shares=2))
        return
    made = {name: entry for dtype in DTYPES for name, entry in entries(dtype).items()}
    if FILE.exists():
        old, held, left_out = load()
        new = {name: entry for name, entry in made.items() if name not in left_out}
        print(*changes(old, held, new), sep="\n")
        far = [moved(old[name], new[name]) for name in old.keys() & new.keys()]
        print(f"{len(far)} entries; same to the last bit: {far.count(0.0)}; to 1e-12: {sum(by <= 1e-12 for by in far)}")
    if "--write" in sys.argv[1:]:
        shaken = [{k: v for dtype in DTYPES for k, v in entries(dtype, shake).items()} for shake in (1, 2)]
        with numpys_lapack():
            shaken.append({k: v for dtype in DTYPES for k, v in entries(dtype).items()})
        held = dict(tolerances(made, shaken))
        lines = [
            f"{json.dumps(name, ensure_ascii=False)}: {json.dumps([held[name], made[name]], separators=(',', ':'))}"
            for name in sorted(made)
            if held[name] < math.inf
        ]
        left = sorted(name for name in made if held[name] == math.inf)
        text = ",\n".join(lines)
        unsteady = ",\n".join(json.dumps(name, ensure_ascii=False) for name in left)
        FILE.write_text(f'{{"entries": {{\n{text}\n}},\n"unsteady": [\n{unsteady}\n]}}\n', encoding="utf-8")
        print(f"{len(lines)} entries written, {len(left)} left out as unsteady, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
