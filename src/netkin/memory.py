"""Total and free memory of the host and of a GPU, and sizes as text.

A container or a batch system may allow less than the machine has: the limits of the control groups (cgroups, version 2
and 1) that this process belongs to count, with the groups above them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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


def size_in_words(count: float) -> str:
    """Return a number of bytes in the unit that people would use.

    Example:
        >>> size_in_words(2_500_000), size_in_words(999_999_999)
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
    """Return a number of bytes that the system tells of; where it has no such file, its physical memory."""
    found = _table(root / "proc/meminfo").get(name)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if found is None else found * 1024


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use, in bytes, of each control group that has a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names, top = ("memory.max", "memory.current", "inactive_file"), root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        for group in _groups(top, path):
            limit, used = (_text(group / name).strip() for name in names[:2])
            if limit.isdecimal() and used.isdecimal():  # without a limit it is the word "max"
                yield int(limit), int(used) - _table(group / "memory.stat").get(names[2], 0)


def _groups(top: Path, path: str) -> list[Path]:
    """Return the folders of a control group and of those above it; inside a container `path` may not be there."""
    inner = top / path.strip("/")
    return [inner, *(above for above in inner.parents if above.is_relative_to(top))]


def _table(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    rows = [line.replace(":", " ").split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    """Return what a file of the system says; nothing where it is not there or not for us."""
    try:
        return path.read_text()
    except OSError:
        return ""
