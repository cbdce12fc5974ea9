import inspect
import sys
import warnings

import pytest
import torch

import netkin as nk
from netkin.errors import SourceError, UnknownName
from netkin.sources.names import call_named, find_function, unique_names
from refusals import refused


def test_a_function_of_the_current_directory_is_found_and_called(workshop):
    workshop.write("nk_local", "def make():\n    return 42\n")
    assert call_named(find_function("nk_local:make"), "nk_local:make") == 42


def test_a_function_may_import_from_the_current_directory_while_it_runs(workshop):
    workshop.write("nk_helper", "value = 7\n")
    workshop.write("nk_late", "def make():\n    from nk_helper import value\n    return value\n")
    assert call_named(find_function("nk_late:make"), "nk_late:make") == 7


def test_the_import_path_is_as_before_afterwards(workshop):
    workshop.write("nk_path", "def make():\n    raise ValueError\n")
    before = list(sys.path)
    with pytest.raises(SourceError):
        call_named(find_function("nk_path:make"), "nk_path:make")
    assert sys.path == before


def test_a_module_that_is_not_there_is_refused_with_advice(workshop):
    with pytest.raises(
        SourceError, match="found no module 'nk_absent.deep' for 'nk_absent.deep:make'; run netkin in the"
    ):
        find_function("nk_absent.deep:make")


def test_a_mistyped_name_of_ours_is_recognised(workshop):
    with pytest.raises(SourceError, match=r"found no module 'cifar' for 'cifar:data'; did you mean 'cifar10'\?"):
        find_function("cifar:data", known=["digits", "cifar10"])


def test_what_can_be_no_module_is_refused_the_same_way(workshop):
    with pytest.raises(SourceError, match="found no module 'C' for"):
        find_function("C:/models/net.pt")
    with pytest.raises(SourceError, match="found no module '../net' for"):
        find_function("../net:make")


def test_a_missing_function_is_refused_with_the_nearest_name(workshop):
    workshop.write("nk_names", "def make_net():\n    return 1\n")
    with pytest.raises(SourceError, match=r"module 'nk_names' has no function 'make_nett'; did you mean 'make_net'\?"):
        find_function("nk_names:make_nett")
    with pytest.raises(SourceError, match=r"module 'nk_names' has no function 'zzz'\.$"):
        find_function("nk_names:zzz")


def test_an_error_while_importing_is_told_in_one_line(workshop):
    workshop.write("nk_broken", "raise RuntimeError('no licence\\nsecond line')\n")
    with pytest.raises(
        SourceError, match=r"'nk_broken' of 'nk_broken:f' could not be imported: RuntimeError: no licence\.$"
    ):
        find_function("nk_broken:f")


def test_a_module_that_lacks_another_module_is_not_called_absent_itself(workshop):
    workshop.write("nk_needy", "import nk_not_installed\n")
    with pytest.raises(
        SourceError, match="could not be imported: ModuleNotFoundError: No module named 'nk_not_installed'"
    ):
        find_function("nk_needy:f")


def test_an_error_inside_the_function_is_told_in_one_line(workshop):
    workshop.write("nk_raises", "def make(size):\n    return size\ndef leave():\n    raise SystemExit\n")
    with pytest.raises(SourceError, match="'nk_raises:make' was called without arguments and raised TypeError: make"):
        call_named(find_function("nk_raises:make"), "nk_raises:make")
    with pytest.raises(SourceError, match=r"raised SystemExit\.$"):
        call_named(find_function("nk_raises:leave"), "nk_raises:leave")


MODEL, DATA = "netkin:digits", "digits:test"
TAKERS = {
    "compare": lambda model, data: nk.compare(model, data=data, layers="fc")["fc", "fc"],
    "collect": lambda model, data: nk.collect(model, data=data, layers="fc").examples,
    "explain": lambda model, data: str(nk.explain(model, data=data, layers="fc", names=("a", "a"))),
    "subject": lambda model, data: nk.compare(nk.ModelInput(model, data=data), layers="fc")["fc", "fc"],
    "layers": lambda model, data: nk.layers(model),
    "activations": lambda model, data: nk.activations(model, "fc", data, examples=9)["fc"].tolist(),
    "gradients": lambda model, data: nk.gradients(model, "fc", data, examples=9)["fc"].tolist(),
    "decompose": lambda model, data: nk.decompose(model, atoms=2).model.conv1.weight.tolist(),
    "class_sensitivity": lambda model, data: nk.class_sensitivity(model, data, layers="relu4").to_numpy().tolist(),
    "compress": lambda model, data: str(nk.compress(model, "fc", data=data, k=2, against=model, name="a").compression),
    "stitch": lambda model, data: nk.stitch(model, "relu2", model, "relu2", data, test=data).relative_accuracy,
    "task2vec": lambda model, data: nk.task2vec(model, data, examples=20).values.tolist(),
    "sparsity_study": lambda model, data: str(nk.sparsity_study({"a": model}, data, examples=20)),
}  # fmt: skip


