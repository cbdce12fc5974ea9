"""What all tests share: seeded worlds, and measures called without the warning about few examples."""

import warnings

import pytest
from hypothesis import settings

from netkin.errors import InflatedWarning
from netkin.measures import measures
from worlds import Worlds

# the same examples in every run, and none kept on disk
settings.register_profile("netkin", derandomize=True, database=None, deadline=None, max_examples=60)
settings.load_profile("netkin")


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
