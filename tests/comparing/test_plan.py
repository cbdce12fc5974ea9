"""The plan says what the statistics really hold, and keeps them below the limit."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.comparing import planning
from netkin.comparing.alignment import Pairs
from netkin.comparing.interrupting import Interruption
from netkin.comparing.request import Options, Request
from netkin.comparing.tabulating import Tables
from netkin.errors import MemoryLimit
from netkin.measures import find
from netkin.statistics import LayerGrams, LayerMoments, LayerSize, LinearRows, Study
from netkin.statistics.grams import GramSettings


def tensors_in(thing, seen):
    """Yield all tensors that are held by an object, however deep."""
    if id(thing) in seen or isinstance(thing, type):
        return
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        yield thing
    inside = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    for part in (*inside, *getattr(thing, "__dict__", {}).values()):
        yield from tensors_in(part, seen)


def bytes_in(*things):
    """Return the memory of all tensors that objects hold; views of one storage count as far as they reach."""
    seen, storages = {}, {}
    for tensor in (tensor for thing in things for tensor in tensors_in(thing, seen)):
        whole, own = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        storages[whole.data_ptr()] = min(whole.nbytes(), storages.get(whole.data_ptr(), 0) + own)
    return sum(storages.values())


@pytest.fixture
def held(monkeypatch):
    """Return a function that gives the plan of a comparison, and what its statistics held at most."""
    peaks = []
    for kind, name in ((LayerMoments, "settle"), (LayerMoments, "release"), (LinearRows, "release")):
        before = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, old=before: (peaks.append(bytes_in(self)), old(self))[1])

    def look(models, measures, chunks=0):
        options = Options(None, {"a": "a", "b": "b"}, None, None, None, None, None)
        found, study = (
            [find(name) for name in measures],
            Study({}, [], limit=planning.memory_limit(None), chunks=chunks),
        )
        request = Request(dict(zip("ab", models, strict=True)), options, Pairs([("a", "b")]), study)
        statistics, _ = request.collect(found)
        Tables(statistics, found, "a", "b").fill(Interruption(False))
        made = planning.make_plan(planning.needs_of(found), statistics.study)
        return made, max(*peaks, 0, bytes_in(*statistics.collectors))

    return look


def recorded(n, *widths, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [{f"x{i}": rng.normal(size=(n, w)).astype(dtype) for i, w in enumerate(widths)} for _ in "ab"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "measures", ["cka", "cka_debiased", "nbs", "cca_mean", "svcca cka", "pwcca", "cka cka_uncentered"]
)
@pytest.mark.parametrize(
    "n, widths, kind",
    [(1100, (200, 120, 300), "LayerMoments"), (90, (200, 120, 300), "LinearRows"), (150, (60, 700), "LinearRows")],
)
def test_the_plans_bytes_are_what_is_held(held, measures, n, widths, kind, dtype):
    made, really = held(recorded(n, *widths, dtype=dtype), measures.split())
    assert [one.kind for one in made.kinds] == [kind]
    assert made.bytes == pytest.approx(really, rel=0.3)


@pytest.mark.parametrize("measures", ["cka", "cka_debiased", "cca_mean"])
@pytest.mark.parametrize(
    "n, widths, kind", [(2500, (120, 80, 160), "LayerMoments"), (90, (200, 120, 300), "LinearRows")]
)
def test_the_plans_bytes_with_chunks_are_what_is_held(held, measures, n, widths, kind):
    made, really = held(recorded(n, *widths), measures.split(), chunks=8)
    assert [one.kind for one in made.kinds] == [kind]
    assert made.bytes == pytest.approx(really, rel=0.3)


def test_the_bytes_of_a_sample_are_what_is_held(held):
    made, really = held(recorded(300, 200, 400), ["cka_rbf"])
    assert made.bytes == pytest.approx(really, rel=0.3)
    assert "Rows, a sample of at most 2,048: " in str(made)


def test_many_measures_add_up_in_the_text(maps, images):
    text = nk.compare(maps(), data=images, measures=["cka", "cka_rbf", "cka_minibatch(batch=16)"]).provenance["plan"]
    lines = text.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["Moments", "Rows", "Grams of mini-batches of 16"]


def test_over_the_limit_is_refused_with_the_layer_and_the_ways_out(maps, images):
    words = "the limit is 10 kB; the widest layer is 'conv1' of 'a' with 256 features. Use shape='pool', the measure "
    with pytest.raises(
        MemoryLimit, match=rf"the rows of 50 examples need \d+ kB and {words}'cka_minibatch', fewer `exa"
    ):
        nk.compare(maps(), data=images, layers=["conv1", "fc"], shape="flatten", memory=10_000)
    with pytest.raises(MemoryLimit, match="the sampled rows need"):
        nk.compare(maps(), data=images, layers=["conv1", "fc"], measures="cka_rbf", memory=10_000)
    with pytest.raises(MemoryLimit, match="the statistics need"):
        nk.compare(maps(), data=images, layers=["conv1", "fc"], measures=["cka_rbf", "cka"], memory=65_000)
    assert nk.compare(maps(), data=images, layers=["fc"], memory=10_000)["fc", "fc"] == pytest.approx(1)


def test_a_stream_of_unknown_length_is_streamed_where_moments_fit(maps, images):
    comparison = nk.compare(maps(), data=(batch for batch in images.split(10)), shape="flatten")
    assert comparison.provenance["plan"].startswith("Moments, streamed")


def test_a_stream_too_wide_for_moments_is_kept_and_watched(maps, images):
    def read(count, memory):
        stream = (batch for batch in images[:count].split(10))
        return nk.compare(maps(), data=stream, layers=["conv1", "conv2"], shape="flatten", memory=memory)

    assert "watched, to stay below 80 kB" in read(30, 80_000).provenance["plan"]
    with pytest.raises(MemoryLimit, match="the rows of the first 50 examples need 87 kB and the limit is 80 kB"):
        read(50, 80_000)
    with pytest.raises(MemoryLimit, match="the rows of the first batch need"):
        read(30, 10_000)


class Understated:
    """Data that give more examples than they say."""

    examples = 10

    def __init__(self, images):
        self.images = images

    def __iter__(self):
        return iter(self.images.split(10))


def test_data_that_give_more_than_they_say_are_refused_when_they_outgrow_the_limit(maps, images):
    options = {"layers": ["conv1", "conv2"], "shape": "flatten"}
    with pytest.raises(MemoryLimit, match="the rows of the first [345]0 examples need"):
        nk.compare(maps(), data=Understated(images), memory=80_000, **options)
    assert nk.compare(maps(), data=Understated(images), memory=800_000, **options).examples == 50


def test_the_default_limit_is_a_quarter_of_all_memory_and_never_more_than_is_free(maps, images, monkeypatch):
    asked = {"data": images, "layers": ["conv1", "fc"], "shape": "flatten"}
    monkeypatch.setattr(planning, "total_memory", lambda device: 40_000)
    with pytest.raises(MemoryLimit, match="the limit is 10 kB"):
        nk.compare(maps(), **asked)
    monkeypatch.undo()
    monkeypatch.setattr(planning, "free_memory", lambda device: 0)
    monkeypatch.setattr(planning, "LITTLE", 1000)
    with pytest.raises(MemoryLimit, match="no more is free than 1 kB"):
        nk.compare(maps(), **asked)


def test_rows_that_wait_for_a_mini_batch_are_counted():
    study = Study({("a", "x"): LayerSize("a", "x", 1000, 100)}, [])
    assert LayerGrams.price(GramSettings(128), study).bytes == 128**2 * 8 + 228 * 1000 * 4
    assert LayerGrams.price(GramSettings(100), study).bytes == 100**2 * 8


PEAK = """
import resource, sys, torch, netkin as nk
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Conv2d(1, 512, 1), torch.nn.ReLU(inplace=True), torch.nn.AvgPool2d(2))
batches = (torch.randn(100, 1, 2, 2) for _ in range(int(sys.argv[1]) // 100))
c = nk.compare(model, data=batches, measures=["cka", "cka_debiased", "svcca", "nbs", "cka_minibatch(batch=100)"])
assert c.examples == int(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_examples():
    few, many = (int(subprocess.check_output([sys.executable, "-c", PEAK, count])) for count in ("2000", "20000"))
    assert many < few + 45_000  # kB; the rows of the other 18,000 examples would be 110,000
