"""K/V in host memory: what goes out comes back, whatever has been written to the blocks since."""

import numpy as np
import pytest
import torch

from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.backend import CacheGeometry
from depthbatch.worker.attention.sdpa import SdpaAttention
from depthbatch.worker.host_kv import HOST, KV, HostKV, _OnCpu, _OnGpu, pieces

PLANES = (1, 4, 4)


def moves(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int32).reshape(-1, 2)


@pytest.mark.parametrize(
    ("pairs", "both", "host"),
    [
        ((), [], []),
        (((5, 0),), [1], [1]),
        (((5, 0), (6, 1), (7, 2), (9, 3)), [3, 1], [4]),
        (((5, 0), (6, 2), (7, 3), (6, 4)), [1, 2, 1], [1, 3]),
        (((5, 3), (4, 2)), [1, 1], [1, 1]),
    ],
)
def test_neighbours_are_one_copy(pairs: tuple[tuple[int, int], ...], both: list[int], host: list[int]) -> None:
    """On both sides, or in the host's part alone; in the order given."""
    for columns, lengths in (((KV, HOST), both), ((HOST,), host)):
        parts = list(pieces(moves(*pairs), columns))
        assert [len(part) for part in parts] == lengths
        assert [tuple(pair) for part in parts for pair in part.tolist()] == list(pairs)


@pytest.mark.parametrize("kind", [_OnGpu, _OnCpu])
def test_both_ways_to_copy_are_the_same(kind: type[_OnGpu] | type[_OnCpu]) -> None:
    """What a GPU does, with tensors of the CPU, piece by piece."""
    cache, host = torch.randn(8 * 4, 2, 4), torch.zeros(5 * 4, 2, 4)
    layer, was = kind(cache, host, 4), cache.clone()
    layer.take_out(moves((3, 1), (4, 2), (5, 3)))
    assert torch.equal(host[4:16], was[12:24]) and not host[:4].any()
    cache.zero_()
    layer.bring_back(moves((6, 2), (7, 3)))
    assert torch.equal(cache[24:], was[16:24]) and not cache[:24].any()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "int8"), (torch.float32, "fp8")],
)
def test_blocks_come_back_to_other_places_bit_for_bit(dtype: torch.dtype, kind: str) -> None:
    """Every layer, K and V and the scales of both, every plane. Blocks that were not asked for stay what they are, and so does the host's copy
    until it is written again; copies are made in the order asked for, those to the host first."""
    torch.manual_seed(0)
    geometry = CacheGeometry(12, 4, 4, 2, 8, PLANES, dtype, torch.device("cpu"), kv_cache_dtype=KVCacheDtype(kind))
    backend = SdpaAttention(geometry)
    caches = [cache for layer in range(len(PLANES)) for cache in backend.memory(layer)]
    assert len(caches) == len(PLANES) * (2 if kind == "auto" else 4)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape).abs() * 50)
    before = [cache.clone() for cache in caches]
    host = HostKV(backend, 6)
    host.move(moves((9, 5), (3, 2), (4, 3), (9, 0), (2, 1), (9, 1)), moves())
    for cache in caches:
        cache[cache.shape[0] // 12 * 3 : cache.shape[0] // 12 * 5] = 7.0  # blocks 3 and 4
    host.move(moves((5, 0)), moves((2, 7), (3, 8), (0, 10)))
    for cache, old in zip(caches, before, strict=True):
        planes = cache.shape[0] // 12
        now, was = cache.view(12, planes, *cache.shape[1:]), old.view(12, planes, *old.shape[1:])
        for block, source in ((7, 3), (8, 4), (10, 5), (5, 5), (9, 9), (11, 11)):
            assert torch.equal(now[block], was[source])
