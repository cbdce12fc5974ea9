"""Stitches in files: all comes back, and other models are refused."""

import warnings

import pytest
import torch
from torch import nn

import netkin as nk
from netkin import files
from netkin.errors import FileFault
from stitching_worlds import Maps, Rows, Shares, built, labelled

IMAGES = (3, 12, 12)


@pytest.fixture
def saved(tmp_path):
    """A stitch of two networks of maps of different sizes, and its file."""
    a, b = built(Maps, stride=2), built(Maps, 7, seed=1)
    test = labelled(b, *IMAGES)
    found = nk.stitch(a, "mid", b, "mid", test, "ridge(alpha=2)", test, names=("old", "new"), seed=4)
    found.save(tmp_path / "ab.netkin")
    return found, tmp_path / "ab.netkin"


def test_all_comes_back(saved):
    found, path = saved
    again = nk.load_stitch(path, built(Maps, stride=2), built(Maps, 7, seed=1))
    x = torch.randn(3, *IMAGES, dtype=torch.float64)
    assert torch.equal(again.network(x), found.network(x))
    assert torch.equal(again.map.weight, found.map.weight)
    for name in (
        "method",
        "examples",
        "names",
        "seed",
        "layers",
        "resize",
        "evaluation",
        "history",
        "version",
        "created",
    ):
        assert getattr(again, name) == getattr(found, name), name
    assert (again.relative_accuracy, str(again)) == (found.relative_accuracy, str(found))
    header, arrays = files.read(path, "stitch")
    assert header["layers"] == ["mid", "mid"]
    assert sum(array.size for array in arrays.values()) == 6 * 7 + 7


def test_what_was_trained_comes_back_with_its_history(tmp_path):
    a, b = built(Rows, dtype=torch.float32), built(Rows, seed=1, dtype=torch.float32)
    data = labelled(b, 5)
    found = nk.stitch(a, "mid", b, "mid", data, "task_loss(rank=2)", epochs=2)
    found.save(tmp_path / "ab.netkin")
    again = nk.load_stitch(tmp_path / "ab.netkin", a, b)
    assert again.transformation.rank == 2
    assert torch.equal(again.transformation.linear[0].weight, found.transformation.linear[0].weight)
    assert again.history == found.history
    assert again.training == found.training


def test_other_architectures_are_refused(saved):
    _, path = saved
    sentence = (
        "whose first model is another architecture, a Maps: 'front.weight' is 8 × 3 × 3 × 3 there and 8 × 5 in the "
    )
    with pytest.raises(FileFault, match=f"{sentence}Rows given"):
        nk.load_stitch(path, built(Rows), built(Maps, 7, seed=1))
    with pytest.raises(
        FileFault, match="second model is another architecture.*'mid.weight' is 7 × 8 × 3 × 3 there and 6"
    ):
        nk.load_stitch(path, built(Maps, stride=2), built(Maps))


def test_models_without_the_layer_are_refused(tmp_path):
    model = built(Shares)
    stitch = nk.stitch(model, "relu#2", model, "relu#2", labelled(model, 5))
    stitch.save(tmp_path / "shared.netkin")
    assert nk.load_stitch(tmp_path / "shared.netkin", model, model).layers == ("relu#2", "relu#2")
    other = built(Shares)
    other.relu, other.gelu = None, nn.ReLU()
    with pytest.raises(FileFault, match="at layer 'relu#2' of the first model, and this one has none"):
        nk.load_stitch(tmp_path / "shared.netkin", other, model)


def test_other_weights_give_a_warning(saved):
    _, path = saved
    with pytest.warns(UserWarning, match="the first model has other weights than when the stitch in"):
        nk.load_stitch(path, built(Maps, stride=2, seed=8), built(Maps, 7, seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = nk.load_stitch(path, built(Maps, stride=2).float(), built(Maps, 7, seed=1).float())
    assert loaded.transformation.shift.dtype == torch.float32


def test_other_files_and_damaged_ones_are_refused(saved, tmp_path):
    _, path = saved
    models = built(Maps, stride=2), built(Maps, 7, seed=1)
    files.write(tmp_path / "other.netkin", "comparison", {}, {})
    with pytest.raises(FileFault, match="holds 'comparison', not 'stitch'"):
        nk.load_stitch(tmp_path / "other.netkin", *models)
    header, arrays = files.read(path)
    header = {key: value for key, value in header.items() if key not in ("kind", "format")}
    files.write(tmp_path / "bad.netkin", "stitch", header, {"linear.0.weight": arrays["linear.0.weight"]})
    with pytest.raises(FileFault, match="'.*bad.netkin' is damaged"):
        nk.load_stitch(tmp_path / "bad.netkin", *models)
    with pytest.raises(FileFault, match="cannot read"):
        nk.load_stitch(tmp_path / "none.netkin", *models)
