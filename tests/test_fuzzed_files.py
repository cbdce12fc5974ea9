"""Files of ours whose contents were harmed: each opens as a result that can be shown, or is refused in a sentence."""

import copy
import json
import math
import os
import random
import shutil
import warnings
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from safetensors.numpy import save
from torch import nn

import netkin as nk
from netkin import files
from netkin.errors import FileFault, NetkinError
from netkin.reporting.page import page
from netkin.results import Claim, Comparison, Comparisons, Measured, Series, Values, document
from netkin.results.weight_sparsity import LinearCost

# of each kind; as for properties that hypothesis tests, the everyday run tries fewer
CASES = int(os.environ.get("NETKIN_FUZZ", min(40, settings.default.max_examples)))
STRANGE = [
    None, True, False, 0, -1, 3, 2**70, -(2**63), 10**400, 0.5, -0.0, 1e308, 5e-324, "", "cka", "x" * 2000, "\ud800",
    "a\nb\x00<script>", "$\\frac", [], {}, [[]], [None], [1, 2], ["in", "out"], ["in", "in"], [["in", "out", "why"]],
    {"in": 1}, {"": ""}, {"in": [[]]}, [{}], [[["in"]]],
]  # fmt: skip


def table(id, **changes):
    values = np.array([[0.9, 0.2], [0.3, np.nan]])
    facts = {"values": values, "holes": {("out", "out"): "'out' is constant"}, "higher_is_closer": True}
    words = {"symmetric": True, "conventions": "centred", "statistic": "Moments", "bounds": (0, 1), "parameters": {}}
    sides = {"layers_a": ("in", "out"), "layers_b": ("in", "out")}
    return Values(id=id, name=id.split("(")[0], **facts | words | sides | changes)


def comparison(a="first", b="second", **changes):
    replicates = np.random.default_rng(0).normal(0.5, 0.01, (3, 2, 2))
    replicates[:, 1, 1] = np.nan
    tables = [
        table("cka", replicates=replicates, chunk_sizes=(5, 6, 7)),
        table("gulp", bounds=(0, np.inf), higher_is_closer=False, parameters={"ridge": 0.1}),
        table("agreement(how=ridge)", kind="worth", parameters={"how": "ridge"}),
    ]
    sides = {"layers_a": ("in", "out"), "layers_b": ("in", "out"), "tables": {one.id: one for one in tables}}
    shapes = {"shapes_a": {"in": "pool", "out": "pool"}, "shapes_b": {"in": "pool", "out": "pool"}}
    widths = {"widths_a": {"in": 3, "out": 4}, "widths_b": {"in": 3, "out": 4}}
    facts = {"data": "digits", "examples": 18, "seed": 0, "version": "0.1.0", "provenance": {"weights a": "ab12"}}
    return Comparison(a=a, b=b, **sides | shapes | widths | facts | changes)


def series():
    steps = (1, 5, 9)
    found = tuple(comparison(f"step {step}", "step 9") for step in steps)
    return Series(run="run", steps=steps, comparisons=found, final_step=9, provenance={"data digest": "0f"})


