"""What the tests of Fisher information share."""

import pytest

import fisher_worlds


@pytest.fixture
def convnet():
    return fisher_worlds.convnet()


@pytest.fixture
def pictures():
    return fisher_worlds.pictures()


@pytest.fixture
def rows():
    return fisher_worlds.rows()
