"""`nk.dynamics(..., engine="ray")`: steps are those of one process, and those that fail are named."""

import pytest
import torch
from torch import nn

import netkin as nk
import ray_worlds
from netkin.comparing.engines.ray import Ray
from netkin.errors import InvalidValue, SourceError, WorkerError
from netkin.memory import format_bytes
from table_worlds import sentences

CALL = {
    "data": "ray_worlds:loader",
    "measures": ["cka", "svcca"],
    "model": "ray_worlds:first",
    "layers": ["conv1", "fc"],
}
pytestmark = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")


@pytest.fixture
def run(ray_cluster, tmp_path, monkeypatch):
    """The folder of a run of four steps, beside which a call is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for step in (0, 10, 20, 30):
        torch.save(ray_worlds.seeded(step).state_dict(), tmp_path / "run" / f"step_{step}.pt")
    return tmp_path / "run"


def local(run, **options):
    call = CALL | {"data": nk.load_data(CALL["data"])}
    return nk.dynamics(run, **call | options)


def assert_same(found, whole):
    assert (found.steps, found.run, found.measures) == (whole.steps, whole.run, whole.measures)
    for step in whole:
        for name, table in whole[step].tables.items():
            assert found[step][name].values == pytest.approx(table.values, abs=1e-10)
    assert dict(found.provenance) == dict(whole.provenance)
    assert dict(found[0].provenance) | {"plan": ""} == dict(whole[0].provenance) | {"plan": ""}


def test_a_cluster_follows_a_run_as_one_process_does(run):
    found = nk.dynamics("run", engine="ray", save="run.netkin", **CALL)
    assert_same(found, local("run"))
    parts = {part: part.stat().st_mtime_ns for part in (run.parent / "run.netkin.job" / "parts").iterdir()}
    assert len(parts) == 4
    next(iter(parts)).unlink()
    assert_same(nk.load("run.netkin"), nk.dynamics("run", engine="ray", save="run.netkin", **CALL))
    kept = [part for part, written in parts.items() if part.stat().st_mtime_ns == written]
    assert kept == list(parts)[1:]
    local("run", save="run.netkin")  # which finds all of it done
    assert [part.stat().st_mtime_ns for part in kept] == [parts[part] for part in kept]


def test_a_cluster_explains_a_run_in_passes_and_bytes(run):
    plan = nk.explain_dynamics("run", engine="ray", **CALL)
    one = nk.explain_dynamics("run", **CALL | {"data": nk.load_data(CALL["data"])})
    assert (plan.steps, plan.each.pairs, plan.each.measures) == (one.steps, one.each.pairs, one.each.measures)
    batches = plan.each.passes // 2
    assert plan.passes == batches * (4 + 2 - 1)  # the final model runs in each of the two workers
    assert plan.lines[-2] == (
        f"memory: {format_bytes(plan.each.bytes)} for the statistics of a task, whose limit is "
        f"{format_bytes(plan.each.limit)}"
    )
    assert plan.lines[-1] == "cluster: 2 tasks at once on 2 nodes"
    refused = nk.explain_dynamics("run", engine="ray", memory=100, **CALL)
    assert "the limit is 100" in refused.refused


def test_steps_that_fail_are_named_and_the_others_compared(run):
    (run / "step_10.pt").write_bytes(b"no weights")
    torch.save(ray_worlds.broken().state_dict(), run / "step_20.pt")
    found = nk.dynamics("run", engine="ray", save="run.netkin", **CALL)
    assert (found.steps, found.missing) == ((0, 30), (10, 20))
    assert found.provenance["failed step 10"].startswith("'run/step_10.pt' is damaged or no weights file")
    assert "layer 'fc' of 'step 20' in batch 0 holds 21 NaN or Inf" in found.provenance["failed step 20"]
    assert [warning.partition(":")[0] for warning in sentences(nk.load("run.netkin")) if "failed" in warning] == [
        "step 10 has failed and is left out", "step 20 has failed and is left out",
    ]  # fmt: skip
    assert "interrupted" not in str(found)
    assert nk.jobs.read("run.netkin").condition == "done"
    whole = local({step: run / f"step_{step}.pt" for step in (0, 30)})
    assert found[0]["svcca"].values == pytest.approx(whole[0]["svcca"].values, abs=1e-10)


def test_a_step_is_left_out_only_if_no_node_can_read_it(run):
    found = nk.dynamics("run", engine="ray", **CALL | {"model": "ray_worlds:read_elsewhere"})
    assert (found.steps, found.missing) == ((0, 10, 20, 30), ())
    with pytest.raises(WorkerError, match="failed 4 times, .*Input/output error"):
        nk.dynamics("run", engine="ray", **CALL | {"model": "ray_worlds:unreadable"})


def test_without_the_final_step_nothing_is_compared(run):
    (run / "step_30.pt").write_bytes(b"no weights")
    with pytest.raises(SourceError, match="'run/step_30.pt' is damaged or no weights file"):
        nk.dynamics("run", engine="ray", **CALL)


def test_functions_and_weights_alone(run):
    how = {"transform": "ray_worlds:halved", "forward": "ray_worlds:feed"}
    live = {"transform": ray_worlds.halved, "forward": ray_worlds.feed}
    found, whole = nk.dynamics("run", engine="ray", **CALL | how), local("run", **live)
    assert found[10]["cka"].values == pytest.approx(whole[10]["cka"].values, abs=1e-10)
    assert found.provenance["asked transform"] == whole.provenance["asked transform"]
    alone = {"data": None, "measures": "weight_cosine", "layers": None}
    found, whole = nk.dynamics("run", engine="ray", **CALL | alone), local("run", **alone)
    assert found.between.tables.keys() == whole.between.tables.keys()
    assert found[10]["weight_cosine"].values == pytest.approx(whole[10]["weight_cosine"].values, abs=1e-10, nan_ok=True)


REFUSED = {
    "live steps": (
        {"run": dict(enumerate([nn.Linear(2, 2)] * 2))}, "run", "step 0 is a live Linear; give it by name",
    ),
    "a live network": (
        {"model": ray_worlds.first}, "model", "`model` is a live function; give it by name, as 'module:function'",
    ),
    "live data": ({"data": torch.ones(3)}, "data", "`data` is a live Tensor; give it by name"),
    "no data": ({"data": None}, "data", "`data` is missing: name a data set, as in 'digits:test'."),
    "a live transform": ({"transform": ray_worlds.halved}, "transform", "`transform` is a live function; give it"),
    "partial": ({"partial": True}, "partial", "`partial` is for one process; with `save` the same call continues"),
    "a job": ({"engine": Ray(job="x")}, "engine", "keeps its parts beside `save`; leave `job` out of the engine"),
    "torchrun": (
        {"engine": "distributed"}, "engine", "`dynamics` takes engine='local' or engine='ray', and not 'distributed'.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_cluster_can_not_do_is_refused(name, run):
    options, argument, words = REFUSED[name]
    with pytest.raises(InvalidValue) as refusal:
        nk.dynamics(**{"run": "run", "engine": "ray", **CALL, **options})
    assert words in str(refusal.value)
    assert refusal.value.argument == argument
