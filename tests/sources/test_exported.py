import io
import json
import logging
import pickle
import warnings
import zipfile

import pytest
import torch
from torch import nn
from torch.export import Dim, export, save

import netkin
from netkin.errors import SourceError
from netkin.representations import layers, recording
from netkin.sources import load_model
from netkin.sources.exported_programs import clean

if torch.__version__ < "2.8":
    pytest.skip("torch below 2.8 writes programs in an older layout, which is refused", allow_module_level=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        features = self.stem(inputs)
        for block in self.blocks:
            features = block(features)
        return self.head(features)


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Net().eval()


@pytest.fixture(scope="module")
def exported(net, tmp_path_factory):
    """The bytes of the network exported with any number of examples."""
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    save(export(net, (torch.ones(2, 4),), dynamic_shapes=({0: Dim("n")},)), path)
    return path.read_bytes()


@pytest.fixture
def path(exported, tmp_path):
    (tmp_path / "net.pt2").write_bytes(exported)
    return tmp_path / "net.pt2"


def rewritten(path, change, entry="models/model.json"):
    """Change the JSON of one entry of the archive."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in entries if name.endswith(entry))
    content = json.loads(entries[name])
    change(content)
    entries[name] = json.dumps(content).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for each, stored in entries.items():
            archive.writestr(each, stored)


def added(path, name, content):
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"net/{name}", content)


def test_an_exported_program_gives_the_same_numbers(net, path):
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(load_model(str(path))(inputs), net(inputs))


def test_its_layers_have_the_names_they_had(net, path):
    loaded = load_model(str(path))
    assert layers(loaded) == layers(net) == ["stem", "blocks.0", "blocks.1", "head"]
    assert type(loaded.get_submodule("blocks.0.1")).__name__ == "ReLU"


def test_its_layers_can_be_recorded_and_compared(net, path):
    loaded = load_model(str(path))
    inputs = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    with recording(loaded, ["blocks.0", "blocks.1.0"]) as outputs:
        loaded(inputs)
    assert outputs["blocks.1.0"].shape == (50, 6)
    comparison = netkin.compare(net, loaded, data=[inputs], measures=["cka"])
    assert all(comparison[layer, layer] == pytest.approx(1) for layer in comparison.layers_a)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet20", "vit", "char_lstm"])
def test_reference_architectures_can_be_exported_and_loaded(name, tmp_path):
    model = load_model(f"netkin:{name}")
    inputs = torch.zeros(2, 16, dtype=torch.long) if name == "char_lstm" else torch.ones(2, 3, 32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an LSTM's flat weights
        save(export(model, (inputs,), dynamic_shapes=({0: Dim("n")},)), tmp_path / "net.pt2")
    loaded = load_model(str(tmp_path / "net.pt2"))
    more = torch.cat([inputs, inputs[:1]])
    assert torch.allclose(loaded(more), model(more), atol=1e-5)
    assert layers(loaded) == layers(model)


# what is no program, or more than one


def test_a_missing_program_is_refused_with_the_nearest_name(path):
    with pytest.raises(SourceError, match=r"found no exported program '.*nets.pt2'; did you mean 'net.pt2'\?"):
        load_model(str(path.with_name("nets.pt2")))


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.7])
def test_what_is_no_archive_is_refused(path, kept):
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(
        SourceError,
        match=r"net.pt2' is damaged or no exported program.*; export the network alone",
    ):
        load_model(str(path))


def test_a_state_dict_under_that_name_is_refused(net, path):
    torch.save(net.state_dict(), path)
    with pytest.raises(SourceError, match="holds or asks for no program, and netkin runs nothing that comes in a file"):
        load_model(str(path))


def test_an_archive_of_the_older_layout_is_refused(path):
    path.unlink()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("serialized_exported_program.json", b"{}")
    with pytest.raises(SourceError, match="holds or asks for an older layout.*of torch 2.8 or newer"):
        load_model(str(path))


def test_a_program_that_torch_cannot_load_is_refused_in_one_sentence(path):
    rewritten(path, lambda program: program["schema_version"].update(major=99))
    before = logging.getLogger("torch.export").level
    with pytest.raises(
        SourceError, match=r"could not be loaded by torch \S+ \(.*\); export it again with this torch"
    ) as no:
        load_model(str(path))
    assert "\n" not in str(no.value)
    assert logging.getLogger("torch.export").level == before


# hostile programs


def test_pickled_weights_are_refused_and_nothing_in_them_runs(path, hostile):
    def change(config):
        next(iter(config["config"].values()))["use_pickle"] = True

    rewritten(path, change, "model_weights_config.json")
    with pytest.raises(SourceError, match="holds or asks for weights that are pickled, and netkin runs nothing"):
        load_model(str(path))


@pytest.mark.parametrize("kind", ["custom_obj_0", "opaque_obj_0", "../../etc/passwd"])
def test_constants_that_are_no_tensors_are_refused(path, kind):
    def change(config):
        config["config"]["c"] = {"path_name": kind, "use_pickle": False, "is_param": False, "tensor_meta": None}

    rewritten(path, change, "model_constants_config.json")
    with pytest.raises(SourceError, match="holds or asks for constants that are pickled"):
        load_model(str(path))


def test_a_tensor_without_its_numbers_is_refused(exported, path):
    with zipfile.ZipFile(io.BytesIO(exported)) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, b"" if name.endswith("weights/weight_0") else source.read(name))
    with pytest.raises(SourceError, match="holds or asks for a tensor without its numbers"):
        load_model(str(path))


def test_sample_inputs_are_never_unpickled(exported, path, hostile):
    with zipfile.ZipFile(io.BytesIO(exported)) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            content = pickle.dumps(hostile) if name.endswith("sample_inputs/model.pt") else source.read(name)
            target.writestr(name, content)
    assert load_model(str(path))(torch.ones(3, 4)).shape == (3, 3)


def test_sizes_are_not_evaluated(path, hostile):
    def change(program):
        for meta in program["graph_module"]["graph"]["tensor_values"].values():
            for size in meta["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = f"__import__('pathlib').Path({str(hostile.target)!r}).touch()"

    rewritten(path, change)
    with pytest.raises(SourceError, match="holds or asks for the size .__import__"):
        load_model(str(path))


@pytest.mark.parametrize(
    "expression",
    ["exec('1')", "Symbol('s0').args", "(lambda: 1)()", "[].append(1)", "Symbol('os.system')", "9**9**9",
     "Integer(10**9)", "Function('f')", "Symbol(*'a1')", "Lambda(s0, s0)"],
)  # fmt: skip
def test_sizes_are_arithmetic_only(expression):
    with pytest.raises(Exception, match="the size"):
        clean({"expr_str": expression})


@pytest.mark.parametrize(
    "expression",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Add(Mul(Integer(4), Symbol('s0')), Integer(-1))",
        "2*s0 + 1",
        "Pow(Symbol('s0'), Integer(2))",
        "Mul(Rational(1, 2), Pow(Symbol('s0'), Integer(-1)))",
    ],
)
def test_sizes_that_torch_writes_are_kept(expression):
    assert clean({"expr_str": expression}) == {"expr_str": expression}


@pytest.mark.parametrize(
    "target",
    ["torch.os.system", "torch.load", "torch.ops.aten.from_file.default", "torch.ops.aten.save.default",
     "builtins.exec", "_operator.methodcaller", "torch.ops.load_library", "#extension:thing",
     "torch.ops.mylib.op.default"],
)  # fmt: skip
def test_calls_of_other_things_than_operators_are_refused(path, target):
    rewritten(path, lambda program: program["graph_module"]["graph"]["nodes"][0].update(target=target))
    with pytest.raises(SourceError, match=f"holds or asks for a call of '{target}'"):
        load_model(str(path))


def test_trees_import_no_modules(path):
    tree = {
        "type": "builtins.dict",
        "context": '[{"__enum__": true, "fqn": "antigravity:x", "name": "y"}]',
        "children_spec": [],
    }

    def change(program):
        program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, tree])

    rewritten(path, change)
    with pytest.raises(SourceError, match="holds or asks for inputs or outputs of type 'builtins.dict'"):
        load_model(str(path))


def test_guards_are_dropped_and_stack_traces_too(path, hostile):
    def change(program):
        program["guards_code"] = [f"open({str(hostile.target)!r}, 'w')"]
        program["graph_module"]["graph"]["nodes"][0]["metadata"]["stack_trace"] = "\n)\nimport os\n"

    rewritten(path, change)
    assert load_model(str(path))(torch.ones(3, 4)).shape == (3, 3)


@pytest.mark.parametrize("name", ["x=1\nimport os", "f(x)", "a;b", "a b", "quote'"])
def test_names_that_could_become_source_are_refused(path, name):
    rewritten(path, lambda program: program["graph_module"]["graph"]["nodes"][0].update(name=name))
    with pytest.raises(SourceError, match="holds or asks for the name"):
        load_model(str(path))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"as_operator": "torch.os.system"}, "a function as argument"),
        ({"as_custom_obj": {"name": "a", "class_fqn": "b"}}, "an object of its own"),
        ({"as_string": "a\nb"}, "the text"),
        ({"metadata": {"nn_module_stack": 'L,a"b,torch.nn.Linear'}}, "a module of the name"),
    ],
)
def test_other_parts_of_a_program_are_refused(change, message):
    with pytest.raises(Exception, match=message):
        clean(change)


def test_compiled_code_is_refused(path):
    added(path, "data/aotinductor/model/code.so", b"\x7fELF")
    with pytest.raises(SourceError, match="holds or asks for compiled code"):
        load_model(str(path))


def test_two_entries_of_one_name_are_refused(exported, path):
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("model.json"))
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"{}")
    with pytest.raises(SourceError, match="holds or asks for two entries of one name"):
        load_model(str(path))
