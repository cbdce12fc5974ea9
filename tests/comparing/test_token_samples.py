"""Samples of tokens: where statistics of all tokens do not fit the memory, or where fewer are asked for."""

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.comparing import explain
from netkin.errors import InvalidValue
from netkin.statistics import TokenRows
from sequence_worlds import LINEAR, models, sequences


def compared(data, measures=("cka", "cka_debiased"), nets=None, **options):
    return nk.compare(*(nets or models()), data, measures, layers="blocks.*", shape="tokens", progress=False, **options)


@pytest.mark.parametrize("width", [12, 64])  # narrow ones have products of features, wider ones Gram matrices
@pytest.mark.parametrize("ragged", [False, True])
def test_a_sample_of_all_tokens_gives_what_moments_give(ragged, width):
    data, nets = sequences(ragged=ragged), models(width=width)
    exact, sampled = compared(data, LINEAR, nets), compared(data, LINEAR, nets, tokens=10_000)
    for measure in LINEAR:
        assert exact[measure].statistic == "Moments"
        assert (sampled[measure].statistic, sampled[measure].exactness) == ("Rows", "exact")
        np.testing.assert_allclose(sampled[measure].values, exact[measure].values, rtol=1e-6, atol=1e-9)


def test_the_sample_is_the_tokens_of_the_smallest_hashes():
    nets, data = models(), sequences()
    found = compared(data, nets=nets, tokens=60, seed=3)
    x, y = (nk.activations(net, "blocks.1", data, shape="tokens")["blocks.1"].double().numpy() for net in nets)
    counts = [int(length) for batch in data for length in batch["attention_mask"].sum(1)]
    numbers = [example * 2**20 + place for example, count in enumerate(counts) for place in range(count)]

    def mixed(number):  # SplitMix64's finaliser, in Python's integers
        z = (number + 3 * 0xD1342543DE82EF95) % 2**64
        for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            z = (z ^ (z >> 30)) * multiplier % 2**64
        return z ^ (z >> 31)

    chosen = sorted(range(len(numbers)), key=lambda row: mixed(numbers[row]))[:60]
    X, Y = (rows[chosen] - rows[chosen].mean(0) for rows in (x, y))
    cka = np.linalg.norm(X.T @ Y) ** 2 / (np.linalg.norm(X.T @ X) * np.linalg.norm(Y.T @ Y))
    assert found["cka"]["blocks.1", "blocks.1"] == pytest.approx(cka, abs=1e-6)
    assert found["cka"].exactness == f"a sample of 60 of {sum(counts):,} tokens of 40 sequences"


@pytest.mark.parametrize("batch", [5, 40])
def test_the_sample_does_not_depend_on_batches_parts_or_files(batch, tmp_path):
    whole = compared(sequences(), tokens=60)
    again = compared(sequences(batch=batch), tokens=60)
    options = {"layers": "blocks.*", "shape": "tokens", "tokens": 60, "progress": False}
    dataset = [(b["input_ids"][i], b["attention_mask"][i]) for b in sequences() for i in range(8)]
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch)

    def forward(model, pair):
        return model(*pair)

    parts = [
        nk.collect(*models(), loader, ["cka", "cka_debiased"], part=(k, 3), forward=forward, **options)
        for k in (2, 1, 3)
    ]
    nk.merge(parts).save(tmp_path / "parts.stats")
    merged = nk.load(tmp_path / "parts.stats").compute()
    for measure in ("cka", "cka_debiased"):
        np.testing.assert_allclose(again[measure].values, whole[measure].values, atol=1e-6)
        assert merged[measure].exactness.startswith("a sample of 60 of 360 tokens")  # masks are seen in mappings alone


@pytest.mark.slow
def test_samples_scatter_about_the_exact_value():
    data = sequences(count=64, length=16)
    exact = compared(data)["cka_debiased"].values
    samples = np.stack(
        [compared(data, ["cka_debiased"], tokens=120, seed=seed)["cka_debiased"].values for seed in range(20)]
    )
    assert not np.array_equal(samples[0], samples[1])
    spread = samples.std(0, ddof=1) / 20**0.5
    assert (np.abs(samples.mean(0) - exact) < 4 * spread).all()


def test_tokens_are_sampled_where_statistics_of_all_do_not_fit():
    nets, data = models(width=500, depth=16), sequences(count=200, length=90, ragged=False)
    plans = [
        explain(*nets, data, "cka", layers="blocks.*", shape="tokens", memory=size) for size in (2e9, 900e6, 100e6)
    ]
    exact, sampled, refused = plans
    assert exact.measures["cka"].startswith("Moments")
    assert sampled.measures["cka"] == "Rows, a sample of at most 4,096 tokens, as statistics of all would not fit"
    assert sampled.bytes < 900e6 < exact.bytes
    assert "the sampled tokens need" in refused.refused


