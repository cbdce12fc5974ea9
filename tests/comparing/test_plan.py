"""The plan says what the statistics really hold, and keeps them below the limit."""

import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import netkin as nk
from netkin.comparing import plan as planning
from netkin.errors import MemoryLimit
from netkin.statistics import LayerGrams, LayerSize, Study
from netkin.statistics.grams import GramSettings
from quickly import slow_but


@pytest.fixture(autouse=True)
def no_other_threads():
    """Let this thread make all tensors, as it is the only one in which they are counted."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class PeakOfTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside the `with` and still live, and the most there were."""

    def __init__(self, known=()):
        super().__init__()
        self.live = self.peak = 0
        self._storages = {}
        for tensor in known:
            self._note(tensor, 0)

    def _note(self, tensor, size):
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._storages:

            def forget(_):
                self.live -= size
                del self._storages[key]

            self._storages[key] = weakref.ref(storage, forget)
            self.live += size
            self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        for tensor in tree_leaves((arguments, options)):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, 0)
        made = function(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, tensor.untyped_storage().nbytes())
        return made


def recorded(n, *widths, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [{f"x{i}": torch.randn(n, w, generator=draw, dtype=dtype) for i, w in enumerate(widths)} for _ in "ab"]


def test_the_counter_counts_what_lives_and_no_more():
    given = torch.ones(1000)
    with PeakOfTensors([given]) as counter:
        twice = given * 2  # 4,000 bytes
        assert counter.live == 4000
        kept = (twice + given)[:10]  # a view keeps all of its storage
        del twice
        assert (counter.live, counter.peak, len(kept)) == (4000, 8000, 10)
        del kept
    assert counter.live == 0


MOMENTS, FEW = (700, (100, 60, 150)), (50, (100, 60, 150))
CASES = [
    *((measures, *MOMENTS, "LayerMoments", {}) for measures in ("cka", "cka_debiased", "nbs", "cca_mean", "pwcca")),
    *((measures, *FEW, "LinearRows", {}) for measures in ("cka", "cka_debiased", "nbs", "cca_mean", "pwcca")),
    *((measures, 360, (150, 150), "LayerMoments", {"errors": True, "chunks": 8}) for measures in ("cka", "svcca")),
    *((measures, 150, (60, 700), "LinearRows", {"errors": True, "chunks": 8}) for measures in ("cka", "cca_mean")),
    ("cka cka_uncentered", *MOMENTS, "LayerMoments", {}),
    ("nbs_uncentered cca_mean", *FEW, "LinearRows", {}),
    ("pwcca eigenspace_overlap_uncentered nbs_uncentered", *MOMENTS, "LayerMoments", {}),
    ("cka_minibatch", *MOMENTS, "LayerGrams", {}),
    ("cka_minibatch", 1300, (150, 150), "LayerGrams", {"errors": True, "chunks": 8}),
    ("cka_rbf", 150, (100, 200), "LayerRows", {}),
    pytest.param("cka_rbf cka_rbf_debiased", 2100, (30, 20), "LayerRows", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("measures, n, widths, kind, options", CASES)
@pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")
def test_no_more_memory_is_taken_than_the_plan_says(measures, n, widths, kind, options, dtype):
    a, b = recorded(n, *widths, dtype=dtype)
    plan = nk.explain(a, b, measures=measures.split(), **options)
    assert [one.kind for one in plan.kinds] == [kind]
    with PeakOfTensors([*a.values(), *b.values()]) as counter:
        nk.compare(a, b, measures=measures.split(), progress=False, **options)
    assert plan.bytes / 3 < counter.peak <= plan.bytes


@pytest.mark.parametrize("options", [{}, {"errors": True, "chunks": 8}])
@pytest.mark.parametrize("measure", slow_but(["cka", "cca_mean"], "cca_mean"))
def test_spectra_take_no_more_memory_than_the_plan_says(measure, options):
    sizes = [(8, 8, 8), (12, 4, 4), (10,)]
    a, b = ({f"x{i}": torch.randn(300, *size) for i, size in enumerate(sizes)} for _ in "ab")
    plan = nk.explain(a, b, measures=measure, shape="dft", **options)
    with PeakOfTensors([*a.values(), *b.values()]) as counter:
        nk.compare(a, b, measures=measure, shape="dft", progress=False, **options)
    assert plan.bytes / 3 < counter.peak <= plan.bytes


@pytest.mark.parametrize("batch", [64, 50])
@pytest.mark.parametrize("measure", ["cka", "cka_minibatch(batch=64)", "cka_rbf"])
def test_beside_its_forward_passes_a_comparison_takes_no_more_than_the_plan_says(measure, batch):
    models = [nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 100)) for _ in "ab"]
    data = list(torch.randn(300, 3, 8, 8).split(batch))
    known = [*data, *(weight for model in models for weight in model.parameters())]
    with PeakOfTensors(known) as forward, torch.no_grad():
        for inputs in data:
            models[0](inputs), models[1](inputs)
    plan = nk.explain(*models, data, measure)
    with PeakOfTensors(known) as counter:
        nk.compare(*models, data, measure, progress=False)
    assert 0 < forward.peak < counter.peak <= forward.peak + plan.bytes


def test_the_memory_of_a_sample_is_told():
    assert "Rows, a sample of at most 2,048" in str(nk.explain(*recorded(300, 200, 400), measures="cka_rbf"))


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
    asked = {"data": images, "layers": ["conv1", "fc"]}
    alone = nk.explain(maps(), measures="cka_rbf", **asked).bytes
    with pytest.raises(MemoryLimit, match="the statistics need"):
        nk.compare(maps(), measures=["cka_rbf", "cka"], memory=alone, **asked)
    assert nk.compare(maps(), data=images, layers=["fc"], memory=10_000)["fc", "fc"] == pytest.approx(1)


def test_a_stream_of_unknown_length_is_streamed_where_moments_fit(maps, images):
    comparison = nk.compare(maps(), data=(batch for batch in images.split(10)), shape="flatten")
    assert comparison.provenance["plan"].startswith("Moments, streamed")


def test_a_stream_too_wide_for_moments_is_kept_and_watched(maps, images):
    def read(count, memory):
        stream = (batch for batch in images[:count].split(10))
        return nk.compare(maps(), data=stream, layers=["conv1", "conv2"], shape="flatten", memory=memory)

    assert "watched, to stay below 250 kB" in read(30, 250_000).provenance["plan"]
    with pytest.raises(MemoryLimit, match="the rows of the first 50 examples need 290 kB and the limit is 250 kB"):
        read(50, 250_000)
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
        nk.compare(maps(), data=Understated(images), memory=140_000, **options)
    assert nk.compare(maps(), data=Understated(images), memory=800_000, **options).examples == 50


def test_an_infinite_limit_refuses_nothing(maps, images):
    found = nk.compare(maps(), data=images, layers=["conv1", "fc"], shape="flatten", memory=float("inf"))
    assert found["fc", "fc"] == pytest.approx(1)
    assert not nk.explain(maps(), data=images, layers="conv1", shape="flatten", memory=float("inf")).refused


def test_the_default_limit_is_a_quarter_of_all_memory_and_never_more_than_is_free(maps, images, monkeypatch):
    asked = {"data": images, "layers": ["conv1", "fc"], "shape": "flatten"}
    monkeypatch.setattr(planning, "total_memory", lambda device: 40_000)
    with pytest.raises(MemoryLimit, match="the limit is 10 kB"):
        nk.compare(maps(), **asked)
    monkeypatch.undo()
    monkeypatch.setattr(planning, "free_memory", lambda device: 0)
    monkeypatch.setattr(planning, "LITTLE", 1000)
    with pytest.raises(MemoryLimit, match="the free memory is 1 kB"):
        nk.compare(maps(), **asked)


def test_rows_that_wait_for_a_mini_batch_are_counted():
    study = Study({("a", "x"): LayerSize("a", "x", 1000, 100)}, [])
    waits, whole = (LayerGrams.cost(GramSettings(batch), study).bytes for batch in (128, 100))
    folding = [batch**2 * (8 + 2 * 4 + 16) + 3 * batch * 1000 * 4 for batch in (128, 100)]
    assert (waits, whole) == (folding[0] + 228 * 1000 * 4, folding[1])


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
    few, many = (int(subprocess.check_output([sys.executable, "-c", PEAK, count])) for count in ("1000", "12000"))
    assert many < few + 45_000  # kB; the rows of the other 11,000 examples would be 67,000


@pytest.mark.parametrize("measure", ["sketched_cka_uncentered(kernel=sum)", "sketched_cka_uncentered(kernel=hadamard)"])
def test_sketches_of_features_and_gradients_take_no_more_memory_for_many_examples(measure):
    models = [nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)) for _ in "ab"]
    peaks = []
    for count in (3, 30):
        batches = (torch.randn(100, 20) for _ in range(count))
        with PeakOfTensors(parameter for model in models for parameter in model.parameters()) as counter:
            found = nk.collect(*models, batches, [measure], layers=["0"])
        assert found.examples == 100 * count
        peaks.append(counter.peak)
    assert peaks[1] < peaks[0] + 12 * 2_700  # bytes; 8 an example are its digest, its two rows would be 512 more


MANY_LAYERS = """
import resource, torch, netkin as nk
a, b = ({f"{side}{place}": torch.randn(1000, 14) for place in range(350)} for side in "ab")
nk.compare({"x": a["a0"]}, {"y": b["b0"]}, progress=False)  # what is loaded at the first call is left aside
plan, before = nk.explain(a, b).bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
nk.compare(a, b, progress=False)
print(plan, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
def test_the_process_grows_by_no_more_than_the_plan_says():
    plan, grown = map(int, subprocess.check_output([sys.executable, "-c", MANY_LAYERS]).split())
    assert plan > 3e8
    assert grown < plan + 1.2e8  # of which the result has 122,500 pairs; a copy of the sums would take 1.9e8 more
