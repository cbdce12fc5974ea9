"""The golden file: numbers that a change of the pass must not move, `golden.json`, and how they are made.

An entry is named ``form/scene/dtype/measure/pair`` and is a number, or the text of a hole, a refusal or a warning.
All come from seeded NumPy data and public calls, on one thread. Numbers of float64 data are compared to 1e-9, others to
1e-5, relative or absolute. Values that follow the scale of the data are divided by it first.

Left out, by `unsteady`: what moves by more than a tenth of its tolerance when the data are shaken by 1e-13 (float64) or
1e-7 (other dtypes) of themselves, or when NumPy's LAPACK takes the place of torch's, as that is rounding; and distances
under 1e-3, which are roots or angles of such a remainder. The names left out stand in the file, beside the entries.

    PYTHONPATH=src python tests/golden.py            # show what differs from the file
    PYTHONPATH=src python tests/golden.py --write    # show it and write the file; the data are shaken twice
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import netkin as nk
from golden_worlds import (
    DTYPES,
    Entries,
    Entry,
    Ledger,
    World,
    batches,
    conv_model,
    linear,
    matrix_scenes,
    numpys_lapack,
    one_thread,
    recorded,
    spectral,
    token_model,
)
from netkin.measures import Measure, find
from netkin.statistics import Grams, LayerGrams, LayerMoments, LayerRows, LayerSpectra, Moments, Rows, Spectra

FILE = Path(__file__).with_name("golden.json")
TOLERANCES = {"f64": 1e-9, "f32": 1e-5, "bf16": 1e-5, "f16": 1e-5}
KERNELS = ["cka_rbf", "cka_rbf_debiased", "cka_rbf(fraction=0.2)", "cka_rbf_debiased(fraction=0.8)"]
FEW = ["cka", "cka_debiased", "svcca", "pwcca", "procrustes_distance", "cka_rbf", "cka_minibatch(batch=8)"]


# --- entries ---------------------------------------------------------------------------------------------------------


def entries(shake: int = 0, dtypes: Iterable[str] = tuple(DTYPES)) -> Entries:
    """Return all entries of some dtypes by name; with a `shake`, of data moved by rounding."""
    made = Entries()
    with one_thread():
        for dtype in dtypes:
            ledger = Ledger(World(dtype, shake))
            for part in PARTS if dtype in ("f64", "f32") else [half_precision]:
                part(ledger)
            made |= ledger.entries
    return made


def matrices(ledger: Ledger) -> None:
    """Every measure called with two matrices."""
    for scene, X, Y, scale in matrix_scenes(ledger.world):
        for spec in [*linear(), *KERNELS, "cka_minibatch(batch=16)", "cka_minibatch(batch=16, kernel=rbf)"]:
            one = find(spec)
            ledger.call("matrices", scene, spec, lambda one, X=X, Y=Y: one.function(X, Y, **one.parameters), scale)
            if scene == "uneven" and not one.facts.symmetric:
                ledger.call("matrices", "turned", spec, lambda one, X=X, Y=Y: one.function(Y, X, **one.parameters))


def statistics(ledger: Ledger) -> None:
    """The linear measures read from `Moments.of` in both precisions."""
    for scene, X, Y, scale in matrix_scenes(ledger.world):
        if scene in ("tall", "wide", "offset"):
            for precision in (torch.float64, None):
                moments = Moments.of(X, Y, precision)
                label = f"{scene} in {'its own' if precision is None else 'float64'}"
                for spec in linear():
                    if precision is not None or not find(spec).facts.precise:
                        ledger.call("Moments.of", label, spec, lambda one, m=moments: one(m), scale)


def gradients(ledger: Ledger) -> None:
    """The gradient of every measure: its norm and its inner product with a fixed matrix, for both sides."""
    everything = [*linear(), *KERNELS[:3], "cka_minibatch(batch=16)", "cka_minibatch(batch=16, kernel=rbf)"]
    for scene, X, Y, _ in matrix_scenes(ledger.world):
        if scene in ("tall", "equal", "uneven", "wide", "mixed"):
            for spec in everything:
                _gradient(
                    ledger, "gradients", scene, find(spec), X, Y, lambda one, x, y: one.function(x, y, **one.parameters)
                )
    X, Y = ledger.world.layers("maps", 30, (2, 4, 4), (3, 4, 4))
    for spec in spectral():
        if find(spec).name == "shape_distance":  # its gradient through complex blocks has a test of its own
            continue
        _gradient(ledger, "gradients", "spectra", find(spec), X, Y, lambda one, x, y: one(Spectra.of(x, y)))


def _gradient(ledger: Ledger, form: str, scene: str, one: Measure, X: Tensor, Y: Tensor, value: Any) -> None:
    sides = [X.clone().requires_grad_(), Y.clone().requires_grad_()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", nk.InflatedWarning)
            given = torch.autograd.grad(value(one, *sides), sides, allow_unused=True)
    except nk.NetkinError as refusal:
        ledger.put(form, scene, one.id, "refusal", f"{type(refusal).__name__}: {refusal}")
        return
    for side, gradient in zip("XY", given, strict=True):
        if gradient is None:
            ledger.put(form, scene, one.id, f"{side} none", "no gradient")
            continue
        along = torch.tensor(np.random.default_rng(len(side) + ord(side)).normal(size=gradient.shape))
        ledger.put(form, scene, one.id, f"{side} norm", float(gradient.double().norm()))
        ledger.put(form, scene, one.id, f"{side} along", float((gradient.double() * along).sum()))


def streamed(ledger: Ledger) -> None:
    """`compare` from streamed moments: more rows than features."""
    world, everything = ledger.world, [*linear(), "cka_minibatch(batch=16)", "cka_rbf"]
    a, b = recorded(world, "streamed", 90, 6, 4, 5, 4)
    ledger.compare("moments", "recorded", a, b, measures=everything)
    ledger.compare("moments", "first 37", a, b, measures=FEW, examples=37)
    ledger.compare("moments", "alone", {**a, "other": b["plain"]}, measures=FEW)
    ledger.compare("moments", "listed", a, b, measures=FEW, pairs=[("plain", "dead"), ("low", "plain")])
    ledger.compare(
        "moments", "corresponding", a, {"plain": b["plain"], "low": b["dead"]}, measures=FEW, pairs="corresponding"
    )
    ledger.compare("moments", "three rows", *({k: v[:3] for k, v in side.items()} for side in (a, b)), measures=FEW)
    a, b = recorded(world, "long", 1300, 6, 4, 5, 4)  # more than two chunks
    ledger.compare("moments", "long", a, b, measures=linear())
    ledger.compare(
        "moments", "single precision", a, b, measures=["cka", "cka_uncentered", "nbs", "magnitude_difference"]
    )
    offset = 1e5 if world.double else 1e2
    moved = world.raw("long offset", 700, 5, 6)
    ledger.compare(
        "moments",
        "offset",
        {"x": world.cast(moved[0] + offset)},
        {"y": world.cast(moved[1] - offset)},
        measures=linear(),
    )
    models = {
        name: {"x": X, "y": X[:, :2] ** 2} for name, X in zip("uvw", world.layers("many", 70, 3, 4, 5), strict=True)
    }
    many = nk.compare_many(models, measures=FEW)
    for one, other in combinations(models, 2):
        ledger.comparison("moments", f"many {one}{other}", many[one, other])


def wide(ledger: Ledger) -> None:
    """`compare` from kept rows: fewer rows than features, or too little memory for moments."""
    world = ledger.world
    a, b = recorded(world, "kept", 30, 80, 5, 70, 4)
    ledger.compare("rows", "recorded", a, b, measures=[*linear(), "cka_rbf", "cka_minibatch(batch=8)"])
    ledger.compare("rows", "first 20", a, b, measures=linear(), examples=20)
    ledger.compare("rows", "listed", a, b, measures=FEW, pairs=[("plain", "dead"), ("low", "plain")])
    ledger.compare("rows", "three rows", *({k: v[:3] for k, v in side.items()} for side in (a, b)), measures=FEW)
    a, b = recorded(world, "kept by limit", 40, 6, 4, 5, 4)
    ledger.compare("rows", "little memory", a, b, measures=linear(), memory=60_000)


def mini_batches(ledger: Ledger) -> None:
    """`compare` from mini-batch Grams: with and without a remainder, or with one too small to count."""
    specs = [f"cka_minibatch(batch={size})" for size in (4, 7, 13, 14, 16, 42, 50)]
    specs += [f"cka_minibatch(batch={size}, kernel=rbf)" for size in (7, 13, 16, 50)]
    specs += ["cka_minibatch(batch=16, kernel=rbf, fraction=0.8)", "cka_minibatch"]
    a, b = recorded(ledger.world, "grams", 42, 6, 30, 50, 4)
    ledger.compare("grams", "recorded", a, b, measures=specs)
    ledger.compare("grams", "three rows", *({k: v[:3] for k, v in side.items()} for side in (a, b)), measures=specs[:1])
    inputs = ledger.world.layers("gram inputs", 45, (2, 8, 8))[0]
    models = conv_model(ledger.world, "one", 3, 2), conv_model(ledger.world, "two", 5, 1)
    ledger.compare("grams", "models", *models, batches(inputs, 16, 16, 13), measures=specs, layers=["0", "2", "5"])
    ledger.compare(
        "grams",
        "uneven models",
        *models,
        batches(inputs, 5, 20, 3, 1, 16),
        measures=specs,
        layers=["0", "5"],
        shape="flatten",
    )


def samples(ledger: Ledger) -> None:
    """`compare` from rows, all of them or a sample of 2,048."""
    a, b = recorded(ledger.world, "sampled", 60, 6, 4, 5, 4)
    ledger.compare("sample", "recorded", a, b, measures=KERNELS)
    X, Y = ledger.world.layers("over the cap", 2300, 3, 2)
    for seed in (0, 5):
        ledger.compare(
            "sample", f"over the cap, seed {seed}", {"x": X}, {"y": Y}, measures=["cka_rbf", "cka"], seed=seed
        )


def maps(ledger: Ledger) -> None:
    """`compare` of feature maps by frequencies, places, means and flattened."""
    n, world = 40, ledger.world
    one, two, large, odd, flat = world.layers("maps in spectra", n, (2, 4, 4), (3, 4, 4), (2, 8, 8), (2, 6, 6), 5)
    a, b = {"4": one, "8": large, "flat": flat}, {"4": two, "6": odd, "flat": flat[:, :3] ** 2}
    b["constant"] = torch.ones_like(one)
    ledger.compare("spectra", "recorded", a, b, measures=spectral(), shape="dft")
    ledger.compare("spectra", "averaged", a, b, measures=spectral(), shape="dft", resize="average")
    ledger.compare("spectra", "few", {"x": one[:6]}, {"y": two[:6]}, measures=spectral(), shape="dft")
    ledger.compare("spectra", "refused", a, b, measures="cka_debiased", shape="dft")
    line, solid = world.layers("other maps", 30, (2, 2, 4, 2), (3, 2, 4, 2))
    ledger.compare("spectra", "solids", {"x": line}, {"y": solid}, measures=spectral(), shape="dft")
    everything = [*FEW, "cca_mean", "linear_regression_r2", "magnitude_difference"]
    for shape in ("pool", "flatten", "positions"):
        ledger.compare(
            "moments" if shape != "flatten" else "rows", f"maps, {shape}", a, b, measures=everything, shape=shape
        )
    ledger.compare("moments", "maps, averaged", a, b, measures=everything, shape="positions", resize="average")
    each = {"4": "pool", "*": "flatten"}
    ledger.compare("rows", "maps, a shape each", a, b, measures=everything, shape=each)


def tokens(ledger: Ledger) -> None:
    """`compare` of token arrays and of models that keep tokens apart."""
    world = ledger.world
    x, y = world.layers("tokens", 30, (5, 4), (5, 3))
    for shape in ("tokens", "mean", "cls", "last", "flatten"):
        ledger.compare("moments", f"arrays, {shape}", {"x": x}, {"y": y}, measures=FEW, shape=shape)
    models = token_model(world, "one", 6), token_model(world, "two", 5)
    for shape in ("tokens", None):
        ledger.compare("moments", f"token models, {shape}", *models, batches(x, 8, 8, 8, 6), measures=FEW, shape=shape)


def whole_models(ledger: Ledger) -> None:
    """`compare` of conv nets fed by batches of different size."""
    world = ledger.world
    models = conv_model(world, "one", 3, 2), conv_model(world, "two", 5, 1)
    three = ["0", "2", "5"]
    inputs = batches(world.layers("inputs", 96, (2, 8, 8))[0], 32, 7, 1, 30, 20, 6)
    ledger.compare(
        "moments", "models", *models, inputs, measures=[*linear(), "cka_rbf", "cka_minibatch(batch=10)"], layers=three
    )
    ledger.compare(
        "rows", "models, flatten", *models, inputs, measures=[*FEW, "nbs", "cca_mean"], shape="flatten", layers=three
    )
    ledger.compare(
        "moments",
        "models, averaged",
        *models,
        inputs,
        measures=FEW,
        shape="positions",
        resize="average",
        layers=["0", "2"],
    )
    ledger.compare("spectra", "models", *models, inputs, measures=spectral(), shape="dft", layers=three)
    ledger.compare("moments", "models, first 50", *models, inputs, measures=FEW, examples=50, pairs="corresponding")


def collectors(ledger: Ledger) -> None:
    """Statistics fed batch by batch, and merged, read by the measures' functions."""
    world = ledger.world
    X, Y, Z = world.layers("collected", 80, 6, 4, 5)
    halves = [[(0, 9), (9, 30), (30, 31)], [(31, 60), (60, 80)]]
    for precision in ("float64", "float32") if not world.double else ("float64",):
        for debiased in (True, False):
            make = lambda d=debiased, p=precision: LayerMoments(  # noqa: E731
                [(["x"], ["y", "z"])], precision=getattr(torch, p), debiased=d
            )
            specs = [spec for spec in linear() if precision == "float64" or not find(spec).facts.precise]
            fed = _merged(make, {"x": X, "y": Y, "z": Z}, halves)
            for a, b in (("x", "y"), ("z", "x")):
                label = f"{a}{b} in {precision}{', debiased' if debiased else ''}"
                for spec in specs:
                    ledger.call("LayerMoments", label, spec, lambda one, f=fed, p=(a, b): one(f[p]))
    # of None a mini-batch is as large as the first batch
    for batch, kernel in ((None, "linear"), (16, "linear"), (16, "rbf"), (7, "rbf")):
        make_grams = lambda b=batch, k=kernel: LayerGrams([(["x", "y"], ["z"])], batch=b or 20, kernel=k)  # noqa: E731
        fed = _fed(make_grams(), {"x": X, "y": Y, "z": Z}, [(0, 20), (20, 25), (25, 80)])
        for name in ("x", "y"):
            ledger.call(
                "LayerGrams",
                f"{name}z in {batch}, {kernel}",
                "cka_minibatch",
                lambda one, f=fed, p=name: one(f[p, "z"]),
            )
    for cap in (None, 50):
        fed = _fed(LayerRows(["x", "y"], cap=cap, seed=3), {"x": X, "y": Y}, [*halves[0], *halves[1]])
        for spec in KERNELS:
            ledger.call("LayerRows", f"cap {cap}", spec, lambda one, f=fed: one(f["x", "y"]))
    images = dict(zip("xyz", world.layers("collected maps", 80, (2, 4, 4), (3, 4, 4), 4), strict=True))
    spectra = _merged(lambda: LayerSpectra([(["x"], ["y", "z"])]), images, halves)
    for pair in (("x", "y"), ("z", "x")):
        for spec in spectral():
            ledger.call("LayerSpectra", "".join(pair), spec, lambda one, p=pair: one(spectra[p]))
    for spec in spectral():
        ledger.call("Spectra.of", "xy", spec, lambda one: one(Spectra.of(images["x"], images["y"])))
    ledger.call("Grams.of", "xy", "cka_minibatch", lambda one: one(Grams.of(X, Y, batch=12)))
    ledger.call("Rows.of", "xy", "cka_rbf", lambda one: one(Rows.of(X, Y)))


