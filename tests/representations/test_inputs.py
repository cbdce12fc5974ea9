"""How data become batches, and how a batch reaches a model."""

from collections import UserDict
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import netkin as nk
from netkin.errors import ForwardError, InvalidValue, ShapeError
from netkin.representations.hooks import leaves
from netkin.representations.inputs import (
    attention_mask,
    batch_length,
    batches_of,
    call,
    device_of,
    dtype_of,
    feed,
    take,
)
from refusals import refusals
from worlds import data_parallel

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10)


class Encoding(UserDict):
    """A mapping with manners of its own, like Hugging Face's `BatchEncoding`."""


@dataclass(frozen=True)
class Pair:
    inputs: torch.Tensor
    names: list


class Taking(nn.Module):
    """Gives back what it was called with."""

    def forward(self, *inputs, **keywords):
        return inputs or keywords


def test_a_tensor_is_passed_as_it_is_and_of_a_tuple_the_first_element():
    assert torch.equal(call(Taking(), X)[0], X)
    assert torch.equal(call(Taking(), (X, Y))[0], X)
    assert torch.equal(call(Taking(), [X, Y])[0], X)


@pytest.mark.parametrize("kind", [dict, Encoding, lambda items: (Encoding(items), Y), MappingProxyType])
def test_a_mapping_is_passed_as_keywords_without_its_labels(kind):
    batch = kind({"input_ids": Y, "attention_mask": Y, "labels": Y, "label": Y, "targets": Y, "target": Y, "y": Y})
    assert set(feed(Taking(), batch)) == {"input_ids", "attention_mask"}
    assert torch.equal(attention_mask(batch), Y)


def test_batches_without_a_mask_have_none():
    assert attention_mask(X) is None
    assert attention_mask((X, Y)) is None
    assert attention_mask({"x": X}) is None
    assert attention_mask(()) is None


def test_a_forward_function_gets_the_model_and_the_whole_batch():
    result = feed(Taking(), (X, Y), forward=lambda model, batch: model(batch[1], batch[0]))
    assert torch.equal(result[0], Y)


