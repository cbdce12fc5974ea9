"""Samples: drawn over the whole set, the same each time, in the order of the set, and named as what they are."""

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from netkin.errors import InvalidValue, SourceError
from netkin.sources import load_data
from netkin.sources.batches import Batches, Borrowed, overlap_remark, sample
from refusals import refused


@pytest.fixture
def folder(tmp_path):
    """An image folder of 4 classes of 30 pictures, which tell their class by their colour."""
    pillow = pytest.importorskip("PIL.Image", reason="image files need Pillow: pip install 'netkin[images]'")
    for label, name in enumerate(("airplane", "bird", "cat", "dog")):
        (tmp_path / name).mkdir()
        for place in range(30):
            pillow.fromarray(np.full((4, 4, 3), 50 * label, np.uint8)).save(tmp_path / name / f"{place:02}.png")
    return tmp_path


def of_classes(*counts, name="sorted"):
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return Batches(name, torch.arange(float(len(labels)))[:, None], labels, batch_size=7)


def in_loader(data, **options):
    return Borrowed("own:data", DataLoader(TensorDataset(data.stored, data.labels), batch_size=7, **options))


def test_a_sample_of_a_sorted_folder_is_of_all_classes(folder):
    data = load_data(f"images:{folder}")
    some = sample(data, 20)
    assert (some.examples, len(some.labels.unique())) == (20, 4)
    assert (some.stored[:, 0, 0, 0] == 50 * some.labels).all()
    assert (some.labels.diff() >= 0).all()
    assert some.name == f"images:{folder}, a sample of 20 of 120 (seed 0)"
    assert data.examples == 120


def test_a_balanced_sample_has_as_many_of_each_class(folder):
    some = sample(load_data(f"images:{folder}"), 20, balanced=True, seed=3)
    assert some.labels.bincount().tolist() == [5, 5, 5, 5]
    assert some.name == f"images:{folder}, a balanced sample of 20 of 120 (seed 3)"


def test_a_sample_holds_each_example_once_in_order_and_depends_on_the_seed():
    data = of_classes(100, 50)
    some, again, other = (sample(data, 40, seed=seed).stored.flatten() for seed in (0, 0, 1))
    assert (some.diff() > 0).all()
    assert some.equal(again)
    assert not some.equal(other)
    # the mean of 40 of 0..149 without return: 74.5 ± 6
    means = torch.stack([sample(data, 40, seed=seed).stored.mean() for seed in range(50)])
    assert abs(means.mean() - 74.5) < 3
    assert 4 < means.std() < 8


def test_what_is_left_over_in_a_balanced_sample_goes_to_different_classes():
    found = torch.stack([sample(of_classes(9, 9, 9), 8, seed=s, balanced=True).labels.bincount() for s in range(20)])
    assert (found.sum(1) == 8).all()
    assert (found.min(), found.max()) == (2, 3)
    assert (found == 2).any(0).all()


@pytest.mark.parametrize("count", [None, 12, 50])
def test_all_examples_are_no_sample(count):
    data = of_classes(4, 8)
    assert sample(data, count) is data


def test_data_without_labels_are_sampled():
    some = sample(Batches("plain", torch.arange(9.0)), 3)
    assert (some.examples, some.labels) == (3, None)
    with pytest.raises(SourceError, match="the classes of 'plain' are not known, so no balanced sample of them can be"):
        sample(Batches("plain", torch.arange(9.0)), 3, balanced=True)


@pytest.mark.parametrize(
    "count, argument",
    [(2, "examples"),
     (10, "examples")],
)  # fmt: skip
def test_what_cannot_be_balanced_is_refused_with_the_numbers(count, argument):
    with refused(InvalidValue, argument):
        sample(of_classes(9, 2, 9), count, balanced=True)


def test_less_than_one_example_is_refused():
    with refused(InvalidValue, "examples"):
        sample(of_classes(4), 0)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}])
@pytest.mark.parametrize("balanced", [False, True])
def test_a_loader_over_numbered_examples_is_sampled_alike(balanced, options):
    data = of_classes(30, 30)
    some = sample(in_loader(data, **options), 10, balanced=balanced, seed=2)
    expected = sample(data, 10, balanced=balanced, seed=2)
    assert torch.cat([rows for rows, _ in some]).equal(expected.stored)
    assert torch.cat([labels for _, labels in some]).equal(expected.labels)
    assert some.name == f"own:data, a {'balanced ' * balanced}sample of 10 of 60 (seed 2)"
    assert (some.examples, len(some)) == (10, 2)


class Named(Dataset):
    """Examples with their classes in an attribute."""

    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return 12

    def __getitem__(self, place):
        return torch.tensor([float(place)])


