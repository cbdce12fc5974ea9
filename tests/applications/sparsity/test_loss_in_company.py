"""The CKA sparsity loss with autocast, gradient checkpointing, `torch.compile` and several processes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import netkin as nk
from netkin.errors import ForwardError
from processes import run_ranks
from sparsity_worlds import batches, double_sum, outputs, staged

OPTIONS = {"beta": 0.5, "samples": 4, "every": 3}


def steps(model, penalty, data, rank=None):
    """Take a step for each batch, of a half of it where a rank is given, and return the terms."""
    optimizer, terms = torch.optim.SGD(model.parameters(), 0.1), []
    for x, y in data:
        half = slice(None) if rank is None else slice(rank, None, 2)
        optimizer.zero_grad()
        loss = cross_entropy(model(x[half]), y[half])
        terms.append(penalty.term())
        (loss + terms[-1]).backward()
        optimizer.step()
    return torch.stack(terms).detach()


def plainly_trained(data):
    model = staged()
    with nk.CKASparsityLoss(model, **OPTIONS) as penalty:
        terms = steps(model, penalty, data)
    return model, terms


def assert_alike(model, other, **tolerance):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, **tolerance)


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_term_is_that_of_the_outputs_in_float32(dtype):
    model, x = staged(), batches(1)[0][0]
    with nk.CKASparsityLoss(model, beta=1.0) as penalty, torch.autocast("cpu", dtype):
        model(x)
        term = penalty.term()
        given = outputs(model, x)
    assert term.dtype == torch.float32
    exact = double_sum([[one.double() for one in stage] for stage in given]).item()
    assert term.item() == pytest.approx(exact, rel=1e-5)
    term.backward()
    assert torch.isfinite(model.stem.weight.grad).all()


def test_nk_train_lowers_precision_and_the_term_stays():
    model = staged()
    with nk.CKASparsityLoss(model, beta=0.1, every=1) as penalty:
        history = nk.train(model, batches(2), epochs=1, precision="bf16", hooks=[penalty], progress=False)
    assert penalty.value.dtype == torch.float32
    assert history[0]["loss"] > 0.1 * 5  # layers with themselves alone give 5


def test_a_scaled_loss_gives_scaled_gradients_of_the_term():
    x, y = batches(1)[0]
    grads = []
    for scale in (1.0, 1024.0):
        model = staged()
        with nk.CKASparsityLoss(model, beta=0.5) as penalty:
            (scale * (cross_entropy(model(x), y) + penalty.term())).backward()
        grads.append(model.layer1[1].conv.weight.grad / scale)
    torch.testing.assert_close(*grads)


def test_a_model_in_half_precision_is_penalised_in_float32():
    model, x = staged().bfloat16(), batches(1)[0][0].bfloat16()
    with nk.CKASparsityLoss(model, beta=1.0, every=2) as penalty:
        model(x)
        first = penalty.term()
        model(x)
        second = penalty.term()
    assert first.dtype == second.dtype == torch.float32
    first.backward()
    assert model.stem.weight.grad.dtype == torch.bfloat16


# --- gradient checkpointing -------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def test_layers_that_run_again_for_checkpointing_count_once():
    x, found = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), []
    for reentrant in (None, False):
        model = Checkpointed(reentrant)
        with nk.CKASparsityLoss(model, beta=1.0, every=2) as penalty:
            terms = []
            for _ in range(3):
                (model(x).square().sum() + penalty.term()).backward()
                terms.append(penalty.value.item())
            assert penalty._seen == {}  # no graph is held until the next forward pass
        found.append((terms, penalty.batches, model.blocks[0][0].weight.grad))
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[0][2], found[1][2])


def test_reentrant_checkpointing_is_refused_as_it_hides_the_gradients():
    model = Checkpointed(True)
    with nk.CKASparsityLoss(model, beta=1.0) as penalty:
        model(torch.randn(8, 6, requires_grad=True))
        with pytest.raises(ForwardError, match="none of the layers has gradients.*use_reentrant=False"):
            penalty.term()


# --- torch.compile ----------------------------------------------------------------------------------------------------


# torch's own, when it traces a gradient of ours
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("when", ["loss first", "compiled first", "in place"])
def test_a_compiled_model_trains_as_a_plain_one(when):
    data, model = batches(8), staged()
    expected, terms = plainly_trained(data)
    torch.compiler.reset()
    if when == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
        run, penalty = model, nk.CKASparsityLoss(model, **OPTIONS)
    elif when == "compiled first":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        penalty = nk.CKASparsityLoss(run, **OPTIONS)
    else:
        penalty = nk.CKASparsityLoss(model, **OPTIONS)
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with penalty:
        torch.testing.assert_close(steps(run, penalty, data), terms, rtol=1e-5, atol=1e-6)
    assert penalty.batches == 8
    assert_alike(model, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_model_that_ran_compiled_before_is_told_to_wait():
    torch.compiler.reset()
    model = staged()
    run, x = torch.compile(model, backend="eager"), batches(1)[0][0]
    run(x)
    with nk.CKASparsityLoss(run, beta=1.0, every=1) as penalty:
        run(x)
        with pytest.raises(ForwardError, match="5 of 5 layers did not.*before a compiled model first runs"):
            penalty.term()


# --- two processes ----------------------------------------------------------------------------------------------------


def process(rank, folder):
    """Train one half of every batch in a process that knows another, and save the weights and terms."""
    model = DistributedDataParallel(staged())
    with nk.CKASparsityLoss(model, **OPTIONS) as penalty:
        terms = steps(model, penalty, batches(5), rank)
    torch.save({"terms": terms, **model.module.state_dict()}, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_processes_take_the_mean_of_their_terms(tmp_path):
    run_ranks(process, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert (first["terms"] > 0).tolist() == (second["terms"] > 0).tolist() == [True, False, False, True, False]
    assert not torch.equal(first["terms"], second["terms"])
    expected = by_hand()
    for name, weight in expected.named_parameters():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, rtol=1e-4, atol=1e-5)


def by_hand():
    """Return a network trained on the mean of the gradients of both halves, each with its own norms and term."""
    halves = [staged(), staged()]
    optimizers = [torch.optim.SGD(half.parameters(), 0.1) for half in halves]
    for step, (x, y) in enumerate(batches(5)):
        halves[1].load_state_dict(halves[0].state_dict())  # as the wrapper does before each forward pass
        for rank, half in enumerate(halves):
            half.zero_grad()
            part = x[rank::2]
            loss = cross_entropy(half(part), y[rank::2])
            if step % 3 == 0:
                loss = loss + 0.5 * double_sum([[one[:4] for one in stage] for stage in outputs(half, part)])
            loss.backward()
        for one, other in zip(halves[0].parameters(), halves[1].parameters(), strict=True):
            one.grad = other.grad = (one.grad + other.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
    return halves[0]
