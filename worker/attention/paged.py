"""Attention on a GPU over one paged cache layout: FlashAttention 3, FlashAttention 2, or our Triton decode.

K and V of layer l are ``[num_blocks * planes[l], block_size, Hkv, Dh]``, the layout all three read. A stage holds one
DecodeRows (or PrefillRows) object for all its layers, so the physical block table is made once a stage and kept while
that object is the current one. Nothing here asks the device for a value.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from depthbatch.worker.attention.flash_library import FlashLibrary
from depthbatch.worker.attention.interface import AttentionBackend, CacheGeometry, DecodeRows, PrefillRows
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


class PagedAttention(AttentionBackend):
    """What the GPU backends share: the caches, appending, copies between planes, physical block tables."""

    def __init__(self, geometry: CacheGeometry) -> None:
        super().__init__(geometry)
        shapes = [
            (geometry.num_blocks * planes, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
            for planes in geometry.planes
        ]
        # Zeros, not empty: masked scores times NaN are NaN.
        self.k_cache = [torch.zeros(s, dtype=geometry.dtype, device=geometry.device) for s in shapes]
        self.v_cache = [torch.zeros(s, dtype=geometry.dtype, device=geometry.device) for s in shapes]
        self._tables_of: object = None
        self._tables: dict[tuple[int, int], Tensor] = {}

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: DecodeRows) -> Tensor:
        """See the interface."""
        num_planes = self.geometry.planes[layer]
        blocks = self._logical_blocks(rows.block_tables, rows.slots, rows.positions)
        planes = rows.planes if num_planes > 1 else torch.zeros_like(rows.planes)
        self._append(layer, k, v, blocks * num_planes + planes, rows.positions)
        return self._attend_decode(layer, q, rows).flatten(1)

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: PrefillRows) -> Tensor:
        """See the interface."""
        num_planes = self.geometry.planes[layer]
        plane = rows.plane if num_planes > 1 else 0
        blocks = self._logical_blocks(rows.block_tables, rows.token_slots, rows.positions)
        self._append(layer, k, v, blocks * num_planes + plane, rows.positions)
        return self._attend_prefill(layer, q, rows).flatten(1)

    def copy_planes(
        self, slots: Tensor, positions: Tensor, source: Tensor, first: Tensor, end: Tensor, block_tables: Tensor
    ) -> None:
        """See the interface; rows with nothing to do write to the dummy block."""
        offsets = positions.long() % self.geometry.block_size
        blocks = self._logical_blocks(block_tables, slots, positions)
        for layer, planes in enumerate(self.geometry.planes):
            if planes == 1:
                continue
            for cache in (self.k_cache[layer], self.v_cache[layer]):
                copied = cache[blocks * planes + source, offsets]
                for plane in range(planes):
                    wanted = (first <= plane) & (plane < end)
                    cache[torch.where(wanted, blocks * planes + plane, 0), offsets] = copied

    @abstractmethod
    def _attend_decode(self, layer: int, q: Tensor, rows: DecodeRows) -> Tensor:
        """q [B, H, Dh] -> [B, H, Dh]; the rows' K/V is in the cache."""

    @abstractmethod
    def _attend_prefill(self, layer: int, q: Tensor, rows: PrefillRows) -> Tensor:
        """q [N, H, Dh] -> [N, H, Dh]; the chunks' K/V is in the cache."""

    def _append(self, layer: int, k: Tensor, v: Tensor, physical: Tensor, positions: Tensor) -> None:
        offsets = positions.long() % self.geometry.block_size
        self.k_cache[layer].index_put_((physical, offsets), k)
        self.v_cache[layer].index_put_((physical, offsets), v)

    def _logical_blocks(self, block_tables: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Block of each position, int64 [N]."""
        columns = torch.div(positions, self.geometry.block_size, rounding_mode="floor")
        return block_tables[slots.long(), columns.long()].long()

    def _physical_table(self, rows: DecodeRows | PrefillRows, num_planes: int) -> Tensor:
        """Physical block tables of the rows' sequences, int32 [rows, max_blocks]."""
        if self._tables_of is not rows:
            self._tables_of, self._tables = rows, {}
        plane = rows.plane if isinstance(rows, PrefillRows) else -1
        key = (num_planes, plane)
        if key not in self._tables:
            table = rows.block_tables.index_select(0, rows.slots)
            if num_planes > 1:
                table = table * num_planes + (rows.planes[:, None] if isinstance(rows, DecodeRows) else rows.plane)
            self._tables[key] = table.int()
        return self._tables[key]


class FlashAttention(PagedAttention):
    """FlashAttention 2 or 3, whichever ``library`` binds."""

    def __init__(self, geometry: CacheGeometry, library: FlashLibrary) -> None:
        super().__init__(geometry)
        self._library = library

    def _attend_decode(self, layer: int, q: Tensor, rows: DecodeRows) -> Tensor:
        table = self._physical_table(rows, self.geometry.planes[layer])
        return self._library.decode(q, self.k_cache[layer], self.v_cache[layer], rows.positions + 1, table)

    def _attend_prefill(self, layer: int, q: Tensor, rows: PrefillRows) -> Tensor:
        table = self._physical_table(rows, self.geometry.planes[layer])
        return self._library.prefill(q, self.k_cache[layer], self.v_cache[layer], rows, table)


class TritonAttention(PagedAttention):
    """Our own paged decode; prefill gathers each sequence and uses torch's scaled_dot_product_attention."""

    def __init__(self, geometry: CacheGeometry) -> None:
        from depthbatch.worker.attention import triton_decode  # only where Triton is installed

        super().__init__(geometry)
        self._kernels = triton_decode

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: DecodeRows) -> Tensor:
        """See the interface; append is a kernel too, to spare the index arithmetic of every layer."""
        num_planes = self.geometry.planes[layer]
        if num_planes == 1:
            rows = rows._replace(planes=torch.zeros_like(rows.planes))
        k_cache, v_cache = self.k_cache[layer], self.v_cache[layer]
        self._kernels.append_kv(k, v, k_cache, v_cache, rows, num_planes)
        return self._kernels.decode_attention(q, k_cache, v_cache, rows, num_planes).flatten(1)

    def _attend_decode(self, layer: int, q: Tensor, rows: DecodeRows) -> Tensor:
        return self._kernels.decode_attention(
            q, self.k_cache[layer], self.v_cache[layer], rows, self.geometry.planes[layer]
        )

    def _attend_prefill(self, layer: int, q: Tensor, rows: PrefillRows) -> Tensor:
        table = self._physical_table(rows, self.geometry.planes[layer])
        grouped = self.geometry.num_heads != self.geometry.num_kv_heads
        outs, begin = [], 0
        for index, (start, length) in enumerate(zip(rows.starts_host, rows.lengths_host, strict=True)):
            context = start + length
            blocks = table[index, : -(-context // self.geometry.block_size)]
            keys, values = (
                cache[layer].index_select(0, blocks).flatten(0, 1)[:context].transpose(0, 1).unsqueeze(0)
                for cache in (self.k_cache, self.v_cache)
            )  # each [1, Hkv, context, Dh]
            query = q[begin : begin + length].transpose(0, 1).unsqueeze(0)
            bias = causal_lower_right(length, context) if start else None
            out = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped
            )
            outs.append(out[0].transpose(0, 1))
            begin += length
        return torch.cat(outs)
