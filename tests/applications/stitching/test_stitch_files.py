"""Stitches in files: all comes back, and other models are refused."""

import warnings

import pytest
import torch
from torch import nn

import netkin as nk
from netkin import files
from netkin.errors import FileError
from stitching_worlds import Maps, Rows, Shares, built, drawn, labelled

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
    x = drawn(3, *IMAGES)
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
    with pytest.raises(FileError, match=f"{sentence}Rows given"):
        nk.load_stitch(path, built(Rows), built(Maps, 7, seed=1))
    with pytest.raises(
        FileError, match="second model is another architecture.*'mid.weight' is 7 × 8 × 3 × 3 there and 6"
    ):
        nk.load_stitch(path, built(Maps, stride=2), built(Maps))


def test_models_without_the_layer_are_refused(tmp_path):
    model = built(Shares)
    stitch = nk.stitch(model, "relu#2", model, "relu#2", labelled(model, 5))
    stitch.save(tmp_path / "shared.netkin")
    assert nk.load_stitch(tmp_path / "shared.netkin", model, model).layers == ("relu#2", "relu#2")
    other = built(Shares)
    other.relu, other.gelu = None, nn.ReLU()
    with pytest.raises(FileError, match="at layer 'relu#2' of the first model, which has none"):
        nk.load_stitch(tmp_path / "shared.netkin", other, model)


@torch.no_grad()
def changed(model, how):
    """Return the model with as large weights, in other places or of another sign."""
    if how == "permuted":
        order = torch.tensor([1, 0, *range(2, 8)])
        model.front.weight.copy_(model.front.weight[order])
        model.front.bias.copy_(model.front.bias[order])
        model.mid.weight.copy_(model.mid.weight[:, order])
    else:
        model.out.weight[0, 0] *= -1
    return model


@pytest.mark.parametrize("how", ["permuted", "negated"])
def test_other_weights_give_a_warning_and_the_evaluation_is_dropped(saved, how):
    found, path = saved
    a, b = built(Maps, stride=2), changed(built(Maps, 7, seed=1), how)
    sentence = (
        "the second model has other weights than when the stitch in .*ab.netkin' was made, and it fits those alone; "
        "its evaluation is dropped, call `evaluate`"
    )
    with pytest.warns(UserWarning, match=sentence):
        loaded = nk.load_stitch(path, a, b)
    assert loaded.evaluation is None
    assert torch.equal(loaded.map.weight, found.map.weight)
    with pytest.warns(UserWarning, match="the first and the second model have other weights than when the stitch in"):
        nk.load_stitch(path, changed(a, how), b)


def test_without_an_evaluation_none_is_dropped(tmp_path):
    a, b = built(Maps), built(Maps, seed=1)
    nk.stitch(a, "mid", b, "mid", labelled(b, *IMAGES), "identity").save(tmp_path / "ab.netkin")
    with pytest.warns(UserWarning, match="and it fits those alone[.]$"):
        nk.load_stitch(tmp_path / "ab.netkin", a, changed(b, "negated"))


@pytest.mark.parametrize("then, now", [("double", "float"), ("double", "bfloat16"), ("float", "double")])
def test_the_same_weights_in_another_precision_are_no_others(tmp_path, then, now):
    a, b = (getattr(built(Maps, seed=seed), then)() for seed in (0, 1))
    data = labelled(b, *IMAGES)
    found = nk.stitch(a, "mid", b, "mid", data, test=data)
    found.save(tmp_path / "ab.netkin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = nk.load_stitch(tmp_path / "ab.netkin", getattr(a, now)(), getattr(b, now)())
    assert again.evaluation == found.evaluation
    with pytest.warns(UserWarning, match="the second model has other weights"):
        nk.load_stitch(tmp_path / "ab.netkin", a, changed(b, "negated"))


def test_an_interpolated_stitch_has_no_training_in_its_file(tmp_path):
    a, b = built(Maps), built(Maps, seed=1)
    data = labelled(b, *IMAGES)
    one = nk.stitch(a, "mid", b, "mid", data, "task_loss(steps=1)")
    nk.interpolate(one, nk.stitch(a, "mid", b, "mid", data), 0.5).save(tmp_path / "ab.netkin")
    assert files.read(tmp_path / "ab.netkin", "stitch")[0]["training"] is None
    assert nk.load_stitch(tmp_path / "ab.netkin", a, b).history == ()


def test_weights_in_float32_are_loaded_in_float32(saved):
    _, path = saved
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = nk.load_stitch(path, built(Maps, stride=2).float(), built(Maps, 7, seed=1).float())
    assert loaded.transformation.shift.dtype == torch.float32


def test_other_files_and_damaged_ones_are_refused(saved, tmp_path):
    _, path = saved
    models = built(Maps, stride=2), built(Maps, 7, seed=1)
    files.write(tmp_path / "other.netkin", "comparison", {}, {})
    with pytest.raises(FileError, match="holds 'comparison', not 'stitch'"):
        nk.load_stitch(tmp_path / "other.netkin", *models)
    header, arrays = files.read(path)
    header = {key: value for key, value in header.items() if key not in ("kind", "format")}
    files.write(tmp_path / "bad.netkin", "stitch", header, {"linear.0.weight": arrays["linear.0.weight"]})
    with pytest.raises(FileError, match="'.*bad.netkin' is damaged"):
        nk.load_stitch(tmp_path / "bad.netkin", *models)
    with pytest.raises(FileError, match="cannot read"):
        nk.load_stitch(tmp_path / "none.netkin", *models)


def test_without_models_the_record_comes_back(saved):
    found, path = saved
    record = nk.load(path)
    for name in ("method", "examples", "names", "seed", "layers", "evaluation", "history", "version", "created"):
        assert getattr(record, name) == getattr(found, name), name
    assert torch.equal(record.map.weight, found.map.weight)
    assert str(record).splitlines()[:2] == str(found).splitlines()[:2]
    assert nk.load(path, built(Maps, stride=2), built(Maps, 7, seed=1)).relative_accuracy == found.relative_accuracy
    with pytest.raises(FileError, match="holds a 'stitch', which takes 2 models; got 1"):
        nk.load(path, built(Maps))


def test_the_file_says_of_what_weights_data_and_settings_it_is(saved, tmp_path):
    found, path = saved
    origin = nk.load(path).provenance
    assert origin["weights a"] == nk.identity.weights_digest(found.network.a)
    assert origin["weights b"] == nk.identity.weights_digest(found.network.b)
    assert origin["call"] == (
        "nk.stitch(a=Maps, layer_a='mid', b=Maps, layer_b='mid', data='list', method='ridge(alpha=2)', seed=4)"
    )
    a, b = found.network.a, found.network.b
    other = nk.stitch(a, "mid", b, "mid", labelled(b, *IMAGES)[:1], "ridge(alpha=2)", names=("old", "new"), seed=4)
    assert other.provenance["data digest"] != origin["data digest"]
    assert other.provenance["settings digest"] == origin["settings digest"]
    other = nk.stitch(a, "mid", b, "mid", labelled(b, *IMAGES), "ridge(alpha=3)", seed=4)
    assert other.provenance["data digest"] == origin["data digest"]
    assert other.provenance["settings digest"] != origin["settings digest"]


def test_a_claimed_size_takes_no_memory(saved, tmp_path):
    header, arrays = files.read(saved[1])
    for end in header["ends"]:
        end["width"] = 2**40
    files.write(tmp_path / "large", "stitch", header, arrays)
    with pytest.raises(FileError, match="is damaged: ValueError: its layers have 1,099,511,627,776 and"):
        nk.load(tmp_path / "large")
