"""Rotary angle tables.

The frequencies are computed on the host, so that angles, exact products in fp32, are the same on every device.
"""

from typing import NamedTuple

import numpy as np
import torch


class Rotation(NamedTuple):
    """Rotary embedding of the rows at hand, so that a backend may rotate q and k on their way into the cache."""

    interleaved: bool  # pairs (2i, 2i + 1) instead of (i, i + Dh/2)
    cos: torch.Tensor  # fp32 [N, Dh/2]
    sin: torch.Tensor  # fp32 [N, Dh/2]


class RotaryTable:
    """fp32 cosines and sines of positions 0 .. max_positions - 1.

    Every pair of a head's ``head_dim`` features has one frequency, base ** (-2i / head_dim); ``base`` is rope_theta.
    """

    def __init__(self, max_positions: int, head_dim: int, base: float, interleaved: bool, device: torch.device) -> None:
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequencies = (np.float32(1.0) / np.float32(base) ** exponents).tolist()
        places = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(places, torch.tensor(frequencies, dtype=torch.float32, device=device))
        self._cos = angles.cos()  # [P, Dh / 2]
        self._sin = angles.sin()
        self._interleaved = interleaved

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at positions [N]."""
        return Rotation(self._interleaved, self._cos.index_select(0, positions), self._sin.index_select(0, positions))
