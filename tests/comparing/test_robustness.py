"""What data, models and users may do, and the pass must stand."""

import copy
import threading
from traceback import extract_stack

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
import transcriptions
from netkin import arrays, progress
from netkin.errors import InvalidValue, ShapeError
from netkin.measures import find
from netkin.statistics import layer_moments
from quickly import slow_but
from table_worlds import sentences

ASKED = ["cka", "cka_debiased", "cca_mean", "cka_rbf", "cka_minibatch(batch=8)"]


@pytest.fixture
def pair(maps):
    return maps().double(), maps().double()


@pytest.fixture
def inputs(images):
    return images.double()


class Counted:
    """Data that count how often they are walked through, and end in an interruption if they are told to."""

    name = "counted"

    def __init__(self, images, batch=16, end=None):
        self.images, self.batch, self.end, self.walks = images, batch, end, 0

    def __iter__(self):
        self.walks += 1
        for number, batch in enumerate(self.images.split(self.batch)):
            if number == self.end:
                raise KeyboardInterrupt
            yield batch


def assert_alike(one, other, within=1e-10):
    for measure in one:
        assert one.to_numpy(measure) == pytest.approx(other.to_numpy(measure), abs=within, nan_ok=True), measure


# --- subjects with data of their own ----------------------------------------------------------------------------------


def test_each_subject_may_have_its_own_data(pair, inputs, layers):
    a, b = pair
    first, second = Counted(inputs), Counted(2 * inputs)
    found = nk.compare(nk.ModelInput(a, data=first), nk.ModelInput(b, data=second), measures=ASKED, layers=layers)
    assert_alike(found, nk.compare(a, b, inputs, ASKED, layers=layers, transforms=(None, lambda x: 2 * x)))
    assert (first.walks, second.walks) == (1, 1)


def test_subjects_that_hold_the_same_data_share_one_iteration(pair, inputs, layers):
    data = Counted(inputs)
    nk.compare(nk.ModelInput(pair[0], data=data), nk.ModelInput(pair[1], data=data), layers=layers)
    assert data.walks == 1
    shuffled = DataLoader(TensorDataset(inputs), batch_size=8, shuffle=True)
    twin = copy.deepcopy(pair[0])
    same = nk.compare(nk.ModelInput(pair[0], data=shuffled), nk.ModelInput(twin, data=shuffled), layers=layers)
    assert np.diag(same.to_numpy()) == pytest.approx([1, 1, 1])


def test_a_model_on_two_sets_of_data(pair, inputs, layers):
    mirrored = nk.compare(
        nk.ModelInput(pair[0], data=inputs), nk.ModelInput(pair[0], data=inputs.flip(3)), layers=layers
    )
    rows = [nk.activations(pair[0], "conv2", x)["conv2"] for x in (inputs, inputs.flip(3))]
    assert mirrored["conv2", "conv2"] == pytest.approx(float(nk.cka(*rows)), abs=1e-9)
    assert 0.1 < mirrored["conv2", "conv2"] < 0.9999


def test_subjects_have_layers_shapes_and_functions_of_their_own(pair, inputs):
    a, b = pair
    found = nk.compare(
        nk.ModelInput(a, layers="conv1", shape="flatten", forward=lambda model, x: model(3 * x)),
        nk.ModelInput(b, layers=["conv2", "fc"], transform=lambda x: x.flip(2)), inputs,
    )  # fmt: skip
    assert (found.layers_a, found.layers_b) == (("conv1",), ("conv2", "fc"))
    assert (found.shapes_a["conv1"], found.shapes_b["conv2"]) == ("flatten", "pool")
    X = nk.activations(a, "conv1", 3 * inputs, shape="flatten")["conv1"].numpy()
    Y = nk.activations(b, "fc", inputs.flip(2))["fc"].numpy()
    assert found["conv1", "fc"] == pytest.approx(transcriptions.cka(X, Y), abs=1e-9)


