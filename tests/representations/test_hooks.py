"""What a recording keeps, and what it leaves behind: nothing."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import netkin as nk
from netkin.errors import ForwardError, InvalidValue, UnknownName
from netkin.representations.hooks import recording
from netkin.representations.inputs import feed
from worlds import data_parallel


class Gives(nn.Module):
    """A model whose only layer hands out whatever it was built with."""

    def __init__(self, output):
        super().__init__()
        self.inner = Handing(output)
        self.other = nn.Linear(2, 2)

    def forward(self, batch):
        return self.inner(batch)


class Handing(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, batch):
        return self.output


@dataclass(frozen=True)
class Answer:
    count: int
    logits: torch.Tensor


class Plain:
    """An object that is no dataclass and no mapping."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


Point = namedtuple("Point", "index value")
TENSOR = torch.arange(6.0).reshape(3, 2)
WHOLE = torch.arange(3)


@pytest.mark.parametrize(
    "output",
    [
        TENSOR,
        (WHOLE, TENSOR),
        [None, [TENSOR]],
        Point(3, TENSOR),
        {"loss": torch.zeros(1), "logits": TENSOR},
        OrderedDict(attentions=(torch.zeros(1),), last_hidden_state=TENSOR),
        {"logits": None, "nested": {"first": WHOLE, "second": TENSOR}},
        Answer(1, TENSOR),
        ({"x": WHOLE}, Answer(2, TENSOR)),
        Plain(loss=torch.zeros(1), last_hidden_state=TENSOR),
        SimpleNamespace(note="", logits=TENSOR),
    ],
)
def test_the_first_floating_tensor_in_any_container_is_kept(output):
    model = Gives(output)
    with recording(model, "inner") as outputs:
        model(torch.ones(3, 2))
    assert torch.equal(outputs["inner"], TENSOR)


def test_a_model_output_gives_its_last_hidden_state(language):
    with recording(language, ["", "encoder"]) as outputs:
        language(torch.ones(2, 4, dtype=torch.long))
    assert outputs[""].shape == (2, 4, 6)
    assert torch.equal(outputs[""], outputs["encoder"])


@pytest.mark.parametrize("output", [None, "text", WHOLE, (), {"a": [3]}, Plain(a=TENSOR), Plain(logits=3)])
def test_an_output_without_a_floating_tensor_is_refused(output):
    model, kind = Gives(output), "Tensor of torch.int64" if output is WHOLE else type(output).__name__
    refusal = f"layer 'inner' gives no floating tensor to record, but {kind}; choose another layer"
    with pytest.raises(ForwardError, match=refusal), recording(model, "inner"):
        model(torch.ones(1))


def test_sparse_and_nested_outputs_are_refused():
    for output, kind in (
        (TENSOR.to_sparse(), "sparse"),
        (torch.nested.nested_tensor([TENSOR], layout=torch.jagged), "nested"),
    ):
        model = Gives(output)
        with pytest.raises(ForwardError, match=f"'inner' gives a {kind} tensor"), recording(model, "inner"):
            model(torch.ones(1))


def test_an_in_place_relu_does_not_change_what_was_recorded(chain):
    batch = torch.randn(5, 4)
    with recording(chain, ["0", "1"]) as outputs:
        chain(batch)
    assert torch.equal(outputs["0"], nn.functional.linear(batch, chain[0].weight, chain[0].bias))
    assert outputs["0"].min() < 0 <= outputs["1"].min()


@pytest.mark.parametrize("reduce", [lambda name, x: x.flatten(1), lambda name, x: (name, x[:, :2])])
def test_a_reduced_view_is_safe_from_in_place_steps_too(chain, reduce):
    with recording(chain, "0", reduce=reduce) as outputs:
        chain(torch.randn(5, 4))
    kept = outputs["0"][1] if isinstance(outputs["0"], tuple) else outputs["0"]
    assert kept.min() < 0


def test_reduce_gets_the_name_and_its_result_is_kept(chain):
    with recording(chain, ["0", "2"], reduce=lambda name, x: (name, x.shape[1])) as outputs:
        chain(torch.ones(5, 4))
    assert outputs == {"0": ("0", 8), "2": ("2", 3)}


