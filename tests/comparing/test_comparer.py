"""`nk.Comparer` in one's own loop gives what `nk.compare` gives."""

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import ForwardError, InvalidValue, ShapeError

MEASURES = ["cka", "svcca", "cka_debiased", "cka_minibatch(batch=10)", "cka_rbf"]
LAYERS = ["conv1", "conv2", "fc"]


@pytest.fixture
def models(maps):
    return maps().double().eval(), maps(6).double().eval()


@pytest.fixture
def batches(images):
    return list(images.double().split(10))


def rows_of(model, batch):
    return {name: rows.double() for name, rows in nk.activations(model, LAYERS, batch, progress=False).items()}


def assert_same(found, wanted):
    assert list(found.tables) == list(wanted.tables)
    for name, table in wanted.tables.items():
        np.testing.assert_allclose(found[name].values, table.values, atol=1e-10)
        if table.replicates is not None:
            np.testing.assert_allclose(found[name].replicates, table.replicates, atol=1e-10)


@pytest.mark.parametrize("errors", [False, True])
def test_rows_of_each_batch_give_the_numbers_of_a_pass(models, batches, errors):
    how = {"layers": LAYERS, "errors": errors, "chunks": 3}
    comparer = nk.Comparer(MEASURES, errors=errors, chunks=3)
    for batch in batches:
        comparer.update({"a": rows_of(models[0], batch), "b": rows_of(models[1], batch)})
    assert_same(comparer.compute(), nk.compare(*models, batches, MEASURES, **how))
    assert comparer.examples == 50


def test_models_that_run_anyway_are_watched(models, batches):
    comparer = nk.Comparer(MEASURES, layers=LAYERS)
    for batch in batches:
        with comparer.watching(a=models[0], b=models[1]), torch.no_grad():
            models[0](batch), models[1](batch)
    found = comparer.compute()
    assert_same(found, nk.compare(*models, batches, MEASURES, layers=LAYERS))
    assert len(found.provenance["weights a"]) == 32
    assert not any(module._forward_hooks or module._forward_pre_hooks for one in models for module in one.modules())


def test_a_model_in_training_keeps_its_mode_its_gradients_and_its_random_numbers(models, batches):
    model, twin = models[0].train(), models[0]
    comparer, batch = nk.Comparer("cka", layers=LAYERS), batches[0]
    torch.manual_seed(0)
    wanted = twin(batch)
    torch.manual_seed(0)
    with comparer.watching(a=model):
        output = model(batch)
    output.sum().backward()
    assert torch.equal(output, wanted)
    assert model.training
    assert model.conv1.weight.grad is not None


def test_masks_of_tokens_are_read_from_the_call():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 6)

        def forward(self, input_ids, attention_mask=None):
            return self.embed(input_ids)

    torch.manual_seed(0)
    models = [Reader().double(), Reader().double()]
    masks = [(torch.arange(5) < lengths[:, None]).long() for lengths in torch.randint(1, 6, (6, 8))]
    data = [{"input_ids": torch.randint(0, 20, (8, 5)), "attention_mask": mask} for mask in masks]
    for shape in ("mean", "tokens", "last"):
        comparer = nk.Comparer(["cka"], shape=shape, layers="embed")
        for batch in data:
            with comparer.watching(a=models[0], b=models[1]), torch.no_grad():
                for model in models:
                    model(**batch)
        assert_same(comparer.compute(), nk.compare(*models, data, ["cka"], shape=shape, layers="embed"))


def test_an_exception_drops_the_batch(models, batches):
    comparer = nk.Comparer("cka", layers=LAYERS)
    with comparer.watching(a=models[0]):
        models[0](batches[0])

    def failing():
        with comparer.watching(a=models[0]):
            models[0](batches[1])
            raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        failing()
    assert comparer.examples == 10


