import copy

import pytest
import torch
from torch import nn

import netkin
from netkin.errors import SourceError, UnknownName
from netkin.sources import load_model
from netkin.sources.weights import remark_on
from table_worlds import sentences

NET = "from torch import nn\ndef make():\n    return nn.Linear(3, 2)\n"


def test_a_reference_architecture_is_built_ready_to_be_asked():
    model = load_model("netkin:tiny10")
    assert not model.training
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_fresh_weights_are_the_same_each_time_and_leave_random_numbers_alone():
    before = torch.random.get_rng_state()
    first, second = load_model("netkin:digits"), load_model("netkin:digits")
    assert torch.equal(first.conv1.weight, second.conv1.weight)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_function_builds_a_model_the_same_each_time(workshop):
    workshop.write("nk_bare", NET)
    first, second = load_model("nk_bare:make"), load_model("nk_bare:make")
    assert isinstance(first, nn.Linear)
    assert torch.equal(first.weight, second.weight)


def test_a_lazy_model_takes_the_shapes_of_its_weights(workshop):
    workshop.write("nk_lazy", "from torch import nn\ndef make():\n    return nn.LazyLinear(2)\n")
    wanted = nn.Linear(3, 2)
    torch.save(wanted.state_dict(), "linear.pt")
    assert torch.equal(load_model("nk_lazy:make@linear.pt").weight, wanted.weight)
    assert remark_on(load_model("nk_lazy:make")) == ""  # which draws its weights later


EXPORTED = """
import torch
def make():
    rows = {0: torch.export.Dim("rows")}
    return torch.export.export(torch.nn.Linear(3, 2), (torch.ones(4, 3),), dynamic_shapes=(rows,)).module()
"""


def test_a_function_may_return_the_module_of_an_exported_program(workshop):
    workshop.write("nk_exported", EXPORTED)
    model = load_model("nk_exported:make")
    assert isinstance(model, torch.fx.GraphModule)
    assert netkin.compare(model, model, data=torch.eye(3), layers=[""])["", ""] == pytest.approx(1)
    torch.save(model.state_dict(), "linear.pt")
    assert torch.equal(load_model("nk_exported:make@linear.pt").weight, model.weight)


def test_a_function_and_weights_go_together(workshop):
    workshop.write("nk_weighted", NET)
    torch.save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, "ones.pt")
    assert load_model("nk_weighted:make@ones.pt").weight.sum() == 6


def test_the_path_of_the_weights_may_hold_an_at_sign(tmp_path):
    folder = tmp_path / "me@home"
    folder.mkdir()
    weights = {name: tensor + 1 for name, tensor in load_model("netkin:digits").state_dict().items()}
    torch.save(weights, folder / "net@1.pt")
    loaded = load_model(f"netkin:digits@{folder / 'net@1.pt'}").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_an_unknown_architecture_is_refused():
    with pytest.raises(UnknownName, match="did you mean 'digits'"):
        load_model("netkin:digit")


def test_a_mistyped_netkin_is_recognised(workshop):
    with pytest.raises(SourceError, match=r"found no module 'netkn' for 'netkn:tiny10'; did you mean 'netkin'\?"):
        load_model("netkn:tiny10")


def test_a_name_without_a_builder_is_refused_with_the_grammar():
    with pytest.raises(SourceError, match=r"'tiny10' is no model; did you mean 'netkin:tiny10'\? A model is BUILD"):
        load_model("tiny10")
    with pytest.raises(
        SourceError, match=r"'mynet' is no model\. A model is BUILDER\[@WEIGHTS\].* or the path of a `.pt2`"
    ):
        load_model("mynet")


def test_weights_alone_are_refused_with_what_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({}, "net.pt")
    with pytest.raises(SourceError, match="weights alone do not say what network .*'netkin:tiny10@net.pt'"):
        load_model("net.pt")
    (tmp_path / "mynets.py").touch()
    with pytest.raises(SourceError, match="'mynets.py' is a file of code; name the function .*: mynets:NAME"):
        load_model("mynets.py")


def test_an_at_sign_without_weights_is_refused():
    with pytest.raises(
        SourceError, match="'netkin:digits@' names no weights after the '@'; write 'netkin:digits@FILE'"
    ):
        load_model("netkin:digits@")


def test_a_function_that_returns_no_model_is_refused(workshop):
    workshop.write("nk_no_net", "def make():\n    return [1]\n")
    with pytest.raises(SourceError, match="'nk_no_net:make' must return a torch.nn.Module; .* of type list"):
        load_model("nk_no_net:make")


def test_a_folder_is_refused_with_what_to_write(tmp_path):
    with pytest.raises(SourceError, match="is a folder; for a Hugging Face model write 'hf:"):
        load_model(str(tmp_path))


def test_weights_that_are_random_are_told_until_others_come():
    model = load_model("netkin:digits", seed=3)
    assert remark_on(model) == "'netkin:digits' was given no weights, so they are random, drawn from seed 3."
    model.load_state_dict(load_model("netkin:digits").state_dict())
    assert remark_on(model) == ""


def test_seeds_tell_random_models_apart_and_are_repeated():
    first, second, again = (load_model("netkin:digits", seed=seed).fc.weight for seed in (0, 1, 1))
    assert not torch.equal(first, second)
    assert torch.equal(second, again)


def test_weights_from_a_file_are_not_called_random(tmp_path):
    torch.save(load_model("netkin:digits").state_dict(), tmp_path / "net.pt")
    assert remark_on(load_model(f"netkin:digits@{tmp_path / 'net.pt'}")) == ""


def test_comparisons_say_that_weights_are_random(workshop):
    workshop.write(
        "nk_bare", "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())\n"
    )
    first, second = load_model("nk_bare:net"), load_model("nk_bare:net", seed=1)
    inputs = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    comparison = netkin.compare(first, second, data=[inputs])
    words = (
        "'nk_bare:net' was given no weights, so they are random, drawn from seed {}, unless its function reads some."
    )
    assert [words.format(seed) in sentences(comparison) for seed in (0, 1)] == [True, True]
    assert comparison.provenance["random weights b"] == words.format(1)
    assert comparison["0", "0"] < 0.999
    read = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    many = netkin.compare_many({"first": first, "read": read, "other": copy.deepcopy(read)}, [inputs])
    assert words.format(0) in sentences(many["first", "read"])
    assert not any("random" in warning for warning in sentences(many["read", "other"]))  # neither of these two is


def test_a_function_that_sets_its_own_seed_is_said_to(workshop):
    body = "    torch.manual_seed(7)\n    return torch.nn.Linear(4, 3)\n"
    workshop.write("nk_fixed", f"import torch\ndef net():\n{body}")
    first, second = (load_model("nk_fixed:net", seed=seed) for seed in (0, 1))
    assert torch.equal(first.weight, second.weight)
    assert remark_on(first) == remark_on(second)
    assert "random, drawn from seed 7, unless its function reads some." in remark_on(second)


def test_a_function_that_draws_nothing_is_not_called_random(workshop):
    imported = "from netkin.training import untrained_digits_net"
    workshop.write("nk_self_seeded", f"{imported}\ndef net():\n    return untrained_digits_net(1)\n")
    assert remark_on(load_model("nk_self_seeded:net")) == ""
