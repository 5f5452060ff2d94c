"""The CPU backend: one C call a layer appends, rotates and attends, reading the cache where it lies.

Argument structures are built once a layer and once a set of rows, so that a call costs a few microseconds of Python.
Knows nothing of what the kernels do inside; same cache layout as the oracle (sdpa.py).
"""

import ctypes

import torch
from torch import Tensor

from depthbatch.common.errors import ConfigError
from depthbatch.worker.attention.backend import (
    AttentionBackend,
    CacheGeometry,
    DecodeRows,
    PrefillRows,
    heads_together,
)
from depthbatch.worker.attention.cpu_stack import FusedStack, fuse
from depthbatch.worker.attention.sdpa import cache_shapes
from depthbatch.worker.layers.blocks import BlockStack
from depthbatch.worker.layers.cpu.library import Kernels
from depthbatch.worker.layers.cpu.memory import zeros_on_large_pages
from depthbatch.worker.layers.cpu.structs import (
    KV_KINDS,
    ROPE_INTERLEAVED,
    ROPE_NONE,
    ROPE_SPLIT_HALF,
    CallArgs,
    LayerArgs,
    RowArgs,
)
from depthbatch.worker.layers.rotary import Rotation


class CpuAttention(AttentionBackend):
    """K and V of layer l: [num_blocks * planes[l], Hkv, block_size, Dh].

    Raises ConfigError when the kernels cannot take the geometry.
    """

    def __init__(self, geometry: CacheGeometry, kernels: Kernels) -> None:
        if (problem := unsupported(geometry)) is not None:
            raise ConfigError(problem)
        super().__init__(geometry, cache_shapes(geometry), zeros_on_large_pages)
        self.kernels = kernels.by_type[geometry.dtype]
        self._fused: dict[
            int, tuple[BlockStack, FusedStack | None]
        ] = {}  # by id; the stack is kept, so ids stay unique
        self._copy_planes, self.prelude_kernel = kernels.copy_planes, kernels.prelude
        self._layers = (LayerArgs * len(geometry.planes))(*map(self._layer_args, range(len(geometry.planes))))
        self._layer_addresses = [
            ctypes.addressof(self._layers) + i * ctypes.sizeof(LayerArgs) for i in range(len(geometry.planes))
        ]
        looped = [i for i, planes in enumerate(geometry.planes) if planes > 1]
        self.looped_layers = (LayerArgs * len(looped))(*(self._layers[i] for i in looped))
        self._call = CallArgs()
        self._call_address = ctypes.addressof(self._call)
        self._row_args = RowArgs()
        self._row_address = ctypes.addressof(self._row_args)
        self._bound_rows: DecodeRows | PrefillRows | None = None  # the rows that _row_args describes

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: DecodeRows) -> Tensor:
        """See the interface. Rows of equal slot (padding) may overwrite each other's K/V."""
        self._bind_decode(rows)
        return self._attend_heads(layer, q, k, v)

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: PrefillRows) -> Tensor:
        """See the interface."""
        self._bind_prefill(rows)
        return self._attend_heads(layer, q, k, v)

    def decode_qkv(
        self, layer: int, qkv: Tensor, rotation: Rotation, rows: DecodeRows, qk_bias: Tensor | None = None
    ) -> Tensor:
        """See the interface; rotated while it is appended, without an intermediate tensor."""
        self._bind_decode(rows)
        return self._attend_projected(layer, qkv, rotation, qk_bias)

    def prefill_qkv(
        self, layer: int, qkv: Tensor, rotation: Rotation, rows: PrefillRows, qk_bias: Tensor | None = None
    ) -> Tensor:
        """See the interface."""
        self._bind_prefill(rows)
        return self._attend_projected(layer, qkv, rotation, qk_bias)

    def decode_stack(self, stack: BlockStack, x: Tensor, rotation: Rotation, rows: DecodeRows) -> Tensor | None:
        """See the interface: all blocks in one C call."""
        self._bind_decode(rows)
        return self._run_stack(stack, x, rotation)

    def prefill_stack(self, stack: BlockStack, x: Tensor, rotation: Rotation, rows: PrefillRows) -> Tensor | None:
        """See the interface."""
        self._bind_prefill(rows)
        return self._run_stack(stack, x, rotation)

    def copy_planes(
        self, slots: Tensor, positions: Tensor, source: Tensor, first: Tensor, end: Tensor, block_tables: Tensor
    ) -> None:
        """See the interface."""
        rows = RowArgs(
            slots=_int32_address(slots),
            positions=_int32_address(positions),
            block_tables=_int32_address(block_tables),
            table_stride=block_tables.stride(0),
            num_rows=slots.shape[0],
        )
        self._copy_planes(
            ctypes.addressof(self.looped_layers),
            len(self.looped_layers),
            ctypes.addressof(rows),
            _int32_address(source),
            _int32_address(first),
            _int32_address(end),
        )

    def _layer_args(self, layer: int) -> LayerArgs:
        g = self.geometry
        k_cache, v_cache, *scales = (tensor.data_ptr() for tensor in self.memory(layer))
        k_scales, v_scales = scales or (None, None)
        return LayerArgs(
            k_cache=k_cache,
            v_cache=v_cache,
            k_scales=k_scales,
            v_scales=v_scales,
            planes=g.planes[layer],
            num_heads=g.num_heads,
            num_kv_heads=g.num_kv_heads,
            head_dim=g.head_dim,
            block_size=g.block_size,
            window=g.window(layer),
            kind=KV_KINDS[self.kind],
            element_bytes=self.k_cache[layer].element_size(),
            scale=g.head_dim**-0.5,
        )

    def fused(self, stack: BlockStack) -> FusedStack | None:
        """The stack as one C call, where it can be."""
        if (known := self._fused.get(id(stack))) is None:
            known = self._fused[id(stack)] = (stack, fuse(stack, self.geometry, self.kernels, self._layer_addresses))
        return known[1]

    def _run_stack(self, stack: BlockStack, x: Tensor, rotation: Rotation) -> Tensor | None:
        fused = self.fused(stack)
        return None if fused is None else fused.run(x, rotation, self._row_address)

    def _bind_decode(self, rows: DecodeRows) -> None:
        """Describes ``rows`` to the kernels; keeping them alive makes identity a sound test for 'the same rows'."""
        if rows is self._bound_rows:
            return
        args = self._row_args
        args.slots, args.positions = _int32_address(rows.slots), _int32_address(rows.positions)
        args.planes, args.plane = _int32_address(rows.planes), 0
        args.block_tables, args.table_stride = _int32_address(rows.block_tables), rows.block_tables.stride(0)
        args.num_rows, args.rows_share_slots = rows.slots.shape[0], 0
        self._bound_rows = rows

    def _bind_prefill(self, rows: PrefillRows) -> None:
        if rows is self._bound_rows:
            return
        args = self._row_args
        args.slots, args.positions = _int32_address(rows.token_slots), _int32_address(rows.positions)
        args.planes, args.plane = None, rows.plane
        args.block_tables, args.table_stride = _int32_address(rows.block_tables), rows.block_tables.stride(0)
        args.num_rows, args.rows_share_slots = rows.token_slots.shape[0], 1
        self._bound_rows = rows

    def _attend_heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = heads_together(q), heads_together(k), heads_together(v)
        call = self._call
        call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.q_stride, call.k_stride, call.v_stride = q.stride(0), k.stride(0), v.stride(0)
        call.cos = call.sin = call.q_bias = call.k_bias = None
        call.rope = ROPE_NONE
        return self._run(layer, q)

    def _attend_projected(self, layer: int, qkv: Tensor, rotation: Rotation, qk_bias: Tensor | None) -> Tensor:
        g, call = self.geometry, self._call
        qkv = qkv.contiguous()
        size, start = g.head_dim * qkv.element_size(), qkv.data_ptr()
        call.q, call.k = start, start + g.num_heads * size
        call.v = start + (g.num_heads + g.num_kv_heads) * size
        call.q_stride = call.k_stride = call.v_stride = qkv.shape[-1]
        call.cos, call.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        call.rope = ROPE_INTERLEAVED if rotation.interleaved else ROPE_SPLIT_HALF
        call.q_bias = call.k_bias = None
        if qk_bias is not None:
            call.q_bias, call.k_bias = qk_bias.data_ptr(), qk_bias.data_ptr() + g.num_heads * size
        return self._run(layer, qkv)

    def _run(self, layer: int, like: Tensor) -> Tensor:
        if like.dtype is not self.geometry.dtype:
            raise TypeError(f"queries are {like.dtype}, the cache is {self.geometry.dtype}")
        out = like.new_empty((like.shape[0], self.geometry.num_heads * self.geometry.head_dim))
        self._call.out, self._call.out_stride = out.data_ptr(), out.shape[1]
        self.kernels.attend(self._layer_addresses[layer], self._row_address, self._call_address)
        return out


def unsupported(geometry: CacheGeometry) -> str | None:
    """Why the C kernels cannot serve this geometry, or None."""
    if geometry.device.type != "cpu":
        return f"the C attention kernels run on the cpu, not on {geometry.device}"
    if geometry.dtype not in (torch.float32, torch.bfloat16):
        return f"the C attention kernels take float32 and bfloat16, not {geometry.dtype}"
    if geometry.head_dim % 8:
        return f"the C attention kernels need a head_dim that is a multiple of 8, not {geometry.head_dim}"
    return None


def _int32_address(x: Tensor) -> int:
    """Address of a contiguous int32 tensor; C would read anything else as nonsense."""
    if x.dtype is not torch.int32 or not x.is_contiguous():
        raise TypeError(f"expected a contiguous int32 tensor, got {x.dtype} with strides {x.stride()}")
    return x.data_ptr()