@pytest.mark.parametrize("taker", TAKERS)
def test_models_and_data_are_taken_by_their_names(taker):
    take = TAKERS[taker]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights that are random, and few examples
        named, loaded = take(MODEL, DATA), take(nk.load_model(MODEL), nk.load_data(DATA))
    assert named == loaded


def test_texts_become_the_names_of_the_models_and_the_data():
    found = nk.compare(MODEL, MODEL, "my probe=digits:test", layers="fc")
    assert (found.a, found.b, found.data) == ("netkin:digits (1)", "netkin:digits (2)", "my probe")
    assert nk.compare(nk.load_model(MODEL), MODEL, DATA, layers="fc").b == MODEL
    assert nk.compare(MODEL, MODEL, DATA, layers="fc", names=("x", "y")).a == "x"
    assert nk.class_sensitivity(MODEL, DATA, layers="fc").a == MODEL
    assert list(nk.compare_many([MODEL, MODEL], DATA, layers="fc")) == [("netkin:digits (1)", "netkin:digits (2)")]


def test_tasks_are_pairs_of_names(tmp_path):
    tasks = nk.compare_tasks({"a": (MODEL, DATA), "b": (MODEL, "digits:train")}, layers="fc", seeds=1, examples=60)
    assert list(tasks) == [("a", "a"), ("a", "b"), ("b", "b")]


def test_the_data_set_of_a_loader_may_have_a_name():
    images = nk.load_data(DATA).images[:20]
    dataset = torch.utils.data.TensorDataset(images)
    assert nk.compare(MODEL, data=torch.utils.data.DataLoader(dataset, 10), layers="fc").data == "TensorDataset"
    dataset.name = "twenty digits"
    assert nk.compare(MODEL, data=torch.utils.data.DataLoader(dataset, 10), layers="fc").data == "twenty digits"


def test_a_call_with_wrong_arguments_fails_as_without_names():
    with pytest.raises(TypeError, match=r"compare\(\) got an unexpected keyword argument 'dat'"):
        nk.compare(MODEL, dat=DATA)
    with refused(UnknownName, ""):
        nk.compare("netkin:digit", data=DATA)
    assert list(inspect.signature(nk.compare).parameters)[:3] == ["a", "b", "data"]


def test_data_to_train_on_may_be_named():
    models = [nk.load_model(MODEL) for _ in range(2)]
    whole = tuple(map(torch.cat, zip(*nk.load_data("digits:test", batch_size=100), strict=True)))
    for model, data in zip(models, ("digits:test", whole), strict=True):
        nk.train(model, data, epochs=1, batch=180, test=data)
    assert all(torch.equal(a, b) for a, b in zip(*(one.state_dict().values() for one in models), strict=True))


def test_methods_and_files_take_models_and_data_by_name(tmp_path):
    model = nk.load_model(MODEL)
    recorders = [nk.DynamicsRecorder(model, one, layers="fc", examples=20) for one in (DATA, nk.load_data(DATA))]
    assert len({recorder.memory_per_probe for recorder in recorders}) == 1
    stitch = nk.stitch(MODEL, "relu4", MODEL, "relu4", DATA)
    stitch.save(tmp_path / "stitch.netkin")
    again = nk.load(tmp_path / "stitch.netkin", MODEL, nk.load_model(MODEL, seed=1))
    assert again.evaluate(DATA) == stitch.evaluate(nk.load_data(DATA))
    assert nk.explain_stitch(MODEL, MODEL, DATA, pairs=[("fc", "fc")]).joined == 1
    series = nk.dynamics({1: MODEL, 2: MODEL}, DATA, "cka", layers="fc", examples=40)
    assert 0 < series.own()[0, 0] < series.own()[1, 0] == pytest.approx(1)  # other random weights


def test_numbered_names_never_collide():
    for texts in (["a", "a", "a (1)"], ["a", "a (2)", "a"], ["a (1)", "a (1)", "a (1) (1)", "a", "a"], ["a"] * 4):
        found = unique_names(texts)
        assert len(set(found)) == len(texts)
        assert all(name == text for name, text in zip(found, texts, strict=True) if texts.count(text) == 1)
