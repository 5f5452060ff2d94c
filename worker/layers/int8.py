"""Int8 weights: one signed byte a weight and a scale a group of an output's inputs, activations quantised a row at a time.

A row's scale is its own, so its bits depend on no other row. Few inputs of a row are often far beyond the others, and bytes
with the largest's scale would leave nothing of these: up to one input in WIDE_EVERY is wide, of up to 15 bits, so that
the scale suits the rest. Sums are exact integers: the torch product here and the C kernels (cpu/int8.h) give the same bits.
Knows nothing of models.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127
WIDE_EVERY = 64
WIDE_BITS = 7  # more than a byte
MOST_WIDE = 256  # of a row: so that sums of up to 90,000 inputs are within 32 bits
SCALE_BYTES = 4  # of a group
GROUP = 128  # inputs of an output that share a scale, a multiple of 64
SMALLEST = 2.0**-100  # rows below it count as zeros: 127 over less is no number


class Int8Weight(NamedTuple):
    """A weight [out, in] as values times the scale of their group."""

    values: Tensor  # int8 [out, in]
    scales: Tensor  # fp32 [out, groups]
    group: int = GROUP  # inputs of one; at least ``in`` where an output has one scale

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.values.shape

    def whole(self) -> Tensor:
        """The weight that is meant, fp32 [out, in]."""
        return self.values * self.scales.repeat_interleave(self.group, 1)[:, : self.shape[1]]

    def in_groups(self) -> "Int8Weight":
        """The same with scales by GROUP, where an output has one."""
        return (
            Int8Weight(self.values, self.scales.expand(-1, groups(self.shape[1])))
            if self.scales.shape[1] == 1
            else self
        )


def groups(width: int) -> int:
    """How many scales an output of ``width`` inputs has."""
    return -(-width // GROUP)


Weight = Tensor | Int8Weight  # [out, in]


def quantize(weight: Tensor, group: int = GROUP) -> Int8Weight:
    """Weight [out, in] to the nearest bytes, symmetric."""
    parts = torch.split(weight.float(), group, 1)
    scales = torch.stack([part.abs().amax(1) for part in parts], 1) / LARGEST
    steps = torch.split(scales.clamp(min=SMALLEST), 1, 1)
    values = torch.cat([(part / step).round() for part, step in zip(parts, steps, strict=True)], 1)
    return Int8Weight(values.to(torch.int8), scales, group)


def wide_inputs(width: int) -> int:
    """How many of a row's inputs may be wide."""
    return min(-(-width // WIDE_EVERY), MOST_WIDE)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, in] -> integers as fp32 [N, in], scales fp32 [N, 1].

    The scale is largest / (127 * 2 ** t), with the greatest t up to WIDE_BITS at which no more than ``wide_inputs`` are
    beyond largest / 2 ** t; all others are bytes. A row that holds no numbers gets a scale that is none.
    """
    wide = x.float()
    sizes = wide.abs()
    largest = sizes.amax(-1, keepdim=True)  # NaN where one is in the row
    counts = (largest >= SMALLEST) & largest.isfinite()
    steps = torch.full_like(largest, LARGEST)
    for bits in range(1, WIDE_BITS + 1):
        beyond = (sizes > largest * 2.0**-bits).sum(-1, keepdim=True)
        steps = torch.where(beyond <= wide_inputs(x.shape[-1]), LARGEST * 2.0**bits, steps)
    values = torch.where(counts, (wide * (steps / largest)).round(), 0.0)
    scales = torch.where(counts, largest / steps, 0.0)
    return values, scales.masked_fill(~largest.isfinite(), torch.nan)


def int8_product(x: Tensor, weight: Int8Weight) -> Tensor:
    """x [N, in] @ weight.T in x's type; the sum of a group is an exact integer, so its order is no matter."""
    values, scales = quantize_rows(x)
    total = torch.zeros(())
    parts = zip(torch.split(values, weight.group, -1), torch.split(weight.values, weight.group, -1), strict=True)
    for group, (q, w) in enumerate(parts):
        total = total + F.linear(q.double(), w.double()).float() * weight.scales[:, group]
    return (total * scales).to(x.dtype)


def join(parts: Sequence[Weight]) -> Weight:
    """Weights of one kind and equal inputs, their outputs one behind the other."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, Int8Weight)]
    if not quantized:
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    if len({part.group for part in quantized}) > 1:
        quantized = [part.in_groups() for part in quantized]
    values, scales = [part.values for part in quantized], [part.scales for part in quantized]
    return Int8Weight(torch.cat(values), torch.cat(scales), quantized[0].group)
