"""A whole file of every kind that `nk.load` reads, ways to harm one, and what people do with a file once it is open."""

import copy
import functools
import json
import math
import warnings
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import netkin as nk
from netkin.errors import NetkinError
from netkin.measures.registry import measures, value_of
from netkin.reporting.page import page
from netkin.results import Comparison, Comparisons, Ranking, Series, document
from netkin.results.compression import Compression
from netkin.results.weight_sparsity import LinearCost
from table_worlds import table_of

STRANGE = [
    None, True, False, 0, -1, 3, 2**70, -(2**63), 2**62, 10**400, 0.5, -0.0, 1e308, 5e-324, "", "cka", "x" * 2000,
    "\ud800", "a\nb\x00<script>", "$\\frac", [], {}, [[]], [None], [1, 2], ["in", "out"], ["in", "in"],
    [["in", "out", "why"]], {"in": 1}, {"": ""}, {"in": [[]]}, [{}], [[["in"]]],
]  # fmt: skip


def table(id, **changes):
    values = np.array([[0.9, 0.2], [0.3, np.nan]])
    facts = {"values": values, "missing": {("out", "out"): "'out' is constant"}, "higher_is_closer": True}
    words = {"symmetric": True, "convention": "centred", "statistic": "Moments", "bounds": (0, 1), "parameters": {}}
    sides = {"layers_a": ("in", "out"), "layers_b": ("in", "out")}
    return table_of(id=id, name=id.split("(")[0], **facts | words | sides | changes)


def comparison(a="first", b="second", **changes):
    replicates = np.random.default_rng(0).normal(0.5, 0.01, (3, 2, 2))
    replicates[:, 1, 1] = np.nan
    tables = [
        table("cka", replicates=replicates, chunk_sizes=(5, 6, 7)),
        table("gulp", bounds=(0, np.inf), higher_is_closer=False, parameters={"ridge": 0.1}),
        table("agreement(method=ridge)", kind="score", parameters={"method": "ridge"}),
    ]
    sides = {"layers_a": ("in", "out"), "layers_b": ("in", "out"), "tables": {one.id: one for one in tables}}
    shapes = {"shapes_a": {"in": "pool", "out": "pool"}, "shapes_b": {"in": "pool", "out": "pool"}}
    widths = {"widths_a": {"in": 3, "out": 4}, "widths_b": {"in": 3, "out": 4}}
    facts = {"data": "digits", "examples": 18, "seed": 0, "version": "0.1.0", "provenance": {"weights a": "ab12"}}
    return Comparison(a=a, b=b, **sides | shapes | widths | facts | changes)


def series(**changes):
    steps = (1, 5, 9)
    found = tuple(comparison(f"step {step}", "step 9") for step in steps)
    return Series(run="run", steps=steps, comparisons=found, final_step=9, provenance={"data digest": "0f"}, **changes)


def between():
    """Every step against every other, as a series of weights holds it."""
    steps = ("1", "5", "9")
    sides = {"layers_a": steps, "layers_b": steps}
    values = np.array([[1.0, 0.5, 0.2], [0.5, 1.0, 0.6], [0.2, 0.6, 1.0]])
    one = table("cka", values=values, missing={}, axes=("step", "step"), **sides)
    return comparison("run", "run", tables={"cka": one}, shapes_a={}, shapes_b={}, widths_a={}, widths_b={}, **sides)


def ranking():
    sizes, sides = (10, 11, 12), {"layers_a": ("digits",), "layers_b": ("first", "second")}
    values = np.array([[0.2, 0.9]])
    replicates = values + np.random.default_rng(0).normal(size=(3, 1, 2)) / 100
    facts = {"axes": ("data", "model"), "kind": "score", "bounds": (-math.inf, math.inf), "missing": {}, **sides}
    tables = {"logme": table("logme", values=values, replicates=replicates, chunk_sizes=sizes, **facts)}
    return Ranking(
        score="logme", tables=tables, costs={"logme": 1.0}, parameters={"first": 10, "second": 20}, data="digits",
        examples=33, classes=3, version="0.1.0",
    )  # fmt: skip


# --- files ------------------------------------------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).eval()


def convolutions():
    torch.manual_seed(0)
    parts = [nn.Conv2d(1, 2, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(2, 3, 3, padding=1), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(12, 3)).eval()


def batches(*shape, count=2):
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(12, *shape, generator=draw), torch.arange(12) % 3) for _ in range(count)]


