"""The oracle backend: gathers each row's context and calls torch's scaled_dot_product_attention.

Runs on any device and type, fake tensors included: shapes depend on host values only (off the CPU the whole block
table is gathered). Slow by design; every faster backend is tested against it.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry, DecodeRows, PrefillRows


class SdpaAttention(AttentionBackend):
    """K and V of layer l: [num_blocks * planes[l], Hkv, block_size, Dh]."""

    def __init__(self, geometry: CacheGeometry) -> None:
        super().__init__(geometry, cache_shapes(geometry), partial(torch.zeros, device=geometry.device))

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: DecodeRows) -> Tensor:
        """See the interface; the mask is the only thing that differs between rows of unequal length."""
        positions = rows.positions.long()
        tables = rows.block_tables.index_select(0, rows.slots)  # [B, max_blocks]
        self._append(layer, k, v, tables, positions, rows.planes)
        if q.device.type == "cpu":
            tables = tables[:, : int(positions.max()) // self.geometry.block_size + 1]
        keys, values = self._gather(layer, tables, rows.planes)
        places = torch.arange(keys.shape[2], device=q.device)
        visible = places <= positions[:, None]  # [B, T]
        if window := self.geometry.window(layer):
            visible &= places > positions[:, None] - window
        out = F.scaled_dot_product_attention(
            q.to(keys.dtype).unsqueeze(2), keys, values, attn_mask=visible[:, None, None], enable_gqa=self._grouped
        )
        return out.to(q.dtype).reshape(q.shape[0], -1)

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: PrefillRows) -> Tensor:
        """See the interface; one sequence after the other."""
        token_tables = rows.block_tables.index_select(0, rows.token_slots)  # [N, max_blocks]
        planes = torch.full_like(rows.token_slots, rows.plane)
        self._append(layer, k, v, token_tables, rows.positions.long(), planes)
        sequence_tables = rows.block_tables.index_select(0, rows.slots)
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        begin = 0
        for index, (start, length) in enumerate(zip(rows.starts_host, rows.lengths_host, strict=True)):
            blocks = -(-(start + length) // self.geometry.block_size)
            table, plane = sequence_tables[index : index + 1, :blocks], planes[:1]
            keys, values = (x[:, :, : start + length] for x in self._gather(layer, table, plane))
            mask = torch.ones(length, start + length, dtype=torch.bool, device=q.device).tril(start)
            if window := self.geometry.window(layer):
                mask = mask.triu(start - window + 1)
            query = q[begin : begin + length].to(keys.dtype).transpose(0, 1).unsqueeze(0)  # [1, H, L, Dh]
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=self._grouped)
            out[begin : begin + length] = attended[0].transpose(0, 1).reshape(length, -1)
            begin += length
        return out

    def copy_planes(
        self, slots: Tensor, positions: Tensor, source: Tensor, first: Tensor, end: Tensor, block_tables: Tensor
    ) -> None:
        """See the interface; rows with nothing to do write to the dummy block."""
        positions = positions.long()
        offsets = positions % self.geometry.block_size
        blocks = self._logical_blocks(block_tables.index_select(0, slots), positions)
        for layer, planes in enumerate(self.geometry.planes):
            if planes == 1:
                continue
            for cache in self.memory(layer):
                copied = cache[blocks * planes + source, :, offsets]
                for plane in range(planes):
                    wanted = (first <= plane) & (plane < end)
                    cache[torch.where(wanted, blocks * planes + plane, 0), :, offsets] = copied

    @property
    def _grouped(self) -> bool:
        return self.geometry.num_heads != self.geometry.num_kv_heads

    def _logical_blocks(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Block of each position; tables [N, max_blocks], positions int64 [N] -> int64 [N]."""
        return tables.gather(1, (positions // self.geometry.block_size)[:, None])[:, 0].long()

    def _append(self, layer: int, k: Tensor, v: Tensor, tables: Tensor, positions: Tensor, planes: Tensor) -> None:
        blocks = self._logical_blocks(tables, positions)
        num_planes = self.geometry.planes[layer]
        physical = blocks * num_planes + (planes if num_planes > 1 else 0)
        offsets = positions % self.geometry.block_size
        for cache, value in zip(self.memory(layer), self.stored(k, v), strict=True):
            cache[physical, :, offsets] = value

    def _gather(self, layer: int, tables: Tensor, planes: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the context of every row, tables [B, blocks] -> [B, Hkv, blocks * block_size, Dh] each."""
        num_planes = self.geometry.planes[layer]
        physical = tables * num_planes + (planes[:, None] if num_planes > 1 else 0)
        taken = [
            cache.index_select(0, physical.flatten()).view(*tables.shape, *cache.shape[1:])  # [B, blocks, Hkv, bs, ...]
            for cache in self.memory(layer)
        ]
        return self.widened([x.transpose(1, 2).flatten(2, 3) for x in taken])


def cache_shapes(geometry: CacheGeometry) -> list[tuple[int, int, int, int]]:
    """Shape of K, and of V, of every layer."""
    g = geometry
    return [(g.num_blocks * planes, g.num_kv_heads, g.block_size, g.head_dim) for planes in g.planes]
