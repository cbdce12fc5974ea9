"""`explain` says what `compare` then does, and touches nothing."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import netkin as nk
from netkin.comparing import explain
from netkin.errors import InvalidValue, MemoryLimit, ShapeError, UnknownName


def test_layers_pairs_and_memory_are_those_of_the_comparison(maps, images, layers):
    asked = {"data": images, "measures": ["cka", "svcca", "cka_rbf", "cka_minibatch(batch=16)"], "layers": layers}
    plan, done = explain(maps(), maps(6), **asked), nk.compare(maps(), maps(6), **asked)
    assert [list(found) for found in plan.widths.values()] == [list(done.layers_a), list(done.layers_b)]
    assert plan.widths == {"a": done.widths_a, "b": done.widths_b}
    assert plan.pairs == done["cka"].values.size
    assert plan.examples == done.examples
    sizes = [line.rpartition(": ")[2] for line in done.provenance["plan"].splitlines()]
    assert plan.bytes == pytest.approx(sum(int(size.split()[0]) for size in sizes) * 1000, rel=0.05)


@pytest.mark.parametrize("shape", ["pool", "flatten", "positions"])
def test_the_statistic_chosen_is_the_one_that_is_taken(maps, images, shape):
    asked = {"data": images, "layers": ["conv1", "conv2"], "shape": shape}
    assert explain(maps(), **asked).measures["cka"].startswith(nk.compare(maps(), **asked).provenance["plan"][:12])


def test_forward_passes_are_counted(maps, images):
    a, b, loader = maps(), maps(), DataLoader(images, batch_size=16)
    plan = explain(a, b, data=loader)
    assert (a.calls, b.calls) == (2, 2)  # two examples and three: which axis counts them
    nk.compare(a, b, data=loader)
    assert plan.passes == a.calls + b.calls - 8 == 8


def test_two_examples_are_run(maps, images):
    seen = []

    def look(model, batch):
        seen.append(len(batch))
        return model(batch)

    explain(maps(), data=images, forward=look)
    assert seen == [2, 3]  # two runs tell which axis of an output counts the examples


def test_a_loader_is_as_good_as_before_and_its_order_too(maps, images, state_of):
    model, loader = maps().train(), DataLoader(images, batch_size=16, shuffle=True)
    before = state_of(model)
    explain(model, data=loader)
    model.calls = 0
    assert state_of(model) == before
    assert nk.compare(model, data=loader).examples == 50


def test_an_iterator_is_refused_before_it_loses_a_batch(maps, images):
    stream = iter(images.split(10))
    with pytest.raises(InvalidValue, match="what it takes from an iterator is gone; pass a loader or a list."):
        explain(maps(), data=stream)
    assert len(list(stream)) == 5


class Endless:
    """Data that do not say how many they are."""

    def __init__(self, images):
        self.images = images

    def __iter__(self):
        while True:
            yield self.images


def test_data_of_unknown_length_have_no_total(maps, images):
    plan = explain(maps(), data=Endless(images))
    assert (plan.examples, plan.passes) == (None, None)
    assert "examples: not known before they are read; batches of 50" in str(plan)
    assert "forward passes: one of each model on each batch" in str(plan)


def test_what_compare_would_refuse_stands_in_the_plan(maps, images):
    asked = {"data": images, "layers": ["conv1", "fc"], "shape": "flatten", "memory": 10_000}
    plan = explain(maps(), **asked)
    with pytest.raises(MemoryLimit) as refusal:
        nk.compare(maps(), **asked)
    assert plan.refused == str(refusal.value)
    assert str(plan).endswith(f"would be refused: {plan.refused}")
    assert plan.widths["a"]["conv1"] == 256


def test_pairs_that_cannot_be_found_are_a_refusal_too(maps, images):
    asked = {"data": images, "layers": {"a": ["conv1", "conv2"], "b": ["fc"]}, "pairs": "corresponding"}
    plan = explain(maps(), maps(), **asked)
    with pytest.raises(ShapeError) as refusal:
        nk.compare(maps(), maps(), **asked)
    assert plan.refused == str(refusal.value)


@pytest.mark.parametrize("asked", [{"measures": "ckaa"}, {"layers": "conv9"}])
def test_a_name_that_nobody_knows_is_refused_at_once(maps, images, asked):
    with pytest.raises(UnknownName):
        explain(maps(), data=images, **asked)


def test_a_model_that_takes_whole_batches_only_is_run_on_one(maps, images):
    def only_whole(model, batch):
        if len(batch) != 50:
            raise RuntimeError(f"exported for 50, met {len(batch)}")
        return model(batch)

    asked = {"data": images, "layers": ["conv1", "fc"], "forward": only_whole, "shape": "positions"}
    assert explain(maps(), **asked).bytes == explain(maps(), **asked | {"forward": None}).bytes


def test_data_that_do_not_fit_are_refused_at_once(maps, images):
    with pytest.raises(RuntimeError, match="channels"):
        explain(maps(), data=images[:, :1])


def test_pairs_that_do_not_meet_are_foretold(maps, images):
    asked = {"data": images, "layers": ["conv1", "conv2"], "shape": "positions"}
    plan, done = explain(maps(), **asked), nk.compare(maps(), **asked)
    holes = done["cka"].missing
    assert f"without a value: {len(holes)}; {holes['conv1', 'conv2']}" in str(plan)


def test_where_nothing_meets_nothing_is_kept(maps, images):
    asked = {"data": images, "layers": {"a": "conv1", "b": "conv2"}, "shape": "positions"}
    plan = explain(maps(), maps(), **asked)
    assert (plan.pairs, plan.bytes) == (1, 0)


def test_recorded_rows_need_no_forward_pass():
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(700, 6)), rng.normal(size=(700, 4))
    plan = explain({"x": X}, {"y": Y})
    assert plan.passes == 0
    assert "forward passes: none, the rows are recorded" in str(plan)


class Positioned(nn.Module):
    """Words with a table of positions, which is the same for all examples."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(5, 4)

    def forward(self, ids):
        return self.words(ids) + self.places(torch.arange(5).unsqueeze(0))


def test_a_table_of_positions_is_left_out_as_in_the_comparison():
    ids = torch.randint(0, 9, (20, 5))
    assert list(explain(Positioned(), data=ids).widths["a"]) == list(nk.compare(Positioned(), data=ids).layers_a)


def test_masked_tokens_and_batches_that_are_mappings_are_explained(words, sentences):
    plan = explain(words(), words(7), data=sentences, shape="tokens")
    assert plan.widths["b"] == {"embed": 7, "layer.0": 7, "layer.1": 7}
    assert (plan.examples, plan.refused) == (40, "")


def test_the_text_names_what_is_widest(maps, images):
    text = str(explain(maps(), maps(6), data=images, layers=["conv1", "conv2"], names=("one", "other")))
    assert text.splitlines()[:4] == [
        "one: 2 layers, the widest 'conv2' with 5 features (pool)",
        "other: 2 layers, the widest 'conv2' with 7 features (pool)",
        "pairs: 4",
        "examples: 50, in 1 batch",
    ]


def test_models_of_one_name_are_of_one_architecture():
    plan = nk.explain_many(["netkin:digits"] * 3, "digits:test", layers="fc", examples=20, progress=False)
    assert "models: 3, of 1 architecture\n" in str(plan)
