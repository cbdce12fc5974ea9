"""Forms: what a model is beside its weights. Attributes tell models apart; what a forward pass changes does not."""

import copy
import functools
import os
import pickle
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import FileError, ShapeError
from netkin.identity import Form, form_difference, form_of
from netkin.training import train
from quickly import slow_after

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


class Config:
    def __init__(self, theta, folder="a"):
        self.theta, self.folder = theta, folder

    def to_dict(self):
        return {"rope_theta": self.theta, "scaling": {"factor": 2.0}, "_name_or_path": self.folder}


class Net(nn.Module):
    """A network with whatever attributes it is given."""

    offset = 0.0

    def __init__(self, **attributes):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        vars(self).update(attributes)

    def forward(self, inputs):
        return self.layer(inputs) + self.offset


class Shifted(Net):
    offset = 1.0


class Doubled(Net):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


def with_hook(factor):
    net = Net()
    net.layer.register_forward_hook(lambda module, given, output: output * factor)
    return net


def with_buffer(value):
    net = Net()
    net.register_buffer("scale", torch.tensor(value), persistent=False)
    return net


def encoder(**options):
    return nn.TransformerEncoderLayer(8, **{"nhead": 2, "dim_feedforward": 8, "batch_first": True, **options})


def with_state(extra):
    class Extra(Net):
        def get_extra_state(self):
            return {"extra": extra}

    return Extra()


@pytest.mark.parametrize(
    "one, other, name",
    [
        (Net(act=torch.tanh), Net(act=torch.relu), "act"),
        (Net(act=nn.functional.relu), Net(act=nn.functional.gelu), "act"),
        (Net(act=functools.partial(torch.clamp, min=0)), Net(act=functools.partial(torch.clamp, min=1)), "act"),
        (Net(act=lambda x: x + 1),
         Net(act=lambda x: x + 2), "act"),  # in two lines, as Python 3.10 does not tell where in a line one begins
        (Net(act="abc".upper), Net(act="abd".upper), "act"),
        (Net(kind=nn.Linear), Net(kind=nn.Conv2d), "kind"),
        (encoder(), encoder(nhead=4), "self_attn.num_heads"),
        (encoder(), encoder(norm_first=True), "norm_first"),
        (encoder(), encoder(activation="gelu"), "activation_relu_or_gelu"),
        (nn.Sequential(nn.Conv2d(3, 3, 3)), nn.Sequential(nn.Conv2d(3, 3, 3, dilation=2)), "0.dilation"),
        (Net(config=Config(1e4)), Net(config=Config(1e6)), "config.rope_theta"),
        (Net(options={"a": [1, (2, None)]}), Net(options={"a": [1, (2, 0)]}), "options"),
        (Net(size=torch.Size([1])), Net(size=torch.Size([2])), "size"),
        (Net(dtype=torch.float32), Net(dtype=torch.float16), "dtype"),
        (Net(mask=torch.zeros(3)), Net(mask=torch.ones(3)), "mask"),
        (Net(text="a" * 200), Net(text="a" * 199 + "b"), "text"),
        (Net(), Net(more=None), "more"),
        (Net(), Shifted(), "class"),
        (Net(), Doubled(), "class"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh()), "0.class"),
        (with_hook(1.0), with_hook(2.0), "layer._forward_hooks.0"),
        (with_buffer(1.0), with_buffer(2.0), "scale"),
        (with_state(1), with_state(2), "extra_state"),
        (torch.fx.symbolic_trace(nn.ReLU()), torch.fx.symbolic_trace(nn.Tanh()), "_code"),
    ],
)  # fmt: skip
def test_models_that_differ_beside_their_weights_are_told_apart_by_the_attribute(one, other, name):
    first, second = form_of(one), form_of(other)
    assert form_difference(first, second).startswith(repr(name) + " (")
    assert first.digest != second.digest


def everything():
    """Return a model with attributes of many kinds."""
    torch.manual_seed(0)
    own = {"act": torch.tanh, "names": {"b", "a", "c"}, "cache": SimpleNamespace(a=1), "config": Config(1e4)}
    return nn.Sequential(Net(**own, by=functools.partial(max, key=len)), encoder(), with_hook(2.0))


def test_equal_models_have_equal_forms_however_they_are_wrapped_or_copied():
    model = everything()
    form = form_of(model)
    moved = copy.deepcopy(model).eval()
    moved.device, moved.home, moved.hf_device_map = torch.device("cuda", 1), "cuda:1", {"": 1}
    moved[0].config = Config(1e4, folder="elsewhere")
    copies = [copy.deepcopy(model), nn.DataParallel(model), torch.compile(model, backend="eager"), moved, everything()]
    for other in copies:
        assert form_difference(form, form_of(other)) == ""
        assert form_of(other).digest == form.digest
    inside = nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:])
    assert form_difference(form, form_of(inside)) == ""
    model.compile(backend="eager")
    assert form_of(model) == form
    assert form_of(pickle.loads(pickle.dumps(model[1]))) == form_of(model[1])
    assert form_of(torch.fx.symbolic_trace(model[0])) == form_of(torch.fx.symbolic_trace(model[0]))


