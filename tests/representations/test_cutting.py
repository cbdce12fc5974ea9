"""Running a model in parts, and putting something else in a layer's place."""

import pytest
import torch
from torch import nn

from netkin.errors import ForwardError, UnknownName
from netkin.representations.cutting import replacing, run_from, run_until
from netkin.representations.hooks import recording, watching
from netkin.representations.inputs import call
from refusals import refused


@pytest.fixture
def nested():
    """Chains within a chain, with an in-place ReLU right after each layer."""
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True)),
        nn.Linear(6, 2),
    )


def forbidden(module, inputs):
    raise AssertionError("this part must not run")


def test_the_rest_of_the_model_does_not_run(residual, images, no_hooks):
    residual.eval()
    handle = residual.layer2.register_forward_pre_hook(forbidden)
    output = run_until(residual, "layer1.0", images)
    handle.remove()
    with recording(residual, "layer1.0") as outputs:
        residual(images)
    assert torch.equal(output, outputs["layer1.0"])
    assert no_hooks(residual)


def test_a_model_that_catches_exceptions_is_stopped_too():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, batch):
            try:
                return self.inner(batch)
            except Exception:
                return batch

    model = Careful()
    assert torch.equal(run_until(model, "inner", torch.ones(1, 2)), model.inner(torch.ones(1, 2)))


@pytest.mark.parametrize("layer", ["0", "1.0", "1.1", "1.2", "1", "2", ""])
def test_head_and_tail_together_are_the_model(nested, layer):
    batch = torch.randn(3, 4)
    assert torch.equal(run_from(nested, layer, run_until(nested, layer, batch), batch), nested(batch))


@pytest.mark.parametrize(
    "layer", ["conv1", "bn1", "layer1.0.conv1", "layer1.0.relu", "layer1.0.relu#2", "layer2", "fc"]
)
def test_head_and_tail_together_are_any_model(residual, images, layer):
    residual.eval()
    output = run_until(residual, layer, images)
    kept = output.clone()
    assert torch.equal(run_from(residual, layer, output, images), residual(images))
    assert torch.equal(output, kept)


def test_in_a_chain_what_comes_before_is_not_computed(nested):
    output = torch.randn(3, 6)
    nested[0].register_forward_pre_hook(forbidden)
    expected = nested[2](nested[1][2](nested[1][1](output.clone().relu())))
    assert torch.equal(run_from(nested, "1.0", output.relu(), None), expected)


def test_a_hooked_or_shared_chain_runs_whole():
    relu = nn.ReLU()
    shared = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)
    batch = torch.randn(3, 4)
    assert torch.equal(run_from(shared, "1#2", torch.ones(3, 4), batch), torch.ones(3, 4))
    expected = relu(shared[2](torch.ones(3, 4)))
    assert torch.equal(run_from(shared, "1", torch.ones(3, 4), batch), expected)
    shared.register_forward_hook(lambda module, inputs, output: output + 1)
    assert torch.equal(run_from(shared, "2", torch.ones(3, 4), batch), torch.full((3, 4), 2.0))


def test_the_output_given_is_not_changed_by_in_place_steps(nested, residual, images):
    output = torch.full((3, 6), -1.0, requires_grad=True)
    run_from(nested, "0", output, torch.ones(3, 4)).sum().backward()
    assert output.grad is not None
    assert output.max() == -1
    maps = torch.full((10, 4, 6, 6), -1.0)
    run_from(residual, "bn1", maps, images)
    assert maps.max() == -1


def test_a_forward_function_is_used(nested):
    batch = (torch.randn(3, 4), torch.zeros(3))
    output = run_until(nested, "0", batch, forward=lambda model, batch: model(batch[0] * 2))
    assert torch.equal(output, nested[0](batch[0] * 2))
    twice = run_from(nested, "0", output, batch, forward=lambda model, batch: model(batch[0]) * 2)
    assert torch.equal(twice, run_from(nested, "0", output, batch) * 2)


def test_a_replaced_layer_gives_what_the_function_makes_of_its_output(residual, images, no_hooks):
    residual.eval()
    with replacing(residual, "layer2.1", lambda output: output * 0):
        assert torch.equal(residual(images), residual.fc.bias.expand(10, 5))
    assert not torch.equal(residual(images), residual.fc.bias.expand(10, 5))
    assert no_hooks(residual)


