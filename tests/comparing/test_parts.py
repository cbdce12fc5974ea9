"""Statistics of parts of the data, saved, loaded and merged in any order, are those of the whole."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.errors import FileError, NetkinError
from netkin.identity import DataDigest
from netkin.measures import measures
from netkin.sources.batches import Batches, Borrowed
from netkin.statistics import LayerMoments
from netkin.statistics import layer_rows as rows_module
from quickly import slow_after, slow_but
from table_worlds import sentences
from worlds import Worlds

SPECTRAL = ["cka", "nbs", "cca_mean", "svcca", "procrustes_distance", "linear_regression_r2"]
BY_ROWS = ["cka_minibatch(batch=16)", "cka_minibatch(batch=8, kernel=rbf)", "cka_rbf", "cka_rbf_debiased"]
EVERY = [name for name in measures(matrices=True) if name != "dft_cca"] + BY_ROWS[:2]
SEVERAL = ["cka", "cka_debiased", "cca_mean", "procrustes_distance", *BY_ROWS]


def recorded(n, p, q):
    """Return two sides, one of two layers, that share something."""
    worlds = Worlds(1)
    X, Y = worlds.related(n, p, q)
    return {"x": X, "z": X[:, :3] ** 2}, {"y": Y}


def images_of(n, *sizes):
    rng = np.random.default_rng(2)
    return [rng.normal(size=(n, *size)) for size in sizes]


def assert_same(found, whole):
    """Assert that two comparisons hold the same values and replicates to 1e-10, of the same data."""
    assert (found.examples, found.provenance["data digest"]) == (whole.examples, whole.provenance["data digest"])
    assert set(found) == set(whole)
    for measure in whole:
        mine, theirs = found[measure], whole[measure]
        assert dict(mine.missing) == dict(theirs.missing), measure
        assert mine.values == pytest.approx(theirs.values, abs=1e-10, nan_ok=True), measure
        assert (mine.chunk_sizes, mine.exactness) == (theirs.chunk_sizes, theirs.exactness), measure
        assert (mine.replicates is None) == (theirs.replicates is None), measure
        if theirs.replicates is not None:
            assert mine.replicates == pytest.approx(theirs.replicates, abs=1e-10, nan_ok=True), measure


def merged(folder, subjects, order, count, asked, **options):
    """Return the comparison of `count` parts, each saved to a file and loaded, merged in some order."""
    parts = []
    for part in order:
        path = folder / f"{part}.netkin"
        nk.collect(*subjects, measures=asked, part=(part, count), **options).save(path, overwrite=True)
        parts.append(nk.load(path))
    return nk.merge(parts).compute(asked)


ORDERS = [(1,), (2, 1), (4, 2, 1, 3)]  # more are drawn in test_parts_of_any_sizes_in_any_order_are_the_whole
CHUNKS = [{}, {"errors": True, "chunks": 4}]


# --- recorded rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", slow_but(CHUNKS, CHUNKS[1]), ids=["no chunks", "chunks"])
@pytest.mark.parametrize("n, p, q", [(90, 5, 6), (40, 60, 50)], ids=["n > d", "n < d"])
def test_every_measure_of_merged_parts_is_that_of_the_whole(tmp_path, n, p, q, chunks):
    subjects = recorded(n, p, q)
    whole = nk.compare(*subjects, measures=EVERY, **chunks)
    for order in ORDERS:
        assert_same(merged(tmp_path, subjects, order, len(order), EVERY, **chunks), whole)


@pytest.mark.parametrize("chunks", slow_but(CHUNKS, CHUNKS[1]), ids=["no chunks", "chunks"])
@pytest.mark.parametrize(
    "sizes, asked, options",
    [
        (((3, 4, 4), (3, 4, 4), (4, 4, 4)), SEVERAL, {"shape": "positions"}),
        (((3, 4, 4), (3, 2, 2), (4, 4, 4)), SEVERAL, {"shape": "positions", "resize": "average"}),
        (((3, 4, 4), (3, 2, 2), (4, 4, 4)), SPECTRAL, {"shape": "dft"}),
        (((3, 4, 4), (3, 2, 2), (4, 4, 4)), SPECTRAL, {"shape": "dft", "resize": "average"}),
    ],
    ids=["positions", "resized", "spectra", "resized spectra"],
)
def test_maps_of_merged_parts_are_those_of_the_whole(tmp_path, sizes, asked, options, chunks):
    x, y, z = images_of(18, *sizes)
    subjects = ({"x": x}, {"y": y, "z": z})
    whole = nk.compare(*subjects, measures=asked, **options, **chunks)
    for order in ORDERS[1:]:
        assert_same(merged(tmp_path, subjects, order, len(order), asked, **options, **chunks), whole)


@pytest.mark.parametrize("chunks", CHUNKS, ids=["no chunks", "chunks"])
def test_a_sample_of_merged_parts_is_that_of_the_whole(tmp_path, monkeypatch, chunks):
    monkeypatch.setattr(rows_module, "CAP", 25)
    subjects = recorded(90, 5, 6)
    whole = nk.compare(*subjects, measures=["cka_rbf", "cka_rbf_debiased"], **chunks)
    assert whole["cka_rbf"].exactness == "a sample of 25 of 90 examples"
    for order in ORDERS:
        found = merged(tmp_path, subjects, order, len(order), ["cka_rbf", "cka_rbf_debiased"], **chunks)
        assert_same(found, whole)


@settings(max_examples=5)
@given(st.data())
def test_parts_of_any_sizes_in_any_order_are_the_whole(data):
    n, asked = 60, ["cka", "cka_debiased", "pwcca", "nbs", "cka_minibatch(batch=16)", "cka_rbf"]
    a, b = recorded(n, 12, 9)
    cuts = data.draw(st.sets(st.integers(1, n - 1), max_size=9))
    ranges = [slice(*ends) for ends in pairwise([0, *sorted(cuts), n])]
    chunks = data.draw(st.sampled_from([0, 2]))
    options = {"measures": asked, "errors": True, "chunks": chunks} if chunks else {"measures": asked}
    parts = [
        nk.collect(*({k: v[s] for k, v in side.items()} for side in (a, b)), start=s.start, **options) for s in ranges
    ]
    found = nk.merge(data.draw(st.permutations(parts))).compute(asked)
    assert_same(found, nk.compare(a, b, **options))


def test_rows_merge_with_moments_either_way():
    X, Y = Worlds(3).related(600, 40, 30)
    asked, options = ["cka", "cka_debiased", "cca_mean", "nbs"], {"errors": True, "chunks": 4}
    few, many = (
        nk.collect({"x": X[s]}, {"y": Y[s]}, measures=asked, start=s.start, **options)
        for s in (slice(0, 12), slice(12, 600))
    )
    assert [[one.kind for one in part.every()] for part in (few, many)] == [["LinearRows"], ["LayerMoments"]]
    whole = nk.compare({"x": X}, {"y": Y}, measures=asked, **options)
    for parts in ([few, many], [many, few]):
        assert_same(nk.merge(parts).compute(), whole)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    slow_after(
        2,
        [
            lambda images: images,
            lambda images: images.numpy(),
            TensorDataset,
            lambda images: DataLoader(TensorDataset(images, torch.arange(len(images))), batch_size=7),
            lambda images: list(images.split(9)),
        ],
    ),
    ids=["tensor", "array", "data set", "loader", "list"],
)
def test_models_run_on_parts_of_any_data(tmp_path, doubles, inputs, data):
    layers = ["conv2", "fc"]
    given, chunks = data(inputs), CHUNKS[1]  # with them the values without are compared as well
    whole = nk.compare(*doubles, given, SEVERAL, layers=layers, **chunks)
    assert_same(merged(tmp_path, (*doubles, given), (3, 1, 2), 3, SEVERAL, layers=layers, **chunks), whole)


@pytest.mark.parametrize("shape, resize", [("positions", "average"), ("flatten", None), ("dft", None)])
def test_models_of_other_shapes_run_on_parts(tmp_path, doubles, inputs, shape, resize):
    asked, options = SPECTRAL if shape == "dft" else SEVERAL, {"layers": ["conv1", "conv2"], "shape": shape}
    options |= {"resize": resize, "errors": True, "chunks": 3}
    inputs = inputs[:24, :, :4, :4] if shape == "positions" else inputs
    whole = nk.compare(*doubles, inputs, asked, **options)
    assert_same(merged(tmp_path, (*doubles, inputs), (3, 1, 2), 3, asked, **options), whole)


@pytest.mark.parametrize("shape", slow_after(1, ["tokens", "mean", "last"]))
def test_padded_sentences_run_on_parts(tmp_path, words, sentences, shape):
    pair, asked = (words().double(), words().double()), ["cka", "cka_debiased", "cca_mean", "cka_rbf"]
    options = {"shape": shape, "layers": ["embed", "layer.1"], "errors": True, "chunks": 3}
    whole = nk.compare(*pair, sentences, asked, **options)
    for order in ((2, 1), (3, 1, 2)):
        assert_same(merged(tmp_path, (*pair, sentences), order, len(order), asked, **options), whole)


def test_separate_loaders_say_where_they_start(doubles, inputs, layers):
    asked, options = SEVERAL, {"layers": layers, "errors": True, "chunks": 4}
    parts = [
        nk.collect(*doubles, DataLoader(TensorDataset(inputs[s]), batch_size=7), asked, start=s.start, **options)
        for s in (slice(20, 41), slice(41, 50), slice(0, 20))
    ]
    whole = nk.compare(*doubles, DataLoader(TensorDataset(inputs), batch_size=16), asked, **options)
    assert_same(nk.merge(parts).compute(asked), whole)
    assert nk.merge(parts[:2]).ranges == [(20, 50)]


def test_separate_loaders_may_hold_fewer_examples_than_there_are_chunks():
    X, Y = Worlds(4).related(60, 4, 3)
    options = {"measures": "cka", "errors": True, "chunks": 15}
    parts = [nk.collect({"x": X[i : i + 10]}, {"y": Y[i : i + 10]}, start=i, **options) for i in range(0, 60, 10)]
    assert_same(nk.merge(parts).compute(), nk.compare({"x": X}, {"y": Y}, **options))


def test_missing_parts_are_told_by_their_numbers(doubles, inputs):
    parts = {
        start: nk.collect(*doubles, inputs[start : start + 10], "cka", layers="fc", start=start)
        for start in (0, 20, 30)
    }
    assert (parts[0].gaps, parts[0].missing, sentences(parts[0].compute())[:-1]) == ([], "", ())
    assert (parts[20].expected, parts[20].gaps) == (30, [(0, 20)])
    some = nk.merge([parts[30], parts[0], parts[20]])
    assert (some.expected, some.gaps) == (40, [(10, 20)])
    assert sentences(some.compute())[0] == "these numbers rest on 30 of 40 examples: not all parts have been merged."
    third = nk.collect(*doubles, inputs, "cka", layers="fc", part="3/4")
    assert (third.expected, third.gaps) == (len(inputs), [(0, len(inputs) // 2), (3 * len(inputs) // 4, len(inputs))])


def test_examples_are_cut_before_parts_are(doubles, inputs, layers):
    parts = [nk.collect(*doubles, inputs, "cka", examples=31, part=(part, 3), layers=layers) for part in (1, 2, 3)]
    assert [part.ranges for part in parts] == [[(0, 10)], [(10, 20)], [(20, 31)]]
    assert_same(nk.merge(parts).compute(), nk.compare(*doubles, inputs, examples=31, layers=layers))


def test_three_parts_of_data_that_each_model_has_of_its_own_merge(doubles, inputs):
    subjects = [nk.ModelInput(model, data=own) for model, own in zip(doubles, (inputs, inputs[:31]), strict=True)]
    parts = [nk.collect(*subjects, measures="sketched_cka", layers="fc", part=(part, 3)) for part in (1, 2, 3)]
    whole = nk.compare(*subjects, measures="sketched_cka", layers="fc")
    merged = nk.merge(parts)
    assert (merged.record.data, merged.examples) == ("Tensor and Tensor", 81)
    assert merged.compute().to_numpy() == pytest.approx(whole.to_numpy(), abs=1e-10)


def test_parts_leave_out_what_a_loader_drops(doubles, inputs, layers):
    data = DataLoader(TensorDataset(inputs), batch_size=8, drop_last=True)
    parts = [nk.collect(*doubles, data, "cka", part=(part, 3), layers=layers) for part in (1, 2, 3)]
    whole = nk.compare(*doubles, data, layers=layers)
    assert whole.examples == 48
    assert_same(nk.merge(parts).compute(), whole)
    assert nk.merge(parts).missing == ""


def test_a_part_of_netkins_data_prepares_no_other_examples(doubles, inputs):
    def prepare(some):
        prepared.extend(some[:, 0, 0, 0].tolist())
        return some

    prepared: list[float] = []
    part = nk.collect(*doubles, Batches("mine", inputs, torch.arange(50), 8, prepare), "cka", layers="fc", part="2/2")
    assert prepared == inputs[25:, 0, 0, 0].tolist()
    assert part.ranges == [(25, 50)]


def test_parts_that_start_from_the_same_shift_add_up_as_sums():
    X, Y = Worlds(4).related(400, 6, 5)
    X = X + np.linspace(0, 1e3, 400)[:, None]  # so that each part would choose another shift
    one, two, whole = (LayerMoments([(["x"], ["y"])], debiased=True) for _ in range(3))
    one.update({"x": X[:200], "y": Y[:200]}, range(200))
    two.take_frame(one.frame())
    two.update({"x": X[200:], "y": Y[200:]}, range(200, 400))
    whole.update({"x": X, "y": Y}, range(400))
    assert all(torch.equal(two.frame()[key][0], shift) for key, (shift, _) in one.frame().items())
    sums = one.blocks[0].sums + two.blocks[0].sums
    assert torch.equal(one.merge(two).blocks[0].sums, sums)
    found, wanted = (float(nk.cka_debiased(moments["x", "y"])) for moments in (one.merge(two), whole))
    assert found == pytest.approx(wanted, abs=1e-12)


def test_parts_of_interleaved_examples_merge_and_tell_the_first_they_share(doubles, inputs):
    def every(first, step):
        digest = DataDigest()
        digest.update(inputs[first::step], range(first, 50, step))
        return digest

    assert every(0, 2).common(every(1, 2)) is None
    assert every(1, 2).common(every(0, 3)) == (3, 4)
    assert every(0, 1).common(every(7, 10)) == (7, 8)
    assert every(0, 1).common(DataDigest()) is None
    assert DataDigest().common(every(0, 1)) is None


def test_parts_of_one_example_each(doubles, inputs, layers):
    for shape in ("pool", "flatten"):
        options = {"layers": layers, "shape": shape}
        parts = [nk.collect(*doubles, inputs[:6], "cka", part=(part, 6), **options) for part in range(6, 0, -1)]
        assert_same(nk.merge(parts).compute(), nk.compare(*doubles, inputs[:6], **options))
    alone = parts[0].compute()
    assert "constant" in alone["cka"].missing["fc", "fc"]


def test_a_part_of_a_named_loader_reads_its_own_examples_alone(doubles, inputs):
    class Counted(TensorDataset):
        def __getitem__(self, place):
            seen.append(place)
            return super().__getitem__(place)

    seen = []
    data = Borrowed("mine", DataLoader(Counted(inputs), batch_size=8))
    part = nk.collect(*doubles, data, "cka", part="2/2")
    assert set(seen) == set(range(len(inputs) // 2, len(inputs)))
    assert part.record.data == "mine"
    whole = nk.merge([part, nk.collect(*doubles, data, "cka", part="1/2")])
    ours = nk.compare(*doubles, inputs)
    assert whole.compute().to_numpy() == pytest.approx(ours.to_numpy(), abs=1e-6)


# --- files ------------------------------------------------------------------------------------------------------------

SOURCES = str(Path(nk.__file__).parents[1])
SAVING = """
import sys, torch, netkin as nk
X = {"x": torch.randn(4000, 400, dtype=torch.float64)}
statistics = nk.collect(X, measures="cka")
statistics.save(sys.argv[1])
print("saved", flush=True)
while True:
    statistics.save(sys.argv[1], overwrite=True)
"""


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_a_whole_file(tmp_path):
    path = tmp_path / "s.netkin"
    process = subprocess.Popen(
        [sys.executable, "-c", SAVING, path], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": SOURCES}
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"saved\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert nk.load(path).compute()["x", "x"] == pytest.approx(1)


def test_a_cut_or_damaged_file_is_refused_with_its_name(tmp_path, doubles, inputs):
    path = tmp_path / "s.netkin"
    nk.collect(*doubles, inputs, "cka", layers="fc").save(path, overwrite=True)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 40])
    with pytest.raises(FileError, match="s.netkin"):
        nk.load(path)
    path.write_bytes(whole.replace(b"LayerMoments", b"LayerMomentz"))
    with pytest.raises(NetkinError, match="s.netkin.*is damaged"):
        nk.load(path)


def test_merging_changes_neither_part(doubles, inputs):
    one, two = (nk.collect(*doubles, inputs, ["cka", "cka_minibatch(batch=16)"], part=(k, 2)) for k in (1, 2))
    before = one.compute()
    nk.merge([one, two])
    assert dict(one.compute().tables) == dict(before.tables)
    assert one.examples == 25
