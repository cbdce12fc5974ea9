"""The CKA of a batch as a term of a loss: of two layers and of all pairs, its value and its gradient everywhere."""

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import ShapeError
from netkin.measures.kernels import batch_cka, batch_gram, gram_cosines
from transcriptions import TRANSCRIPTIONS

pytestmark = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")  # few examples will do here


def alike(examples, width, other, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X, Y = (torch.randn(examples, size, generator=generator).double() for size in (width, other))
    Y[:, : min(width, other)] += X[:, : min(width, other)]
    return X, Y


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e12])
@pytest.mark.parametrize("widths", [(5, 7), (90, 70), (3, 60)], ids=str)
def test_the_cka_of_a_batch_is_the_measure(scale, widths):
    X, Y = alike(40, *widths)
    own = (scale * X).requires_grad_()
    ours = batch_cka(own, Y + 100)
    assert float(ours.detach()) == pytest.approx(float(nk.cka(X, Y)), rel=1e-9)
    (gradient,) = torch.autograd.grad(ours, own)
    other = (scale * X).requires_grad_()
    (wanted,) = torch.autograd.grad(nk.cka(other, Y + 100), other)
    torch.testing.assert_close(scale * gradient, scale * wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("widths", [(3, 4), (9, 8)], ids=str)
def test_its_gradient_is_that_of_finite_differences(widths):
    X, Y = alike(6, *widths)
    assert torch.autograd.gradcheck(batch_cka, (X.requires_grad_(), Y.requires_grad_()))


@pytest.mark.parametrize("rows", [torch.ones(1, 5), torch.full((4, 5), 3.0), torch.zeros(4, 2)], ids=str)
def test_rows_that_do_not_vary_count_as_zero_and_move_nothing(rows):
    own = rows.clone().requires_grad_()
    value = batch_cka(own, torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(0)))
    (gradient,) = torch.autograd.grad(value, own)
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(rows))


def test_autocast_does_not_round_it():
    X, Y = (side.float() for side in alike(40, 5, 7))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = batch_cka(X, Y)
    assert float(rounded) == pytest.approx(float(nk.cka(X, Y)), rel=1e-5)


def table_of(layers, debiased=False):
    return gram_cosines(torch.stack([batch_gram(one) for one in layers]), debiased)


def some_layers(n, *widths, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(n, 3, generator=draw, dtype=torch.float64)
    layers = [torch.randn(n, width, generator=draw, dtype=torch.float64) for width in widths]
    return [(one + shared @ torch.randn(3, one.shape[1], generator=draw).double() + 2).to(dtype) for one in layers]


# --- all pairs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["cka", "cka_debiased"])
@pytest.mark.parametrize("n", [5, 8, 40])
def test_one_product_has_the_value_of_every_pair(measure, n):
    layers = some_layers(n, 3, 6, 90)
    found = table_of(layers, measure == "cka_debiased")
    for i, one in enumerate(layers):
        for j, other in enumerate(layers):
            slow = TRANSCRIPTIONS[measure](one.numpy(), other.numpy())
            assert found[i, j].item() == pytest.approx(slow, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-9, 1e9])
@pytest.mark.parametrize("offset", [0.0, 30.0, 3000.0])
def test_size_and_offset_of_a_layer_do_not_matter_in_float32(scale, offset):
    layers = some_layers(16, 5, 2000)
    moved = [(scale * (one + offset)).float() for one in layers]
    exact = table_of([one.double() for one in moved])[0, 1].item()
    assert table_of(moved)[0, 1].item() == pytest.approx(exact, abs=1e-6)
    assert exact == pytest.approx(TRANSCRIPTIONS["cka"](layers[0].numpy(), layers[1].numpy()), abs=1e-4)


@pytest.mark.parametrize("debiased", [False, True])
def test_gradients_of_first_and_second_order_are_those_of_finite_differences(debiased):
    layers = [one.requires_grad_() for one in some_layers(6, 2, 9)]

    def off_diagonal(X, Y):
        return table_of([X, Y], debiased)[0, 1]

    assert torch.autograd.gradcheck(off_diagonal, layers)
    assert torch.autograd.gradgradcheck(off_diagonal, layers)


