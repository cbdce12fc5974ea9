import sys

import numpy as np
import pytest

from netkin.errors import MissingExtra, SourceError
from netkin.sources import load_data

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
        with pytest.raises(SourceError, match="could be decompression bomb"):
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


@pytest.mark.parametrize("name, dtype", [("a.png", np.uint16), ("a.pgm", np.uint16), ("a.tif", np.float32)])
def test_grey_images_finer_than_bytes_are_refused(tmp_path, name, dtype):
    pillow.fromarray(np.zeros((2, 2), dtype)).save(tmp_path / name)
    with pytest.raises(SourceError, match=r"holds numbers finer than bytes \(mode .*; save it with 8 bits, or give"):
        load_data(f"images:{tmp_path}")


def test_of_colours_of_16_bits_the_upper_eight_are_read(tmp_path):
    colours = np.array([[[0x1234, 0x5678, 0xFFFF]]], ">u2")
    (tmp_path / "a.ppm").write_bytes(b"P6 1 1 65535\n" + colours.tobytes())
    assert load_data(f"images:{tmp_path}").stored.flatten().tolist() == [0x12, 0x56, 0xFF]