def _fed(collector: Any, layers: Mapping[str, Tensor], spans: list[tuple[int, int]]) -> Any:
    for start, stop in spans:
        collector.update({name: rows[start:stop] for name, rows in layers.items()}, range(start, stop))
    return collector


def _merged(make: Callable[[], Any], layers: Mapping[str, Tensor], parts: list[list[tuple[int, int]]]) -> Any:
    first, *others = [_fed(make(), layers, spans) for spans in parts]
    for other in others:
        first = first.merge(other)
    return first


def half_precision(ledger: Ledger) -> None:
    """A few measures of data in 16 bits."""
    X, Y = ledger.world.layers("half", 60, 6, 5)
    for spec in [*FEW, "nbs", "cca_mean", "linear_regression_r2"]:
        ledger.call("matrices", "half", spec, lambda one: one.function(X, Y, **one.parameters))
    ledger.compare("moments", "half", {"x": X}, {"y": Y}, measures=[*linear(), *KERNELS, "cka_minibatch(batch=16)"])
    x, y = ledger.world.layers("half maps", 30, (2, 4, 4), (3, 4, 4))
    ledger.compare("spectra", "half", {"x": x}, {"y": y}, measures=["cca_mean", "cka", "nbs"], shape="dft")
    wide_x, wide_y = ledger.world.layers("half wide", 20, 40, 30)
    ledger.compare("rows", "half", {"x": wide_x}, {"y": wide_y}, measures=[*FEW, "cca_mean", "nbs"])


