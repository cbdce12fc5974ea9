"""Mutated files: each becomes a model or data, or is refused in one sentence; nothing else comes out of a reader."""

import gzip
import io
import json
import pickle
import random
import struct
import zipfile
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

from netkin.errors import NetkinError
from netkin.sources import load_data
from netkin.sources.weights import load_weights

MUTATIONS = 60


def network():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def in_memory(write):
    target = io.BytesIO()
    write(target)
    return target.getvalue()


def torch_file(zipped):
    content = {"state_dict": network().state_dict(), "epoch": 3, "optimizer": {"lr": 0.1, "state": {0: torch.ones(2)}}}
    return in_memory(lambda target: torch.save(content, target, _use_new_zipfile_serialization=zipped))


def image(kind):
    pillow = pytest.importorskip("PIL.Image", reason="image files need Pillow: pip install 'netkin[images]'")
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    return in_memory(lambda target: pillow.fromarray(pixels).save(target, kind))


def matlab():
    from scipy.io import savemat

    arrays = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((2, 1), np.uint8)}
    return in_memory(lambda target: savemat(target, arrays, do_compression=True))


def cifar(protocol):
    arrays = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2], b"filenames": [b"a", b"b"]}
    return pickle.dumps(arrays, protocol)


IDX = struct.pack(">4I", 2051, 2, 28, 28) + bytes(1568)
LABELS = struct.pack(">2I", 2049, 2) + b"\1\2"

# the name of the file, its content, and what is read
READERS = {
    "torch": ("a.pt", lambda: torch_file(True), "weights"),
    "older torch": ("a.pt", lambda: torch_file(False), "weights"),
    "safetensors": ("a.safetensors", lambda: save(network().state_dict()), "weights"),
    "npz": ("a.npz", lambda: in_memory(lambda to: np.savez(to, x=np.ones((5, 4)), y=np.arange(5))), "npz:{}/a.npz"),
    "cifar pickle": ("test_batch", lambda: cifar(2), "cifar10:{}"),
    "cifar pickle 5": ("test_batch", lambda: cifar(5), "cifar10:{}"),
    "cifar binary": ("test_batch.bin", lambda: bytes(2 * 3073), "cifar10:{}"),
    "svhn": ("test_32x32.mat", matlab, "svhn:{}"),
    "mnist": ("t10k-images-idx3-ubyte", lambda: IDX, "mnist:{}"),
    "mnist, packed": ("t10k-images-idx3-ubyte.gz", lambda: gzip.compress(IDX), "mnist:{}"),
    "text": ("a.txt", lambda: b"a text of some words, " * 20, "text:{}/a.txt"),
}
if find_spec("PIL"):
    for one in ("png", "jpeg", "gif", "bmp", "tiff", "webp"):
        READERS[one] = (f"a.{one}", lambda one=one: image(one), "images:{}")


def mutated(content, chance):
    """Return `content` with one to ten bytes changed, left out, repeated or put in."""
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 4, 10])):
        place, length = chance.randrange(len(changed) or 1), chance.randrange(1, 20)
        kind = chance.randrange(5)
        if kind == 0:
            changed[place : place + 1] = chance.randbytes(1)
        elif kind == 1:
            del changed[place : place + length]
        elif kind == 2:
            changed[place:place] = chance.randbytes(length)
        elif kind == 3:
            changed[place : place + 4] = chance.choice([b"\xff\xff\xff\x7f", b"\xff" * 4, bytes(4), b"\0\0\0\x80"])
        else:
            other = chance.randrange(len(changed) or 1)
            changed[place : place + length] = changed[other : other + length]
    return bytes(changed)


def mutated_inside(content, chance):
    """Return a zip archive with one of its entries mutated and all sums right."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    chosen = chance.choice(list(entries))
    entries[chosen] = mutated(entries[chosen], chance)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, entry in entries.items():
            archive.writestr(name, entry)
    return target.getvalue()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore")
def test_a_mutated_file_is_read_or_refused_in_one_sentence(tmp_path, reader):
    name, write, place = READERS[reader]
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(LABELS)
    content, chance = write(), random.Random(reader)
    versions = [content, *(_changed(content, chance) for _ in range(MUTATIONS))]
    said = [_outcome(tmp_path, name, place, version) for version in versions]
    assert said[0] == "was read"
    assert {one == "was read" for one in said} == {True, False}
    assert not any("\n" in one for one in said)


def _changed(content, chance):
    inside = content[:2] == b"PK" and chance.randrange(2)
    return (mutated_inside if inside else mutated)(content, chance)


def _outcome(folder, name, place, content):
    (folder / name).write_bytes(content)
    try:
        load_weights(network(), folder / name) if place == "weights" else list(load_data(place.format(folder)))
    except NetkinError as refusal:
        return str(refusal)
    return "was read"


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "", "x", [], {}, [[]]])
@pytest.mark.parametrize("key", ["model_type", "architectures", "hidden_size", "num_hidden_layers", "hidden_act"])
def test_a_mutated_configuration_is_refused_in_one_sentence(tmp_path, key, value):
    from netkin.sources import load_model

    pytest.importorskip("transformers", reason="needs transformers: pip install 'netkin[hf]'")
    config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, "num_hidden_layers": 1,
              "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    (tmp_path / "model.safetensors").write_bytes(save({"other": torch.ones(1)}))
    with pytest.raises(NetkinError) as refusal:
        load_model(f"hf:{tmp_path}")
    assert "\n" not in str(refusal.value)
