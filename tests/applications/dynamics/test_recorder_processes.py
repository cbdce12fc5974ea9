"""Two processes that train together: both may call the recorder, the first does the work."""

import copy

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import netkin as nk
from processes import run_ranks


def network():
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))


def learn(model, recorder, rank):
    """Train for four steps on the rank's own examples, and return the state before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    draw, saved = torch.Generator().manual_seed(rank), {}
    for step in range(4):
        saved[str(step)] = copy.deepcopy(model.module.state_dict())
        assert (recorder.probe(step) is None) == (rank == 1)
        x, y = torch.randn(8, 5, generator=draw), torch.randint(3, (8,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return saved


def record(rank, folder):
    """Train one of two networks, and leave what its recorder has, says and logs."""
    torch.manual_seed(0)
    model, probe, logged = DistributedDataParallel(network()), torch.randn(30, 5), []
    recorder = nk.DynamicsRecorder(model, probe, measures="cka", log=lambda step, values: logged.append(step))
    saved = learn(model, recorder, rank)
    weights = [torch.zeros(9, 5) for _ in range(2)]
    distributed.all_gather(weights, model.module[0].weight.detach())
    assert torch.equal(*weights)
    recorder.save(folder / f"rank{rank}.netkin")
    recorder.load_state_dict(recorder.state_dict())
    recorder.finish()
    if rank == 0:
        recorder.series().save(folder / "series.netkin")
        torch.save((saved, probe, logged), folder / "saved.pt")
        return
    assert (recorder.steps, recorder.memory, recorder.state_dict(), logged) == ((), 0, {}, [])
    with pytest.raises(nk.NetkinError, match="^only the process of rank 0 keeps probes; this is rank 1.$"):
        recorder.series()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed training")
def test_under_ddp_only_the_first_process_works(tmp_path):
    run_ranks(record, tmp_path)
    assert (tmp_path / "rank0.netkin").exists()
    assert not (tmp_path / "rank1.netkin").exists()
    saved, probe, logged = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert logged[:3] == [1, 2, 3]
    theirs = nk.dynamics({int(step): state for step, state in saved.items()}, probe, "cka", model=network())
    ours = nk.load(tmp_path / "series.netkin")
    np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), atol=1e-6)
    assert ours.own()[0].min() < 0.999  # it did learn
