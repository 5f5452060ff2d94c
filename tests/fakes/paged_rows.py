"""Random heads, block tables and packed chunks, to compare attention backends with."""

import torch

from depthbatch.worker.attention.backend import CacheGeometry, PrefillRows

MAX_BLOCKS, SEQUENCES = 6, 4


def shuffled_tables() -> torch.Tensor:
    tables = torch.zeros(SEQUENCES + 1, MAX_BLOCKS, dtype=torch.int32)
    tables[1:] = (torch.randperm(MAX_BLOCKS * SEQUENCES) + 1).view(SEQUENCES, MAX_BLOCKS)
    return tables


def heads(count: int, geometry: CacheGeometry) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as slices of one projection, so that their rows lie apart."""
    queries, kv = geometry.num_heads, geometry.num_kv_heads
    projected = torch.randn(count, queries + 2 * kv, geometry.head_dim).bfloat16()
    return projected[:, :queries], projected[:, queries : queries + kv], projected[:, queries + kv :]


def prefill_rows(starts: tuple[int, ...], lengths: tuple[int, ...], plane: int, tables: torch.Tensor) -> PrefillRows:
    slots = torch.arange(1, len(starts) + 1, dtype=torch.int32)
    sizes = torch.tensor(lengths)
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).int()
    return PrefillRows(
        slots,
        torch.tensor(starts, dtype=torch.int32),
        sizes.int(),
        torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int(),
        slots.repeat_interleave(sizes),
        positions,
        plane,
        tables,
        starts,
        lengths,
    )
