"""Lottery tickets: which weights are left, to where they go back, and how a search goes on."""

import copy

import pytest
import torch
from torch import nn

from netkin.applications.sparsity.loss import CKASparsityLoss
from netkin.applications.sparsity.masks import masks_of, put_masks
from netkin.applications.sparsity.sparse_training import lottery_tickets
from netkin.applications.sparsity.sparsify import sparsify
from netkin.errors import InvalidValue
from netkin.training import Recipe, train
from quickly import slow_after
from refusals import refusals, refused


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))


def labelled(n=64, seed=1):
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 8, generator=draw)
    return inputs, inputs[:, :3].argmax(1)


RECIPE = Recipe(steps=12, batch=16, lr=0.1, schedule="cosine", weight_decay=0.01)


def same(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_each_round_keeps_the_largest_of_what_is_left():
    model, dense = net(), net()
    found = lottery_tickets(model, labelled(), RECIPE, sparsity=0.75, rounds=2)
    assert [ticket.sparsity for ticket in found.rounds] == pytest.approx([0, 0.5, 0.75], abs=0.01)
    train(dense, labelled(), RECIPE)
    sizes = torch.cat([dense[0].weight.abs().flatten(), dense[3].weight.abs().flatten()])
    first = torch.cat([mask.flatten() for mask in found.rounds[1].masks.values()])
    assert int(first.sum()) == 55
    assert sizes[first].min() >= sizes[~first].max()
    second = torch.cat([mask.flatten() for mask in found.rounds[2].masks.values()])
    assert int(second.sum()) == 110 - round(0.75 * 110)
    assert not bool((second & ~first).any())


def test_a_ticket_from_the_start_is_a_masked_training_from_the_start():
    model, plain = net(), net()
    found = lottery_tickets(model, labelled(), RECIPE, sparsity=0.6, rounds=1)
    put_masks(plain, found.rounds[1].masks)
    train(plain, labelled(), RECIPE)
    assert same(model, plain)
    ticket = found.put_on(net(7))
    first = net()
    put_masks(first, found.rounds[1].masks)
    assert same(ticket, first)


def test_a_ticket_goes_back_to_an_early_step_with_its_rates_order_and_momentum():
    """A plain loop from step 5 on, with masked momentum, gives the same weights."""
    model, start = net(), net()
    found = lottery_tickets(model, labelled(), RECIPE, sparsity=0.6, rounds=1, rewind=5)

    masks, kept = found.rounds[1].masks, {}

    class FromFive:
        def begin(self, model, optimizer):
            self.optimizer = optimizer

        def after_step(self, model, step):
            if step == 5:  # the dense run, masked from here on
                for layer, mask in masks.items():
                    weight = dict(model.named_modules())[layer].weight
                    weight.mul_(mask)
                    self.optimizer.state[weight]["momentum_buffer"].mul_(mask)
                kept.update(copy.deepcopy(model.state_dict()))

        def after_backward(self, model, step):
            if step > 5:
                for layer, mask in masks.items():
                    dict(model.named_modules())[layer].weight.grad.mul_(mask)

    train(start, labelled(), RECIPE, hooks=[FromFive()])
    assert torch.equal(model[0].weight, start[0].weight)
    assert torch.equal(model[3].weight, start[3].weight)
    assert torch.equal(model[1].running_mean, start[1].running_mean)
    untrained = found.put_on(net(3))
    assert torch.equal(untrained[0].weight, kept["0.weight"])
    assert found.rewind == 5


@pytest.mark.parametrize("stopped_in", slow_after(1, [0, 1, 2]))
def test_a_search_that_stops_goes_on_bit_for_bit(tmp_path, stopped_in):
    whole, again = net(), net()
    options = {"sparsity": 0.7, "rounds": 2, "rewind": 3}
    expected = lottery_tickets(whole, labelled(), RECIPE, **options)

    class Enough(Exception):
        pass

    left = [stopped_in * 12 + 7]

    def stop(model, step):
        left[0] -= 1
        if left[0] == 0:
            raise Enough

    stop.settings = "whenever it stops, it is the same hook"
    with pytest.raises(Enough):
        lottery_tickets(net(), labelled(), RECIPE, hooks=[stop], save=tmp_path / "run", **options)
    found = lottery_tickets(again, labelled(), RECIPE, hooks=[stop], save=tmp_path / "run", **options)
    assert same(whole, again)
    assert [one.sparsity for one in found.rounds] == [one.sparsity for one in expected.rounds]
    assert all(torch.equal(a, expected.start[name]) for name, a in found.start.items())


def test_the_loss_that_keeps_layers_apart_goes_along_with_masks():
    def tickets(beta):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        torch.manual_seed(0)
        for layer in (model[0], model[2], model[4]):
            nn.init.normal_(layer.weight, std=0.3)
        with CKASparsityLoss(model, beta=beta, every=2) as penalty:
            found = lottery_tickets(model, labelled(), RECIPE, sparsity=0.6, rounds=1, rewind=3, hooks=[penalty])
            assert penalty.value > 0
        return found

    with_it, without = tickets(0.1), tickets(0.0)
    assert with_it.rounds[0].record["loss"] > without.rounds[0].record["loss"]
    assert with_it.rounds[1].sparsity == without.rounds[1].sparsity
    assert any(not torch.equal(mask, without.rounds[1].masks[name]) for name, mask in with_it.rounds[1].masks.items())


def test_rounds_come_from_the_sparsity_and_are_told():
    model = net()
    found = lottery_tickets(model, labelled(), steps=2, sparsity=0.5, test=labelled(seed=2))
    assert len(found.rounds) == 4
    assert found.rounds[-1].sparsity == 0.5
    assert all(torch.equal(mask, found.rounds[-1].masks[name]) for name, mask in masks_of(model).items())
    assert "sparsity 0.5000: loss" in str(found)
    assert "accuracy" in str(found)


def test_the_last_round_has_the_sparsity_asked_for_though_one_less_it_is_rounded():
    assert 1 - (1 - 0.1) < 0.1  # in double precision: a round of 1.5 weights would become 1
    inputs = torch.randn(8, 5)
    model, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    found = lottery_tickets(model, (inputs, torch.arange(8) % 3), steps=1, sparsity=0.1, rounds=1, progress=False)
    assert found.rounds[-1].sparsity == 2 / 15
    assert sparsify(twin, 0.1).left == 13


def test_settings_that_make_no_sense_are_refused():
    refusals(
        (lambda: lottery_tickets(net(), labelled(), RECIPE, sparsity=1), InvalidValue, "sparsity"),
        (lambda: lottery_tickets(net(), labelled(), RECIPE, sparsity=0.5, rewind=13), InvalidValue, "rewind"),
    )
    with refused(InvalidValue, "rewind"):
        lottery_tickets(net(), labelled(), epochs=1, batch=16, sparsity=0.5, rewind=9)
    with refused(InvalidValue, "rounds"):
        lottery_tickets(net(), labelled(), RECIPE, sparsity=0.5, rounds=0)
    masked = net()
    sparsify(masked, 0.5)
    with pytest.raises(InvalidValue, match="tickets begin with a dense network"):
        lottery_tickets(masked, labelled(), RECIPE, sparsity=0.8)
