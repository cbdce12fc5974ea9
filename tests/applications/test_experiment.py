"""An experiment: its options are declared once, and models that it lends come back unchanged."""

import inspect

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.experiment import DECLARED, Experiment, ExperimentOptions
from netkin.applications.stitching import fit_all
from netkin.applications.stitching.request import StitchRequest, SweepOptions
from netkin.comparing.sides import named_models
from netkin.comparing.spec import declarations
from netkin.errors import FileError, InvalidValue, UnknownName
from refusals import refused

CALLS = [
    nk.recommend, nk.stitch, nk.stitch_all, nk.stitch_many, nk.explain_stitch, nk.task2vec, nk.kernel_ridge,
    nk.layer_embeddings, nk.federate, nk.sparsity_study, nk.compress, nk.class_sensitivity, nk.share_coefficients,
]  # fmt: skip
NET, LABELLED = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), [(torch.ones(4, 2), torch.arange(4) % 2)]
ELSEWHERE = {
    "task2vec": lambda **options: nk.task2vec(NET, LABELLED, **options),
    "fisher_rao_norm": lambda **options: nk.fisher_rao_norm(NET, LABELLED, **options),
    "kernel_ridge": lambda **options: nk.kernel_ridge(NET, LABELLED, **options),
    "layer_embeddings": lambda **options: nk.layer_embeddings(NET, LABELLED, **options),
    "transfer_scores": lambda **options: nk.transfer_scores(NET, LABELLED, ["knn"], **options),
    "federate": lambda **options: nk.federate(NET, LABELLED, rounds=1, **options),
    "recommend": lambda **options: nk.recommend({"net": NET}, LABELLED, **options),
    "stitch": lambda **options: nk.stitch(NET, "1", NET, "1", LABELLED, **options),
    "fit_all": lambda **options: fit_all(NET, NET, [("1", "1")], LABELLED, **options),
    "stitch_all": lambda **options: nk.stitch_all(NET, NET, LABELLED, **options),
    "stitch_many": lambda **options: nk.stitch_many([NET, NET], LABELLED, **options),
    "explain_stitch": lambda **options: nk.explain_stitch(NET, NET, LABELLED, **options),
    "class_sensitivity": lambda **options: nk.class_sensitivity(NET, LABELLED, **options),
}
KEYWORDS = {ExperimentOptions: (Experiment, ""), SweepOptions: (StitchRequest, "test transform forward")}


@pytest.mark.parametrize("keywords", KEYWORDS)
def test_type_checkers_are_told_what_is_declared(keywords):
    declared, (kind, without) = {}, KEYWORDS[keywords]
    for name, option in declarations(kind).items():
        declared |= {} if name in without.split() else {name: option.type}
    hints = keywords.__annotations__.items()
    assert {name: getattr(hint, "__forward_arg__", hint) for name, hint in hints} == declared


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_each_option_is_shown_with_its_default_and_a_sentence(call):
    parameters = inspect.signature(call).parameters
    assert "progress" in parameters
    for name in DECLARED.keys() & parameters.keys():
        assert parameters[name].default == DECLARED[name].default
        assert f"\n    {name}: " in inspect.getdoc(call)


@pytest.mark.parametrize(("options", "argument"), [({"examples": 0}, "examples"), ({"seed": 0.5}, "seed")])
def test_what_can_not_be_is_refused_when_the_experiment_is_made(options, argument):
    with refused(InvalidValue, argument):
        Experiment(models={"a": nn.Linear(2, 2)}, **options)


@pytest.mark.parametrize("call", ELSEWHERE)
def test_a_device_that_is_not_there_is_refused(call):
    with refused(UnknownName, "device"):
        ELSEWHERE[call](device="cuda:99")


def test_lent_models_random_states_and_loaders_come_back_unchanged():
    generator, model = torch.Generator().manual_seed(3), nn.Linear(2, 2)
    data = torch.utils.data.DataLoader(torch.randn(8, 2), shuffle=True, generator=generator)
    experiment = Experiment(models={"a": model}, data=data, device="cpu")
    before = [torch.get_rng_state(), generator.get_state()]
    with experiment.lending(model):
        torch.randn(3)
        list(data)
    assert all(
        torch.equal(*states) for states in zip(before, [torch.get_rng_state(), generator.get_state()], strict=True)
    )


def test_models_are_named_by_a_mapping_or_by_their_own_names():
    model = nn.Linear(2, 2)
    assert named_models({"a": model}) == {"a": model}
    assert named_models(["netkin:digits"]) == {"netkin:digits": "netkin:digits"}


def test_a_result_that_may_not_be_written_over_is_refused_when_the_experiment_is_made(tmp_path):
    (tmp_path / "there.netkin").write_text("a result")
    with pytest.raises(FileError, match="overwrite"):
        Experiment(models={"a": nn.Linear(2, 2)}, save=tmp_path / "there.netkin")


def test_finished_parts_are_kept_beside_the_place_to_save_and_belong_to_the_models(tmp_path):
    model, computed = nn.Linear(2, 2), []
    path = tmp_path / "sum.netkin"

    def part_of(model):
        experiment = Experiment(models={"a": model}, save=path)
        with experiment.job("sum", lambda: experiment.identity) as job:
            return job.part("weights", lambda: computed.append(1) or {"sum": model.weight.sum().item()}).values

    assert part_of(model) == part_of(model)
    assert len(computed) == 1
    with torch.no_grad():
        model.weight += 1
    with pytest.raises(FileError, match="differs in weights of 'a'"):
        part_of(model)


def test_without_a_place_nothing_is_identified():
    experiment = Experiment(models={"a": nn.Linear(2, 2)})
    with experiment.job("sum", lambda: pytest.fail("the identity was read")) as job:
        assert job.part("one", lambda: {"value": 1}).values == {"value": 1}
