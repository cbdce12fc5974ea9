"""The digest of data: the same in any batches and parts, and another for any other data."""

import json
import struct
from hashlib import blake2b

import numpy as np
import pytest
import torch

from netkin.errors import InvalidValue, ShapeError
from netkin.identity import DataDigest, UnorderedDigest
from netkin.identity import data as data_module


def images(n=12, dtype=torch.float32):
    return torch.randn(n, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(dtype)


def digest_of(data, numbers=None, size=None, labels=False):
    found = DataDigest(labels=labels)
    count = len(data[0]) if isinstance(data, tuple) else len(data)
    numbers = np.arange(count) if numbers is None else numbers
    size = size or count
    for start in range(0, count, size):
        part = slice(start, start + size)
        batch = tuple(one[part] for one in data) if isinstance(data, tuple) else data[part]
        found.update(batch, numbers[part])
    return found


def mix(z):
    """SplitMix64's finaliser, as it was published."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def transcribed(leaves, numbers, start=0):
    """The digest of arrays by their places, in Python's whole numbers."""
    total = 0
    for row, number in enumerate(numbers):
        content = start
        for place, array in leaves.items():
            key = f"{place} {array.dtype} {array.shape[1:]}"
            seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
            raw = array[row].tobytes()
            raw += bytes(-len(raw) % 4)
            content += mix((seed + 0x9E3779B97F4A7C15) % 2**64)
            for i, (word,) in enumerate(struct.iter_unpack("<i", raw), start=2):
                content += word * (mix((seed + i * 0x9E3779B97F4A7C15) % 2**64) | 1)
        total += mix((content + mix((number + 0x9E3779B97F4A7C15) % 2**64)) % 2**64)
    return f"{total % 2**64:016x}"


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "uint8", "int16", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2, 2), (5, 0)])
def test_the_digest_of_data_is_that_of_the_formula(kind, shape):
    array = (np.random.default_rng(0).normal(size=shape) * 50).astype(kind)
    numbers = np.array([3, 0, 9, 4, 2**40])
    assert digest_of(array, numbers).hex == transcribed({"": array}, numbers.tolist())
    assert digest_of(torch.from_numpy(array), torch.from_numpy(numbers)).hex == digest_of(array, numbers).hex


def test_nested_batches_count_with_the_places_of_their_arrays():
    rng = np.random.default_rng(0)
    ids, mask, labels = rng.integers(0, 9, (4, 6)), rng.integers(0, 2, (4, 6)), np.arange(4)
    batch = {"input_ids": ids, "more": [mask], "labels": labels}
    found, both = DataDigest(), DataDigest(labels=True)
    for one in (found, both):
        one.update(dict(reversed(batch.items())), range(4))
    leaves = {"/input_ids": ids, "/more/0": mask}
    assert found.hex == transcribed(leaves, range(4))
    assert both.hex == transcribed(leaves | {"/labels": labels}, range(4))


def test_what_holds_for_a_whole_batch_counts_for_each_of_its_examples():
    rows, scale = np.arange(12.0).reshape(4, 3), np.ones((1, 6), np.float32)

    def read(batch):
        found = DataDigest()
        found.update(batch, range(4))
        return found.hex

    batch = {"rows": rows, "scale": scale, "way": "up", "zero": torch.tensor(0.5)}
    described = b"/scale float32 (1, 6);" + scale.tobytes() + b"/way 'up';" + b"/zero float32 ();" + b"\0\0\0\x3f"
    start = int.from_bytes(blake2b(described, digest_size=8).digest(), "little")
    assert read(batch) == transcribed({"/rows": rows}, range(4), start)
    changes = [{"scale": 2 * scale}, {"scale": scale.T}, {"way": "down"}, {"zero": torch.tensor(0.25)}, {"more": 1}]
    found = {read(batch | change) for change in changes}
    assert len(found - {read(batch)}) == 5


def test_labels_count_only_if_told():
    data, labels = images(), torch.arange(12)
    assert digest_of((data, labels)) == digest_of(data) == digest_of((data, labels + 1))
    told = digest_of((data, labels), labels=True)
    assert told != digest_of((data, labels))
    assert told != digest_of((data, labels + 1), labels=True)
    assert told == digest_of((data, labels), size=5, labels=True)


@pytest.mark.parametrize("size", [1, 5, 12])
def test_batches_their_order_and_parts_do_not_matter(size):
    data, whole = images(), digest_of(images())
    assert digest_of(data, size=size) == whole
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert digest_of(data[order], order, size=size) == whole
    parts = [digest_of(data[start::3], np.arange(start, 12, 3), size=size) for start in range(3)]
    first = parts[0]
    first.merge(parts[2])
    first.merge(parts[1])
    assert (first, first.count, first.ranges) == (whole, 12, [(0, 12)])


def test_the_hashes_of_many_batches_are_folded(monkeypatch):
    monkeypatch.setattr(data_module, "PENDING", 2)
    found = digest_of(images(), size=1)
    assert (found.hex, found.count) == (digest_of(images()).hex, 12)