@pytest.mark.slow
def test_another_process_finds_the_same_form():
    code = (
        "import sys; sys.path.insert(0, 'tests'); from tests.identity import test_forms as t; "
        "print(t.form_of(t.everything()).to_json())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {form_of(everything()).to_json()}


def test_what_is_neither_plain_nor_an_array_is_listed_as_unknown():
    found = {}
    exec("def f(x): return x", found)
    form = form_of(Net(cache=SimpleNamespace(a=1), rows=[1, object()], typed=found["f"], size=3))
    assert form.unknown == ("cache", "rows", "typed")
    assert (
        form_difference(form, form_of(Net(cache=SimpleNamespace(a=2), rows=[object()], typed=found["f"], size=3))) == ""
    )
    assert "unknown: cache, rows, typed" in str(form)


def test_a_version_stands_for_the_source_of_classes():
    first, second = form_of(Net(), version="1"), form_of(Net(), version="2")
    assert form_difference(first, second) == "'version' (1, not 2)"
    Edited = type("Net", (Net,), {"forward": lambda self, inputs: inputs, "__module__": Net.__module__})
    assert form_difference(form_of(Net()), form_of(Edited())).startswith("'class' (")
    assert form_difference(first, form_of(Edited(), version="1")) == ""


def test_a_form_is_read_again_as_it_was_written():
    model = everything()
    form = form_of(model)
    model[0].seen = 1
    after = form.after(model)
    assert (after.state, after.unknown) == (("0.seen",), form.unknown)
    for one in (form, after):
        assert Form.from_json(one.to_json()) == one
    assert after.digest == form.digest == form_of(model).after(everything()).digest


# models that their own forward pass changes


class Cache:
    def __init__(self):
        self.rows = {}


def counted(model):
    model.count += 1


def tallied(model):
    model.tallies["passes"]["all"] = model.tallies["passes"].get("all", 0) + 1


def cached(model):
    model.cache.rows[len(model.cache.rows)] = object()


def remembered(model):
    model.cache = model.cache or Cache()


def buffered(model):
    model.recent = torch.full((2,), float(len(model.recent)))


class Changing(nn.Module):
    """A network that a helper function changes in each forward pass."""

    def __init__(self, seed, change, **attributes):
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.change = nn.Linear(4, 3), change
        self.register_buffer("recent", torch.zeros(1), persistent=False)
        vars(self).update(attributes)

    def forward(self, inputs):
        self.change(self)
        return self.layer(inputs)


CHANGES = [(counted, {"count": 0}), (tallied, {"tallies": {"passes": {}}}), (cached, {"cache": Cache()}),
           (remembered, {"cache": None}), (buffered, {})]  # fmt: skip


@pytest.mark.parametrize(
    "change, attributes", slow_after(2, CHANGES, several=True), ids=lambda value: getattr(value, "__name__", "")
)
def test_models_that_running_changes_go_on_and_merge(tmp_path, change, attributes):
    def pair():
        return {name: Changing(seed, change, **copy.deepcopy(attributes)) for seed, name in enumerate("ab")}

    models, save = pair(), tmp_path / "all.netkin"
    first = nk.compare_many(models, INPUTS, "cka", save=save, progress=False)["a", "b"]
    for again in (models, models | {"c": Net()}, pair()):
        found = nk.compare_many(again, INPUTS, "cka", save=save, progress=False)["a", "b"]
        assert (found.tables["cka"].values == first.tables["cka"].values).all()
    for model in (*models.values(), *(others := pair()).values()):
        model.extra = 1
    with pytest.raises(FileError, match="differs in architecture .'extra' \\(absent, not 1\\) of 'a' and 'extra'"):
        nk.compare_many(others, INPUTS, "cka", save=save, progress=False)

    options = {"measures": "cka", "progress": False}
    parts = [nk.collect(*pair().values(), INPUTS, part=f"{part}/2", **options) for part in (1, 2)]
    live = nk.collect(*(used := [*pair().values()]), INPUTS, part="1/2", **options)
    assert nk.merge([live, nk.collect(*used, INPUTS, part="2/2", **options)]).examples == len(INPUTS)
    assert nk.merge(parts).examples == len(INPUTS)
    with pytest.raises(ShapeError, match="the architecture of 'a' differs in 'extra'"):
        nk.merge([parts[0], nk.collect(*others.values(), INPUTS, part="2/2", **options)])


def test_a_training_does_not_search_what_objects_hold(tmp_path):
    """Code on PYTHONPATH, as in a monorepo, with objects that hold each other."""
    holders = [SimpleNamespace(number=number) for number in range(2000)]
    for holder in holders:
        holder.others = holders
    model, hook = Net(trainer=holders[0]), lambda model, step: holders[0]
    labels = torch.zeros(len(INPUTS), dtype=torch.long)
    started = time.perf_counter()
    train(model, (INPUTS, labels), epochs=1, hooks=[hook], save=tmp_path / "run")
    assert time.perf_counter() - started < 20


def test_a_training_goes_on_whose_hook_reads_a_list(tmp_path):
    seen = []

    def watch(model, step):
        seen.append(step)

    def run(**attributes):
        torch.manual_seed(0)
        data, options = (INPUTS, torch.zeros(len(INPUTS), dtype=torch.long)), {"epochs": 2, "batch": 10}
        return train(Net(**attributes), data, **options, hooks=[watch], save=tmp_path / "run")

    assert run() == run()
    assert seen == list(range(1, 9))
    with pytest.raises(FileError, match="differs in architecture .'offset' \\(absent, not 2.0\\) of 'model'"):
        run(offset=2.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_models_are_told_apart_by_their_code():
    first, second = (form_of(torch.jit.script(nn.Sequential(one))) for one in (nn.ReLU(), nn.Tanh()))
    assert form_difference(first, second)
    assert first == form_of(torch.jit.script(nn.Sequential(nn.ReLU())))
