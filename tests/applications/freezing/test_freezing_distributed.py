"""Freeze training in two processes: the reducer does not wait for gradients that never come, and all agree."""

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import netkin as nk
from freezing_worlds import Net, data, same, sgd, train, update, weights
from netkin.errors import ForwardError, InvalidValue
from netkin.sources.architectures import seeded
from processes import run_ranks

pytestmark = pytest.mark.slow
STEPS = 8


def wrapped(net):
    return DistributedDataParallel(net, find_unused_parameters=True)


def shards(rank, size=8):
    return [(images[rank::2], labels[rank::2]) for images, labels in data(STEPS, size)]


def with_unused_parameters(rank):
    """Return the weights of a run whose wrapper looks for parameters without gradients."""
    model = wrapped(seeded(Net, 0))
    freezing = nk.FreezeTraining(model, "linear", steps=STEPS)
    train(model, sgd(model), freezing, shards(rank))
    assert freezing.frozen == ["conv1", "conv2", "conv3"]
    return weights(model.module)


def wrapped_anew(rank):
    """Return the weights of a run that wraps its model anew whenever something was frozen."""
    net = seeded(Net, 0)
    optimizer, freezing, model = sgd(net), nk.FreezeTraining(net, "linear", steps=STEPS), DistributedDataParallel(net)
    for batch in shards(rank):
        update(model.train(), optimizer, *batch)
        if freezing.step():
            model = DistributedDataParallel(net)
    return weights(net)


def by_similarity(rank):
    """Return the weights of a run in which the first process decides, though the other would decide otherwise."""
    model = wrapped(seeded(Net, 0))
    probe = data(1)[0][0] if rank == 0 else torch.randn(8, 2, 6, 6) * 1e3
    options = {"steps": STEPS, "probe": probe, "every": 1, "threshold": 0.9, "patience": 1, "past": 1}
    freezing = nk.FreezeTraining(model, "similarity", **options)
    train(model, sgd(model), freezing, shards(rank))
    assert freezing.frozen
    return weights(model.module) | {"frozen": torch.tensor(len(freezing.frozen))}


def refused(rank):
    """Return how many ways of wrapping that wait for all gradients are refused at once."""
    ways = [{}, {"static_graph": True}]
    for options in ways:
        with pytest.raises(
            InvalidValue, match="`DistributedDataParallel` waits for the gradients of all.*wrap it again"
        ):
            nk.FreezeTraining(DistributedDataParallel(seeded(Net, 0), **options), steps=STEPS)
    return len(ways)


def faulty(rank):
    """Return 1 if a fault of the first process ends the other one, too, which waits for what that decides."""

    def forward(model, batch):
        if rank == 0:
            raise InvalidValue("no such batch.")
        return model(batch)

    words = "" if rank == 0 else "the first process could not probe the model: InvalidValue: "
    options = {"steps": STEPS, "probe": data(1)[0][0], "every": 1, "forward": forward}
    with pytest.raises(ForwardError if rank else InvalidValue, match=f"^{words}no such batch.$"):
        nk.FreezeTraining(wrapped(seeded(Net, 0)), "similarity", **options)
    return 1


RUNS = [with_unused_parameters, wrapped_anew, by_similarity, refused, faulty]


def one_of_two(rank, folder):
    torch.set_num_threads(1)
    torch.save({run.__name__: run(rank) for run in RUNS}, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What all runs gave in two processes that know each other, one mapping for each process."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks(one_of_two, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["with_unused_parameters", "wrapped_anew"])
def test_two_processes_train_and_freeze_as_one(both, name):
    first, second = (process[name] for process in both)
    moving = [key for key in first if "running" not in key]  # each process has its own statistics of live norms
    assert all(torch.equal(first[key], second[key]) for key in moving)
    # the same by hand: mean gradients of two halves, what is frozen cut off
    expected = by_hand()
    for key in moving:
        torch.testing.assert_close(first[key], expected[key], rtol=1e-4, atol=1e-5)


def by_hand():
    """Return the weights of one process that takes the mean of both halves' gradients, each half with its own norms."""
    halves = [seeded(Net, 0), seeded(Net, 0)]
    optimizers = [sgd(half) for half in halves]
    for step in range(STEPS):
        frozen = step // 2
        # as the wrapper does before each forward, all have the first one's statistics
        halves[1].load_state_dict(halves[0].state_dict())
        for rank, half in enumerate(halves):
            half.train()
            for number in range(1, frozen + 1):
                half.get_submodule(f"bn{number}").eval()
            images, labels = shards(rank)[step]
            half.zero_grad()
            torch.nn.functional.cross_entropy(half(images, detached=frozen), labels).backward()
        for one, other in zip(halves[0].parameters(), halves[1].parameters(), strict=True):
            if one.grad is not None:
                one.grad = other.grad = (one.grad + other.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
    return weights(halves[0])


def test_the_first_process_decides_for_all(both):
    first, second = (process["by_similarity"] for process in both)
    assert same({"frozen": first["frozen"]}, {"frozen": second["frozen"]})
    assert torch.equal(first["out.weight"], second["out.weight"])


def test_a_fault_of_the_first_process_ends_all(both):
    assert [process["faulty"] for process in both] == [1, 1]


def test_a_wrapper_that_waits_for_all_gradients_is_refused(both):
    assert [process["refused"] for process in both] == [2, 2]
