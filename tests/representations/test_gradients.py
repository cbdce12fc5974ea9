"""Gradients of every example's loss at layers' outputs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import netkin as nk
from netkin.errors import ForwardError, InvalidValue, ShapeError, UnknownName
from netkin.representations import gradients
from netkin.representations.cutting import replacing
from netkin.representations.gradients import Target
from netkin.settings import evaluating
from refusals import refused


class Twice(nn.Module):
    """Calls one layer two times, with an in-place step after each."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, batch):
        batch = self.relu(self.first(batch))
        batch = self.relu(self.again(self.again(batch)))
        return {"logits": self.head(batch), "more": batch.detach()}


class Mixing(nn.Module):
    """Mixes the examples of a batch by a function of their rows."""

    def __init__(self, mixed=lambda rows: rows - rows.mean(0)):
        super().__init__()
        self.first, self.head, self.mixed = nn.Linear(4, 5), nn.Linear(5, 3), mixed

    def forward(self, batch):
        return self.head(self.mixed(self.first(batch)))


@pytest.fixture
def convnet():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3, stride=2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(5 * 4 * 4, 4)).double()
    model[1].running_mean.normal_()
    return model


@pytest.fixture
def pictures():
    return torch.randn(7, 3, 11, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def tempered(logits, beta=0.5):
    """The loss written out: minus the expected logarithm under p^β, normalised, which is constant."""
    p = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    q = (p**beta / (p**beta).sum(-1, keepdim=True)).detach()
    return -(q * torch.log(p)).sum(-1)


def one_by_one(model, layer, data, loss):
    """The gradient at a layer's output of each example alone, by a step that is added there."""
    found = []
    with evaluating(model):
        for i in range(len(data)):
            steps = []

            def add(output, steps=steps):
                steps.append(torch.zeros_like(output, requires_grad=True))
                return output + steps[-1]

            with replacing(model, layer, add):
                output = model(data[i : i + 1].clone())
            logits = output["logits"] if isinstance(output, dict) else output
            found.append(torch.autograd.grad(loss(logits, i), steps)[0][0])
    return torch.stack(found)


def test_at_the_logits_the_gradient_is_the_prediction_less_the_tempered_one(convnet, pictures):
    with evaluating(convnet):
        p = convnet(pictures.clone()).softmax(-1).detach()
    q = p.sqrt() / p.sqrt().sum(-1, keepdim=True)
    assert torch.allclose(gradients(convnet, "5", pictures)["5"], p - q, atol=1e-14)


@pytest.mark.parametrize("layer", ["0", "1", "2", "3"])
def test_every_layer_agrees_with_a_loop_over_single_examples(convnet, pictures, layer):
    found = gradients(convnet, ["0", "1", "2", "3"], pictures, shape="flatten")[layer]
    slow = one_by_one(convnet, layer, pictures, lambda logits, i: tempered(logits).sum()).flatten(1)
    assert found.abs().max() > 1e-4
    assert torch.allclose(found, slow, atol=1e-14)


def test_the_gradient_agrees_with_vmap_of_grad(convnet, pictures):
    def tail(features):
        return tempered(convnet[3:](features.relu().unsqueeze(0))).sum()

    with evaluating(convnet):
        features = convnet[:2](pictures).detach()
        slow = torch.func.vmap(torch.func.grad(tail))(features)
    assert torch.allclose(gradients(convnet, "1", pictures, shape="flatten")["1"], slow.flatten(1), atol=1e-14)


@pytest.mark.parametrize(("shape", "reduce"), [("pool", lambda g: g.sum((2, 3))), ("positions", None), ("dft", None)])
def test_shapes_of_maps_sum_where_outputs_are_averaged(convnet, pictures, shape, reduce):
    slow = one_by_one(convnet, "0", pictures, lambda logits, i: tempered(logits).sum())
    wanted = {"positions": slow.movedim(1, -1).reshape(-1, 4), "dft": slow}.get(shape)
    found = gradients(convnet, "0", pictures, shape=shape)["0"]
    assert torch.allclose(found, wanted if reduce is None else reduce(slow), atol=1e-14)


def test_the_pooled_gradient_tells_what_a_step_of_all_places_does(convnet, pictures):
    rows, step = gradients(convnet, "0", pictures)["0"], torch.randn(4, dtype=torch.float64)
    losses = []
    for size in (1e-5, -1e-5):
        with (
            evaluating(convnet),
            torch.no_grad(),
            replacing(convnet, "0", lambda output, size=size: output + size * step[:, None, None]),
        ):
            logits = convnet(pictures.clone())
        losses.append(logits)
    p = ((losses[0] + losses[1]) / 2).softmax(-1)
    q = p.sqrt() / p.sqrt().sum(-1, keepdim=True)
    slope = [-(q * logits.log_softmax(-1)).sum(-1) for logits in losses]
    assert torch.allclose(rows @ step, (slope[0] - slope[1]) / 2e-5, atol=1e-7)


def test_a_module_called_twice_and_in_place_steps_have_gradients_of_their_own(pictures):
    torch.manual_seed(0)
    model, data = Twice().double(), torch.randn(5, 4, dtype=torch.float64)
    found = gradients(model, ["first", "again", "again#2", "relu#2"], data)
    for layer in ("first", "again#1", "again#2", "relu#2"):
        slow = one_by_one(model, layer, data, lambda logits, i: tempered(logits).sum())
        assert torch.allclose(found[layer.removesuffix("#1")], slow, atol=1e-14), layer


def test_labels_predictions_and_functions_are_targets(convnet, pictures):
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    batches = [(pictures[:4], labels[:4]), (pictures[4:], labels[4:])]
    with evaluating(convnet):
        predicted = convnet(pictures.clone()).argmax(1)
    for target, chosen in (("labels", labels), ("predicted", predicted)):
        slow = one_by_one(convnet, "3", pictures, lambda z, i, chosen=chosen: cross_entropy(z, chosen[i : i + 1]))
        found = gradients(convnet, "3", batches, target=target, shape="flatten")["3"]
        assert torch.allclose(found, slow.flatten(1), atol=1e-14)

    def squares(outputs, labels):
        return (outputs.square().sum(1)) * labels

    slow = one_by_one(convnet, "3", pictures, lambda z, i: z.square().sum() * labels[i])
    found = gradients(convnet, "3", batches, target=squares, shape="flatten")["3"]
    assert torch.allclose(found, slow.flatten(1), atol=1e-13)


def test_many_labels_at_once_and_numbers_have_gradients_too(convnet, pictures):
    many = torch.rand(7, 4, generator=torch.Generator().manual_seed(0)).round().double()
    with evaluating(convnet):
        z = convnet(pictures.clone()).detach()
    p = z.sigmoid()
    q = p**0.3 / (p**0.3 + (1 - p) ** 0.3)
    found = gradients(convnet, "5", pictures, outputs="multilabel", beta=0.3)["5"]
    assert torch.allclose(found, p - q, atol=1e-14)
    slow = one_by_one(
        convnet, "0", pictures, lambda z, i: binary_cross_entropy_with_logits(z[0], many[i], reduction="sum")
    )
    found = gradients(convnet, "0", [(pictures, many)], target="labels", outputs="multilabel", shape="flatten")["0"]
    assert torch.allclose(found, slow.flatten(1), atol=1e-13)
    found = gradients(convnet, "5", [(pictures, many)], target="labels", outputs="continuous")["5"]
    assert torch.allclose(found, z - many, atol=1e-14)


def test_batches_of_any_size_give_the_same_gradients(convnet, pictures):
    whole = gradients(convnet, ["0", "3"], pictures)
    parts = gradients(convnet, ["0", "3"], [pictures[:1], pictures[1:3], pictures[3:]])
    assert all(torch.allclose(whole[name], parts[name], atol=1e-14) for name in whole)


def test_the_model_and_its_gradients_are_left_as_they_were(convnet, pictures):
    convnet.train()
    convnet[3].weight.requires_grad_(False)
    convnet[0].weight.grad = torch.ones_like(convnet[0].weight)
    before, state = copy.deepcopy(convnet.state_dict()), torch.get_rng_state()
    gradients(convnet, None, pictures)
    assert convnet.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in convnet.state_dict().items())
    assert [p.requires_grad for p in convnet.parameters()] == [True, True, True, True, False, True, True, True]
    assert torch.equal(convnet[0].weight.grad, torch.ones_like(convnet[0].weight))
    assert all(p.grad is None for p in list(convnet.parameters())[1:])
    assert not any(module._forward_hooks for module in convnet.modules())


