"""The structure of stitches: rank, sparsity, distance, the line between two, and the picture."""

import matplotlib.figure
import numpy as np
import pytest
import torch

import netkin as nk
from netkin.applications.stitching import barrier, distance, interpolate, rank, sparsity, stitch
from netkin.applications.stitching.maps import LinearMap
from netkin.errors import InvalidValue, ShapeError
from netkin.reporting.figures import plot_matrix
from refusals import refusals, refused
from stitching_worlds import Maps, Rows, built, drawn, labelled


@pytest.fixture
def pair():
    """Two stitches of the same layers, labelled data, and the models."""
    a, b = built(Rows), built(Rows, seed=1)
    data = labelled(b, 5)
    return stitch(a, "mid", b, "mid", data), stitch(a, "mid", b, "mid", data, "random"), data


def given(found, matrix):
    """Give a stitch another matrix."""
    found.transformation.set(LinearMap(torch.as_tensor(matrix), torch.zeros(6, dtype=torch.float64)))
    return found


def test_rank_counts_singular_values(pair):
    found = given(pair[0], np.diag([1, 1e-3, 1e-4, 1e-6, 0, 0]))
    assert rank(found) == 3
    assert rank(found, tolerance=1e-2) == 1
    assert rank(found.map) == rank(found.map.weight) == rank(np.diag([1, 1e-3, 1e-4, 1e-6])) == 3
    refusals(
        (lambda: rank(found.map.bias), ShapeError, "stitch"),
        (lambda: rank("least_squares"), InvalidValue, "stitch"),
    )


def test_sparsity_counts_small_entries(pair):
    matrix = np.ones((6, 6))
    matrix[0] = [0, 9e-5, -9e-5, 2e-4, -2e-4, 1]
    assert sparsity(given(pair[0], matrix)) == pytest.approx(3 / 36)
    assert sparsity(pair[0], threshold=1e-3) == pytest.approx(5 / 36)
    assert sparsity(matrix) == sparsity(torch.tensor(matrix)) == sparsity(pair[0].map) == pytest.approx(3 / 36)
    with refused(InvalidValue, "threshold"):
        sparsity(pair[0], threshold=0)


def test_distance_is_frobenius(pair):
    first, second, _ = pair
    apart = np.linalg.norm(first.map.weight.numpy() - second.map.weight.numpy())
    assert distance(first, second) == pytest.approx(apart)
    assert distance(first, first) == 0
    size = (np.linalg.norm(first.map.weight) + np.linalg.norm(second.map.weight)) / 2
    assert distance(first, second, relative=True) == pytest.approx(apart / size)


def test_the_line_between_two_stitches(pair):
    first, second, data = pair
    middle = interpolate(first, second, 0.25)
    assert torch.allclose(middle.map.weight, 0.75 * first.map.weight + 0.25 * second.map.weight)
    assert torch.allclose(middle.map.bias, 0.75 * first.map.bias + 0.25 * second.map.bias)
    assert middle.method == "interpolate(least_squares, random, 0.25)"
    assert torch.equal(interpolate(first, second, 1.0).network(data[0][0]), second.network(data[0][0]))
    assert middle.evaluation is None
    lerped = torch.lerp(first.map.weight, second.map.weight, 0.25)
    assert torch.allclose(middle.map.weight, lerped)
    assert torch.equal(interpolate(first, second, np.float64(0.25)).map.weight, middle.map.weight)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "0.5", None, True, [0.5]])
def test_a_weight_that_is_no_number_is_refused(pair, weight):
    with refused(InvalidValue, "weight"):
        interpolate(pair[0], pair[1], weight)


@pytest.mark.slow
def test_the_barrier_is_what_single_evaluations_say(pair):
    first, second, data = pair
    found = barrier(first, second, data, points=5)
    assert found.weights == (0, 0.25, 0.5, 0.75, 1)
    alone = [interpolate(first, second, weight).evaluate(data) for weight in found.weights]
    assert found.cross_entropies == pytest.approx([one.cross_entropy for one in alone])
    assert found.accuracies == pytest.approx([one.accuracy for one in alone])
    assert found.relative_accuracies == pytest.approx([one.relative_accuracy for one in alone])
    losses, weights = np.array(found.cross_entropies), np.array(found.weights)
    line = losses[0] + weights * (losses[-1] - losses[0])
    assert found.height == pytest.approx(max(0, (losses - line).max()))
    shares = np.array(found.relative_accuracies)
    assert found.drop == pytest.approx(max(0, (shares[0] + weights * (shares[-1] - shares[0]) - shares).max()))
    assert found.examples == 120
    assert str(found).endswith(f"barrier {found.height:.4f}")
    assert nk.barrier is barrier


def test_there_is_no_barrier_between_a_stitch_and_itself(pair):
    first, _, data = pair
    heard = []
    found = barrier(first, first, data, points=3, progress=lambda *news: heard.append(news))
    assert heard[-1][2] == "interpolating"
    assert (found.height, found.drop) == (pytest.approx(0, abs=1e-9), 0)


