"""Massive channels and first tokens: with them unrelated layers have a CKA near 1, and the result says so."""

import numpy as np
import pytest
import torch

import netkin as nk

SEQUENCES, LENGTH, WIDTH = 300, 10, 48


def layers(seed=0, channel=0.0, first=0.0, lengths=None):
    """Return two unrelated layers of tokens, with a channel that they share and a first token that lies apart."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, SEQUENCES, LENGTH, WIDTH, generator=draw, dtype=torch.float64)
    shared = torch.randn(SEQUENCES, LENGTH, generator=draw, dtype=torch.float64)
    x[..., 5] += channel * shared
    y[..., 40] += channel * shared
    for layer, place in ((x, 3), (y, 17)):
        layer[:, 0, place] += first
    return x, y


def compared(x, y, measures="cka", valid=None, **options):
    comparer = nk.Comparer(measures, shape="tokens", **options)
    for rows in (slice(0, 100), slice(100, None)):
        comparer.update({"a": {"x": x[rows]}, "b": {"y": y[rows]}}, valid=None if valid is None else valid[rows])
    return comparer.compute()


def codes(comparison):
    return {caveat.code: caveat for caveat in comparison.caveats if caveat.code.startswith("massive")}


@pytest.mark.parametrize("tokens", [None, 1000, 10_000])
def test_unrelated_layers_have_a_high_cka_by_one_shared_channel_and_the_result_says_so(tokens):
    x, y = layers(channel=30)
    with_it, without = compared(x, y, tokens=tokens), compared(x[..., 6:], y[..., :40], tokens=tokens)
    assert with_it["x", "y"] > 0.95
    assert without["x", "y"] < 0.06  # of 42 and 40 channels by chance: √(42 · 40) / 3,000 = 0.014, or 0.041 of 1,000
    sentence = str(codes(with_it)["massive-channels"])
    assert "channel 5 holds" in sentence
    assert "channel 40 holds" in sentence
    assert f"CKA of {with_it['x', 'y']:.2f}" in sentence
    assert not codes(without)


@pytest.mark.parametrize("tokens", [None, 1000, 10_000])
@pytest.mark.parametrize("side", ["right", "left", "none"])
def test_unrelated_layers_have_a_high_cka_by_their_first_tokens_and_the_result_says_so(tokens, side):
    x, y = layers(first=40)
    valid = None
    if side != "none":
        counts = torch.randint(4, LENGTH + 1, (SEQUENCES, 1), generator=torch.Generator().manual_seed(1))
        valid = torch.arange(LENGTH) < counts
        if side == "left":
            valid = valid.flip(1)
            for layer, moved in ((x, layers()[0]), (y, layers()[1])):
                apart = (layer - moved)[:, :1]
                layer.copy_(moved)
                layer[torch.arange(SEQUENCES), (LENGTH - counts)[:, 0]] += apart[:, 0]
    with_it = compared(x, y, valid=valid, tokens=tokens)
    without = compared(x, y, valid=valid, tokens=tokens, positions="1:")
    assert with_it["x", "y"] > 0.95
    assert without["x", "y"] < 0.09  # by chance √(48 · 48) / 1,000 = 0.05 or less
    assert "positions='1:'" in codes(with_it)["massive-first-tokens"].sentence
    assert not codes(without)


def test_the_score_in_the_sentence_is_the_share_of_the_first_tokens_by_hand():
    x, y = layers(first=12)
    X, Y = (layer.flatten(0, 1).numpy() - layer.flatten(0, 1).numpy().mean(0) for layer in (x, y))
    is_first = np.tile(np.arange(LENGTH) == 0, SEQUENCES)
    shares = []
    for rows in (X, Y):
        groups = [rows[is_first], rows[~is_first]]
        between = sum(len(group) * np.outer(group.mean(0), group.mean(0)) for group in groups)
        shares.append(np.linalg.norm(between) ** 2 / np.linalg.norm(rows.T @ rows) ** 2)
    assert min(shares) > 0.5
    sentence = codes(compared(x, y))["massive-first-tokens"].sentence
    assert f"{shares[0]:.0%} of" in sentence
    assert f"CKA of {np.sqrt(shares[0] * shares[1]):.2f}" in sentence


@pytest.mark.parametrize("world", [{}, {"channel": 1.0}, {"first": 1.0}])
def test_layers_without_massive_channels_or_tokens_have_no_such_caveat(world):
    assert not codes(compared(*layers(**world), ["cka", "cka_debiased", "nbs"]))


def test_a_channel_of_one_layer_alone_is_not_reported():
    x, y = layers(channel=30)
    y = layers()[1]
    comparison = compared(x, y)
    assert comparison["x", "y"] < 0.02
    assert not codes(comparison)


def test_estimates_across_sequences_are_as_high_by_one_channel():
    comparison = compared(*layers(channel=30), "cka_debiased_by_sequence", tokens=600)
    assert comparison["x", "y"] > 0.95
    assert "channel 5 holds" in str(codes(comparison)["massive-channels"])


def test_measures_that_weigh_all_directions_alike_have_no_such_caveat():
    assert not codes(compared(*layers(channel=30, first=30), ["cca_mean"]))


def test_parts_and_files_know_the_first_tokens(tmp_path):
    x, y = layers(first=40)
    parts = []
    for rows in (slice(0, 100), slice(100, None)):
        part = nk.Comparer(shape="tokens")
        part.update({"a": {"x": x[rows]}, "b": {"y": y[rows]}}, numbers=range(SEQUENCES)[rows])
        parts.append(part)
    parts[0].merge(parts[1]).save(tmp_path / "both.stats")
    assert codes(nk.load(tmp_path / "both.stats").compute()) == codes(compared(x, y))
