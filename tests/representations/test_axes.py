"""Which axis of an output counts the examples is learnt, never guessed."""

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import ShapeError
from netkin.representations import Recorder, activations, inference_mode_of, tokens


class Recurrent(nn.Module):
    """A recurrent net and a head on its last state; time comes before the examples unless `batch_first`."""

    def __init__(self, batch_first):
        super().__init__()
        self.rnn = nn.LSTM(4, 3, batch_first=batch_first)
        self.head = nn.Linear(3, 2)
        self.batch_first, self.lengths = batch_first, []

    def forward(self, batch, attention_mask=None):
        self.lengths.append(len(batch))
        states = self.rnn(batch if self.batch_first else batch.transpose(0, 1))[0]
        return self.head(states[:, -1] if self.batch_first else states[-1])


class Places(nn.Module):
    """Adds a table of 8 places, which know nothing of the examples, to its inputs, and does nothing else to them."""

    def __init__(self, make=lambda: nn.Embedding(512, 4)):
        super().__init__()
        self.places, self.body = make(), nn.Identity()

    def forward(self, batch):
        return self.body(batch + self.places(torch.arange(8)))


class Whole(nn.Module):
    """Runs on batches of 8 only, like a program exported for that size."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        if len(batch) != 8:
            raise ValueError("wrong size")
        return self.inner(batch)


@pytest.fixture
def twins():
    """The same function twice: once examples first, once time first."""
    first, second = Recurrent(batch_first=True), Recurrent(batch_first=False)
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize("examples", [1, 2, 3, 4, 7, 8, 40])
@pytest.mark.parametrize("shape", ["mean", "last", "flatten", tokens])
def test_outputs_with_time_first_give_the_rows_of_those_with_examples_first(twins, examples, shape):
    data = torch.randn(examples, 7, 4)
    first, second = (activations(model, ["rnn", "head"], data, shape=shape) for model in twins)
    assert all(torch.equal(first[layer], second[layer]) for layer in first)


def test_as_many_examples_as_steps_of_time_do_not_spoil_a_comparison(twins):
    assert nk.compare(*twins, torch.randn(64, 64, 4))["rnn", "rnn"] == pytest.approx(1, abs=1e-6)


def test_a_mask_stays_examples_by_tokens(twins):
    batch = {"batch": torch.randn(5, 5, 4), "attention_mask": torch.ones(5, 5).tril().long()}
    first, second = (activations(model, "rnn", [batch])["rnn"] for model in twins)
    states = twins[0].rnn(batch["batch"])[0].detach()
    expected = torch.stack([states[one, : one + 1].mean(0) for one in range(5)])
    assert torch.allclose(first, expected, atol=1e-6)
    assert torch.equal(first, second)


@pytest.mark.parametrize("examples", [1, 2, 3, 8, 9])
def test_a_table_with_as_many_rows_as_there_are_examples_is_not_taken_for_them(examples):
    data = torch.randn(examples, 8, 4)
    assert list(activations(Places(), data=data)) == ["body"]
    with pytest.raises(ShapeError, match=r"'places' gives an output of shape \(8, 4\) for a batch of 3 ex"):
        activations(Places(), "places", data)


def test_a_table_of_weights_is_not_taken_for_examples():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))

        def forward(self, _):
            return self.weight

    assert list(activations(Places(Table), data=torch.randn(8, 1, 4))) == ["body"]


def test_similarities_of_the_examples_among_each_other_are_rows_by_their_first_axis():
    class Similarities(nn.Module):
        def forward(self, x):
            return (x @ x.T).relu() + torch.arange(len(x))

    X = torch.randn(6, 4)
    found = activations(nn.Sequential(Similarities(), nn.Identity()), "0", X)["0"]
    assert torch.equal(found, (X @ X.T).relu() + torch.arange(6))


def test_a_program_of_fixed_size_is_read_where_the_first_axis_alone_has_it():
    data = torch.randn(8, 5)
    model = Whole(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)))
    assert list(activations(model, data=data)) == ["inner.1"]
    assert torch.equal(activations(model, data=data)["inner.1"], model(data).detach())
    refusal = r"'inner.0' gives an output of shape \(8, 8\) for .* 8 examples.*unclear.*batches of this size only"
    with pytest.raises(ShapeError, match=refusal):
        activations(model, "inner.0", data)


def test_a_function_as_shape_gets_the_output_as_it_is(twins):
    data = torch.randn(5, 5, 4)
    expected = activations(twins[0], "rnn", data, shape="last")["rnn"]
    assert torch.equal(activations(twins[1], "rnn", data, shape=lambda states: states[-1])["rnn"], expected)


def lengths_run(model, data, **options):
    """Return how many examples the model was run on in every pass, and the recorder."""
    recorder = Recorder(model, **options)
    model.lengths.clear()
    with inference_mode_of(model):
        for batch in data:
            recorder(batch)
    return model.lengths, recorder


def test_two_runs_of_few_examples_show_the_axes(twins):
    for model, axis in zip(twins, (0, 1), strict=True):
        lengths, recorder = lengths_run(model, torch.randn(20, 7, 4).split(10))
        assert lengths == [2, 3, 10, 10]
        assert {name: facts.axis for name, facts in recorder.facts.items()} == {"rnn": axis, "head": 0}
    lengths, _ = lengths_run(model, torch.randn(20, 7, 4).split(10), learnt=recorder.learnt)
    assert lengths == [10, 10]


def test_a_recorder_learns_the_axes_once(twins):
    model = twins[1]
    recorder = nk.DynamicsRecorder(model, torch.randn(10, 7, 4))
    recorder.probe(0)
    assert model.lengths[-3:] == [2, 3, 10]
    model.lengths.clear()
    recorder.probe(1)
    assert model.lengths == [10]


@pytest.mark.parametrize("examples", [7, 9])
def test_learning_the_axes_draws_no_random_numbers(twins, examples):
    class Noisy(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, batch):
            return self.inner(batch.add_(torch.rand(())))

    data = torch.randn(examples, 7, 4)
    torch.manual_seed(1)
    expected = twins[0](data + torch.rand(())).detach()
    torch.manual_seed(1)
    assert torch.equal(activations(Noisy(twins[1]), ["inner.rnn", "inner"], data)["inner"], expected)
