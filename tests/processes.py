"""Processes for tests, forked from one that has imported torch and netkin, which takes seconds, once for all."""

import atexit
import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread

from torch import distributed

IMPORTED = ["torch._dynamo", "torch.nn.parallel", "pytest", "netkin.applications.stitching", "netkin.training"]
IMPORTED += ["netkin.applications.dynamics", "netkin.applications.freezing", "netkin.applications.sparsity"]
IMPORTED += ["netkin.cli", "netkin.comparing", "netkin.sources", "torch.distributed.run"]


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


def run_ranks(work, folder, count=2, backend="gloo"):
    """Run `work(rank, folder)` in processes that are the ranks of a group; see that all end well.

    They meet in a file, as a store of torch's own listens to other machines too.
    """
    with tempfile.TemporaryDirectory() as meeting:
        running = [started(_as_rank, work, folder, rank, count, meeting, backend) for rank in range(count)]
        assert [ended(one) for one in running] == [0] * count  # what went wrong stands in the output


def _as_rank(work, folder, rank, count, meeting, backend):
    # all are connected before one of them may end
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "TORCH_DIST_INIT_BARRIER": 1}
    os.environ.update({name: str(value) for name, value in told.items()}, GLOO_SOCKET_IFNAME="lo")
    distributed.init_process_group(backend, init_method=f"file://{meeting}/store", rank=rank, world_size=count)
    work(rank, folder)
    distributed.destroy_process_group()


# asks for a process, gives it its own streams, and ends as that one ends
ASKING = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as end:
    end.connect({place!r})
    socket.send_fds(end, [b" "], [0, 1, 2])
    end.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    code = int(end.makefile().read() or 1)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def quick_python():
    """Give the path of a command like `python`, whose processes are those of `started` and begin at once.

    It runs modules and files: "python -m netkin", "python mine.py". A process ends with the command that asked for it.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        place, asking, command = (Path(folder) / name for name in ("socket", "asking.py", "python"))
        asking.write_text(ASKING.format(place=str(place)))
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -SE "{asking}" "$@"\n')
        command.chmod(0o755)
        listener.bind(str(place))
        listener.listen()
        Thread(target=_serve, args=[listener], daemon=True).start()
        try:
            yield command
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends the wait for the next one


def _serve(listener):
    while True:
        try:
            asker, _ = listener.accept()
        except OSError:  # it was closed
            return
        Thread(target=_answer, args=[asker], daemon=True).start()


def _answer(asker):
    with asker:
        _, streams, *_ = socket.recv_fds(asker, 1, 3)
        with asker.makefile() as lines:
            process = started(_as_python, *json.loads(lines.readline()), [Connection(one) for one in streams])
        if process.sentinel not in wait([process.sentinel, asker]):
            process.kill()  # the command that asked for it is gone
        process.join()
        with suppress(BrokenPipeError):
            asker.sendall(str(process.exitcode).encode())


def _as_python(arguments, folder, environment, streams):
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    first, *sys.argv = arguments[arguments[0] == "-u" :]
    try:
        if first == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv.insert(0, first)
            runpy.run_path(first, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