def test_uneven_batches_are_refused(pair, inputs, layers):
    a, b = pair
    with pytest.raises(ShapeError, match="data of 'a' gave 16 examples in a batch and those of 'b' 10; give both the"):
        nk.compare(nk.ModelInput(a, data=Counted(inputs)), nk.ModelInput(b, data=Counted(inputs, 10)), layers=layers)
    with pytest.raises(ShapeError, match="data of 'a' gave 16 examples in a batch and those of 'b' 0"):
        nk.compare(nk.ModelInput(a, data=Counted(inputs)), nk.ModelInput(b, data=Counted(inputs[:32])), layers=layers)
    with pytest.raises(InvalidValue, match="`data` is missing|'b' has no data"):
        nk.compare(nk.ModelInput(a, data=Counted(inputs)), b, layers=layers)


def test_batches_of_unknown_length_meet_others(pair, inputs):
    class Folder:
        """Ten images whose number nobody tells."""

    folders = {Folder(): part for part in inputs.split(10)}
    read = nk.ModelInput(pair[0], data=list(folders), forward=lambda model, one: model(folders[one]))
    found = nk.compare(read, nk.ModelInput(pair[1], data=list(inputs.split(10))), layers="fc")
    assert found["fc", "fc"] == pytest.approx(nk.compare(*pair, inputs, layers="fc")["fc", "fc"], abs=1e-10)


def test_a_model_and_itself_with_a_choice_of_layers_each(pair, inputs):
    found = nk.compare(pair[0], pair[0], inputs, layers={"a": "conv1", "b": ["fc", "conv2"]})
    assert (found.layers_a, found.layers_b) == (("conv1",), ("conv2", "fc"))
    alone = nk.compare(pair[0], data=inputs, layers=["conv1", "conv2", "fc"])
    assert found["conv1", "fc"] == pytest.approx(alone["conv1", "fc"], abs=1e-10)


@pytest.mark.parametrize("measure", ["cka", "cka_rbf", "cka_minibatch(batch=16)"])
def test_layers_stand_in_the_order_in_which_they_run(pair, inputs, measure):
    found = nk.compare(*pair, inputs, measure)
    assert found.layers_a == found.layers_b == ("conv1", "relu", "drop", "conv2", "relu#2", "fc")
    assert nk.compare(*pair, inputs, measure, layers=["fc", "conv2"]).layers_a == ("conv2", "fc")
    unclear = nk.compare(*pair, inputs[:8], measure)  # as many examples as a map has rows
    assert unclear.layers_a == found.layers_a


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[50], [1] * 50, [7] * 7 + [1], [1, 20, 4, 25], [30, 3, 17]])
def test_the_size_of_batches_changes_nothing(pair, inputs, sizes):
    layers = ["conv1", "fc"]
    found = nk.compare(*pair, list(inputs.split(sizes)), ASKED, layers=layers, errors=True, chunks=4)
    whole = nk.compare(*pair, inputs, ASKED, layers=layers, errors=True, chunks=4)
    assert_alike(found, whole)
    for measure in ("cka", "cca_mean", "cka_minibatch(batch=8)"):
        assert found[measure].replicates == pytest.approx(whole[measure].replicates, abs=1e-10)


def test_the_order_of_examples_changes_nothing_but_mini_batches(pair, inputs, layers):
    order = torch.randperm(50)
    found = nk.compare(*pair, list(inputs[order].split(7)), ASKED[:4], layers=layers)
    assert_alike(found, nk.compare(*pair, inputs, ASKED[:4], layers=layers))


class Buffered(nn.Module):
    """A model whose layer writes all its outputs into the same memory."""

    def __init__(self):
        super().__init__()
        self.linear, self.same = nn.Linear(128, 6), nn.Identity()
        self.register_buffer("memory", torch.empty(64, 6))

    def forward(self, images):
        rows = self.memory[: len(images)]
        rows.copy_(self.linear(images.flatten(1)))
        return self.same(rows).clone()