def test_a_module_called_twice_gives_two_outputs(residual, images):
    with recording(residual, ["layer1.0.relu", "layer1.0.bn"]) as outputs:
        residual(images)
    assert list(outputs) == ["layer1.0.bn", "layer1.0.relu", "layer1.0.relu#2"]
    assert torch.equal(outputs["layer1.0.relu"], outputs["layer1.0.bn"].relu())
    assert not torch.equal(outputs["layer1.0.relu"], outputs["layer1.0.relu#2"])


def test_one_call_of_a_module_can_be_recorded(residual, images):
    with recording(residual, "layer1.0.relu") as all_calls:
        residual.eval()(images)
    with recording(residual, ["layer1.0.relu#1", "layer1.0.relu#2"]) as outputs:
        residual(images)
    assert torch.equal(outputs["layer1.0.relu#1"], all_calls["layer1.0.relu"])
    assert torch.equal(outputs["layer1.0.relu#2"], all_calls["layer1.0.relu#2"])


def test_each_forward_starts_afresh(chain):
    with recording(chain, ["", "0"]) as outputs:
        for _ in range(3):
            result = chain(torch.randn(5, 4))
    assert list(outputs) == ["0", ""]
    assert torch.equal(outputs[""], result)


def test_after_a_crash_the_next_forward_starts_afresh(chain):
    with recording(chain, "0") as outputs:
        with pytest.raises(RuntimeError):
            chain(torch.ones(1, 999))
        chain(torch.ones(2, 4))
        chain(torch.ones(3, 4))
    assert {name: len(rows) for name, rows in outputs.items()} == {"0": 3}


def test_a_forward_function_that_skips_the_model_itself_starts_afresh_too(chain):
    with recording(chain, "0") as outputs:
        for _ in range(2):
            feed(chain, torch.ones(3, 4), forward=lambda model, batch: (model[0](batch), model(batch)))
    assert list(outputs) == ["0", "0#2"]


def test_after_ctrl_c_in_a_fed_batch_the_next_one_starts_afresh(chain):
    def interrupt(model, batch):
        model[0](batch)
        raise KeyboardInterrupt

    with recording(chain, "0") as outputs:
        with pytest.raises(KeyboardInterrupt):
            feed(chain, torch.ones(3, 4), forward=interrupt)
        feed(chain, torch.ones(2, 4))
    assert {name: len(rows) for name, rows in outputs.items()} == {"0": 2}


def test_a_layer_that_does_not_run_is_absent():
    model = Gives(TENSOR)
    with recording(model, ["inner", "other"]) as outputs:
        model(torch.ones(1))
    assert list(outputs) == ["inner"]


