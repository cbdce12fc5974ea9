"""Layers against the logits of classes."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.errors import InvalidValue, NameClash, NoValue, ShapeError, UnknownName
from netkin.reporting.words import headline
from netkin.results.text import has_classes
from refusals import refusals, refused
from table_worlds import sentences

NAMES = ["cat", "dog", "car"]


class Maps(nn.Module):
    """Two convolutions and a head, with dropout that must not act."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 5, 3, padding=1, stride=2)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(5, 3)
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return self.fc(self.drop(torch.relu(self.conv2(torch.relu(self.conv1(images))))).mean((2, 3)))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def model():
    return Maps()


@pytest.fixture
def images():
    return torch.randn(200, 2, 8, 8)


@pytest.fixture
def batches(images):
    """Batches with labels, in which the class 2 never occurs."""
    return [(part, torch.arange(len(part)) % 2) for part in images.split(64)]


def multiple_correlation(X, y):
    """Return the correlation of `y` with its least-squares prediction from `X`."""
    Xc, yc = X - X.mean(0), y - y.mean()
    return np.corrcoef(Xc @ np.linalg.lstsq(Xc, yc, rcond=None)[0], yc)[0, 1]


def test_values_are_multiple_correlations_with_the_logits(model, images):
    found = nk.class_sensitivity(model, images, names=NAMES, layers=["conv1", "conv2", "fc"])
    assert set(found["cca_mean"].missing) == {("fc", name) for name in NAMES}
    rows = {name: X.double().numpy() for name, X in nk.activations(model, ["conv1", "conv2", "fc"], images).items()}
    assert (found.layers_a, found.layers_b) == (("conv1", "conv2", "fc"), tuple(NAMES))
    for layer in ("conv1", "conv2"):
        X = rows[layer]
        for column, name in enumerate(NAMES):
            assert found[layer, name] == pytest.approx(multiple_correlation(X, rows["fc"][:, column]), abs=1e-6)


class Ending(nn.Module):
    """A network with a last step of your own after its last layer."""

    def __init__(self, step):
        super().__init__()
        self.early, self.late, self.step = nn.Linear(4, 6), nn.Linear(6, 3), step

    def forward(self, rows):
        return self.step(self.late(self.early(rows).relu()))


@pytest.mark.parametrize(
    "step, itself",
    [
        (lambda logits: logits, True),
        (lambda logits: {"logits": logits}, True),
        (lambda logits: SimpleNamespace(logits=logits), True),
        (lambda logits: logits[:, :2], True),
        (lambda logits: logits.softmax(1), False),
        (lambda logits: logits.relu_(), False),
        (lambda logits: logits.sigmoid() + 1, False),
    ],
)
@pytest.mark.parametrize("layers", [None, ["early", "late"]])
def test_a_layer_is_not_compared_with_itself(step, itself, layers):
    found = nk.class_sensitivity(Ending(step), torch.randn(200, 4), layers=layers)
    holes = {pair for pair in found["cca_mean"].missing if pair[0] == "late"}
    assert holes == ({("late", one) for one in found.layers_b} if itself else set())
    assert not any(name == "early" for name, _ in found["cca_mean"].missing)
    if itself:
        with pytest.raises(NoValue, match="its output is the logits themselves"):
            found["late", "0"]
    else:
        assert found["late", "0"] < 0.99999


def test_the_layer_before_the_logits_determines_them_and_is_no_headline(model, images):
    found = nk.class_sensitivity(
        nn.Sequential(model.conv1, nn.ReLU(), model.conv2, nn.ReLU(), Pooled(), model.fc), images
    )
    np.testing.assert_allclose(found["cca_mean"].to_numpy()[4], 1, atol=1e-6)
    said = headline(found)
    assert re.search(r"class is [0-3] × \d at 0\.\d\d, apart from \d+ values of 1, where the layer determines", said), (
        said
    )
    alone = nk.class_sensitivity(nn.Sequential(Pooled(), nn.Linear(2, 3)), images)
    assert headline(alone) == "By cca_mean, every layer is at 1 with every class, as it determines the logit."


class Pooled(nn.Module):
    def forward(self, maps):
        return maps.mean((2, 3))


