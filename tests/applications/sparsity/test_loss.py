"""The CKA sparsity loss: its value against the paper's listing, in training, and which layers it takes."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import netkin as nk
from netkin.errors import FileError, InvalidValue, ShapeError
from netkin.sources.architectures import seeded, thin
from quickly import slow_but
from sparsity_worlds import ALL, batches, double_sum, hooks_on, listing, outputs, staged, term_of
from transcriptions import TRANSCRIPTIONS

# --- values -----------------------------------------------------------------------------------------------------------


def test_the_term_is_the_double_sum_of_equation_11():
    model, x = staged(), batches(1)[0][0]
    expected = double_sum(outputs(model, x)).item()
    assert term_of(model, x).item() == pytest.approx(expected, rel=1e-6)
    assert term_of(model, x, beta=0.25).item() == pytest.approx(0.25 * expected, rel=1e-6)


def test_the_double_sum_holds_each_layer_with_itself_and_each_pair_twice():
    model, x = staged(), batches(1)[0][0]
    pairs = 0.0
    for stage in outputs(model, x):
        rows = [one.detach().flatten(1).double().numpy() for one in stage]
        pairs += sum(TRANSCRIPTIONS["cka"](a, b) for k, a in enumerate(rows) for b in rows[:k])
    assert term_of(model, x).item() == pytest.approx(5 + 2 * pairs, rel=1e-5)


def test_the_augmented_term_is_that_of_the_papers_listing():
    model, x = staged(), batches(1)[0][0]
    found = term_of(model, x, variant="augmented", beta=2.0)
    assert found.item() == pytest.approx(2 * listing(outputs(model, x)).item(), rel=1e-5)


@pytest.mark.parametrize("variant", ["stage", "augmented"])
def test_the_gradient_is_that_of_the_double_loop(variant):
    x, slow = batches(1)[0][0].double(), {"stage": double_sum, "augmented": listing}[variant]
    fast, by_hand = staged().double(), staged().double()
    term_of(fast, x, variant=variant).backward()
    slow(outputs(by_hand, x)).backward()
    for (name, one), other in zip(fast.named_parameters(), by_hand.parameters(), strict=True):
        if "head" in name:
            assert one.grad is None
        else:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_the_debiased_estimator_is_that_of_the_measure():
    model, x = staged(), batches(1)[0][0]
    expected = sum(
        TRANSCRIPTIONS["cka_debiased"](a, b)
        for stage in outputs(model, x)
        for a in (one.detach().flatten(1).double().numpy() for one in stage)
        for b in (one.detach().flatten(1).double().numpy() for one in stage)
    )
    assert term_of(model, x, estimator="debiased").item() == pytest.approx(expected, rel=1e-5)


def test_cca_takes_positions_as_rows():
    model, x = staged(), batches(1)[0][0]
    rows = [
        [one.detach().movedim(1, -1).flatten(0, 2).double().numpy() for one in stage] for stage in outputs(model, x)
    ]
    expected = sum(TRANSCRIPTIONS["cca_mean_squared"](a, b) for stage in rows for a in stage for b in stage)
    assert term_of(model, x, variant="cca").item() == pytest.approx(expected, rel=1e-5)


def test_cca_of_few_rows_is_one_whatever_the_layers_hold():
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(8, 16)), rng.normal(size=(8, 16))
    assert TRANSCRIPTIONS["cca_mean_squared"](X, Y) == pytest.approx(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
    with pytest.raises(ShapeError, match="CCA of 8 rows of 16 features is 1 whatever a layer does, as at layer '0'"):
        term_of(model, torch.randn(8, 4), variant="cca")


def test_cca_asks_nothing_of_a_layer_that_no_other_is_compared_with():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 20)), torch.randn(4, 2, 4, 4)
    rows = [one.detach().movedim(1, -1).flatten(0, 2).double().numpy() for one in (model[0](x), model[:2](x))]
    expected = 2 + 2 * TRANSCRIPTIONS["cca_mean_squared"](*rows)
    assert term_of(model, x, variant="cca").item() == pytest.approx(expected, rel=1e-5)


def test_cca_with_a_dead_layer_and_dead_channels_is_finite():
    model, x = staged(), batches(1)[0][0]
    with torch.no_grad():
        model.layer1[1].norm.weight[:2] = 0  # two channels of the second block
        model.layer1[2].norm.weight.zero_()  # the third block gives its bias, everywhere the same
    term = term_of(model, x, variant="cca")
    term.backward()
    first, second = ([one.detach() for one in stage] for stage in outputs(model, x))
    assert (first[1][:, :2] == first[1][:1, :2, :1, :1]).all()
    assert (first[2] == first[2][:1, :, :1, :1]).all()
    assert torch.isfinite(term)
    assert 2 <= term.item() <= 4 + len(second) ** 2
    assert all(torch.isfinite(one.grad).all() for one in model.parameters() if one.grad is not None)


@pytest.mark.parametrize("estimator", ["biased", "debiased"])
@pytest.mark.parametrize("variant", ["stage", "augmented"])
def test_a_network_that_gives_nothing_has_no_similarity_and_finite_gradients(variant, estimator):
    model, x = staged(), batches(1)[0][0]
    with torch.no_grad():
        for block in (*model.layer1, *model.layer2):
            block.norm.weight.zero_()
    term = term_of(model, x, variant=variant, estimator=estimator)
    term.backward()
    assert term.item() == 0
    assert all(not one.grad.any() for one in model.parameters() if one.grad is not None)


def test_the_first_samples_of_a_batch_count():
    model, x = staged().eval(), batches(1, size=20)[0][0]
    assert term_of(model, x, samples=6).item() == pytest.approx(double_sum(outputs(model, x[:6])).item(), rel=1e-5)


@pytest.mark.slow
def test_training_with_it_lowers_the_debiased_similarity_of_layers_on_other_images():
    train, test = batches(4, size=32), batches(1, size=64, seed=7)[0][0]
    found = {}
    for beta in (0.0, 0.5):
        model = staged()
        with nk.CKASparsityLoss(model, beta=beta, every=1, samples=32) as penalty:
            nk.train(model, train, epochs=8, lr=0.02, hooks=[penalty], progress=False)
        found[beta] = term_of(model, test, estimator="debiased").item()
    assert found[0.5] < found[0.0] - 0.3


# --- every ------------------------------------------------------------------------------------------------------------


def test_every_counts_forward_passes_with_gradients_and_does_not_rescale():
    model, x = staged().eval(), batches(1)[0][0]
    whole = term_of(model, x).item()
    with nk.CKASparsityLoss(model, beta=1.0, samples=None, every=3) as penalty:
        found = []
        for _ in range(7):
            with torch.no_grad():
                model(x)  # is not counted
            model(x)
            found.append(penalty.term().item())
    assert found == [whole, 0, 0, whole, 0, 0, whole]
    assert penalty.batches == 7


def test_under_gradient_accumulation_the_parts_of_a_batch_count():
    parts, model = batches(6), staged()
    with nk.CKASparsityLoss(model, beta=1.0, samples=4, every=4) as penalty:
        taken = []
        for x, y in parts:
            (cross_entropy(model(x), y) / 3 + penalty.term() / 3).backward()
            taken.append(penalty.value)
            penalty.value = None
    assert [value is not None for value in taken] == [True, False, False, False, True, False]


def test_a_loop_adds_two_lines_and_gets_the_gradients_of_both():
    (x, y), model, alone, other = batches(1)[0], staged(), staged(), staged()
    penalty = nk.CKASparsityLoss(model, beta=0.1)
    (cross_entropy(model(x), y) + penalty.term()).backward()
    penalty.close()
    cross_entropy(alone(x), y).backward()
    (0.1 * double_sum(outputs(other, x))).backward()
    for one, first, second in zip(model.parameters(), alone.parameters(), other.parameters(), strict=True):
        expected = first.grad if second.grad is None else first.grad + second.grad
        torch.testing.assert_close(one.grad, expected, rtol=1e-4, atol=1e-6)


# --- nk.train ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", slow_but([3, 4, 5], 4))
def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(tmp_path, stop):
    data, options = batches(4, size=16), {"epochs": 3, "lr": 0.05, "seed": 3, "progress": False}

    ends_at = [stop]

    def end(model, step):
        if [step] == ends_at:
            raise KeyboardInterrupt

    end.settings = "whenever it ends the training, it is the same hook"

    def trained(file):
        model = staged()
        with nk.CKASparsityLoss(model, beta=0.5, every=3, samples=8) as penalty:
            nk.train(model, data, hooks=[penalty, end], save=file, every=1, **options)
        return model, penalty

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "half.netkin")
    ends_at.clear()
    resumed, penalty = trained(tmp_path / "half.netkin")
    whole, _ = trained(tmp_path / "whole.netkin")
    assert penalty.batches == 12
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_beta_of_zero_trains_as_no_loss_does():
    plain, zero = staged(), staged()
    nk.train(plain, batches(4), epochs=2, progress=False)
    with nk.CKASparsityLoss(zero, beta=0.0, every=1) as penalty:
        nk.train(zero, batches(4), epochs=2, hooks=[penalty], progress=False)
        assert penalty.value > 5
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), zero.parameters(), strict=True))


def test_a_training_saved_with_another_beta_is_not_continued(tmp_path):
    for beta in (0.1, 0.2):
        model = staged()
        with nk.CKASparsityLoss(model, beta=beta) as penalty:
            options = {"epochs": 1, "hooks": [penalty], "save": tmp_path / "run.netkin", "progress": False}
            if beta == 0.1:
                nk.train(model, batches(2), **options)
            else:
                with pytest.raises(FileError, match="differs in hooks"):
                    nk.train(model, batches(2), **options)


def test_the_training_of_another_model_is_refused():
    with nk.CKASparsityLoss(staged(), beta=0.1) as penalty, pytest.raises(InvalidValue, match="watches another model"):
        nk.train(staged(), batches(2), epochs=1, hooks=[penalty], progress=False)


# --- which layers -----------------------------------------------------------------------------------------------------


def test_stages_are_the_containers_of_blocks():
    assert nk.CKASparsityLoss(staged(), beta=1.0).stages == [
        ["layer1.0", "layer1.1", "layer1.2"], ["layer2.0", "layer2.1"],
    ]  # fmt: skip
    resnet = nk.CKASparsityLoss(seeded(lambda: thin(20), 0), beta=1.0)
    assert [len(stage) for stage in resnet.stages] == [3, 3, 3]
    vit = nk.CKASparsityLoss(nk.load_model("netkin:vit"), beta=1.0)
    assert len(vit.stages) == 1
    assert vit.stages[0][0] == "blocks.0"


def test_layers_of_a_flat_network_are_grouped_by_the_shape_they_give():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    )
    x, seen = torch.randn(10, 4), []
    y = x
    for layer in copy.deepcopy(model):
        y = layer(y.clone())
        seen.append(y.detach().clone())
    assert term_of(model, x).item() == pytest.approx(double_sum([seen[:4]]).item(), rel=1e-5)


def test_a_flat_network_inside_a_module_with_its_loss_function_is_one_stage():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.criterion = nk.load_model("netkin:digits"), nn.CrossEntropyLoss()

        def forward(self, x):
            return self.net(x)

    model, x = Wrapper(), torch.randn(9, 1, 8, 8)
    (stage,) = nk.CKASparsityLoss(model, beta=1.0).stages
    assert stage == [f"net.{name}" for name in nk.layers(model.net)]
    assert term_of(model, x).item() == pytest.approx(term_of(model.net, x).item(), rel=1e-6)


def test_stages_are_named_by_container_list_or_glob():
    model, x = staged(), batches(1)[0][0]
    first, second = outputs(model, x)
    assert term_of(model, x, stages=["layer2"]).item() == pytest.approx(double_sum([second]).item(), rel=1e-5)
    assert term_of(model, x, stages="layer2").item() == pytest.approx(double_sum([second]).item(), rel=1e-5)
    by_name = [["layer1.0", "layer1.2"], "layer2"]
    expected = double_sum([[first[0], first[2]], second]).item()
    assert term_of(model, x, stages=by_name).item() == pytest.approx(expected, rel=1e-5)
    assert nk.CKASparsityLoss(model, "layer1.*.conv", beta=1.0).stages == [[f"layer1.{k}.conv" for k in range(3)]]
    everything = term_of(model, x, stages=["layer1", "layer2"], variant="augmented").item()
    assert everything == pytest.approx(listing([first, second]).item(), rel=1e-5)


def test_a_layer_that_runs_twice_counts_with_each_of_its_outputs():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(9, 4)
    one = model.a(x)
    two = model.a(torch.tanh(one))
    expected = double_sum([[one, two, model.b(torch.tanh(two))]]).item()
    assert term_of(model, x, stages=[["a", "b"]]).item() == pytest.approx(expected, rel=1e-5)


# --- a polite guest ---------------------------------------------------------------------------------------------------


def test_no_hooks_are_left_after_it_is_closed_or_a_crash():
    model = staged()
    penalty = nk.CKASparsityLoss(model, beta=1.0)
    assert len(hooks_on(model)) == 6
    penalty.close()
    assert hooks_on(model) == []
    with pytest.raises(RuntimeError, match="boom"), nk.CKASparsityLoss(model, beta=1.0):
        raise RuntimeError("boom")
    assert hooks_on(model) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_tells_the_loss_nothing(copied):
    model, x = staged().eval(), batches(1)[0][0]
    with nk.CKASparsityLoss(model, beta=1.0, **ALL) as penalty:
        model(x)
        other = copied(model)  # with a term that waits
        expected = penalty.term().item()
        model(x)
        other(torch.randn_like(x))
        assert penalty.term().item() == expected
        assert penalty.batches == 2


def test_it_sees_what_a_layer_gave_before_the_next_one_changes_it_in_place():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True))
    x = torch.randn(8, 4)
    first = model[0](x)
    second = model[2](torch.relu(first))
    expected = double_sum([[first, second]]).item()
    assert term_of(model, x, stages=[["0", "2"]]).item() == pytest.approx(expected, rel=1e-5)


def test_numbers_of_numpy_are_numbers():
    with nk.CKASparsityLoss(staged(), beta=np.float32(0.5), samples=np.int64(8), every=np.int64(2)) as penalty:
        penalty.model(batches(1)[0][0])
        assert penalty.term() > 0


def test_a_seen_layer_may_be_frozen_while_others_learn():
    model, x = staged(), batches(1)[0][0]
    for weight in (*model.stem.parameters(), *model.layer1[0].parameters()):
        weight.requires_grad_(False)
    term_of(model, x).backward()
    assert model.layer1[1].conv.weight.grad.abs().sum() > 0
    assert model.layer1[0].conv.weight.grad is None
