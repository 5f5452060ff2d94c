"""The 64-bit finaliser of splitmix64 (Steele, Lea and Flood 2014, variant 13 of Stafford), in any wrapping arithmetic.

One formula for numpy's uint64 and torch's int64, so that seeds of choices, random draws and a simulated device's tokens
mix alike. Imports no torch.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np

Bits = TypeVar("Bits")  # 64-bit integers of any shape
ALL_BITS = (1 << 64) - 1


class Constants(NamedTuple):
    """Odd multipliers, as the arithmetic at hand writes 64 bits."""

    golden: int  # 2**64 / golden ratio
    multiplier_1: int
    multiplier_2: int


UNSIGNED = Constants(0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SIGNED = Constants(*(value - (1 << 64) for value in UNSIGNED))


def mix64(x: Bits, constants: Constants) -> Bits:
    """Bijective mixing: every input bit flips every output bit with probability 1/2.

    ``x``: a uint64 array with UNSIGNED, an int64 tensor with SIGNED; right shifts are masked to be logical in both.
    """
    bits: Any = x
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * constants.multiplier_1
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * constants.multiplier_2
    mixed: Bits = bits ^ ((bits >> 31) & ((1 << 33) - 1))
    return mixed


def mix_int(x: int) -> int:
    """``mix64`` of one number modulo 2**64, in [0, 2**64)."""
    return int(mix64(np.array([x & ALL_BITS], np.uint64), UNSIGNED)[0])