PARTS = [
    matrices, statistics, gradients, streamed, wide, mini_batches, samples, maps, tokens, whole_models, collectors,
]  # fmt: skip


# --- comparing with the file -----------------------------------------------------------------------------------------


def differs(name: str, old: Entry, new: Entry, share: float = 1.0) -> bool:
    """Tell whether two values of an entry are further apart than a share of its tolerance; texts must be equal."""
    if isinstance(old, str) or isinstance(new, str):
        return old != new
    allowed = share * TOLERANCES[name.split("/")[2]] * max(1.0, abs(old))
    return not abs(old - new) <= allowed


def unsteady(made: Entries, shaken: list[Entries]) -> list[str]:
    """Return the names of entries that rounding moves: by more than a tenth of the tolerance, or a root near zero."""
    names = {name for other in shaken for name in made.keys() ^ other.keys()}
    for name, value in made.items():
        moves = any(name in other and differs(name, value, other[name], 0.1) for other in shaken)
        if moves or (isinstance(value, float) and _is_root_near_zero(name, value)):
            names.add(name)
    return sorted(names)


def _is_root_near_zero(name: str, value: float) -> bool:
    form, _, _, measure, _ = name.split("/")
    if form == "gradients" or measure in ("examples", "magnitude_difference"):
        return False
    return not find(measure).facts.higher_is_closer and value < 1e-3


