"""Recordings as sides of a comparison: the numbers are those of live models, and examples pair by what they are."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.errors import InvalidValue, ShapeError
from netkin.sources.batches import Batches, sample
from recording_worlds import as_vllm, boundaries, language, matrices, token_batches

LAYERS = [f"blocks.{place}" for place in range(4)]
MEASURES = ["cka", "cka_debiased", "procrustes_distance", "svcca"]


def compared(a, b, data=None, **options):
    return nk.compare(a, b, data, **{"measures": MEASURES, "progress": False} | options)


def same(one, other):
    for measure in one:
        assert np.array_equal(one.to_numpy(measure), other.to_numpy(measure), equal_nan=True)
        if one[measure].errors is not None:
            assert np.array_equal(one[measure].errors, other[measure].errors, equal_nan=True)


@pytest.mark.parametrize("shape", ["mean", "last", "tokens"])
def test_a_recorded_side_gives_the_numbers_of_the_live_model_to_the_last_digit(tmp_path, shape):
    a, b, data = language(0), language(1), token_batches(5)
    saved = nk.activations(b, LAYERS, data, shape="tokens", save=tmp_path / "b", progress=False)
    options = {"layers": LAYERS, "shape": shape, "errors": 20}
    same(compared(a, b, data, **options), compared(a, saved, data, **options))
    with_itself = compared(str(tmp_path / "b"), None, layers=LAYERS, shape=shape)
    assert with_itself["cka"]["blocks.0", "blocks.0"] == pytest.approx(1)


def test_sampled_tokens_are_those_of_the_live_model(tmp_path, monkeypatch):
    a, b, data = language(0), language(1), token_batches(5)
    saved = nk.activations(b, LAYERS, data, shape="tokens", save=tmp_path / "b", progress=False)
    options = {"layers": LAYERS, "shape": "tokens", "tokens": 50, "measures": ["cka", "cka_rbf"]}
    same(compared(a, b, data, **options), compared(a, saved, data, **options))


def test_what_vllm_wrote_gives_the_numbers_of_the_model_that_it_ran(tmp_path):
    a, b, data = language(0), language(1), token_batches(4)
    order = np.random.default_rng(0).permutation(32)  # requests end in an order of their own
    folder = as_vllm(b, data, tmp_path / "v", order=order)
    layers = {"a": LAYERS, "b": [f"hidden_states.{place + 1}" for place in range(4)]}
    live = compared(a, b, data, layers=LAYERS, shape="tokens")
    filed = compared(a, f"{folder},layers=0-4", data, layers=layers, shape="tokens")
    same(live, filed)


def test_recordings_pair_by_their_ids_in_any_order(tmp_path):
    x, y = matrices(90)
    order = np.random.default_rng(1).permutation(90)
    np.savez(tmp_path / "a.npz", x=x, ids=np.arange(90))
    save_file({"y": torch.tensor(y[order]), "ids": torch.tensor(order)}, tmp_path / "b.safetensors")
    same(compared(str(tmp_path / "a.npz"), str(tmp_path / "b.safetensors")), compared({"x": x}, {"y": y}))


def test_two_recordings_of_one_engine_pair_by_their_tokens(tmp_path):
    a, b, data = language(0), language(1), token_batches(4)
    one = as_vllm(a, data, tmp_path / "a", order=np.random.default_rng(0).permutation(32))
    other = as_vllm(b, data, tmp_path / "b", order=np.random.default_rng(1).permutation(32))
    found = compared(f"{one},layers=0-4", f"{other},layers=0-4", shape="tokens", measures="cka")
    states = [
        torch.cat([boundaries(model, batch)[2][batch["attention_mask"].bool()] for batch in data]) for model in (a, b)
    ]
    assert found["hidden_states.2", "hidden_states.2"] == pytest.approx(nk.cka(*states).item(), abs=1e-6)


def test_halves_are_compared_as_they_were_recorded(tmp_path):
    x, y = (torch.tensor(rows) for rows in matrices(90))
    save_file({"x": x.bfloat16()}, tmp_path / "a.safetensors")
    save_file({"y": y}, tmp_path / "b.safetensors")
    found = compared(str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), measures="cka")
    assert found["x", "y"] == pytest.approx(nk.cka(x.bfloat16().double(), y.double()).item(), abs=1e-6)
    same(found, compared({"x": x.bfloat16()}, {"y": y}, measures="cka"))


def test_parts_are_collected_and_merged(tmp_path):
    a, b, data = language(0), language(1), token_batches(5)
    saved = nk.activations(b, LAYERS, data, save=tmp_path / "b", progress=False)
    measures = ["cka", "cka_debiased"]
    options = {"layers": LAYERS, "measures": measures, "progress": False}
    for one, other, fed in ((a, saved, data), (saved, saved, None)):
        whole = compared(one, other, fed, layers=LAYERS, measures=measures)
        parts = [nk.collect(one, other, fed, part=(place, 3), **options) for place in (2, 1, 3)]
        merged = nk.merge(parts).compute(measures)
        for measure in whole:
            assert merged.to_numpy(measure) == pytest.approx(whole.to_numpy(measure), abs=1e-9)
        assert merged.provenance["data digest"] == whole.provenance["data digest"]


def test_the_digest_of_the_data_tells_other_recordings_apart(tmp_path):
    x, _ = matrices(30)
    digests = []
    for place, rows in enumerate((x, x, x + (np.arange(30) == 29)[:, None].astype(np.float32))):
        np.savez(tmp_path / f"{place}.npz", x=rows)
        digests.append(compared(str(tmp_path / f"{place}.npz"), None, measures="cka").provenance["data digest"])
    assert digests[0] == digests[1] != digests[2]


def test_the_weights_of_the_recorded_model_are_in_the_provenance(tmp_path):
    model, data = language(1), token_batches(2)
    saved = nk.activations(model, LAYERS, data, save=tmp_path / "b", progress=False)
    found = compared(language(0), saved, data, layers=LAYERS, measures="cka")
    live = compared(language(0), model, data, layers=LAYERS, measures="cka")
    assert found.provenance["weights b"] == live.provenance["weights b"]


def test_recordings_and_models_are_compared_together(tmp_path):
    models, data = {"a": language(0), "b": language(1)}, token_batches(4)
    nk.activations(language(2), LAYERS, data, save=tmp_path / "c", progress=False)
    live = nk.compare_many(models | {"c": language(2)}, data, "cka", layers=LAYERS, progress=False)
    filed = nk.compare_many(models | {"c": str(tmp_path / "c")}, data, "cka", layers=LAYERS, progress=False)
    for pair in live:
        same(live[pair], filed[pair])


def test_the_plan_says_that_one_model_runs(tmp_path):
    data = token_batches(4)
    saved = nk.activations(language(1), LAYERS, data, save=tmp_path / "b", progress=False)
    assert nk.explain(language(0), saved, data, "cka", layers=LAYERS).passes == 4
    assert nk.explain(saved, saved, None, "cka").passes == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


def filed(folder, name, **arrays):
    np.savez(folder / f"{name}.npz", **arrays)
    return str(folder / f"{name}.npz")


def other_ids(folder):
    x, y = matrices(10)
    return filed(folder, "a", x=x, ids=np.arange(10)), filed(folder, "b", y=y, ids=np.arange(3, 13)), None


def one_without_ids(folder):
    x, y = matrices(10)
    return filed(folder, "a", x=x, ids=np.arange(10)), filed(folder, "b", y=y), None


def an_id_twice(folder):
    x, y = matrices(4)
    return filed(folder, "a", x=x, ids=np.array([1, 2, 2, 3])), filed(folder, "b", y=y, ids=np.arange(4)), None


def other_numbers_of_examples(folder):
    x, y = matrices(10)
    return filed(folder, "a", x=x), filed(folder, "b", y=y[:8]), None


def nothing_known_of_the_examples(folder):
    return language(), filed(folder, "a", x=matrices(24)[0]), token_batches(3)


def texts_beside_data(folder):
    x, _ = matrices(24)
    ids = np.array([f"e{place}" for place in range(24)])
    return language(), filed(folder, "a", x=x, ids=ids), token_batches(3)


def other_data(folder):
    saved = nk.activations(language(), LAYERS, torch.arange(60).reshape(20, 3) % 40, save=folder / "r", progress=False)
    data = torch.arange(60).reshape(20, 3) % 40
    data[7, 1] = 0
    return language(), saved, data


def too_many_data(folder):
    saved = nk.activations(language(), LAYERS, token_batches(2), save=folder / "r", progress=False)
    return language(), saved, token_batches(3)


def other_tokens(folder):
    return (
        str(as_vllm(language(), token_batches(1), folder / "a")),
        str(as_vllm(language(), token_batches(1, seed=9), folder / "b")),
        None,
    )


def same_numbers_of_other_content(folder):
    recordings = []
    for name, rows in (("a", torch.arange(60)), ("b", torch.arange(60) % 30)):
        data = rows.reshape(20, 3)
        recordings.append(nk.activations(language(), LAYERS, data % 40, save=folder / name, progress=False))
    return *recordings, None


def numbered(folder):
    rows = torch.arange(60).reshape(20, 3) % 40
    layers = nk.activations(language(), LAYERS, rows, progress=False)
    return filed(folder, "a", ids=np.arange(20), **{layer: found.numpy() for layer, found in layers.items()}), rows


def shuffled_data(folder):
    recorded, rows = numbered(folder)
    return language(), recorded, DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)


def a_sample_of_data(folder):
    recorded, rows = numbered(folder)
    return language(), recorded, sample(Batches("rows", rows, None, 4, prepare=torch.Tensor.long), 10, seed=0)


REFUSED = [
    (shuffled_data, InvalidValue, "knows its examples by their numbers in the data, and these are shuffled"),
    (a_sample_of_data, InvalidValue, "knows its examples by their numbers in the data, and these are a sample"),
    (other_ids, InvalidValue, r"a.npz' holds 3 examples of other ids than '.*b.npz', the first 0;"),
    (one_without_ids, InvalidValue, "has ids of its examples and .* has none"),
    (an_id_twice, InvalidValue, "has the id 2 twice"),
    (other_numbers_of_examples, ShapeError, "holds 10 examples and .* 8"),
    (nothing_known_of_the_examples, InvalidValue, "nothing tells whether they saw the same examples"),
    (texts_beside_data, InvalidValue, "nothing tells whether they saw the same examples"),
    (other_data, InvalidValue, "1 example of the data, the first number 7, are not those"),
    (too_many_data, InvalidValue, "does not hold 8 examples of a batch, the first number 16 of the data"),
    (other_tokens, InvalidValue, "examples of other tokens than"),
    (same_numbers_of_other_content, InvalidValue, "had other inputs than in"),
]


@pytest.mark.parametrize("sides, error, said", REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_examples_that_do_not_match_are_refused_in_a_sentence(tmp_path, sides, error, said):
    a, b, data = sides(tmp_path)
    with pytest.raises(error, match=said):
        compared(a, b, data, measures="cka")


# --- memory -----------------------------------------------------------------------------------------------------------

LARGE = """
import resource, sys
import netkin as nk
from netkin.sources import recordings

recordings.AT_ONCE = 2**23

def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

small = nk.recorded(sys.argv[1] + "/small")
nk.compare(small, small, measures="cka", progress=False)
before, large = used(), nk.recorded(sys.argv[1] + "/large")
nk.compare(large, measures="cka", progress=False)
print(used() - before)
"""


def test_a_recording_is_never_whole_in_memory(tmp_path):
    rows = np.random.default_rng(0).standard_normal((2048, 16, 128), dtype=np.float32)  # 16 MiB
    for name, shards in (("small", 1), ("large", 10)):
        (tmp_path / name).mkdir()
        for place in range(shards):
            np.savez(tmp_path / name / f"{place}.npz", x=rows)
    done = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 160 / 4
