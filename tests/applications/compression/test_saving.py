"""Compressed models come back from their files as they were."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import netkin as nk
from netkin import files
from netkin.errors import FileError, InvalidValue
from netkin.sources.architectures import digits


@pytest.fixture(scope="module")
def images(digits_data):
    return next(iter(digits_data[1]))[0]


@pytest.fixture(scope="module")
def small(digits_net, digits_data):
    train, test = digits_data
    return nk.compress(digits_net, ["conv2", "conv4", "fc"], k=6, data=train, test=test, order="from_the_top")


def test_a_model_comes_back(small, images, tmp_path):
    nk.save_compressed(small, tmp_path / "small.netkin")
    fresh = digits().eval()
    again = nk.load_compressed(tmp_path / "small.netkin", fresh)
    assert torch.equal(again(images), small(images))
    assert again.compression == small.compression
    assert str(again.compression) == str(small.compression)
    assert isinstance(fresh.fc, nn.Linear)


def test_a_model_compressed_twice_comes_back(small, digits_data, images, tmp_path):
    twice = nk.compress(small, ["conv3", "fc.0"], k=3, data=digits_data[0])
    nk.save_compressed(twice, tmp_path / "twice.netkin")
    again = nk.load_compressed(tmp_path / "twice.netkin", digits().eval())
    assert torch.equal(again(images), twice(images))


def test_strides_padding_and_half_precision_come_back(draw, tmp_path):
    torch.manual_seed(0)

    def build():
        convs = (
            nn.Conv2d(4, 8, 3, stride=2, padding=1, padding_mode="circular"),
            nn.Conv2d(8, 5, 1, stride=2, bias=False),
        )
        return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(torch.bfloat16)

    data = draw(30, 4, 9, 9)
    small = nk.compress(build(), ["0", "1"], k=3, data=data)
    nk.save_compressed(small, tmp_path / "half.netkin")
    again = nk.load_compressed(tmp_path / "half.netkin", build())
    batch = data.to(torch.bfloat16)
    assert torch.equal(again(batch), small(batch))


def test_the_file_is_smaller_by_what_was_saved(small, digits_net, tmp_path):
    nk.save_compressed(small, tmp_path / "small.netkin")
    from safetensors.torch import save_file

    save_file(digits_net.state_dict(), tmp_path / "whole.safetensors")
    saved = 4 * (small.compression.parameters_before - small.compression.parameters_after)
    sizes = [(tmp_path / name).stat().st_size for name in ("whole.safetensors", "small.netkin")]
    assert sizes[0] - sizes[1] == pytest.approx(saved, abs=5000)


def test_a_plain_model_is_not_saved(digits_net, tmp_path):
    with pytest.raises(
        InvalidValue, match="was not compressed by netkin: it has no table `compression`; save its state"
    ):
        nk.save_compressed(digits_net, tmp_path / "plain.netkin")


@pytest.mark.parametrize(
    "model, message",
    [
        (nn.Sequential(nn.Linear(3, 3)), "holds a model with a layer 'fc' taken apart; this model has none."),
        (nk.load_model("netkin:tiny10"), "does not fit this model: .* is .* in the file and .* in the model .* differ"),
    ],
)
def test_another_architecture_is_refused(small, tmp_path, model, message):
    nk.save_compressed(small, tmp_path / "small.netkin")
    with pytest.raises(FileError, match=message):
        nk.load_compressed(tmp_path / "small.netkin", model)


def test_a_file_of_another_kind_and_a_damaged_one_are_refused(small, tmp_path):
    files.write(tmp_path / "other.netkin", "moments", {}, {})
    with pytest.raises(FileError, match="holds 'moments', not 'compressed'"):
        nk.load_compressed(tmp_path / "other.netkin", digits())
    files.write(tmp_path / "damaged.netkin", "compressed", {"layers": []}, {})
    with pytest.raises(FileError, match="is damaged: KeyError"):
        nk.load_compressed(tmp_path / "damaged.netkin", digits())
    nk.save_compressed(small, tmp_path / "small.netkin")
    with pytest.raises(FileError, match="holds a 'compressed', which takes 1 models; got 2"):
        nk.load(tmp_path / "small.netkin", digits(), digits())


def test_any_saved_thing_is_opened_by_one_function(small, images, tmp_path):
    nk.save_compressed(small, tmp_path / "small.netkin")
    assert torch.equal(nk.load(tmp_path / "small.netkin", digits().eval())(images), small(images))
    assert nk.load(tmp_path / "small.netkin") == small.compression


def test_the_file_says_of_what_weights_data_and_settings_it_is(digits_net, digits_data, tmp_path):
    def origin(model=digits_net, data=digits_data[1], **options):
        small = nk.compress(model, ["fc"], data=data, **{"k": 3} | options)
        nk.save_compressed(small, tmp_path / "small.netkin", overwrite=True)
        return files.read_header(tmp_path / "small.netkin")["provenance"]

    first, same = origin(), origin()
    assert first == same
    assert first["call"].startswith("nk.compress(model=")
    assert "layers=['fc'], data='digits:test'" in first["call"]
    assert first["weights"] == nk.identity.weights_digest(digits_net)
    assert origin(data=digits_data[0])["data digest"] != first["data digest"]
    assert origin(k=4)["settings digest"] != first["settings digest"]

    def forward(model, batch):
        return model(batch[0])

    def other(model, batch):
        return model(batch[0]) + 0

    assert origin(forward=forward)["settings digest"] != origin(forward=other)["settings digest"]
    assert origin(digits().eval())["weights"] != first["weights"]


def test_a_compressed_model_is_not_written_over_something_else(small, tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"precious")
    with pytest.raises(FileError, match="this would write over '.*weights.pt'; choose another name"):
        nk.save_compressed(small, tmp_path / "weights.pt")
    nk.save_compressed(small, tmp_path / "weights.pt", overwrite=True)


def test_a_file_of_a_compressed_model_is_a_model_wherever_one_is_named(small, images, tmp_path):
    nk.save_compressed(small, tmp_path / "small.netkin")
    found = nk.load_model(f"netkin:digits@{tmp_path / 'small.netkin'}")
    torch.testing.assert_close(found(images), small.eval()(images))
    assert found.compression == small.compression
    assert not found.training
    again = nk.compress(found, ["conv1"], k=1, data=images)
    assert [part.layer for part in again.compression.replaced] == ["fc", "conv4", "conv2", "conv1"]


def test_the_file_of_another_network_is_refused_by_name(small, tmp_path):
    nk.save_compressed(small, tmp_path / "small.netkin")
    with pytest.raises(FileError, match="small.netkin' does not fit this model: .* build the architecture"):
        nk.load_model(f"netkin:tiny10@{tmp_path / 'small.netkin'}")


def test_a_damaged_file_of_a_compressed_model_is_refused(small, tmp_path):
    nk.save_compressed(small, tmp_path / "small.netkin")
    contents = bytearray((tmp_path / "small.netkin").read_bytes())
    contents[-1] ^= 1
    (tmp_path / "small.netkin").write_bytes(contents)
    with pytest.raises(FileError, match="is damaged"):
        nk.load_model(f"netkin:digits@{tmp_path / 'small.netkin'}")


def test_a_compressed_model_notes_test_examples_that_are_among_the_data(tmp_path):
    small = nk.compress("netkin:digits", ["fc"], k=4, data="digits:train", test="digits:train", examples=200)
    (note,) = small.compression.notes
    assert note.startswith("200 of the 1,437 test examples are also among the 200 of `data`, which flatters the result")
    assert small.compression.model == "netkin:digits"
    assert not nk.compress("netkin:digits", ["fc"], k=4, data="digits:test", test="digits:train").compression.notes


def test_the_table_names_the_model_and_a_file_without_its_name_still_opens(digits_net, digits_data, tmp_path):
    small = nk.compress(digits_net, ["fc"], k=3, data=digits_data[1], name="seed 0")
    assert small.compression.model == "seed 0"
    assert str(small.compression).startswith("1 layer of seed 0 compressed against logits")
    nk.save_compressed(small, tmp_path / "small.netkin")
    assert nk.load(tmp_path / "small.netkin").model == "seed 0"
    header, arrays = files.read(tmp_path / "small.netkin")
    before = {name: value for name, value in header.items() if name not in ("kind", "format", "model")}
    files.write(tmp_path / "before.netkin", "compressed", before, arrays)
    assert nk.load(tmp_path / "before.netkin") == replace(small.compression, model="")
