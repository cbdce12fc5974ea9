"""Sentences and images of different sizes: rows that are not the same number for every example."""

import numpy as np
import pytest
import torch

import netkin as nk
import transcriptions
from netkin.errors import ShapeError
from netkin.statistics import LayerGrams
from netkin.statistics import layer_rows as rows_module
from quickly import slow_but

LENGTHS = [(7, 7, 5, 6, 5, 7), (5, 7, 9, 9), (9, 5, 3, 3, 9, 9, 9, 9), (4, 5, 4, 5)]


def texts(lengths):
    """Return batches of ten sentences, those of a batch of one length."""
    return [torch.randint(1, 11, (10, length)) for length in lengths]


@pytest.fixture
def pair(words):
    return words().double(), words().double()


@pytest.mark.parametrize("batch", [7, 16, 40, 50])
@pytest.mark.parametrize("lengths", slow_but(LENGTHS, *LENGTHS[:2]))
def test_mini_batches_of_tokens_are_cut_as_they_come(pair, lengths, batch):
    measure, data = f"cka_minibatch(batch={batch})", texts(lengths)
    found = nk.compare(*pair, data, measure, layers=["embed", "layer.1"], shape="tokens")
    rows = [nk.activations(model, ["embed", "layer.1"], data, shape="tokens") for model in pair]
    X, Y = rows[0]["embed"].numpy(), rows[1]["layer.1"].numpy()
    assert found["embed", "layer.1"] == pytest.approx(transcriptions.cka_minibatch(X, Y, batch=batch), abs=1e-10)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_mini_batches_of_unequal_examples_are_not_merged(pair, lengths):
    data = texts(lengths)
    parts = [nk.collect(*pair, data, "cka_minibatch(batch=16)", shape="tokens", part=(part, 2)) for part in (1, 2)]
    with pytest.raises(ShapeError, match="mini-batches of rows can't be merged where examples have different numbers"):
        nk.merge(parts)


def test_mini_batches_of_padded_sentences_are_not_merged(pair, sentences):
    parts = [nk.collect(*pair, sentences, "cka_minibatch(batch=16)", shape="tokens", part=(part, 2)) for part in (1, 2)]
    with pytest.raises(
        ShapeError, match="Choose a shape with one row an example, such as 'mean' or 'pool', or take all"
    ):
        nk.merge(parts)


def test_parts_that_are_even_each_and_not_together_are_not_merged(worlds):
    parts = [LayerGrams([(["x"], ["y"])], batch=8) for _ in range(2)]
    for part, start, each in zip(parts, (0, 10), (3, 2), strict=True):
        part.update({"x": worlds.normal(10 * each, 4), "y": worlds.normal(10 * each, 3)}, np.arange(start, start + 10))
    with pytest.raises(ShapeError, match="mini-batches of rows can't be merged"):
        parts[0].merge(parts[1])


@pytest.mark.parametrize("cap", slow_but([None, 40], 40))
@pytest.mark.parametrize("lengths", slow_but(LENGTHS, *LENGTHS[:2]))
def test_rows_of_unequal_examples_are_merged_and_sampled_alike(monkeypatch, tmp_path, pair, lengths, cap):
    if cap:
        monkeypatch.setattr(rows_module, "CAP", cap)
    data, options = texts(lengths), {"shape": "tokens", "layers": ["embed", "layer.1"], "errors": True, "chunks": 3}
    asked = ["cka_rbf", "cka", "cka_debiased"]
    whole = nk.compare(*pair, data, asked, **options)
    for count in (2, 5):
        parts = []
        for part in range(count, 0, -1):
            nk.collect(*pair, data, asked, part=(part, count), **options).save(tmp_path / "s.netkin", overwrite=True)
            parts.append(nk.load(tmp_path / "s.netkin"))
        found = nk.merge(parts).compute(asked)
        for measure in asked:
            assert found.to_numpy(measure) == pytest.approx(whole.to_numpy(measure), abs=1e-10), (measure, count)
        assert found["cka"].replicates == pytest.approx(whole["cka"].replicates, abs=1e-10)


@pytest.mark.slow
def test_images_of_different_sizes_are_merged_by_their_places(maps):
    pair = maps().double(), maps().double()
    data = [torch.randn(5, 2, size, size, dtype=torch.float64) for size in (8, 6, 8, 10, 6)]
    options = {"shape": "positions", "layers": "conv1"}
    for measure in ("cka", "cka_rbf"):
        whole = nk.compare(*pair, data, measure, **options)
        parts = [nk.collect(*pair, data, measure, part=(part, 4), **options) for part in (4, 2, 1, 3)]
        assert nk.merge(parts).compute()["conv1", "conv1"] == pytest.approx(whole["conv1", "conv1"], abs=1e-10)