def test_classes_are_called_by_the_names_that_data_have(model, images):
    labels = torch.arange(200) % 3
    data = TensorDataset(images, labels)
    data.classes = ["ant", "bee", "cow"]
    loader = DataLoader(data, batch_size=64)
    for given in (data, loader):
        assert nk.class_sensitivity(model, given).layers_b == ("ant", "bee", "cow")
        assert nk.class_sensitivity(model, given, names=NAMES).layers_b == tuple(NAMES)
        assert nk.class_sensitivity(model, given, ["cow", 0]).layers_b == ("cow", "ant")
    for unfit in (["ant", "bee"], ["ant", "ant", "bee"], [("ant",), ("bee",), ("cow",)], 3):
        data.classes = unfit
        assert nk.class_sensitivity(model, data).layers_b == ("0", "1", "2")


def test_a_class_read_from_one_layer_is_known_there():
    """A net that passes one input on to one logit knows of it from the first layer; of noise made later it does not."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.early, self.late = nn.Linear(4, 3), nn.Identity()

        def forward(self, rows):
            hidden = self.early(rows)
            return self.late(torch.stack([hidden[:, 0], (rows[:, 0] * rows[:, 1])], 1))

    rows = torch.randn(4000, 4)
    rows = torch.cat([rows, rows * torch.tensor([-1.0, 1, 1, 1])])  # the product is odd in what the layer is linear in
    found = nk.class_sensitivity(Late(), rows, names=["soon", "late"])
    assert found["early", "soon"] == pytest.approx(1, abs=1e-6)
    assert found["early", "late"] < 0.05


@pytest.mark.parametrize(
    "asked, columns", [(1, ["dog"]), ("dog", ["dog"]), (["car", 0], ["car", "cat"]), (np.arange(2, 3), ["car"])]
)
def test_classes_go_by_number_or_name(model, images, asked, columns):
    whole = nk.class_sensitivity(model, images, names=NAMES)
    found = nk.class_sensitivity(model, images, asked, names=NAMES)
    assert list(found.layers_b) == columns
    for name in columns:
        assert found["conv1", name] == whole["conv1", name]


def test_one_pass_over_the_data_is_enough(model, batches):
    nk.class_sensitivity(model, batches)
    assert model.calls == 2 + len(batches)  # two runs of few examples show the layers


def test_several_measures_and_shapes(model, images):
    measures = ["cca_mean", "cka", "linear_regression_r2"]
    found = nk.class_sensitivity(model, images, measures=measures, layers="conv*", shape="flatten")
    rows = nk.activations(model, ["conv1", "conv2", "fc"], images, shape="flatten")
    assert found.measures == tuple(measures)
    assert found.shapes_a["conv1"] == "flatten"
    for name in ("cka", "linear_regression_r2"):
        with pytest.warns(nk.InflatedWarning) if name != "cka" else nullcontext():
            expected = float(getattr(nk, name)(rows["conv1"], rows["fc"][:, [2]]))
        assert found[name]["conv1", "2"] == pytest.approx(expected, abs=1e-5)
    assert "are fewer than" in sentences(found)[0]


def test_dft_cca_with_a_logit_is_cca_with_the_channel_means(model, images):
    by_frequency, pooled = (nk.class_sensitivity(model, images, shape=shape) for shape in ("dft", "pool"))
    assert by_frequency.shapes_a["conv1"] == "dft"
    np.testing.assert_allclose(by_frequency.to_numpy(), pooled.to_numpy(), atol=1e-6)


def test_channel_means_are_what_dft_cca_sees_of_a_logit(model, images):
    """A logit is constant over space: all frequencies of a map but zero are orthogonal to it when all shifts occur."""
    shifted = torch.cat([images[:12].roll((i, j), (2, 3)) for i in range(8) for j in range(8)])
    circular = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    with torch.no_grad():
        maps = circular(shifted)
        logit = torch.tanh(maps.mean((2, 3)) @ torch.randn(3, 1)) + maps.square().mean((1, 2, 3))[:, None]
    whole, pooled = (nk.cca_mean(rows(maps), logit) for rows in (nk.flatten, nk.pool))
    assert float(whole) == pytest.approx(float(pooled), abs=1e-6)


def test_layers_at_each_place_have_no_value(model, images):
    found = nk.class_sensitivity(model, images, layers=["conv1", "fc"], shape="positions")
    with pytest.raises(NoValue, match="64 rows an example .* 'classes' 1; use a shape with one row an example"):
        found["conv1", "0"]


def test_the_result_is_a_comparison_like_others(model, images, tmp_path):
    found = nk.class_sensitivity(model, images, names=NAMES, examples=150)
    found.save(tmp_path / "classes.netkin")
    assert nk.load(tmp_path / "classes.netkin") == found
    assert found.examples == 150
    assert "layers (rows) and classes (columns)" in str(found)
    assert list(found.to_pandas().columns) == NAMES


def test_the_model_is_left_as_it_was(model, images):
    model.train()
    state = torch.get_rng_state()
    nk.class_sensitivity(model, images)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_inputs_may_be_transformed_and_fed_another_way(model, images):
    plain = nk.class_sensitivity(model, images * 2)
    twice = nk.class_sensitivity(model, images, transform=lambda batch: batch * 2)
    np.testing.assert_allclose(twice.to_numpy(), plain.to_numpy(), atol=1e-6)
    packed = [{"pictures": part} for part in images.split(64)]
    fed = nk.class_sensitivity(model, packed, forward=lambda net, batch: {"logits": net(batch["pictures"] * 2)})
    np.testing.assert_allclose(fed.to_numpy(), plain.to_numpy(), atol=1e-6)


def test_one_output_is_one_class():
    class Yes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, rows):
            return self.inner(rows)[:, 0]

    assert nk.class_sensitivity(Yes(), torch.randn(30, 4)).layers_b == ("0",)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_gives_the_numbers_of_the_cpu(model, batches):
    here = nk.class_sensitivity(model, batches)
    np.testing.assert_allclose(
        nk.class_sensitivity(model, batches, device="cuda").to_numpy(), here.to_numpy(), atol=1e-4
    )
    there = nk.class_sensitivity(model.cuda(), [(part.cuda(), labels.cuda()) for part, labels in batches], [0, 1])
    np.testing.assert_allclose(there.to_numpy(), here.to_numpy()[:, :2], atol=1e-4)


def test_its_columns_are_known_to_be_classes(model, images):
    assert has_classes(nk.class_sensitivity(model, images))
    assert not has_classes(nk.compare(model, data=images))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_class_that_the_model_does_not_have_is_refused(model, images):
    refusals(
        (lambda: nk.class_sensitivity(model, images, [0, 3]), InvalidValue, "classes"),
        (lambda: nk.class_sensitivity(model, images, -1), InvalidValue, "classes"),
    )


def test_a_name_that_no_class_has_is_refused(model, images):
    refusals(
        (lambda: nk.class_sensitivity(model, images, "dogs", names=NAMES), UnknownName, "classes"),
        (lambda: nk.class_sensitivity(model, images, "dog"), UnknownName, "classes"),
    )


def test_a_class_without_examples_is_refused(model, batches):
    with refused(InvalidValue, "classes"):
        nk.class_sensitivity(model, batches, [0, 2])
    assert nk.class_sensitivity(model, batches, [0, 1]).layers_b == ("0", "1")
    assert nk.class_sensitivity(model, batches).layers_b == ("0", "1", "2")  # nobody asked for it


def test_labels_in_mappings_are_counted(model, images):
    forward = lambda net, batch: net(batch["images"])  # noqa: E731
    batches = [{"images": images, "labels": torch.zeros(200, dtype=torch.long)}]
    with refused(InvalidValue, "classes"):
        nk.class_sensitivity(model, batches, 1, forward=forward)
    soft = [{"images": images, "labels": torch.zeros(200, 3)}]
    assert nk.class_sensitivity(model, soft, 1, forward=forward).layers_b == ("1",)


def test_wrong_names_are_refused(model, images):
    with refused(ShapeError, "names"):
        nk.class_sensitivity(model, images, names=["cat", "dog"])
    with pytest.raises(NameClash, match="classes must have distinct names; 'cat' occurs 2 times"):
        nk.class_sensitivity(model, images, names=["cat", "cat", "dog"])


def test_what_is_no_class_is_refused(model, images):
    refusals(
        (lambda: nk.class_sensitivity(model, images, [1.5]), InvalidValue, "classes"),
        (lambda: nk.class_sensitivity(model, images, 1.0), InvalidValue, "classes"),
    )


def test_no_classes_are_refused(model, images):
    with refused(InvalidValue, "classes"):
        nk.class_sensitivity(model, images, [])


def test_outputs_that_are_no_logits_are_refused():
    with pytest.raises(
        ShapeError, match=r"output has shape \(3, 5, 3\), and class sensitivity needs one row of logits"
    ):
        nk.class_sensitivity(nn.Sequential(nn.Linear(4, 3)), torch.randn(20, 5, 4))


def test_an_unknown_layer_is_refused(model, images):
    with refused(UnknownName, "layers"):
        nk.class_sensitivity(model, images, layers=["conv3"])


def test_progress_is_told_to_a_function(model, images):
    heard = []
    nk.class_sensitivity(model, images, progress=lambda *news: heard.append(news))
    assert list(dict.fromkeys(what for _, _, what in heard)) == ["reading", "measuring"]  # a slow machine tells more
