import pickle

import numpy as np
import pytest
import torch

from netkin.errors import InvalidValue, SourceError, UnknownName
from netkin.sources import load_data


def test_cifar10_gives_its_test_images_normalised_in_the_order_of_the_file(fake_cifar10):
    data = load_data(f"cifar10:{fake_cifar10}", batch_size=4)
    records = np.fromfile(fake_cifar10 / "cifar-10-batches-bin/test_batch.bin", np.uint8).reshape(6, 3073)
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
    pixels = records[:, 1:].reshape(6, 3, 32, 32)
    expected = (pixels / 255 - mean[:, None, None]) / std[:, None, None]
    images = torch.cat([images for images, _ in data])
    assert np.allclose(images.numpy(), expected, atol=1e-5)
    assert images.dtype == torch.float32
    assert data.labels.tolist() == records[:, 0].tolist()


def test_cifar10_is_found_in_the_folder_itself_as_well(fake_cifar10):
    outer, inner = load_data(f"cifar10:{fake_cifar10}"), load_data(f"cifar10:{fake_cifar10}/cifar-10-batches-bin")
    assert torch.equal(outer.stored, inner.stored)


def test_the_training_images_are_the_five_files_one_after_the_other(fake_cifar10):
    data = load_data(f"cifar10-train:{fake_cifar10}")
    last = np.fromfile(fake_cifar10 / "cifar-10-batches-bin/data_batch_5.bin", np.uint8).reshape(2, 3073)
    assert data.examples == 10
    assert data.labels[-2:].tolist() == last[:, 0].tolist()


def test_a_folder_without_cifar10_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"found no CIFAR-10 in .*: 'test_batch.bin' must lie in it or in its folder"):
        load_data(f"cifar10:{tmp_path}")


def test_a_missing_training_file_is_named(fake_cifar10):
    (fake_cifar10 / "cifar-10-batches-bin/data_batch_3.bin").unlink()
    with pytest.raises(SourceError, match="found no file of CIFAR-10 .*data_batch_3.bin"):
        load_data(f"cifar10-train:{fake_cifar10}")


def test_a_file_cut_short_is_refused(fake_cifar10):
    path = fake_cifar10 / "cifar-10-batches-bin/test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match="no file of CIFAR-10 .cannot reshape array of size 18437"):
        load_data(f"cifar10:{fake_cifar10}")


def test_a_file_with_impossible_labels_is_refused(fake_cifar10):
    path = fake_cifar10 / "cifar-10-batches-bin/test_batch.bin"
    path.write_bytes(b"\xc8" + path.read_bytes()[1:])
    with pytest.raises(SourceError, match="a label of 200, where there are labels from 0 to 9"):
        load_data(f"cifar10:{fake_cifar10}")


def test_the_real_cifar10_has_ten_thousand_balanced_test_images(cifar10_directory):
    data = load_data(f"cifar10:{cifar10_directory}")
    assert data.examples == 10_000
    assert torch.equal(data.labels.bincount(), torch.full((10,), 1000))
    assert data.labels[:5].tolist() == [3, 8, 8, 0, 6]


# CIFAR-100