WIDE = {"layers": ["0"], "shape": "flatten"}
CHUNKED = {"errors": True, "chunks": 3}
LINEAR = ["cka", "cka_debiased", "pwcca", "cka_uncentered"]
COLLECTED = {  # by what is collected: measures and options
    "moments": (LINEAR, {}),
    "moments in chunks": (LINEAR, CHUNKED),
    "moments in float32": (["cka"], {}),
    "rows": (["cka_rbf"], CHUNKED),
    "grams": (["cka_minibatch(batch=5)"], CHUNKED),
    "kernels": (["kernel_cka", "kernel_cka(kernel=features)"], {}),
    "sketches": (["sketched_cka(buckets=4)"], {}),
}
OF_MAPS = {
    "linear rows": (LINEAR, {**WIDE, **CHUNKED}),
    "spectra": (["cka", "cca_mean"], {"layers": ["0", "2"], "shape": "dft", **CHUNKED}),
    "positions": (["cka"], {"layers": ["0", "2"], "shape": "positions", "resize": "average"}),
    "filters": (["grassmann(atoms=2)", "weight_cosine", "atom_cosine"], {}),
}


SAMPLED = {"layers": ["0", "1"], "shape": "tokens", "tokens": 8}
OF_TOKENS = {
    "tokens": (LINEAR, {**SAMPLED, "positions": "1:"}),
    "sequences": (["cka_debiased_by_sequence"], {**SAMPLED, **CHUNKED}),
}


def reader():
    """Return a small network of tokens."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 4))


def write_statistics(folder):
    """Write statistics with every collector that a pass feeds."""
    for which, model, data in (
        (COLLECTED, network(), batches(5)), (OF_MAPS, convolutions(), batches(1, 4, 4)),
        (OF_TOKENS, reader(), [torch.arange(24).reshape(8, 3) % 9]),
    ):  # fmt: skip
        for name, (asked, options) in which.items():
            data = None if name == "filters" else data
            found = nk.collect(model, data=data, measures=asked, names=("first", "second"), **options)
            found.save(folder / f"statistics of {name}")


def write_results(folder):
    """Write results as files."""
    made = {
        "comparison": comparison(), "comparisons": Comparisons([comparison(), comparison("first", "third")]),
        "series": series(), "series between": series(between=between()), "ranking": ranking(),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    cost = LinearCost("0", "CSR", 0.0, 120, math.nan, math.nan, math.nan, math.nan, "not here")
    made["sparsity"] = replace(
        nk.sparsity_study(network(), batches(5)[0], sparsities=(0, 0.5)), costs={"model": (cost,)}
    )
    atoms = nn.Sequential(nk.AtomConv2d(1, 2, 3, atoms=2), nn.Flatten(), nn.Linear(2, 3))
    clients = {name: (torch.randn(4, 1, 3, 3, generator=draw), torch.arange(4) % 3) for name in ("first", "second")}
    learnt = nk.learn_tasks(atoms, [nk.Task(name, one, one, 3) for name, one in clients.items()], epochs=1)
    made |= {"task accuracies": learnt.record, "task ensembles": nk.ensemble_tasks(learnt, 1, epochs=1)}
    made["diff"] = nk.diff(network(), network(), batches(5), progress=False)
    made["federation"] = nk.federate(atoms, clients, coefficients="fixed", test=clients, rounds=2)
    for name, one in made.items():
        one.save(folder / name)


def write_networks(folder):
    """Write what belongs to a network."""
    model, data = network(), batches(5)
    nk.stitch(model, "1", model, "1", data, test=data).save(folder / "stitch")
    nk.stitch(model, "1", model, "1", data, "task_loss", epochs=1, rank=2).save(folder / "stitch of rank 2")
    nk.stitch_all(model, model, data, data, ["ridge"], layers=["1"]).save(folder / "sweep of stitches")
    smaller = nk.compress(model, ["2"], k=2, data=data)
    nk.save_compressed(smaller, folder / "compressed")
    recorder = nk.DynamicsRecorder(model, data[0][0], measures="cka")
    for step in range(2):
        recorder.probe(step)
    recorder.save(folder / "recording")
    nk.kernel_ridge(model, data, layers=["1"], buckets=4).save(folder / "kernel ridge")


RECORDED = ("comparison", "comparisons", "series", "series between", "ranking", "sparsity", "federation")
RECORDED += ("task accuracies", "task ensembles", "compressed", "diff")
OF_NETWORKS = ("stitch", "stitch of rank 2", "sweep of stitches", "recording", "kernel ridge")
WHOLE = (
    *RECORDED, *OF_NETWORKS,
    *(f"statistics of {name}" for name in (*COLLECTED, *OF_MAPS, *OF_TOKENS)),
)  # fmt: skip


def write_whole(folder):
    """Write all of them; a file's name says what it holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for write in (write_statistics, write_results, write_networks):
            write(folder)
    return folder


