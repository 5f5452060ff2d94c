"""The attention interface: paged decode, packed prefill, copies between planes.

Semantics of ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func``. Block size and cache layout belong to the
backend. Cache layer ``l`` has ``num_blocks * planes[l]`` physical blocks; the one a row uses is
``block_table[slot, position // block_size] * planes[l] + plane``, with plane 0 where ``planes[l] == 1``.
Block 0 and slot 0 are dummies: padding rows read and write them, and nobody looks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.kv_quantization import SCALE_TYPE, Quantized, dequantize, quantize
from depthbatch.worker.layers import ops
from depthbatch.worker.layers.blocks import BlockStack
from depthbatch.worker.layers.rotary import Rotation


class CacheGeometry(NamedTuple):
    """Size of the KV memory."""

    num_blocks: int  # logical blocks, dummy block 0 included
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    planes: tuple[int, ...]  # per cache layer
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int, ...] = ()  # per cache layer, tokens a query sees, itself included; 0 or no entry: all
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO  # how K and V are stored; ``dtype`` is what is computed with

    def window(self, layer: int) -> int:
        """Tokens that a query of the layer sees; 0: all up to its own."""
        return self.windows[layer] if layer < len(self.windows) else 0


class DecodeRows(NamedTuple):
    """One token a row. All int32, static buffers."""

    slots: torch.Tensor  # [B]
    positions: torch.Tensor  # [B]
    planes: torch.Tensor  # [B]
    block_tables: torch.Tensor  # [num_slots, max_blocks_per_seq], logical blocks


class PrefillRows(NamedTuple):
    """Packed chunks of several sequences; every token runs the same loop, so the plane is one number."""

    slots: torch.Tensor  # [n_seqs] int32
    starts: torch.Tensor  # [n_seqs] int32, position of each chunk's first token
    lengths: torch.Tensor  # [n_seqs] int32
    cu_lengths: torch.Tensor  # [n_seqs + 1] int32, exclusive prefix sum of lengths
    token_slots: torch.Tensor  # [N] int32
    positions: torch.Tensor  # [N] int32
    plane: int
    block_tables: torch.Tensor  # [num_slots, max_blocks_per_seq]
    starts_host: tuple[int, ...]
    lengths_host: tuple[int, ...]


class QKV(NamedTuple):
    """Rotated heads."""

    q: torch.Tensor  # [N, H, Dh]
    k: torch.Tensor  # [N, Hkv, Dh]
    v: torch.Tensor  # [N, Hkv, Dh]


def split_and_rotate(
    qkv: torch.Tensor, geometry: CacheGeometry, rotation: Rotation, qk_bias: torch.Tensor | None = None
) -> QKV:
    """Cuts projections qkv [N, (H + 2 Hkv) * Dh] into heads, adds qk_bias [(H + Hkv) * Dh] to q and k, rotates both."""
    heads, kv_heads, head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    projected = qkv.view(-1, heads + 2 * kv_heads, head_dim)
    qk = projected[:, : heads + kv_heads]
    if qk_bias is not None:
        qk = qk + qk_bias.view(heads + kv_heads, head_dim)
    rotate = ops.rope_interleaved if rotation.interleaved else ops.rope_split_half
    qk = rotate(qk, rotation.cos, rotation.sin)
    return QKV(qk[:, :heads], qk[:, heads:], projected[:, heads + kv_heads :])


def heads_together(x: torch.Tensor) -> torch.Tensor:
    """x [N, H, Dh] with the heads of a row contiguous; rows may be apart, as in a slice of a qkv projection."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class AttentionBackend(ABC):
    """Owns the KV memory in its own layout: of layer ``l`` a tensor each for K and V, whose first dimension is the
    physical block and whose last is the feature. Quantised K and V are uint8 there; their scales are tensors of their own,
    of the same dimensions but for the last, so that whatever moves blocks or tokens moves both alike."""

    def __init__(
        self,
        geometry: CacheGeometry,
        shapes: Sequence[tuple[int, ...]],
        zeros: Callable[..., torch.Tensor],
    ) -> None:
        """``shapes``: of K, and of V, of every layer. Memory starts as ``zeros(shape, dtype=...)``, since a masked score times
        NaN is NaN."""
        self.geometry = geometry
        self.kind = kind = geometry.kv_cache_dtype
        stored = torch.uint8 if kind.is_quantized else geometry.dtype
        self.k_cache, self.v_cache = ([zeros(shape, dtype=stored) for shape in shapes] for _ in "kv")
        scaled = shapes if kind.is_quantized else ()
        self.k_scales, self.v_scales = ([zeros(shape[:-1], dtype=SCALE_TYPE) for shape in scaled] for _ in "kv")

    def memory(self, layer: int) -> tuple[torch.Tensor, ...]:
        """All that is kept of a layer, each with the physical block first: K, V and, where they are quantised, the scales
        of both."""
        caches = (self.k_cache, self.v_cache, self.k_scales, self.v_scales)
        return tuple(cache[layer] for cache in caches if cache)

    def stored(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """k, v [N, Hkv, Dh] as ``memory`` keeps them, in its order."""
        if not self.kind.is_quantized:
            return k, v
        return tuple(
            tensor for pair in zip(quantize(k, self.kind), quantize(v, self.kind), strict=True) for tensor in pair
        )

    def widened(self, taken: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V out of tensors in the order of ``memory``: as they are stored, or in fp32 where they are quantised."""
        if not self.kind.is_quantized:
            return taken[0], taken[1]
        k, v, k_scales, v_scales = taken
        return dequantize(Quantized(k, k_scales), self.kind), dequantize(Quantized(v, v_scales), self.kind)

    @abstractmethod
    def decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        """Appends k, v [B, Hkv, Dh] at each row's position, attends q [B, H, Dh] to positions 0..position -> [B, H*Dh]."""

    @abstractmethod
    def prefill(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PrefillRows) -> torch.Tensor:
        """Appends k, v [N, Hkv, Dh], attends causally within each sequence (cached part included) -> [N, H*Dh]."""

    def decode_qkv(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation, rows: DecodeRows, qk_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``decode`` from unrotated projections qkv [B, (H + 2 Hkv) * Dh] -> [B, H*Dh]; backends may do it in one pass."""
        return self.decode(layer, *split_and_rotate(qkv, self.geometry, rotation, qk_bias), rows)

    def prefill_qkv(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation, rows: PrefillRows, qk_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``prefill`` from unrotated projections qkv [N, (H + 2 Hkv) * Dh] -> [N, H*Dh]."""
        return self.prefill(layer, *split_and_rotate(qkv, self.geometry, rotation, qk_bias), rows)

    def decode_stack(
        self, stack: BlockStack, x: torch.Tensor, rotation: Rotation, rows: DecodeRows
    ) -> torch.Tensor | None:
        """All blocks of ``stack`` on x [B, D] in one pass -> [B, D]; None: this backend has no such pass."""
        return None

    def prefill_stack(
        self, stack: BlockStack, x: torch.Tensor, rotation: Rotation, rows: PrefillRows
    ) -> torch.Tensor | None:
        """The same for packed chunks, x [N, D] -> [N, D] or None."""
        return None

    @abstractmethod
    def copy_planes(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        source: torch.Tensor,
        first: torch.Tensor,
        end: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> None:
        """For each row b and every layer with more than one plane: plane source[b] -> planes first[b] .. end[b]-1.

        All int32 [B]; first >= end means nothing to do. Used when a token exits before r_max (last_exited,
        first_then_shared).
        """
