"""One study for all engines, and its models and data by name: 40 checkpoints of a run, all layers, with error bars."""

import os
import warnings
from pathlib import Path

import torch
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


def drive(folder, address):
    """Do the study on the cluster at an address, in a process that can be killed."""
    os.chdir(folder)
    study(on_ray(address))


def share(rank, folder):
    """Do a rank's share of the study, of which the first leaves the result."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    found = study("distributed", nk.load_data("study_worlds:inputs"))
    if rank == 0:
        found.save("distributed.netkin")
