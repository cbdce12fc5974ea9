"""One study for all engines, and its models and data by name: `python study_worlds.py FOLDER [ADDRESS]`.

All pairs of 40 checkpoints of one run, all layers, with error bars. Without an address the processes that RANK and
WORLD_SIZE number do it, and find each other by a file, so that no port is open; the first leaves the result.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.comparing.engines.ray import Ray

CHECKPOINTS = 40
ASKED = {"measures": ["svcca", "cka_debiased"], "pairs": "corresponding", "errors": True, "chunks": 2}


def net():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def inputs():
    """Return the examples in batches, and tell by a line in a file of the folder that a process has read them."""
    with open("reads", "a") as file:
        file.write(f"{os.getpid()}\n")
    return DataLoader(TensorDataset(examples()), batch_size=20)


def examples():
    return torch.randn(120, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def cached_inputs():
    """Return the examples after writing them to the disk of the node, which may be full; tell which disk it was."""
    disk = Path(os.environ["NODE_DISK"])
    with open("disks", "a") as file:
        file.write(f"{disk.name}\n")
    with open(disk / "cache", "wb") as file:
        torch.save(examples(), file)
    return inputs()


def train(folder):
    """Train a net for 40 steps, and keep each."""
    torch.manual_seed(0)
    model, targets = net(), examples().sin()[:, :4]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(CHECKPOINTS):
        torch.save(model.state_dict(), folder / f"step{step}.pt")
        optimizer.zero_grad()
        nn.functional.mse_loss(model(examples()), targets).backward()
        optimizer.step()


def models():
    return {f"step {step}": f"study_worlds:net@step{step}.pt" for step in range(CHECKPOINTS)}


def study(engine, data="study_worlds:inputs", progress=False):
    return nk.compare_many(models(), data, engine=engine, progress=progress, **ASKED)


def on_ray(address=None):
    """Return the engine whose job lies in the folder."""
    return Ray(address, job="study.job", shares=6)


def main(folder, address=None):
    os.chdir(folder)
    if address:
        study(on_ray(address))
        return
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    found = study("distributed", nk.load_data("study_worlds:inputs"))
    if rank == 0:
        found.save("distributed.netkin")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