def test_wrappers_are_left_out(chain):
    chain.double()
    batch = torch.randn(3, 4)
    plain = feed(chain, batch)
    for model in (data_parallel(chain), torch.compile(chain, backend="eager")):
        assert torch.equal(feed(model, batch), plain)
        feed(model, batch, forward=lambda inner, _: inner[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_inputs_take_the_models_precision(dtype):
    model = nn.Sequential(Taking()).to(dtype)
    model.register_buffer("scale", torch.ones(1, dtype=dtype))
    inputs = feed(model, {"x": X, "ids": Y, "name": "text", "array": np.ones(3)}, forward=lambda model, batch: batch)
    assert (inputs["x"].dtype, inputs["ids"].dtype, inputs["array"].dtype) == (dtype, torch.int64, dtype)
    assert inputs["name"] == "text"
    assert X.dtype == torch.float32


def test_a_model_without_parameters_takes_what_comes():
    assert device_of(Taking()) == torch.device("cpu")
    assert dtype_of(Taking()) is None
    assert feed(Taking(), X.double())[0].dtype == torch.float64


def test_arrays_become_tensors_even_when_read_only():
    array = np.ones((3, 4), dtype=np.float64)
    array.flags.writeable = False
    assert feed(nn.Linear(4, 2), array).shape == (3, 2)


def test_a_transform_works_on_the_inputs_only():
    fed = feed(Taking(), (X, Y), transform=lambda x: x * 2, forward=lambda model, batch: batch)
    assert torch.equal(fed[0], X * 2)
    assert torch.equal(fed[1], Y)
    assert torch.equal(feed(Taking(), X, transform=lambda x: x + 1)[0], X + 1)
    assert set(feed(Taking(), {"x": X, "y": Y}, transform=lambda batch: {"z": batch["x"], "y": batch["y"]})) == {"z"}


def arrays(batch):
    return [leaf for _, leaf in leaves(batch) if isinstance(leaf, (torch.Tensor, np.ndarray))]


def overwritten(batch):
    """Overwrite all tensors and arrays in a batch, and give it back."""
    for array in arrays(batch):
        array[...] = 0
    return batch


class Zeroing(nn.Module):
    """Overwrites every tensor that it is given."""

    def forward(self, *inputs, **keywords):
        overwritten((inputs, keywords))


OWNED = {
    "tensor": lambda: torch.ones(3, 2),
    "view": lambda: torch.ones(6, 4)[::2, 1:3],
    "array": lambda: np.ones((3, 2), dtype=np.float32),
    "reversed array": lambda: np.ones((3, 2), dtype=np.float32)[::-1],
    "tuple": lambda: (torch.ones(3, 2), torch.ones(3)),
    "mapping": lambda: {"x": torch.ones(3, 2), "ids": torch.ones(3, dtype=torch.int64)},
    "nested": lambda: ({"x": [torch.ones(3, 2), np.ones(3)], "pair": (torch.ones(3), Pair(torch.ones(3), []))}, None),
}


@pytest.mark.parametrize("kind", OWNED)
@pytest.mark.parametrize("transform", [None, lambda batch: batch, overwritten], ids=["plain", "passing", "in place"])
def test_a_model_or_transform_that_works_in_place_changes_no_data_of_the_caller(kind, transform):
    batch = OWNED[kind]()
    feed(Zeroing(), batch, transform=transform)
    feed(Zeroing(), batch, transform=transform, forward=lambda model, given: overwritten(given))
    assert all((array == 1).all() for array in arrays(batch))


def test_what_a_transform_holds_on_to_is_not_changed_by_the_model():
    held = torch.ones(3, 2)
    feed(Zeroing(), X, transform=lambda _: held)
    assert held.min() == 1


def test_a_model_that_begins_with_an_in_place_relu_spoils_neither_the_other_model_nor_the_data(chain):
    data = torch.randn(20, 4)
    before = data.clone()
    clipping = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 5))
    rows = clipping[1](data.relu()).detach(), chain[0](data).detach()
    expected = nk.cka(nk.Moments.of(*rows)).item()
    assert nk.compare(clipping, chain, data)["1", "0"] == pytest.approx(expected, abs=1e-6)
    assert nk.compare(chain, clipping, data)["0", "1"] == pytest.approx(expected, abs=1e-6)
    nk.explain(clipping, chain, data)
    nk.DynamicsRecorder(clipping, data).probe(0)
    assert torch.equal(data, before)


def test_a_copied_input_keeps_its_gradient_and_memory_format():
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    given = feed(Taking(), image)[0]
    assert given.is_contiguous(memory_format=torch.channels_last)
    given.sum().backward()
    assert torch.equal(image.grad, torch.ones(2, 3, 4, 4))


@pytest.mark.parametrize("data", [X, X.numpy()], ids=["tensor", "array"])
def test_one_array_is_split_into_batches(data):
    assert [len(batch) for batch in batches_of(data, batch_size=4)] == [4, 4, 2]
    assert [len(batch) for batch in batches_of(torch.ones(300, 1))] == [128, 128, 44]


def test_a_mapping_of_arrays_is_split_into_batches():
    batches = list(batches_of({"x": X, "y": Y, "texts": list("abcdefghij")}, batch_size=4))
    assert [len(batch["x"]) for batch in batches] == [4, 4, 2]
    assert batches[2]["texts"] == ["i", "j"]


def test_a_data_set_is_split_into_batches():
    assert [len(batch[0]) for batch in batches_of(TensorDataset(X, Y), batch_size=4)] == [4, 4, 2]


def test_loaders_lists_and_iterables_without_length_give_their_batches():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(X)

    lengths = [4, 4, 2]
    assert [len(x) for x, _ in batches_of(DataLoader(TensorDataset(X, Y), batch_size=4))] == lengths
    assert [len(batch) for batch in batches_of(DataLoader(Stream(), batch_size=4))] == lengths
    assert [len(batch) for batch in batches_of(list(X.split(4)))] == lengths
    assert [len(batch) for batch in batches_of(batch for batch in X.split(4))] == lengths