@pytest.fixture
def fake_cifar100(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, count in (("test", 4), ("train", 6)):
        records = generator.integers(0, 256, (count, 3074), dtype=np.uint8)
        records[:, 0] %= 20
        records[:, 1] %= 100
        records.tofile(folder / f"{name}.bin")
    return tmp_path


def test_cifar100_has_fine_labels_by_default_and_coarse_ones_on_request(fake_cifar100):
    records = np.fromfile(fake_cifar100 / "cifar-100-binary/test.bin", np.uint8).reshape(4, 3074)
    fine, coarse = load_data(f"cifar100:{fake_cifar100}"), load_data(f"cifar100,labels=coarse:{fake_cifar100}")
    assert fine.labels.tolist() == records[:, 1].tolist()
    assert coarse.labels.tolist() == records[:, 0].tolist()
    assert np.array_equal(fine.stored.numpy().reshape(4, -1), records[:, 2:])
    assert load_data(f"cifar100-train:{fake_cifar100}").examples == 6


def test_other_labels_are_refused(fake_cifar100):
    with pytest.raises(InvalidValue, match=r"`labels=fine` \(100 classes\) and `labels=coarse` \(20\); got 'super'"):
        load_data(f"cifar100,labels=super:{fake_cifar100}")


def test_coarse_labels_out_of_range_are_refused(fake_cifar100):
    path = fake_cifar100 / "cifar-100-binary/test.bin"
    path.write_bytes(b"\x14" + path.read_bytes()[1:])
    with pytest.raises(SourceError, match="a label of 20, where there are labels from 0 to 19"):
        load_data(f"cifar100:{fake_cifar100}")


# normalising


def test_other_statistics_may_be_chosen(fake_cifar10):
    plain = load_data(f"cifar10,normalise=none:{fake_cifar10}")
    other = load_data(f"cifar10,normalise=imagenet:{fake_cifar10}")
    assert (plain.images.min() >= 0) & (plain.images.max() <= 1)
    assert torch.allclose(other.images[:, 0], (plain.images[:, 0] - 0.485) / 0.229, atol=1e-6)
    lite = load_data(f"cifar10,normalise=efficientnet_lite:{fake_cifar10}")
    assert torch.allclose(lite.images, (255 * plain.images - 127) / 128, atol=1e-6)


def test_unknown_statistics_are_refused_with_those_that_fit(fake_cifar10):
    with pytest.raises(
        UnknownName, match=r"no normalisation 'imagnet' for 3 channels; did you mean 'imagenet'\? There are `cifar10`"
    ):
        load_data(f"cifar10,normalise=imagnet:{fake_cifar10}")
    with pytest.raises(UnknownName, match="no normalisation 'mnist2'.*did you mean 'mnist'"):
        load_data("mnist,normalise=mnist2:data")
    with pytest.raises(UnknownName, match="no normalisation 'imagenet' for 1 channels"):
        load_data("mnist,normalise=imagenet:data")


# the Python version


def python_version(folder, **changes):
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    content = {b"batch_label": b"testing batch 1 of 1", b"labels": [3, 8, 0], b"filenames": [b"a", b"b", b"c"]}
    content[b"data"] = generator.integers(0, 256, (3, 3072), dtype=np.uint8)
    content |= {key.encode(): value for key, value in changes.items()}
    (folder / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
    return content


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_python_version_is_read_without_unpickling(tmp_path, protocol):
    content = python_version(tmp_path)
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(pickle.dumps(content, protocol=protocol))
    data = load_data(f"cifar10:{tmp_path}")
    assert data.labels.tolist() == [3, 8, 0]
    assert np.array_equal(data.stored.numpy().reshape(3, -1), content[b"data"])


def test_a_file_written_by_python_2_is_read(tmp_path):
    # what NumPy 1 under Python 2 wrote: names of its time, bytes as str
    python_version(tmp_path)
    pixels = bytes(range(256)) * 12
    pickled = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T\x00\x0c\x00\x00" + pixels + b"tbU\x06labelsq\x08]q\tK\x07au."
    )
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(pickled)
    data = load_data(f"cifar10:{tmp_path}")
    assert data.labels.tolist() == [7]
    assert data.stored.flatten()[:256].tolist() == list(range(256))


def test_a_hostile_file_is_refused_and_nothing_in_it_runs(tmp_path, hostile):
    python_version(tmp_path, labels=hostile)
    with pytest.raises(SourceError, match=r"asks for '\S+', and netkin runs nothing that comes in a file"):
        load_data(f"cifar10:{tmp_path}")


@pytest.mark.parametrize(
    "pickled, what",
    [
        (b"cos\nsystem\n(S'true'\ntR.", "'os.system'"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "'builtins.eval'"),
        (b"c__builtin__\ngetattr\n.", "'__builtin__.getattr'"),
        (b"Pthing\n.", "something outside the file"),
        (b"cnumpy\nndarray\n}(S'x'\nI1\nub.", "a changed object"),
        (
            b"cnumpy\ndtype\n(S'O'\ntR0]cnumpy.core.multiarray\n_reconstruct\n(tR(I1\n(tcnumpy\ndtype\n(S'O'\ntRI00\n]tb.",
            "other things",
        ),
        (b"\x8c\x05numpy\x8c\x0bndarray.max\x93.", "'numpy.ndarray.max'"),
    ],
)
def test_names_that_no_cifar_file_needs_are_refused(tmp_path, pickled, what):
    python_version(tmp_path)
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(pickled)
    with pytest.raises(SourceError, match=f"asks for .*{what}"):
        load_data(f"cifar10:{tmp_path}")


@pytest.mark.parametrize("pickled", [b"", b"anything", b"\x80\x02}", b"r\xff\xff\xff\xff.", b"(" * 5000])
def test_a_damaged_file_is_refused(tmp_path, pickled):
    python_version(tmp_path)
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(pickled)
    with pytest.raises(SourceError, match="is damaged or no file of CIFAR-10.*; unpack the published archive again"):
        load_data(f"cifar10:{tmp_path}")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data": np.zeros((3, 100), np.uint8)}, "is damaged or no file of CIFAR-10 .cannot reshape"),
        ({"data": [1, 2]}, "cannot reshape"),
        ({"data": np.zeros((3, 3072), np.float32)}, "asks for an array of other things than bytes"),
        ({"labels": [1, 2]}, "cannot reshape array of size 9216"),
        ({"labels": [1, 2, 11]}, "a label of 11, where there are labels from 0 to 9"),
        ({"labels": [1, 2, 300]}, "bytes must be in range"),
    ],
)
def test_a_file_with_other_content_is_refused(tmp_path, changes, message):
    python_version(tmp_path, **changes)
    with pytest.raises(SourceError, match=message):
        load_data(f"cifar10:{tmp_path}")


def test_a_file_that_holds_no_dictionary_is_refused(tmp_path):
    python_version(tmp_path)
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(SourceError, match="it holds a list instead of a dictionary"):
        load_data(f"cifar10:{tmp_path}")


def test_the_real_cifar100_has_a_hundred_balanced_classes(real_data):
    data = load_data(f"cifar100:{real_data('cifar-100-binary/test.bin')}")
    assert torch.equal(data.labels.bincount(), torch.full((100,), 100))
