import gzip
import struct

import numpy as np
import pytest
import torch

from netkin.errors import SourceError
from netkin.sources import load_data


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)


def write(folder, pixels, labels=(7, 2, 1, 0, 4), zipped=False, name="t10k", magic=2051):
    images = struct.pack(">IIII", magic, *pixels.shape) + pixels.tobytes()
    ending, made = (".gz", gzip.compress) if zipped else ("", bytes)
    (folder / f"{name}-images-idx3-ubyte{ending}").write_bytes(made(images))
    (folder / f"{name}-labels-idx1-ubyte{ending}").write_bytes(
        made(struct.pack(">II", 2049, len(labels)) + bytes(labels))
    )


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_is_read_gzipped_or_not(tmp_path, pixels, zipped):
    write(tmp_path, pixels, zipped=zipped)
    data = load_data(f"mnist:{tmp_path}")
    assert data.labels.tolist() == [7, 2, 1, 0, 4]
    assert np.allclose(data.images.numpy()[:, 0], (pixels / 255 - 0.1307) / 0.3081, atol=1e-5)


@pytest.mark.parametrize("inner", ["mnist", "MNIST/raw"])
def test_usual_folders_are_looked_into(tmp_path, pixels, inner):
    (tmp_path / inner).mkdir(parents=True)
    write(tmp_path / inner, pixels, name="train")
    assert load_data(f"mnist-train:{tmp_path}").examples == 5


def test_a_folder_without_mnist_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"found no MNIST in .*: 't10k-images-idx3-ubyte' or .*gz' must lie in it"):
        load_data(f"mnist:{tmp_path}")


def test_another_magic_number_or_size_is_refused(tmp_path, pixels):
    write(tmp_path, pixels, magic=2049)
    with pytest.raises(SourceError, match="it begins with the numbers 2049, 5, 28, 28"):
        load_data(f"mnist:{tmp_path}")
    write(tmp_path, pixels[:, :27])
    with pytest.raises(SourceError, match="it begins with the numbers 2051, 5, 27, 28"):
        load_data(f"mnist:{tmp_path}")


def test_files_cut_short_or_too_long_are_refused(tmp_path, pixels):
    write(tmp_path, pixels)
    path = tmp_path / "t10k-images-idx3-ubyte"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(SourceError, match="cannot reshape array of size 3919"):
        load_data(f"mnist:{tmp_path}")
    path.write_bytes(whole + b"x")
    with pytest.raises(SourceError, match="cannot reshape array of size 3921"):
        load_data(f"mnist:{tmp_path}")
    path.write_bytes(whole[:3])
    with pytest.raises(SourceError, match="is damaged or no file of MNIST"):
        load_data(f"mnist:{tmp_path}")


def test_a_damaged_gzip_file_is_refused(tmp_path, pixels):
    write(tmp_path, pixels, zipped=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    for content in (b"no gzip", path.read_bytes()[:-20], b""):
        path.write_bytes(content)
        with pytest.raises(SourceError, match="is damaged or no file of MNIST"):
            load_data(f"mnist:{tmp_path}")


def test_unpaired_labels_are_refused(tmp_path, pixels):
    write(tmp_path, pixels, labels=(1, 2))
    with pytest.raises(SourceError, match="has 5 images and 2 labels"):
        load_data(f"mnist:{tmp_path}")


def test_the_real_mnist_begins_with_a_seven(real_data):
    data = load_data(f"mnist:{real_data('mnist/t10k-images-idx3-ubyte.gz')}")
    assert data.examples == 10_000
    assert data.labels[:3].tolist() == [7, 2, 1]
    assert torch.isclose(data.images.std(), torch.tensor(1.0), atol=0.05)
