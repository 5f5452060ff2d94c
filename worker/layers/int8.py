"""Int8 weights: one signed byte a weight and a scale an output, activations quantised a row at a time.

A row's scale is that of its own largest value, so its bits depend on no other row. Sums are exact integers: the torch
product here and the C kernels (cpu/int8.h) give the same bits. Knows nothing of models.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127
SCALE_BYTES = 4  # of an output
SMALLEST = 2.0**-100  # rows below it count as zeros: 127 over less is no number
EXACT_WIDTH = 1024  # inputs whose products fp32 adds up exactly: 1024 * 127 * 127 < 2 ** 24


class Int8Weight(NamedTuple):
    """A weight [out, in] as values * scales."""

    values: Tensor  # int8 [out, in]
    scales: Tensor  # fp32 [out]

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.values.shape


Weight = Tensor | Int8Weight  # [out, in]


def quantize(weight: Tensor) -> Int8Weight:
    """Weight [out, in] to the nearest bytes, symmetric, a scale an output."""
    wide = weight.float()
    scales = wide.abs().amax(1) / LARGEST
    values = (wide / scales.clamp(min=SMALLEST).unsqueeze(1)).round()
    return Int8Weight(values.to(torch.int8), scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, in] -> bytes as fp32 [N, in], scales fp32 [N, 1]. A row that holds no numbers gets a scale that is none."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)  # NaN where one is in the row
    counts = (largest >= SMALLEST) & largest.isfinite()
    inverse = torch.full_like(largest, LARGEST) / largest  # not a number over a tensor, which torch rounds twice
    values = torch.where(counts, (wide * inverse).round(), 0.0)
    scales = torch.where(counts, largest / LARGEST, 0.0)
    return values, scales.masked_fill(~largest.isfinite(), torch.nan)


def int8_product(x: Tensor, weight: Int8Weight) -> Tensor:
    """x [N, in] @ weight.T in x's type; every sum is an exact integer, so its order is no matter."""
    values, scales = quantize_rows(x)
    parts = zip(torch.split(values, EXACT_WIDTH, -1), torch.split(weight.values, EXACT_WIDTH, -1), strict=True)
    sums = sum((F.linear(q, w.float()).to(torch.int32) for q, w in parts), torch.zeros((), dtype=torch.int32))
    return (sums.float() * scales * weight.scales).to(x.dtype)


def join(parts: Sequence[Weight]) -> Weight:
    """Weights of one kind and equal inputs, their outputs one behind the other."""
    if len(parts) == 1:
        return parts[0]
    values = [part if isinstance(part, Tensor) else part.values for part in parts]
    scales = [part.scales for part in parts if isinstance(part, Int8Weight)]
    return Int8Weight(torch.cat(values), torch.cat(scales)) if scales else torch.cat(values)
