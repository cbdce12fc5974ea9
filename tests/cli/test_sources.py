"""Models and data of every kind through the command line, and what it says when they are wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import netkin as nk
from netkin.errors import SourceError

MODULE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

def rows():
    return torch.arange(120.0).reshape(20, 6).sin()

def broken():
    raise RuntimeError("no disk")

def number():
    return 7

def thin():
    return torch.ones(20, 3)

def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 4))

def meta():
    return net().to("meta")

def scripted():
    return torch.jit.script(net())

def none():
    return []

def keyed():
    return [{"pixels": rows()}]

def one_label():
    return [(rows(), torch.tensor(3))]
"""


@pytest.fixture
def folder(netkin):
    """A folder with a module of one's own, its weights, other weights, and rows in a file."""
    Path("nk_own.py").write_text(MODULE)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    torch.save(net.state_dict(), "good.pt")
    save_file(net.state_dict(), "good.safetensors")
    torch.save(nn.Linear(6, 9).state_dict(), "other.pt")
    Path("cut.safetensors").write_bytes(Path("good.safetensors").read_bytes()[:50])
    np.savez("rows.npz", x=np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32))


def compared(netkin, line):
    result = netkin(f"compare {line} --json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.usefixtures("folder")
def test_functions_of_ones_own_give_models_and_data(netkin):
    found = compared(netkin, "nk_own:net@good.pt nk_own:net@good.safetensors --data nk_own:rows")
    assert np.diag(found["tables"]["cka"]["values"]) == pytest.approx([1, 1, 1])
    assert compared(netkin, "nk_own:net --data npz:rows.npz")["examples"] == 20


@pytest.mark.usefixtures("folder")
def test_one_checkpoint_may_be_given_twice(netkin):
    found = compared(netkin, "nk_own:net@good.pt nk_own:net@good.pt --data nk_own:rows --pairs corresponding")
    assert (found["a"], found["b"]) == ("nk_own:net@good.pt (1)", "nk_own:net@good.pt (2)")


@pytest.mark.usefixtures("folder")
def test_an_exported_program_is_a_model(netkin):
    dynamic = {"input": {0: torch.export.Dim("examples", min=2)}}
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    torch.export.save(torch.export.export(net, (torch.ones(4, 6),), dynamic_shapes=dynamic), "net.pt2")
    found = compared(netkin, "net.pt2 nk_own:net --data nk_own:rows")
    assert found["examples"] == 20
    assert found["layers_a"]


WRONG = [
    ("nk_own:nett --data nk_own:rows", "did you mean 'net'?"),
    ("nk_owm:net --data nk_own:rows", "found no module 'nk_owm'"),
    ("nk_own:broken --data nk_own:rows", "raised RuntimeError: no disk"),
    ("nk_own:number --data nk_own:rows", "must return a torch.nn.Module"),
    ("nk_own:net@gone.pt --data nk_own:rows", "found no weights file 'gone.pt'"),
    ("nk_own:net@other.pt --data nk_own:rows", "'other.pt'"),
    ("nk_own:net@cut.safetensors --data nk_own:rows", "is damaged or no safetensors file"),
    ("nk_own:net --data nk_own:rowz", "did you mean 'rows'?"),
    ("nk_own:net --data nk_own:number", "must return an iterable of batches"),
    ("nk_own:net --data npz:gone.npz", "gone.npz"),
    ("nk_own:net --data imagez:x", "did you mean 'images'?"),
    ("nk_own:net --data images:gone", "is no folder"),
    ("nk_own:net --data nk_own:rows --layers fc", "no layer"),
    ("nk_own:net --data nk_own:thin", "RuntimeError: mat1 and mat2 shapes"),
    ("netkin:digits --data nk_own:rows", "ConvNet could not be run on inputs of type float32 and shape"),
    ("gone.pt2 --data nk_own:rows", "gone.pt2"),
    ("hf:gone --data nk_own:rows", "gone"),
    ("good.pt --data nk_own:rows", "weights alone do not say what network they belong to"),
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", ["compare", "compare --plan"])
@pytest.mark.parametrize("line, words", WRONG)
def test_what_is_wrong_is_said_in_one_sentence_with_exit_code_1(netkin, command, line, words):
    result = netkin(f"{command} {line}")
    assert (result.exit_code, result.stdout) == (1, ""), result.exception
    assert result.stderr.startswith("netkin: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


UNUSABLE = [
    ("compare nk_own:lazy --data nk_own:rows", "is a lazy module without weights yet"),
    ("recommend nk_own:lazy --data nk_own:one_label", "is a lazy module without weights yet"),
    ("sparsity nk_own:meta --data nk_own:rows", "a model on the 'meta' device computes no numbers"),
    (
        "sparsity nk_own:net --data nk_own:thin",
        "could not be run on inputs of type float32 and shape (20, 3) (RuntimeError: mat1 and mat2",
    ),
    ("sparsity nk_own:net --data nk_own:keyed", "a batch has the keys 'pixels', which do not fit Sequential"),
    ("stitch nk_own:net nk_own:net --all --data nk_own:none", "the data gave no batches"),
    ("compress nk_own:net --layer 0 --k 2 --data nk_own:none --out small.netkin", "gave no batches"),
    ("recommend nk_own:net --data nk_own:one_label", "a label for each example; got tensor(3) for 20 examples"),
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line, words", UNUSABLE)
def test_models_and_data_that_a_command_cannot_use_are_refused_in_one_sentence(netkin, line, words):
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (1, ""), result.exception
    assert words in result.stderr.splitlines()[-1]


@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_output_of_a_scripted_model_is_stitched_into_another(netkin):
    result = netkin("stitch nk_own:scripted nk_own:net --at '' --data nk_own:rows --json")
    assert result.exit_code == 0, result.exception or result.stderr
    assert json.loads(result.stdout)["layers_a"] == [""]


DATA = """
from pathlib import Path

def images():
    Path('read').touch()
    return []
"""
MISSPELT = {
    "compare netkin:digitss netkin:digits": "no reference architecture named 'digitss'",
    "compare netkin:digits netkin:digits@gone.pt": "found no weights file 'gone.pt'",
    "compare netkin:digits netkin:digits netkin:digits@gone.pt": "found no weights file 'gone.pt'",
    "compare --plan netkin:digits netkin:digits netkin:digits@": "names no weights after the '@'",
    "compare netkin:digits netkin:digits hf:gone": "'gone' is no folder",
    "compare netkin:digits netkin:digits gone.pt2": "found no file 'gone.pt2'",
    "compare netkin:digits --measure ckaa": "did you mean 'cka'?",
    "compare netkin:digits netkin:digits netkin:digits --measure ckaa": "did you mean 'cka'?",
    "collect netkin:digits --device cuda:77 --out a.stats": "there is no device 'cuda:77' here",
    "stitch netkin:digitss netkin:digits --all": "no reference architecture named 'digitss'",
    "classes netkin:digitss": "no reference architecture named 'digitss'",
    "compress netkin:digitss --layer fc --k 2": "no reference architecture named 'digitss'",
}  # fmt: skip


@pytest.mark.parametrize("line", MISSPELT)
def test_what_is_misspelt_is_told_before_data_are_read(netkin, line, monkeypatch):
    Path("slow_images.py").write_text(DATA)
    result = netkin(f"{line} --data slow_images:images")
    assert result.exit_code == 1
    assert MISSPELT[line] in " ".join(result.stderr.split())
    assert not Path("read").exists()


def test_python_refuses_misspelt_models_before_data_are_read(netkin):
    Path("slow_images.py").write_text(DATA)
    with pytest.raises(SourceError, match="found no weights file 'gone.pt'"):
        nk.compare_many(["netkin:digits", "netkin:digits@gone.pt"], "slow_images:images")
    assert not Path("read").exists()
