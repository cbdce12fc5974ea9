import sys

import numpy as np
import pytest
from torch import nn

import netkin
from netkin.errors import InvalidValue, MissingExtra, SourceError
from netkin.sources import load_data
from table_worlds import sentences

pillow = pytest.importorskip("PIL.Image", reason="image files need Pillow: pip install 'netkin[images]'")


def write(path, height=6, width=6, value=0, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    size = (height, width, 3) if mode == "RGB" else (height, width)
    pillow.fromarray(np.full(size, value, np.uint8)).save(path)


def test_folders_are_classes_and_all_comes_sorted(tmp_path):
    for name, value in (("dog/b.png", 3), ("cat/2.png", 2), ("cat/1.png", 1), ("dog/a/c.bmp", 4)):
        write(tmp_path / name, value=value)
    (tmp_path / "cat/notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    data = load_data(f"images:{tmp_path}")
    assert data.stored.shape == (4, 3, 6, 6)
    assert data.stored[:, 0, 0, 0].tolist() == [1, 2, 4, 3]
    assert data.labels.tolist() == [0, 0, 1, 1]


def test_a_flat_folder_gives_images_without_labels_from_0_to_1(tmp_path):
    for name, value in (("b.png", 255), ("a.png", 0)):
        write(tmp_path / name, value=value)
    data = load_data(f"images:{tmp_path}", batch_size=2)
    (images,) = list(data)
    assert images[:, 0, 0, 0].tolist() == [0, 1]


def test_grey_images_become_three_channels(tmp_path):
    write(tmp_path / "a.png", value=9, mode="L")
    assert load_data(f"images:{tmp_path}").stored[0, :, 0, 0].tolist() == [9, 9, 9]


def test_images_of_different_sizes_are_refused_unless_a_size_is_chosen(tmp_path):
    write(tmp_path / "a.png", 6, 8)
    write(tmp_path / "b.png", 5, 7)
    with pytest.raises(
        SourceError, match=r"has 6 × 8 pixels and .*b.png' 5 × 7; choose one size, as in `images,size=6"
    ):
        load_data(f"images:{tmp_path}")
    assert load_data(f"images,size=4:{tmp_path}").stored.shape == (2, 3, 4, 4)


def test_a_picture_of_too_many_pixels_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "a.png", 20, 20)
    for limit in (300, 100):  # Pillow warns above its limit and raises above twice its limit
        monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(SourceError, match="has too many pixels to be opened safely: .*decompression bomb"):
            load_data(f"images:{tmp_path}")


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n\x00\x00", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_what_is_no_image_is_refused(tmp_path, content):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(SourceError, match=r"a.png' is damaged or no image of a kind that is read here"):
        load_data(f"images:{tmp_path}")


def test_an_image_cut_short_is_refused(tmp_path):
    write(tmp_path / "a.bmp", 20, 20)
    (tmp_path / "a.bmp").write_bytes((tmp_path / "a.bmp").read_bytes()[:200])
    with pytest.raises(SourceError, match="is damaged or no image"):
        load_data(f"images:{tmp_path}")


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(SourceError, match=r"found no image '.*a.png'"):
        load_data(f"images:{tmp_path}")


def test_folders_without_images_are_refused(tmp_path):
    with pytest.raises(SourceError, match=r"found no images in .*; they must end in .bmp, .gif"):
        load_data(f"images:{tmp_path}")
    with pytest.raises(SourceError, match=r"photos' is no folder; name the one that holds the images"):
        load_data(f"images:{tmp_path / 'photos'}")
    (tmp_path / "photos").touch()
    with pytest.raises(SourceError, match=r"photos' is no folder; name the one that holds the images"):
        load_data(f"images:{tmp_path / 'photos'}")
    with pytest.raises(SourceError, match=r"photo' is no folder; did you mean 'photos'\?"):
        load_data(f"images:{tmp_path / 'photo'}")


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtra, match=r"image files needs 'PIL.Image' .*`pip install 'netkin\[images\]'` brings"):
        load_data(f"images:{tmp_path}")


# images finer than bytes, and broken ones


def save_grey(path, values, dtype):
    pillow.fromarray(np.array(values, dtype)).save(path)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_grey_images_of_16_bits_keep_their_values(tmp_path, name):
    save_grey(tmp_path / name, [[0, 30000], [257, 65535]], np.uint16)
    (images,) = load_data(f"images:{tmp_path}")
    expected = np.array([[0, 30000], [257, 65535]]) / 65535
    assert images.shape == (1, 3, 2, 2)
    assert np.allclose(images.numpy(), expected, atol=1e-6)