def test_a_frozen_model_and_a_caller_in_inference_mode_have_gradients(convnet, pictures):
    wanted = gradients(convnet, "0", pictures)["0"]
    convnet.requires_grad_(False)
    assert torch.equal(gradients(convnet, "0", pictures)["0"], wanted)
    with torch.inference_mode():
        assert torch.allclose(gradients(convnet, "0", pictures)["0"], wanted)


def test_activations_of_the_same_pass_are_those_of_a_pass_without_gradients(convnet, pictures):
    from netkin.representations.gradients import Taps
    from netkin.representations.hooks import inference_mode_of
    from netkin.representations.layer_recorder import Recorder

    record = Recorder(convnet, ["0", "2"], taps=Taps(convnet, [Target(), Target(beta=0.0)]))
    with inference_mode_of(convnet):
        recorded = record(pictures)
    rows, gradients = recorded.rows, recorded.gradients
    plain = nk.activations(convnet, ["0", "2"], pictures)
    assert all(torch.equal(rows[name], plain[name]) and not rows[name].requires_grad for name in plain)
    assert not torch.allclose(gradients[Target()]["0"], gradients[Target(beta=0.0)]["0"])


@pytest.mark.parametrize("shape", ["mean", "tokens", "cls", "last"])
def test_a_hugging_face_classifier_gives_gradients_by_tokens(shape):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(num_labels=3, intermediate_size=16, **sizes)
    ).double()
    ids, mask = torch.randint(1, 20, (3, 5)), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    layer = "bert.encoder.layer.0"
    found = gradients(model, layer, [{"input_ids": ids, "attention_mask": mask}], shape=shape)[layer]
    steps = []

    def add(output):
        steps.append(torch.zeros_like(output, requires_grad=True))
        return output + steps[-1]

    with evaluating(model), replacing(model, layer, add):
        logits = model(input_ids=ids, attention_mask=mask).logits
    slow = torch.autograd.grad(tempered(logits).sum(), steps)[0]
    rows = {
        "mean": torch.stack([slow[i, : mask[i].sum()].sum(0) for i in range(3)]),
        "tokens": slow[mask.bool()],
        "cls": slow[:, 0],
        "last": torch.stack([slow[i, mask[i].sum() - 1] for i in range(3)]),
    }
    assert torch.allclose(found, rows[shape], atol=1e-14)


