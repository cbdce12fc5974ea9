import numpy as np
import pytest
import torch

from netkin.errors import InvalidValue, SourceError
from netkin.sources import load_data


@pytest.mark.parametrize("inputs", ["x", "images", "inputs", "data", "anything"])
@pytest.mark.parametrize("labels", ["y", "labels"])
def test_examples_and_labels_are_found_by_their_usual_names(tmp_path, inputs, labels):
    np.savez(tmp_path / "a.npz", **{inputs: np.ones((3, 2), np.float32), labels: np.arange(3)})
    data = load_data(f"npz:{tmp_path / 'a.npz'}")
    assert data.images.shape == (3, 2)
    assert data.labels.tolist() == [0, 1, 2]


def test_the_only_array_is_taken_as_the_examples(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", np.arange(6).reshape(3, 2))
    data = load_data(f"npz:{tmp_path / 'a.npz'}")
    assert data.labels is None
    assert data.images.dtype == torch.int64


def test_bytes_are_pixels_and_other_numbers_stay_as_they_are(tmp_path):
    np.savez(tmp_path / "bytes.npz", x=np.full((2, 3, 4, 4), 255, np.uint8))
    np.savez(tmp_path / "tokens.npz", x=np.full((2, 9), 7))
    np.savez(tmp_path / "other-endian.npz", x=np.full((2, 9), 0.5, ">f4"))
    assert load_data(f"npz:{tmp_path / 'bytes.npz'}").images.unique().tolist() == [1]
    normalised = load_data(f"npz,normalise=imagenet:{tmp_path / 'bytes.npz'}").images
    assert normalised[0, 0, 0, 0].item() == pytest.approx((1 - 0.485) / 0.229)
    assert load_data(f"npz:{tmp_path / 'tokens.npz'}").images.unique().tolist() == [7]
    assert load_data(f"npz:{tmp_path / 'other-endian.npz'}").images.unique().tolist() == [0.5]


def test_channels_may_come_last(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 5, 4, 3), np.uint8))
    assert load_data(f"npz,channels=last:{tmp_path / 'a.npz'}").images.shape == (2, 3, 5, 4)
    with pytest.raises(InvalidValue, match="`channels` must be 'first' or 'last'; got 'middle'"):
        load_data(f"npz,channels=middle:{tmp_path / 'a.npz'}")


def test_several_arrays_without_usual_names_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", left=np.ones((2, 2)), right=np.ones((2, 2)))
    with pytest.raises(
        SourceError,
        match="holds 'left', 'right'; call its examples 'x', 'images', 'inputs' or 'data', and its labels 'y'",
    ):
        load_data(f"npz:{tmp_path / 'a.npz'}")


def test_unpaired_labels_and_missing_axes_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), y=np.arange(2))
    with pytest.raises(SourceError, match=r"holds 3 examples and labels of shape \(2,\)"):
        load_data(f"npz:{tmp_path / 'a.npz'}")
    np.savez(tmp_path / "b.npz", x=np.ones(3))
    with pytest.raises(SourceError, match=r"have shape \(3,\); the first axis must be the examples"):
        load_data(f"npz:{tmp_path / 'b.npz'}")


def test_objects_are_refused_and_nothing_in_them_runs(tmp_path, hostile):
    np.savez(tmp_path / "a.npz", x=np.array([[hostile]], dtype=object))
    with pytest.raises(
        SourceError,
        match="a.npz' is damaged or no npz file of numbers .Object.*; write it with `numpy.savez`; nothing is unp",
    ):
        load_data(f"npz:{tmp_path / 'a.npz'}")
    np.savez(tmp_path / "b.npz", x=np.array([["a", "b"]]))
    with pytest.raises(SourceError, match="holds values of type <U1"):
        load_data(f"npz:{tmp_path / 'b.npz'}")


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_a_file_cut_short_is_refused(tmp_path, kept):
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)))
    content = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(SourceError, match="is damaged or no npz file of numbers.*; write it with `numpy.savez`"):
        load_data(f"npz:{tmp_path / 'a.npz'}")


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path):
    np.savez(tmp_path / "probe.npz", x=np.ones((3, 2)))
    with pytest.raises(SourceError, match=r"found no npz file '.*prob.npz'; did you mean 'probe.npz'\?"):
        load_data(f"npz:{tmp_path / 'prob.npz'}")


def test_a_single_label_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), y=np.array(1))
    with pytest.raises(SourceError, match=r"holds 3 examples and labels of shape \(\)"):
        load_data(f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize("x", [np.ones(()), np.ones((3, 0)), np.ones((0, 3))])
def test_examples_without_numbers_are_refused(tmp_path, x):
    np.savez(tmp_path / "a.npz", x=x)
    with pytest.raises(SourceError, match="there must be another, none of them empty"):
        load_data(f"npz:{tmp_path / 'a.npz'}")


def test_numbers_that_torch_has_not_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2), np.longdouble))
    with pytest.raises(SourceError, match="holds values of type .*; only real numbers of at most 64 bits are read"):
        load_data(f"npz:{tmp_path / 'a.npz'}")


def test_unsigned_labels_are_read_as_signed_numbers(tmp_path):
    labels = np.arange(4, dtype=np.uint64)
    np.savez(tmp_path / "a.npz", x=np.ones((4, 3), np.float32), y=labels)
    found = load_data(f"npz:{tmp_path / 'a.npz'}").labels
    assert (found.dtype, found.tolist()) == (torch.int64, labels.tolist())
