import pickle
import struct
import warnings
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from netkin.errors import SourceError
from netkin.sources.weights import load_weights, read_state, renamed


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.fixture
def state():
    source = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    nn.init.constant_(source[0].weight, 7)
    return source.state_dict()


def holds_the_state(model):
    return bool((model[0].weight == 7).all())


def saved(content, path):
    torch.save(content, path)
    return path


def test_a_state_dict_is_loaded(model, state, tmp_path):
    load_weights(model, saved(state, tmp_path / "net.pt"))
    assert holds_the_state(model)


def test_a_safetensors_file_is_loaded(model, state, tmp_path):
    save_file(state, tmp_path / "net.safetensors")
    load_weights(model, tmp_path / "net.safetensors")
    assert holds_the_state(model)


def test_the_layout_of_older_torch_is_loaded(model, state, tmp_path):
    torch.save(state, tmp_path / "net.th", _use_new_zipfile_serialization=False)
    load_weights(model, tmp_path / "net.th")
    assert holds_the_state(model)


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "model_state_dict"])
def test_weights_are_found_inside_a_training_checkpoint(model, state, tmp_path, wrapper):
    load_weights(model, saved({"epoch": 3, wrapper: state, "optimizer": {"lr": 0.1}}, tmp_path / "net.pt"))
    assert holds_the_state(model)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module."])
def test_usual_prefixes_are_taken_off(model, state, tmp_path, prefix):
    load_weights(model, saved({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "net.pt"))
    assert holds_the_state(model)


def test_names_with_the_underscores_of_private_parts_fit_those_without(tmp_path):
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "blocks": nn.Sequential(nn.Linear(2, 3))})
    state = {name: torch.rand_like(tensor) for name, tensor in model.state_dict().items()}
    marked = {name.replace("stem", "_stem").replace("blocks.0", "_blocks.0"): tensor for name, tensor in state.items()}
    load_weights(model, saved(marked, tmp_path / "net.pt"))
    assert torch.equal(model["stem"].weight, state["stem.weight"])
    with pytest.raises(SourceError, match=r"unexpected: _stem\.weight"):
        load_weights(model, saved(state | {"_stem.weight": state["stem.weight"]}, tmp_path / "both.pt"))


def test_a_model_with_both_a_public_and_a_private_part_gets_each_its_own():
    both = nn.ModuleDict({"stem": nn.Linear(2, 1, bias=False), "_stem": nn.Linear(2, 1, bias=False)})
    assert renamed({"_stem.weight": 1, "stem.weight": 2}, both.state_dict()) == {"_stem.weight": 1, "stem.weight": 2}
    assert renamed({"_stem.weight": 1}, both.state_dict()) == {"_stem.weight": 1}


