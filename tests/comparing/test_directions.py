"""Directions of two models' layers from one pass."""

import pytest
import torch

import netkin as nk
from netkin.errors import InflatedWarning

FIELDS = ("mean", "transform", "patterns", "singular_values")


def check(found, X, Y, **options):
    """Hold directions against those of the recorded rows."""
    expected = nk.svcca_directions(X, Y, **options)
    torch.testing.assert_close(found.correlations, expected.correlations, atol=1e-6, rtol=1e-6)
    for name in FIELDS:
        torch.testing.assert_close(getattr(found.x, name), getattr(expected.x, name), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"variance": 0.9}, {"by": "sum"}])
def test_two_models(maps, images, options):
    a, b = maps(), maps(6)
    found = nk.model_directions(a, "conv2", b, "conv1", list(images.split(16)), **options)
    rows = [nk.activations(model, [layer], images)[layer] for model, layer in ((a, "conv2"), (b, "conv1"))]
    check(found, *rows, **options)
    assert (a.calls, b.calls) == (9, 9)  # four batches, once for the rows, and twice two runs of few examples


def test_the_layer_of_the_same_name_is_the_default(maps, images):
    a, b = maps(), maps()
    found = nk.model_directions(a, "fc", b, data=images)
    check(found, *(nk.activations(model, ["fc"], images)["fc"] for model in (a, b)))


def test_without_another_model_the_logits_are_met(maps, images):
    model = maps()
    found = nk.model_directions(model, "conv2", data=images)
    rows = nk.activations(model, ["conv2", "fc"], images)
    check(found, rows["conv2"], rows["fc"])
    assert found.y.width == 3


@pytest.mark.parametrize("twice", [False, True])
def test_another_layer_of_the_same_model(maps, images, twice):
    model = maps()
    found = nk.model_directions(model, "conv1", model if twice else None, "conv2", images)
    rows = nk.activations(model, ["conv1", "conv2"], images)
    check(found, rows["conv1"], rows["conv2"])


def test_places_of_maps(maps, images):
    a, b = maps(), maps()
    found = nk.model_directions(a, "conv1", b, data=images, shape="positions")
    check(found, *(nk.activations(model, ["conv1"], images, shape="positions")["conv1"] for model in (a, b)))
    assert found.x.n == 50 * 64


def test_flattened_maps_wider_than_the_examples(maps, images):
    a, b = maps(), maps()
    with pytest.warns(InflatedWarning, match="50 examples are fewer than the 256 . 256 features"):
        found = nk.model_directions(a, "conv1", b, data=images, shape="flatten")
    assert found.x.width == 256
    rows = nk.activations(a, ["conv1"], images, shape="flatten")["conv1"]
    Z = found.x.directions(rows)
    torch.testing.assert_close(Z.mT @ Z, torch.eye(found.x.kept, dtype=Z.dtype), atol=1e-5, rtol=0)


def test_models_are_left_as_they_were(maps, images, state_of):
    a, b = maps(), maps()
    b.eval()
    before = state_of(a), state_of(b)
    nk.model_directions(a, "conv1", b, data=images)
    assert (state_of(a), state_of(b)) == before


def test_options_reach_the_pass(maps, images):
    model = maps()
    half = nk.model_directions(model, "conv2", data=images, examples=30)
    assert half.x.n == 30
    doubled = nk.model_directions(model, "conv2", model, data=images, transforms=(None, lambda batch: batch * 2))
    assert doubled.similarity < 1


def test_progress_is_told_to_a_function(maps, images):
    heard = []
    nk.model_directions(maps(), "conv2", data=list(images.split(16)), progress=lambda *news: heard.append(news))
    assert heard[-1] == (len(images), len(images), "reading")
