"""Total and free memory of the host and of a GPU, and sizes as text.

A container or a batch system may allow less than the machine has: the limits of the control groups (cgroups, version 2
and 1) that this process belongs to count, with the groups above them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path("/")


def free_memory(device: Any = None, *, root: Path = ROOT) -> int:
    """Return how many bytes can be taken now, of the host's memory or, for a CUDA `device`, of the GPU's.

    On the host that is what the system calls available, or what a control group leaves, if that is less; files in the
    cache that can be dropped count as free. On a GPU, blocks that torch holds and does not use count as free, too.
    `root` is where the system's files lie.
    """
    if is_cuda(device):
        import torch

        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    left = [limit - used for limit, used in _limits(root)]
    return max(0, min([_of_system("MemAvailable", root), *left]))


def total_memory(device: Any = None, *, root: Path = ROOT) -> int:
    """Return how many bytes this process could ever have, of the host's memory or of a CUDA device's."""
    if is_cuda(device):
        import torch

        return torch.cuda.mem_get_info(device)[1]
    return min([_of_system("MemTotal", root), *(limit for limit, _ in _limits(root))])


def portions_in_memory(sizes: Sequence[int]) -> list[slice]:
    """Return things of these sizes in portions, each as many of them as fit a quarter of what is free, or one."""
    limit, begun, size = free_memory() // 4, 0, 0
    portions = list[slice]()
    for place, added in enumerate(sizes):
        if place > begun and size + added > limit:
            portions.append(slice(begun, place))
            begun, size = place, 0
        size += added
    return [*portions, slice(begun, len(sizes))] if sizes else []


def format_bytes(count: float) -> str:
    """Return a number of bytes in a readable unit.

    Example:
        >>> format_bytes(2_500_000), format_bytes(999_999_999)
        ('2 MB', '1.0 GB')
    """
    for unit in ("B", "kB", "MB"):
        if round(count) < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def is_cuda(device: Any) -> bool:
    """Return whether a device, as an object or as text, is a GPU of CUDA."""
    return device is not None and str(device).partition(":")[0] == "cuda"


def _of_system(name: str, root: Path) -> int:
    """Return a number of bytes from a file of the system; without such a file, its physical memory."""
    kilobytes = _number(f"{root}/proc/meminfo", name)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if kilobytes is None else kilobytes * 1024


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use, in bytes, of each control group that has a limit."""
    for line in _text(f"{root}/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names, top = ("memory.max", "memory.current", "inactive_file"), f"{root}/sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = f"{root}/sys/fs/cgroup/memory"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for count in range(len(parts), -1, -1):  # the group and those above it; in a container `path` may not be there
            group = "/".join([top, *parts[:count]])
            limit, used = (_text(f"{group}/{name}").strip() for name in names[:2])
            if limit.isdecimal() and used.isdecimal():  # without a limit it is the word "max"
                yield int(limit), int(used) - (_number(f"{group}/memory.stat", names[2]) or 0)


def _number(path: str, name: str) -> int | None:
    """Return the number beside a name in a file with a name and a number in each line."""
    for line in _text(path).splitlines():
        if line.startswith(name):
            first, second, *_ = [*line.replace(":", " ").split(), ""]
            if first == name and second.isdecimal():
                return int(second)
    return None


def _text(path: str) -> str:
    """Return the text of a file of the system; empty where it is absent or not readable."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