def test_prefixes_that_the_model_has_and_the_file_lacks_are_put_on(state, tmp_path):
    wrapped = nn.ModuleDict({"model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))})
    load_weights(wrapped, saved(state, tmp_path / "net.pt"))
    assert holds_the_state(wrapped["model"])


def test_a_prefix_that_the_model_wants_stays_on():
    assert renamed({"model.fc": 1, "fc": 2}, ["model.fc", "fc"]) == {"model.fc": 1, "fc": 2}


def test_a_compiled_part_inside_a_model_is_recognised():
    assert renamed({"block._orig_mod.fc": 1}, ["block.fc"]) == {"block.fc": 1}


def test_two_names_for_one_weight_are_not_merged_silently(model, state, tmp_path):
    both = dict(state) | {"module.0.weight": state["0.weight"]}
    with pytest.raises(SourceError, match=r"1 unexpected: module\.0\.weight"):
        load_weights(model, saved(both, tmp_path / "net.pt"))


def test_files_from_before_batches_were_counted_are_loaded(model, state, tmp_path):
    del state["1.num_batches_tracked"]
    load_weights(model, saved(state, tmp_path / "net.pt"))
    assert holds_the_state(model)


def test_mismatching_weights_are_listed_in_one_refusal(model, state, tmp_path):
    del state["0.bias"]
    state |= {"1.weight": torch.ones(5), "1.running_mean": torch.tensor(1.0)}
    state |= {f"extra{number}": torch.ones(1) for number in range(7)}
    with pytest.raises(SourceError) as refusal:
        load_weights(model, saved(state, tmp_path / "net.pt"), name="my:net")
    assert str(refusal.value) == (
        f"the weights in '{tmp_path / 'net.pt'}' do not fit my:net: 1 missing: 0.bias; "
        "7 unexpected: extra0, extra1, extra2, extra3, extra4 and 2 more; "
        "2 of another shape: 1.weight (5 in the file, 2 in the model), 1.running_mean (one number in the file, 2 in "
        "the model). Choose the builder these weights were trained with."
    )


def test_a_refused_file_leaves_the_model_as_it_was(model, state, tmp_path):
    before = model[0].weight.clone()
    del state["0.bias"]
    with pytest.raises(SourceError, match=r"1 missing: 0\.bias"):
        load_weights(model, saved(state, tmp_path / "net.pt"))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_a_hostile_pickle_is_refused_and_nothing_in_it_runs(tmp_path, hostile, write):
    write({"weight": hostile}, tmp_path / "net.pt")
    with pytest.raises(SourceError) as refusal:
        read_state(tmp_path / "net.pt")
    assert "\n" not in str(refusal.value)


def test_a_hostile_pickle_is_refused_even_if_the_environment_asks_for_unpickling(tmp_path, hostile, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(SourceError, match="holds or asks for more than tensors"):
        read_state(saved({"weight": hostile}, tmp_path / "net.pt"))


GLOBALS = {  # as a pickle names them
    "rebuild": b"ctorch._utils\n_rebuild_tensor_v2\n", "ordered": b"ccollections\nOrderedDict\n",
    "floats": b"ctorch\nFloatStorage\n", "set": b"cbuiltins\nset\n",
}  # fmt: skip


def storage_of(count):
    """Return the instructions for a storage that a file says has so many floats."""
    told = b"(X\x07\0\0\0storage" + GLOBALS["floats"] + b"X\x01\0\0\x000X\x03\0\0\0cpuJ" + struct.pack("<i", count)
    return told + b"tQ"


def tensor_of(count):
    """Return the instructions for a vector of so many floats."""
    size = b"J" + struct.pack("<i", count) + b"\x85"
    return (
        GLOBALS["rebuild"] + b"(" + storage_of(count) + b"K\0" + size + b"K\x01\x85\x89" + GLOBALS["ordered"] + b")RtR"
    )


def crafted(path, instructions, zipped=True, held=4):
    """Write a torch file whose pickle is written by hand, with one storage that holds some floats."""
    pickled = b"\x80\x02" + instructions + b"."
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("net/data.pkl", pickled)
            archive.writestr("net/data/0", bytes(4 * held))
            archive.writestr("net/version", "3\n")
    else:
        parts = [pickle.dumps(one, 2) for one in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
        path.write_bytes(b"".join([*parts, pickled, pickle.dumps(["0"], 2), struct.pack("<q", held), bytes(4 * held)]))
    return path


def test_a_pickle_written_by_hand_is_read_as_torch_reads_it(tmp_path):
    written = crafted(tmp_path / "net.pt", b"}X\x01\0\0\0w" + tensor_of(4) + b"s")
    assert torch.equal(read_state(written)["w"], torch.zeros(4))


# CVE-2026-24747, in torch before 2.10: entries set in what is no dictionary write to any place in memory, and a storage
# is as long as the file says
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "instructions, held, words",
    [
        (tensor_of(4) + b"K\0K\x01s", 4, "entries set in what is no dictionary"),
        (tensor_of(4) + b"(K\0K\x01u", 4, "entries set in what is no dictionary"),
        (b"]K\0K\x01s", 4, "entries set in what is no dictionary"),
        (b"](K\0K\x01K\x02K\x03u", 4, "entries set in what is no dictionary"),
        (storage_of(4) + b"K\0K\x01s", 4, "entries set in what is no dictionary"),
        (GLOBALS["set"] + b"]\x85RK\0K\x01s", 4, "entries set in what is no dictionary"),
        (GLOBALS["floats"] + b"K\0K\x01s", 4, "entries set in what is no dictionary"),
        (b"}X\x01\0\0\0w" + tensor_of(4000) + b"s", 4, "more numbers than it holds"),
        (b"}X\x01\0\0\0w" + storage_of(-1) + b"s", 4, "a storage of no length"),
    ],
)
def test_the_exploits_of_older_torch_are_refused_before_torch_reads_them(
    tmp_path, monkeypatch, instructions, held, words, zipped
):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch has read it"))
    with pytest.raises(SourceError, match=f"net.pt' holds or asks for {words}"):
        read_state(crafted(tmp_path / "net.pt", instructions, zipped, held))


def test_an_archive_of_two_folders_is_refused(tmp_path, monkeypatch):
    written = crafted(tmp_path / "net.pt", b"}")
    with zipfile.ZipFile(written, "a") as archive:
        archive.writestr("other/data.pkl", b"\x80\x02" + tensor_of(4000) + b".")
    with pytest.raises(SourceError, match="holds or asks for entries of several folders"):
        read_state(written)


def test_a_whole_pickled_model_is_refused_with_what_to_save_instead(model, tmp_path):
    with pytest.raises(SourceError, match=r"holds or asks for more than tensors, .* save `model.state_dict\(\)` alone"):
        read_state(saved(model, tmp_path / "net.pt"))


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_cut_short_is_refused(state, tmp_path, kept, zipped):
    torch.save(state, tmp_path / "net.pt", _use_new_zipfile_serialization=zipped)
    content = (tmp_path / "net.pt").read_bytes()
    (tmp_path / "net.pt").write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(SourceError, match="is damaged or no weights file.*; save"):
        read_state(tmp_path / "net.pt")


@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.99])
def test_a_safetensors_file_cut_short_is_refused(state, tmp_path, kept):
    save_file(state, tmp_path / "net.safetensors")
    content = (tmp_path / "net.safetensors").read_bytes()
    kept = int(kept * len(content)) if isinstance(kept, float) else kept
    (tmp_path / "net.safetensors").write_bytes(content[:kept])
    with pytest.raises(SourceError, match="is damaged or no safetensors file"):
        read_state(tmp_path / "net.safetensors")


def test_a_missing_file_is_refused_with_the_nearest_name_beside_it(state, tmp_path):
    saved(state, tmp_path / "seed0.pt")
    with pytest.raises(SourceError, match=r"found no weights file '.*seed00\.pt'; did you mean 'seed0\.pt'\?"):
        read_state(tmp_path / "seed00.pt")
    with pytest.raises(SourceError, match=r"found no weights file '.*net\.pt'\.$"):
        read_state(tmp_path / "nowhere" / "net.pt")


def test_an_exported_program_is_no_weights_file(tmp_path):
    (tmp_path / "net.pt2").touch()
    with pytest.raises(SourceError, match="is an exported program, which is a whole model; name it alone"):
        read_state(tmp_path / "net.pt2")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(SourceError, match="is a folder; name the weights file in it"):
        read_state(tmp_path)


@pytest.mark.parametrize("content, words", [(torch.ones(3), "a Tensor"), ({}, "nothing"), ([1, 2], "a list")])
def test_what_is_no_state_dict_is_refused(tmp_path, content, words):
    with pytest.raises(SourceError, match=f"holds {words} instead of a state dict"):
        read_state(saved(content, tmp_path / "net.pt"))


def test_weights_in_an_unknown_wrapper_are_refused_with_where_we_look(state, tmp_path):
    with pytest.raises(
        SourceError, match="epoch, net are no tensors. netkin looks .* at the top and under 'state_dict', 'mod"
    ):
        read_state(saved({"epoch": 3, "net": state}, tmp_path / "net.pt"))


@pytest.mark.parametrize(
    "weight, words",
    [
        (lambda: torch.full((2, 3), 1 + 2j), r"of another shape: 0.weight \(2 × 3 complex in the file, 2 × 3 in the"),
        (lambda: torch.eye(2, 3).to_sparse(), "is damaged or no file of weights for my:net .*; save `model.state_dict"),
        (lambda: torch.eye(2, 3, device="meta"), "is damaged or no file of weights for my:net .*; save `model.state_d"),
    ],
)
def test_weights_that_can_not_be_copied_are_refused(model, state, tmp_path, weight, words):
    before = model[0].weight.clone()
    saved(dict(state) | {"0.weight": weight()}, tmp_path / "net.pt")
    with pytest.raises(SourceError, match=words):
        load_weights(model, tmp_path / "net.pt", name="my:net")
    assert torch.equal(model[0].weight, before)


def test_quantised_weights_are_refused_with_what_to_save(state, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.eye(2, 3), 0.1, 0, torch.qint8)
        saved(dict(state) | {"0.weight": quantised}, tmp_path / "net.pt")
    with pytest.raises(SourceError, match=r"quantised tensors: save them as `tensor\.dequantize\(\)`"):
        read_state(tmp_path / "net.pt")


def test_complex_weights_fit_a_complex_model(tmp_path):
    model = nn.Linear(3, 2, dtype=torch.complex64)
    state = {"weight": torch.full((2, 3), 1 + 2j), "bias": torch.zeros(2, dtype=torch.complex64)}
    load_weights(model, saved(state, tmp_path / "net.pt"))
    assert bool((model.weight == 1 + 2j).all())


def test_a_torchscript_archive_is_refused_with_what_to_do(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls TorchScript deprecated
        torch.jit.save(torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3)), tmp_path / "net.pt")
    with pytest.raises(SourceError, match=r"asks for TorchScript.*return `torch\.jit\.load\(\.\.\.\)` from a function"):
        read_state(tmp_path / "net.pt")


def test_what_checkpoints_usually_hold_beside_weights_passes_the_trial_reading(model, state, tmp_path):
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    beside = {
        "optimizer": optimizer.state_dict(), "random": torch.get_rng_state(), "sizes": torch.Size([1, 2]),
        "text": b"abc", "names": {"a", "b"}, "where": torch.device("cpu"), "kind": torch.float16,
        "parameter": nn.Parameter(torch.ones(2)), "pairs": {(0, "a"): 1}, "buffer": bytearray(b"abc"),
        "empty": torch.empty(0), "half": torch.ones(2).bfloat16(),
    }  # fmt: skip
    for zipped in (True, False):
        torch.save({"state_dict": state, **beside}, tmp_path / "net.ckpt", _use_new_zipfile_serialization=zipped)
        load_weights(model, tmp_path / "net.ckpt")
        assert holds_the_state(model)