def claim():
    return Claim(
        id="svcca/bottom-up", figure="Fig. 2", sentence="Layers settle from the bottom up.", expected={"tau": 1},
        criterion="tau above 0.5", measured={"tau": Measured(0.8, 0.1, 5)}, verdict="holds", scale="cpu",
        curves={"layers": {"x": [1, 2], "y": [0.1, None]}},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a whole file of every kind, by its name."""
    folder, draw = tmp_path_factory.mktemp("whole"), torch.Generator().manual_seed(0)
    data = [(torch.randn(12, 5, generator=draw), torch.arange(12) % 3)]
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    comparison().save(folder / "comparison")
    Comparisons([comparison(), comparison("first", "third")]).save(folder / "comparisons")
    series().save(folder / "series")
    for name, one in (("document", comparison()), ("series document", series())):
        (folder / name).write_text(json.dumps(document(one)))
    (folder / "claim").write_text(claim().to_json())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nk.stitch(model, "1", model, "1", data, test=data).save(folder / "stitch")
        nk.save_compressed(nk.compress(model, ["2"], k=2, data=data), folder / "compressed")
        nk.collect(model, data=data, measures=["cka", "cka_rbf"], names=("first", "second")).save(folder / "statistics")
        gradients = ["kernel_cka", "sketched_cka(buckets=4)", "cka_minibatch"]
        nk.collect(model, data=data, measures=gradients, names=("first", "second")).save(folder / "gradients")
        study = nk.sparsity_study(model, data[0], sparsities=(0, 0.5))
        cost = LinearCost("0", "CSR", 0.0, 120, math.nan, math.nan, math.nan, math.nan, "not here")
        study = replace(study, costs={"model": (cost,)})
        study.save(folder / "sparsity")
        (folder / "sparsity document").write_text(json.dumps(document(study)))
        recorder = nk.DynamicsRecorder(model, data[0][0], measure="cka")
        for step in range(2):
            recorder.probe(step)
        recorder.save(folder / "recording")
        atoms = nn.Sequential(nk.AtomConv2d(1, 2, 3, atoms=2), nn.Flatten(), nn.Linear(2, 3))
        clients = {name: (torch.randn(4, 1, 3, 3, generator=draw), torch.arange(4) % 3) for name in ("first", "second")}
        tasks = [nk.Task(name, one, one, 3) for name, one in clients.items()]
        learnt = nk.learn_tasks(atoms, tasks, epochs=1)
        learnt.record.save(folder / "task accuracies")
        nk.ensemble_tasks(learnt, 1, epochs=1).save(folder / "task ensembles")
        nk.federate(atoms, clients, coefficients="fixed", test=clients, rounds=2).save(folder / "federation")
    return folder


KINDS = ("comparison", "comparisons", "series", "document", "series document", "claim", "stitch", "compressed",
         "statistics", "gradients", "recording", "sparsity", "sparsity document", "federation",
         "task accuracies", "task ensembles")  # fmt: skip


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
        way = draw.randrange(6)
        if way == 0:
            del parent[key]
        elif way == 1:
            parent[key] = [parent[key], parent[key]]
        elif way == 2 and isinstance(parent, dict):
            parent[draw.choice(["", "surprise", "in", "cka", "\ud800"])] = parent.pop(key)
        elif way == 3:
            deep = draw.choice([5, 200])
            for _ in range(deep):
                parent[key] = [parent[key]]
        else:
            parent[key] = copy.deepcopy(draw.choice(STRANGE))
    return tree


def write_harmed(source, target, draw):
    contents = source.read_bytes()
    if contents[:1] == b"{":
        target.write_text(json.dumps(harmed(json.loads(contents), draw)))
        return
    header, arrays = files.read(source)
    if draw.random() < 0.15 and arrays:
        name = draw.choice(list(arrays))
        odd = [
            np.atleast_1d(arrays[name])[:1],
            arrays[name].astype(np.float16),
            np.zeros((0, 2)),
            np.full((2, 2), np.inf),
        ]
        arrays = {**arrays, name: draw.choice(odd)} if draw.random() < 0.8 else {}
    target.write_bytes(save(arrays, {"netkin": json.dumps(harmed(header, draw))}))


def use(result, *fine):
    """Do with a result what people do; errors of the kinds `fine` are passed over."""
    if isinstance(result, nk.Statistics):
        calls = [result.compare]
    elif isinstance(result, nk.Federation):
        calls = [lambda: [result.state(name) for name in result.clients], lambda: nk.user_similarity(result)]
    elif isinstance(result, (Comparison, Comparisons, Series)):
        calls = [lambda: page(result), lambda: document(result), result._repr_html_]
    elif isinstance(result, nk.SparsityStudy):
        calls = [lambda: page(result), lambda: document(result)]
    elif isinstance(result, Claim):
        calls = [result.to_json]
    else:
        calls = [result.series] if hasattr(result, "series") else [lambda: result.map] if hasattr(result, "map") else []
    calls += [result.to_pandas] if hasattr(result, "to_pandas") else []
    for call in (lambda: repr(result), lambda: str(result).encode(), *calls):
        with suppress(*fine):
            call()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_harmed_file_opens_as_something_or_is_refused(whole, tmp_path, kind):
    opened, refusals = 0, []
    for case in range(CASES):
        draw = random.Random(f"{kind} {case}")
        write_harmed(whole / kind, tmp_path / "harmed", draw)
        try:
            result = nk.load(tmp_path / "harmed")
        except FileFault as refusal:
            refusals.append(str(refusal))
            continue
        except Exception as fault:
            pytest.fail(f"case {case} of {kind} can't be loaded: {fault!r}")
        opened += 1
        try:
            use(result, NetkinError)
        except Exception as fault:
            pytest.fail(f"case {case} of {kind} can't be used: {fault!r}")
    assert all("harmed'" in refusal for refusal in refusals)
    assert opened + len(refusals) == CASES > opened


def nets(count):
    for seed in range(count):
        torch.manual_seed(seed)
        yield nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


def batches():
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(9))
    return [(part, torch.arange(20) % 3) for part in inputs.split(20)]


JOBS = {
    "training": lambda path: nk.train(*nets(1), batches(), epochs=2, optimizer="adam", save=path, every=2),
    "sweep": lambda path: nk.stitch_all(
        *nets(2), batches(), batches(), ["ridge", "task_loss(epochs=1, every=2)"], layers=["1"], save=path
    ),
    "study": lambda path: nk.dynamics(dict(enumerate(nets(3))), batches(), "cka", save=path),
    "stitch": lambda path: nk.stitch(*pairs(), batches(), "task_loss", epochs=1, resume=path),
}


def pairs():
    a, b = nets(2)
    return a, "1", b, "1"


SLOW = ("sweep", "stitch")  # whose parts are kept as those of a study and a training are


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in JOBS])
@pytest.mark.filterwarnings("ignore")
def test_work_goes_on_from_harmed_parts_or_refuses_them(tmp_path, name):
    work, place, harm = JOBS[name], tmp_path / "whole", tmp_path / "harmed"
    place.mkdir()
    work(place / "run")
    written = [path for path in sorted(place.rglob("*")) if path.is_file() and path.name != "lock"]
    refused = []
    for case in range(CASES // 2):
        draw = random.Random(f"{name} {case}")
        shutil.copytree(place, harm)
        chosen = draw.choice(written)
        write_harmed(chosen, harm / chosen.relative_to(place), draw)
        try:
            work(harm / "run")
        except FileFault as refusal:
            refused.append(str(refusal))
        except Exception as fault:
            pytest.fail(f"case {case} of {name}, {chosen.name}, ends in {fault!r}")
        shutil.rmtree(harm)
    assert len(refused) > CASES // 10
    assert all("harmed" in refusal for refusal in refused)


def test_collectors_open_too(tmp_path, whole):
    collector = nk.LayerMoments([(["a"], ["b"])])
    collector.update({"a": torch.eye(4), "b": torch.ones(4, 2)})
    collector.to_file(tmp_path / "f")
    assert type(nk.load(tmp_path / "f")) is nk.LayerMoments
    assert nk.load(tmp_path / "f")["a", "b"].n == 4
    for (one,) in nk.load(whole / "gradients").collectors:
        one.to_file(tmp_path / one.kind)
        assert type(nk.load(tmp_path / one.kind)) is type(one)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_files_open_and_can_be_used(whole, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = nk.load(whole / kind)
        use(result)  # of a whole file nothing is refused
    assert str(result)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "document" not in kind and kind != "claim"])
def test_a_flipped_bit_is_found_wherever_it_lies(whole, tmp_path, kind):
    contents, draw = (whole / kind).read_bytes(), random.Random(kind)
    start = 8 + int.from_bytes(contents[:8], "little")  # of the arrays
    head, tail = range(start), range(start, len(contents))
    chosen = [*draw.sample(head, 5 * CASES), *draw.sample(tail, min(2 * CASES, len(tail)))]
    for position in [*range(16), *chosen, start - 1, len(contents) - 1]:
        harmed = bytearray(contents)
        harmed[position] ^= 1 << draw.randrange(8)
        (tmp_path / "harmed").write_bytes(harmed)
        with pytest.raises(FileFault):
            files.read(tmp_path / "harmed")
        if position >= start:  # a header is as it was, and can be read without the arrays
            assert files.read_header(tmp_path / "harmed") == files.read_header(whole / kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "document" not in kind and kind != "claim"])
def test_files_from_before_there_were_checksums_still_open(whole, tmp_path, kind):
    header, arrays = files.read(whole / kind)
    (tmp_path / "old").write_bytes(save(arrays, {"netkin": json.dumps(header)}))
    assert not files.has_checksum(tmp_path / "old")
    assert files.has_checksum(whole / kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old, new = nk.load(tmp_path / "old"), nk.load(whole / kind)
        use(old, NetkinError)
    assert type(old) is type(new)
    if kind in ("comparison", "comparisons", "series", "compressed"):
        assert old == new
