import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from netkin.errors import InvalidValue, SourceError, UnknownName
from netkin.sources import load_data
from netkin.sources.datasets import CATALOGUE, Batches
from refusals import refusals, refused


def test_data_at_a_path_that_is_no_utf_8_need_a_name(tmp_path):
    path = tmp_path / "\udcff.npz"
    np.savez(path, x=np.ones((4, 2), dtype=np.float32))
    with pytest.raises(InvalidValue, match=r"got 'npz:.*\\udcff.npz'; name the data, as in `NAME=KIND:PLACE`\."):
        load_data(f"npz:{path}")
    assert load_data(f"ones=npz:{path}").name == "ones"


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
        UnknownName, match=r"the digits have no part 'tests'; did you mean 'test'\? There are `digits:train`"
    ):
        load_data("digits:tests")
    with pytest.raises(UnknownName, match=r"no part '7'\. There are"):
        load_data("digits:7")


def test_a_batch_of_nothing_is_refused():
    with refused(InvalidValue, "batch_size"):
        load_data("digits", batch_size=0)


def test_an_unknown_data_set_is_refused_with_the_nearest_name():
    refusals(
        (lambda: load_data("digit"), UnknownName, ""),
        (lambda: load_data("places"), UnknownName, ""),
        (lambda: load_data("cifar1,normalise=none:data"), UnknownName, ""),
    )


def test_a_mistyped_data_set_with_a_folder_is_recognised(workshop):
    with pytest.raises(SourceError, match=r"did you mean 'cifar10'\?"):
        load_data("cifar:data")


def test_a_data_set_without_its_place_is_refused():
    with pytest.raises(SourceError, match="'cifar10' does not say where the data are; write 'cifar10:DIR'"):
        load_data("cifar10")
    with pytest.raises(SourceError, match="'npz:' does not say where the data are; write 'npz:FILE'"):
        load_data("npz:")


# options


def test_options_stand_in_the_name_or_are_keywords(fake_cifar10):
    spec = f"cifar10,normalise=imagenet:{fake_cifar10}"
    written, given = load_data(spec), load_data(f"cifar10:{fake_cifar10}", normalise="imagenet")
    assert torch.equal(written.images, given.images)
    assert written.name == given.name == spec


def test_an_unknown_option_is_refused_with_the_nearest_one(fake_cifar10):
    with pytest.raises(
        UnknownName,
        match=r"'cifar10' has no option 'normalize'; did you mean 'normalise'\? It has normalise\.",
    ):
        load_data(f"cifar10,normalize=none:{fake_cifar10}")
    with pytest.raises(UnknownName, match=r"'digits' has no option 'size'\. It has none\."):
        load_data("digits", size=3)


def test_what_is_no_option_is_refused():
    with pytest.raises(InvalidValue, match="'imagenet' in 'cifar10,imagenet' is no option; write NAME,option=value"):
        load_data("cifar10,imagenet:data")


def test_an_option_that_must_be_a_number_says_so():
    with pytest.raises(InvalidValue, match="option 'size' of 'images' must be a whole number from 1; got 'big'"):
        load_data("images,size=big:data")


def test_a_function_takes_no_options(workshop):
    with pytest.raises(InvalidValue, match="'nk_any:make' is a function and takes no options; got size"):
        load_data("nk_any:make", size=3)


# the catalogue


def test_the_catalogue_says_of_each_source_what_it_is_and_where_it_is_looked_for():
    assert all(source.what and source.where and source.example for source in CATALOGUE)
    assert len({source.name for source in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize("source", [source for source in CATALOGUE if source.load], ids=lambda source: source.name)
def test_the_examples_of_the_catalogue_name_their_source_and_options_it_has(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source.example.startswith(source.name)
    if source.needs_place:
        with pytest.raises(SourceError, match="found no|is no folder"):
            load_data(source.example)


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
    with pytest.raises(SourceError, match="such as a list.*returned an object of type tuple"):
        load_data("nk_tuple:make")


@pytest.mark.parametrize("value, kind", [("None", "NoneType"), ("'text'", "str"), ("{'x': 1}", "dict"), ("3", "int")])
def test_what_is_no_data_is_refused_with_its_type(workshop, value, kind):
    workshop.write(f"nk_wrong_{kind}", f"def make():\n    return {value}\n")
    with pytest.raises(SourceError, match=f"must return an iterable of batches, .* returned an object of type {kind}"):
        load_data(f"nk_wrong_{kind}:make")


def test_a_folder_without_its_kind_is_taken_for_images(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UnknownName, match="no data set named 'photos'; it is a folder: did you mean 'images:photos'\\?"
    ):
        load_data("photos")


@pytest.mark.parametrize(
    "body",
    [
        "def make():\n    yield torch.ones(2, 3)\n    raise KeyError('pixels')\n",
        "class Broken(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 3\n"
        "    def __getitem__(self, place):\n        raise KeyError('pixels')\n"
        "def make():\n    return Broken()\n",
    ],
)
def test_an_error_inside_a_users_data_becomes_one_sentence(workshop, body):
    workshop.write("nk_broken", f"import torch\n{body}")
    data = load_data("nk_broken:make")
    with pytest.raises(SourceError, match="^'nk_broken:make' raised KeyError: 'pixels'.$") as refusal:
        list(data)
    assert isinstance(refusal.value.__cause__, KeyError)


def test_a_function_that_returns_a_single_number_is_refused(workshop):
    workshop.write("nk_number", "import torch\ndef make():\n    return torch.tensor(1.0)\n")
    with pytest.raises(SourceError, match="'nk_number:make' must return an iterable of batches"):
        load_data("nk_number:make")