def load() -> tuple[Entries, set[str]]:
    """Return the entries of the file, and the names that were left out."""
    stored = json.loads(FILE.read_text())
    return stored["entries"], set(stored["unsteady"])


def changes(old: Entries, new: Entries) -> list[str]:
    """Return a line for each entry that is missing, new or different."""
    lines = [f"removed  {name}: {old[name]!r}" for name in sorted(old.keys() - new.keys())]
    lines += [f"added    {name}: {new[name]!r}" for name in sorted(new.keys() - old.keys())]
    both = sorted(old.keys() & new.keys())
    return lines + [f"changed  {k}: {old[k]!r} -> {new[k]!r}" for k in both if differs(k, old[k], new[k])]


def _write(new: Entries, left_out: list[str]) -> None:
    text = json.dumps({"entries": new, "unsteady": left_out}, sort_keys=True, indent=0, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")


def decomposed_by_numpy() -> Entries:
    """Return all entries as they are with NumPy's LAPACK."""
    with numpys_lapack():
        return entries()


def main() -> None:
    """Show what differs from the file; with ``--write``, write it."""
    made, write = entries(), "--write" in sys.argv[1:]
    old, known = load() if FILE.exists() else ({}, set())
    left_out = unsteady(made, [entries(1), entries(2), decomposed_by_numpy()]) if write else sorted(known)
    new = {name: value for name, value in made.items() if name not in set(left_out)}
    lines = changes(old, new)
    kinds = [line.split()[0] for line in lines]
    print(*(line for line in lines if not (line.startswith("added") and not old)), sep="\n")
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("changed", "added", "removed")))
    if write:
        # what has not moved stays to the last digit, so that a diff shows what has
        still = {name: old[name] for name in new.keys() & old.keys() if not differs(name, old[name], new[name])}
        _write(new | still, left_out)
        numbers = sum(isinstance(value, float) for value in new.values())
        print(f"{numbers} numbers and {len(new) - numbers} texts written; {len(left_out)} left out as unsteady")


if __name__ == "__main__":
    main()
