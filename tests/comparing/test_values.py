"""Every number equals the plain function's on the activations."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.measures import measures
from netkin.statistics import Grams, Moments
from netkin.statistics import layer_rows as row_statistics
from quickly import slow_after, slow_but

EVERY = sorted(measures(matrices=True))
LINEAR = [name for name in EVERY if measures()[name].facts.reads is Moments]


def check(comparison, rows_a, rows_b, value, tolerance=2e-5):
    """Hold every number of a comparison against the plain function; what one refuses the other must."""
    for table in comparison.tables.values():
        for i, x in enumerate(comparison.layers_a):
            for j, y in enumerate(comparison.layers_b):
                try:
                    expected = float(value(table.quantity.name, rows_a[x], rows_b[y], **table.quantity.parameters))
                except nk.NetkinError:
                    expected = np.inf
                if np.isfinite(expected):
                    assert table.values[i, j] == pytest.approx(expected, abs=tolerance, rel=tolerance), (table.id, x, y)
                else:
                    assert (x, y) in table.missing, (table.id, x, y)


@pytest.mark.parametrize("shape", slow_after(1, ["pool", "flatten"]))
def test_every_measure_on_maps(maps, images, value, shape, layers):
    a, b = maps(), maps(6)
    comparison = nk.compare(a, b, list(images.split(16)), EVERY, layers=layers, shape=shape)
    assert comparison.measures[0] == "angular_cka"
    rows = [nk.activations(model, layers, images, shape=shape) for model in (a, b)]
    check(comparison, *rows, value)
    assert comparison.examples == 50


@pytest.mark.slow
def test_every_measure_on_positions_of_equal_maps(maps, images, value):
    a, b = maps(stride=1), maps(3, stride=1)
    layers = ["conv1", "conv2"]
    comparison = nk.compare(a, b, list(images[:10].split(4)), EVERY, layers=layers, shape="positions")
    check(comparison, *(nk.activations(m, layers, images[:10], shape="positions") for m in (a, b)), value)
    assert comparison.examples == 10
    assert not comparison["cka_rbf"].missing


@pytest.mark.parametrize("shape", slow_but(["mean", "tokens", "flatten", "cls", "last"], "mean", "tokens"))
def test_every_measure_on_padded_tokens(words, sentences, value, shape):
    a, b = words(), words(4)
    # with fewer examples than features some correlations tie at 1, and pwcca's weights are anybody's choice
    names = EVERY if shape != "flatten" else [name for name in EVERY if name != "pwcca"]
    comparison = nk.compare(a, b, sentences, names, shape=shape)
    check(comparison, *(nk.activations(model, data=sentences, shape=shape) for model in (a, b)), value, 1e-4)
    assert comparison.examples == 40
    assert set(comparison.shapes_a.values()) == {shape}


def test_moments_and_rows_give_the_same_numbers(worlds):
    layers = [{f"{name}{i}": worlds.related(60, 20, 12)[i] for i in (0, 1)} for name in "xy"]
    streamed = nk.compare(*layers, measures=LINEAR)
    wide = {name: np.concatenate([rows, np.zeros((60, 200))], axis=1) for name, rows in layers[0].items()}
    kept = nk.compare(wide, layers[1], measures=LINEAR)
    assert streamed.provenance["plan"].startswith("Moments, streamed, products in float64")
    assert kept.provenance["plan"].startswith("Rows, all 60 examples, as some layers are wider than that")
    for name in LINEAR:
        assert (streamed[name].statistic, kept[name].statistic) == ("Moments", "Rows")
        assert streamed[name].missing == kept[name].missing == {}, name
        assert np.allclose(streamed.to_numpy(name), kept.to_numpy(name), atol=1e-6), name


def test_a_limit_that_only_rows_meet_changes_no_number(maps, images):
    a, b = maps(), maps(40)
    free = nk.compare(a, b, images, LINEAR)
    tight = nk.compare(a, b, images, LINEAR, memory=nk.explain(a, b, images, LINEAR).bytes - 1)
    assert "Moments, streamed" in free.provenance["plan"]
    assert "Rows, all 50 examples" in tight.provenance["plan"]
    for name in LINEAR:
        assert np.allclose(free.to_numpy(name), tight.to_numpy(name), atol=1e-6, equal_nan=True), name


def test_float64_rows_keep_their_precision(worlds):
    X, Y = worlds.related(70, 6, 5)
    comparison = nk.compare({"x": X + 1e4}, {"y": Y}, measures=["cka", "cka_debiased"])
    for name in comparison:
        assert comparison[name]["x", "y"] == pytest.approx(getattr(nk, name)(X, Y), abs=1e-9)


@pytest.mark.parametrize("size", slow_after(1, [1, 7, 128]))
def test_the_size_of_batches_does_not_matter(worlds, identity, size, value):
    X = torch.from_numpy(worlds.normal(200, 6)).float()
    model = identity()
    comparison = nk.compare(model, data=list(X.split(size)), measures=EVERY)
    check(comparison, *[nk.activations(model, data=X)] * 2, value, 1e-5)


def test_identical_models_on_a_shuffling_loader_are_the_same_to_the_last_digit(maps, images, layers):
    a, b = maps(), maps()
    b.load_state_dict(a.state_dict())
    loader = DataLoader(TensorDataset(images), batch_size=16, shuffle=True)
    comparison = nk.compare(a, b, loader, ["cka", "procrustes_distance"], layers=layers)
    assert np.diag(comparison.to_numpy("cka")) == pytest.approx(1, abs=1e-12)
    assert np.diag(comparison.to_numpy("procrustes_distance")) == pytest.approx(0, abs=1e-6)


def test_in_place_relus_and_repeated_calls_are_told_apart(maps, images, value):
    model = maps()
    rows = nk.activations(model, ["conv1", "relu"], images, shape="flatten")
    assert list(rows) == ["conv1", "relu", "relu#2"]
    comparison = nk.compare(model, data=images, layers=["conv1", "relu"], shape="flatten")
    assert comparison.layers_a == ("conv1", "relu", "relu#2")
    check(comparison, rows, rows, value)
    assert comparison["conv1", "relu"] < 0.999


def test_half_precision_is_close(maps, images, layers):
    a, b = maps(), maps()
    exact = nk.compare(a, b, images, layers=layers)
    mixed = nk.compare(a.to(torch.bfloat16), b.double(), images, layers=layers)
    assert mixed.to_numpy() == pytest.approx(exact.to_numpy(), abs=0.02)


def test_a_sample_of_rows_is_stated_and_depends_on_the_seed_alone(worlds, identity, monkeypatch):
    monkeypatch.setattr(row_statistics, "CAP", 100)
    X = torch.from_numpy(worlds.normal(1250, 4)).float()
    comparison = nk.compare(identity(), data=X, measures=["cka_rbf", "cka"], seed=3)
    assert comparison["cka_rbf"].exactness == "a sample of 100 of 1,250 examples"
    assert comparison["cka"].exactness == "exact"
    again = nk.compare(identity(), data=list(X.split(99)), measures=["cka_rbf"], seed=3)
    assert again.to_numpy() == pytest.approx(comparison.to_numpy("cka_rbf"), abs=1e-12)
    other = nk.compare(identity(), data=X, measures=["cka_rbf"], seed=4)
    assert not np.allclose(other.to_numpy(), again.to_numpy(), atol=1e-6)


def test_rows_of_positions_are_sampled_as_rows(identity, monkeypatch):
    monkeypatch.setattr(row_statistics, "CAP", 100)
    comparison = nk.compare(identity(), data=torch.randn(20, 4, 8, 8), measures=["cka_rbf"], shape="positions")
    assert comparison["cka_rbf"].exactness == "a sample of 100 of 1,280 rows"
    assert comparison.examples == 20


def test_mini_batches_are_counted(worlds, identity):
    X = torch.from_numpy(worlds.normal(259, 4)).float()
    comparison = nk.compare(identity(), data=list(X.split(100)), measures=["cka_minibatch", "cka_minibatch(batch=50)"])
    assert comparison["cka_minibatch(batch=128)"].exactness == (
        "mini-batch estimate (2 batches of up to 128; 3 examples left out)"
    )
    assert comparison["cka_minibatch(batch=50)"].exactness == "mini-batch estimate (6 batches of up to 50)"
    plain = float(nk.cka_minibatch(Grams.of(X, X[:, :2], batch=50)))
    assert comparison["cka_minibatch(batch=50)"]["whole", "part"] == pytest.approx(plain, abs=1e-7)
