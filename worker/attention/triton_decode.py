"""Paged decode attention in Triton: split-KV flash decoding over rows at different planes of one cache.

Portable (Ampere and newer, nothing to build), used where no FlashAttention is installed. Three launches a layer, all
with shapes fixed by (rows, heads, splits), so a captured graph replays them at any context length:

    append    grid [B]               k, v of each row -> its physical block
    partial   grid [B, Hkv, splits]  online softmax over the split's share of the row's blocks
    combine   grid [B, H]            merges the splits

Cache layout: K and V ``[physical blocks, block_size, Hkv, Dh]``; the physical block is
``block_tables[slot, j] * num_planes + plane``. Quantised K and V (kv_quantization.py) are bytes with scales
``[physical blocks, block_size, Hkv]`` beside them; codes are made and read in plain arithmetic, which every GPU has.
Runs on a CPU under ``TRITON_INTERPRET=1``.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# (kernels are typed by Triton, at launch)

import torch
import triton
import triton.language as tl

from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.backend import DecodeRows, heads_together

SPLITS = 8  # shares of a row's context: enough to fill a GPU at one row, cheap to merge
KINDS = {KVCacheDtype.AUTO: 0, KVCacheDtype.INT8: 1, KVCacheDtype.FP8: 2}  # KIND in the kernels


@triton.jit
def _to_whole(x):
    # The nearest whole number below 2^22, ties to even: what the sum cannot hold is rounded off.
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def _scale(x, KIND: tl.constexpr):
    # x fp32 [lanes] -> the bits of a bfloat16, see kv_quantization.py. As whole numbers a NaN is above all else, and gets
    # through.
    highest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0).to(tl.float32, bitcast=True)
    most = 127.0 if KIND == 1 else 448.0
    bits = tl.div_rn(highest, most).to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(highest == highest, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _widen(scale):
    # The bits of a bfloat16 -> fp32
    return (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, scale, KIND: tl.constexpr):
    # x fp32 [lanes] -> uint8
    divisor = _widen(scale)
    usable = (divisor >= 1.1754943508222875e-38) & (divisor <= 3.4028234663852886e38)
    quotient = tl.where(usable, tl.div_rn(x, tl.where(usable, divisor, 1.0)), 0.0)
    if KIND == 1:
        return _to_whole(quotient).to(tl.uint8)
    signed = quotient.to(tl.int32, bitcast=True)
    bits = signed & 0x7FFFFFFF
    size = bits.to(tl.float32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponents count from 7, not from 127
    code = tl.where(size < 0.015625, _to_whole(size * 512.0), normal)
    return (((signed >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def _decode(codes, KIND: tl.constexpr):
    # What the cache holds -> fp32, without its scale.
    if KIND == 0:
        return codes.to(tl.float32)
    if KIND == 1:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    wide = codes.to(tl.int16)  # a half has one bit of exponent more: the same number over 256
    half = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _append(
    k, v, k_cache, v_cache, slots, positions, planes, block_tables, k_stride, v_stride, table_stride, num_planes,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot, position, plane = tl.load(slots + row), tl.load(positions + row), tl.load(planes + row)
    block = tl.load(block_tables + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE)
    physical = block.to(tl.int64) * num_planes + plane
    lane = tl.arange(0, WIDTH)  # the row's [Hkv * Dh] values, side by side in both
    live = lane < HEADS * DIM
    target = (physical * BLOCK_SIZE + position % BLOCK_SIZE) * HEADS * DIM + lane
    tl.store(k_cache + target, tl.load(k + row * k_stride + lane, mask=live), mask=live)
    tl.store(v_cache + target, tl.load(v + row * v_stride + lane, mask=live), mask=live)


@triton.jit
def _append_quantized(
    k, v, k_cache, v_cache, k_scales, v_scales, slots, positions, planes, block_tables,
    k_stride, v_stride, table_stride, num_planes,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    slot, position, plane = tl.load(slots + row), tl.load(positions + row), tl.load(planes + row)
    block = tl.load(block_tables + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE)
    vector = ((block.to(tl.int64) * num_planes + plane) * BLOCK_SIZE + position % BLOCK_SIZE) * HEADS + head
    dims = tl.arange(0, DIM_PAD)
    live = dims < DIM
    key = tl.load(k + row * k_stride + head * DIM + dims, mask=live, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_stride + head * DIM + dims, mask=live, other=0.0).to(tl.float32)
    k_scale, v_scale = _scale(key, KIND), _scale(value, KIND)
    tl.store(k_scales + vector, k_scale)
    tl.store(v_scales + vector, v_scale)
    tl.store(k_cache + vector * DIM + dims, _encode(key, k_scale, KIND), mask=live)
    tl.store(v_cache + vector * DIM + dims, _encode(value, v_scale, KIND), mask=live)


@triton.jit
def _partial(
    q, k_cache, v_cache, k_scales, v_scales, slots, positions, planes, block_tables, part_out, part_max, part_sum,
    q_stride, table_stride, num_planes, window, scale,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, plane = tl.load(slots + row).to(tl.int64), tl.load(planes + row)
    context = tl.load(positions + row) + 1
    blocks = tl.cdiv(context, BLOCK_SIZE)
    share = tl.cdiv(blocks, SPLITS)
    unseen = tl.where(window > 0, tl.maximum(context - window, 0), 0)  # tokens before the window
    first = tl.maximum(split * share, unseen // BLOCK_SIZE)
    end = tl.minimum(split * share + share, blocks)

    dims = tl.arange(0, DIM_PAD)
    members = tl.arange(0, GROUP_PAD)
    offsets = tl.arange(0, BLOCK_SIZE)
    live_dims = dims < DIM
    live_q = (members[:, None] < GROUP) & live_dims[None, :]
    heads = kv_head * GROUP + members
    q_index = row * q_stride + heads[:, None] * DIM + dims[None, :]
    q_rows = tl.load(q + q_index, mask=live_q, other=0.0).to(tl.float32) * scale  # [G, Dh]

    highest = tl.full([GROUP_PAD], -1e30, tl.float32)  # finite: an empty split must not make NaN
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for j in range(first, end):
        block = tl.load(block_tables + slot * table_stride + j)
        vectors = ((block.to(tl.int64) * num_planes + plane) * BLOCK_SIZE + offsets) * HEADS + kv_head  # [block]
        index = vectors[:, None] * DIM + dims[None, :]
        k_tile = _decode(tl.load(k_cache + index, mask=live_dims[None, :], other=0), KIND)  # [block, Dh]
        v_tile = _decode(tl.load(v_cache + index, mask=live_dims[None, :], other=0), KIND)
        seen = (j * BLOCK_SIZE + offsets < context) & (j * BLOCK_SIZE + offsets >= unseen)
        scores = tl.sum(q_rows[:, None, :] * k_tile[None, :, :], axis=2)  # [G, block]
        if KIND != 0:
            scores = scores * _widen(tl.load(k_scales + vectors))[None, :]
            v_tile = v_tile * _widen(tl.load(v_scales + vectors))[:, None]
        scores = tl.where(seen[None, :], scores, -1e30)
        v_tile = tl.where(seen[:, None], v_tile, 0.0)  # unwritten memory may hold NaN
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp(highest - new_highest)
        weights = tl.exp(scores - new_highest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * v_tile[None, :, :], axis=1)
        highest = new_highest
    part = (row * HEADS * GROUP + heads) * SPLITS + split
    tl.store(part_out + part[:, None] * DIM + dims[None, :], acc, mask=live_q)
    tl.store(part_max + part, highest, mask=members < GROUP)
    tl.store(part_sum + part, total, mask=members < GROUP)


@triton.jit
def _combine(
    part_out, part_max, part_sum, out,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0) * NUM_HEADS + tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM_PAD)
    live = dims < DIM
    highs = tl.load(part_max + row_head * SPLITS + splits)
    weights = tl.exp(highs - tl.max(highs, axis=0))
    total = tl.sum(weights * tl.load(part_sum + row_head * SPLITS + splits), axis=0)
    index = (row_head * SPLITS + splits[:, None]) * DIM + dims[None, :]
    parts = tl.load(part_out + index, mask=live[None, :], other=0.0)
    merged = tl.sum(parts * weights[:, None], axis=0) / total
    tl.store(out + row_head * DIM + dims, merged.to(out.dtype.element_ty), mask=live)


def _bits(memory: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The scales as the kernels take them."""
    return tuple(scales.view(torch.int16) for scales in memory[2:])


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    memory: tuple[torch.Tensor, ...],
    rows: DecodeRows,
    num_planes: int,
    kind: KVCacheDtype,
) -> None:
    """Writes k, v [B, Hkv, Dh] at each row's position. memory: K, V [blocks * planes, block_size, Hkv, Dh] and, where they
    are quantised, the scales of both."""
    batch, heads, dim = k.shape
    k, v = heads_together(k), heads_together(v)
    k_cache, v_cache = memory[:2]
    if kind.is_quantized:
        _append_quantized[(batch, heads)](
            k, v, k_cache, v_cache, *_bits(memory), rows.slots, rows.positions, rows.planes, rows.block_tables,
            k.stride(0), v.stride(0), rows.block_tables.stride(0), num_planes,
            BLOCK_SIZE=k_cache.shape[1], HEADS=heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), KIND=KINDS[kind],
        )  # fmt: skip
        return
    _append[(batch,)](
        k, v, k_cache, v_cache, rows.slots, rows.positions, rows.planes, rows.block_tables,
        k.stride(0), v.stride(0), rows.block_tables.stride(0), num_planes,
        BLOCK_SIZE=k_cache.shape[1], HEADS=heads, DIM=dim, WIDTH=triton.next_power_of_2(heads * dim),
    )  # fmt: skip


