"""The attention interface: paged decode, packed prefill, copies between planes.

Semantics of ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func``. Block size and cache layout belong to the
backend. Cache layer ``l`` has ``num_blocks * planes[l]`` physical blocks; the one a row uses is
``block_table[slot, position // block_size] * planes[l] + plane``, with plane 0 where ``planes[l] == 1``.
Block 0 and slot 0 are dummies: padding rows read and write them, and nobody looks.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch


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


class AttentionBackend(ABC):
    """Owns the KV memory in its own layout."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self.geometry = geometry

    @abstractmethod
    def decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        """Appends k, v [B, Hkv, Dh] at each row's position, attends q [B, H, Dh] to positions 0..position -> [B, H*Dh]."""

    @abstractmethod
    def prefill(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PrefillRows) -> torch.Tensor:
        """Appends k, v [N, Hkv, Dh], attends causally within each sequence (cached part included) -> [N, H*Dh]."""

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
