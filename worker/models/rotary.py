"""Rotary angle tables. The table is computed on the CPU, so every device rotates by the same bits."""

import torch
from depthbatch.worker.attention.interface import Rotation


class RotaryTable:
    """fp32 cosines and sines of every position.

    Args:
        max_positions: rows of the table.
        head_dim: features a head; every pair of them has one frequency base ** (-2i / head_dim).
        base: rope_theta.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + head_dim / 2).
        device: where the table lives.
    """

    def __init__(self, max_positions: int, head_dim: int, base: float, interleaved: bool, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), 1.0 / base**exponents)
        self._cos = angles.cos().to(device)  # [P, Dh / 2]
        self._sin = angles.sin().to(device)
        self._interleaved = interleaved

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at positions [N]."""
        return Rotation(self._interleaved, self._cos.index_select(0, positions), self._sin.index_select(0, positions))