@torch.no_grad()
def even():
    """Return a network whose answers to ``h`` and ``-h`` at `mid` are the same: its hidden units come in pairs ±."""
    model = built(Rows)
    model.after.weight.copy_(torch.cat([drawn(3, 6), -drawn(3, 6), torch.zeros(1, 6)]))
    model.after.bias.zero_()
    model.out.weight.copy_(torch.cat([*[5 * drawn(4, 3, seed=1)] * 2, torch.zeros(4, 1)], 1))
    return model


def test_a_barrier_between_opposite_stitches_is_seen():
    model = even()
    data = labelled(model, 5)
    same, opposite = (given(stitch(model, "mid", model, "mid", data, "identity"), sign * np.eye(6)) for sign in (1, -1))
    found = barrier(same, opposite, data, points=5)
    x, labels = (torch.cat(part) for part in zip(*data, strict=True))
    with torch.no_grad():
        bias = model.out.bias.numpy()
        scores = model(x).numpy() - bias
    own = np.exp(scores + bias) / np.exp(scores + bias).sum(1, keepdims=True)
    losses, right = [], []
    for weight in (0, 0.25, 0.5, 0.75, 1):  # the stitch maps h to (1 - 2 weight) h, of which only the size counts
        said = abs(1 - 2 * weight) * scores + bias
        losses.append(-(own * (said - np.log(np.exp(said).sum(1, keepdims=True)))).sum(1).mean())
        right.append((said.argmax(1) == labels.numpy()).mean())
    assert found.cross_entropies == pytest.approx(losses)
    assert found.accuracies == pytest.approx(right)
    assert found.height == pytest.approx(losses[2] - losses[0])
    assert found.height > 0.5
    assert found.drop == pytest.approx(1 - right[2])
    assert found.drop > 0.3


def test_without_labels_a_barrier_has_no_accuracies(pair):
    first, second, data = pair
    found = barrier(first, second, [batch[0] for batch in data], points=3)
    assert found.accuracies == ()
    assert "–" in str(found)
    with pytest.raises(InvalidValue, match="there is no accuracy without labels"):
        found.drop  # noqa: B018


def test_labels_that_the_second_model_does_not_know_give_no_relative_accuracy(pair):
    first, second, data = pair
    found = barrier(first, second, [(x, (labels + 1) % 4) for x, labels in data], points=3)
    assert len(found.accuracies) == 3
    with pytest.raises(InvalidValue, match="the second model itself gets none of these right, so there is no relative"):
        found.drop  # noqa: B018


def test_a_bottleneck_lies_on_lines_too(pair):
    first, _, data = pair
    a, b = first.network.a, first.network.b
    trained = stitch(a, "mid", b, "mid", data, "task_loss(rank=2, steps=1)")
    middle = interpolate(trained, first, 0.5)
    assert torch.allclose(middle.map.weight, (trained.map.weight + first.map.weight) / 2)
    assert middle.transformation.rank is None
    assert trained.training is not None
    assert (middle.history, middle.training) == ((), None)


def test_stitches_without_a_line_between_are_refused(pair):
    first, _, data = pair
    a, b = first.network.a, first.network.b
    refusals(
        (lambda: interpolate(first, stitch(a, "front", b, "mid", data), 0.5), InvalidValue, ""),
        (lambda: distance(first, stitch(built(Rows, seed=3), "mid", b, "mid", data)), InvalidValue, ""),
        (lambda: barrier(first, first, data, points=2), InvalidValue, "points"),
    )
    images = drawn(9, 3, 12, 12)
    x, y = built(Maps), built(Maps, stride=2)
    one, other = (stitch(x, "mid", y, "mid", images, resize=resize) for resize in ("average", "nearest"))
    with pytest.raises(
        InvalidValue, match=r"\(average\), the other .* \(nearest\), so no line leads .*same data and `res"
    ):
        interpolate(one, other, 0.5)


def test_the_picture_of_a_matrix(pair, tmp_path):
    figure = pair[0].plot(tmp_path / "map.png")
    assert isinstance(figure, matplotlib.figure.Figure)
    assert (tmp_path / "map.png").stat().st_size > 1000
    axes = figure.axes[0]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("a/mid", "b/mid")
    assert axes.get_title() == "least_squares: a/mid → b/mid"
    image = axes.images[0]
    assert np.allclose(image.get_array(), pair[0].map.weight.numpy())
    assert image.norm.vmin == -image.norm.vmax
    own = matplotlib.figure.Figure().add_subplot()
    assert pair[0].plot(ax=own) is own.figure


def test_a_picture_needs_a_matrix():
    with pytest.raises(ShapeError, match=r"a picture needs a matrix; got shape \(3,\)"):
        plot_matrix(np.ones(3))
    assert plot_matrix(np.zeros((2, 2))).axes
