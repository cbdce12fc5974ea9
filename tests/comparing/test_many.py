"""All pairs of many models, in several passes that each fit the memory, give the numbers of one pass."""

import inspect
import re
import weakref
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.comparing import sides
from netkin.comparing.feed import HeldExamples
from netkin.comparing.many_models import ManyPlan, ModelBlock, blocks_of
from netkin.comparing.pairs_job import PairsJob
from netkin.errors import FileError, InvalidValue, MemoryLimit
from netkin.jobs import Job
from netkin.measures.registry import find
from quickly import slow_but
from refusals import refused

MEASURES = ["cka", "svcca", "cka_debiased"]


class Counted(nn.Sequential):
    """A small net that counts the examples that it has seen."""

    def __init__(self, width=12):
        super().__init__(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 5))
        self.seen = []

    def forward(self, inputs):
        self.seen.append(len(inputs))
        return super().forward(inputs)


@pytest.fixture
def nets():
    torch.manual_seed(0)
    return {f"net{place}": Counted(12 + place % 3).eval() for place in range(6)}


@pytest.fixture
def more_nets(nets):
    return nets | {f"net{place}": Counted(12 + place % 3).eval() for place in range(6, 9)}


@pytest.fixture
def inputs():
    return torch.randn(90, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("count", "size"), [(2, 1), (3, 1), (7, 1), (7, 2), (9, 4), (10, 3), (11, 5), (40, 8)])
