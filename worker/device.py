"""The device the worker computes on: which one, its free memory, its threads.

Threads: the CPU worker takes every core that this process may use (affinity and cgroup quota), or ``--threads``. The
C kernels share torch's OpenMP team; how long idle threads spin is set where the package begins (worker/__init__.py).
"""

import math
import os
from pathlib import Path

import torch

from depthbatch.common.errors import ConfigError

CGROUP = Path("/sys/fs/cgroup")


def resolve_device(name: str) -> torch.device:
    """'auto' is CUDA where there is a GPU, else the CPU. ConfigError when CUDA is asked for and not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: no CUDA device is available")
    return torch.device(name)


def usable_cores() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its control group where one is set."""
    cores = len(os.sched_getaffinity(0))
    quota = _read_words(CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, math.floor(int(quota[0]) / int(quota[1]))))
    return cores


def set_threads(threads: int | None) -> int:
    """Sets torch's threads and returns how many; None takes every usable core."""
    count = threads or usable_cores()
    torch.set_num_threads(count)
    return count


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on the device; on the CPU within the control group's limit too."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has freed is still with the allocator
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min(_available_ram(), _cgroup_room())


def _available_ram() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cgroup_room() -> int:
    limit, used = _read_words(CGROUP / "memory.max"), _read_words(CGROUP / "memory.current")
    if not limit or not used or limit[0] == "max":
        return 1 << 62
    return max(0, int(limit[0]) - int(used[0]))


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
