"""Compiled and exported programs: what their modules give is held against a model's code between them."""

import copy

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue
from recording_worlds import language, token_batches


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.scale = nn.GELU(), 1.0

    def forward(self, x):
        return x + self.scale * self.down(self.act(self.up(self.norm(x))))


def plain(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(12) for _ in range(3)), nn.Linear(12, 5)).eval()


@pytest.fixture
def data():
    return [torch.randn(16, 12, generator=torch.Generator().manual_seed(0))]


def changed(change):
    model = plain()
    with torch.no_grad():
        change(model)
    return model


def exported(model, data):
    return torch.export.export(model, (data[0],), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))


FAULTS = {
    "1.norm": lambda model: setattr(model[1].norm, "eps", 0.1),
    "0.up": lambda model: model[0].up.bias.add_(0.1),
    "2.act": lambda model: setattr(model[2], "act", nn.GELU(approximate="tanh")),
    "1": lambda model: setattr(model[1], "scale", 1.1),
    "3": lambda model: model[3].weight.mul_(1.01),
}


@pytest.mark.parametrize("module", FAULTS)
def test_the_module_of_a_fault_is_named_in_an_exported_program(data, module):
    found = nk.diff(plain(), exported(changed(FAULTS[module]), data), data, progress=False)
    assert (found.first, found.way) == (module, "program")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_clean_export_raises_no_alarm(data, precision):
    model = plain().to(getattr(torch, precision))
    fed = [batch.to(getattr(torch, precision)) for batch in data]
    found = nk.diff(plain(), exported(model, fed), data, progress=False)
    assert found.first is None
    assert len(found.modules) == len([name for name, _ in plain().named_modules()])


def test_a_file_of_an_exported_program_is_a_program(data, tmp_path):
    torch.export.save(exported(changed(FAULTS["0.up"]), data), tmp_path / "b.pt2")
    assert nk.diff(plain(), str(tmp_path / "b.pt2"), data, progress=False).first == "0.up"


def test_of_a_compiled_model_the_whole_output_is_seen(data):
    clean = torch.compile(plain(), backend="aot_eager")
    assert nk.diff(plain(), clean, data, progress=False).first is None
    faulty = nk.diff(plain(), torch.compile(changed(FAULTS["1"]), backend="aot_eager"), data, progress=False)
    assert (faulty.first, list(faulty.modules)) == ("", [""])


def test_the_compiled_code_itself_runs(data):
    ran = []

    def backend(graph, inputs):
        return lambda *args: [(ran.append(1) and None) or output * 1.5 for output in graph(*args)]

    assert nk.diff(plain(), torch.compile(plain(), backend=backend), data, progress=False).first == ""
    assert ran


def test_blocks_that_are_compiled_alone_are_seen_at_their_ends(data):
    model = changed(FAULTS["1"])
    for block in model[:3]:
        block.compile(backend="aot_eager")
    compiled = [block._compiled_call_impl for block in model[:3]]
    found = nk.diff(plain(), model, data, progress=False)
    assert (found.first, list(found.modules)) == ("1", ["0", "1", "2", "3", ""])
    assert [block._compiled_call_impl for block in model[:3]] == compiled


def test_values_that_are_read_outside_a_module_are_not_taken_for_its_output():
    class Shared(nn.Module):
        """Gives its input in another type, which export lets others read."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(12))

        def forward(self, x):
            x = x.to(torch.float32)
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.head = Shared(), nn.Linear(12, 3)

        def forward(self, x):
            x = x * 2
            return self.head(self.norm(x) + x.to(torch.float32))

    data = [torch.randn(6, 12)]
    program = torch.export.export(copy.deepcopy(Net().eval()), (data[0],))
    assert nk.diff(Net().eval(), program, data, progress=False).first is None


def test_a_program_needs_data(data):
    with pytest.raises(InvalidValue) as refused:
        nk.diff(plain(), exported(plain(), data), progress=False)
    assert refused.value.argument == "data"


def test_a_language_model_is_exported_with_its_masks():
    batch = token_batches(1)[0]
    other = language()
    other.blocks[2].scale = 1.1
    program = torch.export.export(other, (), dict(batch))
    found = nk.diff(language(), program, [batch], progress=False)
    assert found.first in ("blocks.2.up", "blocks.2")  # the sum before `up` is a part of what leads to it
    assert nk.diff(language(), torch.export.export(language(), (), dict(batch)), [batch], progress=False).first is None