def test_a_language_models_losses_are_summed_over_valid_tokens():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    slow = torch.stack([tempered(logits[0, :2]).sum(), tempered(logits[1]).sum()])
    assert torch.allclose(Target().losses(logits, None, mask), slow, atol=1e-14)


def test_recurrent_layers_with_time_first_have_gradients_by_example():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 3), nn.Linear(3, 2)

        def forward(self, batch):
            return self.head(self.rnn(batch.transpose(0, 1))[0][-1])

    model, data = Net().double(), torch.randn(6, 6, 4, dtype=torch.float64)
    found = gradients(model, "rnn", data, shape="flatten")["rnn"]
    assert found.shape == (6, 18)
    alone = torch.cat([gradients(model, "rnn", data[i : i + 1], shape="flatten")["rnn"] for i in range(6)])
    assert torch.allclose(found, alone, atol=1e-14)
    assert found[:, -3:].abs().min() > 0


def test_nan_in_the_first_batch_is_refused_with_its_layer_and_not_taken_for_a_mixture():
    inputs = torch.randn(20, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs[3] = float("nan")
    with pytest.raises(InvalidValue, match="the inputs in batch 0 hold 4 NaN or Inf among 80 values"):
        nk.gradients(model, data=[inputs])
    with pytest.raises(InvalidValue, match="layer '0' in batch 0 holds 8 NaN or Inf among 160 values"):
        nk.gradients(model, data=[torch.ones(20, 4)], forward=lambda model, batch: model(inputs[: len(batch)]))


def test_examples_that_are_mixed_are_refused_with_the_layer():
    with pytest.raises(ForwardError, match="after layer 'first' the examples of a batch are mixed, so that"):
        gradients(Mixing(), ["first", "head"], torch.randn(4, 4))
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
    with pytest.raises(ForwardError, match="mixed .layer '1', BatchNorm1d, takes the statistics of the batch."):
        gradients(model, None, torch.randn(4, 4))


@pytest.mark.parametrize(
    "mixed",
    [
        lambda rows: rows.cumsum(0),  # each example with those before it
        lambda rows: rows.flip(0).cumsum(0).flip(0),
        lambda rows: rows.unflatten(0, (-1, 2)).mean(1, keepdim=True).expand(-1, 2, -1).flatten(0, 1),  # neighbours
        lambda rows: rows + rows.roll(len(rows) // 2, 0),
    ],
)
def test_examples_that_are_mixed_in_any_way_are_refused(mixed):
    with pytest.raises(ForwardError, match="after layer 'first' the examples of a batch are mixed"):
        gradients(Mixing(mixed), None, torch.randn(12, 4))


def test_several_rows_for_an_example_are_no_mixture():
    model = Mixing(lambda rows: rows.unflatten(0, (-1, 2)).sum(1))
    with refused(InvalidValue, "shape"):
        nk.gradients(model, ["first"], [torch.randn(5, 8)], shape=torch.relu, forward=lambda m, x: m(x.view(-1, 4)))


def test_a_first_batch_of_one_example_hides_no_mixture():
    with pytest.raises(ForwardError, match="the examples of a batch are mixed"):
        gradients(Mixing(), None, [torch.randn(1, 4), torch.randn(6, 4)])


class Exploding(torch.autograd.Function):
    """What it is given, with an infinite gradient for the second example."""

    @staticmethod
    def forward(context, rows):
        return rows.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient.index_fill(0, torch.tensor([1]), torch.inf)


def test_gradients_that_are_not_finite_are_refused_with_the_layer():
    model, data = Mixing(Exploding.apply), [(torch.randn(6, 4), torch.arange(6) % 3)]
    with pytest.raises(InvalidValue, match="the gradient at layer 'first' in batch 0 holds 5 NaN or Inf among 30"):
        gradients(model, None, data)
    with pytest.raises(InvalidValue, match="the gradient at layer 'first' in batch 0"):
        nk.kernel_ridge(model, data, kernel="psi")


def test_layers_that_the_loss_does_not_reach_are_refused_with_the_reason():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.side, self.head = nn.Linear(4, 5), nn.Linear(4, 3)

        def forward(self, batch):
            self.side(batch)
            return self.head(batch)

    assert list(gradients(Aside(), None, torch.randn(4, 4))) == ["head"]
    with pytest.raises(ForwardError, match="no path leads from layer 'side' to the loss"):
        gradients(Aside(), ["side", "head"], torch.randn(4, 4))


@pytest.mark.parametrize(
    ("options", "fault", "argument"),
    [
        ({"target": "label"}, UnknownName, "target"),
        ({"outputs": "binary"}, UnknownName, "outputs"),
        ({"beta": 1.0}, InvalidValue, "beta"),
        ({"beta": -0.1}, InvalidValue, "beta"),
        ({"outputs": "continuous"}, InvalidValue, "target"),
        ({"target": "labels"}, InvalidValue, "data"),
        ({"target": lambda outputs, labels: outputs.sum()}, ShapeError, "target"),
        ({"shape": {"0": lambda output: output[:, :2]}}, InvalidValue, "shape"),
    ],
)
def test_what_has_no_gradient_is_refused(options, fault, argument):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    with refused(fault, argument):
        gradients(model, None, torch.randn(6, 4), **options)


@pytest.mark.parametrize(
    ("labels", "kind", "argument"),
    [
        (torch.tensor([0, 1, 2, 3, 0, 1]), InvalidValue, "data"),
        (torch.tensor([0, -1, 2, 1, 0, 1]), InvalidValue, "data"),
        (torch.tensor([0.0, 1, 2, 1, 0, 1]), InvalidValue, "data"),
        (torch.zeros(6, 2, dtype=torch.long), ShapeError, "data"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, kind, argument):
    with refused(kind, argument):
        gradients(nn.Sequential(nn.Linear(4, 3)), None, [(torch.randn(6, 4), labels)], target="labels")


def test_a_model_without_logits_or_with_one_is_refused():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, batch):
            return {"last_hidden_state": self.inner(batch)}

    with pytest.raises(ForwardError, match="gives no logits, but last_hidden_state; pass a model with a head"):
        gradients(Encoder(), None, torch.randn(6, 4))
    with pytest.raises(ShapeError, match="gives 1 output for each example.*outputs='multilabel'"):
        gradients(nn.Sequential(nn.Linear(4, 1)), None, torch.randn(6, 4))
