"""What a recorder keeps of a layer is small, and enough for every linear measure unchanged by rotation."""

from functools import cache

import numpy as np
import pytest
import torch

from netkin.applications.dynamics.states import LayerState, bytes_of, state_of, turned
from netkin.errors import NoValue
from netkin.measures import measures
from netkin.measures.registry import value_of
from netkin.statistics import Moments

FIT = {name: m for name, m in measures().items() if m.facts.reads is Moments and "rotation" in m.facts.unchanged_by}


def outcome(measure, moments):
    """Return a value, or the kind of refusal."""
    try:
        return value_of(measure, moments)
    except NoValue:
        return "no value"


def wide(seed=0, n=40, p=130, q=90):
    draw = torch.Generator().manual_seed(seed)
    X = torch.randn(n, p, generator=draw)
    return X, X @ torch.randn(p, q, generator=draw) / p**0.5 + torch.randn(n, q, generator=draw)


def low_rank():
    draw = torch.Generator().manual_seed(1)
    X = torch.randn(40, 9, generator=draw, dtype=torch.float64) @ torch.randn(9, 130, generator=draw).double()
    return X, X @ torch.randn(130, 60, generator=draw).double() + 1.0


def stuck():
    X, Y = wide(2)
    return torch.cat([X, torch.full((40, 1), 1e6)], dim=1), Y


def narrow():
    draw = torch.Generator().manual_seed(3)
    X = torch.randn(40, 7, generator=draw) + 5
    return X, X**2


WORLDS = {
    "wide": wide,
    "offset": lambda: (wide()[0] + 1000, wide()[1] - 30),
    "narrow": narrow,
    "one of each": lambda: (wide()[0], narrow()[1]),
    "low rank": low_rank,
    "a stuck unit": stuck,
    "tiny and huge": lambda: (wide()[0] * 1e-25, wide()[1] * 1e20),
    "constant": lambda: (torch.full((40, 100), 3.3), wide()[1]),
    "zero": lambda: (torch.zeros(40, 100), narrow()[0]),
}


@cache
def moments_of(world):
    """Return the moments of a world by states and by rows, the same for all measures."""
    X, Y = WORLDS[world]()
    return Moments(state_of(X, "matrix").side("x"), state_of(Y, "matrix").side("y")), Moments.of(X, Y)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", FIT)
def test_a_state_gives_the_numbers_of_the_rows(name, world):
    ours, theirs = (outcome(FIT[name], moments) for moments in moments_of(world))
    assert ours == (theirs if isinstance(theirs, str) else pytest.approx(theirs, rel=1e-7, abs=1e-7))


def test_turned_rows_keep_mean_lengths_and_angles():
    X = wide()[0].double().numpy() + 2
    ours = turned(torch.from_numpy(X)).numpy()
    assert ours.shape == (40, 40)
    np.testing.assert_allclose(ours @ ours.T, X @ X.T, rtol=1e-10)
    np.testing.assert_allclose(np.linalg.norm(ours.mean(0)), np.linalg.norm(X.mean(0)), rtol=1e-10)


@pytest.mark.parametrize("twice", [0, 39])
def test_examples_that_are_there_twice_keep_their_lengths_and_angles(twice):
    X = wide()[0].double()
    X[twice] = X[7]  # what is left of a Cholesky factor then is no row
    ours = turned(X).numpy()
    np.testing.assert_allclose(ours @ ours.T, (X @ X.T).numpy(), rtol=1e-10, atol=1e-9)


def test_a_layer_of_low_rank_takes_no_more_columns_than_that():
    X, _ = low_rank()
    assert state_of(X, "flatten").rows.shape == (40, 9)


@pytest.mark.parametrize("X", [wide()[0], narrow()[0], narrow()[0].double(), wide(n=1)[0]])
def test_a_state_is_within_its_bound_and_shares_no_memory(X):
    state = state_of(X, "matrix")
    assert state.bytes <= bytes_of(*X.shape, X.element_size())
    assert state.rows.numel() <= len(X) * min(X.shape)
    before = state.rows.clone()
    X += 1
    assert torch.equal(state.rows, before)


def test_the_width_is_the_layers_own():
    X, Y = wide()
    moments = Moments(state_of(X, "flatten").side("x"), state_of(Y, "flatten").side("y"))
    assert "40 examples are fewer than the 130 + 90 features" in str(moments.few_examples)


def test_nan_is_told_when_the_layer_is_read():
    X = torch.ones(5, 3)
    X[1, 1] = float("nan")
    state = state_of(X, "matrix")
    assert state.bytes == 0
    with pytest.raises(NoValue, match="layer 'fc' held 1 NaN or Inf among 15 values when the probe was taken"):
        state.side("layer 'fc'")


def test_a_finite_layer_whose_sum_overflows_is_kept():
    assert not state_of(torch.full((5, 3), 3e38) * torch.tensor([1.0, 0.5, 0.2]), "matrix").fault


@pytest.mark.parametrize("dtype, offset", [(torch.float32, 1000), (torch.bfloat16, 10)])
def test_a_turned_layer_keeps_the_resolution_of_its_data(dtype, offset):
    draw = torch.Generator().manual_seed(5)
    exact = torch.randn(100, 4, generator=draw) @ torch.randn(4, 300, generator=draw) + offset
    state = state_of(exact.to(dtype).float(), "matrix", torch.finfo(dtype).eps)
    assert state.rows.dtype == torch.float64
    assert state.side("x").rank == 4
    assert LayerState(state.rows, 300, "matrix").side("x").rank > 4  # what the rows alone would show
