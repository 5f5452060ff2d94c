"""FlashAttention 2 and 3 behind one pair of calls; the only place that knows their argument names.

Both attend causally, aligned to the end of the keys, which is what a chunk behind a cached prefix needs. ``num_splits=0``
lets the library choose. Sources: the public signatures of ``flash_attn.flash_attn_with_kvcache``,
``flash_attn.flash_attn_varlen_func`` (2.8) and ``flash_attn_interface.flash_attn_with_kvcache`` (3).
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from depthbatch.worker.attention.backend import PrefillRows


class FlashLibrary(Protocol):
    """Paged attention over caches [blocks, block_size, Hkv, Dh] with int32 physical block tables."""

    @property
    def block_size(self) -> int:
        """Tokens a page."""
        ...

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, contexts: Tensor, table: Tensor, window: int
    ) -> Tensor:
        """q [B, H, Dh], contexts int32 [B] (tokens to attend to), table [B, max_blocks] -> [B, H, Dh].

        window: the last tokens that a query sees, itself included; 0: all.
        """
        ...

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: PrefillRows, table: Tensor, window: int
    ) -> Tensor:
        """q [N, H, Dh] packed by rows.cu_lengths, table [n_seqs, max_blocks] -> [N, H, Dh]."""
        ...


class FlashAttention2(NamedTuple):
    """The ``flash_attn`` package. Pages must be a multiple of 256 tokens."""

    with_kvcache: Callable[..., Any]
    varlen: Callable[..., Any]
    block_size: int = 256

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, contexts: Tensor, table: Tensor, window: int
    ) -> Tensor:
        return decode_one(self.with_kvcache, q, k_cache, v_cache, contexts, window, block_table=table)

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: PrefillRows, table: Tensor, window: int
    ) -> Tensor:
        out: Tensor = self.varlen(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=rows.cu_lengths,
            cu_seqlens_k=context_offsets(rows),
            max_seqlen_q=max(rows.lengths_host),
            max_seqlen_k=max(s + n for s, n in zip(rows.starts_host, rows.lengths_host, strict=True)),
            causal=True,
            block_table=table,
            window_size=window_size(window),
        )
        return out


class FlashAttention3(NamedTuple):
    """The ``flash_attn_interface`` package (Hopper). Any page size; one call for decode and prefill."""

    with_kvcache: Callable[..., Any]
    block_size: int = 16

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, contexts: Tensor, table: Tensor, window: int
    ) -> Tensor:
        return decode_one(self.with_kvcache, q, k_cache, v_cache, contexts, window, page_table=table)

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: PrefillRows, table: Tensor, window: int
    ) -> Tensor:
        out: Tensor = self.with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=rows.starts + rows.lengths,
            page_table=table,
            cu_seqlens_q=rows.cu_lengths,
            max_seqlen_q=max(rows.lengths_host),
            causal=True,
            window_size=window_size(window),
        )
        return out


def decode_one(
    with_kvcache: Callable[..., Any],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    contexts: Tensor,
    window: int,
    **table: Tensor,
) -> Tensor:
    """One query token a sequence; ``table`` under the name that the library has for it."""
    options = {"cache_seqlens": contexts, "causal": True, "window_size": window_size(window)}
    out: Tensor = with_kvcache(q.unsqueeze(1), k_cache, v_cache, **options, **table)
    return out.squeeze(1)


def window_size(window: int) -> tuple[int, int]:
    """Keys to the left and right of the query's own, as the libraries count them; -1: all."""
    return (window - 1, 0) if window else (-1, -1)


def context_offsets(rows: PrefillRows) -> Tensor:
    """Exclusive prefix sum of each sequence's context (cached part and chunk), int32 [n_seqs + 1]."""
    return torch.nn.functional.pad(torch.cumsum(rows.starts + rows.lengths, 0, dtype=torch.int32), (1, 0))


def find_flash_library() -> FlashLibrary | None:
    """The best FlashAttention that is installed and fits the current GPU, or None."""
    if find_spec("flash_attn_interface") is not None and torch.cuda.get_device_capability() == (9, 0):
        return FlashAttention3(import_module("flash_attn_interface").flash_attn_with_kvcache)
    if find_spec("flash_attn") is not None:
        module = import_module("flash_attn")
        return FlashAttention2(module.flash_attn_with_kvcache, module.flash_attn_varlen_func)
    return None
