"""`engine="ray"`: workers get names alone, results are those of one process, and what fails is named or done again."""

import json
import re
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import netkin as nk
import ray_worlds
from netkin.comparing.engines import ray as engine
from netkin.comparing.engines import worker
from netkin.comparing.engines.ray import Cluster, Ray
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
from processes import ended, started
from rank_worlds import ERRORS, LAYERS, SEVERAL, assert_same
from refusals import refused

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


MANY = {"x": FIRST, "y": SECOND, "z": THIRD}


def parts(job):
    """Return the kinds of the parts in a job, sorted."""
    return sorted(part.name.partition(" of")[0] for part in Path(job, "parts").iterdir())


def test_all_pairs_of_several_models_in_blocks(here):
    options = {"measures": ["cka", "svcca"], "layers": LAYERS, **ERRORS}
    whole = nk.compare_many(MANY, LOADER, **options)
    found = nk.compare_many(MANY, LOADER, engine=Ray(shares=2), memory=60_000, save="many.netkin", **options)
    assert_same(found, whole, 1e-10)
    assert_same(nk.load("many.netkin"), found, 0)
    assert parts("many.netkin.job") == ["plan", "values", "values", "values"]  # the parts of the data are gone
    state = nk.jobs.read("many.netkin")
    assert (state.condition, state.progress, found.failed) == ("done", "3 of 3 parts", {})


def test_layers_and_functions_of_each_model_in_blocks(here):
    how = {"layers": {"x": "fc", "y": ["conv1", "fc"], "z": None}, "memory": 60_000}
    found = nk.compare_many(MANY, LOADER, engine="ray", transforms=["ray_worlds:halved", None, None], **how)
    whole = nk.compare_many(MANY, LOADER, transforms=[ray_worlds.halved, None, None], **how)
    assert_same(found, whole, 1e-10)


def test_the_plan_of_a_cluster_tells_passes_and_bytes(here):
    how = {"layers": LAYERS, "engine": Ray(shares=2), **ERRORS}
    plan = nk.explain_many(MANY, LOADER, ["cka", "svcca"], **how)
    assert (plan.models, plan.pairs, plan.passes, len(plan.schedule.blocks)) == (3, 3, 3 * 8, 1)
    assert "forward passes: 24, one of each model on each batch" in str(plan)
    assert plan.lines[-1] == "cluster: 2 tasks at once on 2 nodes"
    few = nk.explain_many(MANY, LOADER, ["cka", "svcca"], memory=60_000, **how)
    assert (len(few.schedule.blocks), few.schedule.rows) == (3, 0)
    assert "would be refused: " in str(nk.explain_many(MANY, LOADER, memory=100, **how))
    assert not list(here.iterdir())  # nothing has begun


def test_a_sample_of_rows_is_that_of_one_process(here):
    how = {"layers": LAYERS, "memory": 60_000, "rows": 20, **ERRORS}
    engine = Ray(job="some.job", shares=3)
    found = nk.compare_many(MANY, LOADER, ["cka", "svcca"], engine=engine, **how)
    whole = nk.compare_many(MANY, LOADER, ["cka", "svcca"], **how)
    assert_same(found, whole, 1e-10)
    again = nk.compare_many(MANY, LOADER, ["cka", "svcca"], engine=engine, **how)
    for made in (found, again):
        assert made["x", "y"]["cka"].exactness == "a sample of 20 of 50 examples"
        assert made["x", "y"].provenance["sample"] == whole["x", "y"].provenance["sample"]
    with pytest.raises(FileError, match="differs in rows"):
        nk.compare_many(MANY, LOADER, ["cka", "svcca"], engine=engine, **how | {"rows": 21})


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
    assert (found.record.part, found.ranges, found.missing) == ("", [(0, 50)], "")


