import numpy as np
import pytest
from scipy.io import savemat

from netkin.errors import SourceError
from netkin.sources import load_data


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)


def write(folder, X, y=(10, 1, 9, 5), name="test"):
    savemat(folder / f"{name}_32x32.mat", {"X": X, "y": np.array(y, np.uint8)[:, None]}, do_compression=True)


def test_svhn_is_read_and_its_ten_becomes_zero(tmp_path, pixels):
    write(tmp_path, pixels)
    data = load_data(f"svhn:{tmp_path}")
    assert data.labels.tolist() == [0, 1, 9, 5]
    assert np.array_equal(data.stored.numpy(), pixels.transpose(3, 2, 0, 1))
    expected = (pixels[:, :, 2, 1] / 255 - 0.4728) / 0.1970
    assert np.allclose(data.images[1, 2].numpy(), expected, atol=1e-5)


def test_the_training_part_is_found_in_the_folder_svhn(tmp_path, pixels):
    (tmp_path / "svhn").mkdir()
    write(tmp_path / "svhn", pixels, name="train")
    assert load_data(f"svhn-train:{tmp_path}").examples == 4


def test_a_folder_without_svhn_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"found no SVHN in .*: 'train_32x32.mat' must lie in it"):
        load_data(f"svhn-train:{tmp_path}")


@pytest.mark.parametrize(
    "X, y", [(np.zeros((28, 28, 3, 4), np.uint8), (1, 1, 1, 1)), (np.zeros((32, 32, 3, 4), np.uint8), (1, 2)),
             (np.zeros((32, 32, 3, 4)), (1, 1, 1, 1))]
)  # fmt: skip
def test_other_arrays_are_refused(tmp_path, X, y):
    write(tmp_path, X, y)
    with pytest.raises(SourceError, match="X must be bytes of 32 × 32 × 3 × n, and y must be n labels from 1 to 10"):
        load_data(f"svhn:{tmp_path}")


def test_other_labels_are_refused(tmp_path, pixels):
    write(tmp_path, pixels, (1, 2, 3, 11))
    with pytest.raises(SourceError, match="y must be n labels from 1 to 10"):
        load_data(f"svhn:{tmp_path}")


@pytest.mark.parametrize("kept", [0, 100, 400])
def test_a_file_cut_short_is_refused(tmp_path, pixels, kept):
    write(tmp_path, pixels)
    path = tmp_path / "test_32x32.mat"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SourceError, match="is damaged or no file of SVHN"):
        load_data(f"svhn:{tmp_path}")


def test_the_real_svhn_has_all_ten_digits(real_data):
    data = load_data(f"svhn:{real_data('svhn/test_32x32.mat')}")
    assert sorted(set(data.labels.tolist())) == list(range(10))
