"""Two nodes of Ray for the fixture `ray_cluster`; models, data and functions by name, for their workers."""

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
import rank_worlds

HOW = {"num_cpus": 1, "num_gpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False}


class Nodes:
    """Two nodes of Ray on this machine, of one CPU each; the disk of the first is full, that of the second is not."""

    def __init__(self, folder):
        from ray.cluster_utils import Cluster

        self.disks = [folder / "disk1", folder / "disk2"]
        for disk in self.disks:
            disk.mkdir()
        (self.disks[0] / "cache").symlink_to("/dev/full")
        self.cluster = Cluster(initialize_head=True, head_node_args=HOW | self._disk(0))
        self.address = self.cluster.address
        self.add()

    def _disk(self, place):
        return {"env_vars": {"NODE_DISK": str(self.disks[place])}}

    def add(self):
        """Add the second node."""
        self.cluster.add_node(**HOW, **self._disk(1))

    def remove(self):
        """Kill all processes of the second node."""
        self.cluster.remove_node(next(iter(self.cluster.worker_nodes)), allow_graceful=False)


def seeded(seed, dtype=torch.float64, kind=rank_worlds.Maps):
    torch.manual_seed(seed)
    return kind().to(dtype).eval()


def first():
    return seeded(0)


def second():
    return seeded(1)


def third():
    return seeded(2)


def first_float():
    return seeded(0, torch.float32)


def second_float():
    return seeded(1, torch.float32)


def assigned():
    """Return a model, and write what Ray has given to the task that loads it."""
    import ray

    Path("assigned").write_text(json.dumps(ray.get_runtime_context().get_assigned_resources()))
    return first()


def words():
    return seeded(0, kind=rank_worlds.Words)


def broken():
    """Return a model that gives NaN for every example."""
    model = seeded(3)
    nn.init.constant_(model.fc.weight, torch.nan)
    return model


class Overflowing(rank_worlds.Maps):
    def forward(self, images):
        return super().forward(torch.where(images.mean((1, 2, 3), keepdim=True) > 19, torch.inf, images))


def overflowing():
    """Return a model that gives Inf for the last examples alone."""
    return seeded(4, kind=Overflowing)


def crashing():
    """Return a model that raises an error of its own."""
    model = seeded(0)
    model.fc.register_forward_hook(crash)
    return model


def crash(module, inputs, output):
    raise OSError("this model is broken")


class Interrupted(rank_worlds.Maps):
    """A model that does something once, in the process that first gets behind the first batch."""

    def forward(self, images):
        if images.mean() > 5:
            self.once()
        return super().forward(images)

    def once(self):
        try:
            Path("seen").touch(exist_ok=False)
        except FileExistsError:
            return
        self.happens()


class Killed(Interrupted):
    def happens(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Stopping(Interrupted):
    """One that presses Ctrl-C in the process that made the call, once a part is finished, and does not go on."""

    def happens(self):
        while not list(Path("ab.job/parts").glob("share*")):
            time.sleep(0.05)
        os.kill(int(Path("driver").read_text()), signal.SIGINT)
        time.sleep(600)


class FullDisk(Interrupted):
    def happens(self):
        raise OSError(28, "No space left on device")


def killed():
    return seeded(0, kind=Killed)


def unreadable():
    """Fail as a file does whose disk is damaged."""
    raise OSError(5, "Input/output error")


def read_elsewhere():
    """Fail so once, and return a model the next time."""
    try:
        Path("seen").touch(exist_ok=False)
    except FileExistsError:
        return second()
    return unreadable()


def stopping():
    return seeded(0, kind=Stopping)


def deadly():
    """End the process that loads it, as a crash outside of Python does."""
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk():
    return seeded(0, kind=FullDisk)


def images():
    return rank_worlds.images()


def float_images():
    return rank_worlds.images(dtype=torch.float32)


def loader():
    return DataLoader(TensorDataset(rank_worlds.images(), torch.arange(50)), batch_size=7)


def shuffled():
    return DataLoader(TensorDataset(rank_worlds.images()), batch_size=7, shuffle=True)


def sentences():
    return rank_worlds.sentences()


def halved(inputs):
    return inputs / 2


def feed(model, batch):
    return model(batch[0] if isinstance(batch, (list, tuple)) else batch)


INTERRUPTED = ("ray_worlds:stopping", "ray_worlds:second", "ray_worlds:loader")


def drive(folder, address):
    """Make a call on the cluster at an address, in a process that can be interrupted."""
    os.chdir(folder)
    Path("driver").write_text(str(os.getpid()))
    nk.compare(*INTERRUPTED, engine=nk.Ray(address, job="ab.job", shares=3), layers=rank_worlds.LAYERS, progress=False)
