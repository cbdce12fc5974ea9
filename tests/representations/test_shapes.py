"""What one example is."""

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import InvalidValue, ShapeError, UnknownName
from netkin.representations.shapes import (
    cls,
    flatten,
    last,
    mean,
    pool,
    positions,
    resize_to,
    rows_of,
    shape_for,
    tokens,
)
from refusals import refusals, refused

MAPS = torch.arange(2 * 3 * 2 * 2.0).reshape(2, 3, 2, 2)
SEQUENCES = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
RIGHT_PADDED = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
LEFT_PADDED = RIGHT_PADDED.flip(1)


def test_maps_are_flattened_pooled_or_read_place_by_place():
    assert torch.equal(flatten(MAPS), MAPS.reshape(2, 12))
    assert torch.equal(pool(MAPS)[1], torch.tensor([13.5, 17.5, 21.5]))
    assert torch.equal(positions(MAPS)[1], torch.tensor([1.0, 5.0, 9.0]))
    assert torch.equal(positions(MAPS)[4], torch.tensor([12.0, 16.0, 20.0]))


def test_volumes_are_maps_too():
    volumes = torch.randn(2, 3, 4, 5, 6)
    assert pool(volumes).shape == (2, 3)
    assert positions(volumes).shape == (2 * 4 * 5 * 6, 3)
    assert resize_to(volumes, (2, 2, 2)).shape == (2, 3, 2, 2, 2)


def test_shapes_have_a_room_of_their_own_at_the_front_door():
    names = {"cls", "dft", "flatten", "last", "mean", "pool", "positions", "resize_to", "tokens"}
    assert set(nk.shapes.__all__) == names
    assert nk.shapes.pool(MAPS).shape == (2, 3)
    assert nk.shapes.pool is nk.pool is pool  # as before, though not listed
    assert "shapes" in dir(nk)
    assert not names & {*dir(nk), *nk.__all__}


@pytest.mark.parametrize("name", ["LayerMoments", "Moments", "run_until", "replacing", "Stitch", "NoValue"])
def test_names_that_are_rarely_typed_can_be_reached_without_being_listed(name):
    assert getattr(nk, name).__name__ == name
    assert name not in dir(nk)


def test_no_more_is_listed_than_is_typed_daily():
    assert {"compare", "explain", "load", "report", "layers", "activations", "cka", "stitch", "Comparison"} < {*dir(nk)}
    assert len(dir(nk)) < 70
    assert all(getattr(nk, name) is not None for name in dir(nk))


def test_tokens_without_a_mask_all_count():
    assert torch.equal(tokens(SEQUENCES), SEQUENCES.reshape(8, 3))
    assert torch.equal(mean(SEQUENCES), SEQUENCES.mean(1))
    assert torch.equal(cls(SEQUENCES), SEQUENCES[:, 0])
    assert torch.equal(last(SEQUENCES), SEQUENCES[:, 3])


@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
@pytest.mark.parametrize(
    "mask, valid", [(RIGHT_PADDED, [[0, 1, 2], [0, 1]]), (LEFT_PADDED, [[1, 2, 3], [2, 3]])], ids=["right", "left"]
)
def test_padding_on_either_side_does_not_count(mask, valid, kind):
    padded = SEQUENCES.masked_fill(mask[..., None] == 0, float("nan"))
    mask = mask.to(kind)
    kept = [SEQUENCES[example, places] for example, places in enumerate(valid)]
    assert torch.equal(tokens(padded, mask), torch.cat(kept))
    assert torch.equal(mean(padded, mask), torch.stack([rows.mean(0) for rows in kept]))
    assert torch.equal(cls(padded, mask), torch.stack([rows[0] for rows in kept]))
    assert torch.equal(last(padded, mask), torch.stack([rows[-1] for rows in kept]))
    assert torch.equal(flatten(padded, mask), padded.nan_to_num(0).reshape(2, 12))


def test_a_mask_may_be_an_array():
    assert torch.equal(mean(SEQUENCES, RIGHT_PADDED.numpy()), mean(SEQUENCES, RIGHT_PADDED))


