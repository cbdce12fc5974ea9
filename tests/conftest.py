"""What all tests share: seeded worlds, and measures called without the warning about few examples."""

import warnings

import pytest
from worlds import Worlds

from netkin.errors import InflatedWarning
from netkin.measures import measures


@pytest.fixture
def worlds():
    """Return a maker of matrices that makes the same ones in every run."""
    return Worlds(seed=0)


@pytest.fixture(scope="session")
def value():
    """Return a function that calls a measure by name on two matrices, the warning about few examples aside."""

    def call(name, X, Y, **parameters):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InflatedWarning)
            return measures()[name].function(X, Y, **parameters)

    return call
