"""What is compared, and what it is fed: models, recorded rows, loaders, transforms."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import netkin as nk
from netkin.comparing.alignment import Alignment
from netkin.errors import InvalidValue, UnknownName
from netkin.representations.inputs import examples_in
from refusals import refused

FEW = 2  # runs of few examples before the first batch, which show the layers


def test_each_model_runs_once_on_each_batch(maps, images):
    a, b = maps(), maps()
    nk.compare(a, b, list(images.split(16)), ["cka", "svcca", "cka_rbf", "cka_minibatch(batch=16)"])
    assert (a.calls, b.calls) == (FEW + 4, FEW + 4)


def test_a_model_alone_or_given_twice_runs_once_on_each_batch(maps, images):
    model = maps()
    alone = nk.compare(model, data=list(images.split(16)))
    assert model.calls == FEW + 4
    twice = nk.compare(model, model, list(images.split(16)))
    assert model.calls == 2 * (FEW + 4)
    assert np.array_equal(alone.to_numpy(), twice.to_numpy())
    assert np.array_equal(alone.to_numpy(), alone.to_numpy().T)
    assert (alone.a, alone.b) == ("a", "a")


def test_a_model_given_twice_with_two_transforms_runs_twice(maps, images):
    model = maps()
    comparison = nk.compare(model, model, images, transforms=(None, lambda x: x.flip(3)), names=("as is", "mirrored"))
    assert model.calls == 2 * (FEW + 1)
    assert 0.3 < comparison["conv1", "conv1"] < 0.99999
    assert (comparison.a, comparison.b) == ("as is", "mirrored")


def test_several_models_run_once_each(maps, images):
    models = {f"seed{i}": maps() for i in range(3)}
    many = nk.compare_many(models, list(images.split(20)), ["cka", "nbs"])
    assert sum(model.calls for model in models.values()) == 3 * (FEW + 3) + FEW  # the plan looks at one of a kind
    assert list(many) == [("seed0", "seed1"), ("seed0", "seed2"), ("seed1", "seed2")]
    pair = nk.compare(models["seed0"], models["seed2"], list(images.split(20)), ["cka", "nbs"])
    for measure in pair:
        assert many["seed0", "seed2"].to_numpy(measure) == pytest.approx(pair.to_numpy(measure), abs=1e-9)
    assert nk.compare_many(list(models.values()), images).models == ("0", "1", "2")


def test_one_iteration_of_a_stream_feeds_all(maps, images):
    read = []

    def stream():
        for batch in images.split(16):
            read.append(len(batch))
            yield batch

    comparison = nk.compare(maps(), maps(), stream())
    assert read == [16, 16, 16, 2]
    assert comparison.examples == 50


def test_examples_end_the_pass_early(maps, images):
    a, b = maps(), maps()
    cut = nk.compare(a, b, list(images.split(16)), examples=20)
    assert (a.calls, cut.examples) == (FEW + 2, 20)
    assert cut.to_numpy() == pytest.approx(nk.compare(a, b, images[:20]).to_numpy(), abs=1e-6)
    rows = {"x": images.flatten(1).numpy()}
    assert nk.compare(rows, examples=7).examples == 7


def test_transforms_and_forwards_are_each_models_own(maps, images):
    a, b = maps(), maps()
    loader = [(batch, torch.zeros(len(batch))) for batch in images.split(16)]
    changed = nk.compare(
        a, b, loader, layers="conv2",
        transforms=(lambda x: x * 2, None), forward=(None, lambda model, batch: model(batch[0].flip(2))),
    )  # fmt: skip
    rows_a, rows_b = (nk.activations(m, "conv2", x)["conv2"] for m, x in ((a, images * 2), (b, images.flip(2))))
    assert changed["conv2", "conv2"] == pytest.approx(float(nk.cka(rows_a, rows_b)), abs=1e-6)


def test_batches_without_tensors_reach_the_models_forward(words):
    ids = {"one": [1, 2], "two": [3, 4], "three": [5, 6], "four": [7, 7]}
    forward = lambda model, batch: model(torch.tensor([ids[word] for word in batch]))  # noqa: E731
    comparison = nk.compare(words(), words(), [["one", "two"], ["three", "four"]], forward=forward)
    assert comparison.examples == 4
    assert 0 < comparison["embed", "layer.0"] <= 1


def test_layers_are_chosen_for_both_or_for_each(maps, images):
    a, b = maps(), maps()
    assert nk.compare(a, b, images, layers="conv*").layers_b == ("conv1", "conv2")
    mixed = nk.compare(a, b, images, layers={"a": "fc", "b": nn.Conv2d})
    assert (mixed.layers_a, mixed.layers_b) == (("fc",), ("conv1", "conv2"))
    named = nk.compare(a, b, images, layers={"seed1": "fc"}, names=("seed0", "seed1"))
    assert len(named.layers_a) > 1
    assert named.layers_b == ("fc",)


def test_recorded_rows_give_the_models_numbers(maps, images, layers):
    a, b = maps(), maps()
    rows = [nk.activations(model, layers, images) for model in (a, b)]
    live = nk.compare(a, b, images, ["cka", "cca_mean"], layers=layers)
    recorded = nk.compare(*rows, measures=["cka", "cca_mean"])
    for measure in live:
        assert recorded.to_numpy(measure) == pytest.approx(live.to_numpy(measure), abs=1e-6)
    assert recorded.data == "recorded"
    assert nk.compare(*rows, layers=["fc", "conv*"]).layers_a == ("fc", "conv1", "conv2")
    assert nk.compare(*rows, layers={"b": "fc"}).layers_b == ("fc",)


@pytest.mark.parametrize("plain", [lambda state: state, dict, lambda state: dict(reversed(state.items()))])
def test_state_dicts_are_no_recorded_rows_and_are_compared_as_weights(maps, plain):
    a, b = (plain(maps().state_dict()) for _ in range(2))
    for call in (lambda: nk.compare(a, b), lambda: nk.compare_many({"a": a, "b": b}, measures="weight_cosine")):
        with pytest.raises(InvalidValue, match="'a' is a state dict.*`nk.ModelInput.weights=.*'weight_cosine'"):
            call()
    a, b = nk.ModelInput(weights=a), nk.ModelInput(weights=b)
    assert -1 <= nk.compare(a, b, measures="weight_cosine")["conv1", "conv1"] <= 1
    with pytest.raises(InvalidValue, match="'a' is a set of weights, which can't be run; pass the model"):
        nk.compare(a, b)


def test_the_length_of_data_is_known_where_they_tell(images):
    data = TensorDataset(images)
    assert examples_in(images, None) == examples_in([images, images[:1]], 50) == examples_in(data, None) == 50
    assert examples_in(DataLoader(data, sampler=SubsetRandomSampler(range(7))), None) == 7
    assert examples_in(DataLoader(data, batch_size=8), 20) == 20
    assert examples_in([["text"]], None) is None
    assert examples_in((batch for batch in images), None) is None
    assert examples_in((batch for batch in images), 9) == 9


class Spread(nn.Linear):
    """A model that says where it was moved, and can only be moved to the CPU."""

    def to(self, *args, **kwargs):
        self.__dict__.setdefault("moves", []).append(str(args[0]))
        return self


def test_a_model_is_lent_to_the_device_and_brought_back(monkeypatch):
    model = Spread(4, 3)
    nk.compare(model, data=torch.randn(9, 4), layers="", device="cpu")
    assert not hasattr(model, "moves")
    nk.compare(model, data=torch.randn(9, 4), layers="", device="cpu:0")
    assert model.moves == ["cpu:0", "cpu"]
    with pytest.raises(RuntimeError):
        nk.compare(model, data=torch.randn(9, 5), layers="", device="cpu:0")
    assert model.moves[2:] == ["cpu:0", "cpu"]


def test_a_device_without_numbers_is_refused_and_the_model_keeps_its_weights(maps, images):
    model = maps()
    with refused(UnknownName, "device"):
        nk.compare(model, data=images, device="meta")
    assert torch.isfinite(model.fc.weight).all()
    half = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to("meta"))
    with pytest.raises(InvalidValue, match="'meta' device"):
        nk.compare(half, data=torch.ones(3, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_models_run_elsewhere_and_come_home(maps, images, layers):
    a, b = maps(), maps()
    measures = ["cka", "svcca", "cka_minibatch(batch=16)", "cka_rbf"]
    here = nk.compare(a, b, images, measures, layers=layers)
    state = torch.cuda.get_rng_state()
    there = nk.compare(a, b, images, measures, layers=layers, device="cuda")
    mixed = nk.compare(a.cuda(), b, images, measures, layers=layers)
    for measure in measures:
        assert there.to_numpy(measure) == pytest.approx(here.to_numpy(measure), abs=2e-3)
        assert mixed.to_numpy(measure) == pytest.approx(here.to_numpy(measure), abs=2e-3)
    assert next(b.parameters()).device.type == "cpu"
    assert torch.equal(torch.cuda.get_rng_state(), state)
    with pytest.raises(InvalidValue, match="the inputs in batch 1 hold 128 NaN"):
        nk.compare(a, b.cuda(), [images, images[:1] * torch.nan], ["cka_minibatch"], layers="conv1", shape="flatten")


def test_two_loaders_that_shuffle_apart_are_refused(maps, images):
    def loader(**options):
        return DataLoader(TensorDataset(images), batch_size=16, **options)

    def subjects(*data):
        return [nk.ModelInput(model, data=own, layers="fc") for model, own in zip((a, b), data, strict=True)]

    a, b = maps(), maps()
    same = nk.compare(a, b, images, layers="fc")["fc", "fc"]
    for data in ([loader(shuffle=True), loader(shuffle=True)], [loader(), loader(shuffle=True)]):
        with pytest.raises(
            InvalidValue, match="are shuffled and do not pair with those of '.'; give both the same load"
        ):
            nk.compare(*subjects(*data))
    seeded = [loader(shuffle=True, generator=torch.Generator().manual_seed(3)) for _ in "ab"]
    assert nk.compare(*subjects(*seeded))["fc", "fc"] == pytest.approx(same, abs=1e-6)


def test_masked_values_in_the_data_are_refused(maps, images):
    holes = np.ma.masked_greater(images.numpy(), 1)
    with refused(InvalidValue, "data"):
        nk.compare(maps(), data=holes)
    whole = nk.compare(maps(), data=np.ma.masked_array(images.numpy()), layers="fc")
    assert whole["fc", "fc"] == pytest.approx(1)


def test_the_layers_of_many_models_are_listed_in_one_look(monkeypatch):
    looks, shown = [], Alignment.result_layers.fget
    monkeypatch.setattr(Alignment, "result_layers", property(lambda self: (looks.append(1), shown(self))[1]))
    models = {str(k): nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for k in range(6)}
    found = nk.compare_many(models, torch.randn(20, 3), ["cka"], pairs="corresponding", progress=False)
    assert len(found) == 15
    assert len(looks) < 15 * len(models)  # and not for each model again