def test_half_precision_is_summed_in_float32():
    wide = torch.full((1, 1, 300, 300), 3.0, dtype=torch.float16)  # their sum is past float16's largest number
    assert pool(wide).dtype == torch.float32
    assert pool(wide).item() == 3.0
    long = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    assert mean(long, torch.ones(1, 4096, dtype=torch.bool)).item() == 1.0
    assert rows_of(long, "flatten")[0].dtype == torch.float32
    assert pool(wide.double()).dtype == torch.float64


def test_the_default_is_pool_for_maps_and_mean_for_tokens():
    assert rows_of(MAPS)[1] == "pool"
    assert rows_of(SEQUENCES)[1] == "mean"
    rows, name = rows_of(SEQUENCES, "last", RIGHT_PADDED)
    assert name == "last"
    assert torch.equal(rows, last(SEQUENCES, RIGHT_PADDED))


@pytest.mark.parametrize("shape", [None, "pool", "positions", "flatten", "mean", "cls", pool])
def test_matrices_pass_through_whatever_is_asked(shape):
    rows, name = rows_of(torch.ones(4, 5), shape)
    assert (tuple(rows.shape), name) == ((4, 5), "matrix")
    assert rows_of(torch.ones(4), shape)[0].shape == (4, 1)


def test_a_function_is_a_shape():
    def brightest(output):
        return output.amax((2, 3))

    rows, name = rows_of(MAPS, brightest)
    assert name == "brightest"
    assert torch.equal(rows, MAPS.amax((2, 3)))
    assert rows_of(MAPS, flatten)[1] == "flatten"


def test_a_strangers_function_does_not_go_by_our_name():
    def pool(output):
        return output.amax((2, 3))

    assert rows_of(MAPS, pool)[1] == "custom pool"


def test_a_shape_that_does_not_fit_is_refused_with_those_that_do():
    refusals(
        (lambda: rows_of(SEQUENCES, "pool"), ShapeError, ""),
        (lambda: rows_of(MAPS, "cls"), ShapeError, ""),
        (lambda: pool(torch.ones(4, 5)), ShapeError, ""),
        (lambda: rows_of(torch.tensor(1.0)), ShapeError, ""),
    )


def test_an_unknown_shape_is_refused_with_the_nearest():
    with refused(UnknownName, "shape"):
        rows_of(MAPS, "pol")


def test_a_function_that_gives_no_matrix_is_refused():
    with pytest.raises(ShapeError, match=r"'<lambda>' must return a matrix.*it gave shape \(2, 3, 2, 2\)"):
        rows_of(MAPS, lambda output: output)
    with pytest.raises(ShapeError, match="it gave int"):
        rows_of(MAPS, lambda output: 3)


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"the mask has shape \(2, 3\) and the output \(2, 4, 3\)"):
        mean(SEQUENCES, RIGHT_PADDED[:, :3])
    with refused(InvalidValue, "mask"):
        mean(SEQUENCES, RIGHT_PADDED.float())


@pytest.mark.parametrize("shape", [mean, cls, last])
def test_an_example_without_a_valid_token_is_refused(shape):
    with pytest.raises(InvalidValue, match="1 of 2 examples have no valid token"):
        shape(SEQUENCES, np.array([[1, 1, 1, 0], [0, 0, 0, 0]]))


def test_maps_are_resized_by_averaging():
    assert torch.equal(resize_to(MAPS, 1).flatten(1), pool(MAPS))
    assert resize_to(MAPS.half(), (4, 4)).dtype == torch.float32
    with pytest.raises(ShapeError, match=r"can be resized; got shape \(2, 4, 3\)"):
        resize_to(SEQUENCES, 2)


def test_each_layer_finds_its_own_shape():
    shapes = {"layer**": "pool", "layer2.0": "flatten", "relu": "positions"}
    assert shape_for("layer1.0", shapes) == "pool"
    assert shape_for("layer2.0", shapes) == "flatten"
    assert shape_for("relu#2", shapes) == "positions"
    assert shape_for("fc", shapes) is None
    assert shape_for("fc", "flatten") == "flatten"
