"""Every rank gets what one process gets, and a fault of one rank ends all with its own sentence."""

import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import netkin as nk
import rank_worlds
from netkin.comparing.engines.distributed import Ranks, _as_bytes
from netkin.comparing.feed import Feed
from netkin.comparing.sides import ModelSide
from netkin.errors import InflatedWarning, InvalidValue, UnknownName, WorkerError
from processes import run_ranks
from refusals import refused

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")


@pytest.fixture(
    scope="module", params=[pytest.param(ranks, marks=pytest.mark.slow, id=f"{ranks} ranks") for ranks in (1, 2, 3)]
)
def ran(request, tmp_path_factory):
    """The number of ranks and the folder in which each has left what it got, after one start for all tests."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    run_ranks(rank_worlds.run_all, folder, request.param)
    return request.param, folder


@pytest.fixture(scope="module")
def local():
    """What one process gets, by the names of the calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)
        return {make.__name__: make("local") for make in rank_worlds.SAME}


@pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")
@pytest.mark.parametrize("name", [make.__name__ for make in rank_worlds.SAME])
def test_every_rank_gets_what_one_process_gets(ran, local, name):
    count, folder = ran
    within = 1e-6 if name in ("floats", "data_of_netkin") else 1e-10
    for rank in range(count):
        rank_worlds.assert_same(nk.load(folder / f"{name}.{rank}"), local[name], within)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("gloo", "cpu"),
        pytest.param(
            "nccl", "cuda",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
        ),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")
def test_ranks_with_a_device_each_get_what_one_process_gets(local, tmp_path, backend, kind):
    run_ranks(partial(rank_worlds.run_on_device, kind=kind), tmp_path, 2, backend)
    for rank in range(2):
        rank_worlds.assert_same(nk.load(tmp_path / f"on_device.{rank}"), local["doubles"], 1e-10)


@pytest.mark.parametrize("name", ["doubles", "a_sampler", "a_sampler_that_shuffles", "batches_of_a_loader", "tokens"])
def test_the_data_are_those_of_one_process(ran, local, name):
    found, whole = nk.load(ran[1] / f"{name}.0"), local[name]
    assert found.examples == whole.examples
    told = {name: text for name, text in whole.provenance.items() if name not in ("plan", "settings digest", "call")}
    assert "engine='distributed')" in found.provenance["call"]
    assert {name: found.provenance[name] for name in told} == told
    assert found.caveats == whole.caveats


