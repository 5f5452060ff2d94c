"""Reference twins of the FlashAttention calls: the documented signatures and semantics in plain torch.

Each refuses what the real library refuses (type, device, page size, strides), so that a wrong call fails here and not
on a GPU. On fake tensors that is all they do: the output has the shape, type and device of the real one. Sources: docstrings of flash-attn 2.8 and of FlashAttention 3's flash_attn_interface.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def _check(q: Tensor, k_cache: Tensor, table: Tensor, page_multiple: int, *int32: Tensor) -> None:
    assert all(tensor.device == q.device for tensor in (k_cache, table, *int32)), "all tensors on one device"
    assert q.dtype in (torch.bfloat16, torch.float16), f"FlashAttention only supports fp16 and bf16, not {q.dtype}"
    assert k_cache.dtype == q.dtype
    assert q.stride(-1) == 1 and k_cache.stride(-1) == 1, "last dimension must be contiguous"
    assert k_cache.shape[1] % page_multiple == 0, f"paged KV block size must be divisible by {page_multiple}"
    assert q.shape[-2] % k_cache.shape[2] == 0, "query heads must be a multiple of key heads"
    assert table.dtype == torch.int32 and table.stride(-1) == 1
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in int32)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    contexts: list[int],
    lengths: list[int],
    window_size: tuple[int, int],
) -> Tensor:
    """Packed q [N, H, Dh], causal from the end of each context."""
    outs, begin = [], 0
    for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        k, v = (c[table[row].long()].flatten(0, 1)[:context].float() for c in (k_cache, v_cache))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin : begin + length].float(), k) * q.shape[-1] ** -0.5
        seen = torch.ones(length, context, dtype=torch.bool).tril(context - length)
        if window_size[0] >= 0:
            seen = seen.triu(context - length - window_size[0])
        hidden = seen.logical_not()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        begin += length
    return torch.cat(outs).to(q.dtype)


def flash2_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash_attn.flash_attn_with_kvcache, the arguments we use: q [B, 1, H, Dh]."""
    _check(q, k_cache, block_table, 256, cache_seqlens)
    assert q.shape[1] == 1 and causal and cache_seqlens.shape == q.shape[:1] == block_table.shape[:1]
    if isinstance(q, FakeTensor):
        return torch.empty_like(q)
    contexts = cache_seqlens.tolist()
    return _attend(q.squeeze(1), k_cache, v_cache, block_table, contexts, [1] * len(contexts), window_size).unsqueeze(1)


def flash2_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    block_table: Tensor,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash_attn.flash_attn_varlen_func with paged keys."""
    _check(q, k, block_table, 256, cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_q.shape == cu_seqlens_k.shape and len(block_table) == len(cu_seqlens_q) - 1
    if isinstance(q, FakeTensor):
        return torch.empty_like(q)
    lengths, contexts = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert causal and max(lengths) <= max_seqlen_q and max(contexts) <= max_seqlen_k and sum(lengths) == q.shape[0]
    return _attend(q, k, v, block_table, contexts, lengths, window_size)


def flash3_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    causal: bool,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash_attn_interface.flash_attn_with_kvcache: q [B, 1, H, Dh], or packed [N, H, Dh] with cu_seqlens_q."""
    _check(q, k_cache, page_table, 1, cache_seqlens)
    assert causal and len(page_table) == len(cache_seqlens)
    assert cu_seqlens_q is not None or (q.dim() == 4 and q.shape[1] == 1 and len(q) == len(cache_seqlens))
    if isinstance(q, FakeTensor):
        return torch.empty_like(q)
    contexts = cache_seqlens.tolist()
    if cu_seqlens_q is None:
        return _attend(
            q.squeeze(1), k_cache, v_cache, page_table, contexts, [1] * len(contexts), window_size
        ).unsqueeze(1)
    lengths = cu_seqlens_q.diff().tolist()
    assert cu_seqlens_q.dtype == torch.int32 and max_seqlen_q is not None and max(lengths) <= max_seqlen_q
    return _attend(q, k_cache, v_cache, page_table, contexts, lengths, window_size)
