import torch

from netkin.sources import load_data
from netkin.sources.training import accuracy, trained_digits_net, untrained_digits_net


def test_a_trained_network_reads_digits_it_has_not_seen():
    assert accuracy(trained_digits_net(seed=0), load_data("digits:test")) >= 0.95


def test_an_untrained_network_does_not():
    assert accuracy(untrained_digits_net(seed=0), load_data("digits:test")) < 0.5


def test_training_follows_from_its_seed_and_leaves_random_numbers_alone():
    before = torch.random.get_rng_state()
    first, again, other = (trained_digits_net(seed, epochs=1) for seed in (0, 0, 1))
    assert torch.equal(first.conv4.weight, again.conv4.weight)
    assert not torch.equal(first.conv4.weight, other.conv4.weight)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not first.training


def test_progress_is_told_after_each_epoch():
    told = []
    trained_digits_net(seed=0, epochs=2, progress=lambda epoch, loss: told.append((epoch, loss)))
    assert [epoch for epoch, _ in told] == [1, 2]
    assert told[1][1] < told[0][1]
