"""Data and models of odd kinds: each works, or is refused in one sentence that names the fact, with exit code 1."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from quickly import slow_after, slow_but

ODD = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def images(n=32, side=8, channels=1):
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(n + side))


def classes(n=32):
    return torch.arange(n) % 10


def last_smaller():
    threes = [(images(), classes(), torch.arange(32))] * 2
    return [*threes, (images(7), classes(7), torch.arange(7))]


def sizes():
    return [(images(), classes()), (images(side=6), classes())]


def lengths():
    return [(images(), classes()), (images(), classes(31))]


def tall():
    return [(images(), classes()), (images(), classes()[:, None].expand(-1, 3))]


def texts():
    return [(images(), ["cat", "dog"] * 16)] * 2


def text_arrays():
    import numpy as np
    return [(images(), np.array(["cat", "dog"] * 16))] * 2


def sentences():
    return ["a text", "another"]


def kinds():
    of = [classes().tolist(), classes().numpy(), classes().to(torch.uint16), classes().to(torch.uint64)]
    return [(images(), one) for one in of]


def booleans():
    return [(images() > 0.5, classes())] * 2


def fractions():
    return [(images(), classes() + 0.5)] * 2


def beyond():
    return [(images(), classes() + 5)] * 2


def below():
    return [(images(), classes() - 1)] * 2


def large():
    return [(images(), classes() * 10**12)] * 2


def sparse():
    return [(images().to_sparse(), classes())] * 2


def holes():
    x = images()
    x[3, 0, 0, 0] = float("nan")
    return [(images(), classes()), (x, classes())]


class Broken(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, place):
        if place == 5:
            return {}["pixels of image 5"]
        return images(1)[0], place


def worker():
    return DataLoader(Broken(), batch_size=4, num_workers=1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.flat = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()
        self.hidden, self.fc = nn.Linear(144, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.fc(self.hidden(self.flat(self.relu(self.conv(x)))).relu())


def net():
    torch.manual_seed(0)
    return Net()


class Shared(Net):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = self.first

    def forward(self, x):
        return self.fc(self.second(self.first(self.hidden(self.flat(self.relu(self.conv(x))))).relu()))


@dataclass
class Answer:
    logits: torch.Tensor
    note: str = ""


class Answering(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind(super().forward(x))


def shared():
    return Shared()


def of_dict():
    return Answering(lambda y: {"logits": y, "note": ""})


def of_tuple():
    return Answering(lambda y: (y, 3))


def of_record():
    return Answering(Answer)


class Dense(Net):
    def forward(self, x):
        return super().forward(x.to_dense())


def dense():
    return Dense()


def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(12), nn.ReLU(), nn.Linear(12, 10))


def failing(x):
    raise KeyError("no such transform")
"""
TRAINED = "--recipe epochs=1,batch=16"
COMMANDS = {
    "compare": "compare nk_odd:net nk_odd:net --data nk_odd:{0}",
    "collect": "collect nk_odd:net --data nk_odd:{0} --out found.stats",
    "stitch": "stitch nk_odd:net nk_odd:net --at relu --data nk_odd:{0}",
    "task loss": "stitch nk_odd:net nk_odd:net --at relu --method 'task_loss(epochs=1)' --data nk_odd:{0}",
    "compress": "compress nk_odd:net --layer hidden --k 0.5 --data nk_odd:{0}",
    "compress to accuracy": "compress nk_odd:net --layer hidden --accuracy-drop 0.5 --data nk_odd:{0}",
    "sparsity": "sparsity nk_odd:net --data nk_odd:{0}",
    "recommend": "recommend nk_odd:net --data nk_odd:{0} --no-errors",
    "classes": "classes nk_odd:net --data nk_odd:{0}",
    "tasks": "tasks a=nk_odd:net,nk_odd:{0} b=nk_odd:net,nk_odd:{0} --seeds 1",
    "federate": f"federate nk_odd:net --data nk_odd:{{0}} --test nk_odd:{{0}} --classes 2 --rounds 1 {TRAINED}",
    "continual": f"continual nk_odd:net --data nk_odd:{{0}} --test nk_odd:{{0}} --tasks 2 {TRAINED}",
}


@pytest.fixture
def odd(netkin):
    """Run a command on odd data or models; an exception of any other kind than a refusal fails the test."""
    Path("nk_odd.py").write_text(ODD)

    def run(line):
        result = netkin(line)
        assert isinstance(result.exception, SystemExit | None), repr(result.exception)
        return result

    return run


def refusal(result):
    """Return the sentence of a refusal."""
    assert result.exit_code == 1, result.stdout
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_last_batch_may_be_smaller_and_more_may_follow_the_labels(odd, command):
    result = odd(COMMANDS[command].format("last_smaller"))
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_batches_of_two_sizes_end_the_command_in_one_sentence(odd, command):
    said = refusal(odd(COMMANDS[command].format("sizes")))
    if command in ("federate", "continual"):
        assert "shape (1, 8, 8) and" in said
        assert "(1, 6, 6)" in said
    else:
        assert "RuntimeError: mat1" in said


def test_inputs_of_a_type_that_the_model_does_not_take_are_refused_with_it(odd):
    said = refusal(odd(COMMANDS["compare"].format("booleans")))
    assert "Input type (bool) and bias type (float) should be the same" in said
    assert "could not be run on inputs of type bool" in said
    assert "by a function given as `transform`" in said


def test_texts_are_refused_by_what_a_model_takes(odd):
    assert "a batch holds text ('a text'), and Net takes numbers" in refusal(
        odd(COMMANDS["compare"].format("sentences"))
    )


