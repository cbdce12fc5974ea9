"""Models of odd kinds in Python: exported for one size, quantised, or lazy; each works or is refused in a sentence."""

import pytest
import torch
from torch import nn
from torch.ao import quantization

import netkin as nk
from netkin.errors import ForwardError, InvalidValue
from netkin.training import accuracy
from quickly import slow_but

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(quantiz|observer|reduce_range|TypedStorage).*"),
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def exported():
    return torch.export.export(net(), (torch.ones(16, 6),)).module()


def unflattened():
    return torch.export.unflatten(torch.export.export(net(), (torch.ones(16, 6),)))


def quantised():
    return quantization.quantize_dynamic(net(), {nn.Linear}, dtype=torch.qint8)


def quantised_through():
    model = nn.Sequential(quantization.QuantStub(), *net(), quantization.DeQuantStub()).eval()
    model.qconfig = quantization.default_qconfig
    prepare_batch = quantization.prepare(model)
    prepare_batch(batches()[0][0])
    return quantization.convert(prepare_batch)


def lazy():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))


def batches(*sizes):
    drawn = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 6, generator=drawn), torch.arange(n) % 3) for n in sizes or (16, 16, 5)]


CALLS = {
    "compare": lambda make, data: nk.compare(make(), make(), data),
    "collect": lambda make, data: nk.collect(make(), data=data),
    "stitch": lambda make, data: nk.stitch(make(), nk.layers(make())[0], make(), nk.layers(make())[0], data),
    "stitch_all": lambda make, data: nk.stitch_all(make(), make(), data),
    "dynamics": lambda make, data: nk.dynamics({1: make(), 2: make()}, data),
    "activations": lambda make, data: nk.activations(make(), None, data),
    "accuracy": lambda make, data: accuracy(make(), data),
}


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch below 2.8 makes other programs")
@pytest.mark.parametrize("make", slow_but([exported, unflattened], exported))
@pytest.mark.parametrize("name", CALLS)
def test_a_program_exported_for_one_batch_size_is_refused_with_that_size(name, make):
    with pytest.raises(ForwardError, match=r"(Guard failed: input.*==|Expected input at .* to be equal to) 16"):
        CALLS[name](make, batches())


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch below 2.8 makes other programs")
@pytest.mark.parametrize("make", [exported, unflattened])
def test_a_program_exported_for_one_batch_size_takes_batches_of_that_size(make):
    found = nk.compare(make(), make(), batches(16, 16))
    assert found.examples == 32


@pytest.mark.parametrize("make", [quantised, quantised_through])
@pytest.mark.parametrize("name", ["compare", "collect", "dynamics", "activations", "accuracy"])
def test_quantised_models_are_compared(name, make):
    assert CALLS[name](make, batches()) is not None


def test_steps_of_a_quantised_run_are_told_apart():
    changed = net()
    with torch.no_grad():
        changed[0].weight.mul_(torch.linspace(-1, 1, 8)[:, None])
    moved = quantization.quantize_dynamic(changed, {nn.Linear}, dtype=torch.qint8)
    found = nk.dynamics({1: moved, 2: quantised()}, batches(), measures="cka", layers="0")
    alone = nk.compare(moved, quantised(), batches(), measures="cka", layers="0")["0", "0"]
    assert 0.1 < alone < 0.99
    assert found.own()[0, 0] == pytest.approx(alone)


def test_layers_of_a_model_quantised_throughout_are_refused_in_a_stitch():
    with pytest.raises(ForwardError, match=r"layer '0' gives no floating tensor to record, but Tensor of torch.quint8"):
        CALLS["stitch_all"](quantised_through, batches())


def test_a_model_without_weights_to_train_is_refused():
    with pytest.raises(InvalidValue, match="no weights that can be trained; those of quantised layers are fixed"):
        nk.train(quantised_through(), batches(), epochs=1)


def test_the_sizes_of_a_partly_quantised_model_are_told():
    part = nn.Sequential(nn.Conv1d(6, 6, 1), nn.Flatten(), nn.Linear(6, 3))
    study = nk.sparsity_study(quantization.quantize_dynamic(part, {nn.Linear}, dtype=torch.qint8))
    assert study.networks["model"].weights == 36


@pytest.mark.parametrize("name", [*CALLS, "compress"])
def test_lazy_models_are_refused_with_the_layer(name):
    calls = CALLS | {"compress": lambda make, data: nk.compress(make(), "2", k=2, data=data)}
    with pytest.raises(InvalidValue, match="layer '2' is a lazy module without weights yet; run the model once"):
        calls[name](lazy, batches())