def test_parts_are_merged_saved_and_loaded(models, batches, tmp_path):
    parts = []
    for place, some in enumerate((batches[:2], batches[2:])):
        comparer = nk.Comparer(MEASURES)
        for number, batch in enumerate(some):
            start = 20 * place + 10 * number
            comparer.update({"a": rows_of(models[0], batch), "b": rows_of(models[1], batch)},
                            numbers=range(start, start + 10))  # fmt: skip
        comparer.save(tmp_path / f"{place}.stats")
        parts.append(nk.load(tmp_path / f"{place}.stats"))
    assert_same(nk.merge(parts).compute(), nk.compare(*models, batches, MEASURES, layers=LAYERS))
    with pytest.raises(ShapeError, match="overlap"):
        parts[0].merge(parts[0])


def test_the_plan_is_that_of_a_pass(models, batches):
    comparer = nk.Comparer(["cka", "svcca"], layers=LAYERS)
    plan = comparer.plan(*models, batches)
    assert str(plan) == str(nk.explain(*models, batches, ["cka", "svcca"], layers=LAYERS))
    assert comparer.examples == 0


X = torch.randn(9, 4)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda comparer: comparer.compute(), InvalidValue),
        (lambda comparer: comparer.update({}), InvalidValue),
        (lambda comparer: comparer.update({"a": {"x": X}, "b": {"x": X[:5]}}), ShapeError),
        (lambda comparer: comparer.update({"a": {"x": X * torch.nan}}), InvalidValue),
        (lambda comparer: [comparer.update({"a": {name: X}}) for name in "xy"], ShapeError),
        (lambda comparer: nk.Comparer("kernel_cka").update({"a": {"x": X}}), InvalidValue),
    ],
)
def test_what_can_not_be_fed_or_read_is_refused(call, kind):
    with pytest.raises(kind):
        call(nk.Comparer("cka"))


def test_a_model_that_runs_twice_or_not_at_all_is_refused(models, batches):
    comparer = nk.Comparer("cka", layers=LAYERS)
    with pytest.raises(ForwardError, match="ran twice inside one `watching`"), comparer.watching(a=models[0]):
        models[0](models[0](batches[0]).new_zeros(batches[0].shape))
    with pytest.raises(ForwardError, match="'b' did not run"), comparer.watching(a=models[0], b=models[1]):
        models[0](batches[0])


def test_a_refused_first_batch_leaves_the_comparer_as_it_was():
    comparer = nk.Comparer("cka")
    for wrong in ({"a": {"y": X * torch.nan}}, {"a": {"y": X[:0]}}, {"a": {"y": X.to(torch.complex64)}}, {"a": X}, X):
        with pytest.raises((InvalidValue, ShapeError)):
            comparer.update(wrong)
    assert comparer.layers == {}
    comparer.update({"a": {"x": X}})
    assert comparer.compute()["x", "x"] == pytest.approx(1)


def test_each_example_is_given_once():
    comparer = nk.Comparer("cka")
    comparer.update({"a": {"x": X}}, numbers=range(60, 69))
    comparer.update({"a": {"x": X}})
    assert comparer.ranges == [(60, 78)]
    for numbers in (range(64, 73), [80] * 9, range(3)):
        with pytest.raises((InvalidValue, ShapeError)):
            comparer.update({"a": {"x": X}}, numbers=numbers)
    assert comparer.examples == 18


def test_token_rows_of_the_same_examples_overlap():
    comparer = nk.Comparer("cka", shape="tokens")
    comparer.update(
        {"a": {"x": torch.randn(4, 3, 5)}}, valid=torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])
    )
    with pytest.raises(ShapeError, match="overlap"):
        comparer.merge(comparer)


def test_a_comparer_from_a_file_is_not_fed(tmp_path):
    comparer = nk.Comparer("cka", shape="cls")
    comparer.update({"a": {"x": torch.randn(6, 3, 5)}})
    comparer.save(tmp_path / "a.stats")
    with pytest.raises(InvalidValue, match="feed a new one, and merge the two"):
        nk.load(tmp_path / "a.stats").update({"a": {"x": torch.randn(6, 3, 5)}})


def test_options_that_running_models_needs_are_refused():
    for option in ({"shpae": "cls"}, {"examples": 3}, {"transforms": len}, {"engine": "local"}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            nk.Comparer("cka", **option)