def test_each_rank_reads_a_share_and_all_of_them_everything_once(ran):
    count, folder = ran
    read = [np.load(folder / f"shares.{rank}.npy") for rank in range(count)]
    assert sum(read).tolist() == [1] * 50
    ends = [50 * rank // count for rank in range(count + 1)]
    assert [np.flatnonzero(own)[[0, -1]].tolist() for own in read] == [
        [ends[rank], ends[rank + 1] - 1] for rank in range(count)
    ]


EVERYWHERE = {
    "a_table_that_fails": "UnknownName: `pairs` names layer 'absent'",
    "a_sampler_of_another_rank": "InvalidValue: the `DistributedSampler` is for rank {rank} of {more} and this is rank "
    "{rank} of {count}; leave its `rank` and `num_replicas` out.",
    "a_sampler_that_drops": "InvalidValue: the `DistributedSampler` or its loader drops some of the ",
    "a_stream": "InvalidValue: data that do not tell how many they are can't be shared by {count} processes; pass ",
    "an_unsized_stream": "InvalidValue: data that do not tell how many they are can't be shared by {count} processes",
    "a_shuffled_loader": "InvalidValue: a loader that shuffles",
    "too_few_examples": "InvalidValue: {less} examples can't be shared by {count} processes; start fewer.",
    "a_part": "InvalidValue: `part` is for one process, and here {count} share the data; leave it out.",
    "a_start": "InvalidValue: `start` is for one process, and here {count} share the data; leave it out.",
    "a_partial_call": "InvalidValue: `partial` is for one process, and here {count} share the data; leave it out.",
    "a_file": "InvalidValue: `save` is for one process and for engine='ray'; under torchrun leave it out, and let",
    "a_sharded_model": "InvalidValue: 'a' is sharded over several processes (FSDP or tensor parallel), so that each ",
}
UNLIKE = {
    "other_seeds": "InvalidValue: rank 1 differs from rank 0 in its seed: 1 and 0; call every rank with the same arg",
    "other_measures": "InvalidValue: rank 1 differs from rank 0 in its measures: nbs and cka; ",
    "other_layers": "InvalidValue: rank 1 differs from rank 0 in its layers: fc and conv1; ",
    "other_calls": "InvalidValue: rank 1 differs from rank 0 in its examples: 51 and 50; ",
    "other_activations": "InvalidValue: rank 1 differs from rank 0 in its 'act.class' of 'a': torch.nn.modules.acti",
    "other_code": "InvalidValue: rank 1 differs from rank 0 in its 'class' of 'a': rank_worlds.Net ",
    "other_widths": "InvalidValue: rank 1 differs from rank 0 in its 'conv1.out_channels' of 'a': 5 and 4; ",
}
LAST = {
    "a_model_that_crashes": "OSError: this rank is broken",
    "a_model_that_crashes_later": "OSError: this rank is broken",
    "not_a_number": "InvalidValue: the inputs in batch 0 hold ",
    "fewer_than_they_say": "InvalidValue: the data gave rank {last} {some} examples and its share is {share}; they",
}
FIRST = {
    "a_sampler_that_skips": "InvalidValue: all ranks together read {left} examples and the data hold 50; each must",
    "other_weights": "ShapeError: the shares of two ranks do not fit: these parts can't be merged: their weights of",
    "samplers_of_other_epochs": "InvalidValue: two ranks have read the same examples, the first of them number ",
}


def said(ran, name):
    """Return what each rank said, and the numbers that sentences name."""
    count, folder = ran
    share = 60 - 60 * (count - 1) // count
    numbers = {"count": count, "more": count + 1, "less": count - 1, "last": count - 1}
    # three are skipped on every rank, of which one may be what the sampler repeats
    numbers |= {"share": share, "some": share - 10, "left": 50 - 3 * count + -50 % count}
    return [(folder / f"{name}.{rank}").read_text() for rank in range(count)], numbers


@pytest.mark.parametrize("name", [*EVERYWHERE, *UNLIKE])
def test_what_no_rank_can_do_is_refused_on_all_in_one_sentence(ran, name):
    sentences, numbers = said(ran, name)
    if name in UNLIKE and len(sentences) == 1:
        pytest.skip("one rank does not differ from itself")
    if name == "too_few_examples" and len(sentences) == 1:
        pytest.skip("one rank always has its share")
    wanted = [{**EVERYWHERE, **UNLIKE}[name].format(rank=rank, **numbers) for rank in range(len(sentences))]
    # a rank may hear of another's refusal before it comes to its own
    heard = [f"WorkerError: rank {rank} failed: {one.partition(': ')[2]}" for rank, one in enumerate(wanted)]
    for own, sentence in zip(wanted, sentences, strict=True):
        assert sentence.startswith((own, *heard))


@pytest.mark.parametrize("name", [*LAST, *FIRST])
def test_a_rank_that_fails_ends_all_with_its_own_sentence(ran, name):
    sentences, numbers = said(ran, name)
    if name in ("other_weights", "samplers_of_other_epochs") and len(sentences) == 1:
        pytest.skip("one rank does not differ from itself")
    guilty, wanted = (numbers["last"], LAST[name]) if name in LAST else (0, FIRST[name])
    wanted = wanted.format(**numbers)
    merging = [rank for rank, sentence in enumerate(sentences) if not sentence.startswith("WorkerError")]
    assert merging == [guilty]
    assert sentences[guilty].startswith(wanted)
    own = wanted if wanted.startswith("OSError") else wanted.partition(": ")[2]
    for sentence in sentences[:guilty] + sentences[guilty + 1 :]:
        assert sentence.startswith(f"WorkerError: rank {guilty} failed: {own}")


def test_a_rank_that_never_makes_the_call_is_named(ran):
    sentences, _ = said(ran, "a_rank_that_does_not_come")
    *others, last = sentences
    assert last == "TimeoutError: this rank has not called"
    for sentence in others:
        assert f"rank {len(others)} has not come to this call in 1 seconds; every rank must make it." in sentence


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("after", [None, 0, 5])
def test_a_rank_that_ends_early_without_a_fault_is_named_in_seconds(tmp_path, count, after):
    begin = time.monotonic()
    run_ranks(partial(rank_worlds.run_with_one_that_ends, after=after), tmp_path, count)
    assert time.monotonic() - begin < 60  # torch's own timeout is half an hour
    for rank in range(count - 1):
        heard = "" if rank == count - 2 else f"rank {count - 2} failed: "
        sentence = (tmp_path / f"ended.{rank}").read_text()
        assert sentence.startswith(f"WorkerError: {heard}rank {count - 1} has ended")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")
def test_a_rank_that_comes_late_is_waited_for(local, tmp_path):
    run_ranks(rank_worlds.run_with_one_that_is_late, tmp_path)
    for rank in range(2):
        for number in range(2):
            rank_worlds.assert_same(nk.load(tmp_path / f"late{number}.{rank}"), local["doubles"], 1e-10)


# --- without torchrun -------------------------------------------------------------------------------------------------


def test_the_distributed_engine_needs_a_group_of_processes():
    for function in (nk.compare, nk.collect):
        with refused(InvalidValue, "engine"):
            function({"x": np.eye(5)}, {"y": np.eye(5)}, engine="distributed")


def test_an_unknown_engine_is_refused():
    with refused(UnknownName, "engine"):
        nk.compare({"x": np.eye(5)}, {"y": np.eye(5)}, engine="distribute")


def test_a_store_that_is_gone_is_told_in_a_sentence():
    class Gone:
        def check(self, keys):
            raise RuntimeError("connection reset\nby peer")

    ranks = object.__new__(Ranks)
    ranks.rank, ranks._store = 2, Gone()
    with pytest.raises(WorkerError, match=r"^rank 2 has lost the other ranks, as .* has ended \(connection reset\)\.$"):
        ranks.check_others()


def two_ranks():
    """Return ranks 0 and 1 of two that share a store in this process."""
    store, made = torch.distributed.HashStore(), [object.__new__(Ranks) for _ in range(2)]
    for rank, one in enumerate(made):
        one.rank, one.count, one._store = rank, 2, store
    store.set("fault", "rank 2 failed: it is broken.")
    return made


def test_a_part_that_another_rank_has_begun_to_take_is_given_whatever_failed():
    taker, giver = two_ranks()
    taker._store.set("ready/1", "")
    taker._take_from(1)
    giver._await_taker()
    assert taker._store.add("deal/1", 0) == 1


def test_a_part_that_is_withdrawn_over_a_fault_is_not_waited_for():
    taker, giver = two_ranks()
    for wait in (giver._await_taker, lambda: taker._take_from(1)):
        with pytest.raises(WorkerError, match=r"^rank 2 failed: it is broken\.$"):
            wait()
    assert not taker._store.check(["taken/1"])


def feed_of(*data, examples=None, part=(1, 2)):
    """Return the feed of some models with a loader each, on one process of several."""
    runners = [ModelSide(name, nk.ModelInput(nn.Identity())) for name, _ in zip("ab", data, strict=False)]
    for runner, own in zip(runners, data, strict=True):
        runner.data = own
    return Feed(runners, None, examples, part, shared=True)


def loader(count=9, sampler=DistributedSampler, **options):
    data = TensorDataset(torch.arange(float(count))[:, None])
    given = {"num_replicas": 2, "rank": 0, "shuffle": False, **options}
    return DataLoader(data, batch_size=2, sampler=sampler(data, **given))


@pytest.mark.parametrize(
    "data, options, argument",
    [
        ([loader(), loader(shuffle=True)], {}, ""),
        ([loader()], {"examples": 4}, "examples"),
    ],
)
def test_samplers_that_do_not_split_the_data_once_are_refused(data, options, argument):
    with refused(InvalidValue, argument):
        feed_of(*data, **options)


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_a_sampler_repeats_is_left_out(shuffle):
    given = [feed_of(loader(rank=rank, shuffle=shuffle), part=(rank + 1, 2)) for rank in range(2)]
    seen = [[int(number) for batch in feed for one in batch.values() for number in one[0]] for feed in given]
    assert [len(own) for own in seen] == [feed.length for feed in given] == [5, 4]
    assert sorted(seen[0] + seen[1]) == list(range(9))
    numbers = [feed.numbers(feed.sides[0], 0, feed.length).tolist() for feed in given]
    assert numbers == seen


def test_a_message_holds_any_tensor():
    given = {"half": torch.ones(2, 3, dtype=torch.bfloat16), "one": torch.tensor(3.5), "none": torch.empty(0, 4)}
    length, text, *tensors = _as_bytes({"number": np.int64(3)}, given)
    assert int(length) == len(text)
    assert [one.dtype for one in tensors] == [torch.uint8] * 2
    assert [len(one) for one in tensors] == [12, 4]
