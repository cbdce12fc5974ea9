"""Every measure against its slow NumPy transcription."""

import numpy as np
import pytest
import torch

from netkin.errors import NoValue
from netkin.measures import measures
from transcriptions import TRANSCRIPTIONS, canonical
from worlds import RANDOM

VARIANTS = [
    ("svcca", {"variance": 0.5}),
    ("svcca", {"variance": 0.9}),
    ("svcca", {"variance": 1.0}),
    ("svcca_by_sum", {"variance": 0.7}),
    ("svcca_by_sum", {"variance": 0.95}),
    ("svcca_k", {"k": 1}),
    ("svcca_k", {"k": 3}),
    ("svcca_k", {"k": 1000}),
    ("shape_distance", {"alpha": 0.0}),
    ("shape_distance", {"alpha": 0.2}),
    ("shape_distance", {"alpha": 1.0}),
    ("shape_distance", {"whitening": "covariance"}),
    ("shape_distance", {"alpha": 0.2, "whitening": "covariance"}),
    ("gulp", {"ridge": 1.0}),
    ("gulp", {"ridge": 1e-4}),
    ("cka_rbf", {"fraction": 0.2}),
    ("cka_rbf", {"fraction": 0.8}),
    ("cka_rbf_debiased", {"fraction": 0.8}),
    ("cka_minibatch", {"batch": 4}),
    ("cka_minibatch", {"batch": 7}),
    ("cka_minibatch", {"batch": 19}),
    ("cka_minibatch", {"batch": 8, "kernel": "rbf"}),
    ("cka_minibatch", {"batch": 30, "kernel": "rbf", "fraction": 0.8}),
]


@pytest.mark.parametrize("name", measures(matrices=True))
def test_every_registered_measure_has_a_transcription(name):
    assert name in TRANSCRIPTIONS


def has_perfect_correlations(X, Y):
    return canonical(X, Y).max() > 1 - 1e-9


def check(value, name, X, Y, tolerance, inputs=None, **parameters):
    """Compare measure and transcription; where the information is infinite the measure must say so."""
    given = inputs or (X, Y)
    if name == "gaussian_mutual_information" and has_perfect_correlations(X, Y):
        with pytest.raises(NoValue, match="infinite"):
            value(name, *given)
        return
    assert float(value(name, *given, **parameters)) == pytest.approx(
        TRANSCRIPTIONS[name](X, Y, **parameters), abs=tolerance, rel=tolerance
    )


@pytest.mark.parametrize("world", RANDOM)
@pytest.mark.parametrize("name", measures(matrices=True))
def test_a_measure_equals_its_transcription(worlds, value, name, world):
    check(value, name, *worlds.by_name(world), 1e-9)


@pytest.mark.parametrize("world", ["wider_y", "few_examples", "low_rank_and_wide", "idle_units"])
@pytest.mark.parametrize("name, parameters", VARIANTS, ids=str)
def test_a_measure_with_parameters_equals_its_transcription(worlds, value, name, parameters, world):
    check(value, name, *worlds.by_name(world), 1e-9, **parameters)


@pytest.mark.parametrize("world", ["wider_y", "few_examples", "idle_units", "many_units"])
@pytest.mark.parametrize("name", measures(matrices=True))
def test_float32_matrices_give_the_float64_value_to_a_millionth(worlds, value, name, world):
    X, Y = (Z.astype(np.float32) for Z in worlds.by_name(world))
    check(value, name, X.astype(np.float64), Y.astype(np.float64), 1e-6, inputs=(X, Y))


@pytest.mark.parametrize("name", measures(matrices=True))
def test_tensors_and_arrays_give_the_same_number(worlds, value, name):
    X, Y = worlds.related(40, 6, 4)
    of_tensors = value(name, torch.from_numpy(X), torch.from_numpy(Y))
    assert isinstance(of_tensors, torch.Tensor)
    assert of_tensors.ndim == 0
    assert type(value(name, X, Y)) is float
    assert value(name, X, Y) == pytest.approx(of_tensors.item(), abs=1e-14)


@pytest.mark.parametrize("name", measures(matrices=True))
def test_a_tensor_with_an_array_gives_a_tensor(worlds, value, name):
    X, Y = worlds.related(40, 6, 4)
    assert isinstance(value(name, torch.from_numpy(X), Y), torch.Tensor)
    assert isinstance(value(name, X, torch.from_numpy(Y)), torch.Tensor)
