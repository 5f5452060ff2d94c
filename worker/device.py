"""The device the worker computes on: which one, its threads, its free memory, and how much of that is KV memory.

Threads: the CPU worker takes every core that this process may use (affinity and cgroup quota), or ``--threads``. The
C kernels share torch's OpenMP team; how long idle threads spin is set where the package begins (worker/__init__.py).

KV memory: without ``--kv-blocks`` it takes a share of what weights and all else (memory_plan.py) leave free: 85 % on CUDA (the rest is for activations and
graphs), 40 % on the CPU (other processes live there too), but never more than W sequences of the greatest length can
use.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from depthbatch.common.errors import ConfigError

CGROUP = Path("/sys/fs/cgroup")
FREE_SHARE = {"cuda": 0.85, "cpu": 0.40}
THREADS_A_CORE = 8
GIB = 1 << 30


def resolve_device(name: str, ranks: int = 1, quantization: str | None = None, rank: int = 0) -> torch.device:
    """'auto' is CUDA where there is a GPU, else the CPU; of several ranks each has the GPU of its number. ConfigError when
    CUDA is asked for and not there, and where the devices cannot run so many ranks or quantised weights."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ConfigError("device cuda: no CUDA device is available")
    if quantization is not None:
        raise ConfigError(f"quantization {quantization} needs device cpu: it is not built for GPUs yet")
    if ranks == 1:
        return torch.device(name)
    if (visible := torch.cuda.device_count()) < ranks:
        raise ConfigError(f"tensor_parallel_size {ranks}: each rank needs a GPU of its own, and {visible} can be seen")
    if not torch.distributed.is_nccl_available():
        raise ConfigError(f"tensor_parallel_size {ranks}: this torch has no NCCL, which ranks on GPUs need")
    return torch.device(name, rank)


def usable_cores() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its control group where one is set."""
    cores = len(os.sched_getaffinity(0))
    quota = _read_words(CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, math.floor(int(quota[0]) / int(quota[1]))))
    return cores


def set_threads(threads: int | None, ranks: int = 1) -> int:
    """Sets torch's threads and returns how many; None takes every usable core, divided among the ranks. Raises ConfigError
    where they are far more than there are cores: each takes a stack, and the C library ends the process without one."""
    count = threads or max(1, usable_cores() // ranks)
    cores = os.cpu_count() or 1
    if count > (most := THREADS_A_CORE * cores):
        raise ConfigError(f"threads {count}: this machine has {cores} cores, for which at most {most} are taken")
    torch.set_num_threads(count)
    return count


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on the device; on the CPU within the control group's limit too."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has freed is still with the allocator
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min(_available_ram(), _cgroup_room())


def of_a_rank(free_bytes: Sequence[int], device: torch.device) -> int:
    """Bytes that each rank may plan with, where the ranks find ``free_bytes`` on devices like ``device``: the least of them;
    on a CPU its part, since they all have found the same."""
    least = min(free_bytes)
    return least // len(free_bytes) if device.type == "cpu" else least


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


class KVRequest(NamedTuple):
    """What is asked for."""

    bytes_per_token: int
    block_size: int
    max_positions: int  # the model's
    max_num_seqs: int
    kv_blocks: int | None  # usable blocks, as the option gives them
    max_model_len: int | None


class KVPlan(NamedTuple):
    """What there will be."""

    num_blocks: int  # dummy block 0 included
    block_size: int
    bytes_per_token: int
    max_model_len: int
    host_blocks: int = 0  # of host memory, for preempted sequences

    @property
    def max_blocks(self) -> int:
        """Columns of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def tokens_that_fit(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.bytes_per_token

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"KV cache: {self.bytes_per_token / 1024:g} KiB per token, {self.tokens_that_fit} tokens fit "
            f"({self.num_blocks - 1} blocks of {self.block_size}, {self.total_bytes / GIB:.2f} GiB), "
            f"longest sequence {self.max_model_len}"
        )


def plan_kv(request: KVRequest, free_bytes: int, device_type: str) -> KVPlan:
    """Sizes the KV memory; ConfigError with the numbers when it cannot be had or is of no use."""
    length = request.max_model_len or request.max_positions
    if length > request.max_positions:
        raise ConfigError(f"max_model_len {length} is more than the model's {request.max_positions} positions")
    block_bytes = request.bytes_per_token * request.block_size
    blocks = request.kv_blocks or _blocks_from_memory(request, length, free_bytes, device_type)
    if (blocks + 1) * block_bytes > free_bytes:
        raise ConfigError(
            f"kv_blocks {blocks} of {request.block_size} tokens need {(blocks + 1) * block_bytes / GIB:.2f} GiB "
            f"({request.bytes_per_token / 1024:g} KiB per token), but only {free_bytes / GIB:.2f} GiB are free"
        )
    fits = blocks * request.block_size
    if request.max_model_len is not None and fits < length:
        raise ConfigError(f"{blocks} KV blocks hold {fits} tokens, less than max_model_len {length}")
    return KVPlan(blocks + 1, request.block_size, request.bytes_per_token, min(length, fits))


def _blocks_from_memory(request: KVRequest, length: int, free_bytes: int, device_type: str) -> int:
    """Usable blocks in the device's share of the free memory, at most what W sequences can fill."""
    block_bytes = request.bytes_per_token * request.block_size
    share = int(free_bytes * FREE_SHARE[device_type])
    blocks = min(share // block_bytes - 1, request.max_num_seqs * -(-length // request.block_size))
    if blocks < 1:
        raise ConfigError(
            f"no room for the KV cache: {share / GIB:.3f} GiB may be used, two blocks of {request.block_size} tokens "
            f"need {2 * block_bytes / GIB:.3f} GiB"
        )
    return blocks