def test_labels_are_found_where_data_sets_keep_them():
    targets = [0] * 6 + [1] * 6
    for dataset in (Named(targets), Subset(Named(targets), range(3, 9))):
        some = sample(Borrowed("own:data", DataLoader(dataset)), 4, balanced=True)
        assert sum(float(batch) >= 6 for batch in some) == 2
    for odd in (None, [0.5] * 12, [0] * 11):
        with pytest.raises(SourceError, match="are not known, so no balanced sample .* with the attribute `targets`"):
            sample(Borrowed("own:data", DataLoader(Named(odd))), 4, balanced=True)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(20.0))


@pytest.mark.parametrize(
    "batches",
    [
        [torch.ones(5, 2)] * 4,
        DataLoader(Stream(), batch_size=5),
        DataLoader(TensorDataset(torch.ones(20, 2)), batch_size=5, sampler=SubsetRandomSampler([1, 2, 3])),
        DataLoader(TensorDataset(torch.ones(20, 2)), batch_sampler=[[1, 2], [3]]),
        DataLoader(TensorDataset(torch.ones(20, 2)), batch_size=None),
    ],
    ids=["list", "stream", "sampler", "batch sampler", "no batches"],
)
def test_of_data_without_numbers_the_first_are_taken_and_that_is_said(batches):
    data = Borrowed("own:data", batches)
    some = sample(data, 1_000)
    assert (some.name, some.batches) == ("own:data, the first 1,000 examples", batches)
    with pytest.raises(SourceError, match="the classes of 'own:data' are not known"):
        sample(data, 4, balanced=True)


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: x,
        lambda x: x.numpy(),
        lambda x: x.flip(0).numpy()[::-1],
        lambda x: list(x.split(7)),
        lambda x: [(part, torch.zeros(len(part))) for part in x.split(7)],
        lambda x: DataLoader(TensorDataset(x, torch.zeros(len(x))), 7),
        lambda x: Batches("x", x),
    ],
    ids=["tensor", "array", "turned", "list", "labelled", "loader", "loaded"],
)
def test_test_examples_among_the_data_are_counted_by_their_inputs(kind):
    x = torch.randn(30, 3)
    data, test = kind(x[:20]), kind(torch.cat([x[15:].flip(0), x[:2]]))
    among = {tuple(row) for row in x[:20].tolist()}
    count = sum(tuple(row) in among for row in torch.cat([x[15:], x[:2]]).tolist())
    assert overlap_remark(data, test).startswith(f"{count} of the 17 test examples are also among the 20 of `data`, ")
    assert overlap_remark(data, test, examples=10).startswith("2 of the 17 test examples are also among the 10 of")
    assert overlap_remark(data, kind(x[20:])) == ""
    assert overlap_remark(data, test, 15, 10) == ""


def test_examples_that_a_sampler_may_leave_out_are_not_counted():
    both = TensorDataset(torch.randn(30, 3))
    train, test = (DataLoader(both, 5, sampler=SubsetRandomSampler(range(*ends))) for ends in ((20,), (20, 30)))
    assert overlap_remark(train, test) == ""
    whole, shuffled = DataLoader(both, 7), DataLoader(both, 7, shuffle=True)
    for some in (
        train,
        DataLoader(both, batch_sampler=[[0, 1], [2, 3]]),
        DataLoader(both, 7, shuffle=True, drop_last=True),
        DataLoader(both, 7, sampler=RandomSampler(both, num_samples=5)),
    ):
        assert overlap_remark(some, whole) == overlap_remark(whole, some) == ""
    assert overlap_remark(shuffled, whole).startswith("30 of the 30 test examples are also among the 30 of `data`, ")
    assert overlap_remark(shuffled, whole, examples=10) == ""  # which ten are read is not known


def test_examples_that_would_have_to_be_read_are_not_counted():
    x = torch.randn(8, 3)

    class Lazy(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, place):
            raise AssertionError("read")

    for data in (DataLoader(Lazy()), iter([x]), [x, torch.ones(3, 4)], {"x": x}, [], None):
        assert overlap_remark(data, x) == ""
    for data in (np.array(["a", "b"]), list(torch.ones(3)), x.to_sparse()):
        assert overlap_remark(data, data) == ""


def test_classes_are_known_from_labels_of_another_byte_order():
    loader = DataLoader(Labelled(np.arange(12, dtype=">i8") % 3), batch_size=4)
    some = sample(Borrowed("mine", loader), 6, balanced=True)
    assert sorted(int(label) % 3 for batch in some for label in batch) == [0, 0, 1, 1, 2, 2]


class Labelled(Dataset):
    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, place):
        return place
