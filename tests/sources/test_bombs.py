"""Tiny files that ask for much: each is read under limits on memory and computing time, and refused in one sentence."""

import bz2
import gzip
import json
import lzma
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("resource", reason="limits are set by `resource`, which this system has not")
HERE = [name for name in ("PIL", "transformers") if find_spec(name)]
pytestmark = pytest.mark.slow
ROOM, SECONDS = 2**29, 10  # what a reader may take beyond what is imported, and how long it may compute

# forks for each file, so that netkin is imported once; a child dies where it computes longer than it may
READING = f"""
import json, os, resource, sys, threading
import torch
from pathlib import Path
from netkin.errors import NetkinError
from netkin.sources import load_data, load_model
from netkin.sources.weights import read_state

def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

def read(kind, path):
    if kind == "weights":
        return read_state(Path(path))
    return load_model(path) if kind == "model" else list(load_data(kind + ":" + path))

def told(kind, path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + {ROOM},) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS},) * 2)
    try:
        read(kind, path)
        said = "was read"
    except NetkinError as error:
        said = "ran out of memory" if any(isinstance(one, MemoryError) for one in chain(error)) else str(error)
    except BaseException as error:
        said = f"raw {{type(error).__name__}}: {{error}}"
    return said

if any(kind == "model" for kind, _ in json.loads(sys.argv[1]).values()):
    import transformers
    transformers.BertModel, transformers.AutoConfig  # imported here, once for all
found = {{}}
for name, (kind, path) in json.loads(sys.argv[1]).items():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, told(kind, path).encode()[:4000])
        os._exit(0)
    os.close(writing)
    _, status, _ = os.wait4(child, 0)
    found[name] = os.read(reading, 4000).decode() if status == 0 else f"was killed by signal {{status}}"
    os.close(reading)
print(json.dumps(found))
"""


def torch_zip(path, pickled, **entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **entries}.items():
            archive.writestr(f"a/{name}", content)


def torch_older(path, pickled):
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
    path.write_bytes(b"".join(pickle.dumps(one, 2) for one in head) + pickled + pickle.dumps(["0"], 2))


def nested(end):
    """A pickle that pairs a tuple with itself sixty times, as memo 1, and goes on with `end`."""
    return b"\x80\x02)q\x010" + b"h\x01h\x01\x86q\x010" * 60 + end


def packed_tar(pack):
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 2**30
    return pack(name.tobuf(tarfile.GNU_FORMAT)) + pack(bytes(2**24)) * 64


def matlab(name, dimensions, size):
    """A packed MATLAB array of `size` zeros, whatever its dimensions say."""

    def element(kind, content):
        return struct.pack("<2I", kind, len(content)) + content + bytes(-len(content) % 8)

    head = element(6, struct.pack("<2I", 9, 0)) + element(5, struct.pack(f"<{len(dimensions)}i", *dimensions))
    head += element(1, name) + struct.pack("<2I", 2, size)
    packer = zlib.compressobj(9)
    start = packer.compress(struct.pack("<2I", 14, len(head) + size) + head) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(2**22)) + packer.flush(zlib.Z_FULL_FLUSH)  # can be repeated
    packed = start + block * (size // 2**22 + 1)
    return struct.pack("<2I", 15, len(packed)) + packed


def folder(path, **files):
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def bert(path, **changes):
    config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 30}  # fmt: skip
    return folder(path, **{"config.json": json.dumps(config | changes).encode(), "pytorch_model.bin": b""})


BYTEARRAY = b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R."
STORAGE = (
    b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu\x8a\x05\x00\x00\x00\x00\x01NtQK\x00K\x04\x85K\x01\x85\x89ccollections\n"
    b"OrderedDict\n)RtRs."
)
ENCODED = b"\x80\x02X\x04\x00\x00\x00aaaaq\x010"
ENCODED += b"c_codecs\nencode\nh\x01X\x03\x00\x00\x00hex\x86Rq\x010" * 30 + b"h\x01."
TENSOR = BYTEARRAY.replace(b"__builtin__\nbytearray", b"torch\nFloatTensor")
COPIED = b"\x80\x02X" + struct.pack("<I", 10**6) + b"a" * 10**6 + b"q\x010]"
COPIED += b"c_codecs\nencode\nh\x01X\x06\x00\x00\x00latin1\x86Ra" * 2000 + b"."

