"""Reference twin of worker/attention/triton_decode.py: the same two calls in plain torch, without a host read.

Stands in where Triton cannot run: on fake tensors, and on tapes. Refuses what the kernels would read wrongly: other
types than int32, strides they do not know, another device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.worker.attention.backend import DecodeRows


def _check(rows: DecodeRows, num_planes: int, heads: tuple[Tensor, ...], caches: tuple[Tensor, Tensor]) -> None:
    table = rows.block_tables
    device = table.device
    for vector in (rows.slots, rows.positions, rows.planes):
        assert vector.dtype == torch.int32 and vector.stride() == (1,) and vector.device == device
        assert vector.shape == heads[0].shape[:1]
    assert table.dtype == torch.int32 and table.stride(1) == 1
    assert num_planes >= 1
    for cache in caches:
        assert cache.is_contiguous() and cache.device == device
        assert cache.shape[1] & (cache.shape[1] - 1) == 0, "Triton ranges have powers of two"
        assert cache.shape[0] % num_planes == 0
    for tensor in heads:
        assert tensor.dim() == 3 and tensor.device == device and tensor.dtype == caches[0].dtype


def _physical(rows: DecodeRows, num_planes: int) -> Tensor:
    """int64 [B, max_blocks]"""
    table = rows.block_tables.index_select(0, rows.slots).long()
    return table * num_planes + rows.planes.unsqueeze(1)


def append_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: DecodeRows, num_planes: int) -> None:
    _check(rows, num_planes, (k, v), (k_cache, v_cache))
    size = k_cache.shape[1]
    columns = torch.div(rows.positions, size, rounding_mode="floor").long()
    blocks = _physical(rows, num_planes).gather(1, columns.unsqueeze(1)).squeeze(1)
    flat = blocks * size + rows.positions.long() % size
    for cache, value in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, flat, value)


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: DecodeRows, num_planes: int, window: int
) -> Tensor:
    _check(rows, num_planes, (q,), (k_cache, v_cache))
    blocks = _physical(rows, num_planes)
    keys, values = (
        cache.index_select(0, blocks.flatten()).view(len(q), -1, *cache.shape[2:]).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )  # [B, Hkv, T, Dh]
    places = torch.arange(keys.shape[2], device=q.device)
    seen = places <= rows.positions.unsqueeze(1)
    if window:
        seen &= places > rows.positions.unsqueeze(1) - window
    values = torch.where(seen[:, None, :, None], values, 0.0)  # unwritten memory may hold anything
    grouped = q.shape[1] != k_cache.shape[2]
    out = F.scaled_dot_product_attention(
        q.unsqueeze(2), keys, values, attn_mask=seen[:, None, None], enable_gqa=grouped
    )
    return out.squeeze(2).to(q.dtype)