CONSTANT = {
    "zeros": torch.zeros(8, 5), "ones": torch.ones(8, 5), "tenths": torch.full((8, 50), 0.1),
    "rows alike": torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).repeat(8, 1) * 1e3,
    "tiny": torch.full((8, 5), 1e-30),
}  # fmt: skip


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("rows", CONSTANT.values(), ids=CONSTANT)
def test_a_layer_that_does_not_vary_counts_as_zero_and_moves_nothing(rows, debiased):
    own, other = rows.clone().requires_grad_(), some_layers(8, 4, dtype=torch.float32)[0].requires_grad_()
    table = table_of([own, other, 2 * other + own[:, :1]], debiased)
    assert table[0].tolist() == [0, 0, 0]
    own_gradient, gradient = torch.autograd.grad(table[0].sum(), (own, other))
    assert not own_gradient.any()
    assert not gradient.any()
    assert batch_cka(own, other) == 0


def test_one_example_has_no_cka_and_does_no_harm():
    layers = [torch.randn(1, 4, requires_grad=True), torch.randn(1, 3, requires_grad=True)]
    table = table_of(layers)
    assert table.tolist() == [[0, 0], [0, 0]]
    assert not any(gradient.any() for gradient in torch.autograd.grad(table.sum(), layers))


def test_two_examples_are_always_alike():
    layers = some_layers(2, 3, 7)
    assert table_of(layers).numpy() == pytest.approx(np.ones((2, 2)))


@pytest.mark.parametrize("debiased", [False, True])
def test_identical_layers_are_at_the_top_where_the_gradient_is_zero(debiased):
    (X,) = some_layers(8, 40)
    own = X.clone().requires_grad_()
    table = table_of([own, X, 3 * X - 1], debiased)
    assert table.detach().numpy() == pytest.approx(np.ones((3, 3)))
    (gradient,) = torch.autograd.grad(table.sum(), own)
    assert gradient.abs().max() < 1e-12


def test_a_layer_with_itself_is_exactly_one_without_gradient():
    layers = [one.requires_grad_() for one in some_layers(8, 3, 4, dtype=torch.float32)]
    table = table_of(layers)
    assert table.diagonal().tolist() == [1, 1]
    assert not any(gradient.any() for gradient in torch.autograd.grad(table.diagonal().sum(), layers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_raised_and_autocast_does_not_round(dtype):
    layers = [one.to(dtype) for one in some_layers(8, 4, 3000)]
    exact = TRANSCRIPTIONS["cka"](*(one.double().numpy() for one in layers))
    with torch.autocast("cpu", torch.bfloat16):
        table = table_of(layers)
        assert table.dtype == torch.float32
        assert table[0, 1].item() == pytest.approx(exact, abs=1e-6)
        assert table_of([one.float() for one in layers])[0, 1].item() == pytest.approx(exact, abs=1e-6)


def test_large_numbers_of_half_precision_do_not_overflow():
    layers = [(6e4 * torch.rand(8, 5000, generator=torch.Generator().manual_seed(k))).half() for k in (0, 1)]
    exact = TRANSCRIPTIONS["cka"](*(one.double().numpy() for one in layers))
    assert table_of(layers)[0, 1].item() == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize(("examples", "biased", "most"), [(8, 0.998, 0.5), (128, 0.97, 0.05)])
def test_unrelated_wide_layers_are_alike_by_the_biased_estimator_alone(examples, biased, most):
    draw = torch.Generator().manual_seed(0)
    layers = [torch.randn(examples, 4096, generator=draw) for _ in range(2)]
    assert table_of(layers)[0, 1].item() == pytest.approx(biased, abs=0.002)
    assert abs(table_of(layers, debiased=True)[0, 1]) < most


def test_the_debiased_estimator_needs_four_examples():
    with pytest.raises(ShapeError, match="at least 4 examples; got 3"):
        table_of(some_layers(3, 2, 2), debiased=True)
