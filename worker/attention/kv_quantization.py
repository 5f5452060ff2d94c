"""K and V in a byte a number: quantised as they are written, with a scale a token, KV head and plane.

A vector x of K or V [head_dim] becomes a scale s and a code c a number, and is read as s * c, in fp32::

    s = bfloat16(max |x| / most)    most: 127 for int8, 448 for fp8 (e4m3)
    c = x / s, rounded to the nearest code, ties to even

A bfloat16 scale is within 2^-9 of the quotient, so no code exceeds the largest. Where s is below the smallest normal number
the codes are 0; where it is no finite number, too, so that the vector reads as NaN. This file is the oracle of the C and Triton
kernels, which give the same bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.common.kv_cache_dtype import KVCacheDtype

MOST = {KVCacheDtype.INT8: 127.0, KVCacheDtype.FP8: 448.0}
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
LARGEST_SCALE = torch.finfo(torch.float32).max
SCALE_TYPE = torch.bfloat16
_CODES = {KVCacheDtype.INT8: torch.int8, KVCacheDtype.FP8: torch.float8_e4m3fn}


class Quantized(NamedTuple):
    """K or V as they are stored."""

    codes: Tensor  # uint8 [..., head_dim], the bits of int8 or e4m3
    scales: Tensor  # bfloat16 [...]


def quantize(x: Tensor, kind: KVCacheDtype) -> Quantized:
    """x [..., head_dim] of any floating type."""
    wide = x.float()
    scales = (wide.abs().amax(-1) / MOST[kind]).to(SCALE_TYPE)
    divisors = scales.float().unsqueeze(-1)
    usable = (divisors >= SMALLEST_SCALE) & (divisors <= LARGEST_SCALE)
    quotients = torch.where(usable, wide / divisors, 0.0)
    nearest = quotients.round() if kind is KVCacheDtype.INT8 else quotients  # e4m3 is rounded to as it is converted
    return Quantized(nearest.to(_CODES[kind]).view(torch.uint8), scales)


def dequantize(stored: Quantized, kind: KVCacheDtype) -> Tensor:
    """What is read: fp32 [..., head_dim]."""
    return stored.codes.view(_CODES[kind]).float() * stored.scales.float().unsqueeze(-1)