def test_half_precision_is_kept_in_half_the_bytes():
    nets = [net.bfloat16() for net in models()]
    options = {"layers": "blocks.*", "shape": "tokens", "progress": False, "measures": "cka"}
    sampled = nk.collect(*nets, sequences(), tokens=10_000, **options)
    (collector,) = [one for one in sampled.every() if isinstance(one, TokenRows)]
    assert {part.dtype for layer in collector.layers.values() for part in layer.parts} == {torch.bfloat16}
    exact = nk.collect(*nets, sequences(), **options).compute()
    np.testing.assert_allclose(sampled.compute()["cka"].values, exact["cka"].values, rtol=1e-5)


@pytest.mark.parametrize("measure", ["cka", "nbs", "svcca(variance=0.9)"])
def test_one_layer_has_values_with_all_layers_of_another_model(measure):
    layers = {"a": "blocks.1", "b": "blocks.*"}
    options = {"shape": "tokens", "progress": False, "layers": layers}
    exact, sampled = (nk.compare(*models(), sequences(), measure, tokens=n, **options) for n in (None, 10_000))
    assert sampled[measure].statistic == "Rows"
    np.testing.assert_allclose(sampled[measure].values, exact[measure].values, rtol=1e-6)


def test_a_constant_layer_is_a_hole():
    nets = models()
    with torch.no_grad():
        nets[1].blocks[2].weight.zero_()
        nets[1].blocks[2].bias.zero_()
    found = compared(sequences(), nets=nets, tokens=60)["cka"]
    assert found.missing.keys() == {(f"blocks.{k}", "blocks.2") for k in range(3)}


def test_few_sequences_give_no_standard_errors():
    found = compared(sequences(count=16), errors=True, chunks=4)["cka"]
    assert found.errors is None or np.isnan(found.errors).all()
    assert "16 sequences are too few" in next(iter(found.error_reasons.values()))
    assert (compared(sequences(count=24), errors=True, chunks=4)["cka"].errors > 0).all()


@pytest.mark.slow
def test_intervals_by_sequences_cover_the_value_of_all_sequences():
    """Tokens of a sequence share a topic, so that errors by tokens would be far too small."""
    draw = np.random.default_rng(0)
    mix = draw.normal(size=(4, 6)), draw.normal(size=(4, 6))

    def rows(count):
        topics = draw.normal(size=(count, 1, 4)) + 0.5 * draw.normal(size=(count, 12, 4))
        return [topics @ side + 0.7 * draw.normal(size=(count, 12, 6)) for side in mix]

    def found(count, **options):
        comparer = nk.Comparer("cka", shape="tokens", **options)
        comparer.update({name: {"x": side} for name, side in zip("ab", rows(count), strict=True)})
        return comparer.compute()["cka"]

    truth = float(found(20_000).values[0, 0])
    inside = 0
    for _ in range(200):
        table = found(150, tokens=600, errors=True, chunks=20)
        inside += abs(table.values[0, 0] - truth) < 2.093 * table.errors[0, 0]  # Student's t with 19 degrees of freedom
    assert 0.91 <= inside / 200 <= 0.985  # 0.95 ± 2.6 standard errors of 200 trials


@pytest.mark.parametrize("tokens", [3, 0, 2.5, "many", True])
def test_a_sample_is_a_whole_number(tokens):
    with pytest.raises(InvalidValue) as refusal:
        compared(sequences(), tokens=tokens)
    assert refusal.value.argument == "tokens"


# --- bands ------------------------------------------------------------------------------------------------------------


def test_a_band_of_depths_holds_the_values_of_all_pairs_near_the_diagonal():
    nets, data = models(depth=5), sequences()
    everything, near = compared(data, nets=nets), compared(data, nets=nets, pairs="band:1")
    places = np.abs(np.subtract.outer(np.arange(5), np.arange(5))) <= 1
    values = near["cka"].values
    assert np.isnan(values[~places]).all()
    np.testing.assert_allclose(values[places], everything["cka"].values[places], rtol=1e-9)
    sampled = compared(data, nets=nets, pairs="band:1", tokens=10_000)["cka"].values
    np.testing.assert_allclose(sampled[places], values[places], rtol=1e-6)


def test_a_band_takes_less_memory_than_all_pairs():
    nets, data = models(width=64, depth=12), sequences()
    options = {"layers": "blocks.*", "shape": "tokens"}
    bands = [explain(*nets, data, "cka", pairs=pairs, **options).bytes for pairs in ("band:1", "all")]
    assert bands[0] < bands[1]
