"""How much memory is free: of the machine, under the limits of control groups, and on a GPU."""

import pytest
import torch

from netkin import memory
from netkin.memory import format_bytes, free_memory, total_memory

GB = 10**9
MEMINFO = "MemTotal:       64000000 kB\nMemFree:         1000000 kB\nMemAvailable:   32000000 kB\nHugePages_Total: 0\n"


@pytest.fixture
def machine(tmp_path):
    """Return a function that writes the files of a made-up machine and returns where they lie."""

    def write(files):
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return tmp_path

    return write


def test_without_limits_the_system_knows_what_is_free(machine):
    root = machine({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert (free_memory(root=root), total_memory(root=root)) == (32 * 1024 * 10**6, 64 * 1024 * 10**6)


def test_a_container_of_version_2_has_less(machine):
    top = "sys/fs/cgroup/"
    stat = f"anon {GB}\ninactive_file {2 * GB}\nactive_file 5\n"
    files = {top + "memory.max": 8 * GB, top + "memory.current": 3 * GB, top + "memory.stat": stat}
    root = machine({"proc/self/cgroup": "0::/\n", **files})
    assert (free_memory(root=root), total_memory(root=root)) == (7 * GB, 8 * GB)


def test_a_group_above_may_be_the_tighter_one(machine):
    top = "sys/fs/cgroup/"
    job = {top + "slurm/job/memory.max": 20 * GB, top + "slurm/job/memory.current": GB}
    above = {top + "slurm/memory.max": 6 * GB, top + "slurm/memory.current": 5 * GB}
    root = machine({"proc/self/cgroup": "0::/slurm/job\n", **job, **above})
    assert (free_memory(root=root), total_memory(root=root)) == (GB, 6 * GB)


def test_a_container_of_version_1_has_less(machine):
    top = "sys/fs/cgroup/memory/"
    files = {top + "memory.limit_in_bytes": 4 * GB, top + "memory.usage_in_bytes": 2 * GB}
    stat = {top + "memory.stat": f"inactive_file 1\ntotal_inactive_file {GB // 2}\n"}
    # the path is the host's, which is not there inside the container
    root = machine({"proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n", **files, **stat})
    assert (free_memory(root=root), total_memory(root=root)) == (5 * GB // 2, 4 * GB)


def test_no_limit_of_version_1_is_a_very_large_number(machine):
    top = "sys/fs/cgroup/memory/"
    files = {top + "memory.limit_in_bytes": 2**63 - 4096, top + "memory.usage_in_bytes": GB}
    root = machine({"proc/self/cgroup": "4:memory:/\n", **files})
    assert (free_memory(root=root), total_memory(root=root)) == (32 * 1024 * 10**6, 64 * 1024 * 10**6)


def test_a_full_group_leaves_nothing(machine):
    files = {"sys/fs/cgroup/memory.max": GB, "sys/fs/cgroup/memory.current": 2 * GB}
    assert free_memory(root=machine({"proc/self/cgroup": "0::/\n", **files})) == 0


def test_a_system_without_these_files_tells_its_physical_memory(tmp_path):
    assert free_memory(root=tmp_path) == total_memory(root=tmp_path) > 1e8


def test_this_machine_has_some_memory():
    assert 1e7 < free_memory() <= total_memory() < 1e14
    assert free_memory("cpu") > 1e7


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)])
def test_a_gpu_has_memory_of_its_own(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda asked: (3 * GB, 8 * GB) if asked == device else None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda asked: 4 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda asked: GB)
    assert (free_memory(device), total_memory(device)) == (6 * GB, 8 * GB)


@pytest.mark.parametrize(
    "count, words",
    [(0, "0 B"), (999, "999 B"), (1500, "2 kB"), (999_499, "999 kB"), (999_999, "1 MB"), (2.5e9, "2.5 GB")],
)
def test_sizes_are_said_in_the_unit_people_would_use(count, words):
    assert format_bytes(count) == words


def test_things_are_taken_in_portions_that_fit_a_quarter_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 400)
    assert memory.portions_in_memory([]) == []
    assert memory.portions_in_memory([50, 50, 1]) == [slice(0, 2), slice(2, 3)]
    assert memory.portions_in_memory([900, 10, 90]) == [slice(0, 1), slice(1, 3)]  # one that is too large goes alone
