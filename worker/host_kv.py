"""Host memory for the K/V of preempted sequences: blocks are copied there and back, all layers and planes of each.

The host's copy of a layer has the layout of the layer's cache, so a block is one piece of memory. On a GPU the memory is
pinned, copies are asynchronous, and blocks that lie next to each other on both sides are one copy. On the CPU blocks that
lie next to each other in the host's part are one gather or scatter.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from depthbatch.common.frames import Int32Array
from depthbatch.worker.attention.backend import AttentionBackend

KV, HOST = 0, 1  # columns of moves


def pieces(moves: Int32Array, columns: tuple[int, ...]) -> Iterator[Int32Array]:
    """int32 [n, 2] in pieces, in order, in which each of the columns ascends by one."""
    ends = np.flatnonzero((np.diff(moves[:, columns], axis=0) != 1).any(axis=1)) + 1
    for part in np.split(moves, ends):
        if len(part):
            yield part


class HostKV:
    """``num_blocks`` blocks of host memory beside a backend's caches."""

    def __init__(self, backend: AttentionBackend, num_blocks: int) -> None:
        on_gpu = backend.geometry.device.type == "cuda"
        self._layers: list[_OnGpu | _OnCpu] = []
        for layer, planes in enumerate(backend.geometry.planes):
            for cache in backend.memory(layer):
                host = torch.empty((num_blocks * planes, *cache.shape[1:]), dtype=cache.dtype, pin_memory=on_gpu)
                self._layers.append((_OnGpu if on_gpu else _OnCpu)(cache, host, planes))
        self._columns = (KV, HOST) if on_gpu else (HOST,)

    def move(self, offloads: Int32Array, restores: Int32Array) -> None:
        """Copies ``offloads`` [n, 2] of (KV block, host block), then ``restores`` [n, 2] of (host block, KV block)."""
        for part in pieces(offloads, self._columns):
            for layer in self._layers:
                layer.take_out(part)
        for part in pieces(restores[:, ::-1], self._columns):
            for layer in self._layers:
                layer.bring_back(part)


class _OnGpu:
    """A layer's K or V, and its copy in pinned memory; pieces are slices of both."""

    def __init__(self, cache: Tensor, host: Tensor, planes: int) -> None:
        self._cache, self._host, self._planes = cache, host, planes

    def take_out(self, part: Int32Array) -> None:
        cache, host = self._slices(part)
        host.copy_(cache, non_blocking=True)

    def bring_back(self, part: Int32Array) -> None:
        cache, host = self._slices(part)
        cache.copy_(host, non_blocking=True)

    def _slices(self, part: Int32Array) -> tuple[Tensor, Tensor]:
        (block, at), count = part[0].tolist(), len(part)
        planes = self._planes
        return (
            self._cache[block * planes : (block + count) * planes],
            self._host[at * planes : (at + count) * planes],
        )


class _OnCpu:
    """The same; pieces are a slice of the host's copy, and of the cache blocks in any order."""

    def __init__(self, cache: Tensor, host: Tensor, planes: int) -> None:
        self._cache, self._host = _blocks(cache, planes), _blocks(host, planes)

    def take_out(self, part: Int32Array) -> None:
        blocks, host = part[:, KV], self._of_host(part)
        if blocks[-1] - blocks[0] == len(blocks) - 1 and (np.diff(blocks) == 1).all():
            host[...] = self._cache[blocks[0] : blocks[0] + len(blocks)]
        else:  # "clip" is what lets numpy write into ``out`` without a buffer between
            np.take(self._cache, blocks, axis=0, out=host, mode="clip")

    def bring_back(self, part: Int32Array) -> None:
        self._cache[part[:, KV]] = self._of_host(part)

    def _of_host(self, part: Int32Array) -> npt.NDArray[Any]:
        return self._host[part[0, HOST] : part[0, HOST] + len(part)]


def _blocks(tensor: Tensor, planes: int) -> npt.NDArray[Any]:
    """[blocks, words of a block], as a view; numpy knows no bfloat16, so words are whole numbers."""
    words = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    return words.view(len(tensor) // planes, -1).numpy()