NEED_LABELS = ("stitch", "task loss", "compress to accuracy", "sparsity", "recommend", "federate", "continual")


@pytest.mark.parametrize("data", slow_but(["texts", "text_arrays"], "texts"))
@pytest.mark.parametrize("command", COMMANDS)
def test_texts_as_labels_are_refused_where_labels_count(odd, command, data):
    result = odd(COMMANDS[command].format(data))
    if command in NEED_LABELS:
        said = " ".join((result.stdout + refusal(result)).split())  # stitches say in the table why they have no value
        assert "such as 'cat'" in said or "the labels whole numbers" in said
    else:
        assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_numbers_of_classes_may_be_lists_and_arrays_of_any_type(odd, command):
    result = odd(COMMANDS[command].format("kinds"))
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("data, fact", [("lengths", "(31,)"), ("tall", "(32, 3)"), ("fractions", "float32")])
@pytest.mark.parametrize("command", NEED_LABELS)
def test_labels_that_are_no_class_number_for_each_example_are_refused(odd, command, data, fact):
    result = odd(COMMANDS[command].format(data))
    assert result.exit_code == 1
    said = " ".join((result.stdout + result.stderr).split())
    assert fact in said or "31 labels for 32 examples" in said or "labels whole numbers" in said, said


@pytest.mark.parametrize(
    "command, fact",
    [
        ("compress to accuracy", "a label is 14, and the model has 10 classes, 0 to 9"),
        ("sparsity", "a label is 14, and the model has 10 classes, 0 to 9"),
        ("federate", "labels up to 14, and the network 10 outputs"),
    ],
)
def test_labels_beyond_the_classes_of_the_model_are_refused(odd, command, fact):
    assert fact in refusal(odd(COMMANDS[command].format("beyond")))


@pytest.mark.parametrize("data, fact", [("below", "down to -1"), ("holes", "1 NaN or Inf"), ("sparse", "are sparse")])
@pytest.mark.parametrize("command", ["federate", "continual"])
def test_examples_that_no_network_can_learn_are_refused(odd, command, data, fact):
    assert fact in refusal(odd(COMMANDS[command].format(data)))


def test_class_numbers_may_be_large(odd):
    result = odd(COMMANDS["continual"].format("large"))
    assert result.exit_code == 0, result.stderr
    assert "and the network 10 outputs" in refusal(odd(COMMANDS["federate"].format("large")))


@pytest.mark.parametrize("command", ["compare", "sparsity"])
def test_the_cause_of_a_fault_in_a_worker_process_is_told(odd, command):
    line = COMMANDS[command].format("worker")
    said = refusal(odd(line))
    assert "'nk_odd:worker' raised KeyError: 'pixels of image 5' (in a worker process of the DataLoader)." in said
    whole = odd(f"--debug {line}").stderr
    assert 'return {}["pixels of image 5"]' in whole


def test_tasks_warn_of_random_weights(odd):
    result = odd("tasks a=netkin:digits,digits:test b=netkin:digits,digits:train --examples 40 --layers fc --json")
    found = json.loads(result.stdout)["comparisons"]
    said = [f"'netkin:digits' was given no weights, so they are random, drawn from seed {seed}." for seed in (0, 1)]
    assert set(said) <= {caveat["sentence"] for one in found for caveat in one["caveats"]}


def test_a_transform_that_fails_is_named(odd):
    said = refusal(odd(f"{COMMANDS['compare'].format('kinds')} --transform nk_odd:failing"))
    assert "KeyError: 'no such transform'" in said


@pytest.mark.parametrize("model", slow_after(1, ["of_dict", "of_tuple", "of_record"]))
def test_tasks_are_learnt_in_every_way_by_models_of_any_output(odd, model):
    line = COMMANDS["continual"].format("kinds").replace("nk_odd:net", f"nk_odd:{model}")
    result = odd(f"{line} --method ewc --method replay --method joint --method atoms --method finetune")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("method", ["atoms", "ewc", "replay"])
def test_tasks_are_learnt_by_a_model_with_one_layer_under_two_names(odd, method):
    line = COMMANDS["continual"].format("kinds").replace("nk_odd:net", "nk_odd:shared")
    result = odd(f"{line} --head fc --method {method}")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("command", slow_after(1, ["stitch", "task loss", "compare"]))
def test_sparse_inputs_reach_a_model_that_takes_them(odd, command):
    result = odd(COMMANDS[command].format("sparse").replace("nk_odd:net", "nk_odd:dense"))
    assert result.exit_code == 0, result.stderr


@pytest.mark.slow
def test_clients_train_a_model_with_one_layer_under_two_names(odd):
    result = odd(COMMANDS["federate"].format("kinds").replace("nk_odd:net", "nk_odd:shared"))
    assert result.exit_code == 0, result.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("line", ["federate net.pt2 --classes 2 --rounds 1", "continual net.pt2 --tasks 2 --test {0}"])
def test_an_exported_program_is_not_trained_in_copies(odd, line):
    net, sizes = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval(), {0: torch.export.Dim("examples", min=1)}
    torch.export.save(torch.export.export(net, (torch.ones(4, 1, 8, 8),), dynamic_shapes=(sizes,)), "net.pt2")
    said = refusal(odd(f"{line.format('nk_odd:kinds')} --data nk_odd:kinds {TRAINED}"))
    assert "torch can't copy a network that was made of an exported program" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_lazy_models_are_refused_with_the_layer(odd, command):
    line = COMMANDS[command].format("kinds").replace("nk_odd:net", "nk_odd:lazy")
    said = refusal(odd(line.replace("--layer hidden", "--layer 1").replace("--at relu", "--at 2")))
    assert "layer '1' is a lazy module without weights yet" in said
