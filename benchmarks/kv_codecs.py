"""K and V in few bits a number, as ``bench kv-residuals`` compares them: what is read, and what it takes.

``Stored``: as the engine stores them. ``Odd``: 16 codes and a scale a vector. ``Uniform``: each vector by itself; groups of numbers
share a scale, 16 bits. ``Residual``: one plane of a token, the anchor, as that, and of the others what is left of them when a
multiple of the anchor is taken away, in fewer bits (ResidualQuant: the last plane is the anchor; a factor a vector by least
squares, 16 bits). With ``previous`` a plane's anchor is the plane before it, as it is read.

Scales of Uniform and Residual are the best of several, since few bits gain where the largest number is not met. ``rotated``
numbers are turned by a Hadamard matrix first (QuaRot), so that none sticks out.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.kv_quantization import dequantize, quantize

SCALE_BITS = 16
CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # of the largest number, by which a scale is chosen
SMALLEST = 1e-30  # keeps quotients of nothing by nothing from being none


class Codec(Protocol):
    """How K, or V, of a token is kept."""

    def __call__(self, x: Tensor) -> Tensor:
        """All planes of some tokens and heads, fp32 [planes, ..., head_dim] -> what is read of them."""
        ...

    def stored_bits(self, planes: int, head_dim: int) -> float:
        """Bits a number, mean of the planes."""
        ...

    def read_bits(self, planes: int, head_dim: int) -> float:
        """Bits that attention to a plane reads for each of its numbers, mean of the planes."""
        ...


def rotate(x: Tensor) -> Tensor:
    """x [..., n] turned by the Hadamard matrix of the largest power of two that divides n, once for every so many numbers;
    twice, and it is x."""
    width, step = x.shape[-1] & -x.shape[-1], 1
    turned = x / math.sqrt(width)
    while step < width:
        pairs = turned.reshape(*x.shape[:-1], -1, 2, step)
        one, other = pairs[..., 0, :], pairs[..., 1, :]
        turned = torch.stack((one + other, one - other), -2).flatten(-3)
        step *= 2
    return turned


def quantised(x: Tensor, bits: int, group: int) -> Tensor:
    """x [..., n], n a multiple of ``group``, as codes of ``bits`` bits and a bfloat16 scale a group give it back.

    Codes are the whole numbers from -(2^(bits-1) - 1) to that; of 2 bits -1.5, -0.5, 0.5 and 1.5.
    """
    groups = x.reshape(*x.shape[:-1], -1, group)
    half, most = (0.5, 1.5) if bits == 2 else (0.0, 2.0 ** (bits - 1) - 1)
    largest = groups.abs().amax(-1, keepdim=True)
    best, least = torch.zeros_like(groups), torch.full_like(largest, torch.inf)
    for clip in CLIPS:
        scale = (clip * largest / most).bfloat16().float()
        codes = ((groups / scale.clamp(min=SMALLEST) - half).round() + half).clamp(-most, most)
        error = (codes * scale - groups).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, codes * scale, best), torch.minimum(error, least)
    return best.view(x.shape)


def least_squares(x: Tensor, anchor: Tensor) -> Tensor:
    """By how much each anchor [..., n] is to be multiplied, to be as close to its x as it can: [..., 1]."""
    return (x * anchor).sum(-1, keepdim=True) / anchor.square().sum(-1, keepdim=True).clamp(min=SMALLEST)


@dataclass(frozen=True)
class Stored:
    """A value of --kv-cache-dtype."""

    kind: KVCacheDtype

    def __call__(self, x: Tensor) -> Tensor:
        return dequantize(quantize(x, self.kind), self.kind)

    def stored_bits(self, planes: int, head_dim: int) -> float:
        return 8 * self.kind.bytes_per_vector(head_dim, 4) / head_dim

    read_bits = stored_bits


@dataclass(frozen=True)
class Odd:
    """Odd whole numbers from -15 to 15 of turned vectors, a scale a vector."""

    def __call__(self, x: Tensor) -> Tensor:
        turned = rotate(x)
        scale = (turned.abs().amax(-1, keepdim=True) / 15).bfloat16().float()
        codes = (turned / scale.clamp(min=SMALLEST) * 0.5 + 7.5).round().clamp(0, 15)
        return rotate((2 * codes - 15) * scale)

    def stored_bits(self, planes: int, head_dim: int) -> float:
        return 4 + SCALE_BITS / head_dim

    read_bits = stored_bits


@dataclass(frozen=True)
class Uniform:
    """Every plane by itself."""

    bits: int
    group: int = 32  # numbers that share a scale
    rotated: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if not self.rotated:
            return quantised(x, self.bits, self.group)
        return rotate(quantised(rotate(x), self.bits, self.group))

    def stored_bits(self, planes: int, head_dim: int) -> float:
        return self.bits + SCALE_BITS / self.group

    read_bits = stored_bits


@dataclass(frozen=True)
class Residual:
    """One plane well, the others as what is left of them."""

    anchor: str  # "last", "first" or "previous" (the first plane begins)
    anchor_bits: int
    bits: int
    group: int = 32
    rotated: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        turned = rotate(x) if self.rotated else x
        begin = len(x) - 1 if self.anchor == "last" else 0
        read = torch.empty_like(turned)
        anchor = read[begin] = quantised(turned[begin], self.anchor_bits, self.group)
        for plane in (p for p in range(len(x)) if p != begin):
            multiple = least_squares(turned[plane], anchor).bfloat16().float() * anchor
            read[plane] = multiple + quantised(turned[plane] - multiple, self.bits, self.group)
            if self.anchor == "previous":
                anchor = read[plane]
        return rotate(read) if self.rotated else read

    def stored_bits(self, planes: int, head_dim: int) -> float:
        anchor, residual = self._bits(head_dim)
        return (anchor + (planes - 1) * residual) / planes

    def read_bits(self, planes: int, head_dim: int) -> float:
        """The anchor's as well; where planes hang on each other, those of all before."""
        anchor, residual = self._bits(head_dim)
        return anchor + residual * sum(n if self.anchor == "previous" else 1 for n in range(1, planes)) / planes

    def _bits(self, head_dim: int) -> tuple[float, float]:
        shared = SCALE_BITS / self.group
        return self.anchor_bits + shared, self.bits + shared + SCALE_BITS / head_dim