def test_rows_are_hashed_in_portions(monkeypatch):
    whole = digest_of(images())
    monkeypatch.setattr(data_module, "AT_ONCE", {"cpu": 200})
    assert digest_of(images()) == whole


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.uint8], ids=str)
def test_any_change_of_the_data_gives_another_digest(kind):
    data = (images() * 40).to(kind)
    found = {digest_of(data).hex}
    pixel = data.clone()
    pixel[7, 2, 4, 4] += 1
    swapped = data.flip(3)
    order = torch.tensor([1, 0, *range(2, 12)])
    for other in (pixel, swapped, data.transpose(2, 3), data[order], data[:11], -data, data.reshape(12, 15, 5)):
        found.add(digest_of(other).hex)
    found.add(digest_of(data, np.arange(1, 13)).hex)
    found.add(digest_of(data.half()).hex)
    assert len(found) == 10


def test_a_word_swapped_with_the_next_and_signs_in_pairs_are_noticed():
    data = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(2, 4)
    found = {digest_of(data[:, order]).hex for order in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3, 2])}
    # sums of products of whole 64-bit words would not see this: a sign adds 2^63, two of them nothing
    found |= {digest_of(data * torch.tensor([[-1.0, -1.0, 1.0, 1.0]])).hex, digest_of(-data).hex}
    assert len(found) == 5


def test_views_and_odd_layouts_have_the_digest_of_their_values():
    data = images(12, torch.uint8)[:, :1, :3, :1]
    raw = torch.arange(40, dtype=torch.uint8)
    for view in (data.flip(0), raw[1:37].reshape(12, 3), raw[3:39].reshape(9, 4).T, images().permute(0, 3, 1, 2)):
        assert digest_of(view) == digest_of(view.clone(memory_format=torch.contiguous_format))
    array = np.arange(36, dtype=np.float32).reshape(12, 3)
    frozen = array.copy()
    frozen.flags.writeable = False
    for other in (frozen, array.astype(">f4"), np.asfortranarray(array), array[::-1].copy()[::-1]):
        assert digest_of(other) == digest_of(array)


def test_texts_and_lists_of_numbers_count():
    found = {digest_of(texts).hex for texts in (["one", "two"], ["two", "one"], ["one", "twO"], [1, 2], [1, 3])}
    assert len(found) == 5
    assert digest_of(np.array(["one", "two"])) == digest_of(["one", "two"])


def test_parts_that_overlap_are_refused():
    first, second = digest_of(images(6)), digest_of(images(6), np.arange(4, 10))
    with pytest.raises(InvalidValue, match="2 examples are counted twice, the first of them number 4; parts of data"):
        first.merge(second)
    assert first == digest_of(images(6))
    with pytest.raises(InvalidValue, match="1 examples are counted twice, the first of them number 3"):
        digest_of(images(3), np.array([3, 1, 3])).hex  # noqa: B018


def test_a_digest_survives_json_and_goes_on():
    found = digest_of(images(6), np.array([9, 0, 1, 2, 3, 4]))
    told = json.loads(found.to_json())
    assert told == {"digest": found.hex, "labels": False, "ranges": [[0, 5], [9, 10]]}
    read = DataDigest.from_json(found.to_json())
    assert (read, read.count, repr(read)) == (found, 6, f"DataDigest({found.hex}, 6 examples)")
    for one in (read, found):
        one.update(images(2), [5, 6])
    assert read == found
    empty = DataDigest.from_json(DataDigest().to_json())
    assert (empty, empty.hex, empty.count, empty.ranges) == (DataDigest(), "0" * 16, 0, [])
    assert read != "a text"


def test_what_has_no_examples_is_refused():
    found = DataDigest()
    found.update(images(0), [])
    assert found.count == 0
    with pytest.raises(ShapeError, match="the batch, of type Tensor, holds no array of 5 examples, as many as there"):
        found.update(images(4), range(5))
    for array, kind in ((np.array([None, {}]), "object"), (np.ones(2, np.longdouble), "float128")):
        with pytest.raises(InvalidValue, match=f"an array of dtype {kind} has no digest; give numbers"):
            found.update(array, range(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_data_on_the_gpu_have_the_digest_of_the_cpu():
    data = images(200)
    assert digest_of(data.cuda(), torch.arange(200).cuda(), size=64) == digest_of(data)


def examples_and_labels():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(30, 3, generator=generator), torch.randint(0, 3, (30,), generator=generator)


def unordered(inputs, labels, size=10):
    digest = UnorderedDigest()
    for batch in zip(inputs.split(size), labels.split(size), strict=True):
        digest.update(batch, len(batch[0]))
    return str(digest)


def test_without_numbers_data_have_the_same_digest_in_any_order_and_any_batches():
    inputs, labels = examples_and_labels()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    digest = unordered(inputs, labels)
    assert digest.startswith("30 examples, mark ")
    assert digest == unordered(inputs[order], labels[order], 7) == unordered(inputs, labels, 1)


@pytest.mark.parametrize("change", ["input", "label", "pairing", "twice"])
def test_without_numbers_other_data_have_another_digest(change):
    inputs, labels = examples_and_labels()
    other = [inputs.clone(), labels.clone()]
    if change == "input":
        other[0][4, 1] += 1e-6
    elif change == "label":
        other[1][4] = 2 - other[1][4] + (other[1][4] == 1)
    elif change == "pairing":
        other[1] = labels.roll(1)
    else:
        other = [torch.cat([one, one[:1]]) for one in other]
    assert unordered(inputs, labels) != unordered(*other)
