"""The door: what comes in as a matrix, and what is turned away."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from netkin import arrays
from netkin.arrays import (
    as_matrix,
    as_tensor,
    at_least_single,
    label_tensor,
    paired,
    require_classes,
    require_finite,
    summing_dtype,
    to_device,
)
from netkin.errors import InvalidValue, ShapeError
from refusals import refused


class Borrowed:
    """An array that offers DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize(
    "given, dtype",
    [
        (np.float16, torch.float32), (np.float32, torch.float32), (np.float64, torch.float64),
        (np.longdouble, torch.float64), (np.bool_, torch.float32), (np.int8, torch.float32), (np.uint8, torch.float32),
        (np.int16, torch.float32), (np.uint16, torch.float64), (np.int32, torch.float64), (np.uint32, torch.float64),
        (np.int64, torch.float64), (">f4", torch.float32), (">f8", torch.float64), (">i4", torch.float64),
    ],
)  # fmt: skip
def test_numbers_of_any_kind_become_floats_that_hold_them(given, dtype):
    matrix = as_matrix(np.array([[0, 1], [1, 0], [1, 1]], dtype=given))
    assert matrix.dtype == dtype
    assert matrix.tolist() == [[0, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize(
    "given", [torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16], ids=str
)
def test_small_tensors_are_raised_to_float32(given):
    assert as_tensor(torch.ones(2, 2, dtype=given)).dtype == torch.float32


def test_large_integers_stay_apart():
    assert as_matrix([[2**24, 2**24 + 1]]).diff().item() == 1
    assert as_matrix(np.array([[2**31 + 1, 2**31]], dtype=np.uint32)).tolist() == [[2**31 + 1, 2**31]]


@pytest.mark.parametrize("number", [2**63, 2**63 + 2**20, 2**64 - 1])
def test_whole_numbers_beyond_those_with_a_sign_are_not_wrapped(number):
    array = np.array([[number, 1]], dtype=np.uint64)
    for given in (array, [[number, 1]], torch.from_numpy(array), Borrowed(torch.from_numpy(array))):
        assert as_matrix(given).tolist() == [[float(number), 1.0]]


def test_unsigned_tensors_stay_apart():
    assert as_matrix(torch.tensor([[2**24, 2**24 + 1]], dtype=torch.uint32)).diff().item() == 1


def test_masked_values_are_refused_and_counted():
    array = np.ma.masked_array([[1.0, 2.0], [3.0, 4.0]], mask=[[False, True], [False, False]])
    with pytest.raises(InvalidValue) as refusal:
        as_matrix(array, "Z")
    assert str(refusal.value) == (
        "`Z` has 1 masked values among 4; leave out the examples or features that hold them, or fill them with "
        "`Z.filled(value)`."
    )
    for whole in (np.ma.masked_array(array.data), np.ma.masked_array(array.data, mask=np.zeros((2, 2), bool))):
        assert as_matrix(whole).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "array",
    [
        [[1.0, 2.0], [3.0, 4.0]],
        ((1, 2), (3, 4)),
        np.array([[3.0, 4.0], [1.0, 2.0]])[::-1],
        np.array([[2.0, 1.0], [4.0, 3.0]])[:, ::-1],
        np.asfortranarray([[1.0, 2.0], [3.0, 4.0]]),
        np.array([[1.0, 9.0, 2.0], [3.0, 9.0, 4.0]])[:, ::2],
        Borrowed(torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        Borrowed(torch.tensor([[1, 2], [3, 4]])),
        torch.tensor([[1.0, 3.0], [2.0, 4.0]]).T,
    ],
    ids=range(9),
)
def test_whatever_people_bring_is_a_matrix(array):
    assert as_matrix(array).tolist() == [[1, 2], [3, 4]]


def test_a_read_only_array_is_copied_in_silence():
    array = np.ones((2, 2))
    array.flags.writeable = False
    assert as_matrix(array).tolist() == [[1, 1], [1, 1]]
    assert as_matrix(np.broadcast_to(np.float64(2), (2, 2))).tolist() == [[2, 2], [2, 2]]


def test_a_float_tensor_passes_as_it_is():
    tensor = torch.ones(2, 2, requires_grad=True)
    assert as_matrix(tensor) is tensor


@pytest.mark.parametrize("array", [np.ones((2, 2), dtype=complex), torch.ones(2, 2, dtype=torch.complex64)])
def test_complex_numbers_are_refused_with_advice(array):
    with pytest.raises(
        InvalidValue, match="`Z` holds complex numbers \\(complex(64|128)\\); pass its real and imaginary parts"
    ):
        as_matrix(array, "Z")


@pytest.mark.parametrize(
    "array, dtype",
    [
        ("text", "<U4"),
        ([["a", "b"]], "<U1"),
        (None, "object"),
        ([[object()]], "object"),
        (np.array(["2020"], dtype="M8"), "datetime64"),
    ],
)
def test_what_is_no_number_is_refused(array, dtype):
    with pytest.raises(InvalidValue, match=f"`X` must hold numbers; got {type(array).__name__} of dtype {dtype}"):
        as_matrix(array)


def test_lists_of_unequal_length_are_refused():
    with pytest.raises((ShapeError, InvalidValue), match="`X`"):
        as_matrix([[1.0, 2.0], [3.0]])


@pytest.mark.parametrize("shape", [(), (3,), (64, 512, 7, 7)])
def test_what_is_no_matrix_is_refused_with_ways_out(shape):
    with pytest.raises(ShapeError) as refusal:
        as_matrix(np.ones(shape, dtype=np.float32), "Z")
    assert f"`Z` must be a matrix with one row per example; got shape {shape}." in str(refusal.value)
    assert "`flatten(Z)`, `pool(Z)`, or `positions(Z)`" in str(refusal.value)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_matrix_is_refused(shape):
    with pytest.raises(ShapeError) as refusal:
        as_matrix(np.ones(shape))
    assert str(refusal.value) == f"`X` is empty: shape {shape}. Pass at least one example and one feature."


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nan_and_inf_are_counted(bad, dtype):
    matrix = np.ones((50, 40), dtype=dtype)
    matrix[3, 4] = matrix[7, 8] = matrix[9, 9] = bad
    with pytest.raises(
        InvalidValue, match="`X` holds 3 NaN or Inf among 2,000 values; fix the model or leave out the examples"
    ):
        as_matrix(matrix)
    assert as_matrix(matrix, check=False).shape == (50, 40)


def test_finite_values_whose_sum_overflows_are_fine():
    require_finite(torch.full((10, 10), 3e38), "`X`")
    with pytest.raises(InvalidValue, match="the layer holds 2 NaN or Inf among 4 values"):
        require_finite(torch.tensor([torch.inf, -torch.inf, 1, 1]), "the layer")


def test_unpaired_rows_are_refused_with_advice():
    with pytest.raises(ShapeError, match="5 rows and 4 rows.*same probe batch"):
        paired(torch.ones(5, 2), torch.ones(4, 2))


def test_the_second_matrix_is_named_in_a_refusal():
    with refused(ShapeError, "Y"):
        paired(torch.ones(5, 2), torch.ones(4))


def test_paired_matrices_keep_their_precision():
    X, Y = paired(np.ones((3, 2), dtype=np.float32), [[1.0], [2.0], [3.0]])
    assert (X.dtype, Y.dtype) == (torch.float32, torch.float64)


def test_sums_are_kept_in_float64_where_there_is_float64():
    assert summing_dtype(torch.device("cpu")) == torch.float64
    assert summing_dtype(torch.device("mps")) == torch.float32


def test_nothing_is_moved_in_float64_to_a_device_without_it(monkeypatch):
    monkeypatch.setattr(arrays, "WITHOUT_FLOAT64", ("meta",))
    there = torch.device("meta")
    kinds = (torch.float64, torch.float32, torch.int64)
    found = [to_device(torch.ones(2, dtype=kind), there).dtype for kind in kinds]
    assert found == [torch.float32, torch.float32, torch.int64]
    Y = paired(torch.ones(3, 2, device=there), np.ones((3, 2)), check=False)[1]
    assert (Y.dtype, Y.device) == (torch.float32, there)
    assert as_tensor(torch.ones(2, dtype=torch.int64, device=there)).dtype == torch.float32


def test_the_array_at_the_door_is_never_changed():
    array = np.arange(6.0).reshape(3, 2)
    as_matrix(array)
    assert array.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_pair_may_leave_nan_to_a_later_check():
    X = np.array([[np.nan], [1.0]])
    assert torch.isnan(paired(X, X, check=False)[0][0, 0])
    with pytest.raises(ShapeError, match="got 2 rows and 1 rows"):
        paired(X, X[:1], check=False)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_raised_to_single_and_no_other(half):
    assert at_least_single(half) == torch.float32
    assert [at_least_single(dtype) for dtype in (torch.float32, torch.float64)] == [torch.float32, torch.float64]


def test_the_largest_class_number_is_read_once():
    labels = Mock(**{"numel.return_value": 3, "max.return_value": torch.tensor(7)})
    with pytest.raises(InvalidValue, match="a label in batch 2 is 7, and the model has 5 classes, 0 to 4."):
        require_classes(labels, 5, " in batch 2")
    labels.max.assert_called_once()
    require_classes(torch.empty(0, dtype=torch.long), 5)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_unsigned_labels_become_signed_ones(dtype):
    for given in (np.array([3, 1], dtype), torch.tensor([3, 1]).to(getattr(torch, np.dtype(dtype).name))):
        assert label_tensor(given).tolist() == [3, 1]
        assert label_tensor(given).dtype == torch.int64


def test_labels_beyond_int64_are_refused():
    with pytest.raises(InvalidValue, match="a label is above 2⁶³ - 1"):
        label_tensor(np.array([2**63, 0], np.uint64))