def test_of_a_tuple_only_the_first_tensor_is_replaced(language):
    ids = torch.ones(2, 4, dtype=torch.long)
    with replacing(language, "encoder.layer.2", lambda states: states * 0 + 1):
        output = language(ids)
    assert torch.equal(output["last_hidden_state"], torch.ones(2, 4, 6))
    assert run_until(language, "encoder.layer.2", ids)[1] is None
    given = run_from(language, "encoder.layer.2", torch.ones(2, 4, 6), ids)
    assert torch.equal(given["last_hidden_state"], torch.ones(2, 4, 6))


def test_a_mapping_keeps_its_other_parts(language):
    ids = torch.ones(2, 4, dtype=torch.long)
    pooled = language(ids)["pooled"]
    with replacing(language, "", lambda states: states * 0):
        output = language(ids)
    assert type(output).__name__ == "ModelOutput"
    assert output["last_hidden_state"].abs().max() == 0
    assert torch.equal(output["pooled"], pooled)


def test_what_the_function_keeps_is_not_changed_by_in_place_steps(nested):
    fixed = torch.full((3, 6), -1.0)
    with replacing(nested, "0", lambda output: fixed):
        nested(torch.ones(3, 4))
    assert fixed.max() == -1


def test_every_call_or_one_call_is_replaced(residual, images):
    seen = []
    with replacing(residual, "layer1.0.relu", lambda output: seen.append("every") or output):
        residual(images)
    with replacing(residual, "layer1.0.relu#2", lambda output: seen.append("second") or output):
        residual(images)
        residual(images)
    assert seen == ["every", "every", "second", "second"]


def test_mode_and_gradients_are_the_callers(residual, images):
    residual.train()
    before = residual.bn1.running_mean.clone()
    output = run_until(residual, "bn1", images)
    assert output.requires_grad
    assert residual.bn1.training
    assert not torch.equal(residual.bn1.running_mean, before)
    output.sum().backward()
    assert residual.conv1.weight.grad is not None


@pytest.mark.slow
def test_compiled_models_are_cut_too(residual, images):
    residual.eval()
    compiled = torch.compile(residual, backend="eager")
    with torch.no_grad():
        plain = residual(images)
        compiled(images)
        output = run_until(compiled, "layer1.0", images)
        assert torch.equal(run_from(compiled, "layer1.0", output, images), plain)
        with replacing(compiled, "layer1.0", lambda maps: maps * 0):
            assert not torch.equal(compiled(images), plain)


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_no_hooks_stay_after_a_crash(residual, images, no_hooks, fault):
    def crash(*_):
        raise fault

    with pytest.raises(fault):
        run_until(residual, "fc", images, forward=crash)
    with pytest.raises(fault):
        run_from(residual, "fc", torch.ones(10, 5), images, forward=crash)
    with pytest.raises(fault), replacing(residual, "fc", crash):
        residual(images)
    assert no_hooks(residual)


def test_a_layer_that_does_not_run_is_refused(residual, images):
    refusal = "layer 'fc' did not run in the forward of this batch"
    with pytest.raises(ForwardError, match=refusal):
        run_until(residual, "fc", images, forward=lambda model, batch: None)
    with pytest.raises(ForwardError, match=refusal):
        run_from(residual, "fc", torch.ones(1), images, forward=lambda model, batch: None)


def test_a_name_that_is_not_one_layer_is_refused(residual, images):
    with refused(UnknownName, "layers"):
        run_until(residual, "fcc", images)
    with pytest.raises(UnknownName, match=r"'layer\?.0' matches 2 layers, and one is needed; choose 'layer1.0'"):
        run_from(residual, "layer?.0", None, images)
    with pytest.raises(UnknownName, match="no layer named 'fcc'"), replacing(residual, "fcc", torch.relu):
        pass


def test_a_run_that_is_cut_off_is_a_whole_forward_for_others_who_watch():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with recording(model, ["0"]) as outputs:
        for _ in range(2):
            run_until(model, "1", torch.ones(3, 4))
            assert list(outputs) == ["0"]
        model(torch.ones(3, 4))
        assert list(outputs) == ["0"]


def test_a_forward_that_was_stopped_counts_for_none_that_follows():
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []

    def react(name, output):
        seen.append(name)
        if len(seen) == 1:
            raise KeyboardInterrupt  # no `Exception`, of which torch would tell the hooks

    with watching(model, ["0"], react):
        with pytest.raises(KeyboardInterrupt):
            call(model, torch.ones(1, 2))
        call(model, torch.ones(1, 2))
    assert seen == ["0", "0"]