def test_recorded_outputs_carry_gradients_when_the_caller_wants_them(chain):
    with recording(chain, "0") as outputs:
        chain(torch.ones(2, 4))
    outputs["0"].sum().backward()
    assert chain[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_the_model_keeps_no_hooks_after_a_crash(residual, images, no_hooks, fault):
    def crash(module, inputs):
        raise fault

    handle = residual.fc.register_forward_pre_hook(crash)
    with pytest.raises(fault), recording(residual):
        residual(images)
    handle.remove()
    assert no_hooks(residual)


def test_the_callers_own_hooks_stay(chain, no_hooks):
    handle = chain[0].register_forward_hook(lambda *_: None)
    with recording(chain):
        chain(torch.ones(1, 4))
    assert len(chain[0]._forward_hooks) == 1
    handle.remove()
    assert no_hooks(chain)


def test_an_unknown_layer_leaves_no_hooks(chain, no_hooks):
    with pytest.raises(UnknownName), recording(chain, ["0", "nine"]):
        pass
    assert no_hooks(chain)


def recorded(model, called, batch):
    with recording(model) as outputs, torch.no_grad():
        called(batch)
    return outputs


def test_wrapped_models_record_what_the_plain_model_does(residual, images):
    residual.eval()
    plain = recorded(residual, residual, images)
    compiled = torch.compile(residual, backend="eager")
    for model in (data_parallel(residual), compiled, data_parallel(compiled)):
        outputs = recorded(model, model, images)
        assert list(outputs) == list(plain)
        assert all(torch.equal(outputs[name], plain[name]) for name in plain)


def test_a_model_compiled_and_run_before_is_recorded_too(residual, images):
    residual.eval()
    plain = recorded(residual, residual, images)
    compiled = torch.compile(residual, backend="eager")
    with torch.no_grad():
        compiled(images)
    state = vars(compiled)["forward"]
    assert recorded(compiled, compiled, images).keys() == plain.keys()
    assert vars(compiled)["forward"] is state


def test_modules_compiled_in_place_or_one_by_one_are_recorded_too(residual, images):
    residual.eval()
    plain = recorded(residual, residual, images)
    residual.layer1[0] = torch.compile(residual.layer1[0], backend="eager")
    residual.layer2.compile(backend="eager")
    compiled = residual.layer2._compiled_call_impl
    with torch.no_grad():
        residual(images)
    outputs = recorded(residual, residual, images)
    assert all(torch.equal(outputs[name], plain[name]) for name in plain)
    assert residual.layer2._compiled_call_impl is compiled
    assert compiled is not None


def test_a_distributed_model_is_recorded_too(residual, images, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        residual.eval()
        plain = recorded(residual, residual, images)
        model = DistributedDataParallel(residual)
        outputs = recorded(model, model, images)
        del model
    finally:
        torch.distributed.destroy_process_group()
    assert list(outputs) == list(plain)
    assert all(torch.equal(outputs[name], plain[name]) for name in plain)


def test_copies_on_several_devices_are_refused(chain):
    with (
        recording(chain, "1"),
        pytest.raises(ForwardError, match=r"only one can be watched; call `model.module\(batch\)`"),
    ):
        chain[1]._replicate_for_data_parallel()(torch.ones(1))


def test_torchs_fused_transformer_is_seen_through():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with recording(model, "layers.?.linear1") as outputs, torch.no_grad():
        model(torch.randn(2, 5, 8), src_key_padding_mask=padding)
    assert {name: tuple(x.shape) for name, x in outputs.items()} == {
        "layers.0.linear1": (2, 5, 16),
        "layers.1.linear1": (2, 5, 16),
    }
    assert torch.backends.mha.get_fastpath_enabled()


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.last(self.relu(self.first(inputs)))


@pytest.fixture
def steps():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Steps().eval()


GRAPHS = {
    "scripted": lambda net: torch.jit.script(net),
    "traced": lambda net: torch.jit.trace(net, torch.ones(2, 4)),
    "frozen": lambda net: torch.jit.freeze(torch.jit.script(net)),
    "exported": lambda net: torch.export.export(
        net, (torch.ones(2, 4),), dynamic_shapes=({0: torch.export.Dim("n")},)
    ).module(),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", GRAPHS)
def test_the_output_of_a_compiled_or_flattened_model_is_recorded_and_compared(steps, kind):
    if kind == "exported" and torch.__version__ < "2.8":
        pytest.skip("torch below 2.8 can't export a model that calls itself")
    graph, inputs = GRAPHS[kind](steps), torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    assert nk.layers(graph) == [""]
    assert torch.allclose(nk.activations(graph, data=[inputs])[""], steps(inputs))
    assert nk.compare(graph, steps, data=[inputs], layers=[""])["", ""] == pytest.approx(1)
    with pytest.raises(UnknownName, match=r"no layer named 'first'.*runs as a whole.*torch\.export\.unflatten"):
        nk.activations(graph, "first", data=[inputs])
    assert torch.allclose(graph(inputs), steps(inputs))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_part_of_a_model_is_one_of_its_layers(steps):
    model, inputs = nn.Sequential(torch.jit.script(steps), nn.ReLU(), nn.Linear(3, 2)), torch.ones(5, 4)
    found = nk.activations(model, data=[inputs])
    assert list(found) == ["0", "1", "2"]
    assert torch.allclose(found["0"], steps(inputs))


def test_an_exported_program_is_refused_with_what_makes_a_module_of_it(steps):
    program = torch.export.export(steps, (torch.ones(5, 4),))
    with pytest.raises(InvalidValue, match=r"got ExportedProgram\. `torch\.export\.unflatten` makes a module"):
        nk.layers(program)
    with pytest.raises(InvalidValue, match=r"got ExportedProgram\. `torch\.export\.unflatten` makes a module"):
        nk.compare(program, data=[torch.ones(5, 4)])
