"""Counter-based random numbers: pure functions of (seed, position, lane), the same on every device and in every batch.

Knows nothing of requests or models. There is no generator state to restore after a crash and nothing to synchronise:
all draws are int64 tensor operations, so they can be captured, compiled and traced on fake tensors. A *lane* separates
the draws that one (seed, position) needs; the users share this table::

    lanes 0 .. 2**31 - 1          sampling of the token at ``position``
    STATE_LANE + feature          initial recurrent state of the token at ``position``

The mixer is splitmix64's (common/splitmix64.py), applied once for each of seed, position and lane, each time after
adding a multiple of an odd constant, so that equal sums of position and lane do not meet.
"""

import torch

from depthbatch.common import splitmix64
from depthbatch.common.splitmix64 import SIGNED

STATE_LANE = 1 << 32

_LOW_32 = 0xFFFFFFFF
_MANTISSA_BITS = 23  # k + 0.5 with k < 2**23 is exact in fp32, so the result is never 0 or 1


def mix64(x: torch.Tensor) -> torch.Tensor:
    """Mixes int64 values of any shape."""
    return splitmix64.mix64(x, SIGNED)


def row_key(seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """int64 key of (seed, position): integer tensors that broadcast; the seed's halves are read as 32 bits each."""
    seed = (seed_low.long() & _LOW_32) | (seed_high.long() << 32)
    return mix64(mix64(seed + SIGNED.golden) + (position.long() + 1) * SIGNED.golden)


def bits_of_key(key: torch.Tensor, lane: torch.Tensor | int) -> torch.Tensor:
    """64 random bits as int64 from ``row_key`` and a lane that broadcasts against it (e.g. [N, 1] and [V])."""
    return mix64(key + (lane + 1) * SIGNED.multiplier_1)


def uniform_of_key(key: torch.Tensor, lane: torch.Tensor | int) -> torch.Tensor:
    """fp32 in the open interval (0, 1); arguments as for ``bits_of_key``."""
    top = (bits_of_key(key, lane) >> (64 - _MANTISSA_BITS)) & ((1 << _MANTISSA_BITS) - 1)
    return (top.to(torch.float32) + 0.5) * 2.0**-_MANTISSA_BITS


def uniform(
    seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor, lane: torch.Tensor | int
) -> torch.Tensor:
    """Uniform draws, a function of (seed, position, lane) only.

    Args:
        seed_low, seed_high: halves of 64-bit seeds, any integer type (int32 bit patterns included).
        position: position of the token that the draw is for, any integer type.
        lane: which of that token's draws, an int or an int64 tensor; see the module's table.

    All broadcast. Returns fp32 in [2**-24, 1 - 2**-24], 2**23 equally likely values.
    """
    return uniform_of_key(row_key(seed_low, seed_high, position), lane)