@pytest.mark.parametrize("examples, lengths", [(1, [1]), (4, [4]), (5, [4, 1]), (10, [4, 4, 2]), (99, [4, 4, 2])])
def test_the_last_batch_is_cut_to_the_examples_asked_for(examples, lengths):
    batches = list(batches_of(zip(X.split(4), Y.split(4), strict=True), examples))
    assert [len(x) for x, _ in batches] == lengths
    assert [len(y) for _, y in batches] == lengths


def test_no_batch_is_fetched_beyond_what_is_needed():
    stream = iter(X.split(2))
    list(batches_of(stream, 4))
    assert torch.equal(next(stream), X[4:6])


def test_batches_of_any_build_are_cut():
    assert take(Pair(X, list("abcdefghij")), 2).names == ["a", "b"]
    cut = take(Encoding(x=X, scale=torch.ones(1), name="data"), 3)
    assert isinstance(cut, Encoding)
    assert (len(cut["x"]), len(cut["scale"]), cut["name"]) == (3, 1, "data")
    first, second = take([torch.ones(2, 5), torch.ones(2)], 1)
    assert (len(first), len(second)) == (1, 1)
    assert batch_length((torch.tensor(3.0), {"ids": Y})) == 10


def test_empty_batches_are_passed_over():
    assert [len(batch) for batch in batches_of([X[:0], X, X[:0]])] == [10]


@pytest.mark.parametrize(
    "data, words",
    [
        ([], "hold no examples"),
        (iter([]), "an iterator can be read only once"),
        (X[:0], r"hold no examples \(shape \(0, 2\)\)"),
        (X[:0].numpy(), r"hold no examples \(shape \(0, 2\)\)"),
        ([X[:0]], "hold no examples"),
    ],
)
def test_data_without_batches_are_refused(data, words):
    with pytest.raises(InvalidValue, match=f"the data gave no batches.*{words}"):
        list(batches_of(data))


