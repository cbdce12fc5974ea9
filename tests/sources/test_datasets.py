import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from netkin.errors import SourceError, UnknownName, ValueFault
from netkin.sources import load_data
from netkin.sources.datasets import Batches


def test_the_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    expected = datasets.load_digits()
    data = load_data("digits")
    assert data.images.dtype == torch.float32
    assert data.images.shape == (1797, 1, 8, 8)
    assert np.array_equal(data.images[:, 0].numpy() * 16, expected.images)
    assert np.array_equal(data.labels.numpy(), expected.target)


def test_digits_lie_between_zero_and_one_with_labels_from_0_to_9():
    data = load_data("digits")
    assert (data.images.min(), data.images.max()) == (0, 1)
    assert sorted(set(data.labels.tolist())) == list(range(10))


def test_the_two_parts_of_the_digits_make_up_the_whole():
    whole, train, test = (load_data(spec) for spec in ("digits", "digits:train", "digits:test"))
    assert (train.examples, test.examples) == (1437, 360)
    assert torch.equal(torch.cat([train.images, test.images]), whole.images)
    assert torch.equal(torch.cat([train.labels, test.labels]), whole.labels)


def test_batches_come_in_order_again_and_again_with_a_smaller_last_one():
    data = load_data("digits:test", batch_size=100)
    first, second = list(data), list(data)
    assert [len(images) for images, _ in first] == [100, 100, 100, 60]
    assert len(data) == 4
    assert data.name == "digits:test"
    assert torch.equal(torch.cat([images for images, _ in second]), data.images)
    assert torch.equal(torch.cat([labels for _, labels in second]), data.labels)


def test_an_unknown_part_of_the_digits_is_refused():
    with pytest.raises(
        UnknownName, match=r"the digits have no part 'tests'; did you mean 'test'\? We have `digits:train`"
    ):
        load_data("digits:tests")
    with pytest.raises(UnknownName, match=r"no part '7'\. We have"):
        load_data("digits:7")


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ValueFault, match="at least one example; got batch_size=0"):
        load_data("digits", batch_size=0)


def test_an_unknown_data_set_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownName, match=r"no data set named 'digit'; did you mean 'digits'\? Data is `digits`"):
        load_data("digit")
    with pytest.raises(UnknownName, match=r"no data set named 'imagenet'\. Data is .*`package.module:function`\."):
        load_data("imagenet")


def test_a_mistyped_data_set_with_a_folder_is_recognised(workshop):
    with pytest.raises(SourceError, match=r"did you mean 'cifar10'\?"):
        load_data("cifar:data")


# CIFAR-10


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


def test_the_pickled_layout_is_refused_without_being_read(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(b"anything")
    with pytest.raises(SourceError, match="Python version, which is pickled and not read here; get the binary version"):
        load_data(f"cifar10:{tmp_path}")


def test_a_missing_training_file_is_named(fake_cifar10):
    (fake_cifar10 / "cifar-10-batches-bin/data_batch_3.bin").unlink()
    with pytest.raises(SourceError, match=r"lacks data_batch_3.bin; unpack all"):
        load_data(f"cifar10-train:{fake_cifar10}")


def test_a_file_cut_short_is_refused_with_its_size(fake_cifar10):
    path = fake_cifar10 / "cifar-10-batches-bin/test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match="holds 18,437 bytes, no multiple of the 3,073 bytes of a CIFAR-10 image"):
        load_data(f"cifar10:{fake_cifar10}")


def test_a_file_with_impossible_labels_is_refused(fake_cifar10):
    path = fake_cifar10 / "cifar-10-batches-bin/test_batch.bin"
    path.write_bytes(b"\xc8" + path.read_bytes()[1:])
    with pytest.raises(SourceError, match="has a label of 200; CIFAR-10 has labels from 0 to 9"):
        load_data(f"cifar10:{fake_cifar10}")


def test_the_real_cifar10_has_ten_thousand_balanced_test_images(cifar10_directory):
    data = load_data(f"cifar10:{cifar10_directory}")
    assert data.examples == 10_000
    assert torch.equal(data.labels.bincount(), torch.full((10,), 1000))
    assert data.labels[:5].tolist() == [3, 8, 8, 0, 6]


# functions


def test_a_function_may_return_a_list_of_batches(workshop):
    workshop.write("nk_list", "import torch\ndef make():\n    return [torch.ones(2, 3), torch.zeros(1, 3)]\n")
    data = load_data("nk_list:make")
    assert [len(batch) for batch in data] == [2, 1]
    assert (len(data), data.name, data.examples) == (2, "nk_list:make", None)


def test_a_function_may_return_a_tensor_which_is_cut_into_batches(workshop):
    workshop.write("nk_tensor", "import torch\ndef make():\n    return torch.arange(5)\n")
    data = load_data("nk_tensor:make", batch_size=2)
    assert [batch.tolist() for batch in data] == [[0, 1], [2, 3], [4]]
    assert isinstance(data, Batches)


def test_a_function_may_return_a_dataset_which_is_cut_into_batches(workshop):
    text = "import torch\nfrom torch.utils.data import TensorDataset\n"
    workshop.write("nk_set", text + "def make():\n    return TensorDataset(torch.ones(5, 2), torch.arange(5))\n")
    data = load_data("nk_set:make", batch_size=3)
    assert [labels.tolist() for _, labels in data] == [[0, 1, 2], [3, 4]]
    assert (len(data), data.examples) == (2, 5)


def test_a_function_may_return_a_loader_whose_batches_stay_as_they_are(workshop):
    text = "import torch\nfrom torch.utils.data import DataLoader\n"
    workshop.write("nk_loader", text + "def make():\n    return DataLoader(torch.arange(5), batch_size=4)\n")
    data = load_data("nk_loader:make", batch_size=2)
    assert [batch.tolist() for batch in data] == [[0, 1, 2, 3], [4]]
    assert isinstance(data.batches, DataLoader)


def test_a_generator_can_be_walked_through_twice(workshop):
    workshop.write("nk_stream", "import torch\ndef make():\n    yield torch.ones(2)\n    yield torch.zeros(2)\n")
    data = load_data("nk_stream:make")
    assert len(list(data)) == len(list(data)) == 2
    with pytest.raises(TypeError):
        len(data)


def test_a_tuple_is_refused_because_it_could_be_one_batch_or_several(workshop):
    workshop.write("nk_tuple", "import torch\ndef make():\n    return torch.ones(4, 2), torch.ones(4)\n")
    with pytest.raises(
        SourceError, match="returned a tuple of 2, which could be one batch or 2; return a list of batches"
    ):
        load_data("nk_tuple:make")


@pytest.mark.parametrize("value, kind", [("None", "NoneType"), ("'text'", "str"), ("{'x': 1}", "dict"), ("3", "int")])
def test_what_is_no_data_is_refused_with_its_type(workshop, value, kind):
    workshop.write(f"nk_wrong_{kind}", f"def make():\n    return {value}\n")
    with pytest.raises(
        SourceError, match=f"must return an iterable of batches, .*; it returned an object of type {kind}"
    ):
        load_data(f"nk_wrong_{kind}:make")
