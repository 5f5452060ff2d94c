"""Reference twin of worker/attention/triton_decode.py: the same two calls in plain torch, without a host read.

Stands in where Triton cannot run: on fake tensors, and on tapes. Refuses what the kernels would read wrongly: other
types than int32, strides they do not know, another device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.backend import DecodeRows
from depthbatch.worker.attention.kv_quantization import SCALE_TYPE, Quantized, dequantize, quantize


def _check(
    rows: DecodeRows, num_planes: int, heads: tuple[Tensor, ...], memory: tuple[Tensor, ...], kind: KVCacheDtype
) -> None:
    table = rows.block_tables
    device = table.device
    for vector in (rows.slots, rows.positions, rows.planes):
        assert vector.dtype == torch.int32 and vector.stride() == (1,) and vector.device == device
        assert vector.shape == heads[0].shape[:1]
    assert table.dtype == torch.int32 and table.stride(1) == 1
    assert num_planes >= 1
    assert len(memory) == (4 if kind.is_quantized else 2)
    caches, scales = memory[:2], memory[2:]
    for cache, scale in zip(caches, scales, strict=False):
        assert scale.is_contiguous() and scale.shape == cache.shape[:-1] and scale.device == device
        assert scale.dtype == SCALE_TYPE and cache.dtype == torch.uint8
    for cache in caches:
        assert cache.is_contiguous() and cache.device == device
        assert cache.shape[1] & (cache.shape[1] - 1) == 0, "Triton ranges have powers of two"
        assert cache.shape[0] % num_planes == 0
    for tensor in heads:
        assert tensor.dim() == 3 and tensor.device == device
        assert kind.is_quantized or tensor.dtype == caches[0].dtype


def _physical(rows: DecodeRows, num_planes: int) -> Tensor:
    """int64 [B, max_blocks]"""
    table = rows.block_tables.index_select(0, rows.slots).long()
    return table * num_planes + rows.planes.unsqueeze(1)


def append_kv(
    k: Tensor, v: Tensor, memory: tuple[Tensor, ...], rows: DecodeRows, num_planes: int, kind: KVCacheDtype
) -> None:
    _check(rows, num_planes, (k, v), memory, kind)
    size = memory[0].shape[1]
    columns = torch.div(rows.positions, size, rounding_mode="floor").long()
    blocks = _physical(rows, num_planes).gather(1, columns.unsqueeze(1)).squeeze(1)
    flat = blocks * size + rows.positions.long() % size
    stored = (k, v)
    if kind.is_quantized:
        (k_codes, k_scales), (v_codes, v_scales) = quantize(k, kind), quantize(v, kind)
        stored = (k_codes, v_codes, k_scales, v_scales)
    for cache, value in zip(memory, stored, strict=True):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, flat, value)


def decode_attention(
    q: Tensor, memory: tuple[Tensor, ...], rows: DecodeRows, num_planes: int, window: int, kind: KVCacheDtype
) -> Tensor:
    _check(rows, num_planes, (q,), memory, kind)
    blocks = _physical(rows, num_planes)
    taken = [
        cache.index_select(0, blocks.flatten()).view(len(q), -1, *cache.shape[2:]).transpose(1, 2) for cache in memory
    ]
    keys, values = taken[:2]  # [B, Hkv, T, Dh]
    if kind.is_quantized:
        keys, values = (dequantize(Quantized(c, s), kind) for c, s in zip(taken[:2], taken[2:], strict=True))
    places = torch.arange(keys.shape[2], device=q.device)
    seen = places <= rows.positions.unsqueeze(1)
    if window:
        seen &= places > rows.positions.unsqueeze(1) - window
    values = torch.where(seen[:, None, :, None], values, 0.0)  # unwritten memory may hold anything
    grouped = q.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(
        q.to(keys.dtype).unsqueeze(2), keys, values, attn_mask=seen[:, None, None], enable_gqa=grouped
    )
    return out.squeeze(2).to(q.dtype)
