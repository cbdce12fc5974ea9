"""Layer outputs over data."""

import re

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.errors import ForwardError, InvalidValue, NetkinError, ShapeError, UnknownName
from netkin.representations import Recorder, activations
from netkin.representations.hooks import inference_mode_of
from refusals import refusals, refused
from worlds import data_parallel


class Sometimes(nn.Module):
    """Runs its step as many times as the first input says."""

    def __init__(self):
        super().__init__()
        self.step = nn.Linear(2, 2)
        self.idle = nn.Linear(2, 2)

    def forward(self, batch):
        for _ in range(int(batch[0, 0])):
            batch = self.step(batch)
        return batch


class Sequence(nn.Module):
    """A recurrent net that wants time before examples."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, batch):
        return self.head(self.rnn(batch.transpose(0, 1))[0][-1])


@pytest.fixture
def sentences():
    """Four sentences padded on the right, then on the left."""
    ids = torch.randint(1, 11, (4, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(4)}


def test_all_default_layers_are_given_in_the_models_order(residual, images):
    rows = activations(residual, data=images)
    assert list(rows) == ["conv1", "bn1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]
    assert {tuple(matrix.shape) for matrix in rows.values()} == {(10, 4), (10, 5)}
    assert torch.equal(rows["fc"], residual.eval()(images).detach())


@pytest.mark.parametrize("size", [1, 3, 10])
def test_batches_of_any_size_give_the_same_rows(residual, images, size):
    whole = activations(residual, data=images, shape="flatten")
    split = activations(residual, data=iter(images.split(size)), shape="flatten")
    assert all(torch.allclose(split[name], whole[name], atol=1e-6) for name in whole)


def test_in_place_relus_do_not_spoil_the_rows(residual, images):
    before = activations(residual, ["bn1", "relu"], images, shape="flatten")
    assert before["bn1"].min() < 0
    assert torch.equal(before["relu"], before["bn1"].relu())


def test_a_model_that_overwrites_its_mask_does_not_change_which_tokens_count(language, sentences):
    def run(model, batch):
        batch["attention_mask"].fill_(1)
        return model(batch["input_ids"])

    expected = activations(language, data=[sentences])
    rows = activations(language, data=[sentences], forward=run)
    assert all(torch.equal(rows[name], expected[name]) for name in expected)


def test_calls_come_one_after_the_other(residual, images):
    rows = activations(residual, ["layer1.0.relu", "conv1"], images)
    assert list(rows) == ["layer1.0.relu", "layer1.0.relu#2", "conv1"]


def test_a_shuffling_loader_is_read_once_and_all_layers_see_the_same_order(chain):
    order = torch.arange(12.0)[:, None].repeat(1, 4)
    loader = DataLoader(TensorDataset(order), batch_size=5, shuffle=True)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    rows = activations(model, data=loader)
    assert torch.equal(rows["0"], rows["1"])
    assert torch.equal(rows["0"].sort(0).values, order)
    assert not torch.equal(rows["0"], order)


def test_examples_are_the_first_ones(chain):
    data = torch.randn(300, 4)
    assert torch.equal(activations(chain, "0", data, examples=130)["0"], activations(chain, "0", data[:130])["0"])


def test_each_layer_may_have_its_own_shape(residual, images):
    rows = activations(
        residual, ["conv1", "layer1.0", "fc"], images, shape={"conv*": "positions", "layer**": "flatten"}
    )
    assert [tuple(matrix.shape) for matrix in rows.values()] == [(360, 4), (10, 144), (10, 5)]


def test_a_glob_of_shapes_stays_on_one_level(residual, images):
    rows = activations(residual, ["layer1", "layer1.0"], images, shape={"layer*": "flatten", "**": "pool"})
    assert [matrix.shape[1] for matrix in rows.values()] == [144, 4]
    for call in (activations, nk.compare):
        with refused(UnknownName, "shape"):
            call(residual, layers=["layer1"], data=images, shape={"l*.conv1": "flatten"})


def test_padded_tokens_do_not_count(language, sentences):
    rows = activations(language, data=[sentences])
    ids, mask = sentences["input_ids"], sentences["attention_mask"].bool()
    table = language.embeddings.weight.detach()
    expected = torch.stack([table[words[valid]].mean(0) for words, valid in zip(ids, mask, strict=True)])
    assert torch.allclose(rows["embeddings"], expected)
    last = activations(language, "embeddings", [sentences], shape="last")["embeddings"]
    assert torch.equal(last, table[torch.stack([words[valid][-1] for words, valid in zip(ids, mask, strict=True)])])
    assert activations(language, "encoder", [(sentences, None)], shape="tokens")["encoder"].shape == (15, 6)


@pytest.mark.parametrize("shape", ["mean", "cls", "last", "tokens"])
def test_a_mask_is_counted_once_for_all_layers_of_a_batch(language, sentences, shape, monkeypatch):
    counted = []

    def counting(method):
        return lambda tensor, *args, **options: counted.append(tensor) or method(tensor, *args, **options)

    for name in ("any", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
    read = Recorder(language, ["embeddings", "encoder"], shape=shape)
    with inference_mode_of(language):
        read(sentences)
        read(sentences)
    assert len(counted) == 3  # of the examples from which the layers are learnt, too


def test_the_reader_tells_which_tokens_and_places_the_rows_are(language, sentences, residual, images):
    read, look = Recorder(language, "encoder", shape="tokens"), Recorder(residual, ["conv1", "fc"], shape="positions")
    with inference_mode_of(language, residual):
        recorded, looked = read(sentences), look(images)
    assert torch.equal(recorded.valid["encoder"], sentences["attention_mask"] == 1)
    assert len(recorded.rows["encoder"]) == recorded.valid["encoder"].sum()
    assert {name: facts.space for name, facts in look.facts.items()} == {"conv1": (6, 6), "fc": ()}
    assert looked.valid == {}


def test_a_default_layer_that_knows_nothing_of_the_examples_is_left_out(language, sentences):
    single = {name: value[:1] for name, value in sentences.items()}
    rows = activations(language, data=[sentences, single])
    assert list(rows) == ["embeddings", "encoder.layer.0", "encoder.layer.1", "encoder.layer.2", "pooler"]
    assert all(len(matrix) == 5 for matrix in rows.values())


def test_a_named_layer_whose_output_does_not_hold_the_examples_is_refused(language, sentences):
    refusal = r"layer 'places' gives an output of shape \(1, 5, 6\) for a batch of 3 examples, and none of its axes"
    with pytest.raises(ShapeError, match=f"{refusal} counts them; pass a function as `shape`"):
        activations(language, "places", [sentences])
    assert activations(Sequence(), "rnn", torch.ones(2, 7, 4), shape=lambda states: states[-1])["rnn"].shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_in_any_precision_are_read(residual, images, dtype):
    exact = activations(residual, data=images)
    rows = activations(residual.to(dtype), data=images)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert {matrix.dtype for matrix in rows.values()} == {kept}
    assert torch.allclose(rows["fc"].float(), exact["fc"], atol=0.05)


def test_wrapped_models_are_read(residual, images, tmp_path):
    plain = activations(residual, data=images)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        compiled = torch.compile(residual, backend="eager")
        for model in (data_parallel(residual), DistributedDataParallel(residual), compiled):
            rows = activations(model, data=images)
            assert list(rows) == list(plain)
            assert all(torch.equal(rows[name], plain[name]) for name in plain)
        del model
    finally:
        torch.distributed.destroy_process_group()


def test_forward_and_transform_are_used(chain):
    data = [(torch.ones(3, 2), torch.zeros(3))]
    rows = activations(
        chain, "0", data, transform=lambda x: x.repeat(1, 2), forward=lambda model, batch: model[0](batch[0] * 2)
    )
    assert torch.equal(rows["0"], chain[0](torch.full((3, 4), 2.0)).detach())


def test_default_layers_that_do_not_run_are_left_out_and_named_ones_refused():
    batch = torch.ones(3, 2)
    assert list(activations(Sometimes(), data=batch)) == ["step"]
    with pytest.raises(ForwardError, match="layer 'idle' did not run in batch 0; choose layers that always run"):
        activations(Sometimes(), ["step", "idle"], batch)
    with pytest.raises(
        ForwardError, match="none of the model's 2 default layers gives rows in batch 0: layer 'step' did"
    ):
        activations(Sometimes(), data=batch * 0)


class Giving(nn.Module):
    """Two layers, and between them one that gives something else and is passed over, and one that never runs."""

    def __init__(self, output):
        super().__init__()
        self.first, self.aside, self.last, self.idle = (
            nn.Linear(2, 3),
            Handing(output),
            nn.Linear(3, 2),
            nn.Linear(2, 2),
        )

    def forward(self, batch):
        states = self.first(batch)
        self.aside(states)
        return self.last(states)


class Handing(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, _):
        return self.output


ASIDE = {
    "None": (None, "gives no floating tensor to record, but NoneType"),
    "int": (3, "gives no floating tensor to record, but int"),
    "bool": (True, "gives no floating tensor to record, but bool"),
    "empty": (((), {}), "gives no floating tensor to record, but tuple"),
    "whole": (torch.ones(4, 2, dtype=torch.int64), "gives no floating tensor to record, but Tensor of torch.int64"),
    "loss": (
        torch.tensor(0.5),
        "gives an output of shape () for a batch of 3 examples, and none of its axes counts them",
    ),
    "sparse": (torch.eye(4).to_sparse(), "gives a sparse tensor, and only dense ones can be recorded"),
}


@pytest.mark.parametrize("kind", ASIDE)
def test_default_layers_that_give_no_rows_are_left_out_with_the_reason_and_named_ones_refused(kind):
    output, reason = ASIDE[kind]
    model, batches = Giving(output), torch.randn(12, 2).split(4)
    read = Recorder(model)
    with inference_mode_of(model):
        assert [list(read(batch).rows) for batch in batches] == [["first", "last"]] * 3
    assert read.learnt.left_out == {"aside": f"layer 'aside' {reason}", "idle": "layer 'idle' did not run in batch 0"}
    assert set(nk.compare(model, data=list(batches)).layers_a) == {"first", "last"}
    with pytest.raises(NetkinError, match=f"layer 'aside' {re.escape(reason)}; .*choose another layer"):
        activations(model, ["aside", "first"], list(batches))


def test_a_layer_that_gives_rows_in_the_first_batch_only_is_refused():
    model = Giving(None)
    model.aside = nn.Linear(3, 3)
    read = Recorder(model)
    assert "aside" in read(torch.ones(4, 2)).rows
    model.aside.forward = lambda states: None
    with pytest.raises(ForwardError, match="'aside' gives no floating tensor to record, but NoneType"):
        read(torch.ones(4, 2))


def test_no_layer_is_left_out_where_all_give_rows(residual, images):
    read = Recorder(residual)
    with inference_mode_of(residual):
        read(images)
    assert read.learnt.left_out == {}


def test_a_changing_number_of_calls_is_refused():
    with pytest.raises(ForwardError, match="layer 'step#2' does not run in every batch: in batch 1 it runs"):
        activations(Sometimes(), data=[torch.ones(3, 2), torch.full((3, 2), 2.0)])
    assert list(activations(Sometimes(), "step#1", [torch.ones(3, 2), torch.full((3, 2), 2.0)])) == ["step#1"]


def test_nan_and_inf_are_refused_with_layer_batch_and_count(chain):
    bad = torch.ones(3, 4)
    bad[1] = float("nan")
    bad[2] = float("inf")
    with pytest.raises(InvalidValue, match="the inputs in batch 1 hold 8 NaN or Inf among 12 values, the first in its"):
        activations(chain, data=[torch.ones(3, 4), bad])
    with pytest.raises(InvalidValue, match="layer '0' in batch 1 holds 16 NaN or Inf among 24 values"):
        activations(
            chain, data=[torch.ones(3, 4), -torch.ones(3, 4)], forward=lambda m, x: m(x if x[0, 0] > 0 else bad)
        )


def test_large_finite_numbers_are_not_taken_for_inf():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    assert activations(model, data=torch.full((4, 4), 3e38))["0"].max() == torch.tensor(3e38)


def test_no_data_no_activations(chain):
    refusals(
        (lambda: activations(chain, data=[]), InvalidValue, ""),
        (lambda: activations(chain), InvalidValue, "data"),
    )


def test_faults_of_shape_name_the_layer(residual, images):
    with pytest.raises(ShapeError, match="layer 'conv1': shape 'cls' does not fit"):
        activations(residual, data=images, shape="cls")
    with refused(UnknownName, "shape"):
        activations(residual, data=images, shape={"fc": "pol"})


def test_batches_of_other_widths_are_refused():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    batches = [torch.ones(2, 3, 4), torch.ones(2, 5, 4)]
    with pytest.raises(ShapeError, match="layer '0' has 12 features in one batch and 20 in another; pad"):
        activations(model, data=batches, shape="flatten")
    assert activations(model, data=batches)["0"].shape == (4, 4)


def test_two_readers_of_one_model_do_not_disturb_each_other(residual, images):
    read, read_nothing = Recorder(residual), Recorder(residual, "fc", transform=lambda x: x[:1] * 0)
    with inference_mode_of(residual):
        for batch in images.split(4):
            rows, nothing = read(batch).rows, read_nothing(batch).rows
    assert read.facts["conv1"].shape == "pool"
    assert read.facts["fc"].shape == "matrix"
    assert read.batches == 3
    assert (len(rows["fc"]), len(nothing["fc"])) == (2, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_elsewhere_gets_its_batches_there(residual, images):
    here = activations(residual, data=images)
    there = activations(residual.cuda(), data=images)
    assert there["fc"].device.type == "cpu"
    assert torch.allclose(there["fc"], here["fc"], atol=1e-3)
    assert activations(residual, data=images, device="cuda")["fc"].is_cuda


def test_a_model_on_the_meta_device_is_refused():
    with pytest.raises(InvalidValue, match="a model on the 'meta' device computes no numbers; load its weights"):
        nk.activations(nn.Linear(4, 3, device="meta"), data=[torch.ones(5, 4)])


class Block(nn.Module):
    """Gives what its last part gave; its second part works in place."""

    def __init__(self):
        super().__init__()
        self.linear, self.relu, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.relu(self.linear(x)))


def test_a_glob_lists_a_module_and_what_is_in_it():
    model, data = nn.ModuleDict({"a": Block(), "b": Block()}), torch.randn(12, 4)
    run = {"forward": lambda model, x: model["b"](model["a"](x))}
    rows = activations(model, "**", data, **run)
    assert list(rows) == ["a", "a.linear", "a.relu", "a.last", "b", "b.linear", "b.relu", "b.last"]
    assert (rows["a.linear"] < 0).any()  # before the ReLU that works in place, which stays a layer of its own
    assert list(activations(model, ["a", "a.last"], data, **run)) == ["a", "a.last"]
    assert list(activations(model, "*", [data[:5], data[5:]], **run)) == ["a", "b"]
