"""Linear layers, their weights reordered once for the processor where that pays.

Three ways, by what the processor has: our packed products (AVX-512 or AVX2; every row's bits are independent of the batch),
oneDNN's blocked bf16 weights (AMX; private torch operators), F.linear everywhere else. Int8 weights have one, ours, and
its twin in torch.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.worker.layers.cpu.library import Kernels, cpu_kernels
from depthbatch.worker.layers.cpu.structs import PackedArgs
from depthbatch.worker.layers.int8 import Int8Weight, Weight, int8_product
from depthbatch.worker.layers.ops import small_ops

Product = Callable[[Tensor], Tensor]
DECODE_ROWS = 64  # the row count oneDNN lays the weight out for


class Linear:
    """y = x @ weight.T without bias; weight [out, in].

    The weight may be stored reordered, so it is not readable back. ``sum_of_ranks``: where ranks have a part of the
    inputs each, makes the whole output [N, out] out of theirs.
    """

    def __init__(self, weight: Weight, sum_of_ranks: Product | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        product = choose_product(weight)
        self.product: Product = product if sum_of_ranks is None else lambda x: sum_of_ranks(product(x))

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out], in the type of the weight; of an int8 weight in that of x."""
        return self.product(x)


class GatedLinear:
    """silu(gate) * up, where gate and up are the halves of x @ weight.T; weight [2I, in]."""

    def __init__(self, weight: Weight) -> None:
        self.out_features, self.in_features = weight.shape[0] // 2, weight.shape[1]
        self.product = choose_product(weight, gated=True)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, I]."""
        return self.product(x)


class PackedProduct:
    """x @ weight.T by the C kernels; gated: the fused silu_mul of it, rounded where the separate operators round."""

    row_bytes = 0  # of scratch

    def __init__(self, weight: Tensor, kernels: Kernels, gated: bool = False) -> None:
        product = kernels.by_type[weight.dtype].linear
        assert product is not None
        self.columns, self.width = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
        self.packed = kernels.pack(weight, gated)
        self.gated, self._address, self._call = gated, self.packed.data_ptr(), product

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether inputs may be of a type."""
        return self.packed.dtype is dtype

    @property
    def args(self) -> PackedArgs:
        """The layer as the kernels know it."""
        return PackedArgs(packed=self._address, scales=None, cols=self.columns, k=self.width, gated=self.gated)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, columns]."""
        if x.dtype is not self.packed.dtype or x.shape[-1] != self.width:
            raise TypeError(f"input is {x.dtype} [.., {x.shape[-1]}], not {self.packed.dtype} [.., {self.width}]")
        x = x.contiguous()
        n = x.numel() // self.width
        out = x.new_empty((*x.shape[:-1], self.columns))
        self._call(out.data_ptr(), x.data_ptr(), self._address, n, self.columns, self.width, self.gated)
        return out


class PackedInt8Product:
    """int8_product by the C kernels, bit for bit; gated: the fused silu_mul of it."""

    def __init__(self, weight: Int8Weight, kernels: Kernels, gated: bool = False) -> None:
        self.columns, self.width = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
        self.packed = kernels.pack_int8(weight, gated)
        self._by_type = {dtype: typed.int8_linear for dtype, typed in kernels.by_type.items()}
        self.row_bytes = kernels.int8_row_bytes(self.width)
        self.args = PackedArgs(
            packed=self.packed.values.data_ptr(),
            scales=self.packed.scales.data_ptr(),
            cols=self.columns,
            k=self.width,
            gated=gated,
            group=self.packed.group,
        )

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether inputs may be of a type."""
        return dtype in self._by_type

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, columns]."""
        if x.dtype not in self._by_type or x.shape[-1] != self.width:
            raise TypeError(f"input is {x.dtype} [.., {x.shape[-1]}], not fp32 or bf16 [.., {self.width}]")
        x = x.contiguous()
        n = x.numel() // self.width
        out = x.new_empty((*x.shape[:-1], self.columns))
        quantised = torch.empty(n * self.row_bytes, dtype=torch.int8)
        layer = ctypes.addressof(self.args)
        self._by_type[x.dtype](out.data_ptr(), x.data_ptr(), layer, n, quantised.data_ptr())
        return out


class BlockedProduct:
    """x @ weight.T by oneDNN with a reordered bf16 weight; the bits are those of F.linear."""

    def __init__(self, weight: Tensor) -> None:
        operators: Any = torch.ops.mkldnn
        self._weight: Tensor = operators._reorder_linear_weight(weight, DECODE_ROWS)
        self._call = operators._linear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        out: Tensor = self._call(x, self._weight, None, "none", [], "")
        return out


def choose_product(weight: Weight, gated: bool = False) -> Product:
    """The fastest product for a weight [out, in] on its device; int8 weights are for the CPU."""
    if isinstance(weight, Int8Weight):
        kernels = cpu_kernels()
        if kernels is not None:
            return PackedInt8Product(weight, kernels, gated)
        return _with_silu_mul(lambda x: int8_product(x, weight), gated)
    plain = type(weight) is Tensor and weight.is_cpu and not weight.requires_grad
    if plain and weight.dtype is torch.bfloat16 and _has_amx():
        return _with_silu_mul(BlockedProduct(weight), gated)
    kernels = cpu_kernels() if plain else None
    if kernels is not None and kernels.can_multiply(weight):
        return PackedProduct(weight, kernels, gated)
    return _with_silu_mul(lambda x: F.linear(x, weight), gated)


def _with_silu_mul(product: Product, gated: bool) -> Product:
    def gated_product(x: Tensor) -> Tensor:
        both = product(x)
        return small_ops(both).silu_mul(both)

    return gated_product if gated else product


def blocks_bf16() -> bool:
    """Whether torch has oneDNN's blocked weights, and the processor what they take in bf16: AVX2 alone is too little."""
    operators: Any = torch.ops.mkldnn
    return hasattr(operators, "_reorder_linear_weight") and bool(operators._is_mkldnn_bf16_supported())


def _has_amx() -> bool:
    """Whether the processor has matrix tiles, where oneDNN is faster than AVX-512 products, and torch its operators."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return bool(has_tiles) and blocks_bf16()
