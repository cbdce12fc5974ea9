import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

from netkin.sources import load_data
from netkin.training import accuracy, trained_digits_net, untrained_digits_net


@pytest.mark.slow
def test_a_trained_network_reads_digits_it_has_not_seen(trained_once):
    assert accuracy(trained_once(seed=0), load_data("digits:test")) >= 0.95


def test_an_untrained_network_does_not():
    assert accuracy(untrained_digits_net(seed=0), load_data("digits:test")) < 0.5


@pytest.mark.slow
def test_training_follows_from_its_seed_and_leaves_random_numbers_alone():
    before = torch.random.get_rng_state()
    first, again, other = (trained_digits_net(seed, epochs=1) for seed in (0, 0, 1))
    assert torch.equal(first.conv4.weight, again.conv4.weight)
    assert not torch.equal(first.conv4.weight, other.conv4.weight)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not first.training


@pytest.fixture(scope="module")
def trained():
    """A network, and what was told of its training."""
    told = []
    return trained_digits_net(seed=4, epochs=2, progress=lambda epoch, loss: told.append((epoch, loss))), told


@pytest.mark.slow
def test_progress_is_told_after_each_epoch(trained):
    _, told = trained
    assert [epoch for epoch, _ in told] == [1, 2]
    assert told[1][1] < told[0][1]


@pytest.mark.slow
def test_its_weights_are_those_of_a_plain_loop_bit_for_bit(trained):
    images, labels = next(iter(load_data("digits:train", batch_size=10_000)))
    model = untrained_digits_net(4).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = LinearLR(optimizer, start_factor=1, end_factor=0.05, total_iters=1)
    draw = torch.Generator().manual_seed(4)
    for _ in range(2):
        for rows in torch.randperm(len(images), generator=draw).split(32):
            optimizer.zero_grad()
            cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        schedule.step()
    ours = trained[0].state_dict()
    assert all(torch.equal(ours[name], value) for name, value in model.state_dict().items())