def test_models_without_weights_are_drawn_from_the_seeds_of_their_places(here):
    found = nk.compare("netkin:digits", "netkin:digits", "digits:test", layers="relu1", engine="ray")
    models = [nk.load_model("netkin:digits", seed=seed) for seed in (0, 1)]
    assert_same(found, nk.compare(*models, nk.load_data("digits:test"), layers="relu1"), 1e-6)


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_a_job_of_other_weights_is_refused(here):
    nk.compare(FIRST, SECOND, DATA, layers="fc", engine=Ray(job="ab.job", shares=1))
    with pytest.raises(FileError, match="'ab.job' holds a comparison that differs in weights of 'b'; "):
        nk.compare(FIRST, THIRD, DATA, layers="fc", engine=Ray(job="ab.job", shares=1))


def test_after_an_interrupt_the_same_call_continues(here, ray_cluster):
    driver = started(ray_worlds.drive, here, ray_cluster.address)
    assert ended(driver) == -signal.SIGINT or driver.exitcode == 1  # as Python ends by Ctrl-C
    before = {part: part.stat().st_mtime_ns for part in Path("ab.job/parts").iterdir()}
    assert {name.partition(" ")[0] for name in parts("ab.job")} == {"plan", "share"}
    assert nk.jobs.read("ab.job").condition == "interrupted"
    found = nk.compare(*ray_worlds.INTERRUPTED, engine=Ray(job="ab.job", shares=3), layers=LAYERS)
    assert_same(found, local(nk.compare, FIRST, SECOND, data=LOADER, layers=LAYERS), 1e-10)
    assert all(part.stat().st_mtime_ns == when for part, when in before.items() if part.exists())


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["killed", "full_disk"])
def test_a_share_whose_worker_is_lost_is_done_again(here, name):
    found = nk.compare(
        f"ray_worlds:{name}", SECOND, LOADER, layers=LAYERS, engine=Ray(job="ab.job", shares=3), **ERRORS
    )
    assert Path("seen").exists()
    assert_same(found, local(nk.compare, FIRST, SECOND, data=LOADER, layers=LAYERS, **ERRORS), 1e-10)


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
    assert found.failed["late"].startswith("layer 'conv1' of 'late' in batch 2 holds")  # of the last part
    assert "'damaged.pt'" in found.failed["damaged"]
    found.save("many.netkin")
    assert nk.load("many.netkin").failed == found.failed
    with pytest.raises(LookupError, match="no comparison of 'one' with 'nan', as 'nan' has failed: layer 'fc'"):
        found["one", "nan"]


def test_a_checkpoint_is_left_out_only_if_no_node_can_read_it(here):
    models = {"one": FIRST, "once": "ray_worlds:read_elsewhere", "never": "ray_worlds:unreadable"}
    found = nk.compare_many(models, DATA, layers="fc", engine="ray")
    assert list(found) == [("one", "once")]
    assert set(found.failed) == {"never"}
    assert "failed 4 times" in found.failed["never"]
    assert "Input/output error" in found.failed["never"]


def test_a_model_that_kills_its_worker_is_left_out(here):
    models = {"one": FIRST, "two": SECOND, "deadly": "ray_worlds:deadly"}
    found = nk.compare_many(models, DATA, layers="fc", engine="ray")
    assert (list(found), list(found.failed)) == ([("one", "two")], ["deadly"])


@pytest.mark.parametrize(
    ("models", "kind", "words"),
    [
        ([FIRST, "ray_worlds:broken"], InvalidValue, "^layer 'fc' of 'b' in batch 0 holds"),
        ([FIRST, "ray_worlds:overflowing"], InvalidValue, "^layer 'conv1' of 'b' in batch 2 holds"),
        (["ray_worlds:crashing", SECOND], ForwardError, "^'a' could not be run: OSError: this model is broken"),
        (["ray_worlds:words", SECOND], UnknownName, "^no layer named 'conv1'"),
        ([FIRST, "ray_worlds:absent"], SourceError, "^module 'ray_worlds' has no function 'absent'"),
    ],
)
def test_a_fault_of_one_of_two_models_is_raised_as_in_one_process_and_names_it(here, models, kind, words):
    with pytest.raises(kind, match=words) as refusal:
        nk.compare(*models, LOADER, layers=LAYERS, engine=Ray(shares=3))
    assert refusal.value.model == ("b" if models[0] == FIRST else "a")


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
    listening = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a worker that has just ended
            found = process.net_connections("inet")
            listening += [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]
    assert listening
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


