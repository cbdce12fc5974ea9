"""Positions of tokens: which of each sequence's own tokens count, such as all but the first, where attention rests."""

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.comparing import explain
from netkin.errors import InvalidValue, ShapeError, UnknownName
from netkin.representations.shapes import TokenMask, adjoint_rows
from sequence_worlds import LINEAR, models, sequences

POSITIONS = ["1:", "1:-1", "::4", "-2:", ":3", "1::2", "-3:-1", "2:-1:2"]
LENGTHS = [1, 2, 3, 4, 7, 9]


def python_slice(text):
    return slice(*(int(part) if part else None for part in text.split(":")))


def padded(lengths, side):
    places = torch.arange(max(lengths)).expand(len(lengths), -1)
    counts = torch.tensor(lengths)[:, None]
    return places < counts if side == "right" else places >= max(lengths) - counts


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_mean_what_a_slice_of_each_sequence_means_in_python(positions, side):
    mask = padded(LENGTHS, side)
    tokens = torch.arange(mask.numel()).reshape(mask.shape)
    wanted = [
        number
        for row, valid in zip(tokens, mask, strict=True)
        for number in row[valid].tolist()[python_slice(positions)]
    ]
    assert tokens[TokenMask(mask).at(positions).tokens].tolist() == wanted


def hidden_rows(net, data, positions, layer="blocks.1"):
    """Return the rows of each sequence's own tokens, taken one by one from the layer's output."""
    rows = []
    for batch in data:
        output = nk.activations(net, layer, [batch], shape=lambda out: out.flatten(1))[layer].reshape(
            *batch["input_ids"].shape, -1
        )
        for sequence, valid in zip(output, batch["attention_mask"] != 0, strict=True):
            rows.append(sequence[valid][python_slice(positions)])
    return rows


def left_padded(data):
    return [{name: tensor.flip(1) for name, tensor in batch.items()} for batch in data]


@pytest.mark.parametrize("padding", [list, left_padded])
@pytest.mark.parametrize("tokens", [None, 10_000])
@pytest.mark.parametrize("positions", ["1:", "1:-1", "::4"])
def test_measures_see_the_chosen_positions_alone(positions, tokens, padding):
    nets, data = models(), padding(sequences())
    options = {"layers": "blocks.*", "positions": positions, "progress": False}
    found = nk.compare(*nets, data, LINEAR, shape="tokens", tokens=tokens, **options)
    X, Y = (torch.cat(hidden_rows(net, data, positions)) for net in nets)
    for measure in LINEAR:
        by_hand = float(nk.measures.find(measure).function(X, Y, **nk.measures.find(measure).parameters))
        assert found[measure]["blocks.1", "blocks.1"] == pytest.approx(by_hand, rel=1e-5, abs=1e-6), measure
    assert set(found.shapes_a.values()) == {f"tokens[{positions}]"}


@pytest.mark.parametrize(("shape", "reduced"), [("mean", lambda rows: rows.mean(0)), ("last", lambda rows: rows[-1])])
def test_means_and_last_tokens_are_those_of_the_chosen_positions(shape, reduced):
    net, data = models()[0], sequences()
    rows = nk.activations(net, "blocks.1", data, shape=f"{shape}[:-1]")["blocks.1"]
    by_hand = torch.stack([reduced(sequence) for sequence in hidden_rows(net, data, ":-1")])
    torch.testing.assert_close(rows, by_hand)


def test_without_a_mask_all_tokens_count():
    nets, ids = models(), torch.cat([batch["input_ids"] for batch in sequences(ragged=False)])
    masked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"layers": "blocks.*", "shape": "tokens", "positions": "1:-1", "progress": False}
    measures = ["cka", "cka_minibatch(batch=16)"]
    plain, with_mask = (nk.compare(*nets, [data], measures, **options) for data in (ids, masked))
    np.testing.assert_allclose(plain["cka"].values, with_mask["cka"].values, rtol=1e-6)
    recorded = [
        {
            "blocks.1": nk.activations(net, "blocks.1", [ids], shape=lambda out: out.flatten(1))["blocks.1"].reshape(
                *ids.shape, -1
            )
        }
        for net in nets
    ]
    cut = [{"blocks.1": side["blocks.1"][:, 1:-1]} for side in recorded]
    by_hand = nk.compare(*cut, measures=measures[1], shape="tokens")["blocks.1", "blocks.1"]
    assert plain[measures[1]]["blocks.1", "blocks.1"] == pytest.approx(by_hand, rel=1e-4)
    again = nk.compare(*recorded, measures=measures, shape="tokens", positions="1:-1")
    assert again["cka"]["blocks.1", "blocks.1"] == pytest.approx(plain["cka"]["blocks.1", "blocks.1"], rel=1e-5)
    comparer = nk.Comparer(shape="tokens", positions="1:-1")
    for part in (slice(0, 8), slice(8, None)):
        comparer.update({name: {"x": side["blocks.1"][part]} for name, side in zip("ab", recorded, strict=True)})
    assert comparer.compute()["x", "x"] == pytest.approx(plain["cka"]["blocks.1", "blocks.1"], rel=1e-5)