class Reusing(Counted):
    """Data whose batches all lie in the same memory, which is overwritten at the end."""

    def __iter__(self):
        memory = torch.empty(self.batch, *self.images.shape[1:], dtype=self.images.dtype)
        for batch in self.images.split(self.batch):
            memory[: len(batch)] = batch
            yield memory[: len(batch)]
        memory.fill_(7)


@pytest.mark.parametrize("shape", ["pool", "flatten", "positions", "dft"])
def test_memory_that_is_used_again_changes_nothing(monkeypatch, inputs, identity, shape):
    monkeypatch.setattr(layer_moments, "FOLD", 10**9)  # rows wait, as they do on a GPU
    asked = ["cka", "cca_mean"] if shape == "dft" else ASKED
    options = {"measures": asked, "layers": "whole", "shape": shape}
    inputs = inputs[:15] if shape == "positions" else inputs
    kept, used = identity(), Reusing(inputs, 7)
    assert_alike(nk.compare(kept, data=used, **options), nk.compare(kept, data=inputs, **options))
    model = Buffered().double()
    found = nk.compare(model, data=list(inputs.split(7)), measures=ASKED, layers=["linear", "same"])
    for measure in ASKED:
        assert found[measure]["linear", "same"] == pytest.approx(1)


def test_in_place_models_leave_the_numbers_alone(pair, inputs, layers):
    a, b = pair
    in_place = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(2, 3, 1)).double()
    before = inputs.clone()
    found = nk.compare_many({"r": in_place, "a": a, "b": b}, inputs, ASKED)
    assert torch.equal(inputs, before)
    assert_alike(found["a", "b"], nk.compare(a, b, inputs, ASKED))


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_raised_and_merged(worlds, dtype):
    X, Y = (torch.tensor(Z).to(dtype) for Z in worlds.related(60, 5, 4))
    found = nk.compare({"x": X}, {"y": Y}, measures=ASKED, errors=True, chunks=4)
    single = nk.compare({"x": X.float()}, {"y": Y.float()}, measures=ASKED, errors=True, chunks=4)
    assert_alike(found, single, 1e-6)
    parts = [nk.collect({"x": X}, {"y": Y}, measures=ASKED, part=(k, 3)) for k in (3, 1, 2)]
    assert_alike(nk.merge(parts).compute(ASKED), found, 1e-6)


def test_a_rank_deficient_layer_keeps_its_rank_in_parts_and_replicates(worlds):
    X, Y = worlds.of_rank(80, 6, 3), worlds.normal(80, 4)
    table = nk.compare({"x": X}, {"y": Y}, measures="cca_mean", errors=True, chunks=4)["cca_mean"]
    reduced = nk.compare({"x": X[:, :3]}, {"y": Y}, measures="cca_mean", errors=True, chunks=4)["cca_mean"]
    assert table.values == pytest.approx(reduced.values, abs=1e-8)
    assert table.replicates == pytest.approx(reduced.replicates, abs=1e-8)
    parts = [nk.collect({"x": X}, {"y": Y}, measures="cca_mean", part=(k, 8)) for k in range(1, 9)]
    assert nk.merge(parts).compute()["x", "y"] == pytest.approx(table["x", "y"], abs=1e-8)


@pytest.mark.parametrize("measure", ["cka", "cka_rbf", "cka_minibatch(batch=16)", "nbs"])
@pytest.mark.parametrize("shape", ["pool", "dft"])
def test_nan_in_a_late_batch_is_refused_with_layer_and_batch(pair, inputs, measure, shape):
    if shape == "dft" and measure not in ("cka", "nbs"):
        shape = "flatten"
    inputs[40, 0, 0, 0] = 7777

    def spoiling(model, batch):
        return model(batch.masked_fill(batch == 7777, torch.nan))

    with pytest.raises(InvalidValue, match=r"layer 'conv1' of 'a' in batch 2 holds \d+ NaN or Inf among"):
        nk.compare(*pair, list(inputs.split(16)), measure, layers=["conv1", "fc"], shape=shape, forward=spoiling)
    assert not any(module._forward_hooks for module in pair[0].modules())


