"""Zeroed memory on large pages: weights and KV cache are streamed every step, and small pages cost a third of that.

Pages are committed when first written. Where the system has no large pages this is plain memory. Knows nothing of what
is stored.
"""

import contextlib
import math
import mmap
import threading

import torch
from torch import Tensor

ARENA_BYTES = 64 << 20  # small tensors share an arena, since a large page is 2 MiB
ALIGNMENT = 4096  # bytes between the starts of two tensors, a multiple of every cache line


def zeros_on_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed CPU tensor of ``shape``. Raises MemoryError when the address space is refused."""
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    return _arenas.take(count * dtype.itemsize).view(dtype)[:count].view(shape)


class _Arenas:
    """Cuts tensors from anonymous mappings; a mapping lives as long as a tensor cut from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: Tensor = torch.empty(0, dtype=torch.uint8)  # rest of the newest arena

    def take(self, size: int) -> Tensor:
        """At least ``size`` zeroed bytes."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        if size >= ARENA_BYTES // 2:
            return _map(size)
        with self._lock:
            if len(self._free) < size:
                self._free = _map(ARENA_BYTES)
            taken, self._free = self._free[:size], self._free[size:]
        return taken


def _map(size: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise MemoryError(f"cannot map {size / 2**20:.0f} MiB: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages: slower, nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


_arenas = _Arenas()