def test_updates_with_masks_take_the_positions_of_each_sequence():
    nets, data = models(), left_padded(sequences())
    whole = nk.compare(*nets, data, layers="blocks.1", shape="tokens", positions="1:", progress=False)
    comparer = nk.Comparer(shape="tokens", positions="1:", layers="blocks.1")
    for batch in data:
        with comparer.watching(a=nets[0], b=nets[1]):
            for net in nets:
                net(**batch)
    assert comparer.compute()["blocks.1", "blocks.1"] == pytest.approx(whole["blocks.1", "blocks.1"], rel=1e-6)


@pytest.mark.parametrize("tokens", [None, 60])
def test_parts_and_files_keep_the_positions(tokens, tmp_path):
    data = [row for batch in sequences() for row in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    collate = {
        "collate_fn": lambda rows: dict(
            zip(["input_ids", "attention_mask"], map(torch.stack, zip(*rows, strict=True)), strict=True)
        )
    }
    loader = torch.utils.data.DataLoader(data, batch_size=5, **collate)
    options = {"layers": "blocks.*", "shape": "tokens", "positions": "1:", "tokens": tokens, "progress": False}
    whole = nk.compare(*models(), loader, **options)
    parts = [nk.collect(*models(), loader, ["cka"], part=(k, 3), **options) for k in (3, 1, 2)]
    nk.merge(parts).save(tmp_path / "parts.stats")
    np.testing.assert_allclose(
        nk.load(tmp_path / "parts.stats").compute()["cka"].values, whole["cka"].values, atol=1e-6
    )
    other = nk.collect(*models(), loader, ["cka"], part=(1, 3), **options | {"positions": "2:"})
    with pytest.raises(ShapeError, match=r"tokens\[1:\]"):
        nk.merge([parts[0], other])


def test_many_models_are_compared_at_the_chosen_positions():
    nets, data = models(), sequences()
    options = {"layers": "blocks.1", "shape": "tokens", "positions": "1:", "progress": False}
    several = nk.compare_many({"a": nets[0], "b": nets[1], "c": nets[0]}, data, **options)
    alone = nk.compare(*nets, data, **options)
    assert several["a", "b"]["blocks.1", "blocks.1"] == pytest.approx(alone["blocks.1", "blocks.1"], rel=1e-9)
    assert several["a", "c"].shapes_b == {"blocks.1": "tokens[1:]"}


def test_positions_can_be_written_in_the_shape_of_some_layers():
    nets, data = models(), sequences()
    mixed = nk.compare(
        *nets, data, layers="blocks.*", shape={"blocks.1": "tokens[1::1]", "**": "tokens"}, progress=False
    )
    assert mixed.shapes_a == {"blocks.0": "tokens", "blocks.1": "tokens[1:]", "blocks.2": "tokens"}
    assert ("blocks.0", "blocks.1") in mixed["cka"].missing  # other numbers of rows
    everything = nk.compare(*nets, data, layers="blocks.*", shape="tokens", positions=":", progress=False)
    assert set(everything.shapes_a.values()) == {"tokens"}


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images):
        return self.conv(images)


PICTURES = torch.zeros(4, 3, 8, 8)


@pytest.mark.parametrize(
    ("options", "error", "argument"),
    [
        ({"positions": "first"}, InvalidValue, "positions"),
        ({"positions": 1}, InvalidValue, "positions"),
        ({"positions": "::-1"}, InvalidValue, "positions"),
        ({"positions": "::0"}, InvalidValue, "positions"),
        ({"positions": "1:", "shape": "cls"}, InvalidValue, "positions"),
        ({"positions": "1:", "shape": "flatten"}, InvalidValue, "positions"),
        ({"positions": "1:", "shape": "positions"}, InvalidValue, "positions"),
        ({"positions": "1:", "shape": "tokens[2:]"}, InvalidValue, "positions"),
        ({"positions": "1:", "shape": lambda output: output[:, 0]}, InvalidValue, "positions"),
        ({"positions": "1:", "shape": {"blocks.1": "cls", "**": "tokens"}}, InvalidValue, "positions"),
        ({"positions": "9:", "shape": "tokens"}, InvalidValue, "positions"),
        ({"positions": "4:", "shape": "mean"}, InvalidValue, None),
        ({"shape": "cls[1:]"}, UnknownName, "shape"),
    ],
)
def test_positions_that_mean_nothing_are_refused(options, error, argument):
    with pytest.raises(error) as refusal:
        nk.compare(*models(), sequences(), layers="blocks.*", progress=False, **options)
    assert getattr(refusal.value, "argument", None) == argument


def test_data_without_tokens_are_refused_by_the_plan_and_by_the_work():
    with pytest.raises(ShapeError, match="choose layers of tokens"):
        nk.compare(Images(), data=PICTURES, positions="1:")
    for work in (nk.compare, explain):
        with pytest.raises(InvalidValue) as refusal:
            work(nn.Linear(3, 4), data=torch.ones(5, 3), positions="1:")
        assert refusal.value.argument == "positions"


@pytest.mark.parametrize("mask", [None, torch.ones(3, 6, dtype=torch.long)])
def test_gradients_are_those_at_the_chosen_positions(mask):
    gradient = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(adjoint_rows(gradient, "mean[1:]", mask), gradient[:, 1:].sum(1))
    torch.testing.assert_close(adjoint_rows(gradient, "tokens[1:]", mask), gradient[:, 1:].flatten(0, 1))
