"""Linear layers, their weights reordered once for the processor where that pays.

Three ways, by what the processor has: our packed AVX-512 products (every row's bits are independent of the batch),
oneDNN's blocked bf16 weights (AMX; private torch operators), F.linear everywhere else.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.worker.layers.cpu.library import Kernels, cpu_kernels
from depthbatch.worker.layers.ops import small_ops

Product = Callable[[Tensor], Tensor]
DECODE_ROWS = 64  # the row count oneDNN lays the weight out for


class Linear:
    """y = x @ weight.T without bias; weight [out, in].

    The weight may be stored reordered, so it is not readable back. ``sum_of_ranks``: where ranks have a part of the
    inputs each, makes the whole output [N, out] out of theirs.
    """

    def __init__(self, weight: Tensor, sum_of_ranks: Product | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        product = choose_product(weight)
        self.product: Product = product if sum_of_ranks is None else lambda x: sum_of_ranks(product(x))

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out], in the type of the weight."""
        return self.product(x)


class GatedLinear:
    """silu(gate) * up, where gate and up are the halves of x @ weight.T; weight [2I, in]."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape[0] // 2, weight.shape[1]
        self.product = choose_product(weight, gated=True)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, I]."""
        return self.product(x)


class PackedProduct:
    """x @ weight.T by the C kernels; gated: the fused silu_mul of it, rounded where the separate operators round."""

    def __init__(self, weight: Tensor, kernels: Kernels, gated: bool = False) -> None:
        product = kernels.by_type[weight.dtype].linear
        assert product is not None
        self.columns, self.width = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
        self.packed = kernels.pack(weight, gated)
        self.gated, self._address, self._call = gated, self.packed.data_ptr(), product

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, columns]."""
        if x.dtype is not self.packed.dtype or x.shape[-1] != self.width:
            raise TypeError(f"input is {x.dtype} [.., {x.shape[-1]}], not {self.packed.dtype} [.., {self.width}]")
        x = x.contiguous()
        n = x.numel() // self.width
        out = x.new_empty((*x.shape[:-1], self.columns))
        self._call(out.data_ptr(), x.data_ptr(), self._address, n, self.columns, self.width, self.gated)
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


def choose_product(weight: Tensor, gated: bool = False) -> Product:
    """The fastest product for a weight [out, in] on its device."""
    plain = type(weight) is Tensor and weight.is_cpu and not weight.requires_grad
    if plain and weight.dtype is torch.bfloat16 and _has_amx():
        return _with_silu_mul(BlockedProduct(weight), gated)
    kernels = cpu_kernels() if plain else None
    if kernels is not None and kernels.can_multiply(weight, gated):
        return PackedProduct(weight, kernels, gated)
    return _with_silu_mul(lambda x: F.linear(x, weight), gated)


def _with_silu_mul(product: Product, gated: bool) -> Product:
    def gated_product(x: Tensor) -> Tensor:
        both = product(x)
        return small_ops(both).silu_mul(both)

    return gated_product if gated else product


def _has_amx() -> bool:
    """Whether the processor has matrix tiles, where oneDNN is faster than AVX-512 products, and torch its operators."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return bool(has_tiles) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
