"""The CKA penalty: of places and of whole examples, its value and its gradient."""

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.stitching.joining import LayerOutput
from netkin.applications.stitching.training import Sampling, TaskLoss, cka_rows, objective, portion, sample_scores
from netkin.errors import ShapeError
from task_loss_worlds import convnet, images, joined, trained_from, two_perceptrons, two_taggers

pytestmark = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")  # few examples will do here


def test_a_row_is_a_place_or_a_whole_map():
    maps = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    end = LayerOutput("maps", 3, (2, 2))
    torch.testing.assert_close(cka_rows(maps, None, end, "places"), nk.positions(maps))
    torch.testing.assert_close(cka_rows(maps, None, end, "examples"), maps.flatten(1))


def test_padding_counts_as_zero_in_whole_sequences():
    tokens, mask = torch.ones(2, 3, 2), torch.tensor([[True, True, False], [True, False, False]])
    rows = cka_rows(tokens, mask, LayerOutput("tokens", 2, tokens=3), "examples")
    assert rows.tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]


def test_the_penalty_of_examples_is_the_cka_of_flattened_maps():
    a, b, data = convnet(0).eval(), convnet(1).eval(), images()
    settings = TaskLoss(cka_penalty=2.0, cka_of="examples")
    network = joined(a, "5", b, "5", data, settings)  # an in-place ReLU comes next
    one = portion(network, data[0])
    flat = network.transformation(one.head).detach().flatten(1)
    wanted = objective(network, one, TaskLoss()).detach() + 2 * nk.cka(flat, one.own.flatten(1))
    assert float(objective(network, one, settings).detach()) == pytest.approx(float(wanted), rel=1e-5)


def test_the_record_tells_the_cka_of_examples_over_the_whole_sample():
    a, b, data = convnet(0).eval(), convnet(1).eval(), images()
    network, training = trained_from(a, "3", b, "3", data, epochs=1, cka_penalty=0.5, cka_of="examples")
    with torch.no_grad():
        inputs = torch.cat([x for x, _ in data])
        flat = network.transformation(a[:4](inputs)).flatten(1), b[:4](inputs).flatten(1)
    final = training.final
    assert final["cka_of_examples"] == pytest.approx(float(nk.cka(*flat)), rel=1e-4)
    assert final["cka_of_examples"] != pytest.approx(final["cka"], rel=1e-3)
    assert final["objective"] == pytest.approx(final["loss"] + 0.5 * final["cka_of_examples"])


@pytest.mark.slow
@pytest.mark.parametrize("cka_of", ["places", "examples"])
def test_the_cka_can_be_driven_down_while_the_answers_stay(cka_of):
    _, b, data = two_perceptrons()
    options = {"init": "identity", "cka_penalty": 1.0, "cka_of": cka_of, "epochs": 40, "lr": 0.01}
    _, training = trained_from(b, "1", b, "1", data, **options)
    first, last = training.history[0], training.final
    assert first["cka"] == pytest.approx(1)
    assert first["agreement"] == 1
    assert last["cka"] < 0.8
    assert last["agreement"] > 0.9  # the identity is no minimum: which way it goes is a matter of rounding
    assert last["objective"] == pytest.approx(last["loss"] + last["cka"])


def test_a_last_batch_of_one_example_does_no_harm():
    _, b, data = two_perceptrons()
    inputs, labels = (torch.cat(parts)[:101] for parts in zip(*data, strict=True))
    options = {"init": "identity", "cka_penalty": 1.0, "cka_of": "examples", "batch": 50, "epochs": 2}
    _, training = trained_from(b, "1", b, "1", [(inputs, labels)], **options)
    assert training.steps == 6
    assert training.final["cka_of_examples"] < 1


def test_sequences_of_several_lengths_are_compared_whole():
    a, b, (whole,), _ = two_taggers()
    short = {name: part[:, :3] for name, part in whole.items()}
    options = {"labels": "true", "epochs": 1, "cka_penalty": 0.1, "cka_of": "examples"}
    _, training = trained_from(a, "inner.1", b, "inner.1", [whole, short], **options)
    assert 0 < training.final["cka_of_examples"] < 1


def test_whole_maps_of_several_sizes_are_refused():
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)).eval()
    sizes = [torch.ones(2, 2, side, side) * torch.arange(2.0).view(2, 1, 1, 1) for side in (4, 5)]
    network = joined(model, "1", model, "1", sizes[:1], TaskLoss(init="identity"))
    sampling = Sampling(10)
    for batch in sizes:
        sampling.offer(network, batch)
    with pytest.raises(
        ShapeError, match="must have one size; got 48 and 75 values an example. Give inputs of one size"
    ):
        sample_scores(network, sampling.portions, TaskLoss().loss, "examples")
