"""What the CKA sparsity loss refuses: settings, layers, batches and states that don't fit."""

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import ForwardError, InvalidValue, ShapeError, UnknownName
from refusals import refusals, refused
from sparsity_worlds import batches, hooks_on, staged, term_of


@pytest.mark.parametrize(
    "options, argument",
    [
        ({"beta": -1e-3}, "beta"),
        ({"beta": float("nan")}, "beta"),
        ({"samples": 1}, "samples"),
        ({"samples": 3, "estimator": "debiased"}, "samples"),
        ({"every": 0}, "every"),
        ({"variant": "cca", "estimator": "debiased"}, "estimator"),
        ({"stages": [["layer1.0"]]}, "stages"),
        ({"stages": ["stem"]}, "stages"),
        ({"stages": []}, "stages"),
    ],
)
def test_bad_settings_are_told_in_a_sentence(options, argument):
    model = staged()
    with refused(InvalidValue, argument):
        nk.CKASparsityLoss(model, **{"beta": 1.0, **options})
    assert hooks_on(model) == []


def test_unknown_names_are_told():
    refusals(
        (lambda: nk.CKASparsityLoss(staged(), beta=1.0, variant="stages"), UnknownName, "variant"),
        (lambda: nk.CKASparsityLoss(staged(), beta=1.0, estimator="unbiased"), UnknownName, "estimator"),
        (lambda: nk.CKASparsityLoss(staged(), ["layer9"], beta=1.0), UnknownName, "layers"),
    )


def test_a_model_without_two_layers_is_refused():
    with refused(InvalidValue, "stages"):
        nk.CKASparsityLoss(nn.Linear(3, 3), beta=1.0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))
    with refused(ShapeError, "stages"):
        term_of(model, torch.randn(4, 3))
    assert term_of(model, torch.randn(4, 3), variant="augmented").item() > 0


def test_a_stage_that_was_named_must_have_one_shape():
    with pytest.raises(ShapeError, match=r"one shape; got \(4, 6, 6\) and \(6, 3, 3\).*variant='augmented'"):
        term_of(staged(), batches(1)[0][0], stages=[["layer1.0", "layer2.0"]])


def test_a_batch_smaller_than_samples_is_refused_though_it_is_not_one_that_counts():
    model = staged()
    with nk.CKASparsityLoss(model, beta=1.0, samples=8, every=5) as penalty:
        model(batches(1, size=8)[0][0])
        penalty.term()
        with pytest.raises(ShapeError, match="a batch of 7 examples is smaller than samples=8 at layer 'layer1.0'"):
            model(batches(1, size=7)[0][0])


@pytest.mark.parametrize("estimator, count, least", [("biased", 1, 2), ("debiased", 3, 4)])
def test_too_few_examples_are_refused(estimator, count, least):
    with pytest.raises(ShapeError, match=f"the {estimator} CKA needs batches of at least {least} examples; .*{count}"):
        term_of(staged().eval(), batches(1, size=count)[0][0], estimator=estimator)


def test_layers_that_do_not_run_are_named():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x))

    with pytest.raises(ForwardError, match=r"layer 'blocks.2' did not run in this forward pass \(2 of 4 layers"):
        term_of(Skips(), torch.randn(5, 3))


def test_a_term_needs_a_forward_pass_with_gradients():
    model, x = staged(), batches(1)[0][0]
    with nk.CKASparsityLoss(model, beta=1.0) as penalty:
        for _ in range(2):
            with pytest.raises(InvalidValue, match="needs a forward pass of the model with gradients first"):
                penalty.term()
            with torch.no_grad():
                model(x)
        model(x)
        penalty.term()
        with pytest.raises(InvalidValue, match="one for each term"):
            penalty.term()
    with pytest.raises(InvalidValue, match="the loss is closed"):
        penalty.term()


def test_layers_without_gradients_are_refused():
    model = staged()
    for weight in model.parameters():
        weight.requires_grad_(False)
    with pytest.raises(ForwardError, match="none of the layers has gradients.*use_reentrant=False"):
        term_of(model, batches(1)[0][0])


def test_outputs_without_a_row_for_each_example_are_refused():
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x).reshape(-1, 2, 4).mean(1))

    with pytest.raises(ShapeError, match="layers gave outputs of 4 to 8 examples.*one row an example"):
        term_of(Windows(), torch.randn(8, 4), stages=[["a", "b"]])


def test_replicas_of_data_parallel_are_refused():
    model = staged()
    with nk.CKASparsityLoss(model, beta=1.0):
        model._is_replica = True  # as its copies have
        with pytest.raises(ForwardError, match="`DataParallel` runs copies of the model.*`DistributedDataParallel`"):
            model(batches(1)[0][0])


def test_a_state_that_is_none_is_refused():
    with nk.CKASparsityLoss(staged(), beta=1.0) as penalty:
        for state in ({}, {"batches": -1}, {"batches": "3"}):
            with pytest.raises(InvalidValue, match="the state of a CKA sparsity loss is a number of `batches`; got"):
                penalty.load_state_dict(state)