def decode_attention(
    q: torch.Tensor,
    memory: tuple[torch.Tensor, ...],
    rows: DecodeRows,
    num_planes: int,
    window: int,
    kind: KVCacheDtype,
) -> torch.Tensor:
    """q [B, H, Dh] attends to positions 0..position of its row -> [B, H, Dh] in q's dtype, fp32 inside.

    memory: as of append_kv. window: the last of the positions that are seen, its own included; 0: all.
    """
    batch, num_heads, dim = q.shape
    k_cache, v_cache = memory[:2]
    k_scales, v_scales = _bits(memory) or (k_cache, v_cache)  # the kernel reads none where there are none
    _, block_size, kv_heads, _ = k_cache.shape
    group, dim_pad = num_heads // kv_heads, triton.next_power_of_2(dim)
    part_out = torch.empty((batch, num_heads, SPLITS, dim), dtype=torch.float32, device=q.device)
    part_max = torch.empty((batch, num_heads, SPLITS), dtype=torch.float32, device=q.device)
    part_sum = torch.empty_like(part_max)
    out = torch.empty((batch, num_heads, dim), dtype=q.dtype, device=q.device)
    q = heads_together(q)
    _partial[(batch, kv_heads, SPLITS)](
        q, k_cache, v_cache, k_scales, v_scales, rows.slots, rows.positions, rows.planes, rows.block_tables,
        part_out, part_max, part_sum, q.stride(0), rows.block_tables.stride(0), num_planes, window, dim**-0.5,
        BLOCK_SIZE=block_size, HEADS=kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group),
        DIM=dim, DIM_PAD=dim_pad, SPLITS=SPLITS, KIND=KINDS[kind],
    )  # fmt: skip
    _combine[(batch, num_heads)](
        part_out, part_max, part_sum, out, NUM_HEADS=num_heads, DIM=dim, DIM_PAD=dim_pad, SPLITS=SPLITS
    )
    return out