# --- users ------------------------------------------------------------------------------------------------------------


def test_an_interrupted_pass_is_saved_and_merged_with_the_rest(pair, inputs, layers, tmp_path):
    nk.collect(*pair, Counted(inputs, 8, end=3), ASKED, layers=layers, partial=True).save(tmp_path / "s.netkin")
    begun = nk.load(tmp_path / "s.netkin")
    assert (begun.ranges, begun.compute().complete) == ([(0, 24)], False)
    assert "interrupted: these numbers rest on the first 24 examples." in sentences(begun.compute())
    rest = nk.collect(*pair, Counted(inputs[24:], 8), ASKED, layers=layers, start=24)
    assert_alike(nk.merge([rest, begun]).compute(ASKED), nk.compare(*pair, inputs, ASKED, layers=layers))


def test_a_progress_function_may_end_the_work(monkeypatch, pair, inputs, state_of):
    monkeypatch.setattr(progress, "PAUSE", 0)
    before = state_of(pair[0])

    class Enough(Exception):
        """Raised by the user."""

    def report(done, total, what):
        if done >= 16:
            raise Enough(what)

    with pytest.raises(Enough, match="reading"):
        nk.compare(*pair, list(inputs.split(16)), progress=report)
    assert state_of(pair[0]) == before


def test_progress_counts_the_part_and_every_stage(monkeypatch, pair, inputs):
    monkeypatch.setattr(progress, "PAUSE", 0)
    told = []
    nk.collect(*pair, inputs, "cka", layers="fc", part="1/2", progress=lambda *news: told.append(news))
    assert told[-1] == (25, 25, "reading")
    told.clear()
    options = {"layers": "fc", "errors": True, "chunks": 3}
    nk.compare(*pair, list(inputs.split(10)), **options, progress=lambda *news: told.append(news))
    assert told[:5] == [(done, 50, "reading") for done in (10, 20, 30, 40, 50)]
    assert told[5:] == [(1, 1, "measuring"), *((done, 3, "leaving out") for done in (1, 2, 3))]


def test_threads_share_models(pair, inputs, layers):
    want, found = nk.compare(*pair, inputs, ASKED, layers=layers), []
    threads = [
        threading.Thread(target=lambda: found.append(nk.compare(*pair, inputs, ASKED, layers=layers, progress=False)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for one in found:
        assert_alike(one, want)


class Doubles(TorchDispatchMode):
    """Notes from where in netkin tensors of float64 are made."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float64 and "zeros" not in str(function):
            self.made |= {f"{one.name} in {one.filename}" for one in extract_stack() if "netkin" in one.filename}
        return found


@pytest.mark.parametrize("shape", slow_but(["pool", "flatten"], "pool"))
@pytest.mark.parametrize("errors", slow_but([False, True], True))
@pytest.mark.parametrize("measure", ["cka", "nbs", "cka_debiased", "cka_rbf", "cka_minibatch(batch=16)"])
def test_a_device_without_float64_is_asked_for_none(maps, images, layers, monkeypatch, measure, errors, shape):
    chosen = find(measure)  # here, since its parameters are tried on the host
    models, options = (maps(), maps()), {"errors": errors, "chunks": 3, "measures": [chosen], "shape": shape}
    options["layers"] = layers if shape == "pool" else ["conv1", "conv2"]
    usual = nk.compare(*models, images, **options)
    monkeypatch.setattr(arrays, "WITHOUT_FLOAT64", ("cpu",))  # in place of "mps"
    with Doubles() as doubles:
        found = nk.compare(*models, images, **options)
    assert doubles.made == set()
    assert found.to_numpy() == pytest.approx(usual.to_numpy(), abs=1e-3)