# --- harm -------------------------------------------------------------------------------------------------------------


def places(tree, path=()):
    """Yield the path to every value in nested lists and mappings."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def harmed(tree, draw):
    """Return nested lists and mappings with one to three values changed, dropped, doubled or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice([1, 1, 2, 3])):
        found = list(places(tree))
        if not found:
            return tree
        *path, key = draw.choice(found)
        parent = tree
        for step in path:
            parent = parent[step]
        _harm(parent, key, draw, tree, found)
    return tree


def _harm(parent, key, draw, tree, found):
    way = draw.randrange(8)
    if way == 0:
        del parent[key]
    elif way == 1:
        parent[key] = [parent[key], parent[key]]
    elif way == 2 and isinstance(parent, dict):
        parent[draw.choice(["", "surprise", "in", "cka", "\ud800"])] = parent.pop(key)
    elif way == 3:
        for _ in range(draw.choice([5, 200])):
            parent[key] = [parent[key]]
    elif way == 4:  # what stands elsewhere in the file
        other = tree
        for step in draw.choice(found):
            other = other[step]
        parent[key] = copy.deepcopy(other)
    elif way == 5 and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
        parent[key] = draw.choice([-parent[key], parent[key] + 1, 2 * parent[key], parent[key] * 10**9, 0])
    else:
        parent[key] = copy.deepcopy(draw.choice(STRANGE))


def write_harmed(source, target, draw):
    """Write a harmed copy of a file: of JSON other values, of other files another bit or a part alone."""
    contents = bytearray(source.read_bytes())
    if contents[:1] == b"{":
        target.write_text(json.dumps(harmed(json.loads(contents), draw)))
        return
    place = draw.randrange(len(contents))
    if draw.random() < 0.3:
        del contents[place:]
    else:
        contents[place] ^= 1 << draw.randrange(8)
    target.write_bytes(contents)


# --- use --------------------------------------------------------------------------------------------------------------

NAMED = ("to_pandas", "_repr_html_", "to_json", "series")  # methods that need no arguments
DOCUMENTED = (Comparison, Comparisons, Series, Ranking, nk.Federation, nk.SparsityStudy, Compression)
DOCUMENTED += (nk.TaskAccuracies, nk.TaskEnsembles, nk.Diff)


def uses(result):
    """Return what people do with a result, as functions."""
    calls = [lambda: repr(result), lambda: str(result).encode()]
    calls += [getattr(result, name) for name in NAMED if hasattr(result, name)]
    if isinstance(result, nk.Comparer):
        return calls + _uses_of_statistics(result)
    if isinstance(result, nk.Federation):
        calls += [lambda: [result.state(name) for name in result.clients], lambda: nk.user_similarity(result)]
    if hasattr(result, "map"):
        calls.append(lambda: result.map)
    if isinstance(result, DOCUMENTED):
        calls += [lambda: page(result), lambda: json.dumps(document(result))]
    return calls


def _uses_of_statistics(found):
    several = ("cka", "pwcca", "cka_rbf", "cka_minibatch(batch=5)", "weight_cosine")
    calls = [found.compute, *(functools.partial(found.compute, name) for name in several)]
    return [*calls, lambda: found.merge(_elsewhere(found)).compute(), lambda: found.gaps, lambda: found.missing]


def _elsewhere(found):
    """Return statistics of other examples."""
    other = copy.copy(found)
    other.digest = type(found.digest)(found.digest.labels)
    return other


def _read(one, a, b):
    pair = one.pair(a, b)
    for measure in measures().values():
        if isinstance(pair, measure.facts.reads):
            with suppress(NetkinError):
                value_of(measure, pair)


def use(result, *fine):
    """Do with a result what people do; errors of the kinds `fine` are passed over."""
    for call in uses(result):
        with suppress(*fine):
            call()