def test_of_colours_of_16_bits_the_upper_eight_are_read(tmp_path):
    colours = np.array([[[0x1234, 0x5678, 0xFFFF]]], ">u2")
    (tmp_path / "a.ppm").write_bytes(b"P6 1 1 65535\n" + colours.tobytes())
    assert load_data(f"images:{tmp_path}").stored.flatten().tolist() == [0x12, 0x56, 0xFF]


def test_float_images_from_0_to_1_keep_their_values_and_others_are_refused(tmp_path):
    save_grey(tmp_path / "a.tif", [[0, 0.25], [0.5, 1]], np.float32)
    (images,) = load_data(f"images:{tmp_path}")
    assert np.allclose(images.numpy(), [[0, 0.25], [0.5, 1]], atol=1e-6)
    save_grey(tmp_path / "a.tif", [[0, 0.25], [0.5, 700]], np.float32)
    with pytest.raises(SourceError, match=r"a\.tif' holds numbers from 0 to 700; .* from 0 for black to 1 for white"):
        load_data(f"images:{tmp_path}")
    save_grey(tmp_path / "a.tif", [[0, np.nan]], np.float32)
    with pytest.raises(SourceError, match="holds numbers from nan to nan"):
        load_data(f"images:{tmp_path}")


def test_whole_numbers_of_32_bits_are_refused(tmp_path):
    save_grey(tmp_path / "a.tif", [[0, 100_000]], np.int32)
    with pytest.raises(SourceError, match="holds whole numbers of 32 bits, whose white is unknown; save it with 16"):
        load_data(f"images:{tmp_path}")


def test_fine_and_plain_images_of_a_folder_are_on_one_scale(tmp_path):
    write(tmp_path / "a.png", 2, 2, value=255, mode="L")
    save_grey(tmp_path / "b.png", [[65535, 13107], [0, 0]], np.uint16)
    (images,) = load_data(f"images:{tmp_path}")
    assert images[0].unique().tolist() == [1]
    assert np.allclose(images[1, 0].numpy(), [[1, 0.2], [0, 0]], atol=1e-6)


def test_fine_images_are_resized_as_others_are(tmp_path):
    save_grey(tmp_path / "a.png", np.full((6, 6), 30000), np.uint16)
    (images,) = load_data(f"images,size=3:{tmp_path}")
    assert images.shape == (1, 3, 3, 3)
    assert np.allclose(images.numpy(), 30000 / 65535, atol=1e-6)


def test_edges_of_fine_images_stay_in_range_when_they_are_resized(tmp_path):
    save_grey(tmp_path / "a.png", np.kron([[0, 1], [1, 0]], np.full((6, 6), 65535)), np.uint16)
    (images,) = load_data(f"images,size=7:{tmp_path}")
    assert (images.min(), images.max()) == (0, 1)


def test_broken_images_are_skipped_on_request_counted_and_named(tmp_path):
    for name, value in (("cat/1.png", 1), ("cat/2.png", 2), ("dog/3.png", 3)):
        write(tmp_path / name, value=value)
    (tmp_path / "cat/1.png").write_bytes(b"no image")
    (tmp_path / "dog/0.jpg").write_bytes(b"")
    advice = rf"1\.png' is damaged or no image of a kind that is read here\. `images,broken=skip:{tmp_path}` leaves"
    with pytest.raises(SourceError, match=advice):
        load_data(f"images:{tmp_path}")
    data = load_data(f"images,broken=skip:{tmp_path}")
    assert data.stored[:, 0, 0, 0].tolist() == [2, 3]
    assert data.labels.tolist() == [0, 1]
    (remark,) = data.remarks
    assert remark == (f"2 of 4 images were left out as broken: {tmp_path / 'cat/1.png'}, {tmp_path / 'dog/0.jpg'}.")
    assert "broken=skip" in data.name


def test_what_was_skipped_is_among_the_warnings_of_a_comparison(tmp_path):
    for name in "abcdefgh":
        write(tmp_path / f"{name}.png", value=ord(name))
    (tmp_path / "a.png").write_bytes(b"no image")
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())
    comparison = netkin.compare(model, data=load_data(f"images,broken=skip:{tmp_path}"))
    assert any("1 of 8 images were left out as broken: " in warning for warning in sentences(comparison))


def test_a_folder_of_broken_images_alone_is_refused_and_so_is_another_word_than_skip(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(SourceError, match="none of the 1 images in .* could be read: .*a.png' is damaged"):
        load_data(f"images,broken=skip:{tmp_path}")
    with pytest.raises(InvalidValue, match="`broken` must be 'refuse' or 'skip'; got 'yes'"):
        load_data(f"images,broken=yes:{tmp_path}")
