"""Recordings: which files are known, what is read of them, and what is refused."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import netkin as nk
from netkin.errors import FileError, InvalidValue, ShapeError, SourceError, UnknownName
from netkin.sources.recordings import token_hash
from recording_worlds import as_vllm, boundaries, language, matrices, token_batches


def all_of(layer):
    return layer.read(np.arange(layer.examples))


def in_npz(folder, rows):
    np.savez(folder / "a.npz", x=rows)
    return folder / "a.npz"


def in_fortran_order(folder, rows):
    np.savez(folder / "a.npz", x=np.asfortranarray(rows))
    return folder / "a.npz"


def in_other_byte_order(folder, rows):
    np.savez(folder / "a.npz", x=rows.astype(">f4"))
    return folder / "a.npz"


def in_safetensors(folder, rows):
    save_file({"x": torch.tensor(rows)}, folder / "a.safetensors")
    return folder / "a.safetensors"


def in_shards(folder, rows):
    for place, part in enumerate(np.array_split(rows, 12)):  # more than ten, whose names sort otherwise
        save_file({"x": torch.tensor(part)}, folder / f"part-{place}.safetensors")
    return folder


def in_counted_shards(folder, rows):
    for place, part in enumerate(np.array_split(rows, 3)):
        np.savez(folder / f"rows-{place + 1:05d}-of-00003.npz", x=part)
    return folder


def in_npy(folder, rows):
    np.save(folder / "x.npy", rows)
    np.save(folder / "labels.npy", np.zeros(len(rows), np.int64))
    return folder


def in_npy_shards(folder, rows):
    for place, part in enumerate(np.array_split(rows, 3)):
        np.save(folder / f"x-{place}-of-3.npy", part)
    return folder


WRITERS = [
    in_npz, in_fortran_order, in_other_byte_order, in_safetensors, in_shards, in_counted_shards, in_npy, in_npy_shards
]  # fmt: skip


@pytest.mark.parametrize("write", WRITERS)
def test_rows_come_back_as_they_were_written(tmp_path, write):
    rows = matrices()[0]
    found = nk.recorded(write(tmp_path, rows))
    assert list(found.layers) == ["x"]
    assert torch.equal(all_of(found.layers["x"])[0], torch.tensor(rows))
    picked = np.array([88, 3, 4, 5, 41, 0])
    assert torch.equal(found.layers["x"].read(picked)[0], torch.tensor(rows[picked]))


def test_npy_files_with_numbers_are_layers_and_no_shards(tmp_path):
    for place in (0, 1, 3):
        np.save(tmp_path / f"layer_{place}.npy", np.full((4, 2), place))
    found = nk.recorded(tmp_path)
    assert {name: all_of(layer)[0].unique().tolist() for name, layer in found.layers.items()} == {
        "layer_0": [0], "layer_1": [1], "layer_3": [3]
    }  # fmt: skip


def test_a_path_may_hold_a_comma(tmp_path):
    folder = tmp_path / "a,b"
    folder.mkdir()
    assert nk.recorded(str(in_npz(folder, matrices()[0]))).examples == 90


def test_bfloat16_comes_back_in_its_own_type(tmp_path):
    rows = torch.randn(20, 3).bfloat16()
    save_file({"x": rows}, tmp_path / "a.safetensors")
    assert torch.equal(all_of(nk.recorded(tmp_path / "a.safetensors").layers["x"])[0], rows)


def test_what_vllm_writes_has_a_layer_for_each_column_and_a_mask(tmp_path):
    model, batches = language(), token_batches(1)
    found = nk.recorded(f"{as_vllm(model, batches, tmp_path / 'v')},layers=0-4")
    assert list(found.layers) == [f"hidden_states.{number}" for number in range(5)]
    states, mask = boundaries(model, batches[0]), batches[0]["attention_mask"].bool()
    for number, layer in enumerate(found.layers.values()):
        rows, valid = all_of(layer)
        assert torch.equal(rows[valid], states[number][mask])
    hashes = [token_hash(ids[kept]) for ids, kept in zip(batches[0]["input_ids"], mask, strict=True)]
    assert found.token_hashes.tolist() == hashes
    assert list(nk.recorded(tmp_path / "v").layers) == [f"column.{number}" for number in range(5)]


def test_ids_may_be_numbers_or_texts_in_the_files_or_beside_them(tmp_path):
    rows = matrices(3)[0]
    np.savez(tmp_path / "a.npz", x=rows, ids=np.array(["p", "q", "r"]))
    assert nk.recorded(tmp_path / "a.npz").ids.tolist() == ["p", "q", "r"]
    for name, ids in (("npy", [4, 2, 9]), ("txt", ["p", "q", "r"])):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"x": torch.tensor(rows)}, folder / "0.safetensors")
        np.save(folder / "ids.npy", ids) if name == "npy" else (folder / "ids.txt").write_text("p\nq\nr\n")
        assert nk.recorded(folder).ids.tolist() == ids


def test_a_mask_in_the_shards_tells_which_tokens_count(tmp_path):
    rows, mask = torch.randn(4, 5, 3), torch.tensor([[1, 1, 1, 0, 0]] * 4)
    save_file({"x": rows, "attention_mask": mask}, tmp_path / "a.safetensors")
    assert torch.equal(all_of(nk.recorded(tmp_path / "a.safetensors").layers["x"])[1], mask.bool())


# --- what nk.activations writes ---------------------------------------------------------------------------------------


def test_what_is_saved_is_what_activations_return(tmp_path):
    model, data = language(), token_batches()
    for shape in ("mean", "last", "tokens"):
        kept = nk.activations(model, ["blocks.0", "blocks.2"], data, shape=shape, progress=False)
        saved = nk.activations(
            model, ["blocks.0", "blocks.2"], data, shape=shape, save=tmp_path / shape, progress=False
        )
        for layer, rows in kept.items():
            found, valid = all_of(saved.layers[layer])
            assert torch.equal(found if valid is None else found[valid], rows)


class Stopped(Exception):
    pass


def stopping(data, after):
    for place, batch in enumerate(data):
        if place == after:
            raise Stopped
        yield batch


def test_an_interrupted_recording_is_continued_without_running_again_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("netkin.sources.recordings.AT_ONCE", 600)  # a shard for each batch
    model, data = language(), token_batches(5)
    with pytest.raises(Stopped):
        nk.activations(model, ["blocks.1"], stopping(data, 3), save=tmp_path / "r", progress=False)
    with pytest.raises(SourceError, match="is not finished: it holds 24 examples"):
        nk.recorded(tmp_path / "r")
    ran = []
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: ran.append(1), with_kwargs=True)
    saved = nk.activations(model, ["blocks.1"], data, save=tmp_path / "r", progress=False)
    handle.remove()
    assert len(ran) == 2 + 2  # two batches that were missing, after two runs that show the layers
    whole = nk.activations(model, ["blocks.1"], data, progress=False)["blocks.1"]
    assert torch.equal(all_of(saved.layers["blocks.1"])[0], whole)
    assert saved.ids.tolist() == list(range(40))


def test_a_recording_is_not_continued_with_other_data_weights_or_layers(tmp_path, monkeypatch):
    monkeypatch.setattr("netkin.sources.recordings.AT_ONCE", 600)
    model, data = language(), token_batches(5)
    with pytest.raises(Stopped):
        nk.activations(model, ["blocks.1"], stopping(data, 3), save=tmp_path / "r", progress=False)
    save = {"save": tmp_path / "r", "progress": False}
    with pytest.raises(InvalidValue, match="examples 0 to 7 are others"):
        nk.activations(model, ["blocks.1"], token_batches(5, seed=9), **save)
    with pytest.raises(FileError, match="begun with other weights"):
        nk.activations(language(1), ["blocks.1"], data, **save)
    with pytest.raises(FileError, match="begun with other layers"):
        nk.activations(model, ["blocks.2"], data, **save)
    nk.activations(language(1), ["blocks.1"], data, overwrite=True, **save)
    with pytest.raises(FileError, match="is finished"):
        nk.activations(language(1), ["blocks.1"], data, **save)


def test_other_files_are_not_written_over(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileError, match="holds other files") as refused:
        nk.activations(language(), ["norm"], token_batches(1), save=tmp_path, progress=False)
    assert refused.value.argument == "save"
    nk.activations(language(), ["norm"], token_batches(1), save=tmp_path, overwrite=True, progress=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"


# --- refusals ---------------------------------------------------------------------------------------------------------


def missing_shard(folder):
    for place in (0, 1, 3):
        np.savez(folder / f"{place}.npz", x=np.ones((2, 2)))
    return folder


def missing_counted_shard(folder):
    for place in (1, 3):
        np.savez(folder / f"rows-{place:05d}-of-00004.npz", x=np.ones((2, 2)))
    return folder


def missing_own_shard(folder):
    nk.activations(language(), ["norm"], token_batches(2), save=folder / "r", progress=False)
    (folder / "r" / "00000.safetensors").unlink()
    return folder / "r"


def missing_request(folder):
    as_vllm(language(), token_batches(1), folder / "v")
    (folder / "v" / "cmpl-3.safetensors").unlink()
    return folder / "v"


def half_a_file(folder):
    path = in_safetensors(folder, matrices()[0])
    path.write_bytes(path.read_bytes()[:-100])
    return path


def compressed(folder):
    np.savez_compressed(folder / "a.npz", x=np.ones((2, 2)))
    return folder / "a.npz"


def objects(folder):
    np.savez(folder / "a.npz", x=np.array([{}, {}]))
    return folder / "a.npz"


def other_widths(folder):
    for place in (0, 1):
        np.savez(folder / f"{place}.npz", x=np.ones((2, 2 + place)))
    return folder


def layers_that_differ(folder):
    np.savez(folder / "0.npz", x=np.ones((2, 2)), y=np.ones((2, 2)))
    np.savez(folder / "1.npz", x=np.ones((2, 2)))
    return folder


def too_few_ids(folder):
    np.savez(folder / "a.npz", x=np.ones((3, 2)), ids=np.arange(2))
    return folder / "a.npz"


def other_numbers_of_layers(folder):
    return f"{as_vllm(language(), token_batches(1), folder / 'v')},layers=1+2"


def layers_of_arrays(folder):
    return f"{in_npz(folder, matrices()[0])},layers=1+2"


def a_file_for_each_layer(folder):
    for place in (0, 1):
        np.savez(folder / f"layer_{place}.npz", hidden=np.ones((4, 2)))
    return folder


def mask_in_one_shard(folder):
    for place in range(2):
        more = {"attention_mask": torch.tensor([[1, 0, 0], [1, 1, 0]])} if place else {}
        save_file({"layer": torch.ones(2, 3, 2), **more}, folder / f"{place}.safetensors")
    return folder


def a_model(folder):
    (folder / "config.json").write_text("{}")
    save_file({"layer": torch.ones(2, 2)}, folder / "model.safetensors")
    return folder


REFUSED = [
    (mask_in_one_shard, ShapeError, "does not hold 'attention_mask' for all examples"),
    (a_model, SourceError, "is the folder of a Hugging Face model"),
    (a_file_for_each_layer, SourceError, "'layer_0.npz', which seems to be of one layer"),
    (missing_shard, SourceError, r"lacks 1 of 4 shards, the first number 2"),
    (missing_counted_shard, SourceError, r"lacks 2 of 4 shards, the first number 2"),
    (missing_own_shard, SourceError, r"lacks 1 of 1 shards, the first '00000.safetensors'"),
    (missing_request, SourceError, r"lacks 1 of 8 shards that were begun, the first 'cmpl-3.safetensors'"),
    (half_a_file, FileError, "damaged, or still being written"),
    (compressed, SourceError, "compressed"),
    (objects, SourceError, "nothing is unpickled"),
    (other_widths, ShapeError, "record all shards alike"),
    (layers_that_differ, SourceError, r"holds layer 'y' in 1 of 2 shards"),
    (too_few_ids, ShapeError, r"3 examples and ids of shape \(2,\)"),
    (other_numbers_of_layers, InvalidValue, "holds 5 layers and `layers` numbers 2"),
    (layers_of_arrays, InvalidValue, "here arrays have names"),
    (lambda folder: folder, SourceError, "holds no recording"),
    (lambda folder: folder / "absent.npz", SourceError, "found no file or folder"),
    (lambda folder: f"{in_npz(folder, matrices()[0])},rows=3", UnknownName, "no option 'rows'"),
    (lambda folder: f"{in_npz(folder, matrices()[0])},layers=a-b", InvalidValue, "written 0-32 or 2"),
]


@pytest.mark.parametrize("write, error, said", REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_a_recording_that_is_not_whole_is_refused_in_a_sentence(tmp_path, write, error, said):
    with pytest.raises(error, match=said):
        nk.recorded(write(tmp_path))
