"""Processes for tests, forked from one that has imported torch and netkin, which takes seconds, once for all."""

import multiprocessing
import os
import tempfile

from torch import distributed

IMPORTED = ["torch._dynamo", "torch.nn.parallel", "pytest", "netkin.applications.stitching", "netkin.training"]
IMPORTED += ["netkin.applications.dynamics", "netkin.applications.freezing", "netkin.applications.sparsity"]


def started(work, *given):
    """Return a process that has begun `work(*given)`, a function of a module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=work, args=given)
    process.start()
    return process


def ended(process, seconds=240):
    """Return the exit code of a process, once it has ended; one that takes longer is killed."""
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode


def run_ranks(work, folder, count=2):
    """Run `work(rank, folder)` in processes that are the ranks of a group; see that all end well.

    They meet in a file, as a store of torch's own listens to other machines too.
    """
    with tempfile.TemporaryDirectory() as meeting:
        running = [started(_as_rank, work, folder, rank, count, meeting) for rank in range(count)]
        assert [ended(one) for one in running] == [0] * count  # what went wrong stands in the output


def _as_rank(work, folder, rank, count, meeting):
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in told.items()}, GLOO_SOCKET_IFNAME="lo")
    distributed.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=count)
    work(rank, folder)
    distributed.destroy_process_group()
