"""Colours of 16 bits keep all of them; the files are written here by hand, byte by byte, after their specifications."""

import struct
import zlib

import numpy as np
import pytest

from netkin.errors import SourceError
from netkin.sources import load_data

pytest.importorskip("PIL.Image", reason="image files need Pillow: pip install 'netkin[images]'")
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def colours(channels, height=11, width=6):
    return np.random.default_rng(channels).integers(0, 2**16, (height, width, channels)).astype(np.uint16)


def read(path, content):
    path.write_bytes(content)
    (images,) = load_data(f"images:{path.parent}")
    return images[0].permute(1, 2, 0).numpy()


# PNG


def paeth(left, above, corner):
    guess = left + above - corner
    far = [abs(guess - one) for one in (left, above, corner)]
    return np.where((far[0] <= far[1]) & (far[0] <= far[2]), left, np.where(far[1] <= far[2], above, corner))


def filtered(picture):
    """Return the bytes of the rows, filtered in all five ways in turn (section 9 of the specification of PNG)."""
    rows, step = picture.astype(">u2").reshape(len(picture), -1).view(np.uint8).astype(int), 2 * picture.shape[2]
    found, above = b"", np.zeros(rows.shape[1], int)
    for number, row in enumerate(rows):
        left, corner = (np.concatenate([np.zeros(step, int), one[:-step]]) for one in (row, above))
        guesses = [0 * row, left, above, (left + above) // 2, paeth(left, above, corner)]
        found += bytes([number % 5]) + ((row - guesses[number % 5]) % 256).astype(np.uint8).tobytes()
        above = row
    return found


def png(picture, interlaced=False):
    parts = [picture[y::down, x::across] for x, y, across, down in ADAM7] if interlaced else [picture]
    rows = b"".join(filtered(part) for part in parts if part.size)
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[picture.shape[2]]
    header = struct.pack(">IIBBBBB", picture.shape[1], picture.shape[0], 16, kind, 0, 0, int(interlaced))
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(rows), b"IEND": b""}
    sums = {name: struct.pack(">I", zlib.crc32(name + content)) for name, content in chunks.items()}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + sums[name] for name, content in chunks.items()
    )


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_of_16_bits_keeps_its_values(tmp_path, channels, interlaced):
    picture = colours(channels)
    found = read(tmp_path / "a.png", png(picture, interlaced))
    wanted = picture[:, :, : 3 if channels > 2 else 1] / 65535
    assert found.shape == (11, 6, 3)
    assert np.abs(found - wanted).max() < 1e-7


def test_colours_of_16_bits_are_resized_as_others_are(tmp_path):
    (tmp_path / "a.png").write_bytes(png(np.broadcast_to(colours(3, 1, 1), (6, 6, 3))))
    (images,) = load_data(f"images,size=3:{tmp_path}")
    assert np.allclose(images[0].numpy(), (colours(3, 1, 1) / 65535).transpose(2, 0, 1), atol=1e-6)


# TIFF and PPM


def tiff(picture, order="<", compressed=False, in_planes=False):
    """Return a TIFF of one strip, or one for each plane."""
    height, width, channels = picture.shape
    planes = np.split(picture, channels, axis=2) if in_planes else [picture]
    strips = [one.astype(f"{order}u2").tobytes() for one in planes]
    strips = [zlib.compress(one) for one in strips] if compressed else strips
    tags = {256: [width], 257: [height], 258: [16] * channels, 259: [8 if compressed else 1], 262: [2]}
    tags |= {273: [0] * len(strips), 277: [channels], 278: [height], 279: list(map(len, strips)), 284: [1 + in_planes]}
    tags |= {338: [2]} if channels == 4 else {}
    start = 8 + 2 + 12 * len(tags) + 4
    begin = start + sum(4 * len(values) for values in tags.values() if len(values) > 1)
    tags[273] = [begin + sum(map(len, strips[:number])) for number in range(len(strips))]
    entries = lists = b""
    for tag, values in tags.items():
        packed = struct.pack(f"{order}{len(values)}I", *values)
        held = packed if len(values) == 1 else struct.pack(f"{order}I", start + len(lists))
        lists += packed if len(values) > 1 else b""
        entries += struct.pack(f"{order}HHI", tag, 4, len(values)) + held
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8)
    return head + struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + lists + b"".join(strips)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("channels", [3, 4])
def test_tiff_of_16_bits_keeps_its_values(tmp_path, channels, order, compressed):
    picture = colours(channels)
    found = read(tmp_path / "a.tif", tiff(picture, order, compressed))
    assert np.abs(found - picture[:, :, :3] / 65535).max() < 1e-7


def test_white_of_a_grey_tiff_of_12_bits_is_white(tmp_path):
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8 + 2 + 12 * 9 + 4, 277: 1, 278: 1, 279: 3}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    head = b"II" + struct.pack("<HIH", 42, 8, len(tags))
    found = read(tmp_path / "a.tif", head + entries + bytes(4) + b"\xff\xf8\x00")  # 4095 and 2048
    assert np.allclose(found[0, :, 0], [1, 2048 / 4095])


@pytest.mark.parametrize("most", [1000, 65535])
def test_ppm_of_two_bytes_a_colour_keeps_its_values(tmp_path, most):
    picture = np.minimum(colours(3), most)
    found = read(tmp_path / "a.ppm", f"P6 6 11 {most}\n".encode() + picture.astype(">u2").tobytes())
    assert np.abs(found - picture / most).max() < 1e-7


def test_a_colour_beyond_the_white_of_its_file_is_refused(tmp_path):
    picture = np.full((2, 2, 3), 2000)
    (tmp_path / "a.ppm").write_bytes(b"P6 2 2 1000\n" + picture.astype(">u2").tobytes())
    words = "holds numbers from 2000 to 2000; by its own maximum it goes from 0 for black to 1000 for white, so correct"
    with pytest.raises(SourceError, match=words):
        load_data(f"images:{tmp_path}")


@pytest.mark.parametrize("compressed", [False, True])
def test_colours_of_which_half_the_bits_would_be_lost_are_refused(tmp_path, compressed):
    (tmp_path / "a.tif").write_bytes(tiff(colours(3), compressed=compressed, in_planes=True))
    with pytest.raises(SourceError, match=r"a\.tif' is an image of more than 8 bits a colour.*save it as PNG with 16"):
        load_data(f"images:{tmp_path}")
    (tmp_path / "a.tif").unlink()
    (tmp_path / "a.ppm").write_bytes(b"P3 1 1 65535\n1 2 3\n")
    with pytest.raises(SourceError, match=r"a\.ppm' is an image of more than 8 bits a colour"):
        load_data(f"images:{tmp_path}")
