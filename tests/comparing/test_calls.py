"""How much of netkin one batch walks through, once the pass has begun: calls, functions, files and changes of room."""

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue, NetkinError

HOUSE = Path(nk.__file__).parent
REACHED = {"calls": 75, "functions": 50, "files": 16, "changes of room": 16}  # of two models with one layer each


class Batches(list):
    """A list of batches that notes how many calls were made when each of them is asked for."""

    def __init__(self, batches, calls):
        super().__init__(batches)
        self.calls, self.marks = calls, []

    def __iter__(self):
        for batch in super().__iter__():
            self.marks.append(len(self.calls))
            yield batch


def walked(models, batches, measures):
    """Return what netkin calls for a batch far from both ends: pairs of a file and a function, in their order."""
    calls = []

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and "<" not in frame.f_code.co_name and HOUSE in path.parents:
            calls.append((str(path.relative_to(HOUSE)), frame.f_code.co_name, frame.f_code.co_firstlineno))

    data = Batches(batches, calls)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        nk.compare(*models, data, measures, layers="0", progress=False)
    finally:
        sys.setprofile(before)
    return calls[data.marks[-6] : data.marks[-5]]


def counted(calls):
    rooms = [path.partition("/")[0] for path, *_ in calls]
    return {
        "calls": len(calls),
        "functions": len(Counter(calls)),
        "files": len({path for path, *_ in calls}),
        "changes of room": sum(one != other for one, other in pairwise(rooms)),
    }


@pytest.fixture
def models():
    return [nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)) for _ in "ab"]


@pytest.mark.skipif(sys.getprofile() is not None, reason="another profiler is at work")
def test_a_batch_walks_through_little(models):
    batches = [torch.randn(16, 3, 8, 8) for _ in range(20)]
    found = counted(walked(models, batches, "cka"))
    assert found["calls"] > 20  # else nothing was counted
    for what, reached in REACHED.items():
        assert found[what] <= 1.1 * reached, (what, found)


@pytest.mark.skipif(sys.getprofile() is not None, reason="another profiler is at work")
def test_a_batch_of_many_examples_takes_no_more_calls(models):
    few, many = ([torch.randn(n, 3, 8, 8) for _ in range(20)] for n in (4, 24))
    assert counted(walked(models, few, "cka")) == counted(walked(models, many, "cka"))


def test_names_that_are_no_utf_8_are_refused_before_the_data_are_read():
    def unread():
        pytest.fail("the data were read")
        yield

    nets = {"a": nn.Linear(3, 2), "\udcff": nn.Linear(3, 2)}
    with pytest.raises(InvalidValue, match=r"a name must be text in UTF-8; got '\\udcff'"):
        nk.compare(*nets.values(), unread(), names=tuple(nets))
    with pytest.raises(InvalidValue, match=r"a name must be text in UTF-8; got '\\udcff'"):
        nk.compare_many(nets, unread())


NOT_MODELS = {"function": lambda inputs: inputs, "class": nn.Linear, "nothing": None}


@pytest.mark.parametrize("kind", NOT_MODELS)
@pytest.mark.parametrize(
    "call",
    [
        lambda strange, batches: nk.recommend({"a": strange}, batches),
        lambda strange, batches: nk.class_sensitivity(strange, batches),
        lambda strange, batches: nk.FreezeTraining(strange, steps=4),
        lambda strange, batches: nk.learn_tasks(strange, nk.split_tasks(batches, batches, 2), epochs=1),
    ],
    ids=["recommend", "class_sensitivity", "FreezeTraining", "learn_tasks"],
)
def test_what_is_no_model_is_refused_in_a_sentence(call, kind):
    batches = [(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 4)]
    with pytest.raises(InvalidValue, match=r"must be a `torch.nn.Module`; got |`model` is a network, its name, or"):
        call(NOT_MODELS[kind], batches)


def test_a_lazy_step_of_a_series_is_refused():
    lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    for steps in ({0: lazy, 1: plain}, {0: plain, 1: lazy}):
        with pytest.raises(NetkinError, match="lazy"):
            nk.dynamics(steps, [torch.ones(8, 4)], "cka")
