"""The digest of weights: any bit changes it; devices, layouts and chunks do not."""

import copy
from hashlib import blake2b

import numpy as np
import pytest
import torch
from torch import nn

from netkin.errors import InvalidValue
from netkin.identity import form_difference, form_of, weight_hash, weights_digest


def net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)


def transcribed(state):
    """Return the digest of weights by the formula, one word after the other, in Python's own whole numbers."""

    def mixed(word):
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    gamma, block, total = 0x9E3779B97F4A7C15, 2**13, [0, 0]
    for name, tensor in state.items():
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        digest, data = blake2b(head.encode(), digest_size=16).digest(), tensor.numpy().tobytes()
        for lane in range(2):
            seed = int.from_bytes(digest[8 * lane : 8 * lane + 8], "little")
            total[lane] += mixed(seed)
            for start in range(0, len(data), 4):
                number, place = divmod(start // 4, block)
                word = int.from_bytes(data[start : start + 4].ljust(4, b"\0"), "little", signed=True)
                key = mixed((seed + (number + 1) * gamma) % 2**64) | 1
                total[lane] += key * (mixed((lane * block + place + 1) * gamma % 2**64) | 1) * word
    return "".join(f"{mixed(lane % 2**64):016x}" for lane in total)


def test_the_digest_follows_the_formula():
    draw = torch.Generator().manual_seed(0)
    state = {"w": torch.randn(131, 127, generator=draw), "half": torch.randn(5, generator=draw).half()}
    assert weights_digest(state) == transcribed(state)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
def test_every_bit_counts(dtype):
    tensor = torch.arange(1, 8).to(dtype)
    found = {weights_digest({"w": tensor})}
    bits = 1 if dtype == torch.bool else 8 * tensor.element_size()
    for place in range(len(tensor)):
        for bit in range(bits):
            other = tensor.clone()
            byte = place * tensor.element_size() + bit // 8
            other.view(torch.uint8).numpy()[byte] ^= np.uint8(1 << bit % 8)
            found.add(weights_digest({"w": other}))
    assert len(found) == 1 + bits * len(tensor)


def test_random_changes_of_a_large_tensor_count():
    draw = np.random.default_rng(0)
    tensor = torch.randn(40_001, generator=torch.Generator().manual_seed(0)).bfloat16()  # blocks, and half a word
    words, found = tensor.view(torch.int16).numpy(), {}
    for _ in range(50):
        first, second = draw.integers(0, len(tensor), 2)
        words[first] ^= 1 << int(draw.integers(0, 15))
        found[words.tobytes()] = weights_digest({"w": tensor})
        words[[first, second]] = words[[second, first]]
        found[words.tobytes()] = weights_digest({"w": tensor})
        words[[first, second]] ^= np.int16(-(2**15))  # both signs
        found[words.tobytes()] = weights_digest({"w": tensor})
    assert len(set(found.values())) == len(found) > 140


def test_values_that_are_equal_but_for_their_bits_count():
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    for one, other in [(torch.tensor([0.0]), torch.tensor([-0.0])), (nans[:1], nans[1:])]:
        assert weights_digest({"w": one}) != weights_digest({"w": other})


def test_names_shapes_and_kinds_count_and_order_does_not():
    a, b = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), torch.ones(2, 3)
    states = [
        {"a": a, "b": b}, {"a": b, "b": a}, {"a": a}, {"a": a, "c": b}, {"a": a.T.contiguous(), "b": b}, {},
        {"a": a.double(), "b": b}, {"a": a, "b": b.int()}, {"a": torch.empty(0, 3)}, {"a": torch.empty(3, 0)},
        {"a": torch.zeros(2)}, {"a": torch.zeros(3)}, {"a": torch.zeros(2, dtype=torch.int32)},
    ]  # fmt: skip
    assert len({weights_digest(state) for state in states}) == len(states)
    assert weights_digest({"b": b, "a": a}) == weights_digest({"a": a, "b": b})
    assert weights_digest(nn.Module()) == weights_digest({})