class Sum(nn.Module):
    """A model of two inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, left, right, scale=1.0):
        return self.first(left) + scale * self.second(right)


def convnet():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))


IMAGES = torch.randint(256, (6, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "model, data, words",
    [
        (convnet(), IMAGES, r"inputs of type uint8 and shape \(6, 3, 4, 4\) .* by a function given as `transform`"),
        (convnet(), [(IMAGES.numpy(), Y[:6])], "inputs of type uint8"),
        (convnet(), IMAGES > 9, "inputs of type bool"),
        (convnet(), [torch.zeros(6, 3, 0, 4)], r"float32 and shape \(6, 3, 0, 4\) .RuntimeError"),
        (convnet(), ["a first text", "a second"], "a batch holds text .'a first text'., and Sequential takes numbers"),
        (convnet(), [(["cat", "dog"], Y[:2])], "a batch holds text .'cat'."),
        (convnet(), [{"input": ["cat", "dog"]}], "a batch holds text .'cat'."),
        (
            Sum(),
            [(X, X)],
            "Sum takes 'left', 'right', and is given one input, .* mappings with these keys, .* `forward`",
        ),
        (Sum(), X, "Sum takes 'left', 'right'"),
        (Sum(), [{"left": X}], "a batch has the keys 'left', which do not fit Sum: missing .*'right'"),
    ],
)
def test_inputs_that_do_not_fit_the_model_are_refused_in_one_sentence(model, data, words):
    for run in (lambda: nk.activations(model, data=data), lambda: nk.compare(model, data=data)):
        with pytest.raises(ForwardError, match=words):
            run()


def test_the_ways_that_the_refusals_name_lead_on():
    two = Sum()
    expected = nk.activations(two, "first", [{"left": X, "right": X}])["first"]
    found = nk.activations(two, "first", [(X, X)], forward=lambda model, batch: model(*batch))["first"]
    assert torch.equal(found, expected)
    assert nk.activations(convnet(), "3", IMAGES, transform=lambda x: x.float() / 255)["3"].shape == (6, 5)
    assert nk.activations(two, "first", ["ab", "c"], forward=lambda model, text: model(X, X))["first"].shape == (
        20,
        2 + 1,
    )


def test_what_a_model_raises_for_reasons_of_its_own_is_left_as_it_is():
    class Crashing(nn.Linear):
        def forward(self, x):
            raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        nk.activations(Crashing(2, 2), data=X)


@pytest.fixture
def t5():
    """A small encoder-decoder with random weights."""
    transformers = pytest.importorskip("transformers", reason="needs the extra netkin[hf]")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval(), transformers.T5Model(config).eval()


def test_an_encoder_decoder_makes_its_decoders_inputs_from_the_labels(t5):
    model, _ = t5
    tokens, labels = (
        torch.randint(1, 40, (5, length), generator=torch.Generator().manual_seed(1)) for length in (7, 4)
    )
    names = ["encoder.final_layer_norm", "decoder.final_layer_norm"]
    found = nk.activations(model, names, [{"input_ids": tokens, "labels": labels}])
    with torch.no_grad():
        itself = model(input_ids=tokens, labels=labels, output_hidden_states=True)
    expected = [itself.encoder_last_hidden_state, itself.decoder_hidden_states[-1]]
    for name, states in zip(names, expected, strict=True):
        torch.testing.assert_close(found[name], states.mean(1))


def test_an_encoder_decoder_without_inputs_for_its_decoder_is_refused(t5):
    tokens = torch.ones(5, 7, dtype=torch.long)
    for model, batch in (
        (t5[0], {"input_ids": tokens}),
        (t5[0], tokens),
        (t5[1], {"input_ids": tokens, "labels": tokens}),
    ):
        with pytest.raises(ForwardError, match=f"{type(model).__name__} is an encoder with a decoder.*decoder_input"):
            nk.activations(model, data=[batch])


def test_data_that_cannot_be_read_are_refused():
    refusals(
        (lambda: list(batches_of(None)), InvalidValue, "data"),
        (lambda: list(batches_of("digits")), InvalidValue, "data"),
        (lambda: list(batches_of((X, Y))), InvalidValue, "data"),
        (lambda: list(batches_of(X, 0)), InvalidValue, "examples"),
        (lambda: list(batches_of(["text"], 3)), ShapeError, ""),
    )


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, pixels, scale=1.0):
        return self.linear(pixels) * scale


@pytest.mark.parametrize(
    "batch, fault",
    [
        ({"image": X, "labels": Y}, "keys 'image', which do not fit Scaled: missing a required argument: 'pixels'"),
        ({"pixels": X, "id": Y}, "keys 'pixels', 'id'.*unexpected keyword argument 'id'"),
        ({"labels": Y}, "keys of labels alone"),
        ({1: X}, "keys 1, .*keywords must be strings"),
    ],
)
def test_keys_that_the_model_does_not_take_are_refused_with_transforms_named(batch, fault):
    with pytest.raises(ForwardError, match=f"{fault}.*`transform` .`transforms` for several models. or `forward`"):
        nk.activations(Scaled(), data=[batch])


def test_a_fault_inside_the_model_is_not_taken_for_one_of_the_keys():
    with pytest.raises(TypeError, match="only integer tensors"):
        call(Scaled(), {"pixels": X, "scale": "no number"})


def test_none_instead_of_a_batch_is_refused():
    refusals(
        (lambda: list(batches_of([X, None])), InvalidValue, ""),
        (lambda: nk.compare(nn.Linear(2, 3), data=[None]), InvalidValue, ""),
    )


def test_arrays_of_another_byte_order_are_fed_like_any_others():
    inputs, labels = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8) % 3
    model, swapped = nn.Linear(3, 3), inputs.astype(">f4")
    assert torch.equal(nk.activations(model, [""], swapped)[""], nk.activations(model, [""], inputs)[""])
    batch = (swapped, labels.astype(">i8"))
    own, other = (nk.gradients(model, [""], [one], target="labels")[""] for one in (batch, (inputs, labels)))
    assert torch.equal(own, other)
