"""Two processes that train together: both may call the recorder, the first does the work."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk

SOURCE = Path(nk.errors.__file__).parents[1]
SCRIPT = """
import copy, sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import netkin as nk

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3)))
probe = torch.randn(30, 5)
recorder = nk.DynamicsRecorder(model, probe, measure="cka", log=lambda step, values: print("logged", step))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
draw, saved = torch.Generator().manual_seed(rank), {}
for step in range(4):
    saved[str(step)] = copy.deepcopy(model.module.state_dict())
    news = recorder.probe(step)
    assert (news is None) == (rank == 1), news
    x, y = torch.randn(8, 5, generator=draw), torch.randint(3, (8,), generator=draw)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
weights = [torch.zeros(9, 5) for _ in range(2)]
dist.all_gather(weights, model.module[0].weight.detach())
assert torch.equal(*weights)
recorder.save(f"{folder}/rank{rank}.netkin")
recorder.load_state_dict(recorder.state_dict())
recorder.finish()
if rank == 0:
    recorder.series().save(f"{folder}/series.netkin")
    torch.save((saved, probe), f"{folder}/saved.pt")
else:
    assert recorder.steps == () and recorder.memory == 0 and recorder.state_dict() == {}
    try:
        recorder.series()
    except nk.NetkinError as refusal:
        print(refusal)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed training")
def test_under_ddp_only_the_first_process_works(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(tmp_path / "train.py")]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment, text=True, stdout=-1, stderr=-1)
        for rank in range(2)
    ]
    told = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert told[0][0].split("\n")[:3] == ["logged 1", "logged 2", "logged 3"]
    assert told[1][0].strip() == "only the process of rank 0 keeps probes; this is rank 1."
    assert (tmp_path / "rank0.netkin").exists()
    assert not (tmp_path / "rank1.netkin").exists()
    saved, probe = torch.load(tmp_path / "saved.pt", weights_only=True)
    network = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
    theirs = nk.dynamics({int(step): state for step, state in saved.items()}, probe, "cka", model=network)
    ours = nk.load(tmp_path / "series.netkin")
    np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), atol=1e-6)
    assert ours.own()[0].min() < 0.999  # it did learn