# what is read, and what is said of it
WEIGHTS = {
    "tar-in-bz2": (lambda path: path.write_bytes(packed_tar(bz2.compress)), "is damaged or not a weights file"),
    "tar-in-xz": (lambda path: path.write_bytes(packed_tar(lzma.compress)), "is damaged or not a weights file"),
    "keys": (lambda path: torch_zip(path, nested(b"}h\x01K\x01s.")), "asks for keys that are no plain values"),
    "keys-older": (lambda path: torch_older(path, nested(b"}h\x01K\x01s.")), "asks for keys that are no plain values"),
    "set": (lambda path: torch_zip(path, nested(b"c__builtin__\nset\n]h\x01a\x85R.")), "keys that are no plain"),
    "ordered": (
        lambda path: torch_zip(path, nested(b"ccollections\nOrderedDict\n]h\x01K\x01\x86a\x85R.")),
        "keys that are no plain values",
    ),
    "bytearray": (lambda path: torch_zip(path, BYTEARRAY), "a buffer of an announced size"),
    "encoded": (lambda path: torch_zip(path, ENCODED), "asks for an encoding"),
    "tensor": (lambda path: torch_zip(path, TENSOR), "asks for a new FloatTensor"),
    "storage": (lambda path: torch_older(path, STORAGE), "asks for more numbers than it holds"),
    "text": (lambda path: torch_older(path, b"\x80\x02X\xff\xff\xff\x7fabc."), "is damaged or not a weights file"),
    "two-names": (lambda path: torch_zip(path, b"\x80\x02}.", **{"DATA.PKL": BYTEARRAY}), "two entries of one name"),
}  # fmt: skip
CIFAR = {
    "buffer": (b"\x80\x05}X\x04\x00\x00\x00data\x96" + struct.pack("<Q", 2**31) + b"abcs.", "is damaged or no pickle"),
    "number": (b"\x8b" + struct.pack("<i", 2**31 - 1) + b"aa.", "is damaged or no pickle"),
    "keys": (nested(b"}h\x01K\x01s."), "asks for keys that are no plain values"),
    "copies": (COPIED, "asks for copies of its content"),
    "axes": (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(tR(K\x01(" + b"J\xff\xff\xff\x7f" * 300_000
        + b"tcnumpy\ndtype\nU\x02u1\x85R\x89U\x01atb.",
        "is damaged or no pickle",
    ),
}  # fmt: skip


def written(place):
    """Write all files; return the kind and path of each by name, and what should be said of it."""
    asked, expected = {}, {}

    def note(name, kind, path, words):
        asked[name], expected[name] = (kind, str(path)), words

    for name, (write, words) in WEIGHTS.items():
        write(place / f"{name}.pt")
        note(f"weights {name}", "weights", place / f"{name}.pt", words)
    for name, (pickled, words) in CIFAR.items():
        note(f"cifar {name}", "cifar10", folder(place / f"cifar_{name}", test_batch=pickled), words)
    head = gzip.compress(struct.pack(">4I", 2051, 1_300_000, 28, 28))
    grown = "that would become more than"
    images = {"t10k-images-idx3-ubyte.gz": head + gzip.compress(bytes(2**24)) * 64}
    note("mnist", "mnist", folder(place / "mnist", **images), grown)
    start = b"MATLAB 5.0".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    crops = {"test_32x32.mat": start + matlab(b"X", (32, 32, 3, 1), 2**29)}
    note("svhn", "svhn", folder(place / "svhn", **crops), grown)
    deep = b'{"a":' * 10**5 + b"1" + b"}" * 10**5
    note("deep header", "weights", place / "deep.safetensors", "is damaged or not a safetensors file")
    (place / "deep.safetensors").write_bytes(struct.pack("<Q", len(deep)) + deep)
    note("long header", "weights", place / "long.safetensors", "is damaged or not a safetensors file")
    (place / "long.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    note("npz", "npz", place / "huge.npz", "promises shape")
    array = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999, 99999), }".ljust(117) + b"\n"
    with zipfile.ZipFile(place / "huge.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00v\x00" + array)
    if "PIL" in HERE:
        path = folder(place / "photos")
        import_module("PIL.Image").new("L", (9000, 9000)).save(path / "a.png")
        note("images", "images", path, "has too many pixels to be opened safely: 9000 × 9000")
    if "transformers" in HERE:
        configurations(place, note)
    np.savez(place / "honest.npz", x=np.ones((50, 4), np.float32), y=np.arange(50))
    note("honest npz", "npz", place / "honest.npz", "was read")
    return asked, expected


def configurations(place, note):
    """Write folders of Hugging Face models that no machine could build, or whose weights are bombs."""
    note("hf layers", "model", f"hf:{bert(place / 'layers', num_hidden_layers=10**8)}", "netkin builds at most 10,000.")
    note("hf words", "model", f"hf:{bert(place / 'words', vocab_size=10**8)}", "describes 3,200,")
    torch_zip(place / "words" / "pytorch_model.bin", pickle.dumps({}, 2))
    note("hf keys", "model", f"hf:{bert(place / 'keys')}", "keys that are no plain values")
    torch_zip(place / "keys" / "pytorch_model.bin", nested(b"}h\x01K\x01s."))
    note("hf deep", "model", f"hf:{folder(place / 'deep', **{'config.json': b'[' * 10**6})}", "is damaged")


def outcomes(asked):
    run = subprocess.run(
        [sys.executable, "-c", READING, json.dumps(asked)], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What was said of each file, and what should have been."""
    asked, expected = written(tmp_path_factory.mktemp("bombs"))
    found = outcomes(asked)
    return {name: (found[name], expected[name]) for name in asked}


NAMES = [
    *(f"weights {name}" for name in WEIGHTS), *(f"cifar {name}" for name in CIFAR), "mnist", "svhn", "deep header",
    "long header", "npz", "honest npz", *(["images"] if "PIL" in HERE else []),
    *(["hf layers", "hf words", "hf keys", "hf deep"] if "transformers" in HERE else []),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_file_that_asks_for_much_is_refused_at_little_cost(told, name):
    said, expected = told[name]
    assert expected in said
