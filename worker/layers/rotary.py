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


class Llama3Scaling(NamedTuple):
    """Slower angles for wavelengths beyond the trained context, blended between the two frequency factors."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: float


class Rope(NamedTuple):
    """How positions become angles."""

    base: float
    interleaved: bool
    scaling: Llama3Scaling | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """fp32 [head_dim / 2] radians a position: base ** (-2i / head_dim), scaled."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        plain: np.ndarray = np.float32(1.0) / np.float32(self.base) ** exponents
        if (s := self.scaling) is None:
            return plain
        turns = s.original_positions * plain / (2 * np.pi)  # over the trained context
        kept = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
        scaled: np.ndarray = (plain * (kept + (1.0 - kept) / s.factor)).astype(np.float32)
        return scaled


class RotaryTable:
    """fp32 cosines and sines of positions 0 .. max_positions - 1, for heads of ``head_dim`` features."""

    def __init__(self, max_positions: int, head_dim: int, rope: Rope, device: torch.device) -> None:
        frequencies = rope.frequencies(head_dim).tolist()
        places = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(places, torch.tensor(frequencies, dtype=torch.float32, device=device))
        self.cos = angles.cos()  # [P, Dh / 2]
        self.sin = angles.sin()
        self.interleaved = rope.interleaved

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at positions [N]."""
        return Rotation(self.interleaved, self.cos.index_select(0, positions), self.sin.index_select(0, positions))