def test_every_pair_is_in_one_block_and_no_block_is_too_large(count, size):
    pairs = list(combinations(map(str, range(count)), 2))
    blocks = blocks_of(pairs, size)
    assert sorted(pair for block in blocks for pair in block.pairs) == sorted(pairs)
    assert all(len(block.models) <= max(2 * size, 2) for block in blocks)
    assert all({name for pair in block.pairs for name in pair} == set(block.models) for block in blocks)
    groups = -(-count // size)
    assert len(blocks) == (1 if groups < 3 else groups * (groups - 1) // 2)


def tables(many):
    return {(*pair, name): table for pair, one in many.items() for name, table in one.tables.items()}


def assert_same(many, other, atol=1e-7):
    assert list(many) == list(other)
    found = tables(many)
    for key, table in tables(other).items():
        mine = found[key]
        np.testing.assert_allclose(mine.values, table.values, atol=atol, rtol=0)
        assert mine.missing == table.missing
        assert mine.exactness == table.exactness
        if table.replicates is not None:
            np.testing.assert_allclose(mine.replicates, table.replicates, atol=atol, rtol=0)


@pytest.mark.parametrize("pairs", slow_but(["all", "corresponding"], "corresponding"))
def test_several_passes_give_the_numbers_of_one(nets, inputs, pairs):
    nets, options = dict(list(nets.items())[:6]), {"pairs": pairs, "errors": True, "chunks": 2, "progress": False}
    whole = nk.compare_many(nets, inputs, MEASURES, **options)
    for model in nets.values():
        model.seen.clear()
    plan = nk.explain_many(nets, inputs, MEASURES, **options)
    limit = plan.schedule.statistics // 2
    told = nk.explain_many(nets, inputs, MEASURES, memory=limit, **options)
    assert len(plan.schedule.blocks) == 1
    assert len(told.schedule.blocks) > 1
    assert told.schedule.bytes <= limit
    parts = nk.compare_many(nets, inputs, MEASURES, memory=limit, **options)
    assert_same(parts, whole)


def test_the_forward_passes_are_those_of_the_plan(nets, inputs):
    data = DataLoader(TensorDataset(inputs.repeat(40, 1)), batch_size=300)
    plan = nk.explain_many(nets, data, MEASURES, progress=False)
    limit = plan.schedule.statistics * 2 // 3
    told = nk.explain_many(nets, data, MEASURES, memory=limit, progress=False)
    assert not told.schedule.rows
    for model in nets.values():
        model.seen.clear()
    nk.compare_many(nets, data, MEASURES, memory=limit, progress=False)
    assert sum(model.seen.count(300) for model in nets.values()) == told.passes
    assert f"forward passes: {told.passes}" in str(told)


@pytest.mark.slow
def test_kept_rows_are_those_of_one_run(nets, inputs):
    plan = nk.explain_many(nets, inputs, MEASURES, progress=False)
    limit = plan.schedule.statistics * 3 // 5
    told = nk.explain_many(nets, inputs, MEASURES, memory=limit, progress=False)
    assert told.schedule.rows
    assert told.passes == len(nets)
    for model in nets.values():
        model.seen.clear()
    many = nk.compare_many(nets, inputs, MEASURES, memory=limit, progress=False)
    assert [model.seen.count(len(inputs)) for model in nets.values()] == [1] * len(nets)
    assert_same(many, nk.compare_many(nets, inputs, MEASURES, progress=False))


def test_half_precision_is_remembered_with_kept_rows(inputs):
    torch.manual_seed(0)
    nets = {str(place): nn.Linear(6, 40).to(torch.bfloat16) for place in range(6)}
    whole = nk.compare_many(nets, inputs.bfloat16(), "cca_mean", progress=False)
    plan = nk.explain_many(nets, inputs.bfloat16(), "cca_mean", progress=False)
    limit = plan.schedule.statistics * 2 // 3
    assert nk.explain_many(nets, inputs.bfloat16(), "cca_mean", memory=limit, progress=False).schedule.rows
    parts = nk.compare_many(nets, inputs.bfloat16(), "cca_mean", memory=limit, progress=False)
    for pair, one in whole.items():
        assert one.provenance["directions a"] == parts[pair].provenance["directions a"]
    assert_same(parts, whole)


def test_a_sample_is_taken_only_if_allowed_and_needed_and_it_is_named(nets, inputs):
    whole = nk.compare_many(nets, inputs, "cka", rows=30, progress=False)
    assert whole["net0", "net1"].examples == 90  # all fit in one pass
    assert whole["net0", "net1"]["cka"].exactness == "exact"
    plan = nk.explain_many(nets, list(inputs.split(9)), "cka", progress=False)
    limit = plan.schedule.statistics // 4
    told = nk.explain_many(nets, list(inputs.split(9)), "cka", memory=limit, rows=30, progress=False)
    many = nk.compare_many(nets, list(inputs.split(9)), "cka", memory=limit, rows=30, progress=False)
    one = many["net0", "net1"]
    assert told.schedule.is_sample
    assert one["cka"].exactness == "a sample of 30 of 90 examples"
    assert one.examples == 30
    assert one.provenance["sample"] == "a sample of 30 of 90 examples, seed 0"
    assert nk.compare_many(nets, inputs, "cka", memory=limit, progress=False)["net0", "net1"].examples == 90


def test_a_sample_holds_the_same_examples_however_they_are_batched(inputs):
    numbered = torch.arange(90.0)[:, None]
    first, second = (torch.cat(list(HeldExamples(data, None, 20, 3))) for data in (numbered, list(numbered.split(7))))
    assert torch.equal(first, second)
    assert len(first) == 20
    assert not torch.equal(first, torch.cat(list(HeldExamples(numbered, None, 20, 4))))


def test_models_given_by_name_are_loaded_when_they_run(tmp_path, monkeypatch):
    models = {}
    for seed in range(5):
        torch.save(nk.load_model("netkin:digits", seed=seed).state_dict(), tmp_path / f"{seed}.pt")
        models[f"seed {seed}"] = f"netkin:digits@{tmp_path / f'{seed}.pt'}"
    data, options = nk.load_data("digits:test"), {"layers": ["relu1", "fc"], "progress": False, "examples": 60}
    live = {name: nk.load_model(spec) for name, spec in models.items()}
    assert_same(nk.compare_many(models, data, "cka", **options), nk.compare_many(live, data, "cka", **options))
    plan = nk.explain_many(models, data, "cka", **options)
    weights = sum(one.nbytes for one in live["seed 0"].state_dict().values())
    assert plan.schedule.models == 5 * weights
    fewer = nk.explain_many(models, data, "cka", memory=plan.schedule.statistics + 2 * weights, **options)
    assert len(fewer.schedule.blocks) > 1


@pytest.mark.slow
def test_models_given_by_name_are_forgotten_when_no_pass_needs_them(tmp_path, monkeypatch):
    models = {}
    for seed in range(6):
        torch.save(nk.load_model("netkin:digits", seed=seed).state_dict(), tmp_path / f"{seed}.pt")
        models[f"seed {seed}"] = f"netkin:digits@{tmp_path / f'{seed}.pt'}"
    data, options = nk.load_data("digits:test"), {"layers": ["fc"], "progress": False, "examples": 60}
    whole = nk.compare_many(models, data, "cka", **options)
    alive, most, load = weakref.WeakSet(), [], sides.load_model

    def counted(*given, **how):
        alive.add(model := load(*given, **how))
        most.append(len(alive))
        return model

    monkeypatch.setattr(sides, "load_model", counted)
    two = nk.explain_many(list(models.values())[:2], data, "cka", **options).schedule
    few = two.statistics + two.models
    told = nk.explain_many(models, data, "cka", memory=few, **options)
    most.clear()
    assert_same(nk.compare_many(models, data, "cka", memory=few, **options), whole)
    assert (
        max(most) <= max(len(block.models) for block in told.schedule.blocks) + 1 < 6
    )  # one before another is forgotten


def test_models_given_by_name_need_no_data_for_measures_of_weights():
    models = {"a": "netkin:digits", "b": "netkin:digits"}
    live = {name: nk.load_model(spec, seed=place) for place, (name, spec) in enumerate(models.items())}
    assert_same(nk.compare_many(models, measures="weight_cosine"), nk.compare_many(live, measures="weight_cosine"))


def test_data_of_another_order_in_each_pass_are_refused(more_nets):
    class Drawn:
        examples = 5000

        def __iter__(self):
            yield from torch.from_numpy(np.random.default_rng().normal(size=(5000, 6))).float().split(500)

    plan = nk.explain_many(more_nets, Drawn(), "cka", progress=False)
    limit = plan.schedule.statistics * 2 // 3
    plan = nk.explain_many(more_nets, Drawn(), "cka", memory=limit, progress=False)
    assert len(plan.schedule.blocks) > 1
    with pytest.raises(InvalidValue, match="other examples, or another order, in each pass"):
        nk.compare_many(more_nets, Drawn(), "cka", memory=limit, progress=False)


def test_what_two_models_need_is_refused_if_it_does_not_fit(nets, inputs):
    with refused(MemoryLimit, "memory"):
        nk.compare_many(nets, inputs, MEASURES, memory=2_000, progress=False)
    plan = nk.explain_many(nets, inputs, MEASURES, memory=2_000, progress=False)
    assert re.search("would be refused: .* need", str(plan))


@pytest.mark.parametrize("rows", [0, True, 2.5])
def test_a_sample_of_no_size_is_refused(nets, inputs, rows):
    with refused(InvalidValue, "rows"):
        nk.compare_many(nets, inputs, rows=rows)


def test_a_stream_is_refused_where_several_passes_are_needed(nets, inputs):
    with pytest.raises(MemoryLimit):
        nk.compare_many(nets, iter(inputs.split(30)), MEASURES, memory=40_000, progress=False)
    with pytest.raises(InvalidValue, match="what it takes from an iterator is gone"):
        nk.explain_many(nets, iter(inputs.split(30)))


# --- as a job ---------------------------------------------------------------------------------------------------------


class Stopped(Counted):
    """A net that stops its process, as Ctrl-C does, when it has seen enough."""

    left = 10**9  # examples until then

    def forward(self, inputs):
        if self.left <= 0:
            raise KeyboardInterrupt
        self.left -= len(inputs)
        return super().forward(inputs)


@pytest.mark.parametrize("passes", slow_but([1, 3], 3))
def test_a_job_continues_where_it_stopped(inputs, tmp_path, passes):
    torch.manual_seed(0)
    nets, data = {str(place): Stopped().eval() for place in range(3)}, list(inputs.repeat(20, 1).split(150))
    call = {"measures": MEASURES, "errors": True, "chunks": 3, "progress": False}
    whole = nk.compare_many(nets, data, **call)
    limit = nk.explain_many(nets, data, **call).schedule.statistics * 2 // (3 if passes > 1 else 2)
    call |= {"memory": limit, "save": tmp_path / "many.netkin"}
    assert len(nk.explain_many(nets, data, **call).schedule.blocks) == passes
    nets["2"].seen.clear()
    nets["2"].left = 750 if passes == 1 else 1800 + 1200  # in the 4th of 8 shares, or in the 2nd of its 2nd pass
    with pytest.raises(KeyboardInterrupt):
        nk.compare_many(nets, data, **call)
    assert nk.jobs.read(tmp_path / "many.netkin").condition == "interrupted"
    parts = {part: part.stat().st_mtime_ns for part in (tmp_path / "many.netkin.job" / "parts").iterdir()}
    assert sum(part.name.startswith("sums of") for part in parts) == 1
    for net in nets.values():
        net.seen, net.left = [], 10**9
    assert_same(nk.compare_many(nets, data, **call), whole)
    assert sum(count for count in nets["2"].seen if count > 3) == (
        1800 * 5 // 8 if passes == 1 else 1800 // 2
    )  # what was finished does not run again
    assert_same(nk.load(tmp_path / "many.netkin"), whole)
    tables = [part for part in parts if part.name.startswith(("values", "plan"))]
    assert all(part.stat().st_mtime_ns == parts[part] for part in tables)
    assert not list((tmp_path / "many.netkin.job" / "parts").glob("sums*"))


@pytest.mark.slow
def test_a_job_counts_the_examples_of_all_its_shares(nets, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("netkin.progress.PAUSE", 0)
    heard, data = [], list(inputs.split(10))
    nk.compare_many(nets, data, progress=lambda *call: heard.append(call), save=tmp_path / "many.netkin")
    reading = [(done, total) for done, total, what in heard if what == "reading"]
    assert reading == sorted(reading)
    assert {total for _, total in reading} == {90}
    assert reading[-1][0] == 90
    assert not any(what == "comparing" for *_, what in heard)  # passes, of which there is one
    assert nk.jobs.read(tmp_path / "many.netkin").progress == "90 of 90 examples"


def test_sums_of_another_number_of_shares_are_not_continued(nets, inputs):
    a, b, *_ = nets.values()

    def collect(share, shares):
        if (share, shares) == (3, 4):
            raise KeyboardInterrupt
        return nk.collect(a, b, inputs, measures="cka", part=f"{share}/{shares}", progress=False)

    block = ModelBlock(("a", "b"), (("a", "b"),))
    with Job(None, "comparison", {}) as job:
        parts = PairsJob(job, [find("cka")], [block])
        with pytest.raises(KeyboardInterrupt):
            parts.comparisons_of(block, 4, collect)
        (found,) = parts.comparisons_of(
            block, 2, collect
        )  # as where models are added, by which a pass has fewer shares
    assert found.examples == len(inputs)
    whole = nk.compare(a, b, inputs, "cka", progress=False)
    np.testing.assert_allclose(found["cka"].values, whole["cka"].values, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_models_that_need_a_sample_join_a_job_that_needed_none(more_nets, inputs, tmp_path):
    data, save = list(inputs.split(9)), tmp_path / "many.netkin"
    two = {name: more_nets[name] for name in ("net0", "net1")}
    limit = nk.explain_many(two, data, "cka", progress=False).schedule.statistics
    call = {"rows": 30, "memory": limit, "save": save, "progress": False}
    assert nk.compare_many(two, data, "cka", **call)["net0", "net1"].examples == 90
    plan = nk.explain_many(more_nets, data, "cka", **call)
    assert plan.schedule.is_sample
    assert ("net0", "net1") in [block.models for block in plan.schedule.blocks]  # as in the first call
    many = nk.compare_many(more_nets, data, "cka", **call)
    assert {one.examples for one in many.values()} == {30}


def test_a_job_of_other_models_data_or_options_is_refused(nets, inputs, tmp_path):
    call = {"progress": False, "save": tmp_path / "many.netkin"}
    nk.compare_many(nets, inputs, "cka", **call)
    others = {
        "weights of 'net0'": (nets | {"net0": Counted(12)}, inputs, "cka", {}),
        "data": (nets, inputs + 1, "cka", {}),
        "measures": (nets, inputs, "svcca", {}),
        "pairs": (nets, inputs, "cka", {"pairs": "corresponding"}),
        "layers": (nets, inputs, "cka", {"layers": ["0"]}),
        "rows": (nets, inputs, "cka", {"rows": 20}),
    }
    for word, (models, data, measures, options) in others.items():
        with pytest.raises(FileError, match=f"holds a comparison that differs in {word}[; ]"):
            nk.compare_many(models, data, measures, **call, **options)
    again = nk.compare_many(nets, inputs, "svcca", overwrite=True, **call)
    assert list(nk.load(tmp_path / "many.netkin")[next(iter(again))]) == ["svcca"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partial": True}, "with `save` all that is finished is kept, also after Ctrl-C; leave `partial` out"),
        ({"data": iter([])}, "a stream can be read only once, and a job is continued; pass a loader or a list"),
        ({"models": {"a": {"x": np.eye(9)}, "b": {"x": np.eye(9)}}}, "`save` goes with models that all see `data`"),
    ],
)
def test_what_no_job_can_continue_is_refused(nets, inputs, tmp_path, options, words):
    with pytest.raises(InvalidValue, match=words):
        nk.compare_many(**{"models": nets, "data": inputs, "save": tmp_path / "many.netkin"} | options)
    assert not list(tmp_path.iterdir())


def test_weights_alone_are_a_job_too(nets, tmp_path):
    saved = nk.compare_many(nets, measures="weight_cosine", save=tmp_path / "many.netkin", progress=False)
    assert_same(saved, nk.compare_many(nets, measures="weight_cosine", progress=False))


def test_one_name_is_no_list_of_models(inputs):
    with pytest.raises(
        InvalidValue, match="`models` must be a mapping from names to models, or a list; got 'netkin:dig"
    ):
        nk.compare_many("netkin:digits", inputs)


def test_both_calls_take_the_same_arguments():
    call, plan = (inspect.signature(function) for function in (nk.compare_many, nk.explain_many))
    assert {**call.parameters} == {**plan.parameters}
    assert plan.return_annotation == ManyPlan.__name__


@pytest.mark.slow
def test_a_small_limit_and_a_sample_are_planned_as_they_are_done(inputs):
    torch.manual_seed(0)
    nets = {str(place): nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 5)) for place in range(12)}
    data = list(inputs.repeat(20, 1).split(150))
    for memory in (2e5, 1e6, 4e6, 20e6):
        call = {"rows": 500, "memory": memory, "progress": False}
        plan = nk.explain_many(nets, data, "cka", **call)
        if plan.refused:
            with pytest.raises(MemoryLimit):
                nk.compare_many(nets, data, "cka", **call)
        else:
            examples = {one.examples for one in nk.compare_many(nets, data, "cka", **call).values()}
            assert examples == {500 if plan.schedule.is_sample else 1800}


def test_options_of_each_model_hold_in_every_pass(nets, inputs):
    three = dict(list(nets.items())[:3])
    how = {
        "layers": {"net0": "0", "net1": ["0", "2"], "net2": None}, "transforms": [torch.abs, None, None],
    }  # fmt: skip
    plan = nk.explain_many(three, [inputs], "cka", memory=60_000, **how)
    few = nk.compare_many(three, [inputs], "cka", memory=60_000, **how)
    whole = nk.compare_many(three, [inputs], "cka", **how)
    assert len(plan.schedule.blocks) == 3
    for pair, comparison in whole.items():
        np.testing.assert_allclose(few[pair]["cka"].values, comparison["cka"].values, atol=1e-6)


def test_what_one_model_is_given_alone_belongs_to_a_job(tmp_path, inputs):
    first, second = (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2))
    options = {"save": tmp_path / "many.netkin", "progress": False}
    many = nk.compare_many({"a": nk.ModelInput(first, layers="0"), "b": second}, inputs, **options)
    assert (many["a", "b"].layers_a, many["a", "b"].layers_b) == (("0",), ("0", "1", "2"))
    with pytest.raises(FileError, match="layers of 'a'|differs in layers"):
        nk.compare_many({"a": nk.ModelInput(first, layers="2"), "b": second}, inputs, **options)
    with pytest.raises(FileError, match="differs in"):
        nk.compare_many({"a": nk.ModelInput(first, layers="0", shape="flatten"), "b": second}, inputs, **options)
