"""`engine="ray"`: workers get names alone, results are those of one process, and what fails is named or done again."""

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import netkin as nk
import rank_worlds
import ray_worlds
from netkin.comparing.alignment import Pairs
from netkin.comparing.engines import DataSpec, terms_for, worker
from netkin.comparing.engines import cluster as clusters
from netkin.comparing.engines.ray import BlockTasks, Ray
from netkin.comparing.request import Options
from netkin.errors import (
    FileError,
    ForwardError,
    InvalidValue,
    MissingExtra,
    NetkinError,
    SourceError,
    UnknownName,
    WorkerError,
)
from netkin.statistics.collector import Study
from rank_worlds import ERRORS, LAYERS, SEVERAL, assert_same

FIRST, SECOND, THIRD = "ray_worlds:first", "ray_worlds:second", "ray_worlds:third"
DATA, LOADER = "ray_worlds:images", "ray_worlds:loader"  # in one batch, and in batches of 7
pytestmark = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")


def local(function, *models, data=None, **options):
    """Return what one process gets."""
    live = [nk.load_model(name, seed=place) for place, name in enumerate(models)]
    return function(*live, data=data and nk.load_data(data), **options)


CALLS = {
    "doubles": (1e-10, [FIRST, SECOND], DATA, {"measures": SEVERAL, "layers": LAYERS, **ERRORS}),
    "floats": (
        1e-6, ["ray_worlds:first_float", "ray_worlds:second_float"], "ray_worlds:float_images",
        {"measures": SEVERAL, "layers": LAYERS, **ERRORS},
    ),
    "a loader": (1e-10, [FIRST, SECOND], "ray_worlds:loader", {"measures": SEVERAL, "layers": LAYERS, **ERRORS}),
    "a shuffled loader": (1e-10, [FIRST, SECOND], "ray_worlds:shuffled", {"layers": LAYERS}),
    "tokens": (1e-10, ["ray_worlds:words"], "ray_worlds:sentences", {"shape": "tokens", **ERRORS}),
    "frequencies": (1e-10, [FIRST, SECOND], DATA, {"layers": LAYERS[:2], "shape": "dft"}),
    "resized maps": (
        1e-10, [FIRST, SECOND], DATA, {"layers": LAYERS[:2], "shape": "positions", "resize": "average"},
    ),
    "some examples": (1e-10, [FIRST], DATA, {"layers": {"a": torch.nn.Conv2d}, "examples": 31}),
    "listed pairs": (1e-10, [FIRST, SECOND], DATA, {"pairs": [("conv1", "conv2"), ("fc", "conv1")]}),
    "gradients": (1e-10, [FIRST, SECOND], DATA, {"measures": "kernel_cka", "layers": LAYERS}),
    "weights alone": (1e-10, [FIRST, SECOND], None, {"measures": "weight_cosine"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_cluster_gets_what_one_process_gets(here, name):
    within, models, data, options = CALLS[name]
    shares = 1 if name == "a shuffled loader" else 3
    found = nk.compare(*models, data=data, engine=Ray(shares=shares), **options)
    whole = local(nk.compare, *models, data=data, **options)
    assert_same(found, whole, within)
    assert found.caveats == whole.caveats
    differing = (
        "call",
        "plan",
        "settings digest",
        *(("data digest",) if name in ("tokens", "a shuffled loader") else ()),
    )
    assert {k: v for k, v in found.provenance.items() if k not in differing} == {
        k: v for k, v in whole.provenance.items() if k not in differing
    }


def test_all_pairs_of_several_models_in_blocks(here, dropped):
    names, options = {"x": FIRST, "y": SECOND, "z": THIRD}, {"measures": ["cka", "svcca"], "layers": LAYERS, **ERRORS}
    found = nk.compare_many(names, DATA, engine=Ray(job="many.job", shares=2), memory=60_000, **options)
    shares = [part.name for part in Path("many.job/parts").glob("share *")]
    pairs = sorted(name.partition(" of 2 of ")[2][:4] for name in shares)
    assert pairs == ["x, y", "x, y", "x, z", "x, z", "y, z", "y, z"]
    assert len(dropped) == len(set(dropped)) == 3 * 3  # shares and their merges
    live = {name: getattr(ray_worlds, spec.partition(":")[2])() for name, spec in names.items()}
    assert_same(found, nk.compare_many(live, ray_worlds.images(), **options), 1e-10)
    assert found.failed == {}
    saved = nk.compare_many(names, DATA, engine=Ray(shares=2), memory=60_000, save="many.netkin", **options)
    assert_same(nk.load("many.netkin"), saved, 0)
    assert nk.jobs.read("many.netkin").condition == "done"


MANY = {"x": FIRST, "y": SECOND, "z": THIRD}


def test_the_plan_of_a_cluster_tells_passes_bytes_and_hours(here):
    how = {"layers": LAYERS, "engine": Ray(shares=2), **ERRORS}
    plan = nk.explain_many(MANY, LOADER, ["cka", "svcca"], **how)
    assert (plan.models, plan.pairs, plan.passes, len(plan.way.blocks)) == (3, 3, 3 * 8, 1)
    assert "forward passes: 24, one of each model on each batch" in str(plan)
    assert plan.lines[-1].startswith("cluster: 2 tasks at once on 2 nodes, about under a second together")
    assert plan.bytes > plan.result > 0
    assert sum(line.startswith("disk, with `save`: up to") for line in plan.lines) == 1
    few = nk.explain_many(MANY, LOADER, ["cka", "svcca"], memory=60_000, **how)
    left = plan.disk - 2 * plan.way.statistics
    assert few.disk == 3 * 2 * few.way.statistics + left  # blocks and shares
    assert len(few.way.blocks) == 3
    assert "several processes share the data" in few.others["rows kept"]
    assert "would be refused: " in str(nk.explain_many(MANY, LOADER, memory=100, **how))
    assert not list(here.iterdir())  # nothing has begun


def test_a_sample_of_rows_is_that_of_one_process(here):
    how = {"layers": LAYERS, "memory": 60_000, "rows": 20, **ERRORS}
    found = nk.compare_many(MANY, LOADER, ["cka", "svcca"], engine=Ray(job="some.job", shares=3), **how)
    whole = nk.compare_many(MANY, LOADER, ["cka", "svcca"], **how)
    assert found["x", "y"]["cka"].exactness == "a sample of 20 of 50 examples"
    assert found["x", "y"].provenance["sample"] == whole["x", "y"].provenance["sample"]
    assert_same(found, whole, 1e-10)
    again = nk.compare_many(MANY, LOADER, ["cka", "svcca"], engine=Ray(job="some.job", shares=3), **how)
    assert again["x", "y"]["cka"].exactness == "a sample of 20 of 50 examples"
    with pytest.raises(FileError, match="differs in rows"):
        nk.compare_many(MANY, LOADER, ["cka", "svcca"], engine=Ray(job="some.job", shares=3), **how | {"rows": 21})


def test_functions_are_found_by_name(here):
    how = {"transforms": "ray_worlds:halved", "forward": ["ray_worlds:feed", None], "layers": LAYERS}
    found = nk.compare(FIRST, SECOND, DATA, engine="ray", **how)
    live = {"transforms": ray_worlds.halved, "forward": [ray_worlds.feed, None], "layers": LAYERS}
    whole = local(nk.compare, FIRST, SECOND, data=DATA, **live)
    assert_same(found, whole, 1e-10)
    assert found.provenance["settings digest"] == whole.provenance["settings digest"]


def test_statistics_of_a_cluster_are_read_later(here):
    found = nk.collect(FIRST, SECOND, DATA, layers=LAYERS, engine=Ray(shares=4), **ERRORS)
    assert_same(found, local(nk.collect, FIRST, SECOND, data=DATA, layers=LAYERS, **ERRORS), 1e-10)
    assert (found.part, found.ranges, found.missing) == ("", [(0, 50)], "")


def test_models_without_weights_are_drawn_from_the_seeds_of_their_places(here):
    found = nk.compare("netkin:digits", "netkin:digits", "digits:test", layers="relu1", engine="ray")
    models = [nk.load_model("netkin:digits", seed=seed) for seed in (0, 1)]
    assert_same(found, nk.compare(*models, nk.load_data("digits:test"), layers="relu1"), 1e-6)


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_a_job_of_other_weights_is_refused(here):
    nk.compare(FIRST, SECOND, DATA, layers="fc", engine=Ray(job="ab.job", shares=1))
    with pytest.raises(FileError, match="'ab.job' holds a comparison that differs in weights of 'b'; "):
        nk.compare(FIRST, THIRD, DATA, layers="fc", engine=Ray(job="ab.job", shares=1))


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["killed", "full_disk"])
def test_a_share_whose_worker_is_lost_is_done_again(here, name):
    found = nk.compare(
        f"ray_worlds:{name}", SECOND, LOADER, layers=LAYERS, engine=Ray(job="ab.job", shares=3), **ERRORS
    )
    assert Path("seen").exists()
    assert_same(found, local(nk.compare, FIRST, SECOND, data=LOADER, layers=LAYERS, **ERRORS), 1e-10)


def test_what_hangs_is_started_elsewhere(here, monkeypatch):
    monkeypatch.setattr(clusters, "LEAST", 1.0)
    begin = time.monotonic()
    found = nk.compare("ray_worlds:hanging", SECOND, LOADER, layers=LAYERS, engine=Ray(shares=3))
    assert Path("seen").exists()
    assert time.monotonic() - begin < 300
    assert_same(found, local(nk.compare, FIRST, SECOND, data=LOADER, layers=LAYERS), 1e-10)


def test_models_that_fail_are_named_and_the_others_compared(here):
    (here / "damaged.pt").write_bytes(b"no weights")
    models = {
        "one": FIRST, "nan": "ray_worlds:broken", "two": SECOND, "late": "ray_worlds:overflowing",
        "damaged": f"{FIRST}@damaged.pt",
    }  # fmt: skip
    found = nk.compare_many(models, LOADER, layers=LAYERS, engine=Ray(shares=3))
    assert list(found) == [("one", "two")]
    assert_same(found["one", "two"], local(nk.compare, FIRST, SECOND, data=LOADER, layers=LAYERS), 1e-10)
    assert set(found.failed) == {"nan", "late", "damaged"}
    assert found.failed["nan"].startswith("layer 'fc' of 'nan' in batch 0 holds ")
    assert re.match("share 3 of 3 of one, two, late \\([0-9a-f]{16}\\): ", found.failed["late"])
    assert "layer 'conv1' of 'late' in batch 2 holds" in found.failed["late"]
    assert "'damaged.pt'" in found.failed["damaged"]
    found.save("many.netkin")
    assert nk.load("many.netkin").failed == found.failed
    assert "left out: 'nan', as it failed: layer 'fc' of 'nan'" in str(found)
    with pytest.raises(LookupError, match="no comparison of 'one' with 'nan', as 'nan' has failed: layer 'fc'"):
        found["one", "nan"]


def test_a_checkpoint_is_left_out_only_if_no_node_can_read_it(here):
    models = {"one": FIRST, "once": "ray_worlds:read_elsewhere", "never": "ray_worlds:unreadable"}
    found = nk.compare_many(models, DATA, layers="fc", engine="ray")
    assert list(found) == [("one", "once")]
    assert set(found.failed) == {"never"}
    assert "was lost 4 times" in found.failed["never"]
    assert "Input/output error" in found.failed["never"]


@pytest.mark.parametrize(
    ("models", "kind", "words"),
    [
        ([FIRST, "ray_worlds:broken"], InvalidValue, "layer 'fc' of 'b' in batch 0 holds"),
        (
            [FIRST, "ray_worlds:overflowing"],
            InvalidValue,
            "share 3 of 3 of a, b: layer 'conv1' of 'b' in batch 2 holds",
        ),
        (["ray_worlds:crashing", SECOND], ForwardError, "'a' could not be run: OSError: this model is broken"),
        (["ray_worlds:words", SECOND], UnknownName, "'a': no layer named 'conv1'"),
        ([FIRST, "ray_worlds:absent"], SourceError, "'b': module 'ray_worlds' has no function 'absent'"),
    ],
)
def test_a_fault_of_one_of_two_models_is_raised(here, models, kind, words):
    with pytest.raises(kind, match=words):
        nk.compare(*models, LOADER, layers=LAYERS, engine=Ray(shares=3))


@pytest.mark.parametrize("other", ["netkin", "torch"])
def test_another_version_on_a_worker_is_refused(here, monkeypatch, other):
    own = worker.versions()
    mine = own | {other: "0.0.1"}
    monkeypatch.setattr(worker, "versions", lambda: mine)
    theirs, ours = (f"netkin {one['netkin']} and torch {one['torch']}" for one in (own, mine))
    words = f"runs {theirs}, and this process {ours}; install the same"
    with pytest.raises(WorkerError, match=re.escape(words)):
        nk.compare(FIRST, SECOND, DATA, engine="ray")


def test_no_port_is_open_to_other_machines(ray_cluster):
    psutil = pytest.importorskip("psutil")
    listening = [
        one.laddr.ip
        for process in psutil.Process().children(recursive=True)
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


# --- bad input --------------------------------------------------------------------------------------------------------

REFUSED = {
    "a model": (
        [torch.nn.Linear(2, 2), SECOND], {},
        "engine='ray' loads models where they run, and 'a' is a live Linear; give it by name: 'module:function@wei",
    ),
    "recorded rows": ([{"x": np.eye(3)}, SECOND], {}, "'a' is a live dict; give it by name"),
    "a loader": (
        [FIRST, SECOND], {"data": torch.ones(3, 2)},
        "reads data where models run, and `data` is a live Tensor; give it by name: 'npz:FILE', ",
    ),
    "a function": ([FIRST, SECOND], {"forward": print}, "`forward` is a live function; give it by name, as 'module:f"),
    "a transform": ([FIRST, SECOND], {"transforms": torch.relu}, "`transforms` is a live function; give it by name"),
    "a shape": ([FIRST, SECOND], {"shape": lambda x: x}, "takes shapes by their names, as 'pool', and `shape` is a"),
    "a GPU": ([FIRST, SECOND], {"device": "cuda:1"}, "write device='cuda' in place of 'cuda:1'"),
    "partial": ([FIRST, SECOND], {"partial": True}, "`partial` is for one process, and engine='ray' shares the data"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_name_is_refused_with_the_form_to_give(name):
    models, options, words = REFUSED[name]
    with pytest.raises(InvalidValue) as refusal:
        nk.compare(*models, **{"data": DATA, "engine": "ray", **options})
    assert words in str(refusal.value)


@pytest.mark.parametrize("options", [{"part": "1/2"}, {"start": 3}])
def test_parts_by_hand_are_refused(options):
    with pytest.raises(InvalidValue, match="is for one process, and engine='ray' shares the data by itself"):
        nk.collect(FIRST, SECOND, DATA, engine="ray", **options)


def test_no_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtra, match="pip install 'netkin\\[ray\\]'"):
        nk.compare(FIRST, SECOND, DATA, engine="ray")


def test_a_cluster_without_gpus_is_refused(here):
    with pytest.raises(InvalidValue, match="no node with a GPU, and each task needs 2 of one"):
        nk.compare(FIRST, SECOND, DATA, device="cuda", engine=Ray(gpus=2))


@pytest.mark.parametrize(("shares", "groups"), [(1, 1), (3, 2)])
def test_tasks_that_run_models_ask_for_their_share_of_a_gpu(shares, groups):
    pairs, names = [("a", "b"), ("a", "c")], dict.fromkeys("abc")
    terms = {"models": names, "options": {"places": names, "transforms": names, "forward": names, "layers": None}}
    told = {
        "measures": [],
        "names": {},
        "identity": "",
        "memory": 1,
        "sample": None,
        "shares": shares,
        "groups": groups,
    }
    block = BlockTasks(terms, SimpleNamespace(examples=9, weights=names), told, pairs, gpus=0.5)
    asked = {one.name: (one.function.rpartition(":")[2], one.gpus) for one in block.tasks("comparison")}
    shared = {("collect_share", 0.5), ("merge_shares", 0.0), ("read_tables", 0.0)}
    runs = {("compare_models", 0.5)} if shares == 1 else shared
    assert set(asked.values()) == runs
    assert sum(gpus > 0 for _, gpus in asked.values()) == shares


def test_data_are_prepared_for_all_models_of_a_call_in_every_block(monkeypatch):
    given, seen = {"a": "hf:one", "b": FIRST, "c": SECOND}, []
    monkeypatch.setattr(worker, "cache", worker.WorkerCache())
    monkeypatch.setattr(worker, "data_identity", lambda data: "known")
    monkeypatch.setattr(DataSpec, "load", lambda spec, models: seen.append(models))
    options = Options(None, {name: name for name in given}, None, None, None, None, None, False)
    request = Ray().request(given, options, Pairs([("b", "c")], "all"), Study({}, []), "digits:test")
    worker.data_of(terms_for(request.terms, ["b", "c"]))
    assert seen == [["hf:one"]]


def test_that_no_node_has_room_is_said_once(monkeypatch):
    monkeypatch.setattr(clusters, "PAUSE", 0)
    monkeypatch.setattr(clusters, "PATIENCE", 2)
    none = SimpleNamespace(slots=lambda gpus: 0, end=lambda running: None)
    tasks = {"one": clusters.ClusterTask("one", "module:function", {})}
    graph = clusters._TaskGraph(none, tasks, nk.jobs.Job(None, "study", {}), ["one"])
    graph._plan()
    with pytest.warns(UserWarning, match="no node of the cluster has room for a task, and 1 wait; add one") as warned:
        assert [graph._start_ready() for _ in range(5)] == [True] * 5
    assert len(warned) == 1


BLOCKS = [
    ([("a", "b"), ("a", "c"), ("b", "c")], None), ([("a", "c"), ("b", "c")], None), ([("a", "b")], None),
    ([("a", "b")], 20), ([("a, b", "c")], None), ([("a", "b, c")], None),
]  # fmt: skip


def test_no_two_blocks_of_a_job_have_parts_of_one_name():
    told = {"shares": 1, "groups": 1}
    blocks = [BlockTasks({}, None, told | {"sample": sample}, pairs, gpus=0) for pairs, sample in BLOCKS]
    assert len({block.wanted("comparison")[0] for block in blocks}) == len(BLOCKS)


@pytest.mark.parametrize(("device", "assigned"), [("cuda", {"CPU": 1.0, "GPU": 0.5}), ("cpu", {"CPU": 1.0})])
def test_a_worker_is_given_what_its_task_asks_for(here, device, assigned):
    with suppress(NetkinError):  # the GPUs of these nodes are declared, and no model can be moved to them
        nk.compare("ray_worlds:assigned", SECOND, DATA, layers="fc", device=device, engine=Ray(gpus=0.5))
    assert json.loads(Path("assigned").read_text()) == assigned


def test_another_cluster_than_the_connected_one_is_refused(ray_cluster):
    assert clusters.Cluster("auto").slots() == 2
    with pytest.raises(
        InvalidValue, match="is connected to the Ray cluster at 127.0.0.1:[0-9]+; leave `address` out, or"
    ):
        clusters.Cluster("127.0.0.1:1")


@pytest.mark.parametrize("options", [{"gpus": 0}, {"shares": 0}, {"shares": 1.5}])
def test_settings_of_the_engine_are_checked(options):
    with pytest.raises(InvalidValue, match=f"`{next(iter(options))}` is the "):
        Ray(**options)


def test_engines_are_told_apart():
    assert rank_worlds.LINEAR
    with pytest.raises(
        LookupError, match="no engine 'rey'; did you mean 'ray'. There are 'local', 'distributed', 'ray'"
    ):
        nk.compare(FIRST, engine="rey")
