"""Attention on a GPU over one paged cache layout: FlashAttention 3, FlashAttention 2, or our Triton decode.

K and V of layer l are ``[num_blocks * planes[l], block_size, Hkv, Dh]``, the layout all three read. A stage holds one
DecodeRows (or PrefillRows) object for all its layers, so block tables and places in the cache are made once a stage and
kept while that object is the current one. Nothing here asks the device for a value.
"""

from abc import abstractmethod
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry, DecodeRows, PrefillRows
from depthbatch.worker.attention.flash_library import FlashLibrary


class Places(NamedTuple):
    """Where tokens lie in a layer's cache, each int64 [N]."""

    blocks: Tensor  # physical
    offsets: Tensor  # within the block


class PagedAttention(AttentionBackend):
    """What the GPU backends share: the caches, appending, copies between planes, physical block tables."""

    def __init__(self, geometry: CacheGeometry) -> None:
        shapes = [
            (geometry.num_blocks * planes, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
            for planes in geometry.planes
        ]
        super().__init__(geometry, shapes, partial(torch.zeros, device=geometry.device))
        self._rows: object = None
        self._tables: dict[int, Tensor] = {}  # of the current rows, by planes of the layer
        self._places: dict[int, Places] = {}

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: DecodeRows) -> Tensor:
        """See the interface."""
        self._append(layer, k, v, self._places_of(rows, self.geometry.planes[layer]))
        return self._attend_decode(layer, q, rows).flatten(1)

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: PrefillRows) -> Tensor:
        """See the interface."""
        self._append(layer, k, v, self._places_of(rows, self.geometry.planes[layer]))
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
            for cache in self.memory(layer):
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

    def _append(self, layer: int, k: Tensor, v: Tensor, places: Places) -> None:
        for cache, value in zip(self.memory(layer), self.stored(k, v), strict=True):
            cache.index_put_(places, value)

    def _logical_blocks(self, block_tables: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Block of each position, int64 [N]."""
        columns = torch.div(positions, self.geometry.block_size, rounding_mode="floor")
        return block_tables[slots.long(), columns.long()].long()

    def _set_rows(self, rows: DecodeRows | PrefillRows) -> None:
        """Forgets what was made for other rows."""
        if self._rows is not rows:
            self._rows, self._tables, self._places = rows, {}, {}

    def _places_of(self, rows: DecodeRows | PrefillRows, num_planes: int) -> Places:
        """Where the rows' own tokens go."""
        self._set_rows(rows)
        if num_planes not in self._places:
            slots = rows.slots if isinstance(rows, DecodeRows) else rows.token_slots
            blocks = self._logical_blocks(rows.block_tables, slots, rows.positions)
            if num_planes > 1:
                blocks = blocks * num_planes + (rows.planes if isinstance(rows, DecodeRows) else rows.plane)
            self._places[num_planes] = Places(blocks, rows.positions.long() % self.geometry.block_size)
        return self._places[num_planes]

    def _physical_table(self, rows: DecodeRows | PrefillRows, num_planes: int) -> Tensor:
        """Physical block tables of the rows' sequences, int32 [rows, max_blocks]."""
        self._set_rows(rows)
        if num_planes not in self._tables:
            table = rows.block_tables.index_select(0, rows.slots)
            if num_planes > 1:
                table = table * num_planes + (rows.planes[:, None] if isinstance(rows, DecodeRows) else rows.plane)
            self._tables[num_planes] = table.int()
        return self._tables[num_planes]


class FlashAttention(PagedAttention):
    """FlashAttention 2 or 3, whichever ``library`` binds."""

    def __init__(self, geometry: CacheGeometry, library: FlashLibrary) -> None:
        super().__init__(geometry)
        self._library = library

    def _attend_decode(self, layer: int, q: Tensor, rows: DecodeRows) -> Tensor:
        table = self._physical_table(rows, self.geometry.planes[layer])
        return self._library.decode(
            q, self.k_cache[layer], self.v_cache[layer], rows.positions + 1, table, self.geometry.window(layer)
        )

    def _attend_prefill(self, layer: int, q: Tensor, rows: PrefillRows) -> Tensor:
        table = self._physical_table(rows, self.geometry.planes[layer])
        return self._library.prefill(
            q, self.k_cache[layer], self.v_cache[layer], rows, table, self.geometry.window(layer)
        )


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
        self._kernels.append_kv(k, v, self.memory(layer), rows, num_planes, self.kind)
        return self._attend_decode(layer, q, rows).flatten(1)

    def _attend_decode(self, layer: int, q: Tensor, rows: DecodeRows) -> Tensor:
        planes, window = self.geometry.planes[layer], self.geometry.window(layer)
        return self._kernels.decode_attention(q, self.memory(layer), rows, planes, window, self.kind)

    def _attend_prefill(self, layer: int, q: Tensor, rows: PrefillRows) -> Tensor:
        table = self._physical_table(rows, self.geometry.planes[layer])
        grouped = self.geometry.num_heads != self.geometry.num_kv_heads
        outs, begin = [], 0
        for index, (start, length) in enumerate(zip(rows.starts_host, rows.lengths_host, strict=True)):
            context = start + length
            blocks = table[index, : -(-context // self.geometry.block_size)]
            taken = [cache.index_select(0, blocks).flatten(0, 1)[:context] for cache in self.memory(layer)]
            keys, values = (x.to(q.dtype).transpose(0, 1).unsqueeze(0) for x in self.widened(taken))
            # each [1, Hkv, context, Dh]
            query = q[begin : begin + length].transpose(0, 1).unsqueeze(0)
            bias: Tensor | None = None
            if window := self.geometry.window(layer):
                bias = (
                    torch.ones(length, context, dtype=torch.bool, device=q.device).tril(start).triu(start - window + 1)
                )
            elif start:
                # here, for it brings torch's compiler: seconds of every start
                from torch.nn.attention.bias import causal_lower_right

                bias = causal_lower_right(length, context)
            out = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped
            )
            outs.append(out[0].transpose(0, 1))
            begin += length
        return torch.cat(outs)
