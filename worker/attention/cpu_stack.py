"""Hands a whole BlockStack to the C kernels: builds the argument structures once, then one call a run.

Only stacks whose products are all packed can go this way (linear.py); the result is bit for bit that of the plain
loop. Knows the structures, not what the kernels do.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.worker.attention.backend import CacheGeometry
from depthbatch.worker.layers.blocks import Block, BlockStack
from depthbatch.worker.layers.cpu.library import Function, TypedKernels
from depthbatch.worker.layers.cpu.structs import (
    ROPE_INTERLEAVED,
    ROPE_SPLIT_HALF,
    BlockArgs,
    StackArgs,
    StackCall,
)
from depthbatch.worker.layers.linear import GatedLinear, Linear, PackedInt8Product, PackedProduct
from depthbatch.worker.layers.rotary import Rotation

KEPT_ROWS = 512  # scratch for more rows than this (long prefill) is given back after the call
ROW_PADDING = 32  # elements between scratch rows: rows a power of two apart would share few cache sets


class Widths(NamedTuple):
    """Elements a row of each scratch area."""

    hidden: int
    projected: int
    attended: int
    inner: int
    quantised: int  # bytes; 0 where no layer is int8


class FusedStack:
    """A BlockStack ready for the C kernels."""

    def __init__(self, args: StackArgs, widths: Widths, function: Function, kept: list[object]) -> None:
        self.args, self.widths, self._function = args, widths, function
        self._kept = kept  # tensors and structures that the arguments point to
        self._call = StackCall()
        self._scratch: tuple[Tensor, ...] = ()
        self._rows = 0  # rows the scratch has room for

    def run(self, x: Tensor, rotation: Rotation, row_address: int) -> Tensor:
        """x [N, D] -> [N, D]; row_address: the RowArgs of these rows."""
        n = x.shape[0]
        call, x = self._call, x.contiguous()
        if n > self._rows:
            self._scratch, self._rows = point_into_scratch(call, self.widths, n, x.dtype), n
        out = torch.empty_like(x)
        call.x, call.out = x.data_ptr(), out.data_ptr()
        call.cos, call.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        call.rope = ROPE_INTERLEAVED if rotation.interleaved else ROPE_SPLIT_HALF
        self._function(ctypes.addressof(self.args), row_address, ctypes.addressof(call))
        if self._rows > KEPT_ROWS:
            self._scratch, self._rows = (), 0
        return out


def point_into_scratch(call: StackCall, widths: Widths, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Cuts fresh scratch for ``rows`` rows: normed | projected | attended | inner | branch. Who makes the call keeps it."""
    w = widths
    strides = [w.hidden + ROW_PADDING, w.projected + ROW_PADDING, w.attended + ROW_PADDING, w.inner + ROW_PADDING]
    scratch = torch.empty(rows * (sum(strides) + w.hidden), dtype=dtype)
    quantised = torch.empty(rows * w.quantised, dtype=torch.int8)
    call.normed_stride, call.projected_stride, call.attended_stride, call.inner_stride = strides
    call.quantised = quantised.data_ptr()
    address = scratch.data_ptr()
    for name, stride in zip(("normed", "projected", "attended", "inner"), strides, strict=True):
        setattr(call, name, address)
        address += rows * stride * dtype.itemsize
    call.branch = address
    return scratch, quantised


def fuse(
    stack: BlockStack, geometry: CacheGeometry, kernels: TypedKernels, layer_addresses: Sequence[int]
) -> FusedStack | None:
    """None when the kernels cannot run this stack as a whole: a subclass, whose methods they would not see, or layers and
    vectors of other types, sizes or places than they read."""
    if type(stack) is not BlockStack or not stack.blocks:
        return None
    hidden = stack.blocks[0].qkv.in_features
    if not all(_fusible(block, geometry, hidden) for block in stack.blocks):
        return None
    if not _plain_vector(stack.final_norm, geometry, hidden):
        return None
    blocks = (BlockArgs * len(stack.blocks))(
        *(
            _block_args(block, geometry, layer_addresses[layer])
            for layer, block in enumerate(stack.blocks, stack.first_layer)
        )
    )
    first = stack.blocks[0]
    args = StackArgs(
        blocks=ctypes.addressof(blocks),
        final_norm=_address(stack.final_norm),
        num_blocks=len(stack.blocks),
        hidden=hidden,
        norm_on_sum=stack.norm_on_sum,
        eps=stack.eps,
    )
    widths = Widths(
        hidden,
        first.qkv.out_features,
        first.out.in_features,
        max(b.down.in_features for b in stack.blocks),
        max(_packed(layer).row_bytes for b in stack.blocks for layer in (b.qkv, b.out, b.gate_up, b.down)),
    )
    return FusedStack(args, widths, kernels.stack, [stack, blocks])


def _packed(layer: Linear | GatedLinear) -> PackedProduct | PackedInt8Product:
    assert isinstance(layer.product, PackedProduct | PackedInt8Product)
    return layer.product


def _fusible(block: Block, geometry: CacheGeometry, hidden: int) -> bool:
    head_dim = geometry.head_dim
    q, kv = geometry.num_heads * head_dim, geometry.num_kv_heads * head_dim
    inner = block.down.in_features
    layers: tuple[tuple[Linear | GatedLinear, type, int, int], ...] = (
        (block.qkv, Linear, hidden, q + 2 * kv),
        (block.out, Linear, q, hidden),
        (block.gate_up, GatedLinear, hidden, inner),
        (block.down, Linear, inner, hidden),
    )
    norms = (block.norm_in, block.norm_mlp_in, block.norm_out, block.norm_mlp_out)
    return (
        type(block) is Block
        and all(
            type(layer) is kind
            and isinstance(layer.product, PackedProduct | PackedInt8Product)
            and layer.product.takes(geometry.dtype)
            and (layer.in_features, layer.out_features) == (inputs, outputs)
            for layer, kind, inputs, outputs in layers
        )
        and all(_plain_vector(norm, geometry, hidden) for norm in norms)
        and _plain_vector(block.q_norm, geometry, q, head_dim)
        and _plain_vector(block.k_norm, geometry, kv, head_dim)
        and _plain_vector(block.qk_bias, geometry, q + kv)
    )


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _plain_vector(x: Tensor | None, geometry: CacheGeometry, *lengths: int) -> bool:
    """Whether the kernels can read ``x`` as a vector of one of ``lengths``, or there is none."""
    if x is None:
        return True
    return x.is_cpu and x.is_contiguous() and x.dtype is geometry.dtype and x.shape in {(n,) for n in lengths}


def _block_args(block: Block, geometry: CacheGeometry, layer_address: int) -> BlockArgs:
    bias = _address(block.qk_bias)
    k_bias = None if bias is None else bias + geometry.num_heads * geometry.head_dim * geometry.dtype.itemsize
    return BlockArgs(
        norm_in=_address(block.norm_in),
        norm_mlp_in=_address(block.norm_mlp_in),
        norm_out=_address(block.norm_out),
        norm_mlp_out=_address(block.norm_mlp_out),
        q_norm=_address(block.q_norm),
        k_norm=_address(block.k_norm),
        q_norm_width=0 if block.q_norm is None else len(block.q_norm),
        k_norm_width=0 if block.k_norm is None else len(block.k_norm),
        q_bias=bias,
        k_bias=k_bias,
        cache=layer_address,
        qkv=_packed(block.qkv).args,
        out=_packed(block.out).args,
        gate_up=_packed(block.gate_up).args,
        down=_packed(block.down).args,
    )
