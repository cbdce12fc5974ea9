"""What a claim's own functions make is kept, so that a claim that was killed goes on after it."""

import pytest
import torch
from torch import nn

from netkin.jobs import Job
from reproductions.keeping import keep_network, keep_result, keep_training, keeping_in


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture
def calls():
    return []


@pytest.fixture
def again(tmp_path):
    """Do something twice in one job, as a claim that was killed in between."""

    def twice(work):
        found = []
        for _ in range(2):
            with Job(tmp_path / "job", "claim", {}) as job, keeping_in(job):
                found.append(work())
        return found

    return twice


def test_a_result_is_kept_and_outside_of_a_claim_it_is_not(again, calls):
    @keep_result
    def third(number, way):
        calls.append((number, way))
        return {"value": number / 3, "way": way}

    first, second = again(lambda: third(2, "down"))
    assert first == second == {"value": 2 / 3, "way": "down"}
    assert calls == [(2, "down")]
    assert third(2, "down") == first
    assert len(calls) == 2


def test_a_network_is_kept_bit_for_bit_and_takes_no_random_numbers(again, calls):
    @keep_network(net)
    def trained(seed):
        calls.append(seed)
        return net().eval().requires_grad_(False)

    def work():
        torch.manual_seed(len(calls))
        before = torch.random.get_rng_state()
        return trained(7), torch.equal(torch.random.get_rng_state(), before)

    (first, _), (second, is_untouched) = again(work)
    assert calls == [7]
    assert is_untouched
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert not second.training
    assert not any(weight.requires_grad for weight in second.parameters())


def train_all(lab, name, models, data_of_each, **options):
    for model, (inputs, _) in zip(models, data_of_each, strict=True):
        with torch.no_grad():
            model[0].weight += inputs.mean()
        model.train()(inputs)
    return [model.eval() for model in models]


def trained_pair(calls, data, looked_at=None):
    def counted(*given, **options):
        calls.append(len(given[2]))
        return train_all(*given, **options)

    torch.manual_seed(3)
    options = {"rate": 0.1} | ({"look": looked_at} if looked_at else {})
    return keep_training(counted)(None, "net", [net(), net()], data, **options)


def test_trainings_are_kept_for_their_data(again, calls):
    sets = [(torch.rand(6, 3), torch.zeros(6)) for _ in range(2)]
    first, second = again(lambda: trained_pair(calls, sets))
    assert calls == [2]
    for one, other in zip(first, second, strict=True):
        assert not other.training
        for key, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[key]), key
    again(lambda: trained_pair(calls, sets[::-1]))
    assert calls == [2, 2]


def test_a_training_that_is_looked_at_is_done_again(again, calls):
    again(lambda: trained_pair(calls, [(torch.ones(6, 3), torch.zeros(6))] * 2, looked_at=print))
    assert calls == [2, 2]