# --- bad input --------------------------------------------------------------------------------------------------------

NAMED = "engine='ray' loads things where they are used, and {} is a live {}; give it by name, as "
REFUSED = {
    "a model": ([torch.nn.Linear(2, 2), SECOND], {}, "models", NAMED.format("'a'", "Linear") + "'module:function@wei"),
    "recorded rows": ([{"x": np.eye(3)}, SECOND], {}, "models", NAMED.format("'a'", "dict")),
    "a loader": (
        [FIRST, SECOND],
        {"data": torch.ones(3, 2)},
        "data",
        NAMED.format("`data`", "Tensor") + "'npz:FILE', ",
    ),
    "a function": ([FIRST, SECOND], {"forward": ray_worlds.feed}, "forward", NAMED.format("`forward`", "function")),
    "a transform": ([FIRST, SECOND], {"transforms": ray_worlds.halved}, "transforms", "as 'module:function'"),
    "a shape": ([FIRST, SECOND], {"shape": lambda x: x}, "shape", NAMED.format("`shape`", "function") + "'pool'; or"),
    "a GPU": ([FIRST, SECOND], {"device": "cuda:1"}, "device", "write device='cuda' in place of 'cuda:1'"),
    "partial": ([FIRST, SECOND], {"partial": True}, "partial", "`partial` is for one process, and engine='ray' shares"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_name_is_refused_with_the_form_to_give(name):
    models, options, argument, words = REFUSED[name]
    with pytest.raises(InvalidValue) as refusal:
        nk.compare(*models, **{"data": DATA, "engine": "ray", **options})
    assert words in str(refusal.value)
    assert refusal.value.argument == argument


@pytest.mark.parametrize("options", [{"part": "1/2"}, {"start": 3}])
def test_parts_by_hand_are_refused(options):
    with refused(InvalidValue, next(iter(options))):
        nk.collect(FIRST, SECOND, DATA, engine="ray", **options)


def test_no_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtra, match="pip install 'netkin\\[ray\\]'"):
        nk.compare(FIRST, SECOND, DATA, engine="ray")


def test_a_cluster_without_gpus_is_refused(here):
    with pytest.raises(InvalidValue, match="no node with a GPU, and each task needs 2 of one"):
        nk.compare(FIRST, SECOND, DATA, device="cuda", engine=Ray(gpus=2))


@pytest.mark.parametrize(("device", "assigned"), [("cuda", {"CPU": 1.0, "GPU": 0.5}), ("cpu", {"CPU": 1.0})])
def test_a_worker_is_given_what_its_task_asks_for(here, device, assigned):
    fault = None
    try:
        nk.compare(*["ray_worlds:assigned"] * 2, DATA, layers="fc", device=device, engine=Ray(gpus=0.5))
    except NetkinError as refused:  # the GPUs are declared, and no model can be moved to them
        fault = refused
    assert Path("assigned").exists(), fault
    assert json.loads(Path("assigned").read_text()) == assigned


def test_another_cluster_than_the_connected_one_is_refused(ray_cluster):
    assert Cluster("auto").slots() == 2
    with pytest.raises(InvalidValue, match="is connected to the Ray cluster at 127.0.0.1:[0-9]+; leave `address` out"):
        Cluster("127.0.0.1:1")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://[::1]:1"])
def test_an_address_where_nothing_listens_is_refused_before_ray_tries_for_minutes(address):
    untouched = SimpleNamespace(init=lambda **options: pytest.fail("Ray was asked"))
    with pytest.raises(WorkerError, match=f"found no Ray cluster at {re.escape(repr(address))}"):
        engine._connect(untouched, address)


@pytest.mark.parametrize("options", [{"gpus": 0}, {"shares": 0}, {"shares": 1.5}])
def test_settings_of_the_engine_are_checked(options):
    with refused(InvalidValue, next(iter(options))):
        Ray(**options)


def test_engines_are_told_apart():
    with pytest.raises(LookupError, match="no engine 'rey'; did you mean 'ray'"):
        nk.compare(FIRST, engine="rey")