def test_layout_and_chunks_do_not_count(monkeypatch):
    whole = torch.randn(300, 301, generator=torch.Generator().manual_seed(0))
    digest = weights_digest({"w": whole})
    views = [whole.T.contiguous().T, torch.cat([whole[:1], whole])[1:], whole.to_sparse(), torch._neg_view(-whole)]
    assert {weights_digest({"w": view}) for view in views} == {digest}
    odd = whole.bfloat16().flatten()[1:]  # begins within a word
    assert weights_digest({"w": odd}) == weights_digest({"w": odd.clone()})
    for at_once, pieces in ((2**13, 1), (2**20, 99)):
        monkeypatch.setitem(weight_hash.AT_ONCE, "cpu", at_once)
        monkeypatch.setattr(weight_hash, "PIECES", pieces)
        assert weights_digest({"w": whole}) == digest
    weight = torch.randn(3, 4, dtype=torch.complex64)
    assert weights_digest({"w": weight.conj()}) == weights_digest({"w": weight.conj().resolve_conj()})
    assert weights_digest({"w": weight.conj()}) != weights_digest({"w": weight})


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_to_the_coarser_precision_a_model_and_its_copy_agree(precision):
    model, copied = net(torch.float64), net(torch.float64).to(precision)
    assert weights_digest(copied, precision) == weights_digest(model, precision) == weights_digest(copied)
    assert weights_digest(copied) != weights_digest(model)
    assert weights_digest(net(torch.float64, seed=1), precision) != weights_digest(model, precision)
    counts = [{"n": torch.tensor(number)} for number in (2**24, 2**24 + 1)]  # one is not in float32
    assert weights_digest(counts[0], precision) != weights_digest(counts[1], precision)


def test_tied_weights_are_read_once_and_count_under_each_of_their_names(monkeypatch):
    tied, apart = (nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)) for _ in range(2))
    tied[1].weight = tied[0].weight
    apart.load_state_dict(tied.state_dict())
    assert weights_digest(tied) == weights_digest(apart) != weights_digest(tied[:1])
    read, counted = [], weight_hash._words
    monkeypatch.setattr(weight_hash, "_words", lambda tensor: read.append(1) or counted(tensor))
    weights_digest(tied)
    assert len(read) == 1


def test_wrappers_of_torch_do_not_count():
    model = net()
    inside = nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:])
    wrapped = [nn.DataParallel(model), torch.compile(model, backend="eager"), inside, model.state_dict()]
    assert {weights_digest(one) for one in wrapped} == {weights_digest(model)}


def test_offloaded_weights_are_read_from_where_they_are(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, here = net(), {"execution_device": torch.device("cpu")}
    in_memory = accelerate.cpu_offload(copy.deepcopy(model), offload_buffers=True, **here)
    on_disk = accelerate.disk_offload(copy.deepcopy(model), tmp_path, **here)
    for offloaded in (in_memory, on_disk):
        assert offloaded[0].weight.is_meta
        assert weights_digest(offloaded) == weights_digest(model)
        assert form_difference(form_of(model), form_of(offloaded)) == ""


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype.*:UserWarning")
def test_nested_weights_have_a_digest_that_changes_with_them(layout):
    def digest(*parts):
        return weights_digest({"weight": torch.nested.nested_tensor(list(parts), layout=layout)})

    assert digest(torch.ones(2), torch.ones(3)) == digest(torch.ones(2), torch.ones(3))
    assert digest(torch.ones(2), torch.ones(3)) != digest(torch.ones(3), torch.ones(2))
    assert digest(torch.ones(2), torch.ones(3)) != digest(torch.ones(2), torch.zeros(3))


def test_weights_without_values_are_refused():
    for model in (nn.Linear(2, 2, device="meta"), nn.LazyLinear(2)):
        with pytest.raises(InvalidValue):
            weights_digest(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_on_the_gpu_have_the_digest_of_the_cpu():
    for dtype in (torch.float32, torch.bfloat16):
        state = {"w": torch.randn(3001, 777).to(dtype), "b": torch.randn(7).to(dtype)}
        assert weights_digest({name: one.cuda() for name, one in state.items()}) == weights_digest(state)
